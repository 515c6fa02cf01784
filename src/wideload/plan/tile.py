"""The ``tile`` family: inputs that run along another dim than the outputs, turned in shared memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wideload.gpus import SECTOR_BYTES
from wideload.layout import Dim, IterSpace
from wideload.plan.choice import (
    Choice,
    Reason,
    Walk,
    are_rows_whole,
    choose_index_bits,
    division_numbers,
    edge_reasons,
    share_of_block,
)
from wideload.plan.tuning import Tuning
from wideload.plan.variant import ACCESS_BYTES, Access, Tile

__all__ = ["STATIC_SHARED_BYTES", "TILE_ACROSS", "choose_tile"]

STATIC_SHARED_BYTES = 48 * 1024
"""Shared memory that a block may have without asking for more (CUDA C++ Programming Guide, compute capabilities)."""

LEAST_TILE_BYTES = 2048
"""Of the smallest tile: 128 bytes of an output of one byte by one access of what is turned."""

LEAST_UNALIGNED_BYTES = 4096
"""A block's share from which on operands or outputs of any alignment go through tiles; less is copied sooner element by element. Of bf16 on
an H200, of eager's time: 45 x 45 1.44 by tiles and 1.11 element by element, 420 x 420 1.15 by tiles, 565 x 565 0.77."""

_WARP_THREADS = 32

TILE_ACROSS = 8
"""Accesses along an output's line that a warp of a ``tile`` kernel stores together: 128 bytes of each of four lines."""


def choose_tile(space: IterSpace, walks: Sequence[Walk], num_inputs: int, tuning: Tuning, shared_bytes: int = 0) -> Choice | None:
    """Some inputs run along another dim than the outputs, through shared memory; the others along the outputs' rows.

    ``shared_bytes`` of a block's shared memory are taken.
    """
    if len(space.dims) < 2 or any(walk.strides[0] != 1 for walk in walks[num_inputs:]):
        return None
    widest = max((walk.type for walk in walks if walk.strides[0] == 1), key=lambda t: t.itemsize)
    width = ACCESS_BYTES // widest.itemsize
    for across in _turned_dims(walks[:num_inputs]):
        turned = [walk for walk in walks[:num_inputs] if walk.strides[0] > 1 and walk.strides[across] == 1]
        turned_bytes = [walk.type.itemsize for walk in turned]
        out_bytes = walks[num_inputs].type.itemsize
        sizes = space.dims[0].size, space.dims[across].size
        nbytes = space.num_elements * max(sum(turned_bytes), out_bytes // 2)
        bounds = _tile_bounds(nbytes, tuning)
        tile = next(filter(None, (_fit_tile(*sizes, width, out_bytes, turned_bytes, bound) for bound in bounds)), None)
        if tile:
            break
    else:
        return None
    order = [0, across, *(d for d in range(1, len(space.dims)) if d != across)]
    dims = [space.dims[d] for d in order]
    walks = [walk._replace(strides=tuple(walk.strides[d] for d in order)) for walk in walks]
    inputs, outputs = walks[:num_inputs], walks[num_inputs:]
    beat = outputs[0].beat(width)
    loads = tuple(_tile_access(walk, beat, width) for walk in inputs)
    if "turned_realigned" in loads or any(walk.phase(ACCESS_BYTES // walk.type.itemsize) for walk in turned):
        tile = _in_rings(tile, min(turned_bytes), tuning.tile_threads)
    stores: tuple[Access, ...] = tuple("vector" if walk.beat(width) == beat else "elements" for walk in outputs)
    is_whole = are_rows_whole(dims[0].size, width, beat, (*loads, *stores))
    is_whole = is_whole and not tile.ring and not any(dims[1].size * walk.type.itemsize % ACCESS_BYTES for walk in turned)
    if any(stride % width for stride in outputs[0].strides[1:]):
        # Lines that begin at sectors, not at any 16 bytes, write none in two parts. On an H200, of the wall: bf16 0.913 against 0.859,
        # fp32 0.916 against 0.867, fp64 0.933 against 0.897; at 64 bytes bf16 0.907.
        tile = tile._replace(halo=max(width, SECTOR_BYTES // outputs[0].type.itemsize))
    if (tile.ring or tile.halo) and share_of_block(nbytes) < LEAST_UNALIGNED_BYTES:
        return None
    if sum(turned_bytes) * (tile.columns + tile.halo) * (tile.ring or tile.lines) + shared_bytes > STATIC_SHARED_BYTES:
        return None  # more operands than have rings of 32 bytes
    num_across = -(-(dims[0].size + (tile.halo - 1 if tile.halo else beat[0])) // tile.columns)
    num_along = -(-dims[1].size // tile.lines)
    # Neighbouring blocks write neighbouring columns: groups of 2 to 16 that read along the lines first were up to 5 % slower on an H200.
    blocks = [num_across, num_along, *(dim.size for dim in dims[2:])]
    grid = IterSpace(tuple(Dim(size, ()) for size in blocks), math.prod(blocks))
    bits, index_width = choose_index_bits(space, walks, space.num_elements)
    strides: list[int] = []
    for walk, access in zip(inputs, loads, strict=True):
        if access != "uniform":
            strides += [stride for d, stride in enumerate(walk.strides) if d not in _FAST_DIM.get(access, ())]
        if access in ("realigned", "turned", "turned_realigned"):
            strides.append(walk.span([dim.size for dim in dims]))
    strides += [stride for walk in outputs for stride in walk.strides[1:]]
    num_accesses = tile.columns * tile.lines // (width * tile.depth)
    threads = num_accesses // -(-num_accesses // tuning.tile_threads)
    elements = tile.columns * tile.lines // threads
    runtime = (dims[0].size, dims[1].size, beat[0], *division_numbers(grid, 32), *strides)
    num_covered = grid.num_elements * tile.columns * tile.lines
    why = f"{ACCESS_BYTES} bytes of the widest operand along the output ({widest.name})"
    reasons = (*_tile_reasons(tile, turned, outputs[0]), Reason("elements an access", str(width), why), index_width)
    reasons += (*edge_reasons(is_whole, inputs, loads), *_narrow_reasons(loads, stores))
    return Choice("tile", (*loads, *stores), elements, bits, num_covered, runtime, reasons, threads, tile, is_whole, order=tuple(order))


_FAST_DIM: dict[Access, tuple[int, ...]] = {"turned": (1,), "turned_realigned": (1,), "vector": (0,), "realigned": (0,), "row": (0,)}
"""The dims of a tile along which the stride is known: 1, or 0 of a row's one element."""


def _tile_reasons(tile: Tile, turned: Sequence[Walk], output: Walk) -> list[Reason]:
    names = ", ".join(walk.name for walk in turned)
    num_elements = (tile.columns + tile.halo) * (tile.ring or tile.lines)
    why = (
        f"{tile.columns * output.type.itemsize}-byte runs of the output, {tile.lines * turned[0].type.itemsize}-byte runs of "
        f"{turned[0].name}, {sum(walk.type.itemsize for walk in turned) * num_elements} bytes of shared memory"
    )
    reasons = [
        Reason("family", "tile", f"{names} runs along another dim than the output: turned in shared memory"),
        Reason("tile", f"{tile.columns} x {tile.lines}", why),
    ]
    if tile.halo:
        why = f"the output's lines are not aligned alike: each begins its accesses anew, {tile.halo} more columns are loaded"
        reasons.append(Reason("halo", str(tile.halo), why))
    if tile.ring:
        why = "a turned operand is not aligned: its aligned words are copied, and elements picked from where they then lie"
        reasons.append(Reason("ring", str(tile.ring), why))
    return reasons


def _narrow_reasons(loads: Sequence[Access], stores: Sequence[Access]) -> list[Reason]:
    reasons = []
    if "elements" in stores:
        reasons.append(Reason("stores", "elements", "an output is not aligned as the first one is"))
    if "strided" in loads:
        reasons.append(Reason("loads", "strided", "an operand runs along neither dim of the tile: one element an access"))
    return reasons


def _turned_dims(inputs: Sequence[Walk]) -> list[int]:
    """The dims along which inputs run that do not run along the innermost, those of most bytes first."""
    weights: dict[int, int] = {}
    for walk in inputs:
        if walk.strides[0] > 1 and 1 in walk.strides:
            dim = walk.strides.index(1)
            weights[dim] = weights.get(dim, 0) + walk.type.itemsize
    return sorted(weights, key=lambda dim: -weights[dim])


def _tile_access(walk: Walk, beat: tuple[int, ...], width: int) -> Access:
    """How a tile reads an input, where the first output's aligned accesses lie on ``beat``."""
    if walk.is_uniform:
        return "uniform"
    if walk.strides[0] > 1 and walk.strides[1] == 1:
        own = ACCESS_BYTES // walk.type.itemsize
        return "turned_realigned" if any(s % own for d, s in enumerate(walk.strides) if d != 1) else "turned"
    if walk.strides[0] > 1:
        return "strided"
    if walk.strides[0] == 0:
        return "row"
    return "vector" if walk.beat(width) == beat else "realigned"


def _tile_bounds(nbytes: int, tuning: Tuning) -> list[int]:
    """Bytes of a tile, the best first, of ``nbytes`` in all: as many as leave enough tiles to fill a GPU, more where so few hold none."""
    least = min(max(share_of_block(nbytes), LEAST_TILE_BYTES), tuning.tile_bytes)
    return [least << k for k in range((tuning.tile_bytes // least).bit_length())]


def _fit_tile(num_columns: int, num_lines: int, width: int, out_bytes: int, turned_bytes: Sequence[int], tile_bytes: int) -> Tile | None:
    """The largest tile within ``tile_bytes``, its runs in the output and in the turned operands of about the same length.

    Of an output that is wider than the turned operands, twice as many bytes at most: 128 a thread.
    ``None`` where the space is smaller than half the smallest tile: 128 bytes of the output by one access of each turned operand.
    """
    depth = min(max(1, 4 // min(turned_bytes)), ACCESS_BYTES // max(turned_bytes))
    least_columns, least_lines = TILE_ACROSS * width, max(ACCESS_BYTES // min(turned_bytes), 4 * depth)
    most_columns, most_lines = 1 << (num_columns - 1).bit_length(), 1 << (num_lines - 1).bit_length()
    fitting = []
    for columns in (1 << k for k in range(least_columns.bit_length() - 1, max(most_columns, least_columns).bit_length())):
        for lines in (1 << k for k in range(least_lines.bit_length() - 1, max(most_lines, least_lines).bit_length())):
            if columns * lines * max(sum(turned_bytes), out_bytes // 2) <= tile_bytes and all(
                width * lines * size >= 8 * ACCESS_BYTES for size in turned_bytes
            ):
                run, turned_run = columns * out_bytes, lines * max(turned_bytes)
                fitting.append((columns * lines, -max(run, turned_run) // min(run, turned_run), lines, columns))
    if not fitting or 2 * num_columns < least_columns or 2 * num_lines < least_lines:
        return None
    _, _, lines, columns = max(fitting)
    return Tile(columns, lines, width, depth)


def _in_rings(tile: Tile, least_bytes: int, tile_threads: int) -> Tile:
    """The same tile, each column in a ring of so many lines: fewer lines, so that the word that both ends of a column cut fits as well.

    A warp computes one access of four lines; as many lines as leave all warps of a block with the same number of accesses.
    """
    at_once, most_warps = _WARP_THREADS // TILE_ACROSS, tile_threads // _WARP_THREADS
    ring, lines = tile.lines, tile.lines - ACCESS_BYTES // least_bytes
    if lines < max(ring // 2, at_once):
        ring, lines = 2 * ring, ring
    across = tile.columns // tile.width // TILE_ACROSS
    accesses = next(n for n in range(lines // at_once * across, 0, -across) if n % -(-n // most_warps) == 0)
    return tile._replace(lines=accesses // across * at_once, depth=1, ring=ring)
