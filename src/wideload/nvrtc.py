"""Turns CUDA C++ text into a cubin, and ptxas' report on it into numbers.

It needs NVRTC but no driver and no GPU, and must not know what the source computes or how it will be launched.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from wideload.errors import CompileError

__all__ = ["Cubin", "compile_cubin", "compile_options", "compile_ptx", "has_nvrtc", "nvrtc_identity", "nvrtc_version"]

_INSTALL = "install wideload[cu13], or wideload[cu12] where the driver is for CUDA 12"
_IMPORT_LOCK = threading.Lock()
_CONTEXT_LINES = 2
"""Source lines shown before and after one that NVRTC refused."""
_WHEELS = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12")
"""NVRTC on PyPI, for CUDA 13 and for CUDA 12; where both are installed, cuda.pathfinder chooses."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """One kernel compiled for one architecture, and what ptxas said of it.

    Spills count those of the kernel and of the device functions beside it; the other figures are the kernel's own
    (``registers`` is for each thread and covers what it calls, ``shared_bytes`` is what it declares).
    """

    code: bytes = field(repr=False)
    arch: str
    name: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    log: str = field(repr=False, compare=False)


def compile_cubin(source: str, *, arch: str, name: str, fma: bool = False, lineinfo: bool = True) -> Cubin:
    """Compile the kernel ``name`` of ``source`` for ``arch`` (``"sm_90"``).

    ``source`` includes nothing; its kernels are ``extern "C"``. ``fma`` lets the compiler contract ``a * b + c``:
    off, since a kernel says itself where it contracts. ``lineinfo`` costs nothing at run time and maps SASS to source lines;
    the file it names is virtual, so that equal sources give equal cubins wherever they are compiled. Safe in any thread.

    Raises ``CompileError``: NVRTC refused the source (with its log and the lines it names), does not know ``arch``, or is not installed;
    or ``source`` has no kernel ``name``.
    """
    _, code, log = _compile(source, arch=arch, name=name, fma=fma, lineinfo=lineinfo)
    kernels, device_functions = _parse_ptxas_log(log)
    if name not in kernels:
        raise _no_kernel(name, kernels)
    kernel = kernels[name]
    return Cubin(
        code=code,
        arch=arch,
        name=name,
        registers=kernel["registers"],
        spill_store_bytes=sum(function["spill_stores"] for function in (kernel, *device_functions)),
        spill_load_bytes=sum(function["spill_loads"] for function in (kernel, *device_functions)),
        stack_bytes=kernel.get("cumulative_stack", kernel["stack"]),
        shared_bytes=kernel.get("shared", 0),
        log=log,
    )


def compile_ptx(source: str, *, arch: str, name: str, fma: bool = False, lineinfo: bool = True) -> str:
    """Return the PTX that lies between ``source`` and its cubin for ``arch``; errors as `compile_cubin`."""
    program, *_ = _compile(source, arch=arch, name=name, fma=fma, lineinfo=lineinfo)
    # Not compile("ptx"): that asks the driver whether it could load the result, and so needs one.
    nvrtc = _load_nvrtc()
    _, nbytes = nvrtc.nvrtcGetPTXSize(program.handle)
    ptx = bytearray(nbytes)
    nvrtc.nvrtcGetPTX(program.handle, ptx)
    text = ptx.decode().rstrip("\0")
    kernels = _ENTRY.findall(text)
    if name not in kernels:
        raise _no_kernel(name, kernels)
    return text


_ENTRY = re.compile(r"\.entry\s+([\w$]+)")


def _no_kernel(name: str, kernels: Iterable[str]) -> CompileError:
    mangled = next((other for other in kernels if other.startswith(f"_Z{len(name)}{name}")), None)
    if mangled is not None:
        return CompileError(f'kernel {name!r} is not extern "C", and so is called {mangled}. Write extern "C" __global__ void {name}(...)')
    return CompileError(f"the source has no kernel {name!r}; its kernels are {sorted(kernels)}")


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's version, such as ``(13, 0)``. Raises ``CompileError`` where it is not installed."""
    _, major, minor = _load_nvrtc().nvrtcVersion()
    return major, minor


def has_nvrtc() -> bool:
    """Whether NVRTC can be loaded here."""
    try:
        _load_nvrtc()
    except CompileError:
        return False
    return True


@cache
def nvrtc_identity() -> str:
    """Return which NVRTC compiles here, to tell its cubins from those of another; ``CompileError`` where it is not installed.

    The versions of its wheels, which takes half a millisecond; only where there is no wheel is the library loaded and asked: 10 ms.
    """
    found = [f"{wheel} {version}" for wheel in _WHEELS if (version := _wheel_version(wheel)) is not None]
    return ", ".join(found) or f"NVRTC {_version()}"


def _wheel_version(wheel: str) -> str | None:
    import importlib.metadata  # here: it may bring the email package with it

    try:
        return importlib.metadata.version(wheel)
    except importlib.metadata.PackageNotFoundError:
        return None


def compile_options(*, arch: str, name: str, fma: bool = False, lineinfo: bool = True) -> dict[str, Any]:
    """Return all that decides the cubin besides the source, as keywords of cuda.core's ``ProgramOptions``."""
    # The file name is absolute: NVRTC puts a relative one behind the working directory.
    return {"name": f"/wideload/{name}.cu", "arch": arch, "std": "c++17", "fma": fma, "lineinfo": lineinfo, "ptxas_options": "-v"}


@cache
def _supported_archs() -> tuple[int, ...]:
    _, archs = _load_nvrtc().nvrtcGetSupportedArchs()
    return tuple(archs)


@cache
def _load_nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    # The bindings raise an ImportError of their own or, where only the library is missing, a RuntimeError.
    except (ImportError, RuntimeError) as error:
        raise CompileError(f"NVRTC could not be loaded: {_INSTALL}; the loader said: {error}") from error
    return nvrtc


def _compile(source: str, *, arch: str, name: str, fma: bool, lineinfo: bool) -> tuple[Any, bytes, str]:
    """Return cuda.core's program, the cubin that NVRTC made of it, and the log."""
    number = re.fullmatch(r"sm_(\d+)", arch)
    if number is None or int(number[1]) not in _supported_archs():
        known = ", ".join(f"sm_{number}" for number in _supported_archs())
        raise CompileError(f"NVRTC {_version()} does not know {arch!r}; it compiles for {known}")
    try:
        with _IMPORT_LOCK:  # two threads that import it at once find it unfinished
            from cuda.core import Program, ProgramOptions  # here: the import takes 100 ms
    except ImportError as error:
        raise CompileError(f"cuda.core could not be imported: {_INSTALL}; Python said: {error}") from error

    log = io.StringIO()
    chosen = compile_options(arch=arch, name=name, fma=fma, lineinfo=lineinfo)
    # NVRTC 13 may answer from a cache of its own, and then ptxas reports nothing; NVRTC 12 has neither the cache nor the option.
    no_cache = nvrtc_version() >= (13, 0)
    try:
        program = Program(source, "c++", ProgramOptions(**chosen, no_cache=no_cache))
        code: bytes = program.compile("cubin", logs=log).code
    except Exception as error:  # cuda.core's own classes are private
        said = str(error).rstrip("\0 \n")
        raise CompileError(
            f"NVRTC {_version()} refused {name!r} for {arch}: {said}{_excerpt(source, chosen['name'], said)}{_hint(said)}"
        ) from error
    return program, code, log.getvalue().rstrip("\0\n")


def _version() -> str:
    return "{}.{}".format(*nvrtc_version())


def _excerpt(source: str, file_name: str, log: str) -> str:
    """Return the numbered source lines around each that ``log`` calls an error, or nothing where it names none."""
    refused = {int(line) for line in re.findall(re.escape(file_name) + r"\((\d+)\): (?:catastrophic )?error", log)}
    shown = (
        f"{'>' if number in refused else ' '}{number:5} | {line}"
        for number, line in enumerate(source.splitlines(), start=1)
        if any(abs(number - error) <= _CONTEXT_LINES for error in refused)
    )
    return "".join(f"\n{line}" for line in shown)


_MISSING_HEADER = re.compile(r'(?:could not|cannot) open source file "([^"]+)"')


def _hint(log: str) -> str:
    """What to write instead of an include, where ``log`` says that there was one."""
    header = _MISSING_HEADER.search(log)
    if header is None:
        return ""
    hint = f"\nNVRTC is given no headers here, and so no {header[1]}: what the kernel needs has to stand in its own source"
    if header[1] in ("cuda_fp16.h", "cuda_fp16.hpp"):
        hint += (
            '. For halves: struct __half { unsigned short bits; }; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits)); '
            'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));'
        )
    if header[1] in ("cuda_bf16.h", "cuda_bf16.hpp"):
        hint += ". For bf16: the conversions of wideload's bf16.cuh, which wideload check --new cast writes beside a kernel"
    return hint


_PTXAS_FIGURES = {
    "stack": r"(\d+) bytes stack frame",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
    "registers": r"Used (\d+) registers",
    "cumulative_stack": r"(\d+) bytes cumulative stack size",
    "shared": r"(\d+) bytes smem",
}


def _parse_ptxas_log(log: str) -> tuple[dict[str, dict[str, int]], tuple[dict[str, int], ...]]:
    """Return the figures of each kernel, by name, and those of the device functions that were not inlined."""
    kernels = set(re.findall(r"Compiling entry function '(\S+)'", log))
    parts = re.split(r"Function properties for (\S+)", log)[1:]
    figures = {
        name: {key: int(found[1]) for key, pattern in _PTXAS_FIGURES.items() if (found := re.search(pattern, text))}
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return {name: figures[name] for name in kernels}, tuple(figures[name] for name in figures.keys() - kernels)
