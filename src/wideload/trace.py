"""Turns a Python function and the kinds of its arguments into an ``Expr``, by running it once on proxies.

Torch itself says what each op's result dtype is. Knows nothing of strides, of CUDA, or of how the expression will run.
"""

from __future__ import annotations

import functools
import linecache
import operator
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch

from wideload.autocast import without_autocast
from wideload.draws import DRAW_SPELLINGS, Bits
from wideload.dtypes import dtype_name
from wideload.errors import DtypeError, LayoutError, TraceError
from wideload.expr import (
    Apply,
    Cast,
    Const,
    Coordinate,
    Draw,
    Expr,
    HostCall,
    HostInput,
    HostValue,
    Joined,
    Load,
    Location,
    Node,
    Number,
    Reduced,
    Viewed,
)
from wideload.layout import broadcast_shapes, contiguous_strides
from wideload.ops_table import OPS, SPELLINGS, UNRECORDED, Call, Op, Sized, to_format
from wideload.promotion import infer_dtype, sample_of
from wideload.reductions import REDUCTIONS, Reduction
from wideload.structure import map_structure
from wideload.views import VIEW_NAMES, View, ViewStep, apply_views, record_index, record_view

__all__ = [
    "HostResult",
    "NumberArg",
    "TensorArg",
    "TensorResult",
    "Traced",
    "amax",
    "any_nonfinite",
    "index",
    "is_traced",
    "linear_index",
    "trace_function",
]


@dataclass(frozen=True)
class TensorArg:
    """A tensor argument: ``name`` is for errors and generated code."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True)
class NumberArg:
    """A runtime scalar argument: an int, a float or a complex."""

    name: str
    kind: type


@dataclass(frozen=True)
class TensorResult:
    """A leaf of the result: output ``output`` of the expression; ``argument`` is the tensor argument that it is, unchanged."""

    output: int
    argument: int | None


@dataclass(frozen=True)
class HostResult:
    """A leaf of the result that is arithmetic of runtime scalars."""

    value: HostValue


class Traced(NamedTuple):
    """An expression and the structure of the results, with a ``TensorResult``, a ``HostResult`` or a constant at each leaf.

    ``reads_sizes``: the function read a size, so that the expression holds for these shapes only.
    """

    expr: Expr
    result: Any
    reads_sizes: bool


def trace_function(fn: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Traced:
    """Run ``fn`` on proxies for the ``TensorArg`` and ``NumberArg`` leaves of ``args`` and ``kwargs``; other leaves pass as they are.

    Raises ``TraceError`` (with the user's line) for what cannot be one elementwise kernel, ``DtypeError`` for what torch refuses.
    """
    tracer = _Tracer()
    args, kwargs = map_structure(tracer.enter, args), map_structure(tracer.enter, kwargs)
    outer, _active.tracer = getattr(_active, "tracer", None), tracer
    try:
        with torch.enable_grad(), without_autocast():  # whatever the caller's modes are, what the function itself sets is seen
            returned = fn(*args, **kwargs)
        if tracer.refusal is not None:
            raise tracer.refusal
    finally:
        _active.tracer = outer
    outputs: list[int] = []
    seen: dict[int, int] = {}
    result = map_structure(lambda leaf: tracer.leave(leaf, outputs, seen), returned)
    loads = tuple(node for node in tracer.nodes if isinstance(node, Load))
    return Traced(
        Expr(name, loads, tuple(tracer.nodes), tuple(outputs), tuple(tracer.same_shapes), tuple(tracer.alike)), result, tracer.reads_sizes
    )


def index(dim: int) -> torch.Tensor:
    """The coordinate along ``dim`` of the element being computed, int64, inside a fused function.

    It stands for ``torch.arange(size of dim)``, along that dim, of whatever tensors it first meets in an operation: their broadcast
    shape, whose dims ``dim`` counts. It has no shape of its own before, and nothing is stored: ``torch.where(wl.index(-1) <=
    wl.index(-2), scores, -math.inf)`` is a causal mask. It counts logical coordinates, whatever the strides. Raises ``TraceError``
    outside a fused function and ``LayoutError`` where the tensors have no such dim.

    >>> import wideload as wl
    >>> wl.fuse(lambda x: x + wl.index(0))(torch.zeros(3, 2, dtype=torch.int64))
    tensor([[0, 0],
            [1, 1],
            [2, 2]])
    """
    _check_within("wl.index")
    if type(dim) not in (int, _IntScalar):
        _refuse(f"wl.index takes the number of a dim, not {dim!r}", "Pass an int")
    return _Coordinates(_Recipe(None, (operator.index(dim),), {}))  # which a runtime scalar refuses


def linear_index() -> torch.Tensor:
    """The row-major index of the element being computed, int64, inside a fused function: as :func:`index`, over all dims.

    >>> import wideload as wl
    >>> wl.fuse(lambda x: x + wl.linear_index())(torch.zeros(2, 3, dtype=torch.int64))
    tensor([[0, 1, 2],
            [3, 4, 5]])
    """
    _check_within("wl.linear_index")
    return _Coordinates(_Recipe(None, (None,), {}))


def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude among all elements of ``x``, as a 0-dim result of a fused function beside its others: no further pass.

    ``x.abs().amax()``: NaN if an element is NaN, and 0 where there are none. It is float32 for elements of fp16, bf16 and fp32, float64 for
    fp64, and of halves it takes the values as ``numerics="fused"`` computes them, before they are rounded: what the scale of fp8 numbers is
    made of, as Transformer Engine keeps it in its ``amax_history``. It has no gradient, and nothing can be computed of it inside the
    function. Outside one it is torch's own. Raises ``DtypeError`` for what is not floating-point, and for fp8.

    >>> import wideload as wl
    >>> @wl.fuse
    ... def double(x):
    ...     y = x * 2
    ...     return y, wl.amax(y)
    >>> double(torch.tensor([1.0, -3.0]))
    (tensor([ 2., -6.]), tensor(6.))
    """
    return _reduce(REDUCTIONS["amax"], x)


def any_nonfinite(x: torch.Tensor) -> torch.Tensor:
    """Whether an element of ``x`` is infinite or NaN, 1.0 or 0.0 in float32, as a 0-dim result of a fused function beside its others.

    It is what ``torch.amp.GradScaler`` calls ``found_inf``, and may take its place. Halves are looked at as they are stored, so that what
    overflows when it is rounded counts. 0 where there are no elements. Otherwise as :func:`amax`.

    >>> import wideload as wl
    >>> unscale = wl.fuse(lambda grad, scale: (grad / scale, wl.any_nonfinite(grad)))
    >>> unscale(torch.tensor([4.0, float("inf")]), 2.0)
    (tensor([2., inf]), tensor(1.))
    """
    return _reduce(REDUCTIONS["any_nonfinite"], x)


def _reduce(reduction: Reduction, x: Any) -> torch.Tensor:
    tracer: _Tracer | None = None if torch.compiler.is_dynamo_compiling() else getattr(_active, "tracer", None)
    if tracer is not None:
        return tracer.reduce(reduction, x)
    if not isinstance(x, torch.Tensor):
        raise TraceError(f"wl.{reduction.name} takes a tensor, not a {type(x).__name__}")
    reduction.result_dtype(x.dtype)
    return reduction.of(x, x.dtype)


def _check_within(name: str) -> None:
    if getattr(_active, "tracer", None) is None:
        raise TraceError(f"{name} was called outside a fused function, where no element is being computed. Use torch.arange there.")


_active = threading.local()


def _tracer() -> _Tracer:
    tracer: _Tracer | None = getattr(_active, "tracer", None)
    if tracer is None:
        raise TraceError(
            "a traced value was used after its function had returned: it stands for no tensor. Return it from the function instead."
        )
    return tracer


# ---- where the user is

_PACKAGE = Path(__file__).parent
_ENGINE = tuple(str(_PACKAGE / name) for name in ("trace.py", "fused.py", "structure.py", "ops_table.py", "draws.py", "promotion.py"))
_LIBRARIES = (str(Path(torch.__file__).parent), sysconfig.get_paths()["stdlib"], "<frozen")
_INSTALLED = sysconfig.get_paths()["purelib"]  # packages may lie inside the standard library's folder, and are users all the same


def _user_location() -> Location | None:
    """The innermost line of the function being traced, or of one that it calls, outside torch, the standard library and the engine."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code is not trace_function.__code__:
        file = frame.f_code.co_filename
        is_library = file.startswith(_LIBRARIES) and not (file.startswith(_INSTALLED) and not file.startswith(_LIBRARIES[0]))
        if not is_library and file not in _ENGINE:
            return Location(file, frame.f_lineno, linecache.getline(file, frame.f_lineno).strip())
        frame = frame.f_back
    return None


def _refuse(what: str, way_out: str) -> NoReturn:
    """Raise a ``TraceError``, also at the trace's end if the function catches it: what follows is not what eager would do."""
    at = _user_location()
    error = TraceError(f"{what}{f' (at {at})' if at else ''}. {way_out}")
    tracer = getattr(_active, "tracer", None)
    if tracer is not None and tracer.refusal is None:
        tracer.refusal = error
    raise error


# ---- numbers known only at the call


def _names_in(value: HostValue) -> Iterator[str]:
    """The arguments that a host expression is made of."""
    if isinstance(value, HostInput):
        yield value.name
    elif isinstance(value, HostCall):
        for arg in value.args:
            yield from _names_in(arg)


class _Scalar:
    """Arithmetic of runtime scalars builds a ``HostValue``; its value cannot be seen while tracing."""

    _value: HostValue
    _kind: type

    def derived(self, fn: Callable[..., Any], kind: type) -> _Scalar:
        """``fn`` of the value, a ``kind``, computed at each call."""
        return _scalar(HostCall(fn, (self._value,)), kind)

    def _seen(self, how: str) -> NoReturn:
        names = list(dict.fromkeys(_names_in(self._value)))
        what = f"the runtime scalar {names[0]}" if len(names) == 1 else f"the runtime scalars {', '.join(names)}"
        listed = ", ".join(f'"{name}"' for name in names) + "," * (len(names) == 1)
        _refuse(
            f"{how} needs the value of {what}, which may differ from call to call",
            f"Use torch.where for a choice by value, or wl.fuse(..., static=({listed})) to make the number part of the kernel",
        )

    # isinstance(s, float) is true of a float; its value stays unseen.
    __class__ = property(lambda self: self._kind)

    @property
    def node(self) -> NoReturn:  # where torch's C++ would look for a SymInt's or SymFloat's value
        self._seen("a function of numbers alone, or a size,")

    def is_integer(self) -> bool:
        """A question about the value."""
        self._seen("is_integer()")

    def __format__(self, spec: str) -> str:
        self._seen("formatting")

    def __bool__(self) -> bool:
        self._seen("a branch (if, and, or, not, min, max)")

    def __int__(self) -> int:
        self._seen("int()")

    def __float__(self) -> float:
        self._seen("float() or a function of math")

    def __complex__(self) -> complex:
        self._seen("complex()")

    def __index__(self) -> int:
        self._seen("range() or an index")

    def __hash__(self) -> int:
        self._seen("hash(), a set or a dict")

    def __repr__(self) -> str:
        return f"<runtime {self._kind.__name__}>"

    def __str__(self) -> str:
        self._seen("str()")

    def __divmod__(self, other: Any) -> Any:
        self._seen("divmod()")

    @property
    def real(self) -> NoReturn:
        """A part of the value."""
        self._seen(".real")

    @property
    def imag(self) -> NoReturn:
        """A part of the value."""
        self._seen(".imag")

    def __round__(self, *_: Any) -> int:
        self._seen("round()")

    def __trunc__(self) -> int:
        self._seen("trunc()")

    def __floor__(self) -> int:
        self._seen("floor()")

    def __ceil__(self) -> int:
        self._seen("ceil()")


class _IntScalar(_Scalar, torch.SymInt):  # torch's argument parser takes a SymInt or SymFloat wherever it takes a number
    def __init__(self, value: HostValue) -> None:
        self._value, self._kind = value, int


class _FloatScalar(_Scalar, torch.SymFloat):
    def __init__(self, value: HostValue, kind: type = float) -> None:
        self._value, self._kind = value, kind


def _scalar(value: HostValue, kind: type) -> _Scalar:
    return _IntScalar(value) if kind is int else _FloatScalar(value, kind)


_NUMBERS = (bool, int, float, complex)


def _is_scalar(value: Any) -> bool:
    return type(value) in (_IntScalar, _FloatScalar)


def _is_number(value: Any) -> bool:
    return _is_scalar(value) or type(value) in _NUMBERS


def _host_arithmetic(fn: Callable[..., Any], reflected: bool) -> Callable[..., Any]:
    def method(self: _Scalar, *others: Any) -> Any:
        if not all(_is_number(other) for other in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        values = tuple(x._value if _is_scalar(x) else x for x in operands)
        samples = tuple(x._kind(1) if _is_scalar(x) else x for x in operands)
        try:
            kind = type(fn(*samples))
        except ZeroDivisionError:
            kind = float
        return _scalar(HostCall(fn, values), kind)

    return method


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    _fn = getattr(operator, {"and": "and_", "or": "or_"}.get(_name, _name))
    setattr(_Scalar, f"__{_name}__", _host_arithmetic(_fn, reflected=False))
    setattr(_Scalar, f"__r{_name}__", _host_arithmetic(_fn, reflected=True))
for _name in ("neg", "pos", "abs", "invert", "eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Scalar, f"__{_name}__", _host_arithmetic(getattr(operator, _name), reflected=False))


# ---- tensors


class _Tensor(torch.Tensor):
    """Stands for a tensor while the function runs: what torch does with it is recorded.

    A subclass, so that ``isinstance(x, torch.Tensor)`` holds; the empty tensor that it is by birth is never looked at.
    """

    __array_ufunc__ = None  # a NumPy scalar on the left leaves the operator to this class
    __class__ = property(lambda self: torch.Tensor)
    _node: int
    _shape: tuple[int, ...]

    def __new__(cls, node: int, shape: tuple[int, ...]) -> _Tensor:
        tensor = torch.Tensor.__new__(cls)
        tensor._node, tensor._shape = node, shape
        return tensor

    def __init__(self, node: int, shape: tuple[int, ...]) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _tracer().call(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        member = getattr(torch.Tensor, name, None)
        if member is None or name.startswith("__"):
            raise AttributeError(f"a tensor has no attribute {name!r}")
        if callable(member):
            return functools.partial(_tracer().call_method, member, self)
        tracer = _tracer()
        return tracer.recorded(tracer.read(name, self), [self])

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return _tracer().dtype(self)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._shape)

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        _tracer().reads_sizes = True
        return torch.Size(self._shape)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _tracer().device

    def _seen(self, how: str, way_out: str = "Use torch.where for a choice by value.") -> NoReturn:
        _refuse(f"{how} needs the values of a tensor, which are not known while the function is traced", way_out)

    def __bool__(self) -> bool:
        self._seen("a branch (if, and, or, not)")

    def __int__(self) -> int:
        self._seen("int()", "Use .to(torch.int64) to convert the tensor.")

    def __float__(self) -> float:
        self._seen("float()", "Use .to(torch.float64) to convert the tensor.")

    def __complex__(self) -> complex:
        self._seen("complex()", "Use .to(torch.complex128) to convert the tensor.")

    def __index__(self) -> int:
        self._seen("an index", "Pass a number that is listed in static=.")

    def __contains__(self, item: object) -> bool:
        self._seen("in", "Compare with == instead.")

    def __len__(self) -> int:
        _tracer().reads_sizes = True
        if not self._shape:
            raise TypeError("len() of a 0-d tensor")
        return self._shape[0]

    def __iter__(self) -> Any:
        tracer = _tracer()
        return iter(tracer.recorded(tracer.view(self, "unbind"), [self]))

    def __getitem__(self, index: Any) -> Any:
        tracer = _tracer()
        return tracer.recorded(tracer.index(self, index), [])  # also ``x[:]`` is a new tensor

    def set_(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse("Tensor.set_ gives a tensor other memory", "Use the other tensor")

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("an indexed assignment writes into a tensor", "Use torch.where to choose between values")

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<traced {dtype_name(self.dtype)} tensor>"

    def __format__(self, spec: str) -> str:
        return repr(self)


class _ReducedTensor(_Tensor):
    """One value of all elements, which is known when the kernel has ended: it can be returned, and nothing else."""

    def _seen(self, how: str, way_out: str = "") -> NoReturn:
        _tracer().refuse_reduced(how, self)


@dataclass(frozen=True, eq=False)
class _Recipe:
    """A torch function and its arguments, coordinates among them; of a coordinate itself no function, and its dim."""

    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Coordinates(_Tensor):
    """Coordinates, or what is computed of them and numbers alone: it takes shape when it meets a tensor."""

    _recipe: _Recipe

    def __new__(cls, recipe: _Recipe) -> _Coordinates:
        tensor = torch.Tensor.__new__(cls)
        tensor._recipe = recipe
        return tensor

    def __init__(self, recipe: _Recipe) -> None:
        pass

    def _shapeless(self, what: str) -> NoReturn:
        _refuse(f"{what} needs the shape of coordinates, which have none before they meet a tensor", _MEET)

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        try:
            return _sample(self).dtype  # type: ignore[no-any-return]
        except (RuntimeError, TypeError, ValueError) as error:
            raise DtypeError(f"torch refuses what is computed of coordinates: {str(error).splitlines()[0]}") from None

    @property
    def _shape(self) -> tuple[int, ...]:  # type: ignore[override]
        self._shapeless("a shape, a view or an iteration")


_MEET = "Combine them with one first, as in torch.zeros_like(x, dtype=torch.int64) + wl.index(0)"


def _sample(value: Any) -> Any:
    """What stands for a coordinate, or for what is computed of some, where only the dtype counts; numbers likewise."""
    if isinstance(value, _Coordinates):
        recipe = value._recipe
        if recipe.function is None:
            return torch.ones(1, dtype=torch.int64)
        return recipe.function(*map_structure(_sample, recipe.args), **map_structure(_sample, recipe.kwargs))
    return value._kind(1) if _is_scalar(value) else value


def _operator(name: str) -> Callable[..., Any]:
    member = torch.Tensor.pow_ if name == "__ipow__" else getattr(torch.Tensor, name)  # __ipow__ is a wrapper in Python

    def method(self: _Tensor, *others: Any) -> Any:
        return _tracer().call_method(member, self, *others)

    return method


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
for _name in (
    *(f"__{prefix}{name}__" for name in _BINARY for prefix in ("", "r", "i")),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
):
    if hasattr(torch.Tensor, _name):
        setattr(_Tensor, _name, _operator(_name))

_CASTS: dict[str, torch.dtype] = {
    **{"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16},
    **{"int": torch.int32, "long": torch.int64, "short": torch.int16, "char": torch.int8, "byte": torch.uint8, "bool": torch.bool},
    **{"cfloat": torch.complex64, "cdouble": torch.complex128, "chalf": torch.complex32},
}
_RESULTS = (*_NUMBERS, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format, torch.layout, np.generic)
_CAST_METHODS = {getattr(torch.Tensor, name): dtype for name, dtype in _CASTS.items()}
_CONVERSIONS = {*_CAST_METHODS, torch.Tensor.to, torch.Tensor.type, torch.Tensor.type_as}
_OUT_OF_PLACE = "Use the out-of-place form, and out= to write into existing memory"
_JOINS = ("cat", "concat", "concatenate", "stack")
_SPELLINGS = {**SPELLINGS, **DRAW_SPELLINGS}


def _spelled(func: Callable[..., Any]) -> str:
    name = getattr(func, "__name__", None) or repr(func)
    return torch.overrides.resolve_name(func) or name


class _Tracer:
    """The nodes met so far. Equal nodes are one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.reads_sizes = False
        self.refusal: TraceError | None = None
        self.device = torch.device("cpu")
        self._numbers: dict[Any, int] = {}
        self._slots = 0
        self._num_draws = 0
        self._operands: list[_Tensor] = []
        self._entered: dict[int, _Tensor] = {}
        self._aliased: set[int] = set()  # nodes that views were taken of
        self._unrecorded: set[int] = set()  # nodes without a gradient, since the function had turned gradients off
        self.same_shapes: list[tuple[int, int]] = []  # what was stored in place, and where
        self.alike: list[tuple[int, int]] = []  # what torch takes in one shape alone

    # -- arguments and results

    def enter(self, leaf: Any) -> Any:
        if isinstance(leaf, TensorArg):
            if id(leaf) in self._entered:
                return self._entered[id(leaf)]
            self.device = leaf.device if leaf.device.type != "cpu" or not self._operands else self.device
            node = self._add(Load(len(self._operands), leaf.name, leaf.dtype, len(leaf.shape)))
            self._operands.append(_Tensor(node, leaf.shape))
            self._entered[id(leaf)] = self._operands[-1]
            return self._operands[-1]
        if isinstance(leaf, NumberArg):
            self._slots += 1
            return _scalar(HostInput(self._slots - 1, leaf.name), leaf.kind)
        return leaf

    def leave(self, leaf: Any, outputs: list[int], seen: dict[int, int]) -> Any:
        """A leaf of the result; one traced tensor returned twice is one output, equal ones are several, as from eager."""
        if isinstance(leaf, _Coordinates):
            raise TraceError(f"the function returns coordinates, which have no shape before they meet a tensor. {_MEET}.")
        if isinstance(leaf, _Tensor):
            output = seen.setdefault(id(leaf), len(outputs))
            if output == len(outputs):
                outputs.append(leaf._node)
            node = self.nodes[leaf._node]
            return TensorResult(output, node.operand if isinstance(node, Load) else None)
        if _is_scalar(leaf):
            return HostResult(leaf._value)
        if isinstance(leaf, torch.Tensor):
            raise TraceError("the function returns a tensor that is not computed from its arguments. Pass that tensor as an argument.")
        if not isinstance(leaf, _RESULTS):
            raise TraceError(
                f"the function returns a {type(leaf).__module__}.{type(leaf).__qualname__}; allowed: tensors, numbers, strings, None and "
                "dtypes, in tuples, lists, dicts and namedtuples"
            )
        return leaf

    # -- calls

    def call_method(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.call(func, args, kwargs)

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of a torch function or method, as a proxy, a structure of proxies or a Python value."""
        leaves = _leaves((args, kwargs))
        if torch.is_autocast_enabled("cpu" if self.device.type == "cpu" else "cuda"):
            _refuse("torch.autocast has no effect inside a fused function", "Convert with .to(dtype), and leave it out")
        result = self._call(func, leaves, args, kwargs)
        return result if self._is_operand(result) or self._may_be_operand(result) else self.recorded(result, leaves)

    def recorded(self, result: Any, operands: list[Any]) -> Any:
        """What a call returned; where the function has turned gradients off, what is new of it has none."""
        if torch.is_grad_enabled():
            return result
        return map_structure(lambda leaf: leaf if any(leaf is operand for operand in operands) else self._detached(leaf), result)

    def _detached(self, leaf: Any) -> Any:
        if not isinstance(leaf, _Tensor) or isinstance(leaf, _Coordinates) or not _has_gradients(self.dtype(leaf)):
            return leaf
        if leaf._node in self._unrecorded:
            return leaf
        detached = self._apply(OPS["detach"], (leaf,))
        self._unrecorded.add(detached._node)
        if isinstance(self.nodes[leaf._node], Viewed) or leaf._node in self._aliased:
            self._aliased.add(detached._node)
        return detached

    def _call(self, func: Callable[..., Any], leaves: list[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        for leaf in leaves:
            if isinstance(leaf, _ReducedTensor):
                self.refuse_reduced(_spelled(func), leaf)
        if any(isinstance(leaf, _Coordinates) for leaf in leaves):
            like = tuple(leaf for leaf in leaves if isinstance(leaf, _Tensor) and not isinstance(leaf, _Coordinates))
            if not like or name in _JOINS:
                return self._defer(func, name, args, kwargs)
            made: dict[_Recipe, Any] = {}
            args, kwargs = map_structure(lambda leaf: self._meet(leaf, like, made), (args, kwargs))
        if kwargs.get("out") is not None:
            _refuse(f"{_spelled(func)} has out= inside a fused function", "Return the result, and give out= to the fused function")
        kwargs = {key: value for key, value in kwargs.items() if key != "out"}
        if func in _CONVERSIONS:
            return self._convert(func, *args, **kwargs)
        wanted = kwargs.get("memory_format", torch.preserve_format)
        if wanted not in (torch.preserve_format, None) and name not in ("clone", "contiguous"):
            _refuse(f"{_spelled(func)} to {wanted} changes the layout of a value", "Convert the result with .to(memory_format=)")
        query = _QUERIES.get(name)
        if query is not None and getattr(torch.Tensor, name, None) is not None:
            return query(self, *args, **kwargs)
        if name == "__get__":
            return self.read(_property_name(func), args[0])
        if name == "__set__":
            _refuse(f"an assignment to .{_property_name(func)} changes a tensor", "Compute a new one")
        spelling = _SPELLINGS.get(func)
        if spelling is not None:
            if kwargs.pop("inplace", False) is True:
                return self._assign(args[0], self._spell(func, spelling, args, kwargs), _spelled(func))
            result = self._spell(func, spelling, args, kwargs)
            return self._sharing(result)
        functional = _functional_form(func)
        if functional is not None:
            return self._assign(args[0], self._spell(func, SPELLINGS[functional], args, kwargs), _spelled(func))
        if name in VIEW_NAMES:
            return self.view(args[0], name, *args[1:], **kwargs)
        if name in _JOINS:
            return self._join(name, *args, **kwargs)
        _refuse(
            f"{_spelled(func)} is not an elementwise op that wideload knows", "Compute it outside the fused function and pass its result"
        )

    def reduce(self, reduction: Reduction, x: Any) -> _Tensor:
        """One value of all elements of ``x``."""
        name = f"wl.{reduction.name}"
        if not isinstance(x, _Tensor):
            got = "a tensor that is not an argument" if isinstance(x, torch.Tensor) else type(x).__name__
            _refuse(f"{name} takes a tensor that the function computes, not {got}", "Pass the tensor as an argument of the fused function")
        if isinstance(x, _Coordinates):
            _refuse(f"{name} needs the shape of coordinates, which have none before they meet a tensor", _MEET)
        if isinstance(x, _ReducedTensor):
            self.refuse_reduced(name, x)
        at = _user_location()
        try:
            dtype = reduction.result_dtype(self.dtype(x))
        except DtypeError as error:
            raise DtypeError(f"{error}{f' (at {at})' if at else ''}") from None
        return _ReducedTensor(self._add(Reduced(reduction, x._node, dtype, at=at)), ())

    def refuse_reduced(self, name: str, x: _ReducedTensor) -> NoReturn:
        """Of a value of all elements nothing can be computed."""
        node = self.nodes[x._node]
        assert isinstance(node, Reduced)
        _refuse(
            f"{name} needs the result of wl.{node.reduction.name}, which is known when the kernel has ended",
            "Return it, and compute with it outside the fused function, or in another one",
        )

    # -- coordinates

    def _defer(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Coordinates computed of coordinates."""
        if _functional_form(func) is not None or kwargs.get("inplace"):
            _refuse(f"{_spelled(func)} writes into coordinates, which lie nowhere", "Use the out-of-place form")
        if name in ("is_floating_point", "is_complex", "is_signed", "element_size"):
            return func(*map(_sample, args))
        if name == "__get__":
            return self.read(_property_name(func), args[0])
        is_known = func in _SPELLINGS or func in _CONVERSIONS
        if not is_known or func in DRAW_SPELLINGS:
            _refuse(f"{_spelled(func)} needs the shape of coordinates, which have none before they meet a tensor", _MEET)
        return _Coordinates(_Recipe(func, args, kwargs))

    def _meet(self, leaf: Any, like: tuple[_Tensor, ...], made: dict[_Recipe, Any]) -> Any:
        """The tensor that coordinates are beside the tensors ``like``; any other leaf is itself."""
        if not isinstance(leaf, _Coordinates):
            return leaf
        recipe = leaf._recipe
        if recipe not in made and recipe.function is None:
            made[recipe] = self._coordinate(recipe.args[0], like)
        elif recipe not in made:
            assert recipe.function is not None
            args, kwargs = map_structure(lambda leaf: self._meet(leaf, like, made), (recipe.args, recipe.kwargs))
            made[recipe] = self.call(recipe.function, args, kwargs)
        return made[recipe]

    def _coordinate(self, dim: int | None, like: tuple[_Tensor, ...]) -> _Tensor:
        at = _user_location()
        try:
            shape = broadcast_shapes(*(tensor._shape for tensor in like))
        except LayoutError as error:
            raise self._misfit(f"coordinates: {error} (at {at})") from None
        rank = len(shape)
        if dim is not None and not -rank <= dim < rank:
            allowed = f"{-rank} to {rank - 1}" if rank else "none; wl.linear_index() is 0 there"
            raise LayoutError(f"wl.index({dim}) meets a tensor of {rank}-d shape {shape}; allowed: {allowed} (at {at})")
        if dim is not None:
            dim %= rank
            shape = tuple(size if d == dim else 1 for d, size in enumerate(shape))
        return _Tensor(self._add(Coordinate(dim, tuple(dict.fromkeys(tensor._node for tensor in like)), rank)), shape)

    def _is_alias(self, number: int) -> bool:
        node = self.nodes[number]
        return isinstance(node, Apply) and node.op.is_alias

    def _sharing(self, result: Any) -> Any:
        """``result``, noted where its memory is that of its operand, or may be."""
        node = self.nodes[result._node] if isinstance(result, _Tensor) else None
        if isinstance(node, Apply) and (node.op.is_alias or node.op.may_be_operand):
            self._aliased.update((node.operands[0], result._node))
        return result

    def _may_be_operand(self, result: Any) -> bool:
        """Whether the row itself says where a gradient ends, of what has a memory format or is copied."""
        if not isinstance(result, _Tensor) or isinstance(result, _Coordinates):
            return False
        node = self.nodes[result._node]
        return isinstance(node, Apply) and node.op in UNRECORDED.values()

    def _is_operand(self, result: Any) -> bool:
        """Whether torch returns the very operand: for ``+x``, and for the real part or the conjugate of what is real."""
        if not isinstance(result, _Tensor) or isinstance(result, _Coordinates) or not self._is_alias(result._node):
            return False
        node = self.nodes[result._node]
        assert isinstance(node, Apply)
        operand = self.nodes[node.operands[0]]
        assert not isinstance(operand, Const | Number)
        return node.op is OPS["positive"] or not operand.dtype.is_complex

    def _spell(self, func: Callable[..., Any], spelling: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            spelled = spelling(*args, **kwargs)
        except TypeError as error:
            if isinstance(error, DtypeError) or " (at " in str(error):
                raise
            if isinstance(error, TraceError):
                raise TraceError(f"{error} (at {_user_location()})") from None
            _refuse(f"{_spelled(func)}: {error}", "Call it as torch documents it")
        except LayoutError as error:
            raise self._misfit(str(error) if " (at " in str(error) else f"{_spelled(func)}: {error} (at {_user_location()})") from None
        return map_structure(self._evaluate, spelled)

    def _evaluate(self, tree: Any) -> Any:
        if isinstance(tree, Bits):
            self._num_draws += 1
            return _Tensor(self._add(Draw(tree.like._node, tree.bits, self._num_draws - 1, len(tree.like._shape))), tree.like._shape)
        if isinstance(tree, Sized):
            return self._sized(self._evaluate(tree.tree), tree.like, tree.what)
        if not isinstance(tree, Call):
            return tree
        return self._apply(tree.op, tuple(self._evaluate(operand) for operand in tree.operands))

    def _sized(self, value: Any, like: Any, what: str) -> Any:
        if isinstance(value, _Tensor) and isinstance(like, _Tensor):
            if value._shape != like._shape:
                raise self._misfit(f"{what} has shape {value._shape}, and must have the input's, {like._shape} (at {_user_location()}).")
            self.alike.append((value._node, like._node))
        return value

    def _apply(self, op: Op, operands: tuple[Any, ...]) -> _Tensor:
        numbers = tuple(self._operand(op, operand) for operand in operands)
        dtype = self._infer(op, numbers)
        shape = self._broadcast(op, [x._shape for x in operands if isinstance(x, _Tensor)])
        return _Tensor(self._add(Apply(op, numbers, dtype, len(shape), _user_location())), shape)

    def _broadcast(self, op: Op, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
        try:
            return broadcast_shapes(*shapes)
        except LayoutError as error:
            raise self._misfit(f"{op.name}: {error} (at {_user_location()})") from None

    def _misfit(self, message: str) -> LayoutError:
        """The error for shapes that do not fit. A function that catches it has a trace for these shapes only."""
        self.reads_sizes = True
        return LayoutError(message)

    def _operand(self, op: Op, operand: Any) -> int:
        operand = operand.item() if isinstance(operand, np.generic) else operand
        if isinstance(operand, _Tensor):
            return operand._node
        if _is_scalar(operand):
            return self._add(Number(operand._value, operand._kind))
        if isinstance(operand, _NUMBERS):
            return self._add(Const(operand))
        if isinstance(operand, torch.Tensor):
            _refuse(
                f"{op.name} uses a tensor of shape {tuple(operand.shape)} that is not an argument",
                "Pass the tensor as an argument of the fused function",
            )
        _refuse(f"{op.name} takes tensors and numbers, not {type(operand).__name__}", "Pass a tensor or a Python number")

    def _add(self, node: Node) -> int:
        key = (node, type(node.value), repr(node.value)) if isinstance(node, Const | Number) else node  # 0.0 == -0.0, 1 == True
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return number

    # -- dtypes

    def dtype(self, tensor: _Tensor) -> torch.dtype:
        if isinstance(tensor, _Coordinates):
            return tensor.dtype
        node = self.nodes[tensor._node]
        assert not isinstance(node, Const | Number)
        return node.dtype

    def _infer(self, op: Op, numbers: tuple[int, ...]) -> torch.dtype:
        samples = tuple(sample_of(self.nodes[number]) for number in numbers)
        try:
            return infer_dtype(op, samples, torch.get_default_dtype())
        except DtypeError as error:
            at = _user_location()
            raise DtypeError(f"{error}{f' (at {at})' if at else ''}") from None

    def _cast(self, tensor: Any, dtype: torch.dtype) -> _Tensor:
        if self.dtype(tensor) == dtype:
            return tensor  # type: ignore[no-any-return]
        return _Tensor(self._add(Cast(tensor._node, dtype, len(tensor._shape), _user_location())), tensor._shape)

    def _convert(self, func: Callable[..., Any], tensor: Any, *args: Any, memory_format: Any = None, **kwargs: Any) -> Any:
        """``.to`` and the methods named as dtypes, whose result is the tensor itself where it has the dtype and format already."""
        dtype = _CAST_METHODS.get(func)
        result = self._to(func, tensor, *args, **kwargs) if dtype is None else self._cast(tensor, dtype)
        if memory_format in (None, torch.preserve_format):
            return result
        if result is tensor and memory_format == torch.contiguous_format and len(result._shape) not in (4, 5):
            return result  # torch looks at no strides but those of channels_last
        return self._sharing(self._spell(func, to_format, (result, memory_format), {"copies": result is not tensor}))

    def _to(self, func: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = [*args, *(kwargs[key] for key in ("dtype", "other") if key in kwargs)]
        if func is torch.Tensor.type and not wanted:
            _refuse("Tensor.type() spells a dtype and a device as text", "Ask .dtype, and isinstance")
        if func is torch.Tensor.type and any(isinstance(x, str) for x in wanted):
            _refuse(f"{_spelled(func)} converts to a dtype that is spelt as text", "Use .to(dtype)")
        dtypes = [x if isinstance(x, torch.dtype) else x.dtype for x in wanted if isinstance(x, torch.dtype) or hasattr(x, "dtype")]
        moved = [x for x in (*args, kwargs.get("device")) if isinstance(x, (str, int, torch.device)) and not isinstance(x, bool)]
        for device in moved:
            if isinstance(device, int) or torch.device(device).type != self.device.type:
                _refuse(f"{_spelled(func)} moves a tensor to {device}", "Move it before the call")
        if not isinstance(tensor, _Tensor):
            _refuse(f"{_spelled(func)} converts a tensor that is not an argument", "Pass it as an argument")
        result = self._cast(tensor, dtypes[0]) if dtypes else tensor
        copied = kwargs.get("copy") or (len(args) > 2 and args[2] is True)
        return self._apply(OPS["clone"], (tensor,)) if copied and result is tensor else result

    # -- in-place, views, properties

    def _assign(self, target: Any, value: Any, name: str) -> Any:
        """An in-place method on an intermediate gives that name a new value; elsewhere it would write to memory that others read."""
        node = self.nodes[target._node] if isinstance(target, _Tensor) else None
        if node is None or isinstance(node, Load):
            _refuse(f"{name} would write into an argument of the fused function", _OUT_OF_PLACE)
        if isinstance(node, Viewed) or target._node in self._aliased:
            _refuse(f"{name} writes in place where another tensor shares the memory", "Use the out-of-place form")
        have, got = self.dtype(target), self.dtype(value)
        if not torch.is_grad_enabled() and _has_gradients(have) and target._node not in self._unrecorded:
            what = f"{name} writes in place where gradients are off, which leaves the gradient of what was there"
            _refuse(what, "Use the out-of-place form")
        if not torch.can_cast(got, have):
            where = f"(at {_user_location()})"
            raise DtypeError(
                f"{name}: the result is {got}, which cannot be stored in place in a {have} {where}. Use the out-of-place form."
            )
        if value._shape != target._shape:
            raise self._misfit(
                f"{name}: the result has shape {value._shape}, the tensor it is stored in {target._shape} (at {_user_location()})."
            )
        stored = self.recorded(self._cast(value, have), [])._node
        self.same_shapes.append((stored, target._node))
        target._node = stored
        return target

    def view(self, tensor: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """The views that one call takes of ``tensor``."""
        if isinstance(tensor, _ReducedTensor):
            self.refuse_reduced(name, tensor)
        if not isinstance(tensor, _Tensor):
            _refuse(f"{name} takes a view of a tensor that is not an argument", "Pass the tensor as an argument of the fused function")
        try:
            recorded = record_view(name, args, kwargs, tensor._shape)
            self.reads_sizes |= recorded.depends_on_shape
            views = tuple(self._viewed(tensor, (step,)) for step in recorded.steps)
        except LayoutError as error:
            raise self._misfit(f"{error} (at {_user_location()})") from None
        except TraceError as error:
            raise TraceError(f"{error} (at {_user_location()})") from None
        if name in ("H", "mH", "adjoint") and self.dtype(tensor).is_complex:
            return self.call(torch.conj, views, {})
        return views if recorded.is_tuple else views[0] if views else tensor

    def index(self, tensor: _Tensor, index: Any) -> _Tensor:
        """The view that ``tensor[index]`` is."""
        if isinstance(tensor, _ReducedTensor):
            self.refuse_reduced("an index", tensor)
        try:
            return self._viewed(tensor, record_index(index, tensor._shape))
        except LayoutError as error:
            raise self._misfit(f"{error} (at {_user_location()})") from None
        except TraceError as error:
            raise TraceError(f"{error} (at {_user_location()})") from None

    def _viewed(self, tensor: _Tensor, steps: tuple[ViewStep, ...]) -> _Tensor:
        if steps or not torch.is_grad_enabled():  # then what sees all of it is a tensor of its own, without a gradient
            self._aliased.add(tensor._node)
        if not steps:
            return tensor
        shape = apply_views(steps, View(tensor._shape, contiguous_strides(tensor._shape))).shape
        node, number = self.nodes[tensor._node], tensor._node
        if isinstance(node, Viewed):
            number, steps = node.operand, (*node.steps, *steps)
        return _Tensor(self._add(Viewed(number, steps, self.dtype(tensor), len(shape), _user_location())), shape)

    def _join(self, name: str, tensors: Any, dim: int = 0, axis: int | None = None) -> _Tensor:
        """``torch.cat`` and ``torch.stack`` of traced tensors."""
        parts, dim = list(tensors), dim if axis is None else axis
        if not parts or not all(isinstance(part, _Tensor) for part in parts):
            _refuse(f"{name} takes traced tensors, not {[type(part).__name__ for part in parts]}", "Pass every tensor as an argument")
        if name == "stack":
            parts = [self.view(part, "unsqueeze", dim) for part in parts]
        dtype = functools.reduce(torch.promote_types, (self.dtype(part) for part in parts))
        if {len(part._shape) for part in parts} > {1} and any(part._shape == (0,) for part in parts):
            self.reads_sizes = True  # torch leaves out what is one-dimensional and empty, such as a cache before its first step
            parts = [part for part in parts if part._shape != (0,)]
        rank = len(parts[0]._shape)
        if not rank or any(len(part._shape) != rank for part in parts) or not -rank <= dim < rank:
            raise self._misfit(
                f"{name} of shapes {[part._shape for part in parts]} along dim {dim} (at {_user_location()}): "
                "all must have as many dims, and dim be one of them."
            )
        dim %= rank
        if len({(*part._shape[:dim], *part._shape[dim + 1 :]) for part in parts}) > 1:
            raise self._misfit(
                f"{name} of shapes {[part._shape for part in parts]} along dim {dim}: the other sizes must be equal (at {_user_location()})"
            )
        nodes = tuple(self._cast(part, dtype)._node for part in parts)
        shape = (*parts[0]._shape[:dim], sum(part._shape[dim] for part in parts), *parts[0]._shape[dim + 1 :])
        return _Tensor(self._add(Joined(nodes, dim, dtype, rank, _user_location(), is_stack=name == "stack")), shape)

    def read(self, name: str, tensor: _Tensor) -> Any:
        if name in ("is_cuda", "is_cpu", "is_meta"):
            return self.device.type == name.removeprefix("is_")
        if name == "itemsize":
            return self.dtype(tensor).itemsize
        if name == "requires_grad":
            _refuse("requires_grad is not known while the function is traced", "Decide outside the fused function")
        if name in VIEW_NAMES:
            return self.view(tensor, name)
        if name in ("real", "imag"):
            return self.call(getattr(torch, name), (tensor,), {})
        _refuse(f"Tensor.{name} cannot be read while the function is traced", "Read it outside and pass it as a static argument")


def _size(tracer: _Tracer, tensor: _Tensor, dim: int | None = None) -> Any:
    return tensor.shape if dim is None else tensor.shape[dim]


def _numel(tracer: _Tracer, tensor: _Tensor) -> int:
    return tensor.shape.numel()


_QUERIES: dict[str, Callable[..., Any]] = {
    "dim": lambda tracer, tensor: tensor.ndim,
    "ndimension": lambda tracer, tensor: tensor.ndim,
    "size": _size,
    "numel": _numel,
    "nelement": _numel,
    "element_size": lambda tracer, tensor: tensor.dtype.itemsize,
    "is_floating_point": lambda tracer, tensor: tensor.dtype.is_floating_point,
    "is_complex": lambda tracer, tensor: tensor.dtype.is_complex,
    "is_signed": lambda tracer, tensor: tensor.dtype.is_signed,
}


def _leaves(tree: Any) -> list[Any]:
    if isinstance(tree, (tuple, list)):
        return [leaf for item in tree for leaf in _leaves(item)]
    return [leaf for item in tree.values() for leaf in _leaves(item)] if isinstance(tree, dict) else [tree]


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _property_name(func: Callable[..., Any]) -> str:
    return str(getattr(getattr(func, "__self__", None), "__name__", ""))


_STORES: dict[Callable[..., Any], Callable[..., Any]] = {
    **dict.fromkeys((torch.fill_, torch.Tensor.fill_), torch.fill),
    **dict.fromkeys((torch.zero_, torch.Tensor.zero_), torch.zeros_like),
}
"""The in-place functions whose functional form has another owner or name."""


@functools.cache
def _functional_form(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """``torch.Tensor.add`` for ``torch.Tensor.add_`` and ``torch.Tensor.__iadd__``; None where there is none in the table."""
    if func in _STORES:
        return _STORES[func]
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        plain = f"__{name[3:]}"
    elif name.endswith("_") and not name.endswith("__"):
        plain = name[:-1]
    else:
        return None
    for owner in (torch.Tensor, torch, torch.nn.functional):
        found = getattr(owner, plain, None)
        if found is not None and found in SPELLINGS and getattr(owner, name, None) is func:
            return found  # type: ignore[no-any-return]
    return None


def is_traced(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a proxy is among the arguments: the caller is being traced itself."""
    return getattr(_active, "tracer", None) is not None and any(_holds_proxy(value) for value in (*args, *kwargs.values()))


def _holds_proxy(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_proxy, value))
    if isinstance(value, dict):
        return any(map(_holds_proxy, value.values()))
    return type(value) in (_Tensor, _ReducedTensor, _Coordinates, _IntScalar, _FloatScalar)
