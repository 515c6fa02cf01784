"""Expressions: what they print, when nodes are equal, and numbers evaluated at the call."""

from __future__ import annotations

import dataclasses
import operator

import pytest
import torch

from wideload.expr import Apply, Cast, Const, Expr, HostCall, HostInput, Load, Location, Number, evaluate_host
from wideload.ops_table import OPS

X = Load(0, "x", torch.bfloat16, 2)
S = HostInput(0, "s")


def test_an_expression_prints_as_it_is_computed() -> None:
    nodes = (
        X,
        Const(2.0),
        Apply(OPS["mul"], (0, 1), torch.bfloat16, 2),
        Number(HostCall(operator.mul, (S, HostCall(operator.neg, (3,)))), float),
        Cast(2, torch.float32, 2),
        Apply(OPS["add"], (4, 3), torch.float32, 2),
    )
    assert str(Expr("f", (X, Load(1, "m", torch.bool, 0)), nodes, (5, 2))) == (
        "f(x: bf16[2d], m: bool[0d])\n"
        "  %0 = load x\n"
        "  %1 = 2.0\n"
        "  %2 = mul(%0, %1): bf16\n"
        "  %3 = number mul(s, neg(3)): float\n"
        "  %4 = cast %2: f32\n"
        "  %5 = add(%4, %3): f32\n"
        "  return %5, %2"
    )


def test_the_users_line_does_not_make_nodes_differ() -> None:
    here, there = Location("a.py", 1, "y = x + 1"), Location("b.py", 2, "z = x + 1")
    assert Apply(OPS["abs"], (0,), torch.int8, 1, here) == Apply(OPS["abs"], (0,), torch.int8, 1, there)
    assert hash(Cast(0, torch.int8, 1, here)) == hash(Cast(0, torch.int8, 1, there))
    assert Apply(OPS["abs"], (0,), torch.int8, 1) != Apply(OPS["neg"], (0,), torch.int8, 1)
    assert Apply(OPS["abs"], (0,), torch.int8, 1) != Apply(OPS["abs"], (0,), torch.int16, 1)
    assert str(here) == "a.py:1: y = x + 1"


def test_nodes_are_frozen() -> None:
    for node, field in ((X, "name"), (Const(1), "value"), (Number(S, int), "kind"), (Cast(0, torch.int8, 1), "dtype")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(node, field, None)


def test_host_arithmetic_is_evaluated_with_the_numbers_of_the_call() -> None:
    second = HostInput(1, "t")
    bias = HostCall(operator.sub, (1, HostCall(operator.pow, (S, second))))
    assert evaluate_host(bias, (0.9, 2)) == 1 - 0.9**2
    assert evaluate_host(bias, (0.5, 3)) == 0.875
    assert evaluate_host(S, (7, 8)) == 7
    assert evaluate_host(-2.5, (1,)) == -2.5
    with pytest.raises(ZeroDivisionError):
        evaluate_host(HostCall(operator.truediv, (1, S)), (0,))
