"""Times contiguous functions on one GPU: wideload, eager PyTorch and torch.compile against the wall of the same bytes.

    python benchmarks/dense.py [--elements 268435456] [--samples 50] [--json dense.json]

Each case is checked before it is timed; everything that is timed in a case takes turns, with a cold L2. The exit status is 0
where every case passes, 1 where one does not, 2 without a GPU. ``WIDELOAD_COMMIT`` names the commit where there is no git checkout.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import wideload as wl
from wideload.measure.environment import read_environment
from wideload.measure.wall import FAULT_RATIO, Ceiling, cuda_index, find_ceiling, nearest_mix, prepare_movers, time_cold

AT_THE_WALL = 0.98
"""The goal for contiguous operands of 2^26 elements and more."""
NOT_BEHIND = 1.01
"""Of a peer's time: what counts as level with it."""
SEED = 0
CHECK_CHUNK = 1 << 24
"""Elements checked at a time: in float64, with its intermediates, some 0.6 GB."""


@dataclass(frozen=True)
class Case:
    """A function of ``num_inputs`` tensors of one dtype, and how far it may be off.

    ``max_steps`` counts in values of the dtype: 0 is bit for bit what eager gives; otherwise the exact value, rounded once.
    """

    name: str
    fn: Callable[..., torch.Tensor]
    dtype: torch.dtype
    num_inputs: int
    max_steps: int = 0

    @property
    def label(self) -> str:
        """``"x + b, bfloat16"``."""
        return f"{self.name}, {str(self.dtype).removeprefix('torch.')}"


CASES = (
    Case("x + b", lambda x, b: x + b, torch.bfloat16, 2),
    Case("silu(x + b) * y", lambda x, b, y: F.silu(x + b) * y, torch.bfloat16, 3, max_steps=1),
    Case("x + b", lambda x, b: x + b, torch.float32, 2),
    Case("relu(x)", lambda x: torch.relu(x), torch.float32, 1),
    Case("-x", lambda x: -x, torch.int8, 1),
    Case("relu(x)", lambda x: torch.relu(x), torch.int8, 1),
)


@dataclass(frozen=True)
class Row:
    """What one case gave. ``peers_us`` has each peer that ran, ``not_run`` the reason for each that did not."""

    case: str
    nbytes_read: int
    nbytes_written: int
    ceiling: Ceiling
    wideload_us: float
    peers_us: Mapping[str, float]
    samples_us: Mapping[str, Sequence[float]]
    not_run: Mapping[str, str]
    steps: int
    max_steps: int

    @property
    def nbytes(self) -> int:
        """The least that must move."""
        return self.nbytes_read + self.nbytes_written

    @property
    def ratio(self) -> float:
        """Of the wall."""
        return self.ceiling.ratio(self.nbytes, self.wideload_us)

    @property
    def verdict(self) -> str:
        """``PASS``, or what is wrong."""
        if self.steps > self.max_steps:
            return f"WRONG: {self.steps} steps off, allowed are {self.max_steps}"
        if self.ratio > FAULT_RATIO:
            return f"FAULT of the measurement: {self.ratio:.3f} of the wall"
        short = [f"{self.ratio:.3f} of the wall"] if self.ratio < AT_THE_WALL else []
        short += [
            f"{self.wideload_us / peer_us - 1:.1%} behind {peer}"
            for peer, peer_us in self.peers_us.items()
            if self.wideload_us > NOT_BEHIND * peer_us
        ]
        return f"short: {', '.join(short)}" if short else "PASS"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        return {**dataclasses.asdict(self), "ratio": self.ratio, "verdict": self.verdict}


def random_inputs(case: Case, num_elements: int, device: torch.device) -> list[torch.Tensor]:
    """Normally distributed floats, or integers over the dtype's whole range: never zeros, which are faster."""
    if case.dtype.is_floating_point:
        return [torch.randn(num_elements, dtype=case.dtype, device=device) for _ in range(case.num_inputs)]
    info = torch.iinfo(case.dtype)
    return [torch.randint(info.min, info.max + 1, (num_elements,), dtype=case.dtype, device=device) for _ in range(case.num_inputs)]


def count_steps(case: Case, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> int:
    """How many values of the dtype ``result`` lies away from what is right, at most; NaN and the sign of a zero count."""
    worst = 0
    for first in range(0, result.numel(), CHECK_CHUNK):
        found, *chunk = (tensor[first : first + CHECK_CHUNK] for tensor in (result, *inputs))
        right = case.fn(*(tensor.double() for tensor in chunk)).to(case.dtype) if case.max_steps else case.fn(*chunk)
        worst = max(worst, int((_ordered(found) - _ordered(right)).abs().max()))
    return worst


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart: the bits where they are not negative, -1 for -0.0 and down."""
    if not tensor.dtype.is_floating_point:
        return tensor.long()
    integer = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    bits = tensor.view(integer).long()
    return torch.where(bits >= 0, bits, ~(bits & torch.iinfo(integer).max))


def compile_peer(case: Case, inputs: Sequence[torch.Tensor]) -> Callable[..., torch.Tensor] | str:
    """``torch.compile`` of the case, compiled; the reason where that is not to be had, or not right where it must be exact."""
    try:
        compiled = torch.compile(case.fn, dynamic=False)
        result = compiled(*inputs)
    except Exception as error:  # Inductor's backends raise what they like
        return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    if case.max_steps == 0 and (steps := count_steps(case, inputs, result)):
        return f"wrong: {steps} steps off"
    return compiled


def run_case(case: Case, num_elements: int, num_samples: int, device: torch.device) -> Row:
    """Check, then time everything in turns: wideload, its peers, and each kernel of the wall for the same bytes."""
    torch.manual_seed(SEED)
    inputs = random_inputs(case, num_elements, device)
    fused = wl.fuse(case.fn, name="dense_case")
    result = fused(*inputs)
    steps = count_steps(case, inputs, result)
    nbytes_read, nbytes_written = sum(t.nbytes for t in inputs), result.nbytes
    del result

    mix = nearest_mix(nbytes_read, nbytes_written)
    movers, nbytes_moved = prepare_movers(mix, nbytes_read + nbytes_written, device.index)
    calls: dict[str, Callable[[], object]] = {"wideload": functools.partial(fused, *inputs), "eager": functools.partial(case.fn, *inputs)}
    not_run = {}
    compiled = compile_peer(case, inputs)
    if isinstance(compiled, str):
        not_run["compile"] = compiled
    else:
        calls["compile"] = functools.partial(compiled, *inputs)
    samples = time_cold({**calls, **movers}, device.index, num_samples)
    medians = {name: statistics.median(samples[name]) for name in calls}
    return Row(
        case=case.label,
        nbytes_read=nbytes_read,
        nbytes_written=nbytes_written,
        ceiling=find_ceiling(mix, nbytes_moved, {name: samples[name] for name in movers}),
        wideload_us=medians.pop("wideload"),
        peers_us=medians,
        samples_us=samples,
        not_run=not_run,
        steps=steps,
        max_steps=case.max_steps,
    )


def format_table(rows: Sequence[Row]) -> str:
    """One line a case: times in microseconds, the wall's for the same bytes, and wideload's share of it."""
    lines = [f"{'case':<26}{'mix':>5}{'wall':>9}{'wideload':>10}{'eager':>9}{'compile':>9}{'TB/s':>7}{'of wall':>9}  verdict"]
    for row in rows:
        peers = "".join(f"{row.peers_us[peer]:>9.1f}" if peer in row.peers_us else f"{'not run':>9}" for peer in ("eager", "compile"))
        wall_us, bandwidth_tbps = row.ratio * row.wideload_us, row.nbytes / row.wideload_us / 1e6
        figures = f"{wall_us:>9.1f}{row.wideload_us:>10.1f}{peers}{bandwidth_tbps:>7.2f}{row.ratio:>9.3f}"
        lines.append(f"{row.case:<26}{row.ceiling.mix.name:>5}{figures}  {row.verdict}")
    reasons = {f"{peer} not run: {reason}" for row in rows for peer, reason in row.not_run.items()}
    return "\n".join((*lines, *sorted(reasons)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every case, print the table last, and write all samples where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 28)
    parser.add_argument("--samples", type=int, default=50, help="of each contender; the median counts")
    parser.add_argument("--json", type=Path, help="where to write all samples and the environment")
    options = parser.parse_args(arguments)
    try:
        device = torch.device("cuda", cuda_index())
    except wl.DeviceError as error:
        print(error, file=sys.stderr)
        return 2
    environment = dataclasses.asdict(read_environment(device))
    environment["commit"] = environment["commit"] or os.environ.get("WIDELOAD_COMMIT")
    rows, failed = [], []
    for case in CASES:
        print(f"{case.label} ...", file=sys.stderr, flush=True)
        try:
            rows.append(run_case(case, options.elements, options.samples, device))
        except Exception:  # the other cases are still worth their time on the GPU
            traceback.print_exc()
            failed.append(case.label)
        torch.cuda.empty_cache()
    if options.json:
        content = {
            "schema": 1,
            "environment": environment,
            "arguments": {"elements": options.elements, "samples": options.samples, "seed": SEED},
            "rows": [row.to_dict() for row in rows],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, commit {environment['commit']}")
    print(f"{options.elements} elements, cold L2, median of {options.samples}, microseconds")
    print(format_table(rows))
    for label in failed:
        print(f"{label:<26} FAILED: see the traceback above")
    return int(bool(failed) or any(row.verdict != "PASS" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
