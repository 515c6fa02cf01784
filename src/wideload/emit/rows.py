"""Turns a program into the ``rows`` kernel: the output is one run, every input runs along its rows or is one element of each.

A thread computes one aligned access of the output, whatever the rows' length, pitch and alignment: its place in the rows costs one
division a thread, and inputs that are not aligned to the output are read as aligned words and realigned in registers.
"""

from __future__ import annotations

from wideload.emit.element import element_loop
from wideload.emit.signature import INDEX_TYPES, emit_definition, emit_uniform
from wideload.emit.walk import walk_sizes, walked_loads, whole_loads
from wideload.lower import Program
from wideload.plan import THREADS, Variant

__all__ = ["emit_rows"]


def emit_rows(program: Program, variant: Variant) -> str:
    """The kernel's text. Elements ``e`` to ``e + count`` of the output are a thread's; only at a row's end do they lie in two rows."""
    rank, count = variant.rank, variant.elements
    index, unsigned, divide = INDEX_TYPES[variant.index_bits]
    loads = walked_loads(program, variant)
    stores = list(zip(program.results, variant.stores, strict=True))
    sizes = ["n", "pad"]
    for d in range(rank - 1):
        sizes += [f"size{d}", f"multiplier{d}", f"shift{d}"]
    sizes += walk_sizes(loads, rank)

    def place(e: str, indent: str) -> list[str]:
        """Statements that take element ``e`` apart into ``column`` and the rows' coordinates."""
        lines, rest = [], f"({unsigned})({e})"
        for d in range(rank - 1):
            lines.append(f"{indent}const {unsigned} rest{d} = {divide}({rest}, multiplier{d}, shift{d});")
            lines.append(f"{indent}const {unsigned} at{d} = {rest} - rest{d} * ({unsigned})size{d};")
            rest = f"rest{d}"
        return lines

    coordinates = [*(f"at{d}" for d in range(rank - 1)), f"rest{rank - 2}" if rank > 1 else "e"]
    column = coordinates[0] if rank > 1 else "e"

    def row(name: str) -> str:
        """Where the row starts in an operand, and a plus sign."""
        return "".join(f"{at} * ({unsigned}){name}_stride{d} + " for d, at in enumerate(coordinates) if d)

    body = [
        f"const {index} e = (({index})blockIdx.x * {THREADS} + ({index})threadIdx.x) * {count} - ({index})pad;",
        f"if (e >= ({index})n) return;",
        f"const bool is_inside = e >= 0 && e + {count} <= ({index})n;",
        *emit_uniform(program, variant),
        *(f"vec<{p.type.storage}, {count}> {p.name}_v = {{}};" for p, _ in loads),
        *place("e", ""),
    ]
    in_row = f" && {column} + {count} <= ({unsigned})size0" if rank > 1 else ""
    if loads:
        body.append(f"if (is_inside{in_row}) {{  // whole accesses")
        body += whole_loads(loads, count, lambda name: f"{row(name)}0", lambda name: f"({row(name)}{column})")
        body += ["} else {  // the ends of a row or of the output", "#pragma unroll", f"    for (int k = 0; k < {count}; ++k) {{"]
        body += [f"        if (e + k < 0 || e + k >= ({index})n) continue;"]
        body += place("e + k", "        ")
        for p, access in loads:
            inner = "" if access == "row" else column if rank > 1 else "e + k"
            body.append(f"        {p.name}_v.set(k, {p.name}_data[{row(p.name)}{inner or '0'}]);")
        body += ["    }", "}"]
    body += element_loop(program, [p.name for p, _ in loads], count)
    body += ["if (is_inside) {"]
    body += [f"    store_{access}({r.name}_data + e, {r.name}_v);" for r, access in stores]
    body += ["} else {"]
    body += [f"    store_some({r.name}_data, e, n, {r.name}_v);" for r in program.results]
    body += ["}"]
    return emit_definition(program, variant, sizes, body)
