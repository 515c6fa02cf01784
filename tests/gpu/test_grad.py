"""Gradients on a GPU: backward kernels against torch's autograd in every layout, on streams, in graphs, and how many launches they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator.test_grad import CASES
from tests.unit.test_derivatives import POINTS
from tests.unit.test_torch_op import compose, gradients, laid_out
from wideload import ops

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

swiglu = wl.fuse(lambda gate, up: F.silu(gate) * up, name="swiglu")
bias_gelu = wl.fuse(lambda x, bias: F.gelu(x + bias, approximate="tanh"), name="bias_gelu")
scale = wl.fuse(lambda x, w: x * w, name="scale")


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same layout there, expanded dims and slices included."""
    size = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.as_strided((size,), (1,)).to(DEVICE).as_strided(tensor.shape, tensor.stride())


def launches(run: Callable[[], Any]) -> list[str]:
    """The names of the kernels that ``run`` launches, when everything has been compiled."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return [
        event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA and "mem" not in event.name.lower()
    ]


@pytest.mark.parametrize("case", CASES)
def test_backward_kernels(case: str) -> None:
    function, tensors, num_wanted, grad = CASES[case]
    got = [on_gpu(tensor).requires_grad_(at < num_wanted) for at, tensor in enumerate(tensors)]
    want = [tensor.detach().double().to(DEVICE).requires_grad_(at < num_wanted) for at, tensor in enumerate(tensors)]
    firsts = torch.autograd.grad(wl.fuse(function)(*got), got[:num_wanted], on_gpu(grad))
    wants = torch.autograd.grad(function(*want), want[:num_wanted], grad.double().to(DEVICE))
    for x, first, y in zip(got, firsts, wants, strict=False):
        assert (first.dtype, first.shape, first.stride()) == (x.dtype, x.shape, torch.empty_like(x).stride())
        bound = {bf16: 2**-7, f16: 2**-9, f32: 1e-5, f64: 1e-12}[x.dtype]
        torch.testing.assert_close(first.double(), y, rtol=bound, atol=bound)


def test_gradients_of_compositions_are_torchs() -> None:
    """First and second ones of 60 random functions, in random layouts, compiled where they were not before: half a minute a hundred."""
    for seed in range(60):
        draw = random.Random(seed)
        shapes, function = compose(draw)
        generator = torch.Generator().manual_seed(seed)
        inputs = [laid_out(draw, torch.randn(shape, dtype=f64, generator=generator).to(DEVICE)) for shape in shapes]
        for got, want in zip(gradients(wl.fuse(function), inputs, seed), gradients(function, inputs, seed), strict=True):
            assert (got is None) == (want is None), seed
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-10, msg=lambda text, seed=seed: f"seed {seed}: {text}")


def test_gradients_at_kinks_are_torchs() -> None:
    """Where kernels and torch's own agree on what a NaN, a tie, a zero and an infinity give."""
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        *(F.relu, F.silu, F.gelu, F.elu, F.selu, F.celu, F.hardtanh, F.leaky_relu, F.softplus, F.hardswish, F.mish, F.logsigmoid),
        *(torch.abs, torch.sqrt, torch.rsqrt, torch.log, torch.exp, torch.tanh, torch.sigmoid, torch.erf, torch.atan, torch.square),
        *(lambda t: t.clamp(-1, 1), lambda t: t**3, lambda t: t**0.5, lambda t: t**0, lambda t: torch.maximum(t, t * 2)),
        *(lambda t: torch.where(t > 0, t, t * 0.5), lambda t: F.hardshrink(t), lambda t: F.gelu(t, approximate="tanh")),
    ]
    for dtype in (f32, f64):
        at = torch.tensor(POINTS, dtype=dtype, device=DEVICE)
        for number, function in enumerate(functions):
            got, want = at.clone().requires_grad_(), at.clone().requires_grad_()
            weights = torch.linspace(0.5, 1.5, len(POINTS), dtype=dtype, device=DEVICE)
            (one,) = torch.autograd.grad(wl.fuse(function)(got), got, weights)
            (other,) = torch.autograd.grad(function(want), want, weights)
            bound = 2e-6 if dtype == f32 else 1e-7  # torch's celu and hardsigmoid have fp32 constants in double
            torch.testing.assert_close(
                one, other, rtol=bound, atol=bound, equal_nan=True, msg=lambda text, n=number: f"function {n}: {text}"
            )


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_misaligned_and_wide_gradients(offset: int) -> None:
    for rows, columns in ((1, 4099), (33, 1031), (257, 4096)):
        gate, up = (
            torch.randn(rows, columns + 16, device=DEVICE).to(bf16)[:, offset : offset + columns].requires_grad_() for _ in range(2)
        )
        grad = torch.randn(rows, columns + 5, device=DEVICE).to(bf16)[:, 5 - offset :][:, :columns]
        got = torch.autograd.grad(swiglu(gate, up), (gate, up), grad)
        wide = [x.detach().double().requires_grad_() for x in (gate, up)]
        want = torch.autograd.grad(F.silu(wide[0]) * wide[1], wide, grad.double())
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other.to(bf16), rtol=2**-7, atol=2**-9)


def test_a_bias_receives_its_sum() -> None:
    x, bias = torch.randn(8192, 1024, device=DEVICE).to(bf16).requires_grad_(), torch.randn(1024, device=DEVICE).to(bf16).requires_grad_()
    grad = torch.randn(8192, 1024, device=DEVICE).to(bf16)
    got = torch.autograd.grad(bias_gelu(x, bias), (x, bias), grad)
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    want = torch.autograd.grad(F.gelu(wide[0] + wide[1], approximate="tanh"), wide, grad.double())
    torch.testing.assert_close(got[0].double(), want[0], rtol=2**-7, atol=2**-9)
    error = (got[1].double() - want[1]).abs() / want[1].abs().clamp(min=8)
    assert error.max() < 2**-7  # of sums of 8192 numbers in fp32, rounded once; 0.05 of rounded ones, with torch's own operators


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64], ids=str)
def test_a_scale_receives_its_exact_sum(dtype: torch.dtype) -> None:
    """Products of odd numbers, whose sums are exact; twice, since nothing may depend on which block is first."""
    for rows, accesses in ((32, 1), (33, 3), (71, 17), (300, 37), (8192, 128), (1 << 18, 4)):
        shape = rows, accesses * 16 // dtype.itemsize
        most = 4 if rows > 300 else 8
        x, grad = (torch.randint(-most, most, shape, device=DEVICE).mul(2).add(1).to(dtype) for _ in range(2))
        w = torch.ones(shape[1], device=DEVICE, dtype=dtype, requires_grad=True)
        want = (x.double() * grad.double()).sum(0).to(dtype)
        for _ in range(2):
            (got,) = torch.autograd.grad(scale(x, w), w, grad)
            assert torch.equal(got, want), (rows, accesses)


def test_rows_are_added_up_by_two_kernels() -> None:
    """Where they are whole accesses; else torch adds up what x receives. And in a graph, which captures that the second waits."""
    x, bias = torch.randn(4096, 1024, device=DEVICE).to(bf16).requires_grad_(), torch.randn(1024, device=DEVICE).to(bf16).requires_grad_()
    grad = torch.randn(4096, 1024, device=DEVICE).to(bf16)
    y = bias_gelu(x, bias)
    names = launches(lambda: torch.autograd.grad(y, (x, bias), grad, retain_graph=True))
    assert names == ["bias_gelu_backward_columns", "bias_gelu_backward_total_columns"]
    shifted = torch.empty(grad.numel() + 1, device=DEVICE, dtype=bf16)[1:].view_as(grad).copy_(grad)
    names = launches(lambda: torch.autograd.grad(y, (x, bias), shifted, retain_graph=True))
    assert names[0] == "bias_gelu_backward_rows"
    assert len(names) > 1
    (other,) = torch.autograd.grad(y, bias, shifted, retain_graph=True)
    _, want = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    # Of 4096 terms that torch adds up as bf16: eight times the 0.05 of their roundings, and the results' own. A part of 32 rows has 3.
    torch.testing.assert_close(other, want, rtol=2**-7, atol=0.4)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    x, bias = (tensor.detach().requires_grad_() for tensor in (x, bias))  # whose gradient accumulators belong to no stream yet
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.autograd.grad(bias_gelu(x, bias), (x, bias), grad)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        _, got = torch.autograd.grad(bias_gelu(x, bias), (x, bias), grad)
    for _ in range(3):
        got.zero_()
        graph.replay()
        assert torch.equal(got, want)


def test_second_derivatives_beside_sums() -> None:
    x, w = torch.randn(64, 32, device=DEVICE, dtype=f64, requires_grad=True), torch.randn(32, device=DEVICE, dtype=f64, requires_grad=True)
    assert torch.autograd.gradcheck(wl.fuse(lambda x, w: (x * w).sin()), (x[:40, :4], w[:4]))
    assert torch.autograd.gradgradcheck(wl.fuse(lambda x, w: (x * w).sin()), (x[:40, :4], w[:4]))
    (first,) = torch.autograd.grad(scale(x, w).square().sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(second, 2 * x.detach().square().sum(0))


def test_one_launch_forward_and_one_backward() -> None:
    gate, up = (torch.randn(1024, 1024, device=DEVICE).to(bf16).requires_grad_() for _ in range(2))
    grad = torch.ones(1024, 1024, device=DEVICE, dtype=bf16)
    names = launches(lambda: torch.autograd.grad(swiglu(gate, up), (gate, up), grad))
    assert len(names) == 2, names
    assert names[0].startswith("swiglu_")
    assert names[1].startswith("swiglu_backward")


def test_graphs_streams_and_numbers_on_the_host() -> None:
    f = wl.fuse(lambda x, s: F.dropout(x * s, 0.5))
    x, s = torch.ones(4096, device=DEVICE, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        y = f(x, s)
        gx, gs = torch.autograd.grad(y.sum(), (x, s))
    torch.cuda.synchronize()
    assert gs.device.type == "cpu"
    assert torch.equal(gx, y.detach())  # 6 where kept
    assert gs.item() == pytest.approx(y.sum().item() / 3)

    masked = wl.fuse(lambda x: F.dropout(x, 0.5) * x)
    x = torch.ones(4096, device=DEVICE, requires_grad=True)  # y holds the other's gradient accumulator, which belongs to its stream
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            torch.autograd.grad(masked(x).sum(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        y = masked(x)
        (gx,) = torch.autograd.grad(y.sum(), x)
    seen = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(gx, y.detach() * 2)
        seen.append(y.detach().clone())
    assert not torch.equal(*seen)


def test_an_output_that_is_written_twice_is_noticed() -> None:
    x = torch.ones(8, device=DEVICE, requires_grad=True)
    w = x * 1
    y = wl.fuse(lambda v: v * v)(w)
    with torch.no_grad():
        wl.fuse(lambda v: v + 1)(w, out=w)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_rope_and_lists() -> None:
    x = torch.randn(2, 67, 4, 64, device=DEVICE, dtype=bf16, requires_grad=True)
    angle = torch.arange(67.0, device=DEVICE)[:, None] * 0.9 ** torch.arange(32.0, device=DEVICE)
    grad = torch.randn_like(x)
    for interleaved in (False, True):
        (got,) = torch.autograd.grad(ops.rope(x, angle.cos(), angle.sin(), interleaved=interleaved), x, grad)
        want = ops.rope(grad, angle.cos(), angle.sin(), interleaved=interleaved, inverse=True)
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7)
    items = [torch.randn(n, device=DEVICE, requires_grad=True) for n in (3, 0, 1000)]
    results = swiglu.foreach(items, [item.detach() for item in items])
    for item, (got,) in zip(
        items, [torch.autograd.grad(result.sum(), item) for result, item in zip(results, items, strict=True)], strict=True
    ):
        plain = item.detach().requires_grad_()
        torch.testing.assert_close(got, torch.autograd.grad((F.silu(plain) * item.detach()).sum(), plain)[0])
