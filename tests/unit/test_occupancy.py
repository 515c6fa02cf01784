"""Occupancy against figures worked out by hand from the CUDA Programming Guide's table and the allocation rules."""

from __future__ import annotations

import pytest

from wideload.analyze.occupancy import Occupancy, occupancy
from wideload.errors import DeviceError


@pytest.mark.parametrize(
    ("arch", "threads_per_block", "registers", "shared_bytes", "expected"),
    [
        # The article's A100: a vectorised add of 30 registers in blocks of 32, 64, 256 and 1024 threads.
        ("sm_80", 32, 30, 0, Occupancy(32, 32, 0.5, "blocks")),
        ("sm_80", 64, 30, 0, Occupancy(32, 64, 1.0, "threads")),
        ("sm_80", 256, 30, 0, Occupancy(8, 64, 1.0, "threads")),
        ("sm_80", 1024, 30, 0, Occupancy(2, 64, 1.0, "threads")),
        # 64 warps a SM / 8 a block; registers 65536 / (8 * 32 * 32) = 8 as well.
        ("sm_90", 256, 32, 0, Occupancy(8, 64, 1.0, "threads")),
        # 33 registers are given out as 40: 1280 a warp, 16384 // 1280 = 12 warps a sub-partition, 48 a SM.
        ("sm_90", 256, 33, 0, Occupancy(6, 48, 0.75, "registers")),
        ("sm_90", 256, 40, 0, Occupancy(6, 48, 0.75, "registers")),
        # As above, 3 warps a block; the whole file would hold 65536 // 1280 = 51 warps, 17 blocks.
        ("sm_90", 96, 40, 0, Occupancy(16, 48, 0.75, "registers")),
        # 255 -> 256 a thread, 8192 a warp: 2 warps a sub-partition, 8 a SM.
        ("sm_80", 256, 255, 0, Occupancy(1, 8, 0.125, "registers")),
        # 5 warps a block; 72 a thread, 2304 a warp: 7 a sub-partition, 28 a SM, 28 // 5.
        ("sm_80", 160, 72, 0, Occupancy(5, 25, 25 / 64, "registers")),
        ("sm_90", 32, 16, 0, Occupancy(32, 32, 0.5, "blocks")),
        ("sm_86", 32, 16, 0, Occupancy(16, 16, 16 / 48, "blocks")),
        ("sm_89", 32, 16, 0, Occupancy(24, 24, 0.5, "blocks")),
        # 48 warps a SM hold one block of 1024, not one and a half.
        ("sm_86", 1024, 32, 0, Occupancy(1, 32, 32 / 48, "threads")),
        ("sm_120", 512, 32, 0, Occupancy(3, 48, 1.0, "threads")),
        ("sm_75", 256, 32, 0, Occupancy(4, 32, 1.0, "threads")),
        # A part of a warp takes a whole one: 33 threads are 2 warps, 64 // 2 = 32 blocks.
        ("sm_90", 33, 16, 0, Occupancy(32, 64, 1.0, "threads")),
        # 48 KiB + 1 KiB kept by the driver: 228 // 49.
        ("sm_90", 256, 32, 48 * 1024, Occupancy(4, 32, 0.5, "shared")),
        # 33 KiB each: 164 // 33.
        ("sm_80", 128, 32, 32 * 1024, Occupancy(4, 16, 0.25, "shared")),
        # 100 KiB // 10 KiB = 10; 1 byte more takes 128: 102400 // 10368 = 9.
        ("sm_89", 128, 32, 9 * 1024, Occupancy(10, 40, 40 / 48, "shared")),
        ("sm_89", 128, 32, 9 * 1024 + 1, Occupancy(9, 36, 0.75, "shared")),
        # Turing keeps nothing back: 65536 // 16384; and rounds to 256, where 128 would let 65536 // 10880 = 6 in.
        ("sm_75", 64, 32, 16 * 1024, Occupancy(4, 8, 0.25, "shared")),
        ("sm_75", 64, 32, 10880, Occupancy(5, 10, 10 / 32, "shared")),
        # All that one block may have, and one byte more.
        ("sm_90", 1024, 32, 227 * 1024, Occupancy(1, 32, 0.5, "shared")),
        ("sm_90", 1024, 32, 227 * 1024 + 1, Occupancy(0, 0, 0.0, "shared")),
        # 1024 * 65 registers are more than the SM has.
        ("sm_90", 1024, 64, 0, Occupancy(1, 32, 0.5, "registers")),
        ("sm_90", 1024, 65, 0, Occupancy(0, 0, 0.0, "registers")),
        # 9 warps of 7168 are fewer than 65536, but only 2 fit each sub-partition.
        ("sm_90", 288, 224, 0, Occupancy(0, 0, 0.0, "registers")),
        ("sm_90", 64, 256, 0, Occupancy(0, 0, 0.0, "registers")),
        ("sm_90", 1025, 16, 0, Occupancy(0, 0, 0.0, "threads")),
        ("sm_90", 1024, 0, 0, Occupancy(2, 64, 1.0, "threads")),
    ],
)
def test_occupancy_by_hand(arch: str, threads_per_block: int, registers: int, shared_bytes: int, expected: Occupancy) -> None:
    assert occupancy(arch, threads_per_block=threads_per_block, registers=registers, shared_bytes=shared_bytes) == expected


@pytest.mark.parametrize(("threads_per_block", "registers", "shared_bytes"), [(0, 32, 0), (256, -1, 0), (256, 32, -1)])
def test_what_no_kernel_can_ask_for_is_refused(threads_per_block: int, registers: int, shared_bytes: int) -> None:
    with pytest.raises(DeviceError, match=f"threads_per_block is {threads_per_block}, registers {registers}, shared_bytes {shared_bytes}"):
        occupancy("sm_90", threads_per_block=threads_per_block, registers=registers, shared_bytes=shared_bytes)


def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(DeviceError, match="'sm_70' is not an architecture that wideload supports"):
        occupancy("sm_70", threads_per_block=256, registers=32, shared_bytes=0)
