"""Turns a GPU's name or an architecture's into the figures that planning and analysis need: bandwidth, SMs, limits of an SM.

Everything here is a table with its sources; it must not know whether a GPU is present, nor what runs on it.
"""

from __future__ import annotations

import csv
import difflib
import pkgutil
import re
from typing import NamedTuple

from wideload.errors import DeviceError

__all__ = [
    "GPUS",
    "MIN_COMPUTE_CAPABILITY",
    "SECTOR_BYTES",
    "SM_LIMITS",
    "Gpu",
    "SmLimits",
    "Target",
    "bytes_in_flight_target",
    "find_target",
    "sm_limits",
]

MIN_COMPUTE_CAPABILITY = (7, 5)
"""The oldest that NVRTC 13 compiles for."""

SECTOR_BYTES = 32
"""The least that moves between DRAM and L2, and between L2 and L1; a 128-byte line is four (Nsight Compute's memory tables)."""

_VENDOR_WORDS = frozenset({"nvidia", "geforce", "tesla", "quadro", "gpu"})
_ARCH = re.compile(r"(sm_|compute_)\d+|\d{2,3}|\d+\.\d")
"""A bare number of two or three digits is one too: ``4090`` is a GPU."""
_KIB = 1024


class Gpu(NamedTuple):
    """One row of ``gpus.csv``: a GPU as it is sold. ``source`` says where the figures were read."""

    name: str
    compute_capability: tuple[int, int]
    memory_bandwidth_gbps: float
    """Nominal, in 1e9 bytes a second."""
    l2_mib: float
    sms: int
    source: str

    @property
    def arch(self) -> str:
        """``"sm_90"``, as NVRTC wants it."""
        return _arch(self.compute_capability)


class SmLimits(NamedTuple):
    """What one SM holds at once, and the grain in which it hands it out.

    Sources: the CUDA Programming Guide's table of compute capabilities, and ``cuda_occupancy.h`` for the granularities.
    """

    blocks: int
    threads: int
    shared_bytes: int
    shared_granularity_bytes: int
    shared_reserved_bytes_per_block: int
    registers: int = 64 * _KIB
    registers_granularity_per_warp: int = 256
    sub_partitions: int = 4
    """The registers are split over them evenly; a warp lives in one."""
    registers_per_thread: int = 255
    threads_per_block: int = 1024

    @property
    def shared_bytes_per_block(self) -> int:
        """The most one block may use: all of the SM's but what the driver keeps."""
        return self.shared_bytes - self.shared_reserved_bytes_per_block


class Target(NamedTuple):
    """What to compile for, and the GPU to reckon with where one was named."""

    arch: str
    gpu: Gpu | None

    @property
    def compute_capability(self) -> tuple[int, int]:
        """``(9, 0)`` for ``"sm_90"``."""
        digits = self.arch.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])


def _limits(blocks: int, threads: int, shared_kib: int, *, granularity_bytes: int = 128, reserved_bytes: int = _KIB) -> SmLimits:
    return SmLimits(blocks, threads, shared_kib * _KIB, granularity_bytes, reserved_bytes)


SM_LIMITS: dict[tuple[int, int], SmLimits] = {
    (7, 0): _limits(32, 2048, 96, granularity_bytes=256, reserved_bytes=0),
    (7, 5): _limits(16, 1024, 64, granularity_bytes=256, reserved_bytes=0),
    (8, 0): _limits(32, 2048, 164),
    (8, 6): _limits(16, 1536, 100),
    (8, 7): _limits(16, 1536, 164),
    (8, 9): _limits(24, 1536, 100),
    (9, 0): _limits(32, 2048, 228),
    (10, 0): _limits(32, 2048, 228),
    (10, 3): _limits(32, 2048, 228),
    (11, 0): _limits(24, 1536, 228),
    (12, 0): _limits(24, 1536, 100),
    (12, 1): _limits(24, 1536, 100),
}
"""Keyed by compute capability."""

_BYTES_IN_FLIGHT = (((10, 0), 64 * _KIB), ((9, 0), 48 * _KIB), ((8, 0), 16 * _KIB), ((7, 0), 12 * _KIB))
"""From which compute capability on; CUB's ``DeviceTransform``, tuned on B200, H200 (32 KiB were enough on H100), A100, V100."""


def bytes_in_flight_target(compute_capability: tuple[int, int]) -> int:
    """Bytes that each SM should have on their way from memory for the bus to stay busy.

    >>> bytes_in_flight_target((9, 0))
    49152
    """
    return next(nbytes for since, nbytes in _BYTES_IN_FLIGHT if compute_capability >= since)


def sm_limits(arch: str) -> SmLimits:
    """Return the limits of one SM of ``arch``; ``DeviceError`` as `find_target`.

    >>> sm_limits("sm_80").threads
    2048
    """
    return SM_LIMITS[_parse_arch(arch)]


def find_target(name: str) -> Target:
    """Find what ``name`` stands for: a GPU, or an architecture as NVRTC or nvcc spells it.

    A GPU's words may come in any order and case; the maker's are ignored. Where several GPUs have all the words,
    the SXM one with the highest bandwidth is meant, or the one with the highest bandwidth where none is SXM.
    Raises ``DeviceError`` where nothing fits, where GPUs of different architectures fit, or below `MIN_COMPUTE_CAPABILITY`.

    >>> find_target("NVIDIA H200").gpu.memory_bandwidth_gbps
    4800.0
    >>> find_target("a100").gpu.name
    'A100 80GB SXM'
    >>> find_target("compute_80")
    Target(arch='sm_80', gpu=None)
    """
    if not isinstance(name, str):
        raise DeviceError(f'a target is {name!r}; allowed: a GPU or an architecture by its name, such as "h200" or "sm_90"')
    if _ARCH.fullmatch(name):
        return Target(_arch(_parse_arch(name)), None)
    words = _words(name)
    meant = [gpu for gpu in GPUS if words and (words <= _words(gpu.name) or _squeezed(name) == _squeezed(gpu.name))]
    archs = sorted({gpu.compute_capability for gpu in meant})
    if not meant:
        raise DeviceError(
            f"no GPU is called {name!r}{_did_you_mean(name)}; known are: {_known_gpus()}; or name an architecture: {_archs()}"
        )
    if len(archs) > 1:
        raise DeviceError(
            f"{name!r} fits GPUs of several architectures: {', '.join(f'{g.name} ({g.arch})' for g in meant)}; name one of them"
        )
    if archs[0] < MIN_COMPUTE_CAPABILITY:
        raise DeviceError(f"{meant[0].name} is {meant[0].arch}; wideload needs {_arch(MIN_COMPUTE_CAPABILITY)} or newer")
    gpu = max(meant, key=lambda gpu: ("sxm" in _words(gpu.name), gpu.memory_bandwidth_gbps))
    return Target(gpu.arch, gpu)


def _parse_arch(name: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", name) if _ARCH.fullmatch(name) else "0"
    compute_capability = int(digits[:-1] or 0), int(digits[-1])
    if compute_capability not in SM_LIMITS or compute_capability < MIN_COMPUTE_CAPABILITY:
        raise DeviceError(f"{name!r} is not an architecture that wideload supports; allowed are {_archs()}")
    return compute_capability


def _arch(compute_capability: tuple[int, int]) -> str:
    return "sm_{}{}".format(*compute_capability)


def _archs() -> str:
    return ", ".join(_arch(cc) for cc in SM_LIMITS if cc >= MIN_COMPUTE_CAPABILITY)


def _known_gpus() -> str:
    return ", ".join(gpu.name for gpu in GPUS if gpu.compute_capability >= MIN_COMPUTE_CAPABILITY)


def _words(name: str) -> frozenset[str]:
    """The words that tell GPUs apart; ``SXM2`` to ``SXM5`` are all ``sxm``."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset("sxm" if re.fullmatch(r"sxm\d", word) else word for word in words) - _VENDOR_WORDS


def _squeezed(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _did_you_mean(name: str) -> str:
    spellings = {spelling: gpu.name for gpu in GPUS for spelling in (gpu.name.lower(), *sorted(_words(gpu.name)))}
    close = difflib.get_close_matches(name.lower(), spellings, n=1)
    return f" (did you mean {spellings[close[0]]!r}?)" if close else ""


def _read_gpus() -> tuple[Gpu, ...]:
    lines = (pkgutil.get_data("wideload", "gpus.csv") or b"").decode().splitlines()
    return tuple(
        Gpu(
            name=row["name"],
            compute_capability=_parse_compute_capability(row["compute_capability"]),
            memory_bandwidth_gbps=float(row["memory_bandwidth_gbps"]),
            l2_mib=float(row["l2_mib"]),
            sms=int(row["sms"]),
            source=row["source"],
        )
        for row in csv.DictReader(lines)
    )


def _parse_compute_capability(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


GPUS: tuple[Gpu, ...] = _read_gpus()
"""Every GPU of ``gpus.csv``, in its order: by architecture."""
