"""Turns a call that torch.compile, torch.export, a fake tensor or a dispatch mode meets into one of the function's operator.

Knows torch's tracers, and what they may see of a call; never what an operator does.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from wideload.errors import GradError
from wideload.expr import is_view_of_operand
from wideload.modes import no_modes
from wideload.structure import map_structure
from wideload.torch_library import (
    SAMPLES,
    SEED,
    base_of,
    bind_symbolic,
    find_function,
    find_saved,
    registered,
    respell_call,
    spell_call,
)  # fmt: skip
from wideload.trace import TensorResult, Traced

if TYPE_CHECKING:
    from wideload.fused import FusedFunction

__all__ = ["bind_method", "call_operator", "find_proxy", "is_operator_wanted"]

_TRANSPARENT = (torch.Tensor, torch.nn.Parameter)


def is_operator_wanted(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what looks into these tensors is a tracer that takes an operator as one: fake and functional tensors, dispatch modes.

    ``torch.func``, forward-mode differentiation and other subclasses see through torch's own operators alone.
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return (
        torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and all(type(tensor) in (*_TRANSPARENT, FakeTensor, FunctionalTensor) for tensor in tensors)
    )


def find_proxy(arguments: Any) -> torch.fx.Proxy | None:
    """The first proxy of ``torch.fx.symbolic_trace`` among the arguments. It has no dtype, so that the call stays one of the function."""
    found: list[torch.fx.Proxy] = []
    map_structure(lambda leaf: found.append(leaf) if isinstance(leaf, torch.fx.Proxy) else None, arguments)
    return found[0] if found else None


# ---- a call, taken apart. Dynamo traces this part: plain Python over containers


def call_operator(f: FusedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """``f(*args, out=out, **kwargs)`` by its operator; by the plain function where no operator gives what eager does."""
    if torch.compiler.is_dynamo_compiling() and f.is_unbound(args):
        return bind_method(f, args[0])(*args[1:], out=out, **kwargs)
    return _call(f, f._identity, (), args, kwargs, out)


def call_method(f: FusedFunction, instance: Any, identity: str | None, /, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """As `call_operator`, of the method ``f`` of ``instance``, which Dynamo traces."""
    if identity is None:  # an object that was made inside what is compiled, or that keeps no bound method
        return f._inline((instance, *args), kwargs, out)
    return _call(f, identity, (instance,), args, kwargs, out)


def _call(f: FusedFunction, identity: str, this: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    if f._options.compile == "inline":
        return f._inline((*this, *args), kwargs, out)
    args, kwargs = f._around_operator(args, kwargs)
    if torch.compiler.is_dynamo_compiling():
        _comptime(_forget_noted)
    leaves: list[Any] = []
    names, static = f._names[len(this) :], f._static
    positional = [_take_apart(value, leaves, (names[at] if at < len(names) else f._starred) in static) for at, value in enumerate(args)]
    keywords = [(name, _take_apart(value, leaves, name in static)) for name, value in kwargs.items()]
    spec = (tuple(positional), tuple(keywords), _take_apart(out, leaves, False))
    if torch.compiler.is_dynamo_compiling():
        for leaf in leaves:
            _note(leaf)
        found = _find_noted(identity, spec)
    else:
        found = _find_operator(f, spec, leaves)
    if found is None:
        if torch.compiler.is_dynamo_compiling():
            return f._inline((*this, *args), kwargs, out)
        bound = bind_symbolic(f, args, kwargs)
        return f._call(bound, is_plain=False) if out is None else f._run(bound, functools.partial(f._call_into, bound, out))
    name, call, order, seed, result = found
    # A float is made a tensor by an addition, whose value Inductor does not fix in the code as it does an operator's float argument.
    operands = [torch.zeros((), dtype=torch.float64, device="cpu") + leaves[at] if is_float else leaves[at] for at, is_float in order]
    if seed is not None:
        operands.append(torch.ops.wideload.draw_seed.default(leaves[seed[0]], seed[1]))
    results = getattr(torch.ops.wideload, name).default(*operands, call)
    if out is not None:
        return out
    return _put_together(result, results if isinstance(results, (tuple, list)) else (results,), leaves)


def _take_apart(value: Any, leaves: list[Any], is_static: bool) -> Any:
    """``value`` with a place for each tensor and run-time number, which go to ``leaves``."""
    if isinstance(value, torch.Tensor):
        leaves.append(value)
        return ("leaf", len(leaves) - 1)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool):
        if not is_static:
            leaves.append(value)
            return ("leaf", len(leaves) - 1)
        if torch.compiler.is_dynamo_compiling():
            _note_value(value)  # Dynamo lets a number change that has changed before
            return ("noted", None)
    if type(value) in (tuple, list, torch.Size):
        return ("list" if type(value) is list else "tuple", tuple([_take_apart(item, leaves, is_static) for item in value]))
    if type(value) is dict:
        return ("dict", tuple([(key, _take_apart(item, leaves, is_static)) for key, item in value.items()]))
    return ("unusual", None) if isinstance(value, (tuple, list, dict)) else ("constant", value)


def _put_together(template: Any, results: Sequence[Any], leaves: Sequence[Any]) -> Any:
    kind, value = template
    if kind == "result":
        return results[value]
    if kind == "leaf":
        return leaves[value]
    if kind == "list":
        return [_put_together(item, results, leaves) for item in value]
    if kind == "tuple":
        return tuple([_put_together(item, results, leaves) for item in value])
    if kind == "dict":
        return {key: _put_together(item, results, leaves) for key, item in value}
    return value


# ---- what Dynamo runs as it is, rather than traces

_noted = threading.local()

_F = TypeVar("_F", bound=Callable[..., Any])


def _comptime(function: Callable[[Any], None]) -> None:
    """Run ``function`` when Dynamo gets here, on the variables of the caller as Dynamo knows them."""
    from torch._dynamo.comptime import comptime  # here: it takes a second to import

    comptime(function)


def _forget_noted(_: Any) -> None:
    _noted.leaves, _noted.values, _noted.identity = [], [], None


def _note(leaf: Any) -> None:
    from torch._dynamo.comptime import comptime

    comptime(_note_leaf)


def _note_leaf(context: Any) -> None:
    """Remember Dynamo's fake tensor, or a number of the same kind and whether it may change from call to call."""
    leaf = context.get_local("leaf")
    kind = leaf.python_type()
    _noted.leaves.append(leaf.as_fake() if issubclass(kind, torch.Tensor) else _Number(kind, leaf.is_dynamic()))


def _note_value(value: Any) -> None:
    from torch._dynamo.comptime import comptime

    comptime(_fix_value)


def _fix_value(context: Any) -> None:
    """What is compiled is for this ``value`` alone."""
    variable = context.get_local("value")._ComptimeVar__variable
    _noted.values.append(variable.as_python_constant() if variable.is_python_constant() else variable.evaluate_expr())


@dataclass(frozen=True, slots=True)
class _Number:
    """What is known of a run-time number."""

    kind: type
    is_dynamic: bool


def _runs_as_it_is(function: _F) -> _F:
    """Mark ``function`` as ``torch.compiler.assume_constant_result`` does, which imports Dynamo: a second."""
    function.__dict__["_dynamo_marked_constant"] = True
    return function


@_runs_as_it_is
def _find_noted(identity: str, spec: Any) -> _Found | None:
    return _find_operator(find_function(identity), _with_values(spec, iter(_noted.values)), _noted.leaves)


def _with_values(spec: Any, values: Iterator[Any]) -> Any:
    """``spec`` with the static numbers in it, which follow one another in the order in which it is read."""
    if isinstance(spec, tuple):
        return ("constant", next(values)) if spec == ("noted", None) else tuple([_with_values(item, values) for item in spec])
    return spec


def bind_method(method: FusedFunction, instance: Any) -> Any:
    """What stands for ``method`` of ``instance`` where Dynamo traces it."""
    _comptime(_forget_noted)
    _note_method(method, instance)
    return functools.partial(call_method, method, instance, _noted_identity())


def _note_method(method: Any, instance: Any) -> None:
    from torch._dynamo.comptime import comptime

    comptime(_bind_noted)


def _bind_noted(context: Any) -> None:
    """Bind the very objects, and let what is compiled be for this instance alone: what the method reads of it is read at each call."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    method, instance = (context.get_local(name)._ComptimeVar__variable for name in ("method", "instance"))
    value = getattr(instance, "value", None)
    if instance.source is not None and value is not None:
        install_guard(instance.source.make_guard(GuardBuilder.ID_MATCH))
        bound = method.value.bound_to(value)
        _noted.identity = bound._identity if bound is method.value.bound_to(value) else None


@_runs_as_it_is
def _noted_identity() -> str | None:
    return getattr(_noted, "identity", None)


# ---- from a call to its operator

_Found = tuple[str, str, tuple[tuple[int, bool], ...], tuple[int, int] | None, Any]
"""Name; the argument ``call``; the leaves that are its operands, each with whether it is a float to be made a tensor; of a seed, the leaf
on whose device it is drawn and its number; and what results are put together to, ``("result", 0)`` where it is one tensor."""


def _find_operator(f: FusedFunction, spec: Any, leaves: Sequence[Any]) -> _Found | None:
    """The operator of a call, registered.

    None where torch's own operators have to compute the results: views of arguments, lazy conjugates, numbers, unusual containers,
    gradients that have no expression, a tracer that sees through torch's operators alone.
    """
    positional, keywords, out = spec
    given_tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    is_lazy = any(tensor.is_conj() or tensor.is_neg() for tensor in given_tensors)
    if is_lazy or not is_operator_wanted(given_tensors) or any(map(_is_unusual, (*positional, *(item for _, item in keywords), out))):
        return None
    own = len(leaves) if out == ("constant", None) else min(_leaves_of(out), default=len(leaves))
    operands: dict[int, int] = {}  # of a tensor given twice, once
    places: list[int] = []
    order: list[tuple[int, bool]] = []
    kinds = ""
    for at, leaf in enumerate(leaves):
        place = operands.setdefault(id(leaf), len(order)) if isinstance(leaf, torch.Tensor) and at < own else len(order)
        places.append(place)
        if place == len(order):
            kind = ("t" if at < own else "o") if isinstance(leaf, torch.Tensor) else _kind_of(leaf)
            order.append((at, kind == "d"))
            kinds += kind
    text = spell_call(positional, keywords, out, places)
    given = [leaves[at] if kind in "to" else SAMPLES[kind] for kind, (at, _) in zip(kinds, order, strict=True)]
    with no_modes():
        args, kwargs, outs = respell_call(text, given)
        call = bind_symbolic(f, args, kwargs)
        key, traced = f._run(call, lambda key, traced: (key, traced))
        name = base_of(f)
        if outs is not None:
            if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given_tensors):
                raise GradError(
                    "out= does not support automatic differentiation, but a tensor requires grad. "
                    "Call under torch.no_grad(), or without out=."
                )
            is_random = "r" if traced.expr.has_draws else ""
            return registered(f"{name}_{kinds}{is_random}_0"), text, tuple(order), None, None
        tensors = {id(leaf): at for at, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, torch.Tensor)}
        fresh = [at for at, node in enumerate(traced.expr.outputs) if not is_view_of_operand(traced.expr, node)]
        result = _template(traced, fresh, [tensors.get(id(tensor)) for tensor in call.tensors])
        if result is None or not fresh or len(call.tensors) != kinds.count("t"):
            return None
        wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in call.tensors)
        if any(wanted) and find_saved(f, call, key, traced, wanted) is None:
            return None
        seed = None
        if traced.expr.has_draws:
            kinds += "s"
            registered(SEED)
            seed = next(tensors[id(tensor)] for tensor in call.tensors if tensor.device == call.device), _next_number()
        return registered(f"{name}_{kinds}_{len(fresh)}"), text, tuple(order), seed, result


_drawn: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
_drawn_elsewhere = itertools.count()


def _next_number() -> int:
    """Number the seeds of what is being compiled, alike each time.

    AOTAutograd takes equal calls for one unless they are of certain random operators of torch's own: ``nondeterministic_seeded`` is not
    looked at there (``fx_graph_cse``, torch 2.10 to 2.13).
    """
    context = torch._guards.TracingContext.try_get()
    return next(_drawn_elsewhere if context is None else _drawn.setdefault(context, itertools.count()))


def _kind_of(number: Any) -> str:
    kind, is_dynamic = (number.kind, number.is_dynamic) if isinstance(number, _Number) else (type(number), False)
    if kind in (int, torch.SymInt):
        return "i"
    if kind in (float, torch.SymFloat):
        return "d" if is_dynamic else "f"
    return "c"


def _leaves_of(spec: Any) -> list[int]:
    kind, value = spec
    if kind == "leaf":
        return [value]
    if kind == "dict":
        return [at for _, item in value for at in _leaves_of(item)]
    return [at for item in value for at in _leaves_of(item)] if kind in ("list", "tuple") else []


def _is_unusual(spec: Any) -> bool:
    """Whether a container, or a member of an enum, stands there that only the function itself can be given."""
    kind, value = spec
    if kind == "constant" and isinstance(value, (str, bytes, int)):
        return type(value) not in (str, bytes, int, bool)
    if kind == "dict":
        return any(_is_unusual(item) for _, item in value)
    return kind == "unusual" or (kind in ("list", "tuple") and any(map(_is_unusual, value)))


def _template(traced: Traced, fresh: Sequence[int], arguments: Sequence[int | None]) -> Any:
    """What results are put together to; None where this cannot say it."""

    def leaf(item: Any) -> Any:
        if not isinstance(item, TensorResult):
            return None if not isinstance(item, (str, bool, type(None))) else ("constant", item)
        if item.argument is not None:
            at = arguments[item.argument]
            return None if at is None else ("leaf", at)
        return ("result", fresh.index(item.output)) if item.output in fresh else None

    def build(tree: Any) -> Any:
        if type(tree) in (list, tuple):
            items = tuple(map(build, tree))
            return None if None in items else (type(tree).__name__, items)
        if type(tree) is dict:
            entries = tuple((key, build(value)) for key, value in tree.items())
            return None if any(value is None for _, value in entries) else ("dict", entries)
        return None if isinstance(tree, (tuple, list, dict)) else leaf(tree)

    return build(traced.result)
