"""The pool of functions that the fuzz draws from: useful ones, and random expression trees, each over fixed dtypes.

Knows torch's operators, the two values of all elements, and the dtypes they take; nothing of layouts, shapes of operands or kernels. The
pool is bounded and the same in every process, so that kernels are compiled once and then run over many layouts.
"""

from __future__ import annotations

import itertools
import linecache
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

import wideload as wl

__all__ = ["PROGRAMS", "Oracle", "Program", "Shapes"]

Oracle = Literal["eager", "wide", "double"]
"""What a result is compared with.

``eager``: the function itself, bit for bit. ``wide``: the function on halves widened to fp32, rounded once, bit for bit: the contract of
``numerics="fused"`` for ops that are exact. ``double``: the function in fp64, rounded once, within the program's ``ulps``.
"""

Shapes = Literal["broadcast", "equal", "even", "rope", "square", "heads", "outer", "row"]
"""How operands' shapes follow from the drawn one. ``broadcast``: any that broadcast to it. ``equal``: the shape itself, of two dims at
least. ``even``: with a last dim of even size. ``rope``: the same, and others that broadcast but for the last dim. ``square``: the last two
sizes are equal. ``heads``: the last size is a multiple of three. ``outer``: small enough to be squared.
``row``: an even number of rows of whole accesses, and all operands but the first are one row or one element of each."""

NUM_TREES = 16
DEPTHS = (2, 3, 3)

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i16, i32, i64, u8, b1 = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool


@dataclass(frozen=True)
class Program:
    """A function of tensors ``a, b, c, d`` and numbers ``s`` (float) and ``n`` (int), as the text of its lambda.

    ``ulps`` is what the ``double`` oracle allows, in units in the last place of the result. ``zeros_differ`` is false where torch itself
    does not define which of 0 and -0 is returned. ``takes_numbers``: 0-dim CPU tensors may stand beside CUDA tensors, as every result
    depends on all operands. ``values`` are the results that are one value of all elements.
    """

    name: str
    text: str
    dtypes: tuple[torch.dtype, ...]
    numerics: Literal["fused", "eager"]
    oracle: Oracle
    shapes: Shapes = "broadcast"
    ulps: int = 0
    zeros_differ: bool = True
    takes_numbers: bool = False
    values: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[str, ...]:
        """The number parameters, which follow the tensors."""
        names = self.text.removeprefix("lambda ").partition(":")[0].split(", ")
        return tuple(names[len(self.dtypes) :])

    @property
    def rounds_scalars(self) -> bool:
        """Whether eager's value depends on the device where an operand is 0-dim: the CPU does not round it to a half, CUDA does."""
        return self.oracle == "eager" and len(set(self.dtypes)) > 1 and any(dtype in (bf16, f16) for dtype in self.dtypes)

    def function(self) -> Callable[..., Any]:
        """The function, made anew, with lines that a trace can quote."""
        file = f"<fuzz {self.name}>"
        linecache.cache[file] = (len(self.text), None, [self.text], file)
        function: Callable[..., Any] = eval(compile(self.text, file, "eval"), {"torch": torch, "F": F, "wl": wl})
        return function


_SAME = ((bf16, bf16), (f16, f16), (f32, f32), (f64, f64), (i8, i8), (u8, u8), (i16, i16), (i64, i64), (b1, b1))
_MIXED = ((bf16, f32), (f32, f16), (i8, f16), (i32, i64), (b1, f32), (u8, i8), (f64, bf16))

_ROTATE = "torch.cat((-a.chunk(2, dim=-1)[1], a.chunk(2, dim=-1)[0]), dim=-1)"

_USEFUL: tuple[tuple[str, str, Sequence[tuple[torch.dtype, ...]], dict[str, Any]], ...] = (
    ("add", "lambda a, b: a + b", (*_SAME, *_MIXED), {"takes_numbers": True}),
    ("negate", "lambda a: -a", ((u8,), (bf16,), (f64,)), {}),
    ("choose", "lambda a, b, c: torch.where(a, b, c)", ((b1, bf16, bf16), (b1, f32, f16), (b1, i64, f32)), {}),
    ("affine", "lambda a, b, c: a * b + c", ((bf16,) * 3, (i8, f32, bf16)), {"takes_numbers": True}),
    ("affine_rounded", "lambda a, b, c: a * b + c", ((f16, bf16, f16),), {"takes_numbers": True, "numerics": "eager"}),
    ("scaled", "lambda a, s, n: a * s + n", ((bf16,), (f64,), (i16,)), {}),
    ("compare", "lambda a, b: (a < b) | (a == 0)", ((bf16, bf16), (f32, i8)), {"takes_numbers": True}),
    ("bits", "lambda a, b: (a & b) ^ ~(a | b)", ((u8, u8), (i8, i16), (b1, b1)), {"takes_numbers": True}),
    ("divide", "lambda a, b: a / (b.abs() + 1)", ((f32, f32), (i32, f64)), {}),  # by a number, torch multiplies with its reciprocal
    ("relu", "lambda a: F.relu(a)", ((i8,), (bf16,)), {"zeros_differ": False}),
    ("larger", "lambda a, b: torch.maximum(a, b)", ((u8, u8), (f32, i32)), {"takes_numbers": True, "zeros_differ": False}),
    ("clamped", "lambda a: a.clamp(-2, 3)", ((i8,), (f16,)), {}),
    ("swiglu", "lambda a, b: F.silu(a) * b", ((bf16, bf16), (f16, f16)), {"oracle": "double", "ulps": 1}),
    ("swiglu", "lambda a, b: F.silu(a) * b", ((f32, f32),), {"oracle": "double", "ulps": 16}),
    ("bias_gelu", "lambda a, b: F.gelu(a + b, approximate='tanh')", ((bf16, bf16),), {"oracle": "double", "ulps": 2}),
    # ---- a function of a maths library beside a row, as strips are for
    ("gated", "lambda a, b: torch.sigmoid(a + b) * b", ((bf16, bf16), (f16, f16)), {"shapes": "row", "oracle": "double", "ulps": 1}),
    (
        "exact_function",
        "lambda a, b: torch.exp2(a - a) * b + a",  # 2^0, for the function
        ((bf16, bf16), (f16, f16), (f32, f32), (f64, f64), (bf16, f32), (f32, bf16)),
        {"shapes": "row"},
    ),
    # ---- casts
    ("to_bf16", "lambda a: a.to(torch.bfloat16)", ((f32,), (f64,), (i8,)), {}),
    ("to_f16", "lambda a: a.to(torch.float16)", ((f32,), (u8,)), {}),
    ("to_f32", "lambda a: a.float()", ((bf16,), (b1,), (i64,)), {}),
    ("to_f64", "lambda a: a.double()", ((f16,),), {}),
    ("to_i8", "lambda a: a.to(torch.int8)", ((i64,), (u8,)), {}),
    ("to_bool", "lambda a: a.bool()", ((bf16,), (i16,)), {}),
    ("quantise", "lambda a: a.nan_to_num(0.0, 127.0, -128.0).clamp(-128, 127).round().to(torch.int8)", ((bf16,),), {}),
    ("dequantise", "lambda a, b: a.to(torch.bfloat16) * b", ((i8, bf16),), {}),
    # ---- several results
    ("both", "lambda a, b, c: ((a + b).to(torch.bfloat16), c + a)", ((i8, f32, f64), (bf16, bf16, f32)), {}),
    ("apart", "lambda a, b: (a + 1, a * b, b - 1)", ((f32, f32), (i8, f16)), {}),
    ("split", "lambda a, b: {'sum': a + b, 'less': a < b}", ((bf16, bf16),), {}),
    # ---- values of all elements
    (
        "largest",
        "lambda a, b: (a * b, wl.amax(a * b), wl.any_nonfinite(b))",
        ((f32, f32), (bf16, bf16), (f16, f32), (f64, bf16)),
        {"values": (1, 2)},
    ),
    ("largest_alone", "lambda a, b: (wl.amax(a), wl.any_nonfinite(a + b))", ((f32, f32), (f64, f64)), {"values": (0, 1)}),
    (
        "largest_of_parts",
        "lambda a, b: (wl.amax(torch.cat((a, b + 1), -1)), a[..., 1:] + 1)",
        ((f32, f32),),
        {"shapes": "equal", "values": (0,)},
    ),
    # ---- views inside the function
    ("packed", "lambda a: a.chunk(2, dim=-1)[0].neg() * a.chunk(2, dim=-1)[1]", ((bf16,), (i8,)), {"shapes": "even"}),
    ("halves", "lambda a: a.chunk(2, dim=-1)[0] - 1", ((u8,), (f16,)), {"shapes": "even"}),
    (
        "rope",
        f"lambda a, b, c: a * b + {_ROTATE} * c",
        ((bf16,) * 3, (f32,) * 3),
        {"shapes": "rope", "numerics": "eager"},
    ),
    ("rotate", f"lambda a: {_ROTATE}", ((f16,), (i32,)), {"shapes": "even"}),
    ("pairs", "lambda a, b: torch.stack((a * 2, b - 1), -1)", ((f32, f32), (bf16, bf16)), {"shapes": "equal"}),
    ("joined", "lambda a, b: torch.cat((a, b * 2, a), -1)", ((f32, f32), (i8, i8)), {"shapes": "equal"}),
    ("stacked", "lambda a, b: torch.cat((a - b, b)) * 3", ((bf16, bf16),), {"shapes": "equal", "numerics": "eager"}),
    ("window", "lambda a: a[..., 1:] - a[..., :-1]", ((f32,), (bf16,)), {"shapes": "equal"}),
    ("inner", "lambda a, b: (a * b + 1)[..., 1:, ::2]", ((f32, f32), (bf16, f32)), {"shapes": "equal"}),
    ("turned", "lambda a, b: (a + 1).transpose(-1, -2) * b", ((f32, f32), (bf16, bf16)), {"shapes": "square"}),
    ("symmetric", "lambda a: a + a.transpose(-1, -2)", ((bf16,), (f32,), (i8,)), {"shapes": "square"}),
    ("diagonal", "lambda a: a.diagonal(0, -2, -1) * a[..., 0, :]", ((f32,),), {"shapes": "square"}),
    ("outer", "lambda a, b: a[..., None] * b[..., None, :]", ((f32, bf16), (i8, i8)), {"shapes": "outer"}),
    ("heads", "lambda a: a.unflatten(-1, (3, -1)).transpose(-1, -2) * 2", ((bf16,), (f32,)), {"shapes": "heads"}),
    # ---- in place on an intermediate, one value several times
    ("accumulate", "lambda a, b: (a + b).mul_(2).sub_(a)", ((f32, f32), (bf16, bf16)), {"takes_numbers": True}),
    ("repeated", "lambda a, b: (a * b) * (a * b) + a", ((f16, f16), (i32, i32)), {"takes_numbers": True}),
    # ---- what torch refuses
    ("refused", "lambda a, b: a - b", ((b1, b1), (b1, i8)), {}),
    ("shifted", "lambda a, b: a << (b & 3)", ((i8, i8), (i64, i32), (f32, i32)), {}),
)


def _useful() -> list[Program]:
    programs = []
    for name, text, dtypes, options in _USEFUL:
        for choice in dtypes:
            suffix = "_".join(str(dtype).removeprefix("torch.") for dtype in choice)
            numerics = options.get("numerics", "fused")
            oracle = options.get("oracle", "wide" if numerics == "fused" else "eager")
            programs.append(Program(f"{name}_{suffix}", text, choice, **{**options, "numerics": numerics, "oracle": oracle}))
    return programs


# ---- random trees

_FLOAT_UNARY = ("-{0}", "{0}.abs()", "{0}.floor()", "{0}.trunc()", "{0}.round()", "{0}.square()", "{0}.clamp(-2.5, 3)", "{0}.sign()")
_FLOAT_BINARY = ("({0} + {1})", "({0} - {1})", "({0} * {1})", "({0} / {1})")
_INT_UNARY = ("-{0}", "~{0}", "{0}.abs()", "{0}.clamp(2, 100)", "({0} >> 1)", "({0} << 3)", "{0}.square()")
_INT_BINARY = (
    "({0} + {1})",
    "({0} - {1})",
    "({0} * {1})",
    "({0} & {1})",
    "({0} ^ {1})",
    "torch.maximum({0}, {1})",
    "torch.minimum({0}, {1})",
)
_BOOL_UNARY = ("~{0}", "torch.logical_not({0})")
_BOOL_BINARY = ("({0} & {1})", "({0} | {1})", "({0} ^ {1})")
_COMPARE = ("({0} < {1})", "({0} >= {1})", "({0} == {1})", "({0} != {1})")
_CASTS = ("{0}.float()", "{0}.to(torch.bfloat16)", "{0}.to(torch.float16)", "{0}.double()")

Kind = Literal["float", "int", "bool"]


def _kind(dtype: torch.dtype) -> Kind:
    return "bool" if dtype == b1 else "float" if dtype.is_floating_point else "int"


def _tree(rng: random.Random, leaves: dict[str, Kind], uses: dict[str, int], want: Kind, depth: int) -> str:
    """An expression of kind ``want`` whose every op is exact, or rounded in one way only; ``uses`` counts those of each leaf."""
    if depth <= 0:
        fitting = [name for name, kind in leaves.items() if kind == want]
        name = min(fitting or leaves, key=lambda name: (uses[name], rng.random()))
        uses[name] += 1
        if fitting:
            return name
        return {"float": f"{name}.float()", "int": f"({name} != 0).int()", "bool": f"({name} != 0)"}[want]
    draw = rng.random()

    def branch(kind: Kind) -> str:
        return _tree(rng, leaves, uses, kind, depth - rng.choice((1, 1, 2)))

    if draw < 0.12:
        return f"torch.where({branch('bool')}, {branch(want)}, {branch(want)})"
    if want == "bool" and draw < 0.6:
        kind: Kind = rng.choice([kind for kind in leaves.values() if kind != "bool"] or ["bool"])
        return rng.choice(_COMPARE).format(branch(kind), branch(kind))
    if want == "float" and draw < 0.24:
        return rng.choice(_CASTS).format(branch("float"))
    if want == "float" and draw < 0.32 and "int" in leaves.values():
        return rng.choice(("({0} * {1})", "({0} + {1})")).format(branch("float"), branch("int"))
    unary, binary = {"float": (_FLOAT_UNARY, _FLOAT_BINARY), "int": (_INT_UNARY, _INT_BINARY), "bool": (_BOOL_UNARY, _BOOL_BINARY)}[want]
    if draw < 0.55:
        return rng.choice(unary).format(branch(want))
    return rng.choice(binary).format(branch(want), branch(want))


def _trees() -> list[Program]:
    """The first trees that torch computes, and as tensors of their own."""
    programs: list[Program] = []
    numbers = itertools.count()
    while len(programs) < NUM_TREES:
        number = next(numbers)
        rng = random.Random(f"tree {number}")
        dtypes = tuple(rng.choice((bf16, f16, f32, f64, i8, i16, i32, i64, u8, b1)) for _ in range(rng.choice((1, 2, 2, 3))))
        leaves = {name: _kind(dtype) for name, dtype in zip("abc", dtypes, strict=False)}
        kinds, uses = sorted(set(leaves.values())), dict.fromkeys(leaves, 0)
        results = [_tree(rng, leaves, uses, rng.choice(kinds), rng.choice(DEPTHS)) for _ in range(rng.choice((1, 1, 1, 2)))]
        value = results[0] if len(results) == 1 else f"({', '.join(results)})"
        program = Program(f"tree{number}", f"lambda {', '.join(leaves)}: {value}", dtypes, "eager", "eager")
        if _is_computed(program):
            programs.append(program)
    return programs


def _is_computed(program: Program) -> bool:
    arguments = [torch.ones(2, dtype=dtype) for dtype in program.dtypes]
    try:
        results = program.function()(*arguments)
    except (RuntimeError, TypeError):
        return False
    results = results if isinstance(results, tuple) else (results,)
    return not any(result is argument for result in results for argument in arguments)


PROGRAMS: tuple[Program, ...] = (*_useful(), *_trees())
