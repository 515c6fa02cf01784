"""The diagnosis: what each fault is called, what it says to do, and the exit status that scripts go by."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from wideload import doctor
from wideload.cli import app
from wideload.doctor import Check, Diagnosis, Facts, GpuFacts, diagnose, gather_facts, judge
from wideload.errors import CompileError
from wideload.native import NativeState
from wideload.store import Entry, FolderState

H200 = GpuFacts("NVIDIA H200", (9, 0))
V100 = GpuFacts("Tesla V100", (7, 0))
FOLDER = Path("/home/user/.cache/wideload")
HEALTHY = Facts(
    torch="2.11.0+cu130",
    torch_cuda=(13, 0),
    driver="580.65.06",
    driver_cuda=(13, 0),
    num_gpus=1,
    gpus=(H200,),
    gpus_error=None,
    core="1.2.2",
    core_error=None,
    bindings="13.0.3",
    nvrtc=(13, 0),
    nvrtc_error=None,
    compile_error=None,
    tools=(("nvdisasm", "/bin/nvdisasm"), ("cuobjdump", "/bin/cuobjdump"), ("g++", "/bin/g++")),
    cache=FolderState(FOLDER, 1000, None, (Entry("a" * 64, FOLDER / "a", 3 << 20, 0.0),)),
    native=NativeState(True, None),
)
NO_GPU: dict[str, Any] = {"driver": None, "driver_cuda": None, "num_gpus": 0, "gpus": ()}


def check_of(diagnosis: Diagnosis, name: str) -> Check:
    (check,) = [check for check in diagnosis.checks if check.name == name]
    return check


def test_a_healthy_installation_has_nothing_to_do() -> None:
    diagnosis = judge(HEALTHY)
    assert [check.state for check in diagnosis.checks] == ["ok"] * 12
    assert not any(check.command or check.follows for check in diagnosis.checks)
    assert (diagnosis.can_compile, diagnosis.has_gpu, diagnosis.can_launch, diagnosis.is_healthy) == (True, True, True, True)
    found = {check.name: check.found for check in diagnosis.checks}
    assert found["torch"] == "2.11.0, CUDA 13.0"
    assert found["driver"] == "580.65.06 for CUDA 13.0"
    assert found["GPU 0"] == "NVIDIA H200, sm_90, ran a kernel"
    assert found["compiling"] == "compiled a kernel for sm_90"
    assert found["cache"] == "/home/user/.cache/wideload, of user 1000, writable, 1 kernels, 3.0 MiB"


def test_without_a_gpu_compiling_is_enough() -> None:
    diagnosis = judge(dataclasses.replace(HEALTHY, **NO_GPU, torch="2.13.0+cpu", torch_cuda=None))
    assert diagnosis.is_healthy
    assert (diagnosis.has_gpu, diagnosis.can_launch) == (False, False)
    assert [check.name for check in diagnosis.checks if check.state != "ok"] == ["driver", "GPU"]
    assert check_of(diagnosis, "driver").command.startswith("sudo apt-get install nvidia-open")
    assert check_of(diagnosis, "torch").found == "2.13.0, CPU build"


FAULTS = {
    "torch is old": ({"torch": "2.9.1+cu128"}, "torch", "problem", "2.10 or newer", "torch>=2.10", True),
    "torch for the CPU beside a GPU": (
        {"torch": "2.13.0+cpu", "torch_cuda": None, "gpus": ()},
        "torch",
        "problem",
        "cannot use this machine's GPU",
        "https://download.pytorch.org/whl/cu130",
        False,
    ),
    "torch for a newer CUDA": (
        {"driver_cuda": (12, 8), "nvrtc": (12, 8), "gpus": (), "gpus_error": "the driver is too old"},
        "torch",
        "problem",
        "newer CUDA than the driver's",
        "https://download.pytorch.org/whl/cu128",
        False,
    ),
    "torch sees no GPU": (
        {"gpus": (), "gpus_error": "RuntimeError: CUDA unknown error"},
        "GPU",
        "problem",
        "not launched",
        "nvidia-smi",
        False,
    ),
    "a GPU is too old": ({"gpus": (V100,)}, "GPU 0", "problem", "sm_75 or newer", "", False),
    "a GPU is too old beside another": ({"gpus": (H200, V100), "num_gpus": 2}, "GPU 1", "problem", "sm_75 or newer", "", True),
    "a GPU runs nothing": (
        {"gpus": (H200, dataclasses.replace(H200, launch_error="CUDAError: no"))},
        "GPU 1",
        "problem",
        "CUDAError: no",
        'pip install "wideload[cu13]"',
        False,
    ),
    "NVRTC does not know the GPU": (
        {"gpus": (dataclasses.replace(H200, compile_error="CompileError: no sm_90"),)},
        "compiling",
        "problem",
        "no kernel",
        'pip install "wideload[cu13]"',
        False,
    ),
    "no cuda.core": (
        {"core": None, "core_error": "ModuleNotFoundError: no", "gpus": (dataclasses.replace(H200, launch_error="no"),)},
        "cuda.core",
        "missing",
        "nothing can be compiled",
        'pip install "wideload[cu13]"',
        False,
    ),
    "no bindings": ({"bindings": None}, "cuda.bindings", "missing", "nothing can be compiled", 'pip install "wideload[cu13]"', True),
    "no NVRTC": (
        {**NO_GPU, "nvrtc": None, "nvrtc_error": "CompileError: no", "compile_error": "CompileError: no", "torch_cuda": (12, 8)},
        "NVRTC",
        "missing",
        "nothing can be compiled",
        'pip install "wideload[cu12]"',
        False,
    ),
    "NVRTC beyond the driver": (
        {"driver_cuda": (12, 8), "torch_cuda": (12, 8), "gpus": (dataclasses.replace(H200, launch_error="no"),)},
        "NVRTC",
        "problem",
        "the driver, for CUDA 12.8, refuses",
        'pip install "wideload[cu12]"',
        False,
    ),
    "bindings beyond the driver": ({"bindings": "13.5.0"}, "cuda.bindings", "ok", "compute-sanitizer reports cuGetProcAddress", "", True),
    "no nvdisasm": ({"tools": (("nvdisasm", None),)}, "nvdisasm", "missing", "sass", "pip install nvidia-cuda-nvdisasm", True),
    "no g++": ({"tools": (("g++", None),)}, "g++", "missing", "optional", "apt-get install g++", True),
    "the cache is off": ({"cache": FolderState(None, None, "it is off", ())}, "cache", "missing", "again", "unset WIDELOAD_CACHE", True),
    "others write to the cache": (
        {"cache": FolderState(Path("/tmp/a b"), 0, "others may write to it", ())},
        "cache",
        "problem",
        "compiles its kernels again",
        "chmod go-w '/tmp/a b'",
        True,
    ),
    "the cache cannot be written": (
        {"cache": FolderState(FOLDER, 0, "/home cannot be written", ())},
        "cache",
        "problem",
        "compiles its kernels again",
        "export WIDELOAD_CACHE_DIR",
        True,
    ),
    "no compiler": ({"native": NativeState(False, "none is a program")}, "calls in C", "missing", "optional", "apt-get install gcc", True),
    "no header": ({"native": NativeState(False, "/x has no Python.h")}, "calls in C", "missing", "optional", "python3-dev", True),
    "no Linux": ({"native": NativeState(False, "made for Linux, not for darwin")}, "calls in C", "missing", "optional", "", True),
    "no C": ({"native": NativeState(False, "WIDELOAD_CC=0 turns it off")}, "calls in C", "missing", "optional", "unset WIDELOAD_CC", True),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_row_its_command_and_its_status(fault: str) -> None:
    changes, name, state, follows, command, is_healthy = FAULTS[fault]
    diagnosis = judge(dataclasses.replace(HEALTHY, **changes))
    check = check_of(diagnosis, name)
    assert check.state == state
    assert follows in check.follows
    assert command in check.command
    assert bool(command) == bool(check.command)
    assert diagnosis.is_healthy == is_healthy


def test_without_a_driver_what_torch_says_of_it_is_no_fault() -> None:
    diagnosis = judge(dataclasses.replace(HEALTHY, **NO_GPU, gpus_error="Found no NVIDIA driver"))
    assert check_of(diagnosis, "GPU").state == "missing"
    assert diagnosis.is_healthy


# ---- looking


def test_this_machine_compiles() -> None:
    diagnosis = diagnose()
    assert diagnosis.can_compile
    assert {check.name for check in diagnosis.checks} >= {
        "torch",
        "driver",
        "cuda.core",
        "cuda.bindings",
        "NVRTC",
        "compiling",
        "cache",
        "calls in C",
    }
    assert diagnosis.has_gpu == torch.cuda.is_available()


@pytest.mark.gpu
def test_this_gpu_runs_a_kernel() -> None:
    diagnosis = diagnose()
    assert (diagnosis.can_launch, diagnosis.is_healthy) == (True, True)
    assert "ran a kernel" in check_of(diagnosis, "GPU 0").found


def test_without_nvrtc_the_diagnosis_ends_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Any:
        raise CompileError("NVRTC could not be loaded\nin two lines")

    monkeypatch.setattr(doctor, "nvrtc_version", fail)
    monkeypatch.setattr(doctor, "compile_cubin", fail)
    monkeypatch.setattr(doctor, "find_nvdisasm", fail)
    facts = gather_facts()
    assert (facts.nvrtc, facts.nvrtc_error, facts.compile_error) == (None, *["CompileError: NVRTC could not be loaded"] * 2)
    assert facts.tools[0] == ("nvdisasm", None)
    assert not judge(facts).is_healthy


def test_a_module_that_is_not_there_is_a_fact() -> None:
    version, error = doctor._find_module("wideload_no_such_module")
    assert version is None
    assert error == "ModuleNotFoundError: No module named 'wideload_no_such_module'"


def test_the_driver_is_asked_for_its_cuda_and_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def __init__(self, status: int) -> None:
            self._status = status

        def cuDriverGetVersion(self, version: Any) -> int:
            version._obj.value = 12080
            return 0

        def cuInit(self, flags: int) -> int:
            return self._status

        def cuDeviceGetCount(self, count: Any) -> int:
            count._obj.value = 8
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(0))
    assert doctor._ask_driver() == ((12, 8), 8)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver(100))  # CUDA_ERROR_NO_DEVICE
    assert doctor._ask_driver() == ((12, 8), 0)

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert doctor._ask_driver() == (None, 0)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs-builder)", "580.65.06"),
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104  Sat Aug 19 01:15:15 UTC 2023", "535.104"),
        ("something else", None),
    ],
)
def test_the_kernel_module_tells_its_version(text: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path, encoding: text)
    assert doctor._kernel_module_version() == version


def test_what_torch_warns_of_is_why_it_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> bool:
        import warnings

        warnings.warn("CUDA initialization: the driver is too old\nand more", UserWarning, stacklevel=1)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", warn)
    assert doctor._find_gpus() == ((), "CUDA initialization: the driver is too old")


def test_each_gpu_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [H200, V100, dataclasses.replace(H200, launch_error="CompileError: wrong")]

    def launch(index: int) -> None:
        if index == 2:
            raise CompileError("wrong")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: gpus[index].name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: gpus[index].compute_capability)
    monkeypatch.setattr(doctor, "_launch", launch)
    assert doctor._find_gpus() == (tuple(gpus), None)


# ---- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})


@pytest.mark.parametrize("is_healthy", [True, False])
def test_the_exit_status_is_the_verdict(is_healthy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = HEALTHY if is_healthy else dataclasses.replace(HEALTHY, gpus=(dataclasses.replace(H200, launch_error="[no] kernel"),))
    monkeypatch.setattr(doctor, "diagnose", lambda: judge(facts))
    result = run("doctor")
    assert result.exit_code == (0 if is_healthy else 1)
    assert ("Kernels can run." in result.stdout) == is_healthy
    assert ("[no] kernel" in result.stdout) == (not is_healthy)
    result = run("doctor", "--json")
    assert result.exit_code == (0 if is_healthy else 1)
    report = json.loads(result.stdout)
    assert (report["is_healthy"], report["can_compile"], report["has_gpu"]) == (is_healthy, True, True)
    assert report["checks"][0] == {"name": "torch", "state": "ok", "found": "2.11.0, CUDA 13.0", "follows": "", "command": ""}


def test_the_table_shows_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "diagnose", lambda: judge(dataclasses.replace(HEALTHY, nvrtc=None, compile_error="no", **NO_GPU)))
    result = run("doctor")
    assert result.exit_code == 1
    for words in ("missing  NVRTC", 'pip install "wideload[cu13]"', "nothing can be compiled", "Kernels cannot be compiled."):
        assert words in result.stdout
