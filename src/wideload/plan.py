"""Turns an expression and the layouts of its operands into kernels to run: family, vector width, index width, grid, and why.

What changes the code is a ``Variant``; what does not (sizes, strides, numbers) is passed at run time, so a new shape compiles
nothing. Knows no driver and writes no CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from wideload.dtypes import ScalarType, scalar_type
from wideload.expr import Expr, Numerics
from wideload.layout import IterSpace, build_space, expand_strides, magic_divisor
from wideload.lower import Program, Store, lower_expr
from wideload.replay import NodeLayout

__all__ = ["ACCESS_BYTES", "THREADS", "Access", "KernelPlan", "Operand", "Reason", "Target", "Variant", "plan_kernels"]

ACCESS_BYTES = 16
"""The widest load or store of one thread on sm_75 to sm_90; wider vectors a thread were slower on H200 (4.28 against 4.33 TB/s)."""

THREADS = 128
"""Threads a block. With one access a thread, 128 against 256 threads measured on an H200, in TB/s: silu f32 4.21 and 4.12, bf16 tanh
4.26 and 4.21, GELU 4.20 and 4.11, int8 negation 4.23 and 4.18, f32 to bf16 4.30 and 4.25; copies and bf16 add equal within 0.2 %."""

STRIDED_ELEMENTS = 4
"""Elements that a thread of a strided kernel has in flight: its loads are narrow, so that one would leave the memory idle."""

Access = Literal["vector", "elements", "uniform", "strided", "value"]
"""How a kernel reaches an operand: one wide access; one access an element because its address is not aligned; one element for
all; through its strides; by value (a 0-dim CPU tensor)."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument as the planner sees it.

    ``alignment`` is that of its address, in bytes; ``on_host`` marks a 0-dim CPU tensor beside tensors of another device,
    which acts as a number.
    """

    dtype: torch.dtype
    layout: NodeLayout
    alignment: int
    on_host: bool = False


@dataclass(frozen=True)
class Target:
    """A tensor that receives node ``node``."""

    node: int
    dtype: torch.dtype
    layout: NodeLayout
    alignment: int


@dataclass(frozen=True)
class Reason:
    """One choice of the planner and why it was made."""

    choice: str
    value: str
    why: str


@dataclass(frozen=True)
class Variant:
    """What a kernel's text depends on besides its program.

    ``loads`` go with the program's parameters, ``stores`` with its results; ``elements`` is how many a thread computes;
    ``is_in_place`` forbids the read-only cache.
    """

    family: Literal["dense", "strided"]
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    elements: int
    rank: int
    index_bits: Literal[32, 64]
    is_in_place: bool


@dataclass(frozen=True)
class KernelPlan:
    """One launch. ``targets`` are the positions of its outputs; ``sizes`` the run-time integers that follow the pointers."""

    program: Program
    variant: Variant
    targets: tuple[int, ...]
    num_elements: int
    grid: int
    sizes: tuple[int, ...]
    reasons: tuple[Reason, ...]

    @property
    def name(self) -> str:
        """The kernel's name in the source."""
        return f"{self.program.name}_{self.variant.family}"


def plan_kernels(
    expr: Expr, operands: Sequence[Operand], targets: Sequence[Target], *, numerics: Numerics, fast_math: bool, is_in_place: bool
) -> tuple[KernelPlan, ...]:
    """One kernel for each shape among the ``targets``; none for those without elements. Nearly always that is one."""
    shapes: dict[tuple[int, ...], list[int]] = {}
    for position, target in enumerate(targets):
        shapes.setdefault(target.layout.shape, []).append(position)
    plans = []
    for shape, positions in shapes.items():
        chosen = [targets[position] for position in positions]
        program = lower_expr(expr, tuple(Store(t.node, t.dtype) for t in chosen), numerics=numerics, fast_math=fast_math)
        if 0 not in shape:
            plans.append(_plan_kernel(program, operands, chosen, tuple(positions), shape, is_in_place))
    return tuple(plans)


def _plan_kernel(
    program: Program,
    operands: Sequence[Operand],
    targets: Sequence[Target],
    positions: tuple[int, ...],
    shape: tuple[int, ...],
    is_in_place: bool,
) -> KernelPlan:
    loads = [operands[parameter.operand] for parameter in program.parameters]
    pointers = [load for load in loads if not load.on_host]
    strides = [expand_strides(x.layout.shape, x.layout.strides, shape) for x in pointers] + [t.layout.strides for t in targets]
    space = build_space(shape, strides, outputs=range(len(pointers), len(strides)))
    tensors: list[Operand | Target] = [*pointers, *targets]
    types = [scalar_type(x.dtype, "an operand") for x in tensors]
    uniform = [not any(dim.strides[row] for dim in space.dims) and space.num_elements > 1 for row in range(len(strides))]
    is_dense = all(is_uniform or space.is_dense(row) for row, is_uniform in enumerate(uniform))
    rows = iter(
        _dense_accesses(types, [x.alignment for x in tensors], uniform)
        if is_dense
        else ["uniform" if is_uniform else "strided" for is_uniform in uniform]
    )
    accesses: list[Access] = ["value" if load.on_host else next(rows) for load in loads]
    stores: tuple[Access, ...] = tuple(rows)
    if is_dense:
        elements = _vector_elements(types, uniform)
        variant = Variant("dense", tuple(accesses), stores, elements, 1, 64, is_in_place)
        sizes: tuple[int, ...] = (space.num_elements,)
    else:
        bits: Literal[32, 64] = 64 if space.needs_64bit([t.itemsize for t in types]) else 32
        variant = Variant("strided", tuple(accesses), stores, STRIDED_ELEMENTS, len(space.dims), bits, is_in_place)
        sizes = _strided_sizes(space, bits, [row for row, is_uniform in enumerate(uniform) if not is_uniform])
    grid = -(-space.num_elements // (THREADS * variant.elements))
    names = [p.name for p, load in zip(program.parameters, loads, strict=True) if not load.on_host] + [r.name for r in program.results]
    reasons = _reasons(variant, space, names, types, uniform, grid)
    return KernelPlan(program, variant, positions, space.num_elements, grid, sizes, reasons)


def _vector_elements(types: Sequence[ScalarType], uniform: Sequence[bool]) -> int:
    """One element count for all operands: the widest uses a whole access, the narrower ones less."""
    return ACCESS_BYTES // max(t.itemsize for t, is_uniform in zip(types, uniform, strict=True) if not is_uniform)


def _dense_accesses(types: Sequence[ScalarType], alignments: Sequence[int], uniform: Sequence[bool]) -> list[Access]:
    elements = _vector_elements(types, uniform)
    return [
        "uniform" if is_uniform else "vector" if alignment % (t.itemsize * elements) == 0 else "elements"
        for t, alignment, is_uniform in zip(types, alignments, uniform, strict=True)
    ]


def _strided_sizes(space: IterSpace, bits: Literal[32, 64], rows: Sequence[int]) -> tuple[int, ...]:
    """The element count; size, multiplier and shift of each dim but the outermost; then the strides, operand by operand."""
    sizes = [space.num_elements]
    for dim in space.dims[:-1]:
        multiplier, shift = magic_divisor(dim.size, bits)
        # Kernel parameters are signed 64-bit integers: the same bits.
        sizes += [dim.size, multiplier - (1 << 64) if multiplier >> 63 else multiplier, shift]
    return (*sizes, *(dim.strides[row] for row in rows for dim in space.dims))


def _reasons(
    variant: Variant, space: IterSpace, names: Sequence[str], types: Sequence[ScalarType], uniform: Sequence[bool], grid: int
) -> tuple[Reason, ...]:
    widest = max((t for t, is_uniform in zip(types, uniform, strict=True) if not is_uniform), key=lambda t: t.itemsize)
    reasons = []
    if variant.family == "dense":
        reasons.append(Reason("family", "dense", "every operand walks memory in one run, or is one element"))
        why = f"{ACCESS_BYTES} bytes of the widest operand ({widest.name}), one access a thread"
        reasons.append(Reason("elements a thread", str(variant.elements), why))
        narrow = [
            name
            for name, access in zip(names, [a for a in (*variant.loads, *variant.stores) if a != "value"], strict=True)
            if access == "elements"
        ]
        if narrow:
            reasons.append(Reason("access", "one element", f"the address of {', '.join(narrow)} is not aligned to a whole access"))
        reasons.append(Reason("index width", "64 bits", "one 64-bit block offset costs nothing"))
    else:
        broken = next(name for row, name in enumerate(names) if not uniform[row] and not space.is_dense(row))
        reasons.append(Reason("family", "strided", f"{broken} does not walk memory in one run: {len(space.dims)} dims after coalescing"))
        reasons.append(Reason("elements a thread", str(variant.elements), "several loads in flight"))
        reach = "every offset fits in 31 bits" if variant.index_bits == 32 else "an element count or a byte offset needs more than 31 bits"
        reasons.append(Reason("index width", f"{variant.index_bits} bits", reach))
    reasons.append(Reason("grid", f"{grid} x {THREADS}", "one-shot: a grid-stride loop measured 5 % slower on H200"))
    if variant.is_in_place:
        reasons.append(Reason("cache", "coherent loads", "an output is also an input, so the read-only path is not allowed"))
    return tuple(reasons)
