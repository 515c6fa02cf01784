"""Compiling CUDA C++ without a GPU: what ptxas reports, and what a user reads when it fails."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from wideload import nvrtc
from wideload.errors import CompileError
from wideload.gpus import MIN_COMPUTE_CAPABILITY, SM_LIMITS
from wideload.nvrtc import compile_cubin, compile_ptx, nvrtc_version

SCALE = """\
extern "C" __global__ void scale(float* x, float a, float b)
{
    x[threadIdx.x] = x[threadIdx.x] * a + b;
}
"""

# 64 values live across a barrier, and two blocks of 1024 threads: 32 registers a thread are all there are.
SPILLING = """\
extern "C" __global__ void __launch_bounds__(1024, 2) reverse(float* x)
{
    float v[64];
#pragma unroll
    for (int k = 0; k < 64; ++k) v[k] = x[k];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 64; ++k) x[k] = v[63 - k] * v[k];
}
"""

SHARED = """\
extern "C" __global__ void reverse(float* x)
{
    __shared__ float tile[256];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    x[threadIdx.x] = tile[255 - threadIdx.x];
}
"""


@pytest.fixture
def fresh_loader() -> Iterator[None]:
    loaders = (nvrtc._load_nvrtc, nvrtc.nvrtc_version, nvrtc._supported_archs)
    for loader in loaders:
        loader.cache_clear()
    yield
    for loader in loaders:
        loader.cache_clear()


def test_a_small_kernel_uses_few_registers_and_spills_nothing() -> None:
    cubin = compile_cubin(SCALE, arch="sm_90", name="scale")
    assert cubin.code.startswith(b"\x7fELF")
    assert (cubin.arch, cubin.name) == ("sm_90", "scale")
    assert 4 <= cubin.registers <= 16
    assert (cubin.spill_store_bytes, cubin.spill_load_bytes, cubin.stack_bytes, cubin.shared_bytes) == (0, 0, 0, 0)


def test_spills_are_reported() -> None:
    cubin = compile_cubin(SPILLING, arch="sm_90", name="reverse")
    assert cubin.registers == 32
    assert cubin.spill_store_bytes > 0
    assert cubin.spill_load_bytes > 0
    assert cubin.stack_bytes > 0


def test_shared_memory_is_reported() -> None:
    assert compile_cubin(SHARED, arch="sm_80", name="reverse").shared_bytes == 256 * 4


def test_the_log_is_read_kernel_by_kernel_and_counts_the_spills_of_device_functions() -> None:
    log = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'other' for 'sm_90'
ptxas info    : Function properties for other
    16 bytes stack frame, 20 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers, 16 bytes cumulative stack size
ptxas info    : Compiling entry function 'add' for 'sm_90'
ptxas info    : Function properties for add
ptxas         .     0 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 512 bytes smem, 380 bytes cmem[0]
ptxas info    : Compile time = 9.611 ms
ptxas info    : Function properties for _Z4edgeff
ptxas         .     8 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
"""
    kernels, device_functions = nvrtc._parse_ptxas_log(log)
    assert kernels == {
        "other": {"stack": 16, "spill_stores": 20, "spill_loads": 24, "registers": 255, "cumulative_stack": 16},
        "add": {"stack": 0, "spill_stores": 4, "spill_loads": 0, "registers": 40, "cumulative_stack": 8, "shared": 512},
    }
    assert device_functions == ({"stack": 8, "spill_stores": 8, "spill_loads": 12},)


def test_multiply_and_add_are_contracted_only_on_request() -> None:
    apart, contracted = (compile_ptx(SCALE, arch="sm_90", name="scale", fma=fma) for fma in (False, True))
    assert "mul.f32" in apart.replace(".rn", "")
    assert "fma.rn.f32" not in apart
    assert "fma.rn.f32" in contracted


def test_ptx_is_for_the_architecture_asked_for() -> None:
    ptx = compile_ptx(SCALE, arch="sm_80", name="scale")
    assert ".target sm_80" in ptx
    assert ".entry scale(" in ptx
    assert ptx.endswith("\n")


@pytest.mark.parametrize("compute_capability", [cc for cc in SM_LIMITS if cc >= MIN_COMPUTE_CAPABILITY])
def test_every_supported_architecture_compiles(compute_capability: tuple[int, int]) -> None:
    arch = "sm_{}{}".format(*compute_capability)
    assert compile_cubin(SCALE, arch=arch, name="scale").arch == arch


def test_equal_sources_give_equal_cubins_wherever_they_are_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cubin(SCALE, arch="sm_90", name="scale")
    monkeypatch.chdir(tmp_path)
    assert compile_cubin(SCALE, arch="sm_90", name="scale") == here


def test_threads_compile_at_the_same_time() -> None:
    sources = [SCALE.replace("+ b", f"+ {k}.0f * b") for k in range(8)]
    alone = [compile_cubin(source, arch="sm_90", name="scale").code for source in sources]
    with ThreadPoolExecutor(len(sources)) as pool:
        together = list(pool.map(lambda source: compile_cubin(source, arch="sm_90", name="scale").code, sources))
    assert together == alone
    assert len(set(alone)) == len(alone)


def test_a_refused_source_is_shown_where_it_went_wrong() -> None:
    with pytest.raises(CompileError) as raised:
        compile_cubin(SCALE.replace("* a", "* c"), arch="sm_90", name="scale")
    message = str(raised.value)
    assert message.startswith("NVRTC {}.{} refused 'scale' for sm_90: ".format(*nvrtc_version()))
    assert 'identifier "c" is undefined' in message
    assert ">    3 |     x[threadIdx.x] = x[threadIdx.x] * c + b;" in message.splitlines()
    assert '     1 | extern "C" __global__ void scale(float* x, float a, float b)' in message.splitlines()


def test_what_ptxas_refuses_is_a_compile_error_too() -> None:
    with pytest.raises(CompileError, match="too much shared data"):
        compile_cubin(SHARED.replace("[256]", "[99999]"), arch="sm_90", name="reverse")


def test_a_kernel_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(CompileError, match=r"no kernel 'sub'; its kernels are \['scale'\]"):
        compile_cubin(SCALE, arch="sm_90", name="sub")


@pytest.mark.parametrize("arch", ["sm_30", "sm_999", "compute_90", "90", ""])
def test_an_architecture_that_nvrtc_does_not_know_is_refused_with_those_it_knows(arch: str) -> None:
    with pytest.raises(CompileError, match=rf"NVRTC \d+\.\d+ does not know '{arch}'; it compiles for .*sm_75, .*sm_90"):
        compile_cubin(SCALE, arch=arch, name="scale")


@pytest.mark.usefixtures("fresh_loader")
def test_missing_bindings_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"NVRTC could not be loaded: install wideload\[cu13\], or wideload\[cu12\]"):
        nvrtc_version()


@pytest.mark.usefixtures("fresh_loader")
def test_a_missing_nvrtc_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc as bindings

    def fail() -> None:
        raise RuntimeError("libnvrtc.so.13: cannot open shared object file")

    monkeypatch.setattr(bindings, "nvrtcVersion", fail)
    with pytest.raises(CompileError, match=r"install wideload\[cu13\].*libnvrtc.so.13: cannot open"):
        compile_cubin(SCALE, arch="sm_90", name="scale")


def test_a_missing_cuda_core_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    with pytest.raises(CompileError, match=r"cuda.core could not be imported: install wideload\[cu13\]"):
        compile_cubin(SCALE, arch="sm_90", name="scale")


def test_the_first_compilations_of_a_process_may_run_side_by_side() -> None:
    """In a new process: two threads that import cuda.core at once find half of it."""
    code = """
from wideload.cache import find_cubins
source = 'extern "C" __global__ void %s(float* x) { x[threadIdx.x] = 1; }'
print(len(find_cubins([(source % name, "sm_90", name) for name in "abcd"])))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "WIDELOAD_CACHE": "0"})
    assert done.stdout == "4\n", done.stderr
