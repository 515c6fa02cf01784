"""Turns a request and cases into trials in a process of its own, which may die of them: an illegal address ends all use of a GPU.

Both ends are here. The parent starts another child where one has died, and must not touch the GPU by the kernel itself.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any

import torch

from wideload.decode import decode
from wideload.errors import WideloadError
from wideload.judge.matching import match
from wideload.judge.request import Request
from wideload.judge.trial import GUARD_BYTES, NO_ANSWER, Case, Trial, launch_and_wait, needed_bytes, run_case
from wideload.store import own_environment

__all__ = ["COMMAND", "child_environment", "job_text", "run_in_children"]

COMMAND = (sys.executable, "-m", "wideload.judge.child")
_MARK = "wideload-trial "
"""Before each trial on standard output, where a user's function may print too."""
_TIMEOUT_S = 120.0
"""Of one case, the start of the process included."""
_MAX_DEATHS = 2
"""Of children: each takes seconds to start, and the next would die alike."""
_NO_ROOM = "no room"


def job_text(request: Request, cases: Sequence[Case], device: str, guard_bytes: int = GUARD_BYTES) -> str:
    """What a child reads."""
    return json.dumps(
        {"request": dataclasses.asdict(request), "cases": [dataclasses.asdict(c) for c in cases], "device": device, "guard": guard_bytes}
    )


def child_environment() -> dict[str, str]:
    """The parent's, with the parent's places for modules and kernels."""
    return {**own_environment(), "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def run_in_children(
    request: Request, cases: Sequence[Case], device: str, command: Sequence[str] = COMMAND, timeout_s: float = _TIMEOUT_S
) -> tuple[Trial, ...]:
    """Run the cases, each once. A child that dies, or says nothing for ``timeout_s``, is the error of the case that it had begun.

    After `_MAX_DEATHS` the cases left are not run. A case for which the device has no room is left out.
    """
    left, trials, deaths = list(cases), [], 0
    while left and deaths < _MAX_DEATHS:
        done, fault = _run_child(request, left, device, command, timeout_s)
        trials += done
        left = left[len(done) :]
        if fault is not None:
            deaths += 1
            if fault:
                trials.append(Trial(left[0], error=fault))
                left = left[1:]
    return tuple(trial for trial in trials if trial.refused != _NO_ROOM)


def _run_child(
    request: Request, cases: Sequence[Case], device: str, command: Sequence[str], timeout_s: float
) -> tuple[list[Trial], str | None]:
    """The trials of one child, and why it ended early: None if it did not, nothing if the last trial says it itself."""
    process = subprocess.Popen(
        list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    lines: queue.Queue[str | None] = queue.Queue()
    complaints: list[str] = []
    readers = [
        threading.Thread(target=_pump, args=(process.stdout, lines.put), daemon=True),
        threading.Thread(target=_pump, args=(process.stderr, lambda line: complaints.append(line or "")), daemon=True),
    ]
    for reader in readers:
        reader.start()
    try:
        process.stdin.write(job_text(request, cases, device))
        process.stdin.close()
    except BrokenPipeError:
        pass  # it has died already, and its status says so
    trials: list[Trial] = []
    fault: str | None = None
    while len(trials) < len(cases):
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            fault = f"{NO_ANSWER} {timeout_s:.0f} s"
            break
        if line is None:
            status = process.wait()
            readers[1].join(timeout=1)
            words = [text.strip() for text in complaints if text.strip()]
            fault = f"the process ended with status {status}" + (f": {words[-1]}" if words else "")
            break
        if line.startswith(_MARK):
            trials.append(decode(Trial, json.loads(line.removeprefix(_MARK)), "a child's trial"))
            if trials[-1].error:
                fault = ""
                break
    process.kill()
    process.wait()
    for reader in readers:
        reader.join(timeout=1)
    process.stdout.close()
    process.stderr.close()
    return trials, fault


def _pump(stream: IO[str], put: Callable[[str | None], Any]) -> None:
    for line in stream:
        put(line)
    put(None)


def _run_cases(job: dict[str, Any]) -> Iterator[Trial]:
    """The child's work, up to the first error: behind it the GPU answers nothing."""
    matched = match(decode(Request, job["request"], "the request"))
    device = torch.device(job["device"])
    with torch.cuda.device(device):
        for case in decode(tuple[Case, ...], job["cases"], "the cases"):
            if case.bits and needed_bytes(matched, case) > torch.cuda.mem_get_info(device)[0]:
                yield Trial(case, refused=_NO_ROOM)
                continue
            try:
                trial = run_case(matched, case, device, launch_and_wait, job["guard"])
            except torch.OutOfMemoryError:  # what the function takes in between is its own matter
                trial = Trial(case, refused=_NO_ROOM)
            yield trial
            if case.bits:
                torch.cuda.empty_cache()


def _serve(trials: Iterable[Trial]) -> None:
    for trial in trials:
        print(_MARK + json.dumps(dataclasses.asdict(trial)), flush=True)
        if trial.error:
            os._exit(1)  # a context that has met an illegal address cannot be taken down


if __name__ == "__main__":
    try:
        _serve(_run_cases(json.load(sys.stdin)))
    except WideloadError as error:
        sys.exit(str(error))
