"""Times AdamW on one GPU: wideload, torch's fused and foreach, against the wall of the same bytes; and what a step costs the host.

    python benchmarks/optimizers.py [--samples 30] [--only TEXT] [--json optimizers.json]

Each case is checked beside torch's fused AdamW before it is timed, with a cold L2. The exit status is 0 where every case passes, 1 where
one does not, 2 without a GPU. ``WIDELOAD_COMMIT`` names the commit where there is no git checkout.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import wideload as wl
from table import NOT_BEHIND, SEED, Draw, Timed, choose_cases, find_device, new_parser, run_table
from wideload.measure.wall import FAULT_RATIO, Ceiling, find_ceiling, nearest_mix, prepare_movers, time_cold

AT_THE_WALL = 0.97
FASTER_THAN_FUSED = 1.25
"""The goals for many megabytes."""

LAYER = ((1024, 1024), (1000, 1001), (701, 1439), (513, 1361), (1023,), (1024,), (4097,), (1,))
"""Matrices and vectors of round and odd sizes, 3.8 M elements."""
NUM_LAYERS = 53

CHECK_STEPS = 5
LR = 1e-3
CHECK_ROUNDINGS = 2
"""Of a parameter, and of four times what all steps move it by, in each step: two programs round it twice, by half an eps each."""

FUSED, FOREACH = "torch fused", "torch foreach"


@dataclass(frozen=True)
class Case:
    """Parameters of these shapes. ``wall_goal`` is None where the time is that of a launch; then torch's fused is not to be faster."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    wall_goal: float | None = AT_THE_WALL
    state_dtype: torch.dtype | None = None

    @property
    def num_elements(self) -> int:
        """Of all parameters."""
        return sum(torch.Size(shape).numel() for shape in self.shapes)

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes that a step must read and write: parameter, gradient and two moments; all but the gradient."""
        own, moment = self.dtype.itemsize, (self.state_dtype or self.dtype).itemsize
        return self.num_elements * (2 * own + 2 * moment), self.num_elements * (own + 2 * moment)


MODEL = LAYER * NUM_LAYERS
CASES = (
    Case("424 tensors, 200 M, float32", MODEL, torch.float32),
    Case("424 tensors, 200 M, bfloat16", MODEL, torch.bfloat16),
    Case("424 tensors, 200 M, bfloat16, state float32", MODEL, torch.bfloat16, state_dtype=torch.float32),
    Case("1000 tensors of 1000, float32", ((1000,),) * 1000, torch.float32, wall_goal=None),
)


@dataclass(frozen=True)
class Row(Timed):
    """What one case gave; ``excess`` is the largest difference from torch's fused over what is allowed."""

    case: str
    num_tensors: int
    num_elements: int
    nbytes: tuple[int, int]
    wall_goal: float | None
    ceiling: Ceiling
    samples_us: Mapping[str, Sequence[float]]
    host_us: Mapping[str, float]
    excess: float
    not_run: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """``PASS``, or what is wrong."""
        if not self.excess <= 1:
            return f"WRONG: {self.excess:.3g} times the difference that is allowed"
        times, short = self.times_us, []
        if self.wall_goal is not None:
            if self.wall_ratio > FAULT_RATIO:
                return f"FAULT of the measurement: {self.wall_ratio:.3f} of the wall"
            if self.wall_ratio < self.wall_goal:
                short.append(f"{self.wall_ratio:.3f} of the wall")
        speedup = 1 / NOT_BEHIND if self.wall_goal is None else FASTER_THAN_FUSED
        if FUSED in times and times[FUSED] < speedup * times["wideload"]:
            short.append(f"{times[FUSED] / times['wideload']:.2f} times as fast as {FUSED}")
        if FUSED in self.host_us and self.host_us["wideload"] > NOT_BEHIND * self.host_us[FUSED]:
            short.append(f"the host takes {self.host_us['wideload'] / self.host_us[FUSED]:.2f} times as long as for {FUSED}")
        return f"short: {', '.join(short)}" if short else "PASS"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        figures["ceiling"] = dataclasses.asdict(self.ceiling)
        return {**figures, "times_us": self.times_us, "wall_ratio": self.wall_ratio, "verdict": self.verdict}


class Contender:
    """An optimizer over parameters of its own, with two sets of gradients in turns: in training, their addresses change."""

    def __init__(self, make: Callable[[Any], Any], start: Sequence[torch.Tensor], grads: Sequence[Sequence[torch.Tensor]]) -> None:
        self.params = [torch.nn.Parameter(tensor.clone()) for tensor in start]
        self._grads, self._num_steps = grads, 0
        self.give()
        self.optimizer = make(self.params)

    def give(self) -> None:
        """The next gradients."""
        for p, g in zip(self.params, self._grads[self._num_steps % len(self._grads)], strict=True):
            p.grad = g
        self._num_steps += 1

    def host_us(self, num_samples: int) -> float:
        """What a step costs the host that has nothing to wait for, with new gradients: the median."""
        costs = []
        for _ in range(num_samples):
            self.give()
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            self.optimizer.step()
            costs.append((time.perf_counter_ns() - start) / 1e3)
        torch.cuda.synchronize()
        return statistics.median(costs)


def make_contenders(case: Case, draw: Draw) -> dict[str, Contender]:
    """Wideload's AdamW and, where torch has such a state, torch's two."""
    start = [draw(*shape, dtype=case.dtype) for shape in case.shapes]
    grads = [[draw(*shape, dtype=case.dtype) for shape in case.shapes] for _ in range(2)]
    makers: dict[str, Callable[[Any], Any]] = {"wideload": lambda params: wl.optim.AdamW(params, lr=LR, state_dtype=case.state_dtype)}
    if case.state_dtype is None:
        makers[FUSED] = lambda params: torch.optim.AdamW(params, lr=LR, fused=True)
        makers[FOREACH] = lambda params: torch.optim.AdamW(params, lr=LR, foreach=True)
    return {name: Contender(make, start, grads) for name, make in makers.items()}


def find_excess(case: Case, contenders: Mapping[str, Contender]) -> float:
    """The largest difference from torch's fused AdamW after some steps, over what is allowed; in fp32 where it has no such state."""
    mine = contenders["wideload"]
    if FUSED in contenders:
        reference = contenders[FUSED]
        params, optimizer = reference.params, reference.optimizer
    else:
        params = [torch.nn.Parameter(p.detach().float()) for p in mine.params]
        optimizer = torch.optim.AdamW(params, lr=LR, fused=params[0].is_cuda)
    for _ in range(CHECK_STEPS):
        mine.give()
        for p, q in zip(mine.params, params, strict=True):
            assert p.grad is not None
            q.grad = p.grad.to(q.dtype)
        mine.optimizer.step()
        optimizer.step()
        if FUSED not in contenders:
            for q in params:  # a parameter of fewer digits, state of all
                q.data.copy_(q.detach().to(case.dtype))
    eps = torch.finfo(case.dtype).eps
    worst = 0.0
    for p, q in zip(mine.params, params, strict=True):
        wanted = q.detach().double()
        allowed = CHECK_ROUNDINGS * CHECK_STEPS * eps * (wanted.abs() + 4 * CHECK_STEPS * LR)
        worst = max(worst, float(((p.detach().double() - wanted).abs() / allowed).nan_to_num(torch.inf).max()))
    return worst


def run_case(case: Case, num_samples: int, device: torch.device) -> Row:
    """Check, then time in turns: each contender's step and each kernel of the wall for the same bytes; then each step on the host."""
    contenders = make_contenders(case, Draw(device))
    excess = find_excess(case, contenders)
    mix = nearest_mix(*case.nbytes)
    movers, nbytes_moved = prepare_movers(mix, sum(case.nbytes), device.index)
    not_run: dict[str, str] = {}
    while True:
        steps = {name: contender.optimizer.step for name, contender in contenders.items() if name not in not_run}
        try:
            samples = time_cold({**steps, **movers}, device.index, num_samples)
            break
        except wl.DeviceError as error:  # more kernels than the driver's queue holds
            exposed = [name for name in steps if name in str(error) and name != "wideload"]
            if not exposed:
                raise
            not_run.update(dict.fromkeys(exposed, str(error)))
    return Row(
        case=case.name,
        num_tensors=len(case.shapes),
        num_elements=case.num_elements,
        nbytes=case.nbytes,
        wall_goal=case.wall_goal,
        ceiling=find_ceiling(mix, nbytes_moved, {name: samples[name] for name in movers}),
        samples_us={name: samples[name] for name in steps},
        host_us={name: contender.host_us(num_samples) for name, contender in contenders.items()},
        excess=excess,
        not_run=not_run,
    )


def format_table(rows: Sequence[Row]) -> str:
    """Two lines a case: GPU times beside the wall's, and what the host takes, in microseconds."""
    names = ("wideload", FUSED, FOREACH)
    width = max((len(row.case) for row in rows), default=0) + 2
    lines = [f"{'case':<{width}}{'':>5}{'wall':>9}" + "".join(f"{name:>15}" for name in names) + f"{'TB/s':>7}{'of wall':>9}  verdict"]

    def cells(times: Mapping[str, float]) -> str:
        return "".join(f"{times[name]:>15.1f}" if name in times else f"{'':>15}" for name in names)

    for row in rows:
        mine_us = row.times_us["wideload"]
        figures = f"{sum(row.nbytes) / mine_us / 1e6:>7.2f}{row.wall_ratio:>9.3f}"
        lines.append(f"{row.case:<{width}}{'GPU':>5}{row.wall_ratio * mine_us:>9.1f}{cells(row.times_us)}{figures}  {row.verdict}")
        lines.append(f"{'':<{width}}{'host':>5}{'':>9}{cells(row.host_us)}")
        lines += [f"{name} not timed: {reason}" for name, reason in row.not_run.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__, 30)
    options = parser.parse_args(arguments)
    chosen = choose_cases(parser, CASES, options.only)
    device = find_device()
    if device is None:
        return 2
    return run_table(
        chosen,
        lambda case: run_case(case, options.samples, device),
        device,
        {"samples": options.samples, "seed": SEED},
        options.json,
        f"AdamW, one step, cold L2, median of {options.samples}, microseconds",
        format_table,
    )


if __name__ == "__main__":
    sys.exit(main())
