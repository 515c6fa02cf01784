"""Times three functions at 100 sizes from 2^10 to 2^24 elements, odd ones among them, against eager's single op of the same bytes.

    python benchmarks/sizes.py [--points 100] [--samples 20] [--only TEXT] [--no-compile] [--json sizes.json] [--png sizes.png]

Each point is checked before it is timed. The exit status is 0 where no point takes more than 5 % longer than eager's op, 1 where one does,
2 without a GPU. ``WIDELOAD_COMMIT`` names the commit where there is no git checkout.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
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
from table import SEED, Case, Draw, Finding, choose_cases, count_steps, describe_environment, find_device, name_environment, new_parser
from wideload.measure import unique_bytes
from wideload.measure.environment import GpuMonitor, nominal_bytes_per_second
from wideload.measure.outcome import tensors_of
from wideload.measure.timing import WARM_UP_SECONDS, Call, GraphSampler, StopRule, capture, collect, num_rotated_buffers, warm_up
from wideload.pictures.canvas import LIGHT, new_canvas, place_legend, render, style_axes

SCHEMA = 2
NOT_ABOVE = 1.05
"""Of the time of eager's op, byte for byte."""
LEAST_LOG2, MOST_LOG2 = 10, 24
COMPILED_LOG2 = (12, 16, 20, 24)
"""torch.compile takes half a second for every shape: the points nearest to these sizes."""
AGAIN = 4
"""Times the samples with which points above the limit are timed once more; those count: of 300 medians, chance moves some by 5 %."""
MAX_BUFFERS = 256
"""Calls in a graph are on so many copies at most: of less than 1.2 MB each, some of the data are still in an H200's L2."""
GRAPH_US = 500.0
MAX_CALLS = 512
BASE_US = 1.5
"""What a call takes at least, about: with it and the nominal bandwidth, the calls of a graph are reckoned."""
ASSUMED_BYTES_PER_SECOND = 1e12
"""Where the driver does not say: it only decides how long a graph is."""
PITCH = 128
"""Copies of an operand begin so many elements apart, or a multiple: 256 bytes, as torch's allocator has it."""
UNCOUNTED = 2
"""Samples of each contender before those that count."""

BF16_BYTES = 2

Shapes = Callable[[int], Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class Operation:
    """What is called, and the shapes of its operands for results of so many elements."""

    name: str
    fn: Callable[..., torch.Tensor]
    shapes: Shapes


@dataclass(frozen=True)
class Function(Operation):
    """A function that wideload fuses, eager's single op of as many bytes, and what is timed beside them and not counted.

    ``max_steps`` is as in `table.Case`.
    """

    eager: Operation
    max_steps: int = 0
    shown: tuple[Operation, ...] = ()


@dataclass(frozen=True)
class Point:
    """A function at one size: bytes that each contender moves at least, samples of its time on the GPU, and how far the result is off."""

    function: str
    elements: int
    nbytes: Mapping[str, int]
    samples_us: Mapping[str, Sequence[float]]
    steps: int
    max_steps: int

    @property
    def times_us(self) -> dict[str, float]:
        """Medians."""
        return {name: statistics.median(samples) for name, samples in self.samples_us.items()}

    def times_of(self, name: str) -> float:
        """How many times as long wideload takes as contender ``name``, byte for byte."""
        times = self.times_us
        return times["wideload"] / times[name] * self.nbytes[name] / self.nbytes["wideload"]

    @property
    def verdict(self) -> str:
        """``PASS``, or what is wrong."""
        if self.steps > self.max_steps:
            return f"WRONG: {self.steps} steps off, allowed are {self.max_steps}"
        return "PASS" if self.times_of("eager") <= NOT_ABOVE else f"short: {self.times_of('eager'):.3f} times eager's time"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        against = {name: self.times_of(name) for name in self.samples_us if name != "wideload"}
        return {**dataclasses.asdict(self), "times_us": self.times_us, "times_of": against, "verdict": self.verdict}


# ---- functions and sizes


def add(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One rounding."""
    return x + b


def silu_mul(x: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Three operations in eager."""
    return F.silu(x + b) * y


def turned_copy(x: torch.Tensor) -> torch.Tensor:
    """The matrix transposed, in memory too."""
    return x.t().contiguous()


def flat(num: int, times: float = 1) -> Shapes:
    """So many operands of one dim, of ``times`` as many elements."""
    return lambda n: [(round(times * n),)] * num


def side(n: int) -> int:
    """That of a square matrix of about ``n`` elements, odd where ``n`` is.

    >>> side(1 << 20), side((1 << 20) + 1)
    (1024, 1025)
    """
    return math.isqrt(n) | n & 1


FUNCTIONS = (
    Function("x + b", add, flat(2), Operation("x + b", add, flat(2))),
    Function("silu(x + b) * y", silu_mul, flat(3), Operation("x + b of 4/3 n", add, flat(2, 4 / 3)), max_steps=1),
    Function(
        "x.t().contiguous()",
        turned_copy,
        lambda n: [(side(n), side(n))],
        Operation("x.t().contiguous()", turned_copy, lambda n: [(side(n), side(n))]),
        shown=(Operation("clone", torch.clone, lambda n: [(side(n) ** 2,)]),),
    ),
)


def find_sizes(num_points: int) -> list[int]:
    """So many numbers of elements, evenly spaced by their logarithms, every second one odd.

    >>> find_sizes(4)
    [1024, 26009, 660561, 16777217]
    """
    step = (MOST_LOG2 - LEAST_LOG2) / max(1, num_points - 1)
    return [round(2 ** (LEAST_LOG2 + step * number)) | number % 2 for number in range(num_points)]


def is_compiled(n: int, sizes: Sequence[int]) -> bool:
    """Whether it is the size nearest to one of those at which torch.compile is timed."""
    return any(n == min(sizes, key=lambda size: abs(math.log2(size) - log2)) for log2 in COMPILED_LOG2)


# ---- timing


def draw_copies(draw: Draw, shapes: Sequence[tuple[int, ...]], num: int) -> list[list[torch.Tensor]]:
    """``num`` lists of operands in bf16, in memory of their own."""
    slabs = [draw(num, -(-math.prod(shape) // PITCH) * PITCH) for shape in shapes]
    return [[slab[at, : math.prod(shape)].view(shape) for slab, shape in zip(slabs, shapes, strict=True)] for at in range(num)]


def moved_bytes(operation: Operation, n: int) -> int:
    """At least: each operand read once, and as much written as the first one has elements."""
    shapes = operation.shapes(n)
    return BF16_BYTES * (sum(map(math.prod, shapes)) + math.prod(shapes[0]))


def plan_graph(nbytes: int, l2_bytes: int, bytes_per_us: float) -> tuple[int, int]:
    """How many copies of the operands a graph's calls take in turn, and how many calls it has.

    >>> plan_graph(6 * 2**24, 60 * 2**20, 4.8e6), plan_graph(6 * 2**10, 60 * 2**20, 4.8e6)
    ((4, 24), (256, 512))
    """
    num_buffers = min(num_rotated_buffers(nbytes, l2_bytes), MAX_BUFFERS)
    num_calls = min(MAX_CALLS, math.ceil(GRAPH_US / (BASE_US + nbytes / bytes_per_us)))
    return num_buffers, num_buffers * math.ceil(num_calls / num_buffers)


class Timer:
    """Times calls on one GPU in replays of CUDA graphs over copies of their operands, in turn."""

    def __init__(self, device: torch.device) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self.bytes_per_us = (nominal_bytes_per_second(device) or ASSUMED_BYTES_PER_SECOND) / 1e6
        self._clock_mhz, self._is_warm = GpuMonitor(device).clock_mhz, False

    def sample(self, calls: Mapping[str, Sequence[Call]], num_calls: int, num_samples: int) -> dict[str, tuple[float, ...]]:
        """Microseconds a call, the way from one kernel to the next among them. Raises ``DeviceError`` for calls that no graph holds."""
        samplers = {}
        for name, copies in calls.items():
            copies[0]()  # a graph holds neither compiling nor loading
            captured = capture(copies, num_calls)
            if isinstance(captured, str):
                raise wl.DeviceError(f"{name} cannot be captured in a CUDA graph: {captured}")
            samplers[name] = GraphSampler(captured, num_calls, len(copies), None)
        if not self._is_warm:
            warm_up(list(samplers.values()), self._clock_mhz, WARM_UP_SECONDS)
            self._is_warm = True
        num = num_samples + UNCOUNTED
        collected = collect(samplers, StopRule(precision=0.0, min_samples=num, max_samples=num, max_seconds=math.inf), SEED)
        return {name: found.samples_us[UNCOUNTED:] for name, found in collected.items()}


def time_point(function: Function, fused: Callable[..., Any], n: int, timer: Timer, draw: Draw, num_samples: int, compiled: bool) -> Point:
    """Check, then time in turns; what is above the limit once more, with more samples."""
    contenders = {
        "wideload": Operation(function.name, fused, function.shapes),
        "eager": function.eager,
        **{operation.name: operation for operation in function.shown},
    }
    if compiled:
        contenders["compile"] = Operation(function.name, torch.compile(function.fn, dynamic=False), function.shapes)
    nbytes = {name: moved_bytes(operation, n) for name, operation in contenders.items()}
    num_buffers, num_calls = plan_graph(nbytes["wideload"], timer.l2_bytes, timer.bytes_per_us)
    calls = {}
    for name, operation in contenders.items():
        copies = draw_copies(draw, operation.shapes(n), num_buffers)
        calls[name] = [functools.partial(operation.fn, *copy) for copy in copies]
    args = calls["wideload"][0].args
    result = fused(*args)
    steps = count_steps(Case(function.name, function.fn, lambda draw, n: args, NOT_ABOVE, function.max_steps), args, result)
    assert nbytes["wideload"] == unique_bytes(args) + unique_bytes(tensors_of(result))

    def measure(num: int) -> Point:
        return Point(function.name, n, nbytes, timer.sample(calls, num_calls, num), steps, function.max_steps)

    point = measure(num_samples)
    return point if point.verdict == "PASS" else measure(AGAIN * num_samples)


# ---- reporting


def find_findings(points: Sequence[Point]) -> list[Finding]:
    """A line a function: its worst point and the mean of all; then each point that is not level."""
    lines = []
    for name in dict.fromkeys(point.function for point in points):
        of_name = [point for point in points if point.function == name]
        worst = max(of_name, key=lambda point: point.times_of("eager"))
        mean = statistics.geometric_mean(point.times_of("eager") for point in of_name)
        bad = [point for point in of_name if point.verdict != "PASS"]
        found = f"{len(of_name)} sizes, mean {mean:.3f}, worst {worst.times_of('eager'):.3f} at n = {worst.elements}"
        lines.append(Finding(name, found, f"{NOT_ABOVE:.2f} of eager's time", not bad))
        lines += [Finding(f"  n = {point.elements}", point.verdict, "", False) for point in bad]
    return lines


def draw_points(points: Sequence[Point], gpu: str) -> bytes:
    """A PNG: wideload's time over eager's, and over those of the others, against elements; a panel a function."""
    names = list(dict.fromkeys(point.function for point in points))
    canvas = new_canvas(LIGHT, 2.4 * len(names))
    all_axes = canvas.subplots(len(names), squeeze=False)[:, 0]
    others = sorted({name for point in points for name in point.samples_us if name not in ("wideload", "eager")})
    handles: dict[str, Any] = {}
    for axes, function in zip(all_axes, names, strict=True):
        of_name = [point for point in points if point.function == function]
        for index, rival in enumerate(("eager", *others)):
            timed = [point for point in of_name if rival in point.samples_us]
            style = {"color": LIGHT.colour(index), "linewidth": 1.4, "marker": "o", "markersize": 2.5}
            if timed:
                (line,) = axes.plot([point.elements for point in timed], [point.times_of(rival) for point in timed], **style)
                handles.setdefault(f"time over {rival}'s", line)
        axes.axhline(NOT_ABOVE, color=LIGHT.ink, linewidth=0.8, linestyle=(0, (5, 3)))
        axes.set_xscale("log", base=2)
        axes.set(ylim=(0, None), ylabel="times (less is better)")
        style_axes(axes, LIGHT, function)
    all_axes[-1].set_xlabel(f"elements, bf16, on {gpu}")
    place_legend(canvas, LIGHT, 3, handles=list(handles.values()), labels=list(handles))
    return render(canvas, "png")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__, 20)
    parser.add_argument("--points", type=int, default=100, help="sizes of each function, 100 if left out")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--png", type=Path, help="where to draw them, which needs matplotlib")
    options = parser.parse_args(arguments)
    chosen = choose_cases(parser, FUNCTIONS, options.only)
    device = find_device()
    if device is None:
        return 2
    environment = describe_environment(device)
    timer, draw, sizes = Timer(device), Draw(device), find_sizes(options.points)
    points, failed = [], {}
    for function in chosen:
        fused = wl.fuse(function.fn, name="benchmark")
        for number, n in enumerate(sizes, 1):
            print(f"\r{function.name}: {number}/{len(sizes)} sizes", end="", file=sys.stderr, flush=True)
            try:
                compiled = not options.no_compile and is_compiled(n, sizes)
                points.append(time_point(function, fused, n, timer, draw, options.samples, compiled))
            except Exception as error:  # the other points are still worth their time on the GPU
                traceback.print_exc()
                failed[f"{function.name}, n = {n}"] = f"{type(error).__name__}: {error}"
        print(file=sys.stderr)
    if options.json:
        content = {
            "schema": SCHEMA,
            "environment": environment,
            "arguments": {"points": options.points, "samples": options.samples, "seed": SEED},
            "rows": [point.to_dict() for point in points],
            "failed": failed,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if options.png and points:
        options.png.write_bytes(draw_points(points, environment["gpu"] or environment["cpu"]))
    print(name_environment(environment))
    print(f"GPU time in graphs, median of {options.samples}, byte for byte against eager's op")
    for finding in find_findings(points):
        print(finding)
    for name, reason in failed.items():
        print(f"{name}  FAILED: {reason}")
    return int(bool(failed) or any(point.verdict != "PASS" for point in points))


if __name__ == "__main__":
    sys.exit(main())
