"""Divides a fuzz among processes: each checks the seeds whose programs are its own, so that a kernel is compiled by one of them.

Counts and reports; knows nothing of what a case is.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.fuzz.cases import program_of
from tests.fuzz.check import Backend, Mismatch, Session

__all__ = ["MAX_REPORTS", "Share", "run_jobs", "run_share"]

MAX_REPORTS = 20
"""Mismatches that are printed; all are counted."""
REPORT_S = 1.0


@dataclass
class Share:
    """What one job has done."""

    draws: int = 0
    skipped: int = 0
    refused: int = 0
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
    family: str | None = None,
    max_mismatches: int | None = None,
    report: Callable[[Share], None] = lambda share: None,
) -> Share:
    """Check ``draws`` cases, from ``seed`` on, of those whose programs are this job's: every ``jobs``-th of the pool."""
    session, share = Session(backend, max_kernels, max_elements, family), Share()
    end, next_report = time.monotonic() + seconds, time.monotonic() + REPORT_S
    for number in itertools.count(seed):
        now = time.monotonic()
        if session.num_checked >= draws or now >= end or share.mismatches == max_mismatches:
            break
        if program_of(number) % jobs == job:
            try:
                session.run(number)
            except Mismatch as mismatch:
                share.mismatches += 1
                share.reports += [str(mismatch)] if share.mismatches <= MAX_REPORTS else []
            except Exception as error:  # such as a fault of the device, after which nothing runs
                share.mismatches += 1
                share.reports.append(f"{type(error).__name__}: {error}\nreproduce: {session.command(number)}")
                break
        if now >= next_report:
            report(_counted(session, share))
            next_report = now + REPORT_S
    return _counted(session, share)


def _counted(session: Session, share: Share) -> Share:
    share.draws, share.skipped, share.refused = session.num_checked, session.num_skipped, session.num_refused
    share.kernels, share.families = len(session.texts), session.families
    return share


def _run_job(results: Any, job: int, options: dict[str, Any]) -> None:
    """One process: shares go to ``results``, the last with True."""
    torch.set_num_threads(1)  # operands are small, and jobs share the cores
    try:
        share = run_share(job=job, report=lambda share: results.put((job, share, False)), **options)
    except BaseException as error:
        share = Share(mismatches=1, reports=[f"job {job} ended: {type(error).__name__}: {error}"])
    results.put((job, share, True))


def run_jobs(jobs: int, draws: int, max_kernels: int, show: Callable[[list[Share]], None], **options: Any) -> list[Share]:
    """Divide the draws and the kernels among ``jobs`` processes; ``show`` is given what they have done, time and again."""
    if jobs == 1:
        return [run_share(draws=draws, max_kernels=max_kernels, report=lambda share: show([share]), **options)]
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
        ended = [job for job in running if processes[job].exitcode is not None]  # before a look: their messages are in the queue by then
        try:
            job, shares[job], is_last = results.get(timeout=REPORT_S)
            running -= {job} if is_last else set()
        except queue.Empty:
            for job in ended:  # without its last message: killed, by a kernel or for memory, or left by the back door
                shares[job].mismatches += 1
                shares[job].reports.append(f"job {job} ended with status {processes[job].exitcode} before it was done")
                running.remove(job)
        show(shares)
    for process in processes:
        process.join()
    return shares
