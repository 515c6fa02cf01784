"""The modules beside torch's own operators: values and gradients on two inputs and packed ones, dropout's mask, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.nn import dropped, packed_geglu, packed_reglu, packed_swiglu

f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16

GATED: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[torch.Tensor], torch.Tensor]]] = {
    "SwiGLU": (wl.nn.SwiGLU, F.silu),
    "GEGLU": (wl.nn.GEGLU, F.gelu),
    "GEGLU tanh": (lambda: wl.nn.GEGLU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
    "ReGLU": (wl.nn.ReGLU, torch.relu),
}


def draw(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)


def assert_rounded_once(result: torch.Tensor, exact: torch.Tensor) -> None:
    """Within half a step of a half, subnormal ones included, or within some steps in the wider types, of what fp64 gives."""
    steps, info = {f32: 4.0, f64: 4.0}.get(result.dtype, 0.51), torch.finfo(result.dtype)
    bound = steps * info.eps * exact.abs().clamp(min=info.smallest_normal) + 1e-12
    assert bool(((result.double() - exact).abs() <= bound).all())


@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16])
@pytest.mark.parametrize("name", GATED)
def test_gates_are_what_torch_computes(name: str, dtype: torch.dtype) -> None:
    make, act = GATED[name]
    gate, up = draw(5, 7, dtype=dtype), draw(5, 7, dtype=dtype, seed=1)
    exact = act(gate.double()) * up.double()
    for result in (make()(gate, up), make()(torch.cat((gate, up), -1))):
        assert result.dtype == dtype
        assert_rounded_once(result, exact)


@pytest.mark.parametrize("name", GATED)
def test_gates_have_torch_s_gradients(name: str) -> None:
    make, act = GATED[name]
    gate, up, grad = (draw(4, 6, dtype=f64, seed=seed).requires_grad_(seed < 2) for seed in range(3))
    expected = torch.autograd.grad(act(gate) * up, (gate, up), grad)
    packed = torch.cat((gate, up), -1).detach().requires_grad_()
    torch.testing.assert_close(torch.autograd.grad(make()(gate, up), (gate, up), grad), expected)
    torch.testing.assert_close(torch.autograd.grad(make()(packed), packed, grad)[0], torch.cat(expected, -1))


@pytest.mark.parametrize("op", [packed_swiglu, packed_geglu, packed_reglu])
def test_packed_gates_are_one_kernel_both_ways(op: wl.FusedFunction) -> None:
    x = torch.empty(64, 8192, dtype=bf16, device="meta")
    assert len(op.plan(x, target="h200").kernels) == 1
    assert len(op.plan_backward(x, target="h200").kernels) == 1


def test_inputs_of_a_gate_may_broadcast_and_promote() -> None:
    gate, up = draw(3, 1, dtype=bf16), draw(4)
    torch.testing.assert_close(wl.nn.SwiGLU()(gate, up), F.silu(gate.float()) * up)


@pytest.mark.parametrize("shape", [(3,), (2, 5), ()])
def test_an_odd_packed_input_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(wl.LayoutError, match="SwiGLU got one tensor with a last dim of"):
        wl.nn.SwiGLU()(torch.ones(shape))


def test_empty_inputs_of_a_gate() -> None:
    assert wl.nn.SwiGLU()(torch.ones(0, 4)).shape == (0, 2)
    assert wl.nn.SwiGLU()(torch.ones(3, 0)).shape == (3, 0)


def test_gates_have_no_state_and_show_their_options() -> None:
    assert all(not make().state_dict() for make, _ in GATED.values())
    assert repr(wl.nn.GEGLU("tanh")) == "GEGLU(approximate='tanh')"


# ---- dropout


def test_dropout_drops_its_share_and_scales_the_rest() -> None:
    torch.manual_seed(0)
    x, n = draw(200, 500), 100_000
    y = wl.nn.Dropout(0.3)(x)
    is_kept = y != 0
    torch.testing.assert_close(y[is_kept], x[is_kept] / 0.7)
    assert abs(int(is_kept.sum()) - 0.7 * n) < 5 * (n * 0.3 * 0.7) ** 0.5


def test_dropout_draws_anew_and_by_the_seed() -> None:
    module, x = wl.nn.Dropout(0.5), torch.ones(64, 64)
    torch.manual_seed(3)
    first, second = module(x), module(x)
    torch.manual_seed(3)
    assert torch.equal(module(x), first)
    assert not torch.equal(first, second)


def test_the_gradient_of_dropout_has_the_mask_of_its_forward() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    y = wl.nn.Dropout(0.5)(x)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], y)


@pytest.mark.parametrize("module", [wl.nn.Dropout(0.5).eval(), wl.nn.Dropout(0.0)])
def test_dropout_that_drops_nothing_returns_its_input(module: torch.nn.Module) -> None:
    x = torch.ones(3)
    assert module(x) is x


def test_dropout_of_all_is_zero() -> None:
    assert torch.equal(wl.nn.Dropout(1.0)(torch.ones(5)), torch.zeros(5))


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_a_probability_outside_its_range_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        wl.nn.Dropout(p)


def test_a_changed_probability_counts() -> None:
    module, x = wl.nn.Dropout(0.5), torch.ones(100)
    module(x)
    module.p = 0.75
    assert set(module(x).tolist()) == {0.0, 4.0}


def test_a_kernel_takes_sixteen_bits_an_element() -> None:
    assert "16 bits an element" in str(dropped.plan(torch.empty(4096, dtype=bf16, device="meta"), 0.1, target="h200"))


# ---- both

MODULES = [wl.nn.SwiGLU(), wl.nn.GEGLU("tanh"), wl.nn.ReGLU(), wl.nn.Dropout(0.25)]


def run(module: torch.nn.Module) -> torch.Tensor:
    torch.manual_seed(1)
    result: torch.Tensor = module(draw(6, 8))
    return result


@pytest.mark.parametrize("module", MODULES, ids=repr)
@pytest.mark.parametrize("through", [copy.deepcopy, copy.copy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_and_pickles_compute_the_same(module: torch.nn.Module, through: Callable[[Any], Any]) -> None:
    other = through(module)
    assert type(other) is type(module)
    assert torch.equal(run(other), run(module))


@pytest.mark.parametrize("module", MODULES[:3], ids=repr)
def test_modules_are_compiled_without_a_break(module: torch.nn.Module) -> None:
    torch.testing.assert_close(run(torch.compile(module, backend="eager", fullgraph=True)), run(module))
