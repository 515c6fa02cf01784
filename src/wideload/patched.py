"""Turns the elementwise parts of a model that is there already into fused calls, in place, and back: ``wl.patch(model)``.

Recognises modules by what they compute, tried on small tensors; must not know of any model library.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wideload.errors import TraceError, WideloadError
from wideload.fused import fuse
from wideload.nn import Dropout, packed_geglu, packed_reglu, packed_swiglu
from wideload.ops import geglu, reglu, swiglu

__all__ = ["Change", "Patch", "patch"]


# ---- what modules are swapped for


@fuse
def gelu(x: Tensor) -> Tensor:
    """The exact GELU."""
    return F.gelu(x)


@fuse
def gelu_tanh(x: Tensor) -> Tensor:
    """The GELU of GPT-2, by tanh."""
    return F.gelu(x, approximate="tanh")


@fuse
def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``."""
    return F.silu(x)


@fuse
def quick_gelu(x: Tensor) -> Tensor:
    """The GELU of CLIP, by a sigmoid."""
    return x * torch.sigmoid(1.702 * x)


def _turned(x: Tensor, cos: Sequence[Tensor], sin: Sequence[Tensor]) -> Tensor:
    """``x * cos + rotate_half(x) * sin``; of the tables, the columns for each half of ``x``."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos[0] - second * sin[0], second * cos[1] + first * sin[1]), -1)


@fuse(static=("unsqueeze_dim",))
def full_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, keeps_dtype: bool) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys by tables as wide as they are, whose two halves need not be alike.

    The results have the dtype that torch promotes to, or that of ``q`` and ``k`` where ``keeps_dtype``.
    """
    c, s = cos.unsqueeze(unsqueeze_dim).chunk(2, -1), sin.unsqueeze(unsqueeze_dim).chunk(2, -1)
    turned_q, turned_k = _turned(q, c, s), _turned(k, c, s)
    return (turned_q.to(q.dtype), turned_k.to(k.dtype)) if keeps_dtype else (turned_q, turned_k)


@fuse(static=("unsqueeze_dim",))
def partial_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int, keeps_dtype: bool) -> tuple[Tensor, Tensor]:
    """As `full_rotary`, of the first components, as many as the tables have columns; the rest stays as it is."""
    width, c, s = cos.shape[-1], cos.unsqueeze(unsqueeze_dim).chunk(2, -1), sin.unsqueeze(unsqueeze_dim).chunk(2, -1)
    turned_q, turned_k = (torch.cat((_turned(x[..., :width], c, s), x[..., width:]), -1) for x in (q, k))
    return (turned_q.to(q.dtype), turned_k.to(k.dtype)) if keeps_dtype else (turned_q, turned_k)


# ---- a swapped module: of a class made from its own, which differs in forward alone


@dataclass(frozen=True, slots=True)
class _Form:
    """What a module's forward becomes. ``inputs`` are the children whose results ``op`` takes; without, it takes the module's input."""

    shown: str
    formula: str
    op: Callable[..., Any]
    inputs: tuple[str, ...] = ()

    def forward(self) -> Callable[..., Any]:
        op, inputs = self.op, self.inputs

        def activation(self: Any, *args: Any, **kwargs: Any) -> Any:
            (x,) = (*args, *kwargs.values())  # the one argument, by whatever name
            return op(x)

        def separate(self: Any, *args: Any, **kwargs: Any) -> Any:
            (x,) = (*args, *kwargs.values())
            return self.down_proj(op(self.gate_proj(x), self.up_proj(x)))

        def packed(self: Any, *args: Any, **kwargs: Any) -> Any:
            (x,) = (*args, *kwargs.values())
            return self.down_proj(op(self.gate_up_proj(x)))

        return {(): activation, _SEPARATE: separate, _PACKED: packed}[inputs]


_SEPARATE, _PACKED = ("gate_proj", "up_proj"), ("gate_up_proj",)
_GATES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "silu": (swiglu, packed_swiglu),
    "gelu": (geglu, packed_geglu),
    "gelu_tanh": (
        functools.partial(geglu, approximate="tanh"),
        functools.partial(packed_geglu, approximate="tanh"),
    ),
    "relu": (reglu, packed_reglu),
}
_GATED_FORMS = {
    form.shown: form
    for name, ops in _GATES.items()
    for op, inputs in zip(ops, (_SEPARATE, _PACKED), strict=True)
    for form in [_Form(f"fused {name}(gate) * up{', packed' * (inputs == _PACKED)}", f"{name}(gate) * up", op, inputs)]
}
_ACTIVATION_FORMS = {
    form.shown: form for op in (gelu, gelu_tanh, silu, quick_gelu) for form in [_Form(f"fused {op.__name__}", op.__name__, op)]
}
_FORMS = _GATED_FORMS | _ACTIVATION_FORMS


class _Patched:
    """A class with this base is ``original`` but for its ``forward``."""

    original: ClassVar[type[Any]]
    form: ClassVar[str]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The class has no name of its own in any module: copies and pickles make it again."""
        made = super().__reduce_ex__(max(protocol, 2))
        if not isinstance(made, tuple) or made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made  # the original class has a way of its own
        return _new_patched, (self.original, self.form, *made[1][1:]), *made[2:]


_patched_classes: dict[tuple[type[Any], str], type[Any]] = {}


def _patched_class(original: type[Any], form: str) -> type[Any]:
    """Named as the original, which wrapping policies and messages go by."""
    made = _patched_classes.get((original, form))
    if made is None:
        body = {name: getattr(original, name) for name in ("__doc__", "__module__", "__qualname__")}
        body |= {"original": original, "form": form, "forward": _FORMS[form].forward()}
        made = _patched_classes[original, form] = type(original.__name__, (_Patched, original), body)
    return made


def _new_patched(original: type[Any], form: str, *args: Any) -> Any:
    made = _patched_class(original, form)
    return made.__new__(made, *args)


# ---- trying a module on small tensors


class _DiffersError(Exception):
    """Why a module is not what it looks like."""


_EXACT = 1e-10
"""Difference in fp64, relative to the largest that a result can be: some 10^5 times its rounding, and less than any other constant or
clamp makes."""
_ROUNDINGS = 4
"""Steps of a module's dtype allowed there, of the largest that a result can be: eager PyTorch rounds a composed activation that often."""
_FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16


def _agrees(actual: Any, expected: Tensor, largest: Tensor, is_own: bool) -> bool:
    """Whether a result is the expected one within bounds; ``largest`` is its magnitude without cancellation."""
    if not isinstance(actual, Tensor) or actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    info = torch.finfo(expected.dtype)
    bound = (_ROUNDINGS * info.eps if is_own else _EXACT) * largest.double() + info.smallest_normal
    return bool(((actual.double() - expected.double()).abs() <= bound).all())  # not of NaN


def _operands(num: int, *, is_own: bool, shape: tuple[int, ...] = (2, 3, 128)) -> list[Tensor]:
    """Small and large numbers of both signs in fp64; for a test in a module's own dtype, none that overflow in fp16."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    normal = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for _ in range(num)]
    exponents = torch.rand(shape, generator=generator, dtype=torch.float64, device="cpu") * (4 if is_own else 8) - (3 if is_own else 4)
    return [normal[0] * 10**exponents, *normal[1:]]


@dataclass(frozen=True, slots=True)
class _Place:
    """The dtype and the device of a module's floats."""

    dtype: torch.dtype
    device: torch.device


def _place_of(module: torch.nn.Module, default: _Place) -> _Place:
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype in _FLOATS:
            return _Place(tensor.dtype, tensor.device)
    return default


def _places(own: _Place) -> list[tuple[_Place, bool]]:
    """Where a module is tried: in fp64 on the CPU, which tells functions apart, in the dtypes whose casts may be others, and as it is."""
    cpu = torch.device("cpu")
    casts = [_Place(dtype, cpu) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    coarse = dict.fromkeys([*casts, *([own] if own.device.type != "meta" else [])])
    return [(_Place(torch.float64, cpu), False), *((place, True) for place in coarse)]


class _CountKernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls that compute, views left out."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


class _StandIn(torch.nn.Module):
    """Takes the place of a linear layer: remembers what it is given and returns what it is told."""

    def __init__(self, result: Tensor) -> None:
        super().__init__()
        self.result, self.given = result, list[Any]()

    def forward(self, x: Tensor) -> Tensor:
        self.given.append(x)
        return self.result


def _likeness(module: torch.nn.Module, is_training: bool, children: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """A module of the same class and attributes, with other ``children``: what is tried on it leaves the module itself alone."""
    likeness: torch.nn.Module = object.__new__(type(module))
    others = {name: child and _likeness(child, is_training, {}) for name, child in module._modules.items() if name not in children}
    likeness.__dict__.update(module.__dict__, _modules={**others, **children}, training=is_training)
    return likeness


_REPLACED = "its forward has been replaced on this very module"


def _check_own_forward(module: torch.nn.Module) -> None:
    if "forward" in vars(module):
        raise _DiffersError(_REPLACED)
    parameters = [*inspect.signature(type(module).forward).parameters.values()][1:]
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        raise _DiffersError("its forward takes more than one argument")


def _has_hooks(module: torch.nn.Module) -> bool:
    return any(value for name, value in vars(module).items() if name.endswith("_hooks") and "state_dict" not in name)


def _try_gated(module: torch.nn.Module, inputs: tuple[str, ...], place: _Place, is_own: bool, is_training: bool) -> tuple[Any, ...]:
    """What the module, with stand-ins for its linear layers, hands to ``down_proj``; the gate and ``up``; the number of kernels."""
    gate, up = (operand.to(place.device, place.dtype) for operand in _operands(2, is_own=is_own))
    x, result = torch.ones_like(gate), torch.ones_like(gate)
    values = (gate, up) if inputs == _SEPARATE else (torch.cat((gate, up), -1),)
    layers = {name: _StandIn(value.clone()) for name, value in zip(inputs, values, strict=True)} | {"down_proj": _StandIn(result)}
    likeness = _likeness(module, is_training, layers)
    with _CountKernels() as kernels:
        returned = type(module).forward(likeness, x)
    if returned is not result or any(len(layer.given) != 1 for layer in layers.values()):
        raise _DiffersError("it does more than down_proj(act(gate) * up)")
    if any(layers[name].given[0] is not x for name in inputs):
        raise _DiffersError("its input is changed before the linear layers")
    return layers["down_proj"].given[0], gate, up, kernels.num


def _match_gated(module: torch.nn.Module, inputs: tuple[str, ...], own: _Place) -> tuple[_Form, int]:
    """The form whose results are the module's, and its number of kernels."""
    _check_own_forward(module)
    others = [child for name, child in module.named_children() if name not in (*inputs, "down_proj")]
    if any(_has_hooks(part) for child in others for part in child.modules()):
        raise _DiffersError("its activation has hooks, which would not run")
    held = [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]
    if held or any([*child.parameters(), *child.buffers()] for child in others):
        raise _DiffersError("it has parameters or buffers beside those of its linear layers")
    found, num_kernels = [form for form in _GATED_FORMS.values() if form.inputs == inputs], 0
    for place, is_own in _places(own):
        for is_training in (False, True):
            actual, gate, up, num = _try_gated(module, inputs, place, is_own, is_training)
            num_kernels = num_kernels or num
            given = (gate, up) if inputs == _SEPARATE else (torch.cat((gate, up), -1),)
            largest = (gate.double() * up.double()).abs()
            found = [form for form in found if _agrees(actual, form.op(*given), largest, is_own)]
    return _only(found, _GATED_FORMS), num_kernels


def _match_activation(module: torch.nn.Module, own: _Place) -> tuple[_Form, int]:
    """The form whose results are those of a module that is several kernels, and their number."""
    _check_own_forward(module)
    found, num_kernels = list(_ACTIVATION_FORMS.values()), 0
    for place, is_own in _places(own):
        for is_training in (False, True):
            (x,) = (operand.to(place.device, place.dtype) for operand in _operands(1, is_own=is_own))
            likeness, given = _likeness(module, is_training, {}), x.clone()
            with _CountKernels() as kernels:
                actual = type(module).forward(likeness, given)
            if kernels.num < 2:
                raise _DiffersError("one kernel already, which a fused one would only repeat")
            num_kernels = num_kernels or kernels.num
            found = [form for form in found if _agrees(actual, form.op(x), x.abs(), is_own)]
    return _only(found, _ACTIVATION_FORMS), num_kernels


def _only(found: Sequence[_Form], forms: dict[str, _Form]) -> _Form:
    if not found:
        raise _DiffersError(f"it computes none of {', '.join(dict.fromkeys(form.formula for form in forms.values()))}")
    return found[0]


# ---- swaps


class Change(NamedTuple):
    """One module, or a function of one: its path in the model, what it was, what it is now, and why. Left alone, it is what it was."""

    path: str
    was: str
    now: str
    why: str

    @property
    def is_swap(self) -> bool:
        """Whether anything is other than it was."""
        return self.now != self.was


class _Swap(Protocol):
    def apply(self) -> None: ...
    def undo(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class _ClassSwap:
    module: torch.nn.Module
    before: type[Any]
    after: type[Any]

    def apply(self) -> None:
        self.module.__class__ = self.after

    def undo(self) -> bool:
        """Whether the module was still as `apply` left it, and is now as before."""
        if type(self.module) is not self.after:
            return type(self.module) is self.before
        self.module.__class__ = self.before
        return True


@dataclass(frozen=True, slots=True)
class _Rotary:
    """A Python module's function for rotary embeddings, fused for as long as any of ``users`` is patched."""

    namespace: dict[str, Any]
    fused: Callable[..., Any]
    original: Callable[..., Any]
    users: weakref.WeakSet[torch.nn.Module]


@dataclass(frozen=True, slots=True)
class _RotarySwap:
    rotary: _Rotary
    users: tuple[torch.nn.Module, ...]

    def apply(self) -> None:
        self.rotary.users.update(self.users)
        self.rotary.namespace[_ROTARY_NAME] = self.rotary.fused

    def undo(self) -> bool:
        """Whether the function was still the fused one; it stays for other models that are patched."""
        self.rotary.users.difference_update(self.users)
        if self.rotary.namespace.get(_ROTARY_NAME) is not self.rotary.fused:
            return False
        if not self.rotary.users:
            self.rotary.namespace[_ROTARY_NAME] = self.rotary.original
        return True


_Found = tuple[Change, _Swap | None]


def _kept(path: str, was: str, why: str) -> _Found:
    return Change(path, was, was, why), None


_NAMED_ACTIVATION = re.compile("gelu|silu|swish|relu", re.IGNORECASE)
"""Classes that are run to find out what they compute; others might mind."""


def _find_swap(path: str, module: torch.nn.Module, default: _Place) -> _Found | None:
    """What is to be done with one module; None where it is nothing like what can be swapped."""
    if isinstance(module, _Patched | Dropout):
        return None
    name, children, own = type(module).__name__, module._modules, _place_of(module, default)
    try:
        for inputs in (_SEPARATE, _PACKED):
            if all(isinstance(children.get(child), torch.nn.Module) for child in (*inputs, "down_proj")):
                form, num = _match_gated(module, inputs, own)
                change = Change(path, form.formula, form.shown, f"1 kernel instead of {num}")
                return change, _ClassSwap(module, type(module), _patched_class(type(module), form.shown))
        if isinstance(module, torch.nn.Dropout):
            return _find_dropout(path, module)
        if _NAMED_ACTIVATION.search(name) and not (children or module._parameters or module._buffers):
            form, num = _match_activation(module, own)
            change = Change(path, name, form.shown, f"1 kernel instead of {num}")
            return change, _ClassSwap(module, type(module), _patched_class(type(module), form.shown))
    except Exception as error:  # a module that is not what it looks like may raise anything
        return _kept(path, name, _reason(error))
    return None


def _reason(error: Exception) -> str:
    if isinstance(error, _DiffersError):
        return str(error)
    return f"trying it raised {type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _find_dropout(path: str, module: torch.nn.Dropout) -> _Found | None:
    name = type(module).__name__
    if module.p == 0:
        return None
    if type(module) is not torch.nn.Dropout:
        return _kept(path, name, "a subclass of torch.nn.Dropout may drop otherwise")
    if "forward" in vars(module):
        return _kept(path, name, _REPLACED)
    if module.inplace:
        return _kept(path, name, "it drops in place")
    change = Change(path, "torch.nn.Dropout", "wl.nn.Dropout", "no mask in memory; other random numbers")
    return change, _ClassSwap(module, torch.nn.Dropout, Dropout)


# ---- rotary embeddings, which are functions of a Python module

_ROTARY_NAME = "apply_rotary_pos_emb"
_ROTARY_PARAMETERS = "q", "k", "cos", "sin"


def _find_rotaries(model: torch.nn.Module, default: _Place) -> Iterator[_Found]:
    """What is to be done with the function of each Python module that a forward of the model looks it up in."""
    users: dict[int, tuple[dict[str, Any], list[torch.nn.Module]]] = {}
    for module in model.modules():
        forward = inspect.unwrap(getattr(type(module), "forward", module.forward))  # a scripted module's class has none
        if _ROTARY_NAME in getattr(getattr(forward, "__code__", None), "co_names", ()) and _ROTARY_NAME in forward.__globals__:
            users.setdefault(id(forward.__globals__), (forward.__globals__, []))[1].append(module)
    for namespace, modules in users.values():
        path, function = f"{namespace.get('__name__')}.{_ROTARY_NAME}", namespace[_ROTARY_NAME]
        try:
            rotary = getattr(function, "wideload_rotary", None)
            if rotary is None or rotary.fused is not function:
                rotary = _fuse_rotary(namespace, function, _place_of(modules[0], default))
        except Exception as error:
            yield _kept(path, _ROTARY_NAME, _reason(error))
            continue
        new = tuple(module for module in modules if module not in rotary.users)
        if new:
            why = "q and k in one call, for every model of this Python module"
            yield Change(path, _ROTARY_NAME, "fused rotary embedding", why), _RotarySwap(rotary, new)


def _fuse_rotary(namespace: dict[str, Any], function: Callable[..., Any], own: _Place) -> _Rotary:
    parameters = inspect.signature(function).parameters
    default = getattr(parameters.get("unsqueeze_dim"), "default", None)
    if tuple(parameters)[:4] != _ROTARY_PARAMETERS or not isinstance(default, int):
        raise _DiffersError(f"it takes ({', '.join(parameters)}), not (q, k, cos, sin, ..., unsqueeze_dim=1)")
    if not _is_rotary(function, full_rotary, own):
        raise _DiffersError("it is not q * cos + rotate_half(q) * sin")
    ops = [op for op in (full_rotary, partial_rotary) if _is_rotary(function, op, own)]
    mixed = {op: next((keeps for keeps in (True, False) if _is_rotary(function, op, own, keeps)), None) for op in ops}
    others = {name: parameters[name].default for name in tuple(parameters)[4:]}

    @functools.wraps(function)
    def fused(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**others, **dict(zip(others, args, strict=False)), **kwargs}
        op = full_rotary if cos.shape[-1] == q.shape[-1] else partial_rotary
        keeps_dtype = False if q.dtype == k.dtype == cos.dtype == sin.dtype else mixed.get(op)
        is_tried = len(args) <= len(others) and all(
            name in others and (name == "unsqueeze_dim" or value is others[name]) for name, value in given.items()
        )
        if not is_tried or op not in mixed or keeps_dtype is None or cos.shape[-1] % 2 or cos.shape[-1] != sin.shape[-1]:
            return function(q, k, cos, sin, *args, **kwargs)
        return op(q, k, cos, sin, given["unsqueeze_dim"], keeps_dtype)

    rotary = _Rotary(namespace, fused, function, weakref.WeakSet())
    fused.wideload_rotary = rotary  # type: ignore[attr-defined]
    return rotary


def _is_rotary(function: Callable[..., Any], op: Callable[..., Any], own: _Place, keeps_dtype: bool | None = None) -> bool:
    """Whether the two agree on queries with more heads than keys, before and behind the positions, by tables whose halves differ.

    With ``keeps_dtype``, by tables in fp32 of halves, whose results have the dtype that it says.
    """
    batch, positions, dim = 2, 3, 16
    width = dim if op is full_rotary else dim // 2
    for place, is_own in _places(own) if keeps_dtype is None else [(_Place(torch.bfloat16, torch.device("cpu")), True)]:
        for unsqueeze_dim in (1, 2):
            heads = [(batch, h, positions, dim) if unsqueeze_dim == 1 else (batch, positions, h, dim) for h in (4, 2)]
            generator = torch.Generator(device="cpu").manual_seed(unsqueeze_dim)
            q, k, cos, sin = (
                torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(place.device, place.dtype)
                for shape in (*heads, (batch, positions, width), (batch, positions, width))
            )
            if keeps_dtype is not None:
                cos, sin = cos.float(), sin.float()
            largest = cos.abs().max() + sin.abs().max() + 1
            expected = op(q, k, cos, sin, unsqueeze_dim, bool(keeps_dtype))
            try:
                actual = function(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
            except Exception:  # of tables narrower than the heads, for one
                return False
            pairs = zip(actual, expected, (q, k), strict=True)
            if not all(_agrees(a, e, (x.abs().max() * largest).expand_as(e), is_own) for a, e, x in pairs):
                return False
    return True


# ---- the patch


class Patch:
    """What `patch` did to a model. Leaving it as a context, or `undo`, makes all of it undone; printed, it is a table."""

    def __init__(self, model: torch.nn.Module, found: Sequence[_Found]) -> None:
        """Swap all, or nothing where one cannot be."""
        self._name = type(model).__name__
        self.changes: list[Change] = [change for change, _ in found]
        self._swaps: list[_Swap] = []
        try:
            for _, swap in found:
                if swap is not None:
                    self._swaps.append(swap)
                    swap.apply()
        except BaseException:
            self._undo()
            raise

    def undo(self) -> None:
        """Make every module what it was; once is enough. What another hand has changed since stays, and is a ``WideloadError``."""
        lost = self._undo()
        if lost:
            raise WideloadError(
                f"{lost} of the swaps in {self._name} could not be undone: other code has changed those modules since. "
                "Undo what was done last first."
            )

    def _undo(self) -> int:
        swaps, self._swaps = self._swaps[::-1], []
        return [swap.undo() for swap in swaps].count(False)

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<wl.patch of {self._name}: {sum(change.is_swap for change in self.changes)} swaps>"

    def __str__(self) -> str:
        """A row for the modules that differ in the numbers of their paths alone."""
        swaps = [change for change in self.changes if change.is_swap]
        kept = [change for change in self.changes if not change.is_swap]
        if not self.changes:
            return f"{self._name}: nothing to swap, nothing changed"
        rows = [(path, f"{num} x", f"{change.was} -> {change.now}", change.why) for path, change, num in _grouped(swaps)]
        rows += [(path, f"{num} x", f"{change.was} left", change.why) for path, change, num in _grouped(kept)]
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        lines = ["  ".join(["", *(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[3]]) for row in rows]
        return "\n".join([f"{self._name}: {len(swaps)} swapped, {len(kept)} left as they were", *lines])


def _grouped(changes: Sequence[Change]) -> list[tuple[str, Change, int]]:
    """One for all changes that differ in the numbers of their paths alone, and how many they are."""
    groups: dict[tuple[str, ...], list[Change]] = {}
    for change in changes:
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", change.path), *change[1:]), []).append(change)
    return [(key[0] if len(group) > 1 else group[0].path, group[0], len(group)) for key, group in groups.items()]


def patch(model: torch.nn.Module) -> Patch:
    """Swap a model's gated MLPs, composed activations, dropouts and rotary embeddings for fused ones, in place.

    Looks for modules with the children ``gate_proj``, ``up_proj`` (or ``gate_up_proj``) and ``down_proj``, for ``torch.nn.Dropout``, for
    activations that are several kernels in eager PyTorch (GPT-2's), and for the global function ``apply_rotary_pos_emb`` of the modules'
    Python files: Llama, Mistral, Qwen, Phi-3, Gemma, GPT-2. Each is tried on small random tensors first, in fp64 and in its own dtype on
    its own device, in training and in eval mode, and is left as it is where the fused one gives anything else beyond rounding; the
    `Patch` that is returned says why. Parameters, buffers, hooks, children and the keys of ``state_dict`` stay; ``isinstance`` holds.
    Of a model that is patched already, what is new is swapped. Raises ``TraceError`` for what is no module.

    >>> import torch, wideload as wl
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Dropout(0.1))
    >>> with wl.patch(model) as patch:
    ...     print(patch)
    Sequential: 1 swapped, 1 left as they were
      2  1 x  torch.nn.Dropout -> wl.nn.Dropout  no mask in memory; other random numbers
      1  1 x  GELU left                          one kernel already, which a fused one would only repeat
    >>> model[2]
    Dropout(p=0.1, inplace=False)
    """
    if not isinstance(model, torch.nn.Module):
        raise TraceError(f"wl.patch got a {type(model).__name__}; allowed: a torch.nn.Module. Fuse a function with wl.fuse.")
    default = _place_of(model, _Place(torch.get_default_dtype(), torch.device("cpu")))
    found: list[_Found] = []
    within: set[torch.nn.Module] = set()
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type == "cuda"}
    with torch.no_grad(), torch.random.fork_rng(devices=list(devices)):
        for path, module in model.named_modules():
            one = None if module in within else _find_swap(path, module, default)
            if one is not None:
                found.append(one)
            if isinstance(module, _Patched) or (one and isinstance(one[1], _ClassSwap)):
                within.update(_unused(module))
        found += _find_rotaries(model, default)
    return Patch(model, found)


def _unused(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The parts that a swapped module does not call any more: its activation."""
    for name, child in module.named_children():
        if name not in (*_SEPARATE, *_PACKED, "down_proj"):
            yield from child.modules()
