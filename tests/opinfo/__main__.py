"""Runs PyTorch's OpInfo samples through wideload and states the share of (operator, dtype) pairs that pass.

    python -m tests.opinfo --device cpu --compile --json coverage.json    # the reference, and NVRTC for sm_90; no GPU
    python -m tests.opinfo --device cuda --jobs 8 --json coverage.json    # the kernels themselves against eager torch
    python -m tests.opinfo --device cpu --only "special.*" --verbose      # some operators, every outcome

A pair passes where every sample of the database has eager torch's values, dtype, shape and strides. What does not is listed with its
reason, and must be refused with a ``TraceError`` or a ``DtypeError``: the exit status is 1 where anything differs or crashes.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path

import torch

from tests.opinfo.check import PASSES, Outcome
from tests.opinfo.jobs import list_pairs, run_pairs
from tests.opinfo.selection import select_ops

__all__ = ["main", "summarize"]


def summarize(outcomes: list[Outcome]) -> str:
    """The share that passes and how, then what does not by operator and reason."""
    counted = [outcome for outcome in outcomes if outcome.status != "none"]
    counts = Counter(outcome.status for outcome in counted)
    passed = sum(counts[status] for status in PASSES)
    lines = [f"{passed} of {len(counted)} pairs pass: {100 * passed / max(len(counted), 1):.2f} %"]
    lines.append(", ".join(f"{status} {count}" for status, count in sorted(counts.items())))
    rest: dict[tuple[str, str, str], list[str]] = {}
    for outcome in counted:
        if outcome.status not in PASSES:
            rest.setdefault((outcome.status, outcome.op, outcome.reason), []).append(outcome.dtype)
    lines += [f"{status:8} {op} [{', '.join(dtypes)}]: {reason}" for (status, op, reason), dtypes in sorted(rest.items())]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser("python -m tests.opinfo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="*", metavar="GLOB", help="operators by name, such as 'special.*'")
    parser.add_argument("--compile", action="store_true", help="compile the kernels for sm_90 too; on a GPU they always are")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    parser.add_argument("--verbose", action="store_true", help="print every pair that is not equal bit for bit")
    given = parser.parse_args(arguments)
    os.environ["WIDELOAD_CACHE"] = "0"
    ops = tuple(op for op in select_ops() if fnmatch.fnmatch(op.name, given.only))
    pairs, outcomes, shown = list_pairs(ops, given.device), list[Outcome](), time.monotonic()
    for outcome in run_pairs(pairs, given.device, given.compile, given.jobs):
        outcomes.append(outcome)
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{len(outcomes)} of {len(pairs)} pairs, {outcome.op} {outcome.dtype}\033[K", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr)
    print(summarize(outcomes))
    if given.verbose:
        print("\n".join(f"{o.status:8} {o.op} {o.dtype}: {o.reason}" for o in outcomes if o.status not in ("equal", "none")))
    if given.json:
        on = torch.cuda.get_device_name() if given.device == "cuda" else platform.machine()
        report = {"device": given.device, "on": on, "torch": torch.__version__, "compiled": given.compile or given.device == "cuda"}
        given.json.write_text(json.dumps({**report, "pairs": [outcome.to_dict() for outcome in outcomes]}, indent=1) + "\n")
    return 1 if any(outcome.status in ("differs", "crashes") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
