"""Turns a program into the ``pitched`` kernel: outputs in rows with gaps between them, every input along the rows or one element of each.

As ``rows``, but a row's accesses begin anew: each is aligned to the first output, whose rows may start at any address.
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

__all__ = ["emit_pitched"]


def emit_pitched(program: Program, variant: Variant) -> str:
    """The kernel's text. ``slot`` is a thread's access in its row; the first and the last may reach beyond the row's ends."""
    rank, count = variant.rank, variant.elements
    index, unsigned, _ = INDEX_TYPES[variant.index_bits]
    loads = walked_loads(program, variant)
    stores = list(zip(program.results, store_functions(variant), strict=True))
    beat = program.results[0].name
    divisors = ["slots0", *(f"size{d}" for d in range(1, rank - 1))]
    sizes = ["n", "size0", "phase", *division_sizes(divisors), *walk_sizes(loads, rank)]
    sizes += [f"{r.name}_stride{d}" for r in program.results for d in range(1, rank)]

    def row(name: str) -> str:
        """Where the row starts in an operand or a result."""
        return " + ".join(f"at{d} * ({unsigned}){name}_stride{d}" for d in range(1, rank))

    outer = [f"at{d}" for d in range(1, rank)]
    places, rest = take_apart("i", ["slot", *outer[:-1]], divisors, variant.index_bits)
    body = [
        f"const {unsigned} i = ({unsigned})blockIdx.x * {variant.threads} + threadIdx.x;",
        *emit_uniform(program, variant),
        *places,
        f"const {unsigned} {outer[-1]} = {rest};",
        *(f"const {unsigned} {r.name}_at = {row(r.name)};" for r in program.results),
    ]

    def place_in(load: WalkedLoad) -> str:
        return f"({row(load.name)} + ({unsigned}){load.along('column')})"

    def single(load: WalkedLoad) -> str:
        """The one element at ``column + k`` of an operand."""
        inner = "" if load.access == "row" else f" + {load.along('column + k')}"
        return f"{load.name}_v.set(k, {load.name}_data[{row(load.name)}{inner}]);"

    singles = [
        f"if (column + k < 0 || column + k >= ({index})size0) continue;",
        *map(single, loads),
        *set_positions(program, variant, ["column + k", *outer]),
    ]
    if variant.is_whole:
        body.append(f"const {index} column = ({index})slot * {count};")
    else:
        body += [
            f"const {unsigned} lead = ({beat}_at + ({unsigned})phase) % {count};  // the row's start behind an aligned access of {beat}",
            f"const {index} column = ({index})slot * {count} - ({index})lead;",
            f"const bool is_full = column >= 0 && column + {count} <= ({index})size0;",
        ]
    body += [
        *(f"vec<{load.parameter.type.storage}, {count}> {load.name}_v = {{}};" for load in loads),
        *declare_positions(program, variant, count),
        *guarded(
            variant,
            f"is_full{whole_words(loads, count, unsigned, place_in)}",
            [
                *whole_loads(loads, count, lambda load: row(load.name), place_in),
                *count_positions(program, variant, count, ["column", *outer]),
            ],
            "the ends of a row",
            unrolled("k", count, singles),
        ),
        *computed(
            program,
            variant,
            element_loop(program, [load.name for load in loads], count),
            [f"{store}({r.name}_data + {r.name}_at + column, {r.name}_v);" for r, store in stores],
            "the ends of a row",
            [f"store_some({r.name}_data + {r.name}_at, column, size0, {r.name}_v);" for r in program.results],
        ),
    ]
    return emit_definition(program, variant, sizes, [body[0], *inside(program, "i", f"({unsigned})n", body[1:])])
