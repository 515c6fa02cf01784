"""The table's C++ expressions, run on the CPU: every half input, every pair of 8-bit integers, bounds in fp32 and fp64, special values.

Approximate instructions and CUDA's library functions are moved to either end of their documented error.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from tests.emulator.emulator import Approx, Program, build, run_on
from wideload.dtypes import DTYPES
from wideload.emit.prelude import select_prelude
from wideload.ops_table import OPS, Op

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
INTS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]
APPROX: tuple[Approx, ...] = ("exact", "up", "down", "mixed")
nan, inf = math.nan, math.inf
MANY = 65536  # values from which on kernels run without sanitizers, several times faster; fewer of the same kinds run with them

# What a row takes besides its first operand, where that can be a number; in those of the second table it must be.
NUMBERS: dict[str, tuple[float, ...]] = {
    "celu": (1.5,),
    "clamp": (-0.5, 2.0),
    "clamp_max": (2.0,),
    "clamp_min": (-0.5,),
    "div_number": (3.0,),
    "elu": (1.5,),
    "hardshrink": (0.5,),
    "huber": (0.5,),
    "hardtanh": (-0.5, 2.0),
    "leaky_relu": (0.125,),
    "logit_eps": (0.125,),
    "nan_to_num": (0.5, 3.0, -3.0),
    "smooth_l1": (0.5,),
    "softplus": (1.0, 20.0),
    "softshrink": (0.5,),
    "threshold": (0.5, -1.0),
}
ONLY_NUMBERS = {
    *("celu", "elu", "hardshrink", "hardtanh", "huber", "leaky_relu", "logit_eps", "nan_to_num", "smooth_l1", "softplus", "softshrink"),
    "threshold",
}
INEXACT_IN_TORCH = {"airy_ai", "bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"}
"""Off by up to 1e-6 in torch's fp64, so that these are held to multiple precision: tests/emulator/test_special.py."""
UNARY = [
    op
    for op in OPS.values()
    if "float" in op.cuda and "shape" not in op.types and (len(op.operands) == 1 or op.name in NUMBERS) and op.name not in INEXACT_IN_TORCH
]
SLOPES = "gelu_slope", "gelu_tanh_slope"
"""Sums of terms that cancel: within their bounds of the larger one."""
NAMES = [op.name for op in UNARY if op.name not in SLOPES]


def kernel(name: str, op: Op, expression: str, dtype: torch.dtype, result: torch.dtype) -> str:
    """One thread computes ``expression`` on n values of the compute type of each operand."""
    types = {operand: "bool" if mark == "bool" else DTYPES[dtype].compute for operand, mark in zip(op.operands, op.types, strict=True)}
    text = expression.format(round="", **{operand: f"p_{operand}[i]" for operand in types})
    parameters = ", ".join(
        [*(f"const {ctype}* p_{operand}" for operand, ctype in types.items()), f"{DTYPES[result].compute}* out", "long long n"]
    )
    return f'extern "C" __global__ void row_{name}({parameters})\n{{\n    for (long long i = 0; i < n; ++i) out[i] = {text};\n}}'


def torch_operands(op: Op, operands: list[Any]) -> list[Any]:
    """What torch takes for the operands of a kernel: numbers where it takes no tensors."""
    number = float if operands[0].dtype.is_floating_point else int
    if op.name in ONLY_NUMBERS:
        return [operands[0], *map(number, NUMBERS[op.name])]
    types = {"alpha": number, "value": number, "decimals": int}
    return [types[name](v[0]) if name in types else v for name, v in zip(op.operands, operands, strict=True)]


@functools.cache
def result_dtype(op: Op, dtype: torch.dtype) -> torch.dtype | None:
    """What torch says of operands of ``dtype``; None where it refuses."""
    ones = [torch.ones(1, dtype=torch.bool if mark == "bool" else dtype) for mark in op.types]
    try:
        return op.torch(*torch_operands(op, ones)).dtype  # type: ignore[no-any-return]
    except (RuntimeError, TypeError):
        return None


@functools.cache
def program(dtype: torch.dtype, sanitize: bool = True) -> Program:
    """Every row on operands of ``dtype``: kernels ``row_<name>``, ``row_<name>_half``, ``row_<name>_steady`` and ``row_<name>_eager``."""
    kind, kernels = DTYPES[dtype].kind, []
    for op in OPS.values():
        result = result_dtype(op, dtype)
        if "shape" in op.types or kind not in op.cuda or result is None or ("result" in op.types and DTYPES[result].kind != kind):
            continue
        kernels.append(kernel(op.name, op, op.cuda[kind], dtype, result))
        if op.half and dtype == f32:
            kernels.append(kernel(f"{op.name}_half", op, op.half, dtype, result))
        if op.steady and dtype == f32:
            kernels.append(kernel(f"{op.name}_steady", op, op.steady, dtype, result))
        if op.eager and kind in op.eager:
            kernels.append(kernel(f"{op.name}_eager", op, op.eager[kind], dtype, result))
    body = "\n\n".join(kernels)
    return build(f"{select_prelude(body)}\n\n{body}", sanitize=sanitize)


def compute(op: Op, *operands: Any, tier: str = "", approx: Approx = "exact") -> torch.Tensor:
    """The kernel's results; numbers among the operands are repeated."""
    first = next((x for x, mark in zip(operands, op.types, strict=True) if mark != "bool"), operands[0])
    result = result_dtype(op, first.dtype)
    assert result is not None
    tensors = [x if isinstance(x, torch.Tensor) else torch.full_like(first, x) for x in operands]
    out = torch.zeros(len(first), dtype=result)
    run_on(
        program(first.dtype, len(first) < MANY),
        f"row_{op.name}{tier}",
        (1, 1, 1),
        (1, 1, 1),
        [*tensors, out, len(first)],
        outputs=[out],
        approx=approx,
    )
    return out


def exact(op: Op, *operands: Any) -> torch.Tensor:
    """The op in fp64, by the formula that does not cancel."""
    wide = [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in operands]
    return (op.reference or op.torch)(*wide)  # type: ignore[no-any-return]


# Bits of precision, exponent of the smallest normal number, largest finite value, and what follows it.
FORMATS = {
    f16: (11, -14, 65504.0, np.longdouble(2) ** 16),
    bf16: (8, -126, (2 - 2**-7) * 2.0**127, np.longdouble(2) ** 128),
    f32: (24, -126, (2 - 2**-23) * 2.0**127, np.longdouble(2) ** 128),
    f64: (53, -1022, (2 - 2**-52) * 2.0**1023, np.longdouble(2) ** 1024),
}


def round_once(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 rounded once, to nearest even; ``Tensor.to`` goes through fp32 and rounds twice."""
    precision, lowest, largest, _ = FORMATS[dtype]
    values = x.numpy()
    finite = np.where(np.isfinite(values), values, 0.0)
    unit = np.maximum(np.frexp(finite)[1] - 1, lowest) - (precision - 1)
    with np.errstate(over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(finite, -unit)), unit)
    rounded = np.where(np.abs(rounded) > largest, np.copysign(inf, finite), rounded)
    rounded = np.where(finite == 0, finite, np.copysign(rounded, finite))
    return torch.from_numpy(np.where(np.isfinite(values), rounded, values)).to(dtype)


def units_apart(got: torch.Tensor, want: torch.Tensor) -> npt.NDArray[np.float64]:
    """The distance in units of the last place of ``want``; a unit more to infinity than to the largest number."""
    precision, lowest = FORMATS[want.dtype][:2]
    finite = [
        np.where(np.isfinite(x := t.double().numpy().astype(np.longdouble)), x, np.copysign(FORMATS[want.dtype][3], x)) for t in (got, want)
    ]
    unit = np.ldexp(np.longdouble(1), np.maximum(np.frexp(finite[1])[1] - 1, lowest) - (precision - 1))
    return np.asarray(np.abs(finite[0] - finite[1]) / unit, np.float64)


def assert_within(got: torch.Tensor, want: torch.Tensor, ulp: float, inputs: tuple[Any, ...], note: str) -> None:
    """At most ``ulp`` units apart; NaN where NaN is wanted; a zero with its sign."""
    assert got.dtype == want.dtype, note

    def fail(bad: npt.NDArray[np.bool_], what: str) -> None:
        if bad.any():
            i = int(np.flatnonzero(bad)[0])
            at = ", ".join(f"{x[i].item()!r}" for x in inputs if isinstance(x, torch.Tensor))
            raise AssertionError(f"{note}({at}): got {got[i].item()!r}, expected {want[i].item()!r}; {what}, {bad.sum()} of {len(bad)}")

    if not want.dtype.is_floating_point:
        fail((got != want).numpy(), "differs")
        return
    fail((got.isnan() != want.isnan()).numpy(), "NaN")
    keep = ~want.isnan().numpy()
    fail(keep & ((got == 0) & (want == 0) & (got.signbit() != want.signbit())).numpy(), "sign of zero")
    units = np.where(keep, units_apart(got, want), 0)
    fail(units > ulp, f"{units.max()} units, allowed {ulp}")


def every_half(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()


# max(-0, +0) may be either zero; log(sigmoid(x)) that underflows is +0 in torch, by subtraction.
ANY_ZERO = {"relu", "clamp", "clamp_min", "clamp_max", "hardtanh", "logsigmoid"}


def check_unary(name: str, x: torch.Tensor, dtype: torch.dtype, ulp: float) -> None:
    op, operands = OPS[name], (x, *NUMBERS.get(name, ()))
    want = exact(op, *operands)
    want = round_once(want, dtype) if want.dtype == f64 else want
    for tier in ("", "_half") if op.half and dtype != f32 else ("",):
        for approx in APPROX if tier or (any(op.ulp) and dtype == f32) else APPROX[:1]:
            got = compute(op, *operands, tier=tier, approx=approx).to(want.dtype)
            if name in ANY_ZERO or approx != "exact":  # an error bound around a zero holds both
                got, want = got + 0.0, want + 0.0
            assert_within(got, want, 1 if tier else ulp, (x,), f"{name}{tier} {approx}")


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_half_input_is_within_one_unit(name: str, dtype: torch.dtype) -> None:
    check_unary(name, every_half(dtype), dtype, 1 if any(OPS[name].ulp) else 0)


def fp32_inputs() -> torch.Tensor:
    """Every exponent and sign, the ranges where exponentials matter, thresholds and their neighbours, specials."""
    rng = np.random.default_rng(7)
    bits = rng.integers(-(2**31), 2**31, 30_000).astype(np.int32)
    near = np.array([0.0, 0.5, 1.0, 2.0, 3.0, 6.0, 10.0, 20.0, 32.0, 64.0, 80.0, 87.3, 88.7, 104.0, 128.0], np.float32)
    marks = np.concatenate([near, -near])
    parts = [rng.uniform(-110, 110, 30_000), rng.uniform(-15, 15, 30_000), rng.uniform(-1, 1, 10_000)]
    parts += [
        marks,
        np.nextafter(marks, np.float32(inf)),
        np.nextafter(marks, np.float32(-inf)),
        [-0.0, inf, -inf, nan, 2**-149, 2**-126, 3e38],
    ]
    return torch.cat([torch.from_numpy(bits).view(f32), torch.from_numpy(np.concatenate(parts).astype(np.float32))])


DOCUMENTED = {"logsigmoid": 7, "softplus": 7, "spherical_bessel_j0": 5}
"""What CUDA's functions at the ends of their documented errors would come to. No input gives more than the table's bound on a GPU."""


@pytest.mark.parametrize("name", NAMES)
def test_fp32_is_within_the_bound_of_the_table(name: str) -> None:
    check_unary(name, fp32_inputs(), f32, DOCUMENTED.get(name, OPS[name].ulp[0]))


# The op in multiple precision, by formulas that neither cancel nor overflow there.
PRECISE: dict[str, Callable[[Any], Any]] = {
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.erfc(min(max(-x / mpmath.sqrt(2), -50), 50)) / 2,
    "gelu_tanh": lambda x: x / (1 + mpmath.exp(-mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "mish": lambda x: x * mpmath.tanh(mpmath.log(1 + mpmath.exp(x))),
    "softplus": lambda x: x if x > 20 else mpmath.log(1 + mpmath.exp(x)),
    "logsigmoid": lambda x: -mpmath.log(1 + mpmath.exp(-x)),
    "elu": lambda x: x if x > 0 else mpmath.mpf(1.5) * mpmath.expm1(x),
    "celu": lambda x: x if x > 0 else mpmath.mpf(1.5) * mpmath.expm1(x / 1.5),
    "selu": lambda x: x * SELU_SCALE if x > 0 else SELU_SCALE * SELU_ALPHA * mpmath.expm1(x),
    "hardswish": lambda x: x * min(max(x + 3, 0), 6) / mpmath.mpf(6),
    "tanhshrink": lambda x: x - mpmath.tanh(x),
    "hardsigmoid": lambda x: min(max(x + 3, 0), 6) / mpmath.mpf(6),
}
SELU_SCALE, SELU_ALPHA = mpmath.mpf("1.0507009873554804934193349852946"), mpmath.mpf("1.6732632423543772848170429916717")


@pytest.mark.parametrize("name", PRECISE)
def test_activations_in_fp64_are_within_the_bound_of_the_table(name: str) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate(
        [
            rng.uniform(-750, 750, 60),
            rng.uniform(-40, 40, 80),
            rng.uniform(-3, 3, 60),
            -(10.0 ** rng.uniform(-300, 300, 40)),
            [-512.5, 20.5],
        ]
    )
    with mpmath.workprec(1200):  # 1 + exp(-750) has that many bits
        want = torch.tensor([float(PRECISE[name](mpmath.mpf(float(v)))) for v in x], dtype=f64)
    got = compute(OPS[name], torch.from_numpy(x), *NUMBERS.get(name, ()))
    emulated = 64 if name == "gelu" else 0  # the emulator's erfcx(z) is exp(z^2) erfc(z), and z^2 up to 64 is rounded
    assert_within(got + 0.0, want + 0.0, OPS[name].ulp[1] + emulated, (torch.from_numpy(x),), name)


QUOTIENTS = ("div", "rdiv")
"""Of two numbers that may both be any."""


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.half and op.name not in (*QUOTIENTS, *SLOPES)])
def test_the_half_tier_is_close_for_every_fp32_intermediate(name: str) -> None:
    """A tenth of a unit of fp16 before the rounding, so that the result is within one unit of it whatever it is computed from."""
    op, x = OPS[name], fp32_inputs()
    operands = (torch.full_like(x, 1.5), x) if name == "glu" else (x, *NUMBERS.get(name, ()))
    want = exact(op, *operands)
    for dtype in (f16, bf16):
        precision, lowest, largest, _ = FORMATS[dtype]
        values = want.numpy()
        keep = np.isfinite(values) & (np.abs(values) <= largest)
        unit = np.ldexp(1.0, np.maximum(np.frexp(np.where(keep, values, 1.0))[1] - 1, lowest) - (precision - 1))
        for approx in APPROX:
            got = compute(op, *operands, tier="_half", approx=approx).double().numpy()
            with np.errstate(invalid="ignore"):
                error = np.where(keep, np.abs(got - values) / unit, 0)
            assert error.max() < 0.1, f"{name} {dtype} {approx} at {x[int(error.argmax())].item()!r}: {error.max()} units"


# ---- two operands and more

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 2**-149, -(2**-126), 3e38, -3e38, inf, -inf, nan]


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Special values with each other, then random quotients up to 2^11 and values up to 100."""
    rng = np.random.default_rng(5)
    y = rng.uniform(-3, 3, 20_000)
    x = np.concatenate([np.repeat(SPECIAL, len(SPECIAL)), y * rng.integers(-2000, 2000, len(y)), rng.uniform(-100, 100, 20_000)])
    y = np.concatenate([np.tile(SPECIAL, len(SPECIAL)), y, rng.uniform(-100, 100, 20_000)])
    return torch.from_numpy(x).to(dtype), torch.from_numpy(y).to(dtype)


EXACT = "add sub mul div rdiv div_trunc div_floor fmod remainder maximum minimum fmax fmin clamp_min clamp_max copysign heaviside".split()
COMPARISONS = "eq ne lt le gt ge".split()


def near_midpoints(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Numbers of 24 bits whose quotients lie within 4 / (2 s) of a unit of the middle of two others: N s = k modulo a power of two."""
    s = np.random.default_rng(6).integers(2**23, 2**24, count) | 1
    inverse = s.copy()
    for _ in range(5):  # Newton: twice the right bits each time
        inverse = inverse * (2 - s * inverse) & (1 << 30) - 1
    found: list[npt.NDArray[np.int64]] = []
    for bits in (24, 25):  # quotients of at least 1, and below
        for k in (-3, -1, 1, 3):
            middle = (-k * inverse) % (1 << bits)
            middle = np.where(middle < 2**24, middle + (1 << 24) * (bits == 24), middle)
            x = (k + middle * s) >> bits
            right = ((k + middle * s) % (1 << bits) == 0) & (middle >= 2**24) & (middle < 2**25) & (x >= 2**23) & (x < 2**24)
            found.append(np.stack((x, s))[:, right])
    return tuple(np.concatenate(found, 1).astype(np.float64))  # type: ignore[return-value]


def hard_quotients() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Dividends and divisors: next to the middle of two numbers, of any bits, special values."""
    rng = np.random.default_rng(7)
    hard = near_midpoints(20_000)
    assert len(hard[0]) > 40_000
    scaled = [np.ldexp(of, rng.integers(low, high, of.shape)) for of, low, high in zip(hard, (-60, -100), (20, 60), strict=True)]
    anything = rng.integers(0, 2**32, (2, 60_000), np.uint32).view(np.float32)
    special = [of.numpy() for of in pairs(f32)]
    with np.errstate(all="ignore"):
        x, s = (np.concatenate(of).astype(np.float32) for of in zip(hard, scaled, anything, special, strict=True))
    return x, s


@pytest.mark.parametrize("approx", APPROX)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_of_the_half_tier_are_within_two_units_of_fp32(name: str, approx: Approx) -> None:
    """Also of subnormal numbers and of those beyond 2^126: far within a tenth of a unit of any half; special values are torch's."""
    x, y = map(torch.from_numpy, hard_quotients())
    small, large = (2.0**k * torch.linspace(1, 2, 97) for k in (-140, 126.5))
    ends = torch.cat([small, large, -small, -large]).clamp(-3.4e38, 3.4e38)
    x, y = torch.cat([x, ends.repeat_interleave(len(ends))]), torch.cat([y, ends.repeat(len(ends))])
    assert_within(compute(OPS[name], x, y, tier="_half", approx=approx), x / y if name == "div" else y / x, 2, (x, y), f"{name} {approx}")


def test_division_by_what_stays_the_same_is_rounded_once_where_that_can_be_told() -> None:
    x, s = hard_quotients()
    with np.errstate(all="ignore"):
        want, size = x / s, np.abs(x / s)
    got = compute(OPS["div"], torch.from_numpy(x), torch.from_numpy(s), tier="_steady").numpy()
    told = (size >= 2**-40) & (size <= 2**60)
    assert told.sum() > 100_000
    np.testing.assert_array_equal(got.view(np.int32)[told], want.view(np.int32)[told])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.signbit(got[~np.isnan(want)]), np.signbit(want[~np.isnan(want)]))
    assert np.abs(got[size < 2**-40]).max() <= 2**-40
    assert np.abs(got[size > 2**60]).min() >= 2**60


@pytest.mark.parametrize("narrow", [torch.int8, torch.uint8, f16, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_quotients_by_a_row_are_torchs_in_every_narrow_type(narrow: torch.dtype) -> None:
    rng = np.random.default_rng(8)
    x, s = (
        torch.from_numpy(np.ldexp(rng.uniform(-2, 2, shape), rng.integers(-140, 120, shape)).astype(np.float32))
        for shape in ((64, 256), (64, 1))
    )
    x[:, ::9], s[::8] = x[:, ::9] * 0, torch.tensor([1.0, 3.0, -0.75, 2.0**41, 2.0**-90, 2.0**100, -(2.0**-149), 0.1])[:, None]
    x[::2, 1::3] = s[::2] * torch.linspace(-300, 300, 85)  # of the size that the types hold
    limited = wl.fuse(lambda x, s: (x / s).clamp(-100, 100).to(narrow), name="narrow")
    assert ("divide_steady" in limited.plan(x, s, target="h200").kernels[0].source) is (narrow != torch.bool)
    got, want = run_emulated(limited, x, s), limited.__wrapped__(x, s)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_the_slope_of_gelu_keeps_its_digits_next_to_its_zero() -> None:
    """All values of fp16 and bf16, in steps of the result's type."""
    slope = wl.fuse(lambda x: torch.special.ndtr(x) + x * (x * x * -0.5).exp() * (1 / math.sqrt(2 * math.pi)), name="slope")
    for dtype, most in ((f16, 3), (bf16, 1)):
        x = every_half(dtype)
        x = x[torch.isfinite(x)]
        want = exact(OPS["ndtr"], x) + x.double() * (-0.5 * x.double() ** 2).exp() / math.sqrt(2 * math.pi)
        got = run_emulated(slope, x.to(dtype))
        assert units_apart(got, round_once(want, dtype)).max() <= most


def fmod(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The C library's: torch's vectorised one is not exact for large quotients."""
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.fmod(x.numpy(), y.numpy()))


def remainder(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    r = fmod(x, y)
    return torch.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


BY_HAND = {"fmod": fmod, "remainder": remainder, "rdiv": lambda x, y: torch.div(y, x)}


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", EXACT + COMPARISONS)
def test_exact_ops_of_two_floats_agree_with_torch_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    op, (x, y) = OPS[name], pairs(dtype)
    want = BY_HAND[name](x, y) if name in BY_HAND else op.torch(x, y)
    got = compute(op, x, y)
    if name in ("maximum", "minimum", "fmax", "fmin", "clamp_min", "clamp_max"):  # either zero
        got, want = got + 0.0, want + 0.0
    assert_within(got, want, 0, (x, y), name)


@pytest.mark.parametrize(
    "name", [op.name for op in OPS.values() if op.name in ("pow", "float_power", "atan2", "hypot", "xlogy", "xlog1py")]
)
def test_functions_of_two_floats_are_within_the_bound_of_the_table(name: str) -> None:
    op, (x, y) = OPS[name], pairs(f32)
    if name == "xlog1py":  # a subnormal logarithm has a bound in its own units only
        keep = (y == 0) | (y.abs() >= 2**-126) | y.isnan()
        x, y = x[keep], y[keep]
    dtype = result_dtype(op, f32)
    assert dtype is not None
    with np.errstate(over="ignore", invalid="ignore"):
        want = round_once(op.torch(x.double(), y.double()), f32)
    if dtype == f64:
        return assert_within(compute(op, x.double(), y.double()), op.torch(x.double(), y.double()), op.ulp[1], (x, y), name)
    for approx in APPROX:
        assert_within(compute(op, x, y, approx=approx), want, op.ulp[0], (x, y), f"{name} {approx}")


def test_powers_by_a_number_are_torchs() -> None:
    x = torch.cat([torch.tensor([-0.0, 0.0, inf, -inf, nan, -8.0, 2.0**65, 2.0**-70]), fp32_inputs()[::5]])
    op = OPS["pow_number"]
    for exponent in (2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 0.0, 1.0, -3.0, 2.5):
        want = round_once(torch.pow(x.double(), exponent), f32)
        for approx in APPROX:
            assert_within(compute(op, x, exponent, approx=approx), want, op.ulp[0], (x,), f"** {exponent} {approx}")
    special = compute(op, x[:4], 0.5).tolist()
    assert special[:3] == [0.0, 0.0, inf]
    assert math.isnan(special[3])  # as sqrt; C's pow(-inf, 0.5) is inf


@pytest.mark.parametrize("name", ["lerp", "addcmul", "addcdiv", "add_alpha", "sub_alpha", "logaddexp", "logaddexp2"])
def test_sums_of_terms_are_within_the_bound_of_the_largest(name: str) -> None:
    rng = np.random.default_rng(9)
    op = OPS[name]
    x, y, z = (torch.from_numpy(rng.uniform(-50, 50, 30_000)).float() for _ in range(3))
    operands: tuple[Any, ...] = {
        "lerp": (x, y, z / 50),
        "addcmul": (x, y, z, 3.0),
        "addcdiv": (x, y, z, 3.0),
        "add_alpha": (x, y, 3.0),
        "sub_alpha": (x, y, 3.0),
    }.get(name, (x, y))
    terms = {
        "lerp": lambda: [(y.double() - x) * z / 50, (y.double() - x) * (1 - z / 50)],
        "addcmul": lambda: [y.double() * z * 3],
        "addcdiv": lambda: [y.double() / z * 3],
        "add_alpha": lambda: [y * 3],
        "sub_alpha": lambda: [y * 3],
    }.get(name, lambda: [torch.ones(len(x))])()
    want = op.torch(*(v.double() if isinstance(v, torch.Tensor) else v for v in operands))
    largest = torch.stack([term.double().abs() for term in (x, y, want, *terms)]).amax(0)
    unit = np.ldexp(1.0, np.frexp(largest.numpy())[1] - 24)
    for approx in APPROX:
        error = (compute(op, *operands, approx=approx).double() - want).abs().numpy() / unit
        assert error.max() <= op.ulp[0] + 0.5, f"{name} {approx}: {error.max()} units"


# Of each the larger of its two terms where they cancel; and from where on fp32 squares overflow.
LARGER_TERM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu_slope": torch.special.ndtr,
    "gelu_tanh_slope": lambda x: torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
}
SQUARES_OVERFLOW = 2.0**63


@pytest.mark.parametrize("dtype", [f16, bf16, f32], ids=str)
@pytest.mark.parametrize("name", SLOPES)
def test_slopes_are_within_the_bound_of_the_largest_term(name: str, dtype: torch.dtype) -> None:
    """In both tiers, and a tenth of a unit of fp16 before the rounding in the half one, at every half and at any fp32 between."""
    op = OPS[name]
    x = torch.cat([fp32_inputs(), every_half(f16), every_half(bf16)])
    x = x[~(x.abs() >= SQUARES_OVERFLOW) | x.isinf()]
    want = exact(op, x)
    largest = torch.maximum(want.abs(), LARGER_TERM[name](x.double())).nan_to_num(1.0).numpy()
    precision, lowest = FORMATS[dtype][:2]
    unit = np.ldexp(1.0, np.maximum(np.frexp(largest)[1] - 1, lowest) - (precision - 1))
    for tier, bound in (("", op.ulp[0] + 0.5 if dtype == f32 else 0.05), *([] if dtype == f32 else [("_half", 0.1)])):
        for approx in APPROX:
            got = compute(op, x, tier=tier, approx=approx).double()
            assert torch.equal(got.isnan(), want.isnan())
            assert torch.equal(want.isnan(), ~torch.isfinite(x))  # as in torch
            error = np.nan_to_num((got - want).abs().numpy() / unit)
            assert error.max() <= bound, f"{name}{tier} {approx} at {x[int(error.argmax())].item()!r}: {error.max()} units"


def test_contraction_is_where_torchs_kernels_contract() -> None:
    """The product a * a less its rounded value: 2^-24 where it is contracted, 0 where it is not."""
    a, c = torch.tensor([1 + 2**-12]), torch.tensor([-(1 + 2**-11)])
    assert compute(OPS["addcmul"], c, a, a, 1.0).tolist() == [2**-24]
    assert compute(OPS["add_alpha"], c, a, a).tolist() == [2**-24]
    assert compute(OPS["add"], compute(OPS["mul"], a, a), c).tolist() == [0.0]


def test_choice_and_bounds() -> None:
    x = torch.tensor([nan, -9.0, 3.0, 9.0])
    assert_within(compute(OPS["clamp"], x, 4.0, 2.0), torch.tensor([nan, 2.0, 2.0, 2.0]), 0, (x,), "crossed")
    low, high = torch.tensor([0.0, nan, 4.0, -5.0]), torch.tensor([1.0, 1.0, nan, -6.0])
    assert_within(compute(OPS["clamp"], x, low, high), torch.tensor([nan, nan, nan, -6.0]), 0, (x,), "tensor bounds")
    mask = torch.tensor([True, False, True, False])
    assert_within(compute(OPS["where"], mask, x, high), torch.tensor([nan, 1.0, 3.0, -6.0]), 0, (x,), "where")
    assert_within(compute(OPS["masked_fill"], x, mask, 7.0), torch.tensor([7.0, -9.0, 7.0, 9.0]), 0, (x,), "masked_fill")


def test_rounding_to_decimals_is_torchs() -> None:
    x = torch.cat([torch.tensor([0.125, 2.675, -2.5, -0.0, inf, nan, 12345.678]), torch.linspace(-1000, 1000, 20_001)])
    op = OPS["round_decimals"]
    for decimals in (0, 1, 2, 3, -1, -2):
        for dtype in (f32, f64):
            program_input = x.to(dtype)
            got = compute(op, program_input, torch.full_like(program_input, decimals))
            assert_within(got, torch.round(program_input, decimals=decimals), 0, (x,), f"decimals={decimals}")


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if op.eager and op.name not in ("round_decimals",)])
def test_torchs_own_formulas_agree_where_nothing_cancels(name: str) -> None:
    x, y = torch.linspace(-4, 4, 4001).float() + 0.0003, torch.linspace(0.5, 3, 4001)
    op = OPS[name]
    operands = (x, *NUMBERS.get(name, (y,) if len(op.operands) > 1 else ()))
    want = exact(op, *operands)
    got = compute(op, *operands, tier="_eager").double()
    assert torch.allclose(got, want, rtol=2e-6, atol=2e-7, equal_nan=True)


# What ATen's CUDA kernels compute where its CPU kernels, to which the rest is held, have another formula or round in its midst.
def _exactly(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """A function of the C library as the emulator has it: the exact value rounded to fp32."""
    return function(x.double()).float()


def _cdf(x: torch.Tensor) -> torch.Tensor:
    t = x * math.sqrt(0.5)
    tail = 0.5 * _exactly(torch.erfc, t.abs())
    return torch.where(t.abs() < 1, 0.5 + 0.5 * _exactly(torch.erf, t), torch.where(t > 0, 1 - tail, tail))


def _contracted(a: float, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """fp32 a * b + c, rounded once: the product is exact in fp64."""
    return (torch.tensor(a).double() * b.double() + c.double()).float()


ON_CUDA: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: x * 0.5 * (1 + _exactly(torch.erf, x * math.sqrt(0.5))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + _exactly(torch.tanh, math.sqrt(2 / math.pi) * _contracted(0.044715, x * x * x, x))),
    "logit": lambda x: _exactly(torch.log, x / (1 - x)),
    "logit_eps": lambda x: (lambda z: _exactly(torch.log, z / (1 - z)))(x.clamp(0.125, 0.875)),
    "ndtr": _cdf,
}


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("name", [op.name for op in UNARY if op.eager])
def test_eager_mode_is_atens_for_every_half_input(name: str, dtype: torch.dtype) -> None:
    """Whole kernels, against torch on the CPU or ATen's formula in fp32; a unit of play for the last bits of the C library."""
    op, x = OPS[name], every_half(dtype).to(dtype)
    numbers = NUMBERS.get(name, ())
    got = run_emulated(wl.fuse(lambda x: op.torch(x, *numbers), name=name, numerics="eager"), x)
    want = ON_CUDA[name](x.float()).to(dtype) if name in ON_CUDA else op.torch(x, *numbers)
    assert_within(got + 0.0, want + 0.0, 1, (x,), name)


# ---- integers

BYTES = {torch.int8: torch.arange(-128, 128).to(torch.int8), torch.uint8: torch.arange(256).to(torch.uint8)}
DIVISIONS = ("div_trunc", "div_floor", "div_trunc_number", "div_floor_number", "fmod", "remainder")
INTEGER_ROWS = [op for op in OPS.values() if {"signed", "unsigned"} & set(op.cuda) and "shape" not in op.types]


def wide_values(dtype: torch.dtype) -> torch.Tensor:
    """The ends of the range and of the narrower ones, small values, random ones."""
    info = torch.iinfo(dtype)
    ends = [v + d for v in (info.min, info.max, 0, 2**7, 2**15, -(2**15), 2**31, -(2**31), 2**53) for d in (-2, -1, 0, 1, 2)]
    kept = [v for v in ends if info.min <= v <= info.max]
    return torch.cat(
        [torch.tensor(kept, dtype=dtype), torch.randint(-100, 100, (40,)).to(dtype), torch.randint(-(2**62), 2**62, (40,)).to(dtype)]
    )


def grid(op: Op, values: torch.Tensor) -> list[torch.Tensor]:
    """Every pair of values; a mask that varies with them; 3, or 1, for what a row takes besides."""
    pair = [v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij")]
    rest = iter(pair if op.name not in ONLY_NUMBERS else [pair[0], *(torch.full_like(pair[0], int(v)) for v in NUMBERS[op.name])])
    third = torch.full_like(pair[0], min(3, int(values.max())))
    return [(pair[0] > pair[1]) if mark == "bool" and values.dtype != torch.bool else next(rest, third) for mark in op.types]


@pytest.mark.parametrize("name", [op.name for op in INTEGER_ROWS if op.name != "pow_number"])
def test_integers_agree_with_torch(name: str) -> None:
    """Every pair of 8-bit integers; the ends of the wider types."""
    op = OPS[name]
    for dtype in INTS:
        if DTYPES[dtype].kind not in op.cuda or result_dtype(op, dtype) is None:
            continue
        operands = grid(op, BYTES.get(dtype, wide_values(dtype)))
        if name in DIVISIONS:  # torch on the CPU divides in hardware, which traps
            keep = (operands[1] != 0) & ((operands[1] != -1) | (operands[0] != torch.iinfo(dtype).min))
            operands = [v[keep] for v in operands]
        if name == "lcm":  # torch divides the minimum by -1
            keep = (operands[0] != torch.iinfo(dtype).min) & (operands[1] != torch.iinfo(dtype).min)
            operands = [v[keep] for v in operands]
        if name == "masked_fill":
            operands[2] = torch.full_like(operands[0], 3)
        assert_within(compute(op, *operands), op.torch(*torch_operands(op, operands)), 0, tuple(operands), f"{name} {dtype}")


@pytest.mark.parametrize("dtype", [dtype for dtype in INTS if dtype.is_signed], ids=str)
def test_the_minimum_by_minus_one_wraps(dtype: torch.dtype) -> None:
    low, minus = torch.tensor([torch.iinfo(dtype).min], dtype=dtype), torch.tensor([-1], dtype=dtype)
    for name in DIVISIONS:
        want = low if name.startswith("div") else torch.zeros_like(low)
        assert_within(compute(OPS[name], low, minus), want, 0, (low,), name)


@pytest.mark.parametrize("name", DIVISIONS)
def test_integer_division_by_zero_harms_nothing_else(name: str) -> None:
    for dtype in INTS:
        x, y = torch.arange(1, 9).to(dtype), torch.tensor([1, 2, 0, 3, 4, 0, 5, 6]).to(dtype)
        keep = y != 0
        assert torch.equal(compute(OPS[name], x, y)[keep], OPS[name].torch(x[keep], y[keep]))


def test_integer_powers_by_a_number() -> None:
    for dtype in INTS:
        for exponent in (0, 1, 2, 3, 5, 7):
            x = BYTES.get(dtype, wide_values(dtype))
            assert torch.equal(compute(OPS["pow_number"], x, exponent), x**exponent)


@pytest.mark.parametrize("name", [op.name for op in OPS.values() if "bool" in op.cuda and "shape" not in op.types])
def test_booleans_agree_with_torch(name: str) -> None:
    op = OPS[name]
    if name == "nan_to_num":
        pytest.skip("torch takes no booleans for its numbers")
    for last in (False, True):
        operands = [v.clone() for v in grid(op, torch.tensor([False, True]))]
        operands[2:] = [torch.full_like(v, last) for v in operands[2:]]
        numbers = [bool(v[0]) if name in ("alpha", "value") else v for name, v in zip(op.operands, operands, strict=True)]
        assert_within(compute(op, *operands), op.torch(*numbers), 0, tuple(operands), name)
