"""Turns one kernel's period in a graph and the profiler's time of it into what lies between the kernels of a graph.

A period is a kernel and the way to the next, some 0.4 us on an H200: a sixth of a call of 2.4 us. It must not know what is benched.
"""

from __future__ import annotations

import functools
import statistics
import warnings

import torch

from wideload.measure.operands import random_tensor
from wideload.measure.timing import GraphSampler, capture, num_rotated_buffers

__all__ = ["launch_gap_us"]

_NUM_ELEMENTS = 1 << 20
"""fp32, read and written: 3.4 us on an H200, long enough to hide the next kernel's launch and short enough to see the gap."""
_NUM_SAMPLES = 20
_NUM_PROFILED = 5


_found: dict[int, float] = {}


def launch_gap_us(device: int) -> float | None:
    """Microseconds from a kernel's end to the next one's start in a graph; ``None`` while the profiler (CUPTI) is not to be had.

    The period of a negation in a graph, less the profiler's median of its kernel. Measured once a process, in some seconds.
    """
    if device not in _found:
        gap_us = _measure_us(device)
        if gap_us is None:
            return None
        _found[device] = gap_us
    return _found[device]


def _measure_us(device: int) -> float | None:
    if getattr(torch._C._autograd, "_profiler_enabled", lambda: False)():
        return None  # another profiler runs
    with torch.cuda.device(device):
        nbytes = 2 * 4 * _NUM_ELEMENTS
        num_buffers = num_rotated_buffers(nbytes, torch.cuda.get_device_properties(device).L2_cache_size)
        inputs = [random_tensor((_NUM_ELEMENTS,), device="cuda", seed=seed) for seed in range(num_buffers)]
        pairs = [(x, torch.empty_like(x)) for x in inputs]
        captured = capture([functools.partial(torch.neg, x, out=out) for x, out in pairs], 8 * num_buffers)
        if isinstance(captured, str):
            return None
        sampler = GraphSampler(captured, 8 * num_buffers, num_buffers, None)
        period_us = statistics.median(sampler.sample() for _ in range(_NUM_SAMPLES))
        kernel_us = _profile_us(captured.graph)
        return None if kernel_us is None else max(0.0, period_us - kernel_us)


def _profile_us(graph: torch.cuda.CUDAGraph) -> float | None:
    """The profiler's median of the graph's kernels; ``None`` where it sees none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of events that the end of a cycle clears: there is one cycle
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(_NUM_PROFILED):
                graph.replay()
            torch.cuda.synchronize()
        durations = [event.time_range.elapsed_us() for event in profiler.events() if "neg" in event.name]
    return statistics.median(durations) if durations else None
