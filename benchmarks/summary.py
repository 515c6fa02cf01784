"""Turns what benchmarks have written into one verdict a row, one table of all, and the tables of the documents.

    python benchmarks/summary.py benchmarks/results/*.json

Knows the files, whichever program wrote them; it must not know how anything was measured. The exit status is 0 where every row passes.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Program", "Row", "find_latest", "format_summary", "read_program", "render_summary", "render_table", "summarize"]

RESULTS = Path(__file__).parent / "results"
PEERS = {"eager": "eager", "compile": "torch.compile"}
"""By their names in the files, as tables have them."""
VOID = ("WRONG", "FAULT", "FAILED")
"""What such a verdict begins with: its times are of no use."""


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: ``PASS`` or what is short, its share of the wall, and how many times as fast as each peer it is."""

    name: str
    verdict: str
    wall_ratio: float | None = None
    times_as_fast: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_kept(self) -> bool:
        """Whether it passes."""
        return self.verdict == "PASS"


@dataclass(frozen=True)
class Program:
    """What one benchmark wrote: ``name`` is its script's, ``content`` the file's."""

    name: str
    rows: tuple[Row, ...]
    content: Mapping[str, Any]

    @property
    def num_kept(self) -> int:
        """Rows that pass."""
        return sum(row.is_kept for row in self.rows)


# ---- reading


def read_program(path: Path) -> Program:
    """Read a file of benchmarks/results, or one that ``--json`` has written; the first word of its name is its script's.

    Raises ``ValueError`` for a file of another kind.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    name = path.stem.partition("-")[0]
    if "rows" in content and content.get("schema") in (1, 2):
        rows = [*map(_read_row, content["rows"])]
        rows += [Row(case, f"FAILED: {reason}") for case, reason in content.get("failed", {}).items()]
    elif "parts_ms" in content:
        goals = content["goals_ms"]
        rows = [_read_part(part, ms, goals[part]) for part, ms in content["parts_ms"].items() if part in goals]
    else:
        raise ValueError(f"{path} is no result of a benchmark here")
    return Program(name, tuple(rows), content)


def _read_row(row: Mapping[str, Any]) -> Row:
    """A row of any program: they say in three ways what passes."""
    if "verdict" not in row:
        if "is_kept" in row:  # a finding
            return Row(row["what"].strip(), "PASS" if row["is_kept"] else f"short: {row['found']}")
        is_kept = row["ratio"] <= row["most"]  # what a call costs the host
        return Row(row["name"], "PASS" if is_kept else f"short: {row['ratio']:.2f} times {row['eager']}, allowed {row['most']:.1f}")
    if "elements" in row:  # of a sweep, whose eager op is another function: its verdict counts that one
        times = {peer: 1 / ratio for peer, ratio in row["times_of"].items() if peer == "compile"}
        return Row(f"{row['function']}, n = {row['elements']}", row["verdict"], None, times)
    subject_us, times_us = _subject_us(row), row.get("peers_us", row.get("times_us", {}))
    times = {peer: times_us[peer] / subject_us for peer in PEERS if peer in times_us} if subject_us else {}
    return Row(row["case"], row["verdict"], row.get("wall_ratio"), {} if _is_void(row["verdict"]) else times)


def _subject_us(row: Mapping[str, Any]) -> float | None:
    """Wideload's median where it was timed in turns with its peers."""
    time_us = row.get("bench", {}).get("subject", {}).get("time_us")
    return time_us["median"] if time_us else row.get("wideload_us", row.get("times_us", {}).get("wideload"))


def _read_part(part: str, ms: float, goal_ms: float) -> Row:
    return Row(part, "PASS" if ms <= goal_ms else f"short: {ms:.0f} ms, allowed {goal_ms}")


def _is_void(verdict: str) -> bool:
    return verdict.startswith(VOID)


def find_latest(name: str, folder: Path = RESULTS) -> Path | None:
    """The newest committed result of a script, by when it was measured."""
    found = [path for path in folder.glob(f"{name}-*.json") if path.stem.partition("-")[0] == name]
    return max(found, key=lambda path: json.loads(path.read_text(encoding="utf-8"))["environment"]["time_utc"], default=None)


# ---- all of them


@dataclass(frozen=True)
class Summary:
    """Figures over all programs: geometric means over the rows that a peer ran, and the row that is furthest from the wall."""

    programs: tuple[Program, ...]
    times_as_fast: Mapping[str, tuple[float, int]]
    """By peer: the mean, and of how many rows."""
    furthest: tuple[str, Row] | None

    @property
    def num_rows(self) -> int:
        """Of all programs."""
        return sum(len(program.rows) for program in self.programs)

    @property
    def num_kept(self) -> int:
        """Of all programs."""
        return sum(program.num_kept for program in self.programs)


def summarize(programs: Iterable[Program]) -> Summary:
    """Of whatever has been run."""
    programs = tuple(programs)
    means = {}
    for peer in PEERS:
        ratios = [row.times_as_fast[peer] for program in programs for row in program.rows if peer in row.times_as_fast]
        if ratios:
            means[peer] = (statistics.geometric_mean(ratios), len(ratios))
    beside_wall = [
        (program.name, row) for program in programs for row in program.rows if row.wall_ratio is not None and not _is_void(row.verdict)
    ]
    furthest = min(beside_wall, key=lambda found: found[1].wall_ratio or math.inf, default=None)
    return Summary(programs, means, furthest)


def format_summary(summary: Summary) -> str:
    """A line a program, each row that is short, and the figures over all."""
    width = max((len(program.name) for program in summary.programs), default=0) + 2
    lines = []
    for program in summary.programs:
        lines.append(f"{program.name:<{width}}{program.num_kept:>5} of {len(program.rows):<5}PASS")
        lines += [f"{'':<{width}}{row.name}: {row.verdict}" for row in program.rows if not row.is_kept]
    return "\n".join([*lines, "", *_figures(summary)])


def render_summary(summary: Summary) -> str:
    """The same for a document: a table of programs, and the figures below it."""
    lines = ["| benchmark | rows | pass | commit |", "|---|---:|---:|---|"]
    for program in summary.programs:
        commit = program.content["environment"]["commit"]
        lines.append(f"| `{program.name}.py` | {len(program.rows)} | {program.num_kept} | {commit} |")
    return "\n".join([*lines, "", *(f"- {figure}" for figure in _figures(summary))]) + "\n"


def _figures(summary: Summary) -> list[str]:
    figures = [f"{summary.num_kept} of {summary.num_rows} rows pass"]
    for peer, (mean, count) in summary.times_as_fast.items():
        figures.append(f"{mean:.2f} times as fast as {PEERS[peer]}: geometric mean over the {count} rows that it ran")
    if summary.furthest is not None:
        program, row = summary.furthest
        figures.append(f"smallest share of the wall: {row.wall_ratio:.3f}, {row.name} ({program}.py)")
    return figures


# ---- the tables of the documents


def render_table(content: Mapping[str, Any], title: str) -> str:
    """Times in microseconds of rows that stand beside the wall; bold is short of its goal."""
    lines = [f"| {title} | wall | wideload | eager | torch.compile | wideload of the wall |", "|---|---|---|---|---|---|"]
    for row in content["rows"]:
        mine_us = row["wideload_us"]
        of = "" if row["counted"] == "wall" else f" of {row['counted']}"
        ratio = f"{row['ratio']:.3f}{of}"
        peers = [f"{row['peers_us'][peer]:.1f}" if peer in row["peers_us"] else "" for peer in PEERS]
        cells = [row["case"], f"{row['wall_ratio'] * mine_us:.1f}", f"{mine_us:.1f}", *peers]
        lines.append("| " + " | ".join([*cells, ratio if row["verdict"] == "PASS" else f"**{ratio}**"]) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the summary of files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks have written with --json")
    paths, programs = parser.parse_args(arguments).files, []
    for path in paths:
        try:
            programs.append(read_program(path))
        except (OSError, ValueError) as error:
            print(error, file=sys.stderr)
    summary = summarize(programs)
    print(format_summary(summary))
    return int(len(programs) < len(paths) or summary.num_kept < summary.num_rows)


if __name__ == "__main__":
    sys.exit(main())
