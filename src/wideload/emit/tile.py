"""Turns a program into the ``tile`` kernel: some inputs run along another dim than the outputs, and turn in shared memory.

A block computes ``columns`` along the outputs' fast dim by ``lines`` along the turned inputs'. It reads the turned inputs along their
lines and everything else along the columns, 16 bytes a thread and access on both sides, with one barrier in between. From rings, in which
operands that are not aligned lie, it picks single elements.
"""

from __future__ import annotations

from collections.abc import Sequence

from wideload.emit.element import element_call
from wideload.emit.positions import count_positions
from wideload.emit.signature import emit_definition, emit_uniform
from wideload.emit.text import INDEX_TYPES, division_sizes, indented, unrolled
from wideload.emit.walk import WalkedLoad, store_functions, whole_words
from wideload.lower import Parameter, Program
from wideload.plan import ACCESS_BYTES, REGISTER_BYTES, Access, Variant

__all__ = ["emit_tile"]

_LINE_BYTES = 128
_TURNED = ("turned", "turned_realigned")
_REGISTERS_IN_FLIGHT = 48
"""Registers of a thread that may wait for loads at once. Operands that are not turned are read before the barrier as far as that goes,
and behind it from there on: more, and ptxas spills at the 64 registers that leave room for two blocks."""


def emit_tile(program: Program, variant: Variant) -> str:
    """The kernel's text. Blocks whose tile is full have no bounds; the others use whole accesses as far as these are inside."""
    return _TileText(program, variant).emit()


class _TileText:
    """The stages of one kernel, each a list of lines. ``m`` counts a thread's accesses, ``d`` the lines of one, ``e`` its elements."""

    def __init__(self, program: Program, variant: Variant) -> None:
        assert variant.tile is not None
        self.program, self.variant, self.tile = program, variant, variant.tile
        self.index, self.unsigned, _ = INDEX_TYPES[variant.index_bits]
        self.loads = list(zip(program.parameters, variant.loads, strict=True))
        turned = [p for p, access in self.loads if access in _TURNED]
        self.turned, self.ringed = ([], turned) if self.tile.ring else (turned, [])
        self.alike = {p.name for p, access in self.loads if access == "turned"}
        self.num_loaded = self.tile.columns + self.tile.halo
        self.passes = self.tile.columns * self.tile.lines // (self.tile.width * self.tile.depth * variant.threads)
        self.early, self.late = self._split_direct()

    def _passes_of(self, p: Parameter) -> int:
        """Chunks of it that a thread loads."""
        return -(-self.num_loaded * self.tile.lines // _own(p) // self.variant.threads)

    def _split_direct(self) -> tuple[list[tuple[Parameter, Access]], list[tuple[Parameter, Access]]]:
        """The operands that are not turned: those read before the barrier, those read behind it."""
        chunk = ACCESS_BYTES // REGISTER_BYTES
        in_flight = sum(chunk * self._passes_of(p) for p in self.turned)  # what goes to rings passes no registers
        early: list[tuple[Parameter, Access]] = []
        late: list[tuple[Parameter, Access]] = []
        for p, access in self.loads:
            if access in ("vector", "realigned", "row", "strided"):
                elements = self.passes * self.tile.depth * (1 if access == "row" else self.tile.width)
                in_flight += -(-elements * p.type.itemsize // REGISTER_BYTES) * (2 if access == "realigned" else 1)
                (early if in_flight <= _REGISTERS_IN_FLIGHT else late).append((p, access))
        return early, late

    def emit(self) -> str:
        body = [*self._locate(), *emit_uniform(self.program, self.variant)]
        for name in (*(p.name for p, access in self.loads if access not in ("uniform", "value")), *(r.name for r in self.program.results)):
            steps = " + ".join(f"at{d} * ({self.unsigned}){name}_stride{d}" for d in range(2, self.variant.rank))
            body.append(f"const {self.unsigned} {name}_at = {steps or 0};")
        for p in (*self.turned, *self.ringed):
            lines = self.tile.ring or self.tile.lines
            body.append(
                f"alignas({_LINE_BYTES}) __shared__ vec<{p.type.storage}, {_own(p)}> {p.name}_tile[{self.num_loaded * lines // _own(p)}];"
            )
        body += [f"vec<{p.type.storage}, {_own(p)}> {p.name}_v[{self._passes_of(p)}];" for p in self.turned]
        for p in self.ringed:
            body.append(f"const unsigned {p.name}_step = (unsigned){p.name}_stride0 * {p.type.itemsize};")
            body.append(f"const unsigned {p.name}_start = {self._start(p)};")
        if self.variant.is_whole:
            body += self._whole_accesses()
        else:
            body += [f"const bool is_full = {self._is_full()};", "if (is_full) {  // whole accesses, no bounds"]
            body += [*indented(self._whole_accesses()), "} else {  // a tile at an edge: one line at a time, and bounds"]
            body += [*indented(self._single_lines()), "}"]
        return emit_definition(self.program, self.variant, self._sizes(), body)

    def _whole_accesses(self) -> list[str]:
        """The main path. Where the variant leaves no access that is cut, it is all of the kernel, and an access is in or out."""
        tile = self.tile
        place = self._place(f"threadIdx.x + m * {self.variant.threads}", tile.depth)
        body = ["// everything that is read, in flight at once", *self._declare(self.early, f"[{self.passes}][{tile.depth}]")]
        if self.early:
            loads = [*self._line(), *(self._load_whole(p, access, "[m][d]") for p, access in self.early)]
            body += unrolled("m", self.passes, [place, *unrolled("d", tile.depth, loads)])
        body = [*self._copy_words(is_full=True), *body]
        for p in self.turned:
            inside, bounds = ("_inside", f", {self._bounds()}") if self.variant.is_whole else ("", "")
            body.append(f"load_lines{inside}<{self._shape()}>({p.name}_v, {self._source(p)}{bounds});")
        body += [f"store_lines<{self._shape()}, {tile.width}>({p.name}_tile, {p.name}_v);" for p in self.turned]
        body += self._barrier()
        body.append("// results, along the columns")
        each = [place, *self._declare(self.late, f"[{tile.depth}]")]
        if self.late:
            loads = [*self._line(), *(self._load_whole(p, access, "[d]") for p, access in self.late)]
            each += unrolled("d", tile.depth, loads)
        guard = "if (is_inside) " if self.variant.is_whole else ""
        line = [
            *self._line(),
            *(self._gather_line(is_cut=bool(tile.halo)) if tile.halo or tile.ring else ()),
            *self._compute(),
            *(guard + store for store in self._store_whole()),
        ]
        each += [*(() if tile.halo or tile.ring else self._gather_access()), *unrolled("d", tile.depth, line)]
        return body + unrolled("m", self.passes, each)

    def _single_lines(self) -> list[str]:
        """A tile that is partly outside."""
        tile, threads = self.tile, self.variant.threads
        body = []
        body += self._copy_words(is_full=False)
        for p in self.turned:
            body.append(f"fill_lines<{self._shape()}, {tile.width}>({p.name}_tile, {p.name}_v, {self._source(p)}, {self._bounds()});")
        direct = [*self.early, *self.late]
        line = [self._place("k", 1), "const int d = 0;", *self._line(), f"if (line >= ({self.index})size1) continue;"]
        line += [*self._declare(direct, ""), *(self._load_inside(p, access) for p, access in direct)]
        line += [*self._gather_line(is_cut=True), *self._compute(is_edge=True), *self._store_inside()]
        loop = f"for (unsigned k = threadIdx.x; k < {tile.columns * tile.lines // tile.width}; k += {threads}) {{"
        return [*body, *self._barrier(), "#pragma unroll 1", loop, *indented(line), "}"]

    def _sizes(self) -> list[str]:
        """The names of the run-time integers, in the plan's order."""
        rank = self.variant.rank
        sizes = ["size0", "size1", "phase", *division_sizes([self._size_name(d) for d in range(rank - 1)])]
        for p, access in self.loads:
            if access not in ("uniform", "value"):
                known = {"strided": None, "turned": 1, "turned_realigned": 1}.get(access, 0)
                sizes += [f"{p.name}_stride{d}" for d in range(rank) if d != known]
            if access in ("realigned", *_TURNED):
                sizes.append(f"{p.name}_span")
        return sizes + [f"{r.name}_stride{d}" for r in self.program.results for d in range(1, rank)]

    # Where a block and a thread are

    @staticmethod
    def _size_name(d: int) -> str:
        """How many blocks lie along dim ``d``."""
        return f"tiles{d}" if d < 2 else f"size{d}"

    def _locate(self) -> list[str]:
        """Take the block's number apart: along the columns, along the lines, the other dims."""
        lines, rest, at = ["// which tile"], "blockIdx.x", []
        for d in range(self.variant.rank - 1):
            lines.append(f"const unsigned rest{d} = divide_u31({rest}, multiplier{d}, shift{d});")
            at.append(f"{rest} - rest{d} * (unsigned){self._size_name(d)}")
            rest = f"rest{d}"
        at.append(rest)
        shift = "" if self.tile.halo else f" - ({self.index})phase"  # with a halo, each line's accesses begin before it
        lines.append(f"const {self.index} column0 = ({self.index})({at[0]}) * {self.tile.columns}{shift};")
        lines.append(f"const {self.index} line0 = ({self.index})({at[1]}) * {self.tile.lines};")
        return lines + [f"const unsigned at{d} = {at[d]};" for d in range(2, self.variant.rank)]

    def _is_full(self) -> str:
        """The tile is inside, and so are the aligned words that realigned operands are read as."""
        tile, u = self.tile, self.unsigned
        conditions = [
            f"column0 >= {tile.halo} && column0 + {tile.columns} <= ({self.index})size0",
            f"line0 + {tile.lines} <= ({self.index})size1",
        ]
        first_column, last_column = f"({u})(column0 - {tile.halo})", f"({u})(column0 + {tile.columns - 1})"
        first_line, last_line = f"({u})line0", f"({u})(line0 + {tile.lines - 1})"
        for p, access in self.loads:
            if self.tile.ring and access in _TURNED:
                stride, reach = f"({u}){p.name}_stride0", _own(p)
                first, last = f"{first_column} * {stride} + {first_line}", f"{last_column} * {stride} + {last_line}"
            elif access == "realigned":
                stride, reach = f"({u}){p.name}_stride1", tile.width
                first, last = f"{first_line} * {stride} + {first_column}", f"{last_line} * {stride} + {last_column}"
            else:
                continue
            conditions.append(f"{p.name}_at + {first} >= {reach} && {p.name}_at + {last} + {reach} < ({u}){p.name}_span")
        return "\n        && ".join(conditions)

    def _place(self, number: str, depth: int) -> str:
        """Access ``number`` of the block, in its tile."""
        shape = f"{self.tile.columns}, {self.tile.width}"
        return f"const unsigned i = {number}, across = tile_column<{shape}>(i), along = tile_line<{shape}, {depth}>(i);"

    def _line(self) -> list[str]:
        """Line ``d`` of the access and its first column, in the operands."""
        beat, skew = self.program.results[0].name, ""
        if self.tile.halo:  # back to where the line's aligned accesses begin
            at = f"{beat}_at + ({self.unsigned})line * ({self.unsigned}){beat}_stride1 + ({self.unsigned})phase"
            skew = f" - ({self.index})(({at}) % {self.tile.halo})"
        lines = [
            f"const {self.index} line = line0 + ({self.index})along + d;",
            f"const {self.index} column = column0 + ({self.index})across{skew};",
        ]
        if self.variant.is_whole:
            lines.append(f"const bool is_inside = line < ({self.index})size1 && column < ({self.index})size0;")
        return lines

    def _is_inside(self) -> str:
        return f"column >= 0 && column + {self.tile.width} <= ({self.index})size0"

    def _line_of(self, name: str) -> str:
        return f"{name}_at + ({self.unsigned})line * ({self.unsigned}){name}_stride1"

    # Turned operands

    def _shape(self) -> str:
        return f"{self.num_loaded}, {self.tile.lines}, {self.variant.threads}"

    def _source(self, p: Parameter) -> str:
        """What all functions that load a tile take: the operand, and where the tile begins in it."""
        return f"{p.name}_data + {p.name}_at, ({self.unsigned}){p.name}_stride0, {self._first_column()}, line0"

    def _first_column(self) -> str:
        return f"column0 - {self.tile.halo}" if self.tile.halo else "column0"

    def _bounds(self) -> str:
        return f"({self.index})size0, ({self.index})size1"

    def _start(self, p: Parameter) -> str:
        """The address of the tile's first element; its low bits, from which every column's follow."""
        at = f"{p.name}_at + ({self.unsigned})({self._first_column()}) * ({self.unsigned}){p.name}_stride0 + ({self.unsigned})line0"
        return f"(unsigned)(unsigned long long){p.name}_data + (unsigned)({at}) * {p.type.itemsize}"

    def _copy_words(self, *, is_full: bool) -> list[str]:
        """On their way before anything else is read: they pass no registers."""
        lines = []
        for p in self.ringed:
            shape = f"{self._shape()}, {self.tile.width}, {self._ring(p)}, {str(is_full).lower()}"
            ends = f"{p.name}_data, {p.name}_data + {p.name}_span"
            lines.append(f"copy_words<{shape}>({p.name}_tile, {self._source(p)}, {self._bounds()}, {ends});")
        return lines

    def _ring(self, p: Parameter) -> str:
        """Its bytes, and whether all columns begin at the same byte of a word."""
        return f"{self.tile.ring * p.type.itemsize}, {str(p.name in self.alike).lower()}"

    def _barrier(self) -> list[str]:
        return [*(["arrived();"] if self.ringed else []), "__syncthreads();"]

    def _gather_access(self) -> list[str]:
        """All lines of an access, a column at a time."""
        tile = self.tile
        load = f"load_turned<{tile.lines}, {tile.width}, {tile.depth}>"
        lines = [f"const unsigned turn = tile_turn(across / {tile.width});"]
        lines += [f"vec<{p.type.storage}, {tile.depth}> {p.name}_r[{tile.width}];" for p in self.turned]
        return lines + unrolled("e", tile.width, [f"{p.name}_r[e] = {load}({p.name}_tile, across + e, along, turn);" for p in self.turned])

    def _gather_line(self, *, is_cut: bool) -> list[str]:
        """One line of an access; ``is_cut`` where it may lie across two of the tile."""
        shape = f"{self.tile.lines}, {self.tile.width}"
        lines = [f"const unsigned first = (unsigned)(column - column0){f' + {self.tile.halo}' if self.tile.halo else ''};"]
        lines += [f"vec<{p.type.storage}, 1> {p.name}_r[{self.tile.width}];" for p in (*self.turned, *self.ringed)]
        lines += [f"gather_line<{shape}>({p.name}_r, {p.name}_tile, first, along + d);" for p in self.turned]
        for p in self.ringed:
            how = f"{self.tile.width}, {self._ring(p)}, {str(is_cut).lower()}"
            address = f"{p.name}_start + first * {p.name}_step + (along + d) * {p.type.itemsize}"
            lines.append(f"gather_words<{how}>({p.name}_r, {p.name}_tile, first, {address}, {p.name}_step);")
        return lines

    # Operands that run along the outputs

    def _declare(self, operands: Sequence[tuple[Parameter, Access]], dims: str) -> list[str]:
        types = [p.type.storage if access == "row" else f"vec<{p.type.storage}, {self.tile.width}>" for p, access in operands]
        return [f"{of} {p.name}_v{dims};" for of, (p, _) in zip(types, operands, strict=True)]

    def _load_whole(self, p: Parameter, access: Access, held: str) -> str:
        """A whole access; of the operand's first elements instead where the variant may have it outside."""
        line, column = self._line_of(p.name), f"({self.unsigned})column"
        at = line if access in ("row", "strided") else f"{line} + {column}"
        at = f"(is_inside ? {at} : 0)" if self.variant.is_whole else f"({at})"
        match access:
            case "row":
                return f"{p.name}_v{held} = {p.name}_data[{at}];"
            case "strided":
                return f"{p.name}_v{held} = load_apart<{self.tile.width}>({p.name}_data + {at}, column, size0, {p.name}_stride0);"
            case _:
                how = "shifted" if access == "realigned" else "vector"
                return f"{p.name}_v{held} = load_{how}<{self.tile.width}>({p.name}_data + {at});"

    def _load_inside(self, p: Parameter, access: Access) -> str:
        """At an edge: the whole access where it is inside, its elements that are where it is not."""
        if access in ("row", "strided"):
            return self._load_whole(p, access, "")
        line, width = self._line_of(p.name), self.tile.width
        at = f"({line} + ({self.unsigned})column)"
        words = whole_words([WalkedLoad(p, access)], width, self.unsigned, lambda _: at)
        whole, single = self._load_whole(p, access, ""), f"{p.name}_v = load_within<{width}>({p.name}_data + ({line}), column, size0);"
        return f"if ({self._is_inside()}{words}) {whole} else {single}"

    # Results

    def _compute(self, *, is_edge: bool = False) -> list[str]:
        """One line of an access."""
        held = {p.name: "" if is_edge else "[m][d]" for p, _ in self.early} | {p.name: "" if is_edge else "[d]" for p, _ in self.late}
        line = "0" if is_edge or self.tile.halo or self.tile.ring else "d"
        operands = []
        for p, access in self.loads:
            match access:
                case "uniform" | "value":
                    operands.append(p.name)
                case "turned" | "turned_realigned":
                    operands.append(f"widen({p.name}_r[e].get({line}))")
                case "row":
                    operands.append(f"widen({p.name}_v{held[p.name]})")
                case _:
                    operands.append(f"widen({p.name}_v{held[p.name]}.get(e))")
        operands += [f"{p.name}_v.get(e)" for p in self.program.positions]
        place = ["column", "line", *(f"at{d}" for d in range(2, self.variant.rank))]
        lines = count_positions(self.program, self.variant, self.tile.width, place, declared=False)
        lines += [f"{r.type.compute} {r.name}_v[{self.tile.width}];" for r in self.program.results]
        results = [f"{r.name}_v[e]" for r in self.program.results]
        return lines + unrolled("e", self.tile.width, [element_call(self.program, operands, results)])

    def _store_whole(self) -> list[str]:
        stores = zip(self.program.results, store_functions(self.variant), strict=True)
        return [f"{store}({r.name}_data + ({self._line_of(r.name)} + ({self.unsigned})column), {r.name}_v);" for r, store in stores]

    def _store_inside(self) -> list[str]:
        lines = []
        for r, whole, how in zip(self.program.results, self._store_whole(), self.variant.stores, strict=True):
            some = f"store_some({r.name}_data + ({self._line_of(r.name)}), column, size0, {r.name}_v);"
            lines.append(some if how == "elements" else f"if ({self._is_inside()}) {whole} else {some}")
        return lines


def _own(p: Parameter) -> int:
    """Elements of one access along the operand's own fast dim."""
    return ACCESS_BYTES // p.type.itemsize
