"""The ``columns`` family: results that are added up over rows, beside those that are stored, all in rows of whole accesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from wideload.layout import Dim, IterSpace
from wideload.plan.choice import Choice, Reason, Walk, are_rows_whole, choose_accesses, choose_elements, choose_index_bits, division_numbers
from wideload.plan.tuning import Tuning
from wideload.plan.variant import Access, Columns

__all__ = ["ACROSS", "Parts", "choose_columns", "find_parts"]

ACROSS = 16
"""Accesses of a row that a block takes, at most: 256 bytes, two cache lines. Its other threads are at other rows, so that it has few
columns and many rows: every row of partial sums is written, and read again."""

PART_ROWS = (256, 128, 64, 32)
"""Rows that a block adds up, the most first; fewer are left to a kernel that stores the terms. The partial sums of bf16, written in fp32
and read again, are 8 bytes a column: of 128 rows with two operands and one result of 2 bytes an element, 1 % of what moves."""

PART_COLUMNS = 128
"""Columns of such a block, of 2 bytes; where rows are shorter it has as many times more rows."""

LEAST_BLOCKS = 4096
"""Blocks from which on each takes more rows. On an H200, of the wall, the gradients of x and of the bias b of GELU(x + b) over 8192 rows of
11008 by parts of 32, 64, 128 and 256 rows: by tanh 0.910, 0.936, 0.939 and 0.938, by erf 0.830, 0.906, 0.921 and 0.913."""

BLOCKS_AT_ONCE = 924
"""Seven an SM of an H200. Those that run at a time and share columns take turns at rows that are near each other: 0.936 of the wall
against 0.930 where each walks on its own, by tanh; 0.906 and 0.897 by erf."""

MOST_SPARE = 1.1
"""Times as many parts as are needed, at most: those that take turns come together, and of the last ones some have no rows."""

MOST_PARTS = 2048
"""Rows of partial sums, at most: what adds them up has few blocks where rows are short, and reads four rows a thread at a time."""

ACROSS_TOTALS = (4, 2, 1)
"""`ACROSS` where partial sums are added up: as many as leave a thread no more than `ROWS_OF_TOTALS` rows, one after the other."""

ROWS_OF_TOTALS = 16

SHARED_BYTES = 16384
"""Of the sums of a block's threads, at most, for each result: a block may declare 48 KiB."""

WIDEST_SUM = 8
"""Bytes of a sum in fp64."""

LOADS = 4
"""Accesses that a thread has in flight, of all operands together, where it has no more operands than that: 56 KiB an SM with the
`COLUMNS_BLOCKS` blocks of 128 threads that registers leave room for, above the 48 KiB that CUB's DeviceTransform wants on an H200."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows in ``count`` parts of ``rows`` each, a block's. ``together`` of them take turns, a few rows each: they are near each other."""

    rows: int
    together: int
    count: int


def find_parts(num_rows: int, num_columns: int) -> Parts:
    """How rows are shared among blocks; the last parts may have fewer, or none.

    >>> find_parts(8192, 11008), find_parts(1 << 17, 4096), find_parts(100, 128)
    (Parts(rows=128, together=8, count=64), Parts(rows=256, together=16, count=512), Parts(rows=32, together=4, count=4))
    >>> find_parts(1 << 20, 128).rows
    512
    """
    blocks_of_row = num_rows * num_columns // PART_COLUMNS
    rows = next((rows for rows in PART_ROWS if blocks_of_row >= LEAST_BLOCKS * rows), PART_ROWS[-1])
    least = -(-num_rows // (MOST_PARTS * PART_ROWS[-1])) * PART_ROWS[-1]
    rows = max(rows * -(-PART_COLUMNS // num_columns), least)
    count = -(-num_rows // rows)
    together = min(max(BLOCKS_AT_ONCE * PART_COLUMNS // num_columns, 1), count)
    together = 1 << together.bit_length() - 1
    while -(-count // together) * together > MOST_SPARE * count:
        together //= 2
    return Parts(rows, together, -(-count // together) * together)


def choose_columns(
    space: IterSpace, walks: Sequence[Walk], num_inputs: int, sums: Sequence[int], num_columns: int, is_total: bool, tuning: Tuning
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
    if num_rows < PART_ROWS[-1] and not is_total:
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
    parts = Parts(num_rows, 1, 1) if is_total else find_parts(num_rows, num_columns)
    threads = min(tuning.threads, SHARED_BYTES // (elements * WIDEST_SUM))
    most = next((n for n in ACROSS_TOTALS if num_rows * n <= ROWS_OF_TOTALS * threads), 1) if is_total else ACROSS
    across = min(most, 1 << (num_slots - 1).bit_length())
    rows = max(1, LOADS // max(1, accesses.count("vector")))
    tiles = -(-num_slots // across)
    covered = tiles * parts.count * threads * elements * rows
    bits, width = choose_index_bits(space, walks, covered)
    strides = [sum(walk.strides[1:]) for walk, access in zip(inputs, accesses, strict=True) if access in ("vector", "row")]
    strides += [sum(walk.strides[1:]) for at, walk in enumerate(outputs) if at not in sums]
    sizes = tiles, parts.together, parts.count // parts.together
    blocks = IterSpace(tuple(Dim(size, ()) for size in sizes), tiles * parts.count)
    runtime = (num_rows, num_columns, parts.rows, *division_numbers(blocks, bits), *strides)
    stores: list[Access] = ["summed" if at in sums else "vector" for at in range(len(outputs))]
    reasons = (
        Reason("family", "columns", f"{num_rows} rows of {num_columns} elements, all of whole accesses; results are added up over rows"),
        Reason("columns", f"{across * elements} a block", f"{across} accesses of a row; its other threads are at other rows"),
        Reason("sums", f"{parts.count} x {num_columns}", f"each of {parts.rows} rows, in registers; no atomics: always in the same order"),
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
        columns=Columns(across, rows),
    )
