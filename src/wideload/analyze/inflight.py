"""Turns bandwidth, latency and a kernel's loads into bytes in flight: how many there must be, and how many there are.

By Little's law and by the targets that NVIDIA tuned; it must not know what the kernel computes.
"""

from __future__ import annotations

from wideload.errors import DeviceError

__all__ = ["DRAM_LATENCY_NS", "bytes_in_flight_per_sm", "littles_law_bytes", "warps_needed"]

DRAM_LATENCY_NS = 600.0
"""Of a load that is served by DRAM, the bus idle; microbenchmarks of an A100 give 500 to 800. Under load it is longer, so that
Little's law with it asks for too little: CUB's targets (`wideload.gpus.bytes_in_flight_target`) stand beside it."""

_WARP_SIZE = 32


def littles_law_bytes(bandwidth_gbps: float, latency_ns: float = DRAM_LATENCY_NS) -> float:
    """Return the bytes that must be on their way for the bus never to be idle: throughput times latency, of the whole GPU.

    >>> round(littles_law_bytes(2000) / 108)  # an A100, each of its 108 SMs
    11111
    """
    return bandwidth_gbps * latency_ns


def warps_needed(bytes_per_sm: float, bytes_per_load: int, loads_in_flight: int = 1) -> int:
    """Return how many warps of an SM it takes, each of whose lanes has ``loads_in_flight`` loads of ``bytes_per_load`` under way.

    >>> warps_needed(11111, 16), warps_needed(11111, 16, loads_in_flight=2), warps_needed(11111, 4)  # an SM has room for 64
    (22, 11, 87)
    """
    if bytes_per_load < 1 or loads_in_flight < 1:
        raise DeviceError(f"bytes_per_load is {bytes_per_load}, loads_in_flight {loads_in_flight}; allowed are at least 1 of each")
    per_warp = bytes_per_load * loads_in_flight * _WARP_SIZE
    return int(-(-bytes_per_sm // per_warp))


def bytes_in_flight_per_sm(bytes_per_thread: int, threads_per_block: int, blocks_per_sm: int, grid: int, sms: int | None) -> float:
    """Return the bytes that one SM has on their way when every thread that lives there has issued its loads.

    ``bytes_per_thread`` is what a thread loads before it needs any of it. A grid smaller than the GPU leaves SMs with fewer blocks;
    ``sms`` of None reckons with a grid that fills them.

    >>> bytes_in_flight_per_sm(32, 256, 8, grid=10**6, sms=132) / 1024  # an add in bf16: two loads of 16 bytes
    64.0
    """
    blocks = blocks_per_sm if sms is None else min(blocks_per_sm, grid / sms)
    return bytes_per_thread * threads_per_block * blocks
