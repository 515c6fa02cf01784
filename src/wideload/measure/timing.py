"""Turns calls into samples of their time: by CUDA events after a flush, by replays of a CUDA graph, or by the wall clock.

Knows calls without arguments and how to prepare one; it must not know what they compute, nor whether that is right.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from wideload.launch import has_overlaps
from wideload.measure.statistics import median_error, require_number

__all__ = [
    "Capture",
    "Collected",
    "EventSampler",
    "Flush",
    "GraphSampler",
    "Mode",
    "Sampler",
    "StopRule",
    "Stopped",
    "WallSampler",
    "capture",
    "collect",
    "drain_us",
    "host_cost_us",
    "num_graph_calls",
    "num_rotated_buffers",
    "warm_up",
]

Mode = Literal["cold", "hot", "graph", "wall"]
"""How a time was taken: after a flush, on data that the call before left in the L2, in a graph over rotated buffers, on the CPU."""

Stopped = Literal["precision", "max_samples", "max_seconds", "verdict"]
"""What ended the sampling."""

Call = Callable[[], Any]

_cuda: Any = torch.cuda  # typed in part only

ROTATION_L2S = 5
"""Buffers are rotated through until they fill the L2 so many times over: its replacement is not least-recently-used, so that at one
or two times its size part of a buffer is still there when its turn comes again."""
FLUSH_L2S = 2
GRAPH_SAMPLE_US = 1000.0
"""A graph's length: beside it the 2 us of its launch and its events are 0.2 %."""
MAX_GRAPH_CALLS = 1024
MAX_LEADS = 256
"""Flushes before a call (9 ms on H200) that may hide its host: a call that outlasts them waits for the GPU itself."""
_LEAD_TRIES = 3


class Sampler(Protocol):
    """One way to time one call."""

    mode: Mode
    calls_per_sample: int
    num_buffers: int
    gap_us: float | None
    """What is taken off each call's share of a sample."""

    @property
    def is_host_hidden(self) -> bool:
        """Whether the time is free of the host's."""
        ...

    def sample(self) -> float:
        """Time the call once more; microseconds a call."""
        ...


# ---- the CPU


class WallSampler:
    """Times a call on the CPU by ``time.perf_counter_ns``, as many calls a sample as the clock needs."""

    mode: Mode = "wall"
    num_buffers = 1
    gap_us: float | None = None
    is_host_hidden = True

    def __init__(self, call: Call, restore: Call | None = None) -> None:
        self._call, self._restore = call, restore
        self.calls_per_sample = 1
        while restore is None and self._time_ns() < _SHORTEST_WALL_NS:
            self.calls_per_sample *= 2

    def sample(self) -> float:
        """Time ``calls_per_sample`` calls; microseconds a call."""
        if self._restore is not None:
            self._restore()
        return self._time_ns() / self.calls_per_sample / 1e3

    def _time_ns(self) -> int:
        call = self._call
        start = time.perf_counter_ns()
        for _ in range(self.calls_per_sample):
            call()
        return max(time.perf_counter_ns() - start, 1)


_SHORTEST_WALL_NS = 50_000
"""A sample's length at least: the clock's own cost, some 50 ns, is then 0.1 % of it."""


# ---- the GPU


class Flush:
    """Empties the L2 of one device of everything that was there: by writing other data over twice its size.

    It leaves the L2 full of lines to be written back, as any kernel that wrote would; a read-only call pays for them, so that a
    cold time is never flattering.
    """

    def __init__(self, device: torch.device) -> None:
        self.l2_bytes = int(torch.cuda.get_device_properties(device).L2_cache_size)
        self._buffer = torch.empty(FLUSH_L2S * self.l2_bytes // 4, dtype=torch.float32, device=device)
        self._reset_persisting, self.persisting_l2 = _persisting_l2_reset()

    def __call__(self, times: int = 1) -> None:
        """Enqueue ``times`` flushes on the current stream; more than one only takes longer."""
        self._reset_persisting()
        for _ in range(times):
            self._buffer.fill_(1.0)


@functools.cache
def _persisting_l2_reset() -> tuple[Call, str]:
    """Return what resets the lines that an access-policy window keeps in the L2 through any flush, and what is to be said of it."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return lambda: None, "not reset: cuda.bindings is not installed"
    status = driver.cuCtxResetPersistingL2Cache()[0]
    if status == driver.CUresult.CUDA_SUCCESS:
        return driver.cuCtxResetPersistingL2Cache, "reset before each sample"
    return lambda: None, f"not reset: the driver says {status.name}"


class _Stopwatch:
    """Times what is enqueued on the current stream, while work enqueued before it keeps the GPU busy until the host is done.

    The lead ends by itself, so that nothing can hang. Whether it was long enough is observed, not assumed: the start event must
    not have passed when the stop event is enqueued.
    """

    def __init__(self) -> None:
        self._start, self._stop = (_cuda.Event(enable_timing=True) for _ in range(2))
        self._leads = 1
        self.is_host_hidden = True

    def time_us(self, lead: Callable[[int], None], call: Call) -> float:
        leads = self._leads
        for attempt in itertools.count(1):
            lead(leads)
            self._start.record()
            result = call()
            self._stop.record()
            is_hidden = not self._start.query()
            self._stop.synchronize()
            del result
            if is_hidden:
                self._leads = leads
            if is_hidden or not self.is_host_hidden:
                break
            if attempt % _LEAD_TRIES == 0:  # more often than the host stumbles by chance
                if leads >= MAX_LEADS:  # nothing hides it: do not try again at each sample
                    self.is_host_hidden = False
                    break
                leads *= 2
        return float(self._start.elapsed_time(self._stop)) * 1e3


class EventSampler:
    """Times one call at a time between two events, after a flush; with ``mode="hot"`` after an untimed call that follows the flush."""

    calls_per_sample = 1
    num_buffers = 1
    gap_us: float | None = None

    def __init__(self, call: Call, flush: Flush, *, mode: Mode = "cold", restore: Call | None = None) -> None:
        self._call, self._flush, self._restore, self.mode = call, flush, restore, mode
        self._stopwatch = _Stopwatch()

    @property
    def is_host_hidden(self) -> bool:
        """Whether the GPU was still busy with the lead when all of the call was enqueued."""
        return self._stopwatch.is_host_hidden

    def sample(self) -> float:
        """Time one call; microseconds."""
        return self._stopwatch.time_us(self._lead, self._call)

    def _lead(self, times: int) -> None:
        if self._restore is not None:
            self._restore()
        self._flush(times)
        if self.mode == "hot":
            self._call()


class GraphSampler:
    """Times replays of one graph of many calls, each call on the next of several buffers, and divides by the number of calls.

    ``gap_us``, the way from one call's last kernel to the next call's first, is taken off, so that the time is that of the kernels.

    Where the buffers fill the L2 ``ROTATION_L2S`` times over, an untimed replay goes before the timed one and leaves the L2 as the
    calls themselves leave it. Where they do not, or a replay would undo ``restore``, ``flush`` is given: it goes before, and each
    buffer is touched once.
    """

    def __init__(
        self,
        captured: Capture,
        num_calls: int,
        num_buffers: int,
        flush: Flush | None,
        *,
        mode: Mode = "graph",
        restore: Call | None = None,
        gap_us: float | None = None,
    ) -> None:
        self.captured, self.calls_per_sample, self.num_buffers, self.mode = captured, num_calls, num_buffers, mode
        self._flush, self._restore, self.gap_us = flush, restore, gap_us
        self._stopwatch = _Stopwatch()

    @property
    def is_host_hidden(self) -> bool:
        """Whether the GPU was still busy with the lead when the graph was enqueued."""
        return self._stopwatch.is_host_hidden

    def sample(self) -> float:
        """Time one replay; microseconds a call."""
        period_us = self._stopwatch.time_us(self._lead, self.captured.graph.replay) / self.calls_per_sample
        return max(period_us - (self.gap_us or 0.0), 0.0)

    def _lead(self, times: int) -> None:
        if self._restore is not None:
            self._restore()
        if self._flush is not None:
            self._flush(times)
        else:
            for _ in range(times):
                self.captured.graph.replay()


def num_rotated_buffers(bytes_per_call: int, l2_bytes: int) -> int:
    """Return how many buffers of ``bytes_per_call`` fill the L2 ``ROTATION_L2S`` times over, as far as one graph can hold the calls.

    >>> num_rotated_buffers(48 * 2**20, 60 * 2**20)
    7
    """
    return min(max(1, math.ceil(ROTATION_L2S * l2_bytes / max(bytes_per_call, 1))), MAX_GRAPH_CALLS)


def num_graph_calls(call_us: float, num_buffers: int) -> int:
    """Return how many calls of ``call_us`` a graph should hold: for `GRAPH_SAMPLE_US`, and every buffer equally often."""
    rounds = math.ceil(GRAPH_SAMPLE_US / max(call_us, 1e-3) / num_buffers)
    return num_buffers * max(1, min(rounds, MAX_GRAPH_CALLS // num_buffers))


@dataclass(frozen=True)
class Capture:
    """A graph of calls, and what the last of them returned: memory that each replay writes again."""

    graph: torch.cuda.CUDAGraph
    results: tuple[Any, ...]
    is_empty: bool
    overlaps: bool = False
    """Whether a kernel may start before the one ahead of it has ended: such a graph has no gaps between them to be taken off."""


def capture(calls: Sequence[Call], num_calls: int) -> Capture | str:
    """Capture ``num_calls`` calls, taken from ``calls`` in turn; the reason, where they cannot be captured.

    The last ``len(calls)`` results stay alive meanwhile, so that so many calls in a row write to different memory.
    """
    refusal = _synchronizes(calls[0])
    if refusal is not None:
        return refusal
    graph, pool = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.graph_pool_handle()
    results: deque[Any] = deque(maxlen=len(calls))
    try:
        # The outer stream context makes the caller's stream current again where torch.cuda.graph fails to.
        with warnings.catch_warnings(record=True) as caught, torch.cuda.stream(torch.cuda.current_stream()):
            warnings.simplefilter("always")
            with torch.cuda.graph(graph, pool=pool, stream=_capture_stream(torch.cuda.current_device()), capture_error_mode="thread_local"):
                for index in range(num_calls):
                    results.append(calls[index % len(calls)]())
        overlaps = has_overlaps(graph.raw_cuda_graph())
        graph.instantiate()
    except Exception as error:  # whatever the callable raises while it is captured, the capture has failed
        results.clear()
        _recover(graph, pool)
        return _first_line(error)
    is_empty = any("graph is empty" in str(warning.message).lower() for warning in caught)
    return Capture(graph, tuple(results), is_empty, overlaps)


@functools.cache
def _capture_stream(device: int) -> Any:
    """From torch's pool of streams of high priority: one from the common pool might be the stream that a callable uses beside."""
    return _cuda.Stream(device, priority=-1)


def _synchronizes(call: Call) -> str | None:
    """Whether torch sees the call wait for the GPU: found out without a capture, since a failed one leaves traces in the allocator."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        call()
    except RuntimeError as error:
        return _first_line(error)
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return None


_failed_graphs: list[torch.cuda.CUDAGraph] = []
"""The allocator keeps a pointer to a graph whose capture failed: they are never destroyed."""


def _recover(graph: torch.cuda.CUDAGraph, pool: Any) -> None:
    """Undo what a failed capture leaves behind in torch: an allocator that still fills the graph's pool, generators that still capture."""
    _failed_graphs.append(graph)
    torch.cuda.synchronize()
    end_allocate = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with contextlib.suppress(RuntimeError):  # it was ended already
        if end_allocate is not None:
            end_allocate(torch.cuda.current_device(), pool)
    cell = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=_capture_stream(torch.cuda.current_device())):
        cell.add_(1)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:_LONGEST_REASON]


_LONGEST_REASON = 160


def drain_us(call: Call, flush: Flush) -> float:
    """Return how long the device goes on after the stream on which a call was made is done: work on another stream."""
    torch.cuda.synchronize()
    flush()
    result = call()
    torch.cuda.current_stream().synchronize()
    start = time.perf_counter_ns()
    torch.cuda.synchronize()
    middle = time.perf_counter_ns()
    torch.cuda.synchronize()
    idle_ns = time.perf_counter_ns() - middle
    del result
    return max(0, middle - start - idle_ns) / 1e3


def host_cost_us(call: Call, synchronize: Call, call_us: float) -> float:
    """Return what a call costs the host, in microseconds: the median over batches of calls back to back, none of them waited for.

    A batch is short enough that the driver's queue never fills, which would make the host wait for the GPU.
    """
    num_calls = _HOST_GPU_US / max(call_us, 1e-3)
    batch = max(1, min(_HOST_BATCH, int(num_calls / _FEWEST_HOST_BATCHES)))
    costs = []
    for _ in range(max(_FEWEST_HOST_BATCHES, min(_HOST_BATCHES, int(num_calls / batch)))):
        synchronize()
        start = time.perf_counter_ns()
        for _ in range(batch):
            call()
        costs.append((time.perf_counter_ns() - start) / 1e3 / batch)
    synchronize()
    return float(np.median(costs))


_HOST_BATCH = 20
"""With the ten launches that an unfused call may take, a fifth of the 1024 that CUDA's queue holds."""
_HOST_BATCHES = 25
_FEWEST_HOST_BATCHES = 3
_HOST_GPU_US = 100_000.0
"""The GPU time that all batches together may take."""


# ---- sampling


@dataclass(frozen=True)
class StopRule:
    """When there are enough samples: the median's standard error is ``precision`` of it, or a cap is reached."""

    precision: float = 0.005
    min_samples: int = 30
    max_samples: int = 1000
    max_seconds: float = 2.0
    """Of all contenders together, times their number."""

    def __post_init__(self) -> None:
        require_number("precision", self.precision, "a share of the median, 0 and more")
        require_number("min_samples", self.min_samples, "an integer, 1 and more", least=1, is_whole=True)
        require_number("max_samples", self.max_samples, "an integer, 1 and more", least=1, is_whole=True)
        require_number("max_seconds", self.max_seconds, "a number, 0 and more")


@dataclass(frozen=True, slots=True)
class Collected:
    """Samples in microseconds, in the order of time, and what ended them."""

    samples_us: tuple[float, ...]
    stopped: Stopped


_FEWEST_SAMPLES = 5
"""Taken even when time is up."""
_LOOK_EVERY = 10
"""Samples between two looks at the precision: looking more often would favour a lucky run."""


def collect(
    samplers: Mapping[str, Sampler], rule: StopRule, seed: int, report: Callable[[int, int], None] | None = None
) -> dict[str, Collected]:
    """Sample every contender until its own stop, in rounds of random order, so that drift falls on all alike.

    ``report(done, total)`` is told how far the slowest has come.
    """
    order = np.random.default_rng(seed)
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    done: dict[str, Collected] = {}
    deadline = time.perf_counter() + rule.max_seconds * len(samplers)
    with _no_garbage_collection():
        while len(done) < len(samplers):
            active = [name for name in samplers if name not in done]
            for index in order.permutation(len(active)):
                samples[active[index]].append(samplers[active[index]].sample())
            for name in active:
                stopped = _stop_reason(samples[name], rule, is_late=time.perf_counter() > deadline)
                if stopped is not None:
                    done[name] = Collected(tuple(samples[name]), stopped)
            if report is not None:
                report(max(map(len, samples.values())), rule.max_samples)
    return {name: done[name] for name in samplers}


def _stop_reason(samples: list[float], rule: StopRule, *, is_late: bool) -> Stopped | None:
    n = len(samples)
    if (
        n >= min(rule.min_samples, rule.max_samples)
        and n % _LOOK_EVERY == 0
        and median_error(samples) <= rule.precision * float(np.median(samples))
    ):
        return "precision"
    if n >= rule.max_samples:
        return "max_samples"
    return "max_seconds" if is_late and n >= _FEWEST_SAMPLES else None


def warm_up(samplers: Sequence[Sampler], clock_mhz: Callable[[], float | None], min_seconds: float) -> None:
    """Sample without keeping, for ``min_seconds`` and on until the SM clock is steady or unknown, at most `_MAX_WARM_UP` times that."""
    start = time.perf_counter()
    last_clock: float | None = None
    while (elapsed := time.perf_counter() - start) < _MAX_WARM_UP * min_seconds:
        step_end = elapsed + min_seconds / _WARM_UP_STEPS
        while time.perf_counter() - start < step_end:
            for sampler in samplers:
                sampler.sample()
        clock = clock_mhz()
        is_steady = clock is None or (last_clock is not None and abs(clock - last_clock) <= _CLOCK_STEP * clock)
        if time.perf_counter() - start >= min_seconds and is_steady:
            return
        last_clock = clock


WARM_UP_SECONDS = 0.2
"""After 150 to 200 ms of load an idle GPU has reached the clock that it will hold."""
_MAX_WARM_UP = 5
_WARM_UP_STEPS = 4
_CLOCK_STEP = 0.01
"""NVIDIA's clocks move in steps of 15 MHz, just under 1 % of 1980."""


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
