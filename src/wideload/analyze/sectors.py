"""Turns the addresses that one warp touches into the 32-byte sectors that the memory moves for it, and the share of them that is used.

Reckons with integers; it must not know which kernel or tensor the addresses belong to.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wideload.errors import LayoutError
from wideload.gpus import SECTOR_BYTES

__all__ = ["LINE_BYTES", "SECTOR_BYTES", "WARP_SIZE", "WarpAccess", "aos_access", "indexed_access", "strided_access", "warp_sectors"]

WARP_SIZE = 32
LINE_BYTES = 4 * SECTOR_BYTES
"""What a tag of the caches stands for: four sectors (Nsight Compute's memory tables)."""


@dataclass(frozen=True, slots=True)
class WarpAccess:
    """What one memory instruction of one warp asks for: ``sectors`` touched, and ``useful_bytes``, each counted once."""

    sectors: int
    useful_bytes: int

    @property
    def moved_bytes(self) -> int:
        """Whole sectors, wanted or not."""
        return self.sectors * SECTOR_BYTES

    @property
    def efficiency(self) -> float:
        """Useful bytes over moved ones: 1.0 where no byte is moved in vain, also where none is moved at all."""
        return self.useful_bytes / self.moved_bytes if self.sectors else 1.0


def warp_sectors(addresses: Iterable[int], itemsize: int) -> WarpAccess:
    """Count the sectors of one access of ``itemsize`` bytes at each of the byte ``addresses`` of a warp's active lanes.

    Loads and stores coalesce alike. Lanes that read the same byte share it: it is moved once and useful once.
    Raises ``LayoutError`` for an ``itemsize`` below 1 or more than 32 addresses.

    >>> access = warp_sectors(range(4, 4 + 32 * 4, 4), itemsize=4)  # consecutive floats that start 4 bytes behind a sector
    >>> access, access.efficiency
    (WarpAccess(sectors=5, useful_bytes=128), 0.8)
    """
    lanes = tuple(addresses)
    if itemsize < 1 or len(lanes) > WARP_SIZE:
        raise LayoutError(
            f"itemsize is {itemsize} and there are {len(lanes)} addresses; allowed are at least 1 byte and at most {WARP_SIZE} lanes"
        )
    touched = {byte for address in set(lanes) for byte in range(address, address + itemsize)}
    return WarpAccess(len({byte // SECTOR_BYTES for byte in touched}), len(touched))


def strided_access(itemsize: int, stride: int, offset: int = 0) -> WarpAccess:
    """A full warp whose lane i accesses element ``offset + i * stride``, in elements of ``itemsize`` bytes from a sector's start.

    A vector access is one element of its whole width; ``stride`` 0 is a broadcast, below 0 a reversed walk.

    >>> [strided_access(4, stride).sectors for stride in (1, 2, 4, 8, 4096)]
    [4, 8, 16, 32, 32]
    """
    return indexed_access(range(offset, offset + stride * WARP_SIZE, stride) if stride else [offset], itemsize)


def aos_access(struct_bytes: int, field_offset: int, itemsize: int) -> WarpAccess:
    """A full warp that accesses one field of 32 consecutive structs, the first at a sector's start.

    ``field_offset`` is in bytes from the start of a struct. Raises ``LayoutError`` where the field does not lie inside it.

    >>> round(aos_access(struct_bytes=12, field_offset=0, itemsize=4).efficiency, 2)  # x of struct { float x, y, z; }
    0.33
    """
    if not 0 <= field_offset <= struct_bytes - itemsize:
        raise LayoutError(f"a field of {itemsize} bytes at byte {field_offset} does not lie inside a struct of {struct_bytes} bytes")
    return warp_sectors(range(field_offset, field_offset + struct_bytes * WARP_SIZE, struct_bytes), itemsize)


def indexed_access(indices: Iterable[int], itemsize: int) -> WarpAccess:
    """A warp whose lanes access the elements ``indices`` of a tensor that starts a sector: a gather or a scatter.

    >>> indexed_access([0, 1, 8, 8], itemsize=4)
    WarpAccess(sectors=2, useful_bytes=12)
    """
    return warp_sectors((index * itemsize for index in indices), itemsize)
