"""Turns the outcomes of a run into a JSON file, and such a file into the table of docs/coverage.md.

Runs nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.opinfo.check import PASSES, Outcome

__all__ = ["RESULTS", "read_report", "render_report", "summarize", "write_report"]

RESULTS = {device: Path(__file__).parent / f"{device}.json" for device in ("cpu", "cuda")}
"""Where the outcomes that docs/coverage.md shows are kept."""


def write_report(path: Path, about: dict[str, Any], outcomes: Iterable[Outcome]) -> None:
    """One line an operator: the status of each dtype, and the reason where it does not pass."""
    ops: dict[str, dict[str, str]] = {}
    for outcome in outcomes:
        passes = outcome.status in (*PASSES, "none")
        ops.setdefault(outcome.op, {})[outcome.dtype] = outcome.status if passes else f"{outcome.status}: {outcome.reason}"
    lines = ",\n".join(f"  {json.dumps(op)}: {json.dumps(dtypes)}" for op, dtypes in sorted(ops.items()))
    path.write_text(f'{{\n "about": {json.dumps(about)},\n "ops": {{\n{lines}\n }}\n}}\n', encoding="utf-8")


def read_report(path: Path) -> tuple[dict[str, Any], list[Outcome]]:
    """What a run said of itself, and its outcomes."""
    report = json.loads(path.read_text(encoding="utf-8"))
    rows = ((op, dtype, *text.partition(": ")) for op, dtypes in report["ops"].items() for dtype, text in dtypes.items())
    return report["about"], [Outcome(op, dtype, status, reason) for op, dtype, status, _, reason in rows]


def _groups(outcomes: Iterable[Outcome]) -> dict[tuple[str, str, str], list[str]]:
    """Dtypes by (status, operator, reason) of what does not pass."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for outcome in outcomes:
        if outcome.status not in (*PASSES, "none"):
            groups.setdefault((outcome.status, outcome.op, outcome.reason), []).append(outcome.dtype)
    return dict(sorted(groups.items()))


def _share(outcomes: Iterable[Outcome]) -> tuple[str, Counter[str]]:
    counts = Counter(outcome.status for outcome in outcomes if outcome.status != "none")
    passed, total = sum(counts[status] for status in PASSES), sum(counts.values())
    return f"{passed:,} of {total:,} pairs pass: {100 * passed / max(total, 1):.2f} %", counts


def summarize(outcomes: list[Outcome]) -> str:
    """The share that passes and how, then what does not by operator and reason."""
    share, counts = _share(outcomes)
    lines = [share, ", ".join(f"{status} {count}" for status, count in sorted(counts.items()))]
    return "\n".join([*lines, *(f"{s:8} {op} [{', '.join(dtypes)}]: {reason}" for (s, op, reason), dtypes in _groups(outcomes).items())])


def render_report(path: Path) -> str:
    """Markdown: a sentence with the share, and a table of what does not pass."""
    about, outcomes = read_report(path)
    share, counts = _share(outcomes)
    compiled = f"; every kernel compiled for {about['compiled']}" if about.get("compiled") else ""
    text = f'On {about["on"]} with torch {about["torch"]}, `numerics="{about["numerics"]}"`: **{share}**{compiled}.\n\n'
    kinds = ("equal", "equal bit for bit"), ("bounded", "within the table's bounds"), ("close", "within torch's own tolerances")
    kinds += (("as_cpu", "as eager computes it on the CPU, not on the GPU"),) if counts["as_cpu"] else ()
    text += f"{', '.join(f'{counts[status]:,} {what}' for status, what in kinds)}.\n"
    groups = _groups(outcomes)
    if groups:
        text += "\n| operator | dtypes | outcome | reason |\n|---|---|---|---|\n"
        text += "".join(f"| `{op}` | {', '.join(dtypes)} | {status} | {reason} |\n" for (status, op, reason), dtypes in groups.items())
    return text
