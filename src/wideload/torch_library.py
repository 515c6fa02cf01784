"""Turns a fused function into operators of ``torch.library``: results, fake results, gradients, each registered when it is first needed.

An operator is one function with a number of tensors, of numbers and of results. Knows of fused functions how a call is bound and traced;
never who asks for an operator.

A name says everything that registering needs, so that a program exported elsewhere finds its operators when it is loaded: module,
qualified name, a digest of the function's code and captured values, then its *kinds*, a letter an operand, and how many results it has.
``model_swiglu_1f0c9a7b2e_tt_1`` takes two tensors. What else stands in a call (strings, dtypes, None, nested arguments) is the operator's
last argument, ``call``, spelt in Python: ``(_0, _1, 'tanh')``.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import itertools
import operator
import re
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch

from wideload.errors import GradError, TraceError
from wideload.execute import node_dtype
from wideload.expr import is_view_of_operand
from wideload.layout import like_strides
from wideload.modes import is_looked_into, no_modes
from wideload.random import draw_seed
from wideload.reference import evaluate_expr
from wideload.remembered import remember
from wideload.replay import NodeLayout
from wideload.shortcut import MISSED, Found, Shortcuts, find_shortcut
from wideload.steps import run_steps
from wideload.structure import map_structure
from wideload.trace import Traced

if TYPE_CHECKING:
    from wideload.fused import FusedFunction
    from wideload.torch_op import DifferentiableOp, Launched

__all__ = [
    "NAMESPACE", "SAMPLES", "SEED", "base_of", "bind_symbolic", "find_function", "find_saved", "note_function", "registered",
    "respell_call", "spell_call",
]  # fmt: skip

NAMESPACE = "wideload"
"""Of the operators: ``torch.ops.wideload``."""

SEED = "draw_seed"
"""The operator that draws: torch's generator moves on there, and a function is given the seed. So the tag ``nondeterministic_seeded``
stands there alone, and what reads a seed may be computed again from it. ``number`` tells the draws of a program apart."""

_DIGEST_CHARS = 10
"""Of a name's digest: 40 bits; by chance two of a thousand functions of one name meet once in two million programs."""


_KINDS = {"t": "Tensor", "f": "float", "i": "SymInt", "c": "Scalar", "d": "Tensor", "s": "Tensor", "o": "Tensor"}
"""Operands: a tensor; a float, int or complex; a float in a 0-dim tensor; a seed; a tensor to be written."""

SAMPLES = {"f": 1.0, "d": 1.0, "i": 1, "c": 1j}
"""Numbers of the kinds, where only their kind counts."""

_NUMBERS: dict[str, type] = {"f": float, "d": float, "i": int, "c": complex}
"""By kind, what the function is given."""


# ---- functions by their identity

_FUNCTIONS: weakref.WeakValueDictionary[str, FusedFunction] = weakref.WeakValueDictionary()
_SERIAL = itertools.count()


def note_function(f: FusedFunction) -> str:
    """A string that tells ``f`` from all others of this process; Dynamo's guards compare it."""
    identity = str(next(_SERIAL))
    _FUNCTIONS[identity] = f
    return identity


def find_function(identity: str) -> FusedFunction:
    """The function of that identity."""
    return _FUNCTIONS[identity]


# ---- the argument ``call``


def spell_call(positional: Any, keywords: Any, out: Any, places: Sequence[int]) -> str:
    """The argument ``call``, where leaf ``n`` is operand ``places[n]``. Raises ``TraceError`` for what cannot be spelt."""
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


def respell_call(call: str, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
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
    if _has_symbols(call.tensors):
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

_NAME = re.compile(r"(?P<base>\w+)_(?P<kinds>[tficds]*|[tficdo]*r?)_(?P<results>\d+)")
_BACKWARD = re.compile(r"(?P<forward>\w+)_backward_(?P<kinds>[tmficds]+)_(?P<wanted>[01]+)_(?P<present>[01]+)")


def _path_of(f: FusedFunction) -> str:
    """In letters that an operator's schema takes."""
    path = re.sub(r"[^A-Za-z0-9_]+", "_", f"{f.__module__}.{f.__qualname__}").strip("_")
    return path if path[:1].isalpha() else f"fused_{path}"


def _digest(f: FusedFunction) -> str:
    options = f._options
    content = (*f._captures.describe(), options.numerics, str(options.fast_math), *sorted(options.static))
    return hashlib.sha256("\0".join(content).encode()).hexdigest()[:_DIGEST_CHARS]


def base_of(f: FusedFunction) -> str:
    """The name of ``f``, as it is now, up to the kinds; of functions that are alike in all that a name says, the later are numbered.

    With other captured values it has another name: graphs that are compiled are kept on disk by the names in them.
    """
    captured = f._captures.read()
    known = f._operator_bases.get(captured)
    if known is not None:
        return known
    with _lock:
        base = first = f"{_path_of(f)}_{_digest(f)}"
        for number in itertools.count(2):
            owner = _BASES.get(base)
            owner = owner() if isinstance(owner, weakref.ref) else owner
            if owner is None:
                _BASES[base] = weakref.ref(f) if isinstance(f.__wrapped__, types.MethodType) else f
            if owner is None or _is_same(owner, f):
                break
            base = f"{first}_{number}"
        return remember(f._operator_bases, captured, base)


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
        with _lock:  # another thread may be at it
            self._register(name)
        return super().__getattr__(name)

    @staticmethod
    def _register(name: str) -> None:
        if name == SEED:
            registered(name)
        elif name not in _registrations and (found := _NAME.fullmatch(_BACKWARD.sub(r"\g<forward>", name))):
            base = found["base"]
            if base in _BASES or any(base.startswith(_path_of(f)) and base_of(f) == base for f in list(_FUNCTIONS.values())):
                registered(name)


setattr(torch.ops, NAMESPACE, _Namespace(NAMESPACE))


# ---- operators


_T = TypeVar("_T")
_Operate = Callable[["DifferentiableOp", Any, "Traced"], _T]
"""What is done with an operation, of a call's tensors and numbers, which are in the order of the function's parameters, and its trace."""


class _Promise(NamedTuple):
    """What a graph was compiled with: the dtypes of results, and where it has gradients the operation that they are of."""

    dtypes: tuple[torch.dtype, ...]
    op: DifferentiableOp | None = None


@dataclass(frozen=True)
class _Operator:
    """A registered operator: ``kinds`` has a letter for each operand, ``results`` is their number.

    ``promised`` is by what a trace depends on but the captured values, and the call.
    """

    name: str
    base: str
    kinds: str
    results: int
    promised: dict[Any, _Promise] = field(default_factory=dict)

    @property
    def f(self) -> FusedFunction:
        return _owner_of(self.base)

    def bind(self, operands: Sequence[Any], call: str) -> Any:
        """The call of the function; numbers as they are, or for fake tensors samples of their kind."""
        args, kwargs, _ = respell_call(call, operands)
        return bind_symbolic(self.f, args, kwargs)

    def samples(self, operands: Sequence[Any]) -> list[Any]:
        return [SAMPLES.get(kind, operand) for kind, operand in zip(self.kinds, operands, strict=False)]

    def seed(self, operands: Sequence[Any]) -> torch.Tensor | None:
        return operands[self.kinds.index("s")] if "s" in self.kinds else None

    # -- real tensors

    def operate(self, operands: Sequence[Any], call: str, use: _Operate[_T]) -> _T:
        """``use`` the operation that the function is of these operands, as `_distinct` has them."""
        f, bound = self.f, self.bind(operands, call)
        return f._run(bound, lambda key, traced: use(f._operation_of(key, traced), bound, traced))

    def keep_shortcut(
        self,
        shortcuts: Shortcuts,
        arguments: Sequence[Any],
        operands: Sequence[Any],
        traced_with: tuple[Any, ...],
        launched: Launched,
        promise: Sequence[Found] = (),
    ) -> None:
        """Let calls of an operator like this one, of ``operands`` among its ``arguments``, launch at once, as long as ``promise`` holds."""
        circumstances = self.f.find_circumstances(traced_with)
        given = [value for value in arguments if isinstance(value, torch.Tensor)]
        places = {id(tensor): at for at, tensor in enumerate(given)}
        tensors = [places[id(tensor)] for tensor in launched.tensors if id(tensor) in places]
        if circumstances is None or len(tensors) != len(launched.tensors):
            return
        kinds = ["t" if isinstance(value, torch.Tensor) else "n" if type(value) in _NUMBERS.values() else "e" for value in arguments]
        scalars = [value for value, kind in zip(arguments, kinds, strict=True) if kind == "n"]
        returned = launched.outputs[0] if len(launched.outputs) == 1 else launched.outputs
        steps = run_steps(launched.launch, returned, tensors, self.find_numbers(operands, str(arguments[-1])))
        found = *circumstances, *promise
        shortcut = find_shortcut(tuple(arguments), {}, None, given, scalars, kinds, found, lambda: steps, are_apart=False)
        if shortcut is not None:
            shortcuts.keep(shortcut, tuple(arguments), {})

    def find_numbers(self, operands: Sequence[Any], call: str) -> list[int]:
        """Which of the numbers among the operands each of the call's is: told by numbers that are all different."""
        numbers = itertools.count()
        told = [_NUMBERS[kind](next(numbers)) if kind in _NUMBERS else of for kind, of in zip(self.kinds, operands, strict=False)]
        return [int(number.real) for number in self.bind(told, call).scalars]

    def compute(self, *arguments: Any) -> Any:
        """The results, in memory of their own."""
        arguments = _with_numbers(self.kinds, arguments)
        shortcuts = _shortcuts_of(self.f, self.name)
        if (taken := shortcuts.take(arguments, {})) is not MISSED:
            return taken
        *given, call = arguments
        operands, seed = _distinct(given), self.seed(given)

        def run(op: DifferentiableOp, bound: Any, traced: Traced) -> tuple[list[torch.Tensor], Launched | None, DifferentiableOp, Any, Any]:
            outs = op(bound.tensors, tuple(bound.scalars), bound.device, seed)
            fresh, launched = [outs[at] for at in op.fresh], op.launched(bound.tensors, bound.device, seed)
            own = _apart(arguments, fresh, [result.stride() for result in fresh])
            return own, launched, op, bound, _known_by(bound, traced, call)

        with torch.no_grad():
            results, launched, op, bound, known_by = self.operate(operands, call, run)
        promise = functools.partial(self.promised.get, known_by)
        promised, dtypes, others = promise(), tuple(result.dtype for result in results), ""
        if len(results) != self.results or (promised and dtypes != promised.dtypes):
            others = f"results than when it was compiled, {dtypes}"
        elif promised and promised.op not in (None, op) and _relations(promised.op, bound) != _relations(op, bound):
            others = "gradients than when it was compiled, of other operands"
        if others:
            raise TraceError(f"{self.f.__name__} has other {others}: a captured value has changed. Call torch.compiler.reset().")
        if launched is not None:
            self.keep_shortcut(shortcuts, arguments, operands, bound.traced_with, launched, [(promise, None, promised)])
        return results[0] if self.results == 1 else tuple(results)

    def write(self, *arguments: Any) -> None:
        """Fill the tensors of ``out``."""
        *operands, call = arguments
        args, kwargs, out = respell_call(call, _distinct(_with_numbers(self.kinds, operands)))
        with torch.no_grad():
            self.f(*args, out=out, **kwargs)

    # -- fake tensors

    def pretend(self, *arguments: Any) -> Any:
        """Empty results, as `compute` would return them."""
        *operands, call = arguments
        f = self.f
        with no_modes():
            bound = self.bind(self.samples(operands), call)

            def lay_out(key: Any, traced: Traced) -> tuple[DifferentiableOp, list[tuple[torch.dtype, Any]], Any]:
                if traced.reads_sizes:
                    _fix_sizes(bound.tensors)
                fresh = [node for node in traced.expr.outputs if not is_view_of_operand(traced.expr, node)]
                if _depends_on_data(bound.tensors):  # torch's own operators know what may be asked of such sizes
                    seed = self.seed(operands)
                    given = bound.tensors if seed is None else [*bound.tensors, seed]
                    shaped = evaluate_expr(traced.expr, fresh, given, tuple(bound.scalars), numerics="eager")
                    laid_out = [NodeLayout(tuple(tensor.shape), tensor.stride()) for tensor in shaped]
                else:
                    layouts = f._layouts(bound, traced)
                    laid_out = [layouts[node] for node in fresh]
                found = [(node_dtype(traced.expr, node), of) for node, of in zip(fresh, laid_out, strict=True)]
                return f._operation_of(key, traced), found, _known_by(bound, traced, call)

            op, found, known_by = f._run(bound, lay_out)
        dtypes = tuple(dtype for dtype, _ in found)
        promised = self.promised.get(known_by)
        if promised is None or promised.dtypes != dtypes or promised.op not in (None, op):  # shortcuts look for the very object
            self.promised[known_by] = _Promise(dtypes)
        results = [torch.empty_strided(of.shape, of.strides, dtype=dtype, device=bound.device) for dtype, of in found]
        return results[0] if self.results == 1 else tuple(results)

    # -- gradients

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep of the operands those whose values a gradient reads; of other tensors their sizes, strides and dtypes."""
        *given, call = inputs
        operands = _distinct([_settled(operand) if isinstance(operand, torch.Tensor) else operand for operand in given])
        f, wants = self.f, ctx.needs_input_grad
        with no_modes():
            bound = self.bind(self.samples(operands), call)
            key, traced = f._run(bound, lambda key, traced: (key, traced))
            wanted = _in_call(bound.tensors, operands, wants)
            saved = find_saved(f, bound, key, traced, wanted)
            op = f._operation_of(key, traced)
            recorded = op.recorded_results(wanted)
        known_by = _known_by(bound, traced, call)
        if is_looked_into(bound.tensors) and known_by in self.promised and self.promised[known_by].op is not op:
            self.promised[known_by] = self.promised[known_by]._replace(op=op)
        read = frozenset(range(len(bound.tensors)) if saved is None else saved)
        places = {id(tensor): at for at, tensor in enumerate(bound.tensors)}
        kinds, kept = "", []
        for kind, operand in zip(self.kinds, operands, strict=True):
            is_read = kind != "t" or places[id(operand)] in read or operand.device != bound.device
            kinds += kind if is_read else "m"
            if kind in "tds" and is_read:
                kept.append(operand)
        # Derived for the sizes at hand. Where they are symbols, what broadcasts is fixed for all; what views do is not looked into.
        is_for_all = saved is not None and (not _has_symbols(bound.tensors) or not traced.expr.has_views)
        is_for_all &= all(tensor.device == bound.device for tensor in bound.tensors)
        ctx.find_passed = functools.partial(op.find_passed, _hinted_layouts(bound), bound.device.type) if is_for_all else None
        ctx.tensors = [_place(operands, tensor) for tensor in bound.tensors]
        ctx.kinds, ctx.call = kinds, call
        ctx.numbers = [operand for kind, operand in zip(self.kinds, operands, strict=True) if kind in "fic"]
        ctx.unread = [(o.shape, o.stride(), o.dtype) for kind, o in zip(kinds, operands, strict=True) if kind == "m"]
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        outputs = (output,) if isinstance(output, torch.Tensor) else output
        ctx.mark_non_differentiable(*(out for out, is_recorded in zip(outputs, recorded, strict=True) if not is_recorded))

    def backward(self, ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the operands that want one: an incoming one where it is that as it stands, the others by an operator."""
        given: list[torch.Tensor | None] = [None] * (len(self.kinds) + 1)
        present = [grad for grad in grads if grad is not None]
        if not present:
            return tuple(given)
        wants, arrived = [ctx.needs_input_grad[at] for at in ctx.tensors], [grad is not None for grad in grads]
        passed = ctx.find_passed(tuple(arrived), tuple(wants)) if ctx.find_passed else {}
        for tensor, result in passed.items():
            given[ctx.tensors[tensor]] = grads[result]
        wanted = sorted(at for at, is_wanted in zip(ctx.tensors, wants, strict=True) if is_wanted and given[at] is None)
        if not wanted:
            return tuple(given)
        saved, numbers, unread = iter(ctx.saved_tensors), iter(ctx.numbers), iter(ctx.unread)
        operands: list[Any] = []
        for kind in ctx.kinds:
            operands += next(unread) if kind == "m" else [next(saved if kind in "tds" else numbers)]
        name = registered(f"{self.name}_backward_{ctx.kinds}_{_bits(at in wanted for at in range(len(self.kinds)))}_{_bits(arrived)}")
        found = getattr(torch.ops.wideload, name).default(*operands, *present, ctx.call)
        for at, grad in zip(wanted, [found] if isinstance(found, torch.Tensor) else found, strict=True):
            given[at] = grad
        return tuple(given)


class _Backward(NamedTuple):
    """The operator of the gradients that ``forward`` has where those of its results ``present`` arrive.

    Its ``kinds`` have an ``m`` for a tensor of which only sizes, strides and dtype are known.
    """

    name: str
    forward: _Operator
    kinds: str
    wanted: str
    present: str

    @property
    def f(self) -> FusedFunction:
        return self.forward.f

    def split(self, arguments: Sequence[Any]) -> tuple[list[Any], list[torch.Tensor], str]:
        """Operands as those of ``forward``, an `_Unread` in the place of each ``m``; gradients; the call."""
        given = iter(arguments)
        operands = [_Unread(next(given), next(given), next(given)) if kind == "m" else next(given) for kind in self.kinds]
        *grads, call = given
        return operands, grads, call

    def compute(self, *arguments: Any) -> Any:
        """The gradients, in the strides of new tensors like the operands."""
        forward = self.forward
        arguments = _with_numbers(self.kinds.replace("m", "mmm"), arguments)
        shortcuts = _shortcuts_of(self.f, self.name)
        if (taken := shortcuts.take(arguments, {})) is not MISSED:
            return taken
        given, grads, call = self.split(arguments)
        seed, incoming = forward.seed(given), iter(grads)
        operands = _distinct([_stand_in(operand, grads[0].device) if isinstance(operand, _Unread) else operand for operand in given])
        arrived = [next(incoming) if bit == "1" else None for bit in self.present]
        marks = [bit == "1" for bit in self.wanted]

        def run(op: DifferentiableOp, bound: Any, _: Traced) -> tuple[list[torch.Tensor | None], Launched | None, Any]:
            wanted = _in_call(bound.tensors, operands, marks)
            of_call = bound.tensors, bound.device, seed, arrived, wanted
            found = op.gradients(*of_call, tuple(bound.scalars))
            launched = op.launched_gradients(*of_call)
            places = [_place(bound.tensors, operand) for operand, mark in zip(operands, marks, strict=True) if mark]
            if launched is not None:
                launched = launched._replace(outputs=[launched.outputs[sum(wanted[:at])] for at in places])
            return [found[at] for at in places], launched, bound

        with torch.no_grad():
            found, launched, bound = forward.operate(operands, call, run)
        wanted = list(itertools.compress(operands, marks))
        results = _apart(arguments, found, [like_strides(tuple(tensor.shape), tensor.stride()) for tensor in wanted])
        if launched is not None and all(map(operator.is_, results, found)):
            forward.keep_shortcut(shortcuts, arguments, operands, bound.traced_with, launched)
        return results[0] if len(results) == 1 else tuple(results)

    def pretend(self, *arguments: Any) -> Any:
        """Empty gradients."""
        operands, grads, _ = self.split(arguments)
        results = []
        for operand, bit in zip(operands, self.wanted, strict=True):
            if bit == "1":
                like = operand if isinstance(operand, torch.Tensor) else _stand_in(operand, grads[0].device)
                if _depends_on_data([like]):
                    results.append(torch.empty_like(like))
                    continue
                strides = like_strides(tuple(like.shape), like.stride())
                results.append(torch.empty_strided(like.shape, strides, dtype=like.dtype, device=like.device))
        return results[0] if len(results) == 1 else tuple(results)

    def refuse(self, ctx: Any, *grads: torch.Tensor | None) -> None:
        """Second derivatives."""
        raise GradError(
            f"the operator of {self.f.__name__}'s gradients has no gradient itself, as torch.compile has no second derivatives. "
            "Call the function outside torch.compile for these."
        )


class _Unread(NamedTuple):
    """What is known of a tensor whose values no gradient reads."""

    shape: Sequence[int]
    strides: Sequence[int]
    dtype: torch.dtype


def _stand_in(tensor: _Unread, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.strides, dtype=tensor.dtype, device=device)


def _settled(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with pending conjugation and negation done, as the function is given it."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _with_numbers(kinds: str, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments of these kinds, and others behind them, with the numbers that tensors hold in their place."""
    if "d" not in kinds:
        return tuple(arguments)
    return tuple(value.item() if kind == "d" else value for kind, value in itertools.zip_longest(kinds, arguments))


def _distinct(operands: Sequence[Any]) -> list[Any]:
    """Operands as the function is given them: no tensor twice, which would be one operand."""
    distinct: list[Any] = []
    met: set[int] = set()
    for operand in operands:
        value = operand.detach() if isinstance(operand, torch.Tensor) and id(operand) in met else operand
        met.add(id(value))
        distinct.append(value)
    return distinct


def _apart(arguments: Sequence[Any], results: Sequence[Any], strides: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """The results in these strides, copied where one has others or is an argument's memory or another result's."""
    taken, own = {tensor.untyped_storage()._cdata for tensor in arguments if isinstance(tensor, torch.Tensor)}, []
    for result, wanted in zip(results, strides, strict=True):
        if result.stride() != wanted or result.untyped_storage()._cdata in taken:
            result = torch.empty_strided(result.shape, wanted, dtype=result.dtype, device=result.device).copy_(result)
        taken.add(result.untyped_storage()._cdata)
        own.append(result)
    return own


def _known_by(bound: Any, traced: Traced, call: str) -> Any:
    """What a trace of the function depends on but the values it captures, and how the call is spelt."""
    return call, tuple(bound.key), bound.traced_shapes if traced.reads_sizes else None


def _in_call(tensors: Sequence[torch.Tensor], operands: Sequence[Any], marks: Sequence[bool]) -> tuple[bool, ...]:
    """Marks of operands as marks of the call's tensors, which stand in the order of the parameters."""
    marked = {id(operand) for operand, mark in zip(operands, marks, strict=False) if mark}
    return tuple(id(tensor) in marked for tensor in tensors)


def _relations(op: DifferentiableOp, bound: Any) -> list[Any]:
    """What compiled gradients rest on: of each operand alone, what its gradient reads, and which incoming ones it is as they stand."""
    layouts, device_type, found = _hinted_layouts(bound), bound.device.type, list[Any]()
    arrivals = {(True,) * len(op.fresh), *_each_alone(len(op.fresh))}
    for wanted in _each_alone(len(layouts)):
        read = op.find_read(layouts, device_type, wanted)
        passed = [] if read is None else [op.find_passed(layouts, device_type, arrived, wanted) for arrived in sorted(arrivals)]
        found.append((read, passed))
    return found


def _each_alone(count: int) -> list[tuple[bool, ...]]:
    return [tuple(at == other for other in range(count)) for at in range(count)]


def _place(tensors: Sequence[Any], tensor: torch.Tensor) -> int:
    return next(at for at, other in enumerate(tensors) if other is tensor)


def _bits(marks: Iterable[bool]) -> str:
    return "".join(str(int(mark)) for mark in marks)


def _has_symbols(tensors: Sequence[torch.Tensor]) -> bool:
    return any(isinstance(size, torch.SymInt) for tensor in tensors for size in tensor.shape)


def _depends_on_data(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether a size is known when the program runs alone."""
    return any(isinstance(size, torch.SymInt) and not size.node.has_hint() for tensor in tensors for size in tensor.shape)


def _hinted_layouts(bound: Any) -> list[NodeLayout]:
    """Those of the call's tensors."""
    shapes = bound.shapes or [tuple(tensor.shape) for tensor in bound.tensors]
    strides = [tuple(map(_hint, tensor.stride())) for tensor in bound.tensors]
    return [NodeLayout(*layout) for layout in zip(shapes, strides, strict=True)]


def _shortcuts_of(f: FusedFunction, name: str) -> Shortcuts:
    """Those of the operator of that name."""
    found = f._operator_shortcuts.get(name)
    return f._operator_shortcuts.setdefault(name, Shortcuts(_shortcut_key)) if found is None else found


def _shortcut_key(arguments: tuple[Any, ...], *_: Any) -> Any:
    *operands, call = arguments
    kinds = [
        (value.shape, value.dtype) if isinstance(value, torch.Tensor) else tuple(value) if isinstance(value, list) else type(value)
        for value in operands
    ]
    return call, *kinds


def _fix_sizes(tensors: Sequence[torch.Tensor]) -> None:
    """Another size is another trace: torch guards what is read as an int."""
    for tensor in tensors:
        for size in tensor.shape:
            int(size)


def find_saved(f: FusedFunction, bound: Any, key: Any, traced: Traced, wanted: tuple[bool, ...]) -> tuple[int, ...] | None:
    """The tensors of the call whose values gradients read; None where torch's own operators have to be recorded."""
    return f._operation_of(key, traced).find_read(_hinted_layouts(bound), bound.device.type, wanted)


# ---- registering

_lock = threading.RLock()
_library = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_registrations: set[str] = set()


def registered(name: str) -> str:
    """``name``, when there is an operator of that name."""
    with _lock:
        if name not in _registrations:
            _registrations.add(name)  # first: torch looks whether there is one of that name
            try:
                if name == SEED:
                    _register_seed()
                elif found := _BACKWARD.fullmatch(name):
                    _register_backward(name, found)
                else:
                    _register(name)
            except BaseException:
                _registrations.discard(name)
                raise
    return name


def _operator(name: str) -> _Operator:
    found = _NAME.fullmatch(name)
    assert found is not None, name
    return _Operator(name, found["base"], found["kinds"].rstrip("r"), int(found["results"]))


def _register(name: str) -> None:
    operator = _operator(name)
    operands = [f"Tensor(a{at}!) _{at}" if kind == "o" else f"{_KINDS[kind]} _{at}" for at, kind in enumerate(operator.kinds)]
    is_writing = not operator.results
    is_random = is_writing and name.rpartition("_")[0].endswith("r")
    _define(name, operands, operator.results, (torch.Tag.nondeterministic_seeded,) if is_random else ())
    if is_writing:
        _implement(name, operator.write, lambda *_: None)
        return
    _implement(name, operator.compute, operator.pretend)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", operator.backward, setup_context=operator.save, lib=_library)
    _pass_autograd(name, operator, operator.kinds)


def _register_backward(name: str, found: re.Match[str]) -> None:
    forward = _operator(found["forward"])
    backward = _Backward(name, forward, found["kinds"], found["wanted"], found["present"])
    operands = [
        f"SymInt[] _{at}_size, SymInt[] _{at}_stride, ScalarType _{at}_dtype" if kind == "m" else f"{_KINDS[kind]} _{at}"
        for at, kind in enumerate(backward.kinds)
    ]
    operands += [f"Tensor grad{at}" for at, bit in enumerate(backward.present) if bit == "1"]
    _define(name, operands, backward.wanted.count("1"), ())
    _implement(name, backward.compute, backward.pretend)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", backward.refuse, lib=_library)
    _pass_autograd(name, backward, backward.kinds)


def _define(name: str, operands: Sequence[str], results: int, tags: Sequence[torch.Tag]) -> None:
    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    _library.define(f"{name}({', '.join([*operands, 'str call'])}) -> {returned}", tags=tags)  # type: ignore[no-untyped-call]


def _implement(name: str, compute: Callable[..., Any], pretend: Callable[..., Any]) -> None:
    _library.impl(name, compute, "CPU")  # type: ignore[no-untyped-call]
    _library.impl(name, compute, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"{NAMESPACE}::{name}", pretend, lib=_library)


def _pass_autograd(name: str, operator: _Operator | _Backward, kinds: str) -> None:
    """Let calls that are not recorded pass by what `torch.library.register_autograd` has registered, which is Python, 4 us a call."""
    if "d" in kinds or not hasattr(torch.library, "get_kernel"):  # a number is read out of its tensor below all modes
        return
    for key in ("AutogradCPU", "AutogradCUDA"):
        _library.impl(name, _passing(name, operator, torch.library.get_kernel(f"{NAMESPACE}::{name}", key)), key, with_keyset=True)  # type: ignore[no-untyped-call]


def _passing(name: str, operator: _Operator | _Backward, recording: Any) -> Callable[..., Any]:
    """The operator, in whose place is ``recording`` where autograd or a mode has to see the call."""

    def call(keys: Any, *arguments: Any) -> Any:
        last = _shortcuts_of(operator.f, name).last
        if last is not None and (result := last(arguments, {}, None)) is not MISSED:
            return result
        tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
        if is_looked_into(tensors) or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return recording.call_boxed(keys, *arguments)
        return operator.compute(*arguments)

    return call


def _register_seed() -> None:
    _library.define(f"{SEED}(Tensor like, int number) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))  # type: ignore[no-untyped-call]
    _implement(SEED, lambda like, _: draw_seed(like.device), lambda like, _: like.new_empty((1,), dtype=torch.int64))
