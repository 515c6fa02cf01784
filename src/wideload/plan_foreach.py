"""Turns the members of a list into kernels that take many of them in one launch: which may share one, its chunks, what it gets by value.

Knows layouts and programs; neither tensors nor addresses, which a kernel looks at itself, so that no plan depends on alignment.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from wideload.dtypes import ScalarType
from wideload.layout import build_space, expand_strides
from wideload.lower import Program
from wideload.plan import ACCESS_BYTES, Access, Operand, Pace, Table, Target, Variant
from wideload.views import View

__all__ = ["WORD_BYTES", "choose_accesses", "chunk_map", "chunk_size", "list_variant", "table_words"]

FOREACH_THREADS, FOREACH_ACCESSES = 128, 2
"""Threads a block, and accesses that each has of an operand. AdamW of 424 tensors (202 M parameters) on an H200, of the wall, with 256
threads and one access, 128 and one, 64 and two, 128 and two: fp32 0.973, 0.980, 0.986, 0.988, bf16 0.969, 0.975, 0.980, 0.980, bf16 with
fp32 state 0.966, 0.970, 0.975, 0.978. ATen's chunks of 65,536 elements: 2.4 to 3.3 TB/s of the 4.3."""

WORD_BYTES = 8
"""Every entry of a table: a pointer, a ``long long`` or a ``double``."""

CHUNK_BYTES = 8
"""The pointer to the chunk map, which is passed beside the table."""

PARAMETER_BYTES = (4096, 32764)
"""What a kernel's parameters may take: before CUDA 12.1, and since on sm_70 and up (CUDA C++ Programming Guide, "Function Parameters").
A short list passes the smaller table, which the driver copies at every launch."""


def choose_accesses(
    program: Program, operands: Sequence[Operand], targets: Sequence[Target], walks: Sequence[View] = ()
) -> tuple[tuple[Access, ...], int] | None:
    """How a foreach kernel reaches each parameter of one member, and the member's number of elements.

    ``None`` where an operand does not walk memory in one run (or is one element), a position (of ``walks``) does not count along it, or a
    complex number comes by value, which no word of a table holds: such a member needs a kernel of its own. With a single element, a run
    and one element are the same, and all are called a run.
    """
    loads = [operands[parameter.operand] for parameter in program.parameters]
    by_value = [p.type.kind for p, load in zip(program.parameters, loads, strict=True) if load.on_host]
    if "complex" in by_value or any(scalar.kind is complex for scalar in program.scalars):
        return None
    shape = targets[0].layout.shape
    if any(target.layout.shape != shape for target in targets):
        return None
    on_device = [load for load in loads if not load.on_host]
    layouts = [*(load.layout for load in on_device), *(target.layout for target in targets)]
    strides = [expand_strides(layout.shape, layout.strides, shape) for layout in layouts]
    strides += [expand_strides(walk.shape, walk.strides, shape) for walk in walks]
    space = build_space(shape, strides, outputs=range(len(on_device), len(layouts)))
    if len(space.dims) > 1 or any(walk.offset for walk in walks):
        return None
    steps = [dim_strides for dim in space.dims for dim_strides in dim.strides] or [1] * len(strides)
    if any(step > 1 for step in steps) or any(step != 1 for step in steps[len(on_device) :]):
        return None
    accesses = iter(steps)
    found: list[Access] = ["value" if load.on_host else "vector" if next(accesses) else "uniform" for load in loads]
    return tuple(found), space.num_elements


def list_variant(
    program: Program,
    accesses: tuple[Access, ...],
    shared_loads: tuple[bool, ...],
    shared_scalars: tuple[bool, ...],
    in_place: tuple[int | None, ...],
    num_members: int,
) -> Variant:
    """The kernel for members of one program that are reached alike; a longer list than its capacity takes several launches."""
    types: list[ScalarType] = [p.type for p, access in zip(program.parameters, accesses, strict=True) if access == "vector"]
    widest = max((t.itemsize for t in (*types, *(r.type for r in program.results if not r.is_reduced))), default=ACCESS_BYTES)
    per_access = ACCESS_BYTES // widest
    shared = (*shared_loads, *shared_scalars)
    num_shared, num_own = sum(shared) + program.has_draws, len(shared) - sum(shared) + in_place.count(None) + 1
    rooms = [((nbytes - CHUNK_BYTES) // WORD_BYTES - num_shared) // num_own for nbytes in PARAMETER_BYTES]
    capacity = next((room for room in rooms if room >= num_members), rooms[-1])
    table = Table(capacity, FOREACH_ACCESSES, shared_loads, shared_scalars, in_place)
    stores: tuple[Access, ...] = tuple("reduced" if result.is_reduced else "vector" for result in program.results)
    paces = (Pace("run", 64),) * len(program.positions)
    return Variant("foreach", accesses, stores, per_access * FOREACH_ACCESSES, 1, 64, FOREACH_THREADS, paces=paces, table=table)


def table_words(program: Program, variant: Variant) -> list[tuple[int, int]]:
    """(first word, number of words) of each entry: loads, stores that are no load's, the element count, numbers, the members' seeds."""
    table = variant.table
    assert table is not None
    words, at = [], 0
    seeds = (True,) * program.has_draws
    for is_shared in (*table.shared_loads, *(False for load in table.in_place if load is None), False, *table.shared_scalars, *seeds):
        count = 1 if is_shared else table.capacity
        words.append((at, count))
        at += count
    return words


def chunk_size(variant: Variant) -> int:
    """Elements that a block computes."""
    return variant.threads * variant.elements


def chunk_map(variant: Variant, sizes: Sequence[int]) -> npt.NDArray[np.int32]:
    """(member, chunk of it) of each block, in the members' order; ``sizes`` are their numbers of elements.

    A chunk begins with an aligned access of the output, so the first may begin before the first element, by less than one access;
    the room for it makes one chunk more than there seem to be where a member fills its last one.
    """
    table = variant.table
    assert table is not None
    most_before = variant.elements // table.accesses - 1
    counts = (np.asarray(sizes, np.int64) + most_before + chunk_size(variant) - 1) // chunk_size(variant)
    members = np.repeat(np.arange(len(counts)), counts)
    chunks = np.arange(len(members)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.stack((members, chunks), axis=1).astype(np.int32)
