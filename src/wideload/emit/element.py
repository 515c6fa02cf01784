"""Turns a program into the C++ function that computes one element, shared by every kernel family.

Text in, text out; knows nothing of memory or threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from wideload.emit.text import unrolled
from wideload.lower import Program
from wideload.plan import MAX_INLINED_FUNCTIONS, Variant

__all__ = ["element_call", "element_loop", "emit_element"]


_STEADY = ("row", "uniform", "value")
"""Accesses of operands that are the same for all elements of a thread, or nearly always."""


def emit_element(program: Program, variant: Variant) -> str:
    """``void name_element(operands, positions, runtime scalars, results by reference)``, the user's lines as comments.

    It is inlined for each of a thread's elements, unless that makes too much for the compiler.
    """
    qualifier = "FUNCTION" if program.num_functions * variant.elements > MAX_INLINED_FUNCTIONS else "DEVICE"
    steady = {parameter.name for parameter, access in zip(program.parameters, variant.loads, strict=True) if access in _STEADY}
    parameters = [f"const {p.type.compute} {p.name}" for p in program.parameters]
    parameters += [f"const {p.ctype} {p.name}" for p in program.positions]
    parameters += [f"const {s.ctype} {s.name}" for s in program.scalars]
    parameters += [f"{r.type.compute}& {r.name}" for r in program.results]
    lines, last = [], None
    for statement in program.statements:
        if statement.at is not None and statement.at.text != last:
            last = statement.at.text
            lines.append(f"    // {_comment(last)}")
        text = statement.steady if statement.steady and statement.steady_in <= steady else statement.text
        lines.append(f"    const {statement.ctype} {statement.name} = {text};")
    lines += [f"    {r.name} = {r.text};" for r in program.results]
    return f"{qualifier} void {program.name}_element({', '.join(parameters)})\n{{\n" + "\n".join(lines) + "\n}"


def element_call(program: Program, operands: list[str], results: list[str]) -> str:
    """A call of the element function on C++ values of the compute types; positions stand behind the operands."""
    return f"{program.name}_element({', '.join([*operands, *(s.name for s in program.scalars), *results])});"


def element_loop(program: Program, held: Sequence[str], count: int) -> list[str]:
    """Statements that compute a thread's ``count`` elements ``name_v`` of each result.

    The operands ``held`` and the positions are vectors ``name_v``.
    """
    operands = [f"widen({p.name}_v.get(k))" if p.name in held else p.name for p in program.parameters]
    operands += [f"{p.name}_v.get(k)" for p in program.positions]
    call = element_call(program, operands, [f"{r.name}_v[k]" for r in program.results])
    results = [f"{r.type.compute} {r.name}_v[{count}];" for r in program.results]
    return [*results, *unrolled("k", count, call)]


def _comment(text: str) -> str:
    """The user's line as it may stand after ``//``: plain ASCII, and no backslash that would continue the comment."""
    return text.encode("ascii", "replace").decode().rstrip("\\ ")
