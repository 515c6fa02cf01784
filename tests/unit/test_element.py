"""The element function: inlined where it is short, held once and called where it is long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated, run_lists_emulated
from wideload.emit.kernel import emit_kernel
from wideload.foreach import find_listed
from wideload.fused import FusedFunction
from wideload.lists import split_lists


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


# ---- what is the same for a block


def texts_of(function: Callable[..., Any], *args: Any) -> tuple[str, str]:
    """The element function of lists, and what a block computes once; the latter is empty where a thread computes all."""
    f = wl.fuse(function, name="f")
    lists = split_lists("f", (), args, {}, None)
    call = find_listed(f, lists, f._bind(*lists.at(0)))
    assert call is not None
    assert call.listed.plans
    (plan,) = call.listed.plans
    source = emit_kernel(plan.program, plan.variant)
    element, _, once = source[source.index("void f_element(") : source.index("struct f_lists_data")].partition("void f_uniform(")
    assert ("__syncthreads" in source) is bool(once)
    return element, once


def test_a_block_computes_once_what_its_elements_share() -> None:
    xs, steps = [torch.ones(8), torch.ones(9)], [torch.tensor(1.0), torch.tensor(2.0)]
    element, once = texts_of(lambda x, s, k: x * ((s + 1) * k).exp() + s, xs, steps, 0.5)
    assert ("::exp" in once, "::exp" in element) == (True, False)
    assert once.count("_once = ") == 1  # neither the sum, which the exponential alone reads, nor the operand
    assert "const float exp" in element[: element.index("{")]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, s: x * (s + 1) / s,  # no function
        lambda x, s: (x * s).exp(),  # of each element
        lambda x, s: x * (s + wl.linear_index() * x).exp(),
        lambda x, s: x + torch.complex(s, s).exp().abs(),  # complex numbers need a constructor, which shared memory does not run
    ],
)
def test_threads_compute_what_is_cheap_or_their_own(function: Callable[..., Any]) -> None:
    _, once = texts_of(function, [torch.ones(8)], [torch.tensor(1.0)])
    assert not once


def test_names_that_an_expression_shares_with_functions_are_no_operands() -> None:
    """``exp`` is a function, a value made by it, and the kernel."""

    def exp(x: Any, s: Any, log: float) -> Any:
        sqrt = (s * log).exp()
        return x * sqrt.sqrt(), x + sqrt.exp()

    f, xs, ss = wl.fuse(exp), [torch.ones(5000), torch.rand(3)], [torch.tensor(2.0), torch.tensor(3.0)]
    got, launches = run_lists_emulated(f, xs, ss, 0.5)
    assert launches == 1
    for results, x, s in zip(got, xs, ss, strict=True):
        for result, want in zip(results, exp(x, s, 0.5), strict=True):
            torch.testing.assert_close(result, want)
