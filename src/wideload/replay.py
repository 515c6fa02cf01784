"""Turns an expression and its operands' layouts into the shape and strides that eager PyTorch gives each node.

Eager allocates one tensor an op, so its rule is replayed op by op; one iterator over all inputs is wrong for 3 % of random
functions. Plain integers: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wideload.errors import LayoutError
from wideload.expr import Apply, Cast, Const, Expr, Joined, Load, Number, Viewed
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
from wideload.views import View, apply_views

__all__ = ["NodeLayout", "replay_layout"]


@dataclass(frozen=True)
class NodeLayout:
    """Shape and strides, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


_NUMBER = NodeLayout((), ())
_OPERANDS = ("input", "other", "condition")
"""What the table calls the operands that torch iterates over even where they are numbers, as 0-dim tensors; others are parameters then."""


def replay_layout(expr: Expr, operands: Sequence[NodeLayout], device_type: str) -> tuple[NodeLayout, ...]:
    """The layout of every node of ``expr`` on ``device_type``. Raises ``LayoutError`` where shapes do not broadcast.

    On the CPU an operand of another dtype than the op computes in is first copied by ``.to``, which may change its strides;
    on CUDA only ``torch.where`` does so.
    """
    layouts: list[NodeLayout] = []
    targets = dict(expr.same_shapes)
    for number, node in enumerate(expr.nodes):
        match node:
            case Load():
                layouts.append(operands[node.operand])
            case Viewed():
                source = layouts[node.operand]
                view = apply_views(node.steps, View(source.shape, source.strides))
                layouts.append(NodeLayout(view.shape, view.strides))
            case Joined():
                layouts.append(_joined([layouts[number] for number in node.operands], node.dim))
            case Cast():
                source = layouts[node.operand]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply() if node.op.is_alias:
                layouts.append(layouts[node.operands[0]])
            case Apply() if node.op.makes_contiguous:
                sources = [layouts[number] for number in node.operands]
                shape = broadcast_shapes(*(source.shape for source in sources))
                keeps = node.op.keeps_format and is_row_major(shape, sources[0].strides)
                layouts.append(sources[0] if keeps else NodeLayout(shape, contiguous_strides(shape)))
            case Apply() if node.op.keeps_format:
                source = layouts[node.operands[0]]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply():
                sources = [layouts[number] for number in node.operands]
                if device_type == "cpu" or node.op.converts_first:
                    sources = [_converted(layout, *at) for layout, at in zip(sources, _conversions(expr, node), strict=True)]
                iterated = zip(sources, node.operands, node.op.operands, strict=True)
                sources = [
                    source for source, number, name in iterated if name in _OPERANDS or not isinstance(expr.nodes[number], Const | Number)
                ]
                shape = broadcast_shapes(*(source.shape for source in sources))
                layouts.append(NodeLayout(shape, iterator_strides(shape, [(source.shape, source.strides) for source in sources])))
            case _:
                layouts.append(_NUMBER)
        if number in targets:
            have, room = layouts[number], layouts[targets[number]]
            if have.shape != room.shape:
                raise LayoutError(
                    f"an in-place result has shape {have.shape}, the tensor it is stored in {room.shape}. Use the out-of-place form."
                )
            layouts[number] = room
    return tuple(layouts)


def _joined(parts: Sequence[NodeLayout], dim: int) -> NodeLayout:
    """What ``torch.cat`` makes: a new tensor in row-major order, or channels last where all parts are."""
    size = sum(part.shape[dim] for part in parts)
    shapes = {(*part.shape[:dim], size, *part.shape[dim + 1 :]) for part in parts}
    if len(shapes) > 1:
        raise LayoutError(f"cat of shapes {', '.join(str(part.shape) for part in parts)} along dim {dim}: the other sizes must be equal")
    shape = shapes.pop()
    is_channels_last = all(has_channels_last(part.shape, part.strides) for part in parts)
    return NodeLayout(shape, channels_last_strides(shape) if is_channels_last else contiguous_strides(shape))


def _conversions(expr: Expr, node: Apply) -> list[tuple[torch.dtype | None, torch.dtype | None]]:
    """The dtype that each operand has and the one it is brought to; None for a number."""
    nodes = [expr.nodes[number] for number in node.operands]
    have = [operand.dtype if isinstance(operand, Load | Apply | Cast | Viewed | Joined) else None for operand in nodes]
    wanted = operand_dtypes(expr.nodes, node)
    return [(h, None if mark == "bool" else w) for h, w, mark in zip(have, wanted, node.op.types, strict=True)]


def _converted(layout: NodeLayout, have: torch.dtype | None, wanted: torch.dtype | None) -> NodeLayout:
    if have is None or wanted is None or have == wanted:
        return layout
    return NodeLayout(layout.shape, like_strides(layout.shape, layout.strides))
