"""Turns the positions of a program into text: where a thread's elements lie in a coordinate's count, and the random integers there.

Each family says at which coordinates of its loops a thread is; a position walks them as an operand's offset would.
"""

from __future__ import annotations

from collections.abc import Sequence

from wideload.lower import Program, ProgramPosition
from wideload.plan import Pace, Variant

__all__ = ["count_positions", "declare_positions", "draw_position", "position_at", "position_sizes", "position_type", "set_positions"]


def _paced(program: Program, variant: Variant) -> list[tuple[ProgramPosition, Pace]]:
    return list(zip(program.positions, variant.paces, strict=True))


def position_sizes(program: Program, variant: Variant) -> list[str]:
    """The names of the run-time integers, in the plan's order: where each position begins, and its strides but a known innermost one."""
    sizes = []
    for position, pace in _paced(program, variant):
        sizes.append(f"{position.name}_offset")
        sizes += [f"{position.name}_stride{d}" for d in range(0 if pace.step == "apart" else 1, variant.rank)]
    return sizes


def position_type(pace: Pace) -> str:
    """The type that a position is worked out in: no position of an element is negative."""
    return "unsigned" if pace.bits == 32 else "unsigned long long"


def position_at(position: ProgramPosition, pace: Pace, coordinates: Sequence[str]) -> str:
    """The position of the element at these coordinates, innermost first."""
    cast, name = position_type(pace), position.name
    terms = [f"({cast}){name}_offset"]
    for d, coordinate in enumerate(coordinates):
        if d or pace.step == "apart":
            terms.append(f"({cast})({coordinate}) * ({cast}){name}_stride{d}")
        elif pace.step == "run":
            terms.append(f"({cast})({coordinate})")
    return " + ".join(terms)


def draw_position(position: ProgramPosition, text: str) -> str:
    """What the element function takes for the position ``text``: itself, or the random integer there."""
    draw = position.draw
    return text if draw is None else f"draw_one<{draw.bits}>(seed, {draw.stream}, {text})"


def declare_positions(program: Program, variant: Variant, count: int) -> list[str]:
    """Vectors ``name_v`` for ``count`` elements of every position."""
    return [f"vec<{_held(position, pace)}, {count}> {position.name}_v = {{}};" for position, pace in _paced(program, variant)]


def count_positions(program: Program, variant: Variant, count: int, coordinates: Sequence[str], *, declared: bool = True) -> list[str]:
    """Fill the vectors for elements that follow one another along the innermost dim, from ``coordinates`` on."""
    lines = []
    for position, pace in _paced(program, variant):
        first, draw = position_at(position, pace, coordinates), position.draw
        stride = f", ({position_type(pace)}){position.name}_stride0" if pace.step == "apart" else ""
        if pace.step == "row":
            value = f"repeat_element<{count}>({draw_position(position, first)})"
        elif draw is None:
            value = f"count_{pace.step}<{count}>({first}{stride})"
        else:
            value = f"draw_{pace.step}<{draw.bits}, {count}>(seed, {draw.stream}, {first}{stride})"
        of = "" if declared else f"const vec<{_held(position, pace)}, {count}> "
        lines.append(f"{of}{position.name}_v = {value};")
    return lines


def set_positions(program: Program, variant: Variant, coordinates: Sequence[str]) -> list[str]:
    """Fill element ``k`` of the vectors, which lies at ``coordinates``."""
    return [
        f"{position.name}_v.set(k, {draw_position(position, position_at(position, pace, coordinates))});"
        for position, pace in _paced(program, variant)
    ]


def _held(position: ProgramPosition, pace: Pace) -> str:
    return position_type(pace) if position.draw is None else position.ctype
