"""Turns a GPU into the roof over every kernel on it: nominal bandwidth, measured ceilings, what a launch costs, and ridge points.

Every figure says whether it was measured, computed or assumed, and from what; it must not know which kernel will stand under it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wideload.analyze.explain import GpuFigures
from wideload.analyze.figure import Figure
from wideload.cache import find_cubin
from wideload.decode import check_schema, decode, parse_json
from wideload.errors import DeviceError, WideloadError
from wideload.gpus import Gpu, Target, find_target
from wideload.launch import LoadedKernel, device_arch
from wideload.measure.environment import read_environment
from wideload.measure.wall import MIXES, Mix, Wall, cuda_index, measure_wall, mover_source, nearest_mix, time_cold
from wideload.store import cache_folder, read_file, write_whole

__all__ = [
    "SCHEMA",
    "Attributes",
    "Figure",
    "Rates",
    "Roofline",
    "find_ridges",
    "nominal_bandwidth",
    "read_device",
    "roofline",
    "table_bandwidth",
]

SCHEMA = "wideload.roofline/1"
"""The number behind the slash grows when a key changes its name or its meaning; the figures in the cache are then measured again."""

_DISAGREEMENT = 0.05
"""Beyond it, attributes and table cannot both be right; the sheet of an H200 and its attributes are 2.4 % apart."""

_GRAPH_LAUNCHES = 1000
"""Enough for the 2 us of a graph's own launch not to count."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What one SM does in one clock: fp32 and dense bf16 tensor FLOP (a multiply-add is two), special-function results."""

    fp32: int
    bf16_tensor: int | None
    special: int


_PROGRAMMING_GUIDE = "CUDA C++ Programming Guide, throughput of native arithmetic instructions"
_TENSOR_SOURCE = "dense, fp32 accumulation, data-centre parts (GeForce: half); peak of the architecture's sheet over SMs and boost clock"

_RATES: dict[tuple[int, int], Rates] = {
    (7, 5): Rates(128, None, 16),  # Turing's tensor cores know fp16 only
    (8, 0): Rates(128, 2048, 16),
    (8, 6): Rates(256, 1024, 16),
    (8, 7): Rates(256, 2048, 16),
    (8, 9): Rates(256, 1024, 16),
    (9, 0): Rates(256, 4096, 16),
    (10, 0): Rates(256, 8192, 16),
    (10, 3): Rates(256, 8192, 16),
    (11, 0): Rates(256, 8192, 16),
    (12, 0): Rates(256, 1024, 16),
    (12, 1): Rates(256, 1024, 16),
}
"""By compute capability; sources as above."""


@dataclass(frozen=True, slots=True)
class Attributes:
    """What the driver says of a device; a clock or a width that it does not tell is 0."""

    name: str
    uuid: str
    driver: str
    compute_capability: tuple[int, int]
    sms: int
    sm_clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int


@dataclass(frozen=True, slots=True)
class Roofline:
    """The figures of one GPU under one driver.

    ``nominal`` follows from the device's attributes, ``by_table`` is the same from ``gpus.csv`` where the GPU is there; ``ceilings``
    are by mix (``"2R1W"``), ``launch_floor`` by how the launch was timed, ``ridges`` by unit. ``notes`` say what does not fit together.
    """

    device: str
    uuid: str
    driver: str
    arch: str
    nominal: Figure
    by_table: Figure | None
    ceilings: Mapping[str, Figure]
    launch_floor: Mapping[str, Figure]
    ridges: Mapping[str, Figure]
    notes: tuple[str, ...]

    def ceiling(self, bytes_read: int, bytes_written: int) -> Figure:
        """The measured ceiling for what moves these bytes: see `wideload.measure.wall.nearest_mix`."""
        return self.ceilings[nearest_mix(bytes_read, bytes_written).name]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers, for JSON."""
        return {"schema": SCHEMA, **dataclasses.asdict(self), "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Roofline:
        """Read what `to_dict` has written. Raises ``WideloadError`` for another schema, and for what is damaged."""
        check_schema(values, SCHEMA)
        return decode(cls, values, cls.__name__)

    @property
    def figures(self) -> dict[str, Figure]:
        """All of them by their names, as they are printed."""
        by_table = {} if self.by_table is None else {"  by the GPU table": self.by_table}
        return {
            "nominal bandwidth": self.nominal,
            **by_table,
            **{f"ceiling {mix}": figure for mix, figure in self.ceilings.items()},
            **{f"launch, {how}": figure for how, figure in self.launch_floor.items()},
            **{f"ridge, {unit}": figure for unit, figure in self.ridges.items()},
        }

    @property
    def _place(self) -> str:
        return f"{self.device} ({self.uuid}), driver {self.driver}, {self.arch}"

    def __str__(self) -> str:
        rows = self.figures
        width = max(map(len, rows))
        lines = [f"  {name:<{width}}  {_value(f):>8} {f.unit:<6}  {f.kind:<8}  {f.source}" for name, f in rows.items()]
        return "\n".join((self._place, *lines, *(f"note: {note}" for note in self.notes)))

    def to_markdown(self) -> str:
        """The figures as a table for GitHub, with the device above and the notes below."""
        rows = [f"| {name.strip()} | {_value(f)} | {f.unit} | {f.kind} | {f.source} |\n" for name, f in self.figures.items()]
        head = "| | value | unit | | source |\n|---|---:|---|---|---|\n"
        return "".join((f"{self._place}\n\n{head}", *rows, *(f"\n{note}\n" for note in self.notes)))


def _value(figure: Figure) -> str:
    return f"{figure.value:.{0 if figure.value >= 1000 else 1 if figure.value >= 10 else 2}f}"


def roofline(device: Any = None, *, refresh: bool = False) -> Roofline:
    """Return the roofline of a CUDA device (what ``torch.device`` takes; the current one if left out).

    Measured once for each GPU and driver, in some ten seconds, then read from `wideload.store.cache_folder`; ``refresh`` measures
    again. Raises ``DeviceError`` without a CUDA device.
    """
    index = cuda_index(device)
    attributes = _read_attributes(index)
    path = _path_of(attributes)
    cached = None if refresh else _read(path)
    if cached is not None:
        return cached
    roof = _assemble(attributes, measure_wall(index), _measure_launches(index))
    _write(path, roof)
    return roof


def read_device(device: Any = None) -> GpuFigures:
    """Read a CUDA device's figures for `wideload.analyze.explain`: from ``gpus.csv`` where it is there, else from its attributes.

    Ceilings are those that `roofline` has measured before, if it has; nothing is measured.
    """
    attributes = _read_attributes(cuda_index(device))
    nominal = table_bandwidth(attributes) or nominal_bandwidth(attributes)
    gpu = _find_gpu(attributes)
    if gpu is None and nominal is not None:
        l2_mib = torch.cuda.get_device_properties(cuda_index(device)).L2_cache_size / 2**20
        gpu = Gpu(attributes.name, attributes.compute_capability, nominal.value, l2_mib, attributes.sms, nominal.source)
    clock = attributes.sm_clock_khz / 1e3
    roof = _read(_path_of(attributes))
    return GpuFigures(
        Target(find_target("sm_{}{}".format(*attributes.compute_capability)).arch, gpu),
        nominal,
        Figure(clock, "MHz", "computed", "device attributes") if clock else None,
        None if roof is None else roof.ceiling,
    )


# ---- figures that need no GPU


def nominal_bandwidth(attributes: Attributes) -> Figure | None:
    """Memory clock times bus width times two transfers a clock, in GB/s; None where the driver tells neither.

    >>> h200 = Attributes("NVIDIA H200", "GPU-0", "580", (9, 0), 132, 1_980_000, 3_201_000, 6144)
    >>> round(nominal_bandwidth(h200).value)
    4917
    """
    if not attributes.memory_clock_khz or not attributes.memory_bus_bits:
        return None
    gbps = attributes.memory_clock_khz * 1e3 * attributes.memory_bus_bits * 2 / 8 / 1e9
    source = f"device attributes: {attributes.memory_clock_khz / 1e3:.0f} MHz x {attributes.memory_bus_bits} bits x 2 / 8"
    return Figure(gbps, "GB/s", "computed", source)


def table_bandwidth(attributes: Attributes) -> Figure | None:
    """What ``gpus.csv`` has for a GPU of this very name, in GB/s; None for names and SM counts that are not there."""
    gpu = _find_gpu(attributes)
    return None if gpu is None else Figure(gpu.memory_bandwidth_gbps, "GB/s", "assumed", f"gpus.csv, {gpu.name}: {gpu.source}")


def _find_gpu(attributes: Attributes) -> Gpu | None:
    try:
        gpu = find_target(attributes.name).gpu
    except DeviceError:
        return None
    # "NVIDIA H100" would be taken for the largest H100: only one with as many SMs is the same.
    return gpu if gpu and (gpu.compute_capability, gpu.sms) == (attributes.compute_capability, attributes.sms) else None


def find_ridges(attributes: Attributes, bandwidth_gbps: float) -> dict[str, Figure]:
    """From how many operations a byte on a kernel is bound by each unit and not by memory: SMs x clock x rate / bandwidth.

    >>> a100 = Attributes("NVIDIA A100-SXM4-80GB", "GPU-0", "580", (8, 0), 108, 1_410_000, 1_593_000, 5120)
    >>> {unit: round(figure.value, 1) for unit, figure in find_ridges(a100, 2039).items()}
    {'fp32': 9.6, 'bf16 tensor': 153.0, 'special functions': 1.2}
    """
    rates = _RATES.get(attributes.compute_capability)
    if rates is None or not attributes.sm_clock_khz:
        return {}
    clocks_per_s = attributes.sms * attributes.sm_clock_khz * 1e3
    units = {
        "fp32": (rates.fp32, "FLOP", _PROGRAMMING_GUIDE),
        "bf16 tensor": (rates.bf16_tensor, "FLOP", _TENSOR_SOURCE),
        "special functions": (rates.special, "op", _PROGRAMMING_GUIDE),
    }
    return {
        unit: Figure(
            clocks_per_s * rate / (bandwidth_gbps * 1e9),
            f"{operation}/B",
            "computed",
            f"{attributes.sms} SMs x {attributes.sm_clock_khz / 1e3:.0f} MHz x {rate} a clock / nominal ({source})",
        )
        for unit, (rate, operation, source) in units.items()
        if rate is not None
    }


def _assemble(attributes: Attributes, wall: Wall, launch_floor: Mapping[str, Figure]) -> Roofline:
    computed, by_table = nominal_bandwidth(attributes), table_bandwidth(attributes)
    nominal = computed or by_table
    if nominal is None:
        raise DeviceError(
            f"the driver tells no memory clock or bus width of {attributes.name}, and gpus.csv does not have it: "
            "there is no nominal bandwidth. Use measure_wall(), which needs none."
        )
    ceilings = {
        c.mix.name: Figure(
            c.bandwidth_gbps,
            "GB/s",
            "measured",
            f"{c.bandwidth_gbps / nominal.value:.1%} of nominal; {c.mover}, best of {len(c.medians_us)} kernels, "
            f"median of {len(c.samples_us)}, cold L2, {c.nbytes / 1e9:.1f} GB",
        )
        for c in wall.ceilings
    }
    return Roofline(
        device=attributes.name,
        uuid=attributes.uuid,
        driver=attributes.driver,
        arch="sm_{}{}".format(*attributes.compute_capability),
        nominal=nominal,
        by_table=by_table,
        ceilings=ceilings,
        launch_floor=launch_floor,
        ridges=find_ridges(attributes, nominal.value),
        notes=_find_notes(nominal, by_table, ceilings),
    )


def _find_notes(nominal: Figure, by_table: Figure | None, ceilings: Mapping[str, Figure]) -> tuple[str, ...]:
    notes = []
    if by_table is None:
        notes.append("gpus.csv has no GPU of this name and SM count, so that nominal bandwidth could not be checked")
    elif abs(by_table.value - nominal.value) > _DISAGREEMENT * by_table.value:
        difference = nominal.value / by_table.value - 1
        notes.append(f"attributes say {nominal.value:.0f} GB/s, gpus.csv {by_table.value:.0f} ({difference:+.0%}): one of them is wrong")
    notes += [
        f"ceiling {mix} is above nominal bandwidth: it was not memory that moved all of the bytes"
        for mix, figure in ceilings.items()
        if figure.value > nominal.value
    ]
    return tuple(notes)


# ---- the device


def _read_attributes(index: int) -> Attributes:
    from cuda.core import Device  # here: the import takes 100 ms

    environment = read_environment(torch.device("cuda", index))
    properties = Device(index).properties
    return Attributes(
        name=torch.cuda.get_device_name(index),
        uuid=str(environment.gpu_uuid),
        driver=environment.driver or "unknown",
        compute_capability=torch.cuda.get_device_capability(index),
        sms=int(properties.multiprocessor_count),
        sm_clock_khz=int(properties.clock_rate),
        memory_clock_khz=int(properties.memory_clock_rate),
        memory_bus_bits=int(properties.global_memory_bus_width),
    )


def _measure_launches(index: int) -> dict[str, Figure]:
    """What an empty kernel takes: among others in a graph, and alone between two events."""
    kernel = LoadedKernel(find_cubin(mover_source(Mix(1, 1), 1), arch=device_arch(index), name="empty"), grid=1, threads=32)

    def launch() -> None:
        kernel.launch(index, ())

    with torch.cuda.device(index):
        launch()  # loads the module, which a capture may not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_GRAPH_LAUNCHES):
                launch()
    times = {how: statistics.median(samples) for how, samples in time_cold({"graph": graph.replay, "single": launch}, index).items()}
    return {
        "in a graph": Figure(times["graph"] / _GRAPH_LAUNCHES, "us", "measured", f"an empty kernel, {_GRAPH_LAUNCHES} back to back"),
        "single": Figure(times["single"], "us", "measured", "an empty kernel between two CUDA events"),
    }


# ---- the cache


def _path_of(attributes: Attributes) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"roofline-{attributes.uuid}-{attributes.driver}.json"


def _fingerprint() -> str:
    """Of the kernels that measured: other kernels, other ceilings."""
    return hashlib.sha256("".join(mover_source(mix, 1) for mix in MIXES).encode()).hexdigest()


def _read(path: Path | None) -> Roofline | None:
    """The roofline in ``path``; None where there is none, or one that is damaged, older, or of other kernels."""
    if path is None:
        return None
    try:
        content = parse_json(read_file(path))
        return Roofline.from_dict(content["roofline"]) if content["kernels"] == _fingerprint() else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError, WideloadError):
        return None


def _write(path: Path | None, roof: Roofline) -> None:
    """A folder that cannot be written only costs time later."""
    if path is None:
        return
    content = {"kernels": _fingerprint(), "roofline": roof.to_dict()}
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(content, indent=1))
