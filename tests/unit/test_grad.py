"""The expression of gradients: what it computes, reads and writes. Its values are checked in test_torch_op.py and test_derivatives.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.expr import Apply, Cast, Draw, Joined, Load
from wideload.grad import Gradient, RowSum, Term, derive_gradient, missing_rules
from wideload.replay import NodeLayout, replay_layout
from wideload.trace import NumberArg, TensorArg, trace_function
from wideload.views import ViewStep

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64


def derive(
    fn: Callable[..., Any],
    *shapes: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...] | None = None,
    wanted: tuple[int, ...] | None = None,
    present: tuple[int, ...] | None = None,
    numbers: tuple[str, ...] = (),
    sums_rows: bool = False,
) -> Gradient:
    types = dtypes or (f32,) * len(shapes)
    args = [TensorArg("xyzw"[k], dtype, shape, torch.device("cpu")) for k, (shape, dtype) in enumerate(zip(shapes, types, strict=True))]
    expr = trace_function(fn, "f", (*args, *(NumberArg(name, float) for name in numbers)), {}).expr
    layouts = replay_layout(expr, [NodeLayout(shape, torch.empty(shape).stride()) for shape in shapes], "cuda")
    shapes_of = [layout.shape for layout in layouts]
    return derive_gradient(
        expr,
        shapes_of,
        range(len(shapes)) if wanted is None else wanted,
        range(len(expr.outputs)) if present is None else present,
        sums_rows=sums_rows,
    )


def rows(gradient: Gradient) -> list[str]:
    return [node.op.name for node in gradient.expr.nodes if isinstance(node, Apply)]


def test_swiglu_as_text() -> None:
    gradient = derive(lambda gate, up: F.silu(gate) * up, (4, 8), (4, 8), dtypes=(bf16, bf16))
    want = """\
f_backward(x: bf16[2d], y: bf16[2d], grad: bf16[2d])
  %0 = load grad
  %1 = load x
  %2 = load y
  %3 = silu(%1): bf16
  %4 = mul(%0, %2): bf16
  %5 = mul(%0, %3): bf16
  %6 = sigmoid(%1): bf16
  %7 = 1
  %8 = sub(%7, %6): bf16
  %9 = mul(%1, %8): bf16
  %10 = add(%9, %7): bf16
  %11 = mul(%6, %10): bf16
  %12 = mul(%4, %11): bf16
  return %12, %5"""
    assert str(gradient.expr) == want
    assert (gradient.inputs, gradient.incoming, gradient.shaped) == ((0, 1), (0,), (0, 1))


def test_nothing_is_computed_or_read_that_no_one_needs() -> None:
    def f(x: Any, y: Any) -> Any:
        return x + torch.sin(y), torch.exp(x)

    assert derive(f, (3,), (3,), wanted=(0,), present=(0,)).inputs == ()
    assert rows(derive(f, (3,), (3,), wanted=(0,), present=(0,))) == []
    assert rows(derive(f, (3,), (3,), wanted=(1,))) == ["cos", "mul"]
    assert derive(f, (3,), (3,), wanted=(1,)).inputs == (1,)
    assert rows(derive(f, (3,), (3,), wanted=(0,))) == ["exp", "mul", "add"]
    both = derive(lambda x, y: torch.tanh(x * y), (3,), (3,))
    assert sorted(rows(both)) == sorted(["mul", "tanh", "mul", "sub", "mul", "mul", "mul"])  # tanh once, g * (1 - t * t) once
    assert derive(lambda x, y: torch.where(x > 0, y, 0.0), (3,), (3,), wanted=(1,)).inputs == (0,)


def test_a_gradient_that_arrives_is_handed_on_as_it_is() -> None:
    gradient = derive(lambda x, y: x - y, (3,), (3,))
    assert isinstance(gradient.expr.nodes[gradient.expr.outputs[0]], Load)
    assert rows(gradient) == ["neg"]


def test_shapes_are_taken_from_the_gradient_not_from_an_input() -> None:
    dropped = derive(lambda x: F.dropout(x, 0.25), (4, 8))
    assert dropped.inputs == ()
    (draw,) = (node for node in dropped.expr.nodes if isinstance(node, Draw))
    assert (draw.stream, draw.bits) == (0, 16)
    assert derive(lambda x: x * wl.index(0), (4, 8)).inputs == ()
    assert derive(lambda x: x * torch.ones_like(x), (4, 8)).inputs == ()


def test_parts_of_one_input_become_one_concatenation_without_zeros() -> None:
    def packed(x: Any) -> Any:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    gradient = derive(packed, (4, 8))
    assert isinstance(gradient.expr.nodes[gradient.expr.outputs[0]], Joined)
    assert not [row for row in rows(gradient) if row.startswith("full_like")]

    def heads(x: Any) -> Any:
        q, k, v = x.unflatten(-1, (3, 4)).unbind(-2)
        return q * k + v

    gradient = derive(heads, (5, 12))
    assert not [row for row in rows(gradient) if row.startswith("full_like")]
    assert rows(gradient) == ["mul", "mul"]

    def rotated(x: Any) -> Any:
        return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)

    assert rows(derive(rotated, (5, 12))) == ["neg"]


def test_what_no_part_covers_is_zero_and_overlaps_are_added() -> None:
    assert sorted(rows(derive(lambda x: x[1:3] * 2, (5,)))) == ["full_like_f32", "full_like_f32", "mul"]
    assert rows(derive(lambda x: x[1:] + x[:-1], (5,))) == ["add"]  # ends once, the middle twice
    every_third = derive(lambda x: x[1::3], (9,))
    assert "full_like_f32" in rows(every_third)
    assert all(node.operand == 0 for node in every_third.expr.nodes if isinstance(node, Load))  # the gradient: no input is read


def test_sums_of_broadcast_inputs() -> None:
    gradient = derive(lambda x, y: torch.tanh(x + y), (6, 8), (8,), dtypes=(bf16, bf16))
    x, y = gradient.gradients
    assert x.terms == (Term(0, (), 0),)
    assert y.terms == (Term(0, (), 1),)  # of what x receives anyway
    assert len(gradient.expr.outputs) == 1

    gradient = derive(lambda x, y: torch.tanh(x) * y, (6, 8), (6, 1), dtypes=(bf16, bf16))
    (term,) = gradient.gradients[1].terms
    assert term == Term(1, (ViewStep("permute", (1, 0)), ViewStep("unsqueeze", (2,))), 1)
    assert gradient.shaped == (0, None)
    summed = gradient.expr.nodes[gradient.expr.outputs[1]]
    assert isinstance(summed, Cast)
    assert (summed.dtype, summed.ndim) == (f32, 2)  # unrounded, in the order of the result

    several = derive(lambda x, y: (x * y, y.exp()), (6, 8), (8,))
    assert [term.num_summed for term in several.gradients[1].terms] == [0, 1]


def test_halves_stay_in_the_wider_type_where_types_meet() -> None:
    gradient = derive(lambda x, y: torch.sin(x) * y, (3,), (3,), dtypes=(bf16, f32), wanted=(0,))
    casts = [(node.dtype, number in gradient.expr.outputs) for number, node in enumerate(gradient.expr.nodes) if isinstance(node, Cast)]
    assert casts == [(bf16, True)]  # once, where it is stored
    gradient = derive(lambda x: x.to(f64).exp(), (3,), dtypes=(f32,))
    assert [node.dtype for node in gradient.expr.nodes if isinstance(node, Cast)] == [f64, f32]


def test_runtime_numbers_stay_runtime_numbers() -> None:
    gradient = derive(lambda x, p: x**p, (3,), numbers=("p",))
    assert "number _lowered(p): float" in str(gradient.expr)
    literal = derive(lambda x: x**3, (3,))
    assert "2" in str(literal.expr)
    assert rows(derive(lambda x: x**2, (3,))) == ["mul", "mul"]
    assert derive(lambda x: x**0, (3,)).gradients[0].terms == ()


def test_zero_is_not_none() -> None:
    gradient = derive(lambda x, y: x.floor() + y.detach(), (3,), (3,))
    assert [(of.operand, of.terms) for of in gradient.gradients] == [(0, ())]


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: torch.heaviside(x, x), ("heaviside",)),
        (lambda x: torch.frexp(x).mantissa, ("frexp_mantissa",)),
        (lambda x: x.unfold(0, 2, 1) * 2, ("unfold",)),
        (lambda x: x.expand(3, 3).diagonal() * 2, ("diagonal",)),
        (lambda x: x.to(torch.float8_e4m3fn).float() * 2, ("e4m3fn",)),
    ],
)
def test_what_has_no_rule(fn: Callable[..., Any], what: tuple[str, ...]) -> None:
    expr = trace_function(fn, "f", (TensorArg("x", f32, (3,), torch.device("cpu")),), {}).expr
    assert missing_rules(expr, [0]) == what
    assert missing_rules(expr, []) == ()
    with pytest.raises(wl.GradError, match=f"no rule for {what[0]}"):
        derive(fn, (3,))


# ---- sums in kernels


def test_what_kernels_add_up_is_the_unrounded_value_itself() -> None:
    """The gradient of a bias is that of the input, stored and added up; that of a scale is added up alone, without a cast."""
    bias = derive(lambda x, b: torch.tanh(x + b), (4, 6, 8), (8,), dtypes=(bf16, bf16), sums_rows=True)
    assert bias.expr.outputs[0] == bias.expr.outputs[1]
    assert bias.sums == (None, RowSum((8,), bf16))
    assert bias.shaped == (0, None)
    assert [of.terms for of in bias.gradients] == [(Term(0, (), 0),), (Term(1, (), 0),)]
    scale = derive(lambda x, w: x * w, (4, 6, 8), (6, 8), dtypes=(bf16, bf16), wanted=(1,), sums_rows=True)
    assert (rows(scale), scale.sums) == (["mul"], (RowSum((6, 8), bf16),))
    assert not any(isinstance(node, Cast) for node in scale.expr.nodes)
    stored = derive(lambda x, w: x * w, (4, 6, 8), (6, 8), dtypes=(bf16, bf16), wanted=(1,))
    assert stored.sums == (None,)
    assert any(isinstance(node, Cast) for node in stored.expr.nodes)


def test_of_a_gradient_of_several_parts_each_sum_is_wide() -> None:
    parts = derive(lambda x, w: (x * w, w * 2), (5, 8), (8,), dtypes=(bf16, bf16), wanted=(1,), sums_rows=True)
    assert parts.sums == (None, RowSum((8,), f32))
    mixed = derive(lambda x, b: x + b, (5, 8), (8,), dtypes=(f32, bf16), wanted=(1,), sums_rows=True)
    assert mixed.sums == (RowSum((8,), bf16),)


@pytest.mark.parametrize(
    ("shapes", "columns"),
    [
        (((5, 8), (8,)), (8,)),
        (((5, 8), (1, 8)), (1, 8)),
        (((2, 5, 8), (5, 8)), (5, 8)),
        (((2, 5, 1, 8), (1, 8)), (1, 8)),
        (((5, 8), (5, 1)), None),
        (((2, 5, 8), (2, 1, 8)), None),
        (((5, 8), ()), None),
        (((5, 8), (1, 1)), None),
    ],
)
def test_rows_are_added_up_where_the_last_dims_stay(shapes: tuple[tuple[int, ...], ...], columns: tuple[int, ...] | None) -> None:
    gradient = derive(lambda x, y: x * y, *shapes, wanted=(1,), sums_rows=True)
    assert [of and of.shape for of in gradient.sums] == [columns]
    (term,) = gradient.gradients[0].terms
    assert (term.num_summed == 0) == (columns is not None)


def test_rows_of_one_width_of_real_numbers_are_added_up() -> None:
    """Of two widths, the first: one kernel has one."""
    gradient = derive(lambda x, y, z: x * y * z, (4, 5, 8), (8,), (5, 8), wanted=(1, 2), sums_rows=True)
    gradient = derive(lambda x, y: (x * y).abs(), (5, 8), (8,), dtypes=(torch.complex64,) * 2, wanted=(1,), sums_rows=True)
    assert gradient.sums == (None,)  # sums of complex numbers are torch's
