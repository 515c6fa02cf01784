"""The table of derivatives: for each row of the table of ops, the gradient of each operand that has one.

Rules are arithmetic of the same rows, so that gradients have gradients; the formulas are torch's (``derivatives.yaml``, its cases of ties
and zeros included), those of real numbers, which hold for complex ones too where an op is analytic. Knows rows and numbers, never
expressions, layouts or kernels.
"""

from __future__ import annotations

import cmath
import inspect
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from wideload.draws import DRAW_OPS
from wideload.ops_table import OPS

__all__ = ["NOT_ANALYTIC", "RULES", "ZERO", "Rule", "parameters_of"]

Rule = Callable[..., Any]
"""Takes ``g`` (the gradient of the op's result), ``result`` and operands, by their names in the row; returns the operand's gradient.

Tensors have operators and, as methods, the rows of the table of ops; numbers of the expression are Python numbers or runtime
numbers, which only ``host`` computes with.
"""

ZERO: Final[Rule] = lambda: None  # noqa: E731
"""The gradient is zero wherever it is defined: torch gives zeros, not None."""

RULES: dict[str, Mapping[str, Rule]] = {}
"""Row name -> operand name -> rule. A row that is missing has no rule here; an operand that is missing has no gradient in torch."""


def parameters_of(rule: Rule) -> tuple[str, ...]:
    """What a rule reads."""
    return tuple(inspect.signature(rule).parameters)


def _rule(names: str, **rules: Rule) -> None:
    """Add the derivatives of rows ``names``."""
    for name in names.split():
        op = OPS[name] if name in OPS else DRAW_OPS[name]
        for operand, rule in rules.items():
            unknown = {operand, *parameters_of(rule)}.difference(op.operands, ("g", "result"))
            if unknown:
                raise KeyError(f"the derivative of {name} names {unknown}; its operands are {op.operands}")
        RULES[name] = MappingProxyType(rules)


def host(function: Callable[..., Any], *numbers: Any) -> Any:
    """``function`` of numbers of the expression: now where all are constants, at each call where one is a runtime number."""
    runtime = next((number for number in numbers if hasattr(number, "derived")), None)
    return function(*numbers) if runtime is None else runtime.derived(function, *numbers)


def _complement(number: Any) -> Any:
    return 1 - number


def _next(number: Any) -> Any:
    return number + 1


def _negated(number: Any) -> Any:
    return -number


def _is(number: Any, value: float) -> bool:
    """Whether an operand is this constant; a runtime number, which may be it at one call only, is not."""
    return isinstance(number, int | float) and number == value


def _is_tensor(operand: Any) -> bool:
    return hasattr(operand, "call")


def _tensor(operand: Any, like: Any) -> Any:
    """An operand that may be a number, as a tensor."""
    return operand if _is_tensor(operand) else like.full_like(operand)


def _scaled(g: Any, number: Any) -> Any:
    return g if _is(number, 1) else g * number


# ---- arithmetic

_rule("add", input=lambda g: g, other=lambda g: g)
_rule("add_alpha", input=lambda g: g, other=lambda g, alpha: g * alpha)
_rule("sub", input=lambda g: g, other=lambda g: -g)
_rule("sub_alpha", input=lambda g: g, other=lambda g, alpha: g * host(_negated, alpha))
_rule("mul", input=lambda g, other: g * other, other=lambda g, input: g * input)
_rule("neg", input=lambda g: -g)
_rule("positive clone clone_contiguous contiguous resolve_conj", input=lambda g: g)
_rule("channels_last clone_channels_last channels_last_3d clone_channels_last_3d", input=lambda g: g)
_rule("fill", input=ZERO, value=lambda g: g)
_rule("abs", input=lambda g, input: g * input.sgn())
_rule("square", input=lambda g, input: g * (input * 2))
_rule("reciprocal", input=lambda g, result: -g * (result * result))
_rule("detach")

# ---- division

_rule("div div_number", input=lambda g, other: g / other, other=lambda g, input, other: -g * ((input / other) / other))
_rule("rdiv", input=lambda g, input, number: -g * (input.reciprocal().square() * number))
_rule("div_trunc div_trunc_number div_floor div_floor_number", input=ZERO, other=ZERO)
_rule("fmod", input=lambda g: g, other=lambda g, input, other: -g * input.div_trunc(other))
_rule("remainder", input=lambda g: g, other=lambda g, input, other: -g * input.div_floor(other))

# ---- choice and bounds


def _masked(g: Any, condition: Any) -> Any:
    """``g`` where the condition holds, else 0."""
    return condition.where(g, 0)


_rule("where", input=lambda g, condition: _masked(g, condition), other=lambda g, condition: condition.where(0, g))
_rule("masked_fill", input=lambda g, mask: mask.where(0, g), value=lambda g, mask: _masked(g, mask))


def _extremum(loses: str) -> dict[str, Rule]:
    """A tie gives each operand the half; NaN gives both all."""
    return {
        "input": lambda g, input, other: input.call(loses, other).where(0, (input == other).where(g / 2, g)),
        "other": lambda g, input, other: other.call(loses, input).where(0, (input == other).where(g / 2, g)),
    }


def _extremum_of_numbers(wins: str) -> dict[str, Rule]:
    """A tie gives the first all; of a NaN and a number, the number gets all."""
    return {
        "input": lambda g, input, other: _masked(g, input.call(wins, other) | other.isnan()),
        "other": lambda g, input, other: (input.call(wins, other) | other.isnan()).where(0, g),
    }


_rule("maximum", **_extremum("lt"))
_rule("minimum", **_extremum("gt"))
_rule("fmax", **_extremum_of_numbers("ge"))
_rule("fmin", **_extremum_of_numbers("le"))
_rule("clamp_min", input=lambda g, input, min: _masked(g, input >= min), min=lambda g, input, min: _masked(g, input < min))
_rule("clamp_max", input=lambda g, input, max: _masked(g, input <= max), max=lambda g, input, max: _masked(g, input > max))

_rule(
    "clamp",
    input=lambda g, input, min, max: _masked(g, (input >= min) & (input <= max)),
    min=lambda g, input, min, max: _masked(g, (min < max) & (input < min)),
    max=lambda g, input, min, max: _masked(g, (input > max) | (max < min)),
)
_rule("nan_to_num", input=lambda g, input: g * input.isfinite())

# ---- CUDA's math library

_LN_2, _LN_10 = math.log(2), math.log(10)


def _reciprocal_square(x: Any, y: Any) -> Any:
    """``1 / (x**2 + y**2)``, and 0 at the origin."""
    square = x * x + y * y
    return (square == 0).where(0, square.reciprocal())


_rule("exp", input=lambda g, result: g * result)
_rule("exp2", input=lambda g, result: g * result * _LN_2)
_rule("expm1", input=lambda g, result: g * (result + 1))
_rule("log", input=lambda g, input: g / input)
_rule("log2", input=lambda g, input: g / (input * _LN_2))
_rule("log10", input=lambda g, input: g / (input * _LN_10))
_rule("log1p", input=lambda g, input: g / (input + 1))
_rule("sqrt", input=lambda g, result: g / (result * 2))
_rule("rsqrt", input=lambda g, result: g * -0.5 * (result * result * result))
_rule("asin", input=lambda g, input: g * (1 - input * input).rsqrt())
_rule("acos", input=lambda g, input: -g * (1 - input * input).rsqrt())
_rule("atan", input=lambda g, input: g / (input * input + 1))
_rule("sinh", input=lambda g, input: g * input.cosh())
_rule("cosh", input=lambda g, input: g * input.sinh())
_rule("asinh", input=lambda g, input: g * (input * input + 1).rsqrt())
_rule("acosh", input=lambda g, input: g * (input * input - 1).rsqrt())
_rule("atanh", input=lambda g, input: g / (1 - input * input))
_rule("erf", input=lambda g, input: g * (-(input * input)).exp() * (2 / math.sqrt(math.pi)))
_rule("erfc", input=lambda g, input: g * (-(input * input)).exp() * (-2 / math.sqrt(math.pi)))
_rule("sin", input=lambda g, input: g * input.cos())
_rule("cos", input=lambda g, input: g * -input.sin())
_rule("tan", input=lambda g, result: g * (result * result + 1))
_rule("tanh", input=lambda g, result: g * (1 - result * result))
_rule(
    "atan2",
    input=lambda g, input, other: g * (other * _reciprocal_square(input, other)),
    other=lambda g, input, other: -g * (input * _reciprocal_square(input, other)),
)
_rule("hypot", input=lambda g, input, result: g * (input / result), other=lambda g, other, result: g * (other / result))
_rule("copysign", input=lambda g, input, result: g * (input == 0).where(0, result / input), other=ZERO)

# ---- special functions

_SQRT_PI, _SQRT_2PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)
_SMALL_BESSEL = 1e-30
"""Below, ``i1(x) / x`` is its limit, 1/2."""


def _sinc(g: Any, input: Any) -> Any:
    angle = input * math.pi
    scale = input * angle
    return (scale == 0).where(0, g * ((angle * angle.cos() - angle.sin()) / scale))


def _outside(input: Any, low: Any, high: Any) -> Any:
    return (input < low) | (input > high)


def _logit_slope(g: Any, input: Any) -> Any:
    """Infinite at 0, whatever its sign, and at 1."""
    return g / ((input == 0) | (input == 1)).where(0, input * (1 - input))


def _bessel_slope(g: Any, input: Any, even: Any, rest: Any) -> Any:
    """Of an odd function whose slope is ``even - rest / x``: 1/2 at 0, where the quotient has no value."""
    is_small = input.abs() < _SMALL_BESSEL
    return g * is_small.where(0.5, even - rest / is_small.where(1, input))


_rule("sinc", input=_sinc)
_rule("logit", input=lambda g, input: _outside(input, 0, 1).where(math.nan, _logit_slope(g, input)))
_rule("logit_eps", input=lambda g, input, eps: _outside(input, eps, host(_complement, eps)).where(0, _logit_slope(g, input)))
_rule("entr", input=lambda g, input: -g * (input.log() + 1))
_rule("ndtr", input=lambda g, input: g * ((input * input * -0.5).exp() * (1 / _SQRT_2PI)))
_rule("ndtri", input=lambda g, result: g * ((result * result * 0.5).exp() * _SQRT_2PI))
_rule("erfinv", input=lambda g, result: g * ((result * result).exp() * (_SQRT_PI / 2)))
_rule("erfcx", input=lambda g, input, result: g * (input * result * 2 - 2 / _SQRT_PI))
_rule("log_ndtr", input=lambda g, input: g / (input * -math.sqrt(0.5)).erfcx() * math.sqrt(2 / math.pi))
_rule("lgamma", input=lambda g, input: g * input.digamma())
_rule("digamma", input=lambda g, input: g * input.polygamma(1))
_rule("polygamma", input=lambda g, input, order: g * input.polygamma(host(_next, order)))
_rule("i0", input=lambda g, input: g * input.i1())
_rule("i1", input=lambda g, input, result: _bessel_slope(g, input, input.i0(), result))
_rule("i0e", input=lambda g, input, result: g * (input.i1e() - input.sgn() * result))
_rule("i1e", input=lambda g, input, result: _bessel_slope(g, input, input.i0e() - input.sgn() * result, result))

# ---- powers


def _lowered(exponent: Any) -> Any:
    """The exponent of the derivative; that of ``x**0``, which is multiplied by 0, stays: ``0 * x**-1`` would be NaN at 0."""
    return exponent - 1 if exponent else exponent


def _base_gradient(g: Any, input: Any, exponent: Any) -> Any:
    if _is_tensor(exponent):
        return (exponent == 0).where(0, g * (exponent * input.pow(exponent - 1)))
    if _is(exponent, 0):
        return None
    if _is(exponent, 1):
        return g
    lowered = host(_lowered, exponent)
    return g * ((input if _is(lowered, 1) else input.pow_number(lowered)) * exponent)


def _log_of_number(base: Any) -> Any:
    """As C's log: -inf at 0, NaN below."""
    if isinstance(base, complex):
        return cmath.log(base)
    return math.log(base) if base > 0 else -math.inf if base == 0 else math.nan


def _is_not_below_zero(exponent: Any) -> Any:
    return (exponent.imag() == 0) & (exponent.real() >= 0) if exponent.dtype.is_complex else exponent >= 0


def _exponent_gradient(g: Any, input: Any, exponent: Any, result: Any) -> Any:
    """``0**b`` is 0 for every ``b > 0`` and torch takes its slope as 0 at ``b = 0`` too, where ``0**b * log(0)`` is NaN."""
    if _is_tensor(input):
        exponents = _tensor(exponent, input)
        return ((input == 0) & _is_not_below_zero(exponents)).where(0, g * (result * input.log()))
    slope = g * (result * host(_log_of_number, input))
    if isinstance(input, int | float | complex) and input != 0:
        return slope
    return ((_tensor(input, exponent) == 0) & _is_not_below_zero(exponent)).where(0, slope)


def _double(value: Any) -> Any:
    return value.to(torch.complex128 if value.dtype.is_complex else torch.float64) if _is_tensor(value) else value


_rule("pow_number", input=_base_gradient)
_rule("pow rpow", input=_base_gradient, exponent=_exponent_gradient)
_rule(
    "float_power",
    input=lambda g, input, exponent: _base_gradient(g, _double(input), exponent),
    exponent=lambda g, input, exponent, result: _exponent_gradient(g, _double(input), exponent, result),
)

# ---- rounding, signs

_rule("floor ceil trunc round round_decimals sign", input=ZERO)
_rule("frac", input=lambda g: g)
_rule("bernoulli bernoulli_number", input=ZERO)
_rule("dropout", input=lambda g, draw, threshold, scale: g.call("dropout", draw, threshold, scale))

# ---- complex numbers: the gradient of ``x + iy`` is that of ``x`` plus ``i`` times that of ``y``

NOT_ANALYTIC = frozenset({"abs", "angle", "complex", "conj", "conj_physical", "imag", "polar", "real", "sgn"})
"""Rows whose rules are those of complex numbers as they stand. Of others, the gradient is ``conj(rule(conj(g)))``."""


def _sign_gradient(g: Any, input: Any, result: Any) -> Any:
    """Only what turns the number changes its sign."""
    if not input.dtype.is_complex:
        return None
    length = input.abs()
    return (length == 0).where(0, g / length - result / length * (g / result).real())


def _angle_gradient(g: Any, input: Any) -> Any:
    return (input == 0).where(0, g * 1j / input.conj()) if input.dtype.is_complex else None


_rule("real", input=lambda g: g)
_rule("imag", input=lambda g: g * 1j)
_rule("conj conj_physical", input=lambda g: g.conj())
_rule("sgn", input=_sign_gradient)
_rule("angle", input=_angle_gradient)
_rule("complex", real=lambda g: g.real(), imag=lambda g: g.imag())
_rule("polar", abs=lambda g, result: (g.conj() * result.sgn()).real(), angle=lambda g, result: (g.conj() * result * 1j).real())

# ---- several terms

_rule(
    "lerp",
    input=lambda g, weight: g * (1 - weight if _is_tensor(weight) else host(_complement, weight)),
    end=lambda g, weight: g * weight,
    weight=lambda g, input, end: g * (end - input),
)


_rule(
    "addcmul",
    input=lambda g: g,
    tensor1=lambda g, tensor2, value: g * _scaled(tensor2, value),
    tensor2=lambda g, tensor1, value: g * _scaled(tensor1, value),
)
_rule(
    "addcdiv",
    input=lambda g: g,
    tensor1=lambda g, tensor2, value: _scaled(g, value) / tensor2,
    tensor2=lambda g, tensor1, tensor2, value: -_scaled(g, value) * (tensor1 / (tensor2 * tensor2)),
)
_rule(
    "logaddexp",
    input=lambda g, input, other: g / ((other - input).exp() + 1),
    other=lambda g, input, other: g / ((input - other).exp() + 1),
)
_rule(
    "logaddexp2",
    input=lambda g, input, other: g / ((other - input).exp2() + 1),
    other=lambda g, input, other: g / ((input - other).exp2() + 1),
)
_rule(
    "xlogy",
    input=lambda g, input, other: _unless_dead(g.xlogy(other), input, other, 0),
    other=lambda g, input, other: g * input / other,
)
_rule(
    "xlog1py",
    input=lambda g, input, other: _unless_dead(g.xlog1py(other), input, other, -1),
    other=lambda g, input, other: g * input / (other + 1),
)


def _unless_dead(gradient: Any, input: Any, other: Any, last: float) -> Any:
    """0 where ``0 * log`` was taken of a number that has no finite logarithm."""
    return ((input == 0) & (_tensor(other, input) <= last)).where(0, gradient)


# ---- activations

_INV_SQRT_2PI = 1 / math.sqrt(2 * math.pi)
_GELU_SCALE, _GELU_CUBE = math.sqrt(8 / math.pi), 0.044715
_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _silu(g: Any, input: Any) -> Any:
    gate = input.sigmoid()
    return g * (gate * (input * (1 - gate) + 1))


def _gelu_slope(g: Any, input: Any) -> Any:
    """``(2 - x^2) phi(x)``."""
    square = input * input
    return g * ((2 - square) * ((square * -0.5).exp() * _INV_SQRT_2PI))


def _gelu_tanh_slope(g: Any, input: Any) -> Any:
    """``gelu`` is ``x * s(v)``, with ``v`` twice torch's ``u`` and the sigmoid ``s``: ``2 s' v' + x (s'' v'^2 + s' v'')``."""
    square = input * input
    gate = (input * (square * (_GELU_SCALE * _GELU_CUBE) + _GELU_SCALE)).sigmoid()
    first, second = square * (3 * _GELU_SCALE * _GELU_CUBE) + _GELU_SCALE, input * (6 * _GELU_SCALE * _GELU_CUBE)
    return g * (gate * (1 - gate) * (first * 2 + input * ((1 - gate * 2) * (first * first) + second)))


def _negative(input: Any) -> Any:
    """The input where it is negative, else 0: what the other branch does not take may not overflow, or its own gradient is NaN."""
    return (input < 0).where(input, 0)


def _mish(g: Any, input: Any) -> Any:
    squashed = input.softplus(1, 20).tanh()
    return g * (squashed + input * input.sigmoid() * (1 - squashed * squashed))


_rule("sigmoid", input=lambda g, result: g * ((1 - result) * result))
_rule("silu", input=_silu)
_rule("gelu", input=lambda g, input: g * input.gelu_slope())
_rule("gelu_tanh", input=lambda g, input: g * input.gelu_tanh_slope())
_rule("gelu_slope", input=_gelu_slope)
_rule("gelu_tanh_slope", input=_gelu_tanh_slope)
_rule("mish", input=_mish)
_rule(
    "softplus",
    input=lambda g, input, beta, threshold: (_scaled(input, beta) > threshold).where(g, g * _scaled(input, beta).sigmoid()),
)
_rule("logsigmoid", input=lambda g, input: g * (-input).sigmoid())
_rule("relu", input=lambda g, result: (result <= 0).where(0, g))
_rule("hardtanh", input=lambda g, input, min_val, max_val: ((input <= min_val) | (input >= max_val)).where(0, g))
_rule("leaky_relu", input=lambda g, input, negative_slope: (input > 0).where(g, g * negative_slope))
_rule("elu", input=lambda g, input, alpha: (input <= 0).where(g * _scaled(_negative(input).exp(), alpha), g))
_rule("selu", input=lambda g, input: (input <= 0).where(g * (_negative(input).exp() * (_SELU_SCALE * _SELU_ALPHA)), g * _SELU_SCALE))
_rule("celu", input=lambda g, input, alpha: (input <= 0).where(g * (_negative(input) / alpha).exp(), g))
_rule("hardswish", input=lambda g, input: (input <= -3).where(0, (input < 3).where(g * (input / 3 + 0.5), g)))
_rule("hardsigmoid", input=lambda g, input: _masked(g / 6, (input > -3) & (input < 3)))
_rule("tanhshrink", input=lambda g, input: g * input.tanh().square())
_rule("hardshrink softshrink", input=lambda g, input, lambd: ((input >= host(_negated, lambd)) & (input <= lambd)).where(0, g))
_rule("threshold", input=lambda g, input, threshold: (input <= threshold).where(0, g))
_rule("glu", input=lambda g, other: g * other.sigmoid(), other=lambda g, other, result: g * ((1 - other.sigmoid()) * result))
_rule("prelu", input=lambda g, input, weight: (input > 0).where(g, g * weight), weight=lambda g, input: (input > 0).where(0, g * input))

# ---- losses, of the error

_rule("smooth_l1", error=lambda g, error, beta: g * (error.abs() >= beta).where(error.sgn(), error / beta))
_rule("huber", error=lambda g, error, delta: g * (error.abs() > delta).where(error.sgn() * delta, error))
