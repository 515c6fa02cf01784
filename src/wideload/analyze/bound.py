"""Turns bytes into the least time that a GPU's memory needs for them: the bound that no kernel can beat.

Nominal bandwidth, every byte moved once; it must not know how a kernel moves them, nor what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable

from wideload.gpus import GPUS, MIN_COMPUTE_CAPABILITY, Gpu

__all__ = ["least_time_us", "least_times_us"]

_BYTES_PER_US_PER_GBPS = 1000
"""1e9 bytes a second are 1000 bytes a microsecond."""


def least_time_us(nbytes: int, gpu: Gpu) -> float:
    """Return ``nbytes`` over the nominal bandwidth of ``gpu``, in microseconds.

    >>> from wideload.gpus import find_target
    >>> least_time_us(3 * 2 * 2**28, find_target("h200").gpu)  # z = x + y in bf16, 2**28 elements
    335.54432
    """
    return nbytes / (gpu.memory_bandwidth_gbps * _BYTES_PER_US_PER_GBPS)


def least_times_us(nbytes: int, gpus: Iterable[Gpu] = GPUS) -> tuple[tuple[Gpu, float], ...]:
    """Return `least_time_us` on each supported one of ``gpus``, the fastest first."""
    supported = (gpu for gpu in gpus if gpu.compute_capability >= MIN_COMPUTE_CAPABILITY)
    return tuple(sorted(((gpu, least_time_us(nbytes, gpu)) for gpu in supported), key=lambda row: row[1]))
