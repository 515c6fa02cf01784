"""Turns an installation into a diagnosis: what is there, what is missing, what follows from it, and the one command that gets it.

`gather_facts` looks and tries, `judge` decides from what it found alone; neither prints.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import re
import shlex
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from wideload.errors import CompileError
from wideload.fused import fuse
from wideload.gpus import MIN_COMPUTE_CAPABILITY
from wideload.native import NativeState, native_state
from wideload.nvrtc import compile_cubin, nvrtc_version
from wideload.sass import find_nvdisasm
from wideload.store import FolderState, inspect_folder

__all__ = ["Check", "Diagnosis", "Facts", "GpuFacts", "diagnose", "gather_facts", "judge"]

State = Literal["ok", "missing", "problem"]
Version = tuple[int, int]

MIN_TORCH: Version = (2, 10)
DEFAULT_ARCH = "sm_90"
"""Compiled for where there is no GPU."""

_PROBE = 'extern "C" __global__ void probe(float* x) { x[threadIdx.x] *= 2; }'
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU that torch sees; the errors are those of compiling a kernel for it and of running one on it, if any."""

    name: str
    compute_capability: Version
    compile_error: str | None = None
    launch_error: str | None = None

    @property
    def is_supported(self) -> bool:
        """Whether kernels can be made for it."""
        return self.compute_capability >= MIN_COMPUTE_CAPABILITY


@dataclass(frozen=True, slots=True)
class Facts:
    """What was found. None for what is absent; CUDA's versions are ``(13, 0)``.

    ``num_gpus`` is the driver's count, ``gpus`` are those that torch sees. ``compile_error`` is that of `DEFAULT_ARCH`. ``tools``
    are paths of programs. ``core``, ``bindings`` and ``nvrtc`` come with the error, where they could not be loaded.
    """

    torch: str
    torch_cuda: Version | None
    driver: str | None
    driver_cuda: Version | None
    num_gpus: int
    gpus: tuple[GpuFacts, ...]
    gpus_error: str | None
    core: str | None
    core_error: str | None
    bindings: str | None
    nvrtc: Version | None
    nvrtc_error: str | None
    compile_error: str | None
    tools: tuple[tuple[str, str | None], ...]
    cache: FolderState
    native: NativeState


@dataclass(frozen=True, slots=True)
class Check:
    """One row: what was looked at, how it is, what was found, what follows, and the command that helps, where there is one."""

    name: str
    state: State
    found: str
    follows: str = ""
    command: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All rows. Healthy is an installation that compiles kernels and, where there is a GPU, runs them on every supported one."""

    checks: tuple[Check, ...]
    can_compile: bool
    has_gpu: bool
    can_launch: bool

    @property
    def is_healthy(self) -> bool:
        """What the exit status says."""
        return self.can_compile and (self.can_launch or not self.has_gpu)


def diagnose() -> Diagnosis:
    """Look at this machine, compile a kernel, and run one on each supported GPU."""
    return judge(gather_facts())


# ---- looking


def gather_facts() -> Facts:
    """Find out everything; what fails is a fact too."""
    driver_cuda, num_gpus = _ask_driver()
    gpus, gpus_error = _find_gpus()
    core, core_error = _find_module("cuda.core")
    bindings, _ = _find_module("cuda.bindings")
    nvrtc, nvrtc_error = _attempt(nvrtc_version)
    _, compile_error = _attempt(lambda: _compile(DEFAULT_ARCH))
    return Facts(
        torch=torch.__version__,
        torch_cuda=_parse_version(torch.version.cuda),
        driver=_kernel_module_version(),
        driver_cuda=driver_cuda,
        num_gpus=num_gpus,
        gpus=gpus,
        gpus_error=gpus_error,
        core=core,
        core_error=core_error,
        bindings=bindings,
        nvrtc=nvrtc,
        nvrtc_error=nvrtc_error,
        compile_error=compile_error,
        tools=(("nvdisasm", _find_nvdisasm()), ("cuobjdump", _find_tool("cuobjdump")), ("g++", _find_tool("g++"))),
        cache=inspect_folder(),
        native=native_state(wait=True),
    )


def _attempt(function: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return the result, or the first line of what went wrong: a diagnosis ends for no fault that it could report."""
    try:
        return function(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _ask_driver() -> tuple[Version | None, int]:
    """Return the CUDA version that the driver is for, and how many GPUs it has; by hand, as the bindings may be what is missing."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, 0
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    if cuda.cuInit(0) == 0:
        cuda.cuDeviceGetCount(ctypes.byref(count))
    return (version.value // 1000, version.value % 1000 // 10), count.value


def _kernel_module_version() -> str | None:
    """``580.65.06``, which CUDA's version does not tell; Linux alone has the file, and WSL has not."""
    with contextlib.suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", Path("/proc/driver/nvidia/version").read_text(encoding="utf-8"))
        return found and found[0]
    return None


def _find_gpus() -> tuple[tuple[GpuFacts, ...], str | None]:
    """Return the GPUs that torch sees and have been tried, or why it sees none."""
    if torch.version.cuda is None:
        return (), None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        count, error = _attempt(lambda: torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if not count:
        return (), error or (str(caught[0].message).splitlines()[0] if caught else None)
    return tuple(_try_gpu(index) for index in range(count)), None


def _try_gpu(index: int) -> GpuFacts:
    gpu = GpuFacts(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index))
    if not gpu.is_supported:
        return gpu
    _, compile_error = _attempt(lambda: _compile("sm_{}{}".format(*gpu.compute_capability)))
    _, launch_error = _attempt(lambda: _launch(index))
    return GpuFacts(gpu.name, gpu.compute_capability, compile_error, launch_error)


def _compile(arch: str) -> None:
    compile_cubin(_PROBE, arch=arch, name="probe")  # past the cache, which would prove nothing


def _launch(index: int) -> None:
    x = torch.arange(1000.0, device=torch.device("cuda", index))
    if not torch.equal(fuse(lambda x: x * 2 + 1)(x).cpu(), torch.arange(1.0, 2001.0, 2.0)):
        raise CompileError("the kernel ran and its results are wrong")


def _find_module(name: str) -> tuple[str | None, str | None]:
    module, error = _attempt(lambda: importlib.import_module(name))
    return (None, error) if error else (str(module.__version__), None)


def _find_nvdisasm() -> str | None:
    path, _ = _attempt(find_nvdisasm)
    return path and str(path)


def _find_tool(name: str) -> str | None:
    """In NVIDIA's wheels and toolkits, or on the PATH."""
    with contextlib.suppress(Exception):  # not installed, or a program that it does not know
        from cuda.pathfinder import find_nvidia_binary_utility

        if path := find_nvidia_binary_utility(name):
            return str(path)
    return shutil.which(name)


def _parse_version(text: str | None) -> Version | None:
    found = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


# ---- judging


def judge(facts: Facts) -> Diagnosis:
    """Decide what the facts mean."""
    compile_check, can_compile = _judge_compiling(facts)
    gpu_checks, can_launch = _judge_gpus(facts)
    checks = (
        _judge_torch(facts),
        _judge_driver(facts),
        *gpu_checks,
        _judge_core(facts),
        _judge_bindings(facts),
        _judge_nvrtc(facts),
        compile_check,
        *(_judge_tool(name, path) for name, path in facts.tools),
        _judge_cache(facts.cache),
        _judge_native(facts.native),
    )
    return Diagnosis(checks, can_compile, facts.num_gpus > 0 or bool(facts.gpus), can_launch)


def _major(facts: Facts) -> int:
    """CUDA's major to install: torch's own, as pip resolves no other beside it; else the driver's; 13 where neither is."""
    return min(version[0] for version in (facts.torch_cuda, facts.driver_cuda, (13, 0)) if version is not None)


def _install(facts: Facts) -> str:
    return f'pip install "wideload[cu{_major(facts)}]"'


def _judge_torch(facts: Facts) -> Check:
    channel = "cu130" if _major(facts) >= 13 else "cu128"
    found = f"{facts.torch.partition('+')[0]}, {'CPU build' if facts.torch_cuda is None else 'CUDA {}.{}'.format(*facts.torch_cuda)}"
    if (_parse_version(facts.torch) or (0, 0)) < MIN_TORCH:
        return Check("torch", "problem", found, "wideload needs {}.{} or newer".format(*MIN_TORCH), 'pip install --upgrade "torch>=2.10"')
    if facts.torch_cuda is None and facts.num_gpus:
        command = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{channel}"
        return Check("torch", "problem", found, "it cannot use this machine's GPU", command)
    if facts.torch_cuda is not None and facts.driver_cuda is not None and facts.torch_cuda[0] > facts.driver_cuda[0]:
        command = f"pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/{channel}"
        return Check("torch", "problem", found, "it is built for a newer CUDA than the driver's", command)
    return Check("torch", "ok", found, "" if facts.torch_cuda else "CPU tensors are computed by the reference")


def _judge_driver(facts: Facts) -> Check:
    if facts.driver_cuda is None:
        follows = "kernels can be compiled, not launched"
        return Check("driver", "missing", "no libcuda.so.1", follows, "sudo apt-get install nvidia-open  # in a container: --gpus all")
    found = " for ".join(filter(None, (facts.driver, "CUDA {}.{}".format(*facts.driver_cuda))))
    return Check("driver", "ok", found)


def _judge_gpus(facts: Facts) -> tuple[list[Check], bool]:
    """One row for each GPU; true if there is a supported one, and all of them run kernels."""
    if not facts.gpus:
        error = facts.gpus_error if facts.driver_cuda else None  # without a driver, torch has only that to say
        state: State = "problem" if facts.num_gpus or error else "missing"
        found = error or (f"{facts.num_gpus}, which torch does not see" if facts.num_gpus else "none")
        return [Check("GPU", state, found, "kernels can be compiled, not launched", "nvidia-smi" if error else "")], False
    checks = []
    for index, gpu in enumerate(facts.gpus):
        found = f"{gpu.name}, sm_{gpu.compute_capability[0]}{gpu.compute_capability[1]}"
        name = f"GPU {index}"
        if not gpu.is_supported:
            checks.append(Check(name, "problem", found, "too old: wideload needs sm_{}{} or newer".format(*MIN_COMPUTE_CAPABILITY)))
        elif error := gpu.compile_error or gpu.launch_error:
            checks.append(Check(name, "problem", found, f"no kernel runs on it: {error}", _install(facts)))
        else:
            checks.append(Check(name, "ok", f"{found}, ran a kernel"))
    supported = [gpu for gpu in facts.gpus if gpu.is_supported]
    return checks, bool(supported) and not any(gpu.compile_error or gpu.launch_error for gpu in supported)


def _judge_core(facts: Facts) -> Check:
    if facts.core is None:
        return Check("cuda.core", "missing", facts.core_error or "not installed", "nothing can be compiled or launched", _install(facts))
    return Check("cuda.core", "ok", facts.core)


def _judge_bindings(facts: Facts) -> Check:
    if facts.bindings is None:
        return Check("cuda.bindings", "missing", "not installed", "nothing can be compiled or launched", _install(facts))
    version = _parse_version(facts.bindings)
    if version is not None and facts.driver_cuda is not None and version > facts.driver_cuda:
        # It asks the driver for functions that this one does not have yet.
        follows = "newer than the driver: fine, but compute-sanitizer reports cuGetProcAddress errors; ignore them"
        return Check("cuda.bindings", "ok", facts.bindings, follows)
    return Check("cuda.bindings", "ok", facts.bindings)


def _judge_nvrtc(facts: Facts) -> Check:
    if facts.nvrtc is None:
        return Check("NVRTC", "missing", facts.nvrtc_error or "not installed", "nothing can be compiled", _install(facts))
    found = "{}.{}".format(*facts.nvrtc)
    if facts.driver_cuda is not None and facts.nvrtc[0] > facts.driver_cuda[0]:
        follows = "the driver, for CUDA {}.{}, refuses what it compiles".format(*facts.driver_cuda)
        return Check("NVRTC", "problem", found, follows, _install(facts))
    return Check("NVRTC", "ok", found)


def _judge_compiling(facts: Facts) -> tuple[Check, bool]:
    """By the GPUs that are there, or by `DEFAULT_ARCH` where there is none."""
    supported = [gpu for gpu in facts.gpus if gpu.is_supported]
    archs = sorted({"sm_{}{}".format(*gpu.compute_capability) for gpu in supported}) or [DEFAULT_ARCH]
    errors = [gpu.compile_error for gpu in supported if gpu.compile_error] if supported else [facts.compile_error]
    error = next(filter(None, errors), None)
    if error:
        return Check("compiling", "problem", error, "no kernel can be made", _install(facts)), False
    return Check("compiling", "ok", f"compiled a kernel for {', '.join(archs)}"), True


_TOOLS = {
    "nvdisasm": ("plan(...).sass and the demo's count of wide accesses fail", "pip install nvidia-cuda-nvdisasm"),
    "cuobjdump": ("only nvdisasm reads cubins here", "pip install nvidia-cuda-cuobjdump"),
    "g++": ("optional: the tests that run kernels on the CPU fail", "sudo apt-get install g++"),
}


def _judge_tool(name: str, path: str | None) -> Check:
    follows, command = _TOOLS[name]
    return Check(name, "ok", path) if path else Check(name, "missing", "not found", follows, command)


def _judge_cache(cache: FolderState) -> Check:
    follows = "every process compiles its kernels again"
    if cache.path is None:
        return Check("cache", "missing", cache.fault or "", follows, "unset WIDELOAD_CACHE")
    if cache.fault is not None:
        command = f"chmod go-w {shlex.quote(str(cache.path))}" if "others may write" in cache.fault else "export WIDELOAD_CACHE_DIR=..."
        return Check("cache", "problem", f"{cache.path}: {cache.fault}", follows, command)
    size = f"{len(cache.entries)} kernels, {cache.nbytes / _MIB:.1f} MiB"
    return Check("cache", "ok", f"{cache.path}, of user {cache.owner}, writable, {size}")


def _judge_native(native: NativeState) -> Check:
    if native.is_ready:
        return Check("calls in C", "ok", "calls like earlier ones are guarded and launched in C")
    fault = native.fault or ""
    is_left_out = any(what in fault for what in ("is a program", "Python.h"))
    command = "unset WIDELOAD_CC" if "WIDELOAD_CC" in fault else "sudo apt-get install gcc python3-dev" if is_left_out else ""
    return Check("calls in C", "missing", fault, "optional: Python does it, at a third more of a call's cost to the host", command)
