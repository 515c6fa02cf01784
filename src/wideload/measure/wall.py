"""Turns a mix of reads and writes into the wall: the least time in which kernels that only move bytes move them on this GPU.

The kernels are a fixed set, written by hand in ``wall.cu``; it must not know what is held against the wall, least of all wideload's own.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import torch

from wideload.cache import find_cubin
from wideload.errors import DeviceError, LayoutError
from wideload.launch import LoadedKernel, device_arch
from wideload.measure.environment import GpuMonitor
from wideload.measure.timing import WARM_UP_SECONDS, EventSampler, Flush, StopRule, collect, warm_up

__all__ = [
    "FAULT_RATIO",
    "MIXES",
    "Ceiling",
    "Mix",
    "Mover",
    "Wall",
    "cuda_index",
    "find_ceiling",
    "measure_wall",
    "mover_source",
    "movers",
    "nearest_mix",
    "prepare_movers",
    "time_cold",
]

FAULT_RATIO = 1.01
"""What runs more than 1 % faster than the wall was not measured rightly, or does not move the bytes that it is said to."""

_VECTOR_BYTES = 16
_VECTORS_PER_THREAD = (1, 2, 4)
_THREADS = (128, 256, 512)
_BULK_THREADS = (128, 256)
_BULK_TILE_VECTORS = 256
"""``TILE`` of wall.cu: the copy engine moves 4 KiB at a time."""
_GRAIN_VECTORS = max(_VECTORS_PER_THREAD) * max(_THREADS)
"""Streams are a multiple of this, so that every kernel's tiles cover them exactly."""
_BULK_SINCE_SM = 90

_NBYTES = 2 << 30
"""Moved by each kernel: some 0.5 ms on an H200, 36 times its L2."""
_NUM_SAMPLES = 30


@dataclass(frozen=True, slots=True)
class Mix:
    """``reads`` bytes read for every ``writes`` written; as kernels, that many streams of 16-byte accesses."""

    reads: int
    writes: int

    @property
    def name(self) -> str:
        """``"2R1W"``."""
        return f"{self.reads}R{self.writes}W"

    @property
    def read_share(self) -> float:
        """Bytes read over bytes moved."""
        return self.reads / (self.reads + self.writes)


MIXES = (Mix(1, 1), Mix(2, 1), Mix(3, 1), Mix(3, 2), Mix(4, 3), Mix(1, 2), Mix(1, 0), Mix(0, 1))
"""A copy, an add, `silu(x + b) * y`, bf16 + fp32 to fp32, an AdamW step, a widening cast, a sum and a fill."""


def nearest_mix(bytes_read: int, bytes_written: int, mixes: Iterable[Mix] = MIXES) -> Mix:
    """Return the mix whose share of reads is nearest, the first of equals: only the bytes count, not the number of operands.

    A row that is broadcast is read once and hardly counts. Raises ``LayoutError`` where no bytes move.

    >>> nearest_mix(4 * 2**20, 2 * 2**20).name  # f32 to bf16
    '2R1W'
    """
    if bytes_read < 0 or bytes_written < 0 or bytes_read + bytes_written == 0:
        raise LayoutError(f"got {bytes_read} bytes read and {bytes_written} written; a wall needs some bytes that move")
    share = bytes_read / (bytes_read + bytes_written)
    return min(mixes, key=lambda mix: abs(mix.read_share - share))


@dataclass(frozen=True, slots=True)
class Mover:
    """One kernel of the fixed set: its function in ``wall.cu``, vectors a thread of each stream, threads a block."""

    kernel: Literal["direct", "bulk_load", "bulk_copy"]
    vectors: int
    threads: int

    @property
    def name(self) -> str:
        """``"direct 1x256"``."""
        return f"{self.kernel} {self.vectors}x{self.threads}"

    @property
    def tile_vectors(self) -> int:
        """Vectors of each stream that one block moves."""
        return self.vectors * self.threads if self.kernel == "direct" else _BULK_TILE_VECTORS


def movers(mix: Mix, arch: str) -> tuple[Mover, ...]:
    """The fixed set for ``mix`` on ``arch``. The copy engine exists from sm_90 on, and is used where there is something to read.

    >>> len(movers(Mix(1, 1), "sm_80")), len(movers(Mix(1, 1), "sm_90"))
    (9, 13)
    """
    direct = [Mover("direct", vectors, threads) for vectors in _VECTORS_PER_THREAD for threads in _THREADS]
    if int(arch.removeprefix("sm_")) < _BULK_SINCE_SM or not mix.reads:
        return tuple(direct)
    bulk = [Mover("bulk_load", _BULK_TILE_VECTORS // threads, threads) for threads in _BULK_THREADS]
    if mix.writes:
        bulk += [Mover("bulk_copy", _BULK_TILE_VECTORS // threads, threads) for threads in _BULK_THREADS]
    return (*direct, *bulk)


def mover_source(mix: Mix, vectors: int) -> str:
    """The text that NVRTC compiles: ``wall.cu`` behind its three numbers."""
    return f"#define READS {mix.reads}\n#define WRITES {mix.writes}\n#define VECTORS {vectors}\n{_wall_cu()}"


@functools.cache
def _wall_cu() -> str:
    return (resources.files(__package__) / "wall.cu").read_text(encoding="utf-8")


def prepare_movers(mix: Mix, nbytes: int, device: int) -> tuple[dict[str, Callable[[], None]], int]:
    """Compile and load the set for ``mix``; return what launches each by its name, and the bytes that each then moves.

    They share one buffer of random bytes to read and one to write, ``nbytes`` together, rounded down to whole tiles.
    Raises ``LayoutError`` where ``nbytes`` is less than one tile of each stream.
    """
    num_streams = mix.reads + mix.writes
    pitch = nbytes // (num_streams * _VECTOR_BYTES * _GRAIN_VECTORS) * _GRAIN_VECTORS
    if pitch == 0:
        least = num_streams * _VECTOR_BYTES * _GRAIN_VECTORS
        raise LayoutError(f"nbytes is {nbytes}; {mix.name} needs at least {least} to fill one tile of each of its {num_streams} streams")
    arch = device_arch(device)
    # One vector at least: a kernel that writes nothing is still given somewhere to write.
    words = [max(streams * pitch, 1) * _VECTOR_BYTES // 4 for streams in (mix.reads, mix.writes)]
    source, target = (torch.empty(count, dtype=torch.int32, device=f"cuda:{device}").random_() for count in words)
    launches: dict[str, Callable[[], None]] = {}
    for mover in movers(mix, arch):
        cubin = find_cubin(mover_source(mix, mover.vectors if mover.kernel == "direct" else 1), arch=arch, name=mover.kernel)
        kernel = LoadedKernel(cubin, pitch // mover.tile_vectors, mover.threads)
        launches[mover.name] = functools.partial(_launch, kernel, device, source, target, pitch)
    return launches, num_streams * pitch * _VECTOR_BYTES


def _launch(kernel: LoadedKernel, device: int, source: torch.Tensor, target: torch.Tensor, pitch: int) -> None:
    kernel.launch(device, (source.data_ptr(), target.data_ptr(), pitch))


@dataclass(frozen=True, slots=True)
class Ceiling:
    """How fast a mix can be moved: the lowest median of the fixed set, whose kernel it was, and the medians of all."""

    mix: Mix
    nbytes: int
    """Moved by each kernel, reads and writes together."""
    time_us: float
    mover: str
    samples_us: tuple[float, ...]
    """Of that kernel."""
    medians_us: Mapping[str, float]

    @property
    def bandwidth_gbps(self) -> float:
        """In 1e9 bytes a second, reads and writes together."""
        return self.nbytes / self.time_us / 1e3

    def ratio(self, nbytes: int, time_us: float) -> float:
        """The least time for ``nbytes`` of this mix over ``time_us``: 1.0 at the wall; above `FAULT_RATIO` the measurement is at fault."""
        return nbytes / self.nbytes * self.time_us / time_us


def find_ceiling(mix: Mix, nbytes: int, samples_us: Mapping[str, Sequence[float]]) -> Ceiling:
    """Return the ceiling that samples of the fixed set, by kernel, give; nothing else may be among them."""
    medians = {name: statistics.median(samples) for name, samples in samples_us.items()}
    best = min(medians, key=lambda name: medians[name])
    return Ceiling(mix, nbytes, medians[best], best, tuple(samples_us[best]), medians)


@dataclass(frozen=True, slots=True)
class Wall:
    """The ceilings of one GPU in one run."""

    device: str
    ceilings: tuple[Ceiling, ...]

    def ceiling(self, bytes_read: int, bytes_written: int) -> Ceiling:
        """The ceiling for what moves these bytes: that of the `nearest_mix` of those measured."""
        mix = nearest_mix(bytes_read, bytes_written, [ceiling.mix for ceiling in self.ceilings])
        return next(ceiling for ceiling in self.ceilings if ceiling.mix == mix)

    def __str__(self) -> str:
        rows = (f"  {c.mix.name}  {c.bandwidth_gbps:7.1f} GB/s  {c.time_us:9.2f} us  {c.mover}" for c in self.ceilings)
        return "\n".join((self.device, *rows))


def measure_wall(device: Any = None, mixes: Iterable[Mix] = MIXES, nbytes: int = _NBYTES, num_samples: int = _NUM_SAMPLES) -> Wall:
    """Measure the ceiling of each mix with a cold L2; each kernel of the set moves ``nbytes``, reads and writes together.

    ``device`` is what ``torch.device`` takes, the current CUDA device if left out. Raises ``DeviceError`` without one.
    """
    index = cuda_index(device)
    ceilings = []
    for mix in mixes:
        launches, moved = prepare_movers(mix, nbytes, index)
        ceilings.append(find_ceiling(mix, moved, time_cold(launches, index, num_samples)))
    return Wall(torch.cuda.get_device_name(index), tuple(ceilings))


def cuda_index(device: Any = None) -> int:
    """The index of a CUDA device, the current one for None. Raises ``DeviceError`` where there is none, or for another kind."""
    if not torch.cuda.is_available():
        raise DeviceError(
            "bandwidth can only be measured on a CUDA device, and torch sees none. Run this on a machine with an NVIDIA GPU, "
            "its driver (nvidia-smi lists the GPU) and a CUDA build of torch (torch.version.cuda is not None)."
        )
    chosen = torch.device("cuda") if device is None else torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if chosen.type != "cuda" or (chosen.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"device is {chosen}; allowed are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return torch.cuda.current_device() if chosen.index is None else chosen.index


def time_cold(calls: Mapping[str, Callable[[], object]], device: int, num_samples: int = _NUM_SAMPLES) -> dict[str, tuple[float, ...]]:
    """Time each call on the current stream of ``device``, in microseconds between two CUDA events, with a cold L2; calls take turns.

    Raises ``DeviceError`` for a call whose host time could not be kept out of the samples: one that waits for the GPU.
    """
    target = torch.device("cuda", device)
    with torch.cuda.device(device):
        flush = Flush(target)
        samplers = {name: EventSampler(call, flush) for name, call in calls.items()}
        warm_up(list(samplers.values()), GpuMonitor(target).clock_mhz, WARM_UP_SECONDS)
        rule = StopRule(precision=0.0, min_samples=num_samples, max_samples=num_samples, max_seconds=math.inf)
        collected = collect(samplers, rule, seed=0)
    exposed = [name for name, sampler in samplers.items() if not sampler.is_host_hidden]
    if exposed:
        raise DeviceError(
            f"{', '.join(exposed)}: the GPU was idle before the host had enqueued the call: it waits for the GPU, or has too many kernels"
        )
    return {name: samples.samples_us for name, samples in collected.items()}
