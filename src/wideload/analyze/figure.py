"""Turns a number into a figure that can be trusted as far as it says: its unit, how it came about, and from what.

It must not know what is measured, computed or assumed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Figure", "Kind", "assumed", "computed"]

Kind = Literal["measured", "computed", "assumed"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its unit, how it came about and from what."""

    value: float
    unit: str
    kind: Kind
    source: str


def computed(value: float, unit: str, source: str) -> Figure:
    """A figure that follows from the layouts, the plan or the compiled kernel.

    >>> computed(96, "B", "3 operands of 32 bytes").kind
    'computed'
    """
    return Figure(value, unit, "computed", source)


def assumed(value: float, unit: str, source: str) -> Figure:
    """A figure taken from elsewhere, or one that follows from such a figure."""
    return Figure(value, unit, "assumed", source)
