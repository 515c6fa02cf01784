"""Turns an expression into C++ statements: every operand converted, every rounding explicit, one statement a node.

Knows the numerics modes and the table's C++ expressions; never memory, layouts or how many elements a thread computes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from wideload.dtypes import LIMITED, Kind, ScalarType, is_rounded, is_storage, scalar_type
from wideload.errors import DtypeError
from wideload.expr import Apply, Cast, Const, Draw, Expr, HostValue, Load, Location, Node, Number, Numerics, Position
from wideload.ops_table import Op
from wideload.promotion import Sample, operand_dtypes, sample_of
from wideload.reductions import Reduction

__all__ = ["Parameter", "Program", "ProgramPosition", "RangeCheck", "Result", "ScalarParameter", "Statement", "Store", "lower_expr"]


class Store(NamedTuple):
    """Node ``node`` is written to a tensor of ``dtype``; with ``reduction`` one value of all its elements is, a number of ``dtype``.

    Of what ``is_summed``, sums of its elements over rows are, unrounded: ``dtype`` is what they are added up in.
    """

    node: int
    dtype: torch.dtype
    reduction: Reduction | None = None
    is_summed: bool = False


class Parameter(NamedTuple):
    """A tensor operand that the program reads."""

    operand: int
    name: str
    type: ScalarType


class RangeCheck(NamedTuple):
    """A runtime scalar enters ``op`` as operand ``position`` in a type that holds ``low`` to ``high``.

    Outside, torch wraps in some ops and refuses in others: ask it, with ``samples`` for the other operands.
    """

    op: Op
    samples: tuple[Sample, ...]
    position: int
    low: float
    high: float


_NUMBER_TYPES = {int: "long long", float: "double", complex: "complex<double>"}


class ScalarParameter(NamedTuple):
    """A runtime scalar: passed as ``long long``, ``double`` or two of them, whatever its use, so that its value never recompiles."""

    value: HostValue
    kind: type
    name: str
    checks: tuple[RangeCheck, ...] = ()

    @property
    def limits(self) -> tuple[float, float]:
        """Of what lies between them nothing has to be known; infinite ones are none."""
        of_int = [(-(1 << 63), (1 << 63) - 1)] if self.kind is int else []
        lows, highs = zip((-math.inf, math.inf), *of_int, *[(check.low, check.high) for check in self.checks], strict=True)
        return max(lows), min(highs)

    @property
    def ctype(self) -> str:
        """The C++ type of its value; a complex one is passed as its two parts."""
        return _NUMBER_TYPES[self.kind]


class ProgramPosition(NamedTuple):
    """A number that the kernel works out of where the element lies: a coordinate, or the random integer of ``draw`` counted by it."""

    walk: int
    name: str
    draw: Draw | None

    @property
    def ctype(self) -> str:
        """The C++ type that the element function takes."""
        if self.draw is None:
            return "long long"
        return "unsigned long long" if self.draw.bits > 32 else "unsigned"


class Statement(NamedTuple):
    """``const ctype name = text;`` and the user's line that it comes from.

    ``steady`` is a cheaper text that serves where the parameters ``steady_in`` are the same for all elements of a thread.
    ``num_functions`` is its part of the program's.
    """

    name: str
    ctype: str
    text: str
    at: Location | None
    steady: str = ""
    steady_in: frozenset[str] = frozenset()
    num_functions: int = 0


class Result(NamedTuple):
    """A stored value: C++ ``text`` of the compute type of ``type``. Of what ``is_reduced`` the largest value of all elements is stored.

    Of what ``is_summed``, sums over rows are.
    """

    name: str
    text: str
    type: ScalarType
    is_reduced: bool = False
    is_summed: bool = False


class Program(NamedTuple):
    """What one element costs: the body of the element function.

    ``num_functions`` counts those of its statements that are a function of a maths library, three for one in fp64: what the
    compiler's time grows with; the short formulas of the half tier are none. ``has_functions`` counts those in: whether any statement
    approximates something.
    """

    name: str
    parameters: tuple[Parameter, ...]
    scalars: tuple[ScalarParameter, ...]
    statements: tuple[Statement, ...]
    results: tuple[Result, ...]
    num_functions: int
    has_functions: bool = False
    positions: tuple[ProgramPosition, ...] = ()

    @property
    def has_draws(self) -> bool:
        """Whether the kernel reads a seed."""
        return any(position.draw for position in self.positions)

    @property
    def reduced(self) -> tuple[Result, ...]:
        """The results that are one value of all elements."""
        return tuple(result for result in self.results if result.is_reduced)


_RESERVED = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const constexpr continue decltype
    default delete do double dynamic_cast else enum explicit export extern false final float for friend goto if inline int long mutable
    namespace new noexcept not not_eq nullptr operator or or_eq override private protected public register reinterpret_cast requires
    return short signed sizeof static static_assert static_cast struct switch template this throw true try typedef typeid typename union
    unsigned using virtual void volatile wchar_t while xor xor_eq thread_local char16_t char32_t NULL
    threadIdx blockIdx blockDim gridDim warpSize DEVICE FUNCTION
    """.split()
)
"""C++'s and CUDA's own words, and the prelude's macros. Functions need no place here: the table's calls begin with ``::``."""
_KERNELS_OWN = re.compile(
    r"n|i|k|m|d|e|first|lead|pad|phase|slot|column|line|across|along|turn|is_(full|inside|whole|aligned|row)|(column|line)0"
    r"|(at|rest|size|slots|tiles|multiplier|shift)\d+|\w+_(v|next|r|once|uniform|at|re|im|data|value|span|tile|offset|stride\d+|element)"
    r"|seed|__\w*"
    r"|vec|f16|bf16|boolean|complex|e[458]m[023]\w*|(load|store|fill|gather|round|repeat|tile|count|draw)_\w+|widen|narrow_to|convert"
    r"|settled|pack|divide_u\d+|chunks?|lists|phase_of|r|largest|\w+_word|row0?|rows|part_rows|step|columns|end|\w+_sum|add_lanes"
)
"""What the kernels of emit/ call their own variables, where a runtime scalar keeps its name, and the prelude's names that they use."""


_NEVER_TOO_NARROW = frozenset({torch.bool, torch.int64, torch.float64, torch.complex128})
"""Dtypes that take every runtime scalar, as far as its 64 bits go."""

_FUNCTIONS_OF_FP64 = 3
"""NVRTC 13.5 takes some 12 ms for a function in fp64, 3.5 ms for one in fp32."""


class _Names:
    """C++ identifiers from the user's names; none twice."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}

    def take(self, wanted: str) -> str:
        base = re.sub(r"\W|^(?=\d)", "_", wanted, flags=re.ASCII)
        base = f"{base}_" if base in _RESERVED or _KERNELS_OWN.fullmatch(base) else base
        name = base
        while name in self._taken:
            self._counts[base] = self._counts.get(base, 1) + 1
            name = f"{base}_{self._counts[base]}"
        self._taken.add(name)
        return name


def lower_expr(expr: Expr, stores: tuple[Store, ...], *, numerics: Numerics, fast_math: bool = False) -> Program:
    """The statements that compute ``stores``; nodes that none of them needs are left out.

    Raises ``DtypeError`` for a dtype that kernels cannot hold.
    """
    return _Lowering(expr, stores, numerics, fast_math).run()


class _Lowering:
    def __init__(self, expr: Expr, stores: tuple[Store, ...], numerics: Numerics, fast_math: bool) -> None:
        self._expr, self._stores, self._eager = expr, stores, numerics == "eager"
        self._names = _Names()
        self._values: dict[int, str] = {}
        self._needed = _needed_nodes(expr, stores)
        self._only_stored = _only_stored(expr, stores, self._needed)
        self._limits = {} if self._eager else self._find_limits()  # in eager mode a cast is rounded where it stands
        self._narrowed = _narrowed_nodes(expr, stores, self._needed)
        self._cheap = set() if self._eager else self._needed - self._steady_nodes() if fast_math else self._cheap_nodes(stores)

    def run(self) -> Program:
        nodes = self._expr.nodes
        parameters: dict[int, Parameter] = {}
        scalars, statements = [], []
        for number in self._needed_in_order((Load, Number)):
            node = nodes[number]
            if isinstance(node, Load):  # one operand is one parameter, whatever rank promotion sees
                if node.operand not in parameters:
                    row = scalar_type(node.dtype, f"argument {node.name}")
                    parameters[node.operand] = Parameter(node.operand, self._names.take(node.name), row)
                self._values[number] = parameters[node.operand].name
            elif isinstance(node, Number):
                scalars.append(
                    ScalarParameter(
                        node.value, node.kind, self._names.take(getattr(node.value, "name", "number")), self._range_checks(number)
                    )
                )
                self._values[number] = scalars[-1].name
        positions: dict[tuple[int, Draw | None], ProgramPosition] = {}
        for number in self._needed_in_order((Position,)):
            node = nodes[number]
            assert isinstance(node, Position)
            if (node.walk, node.draw) not in positions:
                name = self._names.take("draw" if node.draw else "index")
                positions[node.walk, node.draw] = ProgramPosition(node.walk, name, node.draw)
            self._values[number] = positions[node.walk, node.draw].name
        for number in self._needed_in_order((Apply, Cast)):
            node = nodes[number]
            assert isinstance(node, Apply | Cast)
            if number in self._limits.values():
                continue
            text, steady = self._apply(number, node) if isinstance(node, Apply) else (self._cast(number, node), "")
            steady_in = self._parameters_of(node.operands[-1]) if isinstance(node, Apply) and steady else None
            name = self._names.take(node.op.name if isinstance(node, Apply) else "cast")
            ctype = scalar_type(node.dtype, "a result").compute
            steadily = ("", frozenset[str]()) if steady_in is None else (steady, steady_in)
            num_functions = self._count_functions(number, node) if isinstance(node, Apply) else 0
            statements.append(Statement(name, ctype, text, node.at, *steadily, num_functions))
            self._values[number] = name
        results = tuple(self._result(position, store) for position, store in enumerate(self._stores))
        applied = list(self._needed_in_order((Apply,)))
        return Program(
            self._expr.name,
            tuple(parameters.values()),
            tuple(scalars),
            tuple(statements),
            results,
            sum(statement.num_functions for statement in statements),
            any(_is_function(self._expr.nodes[number]) for number in applied),
            tuple(positions.values()),
        )

    def _count_functions(self, number: int, node: Apply) -> int:
        is_cheap = number in self._cheap and node.op.half is not None
        if is_cheap or not _is_function(node):
            return 0
        return _FUNCTIONS_OF_FP64 if node.dtype in (torch.float64, torch.complex128) else 1

    def _range_checks(self, scalar: int) -> tuple[RangeCheck, ...]:
        checks: list[RangeCheck] = []
        if getattr(self._expr.nodes[scalar], "kind", None) is complex:
            return ()  # it enters as infinity, in torch too
        for number in self._needed_in_order((Apply,)):
            node = self._expr.nodes[number]
            assert isinstance(node, Apply)
            for position, (operand, to) in enumerate(zip(node.operands, operand_dtypes(self._expr.nodes, node), strict=True)):
                if operand == scalar and to is not None and to not in _NEVER_TOO_NARROW:
                    samples = tuple(sample_of(self._expr.nodes[i]) for i in node.operands)
                    limits = torch.finfo(to) if to.is_floating_point or to.is_complex else torch.iinfo(to)
                    checks.append(RangeCheck(node.op, samples, position, limits.min, limits.max))
        return tuple(checks)

    def _needed_in_order(self, kinds: tuple[type, ...]) -> list[int]:
        return [number for number in sorted(self._needed) if isinstance(self._expr.nodes[number], kinds)]

    def _parameters_of(self, number: int) -> frozenset[str] | None:
        """The operands that a node is worked out from; None where the element's place is among what it is."""
        node = self._expr.nodes[number]
        if isinstance(node, Load):
            return frozenset({self._values[number]})
        found = [frozenset[str](), *map(self._parameters_of, _operands(node))]
        return None if isinstance(node, Position) or None in found else frozenset().union(*(of for of in found if of is not None))

    def _apply(self, number: int, node: Apply) -> tuple[str, str]:
        """The text, and the one of the op's ``steady`` expression where it has one here, or ``""``."""
        op = node.op
        texts: dict[str, str] = {}
        kinds: list[tuple[bool, Kind]] = []
        for name, mark, operand, to in zip(op.operands, op.types, node.operands, operand_dtypes(self._expr.nodes, node), strict=True):
            if to is not None:
                texts[name] = self._converted(operand, to)
                kinds.append((mark != "bool", scalar_type(to, f"an operand of {op.name}").kind))
        kind = max(kinds, key=lambda item: item[0])[1] if kinds else scalar_type(node.dtype, op.name).kind
        template = self._template(number, node, kind)
        is_narrowed = number in self._narrowed and template == op.cuda.get("float") and self._computes_in_fp32(node)
        templates = template, (op.steady or "") if is_narrowed else ""
        if not self._eager:
            found = [each.format(**texts) for each in templates]
            if is_storage(node.dtype) and number not in self._only_stored:
                found = [text and self._rounded(text, node.dtype) for text in found]
            return found[0], found[1]
        rounding = f"round_{scalar_type(node.dtype, op.name).storage}" if is_rounded(node.dtype) else ""
        found = [text and self._rounded(text.format(**texts, round=rounding), node.dtype) for text in templates]
        return found[0], found[1]

    def _template(self, number: int, node: Apply, kind: Kind) -> str:
        op = node.op
        if self._eager and op.eager is not None and kind in op.eager:
            return op.eager[kind]
        if op.half is not None and number in self._cheap and self._computes_in_fp32(node):
            return op.half
        if kind not in op.cuda:
            raise DtypeError(
                f"{op.name} is not defined for {kind} operands; defined for: {', '.join(op.cuda)}{f' (at {node.at})' if node.at else ''}."
            )
        return op.cuda[kind]

    def _computes_in_fp32(self, node: Apply) -> bool:
        return scalar_type(node.dtype, node.op.name).compute == "float"

    def _find_limits(self) -> dict[int, int]:
        """Casts that are but stored in a type that limits values itself, and the clamps to its largest number that they alone read."""
        nodes = self._expr.nodes
        found = {}
        for number in self._needed & self._only_stored:
            node = nodes[number]
            clamp = nodes[node.operand] if isinstance(node, Cast) and node.dtype in LIMITED else None
            if not isinstance(node, Cast) or not isinstance(clamp, Apply) or clamp.op.name != "clamp":
                continue
            readers = [reader for reader in self._needed for operand in _operands(nodes[reader]) if operand == node.operand]
            top = torch.finfo(node.dtype).max
            bounds = [nodes[operand] for operand in clamp.operands[1:]]
            is_stored = any(store.node == node.operand for store in self._stores)
            if readers == [number] and not is_stored and [bound.value for bound in bounds if isinstance(bound, Const)] == [-top, top]:
                found[number] = node.operand
        return found

    def _cheap_nodes(self, stores: tuple[Store, ...]) -> set[int]:
        """Those of the half tier: from which only halves flow, but for quotients and roots, whose every bit is looked at."""
        found, nodes = _half_nodes(self._expr, stores, self._needed), self._expr.nodes
        return {number for number in found if isinstance(node := nodes[number], Apply) and any(node.op.ulp)}

    def _steady_nodes(self) -> set[int]:
        return {number for number in self._narrowed if isinstance(node := self._expr.nodes[number], Apply) and node.op.steady}

    def _cast(self, number: int, node: Cast) -> str:
        if number in self._limits:
            clamp = self._expr.nodes[node.operand]
            assert isinstance(clamp, Apply)
            return self._converted(clamp.operands[0], node.dtype)
        text = self._converted(node.operand, node.dtype)
        return text if number in self._only_stored else self._rounded(text, node.dtype)

    def _rounded(self, text: str, dtype: torch.dtype) -> str:
        return f"round_{scalar_type(dtype, 'a result').storage}({text})" if is_rounded(dtype) else text

    def _converted(self, number: int, to: torch.dtype) -> str:
        """C++ for node ``number`` as a value of dtype ``to``; as TensorIterator does, eager mode rounds a tensor to the half it becomes."""
        node, target = self._expr.nodes[number], scalar_type(to, "a result")
        if isinstance(node, Const):
            literal = _literal(node.value, target)
            return self._rounded(literal, to) if is_storage(to) else literal
        text = self._values[number]
        if isinstance(node, Number):
            text = _convert(text, _NUMBER_TYPES[node.kind], target)
            return self._rounded(text, to) if is_storage(to) else text
        text = _convert(text, scalar_type(node.dtype, "an operand").compute, target)
        return self._rounded(text, to) if self._eager and is_rounded(to) and node.dtype != to else text

    def _word(self, number: int, reduction: Reduction) -> str:
        """The word that the reduction takes a node's element for."""
        node = self._expr.nodes[number]
        assert not isinstance(node, Const | Number)
        value = self._rounded(self._values[number], node.dtype) if reduction.rounds else self._values[number]
        return reduction.words[scalar_type(node.dtype, "an element").compute].format(x=value)

    def _result(self, position: int, store: Store) -> Result:
        name = self._names.take(f"out{position}" if len(self._stores) > 1 else "out")
        if store.reduction is not None:
            word = scalar_type(_WORDS[store.dtype.itemsize], "a word")
            return Result(name, self._word(store.node, store.reduction), word, is_reduced=True)
        node, target = self._expr.nodes[store.node], scalar_type(store.dtype, "out=")
        if store.node in self._limits:
            target = LIMITED[store.dtype]
        if isinstance(node, Const | Number):
            return Result(name, self._converted(store.node, store.dtype), target)
        text = self._values[store.node]
        if store.dtype != node.dtype:  # out= of another dtype receives the rounded result, converted
            text = text if store.is_summed else self._rounded(text, node.dtype)
            text = _convert(text, scalar_type(node.dtype, "a result").compute, target)
        return Result(name, text, target, is_summed=store.is_summed)


_WORDS = {4: torch.uint32, 8: torch.uint64}
"""What has the bits of a reduction's result, by its size."""


def _convert(text: str, ctype: str, target: ScalarType) -> str:
    """C++ for ``text``, of type ``ctype``, as a value of the compute type of ``target``; the real part of a complex one."""
    if ctype.startswith("complex") and target.kind != "complex":
        return f"({text} != {ctype}(0, 0))" if target.kind == "bool" else _convert(f"{text}.re", ctype[8:-1], target)
    return text if ctype == target.compute else f"convert<{target.compute}>({text})"


def _operands(node: Node) -> Iterable[int]:
    if isinstance(node, Apply):
        return (operand for operand, kind in zip(node.operands, node.op.types, strict=True) if kind != "shape")
    return (node.operand,) if isinstance(node, Cast) else ()


def _needed_nodes(expr: Expr, stores: tuple[Store, ...]) -> set[int]:
    needed = {store.node for store in stores}
    for number in reversed(range(len(expr.nodes))):
        if number in needed:
            needed.update(_operands(expr.nodes[number]))
    return needed


def _only_stored(expr: Expr, stores: tuple[Store, ...], needed: set[int]) -> set[int]:
    """Nodes that are stored in their own dtype and used nowhere else: the store rounds them."""
    used = {operand for number in needed for operand in _operands(expr.nodes[number])}
    converted = {store.node for store in stores if store.dtype != getattr(expr.nodes[store.node], "dtype", None)}
    return {store.node for store in stores} - used - converted


def _half_nodes(expr: Expr, stores: tuple[Store, ...], needed: set[int]) -> set[int]:
    """Nodes from which only fp16 and bf16 results flow, and smoothly: they are rounded to a half before anything can tell a difference.

    One value of all elements is that of the values which the other results are made of, and has a say where there are none.
    """
    others = _needed_nodes(expr, tuple(store for store in stores if store.reduction is None))
    stores = tuple(store for store in stores if store.reduction is None or store.node not in others)
    return _nodes_ending(
        expr,
        needed,
        {store.node for store in stores if not (is_rounded(store.dtype) or _is_rounded_node(expr.nodes[store.node]))},
        lambda node: isinstance(node, Cast) and is_rounded(node.dtype),
        lambda node: isinstance(node, Load | Number | Const) or (node.dtype.is_floating_point and not _jumps(node)),
    )


_JUMPING = frozenset(
    "floor ceil trunc frac round round_decimals sign sgn heaviside copysign threshold hardshrink fmod remainder angle atan2 "
    "div_floor div_floor_number div_trunc div_trunc_number frexp_mantissa nan_to_num nextafter nextafter_f16 nextafter_bf16".split()
)
"""Ops whose results are far apart for operands that a rounding tells apart: as those of a comparison, or integers."""


def _jumps(node: Node) -> bool:
    return isinstance(node, Apply) and node.op.name in _JUMPING


def _nodes_ending(
    expr: Expr, needed: set[int], wide: set[int], is_end: Callable[[Node], bool], leads_on: Callable[[Node], bool]
) -> set[int]:
    """Nodes from which every way to a store meets an end, by nodes that lead on alone; ``wide`` are those of stores that are no end."""
    for number in sorted(needed, reverse=True):
        node = expr.nodes[number]
        if not is_end(node) and (number in wide or not leads_on(node)):
            wide.update(_operands(node))
    return needed - wide


_NARROW = frozenset({torch.int8, torch.uint8, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2})
"""Types in which nothing is left of what is below 2^-40, and what is above 2^60 is as large as can be."""
_LEADING_ON = frozenset(
    {torch.float32, torch.float64, torch.bfloat16, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64}
)
"""Types on the way there: a bool tells the least number from 0, and other types of fp8 have NaN for an infinity."""
_LIMITING = frozenset({"round", "clamp", "clamp_min", "clamp_max"})


def _narrowed_nodes(expr: Expr, stores: tuple[Store, ...], needed: set[int]) -> set[int]:
    """Nodes that are but limited and rounded to integers, if anything, before all that is left of them is in a narrow type."""
    return _nodes_ending(
        expr,
        needed,
        {store.node for store in stores},
        lambda node: isinstance(node, Cast) and node.dtype in _NARROW,
        lambda node: node.op.name in _LIMITING if isinstance(node, Apply) else isinstance(node, Cast) and node.dtype in _LEADING_ON,
    )


def _is_rounded_node(node: Node) -> bool:
    return isinstance(node, Load | Apply | Cast) and is_rounded(node.dtype)


def _literal(value: Any, target: ScalarType) -> str:
    """C++ for a Python number as a value of the compute type of ``target``."""
    if target.kind == "complex":
        parts = (value.real, value.imag) if isinstance(value, complex) else (value, 0)
        return f"{target.compute}({', '.join(_float_literal(part, target.compute[8:-1]) for part in parts)})"
    if target.kind == "bool":
        return "true" if value != 0 else "false"
    if target.kind == "float":
        return _float_literal(value, target.compute)
    bits = 8 * target.itemsize
    whole = int(value) & ((1 << bits) - 1)
    if target.kind == "signed" and whole >> (bits - 1):
        whole -= 1 << bits
    if target.compute == "long long":
        return f"({whole + 1}ll - 1)" if whole == -(1 << 63) else f"{whole}ll"
    if target.compute == "unsigned long long":
        return f"{whole}ull"
    return f"({target.compute}){whole}" if target.compute != "int" else (f"({whole + 1} - 1)" if whole == -(1 << 31) else f"{whole}")


def _float_literal(value: float, ctype: str) -> str:
    exact = np.int64(value) if isinstance(value, int) and -(1 << 63) <= value < 1 << 63 else np.float64(value)  # an int rounds once
    with np.errstate(over="ignore"):
        rounded: Any = exact.astype(np.float32 if ctype == "float" else np.float64)
    suffix = "f" if ctype == "float" else ""
    if np.isnan(rounded):
        return "__int_as_float(0x7fc00000)" if suffix else "__longlong_as_double(0x7ff8000000000000ll)"
    if np.isinf(rounded):
        bits = (
            ("0x7f800000" if rounded > 0 else "(int)0xff800000")
            if suffix
            else ("0x7ff0000000000000ll" if rounded > 0 else "(long long)0xfff0000000000000ull")
        )
        return f"__int_as_float({bits})" if suffix else f"__longlong_as_double({bits})"
    digits = repr(rounded.item()) if ctype == "double" else str(rounded)
    digits = digits if any(c in digits for c in ".e") else f"{digits}.0"
    return f"({digits}{suffix})" if digits.startswith("-") else f"{digits}{suffix}"


def _is_function(node: Node) -> bool:
    """Whether it approximates something: what has an error bound does."""
    return isinstance(node, Apply) and (node.op.heavy or any(node.op.ulp))
