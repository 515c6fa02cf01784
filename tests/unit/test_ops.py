"""The ready-made functions against torch's own expressions."""

from __future__ import annotations

import functools
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
    "cast": lambda x, dtype: x.to(dtype),
    "ema_": lambda target, source, decay: target.copy_(decay * target.double() + (1 - decay) * source.double()),
    "geglu": lambda gate, up, approximate="none": F.gelu(gate, approximate=approximate) * up,
    "lerp": torch.lerp,
    "prefix_mask": lambda scores, prefix, value=-math.inf, offset=0: scores.masked_fill(
        after_the_query(scores, offset) & (torch.arange(scores.shape[-1]) >= prefix), value
    ),
    "reglu": lambda gate, up: F.relu(gate) * up,
    "residual_add_scale": lambda x, residual, scale: residual + x * scale,
    "sliding_window_mask": lambda scores, window, value=-math.inf, offset=0: scores.masked_fill(
        after_the_query(scores, offset) | ~after_the_query(scores, offset - window), value
    ),
    "swiglu_quantize_fp8": lambda gate, up, scale, dtype=e4m3: (
        (F.silu(gate.float()) * up.float() / scale).clamp(-FP8_MAX[dtype], FP8_MAX[dtype]).to(dtype)
    ),
    "unscale": lambda grad, inv_scale: (grad * inv_scale, (~grad.isfinite()).any().float()),
    "unscale_": lambda grad, inv_scale: (~grad.isfinite()).any().float(),
    "dequantize_int8": lambda q, scale, dtype=bf16, zero_point=0: ((q.float() - zero_point) * scale).to(dtype),
}


def test_every_function_is_checked_here_and_has_words() -> None:
    assert set(PLAIN) == set(ops.__all__)
    for name in ops.__all__:
        function = getattr(ops, name)
        assert isinstance(function, wl.FusedFunction)
        assert function.__doc__
        assert function.__name__ == name


@pytest.mark.parametrize("name", [name for name in ops.__all__ if "quantize" in name or name == "bias_dropout_add"])
def test_shapes_and_errors_have_words_and_there_is_an_example(name: str) -> None:
    words = getattr(ops, name).__doc__
    assert "broadcast" in words
    assert "Raises" in words
    assert f">>> {name}(" in words


@pytest.mark.parametrize("dtype", [bf16, f32, f64], ids=str)
@pytest.mark.parametrize("name", ["add", "swiglu", "geglu", "reglu", "bias_gelu", "bias_silu_mul", "residual_add_scale", "lerp"])
def test_values_dtypes_and_strides_are_torchs(name: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(11)
    x, y = (torch.randn(6, 5, generator=generator, dtype=f64).mul(3).to(dtype) for _ in range(2))
    bias = torch.randn(5, generator=generator, dtype=f64).to(dtype)
    special = {"bias_gelu": (x, bias), "bias_silu_mul": (x, bias, y), "residual_add_scale": (x, y, bias), "lerp": (x, y, x)}
    arguments = special.get(name, (x, y))
    turned = tuple(a.t().contiguous().t() if a.ndim == 2 else a for a in arguments)
    for given in (arguments, tuple(a[..., ::2] for a in arguments), turned):
        got = getattr(ops, name)(*given)
        exact = PLAIN[name](*(a.double() for a in given)).to(dtype)
        eps = torch.finfo(dtype).eps
        sums = name in ("residual_add_scale", "lerp")  # of terms up to 100, which may cancel
        atol = 100 * eps if sums else 4 * eps if dtype == f64 else eps / 8
        assert torch.allclose(got.double(), exact.double(), rtol=4 * eps, atol=atol)
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


@pytest.mark.parametrize("offset", [-2, 0, 3])
def test_masks_by_place(offset: int) -> None:
    scores = torch.randn(2, 5, 7)
    for value in (-math.inf, 0.5):
        for width in (0, 1, 3, 9):
            for name in ("sliding_window_mask", "prefix_mask"):
                got, want = (f(scores, width, value, offset) for f in (getattr(ops, name), PLAIN[name]))
                assert torch.equal(got, want), (name, width)
    assert torch.equal(ops.prefix_mask(scores, 0), ops.causal_mask(scores))
    assert torch.equal(ops.sliding_window_mask(scores, 7), ops.causal_mask(scores))


@pytest.mark.parametrize("dtype", [bf16, f32, f64], ids=str)
def test_an_average_moves_in_place(dtype: torch.dtype) -> None:
    targets = [torch.randn(size, dtype=f64).to(dtype) for size in (7, 0, 33)]
    sources = [torch.randn(size, dtype=f64).to(dtype) for size in (7, 0, 33)]
    wants = [PLAIN["ema_"](t.to(f64, copy=True), s, 0.75).to(dtype) for t, s in zip(targets, sources, strict=True)]
    kept = [t.clone() for t in targets]
    for target, source, want in zip(kept, sources, wants, strict=True):
        assert ops.ema_(target, source, 0.75) is target
        torch.testing.assert_close(target, want, rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps)
    returned = ops.ema_.foreach(targets, sources, 0.75)
    for target, one, same in zip(targets, kept, returned, strict=True):
        assert torch.equal(target, one)
        assert same is target
    other = torch.zeros(7, dtype=dtype)
    before = targets[0].clone()
    assert ops.ema_(targets[0], sources[0], 0.5, out=other) is other
    assert torch.equal(targets[0], before)
    with pytest.raises(RuntimeError, match="grad"):
        ops.ema_(torch.zeros(7, dtype=dtype, requires_grad=True), sources[0], 0.5)


def test_swiglu_goes_to_fp8_with_one_rounding() -> None:
    gate, up = (torch.randn(64, 48).mul(8).to(bf16) for _ in range(2))
    scale = torch.rand(64, 1) + 0.1
    for dtype in (e4m3, e5m2):
        got = ops.swiglu_quantize_fp8(gate, up, scale, dtype)
        assert torch.equal(got.float(), PLAIN["swiglu_quantize_fp8"](gate, up, scale, dtype).float())
    with pytest.raises(wl.DtypeError, match=r"swiglu_quantize_fp8 got dtype=torch\.float16"):
        ops.swiglu_quantize_fp8(gate, up, scale, torch.float16)


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
def test_quantising_gives_the_largest_value_too(dtype: torch.dtype) -> None:
    gate, up = (torch.randn(64, 48).mul(8).to(dtype) for _ in range(2))
    scale = torch.rand(64, 1) + 0.1
    y = F.silu(gate.float()) * up.float()
    q, largest = ops.swiglu_quantize_fp8(gate, up, scale, with_amax=True)
    assert torch.equal(q.float(), ops.swiglu_quantize_fp8(gate, up, scale).float())
    torch.testing.assert_close(largest, y.abs().max(), rtol=1e-6, atol=0)
    q, largest = ops.quantize_fp8(gate, scale, e5m2, with_amax=True)
    assert torch.equal(q.float(), ops.quantize_fp8(gate, scale, e5m2).float())
    assert torch.equal(largest, gate.float().abs().max())


def test_gradients_are_unscaled_as_gradscaler_does() -> None:
    def gradients(*special: float) -> list[torch.Tensor]:
        found = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (7, 0, 33)]
        found += [found[2].to(torch.float16)[1:], torch.tensor(3.0)]
        for value in special:
            found[3][5] = value
        return found

    inv_scale = torch.tensor(1 / 1024)
    for special in ((), (math.inf,), (math.nan,), (-math.inf, 65504.0)):
        mine, torchs, found = gradients(*special), gradients(*special), torch.zeros(1)
        for grads in (torchs[:3] + torchs[4:], torchs[3:4]):  # of one dtype each
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found, inv_scale)
        got = ops.unscale_.foreach(mine, inv_scale)
        assert (got.dtype, got.shape, got.item()) == (f32, (), found.item())
        singly = gradients(*special)
        assert max(ops.unscale_(grad, inv_scale).item() for grad in singly) == found.item()
        pairs = ops.unscale.foreach(gradients(*special), inv_scale)
        assert max(flag.item() for _, flag in pairs) == found.item()
        for one, two, (three, _), due in zip(mine, singly, pairs, torchs, strict=True):
            for have in (one, two, three):
                torch.testing.assert_close(have, due.to(have.dtype), rtol=0, atol=0, equal_nan=True)
    assert ops.unscale_.foreach([], inv_scale).item() == 0
    apart = [torch.ones(3), torch.ones(3, device="meta")]
    with pytest.raises(wl.DeviceError, match="got gradients on cpu and meta"):
        ops.unscale_.foreach(apart, 2.0)
    assert apart[0].tolist() == [1, 1, 1]
    for bad in (2.0, None, [2.0]):
        with pytest.raises(wl.WideloadError):
            ops.unscale_(bad, inv_scale)
    with pytest.raises(wl.DtypeError, match="any_nonfinite got a tensor of i32"):
        ops.unscale_(torch.ones(3, dtype=torch.int32), 2)


def test_lists_are_cast() -> None:
    tensors = [torch.randn(size) for size in (5, 0, 17)]
    assert all(torch.equal(a, b.to(bf16)) for a, b in zip(ops.cast.foreach(tensors, bf16), tensors, strict=True))


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


@pytest.mark.parametrize(
    ("ids", "error", "what"),
    [
        ([0, 1, 2], wl.DtypeError, "position_ids is list; allowed: a tensor of torch.int64 or torch.int32"),
        (1.5, wl.DtypeError, "position_ids is float; allowed"),
        (torch.zeros(5), wl.DtypeError, "position_ids is torch.float32; allowed"),
        (torch.zeros(5, dtype=torch.uint8), wl.DtypeError, "position_ids is torch.uint8; allowed"),
        (torch.zeros(5, dtype=torch.bool), wl.DtypeError, "position_ids is torch.bool; allowed"),
        (torch.tensor(3), wl.LayoutError, r"position_ids has the shape \(\); allowed: \[positions\] or \[batch, positions\]"),
        (torch.zeros(1, 2, 5, dtype=torch.int64), wl.LayoutError, r"position_ids has the shape \(1, 2, 5\)"),
        (torch.tensor([3, 16, 2, 1, 0]), wl.RangeError, "position_ids go from 0 to 16, and cos has 16 rows; allowed: -16 to 15"),
        (torch.tensor([3, -17, 2, 1, 0]), wl.RangeError, "position_ids go from -17 to 3"),
        (torch.zeros(5, dtype=torch.int64, device="meta"), wl.DeviceError, "position_ids is on meta and cos on cpu"),
        (torch.zeros(4, dtype=torch.int64), wl.LayoutError, "broadcast"),
    ],
)
def test_rope_refuses_position_ids(ids: Any, error: type[Exception], what: str) -> None:
    x, table = torch.randn(2, 5, 3, 8), torch.randn(16, 4)
    out = torch.full_like(x, 7.0)
    for use in (ops.rope, ops.rope.reference, functools.partial(ops.rope, out=out), functools.partial(ops.rope.plan, target="h200")):
        with pytest.raises(error, match=what):
            use(x, table, table, position_ids=ids)
    assert torch.equal(out, torch.full_like(x, 7.0))


def test_rope_refuses_tables_for_position_ids() -> None:
    x, table, ids = torch.randn(2, 5, 3, 8), torch.randn(16, 4), torch.arange(5)
    with pytest.raises(wl.DtypeError, match="cos is float; allowed beside position_ids: a tensor"):
        ops.rope(x, 1.0, table, position_ids=ids)
    with pytest.raises(wl.LayoutError, match=r"sin has the shape \(5, 1, 4\); allowed beside position_ids: \[positions, dim / 2\]"):
        ops.rope(x, table, table[:5, None], position_ids=ids)
    with pytest.raises(wl.RangeError, match="sin has 4 rows"):
        ops.rope(x, table, table[:4], position_ids=ids)
    with pytest.raises(wl.TraceError, match="missing a required argument: 'sin'"):
        ops.rope(x, table, position_ids=ids)


def test_rope_by_position_ids_however_it_is_called() -> None:
    x, cos, sin = torch.randn(2, 5, 3, 8), torch.randn(16, 4), torch.randn(16, 4)
    ids = torch.tensor([15, -1, 0, 2, -16], dtype=torch.int32)
    want = ops.rope(x, cos[ids], sin[ids], inverse=True)

    class Layer:
        turn = staticmethod(ops.rope)
        method = ops.rope

    assert torch.equal(Layer().turn(x, cos, sin, position_ids=ids, inverse=True), want)
    assert type(Layer().method) is type(ops.rope)
    assert torch.equal(functools.partial(ops.rope, position_ids=ids, inverse=True)(x, cos, sin), want)
    assert torch.equal(ops.rope.reference(x, cos, sin, position_ids=ids, inverse=True), want)
    (listed,) = ops.rope.foreach([x], cos, sin, position_ids=ids, inverse=True)
    assert torch.equal(listed, want)
    assert ops.rope.explain(x, cos, sin, position_ids=ids, target="h200").minimal.value
    empty = ops.rope(x[:, :0], cos, sin, position_ids=ids[:0])
    assert empty.shape == (2, 0, 3, 8)


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


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e8m0fnu, f32, bf16, "e4m3fn"], ids=str)
def test_quantize_fp8_refuses_other_dtypes(dtype: Any) -> None:
    x, scale = torch.tensor([-3.0, 2.0]), torch.tensor(0.5)
    allowed = "allowed: torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz"
    with pytest.raises(wl.DtypeError, match=f"quantize_fp8 got dtype={dtype}; {allowed}"):
        ops.quantize_fp8(x, scale, dtype)
    out = torch.full((2,), 9).to(torch.uint8).view(torch.float8_e8m0fnu)
    with pytest.raises(wl.DtypeError, match=allowed):
        ops.quantize_fp8(x, scale, dtype=dtype, out=out)
    assert out.view(torch.uint8).tolist() == [9, 9]


def test_quantize_fp8_without_negative_zero() -> None:
    x = torch.tensor([-3.0, 1e9, -math.inf, math.nan, -0.0])
    for dtype, top in ((torch.float8_e4m3fnuz, 240.0), (torch.float8_e5m2fnuz, 57344.0)):
        q = ops.quantize_fp8(x, torch.tensor(0.5), dtype).float()
        assert q[:3].tolist() == [-6.0, top, -top]
        assert q[3].isnan()
        assert torch.copysign(torch.ones(()), q[4]) == 1


def test_a_scale_in_fp64_with_dims_divides_in_fp64() -> None:
    """1 / 0.4 is 2.5 in fp32, which goes to the even 2; the fp64 scale is a little smaller, and the quotient goes to 3."""
    x, scale = torch.ones(2), torch.full((2,), 0.4 * (1 - 1e-10), dtype=f64)
    assert ops.quantize_int8(x, scale).tolist() == [3, 3]
    assert ops.quantize_int8(x, scale[0]).tolist() == [2, 2]
    assert ops.quantize_int8(x, scale.float()).tolist() == [2, 2]
    tie, wide = 1.0625, 0.5 + 2.0**-20  # halfway between 1 and 1.125; 1.0625 * wide is a number of fp32
    near = torch.full((2,), wide * (1 - 5.8e-8), dtype=f64)  # rounds to wide in fp32, but moves the quotient by more than half a step
    assert ops.quantize_fp8(x * (tie * wide), near).float().tolist() == [1.125, 1.125]
    assert ops.quantize_fp8(x * (tie * wide), near.float()).float().tolist() == [1.0, 1.0]
    for s in (near, torch.ones(2, dtype=f64)):
        nearly = torch.full((2,), tie * (1 + 1e-10), dtype=f64)
        assert torch.equal(ops.quantize_fp8(nearly, s).float(), ops.quantize_fp8(x * tie, s).float())  # fp64 x is fp32 first
    q = torch.ones(2, dtype=torch.int8)
    assert ops.dequantize_int8(q, scale, f64).tolist() == scale.tolist()
    assert ops.dequantize_fp8(q.to(e4m3), scale, f64).tolist() == scale.tolist()


def test_quantize_int8_of_nan_is_torchs_cast() -> None:
    x = torch.tensor([math.nan] * 40)
    assert torch.equal(ops.quantize_int8(x, torch.tensor(1.0)), x.to(torch.int8))
    assert torch.equal(ops.quantize_int8(x, torch.tensor(1.0), 5), x.to(torch.int8))


def test_rope_needs_a_dim_of_heads() -> None:
    x, table = torch.ones(6, 8), torch.ones(6, 4)
    with pytest.raises(wl.LayoutError, match=r"x has 2 dims; .*x\.unsqueeze\(-2\)"):
        ops.rope(x, table, table)
    assert ops.rope(x.unsqueeze(-2), table, table).shape == (6, 1, 8)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_what_unscaling_finds_is_fp32_whatever_the_default(default: torch.dtype) -> None:
    torch.set_default_dtype(default)
    try:
        grads = [torch.tensor([2.0, 4.0], dtype=torch.float32), torch.tensor([math.inf], dtype=torch.float16)]
        found = [ops.unscale_(grads[0], 0.5), ops.unscale_.foreach(grads, 0.5), ops.unscale_.foreach([], 0.5)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [(value.dtype, float(value)) for value in found] == [(torch.float32, 0), (torch.float32, 1), (torch.float32, 0)]
    assert grads[0].tolist() == [0.5, 1.0]
