"""fp8 and the wider unsigned integers in kernels: every code, every boundary of a rounding, by both routes, against torch."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from tests.emulator.emulator import Program, build, run_on
from tests.torch_gaps import has_where
from wideload.dtypes import DTYPES, is_storage
from wideload.emit.prelude import select_prelude
from wideload.nvrtc import compile_ptx

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = [dtype for dtype in DTYPES if is_storage(dtype)]
SIGNED_ZERO = [e4m3, e5m2]
UNSIGNED = [torch.uint16, torch.uint32, torch.uint64]
CODES = torch.arange(256, dtype=torch.int32).to(torch.uint8)
ROUTES = {"integers": "", "hardware": "#define __CUDA_ARCH__ 900\n"}
"""Before sm_89 the kernel's text rounds with integers; from then on it names PTX, which the shim computes."""
STORAGE = {DTYPES[dtype].name: DTYPES[dtype].storage for dtype in FP8} | {"not_a_number": "e4m3fn<false>", "saturated": "e4m3fn<true>"}


@functools.cache
def program(route: str) -> Program:
    """Kernels that encode fp32 one by one and by four, and decode."""
    kernels = []
    for name, storage in STORAGE.items():
        loop = "for (long long i = 0; i < n; ++i)"
        kernels.append(
            f'extern "C" __global__ void encode_{name}(const float* x, {storage}* y, long long n)\n{{\n    {loop} y[i] = x[i];\n}}'
        )
        kernels.append(
            f'extern "C" __global__ void decode_{name}(const {storage}* x, float* y, long long n)\n{{\n    {loop} y[i] = widen(x[i]);\n}}'
        )
        fours = "for (long long i = 0; i < n; i += 4) { const float v[4] = {x[i], x[i + 1], x[i + 2], x[i + 3]}; store_vector(y + i, v); }"
        kernels.append(f'extern "C" __global__ void pack_{name}(const float* x, {storage}* y, long long n)\n{{\n    {fours}\n}}')
    body = "\n\n".join(kernels)
    return build(f"{ROUTES[route]}{select_prelude(body)}\n\n{body}", sanitize=False)


def run(route: str, kernel: str, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    run_on(program(route), kernel, (1, 1, 1), (1, 1, 1), [x, out, len(x)], outputs=[out])
    return out


def boundaries(dtype: torch.dtype) -> torch.Tensor:
    """Every value of the type, the middles between neighbours, their neighbours in fp32, random bits and specials; a multiple of four."""
    exact = CODES.view(dtype).double()
    finite = exact[exact.isfinite()].unique()
    beyond = finite[-1] + (finite[-1] - finite[-2]) * torch.tensor([0.5, 1.0, 2.0], dtype=f64)
    marks = torch.cat([finite, (finite[1:] + finite[:-1]) / 2, beyond, -beyond]).float()
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126, 3.4e38])
    random = torch.from_numpy(np.random.default_rng(2).integers(-(2**31), 2**31, 200_000).astype(np.int32)).view(f32)
    near = [torch.nextafter(marks, torch.tensor(side)) for side in (math.inf, -math.inf)]
    x = torch.cat([marks, *near, special, random])
    return x[: len(x) // 4 * 4]


def assert_codes(got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    """The same bytes; any NaN for a NaN."""
    a, b = got.view(torch.uint8), want.view(torch.uint8)
    bad = ((a != b) & ~(got.float().isnan() & want.float().isnan())).nonzero()[:, 0]
    assert not len(bad), f"{len(bad)} of {len(a)}, (of, got, want): {[(x[i].item(), a[i].item(), b[i].item()) for i in bad[:5]]}"


NEGATIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "widened": lambda a: (-a).to(torch.int32 if a.dtype == torch.int16 else torch.int16),
    "product": lambda a: (-a * a).to(torch.int16),
    "from zero": lambda a: (0 - a).to(torch.int16),
    "times minus one": lambda a: (a * -1).to(torch.int16),
    "complement": lambda a: (~a + 1).to(torch.int16),
    "shifted": lambda a: -a >> 3,
    "compared": lambda a: (-a < a, torch.maximum(-a, a)),
    "divided": lambda a: torch.div(a, -1, rounding_mode="trunc") >> 1,
    "narrowed": lambda a: (-a.to(torch.int32)).to(torch.int16) >> 1,
    "narrowed twice": lambda a: (a.to(torch.int64) * -1).to(torch.int16) // 3,
    "absolute": lambda a: (abs(a) == a, abs(a).to(torch.float32), abs(a.to(torch.int16)).to(torch.int64)),
    "absolute, narrowed": lambda a: abs(a.to(torch.int32)).to(torch.int16) < 3,
    "unsigned": lambda a: (-a.to(torch.int32)).to(torch.uint16).to(torch.int16) >> 1,
    "unsigned, compared": lambda a: (-a.to(torch.int32)).to(torch.uint16) == a.to(torch.uint16),
    "unsigned, from 64 bits": lambda a: ((-a.to(torch.int64)).to(torch.uint16) ^ a.to(torch.uint16)) == 0,
    "unsigned, multiplied": lambda a: (a.to(torch.uint16) * 65535).to(torch.int16) < 3,
    "remainder": lambda a: torch.fmod(a, -8) >> 1,
}
"""ptxas (12.8, 13.0, 13.5) negates 16 bits in 32, and takes what comes of it for 16 that are extended: not for -(-32768)."""

TRUSTING = r"(?:shr|setp\.\w+|cvt(?:\.rn)?\.\w+|mul\.wide|min|max|abs|div|rem)\.s16"
"""What looks at the bits above. Run on what ptxas makes of each pair, by a model of its instructions, no other pair of a 16-bit result
and its use was wrong: results of neg and abs alone."""


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("name", NEGATIVES)
def test_no_negative_of_16_bits_is_looked_at_above_them(name: str, dtype: torch.dtype) -> None:
    (kernel,) = wl.fuse(NEGATIVES[name], name="f").plan(torch.empty(4096, dtype=dtype, device="meta"), target="sm_90").kernels
    ptx = compile_ptx(kernel.source, arch="sm_90", name=kernel.name)
    negatives = {*re.findall(r"(?:neg|abs)\.s16\s+(%\w+),", ptx), *re.findall(r"sub\.s16\s+(%\w+), 0,", ptx)}
    uses = re.findall(rf"{TRUSTING}\s+[%\w]+, (%?\w+)(?:, (%?\w+))?;", ptx)
    assert not negatives & {register for use in uses for register in use}
    assert dtype != torch.int16 or not negatives


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_code_decodes(dtype: torch.dtype, route: str) -> None:
    x = CODES.view(dtype)
    got, want = run(route, f"decode_{DTYPES[dtype].name}", x, torch.zeros(256)), x.float()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(
        got.nan_to_num(0.5, math.inf, -math.inf).view(torch.int32), want.nan_to_num(0.5, math.inf, -math.inf).view(torch.int32)
    )


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_boundary_rounds_as_torch_does(dtype: torch.dtype, route: str) -> None:
    x = boundaries(dtype)
    for kernel in ("encode", "pack"):
        assert_codes(run(route, f"{kernel}_{DTYPES[dtype].name}", x, torch.zeros(len(x), dtype=dtype)), x.to(dtype), x)


@pytest.mark.parametrize("route", ROUTES)
def test_what_is_too_large_for_e4m3_is_what_torch_makes_of_it(route: str) -> None:
    """464 is half way from the largest number to what would be the next. torch 2.13 saturates, older ones give NaN: both are there."""
    x = torch.tensor([448.0, 463.0, 464.0, 464.00003, 465.0, 480.0, 1e30, math.inf, -448.0, -464.0, -464.00003, -math.inf])
    within = x.abs() <= 464
    for name, above in (("not_a_number", 0x7F), ("saturated", 0x7E)):
        for kernel in ("encode", "pack"):
            got = run(route, f"{kernel}_{name}", x, torch.zeros(len(x), dtype=e4m3)).view(torch.uint8)
            want = torch.where(within, 0x7E, above) + torch.where(x < 0, 0x80, 0)
            assert got.tolist() == want.tolist()
    saturates = "true" if torch.tensor(1000.0).to(e4m3).float().item() == 448 else "false"
    assert DTYPES[e4m3].storage == f"e4m3fn<{saturates}>"


# ---- kernels


@pytest.mark.parametrize("source", [f32, f16, bf16, f64, torch.int32], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_casts_from_every_kind(dtype: torch.dtype, source: torch.dtype) -> None:
    values = torch.randn(1027) * torch.exp2(torch.randint(-18, 12, (1027,)).float())
    x = torch.cat([values, torch.tensor([448.0, 463.0, 465.0, 480.0, -900.0, 57344.0, 61440.0, math.inf, math.nan])])
    x = x.to(source) if source.is_floating_point else values.round().to(source)
    for numerics in ("fused", "eager"):
        got = run_emulated(wl.fuse(lambda v: v.to(dtype), numerics=numerics), x)
        assert_codes(got, x.to(dtype), x)


@pytest.mark.parametrize("source", [f16, bf16], ids=str)
@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_half_rounds_as_torch_does(dtype: torch.dtype, source: torch.dtype) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(source)
    assert_codes(run_emulated(wl.fuse(lambda v: v.to(dtype)), x), x.to(dtype), x)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_every_boundary_rounds_through_fp32_from_fp64(dtype: torch.dtype) -> None:
    """fp64 goes through fp32, as torch's does: next to a boundary of the fp8 type that is the boundary itself."""
    x = boundaries(dtype).double()
    x = torch.cat([x, x * (1 + 2.0**-40), x * (1 - 2.0**-40)])
    assert_codes(run_emulated(wl.fuse(lambda v: v.to(dtype)), x), x.to(dtype), x)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_casts_to_every_kind(dtype: torch.dtype) -> None:
    x = CODES.view(dtype).repeat(5)[3:]
    f = wl.fuse(lambda v: (v.float(), v.half(), v.to(bf16), v.double(), v.to(torch.complex64), v.bool()))
    for got, want in zip(run_emulated(f, x), f.__wrapped__(x), strict=True):
        assert got.dtype == want.dtype
        real = [(z.real if z.is_complex() else z).double().nan_to_num(0.5) for z in (got, want)]
        assert torch.equal(*real)
        assert torch.equal(real[0].signbit(), real[1].signbit())
    back = wl.fuse(lambda v: v.to(dtype))
    for wide in (f32, f64, bf16):
        assert_codes(run_emulated(back, x.to(wide)), x, x.float())


def test_one_rounding_and_no_stop_at_a_half() -> None:
    x = torch.tensor([1.0625001, 1.0625, 1.1875, 1.1874999, -1.0625001, 17.000002, 0.0087890635])
    for numerics in ("fused", "eager"):
        f = wl.fuse(lambda v: v.to(e4m3).float(), numerics=numerics)
        assert run_emulated(f, x).tolist() == [1.125, 1.0, 1.25, 1.125, -1.125, 18.0, 0.009765625]


@pytest.mark.parametrize("dtype", SIGNED_ZERO, ids=str)
def test_fp8_in_and_out_of_arithmetic(dtype: torch.dtype) -> None:
    """Scaled fp8, to fp8: fp32 inside, every value rounded once; sizes around whole accesses and any alignment."""
    f = wl.fuse(lambda x, s: (x.float() * s).to(dtype))
    for n in (0, 1, 15, 16, 17, 33, 2048, 2049):
        for offset in (0, 1, 5):
            x = (torch.randn(n + offset) * 8).to(dtype)[offset:]
            assert_codes(run_emulated(f, x, 0.37), (x.float() * torch.tensor(0.37)).to(dtype), x.float())


@pytest.mark.parametrize("dtype", [e4m3, torch.uint16, torch.uint64], ids=str)
def test_every_layout(dtype: torch.dtype) -> None:
    x = (torch.arange(61 * 96) % 97).to(dtype).view(61, 96)
    copy = wl.fuse(lambda x: x.clone(), name="copy")
    columns = (torch.arange(96 * 256) % 97).to(dtype).view(256, 96)
    layouts = {
        "dense": x,
        "rows": x[:, 1:],
        "tile": columns.t(),
        "strided": x[:9, :9].t(),
        "every second": x[:, ::2],
        "every third": x[:, ::3],
    }
    for name, view in layouts.items():
        out = torch.zeros(view.shape, dtype=dtype)
        (kernel,) = copy.plan(view, out=out, target="sm_90").kernels
        assert kernel.plan.variant.family == name or name.startswith("every") or (name == "strided" and dtype.itemsize == 8)
        run_emulated(copy, view, out=out)
        assert torch.equal(out.double(), view.double()), name


def test_choices_between_fp8_values_and_numbers() -> None:
    x = torch.tensor([0.5, 0.3, 448.0, math.nan]).to(e4m3)
    f = wl.fuse(lambda m, x, s: (torch.where(m, x, 0.3).float(), x == 0.3, x == x, x != s, torch.full_like(x, 0.3)))
    mask = torch.tensor([True, False, True, False])
    got = run_emulated(f, mask, x, 0.5)
    third = torch.tensor(0.3).to(e4m3).float().item()
    assert got[0].tolist() == [0.5, third, 448.0, third]
    assert [g.tolist() for g in got[1:4]] == [(x == 0.3).tolist(), [True, True, True, False], [False, True, True, True]]
    assert got[4].float().tolist() == [third] * 4


# ---- unsigned integers


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_are_torchs(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    values = [0, 1, 2, 7, top // 2, top // 2 + 1, top - 1, top]
    a, b = (torch.tensor(column, dtype=dtype) for column in zip(*itertools.product(values, values), strict=True))
    a, b = a.repeat(20), b.repeat(20)  # more than a block, so that whole accesses are stored
    choose = torch.where if has_where(dtype) else lambda _, a, __: a
    f = wl.fuse(lambda a, b: (a * b, a & b, a | b, a ^ b, a == b, a != b, choose(a == b, a, b), a == 7, torch.full_like(a, 3), a.clone()))
    for got, want in zip(run_emulated(f, a, b), f.__wrapped__(a, b), strict=True):
        assert got.dtype == want.dtype
        assert got.tolist() == want.tolist()


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_unsigned_integers_convert(dtype: torch.dtype) -> None:
    top = torch.iinfo(dtype).max
    x = torch.tensor([0, 1, 255, 256, top // 2 + 1, top - 1, top], dtype=dtype)
    f = wl.fuse(
        lambda x: (x.to(f32), x.to(f64), x.to(torch.int64), x.to(torch.int32), x.to(torch.uint8), x.bool(), x.to(bf16), x / 2, x.sqrt())
    )
    for got, want in zip(run_emulated(f, x), f.__wrapped__(x), strict=True):
        assert got.dtype == want.dtype
        assert torch.allclose(got.double(), want.double(), rtol=2.0**-8 if want.dtype == bf16 else 2.0**-23, atol=0)
    back = wl.fuse(lambda v: v.to(dtype))
    for source in (f32, f64):
        y = torch.tensor([0.0, 0.9, 255.7, 65535.0, 40000.5], dtype=source)
        assert run_emulated(back, y).tolist() == [0, 0, 255, 65535, 40000]
    wide = torch.tensor([4000000000.0, 2.0**32 - 1], dtype=f64)
    if dtype != torch.uint16:
        assert run_emulated(back, wide).tolist() == [4000000000, 2**32 - 1]
    assert run_emulated(back, torch.tensor([-1, 70000])).tolist() == [top, 70000 % (top + 1)]


@pytest.mark.parametrize("dtype", UNSIGNED, ids=str)
def test_what_torch_does_not_compute_of_unsigned_integers_is_refused(dtype: torch.dtype) -> None:
    x = torch.ones(3, dtype=dtype)
    for function in (lambda v: v + v, lambda v: v - 1, lambda v: -v, lambda v: v << 1, lambda v: v % 3, torch.abs):
        with pytest.raises(wl.DtypeError):
            wl.fuse(function).plan(x, target="sm_90")


def test_casts_of_the_largest_unsigned_number() -> None:
    f = wl.fuse(lambda v: v.to(f64))
    assert run_emulated(f, torch.tensor([4000000000, 7], dtype=torch.uint32)).tolist() == [4e9, 7.0]


@pytest.mark.parametrize("saturates", ["true", "false"])
@pytest.mark.parametrize("dtype", SIGNED_ZERO, ids=str)
def test_a_limit_that_the_type_keeps_itself_is_left_to_it(dtype: torch.dtype, saturates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clamped to the largest number, and rounded by what saturates: NaN stays, all else is torch's, whose cast alone may overflow.

    It does where torch's cast to e4m3 ``saturates``, and where it gives NaN.
    """
    monkeypatch.setitem(DTYPES, torch.float8_e4m3fn, DTYPES[torch.float8_e4m3fn]._replace(storage=f"e4m3fn<{saturates}>"))
    top = torch.finfo(dtype).max
    limited = wl.fuse(lambda x: x.clamp(-top, top).to(dtype), name=f"limited_{saturates}")
    x = torch.tensor(
        [0.0, -0.0, 1.0, -2.3, top, -top, top * 1.01, -top * 1.04, top * 1.2, 3e38, -3e38, math.inf, -math.inf, math.nan, 2**-10, -(2**-17)]
    )
    x = torch.cat((x, torch.linspace(-2 * top, 2 * top, 1001)))
    for given in (x, x.to(torch.bfloat16), x.to(torch.float16), x.double()):
        assert "clamp" not in body(limited, given)
        assert torch.equal(bits(run_emulated(limited, given)), bits(given.clamp(-top, top).to(dtype)))
    for other in (
        wl.fuse(lambda x: x.clamp(-top, top / 2).to(dtype), name=f"lower_{saturates}"),
        wl.fuse(lambda x: (x.clamp(-top, top).to(dtype), x.clamp(-top, top)), name=f"apart_{saturates}"),
        wl.fuse(lambda x: x.clamp(-top, top).to(dtype).float(), name=f"rounded_{saturates}"),
        wl.fuse(lambda x: x.clamp(-top, top).to(dtype), name=f"eager_{saturates}", numerics="eager"),
    ):
        assert "clamp" in body(other, x)
        for got, want in zip(leaves(run_emulated(other, x)), leaves(other.__wrapped__(x)), strict=True):
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("mode", ["fused", "eager"])
def test_a_quotient_is_whole_on_its_way_through_what_tells_small_from_zero_or_large_from_infinite(mode: Any) -> None:
    """Of 1e-43, which is a truth; of 3e21 and 1e33, which e8m0fnu has as powers of two, and fp16 as infinities."""
    truth = wl.fuse(lambda x, s: (x / s).to(torch.bool).to(torch.int8), name="truth", numerics=mode)
    assert run_emulated(truth, torch.tensor([1e-30, 0.0]), torch.tensor(1e13)).tolist() == [1, 0]
    powers = wl.fuse(lambda x, s: (x / s).to(torch.float8_e8m0fnu).to(torch.float16), name="powers", numerics=mode)
    assert run_emulated(powers, torch.tensor([3e8, 1e20]), torch.tensor(1e-13)).tolist() == [math.inf, math.inf]


def leaves(result: Any) -> tuple[torch.Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def bits(x: torch.Tensor) -> torch.Tensor:
    """NaN of one sign alone."""
    wide = x.float()
    return torch.where(wide.isnan(), torch.full_like(wide, math.nan).abs(), wide).view(torch.int32)


def body(f: wl.FusedFunction, x: torch.Tensor) -> str:
    """The element function of each kernel."""
    sources = [kernel.source for kernel in f.plan(x, target="h200").kernels]
    return "".join(re.sub(r"//.*", "", source[source.index("_element(const") : source.index('extern "C"')]) for source in sources)
