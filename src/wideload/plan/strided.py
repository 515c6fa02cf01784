"""The ``strided`` family: anything, one element an access."""

from __future__ import annotations

from collections.abc import Sequence

from wideload.layout import IterSpace
from wideload.plan.choice import Choice, Reason, Walk, choose_index_bits, division_numbers
from wideload.plan.variant import Access

__all__ = ["STRIDED_ELEMENTS", "choose_strided"]

STRIDED_ELEMENTS = 4
"""Elements that a thread of a strided kernel has in flight: its loads are narrow, so that one would leave the memory idle."""


def choose_strided(space: IterSpace, walks: Sequence[Walk]) -> Choice:
    """Anything, one element an access."""
    accesses: tuple[Access, ...] = tuple("uniform" if walk.is_uniform else "strided" for walk in walks)
    bits, width = choose_index_bits(space, walks, space.num_elements)
    broken = next((walk.name for row, walk in enumerate(walks) if not walk.is_uniform and not space.is_dense(row)), walks[-1].name)
    reasons = (
        Reason("family", "strided", f"{broken} does not walk memory in one run: {len(space.dims)} dims after coalescing"),
        Reason("elements a thread", str(STRIDED_ELEMENTS), "several loads in flight"),
        width,
    )
    strides = [stride for walk in walks if not walk.is_uniform for stride in walk.strides]
    runtime = (space.num_elements, *division_numbers(space, bits), *strides)
    return Choice("strided", accesses, STRIDED_ELEMENTS, bits, space.num_elements, runtime, reasons)
