"""The optimizers on a GPU beside torch's own on the CPU: every argument, graphs, loss scaling, no synchronisation, several devices."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import wideload as wl
from tests.gpu.test_dense import DEVICE
from tests.unit.test_optim import CASES, SCALED, STEPS, assert_close, assert_equal, bound, draw, give, parameters, plain_lion, train

pytestmark = pytest.mark.gpu

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = ((1,), (7,), (0,), (40, 25), (4099,), (), (0, 3), (1000, 33))
GPU_ROUNDINGS = 2.0
"""Times what the CPU may differ by: kernels contract products and sums, and take functions of a unit in the last place or two."""


def on_gpu(dtype: torch.dtype, shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(p.detach().to(DEVICE)) for p in parameters(dtype, shapes)]


def host(tensors: Any) -> list[torch.Tensor]:
    return [t.detach().cpu() for t in tensors]


def give_gpu(params: Any, step: int) -> None:
    for p, g in zip(params, draw([p.shape for p in params], f32, 1000 + step), strict=True):
        p.grad = g.to(p.device, p.dtype)


def train_gpu(optimizer: Any, params: Any, steps: Any) -> None:
    for step in steps:
        give_gpu(params, step)
        optimizer.step()


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_steps_are_torchs(case: str, dtype: torch.dtype) -> None:
    name, arguments = CASES[case]
    numbers = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    theirs = parameters(dtype, SHAPES)
    train(getattr(torch.optim, name)(theirs, **numbers), theirs)
    has_tensors = any(isinstance(value, torch.Tensor) for value in numbers.values())
    for place in (DEVICE, "cpu") if has_tensors else (DEVICE,):
        given = {key: value.to(place) if isinstance(value, torch.Tensor) else value for key, value in numbers.items()}
        mine = on_gpu(dtype)
        train_gpu(getattr(wl.optim, name)(mine, **given), mine, range(STEPS))
        assert_close(host(mine), theirs, GPU_ROUNDINGS * bound(theirs))


def test_lion_is_its_definition() -> None:
    mine, theirs = on_gpu(f64), parameters(f64, SHAPES)
    moments = [torch.zeros_like(p) for p in theirs]
    ours = wl.optim.Lion(mine, lr=0.01, weight_decay=0.1)
    for step in range(STEPS):
        train_gpu(ours, mine, [step])
        give(theirs, step)
        plain_lion(theirs, moments, 0.01, 0.9, 0.99, 0.1)
    assert_close(host(mine), theirs, GPU_ROUNDINGS * bound(theirs))


@pytest.mark.parametrize("state_dtype", [None, f32], ids=str)
def test_dtypes_layouts_and_alignments_in_one_group(state_dtype: torch.dtype | None) -> None:
    def make(place: Any) -> list[torch.nn.Parameter]:
        tensors = [t.to(place) for t in draw([(5, 8), (300, 7), (40, 60), (4097,), (2049,)], f32, 3)]
        a, b, c, d, e = tensors
        views = [a.t(), b.double(), c[:, ::2], d[1:], e.to(bf16)[1:], e[:77].to(f16)]
        return [torch.nn.Parameter(view) for view in views]

    mine, theirs = make(DEVICE), make("cpu")
    # on the CPU by torch's operators
    ours, reference = (wl.optim.AdamW(params, lr=0.01, state_dtype=state_dtype) for params in (mine, theirs))
    for step in range(10):
        train_gpu(ours, mine, [step])
        give(theirs, step)
        reference.step()
    assert_close(host(mine[:4]), theirs[:4], 1e-6)
    for p, q in zip(host(mine[4:]), theirs[4:], strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=4 * torch.finfo(p.dtype).eps, atol=1e-3)


@pytest.mark.parametrize("count", [1, 500, 1000, 2000])
def test_many_parameters(count: int) -> None:
    shapes = [(k % 97 * 11,) for k in range(count)]
    mine, theirs = on_gpu(f32, shapes), parameters(f32, shapes)
    train_gpu(wl.optim.AdamW(mine), mine, range(3))
    train(torch.optim.AdamW(theirs), theirs, range(3))
    assert_close(host(mine), theirs, 1e-6)


def test_a_graph_replays_steps() -> None:
    mine, theirs = on_gpu(f32), parameters(f32, SHAPES)
    lr = torch.tensor(0.01, device=DEVICE)
    ours, reference = wl.optim.AdamW(mine, lr=lr, amsgrad=True), torch.optim.AdamW(theirs, lr=0.01, amsgrad=True)
    grads = [torch.zeros_like(p) for p in mine]
    for p, g in zip(mine, grads, strict=True):
        p.grad = g

    def feed(step: int) -> None:
        for g, new in zip(grads, draw([g.shape for g in grads], f32, 1000 + step), strict=True):
            g.copy_(new)
        give(theirs, step)

    feed(0)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        ours.step()
    torch.cuda.current_stream().wait_stream(side)
    reference.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(1, 8):
        feed(step)
        if step == 4:
            lr.fill_(0.001)
            reference.param_groups[0]["lr"] = 0.001
        graph.replay()
        reference.step()
    assert_close(host(mine), theirs, GPU_ROUNDINGS * bound(theirs))
    assert float(ours.state[mine[0]]["step"]) == 8


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lion"])
def test_a_graph_draws_anew_at_each_replay(name: str) -> None:
    p = torch.nn.Parameter(torch.ones(4096, dtype=bf16, device=DEVICE))
    p.grad = -torch.ones_like(p)
    ours = getattr(wl.optim, name)([p], lr=2**-10, stochastic_rounding=True, **({"weight_decay": 0.0} if name != "SGD" else {}))
    ours.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    seen = []
    for _ in range(2):
        p.data.fill_(1.0)
        graph.replay()
        seen.append(p.detach() > 1)
    assert not torch.equal(*seen)
    assert all(0.05 < float(s.float().mean()) < 0.95 for s in seen)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(("name", "arguments"), SCALED, ids=str)
def test_loss_scaling_without_a_synchronisation(name: str, arguments: dict[str, Any]) -> None:
    params, plain = on_gpu(f32), on_gpu(f32)
    ours, unscaled = (getattr(wl.optim, name)(p, lr=0.01, **arguments) for p in (params, plain))
    for step in range(6):
        give_gpu(params, step)
        give_gpu(plain, step)
        for p in params:
            p.grad = p.grad * 1024
        is_skipped = step in (0, 3)
        if is_skipped:
            params[3].grad[3, 5] = math.inf  # type: ignore[index]
        ours.grad_scale, ours.found_inf = torch.tensor(1024.0, device=DEVICE), torch.tensor(float(is_skipped), device=DEVICE)
        if step > 1:
            torch.cuda.set_sync_debug_mode("error")
        try:
            ours.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        if not is_skipped:
            unscaled.step()
        assert_equal(host(params), host(plain))


def test_grad_scaler() -> None:
    p, q = (torch.nn.Parameter(torch.ones(5, device=DEVICE)) for _ in range(2))
    ours, reference = wl.optim.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1, fused=True)
    scalers = torch.amp.GradScaler("cuda", init_scale=256.0), torch.amp.GradScaler("cuda", init_scale=256.0)
    for factor in (1.0, math.inf, 2.0):
        for x, optimizer, scaler in zip((p, q), (ours, reference), scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale((x * x * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        assert_close([p], [q], 1e-6)
    assert scalers[0].get_scale() == scalers[1].get_scale() == 128.0
    assert float(ours.state[p]["step"]) == float(reference.state[q]["step"]) == 2


@pytest.mark.parametrize("fused", [None, True])
def test_states_go_to_torch_and_come_from_it(fused: bool | None) -> None:
    mine, theirs = on_gpu(f32), on_gpu(f32)
    ours, reference = wl.optim.AdamW(mine, lr=0.01, fused=fused), torch.optim.AdamW(theirs, lr=0.01, fused=fused)
    train_gpu(ours, mine, range(5))
    train_gpu(reference, theirs, range(5))
    saved, want = ours.state_dict(), reference.state_dict()
    for key, state in want["state"].items():
        assert {k: (v.dtype, v.device, v.shape) for k, v in saved["state"][key].items()} == {
            k: (v.dtype, v.device, v.shape) for k, v in state.items()
        }
    reference.load_state_dict(saved)
    ours.load_state_dict(want)
    train_gpu(ours, mine, range(5, 10))
    train_gpu(reference, theirs, range(5, 10))
    assert_close(host(mine), host(theirs), 4e-6)


def test_small_updates_are_not_lost() -> None:
    torch.manual_seed(3)
    p = torch.nn.Parameter(torch.ones(200_001, dtype=bf16, device=DEVICE)[1:])
    ours = wl.optim.SGD([p], lr=2**-13, stochastic_rounding=True)
    for _ in range(64):
        p.grad = -torch.ones_like(p)
        ours.step()
    moved = float((p.detach().double() - 1).mean())
    assert abs(moved - 2**-7) < 5 * 2**-7 / math.sqrt(200_000)  # a variance of one step of bf16 at most


def test_averages_are_lerps() -> None:
    params = on_gpu(bf16)
    ema = wl.optim.EMA(params, decay=0.9, dtype=f32)
    want = [p.detach().float() for p in params]
    for step in range(10):
        for p, new in zip(params, draw(SHAPES, bf16, step), strict=True):
            p.data.copy_(new)
        ema.update()
        want = [w.lerp(p.detach().float(), 0.1) for w, p in zip(want, params, strict=True)]
    assert_close(ema.averages, want, 1e-6)


@pytest.mark.gpus(2)
def test_parameters_on_two_devices() -> None:
    mine, theirs = on_gpu(f32), parameters(f32, SHAPES)
    mine = [torch.nn.Parameter(p.detach().to(f"cuda:{k % 2}")) for k, p in enumerate(mine)]
    ours, reference = wl.optim.AdamW(mine, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(5):
        ours.grad_scale, ours.found_inf = torch.tensor(1.0, device="cuda:0"), torch.tensor(0.0, device="cuda:0")
        train_gpu(ours, mine, [step])
        give(theirs, step)
        reference.step()
    assert_close(host(mine), theirs, GPU_ROUNDINGS * bound(theirs))
