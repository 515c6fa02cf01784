"""Turns the shapes and strides of operands into the strides of a result and into the loop nest that a kernel walks.

Knows integers and tuples only: no tensors, dtypes or devices. Strides and offsets count elements and, as in torch, are never negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal, NamedTuple

from wideload.errors import LayoutError

__all__ = [
    "INT31_MAX",
    "Dim",
    "IterSpace",
    "Shape",
    "Strides",
    "broadcast_shapes",
    "build_space",
    "channels_last_strides",
    "coalesce",
    "contiguous_strides",
    "expand_strides",
    "has_channels_last",
    "is_row_major",
    "iterator_strides",
    "like_strides",
    "magic_divisor",
]

Shape = tuple[int, ...]
Strides = tuple[int, ...]

INT31_MAX = 2**31 - 1
"""The largest index and byte offset of a 32-bit kernel: both stay exact in ``int`` and in the division by ``magic_divisor``."""

CHANNELS_LAST_ORDER = (1, 3, 2, 0)
"""The dims of ``torch.channels_last`` (N, C, H, W as C, W, H, N), innermost first."""


# Shapes


def broadcast_shapes(*shapes: Shape) -> Shape:
    """Return the shape that ``shapes`` broadcast to, aligned at their last dims; of no shapes, ``()``.

    A size of 1 stretches to any other, 0 included. Raises ``LayoutError`` where two other sizes meet.

    >>> broadcast_shapes((3, 1), (4,), ())
    (3, 4)
    """
    rank = max(map(len, shapes), default=0)
    result = [1] * rank
    given_by: list[Shape] = [()] * rank
    for shape in shapes:
        for dim, size in enumerate(shape, start=rank - len(shape)):
            if size == 1 or size == result[dim]:
                continue
            if result[dim] != 1:
                raise LayoutError(
                    f"shapes {given_by[dim]} and {shape} do not broadcast: at dim {dim - rank} one has size {result[dim]} and the other "
                    f"{size}; the sizes of a dim must be equal, or 1"
                )
            result[dim], given_by[dim] = size, shape
    return tuple(result)


def expand_strides(shape: Shape, strides: Strides, to_shape: Shape) -> Strides:
    """Return the strides with which a tensor is read as ``to_shape``: 0 along each dim that it is stretched over.

    Dims align at the last. Raises ``LayoutError`` where a size is neither that of ``to_shape`` nor 1.

    >>> expand_strides((3, 1), (1, 1), (2, 3, 4))
    (0, 1, 0)
    """
    num_new = len(to_shape) - len(shape)
    if num_new < 0 or any(size not in (1, to_size) for size, to_size in zip(shape, to_shape[num_new:], strict=True)):
        raise LayoutError(f"shape {shape} does not broadcast to {to_shape}: each size must be equal, or 1")
    kept = (stride if size == to_size else 0 for size, stride, to_size in zip(shape, strides, to_shape[num_new:], strict=True))
    return (0,) * num_new + tuple(kept)


# The strides that torch gives to results


def contiguous_strides(shape: Shape) -> Strides:
    """Return the strides of a new tensor in row-major order; a size of 0 counts as 1.

    >>> contiguous_strides((2, 0, 3))
    (3, 3, 1)
    """
    return _packed_strides(shape, _row_major(shape))


def iterator_strides(shape: Shape, operands: Sequence[tuple[Shape, Strides]]) -> Strides:
    """Return the strides that torch's TensorIterator gives to a result that it allocates.

    ``operands`` are all inputs in order, as ``(shape, strides)`` before broadcasting to ``shape``, with 0-dim tensors and
    Python numbers that became tensors as ``((), ())``. Strides of dims of size 1 are torch's too. An input that torch first
    converts with ``.to`` for its dtype (ops on the CPU, ``torch.where`` everywhere) comes in with its ``like_strides``.

    The rules (aten/src/ATen/TensorIterator.cpp, read for torch 2.10 and 2.13):

    - Inputs of one shape are tried first: all contiguous, or all channels_last, gives that format; all of the same strides,
      non-overlapping and dense, gives those strides.
    - Otherwise the result is packed in the order in which the inputs, the first before the second, walk memory.

    >>> iterator_strides((2, 3), [((2, 3), (1, 2)), ((3,), (1,))])
    (1, 2)
    """
    # Ranks first: tuples of unlike lengths are compared item by item as well, and a comparison of symbols is a guard.
    if all(len(operand_shape) == len(shape) and operand_shape == shape for operand_shape, _ in operands):
        layouts = [strides for _, strides in operands]  # no set: sizes that are symbols have no hash
        formats = [_row_major(shape), CHANNELS_LAST_ORDER] if len(shape) == 4 else [_row_major(shape)]
        for order in formats:
            if all(_is_packed(shape, strides, order) for strides in layouts):
                return _packed_strides(shape, order)
        if layouts and all(strides == layouts[0] for strides in layouts) and _is_non_overlapping_and_dense(shape, layouts[0]):
            return layouts[0]
    order = _memory_order(shape, [expand_strides(*operand, shape) for operand in operands])
    if order == _row_major(shape):
        return contiguous_strides(shape)
    # Here, unlike in the row-major order, torch lets a size of 0 make every outer stride 0.
    return tuple(prod(shape[dim] for dim in order[: order.index(at)]) for at in range(len(shape)))


def channels_last_strides(shape: Shape) -> Strides:
    """Strides of a new tensor of four or five dims whose second runs fastest, as ``torch.channels_last`` and ``channels_last_3d``.

    >>> channels_last_strides((2, 3, 4, 5))
    (60, 1, 15, 3)
    """
    return _packed_strides(shape, (1, *range(len(shape) - 1, 1, -1), 0))


def has_channels_last(shape: Shape, strides: Strides) -> bool:
    """Whether torch takes strides for those of `channels_last_strides`; ambiguous ones, of few sizes above 1, for row-major.

    The rule is that of c10's ``is_channels_last_strides_2d`` and ``_3d``.

    >>> has_channels_last((2, 3, 4, 5), (60, 1, 15, 3)), has_channels_last((2, 1, 1, 1), (1, 1, 1, 1))
    (True, False)
    """
    if len(shape) not in (4, 5) or strides[1] == 0 or 0 in shape:
        return False
    least = 0
    for dim in (1, *range(len(shape) - 1, 1, -1), 0):
        if strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


def like_strides(shape: Shape, strides: Strides) -> Strides:
    """Return the strides that ``x.to(dtype)`` and ``torch.empty_like(x)`` give to their result.

    The same strides if ``x`` is non-overlapping and dense, else packed in the order in which ``x`` walks memory
    (``at::infer_dense_strides``).

    >>> like_strides((2, 3), (1, 4))
    (1, 2)
    """
    if _is_non_overlapping_and_dense(shape, strides):
        return strides
    return _packed_strides(shape, _memory_order(shape, [strides]))


def is_row_major(shape: Shape, strides: Strides) -> bool:
    """Whether elements follow one another in row-major order (``x.is_contiguous()``); strides of size 1 do not count."""
    return _is_packed(shape, strides, _row_major(shape))


def _row_major(shape: Shape) -> tuple[int, ...]:
    return tuple(range(len(shape)))[::-1]


def _packed_strides(shape: Shape, order: Sequence[int]) -> Strides:
    """Strides without gaps for dims nested in ``order``, innermost first."""
    strides = [0] * len(shape)
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def _is_packed(shape: Shape, strides: Strides, order: Sequence[int]) -> bool:
    """Whether the dims nest in ``order`` without gaps; strides of size 1 do not count, and no elements have no gaps."""
    packed = _packed_strides(shape, order)
    return 0 in shape or all(size == 1 or a == b for size, a, b in zip(shape, strides, packed, strict=True))


def _is_non_overlapping_and_dense(shape: Shape, strides: Strides) -> bool:
    order = sorted(range(len(shape)), key=lambda dim: strides[dim])
    return _is_packed(shape, strides, order)


def _memory_order(shape: Shape, operand_strides: Sequence[Strides]) -> tuple[int, ...]:
    """Return the dims in the order in which the operands walk memory, innermost first, as TensorIterator sorts them.

    An insertion sort from the row-major order. The first operand that tells two dims apart decides; a pair that none tells
    apart does not stop a dim on its way inwards, which makes the order depend on the steps of the sort, so they are torch's.
    """

    def compare(a: int, b: int) -> int:
        """Return 1 if dim ``a`` belongs outside dim ``b``, -1 if inside, 0 if no operand can tell."""
        for strides in operand_strides:
            if strides[a] == 0 or strides[b] == 0:
                continue
            if strides[a] != strides[b]:
                return 1 if strides[a] > strides[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(_row_major(shape))
    for start in range(1, len(order)):
        at = start
        for inner in reversed(range(start)):
            comparison = compare(order[inner], order[at])
            if comparison < 0:
                break
            if comparison > 0:
                order[inner], order[at] = order[at], order[inner]
                at = inner
    return tuple(order)


# The loop nest of a kernel


class Dim(NamedTuple):
    """One loop: ``size`` steps, each of which moves operand ``i`` by ``strides[i]`` elements."""

    size: int
    strides: Strides


class IterSpace(NamedTuple):
    """The loops over all elements, innermost first; none where there is at most one element.

    Each of ``dims`` has at least 2 steps, and no two neighbours could be one loop. ``num_elements`` is the product of their
    sizes, or 0. Offsets count from each operand's first element: its pointer includes the storage offset.
    """

    dims: tuple[Dim, ...]
    num_elements: int

    def is_dense(self, operand: int) -> bool:
        """Whether the loops walk the operand's memory in one run of stride 1; true of one element or none."""
        step = 1
        for dim in self.dims:
            if dim.strides[operand] != step:
                return False
            step *= dim.size
        return True

    @property
    def all_dense(self) -> bool:
        """Whether every operand ``is_dense``; the space is then one loop, or none."""
        return not self.dims or (len(self.dims) == 1 and set(self.dims[0].strides) == {1})

    def offset_range(self, operand: int) -> tuple[int, int]:
        """Return the smallest and the largest offset of the operand, in elements; ``(0, 0)`` for one element or none."""
        return 0, sum((dim.size - 1) * dim.strides[operand] for dim in self.dims)

    def needs_64bit(self, itemsizes: Sequence[int]) -> bool:
        """Whether the number of elements or the offset of an operand's last byte exceeds ``INT31_MAX``.

        ``itemsizes`` are bytes, one for each operand. Element offsets fit where byte offsets do.
        """
        last_bytes = ((self.offset_range(operand)[1] + 1) * itemsize - 1 for operand, itemsize in enumerate(itemsizes))
        return max(self.num_elements, *last_bytes) > INT31_MAX


def build_space(shape: Shape, operand_strides: Sequence[Strides], outputs: Sequence[int] = (0,)) -> IterSpace:
    """Return the fewest loops that visit each element of ``shape`` once, along the first output's memory.

    ``operand_strides`` has a stride for each dim of ``shape`` (see ``expand_strides``), one operand a row; ``outputs`` are
    the rows that decide the order of the loops, before all others. Dims of size 1 go, and neighbours merge (``coalesce``).

    >>> build_space((2, 3, 4), [(12, 4, 1), (0, 4, 1)])
    IterSpace(dims=(Dim(size=12, strides=(1, 1)), Dim(size=2, strides=(12, 0))), num_elements=24)
    """
    num_elements = prod(shape)
    if num_elements == 0:
        return IterSpace((), 0)
    inputs = (operand for operand in range(len(operand_strides)) if operand not in outputs)
    order = _memory_order(shape, [operand_strides[operand] for operand in (*outputs, *inputs)])
    dims = (Dim(shape[at], tuple(strides[at] for strides in operand_strides)) for at in order if shape[at] != 1)
    return IterSpace(coalesce(tuple(dims)), num_elements)


def coalesce(dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Merge neighbouring dims that every operand walks as one.

    Dims run innermost first. ``outer`` folds into ``inner`` only when, for each operand, ``outer.stride == inner.size *
    inner.stride``; a dim of size 1 always folds.

    >>> coalesce((Dim(4, (4, 0)), Dim(3, (16, 0))))
    (Dim(size=12, strides=(4, 0)),)
    """
    merged: list[Dim] = []
    for outer in dims:
        if outer.size == 1:
            continue
        inner = merged[-1] if merged else None
        if inner and all(far == inner.size * near for near, far in zip(inner.strides, outer.strides, strict=True)):
            merged[-1] = Dim(inner.size * outer.size, inner.strides)
        else:
            merged.append(outer)
    return tuple(merged)


# Division without a division


def magic_divisor(divisor: int, bits: Literal[32, 64] = 32) -> tuple[int, int]:
    """Return ``(multiplier, shift)`` that divide every numerator below ``2**(bits - 1)`` by ``divisor`` exactly.

    ``1 <= divisor < 2**(bits - 1)``, else ``LayoutError``. In CUDA, with unsigned ``n``, ``multiplier``, ``shift``:

    - 32 bits: ``(unsigned)(((unsigned long long)n * multiplier) >> shift)``
    - 64 bits: ``(__umul64hi(n, multiplier) + n) >> shift``

    Let ``p = bits - 1``, ``2**(k-1) < d <= 2**k`` and ``M = ceil(2**(p+k) / d)``, so that ``M*d = 2**(p+k) + e`` with
    ``0 <= e < d <= 2**k``. Then ``n*M / 2**(p+k) = n/d + (n*e / 2**(p+k)) / d``, and since ``n*e < 2**p * 2**k`` the second
    term is less than ``1/d``: too little to reach the next integer, so ``(n*M) >> (p+k)`` is ``n // d``. ``2**p <= M < 2**bits``.
    (Granlund and Montgomery, Division by Invariant Integers using Multiplication, 1994, theorem 4.2; Warren, Hacker's
    Delight, 2nd ed., 10-9.)

    32 bits take ``M`` and ``p+k`` as they are: the product fits in 64 bits, and sm_75 - sm_100 need two instructions
    (``IMAD.WIDE.U32``, ``SHF.R.U64``). For 64 bits ``2*M = 2**64 + multiplier``, so the high word of ``n * 2*M`` is the sum
    above, which stays below ``2*n < 2**64``: eleven instructions. ``__umul64hi(n, M) >> (k-1)`` takes nine, but has no
    shift for ``d = 1``, which the number of tiles in a row may be.

    >>> magic_divisor(3)
    (2863311531, 33)
    """
    precision = bits - 1
    if not 1 <= divisor < 1 << precision:
        raise LayoutError(f"divisor {divisor} is outside [1, 2**{precision}), the numerators that a {bits}-bit kernel divides")
    log2_ceil = (divisor - 1).bit_length()
    multiplier = -(-(1 << (precision + log2_ceil)) // divisor)
    if bits == 32:
        return multiplier, precision + log2_ceil
    return 2 * multiplier - (1 << bits), log2_ceil
