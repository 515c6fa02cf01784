"""Dropout, uniform numbers and masks from given random integers, worked out by hand or with Philox by Python's integers."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.philox import integers
from wideload.draws import DRAW_OPS, DRAW_SPELLINGS

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def drawn(bits: int, x: torch.Tensor, stream: int = 0, seed: int = 5) -> torch.Tensor:
    """What a call after ``torch.manual_seed(seed)`` draws for each element of ``x``."""
    torch.manual_seed(seed)
    key = torch.randint(-(2**63), 2**63 - 1, (1,)).item()
    torch.manual_seed(seed)
    return integers(int(key), stream, bits, torch.arange(x.numel()).view(x.shape))


@pytest.mark.parametrize(("dtype", "bits", "digits"), [(f16, 16, 11), (bf16, 16, 8), (f32, 32, 24), (f64, 53, 53)], ids=str)
def test_uniform_numbers_lie_below_one_on_a_grid(dtype: torch.dtype, bits: int, digits: int) -> None:
    (op,) = (op for op in DRAW_OPS.values() if op.name == f"uniform_{ {f16: 'f16', bf16: 'bf16', f32: 'f32', f64: 'f64'}[dtype] }")
    got = op.torch(torch.tensor([0, 2**bits - 1, 2 ** (bits - 1), 2 ** (bits - digits)]))
    assert got.dtype == dtype
    assert got.tolist() == [0.0, 1 - 2.0**-digits, 0.5, 2.0**-digits]
    x = torch.zeros(3, 41, dtype=dtype)
    want = (drawn(bits, x) >> bits - digits).double() / 2**digits
    assert torch.equal(wl.fuse(torch.rand_like)(x).double(), want)


def test_rand_like_of_another_dtype() -> None:
    x = torch.zeros(50, dtype=torch.int32)
    want = (drawn(32, x) >> 8).float() / 2**24
    assert torch.equal(wl.fuse(lambda v: torch.rand_like(v, dtype=f32))(x), want)
    with pytest.raises(wl.DtypeError, match="rand_like makes f16, bf16, f32, f64, not i32"):
        wl.fuse(torch.rand_like)(x)


@pytest.mark.parametrize(
    ("p", "bits", "threshold"),
    [
        (0.3, 16, 19661),
        (0.5, 16, 32768),
        (0.1, 16, 6554),
        (1e-3, 32, 4294967),
        (1e-5, 32, 42950),
        (0.999995, 32, 4294945821),
        (1.0, 16, 65536),
        (True, 16, 65536),
    ],
)
def test_a_probability_takes_as_few_bits_as_hold_it(p: float, bits: int, threshold: int) -> None:
    """0.3 * 65536 = 19660.8, off by 1e-5; 1e-3 * 65536 = 65.536, off by 0.7 %."""
    x = torch.randn(7, 31)
    _, draw, below, _ = DRAW_SPELLINGS[F.dropout](x, p).operands
    assert (draw.bits, below) == (bits, threshold)
    kept = drawn(bits, x) >= threshold
    scale = torch.tensor(1 / (1 - p) if p < 1 else 0.0)
    got = wl.fuse(lambda v: F.dropout(v, p))(x)
    assert torch.equal(got, x * (kept * scale))
    assert torch.equal(torch.signbit(got), torch.signbit(x))
    mask = drawn(bits, x) < threshold
    assert torch.equal(wl.fuse(lambda v: torch.bernoulli(v, p))(x), mask.float())


class Runtime:
    """A number that a call brings, as the trace hands it to a spelling: what is derived of it is computed here at once."""

    def __init__(self, value: float) -> None:
        self.value = value

    def derived(self, fn: Callable[[float], Any], kind: type) -> Any:
        return kind(fn(self.value))


_NEAR_ENDS = [digits * 10.0**-power for power in range(2, 7) for digits in (1, 1.5, 2, 3, 5, 7, 9.3)]
PROBABILITIES = [*_NEAR_ENDS, *(1 - p for p in _NEAR_ENDS), *(n / 97 for n in range(1, 97)), 0.9999, 0.999995, 1 - 1e-6]


@pytest.mark.parametrize("given", [float, Runtime])
def test_probabilities_are_held_at_both_ends(given: Callable[[float], Any]) -> None:
    """The shares of integers on both sides of the threshold, exactly: within 0.1 % of p and of 1 - p, which dropout divides by."""
    x = torch.ones(4)
    for p in PROBABILITIES:
        _, draw, threshold, scale = DRAW_SPELLINGS[F.dropout](x, given(p)).operands
        kept = 1 - Fraction(threshold, 2**draw.bits)
        assert abs(kept * Fraction(scale) - 1) <= Fraction(1, 1000), p
        assert abs((1 - kept) / Fraction(p) - 1) <= Fraction(1, 1000), p
        _, draw, threshold = DRAW_SPELLINGS[torch.bernoulli](x, given(p)).operands
        assert Fraction(threshold, 2**draw.bits) == 1 - kept
    for p in (0.0, 1.0):
        _, draw, threshold = DRAW_SPELLINGS[torch.bernoulli](x, given(p)).operands
        assert threshold == p * 2**draw.bits


def test_a_runtime_probability_takes_32_bits() -> None:
    f = wl.fuse(lambda v, p: F.dropout(v, p))
    x = torch.randn(200)
    for p in (0.25, 0.3, 0.0, 1.0, 1):
        kept = drawn(32, x) >= round(p * 2**32)
        assert torch.equal(f(x, p), x * (kept * torch.tensor(1 / (1 - p) if p < 1 else 0.0)))
    for p in (-0.1, 1.5, float("nan")):
        with pytest.raises(wl.RangeError, match="probability has to be between 0 and 1"):
            f(x, p)
        with pytest.raises(wl.RangeError, match=f"dropout probability has to be between 0 and 1, but got {p}"):
            wl.fuse(lambda v, p=p: F.dropout(v, p), static=("p",))(x)


def test_bernoulli_compares_with_each_element() -> None:
    p = torch.rand(300, generator=torch.Generator().manual_seed(1))
    want = (drawn(32, p) >> 8).float() / 2**24 < p
    got = wl.fuse(torch.bernoulli)(p)
    assert torch.equal(got, want.float())
    assert wl.fuse(torch.bernoulli)(torch.tensor([0.0, 1.0] * 50)).tolist() == [0.0, 1.0] * 50


def test_each_draw_has_a_stream_of_its_own() -> None:
    x = torch.zeros(100)
    first, second = drawn(32, x, 0), drawn(32, x, 1)
    got = wl.fuse(lambda v: (torch.rand_like(v), torch.rand_like(v)))(x)
    assert torch.equal(got[0], (first >> 8).float() / 2**24)
    assert torch.equal(got[1], (second >> 8).float() / 2**24)


def test_a_draw_has_the_shape_that_it_was_drawn_for() -> None:
    """A bias that is dropped out drops whole columns; elements count in row-major order, whatever the strides; views keep them."""
    bias, x = torch.ones(31), torch.zeros(7, 31)
    kept = drawn(16, bias) >= 32768
    assert torch.equal(wl.fuse(lambda v, b: v + F.dropout(b))(x, bias), (kept * 2.0).expand(7, 31))
    y = torch.ones(31, 7).t()
    kept = drawn(16, y) >= 32768
    assert torch.equal(wl.fuse(lambda v: F.dropout(v))(y), kept * 2.0)
    drawn(16, y)
    assert torch.equal(wl.fuse(lambda v: F.dropout(v)[2:, ::3].t())(y), (kept * 2.0)[2:, ::3].t())


def test_what_does_not_drop_is_the_argument_itself() -> None:
    x = torch.ones(3)
    for f in (lambda v: F.dropout(v, 0.0), lambda v: F.dropout(v, 0.7, training=False), torch.nn.Dropout(0.5).eval()):
        state = torch.get_rng_state()
        assert wl.fuse(f)(x) is x
        assert torch.equal(torch.get_rng_state(), state)  # nothing was drawn


def test_the_spellings_of_dropout_draw_alike() -> None:
    x = torch.ones(400)
    results = []
    for f in (
        lambda v: F.dropout(v, 0.25),
        lambda v: torch.dropout(v, 0.25, True),
        torch.nn.Dropout(0.25),
        lambda v: F.dropout(v * 1, 0.25, inplace=True),
    ):
        torch.manual_seed(8)
        results.append(wl.fuse(f)(x))
    assert all(torch.equal(result, results[0]) for result in results)
    assert {0.0, torch.tensor(1 / 0.75).item()} == set(results[0].tolist())


@pytest.mark.parametrize("numerics", ["fused", "eager"])
@pytest.mark.parametrize("dtype", [bf16, f16, f64], ids=str)
def test_dropout_of_other_dtypes(dtype: torch.dtype, numerics: Any) -> None:
    x = torch.randn(200, dtype=f64).to(dtype)
    kept = drawn(16, x) >= 19661
    wide = f64 if dtype == f64 else f32
    want = (x.to(wide) * (kept * torch.tensor(1 / 0.7, dtype=wide))).to(dtype)
    assert torch.equal(wl.fuse(lambda v: F.dropout(v, 0.3), numerics=numerics)(x), want)


def test_the_gradient_has_the_mask() -> None:
    x = torch.randn(50, requires_grad=True)
    y = wl.fuse(lambda v: F.dropout(v, 0.5) * 3)(x)
    torch.rand(9)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.where(y != 0, 6.0, 0.0))
    assert 0 < (y != 0).sum() < 50


@pytest.mark.parametrize(
    ("function", "error", "what"),
    [
        (lambda v: F.dropout(v, 0.5, inplace=True), wl.TraceError, "would write into an argument"),
        (lambda v: torch.dropout_(v, 0.5, True), wl.TraceError, "not an elementwise op"),
        (lambda v: (v + 1).bernoulli_(), wl.TraceError, "not an elementwise op"),
        (lambda v: F.dropout(v.long(), 0.5), wl.DtypeError, "dropout takes a floating-point tensor, not i64"),
        (lambda v: torch.bernoulli(v.long()), wl.DtypeError, "bernoulli takes a floating-point tensor, not i64"),
        (lambda v: torch.bernoulli(v, 2), wl.RangeError, "bernoulli has to be between 0 and 1, but got 2"),
        (lambda v: torch.rand_like(v, device="cpu"), wl.TraceError, "unexpected keyword argument 'device'"),
        (lambda v: torch.rand(3) + v, wl.TraceError, "torch.rand"),
        (lambda v: F.alpha_dropout(v, 0.5), wl.TraceError, "not an elementwise op"),
    ],
)
def test_what_is_refused(function: Callable[..., Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        wl.fuse(function)(torch.ones(4))
