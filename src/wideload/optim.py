"""Optimizers whose step is one launch for all tensors of the same dtypes: drop-in ``torch.optim.Optimizer``s over fused functions.

Turns parameters, gradients and state into lists for ``f.foreach``; must not know how lists become kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from wideload.dtypes import is_half
from wideload.errors import DtypeError, OverlapError
from wideload.foreach import Repeat, call_in_place
from wideload.fused import fuse
from wideload.structure import are_same

__all__ = ["EMA", "SGD", "Adam", "AdamW", "Lion"]


# ---- the updates: what a step computes of one tensor of each list

BF16_HALF_STEP = 2**-8
"""Of the power of two below a number, half the way to its neighbour in bf16, which has 8 significant bits."""
BF16_LEAST = 2**-133
"""The way from one number to the next below 2^-126, which is the least positive number of bf16."""
OVER_HALF = 1.0625
"""So much of that share of the number itself is more than half the way and less than one and a half: what it leads to rounds to the
neighbour."""


def round_stochastically(x: Tensor) -> Tensor:
    """``x`` in fp32 as one of the two bf16 numbers around it, each the more likely the nearer: ``x`` on average; bf16 stays as it is.

    The probability is exact down to the normal numbers of bf16: the distance over the gap is a multiple of 2^-16, and draws have 24 bits.
    """
    near = x.to(torch.bfloat16).float()
    rest = x - near
    move = (near.abs() * (BF16_HALF_STEP * OVER_HALF)).clamp(min=BF16_LEAST / 2 * OVER_HALF)
    other = (near + torch.copysign(move, rest)).to(torch.bfloat16).float()
    is_other = torch.rand_like(x) * (other - near).abs() < rest.abs()  # never of infinities and NaN
    return torch.where(is_other, other, near).to(torch.bfloat16)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What numbers of one tensor are computed in: a step count would be rounded in a half."""
    return torch.promote_types(dtype, torch.float32)


def _gradient(g: Tensor, grad_scale: Any, maximize: bool) -> Tensor:
    g = g.to(_wide(g.dtype))
    g = g if grad_scale is None else g / grad_scale
    return -g if maximize else g


def _results(old: Sequence[Tensor], new: Sequence[Tensor], found_inf: Any, is_stochastic: bool) -> tuple[Tensor, ...]:
    """Each new tensor in the dtype of the old; the old ones where a gradient was infinite."""
    parameter, *state = new
    dtypes = [tensor.dtype for tensor in old]
    rounded = round_stochastically(parameter) if is_stochastic and dtypes[0] == torch.bfloat16 else parameter.to(dtypes[0])
    results = (rounded, *(value.to(dtype) for value, dtype in zip(state, dtypes[1:], strict=True)))
    if found_inf is None:
        return results
    return tuple(torch.where(found_inf == 0, value, kept) for value, kept in zip(results, old, strict=True))


@fuse
def adam(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, v_max: Any, steps: Tensor, lr: Any, beta1: float, beta2: float, log_beta1: float,
    log_beta2: float, eps: float, weight_decay: Any, decoupled: bool, maximize: bool, grad_scale: Any, found_inf: Any, is_stochastic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of Adam, of AdamW where ``decoupled``, after ``steps`` others: the parameter, both moments, the second's maximum if kept.

    ``1 - beta**t`` by ``expm1``, which keeps the digits that fp32 would lose of ``beta**t`` near 1.
    """
    x, g, t = p.to(_wide(p.dtype)), _gradient(g, grad_scale, maximize), steps.to(_wide(p.dtype)) + 1
    if weight_decay is not None:
        x, g = (x * (1 - lr * weight_decay), g) if decoupled else (x, g + weight_decay * x)
    mean = m.to(g.dtype).lerp(g, 1 - beta1)
    square = beta2 * v + (1 - beta2) * (g * g)
    most = square if v_max is None else torch.maximum(v_max, square)
    step_size = lr / -(t * log_beta1).expm1()
    root = most.sqrt() * (-(t * log_beta2).expm1()).rsqrt()
    old, new = [p, m, v], [x - step_size * mean / (root + eps), mean, square]
    if v_max is not None:
        old, new = [*old, v_max], [*new, most]
    return _results(old, new, found_inf, is_stochastic)


half_adam = fuse(adam.__wrapped__, name="half_adam", fast_math=True)
"""For parameters in fp16 and bf16, to which what its quotient and roots make is rounded. On an H200 it is at 0.978 of the wall of bf16
(results/optimizers-h200-455f4e3.json); where these were correctly rounded, and what all elements share was computed for each, it was at
0.887 when this was at 0.965."""


@fuse
def sgd(
    p: Tensor, g: Tensor, buffer: Any, lr: Any, momentum: float, dampening: float, weight_decay: Any, is_first: bool, nesterov: bool,
    maximize: bool, grad_scale: Any, found_inf: Any, is_stochastic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of SGD: the parameter, and its momentum where there is a ``buffer``."""
    x, g = p.to(_wide(p.dtype)), _gradient(g, grad_scale, maximize)
    if weight_decay is not None:
        g = g + weight_decay * x
    if buffer is None:
        return _results((p,), (x - lr * g,), found_inf, is_stochastic)
    velocity = g if is_first else momentum * buffer + (1 - dampening) * g
    g = g + momentum * velocity if nesterov else velocity
    return _results((p, buffer), (x - lr * g, velocity), found_inf, is_stochastic)


@fuse
def lion(
    p: Tensor, g: Tensor, m: Tensor, lr: Any, beta1: float, beta2: float, weight_decay: Any, maximize: bool, grad_scale: Any,
    found_inf: Any, is_stochastic: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """One step of Lion: the parameter and its momentum."""
    x, g = p.to(_wide(p.dtype)), _gradient(g, grad_scale, maximize)
    if weight_decay is not None:
        x = x * (1 - lr * weight_decay)
    update = (beta1 * m + (1 - beta1) * g).sign()
    return _results((p, m), (x - lr * update, beta2 * m + (1 - beta2) * g), found_inf, is_stochastic)


@fuse
def ema(average: Tensor, value: Tensor, decay: float) -> Tensor:
    """``decay * average + (1 - decay) * value``, in the dtype of ``average``."""
    wide = average.to(_wide(average.dtype))
    return (wide + (1 - decay) * (value - wide)).to(average.dtype)


# ---- optimizers


@dataclass(frozen=True, slots=True)
class _Batch:
    """The parameters of a group that have a gradient, on one device, all of halves or none, and their state.

    ``places`` are theirs in the group, ``None`` for all of them; ``steps`` are views of ``counts``, so that one addition counts for all;
    ``names`` are those of a state's entries. Of a ``DTensor`` the part on this device is updated, which is looked up at each step.
    """

    device: torch.device
    places: tuple[int, ...] | None
    params: list[Tensor]
    states: list[dict[str, Any]]
    steps: list[Tensor]
    counts: Tensor
    has_shards: bool
    names: frozenset[str]
    repeats: dict[Any, Repeat] = field(default_factory=dict)

    def local(self, tensors: list[Any]) -> list[Tensor]:
        """The parts on this device of parameters, or of their gradients or states."""
        return list(map(_part, tensors, self.params)) if self.has_shards else tensors

    def column(self, name: str) -> list[Tensor]:
        """Entry ``name`` of each state."""
        return self.local([state[name] for state in self.states])


class FusedOptimizer(torch.optim.Optimizer):
    """What the optimizers share: lists of tensors, step counts on their device, scaled gradients, states that torch's own load.

    ``state_dtype`` is the dtype of new state, that of the parameter if None; ``stochastic_rounding`` is for bf16 parameters. ``fused``,
    ``foreach`` and ``capturable`` are taken, and kept for a `state_dict` that torch's own loads; every step is all three.
    """

    _step_supports_amp_scaling = True  # GradScaler: no synchronisation, the kernel skips what is not finite
    _counts_steps: ClassVar[bool] = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, differentiable: bool, fused: bool | None, foreach: bool | None
    ) -> None:
        """Raises ``RuntimeError`` for what no such step can do, as torch's fused optimizers do."""
        if differentiable:
            raise RuntimeError(f"{type(self).__name__} of wideload is not differentiable; use that of torch.optim")
        if fused and foreach:
            raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
        self._batches: dict[int, tuple[Any, list[Any], list[_Batch]]] = {}
        self._seen: tuple[list[Any], list[Any]] | None = None
        self._saved: dict[str, Any] | None = None
        super().__init__(params, {**defaults, "foreach": foreach, "differentiable": differentiable, "fused": fused})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. Raises ``DtypeError`` for parameters that are no real floats, ``OverlapError`` for one that is given twice."""
        super().add_param_group(param_group)
        places: dict[int, int] = {}
        for position, p in enumerate(self.param_groups[-1]["params"]):
            first = places.setdefault(id(p), position)
            if first != position:
                del self.param_groups[-1]
                raise OverlapError(f"parameters {first} and {position} of the group are one tensor; allowed: each once. Pass it once.")
            if not p.dtype.is_floating_point:
                del self.param_groups[-1]
                raise DtypeError(
                    f"parameter {position} of the group is {p.dtype}; allowed: real floating-point parameters. "
                    "Give torch.view_as_real of a complex one."
                )

    @_disable_dynamo  # as torch.compiler.disable, which would import Dynamo with this module: a second
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what ``closure``, which computes the gradients anew, returns.

        One launch for each group, device and dtypes, and one for the step counts. Raises ``LayoutError`` for sparse gradients: the groups
        before theirs have taken their step then, as with torch's optimizers. ``torch.compile`` breaks the graph here: a step is one launch.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        seen = self._seen
        if seen is None or not (are_same(seen[0], self.state.keys()) and are_same(seen[1], self.state.values())):
            self._batches.clear()
        for index, group in enumerate(self.param_groups):
            all_grads = list(map(_grad, group["params"]))
            for batch in self._find_batches(index, group, all_grads):
                grads = batch.local(all_grads if batch.places is None else [all_grads[place] for place in batch.places])
                found_inf = self._scaler_value("found_inf", batch.device)
                self._update(group, batch, grads, self._scaler_value("grad_scale", batch.device), found_inf)
                if self._counts_steps:
                    _count(batch, found_inf)
        if self._seen is None:
            self._seen = list(self.state), list(self.state.values())
        return loss

    def _update(self, group: dict[str, Any], batch: _Batch, grads: list[Tensor], grad_scale: Any, found_inf: Any) -> None:
        raise NotImplementedError

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        """The state of a parameter that has taken no step, but for the count."""
        raise NotImplementedError

    # ---- lists

    def _find_batches(self, index: int, group: dict[str, Any], grads: list[Any]) -> list[_Batch]:
        """The group's parameters that have a gradient; those of the last step where neither they nor their step counts are others."""
        missing = tuple(i for i, g in enumerate(grads) if g is None) if type(None) in set(map(type, grads)) else ()
        known, key = self._batches.get(index), (missing, self._keeps_state(group))
        if known is not None and known[0] == key and are_same(known[1], group["params"]) and all(map(_is_same_state, known[2])):
            return known[2]
        batches, self._seen = self._make_batches(group, missing), None
        self._batches[index] = key, list(group["params"]), batches
        return batches

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        return True

    def _make_batches(self, group: dict[str, Any], missing: tuple[int, ...]) -> list[_Batch]:
        skipped, alike = frozenset(missing), dict[tuple[torch.device, bool], list[int]]()
        for place, p in enumerate(group["params"]):
            if place not in skipped:
                alike.setdefault((p.device, is_half(p.dtype)), []).append(place)
        batches = []
        for (device, _), places in alike.items():
            params = [group["params"][place] for place in places]
            states = [self.state[p] if self._keeps_state(group) else {} for p in params]
            names: frozenset[str] = frozenset()
            for p, state in zip(params, states, strict=True):
                new = self._new_state(group, p)
                names = frozenset(new)
                state.update((name, value) for name, value in new.items() if name not in state)
            steps, counts = _gather_steps(states, device) if self._counts_steps else ([], torch.empty(0))
            is_all = len(places) == len(group["params"])
            of = None if is_all else tuple(places)
            batches.append(_Batch(device, of, params, states, steps, counts, any(map(_is_shard, params)), names))
        return batches

    def _scaler_value(self, name: str, device: torch.device) -> Tensor | None:
        """``grad_scale`` or ``found_inf``, which a GradScaler sets for a step, on ``device``."""
        value = getattr(self, name, None)
        return None if value is None else value.reshape(()).to(device, non_blocking=True)

    # ---- states

    def state_dict(self) -> dict[str, Any]:
        """As torch's optimizer of this name with the same arguments has it: step counts on the host unless ``fused`` or ``capturable``."""
        saved = super().state_dict()
        states, moved = saved["state"], dict[torch.device, list[Any]]()
        for group in saved["param_groups"]:
            if not (group.get("capturable") or group["fused"]):
                for name in group["params"]:
                    if "step" in states.get(name, ()) and states[name]["step"].device.type != "meta":
                        moved.setdefault(states[name]["step"].device, []).append(name)
        for names in moved.values():
            on_host = torch.stack([states[name]["step"] for name in names]).cpu()  # one copy a device
            states.update({name: {**states[name], "step": step.clone()} for name, step in zip(names, on_host, strict=True)})
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, and of torch's; state in another dtype than its parameter's stays in it, where ``state_dtype`` says so."""
        handle = self.register_load_state_dict_pre_hook(lambda _, final: setattr(self, "_saved", final))  # as earlier hooks leave it
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._saved = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch's optimizers do not save has the value that it has here, or the default."""
        before = self.__dict__.get("param_groups", [])
        super().__setstate__(state)
        saved, self._saved = self.__dict__.get("_saved"), None
        self._batches, self._seen = {}, None
        for index, group in enumerate(self.param_groups):
            known = before[index] if index < len(before) else self.defaults
            for name, value in self.defaults.items():
                group.setdefault(name, known.get(name, value))
            if saved is not None and group["state_dtype"] is not None:
                self._keep_dtypes(group, saved, saved["param_groups"][index]["params"])

    def _keep_dtypes(self, group: dict[str, Any], saved: dict[str, Any], names: Sequence[Any]) -> None:
        """Torch has brought the state to the dtype of the parameter, which may have lost digits."""
        for name, p in zip(names, group["params"], strict=True):
            for key, value in saved["state"].get(name, {}).items():
                if key != "step" and isinstance(value, Tensor):
                    self.state[p][key] = value.to(p.device, group["state_dtype"], copy=True)


_grad = attrgetter("grad")


def _is_shard(tensor: Any) -> bool:
    """Whether it is a ``DTensor``, whose module takes a second to import."""
    return hasattr(tensor, "to_local")


def _part(tensor: Any, p: Any) -> Tensor:
    """The part of a ``DTensor`` on this device, as the parameter ``p`` is spread; any other tensor itself."""
    if not _is_shard(tensor):
        return tensor  # type: ignore[no-any-return]
    spread = tensor if tensor.placements == p.placements else tensor.redistribute(p.device_mesh, p.placements)
    return spread.to_local()  # type: ignore[no-any-return]


def _is_same_state(batch: _Batch) -> bool:
    """Whether the states are as they were: with the batch's step counts, or where none are kept, with all of their entries."""
    if batch.steps:
        return are_same([state.get("step") for state in batch.states], batch.steps)
    return all(state.keys() >= batch.names for state in batch.states)


def _gather_steps(states: Sequence[dict[str, Any]], device: torch.device) -> tuple[list[Tensor], Tensor]:
    """The step counts of these states in one tensor, of which each state has a view."""
    found = [torch.as_tensor(state["step"], dtype=torch.float32) for state in states]
    is_together = len({step.device for step in found}) == 1
    counts = torch.stack(found if is_together else [step.to(device) for step in found]).to(device)
    steps = list(counts.unbind())
    for state, step in zip(states, steps, strict=True):
        state["step"] = step
    return steps, counts


def _count(batch: _Batch, found_inf: Tensor | None) -> None:
    batch.counts.add_(1)
    if found_inf is not None:
        batch.counts.sub_(found_inf)


def _number(value: Any) -> Any:
    """A hyperparameter as a run-time argument: a tensor is read where it is, and 0 and 0.0 are the same kernel."""
    return value.reshape(()) if isinstance(value, Tensor) else float(value)


def _decay(value: Any) -> Any:
    return None if not isinstance(value, Tensor) and value == 0 else _number(value)


def _log(beta: float) -> float:
    return math.log(beta) if beta else -math.inf


def _check(is_allowed: bool, what: str, value: Any) -> None:
    if not is_allowed:
        raise ValueError(f"Invalid {what}: {value}")


def _check_rates(lr: Any, weight_decay: Any) -> None:
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    _check(bool(lr >= 0), "learning rate", lr)
    _check(bool(weight_decay >= 0), "weight_decay value", weight_decay)


def _check_betas(betas: Any) -> tuple[float, float]:
    first, second = (float(beta) for beta in betas)
    _check(0 <= first < 1, "beta parameter at index 0", first)
    _check(0 <= second < 1, "beta parameter at index 1", second)
    return first, second


class Adam(FusedOptimizer):
    """``torch.optim.Adam``, whose step is one launch whatever the number of parameters; see `FusedOptimizer` for the last two arguments.

    State: ``step`` (fp32, on the parameter's device), ``exp_avg``, ``exp_avg_sq`` and with ``amsgrad`` ``max_exp_avg_sq``. Moves 28
    bytes an element in fp32. ``lr`` may be a tensor, and changes neither the kernel nor a captured graph. Raises as torch's does.

    >>> import torch, wideload as wl
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = wl.optim.Adam([p], lr=0.5)
    >>> (p * torch.tensor([3.0, -4.0])).sum().backward()
    >>> optimizer.step()
    >>> p.data
    tensor([0.5000, 2.5000])
    """

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0, amsgrad: bool = False, *, foreach: bool | None = None, maximize: bool = False, capturable: bool = False,
        differentiable: bool = False, fused: bool | None = None, decoupled_weight_decay: bool = False,
        state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False,
    ) -> None:  # fmt: skip
        """See the class; torch's arguments in torch's order."""
        _check_rates(lr, weight_decay)
        _check(eps >= 0, "epsilon value", eps)
        defaults = {
            "lr": lr, "betas": _check_betas(betas), "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "maximize": maximize,
            "capturable": capturable, "decoupled_weight_decay": decoupled_weight_decay, "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults, differentiable=differentiable, fused=fused, foreach=foreach)

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        return {"step": torch.zeros(()), **{name: _zeros_like(p, group) for name in names}}

    def _update(self, group: dict[str, Any], batch: _Batch, grads: list[Tensor], grad_scale: Any, found_inf: Any) -> None:
        names = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        params, state = batch.local(batch.params), list(map(batch.column, names))
        (beta1, beta2), v_max = map(float, group["betas"]), state[2] if group["amsgrad"] else None
        arguments = (
            params, grads, state[0], state[1], v_max, batch.steps, _number(group["lr"]), beta1, beta2, _log(beta1), _log(beta2),
            float(group["eps"]), _decay(group["weight_decay"]), group["decoupled_weight_decay"], group["maximize"], grad_scale, found_inf,
            group["stochastic_rounding"],
        )  # fmt: skip
        step = half_adam if is_half(params[0].dtype) else adam
        call_in_place(step, arguments, (0, 2, 3) if v_max is None else (0, 2, 3, 4), batch.repeats)


class AdamW(Adam):
    """``torch.optim.AdamW``: `Adam` with decoupled weight decay, 0.01 unless given."""

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, maximize: bool = False, foreach: bool | None = None,
        capturable: bool = False, differentiable: bool = False, fused: bool | None = None, state_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
    ) -> None:  # fmt: skip
        """See the class; torch's arguments in torch's order."""
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, foreach=foreach, maximize=maximize, capturable=capturable,
            differentiable=differentiable, fused=fused, decoupled_weight_decay=True, state_dtype=state_dtype,
            stochastic_rounding=stochastic_rounding,
        )  # fmt: skip

    def __setstate__(self, state: dict[str, Any]) -> None:
        """The decay stays decoupled, whatever state is loaded."""
        super().__setstate__(state)
        for group in self.param_groups:
            group["decoupled_weight_decay"] = True


class SGD(FusedOptimizer):
    """``torch.optim.SGD``, whose step is one launch; see `FusedOptimizer` for the last two arguments. State: ``momentum_buffer``.

    With ``dampening``, which is not applied to a parameter's first gradient, a step that a GradScaler skips counts as its first.
    """

    _counts_steps = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-3, momentum: float = 0, dampening: float = 0, weight_decay: float | Tensor = 0,
        nesterov: bool = False, *, maximize: bool = False, foreach: bool | None = None, differentiable: bool = False,
        fused: bool | None = None, state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False,
    ) -> None:  # fmt: skip
        """See the class; torch's arguments in torch's order."""
        _check_rates(lr, weight_decay)
        _check(momentum >= 0, "momentum value", momentum)
        if nesterov and (momentum <= 0 or dampening != 0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay, "nesterov": nesterov,
            "maximize": maximize, "state_dtype": state_dtype, "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults, differentiable=differentiable, fused=fused, foreach=foreach)

    def _keeps_state(self, group: dict[str, Any]) -> bool:
        return bool(group["momentum"])

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return {}

    def _update(self, group: dict[str, Any], batch: _Batch, grads: list[Tensor], grad_scale: Any, found_inf: Any) -> None:
        all_params = batch.local(batch.params)
        if not group["momentum"]:
            self._launch(group, batch, all_params, grads, None, grad_scale, found_inf, is_first=False)
            return
        buffers = [state.get("momentum_buffer") for state in batch.states]
        fresh = [i for i, buffer in enumerate(buffers) if buffer is None] if type(None) in set(map(type, buffers)) else []
        for i in fresh:
            buffers[i] = batch.states[i]["momentum_buffer"] = _zeros_like(batch.params[i], group)
        firsts = fresh if group["dampening"] else []  # of zeros, momentum without dampening makes the gradient itself
        for is_first, chosen in ((True, firsts), (False, sorted({*range(len(buffers))} - {*firsts}) if firsts else None)):
            columns = all_params, grads, batch.local(buffers)
            if chosen is None or chosen:
                params, own, state = columns if chosen is None else ([column[i] for i in chosen] for column in columns)
                self._launch(group, batch, params, own, state, grad_scale, found_inf, is_first=is_first)

    @staticmethod
    def _launch(
        group: dict[str, Any], batch: _Batch, params: Any, grads: Any, buffers: Any, grad_scale: Any, found_inf: Any, *, is_first: bool
    ) -> None:
        arguments = (
            params, grads, buffers, _number(group["lr"]), float(group["momentum"]), float(group["dampening"]),
            _decay(group["weight_decay"]), is_first, group["nesterov"], group["maximize"], grad_scale, found_inf,
            group["stochastic_rounding"],
        )  # fmt: skip
        call_in_place(sgd, arguments, (0,) if buffers is None else (0, 2), batch.repeats)


class Lion(FusedOptimizer):
    """Lion (Chen and others, "Symbolic discovery of optimization algorithms", 2023), whose step is one launch. State: ``exp_avg``.

    ``p -= lr * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * p)``, then ``m = beta2 * m + (1 - beta2) * g``. See `FusedOptimizer`
    for the last two arguments.
    """

    _counts_steps = False

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1e-4, betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.99),
        weight_decay: float = 0, *, maximize: bool = False, state_dtype: torch.dtype | None = None, stochastic_rounding: bool = False,
    ) -> None:  # fmt: skip
        """See the class."""
        _check_rates(lr, weight_decay)
        defaults = {
            "lr": lr, "betas": _check_betas(betas), "weight_decay": weight_decay, "maximize": maximize, "state_dtype": state_dtype,
            "stochastic_rounding": stochastic_rounding,
        }  # fmt: skip
        super().__init__(params, defaults, differentiable=False, fused=None, foreach=None)

    def _new_state(self, group: dict[str, Any], p: Tensor) -> dict[str, Any]:
        return {"exp_avg": _zeros_like(p, group)}

    def _update(self, group: dict[str, Any], batch: _Batch, grads: list[Tensor], grad_scale: Any, found_inf: Any) -> None:
        params, means = batch.local(batch.params), batch.column("exp_avg")
        beta1, beta2 = map(float, group["betas"])
        arguments = (
            params, grads, means, _number(group["lr"]), beta1, beta2, _decay(group["weight_decay"]), group["maximize"], grad_scale,
            found_inf, group["stochastic_rounding"],
        )  # fmt: skip
        call_in_place(lion, arguments, (0, 2), batch.repeats)


def _zeros_like(p: Tensor, group: dict[str, Any]) -> Tensor:
    return torch.zeros_like(p, dtype=group["state_dtype"] or p.dtype, memory_format=torch.preserve_format)


# ---- averages of parameters


class EMA:
    """Exponential moving averages of parameters: ``average = decay * average + (1 - decay) * parameter``, one launch a device and dtype.

    They begin as copies of the parameters, in ``dtype`` if given: with a decay near 1, bf16 averages stand still.

    >>> import torch, wideload as wl
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> ema = wl.optim.EMA([p], decay=0.75)
    >>> p.data += 1
    >>> ema.update()
    >>> with ema.swapped():
    ...     p.data
    tensor([0.2500, 0.2500])
    """

    def __init__(self, params: Iterable[Tensor], decay: float = 0.999, *, dtype: torch.dtype | None = None) -> None:
        """Raises ``ValueError`` for a decay outside [0, 1]."""
        _check(0 <= decay <= 1, "decay", decay)
        self.params, self.decay = list(params), decay
        self.averages = [p.detach().to(dtype or p.dtype, copy=True) for p in self.params]

    @torch.no_grad()
    def update(self, decay: float | None = None) -> None:
        """Move every average towards its parameter, by ``decay`` instead of the usual one if given."""
        by_device = dict[torch.device, list[int]]()
        for place, p in enumerate(self.params):
            by_device.setdefault(p.device, []).append(place)
        for places in by_device.values():
            averages, params = ([_part(tensors[place], self.params[place]) for place in places] for tensors in (self.averages, self.params))
            ema.foreach(averages, params, float(self.decay if decay is None else decay), out=averages)

    @torch.no_grad()
    def copy_to(self, params: Iterable[Tensor] | None = None) -> None:
        """Write the averages into ``params``, those they are of if None."""
        torch._foreach_copy_(self.params if params is None else list(params), self.averages)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the parameters are the averages; behind, what they were."""
        before = [p.detach().clone() for p in self.params]
        self.copy_to()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.params, before)

    def state_dict(self) -> dict[str, Any]:
        """The decay and the averages."""
        return {"decay": self.decay, "averages": list(self.averages)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What `state_dict` gave; averages keep the dtype and device that they have here. Raises ``ValueError`` for others' shapes."""
        saved = state_dict["averages"]
        if [a.shape for a in saved] != [a.shape for a in self.averages]:
            raise ValueError("the averages that are loaded have other shapes than the parameters")
        self.decay = state_dict["decay"]
        torch._foreach_copy_(self.averages, list(saved))
