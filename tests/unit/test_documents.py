"""README, docs and examples do what they say: every Python block runs, every output shown is the real one, every name is explained.

``python -m tests.unit.test_documents`` from the root writes the real outputs into the documents; read the diff.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import runpy
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from typer.testing import CliRunner

import wideload as wl
from benchmarks.summary import find_latest, read_program, render_summary, render_table, summarize
from tests.opinfo.report import RESULTS, render_report
from tests.proofs.report import RESULT
from tests.proofs.report import render_report as render_errors
from tests.results import bench_result, contender
from wideload.cli import app
from wideload.ladder.climb import Claim, Ladder, Measured, Row
from wideload.measure import EXIT_CODES
from wideload.measure.labels import LabelCode
from wideload.ops_table import OPS
from wideload.plan import BUILT_IN, DEFAULT
from wideload.spelling import make_arguments

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# A fenced block, or a part between <!-- name --> and <!-- end -->.
_BLOCK = re.compile(
    r"^```(?P<language>\w+)\n(?P<body>.*?)^```$|^<!-- (?P<part>[\w ]+) -->\n(?P<made>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)


def by_name(path: Path) -> str:
    return path.name


# ---- rendering: a document with its outputs and tables replaced by the real ones


def render(path: Path) -> str:
    """The text of ``path`` as it is when every shown output and generated part is real. Its Python blocks share one namespace."""
    text = path.read_text(encoding="utf-8")
    pieces, position, printed, end_of_python = [], 0, "", -1
    namespace: dict[str, Any] = {"__name__": "__document__"}
    for block in _BLOCK.finditer(text):
        made = block[0]
        if block["language"] == "python":
            printed, end_of_python = run_python(path, text, block, namespace), block.end()
        elif block["language"] == "text" and not text[end_of_python : block.start()].strip():
            made = f"```text\n{printed}```"
        elif block["language"] == "console":
            made = f"```console\n{run_console(block['body'])}```"
        elif block["part"]:
            made = f"<!-- {block['part']} -->\n{PARTS[block['part']]()}<!-- end -->"
        pieces += [text[position : block.start()], made]
        position = block.end()
    return "".join([*pieces, text[position:]])


def run_python(path: Path, text: str, block: re.Match[str], namespace: dict[str, Any]) -> str:
    """What the block prints; errors and generated comments name its lines in the document."""
    first_line = text.count("\n", 0, block.start("body"))
    code = compile("\n" * first_line + block["body"], str(path), "exec")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, namespace)
    return printed.getvalue().replace(f"{ROOT}/", "")


def run_console(body: str) -> str:
    """The first line, ``$ wideload ...`` with an optional ``| head -N``, and what it prints."""
    command = body.splitlines()[0]
    found = re.fullmatch(r"\$ wideload (.*?)(?: \| head -(\d+))?", command)
    assert found, f"a console block begins with `$ wideload ...`, not {command!r}"
    result = CliRunner().invoke(app, found[1].split(), env={"COLUMNS": "80", "NO_COLOR": "1"})
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()[: int(found[2]) if found[2] else None]
    return "\n".join([command, *(line.rstrip() for line in lines)]) + "\n"


# ---- generated parts


def _units(ulp: float) -> str:
    return f"{ulp:g}"


def bounds_table() -> str:
    rows = [
        f"| `{op.name}` | {_units(op.ulp[0])} | {_units(op.ulp[1])} | {'yes' if op.half else ''} | {'yes' if op.eager else ''} |\n"
        for op in sorted(OPS.values(), key=lambda op: op.name)
        if any(op.ulp)
    ]
    return "".join(["| op | fp32 | fp64 | half tier | own eager form |\n", "|---|---|---|---|---|\n", *rows])


def exact_ops() -> str:
    names = sorted(op.name for op in OPS.values() if "float" in op.cuda and not any(op.ulp) and not op.name.startswith("full_like_"))
    return f"{', '.join(f'`{name}`' for name in names)}\n"


def layers_table() -> str:
    """The layers of the import contract, lowest first, with the modules that exist."""
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    rows = []
    for number, layer in enumerate(reversed(contract["layers"])):
        names = [
            name for name in re.findall(r"\w+", layer) if any((ROOT / "src/wideload" / file).exists() for file in (f"{name}.py", name))
        ]
        if names:
            rows.append(f"| {number} | {', '.join(f'`{name}`' for name in names)} |\n")
    return "".join(["| layer | modules |\n", "|---|---|\n", *rows])


def coverage() -> str:
    """What the recorded runs of tests/opinfo say, the CPU's first."""
    return "\n".join(render_report(path) for path in RESULTS.values() if path.exists())


def measured_errors() -> str:
    """What the recorded run of tests/proofs found on a GPU."""
    return render_errors(RESULT) if RESULT.exists() else "Not measured on a GPU yet.\n"


def measured_ladders() -> str:
    """What `wideload ladder --json` gave on each GPU."""
    ladders = [read_ladder(path) for path in sorted((ROOT / "benchmarks" / "results").glob("ladder-*.json"))]
    return "\n".join(map(render_ladder, ladders)) or "Measured on an H200: not yet.\n"


def read_ladder(path: Path) -> Ladder:
    ladder = Ladder.from_dict(json.loads(path.read_text(encoding="utf-8")))
    assert ladder.is_measured, f"{path.name} was only compiled"
    assert ladder.faults == (), f"{path.name} is no result"
    assert ladder.environment is not None
    assert ladder.environment.commit, f"{path.name} does not name its commit"
    return ladder


def render_ladder(ladder: Ladder) -> str:
    """The measured columns; those that are compiled stand in the table above it."""
    where = ladder.environment
    assert where is not None
    shown = [ladder.columns.index(name) for name in ("rung", "least us", "us", "GB/s", "nominal", "wall", "torch us", "article")]
    rows = [
        [ladder.columns[k] for k in shown],
        ["---", *["---:"] * 6, "---"],
        *[[ladder.cells(row)[k] for k in shown] for row in ladder.rows],
    ]
    head = (
        f"{where.gpu}, driver {where.driver}, torch {where.torch}, commit {where.commit}; {ladder.nominal_gbps:,.0f} GB/s nominal, cold L2"
    )
    notes = "".join(f"- {note}\n" for note in ladder.notes)
    return f"{head}:\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows) + (f"\n{notes}" if notes else "")


def measured(name: str, title: str) -> str:
    """The table of the newest committed result of a benchmark."""
    path = find_latest(name)
    return f"Measured on an H200: `benchmarks/{name}.py` not yet.\n" if path is None else render_table(read_program(path).content, title)


def measured_summary() -> str:
    """Over the newest committed result of each benchmark of kernels."""
    paths = [find_latest(name) for name in ("dense", "layouts", "operators", "backward", "sizes")]
    return render_summary(summarize(read_program(path) for path in paths if path is not None))


def tunings() -> str:
    """The built-in choices of each architecture: those that differ from sm_90's, and what they rest on."""
    rows = ["| architecture | choices | rest on |\n", "|---|---|---|\n"]
    for arch, tuning in BUILT_IN.items():
        other = [f"{name} {value}" for name, value in tuning.choices.items() if value != DEFAULT.choices[name]]
        choices = (
            ", ".join(f"{name} {value}" for name, value in tuning.choices.items()) if tuning is DEFAULT else ", ".join(other) or "as sm_90"
        )
        rows.append(f"| {arch} | {choices} | {tuning.source} |\n")
    return "".join(rows)


PARTS: dict[str, Callable[[], str]] = {
    "bounds": bounds_table,
    "coverage": coverage,
    "exact ops": exact_ops,
    "layers": layers_table,
    "measured dense": partial(measured, "dense", "function"),
    "measured errors": measured_errors,
    "measured ladders": measured_ladders,
    "measured layouts": partial(measured, "layouts", "operands, bfloat16 unless said"),
    "measured operators": partial(measured, "operators", "operator, bf16"),
    "measured summary": measured_summary,
    "tunings": tunings,
}


# ---- comparing

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
_TORCH = re.compile(r"\btorch (\d+\.\d+\.\d+)")


def assert_shown(shown: str, real: str) -> None:
    """Equal line by line, but for the numbers of a document's own lines; in what commands print, numbers may differ by a tenth or by 4.

    Registers and counts of rounded results hang on versions and machines; an invented figure still fails. What a command printed with
    another torch may differ by any number.
    """
    shown, real = (re.sub(r"(?<=\.md:)\d+", "#", text) for text in (shown, real))
    in_console = is_of_other_torch = False
    for number, (shown_line, real_line) in enumerate(zip(shown.splitlines(), real.splitlines(), strict=True), start=1):
        in_console = shown_line == "```console" or (in_console and shown_line != "```")
        named = _TORCH.search(shown_line)
        is_of_other_torch = in_console and (is_of_other_torch if named is None else named[1] != torch.__version__.partition("+")[0])
        if in_console and re.sub(r" +", " ", _NUMBER.sub("#", shown_line)) == re.sub(r" +", " ", _NUMBER.sub("#", real_line)):
            pairs = zip(_numbers(shown_line), _numbers(real_line), strict=True)
            if is_of_other_torch or all(abs(a - b) <= max(4, 0.1 * abs(b)) for a, b in pairs):
                continue
        if shown_line != real_line:
            raise AssertionError(
                f"line {number} shows\n  {shown_line}\nbut it is\n  {real_line}\n(python -m tests.unit.test_documents writes it)"
            )


def _numbers(line: str) -> list[float]:
    return [float(number.replace(",", "")) for number in _NUMBER.findall(line)]


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_documents_show_what_is_real(path: Path) -> None:
    shown, real = path.read_text(encoding="utf-8"), render(path)
    assert shown.count("\n") == real.count("\n"), f"{path.name} is not what `python -m tests.unit.test_documents` writes"
    assert_shown(shown, real)


@pytest.mark.parametrize(
    ("shown", "real"),
    [
        ("```text\n4.0\n```", "```text\n4.1\n```"),  # exact outside the console
        ("```console\n$ wideload x\n100 registers\n```", "```console\n$ wideload x\n32 registers\n```"),
        ("```console\n$ wideload x\n32 registers\n```", "```console\n$ wideload x\n32 spills\n```"),
        ("| `exp` | 1 |", "| `exp` | 2 |"),
    ],
)
def test_invented_output_is_refused(shown: str, real: str) -> None:
    with pytest.raises(AssertionError, match="but it is"):
        assert_shown(shown, real)


def test_console_numbers_have_some_play() -> None:
    assert_shown("```console\n34 registers, 2,015,258\n```", "```console\n32 registers, 2,015,259\n```")
    here = torch.__version__.partition("+")[0]
    shown, real = "```console\ntorch {}\n34 steps\n```\n", f"```console\ntorch {here}\n3 steps\n```\n"
    assert_shown(shown.format(f"{here}9"), real)
    with pytest.raises(AssertionError, match="34 steps"):
        assert_shown(shown.format(here), real)
    with pytest.raises(AssertionError, match="34 steps"):  # the next block, which names none
        assert_shown(shown.format(f"{here}9") + "```console\n34 steps\n```", real + "```console\n3 steps\n```")


def test_rendering_finds_a_wrong_output(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("```python\nx = 2\nprint(x)\n```\n\n```text\n3\n```\n\n```python\nprint(x + 2)\n```\n```text\n```\n")
    assert render(path) == "```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\n\n```python\nprint(x + 2)\n```\n```text\n4\n```\n"


def test_a_block_that_raises_fails(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("text\n\n```python\nprint(undefined)\n```\n")
    with pytest.raises(NameError, match="undefined"):
        render(path)


def test_a_measured_ladder_fills_its_table(tmp_path: Path) -> None:
    where = bench_result(contender("x", [1.0, 1.0])).environment
    claims = (Claim("sectors", 4, 4, found=4.0, holds=True), Claim("share", 0.8, 0.92, found=0.75, holds=False))
    row = Row("add", "a.cu", "", "", (8,), ("add",), ((32, 2),), ((32, 1),), 8, 0, 1.0, 4.0, 1.0, 64, 32, 12, 671.1, "memory", claims)
    timed = Measured(874.2, 750.0, 3.685e12, 0.75, 0.847, ("THROTTLED: power",))
    ladder = Ladder("H200 SXM", "sm_90", 4917.0, True, (replace(row, measured=timed, why_not="because"),), environment=where)
    path = tmp_path / "ladder-h200-abc123.json"
    path.write_text(json.dumps(ladder.to_dict()))
    assert render_ladder(read_ladder(path)) == (
        "NVIDIA H200, driver 580, torch 2.11.0, commit abc123; 4,917 GB/s nominal, cold L2:\n\n"
        "| rung | least us | us | GB/s | nominal | wall | torch us | article |\n"
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- |\n"
        "| add | 671 | 874.2 | 3685 | 75.0% | 84.7% | 750.0 | 4 sectors: yes; 80%-92%: no |\n\n"
        "- add: THROTTLED: power\n"
        "- add: the article expects 80%-92%; here it is 0.75. because.\n"
    )
    for spoilt, message in (
        (replace(ladder, failed={"x": "CompileError"}), "is no result"),
        (replace(ladder, environment=replace(where, commit=None)), "does not name its commit"),
        (replace(ladder, is_measured=False), "only compiled"),
    ):
        path.write_text(json.dumps(spoilt.to_dict()))
        with pytest.raises(AssertionError, match=message):
            read_ladder(path)


# ---- examples


@pytest.mark.parametrize("path", EXAMPLES, ids=by_name)
def test_examples_run(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
    assert {path.name for path in DOCUMENTS} >= {"README.md", "architecture.md", "measuring.md", "numerics.md"}


# ---- names and links


def unexplained(names: list[str], text: str) -> list[str]:
    """Those that do not stand in code type, alone, called, or after ``wl.``."""
    return [name for name in names if not re.search(rf"`[^`\n]*\b{name}\b[^`\n]*`", text)]


def test_every_public_name_is_explained() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert unexplained([f"wl.{name}" for name in wl.__all__ if name != "WideloadError"] + ["WideloadError"], text) == []
    assert unexplained(list(wl.ops.__all__), text) == []
    assert unexplained(["wl.nothing"], text) == ["wl.nothing"]


def test_every_label_and_verdict_is_explained() -> None:
    text = (ROOT / "docs/measuring.md").read_text(encoding="utf-8")
    assert unexplained([*get_args(LabelCode), *EXIT_CODES], text) == []


def test_every_environment_variable_is_explained() -> None:
    text = (ROOT / "docs/settings.md").read_text(encoding="utf-8").partition("## Environment variables")[2]
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]
    read = {name for path in sources for name in re.findall(r'environ\S*?\W"?(WIDELOAD_\w+)', path.read_text(encoding="utf-8"))}
    assert {"WIDELOAD_CACHE", "WIDELOAD_TUNING"} <= read
    assert listed == read


def test_every_operand_that_is_explained_can_be_spelt() -> None:
    rows = (ROOT / "docs/measuring.md").read_text(encoding="utf-8").partition("| operand | is |")[2].partition("\n\n")[0].splitlines()[2:]
    operands = [spelt for row in rows for spelt in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    tried = [
        make_arguments([spelt], sizes={"n": 4} if re.search(r"\bn\b", spelt) else {}, device="meta") for spelt in operands if "[" in spelt
    ]
    assert len(tried) >= 12


def links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            yield target


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_links_lead_somewhere(path: Path) -> None:
    assert [target for target in links(path) if not (path.parent / target).exists()] == []


def test_the_commands_of_the_readme_are_targets() -> None:
    commands = re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert commands == ["demo", "test"]
    assert set(commands) <= set(targets)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(render(document), encoding="utf-8")
