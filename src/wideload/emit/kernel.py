"""Turns a planned kernel into CUDA C++: the prelude that it needs, the element function, and the kernel of its family.

Text in, text out; no driver. The same text runs on a GPU, is disassembled in tests, and is executed on the CPU by the emulator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module

from wideload.emit.dense import emit_dense
from wideload.emit.element import emit_element
from wideload.emit.prelude import select_prelude
from wideload.emit.rows import emit_rows
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_kernel"]

_FAMILIES: dict[str, Callable[[Program, Variant], str]] = {"dense": emit_dense, "rows": emit_rows}


def _emitter(family: str) -> Callable[[Program, Variant], str]:
    """``emit_{family}`` of the module of that name; those that fewer calls need are imported at the first kernel."""
    if family not in _FAMILIES:
        _FAMILIES[family] = getattr(import_module(f"wideload.emit.{family}"), f"emit_{family}")
    return _FAMILIES[family]


@functools.lru_cache(maxsize=4096)
def emit_kernel(program: Program, variant: Variant) -> str:
    """The whole source of one kernel, named ``{program.name}_{variant.family}``."""
    code = f"{emit_element(program, variant)}\n\n{_emitter(variant.family)(program, variant)}\n"
    return f"{select_prelude(code)}\n\n{code}"
