"""Expressions as C++ statements: conversions, roundings, literals, names, and where the cheap formulas of halves are chosen."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator.emulated import run_emulated
from wideload.dtypes import DTYPES
from wideload.expr import Apply, Const, Expr, Load
from wideload.lower import Program, Store, lower_expr
from wideload.nvrtc import compile_cubin
from wideload.ops_table import OPS, Op
from wideload.trace import NumberArg, TensorArg, trace_function

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i16, i32, i64, u8, boolean = torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool


def expression(function: Callable[..., Any], *dtypes: torch.dtype, **numbers: type) -> Expr:
    names = function.__code__.co_varnames
    tensors = tuple(TensorArg(name, dtype, (4,), torch.device("cpu")) for name, dtype in zip(names, dtypes, strict=False))
    return trace_function(function, "f", tensors, {name: NumberArg(name, kind) for name, kind in numbers.items()}).expr


def lower(
    function: Callable[..., Any],
    *dtypes: torch.dtype,
    out: torch.dtype | None = None,
    numerics: Any = "fused",
    fast_math: bool = False,
    **numbers: type,
) -> Program:
    expr = expression(function, *dtypes, **numbers)
    stores = tuple(Store(node, out or expr.nodes[node].dtype) for node in expr.outputs)  # type: ignore[union-attr]
    return lower_expr(expr, stores, numerics=numerics, fast_math=fast_math)


def text(program: Program) -> list[str]:
    """Statements and results as they are emitted."""
    return [f"{s.ctype} {s.name} = {s.text}" for s in program.statements] + [f"{r.name}: {r.type.name} = {r.text}" for r in program.results]


# ---- statements


def test_one_statement_a_node_in_order() -> None:
    program = lower(lambda x, b: F.silu(x + b) * x, bf16, bf16)
    assert text(program) == ["float add = x + b", "float silu = ::half_silu(add)", "float mul = silu * x", "out: bf16 = mul"]
    assert [(p.operand, p.name, p.type.storage) for p in program.parameters] == [(0, "x", "bf16"), (1, "b", "bf16")]
    assert program.statements[0].at is not None
    assert "F.silu(x + b) * x" in program.statements[0].at.text


def test_operands_are_converted_to_the_type_that_the_op_computes_in() -> None:
    assert text(lower(lambda x, y: x + y, i8, f32)) == ["float add = convert<float>(x) + y", "out: f32 = add"]
    assert text(lower(lambda x, y: x < y, i8, i64)) == ["bool lt = convert<long long>(x) < y", "out: bool = lt"]
    assert text(lower(lambda x, y: torch.where(x, y, 2), boolean, bf16)) == ["float where = x ? y : 2.0f", "out: bf16 = where"]
    assert text(lower(lambda x, y: torch.logical_and(x, y), f32, boolean))[0] == "bool logical_and = convert<bool>(x) && y"
    assert text(lower(lambda x: x / 2, i32)) == ["float div_number = convert<float>(x) / 2.0f", "out: f32 = div_number"]
    assert text(lower(lambda x, y: x * y, bf16, f16)) == ["float mul = x * y", "out: f32 = mul"]
    assert text(lower(lambda x, y: x & y, u8, i8))[0] == "short bitwise_and = convert<short>(x) & convert<short>(y)"


def test_a_shape_operand_is_not_computed() -> None:
    program = lower(lambda x: torch.zeros_like(x.exp()) + 1, f32)
    assert text(program) == ["float full_like = 0.0f", "float add = full_like + 1.0f", "out: f32 = add"]
    assert program.parameters == ()


def test_only_what_a_store_needs_is_computed() -> None:
    expr = expression(lambda x, y: (x.exp(), y.sin(), x), f32, f32)
    one = lower_expr(expr, (Store(expr.outputs[0], f32),), numerics="fused")
    assert text(one) == ["float exp = ::exp(x)", "out: f32 = exp"]
    assert [p.name for p in one.parameters] == ["x"]
    assert text(lower_expr(expr, (Store(expr.outputs[2], f32),), numerics="fused")) == ["out: f32 = x"]
    everything = lower_expr(expr, tuple(Store(node, f32) for node in expr.outputs), numerics="fused")
    assert [r.name for r in everything.results] == ["out0", "out1", "out2"]


def test_runtime_numbers_are_parameters_of_one_type_a_kind() -> None:
    program = lower(lambda x, n, s: x * s + n * (1 - s**n), bf16, n=int, s=float)
    assert [(s.name, s.kind, s.ctype) for s in program.scalars] == [("s", float, "double"), ("number", float, "double")]
    assert text(program)[0] == "float mul = x * convert<float>(s)"
    assert text(lower(lambda x, s: x + s, i64, s=int)) == ["long long add = ::wrap_add(x, s)", "out: i64 = add"]
    assert text(lower(lambda x, s: x + s, f64, s=float))[0] == "double add = x + s"
    assert text(lower(lambda x, s: x + s, f64, s=int))[0] == "double add = x + convert<double>(s)"
    assert text(lower(lambda x, s: x + s, u8, s=int))[0] == "unsigned char add = ::wrap_add(x, convert<unsigned char>(s))"


def test_functions_of_a_maths_library_are_counted() -> None:
    assert lower(lambda x, y: x**y + x.sin() * F.gelu(y), f32, f32).num_functions == 3
    assert lower(lambda x, y: x * y + x / y, f32, f32).num_functions == 0
    assert lower(lambda x: x.exp(), f64).num_functions == 3
    assert lower(lambda x: x.exp() + x.log(), bf16).num_functions == 1  # exp has a cheap form for halves
    expr = expression(lambda x: (x.sin(), x + 1), f32)
    assert lower_expr(expr, (Store(expr.outputs[1], f32),), numerics="fused").num_functions == 0


# ---- rounding


def test_fused_rounds_where_the_user_says_and_at_the_store() -> None:
    assert text(lower(lambda x: (x * 2).to(f16) + 1, bf16)) == [
        "float mul = x * 2.0f",
        "float cast = round_f16(mul)",
        "float add = cast + 1.0f",
        "out: f16 = add",
    ]
    assert text(lower(lambda x: x.float().half().double(), bf16)) == [
        "float cast = x",
        "float cast_2 = round_f16(cast)",
        "double cast_3 = convert<double>(cast_2)",
        "out: f64 = cast_3",
    ]
    stored_once, stored_twice = (lower(lambda x: x.to(i8).to(bf16), f32, out=out) for out in (None, f32))
    assert text(stored_once)[1:] == ["float cast_2 = convert<float>(cast)", "out: bf16 = cast_2"]  # the store rounds
    assert text(stored_twice)[1:] == ["float cast_2 = round_bf16(convert<float>(cast))", "out: f32 = round_bf16(cast_2)"]


def test_eager_rounds_every_step_of_a_half() -> None:
    function = lambda x, y: torch.where(x > y, (x + y) * x, y)  # noqa: E731
    assert text(lower(function, bf16, bf16, numerics="eager")) == [
        "bool gt = x > y",
        "float add = round_bf16(x + y)",
        "float mul = round_bf16(add * x)",
        "float where = round_bf16(gt ? mul : y)",
        "out: bf16 = where",
    ]
    assert text(lower(function, f32, f32, numerics="eager"))[1:3] == ["float add = x + y", "float mul = add * x"]
    assert text(lower(lambda x: (x + 1) * 2, i8, numerics="eager"))[0] == "signed char add = ::wrap_add(x, (signed char)1)"
    # An operand of another dtype is brought to the half first, as TensorIterator does.
    assert text(lower(lambda x, y: x.maximum(y), f16, i32, numerics="eager"))[0] == (
        "float maximum = round_f16(::maximum(x, round_f16(convert<float>(y))))"
    )
    assert text(lower(lambda x, y: x.maximum(y), f16, i32))[0] == "float maximum = ::maximum(x, convert<float>(y))"


def test_eager_uses_the_expressions_of_aten() -> None:
    assert lower(lambda x: F.silu(x), bf16, numerics="eager").statements[0].text == "round_bf16(x / (1 + ::exp(-x)))"
    assert lower(lambda x: x / 3, f32, numerics="eager").statements[0].text == "x * (1 / 3.0f)"
    assert lower(lambda x: 3 / x, f16, numerics="eager").statements[0].text == "round_f16(round_f16(1 / x) * 3.0f)"
    assert lower(lambda x: 3 / x, f32, numerics="eager").statements[0].text == "(1 / x) * 3.0f"
    assert lower(lambda x: x / 3, f32).statements[0].text == "x / 3.0f"


def test_an_output_of_another_dtype_receives_the_rounded_result() -> None:
    cases: list[tuple[torch.dtype, torch.dtype, str]] = [
        (bf16, f32, "round_bf16(add)"),
        (bf16, f16, "round_bf16(add)"),
        (f16, f64, "convert<double>(round_f16(add))"),
        (f32, bf16, "add"),
        (f64, f32, "convert<float>(add)"),
        (i32, f16, "convert<float>(add)"),
        (i64, i8, "convert<signed char>(add)"),
        (f32, f32, "add"),
    ]
    for have, out, want in cases:
        (result,) = lower(lambda x: x + x, have, out=out).results
        assert (result.text, result.type.dtype) == (want, out)
    assert text(lower(lambda m: ~m, boolean, out=f32))[-1] == "out: f32 = convert<float>(bitwise_not)"


# ---- the cheap formulas of halves

CHEAP, EXACT = "::half_exp(", "::exp("
TIERS: list[tuple[str, Callable[..., Any], tuple[torch.dtype, ...], bool]] = [
    ("halves alone", lambda x: x.exp(), (bf16,), True),
    ("fp16", lambda x: x.exp() * 2 + x, (f16,), True),
    ("fp32", lambda x: x.exp(), (f32,), False),
    ("fp64", lambda x: x.exp(), (f64,), False),
    ("an integer, computed in fp32", lambda x: x.exp(), (i32,), False),
    ("rounded by hand", lambda x: x.float().exp().to(bf16), (bf16,), True),
    ("fp32 rounded by hand", lambda x: (x.exp() + 1).half(), (f32,), True),
    ("fp32 result of a half", lambda x: x.float().exp(), (bf16,), False),
    ("rounded, then fp32", lambda x: x.exp().to(bf16).to(f16).float(), (bf16,), True),
    ("widened, not rounded", lambda x: x.exp().float(), (bf16,), False),
    ("widened by another operand", lambda x, y: x.exp() + y, (bf16, f32), False),
    ("widened after two steps", lambda x, y: (x.exp() * 2 + x) - y, (bf16, f32), False),
    ("two results, one of them wide", lambda x: (x.exp(), x.exp().float()), (bf16,), False),
    ("two results, both half", lambda x: (x.exp(), x.exp() + 1), (f16,), True),
    ("compared", lambda x: x.exp() > 0.5, (bf16,), False),
    ("compared, and a result too", lambda x: (x.exp(), x.exp() > 0.5), (bf16,), False),
    ("chosen by", lambda x: torch.where(x.exp() > 0.5, x, 0), (bf16,), False),
    ("chosen", lambda x: torch.where(x > 0.5, x.exp(), x), (bf16,), True),
    ("a truth", lambda x: torch.logical_not(x.exp()), (bf16,), False),
    ("an integer made of it", lambda x: x.exp().to(i8), (bf16,), False),
    ("an integer made of it, and a half of that", lambda x: x.exp().to(i8).to(bf16), (bf16,), False),
    ("fp64 made of it, and a half of that", lambda x: x.exp().double().to(bf16), (bf16,), True),
    ("rounded to a whole number", lambda x: x.exp().floor(), (bf16,), False),
    ("and after arithmetic", lambda x: (x.exp() * 2 + 1).frac() * x, (f16,), False),
    ("its sign", lambda x: (x.exp() - 1).sign(), (bf16,), False),
    ("its mantissa", lambda x: torch.frexp(x.exp())[0], (f16,), False),
    ("whether it is finite", lambda x: x.exp().nan_to_num(), (f16,), False),
    ("the remainder", lambda x, y: torch.remainder(x.exp(), y), (bf16, bf16), False),
    ("not needed by any result", lambda x: torch.zeros_like(x.exp()).float() + x.exp().to(f16), (bf16,), True),
]  # fmt: skip


@pytest.mark.parametrize(("function", "dtypes", "is_cheap"), [case[1:] for case in TIERS], ids=[case[0] for case in TIERS])
def test_the_cheap_formula_is_used_where_only_halves_flow(
    function: Callable[..., Any], dtypes: tuple[torch.dtype, ...], is_cheap: bool
) -> None:
    def joined(**options: Any) -> str:
        return "\n".join(text(lower(function, *dtypes, **options)))

    fused, eager, fast = joined(), joined(numerics="eager"), joined(fast_math=True)
    assert (CHEAP in fused, EXACT in fused or "half_exp" in fused) == (is_cheap, True)
    assert CHEAP not in eager
    assert (CHEAP in fast) == (f64 not in dtypes)


QUOTIENT = "::div_full(x, y)"


@pytest.mark.parametrize(
    ("function", "is_cheap"),
    [
        (lambda x: (y := F.silu(x.float()), (y.to(torch.float8_e4m3fn), wl.amax(y)))[1], True),
        (lambda x: (y := F.silu(x.float()), (y.to(torch.bfloat16), wl.any_nonfinite(y)))[1], True),
        (lambda x: wl.amax(F.silu(x.float())), False),  # alone
        (lambda x: (y := F.silu(x.float()), (y, wl.amax(y)))[1], False),  # beside fp32
        (lambda x: (x * 2, wl.amax(F.silu(x.float()))), False),  # of what no other result is made of
        (lambda x: (y := F.silu(x.float()), (y.to(torch.bfloat16), wl.amax(y + 1)))[1], False),
        (lambda x: wl.amax(F.silu(x)), True),  # of a half
    ],
)
def test_a_value_of_all_elements_is_that_of_what_the_others_are_made_of(function: Callable[..., Any], is_cheap: bool) -> None:
    source = wl.fuse(function, name="f").plan(torch.ones(64, dtype=torch.bfloat16), target="sm_90").kernels[0].source
    kinds = {line.strip() for line in source.splitlines() if "silu = ::" in line}
    assert kinds == {f"const float silu = ::{'half_' * is_cheap}silu({'cast' if 'cast' in ''.join(kinds) else 'x'});"}


@pytest.mark.parametrize(
    "function",
    [lambda x, y: x / y, lambda x, y: x - x / y, lambda x, y: ((x / y).sqrt() * (x / y), x / y), lambda x, y: (x / y + 1).floor()],
    ids=["stored", "read by arithmetic", "read and stored", "rounded to a whole number"],
)
def test_quotients_are_correctly_rounded_but_in_fast_math(function: Callable[..., Any]) -> None:
    """So that x / x is 1, whatever is done with it then."""

    def joined(**options: Any) -> str:
        return "\n".join(text(lower(function, bf16, bf16, **options)))

    for found in (joined(), joined(numerics="eager")):
        assert "x / y" in found
        assert "div_full" not in found
    assert QUOTIENT in joined(fast_math=True)


def test_roots_and_reciprocals_are_cheap_in_fast_math() -> None:
    for fast_math, texts in (
        (False, ["::sqrt(x)", "1 / x", "2.0f / x"]),
        (True, ["::sqrt_approx(x)", "::div_full(1.0f, x)", "::div_full(2.0f, x)"]),
    ):
        program = lower(lambda x: (x.sqrt(), x.reciprocal(), 2 / x), bf16, fast_math=fast_math)
        assert [statement.text for statement in program.statements] == texts


def test_fast_math_leaves_the_quotients_that_are_rounded_to_a_narrow_type() -> None:
    quantized = lambda x, s: (x / s).round().clamp(-128, 127).to(torch.int8)  # noqa: E731
    assert lower(quantized, f32, f32, fast_math=True).statements[0].text == "x / s"


def test_out_decides_too() -> None:
    """A half stored as fp32 was rounded to the half first; an fp32 result stored as a half is rounded to it."""
    assert CHEAP in lower(lambda x: x.exp(), bf16, out=f32).statements[0].text
    assert CHEAP in lower(lambda x: x.exp(), f32, out=f16).statements[0].text
    assert CHEAP not in lower(lambda x: x.exp(), f64, out=f16).statements[0].text
    assert CHEAP not in lower(lambda x: x.exp(), f32, out=f64).statements[0].text
    expr = expression(lambda x: (x.exp(), x.exp() + 1), f32)
    mixed = lower_expr(expr, (Store(expr.outputs[0], bf16), Store(expr.outputs[1], f32)), numerics="fused")
    assert CHEAP not in mixed.statements[0].text


# ---- literals

LITERALS: list[tuple[torch.dtype, float | bool, str]] = [
    (f32, 0.1, "0.1f"),
    (f32, 2, "2.0f"),
    (f32, -2.5, "(-2.5f)"),
    (f32, -0.0, "(-0.0f)"),
    (f32, 1e-45, "1e-45f"),
    (f32, 1e-46, "0.0f"),
    (f32, 16777217, "1.6777216e+07f"),
    (f32, 3.4028235677973366e38, "__int_as_float(0x7f800000)"),
    (f32, math.inf, "__int_as_float(0x7f800000)"),
    (f32, -math.inf, "__int_as_float((int)0xff800000)"),
    (f32, math.nan, "__int_as_float(0x7fc00000)"),
    (bf16, 0.1, "0.1f"),
    (f16, 65520.0, "65520.0f"),
    (f64, 0.1, "0.1"),
    (f64, 3, "3.0"),
    (f64, 1e22, "1e+22"),
    (f64, 5e-324, "5e-324"),
    (f64, -math.inf, "__longlong_as_double((long long)0xfff0000000000000ull)"),
    (f64, math.nan, "__longlong_as_double(0x7ff8000000000000ll)"),
    (i8, -128, "(signed char)-128"),
    (i8, 300, "(signed char)44"),
    (i16, 65535, "(short)-1"),
    (u8, -1, "(unsigned char)255"),
    (u8, 256, "(unsigned char)0"),
    (i32, 2**31 - 1, "2147483647"),
    (i32, -(2**31), "(-2147483647 - 1)"),
    (i32, 2**31, "(-2147483647 - 1)"),
    (i64, 2**63 - 1, "9223372036854775807ll"),
    (i64, -(2**63), "(-9223372036854775807ll - 1)"),
    (i64, -1, "-1ll"),
    (i64, True, "1ll"),
    (boolean, True, "true"),
    (boolean, False, "false"),
]


@pytest.mark.parametrize(("dtype", "value", "want"), LITERALS, ids=str)
def test_literals(dtype: torch.dtype, value: float, want: str) -> None:
    added = {"float": "x + {}", "bool": "x || {}"}.get(DTYPES[dtype].kind, "::wrap_add(x, {})")
    assert lower(lambda x: x + value, dtype).statements[0].text == added.format(want)


def test_an_int_is_rounded_once() -> None:
    """2^62 + 2^38 + 1 lies just above the middle of two floats; as a double it is the middle, and would round down."""
    n = 2**62 + 2**38 + 1
    want = (torch.zeros(1) + n).item()
    assert want == 2.0**62 + 2.0**39
    (literal,) = re.findall(r"x \+ (\S+)f", lower(lambda x: x + n, f32).statements[0].text)
    assert torch.tensor(float(literal), dtype=f32).item() == want


def test_literals_have_torchs_values_when_the_kernel_runs() -> None:
    floats = (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-45, -1e-45, 1e-46, 5e-324, 0.1, -3.3, 65504.0, 65520.0, 6e-8, 2e-8, 3.4e38, 1e39)
    ints = (0, 1, -1, 127, -128, 300, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63))

    def constants(k: Any, *ones: Any) -> Any:
        """Element k of each result is the product with, or the sum with, number k."""
        results = []
        for x in ones:
            values = floats if x.is_floating_point() else ints
            result = x
            for index, value in enumerate(values):
                result = torch.where(k == index, x * value if x.is_floating_point() else x + value, result)
            results.append(result)
        return results

    k = torch.arange(max(len(floats), len(ints)), dtype=i32)
    ones = [torch.ones(len(k), dtype=dtype) for dtype in (f32, f16, bf16, f64, i8, u8, i64)]
    for got, want in zip(run_emulated(wl.fuse(constants), k, *ones), constants(k, *ones), strict=True):
        assert got.dtype == want.dtype
        bits = {1: i8, 2: i16, 4: i32, 8: i64}[want.element_size()]
        assert ((got.view(bits) == want.view(bits)) | (got.isnan() & want.isnan())).all(), (got, want)


# ---- names

ODD_NAMES = """
    int class_ exp sigmoid n i k first is_full out0 out0_data at0 rest1 size0 shift1 multiplier0 x_v x_data x_value add_2 add signed
    bool half widen convert vec load_vector load_some load_elements store_vector store_some store_elements round_bf16 round_f16 narrow_to
    divide_u31 divide_u63 f16 bf16 boolean DEVICE FUNCTION NULL thread_local char16_t template this threadIdx blockIdx warpSize register
    float4 min max f_element f_dense f_strided __global__ wrap_add xor delete
""".split()


@pytest.mark.parametrize("kind", ["tensors", "uniform tensors", "numbers"])
def test_names_of_the_user_never_meet_those_of_the_language_or_the_kernel(kind: str) -> None:
    names = [*ODD_NAMES, "é", "λ", "名", "_", "_é"]
    total = " + ".join(names)
    scope: dict[str, Any] = {}
    exec(f"def f(x, {', '.join(names)}):\n    s = x.bfloat16() + {total}\n    return (s.half() + x.bool()).sigmoid(), s", scope)
    f = wl.fuse(scope["f"])
    value: Any = {"tensors": None, "uniform tensors": torch.ones(()), "numbers": 0.5}[kind]
    for x in (torch.ones(9), torch.ones(4, 6).t()[:, ::2]):
        plan = f.plan(x, *(copy.copy(x if value is None else value) for _ in names), target="sm_90").kernels[0]
        compile_cubin(plan.source, arch="sm_90", name=plan.name)
        program = plan.plan.program
        taken = [p.name for p in (*program.parameters, *program.scalars)]
        assert len(set(taken)) == len(names) + 1


@pytest.mark.parametrize(
    ("name", "want"),
    [("3x", "fused_3x"), ("", "lambda"), ("a b-c", "a_b_c"), ("é", "fused"), ("int", "int"), ("<lambda>", "lambda"), ("_x_", "x")],
)
def test_a_kernel_is_called_like_its_function(name: str, want: str) -> None:
    kernel = wl.fuse(lambda x: x + 1, name=name).plan(torch.ones(4), target="sm_90").kernels[0]
    assert kernel.name == f"{want}_dense"
    compile_cubin(kernel.source, arch="sm_90", name=kernel.name)


def test_names_are_the_users_where_they_can_be() -> None:
    program = lower(lambda gate, up_2, up: gate * up + up_2, f32, f32, f32)
    assert [p.name for p in program.parameters] == ["gate", "up_2", "up"]
    assert [s.name for s in program.statements] == ["mul", "add"]
    assert [s.name for s in lower(lambda add: (add + 1) + 2, f32).statements] == ["add_2", "add_3"]
    assert lower(lambda out0, out1: (out0, out1), f32, f32).results[1].name == "out1_2"


# ---- what kernels cannot do


def test_dtypes_that_kernels_do_not_hold_are_refused_by_name() -> None:
    with pytest.raises(wl.DtypeError, match=r"argument x is torch\.bits8, .*allowed: f64"):
        lower(lambda x: x, torch.bits8)
    with pytest.raises(wl.DtypeError, match=r"a result is torch\.bits8"):
        lower(lambda x: x.to(torch.bits8), f32)
    with pytest.raises(wl.DtypeError, match=r"out= is torch\.bits8"):
        lower(lambda x: x + 1, f32, out=torch.bits8)


def test_complex_numbers_are_real_ones_with_a_part_more() -> None:
    assert text(lower(lambda x, y, s: (x * y + 2j) / s, f32, torch.complex64, s=complex)) == [
        "complex<float> mul = convert<complex<float>>(x) * y",
        "complex<float> add = mul + complex<float>(0.0f, 2.0f)",
        "complex<float> div_number = ::complex_divide(add, convert<complex<float>>(s))",
        "out: c64 = div_number",
    ]
    assert text(lower(lambda z: (z.abs(), z.bool(), z.int()), torch.complex64))[:3] == [
        "float abs = ::hypot(z.re, z.im)",
        "bool cast = (z != complex<float>(0, 0))",
        "int cast_2 = convert<int>(z.re)",
    ]
    assert lower(lambda z, s: z + s, torch.complex64, s=complex).scalars[0].ctype == "complex<double>"
    assert lower(lambda z, s: z + s, torch.complex64, s=float).scalars[0].checks[0].high == torch.finfo(f32).max


def test_fp8_is_rounded_by_its_store_or_where_it_is_used() -> None:
    e5m2 = torch.float8_e5m2
    assert text(lower(lambda x: x.to(e5m2), f32)) == ["float cast = x", "out: e5m2 = cast"]
    assert text(lower(lambda x: x.to(e5m2).float() * 2, f32))[:2] == ["float cast = round_e5m2(x)", "float cast_2 = cast"]
    assert (
        text(lower(lambda mask, x: torch.where(mask, x, 0.3).float(), boolean, e5m2))[0]
        == "float where = round_e5m2(mask ? x : round_e5m2(0.3f))"
    )


@pytest.mark.parametrize(
    ("function", "steady"),
    [
        (lambda x, s: (x / s).to(i8), True),
        (lambda x, s: (x / s).round().clamp(-128, 127).to(torch.int8), True),
        (lambda x, s: (x.float() / (s + 1)).clamp(-448, 448).to(torch.float8_e4m3fn), True),
        (lambda x, s: (x / s).to(f16), True),
        (lambda x, s: x / s, False),
        (lambda x, s: (x / s).to(bf16), False),  # has what is below 2^-40
        (lambda x, s: (x / s).to(torch.bool), False),  # and so has this
        (lambda x, s: (x / s).clamp(-1, 1).to(torch.bool), False),
        (lambda x, s: ((x / s) * 2).to(i8), False),
        (lambda x, s: ((x / s).clamp(0, 1).to(i8), x / s), False),
        (lambda x, s: (x.double() / s).to(i8), False),
    ],
)
def test_a_cheaper_division_serves_what_is_narrowed_next(function: Any, steady: bool) -> None:
    statements = lower(function, f32, f32).statements
    (found,) = [statement for statement in statements if " / " in statement.text]
    assert (found.steady, found.steady_in) == ((f"::divide_steady({found.text.replace(' /', ',')})", {"s"}) if steady else ("", set()))


def test_the_cheaper_division_is_taken_where_the_divisor_stays_the_same() -> None:
    quantize = wl.fuse(lambda x, s: (x.float() / s).round().clamp(-128, 127).to(torch.int8), name="quantize")
    x = torch.empty(64, 256, dtype=bf16, device="meta")
    for shape, is_steady in (((), True), ((64, 1), True), ((256,), False), ((64, 256), False)):
        (kernel,) = quantize.plan(x, torch.empty(shape, device="meta"), target="h200").kernels
        assert ("divide_steady(cast, s)" in kernel.source) is is_steady


def test_an_op_without_an_expression_of_the_kind_is_refused() -> None:
    whole = Op("whole", ("input",), torch.neg, {"signed": "-{input}"}, ("result",), (0, 0))
    load = Load(0, "x", f32, 1)
    expr = Expr("f", (load,), (load, Apply(whole, (0,), f32, 1)), (1,))
    with pytest.raises(wl.DtypeError, match="whole is not defined for float operands; defined for: signed"):
        lower_expr(expr, (Store(1, f32),), numerics="fused")


def test_every_dtype_lowers_a_copy() -> None:
    for dtype, row in DTYPES.items():
        program = lower(lambda x: x.clone(), dtype)
        assert (program.statements[0].ctype, program.statements[0].text) == (row.compute, "x")


def accepted(op: Op) -> Iterator[tuple[list[torch.dtype], torch.dtype]]:
    """(dtypes of its tensor operands, dtype of the result) that torch accepts; the operands after the tensors are the number 1."""
    is_of_floats = op.name in ("nextafter_bf16", "nextafter_f16", "prelu")  # whose spellings look at the dtypes
    for dtype in (f32, f64, bf16, *(() if is_of_floats else (i32, i8, u8, boolean, torch.complex64))):
        tensors = [torch.ones(2).to(boolean if mark == "bool" else dtype) for mark in op.types]
        for num_tensors in range(1, len(tensors) + 1):
            try:
                result = op.torch(*tensors[:num_tensors], *[1] * (len(tensors) - num_tensors))
            except (RuntimeError, TypeError, NotImplementedError):
                continue
            if dtype.is_complex <= ("complex" in op.cuda):
                yield [tensor.dtype for tensor in tensors[:num_tensors]], result.dtype


@pytest.mark.parametrize("numerics", ["fused", "eager"])
def test_every_op_lowers_where_torch_has_it(numerics: Any) -> None:
    for name, op in OPS.items():
        lowered = 0
        for dtypes, result in accepted(op):
            loads = [Load(i, f"x{i}", dtype, 1) for i, dtype in enumerate(dtypes)]
            nodes: list[Any] = [*loads, *[Const(1)] * (len(op.operands) - len(loads))]
            expr = Expr("f", tuple(loads), (*nodes, Apply(op, tuple(range(len(nodes))), result, 1)), (len(nodes),))
            program = lower_expr(expr, (Store(len(nodes), result),), numerics=numerics)
            assert not re.search("[{}]", program.statements[-1].text), name
            lowered += 1
        assert lowered, name


def test_limits_are_those_of_all_that_a_number_enters() -> None:
    """Within them torch has nothing to say, and an int fits in 64 bits."""

    def limits(function: Callable[..., Any], dtype: torch.dtype, kind: type) -> tuple[float, float]:
        (scalar,) = lower(function, dtype, s=kind).scalars
        return scalar.limits

    assert limits(lambda x, s: x * s, i64, int) == limits(lambda x, s: x * s, f32, int) == (-(2**63), 2**63 - 1)
    assert limits(lambda x, s: (x * s).clamp(max=s), i8, int) == (-128, 127)
    assert limits(lambda x, s: x * s, f16, int) == limits(lambda x, s: x * s, f16, float) == (-65504.0, 65504.0)
    assert limits(lambda x, s: x.float() * s + x * s, f16, float) == (-65504.0, 65504.0)
    assert limits(lambda x, s: x * s, f64, float) == limits(lambda x, s: x * s, torch.complex64, complex) == (-math.inf, math.inf)
