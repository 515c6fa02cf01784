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
from dataclasses import dataclass
from pathlib import Path

import torch

import wideload as wl
from table import describe_environment, find_device, name_environment

SIZES_LOG2 = (19, 20, 22, 24, 26, 28, 30, 32)
"""fp32 elements of a negation: kernels of 2 us to 8 ms on an H200."""
AGREES_WITHIN = 0.03
"""Of the profiler's time of the same kernels."""
REPEATS_WITHIN = 0.01
"""Of one result by the next."""
FALSE_WITHIN = 0.01
"""FASTER and SLOWER among comparisons of a call with itself."""
CEILINGS_TBPS = {"1R1W": 4.2, "1R0W": 4.4, "0R1W": 4.6, "2R1W": 4.3}
"""What an H200's memory was measured to reach at least, by bytes read and written."""

negate = wl.fuse(lambda x: -x, name="negate")


@dataclass(frozen=True)
class Row:
    """A figure, what it must keep to, and whether it does."""

    what: str
    found: str
    allowed: str
    is_kept: bool

    def __str__(self) -> str:
        return f"{self.what:<46}{self.found:<36}{self.allowed:<24}{'PASS' if self.is_kept else 'short'}"


def time_beside_profiler(num_elements: int, device: torch.device) -> tuple[float, float]:
    """(the median of `wl.bench`, that of the profiler over the same run's kernels), in microseconds.

    What checks and warms up is in the profiler's figure too; the median leaves it behind.
    """
    x = wl.random_tensor((num_elements,), torch.float32, device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        result = wl.bench(negate, x, max_samples=60)
    kernels = [event.time_range.elapsed_us() for event in profiler.events() if event.name == "negate_dense"]
    if not kernels:
        raise SystemExit(
            "the profiler saw no kernels: the driver does not allow CUPTI here (nvidia's module option NVreg_RestrictProfilingToAdminUsers)"
        )
    return _median_us(result), statistics.median(kernels)


def _median_us(result: wl.BenchResult) -> float:
    time_us = result.subject.time_us
    if time_us is None:
        raise SystemExit(f"the call was not timed: {', '.join(label.code for label in result.subject.labels)}")
    return time_us.median


def profiler_rows(device: torch.device) -> Iterator[Row]:
    """One row a size."""
    for log2 in SIZES_LOG2:
        bench_us, kernel_us = time_beside_profiler(1 << log2, device)
        apart = bench_us / kernel_us - 1
        found = f"{bench_us:.2f} us, {kernel_us:.2f} us: {apart:+.2%}"
        yield Row(f"bench, profiler: 2^{log2} fp32 negated", found, f"within {AGREES_WITHIN:.0%}", abs(apart) <= AGREES_WITHIN)
        torch.cuda.empty_cache()


def repeat_rows(device: torch.device) -> Iterator[Row]:
    """One row a size."""
    for log2 in SIZES_LOG2:
        x = wl.random_tensor((1 << log2,), torch.float32, device=device)
        first, second = (_median_us(wl.bench(negate, x)) for _ in range(2))
        apart = second / first - 1
        found = f"{first:.2f} us, {second:.2f} us: {apart:+.2%}"
        yield Row(f"bench twice: 2^{log2} fp32 negated", found, f"within {REPEATS_WITHIN:.0%}", abs(apart) <= REPEATS_WITHIN)
        del x
        torch.cuda.empty_cache()


def itself_rows(device: torch.device, num_pairs: int) -> Iterator[Row]:
    """A short call, timed in graphs, and a long one, timed by events."""
    for log2 in (20, 26):
        x = wl.random_tensor((1 << log2,), torch.float32, device=device)
        tested = wl.self_test(negate, x, num_pairs=num_pairs)
        found = ", ".join(f"{count} {verdict}" for verdict, count in sorted(tested.verdicts.items()))
        yield Row(f"compared with itself: 2^{log2} fp32 negated", found, f"{FALSE_WITHIN:.0%} false", tested.false_rate <= FALSE_WITHIN)


def ceiling_rows(device: torch.device) -> Iterator[Row]:
    """The roofline's measured ceilings."""
    ceilings = wl.roofline(device, refresh=True).ceilings
    for mix, least in CEILINGS_TBPS.items():
        tbps = ceilings[mix].value / 1e3
        yield Row(f"ceiling of {mix}", f"{tbps:.3f} TB/s", f"at least {least} (H200)", tbps >= least)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="comparisons of a call with itself, each of the two")
    parser.add_argument("--json", type=Path, help="where to write all rows and the environment")
    options = parser.parse_args(arguments)
    try:
        device = find_device()
    except wl.DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    environment = describe_environment(device)
    print(name_environment(environment))
    rows: list[Row] = []
    for found in (profiler_rows(device), repeat_rows(device), itself_rows(device, options.pairs), ceiling_rows(device)):
        for row in found:
            rows.append(row)
            print(row, flush=True)
    if options.json:
        content = {"schema": 1, "environment": environment, "rows": [dataclasses.asdict(row) for row in rows]}
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.is_kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
