"""Nsight Compute without a GPU: its tables as it prints them, its command line, its refusals, and the process that it watches."""

from __future__ import annotations

import importlib
import stat
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload.analyze.explain import GpuFigures
from wideload.errors import DeviceError
from wideload.gpus import find_target
from wideload.measure import ncu, relaunch
from wideload.measure.ncu import METRICS, add_counters, ncu_command, parse_ncu, profile
from wideload.measure.relaunch import Pointer, Relaunch, read_launches, write_launches

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device","CC",'
    '"Section Name","Metric Name","Metric Unit","Metric Value"'
)


def line(number: int, kernel: str, metric: str, unit: str, value: str) -> str:
    front = f'"{number}","4242","python3.12","127.0.0.1","{kernel}","1","7","(256, 1, 1)","(65,536, 1, 1)","0","9.0"'
    return f'{front},"Command line profiler metrics","{metric}","{unit}","{value}"'


OUTPUT = "\n".join(
    [
        "==PROF== Connected to process 4242 (/usr/bin/python3.12)",
        '==PROF== Profiling "scale" - 0: 0%....50%....100% - 2 passes',
        "==PROF== Disconnected from process 4242",
        HEAD,
        line(0, "scale", "dram__bytes_read.sum", "byte", "268,439,808"),
        line(0, "scale", "dram__bytes_write.sum", "Mbyte", "224.5"),
        line(0, "scale", "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum", "sector", "8,388,608"),
        line(0, "scale", "sm__maximum_warps_per_active_cycle_pct", "%", "100"),
        line(0, "scale", "launch__registers_per_thread", "register/thread", "16"),
        line(0, "scale", "launch__occupancy_limit_registers", "block", "16"),
        line(0, "scale", "gpu__time_duration.sum", "nsecond", "125,344"),
        line(0, "scale", "sm__warps_active.avg.pct_of_peak_sustained_active", "%", "n/a"),
        "==WARNING== a note in between",
        line(1, "second, of two", "launch__registers_per_thread", "register/thread", "32"),
        "",
    ]
)


def test_the_table_is_read() -> None:
    first, second = parse_ncu(OUTPUT)
    assert (first.kernel, first.block) == ("scale", (256, 1, 1))
    assert first.metrics == {
        "dram__bytes_read.sum": (268439808, "byte"),
        "dram__bytes_write.sum": (224.5e6, "byte"),
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum": (8388608, "sector"),
        "sm__maximum_warps_per_active_cycle_pct": (100, "%"),
        "launch__registers_per_thread": (16, "register/thread"),
        "launch__occupancy_limit_registers": (16, "block"),
        "gpu__time_duration.sum": (125344, "nsecond"),
    }
    assert (second.kernel, second.metrics) == ("second, of two", {"launch__registers_per_thread": (32, "register/thread")})


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters",
            r"run as root, in a cont",
        ),
        ("==ERROR== The application returned an error code (1).", r"ncu counted nothing; it said: ==ERROR== The application"),
        ("", "it said: nothing"),
    ],
)
def test_what_it_refuses(said: str, message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        parse_ncu(said)


def test_the_command_counts_what_is_asked_for_and_nothing_else() -> None:
    command = ncu_command("/bin/ncu", ["f", "g", "f"], ["python", "-m", "x"])
    assert command[0] == "/bin/ncu"
    assert command[-3:] == ["python", "-m", "x"]
    assert command[command.index("--kernel-name") + 1] == "regex:^(f|g)$"
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[command.index("--metrics") + 1].split(",") == list(METRICS.values())


def test_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ncu, "_USUAL_PLACES", ())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match=r"ncu was not found, neither on PATH nor in /usr/local/cuda/bin"):
        profile([])


# ---- a program in ncu's place


def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    path = tmp_path / "ncu"
    path.write_text(f"#!{sys.executable}\n{program}")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")


SCALE = wl.raw(
    'extern "C" __global__ void scale(const float4* x, float4* y) '
    "{ int i = blockIdx.x * blockDim.x + threadIdx.x; float4 v = x[i]; v.x *= 2; y[i] = v; }",
    "scale",
    grid=2**16,
)


def launch() -> Relaunch:
    x, y = torch.empty(2**26, device="meta"), torch.empty(2**26, device="meta")
    return Relaunch("scale", b"code", (2**16, 1, 1), (256, 1, 1), 0, (Pointer(x), Pointer(y)), (2**23, 2**23))


def test_counters_stand_beside_what_was_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = OUTPUT[: OUTPUT.index("==WARNING==")]
    installed(tmp_path, monkeypatch, f"import sys\nassert '-m' in sys.argv and 'wideload.measure.relaunch' in sys.argv\nprint({one!r})")
    x, y = torch.empty(2**26, device="meta"), torch.empty(2**26, device="meta")
    explanation = add_counters(SCALE.explain(x, y, target="h200"), [launch()])
    (counters,) = explanation.counters
    assert counters.kernel == "scale"
    assert {figure.kind for figure in counters.counted.values()} == {"measured"}
    assert (counters.counted["DRAM read"].value, counters.computed["DRAM read"].value) == (268439808, 2**28)
    assert (counters.counted["sectors loaded"].value, counters.computed["sectors loaded"].value) == (2**23, 2**23)
    assert (counters.counted["theoretical occupancy"].value, counters.computed["theoretical occupancy"].value) == (100, 100)
    assert (counters.counted["time"].value, counters.counted["time"].unit) == (125.344, "us")
    assert "achieved occupancy" not in counters.counted
    assert "Counters of scale, by Nsight Compute" in str(explanation)
    assert "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum; computed: 8,388,608" in str(explanation)


def test_a_kernel_that_was_not_counted_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(tmp_path, monkeypatch, f"print({OUTPUT!r})")
    with pytest.raises(DeviceError, match="ncu counted 2 of 1 kernels"):
        profile([launch()])
    installed(tmp_path, monkeypatch, "import sys\nsys.exit('==ERROR== ERR_NVGPUCTRPERM - see the page')")
    with pytest.raises(DeviceError, match="NVreg_RestrictProfilingToAdminUsers=0"):
        profile([launch()])


# ---- the process that is watched


def test_launches_survive_the_file(tmp_path: Path) -> None:
    rows = torch.arange(64, dtype=torch.int32)
    packed = torch.zeros(100)
    there = Relaunch(
        "k",
        b"\x7fELF",
        (3, 2, 1),
        (64, 1, 1),
        128,
        (
            Pointer(rows[4:]),
            Pointer(packed[2:], 8),
            Pointer(packed[50:]),
            Pointer(torch.empty(7, device="meta")),
            np.int32(-5),
            np.float32(0.5),
            7,
            2.5,
        ),
    )
    write_launches([there, there], tmp_path / "launches.pt")
    memory, (back, again) = read_launches(tmp_path / "launches.pt", "cpu")
    assert [part.numel() for part in memory] == [256, 400, 28], "each storage once, packed views in one"
    assert torch.equal(memory[0].view(torch.int32), rows), "integers may be indices"
    assert memory[1].view(torch.float32).std() > 0.5, "floats are random"
    assert (back.name, back.code, back.grid, back.block, back.shared_bytes) == ("k", b"\x7fELF", (3, 2, 1), (64, 1, 1), 128)
    pointers, numbers = back.arguments[:4], back.arguments[4:]
    assert [(value.tensor is memory[at], value.offset_bytes) for value, at in zip(pointers, (0, 1, 1, 2), strict=True)] == [
        (True, 16), (True, 16), (True, 200), (True, 0),
    ]  # fmt: skip
    assert [(type(value).__name__, value) for value in numbers] == [("int32", -5), ("float32", 0.5), ("int", 7), ("float", 2.5)]
    assert len(again.arguments) == 8


def test_they_are_launched_on_that_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []

    class Loaded:
        def __init__(self, cubin: Any, *geometry: Any) -> None:
            launched.append((cubin.name, cubin.code, geometry))

        def launch(self, device: int, arguments: Any) -> None:
            launched.append((device, arguments))

    monkeypatch.setattr(relaunch, "LoadedKernel", Loaded)
    monkeypatch.setattr(relaunch, "read_launches", lambda path, device: read_launches(path, "cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: launched.append("waited"))
    write_launches([Relaunch("k", b"c", 4, 32, 0, (Pointer(torch.zeros(8)), np.int32(3)))], tmp_path / "launches.pt")
    relaunch.relaunch(tmp_path / "launches.pt")
    made, (device, arguments), waited = launched
    assert made == ("k", b"c", (4, 32, 0))
    assert (device, arguments[1], waited) == (0, 3, "waited")


def test_a_fused_function_is_launched_as_it_would_be() -> None:
    x, y = torch.empty(2**20, device="meta"), torch.empty(2**20, device="meta")
    (kernel,) = wl.fuse(lambda x, y, a: x * a + y).plan(x, y, 0.5, target="h200").kernels
    found = kernel.relaunch([x, y], [torch.empty(2**20, device="meta")], (0.5,))
    assert [type(value).__name__ for value in found.arguments[:3]] == ["Pointer"] * 3
    assert found.arguments[-1] == 0.5
    assert found.sectors == (2 * 2**17, 2**17)
    assert (found.name, found.block[0] * found.grid[0] >= 2**18) == (kernel.name, True)  # type: ignore[index]


def test_the_same_tensor_twice() -> None:
    x = torch.empty(2**20, device="meta")
    (kernel,) = wl.fuse(lambda x: x * 2).plan(x, target="h200").kernels
    assert kernel.relaunch([x], [x], ()).sectors == (2**17, 2**17)


@pytest.mark.parametrize("is_raw", [True, False])
def test_explain_has_its_kernels_counted(is_raw: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on an H200 that is here: its figures are planted."""
    counted: list[Relaunch] = []
    rooflines = importlib.import_module("wideload.measure.roofline")  # the package's attribute of this name may be the function
    monkeypatch.setattr(rooflines, "read_device", lambda device: GpuFigures(find_target("h200")))
    monkeypatch.setattr(ncu, "add_counters", lambda explanation, launches: (counted.extend(launches), explanation)[1])
    x, y = torch.empty(2**20, device="meta"), torch.empty(2**20, device="meta")
    if is_raw:
        monkeypatch.setattr(wl.RawKernel, "_device_of", lambda self, call: 0)
        explanation = wl.raw(SCALE.source, "scale", grid=2**10).explain(x, y, measure=False, ncu=True)
    else:
        monkeypatch.setattr(wl.FusedFunction, "_check_has_target", lambda self, method, call: None)
        explanation = wl.fuse(lambda x, y: x * y).explain(x, y, measure=False, ncu=True)
    (launch,) = counted
    assert launch.name == explanation.kernels[0].name
    assert launch.code.startswith(b"\x7fELF")
    assert launch.sectors == ((2**17, 2**17) if is_raw else (2**18, 2**17))
