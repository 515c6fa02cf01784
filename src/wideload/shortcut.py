"""Turns a call whose arguments are what an earlier call's were into launches, without looking again at what that one found out.

Knows tensors, launches and how arguments are given; never expressions, nor how kernels are chosen.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from wideload.captures import Captures
from wideload.outputs import extent_of
from wideload.plan import ACCESS_BYTES

__all__ = [
    "MISSED",
    "STATIC_TYPES",
    "Circumstances",
    "Likeness",
    "Shortcut",
    "are_immutable",
    "find_likeness",
    "find_shortcut",
    "remember",
    "shortcut_key",
]

MAX_REMEMBERED = 4096
"""Traces, and layouts, that one function keeps; the oldest goes first. An entry takes some 10 kB."""

MISSED = object()
"""What a shortcut returns that is not a call's."""

STATIC_TYPES = (str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis))
"""Of arguments that are part of the trace, as bools are."""

_T = TypeVar("_T")
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


def remember(cache: dict[Any, _T], key: Any, value: _T, most: int | None = None) -> _T:
    """Keep ``value``, in the place of the oldest of ``most`` (`MAX_REMEMBERED`); return it."""
    if len(cache) >= (MAX_REMEMBERED if most is None else most):
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value


class Circumstances:
    """What a call depends on besides its arguments: what the function has captured, its defaults, torch's modes that no guard sees."""

    __slots__ = ("_captured", "_captures", "_defaults", "_dtype", "_function", "_is_grad_enabled")

    def __init__(self, function: Any, captures: Captures) -> None:
        """As they are now."""
        self._function, self._captures, self._captured = function, captures, captures.read()
        self._defaults = getattr(function, "__defaults__", None)
        self._dtype, self._is_grad_enabled = torch.get_default_dtype(), torch.is_grad_enabled()

    def hold(self) -> bool:
        """Whether they are the same."""
        return (
            self._captures.read() is self._captured
            and getattr(self._function, "__defaults__", None) is self._defaults
            and torch.get_default_dtype() is self._dtype
            and torch.is_grad_enabled() is self._is_grad_enabled
            and forward_ad._current_level < 0
            and not torch._C._len_torch_dispatch_stack()
        )


@dataclass(frozen=True, slots=True)
class _Given:
    """How arguments are given: names of those given by name, places of tensors, kinds of run-time numbers, and what the others are."""

    names: tuple[str, ...]
    tensors: tuple[int, ...]
    numbers: tuple[tuple[int, type], ...]
    constants: tuple[tuple[int, Any], ...]


class Likeness:
    """Tensors of the same type, dtype, device, shape, strides, ``requires_grad``, dispatch keys and alignment as those it was made of.

    All but the alignment is for torch's own guard to compare. Dispatch keys tell pending conjugation, autocast, ``torch.func``, modes.
    Raises ``AttributeError`` or ``TypeError`` in a torch without this guard.
    """

    __slots__ = ("_check", "_is_aligned", "_phases")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        # 0.4 us for three, where reading their dtypes, shapes and strides takes 3 on an H200's host.
        guard = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._check: Callable[..., bool] = guard.check
        self._phases = [tensor.data_ptr() % ACCESS_BYTES for tensor in tensors]
        self._is_aligned = not any(self._phases)

    def addresses(self, tensors: Sequence[torch.Tensor]) -> list[int] | None:
        """Where other tensors begin, or None where they are not alike."""
        if len(tensors) != len(self._phases) or not self._check(*tensors):
            return None
        addresses = [tensor.data_ptr() for tensor in tensors]
        if self._is_aligned:
            bits = 0
            for address in addresses:
                bits |= address
            return None if bits % ACCESS_BYTES else addresses
        return addresses if [address % ACCESS_BYTES for address in addresses] == self._phases else None


def find_likeness(tensors: Sequence[torch.Tensor]) -> Likeness | None:
    """None in another torch."""
    try:
        return Likeness(tensors)
    except (AttributeError, TypeError):
        return None


class Shortcut:
    """A call of one layout: which arguments are like it, and what it then does."""

    __slots__ = ("_circumstances", "_given", "_index", "_is_tensors", "_likeness", "_places", "_run", "_written")

    def __init__(
        self,
        given: _Given,
        device: torch.device,
        likeness: Likeness,
        places: Sequence[_Place] | None,
        written: int | None,
        circumstances: Circumstances,
        run: Callable[..., Any],
    ) -> None:
        """Where something is written, ``places`` say how it lies to each argument; ``written`` is which of them it is.

        Where it is none of them, ``likeness`` is to all arguments and to it.
        """
        self._given, self._likeness, self._places, self._circumstances, self._run = given, likeness, places, circumstances, run
        self._written = written
        self._index = device.index
        self._is_tensors = not given.names and not given.numbers and not given.constants

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None = None) -> Any:
        """What the call returns, or `MISSED` where it may not be like the earlier one."""
        scalars: tuple[Any, ...] = ()
        if (out is None) is not (self._places is None):
            return MISSED
        if self._is_tensors:
            if kwargs:
                return MISSED
            tensors = args
        else:
            given = self._given
            if tuple(kwargs) != given.names:
                return MISSED
            values = (*args, *kwargs.values())
            if len(values) != len(given.tensors) + len(given.numbers) + len(given.constants):
                return MISSED
            for at, kind in given.numbers:
                if type(values[at]) is not kind:
                    return MISSED
            for at, constant in given.constants:
                value = values[at]
                if value is not constant and (type(value) is not type(constant) or value != constant or repr(value) != repr(constant)):
                    return MISSED
            tensors = tuple([values[at] for at in given.tensors])
            scalars = tuple([values[at] for at, _ in given.numbers])
        if out is not None and self._written is None:
            tensors = (*tensors, out)
        addresses = self._likeness.addresses(tensors)
        if addresses is None or not self._circumstances.hold() or torch._C._cuda_getDevice() != self._index:
            return MISSED
        if self._written is not None:
            if tensors[self._written] is not out:
                return MISSED
            tensors = (*tensors, out)
            addresses.append(addresses[self._written])
        if len(set(addresses)) != len(addresses) if self._places is None else not _lie_alike(self._places, addresses):
            return MISSED
        return self._run(tensors, addresses, scalars)


@dataclass(frozen=True, slots=True)
class _Place:
    """How what is written lies to an argument: at the same address, or before or behind it by what both take, in bytes."""

    is_same: bool
    nbytes: int
    out_nbytes: int

    def holds(self, address: int, out: int) -> bool:
        return out == address if self.is_same else address + self.nbytes <= out or out + self.out_nbytes <= address


def _lie_alike(places: Sequence[_Place], addresses: Sequence[int]) -> bool:
    *inputs, out = addresses
    return len(set(inputs)) == len(inputs) and all(place.holds(address, out) for place, address in zip(places, inputs, strict=True))


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


def find_shortcut(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: torch.Tensor | None,
    tensors: Sequence[torch.Tensor],
    scalars: Sequence[Any],
    static: Sequence[bool],
    circumstances: Circumstances,
    run: Callable[..., Any],
) -> Shortcut | None:
    """The shortcut of a call that was taken apart into ``tensors`` and ``scalars``; None where calls like it cannot be told so cheaply.

    ``static`` says of each argument, as it is given, whether a number there is part of the trace. ``run`` takes the tensors, ``out`` as the
    last of them, their addresses and the scalars, with the tensors' device the current one.
    """
    values = (*args, *kwargs.values())
    kinds = [type(value) for value in values]
    at_tensors = tuple(at for at, value in enumerate(values) if isinstance(value, torch.Tensor))
    numbers = [at for at, kind in enumerate(kinds) if kind in _NUMBERS]
    at_numbers = tuple((at, kinds[at]) for at in numbers if not static[at])
    constants = tuple((at, value) for at, value in enumerate(values) if isinstance(value, _CONSTANTS) or (at in numbers and static[at]))
    given = _Given(tuple(kwargs), at_tensors, at_numbers, constants)
    addresses = {tensor.data_ptr() for tensor in tensors}
    is_all = len(at_tensors) + len(at_numbers) + len(constants) == len(values)
    is_ordered = len(at_tensors) == len(tensors) and all(map(operator.is_, (values[at] for at in at_tensors), tensors))
    if not is_all or not is_ordered or [values[at] for at, _ in at_numbers] != list(scalars):
        return None
    if not all(tensor.numel() for tensor in tensors) or len(addresses) != len(tensors) or len({t.device for t in tensors}) > 1:
        return None
    places = None if out is None else _find_places(tensors, out)
    if places is None and out is not None:
        return None
    written = None if out is None else next((at for at, tensor in enumerate(tensors) if tensor is out), None)
    likeness = find_likeness(tensors if out is None or written is not None else [*tensors, out])
    return Shortcut(given, tensors[0].device, likeness, places, written, circumstances, run) if likeness else None
