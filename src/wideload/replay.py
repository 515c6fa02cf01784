"""Turns an expression and its operands' layouts into the shape and strides that eager PyTorch gives each node.

Eager allocates one tensor an op, so its rule is replayed op by op; one iterator over all inputs is wrong for 3 % of random
functions. Plain integers: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from wideload.errors import LayoutError
from wideload.expr import Apply, Cast, Const, Coordinate, Draw, Expr, Joined, Load, Node, Number, Viewed, is_part, is_view_of_operand
from wideload.layout import (
    broadcast_shapes,
    channels_last_strides,
    contiguous_strides,
    has_channels_last,
    is_row_major,
    iterator_strides,
    like_strides,
)
from wideload.promotion import operand_dtypes
from wideload.views import View, ViewStep, apply_views

__all__ = ["NodeLayout", "replay_layout"]


class NodeLayout(NamedTuple):
    """Shape and strides, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


_NUMBER = NodeLayout((), ())
_OPERANDS = ("input", "other", "condition", "n")
"""What the table calls the operands that torch iterates over even where they are numbers, as 0-dim tensors; others are parameters then."""


def replay_layout(expr: Expr, operands: Sequence[NodeLayout], device_type: str) -> tuple[NodeLayout, ...]:
    """The layout of every node of ``expr`` on ``device_type``. Raises ``LayoutError`` for shapes that do not fit.

    On the CPU an operand of another dtype than the op computes in is first copied by ``.to``, which may change its strides;
    on CUDA only ``torch.where`` does so. Coordinates and what is computed of them alone lie nowhere: their strides are 0, and they
    have no say in those of others.
    """
    layouts: list[NodeLayout] = []
    placeless: set[int] = set()
    targets = dict(expr.same_shapes)
    for number, node in enumerate(expr.nodes):
        match node:
            case _ if _is_placeless(expr, node, placeless):
                placeless.add(number)
                layouts.append(_placeless(node, layouts))
            case Load():
                layouts.append(operands[node.operand])
            case Viewed():
                source = layouts[node.operand]
                view = apply_views(node.steps, View(source.shape, source.strides))
                layouts.append(NodeLayout(view.shape, view.strides))
            case Joined():
                join = _stacked if node.is_stack else _joined
                layouts.append(join([layouts[number] for number in node.operands], node.dim))
            case Cast() | Draw():
                source = layouts[node.operand if isinstance(node, Cast) else node.like]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply() if is_part(expr, number) and is_view_of_operand(expr, number):
                source = layouts[node.operands[0]]
                layouts.append(NodeLayout(source.shape, tuple(2 * stride for stride in source.strides)))
            case Apply() if node.op.is_alias:
                layouts.append(layouts[node.operands[0]])
            case Apply() if node.op.makes_contiguous:
                sources = [layouts[number] for number in node.operands]
                shape = broadcast_shapes(*(source.shape for source in sources))
                keeps = node.op.keeps_format and is_row_major(shape, sources[0].strides)
                layouts.append(sources[0] if keeps else NodeLayout(shape, contiguous_strides(shape)))
            case Apply() if node.op.makes_channels_last:
                source = layouts[node.operands[0]]
                keeps = node.op.keeps_format and is_row_major(*(_channels_behind(x) for x in (source.shape, source.strides)))
                layouts.append(source if keeps else NodeLayout(source.shape, channels_last_strides(source.shape)))
            case Apply() if node.op.keeps_format:
                source = layouts[node.operands[0]]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply():
                sources = [layouts[number] for number in node.operands]
                if device_type == "cpu" or node.op.converts_first:
                    sources = [_converted(layout, *at) for layout, at in zip(sources, _conversions(expr, node), strict=True)]
                iterated = [
                    (source, operand)
                    for source, operand, name in zip(sources, node.operands, node.op.operands, strict=True)
                    if name in _OPERANDS or not isinstance(expr.nodes[operand], Const | Number)
                ]
                shape = broadcast_shapes(*(source.shape for source, _ in iterated))
                placed = [(source.shape, source.strides) for source, operand in iterated if operand not in placeless]
                layouts.append(NodeLayout(shape, iterator_strides(shape, placed)))
            case _:
                layouts.append(_NUMBER)
        if number in targets:
            have, room = layouts[number], layouts[targets[number]]
            if have.shape != room.shape:
                raise LayoutError(
                    f"an in-place result has shape {have.shape}, the tensor it is stored in {room.shape}. Use the out-of-place form."
                )
            layouts[number] = room
    for number, like in expr.alike:
        if layouts[number].shape != layouts[like].shape:
            raise LayoutError(f"a value has shape {layouts[number].shape}, and must have {layouts[like].shape}, that of another.")
    return tuple(layouts)


def _channels_behind(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """With the second behind the others, the order of ``torch.channels_last``."""
    return (sizes[0], *sizes[2:], sizes[1])


def _is_placeless(expr: Expr, node: Node, placeless: set[int]) -> bool:
    """Whether a node is a coordinate or computed of coordinates and numbers alone."""
    if isinstance(node, Apply):
        return any(n in placeless for n in node.operands) and all(
            n in placeless or isinstance(expr.nodes[n], Const | Number) for n in node.operands
        )
    return isinstance(node, Coordinate) or (isinstance(node, Cast) and node.operand in placeless)


def _placeless(node: Node, layouts: Sequence[NodeLayout]) -> NodeLayout:
    """The layout of such a node. A coordinate along one dim has size 1 along the others."""
    if isinstance(node, Coordinate):
        shape = broadcast_shapes(*(layouts[number].shape for number in node.like))
        if node.dim is not None:
            shape = tuple(size if dim == node.dim else 1 for dim, size in enumerate(shape))
    else:
        assert isinstance(node, Apply | Cast)
        operands = node.operands if isinstance(node, Apply) else (node.operand,)
        shape = broadcast_shapes(*(layouts[number].shape for number in operands))
    return NodeLayout(shape, (0,) * len(shape))


def _joined(parts: Sequence[NodeLayout], dim: int) -> NodeLayout:
    """What ``torch.cat`` makes: a new tensor in row-major order, or channels last where all parts are."""
    size = sum(part.shape[dim] for part in parts)
    shape, *others = ((*part.shape[:dim], size, *part.shape[dim + 1 :]) for part in parts)
    if any(other != shape for other in others):
        raise LayoutError(f"cat of shapes {', '.join(str(part.shape) for part in parts)} along dim {dim}: the other sizes must be equal")
    is_channels_last = all(has_channels_last(part.shape, part.strides) for part in parts)
    return NodeLayout(shape, channels_last_strides(shape) if is_channels_last else contiguous_strides(shape))


def _stacked(parts: Sequence[NodeLayout], dim: int) -> NodeLayout:
    """What ``torch.stack`` makes of parts of size 1 along ``dim``: without that dim concatenated along the next, and split again."""
    if dim == len(parts[0].shape) - 1:
        return _joined(parts, dim)
    shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim + 1 :])
    whole = _joined([NodeLayout(*((*of[:dim], *of[dim + 1 :]) for of in (part.shape, part.strides))) for part in parts], dim)
    view = apply_views((ViewStep("reshape", shape),), View(whole.shape, whole.strides))
    return NodeLayout(view.shape, view.strides)


def _conversions(expr: Expr, node: Apply) -> list[tuple[torch.dtype | None, torch.dtype | None]]:
    """The dtype that each operand has and the one it is brought to; None for a number."""
    nodes = [expr.nodes[number] for number in node.operands]
    have = [operand.dtype if not isinstance(operand, Const | Number) else None for operand in nodes]
    wanted = operand_dtypes(expr.nodes, node)
    return [(h, None if mark == "bool" else w) for h, w, mark in zip(have, wanted, node.op.types, strict=True)]


def _converted(layout: NodeLayout, have: torch.dtype | None, wanted: torch.dtype | None) -> NodeLayout:
    if have is None or wanted is None or have == wanted:
        return layout
    return NodeLayout(layout.shape, like_strides(layout.shape, layout.strides))
