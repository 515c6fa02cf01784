"""Shows how far `wl.bench` can be trusted on one GPU: beside the profiler, beside itself, and what it finds different from itself.

    python benchmarks/ruler.py [--pairs 200] [--json ruler.json]

The exit status is 0 where every row passes, 1 where one does not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

import wideload as wl
from table import Finding, describe_environment, find_device, name_environment

# The gap that `wl.bench` takes off is found with a torch.neg of 2^20 elements: the row of that size agrees by construction, the others not.
SIZES_LOG2 = (19, 20, 22, 24, 26, 28, 30)
"""fp32 elements of a negation: kernels of 2 us to 2 ms on an H200."""
AGREES_WITHIN = 0.03
"""Of the profiler's time of the same kernels."""
REPEATS_WITHIN = 0.01
"""Of one result by the next."""
FALSE_WITHIN = 0.01
"""FASTER and SLOWER among comparisons of a call with itself."""
CEILINGS_TBPS = {"1R1W": 4.2, "1R0W": 4.4, "0R1W": 4.6, "2R1W": 4.3}
"""What an H200's memory was measured to reach at least, by bytes read and written."""

NUM_SINES = 40

negate = wl.fuse(lambda x: -x, name="negate")


@wl.fuse
def sines(x: torch.Tensor) -> torch.Tensor:
    """Bound by fp64 arithmetic, so that it is long without filling the memory."""
    for _ in range(NUM_SINES):
        x = torch.sin(x)
    return x


def kernel_us(fn: wl.FusedFunction, x: torch.Tensor) -> float:
    """The profiler's median of the kernels of a run of `wl.bench`; those that check and warm up are too few to move it."""
    (kernel,) = fn.plan(x).kernels
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
        wl.bench(fn, x, max_samples=60)
    durations = [event.time_range.elapsed_us() for event in profiler.events() if event.name == kernel.name]
    if not durations:
        raise SystemExit("the profiler saw no kernels: the driver does not let this user profile (NVreg_RestrictProfilingToAdminUsers)")
    return statistics.median(durations)


def _median_us(result: wl.BenchResult) -> float:
    time_us = result.subject.time_us
    if time_us is None:
        raise SystemExit(f"the call was not timed: {', '.join(label.code for label in result.subject.labels)}")
    return time_us.median


def cases(device: torch.device) -> Iterator[tuple[str, wl.FusedFunction, torch.Tensor]]:
    """Calls from 2 us to 10 ms."""
    for log2 in SIZES_LOG2:
        yield f"2^{log2} fp32 negated", negate, wl.random_tensor((1 << log2,), torch.float32, device=device)
    yield "2^27 fp64, 40 sines", sines, wl.random_tensor((1 << 27,), torch.float64, device=device)


def bench_rows(device: torch.device) -> Iterator[Finding]:
    """Two rows a case: two results of `wl.bench`, and the first beside what the profiler says of a third run."""
    for name, fn, x in cases(device):
        first, second = (_median_us(wl.bench(fn, x)) for _ in range(2))
        profiled = kernel_us(fn, x)
        for what, other, within in (("bench, bench", second, REPEATS_WITHIN), ("bench, profiler", profiled, AGREES_WITHIN)):
            apart = first / other - 1
            found = f"{first:.2f} us, {other:.2f} us: {apart:+.2%}"
            yield Finding(f"{what}: {name}", found, f"within {within:.0%}", abs(apart) <= within)
        torch.cuda.empty_cache()


def itself_rows(device: torch.device, num_pairs: int) -> Iterator[Finding]:
    """A short call, timed in graphs, and a long one, timed by events."""
    for log2 in (20, 26):
        x = wl.random_tensor((1 << log2,), torch.float32, device=device)
        tested = wl.self_test(negate, x, num_pairs=num_pairs)
        found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tested.verdicts.items()))
        yield Finding(f"compared with itself: 2^{log2} fp32 negated", found, f"{FALSE_WITHIN:.0%} false", tested.false_rate <= FALSE_WITHIN)


def ceiling_rows(device: torch.device) -> Iterator[Finding]:
    """The roofline's measured ceilings."""
    ceilings = wl.roofline(device, refresh=True).ceilings
    for mix, least in CEILINGS_TBPS.items():
        tbps = ceilings[mix].value / 1e3
        yield Finding(f"ceiling of {mix}", f"{tbps:.3f} TB/s", f"at least {least} (H200)", tbps >= least)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="comparisons of a call with itself, each of the two")
    parser.add_argument("--json", type=Path, help="where to write all rows and the environment")
    options = parser.parse_args(arguments)
    device = find_device()
    if device is None:
        return 2
    environment = describe_environment(device)
    print(name_environment(environment))
    rows: list[Finding] = []
    for found in (bench_rows(device), itself_rows(device, options.pairs), ceiling_rows(device)):
        for row in found:
            rows.append(row)
            print(row, flush=True)
    if options.json:
        content = {"schema": 1, "environment": environment, "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.is_kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
