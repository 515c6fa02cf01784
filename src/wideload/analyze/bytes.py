"""Turns strided views of memory into how many distinct bytes, or 32-byte sectors, they cover together.

Counts on addresses, sizes and strides, never element by element, so that a view of 2**40 elements takes no longer than one of 40.
It must not know tensors, kernels, or which view is read and which is written.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wideload.analyze.sectors import SECTOR_BYTES

__all__ = ["MAX_PIECES", "Cover", "Span", "count_bytes", "count_sectors", "span_of"]

MAX_PIECES = 1 << 22
"""How many runs the sweep over views that interleave may list (some seconds); beyond, the count is an upper bound and says so."""

_Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes in memory: a run of ``run_bytes`` from ``address_bytes`` on, and its copies along ``dims``.

    ``dims`` are (size, stride in bytes), the smallest stride first; each has at least two steps, and a stride longer than the run.
    """

    address_bytes: int
    run_bytes: int
    dims: tuple[tuple[int, int], ...] = ()

    @property
    def end_bytes(self) -> int:
        """The address behind the last byte."""
        return self.address_bytes + self.run_bytes + sum((size - 1) * stride for size, stride in self.dims)

    @property
    def is_nested(self) -> bool:
        """Whether each dim steps over all that lies inside it: the runs then lie in order, apart from each other."""
        reach = self.run_bytes
        for size, stride in self.dims:
            if stride < reach:
                return False
            reach += (size - 1) * stride
        return True


@dataclass(frozen=True, slots=True)
class Cover:
    """A count of bytes: exact, or an upper bound where views interleave in too many pieces (`MAX_PIECES`)."""

    nbytes: int
    is_exact: bool = True


def span_of(address_bytes: int, itemsize: int, shape: Sequence[int], strides: Sequence[int]) -> Span | None:
    """Return the memory under a strided view, strides in elements as torch has them; None where it has no elements.

    A dim of stride 0 or size 1 adds nothing; dims that continue or overlap one another become one.

    >>> span_of(0, 4, (6, 8), (8, 1)), span_of(0, 4, (6, 3), (1, 1)), span_of(0, 2, (1000, 8), (16, 1))
    (Span(address_bytes=0, run_bytes=192, dims=()), Span(address_bytes=0, run_bytes=32, dims=()), \
Span(address_bytes=0, run_bytes=16, dims=((1000, 32),)))
    """
    if 0 in shape:
        return None
    return _reduced(address_bytes, itemsize, [(size, stride * itemsize) for size, stride in zip(shape, strides, strict=True)])


def count_bytes(spans: Iterable[Span]) -> Cover:
    """Count the bytes under all of ``spans`` together, each once.

    >>> count_bytes([span_of(0, 4, (9,), (1,)), span_of(4, 4, (9,), (1,))])  # x[:-1] and x[1:]
    Cover(nbytes=40, is_exact=True)
    """
    return _cover(spans, 1)


def count_sectors(spans: Iterable[Span]) -> Cover:
    """Count the bytes of all sectors that ``spans`` together touch, each sector once and whole.

    >>> count_sectors([span_of(0, 4, (2**31,), (2,))]).nbytes == 2 * 4 * 2**31  # x[::2] moves all of x
    True
    """
    return _cover(spans, SECTOR_BYTES)


def _reduced(address: int, run: int, dims: Iterable[tuple[int, int]]) -> Span:
    """The span of the fewest dims: those within the run's reach join the run, those that continue another join it."""
    left = sorted((stride, size) for size, stride in dims if size > 1 and stride)
    while left and left[0][0] <= run:
        stride, size = left.pop(0)
        run += (size - 1) * stride
    position = 0
    while position < len(left):
        stride, size = left[position]
        joins = next((at for at, (other, _) in enumerate(left) if at > position and not other % stride and other // stride <= size), None)
        if joins is None:
            position += 1
        else:
            other, other_size = left.pop(joins)
            left[position] = (stride, size + (other_size - 1) * (other // stride))
    return Span(address, run, tuple((size, stride) for stride, size in left))


def _cover(spans: Iterable[Span], unit: int) -> Cover:
    groups = [_count_group(group, unit) for group in _touching(_merged(spans), unit)]
    return Cover(sum(cover.nbytes for cover in groups), all(cover.is_exact for cover in groups))


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Spans that are one, as far as it can be seen in pairs."""
    left = list(dict.fromkeys(spans))
    while True:
        kept: list[Span] = []
        for span in sorted(left, key=lambda span: (span.address_bytes, span.end_bytes)):
            joined = ((position, whole) for position, other in enumerate(kept) if (whole := _join(other, span)) is not None)
            position, whole = next(joined, (len(kept), span))
            kept[position : position + 1] = [whole]
        if len(kept) == len(left):
            return kept
        left = kept


def _join(a: Span, b: Span) -> Span | None:
    """One span for both, of which ``a`` starts first; None where that takes more than one."""
    if not a.dims and b.end_bytes <= a.end_bytes:
        return a
    if a.dims != b.dims:
        return None
    distance = b.address_bytes - a.address_bytes
    if distance <= a.run_bytes:
        return _reduced(a.address_bytes, max(a.run_bytes, distance + b.run_bytes), a.dims)
    if a.run_bytes == b.run_bytes:
        both = _reduced(a.address_bytes, a.run_bytes, [*a.dims, (2, distance)])
        return both if both.is_nested and len(both.dims) <= len(a.dims) else None
    return None


def _touching(spans: Iterable[Span], unit: int) -> list[list[Span]]:
    """Groups of spans that may have units in common; no two groups have."""
    groups: list[list[Span]] = []
    end = None
    for span in sorted(spans, key=lambda span: span.address_bytes):
        if end is None or span.address_bytes // unit > end:
            groups.append([])
            end = span.address_bytes // unit
        groups[-1].append(span)
        end = max(end, (span.end_bytes - 1) // unit)
    return groups


def _count_group(group: list[Span], unit: int) -> Cover:
    if len(group) == 1 and group[0].is_nested:
        return Cover(_count_nested(group[0], unit) * unit)
    counted = _sweep(group, unit)
    if counted is not None:
        return Cover(counted * unit)
    most = sum(_at_most(span, unit) for span in group)
    return Cover(most * unit, is_exact=False)


def _at_most(span: Span, unit: int) -> int:
    """Each run apart from all others, but no more units than lie between its ends."""
    whole = (span.end_bytes - 1) // unit - span.address_bytes // unit + 1
    return min(whole, _count_nested(span, unit) if span.is_nested else math.prod(n for n, _ in span.dims) * (span.run_bytes // unit + 2))


def _count_nested(span: Span, unit: int) -> int:
    """The units that a nested span touches.

    Its runs lie in order, so that a run adds all of its units but one that the run before has touched too. Both depend on
    addresses modulo ``unit`` alone: runs, and steps from one to the next, are counted by that residue, dim by dim from outside.
    """
    starts = [0] * unit
    starts[span.address_bytes % unit] = 1
    shared = 0
    inner_last = span.end_bytes - span.address_bytes - 1
    for size, stride in reversed(span.dims):
        inner_last -= (size - 1) * stride
        before = _spread(starts, size - 1, stride)
        shared += sum(count for residue, count in enumerate(before) if (residue + inner_last) // unit == (residue + stride) // unit)
        starts = _spread(starts, size, stride)
    return sum(count * ((residue + span.run_bytes - 1) // unit + 1) for residue, count in enumerate(starts)) - shared


def _spread(counts: list[int], size: int, stride: int) -> list[int]:
    """Addresses by residue, each repeated ``size`` times at ``stride``."""
    unit = len(counts)
    period = unit // math.gcd(unit, stride)
    spread = [0] * unit
    for step in range(min(period, size)):
        times = (size - step - 1) // period + 1
        for residue, count in enumerate(counts):
            spread[(residue + step * stride) % unit] += count * times
    return spread


def _sweep(group: list[Span], unit: int) -> int | None:
    """The units under spans that interleave: they repeat with a common period along the longest dim of each.

    Units are laid out in rows of one period, where a run with its repeats is a rectangle; the rectangles' union is counted.
    None where they are too many.
    """
    longest = [max(span.dims, default=(1, unit)) for span in group]
    period = math.lcm(unit, *(stride for (_, stride), span in zip(longest, group, strict=True) if span.dims))
    num_pieces = sum(
        min(period // stride, size) * math.prod(n for n, _ in span.dims) // size if span.dims else 1
        for span, (size, stride) in zip(group, longest, strict=True)
    )
    if num_pieces > MAX_PIECES:
        return None
    width = period // unit
    pieces = [piece for span, dim in zip(group, longest, strict=True) for piece in _pieces(span, dim, period, unit, width)]
    left, right, row, height = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    if np.unique(np.concatenate((left, right))).size < np.unique(np.concatenate((row, row + height))).size:
        left, right, row, height = row, row + height, left, right - left
    return _area(left, right, row, height)


def _pieces(span: Span, dim: tuple[int, int], period: int, unit: int, width: int) -> list[tuple[_Array, _Array, _Array, _Array]]:
    """The rectangles of a span: from column ``left`` to before ``right``, ``height`` rows from ``row`` on."""
    address = np.array([span.address_bytes], dtype=np.int64)
    height = np.ones(1, dtype=np.int64)
    if span.dims:
        size, stride = dim
        steps = np.arange(min(period // stride, size), dtype=np.int64)
        address = address + steps * stride
        height = (size - steps - 1) // (period // stride) + 1
        for other in span.dims:
            if other is not dim:
                address = (address[:, None] + np.arange(other[0], dtype=np.int64) * other[1]).ravel()
                height = np.repeat(height, other[0])
    first, last = address // unit, (address + span.run_bytes - 1) // unit
    row, last_row = first // width, last // width
    whole = row == last_row
    zero, full = np.zeros_like(row), np.full_like(row, width)
    head = (first % width, np.where(whole, last % width + 1, full), row, height)
    tail = (zero, last % width + 1, last_row, height)
    # A run that is longer than a period repeats along no dim.
    middle = (zero, full, row + 1, last_row - row - 1)
    keep_tail, keep_middle = ~whole, last_row - row > 1
    return [head, _masked(tail, keep_tail), _masked(middle, keep_middle)]


def _masked(arrays: tuple[_Array, _Array, _Array, _Array], keep: npt.NDArray[np.bool_]) -> tuple[_Array, _Array, _Array, _Array]:
    a, b, c, d = (array[keep] for array in arrays)
    return a, b, c, d


def _area(left: _Array, right: _Array, row: _Array, height: _Array) -> int | None:
    """The area under the rectangles together, row by distinct row; None where that takes too long."""
    edges = np.unique(np.concatenate((row, row + height)))
    if edges.size * left.size > MAX_PIECES * 16:
        return None
    order = np.argsort(left, kind="stable")
    left, right, row, height = left[order], right[order], row[order], height[order]
    area = 0
    for low, high in itertools.pairwise(edges.tolist()):
        active = (row <= low) & (row + height > low)
        starts, ends = left[active], np.maximum.accumulate(right[active])
        if starts.size:
            before = np.concatenate((starts[:1], ends[:-1]))
            area += (high - low) * int(np.maximum(ends - np.maximum(starts, before), 0).sum())
    return area
