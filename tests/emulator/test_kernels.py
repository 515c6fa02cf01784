"""The kernels' own text, run on the CPU: every family, layout, length and alignment against torch, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wideload as wl
from tests.emulator.emulated import behind, run_emulated
from tests.emulator.emulator import EmulatorError, build, run_on
from wideload.emit.kernel import emit_kernel
from wideload.execute import is_safe_in_place, kernel_arguments
from wideload.plan import THREADS, Operand, Target, plan_kernels
from wideload.replay import NodeLayout
from wideload.trace import TensorArg, trace_function

pytestmark = pytest.mark.usefixtures("full_blocks")

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i64, u8 = torch.int8, torch.int64, torch.uint8

scaled_sum = wl.fuse(lambda x, y: x * 3 + y, name="scaled_sum")
add = wl.fuse(lambda x, y: x + y, name="add")
choose = wl.fuse(lambda m, x, y: torch.where(m, x, y), name="choose")
both = wl.fuse(lambda a, b, c: ((a + b).to(torch.bfloat16), c + a), name="both")
apart = wl.fuse(lambda x, y: (x + 1, x * y, y - 1), name="apart")


def assert_same(got: Any, want: torch.Tensor, note: str = "") -> None:
    """Equal dtype, shape, strides and bits; NaN equals NaN, and -0 is not 0."""
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride()), note
    if want.dtype.is_floating_point:
        assert torch.equal(got.isnan(), want.isnan()), note
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
        got, want = got.nan_to_num(0.0).contiguous().view(bits), want.nan_to_num(0.0).contiguous().view(bits)
    assert torch.equal(got, want), f"{note}: {(got != want).sum()} of {want.numel()} differ"


def ramp(n: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small integers: sums and products of a few are exact in every dtype."""
    return ((torch.arange(n) + start) % 13).to(dtype)


def shifted(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The values at a storage offset, with no element after the last."""
    store = torch.empty(offset + values.numel(), dtype=values.dtype)
    store[offset:] = values
    return store[offset:]


LENGTHS = [*range(34), 127, 129, 255, 257, 1000, 4095, 4096, 4097]


@pytest.mark.parametrize("dtype", [u8, bf16, f32, f64], ids=str)
def test_every_length_and_alignment(dtype: torch.dtype) -> None:
    for n in LENGTHS:
        x, y = ramp(n, dtype), ramp(n, dtype, 5)
        for ox, oy, oo in ((0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 1), (2, 1, 3)):
            out = shifted(torch.zeros(n, dtype=dtype), oo)
            run_emulated(scaled_sum, shifted(x, ox), shifted(y, oy), out=out)
            assert torch.equal(out, x * 3 + y), f"n={n} offsets {ox} {oy} {oo}"


def test_offsets_up_to_a_whole_access() -> None:
    for offset in range(17):
        x = ramp(600, f16)
        assert_same(run_emulated(add, shifted(x, offset), shifted(x, 16 - offset)), x + x, f"offset {offset}")


@pytest.mark.parametrize("n", [0, 1, 7, 33, 1037])
def test_mixed_widths_each_at_its_own_alignment(n: int) -> None:
    a, b, c = ramp(n, i8), ramp(n, f32, 2), ramp(n, f64, 4)
    for offset in (0, 1, 3):
        p, q = run_emulated(both, shifted(a, offset), shifted(b, (offset + 1) % 4), shifted(c, offset % 2))
        assert_same(p, (a + b).to(bf16))
        assert_same(q, c + a)


def test_results_of_several_shapes_are_several_kernels() -> None:
    x, y = torch.randn(3, 1, 5), torch.randn(4, 5)
    plan = apart.plan(x, y, target="sm_90")
    assert len(plan.kernels) == 3
    for got, want in zip(run_emulated(apart, x, y), (x + 1, x * y, y - 1), strict=True):
        assert_same(got, want)


# ---- random layouts


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor that broadcasts to ``shape``: dims dropped, of size 1, expanded, permuted, stepped, at an offset."""
    shape = shape[draw(st.integers(0, len(shape))) :]
    small = tuple(1 if draw(st.integers(0, 4)) == 0 else n for n in shape)
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.sampled_from((1, 1, 1, 2, 3))) for _ in shape]
    pads = [draw(st.sampled_from((0, 0, 1, 2))) for _ in shape]
    held = [small[dim] * steps[dim] + pads[dim] for dim in order]
    offset = draw(st.integers(0, 9))
    count = offset + max(1, torch.Size(held).numel())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype == torch.bool:
        store = torch.randint(0, 2, (count,), dtype=torch.bool, generator=generator)
    elif dtype.is_floating_point:
        store = torch.randn(count, generator=generator).to(dtype)
        store[::7] = float("nan")
        store[3::11] = -0.0
    else:
        store = torch.randint(-100, 100, (count,), generator=generator).to(dtype)
    block = store[offset : offset + torch.Size(held).numel()].view(held)
    block = block.permute([order.index(dim) for dim in range(len(order))]) if order else block
    for dim, size in enumerate(small):
        block = block.narrow(dim, min(pads[dim], block.shape[dim] - size * steps[dim]), size * steps[dim])
        block = block[(slice(None),) * dim + (slice(None, None, steps[dim]),)]
    return block.expand(shape) if draw(st.booleans()) else block


SHAPES = st.lists(st.sampled_from((0, 1, 1, 2, 3, 4, 5, 7, 17)), max_size=4).map(tuple)
RANDOM = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@RANDOM
@given(data=st.data(), shape=SHAPES, dtype=st.sampled_from((f32, bf16, i8)))
def test_any_layout_of_a_sum(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, y = data.draw(views(shape, dtype)), data.draw(views(shape, dtype))
    assert_same(run_emulated(add, x, y), x + y)


@RANDOM
@given(data=st.data(), shape=SHAPES)
def test_any_layout_of_mixed_operands(data: st.DataObject, shape: tuple[int, ...]) -> None:
    m, x, y = (data.draw(views(shape, dtype)) for dtype in (torch.bool, bf16, f32))
    assert_same(run_emulated(choose, m, x, y), torch.where(m, x, y))


@RANDOM
@given(data=st.data(), shape=SHAPES.filter(lambda shape: 0 not in shape))
def test_any_layout_of_an_output(data: st.DataObject, shape: tuple[int, ...]) -> None:
    x = data.draw(views(shape, f32)).expand(shape)
    order = data.draw(st.permutations(range(len(shape))))
    pad = data.draw(st.integers(0, 3))
    strides, step = [0] * len(shape), data.draw(st.integers(1, 3))
    for dim in order:
        strides[dim], step = step, step * shape[dim] + pad
    out = torch.full((step + 1,), 9.0).as_strided(shape, strides, 1)
    run_emulated(add, x, x, out=out)  # the gaps are checked by the emulator
    plain = torch.contiguous_format
    assert_same(out.clone(memory_format=plain), (x + x).clone(memory_format=plain))


# ---- rows and outputs with gaps


def sliced(rows: int, columns: int, pitch: int, offset: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Rows of a matrix whose first element lies at ``offset``; the storage ends with the last one."""
    return shifted(ramp((rows - 1) * pitch + columns, dtype, start), offset).as_strided((rows, columns), (pitch, 1), offset)


def family(f: wl.FusedFunction, *args: Any, out: Any = None) -> str:
    (kernel,) = f.plan(*args, out=out, target="sm_90").kernels
    return kernel.plan.variant.family


affine = wl.fuse(lambda x, scale, bias: x * scale + bias, name="affine")


@pytest.mark.parametrize("dtype", [u8, bf16, f32, f64], ids=str)
def test_rows_of_every_length_pitch_and_alignment(dtype: torch.dtype) -> None:
    """A matrix, a column and a row, into an output that starts anywhere: columns from one access to beyond three."""
    per_access = 16 // dtype.itemsize
    generator = torch.Generator().manual_seed(2)
    for columns in range(per_access, 3 * per_access + 2):
        for _ in range(3):
            gap, ox, oy, oo = torch.randint(0, 2 * per_access, (4,), generator=generator).tolist()
            x, scale = sliced(5, columns, columns + gap, ox, dtype), ramp(5, dtype, 1).view(5, 1)
            bias = shifted(ramp(columns, dtype, 7), oy)
            out = shifted(torch.zeros(5 * columns, dtype=dtype), oo).view(5, columns)
            assert family(affine, x, scale, bias, out=out) == "rows"
            run_emulated(affine, x, scale, bias, out=out)
            assert torch.equal(out, x * scale + bias), f"{columns} columns, gap {gap}, offsets {ox} {oy} {oo}"


@pytest.mark.parametrize("dtype", [u8, bf16, f32, f64], ids=str)
def test_outputs_with_gaps_of_every_length_pitch_and_alignment(dtype: torch.dtype) -> None:
    per_access = 16 // dtype.itemsize
    generator = torch.Generator().manual_seed(3)
    for columns in range(per_access, 3 * per_access + 2):
        for _ in range(3):
            gap, out_gap, ox, oy, oo = torch.randint(0, 2 * per_access, (5,), generator=generator).tolist()
            x, scale = sliced(5, columns, columns + gap, ox, dtype), ramp(5, dtype, 1).view(5, 1)
            bias = shifted(ramp(columns, dtype, 7), oy)
            out = sliced(5, columns, columns + out_gap + 1, oo, dtype)
            assert family(affine, x, scale, bias, out=out) == "pitched"
            want = x * scale + bias
            run_emulated(affine, x, scale, bias, out=out)  # the gaps are checked by the emulator
            assert torch.equal(out, want), f"{columns} columns, gaps {gap} {out_gap}, offsets {ox} {oy} {oo}"


def test_two_outputs_each_at_its_own_pitch_and_width() -> None:
    f = wl.fuse(lambda a, b: ((a + b).to(bf16), a - b), name="two")
    generator = torch.Generator().manual_seed(4)
    families = set()
    for _ in range(40):
        rows, columns = (torch.randint(0, 26, (2,), generator=generator) // torch.tensor([5, 1]) + torch.tensor([1, 4])).tolist()
        gaps, offsets = (torch.randint(0, 7, (4,), generator=generator).tolist() for _ in range(2))
        gaps = [gap // 2 for gap in gaps]
        a, b, p, q = (
            sliced(rows, columns, columns + gap, offset, dtype, start)
            for start, (gap, offset, dtype) in enumerate(zip(gaps, offsets, (bf16, f32, bf16, f32), strict=True))
        )
        want = ((a + b).to(bf16), a - b)
        run_emulated(f, a, b, out=(p, q))
        assert (torch.equal(p, want[0]), torch.equal(q, want[1])) == (True, True), f"{rows} x {columns}, {gaps}, {offsets}"
        families.add(family(f, a, b, out=(p, q)))
    assert families >= {"rows", "pitched"}


@RANDOM
@given(data=st.data(), outer=st.lists(st.integers(1, 4), max_size=3), columns=st.integers(1, 40), dtype=st.sampled_from((f32, bf16)))
def test_any_rows_into_any_rows(data: st.DataObject, outer: list[int], columns: int, dtype: torch.dtype) -> None:
    """Operands that run along their last dim or not at all, any outer dims stretched or permuted, and an output with any gaps."""
    shape = (*outer, columns)

    def rows_of(is_output: bool) -> torch.Tensor:
        order = data.draw(st.permutations(range(len(outer))))
        inner = 1 if is_output or data.draw(st.integers(0, 3)) else 0
        strides, step = [0] * len(shape), (columns if inner else 1) + data.draw(st.integers(0, 9))
        strides[-1] = inner
        for dim in order:
            if is_output or data.draw(st.integers(0, 3)):
                strides[dim], step = step, step * shape[dim] + data.draw(st.sampled_from((0, 0, 1, 5)))
        offset = data.draw(st.integers(0, 17))
        end = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        return shifted(ramp(end, dtype, offset), offset).as_strided(shape, strides, offset)

    x, y, out = rows_of(False), rows_of(False), rows_of(True)
    want = x * 3 + y
    run_emulated(scaled_sum, x, y, out=out)
    assert torch.equal(out, want)


@RANDOM
@given(
    data=st.data(),
    outer=st.lists(st.sampled_from((1, 2, 3, 4, 8)), min_size=1, max_size=3),
    vectors=st.integers(1, 5),
    dtypes=st.sampled_from(((f32, f32), (bf16, bf16), (bf16, f32), (f32, bf16))),
)
def test_any_rows_along_which_an_operand_repeats(
    data: st.DataObject, outer: list[int], vectors: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """Strips of two rows and of four along any dim, into outputs with gaps and without, in place too."""
    shape = (*outer, vectors * 8)

    def rows_of(dtype: torch.dtype, may_repeat: bool, start: int) -> torch.Tensor:
        sizes = [1 if may_repeat and data.draw(st.booleans()) else size for size in outer]
        pitch = shape[-1] + 8 * data.draw(st.integers(0, 1))
        return ramp(math.prod(sizes) * pitch, dtype, start).view(*sizes, pitch)[..., : shape[-1]].expand(shape)

    x, y, column = rows_of(dtypes[0], True, 0), rows_of(dtypes[1], True, 5), ramp(outer[-1], f32, 1).view(-1, 1)
    out = rows_of(data.draw(st.sampled_from((f32, bf16))), False, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wideload.plan.strips.LEAST_STRIPS", 1)
        f = wl.fuse(lambda x, y, column: torch.exp2(x * column - x * column) * y + x * column, name="strips")  # 2^0, for a function
        want = (x * column + y).to(out.dtype)
        run_emulated(f, x, y, column, out=out)
    assert torch.equal(out, want)


def test_many_blocks_of_rows() -> None:
    x, bias = torch.randn(70, 131)[:, 2:], torch.randn(129)
    assert_same(run_emulated(add, x, bias), x + bias)
    out = torch.zeros(70, 140)[:, 3:132]
    run_emulated(add, x, bias, out=out)
    assert torch.equal(out, x + bias)


def test_64_bit_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.layout.INT31_MAX", 3)
    f = wl.fuse(lambda x, y: x * 2 + y, name="wide")
    x, y = torch.randn(5, 7, 3).permute(1, 2, 0), torch.randn(3, 1)
    assert f.plan(x, y, target="sm_90").kernels[0].plan.variant.index_bits == 64
    assert_same(run_emulated(f, x, y), x * 2 + y)


def test_64_bit_indices_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.layout.INT31_MAX", 3)
    monkeypatch.setattr("wideload.plan.choice.INT31_MAX", 3)
    f = wl.fuse(lambda x, scale, bias: x * scale + bias, name="wide")
    for columns, pitch, offset in ((4, 4, 1), (5, 9, 0), (8, 12, 3), (13, 13, 2), (33, 40, 5)):
        x = sliced(6, columns, pitch, offset, f32).unflatten(0, (3, 2))
        scale, bias = ramp(3, f32).view(3, 1, 1), shifted(ramp(columns, f32, 3), 1)
        for gap, family in ((0, "rows"), (3, "pitched")):
            out = sliced(6, columns, columns + gap, offset + 1, f32).unflatten(0, (3, 2))
            plan = f.plan(x, scale, bias, out=out, target="sm_90").kernels[0].plan
            assert (plan.variant.family, plan.variant.index_bits) == (family, 64)
            run_emulated(f, x, scale, bias, out=out)
            assert torch.equal(out, x * scale + bias)


# ---- views inside the function


def rotate_half(x: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rope(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + rotate_half(x) * sin


def rope_interleaved(x: Any, cos: Any, sin: Any) -> Any:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def rope_swapped(x: Any, cos: Any, sin: Any) -> Any:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2) * sin


def packed_swiglu(x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return gate.relu() * up


VIEWED: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "packed halves": (packed_swiglu, [(5, 32)]),
    "packed halves that no access divides": (packed_swiglu, [(5, 2, 26)]),
    "rope": (rope, [(2, 3, 5, 16), (3, 1, 16), (3, 1, 16)]),
    "rope of neighbours": (rope_interleaved, [(2, 3, 5, 16), (3, 1, 8), (3, 1, 8)]),
    "rope with neighbours swapped": (rope_swapped, [(2, 3, 5, 16), (3, 1, 16), (3, 1, 16)]),
    "a flattened stack beside columns": (lambda x, y: torch.cat((torch.stack((x, y), -1).flatten(-2), y * 2), -1), [(4, 9), (4, 9)]),
    "the middle of a concatenation": (lambda x, y: torch.cat((x, y * 2), -1)[:, 3:-2].t() + 1, [(6, 17), (6, 9)]),
    "rope with narrow halves": (rope, [(2, 3, 5, 6), (3, 1, 6), (3, 1, 6)]),
    "pairs": (lambda x, y: torch.stack((x * 2, y - 1), -1), [(4, 9), (4, 9)]),
    "a stack of rows": (lambda x, y: torch.stack((x * 2, x + y, y - 1)), [(4, 9), (4, 9)]),
    "a stack in the middle": (lambda x, y: torch.stack((x * y, x), 1), [(4, 9), (9,)]),
    "a window": (lambda x: x[1:-2, 3:] * x[3:, :-3] + x[-3, 0], [(9, 40)]),
    "the last columns": (lambda x: x[-3:, -5:] * 2 - x[:3, 4:9], [(9, 40)]),
    "the middle of an intermediate": (lambda x, y: (x * y + 1)[1:, 2:-1], [(5, 21), (21,)]),
    "a transposed intermediate": (lambda x, y: (x + 1).t() * y, [(5, 21), (5,)]),
    "neighbours of an intermediate": (lambda x: (lambda y: y[:, 1:] - y[:, :-1])(x * x), [(5, 41)]),
    "columns of different tensors": (lambda x, y: torch.cat((x, y * 2, x[:, :3]), -1), [(6, 17), (6, 9)]),
    "rows of different tensors": (lambda x, y: torch.cat((x, y)) * 3 + x[0], [(6, 17), (3, 17)]),
    "an outer product": (lambda x, y: x[:, None] * y[None, :], [(7,), (33,)]),
    "a diagonal": (lambda x: x.diagonal() * x[0], [(7, 7)]),
    "heads": (lambda x: x.unflatten(-1, (3, 8)).transpose(1, 2) * 2, [(2, 5, 24)]),
    "a sliding window": (lambda x: x.unfold(-1, 4, 2) * 2 + 1, [(2, 21)]),
    "an element": (lambda x, y: x * x[1, 2] + y[-1], [(4, 9), (9,)]),
}


@pytest.mark.parametrize(("dtype", "offset"), [(f32, 0), (bf16, 3)], ids=str)
@pytest.mark.parametrize("name", VIEWED)
def test_views_inside_a_function_are_as_in_torch(name: str, dtype: torch.dtype, offset: int) -> None:
    function, shapes = VIEWED[name]
    generator = torch.Generator().manual_seed(6)
    tensors = [shifted(torch.randn(torch.Size(s).numel(), generator=generator).to(dtype), offset).view(s) for s in shapes]
    eager = wl.fuse(function, name="viewed", numerics="eager")
    assert_same(run_emulated(eager, *tensors), function(*tensors), "eager")
    wide = function(*(x.float() for x in tensors)).to(dtype)
    got = run_emulated(wl.fuse(function, name="viewed"), *tensors)
    assert got.stride() == function(*tensors).stride()
    assert_same(got.contiguous(), wide.contiguous(), "fused")


def test_views_and_concatenations_into_an_output_with_gaps() -> None:
    x, cos, sin = torch.randn(4, 6, 16), torch.randn(6, 16), torch.randn(6, 16)
    for width, start in ((16, 0), (20, 0), (20, 4), (19, 1), (17, 1)):
        out = torch.zeros(4, 6, width)[..., start : start + 16]
        run_emulated(wl.fuse(rope, name="rope"), x, cos, sin, out=out)
        assert torch.equal(out, rope(x, cos, sin)), (width, start)
    turned = torch.zeros(16, 6, 4).permute(2, 1, 0)
    run_emulated(wl.fuse(rope, name="rope"), x, cos, sin, out=turned)
    assert torch.equal(turned, rope(x, cos, sin))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_rope_in_place_reads_both_halves_before_it_writes_either(dtype: torch.dtype) -> None:
    f = wl.fuse(rope, name="rope", numerics="eager")
    for halves in (3, 8, 20):
        x, cos, sin = (torch.randn(*shape, 2 * halves).to(dtype) for shape in ((2, 5), (5,), (5,)))
        want = rope(x, cos, sin)
        kernels = f.plan(x, cos, sin, out=x, target="sm_90").kernels
        assert len(kernels) == 1
        assert is_safe_in_place([kernel.plan for kernel in kernels], [x, cos, sin], [x])
        run_emulated(f, x, cos, sin, out=x)
        assert_same(x, want)


def test_in_place_is_unsafe_where_an_element_is_read_after_it_was_written() -> None:
    x = torch.randn(4, 16)
    for function in (rotate_half, lambda x: torch.cat((x[:, 1:], x[:, :1]), 1), lambda x: x * x[0], lambda x: x + x[:, :1]):
        f = wl.fuse(function, name="f")
        is_safe = is_safe_in_place([kernel.plan for kernel in f.plan(x, out=x, target="sm_90").kernels], [x], [x])
        assert is_safe == (function is rotate_half)  # a thread reads and writes the same two places there


# ---- in place, scalars, what is not an array


def test_in_place_by_exact_alias() -> None:
    for n in (1, 33, 2049):
        x, y = ramp(n, bf16), ramp(n, bf16, 3)
        want = x * 3 + y
        run_emulated(scaled_sum, x, y, out=x)
        assert_same(x, want)
    turned = torch.arange(12.0).view(3, 4).t()
    want = turned + turned
    run_emulated(add, turned, turned, out=turned)
    assert_same(turned, want)


def test_runtime_scalars_of_every_kind() -> None:
    f = wl.fuse(lambda x, n, s: x * s + n * 2, name="scalars")
    x = torch.randn(100)
    for n, s in ((3, 0.5), (-(2**40), -0.0), (2**61, float("inf"))):
        assert_same(run_emulated(f, x, n, s), x * s + n * 2)
    g = wl.fuse(lambda x, a, b: x * (1 - a**b), name="powers")
    assert_same(run_emulated(g, x.double(), 0.9, 3), x.double() * (1 - 0.9**3))


def test_arguments_may_be_called_what_kernels_call_their_variables() -> None:
    dense = wl.fuse(lambda n, k, i, x_v, first, int=2.0: (n * k + i) * x_v - first * int, name="named")
    tensor, spread = torch.randn(700), torch.randn(3, 700).t()[:, 1]
    for x in (tensor, spread, torch.randn(7, 5, 3).permute(2, 0, 1)[:, 1:]):
        assert_same(run_emulated(dense, x, 3.0, 5, x, 2.5), (x * 3.0 + 5) * x - 2.5 * 2.0)


def test_a_host_scalar_is_passed_by_value() -> None:
    traced = trace_function(
        lambda x, s: x * s,
        "by_value",
        (TensorArg("x", f16, (33,), torch.device("cuda")), TensorArg("s", f64, (), torch.device("cpu"))),
        {},
    )
    x, s, out = torch.randn(33, dtype=f16), torch.tensor(1 / 3, dtype=f64), torch.zeros(33, dtype=f16)
    operands = [Operand(f16, NodeLayout((33,), (1,)), 0, 0), Operand(f64, NodeLayout((), ()), 0, 1, on_host=True)]
    (plan,) = plan_kernels(
        traced.expr,
        operands,
        [Target(traced.expr.outputs[0], f16, NodeLayout((33,), (1,)), 0, 0)],
        numerics="fused",
        fast_math=False,
    )
    assert plan.variant.loads == ("vector", "value")
    source = emit_kernel(plan.program, plan.variant)
    run_on(build(source), plan.name, (plan.grid, 1, 1), (THREADS, 1, 1), kernel_arguments(plan, [x, s], [out], (), behind), outputs=[out])
    assert_same(out, (x.float() * s.float()).half())


def test_odd_bool_bytes_are_true_and_results_hold_0_or_1() -> None:
    odd = torch.tensor([0, 1, 4, 254] * 9, dtype=u8).view(torch.bool)
    f = wl.fuse(lambda m: (m.float(), ~m, m & True), name="truth")
    real, flipped, same = run_emulated(f, odd)
    assert real.tolist() == [0.0, 1.0, 1.0, 1.0] * 9
    assert flipped.view(u8).tolist() == [1, 0, 0, 0] * 9
    assert same.view(u8).tolist() == [0, 1, 1, 1] * 9


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, bf16, f32, f64])
def test_what_the_l2_keeps_is_what_is_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.plan.choice.KEPT_AFTER_BYTES", 1)
    f = wl.fuse(lambda x, t: x.float() + t.float(), name="kept_sum")
    x, t = (torch.arange(n).remainder(97).float().to(dtype) for n in (3 * 16 * 48, 16 * 48))
    x, t = x.view(3, 16, 48), t.view(16, 48)
    assert "load_kept<" in f.plan(x, t, target="sm_90").kernels[0].source
    assert_same(run_emulated(f, x, t), x.float() + t.float())


def test_a_planted_fault_is_found() -> None:
    """The last block without its bounds reads and writes beyond the end."""
    plan = add.plan(torch.ones(33), torch.ones(33), target="sm_90").kernels[0]
    source = plan.source.replace("const bool is_full = i + 4 <= n;", "const bool is_full = true;")
    assert source != plan.source
    tensors, out = [torch.ones(33), torch.ones(33)], torch.zeros(33)
    with pytest.raises(EmulatorError, match=r"overflow|poison|outside"):
        run_on(
            build(source),
            plan.name,
            (1, 1, 1),
            (THREADS, 1, 1),
            kernel_arguments(plan.plan, tensors, [out], (), behind),
            outputs=[out],
        )


def test_a_variant_decides_the_text() -> None:
    """Shapes, strides and scalar values of one class share one source."""
    plans = [add.plan(torch.ones(n), torch.ones(n), target="sm_90").kernels[0].plan for n in (1, 1000, 2**20)]
    assert len({plan.variant for plan in plans}) == 1
