"""Turns a program into the ``columns`` kernel: a block takes some columns of many rows, stores results, and adds others up over its rows.

A thread keeps to one access of columns and adds up in registers; those of a block that share columns do so at the end, in shared memory.
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.positions import count_positions
from wideload.emit.signature import emit_definition, emit_uniform
from wideload.emit.text import INDEX_TYPES, division_sizes, indented, take_apart, unrolled
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_columns"]


def emit_columns(program: Program, variant: Variant) -> str:
    """The kernel's text. ``r`` counts the rows of which a thread has loads in flight; threads outside the columns have no rows."""
    assert variant.columns is not None
    across, rows = variant.columns.across, variant.columns.rows
    count, lanes = variant.elements // rows, variant.threads // across
    _, unsigned, _ = INDEX_TYPES[variant.index_bits]
    loads = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access in ("vector", "repeated", "row")]
    stored = [r for r in program.results if not r.is_summed]
    walked = [p.name for p, access in loads if access != "repeated"] + [r.name for r in stored]
    sizes = ["rows", "columns", "part_rows", *division_sizes(["tiles0", "tiles1"]), *(f"{name}_stride1" for name in walked)]
    repeated, own = [], []
    for p, access in loads:
        kind = p.type.storage if access == "row" else f"vec<{p.type.storage}, {count}>"
        if access == "repeated":
            repeated += [f"{kind} {p.name}_v = {{}};", f"if (is_inside) {p.name}_v = load_vector<{count}>({p.name}_data + column);"]
            continue
        place = f"at * ({unsigned}){p.name}_stride1"
        value = f"{p.name}_data[{place}]" if access == "row" else f"load_vector<{count}>({p.name}_data + ({place} + column))"
        own.append((kind, p.name, value))
    held = {p.name: {"row": f"{p.name}_v[r]", "vector": f"{p.name}_v[r].get(k)"}.get(a, f"{p.name}_v.get(k)") for p, a in loads}
    operands = [f"widen({held[p.name]})" if p.name in held else p.name for p in program.parameters]
    operands += [f"{p.name}_v.get(k)" for p in program.positions]
    sums = [r for r in program.results if r.is_summed]
    each = [
        element_call(program, operands, [f"{r.name}_v[k]" for r in program.results]),
        *(f"{r.name}_sum[k] += is_row ? {r.name}_v[k] : 0;" for r in sums),
    ]
    row = [
        f"const {unsigned} at = row + r * {lanes};",
        "const bool is_row = at < end;",
        *count_positions(program, variant, count, ["column", "at"], declared=False),
        *(f"{r.type.compute} {r.name}_v[{count}];" for r in program.results),
        *unrolled("k", count, each),
        *(f"if (is_row) store_vector({r.name}_data + (at * ({unsigned}){r.name}_stride1 + column), {r.name}_v);" for r in stored),
    ]

    def held_as(suffix: str) -> list[str]:
        return [f"{kind} {name}_{suffix}[{rows}];" for kind, name, _ in own]

    def loading(first: str, suffix: str) -> list[str]:
        """A row behind the last is loaded and computed as the last one is. A branch round it would take its loads along, behind stores."""
        loads = [f"{name}_{suffix}[r] = {value};" for _, name, value in own]
        return unrolled("r", rows, [f"const {unsigned} at = min({first} + r * {lanes}, end - 1);", *loads], ctype="unsigned")

    computing = unrolled("r", rows, row, ctype="unsigned")
    first_loads, loop = [], [*held_as("v"), *loading("row", "v"), *computing]
    if not variant.reads_results:  # of partial sums a thread has no more rows, as a rule, than it loads at once
        first_loads = [*held_as("v"), "if (row < end) {", *indented(loading("row", "v")), "}"]
        taken = [f"{name}_v[r] = {name}_next[r];" for _, name, _ in own]
        loop = [*held_as("next"), *loading("row + step", "next"), *computing, *unrolled("r", rows, taken, ctype="unsigned")]
    places, group = take_apart("i", ["at0", "at1"], ["tiles0", "tiles1"], variant.index_bits)
    part = f"({group} * ({unsigned})tiles1 + at1)"
    body = [
        f"const {unsigned} i = blockIdx.x;",
        *emit_uniform(program, variant),
        *places,
        f"const {unsigned} first = at0 * {across * count};",
        f"const {unsigned} column = first + threadIdx.x % {across} * {count};",
        f"const bool is_inside = column < ({unsigned})columns;",
        f"const {unsigned} step = ({unsigned})tiles1 * {lanes * rows}, row0 = {group} * ({unsigned})tiles1 * ({unsigned})part_rows;",
        f"const {unsigned} end = is_inside ? min(row0 + ({unsigned})tiles1 * ({unsigned})part_rows, ({unsigned})rows) : 0;",
        *repeated,
        *(f"{r.type.compute} {r.name}_sum[{count}] = {{}};" for r in sums),
        f"{unsigned} row = row0 + at1 * {lanes * rows} + threadIdx.x / {across};",
        *first_loads,
        "for (; row < end; row += step) {",
        *indented(loop),
        "}",
    ]
    for number, r in enumerate(sums):
        body += ["__syncthreads();"] if number else []
        body.append(
            f"add_lanes<{variant.threads}, {across}>({r.name}_data + ({part} * ({unsigned})columns + first), {r.name}_sum, "
            f"({unsigned})columns - first);"
        )
    return emit_definition(program, variant, sizes, body)
