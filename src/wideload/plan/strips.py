"""The ``strips`` family: the same columns of several rows a thread, where operands repeat from row to row."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wideload.layout import Dim, IterSpace
from wideload.lower import Program
from wideload.plan.choice import Choice, Reason, Walk, are_rows_whole, choose_accesses, choose_elements, choose_index_bits, division_numbers
from wideload.plan.tuning import Tuning
from wideload.plan.variant import MAX_INLINED_FUNCTIONS, Access, Strip

__all__ = ["LEAST_STRIPS", "STRIP_ROWS", "choose_strips"]

STRIP_ROWS = (4, 2)
"""Rows of a strip, the most first: the blocks that run at a time then walk as many places at once, of which more than four cost
bandwidth on an H200 (4.33 down to 4.04 TB/s)."""

LEAST_STRIPS = 1 << 21
"""Strips from which on a kernel is one of strips: eight waves of full SMs on an H200 (nvFuser's rule for its unrolling of broadcasts).

Strips save arithmetic and addresses, not bytes. On an H200, of the wall: a row and GELU (erf) in bf16 0.979 against 0.904 without strips,
a row and GELU (tanh) 0.995 and 1.000, a row alone 0.991 and 0.998, RoPE 0.844 and 0.966. So they are for one operand of its own beside
what repeats, and for arithmetic that approximates a function: there they cost half a percent at most. Without one they are for neighbouring
rows beside a row that is another further out, as of (B, 1, C), which no L1 has from an earlier block: of `FEW_ROWS` rows 258.2 us against
260.9 without strips, of four 266.3."""

FEW_ROWS = 2


def choose_strips(space: IterSpace, walks: Sequence[Walk], num_inputs: int, program: Program, tuning: Tuning) -> Choice | None:
    """Rows of whole accesses, along an outer dim of which an input repeats."""
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    if len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in outputs):
        return None
    elements, why = choose_elements(walks, num_inputs, tuning)
    row, beat = space.dims[0].size, outputs[0].beat(elements)
    loads = choose_accesses(inputs, beat, elements)
    if loads is None or not are_rows_whole(row, elements, beat, loads) or any(walk.beat(elements) != beat for walk in outputs):
        return None
    runs = [walk for walk, access in zip(inputs, loads, strict=True) if access == "vector"]
    strip = _find_strip(space, runs, elements, program)
    if strip is None:
        return None
    strip_loads: list[Access] = [
        "repeated" if access == "vector" and not walk.strides[strip.dim] else access for walk, access in zip(inputs, loads, strict=True)
    ]
    repeated = ", ".join(walk.name for walk, access in zip(inputs, strip_loads, strict=True) if access == "repeated")
    sizes = [row // elements, *(dim.size // strip.rows if d == strip.dim else dim.size for d, dim in enumerate(space.dims) if d)]
    num_strips = math.prod(sizes)
    bits, width = choose_index_bits(space, walks, num_strips + tuning.threads)
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
    runtime = (num_strips, *division_numbers(slotted, bits), *strides)
    strip_loads += ["vector" for _ in outputs]
    covered = num_strips * elements
    return Choice("strips", tuple(strip_loads), elements, bits, covered, runtime, reasons, tuning.threads, is_whole=True, strip=strip)


def _find_strip(space: IterSpace, runs: Sequence[Walk], elements: int, program: Program) -> Strip | None:
    """The dim along which all of ``runs`` but one repeat, and how many of its rows a thread can take."""
    for dim in range(1, len(space.dims)):
        repeated = [walk for walk in runs if not walk.strides[dim]]
        if not repeated or len(runs) - len(repeated) != 1:
            continue
        is_another = dim == 1 and any(any(walk.strides[2:]) for walk in repeated)
        for rows in STRIP_ROWS if program.has_functions else (FEW_ROWS,) * is_another:
            is_inlined = program.num_functions * elements * rows <= MAX_INLINED_FUNCTIONS
            if is_inlined and not space.dims[dim].size % rows and space.num_elements >= LEAST_STRIPS * elements * rows:
                return Strip(dim, rows)
    return None
