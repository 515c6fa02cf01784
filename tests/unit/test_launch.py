"""What the driver is told of a kernel that takes a table by value: the addresses of its parameters, the stream, the geometry."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload import launch
from wideload.launch import TableKernel


class Driver:
    """Reads the parameters as the driver does, when it is called."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name="CUDA_SUCCESS"), FAILED=SimpleNamespace(name="CUDA_ERROR_INVALID_VALUE"))

    def __init__(self, table_bytes: int) -> None:
        self.table_bytes, self.calls, self.status = table_bytes, [], self.CUresult.CUDA_SUCCESS  # type: ignore[var-annotated]

    def cuLaunchKernel(self, kernel: int, *rest: int) -> tuple[Any]:
        *geometry, parameters, extra = rest
        table, cell = (ctypes.c_uint64 * 2).from_address(parameters)
        pointer = ctypes.c_uint64.from_address(cell).value
        self.calls.append((kernel, geometry, ctypes.string_at(table, self.table_bytes), pointer, extra))
        return (self.status,)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver(32)
    monkeypatch.setattr(launch, "_driver", lambda: driver)
    monkeypatch.setattr(launch, "_load", lambda cubin: (None, SimpleNamespace(handle=77)))
    monkeypatch.setattr(launch, "_bind_context", lambda device: None)
    monkeypatch.setattr(launch, "current_stream", lambda device: 1000 + device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return driver


def test_the_table_goes_by_value_and_the_map_by_its_address(driver: Driver) -> None:
    table = np.arange(4, dtype=np.int64)
    TableKernel(None, 256).launch(3, 12, table, 0x7F00_0000_1000)  # type: ignore[arg-type]
    assert driver.calls == [(77, [12, 1, 1, 256, 1, 1, 0, 1003], table.tobytes(), 0x7F00_0000_1000, 0)]


def test_a_refusal_is_told(driver: Driver) -> None:
    driver.status = driver.CUresult.FAILED
    with pytest.raises(wl.DeviceError, match="12 blocks of 256 threads: CUDA_ERROR_INVALID_VALUE"):
        TableKernel(None, 256).launch(3, 12, np.zeros(4, np.int64), 1)  # type: ignore[arg-type]
