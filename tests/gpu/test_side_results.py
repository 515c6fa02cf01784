"""One value of all elements on a GPU: every family, size and special value, streams, graphs, shortcuts, lists, and blocks that race."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.gpu.test_dense import DEVICE, assert_same, random
from wideload import ops

pytestmark = pytest.mark.gpu

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SIZES = (0, 1, 7, 31, 32, 33, 511, 512, 513, 1000, 4097, 1_000_003)


def product(x: Any, y: Any) -> Any:
    z = x * y
    return z, wl.amax(z), wl.any_nonfinite(x)


beside = wl.fuse(product)
alone = wl.fuse(lambda x: (wl.amax(x), wl.any_nonfinite(x)), name="alone")


def draw(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=f32).to(dtype)


def check(x: torch.Tensor, y: torch.Tensor) -> None:
    wide = x.to(f64 if x.dtype == f64 else f32) * y
    for _ in range(2):  # the second call takes the shortcut
        z, largest, found = beside(x, y)
        assert_same(z, x * y)
        assert_same(largest, wl.amax(wide))
        assert_same(found, wl.any_nonfinite(x))
        for got, due in zip(alone(x), (wl.amax(x), wl.any_nonfinite(x)), strict=True):
            assert_same(got, due)


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_every_size_and_offset(size: int, dtype: torch.dtype) -> None:
    for offset in (0, 1, 3):
        x, y = draw(size + offset, dtype=dtype)[offset:], draw(size + offset, dtype=f64 if dtype == f64 else f32)[offset:]
        check(x, y)
        if size:
            x[-1] = -1000.0
            check(x, y)


def test_every_family_and_special_values() -> None:
    views = (
        (draw(512, 1024), draw(512, 1024)),
        (draw(513, 1025)[:, 1:], draw(1024)),
        (draw(333, 777)[:, ::2], draw(333, 1)),
        (draw(500, 700), draw(700, 500).t()),
        (draw(8192, 4096), draw(4096)),
    )
    for x, y in views:
        check(x, y)
        for value in (1e30, -math.inf, math.nan):
            x[-1, -1] = value
            check(x, y)
    for tensor in (random(1 << 20, dtype=f32), -torch.zeros(5, device=DEVICE)):
        for got, due in zip(alone(tensor), (wl.amax(tensor), wl.any_nonfinite(tensor)), strict=True):
            assert_same(got, due)


@pytest.mark.parametrize("order", [1, -1])
def test_blocks_that_all_have_something_larger(order: int) -> None:
    """Rising numbers: as many atomics as there can be; falling ones: one block's."""
    x = torch.arange(1 << 24, device=DEVICE, dtype=f32)
    x = x.flip(0) if order < 0 else x
    for _ in range(5):
        largest, found = alone(x)
        assert (largest.item(), found.item()) == ((1 << 24) - 1, 0)


def test_a_result_does_not_live_on_in_the_next() -> None:
    for value in (5.0, 3.0, 4.0, 0.0):
        x = torch.full((10_000,), value, device=DEVICE)
        largest, found = alone(x)
        kept = largest
        assert (largest.item(), found.item()) == (value, 0)
        alone(x * 2)
        assert kept.item() == value


def test_out_is_overwritten_and_keeps_its_shortcut() -> None:
    largest = wl.fuse(lambda x: wl.amax(x))
    out = torch.full((), 1e9, device=DEVICE)
    for value in (5.0, 3.0, 4.0):
        x = torch.full((10_000,), value, device=DEVICE)
        assert largest(x, out=out) is out
        assert out.item() == value
    x, y = draw(1000), draw(1000)
    outs = (x.clone(), torch.full((), 9.0, device=DEVICE), torch.full((), 9.0, device=DEVICE))
    due = beside(x, y)
    beside(outs[0], y, out=outs)
    for got, want in zip(outs, due, strict=True):
        assert_same(got, want)
    one = torch.tensor(-3.0, device=DEVICE)
    assert largest(one, out=one).item() == 3


def test_a_graph_starts_anew_at_each_replay() -> None:
    x, y = draw(100_000), draw(100_000)
    out = (torch.empty_like(x), torch.empty((), device=DEVICE), torch.empty((), device=DEVICE))
    listed = [draw(n) for n in (5, 4097)]
    beside(x, y)
    beside(x, y, out=out)
    beside.foreach(listed, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z, largest, found = beside(x, y)
        beside(x, y, out=out)
        items = beside.foreach(listed, 2.0)
    for scale, value in ((4.0, 1.0), (1.0, math.inf), (2.0, 0.5)):
        x.copy_(draw(100_000) * scale)
        x[77] = value
        for tensor in listed:
            tensor.normal_()
        graph.replay()
        for got in ((z, largest, found), out):
            for mine, due in zip(got, product(x, y), strict=True):
                assert_same(mine, due)
        for tensor, item in zip(listed, items, strict=True):
            for mine, due in zip(item, product(tensor, 2.0), strict=True):
                assert_same(mine, due)


def test_other_streams() -> None:
    x, y = draw(1 << 20), draw(1 << 20)
    due = product(x, y)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            got = beside(x, y)
    stream.synchronize()
    for mine, want in zip(got, due, strict=True):
        assert_same(mine, want)


@pytest.mark.gpus(2)
def test_another_device() -> None:
    x = torch.randn(1000, device="cuda:1")
    for got, due in zip(alone(x), (wl.amax(x), wl.any_nonfinite(x)), strict=True):
        assert got.device == x.device
        assert_same(got, due)


def test_kernels_of_several_shapes_overlap_on_one_value() -> None:
    def parts(x: Any, y: Any) -> Any:
        return x + 1, y + 1, wl.amax(torch.cat((x, y), -1))

    x, y = draw(1000, 700), draw(1000, 300)
    for value, at in ((50.0, x), (60.0, y)):
        at[3, 5] = value
        assert wl.fuse(parts)(x, y)[2].item() == value


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_lists(dtype: torch.dtype) -> None:
    sizes = (*SIZES, *(n * 31 for n in range(300)))
    xs = [draw(n + n % 3, dtype=dtype)[n % 3 :] for n in sizes]
    xs[3][5] = math.nan
    for got, x in zip(beside.foreach(xs, 2.0), xs, strict=True):
        for mine, due in zip(got, product(x, 2.0), strict=True):
            torch.testing.assert_close(mine.float(), due.float(), rtol=0, atol=0, equal_nan=True)


def test_gradients_are_unscaled_as_gradscaler_does() -> None:
    inv_scale = torch.tensor(1 / 1024, device=DEVICE)
    for special in ((), (math.inf,), (math.nan,)):
        grads = [draw(n) for n in (7, 0, 33, 100_000)]
        for value in special:
            grads[2][5] = value
        theirs, found = [grad.clone() for grad in grads], torch.zeros(1, device=DEVICE)
        torch._amp_foreach_non_finite_check_and_unscale_(theirs, found, inv_scale)
        assert ops.unscale_.foreach(grads, inv_scale).item() == found.item()
        for mine, due in zip(grads, theirs, strict=True):
            assert_same(mine, due)


def test_delayed_scaling_of_fp8() -> None:
    gate, up, scale = draw(512, 1024, dtype=bf16), draw(512, 1024, dtype=bf16), torch.tensor(0.02, device=DEVICE)
    q, largest = ops.swiglu_quantize_fp8(gate, up, scale, with_amax=True)
    assert torch.equal(q.float(), ops.swiglu_quantize_fp8(gate, up, scale).float())
    torch.testing.assert_close(largest, (F.silu(gate.float()) * up.float()).abs().amax(), rtol=1e-6, atol=0)


def test_gradients_and_compiled_calls() -> None:
    x, y = draw(64, 48).requires_grad_(), draw(64, 48)
    for call in (beside, torch.compile(lambda x, y: beside(x, y), fullgraph=True)):
        z, largest, found = call(x, y)
        assert [of.requires_grad for of in (z, largest, found)] == [True, False, False]
        (gradient,) = torch.autograd.grad(z.sum(), x)
        assert torch.equal(gradient, y)
        assert_same(largest, (x * y).detach().abs().amax())
