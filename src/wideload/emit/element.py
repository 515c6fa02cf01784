"""Turns a program into the C++ functions that compute one element, and once a block what is the same for all, for every kernel family.

Text in, text out; knows nothing of memory or threads.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from wideload.emit.text import unrolled
from wideload.lower import Program, Statement
from wideload.plan import MAX_INLINED_FUNCTIONS, Variant

__all__ = ["element_call", "element_loop", "emit_element", "uniform_call", "uniform_values"]


_UNIFORM = ("uniform", "value")
"""Accesses of operands of which a member of lists has one element."""
_STEADY = ("row", "uniform", "value")
"""Accesses of operands that are the same for all elements of a thread, or nearly always."""


_NAME = re.compile(r"(?<!::)(?<![.\w])[A-Za-z_]\w*")
"""In the text of an expression: what is neither a global function nor a part of a number."""


def uniform_values(program: Program, variant: Variant) -> tuple[Statement, ...]:
    """The statements that every element of a block takes alike and others read: a foreach kernel computes them once a block.

    None where no function of a maths library is among what they take: other arithmetic is cheaper than the barrier.
    """
    return _split(program, variant)[2]


def _split(program: Program, variant: Variant) -> tuple[Sequence[Statement], Sequence[Statement], tuple[Statement, ...]]:
    """The statements of each element, those that a block takes once, and those of the latter that others read."""
    if variant.family != "foreach":
        return program.statements, (), ()
    varying = {parameter.name for parameter, access in zip(program.parameters, variant.loads, strict=True) if access not in _UNIFORM}
    varying |= {position.name for position in program.positions}
    own: list[Statement] = []
    uniform: list[Statement] = []
    for statement in program.statements:
        if statement.ctype.startswith("complex") or varying & set(_NAME.findall(statement.text)):
            varying.add(statement.name)
            own.append(statement)
        else:
            uniform.append(statement)
    if not any(statement.num_functions for statement in uniform):
        return program.statements, (), ()
    read = {word for of in (own, program.results) for each in of for word in _NAME.findall(each.text)}
    return own, uniform, tuple(statement for statement in uniform if statement.name in read)


def emit_element(program: Program, variant: Variant) -> str:
    """``void name_element(operands, positions, runtime scalars, uniform values, results by reference)``, the user's lines as comments.

    It is inlined for each of a thread's elements, unless that makes too much for the compiler. Behind it, where there are uniform
    values, stands ``void name_uniform(operands that are uniform, runtime scalars, the values by reference)``.
    """
    own, uniform, values = _split(program, variant)
    qualifier = "FUNCTION" if sum(each.num_functions for each in own) * variant.elements > MAX_INLINED_FUNCTIONS else "DEVICE"
    accesses = list(zip(program.parameters, variant.loads, strict=True))
    steady = {parameter.name for parameter, access in accesses if access in _STEADY}
    scalars = [f"const {s.ctype} {s.name}" for s in program.scalars]
    parameters = [f"const {p.type.compute} {p.name}" for p in program.parameters]
    parameters += [f"const {p.ctype} {p.name}" for p in program.positions]
    parameters += [*scalars, *(f"const {value.ctype} {value.name}" for value in values)]
    parameters += [f"{r.type.compute}& {r.name}" for r in program.results]
    lines = [*_statement_lines(own, steady), *(f"    {r.name} = {r.text};" for r in program.results)]
    element = _function(qualifier, f"{program.name}_element", parameters, lines)
    if not values:
        return element
    parameters = [f"const {p.type.compute} {p.name}" for p, access in accesses if access in _UNIFORM]
    parameters += [*scalars, *(f"{value.ctype}& {value.name}_once" for value in values)]
    lines = [*_statement_lines(uniform, steady), *(f"    {value.name}_once = {value.name};" for value in values)]
    return f"{element}\n\n{_function('DEVICE', f'{program.name}_uniform', parameters, lines)}"


def _statement_lines(statements: Sequence[Statement], steady: set[str]) -> list[str]:
    lines, last = [], None
    for statement in statements:
        if statement.at is not None and statement.at.text != last:
            last = statement.at.text
            lines.append(f"    // {_comment(last)}")
        text = statement.steady if statement.steady and statement.steady_in <= steady else statement.text
        lines.append(f"    const {statement.ctype} {statement.name} = {text};")
    return lines


def _function(qualifier: str, name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
    return f"{qualifier} void {name}({', '.join(parameters)})\n{{\n" + "\n".join(lines) + "\n}"


def uniform_call(program: Program, variant: Variant, values: Sequence[Statement]) -> list[str]:
    """Statements by which a block computes its `uniform_values` ``name_once`` and waits for them."""
    if not values:
        return []
    operands = [p.name for p, access in zip(program.parameters, variant.loads, strict=True) if access in _UNIFORM]
    arguments = [*operands, *(s.name for s in program.scalars), *(f"{value.name}_once" for value in values)]
    return [
        *(f"__shared__ {value.ctype} {value.name}_once;" for value in values),
        f"if (threadIdx.x == 0) {program.name}_uniform({', '.join(arguments)});",
        "__syncthreads();",
    ]


def element_call(program: Program, operands: list[str], results: list[str], uniform: Sequence[Statement] = ()) -> str:
    """A call of the element function on C++ values of the compute types; positions stand behind the operands."""
    values = [*(s.name for s in program.scalars), *(f"{value.name}_once" for value in uniform)]
    return f"{program.name}_element({', '.join([*operands, *values, *results])});"


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
