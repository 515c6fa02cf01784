"""Turns an expression and its operands' layouts into the shape and strides that eager PyTorch gives each node.

Eager allocates one tensor an op, so its rule is replayed op by op; one iterator over all inputs is wrong for 3 % of random
functions. Plain integers: no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wideload.expr import Apply, Cast, Expr, Load
from wideload.layout import broadcast_shapes, iterator_strides, like_strides

__all__ = ["NodeLayout", "replay_layout"]


@dataclass(frozen=True)
class NodeLayout:
    """Shape and strides, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


_NUMBER = NodeLayout((), ())


def replay_layout(expr: Expr, operands: Sequence[NodeLayout]) -> tuple[NodeLayout, ...]:
    """The layout of every node of ``expr``. Raises ``LayoutError`` where shapes do not broadcast."""
    layouts: list[NodeLayout] = []
    for node in expr.nodes:
        match node:
            case Load():
                layouts.append(operands[node.operand])
            case Cast():
                source = layouts[node.operand]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply() if node.op.keeps_format:
                source = layouts[node.operands[0]]
                layouts.append(NodeLayout(source.shape, like_strides(source.shape, source.strides)))
            case Apply():
                sources = [layouts[number] for number in node.operands]
                shape = broadcast_shapes(*(source.shape for source in sources))
                layouts.append(NodeLayout(shape, iterator_strides(shape, [(source.shape, source.strides) for source in sources])))
            case _:
                layouts.append(_NUMBER)
    return tuple(layouts)
