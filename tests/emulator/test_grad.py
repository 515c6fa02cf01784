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
from wideload.derivatives import RULES
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
        plans = plan_call(
            op.expr,
            form.layouts,
            tensors,
            form.outputs,
            form.device,
            numerics=op.numerics,
            fast_math=False,
        )
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


def assert_gradients(f: Any, function: Callable[..., Any], tensors: Sequence[torch.Tensor], num_wanted: int, grad: torch.Tensor) -> None:
    """The gradients of the first tensors are those of ``function`` in double, to a few units in the last place of each dtype."""
    got = [tensor.detach().requires_grad_(at < num_wanted) for at, tensor in enumerate(tensors)]
    want = [tensor.detach().double().requires_grad_(at < num_wanted) for at, tensor in enumerate(tensors)]
    firsts = torch.autograd.grad(f(*got), got[:num_wanted], grad)
    wants = torch.autograd.grad(function(*want), want[:num_wanted], grad.double())
    for x, first, y in zip(got, firsts, wants, strict=False):
        assert (first.dtype, first.shape, first.stride()) == (x.dtype, x.shape, torch.empty_like(x).stride())
        bound = {bf16: 2**-7, f16: 2**-9, f32: 1e-5, f64: 1e-12}[x.dtype]
        torch.testing.assert_close(first.double(), y, rtol=bound, atol=bound)


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


R = torch.Generator().manual_seed(0)


def rand(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(*shape, generator=R).to(dtype)


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor], int, torch.Tensor]] = {
    "swiglu": (lambda g, u: F.silu(g) * u, [rand(5, 64, dtype=bf16), rand(5, 64, dtype=bf16)], 2, rand(5, 64, dtype=bf16)),
    "packed swiglu": (packed_swiglu, [rand(5, 64, dtype=bf16)], 1, rand(5, 32, dtype=bf16)),
    "bias gelu": (bias_gelu, [rand(7, 40, dtype=bf16), rand(40, dtype=bf16)], 2, rand(7, 40, dtype=bf16)),
    "rotate half": (rotate_half, [rand(2, 6, 3, 16), rand(6, 1, 16), rand(6, 1, 16)], 1, rand(2, 6, 3, 16)),
    "interleaved": (interleaved, [rand(6, 3, 16), rand(6, 1, 8), rand(6, 1, 8)], 1, rand(6, 3, 16)),
    "column broadcast": (lambda x, y: torch.tanh(x) * y, [rand(9, 17), rand(9, 1)], 2, rand(9, 17)),
    "part of a tensor": (lambda x: x[:, 3:11].exp(), [rand(5, 16)], 1, rand(5, 8)),
    "transposed gradient": (lambda x, y: x * y, [rand(9, 17), rand(9, 17)], 2, rand(17, 9).t()),
    "expanded gradient": (lambda x, y: (x * y).sigmoid(), [rand(9, 17), rand(9, 17)], 2, rand(1, 1).expand(9, 17)),
    "a slice of a wider gradient": (lambda x, y: torch.maximum(x, y), [rand(9, 17), rand(9, 17)], 2, rand(9, 40)[:, 3:20]),
    "mixed dtypes": (lambda x, y: x * y.exp() + x.to(f16), [rand(9, 16, dtype=bf16), rand(9, 16)], 2, rand(9, 16)),
    "complex": (lambda x, y: torch.complex(x, y).exp().abs(), [rand(9, 16), rand(9, 16)], 2, rand(9, 16)),
}


@pytest.mark.parametrize("case", CASES)
def test_backward_kernels(launched: Launched, case: str) -> None:
    function, tensors, num_wanted, grad = CASES[case]
    assert_gradients(wl.fuse(function, name="f"), function, tensors, num_wanted, grad)
    kernels = 3 if case == "part of a tensor" else 1  # what lies before it, it, and what lies behind it
    assert launched == [("f", 1), ("f_backward", kernels)]


def test_dropout_and_second_derivatives(launched: Launched) -> None:
    """The mask is that of the forward, in each of three kernels."""
    x = rand(9, 40, dtype=f64).requires_grad_()
    y = wl.fuse(lambda x: F.dropout(x.sin(), 0.25), name="f")(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    kept = y != 0
    assert 200 < kept.sum() < 320
    torch.testing.assert_close(first, torch.where(kept, x.cos() / 0.75, 0.0))
    torch.testing.assert_close(second, torch.where(kept, -x.sin() / 0.75, 0.0).detach())
    assert launched == [("f", 1), ("f_backward", 1), ("f_backward_backward", 1)]


def test_eager_numerics(launched: Launched) -> None:
    """Rounded where torch rounds: most gradients are the very numbers of torch's bf16 operators."""
    functions: list[Callable[..., Any]] = [
        lambda x, y: torch.tanh(x) * y,
        lambda x, y: (x + y).exp() * x - y,
        lambda x, y: torch.where(x > y, x * 3, F.relu(y) / 3),
    ]
    x, y = rand(9, 40, dtype=bf16), rand(9, 40, dtype=bf16)
    same: dict[str, list[float]] = {"eager": [], "fused": []}
    for function in functions:
        wanted = [tensor.clone().requires_grad_() for tensor in (x, y)]
        want = torch.autograd.grad(function(*wanted), wanted, x * y)
        for numerics, equal in same.items():
            leaves = [tensor.clone().requires_grad_() for tensor in (x, y)]
            f = wl.fuse(function, numerics="eager" if numerics == "eager" else "fused")
            for one, other in zip(torch.autograd.grad(f(*leaves), leaves, x * y), want, strict=True):
                equal.append((one == other).double().mean().item())
    assert min(same["eager"]) > 0.98
    assert min(same["fused"]) < 0.9


def test_a_gradient_that_is_still_to_be_conjugated(launched: Launched) -> None:
    z = torch.randn(4, 5, dtype=torch.complex64, generator=R).requires_grad_()
    grad = torch.randn(4, 5, dtype=torch.complex64, generator=R)
    (got,) = torch.autograd.grad(wl.fuse(lambda z: z.exp() * z)(z), z, grad.conj())
    plain = z.detach().requires_grad_()
    torch.testing.assert_close(got, torch.autograd.grad(plain.exp() * plain, plain, grad.conj().resolve_conj())[0])
    assert len(launched) == 2


def test_a_wrong_kernel_is_found(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a rule without its last term."""
    monkeypatch.setitem(RULES, "silu", {"input": lambda g, input: g * input.sigmoid()})
    function, tensors, num_wanted, grad = CASES["swiglu"]
    with pytest.raises(AssertionError, match="not close"):
        assert_gradients(wl.fuse(function), function, tensors, num_wanted, grad)
