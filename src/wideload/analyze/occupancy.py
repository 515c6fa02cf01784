"""Turns what a kernel asks of an SM into how many of its warps live there at once, and what stops more.

The rules are those of ``cuda_occupancy.h``, the figures those of `wideload.gpus`; it must not know what the kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from wideload.errors import DeviceError
from wideload.gpus import SmLimits, sm_limits

__all__ = ["Limiter", "Occupancy", "occupancy"]

Limiter = Literal["threads", "blocks", "registers", "shared"]
"""Which of an SM's stocks runs out first."""

_WARP_SIZE = 32


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an SM gets. ``fraction`` is of the warps it could hold; 0 blocks mean that the kernel cannot be launched.

    Where several stocks run out together, ``limiter`` is the first in the order of `Limiter`: a full SM is limited by threads.
    """

    blocks_per_sm: int
    warps_per_sm: int
    fraction: float
    limiter: Limiter


def occupancy(arch: str, *, threads_per_block: int, registers: int, shared_bytes: int) -> Occupancy:
    """Reckon the occupancy of a kernel on ``arch``, the SM's shared memory set as large as it goes.

    ``registers`` is for each thread, ``shared_bytes`` for each block, static and dynamic together.
    Raises ``DeviceError`` for an unknown ``arch`` and for less than one thread or less than no registers or bytes.

    >>> occupancy("sm_90", threads_per_block=256, registers=40, shared_bytes=0)
    Occupancy(blocks_per_sm=6, warps_per_sm=48, fraction=0.75, limiter='registers')
    """
    if threads_per_block < 1 or registers < 0 or shared_bytes < 0:
        raise DeviceError(
            f"threads_per_block is {threads_per_block}, registers {registers}, shared_bytes {shared_bytes}; "
            "allowed are at least 1 thread, and no negative registers or bytes"
        )
    limits = sm_limits(arch)
    warps_per_block = -(-threads_per_block // _WARP_SIZE)
    max_warps = limits.threads // _WARP_SIZE
    blocks: dict[Limiter, int] = {
        "threads": max_warps // warps_per_block if threads_per_block <= limits.threads_per_block else 0,
        "blocks": limits.blocks,
        "registers": _blocks_by_registers(limits, warps_per_block, registers),
        "shared": _blocks_by_shared(limits, shared_bytes),
    }
    limiter = min(blocks, key=lambda stock: blocks[stock])
    warps = blocks[limiter] * warps_per_block
    return Occupancy(blocks[limiter], warps, warps / max_warps, limiter)


def _blocks_by_registers(limits: SmLimits, warps_per_block: int, registers: int) -> int:
    if registers > limits.registers_per_thread:
        return 0
    registers_per_warp = max(_round_up(registers * _WARP_SIZE, limits.registers_granularity_per_warp), 1)
    # A warp lives in one sub-partition: what is left over in one cannot be joined with what is left in another.
    warps_per_sub_partition = limits.registers // limits.sub_partitions // registers_per_warp
    return warps_per_sub_partition * limits.sub_partitions // warps_per_block


def _blocks_by_shared(limits: SmLimits, shared_bytes: int) -> int:
    per_block = _round_up(shared_bytes + limits.shared_reserved_bytes_per_block, limits.shared_granularity_bytes)
    return limits.shared_bytes // per_block if per_block else limits.blocks


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
