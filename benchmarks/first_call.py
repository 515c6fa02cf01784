"""Times what a user waits for before the first result, each part apart and each in processes of its own: medians of several.

``python benchmarks/first_call.py [--repeats N] [--json]``. Without a GPU, the results are cubins for sm_90 and nothing is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

TARGET = "sm_90"
GOALS_MS = {"import wideload": 100, "new SwiGLU": 150, "slowest of the table": 400, "SwiGLU from the disk": 10}
"""Of design.md, sections 2 and 6: after NVRTC's own first load; from the disk, beyond importing torch and cuda.core."""

TABLE_DTYPES = ("bfloat16", "float32", "float64", "int64", "uint8")
NUM_SLOWEST = 8


def time_ms(function: Callable[[], Any]) -> float:
    """How long one call takes."""
    start = time.perf_counter()
    function()
    return (time.perf_counter() - start) * 1e3


class Caller:
    """Makes a first call of a function: on a GPU until its result is there, elsewhere until its cubin is."""

    def __init__(self) -> None:
        import torch

        self._torch, self.on_gpu = torch, torch.cuda.is_available()

    def tensor(self, dtype: str, shape: tuple[int, ...] = (64, 1024)) -> Any:
        """A tensor of ones; without a GPU, one without memory."""
        return self._torch.ones(shape, dtype=getattr(self._torch, dtype), device="cuda" if self.on_gpu else "meta")

    def __call__(self, fused: Any, *arguments: Any) -> None:
        """Raises a ``WideloadError`` where the function takes no such arguments."""
        if self.on_gpu:
            fused(*arguments)
            self._torch.cuda.synchronize()
        else:
            assert fused.plan(*arguments, target=TARGET).cubin


def time_imports() -> dict[str, float]:
    """In the order in which a program meets them; wideload's own import is what it adds to the others."""
    parts = {name: time_ms(lambda name=name: __import__(name)) for name in ("torch", "cuda.core", "wideload")}  # type: ignore[misc]
    return {f"import {name}": time for name, time in parts.items()}


def swiglu(gate: Any, up: Any) -> Any:
    """The usual size of a fused function."""
    import torch

    return torch.nn.functional.silu(gate) * up


def time_new() -> dict[str, float]:
    """A process that finds nothing on the disk."""
    times = time_imports()
    import wideload as wl
    from wideload.nvrtc import compile_cubin

    call = Caller()
    arguments = [call.tensor("bfloat16")] * 2  # the CUDA context is made here
    empty = 'extern "C" __global__ void empty() {}'
    times["NVRTC's first load"] = time_ms(lambda: compile_cubin(empty, arch=TARGET, name="empty"))
    times["an empty kernel"] = time_ms(lambda: compile_cubin(empty, arch=TARGET, name="empty"))
    times["new SwiGLU"] = time_ms(lambda: call(wl.fuse(swiglu), *arguments))
    return times


def time_stored() -> dict[str, float]:
    """A process that finds the function on the disk."""
    times = time_imports()
    import wideload as wl
    from wideload.cache import num_compilations

    call = Caller()
    arguments = [call.tensor("bfloat16")] * 2
    times["SwiGLU from the disk"] = time_ms(lambda: call(wl.fuse(swiglu), *arguments))
    assert num_compilations() == 0
    return times


def time_table() -> dict[str, float]:
    """Every op of the table alone, new, for several dtypes, after NVRTC's first load; the slowest again, to tell them from chance."""
    import wideload as wl
    from wideload.ops_table import OPS

    call = Caller()
    call(wl.fuse(swiglu), *[call.tensor("float32")] * 2)

    def time_op(name: str, dtype: str, number: int) -> float | None:
        """None where torch has no such op; another ``number`` makes it another kernel."""
        tensors = [call.tensor(dtype)] * len(OPS[name].operands)
        for arguments in (tensors, [tensors[0], *[0.5] * (len(tensors) - 1)]):  # some operands are numbers in torch
            with contextlib.suppress(wl.WideloadError, TypeError, RuntimeError):
                return time_ms(lambda arguments=arguments: call(wl.fuse(OPS[name].torch, name=f"{name}{number}"), *arguments))
        return None

    times = {(name, dtype): time for name in OPS for dtype in TABLE_DTYPES if (time := time_op(name, dtype, 0)) is not None}
    for op in sorted(times, key=lambda op: -times[op])[: 2 * NUM_SLOWEST]:
        times[op] = statistics.median([times[op], *(time for number in range(1, 5) if (time := time_op(*op, number)) is not None)])
    return {" ".join(op): time for op, time in times.items()}


WORKERS = {"new": time_new, "stored": time_stored, "table": time_table}


def run_worker(name: str, cache: str) -> dict[str, float]:
    """In a process of its own."""
    environment = {**os.environ, "WIDELOAD_CACHE": "1", "WIDELOAD_CACHE_DIR": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # what is installed has its bytecode
    command = [sys.executable, "-W", "ignore", __file__, "--worker", name]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    times: dict[str, float] = json.loads(done.stdout)
    return times


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Of each part."""
    return {part: statistics.median(run[part] for run in runs) for part in runs[0]}


def measure(repeats: int) -> dict[str, Any]:
    """Everything, with the samples."""
    new, stored = [], []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as cache:
            new.append(run_worker("new", cache))
            stored.append(run_worker("stored", cache))
    with tempfile.TemporaryDirectory() as cache:
        table = run_worker("table", cache)
    slowest = dict(sorted(table.items(), key=lambda item: -item[1])[:NUM_SLOWEST])
    imports = medians([{part: run[part] for part in run if part.startswith("import")} for run in new + stored])
    parts = {**medians(new), **imports, "SwiGLU from the disk": medians(stored)["SwiGLU from the disk"]}
    parts["slowest of the table"] = max(table.values())
    return {"parts_ms": parts, "slowest_ms": slowest, "num_table": len(table), "samples_ms": {"new": new, "stored": stored}}


def main() -> None:
    """Print a table, or JSON with the samples and the machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=WORKERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(WORKERS[options.worker]()))
        return
    result = measure(options.repeats)
    if options.json:
        import torch

        from table import describe_environment

        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        print(json.dumps({"environment": describe_environment(device), "goals_ms": GOALS_MS, **result}, indent=1))
        return
    for part, part_ms in result["parts_ms"].items():
        goal = f"  goal {GOALS_MS[part]} ms" if part in GOALS_MS else ""
        print(f"{part:<24}{part_ms:8.1f} ms{goal}")
    print(f"\nslowest of {result['num_table']} single ops")
    for name, op_ms in result["slowest_ms"].items():
        print(f"  {name:<22}{op_ms:8.1f} ms")


if __name__ == "__main__":
    main()
