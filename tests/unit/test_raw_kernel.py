"""Hand-written kernels as they are called: what is refused, and what the driver is told. A launch is noted, not made."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload import raw_kernel
from wideload.errors import CompileError, DeviceError, DtypeError, LayoutError, RangeError

SOURCE = """
extern "C" __global__ void axpy(const float* x, float* y, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void look(const float* x) {}
"""


class Launches:
    """Stands in for `LoadedKernel`: what it was made of, and each launch."""

    made: list[tuple[Any, ...]]
    launched: list[tuple[int, list[Any]]]
    error: Exception | None = None

    def __init__(self, cubin: Any, grid: Any, block: Any, shared_bytes: int) -> None:
        self.made.append((cubin.name, cubin.arch, grid, block, shared_bytes))

    def launch(self, device: int, arguments: list[Any]) -> None:
        if self.error:
            raise self.error
        self.launched.append((device, arguments))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> type[Launches]:
    """CPU tensors pass for those of GPU 3."""
    kind = type("Kind", (Launches,), {"made": [], "launched": []})
    monkeypatch.setattr(raw_kernel, "LoadedKernel", kind)
    monkeypatch.setattr(raw_kernel, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(raw_kernel.RawKernel, "_device_of", lambda self, call: 3)
    return kind


def test_a_launch_has_the_arguments_as_the_kernel_takes_them(launches: type[Launches]) -> None:
    x, y = torch.zeros(1000), torch.zeros(1000)
    assert wl.raw(SOURCE, "axpy")(x, y, 2, n=1000) is None
    assert launches.made == [("axpy", "sm_90", (4, 1, 1), (256, 1, 1), 0)], "a thread an element of y"
    ((device, arguments),) = launches.launched
    assert (device, arguments) == (3, [x.data_ptr(), y.data_ptr(), 2.0, 1000])
    assert [type(value) for value in arguments[2:]] == [np.float32, np.int32]


@pytest.mark.parametrize(
    ("given", "called", "grid", "block"),
    [
        ({}, {}, (4, 1, 1), (256, 1, 1)),
        ({"block": 128}, {}, (8, 1, 1), (128, 1, 1)),
        ({"block": (32, 8)}, {}, (4, 1, 1), (32, 8, 1)),
        ({"grid": 7}, {}, (7, 1, 1), (256, 1, 1)),
        ({"grid": np.int64(3), "block": (np.int32(32), 2)}, {}, (3, 1, 1), (32, 2, 1)),
        ({"grid": 7}, {"grid": (2, 3), "block": 64}, (2, 3, 1), (64, 1, 1)),
        ({"grid": lambda x, y, a, n: (n, 2), "block": lambda x, y, a, n: 32 if n > 9 else 64}, {}, (1000, 2, 1), (32, 1, 1)),
    ],
)
def test_geometry(launches: type[Launches], given: Any, called: Any, grid: Any, block: Any) -> None:
    wl.raw(SOURCE, "axpy", **given)(torch.zeros(1000), torch.zeros(1000), 2.0, 1000, **called)
    assert launches.made[0][2:4] == (grid, block)


@pytest.mark.parametrize("geometry", [{}, {"grid": 0}, {"grid": (3, 0)}, {"grid": lambda x, y, a, n: n}])
def test_nothing_is_launched_for_no_elements(launches: type[Launches], geometry: Any) -> None:
    wl.raw(SOURCE, "axpy", **geometry)(torch.zeros(0), torch.zeros(0), 2.0, 0)
    assert (launches.made, launches.launched) == ([], [])


def test_a_geometry_is_loaded_once(launches: type[Launches]) -> None:
    axpy = wl.raw(SOURCE, "axpy")
    for size in (1000, 1000, 999, 2000):
        axpy(torch.zeros(size), torch.zeros(size), 2.0, size)
    assert (len(launches.made), len(launches.launched)) == (2, 4)


def call(*args: Any, **kwargs: Any) -> None:
    wl.raw(SOURCE, "axpy")(*args, **kwargs)


x, y = torch.zeros(1000), torch.zeros(1000)


@pytest.mark.usefixtures("launches")
@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((x, y.double(), 1.0, 9), {}, DtypeError, r"argument y \(float\*\) is torch.float64; allowed: of float32"),
        ((x, y, 1.0, 2**31), {}, RangeError, r"argument n \(int\) is 2147483648; allowed: -2147483648 to 2147483647"),
        ((x, y, 1.0), {}, LayoutError, r"axpy takes 4 arguments: x, y, a, n; n missing"),
        ((x, y, 1.0, 9, 9), {}, LayoutError, r"5 were given"),
        ((x, y, 1.0, 9), {"a": 2.0}, LayoutError, r"a is given twice"),
        ((x, y, 1.0, 9), {"b": 2.0}, LayoutError, r"it has none called b"),
        ((x, y, 1.0, 9), {"grid": (1, 2**16)}, RangeError, r"grid.y is 65536; allowed: 0 to 65535"),
        ((x, y, 1.0, 9), {"grid": 2**31}, RangeError, r"grid.x is 2147483648"),
        ((x, y, 1.0, 9), {"grid": 1.5}, LayoutError, r"grid is 1.5; allowed: one to three ints"),
        ((x, y, 1.0, 9), {"grid": True}, LayoutError, r"grid is True; allowed: one to three ints"),
        ((x, y, 1.0, 9), {"block": (32, np.True_)}, LayoutError, r"allowed: one to three ints"),
        ((x, x.to(torch.complex64).conj().imag, 1.0, 9), {}, LayoutError, r"argument y is a neg view.*Call .resolve_neg\(\)"),
        ((x, y, 1.0, 9), {"grid": (1, 1, 1, 1)}, LayoutError, r"one to three ints"),
        ((x, y, 1.0, 9), {"block": 1025}, RangeError, r"block is \(1025, 1, 1\); allowed"),
        ((x, y, 1.0, 9), {"block": (64, 32)}, RangeError, r"and 1024 together"),
        ((x, y, 1.0, 9), {"block": 0}, RangeError, r"at least 1 thread"),
    ],
)
def test_what_is_refused(args: Any, kwargs: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(*args, **kwargs)


@pytest.mark.usefixtures("launches")
def test_a_kernel_that_writes_nothing_needs_a_grid() -> None:
    with pytest.raises(LayoutError, match="give grid="):
        wl.raw(SOURCE, "look")(x)
    wl.raw(SOURCE, "look", grid=1)(x)


def test_what_the_driver_refuses_is_an_error_of_the_call(launches: type[Launches]) -> None:
    launches.error = RuntimeError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")
    with pytest.raises(DeviceError, match=r"axpy: the driver refused a grid of 4 x 1 x 1 blocks of 256 x 1 x 1 threads: CUDA_ERROR_LAUNCH"):
        call(x, y, 1.0, 9)


def test_devices() -> None:
    axpy = wl.raw(SOURCE, "axpy")
    refused = "argument x is on cpu; allowed: a CUDA device" if torch.cuda.is_available() else "a raw kernel needs a GPU, and none is here"
    with pytest.raises(DeviceError, match=f"axpy: {refused}"):
        axpy(x, y, 1.0, 9)
    for device in ("cpu", "meta"):
        with pytest.raises(DeviceError, match=rf'axpy.explain got tensors on {device} and no target. Name the GPU: target="h200"'):
            axpy.explain(x.to(device), y.to(device), 1.0, 9)
    with pytest.raises(DeviceError, match="ncu counts on the GPU that is here, not on h200"):
        axpy.explain(x, y, 1.0, 9, target="h200", ncu=True)


def test_compiled_figures() -> None:
    plan = wl.raw(SOURCE, "axpy").plan("h200")
    assert (plan.arch, plan.spill_bytes, plan.shared_bytes) == ("sm_90", 0, 0)
    assert 8 <= plan.registers <= 32
    assert "FFMA" in plan.sass, "contracted, as nvcc does"
    assert [(access.kind, access.width_bits) for access in plan.accesses] == [("load", 32), ("load", 32), ("store", 32)]
    assert plan.cubin.startswith(b"\x7fELF")
    assert ".entry axpy" in plan.ptx


def test_what_nvrtc_refuses_names_the_line() -> None:
    broken = wl.raw('extern "C" __global__ void f(float* y) {\n  y[0] = nothing;\n}', "f")
    with pytest.raises(CompileError, match=r">\s+2 \|   y\[0\] = nothing;"):
        _ = broken.plan("h200").compiled
    mangled = wl.raw("__global__ void f(float* y) { y[0] = 1; }", "f")
    for look in (lambda plan: plan.compiled, lambda plan: plan.ptx):
        with pytest.raises(CompileError, match=r'kernel .f. is not extern "C".*Write extern "C" __global__ void f\('):
            look(mangled.plan("h200"))


@pytest.mark.parametrize(
    ("header", "instead"),
    [("cuda_fp16.h", "struct __half { unsigned short bits; };"), ("cuda_bf16.h", "bf16.cuh"), ("mine.h", "in its own source$")],
)
def test_an_include_is_told_what_to_write_instead(header: str, instead: str) -> None:
    kernel = wl.raw(f'#include <{header}>\nextern "C" __global__ void f(float* y) {{}}', "f")
    with pytest.raises(CompileError, match=f"NVRTC is given no headers here, and so no {header}: (?s:.*){instead}"):
        _ = kernel.plan("h200").compiled


def test_halves_need_no_header() -> None:
    source = """
    struct __half { unsigned short bits; };
    extern "C" __global__ void f(const __half* x, __half* y)
    {
        float value;
        __half twice;
        asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x[threadIdx.x].bits));
        value *= 2;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(twice.bits) : "f"(value));
        y[threadIdx.x] = twice;
    }"""
    kernel = wl.raw(source, "f")
    assert [parameter.dtypes for parameter in kernel.parameters] == [(torch.float16,)] * 2
    assert [access.width_bits for access in kernel.plan("h200").accesses] == [16, 16]


def test_shared_memory_has_a_limit() -> None:
    with pytest.raises(RangeError, match="shared_bytes is 49153; allowed: 0 to 49152"):
        wl.raw(SOURCE, "axpy", shared_bytes=49153)
    assert repr(wl.raw(SOURCE, "axpy")) == "wideload.raw(axpy(x, y, a, n))"
