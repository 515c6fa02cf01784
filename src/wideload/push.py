"""Turns the views and concatenations inside an expression into views of its operands and of its results.

A view of a computed value is the value computed from views of what it is made of; a concatenation is several results, each
written to its part. What comes out has loads, arithmetic and stores only. Concrete shapes, plain integers: no tensors.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from wideload.errors import LayoutError
from wideload.expr import Apply, Cast, Const, Coordinate, Draw, Expr, Joined, Load, Node, Number, Position, Viewed
from wideload.layout import contiguous_strides
from wideload.replay import NodeLayout
from wideload.views import View, ViewStep, apply_views, narrowed

__all__ = ["PushedExpr", "PushedLoad", "PushedStore", "push_views"]


class PushedLoad(NamedTuple):
    """What a ``Load`` of the pushed expression reads: a view of tensor argument ``operand``, in elements from its first."""

    operand: int
    view: View


class PushedStore(NamedTuple):
    """Node ``node`` of the pushed expression is ``view`` of output ``output``, in elements from its first."""

    node: int
    output: int
    view: View


class PushedExpr(NamedTuple):
    """``expr`` without views: a ``Load`` of its operand ``n`` reads ``loads[n]``.

    The number of a ``Position`` of walk ``n`` is that of the element that ``walks[n]`` would read of a tensor of 0, 1, 2, ...
    """

    expr: Expr
    loads: tuple[PushedLoad, ...]
    stores: tuple[PushedStore, ...]
    walks: tuple[View, ...]


Box = tuple[tuple[int, int], ...]
"""A part of a node's index space: start and length along each dim."""


def push_views(expr: Expr, layouts: Sequence[NodeLayout], outputs: Sequence[tuple[int, int, NodeLayout]]) -> PushedExpr:
    """Push the views of ``expr`` down to its loads and its concatenations up to its results.

    ``layouts`` has each node's shape, and strides where it is a load; ``outputs`` are (node, output, layout of the output's tensor).
    Raises ``LayoutError`` where a view of a computed value is none of its operands.
    """
    pusher = _Pusher(expr, layouts)
    stores = []
    for node, output, layout in outputs:
        whole = View(layout.shape, layout.strides)
        for box, steps in pusher.parts(node):
            stores.append(PushedStore(pusher.build(node, box, steps), output, apply_views(steps, _narrowed(whole, box))))
    loads = tuple(node for node in pusher.nodes if isinstance(node, Load))
    pushed = Expr(expr.name, loads, tuple(pusher.nodes), tuple(store.node for store in stores))
    return PushedExpr(pushed, tuple(pusher.loads), tuple(stores), tuple(pusher.walks))


_Part = tuple[int, Box, tuple[ViewStep, ...], int]
"""A box of a node, viewed by steps, and the rank that whoever uses it in the expression sees: promotion depends on it."""


class _Cut(Exception):
    """A part that lies in several operands of a concatenation, and the steps that make parts of it which lie in fewer.

    Their dims count from the last, -1.
    """

    def __init__(self, steps: list[ViewStep]) -> None:
        self.steps = steps


class _Pusher:
    """The pushed nodes met so far. Equal nodes are one node, equal views of an operand one load."""

    def __init__(self, expr: Expr, layouts: Sequence[NodeLayout]) -> None:
        self._expr, self._layouts = expr, layouts
        self.nodes: list[Node] = []
        self.loads: list[PushedLoad] = []
        self.walks: dict[View, int] = {}
        self._numbers: dict[object, int] = {}
        self._built: dict[_Part, int] = {}
        self._positions: dict[PushedLoad, int] = {}
        self._edges: list[dict[int, set[int]]] = []
        self._viewed_joins: set[int] = set()  # nodes that are made of views of concatenations
        for number in range(len(expr.nodes)):
            self._edges.append(self._cut(number))

    def parts(self, node: int) -> list[tuple[Box, tuple[ViewStep, ...]]]:
        """The parts of ``node`` within each of which every concatenation gives one of its operands: boxes, and views of them."""
        if node not in self._viewed_joins:
            return [(box, ()) for box in self._boxes(node)]
        shape = self._layouts[node].shape
        whole = tuple((0, size) for size in shape)
        found: list[tuple[Box, tuple[ViewStep, ...]]] = []
        pending: list[tuple[tuple[ViewStep, ...], View]] = [((), View(shape, contiguous_strides(shape)))]
        while pending:
            steps, view = pending.pop(0)
            if 0 in view.shape:
                continue
            cuts = self._find_cuts(node, whole, steps)
            if not cuts:
                found.append((whole, steps))
            for cut in reversed(cuts):
                step = cut._replace(args=(cut.args[0] + len(view.shape), *cut.args[1:]))
                pending.insert(0, ((*steps, step), apply_views((step,), view)))
        return found

    def _find_cuts(self, node: int, box: Box, steps: tuple[ViewStep, ...]) -> list[ViewStep]:
        """How to cut a part of ``node`` that some concatenation does not give one operand of; nothing where all do."""
        wanted: _Part = (node, box, steps, len(box))
        seen, pending = {wanted}, [wanted]
        while pending:
            try:
                needs, _ = self._step(*pending.pop())
            except _Cut as cut:
                return cut.steps
            pending += [need for need in needs if need not in seen]
            seen.update(needs)
        return []

    def _boxes(self, node: int) -> list[Box]:
        """The boxes of a node of which no concatenation has been viewed."""
        shape, edges = self._layouts[node].shape, self._edges[node]
        spans = [list(itertools.pairwise(sorted({0, size, *edges.get(dim - len(shape), ())}))) for dim, size in enumerate(shape)]
        spans = [pairs or [(0, 0)] for pairs in spans]
        return [tuple((start, stop - start) for start, stop in corner) for corner in itertools.product(*spans)]

    def _cut(self, number: int) -> dict[int, set[int]]:
        """Where concatenations meet along each dim of a node, counted from the last dim (-1); those of earlier nodes are known."""
        node, rank = self._expr.nodes[number], len(self._layouts[number].shape)
        operands = node.operands if isinstance(node, Apply | Joined) else (node.operand,) if isinstance(node, Cast | Viewed) else ()
        if any(n in self._viewed_joins or (isinstance(node, Viewed) and self._edges[n]) for n in operands):
            self._viewed_joins.add(number)
        edges: dict[int, set[int]] = {}
        if isinstance(node, Joined):
            start = 0
            for operand in node.operands:
                for dim, found in self._edges[operand].items():
                    edges.setdefault(dim, set()).update(found if dim != node.dim - rank else {start + edge for edge in found})
                edges.setdefault(node.dim - rank, set()).add(start)
                start += self._layouts[operand].shape[node.dim]
        elif isinstance(node, Apply | Cast):
            for operand in operands:
                for dim, found in self._edges[operand].items():
                    edges.setdefault(dim, set()).update(found)
        return edges

    def build(self, number: int, box: Box, steps: tuple[ViewStep, ...] = ()) -> int:
        """The pushed node for ``box`` of node ``number``, viewed by ``steps``. A stack of its own: expressions are deeper than Python's."""
        wanted: _Part = (number, box, steps, len(box))
        stack: list[tuple[_Part, list[_Part], Callable[[list[int]], int]]] = [(wanted, *self._step(*wanted))]
        while stack:
            part, needs, finish = stack[-1]
            missing = next((need for need in needs if need not in self._built), None)
            if missing is not None:
                stack.append((missing, *self._step(*missing)))
            else:
                self._built[part] = finish([self._built[need] for need in needs])
                stack.pop()
        return self._built[wanted]

    def _step(self, number: int, box: Box, after: tuple[ViewStep, ...], rank: int) -> tuple[list[_Part], Callable[[list[int]], int]]:
        """The parts that a part is made of, and how it is made of them."""
        node = self._expr.nodes[number]
        match node:
            case Load():
                view = apply_views(after, _narrowed(View(self._layouts[number].shape, self._layouts[number].strides), box))
                return [], lambda _: self._load(node, view, rank)
            case Coordinate() | Draw():
                shape = self._layouts[number].shape
                along = (0,) * len(shape) if isinstance(node, Coordinate) and node.dim is not None else contiguous_strides(shape)
                if isinstance(node, Coordinate) and node.dim is not None:
                    along = (*along[: node.dim], 1, *along[node.dim + 1 :])
                walked = apply_views(after, _narrowed(View(shape, along), box))
                return [], lambda _: self._position(node if isinstance(node, Draw) else None, walked, rank)
            case Viewed():
                whole = tuple((0, size) for size in self._layouts[node.operand].shape)
                narrows = tuple(ViewStep("narrow", (dim, start, length)) for dim, (start, length) in enumerate(box))
                return [(node.operand, whole, (*node.steps, *narrows, *after), rank)], _only
            case Joined() if after:
                return [self._routed(number, node, box, after, rank)], _only
            case Joined():
                start, length = box[node.dim]
                if not length:  # no elements: any operand gives them
                    return [(node.operands[0], (*box[: node.dim], (0, 0), *box[node.dim + 1 :]), after, rank)], _only
                for operand in node.operands:
                    size = self._layouts[operand].shape[node.dim]
                    if 0 <= start <= start + length <= size:
                        return [(operand, (*box[: node.dim], (start, length), *box[node.dim + 1 :]), after, rank)], _only
                    start -= size
                return [self._routed(number, node, box, after, rank)], _only
            case Cast():
                return [(node.operand, box, after, rank)], lambda built: self._add(replace(node, operand=built[0], ndim=rank))
            case Apply():
                parts = [self._operand(operand, number, box, after) for operand in node.operands]
                return parts, lambda built: self._add(replace(node, operands=tuple(built), ndim=rank))
            case _:
                return [], lambda _: self._add(node)

    def _routed(self, number: int, node: Joined, box: Box, after: tuple[ViewStep, ...], rank: int) -> _Part:
        """The one operand of a concatenation that a part lies in, viewed as the part is. Raises ``_Cut`` where it lies in several."""
        shape, strides = self._layouts[number].shape, contiguous_strides(self._layouts[number].shape)
        view = apply_views(after, _narrowed(View(shape, strides), box))  # of the elements' row-major numbers
        origin, rest = [], view.offset
        for stride in strides:
            coordinate, rest = divmod(rest, stride)
            origin.append(coordinate)
        last, walkers = [*origin], [[] for _ in shape]  # type: tuple[list[int], list[list[tuple[int, int, int]]]]
        for at, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
            if size == 1 or stride == 0:
                continue
            dim = next(d for d, along in enumerate(strides) if shape[d] > 1 and along <= stride)
            step, aslant = divmod(stride, strides[dim])
            if aslant:  # along two dims at once
                raise _refusal(node)
            if last[dim] + (size - 1) * step >= shape[dim]:  # on into the dim outside
                inner = shape[dim] // step
                if origin[dim] >= step or shape[dim] % step or inner < 2 or size % inner:
                    raise _refusal(node)
                raise _Cut([ViewStep("unflatten", (at - len(view.shape), (size // inner, inner)))])
            last[dim] += (size - 1) * step
            walkers[dim].append((at, size, step))
        start = 0
        for operand in node.operands:
            end = start + self._layouts[operand].shape[node.dim]
            if start <= origin[node.dim] < end:
                break
            start = end
        if last[node.dim] >= end:
            raise self._cut_at(end - origin[node.dim], node, walkers[node.dim], len(view.shape))
        origin[node.dim] -= start
        whole = tuple((0, size) for size in self._layouts[operand].shape)
        return operand, whole, _walk_steps(node, origin, walkers, view.shape), rank

    def _cut_at(self, distance: int, node: Joined, walkers: list[tuple[int, int, int]], rank: int) -> _Cut:
        """Cut the dim that walks the concatenation fastest outwards, where it has gone ``distance`` along it."""
        at, size, step = max(walkers, key=lambda walker: walker[2])
        if len(walkers) > 1 and distance % step:
            raise _refusal(node)
        length = -(-distance // step)
        return _Cut([ViewStep("narrow", (at - rank, 0, length)), ViewStep("narrow", (at - rank, length, size - length))])

    def _operand(self, number: int, result: int, box: Box, after: tuple[ViewStep, ...]) -> _Part:
        """An operand's part that ``box`` of the result needs, stretched to it where views follow."""
        if isinstance(self._expr.nodes[number], Const | Number):
            return number, (), (), 0
        shape, full = self._layouts[number].shape, self._layouts[result].shape
        skip = len(full) - len(shape)
        own = tuple(span if size == full[skip + dim] else (0, size) for dim, (span, size) in enumerate(zip(box[skip:], shape, strict=True)))
        lengths = tuple(length for _, length in box)
        if after and lengths != tuple(length for _, length in own):
            after = (ViewStep("expand", lengths), *after)
        return number, own, after, len(shape)

    def _position(self, draw: Draw | None, view: View, rank: int) -> int:
        # strides of size 1 never count, and would tell equal walks apart
        strides = tuple(stride if size > 1 else 0 for size, stride in zip(view.shape, view.strides, strict=True))
        walk = self.walks.setdefault(view._replace(strides=strides), len(self.walks))
        return self._add(Position(walk, rank, draw))

    def _load(self, node: Load, view: View, rank: int) -> int:
        load = PushedLoad(node.operand, view)
        position = self._positions.setdefault(load, len(self.loads))
        if position == len(self.loads):
            self.loads.append(load)
        return self._add(replace(node, operand=position, ndim=rank))

    def _add(self, node: Node) -> int:
        key = (node, repr(node)) if isinstance(node, Const | Number) else node
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self.nodes)
            self.nodes.append(node)
        return number


def _walk_steps(node: Joined, origin: list[int], walkers: list[list[tuple[int, int, int]]], shape: tuple[int, ...]) -> tuple[ViewStep, ...]:
    """The views that walk a tensor from ``origin`` on, where each of its dims has the ``walkers`` (dim of the result, size, step)."""
    steps, sizes, order = [], [], []
    for dim, (start, found) in enumerate(zip(origin, walkers, strict=True)):
        nested = sorted(found, key=lambda walker: -walker[2])
        for (_, _, outer), (_, size, inner) in itertools.pairwise(nested):
            if outer != size * inner:
                raise _refusal(node)
        step = nested[-1][2] if nested else 1
        length = math.prod(size for _, size, _ in nested)
        steps.append(ViewStep("slice", (dim, start, start + (length - 1) * step + 1, step)))
        sizes += [size for _, size, _ in nested]
        order += [at for at, _, _ in nested]
    steps.append(ViewStep("reshape", tuple(sizes)))
    steps.append(ViewStep("permute", tuple(sorted(range(len(order)), key=order.__getitem__))))
    steps.append(ViewStep("reshape", tuple(size if at in order else 1 for at, size in enumerate(shape))))
    return (*steps, ViewStep("expand", shape))


def _refusal(node: Joined) -> LayoutError:
    return LayoutError(f"a view of a concatenation{f' (at {node.at})' if node.at else ''} cannot be fused. Take the view of its parts.")


def _narrowed(view: View, box: Box) -> View:
    for dim, (start, length) in enumerate(box):
        view = narrowed(view, dim, start, length)
    return view


def _only(built: list[int]) -> int:
    return built[0]
