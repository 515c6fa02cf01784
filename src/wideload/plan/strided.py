"""The ``strided`` family: anything, one element an access."""

from __future__ import annotations

from collections.abc import Sequence

from wideload.layout import IterSpace
from wideload.plan.choice import Choice, Reason, Walk, choose_index_bits, division_numbers, share_of_block
from wideload.plan.tuning import Tuning
from wideload.plan.variant import Access

__all__ = ["choose_strided"]


def choose_strided(space: IterSpace, walks: Sequence[Walk], tuning: Tuning) -> Choice:
    """Anything, one element an access."""
    elements = min(tuning.strided_elements, share_of_block(space.num_elements // tuning.threads))
    accesses: tuple[Access, ...] = tuple("uniform" if walk.is_uniform else "strided" for walk in walks)
    bits, width = choose_index_bits(space, walks, space.num_elements)
    broken = next((walk.name for row, walk in enumerate(walks) if not walk.is_uniform and not space.is_dense(row)), walks[-1].name)
    reasons = (
        Reason("family", "strided", f"{broken} does not walk memory in one run: {len(space.dims)} dims after coalescing"),
        Reason("elements a thread", str(elements), "several loads in flight" if elements > 1 else "more would leave SMs without work"),
        width,
    )
    strides = [stride for walk in walks if not walk.is_uniform for stride in walk.strides]
    runtime = (space.num_elements, *division_numbers(space, bits), *strides)
    return Choice("strided", accesses, elements, bits, space.num_elements, runtime, reasons, tuning.threads)
