"""Fuzzes wideload against eager torch: random functions, dtypes, shapes and layouts, bit for bit.

    python -m tests.fuzz --backend reference --draws 100000           # CPU tensors, no kernels
    python -m tests.fuzz --backend emulator --draws 10000             # the kernels' own text, compiled by g++ with sanitizers
    python -m tests.fuzz --backend cuda --draws 100000 --jobs 16      # a GPU

One seed is one draw: ``--seed S --draws 1`` runs it again, in any process and on any machine. A draw takes one program of a fixed pool
(tests/fuzz/programs.py), so that the kernels compiled are bounded by ``--kernels``: draws that need more are skipped, counted, and
replaced by later seeds. ``--seconds`` ends the run early. Each of ``--jobs`` processes has its own programs, and so its own kernels.

Progress and mismatches go to stderr. The last line, on stdout, has the draws checked, those skipped and refused (torch raises, and so
must wideload), kernel texts, kernels run by family, and mismatches. The exit status is 1 where there is a mismatch.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import queue
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.cases import program_of
from tests.fuzz.check import Backend, Mismatch, Session

__all__ = ["Share", "main", "run_share"]

MAX_REPORTS = 20
"""Mismatches that are printed; all are counted."""
MAX_KERNELS = 3000
"""Texts by default: four minutes of g++ on one core, or of NVRTC."""
REPORT_S = 1.0


@dataclass
class Share:
    """What one job has done."""

    draws: int = 0
    skipped: int = 0
    refused: int = 0
    known: int = 0
    kernels: int = 0
    families: Counter[str] = field(default_factory=Counter)
    mismatches: int = 0
    reports: list[str] = field(default_factory=list)


def run_share(
    backend: Backend,
    seed: int,
    draws: int,
    *,
    seconds: float = float("inf"),
    job: int = 0,
    jobs: int = 1,
    max_kernels: int | None = None,
    max_elements: int = 0,
    report: Callable[[Share], None] = lambda share: None,
) -> Share:
    """Check ``draws`` cases, from ``seed`` on, of those whose programs are this job's."""
    os.environ["WIDELOAD_CACHE"] = "0"  # every kernel is compiled, and none is left behind
    torch.set_num_threads(1)  # operands are small, and jobs share the cores
    session, share = Session(backend, max_kernels, max_elements), Share()
    end, next_report = time.monotonic() + seconds, time.monotonic() + REPORT_S
    for number in itertools.count(seed):
        now = time.monotonic()
        if session.num_checked >= draws or now >= end:
            break
        if program_of(number) % jobs == job:
            try:
                session.run(number)
            except Mismatch as mismatch:
                share.mismatches += 1
                share.reports += [str(mismatch)] if share.mismatches <= MAX_REPORTS else []
        if now >= next_report:
            report(_counted(session, share))
            next_report = now + REPORT_S
    return _counted(session, share)


def _counted(session: Session, share: Share) -> Share:
    share.draws, share.skipped, share.refused = session.num_checked, session.num_skipped, session.num_refused
    share.known, share.kernels, share.families = session.num_known, len(session.texts), session.families
    return share


def _run_job(results: Any, job: int, options: dict[str, Any]) -> None:
    """One process: shares go to ``results``, the last with True."""
    try:
        share = run_share(job=job, report=lambda share: results.put((job, share, False)), **options)
    except BaseException as error:
        share = Share(mismatches=1, reports=[f"job {job} ended: {type(error).__name__}: {error}"])
    results.put((job, share, True))


def _run_jobs(jobs: int, draws: int, max_kernels: int, options: dict[str, Any]) -> list[Share]:
    if jobs == 1:
        return [run_share(draws=draws, max_kernels=max_kernels, report=lambda share: _show([share]), **options)]
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    results: Any = context.Queue()
    shares = [Share() for _ in range(jobs)]
    processes = []
    for job in range(jobs):
        share = {"draws": (draws + job) // jobs, "max_kernels": max_kernels // jobs, "jobs": jobs}
        processes.append(context.Process(target=_run_job, args=(results, job, {**options, **share})))
        processes[-1].start()
    running = set(range(jobs))
    while running:
        try:
            job, shares[job], is_last = results.get(timeout=REPORT_S)
            running -= {job} if is_last else set()
        except queue.Empty:
            for job in [job for job in running if processes[job].exitcode not in (None, 0)]:  # killed: by a kernel, or for memory
                shares[job].mismatches += 1
                shares[job].reports.append(f"job {job} ended with status {processes[job].exitcode}")
                running.remove(job)
        _show(shares)
    for process in processes:
        process.join()
    return shares


_shown = 0.0


def _show(shares: list[Share]) -> None:
    global _shown
    if time.monotonic() - _shown >= REPORT_S:
        _shown = time.monotonic()
        print("\r" + _summary(shares), end="", file=sys.stderr, flush=True)


def _summary(shares: list[Share]) -> str:
    families = sum((share.families for share in shares), Counter())
    parts = [f"{name} {sum(getattr(share, name) for share in shares)}" for name in ("draws", "skipped", "refused", "known", "kernels")]
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
    parser.add_argument("--kernels", type=int, default=MAX_KERNELS, metavar="K", help="distinct kernel texts, at most")
    parser.add_argument("--elements", type=int, default=0, metavar="E", help="of the largest shape; by default what suits the backend")
    given = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if given.seed is None else given.seed
    print(f"{given.backend}: seeds from {seed}", file=sys.stderr)
    options = {"backend": given.backend, "seed": seed, "seconds": given.seconds, "max_elements": given.elements}
    start = time.monotonic()
    shares = _run_jobs(given.jobs, given.draws, given.kernels, options)
    print(file=sys.stderr)
    for report in [report for share in shares for report in share.reports][:MAX_REPORTS]:
        print(report, end="\n\n", file=sys.stderr)
    elapsed = time.monotonic() - start
    print(f"{_summary(shares)}; {given.backend}, seeds from {seed}, {elapsed:.0f} s", flush=True)
    return 1 if any(share.mismatches for share in shares) else 0


if __name__ == "__main__":
    sys.exit(main())
