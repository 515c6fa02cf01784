"""The table of ops: what each is called in torch, in CUDA, how exact it is, and which dtype its operands are brought to.

Adding an op is adding a row; a torch function that is a composition of rows is a short function under ``_spells``.
Knows torch's functions and CUDA's expressions, never tensors, layouts or kernels.
"""

from __future__ import annotations

import ast
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F

from wideload.dtypes import DTYPES, Kind
from wideload.errors import LayoutError, TraceError

__all__ = ["OPS", "SPELLINGS", "UNRECORDED", "Call", "Op", "OperandType", "Sized", "Spelling", "call", "to_format"]

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
    replaces it where only fp16 or bf16 results flow from the op: cheaper, and still within 1 unit in the last place of those; of an op
    that is correctly rounded it does so under ``fast_math`` alone.
    ``eager`` replaces it under ``numerics="eager"``, where ATen's kernel computes another, less exact expression; there
    ``{round}`` stands for the rounding to the result's dtype (nothing for fp32 and fp64).

    ``ulp`` bounds the difference from the correctly rounded result of fp32 and fp64, in units in the last place (0: correctly
    rounded); where terms of either sign are added (``lerp``, ``addcmul``, ...) in those of the largest term. The figures of
    CUDA's own functions are from the CUDA C++ Programming Guide, "Mathematical Functions", those of the rest are worked out from
    them: a term is added for each rounding. Numbers that torch gives a default have it. ``reference`` replaces
    ``torch`` where torch's own fp32 formula on the CPU breaks the bound. ``heavy`` marks expressions long enough that
    a kernel should hold them once. ``keeps_format`` marks results in the memory format of the first operand: copies, and
    constants of its shape. ``converts_first`` marks ops that copy operands of another dtype before they iterate, also on CUDA.
    ``steady`` replaces it in fp32 where the last operand is the same for all elements of a thread and the result is rounded to a type
    of no more than 11 bits next, or limited before: the same then, and cheaper.
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
    makes_contiguous: bool = False
    makes_channels_last: bool = False
    is_alias: bool = False
    steady: str | None = None

    @property
    def may_be_operand(self) -> bool:
        """Whether torch returns the operand itself where it has the format already."""
        return self.keeps_format and (self.makes_contiguous or self.makes_channels_last)


@dataclass(frozen=True)
class Call:
    """An op applied to operands: traced tensors, Python numbers, runtime scalars, or other calls."""

    op: Op
    operands: tuple[Any, ...]


@dataclass(frozen=True)
class Sized:
    """``tree``, an operand or a call, which torch takes or gives in the shape of the tensor ``like`` alone; ``what`` names it to users."""

    tree: Any
    like: Any
    what: str


Spelling = Callable[..., Any]
"""Takes the arguments of one torch function and returns a ``Call``, an operand, or a structure of them."""

OPS: dict[str, Op] = {}
SPELLINGS: dict[Callable[..., Any], Spelling] = {}


def call(name: str, *operands: Any) -> Call:
    """Row ``name`` applied to ``operands``."""
    return Call(OPS[name], operands)


def _is_number(operand: Any) -> bool:
    """Whether ``operand`` is a number or a runtime scalar, not a tensor: of all but NumPy's numbers only tensors have a dtype."""
    return isinstance(operand, Number) or not (isinstance(operand, Call) or hasattr(operand, "dtype"))


def _is_literal(operand: Any, value: int) -> bool:
    """Whether ``operand`` is the Python integer ``value``; a runtime scalar, which may be it at one call and not at the next, is not."""
    return type(operand) is int and operand == value


# ---- adding rows and spellings

_S = TypeVar("_S", bound=Spelling)
_NAMESPACES = (torch, torch.Tensor, F, torch.special)


def _row(
    name: str,
    operands: str,
    function: Callable[..., Any],
    *,
    floating: str | None = None,
    complex: str | None = None,
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
    makes_contiguous: bool = False,
    makes_channels_last: bool = False,
    is_alias: bool = False,
    steady: str | None = None,
) -> Op:
    """Add a row.

    ``integer`` is the expression of signed and unsigned, ``number`` of float too, ``every`` of each kind but complex that has none
    of its own; ``eager`` is of kind float. ``types`` is ``result`` for all operands by default.
    """
    whole = integer or number or every
    given: dict[Kind, str | None] = {
        "float": floating or number or every,
        "complex": complex,
        "signed": signed or whole,
        "unsigned": unsigned or whole,
        "bool": boolean or every,
    }
    cuda = {kind: expression for kind, expression in given.items() if expression is not None}
    names = tuple(operands.split())
    marks: Any = tuple(types.split()) or ("result",) * len(names)
    atens: Mapping[Kind, str] | None = None if eager is None else {"float": eager}
    OPS[name] = Op(
        name,
        names,
        function,
        cuda,
        marks,
        ulp,
        half,
        reference,
        heavy,
        atens,
        keeps_format,
        converts_first,
        makes_contiguous,
        makes_channels_last,
        is_alias,
        steady,
    )
    return OPS[name]


def _op(names: str, parameters: str, function: Callable[..., Any], *, inplace: bool = False, **row: Any) -> None:
    """Add the row called as the first of ``names``, which torch functions of all these names are.

    ``parameters`` are torch's own: ``name``, ``name=default`` or, by keyword only, ``*name=default``; each is an operand.
    ``inplace`` adds that parameter, which must be false.
    """
    signature = inspect.Signature([_parameter(text) for text in (*parameters.split(), *(["inplace=False"] if inplace else []))])
    op = _row(names.split()[0], " ".join(name for name in signature.parameters if name != "inplace"), function, **row)

    def spelling(*args: Any, **kwargs: Any) -> Call:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.arguments.pop("inplace", False):
            raise TraceError(f"{op.name}(inplace=True) would write into its argument. Leave inplace out and use the result.")
        return Call(op, tuple(bound.arguments.values()))

    spelling.__signature__ = signature  # type: ignore[attr-defined]
    _spells(names)(spelling)


def _parameter(text: str) -> inspect.Parameter:
    name, _, default = text.removeprefix("*").partition("=")
    kind = inspect.Parameter.KEYWORD_ONLY if text.startswith("*") else inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter(name, kind, default=ast.literal_eval(default) if default else inspect.Parameter.empty)


def _spells(names: str) -> Callable[[_S], _S]:
    """Make the decorated function the spelling of every torch function and tensor method called one of ``names``."""

    def register(spelling: _S) -> _S:
        for name in names.split():
            owners = (torch.Tensor,) if name.startswith("__") else _NAMESPACES
            functions = [getattr(owner, name) for owner in owners if callable(getattr(owner, name, None))]  # Tensor.real is none
            if not functions:
                raise AttributeError(f"torch has no function {name}")
            SPELLINGS.update(dict.fromkeys(functions, spelling))
        return spelling

    return register


def _reflects(name: str, row: str) -> None:
    """The operator method ``name`` is ``row`` with its operands exchanged: ``2 % x`` is ``x.__rmod__(2)``."""

    @_spells(name)
    def _reflected(input: Any, other: Any) -> Call:
        return call(row, other, input)


def _in_double(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of a tensor, computed in fp64 and rounded once: what torch's fp32 formula loses in the tails is kept."""

    def reference(input: Any) -> Any:
        if input.is_complex():
            return function(input)
        return function(input.double()).to(input.dtype if input.is_floating_point() else torch.get_default_dtype())

    return reference


# ---- arithmetic


def _absolute(input: Any) -> Any:
    """``torch.abs``; of bools too, which torch has on CUDA alone."""
    return input | input if getattr(input, "dtype", None) == torch.bool else torch.abs(input)


_row(
    "add",
    "input other",
    operator.add,
    floating="{input} + {other}",
    complex="{input} + {other}",
    integer="::wrap_add({input}, {other})",
    boolean="{input} || {other}",
)
_row(
    "add_alpha",
    "input other alpha",
    lambda input, other, alpha: torch.add(input, other, alpha=alpha),
    floating="::fma({alpha}, {other}, {input})",
    complex="{input} + {alpha} * {other}",
    integer="::wrap_add({input}, ::wrap_mul({alpha}, {other}))",
    boolean="{input} || ({alpha} && {other})",
)
_row(
    "sub",
    "input other",
    operator.sub,
    floating="{input} - {other}",
    complex="{input} - {other}",
    integer="::wrap_sub({input}, {other})",
)
_row(
    "sub_alpha",
    "input other alpha",
    lambda input, other, alpha: torch.sub(input, other, alpha=alpha),
    floating="::fma(-{alpha}, {other}, {input})",
    complex="{input} - {alpha} * {other}",
    integer="::wrap_sub({input}, ::wrap_mul({alpha}, {other}))",
)
_op(
    "mul multiply __mul__ __rmul__",
    "input other",
    operator.mul,
    floating="{input} * {other}",
    complex="{input} * {other}",
    integer="::wrap_mul({input}, {other})",
    boolean="{input} && {other}",
)
_op("neg negative __neg__", "input", torch.neg, floating="-{input}", complex="-{input}", integer="::wrap_neg({input})")
_op("positive __pos__", "input", torch.positive, number="{input}", complex="{input}", is_alias=True)
_op(
    "abs absolute __abs__",
    "input",
    _absolute,
    floating="::fabs({input})",
    complex="::hypot({input}.re, {input}.im)",
    signed="::wrap_abs({input})",
    unsigned="{input}",
    boolean="{input}",
    types="own",
)
_op(
    "square",
    "input",
    torch.square,
    floating="{input} * {input}",
    complex="{input} * {input}",
    integer="::wrap_mul({input}, {input})",
)
_op(
    "reciprocal",
    "input",
    torch.reciprocal,
    floating="1 / {input}",
    complex="::complex_reciprocal({input})",
    half="::div_full(1.0f, {input})",
)
_row("clone", "input", torch.clone, complex="{input}", every="{input}", keeps_format=True)
_FORMATS: dict[torch.memory_format, tuple[str, int | None]] = {
    torch.contiguous_format: ("contiguous", None),
    torch.channels_last: ("channels_last", 4),
    torch.channels_last_3d: ("channels_last_3d", 5),
}
"""The rows that bring a tensor to a memory format if it has another, and the number of dims that it takes; with ``clone_`` before
their names, the rows that copy it in any case."""
for _format, (_name, _rank) in _FORMATS.items():
    for _prefix, _method in (("", torch.Tensor.contiguous), ("clone_", torch.clone)):
        _row(
            f"{_prefix}{_name}",
            "input",
            lambda input, method=_method, format=_format, rank=_rank: (
                method(input, memory_format=format) if rank in (None, input.ndim) else method(input)  # samples for dtypes have one dim
            ),
            complex="{input}",
            every="{input}",
            keeps_format=not _prefix,
            makes_contiguous=_name == "contiguous",
            makes_channels_last=_name != "contiguous",
        )


def _unrecorded(op: Op, method: Callable[..., Any], memory_format: torch.memory_format, rank: int | None) -> Op:
    @torch.no_grad()
    def function(input: Any) -> Any:
        return method(input, memory_format=memory_format) if rank in (None, input.ndim) else input

    return replace(op, name=f"{op.name}_unrecorded", torch=function)


UNRECORDED = {
    (method, name): _unrecorded(OPS[name], method, memory_format, rank)
    for method in (torch.Tensor.contiguous, torch.Tensor.to)
    for memory_format, (name, rank) in _FORMATS.items()
}
"""The rows where gradients are off: a tensor that has the format keeps its gradient, a copy has none. Torch can tell, and no rule."""


def to_format(input: Any, memory_format: torch.memory_format, *, copies: bool, method: Callable[..., Any] = torch.Tensor.to) -> Call:
    """``input`` in a memory format other than ``preserve_format``; with ``copies`` a new tensor also where it has it."""
    if memory_format not in _FORMATS:
        raise TypeError(f"the memory format is {memory_format}; allowed: {', '.join(map(str, _FORMATS))}")
    name, rank = _FORMATS[memory_format]
    if rank not in (None, input.ndim):
        raise TypeError(f"{memory_format} is for tensors of {rank} dims, got one of {input.ndim}")
    if not copies and not torch.is_grad_enabled():
        return Call(UNRECORDED[method, name], (input,))
    return call(f"clone_{name}" if copies else name, input)


_op("detach", "input", torch.detach, complex="{input}", every="{input}", is_alias=True)


@_spells("add __add__ __radd__")
def _add(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return call("add", input, other) if _is_literal(alpha, 1) else call("add_alpha", input, other, alpha)


@_spells("clone")
def _clone(input: Any, *, memory_format: torch.memory_format = torch.preserve_format) -> Call:
    return call("clone", input) if memory_format == torch.preserve_format else to_format(input, memory_format, copies=True)


@_spells("contiguous")
def _contiguous(input: Any, *, memory_format: torch.memory_format = torch.contiguous_format) -> Call:
    return to_format(input, memory_format, copies=False, method=torch.Tensor.contiguous)


@_spells("alias_copy")
def _alias_copy(input: Any) -> Call:
    return call("clone_contiguous", input)


@_spells("sub subtract __sub__")
def _sub(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return call("sub", input, other) if _is_literal(alpha, 1) else call("sub_alpha", input, other, alpha)


@_spells("rsub __rsub__")
def _rsub(input: Any, other: Any, *, alpha: Any = 1) -> Call:
    return _sub(other, input, alpha=alpha)


# ---- division


def _divide_number(input: Any, number: Any) -> Any:
    """``number / input`` in one rounding: torch multiplies by the reciprocal."""
    dtype = torch.result_type(input, number)
    dividend = torch.as_tensor(number, dtype=dtype if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype())
    return torch.div(dividend, input)


_row(
    "div",
    "input other",
    torch.div,
    floating="{input} / {other}",
    complex="::complex_divide({input}, {other})",
    half="::div_full({input}, {other})",
    steady="::divide_steady({input}, {other})",
)


def _is_signed(operand: Any) -> bool:
    """Whether ``operand`` is a signed integer, or a tensor of them."""
    dtype = getattr(operand, "dtype", None)
    return isinstance(operand, int) if dtype is None else dtype.is_signed and not (dtype.is_floating_point or dtype.is_complex)


def _div_trunc(input: Any, other: Any) -> Any:
    """``torch.div(rounding_mode="trunc")``, of signed integers by ``//``: the smallest by -1 ends the process in torch's own on the CPU."""
    if not (_is_signed(input) and _is_signed(other)):
        return torch.div(input, other, rounding_mode="trunc")
    return (input // other).add_((input % other != 0) & ((input < 0) != (other < 0)))


def _lcm(input: Any, other: Any) -> Any:
    """``torch.lcm``, of 32 and 64 bits by ``//``: torch's own ends the process where the divisor of the smallest integer is -1."""
    divisor = torch.gcd(input, other)
    if divisor.dtype not in (torch.int32, torch.int64):
        return torch.lcm(input, other)
    return torch.abs(input // (divisor + (divisor == 0)) * other)


_row(
    "div_trunc",
    "input other",
    _div_trunc,
    floating="::trunc({input} / {other})",
    integer="::divide_trunc({input}, {other})",
    eager="::trunc({round}({input} / {other}))",
)
_row("div_floor", "input other", operator.floordiv, number="::divide_floor({input}, {other})", heavy=True)

# ATen divides by a number with its reciprocal, and a number by a tensor with the tensor's, rounded.
for _name, _aten in (
    ("div", "{input} * (1 / {other})"),
    ("div_trunc", "::trunc({input} * (1 / {other}))"),
    ("div_floor", "::divide_floor_number({input}, {other})"),
):
    OPS[f"{_name}_number"] = replace(OPS[_name], name=f"{_name}_number", eager={"float": _aten})
_row(
    "rdiv",
    "input number",
    lambda input, number: number / input,
    floating="{number} / {input}",
    complex="::complex_divide({number}, {input})",
    half="::div_full({number}, {input})",
    eager="{round}(1 / {input}) * {number}",
    reference=_divide_number,
)

_op(
    "fmod",
    "input other",
    torch.fmod,
    number="::modulo_trunc({input}, {other})",
    eager="::modulo_trunc({round}({input}), {round}({other}))",
    heavy=True,
)
_op(
    "remainder __mod__",
    "input other",
    operator.mod,
    number="::modulo_floor({input}, {other})",
    eager="::modulo_floor({round}({input}), {round}({other}))",
    heavy=True,
)
_reflects("__rmod__", "remainder")
_reflects("__rfloordiv__", "div_floor")


@_spells("div divide")
def _div(input: Any, other: Any, *, rounding_mode: str | None = None) -> Call:
    rows = {None: "div", "trunc": "div_trunc", "floor": "div_floor"}
    if rounding_mode not in rows:
        raise TypeError(f"rounding_mode is {rounding_mode!r}; allowed: None, 'trunc', 'floor'")
    return call(rows[rounding_mode] + ("_number" if _is_number(other) else ""), input, other)


@_spells("true_divide __truediv__ __div__")
def _true_divide(input: Any, other: Any) -> Call:
    return _div(input, other)


@_spells("floor_divide __floordiv__")
def _floor_divide(input: Any, other: Any) -> Call:
    return _div(input, other, rounding_mode="floor")


@_spells("__rtruediv__ __rdiv__")
def _rdiv(input: Any, other: Any) -> Call:
    return call("rdiv", input, other)


# ---- comparisons, logic, bits

for _names, _symbol in (
    ("eq __eq__", "=="),
    ("ne not_equal __ne__", "!="),
    ("lt less __lt__", "<"),
    ("le less_equal __le__", "<="),
    ("gt greater __gt__", ">"),
    ("ge greater_equal __ge__", ">="),
):
    _compared = f"{{input}} {_symbol} {{other}}"
    _of_complex = _compared if _symbol in ("==", "!=") else None
    _op(_names, "input other", getattr(operator, _names.split()[0]), complex=_of_complex, every=_compared, types="common common")

for _name, _floating, _of_complex, _signed, _unsigned in (
    ("isnan", "{input} != {input}", "{input} != {input}", "false", "false"),
    ("isinf", "::isinf({input})", "::isinf({input}.re) || ::isinf({input}.im)", "false", "false"),
    ("isfinite", "::isfinite({input})", "::isfinite({input}.re) && ::isfinite({input}.im)", "true", "true"),
    ("isposinf", "::isinf({input}) && {input} > 0", None, "false", "false"),
    ("isneginf", "::isinf({input}) && {input} < 0", None, "false", "false"),
    ("signbit", "::signbit({input})", None, "{input} < 0", "false"),
):
    _op(
        _name,
        "input",
        getattr(torch, _name),
        keeps_format=_name in ("isinf", "isfinite"),
        floating=_floating,
        complex=_of_complex,
        signed=_signed,
        every=_unsigned,
        types="common",
    )

_row("isreal", "input", torch.isreal, complex="{input}.im == 0", every="true", types="own", keeps_format=True)


@_spells("isreal")
def _isreal(input: Any) -> Call:
    return call("eq", call("imag", input), 0) if input.dtype.is_complex else call("isreal", input)


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
_reflects("__rlshift__", "bitwise_left_shift")
_reflects("__rrshift__", "bitwise_right_shift")


@_spells("isclose")
def _isclose(input: Any, other: Any, rtol: Any = 1e-05, atol: Any = 1e-08, equal_nan: bool = False) -> Call:
    if _is_number(other) or input.dtype != other.dtype:
        raise TypeError(f"isclose takes two tensors of one dtype, got {input.dtype} and {getattr(other, 'dtype', 'a number')}")
    x, y = (v if v.dtype.is_floating_point or v.dtype.is_complex else call("mul", v, 1.0) for v in (input, other))
    error, allowed = call("abs", call("sub", x, y)), call("add", call("abs", call("mul", y, rtol)), atol)
    close = call("logical_or", call("eq", input, other), call("logical_and", call("isfinite", error), call("le", error, allowed)))
    return call("logical_or", close, call("logical_and", call("isnan", input), call("isnan", other))) if equal_nan else close


# ---- choice and bounds

_op(
    "where",
    "condition input other",
    torch.where,
    complex="{condition} ? {input} : {other}",
    every="{condition} ? {input} : {other}",
    types="bool result result",
    converts_first=True,
)
_op(
    "masked_fill",
    "input mask value",
    torch.masked_fill,
    complex="{mask} ? {value} : {input}",
    every="{mask} ? {value} : {input}",
    types="result bool result",
    makes_contiguous=True,
)
_op("maximum", "input other", torch.maximum, every="::maximum({input}, {other})")
_op("minimum", "input other", torch.minimum, every="::minimum({input}, {other})")
_op("fmax", "input other", torch.fmax, floating="::fmax({input}, {other})", every="::maximum({input}, {other})")
_op("fmin", "input other", torch.fmin, floating="::fmin({input}, {other})", every="::minimum({input}, {other})")
_op("clamp_min", "input min", torch.clamp_min, every="::maximum({input}, {min})")
_op("clamp_max", "input max", torch.clamp_max, every="::minimum({input}, {max})")
_row("clamp", "input min max", torch.clamp, number="::clamp({input}, {min}, {max})")
_op("heaviside", "input values", torch.heaviside, every="{input} == 0 ? {values} : {input} > 0")
_row(
    "nan_to_num",
    "input nan posinf neginf",
    torch.nan_to_num,
    floating="{input} != {input} ? {nan} : !::isinf({input}) ? {input} : {input} > 0 ? {posinf} : {neginf}",
    complex="::complex_nan_to_num({input}, {nan}.re, {posinf}.re, {neginf}.re)",
    every="{input}",
    keeps_format=True,
)


def _extreme(name: str, input: Any, *args: Any, **kwargs: Any) -> Call:
    """``torch.max`` and ``torch.min``: of two tensors, element by element, or over the elements of one."""
    (other, *rest) = [*args, *kwargs.values(), None]
    if _is_number(other) or rest[:-1] or set(kwargs) - {"other"}:
        raise TraceError(
            f"{name} over the elements of a tensor is not an elementwise op. Compute it outside the fused function and pass its result, or "
            "give it two tensors."
        )
    return call(f"{name}imum", input, other)


@_spells("max")
def _max(input: Any, *args: Any, **kwargs: Any) -> Call:
    return _extreme("max", input, *args, **kwargs)


@_spells("min")
def _min(input: Any, *args: Any, **kwargs: Any) -> Call:
    return _extreme("min", input, *args, **kwargs)


def _where(input: Any, condition: Any, other: Any) -> Call:
    return call("where", condition, input, other)


SPELLINGS[torch.Tensor.where] = _where  # the method's self is the second argument of the function


@_spells("clamp clip")
def _clamp(input: Any, min: Any = None, max: Any = None) -> Call:
    if min is None and max is None:
        raise TypeError("at least one of min and max must not be None")
    if max is None:
        return call("clamp_min", input, min)
    return call("clamp_max", input, max) if min is None else call("clamp", input, min, max)


@_spells("nan_to_num")
def _nan_to_num(input: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Call:
    largest = torch.finfo(input.dtype).max if input.dtype.is_floating_point or input.dtype.is_complex else 0
    given = zip((nan, posinf, neginf), (0, largest, -largest), strict=True)
    return call("nan_to_num", input, *(default if value is None else value for value, default in given))


# ---- constants of a tensor's shape

for _suffix, _dtype in (("", None), *((f"_{row.name}", row.dtype) for row in DTYPES.values())):
    _row(
        f"full_like{_suffix}",
        "input fill_value",
        lambda input, fill_value, dtype=_dtype: torch.full_like(input, fill_value, dtype=dtype),
        complex="{fill_value}",
        every="{fill_value}",
        types="shape result",
        keeps_format=True,
    )


_row("fill", "input value", torch.fill, complex="{value}", every="{value}", types="shape result", keeps_format=True)


@_spells("fill")
def _fill(input: Any, value: Any) -> Call:
    return call("full_like" if _is_number(value) else "fill", input, value)


def _check_device(input: Any, device: Any) -> None:
    if device is not None and torch.device(device).type != input.device.type:
        raise TypeError(f"device is {device}; allowed: that of the tensor, {input.device}")


@_spells("full_like")
def _full_like(input: Any, fill_value: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Call:
    _check_device(input, device)
    if dtype is not None and dtype not in DTYPES:
        raise TypeError(f"dtype is {dtype}, which kernels do not compute; allowed: {', '.join(row.name for row in DTYPES.values())}")
    return call("full_like" if dtype is None else f"full_like_{DTYPES[dtype].name}", input, fill_value)


@_spells("zeros_like")
def _zeros_like(input: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Call:
    return _full_like(input, 0, dtype=dtype, device=device)


@_spells("ones_like")
def _ones_like(input: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Call:
    return _full_like(input, 1, dtype=dtype, device=device)


# ---- CUDA's math library

_REAL_ALONE = frozenset({"erf", "erfc"})

for _names, _ulp in (
    ("exp2", (2, 1)),
    ("expm1", (1, 1)),
    ("log", (1, 1)),
    ("log2", (1, 1)),
    ("log10", (2, 1)),
    ("log1p", (1, 1)),
    ("rsqrt", (2, 1)),
    ("asin arcsin", (2, 2)),
    ("acos arccos", (2, 2)),
    ("atan arctan", (2, 2)),
    ("sinh", (3, 2)),
    ("cosh", (2, 1)),
    ("asinh arcsinh", (3, 3)),
    ("acosh arccosh", (4, 3)),
    ("atanh arctanh", (3, 2)),
    ("erf", (2, 2)),
    ("erfc", (4, 5)),
):
    _name = _names.split()[0]
    _complex = None if _name in _REAL_ALONE else f"::complex_{_name}({{input}})"
    _op(_names, "input", getattr(torch, _name), floating=f"::{_name}({{input}})", complex=_complex, ulp=_ulp)
_op("sqrt", "input", torch.sqrt, floating="::sqrt({input})", complex="::complex_sqrt({input})", half="::sqrt_approx({input})")
for _name, _ulp in (("sin", (2, 2)), ("cos", (2, 2)), ("tan", (4, 2))):
    _op(
        _name,
        "input",
        getattr(torch, _name),
        floating=f"::math_{_name}({{input}})",
        complex=f"::complex_{_name}({{input}})",
        ulp=_ulp,
        heavy=True,
    )

_op("exp", "input", torch.exp, floating="::exp({input})", complex="::complex_exp({input})", half="::half_exp({input})", ulp=(2, 1))
_op("tanh", "input", torch.tanh, floating="::tanh({input})", complex="::complex_tanh({input})", half="::half_tanh({input})", ulp=(2, 1))
_op("atan2 arctan2", "input other", torch.atan2, floating="::atan2({input}, {other})", ulp=(3, 2))
_op("hypot", "input other", torch.hypot, floating="::hypot({input}, {other})", ulp=(3, 2))
_op("copysign", "input other", torch.copysign, floating="::copysign({input}, {other})")

# ---- powers

_row(
    "pow",
    "input exponent",
    operator.pow,
    number="::power({input}, {exponent})",
    complex="::complex_power({input}, {exponent})",
    ulp=(4, 2),
    heavy=True,
)
# Of a number to a tensor, which torch allocates in row-major order.
OPS["rpow"] = replace(OPS["pow"], name="rpow", makes_contiguous=True)
_row(
    "pow_number",
    "input exponent",
    operator.pow,
    floating="::power_number({input}, {exponent})",
    complex="::complex_power_number({input}, {exponent})",
    integer="::power({input}, {exponent})",
    # ATen computes these in the half type itself.
    eager="{exponent} == 3 ? {round}({input} * {input}) * {input} : {exponent} == -2 ? 1.0 / {round}({input} * {input}) : "
    "::power_number({input}, {round}({exponent}))",
    ulp=(4, 3),
    heavy=True,
)
_op(
    "float_power",
    "input exponent",
    torch.float_power,
    floating="::power({input}, {exponent})",
    complex="::complex_power({input}, {exponent})",
    ulp=(4, 2),
    heavy=True,
)
_reflects("__rpow__", "rpow")


@_spells("pow __pow__")
def _pow(input: Any, exponent: Any) -> Call:
    return call("pow_number" if _is_number(exponent) else "rpow" if _is_number(input) else "pow", input, exponent)


@_spells("ldexp")
def _ldexp(input: Any, other: Any) -> Call:
    if _is_number(other):
        raise TypeError("ldexp takes a tensor of exponents, got a number")
    return call("mul", input, call("rpow", 2.0, other))


# ---- rounding, signs, parts

_op("floor", "input", torch.floor, floating="::floor({input})", integer="{input}")
_op("ceil", "input", torch.ceil, floating="::ceil({input})", integer="{input}")
_op("trunc fix", "input", torch.trunc, floating="::trunc({input})", integer="{input}")
_op("frac", "input", torch.frac, floating="{input} - ::trunc({input})")
_row("round", "input", torch.round, floating="::rint({input})", integer="{input}")
_DECIMALS = (
    "{decimals} < 0 ? ::rint({round}({input} / {round}(::ten_to({decimals})))) * {round}(::ten_to({decimals})) : "
    "::rint({round}({input} * {round}(::ten_to({decimals})))) / {round}(::ten_to({decimals}))"
)
_row(
    "round_decimals",
    "input decimals",
    lambda input, decimals: torch.round(input, decimals=decimals),
    floating=_DECIMALS.replace("{round}", ""),
    eager=_DECIMALS,
)
for _name in ("sign", "sgn"):
    _op(
        _name,
        "input",
        getattr(torch, _name),
        floating="({input} > 0) - ({input} < 0)",
        complex="::complex_sign({input})" if _name == "sgn" else None,
        signed="({input} > 0) - ({input} < 0)",
        unsigned="{input} > 0",
        boolean="{input}",
    )
_row("frexp_mantissa", "input", lambda input: torch.frexp(input).mantissa, floating="::frexp_mantissa({input})", keeps_format=True)
_row(
    "frexp_exponent",
    "input",
    lambda input: torch.frexp(input).exponent,
    floating="::frexp_exponent({input})",
    types="own",
    keeps_format=True,
)


@_spells("round")
def _round(input: Any, *, decimals: Any = 0) -> Call:
    return call("round", input) if _is_literal(decimals, 0) else call("round_decimals", input, decimals)


@_spells("frexp")
def _frexp(input: Any) -> Any:
    parts: Any = (call("frexp_mantissa", input), call("frexp_exponent", input))
    return torch.return_types.frexp(parts)


@_spells("deg2rad")
def _deg2rad(input: Any) -> Call:
    return call("mul", input, math.pi / 180)


@_spells("rad2deg")
def _rad2deg(input: Any) -> Call:
    return call("mul", input, 180 / math.pi)


# ---- complex numbers

_op("real", "input", torch.real, number="{input}", complex="{input}.re", boolean="{input}", types="own", is_alias=True)
_op("imag", "input", torch.imag, complex="{input}.im", types="own", is_alias=True)
_CONJUGATE = "::conjugate({input})"
_op("conj", "input", torch.conj, number="{input}", complex=_CONJUGATE, boolean="{input}", is_alias=True)
_op("conj_physical", "input", torch.conj_physical, number="{input}", complex=_CONJUGATE, boolean="{input}", is_alias=True)
_op("resolve_conj resolve_neg", "input", torch.resolve_conj, complex="{input}", every="{input}", is_alias=True)
_op(
    "angle",
    "input",
    torch.angle,
    floating="::real_angle({input})",
    complex="::atan2({input}.im, {input}.re)",
    signed="::real_angle((float){input})",
    every="0.0f",
    types="own",
    ulp=(3, 2),
)
_op("complex", "real imag", torch.complex, floating="::make_complex({real}, {imag})", types="own own")
_op("polar", "abs angle", torch.polar, floating="::polar({abs}, {angle})", types="own own", ulp=(3, 3), heavy=True)

# ---- several terms

_op(
    "lerp",
    "input end weight",
    torch.lerp,
    floating="::interpolate({input}, {end}, {weight})",
    complex="::complex_interpolate({input}, {end}, {weight})",
    ulp=(2, 2),
)
_op(
    "addcmul",
    "input tensor1 tensor2 *value=1",
    lambda input, tensor1, tensor2, value: torch.addcmul(input, tensor1, tensor2, value=value),
    floating="{value} == 1 ? ::fma({tensor1}, {tensor2}, {input}) : ::fma({value}, {tensor1} * {tensor2}, {input})",
    complex="{input} + {value} * ({tensor1} * {tensor2})",
    integer="::wrap_add({input}, ::wrap_mul(::wrap_mul({value}, {tensor1}), {tensor2}))",
    ulp=(2, 2),
)
_op(
    "addcdiv",
    "input tensor1 tensor2 *value=1",
    lambda input, tensor1, tensor2, value: torch.addcdiv(input, tensor1, tensor2, value=value),
    floating="::fma({value}, {tensor1} / {tensor2}, {input})",
    complex="{input} + {value} * ::complex_divide({tensor1}, {tensor2})",
    ulp=(2, 2),
)
_op(
    "logaddexp",
    "input other",
    torch.logaddexp,
    floating="::log_add_exp({input}, {other})",
    complex="::complex_log_add_exp({input}, {other})",
    ulp=(3, 5),
)
_op("logaddexp2", "input other", torch.logaddexp2, floating="::log_add_exp2({input}, {other})", ulp=(4, 5))
for _name, _function, _log in (("xlogy", torch.xlogy, "log"), ("xlog1py", torch.special.xlog1py, "log1p")):
    _product = f"{{other}} != {{other}} ? {{other}} : {{input}} == 0 ? 0 : {{input}} * ::{_log}({{other}})"
    _op(_name, "input other", _function, floating=_product, ulp=(3, 3))

# ---- special functions


def _sinc_reference(input: Any) -> Any:
    if input.is_complex():
        return torch.sinc(input)
    whole = input.round()  # sin(pi x) of a remainder, which vanishes where it should
    sine = torch.sin(math.pi * (input - whole)) * (1 - 2 * torch.remainder(whole, 2))
    return torch.where(input == 0, 1.0, sine / (math.pi * input)) + 0.0


_op(
    "sinc",
    "input",
    torch.sinc,
    floating="::sinc({input})",
    complex="::complex_sinc({input})",
    eager="::sinc_eager({input})",
    reference=_in_double(_sinc_reference),
    ulp=(5, 5),
)
_row("logit", "input", torch.logit, floating="::logit({input})", eager="::log({input} / (1 - {input}))", ulp=(4, 4))
_row(
    "logit_eps",
    "input eps",
    torch.logit,
    floating="::logit(::clamp_logit({input}, {eps}))",
    eager="::log(::clamp_logit({input}, {eps}) / (1 - ::clamp_logit({input}, {eps})))",
    ulp=(4, 4),
)
_op("entr", "input", torch.special.entr, floating="::entropy({input})", ulp=(3, 3))
_op(
    "ndtr",
    "input",
    torch.special.ndtr,
    floating="::normcdf({input})",
    half="::half_normal_cdf({input})",
    reference=_in_double(lambda input: torch.special.erfc(input * -math.sqrt(0.5)) / 2),
    ulp=(5, 5),
)
_op("ndtri", "input", torch.special.ndtri, floating="::normcdfinv({input})", ulp=(5, 7))
_op("erfinv", "input", torch.erfinv, floating="::erfinv({input})", ulp=(2, 5))
_op("erfcx", "input", torch.special.erfcx, floating="::erfcx({input})", ulp=(4, 4))

# In fp64 and rounded, for fp32; the bounds in fp64 hold away from the zeros of a function, near which its terms cancel.
for _names, _function, _cuda, _bound in (
    ("lgamma gammaln", torch.lgamma, "math_lgamma", 4),
    ("digamma psi", torch.digamma, "digamma", 8),
    ("log_ndtr", torch.special.log_ndtr, "log_normal_cdf", 8),
    ("i0", torch.i0, "bessel_i0", 6),
    ("i1", torch.special.i1, "bessel_i1", 6),
    ("modified_bessel_i0", torch.special.modified_bessel_i0, "bessel_i0", 6),
    ("modified_bessel_i1", torch.special.modified_bessel_i1, "bessel_i1", 6),
    ("i0e", torch.special.i0e, "scaled_bessel_i0", 8),
    ("i1e", torch.special.i1e, "scaled_bessel_i1", 8),
    ("modified_bessel_k0", torch.special.modified_bessel_k0, "bessel_k0", 48),
    ("modified_bessel_k1", torch.special.modified_bessel_k1, "bessel_k1", 16),
    ("scaled_modified_bessel_k0", torch.special.scaled_modified_bessel_k0, "scaled_bessel_k0", 48),
    ("scaled_modified_bessel_k1", torch.special.scaled_modified_bessel_k1, "scaled_bessel_k1", 16),
    ("bessel_j0", torch.special.bessel_j0, "bessel_j0", 8),
    ("bessel_j1", torch.special.bessel_j1, "bessel_j1", 8),
    ("bessel_y0", torch.special.bessel_y0, "bessel_y0", 8),
    ("bessel_y1", torch.special.bessel_y1, "bessel_y1", 8),
    ("airy_ai", torch.special.airy_ai, "airy_ai", 128),
):
    _op(_names, "input", _function, floating=f"::{_cuda}({{input}})", ulp=(1, _bound), heavy=True)
_op("spherical_bessel_j0", "input", torch.special.spherical_bessel_j0, floating="::spherical_bessel({input})", ulp=(4, 5), heavy=True)

_row(
    "polygamma",
    "input order",
    lambda input, order: torch.polygamma(order, input),
    floating="::polygamma({input}, {order})",
    ulp=(1, 32),
    heavy=True,
)
_op("zeta", "input other", torch.special.zeta, floating="::zeta({input}, {other})", ulp=(1, 32), heavy=True)
for _names, _function, _side in (("igamma gammainc", torch.igamma, "false"), ("igammac gammaincc", torch.igammac, "true")):
    _op(_names, "input other", _function, floating=f"::incomplete_gamma({{input}}, {{other}}, {_side})", ulp=(1, 4096), heavy=True)

# Both of the type of the result; n is cut to an integer. The bounds are in units of 1: for degrees up to 30 within [-1, 1].
for _polynomial, _letters in (("chebyshev", "tuvw"), ("shifted_chebyshev", "tuvw")):
    for _letter in _letters:
        _name = f"{_polynomial}_polynomial_{_letter}"
        _cuda = f"::{_polynomial}_{_letter}({{input}}, {{n}})"
        _op(_name, "input n", getattr(torch.special, _name), floating=_cuda, ulp=(1, 64), heavy=True)
for _name, _cuda in (
    ("hermite_polynomial_h", "hermite_h"),
    ("hermite_polynomial_he", "hermite_he"),
    ("laguerre_polynomial_l", "laguerre_l"),
    ("legendre_polynomial_p", "legendre_p"),
):
    _op(_name, "input n", getattr(torch.special, _name), floating=f"::{_cuda}({{input}}, {{n}})", ulp=(1, 64), heavy=True)

_op("gcd", "input other", torch.gcd, integer="::common_divisor({input}, {other})", heavy=True)
_op("lcm", "input other", _lcm, integer="::common_multiple({input}, {other})", heavy=True)


def _next_half(input: Any, other: Any, dtype: torch.dtype) -> Any:
    """``torch.nextafter``, which the CPU lacks for fp16: in integers that are in the order of the values."""
    start, end = torch.as_tensor(input).to(dtype), torch.as_tensor(other).to(dtype)

    def ordered(x: Any) -> Any:
        bits = x.view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    position = ordered(start)
    stepped = position + (ordered(end) - position).sign()
    is_negative = (stepped < 0) | ((stepped == 0) & start.signbit())
    bits = torch.where(is_negative, -stepped | -0x8000, stepped).to(torch.int16).view(dtype)
    return torch.where(start.isnan() | end.isnan(), math.nan, torch.where(start == end, end, bits)).to(dtype)


_row("nextafter", "input other", torch.nextafter, floating="::nextafter({input}, {other})")
for _half in (torch.float16, torch.bfloat16):
    _row(
        f"nextafter_{DTYPES[_half].name}",
        "input other",
        lambda input, other, half=_half: _next_half(input, other, half),
        floating=f"::next_{DTYPES[_half].name}({{input}}, {{other}})",
    )


@_spells("nextafter")
def _nextafter(input: Any, other: Any) -> Call:
    if input.dtype != other.dtype:
        raise TypeError(f"nextafter takes two tensors of one dtype, got {input.dtype} and {other.dtype}")
    half = f"_{DTYPES[input.dtype].name}" if input.dtype in (torch.float16, torch.bfloat16) else ""
    return call(f"nextafter{half}", input, other)


@_spells("logit")
def _logit(input: Any, eps: Any = None) -> Call:
    return call("logit", input) if eps is None else call("logit_eps", input, eps)


def _polygamma(n: Any, input: Any) -> Call:
    return call("digamma", input) if _is_literal(n, 0) else call("polygamma", input, n)


SPELLINGS[torch.polygamma] = SPELLINGS[torch.special.polygamma] = _polygamma


def _polygamma_of(input: Any, n: Any) -> Call:
    return _polygamma(n, input)


SPELLINGS[torch.Tensor.polygamma] = _polygamma_of  # the method's self is the second argument of the function


@_spells("mvlgamma multigammaln")
def _mvlgamma(input: Any, p: int) -> Call:
    terms = [call("lgamma", call("add", input, (k + 1 - p) / 2)) for k in range(p)]
    total = terms[0]
    for term in terms[1:]:
        total = call("add", total, term)
    return call("add", total, p * (p - 1) / 4 * math.log(math.pi))


# ---- activations


def _gelu_tanh_reference(input: Any) -> Any:
    return input * torch.sigmoid(math.sqrt(8 / math.pi) * (input + 0.044715 * input**3))


def _gelu_slope_reference(input: Any) -> Any:
    density = (input * input * -0.5).exp() * (1 / math.sqrt(2 * math.pi))
    return torch.special.erfc(input * -math.sqrt(0.5)) / 2 + input * density


def _gelu_tanh_slope_reference(input: Any) -> Any:
    scale, square = math.sqrt(8 / math.pi), input * input
    gate, other = (torch.sigmoid(sign * scale * (input + 0.044715 * input**3)) for sign in (1, -1))
    return gate + gate * other * input * (scale * (1 + 3 * 0.044715 * square))


def _tanhshrink_reference(input: Any) -> Any:
    series = input**3 * (1 / 3 - input**2 * (2 / 15 - input**2 * (17 / 315)))  # exact to 1e-13 below 0.01, where x - tanh(x) cancels
    return torch.where(input.abs() < 0.01, series, input - torch.tanh(input))


_op(
    "sigmoid expit",
    "input",
    torch.sigmoid,
    floating="::sigmoid({input})",
    complex="::complex_sigmoid({input})",
    half="::half_sigmoid({input})",
    eager="1 / (1 + ::exp(-{input}))",
    reference=_in_double(torch.sigmoid),
    ulp=(7, 4),
)
_op(
    "silu",
    "input",
    F.silu,
    inplace=True,
    floating="::silu({input})",
    complex="{input} * ::complex_sigmoid({input})",
    half="::half_silu({input})",
    eager="{input} / (1 + ::exp(-{input}))",
    reference=_in_double(F.silu),
    ulp=(8, 5),
)
_row(
    "gelu",
    "input",
    F.gelu,
    floating="::gelu({input})",
    half="::half_gelu({input})",
    eager="::gelu_eager({input})",
    reference=_in_double(lambda input: input * torch.special.erfc(input * -math.sqrt(0.5)) / 2),
    ulp=(12, 16),
)
_row(
    "gelu_tanh",
    "input",
    lambda input: F.gelu(input, approximate="tanh"),
    floating="::gelu_tanh({input})",
    half="::half_gelu_tanh({input})",
    eager="::gelu_tanh_eager({input})",
    reference=_in_double(_gelu_tanh_reference),
    ulp=(9, 7),
)
# The derivatives of both: as rows their terms share an exponential, and in eager's numerics one rounding, as in torch's own kernels.
_row(
    "gelu_slope",
    "input",
    lambda input: torch.ops.aten.gelu_backward(torch.ones_like(input), input),
    floating="::gelu_slope({input})",
    half="::half_gelu_slope({input})",
    reference=_in_double(_gelu_slope_reference),
    ulp=(32, 80),  # of a subnormal density the last place counts x times
)
_row(
    "gelu_tanh_slope",
    "input",
    lambda input: torch.ops.aten.gelu_backward(torch.ones_like(input), input, approximate="tanh"),
    floating="::gelu_tanh_slope({input})",
    half="::half_gelu_tanh_slope({input})",
    reference=_in_double(_gelu_tanh_slope_reference),
    # Two roundings and a half of v, of up to 103 and 745, are s's relative error; of a subnormal s the last place counts x v' times.
    ulp=(700, 4000),
)
_op(
    "mish",
    "input",
    F.mish,
    inplace=True,
    floating="::mish({input})",
    half="::half_mish({input})",
    eager="{input} * ::tanh(::log1p(::exp({input})))",
    reference=_in_double(F.mish),
    ulp=(10, 7),
)
_op(
    "softplus",
    "input beta=1 threshold=20",
    F.softplus,
    floating="::softplus({input}, {beta}, {threshold})",
    half="::half_softplus({input}, {beta}, {threshold})",
    eager="{input} * {beta} > {threshold} ? {input} : ::log1p(::exp({input} * {beta})) / {beta}",
    ulp=(4, 5),
)
_op("logsigmoid", "input", F.logsigmoid, floating="::log_sigmoid({input})", ulp=(4, 5), makes_contiguous=True)
_op("relu", "input", F.relu, inplace=True, floating="{input} <= 0 ? 0 : {input}", signed="::relu_signed({input})", unsigned="{input}")
_op(
    "hardtanh",
    "input min_val=-1.0 max_val=1.0",
    F.hardtanh,
    inplace=True,
    number="::clamp({input}, {min_val}, {max_val})",
    keeps_format=True,
)
_op(
    "leaky_relu",
    "input negative_slope=0.01",
    F.leaky_relu,
    inplace=True,
    floating="{input} > 0 ? {input} : {input} * {negative_slope}",
)
_op("elu", "input alpha=1.0", F.elu, inplace=True, floating="{input} > 0 ? {input} : ::expm1({input}) * {alpha}", ulp=(3, 3))
_op("selu", "input", F.selu, inplace=True, floating="::selu({input})", eager="::selu_eager({input})", ulp=(3, 4))
_op(
    "celu",
    "input alpha=1.0",
    F.celu,
    inplace=True,
    floating="{input} > 0 ? {input} : ::expm1({input} / {alpha}) * {alpha}",
    eager="{input} > 0 ? {input} : ::expm1({input} * (1 / {alpha})) * {alpha}",
    ulp=(4, 4),
)
_op(
    "hardswish",
    "input",
    F.hardswish,
    inplace=True,
    floating="{input} * ::hard_sigmoid({input})",
    eager="::hard_swish_eager({input})",
    ulp=(3, 3),
)
_op(
    "hardsigmoid",
    "input",
    F.hardsigmoid,
    inplace=True,
    floating="::hard_sigmoid({input})",
    eager="::hard_sigmoid_eager({input})",
    ulp=(2, 2),
)
_op(
    "tanhshrink",
    "input",
    F.tanhshrink,
    floating="::tanh_shrink({input})",
    complex="{input} - ::complex_tanh({input})",
    eager="{input} - {round}(::tanh({input}))",
    reference=_in_double(_tanhshrink_reference),
    ulp=(11, 7),
)

# ATen brings the numbers of these to the half type itself.
for _names, _function, _parameters, _expression in (
    ("hardshrink", F.hardshrink, "input lambd=0.5", "{input} >= -{lambd} && {input} <= {lambd} ? 0 : {input}"),
    (
        "softshrink",
        F.softshrink,
        "input lambd=0.5",
        "{input} > {lambd} ? {input} - {lambd} : {input} < -{lambd} ? {input} + {lambd} : {input} != {input} ? {input} : 0",
    ),
):
    _op(_names, _parameters, _function, floating=_expression, eager=_expression.replace("{lambd}", "{round}({lambd})"))
_op(
    "threshold",
    "input threshold value",
    F.threshold,
    inplace=True,
    number="{input} <= {threshold} ? {value} : {input}",
    eager="{input} <= {round}({threshold}) ? {value} : {input}",
)


@_spells("gelu")
def _gelu(input: Any, *, approximate: str = "none") -> Call:
    if approximate not in ("none", "tanh"):
        raise TypeError(f"approximate is {approximate!r}; allowed: 'none', 'tanh'")
    return call("gelu" if approximate == "none" else "gelu_tanh", input)


@_spells("relu6")
def _relu6(input: Any, inplace: bool = False) -> Any:
    return SPELLINGS[F.hardtanh](input, 0, 6, inplace)


@_spells("softsign")
def _softsign(input: Any) -> Call:
    return call("div", input, call("add", call("abs", input), 1))


# a * sigmoid(b), rounded once also where the parts of F.glu are halves.
_row(
    "glu",
    "input other",
    lambda input, other: F.glu(torch.stack((input, other), -1), -1).squeeze(-1),
    floating="::gated({input}, {other})",
    half="::half_gated({input}, {other})",
    eager="{input} * (1 / (1 + ::exp(-{other})))",
    reference=lambda input, other: (input.double() * torch.sigmoid(other.double())).to(input.dtype),
    ulp=(8, 5),
)
_row(
    "prelu",
    "input weight",
    lambda input, weight: torch.where(input > 0, input, weight * input),
    floating="{input} > 0 ? {input} : {weight} * {input}",
)


@_spells("glu")
def _glu(input: Any, dim: int = -1) -> Call:
    return call("glu", *_halves(input, dim))


def _halves(input: Any, dim: int) -> Any:
    if input.shape[dim] % 2:
        raise TypeError(f"glu halves dim {dim}, whose size {input.shape[dim]} is odd")
    return input.chunk(2, dim)


@_spells("prelu")
def _prelu(input: Any, weight: Any) -> Sized:
    if not input.dtype.is_floating_point or input.dtype != weight.dtype:
        raise TypeError(f"prelu takes two floating-point tensors of one dtype, got {input.dtype} and {weight.dtype}")
    if weight.ndim > 1:
        raise LayoutError(f"prelu takes one weight, or one dim of a weight a channel, got {weight.ndim} dims")
    if weight.ndim:
        weight = weight.view(()) if input.ndim < 2 else weight.view(-1, *(1,) * (input.ndim - 2))
    return Sized(call("prelu", input, weight), input, "prelu's result (a weight a channel, or one)")


SPELLINGS[torch.prelu] = _prelu


@_spells("rrelu")
def _rrelu(input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False) -> Any:
    if training:
        raise TraceError("rrelu(training=True) draws random slopes. Only training=False, with their mean, is fused.")
    return call("clone_contiguous", SPELLINGS[F.leaky_relu](input, (lower + upper) / 2, inplace))


# ---- losses, element by element


def _loss(function: Callable[..., Any]) -> Callable[[_S], _S]:
    """Make the decorated function, which takes no reduction, the spelling of a loss: ``reduction="none"`` is all that may be asked for."""

    def register(spelling: _S) -> _S:
        theirs, own = inspect.signature(function), inspect.signature(spelling)

        def spell(*args: Any, **kwargs: Any) -> Any:
            given = theirs.bind(*args, **kwargs)
            given.apply_defaults()
            values = dict(given.arguments)
            reduction = values.pop("reduction")
            if reduction != "none" or any(values.pop(name, None) is not None for name in ("size_average", "reduce")):
                raise TraceError(
                    f"{function.__name__} with reduction={reduction!r} adds up elements. Give it reduction='none' in the fused function, "
                    "and reduce the result."
                )
            return spelling(*(values[name] for name in own.parameters))

        spell.__signature__ = theirs  # type: ignore[attr-defined]
        SPELLINGS[function] = spell
        return spelling

    return register


def _weighted(loss: Any, weight: Any) -> Any:
    return loss if weight is None else call("mul", loss, weight)


@_loss(F.l1_loss)
def _l1_loss(input: Any, target: Any, weight: Any) -> Any:
    return _weighted(call("abs", call("sub", input, target)), weight)


@_loss(F.mse_loss)
def _mse_loss(input: Any, target: Any, weight: Any) -> Any:
    return _weighted(call("square", call("sub", input, target)), weight)


# ATen brings the number to a half itself, and computes in it.
for _name, _loss_function, _number, _test, _near, _far, _ulp in (
    ("smooth_l1", F.smooth_l1_loss, "beta", "<", "0.5f * {e} * {e} / {b}", "{e} - {r}(0.5f * {b})", (2, 2)),
    ("huber", F.huber_loss, "delta", "<=", "0.5f * {e} * {e}", "{b} * ({e} - {r}(0.5f * {b}))", (1, 2)),
):
    _choice = f"{{e}} {_test} {{b}} ? {_near} : {_far}"
    _row(
        _name,
        f"error {_number}",
        lambda error, bound, loss=_loss_function, name=_number: loss(error, torch.zeros_like(error), reduction="none", **{name: bound}),
        floating=_choice.format(r="", e="::fabs({error})", b=f"{{{_number}}}"),
        eager=_choice.format(r="{round}", e="::fabs({error})", b=f"{{round}}({{{_number}}})"),
        ulp=_ulp,
    )


@_loss(F.smooth_l1_loss)
def _smooth_l1_loss(input: Any, target: Any, beta: Any) -> Call:
    error = call("sub", input, target)
    return call("abs", error) if type(beta) in (int, float) and beta == 0 else call("smooth_l1", error, beta)


@_loss(F.huber_loss)
def _huber_loss(input: Any, target: Any, delta: Any, weight: Any) -> Any:
    return _weighted(call("huber", call("sub", input, target), delta), weight)


_LEAST_LOG = -100
"""torch's bound on the logarithms of binary_cross_entropy."""


@_loss(F.binary_cross_entropy)
def _binary_cross_entropy(input: Any, target: Any, weight: Any) -> Any:
    log = call("clamp_min", call("log", input), _LEAST_LOG)
    log_rest = call("clamp_min", call("log1p", call("neg", input)), _LEAST_LOG)
    target = Sized(target, input, "the target")
    loss = call("sub", call("mul", call("sub", target, 1), log_rest), call("mul", target, log))
    return Sized(_weighted(loss, weight), input, "the weighted loss")


@_loss(F.binary_cross_entropy_with_logits)
def _binary_cross_entropy_with_logits(input: Any, target: Any, weight: Any, pos_weight: Any) -> Any:
    log, target = call("logsigmoid", input), Sized(target, input, "the target")
    if pos_weight is not None:
        log = call("mul", log, call("add", call("mul", call("sub", pos_weight, 1), target), 1))
    return _weighted(call("sub", call("mul", call("sub", 1, target), input), log), weight)


@_loss(F.soft_margin_loss)
def _soft_margin_loss(input: Any, target: Any) -> Sized:
    return Sized(call("log1p", call("exp", call("mul", call("neg", target), input))), input, "the loss")


@_loss(F.margin_ranking_loss)
def _margin_ranking_loss(input1: Any, input2: Any, target: Any, margin: Any) -> Call:
    if not input1.ndim == input2.ndim == target.ndim:
        raise LayoutError(f"all tensors must have as many dims, got {input1.ndim}, {input2.ndim} and {target.ndim}")
    return call("clamp_min", call("add", call("mul", call("neg", target), call("sub", input1, input2)), 1.0 * margin), 0)


@_loss(F.hinge_embedding_loss)
def _hinge_embedding_loss(input: Any, target: Any, margin: Any) -> Call:
    rest = call("clamp_min", call("sub", margin, input), 0)
    return call("add", call("where", call("ne", target, 1), rest, 0), call("where", call("ne", target, -1), input, 0))


@_loss(F.poisson_nll_loss)
def _poisson_nll_loss(input: Any, target: Any, log_input: bool, full: bool, eps: Any) -> Call:
    expected = call("exp", input) if log_input else input
    log = input if log_input else call("log", call("add", input, eps))
    loss = call("sub", expected, call("mul", target, log))
    if not full:
        return loss
    stirling = call("sub", call("mul", target, call("log", target)), target)
    stirling = call("add", stirling, call("mul", call("log", call("mul", target, 2 * math.pi)), 0.5))
    return call("add", loss, call("masked_fill", stirling, call("le", target, 1), 0))


@_loss(F.kl_div)
def _kl_div(input: Any, target: Any, log_target: bool) -> Call:
    if log_target:
        return call("mul", call("exp", target), call("sub", target, input))
    return call("sub", call("xlogy", target, target), call("mul", target, input))


def _differs_in_one(sizes: tuple[int, ...], others: tuple[int, ...]) -> bool:
    """Whether only one size differs, and is 1: as torch has it, that those which differ add up to 1."""
    return len(sizes) == len(others) and sum(size for size, other in zip(sizes, others, strict=True) if size != other) == 1


@_loss(F.gaussian_nll_loss)
def _gaussian_nll_loss(input: Any, target: Any, var: Any, full: bool, eps: Any) -> Call:
    if _is_number(var):
        var = call("full_like", input, var)
    elif var.shape != input.shape and var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != input.shape and not _differs_in_one(var.shape, input.shape):
        raise LayoutError(f"var has shape {tuple(var.shape)}; allowed: {tuple(input.shape)}, without its last dim, or with one of size 1")
    var = call("clamp_min", var, eps)
    error = call("pow_number", call("sub", input, target), 2)
    loss = call("mul", call("add", call("log", var), call("div", error, var)), 0.5)
    return call("add", loss, 0.5 * math.log(2 * math.pi)) if full else loss
