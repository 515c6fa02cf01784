"""Complex, fp8 and unsigned kernels on a GPU against eager PyTorch there: fp8 byte for byte, complex within a few units."""

from __future__ import annotations

import pytest
import torch

import wideload as wl
from tests.emulator.test_complex import BOUNDS, EPS, UNARY, exponents, parts
from tests.emulator.test_narrow import CODES, FP8, NEGATIVES, UNSIGNED, assert_codes, boundaries
from wideload.errors import DtypeError
from wideload.ops_table import OPS

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
c64, c128 = torch.complex64, torch.complex128


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16], ids=str)
@pytest.mark.parametrize("name", NEGATIVES)
def test_negatives_of_narrow_integers_wrap(name: str, dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    a = torch.arange(info.min, info.max + 1).to(dtype).repeat(3)
    got, want = wl.fuse(NEGATIVES[name])(a.to(DEVICE)), NEGATIVES[name](a)
    for mine, right in zip(*((of if isinstance(of, tuple) else (of,)) for of in (got, want)), strict=True):
        assert mine.dtype == right.dtype
        assert torch.equal(mine.cpu(), right)


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_casts_to_fp8_are_eagers(dtype: torch.dtype, source: torch.dtype) -> None:
    x = boundaries(dtype).to(source).to(DEVICE)
    got, want = wl.fuse(lambda v: v.to(dtype))(x), x.to(dtype)
    assert_codes(got.cpu(), want.cpu(), x.float().cpu())


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_of_fp8_decodes(dtype: torch.dtype) -> None:
    x = CODES.view(dtype).repeat(9)
    for got in wl.fuse(lambda v: (v.float(), v.float() * 1))(x.to(DEVICE)):
        assert torch.equal(got.cpu().nan_to_num(0.5), x.float().nan_to_num(0.5))


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
@pytest.mark.parametrize("name", [name for name in UNARY if not OPS[name].makes_contiguous and not OPS[name].makes_channels_last])
def test_functions_of_complex_numbers_are_close_to_the_cpus(name: str, dtype: torch.dtype) -> None:
    z = torch.cat([exponents(dtype, -6, 4, 20_000, 1), exponents(dtype, -2, 1, 20_000, 2)])
    if name in ("sigmoid", "silu", "tanhshrink"):
        z = z[(1 + torch.exp(-z)).abs() > 0.25]  # nearer to its poles the function magnifies the error of z
    function = OPS[name].torch
    got, want = wl.fuse(function, name=name)(z.to(DEVICE)).cpu(), function(z)
    assert got.dtype == want.dtype
    if want.dtype == torch.bool:
        assert torch.equal(got, want)
        return
    scale = parts(want).norm(dim=-1) + (z.abs() if name == "tanhshrink" else 0)
    scale += name == "sinc"  # torch's is the sine of a product that has been rounded, which is off by as much next to its zeros
    finite = torch.isfinite(scale)
    error = (parts(got) - parts(want)).norm(dim=-1)
    assert (error <= (2 * BOUNDS.get(name, 4) + 8) * EPS[dtype] * scale)[finite].all()


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
def test_quotients_use_the_whole_range(dtype: torch.dtype) -> None:
    x, y = exponents(c64, -149, 127.9, 60_000, 1), exponents(c64, -149, 127.9, 60_000, 2)
    x, y = x[y != 0].to(dtype), y[y != 0].to(dtype)
    got, want = wl.fuse(lambda p, q: p / q)(x.to(DEVICE), y.to(DEVICE)).cpu(), x.to(c128) / y.to(c128)
    finite = torch.isfinite(parts(want.to(dtype))).all(-1)
    assert torch.equal(torch.isfinite(parts(got)).all(-1), finite)
    assert ((got.to(c128) - want).abs() <= 4 * EPS[dtype] * want.abs() + 2.0**-149)[finite].all()


def test_complex_operands_numbers_and_views() -> None:
    z, x = exponents(c64, -3, 3, 1030, 4).to(DEVICE), torch.rand(1030, device=DEVICE)
    f = wl.fuse(lambda z, x, s: (z * x + s, z.conj() * z, z.real - z.imag, z == z, torch.polar(x, x), torch.complex(x, x) * 2j))
    for operand in (z, z.conj(), z[1:-1], z.view(103, 10).t()):
        other = x[: operand.numel()].view(operand.shape)
        for got, want in zip(f(operand, other, 1 + 2j), f.__wrapped__(operand, other, 1 + 2j), strict=True):
            assert torch.allclose(parts(got), parts(want), rtol=1e-5, atol=1e-5) if want.dtype != torch.bool else torch.equal(got, want)
    scalar = torch.tensor(2 - 1j, dtype=c128)  # on the CPU: a number
    assert torch.allclose(wl.fuse(lambda z, s: z * s)(z, scalar), z * (2 - 1j))


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_are_eagers(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    x = torch.tensor([0, 1, 255, 256, top // 2 + 1, top - 1, top], dtype=dtype).repeat(300).to(DEVICE)
    f = wl.fuse(lambda x: (x.float(), x.double(), x.to(torch.int64), x.to(torch.uint8), x.bool(), x.clone()))
    for got, want in zip(f(x), f.__wrapped__(x), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got.double(), want.double())
    with pytest.raises(DtypeError):
        wl.fuse(lambda x: x + x)(x)
