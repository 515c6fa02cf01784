"""Turns an expression into that of its gradients: what its inputs receive, given one incoming gradient for each result.

Every value that a rule needs is computed again from the inputs; nothing is computed that no wanted gradient needs. Concrete shapes,
plain integers: no tensors, no CUDA.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wideload.derivatives import NOT_ANALYTIC, RULES, ZERO, Rule, parameters_of
from wideload.draws import DRAW_OPS
from wideload.dtypes import DTYPES, dtype_name, is_half, is_storage, widened
from wideload.errors import GradError
from wideload.expr import Apply, Cast, Const, Coordinate, Draw, Expr, HostCall, HostValue, Joined, Load, Location, Node, Number, Viewed
from wideload.layout import broadcast_shapes, contiguous_strides
from wideload.ops_table import OPS, Op
from wideload.promotion import infer_dtype, sample_of
from wideload.views import View, ViewStep, apply_view, apply_views

__all__ = ["Gradient", "InputGradient", "RowSum", "Term", "connected_nodes", "derive_gradient", "missing_rules"]


@dataclass(frozen=True)
class Term:
    """A part of an input's gradient: result ``output`` of the gradient's expression, seen through ``steps``, its first dims summed."""

    output: int
    steps: tuple[ViewStep, ...]
    num_summed: int


@dataclass(frozen=True)
class RowSum:
    """A result that kernels add up, in fp32 or wider, over all rows of ``shape``, and round to ``dtype``."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class InputGradient:
    """The gradient of tensor ``operand``: the sum of ``terms``, cast to its dtype; zeros where there are none."""

    operand: int
    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Gradient:
    """``expr`` reads tensors ``inputs`` of the function, then the incoming gradients of results ``incoming``.

    ``shaped`` has for each of its results the input whose shape it has, or None for one that is still to be summed. ``sums`` has for
    each what is stored of it instead, or None.
    """

    expr: Expr
    inputs: tuple[int, ...]
    incoming: tuple[int, ...]
    gradients: tuple[InputGradient, ...]
    shaped: tuple[int | None, ...]
    sums: tuple[RowSum | None, ...]


# ---- what has a gradient


def connected_nodes(expr: Expr, wanted: Sequence[int]) -> frozenset[int]:
    """The nodes that tensors ``wanted`` have a gradient through, as torch's autograd would record it (a zero one counts)."""
    connected: set[int] = set()
    for number, node in enumerate(expr.nodes):
        match node:
            case Load():
                is_connected = node.operand in wanted
            case Apply():
                rules = RULES.get(node.op.name)
                is_connected = any(
                    operand in connected and (name in rules if rules is not None else mark != "shape")
                    for name, mark, operand in zip(node.op.operands, node.op.types, node.operands, strict=True)
                )
            case Cast() | Viewed():
                is_connected = node.operand in connected
            case Joined():
                is_connected = any(operand in connected for operand in node.operands)
            case _:
                is_connected = False
        if is_connected and _is_differentiable(node):
            connected.add(number)
    return frozenset(connected)


def _is_differentiable(node: Node) -> bool:
    return not isinstance(node, Const | Number) and (node.dtype.is_floating_point or node.dtype.is_complex)


def missing_rules(expr: Expr, wanted: Sequence[int]) -> tuple[str, ...]:
    """What stands between tensors ``wanted`` and the results that has no rule here: rows, views, kinds of numbers."""
    connected = connected_nodes(expr, wanted)
    missing: dict[str, None] = {}
    for number in sorted(connected):
        node = expr.nodes[number]
        assert not isinstance(node, Const | Number)
        if is_storage(node.dtype):
            missing[dtype_name(node.dtype)] = None
        elif isinstance(node, Apply) and node.op.name not in RULES:
            missing[node.op.name] = None
        elif isinstance(node, Viewed):
            missing.update(dict.fromkeys(step.name for step in node.steps if step.name not in _ADJOINTS))
    return tuple(missing)


def derive_gradient(
    expr: Expr,
    shapes: Sequence[tuple[int, ...]],
    wanted: Sequence[int],
    present: Sequence[int],
    *,
    rounds: bool = False,
    sums_rows: bool = False,
) -> Gradient:
    """The gradients of tensors ``wanted``, given one for each of the results ``present`` (positions among the outputs).

    ``shapes`` are those of all nodes. Halves are not rounded between steps: where types meet, the gradient stays in the wider one. With
    ``rounds`` they are, after each op of the function and after what it hands on, as eager PyTorch rounds them. To be computed with
    fused numerics. With ``sums_rows`` the kernel adds up what is to be summed over all but the last dims of a result. Raises
    ``GradError`` where a rule is missing.
    """
    missing = missing_rules(expr, wanted)
    if missing:
        raise GradError(
            f"the gradient of {expr.name} is no expression: there is no rule for {', '.join(missing)}. Torch's own operators compute it."
        )
    return _Deriving(expr, shapes, wanted, present, rounds, sums_rows).run()


# ---- values that rules compute with


@dataclass(frozen=True)
class _HostNumber:
    """A runtime number of the expression."""

    value: HostValue
    kind: type

    def derived(self, function: Callable[..., Any], *numbers: Any) -> _HostNumber:
        """``function`` of numbers, this one among them, computed at each call."""
        runtime = [number if isinstance(number, _HostNumber) else None for number in numbers]
        kind = type(function(*(number if of is None else of.kind(1) for number, of in zip(numbers, runtime, strict=True))))
        values = tuple(number if of is None else of.value for number, of in zip(numbers, runtime, strict=True))
        return _HostNumber(HostCall(function, values), kind)


class _Value:
    """A node of the gradient's expression, with operators, and the rows of the table as methods."""

    __slots__ = ("_builder", "number", "shape")

    def __init__(self, builder: _Builder, number: int, shape: tuple[int, ...]) -> None:
        self._builder, self.number, self.shape = builder, number, shape

    @property
    def dtype(self) -> torch.dtype:
        node = self._builder.nodes[self.number]
        assert not isinstance(node, Const | Number)
        return node.dtype

    def call(self, row: str, *others: Any) -> _Value:
        """Row ``row`` of this value and ``others``, in the order of the row's operands."""
        return self._builder.apply(OPS[row] if row in OPS else DRAW_OPS[row], (self, *others))

    def __getattr__(self, row: str) -> Callable[..., _Value]:
        if row not in OPS:
            raise AttributeError(row)
        return functools.partial(self.call, row)

    def to(self, dtype: torch.dtype) -> _Value:
        """The value in another dtype."""
        return self if self.dtype == dtype else self._builder.add(Cast(self.number, dtype, len(self.shape), self._builder.at), self.shape)

    def view(self, *steps: ViewStep) -> _Value:
        """Views, one after the other."""
        return self._builder.view(self, steps)

    def _reflected(self, row: str, other: Any) -> _Value:
        return self._builder.apply(OPS[row], (other, self))

    def __truediv__(self, other: Any) -> _Value:
        return self.call("div" if isinstance(other, _Value) else "div_number", other)

    def __rtruediv__(self, other: Any) -> _Value:
        return self.call("rdiv", other)

    def __rsub__(self, other: Any) -> _Value:
        return self._reflected("sub", other)

    def __neg__(self) -> _Value:
        return self.call("neg")

    def __eq__(self, other: object) -> _Value:  # type: ignore[override]
        return self.call("eq", other)

    __hash__ = None  # type: ignore[assignment]


def _operator(row: str) -> Callable[[_Value, Any], _Value]:
    return lambda self, other: self.call(row, other)


for _name, _row in (
    *(("add", "add"), ("radd", "add"), ("sub", "sub"), ("mul", "mul"), ("rmul", "mul")),
    *((name, name) for name in ("lt", "le", "gt", "ge")),
    *(("and", "logical_and"), ("or", "logical_or")),
):
    setattr(_Value, f"__{_name}__", _operator(_row))


class _Builder:
    """The nodes of the gradient's expression. Equal nodes are one node."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.shapes: list[tuple[int, ...]] = []
        self.at: Location | None = None
        self._numbers: dict[object, int] = {}

    def add(self, node: Node, shape: tuple[int, ...]) -> _Value:
        key = (node, type(node.value), repr(node.value)) if isinstance(node, Const | Number) else node  # 0.0 == -0.0, 1 == True
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
            self.shapes.append(shape)
        return _Value(self, number, shape)

    def apply(self, op: Op, operands: Sequence[Any]) -> _Value:
        numbers = tuple(self.operand(operand) for operand in operands)
        dtype = infer_dtype(op, tuple(sample_of(self.nodes[number]) for number in numbers), torch.get_default_dtype())
        shape = broadcast_shapes(*(operand.shape for operand in operands if isinstance(operand, _Value)))
        return self.add(Apply(op, numbers, dtype, len(shape), self.at), shape)

    def operand(self, operand: Any) -> int:
        if isinstance(operand, _Value):
            return operand.number
        return self.add(Number(operand.value, operand.kind) if isinstance(operand, _HostNumber) else Const(operand), ()).number

    def view(self, value: _Value, steps: Sequence[ViewStep]) -> _Value:
        kept, shape = [], value.shape
        for step in steps:
            viewed = apply_view(step, View(shape, contiguous_strides(shape)))
            if viewed != View(shape, contiguous_strides(shape)):
                kept.append(step)
            shape = viewed.shape
        if not kept:
            return value
        node, number = self.nodes[value.number], value.number
        if isinstance(node, Viewed):
            number, kept = node.operand, [*node.steps, *kept]
        return self.add(Viewed(number, tuple(kept), value.dtype, len(shape), self.at), shape)

    def join(self, parts: Sequence[_Value], dim: int) -> _Value:
        if len(parts) == 1:
            return parts[0]
        dtype = functools.reduce(torch.promote_types, (part.dtype for part in parts))
        shape = (*parts[0].shape[:dim], sum(part.shape[dim] for part in parts), *parts[0].shape[dim + 1 :])
        return self.add(Joined(tuple(part.to(dtype).number for part in parts), dim, dtype, len(shape), self.at), shape)


# ---- adjoints: gradients of nodes


@dataclass(frozen=True)
class _Piece:
    """A gradient of a part of a node: of the indices ``start``, ``start + step``, ... of ``dim``."""

    dim: int
    start: int
    step: int
    value: _Value


_Lead = tuple[int, ...]
"""The sizes of dims that stand before a node's own, and are still to be summed: a broadcast node's gradient has one for each."""

_Result = tuple[int, RowSum | None]
"""A node, and what is stored of it instead."""

_Place = tuple[int, tuple[ViewStep, ...]]
"""A node, or a view of one."""


@dataclass(frozen=True)
class _Adjoint:
    """``value`` has the shape of a node behind ``lead``."""

    lead: _Lead
    value: _Value | _Piece


class _Deriving:
    def __init__(
        self,
        expr: Expr,
        shapes: Sequence[tuple[int, ...]],
        wanted: Sequence[int],
        present: Sequence[int],
        rounds: bool,
        sums_rows: bool,
    ) -> None:
        self._expr, self._shapes, self._wanted, self._rounds, self._sums_rows = expr, shapes, wanted, rounds, sums_rows
        self._connected = connected_nodes(expr, wanted)
        self._present = [position for position in present if expr.outputs[position] in self._connected]
        self._builder = _Builder()
        self._grads: list[_Value] = []
        self._values: list[Any] = []
        self._adjoints: dict[_Place, list[_Adjoint]] = {}

    def run(self) -> Gradient:
        expr, builder = self._expr, self._builder
        grads = self._grads
        for position in self._present:
            number = expr.outputs[position]
            node, shape = expr.nodes[number], self._shapes[number]
            assert not isinstance(node, Const | Number)
            name = "grad" if len(expr.outputs) == 1 else f"grad{position}"
            grads.append(builder.add(Load(len(expr.operands) + len(grads), name, node.dtype, len(shape)), shape))
            self._adjoints.setdefault((number, ()), []).append(_Adjoint((), grads[-1]))
        for number in range(len(expr.nodes)):
            self._values.append(self._replayed(number))
        for number in sorted(self._connected, reverse=True):
            while steps := max((steps for n, steps in self._adjoints if n == number), key=len, default=()):  # views of views first
                for adjoint in self._settled((number, steps)):
                    self._view_adjoint(number, steps, adjoint)
                del self._adjoints[number, steps]
            if not isinstance(expr.nodes[number], Load):
                for adjoint in self._settled((number, ())):
                    self._propagate(number, adjoint)
        return self._result()

    # -- the function, computed again

    def _replayed(self, number: int) -> Any:
        """Node ``number`` in the gradient's expression; numbers as rules take them."""
        node, builder, values, shape = self._expr.nodes[number], self._builder, self._values, self._shapes[number]
        match node:
            case Const():
                return node.value
            case Number():
                return _HostNumber(node.value, node.kind)
            case Apply():
                marked = zip(node.operands, node.op.types, strict=True)
                operands = (self._stand_in(values[n], values[n].dtype) if mark == "shape" else values[n] for n, mark in marked)
                return self._rounded(builder.add(replace(node, operands=tuple(map(builder.operand, operands))), shape), node.dtype)
            case Cast() | Viewed():
                return builder.add(replace(node, operand=values[node.operand].number), shape)
            case Joined():
                return builder.add(replace(node, operands=tuple(values[n].number for n in node.operands)), shape)
            case Coordinate():
                full = broadcast_shapes(*(self._shapes[n] for n in node.like))
                like = next(((grad.number,) for grad in self._grads if grad.shape == full), tuple(values[n].number for n in node.like))
                return builder.add(replace(node, like=like), shape)
            case Draw():
                return builder.add(replace(node, like=self._stand_in(values[node.like]).number), shape)
            case _:
                return builder.add(node, shape)

    def _stand_in(self, value: _Value, dtype: torch.dtype | None = None) -> _Value:
        """Where only the shape counts, an incoming gradient of that shape: the input need not be kept for it."""
        return next((grad for grad in self._grads if grad.shape == value.shape and dtype in (None, grad.dtype)), value)

    # -- from a node's adjoint to those of its operands

    def _propagate(self, number: int, adjoint: _Adjoint) -> None:
        node, g, lead = self._expr.nodes[number], adjoint.value, adjoint.lead
        assert isinstance(g, _Value)
        self._builder.at = getattr(node, "at", None)
        match node:
            case Apply():
                rules = RULES[node.op.name]
                named = dict(zip(node.op.operands, (self._values[n] for n in node.operands), strict=True))
                named.update(g=g, result=self._values[number])
                is_analytic = node.dtype.is_complex and node.op.name not in NOT_ANALYTIC
                for name, operand in zip(node.op.operands, node.operands, strict=True):
                    if operand in self._connected and name in rules:
                        self._receive((operand, ()), lead, _applied(rules[name], named, is_analytic))
            case Cast():
                self._receive((node.operand, ()), lead, g)
            case Joined():
                start, dim = 0, len(lead) + node.dim
                for operand in node.operands:
                    size = self._shapes[operand][node.dim]
                    if operand in self._connected:
                        self._receive((operand, ()), lead, g.view(ViewStep("narrow", (dim, start, size))))
                    start += size
            case Viewed():
                self._adjoints.setdefault((node.operand, node.steps), []).append(adjoint)

    def _view_adjoint(self, number: int, steps: tuple[ViewStep, ...], adjoint: _Adjoint) -> None:
        """Hand the gradient of a view on to what it is a view of."""
        *before, last = steps
        assert isinstance(adjoint.value, _Value)
        place = number, tuple(before)
        lead, value = _ADJOINTS[last.name](self, self._viewed_shape(*place), last, adjoint.lead, adjoint.value)
        self._adjoints.setdefault(place, []).append(_Adjoint(lead, value))

    def _viewed_shape(self, number: int, steps: Sequence[ViewStep]) -> tuple[int, ...]:
        shape = self._shapes[number]
        for step in steps:
            shape = apply_view(step, View(shape, contiguous_strides(shape))).shape
        return shape

    def _receive(self, place: _Place, lead: _Lead, gradient: _Value | None) -> None:
        """Add a gradient of the result's shape to those of an operand, which may have been broadcast. None is zero."""
        if gradient is None:
            self._adjoints.setdefault(place, [])
            return
        number, steps = place
        shape = self._viewed_shape(number, steps)
        node = self._expr.nodes[number]
        assert not isinstance(node, Const | Number)
        lead, gradient = _unbroadcast(gradient, lead, shape)
        self._adjoints.setdefault(place, []).append(_Adjoint(lead, self._rounded(_in_dtype(gradient, node.dtype), node.dtype)))

    def _rounded(self, value: _Value, dtype: torch.dtype) -> _Value:
        """The value rounded to a half, where eager PyTorch rounds."""
        is_stored = isinstance(self._builder.nodes[value.number], Load) and value.dtype == dtype
        if is_stored or not self._rounds or not is_half(dtype):
            return value
        return self._builder.add(Cast(value.number, dtype, len(value.shape)), value.shape)

    def _settled(self, place: _Place) -> list[_Adjoint]:
        """The adjoints of a place, one for each lead: sums, and pieces put together."""
        adjoints = self._adjoints.get(place, [])
        found = []
        for lead in dict.fromkeys(adjoint.lead for adjoint in adjoints):
            values = [adjoint.value for adjoint in adjoints if adjoint.lead == lead]
            pieces: dict[tuple[int, int], list[_Piece]] = {}
            wholes: list[_Value] = []
            for value in values:
                if isinstance(value, _Piece):
                    pieces.setdefault((value.dim, value.step), []).append(value)
                else:
                    wholes.append(value)
            size_of = (*lead, *self._viewed_shape(*place))
            wholes += [self.put_together(group, size_of) for group in pieces.values()]
            found.append(_Adjoint(lead, _sum(wholes)))
        return found

    def put_together(self, pieces: list[_Piece], shape: tuple[int, ...]) -> _Value:
        """Pieces along one dim, and zeros between them, as a whole of ``shape``."""
        dim, step = pieces[0].dim, pieces[0].step
        if step > 1:  # phase by phase, then interleaved
            phases = [
                self._covered(
                    [p.value for p in pieces if p.start == phase], (*shape[:dim], shape[dim] // step, *shape[dim + 1 :]), pieces[0]
                )
                for phase in range(step)
            ]
            joined = self._builder.join([phase.view(ViewStep("unsqueeze", (dim + 1,))) for phase in phases], dim + 1)
            return joined.view(ViewStep("reshape", shape))
        edges = sorted({0, shape[dim], *(edge for p in pieces for edge in (p.start, p.start + p.value.shape[dim]))})
        parts = []
        for start, end in itertools.pairwise(edges):
            covering = [
                p.value.view(ViewStep("narrow", (dim, start - p.start, end - start)))
                for p in pieces
                if p.start <= start and end <= p.start + p.value.shape[dim]
            ]
            parts.append(self._covered(covering, (*shape[:dim], end - start, *shape[dim + 1 :]), pieces[0]))
        return self._builder.join(parts, dim)

    def _covered(self, values: list[_Value], shape: tuple[int, ...], like: _Piece) -> _Value:
        return _sum(values) if values else self._zeros(shape, like.value)

    def _zeros(self, shape: tuple[int, ...], like: _Value) -> _Value:
        """Zeros in the dtype of ``like``: constants of a shape, for which nothing is read."""
        if 0 not in shape:
            like_any = next((grad for grad in self._grads if 0 not in grad.shape), like)  # an operand: nothing is computed for its shape
            one = like_any.view(*(ViewStep("select", (0, 0)) for _ in like_any.shape), ViewStep("expand", shape))
        else:
            narrow = (ViewStep("narrow", (dim, 0, min(size, 1))) for dim, size in enumerate(like.shape) if size != shape[dim])
            one = like.view(*narrow, ViewStep("expand", shape))
        return one.call(f"full_like_{DTYPES[like.dtype].name}", 0)

    # -- the expression and what becomes of its results

    def _result(self) -> Gradient:
        outputs: dict[_Result, int] = {}
        shaped: list[int | None] = []
        gradients: list[InputGradient] = []
        partial: list[tuple[int, _Value, int, torch.dtype]] = []
        for number, node in enumerate(self._expr.nodes):
            if not isinstance(node, Load) or node.operand not in self._wanted or number not in self._connected:
                continue
            if (number, ()) not in self._adjoints:
                continue
            terms = []
            for adjoint in self._settled((number, ())):
                assert isinstance(adjoint.value, _Value)
                if adjoint.lead:
                    partial.append((len(gradients), adjoint.value, len(adjoint.lead), node.dtype))
                    continue
                value = adjoint.value.to(node.dtype)
                position = outputs.setdefault((value.number, None), len(outputs))
                if position == len(shaped):
                    shaped.append(node.operand)
                terms.append(Term(position, (), 0))
            gradients.append(InputGradient(node.operand, tuple(terms)))
        for at, value, num_summed, dtype in partial:
            is_whole = not gradients[at].terms and sum(other == at for other, *_ in partial) == 1
            total = dtype if is_whole else torch.promote_types(widened(value.dtype), widened(dtype))
            term = self._summed_rows(value, num_summed, total, outputs) or self._summed(value, num_summed, dtype, outputs)
            if term.output == len(shaped):
                shaped.append(None)
            gradients[at] = replace(gradients[at], terms=(*gradients[at].terms, term))
        return _compacted(self._expr, self._builder.nodes, tuple(outputs), tuple(gradients), tuple(shaped), self._present)

    def _summed_rows(self, value: _Value, num_summed: int, dtype: torch.dtype, outputs: dict[_Result, int]) -> Term | None:
        """A gradient that kernels add up, unrounded: where what is left of the dims of its value are the last, all in their order."""
        columns = value.shape[num_summed:]
        if not self._sums_rows or not value.dtype.is_floating_point or math.prod(columns) == 1:
            return None
        number, steps = self._rearranged(value)
        shape = self._builder.shapes[number]
        strides = apply_views(steps, View(shape, contiguous_strides(shape))).strides[num_summed:]
        is_last = all(stride == of for size, stride, of in zip(columns, strides, contiguous_strides(columns), strict=True) if size != 1)
        if not is_last or any(other is not None and other.shape != columns for _, other in outputs):  # one kernel, one width of rows
            return None
        return Term(outputs.setdefault((number, RowSum(columns, dtype)), len(outputs)), (), 0)

    def _rearranged(self, value: _Value) -> tuple[int, tuple[ViewStep, ...]]:
        """The node that has a value's elements, each once, and how they are seen there."""
        node = self._builder.nodes[value.number]
        if isinstance(node, Viewed) and all(step.name in _REARRANGE for step in node.steps):
            return node.operand, node.steps
        return value.number, ()

    def _summed(self, value: _Value, num_summed: int, dtype: torch.dtype, outputs: dict[_Result, int]) -> Term:
        """A gradient that is still to be summed: what another input receives anyway, or the whole in at least fp32."""
        shape = value.shape
        number, steps = self._rearranged(value)
        value = _Value(self._builder, number, shape)
        if (number, None) not in outputs:
            wide = torch.promote_types(widened(value.dtype), widened(dtype))
            inner = self._builder.nodes[value.number]
            assert not isinstance(inner, Const | Number)
            if inner.dtype != wide:
                value = self._builder.add(Cast(value.number, wide, inner.ndim, None), shape)
        return Term(outputs.setdefault((value.number, None), len(outputs)), steps, num_summed)


def _applied(rule: Rule, named: dict[str, Any], is_analytic: bool) -> _Value | None:
    if rule is ZERO:
        return None
    if is_analytic:
        named = {**named, "g": named["g"].conj()}
    gradient: _Value | None = rule(*(named[parameter] for parameter in parameters_of(rule)))
    return gradient.call("conj") if is_analytic and gradient is not None else gradient


def _sum(values: Sequence[_Value]) -> _Value:
    return functools.reduce(lambda one, other: one.call("add", other), values)


def _unbroadcast(gradient: _Value, lead: _Lead, shape: tuple[int, ...]) -> tuple[_Lead, _Value]:
    """Bring the dims that an operand of ``shape`` was stretched over to the front, behind ``lead``."""
    own = gradient.shape[len(lead) :]
    num_new = len(own) - len(shape)
    first = len(lead)
    stretched = [*range(num_new), *(num_new + d for d, size in enumerate(shape) if size == 1 and own[num_new + d] != 1)]
    kept = [d for d in range(num_new, len(own)) if d not in stretched]
    order = (*range(first), *(first + d for d in stretched), *(first + d for d in kept))
    gradient = gradient.view(ViewStep("permute", order))
    num_lead = first + len(stretched)
    ones = tuple(d for d in range(num_lead) if gradient.shape[d] == 1)
    gradient = gradient.view(ViewStep("squeeze", ones))
    num_lead -= len(ones)
    for d, size in enumerate(shape):
        if size == 1 and num_new + d in stretched:
            gradient = gradient.view(ViewStep("unsqueeze", (num_lead + d,)))
    return gradient.shape[:num_lead], gradient


def _in_dtype(gradient: _Value, dtype: torch.dtype) -> _Value:
    """A gradient as a node of ``dtype`` takes it: in that type, or for a half in the type it is computed in; its real part for a real."""
    if gradient.dtype.is_complex and not dtype.is_complex:
        gradient = gradient.call("real")
    if gradient.dtype == dtype or (is_half(dtype) and gradient.dtype == widened(dtype)):
        return gradient
    return gradient.to(widened(dtype))


_REARRANGE = frozenset({"permute", "squeeze", "unsqueeze"})
"""Views of every element once, that torch's sum can take itself: the kernel then writes the gradient in the results' own order."""


# ---- adjoints of views

_Kept = tuple[_Lead, "_Value | _Piece"]


def _adjoint_permute(_: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    first = len(lead)
    inverse = sorted(range(len(step.args)), key=step.args.__getitem__)
    return lead, g.view(ViewStep("permute", (*range(first), *(first + dim for dim in inverse))))


def _adjoint_unsqueeze(_: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    return lead, g.view(ViewStep("squeeze", (len(lead) + step.args[0],)))


def _adjoint_squeeze(_: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    return lead, g.view(*(ViewStep("unsqueeze", (len(lead) + dim,)) for dim in sorted(step.args) if shape[dim] == 1))


def _adjoint_reshape(_: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    return lead, g.view(ViewStep("reshape", (*lead, *shape)))


def _adjoint_expand(_: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    return _unbroadcast(g, lead, shape)


def _adjoint_part(deriving: _Deriving, shape: tuple[int, ...], step: ViewStep, lead: _Lead, g: _Value) -> _Kept:
    """Of a step that takes some indices of one dim."""
    strides = contiguous_strides(shape)
    dim = step.args[0] if step.name in ("narrow", "select", "slice") else step.args[1]
    start = apply_view(step, View(shape, strides)).offset // strides[dim]
    at = len(lead) + dim
    if step.name == "select":
        g = g.view(ViewStep("unsqueeze", (at,)))
    count, every = g.shape[at], step.args[3] if step.name == "slice" else 1
    if every == 1 or count < 2:
        return lead, _Piece(at, start, 1, g)
    if shape[dim] == count * every and start < every:
        return lead, _Piece(at, start, every, g)
    spread = deriving.put_together([_Piece(at, 0, every, g)], (*lead, *shape[:dim], count * every, *shape[dim + 1 :]))
    return lead, _Piece(at, start, 1, spread.view(ViewStep("narrow", (at, 0, (count - 1) * every + 1))))


_ADJOINTS: dict[str, Callable[[_Deriving, tuple[int, ...], ViewStep, _Lead, _Value], _Kept]] = {
    "expand": _adjoint_expand,
    "permute": _adjoint_permute,
    "squeeze": _adjoint_squeeze,
    "unsqueeze": _adjoint_unsqueeze,
    **dict.fromkeys(("flatten", "ravel", "reshape", "unflatten"), _adjoint_reshape),
    **dict.fromkeys(("chunk", "narrow", "select", "slice", "split", "split_with_sizes", "tensor_split"), _adjoint_part),
}
"""By view: how its gradient is handed on. ``diagonal`` would scatter it and ``unfold`` sum windows of it: neither is a view."""


# ---- only what is needed


def _compacted(
    expr: Expr,
    nodes: Sequence[Node],
    results: tuple[_Result, ...],
    gradients: tuple[InputGradient, ...],
    shaped: tuple[int | None, ...],
    present: Sequence[int],
) -> Gradient:
    """The expression of the nodes that ``results`` need, with operands numbered from the first that is read."""
    outputs = [number for number, _ in results]
    needed = set(outputs)
    for number in reversed(range(len(nodes))):
        if number in needed:
            needed.update(_operands_of(nodes[number]))
    numbered = {number: position for position, number in enumerate(sorted(needed))}
    kept = [nodes[number] for number in sorted(needed)]
    read = sorted({node.operand for node in kept if isinstance(node, Load)})
    renumbered = tuple(_renumbered(node, numbered, read) for node in kept)
    loads = {node.operand: node for node in renumbered if isinstance(node, Load)}
    num_inputs = len(expr.operands)
    return Gradient(
        Expr(
            f"{expr.name}_backward", tuple(loads[operand] for operand in range(len(read))), renumbered, tuple(numbered[n] for n in outputs)
        ),
        tuple(operand for operand in read if operand < num_inputs),
        tuple(present[operand - num_inputs] for operand in read if operand >= num_inputs),
        gradients,
        shaped,
        tuple(of for _, of in results),
    )


def _operands_of(node: Node) -> tuple[int, ...]:
    match node:
        case Apply() | Joined():
            return node.operands
        case Cast() | Viewed():
            return (node.operand,)
        case Coordinate():
            return node.like
        case Draw():
            return (node.like,)
        case _:
            return ()


def _renumbered(node: Node, numbered: dict[int, int], read: Sequence[int]) -> Node:
    match node:
        case Load():
            return replace(node, operand=read.index(node.operand))
        case Apply() | Joined():
            return replace(node, operands=tuple(numbered[n] for n in node.operands))
        case Cast() | Viewed():
            return replace(node, operand=numbered[node.operand])
        case Coordinate():
            return replace(node, like=tuple(numbered[n] for n in node.like))
        case Draw():
            return replace(node, like=numbered[node.like])
        case _:
            return node
