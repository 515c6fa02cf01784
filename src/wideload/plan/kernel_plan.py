"""Turns an expression and the layouts of its operands into kernels: the first family that takes a call, its variant, grid, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from wideload.dtypes import scalar_type
from wideload.errors import LayoutError
from wideload.expr import Expr, Load, Numerics
from wideload.layout import INT31_MAX, IterSpace, build_space, contiguous_strides, expand_strides, like_strides
from wideload.lower import Program, Store, lower_expr
from wideload.plan.choice import STARTING_BYTES, Choice, Reason, Walk, choose_kept
from wideload.plan.columns import choose_columns, find_parts
from wideload.plan.dense import choose_dense
from wideload.plan.rows import choose_pitched, choose_rows
from wideload.plan.strided import choose_strided
from wideload.plan.strips import choose_strips
from wideload.plan.tile import choose_tile
from wideload.plan.tuning import DEFAULT, Tuning
from wideload.plan.variant import Access, Pace, Variant
from wideload.reductions import Reduction
from wideload.replay import NodeLayout
from wideload.views import View

__all__ = ["KernelPlan", "Operand", "Target", "Total", "plan_kernels", "walked_targets"]


class Operand(NamedTuple):
    """A view of tensor argument ``tensor``, ``offset_bytes`` behind its first element, as the planner sees it.

    ``phase_bytes`` is the view's address modulo ``ACCESS_BYTES``; ``on_host`` marks a 0-dim CPU tensor beside tensors of another device,
    which acts as a number.
    """

    dtype: torch.dtype
    layout: NodeLayout
    phase_bytes: int
    tensor: int
    offset_bytes: int = 0
    on_host: bool = False


class Target(NamedTuple):
    """A view of output ``output``, ``offset_bytes`` behind its first element, that receives node ``node``.

    With ``reduction`` the output is one value of all elements of the node, of which ``layout`` is a part in eager's strides. With
    ``num_columns`` it has the sums, over rows of so many elements, of the node in row-major order: a row of them for each
    of `find_parts`, or where it ``is_total`` one.
    """

    node: int
    dtype: torch.dtype
    layout: NodeLayout
    phase_bytes: int
    output: int
    offset_bytes: int = 0
    reduction: Reduction | None = None
    num_columns: int = 0
    is_total: bool = False


class Total(NamedTuple):
    """Output ``output``, of ``dtype``: the sum of the rows of output ``parts``, which have ``shape`` and ``parts_dtype``."""

    output: int
    dtype: torch.dtype
    parts: int
    parts_dtype: torch.dtype
    shape: tuple[int, int]


class KernelPlan(NamedTuple):
    """One launch.

    ``sources`` and ``targets`` are (tensor, bytes behind its first element) of the parameters and of the results, which walk
    memory by ``source_layouts`` and ``target_layouts``; ``sizes`` are the run-time integers that follow the pointers. ``seed`` is the
    tensor that holds the seed of a program with draws. Where a kernel reads what those before it have written, the tensor ~k is output k.
    """

    program: Program
    variant: Variant
    sources: tuple[tuple[int, int], ...]
    targets: tuple[tuple[int, int], ...]
    source_layouts: tuple[NodeLayout, ...]
    target_layouts: tuple[NodeLayout, ...]
    num_elements: int
    grid: int
    sizes: tuple[int, ...]
    reasons: tuple[Reason, ...]
    seed: int | None = None

    @property
    def name(self) -> str:
        """The kernel's name in the source."""
        return f"{self.program.name}_{self.variant.family}"


def plan_kernels(
    expr: Expr,
    operands: Sequence[Operand],
    targets: Sequence[Target],
    *,
    numerics: Numerics,
    fast_math: bool,
    walks: Sequence[View] = (),
    seed: int | None = None,
    totals: Sequence[Total] = (),
    tuning: Tuning = DEFAULT,
) -> tuple[KernelPlan, ...]:
    """One kernel for each shape among the ``targets``; none for those without elements. Nearly always that is one. Then the ``totals``.

    ``walks`` are those of the expression's positions, ``seed`` the tensor from which its draws start.
    ``tuning`` says how kernels are cut for the GPU. Raises ``LayoutError`` where no kernel adds up rows as a target wants.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for position, target in enumerate(targets):
        shapes.setdefault(target.layout.shape, []).append(position)
    plans = []
    for shape, positions in shapes.items():
        chosen = [targets[position] for position in positions]
        stores = tuple(Store(t.node, t.dtype, t.reduction, t.num_columns > 0) for t in chosen)
        program = lower_expr(expr, stores, numerics=numerics, fast_math=fast_math)
        if 0 not in shape:
            plan = _plan_kernel(program, operands, chosen, shape, walks, tuning)
            plans.append(plan._replace(seed=seed) if program.has_draws else plan)
    plans += [_plan_total(f"{expr.name}_total", total, tuning) for total in totals]
    if len(plans) > 1:
        plans = [plan._replace(variant=plan.variant._replace(is_one_of_several=True)) for plan in plans]
    return tuple(plans)


def _plan_total(name: str, total: Total, tuning: Tuning) -> KernelPlan:
    parts = Load(0, "parts", total.parts_dtype, len(total.shape))
    program = lower_expr(Expr(name, (parts,), (parts,), (0,)), (Store(0, total.dtype, is_summed=True),), numerics="fused")
    layout = NodeLayout(total.shape, contiguous_strides(total.shape))
    operand = Operand(total.parts_dtype, layout, 0, ~total.parts)
    target = Target(0, total.dtype, layout, 0, total.output, num_columns=total.shape[1], is_total=True)
    plan = _plan_kernel(program, [operand], [target], total.shape, (), tuning)
    reason = Reason("order", "waits first", "what is read is written by the kernel before, which need not have ended when this one starts")
    return plan._replace(variant=plan.variant._replace(reads_results=True), reasons=(*plan.reasons, reason))


_KEEPING = ("strips", "rows", "pitched")
"""Families that ask the L2 to keep what is read again."""


def _plan_kernel(
    program: Program,
    operands: Sequence[Operand],
    targets: Sequence[Target],
    shape: tuple[int, ...],
    position_walks: Sequence[View],
    tuning: Tuning,
) -> KernelPlan:
    loads = [operands[parameter.operand] for parameter in program.parameters]
    on_device = [load for load in loads if not load.on_host]
    tensors: list[Operand | Target] = [*on_device, *walked_targets(targets, on_device)]
    names = [p.name for p, load in zip(program.parameters, loads, strict=True) if not load.on_host] + [r.name for r in program.results]
    num_inputs = len(tensors) - len(targets)
    load_strides = [expand_strides(load.layout.shape, load.layout.strides, shape) for load in loads]
    strides = [expand_strides(x.layout.shape, x.layout.strides, shape) for x in tensors]
    positions = [position_walks[position.walk] for position in program.positions]
    position_strides = [expand_strides(view.shape, view.strides, shape) for view in positions]
    sums = [_sum_strides(target) for target in targets if target.num_columns]
    space = build_space(shape, [*strides, *position_strides, *sums], outputs=range(num_inputs, len(strides)))
    walks = [
        Walk(name, scalar_type(x.dtype, "an operand"), x.phase_bytes, tuple(dim.strides[row] for dim in space.dims), space.num_elements)
        for row, (name, x) in enumerate(zip(names, tensors, strict=True))
    ]
    choice = (
        _choose_summing(space, walks, num_inputs, targets, program, tuning)
        if sums
        else choose_dense(walks, num_inputs, tuning)
        or (None if positions else choose_strips(space, walks, num_inputs, program, tuning))
        or choose_rows(space, walks, num_inputs, tuning)
        or choose_pitched(space, walks, num_inputs, tuning)
        or choose_tile(space, walks, num_inputs, tuning, sum(result.type.itemsize for result in program.reduced))
        or choose_strided(space, walks, tuning)
    )
    accesses, steps = iter(choice.accesses), iter(choice.steps)
    paces, position_sizes = [], []
    for row, view in enumerate(positions, start=len(tensors)):
        along = [dim.strides[row] for dim in space.dims] or [0]
        along = [along[d] for d in choice.order or range(len(along))]
        pace = _pace(view, along[0])
        paces.append(pace)
        position_sizes += [view.offset, *(along if pace.step == "apart" else along[1:])]
    load_accesses: list[Access] = ["value" if load.on_host else next(accesses) for load in loads]
    asked = iter(choose_kept(num_inputs, walks, [dim.size for dim in space.dims]) if choice.family in _KEEPING else (False,) * num_inputs)
    kept = tuple(not load.on_host and next(asked) and a in ("vector", "repeated") for load, a in zip(loads, load_accesses, strict=True))
    variant = Variant(
        family=choice.family,
        loads=tuple(load_accesses),
        stores=tuple("reduced" if result.is_reduced else access for result, access in zip(program.results, accesses, strict=True)),
        elements=choice.elements,
        rank=max(1, len(space.dims)),
        index_bits=choice.index_bits,
        threads=choice.threads,
        tile=choice.tile,
        is_whole=choice.is_whole,
        steps=tuple((1, 0) if load.on_host else next(steps) for load in loads) if "stepped" in choice.accesses else (),
        kept=kept if any(kept) else (),
        paces=tuple(paces),
        strip=choice.strip,
        columns=choice.columns,
        moves_much=choice.threads * choice.elements * _moved_bytes(walks, targets) >= STARTING_BYTES,
    )
    grid = -(-choice.num_covered // (variant.threads * variant.elements))
    reasons = [*choice.reasons, Reason("grid", f"{grid} x {variant.threads}", "one-shot: a grid-stride loop measured 5 % slower on H200")]
    if any(kept):
        listed = ", ".join(p.name for p, is_kept in zip(program.parameters, kept, strict=True) if is_kept)
        reasons.append(Reason("L2", f"keeps {listed}", "read again by an outer dim, after more than what it would still hold"))
    reasons += _draw_reasons(program, paces)
    if program.reduced:
        listed = ", ".join(target.reduction.name for target in targets if target.reduction is not None)
        reasons.append(Reason("side results", listed, "at most one atomic a warp each, none where what is there is as large"))
    sources = tuple((load.tensor, load.offset_bytes) for load in loads)
    places = tuple((target.output, target.offset_bytes) for target in targets)
    source_layouts = tuple(NodeLayout(shape, strides) for strides in load_strides)
    return KernelPlan(
        program,
        variant,
        sources,
        places,
        source_layouts,
        tuple(map(_written_layout, targets)),
        space.num_elements,
        grid,
        (*choice.sizes, *position_sizes),
        tuple(reasons),
    )


def _moved_bytes(walks: Sequence[Walk], targets: Sequence[Target]) -> int:
    """Of memory, for an element of the space: none of what is broadcast, of sums, of one value of all. The ``targets`` walk last."""
    are_moved = [True] * (len(walks) - len(targets)) + [_is_stored(target) for target in targets]
    return sum(walk.type.itemsize for walk, is_moved in zip(walks, are_moved, strict=True) if is_moved and all(walk.strides))


def _choose_summing(
    space: IterSpace, walks: Sequence[Walk], num_inputs: int, targets: Sequence[Target], program: Program, tuning: Tuning
) -> Choice:
    """The ``columns`` family, which alone adds up rows: not those of several widths, nor beside one value of all elements."""
    sums = {at: target.num_columns for at, target in enumerate(targets) if target.num_columns}
    choice = None
    if len({*sums.values()}) == 1 and not program.reduced:
        is_total = all(target.is_total for target in targets)
        num_columns = next(iter(sums.values()))
        choice = choose_columns(space, walks, num_inputs, tuple(sums), num_columns, is_total, program.num_functions, tuning)
    if choice is None:
        raise LayoutError(
            f"{program.name} cannot add up rows of these operands: they are to be of whole aligned accesses, one fixed step apart. "
            "Store the terms, and add them up."
        )
    return choice


def _sum_strides(target: Target) -> tuple[int, ...]:
    """How the sums of a target are walked: as its row-major order within a row, and all rows alike."""
    strides = contiguous_strides(target.layout.shape)
    return tuple(stride if stride < target.num_columns else 0 for stride in strides)


def _written_layout(target: Target) -> NodeLayout:
    """That of the memory that a kernel writes of a target."""
    shape = target.layout.shape
    if target.num_columns:
        num_rows = math.prod(shape) // target.num_columns
        num_parts = 1 if target.is_total else find_parts(num_rows, target.num_columns).count
        return NodeLayout((num_parts, target.num_columns), (target.num_columns, 1))
    return target.layout if target.reduction is None else NodeLayout(shape, (0,) * len(shape))


def walked_targets(targets: Sequence[Target], inputs: Sequence[Operand]) -> list[Target]:
    """What sets the pace of a kernel: a target that is one value is walked as the first that is stored, and where all are, as if it were.

    So are sums. It is taken for an aligned tensor of the widest input's dtype then, in eager's order of dims.
    """
    beat = next((target for target in targets if _is_stored(target)), None)
    if beat is None:
        layout = NodeLayout(targets[0].layout.shape, like_strides(targets[0].layout.shape, targets[0].layout.strides))
        dtype = max((load.dtype for load in inputs), key=lambda dtype: dtype.itemsize, default=targets[0].dtype)
        beat = targets[0]._replace(dtype=dtype, layout=layout, phase_bytes=0)
    return [target if _is_stored(target) else beat for target in targets]


def _is_stored(target: Target) -> bool:
    return target.reduction is None and not target.num_columns


def _pace(view: View, stride: int) -> Pace:
    """The pace of a position that walks by ``view``, where the innermost dim has ``stride``."""
    last = view.offset + sum((size - 1) * along for size, along in zip(view.shape, view.strides, strict=True))
    step: dict[int, Literal["run", "row"]] = {0: "row", 1: "run"}
    return Pace(step.get(stride, "apart"), 32 if last <= INT31_MAX else 64)


def _draw_reasons(program: Program, paces: Sequence[Pace]) -> list[Reason]:
    reasons = []
    for position, pace in zip(program.positions, paces, strict=True):
        if position.draw is not None:
            value = {"run": "blocks shared", "row": "one a row", "apart": "one block each"}[pace.step]
            order = {"run": "follow one another", "row": "share a number", "apart": "do not follow one another"}[pace.step]
            why = f"{position.draw.bits} bits an element; a thread's elements {order} in the draw's row-major order"
            reasons.append(Reason("random numbers", value, why))
    return reasons
