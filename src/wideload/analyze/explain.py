"""Turns a planned and compiled call into what limits it and what to try next: bytes, sectors, occupancy, bytes in flight, instructions.

A pure function of the plan, the compiled kernels and the figures of a GPU; it must not run anything, nor know how the call was spelt.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from wideload.analyze.aten import PATHS, AtenKernel, Place, eager_kernels, spans_by_storage
from wideload.analyze.budget import Unit, boost_clock_mhz, count_units, main_instructions, unit_rates, unit_time_us
from wideload.analyze.bytes import Cover, Span, count_bytes, count_sectors, span_of
from wideload.analyze.figure import Figure, Kind, assumed, computed
from wideload.analyze.inflight import DRAM_LATENCY_NS, bytes_in_flight_per_sm, littles_law_bytes
from wideload.analyze.occupancy import Occupancy, occupancy
from wideload.analyze.sectors import LINE_BYTES, SECTOR_BYTES, WARP_SIZE, WarpAccess, warp_sectors
from wideload.decode import check_schema, decode
from wideload.expr import Expr, Reduced
from wideload.gpus import Target, bytes_in_flight_target
from wideload.layout import IterSpace, build_space, is_row_major
from wideload.nvrtc import Cubin
from wideload.plan import ACCESS_BYTES, Access, KernelPlan
from wideload.replay import NodeLayout
from wideload.sass import Instruction, memory_accesses

__all__ = [
    "ACHIEVABLE_SHARE",
    "LIMITS",
    "SCHEMA",
    "UNIT_ADVICE",
    "US_BYTES",
    "WORTH_NAMING",
    "AccessCount",
    "BuiltKernel",
    "EagerCost",
    "ExplainedKernel",
    "ExplainedOperand",
    "Explanation",
    "GpuFigures",
    "KernelCounters",
    "Limit",
    "Place",
    "Verdict",
    "achievable_bandwidth",
    "bytes_figure",
    "compiled_figures",
    "count_accesses",
    "efficiency_figure",
    "explain_call",
    "judge_launches",
    "judge_measured",
    "judge_memory",
    "judge_sectors",
    "judge_tail",
    "judge_waste",
    "launch_figures",
    "nominal_bandwidth",
    "sm_clock",
    "time_at",
    "wide_share",
]

SCHEMA = "wideload.explain/1"
"""The number behind the slash grows when a key changes its name or its meaning."""

Limit = (
    Literal["launch", "small_grid", "sectors", "uncoalesced", "narrow", "in_flight", "tail", "spills", "unexplained", "memory", "empty"]
    | Literal["misaligned", "divergent", "bank_conflicts", "outside", "unfinished"]
    | Unit
)
"""What can hold a call back; docs/explain.md says what each means."""

LIMITS: tuple[Limit, ...] = tuple(limit for part in get_args(Limit) for limit in get_args(part))

ACHIEVABLE_SHARE = 0.906
"""Of nominal bandwidth: the best kernels for 2 reads and 1 write on an H200, 4.36 of 4.8 TB/s (a copy: 0.88). Others are assumed alike."""

LAUNCH_US = 1.1
"""An add of 2**10 elements in a CUDA graph on an H200: what a kernel takes however little it does."""

NARROW_SLOWDOWN = {1: 2.1, 2: 2.1, 4: 1.3}
"""By bytes an access. An add of one bf16 a thread reached 2.10 of 4.34 TB/s on an H200; 4 bytes: 70 to 80 % of the bandwidth (article)."""

WORTH_NAMING = 1.05
"""Limits that cost less than 5 % are left out."""
_SAME = 1.05
"""A measured time within 5 % of the wall is at the wall."""
_WIDE_BITS = 8 * ACCESS_BYTES
US_BYTES = 1e3
"""Bytes in a microsecond at 1 GB/s."""


@dataclass(frozen=True, slots=True)
class GpuFigures:
    """What a call is held against.

    ``nominal`` is the bandwidth where it is not the one of ``target``'s GPU, ``sm_clock`` in MHz; ``ceiling`` gives, for bytes read and
    written, the bandwidth that was measured. What is None is taken from ``target``, and assumed.
    """

    target: Target
    nominal: Figure | None = None
    sm_clock: Figure | None = None
    ceiling: Callable[[int, int], Figure] | None = None


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A planned kernel, what NVRTC and nvdisasm made of it (SASS with line information), or why they could not."""

    plan: KernelPlan
    source: str
    cubin: Cubin | None = None
    sass: str | None = None
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class ExplainedOperand:
    """One operand of kernel number ``kernel``.

    ``moved`` are whole sectors, ``efficiency`` the share of them that is used, None where none is moved; ``warp_sectors`` are those
    that one access of the first warp touches. ``line_byte`` is where in a line of 128 bytes the operand begins.
    """

    kernel: int
    name: str
    role: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    access: str
    minimal: Figure
    moved: Figure
    sectors: Figure
    efficiency: Figure | None
    warp_sectors: Figure
    warp_efficiency: Figure
    line_byte: int = 0


@dataclass(frozen=True, slots=True)
class AccessCount:
    """How many loads or stores of one width a thread executes, of the path that all but the edges take; read from the SASS."""

    kind: str
    space: str
    width_bits: int
    count: int


@dataclass(frozen=True, slots=True)
class ExplainedKernel:
    """One launch. What could not be compiled (``missing`` says why), or hangs on a GPU that was not named, is None or empty."""

    name: str
    family: str
    num_elements: int
    elements_per_thread: int
    elements_per_access: int
    threads: int
    grid: int
    reasons: tuple[tuple[str, str, str], ...]
    missing: str | None
    accesses: tuple[AccessCount, ...]
    wide_share: Figure | None
    in_flight_per_thread: Figure
    littles_law_per_sm: Figure | None
    target_per_sm: Figure
    waves: Figure | None
    last_wave: Figure | None
    instructions: dict[Unit, Figure]
    unit_times: dict[Unit, Figure]
    registers: Figure | None = None
    spill_bytes: Figure | None = None
    stack_bytes: Figure | None = None
    shared_bytes: Figure | None = None
    occupancy: Figure | None = None
    occupancy_limiter: str | None = None
    blocks_per_sm: Figure | None = None
    in_flight_per_sm: Figure | None = None


@dataclass(frozen=True, slots=True)
class EagerCost:
    """What eager PyTorch would launch for the same operands, and what that costs at least."""

    kernels: tuple[AtenKernel, ...]
    nbytes: Figure
    bytes_per_element: Figure
    time: Figure | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """One limit: by how much it holds the call back (a factor of time, at most), what was found, and what to try next."""

    limit: Limit
    effect: Figure
    finding: str
    next_step: str

    def __str__(self) -> str:
        factor = f" (up to {self.effect.value:.2f}x)" if self.effect.value > 1 else ""
        return f"{self.finding}{factor}. {self.next_step}"


@dataclass(frozen=True, slots=True)
class KernelCounters:
    """What the hardware counted while one kernel ran, by Nsight Compute, and what was computed for the same, where it was."""

    kernel: str
    counted: dict[str, Figure]
    computed: dict[str, Figure]


@dataclass(frozen=True, slots=True)
class Explanation:
    """How far one call is from its bound, and why. Every figure says whether it was measured, computed or assumed.

    ``minimal`` bytes count every operand's memory once, a broadcast once, and what two operands share once; what is read and written
    counts twice. ``moved`` are whole sectors. ``verdicts`` stand in the order of their effect.
    """

    function: str
    arch: str
    gpu: str | None
    num_elements: int
    bytes_read: Figure
    bytes_written: Figure
    minimal: Figure
    moved: Figure
    efficiency: Figure | None
    """Minimal of moved bytes; None where nothing moves, and where what moves is not known."""
    bytes_per_element: Figure
    nominal_bandwidth: Figure | None
    achievable_bandwidth: Figure | None
    least_time: Figure | None
    achievable_time: Figure | None
    measured_time: Figure | None
    operands: tuple[ExplainedOperand, ...]
    kernels: tuple[ExplainedKernel, ...]
    eager: EagerCost | None
    """None of what is no fused function."""
    verdicts: tuple[Verdict, ...]
    counters: tuple[KernelCounters, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers: a figure is its value, unit, kind and source."""
        plain: dict[str, Any] = json.loads(self.to_json())
        return plain

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Explanation:
        """Read what `to_dict` has written. Raises ``WideloadError`` for another schema, and for what is damaged."""
        check_schema(values, SCHEMA)
        return decode(cls, values, cls.__name__)

    @property
    def tables(self) -> list[tuple[str, list[_Row]]]:
        """What is printed: titles, each with its rows of name, value, unit, kind and source."""
        return _sections(self)

    @property
    def _title(self) -> str:
        where = f"{self.gpu} ({self.arch})" if self.gpu else self.arch
        count = len(self.kernels)
        is_known = self.kernels or self.eager or any(verdict.limit == "empty" for verdict in self.verdicts)
        kernels = f"{count} kernel{'s' * (count != 1)}" if is_known else "kernels unknown"
        return f"{self.function} on {where}: {kernels}, {self.num_elements:,} elements"

    def __str__(self) -> str:
        parts = [self._title]
        for title, rows in _sections(self):
            widths = [max(len(row[column]) for row in rows) for column in range(4)]
            parts.append(f"\n{title}")
            parts += [
                f"  {name:<{widths[0]}}  {value:>{widths[1]}} {unit:<{widths[2]}}  {kind:<{widths[3]}}  {source}".rstrip()
                for name, value, unit, kind, source in rows
            ]
        parts.append("\nVerdict")
        parts += [f"  {position}. {verdict}" for position, verdict in enumerate(self.verdicts, start=1)]
        return "\n".join(parts)

    __repr__ = __str__

    def to_markdown(self) -> str:
        """The same as tables for GitHub."""
        parts = [f"### {self._title}\n"]
        for title, rows in _sections(self):
            parts.append(f"\n**{title}**\n\n| | value | unit | | from |\n|---|---:|---|---|---|\n")
            parts += [f"| {' | '.join(row)} |\n" for row in rows]
        parts.append("\n**Verdict**\n\n")
        parts += [f"{position}. {verdict}\n" for position, verdict in enumerate(self.verdicts, start=1)]
        return "".join(parts)


# ---- explaining


def explain_call(
    function: str,
    figures: GpuFigures,
    expr: Expr,
    layouts: Sequence[NodeLayout],
    places: Sequence[Place],
    out_places: Sequence[Place],
    kernels: Sequence[BuiltKernel],
    measured_us: float | None = None,
) -> Explanation:
    """Explain a call.

    ``expr`` and ``layouts`` are the traced function's, before views are pushed down; ``places`` say where its tensor arguments lie,
    ``out_places`` what it writes. ``measured_us`` is the time of the call on the GPU of ``figures``.
    """
    target, gpu = figures.target, figures.target.gpu
    reads = [placed for kernel in kernels for placed in _loads(kernel.plan, places)]
    writes = [placed for kernel in kernels for placed in _stores(kernel.plan, out_places)]
    read, written = _union(reads, count_bytes), _union(writes, count_bytes)
    minimal = Cover(read.nbytes + written.nbytes, read.is_exact and written.is_exact)
    moved = [
        _union(placed, count_sectors) for kernel in kernels for placed in (_loads(kernel.plan, places), _stores(kernel.plan, out_places))
    ]
    moved_nbytes = sum(cover.nbytes for cover in moved)
    of_results = [node.operand if isinstance(node := expr.nodes[number], Reduced) else number for number in expr.outputs]
    num_elements = max((math.prod(layouts[number].shape) for number in of_results), default=0) if kernels else 0  # kernels may write parts
    nominal = nominal_bandwidth(figures)
    achievable = achievable_bandwidth(figures, read.nbytes, written.nbytes)
    # What follows from an assumption is one; the least time is defined by the nominal bandwidth, and needs none.
    achieved: Kind = "assumed" if achievable is None or achievable.kind == "assumed" else "computed"
    read_share = read.nbytes / minimal.nbytes if minimal.nbytes else 0.0
    explanation = Explanation(
        function=function,
        arch=target.arch,
        gpu=gpu.name if gpu else None,
        num_elements=num_elements,
        bytes_read=bytes_figure(read, "each operand's memory once: broadcasts once, what is shared once"),
        bytes_written=bytes_figure(written, "each result once"),
        minimal=bytes_figure(minimal, "read and written"),
        moved=bytes_figure(
            Cover(moved_nbytes, all(cover.is_exact for cover in moved)), f"whole {SECTOR_BYTES}-byte sectors, each once a kernel"
        ),
        efficiency=efficiency_figure(minimal.nbytes, moved_nbytes, "minimal bytes / moved bytes"),
        bytes_per_element=computed(minimal.nbytes / num_elements if num_elements else 0.0, "B/element", "minimal bytes / elements"),
        nominal_bandwidth=nominal,
        achievable_bandwidth=achievable,
        least_time=time_at(minimal.nbytes, nominal, "computed", "minimal bytes / nominal bandwidth"),
        achievable_time=time_at(minimal.nbytes, achievable, achieved, "minimal bytes / achievable bandwidth"),
        measured_time=None if measured_us is None else Figure(measured_us, "us", "measured", "wl.bench: median, cold L2"),
        operands=tuple(
            operand for position, kernel in enumerate(kernels) for operand in _explain_operands(position, kernel.plan, places, out_places)
        ),
        kernels=tuple(_explain_kernel(kernel, figures, nominal) for kernel in kernels),
        eager=_eager_cost(expr, layouts, places, target.arch, num_elements, achievable),
        verdicts=(),
    )
    return replace(explanation, verdicts=_judge(explanation, read_share))


def nominal_bandwidth(figures: GpuFigures) -> Figure | None:
    """That of the GPU, or of its row in gpus.csv; None of an architecture."""
    gpu = figures.target.gpu
    if figures.nominal is not None or gpu is None:
        return figures.nominal
    return assumed(gpu.memory_bandwidth_gbps, "GB/s", f"gpus.csv, {gpu.name}: {gpu.source}")


def achievable_bandwidth(figures: GpuFigures, bytes_read: int, bytes_written: int) -> Figure | None:
    """The ceiling measured for these bytes, or a share of the nominal bandwidth."""
    nominal = nominal_bandwidth(figures)
    achievable = figures.ceiling(bytes_read, bytes_written) if figures.ceiling and bytes_read + bytes_written else None
    if achievable is not None or nominal is None:
        return achievable
    return assumed(nominal.value * ACHIEVABLE_SHARE, "GB/s", f"{ACHIEVABLE_SHARE} of nominal, as measured on an H200")


_Placed = tuple[Any, Span | None]


def _loads(plan: KernelPlan, places: Sequence[Place]) -> list[_Placed]:
    return [
        (places[tensor].storage, span_of(places[tensor].address_bytes + offset, parameter.type.itemsize, layout.shape, layout.strides))
        for (tensor, offset), parameter, layout, access in zip(
            plan.sources, plan.program.parameters, plan.source_layouts, plan.variant.loads, strict=True
        )
        if access != "value"
    ]


def _stores(plan: KernelPlan, places: Sequence[Place]) -> list[_Placed]:
    return [
        (places[output].storage, span_of(places[output].address_bytes + offset, result.type.itemsize, layout.shape, layout.strides))
        for (output, offset), result, layout in zip(plan.targets, plan.program.results, plan.target_layouts, strict=True)
    ]


def _union(placed: Sequence[_Placed], count: Callable[[list[Span]], Cover]) -> Cover:
    covers = [count(group) for group in spans_by_storage(placed)]
    return Cover(sum(cover.nbytes for cover in covers), all(cover.is_exact for cover in covers))


def bytes_figure(cover: Cover, source: str) -> Figure:
    """A count of bytes, which says where it is an upper bound."""
    return computed(cover.nbytes, "B", source if cover.is_exact else f"{source}; an upper bound: operands overlap in too many pieces")


def efficiency_figure(minimal_nbytes: int, moved_nbytes: int, source: str) -> Figure | None:
    """The share of the moved bytes that is needed; None where nothing moves."""
    return computed(min(1.0, minimal_nbytes / moved_nbytes), "of moved", source) if moved_nbytes else None


def time_at(nbytes: int, bandwidth: Figure | None, kind: Kind, source: str) -> Figure | None:
    """Microseconds for ``nbytes``; None without a bandwidth."""
    return None if bandwidth is None else Figure(nbytes / (bandwidth.value * US_BYTES), "us", kind, source)


# ---- operands


def _explain_operands(kernel: int, plan: KernelPlan, places: Sequence[Place], out_places: Sequence[Place]) -> list[ExplainedOperand]:
    loads, stores = _loads(plan, places), _stores(plan, out_places)
    parameters = [
        (parameter, layout, access)
        for parameter, layout, access in zip(plan.program.parameters, plan.source_layouts, plan.variant.loads, strict=True)
        if access != "value"
    ]
    layouts = [*(layout for _, layout, _ in parameters), *plan.target_layouts]
    space = build_space(layouts[0].shape, [layout.strides for layout in layouts], outputs=range(len(parameters), len(layouts)))
    rows = [
        *((p.name, "read", p.type, access, placed) for (p, _, access), placed in zip(parameters, loads, strict=True)),
        *(
            (r.name, "written", r.type, access, placed)
            for r, access, placed in zip(plan.program.results, plan.variant.stores, stores, strict=True)
        ),
    ]
    explained = []
    for row, (name, role, kind, access, (_, span)) in enumerate(rows):
        group = [span] if span else []
        minimal, moved = count_bytes(group), count_sectors(group)
        request = _request(plan, space, row, kind.itemsize, access, span.address_bytes if span else 0)
        explained.append(
            ExplainedOperand(
                kernel=kernel,
                name=name,
                role=role,
                dtype=kind.name,
                itemsize=kind.itemsize,
                shape=layouts[row].shape,
                strides=layouts[row].strides,
                access=access,
                minimal=bytes_figure(minimal, "distinct bytes"),
                moved=bytes_figure(moved, "distinct sectors x 32"),
                sectors=computed(moved.nbytes // SECTOR_BYTES, "sectors", "distinct"),
                efficiency=efficiency_figure(minimal.nbytes, moved.nbytes, "bytes / bytes of sectors"),
                warp_sectors=computed(request.sectors, "sectors", "one access of the first warp"),
                warp_efficiency=computed(request.efficiency, "of moved", "bytes / bytes of sectors, of that access"),
                line_byte=span.address_bytes % LINE_BYTES if span else 0,
            )
        )
    return explained


def _request(plan: KernelPlan, space: IterSpace, row: int, itemsize: int, access: Access, address: int) -> WarpAccess:
    """What one access of the first warp touches; all of a thread's, of an operand of which it takes every few elements."""
    lanes = min(WARP_SIZE, space.num_elements)
    if access in ("row", "uniform", "reduced"):
        return warp_sectors([address], itemsize)
    if access == "strided":
        return warp_sectors((address + itemsize * _offset(space, row, lane) for lane in range(lanes)), itemsize)
    width = ACCESS_BYTES if access in ("turned", "turned_realigned") else plan.variant.access_elements * itemsize
    lanes = min(lanes, -(-space.num_elements * itemsize // width))
    first = address % SECTOR_BYTES
    if access == "stepped":
        step = space.dims[0].strides[row]
        return WarpAccess(-(-(first + lanes * step * width) // SECTOR_BYTES), lanes * width)
    step, size = (width, itemsize) if access == "elements" else (width, width)
    return warp_sectors(range(first, first + lanes * step, step), size)


def _offset(space: IterSpace, row: int, index: int) -> int:
    """Where element ``index`` of the loops lies in an operand."""
    offset = 0
    for dim in space.dims:
        index, at = divmod(index, dim.size)
        offset += at * dim.strides[row]
    return offset


# ---- kernels


def _explain_kernel(kernel: BuiltKernel, figures: GpuFigures, nominal: Figure | None) -> ExplainedKernel:
    plan, cubin, target, gpu = kernel.plan, kernel.cubin, figures.target, figures.target.gpu
    variant = plan.variant
    per_thread = sum(
        (variant.access_elements if access == "repeated" else variant.elements) * step * parameter.type.itemsize
        for parameter, access, (step, _) in zip(plan.program.parameters, variant.loads, variant.load_steps, strict=True)
        if access not in ("row", "uniform", "value")
    )
    sms = gpu.sms if gpu else None
    lives = (
        None
        if cubin is None
        else occupancy(target.arch, threads_per_block=variant.threads, registers=cubin.registers, shared_bytes=cubin.shared_bytes)
    )
    waves = plan.grid / (sms * lives.blocks_per_sm) if lives and lives.blocks_per_sm and sms else None
    instructions = () if kernel.sass is None else main_instructions(kernel.sass, kernel.source, plan.name)
    mix = count_units(instructions, variant.elements) if instructions else {}
    accesses = count_accesses(instructions)
    explained = ExplainedKernel(
        name=plan.name,
        family=variant.family,
        num_elements=plan.num_elements,
        elements_per_thread=variant.elements,
        elements_per_access=variant.access_elements,
        threads=variant.threads,
        grid=plan.grid,
        reasons=tuple((reason.choice, reason.value, reason.why) for reason in plan.reasons),
        missing=kernel.missing,
        accesses=accesses,
        wide_share=wide_share(accesses),
        in_flight_per_thread=computed(per_thread, "B", "what a thread loads before it needs any of it"),
        **launch_figures(figures, nominal, waves, plan.grid, plan.num_elements, mix, "SASS of the path that all but the edges take"),
    )
    if cubin is None or lives is None:
        return explained
    in_flight = bytes_in_flight_per_sm(per_thread, variant.threads, lives.blocks_per_sm, plan.grid, sms)
    shared = computed(cubin.shared_bytes, "B a block", "ptxas")
    return replace(explained, **compiled_figures(cubin, lives, variant.threads, shared, in_flight))


def sm_clock(figures: GpuFigures) -> Figure:
    """In MHz: as it was read, or the boost clock of the sheet."""
    boost_mhz, sheet = boost_clock_mhz(figures.target.compute_capability)
    return figures.sm_clock or assumed(boost_mhz, "MHz", f"boost clock of {sheet}")


def launch_figures(
    figures: GpuFigures,
    nominal: Figure | None,
    waves: float | None,
    grid: int,
    num_elements: int,
    mix: Mapping[Unit, float],
    how: str,
) -> dict[str, Any]:
    """The fields of an `ExplainedKernel` that follow from its launch and from ``mix``, the instructions an element, counted ``how``."""
    compute_capability, gpu = figures.target.compute_capability, figures.target.gpu
    sms = gpu.sms if gpu else None
    clock, rates = sm_clock(figures), unit_rates(compute_capability)
    little = littles_law_bytes(nominal.value) / sms if nominal and sms else None
    return {
        "littles_law_per_sm": None
        if little is None
        else assumed(little, "B", f"nominal bandwidth x {DRAM_LATENCY_NS:.0f} ns (an idle A100's latency) / SMs"),
        "target_per_sm": assumed(bytes_in_flight_target(compute_capability), "B", "CUB DeviceTransform's target for this architecture"),
        "waves": None if waves is None else computed(waves, "waves", f"{grid} blocks over {sms} SMs"),
        "last_wave": None if waves is None else computed(waves - math.ceil(waves) + 1, "of a wave", "how full the last wave is"),
        "instructions": {unit: computed(count, "an element", how) for unit, count in mix.items()},
        "unit_times": {
            unit: Figure(
                unit_time_us(count, num_elements, rates[unit], sms, clock.value),
                "us",
                clock.kind,
                f"instructions / ({rates[unit]} a clock x {sms} SMs x {clock.value:.0f} MHz)",
            )
            for unit, count in mix.items()
            if sms
        },
    }


def compiled_figures(cubin: Cubin, lives: Occupancy, threads: int, shared: Figure, in_flight: float) -> dict[str, Any]:
    """The fields of an `ExplainedKernel` that follow from its cubin, in blocks of ``threads`` with ``shared`` memory."""
    return {
        "registers": computed(cubin.registers, "a thread", "ptxas"),
        "spill_bytes": computed(cubin.spill_store_bytes + cubin.spill_load_bytes, "B a thread", "ptxas: stored and loaded"),
        "stack_bytes": computed(cubin.stack_bytes, "B a thread", "ptxas"),
        "shared_bytes": shared,
        "occupancy": computed(lives.fraction, "of the warps", f"limited by {lives.limiter}"),
        "occupancy_limiter": lives.limiter,
        "blocks_per_sm": computed(lives.blocks_per_sm, "blocks an SM", f"of {threads} threads"),
        "in_flight_per_sm": computed(in_flight, "B", "loads of all threads that live on an SM"),
    }


def count_accesses(instructions: Sequence[Instruction]) -> tuple[AccessCount, ...]:
    """Loads and stores by space and width, constants apart."""
    counts = Counter((a.space, a.kind, a.width_bits) for a in memory_accesses(instructions) if a.space != "constant")
    return tuple(AccessCount(kind, space, width, counts[space, kind, width]) for space, kind, width in sorted(counts))


def wide_share(accesses: Sequence[AccessCount]) -> Figure | None:
    """The share of the bytes of global memory that a thread moves by accesses of 16 bytes and more."""
    widths = [(access.width_bits, access.count) for access in accesses if access.space in ("global", "generic")]
    whole = sum(width * count for width, count in widths)
    wide = sum(width * count for width, count in widths if width >= _WIDE_BITS)
    return computed(wide / whole, "of the bytes", "by accesses of 16 bytes, from the SASS") if whole else None


# ---- eager


def _eager_cost(
    expr: Expr, layouts: Sequence[NodeLayout], places: Sequence[Place], arch: str, num_elements: int, achievable: Figure | None
) -> EagerCost:
    kernels = eager_kernels(expr, layouts, places, arch)
    nbytes = sum(kernel.nbytes for kernel in kernels)
    time = None
    if achievable is not None:
        time_us = sum(
            kernel.nbytes / (achievable.value * US_BYTES * PATHS[kernel.path].share) + kernel.launches * LAUNCH_US for kernel in kernels
        )
        time = assumed(time_us, "us", f"bytes / (achievable x the path's share on an H200) + {LAUNCH_US} us a launch")
    return EagerCost(
        kernels,
        computed(nbytes, "B", "each op reads its operands and writes its result"),
        computed(nbytes / num_elements if num_elements else 0.0, "B/element", "eager's bytes / elements"),
        time,
    )


# ---- the verdict


def _judge(explanation: Explanation, read_share: float) -> tuple[Verdict, ...]:
    """The limits that cost anything, the largest effect first; last, what memory itself asks."""
    if not explanation.num_elements:
        nothing = computed(1.0, "x", "no kernel runs")
        return (Verdict("empty", nothing, "Nothing is computed: no result has elements, or every result is an argument", "Nothing to do."),)
    found = [*judge_sectors(explanation), *judge_launches(explanation)]
    for position, kernel in enumerate(explanation.kernels):
        own = [operand for operand in explanation.operands if operand.kernel == position]
        found += _judge_kernel(explanation, kernel, own, read_share)
    limits = sorted((verdict for verdict in found if verdict.effect.value >= WORTH_NAMING), key=lambda v: -v.effect.value)
    return (*limits, *judge_measured(explanation, limits), judge_memory(explanation, bool(limits)))


def judge_launches(explanation: Explanation) -> list[Verdict]:
    """What launching takes beside the memory time."""
    wall = explanation.achievable_time
    if wall is None or not wall.value:
        return []
    launches = LAUNCH_US * len(explanation.kernels)
    text = f"Bound by the launch: {launches:.1f} us that launching takes beside {wall.value:.2g} us of memory time"
    step = "Batch calls, fuse neighbours, or capture them in a CUDA graph."
    return [Verdict("launch", assumed(1 + launches / wall.value, "x", f"{LAUNCH_US} us a launch, on an H200"), text, step)]


def judge_sectors(explanation: Explanation) -> list[Verdict]:
    """Sectors that are moved and used in part alone, whoever asks for them."""
    wasted = judge_waste(explanation)
    if wasted is None:
        return []
    worst, effect, found = wasted
    step = f"Make the elements of {worst} neighbours in memory, or compute on the whole of it while it is here."
    return [Verdict("sectors", effect, f"Sectors wasted by stride: {found}", step)]


def judge_waste(explanation: Explanation) -> tuple[str, Figure, str] | None:
    """The operand of whose sectors the least is used, what all that waste costs, and its figures in words; None without waste."""
    # The first and the last sector of an operand are no waste.
    wasteful = [
        (o.efficiency.value, o.name) for o in explanation.operands if o.efficiency and o.moved.value - o.minimal.value > 2 * SECTOR_BYTES
    ]
    if not wasteful or not explanation.efficiency:
        return None
    names = ", ".join(dict.fromkeys(f"{share:.0%} of {name}'s are used" for share, name in wasteful))
    found = f"{explanation.moved.value:,.0f} bytes move for {explanation.minimal.value:,.0f}; {names}"
    return min(wasteful)[1], computed(1 / explanation.efficiency.value, "x", "moved / minimal bytes"), found


UNIT_ADVICE: dict[Unit, tuple[str, str]] = {
    "special": (
        "Special-function-bound",
        "Use fewer exponentials, divisions and sines an element: half results take cheap formulas, fp32 ones with fast_math=True.",
    ),
    "fp32": ("Bound by fp32 arithmetic", "Use fewer operations an element: fast_math=True, or a formula of lower degree."),
    "fp64": ("Bound by fp64 arithmetic", "Compute in fp32, if its precision is enough."),
    "integer": ("Bound by integer and logic instructions", "Use fewer conversions, comparisons and integer operations an element."),
    "load_store": ("Bound by the issue of loads and stores", "Use wider accesses: fewer instructions for as many bytes."),
    "issue": ("Bound by the issue of instructions", "Use fewer operations an element: fast_math=True, or a cheaper formula."),
}
"""What is found, and what to try next."""


def _judge_kernel(explanation: Explanation, kernel: ExplainedKernel, own: Sequence[ExplainedOperand], read_share: float) -> list[Verdict]:
    """The limits of one kernel, weighed by its part of the call's elements."""
    weight = kernel.num_elements / sum(other.num_elements for other in explanation.kernels)
    found = [
        *_judge_units(explanation, kernel, own),
        *_judge_requests(own),
        *_judge_widths(explanation, kernel, own),
        *_judge_residency(kernel, read_share),
        *_judge_spills(kernel, own),
    ]
    return [replace(v, effect=replace(v.effect, value=1 + weight * (v.effect.value - 1))) for v in found]


def _judge_units(explanation: Explanation, kernel: ExplainedKernel, own: Sequence[ExplainedOperand]) -> list[Verdict]:
    achievable = explanation.achievable_bandwidth
    if achievable is None:
        return []
    found = []
    moved = sum(operand.moved.value for operand in own)
    memory_us = min(explanation.moved.value, moved) / (achievable.value * US_BYTES)
    for unit, time in kernel.unit_times.items():
        if time.value > memory_us:
            name, step = UNIT_ADVICE[unit]
            count = kernel.instructions[unit].value
            text = f"{name}: {count:.1f} instructions an element of {kernel.name} take {time.value:.1f} us, the memory {memory_us:.1f} us"
            found.append(Verdict(unit, Figure(time.value / memory_us, "x", time.kind, "unit time / memory time"), text, step))
    return found


def _judge_requests(own: Sequence[ExplainedOperand]) -> list[Verdict]:
    """Accesses of a warp that are scattered where the operand as a whole is not: other warps fetch the same sectors again."""
    scattered = [o for o in own if o.access == "strided" and o.efficiency and o.warp_efficiency.value < o.efficiency.value / WORTH_NAMING]
    if not scattered:
        return []
    extra = sum(o.minimal.value / o.warp_efficiency.value - o.moved.value for o in scattered)
    names = ", ".join(f"{_sectors(o)} of {o.name} and uses {o.warp_efficiency.value:.0%} of them" for o in scattered)
    text = f"Uncoalesced: one access of a warp touches {names}"
    step = "Let the result run along the same dim as that operand (out= with its strides), or copy it once with .contiguous()."
    effect = computed(1 + extra / sum(o.moved.value for o in own), "x", "sectors by access / distinct sectors: if no cache held them")
    return [Verdict("uncoalesced", effect, text, step)]


_ROLES = {"load": "read", "store": "written"}


def _judge_widths(explanation: Explanation, kernel: ExplainedKernel, own: Sequence[ExplainedOperand]) -> list[Verdict]:
    once = Counter(8 * o.itemsize for o in own if o.access in ("row", "uniform", "reduced"))  # one element for many
    in_memory = [
        replace(access, count=access.count - (once[access.width_bits] if access.kind == "load" else 0))
        for access in kernel.accesses
        if access.space in ("global", "generic")
    ]
    total = sum(access.width_bits * access.count for access in in_memory)
    # Beside a wider operand, a narrow one has fewer bytes an access: as planned.
    whole = ("vector", "repeated", "realigned", "stepped")
    vectors = {(o.role, 8 * o.itemsize * kernel.elements_per_access) for o in own if o.access in whole}
    shares = [
        (a, a.width_bits * a.count / total)
        for a in in_memory
        if a.width_bits // 8 in NARROW_SLOWDOWN and (_ROLES[a.kind], a.width_bits) not in vectors
    ]
    narrow = [(access, share) for access, share in shares if share >= WORTH_NAMING - 1]
    if not narrow:
        return []
    kinds = ", ".join(f"{a.count} {a.kind}s of {a.width_bits // 8} B" for a, _ in narrow)
    text = f"Narrow accesses: {sum(share for _, share in narrow):.0%} of a thread's bytes in {kernel.name} by {kinds}"
    planned = {o.role for o in own if o.access in ("strided", "elements")}
    if any(_ROLES[access.kind] in planned for access, _ in narrow):
        step = "Give operands a unit stride along the result's rows and 16-byte alignment, so that accesses of 16 bytes fit."
    else:
        step = f"The plan has whole accesses here, and the compiler split them for {explanation.arch}: nothing to change in the function."
    effect = 1 + sum(share * (NARROW_SLOWDOWN[access.width_bits // 8] - 1) for access, share in narrow)
    return [Verdict("narrow", assumed(effect, "x", "one element an access on an H200"), text, step)]


def _judge_residency(kernel: ExplainedKernel, read_share: float) -> list[Verdict]:
    """Bytes in flight, by the grid or by occupancy; waves."""
    found = []
    waves = kernel.waves.value if kernel.waves else None
    needed = kernel.target_per_sm.value * read_share
    if kernel.in_flight_per_sm is not None and kernel.in_flight_per_sm.value < needed:
        have = kernel.in_flight_per_sm.value
        effect = assumed(needed / max(have, 1), "x", "CUB's target x share of reads / bytes in flight")
        short = f"{have / 1024:.1f} KiB an SM where {needed / 1024:.1f} KiB of loads keep the bus busy"
        if waves is not None and waves < 1:
            text = f"Too small a grid: {kernel.grid} blocks of {kernel.name} fill {waves:.1%} of the GPU, {short}"
            found.append(Verdict("small_grid", effect, text, "Batch calls: larger tensors, or several at a time."))
        elif kernel.in_flight_per_thread.value:
            occupied = kernel.occupancy.value if kernel.occupancy else 1.0
            limited = f"; occupancy {occupied:.0%}, limited by {kernel.occupancy_limiter}" if occupied < 1 else ""
            text = f"Too few bytes in flight: {short}{limited}"
            step = "More warps an SM (fewer registers: a smaller function) or more bytes a load (a layout that vectors fit)."
            found.append(Verdict("in_flight", effect, text, step))
    return [*found, *judge_tail(kernel, "Nothing to change in the function: larger tensors hide it.")]


def judge_tail(kernel: ExplainedKernel, step: str) -> list[Verdict]:
    """The last wave of blocks, if it leaves SMs idle; ``step`` is what to try next."""
    waves = kernel.waves.value if kernel.waves else None
    if waves is None or waves <= 1 or kernel.last_wave is None:
        return []
    text = f"A tail: {waves:.2f} waves of {kernel.name}, the last {kernel.last_wave.value:.0%} full"
    return [Verdict("tail", computed(math.ceil(waves) / waves, "x", "whole waves / waves"), text, step)]


def _judge_spills(kernel: ExplainedKernel, own: Sequence[ExplainedOperand]) -> list[Verdict]:
    if kernel.spill_bytes is None or not kernel.spill_bytes.value:
        return []
    spilled = kernel.spill_bytes.value
    per_thread = sum(operand.minimal.value for operand in own) / kernel.num_elements * kernel.elements_per_thread
    text = f"Spills: {spilled:.0f} bytes a thread of {kernel.name} go through local memory"
    effect = computed(1 + spilled / per_thread, "x", "spilled / minimal bytes a thread")
    return [Verdict("spills", effect, text, "Split the function, or return fewer results at a time.")]


def judge_measured(explanation: Explanation, limits: Sequence[Verdict]) -> list[Verdict]:
    """A measured time that ``limits`` do not account for."""
    measured, wall = explanation.measured_time, explanation.achievable_time
    if measured is None or wall is None or not wall.value:
        return []
    ratio = measured.value / wall.value
    effect = Figure(ratio, "x", "measured", "measured time / achievable time")
    if ratio <= _SAME or any(verdict.effect.value >= ratio / _SAME for verdict in limits):
        return []
    text = f"Measured {measured.value:.1f} us where {wall.value:.1f} us are achievable, and the limits above do not account for it"
    return [Verdict("unexplained", effect, text, "Profile it with Nsight Compute, and check the clock in wl.bench's result.")]


def judge_memory(explanation: Explanation, has_limits: bool) -> Verdict:
    """The bound itself, which stands behind every other limit."""
    effect = computed(1.0, "x", "the bound itself")
    per = explanation.bytes_per_element.value
    eager = explanation.eager.bytes_per_element.value if explanation.eager else 0.0
    saved = f"; eager moves {eager:.4g}" if eager > per else ""
    wall = f", {explanation.achievable_time.value:.1f} us" if explanation.achievable_time else ""
    if has_limits:
        text = f"Behind that, memory is the limit: {per:.4g} bytes an element{saved}{wall}"
        return Verdict("memory", effect, text, "Fuse with what comes before and after, or store narrower dtypes.")
    text = f"Memory-bound at the wall: {per:.4g} bytes an element, each moved once{saved}{wall}"
    return Verdict("memory", effect, text, "Nothing is left but fusing with what comes before and after, or narrower dtypes.")


# ---- printing

_Row = tuple[str, str, str, str, str]
"""Name, value, unit, kind, source."""


def _text(figure: Figure) -> str:
    value = figure.value
    if float(value).is_integer() and figure.unit != "us":
        return f"{int(value):,}"
    return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3g}"


def _rows(figures: dict[str, Figure | None]) -> list[_Row]:
    return [(name, _text(f), f.unit, f.kind, f.source) for name, f in figures.items() if f is not None]


def _sections(e: Explanation) -> list[tuple[str, list[_Row]]]:
    sections = [
        (
            "Bytes",
            _rows(
                {
                    "read": e.bytes_read,
                    "written": e.bytes_written,
                    "minimal": e.minimal,
                    "moved by sectors": e.moved,
                    "efficiency": e.efficiency,
                    "fused" if e.eager else "an element": e.bytes_per_element,
                    "eager": e.eager.bytes_per_element if e.eager else None,
                }
            ),
        ),
        (
            "Time",
            _rows(
                {
                    "nominal bandwidth": e.nominal_bandwidth,
                    "achievable bandwidth": e.achievable_bandwidth,
                    "least time": e.least_time,
                    "achievable time": e.achievable_time,
                    "measured time": e.measured_time,
                    "eager": e.eager.time if e.eager else None,
                }
            ),
        ),
        ("Operands", [_operand_row(operand) for operand in e.operands]),
        *((f"Kernel {k.name}: {k.grid:,} blocks of {k.threads} threads", _kernel_rows(k)) for k in e.kernels),
        ("Eager PyTorch would run", [_aten_row(kernel) for kernel in e.eager.kernels] if e.eager else []),
        *((f"Counters of {counters.kernel}, by Nsight Compute", _counter_rows(counters)) for counters in e.counters),
    ]
    return [section for section in sections if section[1]]


def _counter_rows(counters: KernelCounters) -> list[_Row]:
    rows: list[_Row] = []
    for name, figure in counters.counted.items():
        other = counters.computed.get(name)
        beside = f"; computed: {_text(other)}" if other else ""
        rows.append((name, _text(figure), figure.unit, figure.kind, f"{figure.source}{beside}"))
    return rows


def _operand_row(o: ExplainedOperand) -> _Row:
    warp = f"a warp's access: {_sectors(o)}, {o.warp_efficiency.value:.0%} used"
    strides = "" if is_row_major(o.shape, o.strides) else f" strides {list(o.strides)}"
    name = f"{o.name}, {o.role}: {o.dtype}{list(o.shape)}{strides}"
    used = f"{o.efficiency.value:.1%} of its sectors; " if o.efficiency else ""
    return name, _text(o.minimal), "B", o.minimal.kind, f"{used}{o.access}; {warp}"


def _sectors(o: ExplainedOperand) -> str:
    return f"{o.warp_sectors.value:.0f} sector{'s' * (o.warp_sectors.value != 1)}"


def _aten_row(kernel: AtenKernel) -> _Row:
    launches = f"{kernel.launches} launches, " if kernel.launches > 1 else ""
    return kernel.op, f"{kernel.nbytes:,}", "B", "computed", f"{launches}{PATHS[kernel.path].does}; {kernel.why}"


def _kernel_rows(kernel: ExplainedKernel) -> list[_Row]:
    rows = [(choice, value, "", "", why) for choice, value, why in kernel.reasons]
    if kernel.missing:
        rows.append(("not compiled", "", "", "", kernel.missing))
    rows += [
        (f"{access.space} {access.kind}s", str(access.count), f"x {access.width_bits // 8} B", "computed", "a thread, from the SASS")
        for access in kernel.accesses
    ]
    rows += _rows(
        {
            "registers": kernel.registers,
            "spills": kernel.spill_bytes,
            "stack": kernel.stack_bytes,
            "shared memory": kernel.shared_bytes,
            "occupancy": kernel.occupancy,
            "waves": kernel.waves,
            "last wave": kernel.last_wave,
            "in flight": kernel.in_flight_per_sm,
            "by Little's law": kernel.littles_law_per_sm,
            "by CUB": kernel.target_per_sm,
        }
    )
    for unit, count in kernel.instructions.items():
        time = kernel.unit_times.get(unit)
        source = f"{time.value:.1f} us {time.kind}: {time.source}" if time else count.source
        if not count.value:
            continue
        rows.append((f"{unit.replace('_', '/')} instructions", _text(count), count.unit, count.kind, source))
    return rows
