"""Turns a fused function that torch.compile, torch.export, a fake tensor or a dispatch mode meets into operators of ``torch.library``.

An operator is one function with a number of tensors, of numbers and of results; it is registered before anything looks into it, and
none is before something does. Knows torch's tracers, and of fused functions how they are called; never kernels.

A name says everything that registering needs, so that a program exported elsewhere finds its operators when it is loaded: module, qualified
name, a digest of the function's code and captured values, then its *kinds*, a letter an operand, and how many results it has.
``model_swiglu_1f0c9a7b2e_tt_1`` takes two tensors. What else stands in a call (strings, dtypes, None, nested arguments) is the operator's last
argument, ``call``, spelt in Python: ``(_0, _1, 'tanh')``.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import itertools
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wideload.errors import GradError, TraceError
from wideload.execute import node_dtype
from wideload.expr import is_view_of_operand
from wideload.layout import like_strides
from wideload.random import draw_seed
from wideload.replay import NodeLayout
from wideload.structure import map_structure
from wideload.trace import TensorResult, Traced

if TYPE_CHECKING:
    from wideload.fused import FusedFunction

__all__ = ["NAMESPACE", "bind_method", "call_operator", "find_proxy", "is_operator_wanted", "note_function"]

NAMESPACE = "wideload"
"""Of the operators: ``torch.ops.wideload``."""

_DIGEST_CHARS = 10
"""Of a name's digest: 40 bits; by chance two of a thousand functions of one name meet once in two million programs."""


# ---- functions by their identity

_FUNCTIONS: weakref.WeakValueDictionary[str, FusedFunction] = weakref.WeakValueDictionary()
_SERIAL = itertools.count()


def note_function(f: FusedFunction) -> str:
    """A string that tells ``f`` from all others of this process; Dynamo's guards compare it."""
    identity = str(next(_SERIAL))
    _FUNCTIONS[identity] = f
    return identity


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
    return _call(f, f._identity, (), args, kwargs, out)


def call_method(f: FusedFunction, instance: Any, identity: str | None, /, *args: Any, out: Any = None, **kwargs: Any) -> Any:
    """As `call_operator`, of the method ``f`` of ``instance``, which Dynamo traces."""
    if identity is None:  # an object that was made inside what is compiled
        return f._inline((instance, *args), kwargs, out)
    return _call(f, identity, (instance,), args, kwargs, out)


def _call(f: FusedFunction, identity: str, this: tuple[Any, ...], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    if f._options.compile == "inline":
        return f._inline((*this, *args), kwargs, out)
    leaves: list[Any] = []
    names, static = f._names[len(this) :], f._static
    positional = [_take_apart(value, leaves, (names[at] if at < len(names) else f._starred) in static) for at, value in enumerate(args)]
    keywords = [(name, _take_apart(value, leaves, name in static)) for name, value in kwargs.items()]
    spec = (tuple(positional), tuple(keywords), _take_apart(out, leaves, False))
    if torch.compiler.is_dynamo_compiling():
        _comptime(_forget_leaves)
        for leaf in leaves:
            _note(leaf)
        found = _find_noted(identity, spec)
    else:
        found = _find_operator(f, spec, leaves)
    if found is None:
        return f._inline((*this, *args), kwargs, out)
    name, call, order, seeded_by, result = found
    # A float is made a tensor by an addition, whose value Inductor does not fix in the code as it does an operator's float argument.
    operands = [torch.zeros((), dtype=torch.float64) + leaves[at] if is_float else leaves[at] for at, is_float in order]
    if seeded_by is not None:
        operands.append(torch.ops.wideload.draw_seed.default(leaves[seeded_by]))
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
    if isinstance(value, (int, float, complex)) and not isinstance(value, bool) and not is_static:
        leaves.append(value)
        return ("leaf", len(leaves) - 1)
    if type(value) in (tuple, list, torch.Size):
        return ("list" if type(value) is list else "tuple", tuple([_take_apart(item, leaves, is_static) for item in value]))
    if type(value) is dict:
        return ("dict", tuple([(key, _take_apart(item, leaves, is_static)) for key, item in value.items()]))
    return ("constant", value)


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


def _comptime(function: Callable[[Any], None]) -> None:
    """Run ``function`` when Dynamo gets here, on the variables of the caller as Dynamo knows them."""
    from torch._dynamo.comptime import comptime  # here: it takes a second to import

    comptime(function)


def _forget_leaves(_: Any) -> None:
    _noted.leaves, _noted.identity = [], None


def _note(leaf: Any) -> None:
    from torch._dynamo.comptime import comptime

    comptime(_note_leaf)


def _note_leaf(context: Any) -> None:
    """Remember Dynamo's fake tensor, or a number of the same kind and whether it may change from call to call."""
    leaf = context.get_local("leaf")
    kind = leaf.python_type()
    _noted.leaves.append(leaf.as_fake() if issubclass(kind, torch.Tensor) else _Number(kind, leaf.is_dynamic()))


@dataclass(frozen=True, slots=True)
class _Number:
    """What is known of a run-time number."""

    kind: type
    is_dynamic: bool


def _find_noted(identity: str, spec: Any) -> _Found | None:
    return _find_operator(_FUNCTIONS[identity], spec, _noted.leaves)


def bind_method(descriptor: FusedFunction, instance: Any) -> Any:
    """What stands for the method ``descriptor`` of ``instance`` where Dynamo traces it."""
    _comptime(_forget_leaves)
    _note_method(descriptor, instance)
    return functools.partial(call_method, descriptor, instance, _noted_identity())


def _note_method(descriptor: Any, instance: Any) -> None:
    from torch._dynamo.comptime import comptime

    comptime(_bind_noted)


def _bind_noted(context: Any) -> None:
    """Bind the very objects, and let what is compiled be for this instance alone: what the method reads of it is read at each call."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    descriptor, instance = (context.get_local(name)._ComptimeVar__variable for name in ("descriptor", "instance"))
    value = getattr(instance, "value", None)
    if instance.source is not None and value is not None:
        install_guard(instance.source.make_guard(GuardBuilder.ID_MATCH))
        _noted.identity = descriptor.value.__get__(value)._identity


def _noted_identity() -> str | None:
    return getattr(_noted, "identity", None)


# torch.compiler.assume_constant_result does this, and imports Dynamo
for _function in (_find_noted, _noted_identity):
    _function._dynamo_marked_constant = True  # type: ignore[attr-defined]


# ---- from a call to its operator

_Found = tuple[str, str, tuple[tuple[int, bool], ...], int | None, Any]
"""Name; the argument ``call``; the leaves that are its operands, each with whether it is a float to be made a tensor; the leaf on whose device
a seed is to be drawn; and what its results are put together to, ``("result", 0)`` where it is one tensor."""

_KINDS = {"t": "Tensor", "f": "float", "i": "SymInt", "c": "Scalar", "d": "Tensor", "s": "Tensor", "o": "Tensor"}
"""Operands: a tensor; a float, int or complex; a float in a 0-dim tensor; a seed; a tensor to be written."""

_SAMPLES = {"f": 1.0, "d": 1.0, "i": 1, "c": 1j}
"""Numbers of the kinds, where only their kind counts."""


def _find_operator(f: FusedFunction, spec: Any, leaves: Sequence[Any]) -> _Found | None:
    """The operator of a call, registered. None where the results have to be torch's own: views of arguments, numbers, unusual containers,
    gradients that have no expression."""
    positional, keywords, out = spec
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
    text = _spell(positional, keywords, out, places)
    given = [leaves[at] if kind in "to" else _SAMPLES[kind] for kind, (at, _) in zip(kinds, order, strict=True)]
    with _no_modes():
        args, kwargs, outs = _respell(text, given)
        call = bind_symbolic(f, args, kwargs)
        key, traced = f._run(call, lambda key, traced: (key, traced))
        name = _base_of(f)
        if outs is not None:
            if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor)):
                raise GradError(
                    "out= does not support automatic differentiation, but a tensor requires grad. "
                    "Call under torch.no_grad(), or without out=."
                )
            is_random = "r" if traced.expr.has_draws else ""
            return _registered(f"{name}_{kinds}{is_random}_0"), text, tuple(order), None, None
        tensors = {id(leaf): at for at, leaf in reversed([*enumerate(leaves)]) if isinstance(leaf, torch.Tensor)}
        fresh = [at for at, node in enumerate(traced.expr.outputs) if not is_view_of_operand(traced.expr, node)]
        result = _template(traced, fresh, [tensors.get(id(tensor)) for tensor in call.tensors])
        if result is None or not fresh or len(call.tensors) != kinds.count("t"):
            return None
        wanted = tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in call.tensors)
        if any(wanted) and _find_saved(f, call, key, traced, wanted) is None:
            return None
        seeded_by = None
        if traced.expr.has_draws:
            kinds += "s"
            seeded_by = next(tensors[id(tensor)] for tensor in call.tensors if tensor.device == call.device)
        return _registered(f"{name}_{kinds}_{len(fresh)}"), text, tuple(order), seeded_by, result


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


@contextlib.contextmanager
def _no_modes() -> Iterator[None]:
    """A trace asks torch for dtypes, on small tensors: no mode looks on, of dispatch or of functions (export's notes ``no_grad``)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        yield


# ---- the argument ``call``


def _spell(positional: Any, keywords: Any, out: Any, places: Sequence[int]) -> str:
    given = [_spell_value(item, places) for item in positional]
    given += [f"{name}={_spell_value(item, places)}" for name, item in keywords]
    if out != ("constant", None):
        given.append(f"out={_spell_value(out, places)}")
    return f"({', '.join(given)})"


def _spell_value(spec: Any, places: Sequence[int]) -> str:
    kind, value = spec
    if kind == "leaf":
        return f"_{places[value]}"
    if kind == "list":
        return f"[{', '.join(_spell_value(item, places) for item in value)}]"
    if kind == "tuple":
        return f"({''.join(f'{_spell_value(item, places)}, ' for item in value)})"
    if kind == "dict":
        return f"{{{', '.join(f'{key!r}: {_spell_value(item, places)}' for key, item in value)}}}"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, (float, complex)):
        return f"{type(value).__name__}({str(value)!r})"
    if isinstance(value, (str, bytes, int, type(None), type(...), torch.dtype, torch.memory_format, torch.layout)):
        return "..." if value is ... else repr(value)
    raise TraceError(
        f"an argument is a {type(value).__module__}.{type(value).__qualname__}; allowed under torch.compile: tensors, numbers, "
        "and bool, str, None, dtypes or tuples, lists and dicts of them."
    )


_CONSTRUCTORS: dict[str, Callable[[str], Any]] = {"float": float, "complex": complex, "device": torch.device}


def _respell(call: str, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Positional and keyword arguments, and ``out``, of a call that is spelt ``call``."""
    parsed = _parse(call)
    keywords = {str(word.arg): _evaluate(word.value, operands) for word in parsed.keywords}
    out = keywords.pop("out", None)
    return tuple(_evaluate(item, operands) for item in parsed.args), keywords, out


@functools.lru_cache(maxsize=4096)
def _parse(call: str) -> ast.Call:
    parsed = ast.parse(f"f{call}", mode="eval").body
    assert isinstance(parsed, ast.Call)
    return parsed


def _evaluate(node: ast.expr, operands: Sequence[Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return operands[int(node.id[1:])]
        case ast.Attribute():
            return getattr(torch, node.attr)
        case ast.Tuple():
            return tuple(_evaluate(item, operands) for item in node.elts)
        case ast.List():
            return [_evaluate(item, operands) for item in node.elts]
        case ast.Dict():
            keys = [_evaluate(key, operands) for key in node.keys if key is not None]
            return dict(zip(keys, (_evaluate(value, operands) for value in node.values), strict=True))
        case ast.UnaryOp(operand=ast.Constant(value=int(value))):
            return -value
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[argument]) if name in _CONSTRUCTORS:
            return _CONSTRUCTORS[name](_evaluate(argument, operands))
    raise TraceError(f"{ast.unparse(node)} stands in no call that wideload has spelt")


# ---- calls of tensors whose sizes are symbols


def bind_symbolic(f: FusedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call, to be traced with the sizes of the example that is being compiled for; no size is fixed by that."""
    call = f._bind(args, kwargs)
    if any(isinstance(size, torch.SymInt) for tensor in call.tensors for size in tensor.shape):
        shapes = call.shapes = [tuple(map(_hint, tensor.shape)) for tensor in call.tensors]
        renewed = {id(of): replace(of, shape=shapes[at]) for at, of in call.entered.values()}
        call.spec = map_structure(lambda leaf: renewed.get(id(leaf), leaf), call.spec)
    return call


_UNKNOWN_SIZE = 5040
"""Stands for a size that depends on data: the least number that each of 1 to 10 divides."""


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else _UNKNOWN_SIZE


# ---- names


_BASES: dict[str, FusedFunction | weakref.ref[FusedFunction]] = {}
"""Whose name it is. A method's object is not kept alive by it."""

_NAME = re.compile(r"(?P<base>\w+)_(?P<kinds>[tfics]*|[tficdo]*r?)_(?P<results>\d+)")
_BACKWARD = re.compile(r"(?P<forward>\w+)_backward_(?P<kinds>[tmficds]+)_(?P<wanted>[01]+)_(?P<present>[01]+)")


def _path_of(f: FusedFunction) -> str:
    return re.sub(r"\W+", "_", f"{f.__module__}.{f.__qualname__}").strip("_")


def _digest(f: FusedFunction) -> str:
    options = f._options
    content = (*f._captures.describe(), options.numerics, str(options.fast_math), *sorted(options.static))
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:_DIGEST_CHARS]


def _base_of(f: FusedFunction) -> str:
    """The name of ``f`` up to the kinds; of functions that are alike in all that a name says, the later are numbered."""
    if f._operator_base is None:
        is_method = isinstance(f.__wrapped__, types.MethodType)
        with _lock:
            base = first = f"{_path_of(f)}_{_digest(f)}"
            for number in itertools.count(2):
                owner = _BASES.get(base)
                owner = owner() if isinstance(owner, weakref.ref) else owner
                if owner is None or _is_same(owner, f):
                    break
                base = f"{first}_{number}"
            if owner is None:
                _BASES[base] = weakref.ref(f) if is_method else f
            f._operator_base = base
    return f._operator_base


def _is_same(one: FusedFunction, other: FusedFunction) -> bool:
    """Whether one function was fused twice."""
    a, b = one.__wrapped__, other.__wrapped__
    is_plain = isinstance(a, types.FunctionType) and isinstance(b, types.FunctionType) and not a.__closure__ and not b.__closure__
    return a is b or (is_plain and a.__code__ == b.__code__ and a.__globals__ is b.__globals__ and a.__defaults__ == b.__defaults__)


def _owner_of(base: str) -> FusedFunction:
    owner = _BASES[base]
    f = owner() if isinstance(owner, weakref.ref) else owner
    if f is None:
        raise TraceError(f"the object whose method torch.ops.{NAMESPACE}.{base} is has gone. Keep it while its compiled code is in use.")
    return f


class _Namespace(torch._ops._OpNamespace):
    """``torch.ops.wideload``: an operator that is looked for is registered, if its function is here."""

    __module__ = torch._ops._OpNamespace.__module__  # operators are pickled by it

    def __getattr__(self, name: str) -> Any:
        """As torch's own, after registering."""
        if name not in _registrations and (found := _NAME.fullmatch(_BACKWARD.sub(r"\g<forward>", name))):
            for f in list(_FUNCTIONS.values()):
                if found["base"].startswith(_path_of(f)) and _base_of(f) == found["base"]:
                    _registered(name)
                    break
        return super().__getattr__(name)


torch.ops.wideload = _Namespace(NAMESPACE)


# ---- operators


@dataclass(frozen=True)
class _Operator:
    """A registered operator: ``kinds`` has a letter for each operand, ``results`` is their number."""

    name: str
    base: str
    kinds: str
    results: int

    @property
    def f(self) -> FusedFunction:
        return _owner_of(self.base)

    def bind(self, operands: Sequence[Any], call: str) -> Any:
        """The call of the function; numbers as they are, or for fake tensors samples of their kind."""
        args, kwargs, _ = _respell(call, operands)
        return bind_symbolic(self.f, args, kwargs)

    def samples(self, operands: Sequence[Any]) -> list[Any]:
        return [_SAMPLES.get(kind, operand) for kind, operand in zip(self.kinds, operands, strict=False)]

    def seed(self, operands: Sequence[Any]) -> torch.Tensor | None:
        return operands[self.kinds.index("s")] if "s" in self.kinds else None

    # -- real tensors

    def compute(self, *arguments: Any) -> Any:
        """The results, in memory of their own."""
        *operands, call = arguments
        with torch.no_grad():
            bound = self.bind(_plain(self.kinds, operands), call)
            seed = self.seed(operands)

            def run(key: Any, traced: Traced) -> list[torch.Tensor]:
                op = self.f._operation_of(key, traced)
                outs = op(bound.tensors, tuple(bound.scalars), bound.device, seed)
                return [outs[at] for at in op.fresh]

            results = self.f._run(bound, run)
        if len(results) != self.results:
            raise TraceError(
                f"{self.f.__name__} returned {len(results)} new tensors, and {self.results} when it was compiled: a captured value has "
                "changed. Call torch.compiler.reset()."
            )
        return results[0] if self.results == 1 else tuple(results)

    def write(self, *arguments: Any) -> None:
        """Fill the tensors of ``out``."""
        *operands, call = arguments
        args, kwargs, out = _respell(call, _plain(self.kinds, operands))
        with torch.no_grad():
            self.f(*args, out=out, **kwargs)

    # -- fake tensors

    def pretend(self, *arguments: Any) -> Any:
        """Empty results, as `compute` would return them."""
        *operands, call = arguments
        f = self.f
        with _no_modes():
            bound = self.bind(self.samples(operands), call)

            def lay_out(_: Any, traced: Traced) -> list[tuple[torch.dtype, Any]]:
                if traced.reads_sizes:
                    _fix_sizes(bound.tensors)
                layouts = f._layouts(bound, traced)
                fresh = [node for node in traced.expr.outputs if not is_view_of_operand(traced.expr, node)]
                return [(node_dtype(traced.expr, node), layouts[node]) for node in fresh]

            found = f._run(bound, lay_out)
        results = [torch.empty_strided(of.shape, of.strides, dtype=dtype, device=bound.device) for dtype, of in found]
        return results[0] if self.results == 1 else tuple(results)

    # -- gradients

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep of the operands those whose values a gradient reads; of other tensors their sizes, strides and dtypes."""
        *operands, call = inputs
        f, wants = self.f, ctx.needs_input_grad
        with _no_modes():
            bound = self.bind(self.samples(operands), call)
            key, traced = f._run(bound, lambda key, traced: (key, traced))
            wanted = _in_call(bound, operands, wants)
            saved = _find_saved(f, bound, key, traced, wanted)
            recorded = f._operation_of(key, traced).recorded_results(wanted)
        read = frozenset(range(len(bound.tensors)) if saved is None else saved)
        places = {id(tensor): at for at, tensor in enumerate(bound.tensors)}
        kinds, kept = "", []
        for kind, operand in zip(self.kinds, operands, strict=True):
            is_read = kind != "t" or places[id(operand)] in read or operand.device != bound.device
            kinds += kind if is_read else "m"
            if kind in "tds" and is_read:
                kept.append(operand)
        ctx.kinds, ctx.call = kinds, call
        ctx.numbers = [operand for kind, operand in zip(self.kinds, operands, strict=True) if kind in "fic"]
        ctx.unread = [(o.shape, o.stride(), o.dtype) for kind, o in zip(kinds, operands, strict=True) if kind == "m"]
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        ctx.mark_non_differentiable(*(out for out, is_recorded in zip(outputs, recorded, strict=True) if not is_recorded))

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands that want one, by an operator of their own."""
        wants = ctx.needs_input_grad
        wanted = [at for at, kind in enumerate(self.kinds) if kind == "t" and wants[at]]
        present = [grad for grad in grads if grad is not None]
        given: list[torch.Tensor | None] = [None] * (len(self.kinds) + 1)
        if not present or not wanted:
            return tuple(given)
        saved, numbers, unread = iter(ctx.saved_tensors), iter(ctx.numbers), iter(ctx.unread)
        operands: list[Any] = []
        for kind in ctx.kinds:
            operands += next(unread) if kind == "m" else [next(saved if kind in "tds" else numbers)]
        bits = "".join(str(int(kind == "t" and wants[at])) for at, kind in enumerate(self.kinds))
        arrived = "".join(str(int(grad is not None)) for grad in grads)
        name = _registered(f"{self.name}_backward_{ctx.kinds}_{bits}_{arrived}")
        found = getattr(torch.ops.wideload, name).default(*operands, *present, ctx.call)
        for at, grad in zip(wanted, [found] if isinstance(found, torch.Tensor) else found, strict=True):
            given[at] = grad
        return tuple(given)


@dataclass(frozen=True)
class _Backward:
    """The operator of the gradients that ``forward`` has where those of its results ``present`` arrive: its ``kinds`` have an ``m`` for a
    tensor of which only sizes, strides and dtype are known."""

    forward: _Operator
    kinds: str
    wanted: str
    present: str

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor], str]:
        """Operands as those of ``forward``, an `_Unread` in the place of each ``m``; gradients; the call."""
        given = iter(arguments)
        operands = [_Unread(next(given), next(given), next(given)) if kind == "m" else next(given) for kind in self.kinds]
        *grads, call = given
        return operands, grads, call

    def compute(self, *arguments: Any) -> Any:
        """The gradients, in the strides of new tensors like the operands."""
        operands, grads, call = self.split(arguments)
        forward, device = self.forward, grads[0].device
        f, seed = forward.f, forward.seed(operands)
        shaped = [_stand_in(operand, device) if isinstance(operand, _Unread) else operand for operand in operands]
        plain = _plain(forward.kinds, shaped)
        with torch.no_grad():
            bound = forward.bind(plain, call)
            wanted = _in_call(bound, plain, [bit == "1" for bit in self.wanted])
            incoming = iter(grads)
            arrived = [next(incoming) if bit == "1" else None for bit in self.present]
            found = f._run(
                bound,
                lambda key, traced: f._operation_of(key, traced).gradients(
                    bound.tensors, tuple(bound.scalars), bound.device, seed, arrived, wanted
                ),
            )
        places = {id(tensor): at for at, tensor in enumerate(bound.tensors)}
        taken = {tensor.untyped_storage()._cdata for tensor in arguments if isinstance(tensor, torch.Tensor)}
        results = []
        for tensor, bit in zip(plain, self.wanted, strict=True):
            if bit == "1":
                grad = found[places[id(tensor)]]
                strides = like_strides(tuple(tensor.shape), tensor.stride())
                if grad.stride() != strides or grad.untyped_storage()._cdata in taken:  # no result is an argument, or another result
                    grad = torch.empty_strided(grad.shape, strides, dtype=grad.dtype, device=grad.device).copy_(grad)
                taken.add(grad.untyped_storage()._cdata)
                results.append(grad)
        return results[0] if len(results) == 1 else tuple(results)

    def pretend(self, *arguments: Any) -> Any:
        """Empty gradients."""
        operands, grads, _ = self.split(arguments)
        results = []
        for operand, bit in zip(operands, self.wanted, strict=True):
            if bit == "1":
                like = _Unread(operand.shape, operand.stride(), operand.dtype) if isinstance(operand, torch.Tensor) else operand
                device = operand.device if isinstance(operand, torch.Tensor) else grads[0].device
                strides = like_strides(tuple(like.shape), tuple(like.strides))
                results.append(torch.empty_strided(like.shape, strides, dtype=like.dtype, device=device))
        return results[0] if len(results) == 1 else tuple(results)

    def refuse(self, ctx: Any, *grads: torch.Tensor | None) -> None:
        """Second derivatives."""
        raise GradError(
            f"the operator of {self.forward.f.__name__}'s gradients has no gradient itself, as torch.compile has no second derivatives. "
            "Call the function outside torch.compile for these."
        )


@dataclass(frozen=True, slots=True)
class _Unread:
    """What is known of a tensor whose values no gradient reads."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


def _stand_in(tensor: _Unread, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype, device=device)


def _plain(kinds: str, operands: Sequence[Any]) -> list[Any]:
    """Operands as the function is given them: numbers out of tensors, and no tensor twice, which would be one operand."""
    plain: list[Any] = []
    met: set[int] = set()
    for kind, operand in zip(kinds, operands, strict=False):
        value = operand.item() if kind == "d" else operand.detach() if kind == "t" and id(operand) in met else operand
        met.add(id(value))
        plain.append(value)
    return plain


def _in_call(bound: Any, operands: Sequence[Any], marks: Sequence[bool]) -> tuple[bool, ...]:
    """Marks of operands as marks of the call's tensors, which stand in the order of the parameters."""
    marked = {id(operand) for operand, mark in zip(operands, marks, strict=False) if mark}
    return tuple(id(tensor) in marked for tensor in bound.tensors)


def _fix_sizes(tensors: Sequence[torch.Tensor]) -> None:
    """Another size is another trace: torch guards what is read as an int."""
    for tensor in tensors:
        for size in tensor.shape:
            int(size)


def _find_saved(f: FusedFunction, bound: Any, key: Any, traced: Traced, wanted: tuple[bool, ...]) -> tuple[int, ...] | None:
    """The tensors of the call whose values gradients read; None where torch's own operators have to be recorded."""
    shapes = bound.shapes or [tuple(tensor.shape) for tensor in bound.tensors]
    strides = [tuple(map(_hint, tensor.stride())) for tensor in bound.tensors]
    layouts = [NodeLayout(*layout) for layout in zip(shapes, strides, strict=True)]
    return f._operation_of(key, traced).find_read(layouts, bound.device.type, wanted)


# ---- registering

_lock = threading.RLock()
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_registrations: set[str] = set()


def _registered(name: str) -> str:
    """``name``, when there is an operator of that name."""
    with _lock:
        if name not in _registrations:
            _registrations.add(name)  # first: torch looks whether there is one of that name
            _register_backward(name, found) if (found := _BACKWARD.fullmatch(name)) else _register(name)
    return name


def _operator(name: str) -> _Operator:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return _Operator(name, found["base"], found["kinds"].rstrip("r"), int(found["results"]))


def _register(name: str) -> None:
    operator = _operator(name)
    operands = [
        f"Tensor(a{at}!) _{at}" if kind == "o" else f"{_KINDS[kind]} _{at}" for at, kind in enumerate(operator.kinds)
    ]
    is_writing = not operator.results
    is_random = is_writing and name.rpartition("_")[0].endswith("r")
    _define(name, operands, operator.results, (torch.Tag.nondeterministic_seeded,) if is_random else ())
    if is_writing:
        _implement(name, operator.write, lambda *_: None)
        return
    _implement(name, operator.compute, operator.pretend)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", operator.backward, setup_context=operator.save, lib=_library)


def _register_backward(name: str, found: re.Match[str]) -> None:
    forward = _operator(found["forward"])
    backward = _Backward(forward, found["kinds"], found["wanted"], found["present"])
    operands = [
        f"SymInt[] _{at}_size, SymInt[] _{at}_stride, ScalarType _{at}_dtype" if kind == "m" else f"{_KINDS[kind]} _{at}"
        for at, kind in enumerate(backward.kinds)
    ]
    operands += [f"Tensor grad{at}" for at, bit in enumerate(backward.present) if bit == "1"]
    _define(name, operands, backward.wanted.count("1"), ())
    _implement(name, backward.compute, backward.pretend)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward.refuse, lib=_library)


def _define(name: str, operands: Sequence[str], results: int, tags: Sequence[torch.Tag]) -> None:
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    _library.define(f"{name}({', '.join([*operands, 'str call'])}) -> {returned}", tags=tags)


def _implement(name: str, compute: Callable[..., Any], pretend: Callable[..., Any]) -> None:
    _library.impl(name, compute, "CPU")
    _library.impl(name, compute, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", pretend, lib=_library)


def _draw_seed(like: torch.Tensor) -> torch.Tensor:
    return draw_seed(like.device)


_library.define("draw_seed(Tensor like) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_implement("draw_seed", _draw_seed, lambda like: like.new_empty((1,), dtype=torch.int64))
