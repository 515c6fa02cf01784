"""Turns a hand-written kernel and a launch into what limits it and what to try next, as `wideload.analyze.explain` does for plans.

Its bytes, sectors and divergence come from its PTX, executed for some blocks; it must not know how the kernel was called or measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from wideload.analyze.budget import Unit, count_units, main_instructions
from wideload.analyze.bytes import Cover, Span, count_bytes, count_sectors, span_of
from wideload.analyze.explain import (
    UNIT_ADVICE,
    US_BYTES,
    WORTH_NAMING,
    AccessCount,
    ExplainedKernel,
    ExplainedOperand,
    Explanation,
    GpuFigures,
    Verdict,
    achievable_bandwidth,
    bytes_figure,
    compiled_figures,
    count_accesses,
    efficiency_figure,
    judge_launches,
    judge_measured,
    judge_memory,
    judge_tail,
    judge_waste,
    launch_figures,
    nominal_bandwidth,
    sm_clock,
    time_at,
    wide_share,
)
from wideload.analyze.figure import Figure, assumed, computed
from wideload.analyze.inflight import bytes_in_flight_per_sm, littles_law_bytes
from wideload.analyze.occupancy import Occupancy, occupancy
from wideload.analyze.ptx import MAX_STEPS, SAMPLED_THREADS, Dim3, PtxAccess, Touched, Walk, walk_ptx
from wideload.analyze.sectors import SECTOR_BYTES, WARP_SIZE
from wideload.dtypes import dtype_name
from wideload.nvrtc import Cubin
from wideload.sass import parse_sass

__all__ = ["BuiltRaw", "Operand", "explain_raw", "requested_sectors", "walk_kernel"]

_ACCESS_BYTES = 16
"""The widest load on every architecture."""
_ALIGNMENT_BYTES = 256
"""Of memory that was just allocated."""
_SHARED_WAVEFRONTS_PER_CLOCK = 1
"""An SM's: 128 bytes a clock, from the 32 banks of 4 bytes (Nsight Compute's memory tables)."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a kernel points to; ``strides`` in elements. What lies between its first and its last byte is its region."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    address_bytes: int
    is_written: bool

    @property
    def span(self) -> Span | None:
        """The memory under it; None without elements."""
        return span_of(self.address_bytes, self.dtype.itemsize, self.shape, self.strides)

    @property
    def region(self) -> tuple[int, int]:
        """The address of its first byte and the one behind its last."""
        span = self.span
        return (self.address_bytes, span.end_bytes if span else self.address_bytes)


@dataclass(frozen=True, slots=True)
class BuiltRaw:
    """What NVRTC and nvdisasm made of a kernel (SASS with line information), or why there is no SASS."""

    cubin: Cubin
    ptx: str
    sass: str | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class _Facts:
    """What the verdicts are drawn from, beside the explanation."""

    walk: Walk
    aligned: Walk | None
    """The same with every operand at an aligned address, where one is not."""
    operands: tuple[Operand, ...]
    lives: Occupancy
    waves: float | None
    bytes_per_thread: float
    load_bytes: float
    """The mean width of the global loads, by their bytes."""
    needed_in_flight: float | None
    read_share: float
    shared_us: float | None
    shared_ideal_us: float | None


def walk_kernel(
    ptx: str,
    name: str,
    grid: Dim3,
    block: Dim3,
    operands: Sequence[Operand | None],
    numbers: Sequence[int | float | None],
    sampled_threads: int = SAMPLED_THREADS,
) -> Walk:
    """Execute some blocks: ``operands`` and ``numbers`` are the arguments, one of the two for each. The regions are the operands'."""
    arguments = [number if operand is None else operand.address_bytes for operand, number in zip(operands, numbers, strict=True)]
    return walk_ptx(ptx, name, grid, block, arguments, [operand.region for operand in operands if operand], sampled_threads)


def requested_sectors(walk: Walk) -> tuple[float, float]:
    """The sectors that all warps' loads and all their stores ask for, each request's by itself; atomics are neither."""
    loaded, stored = (sum(a.sectors for a in walk.accesses if a.kind == kind and a.space == "global") for kind in ("load", "store"))
    return loaded, stored


def explain_raw(
    name: str,
    source: str,
    figures: GpuFigures,
    built: BuiltRaw,
    arguments: Sequence[Operand | None],
    numbers: Sequence[int | float | None],
    grid: Dim3,
    block: Dim3,
    shared_bytes: int = 0,
    measured_us: float | None = None,
) -> Explanation:
    """Explain one launch; ``shared_bytes`` are those it adds to what the kernel declares. Sources of figures as `explain_call`."""
    operands = tuple(operand for operand in arguments if operand)
    is_empty = 0 in grid
    walk = _NOTHING if is_empty else walk_kernel(built.ptx, name, grid, block, arguments, numbers)
    l2_bytes = figures.target.gpu.l2_mib * 2**20 if figures.target.gpu else math.inf
    explained = _explain_operands(operands, walk, l2_bytes)
    read, written = (sum(int(o.minimal.value) for o in explained if o.role == role) for role in ("read", "written"))
    moved = sum(int(o.moved.value) for o in explained)
    minimal = read + written
    num_elements = max((math.prod(o.shape) for o in explained if o.role == "written"), default=0)
    num_elements = 0 if is_empty else num_elements or max((math.prod(o.shape) for o in explained), default=1)
    nominal, achievable = nominal_bandwidth(figures), achievable_bandwidth(figures, read, written)
    how = "PTX, executed for some blocks" + (
        f" up to {MAX_STEPS:,} instructions" if walk.is_cut else "" if walk.is_exact else "; values in memory are unknown"
    )
    kernel, facts = _explain_kernel(
        name, source, figures, built, walk, operands, grid, block, shared_bytes, num_elements, read / minimal if minimal else 0.0
    )
    explanation = Explanation(
        function=name,
        arch=figures.target.arch,
        gpu=figures.target.gpu.name if figures.target.gpu else None,
        num_elements=num_elements,
        bytes_read=computed(read, "B", how),
        bytes_written=computed(written, "B", how),
        minimal=computed(minimal, "B", "read and written"),
        moved=computed(moved, "B", f"whole {SECTOR_BYTES}-byte sectors, each once a block, and no more than there are"),
        efficiency=efficiency_figure(minimal, moved, "minimal bytes / moved bytes"),
        bytes_per_element=computed(minimal / num_elements if num_elements else 0.0, "B/element", "minimal bytes / elements"),
        nominal_bandwidth=nominal,
        achievable_bandwidth=achievable,
        least_time=time_at(minimal, nominal, "computed", "minimal bytes / nominal bandwidth"),
        achievable_time=time_at(
            minimal,
            achievable,
            "assumed" if achievable is None or achievable.kind == "assumed" else "computed",
            "minimal bytes / achievable bandwidth",
        ),
        measured_time=None if measured_us is None else Figure(measured_us, "us", "measured", "wl.bench: median, cold L2"),
        operands=explained,
        kernels=() if is_empty else (kernel,),
        eager=None,
        verdicts=(),
    )
    if is_empty:
        nothing = computed(1.0, "x", "no kernel runs")
        return replace(explanation, verdicts=(Verdict("empty", nothing, "Nothing is launched: the grid has no blocks", _NO_STEP),))
    if any(operand.address_bytes % _ACCESS_BYTES for operand in operands):
        moved_operands = [o and replace(o, address_bytes=-(-o.address_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES) for o in arguments]
        facts = replace(facts, aligned=walk_kernel(built.ptx, name, grid, block, moved_operands, numbers))
    return replace(explanation, verdicts=_judge(explanation, kernel, facts))


_NOTHING = Walk((), {}, {}, {}, 1.0, False, True)


# ---- operands


def _explain_operands(operands: Sequence[Operand], walk: Walk, l2_bytes: float) -> tuple[ExplainedOperand, ...]:
    rows = []
    for position, operand in enumerate(operands):
        for role, touched, kinds in (("read", walk.reads, ("load",)), ("written", walk.writes, ("store", "atomic"))):
            accesses = [access for access in walk.accesses if access.region == position and access.kind in kinds]
            if accesses and operand.span:
                rows.append(_explain_operand(operand, operand.span, role, touched.get(position), accesses, l2_bytes))
    return tuple(rows)


def _explain_operand(
    operand: Operand, span: Span, role: str, touched: Touched | None, accesses: Sequence[PtxAccess], l2_bytes: float
) -> ExplainedOperand:
    """What is scattered by values in memory is taken to be used once, all of it; what is larger than the L2, to miss it each time."""
    whole, whole_sectors = count_bytes([span]), count_sectors([span])
    scattered = sum(access.sectors for access in accesses if not access.is_known) * SECTOR_BYTES
    if scattered:
        minimal = Cover(min(whole.nbytes, round(sum(a.requests * WARP_SIZE * a.width_bytes for a in accesses))))
        moved = Cover(max(minimal.nbytes, round(scattered)) if whole.nbytes > l2_bytes else whole_sectors.nbytes)
        how = "all of it, or what is asked for, if that is less: addresses hang on values in memory"
    else:
        assert touched is not None
        minimal = Cover(min(round(touched.nbytes), _region_bytes(operand)))
        moved = Cover(min(round(touched.sectors) * SECTOR_BYTES, max(whole_sectors.nbytes, _whole_sectors(minimal.nbytes))))
        how = "distinct bytes that the blocks touch"
    requests = sum(access.requests for access in accesses)
    sectors = sum(access.sectors for access in accesses)
    ideal = sum(access.ideal_sectors for access in accesses)
    return ExplainedOperand(
        kernel=0,
        name=operand.name,
        role=role,
        dtype=dtype_name(operand.dtype),
        itemsize=operand.dtype.itemsize,
        shape=operand.shape,
        strides=operand.strides,
        access=" + ".join(sorted({f"{access.width_bytes} B" for access in accesses}, key=lambda width: int(width[:-2]))) or "none",
        minimal=bytes_figure(minimal, how),
        moved=bytes_figure(moved, "their sectors x 32, no more than there are"),
        sectors=computed(sectors, "sectors", "of all warps' requests, each request's by itself"),
        efficiency=efficiency_figure(minimal.nbytes, moved.nbytes, "bytes / bytes of sectors"),
        warp_sectors=computed(sectors / requests if requests else 0.0, "sectors", "a request of a warp, the mean of all"),
        warp_efficiency=computed(
            min(1.0, ideal / sectors) if sectors else 1.0, "of moved", "sectors that the bytes fill / sectors, of the requests"
        ),
    )


def _region_bytes(operand: Operand) -> int:
    """A kernel may use what lies between a view's elements."""
    start, end = operand.region
    return end - start


def _whole_sectors(nbytes: int) -> int:
    return (-(-nbytes // SECTOR_BYTES) + 1) * SECTOR_BYTES


# ---- the kernel


def _explain_kernel(
    name: str,
    source: str,
    figures: GpuFigures,
    built: BuiltRaw,
    walk: Walk,
    operands: tuple[Operand, ...],
    grid: Dim3,
    block: Dim3,
    shared_bytes: int,
    num_elements: int,
    read_share: float,
) -> tuple[ExplainedKernel, _Facts]:
    target, gpu, cubin = figures.target, figures.target.gpu, built.cubin
    sms = gpu.sms if gpu else None
    threads, blocks = math.prod(block), math.prod(grid)
    clock = sm_clock(figures)
    lives = occupancy(target.arch, threads_per_block=threads, registers=cubin.registers, shared_bytes=cubin.shared_bytes + shared_bytes)
    waves = blocks / (sms * lives.blocks_per_sm) if sms and lives.blocks_per_sm and blocks else None
    nominal = nominal_bandwidth(figures)
    little = littles_law_bytes(nominal.value) / sms if nominal and sms else None
    instructions = main_instructions(built.sass, source, name) if built.sass and not walk.has_loops else ()
    accesses = count_accesses(instructions or parse_sass(built.sass)) if built.sass else ()
    per_thread: dict[Unit, float] = count_units(instructions, 1) if instructions else dict(walk.units)
    how = "SASS" if instructions else "PTX, executed for some blocks"
    per_element = threads * blocks / num_elements if num_elements else 0.0
    mix = {unit: count * per_element for unit, count in per_thread.items()}
    loads = [access for access in walk.accesses if access.kind == "load" and access.space == "global"]
    in_flight_per_thread, load_bytes = _in_flight(loads, accesses, threads * blocks)
    in_flight = bytes_in_flight_per_sm(1, threads, lives.blocks_per_sm, blocks, sms) * in_flight_per_thread
    shared = [access for access in walk.accesses if access.space == "shared"]
    shared_us, ideal_us = (
        None if sms is None else sum(counts) / (sms * _SHARED_WAVEFRONTS_PER_CLOCK * clock.value)
        for counts in ([a.wavefronts for a in shared], [a.ideal_wavefronts for a in shared])
    )
    shared_memory = computed(cubin.shared_bytes + shared_bytes, "B a block", "ptxas, and what the launch adds")
    explained = ExplainedKernel(
        name=name,
        family="raw",
        num_elements=num_elements,
        elements_per_thread=max(1, round(num_elements / (threads * blocks))) if blocks else 0,
        elements_per_access=1,
        threads=threads,
        grid=blocks,
        reasons=(),
        missing=built.missing,
        accesses=accesses,
        wide_share=wide_share(accesses),
        in_flight_per_thread=computed(in_flight_per_thread, "B", "global loads of the SASS, no more than a thread executes"),
        **launch_figures(figures, nominal, waves, blocks, num_elements, mix, how),
        **compiled_figures(cubin, lives, threads, shared_memory, in_flight),
    )
    needed = None if little is None else little * read_share
    facts = _Facts(walk, None, operands, lives, waves, in_flight_per_thread, load_bytes, needed, read_share, shared_us, ideal_us)
    return explained, facts


def _in_flight(loads: Sequence[PtxAccess], accesses: Sequence[AccessCount], num_threads: int) -> tuple[float, float]:
    """Bytes that a thread loads before it needs any of them, and the mean width of a load, by bytes.

    The loads of the SASS, where a loop's body stands once, and no more than are executed.
    """
    executed = sum(a.requests * WARP_SIZE * a.width_bytes for a in loads)
    mean = sum(a.requests * WARP_SIZE * a.width_bytes**2 for a in loads) / executed if executed else 0.0
    in_sass = sum(a.width_bits // 8 * a.count for a in accesses if a.kind == "load" and a.space in ("global", "generic"))
    per_thread = executed / num_threads if num_threads else 0.0
    return (min(per_thread, in_sass) if in_sass else per_thread), mean


# ---- the verdict


def _judge(explanation: Explanation, kernel: ExplainedKernel, facts: _Facts) -> tuple[Verdict, ...]:
    found = [
        *_judge_sectors(explanation),
        *judge_launches(explanation),
        *_judge_requests(explanation, facts),
        *_judge_units(explanation, kernel, facts),
        *_judge_in_flight(kernel, facts),
        *_judge_banks(explanation, facts),
        *_judge_spills(kernel, facts),
        *judge_tail(kernel, "Give each block less to do, so that there are more waves, or as many blocks as fit whole waves."),
    ]
    limits = sorted((verdict for verdict in found if verdict.effect.value >= WORTH_NAMING), key=lambda v: -v.effect.value)
    behind = judge_memory(explanation, bool(limits)) if explanation.moved.value else _judge_nothing(facts.walk)
    return (*_judge_outside(facts), *_judge_unfinished(facts.walk), *limits, *judge_measured(explanation, limits), behind)


def _judge_nothing(walk: Walk) -> Verdict:
    """Instead of the memory's verdict, where none moves."""
    is_unknown = any(access.space == "global" for access in walk.accesses)
    text = "No byte of an operand moves" + (", as far as is known: addresses are values in memory, or outside of all" if is_unknown else "")
    return Verdict("empty", computed(1.0, "x", "nothing moves"), text, "Pass what the kernel moves as tensors." if is_unknown else _NO_STEP)


_NO_STEP = "Nothing to do."


def _judge_outside(facts: _Facts) -> list[Verdict]:
    """Accesses that are in no operand: each kind, each operand and each side of it once."""
    effect = computed(1.0, "x", "no matter of time: results are wrong, or the GPU stops")
    step = "Guard the index by the number of elements (if (i < n)), launch fewer blocks, or pass all of the memory that is used."
    return [
        Verdict(
            "outside",
            effect,
            f"Outside of every operand: {outside.kind}s reach at least {outside.nbytes:,} bytes "
            f"{'behind the last' if outside.is_behind else 'before the first'} byte of {facts.operands[outside.region].name}",
            step,
        )
        for outside in sorted(facts.walk.outside, key=lambda outside: -outside.nbytes)
    ]


def _judge_unfinished(walk: Walk) -> list[Verdict]:
    if not walk.is_cut:
        return []
    text = f"Not walked to its end: the blocks that are executed here were stopped after {MAX_STEPS:,} instructions; what follows is theirs"
    step = "Explain a call whose loops take fewer turns; if none ends, see that every loop does."
    return [Verdict("unfinished", computed(1.0, "x", "not known"), text, step)]


def _sectors(walk: Walk, region: int) -> float:
    return sum(access.sectors for access in walk.accesses if access.region == region)


def _judge_sectors(explanation: Explanation) -> list[Verdict]:
    """Sectors of which the kernel as a whole uses a part: strides, fields of structs, scattered elements."""
    wasted = judge_waste(explanation)
    if wasted is None:
        return []
    worst, effect, found = wasted
    step = f"Make what is used of {worst} neighbours in memory: an array a field, a copy without the stride, sorted indices."
    return [Verdict("sectors", effect, f"Sectors wasted: {found}", step)]


def _judge_requests(explanation: Explanation, facts: _Facts) -> list[Verdict]:
    """Requests that touch more sectors than their bytes fill, though the operand as a whole is used: misaligned, or scattered."""
    found = []
    moved = explanation.moved.value
    by_name = {operand.name: position for position, operand in enumerate(facts.operands)}
    shifted = {
        name: position
        for name, position in by_name.items()
        if facts.aligned and _sectors(facts.walk, position) > WORTH_NAMING * _sectors(facts.aligned, position)
    }
    if shifted and facts.aligned and moved:
        extra = sum(_sectors(facts.walk, position) - _sectors(facts.aligned, position) for position in shifted.values())
        places = [(name, facts.operands[at].address_bytes % _ALIGNMENT_BYTES) for name, at in shifted.items()]
        starts = ", ".join(f"{name} starts {offset} bytes behind one" for name, offset in places)
        text = f"Misaligned: requests touch {extra:,.0f} sectors more than from multiples of {_ALIGNMENT_BYTES} bytes; {starts}"
        step = "Pass memory that starts at such an address, or load aligned 16-byte words and shift the values into place in registers."
        effect = computed(1 + extra * SECTOR_BYTES / moved, "x", "sectors requested / requested if aligned: if no cache held them")
        found.append(Verdict("misaligned", effect, text, step))
    scattered = [
        operand
        for operand in explanation.operands
        if by_name[operand.name] not in shifted.values()
        and operand.efficiency
        and operand.warp_efficiency.value < operand.efficiency.value / WORTH_NAMING
    ]
    if scattered and moved:
        extra = sum(operand.sectors.value * SECTOR_BYTES * (1 - operand.warp_efficiency.value) for operand in scattered)
        names = ", ".join(
            f"{o.warp_sectors.value:.0f} sectors of {o.name} and uses {o.warp_efficiency.value:.0%} of them" for o in scattered
        )
        text = f"Uncoalesced: one request of a warp touches {names}"
        step = "Let neighbouring threads touch neighbouring elements: swap the roles of x and y, or go through a tile in shared memory."
        effect = computed(1 + extra / moved, "x", "sectors by request / distinct sectors: if no cache held them")
        found.append(Verdict("uncoalesced", effect, text, step))
    return found


def _judge_units(explanation: Explanation, kernel: ExplainedKernel, facts: _Facts) -> list[Verdict]:
    """The unit that takes longest, if that is longer than the memory; lanes that idle, if they are why."""
    achievable = explanation.achievable_bandwidth
    if achievable is None or not kernel.unit_times:
        return []
    memory_us = explanation.moved.value / (achievable.value * US_BYTES)
    unit, time = max(kernel.unit_times.items(), key=lambda item: item[1].value)
    if time.value <= memory_us or not memory_us:
        return []
    found = []
    useful_us = max(memory_us, time.value * facts.walk.lane_share)
    if time.value > WORTH_NAMING * useful_us:
        text = (
            f"Divergent: {1 - facts.walk.lane_share:.0%} of the lanes idle in the instructions that {kernel.name} issues, "
            f"which take {time.value:.1f} us, the memory {memory_us:.1f} us"
        )
        step = "Let the 32 threads of a warp take the same branch and as many turns of a loop: sort the work, or spread it over the lanes."
        found.append(Verdict("divergent", Figure(time.value / useful_us, "x", time.kind, "issued / active lanes"), text, step))
    if useful_us > memory_us:
        name, step = UNIT_ADVICE[unit]
        count = kernel.instructions[unit].value
        text = f"{name}: {count:.1f} instructions an element of {kernel.name} take {time.value:.1f} us, the memory {memory_us:.1f} us"
        found.append(Verdict(unit, Figure(useful_us / memory_us, "x", time.kind, "unit time / memory time"), text, step))
    return found


def _judge_in_flight(kernel: ExplainedKernel, facts: _Facts) -> list[Verdict]:
    """Too few bytes in flight, by the first reason: the grid, occupancy, or the width of a load."""
    have = kernel.in_flight_per_sm.value if kernel.in_flight_per_sm else 0.0
    needed = facts.needed_in_flight
    if needed is None or not have or have >= needed:
        return []
    short = f"{have / 1024:.1f} KiB an SM where {needed / 1024:.1f} KiB of loads keep the bus busy"
    effect = assumed(needed / have, "x", "Little's law x share of reads / bytes in flight")
    by_occupancy, by_width = 1 / facts.lives.fraction, _ACCESS_BYTES / facts.load_bytes
    if facts.waves is not None and facts.waves < 1:
        text = f"Too small a grid: {kernel.grid} blocks of {kernel.threads} threads fill {facts.waves:.1%} of the GPU, {short}"
        return [Verdict("small_grid", effect, text, "Launch more blocks, each with less to do, or batch calls.")]
    if by_occupancy > 1 and by_occupancy >= by_width:
        limiter = facts.lives.limiter
        text = f"Too few bytes in flight: {short}; occupancy {facts.lives.fraction:.0%}, limited by {limiter}"
        return [Verdict("in_flight", effect, text, _OCCUPANCY_ADVICE[limiter])]
    if by_width > 1:
        text = f"Narrow accesses: loads of {facts.load_bytes:.3g} B, {facts.bytes_per_thread:.3g} B a thread on their way: {short}"
        return [
            Verdict("narrow", effect, text, "Let a thread load 16 bytes at a time: float4, or uint4 for eight halves, from aligned memory.")
        ]
    text = f"Too few bytes in flight: {short}, though every warp is there and loads 16 bytes"
    return [Verdict("in_flight", effect, text, "Let a thread load several vectors before it uses the first: unroll the loop.")]


_OCCUPANCY_ADVICE = {
    "registers": "Use fewer registers: fewer values alive at a time, or __launch_bounds__ with the blocks an SM that are wanted.",
    "shared": "Use less shared memory a block, or more threads for as much.",
    "threads": "Choose a block size of which whole blocks fill an SM: 128 or 256.",
    "blocks": "Use larger blocks: an SM holds no more of them.",
}
"""By what limits it."""


def _judge_banks(explanation: Explanation, facts: _Facts) -> list[Verdict]:
    achievable = explanation.achievable_bandwidth
    if achievable is None or not facts.shared_us or facts.shared_ideal_us is None:
        return []
    memory_us = explanation.moved.value / (achievable.value * US_BYTES)
    without = max(memory_us, facts.shared_ideal_us)
    if facts.shared_us <= without:
        return []
    ways = facts.shared_us / facts.shared_ideal_us
    text = (
        f"Bank conflicts: accesses to shared memory take {ways:.1f} turns for one, {facts.shared_us:.1f} us, the memory {memory_us:.1f} us"
    )
    step = "Pad the rows of the tile by one element, or swizzle its columns (x ^ y), so that a warp's words lie in different banks."
    return [Verdict("bank_conflicts", assumed(facts.shared_us / without, "x", "shared memory's time / time without conflicts"), text, step)]


def _judge_spills(kernel: ExplainedKernel, facts: _Facts) -> list[Verdict]:
    if kernel.spill_bytes is None or not kernel.spill_bytes.value or not kernel.num_elements:
        return []
    touched = [*facts.walk.reads.values(), *facts.walk.writes.values()]
    per_thread = sum(region.nbytes for region in touched) / (kernel.grid * kernel.threads)
    text = f"Spills: {kernel.spill_bytes.value:.0f} bytes a thread of {kernel.name} go through local memory"
    effect = computed(1 + kernel.spill_bytes.value / max(per_thread, 1), "x", "spilled / minimal bytes a thread")
    return [
        Verdict(
            "spills",
            effect,
            text,
            "Keep fewer values alive at a time, or allow more registers: smaller blocks, __launch_bounds__ with fewer.",
        )
    ]
