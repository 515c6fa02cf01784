"""The optimizers beside torch's own, over many steps and every argument; their states, and what is refused."""

from __future__ import annotations

import copy
import inspect
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import foreach as foreach_module
from wideload import optim as optim_module
from wideload.foreach import find_listed
from wideload.lists import split_lists
from wideload.optim import round_stochastically

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

STEPS = 100
SIZES = ((1,), (0, 3), (7,), (40, 25), ())

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "Adam": ("Adam", {}),
    "Adam amsgrad": ("Adam", {"amsgrad": True, "lr": 0.1}),
    "Adam L2": ("Adam", {"weight_decay": 0.1}),
    "Adam L2 amsgrad maximize": ("Adam", {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "Adam decoupled": ("Adam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "Adam betas": ("Adam", {"betas": (0.0, 0.5), "eps": 1e-3}),
    "Adam later beta": ("Adam", {"betas": (0.5, 0.0)}),
    "AdamW": ("AdamW", {}),
    "AdamW decay": ("AdamW", {"weight_decay": 0.5, "lr": 0.05}),
    "AdamW no decay": ("AdamW", {"weight_decay": 0}),
    "AdamW amsgrad": ("AdamW", {"amsgrad": True}),
    "AdamW maximize": ("AdamW", {"maximize": True, "betas": (0.8, 0.9)}),
    "AdamW tensor lr": ("AdamW", {"lr": torch.tensor(3e-3)}),
    "SGD": ("SGD", {"lr": 0.01}),
    "SGD int lr": ("SGD", {"lr": 1, "momentum": 0.0}),
    "SGD decay": ("SGD", {"lr": 0.01, "weight_decay": 0.1}),
    "SGD momentum": ("SGD", {"lr": 0.01, "momentum": 0.9}),
    "SGD nesterov": ("SGD", {"lr": 0.01, "momentum": 0.9, "nesterov": True}),
    "SGD dampening": ("SGD", {"lr": 0.01, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    "SGD maximize": ("SGD", {"lr": 0.01, "momentum": 0.5, "nesterov": True, "maximize": True, "weight_decay": 0.01}),
    "SGD tensor lr": ("SGD", {"lr": torch.tensor([0.01]), "momentum": 0.9}),
}


def draw(shapes: Sequence[Any], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def parameters(dtype: torch.dtype, shapes: Sequence[Any] = SIZES) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(t) for t in draw(shapes, dtype, 0)]


def give(params: Sequence[Any], step: int, dtype: torch.dtype | None = None) -> None:
    """New gradients, the same for each list of parameters."""
    for p, g in zip(params, draw([p.shape for p in params], f32, 1000 + step), strict=True):
        p.grad = g.to(dtype or p.dtype)


def train(optimizer: Any, params: Sequence[Any], steps: Any = range(STEPS)) -> None:
    for step in steps:
        give(params, step)
        optimizer.step()


def bound(params: Sequence[torch.Tensor], num_steps: int = STEPS) -> float:
    """Each step rounds a parameter by half a unit in the last place at most; the errors of many add like a random walk."""
    largest = max(float(p.detach().abs().max()) for p in params if p.numel())
    return math.sqrt(num_steps) * torch.finfo(params[0].dtype).eps / 2 * max(largest, 1.0)


def assert_close(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor], within: float) -> None:
    assert len(mine) == len(theirs)
    for position, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.numel():
            assert float((a.detach().double() - b.detach().double()).abs().max()) <= within, position


def assert_equal(mine: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> None:
    assert_close(mine, theirs, 0.0)


def both(name: str, dtype: torch.dtype = f32, shapes: Sequence[Any] = SIZES, **arguments: Any) -> tuple[Any, Any, Any, Any]:
    """Wideload's optimizer and its parameters, torch's and its."""
    mine, theirs = parameters(dtype, shapes), parameters(dtype, shapes)
    return getattr(wl.optim, name)(mine, **arguments), mine, getattr(torch.optim, name)(theirs, **arguments), theirs


# ---- the values


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_hundred_steps_are_torchs(case: str, dtype: torch.dtype) -> None:
    name, arguments = CASES[case]
    arguments = {key: value.to(dtype) if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
    ours, mine, reference, theirs = both(name, dtype, **arguments)
    train(ours, mine)
    train(reference, theirs)
    assert_close(mine, theirs, bound(theirs))
    moved = [(p - q).detach().abs().max() for p, q in zip(mine, parameters(dtype), strict=True) if p.numel()]
    assert max(moved) > 2e-3


def plain_lion(params: Any, moments: Any, lr: float, beta1: float, beta2: float, weight_decay: float) -> None:
    for p, m in zip(params, moments, strict=True):
        update = (m * beta1 + p.grad * (1 - beta1)).sign()
        p.data.mul_(1 - lr * weight_decay).sub_(lr * update)
        m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"weight_decay": 0.3}, {"betas": (0.5, 0.0)}, {"maximize": True}], ids=str)
def test_lion_is_its_definition(arguments: dict[str, Any], dtype: torch.dtype) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    moments = [torch.zeros_like(p) for p in theirs]
    ours = wl.optim.Lion(mine, lr=0.01, **arguments)
    beta1, beta2 = arguments.get("betas", (0.9, 0.99))
    for step in range(STEPS):
        give(mine, step)
        give(theirs, step)
        for p in theirs if "maximize" in arguments else ():
            p.grad.neg_()
        ours.step()
        plain_lion(theirs, moments, 0.01, beta1, beta2, arguments.get("weight_decay", 0.0))
    assert_close(mine, theirs, bound(theirs))
    assert_close([ours.state[p]["exp_avg"] for p in mine], moments, bound(theirs))


def test_the_first_steps_keep_their_digits() -> None:
    """1 - 0.999 in fp32 is off by 5e-5 of itself, and the first update, which is lr * sign(g), by half of that."""
    p = torch.nn.Parameter(torch.zeros(1000))
    p.grad = torch.linspace(0.5, 2.0, 1000)
    wl.optim.Adam([p], lr=1.0, eps=0.0).step()
    assert float((p.detach() + 1).abs().max()) < 4 * 2**-24


@pytest.mark.parametrize("case", ["AdamW amsgrad", "Adam L2", "SGD nesterov"])
@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
def test_half_parameters_with_fp32_state_are_fp32_rounded_once_a_step(case: str, dtype: torch.dtype) -> None:
    name, arguments = CASES[case]
    mine, masters = parameters(dtype), [torch.nn.Parameter(p.float()) for p in parameters(dtype)]
    ours, reference = getattr(wl.optim, name)(mine, state_dtype=f32, **arguments), getattr(torch.optim, name)(masters, **arguments)
    num_equal = num_all = 0
    for step in range(20):
        for p, q in zip(mine, masters, strict=True):
            q.data.copy_(p.data)  # the same start for each step
        give(mine, step)
        for p, q in zip(mine, masters, strict=True):
            assert p.grad is not None
            q.grad = p.grad.float()
        ours.step()
        reference.step()
        for p, q in zip(mine, masters, strict=True):
            rounded = q.detach().to(dtype)
            torch.testing.assert_close(p.detach(), rounded, rtol=torch.finfo(dtype).eps, atol=1e-6)  # one step, if it was close
            num_equal += int((p.detach() == rounded).sum())
            num_all += p.numel()
    assert num_equal >= 0.999 * num_all
    states = [state for p in mine for key, state in ours.state[p].items() if key != "step"]
    assert {state.dtype for state in states} == {f32}
    assert_close(states, [state for q in masters for key, state in reference.state[q].items() if key != "step"], 1e-5)


def test_bf16_state_is_computed_in_fp32_and_rounded_once() -> None:
    mine = parameters(bf16, [(1000,)])
    ours = wl.optim.AdamW(mine, lr=0.01)
    p = mine[0].detach().double()
    m, v = torch.zeros_like(p), torch.zeros_like(p)
    for step in range(1, 6):
        give(mine, step)
        assert mine[0].grad is not None
        g = mine[0].grad.double()
        m, v = m * 0.9 + 0.1 * g, v * 0.999 + 0.001 * g * g
        p = p * (1 - 1e-4) - 0.01 * (m / (1 - 0.9**step)) / ((v / (1 - 0.999**step)).sqrt() + 1e-8)
        ours.step()
        state = ours.state[mine[0]]
        for got, want in ((state["exp_avg"], m), (state["exp_avg_sq"], v), (mine[0].detach(), p)):
            assert got.dtype == bf16
            assert float(((got.double() - want).abs() / want.abs()).max()) <= 2**-8 * 1.01  # half a step, once
        m, v, p = state["exp_avg"].double(), state["exp_avg_sq"].double(), mine[0].detach().double()


# ---- parameters and gradients


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_gradients_that_come_and_go(name: str) -> None:
    arguments = {"momentum": 0.9, "dampening": 0.25} if name == "SGD" else {}
    ours, mine, reference, theirs = both(name, lr=0.01, **arguments)
    for step in range(12):
        for params in (mine, theirs):
            give(params, step)
            for place, p in enumerate(params):
                if (step * 5 + place) % 3 == 0 or (step < 4 and place == 3):
                    p.grad = None
        ours.step()
        reference.step()
        assert_close(mine, theirs, bound(theirs))
    if name == "AdamW":
        counts = [[float(optimizer.state[p]["step"]) for p in params] for optimizer, params in ((ours, mine), (reference, theirs))]
        assert counts[0] == counts[1]
        assert len(set(counts[0])) > 1
    for p in mine:
        p.grad = None
    ours.step()


def test_devices_dtypes_and_layouts_in_one_group() -> None:
    shapes = [(5, 8), (3,), (4, 6), (9,)]

    def make() -> list[torch.nn.Parameter]:
        a, b, c, d = draw(shapes, f32, 3)
        return [torch.nn.Parameter(t) for t in (a.t(), b.double(), c[:, ::2], d.to(bf16), torch.ones(3, 5, device="meta"))]

    mine, theirs = make(), make()[:4]
    ours, reference = wl.optim.AdamW(mine, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for step in range(10):
        give(mine[:4], step)
        give(theirs, step)
        mine[4].grad = torch.empty_like(mine[4])
        ours.step()
        reference.step()
    assert_close(mine[:3], theirs[:3], 1e-6)
    assert_close(mine[3:4], theirs[3:], 0.07)  # torch rounds every operation to bf16
    assert {value.device.type for value in ours.state[mine[4]].values()} == {"meta"}


def test_groups_have_their_own_numbers() -> None:
    mine, theirs = parameters(f32), parameters(f32)

    def groups(params: Any) -> list[dict[str, Any]]:
        return [{"params": params[:2], "weight_decay": 0.0}, {"params": params[2:4], "lr": 0.05, "betas": (0.5, 0.6)}]

    ours, reference = wl.optim.AdamW(groups(mine), lr=0.01), torch.optim.AdamW(groups(theirs), lr=0.01)
    for optimizer, params in ((ours, mine), (reference, theirs)):
        train(optimizer, params, range(10))
        optimizer.add_param_group({"params": params[4:], "amsgrad": True, "maximize": True})
        train(optimizer, params, range(10, 30))
    assert_close(mine, theirs, bound(theirs))


def test_a_parameter_may_get_other_memory_and_another_dtype() -> None:
    ours, mine, reference, theirs = both("SGD", lr=0.01)
    for optimizer, params in ((ours, mine), (reference, theirs)):
        train(optimizer, params, range(3))
        for p in params:
            p.data = p.data.double()
        train(optimizer, params, range(3, 6))
    assert_close(mine, theirs, 1e-6)
    assert mine[0].dtype == f64


def test_a_group_may_get_other_parameters() -> None:
    for name in ("SGD", "AdamW"):
        ours, mine, _, _ = both(name, lr=0.01)
        train(ours, mine, [0])
        before = [p.detach().clone() for p in mine]
        others = parameters(f32)
        ours.param_groups[0]["params"] = others
        train(ours, others, [1])
        assert_equal([p.detach() for p in mine], before)
        assert not torch.equal(others[0], parameters(f32)[0])


def test_sparse_and_complex_are_refused_and_nothing_is_written() -> None:
    mine = parameters(f32, [(3,), (4,)])
    before = [p.detach().clone() for p in mine]
    ours = wl.optim.AdamW(mine)
    give(mine, 0)
    mine[1].grad = torch.ones(4).to_sparse()
    with pytest.raises(wl.LayoutError, match=r"item 1 of the lists: argument g is a torch.sparse_coo tensor.*to_dense"):
        ours.step()
    assert_equal([p.detach() for p in mine], before)
    assert [float(ours.state[p]["step"]) for p in mine] == [0, 0]
    mine[1].grad = None
    ours.step()
    assert [float(ours.state[p]["step"]) for p in mine] == [1, 0]
    with pytest.raises(wl.DtypeError, match=r"parameter 1 of the group is torch.complex64; allowed: real.*view_as_real"):
        wl.optim.AdamW([mine[0], torch.ones(2, dtype=torch.complex64, requires_grad=True)])
    with pytest.raises(wl.DtypeError):
        ours.add_param_group({"params": [torch.ones(2, dtype=torch.complex64, requires_grad=True)]})
    assert len(ours.param_groups) == 1


# ---- what torch's training loops do with an optimizer


@pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD"])
def test_arguments_are_torchs_in_torchs_order(name: str) -> None:
    mine = list(inspect.signature(getattr(wl.optim, name)).parameters.values())
    theirs = list(inspect.signature(getattr(torch.optim, name)).parameters.values())
    assert [(p.name, p.kind, p.default) for p in mine[: len(theirs)]] == [(p.name, p.kind, p.default) for p in theirs]
    assert {p.kind for p in mine[len(theirs) :]} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("Adam", {"lr": -1.0}), ("Adam", {"eps": -1.0}), ("AdamW", {"betas": (1.0, 0.9)}), ("AdamW", {"betas": (0.9, 1.0)}),
        ("AdamW", {"weight_decay": -1}), ("Adam", {"lr": torch.ones(2)}), ("SGD", {"lr": -0.1}), ("SGD", {"momentum": -1}),
        ("SGD", {"weight_decay": -1}), ("SGD", {"nesterov": True}), ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        ("Adam", {"fused": True, "foreach": True}), ("SGD", {"fused": True, "differentiable": True}),
    ],
    ids=str,
)  # fmt: skip
def test_what_torch_refuses_is_refused_alike(name: str, arguments: dict[str, Any]) -> None:
    errors = []
    for module in (wl.optim, torch.optim):
        with pytest.raises((ValueError, RuntimeError)) as error:
            getattr(module, name)(parameters(f32), **arguments)
        errors.append(type(error.value))
    assert errors[0] is errors[1]


def test_schedulers_change_the_rate_and_the_betas() -> None:
    def scheduler(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40)

    for lr in (1e-3, torch.tensor(1e-3)):
        ours, mine, reference, theirs = both("AdamW", lr=lr.clone() if isinstance(lr, torch.Tensor) else lr)
        if isinstance(lr, torch.Tensor):
            reference.param_groups[0]["lr"] = lr.clone()
        pair = scheduler(ours), scheduler(reference)
        for step in range(39):
            train(ours, mine, [step])
            train(reference, theirs, [step])
            for each in pair:
                each.step()
        assert float(ours.param_groups[0]["lr"]) == float(reference.param_groups[0]["lr"])
        assert_close(mine, theirs, bound(theirs))


def test_a_closure_is_called_with_gradients_and_its_loss_returned() -> None:
    p = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    ours = wl.optim.SGD([p], lr=0.5)

    def closure() -> torch.Tensor:
        ours.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert ours.step(closure).item() == 13.0
    assert p.detach().tolist() == [0.0, 0.0]
    assert ours.step() is None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_step_inside_what_is_compiled_is_the_same_step() -> None:
    def step(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        (p * p).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizer = wl.optim.SGD([p], lr=0.25)
    torch.compiler.reset()
    for _ in range(3):
        torch.compile(step, backend="aot_eager")(p, optimizer)
    p.grad = torch.ones(2)
    torch.compile(optimizer.step, backend="aot_eager")()
    assert p.tolist() == [0.125 - 0.25, -0.25 - 0.25]  # halved by each of three
    torch.compiler.reset()


def test_step_hooks_are_called() -> None:
    ours, mine, _, _ = both("AdamW")
    seen: list[str] = []
    ours.register_step_pre_hook(lambda *_: seen.append("before"))
    ours.register_step_post_hook(lambda *_: seen.append("after"))
    train(ours, mine, range(2))
    assert seen == ["before", "after"] * 2


SCALED = [("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("SGD", {}), ("Lion", {})]


@pytest.mark.parametrize(("name", "arguments"), SCALED, ids=str)
def test_scaled_gradients(name: str, arguments: dict[str, Any]) -> None:
    params, plain = parameters(f32), parameters(f32)
    ours, unscaled = (getattr(wl.optim, name)(p, lr=0.01, **arguments) for p in (params, plain))
    for step in range(6):
        give(params, step)
        give(plain, step)
        for p in params:
            p.grad = p.grad * 1024
        is_skipped = step in (0, 3)
        if is_skipped:
            params[3].grad[3, 5] = math.inf  # type: ignore[index]
            params[0].grad = params[0].grad * math.nan  # type: ignore[operator]
        ours.grad_scale, ours.found_inf = torch.tensor(1024.0), torch.tensor(float(is_skipped))
        before = [p.detach().clone() for p in params]
        ours.step()
        if is_skipped:
            assert_equal([p.detach() for p in params], before)
        else:
            unscaled.step()
        assert_equal(params, plain)  # a power of two: exact
    for p, q in zip(params, plain, strict=True):
        for key, value in unscaled.state[q].items():
            assert_equal([ours.state[p][key]], [value])


def test_grad_scaler() -> None:
    p, q = (torch.nn.Parameter(torch.ones(5)) for _ in range(2))
    ours, reference = wl.optim.AdamW([p], lr=0.1), torch.optim.AdamW([q], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for factor in (1.0, math.inf, 2.0):
        ours.zero_grad()
        scaler.scale((p * p * factor).sum()).backward()
        scaler.step(ours)
        scaler.update()
        if factor < math.inf:
            reference.zero_grad()
            (q * q * factor).sum().backward()
            reference.step()
        assert_close([p], [q], 1e-6)
    assert scaler.get_scale() == 128.0
    assert float(ours.state[p]["step"]) == 2
    assert not hasattr(ours, "found_inf")


# ---- states


@pytest.mark.parametrize("case", ["AdamW", "Adam L2 amsgrad maximize", "SGD momentum", "SGD"])
def test_states_go_to_torch_and_come_from_it(case: str) -> None:
    name, arguments = CASES[case]
    ours, mine, reference, theirs = both(name, **arguments)
    train(ours, mine, range(10))
    train(reference, theirs, range(10))
    saved, want = ours.state_dict(), reference.state_dict()
    assert saved["state"].keys() == want["state"].keys()
    for key, state in want["state"].items():
        assert saved["state"][key].keys() == state.keys()
        for entry, value in state.items():
            got = saved["state"][key][entry]
            assert (got.dtype, got.device, got.shape, got.stride()) == (value.dtype, value.device, value.shape, value.stride())
    assert want["param_groups"][0].items() <= saved["param_groups"][0].items()
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    reference.load_state_dict(torch.load(buffer))
    ours.load_state_dict(want)
    train(ours, theirs_of(ours), range(10, 20))
    train(reference, theirs, range(10, 20))
    assert_close(mine, theirs, bound(theirs))


def theirs_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def test_saved_counts_are_each_parameters_own() -> None:
    ours, mine, _, _ = both("AdamW")
    train(ours, mine, range(3))
    saved = ours.state_dict()
    ours.step()
    assert [float(state["step"]) for state in saved["state"].values()] == [3.0] * len(mine)
    saved["state"][0]["step"] += 5
    assert [float(state["step"]) for state in saved["state"].values()] == [8.0] + [3.0] * (len(mine) - 1)
    assert [float(ours.state[p]["step"]) for p in mine] == [4.0] * len(mine)
    other = wl.optim.AdamW(parameters(f32))
    other.load_state_dict(saved)
    train(other, theirs_of(other), [0])
    assert [float(other.state[p]["step"]) for p in theirs_of(other)] == [9.0] + [4.0] * (len(mine) - 1)
    assert [float(state["step"]) for state in saved["state"].values()] == [8.0] + [3.0] * (len(mine) - 1)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))], ids=["copied", "pickled"])
def test_copies_go_on_by_themselves(duplicate: Callable[[Any], Any]) -> None:
    ours, mine, _, _ = both("AdamW")
    train(ours, mine, range(3))
    other = duplicate(ours)
    assert [float(state["step"]) for state in other.state_dict()["state"].values()] == [3.0] * len(mine)
    train(other, theirs_of(other), range(3, 6))
    assert [float(ours.state[p]["step"]) for p in mine] == [3.0] * len(mine)
    train(ours, mine, range(3, 6))
    assert_equal(mine, theirs_of(other))
    assert [float(ours.state[p]["step"]) for p in mine] == [6.0] * len(mine)


def test_state_in_another_dtype_than_its_parameter_stays_as_it_was() -> None:
    mine = parameters(bf16)
    ours = wl.optim.AdamW(mine, state_dtype=f32)
    train(ours, mine, range(3))
    for arguments in ({"state_dtype": f32}, {}):
        other = wl.optim.AdamW([torch.nn.Parameter(p.detach().clone()) for p in mine], **arguments)
        other.register_load_state_dict_pre_hook(lambda _, state: {**state})
        other.load_state_dict(ours.state_dict())
        for p, q in zip(mine, theirs_of(other), strict=True):
            for key, value in ours.state[p].items():
                got = other.state[q][key]
                assert got.dtype == f32
                assert torch.equal(got, value)
                assert got.data_ptr() != value.data_ptr() or not got.numel()
        assert other.param_groups[0]["state_dtype"] == f32
    train(other, theirs_of(other), range(3, 5))
    train(ours, mine, range(3, 5))
    assert_equal(mine, theirs_of(other))


def test_torchs_states_leave_the_dtype_and_the_rounding_that_were_asked_for() -> None:
    reference_params, mine = parameters(bf16), parameters(bf16)
    reference = torch.optim.Adam(reference_params)
    train(reference, reference_params, range(2))
    ours = wl.optim.AdamW(mine, state_dtype=f32, stochastic_rounding=True)
    ours.load_state_dict(reference.state_dict())
    group = ours.param_groups[0]
    assert (group["state_dtype"], group["stochastic_rounding"], group["decoupled_weight_decay"]) == (f32, True, True)
    assert {ours.state[p]["exp_avg"].dtype for p in mine} == {f32}
    train(ours, mine, [2])


def test_cleared_state_begins_anew() -> None:
    ours, mine, reference, theirs = both("AdamW")
    for optimizer, params in ((ours, mine), (reference, theirs)):
        train(optimizer, params, range(3))
        optimizer.state.clear()
        train(optimizer, params, range(3, 6))
    assert_close(mine, theirs, bound(theirs))
    assert float(ours.state[mine[0]]["step"]) == 3


def test_state_without_step_counts_begins_anew_too() -> None:
    mine, theirs = parameters(f32), parameters(f32)
    ours, fresh = wl.optim.Lion(mine, lr=0.1), wl.optim.Lion(theirs, lr=0.1)
    train(ours, mine, range(2))
    for p, other in zip(mine, theirs, strict=True):
        other.data.copy_(p.data)
    ours.state[mine[1]].clear()
    fresh.state.update({theirs[k]: {"exp_avg": ours.state[p]["exp_avg"].clone()} for k, p in enumerate(mine) if k != 1})
    for optimizer, params in ((ours, mine), (fresh, theirs)):
        train(optimizer, params, [2, 3])
    for p, other in zip(mine, theirs, strict=True):
        assert torch.equal(p, other)


def test_halves_and_others_of_a_group_take_a_step_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own function: a quotient of halves may be approximate, as those of fp32 may not."""
    used: list[tuple[str, list[torch.dtype]]] = []
    call = optim_module.call_in_place
    monkeypatch.setattr(
        optim_module, "call_in_place", lambda f, args, *rest: used.append((f.__name__, [p.dtype for p in args[0]])) or call(f, args, *rest)
    )
    ours, mine, reference, theirs = both("AdamW")
    mine[2], theirs[2] = (torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=bf16)) for _ in range(2))
    ours.param_groups[0]["params"], reference.param_groups[0]["params"] = mine, theirs
    for optimizer, params in ((ours, mine), (reference, theirs)):
        train(optimizer, params, range(3))
    assert used[:2] == [("adam", [f32] * (len(mine) - 1)), ("half_adam", [bf16])]
    assert_close(mine[:2] + mine[3:], theirs[:2] + theirs[3:], bound(theirs))
    assert_close(mine[2:3], theirs[2:3], bound(theirs[2:3]))


# ---- parameters spread over devices


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two devices, of which this is the first; the other never answers."""
    from torch.distributed.tensor import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_the_part_of_a_dtensor_on_this_device_is_updated(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def spread(t: torch.Tensor, *placements: Any) -> Any:
        return DTensor.from_local(t, mesh, placements, run_check=False)

    def local(t: Any) -> torch.Tensor:
        found = t.to_local() if isinstance(t, DTensor) else t
        assert isinstance(found, torch.Tensor)
        return found.detach()

    def make() -> list[torch.nn.Parameter]:
        a, b, c, d = draw([(3, 4), (5,), (7,), (4, 2)], f32, 0)
        return [torch.nn.Parameter(t) for t in (spread(a, Shard(0)), b, spread(c, Replicate()), spread(d, Shard(1)))]

    def give_spread(params: Any, step: int) -> None:
        a, b, c, d = draw([(6, 4), (5,), (7,), (4, 2)], f32, 1000 + step)
        params[0].grad = spread(a, Replicate())  # of which the parameter has the first three rows
        for p, g in zip(params[1:], (b, spread(c, Replicate()), spread(d, Shard(1))), strict=True):
            p.grad = g

    for name, arguments in (("AdamW", {"amsgrad": True}), ("SGD", {"momentum": 0.9}), ("SGD", {"momentum": 0.9, "dampening": 0.5})):
        mine = make()
        theirs = [torch.nn.Parameter(local(p).clone()) for p in mine]
        ours, reference = getattr(wl.optim, name)(mine, lr=0.1, **arguments), getattr(torch.optim, name)(theirs, lr=0.1, **arguments)
        average = wl.optim.EMA(mine, decay=0.5)
        want = [local(p).clone() for p in mine]
        for step in range(4):
            give_spread(mine, step)
            for p, q in zip(mine, theirs, strict=True):
                q.grad = local(p.grad)[: len(q)]
            ours.step()
            reference.step()
            average.update()
            want = [(w + local(p)) / 2 for w, p in zip(want, mine, strict=True)]
        assert_close(list(map(local, mine)), theirs, 1e-6)
        assert_close(list(map(local, average.averages)), want, 1e-6)
        assert all(isinstance(p, DTensor) for p in (mine[0], average.averages[0]))
        state = ours.state_dict()["state"][0]
        assert all(isinstance(value, DTensor) == (key != "step") for key, value in state.items())


# ---- launches


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many each call of lists takes: as on a GPU, but nothing is computed."""
    counts: list[int] = []

    def count(f: Any, args: Any, kwargs: Any, out: Any) -> Any:
        lists = split_lists(f.__name__, f._parameters(), args, kwargs, out)
        call = find_listed(f, lists, f._bind(*lists.at(0)))
        assert call is not None
        counts.append(len(call.listed.plans or ()) + len(call.listed.others))
        return out

    monkeypatch.setattr(foreach_module, "call_lists", count)
    return counts


@pytest.mark.parametrize("arguments", [{}, {"amsgrad": True, "weight_decay": 0.1}, {"stochastic_rounding": True}], ids=str)
def test_a_step_is_one_launch_a_dtype(arguments: dict[str, Any], launches: list[int]) -> None:
    shapes = [(k % 7, k % 11 + 1) for k in range(80)]
    for dtypes in ([f32], [bf16], [f32, bf16]):
        params = [p for dtype in dtypes for p in parameters(dtype, shapes[:: len(dtypes)])]
        ours = wl.optim.AdamW(params, **arguments)
        ours.grad_scale, ours.found_inf = torch.tensor(1.0), torch.tensor(0.0)
        train(ours, params, range(2))
        assert launches == [1] * len(dtypes) * 2
        launches.clear()


def test_other_numbers_need_no_other_kernel(launches: list[int]) -> None:
    params = parameters(f32)
    ours = wl.optim.AdamW(params, lr=1)
    train(ours, params, [0])
    kept = dict(wl.optim.adam._traces)
    for number in (0.5, 2, 3e-4):
        ours.param_groups[0].update(lr=number, betas=(number / 4, number / 3), eps=number, weight_decay=number)
        train(ours, params, [1])
    assert wl.optim.adam._traces == kept


# ---- stochastic rounding


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.float().view(torch.int32)


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 numbers around fp32 ones, towards zero and away from it, by their bits."""
    below = (bits_of(x) & -65536).view(f32)
    above = torch.where(below == x, below, ((bits_of(x) & -65536) + 65536).view(f32))
    return below, above


def test_what_is_bf16_already_stays_as_it_is() -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(bf16)
    for _ in range(3):
        got = round_stochastically(x.float())
        assert got.dtype == bf16
        is_number = ~x.isnan()
        assert torch.equal(got[is_number].view(torch.int16), x[is_number].view(torch.int16))
        assert bool(got[~is_number].isnan().all())


def test_one_of_the_two_neighbours_is_taken_anywhere() -> None:
    generator = torch.Generator().manual_seed(5)
    largest = int(bits_of(torch.tensor(torch.finfo(bf16).max)))
    magnitudes = torch.randint(0, largest, (200_000,), generator=generator, dtype=torch.int32)
    edges = torch.arange(0, largest, 1 << 23, dtype=torch.int32)[:, None] + torch.tensor([-65537, -1, 1, 32767, 32768, 32769, 65535])
    x = torch.cat([magnitudes, edges.clamp(0, largest).flatten()]).to(torch.int32).view(f32)
    for signed in (x, -x):
        below, above = neighbours(signed)
        got = round_stochastically(signed).float()
        assert bool(((got == below) | (got == above)).all())


def test_the_mean_is_the_number_itself() -> None:
    """The mean of 2^16 draws of a chance p is p within 5 standard errors, sqrt(p (1 - p) / 2^16), but for 6 of 10^7 numbers."""
    torch.manual_seed(11)
    num_draws = 1 << 16
    numbers = [1.0 + 2**-9, 1.0 + 2**-16, 2.0 - 2**-10, 1.5 + 3 * 2**-12, -0.1, 3.14159, 1e-30, -1e30, 2.0**-126 * 1.3, 2.0**-130 * 1.37]
    for number in numbers:
        x = torch.full((num_draws,), number, dtype=f32)
        below, above = (side.double()[0] for side in neighbours(x))
        chance = float((x.double()[0] - below) / (above - below))
        assert 0 < chance < 1
        mean = float((round_stochastically(x).double() == above).double().mean())
        assert abs(mean - chance) <= 5 * math.sqrt(chance * (1 - chance) / num_draws), number


def test_small_updates_are_not_lost() -> None:
    """An update of a 64th of bf16's step at 1: rounded to nearest, it never counts."""
    torch.manual_seed(3)
    moved = {}
    for is_stochastic in (False, True):
        p = torch.nn.Parameter(torch.ones(2000, dtype=bf16))
        ours = wl.optim.SGD([p], lr=2**-13, stochastic_rounding=is_stochastic)
        for _ in range(64):
            p.grad = -torch.ones_like(p)
            ours.step()
        moved[is_stochastic] = float((p.detach().double() - 1).mean())
    assert moved[False] == 0
    assert abs(moved[True] - 2**-7) < 5 * 2**-7 / math.sqrt(2000)  # the sum of 64 chances of 1/64: a variance of one step at most


def test_stochastic_rounding_is_of_bf16_alone() -> None:
    mine, theirs = parameters(f32), parameters(f32)
    train(wl.optim.AdamW(mine, stochastic_rounding=True), mine, range(3))
    train(wl.optim.AdamW(theirs), theirs, range(3))
    assert_equal(mine, theirs)


# ---- averages


@pytest.mark.parametrize(("dtype", "kept"), [(f32, None), (f64, None), (bf16, f32)], ids=str)
def test_averages_are_lerps(dtype: torch.dtype, kept: torch.dtype | None) -> None:
    params = parameters(dtype)
    ema = wl.optim.EMA(params, decay=0.9, dtype=kept)
    want = [p.detach().to(kept or dtype).clone() for p in params]
    for step in range(STEPS):
        for p, new in zip(params, draw(SIZES, dtype, step), strict=True):
            p.data.copy_(new)
        decay = 0.5 if step % 10 == 0 else None
        ema.update(decay)
        want = [w.lerp(p.detach().to(w.dtype), 1 - (decay or 0.9)) for w, p in zip(want, params, strict=True)]
    assert_close(ema.averages, want, bound(want))


def test_averages_in_the_place_of_parameters() -> None:
    params = parameters(f32)
    ema = wl.optim.EMA(params, decay=0.0)
    before = [p.detach().clone() for p in params]
    for p in params:
        p.data += 1

    def fail() -> None:
        with ema.swapped():
            assert_equal([p.detach() for p in params], before)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert_equal([p.detach() for p in params], [b + 1 for b in before])
    ema.copy_to()
    assert_equal([p.detach() for p in params], before)
    other = wl.optim.EMA(parameters(f64))
    other.load_state_dict(ema.state_dict())
    assert other.decay == 0.0
    assert_equal(other.averages, [b.double() for b in before])
    with pytest.raises(ValueError, match="other shapes"):
        other.load_state_dict({"decay": 0.5, "averages": ema.averages[1:]})
    with pytest.raises(ValueError, match="decay"):
        wl.optim.EMA(params, decay=1.5)


def test_every_combination_of_flags_runs() -> None:
    for amsgrad, maximize, decoupled, weight_decay, stochastic, dtype in itertools.product(
        *[(False, True)] * 3, (0, 0.1), (False, True), (f32, bf16)
    ):
        params = parameters(dtype, [(3,)])
        flags = {"amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled}
        train(wl.optim.Adam(params, weight_decay=weight_decay, stochastic_rounding=stochastic, **flags), params, range(2))
        assert bool(params[0].isfinite().all())


@pytest.mark.parametrize("kind", [wl.optim.AdamW, wl.optim.SGD, wl.optim.Lion])
def test_a_parameter_given_twice_is_named(kind: Any) -> None:
    p, q = torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)
    with (
        pytest.warns(UserWarning, match="duplicate"),
        pytest.raises(wl.OverlapError, match="parameters 0 and 2 of the group are one tensor"),
    ):
        kind([p, q, p], lr=0.1)


def test_a_step_on_a_gpu_takes_what_lies_there_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a recorder in the place of the driver: whatever is replaced between steps, tables point at what is there."""
    tables: list[list[int]] = []
    monkeypatch.setattr(foreach_module, "has_kernels", lambda device: True)
    monkeypatch.setattr(foreach_module, "run_lists", lambda kernels, device, found: tables.extend(table.tolist() for table in found))
    num_planned = 0

    def plan(*args: Any) -> Any:
        nonlocal num_planned
        num_planned += 1
        return find_listed(*args)

    monkeypatch.setattr(foreach_module, "find_listed", plan)
    first, second, third = mine = parameters(f32, ((40, 25), (7,), (3,)))
    optimizer = wl.optim.AdamW([{"params": [first, second]}, {"params": [third], "lr": 0.1}])
    kept: list[Any] = []  # so that no address is taken again

    def replace_moment() -> None:
        optimizer.state[first]["exp_avg"] = optimizer.state[first]["exp_avg"].clone()

    def replace_state() -> None:
        optimizer.state[second] = {name: value.clone() for name, value in optimizer.state[second].items()}

    def replace_data() -> None:
        first.data = first.data.clone()

    def replace_count() -> None:
        optimizer.state[third]["step"] = torch.tensor(7.0)

    def widen() -> None:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]})
        mine.append(optimizer.param_groups[2]["params"][0])

    nothing = lambda: None  # noqa: E731
    changes = [(nothing, 2), (nothing, 0), (replace_moment, 0), (replace_data, 0), (replace_state, 2), (replace_count, 1), (widen, 1)]
    for change, plans in changes:
        kept.append([(p.data, dict(optimizer.state[p]), p.grad) for p in mine] if optimizer.state else None)
        change()
        give(mine, len(kept))
        tables.clear()
        before, counts = num_planned, {p: float(optimizer.state[p]["step"]) for p in mine if p in optimizer.state}
        optimizer.step()
        assert num_planned - before == plans, change
        words = {word for table in tables for word in table}
        for p in mine:
            state = optimizer.state[p]
            wanted = {t.data_ptr() for t in (p, p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"])}
            assert wanted <= words, change
            assert state["step"] == counts.get(p, 0) + 1
    give(mine, 0)
    first.grad = None
    tables.clear()
    optimizer.step()
    assert first.data_ptr() not in {word for table in tables for word in table}
    assert optimizer.state[second]["step"] == optimizer.state[first]["step"] + 1
