"""Turns statements into longer ones: indented, in an unrolled loop, and those that take an index apart into coordinates.

Text in, text out, a line each; it must not know what a kernel computes, nor where its operands lie.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["INDEX_TYPES", "division_sizes", "indented", "take_apart", "unrolled"]

INDEX_TYPES = {32: ("int", "unsigned", "divide_u31"), 64: ("long long", "unsigned long long", "divide_u63")}
"""By bits of an index: its type, the unsigned one, and the prelude's division of it."""


def indented(lines: Sequence[str]) -> list[str]:
    """One level deeper; what the preprocessor reads stays where it is.

    >>> indented(["#pragma unroll", "f();"])
    ['#pragma unroll', '    f();']
    """
    return [line if line.startswith("#") else f"    {line}" for line in lines]


def unrolled(variable: str, count: int, body: str | Sequence[str], *, ctype: str = "int", comment: str = "") -> list[str]:
    """``body`` for each ``variable`` below ``count``: in braces, or behind the loop's head where it is a single line.

    >>> unrolled("k", 4, "f(k);")
    ['#pragma unroll', 'for (int k = 0; k < 4; ++k) f(k);']
    """
    head = f"for ({ctype} {variable} = 0; {variable} < {count}; ++{variable})"
    if isinstance(body, str):
        return ["#pragma unroll", f"{head} {body}"]
    return ["#pragma unroll", f"{head} {{{comment and f'  // {comment}'}", *indented(body), "}"]


def division_sizes(sizes: Sequence[str]) -> list[str]:
    """The names of the run-time integers that `take_apart` divides by, in the plan's order.

    >>> division_sizes(["size0"])
    ['size0', 'multiplier0', 'shift0']
    """
    return [name for d, size in enumerate(sizes) for name in (size, f"multiplier{d}", f"shift{d}")]


def take_apart(value: str, coordinates: Sequence[str], sizes: Sequence[str], index_bits: int) -> tuple[list[str], str]:
    """Statements that divide ``value`` by one size after the other: each remainder is a coordinate, innermost first. And what is left.

    >>> take_apart("i", ["at0"], ["size0"], 32)
    (['const unsigned rest0 = divide_u31(i, multiplier0, shift0);', 'const unsigned at0 = i - rest0 * (unsigned)size0;'], 'rest0')
    """
    _, unsigned, divide = INDEX_TYPES[index_bits]
    lines, rest = [], value
    for d, (coordinate, size) in enumerate(zip(coordinates, sizes, strict=True)):
        lines.append(f"const {unsigned} rest{d} = {divide}({rest}, multiplier{d}, shift{d});")
        lines.append(f"const {unsigned} {coordinate} = {rest} - rest{d} * ({unsigned}){size};")
        rest = f"rest{d}"
    return lines, rest
