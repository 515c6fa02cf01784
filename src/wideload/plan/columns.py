"""The ``columns`` family: results that are added up over rows, beside those that are stored, all in rows of whole accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wideload.layout import Dim, IterSpace
from wideload.plan.choice import (
    MAX_KEPT_BYTES,
    Choice,
    Reason,
    Walk,
    are_rows_whole,
    choose_accesses,
    choose_elements,
    choose_index_bits,
    division_numbers,
)
from wideload.plan.tuning import Tuning
from wideload.plan.variant import MAX_INLINED_FUNCTIONS, THREADS, Access, Columns

__all__ = ["ACROSS", "Parts", "choose_columns", "find_parts"]

ACROSS = 16
"""Accesses of a row that a block takes, at most: 256 bytes, two cache lines. Its other threads are at other rows, so that it has few
columns and many rows: every row of partial sums is written, and read again."""

COLUMNS_THREADS = 256
"""Threads of a block that adds up rows of operands. With 8 loads in flight each and four such blocks an SM, and with 128, 4 and seven, of
which each loads the next rows before it computes, of the wall on an H200: the gradients of x and of the bias b of GELU(x + b) over 16384
rows of 11008 by tanh 0.958 and 0.951, by erf 0.954 and 0.953, over 131072 rows of 768 0.936 and 0.930."""

LOADS = 8
"""Accesses that a thread has in flight, of all operands together; one of each where there are more."""

TOTAL_LOADS = 4
"""The same of partial sums, of which a thread has few rows."""

MOST_SUMS = 8
"""Sums of a thread, up to which it has `LOADS` in flight; half as many with more, or beside fp64: 64 registers hold 16 sums of bf16's
scale and bias inside GELU and 4 accesses, and with 8 spilled 364 bytes (ptxas 13.0)."""

PART_ROWS = (256, 128, 64)
"""Rows that a block adds up, the most first. The partial sums of bf16, written in fp32 and read again, are 8 bytes a column: of 256 rows
with two operands and one result of 2 bytes an element, 0.5 % of what moves."""

LEAST_ROWS = 32
"""Fewer are left to a kernel that stores the terms."""

PART_COLUMNS = 128
"""Columns of such a block, of 2 bytes; where rows are shorter it has as many times more rows."""

BLOCKS_AT_ONCE = 528
"""Four an SM of an H200. Those that run at a time and share columns take turns at rows that are near each other: with seven blocks of 128
threads an SM, which came before these, 0.936 of the wall against 0.930 where each walks on its own, by tanh, 0.906 and 0.897 by erf."""

LEAST_TURNS = 1.5
"""Parts that a block slot of the GPU has, from which on each takes more rows. On an H200, of the wall, by tanh: over 8192 rows of 4096
0.886 in parts of 256 rows and 0.867 in parts of 128."""

FINER = 4
"""Times as many parts, of no less rows than the least, in the group that comes last: the slots of the GPU run out of parts at nearly the
same time. On an H200, of the wall, by tanh: over 16384 rows of 11008 0.958 and 0.946 without, over 8192 0.941 and 0.895."""

MOST_SPARE = 1.1
"""Times as many parts as are needed, at most: those that take turns come together, and of the last ones some have no rows."""

MOST_PARTS = 2048
"""Rows of partial sums, at most: what adds them up has few blocks where rows are short, and reads four rows a thread at a time."""

ACROSS_TOTALS = (8, 4, 2, 1)
"""`ACROSS` where partial sums are added up: as many as leave a thread no more than `ROWS_OF_TOTALS` rows, one after the other. With them
kept by the L2, of the wall on an H200, of 8192 rows of 11008 by erf 0.944 with 8 and 0.939 with 2, by tanh 0.947 and 0.942; not kept, with
8, 4, 2 and 1 0.939, 0.935, 0.934, 0.921, and 0.940, 0.936, 0.937, 0.926."""

ROWS_OF_TOTALS = 16

WIDEST_SUM = 8
"""Bytes of a sum in fp64."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows in parts, a block's each, which may have fewer at the end, or none. Those of a group take turns, a few rows each.

    A group has ``together`` parts of ``rows`` rows, the last of the ``groups`` ``finer`` times as many. Both are powers of two.
    """

    rows: int
    together: int
    groups: int
    finer: int

    @property
    def group_rows(self) -> int:
        """Rows of a group."""
        return self.rows * self.together

    @property
    def early(self) -> int:
        """Parts in all groups but the last."""
        return (self.groups - 1) * self.together

    @property
    def count(self) -> int:
        """All parts."""
        return self.early + self.together * self.finer

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a kernel finds its rows by."""
        shift = self.together.bit_length() - 1
        return self.group_rows, shift, self.early, self.groups - 1, shift + self.finer.bit_length() - 1


def find_parts(num_rows: int, num_columns: int) -> Parts:
    """How rows are shared among blocks.

    >>> find_parts(8192, 11008)
    Parts(rows=256, together=4, groups=8, finer=4)
    >>> find_parts(100, 128)
    Parts(rows=64, together=2, groups=1, finer=1)
    """
    blocks_of_row = num_rows * num_columns / PART_COLUMNS
    rows = next((rows for rows in PART_ROWS if blocks_of_row >= LEAST_TURNS * BLOCKS_AT_ONCE * rows), PART_ROWS[-1])
    finer = min(FINER, rows // PART_ROWS[-1])
    least = -(-num_rows // (MOST_PARTS * PART_ROWS[-1])) * PART_ROWS[-1]
    rows = max(rows * -(-PART_COLUMNS // num_columns), least)
    count = -(-num_rows // rows)
    together = min(max(BLOCKS_AT_ONCE * PART_COLUMNS // num_columns, 1), count)
    together = 1 << together.bit_length() - 1
    while -(-count // together) * together > MOST_SPARE * count:
        together //= 2
    groups = -(-count // together)
    while finer > 1 and (groups == 1 or groups - 1 + finer > MOST_PARTS // together):
        finer //= 2
    return Parts(rows, together, groups, finer)


def choose_columns(
    space: IterSpace,
    walks: Sequence[Walk],
    num_inputs: int,
    sums: Sequence[int],
    num_columns: int,
    is_total: bool,
    num_functions: int,
    tuning: Tuning,
) -> Choice | None:
    """Rows of ``num_columns`` elements, all in whole accesses and one fixed step apart; ``sums`` are the results that are added up.

    How each sum is walked is among the last strides of the space's dims. Where ``is_total`` one block adds up all rows of its columns.
    """
    if not space.num_elements:
        return None
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    row = space.dims[0]
    steps = {*row.strides[-len(sums) :], *(walk.strides[0] for walk in outputs)}
    if len(space.dims) > 2 or row.size != num_columns or steps != {1}:
        return None
    num_rows = space.num_elements // num_columns
    if num_rows < LEAST_ROWS and not is_total:
        return None
    elements, why = choose_elements(walks, num_inputs, tuning)
    beat = outputs[0].beat(elements)
    loads = choose_accesses(inputs, beat, elements)
    if loads is None or not are_rows_whole(num_columns, elements, beat, loads) or any(walk.beat(elements) != beat for walk in outputs):
        return None
    accesses: list[Access] = [
        "repeated" if access == "vector" and not any(walk.strides[1:]) else access for walk, access in zip(inputs, loads, strict=True)
    ]
    num_slots = num_columns // elements
    parts = Parts(num_rows, 1, 1, 1) if is_total else find_parts(num_rows, num_columns)
    threads = THREADS if is_total else COLUMNS_THREADS
    most = next((n for n in ACROSS_TOTALS if num_rows * n <= ROWS_OF_TOTALS * threads), 1) if is_total else ACROSS
    across = min(most, 1 << (num_slots - 1).bit_length())
    num_loads = TOTAL_LOADS if is_total else LOADS
    if not is_total and (len(sums) * elements > MOST_SUMS or any(walk.type.itemsize == WIDEST_SUM for walk in walks)):
        num_loads //= 2
    rows = num_loads // max(1, accesses.count("vector"))
    if not is_total:
        rows = min(rows, parts.rows // parts.finer * across // threads)
    if num_functions:
        rows = min(rows, MAX_INLINED_FUNCTIONS // (num_functions * elements))
    rows = max(rows, 1)
    tiles = -(-num_slots // across)
    covered = tiles * parts.count * threads * elements * rows
    bits, width = choose_index_bits(space, walks, covered)
    keeps_sums = not is_total and parts.count * num_columns * WIDEST_SUM * len(sums) <= MAX_KEPT_BYTES
    strides = [sum(walk.strides[1:]) for walk, access in zip(inputs, accesses, strict=True) if access in ("vector", "row")]
    strides += [sum(walk.strides[1:]) for at, walk in enumerate(outputs) if at not in sums]
    blocks = IterSpace(tuple(Dim(size, ()) for size in (tiles, parts.count)), tiles * parts.count)
    runtime = (num_rows, num_columns, *parts.numbers, *division_numbers(blocks, bits), *strides)
    stores: list[Access] = ["summed" if at in sums else "vector" for at in range(len(outputs))]
    reasons = (
        Reason("family", "columns", f"{num_rows} rows of {num_columns} elements, all of whole accesses; results are added up over rows"),
        Reason("columns", f"{across * elements} a block", f"{across} accesses of a row; its other threads are at other rows"),
        Reason(
            "sums", f"{parts.count} x {num_columns}", f"of {parts.rows} rows and fewer, in registers; no atomics: always in the same order"
        ),
        why,
        width,
    )
    return Choice(
        "columns",
        (*accesses, *stores),
        elements * rows,
        bits,
        covered,
        runtime,
        reasons,
        threads,
        is_whole=True,
        columns=Columns(across, rows, keeps_sums),
    )
