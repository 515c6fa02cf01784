"""Turns a program into the ``strided`` kernel: any strides, any rank, several elements in flight a thread.

The linear index runs along the output's memory and is taken apart by multiply-shift division; sizes and strides are run-time
arguments, so one text serves every shape of a rank.
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.positions import draw_position, position_at, position_type
from wideload.emit.signature import emit_definition, emit_uniform
from wideload.emit.text import INDEX_TYPES, division_sizes, take_apart, unrolled
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_strided"]


def emit_strided(program: Program, variant: Variant) -> str:
    """The kernel's text. Neighbouring threads take neighbouring elements; a thread's elements are a block apart."""
    rank, count = variant.rank, variant.elements
    _, index, _ = INDEX_TYPES[variant.index_bits]
    loads = [(p, access) for p, access in zip(program.parameters, variant.loads, strict=True) if access == "strided"]
    positions = list(zip(program.positions, variant.paces, strict=True))
    walked = [*(p.name for p, _ in loads), *(r.name for r in program.results)]
    divisors, inner = [f"size{d}" for d in range(rank - 1)], [f"at{d}" for d in range(rank - 1)]
    sizes = ["n", *division_sizes(divisors)]
    sizes += [f"{name}_stride{d}" for name in walked for d in range(rank)]

    places, rest = take_apart("i", inner, divisors, variant.index_bits)
    coordinates = [*inner, rest]

    def offset(name: str) -> str:
        return " + ".join(f"{at} * ({index}){name}_stride{d}" for d, at in enumerate(coordinates))

    loading = [
        f"const {index} i = first + k * {variant.threads};",
        f"if (i >= ({index})n) break;",
        *places,
        *(f"{p.name}_v[k] = {p.name}_data[{offset(p.name)}];" for p, _ in loads),
        *(f"{p.name}_v[k] = {position_at(p, pace, coordinates)};" for p, pace in positions),
        *(f"{r.name}_at[k] = {offset(r.name)};" for r in program.results),
    ]
    operands = [
        f"widen({p.name}_v[k])" if access == "strided" else p.name for p, access in zip(program.parameters, variant.loads, strict=True)
    ]
    operands += [draw_position(p, f"{p.name}_v[k]") for p, _ in positions]
    storing = [
        f"if (first + k * {variant.threads} >= ({index})n) break;",
        *(f"{r.type.compute} {r.name};" for r in program.results),
        element_call(program, operands, [r.name for r in program.results]),
        *(f"{r.name}_data[{r.name}_at[k]] = narrow_to<{r.type.storage}>::from({r.name});" for r in program.results),
    ]
    body = [
        f"const {index} first = ({index})blockIdx.x * {variant.threads * count} + threadIdx.x;",
        *emit_uniform(program, variant),
        *(f"{p.type.storage} {p.name}_v[{count}];" for p, _ in loads),
        *(f"{position_type(pace)} {p.name}_v[{count}];" for p, pace in positions),
        *(f"{index} {r.name}_at[{count}];" for r in program.results),
        *unrolled("k", count, loading, comment="where element i lies in each operand"),
        *unrolled("k", count, storing),
    ]
    return emit_definition(program, variant, sizes, body)
