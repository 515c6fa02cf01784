"""What is read of the machine, with and without NVML, and what a GPU's memory could do."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wideload.decode import decode
from wideload.measure.environment import Environment, GpuMonitor, GpuState, nominal_bytes_per_second, read_environment


class NVMLError(Exception):
    pass


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """An H200 as torch 2.11 shows it."""
    properties = SimpleNamespace(
        name="NVIDIA H200",
        uuid="12345678-9abc-def0-1234-56789abcdef0",
        L2_cache_size=62914560,
        multi_processor_count=132,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return properties


def nvml(**changes: Any) -> SimpleNamespace:
    functions: dict[str, Any] = {
        "NVMLError": NVMLError,
        "NVML_CLOCK_SM": 1,
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
        "nvmlDeviceGetClockInfo": lambda handle, clock: 1980 + clock,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda handle: 0x1 | 0x4 | 0x40,
        "nvmlDeviceGetEccMode": lambda handle: [1, 1],
        "nvmlSystemGetDriverVersion": lambda: b"580.159.03",
    }
    return SimpleNamespace(**(functions | changes))


CUDA = torch.device("cuda", 0)


def test_figures_come_from_nvml(monkeypatch: pytest.MonkeyPatch, h200: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml())
    monitor = GpuMonitor(CUDA)
    assert monitor.clock_mhz() == 1981
    assert monitor.throttle() == ("gpu_idle", "sw_power_cap", "hw_thermal_slowdown")
    environment = read_environment(CUDA, persisting_l2="reset before each sample", monitor=monitor)
    assert (environment.gpu, environment.driver, environment.ecc, environment.num_sms) == ("NVIDIA H200", "580.159.03", True, 132)
    assert environment.gpu_uuid == "GPU-12345678-9abc-def0-1234-56789abcdef0"
    assert environment.unread is None
    assert decode(Environment, json.loads(json.dumps(asdict(environment)))) == environment


def test_without_nvml_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, h200: SimpleNamespace) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monitor = GpuMonitor(CUDA)
    assert (monitor.clock_mhz(), monitor.throttle(), monitor.ecc()) == (None, None, None)
    assert "nvidia-ml-py is not installed" in str(read_environment(CUDA, monitor=monitor).unread)


def test_what_one_gpu_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch, h200: SimpleNamespace) -> None:
    def refuse(*_: Any) -> None:
        raise NVMLError("Not Supported")

    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlDeviceGetEccMode=refuse))
    monitor = GpuMonitor(CUDA)
    assert monitor.ecc() is None
    assert monitor.clock_mhz() == 1981
    assert monitor.unread == "NVML: Not Supported"
    monkeypatch.setitem(sys.modules, "pynvml", nvml(nvmlInit=refuse))
    assert GpuMonitor(CUDA).clock_mhz() is None


def test_only_what_slows_a_loaded_gpu_down_is_throttling() -> None:
    state = GpuState(1980, 1755, ("gpu_idle", "applications_clocks_setting"), ("sw_power_cap", "gpu_idle"))
    assert state.throttle == ("sw_power_cap",)
    assert GpuState(None, None, None, None).throttle == ()
    assert decode(GpuState, json.loads(json.dumps(asdict(state)))) == state


def test_nominal_bandwidth_by_attributes_or_by_name(h200: SimpleNamespace) -> None:
    assert nominal_bytes_per_second(CUDA) == pytest.approx(3.201e9 * 2 * 6144 / 8)  # 4.917 TB/s
    h200.memory_clock_rate = 0
    assert nominal_bytes_per_second(CUDA) == 4.8e12
    h200.name = "A GPU of next year"
    assert nominal_bytes_per_second(CUDA) is None


def test_a_cpu_is_described_too() -> None:
    environment = read_environment(torch.device("cpu"))
    assert environment.device == "cpu"
    assert environment.gpu is None
    assert environment.torch == torch.__version__
    assert environment.num_threads == torch.get_num_threads()
    assert environment.cpu
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    assert environment.commit is None or environment.commit.rstrip("+") == head
