"""The ``columns`` family: results that are added up over rows, beside those that are stored, all in rows of whole accesses."""

from __future__ import annotations

from collections.abc import Sequence

from wideload.layout import IterSpace, magic_divisor
from wideload.plan.choice import Choice, Reason, Walk, are_rows_whole, choose_accesses, choose_elements, choose_index_bits
from wideload.plan.tuning import Tuning
from wideload.plan.variant import Access, Columns

__all__ = ["ACROSS", "choose_columns", "find_part_rows"]

ACROSS = 16
"""Accesses of a row that a block takes, at most: 256 bytes, two cache lines. Its other threads are at other rows, so that it has few
columns and many rows: every row of partial sums is written, and read again."""

PART_ROWS = (256, 128, 64, 32)
"""Rows that a block adds up, the most first. The partial sums of bf16, written in fp32 and read again, are 8 bytes a column: of 64 rows
with two operands and one result of 2 bytes an element, 2 % of what moves."""

LEAST_SUMS = 1 << 20
"""Partial sums from which on blocks take more rows: blocks of 128 columns are then eight waves of eight an SM of an H200, as many as of
strips."""

LOADS = 4
"""Accesses that a thread has in flight, of all operands together, where it has no more operands than that: 64 KiB an SM with the eight
blocks of 128 threads that its registers leave room for, above the 48 KiB that CUB's DeviceTransform wants on an H200."""


def find_part_rows(num_rows: int, num_columns: int) -> int:
    """How many rows a block adds up; the last one may have fewer.

    >>> find_part_rows(8192, 11008), find_part_rows(1 << 17, 4096), find_part_rows(100, 64)
    (64, 256, 32)
    """
    return next((rows for rows in PART_ROWS if num_rows * num_columns >= LEAST_SUMS * rows), PART_ROWS[-1])


def choose_columns(
    space: IterSpace, walks: Sequence[Walk], num_inputs: int, sums: Sequence[int], num_columns: int, tuning: Tuning
) -> Choice | None:
    """Rows of ``num_columns`` elements, all in whole accesses and one fixed step apart; ``sums`` are the results that are added up."""
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    if len(space.dims) != 2 or space.dims[0].size != num_columns or any(walk.strides[0] != 1 for walk in outputs):
        return None
    elements, why = choose_elements(walks, num_inputs, tuning)
    beat, num_rows = outputs[0].beat(elements), space.dims[1].size
    loads = choose_accesses(inputs, beat, elements)
    if loads is None or not are_rows_whole(num_columns, elements, beat, loads) or any(walk.beat(elements) != beat for walk in outputs):
        return None
    accesses: list[Access] = [
        "repeated" if access == "vector" and not walk.strides[1] else access for walk, access in zip(inputs, loads, strict=True)
    ]
    num_slots, part_rows = num_columns // elements, find_part_rows(num_rows, num_columns)
    across = min(ACROSS, 1 << (num_slots - 1).bit_length())
    rows = max(1, LOADS // max(1, accesses.count("vector")))
    tiles, parts = -(-num_slots // across), -(-num_rows // part_rows)
    covered = tiles * parts * tuning.threads * elements * rows
    bits, width = choose_index_bits(space, walks, covered)
    multiplier, shift = magic_divisor(tiles, bits)
    strides = [walk.strides[1] for walk, access in zip(inputs, accesses, strict=True) if access in ("vector", "row")]
    strides += [walk.strides[1] for at, walk in enumerate(outputs) if at not in sums]
    runtime = (num_rows, num_columns, part_rows, tiles, multiplier - (1 << 64) if multiplier >> 63 else multiplier, shift, *strides)
    stores: list[Access] = ["summed" if at in sums else "vector" for at in range(len(outputs))]
    reasons = (
        Reason(
            "family", "columns", f"{num_rows} rows of {num_columns} elements, all of whole accesses; over the rows results are added up"
        ),
        Reason("columns", f"{across * elements} a block", f"{across} accesses of a row; its other threads are at other rows"),
        Reason("partial sums", f"{parts} x {num_columns}", f"each of {part_rows} rows, in registers; no atomics: always in the same order"),
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
        tuning.threads,
        is_whole=True,
        columns=Columns(across, rows),
    )
