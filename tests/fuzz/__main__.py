"""Fuzzes wideload against eager torch: random functions, dtypes, shapes and layouts, bit for bit.

    python -m tests.fuzz --backend reference --draws 100000           # CPU tensors, no kernels
    python -m tests.fuzz --backend emulator --draws 10000             # the kernels' own text, compiled by g++ with sanitizers
    python -m tests.fuzz --backend cuda --draws 100000 --jobs 16      # a GPU

One seed is one draw: ``--seed S --draws 1`` runs it again, in any process and on any machine. A draw takes one program of a fixed pool
(tests/fuzz/programs.py), so that the kernels compiled are bounded by ``--kernels``: draws that need more are skipped, counted, and
replaced by later seeds, and so are those of other kernels than ``--family``. ``--seconds`` ends the run early. Each of ``--jobs``
processes has its own programs, and so its own kernels.

Progress and mismatches go to stderr. The last line, on stdout, has the draws checked, those skipped and refused (torch raises, and so
must wideload), kernel texts, kernels run by family, and mismatches. The exit status is 1 where there is a mismatch.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import Counter

import torch

from tests.fuzz.jobs import MAX_REPORTS, Share, run_jobs

__all__ = ["main"]

MAX_KERNELS = {"emulator": 3000, "reference": 0, "cuda": 8000}
"""Texts by default: ten minutes of g++ on one core, a minute of NVRTC on sixteen."""
SHOW_S = 1.0

_shown = 0.0


def _show(shares: list[Share]) -> None:
    global _shown
    if time.monotonic() - _shown >= SHOW_S:
        _shown = time.monotonic()
        print("\r" + _summary(shares), end="", file=sys.stderr, flush=True)


def _summary(shares: list[Share]) -> str:
    families = sum((share.families for share in shares), Counter())
    parts = [f"{name} {sum(getattr(share, name) for share in shares)}" for name in ("draws", "skipped", "refused", "kernels")]
    parts += [f"{family} {count}" for family, count in sorted(families.items())]
    return ", ".join((*parts, f"mismatches {sum(share.mismatches for share in shares)}"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser("python -m tests.fuzz", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", choices=("emulator", "reference", "cuda"), required=True)
    parser.add_argument("--draws", type=int, required=True, metavar="N", help="cases to check")
    parser.add_argument("--seed", type=int, metavar="S", help="the first seed; random, and printed, if left out")
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="T", help="stop after so long")
    parser.add_argument("--jobs", type=int, default=1, metavar="J", help="processes")
    parser.add_argument("--kernels", type=int, metavar="K", help=f"distinct kernel texts, at most; by default {MAX_KERNELS}")
    parser.add_argument("--elements", type=int, default=0, metavar="E", help="of the largest shape; by default what suits the backend")
    parser.add_argument(
        "--family", choices=("dense", "strips", "rows", "pitched", "tile", "strided"), help="check calls with such a kernel alone"
    )
    given = parser.parse_args(arguments)
    os.environ["WIDELOAD_CACHE"] = "0"  # every kernel is compiled, and none is left behind
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    torch.set_num_threads(1)  # operands are small
    print(f"{given.backend}: seeds from {seed}", file=sys.stderr)
    start = time.monotonic()
    shares = run_jobs(
        given.jobs,
        given.draws,
        MAX_KERNELS[given.backend] if given.kernels is None else given.kernels,
        _show,
        backend=given.backend,
        seed=seed,
        seconds=given.seconds,
        max_elements=given.elements,
        family=given.family,
    )
    print(file=sys.stderr)
    for report in [report for share in shares for report in share.reports][:MAX_REPORTS]:
        print(report, end="\n\n", file=sys.stderr)
    elapsed = time.monotonic() - start
    print(f"{_summary(shares)}; {given.backend}, seeds from {seed}, {elapsed:.0f} s", flush=True)
    return 1 if any(share.mismatches for share in shares) else 0


if __name__ == "__main__":
    sys.exit(main())
