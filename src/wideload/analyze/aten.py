"""Turns an expression and where its operands lie into the kernels that eager PyTorch runs for it: one an op, which path, how many bytes.

The rules are those of ATen's ``CUDALoops.cuh`` (2.10 to 2.14) on plain integers; it must not know what wideload makes of the same
expression.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch

from wideload.analyze.bytes import Span, count_bytes, span_of
from wideload.analyze.sectors import SECTOR_BYTES
from wideload.expr import Apply, Cast, Const, Coordinate, Draw, Expr, Joined, Load, Number, Position, Reduced, Viewed
from wideload.layout import INT31_MAX, IterSpace, build_space, contiguous_strides, expand_strides, is_row_major, like_strides
from wideload.promotion import operand_dtypes
from wideload.replay import NodeLayout
from wideload.views import View, apply_views

__all__ = ["PATHS", "AtenKernel", "Path", "PathCost", "Place", "eager_kernels", "spans_by_storage"]

Path = Literal["vectorized", "unrolled", "cast", "strided", "transposed"]


@dataclass(frozen=True, slots=True)
class PathCost:
    """What a path does, and the share of a vectorised kernel's bandwidth that it reached on an H200."""

    does: str
    share: float
    source: str


PATHS: dict[Path, PathCost] = {
    "vectorized": PathCost("vectorized_elementwise_kernel: whole accesses", 1.0, "add bf16 4.34 of 4.36 TB/s"),
    "unrolled": PathCost("unrolled_elementwise_kernel: one element an access", 0.88, "x[1:] + b[1:] bf16 3.83 of 4.35 TB/s"),
    "cast": PathCost("unrolled_elementwise_kernel, converting at run time", 0.60, "bf16 + f32 to f32 2.61 of 4.35 TB/s"),
    "strided": PathCost("elementwise_kernel: one element an access, offsets by division", 0.38, "x + row bias bf16 1.65 of 4.36 TB/s"),
    "transposed": PathCost("elementwise_kernel, neighbouring threads in other sectors", 0.21, "x.t() + w bf16 0.90 of 4.35 TB/s"),
}

_THREADS = 128
"""``num_threads()`` of thread_constants.h: four warps."""
_UNROLLED_ELEMENTS = 4
"""``thread_work_size()``; the kernel that converts and the one whose operands are not aligned."""
_VECTOR_BYTES = 16
_WIDEST_VECTOR = {"sm_90": 8, "sm_100": 8}
"""Elements of one access; 4 on every other architecture, and for types of one byte."""
_NARROW_VECTOR = 4
_FRESH_ALIGNMENT = 512
"""Of what the caching allocator gives (``kMinBlockSize``)."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies: addresses in one ``storage`` may overlap, in two never; a 0-dim CPU tensor ``on_host`` acts as a number."""

    storage: Hashable
    address_bytes: int
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class AtenKernel:
    """One op of eager: ``elements`` a thread, of which an access has ``vector``; several ``launches`` where 32-bit offsets do not reach.

    ``nbytes`` is what it reads and writes at least, each operand's memory once.
    """

    op: str
    path: Path
    why: str
    vector: int
    elements: int
    threads: int
    grid: int
    launches: int
    bytes_read: int
    bytes_written: int

    @property
    def nbytes(self) -> int:
        """Bytes read and written."""
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor of the eager program."""

    place: Place
    dtype: torch.dtype
    layout: NodeLayout

    @property
    def span(self) -> Span | None:
        return span_of(self.place.address_bytes, self.dtype.itemsize, self.layout.shape, self.layout.strides)


_K = TypeVar("_K", bound=Hashable)


def spans_by_storage(spans: Sequence[tuple[_K, Span | None]]) -> list[list[Span]]:
    """Group spans by what they may overlap with; those of no elements are left out."""
    groups: dict[_K, list[Span]] = {}
    for storage, span in spans:
        if span is not None:
            groups.setdefault(storage, []).append(span)
    return list(groups.values())


def eager_kernels(expr: Expr, layouts: Sequence[NodeLayout], places: Sequence[Place], arch: str) -> tuple[AtenKernel, ...]:
    """Return the kernels of eager PyTorch in order; views launch none, nor do results without elements.

    ``layouts`` are those of every node, ``places`` those of the tensor arguments. Composite torch functions count as the ops
    they are traced as.
    """
    eager = _Eager(arch, [])
    tensors: list[_Tensor | None] = []
    for number, node in enumerate(expr.nodes):
        layout = layouts[number]
        match node:
            case Const() | Number() | Draw() | Position():  # no memory of their own: an op draws as it computes
                tensors.append(None)
            case Load():
                tensors.append(_Tensor(places[node.operand], node.dtype, layout))
            case Viewed():
                tensors.append(_viewed(tensors[node.operand], node, layout))
            case Reduced():
                tensors.append(None)
                eager.reduce(node, tensors[node.operand])
            case Apply() if node.op.is_alias or _is_kept(node, tensors):
                tensors.append(tensors[node.operands[0]])
            case _:
                result = _Tensor(Place(("node", number), 0), node.dtype, _allocated(layout))
                tensors.append(result)
                eager.run(expr, node, result, tensors)
    return tuple(eager.kernels)


@dataclass(frozen=True, slots=True)
class _Eager:
    """What has been launched so far."""

    arch: str
    kernels: list[AtenKernel]

    def run(self, expr: Expr, node: Apply | Cast | Joined | Coordinate, result: _Tensor, tensors: Sequence[_Tensor | None]) -> None:
        if isinstance(node, Coordinate):
            self._launch("arange", result, [], is_cast=False)
        elif isinstance(node, Joined):
            self._launch("cat", result, [t for operand in node.operands if (t := tensors[operand])], is_cast=False)
        elif isinstance(node, Cast):
            source = tensors[node.operand]
            # float32 to a half has kernels of its own; other conversions are made at run time.
            is_quick = source is None or (source.dtype in (node.dtype, torch.float32) and node.dtype.itemsize in (2, 4))
            self._launch("to", result, [source] if source else [], is_cast=not is_quick)
        else:
            wanted = zip(node.operands, operand_dtypes(expr.nodes, node), node.op.types, strict=True)
            read = [(t, dtype) for operand, dtype, mark in wanted if mark != "shape" and (t := tensors[operand])]
            if node.op.converts_first:
                read = [(self._converted(t, dtype), dtype) for t, dtype in read]
            self._launch(node.op.name, result, [t for t, _ in read], is_cast=any(t.dtype != dtype for t, dtype in read))

    def reduce(self, node: Reduced, source: _Tensor | None) -> None:
        """One value of all elements, taken to be found in a pass that reads them once: eager's ``x.abs().amax()`` is no faster."""
        if source is not None and source.span is not None:
            grid = -(-math.prod(source.layout.shape) // (_THREADS * _UNROLLED_ELEMENTS))
            size = 1, _UNROLLED_ELEMENTS, _THREADS, grid, 1
            nbytes = count_bytes([source.span]).nbytes, node.dtype.itemsize
            self.kernels.append(AtenKernel(node.reduction.name, "vectorized", "one value of all elements", *size, *nbytes))

    def _converted(self, tensor: _Tensor, dtype: torch.dtype | None) -> _Tensor:
        """What ``torch.where`` makes of a value of another dtype before it iterates."""
        if dtype is None or tensor.dtype in (dtype, torch.bool) or tensor.place.on_host:
            return tensor
        layout = NodeLayout(tensor.layout.shape, like_strides(tensor.layout.shape, tensor.layout.strides))
        copy = _Tensor(Place(("copy", len(self.kernels)), 0), dtype, layout)
        self._launch("to", copy, [tensor], is_cast=True)
        return copy

    def _launch(self, op: str, result: _Tensor, operands: Sequence[_Tensor], *, is_cast: bool) -> None:
        if 0 not in result.layout.shape:
            self.kernels.append(_kernel(op, result, [t for t in operands if not t.place.on_host], is_cast, self.arch))


def _allocated(layout: NodeLayout) -> NodeLayout:
    """Coordinates, and what is computed of them alone, lie nowhere when fused, all strides 0; eager's are row-major."""
    return layout if any(layout.strides) else NodeLayout(layout.shape, contiguous_strides(layout.shape))


def _viewed(source: _Tensor | None, node: Viewed, layout: NodeLayout) -> _Tensor:
    assert source is not None, "numbers have no views"
    offset = apply_views(node.steps, View(source.layout.shape, source.layout.strides)).offset
    place = Place(source.place.storage, source.place.address_bytes + offset * source.dtype.itemsize, source.place.on_host)
    return _Tensor(place, source.dtype, layout)


def _is_kept(node: Apply, tensors: Sequence[_Tensor | None]) -> bool:
    """Whether ``x.contiguous()`` returns ``x``."""
    if not node.op.makes_contiguous or not node.op.keeps_format:
        return False
    source = tensors[node.operands[0]]
    return source is not None and is_row_major(source.layout.shape, source.layout.strides)


def _kernel(op: str, result: _Tensor, operands: Sequence[_Tensor], is_cast: bool, arch: str) -> AtenKernel:
    shape = result.layout.shape
    if op == "cat":
        space = IterSpace((), 1)
    else:
        strides = [expand_strides(t.layout.shape, t.layout.strides, shape) for t in (result, *operands)]
        space = build_space(shape, strides)
    path, why, vector, elements = _choose(space, result, operands, is_cast, arch)
    num_elements = math.prod(shape)
    reads = sum(count_bytes(group).nbytes for group in spans_by_storage([(t.place.storage, t.span) for t in operands]))
    return AtenKernel(
        op=op,
        path=path,
        why=why,
        vector=vector,
        elements=elements,
        threads=_THREADS,
        grid=-(-num_elements // (_THREADS * elements)),
        launches=_num_launches(space, [t.dtype.itemsize for t in (result, *operands)]) if op != "cat" else 1,
        bytes_read=reads,
        bytes_written=num_elements * result.dtype.itemsize,
    )


def _choose(space: IterSpace, result: _Tensor, operands: Sequence[_Tensor], is_cast: bool, arch: str) -> tuple[Path, str, int, int]:
    """The path, why, elements an access and elements a thread."""
    tensors = (result, *operands)
    if not space.all_dense:
        elements = 2 if result.dtype.itemsize >= 4 and not is_cast else 4
        if any(stride * t.dtype.itemsize >= SECTOR_BYTES for stride, t in zip(space.dims[0].strides, tensors, strict=True)):
            return "transposed", "an operand runs along another dim than the result", 1, elements
        return "strided", "an operand is broadcast, or has gaps", 1, elements
    if is_cast:
        return "cast", "an operand is of another dtype than the op computes in", 1, _UNROLLED_ELEMENTS
    size = result.dtype.itemsize
    widest = _WIDEST_VECTOR.get(arch, _NARROW_VECTOR) if size > 1 else _NARROW_VECTOR
    vector = min(_VECTOR_BYTES // size, widest)
    while vector > 1 and any((t.place.address_bytes or _FRESH_ALIGNMENT) % (vector * t.dtype.itemsize) for t in tensors):
        vector //= 2
    if vector == 1 and size < _VECTOR_BYTES:
        return "unrolled", "an address is not aligned to two elements", 1, _UNROLLED_ELEMENTS
    elements = 16 if sum(t.dtype.itemsize for t in tensors) == 1 else 8
    return "vectorized", f"every operand is one aligned run: {vector * size} bytes an access", vector, elements


def _num_launches(space: IterSpace, itemsizes: Sequence[int]) -> int:
    """Halves of the longest dim until 32-bit offsets reach (``TensorIterator::with_32bit_indexing``)."""
    counted: dict[tuple[int, ...], int] = {}  # halves of halves are of few sizes

    def count(sizes: tuple[int, ...]) -> int:
        if sizes in counted:
            return counted[sizes]
        reach = [
            1 + sum((n - 1) * dim.strides[row] * size for n, dim in zip(sizes, space.dims, strict=True))
            for row, size in enumerate(itemsizes)
        ]
        if math.prod(sizes) <= INT31_MAX and max(reach) <= INT31_MAX:
            return 1
        extents = [
            (n - 1) * max(stride * size for stride, size in zip(dim.strides, itemsizes, strict=True))
            for n, dim in zip(sizes, space.dims, strict=True)
        ]
        at = extents.index(max(extents))
        halves = (sizes[at] // 2, sizes[at] - sizes[at] // 2)
        counted[sizes] = sum(count((*sizes[:at], half, *sizes[at + 1 :])) for half in halves)
        return counted[sizes]

    return count(tuple(dim.size for dim in space.dims))
