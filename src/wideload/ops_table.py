"""The table of ops: what each is called in torch, in CUDA, how exact it is, and which dtype its operands are brought to.

Adding an op is adding a row; a torch function that is a composition of rows is a short function under ``_spells``.
Knows torch's functions and CUDA's expressions, never tensors, layouts or kernels.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from wideload.dtypes import DTYPES, Kind
from wideload.errors import TraceError

__all__ = ["OPS", "SPELLINGS", "Call", "Op", "OperandType", "Spelling", "call"]

OperandType = Literal["result", "common", "bool", "own", "shape"]
"""What an operand is converted to before the op computes.

``result``: the result's dtype. ``common``: ``torch.result_type`` of the operands marked so (comparisons). ``bool``: truth.
``own``: the operand's own dtype. ``shape``: nothing, only its shape counts (``zeros_like``).
"""


@dataclass(frozen=True, eq=False)
class Op:
    """One row.

    ``torch`` takes the operands in order (tensors or Python numbers): it is asked for the result's dtype, and it computes
    on CPU tensors. ``cuda`` is a C++ expression per kind, on ``{operand}`` values of the compute type: the kind is that of the
    type the operands are brought to. Its calls begin with ``::``, so that no local name of the kernel hides them. ``half``
    replaces it where only fp16 or bf16 results flow from the op: cheaper, and still within 1 unit in the last place of those.
    ``eager`` replaces it under ``numerics="eager"``, where ATen's kernel computes another, less exact expression; there
    ``{round}`` stands for the rounding to the result's dtype (nothing for fp32 and fp64).

    ``ulp`` bounds the difference from the correctly rounded result of fp32 and fp64, in units in the last place (0: correctly
    rounded); where terms of either sign are added (``lerp``, ``addcmul``, ...) in those of the largest term. The figures of
    CUDA's own functions are from the CUDA Programming Guide 13, appendix "Mathematical Functions". ``reference`` replaces
    ``torch`` where torch's own fp32 formula on the CPU breaks the bound. ``heavy`` marks expressions long enough that
    a kernel should hold them once. ``keeps_format`` marks results in the memory format of the first
    operand: copies, and constants of its shape.
    """

    name: str
    operands: tuple[str, ...]
    torch: Callable[..., Any]
    cuda: Mapping[Kind, str]
    types: tuple[OperandType, ...]
    ulp: tuple[float, float]
    half: str | None = None
    reference: Callable[..., Any] | None = None
    heavy: bool = False
    eager: Mapping[Kind, str] | None = None
    keeps_format: bool = False
    converts_first: bool = False


@dataclass(frozen=True)
class Call:
    """An op applied to operands: traced tensors, Python numbers, runtime scalars, or other calls."""

    op: Op
    operands: tuple[Any, ...]


Spelling = Callable[..., Any]
"""Takes the arguments of one torch function and returns a ``Call``, an operand, or a structure of them."""

OPS: dict[str, Op] = {}
SPELLINGS: dict[Callable[..., Any], Spelling] = {}


def call(name: str, *operands: Any) -> Call:
    """Row ``name`` applied to ``operands``."""
    return Call(OPS[name], operands)


def _is_number(operand: Any) -> bool:
    """Whether ``operand`` is a Python number or a runtime scalar: of all operands only tensors have a dtype."""
    return not isinstance(operand, Call) and not hasattr(operand, "dtype")


def _is_literal(operand: Any, value: int) -> bool:
    """Whether ``operand`` is the Python integer ``value``; a runtime scalar, which may be it at one call and not at the next, is not."""
    return type(operand) is int and operand == value


# ---- adding rows and spellings

_NAMESPACES = (torch, torch.Tensor, F, torch.special)


def _row(
    name: str,
    operands: str,
    function: Callable[..., Any],
    *,
    floating: str | None = None,
    signed: str | None = None,
    unsigned: str | None = None,
    boolean: str | None = None,
    integer: str | None = None,
    number: str | None = None,
    every: str | None = None,
    types: str = "",
    ulp: tuple[float, float] = (0, 0),
    half: str | None = None,
    eager: str | None = None,
    reference: Callable[..., Any] | None = None,
    heavy: bool = False,
    keeps_format: bool = False,
    converts_first: bool = False,
) -> Op:
    """Add a row. ``integer`` serves both signed and unsigned, ``number`` float too, ``every`` each kind; ``types`` is ``result`` for all operands by default."""
    whole = integer or number or every
    given: dict[Kind, str | None] = {
        "float": floating or number or every,
        "signed": signed or whole,
        "unsigned": unsigned or whole,
        "bool": boolean or every,
    }
    cuda = {kind: expression for kind, expression in given.items() if expression is not None}
    names = tuple(operands.split())
    marks: Any = tuple(types.split()) or ("result",) * len(names)
    OPS[name] = Op(
        name, names, function, cuda, marks, ulp, half, reference, heavy, None if eager is None else {"float": eager}, keeps_format
    )
    return OPS[name]


def _register(spelling: Spelling, names: str) -> None:
    """``spelling`` is how every torch function and tensor method called one of ``names`` is written in rows."""
    for name in names.split():
        functions = [getattr(namespace, name) for namespace in _NAMESPACES if hasattr(namespace, name)]
        if not functions:
            raise AttributeError(f"torch has no function {name}")
        SPELLINGS.update(dict.fromkeys(functions, spelling))


def _spells(names: str) -> Callable[[Spelling], Spelling]:
    def decorate(spelling: Spelling) -> Spelling:
        _register(spelling, names)
        return spelling

    return decorate


def _op(names: str, operands: str, function: Callable[..., Any], **row: Any) -> None:
    """Add the row called as the first of ``names``, spelled with all of them: the parameters are the operands, none has a default."""
    op = _row(names.split()[0], operands, function, **row)
    signature = inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in op.operands])

    def spelling(*args: Any, **kwargs: Any) -> Call:
        return Call(op, signature.bind(*args, **kwargs).args)

    spelling.__signature__ = signature  # type: ignore[attr-defined]
    _register(spelling, names)


def _out_of_place(inplace: Any, result: Any) -> Any:
    if inplace:
        raise TraceError(
            "inplace=True would write into an argument of a fused function. Leave it out, and give out= to the fused function instead."
        )
    return result


# ---- arithmetic

_row("add", "input other", operator.add, floating="{input} + {other}", integer="::wrap_add({input}, {other})", boolean="{input} || {other}")
_row(
    "add_alpha",
    "input other alpha",
    lambda input, other, alpha: torch.add(input, other, alpha=alpha),
    floating="::fma({alpha}, {other}, {input})",
    integer="::wrap_add({input}, ::wrap_mul({alpha}, {other}))",
    boolean="{input} || ({alpha} && {other})",
)
_row("sub", "input other", operator.sub, floating="{input} - {other}", integer="::wrap_sub({input}, {other})")
_row(
    "sub_alpha",
    "input other alpha",
    lambda input, other, alpha: torch.sub(input, other, alpha=alpha),
    floating="::fma(-{alpha}, {other}, {input})",
    integer="::wrap_sub({input}, ::wrap_mul({alpha}, {other}))",
)
_row("mul", "input other", operator.mul, floating="{input} * {other}", integer="::wrap_mul({input}, {other})", boolean="{input} && {other}")
_op("neg negative __neg__", "input", torch.neg, floating="-{input}", integer="::wrap_neg({input})")
_op("positive __pos__", "input", torch.positive, floating="{input}", integer="{input}")
_op("abs absolute __abs__", "input", torch.abs, floating="::fabs({input})", signed="::wrap_abs({input})", unsigned="{input}")
_op("square", "input", torch.square, floating="{input} * {input}", integer="::wrap_mul({input}, {input})")
_row("clone", "input", torch.clone, every="{input}", keeps_format=True)

# Where the divisor is a number, ATen multiplies by its reciprocal.
_row("div", "input other", torch.div, floating="{input} / {other}")
_row("div_number", "input other", torch.div, floating="{input} / {other}", eager="{input} * (1 / {other})")
_row(
    "rdiv",
    "input other",
    lambda input, other: other / input,
    floating="{other} / {input}",
    eager="{round}(1 / {input}) * {other}",
    reference=lambda input, other: torch.div(torch.as_tensor(other), input),
)
_row(
    "div_trunc",
    "input other",
    lambda input, other: torch.div(input, other, rounding_mode="trunc"),
    floating="::trunc({input} / {other})",
    integer="::divide_trunc({input}, {other})",
)
_row(
    "div_trunc_number",
    "input other",
    OPS["div_trunc"].torch,
    floating="::trunc({input} / {other})",
    integer="::divide_trunc({input}, {other})",
    eager="::trunc({input} * (1 / {other}))",
)
_row(
    "div_floor",
    "input other",
    operator.floordiv,
    floating="::divide_floor({input}, {other})",
    integer="::divide_floor({input}, {other})",
    heavy=True,
)
_op("fmod", "input other", torch.fmod, floating="::modulo_trunc({input}, {other})", integer="::modulo_trunc({input}, {other})", heavy=True)
_row(
    "remainder",
    "input other",
    operator.mod,
    floating="::modulo_floor({input}, {other})",
    integer="::modulo_floor({input}, {other})",
    heavy=True,
)
_op("reciprocal", "input", torch.reciprocal, floating="1 / {input}")


@_spells("add __add__ __radd__")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return call("add", input, other) if _is_literal(alpha, 1) else call("add_alpha", input, other, alpha)


@_spells("sub subtract __sub__")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return call("sub", input, other) if _is_literal(alpha, 1) else call("sub_alpha", input, other, alpha)


@_spells("rsub __rsub__")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return _sub(other, input, alpha=alpha)


@_spells("mul multiply __mul__ __rmul__")
def _mul(input: Any, other: Any) -> Call:
    return call("mul", input, other)


@_spells("div divide")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Call:
    if rounding_mode == "floor":
        return call("div_floor", input, other)
    if rounding_mode not in (None, "trunc"):
        raise TypeError(f"div expected rounding_mode to be one of None, 'trunc', or 'floor' but found '{rounding_mode}'")
    return call(f"div{'_trunc' if rounding_mode else ''}{'_number' if _is_number(other) else ''}", input, other)


@_spells("true_divide __truediv__ __div__")
def _true_divide(input: Any, other: Any) -> Call:
    return _div(input, other)


@_spells("__rtruediv__ __rdiv__")
def _rdiv(input: Any, other: Any) -> Call:
    return call("rdiv", input, other)


@_spells("floor_divide __floordiv__")
def _floor_divide(input: Any, other: Any) -> Call:
    return call("div_floor", input, other)


@_spells("__rfloordiv__")
def _rfloordiv(input: Any, other: Any) -> Call:
    return call("div_floor", other, input)


@_spells("remainder __mod__")
def _remainder(input: Any, other: Any) -> Call:
    return call("remainder", input, other)


@_spells("__rmod__")
def _rmod(input: Any, other: Any) -> Call:
    return call("remainder", other, input)


# ---- comparisons, logic, bits

for _names, _symbol in (
    ("eq __eq__", "=="),
    ("ne not_equal __ne__", "!="),
    ("lt less __lt__", "<"),
    ("le less_equal __le__", "<="),
    ("gt greater __gt__", ">"),
    ("ge greater_equal __ge__", ">="),
):
    _op(_names, "input other", getattr(operator, _names.split()[0]), every=f"{{input}} {_symbol} {{other}}", types="common common")

_op("logical_and", "input other", torch.logical_and, boolean="{input} && {other}", types="bool bool")
_op("logical_or", "input other", torch.logical_or, boolean="{input} || {other}", types="bool bool")
_op("logical_xor", "input other", torch.logical_xor, boolean="{input} != {other}", types="bool bool")
_op("logical_not", "input", torch.logical_not, boolean="!{input}", types="bool")
_op("bitwise_and __and__ __rand__", "input other", operator.and_, integer="{input} & {other}", boolean="{input} && {other}")
_op("bitwise_or __or__ __ror__", "input other", operator.or_, integer="{input} | {other}", boolean="{input} || {other}")
_op("bitwise_xor __xor__ __rxor__", "input other", operator.xor, integer="{input} ^ {other}", boolean="{input} != {other}")
_op("bitwise_not __invert__", "input", torch.bitwise_not, integer="~{input}", boolean="!{input}")
_op("bitwise_left_shift __lshift__", "input other", torch.bitwise_left_shift, integer="::shift_left({input}, {other})")
_op("bitwise_right_shift __rshift__", "input other", torch.bitwise_right_shift, integer="::shift_right({input}, {other})")


@_spells("__rlshift__")
def _rlshift(input: Any, other: Any) -> Call:
    return call("bitwise_left_shift", other, input)


@_spells("__rrshift__")
def _rrshift(input: Any, other: Any) -> Call:
    return call("bitwise_right_shift", other, input)


for _names, _floating, _whole in (
    ("isnan", "{input} != {input}", "false"),
    ("isinf", "::isinf({input})", "false"),
    ("isfinite", "::isfinite({input})", "true"),
    ("isposinf", "::isinf({input}) && {input} > 0", "false"),
    ("isneginf", "::isinf({input}) && {input} < 0", "false"),
    ("signbit", "::signbit({input})", ""),
):
    _op(
        _names,
        "input",
        getattr(torch, _names),
        floating=_floating,
        signed=_whole or "{input} < 0",
        unsigned=_whole or "false",
        boolean=_whole or "false",
        types="common",
    )

# ---- choice, bounds

_row("where", "condition input other", torch.where, every="{condition} ? {input} : {other}", types="bool result result", converts_first=True)
_row("masked_fill", "input mask value", torch.masked_fill, every="{mask} ? {value} : {input}", types="result bool result")
_op("maximum", "input other", torch.maximum, every="::maximum({input}, {other})")
_op("minimum", "input other", torch.minimum, every="::minimum({input}, {other})")
_op("fmax", "input other", torch.fmax, floating="::fmax({input}, {other})", every="::maximum({input}, {other})")
_op("fmin", "input other", torch.fmin, floating="::fmin({input}, {other})", every="::minimum({input}, {other})")
_row("clamp", "input min max", torch.clamp, number="::minimum(::maximum({input}, {min}), {max})")
_op("clamp_min", "input min", torch.clamp_min, every="::maximum({input}, {min})")
_op("clamp_max", "input max", torch.clamp_max, every="::minimum({input}, {max})")
_op("heaviside", "input values", torch.heaviside, every="{input} == 0 ? {values} : {input} > 0")
_row(
    "nan_to_num",
    "input nan posinf neginf",
    torch.nan_to_num,
    floating="{input} != {input} ? {nan} : !::isinf({input}) ? {input} : {input} > 0 ? {posinf} : {neginf}",
    every="{input}",
)


@_spells("where")
def _where(condition: Any, input: Any, other: Any) -> Call:
    return call("where", condition, input, other)


def _tensor_where(input: Any, condition: Any, other: Any) -> Call:
    return call("where", condition, input, other)


SPELLINGS[torch.Tensor.where] = _tensor_where


@_spells("masked_fill")
def _masked_fill(input: Any, mask: Any, value: Any) -> Call:
    return call("masked_fill", input, mask, value)


@_spells("clamp clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call:
    if min is None and max is None:
        raise TypeError("At least one of min and max must not be None")
    if max is None:
        return call("clamp_min", input, min)
    return call("clamp_max", input, max) if min is None else call("clamp", input, min, max)


@_spells("nan_to_num")
def _nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Call:
    largest = torch.finfo(input.dtype).max if input.dtype.is_floating_point else 0
    return call(
        "nan_to_num", input, 0 if nan is None else nan, largest if posinf is None else posinf, -largest if neginf is None else neginf
    )


# ---- constants of a tensor's shape

for _suffix, _dtype in (("", None), *((f"_{row.name}", row.dtype) for row in DTYPES.values())):
    _row(
        f"full_like{_suffix}",
        "input fill_value",
        lambda input, fill_value, dtype=_dtype: torch.full_like(input, fill_value, dtype=dtype),
        every="{fill_value}",
        types="shape result",
        keeps_format=True,
    )


@_spells("full_like")
def _full_like(input: Any, fill_value: Any, *, dtype: torch.dtype | None = None) -> Call:
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"{dtype} is not a dtype that kernels compute; allowed: {', '.join(row.name for row in DTYPES.values())}")
    return call("full_like" if dtype is None else f"full_like_{DTYPES[dtype].name}", input, fill_value)


@_spells("zeros_like")
def _zeros_like(input: Any, *, dtype: torch.dtype | None = None) -> Call:
    return _full_like(input, 0, dtype=dtype)


@_spells("ones_like")
def _ones_like(input: Any, *, dtype: torch.dtype | None = None) -> Call:
    return _full_like(input, 1, dtype=dtype)


# ---- CUDA's math library

for _names, _ulp, _heavy in (
    ("exp2", (2, 1), False),
    ("expm1", (1, 1), False),
    ("log", (1, 1), False),
    ("log2", (1, 1), False),
    ("log10", (2, 1), False),
    ("log1p", (1, 1), False),
    ("sqrt", (0, 0), False),
    ("rsqrt", (2, 1), False),
    ("sin", (2, 2), True),
    ("cos", (2, 2), True),
    ("tan", (4, 2), True),
    ("asin arcsin", (2, 2), False),
    ("acos arccos", (2, 2), False),
    ("atan arctan", (2, 2), False),
    ("sinh", (3, 2), False),
    ("cosh", (2, 1), False),
    ("asinh arcsinh", (3, 3), False),
    ("acosh arccosh", (4, 3), False),
    ("atanh arctanh", (3, 2), False),
    ("erf", (2, 2), False),
    ("erfc", (4, 5), False),
    ("erfinv", (2, 5), False),
    ("lgamma gammaln", (6, 4), True),
):
    _first = _names.split()[0]
    _op(_names, "input", getattr(torch, _first), floating=f"::{f'math_{_first}' if _heavy else _first}({{input}})", ulp=_ulp, heavy=_heavy)

_op("exp", "input", torch.exp, floating="::exp({input})", half="::half_exp({input})", ulp=(1, 1))
_op("tanh", "input", torch.tanh, floating="::tanh({input})", half="::half_tanh({input})", ulp=(2, 2))
_op("atan2 arctan2", "input other", torch.atan2, floating="::atan2({input}, {other})", ulp=(3, 2), heavy=True)
_op("hypot", "input other", torch.hypot, floating="::hypot({input}, {other})", ulp=(3, 2))
_op("copysign", "input other", torch.copysign, floating="::copysign({input}, {other})")

# ---- powers

_row(
    "pow",
    "input exponent",
    operator.pow,
    floating="::power({input}, {exponent})",
    integer="::power({input}, {exponent})",
    ulp=(4, 2),
    heavy=True,
)
_row(
    "pow_number",
    "input exponent",
    torch.pow,
    floating="::power_number({input}, {exponent})",
    integer="::power({input}, {exponent})",
    eager=(
        "{exponent} == 3 ? {round}({input} * {input}) * {input} : {exponent} == -2 ? 1 / {round}({input} * {input}) : "
        "::power_number({input}, {round}({exponent}))"
    ),
    ulp=(4, 2),
    heavy=True,
)
_op("float_power", "input exponent", torch.float_power, floating="::power({input}, {exponent})", ulp=(4, 2), heavy=True)


@_spells("pow __pow__")
def _pow(input: Any, exponent: Any) -> Call:
    return call("pow_number" if _is_number(exponent) else "pow", input, exponent)


@_spells("__rpow__")
def _rpow(input: Any, other: Any) -> Call:
    return call("pow", other, input)


@_spells("ldexp")
def _ldexp(input: Any, other: Any) -> Call:
    return call("mul", input, call("pow", 2.0, other))


# ---- rounding, signs, parts

for _names, _floating in (
    ("floor", "::floor({input})"),
    ("ceil", "::ceil({input})"),
    ("trunc fix", "::trunc({input})"),
):
    _op(_names, "input", getattr(torch, _names.split()[0]), floating=_floating, integer="{input}")
_row("round", "input", torch.round, floating="::rint({input})", integer="{input}")
_row(
    "round_decimals",
    "input decimals",
    lambda input, decimals: torch.round(input, decimals=decimals),
    floating="::round_decimals({input}, {decimals})",
    ulp=(1, 1),
)
_op("frac", "input", torch.frac, floating="{input} - ::trunc({input})")
_op(
    "sign",
    "input",
    torch.sign,
    floating="({input} > 0) - ({input} < 0)",
    signed="({input} > 0) - ({input} < 0)",
    unsigned="{input} > 0",
    boolean="{input}",
)
_op(
    "sgn",
    "input",
    torch.sgn,
    floating="({input} > 0) - ({input} < 0)",
    signed="({input} > 0) - ({input} < 0)",
    unsigned="{input} > 0",
    boolean="{input}",
)
_row("frexp_mantissa", "input", lambda input: torch.frexp(input).mantissa, floating="::frexp_mantissa({input})")
_row("frexp_exponent", "input", lambda input: torch.frexp(input).exponent, floating="::frexp_exponent({input})", types="own")


@_spells("round")
def _round(input: Any, *, decimals: Any = 0) -> Call:
    return call("round", input) if _is_literal(decimals, 0) else call("round_decimals", input, decimals)


@_spells("frexp")
def _frexp(input: Any) -> Any:
    return torch.return_types.frexp((call("frexp_mantissa", input), call("frexp_exponent", input)))


@_spells("deg2rad")
def _deg2rad(input: Any) -> Call:
    return call("mul", input, torch.pi / 180)


@_spells("rad2deg")
def _rad2deg(input: Any) -> Call:
    return call("mul", input, 180 / torch.pi)


# ---- several terms

_row(
    "lerp",
    "input end weight",
    torch.lerp,
    floating="::lerp_value({input}, {end}, {weight})",
    ulp=(2, 2),
)
_row(
    "addcmul",
    "input tensor1 tensor2 value",
    lambda input, tensor1, tensor2, value: torch.addcmul(input, tensor1, tensor2, value=value),
    floating="::fma({value} * {tensor1}, {tensor2}, {input})",
    integer="::wrap_add({input}, ::wrap_mul(::wrap_mul({value}, {tensor1}), {tensor2}))",
    ulp=(1, 1),
)
_row(
    "addcdiv",
    "input tensor1 tensor2 value",
    lambda input, tensor1, tensor2, value: torch.addcdiv(input, tensor1, tensor2, value=value),
    floating="::fma({value}, {tensor1} / {tensor2}, {input})",
    ulp=(1, 1),
)
_op("logaddexp", "input other", torch.logaddexp, floating="::log_add_exp({input}, {other})", ulp=(3, 3))
_op("logaddexp2", "input other", torch.logaddexp2, floating="::log_add_exp2({input}, {other})", ulp=(4, 4))
_op("xlogy", "input other", torch.xlogy, floating="::x_log_y({input}, {other})", ulp=(3, 3))
_op("xlog1py", "input other", torch.special.xlog1py, floating="::x_log1p_y({input}, {other})", ulp=(3, 3))


@_spells("lerp")
def _lerp(input: Any, end: Any, weight: Any) -> Call:
    return call("lerp", input, end, weight)


@_spells("addcmul")
def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Call:
    return call("addcmul", input, tensor1, tensor2, value)


@_spells("addcdiv")
def _addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Call:
    return call("addcdiv", input, tensor1, tensor2, value)


@_spells("isclose")
def _isclose(input: Any, other: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Call:
    if input.dtype != other.dtype:
        raise TypeError(f"isclose takes two tensors of one dtype, got {input.dtype} and {other.dtype}")
    real = other if other.dtype.is_floating_point else call("mul", other, 1.0)
    error, allowed = call("abs", call("sub", input, real)), call("add", call("abs", call("mul", real, rtol)), atol)
    near = call("logical_and", call("isfinite", error), call("le", error, allowed))
    close = call("logical_or", call("eq", input, other), near)
    return call("logical_or", close, call("logical_and", call("isnan", input), call("isnan", other))) if equal_nan else close


# ---- activations

_op(
    "sigmoid expit",
    "input",
    torch.sigmoid,
    floating="::sigmoid({input})",
    half="::half_sigmoid({input})",
    eager="1 / (1 + ::exp(-{input}))",
    ulp=(3, 3),
)
_row("silu", "input", F.silu, floating="::silu({input})", half="::half_silu({input})", eager="{input} / (1 + ::exp(-{input}))", ulp=(4, 4))
_row(
    "gelu",
    "input",
    F.gelu,
    floating="{input} * ::normcdf({input})",
    half="::half_gelu({input})",
    eager="{input} * 0.5f * (1 + ::erf({input} * ::sqrt_half({input})))",
    reference=lambda input: (input.double() * torch.special.erfc(input.double() * -(0.5**0.5)) / 2).to(input.dtype),
    ulp=(12, 20),
)
_row(
    "gelu_tanh",
    "input",
    lambda input: F.gelu(input, approximate="tanh"),
    floating="::gelu_tanh({input})",
    half="::half_gelu_tanh({input})",
    eager="::gelu_tanh_eager({input})",
    reference=lambda input: (input.double() * torch.sigmoid((8 / torch.pi) ** 0.5 * (input.double() + 0.044715 * input.double() ** 3))).to(
        input.dtype
    ),
    ulp=(200, 1000),
)
_row(
    "mish",
    "input",
    F.mish,
    floating="::mish({input})",
    half="::half_mish({input})",
    eager="{input} * ::tanh(::log1p(::exp({input})))",
    ulp=(7, 7),
)
_row(
    "softplus",
    "input beta threshold",
    F.softplus,
    floating="::softplus({input}, {beta}, {threshold})",
    half="::half_softplus({input}, {beta}, {threshold})",
    eager="{input} * {beta} > {threshold} ? {input} : ::log1p(::exp({input} * {beta})) / {beta}",
    ulp=(4, 4),
)
_op("logsigmoid", "input", F.logsigmoid, floating="::log_sigmoid({input})", ulp=(4, 4))
_row("relu", "input", F.relu, floating="{input} <= 0 ? 0 : {input}", signed="{input} < 0 ? 0 : {input}", unsigned="{input}")
_row("hardtanh", "input min_val max_val", F.hardtanh, number="::minimum(::maximum({input}, {min_val}), {max_val})")
_row("leaky_relu", "input negative_slope", F.leaky_relu, floating="{input} > 0 ? {input} : {input} * {negative_slope}")
_row("elu", "input alpha", F.elu, floating="{input} > 0 ? {input} : ::expm1({input}) * {alpha}", ulp=(2, 2))
_row("selu", "input", F.selu, floating="::selu({input})", ulp=(3, 3))
_row("celu", "input alpha", F.celu, floating="{input} > 0 ? {input} : ::expm1({input} / {alpha}) * {alpha}", ulp=(3, 3))
_row(
    "hardswish",
    "input",
    F.hardswish,
    floating="{input} * (::minimum(::maximum({input} + 3, {input} * 0), {input} * 0 + 6) / 6)",
    ulp=(2, 2),
)
_row("hardsigmoid", "input", F.hardsigmoid, floating="::hard_sigmoid({input})", ulp=(1, 1))
_row("hardshrink", "input lambd", F.hardshrink, floating="{input} >= -{lambd} && {input} <= {lambd} ? 0 : {input}")
_row(
    "softshrink",
    "input lambd",
    F.softshrink,
    floating="{input} > {lambd} ? {input} - {lambd} : {input} < -{lambd} ? {input} + {lambd} : {input} * 0",
)
_row("threshold", "input threshold value", F.threshold, number="{input} <= {threshold} ? {value} : {input}")


@_spells("silu")
def _silu(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("silu", input))


@_spells("gelu")
def _gelu(input: Any, *, approximate: str = "none") -> Call:
    if approximate not in ("none", "tanh"):
        raise TypeError("approximate argument must be either none or tanh.")
    return call("gelu" if approximate == "none" else "gelu_tanh", input)


@_spells("mish")
def _mish(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("mish", input))


@_spells("softplus")
def _softplus(input: Any, beta: Any = 1, threshold: Any = 20) -> Call:
    return call("softplus", input, beta, threshold)


@_spells("relu")
def _relu(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("relu", input))


@_spells("hardtanh")
def _hardtanh(input: Any, min_val: Any = -1.0, max_val: Any = 1.0, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("hardtanh", input, min_val, max_val))


@_spells("relu6")
def _relu6(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("hardtanh", input, 0, 6))


@_spells("leaky_relu")
def _leaky_relu(input: Any, negative_slope: Any = 0.01, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("leaky_relu", input, negative_slope))


@_spells("elu")
def _elu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("elu", input, alpha))


@_spells("selu")
def _selu(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("selu", input))


@_spells("celu")
def _celu(input: Any, alpha: Any = 1.0, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("celu", input, alpha))


@_spells("hardswish")
def _hardswish(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("hardswish", input))


@_spells("hardsigmoid")
def _hardsigmoid(input: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("hardsigmoid", input))


@_spells("hardshrink")
def _hardshrink(input: Any, lambd: Any = 0.5) -> Call:
    return call("hardshrink", input, lambd)


@_spells("softshrink")
def _softshrink(input: Any, lambd: Any = 0.5) -> Call:
    return call("softshrink", input, lambd)


@_spells("threshold")
def _threshold(input: Any, threshold: Any, value: Any, inplace: bool = False) -> Any:
    return _out_of_place(inplace, call("threshold", input, threshold, value))


@_spells("softsign")
def _softsign(input: Any) -> Call:
    return call("div", input, call("add", call("abs", input), 1))


@_spells("tanhshrink")
def _tanhshrink(input: Any) -> Call:
    return call("sub", input, call("tanh", input))
