"""Turns the results of one benchmark, at one size or many, into a table, Markdown, CSV and JSON, and two such into verdicts.

Knows results; it must not know how they were measured, nor what the sizes are sizes of.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from wideload.decode import check_schema, decode, parse_json
from wideload.errors import WideloadError
from wideload.measure.compare import CONFIDENCE, SAME_WITHIN, Comparison, Comparisons, check_bounds, compare_results
from wideload.measure.compare import SCHEMA as COMPARISON_SCHEMA
from wideload.measure.result import SCHEMA as BENCH_SCHEMA
from wideload.measure.result import BenchResult, Contender, print_plain

__all__ = ["SCHEMA", "Point", "Sweep", "SweepComparison", "compare_sweeps", "read_sweep"]

SCHEMA = "wideload.sweep/1"
"""The number behind the slash grows when a key changes its name or its meaning."""

Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Point:
    """What was measured at these sizes."""

    sizes: Sizes
    result: BenchResult


@dataclass(frozen=True)
class Sweep:
    """The results of one benchmark. One result without sizes is printed and stored as `BenchResult` does it."""

    points: tuple[Point, ...]

    @property
    def _single(self) -> BenchResult | None:
        return self.points[0].result if len(self.points) == 1 and not self.points[0].sizes else None

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        if self._single is not None:
            return self._single.to_dict()
        return {"schema": SCHEMA, "points": [{"sizes": dict(point.sizes), "result": point.result.to_dict()} for point in self.points]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sweep:
        """Read what `to_dict` has written. Raises ``WideloadError`` for another schema, and for what is damaged."""
        if values.get("schema") == BENCH_SCHEMA:
            return cls((Point({}, BenchResult.from_dict(values)),))
        check_schema(values, SCHEMA)
        if not values["points"]:
            raise WideloadError("a sweep has at least one point")
        return cls(tuple(Point(decode(dict[str, int], p["sizes"], "sizes"), BenchResult.from_dict(p["result"])) for p in values["points"]))

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_csv(self) -> str:
        """A line for each contender at each size, with a header: times in microseconds, labels by their codes."""
        file = io.StringIO()
        rows = [(point.sizes, _figures(point.result, contender)) for point, contender in self._lines()]
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([name for columns in rows[0] for name in columns])
        writer.writerows([*sizes.values(), *figures.values()] for sizes, figures in rows)
        return file.getvalue()

    def to_markdown(self) -> str:
        """The table and what is to be known of it, for GitHub."""
        heading, *rows = ([cell.replace("|", "\\|") for cell in row] for row in self._table())
        num_text = len(heading) - len(_HEADINGS) + 1
        rule = ["---" if column < num_text or name == "labels" else "---:" for column, name in enumerate(heading)]
        table = "".join(f"| {' | '.join(row)} |\n" for row in (heading, rule, *rows))
        return table + "\n" + "".join(f"- {note}\n" for note in self._notes())

    def __str__(self) -> str:
        if self._single is not None:
            return str(self._single)
        heading, *rows = self._table()
        table = Table(box=None, pad_edge=False)
        for name in heading:
            table.add_column(name, justify="left" if name in ("", "labels") else "right")
        for row in rows:
            table.add_row(*row)
        return "\n".join((print_plain(table), *(f"  {note}" for note in self._notes())))

    def _lines(self) -> Iterator[tuple[Point, Contender]]:
        return ((point, contender) for point in self.points for contender in point.result.contenders)

    def _table(self) -> Iterator[list[str]]:
        yield [*self.points[0].sizes, *_HEADINGS]
        for point, contender in self._lines():
            yield [*map(str, point.sizes.values()), *_cells(point.result, contender)]

    def _notes(self) -> Iterator[str]:
        """The first text of each label of each contender, and where all of this was measured."""
        seen = set()
        for point, contender in self._lines():
            for label in contender.labels:
                if (contender.name, label.code) not in seen:
                    seen.add((contender.name, label.code))
                    yield f"{contender.name}{_at(point.sizes)}: {label}"
        for point in self.points[:1]:
            where, arguments = point.result.environment, ", ".join(map(str, point.result.arguments))
            yield f"on {arguments}{_at(point.sizes)}"
            yield f"{where.gpu or where.cpu}, torch {where.torch}"


_HEADINGS = ("", "median us", "+-", "GB/s", "of nominal", "vs best", "host us", "labels")


def _cells(result: BenchResult, contender: Contender) -> Iterator[str]:
    figures = _figures(result, contender)
    best = min((c.time_us.median for c in result.contenders if c.is_ranked and c.time_us is not None), default=None)
    ratio = contender.time_us.median / best if best and contender.is_ranked and contender.time_us is not None else None
    yield contender.name
    yield _format(figures["median_us"], ".2f")
    yield _format(figures["relative_error"], ".1%")
    yield _format(figures["gbps"], ".0f" if (figures["gbps"] or 0) >= 10 else ".2f")
    yield _format(figures["share_of_nominal"], ".1%")
    yield _format(ratio, ".2f")
    yield _format(figures["host_us"], ".1f")
    yield figures["labels"]


def _figures(result: BenchResult, contender: Contender) -> dict[str, Any]:
    time_us = contender.time_us
    names = ("median", "min", "p5", "p20", "p80", "p95")
    return {
        "contender": contender.name,
        "mode": contender.mode,
        **{f"{name}_us": None if time_us is None else getattr(time_us, name) for name in names},
        "num_samples": None if time_us is None else time_us.n,
        "relative_error": contender.relative_error,
        "gbps": contender.bytes_per_second and contender.bytes_per_second / 1e9,
        "share_of_nominal": result.share_of_nominal(contender),
        "host_us": contender.host_us,
        "labels": " ".join(label.code for label in contender.labels),
    }


def _format(value: float | None, spec: str) -> str:
    return "" if value is None else format(value, spec)


def _at(sizes: Sizes) -> str:
    return " at " + _spell(sizes) if sizes else ""


def _spell(sizes: Sizes) -> str:
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


# ---- two of them


@dataclass(frozen=True)
class SweepComparison:
    """The verdicts at each of the sizes."""

    points: tuple[tuple[Sizes, Comparisons], ...]

    @property
    def exit_code(self) -> int:
        """That of the worst pair, as in `Comparisons`."""
        return Comparisons(tuple(row for _, comparisons in self.points for row in comparisons.rows)).exit_code

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON: the rows of all sizes, each with its own."""
        rows = [{"sizes": dict(sizes), **row.to_dict()} for sizes, comparisons in self.points for row in comparisons.rows]
        return {"schema": COMPARISON_SCHEMA, "exit_code": self.exit_code, "rows": rows}

    def __str__(self) -> str:
        return "\n".join(f"{_spell(sizes)}\n{comparisons}" if sizes else str(comparisons) for sizes, comparisons in self.points)


def compare_sweeps(a: Sweep, b: Sweep, *, same_within: float = SAME_WITHIN, confidence: float = CONFIDENCE) -> SweepComparison:
    """Compare two sweeps size by size as `compare_results` does; a size that stands in one of them only is UNCLEAR."""
    check_bounds(same_within, confidence)
    results_a, results_b = ({tuple(point.sizes.items()): point.result for point in sweep.points} for sweep in (a, b))
    points = []
    for key in dict.fromkeys([*results_a, *results_b]):
        one, other = results_a.get(key), results_b.get(key)
        if one is not None and other is not None:
            comparisons = compare_results(one, other, same_within=same_within, confidence=confidence)
        else:
            only_a, only_b = (result.subject if result is not None else None for result in (one, other))
            reason = "this size stands in one result only"
            comparisons = Comparisons((Comparison("UNCLEAR", only_a, only_b, None, same_within, reason),))
        points.append((dict(key), comparisons))
    return SweepComparison(tuple(points))


def read_sweep(path: Path) -> Sweep:
    """Read a file that holds the JSON of a `Sweep` or a `BenchResult`. Raises ``WideloadError`` for anything else."""
    try:
        return Sweep.from_dict(parse_json(path.read_text(encoding="utf-8")))
    except WideloadError as error:
        raise WideloadError(f"{path}: {error}") from None
    except OSError as error:
        raise WideloadError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WideloadError(f"{path} holds no result of wideload bench ({type(error).__name__}: {error})") from None
