"""One value of all elements out of every family of kernels: every element counts, none that is not there does, and no byte beside it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated, run_lists_emulated
from tests.emulator.emulator import EmulatorError, build, run_on
from wideload.emit.kernel import emit_kernel
from wideload.foreach import find_listed
from wideload.lists import split_lists
from wideload.plan import strips

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def both(x: Any, y: Any) -> Any:
    z = x * y
    return z, wl.amax(z), wl.any_nonfinite(z)


beside = wl.fuse(both)
alone = wl.fuse(lambda x, y: (wl.amax(x * y), wl.any_nonfinite(x * y)), name="alone")
of_zero = wl.fuse(lambda x: (x + 1, wl.amax(x.log()), wl.any_nonfinite(x.log())), name="of_zero")
"""Of what a thread takes for elements beyond the end, which are zeros, infinity."""


def draw(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=f64).to(dtype)


def check(f: wl.FusedFunction, *args: Any) -> str:
    """Bit for bit as the reference, NaN as NaN; the family of the kernel."""
    got, want = run_emulated(f, *args), f.reference(*args)
    for mine, due in zip(got, want, strict=True):
        assert mine.dtype == due.dtype
        torch.testing.assert_close(mine, due, rtol=0, atol=0, equal_nan=True)
    (kernel,) = f.plan(*args, target="sm_90").kernels
    return kernel.plan.variant.family


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
def test_sizes_around_accesses_warps_and_blocks(dtype: torch.dtype) -> None:
    count = 16 // dtype.itemsize
    for n in sorted({1, 2, 31, 32, 33, count - 1, count, count + 1, 32 * count - 1, 32 * count, 32 * count + 1}
                    | {128 * count * blocks + more for blocks in (1, 2, 3) for more in (-1, 0, 1)} - {0}):  # fmt: skip
        x, y = draw(n, dtype=dtype), draw(n, dtype=dtype) + 1
        assert check(beside, x, y) in ("dense", "rows")
        x[-1] = -1000  # the last element is the one
        assert check(alone, x, y) in ("dense", "rows")


LAYOUTS = {
    "dense": lambda: (draw(40, 128), draw(40, 128)),
    "rows": lambda: (draw(41, 131)[:, 1:], draw(130)),
    "pitched": lambda: (draw(20, 130), draw(20, 130)),
    "strided": lambda: (draw(33, 63)[:, ::2], draw(33, 1)),
    "tile": lambda: (draw(130, 140), draw(140, 130).t()),
}


def family_of(name: str) -> wl.FusedFunction:
    if name != "pitched":
        return beside

    def joined(x: Any, y: Any) -> Any:
        z = torch.cat((x, y), -1) * 3
        return z, wl.amax(z), wl.any_nonfinite(z)

    return wl.fuse(joined)


@pytest.mark.usefixtures("full_blocks")
@pytest.mark.parametrize("special", [None, -math.inf, math.nan])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_family(name: str, special: float | None) -> None:
    x, y = LAYOUTS[name]()
    if special is not None:
        x[-1, -1] = special
    assert check(family_of(name), x, y) == name
    x[0, 0] = 1e4
    check(family_of(name), x, y)


def test_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strips, "LEAST_STRIPS", 1)
    gelu = wl.fuse(lambda x, bias: (y := torch.nn.functional.gelu(x + bias), wl.any_nonfinite(y), wl.amax(x)))
    x, bias = draw(1 << 11, 1 << 6, dtype=bf16), draw(1 << 6, dtype=bf16)
    for at in ((0, 0), (-1, -1), (777, 33)):
        given = x.clone()
        given[at] = math.inf
        for args in ((given, bias), (given[:-2], bias)):
            got, want = run_emulated(gelu, *args), gelu.reference(*args)
            assert [value.item() for value in got[1:]] == [value.item() for value in want[1:]]
    assert gelu.plan(x, bias, target="sm_90").kernels[0].plan.variant.family == "strips"


def test_only_values_of_views_and_of_one_element_for_all() -> None:
    x = draw(24, 36)
    largest = wl.fuse(lambda x: (wl.amax(x), wl.any_nonfinite(x)))
    for view in (x, x.t(), x[:, ::2], x[1:, 3:-2], x[:1].expand(24, 36), x[:1, :1].expand(24, 36), x[0, 0], x[:, :1], x.expand(3, 24, 36)):
        check(largest, view)


@pytest.mark.parametrize("shape", [(3,), (5, 7), (130,), (3, 33)])
def test_what_is_not_there_does_not_count(shape: tuple[int, ...]) -> None:
    x = draw(*shape).abs() + 1
    for view in (x, x[..., 1:], x[..., ::2], x.t() if x.ndim == 2 else x):
        got, want = run_emulated(of_zero, view), of_zero.reference(view)
        assert got[2].item() == 0
        torch.testing.assert_close(got[1], want[1], rtol=1e-6, atol=1e-7)


def test_negative_zero_and_subnormals() -> None:
    largest = wl.fuse(lambda x: (wl.amax(x), wl.any_nonfinite(x)))
    for values in ([-0.0], [-0.0, 0.0], [2.0**-149], [-(2.0**-149), 0.0]):
        got, _ = run_emulated(largest, torch.tensor(values))
        assert got.item() == max(map(abs, values))
        assert not torch.signbit(got)


def test_several_shapes_are_several_kernels_of_one_value() -> None:
    def parts(x: Any, y: Any) -> Any:
        z = torch.cat((x, y), -1)
        return x + 1, wl.amax(z), wl.amax(y[0])

    x, y = draw(9, 70), draw(9, 40)
    y[3, 3], y[0, 1] = 50.0, 20.0
    f = wl.fuse(parts)
    got = run_emulated(f, x, y)
    assert [value.item() for value in got[1:]] == [50, 20]
    assert len(f.plan(x, y, target="sm_90").kernels) == 3


def test_rounded_and_unrounded_values() -> None:
    f = wl.fuse(lambda x: (x * 2, wl.any_nonfinite(x * 2), wl.amax(x * 2), wl.amax((x * 2).to(bf16)), wl.amax(wl.index(-1) + x)))
    x = draw(300, dtype=f16) * 5000
    x[5] = 40000
    for f_of in (f, wl.fuse(f.__wrapped__, numerics="eager")):
        got, want = run_emulated(f_of, x), f_of.reference(x)
        for mine, due in zip(got, want, strict=True):
            torch.testing.assert_close(mine, due, rtol=0, atol=0, equal_nan=True)
    assert (got[1].item(), got[2].item()) == (1.0, math.inf)
    assert run_emulated(f, x)[2].item() == 80000


def test_out_and_in_place_are_overwritten() -> None:
    x, y = draw(1000), draw(1000)
    want = beside(x, y)
    outs = (x, torch.tensor(1e9), torch.tensor(1.0))
    run_emulated(beside, x, y, out=outs)
    for got, due in zip(outs, want, strict=True):
        assert torch.equal(got, due)


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
def test_lists_in_one_launch(dtype: torch.dtype) -> None:
    xs = [draw(n, dtype=dtype) for n in (1, 5, 0, 1000, 8192)] + [draw(6, 5, dtype=dtype)[1:], draw(dtype=dtype)]
    xs[1][4], xs[3][7] = math.nan, -math.inf
    ys = [x + 2 for x in xs]
    for f in (beside, alone):
        for other in (ys, 2.0):
            got, launches = run_lists_emulated(f, xs, other)
            assert launches == 1
            for mine, due in zip(got, f.foreach(xs, other), strict=True):
                torch.testing.assert_close(mine, due, rtol=0, atol=0, equal_nan=True)
    outs = [(torch.empty_like(x), torch.full((), 9.0, dtype=f64 if dtype == f64 else f32), torch.full((), 9.0)) for x in xs]
    run_lists_emulated(beside, xs, 2.0, out=outs)
    for mine, due in zip(outs, beside.foreach(xs, 2.0), strict=True):
        torch.testing.assert_close(mine, due, rtol=0, atol=0, equal_nan=True)


def test_the_only_element_of_an_item_is_no_place_for_its_value_in_a_launch_for_lists() -> None:
    largest, xs = wl.fuse(lambda x, y: wl.amax(x * y)), [torch.tensor(-3.0), torch.tensor(2.0)]
    for y, due in ((2.0, (0, 1)), (torch.tensor(2.0), (0, 1))):
        lists = split_lists("largest", (), (xs, y), {}, [x.view(()) for x in xs])
        call = find_listed(largest, lists, largest._bind(*lists.at(0)))
        assert call is not None
        assert call.listed.others == due
    long = [draw(8), draw(9)]
    lists = split_lists("largest", (), (long, torch.tensor(2.0)), {}, [torch.empty(()), torch.empty(())])
    call = find_listed(largest, lists, largest._bind(*lists.at(0)))
    assert call is not None
    assert call.listed.others == ()


def test_a_list_of_misaligned_parts_of_zeros_counts_its_own_elements_alone() -> None:
    room = torch.full((64,), math.inf)
    parts = [room[1:8], room[9:10], room[16:31]]
    for part in parts:
        part.fill_(1.0)
    got, _ = run_lists_emulated(alone, parts, 3.0)
    assert [(largest.item(), found.item()) for largest, found in got] == [(3, 0)] * 3


def test_a_thread_that_left_would_be_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator refuses a block of which some threads never come to the barrier."""
    x, y = draw(41, 131)[:, 1:], draw(130)
    monkeypatch.setattr("wideload.emit.rows.inside", lambda program, counter, bound, body: [f"if ({counter} >= {bound}) return;", *body])
    emit_kernel.cache_clear()
    try:
        with pytest.raises(EmulatorError, match="divergent barrier"):
            run_emulated(beside, x, y)
    finally:
        monkeypatch.undo()
        emit_kernel.cache_clear()


def test_lanes_of_a_warp_exchange_words() -> None:
    """Each warp for itself: of the first, all lanes leave before the second's have shuffled."""
    source = """
extern "C" __global__ void lanes(long long* out, const long long* in)
{
    const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long word = in[i];
    if (!__any_sync(0xffffffffu, word > 40)) return;
    for (int lanes = 1; lanes < 8; lanes *= 2) word = word * 10 + __shfl_xor_sync(0xffffffffu, word, lanes);
    out[i] = word;
}
"""
    program, numbers = build(source), torch.arange(128)
    due = numbers.tolist()
    for lanes in (1, 2, 4):
        due = [10 * word + due[thread ^ lanes] for thread, word in enumerate(due)]
    out = torch.full_like(numbers, -1)
    run_on(program, "lanes", (2, 1, 1), (64, 1, 1), [out, numbers], outputs=[out])
    assert out.tolist() == [-1] * 32 + due[32:]
    with pytest.raises(EmulatorError, match="in a block of 34 threads, which has a partial warp"):
        run_on(program, "lanes", (1, 1, 1), (34, 1, 1), [out, numbers], outputs=[out])


def test_lanes_exchange_bits_whatever_their_type() -> None:
    source = """
extern "C" __global__ void lanes(float* out, const float* in)
{
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1) + (float)__shfl_xor_sync(0xffffffffu, (double)in[threadIdx.x], 2);
}
"""
    numbers = torch.arange(32) / 4 - 3
    out, lanes = torch.zeros(32), torch.arange(32)
    run_on(build(source), "lanes", (1, 1, 1), (32, 1, 1), [out, numbers], outputs=[out])
    assert torch.equal(out, numbers[lanes ^ 1] + numbers[lanes ^ 2])
    with pytest.raises(EmulatorError, match=r"kernel\.cu:4 names some lanes of a warp"):
        run_on(build(source.replace("0xffffffffu", "0x1u", 1)), "lanes", (1, 1, 1), (32, 1, 1), [out, numbers], outputs=[out])


def test_a_lane_that_left_is_missed_by_its_warp() -> None:
    source = """
extern "C" __global__ void lanes(long long* out, const long long* in)
{
    if (in[threadIdx.x] == 40) return;
    out[threadIdx.x] = __any_sync(0xffffffffu, 1);
}
"""
    out, numbers = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    with pytest.raises(EmulatorError, match=r"divergent barrier: thread 32 of a block waits .*, thread 40 has returned"):
        run_on(build(source), "lanes", (1, 1, 1), (64, 1, 1), [out, numbers], outputs=[out])
