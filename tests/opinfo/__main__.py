"""Runs PyTorch's OpInfo samples through wideload and states the share of (operator, dtype) pairs that pass.

    python -m tests.opinfo --device cpu --compile --json tests/opinfo/cpu.json       # the reference, and NVRTC for sm_90; no GPU
    python -m tests.opinfo --device cuda --jobs 8 --json tests/opinfo/cuda.json      # the kernels themselves against eager torch
    python -m tests.opinfo --device cpu --only "special.*" --verbose                 # some operators, every outcome

A pair passes where every sample of the database has eager torch's values, dtype, shape and strides. What does not is listed with its
reason, and must be refused with a ``TraceError`` or a ``DtypeError``: the exit status is 1 where anything differs or crashes. What the
two files above hold is shown in docs/coverage.md, which ``python -m tests.unit.test_documents`` writes.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

import torch

from tests.opinfo.check import ARCH, Outcome
from tests.opinfo.jobs import list_pairs, run_pairs
from tests.opinfo.report import summarize, write_report
from tests.opinfo.selection import select_ops

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser("python -m tests.opinfo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", default="*", metavar="GLOB", help="operators by name, such as 'special.*'")
    parser.add_argument("--numerics", choices=("eager", "fused"), default="eager")
    parser.add_argument("--compile", action="store_true", help="compile the kernels for sm_90 too; on a GPU they always are")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every outcome there")
    parser.add_argument("--verbose", action="store_true", help="print every pair that is not equal bit for bit")
    given = parser.parse_args(arguments)
    os.environ["WIDELOAD_CACHE"] = "0"
    ops = tuple(op for op in select_ops() if fnmatch.fnmatch(op.name, given.only))
    pairs, outcomes, shown = list_pairs(ops, given.device), list[Outcome](), time.monotonic()
    for outcome in run_pairs(pairs, given.device, numerics=given.numerics, compiles=given.compile, jobs=given.jobs):
        outcomes.append(outcome)
        if time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"\r{len(outcomes)} of {len(pairs)} pairs, {outcome.op} {outcome.dtype}\033[K", end="", file=sys.stderr, flush=True)
    print("\r\033[K", end="", file=sys.stderr)
    print(summarize(outcomes))
    if given.verbose:
        print("\n".join(f"{o.status:8} {o.op} {o.dtype}: {o.reason}" for o in outcomes if o.status not in ("equal", "none")))
    if given.json:
        about = {"device": given.device, "torch": torch.__version__.partition("+")[0], "numerics": given.numerics}
        about |= {"on": torch.cuda.get_device_name() if given.device == "cuda" else "the CPU", "compiled": ARCH if given.compile else None}
        write_report(given.json, about, outcomes)
    return 1 if any(outcome.status in ("differs", "crashes") for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
