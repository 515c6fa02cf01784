"""Turns a call whose arguments are what an earlier call's were into launches, without looking again at what that one found out.

Knows tensors, launches and how arguments are given; never expressions, nor how kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from wideload.captures import Captures
from wideload.outputs import extent_of
from wideload.plan import ACCESS_BYTES
from wideload.steps import Steps, define, tuple_of
from wideload.structure import are_same

__all__ = [
    "MISSED",
    "STATIC_TYPES",
    "Circumstances",
    "Likeness",
    "Shortcut",
    "are_immutable",
    "find_likeness",
    "find_shortcut",
    "shortcut_key",
]

MISSED = object()
"""What a shortcut returns that is not a call's."""

STATIC_TYPES = (str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis))
"""Of arguments that are part of the trace, as bools are."""

_NUMBERS = (int, float, complex)
_CONSTANTS = (bool, *STATIC_TYPES)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def shortcut_key(args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None = None) -> Any:
    """Where calls of these shapes and dtypes keep their shortcuts."""
    kinds = [
        (value.shape, value.dtype, value.requires_grad)
        if type(value) in _PLAIN
        else (type(value), value)
        if isinstance(value, _CONSTANTS)
        else type(value)
        for value in (*args, *kwargs.values(), out)
    ]
    return torch.is_grad_enabled(), tuple(kwargs), *kinds


def are_immutable(defaults: Any) -> bool:
    """Whether no default of a function, nor an item of one that is a tuple, can change without becoming another object."""
    return all(are_immutable(value) if type(value) is tuple else isinstance(value, (*_NUMBERS, *_CONSTANTS)) for value in defaults or ())


class Circumstances:
    """What a call depends on besides its arguments: what the function has captured, its defaults, torch's modes that no guard sees.

    ``changes`` are expressions of which one is true where they are no longer the same, of the names in ``names``.
    """

    __slots__ = ("changes", "names")

    def __init__(self, function: Any, captures: Captures) -> None:
        """As they are now."""
        has_defaults = hasattr(function, "__defaults__")
        self.changes = (
            "read() is not captured",
            *(["function.__defaults__ is not defaults"] if has_defaults else []),
            "default_dtype() is not dtype",
            "is_grad_enabled() is not enabled",
            "forward_ad._current_level >= 0",
            "num_modes()",
        )
        self.names = {
            "read": captures.read,
            "captured": captures.read(),
            "function": function,
            "defaults": getattr(function, "__defaults__", None),
            "default_dtype": torch.get_default_dtype,
            "dtype": torch.get_default_dtype(),
            "is_grad_enabled": torch.is_grad_enabled,
            "enabled": torch.is_grad_enabled(),
            "forward_ad": forward_ad,
            "num_modes": torch._C._len_torch_dispatch_stack,
        }


class Likeness:
    """Tensors of the same type, dtype, device, shape, strides, ``requires_grad``, dispatch keys and alignment as those it was made of.

    ``check`` is true of tensors alike in all but the alignment: torch's own guard. Dispatch keys tell pending conjugation, autocast,
    ``torch.func``, modes. ``phases`` are the addresses modulo a whole access. Raises ``AttributeError`` or ``TypeError`` in a torch
    without this guard.
    """

    __slots__ = ("check", "phases")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        # 0.4 us for three, where reading their dtypes, shapes and strides takes 3 on an H200's host.
        guard = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self.check: Callable[..., bool] = guard.check
        self.phases = [tensor.data_ptr() % ACCESS_BYTES for tensor in tensors]

    def holds(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether other tensors are alike."""
        if len(tensors) != len(self.phases) or not self.check(*tensors):
            return False
        return [tensor.data_ptr() % ACCESS_BYTES for tensor in tensors] == self.phases

    def differences(self, addresses: Sequence[str]) -> list[str]:
        """Expressions of names of addresses, one of them true where tensors begin with another alignment; ``phase_p0`` is that of one."""
        if not any(self.phases):
            return [f"({' | '.join(addresses)}) % {ACCESS_BYTES}"]
        return [f"{address} % {ACCESS_BYTES} != phase_{address}" for address in addresses]


def find_likeness(tensors: Sequence[torch.Tensor]) -> Likeness | None:
    """None in another torch."""
    try:
        return Likeness(tensors)
    except (AttributeError, TypeError):
        return None


@dataclass(frozen=True, slots=True)
class _Place:
    """How what is written lies to an argument: at the same address, or before or behind it by what both take, in bytes."""

    is_same: bool
    nbytes: int
    out_nbytes: int

    def holds(self, address: int, out: int) -> bool:
        return out == address if self.is_same else not address - self.out_nbytes < out < address + self.nbytes

    def difference(self, address: str) -> str:
        """An expression that is true where it does not hold of ``p_out``; with numbers by name: they are not part of a text."""
        return f"p_out != {address}" if self.is_same else f"{address} - nbytes < p_out < {address} + nbytes_{address}"


def _find_places(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[_Place, ...] | None:
    """None where the tensor that is written lies otherwise to an argument."""
    written, places = extent_of(out), []
    for tensor in tensors:
        read = extent_of(tensor)
        nbytes = read.end_bytes - read.address_bytes, written.end_bytes - written.address_bytes
        place = _Place(tensor.data_ptr() == out.data_ptr(), *nbytes)
        if not place.holds(tensor.data_ptr(), out.data_ptr()):
            return None
        places.append(place)
    return tuple(places)


def _differs(value: Any, constant: Any) -> bool:
    return type(value) is not type(constant) or value != constant or repr(value) != repr(constant)


Shortcut = Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor | None], Any]
"""A function of a call's arguments, by place and by name, and of ``out=``: what the call returns, or `MISSED` where it may not be like the
earlier one."""


def find_shortcut(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[Any],
    static: Sequence[bool],
    circumstances: Circumstances,
    find_steps: Callable[[], Steps],
) -> Shortcut | None:
    """The shortcut of a call that was taken apart into ``tensors`` and ``scalars``; None where calls like it cannot be told so cheaply.

    ``static`` says of each argument, as it is given, whether a number there is part of the trace. ``find_steps``: what such calls do.
    """
    values = (*args, *kwargs.values())
    kinds = [_kind_of(value, is_static) for value, is_static in zip(values, static, strict=True)]
    places = {kind: [at for at, of in enumerate(kinds) if of == kind] for kind in "tnc"}
    given = [values[at] for at in places["t"]]
    if "" in kinds or [values[at] for at in places["n"]] != [*scalars] or not are_same(given, tensors):
        return None
    if not all(tensor.numel() for tensor in tensors) or len({tensor.device for tensor in tensors}) > 1:
        return None
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        return None
    lies = () if out is None else _find_places(tensors, out)
    is_argument = any(tensor is out for tensor in tensors)
    likeness = find_likeness(tensors if out is None or is_argument else (*tensors, out))
    if lies is None or likeness is None:
        return None

    steps = find_steps()
    names = {at: f"{kind}{number}" for kind, found in places.items() for number, at in enumerate(found)}
    by_place, by_name = [names[at] for at in range(len(args))], [names[at] for at in range(len(args), len(values))]
    held = [names[at] for at in places["t"]]
    addresses = [f"p{at}" for at in range(len(held))]
    compared = (held, addresses) if out is None or is_argument else ([*held, "out"], [*addresses, "p_out"])
    lines = (
        _missed_if(f"len(args) != {len(args)}", "tuple(kwargs) != by_name" if kwargs else "kwargs", f"out is {'not ' * (out is None)}None"),
        *[f"{', '.join(found)}, = {source}" for found, source in ((by_place, "args"), (by_name, "kwargs.values()")) if found],
        _missed_if(
            *[f"type({names[at]}) is not kind_{names[at]}" for at in places["n"]],
            *[f"{names[at]} is not constant_{names[at]} and differs({names[at]}, constant_{names[at]})" for at in places["c"]],
            *[f"{name} is not out" for name, tensor in zip(held, tensors, strict=True) if tensor is out],
            f"not check({', '.join(compared[0])})",
        ),
        *[f"{address} = {tensor}.data_ptr()" for address, tensor in zip(addresses, held, strict=True)],
        *(["p_out = out.data_ptr()"] if out is not None else []),
        f"numbers = {tuple_of(names[at] for at in places['n'])}",
        _missed_if(
            *likeness.differences(compared[1]),
            *[f"{one} == {other}" for at, one in enumerate(addresses) for other in addresses[:at]],
            *[lie.difference(address) for lie, address in zip(lies, addresses, strict=False)],
            *circumstances.changes,
            *(["current() != index"] if torch.cuda.device_count() > 1 else []),
        ),
    )
    constants = {"MISSED": MISSED, "check": likeness.check, "differs": _differs, "by_name": tuple(kwargs)}
    constants |= {"current": torch._C._cuda_getDevice, "index": tensors[0].device.index, **circumstances.names}
    constants |= {f"phase_{address}": phase for address, phase in zip(compared[1], likeness.phases, strict=True)}
    constants |= {f"kind_{names[at]}": type(values[at]) for at in places["n"]}
    constants |= {f"constant_{names[at]}": values[at] for at in places["c"]}
    for lie, address in zip(lies, addresses, strict=False):
        constants |= {"nbytes": lie.out_nbytes, f"nbytes_{address}": lie.nbytes}
    assert all(constants[name] == steps.names[name] for name in constants.keys() & steps.names.keys())
    return define("def call(args, kwargs, out=None):", Steps((*lines, *steps.lines), {**constants, **steps.names}))


def _kind_of(value: Any, is_static: bool) -> str:
    """Of what kind an argument is: ``t`` a tensor, ``n`` a run-time number, ``c`` what is part of the trace, or none of them."""
    if isinstance(value, torch.Tensor):
        return "t"
    if type(value) in _NUMBERS:
        return "c" if is_static else "n"
    return "c" if isinstance(value, _CONSTANTS) else ""


def _missed_if(*tests: str) -> str:
    return f"if {' or '.join(tests)}: return MISSED"
