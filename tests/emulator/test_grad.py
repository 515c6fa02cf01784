"""Backward kernels' own text, run on the CPU: the gradients of what people fuse against torch's autograd on the plain function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator.emulated import behind
from tests.emulator.emulator import build, run_on
from wideload import torch_op
from wideload.emit.kernel import emit_kernel
from wideload.execute import kernel_arguments, plan_call

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Launched = list[tuple[str, int]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Every operation of autograd runs its kernels in the emulator; the names of expressions, and their numbers of kernels."""
    names: Launched = []

    def run(form: Any, tensors: Sequence[torch.Tensor], scalars: tuple[Any, ...], seed: torch.Tensor | None) -> list[torch.Tensor]:
        op, operands = form.op, [*tensors] if seed is None else [*tensors, seed]
        outs = [torch.full(o.layout.shape, 77, dtype=o.dtype).as_strided(o.layout.shape, o.layout.strides) for o in form.outputs]
        plans = plan_call(op.expr, form.layouts, tensors, form.outputs, form.device, numerics="fused", fast_math=False, is_in_place=False)
        for plan in plans:
            arguments = kernel_arguments(plan, operands, outs, scalars, behind)
            places = zip(plan.targets, plan.target_layouts, strict=True)
            written = [behind(outs[out], offset).as_strided(layout.shape, layout.strides) for (out, offset), layout in places]
            source = emit_kernel(plan.program, plan.variant)
            run_on(build(source), plan.name, (plan.grid, 1, 1), (plan.variant.threads, 1, 1), arguments, outputs=written, approx="exact")
        names.append((op.expr.name, len(plans)))
        return outs

    monkeypatch.setattr(torch_op._Form, "run", run)
    return names


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_(tensor.is_floating_point()) for tensor in tensors]


def assert_gradients(f: Any, function: Callable[..., Any], tensors: Sequence[torch.Tensor], grad: torch.Tensor, *numbers: Any) -> None:
    """The gradients of ``f`` are those of ``function`` in double, rounded: a few units in the last place of each dtype."""
    got, want = leaves(*tensors), leaves(*(t.double() if t.is_floating_point() else t for t in tensors))
    f(*got, *numbers).backward(grad)
    function(*want, *numbers).backward(grad.double())
    for x, y in zip(got, want, strict=True):
        if x.requires_grad:
            assert x.grad is not None
            assert y.grad is not None
            assert (x.grad.dtype, x.grad.shape) == (x.dtype, x.shape)
            bound = {bf16: 2**-7, f16: 2**-9, f32: 1e-5, f64: 1e-12}[x.dtype]
            torch.testing.assert_close(x.grad.double(), y.grad, rtol=bound, atol=bound)


def packed_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def rotate_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def interleaved(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def scaled(x: torch.Tensor, weight: torch.Tensor, s: float) -> torch.Tensor:
    return x * weight * s + x.t()[0]


R = torch.Generator().manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(*shape, generator=R).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], torch.Tensor, int]] = {
    "swiglu": (lambda g, u: F.silu(g) * u, [rand(5, 64, dtype=bf16), rand(5, 64, dtype=bf16)], rand(5, 64, dtype=bf16), 1),
    "packed swiglu": (packed_swiglu, [rand(5, 64, dtype=bf16)], rand(5, 32, dtype=bf16), 1),
    "bias gelu": (bias_gelu, [rand(7, 40, dtype=bf16), rand(40, dtype=bf16)], rand(7, 40, dtype=bf16), 1),
    "rotate half": (rotate_half, [rand(2, 6, 3, 16), rand(6, 1, 16), rand(6, 1, 16)], rand(2, 6, 3, 16), 1),
    "interleaved": (interleaved, [rand(6, 3, 16), rand(6, 1, 8), rand(6, 1, 8)], rand(6, 3, 16), 1),
    "column broadcast": (lambda x, y: torch.tanh(x) * y, [rand(9, 17), rand(9, 1)], rand(9, 17), 1),
    "transposed gradient": (lambda x, y: x * y, [rand(9, 17), rand(9, 17)], rand(17, 9).t(), 1),
    "expanded gradient": (lambda x, y: (x * y).sigmoid(), [rand(9, 17), rand(9, 17)], rand(1, 1).expand(9, 17), 1),
    "mixed dtypes": (lambda x, y: x * y.exp() + x.to(f16), [rand(9, 16, dtype=bf16), rand(9, 16)], rand(9, 16), 1),
}


@pytest.mark.parametrize("case", CASES)
def test_backward_kernels(launched: Launched, case: str) -> None:
    function, tensors, grad, num_kernels = CASES[case]
    assert_gradients(wl.fuse(function, name="f"), function, tensors, grad)
    print(launched)
    assert launched[-1] == ("f_backward", num_kernels)
