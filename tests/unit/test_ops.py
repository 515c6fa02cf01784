"""The ready-made functions against torch's own expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import ops

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64


def after_the_query(scores: torch.Tensor, offset: int) -> torch.Tensor:
    return ~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(offset)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False, inverse: bool = False) -> torch.Tensor:
    """By complex numbers: a pair turned by an angle is a product. Tables are [positions, pairs]."""
    pairs = cos.shape[-1]
    turning, rest = x[..., : 2 * pairs].double(), x[..., 2 * pairs :]
    paired = turning.unflatten(-1, (pairs, 2)) if interleaved else turning.unflatten(-1, (2, pairs)).transpose(-1, -2)
    turn = torch.complex(cos.double(), -sin.double() if inverse else sin.double()).unsqueeze(-2)
    turned = torch.view_as_real(torch.view_as_complex(paired.contiguous()) * turn)
    turned = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8_MAX = {e4m3: 448.0, e5m2: 57344.0}

PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "bias_gelu": lambda x, bias, approximate="none": F.gelu(x + bias, approximate=approximate),
    "bias_silu_mul": lambda x, bias, y: F.silu(x + bias) * y,
    "bias_dropout_add": lambda x, bias, residual, p, training=True: F.dropout(x + bias, p, training) + residual,
    "causal_mask": lambda scores, value=-math.inf, offset=0: scores.masked_fill(after_the_query(scores, offset), value),
    "rope": lambda x, cos, sin, **kwargs: rotated(x, cos, sin, **kwargs),
    "clip": lambda x, lo=None, hi=None: torch.clamp(x, lo, hi),
    "quantize_fp8": lambda x, scale, dtype=e4m3: (x.float() / scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype),
    "dequantize_fp8": lambda q, scale, dtype=bf16: (q.float() * scale).to(dtype),
    "quantize_int8": lambda x, scale, zero_point=0: ((x.float() / scale).round() + zero_point).clamp(-128, 127).to(torch.int8),
    "dequantize_int8": lambda q, scale, dtype=bf16, zero_point=0: ((q.float() - zero_point) * scale).to(dtype),
}


def test_every_function_is_checked_here_and_has_words() -> None:
    assert set(PLAIN) == set(ops.__all__)
    for name in ops.__all__:
        function = getattr(ops, name)
        assert isinstance(function, wl.FusedFunction)
        assert function.__doc__
        assert function.__name__ == name


@pytest.mark.parametrize("dtype", [bf16, f32, f64], ids=str)
@pytest.mark.parametrize("name", ["add", "swiglu", "bias_gelu", "bias_silu_mul"])
def test_values_dtypes_and_strides_are_torchs(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(6, 5, generator=generator, dtype=f64).mul(3).to(dtype) for _ in range(2))
    bias = torch.randn(5, generator=generator, dtype=f64).to(dtype)
    arguments = {"add": (x, y), "swiglu": (x, y), "bias_gelu": (x, bias), "bias_silu_mul": (x, bias, y)}[name]
    turned = tuple(a.t().contiguous().t() if a.ndim == 2 else a for a in arguments)
    for given in (arguments, tuple(a[..., ::2] for a in arguments), turned):
        got = getattr(ops, name)(*given)
        exact = PLAIN[name](*(a.double() for a in given)).to(dtype)
        eps = torch.finfo(dtype).eps
        assert torch.allclose(got.double(), exact.double(), rtol=4 * eps, atol=4 * eps if dtype == f64 else eps / 8)
        want = PLAIN[name](*given)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())


def test_gelu_of_both_kinds() -> None:
    x, bias = torch.linspace(-6, 6, 40).view(8, 5), torch.linspace(-1, 1, 5)
    for approximate in ("none", "tanh"):
        want = F.gelu(x.double() + bias, approximate=approximate)
        assert torch.allclose(ops.bias_gelu(x, bias, approximate=approximate).double(), want, rtol=1e-5, atol=2e-7)
    assert not torch.equal(ops.bias_gelu(x, bias), ops.bias_gelu(x, bias, "tanh"))
    with pytest.raises(wl.TraceError, match="approximate is 'fast'"):
        ops.bias_gelu(x, bias, "fast")


def test_clip_takes_numbers_tensors_or_none() -> None:
    x = torch.tensor([-2.0, -0.5, 0.5, 2.0, torch.nan])
    low, high = torch.full((5,), -1.0), torch.full((5,), 1.0)
    for lo, hi in ((-1.0, 1.0), (None, 1.0), (-1.0, None), (low, high), (low, None), (1.0, -1.0), (-1, 1)):
        got, want = ops.clip(x, lo, hi), torch.clamp(x, lo, hi)
        assert got.tolist()[:4] == want.tolist()[:4]
        assert got[4].isnan()
    with pytest.raises(wl.TraceError, match="at least one of min and max"):
        ops.clip(x)


def test_packed_halves_are_read_in_place() -> None:
    packed = torch.randn(4, 12).to(bf16)
    gate, up = packed.chunk(2, -1)
    assert torch.equal(ops.swiglu(gate, up), ops.swiglu(gate.contiguous(), up.contiguous()))
    kernel = ops.swiglu.plan(gate, up, target="h200").kernels[0]
    assert kernel.name.startswith("swiglu_")
    out = torch.empty(4, 6, dtype=bf16)
    assert ops.swiglu(gate, up, out=out) is out


def test_they_compose() -> None:
    f = wl.fuse(lambda x, b, y: ops.add(ops.bias_silu_mul(x, b, y), x))
    x, b, y = torch.randn(3, 4), torch.randn(4), torch.randn(3, 4)
    assert torch.allclose(f(x, b, y), F.silu(x + b) * y + x)
    assert len(f.plan(x, b, y, target="sm_90").kernels) == 1


@pytest.mark.parametrize("dtype", [bf16, f32, f64], ids=str)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("pairs", [4, 3])
def test_rope_of_both_pairings_whole_and_partial(pairs: int, interleaved: bool, inverse: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 11, 3, 8, generator=generator, dtype=f64).to(dtype)
    angle = torch.arange(11.0, dtype=f64)[:, None] * 0.7 ** torch.arange(pairs)
    cos, sin = (table.to(f64 if dtype == f64 else f32) for table in (angle.cos(), angle.sin()))
    eps = torch.finfo(dtype).eps
    for given in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        got = ops.rope(given, cos, sin, interleaved=interleaved, inverse=inverse)
        want = rotated(given, cos, sin, interleaved, inverse)
        assert (got.dtype, got.shape) == (dtype, x.shape)
        assert torch.allclose(got.double(), want.double(), rtol=eps, atol=2 * eps)
        assert torch.equal(got[..., 2 * pairs :], x[..., 2 * pairs :])
    back = ops.rope(got, cos, sin, interleaved=interleaved, inverse=not inverse)
    assert torch.allclose(back.double(), x.double(), rtol=4 * eps, atol=8 * eps)


def test_rope_by_position_ids() -> None:
    x = torch.randn(2, 5, 3, 8)
    angle = torch.arange(16.0)[:, None] * torch.tensor([1.0, 0.5, 0.25, 0.125])
    cos, sin = angle.cos(), angle.sin()
    ids = torch.tensor([[4, 3, 2, 1, 0], [7, 8, 9, 15, 3]])
    got = ops.rope(x, cos, sin, position_ids=ids)
    assert torch.allclose(got, rotated(x, cos[ids], sin[ids]), atol=1e-6)
    assert torch.equal(ops.rope(x, cos=cos, sin=sin, position_ids=ids), got)
    assert torch.equal(ops.rope(x, cos, sin, position_ids=ids[0]), ops.rope(x, cos[ids[0]], sin[ids[0]]))
    out = torch.empty_like(x)
    assert ops.rope(x, cos, sin, position_ids=ids, out=out) is out
    assert torch.equal(out, got)
    assert torch.equal(ops.rope.__wrapped__(x, cos, sin, position_ids=ids), got)
    assert len(ops.rope.plan(x, cos, sin, position_ids=ids, target="sm_90").kernels) == 1
    with pytest.raises(wl.TraceError, match="too many positional arguments"):
        ops.rope(x, cos, sin, True, position_ids=ids)
    with pytest.raises(wl.LayoutError, match="cos and sin have 4 columns, x has 6 components"):
        ops.rope(x[..., :6], cos, sin)


def test_the_gradient_of_rope_turns_back() -> None:
    x, grad = torch.randn(1, 4, 2, 6, requires_grad=True), torch.randn(1, 4, 2, 6)
    angle = torch.arange(4.0)[:, None] * torch.tensor([1.0, 0.5, 0.25])
    for interleaved in (False, True):
        ops.rope(x, angle.cos(), angle.sin(), interleaved=interleaved).backward(grad)
        assert x.grad is not None
        assert torch.allclose(x.grad, ops.rope(grad, angle.cos(), angle.sin(), interleaved=interleaved, inverse=True), atol=1e-6)
        x.grad = None


def test_a_causal_mask() -> None:
    scores = torch.randn(2, 3, 4, 7).to(bf16)
    for offset in (0, 3, -2):
        want = scores.masked_fill(after_the_query(scores, offset), -math.inf)
        assert torch.equal(ops.causal_mask(scores, offset=offset), want)
    assert torch.equal(ops.causal_mask(scores, -5.0), scores.masked_fill(after_the_query(scores, 0), -5.0))
    turned = scores.transpose(-1, -2)
    assert ops.causal_mask(turned).stride() == turned.stride()


def test_bias_dropout_add() -> None:
    x, bias, residual = torch.randn(40, 50), torch.randn(50), torch.randn(40, 50)
    assert torch.equal(ops.bias_dropout_add(x, bias, residual, 0.3, training=False), x + bias + residual)
    assert torch.equal(ops.bias_dropout_add(x, bias, residual, 1.0), (x + bias) * 0 + residual)
    dropped = ops.bias_dropout_add(x, bias, residual, 0.25)
    kept = dropped != residual
    assert abs(kept.double().mean().item() - 0.75) < 0.05
    assert torch.allclose(dropped, torch.where(kept, (x + bias) / 0.75, 0.0) + residual, atol=1e-5)


SCALES = {"tensor": torch.tensor(0.25), "row": torch.tensor([0.5, 0.3, 2.0, 1e-3, 7.0]), "column": torch.tensor([[0.5], [0.1], [3.0]])}


@pytest.mark.parametrize("scale", SCALES)
def test_quantisers_saturate_and_return(scale: str) -> None:
    s = SCALES[scale]
    x = torch.tensor([[1e9, -1e9, 0.3, -0.0, 2.6], [math.inf, -math.inf, 1.0, -3.5, 0.0], [0.04, 100.0, -7.25, 20.0, 1e-9]])
    for dtype in (e4m3, e5m2):
        q = ops.quantize_fp8(x, s, dtype)
        assert q.dtype == dtype
        assert torch.equal(q.float(), PLAIN["quantize_fp8"](x, s, dtype).float())
        assert q.float().abs().max() == FP8_MAX[dtype]
        for to in (bf16, f32):
            assert torch.equal(ops.dequantize_fp8(q, s, to), (q.float() * s).to(to))
    for zero_point in (None, 3, torch.tensor(-5)):
        q = ops.quantize_int8(x, s, zero_point)
        want = torch.round(x.double() / s.double()) + (0 if zero_point is None else zero_point)
        assert torch.equal(q, want.clamp(-128, 127).to(torch.int8))
        assert torch.equal(ops.dequantize_int8(q, s, f32, zero_point), (q.float() - (0 if zero_point is None else zero_point)) * s)
    assert ops.quantize_fp8(torch.tensor([math.nan]), torch.tensor(1.0)).float().isnan().item()
