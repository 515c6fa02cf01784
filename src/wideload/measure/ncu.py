"""Turns launches into what the hardware counted while they ran, by NVIDIA's Nsight Compute in a process of its own.

Knows ncu's command line and its tables; it must not know which function a launch belongs to. The process that it starts is
`wideload.measure.relaunch`.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wideload.analyze.explain import Explanation, KernelCounters
from wideload.analyze.figure import Figure, computed
from wideload.errors import DeviceError
from wideload.measure.relaunch import Relaunch, write_launches

__all__ = ["METRICS", "Profiled", "add_counters", "find_ncu", "ncu_command", "parse_ncu", "profile"]

METRICS: dict[str, str] = {
    "DRAM read": "dram__bytes_read.sum",
    "DRAM written": "dram__bytes_write.sum",
    "sectors loaded": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "sectors stored": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "local sectors loaded": "l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",
    "local sectors stored": "l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "theoretical occupancy": "sm__maximum_warps_per_active_cycle_pct",
    "achieved occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "blocks by registers": "launch__occupancy_limit_registers",
    "blocks by shared memory": "launch__occupancy_limit_shared_mem",
    "blocks by threads": "launch__occupancy_limit_warps",
    "blocks by blocks": "launch__occupancy_limit_blocks",
    "time": "gpu__time_duration.sum",
}
"""What is asked for, by the name that it is shown under."""

_TIMEOUT_SECONDS = 300
_USUAL_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/ncu")
_MOST_SHOWN = 600
"""Characters of what ncu says, in an error."""
_PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SECONDS = {"nsecond": 1e-9, "ns": 1e-9, "usecond": 1e-6, "us": 1e-6, "msecond": 1e-3, "ms": 1e-3, "second": 1.0, "s": 1.0}
_UNITS = {"byte": "B", "sector": "sectors", "register/thread": "a thread", "block": "blocks an SM", "%": "%"}
_US_PER_SECOND = 1e6


@dataclass(frozen=True, slots=True)
class Profiled:
    """One kernel that ran: metrics by ncu's names, each a number and its unit, without prefixes (bytes, not Gbyte)."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    metrics: dict[str, tuple[float, str]]


def find_ncu() -> str:
    """Look on ``PATH`` and where CUDA is installed; ``DeviceError`` where it is in none."""
    found = shutil.which("ncu") or next((place for place in _USUAL_PLACES if os.access(place, os.X_OK)), None)
    if found is None:
        raise DeviceError(
            "Nsight Compute's ncu was not found, neither on PATH nor in /usr/local/cuda/bin. It comes with the CUDA toolkit; "
            "leave out ncu=True (--ncu) to go on without hardware counters."
        )
    return found


def ncu_command(ncu: str, kernels: Iterable[str], program: Sequence[str]) -> list[str]:
    """The command that runs ``program`` and counts while ``kernels`` run in it, each from a cold L2, at the clock as it is."""
    names = "|".join(re.escape(kernel) for kernel in dict.fromkeys(kernels))
    return [
        ncu,
        "--csv",
        *("--clock-control", "none", "--cache-control", "all", "--print-units", "base", "--target-processes", "all"),
        *("--kernel-name-base", "function", "--kernel-name", f"regex:^({names})$"),
        *("--metrics", ",".join(METRICS.values())),
        *program,
    ]


def parse_ncu(text: str) -> tuple[Profiled, ...]:
    """Read what ``ncu --csv`` prints, a row for each metric of each kernel, in the order in which they ran.

    Lines before the table are the program's own. Raises ``DeviceError`` where there is no table, with what ncu says instead.
    """
    lines = text.splitlines()
    start = next((number for number, line in enumerate(lines) if line.startswith('"ID","Process ID"')), None)
    if start is None:
        raise DeviceError(_refusal(text))
    profiled: dict[tuple[str, str], Profiled] = {}
    for row in csv.DictReader(line for line in lines[start:] if line and not line.startswith("==")):
        kernel = profiled.setdefault(
            (row["Process ID"], row["ID"]), Profiled(row["Kernel Name"], _dims(row["Grid Size"]), _dims(row["Block Size"]), {})
        )
        value, unit = row["Metric Value"].replace(",", ""), row["Metric Unit"]
        if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]?\d+)?", value):
            kernel.metrics[row["Metric Name"]] = _without_prefix(float(value), unit)
    return tuple(profiled.values())


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))


def _without_prefix(value: float, unit: str) -> tuple[float, str]:
    found = re.fullmatch(r"([KMGT]?)(byte|sector|inst|cycle)(/\w+)?", unit)
    return (value * _PREFIXES[found[1]], found[2] + (found[3] or "")) if found else (value, unit)


def _refusal(text: str) -> str:
    if "ERR_NVGPUCTRPERM" in text:
        return (
            "the driver lets this user read no hardware counters (ERR_NVGPUCTRPERM): run as root, in a container with the capability "
            "SYS_ADMIN, or let its owner set NVreg_RestrictProfilingToAdminUsers=0 (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
        )
    said = [line for line in text.splitlines() if line.strip()]
    return f"ncu counted nothing; it said: {' / '.join(said)[-_MOST_SHOWN:] or 'nothing'}"


def profile(launches: Sequence[Relaunch]) -> tuple[Profiled, ...]:
    """Run ``launches`` in a process under ncu: same cubins, geometry and layouts, random values. Raises ``DeviceError``."""
    ncu = find_ncu()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "launches.pt")
        write_launches(launches, path)
        program = [sys.executable, "-m", "wideload.measure.relaunch", str(path)]
        sources = str(Path(__file__).parents[2])
        paths = os.pathsep.join(filter(None, (sources, os.environ.get("PYTHONPATH"))))
        command = ncu_command(ncu, [launch.name for launch in launches], program)
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_SECONDS, env={**os.environ, "PYTHONPATH": paths}
            )
        except subprocess.TimeoutExpired as error:
            raise DeviceError(f"ncu did not end within {_TIMEOUT_SECONDS} s") from error
    found = parse_ncu(f"{done.stdout}\n{done.stderr}")
    if len(found) != len(launches):
        raise DeviceError(f"ncu counted {len(found)} of {len(launches)} kernels: {_refusal(done.stdout + done.stderr)}")
    return found


def add_counters(explanation: Explanation, launches: Sequence[Relaunch]) -> Explanation:
    """Run the kernels of ``explanation`` under ncu, and put what was counted beside what was computed. Raises ``DeviceError``."""
    profiled = profile(launches)
    counters = tuple(
        KernelCounters(launch.name, _counted(found), _computed(explanation, position, launch))
        for position, (launch, found) in enumerate(zip(launches, profiled, strict=True))
    )
    return replace(explanation, counters=counters)


_LEAST_REGISTERS = 16
"""What ncu counts of kernels for which ptxas says fewer (seen on sm_90: 10 and 12)."""


def _counted(profiled: Profiled) -> dict[str, Figure]:
    figures = {}
    for label, metric in METRICS.items():
        if metric in profiled.metrics:
            value, unit = profiled.metrics[metric]
            if unit in _SECONDS:
                value, unit = value * _SECONDS[unit] * _US_PER_SECOND, "us"
            figures[label] = Figure(value, _UNITS.get(unit, unit), "measured", metric)
    return figures


def _computed(explanation: Explanation, position: int, launch: Relaunch) -> dict[str, Figure]:
    """The same as far as it was computed, under the same names and in the same units."""
    kernel = explanation.kernels[position]
    moved = {
        role: sum(operand.moved.value for operand in explanation.operands if operand.kernel == position and operand.role == role)
        for role in ("read", "written")
    }
    figures = {
        "DRAM read": computed(moved["read"], "B", "sectors that are read"),
        "DRAM written": computed(moved["written"], "B", "sectors that are written"),
    }
    if launch.sectors is not None:
        figures["sectors loaded"] = computed(launch.sectors[0], "sectors", "PTX, executed for some blocks")
        figures["sectors stored"] = computed(launch.sectors[1], "sectors", "PTX, executed for some blocks")
    if kernel.registers is not None:
        figures["registers"] = computed(max(_LEAST_REGISTERS, kernel.registers.value), "a thread", "ptxas; the hardware gives 16 at least")
    if kernel.occupancy is not None:
        figures["theoretical occupancy"] = computed(100 * kernel.occupancy.value, "%", kernel.occupancy.source)
    if explanation.measured_time is not None and len(explanation.kernels) == 1:
        figures["time"] = explanation.measured_time
    return figures
