"""Turns a program into the ``strips`` kernel: rows of whole accesses, along whose outer dims an input repeats.

A thread takes the same columns of several rows, so that what they share is read and widened once.
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.signature import emit_definition, emit_uniform, inside
from wideload.emit.text import INDEX_TYPES, division_sizes, take_apart, unrolled
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_strips"]


def emit_strips(program: Program, variant: Variant) -> str:
    """The kernel's text. ``r`` counts the rows of a strip, which are neighbours along dim ``variant.strip.dim``."""
    assert variant.strip is not None
    rank, rows, dim = variant.rank, variant.strip.rows, variant.strip.dim
    count = variant.elements // rows
    _, unsigned, _ = INDEX_TYPES[variant.index_bits]
    loads = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access in ("vector", "repeated", "row")]
    functions = {p.name: function for p, function in zip(program.parameters, variant.load_functions, strict=True)}
    divisors = [f"slots{d}" for d in range(rank - 1)]
    sizes = ["n", *division_sizes(divisors)]
    names = [*(p.name for p, _ in loads), *(r.name for r in program.results)]
    sizes += [f"{name}_stride{d}" for name in names for d in range(1, rank)]

    def place(name: str, row: str = "r") -> str:
        """Where a row of the strip starts."""
        at = [f"(at{d} * {rows} + {row})" if d == dim else f"at{d}" for d in range(1, rank)]
        return " + ".join(f"{a} * ({unsigned}){name}_stride{d}" for d, a in enumerate(at, 1))

    declared, own, repeated = [], [], []
    for p, access in loads:
        kind = p.type.storage if access == "row" else f"vec<{p.type.storage}, {count}>"
        declared.append(f"{kind} {p.name}_v{'' if access == 'repeated' else f'[{rows}]'};")
        match access:
            case "row":
                own.append(f"{p.name}_v[r] = {p.name}_data[{place(p.name)}];")
            case "vector":
                own.append(f"{p.name}_v[r] = {functions[p.name]}<{count}>({p.name}_data + ({place(p.name)} + column));")
            case _:
                repeated.append(f"{p.name}_v = {functions[p.name]}<{count}>({p.name}_data + ({place(p.name, '0')} + column));")
    held = {p.name: {"row": f"{p.name}_v[r]", "vector": f"{p.name}_v[r].get(k)"}.get(a, f"{p.name}_v.get(k)") for p, a in loads}
    operands = [f"widen({held[p.name]})" if p.name in held else p.name for p in program.parameters]
    each = [
        *(f"{r.type.compute} {r.name}_v[{count}];" for r in program.results),
        *unrolled("k", count, element_call(program, operands, [f"{r.name}_v[k]" for r in program.results])),
    ]
    stores = [
        f"store_{access}({r.name}_data + ({place(r.name)} + column), {r.name}_v);"
        for r, access in zip(program.results, variant.stores, strict=True)
    ]
    places, rest = take_apart("i", [f"at{d}" for d in range(rank - 1)], divisors, variant.index_bits)
    body = [
        f"const {unsigned} i = ({unsigned})blockIdx.x * {variant.threads} + threadIdx.x;",
        *emit_uniform(program, variant),
        *places,
        f"const {unsigned} at{rank - 1} = {rest};",
        f"const {unsigned} column = at0 * {count};",
        *declared,
        *unrolled("r", rows, own, ctype="unsigned"),
        "// once for all rows",
        *repeated,
        *unrolled("r", rows, [*each, *stores], ctype="unsigned"),
    ]
    return emit_definition(program, variant, sizes, [body[0], *inside(program, "i", f"({unsigned})n", body[1:])])
