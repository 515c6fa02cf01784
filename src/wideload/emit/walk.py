"""Turns the operands of a kernel that walks rows into text: what ``rows`` and ``pitched`` have in common.

Where a row starts and which column a thread is at, each of them says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from wideload.lower import Parameter, Program
from wideload.plan import Access, Variant

__all__ = ["Walked", "guarded", "walk_sizes", "walked_loads", "whole_loads"]

Walked = Sequence[tuple[Parameter, Access]]


def walked_loads(program: Program, variant: Variant) -> Walked:
    """The operands that are read along the rows, not once for all elements."""
    pairs = zip(program.parameters, variant.loads, strict=True)
    return [(p, access) for p, access in pairs if access in ("vector", "realigned", "row")]


def walk_sizes(loads: Walked, rank: int) -> list[str]:
    """The names of their run-time integers, in the plan's order: strides of the outer dims, and the span of realigned ones."""
    sizes = []
    for p, access in loads:
        sizes += [f"{p.name}_stride{d}" for d in range(1, rank)] + ([f"{p.name}_span"] if access == "realigned" else [])
    return sizes


def whole_loads(loads: Walked, count: int, row: Callable[[str], str], at: Callable[[str], str]) -> list[str]:
    """One access an operand: of its row's element, at ``row(name)``, or of ``count`` elements from ``at(name)`` on."""
    lines = []
    for p, access in loads:
        if access == "row":
            lines.append(f"{p.name}_v = repeat_element<{count}>({p.name}_data[{row(p.name)}]);")
        else:
            bounds = f", {p.name}_data, {p.name}_data + {p.name}_span" if access == "realigned" else ""
            lines.append(f"{p.name}_v = load_{access}<{count}>({p.name}_data + {at(p.name)}{bounds});")
    return lines


def guarded(variant: Variant, condition: str, whole: Sequence[str], comment: str, edge: Sequence[str]) -> list[str]:
    """``whole`` where ``condition`` holds, ``edge`` where it does not; a variant without edges has no condition to look at."""
    if variant.is_whole or not whole:
        return list(whole)
    inside = [line if line.startswith("#") else f"    {line}" for line in edge]
    return [f"if ({condition}) {{  // whole accesses", *(f"    {line}" for line in whole), f"}} else {{  // {comment}", *inside, "}"]
