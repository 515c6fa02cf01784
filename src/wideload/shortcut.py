"""Turns a call whose arguments are what an earlier call's were into launches, without looking again at what that one found out.

Knows tensors, launches and how arguments are given; never expressions, nor how kernels are chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import forward_ad

from wideload.captures import Captures, Found
from wideload.launch import ADDRESS_OF
from wideload.native import Either
from wideload.outputs import extent_of
from wideload.plan import ACCESS_BYTES
from wideload.remembered import remember
from wideload.steps import Steps, define
from wideload.structure import are_same

__all__ = [
    "MISSED",
    "STATIC_TYPES",
    "Found",
    "Likeness",
    "Shortcut",
    "Shortcuts",
    "are_immutable",
    "find_circumstances",
    "find_likeness",
    "find_shortcut",
    "kinds_of",
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


def find_circumstances(function: Any, captures: Captures, captured: Any, dtype: torch.dtype) -> tuple[Found, ...] | None:
    """What a call depends on besides its arguments: what the function has captured, its defaults, torch's modes that no guard sees.

    ``captured`` and the default ``dtype`` are those that its kernels were made with; None where that captured has changed since.
    """
    guards, defaults = captures.find_guards(captured), [name for name in ("__defaults__", "__kwdefaults__") if hasattr(function, name)]
    if guards is None:
        return None
    keywords = getattr(function, "__kwdefaults__", None) or {}  # a dict, whose values change in place
    return (
        *guards,
        *[(function, name, getattr(function, name)) for name in defaults],
        *[(keywords, name, value) for name, value in keywords.items()],
        (torch.get_default_dtype, None, dtype),
        (vars(forward_ad), "_current_level", _NO_LEVEL),
        (torch._C._len_torch_dispatch_stack, None, 0),
    )


_NO_LEVEL = -1
"""Outside ``forward_ad.dual_level``."""


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


def find_likeness(tensors: Sequence[torch.Tensor]) -> Likeness | None:
    """None in another torch."""
    try:
        return Likeness(tensors)
    except (AttributeError, TypeError):
        return None


Pair = tuple[int, int, int, int]
"""Two tensors by number, ``low`` and ``high``: the second's address less the first's is not between these; where both are 0, it is 0."""

_OTHER = -1, 1
"""The two of addresses that are not the same."""


def _find_places(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> tuple[Pair, ...] | None:
    """How ``out``, one of ``tensors``, lies to each of the others: in its place or apart from it. None where it lies otherwise."""
    written, pairs = extent_of(out), []
    out_at, out_nbytes = next(at for at, tensor in enumerate(tensors) if tensor is out), written.end_bytes - written.address_bytes
    for at, tensor in enumerate(tensors):
        if at == out_at:
            continue
        read, apart = extent_of(tensor), out.data_ptr() - tensor.data_ptr()
        nbytes = read.end_bytes - read.address_bytes
        if apart and -out_nbytes < apart < nbytes:
            return None
        pairs.append((at, out_at, -out_nbytes, nbytes) if apart else (at, out_at, 0, 0))
    return tuple(pairs)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Tells whether so many tensors, and all around them, are as they were: by `native`'s ``Guard``, or the same in Python."""

    likeness: Likeness
    pairs: tuple[Pair, ...]
    found: tuple[Found, ...]

    def of_native(self, native: Any) -> Callable[..., bool]:
        phases, pairs = tuple(self.likeness.phases), tuple(number for pair in self.pairs for number in pair)
        guard: Callable[..., bool] = native.Guard(
            check=self.likeness.check, address_of=ADDRESS_OF, phases=phases, access_bytes=ACCESS_BYTES, pairs=pairs, found=self.found
        )
        return guard

    def of_python(self) -> Callable[..., bool]:
        tensors = [f"t{at}" for at in range(len(self.likeness.phases))]
        names: dict[str, Any] = {"check": self.likeness.check}
        differences = []
        if any(self.likeness.phases):
            differences += [f"p{at} % {ACCESS_BYTES} != phase{at}" for at in range(len(tensors))]
            names |= {f"phase{at}": phase for at, phase in enumerate(self.likeness.phases)}
        else:
            differences += [f"({' | '.join(f'p{at}' for at in range(len(tensors)))}) % {ACCESS_BYTES}"]
        for at, (first, second, low, high) in enumerate(self.pairs):
            differences.append(f"low{at} < p{second} - p{first} < high{at}" if low or high else f"p{second} != p{first}")
            names |= {f"low{at}": low, f"high{at}": high}
        for at, (owner, name, value) in enumerate(self.found):
            found = "()" if name is None else f"[{name!r}]" if type(owner) is dict else f".{name}"
            differences.append(f"owner{at}{found} is not value{at}")
            names |= {f"owner{at}": owner, f"value{at}": value}
        lines = (
            f"if not check({', '.join(tensors)}): return False",
            *[f"p{at} = {tensor}.data_ptr()" for at, tensor in enumerate(tensors)],
            f"try: return not ({' or '.join(differences)})",
            "except Exception: return False",
        )
        return define(f"def call({', '.join(tensors)}):", Steps(lines, names))


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
    kinds: Sequence[str],
    found: tuple[Found, ...],
    find_steps: Callable[[], Steps],
    *,
    are_apart: bool = True,
) -> Shortcut | None:
    """The shortcut of a call that was taken apart into ``tensors`` and ``scalars``; None where calls like it cannot be told so cheaply.

    ``kinds`` are those of the arguments, as `kinds_of` gives them, or ``e`` for what has only to be equal. ``found``: its circumstances.
    ``find_steps``: what such calls do. ``are_apart``: two tensors in one place are another call, which a function takes for one operand.
    """
    values = (*args, *kwargs.values())
    at_kind = {kind: [at for at, of in enumerate(kinds) if of == kind] for kind in "tnce"}
    given = [values[at] for at in at_kind["t"]]
    if "" in kinds or [values[at] for at in at_kind["n"]] != [*scalars] or not are_same(given, tensors):
        return None
    if not all(tensor.numel() for tensor in tensors) or len({tensor.device for tensor in tensors}) > 1:
        return None
    if are_apart and len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        return None
    is_argument = any(tensor is out for tensor in tensors)
    compared = tensors if out is None or is_argument else (*tensors, out)
    places = () if out is None else _find_places(compared, out)
    likeness = find_likeness(compared)
    if places is None or likeness is None:
        return None
    apart = [(at, other, *_OTHER) for other in range(len(tensors)) for at in range(other)] if are_apart else []
    if any(tensor.requires_grad for tensor in compared):
        found = (*found, (torch.is_grad_enabled, None, torch.is_grad_enabled()))
    if torch.cuda.device_count() > 1:
        found = (*found, (torch._C._cuda_getDevice, None, tensors[0].device.index))
    guard = _Guard(likeness, (*apart, *places), found)

    steps = find_steps()
    names = {at: f"{kind}{number}" for kind, those in at_kind.items() for number, at in enumerate(those)}
    by_place, by_name = [names[at] for at in range(len(args))], [names[at] for at in range(len(args), len(values))]
    held = [names[at] for at in at_kind["t"]]
    lines = (
        _missed_if(f"len(args) != {len(args)}", "tuple(kwargs) != by_name" if kwargs else "kwargs", f"out is {'not ' * (out is None)}None"),
        *[f"{', '.join(those)}, = {source}" for those, source in ((by_place, "args"), (by_name, "kwargs.values()")) if those],
        _missed_if(
            *[f"type({names[at]}) is not kind_{names[at]}" for at in at_kind["n"]],
            *[f"{names[at]} is not constant_{names[at]} and differs({names[at]}, constant_{names[at]})" for at in at_kind["c"]],
            *[f"{names[at]} != constant_{names[at]}" for at in at_kind["e"]],
            *[f"{name} is not out" for name, tensor in zip(held, tensors, strict=True) if tensor is out],
            f"not is_alike({', '.join([*held, *['out'] * (len(compared) > len(held))])})",
        ),
    )
    constants = {"MISSED": MISSED, "is_alike": Either(guard.of_python, guard.of_native), "differs": _differs, "by_name": tuple(kwargs)}
    constants |= {f"kind_{names[at]}": type(values[at]) for at in at_kind["n"]}
    constants |= {f"constant_{names[at]}": values[at] for kind in "ce" for at in at_kind[kind]}
    assert not constants.keys() & steps.names.keys()
    return define("def call(args, kwargs, out=None):", Steps((*lines, *steps.lines), {**constants, **steps.names}))


class Shortcuts:
    """Those of one function: the last that was taken, and by ``key_of`` a call a few each, for strides and alignments that come in turn."""

    __slots__ = ("_kept", "_key_of", "last")

    def __init__(self, key_of: Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor | None], Any] = shortcut_key) -> None:
        self._key_of, self._kept = key_of, dict[Any, tuple[Shortcut, ...]]()
        self.last: Shortcut | None = None

    def __len__(self) -> int:
        return sum(map(len, self._kept.values()))

    def take(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None = None) -> Any:
        """What the call returns, or `MISSED` where none is of a call like it."""
        last = self.last
        if last is None:
            return MISSED
        result = last(args, kwargs, out)
        return self.take_another(last, args, kwargs, out) if result is MISSED else result

    def take_another(self, last: Shortcut, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None) -> Any:
        """As `take`, where ``last`` has missed."""
        for other in self._kept.get(self._key_of(args, kwargs, out), ()):
            result = MISSED if other is last else other(args, kwargs, out)
            if result is not MISSED:
                self.last = other
                return result
        return MISSED

    def keep(self, shortcut: Shortcut, args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor | None = None) -> None:
        """Keep the shortcut of this call."""
        key = self._key_of(args, kwargs, out)
        remember(self._kept, key, (shortcut, *self._kept.get(key, ())[: _MOST_ALIKE - 1]))
        self.last = shortcut


_MOST_ALIKE = 4
"""Shortcuts kept of calls of one key."""


def kinds_of(values: Sequence[Any], static: Sequence[bool]) -> list[str]:
    """The kinds of a call's arguments; ``static`` says of each whether a number there is part of the trace."""
    return [_kind_of(value, is_static) for value, is_static in zip(values, static, strict=True)]


def _kind_of(value: Any, is_static: bool) -> str:
    """Of what kind an argument is: ``t`` a tensor, ``n`` a run-time number, ``c`` what is part of the trace, or none of them."""
    if isinstance(value, torch.Tensor):
        return "t"
    if type(value) in _NUMBERS:
        return "c" if is_static else "n"
    return "c" if isinstance(value, _CONSTANTS) else ""


def _missed_if(*tests: str) -> str:
    return f"if {' or '.join(tests)}: return MISSED"
