from functools import cache
from itertools import permutations, product
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.test_layout import view_strides
from wideload.errors import LayoutError, TraceError
from wideload.layout import contiguous_strides
from wideload.views import VIEW_NAMES, RecordedViews, View, ViewStep, apply_view, apply_views, narrowed, record_index, record_view

# torch still answers T, H and the like where there is no matrix, with a warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:UserWarning")

SIZES = (0, 1, 2, 3)
OFFSET = 5
MAX_RANK = 5
TORCH_ERRORS = (RuntimeError, IndexError, ValueError, TypeError)

# Tensors


def tensor(shape, strides):
    num_cells = OFFSET + 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(num_cells).as_strided(shape, strides, OFFSET)


def layout_of(x):
    return View(tuple(x.shape), x.stride(), x.storage_offset())


def small_tensors(max_rank, sizes=SIZES):
    """Of each shape: contiguous; transposed with gaps and an odd stride on dims of size 1; expanded along the last dim."""
    for rank in range(max_rank + 1):
        for shape in product(sizes, repeat=rank):
            dense = contiguous_strides(shape)
            yield tensor(shape, dense)
            if rank:
                transposed = contiguous_strides(shape[::-1])[::-1]
                yield tensor(shape, tuple(7 if size == 1 else 2 * stride for size, stride in zip(shape, transposed, strict=True)))
                yield tensor(shape, (*dense[:-1], 0))


# Calls, right and wrong


@cache
def calls(name, rank):
    """Arguments of ``name`` for a tensor of that rank: mostly small integers, in and just out of range."""
    dims, near = range(-rank - 1, rank + 1), range(-4, 5)
    sizes = [
        (),
        (-2, -3),
        (-2, -1),
        *((n,) for n in range(-2, 10)),
        *product((-1, 0, 1, 2, 3, 6), repeat=2),
        *product((-1, 1, 2, 3), repeat=3),
    ]
    few_sizes = [(), (-1,), (1,), (2,), (3,), (0, 2), (1, 2), (2, 1), (-1, 2), (3, -1), (0, -1), (-1, -1), (2, -2), (-1, 1, 1)]
    lists = [(), (1,), (2,), (3,), (0, 1), (1, 1), (1, 2), (2, 0, 1), (0, 0), (3, -1), (-1,), (-2, 5), (2, 1)]
    match name:
        case "H" | "T" | "adjoint" | "mH" | "mT" | "ravel" | "t":
            return [()]
        case "chunk":
            return [(2,), *product(near, dims)]
        case "split" | "tensor_split":
            return [(2,), *product(near, dims), *product(lists, dims)]
        case "split_with_sizes":
            return [((1, 1),), *product(lists, dims)]
        case "unbind":
            return [(), *product(dims)]
        case "unsqueeze":
            return [*product(dims), (rank + 1,)]
        case "squeeze":
            return [(), ((),), *product(dims), *product(product(dims, dims))]
        case "select":
            return list(product(dims, near))
        case "narrow":
            return list(product(dims, near, range(-1, 5)))
        case "flatten":
            return [(), *product(dims), *product(dims, dims)]
        case "transpose" | "swapaxes" | "swapdims":
            return list(product(dims, dims))
        case "movedim" | "moveaxis":
            pairs = list(product(dims, dims))[:: rank + 1]
            return [*product(dims, dims), *product(pairs, pairs), ((), ()), ((0,), (0, 1))]
        case "permute":
            wrong = [tuple(range(rank + 1)), tuple(range(rank - 1)), (0,) * rank, (*range(rank - 1), rank)]
            return [*product([*permutations(range(rank)), *permutations(range(-rank, 0)), *wrong]), *list(permutations(range(rank)))[1:]]
        case "expand" | "broadcast_to":
            values = (-2, -1, 0, 1, 2, 3) if rank < 3 else (-1, 1, 2)
            return [
                (size,) for more in (-1, 0, 1, 2) if rank + more >= 0 for size in list(product(values, repeat=rank + more))[:: more + 2]
            ]
        case "expand_as":
            return [(torch.empty(size),) for more in (0, 1) for size in product((0, 1, 2, 3) if rank < 3 else (1, 2), repeat=rank + more)]
        case "reshape" | "view":
            return [*product(sizes), *sizes[1:]]
        case "reshape_as" | "view_as":
            return [(torch.empty(size),) for size in sizes if min(size, default=0) >= 0]
        case "unflatten":
            return list(product({-rank - 1, -rank, rank - 1}, few_sizes))
        case "diagonal":
            return [(), (1,), *product((-4, -2, -1, 0, 1, 2, 3), dims, dims)]
        case "unfold":
            return list(product(dims, range(-1, 5), range(-1, 4)))
    raise AssertionError(f"no calls of {name}")


def by_torch(x, name, args):
    """What torch makes, as ``(views, is_tuple)``; ``LayoutError`` or ``TraceError`` where wideload must raise it."""
    try:
        member = getattr(x, name)
        made = member(*args) if callable(member) else member
    except TORCH_ERRORS as error:
        return TraceError if isinstance(error, TypeError) else LayoutError
    views = made if isinstance(made, tuple) else (made,)
    if any(view.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for view in views):
        return LayoutError  # a copy
    if any(size < 0 for view in views for size in view.shape):
        return LayoutError  # torch.zeros(()).expand(-2, 0) has shape (-2, 0)
    return tuple(map(layout_of, views)), isinstance(made, tuple)


def by_steps(x, recorded):
    if recorded == RecordedViews(()):  # the tensor itself
        return (layout_of(x),), False
    return tuple(apply_view(step, layout_of(x)) for step in recorded.steps), recorded.is_tuple


def check_call(x, name, args):
    """Compare one call with torch; return what was recorded, or None where both refuse it."""
    want = by_torch(x, name, args)
    if isinstance(want, type):
        with pytest.raises(want):
            by_steps(x, record_view(name, args, {}, tuple(x.shape)))
        return None
    recorded = record_view(name, args, {}, tuple(x.shape))
    assert by_steps(x, recorded) == want, (layout_of(x), name, args)
    hash(recorded.steps)
    return recorded


@pytest.mark.parametrize("name", sorted(VIEW_NAMES))
def test_calls_make_the_views_of_torch(name):
    tensors = [*small_tensors(2), *(x for x in small_tensors(3, (1, 2)) if x.dim() == 3)]
    recorded = [check_call(x, name, args) for x in tensors for args in calls(name, x.dim())[:: 1 if x.dim() < 3 else 7]]
    assert any(recorded)


@pytest.mark.parametrize("name", sorted(VIEW_NAMES - {"broadcast_to", "moveaxis", "view"}))
def test_steps_serve_every_shape_unless_they_say_otherwise(name):
    """Steps recorded for one shape make torch's views of another, or are refused: never other views."""
    shapes = [(0,), (2,), (4,), (5,), (1, 2), (2, 3), (3, 2)]
    num_shared = 0
    for shape, other in product(shapes, shapes):
        if len(shape) != len(other):
            continue
        traced, x = tensor(shape, contiguous_strides(shape)), tensor(other, contiguous_strides(other))
        for args in calls(name, len(shape))[:: len(shape)]:
            recorded = check_call(traced, name, args)
            if recorded is None or recorded.depends_on_shape:
                continue
            want = by_torch(x, name, args)
            try:
                assert by_steps(x, recorded) == want, (shape, other, name, args)
                num_shared += 1
            except LayoutError:
                assert want is LayoutError or (name == "chunk" and len(want[0]) < args[0]), (shape, other, name, args)
    assert num_shared or name in {"expand_as", "reshape_as", "squeeze", "unbind", "view_as"}


# Chains


@st.composite
def call(draw, shape):
    """A call for a tensor of that shape, right more often than not."""
    rank, num_elements = len(shape), prod(shape)
    name = draw(st.sampled_from(sorted(VIEW_NAMES - {"reshape_as", "view_as", "expand_as"})))
    if name in ("reshape", "view", "unflatten") and rank and draw(st.booleans()):
        dim = draw(st.integers(0, rank - 1))
        left, size = shape[dim] if name == "unflatten" else num_elements, []
        for factor in draw(st.lists(st.sampled_from((1, 2, 3, 4)), max_size=3)):
            size.append(factor if left % factor == 0 else 1)
            left //= size[-1]
        size.insert(draw(st.integers(0, len(size))), draw(st.sampled_from((left, -1))))
        return name, (dim, tuple(size)) if name == "unflatten" else (tuple(size),)
    if name in ("expand", "broadcast_to") and draw(st.booleans()):
        kept = [draw(st.sampled_from((size, -1) if size != 1 else (1, 2, 3))) for size in shape]
        return name, ((*draw(st.lists(st.integers(1, 3), max_size=2)), *kept),)
    return name, draw(st.sampled_from(calls(name, rank)))


@given(st.data(), st.lists(st.sampled_from((0, 1, 1, 2, 3, 4, 6)), max_size=4).map(tuple))
@settings(max_examples=400, deadline=None)
def test_chains_of_calls_make_the_views_of_torch(data, shape):
    x = first = tensor(shape, data.draw(view_strides(shape)))
    steps = []
    for _ in range(4):
        name, args = data.draw(call(tuple(x.shape)))
        recorded = check_call(x, name, args)
        if recorded and recorded.steps and x.dim() <= MAX_RANK:
            piece = data.draw(st.integers(0, len(recorded.steps) - 1))
            member = getattr(x, name)
            made = member(*args) if callable(member) else member
            x = made[piece] if recorded.is_tuple else made
            steps.append(recorded.steps[piece])
    assert apply_views(steps, layout_of(first)) == layout_of(x)


# Indices

BOUNDS = (None, -4, -1, 0, 1, 2, 5)
SLICES = [slice(*bounds) for bounds in product(BOUNDS, BOUNDS, (None, 1, 2, 3))]
FEW = [..., None, 0, -1, 2, slice(None), slice(1, None), slice(-2, 5, 2)]


def check_index(x, index):
    try:
        want = None if isinstance(index, tuple) and index.count(...) > 1 else layout_of(x[index])
    except TORCH_ERRORS:
        want = None
    if want is None:
        with pytest.raises(LayoutError):
            apply_views(record_index(index, tuple(x.shape)), layout_of(x))
        return
    steps = record_index(index, tuple(x.shape))
    assert apply_views(steps, layout_of(x)) == want, (layout_of(x), index)
    hash(steps)


def test_every_index_makes_the_view_of_torch():
    for x in small_tensors(2):
        for index in (*SLICES, *range(-4, 5), slice(None, None, 0), slice(None, None, -1), ()):
            check_index(x, index)
        for index in (index for length in range(4) for index in product(FEW, repeat=length)):
            check_index(x, index)


@given(st.data(), st.lists(st.integers(0, 6), max_size=4).map(tuple))
@settings(max_examples=300, deadline=None)
def test_random_indices_make_the_views_of_torch(data, shape):
    x = tensor(shape, data.draw(view_strides(shape)))
    bound = st.none() | st.integers(-8, 8)
    item = st.sampled_from((None, ...)) | st.integers(-3, 3) | st.builds(slice, bound, bound, st.sampled_from((None, 1, 2, 3, 7)))
    check_index(x, tuple(data.draw(st.lists(item, max_size=5))))


@pytest.mark.parametrize(
    "index", [True, [0], [True, False, True], torch.tensor(0), torch.tensor([0]), np.array([0]), np.array(0), 1.0, "a"]
)
def test_indices_that_copy_are_refused(index):
    for item in (index, (..., index), (None, index)):
        with pytest.raises(TraceError, match=rf"an index that makes a view must be an integer, not a {type(index).__name__}"):
            record_index(item, (3, 3))


def test_full_slices_need_no_step():
    assert record_index((slice(None), ..., slice(0, None, 1)), (2, 3, 4)) == ()
    assert record_index(np.int64(-1), (2,)) == (ViewStep("select", (0, -1)),)


# Spellings


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "step"),
    [
        ("permute", (0, 2, -2), {}, ViewStep("permute", (0, 2, 1))),
        ("permute", ([0, 2, 1],), {}, ViewStep("permute", (0, 2, 1))),
        ("permute", (), {"dims": (0, 2, 1)}, ViewStep("permute", (0, 2, 1))),
        ("transpose", (), {"dim0": 0, "dim1": -1}, ViewStep("permute", (2, 1, 0))),
        ("swapaxes", (), {"axis0": 0, "axis1": -1}, ViewStep("permute", (2, 1, 0))),
        ("mT", (), {}, ViewStep("permute", (0, 2, 1))),
        ("movedim", (), {"source": 0, "destination": -1}, ViewStep("permute", (1, 2, 0))),
        ("view", (2, -1), {}, ViewStep("reshape", (2, -1))),
        ("view", (), {"size": torch.Size((2, 12))}, ViewStep("reshape", (2, 12))),
        ("view", (-1,), {}, ViewStep("reshape", (-1,))),
        ("reshape", (), {"shape": [2, -1]}, ViewStep("reshape", (2, -1))),
        ("reshape_as", (torch.zeros(2, 12),), {}, ViewStep("reshape", (2, 12))),
        ("expand", (5, -1, 3, 4), {}, ViewStep("expand", (5, -1, 3, 4))),
        ("broadcast_to", (), {"size": (2, 3, 4)}, ViewStep("expand", (2, 3, 4))),
        ("expand_as", (), {"other": torch.zeros(5, 2, 3, 4)}, ViewStep("expand", (5, 2, 3, 4))),
        ("squeeze", (), {}, ViewStep("squeeze", (0, 1, 2))),
        ("squeeze", (-1, 0), {}, ViewStep("squeeze", (0, 2))),
        ("squeeze", (), {"dim": (-1,)}, ViewStep("squeeze", (2,))),
        ("unsqueeze", (), {"axis": -1}, ViewStep("unsqueeze", (3,))),
        ("flatten", (), {"start_dim": 1}, ViewStep("flatten", (1, 2))),
        ("unflatten", (), {"dim": -1, "sizes": [2, -1]}, ViewStep("unflatten", (2, (2, -1)))),
        ("select", (np.int64(-1), 3), {}, ViewStep("select", (2, 3))),
        ("narrow", (), {"dim": -1, "start": -2, "length": 2}, ViewStep("narrow", (2, -2, 2))),
        ("unfold", (), {"dimension": -1, "size": 2, "step": 1}, ViewStep("unfold", (2, 2, 1))),
        ("diagonal", (), {"offset": 1, "dim1": -1, "dim2": 0}, ViewStep("diagonal", (1, 2, 0))),
    ],
)
def test_spellings_of_one_view_are_one_step(name, args, kwargs, step):
    x = torch.zeros(2, 3, 4)
    recorded = record_view(name, args, kwargs, tuple(x.shape))
    assert recorded == RecordedViews((step,), False, name in ("squeeze", "expand_as", "reshape_as"))
    member = getattr(x, name)
    assert apply_view(step, layout_of(x)) == layout_of(member(*args, **kwargs) if callable(member) else member)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "steps", "depends_on_shape"),
    [
        ("chunk", (2, -1), {}, [("chunk", (2, 1, 0)), ("chunk", (2, 1, 1))], False),
        ("chunk", (), {"chunks": 2, "dim": 0}, [("chunk", (2, 0, 0)), ("chunk", (2, 0, 1))], False),
        ("chunk", (4, -1), {}, [("split", (2, 1, 0)), ("split", (2, 1, 1)), ("split", (2, 1, 2))], True),
        ("split", (4,), {"dim": -1}, [("split", (4, 1, 0)), ("split", (4, 1, 1))], True),
        ("split", (), {"split_size_or_sections": 4, "dim": 1}, [("split", (4, 1, 0)), ("split", (4, 1, 1))], True),
        ("split", ([2, 4], -1), {}, [("split_with_sizes", ((2, 4), 1, 0)), ("split_with_sizes", ((2, 4), 1, 1))], False),
        (
            "split_with_sizes",
            (),
            {"split_sizes": (2, 0)},
            [("split_with_sizes", ((2, 0), 0, 0)), ("split_with_sizes", ((2, 0), 0, 1))],
            False,
        ),
        ("tensor_split", (), {"sections": 2}, [("tensor_split", (2, 0, 0)), ("tensor_split", (2, 0, 1))], False),
        ("tensor_split", (), {"indices": (-1,), "dim": 1}, [("slice", (1, 0, -1, 1)), ("slice", (1, -1, None, 1))], False),
        ("unbind", (), {}, [("select", (0, 0)), ("select", (0, 1))], True),
    ],
)
def test_pieces_are_steps_without_the_size_of_the_tensor(name, args, kwargs, steps, depends_on_shape):
    assert record_view(name, args, kwargs, (2, 6)) == RecordedViews(tuple(ViewStep(*step) for step in steps), True, depends_on_shape)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "message"),
    [
        ("roll", (1,), {}, "roll makes no view"),
        ("chunk", (), {}, "chunk: missing a required argument: 'chunks'. Call it as torch documents it"),
        ("chunk", (2,), {"dims": 0}, "chunk: got an unexpected keyword argument 'dims'"),
        ("transpose", (0, 1, 2), {}, "transpose: too many positional arguments"),
        ("view", (torch.int32,), {}, r"view of a tensor of shape \(2, 6\): a size must be an integer, not a dtype"),
        ("view", (), {}, "view: missing a required argument: 'size'"),
        ("chunk", (True,), {}, "chunks must be an integer, not a bool"),
        ("chunk", (torch.tensor(2),), {}, "chunks must be an integer, not a Tensor"),
        ("select", (0, np.array(0)), {}, "index must be an integer, not a ndarray"),
        ("narrow", (0, 1.0, 1), {}, "start must be an integer, not a float"),
        ("split_with_sizes", (None,), {}, "a split size must be an integer, not a NoneType"),
        ("expand_as", ((2, 6),), {}, "other must be a tensor, not a tuple"),
    ],
)
def test_calls_that_torch_does_not_know_are_trace_errors(name, args, kwargs, message):
    with pytest.raises(TraceError, match=message):
        record_view(name, args, kwargs, (2, 6))


def test_chunk_of_another_shape_into_fewer_pieces_is_refused():
    step = record_view("chunk", (3,), {}, (6,)).steps[0]
    assert apply_view(step, View((8,), (1,))) == View((3,), (1,))
    with pytest.raises(LayoutError, match=r"chunk\(3, 0, 0\) of a tensor of shape \(4,\): there are 2 pieces, and there were 3 when"):
        apply_view(step, View((4,), (1,)))


def test_errors_name_the_view_and_the_shape():
    with pytest.raises(LayoutError, match=r"permute of a tensor of shape \(2, 3\): dim 2 is out of range: \[-2, 1\] is allowed"):
        record_view("permute", (0, 2), {}, (2, 3))
    with pytest.raises(LayoutError, match=r"split of a tensor of shape \(2,\): split sizes \(1, -1, 2\) must not be negative"):
        record_view("split", ([1, -1, 2],), {}, (2,))
    with pytest.raises(LayoutError, match=r"reshape\(6\) of a tensor of shape \(2, 3\): strides \(1, 2\) .* without a copy"):
        apply_view(ViewStep("reshape", (6,)), View((2, 3), (1, 2)))


# Parts of a dim


def test_narrowed_views_are_those_of_torch():
    for x in small_tensors(2):
        for dim, start, length in product(range(x.dim()), range(-1, 5), range(-1, 5)):
            if start >= 0 and length >= 0 and start + length <= x.shape[dim]:
                assert narrowed(layout_of(x), dim, start, length) == layout_of(x.narrow(dim, start, length))
            else:
                with pytest.raises(LayoutError, match=f"{length} indices from {start} on do not lie in a dim of size {x.shape[dim]}"):
                    narrowed(layout_of(x), dim, start, length)
