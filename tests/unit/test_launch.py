"""What the driver is told of a kernel: the addresses of its parameters, the stream, the geometry; by which route, and of refusals."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload import launch
from wideload.launch import LoadedKernel, TableKernel, refusal


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
    monkeypatch.setattr(launch, "bind_context", lambda device: None)
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


# ---- kernels of plain arguments


class Direct:
    """In the place of torch's launcher."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *given: Any) -> None:
        self.calls.append(given)
        if given[1] == 13:
            raise RuntimeError("CUDA driver error: invalid argument")


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Direct:
    direct = Direct()
    monkeypatch.setattr(launch, "_direct_function", lambda: direct)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 1000 + device, raising=False)
    monkeypatch.setattr(launch, "_core", lambda: SimpleNamespace(LaunchConfig=lambda **_: None, launch=None, Stream=None))
    return direct


def kernel(grid: Any = 12, threads: Any = 256, **more: Any) -> LoadedKernel:
    return LoadedKernel(None, grid, threads, **more)  # type: ignore[arg-type]


def test_torch_launches_what_it_can_describe(direct: Direct) -> None:
    kernel((12, 3), 96, shared_bytes=64).launch_here(3, "lld", (1, 2**62, 0.5))
    assert direct.calls == [(77, 12, 3, 1, 3, 64, "lld", (1, 2**62, 0.5), 1003)]


@pytest.mark.parametrize(
    ("grid", "threads", "types", "overlaps"),
    [
        (12, (16, 16), "l", False),  # threads in two dims
        (12, 100, "l", False),  # no whole warps
        ((2**16, 2**15), 256, "l", False),  # 2^31 blocks: a product of 32 bits is negative, and torch would launch nothing
        (12, 256, "l" * 26, False),
        (12, 256, "l", True),  # it cannot ask for an early start
    ],
)
def test_what_torch_cannot_describe_goes_to_the_driver(
    direct: Direct, monkeypatch: pytest.MonkeyPatch, grid: Any, threads: Any, types: str, overlaps: bool
) -> None:
    slots: list[tuple[int, bytes]] = []

    class Slot:
        def __init__(self, of: LoadedKernel, num_arguments: int) -> None:
            self.values = (ctypes.c_int64 * num_arguments)()

        def launch(self, stream: int) -> None:
            slots.append((stream, bytes(self.values)))

    monkeypatch.setattr(launch, "_Slot", Slot)
    kernel(grid, threads, overlaps=overlaps).launch_here(3, types, tuple(range(len(types))))
    assert (direct.calls, slots) == ([], [(1003, np.arange(len(types), dtype=np.int64).tobytes())])
    slots.clear()
    monkeypatch.setattr(launch, "_direct_function", lambda: None)
    kernel().launch_here(3, "d", (0.5,))
    assert slots == [(1003, np.array([0.5]).tobytes())]


def test_what_torch_is_refused_is_told(direct: Direct) -> None:
    with pytest.raises(wl.DeviceError, match=r"the driver did not launch a kernel: CUDA driver error: invalid argument\. Where that names"):
        kernel(13).launch_here(3, "l", (1,))
    told = wl.DeviceError("told already")
    assert refusal(told) is told


# ---- graphs


@pytest.mark.parametrize(("version", "driver"), [(12, 12030), (13, 13000), (12, 12020)])
def test_a_graph_with_a_programmatic_edge_overlaps(version: int, driver: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: dict[int, list[int]] = {1: [], 2: [0, 0], 3: [0, 1]}

    def find_edges(graph: int, count: int = 0) -> tuple[Any, ...]:
        if driver < 12030:
            raise RuntimeError('Function "cuGraphGetEdges_v2" not found')
        assert count in (0, len(kinds[graph]))
        data = [SimpleNamespace(type=kind) for kind in kinds[graph][:count]]
        return 0, [None] * count, [None] * count, data, len(kinds[graph])

    def find_plain_edges(graph: int, count: int = 0) -> tuple[Any, ...]:
        return 0, [None] * count, [None] * count, len(kinds[graph])

    edges = {"cuGraphGetEdges": find_edges} if version == 13 else {"cuGraphGetEdges": find_plain_edges, "cuGraphGetEdges_v2": find_edges}
    kind = SimpleNamespace(CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC=SimpleNamespace(value=1))
    names = {"CUgraph": int, "CUgraphDependencyType": kind, "CUresult": SimpleNamespace(CUDA_SUCCESS=0)}
    bindings = SimpleNamespace(cuDriverGetVersion=lambda: (0, driver), **names, **edges)
    monkeypatch.setattr(launch, "_driver", lambda: bindings)
    assert [launch.has_overlaps(graph) for graph in kinds] == [False, False, driver >= 12030]
