"""Turns the views that a function takes of a tensor into steps, and a step into the shape, strides and offset of the view it makes.

Knows integers and tuples only: no tensors, dtypes or devices. Every result is the one that torch gives, strides of dims of size 1 included.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from itertools import pairwise
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

from wideload.errors import LayoutError, TraceError
from wideload.layout import Shape, Strides, contiguous_strides

__all__ = ["VIEW_NAMES", "RecordedViews", "View", "ViewStep", "apply_view", "apply_views", "narrowed", "record_index", "record_view"]


class View(NamedTuple):
    """Where a tensor's elements lie in its storage; strides and offset count elements."""

    shape: Shape
    strides: Strides
    offset: int = 0


class ViewStep(NamedTuple):
    """One view of a tensor of known rank. Dims count from the first; sizes and indices are as the user wrote them, for any shape."""

    name: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


class RecordedViews(NamedTuple):
    """What one call makes: a step for each view, and none where torch returns the tensor itself.

    ``is_tuple``: torch returns a tuple of them, even of one. ``depends_on_shape``: for another shape of this rank the call may
    make another number of views (``split``, ``unbind``), views of another rank (``squeeze``), or reads another tensor's
    sizes (``expand_as``), so that the steps hold for this shape only.
    """

    steps: tuple[ViewStep, ...]
    is_tuple: bool = False
    depends_on_shape: bool = False


# ---- from a call to steps


def record_view(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], shape: Shape) -> RecordedViews:
    """Return the steps of ``tensor.name(*args, **kwargs)``, or of the property ``name``, for a tensor of ``shape``.

    ``args`` leave out the tensor itself. ``H``, ``mH`` and ``adjoint`` are those of real tensors, which conjugation leaves alone.
    Raises ``TraceError`` for a call that is not spelled as torch documents it or names no view (``VIEW_NAMES``), ``LayoutError``
    for dims and numbers of pieces that torch refuses; sizes and indices are checked by ``apply_view``.

    >>> record_view("chunk", (2,), {"dim": -1}, (3, 8)).steps
    (ViewStep(name='chunk', args=(2, 1, 0)), ViewStep(name='chunk', args=(2, 1, 1)))
    """
    if name not in _RECORDERS:
        raise TraceError(f"{name} makes no view; those that do are {', '.join(sorted(VIEW_NAMES))}")
    recorder = _RECORDERS[name]
    if name in _TAKE_SPREAD_INTEGERS and len(args) > 1:
        args = (args,)
    try:
        bound = inspect.signature(recorder).bind(shape, *args, **{_KEYWORDS.get(key, key): value for key, value in kwargs.items()})
    except TypeError as error:
        raise TraceError(f"{name}: {error}. Call it as torch documents it") from None
    try:
        return recorder(*bound.args, **bound.kwargs)
    except (LayoutError, TraceError) as error:
        raise type(error)(f"{name} of a tensor of shape {shape}: {error}") from None


def record_index(index: Any, shape: Shape) -> tuple[ViewStep, ...]:
    """Return the steps of ``tensor[index]``, to be applied one after the other, for ints, slices, ``None`` and ``...``.

    Raises ``TraceError`` for any other index (a bool, a list, an array, a tensor), which makes a copy and not a view, and
    ``LayoutError`` for a step below 1, for more indices than dims and for a second ``...``, which torch takes here and there.

    >>> record_index((..., None, slice(1, -1)), (4, 6))
    (ViewStep(name='unsqueeze', args=(1,)), ViewStep(name='slice', args=(2, 1, -1, 1)))
    """
    items = index if isinstance(index, tuple) else (index,)
    num_indexed = sum(item is not None and item is not Ellipsis for item in items)
    if num_indexed > len(shape) or sum(item is Ellipsis for item in items) > 1:
        raise LayoutError(f"{num_indexed} indices for a tensor of shape {shape}: one a dim is allowed, and one ... for all others")
    steps: list[ViewStep] = []
    dim = 0
    for item in items:
        if item is Ellipsis:
            dim += len(shape) - num_indexed
        elif item is None:
            steps.append(ViewStep("unsqueeze", (dim,)))
            dim += 1
        elif isinstance(item, slice):
            bounds = (item.start, item.stop, item.step)
            start, stop, step = (None if bound is None else _integer("a slice bound", bound) for bound in bounds)
            if step is not None and step < 1:
                raise LayoutError(f"a slice of a tensor of shape {shape} has step {step}: torch takes steps of 1 and more")
            if start or stop is not None or (step or 1) > 1:
                steps.append(ViewStep("slice", (dim, start or 0, stop, step or 1)))
            dim += 1
        else:
            steps.append(ViewStep("select", (dim, _integer("an index that makes a view", item))))
    return tuple(steps)


def _integer(what: str, value: Any) -> int:
    """Return ``value`` as an int. A bool is none here; nor is a 0-dim tensor or array, though it has ``__index__``."""
    is_number = hasattr(value, "__index__") and not isinstance(value, bool)
    if not is_number or (hasattr(value, "shape") and not isinstance(value, Integral)):
        raise TraceError(f"{what} must be an integer, not a {type(value).__name__}")
    return operator.index(value)


def _integers(what: str, values: Any) -> tuple[int, ...]:
    return tuple(_integer(what, value) for value in (values if isinstance(values, tuple | list) else (values,)))


def _sizes_of(other: Any) -> Shape:
    if not hasattr(other, "shape"):
        raise TraceError(f"other must be a tensor, not a {type(other).__name__}")
    return tuple(other.shape)


def _dim(dim: Any, ndim: int) -> int:
    """Return ``dim`` counted from the first of ``ndim`` dims."""
    number = _integer("a dim", dim)
    if not -ndim <= number < ndim:
        raise LayoutError(f"dim {number} is out of range: " + (f"[{-ndim}, {ndim - 1}] is allowed" if ndim else "it has no dims"))
    return number % ndim


def _dims(dims: Any, ndim: int) -> tuple[int, ...]:
    """Return dims that must differ. As in torch, a 0-dim tensor may be said to have a dim 0 here; the result then has a 0."""
    counted = tuple(_dim(dim, ndim or 1) for dim in _integers("a dim", dims))
    if len(set(counted)) < len(counted):
        raise LayoutError(f"dims {dims} repeat a dim")
    return counted


def _one(name: str, *args: Any, depends_on_shape: bool = False) -> RecordedViews:
    return RecordedViews((ViewStep(name, args),), depends_on_shape=depends_on_shape)


def _pieces(name: str, how: Any, dim: int, num_pieces: int, depends_on_shape: bool = False) -> RecordedViews:
    return RecordedViews(tuple(ViewStep(name, (how, dim, piece)) for piece in range(num_pieces)), True, depends_on_shape)


def _record_chunk(shape: Shape, chunks: Any, dim: Any = 0) -> RecordedViews:
    chunks, dim = _integer("chunks", chunks), _dim(dim, len(shape))
    if chunks < 1:
        raise LayoutError(f"chunks is {chunks}, and must be at least 1")
    num_chunks = _num_chunks(shape[dim], chunks)
    if num_chunks < chunks:
        return _pieces("split", _ceil_div(shape[dim], chunks), dim, num_chunks, depends_on_shape=True)
    return _pieces("chunk", chunks, dim, chunks)


def _record_split(shape: Shape, split_size: Any, dim: Any = 0) -> RecordedViews:
    dim = _dim(dim, len(shape))
    if isinstance(split_size, tuple | list):
        sizes = _integers("a split size", split_size)
        _check_split_sizes(sizes, shape[dim])
        return _pieces("split_with_sizes", sizes, dim, len(sizes), depends_on_shape=not sizes)
    split_size, size = _integer("split_size", split_size), shape[dim]
    if split_size < 0 or (split_size == 0 and size):
        raise LayoutError(f"split_size is {split_size} for a dim of size {size}, and must be at least 1")
    return _pieces("split", split_size, dim, _ceil_div(size, split_size) if size else 1, depends_on_shape=True)


def _record_tensor_split(shape: Shape, sections: Any, dim: Any = 0) -> RecordedViews:
    dim = _dim(dim, len(shape))
    if isinstance(sections, tuple | list):
        bounds = pairwise((0, *_integers("an index", sections), None))
        return RecordedViews(tuple(ViewStep("slice", (dim, start, stop, 1)) for start, stop in bounds), is_tuple=True)
    sections = _integer("the number of sections", sections)
    if sections < 1:
        raise LayoutError(f"the number of sections is {sections}, and must be at least 1")
    return _pieces("tensor_split", sections, dim, sections)


def _record_unbind(shape: Shape, dim: Any = 0) -> RecordedViews:
    dim = _dim(dim, len(shape))
    return RecordedViews(tuple(ViewStep("select", (dim, index)) for index in range(shape[dim])), True, True)


def _record_squeeze(shape: Shape, dim: Any = ...) -> RecordedViews:
    dims = range(len(shape)) if dim is ... else sorted(_dims(dim, len(shape)))
    return _one("squeeze", *dims, depends_on_shape=True)


def _record_flatten(shape: Shape, start_dim: Any = 0, end_dim: Any = -1) -> RecordedViews:
    start, end = _dim(start_dim, len(shape) or 1), _dim(end_dim, len(shape) or 1)
    if start > end:
        raise LayoutError(f"start_dim {start} comes after end_dim {end}")
    return _one("flatten", start, end) if start < end or not shape else RecordedViews(())


def _record_unflatten(shape: Shape, dim: Any, sizes: Any) -> RecordedViews:
    if not sizes:
        raise LayoutError("sizes must be at least one")
    return _one("unflatten", _dim(dim, len(shape)), _integers("a size", sizes))


def _record_permute(shape: Shape, dims: Any) -> RecordedViews:
    order = _dims(dims, len(shape))
    if len(order) != len(shape):
        raise LayoutError(f"{len(order)} dims are given; each of the {len(shape)} must be")
    return _one("permute", *order)


def _record_transpose(shape: Shape, dim0: Any, dim1: Any) -> RecordedViews:
    first, second = _dim(dim0, len(shape) or 1), _dim(dim1, len(shape) or 1)
    swapped = {first: second, second: first}
    return _one("permute", *(swapped.get(dim, dim) for dim in range(len(shape))))


def _record_t(shape: Shape) -> RecordedViews:
    if len(shape) > 2:
        raise LayoutError("at most 2 dims are allowed; transpose takes any number")
    return _record_reversed(shape)


def _record_reversed(shape: Shape) -> RecordedViews:
    return _one("permute", *reversed(range(len(shape))))


def _record_matrix_transpose(shape: Shape) -> RecordedViews:
    return _record_transpose(shape, -2, -1) if shape else _one("permute")


def _record_conjugate_transpose(shape: Shape) -> RecordedViews:
    if len(shape) not in (0, 2):
        raise LayoutError("a matrix is needed; mH takes batches of matrices")
    return _record_reversed(shape)


def _record_movedim(shape: Shape, source: Any, destination: Any) -> RecordedViews:
    moved, to = _dims(source, len(shape)), _dims(destination, len(shape))
    if len(moved) != len(to):
        raise LayoutError(f"source {source} and destination {destination} must have one number of dims")
    source_of = dict(zip(to, moved, strict=True))
    others = (dim for dim in range(len(shape)) if dim not in moved)
    return _one("permute", *(source_of[dim] if dim in source_of else next(others) for dim in range(len(shape))))


def _record_diagonal(shape: Shape, offset: Any = 0, dim1: Any = 0, dim2: Any = 1) -> RecordedViews:
    first, second = _dim(dim1, len(shape)), _dim(dim2, len(shape))
    if first == second:
        raise LayoutError(f"dim1 and dim2 are both {first}, and must differ")
    return _one("diagonal", _integer("offset", offset), first, second)


_RECORDERS: dict[str, Callable[..., RecordedViews]] = {
    "H": _record_conjugate_transpose,
    "T": _record_reversed,
    "adjoint": _record_matrix_transpose,
    "broadcast_to": lambda shape, size: _one("expand", *_integers("a size", size)),
    "chunk": _record_chunk,
    "diagonal": _record_diagonal,
    "expand": lambda shape, size: _one("expand", *_integers("a size", size)),
    "expand_as": lambda shape, other: _one("expand", *_sizes_of(other), depends_on_shape=True),
    "flatten": _record_flatten,
    "mH": _record_matrix_transpose,
    "mT": _record_matrix_transpose,
    "moveaxis": _record_movedim,
    "movedim": _record_movedim,
    "narrow": lambda shape, dim, start, length: _one("narrow", _dim(dim, len(shape)), _integer("start", start), _integer("length", length)),
    "permute": _record_permute,
    "ravel": lambda shape: _one("ravel"),
    "reshape": lambda shape, size: _one("reshape", *_integers("a size", size)),
    "reshape_as": lambda shape, other: _one("reshape", *_sizes_of(other), depends_on_shape=True),
    "select": lambda shape, dim, index: _one("select", _dim(dim, len(shape)), _integer("index", index)),
    "split": _record_split,
    "split_with_sizes": lambda shape, split_size, dim=0: _record_split(shape, _integers("a split size", split_size), dim),
    "squeeze": _record_squeeze,
    "swapaxes": _record_transpose,
    "swapdims": _record_transpose,
    "t": _record_t,
    "tensor_split": _record_tensor_split,
    "transpose": _record_transpose,
    "unbind": _record_unbind,
    "unflatten": _record_unflatten,
    "unfold": lambda shape, dimension, size, step: _one(
        "unfold", _dim(dimension, len(shape) or 1), _integer("size", size), _integer("step", step)
    ),
    "unsqueeze": lambda shape, dim: _one("unsqueeze", _dim(dim, len(shape) + 1)),
    "view": lambda shape, size: _one("reshape", *_integers("a size", size)),
    "view_as": lambda shape, other: _one("reshape", *_sizes_of(other), depends_on_shape=True),
}

VIEW_NAMES = frozenset(_RECORDERS)
"""The functions, methods and properties that ``record_view`` knows. ``view`` by a dtype is none of them: it gives other elements."""

_TAKE_SPREAD_INTEGERS = frozenset({"broadcast_to", "expand", "permute", "reshape", "squeeze", "view"})
"""Those that take their integers one by one as well: ``x.permute(0, 2, 1)``."""

_KEYWORDS = {
    **{"axis": "dim", "axis0": "dim0", "axis1": "dim1"},
    **{"indices": "sections", "shape": "size", "split_size_or_sections": "split_size", "split_sizes": "split_size"},
}
"""Other names that torch has for the parameters above."""


# ---- from a step to the view that it makes


def apply_views(steps: Iterable[ViewStep], view: View) -> View:
    """Return the view that ``steps`` make of ``view``, one after the other. Raises ``LayoutError`` as ``apply_view`` does."""
    for step in steps:
        view = apply_view(step, view)
    return view


def apply_view(step: ViewStep, view: View) -> View:
    """Return the view that ``step`` makes of ``view``, which may have any shape of the rank that the step was recorded for.

    Raises ``LayoutError`` where torch refuses the shape, where torch would copy the elements to reshape them, and where
    ``chunk`` would make fewer pieces than when it was recorded.

    >>> apply_view(ViewStep("chunk", (2, 1, 1)), View((3, 8), (8, 1)))
    View(shape=(3, 4), strides=(8, 1), offset=4)
    """
    try:
        return _APPLIERS[step.name](view, *step.args)
    except LayoutError as error:
        raise LayoutError(f"{step} of a tensor of shape {view.shape}: {error}") from None


def narrowed(view: View, dim: int, start: int, length: int) -> View:
    """Return the part of ``view`` with the ``length`` indices from ``start`` on of ``dim``. Raises ``LayoutError`` where there are fewer.

    All count from 0; none is negative.

    >>> narrowed(View((3, 8), (8, 1)), 1, 2, 4)
    View(shape=(3, 4), strides=(8, 1), offset=2)
    """
    if not 0 <= start <= start + length <= view.shape[dim]:
        raise LayoutError(f"{length} indices from {start} on do not lie in a dim of size {view.shape[dim]}")
    return view._replace(shape=_replaced(view.shape, dim, length), offset=view.offset + start * view.strides[dim])


def _replaced(values: tuple[int, ...], dim: int, *by: int) -> tuple[int, ...]:
    return (*values[:dim], *by, *values[dim + 1 :])


def _ceil_div(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _num_chunks(size: int, chunks: int) -> int:
    """How many pieces of ``ceil(size / chunks)`` there are: torch gives fewer than asked for where those are enough."""
    return _ceil_div(size, _ceil_div(size, chunks)) if size else chunks


def _chunk(view: View, chunks: int, dim: int, piece: int) -> View:
    size = view.shape[dim]
    if _num_chunks(size, chunks) != chunks:
        raise LayoutError(f"there are {_num_chunks(size, chunks)} pieces, and there were {chunks} when the function was traced")
    return _split(view, _ceil_div(size, chunks), dim, piece)


def _split(view: View, split_size: int, dim: int, piece: int) -> View:
    start = piece * split_size
    return narrowed(view, dim, start, min(split_size, view.shape[dim] - start))


def _check_split_sizes(sizes: Shape, size: int) -> None:
    if min(sizes, default=0) < 0 or sum(sizes) != size:
        raise LayoutError(f"split sizes {sizes} must not be negative, and must add up to the size of the dim, {size}")


def _split_with_sizes(view: View, sizes: Shape, dim: int, piece: int) -> View:
    _check_split_sizes(sizes, view.shape[dim])
    return narrowed(view, dim, sum(sizes[:piece]), sizes[piece])


def _tensor_split(view: View, sections: int, dim: int, piece: int) -> View:
    length, num_longer = divmod(view.shape[dim], sections)
    return narrowed(view, dim, piece * length + min(piece, num_longer), length + (piece < num_longer))


def _narrow(view: View, dim: int, start: int, length: int) -> View:
    return narrowed(view, dim, start + view.shape[dim] if start < 0 else start, length)


def _slice(view: View, dim: int, start: int, stop: int | None, step: int) -> View:
    first, end, _ = slice(start, stop).indices(view.shape[dim])
    view = narrowed(view, dim, first, max(end - first, 0))
    shape = _replaced(view.shape, dim, _ceil_div(view.shape[dim], step))
    return view._replace(shape=shape, strides=_replaced(view.strides, dim, view.strides[dim] * step))


def _select(view: View, dim: int, index: int) -> View:
    size = view.shape[dim]
    if not -size <= index < size:
        raise LayoutError(f"index {index} does not lie in dim {dim} of size {size}")
    return View(_replaced(view.shape, dim), _replaced(view.strides, dim), view.offset + index % size * view.strides[dim])


def _permute(view: View, *dims: int) -> View:
    return view._replace(shape=tuple(view.shape[dim] for dim in dims), strides=tuple(view.strides[dim] for dim in dims))


def _unsqueeze(view: View, dim: int) -> View:
    stride = view.shape[dim] * view.strides[dim] if dim < len(view.shape) else 1
    return view._replace(shape=(*view.shape[:dim], 1, *view.shape[dim:]), strides=(*view.strides[:dim], stride, *view.strides[dim:]))


def _squeeze(view: View, *dims: int) -> View:
    return _permute(view, *(dim for dim, size in enumerate(view.shape) if size != 1 or dim not in dims))


def _expand(view: View, *sizes: int) -> View:
    num_new = len(sizes) - len(view.shape)
    if num_new < 0:
        raise LayoutError(f"{len(sizes)} sizes are too few: each of the {len(view.shape)} dims needs one, -1 to keep it")
    shape: Shape = ()
    strides: Strides = ()
    for dim, wanted in reversed([*enumerate(sizes, start=-num_new)]):
        is_new = dim < 0
        size = 1 if is_new else view.shape[dim]
        stride = (shape[0] * strides[0] if shape else 0) if is_new else view.strides[dim]
        if wanted == -1 and not is_new:
            wanted = size
        if wanted != size:
            if size != 1 or wanted < 0:
                raise LayoutError(
                    f"size {wanted} is asked for where {'there is no dim' if is_new else f'dim {dim} has size {size}'}; only 1 expands"
                )
            stride = 0
        shape, strides = (wanted, *shape), (stride, *strides)
    return view._replace(shape=shape, strides=strides)


def _reshape(view: View, *sizes: int) -> View:
    shape = _inferred(prod(view.shape), sizes)
    return view._replace(shape=shape, strides=_reshaped_strides(view, shape))


def _flatten(view: View, start: int, end: int) -> View:
    if start == end and view.shape:
        return view
    return _reshape(view, *view.shape[:start], prod(view.shape[start : end + 1]), *view.shape[end + 1 :])


def _unflatten(view: View, dim: int, sizes: Shape) -> View:
    return _reshape(view, *_replaced(view.shape, dim, *_inferred(view.shape[dim], sizes)))


def _ravel(view: View) -> View:
    in_order = zip(view.shape, view.strides, contiguous_strides(view.shape), strict=True)
    if 0 not in view.shape and any(size != 1 and stride != packed for size, stride, packed in in_order):
        raise LayoutError(f"strides {view.strides} are not contiguous, and torch then copies. Use reshape(-1), which may be a view")
    return _reshape(view, -1)


def _inferred(num_elements: int, sizes: Shape) -> Shape:
    """Return ``sizes`` with the one -1 among them, if any, replaced so that they hold ``num_elements``."""
    known = prod(size for size in sizes if size != -1)
    if min(sizes, default=0) < -1 or sizes.count(-1) > 1 or (-1 in sizes and known == 0):
        raise LayoutError(f"sizes {sizes} must not be negative, but for one -1 among sizes that are not 0")
    shape = tuple(num_elements // known if size == -1 else size for size in sizes)
    if prod(shape) != num_elements:
        raise LayoutError(
            f"sizes {sizes} cannot hold {num_elements} elements: they must multiply to it, where -1 stands for what is missing"
        )
    return shape


def _reshaped_strides(view: View, shape: Shape) -> Strides:
    """Return the strides that walk the elements of ``view`` in row-major order as ``shape``, which has as many.

    The dims of ``view`` form runs, each walked with one stride, that of its innermost dim. The dims of ``shape`` must fill
    one run after the other. A dim of size 1 continues a run whatever its stride.
    """
    if 0 in view.shape:
        return view.strides if shape == view.shape else contiguous_strides(shape)
    runs: list[tuple[int, int]] = []  # number of elements and stride, innermost first
    for size, stride in zip(reversed(view.shape), reversed(view.strides), strict=True):
        length, step = runs[-1] if runs else (1, stride)
        if runs and (size == 1 or stride == length * step):
            runs[-1] = length * size, step
        else:
            runs.append((size, stride))
    dims = [*shape]
    strides: Strides = ()
    for length, step in runs or [(1, 1)]:
        walked = 1
        while dims and (walked < length or dims[-1] == 1):
            strides = (walked * step, *strides)
            walked *= dims.pop()
        if walked != length:
            raise LayoutError(f"strides {view.strides} cannot be read as shape {shape} without a copy. Make the copy before the call")
    return strides


def _diagonal(view: View, offset: int, dim1: int, dim2: int) -> View:
    start1, start2 = max(-offset, 0), max(offset, 0)
    length = max(min(view.shape[dim1] - start1, view.shape[dim2] - start2), 0)
    start = start1 * view.strides[dim1] + start2 * view.strides[dim2] if length else 0
    kept = _permute(view, *(dim for dim in range(len(view.shape)) if dim not in (dim1, dim2)))
    return View((*kept.shape, length), (*kept.strides, view.strides[dim1] + view.strides[dim2]), view.offset + start)


def _unfold(view: View, dim: int, size: int, step: int) -> View:
    whole, stride = (view.shape[dim], view.strides[dim]) if view.shape else (1, 1)
    if not 0 <= size <= whole or step < 1:
        raise LayoutError(f"windows of size {size}, step {step}: a size of 0 to {whole} and a step of at least 1 are allowed")
    if not view.shape:
        return view._replace(shape=(size,), strides=(stride,))
    shape = _replaced(view.shape, dim, (whole - size) // step + 1)
    return view._replace(shape=(*shape, size), strides=(*_replaced(view.strides, dim, stride * step), stride))


_APPLIERS: dict[str, Callable[..., View]] = {
    "chunk": _chunk,
    "diagonal": _diagonal,
    "expand": _expand,
    "flatten": _flatten,
    "narrow": _narrow,
    "permute": _permute,
    "ravel": _ravel,
    "reshape": _reshape,
    "select": _select,
    "slice": _slice,
    "split": _split,
    "split_with_sizes": _split_with_sizes,
    "squeeze": _squeeze,
    "tensor_split": _tensor_split,
    "unflatten": _unflatten,
    "unfold": _unfold,
    "unsqueeze": _unsqueeze,
}
