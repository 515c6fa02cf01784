"""Turns a program into the ``pitched`` kernel: outputs in rows with gaps between them, every input along the rows or one element of each.

As ``rows``, but a row's accesses begin anew: each is aligned to the first output, whose rows may start at any address.
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.signature import emit_head, emit_uniform
from wideload.lower import Program
from wideload.plan import THREADS, Variant

__all__ = ["emit_pitched"]


def emit_pitched(program: Program, variant: Variant) -> str:
    """The kernel's text. ``slot`` is a thread's access in its row; the first and the last may reach beyond the row's ends."""
    rank, count = variant.rank, variant.elements
    index, unsigned, divide = (
        ("int", "unsigned", "divide_u31") if variant.index_bits == 32 else ("long long", "unsigned long long", "divide_u63")
    )
    loads = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access in ("vector", "realigned", "row")]
    stores = list(zip(program.results, variant.stores, strict=True))
    beat = program.results[0].name
    sizes = ["n", "size0", "phase"]
    for d in range(rank - 1):
        sizes += [f"slots{d}" if d == 0 else f"size{d}", f"multiplier{d}", f"shift{d}"]
    for p, access in loads:
        sizes += [f"{p.name}_stride{d}" for d in range(1, rank)] + ([f"{p.name}_span"] if access == "realigned" else [])
    sizes += [f"{r.name}_stride{d}" for r in program.results for d in range(1, rank)]

    def row(name: str) -> str:
        """Where the row starts in an operand."""
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
    body += [
        f"const {unsigned} lead = ({beat}_at + ({unsigned})phase) % {count};  // the row's start behind an aligned access of {beat}",
        f"const {index} column = ({index})slot * {count} - ({index})lead;",
        f"const bool is_whole = column >= 0 && column + {count} <= ({index})size0;",
        *(f"vec<{p.type.storage}, {count}> {p.name}_v = {{}};" for p, _ in loads),
    ]
    if loads:
        body.append("if (is_whole) {")
        for p, access in loads:
            if access == "row":
                body.append(f"    {p.name}_v = repeat_element<{count}>({p.name}_data[{row(p.name)}]);")
            else:
                bounds = f", {p.name}_data, {p.name}_data + {p.name}_span" if access == "realigned" else ""
                body.append(f"    {p.name}_v = load_{access}<{count}>({p.name}_data + ({row(p.name)}) + column{bounds});")
        body += ["} else {  // the ends of a row", "#pragma unroll", f"    for (int k = 0; k < {count}; ++k) {{"]
        body += [f"        if (column + k < 0 || column + k >= ({index})size0) continue;"]
        body += [
            f"        {p.name}_v.set(k, {p.name}_data[{row(p.name)}{'' if access == 'row' else ' + column + k'}]);" for p, access in loads
        ]
        body += ["    }", "}"]
    operands = [
        f"widen({p.name}_v.get(k))" if access in ("vector", "realigned", "row") else p.name
        for p, access in zip(program.parameters, variant.loads, strict=True)
    ]
    body += [f"{r.type.compute} {r.name}_v[{count}];" for r in program.results]
    body += [
        "#pragma unroll",
        f"for (int k = 0; k < {count}; ++k) {element_call(program, operands, [f'{r.name}_v[k]' for r in program.results])}",
    ]
    body += ["if (is_whole) {"]
    body += [f"    store_{access}({r.name}_data + {r.name}_at + column, {r.name}_v);" for r, access in stores]
    body += ["} else {"]
    body += [f"    store_some({r.name}_data + {r.name}_at, column, size0, {r.name}_v);" for r in program.results]
    body += ["}"]
    text = "\n".join(line if line.startswith("#") else f"    {line}" for line in body)
    return f"{emit_head(program, variant, sizes)}\n{{\n{text}\n}}"
