"""Turns a planned kernel into CUDA C++: the prelude that it needs, the element function, and the kernel of its family.

Text in, text out; no driver. The same text runs on a GPU, is disassembled in tests, and is executed on the CPU by the emulator.
"""

from __future__ import annotations

import functools

from wideload.emit.columns import emit_columns
from wideload.emit.dense import emit_dense
from wideload.emit.element import emit_element
from wideload.emit.foreach import emit_foreach
from wideload.emit.pitched import emit_pitched
from wideload.emit.prelude import select_prelude
from wideload.emit.rows import emit_rows
from wideload.emit.strided import emit_strided
from wideload.emit.strips import emit_strips
from wideload.emit.tile import emit_tile
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_kernel"]

_FAMILIES = {
    "columns": emit_columns,
    "dense": emit_dense,
    "foreach": emit_foreach,
    "pitched": emit_pitched,
    "rows": emit_rows,
    "strided": emit_strided,
    "strips": emit_strips,
    "tile": emit_tile,
}


@functools.lru_cache(maxsize=4096)
def emit_kernel(program: Program, variant: Variant) -> str:
    """The whole source of one kernel, named ``{program.name}_{variant.family}``."""
    code = f"{emit_element(program, variant)}\n\n{_FAMILIES[variant.family](program, variant)}\n"
    return f"{select_prelude(code)}\n\n{code}"
