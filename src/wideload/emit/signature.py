"""Turns a program and a variant into what frames a kernel: its head, operands held by value or read once, and the braces.

The order of the parameters is the launcher's contract: loads, stores, seed, sizes, runtime scalars.
"""

from __future__ import annotations

from collections.abc import Sequence

from wideload.emit.positions import position_sizes
from wideload.emit.text import indented
from wideload.lower import Program
from wideload.plan import (
    ACCESS_BYTES,
    COLUMNS_BLOCKS,
    HALO_BLOCKS,
    MANY_LOADS,
    MANY_LOADS_BLOCKS,
    NARROW_RING_BLOCKS,
    REGISTER_BYTES,
    RING_BLOCKS,
    STARTING_BLOCKS,
    THREADS,
    TILE_BLOCKS,
    Variant,
)

__all__ = ["emit_definition", "emit_uniform", "inside"]

_COMPLEX = "complex<double>"


def emit_definition(program: Program, variant: Variant, sizes: Sequence[str], body: Sequence[str]) -> str:
    """The kernel whose run-time integers are ``sizes`` and whose statements, a line each, are ``body``.

    Every thread of a block gets to the end of ``body`` where a result is one value of all elements: see `inside`.
    """
    body = [*_declare_reduced(program), *body, *(f"{r.name}_data.settle();" for r in program.reduced)]
    start, wait = "let_next_start();", "wait_for_previous();"
    if not variant.moves_much:
        start = f"if (gridDim.x <= {STARTING_BLOCKS}) {start}"
    if not variant.is_one_of_several:
        body = [wait, *body, start]
    else:
        body = [start, wait, *body] if variant.reads_results else [start, *body, wait]
    text = "\n".join(indented(body))
    return f"{_head(program, variant, sizes)}\n{{\n{text}\n}}"


def _declare_reduced(program: Program) -> list[str]:
    """What is stored to in the place of the memory of a result that is one value of all elements."""
    return [f"largest<{r.type.storage}> {r.name}_data({r.name}_word);" for r in program.reduced]


def inside(program: Program, counter: str, bound: str, body: Sequence[str]) -> list[str]:
    """``body`` for threads whose ``counter`` is below ``bound``; the others leave, where no value of all elements is waited for."""
    if not program.reduced:
        return [f"if ({counter} >= {bound}) return;", *body]
    return [f"if ({counter} < {bound}) {{", *indented(body), "}"]


def _head(program: Program, variant: Variant, sizes: Sequence[str]) -> str:
    """``extern "C" __global__ ...(parameters)``. None is ``__restrict__``: a load of what never changes may be moved to before the wait."""
    parameters = []
    for parameter, access in zip(program.parameters, variant.loads, strict=True):
        if access == "value":
            ctype = {"float": "double", "complex": _COMPLEX}.get(parameter.type.kind, "long long")
            parameters += _by_value(ctype, f"{parameter.name}_value")
        else:
            parameters.append(f"const {parameter.type.storage}* {parameter.name}_data")
    for r in program.results:
        parameters.append(f"{r.type.storage}* {r.name}_{'word' if r.is_reduced else 'data'}")
    parameters += ["const long long* seed_data"] if program.has_draws else []
    parameters += [f"const long long {size}" for size in (*sizes, *position_sizes(program, variant))]
    parameters += [parameter for s in program.scalars for parameter in _by_value(s.ctype, s.name)]
    listed = ",\n    ".join(parameters)
    blocks = _least_blocks(program, variant)
    bounds = f"{variant.threads}, {blocks}" if blocks else variant.threads
    return f'extern "C" __global__ void __launch_bounds__({bounds})\n{program.name}_{variant.family}(\n    {listed})'


def _least_blocks(program: Program, variant: Variant) -> int | None:
    """Blocks an SM that registers are to leave room for; None where that is left to ptxas."""
    if variant.tile:
        return _tile_blocks(program, variant)
    if variant.columns:
        return COLUMNS_BLOCKS * THREADS // variant.threads
    num_loads = sum({"vector": variant.rows, "row": 1, "repeated": 1}.get(access, 0) for access in variant.loads)
    return MANY_LOADS_BLOCKS * THREADS // variant.threads if variant.is_whole and num_loads >= MANY_LOADS else None


def _tile_blocks(program: Program, variant: Variant) -> int:
    tile = variant.tile
    assert tile is not None
    is_narrow = tile.width * REGISTER_BYTES > ACCESS_BYTES
    num_beside = sum(access in ("vector", "realigned", "strided") for access in variant.loads)
    if program.num_functions or num_beside > (is_narrow and tile.ring > 0):
        return TILE_BLOCKS
    if tile.ring:
        return NARROW_RING_BLOCKS if is_narrow and not num_beside else RING_BLOCKS
    return HALO_BLOCKS if tile.halo and is_narrow else TILE_BLOCKS


def _by_value(ctype: str, name: str) -> list[str]:
    """The parameters that a number is passed by: a complex one by its parts."""
    return [f"const double {name}_re", f"const double {name}_im"] if ctype == _COMPLEX else [f"const {ctype} {name}"]


def emit_uniform(program: Program, variant: Variant) -> list[str]:
    """Statements for what is one value for all elements: operands by value or by one load, complex numbers of their parts, the seed."""
    lines = ["const unsigned long long seed = (unsigned long long)*seed_data;"] if program.has_draws else []
    lines += [f"const {_COMPLEX} {s.name}({s.name}_re, {s.name}_im);" for s in program.scalars if s.ctype == _COMPLEX]
    for parameter, access in zip(program.parameters, variant.loads, strict=True):
        if access == "value" and parameter.type.kind == "complex":
            lines.append(f"const {parameter.type.compute} {parameter.name}({parameter.name}_value_re, {parameter.name}_value_im);")
        elif access == "value":
            lines.append(f"const {parameter.type.compute} {parameter.name} = convert<{parameter.type.compute}>({parameter.name}_value);")
        elif access == "uniform":
            lines.append(f"const {parameter.type.compute} {parameter.name} = widen(*{parameter.name}_data);")
    return lines
