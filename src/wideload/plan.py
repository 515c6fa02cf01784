"""Turns an expression and the layouts of its operands into kernels to run: family, vector width, index width, grid, and why.

What changes the code is a ``Variant``; what does not (sizes, strides, numbers) is passed at run time, so a new shape compiles
nothing. Knows no driver and writes no CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from wideload.dtypes import ScalarType, scalar_type
from wideload.expr import Expr, Numerics
from wideload.gpus import SECTOR_BYTES
from wideload.layout import INT31_MAX, Dim, IterSpace, build_space, expand_strides, magic_divisor
from wideload.lower import Program, Store, lower_expr
from wideload.replay import NodeLayout
from wideload.views import View

__all__ = [
    "ACCESS_BYTES",
    "THREADS",
    "Access",
    "KernelPlan",
    "Operand",
    "Pace",
    "Reason",
    "Strip",
    "Table",
    "Target",
    "Tile",
    "Variant",
    "plan_kernels",
]

ACCESS_BYTES = 16
"""The widest load or store of one thread on sm_75 to sm_90; wider vectors a thread were slower on H200 (4.28 against 4.33 TB/s)."""

NARROWING_ACCESSES = 2
"""Accesses of its widest operand that a thread makes where all results are narrower: its stores are wider then. On an H200, of the
wall: fp32 to int8 0.991 against 0.934 with one, int64 to bf16 0.991 and 0.935, fp32 to bf16 0.993 and 0.983; four as two. Where a result
is as wide, two lose: bf16 to fp32 0.768 against 1.003."""

THREADS = 128
"""Threads a block. With one access a thread, 128 against 256 threads measured on an H200, in TB/s: silu f32 4.21 and 4.12, bf16 tanh
4.26 and 4.21, GELU 4.20 and 4.11, int8 negation 4.23 and 4.18, f32 to bf16 4.30 and 4.25; copies and bf16 add equal within 0.2 %."""

STRIDED_ELEMENTS = 4
"""Elements that a thread of a strided kernel has in flight: its loads are narrow, so that one would leave the memory idle."""

TILE_BYTES = 32768
"""Shared memory of a block of a ``tile`` kernel, at most: 128 x 128 elements of 2 bytes, with which a transposed copy of bf16 measured
4.00 TB/s on an H200 (64 x 64: 3.70, 128 x 64: 3.84). Two blocks fit on an SM of every architecture (sm_75 has 64 KiB), four on sm_90,
where threads are the limit. A halo adds up to an eighth."""

STATIC_SHARED_BYTES = 48 * 1024
"""Shared memory that a block may have without asking for more (CUDA C++ Programming Guide, compute capabilities)."""

TILE_THREADS = 512
"""Threads of such a block, at most: four 16-byte loads each (512 to 1024 threads measured equal on an H200; two blocks of 1024 would
leave 32 registers a thread)."""

TILE_BLOCKS = 2
"""Blocks an SM that the registers of such a kernel must leave room for, 64 a thread: while one waits for its loads, the other stores."""

RING_BLOCKS, NARROW_RING_BLOCKS = 3, 4
"""The same where turned operands come to their tiles past the registers, and neither other operands nor functions of a maths library need
these; four where the widest operand has less than four bytes, of which a byte costs more instructions. On an H200, of the wall, with two,
three and four blocks: int8 0.77, 0.843, 0.860, bf16 0.867, 0.913, 0.909, of 11587 x 11587 0.856 and 0.878 (three and four), fp32 0.867,
0.916, 0.907, fp64 0.855 and 0.897 (two and three); beside an operand that is not turned bf16 0.925 and 0.875."""

_WARP_THREADS = 32

TILE_ACROSS = 8
"""Accesses along an output's line that a warp of a ``tile`` kernel stores together: 128 bytes of each of four lines."""

REGISTER_BYTES = 4

MAX_STEP_BYTES = REGISTER_BYTES
"""From one element to the next of an operand that is read whole and picked from, at most: every register then has one that is wanted. Where
one had none, ptxas would make narrow accesses of the wide one."""

MANY_LOADS = 4
"""Loads of a thread from which on ptxas, left to itself, keeps registers low by moving loads behind the first stores."""

MANY_LOADS_BLOCKS = 8
"""Blocks an SM that the registers of such a kernel must leave room for, 64 a thread: RoPE of bf16, of six operands, took 39 registers and
ran at 3.82 TB/s on an H200, with 6 to 10 blocks asked for at 3.98 to 4.00; a strip of four rows of bias and GELU (erf) 3.98 without and
4.15. Kernels of fewer loads lose by it: bias and GELU of one row 3.79 to 3.57, GELU 4.07 to 3.74, unaligned int8 4.29 to 3.94."""

MAX_INLINED_FUNCTIONS = 48
"""Functions of a maths library over all elements of a thread; above, the element function is held once and called. Inlined, 112 fp32
functions took NVRTC 450 ms and 384 took 1300; called, 115 and 200. So many keep the arithmetic units busier than the memory: the calls
are not what it waits for."""

STRIP_ROWS = (4, 2)
"""Rows of a strip, the most first: the blocks that run at a time then walk as many places at once, of which more than four cost
bandwidth on an H200 (4.33 down to 4.04 TB/s)."""

LEAST_STRIPS = 1 << 21
"""Strips from which on a kernel is one of strips: eight waves of full SMs on an H200 (nvFuser's rule for its unrolling of broadcasts).

Strips save arithmetic and addresses, not bytes. On an H200, of the wall: a row and GELU (erf) in bf16 0.979 against 0.904 without strips,
a row and GELU (tanh) 0.995 and 1.000, a row alone 0.991 and 0.998, RoPE 0.844 and 0.966. So they are for one operand of its own beside
what repeats, and for arithmetic that approximates a function: there they cost half a percent at most."""

Family = Literal["dense", "strips", "rows", "pitched", "tile", "strided", "foreach"]

Access = Literal[
    "vector", "repeated", "realigned", "stepped", "elements", "row", "uniform", "strided", "turned", "turned_realigned", "value"
]
"""How a kernel reaches an operand: one wide access; one for all rows of a strip; aligned words, realigned in registers; the aligned words
in which it is every second, third or fourth element; one access an element, of an output whose address is not aligned as the first
output's is; one element a row; one element for all; through its strides; through shared memory, where its fast dim is not the outputs'
(aligned or realigned); by value (a 0-dim CPU tensor)."""


@dataclass(frozen=True)
class Pace:
    """How a position of the program changes from one element of a thread to the next: by one, not at all, or by a run-time stride.

    ``bits`` are those in which every position fits, and which the kernel works it out in.
    """

    step: Literal["run", "row", "apart"]
    bits: Literal[32, 64]


@dataclass(frozen=True)
class Operand:
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


@dataclass(frozen=True)
class Target:
    """A view of output ``output``, ``offset_bytes`` behind its first element, that receives node ``node``."""

    node: int
    dtype: torch.dtype
    layout: NodeLayout
    phase_bytes: int
    output: int
    offset_bytes: int = 0


@dataclass(frozen=True)
class Reason:
    """One choice of the planner and why it was made."""

    choice: str
    value: str
    why: str


@dataclass(frozen=True)
class Tile:
    """The part of the iteration space that a block of a ``tile`` kernel computes.

    ``columns`` lie along the outputs' fast dim, ``lines`` along that of the operands that are turned. A thread computes ``width``
    columns, one access of the widest output, of ``depth`` neighbouring lines at a time. Where the outputs' lines are not aligned alike,
    the accesses of each line begin at a sector of the first output, up to ``halo - 1`` columns before the tile, and ``halo`` columns
    more of turned operands are loaded. Where a turned operand is not aligned, each column of all of them lies in a ring of ``ring`` lines.
    """

    columns: int
    lines: int
    width: int
    depth: int
    halo: int = 0
    ring: int = 0


@dataclass(frozen=True)
class Table:
    """What a ``foreach`` kernel gets by value: of each operand and number an entry for each of ``capacity`` tensors, or one for all.

    ``shared_loads`` and ``shared_scalars`` say which of the program's have one for all, ``in_place`` of each result which load's entry it
    is stored by, if any. A thread computes ``accesses`` accesses.
    """

    capacity: int
    accesses: int
    shared_loads: tuple[bool, ...]
    shared_scalars: tuple[bool, ...]
    in_place: tuple[int | None, ...]


@dataclass(frozen=True)
class Strip:
    """The neighbouring rows along outer dim ``dim`` whose elements in the same columns a thread of a ``strips`` kernel computes."""

    dim: int
    rows: int


@dataclass(frozen=True)
class Variant:
    """What a kernel's text depends on besides its program.

    ``loads`` go with the program's parameters, ``stores`` with its results, ``paces`` with its positions; ``elements`` is how many a
    thread computes; ``is_in_place`` forbids the read-only cache; ``threads`` are those of a block; ``tile`` is a tile kernel's, ``strip``
    a strips kernel's, ``table`` a foreach kernel's. ``is_whole`` says that sizes and addresses leave no access that is partly outside, so
    that the kernel has no edges. ``steps`` are those of the loads, and how many elements before an operand's first one its aligned words
    begin: (1, 0) of all but ``stepped`` ones. ``is_one_of_several`` kernels of a call lets them run side by side.
    """

    family: Family
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    elements: int
    rank: int
    index_bits: Literal[32, 64]
    is_in_place: bool
    threads: int = THREADS
    tile: Tile | None = None
    is_whole: bool = False
    steps: tuple[tuple[int, int], ...] = ()
    paces: tuple[Pace, ...] = ()
    strip: Strip | None = None
    table: Table | None = None
    is_one_of_several: bool = False

    @property
    def access_elements(self) -> int:
        """Elements of one access along the outputs; ``elements`` where a thread makes one of each operand."""
        return self.tile.width if self.tile else self.elements // (self.strip.rows if self.strip else 1)

    @property
    def load_steps(self) -> tuple[tuple[int, int], ...]:
        """``steps``, spelt out where no load is ``stepped``."""
        return self.steps or ((1, 0),) * len(self.loads)


@dataclass(frozen=True)
class KernelPlan:
    """One launch.

    ``sources`` and ``targets`` are (tensor, bytes behind its first element) of the parameters and of the results, which walk
    memory by ``source_layouts`` and ``target_layouts``; ``sizes`` are the run-time integers that follow the pointers. ``seed`` is the
    tensor that holds the seed of a program with draws.
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
    is_in_place: bool,
    walks: Sequence[View] = (),
    seed: int | None = None,
) -> tuple[KernelPlan, ...]:
    """One kernel for each shape among the ``targets``; none for those without elements. Nearly always that is one.

    ``walks`` are those of the expression's positions, ``seed`` the tensor from which its draws start.
    """
    shapes: dict[tuple[int, ...], list[int]] = {}
    for position, target in enumerate(targets):
        shapes.setdefault(target.layout.shape, []).append(position)
    plans = []
    for shape, positions in shapes.items():
        chosen = [targets[position] for position in positions]
        program = lower_expr(expr, tuple(Store(t.node, t.dtype) for t in chosen), numerics=numerics, fast_math=fast_math)
        if 0 not in shape:
            plan = _plan_kernel(program, operands, chosen, shape, is_in_place, walks)
            plans.append(replace(plan, seed=seed) if program.has_draws else plan)
    if len(plans) > 1:
        plans = [replace(plan, variant=replace(plan.variant, is_one_of_several=True)) for plan in plans]
    return tuple(plans)


def _plan_kernel(
    program: Program,
    operands: Sequence[Operand],
    targets: Sequence[Target],
    shape: tuple[int, ...],
    is_in_place: bool,
    position_walks: Sequence[View],
) -> KernelPlan:
    loads = [operands[parameter.operand] for parameter in program.parameters]
    tensors: list[Operand | Target] = [*(load for load in loads if not load.on_host), *targets]
    names = [p.name for p, load in zip(program.parameters, loads, strict=True) if not load.on_host] + [r.name for r in program.results]
    num_inputs = len(tensors) - len(targets)
    load_strides = [expand_strides(load.layout.shape, load.layout.strides, shape) for load in loads]
    strides = [expand_strides(x.layout.shape, x.layout.strides, shape) for x in tensors]
    positions = [position_walks[position.walk] for position in program.positions]
    position_strides = [expand_strides(view.shape, view.strides, shape) for view in positions]
    space = build_space(shape, [*strides, *position_strides], outputs=range(num_inputs, len(strides)))
    walks = [
        _Walk(name, scalar_type(x.dtype, "an operand"), x.phase_bytes, tuple(dim.strides[row] for dim in space.dims), space.num_elements)
        for row, (name, x) in enumerate(zip(names, tensors, strict=True))
    ]
    choice = (
        _choose_dense(walks, num_inputs)
        or (None if positions else _choose_strips(space, walks, num_inputs, program))
        or _choose_rows(space, walks, num_inputs)
        or _choose_pitched(space, walks, num_inputs)
        or _choose_tile(space, walks, num_inputs)
        or _choose_strided(space, walks)
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
    variant = Variant(
        family=choice.family,
        loads=tuple(load_accesses),
        stores=tuple(accesses),
        elements=choice.elements,
        rank=max(1, len(space.dims)),
        index_bits=choice.index_bits,
        is_in_place=is_in_place,
        threads=choice.threads,
        tile=choice.tile,
        is_whole=choice.is_whole,
        steps=tuple((1, 0) if load.on_host else next(steps) for load in loads) if "stepped" in choice.accesses else (),
        paces=tuple(paces),
        strip=choice.strip,
    )
    grid = -(-choice.num_covered // (variant.threads * variant.elements))
    reasons = [*choice.reasons, Reason("grid", f"{grid} x {variant.threads}", "one-shot: a grid-stride loop measured 5 % slower on H200")]
    if is_in_place:
        reasons.append(Reason("cache", "coherent loads", "an output is also an input, so the read-only path is not allowed"))
    reasons += _draw_reasons(program, paces)
    sources = tuple((load.tensor, load.offset_bytes) for load in loads)
    places = tuple((target.output, target.offset_bytes) for target in targets)
    source_layouts = tuple(NodeLayout(shape, strides) for strides in load_strides)
    target_layouts = tuple(target.layout for target in targets)
    return KernelPlan(
        program,
        variant,
        sources,
        places,
        source_layouts,
        target_layouts,
        space.num_elements,
        grid,
        (*choice.sizes, *position_sizes),
        tuple(reasons),
    )


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


@dataclass(frozen=True)
class _Walk:
    """How an operand walks the iteration space: its stride along each dim in elements, innermost first."""

    name: str
    type: ScalarType
    phase_bytes: int
    strides: tuple[int, ...]
    num_elements: int

    @property
    def is_uniform(self) -> bool:
        """Whether it is one element for all; the only element of a space is as good as a run."""
        return self.num_elements > 1 and not any(self.strides)

    def phase(self, elements: int) -> int:
        """How many elements its address lies behind an aligned access of ``elements``."""
        return self.phase_bytes % (elements * self.type.itemsize) // self.type.itemsize

    def span(self, sizes: Sequence[int]) -> int:
        """Elements from its first to its last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))

    def beat(self, elements: int) -> tuple[int, ...]:
        """The phase of its first element, and by how much each outer dim shifts it."""
        return (self.phase(elements), *(stride % elements for stride in self.strides[1:]))


@dataclass(frozen=True)
class _Choice:
    """A family and what it needs.

    ``num_covered`` is how many elements the grid covers; ``order`` are the space's dims as the kernel nests them, where not as they are.
    """

    family: Family
    accesses: tuple[Access, ...]
    elements: int
    index_bits: Literal[32, 64]
    num_covered: int
    sizes: tuple[int, ...]
    reasons: tuple[Reason, ...]
    threads: int = THREADS
    tile: Tile | None = None
    is_whole: bool = False
    steps: tuple[tuple[int, int], ...] = ()
    strip: Strip | None = None
    order: tuple[int, ...] = ()


def _vector_elements(walks: Sequence[_Walk], num_inputs: int) -> tuple[int, Reason]:
    """One element count for all operands: the widest uses a whole access, the narrower ones less; two where it is no output."""
    widest = max((walk.type for walk in walks if not walk.is_uniform), key=lambda t: t.itemsize)
    accesses = NARROWING_ACCESSES if all(walk.type.itemsize < widest.itemsize for walk in walks[num_inputs:]) else 1
    elements = accesses * ACCESS_BYTES // widest.itemsize
    why = f"{accesses * ACCESS_BYTES} bytes of the widest operand ({widest.name}), {accesses} access{'es' * (accesses > 1)} a thread"
    return elements, Reason("elements a thread", str(elements), why)


def _index_bits(space: IterSpace, walks: Sequence[_Walk], num_covered: int) -> tuple[Literal[32, 64], Reason]:
    if num_covered <= INT31_MAX and not space.needs_64bit([walk.type.itemsize for walk in walks]):
        return 32, Reason("index width", "32 bits", "every offset fits in 31 bits")
    return 64, Reason("index width", "64 bits", "an element count or a byte offset needs more than 31 bits")


def _choose_dense(walks: Sequence[_Walk], num_inputs: int) -> _Choice | None:
    """Every operand in one run that starts with a whole access."""
    if any(not walk.is_uniform and walk.strides not in ((), (1,)) for walk in walks):
        return None
    elements, why = _vector_elements(walks, num_inputs)
    if any(not walk.is_uniform and walk.phase(elements) for walk in walks):
        return None
    accesses: tuple[Access, ...] = tuple("uniform" if walk.is_uniform else "vector" for walk in walks)
    reasons = (
        Reason("family", "dense", "every operand walks memory in one aligned run, or is one element"),
        why,
        Reason("index width", "64 bits", "one 64-bit block offset costs nothing"),
    )
    n = walks[0].num_elements
    return _Choice("dense", accesses, elements, 64, n, (n,), reasons)


def _choose_rows(space: IterSpace, walks: Sequence[_Walk], num_inputs: int) -> _Choice | None:
    """The outputs in one run, and every input a run along each row or one element of it."""
    sizes = [dim.size for dim in space.dims] or [1]
    packed = tuple(math.prod(sizes[:d]) for d in range(len(space.dims)))
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    if any(walk.strides != packed for walk in outputs):
        return None
    elements, why = _vector_elements(walks, num_inputs)
    if len(sizes) > 1 and sizes[0] < elements:
        return None  # a thread's elements would lie in several rows as a rule
    # The first output sets the beat: its first aligned access is preceded by `pad` elements that are none of its own.
    pad = outputs[0].phase(elements)
    beat = outputs[0].beat(elements)
    loads = _accesses(inputs, beat, elements)
    if loads is None:
        return None
    stores: tuple[Access, ...] = tuple("vector" if walk.phase(elements) == pad else "elements" for walk in outputs)
    bits, width = _index_bits(space, walks, space.num_elements + pad + THREADS * elements)
    runtime = (space.num_elements, pad, *_divisions(space, bits), *_row_sizes(space, inputs, loads))
    rows = "one run" if len(sizes) == 1 else f"rows of {sizes[0]} elements"
    is_whole = _is_whole(sizes[0], elements, beat, (*loads, *stores))
    reasons = (
        Reason("family", "rows", f"the output is one run, every input {rows} or one element of each"),
        why,
        width,
        *_edge_reasons(is_whole, inputs, loads),
    )
    return _Choice(
        "rows",
        (*loads, *stores),
        elements,
        bits,
        space.num_elements + pad,
        runtime,
        reasons,
        is_whole=is_whole,
        steps=_steps(inputs, loads, elements),
    )


def _choose_strips(space: IterSpace, walks: Sequence[_Walk], num_inputs: int, program: Program) -> _Choice | None:
    """Rows of whole accesses, along an outer dim of which an input repeats."""
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    if not program.has_functions or len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in outputs):
        return None
    elements, why = _vector_elements(walks, num_inputs)
    row, beat = space.dims[0].size, outputs[0].beat(elements)
    loads = _accesses(inputs, beat, elements)
    if loads is None or not _is_whole(row, elements, beat, loads) or any(walk.beat(elements) != beat for walk in outputs):
        return None
    runs = [walk for walk, access in zip(inputs, loads, strict=True) if access == "vector"]
    strip = _find_strip(space, runs, elements, program.num_functions)
    if strip is None:
        return None
    strip_loads: list[Access] = [
        "repeated" if access == "vector" and not walk.strides[strip.dim] else access for walk, access in zip(inputs, loads, strict=True)
    ]
    repeated = ", ".join(walk.name for walk, access in zip(inputs, strip_loads, strict=True) if access == "repeated")
    sizes = [row // elements, *(dim.size // strip.rows if d == strip.dim else dim.size for d, dim in enumerate(space.dims) if d)]
    num_strips = math.prod(sizes)
    bits, width = _index_bits(space, walks, num_strips + THREADS)
    slotted = IterSpace(tuple(Dim(size, ()) for size in sizes), num_strips)
    strides = [s for walk, access in zip(inputs, loads, strict=True) if access != "uniform" for s in walk.strides[1:]]
    strides += [s for walk in outputs for s in walk.strides[1:]]
    reasons = (
        Reason("family", "strips", f"rows of {row} elements, all of whole accesses; {repeated} repeats from row to row"),
        Reason("strip", f"{strip.rows} rows", f"of which {repeated} is read and widened once"),
        why,
        width,
    )
    elements *= strip.rows
    runtime = (num_strips, *_divisions(slotted, bits), *strides)
    strip_loads += ["vector" for _ in outputs]
    return _Choice("strips", tuple(strip_loads), elements, bits, num_strips * elements, runtime, reasons, is_whole=True, strip=strip)


def _find_strip(space: IterSpace, runs: Sequence[_Walk], elements: int, num_functions: int) -> Strip | None:
    """The dim along which all of ``runs`` but one repeat, and how many of its rows a thread can take."""
    for dim in range(1, len(space.dims)):
        if sum(walk.strides[dim] != 0 for walk in runs) != 1 or len(runs) < 2:
            continue
        for rows in STRIP_ROWS:
            is_inlined = num_functions * elements * rows <= MAX_INLINED_FUNCTIONS
            if is_inlined and not space.dims[dim].size % rows and space.num_elements >= LEAST_STRIPS * elements * rows:
                return Strip(dim, rows)
    return None


def _choose_pitched(space: IterSpace, walks: Sequence[_Walk], num_inputs: int) -> _Choice | None:
    """As ``rows``, for outputs with gaps between their rows."""
    if len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in walks[num_inputs:]):
        return None
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    elements, why = _vector_elements(walks, num_inputs)
    row = space.dims[0].size
    if row < elements:
        return None
    beat = outputs[0].beat(elements)
    loads = _accesses(inputs, beat, elements)
    if loads is None:
        return None
    stores: tuple[Access, ...] = tuple("vector" if walk.beat(elements) == beat else "elements" for walk in outputs)
    same_phase = not any(stride % elements for stride in outputs[0].strides[1:])
    slots = -(-(row + (beat[0] if same_phase else elements - 1)) // elements)
    num_slots = space.num_elements // row * slots
    bits, width = _index_bits(space, walks, num_slots * elements + THREADS * elements)
    slotted = IterSpace((Dim(slots, space.dims[0].strides), *space.dims[1:]), num_slots)
    outer = [stride for walk in outputs for stride in walk.strides[1:]]
    runtime = (num_slots, row, beat[0], *_divisions(slotted, bits), *_row_sizes(space, inputs, loads), *outer)
    is_whole = _is_whole(row, elements, beat, (*loads, *stores))
    reasons = (
        Reason("family", "pitched", f"rows of {row} elements, with gaps between those of the output"),
        why,
        width,
        *_edge_reasons(is_whole, inputs, loads),
    )
    return _Choice(
        "pitched",
        (*loads, *stores),
        elements,
        bits,
        num_slots * elements,  # the grid is counted in accesses
        runtime,
        reasons,
        is_whole=is_whole,
        steps=_steps(inputs, loads, elements),
    )


def _is_whole(size: int, elements: int, beat: tuple[int, ...], accesses: Sequence[Access]) -> bool:
    """Whether rows of ``size`` elements are made of whole accesses, each of them aligned for all operands."""
    return size % elements == 0 and not any(beat) and not {"realigned", "stepped", "turned_realigned", "elements"} & set(accesses)


def _accesses(inputs: Sequence[_Walk], beat: tuple[int, ...], elements: int) -> tuple[Access, ...] | None:
    """How inputs along rows are read where the first output's aligned accesses lie on ``beat``; ``None`` where one cannot be."""
    accesses: list[Access] = []
    for walk in inputs:
        if walk.is_uniform:
            accesses.append("uniform")
        elif not walk.strides or walk.strides[0] == 1:
            accesses.append("vector" if walk.beat(elements) == beat else "realigned")
        elif not walk.strides[0]:
            accesses.append("row")
        elif _is_stepped(walk, beat, elements):
            accesses.append("stepped")
        else:
            return None
    return tuple(accesses)


def _is_stepped(walk: _Walk, beat: tuple[int, ...], elements: int) -> bool:
    """Whether it is every few elements of words that are aligned alike in all rows; an access holds whole registers."""
    first, *outer = walk.beat(elements)
    step, itemsize = walk.strides[0], walk.type.itemsize
    is_near = step * itemsize <= MAX_STEP_BYTES and elements * itemsize % REGISTER_BYTES == 0
    return is_near and first < step and not any(outer) and not any(beat)


def _steps(inputs: Sequence[_Walk], loads: Sequence[Access], elements: int) -> tuple[tuple[int, int], ...]:
    return tuple(
        (walk.strides[0], walk.phase(elements)) if access == "stepped" else (1, 0) for walk, access in zip(inputs, loads, strict=True)
    )


def _row_sizes(space: IterSpace, inputs: Sequence[_Walk], loads: Sequence[Access]) -> list[int]:
    """The outer strides of each input that has rows, and the span of those read by aligned words: elements from its first to its last."""
    numbers: list[int] = []
    for walk, access in zip(inputs, loads, strict=True):
        numbers += walk.strides[1:] if access != "uniform" else ()
        if access in ("realigned", "stepped"):
            numbers.append(walk.span([dim.size for dim in space.dims]))
    return numbers


def _edge_reasons(is_whole: bool, inputs: Sequence[_Walk], loads: Sequence[Access]) -> list[Reason]:
    if is_whole:
        return [Reason("edges", "none", "every row is made of whole aligned accesses")]
    named = list(zip((walk.name for walk in inputs), loads, strict=True))
    realigned = ", ".join(name for name, access in named if access in ("realigned", "turned_realigned"))
    stepped = ", ".join(name for name, access in named if access == "stepped")
    why = "not aligned to whole accesses: aligned words are read and shifted in registers"
    reasons = [Reason("realigned", realigned, why)] if realigned else []
    return [*reasons, Reason("stepped", stepped, "whole words are read, and every few elements of them taken")] if stepped else reasons


def _choose_tile(space: IterSpace, walks: Sequence[_Walk], num_inputs: int) -> _Choice | None:
    """Some inputs run along another dim than the outputs, through shared memory; the others along the outputs' rows."""
    if len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in walks[num_inputs:]):
        return None
    widest = max((walk.type for walk in walks if walk.strides[0] == 1), key=lambda t: t.itemsize)
    width = ACCESS_BYTES // widest.itemsize
    for across in _turned_dims(walks[:num_inputs]):
        turned = [walk for walk in walks[:num_inputs] if walk.strides[0] > 1 and walk.strides[across] == 1]
        turned_bytes = [walk.type.itemsize for walk in turned]
        tile = _fit_tile(space.dims[0].size, space.dims[across].size, width, walks[num_inputs].type.itemsize, turned_bytes)
        if tile:
            break
    else:
        return None
    order = [0, across, *(d for d in range(1, len(space.dims)) if d != across)]
    dims = [space.dims[d] for d in order]
    walks = [replace(walk, strides=tuple(walk.strides[d] for d in order)) for walk in walks]
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    beat = outputs[0].beat(width)
    loads = tuple(_tile_access(walk, beat, width) for walk in inputs)
    if "turned_realigned" in loads or any(walk.phase(ACCESS_BYTES // walk.type.itemsize) for walk in turned):
        tile = _in_rings(tile, min(turned_bytes))
    stores: tuple[Access, ...] = tuple("vector" if walk.beat(width) == beat else "elements" for walk in outputs)
    is_whole = _is_whole(dims[0].size, width, beat, (*loads, *stores))
    is_whole = is_whole and not tile.ring and not any(dims[1].size * walk.type.itemsize % ACCESS_BYTES for walk in turned)
    if any(stride % width for stride in outputs[0].strides[1:]):
        # Lines that begin at sectors, not at any 16 bytes, write none in two parts. On an H200, of the wall: bf16 0.913 against 0.859,
        # fp32 0.916 against 0.867, fp64 0.933 against 0.897; at 64 bytes bf16 0.907.
        tile = replace(tile, halo=max(width, SECTOR_BYTES // outputs[0].type.itemsize))
    if sum(turned_bytes) * (tile.columns + tile.halo) * (tile.ring or tile.lines) > STATIC_SHARED_BYTES:
        return None  # more operands than have rings of 32 bytes
    num_across = -(-(dims[0].size + (tile.halo - 1 if tile.halo else beat[0])) // tile.columns)
    num_along = -(-dims[1].size // tile.lines)
    # Neighbouring blocks write neighbouring columns: groups of 2 to 16 that read along the lines first were up to 5 % slower on an H200.
    blocks = [num_across, num_along, *(dim.size for dim in dims[2:])]
    grid = IterSpace(tuple(Dim(size, ()) for size in blocks), math.prod(blocks))
    bits, index_width = _index_bits(space, walks, space.num_elements)
    strides: list[int] = []
    for walk, access in zip(inputs, loads, strict=True):
        if access != "uniform":
            strides += [stride for d, stride in enumerate(walk.strides) if d not in _FAST_DIM.get(access, ())]
        if access in ("realigned", "turned", "turned_realigned"):
            strides.append(walk.span([dim.size for dim in dims]))
    strides += [stride for walk in outputs for stride in walk.strides[1:]]
    num_accesses = tile.columns * tile.lines // (width * tile.depth)
    threads = num_accesses // -(-num_accesses // TILE_THREADS)
    elements = tile.columns * tile.lines // threads
    runtime = (dims[0].size, dims[1].size, beat[0], *_divisions(grid, 32), *strides)
    num_covered = grid.num_elements * tile.columns * tile.lines
    why = f"{ACCESS_BYTES} bytes of the widest operand along the output ({widest.name})"
    reasons = (*_tile_reasons(tile, turned, outputs[0]), Reason("elements an access", str(width), why), index_width)
    reasons += (*_edge_reasons(is_whole, inputs, loads), *_narrow_reasons(loads, stores))
    return _Choice("tile", (*loads, *stores), elements, bits, num_covered, runtime, reasons, threads, tile, is_whole, order=tuple(order))


_FAST_DIM: dict[Access, tuple[int, ...]] = {"turned": (1,), "turned_realigned": (1,), "vector": (0,), "realigned": (0,), "row": (0,)}
"""The dims of a tile along which the stride is known: 1, or 0 of a row's one element."""


def _tile_reasons(tile: Tile, turned: Sequence[_Walk], output: _Walk) -> list[Reason]:
    names = ", ".join(walk.name for walk in turned)
    num_elements = (tile.columns + tile.halo) * (tile.ring or tile.lines)
    why = (
        f"{tile.columns * output.type.itemsize}-byte runs of the output, {tile.lines * turned[0].type.itemsize}-byte runs of "
        f"{turned[0].name}, {sum(walk.type.itemsize for walk in turned) * num_elements} bytes of shared memory"
    )
    reasons = [
        Reason("family", "tile", f"{names} runs along another dim than the output: turned in shared memory"),
        Reason("tile", f"{tile.columns} x {tile.lines}", why),
    ]
    if tile.halo:
        why = f"the output's lines are not aligned alike: each begins its accesses anew, {tile.halo} more columns are loaded"
        reasons.append(Reason("halo", str(tile.halo), why))
    if tile.ring:
        why = "a turned operand is not aligned: its aligned words are copied, and elements picked from where they then lie"
        reasons.append(Reason("ring", str(tile.ring), why))
    return reasons


def _narrow_reasons(loads: Sequence[Access], stores: Sequence[Access]) -> list[Reason]:
    reasons = []
    if "elements" in stores:
        reasons.append(Reason("stores", "elements", "an output is not aligned as the first one is"))
    if "strided" in loads:
        reasons.append(Reason("loads", "strided", "an operand runs along neither dim of the tile: one element an access"))
    return reasons


def _turned_dims(inputs: Sequence[_Walk]) -> list[int]:
    """The dims along which inputs run that do not run along the innermost, those of most bytes first."""
    weights: dict[int, int] = {}
    for walk in inputs:
        if walk.strides[0] > 1 and 1 in walk.strides:
            dim = walk.strides.index(1)
            weights[dim] = weights.get(dim, 0) + walk.type.itemsize
    return sorted(weights, key=lambda dim: -weights[dim])


def _tile_access(walk: _Walk, beat: tuple[int, ...], width: int) -> Access:
    """How a tile reads an input, where the first output's aligned accesses lie on ``beat``."""
    if walk.is_uniform:
        return "uniform"
    if walk.strides[0] > 1 and walk.strides[1] == 1:
        own = ACCESS_BYTES // walk.type.itemsize
        return "turned_realigned" if any(s % own for d, s in enumerate(walk.strides) if d != 1) else "turned"
    if walk.strides[0] > 1:
        return "strided"
    if walk.strides[0] == 0:
        return "row"
    return "vector" if walk.beat(width) == beat else "realigned"


def _fit_tile(num_columns: int, num_lines: int, width: int, out_bytes: int, turned_bytes: Sequence[int]) -> Tile | None:
    """The largest tile within ``TILE_BYTES``, its runs in the output and in the turned operands of about the same length.

    Of an output that is wider than the turned operands, twice as many bytes at most: 128 a thread.
    ``None`` where the space is smaller than half the smallest tile: 128 bytes of the output by one access of each turned operand.
    """
    depth = min(max(1, 4 // min(turned_bytes)), ACCESS_BYTES // max(turned_bytes))
    least_columns, least_lines = TILE_ACROSS * width, max(ACCESS_BYTES // min(turned_bytes), 4 * depth)
    most_columns, most_lines = 1 << (num_columns - 1).bit_length(), 1 << (num_lines - 1).bit_length()
    fitting = []
    for columns in (1 << k for k in range(least_columns.bit_length() - 1, max(most_columns, least_columns).bit_length())):
        for lines in (1 << k for k in range(least_lines.bit_length() - 1, max(most_lines, least_lines).bit_length())):
            if columns * lines * max(sum(turned_bytes), out_bytes // 2) <= TILE_BYTES and all(
                width * lines * size >= 8 * ACCESS_BYTES for size in turned_bytes
            ):
                run, turned_run = columns * out_bytes, lines * max(turned_bytes)
                fitting.append((columns * lines, -max(run, turned_run) // min(run, turned_run), lines, columns))
    if not fitting or 2 * num_columns < least_columns or 2 * num_lines < least_lines:
        return None
    _, _, lines, columns = max(fitting)
    return Tile(columns, lines, width, depth)


def _in_rings(tile: Tile, least_bytes: int) -> Tile:
    """The same tile, each column in a ring of so many lines: fewer lines, so that the word that both ends of a column cut fits as well.

    A warp computes one access of four lines; as many lines as leave all warps of a block with the same number of accesses.
    """
    at_once, most_warps = _WARP_THREADS // TILE_ACROSS, TILE_THREADS // _WARP_THREADS
    ring, lines = tile.lines, tile.lines - ACCESS_BYTES // least_bytes
    if lines < max(ring // 2, at_once):
        ring, lines = 2 * ring, ring
    across = tile.columns // tile.width // TILE_ACROSS
    accesses = next(n for n in range(lines // at_once * across, 0, -across) if n % -(-n // most_warps) == 0)
    return replace(tile, lines=accesses // across * at_once, depth=1, ring=ring)


def _choose_strided(space: IterSpace, walks: Sequence[_Walk]) -> _Choice:
    """Anything, one element an access."""
    accesses: tuple[Access, ...] = tuple("uniform" if walk.is_uniform else "strided" for walk in walks)
    bits, width = _index_bits(space, walks, space.num_elements)
    broken = next((walk.name for row, walk in enumerate(walks) if not walk.is_uniform and not space.is_dense(row)), walks[-1].name)
    reasons = (
        Reason("family", "strided", f"{broken} does not walk memory in one run: {len(space.dims)} dims after coalescing"),
        Reason("elements a thread", str(STRIDED_ELEMENTS), "several loads in flight"),
        width,
    )
    strides = [stride for walk in walks if not walk.is_uniform for stride in walk.strides]
    runtime = (space.num_elements, *_divisions(space, bits), *strides)
    return _Choice("strided", accesses, STRIDED_ELEMENTS, bits, space.num_elements, runtime, reasons)


def _divisions(space: IterSpace, bits: Literal[32, 64]) -> list[int]:
    """Size, multiplier and shift of each dim but the outermost."""
    numbers = []
    for dim in space.dims[:-1]:
        multiplier, shift = magic_divisor(dim.size, bits)
        # Kernel parameters are signed 64-bit integers: the same bits.
        numbers += [dim.size, multiplier - (1 << 64) if multiplier >> 63 else multiplier, shift]
    return numbers
