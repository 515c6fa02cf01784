"""Fused functions under torch.compile on a GPU: their own kernels, forward and backward, seeds, CUDA graphs, layouts of fake results."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.unit.test_torch_library import BACKENDS, affine, drop, gradients, mean_scaled, operators, power, residual, rope, swiglu
from wideload import torch_library

pytestmark = [  # Inductor's own: a graph to make a pool, and its autotuning
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

bf16, f32 = torch.bfloat16, torch.float32


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def kernels(run: Callable[[], Any]) -> list[str]:
    """The names of the kernels that ``run`` launches, when everything has been compiled."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [bf16, f32])
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (swiglu, [(64, 96), (96,)]),
        (residual, [(64, 96), (64, 1)]),
        (lambda x, y: affine(x, shift=y, scale=0.5, mode="div"), [(64, 96), (64, 96)]),
        (rope, [(2, 3, 8), (3, 4), (3, 4)]),
        (lambda x: power(x, 3), [(513,)]),
        (mean_scaled, [(5, 7)]),
        (swiglu, [(0, 6), (6,)]),
    ],
)
def test_compiled_is_eager_with_gradients(fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtype: torch.dtype, backend: str) -> None:
    tensors = [torch.randn(shape, device="cuda", dtype=dtype) for shape in shapes]

    def weighted(fn: Callable[..., Any]) -> list[torch.Tensor]:
        leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        result = fn(*leaves)
        weights = torch.arange(result.numel(), device="cuda", dtype=dtype).view(result.shape).cos()
        return [result.detach(), *torch.autograd.grad(result, leaves, weights)]

    have, want = weighted(torch.compile(fn, fullgraph=True, backend=backend)), weighted(fn)
    torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True, check_stride=True)


def test_what_is_compiled_launches_the_functions_kernels() -> None:
    x, y = torch.randn(2, 1024, 1024, device="cuda", dtype=bf16)
    compiled = torch.compile(lambda x, y: swiglu(x, y), fullgraph=True)
    assert kernels(lambda: compiled(x, y)) == ["swiglu_dense"]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_drawing_is_seeded_and_moves_on(mode: str) -> None:
    x = torch.ones(4096, device="cuda")
    compiled = torch.compile(lambda x: (drop(x, 0.5), drop(x, 0.5)), fullgraph=True, mode=mode)
    compiled(x), compiled(x)  # a graph is captured at the second call
    first = [tensor.clone() for tensor in compiled(x)]
    second = [tensor.clone() for tensor in compiled(x)]
    draws = [*first, *second]
    assert all(not torch.equal(a, b) for at, a in enumerate(draws) for b in draws[:at])
    if mode == "default":
        torch.manual_seed(5)
        have = compiled(x)
        torch.manual_seed(5)
        torch.testing.assert_close(have, (drop(x, 0.5), drop(x, 0.5)), rtol=0, atol=0)


def test_graphs_replay_with_new_inputs() -> None:
    compiled = torch.compile(lambda x, y: residual(swiglu(x, y), x), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x, y = torch.randn(2, 512, 512, device="cuda", dtype=bf16)
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(compiled(x, y), residual(swiglu(x, y), x), rtol=0, atol=0)


class Block(torch.nn.Module):
    """Fused functions where models keep them, between matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.sums = swiglu, [residual]
        self.gate, self.up, self.down = (torch.nn.Linear(256, 256, bias=False, device="cuda", dtype=bf16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sums[0](self.down(self.act(self.gate(x), self.up(x))), x)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_a_block_trains_in_one_graph(mode: str) -> None:
    torch.manual_seed(7)
    model = torch.nn.Sequential(Block(), Block())
    compiled, plain = torch.compile(model, fullgraph=True, mode=mode), copy.deepcopy(model)
    for _ in range(5):
        x = torch.randn(64, 256, device="cuda", dtype=bf16)
        losses = []
        for run, of in ((compiled, model), (plain, plain)):
            torch.compiler.cudagraph_mark_step_begin()
            of.zero_grad()
            loss = run(x).float().square().mean()
            loss.backward()
            losses.append(float(loss.detach()))
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter -= 0.1 * parameter.grad
        assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        assert float((mine.grad - right.grad).norm() / right.grad.norm()) < 0.02  # products that are rounded in another order


def test_out_is_written_in_place() -> None:
    x, y = torch.randn(2, 1000, device="cuda")
    want = swiglu(x, y)
    torch.compile(lambda x, y: swiglu(x, y, out=x), fullgraph=True)(x, y)
    torch.testing.assert_close(x, want, rtol=0, atol=0)


def test_operators_pass_opcheck() -> None:
    x, y = torch.randn(4, 8, device="cuda", requires_grad=True), torch.randn(8, device="cuda", requires_grad=True)
    met = operators(lambda: (swiglu(x, y) + drop(x, 0.25) + residual(x, y)).sum().backward())
    assert {func.namespace for func, _ in met} == {torch_library.NAMESPACE}
    for operator, args in met:
        is_backward = "_backward_" in operator.__name__
        given = [arg.detach() if is_backward and isinstance(arg, torch.Tensor) else arg for arg in args]
        torch.library.opcheck(operator, tuple(given))


def test_fake_results_are_laid_out_as_real_ones() -> None:
    x = torch.randn(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
    for other in (torch.randn(2, 1, 4, 5, device="cuda").expand(2, 3, 4, 5), torch.tensor(2.0), torch.randn(5, device="cuda", dtype=bf16)):
        want = swiglu(x, other)
        with FakeTensorMode() as mode:
            have = swiglu(mode.from_tensor(x), mode.from_tensor(other))
        assert (have.shape, have.stride(), have.dtype, have.device) == (want.shape, want.stride(), want.dtype, want.device)


def test_a_dispatch_mode_sees_the_operator_and_it_launches() -> None:
    x, y = torch.randn(2, 64, device="cuda")
    found: list[torch.Tensor] = []
    met = operators(lambda: found.append(swiglu(x, y)))
    assert len(met) == 1
    torch.testing.assert_close(found[0], swiglu(x, y), rtol=0, atol=0)


@pytest.mark.gpus(2)
def test_the_device_of_the_tensors_counts() -> None:
    x, y = torch.randn(2, 64, device="cuda:1")
    torch.testing.assert_close(torch.compile(lambda x, y: swiglu(x, y), fullgraph=True)(x, y), swiglu(x, y), rtol=0, atol=0)


def test_gradients_are_those_of_the_cpu() -> None:
    x, y = torch.randn(32, 48), torch.randn(48)
    want = gradients(swiglu, x, y)
    leaves = [tensor.cuda().requires_grad_() for tensor in (x, y)]
    result = torch.compile(lambda x, y: swiglu(x, y), fullgraph=True)(*leaves)
    weights = torch.arange(result.numel(), dtype=f32).view(result.shape).cos().cuda()
    have = [result.detach(), *torch.autograd.grad(result, leaves, weights)]
    torch.testing.assert_close([tensor.cpu() for tensor in have], want, rtol=1e-4, atol=1e-4)
