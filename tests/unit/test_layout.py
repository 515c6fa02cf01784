import doctest
from itertools import pairwise, permutations, product
from math import prod

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wideload import layout
from wideload.errors import LayoutError
from wideload.layout import (
    INT31_MAX,
    Dim,
    IterSpace,
    broadcast_shapes,
    build_space,
    coalesce,
    contiguous_strides,
    expand_strides,
    iterator_strides,
    like_strides,
    magic_divisor,
)

OPS = {"neg": (torch.neg, 1), "add": (torch.add, 2), "where": (torch.where, 3), "addcmul": (torch.addcmul, 3)}

float32 = st.just(torch.float32)
shapes = st.lists(st.sampled_from((0, 1, 2, 2, 3, 3, 4)), max_size=5).map(tuple)


def tensor(shape, strides, dtype=torch.float32):
    """Zeros of that shape and strides, over a storage just large enough."""
    num_cells = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.zeros(num_cells, dtype=dtype).as_strided(shape, strides)


def operand(x):
    return tuple(x.shape), x.stride()


@st.composite
def view_strides(draw, shape):
    """Strides of any kind of view: permuted, channels_last, stepped, padded, expanded, and any number on dims of size 1."""
    dims = range(len(shape))
    order = draw(
        st.one_of(st.just(tuple(reversed(dims))), st.just((1, 3, 2, 0)) if len(shape) == 4 else st.nothing(), st.permutations(dims))
    )
    strides, step = [0] * len(shape), 1
    has_gaps = draw(st.booleans())
    for dim in order:
        strides[dim] = step * (draw(st.sampled_from((1, 1, 2, 3))) if has_gaps else 1)
        step = strides[dim] * max(shape[dim], 1) + (draw(st.integers(0, 2)) if has_gaps else 0)
    if draw(st.booleans()):
        strides = [draw(st.sampled_from((0, stride, stride))) for stride in strides]
    if draw(st.booleans()):
        strides = [
            draw(st.sampled_from((0, 1, 2, 7, stride))) if size == 1 else stride for size, stride in zip(shape, strides, strict=True)
        ]
    return tuple(strides)


@st.composite
def operands(draw, shape, dtypes=float32):
    """A tensor that broadcasts to ``shape``; half of them have it."""
    if draw(st.booleans()):
        shape = tuple(draw(st.sampled_from((1, size, size))) for size in shape[draw(st.integers(0, len(shape))) :])
    return tensor(shape, draw(view_strides(shape)), draw(dtypes))


def test_docstrings():
    result = doctest.testmod(layout)
    assert result.failed == 0
    assert result.attempted >= 7


# Shapes


@given(st.lists(shapes, max_size=4))
@settings(max_examples=200, deadline=None)
def test_broadcast_shapes_are_those_of_torch(some):
    try:
        want = tuple(torch.broadcast_shapes(*some))
    except RuntimeError:
        with pytest.raises(LayoutError):
            broadcast_shapes(*some)
    else:
        assert broadcast_shapes(*some) == want


def test_broadcast_error_names_the_shapes_that_meet():
    with pytest.raises(LayoutError, match=r"shapes \(5, 3, 1\) and \(2, 6\) do not broadcast: at dim -2 one has size 3 and the other 2"):
        broadcast_shapes((), (5, 3, 1), (6,), (2, 6))


@given(st.data(), shapes)
@settings(max_examples=300, deadline=None)
def test_expanded_strides_are_those_of_torch(data, to_shape):
    x = data.draw(operands(to_shape))
    got, want = expand_strides(*operand(x), to_shape), x.expand(to_shape).stride()
    assert len(got) == len(want)
    # A new dim of size 1 is the one place where torch's expand and its iterator differ; no kernel walks it.
    num_new = len(to_shape) - x.dim()
    assert all(g == w for dim, (g, w) in enumerate(zip(got, want, strict=True)) if dim >= num_new or to_shape[dim] != 1)


@pytest.mark.parametrize(("shape", "to_shape"), [((2,), (3,)), ((3, 1), (3,)), ((0,), (1,)), ((2, 1), (1, 2))])
def test_shapes_that_do_not_expand_are_refused(shape, to_shape):
    with pytest.raises(LayoutError, match="does not broadcast"):
        expand_strides(shape, contiguous_strides(shape), to_shape)


# The strides that torch gives to results


def small_views(shape):
    """Every permutation of ``shape`` in memory, each also with each set of dims broadcast."""
    for order in permutations(range(len(shape))):
        strides, step = [0] * len(shape), 1
        for dim in order:
            strides[dim], step = step, step * max(shape[dim], 1)
        for kept in product((True, False), repeat=len(shape)):
            sizes = tuple(size if keep else 1 for size, keep in zip(shape, kept, strict=True))
            yield tensor(sizes, tuple(strides))


@pytest.mark.parametrize("rank", range(4))
def test_results_of_all_small_pairs_have_the_strides_of_torch(rank):
    for shape in product((0, 2, 3), repeat=rank):
        views = list(small_views(shape))
        for a, b in product(views, repeat=2):
            want = torch.add(a, b)
            assert iterator_strides(tuple(want.shape), [operand(a), operand(b)]) == want.stride(), (operand(a), operand(b))


@given(st.data(), st.sampled_from(sorted(OPS)), shapes)
@settings(max_examples=800, deadline=None)
def test_results_have_the_strides_of_torch(data, op, shape):
    function, num_inputs = OPS[op]
    inputs = [data.draw(operands(shape)) for _ in range(num_inputs)]
    if op == "where":
        inputs[0] = tensor(*operand(inputs[0]), torch.bool)
    want = function(*inputs)
    assert broadcast_shapes(*(tuple(x.shape) for x in inputs)) == want.shape
    assert iterator_strides(tuple(want.shape), [operand(x) for x in inputs]) == want.stride(), [operand(x) for x in inputs]


@given(st.data(), shapes)
@settings(max_examples=300, deadline=None)
def test_inputs_that_torch_converts_first_count_as_converted(data, shape):
    """On the CPU add casts to the common dtype by ``.to``; where does so on every device."""
    a, b = (data.draw(operands(shape, st.sampled_from((torch.float32, torch.float64)))) for _ in range(2))
    condition = tensor(shape, contiguous_strides(shape), torch.bool)
    for want, others in ((torch.add(a, b), []), (torch.where(condition, a, b), [condition])):
        inputs = [(tuple(x.shape), x.stride() if x.dtype == want.dtype else like_strides(*operand(x))) for x in (a, b)]
        assert iterator_strides(tuple(want.shape), [*map(operand, others), *inputs]) == want.stride()


@given(st.data(), shapes)
@settings(max_examples=400, deadline=None)
def test_copies_have_the_strides_of_torch(data, shape):
    x = tensor(shape, data.draw(view_strides(shape)))
    assert like_strides(*operand(x)) == x.to(torch.float64).stride() == torch.empty_like(x).stride()


@pytest.mark.parametrize(
    ("shape", "inputs", "want"),
    [
        ((), [((), ()), ((), ())], ()),
        ((5,), [((5,), (3,))], (1,)),
        ((2, 3, 4, 5), [((2, 3, 4, 5), (60, 1, 15, 3)), ((2, 3, 4, 5), (60, 20, 5, 1))], (60, 1, 15, 3)),
        ((2, 3, 4, 5), [((2, 3, 4, 5), (60, 20, 5, 1)), ((2, 3, 4, 5), (60, 1, 15, 3))], (60, 20, 5, 1)),
        ((2, 3, 4, 5), [((3, 1, 1), (1, 1, 1)), ((2, 3, 4, 5), (60, 1, 15, 3))], (60, 1, 15, 3)),
        # N C 1 1 is contiguous and channels_last at once: alone, contiguous wins; beside a number, the strides of size 1 stay.
        ((2, 3, 1, 1), [((2, 3, 1, 1), (3, 1, 3, 3))], (3, 1, 1, 1)),
        ((2, 3, 1, 1), [((2, 3, 1, 1), (3, 1, 3, 3)), ((), ())], (3, 1, 3, 3)),
        # A size of 0 makes outer strides 0, except in the row-major order.
        ((2, 0, 3), [((2, 1, 3), (3, 3, 1)), ((2, 0, 1), (1, 1, 1))], (3, 3, 1)),
        ((2, 0, 3), [((2, 1, 3), (1, 1, 2)), ((2, 0, 1), (1, 1, 1))], (1, 2, 0)),
    ],
)
def test_strides_worked_out_by_hand(shape, inputs, want):
    assert iterator_strides(shape, inputs) == want


def test_an_operand_that_does_not_expand_is_refused():
    with pytest.raises(LayoutError):
        iterator_strides((2, 3), [((3, 2), (2, 1))])


# The loop nest


def visited(space, num_operands):
    """The offsets of all operands at each step of the loops."""
    steps = product(*(range(dim.size) for dim in reversed(space.dims))) if space.num_elements else ()
    return [
        tuple(sum(i * dim.strides[operand] for i, dim in zip(reversed(step), space.dims, strict=True)) for operand in range(num_operands))
        for step in steps
    ]


@given(st.data(), shapes, st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_space_visits_each_element_once(data, shape, num_operands):
    rows = [data.draw(view_strides(shape)) for _ in range(num_operands)]
    space = build_space(shape, rows)
    want = [tuple(sum(i * s for i, s in zip(index, row, strict=True)) for row in rows) for index in product(*map(range, shape))]
    got = visited(space, num_operands)
    assert sorted(got) == sorted(want)
    assert len(got) == space.num_elements == prod(shape)
    assert all(dim.size > 1 for dim in space.dims)
    assert all(
        any(far != inner.size * near for near, far in zip(inner.strides, outer.strides, strict=True))
        for inner, outer in pairwise(space.dims)
    )
    for number in range(num_operands):
        offsets = [offset[number] for offset in got] or [0]
        assert space.offset_range(number) == (min(offsets), max(offsets))
        assert space.is_dense(number) == (offsets == list(range(len(offsets))) or not got)
    assert space.all_dense == all(space.is_dense(number) for number in range(num_operands))


@given(st.data(), shapes)
@settings(max_examples=200, deadline=None)
def test_loops_follow_the_output_through_memory(data, shape):
    inputs = [data.draw(operands(shape)) for _ in range(2)]
    rows = [expand_strides(*operand(x), shape) for x in inputs]
    space = build_space(shape, [*rows, iterator_strides(shape, [(shape, row) for row in rows])], outputs=(2,))
    assert [offsets[2] for offsets in visited(space, 3)] == list(range(prod(shape)))


@pytest.mark.parametrize(
    ("shape", "rows", "want"),
    [
        ((), [(), ()], ()),
        ((1, 1), [(7, 3)], ()),
        ((3, 0), [(0, 1)], ()),
        ((2, 3, 4), [(12, 4, 1)] * 2, (Dim(24, (1, 1)),)),
        ((1, 5, 1), [(9, 1, 9), (0, 2, 0)], (Dim(5, (1, 2)),)),
        ((2, 3), [(3, 1), (0, 1)], (Dim(3, (1, 1)), Dim(2, (3, 0)))),
        ((2, 3), [(3, 1), (1, 0)], (Dim(3, (1, 0)), Dim(2, (3, 1)))),
        ((2, 3), [(3, 1), (0, 0)], (Dim(6, (1, 0)),)),
        ((2, 3), [(1, 2), (3, 1)], (Dim(2, (1, 3)), Dim(3, (2, 1)))),
        ((2, 8, 4), [(32, 4, 1), (64, 8, 1)], (Dim(4, (1, 1)), Dim(16, (4, 8)))),
        ((2, 3, 4, 5), [(60, 1, 15, 3), (0, 1, 0, 0)], (Dim(3, (1, 1)), Dim(40, (3, 0)))),
    ],
    ids=[
        "0-dim",
        "one element",
        "no elements",
        "dense",
        "size 1",
        "row",
        "column",
        "number",
        "transposed",
        "packed halves",
        "channels_last bias",
    ],
)
def test_spaces_worked_out_by_hand(shape, rows, want):
    assert build_space(shape, rows) == IterSpace(want, prod(shape))


def test_the_first_output_decides_the_order():
    row_major, column_major = (3, 1), (1, 2)
    for outputs, inner in (((1, 0), Dim(2, (3, 1))), ((0, 1), Dim(3, (1, 2))), ((1,), Dim(2, (3, 1)))):
        assert build_space((2, 3), [row_major, column_major], outputs).dims[0] == inner


def test_a_dim_of_size_1_always_folds():
    assert coalesce((Dim(1, (5,)), Dim(3, (1,)), Dim(1, (9,)), Dim(2, (3,)), Dim(2, (7,)))) == (Dim(6, (1,)), Dim(2, (7,)))


@pytest.mark.parametrize(
    ("shape", "strides", "itemsize", "want"),
    [
        ((INT31_MAX,), (1,), 1, False),
        ((INT31_MAX + 1,), (1,), 1, True),
        ((INT31_MAX + 1,), (0,), 1, True),
        ((2**30,), (1,), 2, False),
        ((2**30 + 1,), (1,), 2, True),
        ((3,), (2**30,), 1, True),
        ((3,), (2**30 - 1,), 1, False),
        ((2, 2), (2**29 - 1, 1), 4, True),
        ((2, 2), (2**29 - 2, 1), 4, False),
        ((2**40, 0), (1, 1), 16, False),
    ],
)
def test_32_bit_indices_end_at_the_last_byte(shape, strides, itemsize, want):
    assert build_space(shape, [strides]).needs_64bit([itemsize]) is want
    assert build_space(shape, [(0,) * len(shape), strides]).needs_64bit([1, itemsize]) is want


# Division


def divide_on_device(n, divisor, bits):
    """What the CUDA of the docstring computes; no word may overflow."""
    multiplier, shift = magic_divisor(divisor, bits)
    assert 0 <= multiplier < 1 << bits
    if bits == 32:
        assert n * multiplier < 1 << 64
        assert shift < 64
        return n * multiplier >> shift & 0xFFFFFFFF
    total = (n * multiplier >> 64) + n
    assert total < 1 << 64
    assert shift < 64
    return total >> shift


@pytest.mark.parametrize("bits", [32, 64])
def test_division_is_exact_at_the_steps_of_each_quotient(bits):
    limit = 1 << (bits - 1)
    near_powers = (power + offset for k in range(bits) for power in (1 << k,) for offset in range(-3, 4))
    for divisor in {*range(1, 5000), *(d for d in near_powers if 1 <= d < limit), limit // 3, limit // 7, limit - 1}:
        last = limit // divisor * divisor
        for edge in (divisor, last // divisor // 2 * divisor, last):
            for n in (edge - 1, edge, edge + 1, limit - 1):
                if 0 <= n < limit:
                    assert divide_on_device(n, divisor, bits) == n // divisor, (n, divisor)


@given(st.sampled_from((32, 64)), st.data())
@settings(max_examples=300, deadline=None)
def test_division_is_exact(bits, data):
    numbers = st.integers(0, bits - 1).flatmap(lambda k: st.integers(0, (1 << k) - 1))
    n, divisor = data.draw(numbers), data.draw(numbers)
    assume(divisor)
    assert divide_on_device(n, divisor, bits) == n // divisor


@pytest.mark.parametrize(("divisor", "bits"), [(0, 32), (-1, 32), (2**31, 32), (0, 64), (2**63, 64)])
def test_divisors_out_of_range_are_refused(divisor, bits):
    with pytest.raises(LayoutError, match="outside"):
        magic_divisor(divisor, bits)
