"""The ready-made functions against torch's own expressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import ops

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64

PLAIN: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "swiglu": lambda gate, up: F.silu(gate) * up,
    "bias_gelu": lambda x, bias, approximate="none": F.gelu(x + bias, approximate=approximate),
    "bias_silu_mul": lambda x, bias, y: F.silu(x + bias) * y,
    "clip": lambda x, lo=None, hi=None: torch.clamp(x, lo, hi),
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
