"""The ``dense`` family: every operand walks memory in one aligned run, or is one element."""

from __future__ import annotations

from collections.abc import Sequence

from wideload.plan.choice import Choice, Reason, Walk, choose_elements
from wideload.plan.tuning import Tuning
from wideload.plan.variant import Access

__all__ = ["choose_dense"]


def choose_dense(walks: Sequence[Walk], num_inputs: int, tuning: Tuning) -> Choice | None:
    """Every operand in one run that starts with a whole access."""
    if any(not walk.is_uniform and walk.strides not in ((), (1,)) for walk in walks):
        return None
    elements, why = choose_elements(walks, num_inputs, tuning)
    if any(not walk.is_uniform and walk.phase(elements) for walk in walks):
        return None
    accesses: tuple[Access, ...] = tuple("uniform" if walk.is_uniform else "vector" for walk in walks)
    reasons = (
        Reason("family", "dense", "every operand walks memory in one aligned run, or is one element"),
        why,
        Reason("index width", "64 bits", "one 64-bit block offset costs nothing"),
    )
    n = walks[0].num_elements
    return Choice("dense", accesses, elements, 64, n, (n,), reasons, tuning.threads)
