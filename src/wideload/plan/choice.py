"""How an operand walks the iteration space, and what a family says of a call that it takes; what the families' modules share.

Integers and reasons; no family is preferred here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from wideload.dtypes import ScalarType
from wideload.layout import INT31_MAX, IterSpace, magic_divisor
from wideload.plan.tuning import Tuning
from wideload.plan.variant import ACCESS_BYTES, REGISTER_BYTES, THREADS, Access, Columns, Family, Strip, Tile

__all__ = [
    "MAX_STEP_BYTES",
    "Choice",
    "Reason",
    "Walk",
    "are_rows_whole",
    "choose_accesses",
    "choose_elements",
    "choose_index_bits",
    "choose_kept",
    "division_numbers",
    "edge_reasons",
    "find_steps",
]

MAX_STEP_BYTES = REGISTER_BYTES
"""From one element to the next of an operand that is read whole and picked from, at most: every register then has one that is wanted. Where
one had none, ptxas would make narrow accesses of the wide one."""


KEPT_AFTER_BYTES = 8 << 20
"""What passes through the L2 between two reads of an element from where on the second may miss it: a fifth of an A100's, a sixth of an
H200's."""
MAX_KEPT_BYTES = 20 << 20
"""Of all that the L2 is asked to keep: half of an A100's 40 MiB (gpus.csv), which the rest has to pass through."""


STARTING_BYTES = 6 << 10
"""That a block moves, from which on it lets the next kernel start whatever the grid: each block that does so costs an H200 1.23 ns, in
which its memory moves 5.3 kB. Of 2^27 bf16 silu, 4 KiB a block, takes 162 us with and 128 us without; an addition, 6 KiB, 188 us."""


class Reason(NamedTuple):
    """One choice of the planner and why it was made."""

    choice: str
    value: str
    why: str


class Walk(NamedTuple):
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

    @property
    def varies(self) -> bool:
        """Whether it is another element from one to the next along the fast dim."""
        return not self.is_uniform and (not self.strides or self.strides[0] != 0)

    def phase(self, elements: int) -> int:
        """How many elements its address lies behind an aligned access of ``elements``."""
        return self.phase_bytes % (elements * self.type.itemsize) // self.type.itemsize

    def span(self, sizes: Sequence[int]) -> int:
        """Elements from its first to its last."""
        return 1 + sum((size - 1) * stride for size, stride in zip(sizes, self.strides, strict=True))

    def beat(self, elements: int) -> tuple[int, ...]:
        """The phase of its first element, and by how much each outer dim shifts it."""
        return (self.phase(elements), *(stride % elements for stride in self.strides[1:]))


class Choice(NamedTuple):
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
    columns: Columns | None = None
    order: tuple[int, ...] = ()


def choose_elements(walks: Sequence[Walk], num_inputs: int, tuning: Tuning) -> tuple[int, Reason]:
    """One element count for all operands: the widest uses whole accesses, the narrower ones less; more where it is no output.

    Operands of one element a row are none of them.
    """
    widest = max((walk.type for walk in walks if walk.varies), key=lambda t: t.itemsize)
    is_narrowing = all(walk.type.itemsize < widest.itemsize for walk in walks[num_inputs:])
    accesses = tuning.narrowing_accesses if is_narrowing else tuning.accesses
    elements = accesses * ACCESS_BYTES // widest.itemsize
    why = f"{accesses * ACCESS_BYTES} bytes of the widest operand ({widest.name}), {accesses} access{'es' * (accesses > 1)} a thread"
    return elements, Reason("elements a thread", str(elements), why)


FILL_BLOCKS = 128
"""Blocks below which each is given less: so many SMs have work (A100 108, H200 132, B200 148)."""


def share_of_block(count: int) -> int:
    """Of so many things, a block's where as many blocks as fill a GPU share them: a power of two."""
    return 1 << max(count // FILL_BLOCKS, 1).bit_length() - 1


def choose_index_bits(space: IterSpace, walks: Sequence[Walk], num_covered: int) -> tuple[Literal[32, 64], Reason]:
    """The bits in which every element of the grid and every byte offset can be counted."""
    if num_covered <= INT31_MAX and not space.needs_64bit([walk.type.itemsize for walk in walks]):
        return 32, Reason("index width", "32 bits", "every offset fits in 31 bits")
    return 64, Reason("index width", "64 bits", "an element count or a byte offset needs more than 31 bits")


def are_rows_whole(size: int, elements: int, beat: tuple[int, ...], accesses: Sequence[Access]) -> bool:
    """Whether rows of ``size`` elements are made of whole accesses, each of them aligned for all operands."""
    return size % elements == 0 and not any(beat) and not {"realigned", "stepped", "turned_realigned", "elements"} & set(accesses)


def choose_kept(num_inputs: int, walks: Sequence[Walk], sizes: Sequence[int]) -> tuple[bool, ...]:
    """Of each input, whether the L2 is to keep it: an outer dim reads all of it again, after more than what would still be there.

    RoPE reads its tables again for every batch: of queries and keys of 4 batches, 6.4 MiB of tables, it stands at 0.991 of the wall on an
    H200, without this at 0.943 (benchmarks/operators.py).
    """

    def nbytes(walk: Walk, rank: int) -> int:
        """Of its elements in the inner ``rank`` dims."""
        return math.prod(size for size, stride in zip(sizes[:rank], walk.strides, strict=False) if stride) * walk.type.itemsize

    kept, room = [], MAX_KEPT_BYTES
    for walk in walks[:num_inputs]:
        ends = [d for d in range(len(sizes)) if not walk.strides[d] and any(walk.strides[:d])]  # of the dims between two reads
        own = nbytes(walk, len(sizes))
        kept.append(own <= room and any(sum(nbytes(w, d) for w in walks) >= KEPT_AFTER_BYTES for d in ends))
        room -= own * kept[-1]
    return tuple(kept)


def choose_accesses(inputs: Sequence[Walk], beat: tuple[int, ...], elements: int) -> tuple[Access, ...] | None:
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


def _is_stepped(walk: Walk, beat: tuple[int, ...], elements: int) -> bool:
    """Whether it is every few elements of words that are aligned alike in all rows; an access holds whole registers."""
    first, *outer = walk.beat(elements)
    step, itemsize = walk.strides[0], walk.type.itemsize
    is_near = step * itemsize <= MAX_STEP_BYTES and elements * itemsize % REGISTER_BYTES == 0
    return is_near and first < step and not any(outer) and not any(beat)


def find_steps(inputs: Sequence[Walk], loads: Sequence[Access], elements: int) -> tuple[tuple[int, int], ...]:
    """``Variant.steps`` of the inputs."""
    return tuple(
        (walk.strides[0], walk.phase(elements)) if access == "stepped" else (1, 0) for walk, access in zip(inputs, loads, strict=True)
    )


def edge_reasons(is_whole: bool, inputs: Sequence[Walk], loads: Sequence[Access]) -> list[Reason]:
    """What is said of rows' ends, and of operands that are not aligned there."""
    if is_whole:
        return [Reason("edges", "none", "every row is made of whole aligned accesses")]
    named = list(zip((walk.name for walk in inputs), loads, strict=True))
    realigned = ", ".join(name for name, access in named if access == "realigned")
    stepped = ", ".join(name for name, access in named if access == "stepped")
    why = "not aligned to whole accesses: aligned words are read and shifted in registers"
    reasons = [Reason("realigned", realigned, why)] if realigned else []
    return [*reasons, Reason("stepped", stepped, "whole words are read, and every few elements of them taken")] if stepped else reasons


def division_numbers(space: IterSpace, bits: Literal[32, 64]) -> list[int]:
    """Size, multiplier and shift of each dim but the outermost."""
    numbers = []
    for dim in space.dims[:-1]:
        multiplier, shift = magic_divisor(dim.size, bits)
        # Kernel parameters are signed 64-bit integers: the same bits.
        numbers += [dim.size, multiplier - (1 << 64) if multiplier >> 63 else multiplier, shift]
    return numbers
