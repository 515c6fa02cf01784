"""Processes that share one empty cache folder while some of them are killed: every cubin right, no temporary file left.

``python tests/unit/test_cache_processes.py 32 50 --kills 64`` runs it at full size and prints what happened.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wideload import cache
from wideload.nvrtc import compile_cubin

SLOW_RENAME_S = 0.2
"""Added between a file's last byte and its rename, at most: without it, no kill in a thousand would fall there."""
KILL_EVERY_S = 0.1
SEED = 3


def source(number: int) -> tuple[str, str]:
    """The text and the name of the kernel of that number; each takes NVRTC some 40 ms."""
    name = f"scale{number}"
    return f'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] = x[threadIdx.x] * {number}.5f + {number}; }}', name


def digest(code: bytes) -> str:
    return hashlib.sha256(code).hexdigest()


def damage(folder: Path, chance: random.Random) -> None:
    """Spoil one entry, so that there is always something to compile: remove it, cut it short, or overwrite a byte in place."""
    entries = sorted((folder / "cubins").glob("*.cubin"))
    with contextlib.suppress(FileNotFoundError, IndexError), chance.choice(entries).open("r+b") as file:
        nbytes = os.fstat(file.fileno()).st_size
        how = chance.randrange(3)
        if how == 0:
            os.unlink(file.name)
        elif how == 1:
            file.truncate(chance.randrange(nbytes))
        else:
            file.seek(chance.randrange(nbytes))
            file.write(chance.randbytes(1))


def work(expected: Mapping[str, str], seed: int, folder: Path | None) -> int:
    """What a process does: ask for every kernel in an order of its own, and do damage in ``folder`` meanwhile.

    Returns how many cubins were not as expected.
    """
    chance = random.Random(seed)
    rename = os.replace

    def rename_slowly(*names: Any) -> None:
        time.sleep(chance.uniform(0, SLOW_RENAME_S))
        rename(*names)

    os.replace = rename_slowly  # type: ignore[assignment]
    wrong = 0
    for number in chance.sample(range(len(expected)), len(expected)):
        text, name = source(number)
        wrong += digest(cache.find_cubin(text, arch="sm_90", name=name).code) != expected[name]
        if folder is not None:
            damage(folder, chance)
    return wrong


def start(expected: Mapping[str, str], seed: int, folder: Path | None) -> int:
    """Fork a worker; its exit status is how many cubins were wrong, at most 100, or 101 where it raised."""
    child = os.fork()
    if child == 0:
        status = 101
        try:
            status = min(work(expected, seed, folder), 100)
        finally:
            os._exit(status)
    return child


def abandoned(folder: Path) -> int:
    """How many temporary files no living process holds locked."""
    count = 0
    for path in folder.rglob("*.part"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            count += 1
    return count


def crowd(num_processes: int, num_kernels: int, num_kills: int, folder: Path) -> dict[str, Any]:
    """Keep ``num_processes`` workers alive through ``num_kills`` kills, each that dies or ends replaced; then let them end.

    A last process, which damages nothing, must mend the folder, and another then find all in it.
    """
    sources = [source(number) for number in range(num_kernels)]
    expected = {name: digest(compile_cubin(text, arch="sm_90", name=name).code) for text, name in sources}
    chance, started_at = random.Random(SEED), time.perf_counter()
    living = [start(expected, seed, folder) for seed in range(num_processes)]
    num_started, num_left, num_killed = num_processes, 0, 0
    statuses: list[int] = []
    while num_killed < num_kills:
        time.sleep(chance.uniform(0, KILL_EVERY_S))
        place = chance.randrange(num_processes)
        os.kill(living[place], signal.SIGKILL)  # one that has ended and was not waited for is still there to be killed
        status = os.waitstatus_to_exitcode(os.waitpid(living[place], 0)[1])
        if status == -signal.SIGKILL:
            num_killed += 1
            num_left += abandoned(folder)
        else:
            statuses.append(status)
        living[place] = start(expected, num_started, folder)
        num_started += 1
    statuses += [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in living]
    statuses.append(os.waitstatus_to_exitcode(os.waitpid(start(expected, num_started, None), 0)[1]))
    found = [digest(cache.find_cubin(text, arch="sm_90", name=name).code) == expected[name] for text, name in sources]
    return {
        "processes": num_processes,
        "kernels": num_kernels,
        "killed": num_killed,
        "ended": len(statuses),
        "wrong or failed": sum(status != 0 for status in statuses) + found.count(False),
        "compiled after all": cache.num_compilations(),
        "temporary files that kills left": num_left,
        "temporary files at the end": len(list(folder.rglob("*.part"))),
        "seconds": round(time.perf_counter() - started_at, 1),
    }


def test_killed_processes_spoil_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "WIDELOAD_CACHE": "1", "WIDELOAD_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, __file__, "6", "8", "--kills", "12"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["killed"] == 12
    assert said["wrong or failed"] == said["compiled after all"] == said["temporary files at the end"] == 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("processes", type=int)
    parser.add_argument("kernels", type=int)
    parser.add_argument("--kills", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as chosen:
        os.environ.setdefault("WIDELOAD_CACHE_DIR", chosen)
        print(json.dumps(crowd(options.processes, options.kernels, options.kills, Path(os.environ["WIDELOAD_CACHE_DIR"])), indent=1))
