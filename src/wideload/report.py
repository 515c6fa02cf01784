"""Turns files of results into one page of HTML that needs nothing else: tables, pictures, verdicts, and the origin of every figure.

Knows results, rooflines and explanations as they are stored; it must not measure, compute or judge anything anew.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wideload.analyze.explain import SCHEMA as EXPLAIN_SCHEMA
from wideload.analyze.explain import Explanation
from wideload.analyze.figure import Figure, Kind
from wideload.analyze.pattern import Pattern, operand_pattern
from wideload.decode import parse_json
from wideload.errors import DeviceError, WideloadError
from wideload.gpus import find_target
from wideload.measure.result import SCHEMA as BENCH_SCHEMA
from wideload.measure.result import BenchResult, Contender
from wideload.measure.roofline import SCHEMA as ROOFLINE_SCHEMA
from wideload.measure.roofline import Roofline
from wideload.measure.sweep import SCHEMA as SWEEP_SCHEMA
from wideload.measure.sweep import Sweep
from wideload.pictures import (
    DARK,
    LIGHT,
    Mark,
    Style,
    assume_roof,
    describe_access,
    draw_access,
    draw_roof,
    draw_samples,
    draw_sweep,
    mark_call,
    render,
)

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure as Canvas

__all__ = ["Cell", "Column", "Picture", "Record", "Section", "Table", "build_page", "build_sections", "read_record", "write_report"]

Record = BenchResult | Sweep | Explanation | Roofline

_CSS_PIXELS_PER_INCH = 96
_COMMIT_DIGITS = 12
_FROM = "from"


# ---- reading

_READERS: Mapping[str, tuple[str, Callable[[Mapping[str, Any]], Record]]] = {
    BENCH_SCHEMA: ("wideload bench --json", BenchResult.from_dict),
    SWEEP_SCHEMA: ("wideload bench --sweep --json", Sweep.from_dict),
    EXPLAIN_SCHEMA: ("wideload explain --json", Explanation.from_dict),
    ROOFLINE_SCHEMA: ("wideload roofline --json", Roofline.from_dict),
}
"""By schema: the command that writes it, and what reads it."""


def read_record(path: Path) -> Record:
    """Read a file of results; its ``schema`` says of what. Raises ``WideloadError``, which names the file, for anything else."""
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WideloadError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WideloadError(f"{path} is no JSON: {error}") from None
    schema = values.get("schema") if isinstance(values, dict) else None
    if not isinstance(schema, str) or schema not in _READERS:
        known = ", ".join(f"{name} ({command})" for name, (command, _) in _READERS.items())
        raise WideloadError(f"{path} holds {f'schema {schema!r}' if schema else 'no schema'}; allowed: {known}. Write it anew.")
    try:
        return _READERS[schema][1](values)
    except WideloadError as error:
        raise WideloadError(f"{path} is damaged: {error}") from None
    except (LookupError, TypeError, AttributeError) as error:
        raise WideloadError(f"{path} is damaged ({type(error).__name__}: {error})") from None


@contextmanager
def _naming(source: str) -> Iterator[None]:
    """What a record that was read cannot be shown for is an error that names its file."""
    try:
        yield
    except WideloadError as error:
        raise WideloadError(f"{source} cannot be shown: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise WideloadError(f"{source} cannot be shown: it is damaged ({type(error).__name__}: {error})") from error


# ---- what a page consists of


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; ``kind`` says how the figures below it came about, where they are all alike."""

    name: str
    is_number: bool = False
    kind: Kind | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A text, or a tag."""

    text: str
    kind: Kind | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A caption, headings, and a row of cells each."""

    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]

    @property
    def is_of_figures(self) -> bool:
        """Whether each row is a figure, with where it is from in the last column."""
        return self.columns[-1].name == _FROM


@dataclass(frozen=True, slots=True)
class Picture:
    """What draws it in a style, the stem of its file, and what it shows for those who do not see it."""

    name: str
    alt: str
    draw: Callable[[Style], Canvas]


@dataclass(frozen=True, slots=True)
class Image:
    """A picture that was drawn: as SVG for light and for dark pages, as PNG where that is wanted, and its size in CSS pixels."""

    light: bytes
    dark: bytes
    png: bytes | None
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Section:
    """One file, or what follows from several."""

    anchor: str
    title: str
    source: str
    verdicts: tuple[tuple[str, str, Figure], ...] = ()
    notes: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    pictures: tuple[Picture, ...] = ()


def build_page(sections: Sequence[Section]) -> str:
    """Return the page as HTML: style and pictures inside, no script, everything escaped.

    Raises ``WideloadError`` without sections, and where Jinja or matplotlib are not installed.
    """
    template = _load_template(sections)
    return _fill(template, sections, _draw_images(sections, with_png=False))


def write_report(
    sections: Sequence[Section], page: Path, folder: Path | None = None, *, with_png: bool = False, inputs: Iterable[Path] = ()
) -> list[Path]:
    """Write the page and, into a folder, each picture as SVG and, if wanted, as PNG; return the paths.

    The folder is made where it is not there. Raises ``WideloadError`` as `build_page` does and where a path cannot be written to, as it is
    a folder, one of ``inputs`` or another path to write to: then nothing is written.
    """
    pictures: dict[Path, tuple[tuple[str, str], bool]] = {}
    if folder is not None:
        for key in ((section.anchor, picture.name) for section in sections for picture in section.pictures):
            pictures |= {folder / f"{'-'.join(key)}.{kind}": (key, kind == "png") for kind in (("png", "svg") if with_png else ("svg",))}
    paths = [page, *pictures]
    try:
        _check_paths(paths, folder, inputs)
        template = _load_template(sections)
        images = _draw_images(sections, with_png=with_png)
        text = _fill(template, sections, images)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        for path, (key, is_png) in pictures.items():
            path.write_bytes((images[key].png if is_png else None) or images[key].light)
    except OSError as error:
        raise WideloadError(f"{error.filename or page} cannot be written: {error.strerror}") from None
    return paths


def _check_paths(paths: Sequence[Path], folder: Path | None, inputs: Iterable[Path]) -> None:
    inputs = tuple(inputs)
    for path in paths:
        if path.is_dir():
            raise WideloadError(f"{path} cannot be written: it is a folder. Name a file.")
        if any(path.exists() and path.samefile(given) for given in inputs):
            raise WideloadError(f"{path} cannot be written: it is one of the files to read. Name another.")
    if folder is None:
        return
    page, *pictures = (path.resolve() for path in paths)
    if page in (folder.resolve(), *folder.resolve().parents, *pictures):
        raise WideloadError(f"{paths[0]} cannot be both the page and where pictures go. Name another.")
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise WideloadError(f"{folder} cannot be a folder of pictures: {there} is a file. Name another.")


def _load_template(sections: Sequence[Section]) -> Template:
    try:
        import jinja2
    except ImportError as error:
        raise WideloadError(f"reports need Jinja, which cannot be imported ({error}): pip install 'wideload[plots]'") from None
    if not sections:
        raise WideloadError("there is nothing to report: name at least one file of results")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["data_uri"] = lambda svg: f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
    return environment.from_string((resources.files("wideload") / "report.html.j2").read_text(encoding="utf-8"))


def _fill(template: Template, sections: Sequence[Section], images: Mapping[tuple[str, str], Image]) -> str:
    return template.render(sections=sections, drawn=images, version=metadata.version("wideload"), tags=TAGS)


TAGS: Mapping[Kind, str] = {
    "measured": "on the GPU or CPU that is named",
    "computed": "from layouts, the plan, the compiled kernel, or from what was measured",
    "assumed": "from a table or another GPU, or from such a figure",
}
"""What the tags of figures mean."""


def _draw_images(sections: Iterable[Section], *, with_png: bool) -> dict[tuple[str, str], Image]:
    """By the anchor of the section and the name of the picture."""
    images = {}
    for section in sections:
        with _naming(section.source):
            for picture in section.pictures:
                images[section.anchor, picture.name] = _draw_image(picture, with_png)
    return images


def _draw_image(picture: Picture, with_png: bool) -> Image:
    canvas = picture.draw(LIGHT)
    width, height = (round(inches * _CSS_PIXELS_PER_INCH) for inches in canvas.get_size_inches())
    light, png = render(canvas, "svg"), render(canvas, "png") if with_png else None
    return Image(light, render(picture.draw(DARK), "svg"), png, width, height)


# ---- sections


def build_sections(records: Iterable[tuple[str, Record]]) -> tuple[Section, ...]:
    """Return a section for each record with the name of its source, and one for the roofline that explained calls share.

    A roofline shows the explained calls of its GPU, and a sweep has the ceilings of its GPU, where both are among the records.
    """
    records = tuple(records)
    roofs = [record for _, record in records if isinstance(record, Roofline)]
    calls = []
    for source, record in records:
        if isinstance(record, Explanation):
            with _naming(source):
                calls.append(_Call(source, record, mark_call(record)))
    sections = []
    for number, (source, record) in enumerate(records, start=1):
        with _naming(source):
            sections.append(_record_section(f"s{number}", source, record, roofs, calls))
    shared: dict[str, list[_Call]] = {}
    for call in calls:
        explanation = call.explanation
        if explanation.nominal_bandwidth and explanation.gpu and not any(_is_of(explanation, roof) for roof in roofs):
            shared.setdefault(explanation.gpu, []).append(call)
    for number, group in enumerate(shared.values(), start=1):
        with _naming(group[0].source):
            roof = assume_roof(group[0].explanation)
        sources = ", ".join(call.source for call in group)
        with _naming(sources):
            sections.append(_roof_section(f"r{number}", sources, roof, [call.marks for call in group]))
    return tuple(sections)


@dataclass(frozen=True, slots=True)
class _Call:
    """An explained call, from where, and its marks on a roofline."""

    source: str
    explanation: Explanation
    marks: tuple[Mark, ...]


def _record_section(anchor: str, source: str, record: Record, roofs: Sequence[Roofline], calls: Sequence[_Call]) -> Section:
    match record:
        case BenchResult():
            return _bench_section(anchor, source, record)
        case Sweep():
            uuids = {roof.uuid: roof for roof in roofs}
            return _sweep_section(anchor, source, record, uuids.get(record.points[0].result.environment.gpu_uuid or ""))
        case Explanation():
            return _explain_section(anchor, source, record)
        case Roofline():
            return _roof_section(anchor, source, record, [call.marks for call in calls if _is_of(call.explanation, record)])


def _is_of(explanation: Explanation, roof: Roofline) -> bool:
    """Whether a call was explained for the GPU of a roofline, which the driver and the table of GPUs name differently."""
    try:
        gpu = find_target(roof.device).gpu
    except DeviceError:
        gpu = None
    return explanation.gpu is not None and explanation.gpu in (roof.device, gpu.name if gpu else None)


_FIGURE_COLUMNS = (Column(""), Column("value", is_number=True), Column("unit"), Column(""), Column(_FROM))


def _figure_table(caption: str, figures: Mapping[str, tuple[str, Figure | None]]) -> Table:
    """A row a figure, of those that there are, each with its value as it is to be spelt."""
    rows = (
        (Cell(name), Cell(format(figure.value, spec)), Cell(figure.unit), Cell(figure.kind, figure.kind), Cell(figure.source))
        for name, (spec, figure) in figures.items()
        if figure is not None
    )
    return Table(caption, _FIGURE_COLUMNS, tuple(rows))


# ---- results

_TIME_COLUMNS = (
    Column("median us", is_number=True, kind="measured"),
    Column("p5 .. p95", is_number=True, kind="measured"),
    Column("+-", is_number=True, kind="computed"),
    Column("samples", is_number=True),
    Column("GB/s", is_number=True, kind="computed"),
    Column("of nominal", is_number=True, kind="computed"),
    Column("vs best", is_number=True, kind="computed"),
    Column("host us", is_number=True, kind="measured"),
    Column("labels"),
)


def _bench_section(anchor: str, source: str, result: BenchResult) -> Section:
    rows = [(contender.name, *_time_cells(result, contender)) for contender in result.contenders]
    names = ", ".join(contender.name for contender in result.contenders)
    samples = Picture("samples", f"Histogram of the samples of {names}", lambda style: draw_samples(result, style=style))
    return Section(
        anchor,
        result.subject.name,
        source,
        notes=tuple(_label_notes([result])),
        tables=(_time_table((Column(""),), rows), *_condition_tables(result)),
        pictures=(samples,) if any(contender.time_us for contender in result.contenders) else (),
    )


def _sweep_section(anchor: str, source: str, sweep: Sweep, roof: Roofline | None) -> Section:
    results = [point.result for point in sweep.points]
    sizes = tuple(Column(name, is_number=True) for name in sweep.points[0].sizes)
    rows = [
        (*(f"{size:,}" for size in point.sizes.values()), contender.name, *_time_cells(point.result, contender))
        for point in sweep.points
        for contender in point.result.contenders
    ]
    has_bytes = any(result.minimal_bytes and contender.time_us for result in results for contender in result.contenders)
    alt = f"Bandwidth of {results[0].subject.name} against the bytes that a call must move"
    pictures = (Picture("bandwidth", alt, lambda style: draw_sweep(sweep, roof, style=style)),) if has_bytes else ()
    return Section(
        anchor,
        f"{results[0].subject.name}, by size",
        source,
        notes=tuple(_label_notes(results)),
        tables=(_time_table((*sizes, Column("")), rows), *_condition_tables(results[-1])),
        pictures=pictures,
    )


def _time_table(first: tuple[Column, ...], rows: Sequence[tuple[str, ...]]) -> Table:
    """The columns that have any cell: a CPU has no nominal bandwidth, and its host no cost apart."""
    columns = (*first, *_TIME_COLUMNS)
    filled = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    return Table("Times", tuple(columns[index] for index in filled), tuple(tuple(Cell(row[index]) for index in filled) for row in rows))


def _time_cells(result: BenchResult, contender: Contender) -> Iterator[str]:
    time_us, bandwidth, share = contender.time_us, contender.bytes_per_second, result.share_of_nominal(contender)
    labels = " ".join(label.code for label in contender.labels)
    if time_us is None:
        yield from (*[""] * (len(_TIME_COLUMNS) - 1), labels)
        return
    best = min((c.time_us.median for c in result.contenders if c.is_ranked and c.time_us), default=None)
    yield f"{time_us.median:,.2f}"
    yield f"{time_us.p5:,.2f} .. {time_us.p95:,.2f}"
    yield "" if contender.relative_error is None else f"{contender.relative_error:.1%}"
    yield str(time_us.n)
    yield "" if bandwidth is None else f"{bandwidth / 1e9:,.4g}"
    yield "" if share is None else f"{share:.1%}"
    yield f"{time_us.median / best:.2f}x" if best is not None and contender.is_ranked else ""
    yield "" if contender.host_us is None else f"{contender.host_us:.1f}"
    yield labels


def _label_notes(results: Sequence[BenchResult]) -> Iterator[str]:
    """The first text of each label of each contender."""
    texts: dict[tuple[str, str], str] = {}
    for result in results:
        for contender in result.contenders:
            for label in contender.labels:
                texts.setdefault((contender.name, label.code), f"{contender.name}: {label}")
    yield from texts.values()


def _condition_tables(result: BenchResult) -> Iterator[Table]:
    """What the work needs at least, and on what it was measured; of a sweep, at its last size."""
    minimal = None if result.minimal_bytes is None else Figure(result.minimal_bytes, "B", "computed", "each operand and each result once")
    nominal = result.nominal_bandwidth
    least = None
    if minimal and nominal:
        least = Figure(minimal.value / nominal.value / 1e3, "us", nominal.kind, "minimal bytes / nominal bandwidth")
    figures = {"minimal bytes": (",", minimal), "nominal bandwidth": (",.0f", nominal), "least time": (",.2f", least)}
    bounds = _figure_table("Bounds", figures)
    if bounds.rows:
        yield bounds
    where, state = result.environment, result.gpu_state
    clocks = None if state.sm_clock_before_mhz is None else f"{state.sm_clock_before_mhz} -> {state.sm_clock_after_mhz} MHz"
    commit = (where.commit or "no commit")[:_COMMIT_DIGITS]
    conditions = {
        "arguments": ", ".join(map(str, result.arguments)),
        "checked against": result.checked_against,
        "GPU": where.gpu,
        "SM clock": clocks,
        "driver": where.driver,
        "CPU": f"{where.cpu}, {where.num_threads} threads",
        "versions": f"wideload {where.wideload} ({commit}), torch {where.torch}, Python {where.python}",
        "at": where.time_utc,
    }
    rows = tuple((Cell(name), Cell(value)) for name, value in conditions.items() if value)
    yield Table("Measured on", (Column(""), Column("")), rows)


# ---- explanations and rooflines


def _explain_section(anchor: str, source: str, explanation: Explanation) -> Section:
    kinds: Mapping[str, Kind] = {kind: kind for kind in TAGS}
    tables = tuple(
        Table(
            title,
            _FIGURE_COLUMNS,
            tuple(tuple(Cell(text, kinds.get(text) if column == 3 else None) for column, text in enumerate(row)) for row in rows),
        )
        for title, rows in explanation.tables
    )
    where = f"{explanation.gpu} ({explanation.arch})" if explanation.gpu else explanation.arch
    return Section(
        anchor,
        f"{explanation.function} on {where}, explained",
        source,
        verdicts=tuple((verdict.limit, f"{verdict.finding}. {verdict.next_step}", verdict.effect) for verdict in explanation.verdicts),
        tables=tables,
        pictures=tuple(_access_pictures(explanation)),
    )


def _access_pictures(explanation: Explanation) -> Iterator[Picture]:
    """What the first warp touches of each operand; operands that are alike share a picture."""
    names: dict[Pattern, list[str]] = {}
    for operand in explanation.operands:
        pattern = operand_pattern(explanation, operand)
        if pattern is not None and pattern.lanes:
            names.setdefault(pattern, []).append(operand.name)
    for number, (pattern, operands) in enumerate(names.items(), start=1):
        title = ", ".join(operands)
        yield Picture(f"access-{number}", f"{title}: {describe_access(pattern)}", partial(_draw_access, pattern, title))


def _draw_access(pattern: Pattern, title: str, style: Style) -> Canvas:
    return draw_access(pattern, title, style=style)


def _roof_section(anchor: str, source: str, roof: Roofline, calls: Sequence[Sequence[Mark]]) -> Section:
    marks = [mark for call in calls for mark in call]
    figures = {name.strip(): (",.0f" if figure.value >= 1000 else ".3g", figure) for name, figure in roof.figures.items()}
    tables = [_figure_table("Roof", figures)]
    if marks:
        tables.append(_mark_table(marks))
    alt = f"Roofline of {roof.device} with {len(marks)} marks of explained calls"
    picture = Picture("roofline", alt, lambda style: draw_roof(roof, calls, style=style))
    return Section(anchor, f"Roofline of {roof.device}", source, notes=roof.notes, tables=tuple(tables), pictures=(picture,))


def _mark_table(marks: Sequence[Mark]) -> Table:
    columns = (
        Column("call"),
        Column("unit"),
        Column("op/B", is_number=True, kind="computed"),
        Column("1e12 op/s", is_number=True),
        Column(""),
        Column(_FROM),
    )
    rows = tuple(
        (
            Cell(mark.name),
            Cell(mark.unit),
            Cell(f"{mark.intensity.value:.3g}"),
            Cell(f"{mark.rate.value / 1e12:.3g}"),
            Cell(mark.rate.kind, mark.rate.kind),
            Cell(mark.rate.source),
        )
        for mark in marks
    )
    return Table("Explained calls", columns, rows)
