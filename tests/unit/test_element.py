"""The element function: inlined where it is short, held once and called where it is long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from wideload.fused import FusedFunction


def many_functions(x: Any) -> Any:
    """Seven functions of a maths library: 112 over the 16 elements of a thread that takes bytes."""
    y = x.float()
    return (y.log1p() + y.asinh() + y.sinh().atan() + y.erf() + y.cos() + y.sqrt().exp2()).to(torch.uint8)


def qualifier(f: FusedFunction, x: torch.Tensor) -> str:
    (line,) = [line for line in f.plan(x, target="h200").source.splitlines() if "_element(" in line and "void" in line]
    return line.split()[0]


def repeated(function: Callable[[Any], Any], count: int) -> FusedFunction:
    def f(x: Any) -> Any:
        for _ in range(count):
            x = function(x)
        return x

    return wl.fuse(f)


@pytest.mark.parametrize(
    ("function", "dtype", "most"),
    [(torch.log1p, torch.float32, 12), (torch.log1p, torch.bfloat16, 6), (torch.log1p, torch.float64, 8), (torch.remainder, torch.int8, 3)],
)
def test_a_long_one_is_called(function: Callable[..., Any], dtype: torch.dtype, most: int) -> None:
    one = (lambda x: function(x, 7)) if function is torch.remainder else function
    x = torch.ones(64, dtype=dtype)
    assert qualifier(repeated(one, most), x) == "DEVICE"
    assert qualifier(repeated(one, most + 1), x) == "FUNCTION"


def test_arithmetic_and_cheap_forms_are_inlined_however_many() -> None:
    assert qualifier(repeated(lambda x: x * x + 1, 40), torch.ones(64, dtype=torch.uint8)) == "DEVICE"
    assert qualifier(repeated(torch.nn.functional.silu, 10), torch.ones(64, dtype=torch.bfloat16)) == "DEVICE"


def test_the_compiler_holds_a_called_one_once() -> None:
    plan = wl.fuse(many_functions).plan(torch.ones(64, dtype=torch.uint8), target="h200")
    assert plan.ptx.count("many_functions_element") >= 17  # its definition and 16 calls
    assert len(plan.cubin) < 100_000  # inlined, 200 kB
    assert plan.spill_bytes == 0


def test_a_called_one_computes_the_same() -> None:
    f = wl.fuse(many_functions)
    x = torch.arange(90, dtype=torch.uint8)
    got, want = run_emulated(f, x).int(), f.reference(x).int()
    assert int((got - want).abs().max()) <= 1  # a step where a sum lies next to a whole number
    assert qualifier(f, x) == "FUNCTION"
