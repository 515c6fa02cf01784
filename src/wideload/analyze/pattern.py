"""Turns a stride, or an operand of an explanation, into the bytes that each lane of one warp asks for at once.

Reckons with integers, as `wideload.analyze.sectors` counts them; it must not know how they are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import get_args

from wideload.analyze.explain import ExplainedOperand, Explanation
from wideload.analyze.sectors import LINE_BYTES, SECTOR_BYTES, WARP_SIZE, WarpAccess
from wideload.errors import LayoutError
from wideload.layout import IterSpace, build_space
from wideload.plan import ACCESS_BYTES, Access

__all__ = ["Pattern", "indexed_pattern", "operand_pattern", "strided_pattern"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """Of each active lane, the byte addresses of the items of ``itemsize`` bytes that it asks for. Address 0 begins a line.

    >>> strided_pattern(4, stride=2).sectors  # every second float
    (0, 1, 2, 3, 4, 5, 6, 7)
    """

    itemsize: int
    lanes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.itemsize < 1 or len(self.lanes) > WARP_SIZE:
            allowed = f"allowed are at least 1 byte and at most {WARP_SIZE} lanes"
            raise LayoutError(f"itemsize is {self.itemsize} and there are {len(self.lanes)} lanes; {allowed}")

    @property
    def used(self) -> frozenset[int]:
        """The addresses of the bytes that are asked for, each once."""
        return frozenset(byte for lane in self.lanes for address in lane for byte in range(address, address + self.itemsize))

    @property
    def sectors(self) -> tuple[int, ...]:
        """The numbers of the sectors that are touched: sector n begins at byte 32 n."""
        return tuple(sorted({byte // SECTOR_BYTES for byte in self.used}))

    @property
    def lines(self) -> tuple[int, ...]:
        """The numbers of the lines that are touched: line n begins at byte 128 n."""
        return tuple(sorted({byte // LINE_BYTES for byte in self.used}))

    @property
    def access(self) -> WarpAccess:
        """What `wideload.analyze.sectors.warp_sectors` counts."""
        return WarpAccess(len(self.sectors), len(self.used))


def strided_pattern(itemsize: int, stride: int, offset: int = 0) -> Pattern:
    """A full warp whose lane i asks for element ``offset + i * stride``, in elements of ``itemsize`` bytes from a line's start.

    A vector access is one element of its whole width; ``stride`` 0 is a broadcast, below 0 a reversed walk.

    >>> strided_pattern(4, stride=1, offset=1).access
    WarpAccess(sectors=5, useful_bytes=128)
    """
    return indexed_pattern(itemsize, (offset + lane * stride for lane in range(WARP_SIZE)))


def indexed_pattern(itemsize: int, indices: Iterable[int]) -> Pattern:
    """A warp whose lanes ask for the elements ``indices`` of a tensor that starts a line: a gather or a scatter."""
    return Pattern(itemsize, tuple((index * itemsize,) for index in indices))


def operand_pattern(explanation: Explanation, operand: ExplainedOperand) -> Pattern | None:
    """One access of the first warp to an operand; all of a thread's, of an operand of which it takes every few elements.

    None of an operand that is not accessed as a plan says: an explanation has no addresses of other kernels' warps.
    """
    if operand.access not in get_args(Access):
        return None
    own = [other for other in explanation.operands if other.kernel == operand.kernel]
    written = [row for row, other in enumerate(own) if other.role == "written"]
    space = build_space(operand.shape, [other.strides for other in own], outputs=written)
    row, first, itemsize = own.index(operand), operand.line_byte, operand.itemsize
    active = min(WARP_SIZE, space.num_elements)
    if operand.access in ("row", "uniform", "reduced"):
        return Pattern(itemsize, ((first,),) * active)
    if operand.access == "strided":
        return Pattern(itemsize, tuple((first + itemsize * _offset(space, row, lane),) for lane in range(active)))
    is_turned = operand.access.startswith("turned")
    num_items = ACCESS_BYTES // itemsize if is_turned else explanation.kernels[operand.kernel].elements_per_access
    width = num_items * itemsize
    lanes: Sequence[int] = range(min(active, -(-space.num_elements // num_items)))
    if operand.access == "stepped":
        step = space.dims[0].strides[row]
        return Pattern(itemsize, tuple(tuple(first + (lane * num_items + i) * step * itemsize for i in range(num_items)) for lane in lanes))
    return Pattern(itemsize if operand.access == "elements" else width, tuple((first + lane * width,) for lane in lanes))


def _offset(space: IterSpace, row: int, index: int) -> int:
    """Where element ``index`` of the loops lies in an operand, in elements."""
    offset = 0
    for dim in space.dims:
        index, at = divmod(index, dim.size)
        offset += at * dim.strides[row]
    return offset
