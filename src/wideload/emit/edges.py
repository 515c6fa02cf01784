"""Turns statements for whole accesses, and those for where they would reach beyond an edge, into one.

It must not know what the statements do.
"""

from __future__ import annotations

from collections.abc import Sequence

from wideload.emit.text import indented
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["computed", "guarded"]


def guarded(variant: Variant, condition: str, whole: Sequence[str], comment: str, edge: Sequence[str]) -> list[str]:
    """``whole`` where ``condition`` holds, ``edge`` where it does not; a variant without edges has no condition to look at."""
    if variant.is_whole or not whole:
        return list(whole)
    return [f"if ({condition}) {{  // whole accesses", *indented(whole), f"}} else {{  // {comment}", *indented(edge), "}"]


def computed(program: Program, variant: Variant, loop: Sequence[str], whole: Sequence[str], comment: str, edge: Sequence[str]) -> list[str]:
    """The ``loop`` over a thread's elements, then its stores: ``whole``, or ``edge`` where not ``is_full``.

    A result that is one value of all elements puts the loop into both branches: before them, it would leave a word of every element in
    registers until the branch is known (SwiGLU to fp8 with its amax: 46 instead of 40 for sm_90, and so 10 blocks an SM instead of 12).
    """
    if program.reduced:
        return guarded(variant, "is_full", [*loop, *whole], comment, [*loop, *edge])
    return [*loop, *guarded(variant, "is_full", whole, comment, edge)]
