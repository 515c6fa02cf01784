"""Turns a program into the ``pitched`` kernel: outputs in rows with gaps between them, every input along the rows or one element of each.

As ``rows``, but a row's accesses begin anew: each is aligned to the first output, whose rows may start at any address.
"""

from __future__ import annotations

from wideload.emit.element import element_loop
from wideload.emit.signature import INDEX_TYPES, emit_definition, emit_uniform
from wideload.emit.walk import WalkedLoad, guarded, walk_sizes, walked_loads, whole_loads, whole_words
from wideload.lower import Program
from wideload.plan import THREADS, Variant

__all__ = ["emit_pitched"]


def emit_pitched(program: Program, variant: Variant) -> str:
    """The kernel's text. ``slot`` is a thread's access in its row; the first and the last may reach beyond the row's ends."""
    rank, count = variant.rank, variant.elements
    index, unsigned, divide = INDEX_TYPES[variant.index_bits]
    loads = walked_loads(program, variant)
    stores = list(zip(program.results, variant.stores, strict=True))
    beat = program.results[0].name
    sizes = ["n", "size0", "phase"]
    for d in range(rank - 1):
        sizes += [f"slots{d}" if d == 0 else f"size{d}", f"multiplier{d}", f"shift{d}"]
    sizes += walk_sizes(loads, rank)
    sizes += [f"{r.name}_stride{d}" for r in program.results for d in range(1, rank)]

    def row(name: str) -> str:
        """Where the row starts in an operand or a result."""
        return " + ".join(f"at{d} * ({unsigned}){name}_stride{d}" for d in range(1, rank))

    body = [
        f"const {unsigned} i = ({unsigned})blockIdx.x * {THREADS} + threadIdx.x;",
        f"if (i >= ({unsigned})n) return;",
        *emit_uniform(program, variant),
        f"const {unsigned} rest0 = {divide}(i, multiplier0, shift0);",
        f"const {unsigned} slot = i - rest0 * ({unsigned})slots0;",
    ]
    rest = "rest0"
    for d in range(1, rank - 1):
        body.append(f"const {unsigned} rest{d} = {divide}({rest}, multiplier{d}, shift{d});")
        body.append(f"const {unsigned} at{d} = {rest} - rest{d} * ({unsigned})size{d};")
        rest = f"rest{d}"
    body.append(f"const {unsigned} at{rank - 1} = {rest};")
    body += [f"const {unsigned} {r.name}_at = {row(r.name)};" for r in program.results]

    def place_in(load: WalkedLoad) -> str:
        return f"({row(load.name)} + ({unsigned}){load.along('column')})"

    def single(load: WalkedLoad) -> str:
        """The one element at ``column + k`` of an operand."""
        inner = "" if load.access == "row" else f" + {load.along('column + k')}"
        return f"{load.name}_v.set(k, {load.name}_data[{row(load.name)}{inner}]);"

    singles = [f"if (column + k < 0 || column + k >= ({index})size0) continue;", *map(single, loads)]
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
        *guarded(
            variant,
            f"is_full{whole_words(loads, count, unsigned, place_in)}",
            whole_loads(loads, count, lambda load: row(load.name), place_in),
            "the ends of a row",
            ["#pragma unroll", f"for (int k = 0; k < {count}; ++k) {{", *(f"    {line}" for line in singles), "}"],
        ),
        *element_loop(program, [load.name for load in loads], count),
        *guarded(
            variant,
            "is_full",
            [f"store_{access}({r.name}_data + {r.name}_at + column, {r.name}_v);" for r, access in stores],
            "the ends of a row",
            [f"store_some({r.name}_data + {r.name}_at, column, size0, {r.name}_v);" for r in program.results],
        ),
    ]
    return emit_definition(program, variant, sizes, body)
