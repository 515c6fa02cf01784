"""Tracing: what is refused, with the user's line and the way out; and what becomes the same expression however it is spelt."""

from __future__ import annotations

import cmath
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.expr import Apply, Cast, Load
from wideload.trace import HostResult, NumberArg, TensorArg, TensorResult, Traced, trace_function

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, i64, u8, boolean = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool

X, Y = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([3.0, -0.0, 0.25])
M = torch.tensor([True, False, True])
N = torch.tensor([5, -7, 2])


def argument(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return TensorArg(name, value.dtype, tuple(value.shape), value.device)
    return NumberArg(name, type(value)) if type(value) in (int, float, complex) else value


def trace(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Traced:
    """Trace with arguments named x0, x1, ... and by keyword."""
    positional = tuple(argument(f"x{i}", value) for i, value in enumerate(args))
    return trace_function(function, "traced", positional, {name: argument(name, value) for name, value in kwargs.items()})


def assert_same(got: Any, want: torch.Tensor) -> None:
    """Bit for bit, with dtype and shape; NaN equals NaN, -0 is not 0."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that grows by the function's name whenever one is traced."""
    traced: list[str] = []

    def counted(fn: Any, name: str, *rest: Any) -> Traced:
        traced.append(name)
        return trace_function(fn, name, *rest)

    monkeypatch.setattr("wideload.fused.trace_function", counted)
    return traced


# ---- what is refused

BRANCH, SCALAR = r"a branch \(if, and, or, not\) needs the values of a tensor", "needs the value of the runtime scalar"
NO_OP, WRITES = "is not an elementwise op", "would write into an argument"
USE_WHERE, STATIC, OUTSIDE = r"Use torch\.where", r'static=\("s",\)', "Compute it outside"
OUT_OF_PLACE = "Use the out-of-place form"

REFUSED: list[tuple[Callable[..., Any], str, str]] = [
    (lambda x, y, s: x if x > 0 else y, BRANCH, USE_WHERE),
    (lambda x, y, s: x and y, BRANCH, USE_WHERE),
    (lambda x, y, s: not x, BRANCH, USE_WHERE),
    (lambda x, y, s: max(x, y), BRANCH, USE_WHERE),
    (lambda x, y, s: x * float(x), r"float\(\) needs the values of a tensor", r"\.to\(torch\.float64\)"),
    (lambda x, y, s: x * math.sqrt(y), r"float\(\) needs the values of a tensor", r"\.to\(torch\.float64\)"),
    (lambda x, y, s: x * int(y), r"int\(\) needs the values of a tensor", r"\.to\(torch\.int64\)"),
    (lambda x, y, s: x * cmath.sqrt(y), r"complex\(\) needs the values", r"\.to\(torch\.complex128\)"),
    (lambda x, y, s: [x][y], "an index needs the values of a tensor", "static="),
    (lambda x, y, s: x if 1.0 in x else y, "in needs the values of a tensor", "Compare with =="),
    (lambda x, y, s: x if s else y, f"a branch .* {SCALAR} s", STATIC),
    (lambda x, y, s: x * int(s), rf"int\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: x * float(s), rf"float\(\) or a function of math {SCALAR} s", STATIC),
    (lambda x, y, s: x * math.sqrt(s), rf"a function of math {SCALAR} s", STATIC),
    (lambda x, y, s: x * math.floor(s), rf"floor\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: x * math.ceil(s), rf"ceil\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: x * math.trunc(s), rf"trunc\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: x * round(s), rf"round\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: [x for _ in range(s)], rf"range\(\) or an index {SCALAR} s", STATIC),
    (lambda x, y, s: x * cmath.exp(s), rf"complex\(\) {SCALAR} s", STATIC),
    (lambda x, y, s: x * min(s, 1.0), f"a branch .* {SCALAR}", r"static="),
    (lambda x, y, s: x if s > 0 else y, f"a branch .* {SCALAR}", r"static="),
    (lambda x, y, s: x.sum(), rf"torch\.Tensor\.sum {NO_OP}", OUTSIDE),
    (lambda x, y, s: torch.softmax(x, -1), rf"torch\.softmax {NO_OP}", OUTSIDE),
    (lambda x, y, s: x - x.mean(-1, keepdim=True), rf"torch\.Tensor\.mean {NO_OP}", OUTSIDE),
    (lambda x, y, s: x * x.max(), "max over the elements of a tensor is not an elementwise op", OUTSIDE),
    (lambda x, y, s: x @ y, rf"__matmul__ {NO_OP}", OUTSIDE),
    (lambda x, y, s: torch.randn_like(x), rf"torch\.randn_like {NO_OP}", OUTSIDE),
    (lambda x, y, s: x.item(), rf"torch\.Tensor\.item {NO_OP}", OUTSIDE),
    (lambda x, y, s: x.cumsum(0), rf"torch\.Tensor\.cumsum {NO_OP}", OUTSIDE),
    (lambda x, y, s: torch.logcumsumexp(x, 0), rf"torch\.logcumsumexp {NO_OP}", OUTSIDE),
    (lambda x, y, s: x.cuda(), rf"torch\.Tensor\.cuda {NO_OP}", OUTSIDE),
    (lambda x, y, s: (x + 1).bernoulli_(), rf"torch\.Tensor\.bernoulli_ {NO_OP}", OUTSIDE),
    (lambda x, y, s: x[x > 0], "an index that makes a view must be an integer, not a", ""),
    (lambda x, y, s: x[[0, 2]], "an index that makes a view must be an integer, not a list", ""),
    (lambda x, y, s: x.flip(0), rf"torch\.Tensor\.flip {NO_OP}", OUTSIDE),
    (lambda x, y, s: torch.roll(x, 1), rf"torch\.roll {NO_OP}", OUTSIDE),
    (lambda x, y, s: x.as_strided((2,), (1,)), rf"torch\.Tensor\.as_strided {NO_OP}", OUTSIDE),
    (lambda x, y, s: x.gather(0, y), rf"torch\.Tensor\.gather {NO_OP}", OUTSIDE),
    (lambda x, y, s: torch.add(x, y, out=y), r"torch\.add has out= inside", "give out= to the fused function"),
    (lambda x, y, s: x.add_(1), rf"torch\.Tensor\.add_ {WRITES}", OUT_OF_PLACE),
    (lambda x, y, s: x.relu_(), rf"torch\.Tensor\.relu_ {WRITES}", OUT_OF_PLACE),
    (lambda x, y, s: F.relu(x, inplace=True), rf"torch\.nn\.functional\.relu {WRITES}", OUT_OF_PLACE),
    (lambda x, y, s: F.hardtanh(x, -1, 1, inplace=True), rf"torch\.nn\.functional\.hardtanh {WRITES}", OUT_OF_PLACE),
    (lambda x, y, s: torch.relu_(x), rf"relu_ {WRITES}", OUT_OF_PLACE),
    (lambda x, y, s: x.to(f32).mul_(2), rf"torch\.Tensor\.mul_ {WRITES}", OUT_OF_PLACE),  # .to its own dtype is x itself
    (lambda x, y, s: x.__setitem__(0, 1.0), "an indexed assignment writes into a tensor", USE_WHERE),
    (lambda x, y, s: x + torch.ones(3), r"add uses a tensor of shape \(3,\) that is not an argument", "Pass the tensor as an argument"),
    (lambda x, y, s: torch.ones(3) * x, r"mul uses a tensor of shape \(3,\) that is not an argument", "Pass the tensor as an argument"),
    (lambda x, y, s: x + "1", "add takes tensors and numbers, not str", "Pass a tensor or a Python number"),
    (lambda x, y, s: x.data, r"Tensor\.data cannot be read", "Read it outside"),
    (lambda x, y, s: x.grad, r"Tensor\.grad cannot be read", "Read it outside"),
    (lambda x, y, s: x if x.requires_grad else y, "requires_grad is not known", "Decide outside"),
    (lambda x, y, s: x.to("cuda"), r"torch\.Tensor\.to moves a tensor to cuda", "Move it before the call"),
    (lambda x, y, s: x.to(0), r"torch\.Tensor\.to moves a tensor to 0", "Move it before the call"),
    (lambda x, y, s: torch.clamp(x), "torch.clamp: at least one of min and max", "as torch documents it"),
    (lambda x, y, s: x.div(y, rounding_mode="up"), "rounding_mode is 'up'", "as torch documents it"),
    (lambda x, y, s: F.gelu(x, approximate="fast"), "approximate is 'fast'", "as torch documents it"),
    (lambda x, y, s: x.clone(memory_format=torch.channels_last), "is for tensors of 4 dims, got one of", "as torch documents it"),
]


@pytest.mark.parametrize(("function", "what", "way_out"), REFUSED, ids=lambda value: None if callable(value) else value[:40])
def test_a_refusal_names_the_line_and_the_way_out(function: Callable[..., Any], what: str, way_out: str) -> None:
    line = function.__code__.co_firstlineno
    with pytest.raises(wl.TraceError, match=what) as refused:
        trace(function, X, Y, s=2.5)
    assert f"{__file__}:{line}: " in str(refused.value)
    assert "lambda x, y, s: " in str(refused.value)
    refused.match(way_out)


UNCLEAR = [
    pytest.param(lambda x, y, s: x if f"{s:.3f}" else y, id="format"),
    pytest.param(lambda x, y, s: x if s.is_integer() else y, id="is_integer"),
    pytest.param(lambda x, y, s: x * torch.tensor(s), id="a new tensor"),
    pytest.param(lambda x, y, s: setattr(x, "data", y), id="an attribute"),
    pytest.param(lambda x, y, s: x.type("torch.DoubleTensor"), id="a type by name"),
]


@pytest.mark.parametrize("function", UNCLEAR)
def test_other_uses_of_a_value_are_refused_as_clearly(function: Callable[..., Any]) -> None:
    with pytest.raises(wl.TraceError, match=f"{__file__}:{function.__code__.co_firstlineno}"):
        trace(function, X, Y, s=3)


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y, s: x * torch.ones(s), id="a size"),
        pytest.param(lambda x, y, s: x * torch.sqrt(s), id="a function of tensors"),
        pytest.param(lambda x, y, s: np.exp(x), id="a ufunc"),
    ],
)
def test_what_torch_or_numpy_refuse_before_wideload_sees_it_is_their_error(function: Callable[..., Any]) -> None:
    with pytest.raises((TypeError, RuntimeError, AttributeError)):
        trace(function, X, Y, s=3)


def test_a_branch_on_a_comparison_names_the_argument_to_make_static() -> None:
    with pytest.raises(wl.TraceError, match=r'static=\("s",\)'):
        trace(lambda x, s: x if s > 0 else -x, X, s=2.5)


def helper(x: Any) -> Any:
    return x.sum()


def test_the_innermost_line_of_the_users_code_is_named() -> None:
    line = helper.__code__.co_firstlineno + 1
    with pytest.raises(wl.TraceError, match=rf"test_trace\.py:{line}: return x\.sum\(\)"):
        trace(lambda x: helper(x + 1), X)


def test_a_line_reached_through_torchs_python_is_the_users() -> None:
    model = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Softmax(-1))
    with pytest.raises(wl.TraceError, match=r"softmax is not an elementwise op .*test_trace\.py:\d+: trace\(lambda x: model\(x\), X\)"):
        trace(lambda x: model(x), X)


def test_in_place_by_an_operator_on_an_argument_is_refused() -> None:
    def shifted(x: Any) -> Any:
        x += 1
        return x

    with pytest.raises(wl.TraceError, match=r"__iadd__ would write into an argument .*: x \+= 1\)"):
        trace(shifted, X)


def test_captured_tensors_are_refused_by_name_and_line() -> None:
    for function in (lambda x: x + X, lambda x: (x, X)):
        with pytest.raises(
            wl.TraceError, match=rf"`X` is of type Tensor, .*pass it as an argument .*:{function.__code__.co_firstlineno}\)"
        ):
            wl.fuse(function)(Y)


def test_a_new_tensor_is_no_result() -> None:
    with pytest.raises(wl.TraceError, match="returns a tensor that is not computed from its arguments"):
        trace(lambda x: torch.ones(3), X)


def test_a_proxy_is_worth_nothing_after_the_trace() -> None:
    kept: list[Any] = []
    trace(lambda x: kept.append(x) or x, X)
    with pytest.raises(wl.TraceError, match="after its function had returned"):
        kept[0] + 1


@pytest.mark.parametrize("hide", [lambda y: {y}, lambda y: iter([y]), lambda y: lambda: y], ids=["set", "iterator", "closure"])
def test_a_result_that_hides_a_tensor_is_refused(hide: Callable[[Any], Any]) -> None:
    with pytest.raises(wl.TraceError, match="allowed"):
        trace(lambda x: hide(x + 1), X)


def test_the_users_own_errors_pass_and_leave_no_trace_open() -> None:
    def fails(x: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        trace(fails, X)
    with pytest.raises(wl.TraceError, match="after its function had returned"):
        _leaked_proxy() + 1


def _leaked_proxy() -> Any:
    kept: list[Any] = []

    def fails(x: Any) -> Any:
        kept.append(x)
        raise KeyError

    with pytest.raises(KeyError):
        trace(fails, X)
    return kept[0]


def test_dtypes_that_torch_refuses_name_the_line() -> None:
    with pytest.raises(wl.DtypeError, match=r"torch refuses bitwise_and\(input: f32, other: f32\).*\(at .*test_trace\.py:\d+: "):
        trace(lambda x: x & x, X)
    with pytest.raises(wl.DtypeError, match=r"torch refuses neg\(input: bool\).*~"):
        trace(lambda m: -m, M)
    with pytest.raises(wl.DtypeError, match="torch refuses maximum"):
        trace(lambda x, y: x.maximum(y.to(torch.complex64)), X, Y)


def test_shapes_that_do_not_broadcast_name_the_line() -> None:
    with pytest.raises(wl.LayoutError, match=r"add: shapes \(3,\) and \(4,\) do not broadcast.*\(at .*test_trace\.py:\d+: "):
        trace(lambda x, y: x + y, X, torch.ones(4))


# ---- one expression for every spelling

SPELT_ALIKE: list[list[Callable[..., Any]]] = [
    [lambda x, y, m: x + y, lambda x, y, m: torch.add(x, y), lambda x, y, m: x.add(y), lambda x, y, m: x.add(other=y, alpha=1)],
    [lambda x, y, m: x - y, lambda x, y, m: torch.sub(x, y), lambda x, y, m: x.subtract(y), lambda x, y, m: torch.rsub(y, x)],
    [lambda x, y, m: x * y, lambda x, y, m: torch.multiply(x, y), lambda x, y, m: x.mul(y)],
    [lambda x, y, m: x / y, lambda x, y, m: torch.true_divide(x, y), lambda x, y, m: x.div(y), lambda x, y, m: torch.divide(x, y)],
    [lambda x, y, m: x // y, lambda x, y, m: torch.floor_divide(x, y), lambda x, y, m: x.div(y, rounding_mode="floor")],
    [lambda x, y, m: x % y, lambda x, y, m: torch.remainder(x, y), lambda x, y, m: x.remainder(y)],
    [lambda x, y, m: x**y, lambda x, y, m: torch.pow(x, y), lambda x, y, m: x.pow(exponent=y)],
    [lambda x, y, m: -x, lambda x, y, m: torch.neg(x), lambda x, y, m: x.negative()],
    [lambda x, y, m: abs(x), lambda x, y, m: torch.absolute(x), lambda x, y, m: x.abs()],
    [lambda x, y, m: 2 - x, lambda x, y, m: torch.rsub(x, 2), lambda x, y, m: torch.sub(2, x)],
    [lambda x, y, m: 2 * x, lambda x, y, m: x * 2, lambda x, y, m: torch.mul(x, 2)],
    [lambda x, y, m: x > y, lambda x, y, m: torch.gt(x, y), lambda x, y, m: x.greater(y)],
    [lambda x, y, m: x == y, lambda x, y, m: torch.eq(x, y), lambda x, y, m: x.eq(y)],
    [lambda x, y, m: ~m, lambda x, y, m: torch.bitwise_not(m), lambda x, y, m: m.bitwise_not()],
    [lambda x, y, m: m & m, lambda x, y, m: torch.bitwise_and(m, m)],
    [lambda x, y, m: m | True, lambda x, y, m: True | m, lambda x, y, m: m.bitwise_or(True)],
    [lambda x, y, m: torch.where(m, x, y), lambda x, y, m: x.where(m, y), lambda x, y, m: torch.where(m, input=x, other=y)],
    [lambda x, y, m: x.clamp(0, 1), lambda x, y, m: torch.clip(x, 0, max=1), lambda x, y, m: torch.clamp(min=0, max=1, input=x)],
    [lambda x, y, m: x.masked_fill(m, 0), lambda x, y, m: torch.masked_fill(x, m, value=0)],
    [lambda x, y, m: F.relu(x), lambda x, y, m: torch.relu(x), lambda x, y, m: x.relu(), lambda x, y, m: F.relu(x, False)],
    [lambda x, y, m: F.silu(x), lambda x, y, m: torch.nn.SiLU()(x), lambda x, y, m: F.silu(x, inplace=False)],
    [lambda x, y, m: F.gelu(x, approximate="tanh"), lambda x, y, m: torch.nn.GELU("tanh")(x)],
    [lambda x, y, m: torch.sigmoid(x), lambda x, y, m: x.sigmoid(), lambda x, y, m: torch.special.expit(x), lambda x, y, m: F.sigmoid(x)],
    [lambda x, y, m: F.leaky_relu(x), lambda x, y, m: F.leaky_relu(x, 0.01), lambda x, y, m: torch.nn.LeakyReLU()(x)],
    [lambda x, y, m: torch.lerp(x, y, 0.5), lambda x, y, m: x.lerp(y, weight=0.5)],
    [lambda x, y, m: x.to(f16), lambda x, y, m: x.half(), lambda x, y, m: x.type(f16), lambda x, y, m: x.to(dtype=f16)],
    [lambda x, y, m: x.to(m.dtype), lambda x, y, m: x.bool(), lambda x, y, m: x.to(m), lambda x, y, m: x.type_as(m)],
    [lambda x, y, m: x, lambda x, y, m: x.to(f32), lambda x, y, m: x.float(), lambda x, y, m: x.to("cpu"), lambda x, y, m: x.to(x)],
    [lambda x, y, m: x.clone(), lambda x, y, m: x.to(f32, copy=True), lambda x, y, m: x.to(f32, False, True)],
    [lambda x, y, m: torch.zeros_like(x), lambda x, y, m: torch.full_like(x, 0)],
    [lambda x, y, m: torch.addcmul(x, x, y), lambda x, y, m: x.addcmul(x, y, value=1)],
    [lambda x, y, m: torch.round(x), lambda x, y, m: x.round(decimals=0)],
    [lambda x, y, m: torch.special.expm1(x), lambda x, y, m: x.expm1()],
    [lambda x, y, m: (x + 1) * (x + 1), lambda x, y, m: (lambda z: z * z)(x + 1)],
]  # fmt: skip


@pytest.mark.parametrize("functions", SPELT_ALIKE, ids=lambda functions: str(functions[0].__code__.co_firstlineno))
def test_every_spelling_is_one_expression(functions: list[Callable[..., Any]]) -> None:
    first, *others = (trace(function, X, Y, M).expr for function in functions)
    for other in others:
        assert other == first
        assert str(other) == str(first)  # Const(1) == Const(1.0)


def test_other_programs_are_other_expressions() -> None:
    functions = [
        lambda x, y: x + y, lambda x, y: y + x, lambda x, y: x + 1, lambda x, y: x + 1.0, lambda x, y: x + True, lambda x, y: x + 0.0,
        lambda x, y: x + -0.0, lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x - y, lambda x, y: x.half().float(), lambda x, y: x,
        lambda x, y: F.gelu(x), lambda x, y: F.gelu(x, approximate="tanh"), lambda x, y: x**2, lambda x, y: x**2.0, lambda x, y: x / 2,
        lambda x, y: x * 0.5, lambda x, y: x.half() + y.half(), lambda x, y: (x + y).half(),
    ]  # fmt: skip
    exprs = [str(trace(function, X, Y).expr) for function in functions]
    assert len(set(exprs)) == len(exprs)


def test_equal_steps_are_computed_once() -> None:
    traced = trace(lambda x, y: torch.exp(x + y) / (1 + torch.exp(x + y)), X, Y)
    assert [node.op.name for node in traced.expr.nodes if isinstance(node, Apply)] == ["add", "exp", "add", "div"]


@pytest.mark.parametrize("sign", ["+", "-"])
def test_host_arithmetic_with_zeros_of_both_signs_is_not_mixed_up(sign: str) -> None:
    f = wl.fuse(lambda x, s: (torch.full_like(x, s * 0.0), torch.full_like(x, s * -0.0)))
    plus, minus = f(X, float(f"{sign}1"))
    assert plus.signbit().tolist() == [sign == "-"] * 3
    assert minus.signbit().tolist() == [sign == "+"] * 3


# ---- in place on an intermediate


def test_in_place_methods_on_an_intermediate_are_functional() -> None:
    def steps(x: Any) -> Any:
        y = x + 1
        before, alias = y * 1, y
        y.mul_(2).clamp_(max=4)
        y += 0.5
        y -= 1
        y **= 2
        F.silu(y, inplace=True)
        torch.relu_(y)
        return before, alias, y

    got, want = wl.fuse(steps)(X), steps(X)
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)
    assert got[1] is got[2]
    assert X.tolist() == [-1.0, 0.5, 2.0]


def test_in_place_results_keep_the_dtype_of_what_they_are_stored_in() -> None:
    def into_half(x: Any, y: Any) -> Any:
        z = x.half()
        z += y
        return z

    x, y = torch.tensor([1.0, 2048.0]), torch.tensor([1e-3, 1.0])
    assert_same(wl.fuse(into_half)(x, y), into_half(x, y))
    node = trace(into_half, x, y).expr.nodes[-1]
    assert isinstance(node, Cast)
    assert node.dtype == f16


def test_in_place_where_torch_refuses_is_refused() -> None:
    with pytest.raises(wl.DtypeError, match=r"torch\.Tensor\.div_: the result is torch\.float32, .* a torch\.int64 \(at .*out-of-place"):
        trace(lambda n: (n + 1).div_(2), N)
    with pytest.raises(wl.LayoutError, match=r"mul_: the result has shape \(2, 3\), the tensor it is stored in \(3,\) \(at "):
        trace(lambda x, y: (x + 1).mul_(y), X, torch.ones(2, 3))


def test_in_place_with_shapes_of_a_later_call_that_torch_refuses() -> None:
    f = wl.fuse(lambda x, y: (x + 1).mul_(y))
    f(X, Y)
    with pytest.raises(wl.LayoutError):
        f(torch.ones(1), Y)


@pytest.mark.parametrize("alias", [lambda y: y.detach(), lambda y: torch.positive(y), lambda y: y.contiguous(), lambda y: y[1:]])
def test_nothing_is_stored_in_place_where_memory_is_shared(alias: Callable[[Any], Any]) -> None:
    def through_the_original(x: Any) -> Any:
        y = x + 1
        z = alias(y)
        y.add_(1)
        return z

    def through_the_alias(x: Any) -> Any:
        y = x + 1
        alias(y).mul_(2)
        return y

    for function in (through_the_original, through_the_alias, lambda x: alias(x).mul_(2)):
        with pytest.raises(wl.TraceError, match=r"in place|write into an argument"):
            wl.fuse(function)(X)


# ---- dtypes


def test_a_cast_by_tensor_type() -> None:
    assert_same(wl.fuse(lambda x: x.type(torch.DoubleTensor))(X), X.type(torch.DoubleTensor))


def test_every_cast() -> None:
    methods = "double float half bfloat16 char short int long byte bool".split()
    for dtype, method in zip((f64, f32, f16, bf16, i8, torch.int16, i32, i64, u8, boolean), methods, strict=True):
        spellings: list[Callable[..., Any]] = [
            lambda x, d=dtype: x.to(d),
            lambda x, d=dtype: x.type(d),
            lambda x, d=dtype: x.to("cpu", d),
            lambda x, name=method: getattr(x, name)(),
        ]
        for spelling in spellings:
            for x in (Y, N, M, Y.half()):
                got, want = wl.fuse(spelling)(x), spelling(x)
                assert_same(got, want)
                assert (got is x) == (want is x)


def test_zero_dim_tensors_promote_as_in_torch() -> None:
    small, half = torch.tensor([1.5, 2.5], dtype=bf16), torch.tensor(0.1, dtype=f64)
    f = wl.fuse(lambda x, s: x * s + 1)
    assert f(small, half).dtype == (small * half + 1).dtype == bf16
    assert f(half, small).dtype == bf16
    assert f(half, torch.tensor(2, dtype=i8)).dtype == f64
    assert f(torch.tensor([1]), half).dtype == (torch.tensor([1]) * half + 1).dtype == f64


def test_queries_of_dtype_and_rank_are_answered_without_sizes() -> None:
    def asks(x: Any) -> Any:
        assert x.dtype == f32
        assert (x.ndim, x.dim(), x.ndimension()) == (1, 1, 1)
        assert (x.is_floating_point(), torch.is_floating_point(x), x.is_complex(), x.is_signed()) == (True, True, False, True)
        assert (x.element_size(), x.itemsize) == (4, 4)
        assert (x.is_cuda, x.is_cpu, x.is_meta, x.device) == (False, True, False, torch.device("cpu"))
        assert (x > 0).dtype == boolean
        assert torch.finfo(x.dtype).max > 1e38
        assert repr(x) == str(x) == f"{x}" == "<traced f32 tensor>"
        return x * x.element_size()

    assert not trace(asks, X).reads_sizes


# ---- sizes


def test_every_read_of_a_size_is_noticed() -> None:
    reads = [
        lambda x: x.shape[-1], lambda x: x.size(0), lambda x: x.size()[0], lambda x: x.numel(), lambda x: torch.numel(x), lambda x: len(x),
        lambda x: x.nelement(), lambda x: (x + 1).shape[0], lambda x: x.half().size(-1), lambda x: x.shape.numel(),
    ]  # fmt: skip
    for read in reads:
        traced = trace(lambda x, read=read: x / read(x), X)
        assert traced.reads_sizes
        assert any(getattr(node, "value", None) == 3 for node in traced.expr.nodes)


def test_a_new_size_traces_again_only_where_sizes_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    mean, plain = wl.fuse(lambda x: x / x.shape[-1], name="mean"), wl.fuse(lambda x: x / 3, name="plain")
    for n in (3, 5, 3, 5, 4):
        assert mean(torch.ones(2, n))[0, 0].item() == pytest.approx(1 / n)
        plain(torch.ones(2, n))
    assert traced == ["mean", "plain", "mean", "mean"]
    mean(torch.ones(7, 4))
    mean(torch.ones(4))
    plain(torch.ones(4))
    assert traced[4:] == ["mean", "mean", "plain"]  # another size, another rank, another rank


def test_what_traces_again_and_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    f = wl.fuse(lambda x, s, mode="a": x * s if mode == "a" else x + s, name="f")
    for s in (1.0, 2.0, -0.0, math.nan, np.float32(3), np.float64(4)):
        f(X, s)
    f(Y.expand(4, 3)[0], 1.5)
    f(torch.ones(3, 2).t()[0], 1.5)
    assert len(traced) == 1
    f(X, 2)
    f(X, np.int64(5))
    assert len(traced) == 2  # an int
    f(X, 2, mode="a")
    f(X, s=3, mode="a")
    assert len(traced) == 2
    f(X, 2, mode="b")
    f(X.double(), 2)
    f(X[0], 2)
    f(X, 2j)
    f(X, Y)
    assert len(traced) == 7


# ---- arguments


def test_arguments_of_every_kind() -> None:
    def everything(a: Any, b: Any = 2, /, c: Any = 3.0, *rest: Any, d: Any, e: Any = None, **more: Any) -> Any:
        total = a * b + c + d
        for item in rest:
            total = total + item
        for key in sorted(more):
            total = total - more[key] * len(key)
        return total if e is None else total + e

    f = wl.fuse(everything)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {"d": Y}),
        ((X,), {"d": 0.5}),
        ((X, 5), {"d": Y}),
        ((X, 5, Y), {"d": Y}),
        ((X, 5, Y, 1, Y, 2.5), {"d": 1}),
        ((X, Y), {"d": 1, "e": X}),
        ((X,), {"d": 1, "zeta": X, "eta": 2}),
        ((X,), {"d": 1, "eta": 2, "zeta": X}),
        ((2, X), {"c": Y, "d": 1}),
        ((X,), {"c": True, "d": 1}),
    ]
    for args, kwargs in [*calls, *calls]:
        assert_same(f(*args, **kwargs), everything(*args, **kwargs))


def test_containers_of_arguments() -> None:
    class Weights(NamedTuple):
        scale: Any
        shift: Any

    def apply(x: Any, w: Any, extra: Any, table: Any) -> Any:
        return (x * w.scale + w.shift + extra[0]) * table["k"][1], w, extra, table

    args = (X, Weights(2.0, Y), [Y, "unused"], OrderedDict(k=(None, 3)))
    got, *containers = wl.fuse(apply)(*args)
    assert_same(got, apply(*args)[0])
    assert [type(container) for container in containers] == [Weights, list, OrderedDict]
    assert containers[0].shift is Y
    assert containers[1:] == [[Y, "unused"], {"k": (None, 3)}]


def test_numbers_of_numpy_and_zero_dim_tensors() -> None:
    f = wl.fuse(lambda x, s: x * s)
    for s in (
        np.float64(0.1),
        np.float32(0.1),
        np.float16(0.1),
        np.int8(3),
        np.uint64(3),
        np.bool_(True),
        torch.tensor(0.1),
        torch.tensor(3),
    ):
        plain = s.item() if isinstance(s, np.generic) else s
        for x in (X, N, M):
            assert_same(f(x, s), x * plain)


ROOT, HALF = np.sqrt(2.0), np.float32(0.5)


def test_numpy_numbers_in_the_function_are_python_numbers() -> None:
    for function in (lambda x: x * ROOT, lambda x: ROOT * x, lambda x: x * HALF, lambda x: HALF - x, lambda x: x ** np.int64(2)):
        for x in (X, X.half()):
            assert_same(wl.fuse(function)(x), function(x))
    assert_same(wl.fuse(lambda x, s: x * (ROOT * s))(X, 3.0), X * (float(ROOT) * 3.0))


def test_builtins_with_keywords_are_told_apart() -> None:
    f = wl.fuse(torch.clamp)
    assert_same(f(X, min=0.0), X.clamp(min=0.0))
    assert_same(f(X, max=0.0), X.clamp(max=0.0))
    assert_same(f(X, 0.0), X.clamp(min=0.0))
    assert_same(wl.fuse(torch.add)(X, Y, alpha=2), X + 2 * Y)


def test_a_size_is_a_tuple_of_numbers() -> None:
    assert_same(wl.fuse(lambda x, size: x * size[0])(X, X.shape), X * 3)


def test_a_static_tuple_is_static() -> None:
    f = wl.fuse(lambda x, sizes: x * 2 if sizes[0] > 1 else x, static=("sizes",))
    assert_same(f(X, (2, 3)), X * 2)
    assert_same(f(X, (1, 3)), X)


def test_static_numbers_take_part_in_the_trace() -> None:
    def power(x: Any, n: Any, s: Any) -> Any:
        result = x
        for _ in range(n - 1):
            result = result * x
        return result * math.sqrt(s)

    f = wl.fuse(power, static=("n", "s"))
    for n, s in ((1, 4.0), (3, 4.0), (3, 9.0), (3, 9), (2, np.float64(1.0))):
        assert_same(f(X, n, s), power(X, n, s))
    signed = wl.fuse(lambda x, s: x * s, static="s")
    assert signed(Y.abs(), 0.0).signbit().tolist() == [False] * 3
    assert signed(Y.abs(), -0.0).signbit().tolist() == [True] * 3


def test_bools_strings_dtypes_and_none_are_static() -> None:
    f = wl.fuse(lambda x, flag, mode, dtype, nothing: (x if flag else -x).to(dtype) if mode == "go" and nothing is None else x)
    assert_same(f(X, True, "go", f16, None), X.half())
    assert_same(f(X, False, "go", f16, None), -X.half())
    assert_same(f(X, False, "go", bf16, None), -X.bfloat16())
    assert f(X, False, "stop", bf16, None) is X


# ---- numbers known only at the call

Z = torch.tensor([0.25, 4.0, -3.0])
WITH_NUMBERS: list[Callable[..., Any]] = [
    lambda x, y, s: torch.add(x, y, alpha=s),
    lambda x, y, s: x.sub(y, alpha=s),
    lambda x, y, s: torch.rsub(x, y, alpha=s),
    lambda x, y, s: torch.addcmul(x, x, y, value=s),
    lambda x, y, s: torch.addcdiv(x, y, y + 5, value=s),
    lambda x, y, s: torch.lerp(x, y, s),
    lambda x, y, s: x.clamp(s, s + 1),
    lambda x, y, s: torch.clamp(x, min=s),
    lambda x, y, s: torch.clip(x, max=s),
    lambda x, y, s: F.softplus(x, beta=s, threshold=s * 10),
    lambda x, y, s: F.leaky_relu(x, s),
    lambda x, y, s: F.elu(x, alpha=s),
    lambda x, y, s: F.celu(x, s),
    lambda x, y, s: F.hardtanh(x, -s, s),
    lambda x, y, s: F.threshold(x, s, s / 2),
    lambda x, y, s: F.hardshrink(x, s),
    lambda x, y, s: F.softshrink(x, s),
    lambda x, y, s: torch.full_like(x, s),
    lambda x, y, s: torch.where(x > s, s, -s),
    lambda x, y, s: torch.where(x > 0, x, s),
    lambda x, y, s: x.masked_fill(x < 0, s),
    lambda x, y, s: torch.nan_to_num(x / 0 * 0, nan=s),
    lambda x, y, s: torch.nan_to_num(x / 0, posinf=s, neginf=-s),
    lambda x, y, s: x**s,
    lambda x, y, s: s**x,
    lambda x, y, s: torch.pow(s, x),
    lambda x, y, s: torch.float_power(x, s),
    lambda x, y, s: s - x,
    lambda x, y, s: s / x,
    lambda x, y, s: s // x,
    lambda x, y, s: s % x,
    lambda x, y, s: x // s + x % s + torch.fmod(x, s),
    lambda x, y, s: (x < s) | (s < x),
    lambda x, y, s: (s == x) ^ (s != y),
    lambda x, y, s: torch.copysign(x, s),
    lambda x, y, s: torch.xlogy(x, s) + torch.xlogy(s, y.abs()),
    lambda x, y, s: torch.isclose(x, y, rtol=s, atol=s),
    lambda x, y, s: x * (1 - s**2) / (s + 1) - abs(-s) + +s,
    lambda x, y, s: x * (s > 1) + x * (s == 2),
    lambda x, y, s: torch.mul(x, s).div(s, rounding_mode="trunc"),
]  # fmt: skip


@pytest.mark.parametrize("function", WITH_NUMBERS, ids=lambda function: str(function.__code__.co_firstlineno))
def test_runtime_numbers_go_wherever_torch_takes_a_number(function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    f, traced = wl.fuse(function), count_traces(monkeypatch)
    for s in (1.5, 0.25, 2.0):
        assert_same(f(X, Z, s), function(X, Z, s))
    assert len(traced) == 1
    for n in (1, 2, 3):
        assert_same(f(X, Z, n), function(X, Z, n))
    assert len(traced) == 2


def test_whole_numbers_stay_whole() -> None:
    f = wl.fuse(lambda n, s, t: n * (s // t) + (s % t) - (s << 1) + (s >> 1) + (~s & 6 | 1 ^ t) + -s)
    g = f.__wrapped__
    for s, t in ((7, 2), (-7, 2), (7, -3), (0, 5)):
        assert_same(f(N, s, t), g(N, s, t))
    assert f(N, 7, 2).dtype == i64
    assert wl.fuse(lambda n, s: n * (s / 2))(N, 4).dtype == f32


def test_host_arithmetic_raises_what_python_raises() -> None:
    f = wl.fuse(lambda x, s: x * (1 / s))
    assert_same(f(X, 4), X * 0.25)
    with pytest.raises(ZeroDivisionError):
        f(X, 0)


@pytest.mark.parametrize(("x", "s"), [(N, -1), (X, -8.0)], ids=["int to float", "float to complex"])
def test_a_number_of_another_kind_than_traced_is_refused_or_right(x: torch.Tensor, s: float) -> None:
    f = wl.fuse((lambda x, s: x * 2**s) if isinstance(s, int) else (lambda x, s: x * s**0.5))
    f(x, abs(s))
    try:
        got = f(x, s)
    except wl.WideloadError:
        return
    assert_same(got, f.__wrapped__(x, s))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x + 1 if isinstance(x, torch.Tensor) else x - 1,
        lambda x, s: x + 1 if torch.is_tensor(x) else x - 1,
        lambda x, s: x + 1 if isinstance(s, float) else x - 1,
    ],
)
def test_what_an_argument_is_can_be_asked(function: Callable[..., Any]) -> None:
    assert_same(wl.fuse(function)(X, 2.5), function(X, 2.5))


def test_one_tensor_passed_twice_is_one() -> None:
    f = wl.fuse(lambda a, b: a + 1 if a is b else a - b)
    assert_same(f(X, X), X + 1)
    assert_same(f(X, Y), X - Y)
    assert_same(f(X, X.clone()), X - X)


# ---- results


class Both(NamedTuple):
    sum: Any
    product: Any


def test_structures_of_results() -> None:
    def nested(x: Any, y: Any, s: Any) -> Any:
        z = x + y
        return {"a": z, "b": [z * s, (z,)], "c": Both(z - s, x), "d": None, "e": "text", "f": 3, "g": s * 2, "h": (), "i": OrderedDict(z=y)}

    f = wl.fuse(nested)
    got, want = f(X, Y, 2.5), nested(X, Y, 2.5)
    assert list(got) == list(want)
    for key in "adefgh":
        assert torch.equal(got[key], want[key]) if key == "a" else got[key] == want[key]
    assert type(got["c"]) is Both
    assert type(got["b"]) is list
    assert type(got["b"][1]) is tuple
    assert type(got["i"]) is OrderedDict
    assert_same(got["b"][0], want["b"][0])
    assert_same(got["c"].sum, want["c"].sum)
    assert got["b"][1][0] is got["a"]
    assert got["c"].product is X
    assert got["i"]["z"] is Y
    assert f(X, Y, 3.5)["g"] == 7.0


def test_leaves_of_a_trace() -> None:
    traced = trace(lambda x, s: (x, x + 1, s, s + 1, 4, x), X, s=2)
    first, second, number, arithmetic, constant, again = traced.result
    assert first == again == TensorResult(0, 0)
    assert second == TensorResult(1, None)
    assert isinstance(number, HostResult)
    assert isinstance(arithmetic, HostResult)
    assert constant == 4
    assert isinstance(traced.expr.nodes[traced.expr.outputs[0]], Load)
    assert len(traced.expr.outputs) == 2


def test_the_same_tensor_twice_is_one_tensor() -> None:
    first, second = wl.fuse(lambda x: (lambda y: (y, y))(x + 1))(X)
    assert first is second


def test_equal_results_are_tensors_of_their_own() -> None:
    first, second = wl.fuse(lambda x: (x + 1, x + 1))(X)
    first.zero_()
    assert_same(second, X + 1)


def test_an_argument_returned_unchanged_is_the_argument() -> None:
    for function in (lambda x: x, lambda x: x.to(f32), lambda x: x.float().to("cpu")):
        assert wl.fuse(function)(X) is X
    assert wl.fuse(lambda x: x.clone())(X) is not X
    assert wl.fuse(lambda x: torch.zeros_like(x))(X) is not X


def test_torchs_named_results_of_several_tensors() -> None:
    got, want = wl.fuse(torch.frexp)(Z), torch.frexp(Z)
    assert type(got) is type(want)
    assert_same(got.mantissa, want.mantissa)
    assert_same(got.exponent, want.exponent)


# ---- functions that call functions


@wl.fuse
def scale(x: Any, s: Any = 2.0) -> Any:
    return x * s


@wl.fuse
def total(parts: Any) -> Any:
    return parts[0] + parts[1]


def test_a_fused_function_inside_another_is_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    outer = wl.fuse(lambda x, y: scale(x) + scale(y, s=3.0) + scale(scale(x), 4), name="outer")
    assert_same(outer(X, Y), X * 2.0 + Y * 3.0 + X * 2.0 * 4)
    assert traced == ["outer"]


def test_an_inner_function_sees_runtime_numbers() -> None:
    outer = wl.fuse(lambda x, t: scale(x, t * 2))
    for t in (1.5, -2.0):
        assert_same(outer(X, t), X * (t * 2))


def test_an_inner_function_takes_containers() -> None:
    assert_same(wl.fuse(lambda x, y: total((x, y)))(X, Y), X + Y)


def test_inner_out_is_refused() -> None:
    with pytest.raises(wl.TraceError):
        wl.fuse(lambda x, y: scale(x, out=y))(X, Y)


def test_traces_in_two_threads_do_not_meet() -> None:
    barrier, results = threading.Barrier(2, timeout=20), {}

    def paused(x: Any, s: Any) -> Any:
        y = x * s
        barrier.wait()
        return y + 1

    def run(name: str) -> None:
        results[name] = str(trace(paused, X, s=2.0).expr)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["a"] == results["b"] == str(trace(lambda x, s: x * s + 1, X, s=2.0).expr)


def test_under_a_mode_of_torch_the_trace_is_the_same() -> None:
    def function(x: Any, y: Any) -> Any:
        return torch.where(x > 0, F.silu(x), y.exp()) - torch.zeros_like(y)

    plain = trace(function, X, Y).expr
    with torch.device("cpu"):
        assert trace(function, X, Y).expr == plain
    with torch.inference_mode():
        assert trace(function, X, Y).expr == plain


def test_a_concatenation_leaves_out_what_is_one_dimensional_and_empty() -> None:
    """As torch does, for caches that begin as ``torch.empty(0)``; its dtype counts."""
    f = wl.fuse(lambda a, b: torch.cat((a, b * 2)), name="grown")
    b = torch.randn(4, 8)
    for a in (torch.empty(0), torch.empty(0, dtype=torch.float64), torch.ones(2, 8), torch.empty(0, 8)):
        got, want = f(a, b), torch.cat((a, b * 2))
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got, want)
    with pytest.raises(wl.LayoutError, match="all must have as many dims"):
        f(torch.empty(1), b)
    assert torch.equal(f(torch.empty(0), torch.ones(3)), torch.full((3,), 2.0))


def test_a_traced_tensor_is_of_torchs_class() -> None:
    assert wl.fuse(lambda x: x + 1 if x.__class__ is torch.Tensor else x)(torch.zeros(1)).item() == 1


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.bfloat16, torch.float64], ids=str)
def test_a_fill_in_place_of_an_intermediate(dtype: torch.dtype) -> None:
    x = torch.tensor([3, 0, 7]).to(dtype)
    filled, scalar, zeros = wl.fuse(lambda x, s: ((x * x).fill_(2), torch.fill_(x * x, s), (x * x).zero_()))(x, 3)
    for got, want in ((filled, 2), (scalar, 3), (zeros, 0)):
        assert got.dtype == dtype
        assert got.tolist() == torch.tensor([want] * 3).to(dtype).tolist()
    with pytest.raises(wl.TraceError, match="would write into an argument"):
        wl.fuse(lambda x: x.fill_(2))(x)


def test_an_out_that_is_none_is_no_out() -> None:
    x = torch.tensor([1.0, -2.0])
    results = wl.fuse(lambda x: (torch.add(x, x, out=None), torch.abs(x, out=None), torch.stack((x, x), out=None)))(x)
    assert [t.tolist() for t in results] == [[2.0, -4.0], [1.0, 2.0], [[1.0, -2.0]] * 2]
    with pytest.raises(wl.TraceError, match="out= inside a fused function"):
        wl.fuse(lambda x: torch.abs(x, out=x))(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: (x * 2).set_(x), "gives a tensor other memory"),
        (lambda x: x.set_(x * 2), "gives a tensor other memory"),
        (lambda x: x * 2 if x.type() == "torch.FloatTensor" else x, "spells a dtype and a device as text"),
    ],
)
def test_what_torch_does_past_its_own_dispatch_is_refused(function: Any, message: str) -> None:
    with pytest.raises(wl.TraceError, match=message):
        wl.fuse(function)(torch.ones(3))
