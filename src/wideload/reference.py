"""Computes an expression with torch's own operators: the definition of every op, and the path of CPU tensors.

``numerics="fused"`` keeps halves in fp32 between ops and rounds each result once; ``"eager"`` runs torch as it is. Runs on any
device that torch has; knows nothing of kernels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wideload.autocast import without_autocast
from wideload.dtypes import widened
from wideload.errors import LayoutError
from wideload.expr import (
    Apply,
    Cast,
    Const,
    Coordinate,
    Draw,
    Expr,
    Joined,
    Load,
    Number,
    Numerics,
    Position,
    Reduced,
    Viewed,
    evaluate_host,
    is_view_of_operand,
    number_of_kind,
)
from wideload.layout import broadcast_shapes
from wideload.random import draw_integers, draw_seed
from wideload.views import View, ViewStep, apply_views

__all__ = ["evaluate_expr", "with_seed"]


@without_autocast()
def evaluate_expr(
    expr: Expr,
    outputs: Sequence[int],
    tensors: Sequence[torch.Tensor],
    scalars: tuple[Any, ...],
    *,
    numerics: Numerics,
    differentiable: bool = False,
) -> list[torch.Tensor]:
    """The tensors that nodes ``outputs`` stand for, each in its own dtype and shape.

    With ``differentiable`` torch's autograd records the computation, by torch's own formulas.
    """
    fused = numerics == "fused"
    needed = _needed(expr, outputs)
    values: list[Any] = [None] * len(expr.nodes)
    view = _recorded_view if differentiable else _viewed
    for number, node in enumerate(expr.nodes):
        if number not in needed:
            continue
        value: Any
        match node:
            case Load():
                value = tensors[node.operand]
            case Number():
                value = number_of_kind(node.value, node.kind, evaluate_host(node.value, scalars))
            case Const():
                value = node.value
            case Viewed():
                value = view(values[node.operand], node.steps)
            case Joined():
                value = torch.cat([values[operand].to(_computed(node.dtype, fused)) for operand in node.operands], node.dim)
            case Coordinate():
                value = _coordinate(node, [values[number] for number in node.like])
            case Draw():
                value = draw_integers(tensors[-1], node.stream, node.bits, values[node.like].shape)
            case Position():
                raise AssertionError("the reference computes expressions whose views have not been pushed")
            case Cast():
                value = values[node.operand].to(node.dtype)
            case Reduced():
                source = expr.nodes[node.operand]
                assert not isinstance(source, Const | Number)
                value = node.reduction.of(values[node.operand], source.dtype)
            case Apply():
                op = node.op
                run = op.reference if fused and op.reference is not None and not differentiable else op.torch
                value = run(*(values[operand] for operand in node.operands))
        if fused and isinstance(value, torch.Tensor):
            value = value.to(widened(value.dtype))
        values[number] = value
    results: list[torch.Tensor] = []
    for position, number in enumerate(outputs):
        result = _result(expr, number, tensors, values, view)
        is_shared = number in outputs[:position] and not is_view_of_operand(expr, number)
        results.append(result.clone() if is_shared else result)  # equal steps are computed once, and are two tensors from eager
    return results


def with_seed(expr: Expr, tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors of one call; where the expression draws, a new seed behind them."""
    return [*tensors, draw_seed(device)] if expr.has_draws else tensors


def _coordinate(node: Coordinate, like: Sequence[torch.Tensor]) -> torch.Tensor:
    shape = broadcast_shapes(*(tuple(tensor.shape) for tensor in like))
    device = max(like, key=lambda tensor: tensor.ndim).device  # a 0-dim CPU tensor may stand beside others
    if node.dim is None:
        return torch.arange(math.prod(shape), device=device).view(shape)
    ones = (1,) * len(shape)
    return torch.arange(shape[node.dim], device=device).view(*ones[: node.dim], -1, *ones[node.dim + 1 :])


def _computed(dtype: torch.dtype, fused: bool) -> torch.dtype:
    return widened(dtype) if fused else dtype


def _viewed(tensor: torch.Tensor, steps: tuple[ViewStep, ...]) -> torch.Tensor:
    try:
        view = apply_views(steps, View(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())))
    except LayoutError:
        if tensor.is_contiguous():
            raise
        return _viewed(tensor.contiguous(), steps)  # eager's tensor may have other strides; they have been looked at before
    return tensor.as_strided(view.shape, view.strides, view.offset)


def _recorded_view(tensor: torch.Tensor, steps: tuple[ViewStep, ...]) -> torch.Tensor:
    """By torch's own views: the gradient of ``as_strided`` takes an expanded tensor for the memory that it lies in."""
    return functools.reduce(lambda viewed, step: _RECORDED_VIEWS[step.name](viewed, *step.args), steps, tensor)


_RECORDED_VIEWS: dict[str, Callable[..., torch.Tensor]] = {
    "chunk": lambda tensor, chunks, dim, piece: tensor.chunk(chunks, dim)[piece],
    "diagonal": torch.Tensor.diagonal,
    "expand": torch.Tensor.expand,
    "flatten": torch.Tensor.flatten,
    "narrow": torch.Tensor.narrow,
    "permute": lambda tensor, *dims: tensor.permute(dims),
    "ravel": torch.Tensor.ravel,
    "reshape": lambda tensor, *sizes: tensor.reshape(sizes),
    "select": torch.Tensor.select,
    "slice": lambda tensor, dim, start, stop, step: tensor[(slice(None),) * dim + (slice(start, stop, step),)],
    "split": lambda tensor, split_size, dim, piece: tensor.split(split_size, dim)[piece],
    "split_with_sizes": lambda tensor, sizes, dim, piece: tensor.split(sizes, dim)[piece],
    "squeeze": lambda tensor, *dims: tensor.squeeze(dims),
    "tensor_split": lambda tensor, sections, dim, piece: tensor.tensor_split(sections, dim)[piece],
    "unflatten": torch.Tensor.unflatten,
    "unfold": torch.Tensor.unfold,
    "unsqueeze": torch.Tensor.unsqueeze,
}
"""The steps as torch's own views, which autograd records."""


_Viewing = Callable[[torch.Tensor, tuple[ViewStep, ...]], torch.Tensor]


def _result(expr: Expr, number: int, tensors: Sequence[torch.Tensor], values: Sequence[Any], view: _Viewing) -> torch.Tensor:
    """The tensor of a node in its own dtype. A view is one of a tensor of that dtype: a widened half's would be a copy of it, and dense."""
    node = expr.nodes[number]
    assert not isinstance(node, Const | Number)
    match node:
        case Load():
            return tensors[node.operand]
        case Viewed():
            return view(_result(expr, node.operand, tensors, values, view), node.steps)
        case Apply(op) if op.is_alias or op.may_be_operand:
            aliased: torch.Tensor = op.torch(_result(expr, node.operands[0], tensors, values, view))
            return aliased
    result: torch.Tensor = values[number].to(node.dtype)
    if node.dtype == torch.bool and any(operand.dtype == torch.bool for operand in expr.operands):
        return torch.ne(result, False)  # torch.where and torch.cat copy an operand's bytes, which may be others than 0 and 1
    return result


def _needed(expr: Expr, outputs: Sequence[int]) -> set[int]:
    needed = set(outputs)
    for number in reversed(range(len(expr.nodes))):
        node = expr.nodes[number]
        if number in needed and isinstance(node, Apply | Joined):
            needed.update(node.operands)
        elif number in needed and isinstance(node, Cast | Viewed | Reduced):
            needed.add(node.operand)
        elif number in needed and isinstance(node, Coordinate):
            needed.update(node.like)
        elif number in needed and isinstance(node, Draw):
            needed.add(node.like)
    return needed
