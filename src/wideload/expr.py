"""The expression that a traced function becomes: numbered nodes in the order they are computed.

Frozen data and its printer. Knows dtypes and dims, never sizes, strides, devices or CUDA.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch

from wideload.dtypes import dtype_name
from wideload.errors import TraceError
from wideload.ops_table import Op
from wideload.reductions import Reduction
from wideload.views import ViewStep

__all__ = [
    "Apply",
    "Cast",
    "Const",
    "Coordinate",
    "Draw",
    "Expr",
    "HostCall",
    "HostInput",
    "HostValue",
    "Load",
    "Location",
    "Node",
    "Number",
    "Numerics",
    "Position",
    "Reduced",
    "Viewed",
    "evaluate_host",
    "is_part",
    "is_reduced",
    "is_view_of_operand",
    "number_of_kind",
]


Numerics = Literal["fused", "eager"]
"""``"fused"`` keeps fp16 and bf16 in fp32 until a result is stored; ``"eager"`` rounds every intermediate as eager PyTorch does."""


class Location(NamedTuple):
    """The user's line that made a node: for errors and for comments in generated code."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass(frozen=True)
class HostInput:
    """A runtime scalar argument, by its slot."""

    slot: int
    name: str


@dataclass(frozen=True)
class HostCall:
    """Arithmetic of runtime scalars alone, evaluated in Python at each call: ``lr * (1 - b**t)``."""

    fn: Callable[..., Any]
    args: tuple[HostValue, ...]


HostValue = HostInput | HostCall | bool | int | float | complex


def evaluate_host(value: HostValue, scalars: tuple[Any, ...]) -> Any:
    """The Python number that ``value`` stands for, given the runtime scalars of one call."""
    if isinstance(value, HostInput):
        return scalars[value.slot]
    if isinstance(value, HostCall):
        return value.fn(*(evaluate_host(arg, scalars) for arg in value.args))
    return value


def number_of_kind(value: HostValue, kind: type, number: Any) -> Any:
    """``number``, what ``value`` is in one call. It must be of the ``kind`` that was traced: on it hang the dtypes of all that follows.

    Raises ``TraceError`` where arithmetic of the arguments gave another kind (``2**n`` for a negative ``n``).
    """
    if type(number) is kind:
        return number
    if kind is float and isinstance(number, int):
        return float(number)
    name = _host_text(value)
    raise TraceError(
        f"{name} was {'an' if kind is int else 'a'} {kind.__name__} when the function was traced and is now {number!r}. "
        "List the arguments that it is made of in static=."
    )


@dataclass(frozen=True)
class Load:
    """The element of tensor operand ``operand``."""

    operand: int
    name: str
    dtype: torch.dtype
    ndim: int


@dataclass(frozen=True)
class Number:
    """A runtime Python number: ``kind`` is int, float or complex. It has no dims and the weakest dtype, as in torch."""

    value: HostValue
    kind: type


@dataclass(frozen=True)
class Const:
    """A Python number written in the function, or captured by it."""

    value: bool | int | float | complex


@dataclass(frozen=True)
class Apply:
    """An op of the table on earlier nodes."""

    op: Op
    operands: tuple[int, ...]
    dtype: torch.dtype
    ndim: int
    at: Location | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Cast:
    """An explicit ``.to(dtype)``: it rounds, in every mode."""

    operand: int
    dtype: torch.dtype
    ndim: int
    at: Location | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Viewed:
    """A view of a node, by ``steps`` one after the other."""

    operand: int
    steps: tuple[ViewStep, ...]
    dtype: torch.dtype
    ndim: int
    at: Location | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Joined:
    """Nodes of one dtype concatenated along ``dim``; ``is_stack``: nodes of size 1 there, by ``torch.stack``."""

    operands: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    ndim: int
    at: Location | None = field(default=None, compare=False)
    is_stack: bool = False


@dataclass(frozen=True)
class Coordinate:
    """The coordinate along ``dim`` of each element, or with None its row-major index, in the shape that nodes ``like`` broadcast to."""

    dim: int | None
    like: tuple[int, ...]
    ndim: int
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Draw:
    """A random integer of ``bits`` bits for each element of node ``like``; no two draws of an expression have one ``stream``."""

    like: int
    bits: int
    stream: int
    ndim: int
    dtype: torch.dtype = torch.int64


@dataclass(frozen=True)
class Reduced:
    """One value of all elements of ``operand``, with no dims and no gradient: a result, and no other node's operand."""

    reduction: Reduction
    operand: int
    dtype: torch.dtype
    ndim: int = 0
    at: Location | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Position:
    """What a ``Coordinate`` or a ``Draw`` becomes once views are pushed: a number that walks the elements as an operand's offset does.

    ``walk`` says which of the pushed expression's walks; with ``draw`` it counts the random integers of that draw.
    """

    walk: int
    ndim: int
    draw: Draw | None = None
    dtype: torch.dtype = torch.int64


Node = Load | Number | Const | Apply | Cast | Viewed | Joined | Coordinate | Draw | Position | Reduced


@dataclass(frozen=True)
class Expr:
    """A traced function: ``nodes`` in order of computation, and the nodes that are its results.

    ``same_shapes`` are pairs of nodes, one stored in place of the other: torch allows no other shape, and the strides stay; ``alike``
    are pairs that torch's functions take in one shape alone. An expression with draws has one tensor more than operands, the last: the
    seed, one int64.
    """

    name: str
    operands: tuple[Load, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[int, ...]
    same_shapes: tuple[tuple[int, int], ...] = ()
    alike: tuple[tuple[int, int], ...] = ()

    @functools.cached_property
    def has_draws(self) -> bool:
        """Whether a node is random."""
        return any(isinstance(node, Draw) for node in self.nodes)

    @property
    def has_views(self) -> bool:
        """Whether a node is a view or is put together from parts."""
        return any(isinstance(node, Viewed | Joined) for node in self.nodes)

    def __str__(self) -> str:
        lines = [f"{self.name}({', '.join(f'{x.name}: {dtype_name(x.dtype)}[{x.ndim}d]' for x in self.operands)})"]
        for number, node in enumerate(self.nodes):
            match node:
                case Load():
                    text = f"load {node.name}"
                case Number():
                    text = f"number {_host_text(node.value)}: {node.kind.__name__}"
                case Const():
                    text = repr(node.value)
                case Cast():
                    text = f"cast %{node.operand}: {dtype_name(node.dtype)}"
                case Viewed():
                    text = f"%{node.operand}.{'.'.join(map(str, node.steps))}"
                case Coordinate():
                    text = f"{'linear_index()' if node.dim is None else f'index({node.dim})'} of {_listed(node.like)}"
                case Draw():
                    text = f"{node.bits} random bits like %{node.like}"
                case Position():
                    text = f"walk {node.walk}" + (f": {node.draw.bits} random bits" if node.draw else "")
                case Reduced():
                    text = f"{node.reduction.name} of %{node.operand}: {dtype_name(node.dtype)}"
                case Joined():
                    text = f"cat({_listed(node.operands)}; dim {node.dim})"
                case Apply():
                    text = f"{node.op.name}({_listed(node.operands)}): {dtype_name(node.dtype)}"
            lines.append(f"  %{number} = {text}")
        lines.append(f"  return {_listed(self.outputs)}")
        return "\n".join(lines)


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(f"%{number}" for number in numbers)


def _host_text(value: HostValue) -> str:
    if isinstance(value, HostInput):
        return value.name
    if isinstance(value, HostCall):
        return f"{getattr(value.fn, '__name__', 'host')}({', '.join(map(_host_text, value.args))})"
    return repr(value)


def is_view_of_operand(expr: Expr, number: int) -> bool:
    """Whether a node is an operand itself or a view of one: nothing is computed, and eager returns that memory."""
    node = expr.nodes[number]
    if isinstance(node, Apply):
        return is_part(expr, number) and is_view_of_operand(expr, node.operands[0])
    return isinstance(node, Load) or (isinstance(node, Viewed) and is_view_of_operand(expr, node.operand))


def is_reduced(expr: Expr, number: int) -> bool:
    """Whether a node is one value of all elements, which kernels combine in memory that starts as zero."""
    return isinstance(expr.nodes[number], Reduced)


def is_part(expr: Expr, number: int) -> bool:
    """Whether a node is the real or the imaginary part of complex numbers: every second of their halves in memory."""
    node = expr.nodes[number]
    if not isinstance(node, Apply) or node.op.name not in ("real", "imag"):
        return False
    source = expr.nodes[node.operands[0]]
    return not isinstance(source, Const | Number) and source.dtype.is_complex
