"""Turns a call's arguments into copies that may be timed, overwritten and compared: same dtypes, strides, alignment and sharing.

Knows tensors and bytes; it must not know what is called with them, nor how that is timed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wideload.dtypes import dtype_name
from wideload.errors import LayoutError
from wideload.structure import map_structure

__all__ = [
    "OperandInfo",
    "Operands",
    "count_cells",
    "describe_operands",
    "held_tensors",
    "named_leaves",
    "random_tensor",
    "same_bits",
    "same_size_integer",
    "unique_bytes",
    "without_expansion",
]

_ALIGNMENT_BYTES = {"cuda": 512, "cpu": 64}
"""What torch's allocators align every allocation to (``kMinBlockSize`` of the CUDA caching allocator, ``gAlignment`` of the CPU's):
a copy keeps the address of its original modulo this, and so everything that a kernel may specialise on."""

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""To move bits about without reading them as numbers; no integer has 16 bytes."""


def same_size_integer(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype under which the bits of ``dtype`` can be compared and overwritten."""
    return _INTEGER_OF_SIZE[dtype.itemsize]


# ---- counting


def count_cells(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many memory cells a view reaches: a broadcast dim counts once, and cells that windows share count once.

    >>> count_cells((3, 4), (0, 1)), count_cells((10, 3), (2, 2))
    (4, 12)
    """
    if 0 in shape:
        return 0
    dims = [(size, abs(stride)) for size, stride in zip(shape, strides, strict=True) if size > 1 and stride]
    if not dims:
        return 1
    span = sum((size - 1) * stride for size, stride in dims) // math.gcd(*(stride for _, stride in dims)) + 1
    return min(math.prod(size for size, _ in dims), span)


def unique_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of memory under ``tensors``: what two of them share counts once.

    A tensor that is given twice, and views that together cover one piece of a storage, are counted exactly; for other
    overlaps this is an upper bound.
    """
    groups: dict[Any, dict[Any, torch.Tensor]] = {}
    for position, tensor in enumerate(tensors):
        storage = (tensor.device, tensor.untyped_storage().data_ptr() or -1 - position)  # meta tensors have no address
        groups.setdefault(storage, {})[tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()] = tensor
    total = 0
    for group in groups.values():
        filled = [tensor for tensor in group.values() if tensor.numel()]
        if filled:
            spans = [_byte_span(tensor) for tensor in filled]
            whole = max(end for _, end in spans) - min(start for start, _ in spans)
            total += min(whole, sum(count_cells(tensor.shape, tensor.stride()) * tensor.element_size() for tensor in filled))
    return total


def _byte_span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte and after the last byte of a tensor that is not empty."""
    cells = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (cells + 1) * tensor.element_size()


# ---- describing


@dataclass(frozen=True, slots=True)
class OperandInfo:
    """One argument as a result records it: a tensor's layout in elements, or the ``repr`` of anything else as ``value``."""

    name: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    offset: int | None = None
    device: str | None = None
    value: str | None = None

    def __str__(self) -> str:
        if self.shape is None or self.strides is None:
            return f"{self.name}={self.value}"
        dense = self.strides == _dense_strides(self.shape)
        layout = ("" if dense else f" strides {list(self.strides)}") + (f" @{self.offset}" if self.offset else "")
        return f"{self.name} {self.dtype}{list(self.shape)}{layout}"


def _dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def describe_operands(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None) -> tuple[OperandInfo, ...]:
    """Describe every leaf of a call's arguments; ``names`` are those of the positional ones."""
    return tuple(_describe(name, leaf) for name, leaf in _named_arguments(names, args, kwargs, out))


def _describe(name: str, leaf: Any) -> OperandInfo:
    if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
        offset = int(leaf.storage_offset())
        return OperandInfo(name, dtype_name(leaf.dtype), tuple(leaf.shape), leaf.stride(), offset, str(leaf.device))
    return OperandInfo(name, value=repr(leaf)[:_LONGEST_VALUE])


_LONGEST_VALUE = 80


def named_leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers, in the order of ``map_structure``, with where they stand: ``xs[0]``, ``state["m"]``.

    >>> list(named_leaves("x", (1, {"a": 2})))
    [('x[0]', 1), ('x[1]["a"]', 2)]
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_leaves(f'{name}["{key}"]', value)
    elif isinstance(tree, (tuple, list)):
        for position, value in enumerate(tree):
            yield from named_leaves(f"{name}[{position}]", value)
    else:
        yield name, tree


def _named_arguments(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> Iterator[tuple[str, Any]]:
    for position, value in enumerate(args):
        yield from named_leaves(names[position] if position < len(names) else f"argument {position}", value)
    for name, value in kwargs.items():
        yield from named_leaves(name, value)
    if out is not None:
        yield from named_leaves("out", out)


# ---- copying


class _Block:
    """The bytes under one or several views of one storage, and a copy of them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        spans = [_byte_span(tensor) for tensor in tensors]
        self._start, end = min(start for start, _ in spans), max(end for _, end in spans)
        first = tensors[0]
        storage, device = first.untyped_storage(), first.device
        alignment = _ALIGNMENT_BYTES[device.type]
        self._lead = self._start % alignment
        self._room = torch.empty(self._lead + end - self._start, dtype=torch.uint8, device=device)
        self.source = _as_view(torch.uint8, storage, self._start - storage.data_ptr(), (end - self._start,), (1,))
        self.bytes = self._room[self._lead :]
        self.bytes.copy_(self.source)
        self._dtypes = {tensor.dtype for tensor in tensors}

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """Return the tensor that stands in the copy where ``like`` stands in the source."""
        offset = (self._lead + like.data_ptr() - self._start) // like.element_size()
        tensor = _as_view(like.dtype, self._room.untyped_storage(), offset, tuple(like.shape), like.stride())
        if isinstance(like, torch.nn.Parameter):
            return torch.nn.Parameter(tensor, like.requires_grad)
        return tensor.requires_grad_(like.requires_grad)

    def permute(self) -> bool:
        """Move every value to its neighbour's place, so that none leaves its domain; halve them where all are equal."""
        if len(self._dtypes) != 1:
            return False
        (dtype,) = self._dtypes
        cells = self.bytes.view(same_size_integer(dtype))
        moved = cells.roll(1)
        if not torch.equal(moved, cells):
            cells.copy_(moved)
            return True
        if dtype.is_floating_point and dtype.itemsize > 1:
            values = self.bytes.view(dtype)
            halved = values * 0.5
            is_changed = not torch.equal(halved.view(cells.dtype), cells)
            values.copy_(halved)
            return is_changed
        return False


def _as_view(
    dtype: torch.dtype, storage: torch.UntypedStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)


class Operands:
    """A call's arguments with their tensors in memory of their own, so that the caller's are only read.

    Views of one storage stay views of one storage, at the same distances: packed halves, aliases and in-place arguments
    remain so. Tensors that cannot be copied byte by byte (sparse, quantised, subclasses, pending conjugation) are used as they
    are and listed in ``uncopied``.

    ``others`` are positional arguments of the same layouts, whose values are what `permute` puts in place of the first ones.
    """

    def __init__(
        self, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any = None, others: Sequence[Any] | None = None
    ) -> None:
        leaves = [(name, leaf) for name, leaf in _named_arguments(names, args, kwargs, out) if isinstance(leaf, torch.Tensor)]
        self._sources = [(name, leaf) for name, leaf in leaves if _is_copyable(leaf)]
        self.uncopied = tuple(name for name, leaf in leaves if not _is_copyable(leaf))
        groups: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
        for _, leaf in self._sources:
            if leaf.numel():
                groups.setdefault(_storage_key(leaf), []).append(leaf)
        with torch.no_grad():
            self._blocks = {key: _Block(tensors) for key, tensors in groups.items()}
            copies = {id(leaf): self._blocks[_storage_key(leaf)].view(leaf) if leaf.numel() else leaf for _, leaf in self._sources}
        self._arguments = (args, kwargs, out)
        self.args, self.kwargs, self.out = map_structure(lambda leaf: copies.get(id(leaf), leaf), self._arguments)
        self.tensors = [(name, copies[id(leaf)]) for name, leaf in self._sources]
        written_only = {name for name, _ in named_leaves("out", out)} if out is not None else set()
        self.inputs = [copy for name, copy in self.tensors if name not in written_only]
        self._storages = {_storage_key(copy) for _, copy in self.tensors if copy.numel()}
        self._storages |= {_storage_key(leaf) for _, leaf in leaves if leaf.layout == torch.strided and not _is_copyable(leaf)}
        self._names, self._others = names, others
        self._pairs = None if others is None else _pair_alike(names, args, others)

    def replicate(self) -> Operands:
        """Return another copy of the caller's arguments."""
        return Operands(self._names, *self._arguments, self._others)

    @property
    def nbytes(self) -> int:
        """The bytes that one copy takes."""
        return sum(block.bytes.numel() for block in self._blocks.values())

    @torch.no_grad()
    def restore(self) -> None:
        """Make the copies equal to the caller's tensors again."""
        for block in self._blocks.values():
            block.bytes.copy_(block.source)

    @torch.no_grad()
    def permute(self) -> bool:
        """Change the values, in place, by the same rule in every copy; return whether any changed."""
        if self._pairs is None:
            return sum(block.permute() for block in self._blocks.values()) > 0
        for source, other in self._pairs:  # through a view of its own, whose version is not that of what was passed
            without_expansion(self._blocks[_storage_key(source)].view(source)).copy_(without_expansion(other))
        return any(not torch.equal(block.bytes, block.source) for block in self._blocks.values())

    @torch.no_grad()
    def changed(self) -> tuple[str, ...]:
        """Return the names of the tensors whose bytes are no longer those of the caller's."""
        touched = {key for key, block in self._blocks.items() if not torch.equal(block.bytes, block.source)}
        if not touched:
            return ()
        pairs = zip(self._sources, self.tensors, strict=True)
        return tuple(name for (name, source), (_, copy) in pairs if _storage_key(source) in touched and not same_bits(copy, source))

    @torch.no_grad()
    def num_changed_bytes(self) -> int:
        """Return how many bytes are no longer those of the caller's tensors."""
        return sum(int((block.bytes != block.source).sum()) for block in self._blocks.values())

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the memory of the copies, or of an argument that could not be copied."""
        return _storage_key(tensor) in self._storages

    def same_as(self, other: Operands) -> bool:
        """Return whether another copy of the same arguments holds the same bytes."""
        return all(
            torch.equal(block.bytes, others.bytes) for block, others in zip(self._blocks.values(), other._blocks.values(), strict=True)
        )


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors of one dtype and shape hold the same bits: NaN equals NaN, -0 is not 0."""
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    integer = same_size_integer(a.dtype)
    return torch.equal(without_expansion(a).view(integer), without_expansion(b).view(integer))


def without_expansion(tensor: torch.Tensor) -> torch.Tensor:
    """Return the view with every broadcast dim cut to its one element, which can be written."""
    return tensor.detach()[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())]


def _storage_key(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def _pair_alike(names: Sequence[str], args: Sequence[Any], others: Sequence[Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each copyable tensor of ``args`` that has elements, with its counterpart. Raises ``LayoutError`` where the two are not alike."""
    ours, theirs = (
        {name: leaf for name, leaf in _named_arguments(names, given, {}, None) if isinstance(leaf, torch.Tensor) and _is_copyable(leaf)}
        for given in (args, others)
    )
    for name in {**ours, **theirs}:
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None or _layout(one) != _layout(other):
            raise LayoutError(f"recheck_on has {_told(name, other)}; allowed is the layout of {_told(name, one)}")
        if count_cells(one.shape, one.stride()) < without_expansion(one).numel():
            raise LayoutError(f"recheck_on cannot be used: elements of {_told(name, one)} share memory")
    return [(one, theirs[name]) for name, one in ours.items() if one.numel()]


def _layout(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _told(name: str, tensor: torch.Tensor | None) -> str:
    return f"no {name}" if tensor is None else f"{_describe(name, tensor)} on {tensor.device}"


def _is_copyable(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and tensor.device.type in _ALIGNMENT_BYTES
        and tensor.layout == torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


# ---- what a callable brings along


def held_tensors(fn: Callable[..., Any]) -> tuple[tuple[str, torch.Tensor], ...]:
    """Find the tensors that a callable holds and its arguments do not: closed over, global, bound, a module's parameters.

    They are not copied: they stay where they are, hot or cold. What lies behind attributes of other objects is not found.
    """
    found: dict[int, tuple[str, torch.Tensor]] = {}
    seen: set[int] = set()
    homes = {getattr(fn, "__module__", None), getattr(inspect.unwrap(fn), "__module__", None)}

    def visit(name: str, value: Any) -> None:
        if isinstance(value, (tuple, list, dict)):
            for key, leaf in named_leaves(name, value):
                visit(key, leaf)
        elif isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
        elif id(value) not in seen:
            seen.add(id(value))
            for key, inner in _holdings(name, value, homes):
                visit(key, inner)

    visit(getattr(fn, "__name__", "self"), fn)
    return tuple(found.values())


def _holdings(name: str, value: Any, homes: set[str | None]) -> list[tuple[str, Any]]:
    """Return what a module, a bound or partial call, or a function of one of the modules ``homes`` brings along."""
    if isinstance(value, types.ModuleType):
        return []
    if isinstance(value, torch.nn.Module):
        return [(f"{name}.{key}", tensor) for key, tensor in (*value.named_parameters(), *value.named_buffers())]
    if isinstance(value, functools.partial):
        return [(name, value.func), (name, value.args), (name, value.keywords)]
    if isinstance(value, types.MethodType):
        return [(name, value.__self__), (name, value.__func__)]
    held = [(name, getattr(value, "__wrapped__", None))]
    if isinstance(value, types.FunctionType) and value.__module__ in homes:
        used_globals = [(key, value.__globals__[key]) for key in value.__code__.co_names if key in value.__globals__]
        held += [*_closure(value), *used_globals, (name, value.__defaults__), (name, value.__kwdefaults__)]
    return held


def _closure(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a cell that is not filled yet
            yield key, cell.cell_contents


# ---- making


def random_tensor(
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    device: torch.device | str = "cpu",
    strides: Sequence[int] | None = None,
    offset: int = 0,
    seed: int = 0,
) -> torch.Tensor:
    """Return a tensor of random values, none of them zero: data of equal bits costs less power, and runs faster, than real data.

    Floats and complex numbers are standard normal, integers uniform over all values of the dtype, bools fair. ``strides`` and
    ``offset`` count elements, as in ``torch.as_strided``; the memory between elements is random too.

    >>> random_tensor((2, 3), strides=(8, 1), offset=1).stride()
    (8, 1)
    """
    shape = tuple(shape)
    strides = _dense_strides(shape) if strides is None else tuple(strides)
    reach = 0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.bool:
        values = torch.randint(0, 2, (offset + reach,), device=device, generator=generator).to(dtype)
    elif dtype.is_floating_point or dtype.is_complex:
        narrow_as = torch.complex64 if dtype.is_complex else torch.float32
        drawn_as = dtype if dtype in (torch.float64, torch.complex128) else narrow_as
        drawn = torch.randn(offset + reach, dtype=drawn_as, device=device, generator=generator)
        values = drawn.masked_fill_(drawn.to(dtype).to(drawn_as) == 0, 1).to(dtype)
    else:
        nbytes = (offset + reach) * dtype.itemsize
        drawn = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device, generator=generator).view(same_size_integer(dtype))
        values = drawn.masked_fill_(drawn == 0, 1).view(dtype)
    return values.as_strided(shape, strides, offset)
