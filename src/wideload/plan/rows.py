"""The ``rows`` and ``pitched`` families: inputs run along the outputs' rows, at any pitch, alignment and broadcast."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wideload.layout import Dim, IterSpace
from wideload.plan.choice import (
    Choice,
    Reason,
    Walk,
    are_rows_whole,
    choose_accesses,
    choose_elements,
    choose_index_bits,
    division_numbers,
    edge_reasons,
    find_steps,
)
from wideload.plan.tuning import Tuning
from wideload.plan.variant import Access

__all__ = ["choose_pitched", "choose_rows"]


def choose_rows(space: IterSpace, walks: Sequence[Walk], num_inputs: int, tuning: Tuning) -> Choice | None:
    """The outputs in one run, and every input a run along each row or one element of it."""
    sizes = [dim.size for dim in space.dims] or [1]
    packed = tuple(math.prod(sizes[:d]) for d in range(len(space.dims)))
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    if any(walk.strides != packed for walk in outputs):
        return None
    elements, why = choose_elements(walks, num_inputs, tuning)
    if len(sizes) > 1 and sizes[0] < elements:
        return None  # a thread's elements would lie in several rows as a rule
    # The first output sets the beat: its first aligned access is preceded by `pad` elements that are none of its own.
    pad = outputs[0].phase(elements)
    beat = outputs[0].beat(elements)
    loads = choose_accesses(inputs, beat, elements)
    if loads is None:
        return None
    stores: tuple[Access, ...] = tuple("vector" if walk.phase(elements) == pad else "elements" for walk in outputs)
    bits, width = choose_index_bits(space, walks, space.num_elements + pad + tuning.threads * elements)
    runtime = (space.num_elements, pad, *division_numbers(space, bits), *_row_sizes(space, inputs, loads))
    rows = "one run" if len(sizes) == 1 else f"rows of {sizes[0]} elements"
    is_whole = are_rows_whole(sizes[0], elements, beat, (*loads, *stores))
    reasons = (
        Reason("family", "rows", f"the output is one run, every input {rows} or one element of each"),
        why,
        width,
        *edge_reasons(is_whole, inputs, loads),
    )
    return Choice(
        "rows",
        (*loads, *stores),
        elements,
        bits,
        space.num_elements + pad,
        runtime,
        reasons,
        tuning.threads,
        is_whole=is_whole,
        steps=find_steps(inputs, loads, elements),
    )


def choose_pitched(space: IterSpace, walks: Sequence[Walk], num_inputs: int, tuning: Tuning) -> Choice | None:
    """As ``rows``, for outputs with gaps between their rows."""
    if len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in walks[num_inputs:]):
        return None
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    elements, why = choose_elements(walks, num_inputs, tuning)
    row = space.dims[0].size
    if row < elements:
        return None
    beat = outputs[0].beat(elements)
    loads = choose_accesses(inputs, beat, elements)
    if loads is None:
        return None
    stores: tuple[Access, ...] = tuple("vector" if walk.beat(elements) == beat else "elements" for walk in outputs)
    same_phase = not any(stride % elements for stride in outputs[0].strides[1:])
    slots = -(-(row + (beat[0] if same_phase else elements - 1)) // elements)
    num_slots = space.num_elements // row * slots
    bits, width = choose_index_bits(space, walks, num_slots * elements + tuning.threads * elements)
    slotted = IterSpace((Dim(slots, space.dims[0].strides), *space.dims[1:]), num_slots)
    outer = [stride for walk in outputs for stride in walk.strides[1:]]
    runtime = (num_slots, row, beat[0], *division_numbers(slotted, bits), *_row_sizes(space, inputs, loads), *outer)
    is_whole = are_rows_whole(row, elements, beat, (*loads, *stores))
    reasons = (
        Reason("family", "pitched", f"rows of {row} elements, with gaps between those of the output"),
        why,
        width,
        *edge_reasons(is_whole, inputs, loads),
    )
    return Choice(
        "pitched",
        (*loads, *stores),
        elements,
        bits,
        num_slots * elements,  # the grid is counted in accesses
        runtime,
        reasons,
        tuning.threads,
        is_whole=is_whole,
        steps=find_steps(inputs, loads, elements),
    )


def _row_sizes(space: IterSpace, inputs: Sequence[Walk], loads: Sequence[Access]) -> list[int]:
    """The outer strides of each input that has rows, and the span of those read by aligned words: elements from its first to its last."""
    numbers: list[int] = []
    for walk, access in zip(inputs, loads, strict=True):
        numbers += walk.strides[1:] if access != "uniform" else ()
        if access in ("realigned", "stepped"):
            numbers.append(walk.span([dim.size for dim in space.dims]))
    return numbers
