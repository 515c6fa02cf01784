"""Turns a program into the ``dense`` kernel: every operand in one run, one access a thread, one block a tile, no loop.

The wall on an H200 is reached with exactly this: 256 threads, 16 bytes each, grid as large as the work (facts measured there:
4.33 TB/s against 3.94 - 4.15 for a grid-stride loop).
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.signature import emit_head, emit_uniform
from wideload.lower import Program
from wideload.plan import THREADS, Variant

__all__ = ["emit_dense"]


def emit_dense(program: Program, variant: Variant) -> str:
    """The kernel's text. Only the last block can be partial; it alone looks at the element count again, for every access."""
    count = variant.elements
    runs = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access == "vector"]
    operands = [
        f"widen({p.name}_v.get(k))" if access == "vector" else p.name for p, access in zip(program.parameters, variant.loads, strict=True)
    ]
    stores = list(zip(program.results, variant.stores, strict=True))
    body = [
        f"const long long first = (long long)blockIdx.x * {THREADS * count};",
        f"const long long i = first + threadIdx.x * {count};",
        f"const bool is_full = first + {THREADS * count} <= n;",
        *emit_uniform(program, variant),
        *(f"vec<{p.type.storage}, {count}> {p.name}_v;" for p, _ in runs),
    ]
    if runs:
        body += ["if (is_full) {  // inner block: whole accesses, no bounds"]
        body += [f"    {p.name}_v = load_{access}<{count}>({p.name}_data + i);" for p, access in runs]
        body += ["} else {  // the last block"]
        body += [f"    {p.name}_v = load_some<{count}>({p.name}_data, i, n);" for p, _ in runs]
        body += ["}"]
    body += [f"{r.type.compute} {r.name}_v[{count}];" for r in program.results]
    body += [
        "#pragma unroll",
        f"for (int k = 0; k < {count}; ++k) {element_call(program, operands, [f'{r.name}_v[k]' for r in program.results])}",
    ]
    body += ["if (is_full) {"]
    body += [f"    store_{access}({r.name}_data + i, {r.name}_v);" for r, access in stores]
    body += ["} else {"]
    body += [f"    store_some({r.name}_data, i, n, {r.name}_v);" for r in program.results]
    body += ["}"]
    text = "\n".join(line if line.startswith("#") else f"    {line}" for line in body)
    return f"{emit_head(program, variant, ['n'])}\n{{\n{text}\n}}"
