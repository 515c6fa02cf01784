"""What a kernel's text depends on besides its program: family, accesses, widths, tile. Frozen data, which `wideload.emit` turns into text.

Knows neither how a variant is chosen nor what the text looks like.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = [
    "ACCESS_BYTES",
    "COLUMNS_BLOCKS",
    "HALO_BLOCKS",
    "MANY_LOADS",
    "MANY_LOADS_BLOCKS",
    "MAX_INLINED_FUNCTIONS",
    "NARROW_RING_BLOCKS",
    "REGISTER_BYTES",
    "RING_BLOCKS",
    "THREADS",
    "TILE_BLOCKS",
    "Access",
    "Columns",
    "Family",
    "Pace",
    "Strip",
    "Table",
    "Tile",
    "Variant",
]

ACCESS_BYTES = 16
"""The widest load or store of one thread on sm_75 to sm_90; wider vectors a thread were slower on H200 (4.28 against 4.33 TB/s)."""

REGISTER_BYTES = 4

THREADS = 128
"""Threads a block. With one access a thread, 128 against 256 threads measured on an H200, in TB/s: silu f32 4.21 and 4.12, bf16 tanh
4.26 and 4.21, GELU 4.20 and 4.11, int8 negation 4.23 and 4.18, f32 to bf16 4.30 and 4.25; copies and bf16 add equal within 0.2 %."""

STARTING_BLOCKS = 2048
"""Blocks of a grid, at most, that let the next kernel start though each moves little: 2.5 us of 1.23 ns each on an H200, as long as the
kernel takes. Of 2^10 to 2^20 elements a call in a CUDA graph is 4 to 11 % shorter by it, by the wait alone 4 to 25 % (bf16 addition)."""

MANY_LOADS = 4
"""Loads of a thread from which on ptxas, left to itself, keeps registers low by moving loads behind the first stores."""

MANY_LOADS_BLOCKS = 8
"""Blocks of `THREADS` an SM that the registers of such a kernel must leave room for, 64 a thread: RoPE of bf16, of six operands, took 39
registers and ran at 3.82 TB/s on an H200, with 6 to 10 blocks asked for at 3.98 to 4.00; a strip of four rows of bias and GELU (erf) 3.98
without and 4.15. Kernels of fewer loads lose by it: bias and GELU of one row 3.79 to 3.57, GELU 4.07 to 3.74, unaligned int8 4.29 to
3.94."""

MAX_INLINED_FUNCTIONS = 48
"""Functions of a maths library over all elements of a thread; above, the element function is held once and called. Inlined, 112 fp32
functions took NVRTC 450 ms and 384 took 1300; called, 115 and 200. So many keep the arithmetic units busier than the memory: the calls
are not what it waits for."""

COLUMNS_BLOCKS = 8
"""Blocks of `THREADS` an SM that the registers of a ``columns`` kernel must leave room for, 64 a thread: as many threads of its own blocks,
which have more. With room for three quarters of them, on an H200, bias and GELU's gradients by erf 0.79 of the wall instead of 0.92."""

TILE_BLOCKS = 2
"""Blocks an SM that the registers of such a kernel must leave room for, 64 a thread: while one waits for its loads, the other stores."""

RING_BLOCKS, NARROW_RING_BLOCKS = 3, 4
"""The same where turned operands come to their tiles past the registers, and no function of a maths library needs these, nor another
operand, but for one of less than four bytes; four where elements have less and all are turned. On an H200, of the wall, with two, three and
four blocks: int8 0.768, 0.855, 0.883, bf16 0.887, 0.936, 0.930, of 11587 x 11587 0.856 and 0.878 (three and four), fp32 0.914, 0.937,
0.927, fp64 0.878, 0.956, 0.953; beside an operand that is not turned bf16 0.924, 0.932, 0.924."""

HALO_BLOCKS = 3
"""The same where only the output's lines are not aligned, and elements have less than four bytes. On an H200, of the wall, with two, three
and four blocks: int8 0.870, 0.942, 0.932, bf16 0.926, 0.939, 0.937, but fp32 0.968, 0.960, 0.958, fp64 0.966, 0.976, 0.931; where all
lines are aligned int8 0.965, 0.951, 0.950, bf16 0.983, 0.979, 0.974."""

Family = Literal["dense", "columns", "strips", "rows", "pitched", "tile", "strided", "foreach"]

Access = Literal[
    "vector", "repeated", "realigned", "stepped", "elements", "row", "uniform", "strided", "turned", "turned_realigned", "value", "reduced",
    "summed",
]  # fmt: skip
"""How a kernel reaches an operand: one wide access; one for all rows of a strip; aligned words, realigned in registers; the aligned words
in which it is every second, third or fourth element; one access an element, of an output whose address is not aligned as the first
output's is; one element a row; one element for all; through its strides; through shared memory, where its fast dim is not the outputs'
(aligned or realigned); by value (a 0-dim CPU tensor); by at most one atomic a warp (one value of all elements); by one partial
sum of each column a block."""


class Pace(NamedTuple):
    """How a position of the program changes from one element of a thread to the next: by one, not at all, or by a run-time stride.

    ``bits`` are those in which every position fits, and which the kernel works it out in.
    """

    step: Literal["run", "row", "apart"]
    bits: Literal[32, 64]


class Tile(NamedTuple):
    """The part of the iteration space that a block of a ``tile`` kernel computes.

    ``columns`` lie along the outputs' fast dim, ``lines`` along that of the operands that are turned. A thread computes ``width``
    columns, one access of the widest output, of ``depth`` neighbouring lines at a time. Where the outputs' lines are not aligned alike,
    the accesses of each line begin at a sector of the first output, up to ``halo - 1`` columns before the tile, and ``halo`` columns
    more of turned operands are loaded. Where a turned operand is not aligned, each column of all of them lies in a ring of ``ring`` lines.
    """

    columns: int
    lines: int
    width: int
    depth: int
    halo: int = 0
    ring: int = 0


class Table(NamedTuple):
    """What a ``foreach`` kernel gets by value: of each operand and number an entry for each of ``capacity`` tensors, or one for all.

    ``shared_loads`` and ``shared_scalars`` say which of the program's have one for all, ``in_place`` of each result which load's entry it
    is stored by, if any. A thread computes ``accesses`` accesses.
    """

    capacity: int
    accesses: int
    shared_loads: tuple[bool, ...]
    shared_scalars: tuple[bool, ...]
    in_place: tuple[int | None, ...]


class Strip(NamedTuple):
    """The neighbouring rows along outer dim ``dim`` whose elements in the same columns a thread of a ``strips`` kernel computes."""

    dim: int
    rows: int


class Columns(NamedTuple):
    """Of a ``columns`` kernel: the accesses of a row that a block takes, and the rows that a thread has loads of in flight.

    ``keeps_sums`` says that the L2 is to keep what is added up, which another kernel reads.
    """

    across: int
    rows: int
    keeps_sums: bool


class Variant(NamedTuple):
    """What a kernel's text depends on besides its program.

    ``loads`` go with the program's parameters, ``stores`` with its results, ``paces`` with its positions; ``elements`` is how many a
    thread computes; ``threads`` are those of a block; ``tile`` is a tile kernel's, ``strip``
    a strips kernel's, ``columns`` a columns kernel's, ``table`` a foreach kernel's. ``is_whole`` says that sizes and addresses leave no
    access that is partly outside, so that the kernel has no edges. ``steps`` are those of the loads, and how many elements before an
    operand's first one its aligned words begin: (1, 0) of all but ``stepped`` ones. ``kept`` says of which loads the L2 is to keep what
    they read; it is empty where of none. Of a block that ``moves_much`` the memory takes longer than what it costs that the block lets the
    next kernel start. ``is_one_of_several`` kernels of a call lets them run side by side; one that ``reads_results`` of those before waits
    for them first.
    """

    family: Family
    loads: tuple[Access, ...]
    stores: tuple[Access, ...]
    elements: int
    rank: int
    index_bits: Literal[32, 64]
    threads: int = THREADS
    tile: Tile | None = None
    is_whole: bool = False
    steps: tuple[tuple[int, int], ...] = ()
    kept: tuple[bool, ...] = ()
    paces: tuple[Pace, ...] = ()
    strip: Strip | None = None
    columns: Columns | None = None
    table: Table | None = None
    moves_much: bool = False
    is_one_of_several: bool = False
    reads_results: bool = False

    @property
    def access_elements(self) -> int:
        """Elements of one access along the outputs; ``elements`` where a thread makes one of each operand."""
        return self.tile.width if self.tile else self.elements // self.rows

    @property
    def rows(self) -> int:
        """Rows of which a thread computes one access each."""
        rows = self.strip or self.columns
        return rows.rows if rows else 1

    @property
    def load_steps(self) -> tuple[tuple[int, int], ...]:
        """``steps``, spelt out where no load is ``stepped``."""
        return self.steps or ((1, 0),) * len(self.loads)

    @property
    def load_functions(self) -> tuple[str, ...]:
        """The function of one whole access, by load."""
        return tuple("load_kept" if is_kept else "load_vector" for is_kept in self.kept or (False,) * len(self.loads))
