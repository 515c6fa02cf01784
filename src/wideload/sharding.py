"""Turns a call of ``DTensor``s into a call of their parts on this device, whose results are parts of ``DTensor``s again.

Knows how an elementwise expression may be computed part by part, and what gradients parts have; never how a part is computed.

A dim of the mesh is looked at by itself. Where it shards a dim of an operand, all operands are brought to that sharding, but those that
are broadcast along the dim, which stay whole: their gradients are sums over the parts (``Partial``). Where it shards nothing, sums that are
pending (``Partial``) stay so under an expression that is linear in them, and are done before any other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from wideload.errors import GradError, LayoutError
from wideload.expr import Apply, Cast, Coordinate, Draw, Expr, Joined, Load, Reduced, Viewed, is_reduced, is_view_of_operand
from wideload.layout import broadcast_shapes
from wideload.random import draw_seed
from wideload.replay import NodeLayout
from wideload.structure import map_structure
from wideload.trace import TensorResult, Traced

if TYPE_CHECKING:
    from wideload.fused import FusedFunction

__all__ = ["ShardedCall", "Sharding", "find_sharded_call", "find_sharding", "is_linear"]

Placements = tuple[Any, ...]
"""How a tensor lies on a mesh: a ``torch.distributed.tensor.Placement`` for each dim of the mesh."""


# ---- the rule


@dataclass(frozen=True)
class Operand:
    """Shape and placements of an operand; of a number in a 0-dim tensor, which is no ``DTensor``, no placements."""

    shape: tuple[int, ...]
    placements: Placements | None


@dataclass(frozen=True)
class Sharding:
    """The placements that ``operands`` are brought to, those that their gradients have then, and those of all results."""

    operands: tuple[Placements, ...]
    grads: tuple[Placements, ...]
    results: Placements


def find_sharding(
    expr: Expr,
    operands: Sequence[Operand],
    shape: tuple[int, ...],
    num_mesh_dims: int,
    *,
    unsplit: frozenset[int] = frozenset(),
    wanted: Placements | None = None,
) -> Sharding | None:
    """How to compute ``expr`` part by part, where all results have the shape ``shape``, to which ``operands`` broadcast.

    Dims ``unsplit`` of the results have to stay whole. ``wanted`` are the placements that results must have (``out=``); None if
    they cannot.
    """
    along = [
        _along(expr, operands, shape, mesh_dim, unsplit, None if wanted is None else wanted[mesh_dim]) for mesh_dim in range(num_mesh_dims)
    ]
    found = [way for way in along if way is not None]
    if len(found) < num_mesh_dims:
        return None
    brought = tuple(tuple(way.operands[at] for way in found) for at in range(len(operands)))
    grads = tuple(tuple(way.grads[at] for way in found) for at in range(len(operands)))
    return Sharding(brought, grads, tuple(way.result for way in found))


@dataclass(frozen=True)
class _Way:
    """One dim of the mesh: the placement there of each operand, of its gradient, and of the results."""

    operands: tuple[Any, ...]
    grads: tuple[Any, ...]
    result: Any


def _along(
    expr: Expr, operands: Sequence[Operand], shape: tuple[int, ...], mesh_dim: int, unsplit: frozenset[int], wanted: Any
) -> _Way | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    given: list[Any] = [Replicate() if operand.placements is None else operand.placements[mesh_dim] for operand in operands]

    def own_dim(operand: Operand, dim: int) -> int | None:
        """Which of the operand's dims is ``dim`` of the results; None if it is broadcast along that."""
        own = dim - len(shape) + len(operand.shape)
        return own if own >= 0 and operand.shape[own] == shape[dim] else None

    def common_dim(operand: Operand, placement: Any) -> int | None:
        """Which dim of the results the operand's shards are shards of; None if of none, or if it has to stay whole."""
        if not isinstance(placement, Shard):
            return None
        own = placement.dim % len(operand.shape)
        dim = own + len(shape) - len(operand.shape)
        return dim if operand.shape[own] == shape[dim] and dim not in unsplit else None

    if wanted is None:
        found = [(common_dim(*pair), math.prod(pair[0].shape)) for pair in zip(operands, given, strict=True)]
        dim = max(((numel, -dim) for dim, numel in found if dim is not None), default=None)
        chosen = None if dim is None else -dim[1]
    else:
        chosen = wanted.dim % len(shape) if isinstance(wanted, Shard) else None
        if chosen in unsplit:
            return None
    if chosen is not None:
        own = [own_dim(operand, chosen) for operand in operands]
        return _Way(
            tuple(Replicate() if dim is None else Shard(dim) for dim in own),
            tuple(Partial() if dim is None else Shard(dim) for dim in own),
            Shard(chosen),
        )
    pending = frozenset(at for at, placement in enumerate(given) if isinstance(placement, Partial))
    kinds = {given[at].reduce_op for at in pending}
    if not isinstance(wanted, Replicate) and kinds in ({"sum"}, {"avg"}) and is_linear(expr, pending):
        result = given[min(pending)]
        if wanted is not None and wanted != result:
            return None
        return _Way(
            tuple(placement if at in pending else Replicate() for at, placement in enumerate(given)),
            tuple(Replicate() if at in pending else result for at in range(len(given))),
            result,
        )
    if isinstance(wanted, Partial):
        return None
    whole = (Replicate(),) * len(operands)
    return _Way(whole, whole, Replicate())


_LINEAR_OPS: dict[str, tuple[str, ...]] = {
    "add": ("tt",),
    "sub": ("tt",),
    "add_alpha": ("ttc",),
    "sub_alpha": ("ttc",),
    "mul": ("tc", "ct"),
    "div": ("tc",),
    "neg": ("t",),
    "positive": ("t",),
    "clone": ("t",),
}
"""Of the op table: for which operands that are terms of the sum, ``t``, or the same in all terms, ``c``, the result is a term again."""


def is_linear(expr: Expr, terms: frozenset[int]) -> bool:
    """Whether all results of sums of operands ``terms`` provably are the sums of the results, up to rounding.

    Bools are no terms: their sum is not the sum of what is computed from them. An int is one as long as it stays an int.
    """
    kinds: list[str] = []
    for node in expr.nodes:
        kind = "?"
        match node:
            case Load():
                kind = "t" if node.operand in terms else "c"
            case Cast():
                kind = kinds[node.operand]
                source = expr.nodes[node.operand]
                if kind == "t" and not (isinstance(source, Load | Apply | Cast) and _is_linear_cast(source.dtype, node.dtype)):
                    kind = "?"
            case Apply():
                of = "".join(kinds[operand] for operand in node.operands)
                kind = "c" if set(of) <= {"c"} else "t" if of in _LINEAR_OPS.get(node.op.name, ()) else "?"
            case Viewed() | Joined():
                pass
            case _:
                kind = "c"
        if kind == "t" and getattr(node, "dtype", None) == torch.bool:
            kind = "?"
        kinds.append(kind)
    return all(kinds[output] == "t" for output in expr.outputs)


def _is_linear_cast(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or (source.is_floating_point and target.is_floating_point) or (source.is_complex and target.is_complex)


# ---- a call


def find_sharded_call(f: FusedFunction, call: Any, out: Any, key: Any, traced: Traced) -> ShardedCall | None:
    """The call of ``f``, which has been bound and traced, part by part.

    None where torch's own operators have to compute it: under ``torch.func``; beside tensors that are no ``DTensor``s, on other meshes,
    placed in another way than ``Shard``, ``Replicate`` or ``Partial``, or whose parts are subclasses themselves; for functions that make
    views or read sizes. Raises ``LayoutError`` for shapes that do not broadcast, for ``out=`` that is placed as no result can be, and for
    ``out=`` of one value of all elements, of which each part has one.
    """
    from torch.distributed.tensor import DTensor

    layouts = f._layouts(call, traced)
    outs = [] if out is None else f._match_out(traced, out)
    tensors = call.tensors
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return None
    if not all(_is_usual(tensor, traced.expr.has_draws) if isinstance(tensor, DTensor) else not tensor.ndim for tensor in tensors):
        return None
    mesh = next(tensor.device_mesh for tensor in tensors if isinstance(tensor, DTensor))
    if mesh.get_coordinate() is None or any(isinstance(tensor, DTensor) and tensor.device_mesh != mesh for tensor in tensors):
        return None
    wanted = _wanted(f, outs, mesh, layouts, traced)
    placed = tuple(Operand(tuple(tensor.shape), tensor.placements if isinstance(tensor, DTensor) else None) for tensor in tensors)
    cache_key = (key, placed, wanted, mesh.ndim)
    if cache_key not in f._shardings:
        f._keep(f._shardings, cache_key, _choose(traced, placed, layouts, mesh.ndim, wanted))
    sharding = f._shardings[cache_key]
    if sharding is None:
        if outs and _common_shape(traced, placed, layouts, True) is not None:
            raise LayoutError(
                f"out= of {f.__name__} is placed {wanted}, which results of operands placed {[of.placements for of in placed]} "
                "cannot be. Redistribute it, or leave out= out."
            )
        return None
    return ShardedCall(f, call, out, key, traced, sharding, mesh, layouts)


def _is_usual(tensor: Any, is_random: bool) -> bool:
    """Whether part and placements are of the common kinds. A part may be pending; it may be fake, unless it takes a real seed."""
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor import Partial, Replicate, Shard

    kinds = (torch.Tensor, torch.nn.Parameter, AsyncCollectiveTensor, *(() if is_random else (FakeTensor,)))
    return type(tensor._local_tensor) in kinds and all(type(placement) in (Partial, Replicate, Shard) for placement in tensor.placements)


def _wanted(f: FusedFunction, outs: Sequence[Any], mesh: Any, layouts: Sequence[NodeLayout], traced: Traced) -> Placements | None:
    """The placements that ``out=`` asks for."""
    from torch.distributed.tensor import DTensor

    if not outs:
        return None
    for target, node in zip(outs, traced.expr.outputs, strict=True):
        if is_reduced(traced.expr, node):
            raise LayoutError(
                f"out= of {f.__name__} holds a DTensor for one value of all elements, of which each part has its own. Leave it out."
            )
        if not isinstance(target, DTensor) or target.device_mesh != mesh or target.placements != outs[0].placements:
            raise LayoutError(f"out= of {f.__name__} must be DTensors on the operands' mesh, all with the same placements.")
        if tuple(target.shape) != layouts[node].shape:
            raise LayoutError(f"out= of {f.__name__} has shape {tuple(target.shape)}, the result has shape {layouts[node].shape}.")
    found: Placements = outs[0].placements
    return found


def _common_shape(traced: Traced, operands: Sequence[Operand], layouts: Sequence[NodeLayout], is_written: bool) -> tuple[int, ...] | None:
    """The shape of all results, to which all operands broadcast element for element; None where views or sizes stand in the code.

    Of results that are arguments as they are, those that are written (``out=``) count; of one value of all elements, these do.
    """
    expr = traced.expr
    computed = [node for node in expr.outputs if is_written or not isinstance(expr.nodes[node], Load)]
    shapes = {layouts[of.operand if isinstance(of := expr.nodes[node], Reduced) else node].shape for node in computed}
    if traced.reads_sizes or any(isinstance(node, Viewed | Joined) for node in expr.nodes) or len(shapes) != 1:
        return None
    if any(is_view_of_operand(expr, node) and not isinstance(expr.nodes[node], Load) for node in computed):
        return None
    (shape,) = shapes
    try:
        return shape if broadcast_shapes(shape, *(operand.shape for operand in operands)) == shape else None
    except LayoutError:
        return None


def _unsplit_dims(expr: Expr, layouts: Sequence[NodeLayout], shape: tuple[int, ...]) -> frozenset[int]:
    """The dims along which a coordinate is counted, from which a part would count anew, or draws are broadcast, which parts have alike."""
    dims: set[int] = set()
    for node in expr.nodes:
        match node:
            case Coordinate(dim=None):
                dims.update(range(len(shape)))
            case Coordinate(dim=int(dim)):
                dims.add(dim % node.ndim + len(shape) - node.ndim)
            case Draw():
                drawn = (1,) * (len(shape) - node.ndim) + layouts[node.like].shape
                dims.update(dim for dim, size in enumerate(shape) if drawn[dim] != size)
    return frozenset(dims)


def _choose(
    traced: Traced, operands: Sequence[Operand], layouts: Sequence[NodeLayout], num_mesh_dims: int, wanted: Placements | None
) -> Sharding | None:
    """How to compute a call; None where torch's own operators have to, or for ``wanted`` that cannot be."""
    from torch.distributed.tensor import Replicate

    expr = traced.expr
    shape = _common_shape(traced, operands, layouts, wanted is not None)
    if shape is not None:
        return find_sharding(expr, operands, shape, num_mesh_dims, unsplit=_unsplit_dims(expr, layouts, shape), wanted=wanted)
    if not any(isinstance(node, Coordinate | Draw) for node in expr.nodes):
        return None
    whole = (Replicate(),) * num_mesh_dims  # coordinates and draws exist inside fused functions alone: torch's operators have none
    return Sharding((whole,) * len(operands), (whole,) * len(operands), whole) if wanted in (None, whole) else None


@dataclass(frozen=True, eq=False)
class ShardedCall:
    """A call of ``f`` with ``DTensor``s, and how it is computed part by part; ``layouts`` are those of the whole tensors."""

    f: FusedFunction
    call: Any
    out: Any
    key: Any
    traced: Traced
    sharding: Sharding
    mesh: Any
    layouts: tuple[NodeLayout, ...]

    def run(self) -> Any:
        """New ``DTensor``s, or ``out``."""
        from torch.distributed.tensor import DTensor, Partial, Shard

        call = self.call
        if self.out is not None:
            return self._write()
        parts = [
            _enter(tensor, placements, grads) if isinstance(tensor, DTensor) else tensor
            for tensor, placements, grads in zip(call.tensors, self.sharding.operands, self.sharding.grads, strict=True)
        ]
        results = self._compute(parts, None)

        def wrap(item: Any, result: Any) -> Any:
            if not isinstance(item, TensorResult):
                return result
            if item.argument is not None:
                return call.tensors[item.argument]
            node = self.traced.expr.outputs[item.output]
            layout, placements = self.layouts[node], self.sharding.results
            if is_reduced(self.traced.expr, node):  # the largest of the parts' is the whole's
                placements = tuple(Partial("max") if isinstance(placement, Shard) else placement for placement in placements)
            return _leave(result, self.mesh, placements, layout.shape, layout.strides)

        return map_structure(wrap, self.traced.result, results)

    def _write(self) -> Any:
        from torch.distributed.tensor import DTensor

        outs = self.f._match_out(self.traced, self.out)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*self.call.tensors, *outs)):
            raise GradError(
                "out= does not support automatic differentiation, but a tensor requires grad. Call under torch.no_grad(), or without out=."
            )
        with torch.no_grad():
            parts = [
                _part(tensor, placements) if isinstance(tensor, DTensor) else tensor
                for tensor, placements in zip(self.call.tensors, self.sharding.operands, strict=True)
            ]
            self._compute(parts, map_structure(lambda leaf: _part(leaf, self.sharding.results) if leaf is not None else None, self.out))
            torch.autograd.graph.increment_version(outs)
        return self.out

    def _compute(self, tensors: list[Any], out: Any) -> Any:
        """The function of these parts: by a call like any other, but for random numbers, whose seed has to be the part's."""
        call, f = self.call, self.f
        if not self.traced.expr.has_draws:
            args, kwargs = map_structure(lambda leaf: tensors[call.entered[id(leaf)][0]] if id(leaf) in call.entered else leaf, call.given)
            return f(*args, out=out, **kwargs)
        local = replace(call, tensors=tensors)
        results = f._operation_of(self.key, self.traced)(tensors, tuple(call.scalars), call.device, self._seed())
        if out is None:
            return f._assemble(local, self.traced, results)
        for target, result in zip(f._match_out(self.traced, out), results, strict=True):
            target.copy_(result)
        return out

    def _seed(self) -> torch.Tensor:
        """One for each part of the results: the same where parts are alike, others where not, however the devices were seeded."""
        from torch.distributed.tensor import Shard

        seed, part = draw_seed(self.call.device), 0
        for mesh_dim, placement in enumerate(self.sharding.results):
            if isinstance(placement, Shard):
                part = part * self.mesh.size(mesh_dim) + self.mesh.get_local_rank(mesh_dim)
            else:
                torch.distributed.broadcast(seed, group=self.mesh.get_group(mesh_dim), group_src=0)
        return seed + part


# ---- parts, and their gradients


def _part(tensor: Any, placements: Placements) -> Any:
    """The part on this device of a ``DTensor`` that is brought to ``placements``; its very memory where it lies so."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    with torch.no_grad():
        local = (tensor if tensor.placements == placements else tensor.redistribute(placements=placements)).to_local()
        return (local.wait() if isinstance(local, AsyncCollectiveTensor) else local).detach()


def _enter(tensor: Any, placements: Placements, grads: Placements) -> Any:
    if torch.is_grad_enabled() and tensor.requires_grad:
        return _Enter.apply(tensor, placements, grads)  # type: ignore[no-untyped-call]
    return _part(tensor, placements)


def _leave(local: Any, mesh: Any, placements: Placements, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    return _Leave.apply(local, mesh, placements, shape, strides)  # type: ignore[no-untyped-call]


def _whole(local: Any, mesh: Any, placements: Placements, shape: Sequence[int], strides: Sequence[int]) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides))


class _Enter(torch.autograd.Function):
    """The part of a ``DTensor``. The part's gradient is a part of one as it stands: torch's operators, too, leave it where it arises."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, placements: Placements, grads: Placements) -> Any:
        ctx.set_materialize_grads(False)
        ctx.wrap = functools.partial(_whole, mesh=tensor.device_mesh, placements=grads, shape=tensor.shape, strides=tensor.stride())
        return _part(tensor, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None if grads[0] is None else ctx.wrap(grads[0]), None, None


class _Leave(torch.autograd.Function):
    """A part as a ``DTensor``. Its gradient is brought to the same placements; of a pending sum each term has the whole of it."""

    @staticmethod
    def forward(ctx: Any, local: Any, mesh: Any, placements: Placements, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        from torch.distributed.tensor import Partial, Replicate

        ctx.set_materialize_grads(False)
        ctx.grads = tuple(Replicate() if isinstance(placement, Partial) else placement for placement in placements)
        return _whole(local, mesh, placements, shape, strides)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        grad = grads[0]
        if grad is None:
            return None, None, None, None, None
        moved = grad if grad.placements == ctx.grads else grad.redistribute(placements=ctx.grads)
        return moved.to_local(), None, None, None, None
