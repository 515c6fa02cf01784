"""Shows how far `explain` can be trusted on one GPU: beside the hardware's counters, and on kernels that were spoilt on purpose.

    python benchmarks/explained.py [--json explained.json]
    python benchmarks/explained.py --target h200    # the spoilt kernels alone, without a GPU and without times

The exit status is 0 where every row passes, 1 where one does not, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import wideload as wl
from spoilt import Make, Spoilt, spoilt_kernels
from table import Finding, describe_environment, find_device, name_environment
from wideload.analyze.explain import Explanation
from wideload.gpus import find_target

AGREES_WITHIN = 0.02
"""Of a counter by what was computed."""
COUNTED = ("DRAM read", "DRAM written", "sectors loaded", "sectors stored")
EXACT = ("theoretical occupancy", "registers")
_ROUNDED = 0.01
"""Percent: ncu prints two digits behind the point."""
REQUESTED = ("sectors loaded", "sectors stored")
HANDWRITTEN = ("strided", "structs", "misaligned", "uncoalesced")
"""The spoilt kernels whose requests are counted too."""
SIDE = 1 << 15
N = SIDE * SIDE
"""Floats of a result: 4 GiB, of which the L2 keeps no more than 1.5 % when the kernel ends."""


@dataclass(frozen=True)
class Layout:
    """A function and the layouts that it is called with."""

    name: str
    fn: Callable[..., torch.Tensor]
    arguments: Callable[[Make], Sequence[torch.Tensor]]


LAYOUTS = (
    Layout("contiguous x + y", lambda x, y: x + y, lambda make: (make(N), make(N))),
    Layout("strided x[::2] * 2", lambda x: x * 2, lambda make: (make(2 * N)[::2],)),
    Layout("misaligned x[1:] + y[1:]", lambda x, y: x + y, lambda make: (make(N + 1)[1:], make(N + 1)[1:])),
    Layout("broadcast x + row", lambda x, y: x + y, lambda make: (make(SIDE, SIDE), make(SIDE))),
    Layout("transposed x.t() + y", lambda x, y: x + y, lambda make: (make(SIDE, SIDE).t(), make(SIDE, SIDE))),
)


def counter_rows(name: str, explanation: Explanation, l2_bytes: float, labels: Sequence[str] = COUNTED) -> Iterator[Finding]:
    """A row for each counter of the one kernel: ``labels`` within 2 %, `EXACT` equal."""
    (counters,) = explanation.counters
    for label in (*labels, *EXACT):
        if label not in counters.counted or label not in counters.computed:
            yield Finding(f"{name}: {label}", "not counted", "a counter", False)
            continue
        counted, computed = counters.counted[label].value, counters.computed[label].value
        if label in EXACT:
            is_equal = abs(counted - computed) <= _ROUNDED
            yield Finding(f"{name}: {label}", f"{computed:g} computed, {counted:g} counted", "equal", is_equal)
            continue
        # Written bytes that are still in the L2 when the kernel ends are not yet counted.
        least = computed * (1 - AGREES_WITHIN) - (l2_bytes if label == "DRAM written" else 0)
        apart = counted / computed - 1 if computed else counted
        found = f"{computed:,.0f} computed, {counted:,.0f} counted: {apart:+.2%}"
        yield Finding(f"{name}: {label}", found, f"within {AGREES_WITHIN:.0%}", least <= counted <= computed * (1 + AGREES_WITHIN))


def layout_rows(device: torch.device) -> Iterator[Finding]:
    """Computed figures beside counters."""
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    make = functools.partial(torch.empty, device=device)  # what is counted runs on memory of its own
    for layout in LAYOUTS:
        fused = wl.fuse(layout.fn, name="explained")
        try:
            explanation = fused.explain(*layout.arguments(make), measure=False, ncu=True)
        except wl.DeviceError as error:
            yield Finding(layout.name, str(error), "counters", False)
            return
        yield from counter_rows(layout.name, explanation, l2_bytes)
        torch.cuda.empty_cache()
    for spoilt in spoilt_kernels(torch.cuda.get_device_properties(device).multi_processor_count):
        if spoilt.name in HANDWRITTEN:
            arguments = spoilt.arguments(lambda *shape, dtype=torch.float32: make(shape, dtype=dtype))
            explanation = spoilt.kernel.explain(*arguments, measure=False, ncu=True)
            yield from counter_rows(spoilt.name, explanation, l2_bytes, REQUESTED)


def verdict_row(spoilt: Spoilt, explanation: Explanation) -> Finding:
    """Whether the first verdict names the cause."""
    named = ", ".join(f"{v.limit} {v.effect.value:.2f}x" for v in explanation.verdicts if v.limit != "memory") or "memory"
    measured, wall = explanation.measured_time, explanation.achievable_time
    took = f"; {measured.value:.0f} us, {measured.value / wall.value:.2f}x the wall" if measured and wall else ""
    return Finding(f"spoilt: {spoilt.name}", f"{named}{took}", spoilt.cause, explanation.verdicts[0].limit == spoilt.cause)


def explain_spoilt(target: str | None, device: torch.device | None) -> Iterator[tuple[Spoilt, Explanation]]:
    """Every spoilt kernel explained: for ``target``, or on ``device``, where it is timed."""
    if device is None:
        gpu = find_target(target or "h200").gpu
        sms = gpu.sms if gpu else 1
    else:
        sms = torch.cuda.get_device_properties(device).multi_processor_count
    for spoilt in spoilt_kernels(sms):
        arguments = spoilt.arguments(functools.partial(_make, device))
        yield spoilt, spoilt.kernel.explain(*arguments, target=target)
        del arguments
        torch.cuda.empty_cache()


def _make(device: torch.device | None, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta") if device is None else wl.random_tensor(shape, dtype, device=device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="explain the spoilt kernels for this GPU, which need not be here")
    parser.add_argument("--no-ncu", action="store_true", help="leave out the hardware's counters")
    parser.add_argument("--json", type=Path, help="where to write all rows, explanations and the environment")
    options = parser.parse_args(arguments)
    device, environment = None, None
    if options.target is None:
        device = find_device()
        if device is None:
            return 2
        environment = describe_environment(device)
        print(name_environment(environment))
    rows: list[Finding] = []
    explanations: dict[str, Any] = {}

    def add(row: Finding) -> None:
        rows.append(row)
        print(row, flush=True)

    if device is not None and not options.no_ncu:
        for row in layout_rows(device):
            add(row)
    for spoilt, explanation in explain_spoilt(options.target, device):
        explanations[spoilt.name] = explanation.to_dict()
        add(verdict_row(spoilt, explanation))
    if options.json:
        content = {
            "schema": 1,
            "environment": environment,
            "target": options.target,
            "rows": [dataclasses.asdict(row) for row in rows],
            "explanations": explanations,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.is_kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
