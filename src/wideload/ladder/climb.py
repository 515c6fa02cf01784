"""Turns rungs into the ladder's table: what each compiles to, computes and, on a GPU, takes, beside what the articles expect.

It must not know what a rung computes, nor how results are checked.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from wideload.analyze.explain import US_BYTES, Explanation
from wideload.analyze.occupancy import occupancy
from wideload.decode import check_schema, decode
from wideload.errors import DeviceError
from wideload.gpus import Gpu, find_target
from wideload.ladder.check import Run, check_rung, run_launches
from wideload.ladder.rungs import THREADS, Launch, Machine, Problem, Rung, read_rung
from wideload.measure import bench, random_tensor
from wideload.measure.environment import Environment, read_environment
from wideload.measure.roofline import Roofline, read_device, roofline
from wideload.raw_kernel import raw

__all__ = ["MAX_SECONDS", "SCHEMA", "Claim", "Ladder", "Measured", "Row", "climb", "compile_rung", "judge_rows", "time_rung"]

SCHEMA = "wideload.ladder/1"
"""The number behind the slash grows when a key changes its name or its meaning."""

MAX_SECONDS = 0.5
"""Of sampling each kernel: 300 samples of the slowest, where 30 of most are precise to half a percent."""
_WARM_UP_SECONDS = 0.05
"""The checks and the host's cost, measured before, have kept the GPU busy for longer than its clock takes."""
_MAX_THREADS = 8
"""Compiling at once, as in `wideload.cache`."""
_COMMIT = "WIDELOAD_COMMIT"
"""Names the commit where there is no git checkout, as for the benchmarks."""
_BYTES_PER_GB = 1e9
_TORCH = "torch"


@dataclass(frozen=True)
class Claim:
    """What the articles expect of a rung, and what was found: sectors a request, a share of nominal, or a time over that of rung ``to``.

    Sectors are computed; ``found`` and ``holds`` of the others are None where nothing was measured.
    """

    what: Literal["sectors", "share", "ratio"]
    low: float
    high: float
    to: str | None = None
    found: float | None = None
    holds: bool | None = None

    @property
    def text(self) -> str:
        """The claim itself."""
        if self.what == "sectors":
            return f"{self.low:.0f} sectors"
        return f"{self.low:.0%}-{self.high:.0%}" if self.what == "share" else f"{self.low:.2f}-{self.high:.2f} x {self.to}"

    def __str__(self) -> str:
        return f"{self.text}: {({True: 'yes', False: 'no', None: 'not measured'})[self.holds]}"

    def judge(self, found: float | None) -> Claim:
        """The same with what was found."""
        return replace(self, found=found, holds=None if found is None else self.low <= found <= self.high)


@dataclass(frozen=True)
class Measured:
    """Times by `wl.bench`, in us; shares are of the bytes that must move over the bandwidth. None where the result was wrong.

    ``bench`` is the whole result, with its samples and clocks, as it goes to JSON.
    """

    time_us: float | None
    torch_us: float | None
    bytes_per_second: float | None
    share_of_nominal: float | None
    share_of_wall: float | None
    labels: tuple[str, ...] = ()
    bench: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One rung on one GPU. ``loads`` and ``stores`` are (bits, how many in the SASS), of all its kernels together.

    ``sectors`` are those that a warp's request of the first input touches, ``sectors_used`` the part of their bytes that it wants.
    Bytes and the least time (at nominal bandwidth) are those of all launches. ``claims`` are the articles', who speak of an A100;
    ``why_not`` is why one does not hold where it does not.
    """

    name: str
    file: str
    shows: str
    seeds: str
    shape: tuple[int, ...]
    kernels: tuple[str, ...]
    loads: tuple[tuple[int, int], ...]
    stores: tuple[tuple[int, int], ...]
    registers: int
    spill_bytes: int
    occupancy: float
    sectors: float
    sectors_used: float
    bytes_read: int
    bytes_written: int
    bytes_per_element: int
    least_time_us: float
    limit: str
    claims: tuple[Claim, ...] = ()
    faults: tuple[str, ...] = ()
    measured: Measured | None = None
    why_not: str = ""


@dataclass(frozen=True)
class Ladder:
    """The rungs on one GPU. ``failed`` are those that could not be compiled, and why; ``environment`` is where the others were measured."""

    gpu: str
    arch: str
    nominal_gbps: float
    is_measured: bool
    rows: tuple[Row, ...]
    failed: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None

    @property
    def faults(self) -> tuple[str, ...]:
        """What was computed wrongly, and what failed."""
        return (*(fault for row in self.rows for fault in row.faults), *(f"{name}: {why}" for name, why in self.failed.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}))
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Ladder:
        """Read what `to_dict` has written. Raises ``WideloadError`` for another schema, and for what is damaged."""
        check_schema(values, SCHEMA)
        return decode(cls, values, cls.__name__)

    @property
    def columns(self) -> tuple[str, ...]:
        """The head of the table; those of measured figures only where there are some."""
        always = ("rung", "loads", "stores", "regs", "occ.", "sectors", "used", "B/elem", "least us")
        return (*always, *(("us", "GB/s", "nominal", "wall", "torch us") if self.is_measured else ("limit",)), "article")

    def cells(self, row: Row) -> tuple[str, ...]:
        """A row as text."""
        always = (row.name, _widths(row.loads), _widths(row.stores), f"{row.registers}", f"{row.occupancy:.0%}")
        memory = (f"{row.sectors:.3g}", f"{row.sectors_used:.1%}", f"{row.bytes_per_element}", f"{row.least_time_us:.0f}")
        found = row.measured or _NOT_MEASURED
        if not self.is_measured:
            return (*always, *memory, row.limit, "; ".join(map(str, row.claims)))
        times = (_number(found.time_us, ".1f"), _number(found.bytes_per_second, ".0f", _BYTES_PER_GB))
        shares = (_number(found.share_of_nominal, ".1%"), _number(found.share_of_wall, ".1%"), _number(found.torch_us, ".1f"))
        return (*always, *memory, *times, *shares, "; ".join(map(str, row.claims)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong, and why what the articles expect is not so here."""
        here = [
            f"{row.name}: the article expects {claim.text}; here it is {claim.found:.3g}. {row.why_not}".rstrip(". ") + "."
            for row in self.rows
            for claim in row.claims
            if claim.holds is False and claim.found is not None
        ]
        labels = [f"{row.name}: {label}" for row in self.rows if row.measured for label in row.measured.labels]
        return (*self.faults, *labels, *here)

    def to_markdown(self) -> str:
        """The table for GitHub."""
        head = f"| {' | '.join(self.columns)} |\n|{'---|' * 3}{'---:|' * (len(self.columns) - 4)}---|\n"
        rows = "".join(f"| {' | '.join(self.cells(row))} |\n" for row in self.rows)
        return f"{self.title}\n\n{head}{rows}" + "".join(f"\n{note}\n" for note in self.notes)

    @property
    def title(self) -> str:
        """What stands above the table."""
        how = "measured, cold L2" if self.is_measured else "compiled and computed; nothing was run"
        return f"The ladder on {self.gpu} ({self.arch}), {self.nominal_gbps:,.0f} GB/s nominal: {how}"


_NOT_MEASURED = Measured(None, None, None, None, None)


def _widths(accesses: Sequence[tuple[int, int]]) -> str:
    return " ".join(f"{count}x{bits}" for bits, count in accesses)


def _number(value: float | None, spec: str, unit: float = 1.0) -> str:
    return "-" if value is None else format(value / unit, spec)


# ---- compiling


def _make_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _maker(device: torch.device) -> Callable[..., torch.Tensor]:
    seeds = iter(range(1000))

    def make(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return random_tensor(shape, dtype, device=device, seed=next(seeds))

    return make


def _machine(rung: Rung, arch: str, sms: int) -> Machine:
    """``sms``, and as many blocks as live on one by the registers of the rung's thirstiest kernel."""
    launches = rung.launch(Machine(1, 1), rung.make(_make_meta, *rung.shape))
    registers = max(raw(read_rung(rung.file), launch.kernel).plan(arch).registers for launch in launches)
    return Machine(sms, occupancy(arch, threads_per_block=THREADS, registers=registers, shared_bytes=0).blocks_per_sm)


def compile_rung(rung: Rung, machine: Machine, target: str | None, problem: Problem) -> Row:
    """Compile a rung's kernels and compute what its launches move; ``target`` names a GPU, or is None for the one of the tensors."""
    launches = rung.launch(machine, problem)
    found = [_explain(rung, launch, target) for launch in launches]
    kernels = [explanation.kernels[0] for explanation in found]
    first = found[0].operands[0]
    read, written = rung.nbytes
    nominal = found[0].nominal_bandwidth
    if nominal is None:
        raise DeviceError(f"the bandwidth of {found[0].gpu or found[0].arch} is not known, and without it there is no least time")
    return Row(
        name=rung.name,
        file=rung.file,
        shows=rung.shows,
        seeds=rung.seeds,
        shape=rung.shape,
        kernels=tuple(launch.kernel for launch in launches),
        loads=_count_accesses(found, "load"),
        stores=_count_accesses(found, "store"),
        registers=max(int(kernel.registers.value) for kernel in kernels if kernel.registers),
        spill_bytes=sum(int(kernel.spill_bytes.value) for kernel in kernels if kernel.spill_bytes),
        occupancy=min(kernel.occupancy.value for kernel in kernels if kernel.occupancy),
        sectors=first.warp_sectors.value,
        sectors_used=first.warp_efficiency.value,
        bytes_read=read * problem.out.numel(),
        bytes_written=written * problem.out.numel(),
        bytes_per_element=read + written,
        least_time_us=(read + written) * problem.out.numel() / (nominal.value * US_BYTES),
        limit=found[0].verdicts[0].limit,
        claims=_claims(rung),
        why_not=rung.why_not,
    )


def _explain(rung: Rung, launch: Launch, target: str | None) -> Explanation:
    kernel = raw(read_rung(rung.file), launch.kernel, block=THREADS)
    return kernel.explain(*launch.arguments, grid=launch.grid, target=target, measure=False)


def _claims(rung: Rung) -> tuple[Claim, ...]:
    claims = []
    if rung.sectors is not None:
        claims.append(Claim("sectors", rung.sectors, rung.sectors))
    if rung.share:
        claims.append(Claim("share", *rung.share))
    if rung.ratio:
        claims.append(Claim("ratio", *rung.ratio.interval, rung.ratio.to))
    return tuple(claims)


def _count_accesses(explanations: Iterable[Explanation], kind: str) -> tuple[tuple[int, int], ...]:
    counts: Counter[int] = Counter()
    for access in (access for explanation in explanations for access in explanation.kernels[0].accesses):
        if access.kind == kind and access.space == "global":
            counts[access.width_bits] += access.count
    return tuple(sorted(counts.items(), reverse=True))


# ---- timing


def time_rung(
    rung: Rung,
    row: Row,
    machine: Machine,
    problem: Problem,
    roof: Roofline | None,
    run: Run = run_launches,
    max_seconds: float = MAX_SECONDS,
) -> Measured:
    """Time a rung beside torch, by `wl.bench`, which checks both results first; ``roof`` gives the wall of the same mix of bytes."""

    def call(*inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        run(rung, rung.launch(machine, Problem(inputs, out)))
        return out

    relative, absolute = rung.tolerance
    nbytes = row.bytes_read + row.bytes_written
    result = bench(
        call,
        *problem.inputs,
        out=problem.out,
        name=rung.name,
        against={_TORCH: rung.eager},
        check=rung.eager,
        bytes=nbytes,
        rtol=relative or None,
        atol=absolute,
        max_seconds=max_seconds,
        warm_up_seconds=_WARM_UP_SECONDS,
    )
    own, torchs = result.subject, result[_TORCH]
    wall = None if roof is None else roof.ceiling(row.bytes_read, row.bytes_written).value * _BYTES_PER_GB
    return Measured(
        time_us=own.time_us.median if own.time_us else None,
        torch_us=torchs.time_us.median if torchs.time_us else None,
        bytes_per_second=own.bytes_per_second,
        share_of_nominal=result.share_of_nominal(own),
        share_of_wall=own.bytes_per_second / wall if wall and own.bytes_per_second else None,
        labels=tuple(str(label) for label in own.labels if label.code != "MUTATES"),  # a rung writes into out, on purpose
        bench=result.to_dict(),
    )


def judge_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Say of each claim whether it holds: of sectors always, of times where they were measured."""
    found = tuple(rows)
    times = {row.name: row.measured.time_us for row in found if row.measured}
    return tuple(replace(row, claims=tuple(claim.judge(_find(claim, row, times)) for claim in row.claims)) for row in found)


def _find(claim: Claim, row: Row, times: dict[str, float | None]) -> float | None:
    if claim.what == "sectors":
        return row.sectors
    if claim.what == "share":
        return row.measured.share_of_nominal if row.measured else None
    own, other = times.get(row.name), times.get(claim.to or "")
    return own / other if own and other else None


Report = Callable[[str, int, int], None]
"""``report(what, done, total)``: what goes on now, and how far it has come."""


def climb(
    rungs: Sequence[Rung],
    target: str | None = None,
    device: torch.device | None = None,
    report: Report = lambda what, done, total: None,
    max_seconds: float = MAX_SECONDS,
) -> Ladder:
    """Go up the rungs. With ``target``, a GPU's name, they are compiled and nothing is run; without, checked and timed on ``device``.

    All are compiled first, side by side, so that nothing else goes on while one is timed. A rung that fails is among the faults, and
    the others keep their figures. Raises ``DeviceError`` for a target without a bandwidth, such as ``sm_90``, and where there is
    neither a target nor a CUDA device; and what the rungs raise where none of them can be compiled.
    """
    if target is None and (device is None or device.type != "cuda"):
        raise DeviceError("there is no GPU to climb on; name one to compile for: --target h200")
    figures = read_device(device) if target is None else None
    meant = figures.target if figures else find_target(target or "")
    if meant.gpu is None:
        raise DeviceError(
            f"{target or meant.arch} is no GPU; the ladder's least times need its bandwidth: name a GPU, such as h200 or a100"
        )
    compiled, failed = _compile_all(rungs, meant.arch, meant.gpu, report)
    if figures is None or device is None:
        return Ladder(
            meant.gpu.name, meant.arch, meant.gpu.memory_bandwidth_gbps, False, judge_rows(row for *_, row in compiled), _spell(failed)
        )
    nominal = figures.nominal.value if figures.nominal else meant.gpu.memory_bandwidth_gbps
    report("measuring the memory", 0, len(compiled))
    roof = roofline(device)
    rows = []
    for done, (rung, machine, row) in enumerate(compiled):
        report(rung.name, done, len(compiled))
        row = replace(row, least_time_us=(row.bytes_read + row.bytes_written) / (nominal * US_BYTES))
        rows.append(_measure(rung, machine, row, device, roof, max_seconds))
    environment = read_environment(device)
    environment = replace(environment, commit=environment.commit or os.environ.get(_COMMIT))
    return Ladder(meant.gpu.name, meant.arch, nominal, True, judge_rows(rows), _spell(failed), environment)


_Compiled = tuple[Rung, Machine, Row]


def _compile_all(rungs: Sequence[Rung], arch: str, gpu: Gpu, report: Report) -> tuple[list[_Compiled], dict[str, Exception]]:
    """Compile the rungs in threads: NVRTC and nvdisasm run outside of the interpreter. No operand needs memory for it."""

    def compile_one(rung: Rung) -> _Compiled | Exception:
        try:
            machine = _machine(rung, arch, gpu.sms)
            return rung, machine, compile_rung(rung, machine, gpu.name, rung.make(_make_meta, *rung.shape))
        except Exception as error:  # the others are still worth it
            return error

    compiled, failed = [], {}
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
        for done, (rung, found) in enumerate(zip(rungs, threads.map(compile_one, rungs), strict=True)):
            report("compiling", done, len(rungs))
            if isinstance(found, Exception):
                failed[rung.name] = found
            else:
                compiled.append(found)
    if failed and not compiled:
        raise next(iter(failed.values()))
    return compiled, failed


def _spell(failed: Mapping[str, Exception]) -> dict[str, str]:
    return {name: _fault(error) for name, error in failed.items()}


def _fault(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _measure(rung: Rung, machine: Machine, row: Row, device: torch.device, roof: Roofline, max_seconds: float) -> Row:
    """Check, then time; what either raises is a fault of the row."""
    try:
        row = replace(row, faults=check_rung(rung, device))
        problem = rung.make(_maker(device), *rung.shape)
        return replace(row, measured=time_rung(rung, row, machine, problem, roof, max_seconds=max_seconds))
    except Exception as error:  # after an error of a kernel, every later rung fails as well, and the earlier ones keep their figures
        return replace(row, faults=(*row.faults, f"{rung.name}: {_fault(error)}"))
