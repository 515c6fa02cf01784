"""Turns rows of the table of ops into what can be tried: a torch function of one or two tensors, its exact value, its bounds, its inputs.

Knows the table; never how results are computed or compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from tests.emulator.test_numerics import INEXACT_IN_TORCH, NUMBERS, fmod, remainder, result_dtype
from wideload.ops_table import OPS, Op

__all__ = ["DOMAINS", "MODES", "PAIRS", "UNARY", "Mode", "Row", "all_bits", "every_bits", "make_pairs"]

Mode = Literal["fused", "eager", "fast_math"]
MODES: tuple[Mode, ...] = ("fused", "eager", "fast_math")

FAST_MATH_ULP = 0.1 * 2.0 ** (24 - 8)
"""fp32 units that ``fast_math`` may be off: a tenth of one of bf16, which is what the half tier keeps before it rounds."""
_ANY_ZERO = {
    "relu",
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "logsigmoid",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "logaddexp",
    "logaddexp2",
}
"""Of two zeros either; log(sigmoid(x)) that underflows is +0 in torch, by subtraction, and what cancels to 0 has no sign of its own."""
DOMAINS = {"airy_ai": (-40.0, 20.0)}
"""Where docs/numerics.md states a bound, if not everywhere."""
_TRUSTED = {"igamma": (1e-3, 1e5), "igammac": (1e-3, 1e5), "zeta": (0.0, 1e4)}
"""Sizes of the first operand for which torch's own fp64 is near enough: of igamma(3.6e16, 3.6e16) it makes 3.8, and
igamma(961083.875, 956646) it has to 5 digits."""
_NAN_IS_NAN = {"igamma", "igammac"}
"""Of a NaN these functions are NaN, where torch's may be a limit."""
_LIMITS = {"glu"}
"""Of infinities what fp64 makes of them: eager's gate in fp32 is 0 before the product is taken, and that no number."""
_LEAST_OF_GATES = -80.0
"""Below, an infinity times a gate is what the width of the numbers makes of it."""
_IN_FP32 = {"div_floor", "div_floor_number", "frexp_exponent", "nextafter", "signbit"}
"""Defined by what torch does in fp32: by its steps, or of infinities and of the sign of a NaN, which fp64 need not keep."""

# The maximum error of CUDA's own functions in fp32: CUDA Programming Guide 13, "Mathematical Functions", where a row is a single one.
_DOCUMENTED = {
    **dict.fromkeys("expm1 log log2 log1p".split(), 1),
    **dict.fromkeys("rsqrt exp exp2 log10 sin cos tanh cosh asin acos atan erf erfinv".split(), 2),
    **dict.fromkeys("sinh asinh atanh hypot atan2 angle".split(), 3),
    **dict.fromkeys("tan acosh erfc erfcx pow pow_number".split(), 4),
    "ndtri": 5,
    "ndtr": 5,
    "lgamma": 6,
}


@dataclass(frozen=True)
class Row:
    """A row of the table with the numbers that it takes behind its tensors."""

    op: Op
    numbers: tuple[float, ...] = ()
    num_tensors: int = 1
    labelled: bool = False

    @property
    def name(self) -> str:
        """The op's name; with the number where a row is tried with several."""
        return f"{self.op.name}({', '.join(f'{x:g}' for x in self.numbers)})" if self.labelled else self.op.name

    @property
    def function(self) -> Callable[..., torch.Tensor]:
        """The torch function of the tensors alone."""
        function, numbers = self.op.torch, self.numbers
        return lambda *tensors: function(*tensors, *numbers)

    def exact(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The value in fp64, by a formula that does not cancel; of pairs with infinities and NaN what eager torch makes of them."""
        name, wide = self.op.name, [x.double() for x in tensors]
        # A tensor, since torch divides by a number with its reciprocal.
        divisors = [torch.full_like(tensors[0], number, dtype=torch.float32) for number in self.numbers if name.startswith("div_")]
        if name in _IN_FP32:
            value = self.op.torch(*(x.float() for x in tensors), *divisors)
        elif name in ("fmod", "remainder") and tensors[0].device.type == "cpu":  # torch's vectorised one is not exact for large quotients
            value = (fmod if name == "fmod" else remainder)(*wide)
        elif name == "zeta":
            value = self.op.torch(wide[0], _without_opposites(*wide))
        elif name.startswith("div_trunc"):  # of the rounded quotient
            value = torch.div(*wide, *divisors).float().trunc()
        else:
            value = (self.op.reference or self.op.torch)(*wide, *(divisors or self.numbers))
        if not value.dtype.is_floating_point:
            return value
        if len(tensors) == 1:
            return value.double()
        is_finite = torch.isfinite(tensors[0]) & torch.isfinite(tensors[1])
        as_eager = self.function(*tensors).double()
        if name in _LIMITS:
            return value.double()
        if name in _NAN_IS_NAN:
            as_eager.masked_fill_(tensors[0].isnan() | tensors[1].isnan(), math.nan)
        return torch.where(is_finite, value.double(), as_eager)

    def scale(self, want: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor | None:
        """The largest term (fp64) where terms of either sign are added; None where the result itself is the scale."""
        if self.op.name.startswith("logaddexp"):
            return torch.maximum(*(x.double().abs() for x in tensors)).maximum(want.abs()).nan_to_num(0.0, 0.0)
        if "_polynomial_" in self.op.name:  # the size of this degree's values
            degrees = tensors[1].long().clamp(0, _DEGREES)
            sizes = torch.ones(_DEGREES + 1, dtype=torch.float64, device=want.device)
            return sizes.scatter_reduce_(0, degrees, want.abs().nan_to_num(0.0, 0.0), "amax")[degrees]
        return None

    @property
    def any_zero(self) -> bool:
        """Whether a zero may have either sign."""
        return self.op.name in _ANY_ZERO

    @property
    def documented(self) -> int | None:
        """What NVIDIA states for the function, in fp32 units."""
        return _DOCUMENTED.get(self.op.name)

    @property
    def needs_precision(self) -> bool:
        """Whether torch's own fp64 is too far from the function to be its exact value."""
        return self.op.name in INEXACT_IN_TORCH or self.op.name == "polygamma"

    def modes(self, dtype: torch.dtype) -> tuple[Mode, ...]:
        """The modes whose kernels differ for ``dtype``."""
        return MODES if self.op.half and dtype == torch.float32 else MODES[:2]

    def bound(self, dtype: torch.dtype, mode: Mode) -> float | None:
        """The units that a result may be off; None where the mode promises what eager torch returns instead."""
        if mode == "eager" and self.op.eager:
            return None
        if mode == "fast_math":
            return FAST_MATH_ULP
        return self.op.ulp[0] if dtype == torch.float32 else float(any(self.op.ulp))


def _without_opposites(s: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Where zeta's terms (q + k)^-s begin with pairs of x and -x, the first place behind these: fp64 would not let them cancel."""
    is_paired = (q < 0) & (q.frac() == -0.5) & (s.remainder(2) == 1)
    return torch.where(is_paired, 1 - q, q)


# ---- which rows


_SLOPES = {"gelu_slope", "gelu_tanh_slope"}
"""No functions of torch, but what gradients are made of: sums that cancel, which the emulator's tests hold to their larger terms."""


def _is_real(op: Op) -> bool:
    return "float" in op.cuda and "shape" not in op.types and "bool" not in op.types and op.name not in _SLOPES


_WITH_NUMBERS: dict[str, tuple[float, ...]] = {
    "pow_number": (2.0, 3.0, 0.5, -0.5, -1.0, -2.0, 2.5),
    "div_trunc_number": (3.0,),
    "div_floor_number": (3.0,),
    "rdiv": (3.0,),
    "polygamma": (1, 2),
}
"""Rows of a tensor and a number, and the numbers that each is tried with."""
UNARY = tuple(
    sorted(
        [
            *(Row(op, NUMBERS.get(op.name, ())) for op in OPS.values() if _is_real(op) and (len(op.operands) == 1 or op.name in NUMBERS)),
            *(Row(OPS[name], (number,), labelled=len(numbers) > 1) for name, numbers in _WITH_NUMBERS.items() for number in numbers),
        ],
        key=lambda row: row.name,
    )
)
_NOT_OF_PAIRS = {*_WITH_NUMBERS, *NUMBERS} - {"clamp_min", "clamp_max"} | {"rpow", "round_decimals", "nextafter_f16", "nextafter_bf16"}
"""Rows that take a number there, and those of results in a wider, narrower or complex dtype."""
PAIRS = tuple(
    sorted(
        (
            Row(op, num_tensors=2)
            for op in OPS.values()
            if _is_real(op)
            and len(op.operands) == 2
            and op.name not in _NOT_OF_PAIRS
            and result_dtype(op, torch.float32) in (torch.float32, torch.bool)
        ),
        key=lambda row: row.name,
    )
)


# ---- inputs


def all_bits(device: str, first: int, count: int, stride: int) -> torch.Tensor:
    """The bit patterns ``first * stride``, ``(first + 1) * stride`` and so on as int32, which wrap."""
    bits = torch.arange(first, first + count, device=device, dtype=torch.int64)
    return bits.mul_(stride).to(torch.int32)


def every_bits(device: str, nbytes: int) -> torch.Tensor:
    """All patterns of so many bytes."""
    return torch.arange(1 << 8 * nbytes, device=device, dtype=torch.int64)


_DEGREES = 30
"""Up to which the table bounds polynomials, within -1 and 1."""
_INTERESTING = (
    *(
        0.0,
        2.0**-149,
        2.0**-127,
        2.0**-126,
        2.0**-63,
        2.0**-24,
        2.0**-12,
        0.1,
        0.25,
        1 / 3,
        0.5,
        0.7,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        math.pi,
        5.0,
    ),
    *(6.0, 7.5, 10.0, 20.0, 32.0, 88.72284, 100.0, 103.97, 127.0, 128.0, 149.0, 255.5, 1e4, 65504.0, 2.0**22 + 0.5, 2.0**23 - 0.5),
    *(2.0**23, 2.0**24 - 1, 2.0**24, 2.0**31, 2.0**63, 1e20, 2.0**126, 2.0**127, 3.4028234663852886e38, math.inf, math.nan),
)
_NUM_FAMILIES = 6
_LEAST_OF_ZETA = -100.0


def _interesting(device: str) -> torch.Tensor:
    """Values where something begins or ends, their neighbours, and all of these negated; fp32."""
    marks = torch.tensor(_INTERESTING, dtype=torch.float32, device=device)
    ends = [torch.nextafter(marks, torch.full_like(marks, end)) for end in (math.inf, -math.inf)]
    values = torch.cat([marks, *ends])
    return torch.cat([values, -values])


def make_pairs(row: Row, device: str, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``count`` fp32 pairs at which two-operand functions go wrong; those of special values with each other at seed 0 only.

    Then, by equal parts: any bits; neighbours; quotients at and next to whole numbers and halves; huge ratios; small numbers; and
    for powers results next to the largest, the smallest and to 1, of negative bases too.
    """
    draws, pairs = torch.Generator(device).manual_seed(seed), []
    is_polynomial = "_polynomial_" in row.op.name
    if seed == 0 and not is_polynomial:
        special = _interesting(device)
        pairs = [(special.repeat_interleave(len(special)), special.repeat(len(special)))]
    n = max(1, -(-(count - sum(len(x) for x, _ in pairs)) // _NUM_FAMILIES))

    def whole(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (n,), generator=draws, device=device)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(n, generator=draws, device=device) * (high - low) + low

    def any_bits() -> torch.Tensor:
        return whole(-(2**31), 2**31).to(torch.int32).view(torch.float32)

    def beside(x: torch.Tensor, steps: int) -> torch.Tensor:
        """Up to so many steps from x."""
        return (x.float().view(torch.int32) + whole(-steps, steps + 1).to(torch.int32)).view(torch.float32)

    if is_polynomial:
        low = 0 if row.op.name.startswith("shifted") else -1
        shape = [(uniform(low, 1), whole(0, _DEGREES + 1).float()) for _ in range(_NUM_FAMILIES)]
        return _joined(shape, count)
    base = any_bits()
    divisor = uniform(-3, 3)
    quotient = (divisor * whole(-(2**12), 2**12) * 0.5).float()
    exponent = torch.exp2(uniform(-20, 7)) * torch.where(whole(0, 2) == 0, 1.0, -1.0)
    target = torch.where(whole(0, 2) == 0, 128.0, -149.0) * torch.where(whole(0, 3) == 0, 2.0**-24, 1.0)
    pairs += [
        (any_bits(), any_bits()),
        (base, beside(base, 3) * torch.where(whole(0, 2) == 0, 1.0, -1.0)),
        (beside(quotient, 1), divisor),
        (uniform(-1, 1) * torch.exp2(uniform(60, 127)), uniform(-1, 1) * torch.exp2(uniform(-140, 20))),
        (uniform(-100, 100), uniform(-100, 100)),
        (
            beside(torch.exp2(target / exponent), 4) * torch.where(whole(0, 4) == 0, -1.0, 1.0),
            torch.where(whole(0, 4) == 0, exponent.round(), exponent),
        ),
    ]
    if row.op.name == "zeta":  # it adds up from a negative number to 9, a unit at a time
        pairs = [(x, torch.where(y < _LEAST_OF_ZETA, -y, y)) for x, y in pairs]
    x, y = _joined(pairs, count)
    if row.op.name in _LIMITS:  # fp64 has no gate either from -745 on
        x = torch.where(x.isinf() & (y < _LEAST_OF_GATES), 1.0, x)
    if row.op.name in _TRUSTED:
        low, high = _TRUSTED[row.op.name]
        trusted = ~((x.abs() < low) & (x != 0)) & ~((x > high) & x.isfinite())
        x = torch.where(trusted, x, torch.rand(len(x), generator=draws, device=device) * 40 + low)
    return x, y


def _joined(pairs: list[tuple[torch.Tensor, torch.Tensor]], count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.cat(column)[:count].float() for column in zip(*pairs, strict=True))
    return x.masked_fill_(x.isnan(), math.nan), y.masked_fill_(y.isnan(), math.nan)  # C's fmax takes a signalling NaN otherwise
