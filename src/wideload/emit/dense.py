"""Turns a program into the ``dense`` kernel: every operand in one run, one access a thread, one block a tile, no loop.

The wall on an H200 is reached with exactly this: 16 bytes a thread and operand, grid as large as the work (4.33 TB/s measured there
against 3.94 - 4.15 for a grid-stride loop).
"""

from __future__ import annotations

from wideload.emit.edges import computed
from wideload.emit.element import element_loop
from wideload.emit.positions import count_positions
from wideload.emit.signature import emit_definition, emit_uniform
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_dense"]


def emit_dense(program: Program, variant: Variant) -> str:
    """The kernel's text. One access alone can be partial: its thread looks at the element count again, for every element."""
    count = variant.elements
    runs = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access == "vector"]
    stores = list(zip(program.results, variant.stores, strict=True))
    body = [
        f"const long long i = (long long)blockIdx.x * {variant.threads * count} + threadIdx.x * {count};",
        f"const bool is_full = i + {count} <= n;",
        *(f"vec<{p.type.storage}, {count}> {p.name}_v;" for p, _ in runs),
    ]
    if runs:
        body += ["if (is_full) {"]
        body += [f"    {p.name}_v = load_{access}<{count}>({p.name}_data + i);" for p, access in runs]
        body += ["} else {  // the last elements"]
        body += [f"    {p.name}_v = load_some<{count}>({p.name}_data, i, n);" for p, _ in runs]
        body += ["}"]
    body += emit_uniform(program, variant)
    body += count_positions(program, variant, count, ["i"], declared=False)
    body += computed(
        program,
        variant,
        element_loop(program, [p.name for p, _ in runs], count),
        [f"store_{access}({r.name}_data + i, {r.name}_v);" for r, access in stores],
        "the last elements",
        [f"store_some({r.name}_data, i, n, {r.name}_v);" for r in program.results],
    )
    return emit_definition(program, variant, ["n"], body)
