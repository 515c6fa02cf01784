"""Turns the machine that a measurement runs on into what must be known to repeat it: versions, GPU, driver, clocks, throttling.

Reads only; it must not know what is measured. What cannot be read is ``None``, and ``unread`` says why.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wideload.errors import DeviceError
from wideload.gpus import find_target

__all__ = ["Environment", "GpuMonitor", "GpuState", "nominal_bytes_per_second", "own_commit", "read_environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """Where and with what a result was measured."""

    device: str
    """``cuda:0`` or ``cpu``."""
    wideload: str
    commit: str | None
    """Of wideload's sources, where they stand in a git checkout; ``+`` behind it where that has changes."""
    torch: str
    cuda: str | None
    python: str
    cpu: str
    num_threads: int
    time_utc: str
    gpu: str | None = None
    gpu_uuid: str | None = None
    driver: str | None = None
    ecc: bool | None = None
    num_sms: int | None = None
    l2_bytes: int | None = None
    persisting_l2: str | None = None
    unread: str | None = None


@dataclass(frozen=True, slots=True)
class GpuState:
    """The SM clock and the reasons that held it down, before and after the samples were taken."""

    sm_clock_before_mhz: int | None
    sm_clock_after_mhz: int | None
    throttle_before: tuple[str, ...] | None
    throttle_after: tuple[str, ...] | None

    @property
    def throttle(self) -> tuple[str, ...]:
        """The reasons seen before or after that slow a loaded GPU down."""
        seen = (*(self.throttle_before or ()), *(self.throttle_after or ()))
        return tuple(reason for reason in dict.fromkeys(seen) if reason not in _HARMLESS)


_THROTTLE_REASONS = {
    0x1: "gpu_idle",
    0x2: "applications_clocks_setting",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""``nvmlClocksEventReason*`` of nvml.h."""
_HARMLESS = frozenset({"gpu_idle", "applications_clocks_setting"})
"""Idle before or after the work, or held where its owner has set it."""


class GpuMonitor:
    """Reads one GPU through NVML; without nvidia-ml-py every figure is ``None`` and ``unread`` says so."""

    def __init__(self, device: torch.device) -> None:
        self._nvml: Any = None
        self.unread: str | None = None
        try:
            import pynvml
        except ImportError:
            self.unread = "nvidia-ml-py is not installed: wideload[clocks]"
            return
        try:
            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(_uuid(device))
        except pynvml.NVMLError as error:
            self.unread = f"NVML: {error}"
            return
        self._nvml = pynvml

    def clock_mhz(self) -> int | None:
        """Return the SM clock now."""
        clock: int | None = self._read(lambda nvml: int(nvml.nvmlDeviceGetClockInfo(self._handle, nvml.NVML_CLOCK_SM)))
        return clock

    def throttle(self) -> tuple[str, ...] | None:
        """Return the reasons that hold the clock down now."""
        bits = self._read(lambda nvml: int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)))
        return None if bits is None else tuple(name for bit, name in _THROTTLE_REASONS.items() if bits & bit)

    def ecc(self) -> bool | None:
        """Return whether the memory corrects errors, which costs bandwidth on GDDR."""
        ecc: bool | None = self._read(lambda nvml: bool(nvml.nvmlDeviceGetEccMode(self._handle)[0]))
        return ecc

    def driver(self) -> str | None:
        """Return the driver's version."""
        version = self._read(lambda nvml: nvml.nvmlSystemGetDriverVersion())
        return version.decode() if isinstance(version, bytes) else version

    def _read(self, what: Any) -> Any:
        if self._nvml is None:
            return None
        try:
            return what(self._nvml)
        except self._nvml.NVMLError as error:  # not every GPU has every figure
            self.unread = f"NVML: {error}"
            return None


def _uuid(device: torch.device) -> str:
    return f"GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}"


def nominal_bytes_per_second(device: torch.device) -> float | None:
    """Return a GPU's memory bandwidth from its attributes, or where it reports none, from the table of GPUs by its name."""
    properties = torch.cuda.get_device_properties(device)
    clock_khz, bus_bits = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    if clock_khz and bus_bits:
        return float(clock_khz) * 1e3 * _TRANSFERS_PER_CLOCK * bus_bits / 8
    with contextlib.suppress(DeviceError):
        gpu = find_target(properties.name).gpu
        return gpu.memory_bandwidth_gbps * 1e9 if gpu is not None else None
    return None


_TRANSFERS_PER_CLOCK = 2
"""Double data rate: HBM and GDDR report half their transfer rate as their clock."""


def read_environment(device: torch.device, *, persisting_l2: str | None = None, monitor: GpuMonitor | None = None) -> Environment:
    """Read everything once. ``persisting_l2`` says what a flush did about lines that are set to persist."""
    environment: dict[str, Any] = {
        "device": str(device),
        "wideload": _own_version(),
        "commit": own_commit(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "num_threads": torch.get_num_threads(),
        "time_utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        properties, monitor = torch.cuda.get_device_properties(device), monitor or GpuMonitor(device)
        environment |= {
            "gpu": properties.name,
            "gpu_uuid": _uuid(device),
            "driver": monitor.driver() or _driver_file_version(),
            "ecc": monitor.ecc(),
            "num_sms": properties.multi_processor_count,
            "l2_bytes": int(properties.L2_cache_size),
            "persisting_l2": persisting_l2,
            "unread": monitor.unread,
        }
    return Environment(**environment)


@functools.cache
def _own_version() -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version("wideload")
    return str(getattr(sys.modules.get("wideload"), "__version__", "unknown"))


@functools.cache
def own_commit() -> str | None:
    """The commit of this checkout, with ``+`` where a tracked file has changed; None where this very file is not tracked.

    An installed copy may lie inside another project's checkout.
    """
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=_GIT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


_GIT_SECONDS = 5


def _cpu_name() -> str:
    """The model as Linux tells it; elsewhere what Python knows."""
    with contextlib.suppress(OSError):
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def _driver_file_version() -> str | None:
    """Linux's kernel module says its version without NVML."""
    with contextlib.suppress(OSError):
        match = re.search(r"Kernel Module.*?\s(\d+\.\d+[.\d]*)\s", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        return match[1] if match else None
    return None
