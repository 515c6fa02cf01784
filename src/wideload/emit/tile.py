"""Turns a program into the ``tile`` kernel: some inputs run along another dim than the outputs, and turn in shared memory.

A block computes ``columns`` along the outputs' fast dim by ``lines`` along the turned inputs'. It reads the turned inputs along their
lines and everything else along the columns, 16 bytes a thread and access on both sides, with one barrier in between.
"""

from __future__ import annotations

from wideload.emit.element import element_call
from wideload.emit.signature import emit_head, emit_uniform
from wideload.lower import Parameter, Program
from wideload.plan import ACCESS_BYTES, Access, Tile, Variant

__all__ = ["emit_tile"]

_TURNED = ("turned", "turned_realigned")


def emit_tile(program: Program, variant: Variant) -> str:
    """The kernel's text. Blocks whose tile is full have no bounds; the others use whole accesses as far as these are inside."""
    assert variant.tile is not None
    tile, rank, threads = variant.tile, variant.rank, variant.threads
    index, unsigned = ("int", "unsigned") if variant.index_bits == 32 else ("long long", "unsigned long long")
    loads = list(zip(program.parameters, variant.loads, strict=True))
    turned = [(p, access) for p, access in loads if access in _TURNED]
    direct = [(p, access) for p, access in loads if access in ("vector", "realigned", "row", "strided")]
    stores = list(zip(program.results, variant.stores, strict=True))
    passes = tile.columns * tile.lines // (tile.width * tile.depth * threads)

    shape = f"{tile.columns}, {tile.lines}, {threads}"
    num_accesses = tile.columns * tile.lines // tile.width

    body = [
        *_locate(tile, rank, index),
        f"const bool is_full = column0 >= 0 && column0 + {tile.columns} <= ({index})size0 && line0 + {tile.lines} <= ({index})size1;",
        *emit_uniform(program, variant),
    ]
    for name in (*(p.name for p, _ in (*turned, *direct)), *(r.name for r in program.results)):
        steps = " + ".join(f"at{d} * ({unsigned}){name}_stride{d}" for d in range(2, rank))
        body.append(f"const {unsigned} {name}_at = {steps or 0};")
    for p, _ in turned:
        num_chunks = tile.columns * tile.lines // _own(p)
        body.append(f"__shared__ vec<{p.type.storage}, {_own(p)}> {p.name}_tile[{num_chunks}];")
        body.append(f"vec<{p.type.storage}, {_own(p)}> {p.name}_v[{-(-num_chunks // threads)}];")

    def place(number: str, depth: int) -> list[str]:
        return [
            f"const int i = {number};",
            f"const {index} column = column0 + tile_column<{tile.columns}, {tile.width}>(i);",
            f"const {index} line = line0 + tile_line<{tile.columns}, {tile.width}, {depth}>(i);",
        ]

    def declare_direct(dims: str) -> list[str]:
        vectors = ((p, p.type.storage if access == "row" else f"vec<{p.type.storage}, {tile.width}>") for p, access in direct)
        return [f"{of} {p.name}_v{dims};" for p, of in vectors]

    def compute(held: str, is_full: bool) -> list[str]:
        operands = [_element(p, access, held) for p, access in loads]
        lines = [f"{r.type.compute} {r.name}_v[{tile.width}];" for r in program.results]
        lines += _unrolled("e", tile.width, [element_call(program, operands, [f"{r.name}_v[e]" for r in program.results])])
        for r, how in stores:
            at = f"{r.name}_at + ({unsigned})(line + d) * ({unsigned}){r.name}_stride1"
            whole = f"store_{how}({r.name}_data + ({at} + ({unsigned})column), {r.name}_v);"
            some = f"store_some({r.name}_data + ({at}), column, size0, {r.name}_v);"
            lines.append(whole if is_full else some if how == "elements" else f"if ({_inside(tile, index)}) {whole} else {some}")
        return lines

    def gather(depth: int) -> list[str]:
        lines = [f"const int turn = tile_turn(int(column - column0) / {tile.width});"]
        lines += [f"vec<{p.type.storage}, {depth}> {p.name}_r[{tile.width}];" for p, _ in turned]
        at = f"<{tile.lines}, {tile.width}, {depth}>"
        where = "int(column - column0) + e, int(line - line0), turn"
        return lines + _unrolled("e", tile.width, [f"{p.name}_r[e] = load_turned{at}({p.name}_tile, {where});" for p, _ in turned])

    numbers = place(f"threadIdx.x + m * {threads}", tile.depth)
    full = declare_direct(f"[{passes}][{tile.depth}]")
    if direct:
        each = [_load_direct(p, access, tile, unsigned, "[m][d]") for p, access in direct]
        full += _unrolled("m", passes, [*numbers, *_unrolled("d", tile.depth, each)])
    for p, access in turned:
        how, ends = ("load_lines", "") if access == "turned" else ("load_lines_realigned", f", {_ends(p)}")
        full.append(f"{how}<{shape}>({p.name}_v, {p.name}_data + {p.name}_at, column0, line0, ({unsigned}){p.name}_stride0{ends});")
    full += [f"store_lines<{shape}, {tile.width}>({p.name}_tile, {p.name}_v);" for p, _ in turned]
    full.append("__syncthreads();")
    full += _unrolled("m", passes, [*numbers, *gather(tile.depth), *_unrolled("d", tile.depth, compute("[m][d]", True))])

    edge = [
        f"fill_lines<{shape}, {tile.width}>({p.name}_tile, {p.name}_v, {p.name}_data + {p.name}_at, column0, line0, "
        f"({index})size0, ({index})size1, ({unsigned}){p.name}_stride0, {_ends(p)});"
        for p, _ in turned
    ]
    one = [*place("k", 1), "const int d = 0;", f"if (line >= ({index})size1) continue;", *declare_direct("")]
    one += [_load_direct_at_edge(p, access, tile, index, unsigned) for p, access in direct]
    one += [*gather(1), *compute("", False)]
    edge += [
        "__syncthreads();",
        "#pragma unroll 1",
        f"for (int k = threadIdx.x; k < {num_accesses}; k += {threads}) {{",
        *_indent(one),
        "}",
    ]

    body += ["if (is_full) {  // whole accesses, no bounds", *_indent(full), "} else {  // a tile at an edge", *_indent(edge), "}"]
    text = "\n".join(line if line.startswith("#") else f"    {line}" for line in body)
    return f"{emit_head(program, variant, _sizes(program, variant))}\n{{\n{text}\n}}"


def _sizes(program: Program, variant: Variant) -> list[str]:
    """The names of the run-time integers, in the plan's order."""
    rank = variant.rank
    sizes = ["size0", "size1", "pad"]
    for d in range(rank - 1):
        sizes += [f"tiles{d}" if d < 2 else f"size{d}", f"multiplier{d}", f"shift{d}"]
    for p, access in zip(program.parameters, variant.loads, strict=True):
        if access in ("uniform", "value"):
            continue
        known = {"strided": None, "turned": 1, "turned_realigned": 1}.get(access, 0)
        sizes += [f"{p.name}_stride{d}" for d in range(rank) if d != known]
        if access in ("realigned", *_TURNED):
            sizes.append(f"{p.name}_span")
    return sizes + [f"{r.name}_stride{d}" for r in program.results for d in range(1, rank)]


def _locate(tile: Tile, rank: int, index: str) -> list[str]:
    """Statements that take the block's number apart: its first column and line, and its coordinates along the other dims."""
    lines, rest, at = [], "blockIdx.x", []
    for d in range(rank - 1):
        lines.append(f"const unsigned rest{d} = divide_u31({rest}, multiplier{d}, shift{d});")
        at.append(f"{rest} - rest{d} * (unsigned){'tiles' if d < 2 else 'size'}{d}")
        rest = f"rest{d}"
    at.append(rest)
    lines.append(f"const {index} column0 = ({index})({at[0]}) * {tile.columns} - ({index})pad;")
    lines.append(f"const {index} line0 = ({index})({at[1]}) * {tile.lines};")
    return lines + [f"const unsigned at{d} = {at[d]};" for d in range(2, rank)]


def _own(p: Parameter) -> int:
    """Elements of one access of its own."""
    return ACCESS_BYTES // p.type.itemsize


def _ends(p: Parameter) -> str:
    return f"{p.name}_data, {p.name}_data + {p.name}_span"


def _inside(tile: Tile, index: str) -> str:
    return f"column >= 0 && column + {tile.width} <= ({index})size0"


def _element(p: Parameter, access: Access, held: str) -> str:
    """Element ``e`` of line ``d`` of an operand."""
    match access:
        case "uniform" | "value":
            return p.name
        case "row":
            return f"widen({p.name}_v{held})"
        case "turned" | "turned_realigned":
            return f"widen({p.name}_r[e].get(d))"
        case _:
            return f"widen({p.name}_v{held}.get(e))"


def _line_of(p: Parameter, unsigned: str) -> str:
    return f"{p.name}_at + ({unsigned})(line + d) * ({unsigned}){p.name}_stride1"


def _load_direct(p: Parameter, access: Access, tile: Tile, unsigned: str, held: str) -> str:
    """A load of an operand that is not turned, of an access that is whole."""
    line = _line_of(p, unsigned)
    match access:
        case "row":
            return f"{p.name}_v{held} = {p.name}_data[{line}];"
        case "strided":
            return f"{p.name}_v{held} = load_apart<{tile.width}>({p.name}_data + ({line}), column, size0, {p.name}_stride0);"
        case _:
            ends = f", {_ends(p)}" if access == "realigned" else ""
            return f"{p.name}_v{held} = load_{access}<{tile.width}>({p.name}_data + ({line} + ({unsigned})column){ends});"


def _load_direct_at_edge(p: Parameter, access: Access, tile: Tile, index: str, unsigned: str) -> str:
    whole = _load_direct(p, access, tile, unsigned, "")
    if access in ("row", "strided"):
        return whole
    some = f"{p.name}_v = load_within<{tile.width}>({p.name}_data + ({_line_of(p, unsigned)}), column, size0);"
    return f"if ({_inside(tile, index)}) {whole} else {some}"


def _unrolled(variable: str, count: int, statements: list[str]) -> list[str]:
    return ["#pragma unroll", f"for (int {variable} = 0; {variable} < {count}; ++{variable}) {{", *_indent(statements), "}"]


def _indent(statements: list[str]) -> list[str]:
    return [line if line.startswith("#") else f"    {line}" for line in statements]
