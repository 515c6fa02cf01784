"""Jobs of the fuzz that end before they are done: each is a mismatch, and none is waited for."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from tests.fuzz import jobs
from tests.fuzz.jobs import Share, run_jobs

MAX_ROUNDS = 120
"""Of `run_jobs`, a second each at most: two minutes for three processes to start and end."""


def end(results: Any, job: int, options: dict[str, Any]) -> None:
    """The first job leaves as a library would that calls exit, the second is killed, the third is done."""
    if job == 0:
        os._exit(0)
    if job == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    results.put((job, Share(draws=options["draws"]), True))


def test_a_job_that_ends_without_its_last_message_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_run_job", end)
    rounds = 0

    def show(shares: list[Share]) -> None:
        nonlocal rounds
        rounds += 1
        assert rounds < MAX_ROUNDS, "a job is waited for without end"

    left, killed, done = run_jobs(3, 12, 0, show)
    assert left.reports == ["job 0 ended with status 0 before it was done"]
    assert killed.reports == [f"job 1 ended with status {-int(signal.SIGKILL)} before it was done"]
    assert [share.mismatches for share in (left, killed, done)] == [1, 1, 0]
    assert done.draws == 4
