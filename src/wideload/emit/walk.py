"""Turns the operands of a kernel that walks rows into text: what ``rows`` and ``pitched`` have in common.

Where a row starts and which column a thread is at, each of them says itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from wideload.lower import Parameter, Program
from wideload.plan import Access, Variant

__all__ = ["WalkedLoad", "store_functions", "walk_sizes", "walked_loads", "whole_loads", "whole_words"]


class WalkedLoad(NamedTuple):
    """An operand that is read along the rows, every ``step``-th element; its aligned words begin ``first`` elements before its own.

    ``function`` makes a whole access.
    """

    parameter: Parameter
    access: Access
    step: int = 1
    first: int = 0
    function: str = "load_vector"

    @property
    def name(self) -> str:
        """In the text."""
        return self.parameter.name

    def along(self, column: str) -> str:
        """How far ``column`` is from the row's start."""
        return column if self.step == 1 else f"({column}) * {self.step}"


def walked_loads(program: Program, variant: Variant) -> list[WalkedLoad]:
    """The operands that are read along the rows, not once for all elements."""
    loads = zip(program.parameters, variant.loads, variant.load_steps, variant.load_functions, strict=True)
    return [
        WalkedLoad(p, access, *step, function) for p, access, step, function in loads if access in ("vector", "realigned", "stepped", "row")
    ]


def walk_sizes(loads: Sequence[WalkedLoad], rank: int) -> list[str]:
    """The names of their run-time integers, in the plan's order: strides of the outer dims, and the span of those read by aligned words."""
    sizes = []
    for load in loads:
        sizes += [f"{load.name}_stride{d}" for d in range(1, rank)]
        sizes += [f"{load.name}_span"] if load.access in ("realigned", "stepped") else []
    return sizes


def whole_loads(loads: Sequence[WalkedLoad], count: int, row: Callable[[WalkedLoad], str], at: Callable[[WalkedLoad], str]) -> list[str]:
    """One access an operand: of its row's element, at ``row``, or of ``count`` elements from ``at`` on; all are in flight at once."""
    lines = []
    for load in loads:
        data = f"{load.name}_data"
        match load.access:
            case "row":
                value = f"repeat_element<{count}>({data}[{row(load)}])"
            case "stepped":
                value = f"load_stepped<{count}, {load.step}, {load.first}>({data} + ({at(load)} - {load.first}))"
            case "realigned":
                value = f"load_shifted<{count}>({data} + {at(load)})"
            case _:
                value = f"{load.function}<{count}>({data} + {at(load)})"
        lines.append(f"{load.name}_v = {value};")
    return lines


def whole_words(loads: Sequence[WalkedLoad], count: int, unsigned: str, at: Callable[[WalkedLoad], str]) -> str:
    """A condition, with ``&&`` before it: the aligned words under ``count`` elements from ``at`` on are the operand's own."""
    text = ""
    for load in loads:
        before, behind = (load.first, load.step * count - load.first) if load.access == "stepped" else (count, 2 * count)
        if load.access in ("realigned", "stepped"):
            text += f"\n    && {at(load)} >= {before}" if before else ""
            text += f"\n    && {at(load)} + {behind} <= ({unsigned}){load.name}_span"
    return text


def store_functions(variant: Variant) -> list[str]:
    """The function that stores each result: whole accesses by name, but for rows without edges, whose plain stores stay whole."""
    whole = "store_vector" if variant.is_whole and not variant.tile else "store_whole"
    return [whole if access == "vector" else f"store_{access}" for access in variant.stores]
