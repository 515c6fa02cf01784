"""Turns the addresses, shapes and strides of operands into whether they share memory: not at all, exactly or partly.

Knows integers only: no tensors and no storages, so that views of one storage and tensors of two allocations are told apart by bytes alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd
from typing import Literal, NamedTuple

__all__ = ["MAX_SEARCH_STEPS", "Extent", "Relation", "overlaps_itself", "relation"]

Relation = Literal["none", "exact", "partial"]

MAX_SEARCH_STEPS = 1 << 16
"""How many partial sums a proof may try (some 40 ms of Python) before the safe answer is given. Slices, chunks, transposes, rows
of a pitched matrix and views as another dtype take a few; a diagonal against a column takes one a row."""


class Extent(NamedTuple):
    """The memory of one operand: elements of ``itemsize`` bytes at ``address_bytes + itemsize * sum(index * stride)``.

    ``strides`` count elements and are never negative. An address includes the storage offset (``x.data_ptr()``).
    """

    address_bytes: int
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape

    @property
    def end_bytes(self) -> int:
        """The address after the last byte, of an extent that is not empty."""
        return self.address_bytes + self.itemsize + sum(stride * most for stride, most in _byte_terms(self))


def overlaps_itself(extent: Extent) -> bool:
    """Whether two elements lie in one cell, as in ``x.expand(3, -1)``: such a tensor cannot be an output.

    Exact within ``MAX_SEARCH_STEPS``, else ``True``. ``at::has_internal_overlap`` answers "too hard" in most of these cases.

    >>> overlaps_itself(Extent(0, 4, (3, 4), (0, 1))), overlaps_itself(Extent(0, 4, (3, 2), (2, 3)))
    (True, False)
    """
    if extent.is_empty:
        return False
    # Two elements of one cell are j >= 1 steps of some stride apart, undone by -most..most steps of each stride before it.
    # Count each of these steps down from its largest value, and all are >= 0 and add up to ``span``.
    terms = sorted(_byte_terms(extent))
    span = 0
    for num_before, (stride, most) in enumerate(terms):
        span += stride * most
        steps = [(stride, most - 1), *((before, 2 * most_before) for before, most_before in terms[:num_before])]
        if _may_sum_to(steps, span, span):
            return True
    return False


def relation(a: Extent, b: Extent) -> Relation:
    """Return how the memory of two operands of one iteration space relates.

    - ``"exact"``: element by element the same memory: equal address, itemsize, shape and strides (those of size 1 do not count).
    - ``"none"``: no common byte. Proved, also for interleaved views (``x[:, ::2]`` and ``x[:, 1::2]``), where
      ``at::get_overlap_status`` gives up.
    - ``"partial"``: some common byte, or no proof of the contrary within ``MAX_SEARCH_STEPS``.

    >>> relation(Extent(0, 4, (8,), (2,)), Extent(4, 4, (8,), (2,)))
    'none'
    """
    if a.is_empty or b.is_empty or a.end_bytes <= b.address_bytes or b.end_bytes <= a.address_bytes:
        return "none"
    if (a.address_bytes, a.itemsize, a.shape, _byte_terms(a)) == (b.address_bytes, b.itemsize, b.shape, _byte_terms(b)):
        return "exact"
    # An element of b that starts from b.itemsize - 1 bytes before an element of a to a.itemsize - 1 bytes after it meets it.
    # With a's steps counted down from its last element, that is a sum of steps >= 0 within these bounds.
    high = a.end_bytes - 1 - b.address_bytes
    low = high - (a.itemsize - 1) - (b.itemsize - 1)
    return "partial" if _may_sum_to(_byte_terms(a) + _byte_terms(b), low, high) else "none"


def _byte_terms(extent: Extent) -> list[tuple[int, int]]:
    """Return ``(stride in bytes, largest index)`` of each dim that has a second index."""
    return [(stride * extent.itemsize, size - 1) for size, stride in zip(extent.shape, extent.strides, strict=True) if size > 1]


def _may_sum_to(terms: Iterable[tuple[int, int]], low: int, high: int) -> bool:
    """Whether some ``sum(stride * x)`` with ``0 <= x <= most`` for each ``(stride, most)`` lies in ``low..high``.

    ``False`` is proved; ``True`` may mean that ``MAX_SEARCH_STEPS`` were spent. A bounded linear Diophantine problem:
    reduced, then searched from the largest stride down, cut by the reach and the greatest common divisor of what is left.
    """
    # A stride no longer than the bounds are wide leaves no gap and widens them; one that continues the steps of another joins it.
    runs: list[tuple[int, int]] = []
    for stride, most in sorted(terms):
        if stride <= high - low + 1:
            low -= stride * most
            continue
        for index, (base, base_most) in enumerate(runs):
            if stride % base == 0 and stride <= base * (base_most + 1):
                runs[index] = (base, base_most + stride // base * most)
                break
        else:
            runs.append((stride, most))

    reach, divisor = [0], [0]  # the largest sum and the common divisor of no run, of the first, of the first two, ...
    for stride, most in runs:
        reach.append(reach[-1] + stride * most)
        divisor.append(gcd(divisor[-1], stride))

    num_steps = 0
    open_sums = [(len(runs), low, high)]
    while open_sums:
        left, low, high = open_sums.pop()
        low, high = max(low, 0), min(high, reach[left])
        if low > high:
            continue
        if low == 0 or high == reach[left]:
            return True
        if high // divisor[left] * divisor[left] < low:
            continue
        stride, most = runs[left - 1]
        first, last = max(0, -((reach[left - 1] - low) // stride)), min(most, high // stride)
        num_steps += last - first + 1
        if num_steps > MAX_SEARCH_STEPS:
            return True
        open_sums += [(left - 1, low - stride * x, high - stride * x) for x in range(first, last + 1)]
    return False
