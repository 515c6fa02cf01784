"""Turns a program into the ``rows`` kernel: the output is one run, every input runs along its rows or is one element of each.

A thread computes one aligned access of the output, whatever the rows' length, pitch and alignment: its place in the rows costs one
division a thread, and inputs that are not aligned to the output are read as aligned words and realigned in registers.
"""

from __future__ import annotations

from wideload.emit.edges import computed, guarded
from wideload.emit.element import element_loop
from wideload.emit.positions import count_positions, declare_positions, set_positions
from wideload.emit.signature import emit_definition, emit_uniform, inside
from wideload.emit.text import INDEX_TYPES, division_sizes, take_apart, unrolled
from wideload.emit.walk import WalkedLoad, store_functions, walk_sizes, walked_loads, whole_loads, whole_words
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_rows"]


def emit_rows(program: Program, variant: Variant) -> str:
    """The kernel's text. Elements ``e`` to ``e + count`` of the output are a thread's; only at a row's end do they lie in two rows."""
    rank, count = variant.rank, variant.elements
    index, unsigned, _ = INDEX_TYPES[variant.index_bits]
    loads = walked_loads(program, variant)
    stores = list(zip(program.results, store_functions(variant), strict=True))
    divisors, inner = [f"size{d}" for d in range(rank - 1)], [f"at{d}" for d in range(rank - 1)]
    sizes = ["n", "pad", *division_sizes(divisors), *walk_sizes(loads, rank)]

    def place(e: str) -> list[str]:
        """Statements that take element ``e`` apart into the column and the rows' coordinates."""
        return take_apart(f"({unsigned})({e})", inner, divisors, variant.index_bits)[0]

    coordinates = [*inner, f"rest{rank - 2}" if rank > 1 else "e"]
    column = coordinates[0] if rank > 1 else "e"

    def row(load: WalkedLoad) -> str:
        """Where the row starts in an operand, and a plus sign."""
        return "".join(f"{at} * ({unsigned}){load.name}_stride{d} + " for d, at in enumerate(coordinates) if d)

    def place_in(load: WalkedLoad) -> str:
        return f"({row(load)}({unsigned}){load.along(column)})"

    def single(load: WalkedLoad) -> str:
        """The one element ``e + k`` of an operand."""
        inner = "0" if load.access == "row" else load.along(column if rank > 1 else "e + k")
        return f"{load.name}_v.set(k, {load.name}_data[{row(load)}{inner}]);"

    singles = [f"if (e + k < 0 || e + k >= ({index})n) continue;", *place("e + k"), *map(single, loads)]
    singles += set_positions(program, variant, [column if rank > 1 else "e + k", *coordinates[1:]])
    begin = "" if variant.is_whole else f" - ({index})pad"
    in_row = f" && {column} + {count} <= ({unsigned})size0" if rank > 1 else ""
    body = [
        f"const {index} e = (({index})blockIdx.x * {variant.threads} + ({index})threadIdx.x) * {count}{begin};",
        *([] if variant.is_whole else [f"const bool is_full = e >= 0 && e + {count} <= ({index})n;"]),
        *emit_uniform(program, variant),
        *(f"vec<{load.parameter.type.storage}, {count}> {load.name}_v = {{}};" for load in loads),
        *declare_positions(program, variant, count),
        *place("e"),
        *guarded(
            variant,
            f"is_full{in_row}{whole_words(loads, count, unsigned, place_in)}",
            [
                *whole_loads(loads, count, lambda load: f"{row(load)}0", place_in),
                *count_positions(program, variant, count, coordinates),
            ],
            "the ends of a row or of the output",
            unrolled("k", count, singles),
        ),
        *computed(
            program,
            variant,
            element_loop(program, [load.name for load in loads], count),
            [f"{store}({r.name}_data + e, {r.name}_v);" for r, store in stores],
            "the ends of the output",
            [f"store_some({r.name}_data, e, n, {r.name}_v);" for r in program.results],
        ),
    ]
    return emit_definition(program, variant, sizes, [body[0], *inside(program, "e", f"({index})n", body[1:])])
