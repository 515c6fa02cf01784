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
    cuts = ["group_rows", "shift", "early_parts", "early_groups", "late_shift"]
    sizes = ["rows", "columns", *cuts, *division_sizes(["tiles"]), *(f"{name}_stride1" for name in walked)]
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

    # A row behind the last is loaded and computed as the last one is. A branch round it would take its loads along, behind stores.
    loading = [f"const {unsigned} at = min(row + r * {lanes}, end - 1);", *(f"{name}_v[r] = {value};" for _, name, value in own)]
    loop = [
        *(f"{kind} {name}_v[{rows}];" for kind, name, _ in own),
        *unrolled("r", rows, loading, ctype="unsigned"),
        *unrolled("r", rows, row, ctype="unsigned"),
    ]
    places, part = take_apart("i", ["tile"], ["tiles"], variant.index_bits)
    body = [
        f"const {unsigned} i = blockIdx.x;",
        *emit_uniform(program, variant),
        *places,
        f"const bool is_late = {part} >= ({unsigned})early_parts;",
        f"const {unsigned} of_these = {part} - (is_late ? ({unsigned})early_parts : 0);",
        "const int of_group = (int)(is_late ? late_shift : shift);",
        f"const {unsigned} group = (of_these >> of_group) + (is_late ? ({unsigned})early_groups : 0);",
        f"const {unsigned} turn = of_these - (of_these >> of_group << of_group), row0 = group * ({unsigned})group_rows;",
        f"const {unsigned} first = tile * {across * count};",
        f"const {unsigned} column = first + threadIdx.x % {across} * {count};",
        f"const bool is_inside = column < ({unsigned})columns;",
        f"const {unsigned} step = ({unsigned}){lanes * rows} << of_group;",
        f"const {unsigned} end = is_inside ? min(row0 + ({unsigned})group_rows, ({unsigned})rows) : 0;",
        *repeated,
        *(f"{r.type.compute} {r.name}_sum[{count}] = {{}};" for r in sums),
        f"{unsigned} row = row0 + turn * {lanes * rows} + threadIdx.x / {across};",
        "for (; row < end; row += step) {",
        *indented(loop),
        "}",
    ]
    how = f"{variant.threads}, {across}, {str(variant.columns.keeps_sums).lower()}"
    for number, r in enumerate(sums):
        body += ["__syncthreads();"] if number else []
        place = f"{part} * ({unsigned})columns + first"
        body.append(f"add_lanes<{how}>({r.name}_data + ({place}), {r.name}_sum, ({unsigned})columns - first);")
    return emit_definition(program, variant, sizes, body)
