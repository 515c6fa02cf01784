"""Losses without a reduction, gates and slopes, degrees and memory formats: what their spellings make of torch's arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
X = torch.tensor([-2.0, -0.5, 0.0, 0.25, 1.5, 3.0], dtype=f64)
Y = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0], dtype=f64)
P, Q = torch.tensor([0.0, 0.1, 0.5, 0.75, 1.0, 0.3], dtype=f64), torch.tensor([0.5, 0.0, 1.0, 0.25, 1.0, 0.6], dtype=f64)
W = torch.tensor([1.0, 2.0, 0.5, 0.0, 3.0, 1.0], dtype=f64)


def each(function: Callable[..., float], *operands: torch.Tensor) -> list[float]:
    """``function`` of every element, in Python."""
    return [function(*values) for values in zip(*(x.tolist() for x in operands), strict=True)]


def stirling(n: float) -> float:
    return n * math.log(n) - n + 0.5 * math.log(2 * math.pi * n) if n > 1 else 0


def gaussian(x: float, y: float, variance: float) -> float:
    variance = max(variance, 0.5)
    return 0.5 * (math.log(variance) + (x - y) ** 2 / variance + math.log(2 * math.pi))


def logistic_entropy(x: float, target: float) -> float:
    """With a positive weight of 2."""
    return 2 * target * math.log1p(math.exp(-x)) + (1 - target) * math.log1p(math.exp(x))


LOSSES: list[tuple[str, Callable[..., Any], tuple[torch.Tensor, ...], list[float]]] = [
    ("l1", lambda x, y: F.l1_loss(x, y, reduction="none"), (X, Y), [3, 0.5, 1, 1.25, 0.5, 4]),
    ("mse", lambda x, y: F.mse_loss(x, y, reduction="none"), (X, Y), [9, 0.25, 1, 1.5625, 0.25, 16]),
    ("smooth", lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=2.0), (X, Y), [2, 0.0625, 0.25, 0.390625, 0.0625, 3]),
    ("smooth, beta 0", lambda x, y: F.smooth_l1_loss(x, y, reduction="none", beta=0), (X, Y), [3, 0.5, 1, 1.25, 0.5, 4]),
    ("huber", lambda x, y: F.huber_loss(x, y, reduction="none", delta=2.0), (X, Y), [4, 0.125, 0.5, 0.78125, 0.125, 6]),
    ("margin", lambda x, y, t: F.margin_ranking_loss(x, y, t, margin=0.5, reduction="none"), (X, Y, Y), [3.5, 1, 1.5, 1.75, 0, 4.5]),
    ("hinge", lambda x, y: F.hinge_embedding_loss(x, y, margin=2.0, reduction="none"), (X, Y), [-2, 2.5, 0, 1.75, 1.5, 0]),
    ("soft margin", lambda x, y: F.soft_margin_loss(x, y, reduction="none"), (X, Y),
     each(lambda x, y: math.log1p(math.exp(-x * y)), X, Y)),
    ("entropy", lambda p, q, w: F.binary_cross_entropy(p, q, w, reduction="none"), (P, Q, W),
     [50, 2 * -math.log(0.9), 0.5 * math.log(2), 0, 0, -0.6 * math.log(0.3) - 0.4 * math.log(0.7)]),
    ("logits", lambda x, q: F.binary_cross_entropy_with_logits(x, q, reduction="none", pos_weight=torch.full_like(x, 2.0)), (X, Q),
     each(logistic_entropy, X, Q)),
    ("poisson", lambda x, w: F.poisson_nll_loss(x, w, reduction="none", full=True), (X, W),
     each(lambda x, y: math.exp(x) - y * x + stirling(y), X, W)),
    ("kl", lambda x, q: F.kl_div(x, q, reduction="none"), (X, Q),
     each(lambda x, y: y * math.log(y) - y * x if y else 0, X, Q)),
    ("kl, logarithms", lambda x, y: F.kl_div(x, y, reduction="none", log_target=True), (X, Y),
     each(lambda x, y: math.exp(y) * (y - x), X, Y)),
    ("gaussian", lambda x, y, w: F.gaussian_nll_loss(x, y, w, reduction="none", full=True, eps=0.5), (X, Y, W),
     each(gaussian, X, Y, W)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "loss", "operands", "want"), LOSSES, ids=[name for name, *_ in LOSSES])
def test_losses(name: str, loss: Callable[..., Any], operands: tuple[torch.Tensor, ...], want: list[float]) -> None:
    for dtype, rtol in ((f64, 1e-12), (f32, 1e-6)):
        got = wl.fuse(loss)(*(x.to(dtype) for x in operands))
        assert got.dtype == dtype
        torch.testing.assert_close(got, torch.tensor(want, dtype=dtype), rtol=rtol, atol=rtol)
    wl.fuse(loss).plan(*(x.to(bf16) for x in operands), target="sm_90")


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_reduction_is_refused_with_its_line(reduction: str) -> None:
    with pytest.raises(wl.TraceError, match=rf"mse_loss with reduction='{reduction}' adds up elements.*'none'.*test_losses\.py"):
        wl.fuse(lambda x, y: F.mse_loss(x, y, reduction=reduction))(X, Y)
    with pytest.raises(wl.TraceError, match="adds up elements"):
        wl.fuse(lambda x, y: F.mse_loss(x, y, reduce=False, reduction="none"))(X, Y)


def test_max_and_min_are_of_two_tensors() -> None:
    assert torch.equal(wl.fuse(lambda x, y: torch.max(x, other=y) - x.min(y))(X, Y), (X - Y).abs())
    for refused in (lambda x: x.max(), lambda x: torch.min(x, 0), lambda x: torch.max(x, dim=0)):
        with pytest.raises(wl.TraceError, match="over the elements of a tensor"):
            wl.fuse(refused)(X)


def test_gates_and_slopes() -> None:
    packed = torch.stack((X, Y), 1)
    want = X / (1 + torch.exp(-Y))
    torch.testing.assert_close(wl.fuse(lambda x: F.glu(x, 1))(packed)[:, 0], want)
    torch.testing.assert_close(wl.fuse(lambda x: F.glu(x, dim=0))(torch.cat((X, Y))), want)
    with pytest.raises(wl.TraceError, match="size 5 is odd"):
        wl.fuse(F.glu)(X[:5])
    image, slopes = X.view(1, 2, 3), torch.tensor([0.5, 2.0], dtype=f64)
    assert wl.fuse(lambda x, w: F.prelu(x, w))(image, slopes).tolist() == [[[-1.0, -0.25, 0.0], [0.25, 1.5, 3.0]]]
    assert wl.fuse(lambda x, w: F.prelu(x, w))(X, slopes[:1]).tolist() == [-1.0, -0.25, 0.0, 0.25, 1.5, 3.0]
    assert wl.fuse(lambda x: F.rrelu(x, 0.25, 0.75))(X).tolist() == [-1.0, -0.25, 0.0, 0.25, 1.5, 3.0]
    assert wl.fuse(lambda x: F.rrelu(x))(X.view(2, 3).t()).stride() == F.rrelu(X.view(2, 3).t()).stride() == (2, 1)
    with pytest.raises(wl.TraceError, match="random slopes"):
        wl.fuse(lambda x: F.rrelu(x, training=True))(X)


def _entropy(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
    return F.binary_cross_entropy(x, y, weight, reduction="none")


def _ranking(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return F.margin_ranking_loss(x, y, z, reduction="none")


def _gaussian(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(x, y, z, reduction="none")


@pytest.mark.parametrize(
    ("function", "allowed", "refused"),
    [
        (F.prelu, ((2, 3, 4), (3,)), [((2, 1, 4), (3,)), ((2, 3, 4), (4,)), ((2, 3, 4), (0,)), ((2, 1, 4), (0,))]),
        (F.prelu, ((5,), (1,)), [((5,), (5,)), ((5,), (0,))]),
        (F.prelu, ((), (1,)), [((), (3,)), ((), (0,))]),
        (F.prelu, ((2, 3), ()), [((2, 3), (1, 1)), ((2, 3), (2, 3)), ((2, 3), (1, 1, 3))]),
        (F.prelu, ((0, 3, 2), (3,)), [((0, 3, 2), (2,))]),
        (_entropy, ((2, 3), (2, 3)), [((2, 3), (2, 1)), ((1, 3), (2, 3)), ((2, 3), (3,))]),
        (_entropy, ((2, 3), (2, 3), (3,)), [((1, 3), (1, 3), (2, 3))]),
        (
            lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
            ((2, 3), (2, 3)),
            [((2, 3), (2, 1)), ((1, 3), (2, 3)), ((2, 3), ())],
        ),
        (lambda x, y: F.soft_margin_loss(x, y, reduction="none"), ((2, 3), (2, 1)), [((2, 1), (2, 3)), ((3,), (2, 3))]),
        (_ranking, ((2, 3), (2, 1), (1, 3)), [((2, 3), (2, 3), (3,)), ((2, 3), (3,), (2, 3))]),
        (_gaussian, ((2, 3), (2, 3), (2, 1)), [((2, 3), (2, 3), (1, 1)), ((2, 3), (2, 3), (3,))]),
        (_gaussian, ((2, 3), (2, 3), (2,)), [((2, 3), (2, 3), (3,))]),
    ],
)  # fmt: skip
def test_shapes_that_torch_refuses_are_refused(
    function: Callable[..., Any], allowed: tuple[tuple[int, ...], ...], refused: list[tuple[tuple[int, ...], ...]]
) -> None:
    """Also by what has been traced for shapes that it takes."""
    fused = wl.fuse(lambda *tensors: function(*tensors), name="fused")
    given = [torch.rand(shape, dtype=f64) for shape in allowed]
    torch.testing.assert_close(fused(*given), function(*given))
    for shapes in refused:
        tensors = [torch.rand(shape, dtype=f64) for shape in shapes]
        with pytest.raises((RuntimeError, ValueError)):
            function(*tensors)
        for call in (fused, lambda *t: fused.plan(*t, target="sm_90")):
            with pytest.raises(wl.LayoutError):
                call(*tensors)


def test_degrees() -> None:
    assert wl.fuse(lambda x: torch.polygamma(1, x))(torch.ones(1, dtype=f64)).item() == pytest.approx(
        math.pi**2 / 6, rel=1e-8
    )  # torch's, on the CPU
    assert wl.fuse(lambda x: x.polygamma(0))(torch.ones(1, dtype=f64)).item() == pytest.approx(-0.5772156649015329, rel=1e-14)
    assert wl.fuse(lambda x, n: torch.special.legendre_polynomial_p(x, n))(torch.tensor([0.5], dtype=f64), 2).item() == -0.125
    p = wl.fuse(lambda x: torch.mvlgamma(x, 3))(torch.tensor([4.0], dtype=f64)).item()
    assert p == pytest.approx(1.5 * math.log(math.pi) + math.lgamma(4) + math.lgamma(3.5) + math.lgamma(3), rel=1e-14)


@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.to(memory_format=torch.channels_last), lambda x: x.transpose(1, 3)])
@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.double(memory_format=torch.channels_last),
        lambda x: x.to(torch.float64, memory_format=torch.contiguous_format),
        lambda x: x.float(memory_format=torch.channels_last),
        lambda x: x.float(memory_format=torch.contiguous_format),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.contiguous_format),
    ],
)
def test_memory_formats(call: Callable[..., Any], make: Callable[..., Any]) -> None:
    x = make(torch.arange(120.0).view(2, 3, 4, 5))
    if x.shape[1] == 5 and call(x) is x:
        pytest.skip("torch keeps strides that are in neither format")
    got, want = wl.fuse(call)(x), call(x)
    assert (got.stride(), got.dtype) == (want.stride(), want.dtype)
    assert torch.equal(got, want)


def test_a_memory_format_of_other_dims_is_refused() -> None:
    with pytest.raises(wl.TraceError, match="channels_last is for tensors of 4 dims, got one of 1"):
        wl.fuse(lambda x: x.double(memory_format=torch.channels_last))(X.float())


def test_the_parts_of_an_argument_are_views_of_it() -> None:
    z = torch.complex(X, Y)
    real, imag = wl.fuse(lambda z: (z.real, torch.imag(z)[1:]))(z)
    assert (real.data_ptr(), real.stride()) == (z.data_ptr(), (2,))
    assert (imag.data_ptr(), imag.stride()) == (z.data_ptr() + 8 + 16, (2,))
    assert torch.equal(real, X)
    assert torch.equal(imag, Y[1:])
    assert wl.fuse(lambda z: z.real * 2)(z).stride() == (1,)


def test_special_constants_and_parts() -> None:
    x = torch.tensor([[1, -2], [3, 0]], dtype=torch.int32).t()
    assert wl.fuse(lambda x, v: torch.fill(x, v))(x, torch.tensor(2.75)).tolist() == [[2, 2], [2, 2]]
    assert wl.fuse(lambda x: x.isreal())(torch.tensor([1 + 0j, 1j])).tolist() == [True, False]
    assert wl.fuse(lambda x: torch.alias_copy(x))(x).stride() == (2, 1)
    assert wl.fuse(lambda x: torch.zeros_like(x, device="cpu"))(x).stride() == (1, 2)
    with pytest.raises(wl.TraceError, match="device is cuda"):
        wl.fuse(lambda x: torch.zeros_like(x, device="cuda"))(x)
