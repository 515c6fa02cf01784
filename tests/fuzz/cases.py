"""Draws a case of the fuzz from an integer: a program, and for each operand a shape, a layout and values. Then makes its tensors.

Knows strides and bytes; nothing of kernels or of what torch answers.
"""

from __future__ import annotations

import functools
import math
import random
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from tests.fuzz.programs import PROGRAMS, Program

__all__ = ["Case", "Fault", "Layout", "Operand", "Out", "draw_case", "draw_out", "make_operands", "make_tensor", "program_of"]

INPUT_LAYOUTS = "contiguous offset stepped pitched expanded transposed permuted channels_last overlapping any".split()
ALONG = "contiguous offset pitched pitched expanded transposed any".split()
"""Of the operands beside one that is transposed."""
WHOLE = "contiguous contiguous contiguous contiguous pitched any".split()
"""Of operands whose rows are whole accesses as a rule."""
OUT_LAYOUTS = "contiguous offset stepped pitched pitched pitched transposed permuted channels_last any".split()

SIZES = (
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    12,
    13,
    15,
    16,
    17,
    31,
    32,
    33,
    36,
    63,
    64,
    65,
    97,
    127,
    128,
    129,
    130,
    255,
    256,
    257,
    1000,
    1023,
    4096,
    65537,
)
"""Primes, and both sides of vectors (4 to 16 elements), blocks (512, 1024 elements) and tiles (16 to 128)."""

PLANE_SIZES = (15, 16, 31, 32, 33, 40, 63, 64, 65, 72, 96, 127, 128, 129, 200, 255, 257, 500, 1000)
"""Of two dims that a transposed operand turns: both sides of half tiles and tiles."""

ROW_SIZES, NUM_ROWS = (16, 32, 48, 64, 80, 128, 144, 512), (2, 4, 6, 8, 12, 16)
"""Rows of whole accesses of every dtype, and how many of them: of two and of four at a time."""

MAX_DIMS = 5
SLACK = 4
"""Elements of a storage for each element of the largest shape, at most; a layout that needs more is drawn contiguous."""
MAX_START = 4096

Fault = Literal["shapes", "cast", "self-overlap", "partial overlap"]
"""What must be refused: shapes that do not broadcast, or an ``out=`` that torch would not write."""


Outs = Literal["none", "fresh", "converted", "in place"]
"""Where results go: into new tensors, or into ``out=`` of their own dtype, of another, or that is an argument."""


@dataclass(frozen=True)
class Layout:
    """Where the elements of a tensor lie in a storage of ``num_elements``, in elements."""

    kind: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    num_elements: int

    def __str__(self) -> str:
        return f"{self.kind} {self.shape} strides {self.strides} offset {self.offset} of {self.num_elements}"


@dataclass(frozen=True)
class Operand:
    """A tensor argument.

    ``start`` says where its storage's values begin; ``same_as`` is an earlier argument that is passed again, ``beside`` one in whose
    storage this one lies as well. ``is_on_host`` marks a 0-dim CPU tensor beside CUDA tensors.
    """

    dtype: torch.dtype
    layout: Layout
    start: int
    same_as: int | None = None
    beside: int | None = None
    is_on_host: bool = False

    @property
    def owns_storage(self) -> bool:
        """Whether its storage is made for it."""
        return self.same_as is None and self.beside is None


@dataclass(frozen=True)
class Out:
    """One tensor of ``out=``; ``argument`` is the one whose storage it lies in: the same view of it, in place, or another."""

    dtype: torch.dtype
    layout: Layout
    start: int
    argument: int | None = None


@dataclass(frozen=True)
class Case:
    """What one seed stands for. ``out`` says whether results go into ``out=``, and how it is drawn once their shapes are known."""

    seed: int
    program: Program
    operands: tuple[Operand, ...]
    numbers: tuple[float | int, ...]
    out: Outs
    fault: Fault | None

    def __str__(self) -> str:
        lines = [f"{self.program.text}  # {self.program.name}, numerics={self.program.numerics!r}, oracle {self.program.oracle}"]
        for name, operand in zip("abcd", self.operands, strict=False):
            what = f"{name} = {'abcd'[operand.same_as]}" if operand.same_as is not None else f"{name}: {operand.dtype} {operand.layout}"
            where = f", in the storage of {'abcd'[operand.beside]}" if operand.beside is not None else ""
            lines.append(what + where + ", on the host" * operand.is_on_host)
        lines += [f"{name} = {value!r}" for name, value in zip(self.program.numbers, self.numbers, strict=True)]
        return "\n".join((*lines, f"out: {self.out}" + (f", fault: {self.fault}" if self.fault else "")))


def program_of(seed: int) -> int:
    """The position in ``PROGRAMS`` of a seed's program: its first draw."""
    return random.Random(seed).randrange(len(PROGRAMS))


def draw_case(seed: int, max_elements: int) -> Case:
    """The case of ``seed`` with shapes of up to ``max_elements``: the same in every process."""
    rng = random.Random(seed)
    program = PROGRAMS[rng.randrange(len(PROGRAMS))]
    is_turned = rng.random() < 0.15 and program.shapes != "row"
    base = _draw_plane(rng, program, max_elements) if is_turned else _draw_shape(rng, program, max_elements)
    fault: Fault | None = rng.choice(("shapes", "cast", "self-overlap", "partial overlap")) if rng.random() < 0.03 else None
    operands: list[Operand] = []
    for position, dtype in enumerate(program.dtypes):
        shape = base if is_turned and rng.random() < 0.7 else _operand_shape(rng, program, position, base)
        if fault == "shapes" and position == len(program.dtypes) - 1:
            changed = rng.randrange(len(base)) if base else -1
            shape = tuple(size + (dim == changed and size > 1) for dim, size in enumerate(base))
        twins = [i for i, other in enumerate(operands) if other.dtype == dtype and other.layout.shape == shape and other.owns_storage]
        if twins and rng.random() < 0.05:
            operands.append(replace(operands[twins[0]], same_as=twins[0]))
            continue
        kinds = ("transposed",) if is_turned and position == 0 else ALONG if is_turned else INPUT_LAYOUTS
        kinds = WHOLE if program.shapes == "row" else kinds
        layout = _draw_fitting(rng, rng.choice(kinds), shape, SLACK * max_elements, is_input=True)
        roomy = [
            i
            for i, other in enumerate(operands)
            if other.dtype == dtype and other.layout.num_elements >= layout.num_elements and other.owns_storage and not other.is_on_host
        ]
        beside = rng.choice(roomy) if roomy and rng.random() < 0.1 else None
        is_on_host = program.takes_numbers and not shape and beside is None and rng.random() < 0.3
        operands.append(Operand(dtype, layout, rng.randrange(MAX_START), None, beside, is_on_host))
    if all(operand.is_on_host for operand in operands):
        operands = [replace(operand, is_on_host=False) for operand in operands]
    numbers = tuple(
        rng.choice((0.5, -1.25, 3.0, -0.0, math.inf, math.nan)) if name == "s" else rng.choice((0, 1, -3, 7)) for name in program.numbers
    )
    kinds_of_out: tuple[Outs, ...] = ("none", "fresh", "converted", "in place")
    out = rng.choices(kinds_of_out, (1, 5, 2, 1) if is_turned and len(operands) == 1 else (8, 5, 2, 3))[0]
    return Case(seed, program, tuple(operands), numbers, "fresh" if fault and fault != "shapes" else out, fault)


# ---- shapes


def _draw_shape(rng: random.Random, program: Program, max_elements: int) -> tuple[int, ...]:
    """Sizes around vectors, blocks and tiles; a tenth have a size of 0, a third one of 1."""
    if program.shapes == "row":
        rows = [rng.choice(NUM_ROWS), rng.choice(ROW_SIZES)]
        return (rng.randint(1, 4), *rows) if rng.random() < 0.3 and math.prod(rows) * 4 <= max_elements else tuple(rows)
    least = 0 if program.shapes == "broadcast" else 2
    num_dims = rng.choices(range(least, MAX_DIMS + 1), (2, 6, 12, 6, 2, 1)[least:])[0]
    room = int(max_elements ** math.sqrt(rng.random()))
    sizes: list[int] = []
    for _ in range(num_dims):
        size = rng.choice([size for size in SIZES if size <= room] or [1])
        draw = rng.random()
        size = 0 if draw < 0.015 else 1 if draw < 0.12 else size
        sizes.append(size)
        room //= max(1, size)
    rng.shuffle(sizes)
    return _fitted(rng, program, sizes)


def _draw_plane(rng: random.Random, program: Program, max_elements: int) -> tuple[int, ...]:
    """Two last sizes around tiles, and sometimes another dim before them."""
    last = [rng.choice([size for size in PLANE_SIZES if size * PLANE_SIZES[0] <= max_elements])]
    last.append(rng.choice([size for size in PLANE_SIZES if size * last[0] <= max_elements]))
    rng.shuffle(last)
    room = max_elements // (last[0] * last[1])
    return _fitted(rng, program, [rng.randint(1, min(room, 4)), *last] if rng.random() < 0.3 else last)


def _fitted(rng: random.Random, program: Program, sizes: list[int]) -> tuple[int, ...]:
    """The sizes as the program wants them."""
    if program.shapes == "square":
        sizes[-1] = sizes[-2] = min(sizes[-1], sizes[-2]) if rng.random() < 0.3 else math.isqrt(sizes[-1] * sizes[-2])
    if program.shapes in ("even", "rope"):
        sizes[-1] += sizes[-1] % 2
    if program.shapes == "outer":
        sizes[-1] = math.isqrt(sizes[-1])
    if program.shapes == "heads":
        sizes[-1] += -sizes[-1] % 3
    return tuple(sizes)


def _operand_shape(rng: random.Random, program: Program, position: int, base: tuple[int, ...]) -> tuple[int, ...]:
    if program.shapes == "row":
        return base if position == 0 else base[-1:] if rng.random() < 0.9 else (*base[:-1], 1)
    if (
        program.shapes in ("equal", "square", "even", "heads", "outer")
        or (program.shapes == "rope" and position == 0)
        or rng.random() < 0.45
    ):
        return base
    kept = 1 if program.shapes == "rope" else 0  # of the last dims
    shape = base[rng.randint(0, len(base) - kept) :]
    if not shape and program.rounds_scalars:
        return (1,) * (len(base) > 0)
    return tuple(1 if dim < len(shape) - kept and rng.random() < 0.25 else size for dim, size in enumerate(shape))


# ---- layouts


def _draw_fitting(rng: random.Random, kind: str, shape: tuple[int, ...], max_elements: int, *, is_input: bool, guard: int = 0) -> Layout:
    """A layout of ``shape`` in a storage of up to ``max_elements``; only inputs may have several elements in one cell.

    At least ``guard`` elements before and behind are none of the tensor's. An input's storage ends with its last element, as a rule.
    """
    layout = _draw_layout(rng, kind, shape, guard, is_input)
    return layout if layout.num_elements <= max_elements else _draw_layout(rng, "contiguous", shape, guard, is_input)


def _draw_layout(rng: random.Random, kind: str, shape: tuple[int, ...], guard: int, is_input: bool) -> Layout:
    ndim = len(shape)
    order = list(range(ndim))  # outermost first
    steps, pads, stretched = [1] * ndim, [0] * ndim, [False] * ndim
    if kind == "transposed" and ndim > 1:
        order[-1], order[-2] = order[-2], order[-1]
    elif kind == "channels_last" and ndim > 2:
        order = [0, *range(2, ndim), 1]
    elif kind in ("permuted", "any", "transposed", "channels_last"):
        rng.shuffle(order)
    if kind in ("stepped", "any"):
        steps = [rng.choice((1, 1, 1, 2, 3)) for _ in shape]
        pads = [rng.choice((0, 0, 0, 1, 2)) for _ in shape]
    if kind == "pitched" and ndim:
        pads[-1] = rng.choice((1, 2, 3, 4, 8, 16, 5, 7))
    if kind == "expanded" or (kind == "any" and is_input):
        stretched = [rng.random() < 0.4 for _ in shape]
    strides, held = [0] * ndim, 1
    for dim in reversed(order):
        if stretched[dim]:
            continue
        strides[dim] = held * steps[dim]
        held *= max(1, shape[dim] * steps[dim] + pads[dim])
    if kind == "overlapping":
        strides = [rng.randint(0, 3) if rng.random() < 0.7 else stride for stride in strides]
    if rng.random() < 0.1:  # of a dim with one element the stride is anything
        strides = [rng.choice((0, 1, 7, 1000)) if size == 1 else stride for size, stride in zip(shape, strides, strict=True)]
    offset = guard + (0 if kind == "contiguous" or rng.random() < 0.3 else rng.choice((1, 2, 3, 4, 5, 7, 8, 16, 17)))
    end = offset + (0 if 0 in shape else 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)))
    return Layout(kind, shape, tuple(strides), offset, end + guard + (rng.randint(1, 9) if rng.random() < 0.2 else 0))


def draw_out(case: Case, results: list[torch.Tensor], max_elements: int) -> tuple[Out, ...]:
    """Where results go, once their dtypes and shapes are known: with guards around them, or an argument where one fits."""
    rng = random.Random(f"out {case.seed}")
    outs: list[Out] = []
    for result in results:
        shape, dtype = tuple(result.shape), result.dtype
        if case.out == "converted" and case.program.oracle != "double":
            dtype = rng.choice([other for other in _CONVERTED if torch.can_cast(dtype, other)])
        if case.fault == "cast":
            dtype = next((other for other in (torch.int8, torch.bool) if not torch.can_cast(dtype, other)), dtype)
        fitting = [
            position
            for position, operand in enumerate(case.operands)
            if operand.layout.shape == shape
            and torch.can_cast(dtype, operand.dtype)
            and (case.program.oracle != "double" or operand.dtype == dtype)
            and operand.owns_storage
            and not any(other.beside is not None for other in case.operands)
            and not _overlaps(operand.layout)
            and not operand.is_on_host
            and position not in [out.argument for out in outs]
        ]
        if case.out == "in place" and fitting:
            argument = rng.choice(fitting)
            outs.append(Out(case.operands[argument].dtype, case.operands[argument].layout, case.operands[argument].start, argument))
            continue
        shifted = [
            position
            for position, operand in enumerate(case.operands)
            if case.fault == "partial overlap" and operand.layout.kind == "offset" and operand.layout.offset and operand.owns_storage
            if operand.layout.shape == shape and operand.dtype == dtype and result.numel() > 1 and not outs
        ]
        if shifted:
            operand = case.operands[shifted[0]]
            outs.append(Out(dtype, replace(operand.layout, offset=operand.layout.offset - 1), operand.start, shifted[0]))
            continue
        kind, guard = rng.choice(OUT_LAYOUTS), rng.choice((1, 8, 16, 17))
        layout = _draw_fitting(rng, kind, shape, SLACK * max_elements, is_input=False, guard=guard)
        if case.fault == "self-overlap" and result.numel() > 1:
            layout = Layout("expanded", shape, (0,) * len(shape), 0, 1)
        outs.append(Out(dtype, layout, rng.randrange(MAX_START)))
    return tuple(outs)


_CONVERTED = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def _overlaps(layout: Layout) -> bool:
    """Whether two elements may share a cell: all other kinds nest their dims."""
    return layout.kind in ("overlapping", "expanded", "any")


# ---- tensors


@functools.cache
def _values(dtype: torch.dtype, device: str, count: int, *, tame: bool = False) -> torch.Tensor:
    """``count`` values: of the dtype's whole range, small ones, and each special one; ``tame`` ones are finite and within +-2.5."""
    generator = torch.Generator().manual_seed(2**31 - 1)
    kind = torch.randint(0, 24, (count,), generator=generator)
    small = torch.randint(-9, 10, (count,), generator=generator)
    if dtype == torch.bool:
        return (small > 0).to(device)
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        wide = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        whole = torch.where(kind < 12, small.abs() if info.min == 0 else small, wide).to(dtype)
        for number, special in enumerate((info.min, info.max, info.max - 1)):
            whole[kind == 23 - number] = special
        return whole.to(device)
    real = torch.randn(count, generator=generator, dtype=torch.float64)
    if tame:
        return (real * 2).clamp(-2.5, 2.5).to(dtype).to(device)
    limits = torch.finfo(dtype)
    spread = real * 2.0 ** torch.randint(-12, 12, (count,), generator=generator)
    mixed = torch.where(kind < 8, small.double() / 2, torch.where(kind < 14, real, spread)).to(dtype)
    specials = (math.nan, math.inf, -math.inf, -0.0, 0.0, limits.max, limits.min, limits.tiny, limits.tiny / 4, -limits.tiny / 2)
    for number, value in enumerate(specials):
        mixed[kind == 23 - number] = value
    return mixed.to(device)


def make_tensor(part: Operand | Out, device: str, max_elements: int, *, tame: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor, and its whole storage as one row."""
    pool = _values(part.dtype, device, SLACK * max_elements + 2 * MAX_START, tame=tame)
    store = pool[part.start : part.start + part.layout.num_elements].clone()
    return store.as_strided(part.layout.shape, part.layout.strides, part.layout.offset), store


def make_operands(case: Case, device: str, max_elements: int) -> tuple[list[Any], list[torch.Tensor]]:
    """The arguments in order, and the storage of each tensor argument."""
    tensors: list[torch.Tensor] = []
    stores: list[torch.Tensor] = []
    tame = case.program.oracle == "double"
    for operand in case.operands:
        if operand.same_as is not None:
            tensor, store = tensors[operand.same_as], stores[operand.same_as]
        elif operand.beside is not None:
            store = stores[operand.beside]
            tensor = store.as_strided(operand.layout.shape, operand.layout.strides, operand.layout.offset)
        else:
            tensor, store = make_tensor(operand, "cpu" if operand.is_on_host else device, max_elements, tame=tame)
        tensors.append(tensor)
        stores.append(store)
    return [*tensors, *case.numbers], stores
