"""Turns records into a JSON file, and such a file into the table of docs/numerics.md.

Runs nothing.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.proofs.check import Record, Settings
from tests.proofs.rows import PAIRS, UNARY
from tests.proofs.ulp import Tally

__all__ = ["RESULT", "read_report", "render_report", "summarize", "write_report"]

RESULT = Path(__file__).parent / "cuda.json"
"""The run that docs/numerics.md shows."""

_MANY = 1e6  # units, from which on a power of ten is shown
_DIGITS = {"f32": 8, "bf16": 4, "f16": 4}


def _to_dict(record: Record) -> dict[str, Any]:
    found = asdict(record) | record.tally.__dict__
    del found["tally"]
    for name in ("at", "eager_at"):
        found[name] = [f"{bits:#0{_DIGITS[record.dtype] + 2}x}" for bits in found[name]]
    found["values"] = [_shown(bits, record.dtype) for bits in record.tally.at]
    return {name: _as_text(value) for name, value in found.items()}


def _as_text(value: Any) -> Any:
    """JSON has neither NaN nor infinities."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_FLOATS = ("largest", "eager", "got", "want")


def _from_dict(found: dict[str, Any]) -> Record:
    values = {name: value for name, value in found.items() if name != "values"}
    values |= {name: float(values[name]) for name in _FLOATS if values[name] is not None}
    values |= {name: tuple(int(text, 16) for text in values[name]) for name in ("at", "eager_at")}
    tally = Tally(**{name: values.pop(name) for name in Tally.__dataclass_fields__})
    return Record(**values, tally=tally)


def write_report(path: Path, about: dict[str, Any], records: Iterable[Record]) -> None:
    """One line a record, by op and dtype, in place of the file that was there."""
    ordered = sorted(records, key=lambda record: (record.op, list(_DIGITS).index(record.dtype)))
    lines = ",\n".join(f"  {json.dumps(_to_dict(record))}" for record in ordered)
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(f'{{\n "about": {json.dumps(about)},\n "records": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    fresh.replace(path)


def read_report(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """What a run said of itself, and its records."""
    report = json.loads(path.read_text(encoding="utf-8"))
    return report["about"], [_from_dict(found) for found in report["records"]]


def _value(bits: int, dtype: str) -> float:
    if dtype == "f16":
        return float(struct.unpack("<e", bits.to_bytes(2, "little"))[0])
    return float(struct.unpack("<f", (bits << 16 if dtype == "bf16" else bits).to_bytes(4, "little"))[0])


def _shown(bits: int, dtype: str) -> str:
    return f"{_value(bits, dtype):.9g}"


def _ulp(error: float | None) -> str:
    if error is None:
        return ""
    return "NaN" if math.isinf(error) else f"{error:.2g}" if error >= _MANY else f"{error:,.0f}" if error == int(error) else f"{error:,.1f}"


def summarize(records: list[Record], settings: Settings) -> str:
    """How many are within their bounds, then what is not."""
    faults = [(record, text) for record in records for text in record.faults(settings)]
    num_wrong = len({(record.key, record.mode) for record, _ in faults})
    lines = [f"{len(records) - num_wrong} of {len(records)} (row, dtype, mode) within the contract"]
    for record, text in faults:
        lines.append(f"{record.op} {record.dtype} {record.mode}: {text}; {_worst(record)}")
    return "\n".join(lines)


def unlike_eager(records: list[Record]) -> list[str]:
    """The ops of which ``numerics="eager"`` has other bits than eager torch, by name."""
    return sorted(
        {record.op.partition("(")[0] for record in records if record.mode == "eager" and record.eager is not None and record.tally.differs}
    )


def _worst(record: Record) -> str:
    tally = record.tally
    at = ", ".join(f"{_shown(bits, record.dtype)} ({bits:#x})" for bits in tally.at) or "-"
    return f"largest {_ulp(tally.largest)} ulp at {at}: got {tally.got}, exact {tally.want}"


def render_report(path: Path) -> str:
    """Markdown: where it ran, and a line for each op with an error."""
    about, records = read_report(path)
    num_inputs = sum(record.tally.count for record in records)
    commits = ", ".join(f"`{commit}`" for commit in sorted({record.commit for record in records if record.commit}))
    where = f"On {about['on']} with torch {about['torch']}{commits and f', at {commits}'}"
    text = f"{where}: {num_inputs:,} results, held to fp64 or, where it says so, to mpmath.\n"
    exact = sorted({record.op for record in records} - {record.op for record in records if record.bound != 0 or record.tally.largest})
    if exact:
        text += f"\nEvery result correctly rounded: {', '.join(f'`{name}`' for name in exact)}.\n"
    unlike = ", ".join(f"`{name}`" for name in unlike_eager(records))
    if unlike:
        text += (
            f'\nIn `numerics="eager"` every result has the bits of eager torch, but those of {unlike}: there torch has series of its own. '
        )
        text += "How far each of the two is from the exact value stands below.\n"
    missing = sorted({row.name for row in (*UNARY, *PAIRS)} - {record.op for record in records})
    if missing:
        text += f"\nNot run since they changed: {', '.join(f'`{name}`' for name in missing)}.\n"
    head = ("op", "dtype", "mode", "bound", "largest", "at", "eager's", "against")
    rows = [
        head,
        ("---", "---", "---", "---:", "---:", "---", "---:", "---"),
        *_rows(record for record in records if record.op not in exact),
    ]
    return text + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """One of all modes that have the same figures."""
    modes: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        at = ", ".join(f"{_shown(bits, record.dtype)} (`{bits:#0{_DIGITS[record.dtype] + 2}x}`)" for bits in record.tally.at)
        bound = "eager's bits" if record.bound is None else f"{record.bound:,.0f}"
        cells = (f"`{record.op}`", record.dtype, bound, _ulp(record.tally.largest), at, _ulp(record.eager), record.against)
        modes.setdefault(cells, []).append(record.mode)
    return [(cells[0], cells[1], ", ".join(names), *cells[2:]) for cells, names in modes.items()]
