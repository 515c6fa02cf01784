"""The reference: torch's own operators, halves kept in fp32 between ops or rounded at each."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.expr import Numerics
from wideload.reference import evaluate_expr
from wideload.trace import NumberArg, TensorArg, trace_function

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, i64, boolean = torch.int8, torch.int32, torch.int64, torch.bool


def evaluate(
    function: Callable[..., Any], *tensors: torch.Tensor, numerics: Numerics = "fused", differentiable: bool = False, **numbers: Any
) -> Any:
    """The first result of ``function``, through an expression."""
    arguments = tuple(TensorArg(f"x{i}", x.dtype, tuple(x.shape), x.device) for i, x in enumerate(tensors))
    expr = trace_function(function, "f", arguments, {name: NumberArg(name, type(value)) for name, value in numbers.items()}).expr
    values = tuple(numbers.values())
    return evaluate_expr(expr, expr.outputs, tensors, values, numerics=numerics, differentiable=differentiable)[0]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7))
    assert torch.equal(got.signbit() & ~got.isnan(), want.signbit() & ~want.isnan())


def sample(dtype: torch.dtype, n: int = 257, seed: int = 1) -> torch.Tensor:
    """Values of every size, specials among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == boolean:
        return torch.randint(0, 2, (n,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(-100, 100, (n,), generator=generator).to(dtype)
    x = torch.randn(n, generator=generator, dtype=f64) * torch.logspace(-6, 3, n, dtype=f64)
    x[:6] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0])
    return x.to(dtype)


# ---- eager

STEPS: list[Callable[[Any, Any], Any]] = [
    lambda x, y: x + y, lambda x, y: x * 1.7, lambda x, y: 2 - x, lambda x, y: torch.exp(x), lambda x, y: F.silu(x),
    lambda x, y: x.abs() / 3,
    lambda x, y: torch.where(x > y, x, y), lambda x, y: F.gelu(x, approximate="tanh"), lambda x, y: x.maximum(y), lambda x, y: x.half(),
    lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x.clamp(-1, 1), lambda x, y: x.float() * y, lambda x, y: x**2, lambda x, y: x % 3,
    lambda x, y: F.softsign(x), lambda x, y: torch.lerp(x, x * 2, 0.3), lambda x, y: (x > 0) ^ (y > 0), lambda x, y: torch.nan_to_num(x),
    lambda x, y: x.to(i32) + y, lambda x, y: torch.sign(x) - y.sign(), lambda x, y: torch.isclose(x, x * 1), lambda x, y: torch.deg2rad(x),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [f64, f32, f16, bf16, i64, i8, boolean], ids=str)
def test_eager_is_torch_bit_for_bit(dtype: torch.dtype) -> None:
    rng, x, y = random.Random(4), sample(dtype), sample(dtype, seed=2)
    compared = 0
    for _ in range(150):
        chosen = [rng.choice(STEPS) for _ in range(rng.randint(1, 4))]

        def run(x: Any, y: Any, chosen: list[Callable[[Any, Any], Any]] = chosen) -> Any:
            for step in chosen:
                x = step(x, y)
            return x

        try:
            want = run(x, y)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        assert_same(evaluate(run, x, y, numerics="eager"), want)
        compared += 1
    assert compared > 30


# ---- fused


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_fused_rounds_halves_once(dtype: torch.dtype) -> None:
    x, y = sample(dtype), sample(dtype, seed=2)
    function = lambda x, y: (x * 1.1 + y) * x - y / 3  # noqa: E731
    assert_same(evaluate(function, x, y), function(x.float(), y.float()).to(dtype))
    assert_same(evaluate(lambda x, y: (x * y).float() + 1, x, y), x.float() * y.float() + 1)
    assert not torch.equal(evaluate(function, x, y), function(x, y))


def test_an_explicit_cast_rounds_in_the_middle() -> None:
    x = sample(f32)
    assert_same(evaluate(lambda x: x.to(bf16) * 3, x), (x.to(bf16).float() * 3).to(bf16))
    assert_same(evaluate(lambda x: (x * 3).half().float() + x, x), (x * 3).half().float() + x)
    assert_same(evaluate(lambda x: x.to(f16).to(bf16).to(f16), x), x.to(f16).to(bf16).to(f16))
    assert_same(evaluate(lambda x: x.to(i8).to(bf16), x.nan_to_num(0).clamp(-99, 99)), x.nan_to_num(0).clamp(-99, 99).to(i8).to(bf16))


def test_halves_do_not_overflow_on_the_way() -> None:
    x = torch.tensor([300.0, -60000.0], dtype=f16)
    assert evaluate(lambda x: x * x / x, x).tolist() == [300.0, -60000.0]
    assert evaluate(lambda x: x * x / x, x, numerics="eager").tolist() == [float("inf"), float("-inf")]
    assert evaluate(lambda x: x * x, x).tolist() == [float("inf")] * 2


def test_the_intermediate_of_a_half_has_its_dtype_for_promotion() -> None:
    """The expression's dtypes are eager's, though values travel in fp32."""
    x = sample(bf16)
    assert evaluate(lambda x: x * 2 + torch.ones_like(x, dtype=f16), x).dtype == f32
    assert evaluate(lambda x: x * 2, x).dtype == bf16
    assert evaluate(lambda x: x > 0.5, x).dtype == boolean


@pytest.mark.parametrize("dtype", [f64, f32, i32, i8, boolean], ids=str)
def test_other_dtypes_are_the_same_in_both_modes(dtype: torch.dtype) -> None:
    x, y = sample(dtype), sample(dtype, seed=2)
    for function in (lambda x, y: x + y * 3, lambda x, y: torch.where(x > 1, x, y), lambda x, y: x * y < 2, lambda x, y: x.to(f64) * y):
        assert_same(evaluate(function, x, y), function(x, y))
        assert_same(evaluate(function, x, y, numerics="eager"), function(x, y))


def test_formulas_that_lose_tails_are_replaced_in_fused_mode_alone() -> None:
    x = torch.tensor([-3.0, -9.0, -12.5])
    exact = [v * math.erfc(-v * math.sqrt(0.5)) / 2 for v in x.tolist()]
    assert evaluate(F.gelu, x).tolist() == pytest.approx(exact, rel=2**-22, abs=0)
    assert F.gelu(x).tolist() != pytest.approx(exact, rel=2**-10, abs=0)
    assert_same(evaluate(F.gelu, x, numerics="eager"), F.gelu(x))
    assert_same(evaluate(F.gelu, x, differentiable=True), F.gelu(x))


# ---- numbers, results, gradients


def test_numbers_of_the_call_are_used() -> None:
    x = sample(f32)
    function = lambda x, n, s: x * s + n * (1 - s**n)  # noqa: E731
    for n, s in ((3, 0.5), (-2, 4.0)):
        assert_same(evaluate(function, x, n=n, s=s), function(x, n, s))


def test_only_what_a_result_needs_is_computed() -> None:
    calls: list[str] = []

    class Counted(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            calls.append(getattr(func, "__name__", ""))
            return func(*args, **(kwargs or {}))

    arguments = (TensorArg("x", f32, (3,), torch.device("cpu")),)
    expr = trace_function(lambda x: (x.sin().exp(), x.cos(), x + 1), "f", arguments, {}).expr
    with Counted():
        (result,) = evaluate_expr(expr, expr.outputs[1:2], [torch.ones(3)], (), numerics="fused")
    assert "cos" in calls
    assert not {"sin", "exp", "add"} & set(calls)
    assert_same(result, torch.ones(3).cos())


def test_an_argument_may_be_a_result() -> None:
    for dtype in (f32, bf16, i64):
        x = sample(dtype)
        assert_same(evaluate(lambda x: x, x), x)
    x = sample(f32)
    assert evaluate(lambda x: x, x) is x


def test_a_differentiable_evaluation_is_recorded() -> None:
    x = torch.randn(5, dtype=bf16, requires_grad=True)
    y = evaluate(lambda x: F.silu(x) * 3, x, differentiable=True)
    assert y.dtype == bf16
    (grad,) = torch.autograd.grad(y.sum(), x)
    leaf = x.detach().float().requires_grad_()
    (want,) = torch.autograd.grad((F.silu(leaf) * 3).sum(), leaf)
    assert grad.dtype == bf16
    assert torch.allclose(grad.float(), want, rtol=2**-7)


def test_broadcasting_and_zero_dims() -> None:
    x, y, s = torch.randn(3, 1), torch.randn(4), torch.tensor(2.0, dtype=f64)
    assert_same(evaluate(lambda x, y, s: x * y + s, x, y, s), x * y + s)
    assert_same(evaluate(lambda x, y: x + y, torch.ones(0, 3), torch.ones(3)), torch.ones(0, 3))


# ---- views

VIEWED: list[Callable[..., Any]] = [
    lambda x, y: x.chunk(2, -1)[1] * x.chunk(2, -1)[0],
    lambda x, y: (x * y).t()[1:, ::2] + 1,
    lambda x, y: torch.cat((-x[:, 4:], y.expand(6, 8), x * y), -1) * 2,
    lambda x, y: torch.stack((x + y, x - 1), 1),
    lambda x, y: (x * y).unflatten(-1, (2, 4)).transpose(0, 1).select(2, -1) - x[0, 1],
    lambda x, y: (x + y).t().reshape(8, 2, 3)[:, 1] * 3,
]


@pytest.mark.parametrize("function", VIEWED, ids=range(len(VIEWED)))
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_views_and_concatenations(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """Of row-major operands and of others: an intermediate keeps the strides of its operands, and so may its views."""
    y = torch.randn(8).to(dtype)
    for x in (torch.randn(6, 8).to(dtype), torch.randn(9, 12).to(dtype)[1:7, 3:11]):
        assert_same(evaluate(function, x, y, numerics="eager"), function(x, y))
        assert_same(evaluate(function, x, y), function(x.float(), y.float()).to(dtype))


def test_gradients_go_through_views() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    for function in VIEWED:
        (grad,) = torch.autograd.grad(evaluate(function, x, torch.ones(8), differentiable=True).square().sum(), x)
        (want,) = torch.autograd.grad(function(x, torch.ones(8)).square().sum(), x)
        assert torch.equal(grad, want)


@pytest.mark.parametrize("dtype", [f32, f16, bf16, torch.complex32], ids=str)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        lambda x: x.mT,
        lambda x: x[1:, ::2],
        lambda x: x[:1].expand(3, 4),
        lambda x: x.real,
        lambda x: +x,
        lambda x: x.detach().unsqueeze(0),
        lambda x: x.contiguous(),
    ],
)
def test_what_eager_returns_as_a_view_of_an_argument_is_one(function: Callable[..., Any], dtype: torch.dtype) -> None:
    """The same cells with the same strides, none of them written, stretched arguments too."""
    for x in (torch.arange(8.0).view(2, 4).to(dtype), torch.arange(4.0).to(dtype).expand(2, 4), torch.ones(1).to(dtype).expand(2, 4)):
        got, want = wl.fuse(function)(x), function(x)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
        assert (got.data_ptr() == want.data_ptr()) == (want.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
        assert torch.equal(torch.view_as_real(got.to(torch.complex64)), torch.view_as_real(want.to(torch.complex64)))


def test_a_computed_half_may_be_stretched() -> None:
    got = wl.fuse(lambda x: (x / 3).expand(2, 3))(torch.tensor([[1.0, 2.0, 10.0]], dtype=f16))
    assert got.stride() == (0, 1)
    assert got.tolist() == [[0.333251953125, 0.66650390625, 3.333984375]] * 2  # 1365/2^12, 1365/2^11, 1707/2^9


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, i32, i64], ids=str)
def test_the_smallest_integer_by_minus_one_wraps(dtype: torch.dtype) -> None:
    """Where eager's CPU kernels trap: ``rounding_mode="trunc"`` and ``lcm``, whose divisor of the smallest integer and 5 is -1 in torch."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    x, y = torch.tensor([low, low, low, -7, 7, high, high], dtype=dtype), torch.tensor([-1, 5, high, 2, -2, -1, 2], dtype=dtype)
    want = [low, -(-low // 5), -1, -3, -3, -high, high // 2]
    for f in (lambda x, y: torch.div(x, y, rounding_mode="trunc"), lambda x, y: (x * 1).div_(y, rounding_mode="trunc")):
        assert_same(evaluate(f, x, y), torch.tensor(want, dtype=dtype))
    assert_same(evaluate(lambda x: torch.div(x, -1, rounding_mode="trunc"), x[:1]), x[:1])
    multiples = evaluate(torch.lcm, x[[0, 1, 3]], y[[0, 1, 3]])
    assert multiples.tolist()[2] == 14
    assert multiples.tolist()[0] == low
    assert multiples.tolist()[1] == ((-low * 5 + low) % (high - low + 1)) + low  # 5 * 2^(bits - 1), wrapped
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        evaluate(lambda x, y: torch.div(x, y * 0, rounding_mode="trunc"), x, y)


@pytest.mark.parametrize("numerics", ["fused", "eager"])
@pytest.mark.parametrize(
    ("function", "want"),
    [
        (lambda v, t: torch.where(t, v, t), [0, 1, 1, 0]),
        (lambda v, t: torch.where(t, v, False), [0, 1, 1, 0]),
        (lambda v, t: torch.where(t, v, t)[::3], [0, 0]),
        (lambda v, t: torch.cat((v, t)), [0, 1, 1, 1, 1, 1, 1, 0]),
        (lambda v, t: torch.stack((t, v)), [[1, 1, 1, 0], [0, 1, 1, 1]]),
    ],
)
def test_computed_bools_are_0_or_1(function: Callable[..., Any], want: list[Any], numerics: Numerics) -> None:
    v, t = torch.tensor([0, 1, 4, 254], dtype=torch.uint8).view(boolean), torch.tensor([True, True, True, False])
    got = wl.fuse(function, numerics=numerics)(v, t)
    assert got.dtype == boolean
    assert got.contiguous().view(torch.uint8).tolist() == want
    assert wl.fuse(lambda v: v)(v) is v
