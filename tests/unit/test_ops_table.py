"""The table against torch itself: kinds, signatures, aliases, what every spelling computes, and that NVRTC takes every expression."""

from __future__ import annotations

import inspect
import math
import re
import string
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from wideload.dtypes import DTYPES
from wideload.emit.prelude import select_prelude
from wideload.errors import TraceError
from wideload.nvrtc import compile_cubin
from wideload.ops_table import OPS, SPELLINGS, Call, Op

ROWS = list(OPS.values())


def ids(values: list[Any]) -> list[str]:
    return [getattr(v, "name", None) or torch.overrides.resolve_name(v) or v.__name__ for v in values]


# ---- rows


@pytest.mark.parametrize("op", ROWS, ids=ids(ROWS))
def test_a_row_is_well_formed(op: Op) -> None:
    assert OPS[op.name] is op
    assert len(op.types) == len(op.operands) == len(set(op.operands))
    assert op.cuda
    assert min(op.ulp) >= 0
    if op.half is not None or op.eager is not None:
        assert "float" in op.cuda
    visible = {name for name, mark in zip(op.operands, op.types, strict=True) if mark != "shape"}
    expressions = [*op.cuda.values(), *(op.eager or {}).values(), *([op.half] if op.half else [])]
    for expression in expressions:
        names = {field for _, field, _, _ in string.Formatter().parse(expression) if field is not None}
        assert names - {"round"} <= visible, expression
        assert "round" not in names or expression in (op.eager or {}).values()
        assert not re.search(r"(?<![:\w])[A-Za-z_]\w*\(", expression), f"a call without ::, which a local name may hide: {expression}"
    used = {field for expression in op.cuda.values() for _, field, _, _ in string.Formatter().parse(expression) if field}
    assert used == visible or not used, "an operand that no expression uses"


# Operands that torch takes as numbers only; alpha and threshold mean other things in these rows.
NUMBER_OPERANDS: dict[str, float] = {
    "alpha": 1,
    "beta": 1,
    "decimals": 1,
    "fill_value": 1,
    "lambd": 0.5,
    "max_val": 6,
    "min_val": 0,
    "nan": 0,
}
NUMBER_OPERANDS |= {"delta": 1, "eps": 0.1}
NUMBER_OPERANDS |= {"neginf": 1, "negative_slope": 0.5, "posinf": 1, "threshold": 1, "value": 1}
OF_THE_ROW: dict[str, dict[str, float]] = {
    "elu": {"alpha": 1.0},
    "celu": {"alpha": 1.0},
    "polygamma": {"order": 2},
    "smooth_l1": {"beta": 1.0},
}


def one_of_each(op: Op, dtype: torch.dtype) -> list[Any]:
    """A tensor of one element for each operand; a number where torch takes nothing else."""
    x, truth = torch.ones(1, dtype=dtype), torch.ones(1, dtype=torch.bool)
    numbers = NUMBER_OPERANDS | OF_THE_ROW.get(op.name, {})
    return [truth if mark == "bool" else numbers.get(name, x) for name, mark in zip(op.operands, op.types, strict=True)]


def kind_of(op: Op, dtype: torch.dtype, result: torch.dtype) -> str:
    marks = set(op.types)
    if "result" in marks or marks <= {"shape"}:
        return DTYPES[result].kind
    return DTYPES[dtype].kind if marks & {"common", "own"} else "bool"


@pytest.mark.parametrize("op", ROWS, ids=ids(ROWS))
def test_a_row_has_the_kinds_that_torch_computes(op: Op) -> None:
    if op.name in ("nextafter_bf16", "nextafter_f16", "prelu"):  # whose spellings look at the dtypes
        assert set(op.cuda) == {"float"}
        return
    computed = set()
    for dtype in DTYPES:
        try:
            result = op.torch(*one_of_each(op, dtype)).dtype
        except (RuntimeError, TypeError):
            continue
        computed.add(kind_of(op, dtype, result))
    if op.name.startswith("full_like_"):
        assert computed <= set(op.cuda)
    else:
        assert computed == set(op.cuda)


# ---- spellings


OF_SHAPES = (
    F.prelu,
    torch.Tensor.prelu,
    torch.polygamma,
    torch.special.polygamma,
    torch.max,
    torch.min,
    torch.Tensor.max,
    torch.Tensor.min,
)
"""Spellings with tests of their own: a weight a channel, an order before the tensor, tensors alone; so have losses."""
FUNCTIONS = [f for f in SPELLINGS if f not in OF_SHAPES and "reduction" not in inspect.signature(SPELLINGS[f]).parameters]
X = {
    torch.float32: torch.tensor([-7.5, -1.0, -0.0, 0.3, 1.0, 2.5, math.inf, math.nan]),
    torch.int32: torch.tensor([-9, -1, 0, 1, 2, 7, 100, 2**30], dtype=torch.int32),
    torch.uint8: torch.tensor([0, 1, 2, 3, 7, 100, 200, 255], dtype=torch.uint8),
    torch.bool: torch.tensor([True, False] * 4),
}
MASK = torch.tensor([True, False, False, True] * 2)
ARGUMENTS: dict[str, Any] = {
    "alpha": 2,
    "approximate": "tanh",
    "atol": 0.2,
    "beta": 2,
    "condition": MASK,
    "decimals": 1,
    "delta": 1.5,
    "device": None,
    "dim": -1,
    "dtype": torch.float64,
    "eps": 0.1,
    "equal_nan": True,
    "fill_value": 3,
    "full": True,
    "inplace": False,
    "lambd": 0.3,
    "log_input": True,
    "log_target": True,
    "margin": 1.5,
    "mask": MASK,
    "max": 2,
    "max_val": 2.0,
    "memory_format": torch.preserve_format,
    "min": -1,
    "min_val": -1.0,
    "nan": 0.5,
    "neginf": -1.0,
    "n": 2,
    "negative_slope": 0.2,
    "p": 1,
    "posinf": 1.0,
    "reduce": None,
    "reduction": "none",
    "rounding_mode": "floor",
    "rtol": 0.1,
    "size_average": None,
    "threshold": 1,
    "training": False,
    "value": 2,
    "weight": 0.25,
}


def evaluate(tree: Any) -> Any:
    """What the rows of a spelling compute, with torch."""
    if isinstance(tree, Call):
        return tree.op.torch(*map(evaluate, tree.operands))
    return tuple(map(evaluate, tree)) if isinstance(tree, tuple) else tree


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return evaluate(function(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, ZeroDivisionError, IndexError, AttributeError):
        return None


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if ours.dtype.is_complex:
        return ours.dtype == theirs.dtype and same(*(torch.view_as_real(z.resolve_conj()) for z in (ours, theirs)))
    if ours.dtype != theirs.dtype or not ours.dtype.is_floating_point:
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    equal = (ours == theirs) & (ours.signbit() == theirs.signbit())
    return bool((equal | (ours.isnan() & theirs.isnan())).all())


@pytest.mark.parametrize("dtype", X, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS, ids=ids(FUNCTIONS))
def test_a_spelling_computes_what_torch_does(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """With its required arguments alone, with all that may stand by position, and with all by torch's own keywords."""
    if function is torch.special.round and not dtype.is_floating_point:
        pytest.skip("it has no integer kernels, though torch.round has")
    if dtype == torch.bool and function.__name__ in ("abs", "absolute", "softsign", "mvlgamma", "special_multigammaln"):
        pytest.skip("of bools torch has them on CUDA alone")
    spelling, x = SPELLINGS[function], X[dtype]
    parameters = list(inspect.signature(spelling).parameters.values())
    y = x.flip(0).clone()
    y[y == 0] = 1  # integer division
    accepted = set()
    for other in (2, 2.5) if function.__name__.startswith("__r") else (y, y if dtype == torch.bool else y.abs(), 2, 2.5):
        values = {p.name: x if p.name in ("input", "tensor1") else ARGUMENTS.get(p.name, other) for p in parameters[1:]}
        if dtype == torch.bool and "alpha" in values:
            values["alpha"] = True
        if getattr(F, function.__name__, None) is not function:
            values.pop("inplace", None)
        if function.__name__ == "contiguous":
            values["memory_format"] = torch.contiguous_format
        first = MASK if parameters[0].name == "condition" else x
        required = [values[p.name] for p in parameters[1:] if p.default is inspect.Parameter.empty]
        positional = [values[p.name] for p in parameters[1:] if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in values]
        calls: list[tuple[list[Any], dict[str, Any]]] = [([first, *required], {}), ([first, *positional], {})]
        if not function.__name__.startswith("__") and (function is not torch.where or isinstance(other, torch.Tensor)):
            calls.append(([first], values))
        for args, kwargs in calls:
            theirs = outcome(function, *args, **kwargs)
            if theirs is NotImplemented:
                continue
            ours = outcome(spelling, *args, **kwargs)
            if theirs is None:
                assert ours is None, f"torch refuses {args} {kwargs}"
            else:
                accepted.add("by keyword" if kwargs or not values else "by position")
                assert ours is not None, f"torch takes {args} {kwargs}"
                assert same(ours, theirs), f"{args} {kwargs}: {ours}, expected {theirs}"
    whole_only = {"gcd", "lcm", "bitwise", "and", "or", "xor", "invert", "lshift", "rshift"} & set(
        function.__name__.strip("_").removeprefix("r").split("_")
    )
    if dtype == (torch.int32 if whole_only else torch.float32) and function is not torch.imag:
        assert "by keyword" in accepted or function.__name__.startswith("__")


@pytest.mark.parametrize(
    "name", ["real", "imag", "conj", "conj_physical", "resolve_conj", "resolve_neg", "angle", "abs", "sgn", "nan_to_num"]
)
def test_a_spelling_of_complex_numbers_computes_what_torch_does(name: str) -> None:
    z = torch.tensor([-7.5 + 1j, -1.0, -0.0, 0.3j, 1 - 2j, complex(math.inf, 1), complex(math.nan, 2)])
    for x in (z, z.to(torch.complex128)):
        assert same(evaluate(SPELLINGS[getattr(torch, name)](x)), getattr(torch, name)(x))
    if name != "imag":
        assert same(evaluate(SPELLINGS[getattr(torch, name)](X[torch.float32])), getattr(torch, name)(X[torch.float32]))


ACTIVATIONS = """
    celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu logsigmoid mish relu relu6 selu sigmoid silu softplus
    softshrink softsign tanh tanhshrink threshold
"""
ELEMENTWISE = """
    addcdiv addcmul ceil copysign cos cosh deg2rad erf exp float_power floor floor_divide fmax fmin fmod frac frexp heaviside hypot
    isclose isfinite isinf isnan isneginf isposinf ldexp lerp log log10 log2 logaddexp logical_and logical_not logical_or logical_xor
    masked_fill maximum minimum nan_to_num positive pow rad2deg reciprocal relu remainder round rsqrt sgn sigmoid sign signbit sin
    sinh sqrt square tan tanh true_divide where xlogy
"""


def test_every_name_of_a_function_is_spelled() -> None:
    """Torch's own aliases, from its documentation."""
    aliases = {
        "abs": "absolute",
        "acos": "arccos",
        "acosh": "arccosh",
        "asin": "arcsin",
        "asinh": "arcsinh",
        "atan": "arctan",
        "atan2": "arctan2",
        "atanh": "arctanh",
        "clamp": "clip",
        "div": "divide",
        "ge": "greater_equal",
        "gt": "greater",
        "le": "less_equal",
        "lt": "less",
        "mul": "multiply",
        "ne": "not_equal",
        "neg": "negative",
        "sub": "subtract",
        "trunc": "fix",
    }
    for name, alias in aliases.items():
        for owner in (torch, torch.Tensor):
            assert SPELLINGS[getattr(owner, name)] is SPELLINGS[getattr(owner, alias)]
    assert SPELLINGS[torch.special.expit] is SPELLINGS[torch.sigmoid] is SPELLINGS[F.sigmoid] is SPELLINGS[torch.Tensor.sigmoid]
    for name in ("erf", "erfc", "exp2", "expm1", "log1p", "xlogy", "xlog1py"):
        assert getattr(torch.special, name) in SPELLINGS
    for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split():
        assert getattr(torch.Tensor, f"__{name}__") in SPELLINGS
        assert getattr(torch.Tensor, f"__r{name}__") in SPELLINGS
    for name in "neg pos abs invert eq ne lt le gt ge".split():
        assert getattr(torch.Tensor, f"__{name}__") in SPELLINGS
    for name in ACTIVATIONS.split():
        assert getattr(F, name) in SPELLINGS
    for name in ELEMENTWISE.split():
        assert getattr(torch, name) in SPELLINGS
        assert getattr(torch.Tensor, name) in SPELLINGS
    for name in ("zeros_like", "ones_like", "full_like"):
        assert getattr(torch, name) in SPELLINGS


def test_a_number_picks_the_row_that_torch_would() -> None:
    x, scalar = torch.ones(2), object()  # a runtime scalar is no Python number either
    for other, suffix in ((x, ""), (2, "_number"), (2.5, "_number"), (np.float32(2.5), "_number"), (scalar, "_number")):
        assert SPELLINGS[torch.pow](x, other).op.name == f"pow{suffix}"
        assert SPELLINGS[torch.Tensor.__truediv__](x, other).op.name == f"div{suffix}"
        assert SPELLINGS[torch.div](x, other, rounding_mode="trunc").op.name == f"div_trunc{suffix}"
        assert SPELLINGS[torch.Tensor.__floordiv__](x, other).op.name == f"div_floor{suffix}"
    assert SPELLINGS[torch.Tensor.__rpow__](x, 2).op.name == "rpow"
    assert SPELLINGS[torch.add](x, x, alpha=1).op.name == "add"
    assert SPELLINGS[torch.add](x, x, alpha=scalar).op.name == "add_alpha"
    assert SPELLINGS[torch.round](x, decimals=0).op.name == "round"
    assert SPELLINGS[torch.round](x, decimals=scalar).op.name == "round_decimals"


def test_an_infinite_half_becomes_the_largest_half() -> None:
    for dtype, largest in ((torch.float16, 65504.0), (torch.bfloat16, (2 - 2**-7) * 2.0**127)):
        x = torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype)
        spelled = SPELLINGS[torch.nan_to_num](x)
        assert spelled.operands[1:] == (0, largest, -largest)
        assert torch.equal(evaluate(spelled), torch.nan_to_num(x))


@pytest.mark.parametrize(
    ("message", "call_it"),
    [
        ("inplace", lambda x: SPELLINGS[F.relu](x, inplace=True)),
        ("inplace", lambda x: SPELLINGS[F.relu6](x, True)),
        ("rounding_mode is 'up'; allowed: None, 'trunc', 'floor'", lambda x: SPELLINGS[torch.div](x, x, rounding_mode="up")),
        ("approximate is 'erf'; allowed: 'none', 'tanh'", lambda x: SPELLINGS[F.gelu](x, approximate="erf")),
        ("at least one of min and max", lambda x: SPELLINGS[torch.clamp](x)),
        ("two tensors of one dtype", lambda x: SPELLINGS[torch.isclose](x, x.double())),
        ("bits8", lambda x: SPELLINGS[torch.zeros_like](x, dtype=torch.bits8)),
        ("exponents", lambda x: SPELLINGS[torch.ldexp](x, 2)),
    ],
)
def test_what_a_spelling_refuses(message: str, call_it: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(TypeError, match=re.escape(message)) as raised:
        call_it(torch.ones(2))
    assert isinstance(raised.value, TraceError) == (message == "inplace")


def test_references_are_exact_in_the_tails() -> None:
    """By the exponentials that the tails are, to the last place of fp32."""
    x = torch.tensor([-90.0])
    exact = -90 * math.exp(-90)
    for name in ("silu", "mish"):
        assert OPS[name].reference(x).item() == torch.tensor(exact).item()  # type: ignore[misc]
    assert OPS["sigmoid"].reference(x).item() == torch.tensor(math.exp(-90)).item()  # type: ignore[misc]
    y = torch.tensor([-10.0])
    assert OPS["gelu"].reference(y).item() == torch.tensor(-5 * math.erfc(10 / math.sqrt(2))).item()  # type: ignore[misc]
    v = math.sqrt(8 / math.pi) * (10 + 0.044715 * 1000)
    assert OPS["gelu_tanh"].reference(y).item() == torch.tensor(-10 / (1 + math.exp(v))).item()  # type: ignore[misc]
    assert torch.equal(OPS["sigmoid"].reference(torch.tensor([0, 1])), torch.sigmoid(torch.tensor([0, 1])))  # type: ignore[misc]
    assert OPS["rdiv"].reference(torch.tensor([3.0], dtype=torch.float64), 0.1).item() == 0.1 / 3  # type: ignore[misc]
    assert OPS["rdiv"].reference(torch.tensor([3.0]), 2.0).item() == torch.tensor(2 / 3).item()  # type: ignore[misc]


# ---- CUDA


def every_expression() -> str:
    """One kernel that computes every expression of every row, on every compute type of its kind."""
    types: dict[str, list[str]] = {}
    for row in DTYPES.values():
        types.setdefault(row.kind, [])
        types[row.kind] += [row.compute] if row.compute not in types[row.kind] else []
    lines = []
    for op in ROWS:
        expressions = [(kind, text) for kind, text in op.cuda.items()] + [(kind, text) for kind, text in (op.eager or {}).items()]
        todo = [(ctype, text) for kind, text in expressions for ctype in types[kind]] + ([("float", op.half)] if op.half else [])
        for ctype, text in todo:
            operands, declared = {"round": ""}, ""
            for name, mark in zip(op.operands, op.types, strict=True):
                operands[name] = f"{op.name}_{name}"
                own = "bool" if mark == "bool" else ctype
                declared += f"const {own} {operands[name]} = ({own})p[{len(operands)}]; "
            lines.append(f"    {{ {declared}const auto r = {text.format(**operands)}; keep(p + {len(lines) + 8}, r); }}")
    body = "\n".join(lines)
    keep = """template <class T> DEVICE void keep(double* p, T x) { *p = (double)x; }
template <class T> DEVICE void keep(double* p, complex<T> z) { *p = (double)z.re + (double)z.im; }"""
    return f'{select_prelude(keep + body)}\n\n{keep}\n\nextern "C" __global__ void every_expression(double* p)\n{{\n{body}\n}}\n'


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100"])
def test_nvrtc_takes_every_expression(arch: str) -> None:
    assert compile_cubin(every_expression(), arch=arch, name="every_expression", lineinfo=False).code
