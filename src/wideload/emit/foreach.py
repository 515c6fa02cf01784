"""Turns a program into the ``foreach`` kernel: a block computes one chunk of one tensor of a list.

Pointers, element counts and numbers come by value, in a table of the tensors; which chunk is a block's stands in a map in memory.
A block looks at the addresses itself: aligned tensors take whole accesses, others are read as aligned words and realigned.
"""

from __future__ import annotations

from wideload.emit.edges import computed
from wideload.emit.element import element_call, uniform_call, uniform_values
from wideload.emit.positions import position_type
from wideload.emit.text import indented, unrolled
from wideload.lower import Program
from wideload.plan import Variant

__all__ = ["emit_foreach"]


def emit_foreach(program: Program, variant: Variant) -> str:
    """The table's type and the kernel's text. Element ``e`` of a tensor begins an access that is aligned in the first output."""
    table, name = variant.table, program.name
    assert table is not None
    count, threads = variant.elements // table.accesses, variant.threads
    step, size = threads * count, threads * variant.elements
    loads = list(zip(program.parameters, variant.loads, table.shared_loads, strict=True))
    runs = [p for p, access, _ in loads if access == "vector"]
    scalars = list(zip(program.scalars, table.shared_scalars, strict=True))

    def entry(declared: str, is_shared: bool) -> str:
        return f"    {declared};" if is_shared else f"    {declared}[{table.capacity}];"

    def value(member: str, is_shared: bool) -> str:
        return f"lists_data.{member}" if is_shared else f"lists_data.{member}[slot]"

    members, body = [], []
    for k, (p, access, is_shared) in enumerate(loads):
        if access == "value":
            members.append(entry(f"{'double' if p.type.kind == 'float' else 'long long'} {p.name}_value", is_shared))
            body.append(f"const {p.type.compute} {p.name} = convert<{p.type.compute}>({value(f'{p.name}_value', is_shared)});")
        else:
            members.append(entry(f"{'' if k in table.in_place else 'const '}{p.type.storage}* {p.name}_data", is_shared))
            pointer = value(f"{p.name}_data", is_shared)
            if access == "uniform":
                body.append(f"const {p.type.compute} {p.name} = widen(*{pointer});")
            else:
                body.append(f"const {p.type.storage}* const {p.name}_data = {pointer};")
    for r, load in zip(program.results, table.in_place, strict=True):
        if r.is_reduced:
            members.append(entry(f"{r.type.storage}* {r.name}_word", False))
            body.append(f"largest<{r.type.storage}> {r.name}_data({value(f'{r.name}_word', False)});")
            continue
        if load is None:
            members.append(entry(f"{r.type.storage}* {r.name}_data", False))
        pointer = f"{r.name if load is None else program.parameters[load].name}_data"
        body.append(f"{r.type.storage}* const {r.name}_data = {value(pointer, False)};")
    members.append(entry("long long n", False))
    for s, is_shared in scalars:
        members.append(entry(f"{s.ctype} {s.name}", is_shared))
        body.append(f"const {s.ctype} {s.name} = {value(s.name, is_shared)};")
    if program.has_draws:
        members.append(entry("const long long* seed_data", True))
        body.append("const unsigned long long seed = (unsigned long long)lists_data.seed_data[slot];")

    stored = [r.name for r in program.results if not r.is_reduced]
    walked = [*(p.name for p in runs), *stored]
    aligned = [f"is_aligned<{count}>({walker}_data)" for walker in walked]
    beat = next(iter((*stored, *walked)), None)
    phase = f" - phase_of<{count}>({beat}_data)" if beat else ""
    operands = [f"widen({p.name}_v[m].get(k))" if access == "vector" else p.name for p, access, _ in loads]
    operands += [f"{p.name}_v[m].get(k)" for p in program.positions]
    uniform = uniform_values(program, variant)
    call = element_call(program, operands, [f"{r.name}_v[m][k]" for r in program.results], uniform)
    lines = [
        "const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);",
        "const int slot = chunk_v.at[0];",
        "const long long n = lists_data.n[slot];",
        *body,
        f"const long long first = (long long)chunk_v.at[1] * {size}{phase};",
        "if (first >= n) return;",
        f"const long long e = first + threadIdx.x * {count};",
        f"const bool is_full = first >= 0 && first + {size} <= n{''.join(f' && {is_so}' for is_so in aligned)};",
        *(f"vec<{p.type.storage}, {count}> {p.name}_v[{table.accesses}];" for p in runs),
    ]
    if runs:
        lines += ["if (is_full) {  // whole accesses, no bounds"]
        whole = [f"{p.name}_v[m] = load_vector<{count}>({p.name}_data + e + m * {step});" for p in runs]
        parts = [f"{p.name}_v[m] = load_part<{count}>({p.name}_data, e + m * {step}, n);" for p in runs]
        lines += indented(unrolled("m", table.accesses, whole))
        lines += ["} else {  // the ends of a tensor, or addresses that are not aligned"]
        lines += indented(unrolled("m", table.accesses, parts))
        lines += ["}"]
    counts = []
    for position, pace in zip(program.positions, variant.paces, strict=True):
        first, draw = f"({position_type(pace)})(e + m * {step})", position.draw
        counted = f"count_run<{count}>({first})" if draw is None else f"draw_run<{draw.bits}, {count}>(seed, {draw.stream}, {first})"
        counts.append(f"{position.name}_v[m] = {counted};")
        lines.append(f"vec<{position_type(pace) if draw is None else position.ctype}, {count}> {position.name}_v[{table.accesses}];")
    lines += unrolled("m", table.accesses, counts) if counts else []
    lines += uniform_call(program, variant, uniform)  # behind the loads, which are on their way meanwhile
    lines += [f"{r.type.compute} {r.name}_v[{table.accesses}][{count}];" for r in program.results]
    compute, at = unrolled("m", table.accesses, unrolled("k", count, call)), f"e + m * {step}"
    whole, edge = [], []
    for r in program.results:
        data, values = f"{r.name}_data", f"{r.name}_v[m]"
        store, some = f"store_{'reduced' if r.is_reduced else 'whole'}({data} + {at}, {values});", f"store_some({data}, {at}, n, {values});"
        whole.append(store)
        edge.append(some if r.is_reduced else f"if (is_whole<{count}>({data}, {at}, n)) {store} else {some}")
    lines += computed(program, variant, compute, unrolled("m", table.accesses, whole), "the ends", unrolled("m", table.accesses, edge))
    lines += [f"{r.name}_data.settle();" for r in program.reduced]
    struct = "\n".join([f"struct {name}_lists_data {{  // of each tensor, by value", *members, "};"])
    head = (
        f'extern "C" __global__ void __launch_bounds__({threads})\n{name}_foreach(\n'
        f"    const __grid_constant__ {name}_lists_data lists_data,\n    const int* __restrict__ chunks_data)"
    )
    return f"{struct}\n\n{head}\n{{\n" + "\n".join(indented(lines)) + "\n}"
