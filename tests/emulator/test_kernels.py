"""The kernels' own text, run on the CPU: every family, layout, length and alignment against torch, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import wideload as wl
from tests.emulator.emulated import behind, run_emulated
from tests.emulator.emulator import EmulatorError, build, run_on
from wideload.emit.kernel import emit_kernel
from wideload.execute import kernel_arguments
from wideload.plan import THREADS, Operand, Target, plan_kernels
from wideload.replay import NodeLayout
from wideload.trace import TensorArg, trace_function

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


def test_64_bit_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.layout.INT31_MAX", 3)
    f = wl.fuse(lambda x, y: x * 2 + y, name="wide")
    x, y = torch.randn(5, 7, 3).permute(1, 2, 0), torch.randn(3, 1)
    assert f.plan(x, y, target="sm_90").kernels[0].plan.variant.index_bits == 64
    assert_same(run_emulated(f, x, y), x * 2 + y)


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
    plan = add.plan(turned, turned, out=turned, target="sm_90")
    assert "__restrict__" not in plan.source  # the read-only cache would be free to return stale bytes


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
        is_in_place=False,
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


def test_a_planted_fault_is_found() -> None:
    """The last block without its bounds reads and writes beyond the end."""
    plan = add.plan(torch.ones(33), torch.ones(33), target="sm_90").kernels[0]
    source = plan.source.replace("const bool is_full = first + 512 <= n;", "const bool is_full = true;")
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
    """Shapes, strides and scalar values of one class share one source; in place does not."""
    plans = [add.plan(torch.ones(n), torch.ones(n), target="sm_90").kernels[0].plan for n in (1, 1000, 2**20)]
    assert len({plan.variant for plan in plans}) == 1
    assert dataclasses.replace(plans[0].variant, is_in_place=True) != plans[0].variant
