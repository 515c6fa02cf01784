"""Every rule of the table: against finite differences, first and second, and against torch's gradients at ties, zeros and infinities."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.gradcheck import GradcheckError

import wideload as wl
from wideload import derivatives
from wideload.derivatives import RULES, ZERO, parameters_of
from wideload.draws import DRAW_OPS
from wideload.grad import connected_nodes
from wideload.ops_table import OPS
from wideload.trace import TensorArg, trace_function

f64, c128 = torch.float64, torch.complex128

NUMBERS: dict[str, tuple[Any, ...]] = {
    "alpha": (0.5, -2.0),
    "beta": (1.5,),
    "decimals": (1,),
    "delta": (0.75,),
    "eps": (0.125,),
    "lambd": (0.5,),
    "max_val": (1.0,),
    "min_val": (-1.0,),
    "nan": (1.0,),
    "neginf": (-4.0,),
    "negative_slope": (0.25,),
    "number": (2.5, 0.0),
    "order": (1, 2),
    "posinf": (3.0,),
    "threshold": (0.5,),
    "value": (1, -0.5),
}
"""What stands for operands that torch takes as numbers."""

POSITIVE = frozenset({"acosh", "float_power", "log", "log10", "log1p", "log2", "pow", "rsqrt", "sqrt", "xlog1py", "xlogy"})
"""Rows that are checked by finite differences above 1 alone, the others between -0.9 and 0.9."""

UNIT = frozenset({"entr", "logit", "logit_eps", "ndtri"})
"""Rows that are checked between 0.1 and 0.9."""

FORMATS = ("channels_last", "clone_channels_last", "channels_last_3d", "clone_channels_last_3d")
SLOPES = "gelu_slope", "gelu_tanh_slope"
"""No functions of torch: what `F.gelu`'s gradients are made of, and their own are its second ones."""
ROWS = [name for name in RULES if name in OPS and name not in ("complex", "imag", "polar", "fill", *FORMATS, *SLOPES)]
NOT_IN_TORCH = {"div_floor", "div_floor_number"}
"""Rows with a gradient of zeros, which ``torch.div(rounding_mode="floor")`` has; of ``//`` torch's backward raises."""
BETTER_THAN_TORCH = {"i1", "i1e", "log_ndtr"}
"""Torch has 1/2 for a NaN, and NaN for -inf, where these have NaN and infinity."""
ROUNDED_IN_TORCH = {"hardsigmoid"}
"""Its double gradient is multiplied by 1/6 in fp32 on the CPU."""


def operands(row: str, kind: str = "real") -> Iterator[tuple[Any, ...]]:
    """The operands of a row: a number or a tuple of numbers, ``mask`` or ``tensor`` in the places of tensors."""
    choices: list[tuple[Any, ...]] = []
    for operand in OPS[row].operands:
        if operand in NUMBERS:
            choices.append(NUMBERS[operand])
        elif (row.endswith("_number") and operand in ("other", "exponent")) or (row == "rpow" and operand == "input"):
            choices.append((3.0, 2, 1, 0, -1, 0.5, 0.0, -1.5) if kind == "real" else (1.5 + 0.5j,))
        else:
            choices.append(("mask",) if operand in ("condition", "mask") else ("tensor",))
    return itertools.product(*choices)


def function_of(row: str) -> Callable[..., Any]:
    """The row's function, as users call it: of its operands alone, which its defaults are none of."""
    function = (lambda input, weight: F.prelu(input.unsqueeze(0), weight).squeeze(0)) if row == "prelu" else OPS[row].torch
    return lambda *given: function(*given)


def with_numbers(function: Callable[..., Any], given: tuple[Any, ...]) -> Callable[..., Any]:
    """``function`` of the tensors alone: the numbers are constants."""

    def of_tensors(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(next(rest) if isinstance(operand, str) else operand for operand in given))

    return of_tensors


def tensors_of(given: tuple[Any, ...], values: list[torch.Tensor]) -> list[torch.Tensor]:
    mask, rest = torch.arange(values[0].numel()) % 2 == 0, iter(values)
    return [mask if operand == "mask" else next(rest) for operand in given if isinstance(operand, str)]


def rules_used(row: str, given: tuple[Any, ...]) -> bool:
    """Whether tracing the row's function gives that row: then its rules are what is checked."""
    args = [
        TensorArg(f"x{k}", torch.bool if g == "mask" else f64, (2,), torch.device("cpu")) for k, g in enumerate(given) if isinstance(g, str)
    ]
    expr = trace_function(with_numbers(function_of(row), given), "f", tuple(args), {}).expr
    return any(getattr(node, "op", None) is OPS[row] for node in expr.nodes)


@pytest.mark.parametrize("row", ROWS)
def test_gradcheck_and_gradgradcheck(row: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for given in operands(row):
        assert rules_used(row, given), given
        if (row.startswith("div") and 0 in given) or (row == "rpow" and given[0] <= 0):
            continue  # not a number anywhere
        num_tensors = given.count("tensor")
        values = [torch.rand(3, dtype=f64, generator=generator) * 0.8 + 0.1 for _ in range(num_tensors)]
        if row in UNIT:
            values = [value.clone() for value in values]
        elif row in POSITIVE or "pow" in row:
            values = [value + 1 for value in values]
        else:
            values = [value * torch.tensor([1.0, -1.0, 1.0]) for value in values]
        args = tensors_of(given, [value.requires_grad_() for value in values])
        f = wl.fuse(with_numbers(function_of(row), given))
        if not f(*args).requires_grad:
            assert row == "detach"
            continue
        assert torch.autograd.gradcheck(f, args)
        assert torch.autograd.gradgradcheck(f, args)


POINTS = [-math.inf, -3.0, -2.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 2.0, 3.0, 7.0, 30.0, math.inf, math.nan]
"""Where formulas have ties, kinks, poles and tails: each with each."""


@pytest.mark.parametrize("row", [row for row in ROWS if row not in NOT_IN_TORCH])
def test_gradients_at_kinks_are_torchs(row: str) -> None:
    points = [point for point in POINTS if not (row in BETTER_THAN_TORCH and (point == -math.inf or math.isnan(point)))]
    for given in operands(row):
        grid = list(itertools.product(points, repeat=min(given.count("tensor"), 3)))
        values = [torch.tensor(column, dtype=f64) for column in zip(*grid, strict=True)]
        weights = torch.linspace(0.5, 1.5, len(grid), dtype=f64)
        found = []
        for function, args in ((function_of(row), given), (wl.fuse(function_of(row)), given)):  # numbers are runtime arguments here
            leaves = [value.clone().requires_grad_() for value in values]
            rest = iter(tensors_of(given, leaves))
            result = function(*(next(rest) if isinstance(operand, str) else operand for operand in args))
            found.append(torch.autograd.grad(result, leaves, weights, allow_unused=True) if result.requires_grad else None)
        want, got = found
        assert (want is None) == (got is None) == (row == "detach")
        for x, y in zip(want or (), got or (), strict=True):
            rtol = 1e-7 if row in ROUNDED_IN_TORCH else 1e-12
            torch.testing.assert_close(y, x, rtol=rtol, atol=1e-14, equal_nan=True)


def test_second_derivatives_at_kinks_are_torchs() -> None:
    """No NaN from a branch that is not taken, and 0 where torch has 0."""
    for row in ("elu", "selu", "celu", "relu", "clamp_min", "abs", "softplus", "hardtanh", "leaky_relu", "pow_number", "maximum", "sqrt"):
        for given in operands(row):
            grid = list(itertools.product(POINTS, repeat=given.count("tensor")))
            values = [torch.tensor(column, dtype=f64) for column in zip(*grid, strict=True)]
            found = []
            for function in (with_numbers(function_of(row), given), wl.fuse(with_numbers(function_of(row), given))):
                leaves = [value.clone().requires_grad_() for value in values]
                firsts = torch.autograd.grad(function(*leaves).sum(), leaves, create_graph=True)
                total = sum((first * first).nan_to_num(0, 0, 0).sum() for first in firsts)
                assert isinstance(total, torch.Tensor)
                seconds = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else [None] * len(leaves)
                found.append([torch.zeros_like(grid_) if s is None else s for s, grid_ in zip(seconds, values, strict=True)])
            for x, y in zip(*found, strict=True):
                torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-14, equal_nan=True)


COMPLEX_ROWS = ["complex", "imag", "polar"]
COMPLEX_ROWS += [row for row in ROWS if "complex" in OPS[row].cuda and row not in {"detach", "fill", "nan_to_num", "silu", *FORMATS}]
"""torch has no gradients of the complex numbers that ``silu`` and ``nan_to_num`` give."""


@pytest.mark.parametrize("row", COMPLEX_ROWS)
def test_complex_gradients_are_torchs(row: str) -> None:
    """First and second; with every tensor complex, and with the last one real."""
    generator = torch.Generator().manual_seed(1)
    dtype = f64 if row in ("complex", "polar") else c128
    (given, *_) = operands(row, "complex")
    values = [torch.rand(4, dtype=dtype, generator=generator) + 0.25 for _ in range(given.count("tensor"))]
    mixed = [*values[:-1], values[-1].abs()] if len(values) > 1 and row not in ("lerp", "logaddexp", "where") else values
    for inputs in (values, mixed):
        found = []
        for function in (function_of(row), wl.fuse(function_of(row))):
            leaves = [value.clone().requires_grad_() for value in inputs]
            rest = iter(tensors_of(given, leaves))
            result = function(*(next(rest) if isinstance(operand, str) else operand for operand in given))
            weights = torch.linspace(0.5, 1.5, 4, dtype=f64).to(result.dtype) * (1 - 0.5j if result.dtype.is_complex else 1)
            firsts = torch.autograd.grad(result, leaves, weights, create_graph=True)
            total = sum((first * first.conj() * torch.arange(1, 5)).real.sum() for first in firsts)
            assert isinstance(total, torch.Tensor)
            seconds = torch.autograd.grad(total, leaves, allow_unused=True) if total.requires_grad else ()
            found.append((firsts, [second for second in seconds if second is not None]))
        assert row in ("imag", "real") or "_Fused" in result.grad_fn.name()  # views of the argument, which torch makes
        for want, got in zip(found[0][0], found[1][0], strict=True):
            torch.testing.assert_close(got, want)
        if len(found[0][1]) == len(found[1][1]):
            for want, got in zip(found[0][1], found[1][1], strict=True):
                torch.testing.assert_close(got, want)


def test_a_wrong_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: rules with a sign, a factor or a tie wrong do not pass them."""
    for row, rule in (("sin", lambda g, input: -g * input.cos()), ("tanh", lambda g, result: g * (1 - result))):
        with monkeypatch.context() as patched:
            patched.setitem(RULES, row, {"input": rule})
            with pytest.raises(GradcheckError):
                test_gradcheck_and_gradgradcheck(row)
    with monkeypatch.context() as patched:
        patched.setitem(RULES, "relu", {"input": lambda g, result: (result < 0).where(0, g)})
        with pytest.raises(AssertionError):
            test_gradients_at_kinks_are_torchs("relu")


def test_every_row_is_accounted_for() -> None:
    """A row has rules, or its result has no gradient, or it is one of those that the docs list as torch's own affair."""
    no_gradient = {row for row, op in {**OPS, **DRAW_OPS}.items() if row not in RULES}
    whole = {
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "frexp_exponent",
        *(row for row in OPS if row.startswith(("is", "signbit", "logical", "bitwise"))),
    }
    constants = {row for row in OPS if row.startswith("full_like")} | {row for row in DRAW_OPS if row.startswith("uniform")}
    integers = {"gcd", "lcm"}
    not_in_torch = {row for row in OPS if "bessel_" in row or "_polynomial_" in row or row.startswith("nextafter")} | {
        "airy_ai",
        "heaviside",
    }
    assert no_gradient - whole - constants - integers - not_in_torch == {"frexp_mantissa", "igamma", "igammac", "zeta"}


def test_rules_name_operands_of_their_rows() -> None:
    for row, rules in RULES.items():
        op = OPS[row] if row in OPS else DRAW_OPS[row]
        assert set(rules) <= set(op.operands)
        for rule in rules.values():
            assert rule is ZERO or set(parameters_of(rule)) <= {"g", "result", *op.operands}
    with pytest.raises(KeyError, match="exponant"):
        derivatives._rule("pow", exponent=lambda g, exponant: g)


def test_only_what_torch_records_is_connected() -> None:
    def f(x: Any, y: Any, mask: Any) -> Any:
        return torch.where(mask, x, y.detach()), (x > y) * 2, torch.zeros_like(y) + x.floor()

    args = [TensorArg(name, dtype, (2,), torch.device("cpu")) for name, dtype in (("x", f64), ("y", f64), ("mask", torch.bool))]
    expr = trace_function(f, "f", tuple(args), {}).expr
    assert [[out in connected_nodes(expr, [wanted]) for out in expr.outputs] for wanted in (0, 1)] == [[True, False, True], [False] * 3]
