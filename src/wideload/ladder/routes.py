"""Turns the ladder's first kernels into what runs without `wl.raw`: a program that nvcc builds, and an extension of torch.

Knows command lines and what is printed or returned; it must not know how a kernel adds.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from wideload.errors import CompileError, WideloadError
from wideload.ladder.rungs import N
from wideload.ladder.toolkit import Nvcc, find_host_compiler, find_ninja, find_nvcc
from wideload.measure import bench, random_tensor

__all__ = [
    "SCHEMA", "SOURCES", "Built", "Route", "RouteTime", "build_extension", "build_standalone", "check_extension", "run_standalone",
    "time_extension",
]  # fmt: skip

SCHEMA = "wideload.route/1"
"""The number behind the slash grows when a key changes its name or its meaning."""

_BYTES_PER_GB = 1e9


class Route(StrEnum):
    """A program of its own, or an extension of torch."""

    STANDALONE = "standalone"
    EXTENSION = "extension"


_FOLDER = Path(str(resources.files("wideload"))) / "ladder"
SOURCES: Mapping[Route, Path] = {
    Route.STANDALONE: _FOLDER / "standalone" / "vector_add.cu",
    Route.EXTENSION: _FOLDER / "extension" / "vector_add.cu",
}
_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
_SIZES = (0, 1, 7, 8, 9, 1000, 4097)
"""The articles', and none."""
_ROW = re.compile(
    r"^(?P<dtype>\w+) +(?P<us>[\d.]+) us +(?P<gbps>[\d.]+) GB/s(?: +(?P<percent>[\d.]+) % of nominal, least [\d.]+ us)?"
    r"; (?P<wrong>\d+) of (?P<checked>\d+) results wrong$",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Built:
    """What a route made: the program or the library, for one architecture, and by which nvcc."""

    route: Route
    path: str
    arch: str
    nvcc: str

    def to_dict(self, times: tuple[RouteTime, ...] = ()) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        return {"schema": SCHEMA, **dataclasses.asdict(self), "times": [dataclasses.asdict(time) for time in times]}


@dataclass(frozen=True, slots=True)
class RouteTime:
    """One dtype's time in us, the bandwidth in GB/s and its share of nominal, torch's time beside it, and what is wrong."""

    dtype: str
    time_us: float | None
    gbps: float | None
    share_of_nominal: float | None
    torch_us: float | None = None
    fault: str = ""

    def __str__(self) -> str:
        torchs = f", torch {self.torch_us:.1f} us" if self.torch_us else ""
        share = f", {self.share_of_nominal:.1%} of nominal" if self.share_of_nominal else ""
        figures = f"{self.time_us:.1f} us, {self.gbps:.0f} GB/s{share}{torchs}" if self.time_us and self.gbps else "not timed"
        return f"{self.dtype:<5} {figures}{f'; {self.fault}' if self.fault else ''}"


# ---- the program


def build_standalone(arch: str, output: Path) -> Built:
    """Compile the program for ``arch`` (``sm_90``) to the file ``output``, which is not overwritten.

    Raises ``WideloadError`` where it is there already, and ``CompileError`` for what is missing or refused.
    """
    if output.exists():
        raise WideloadError(f"{output} is there already, and is not overwritten. Move it away, or name another: --output FILE")
    nvcc = find_nvcc()
    command = [str(nvcc.path), "-O3", f"-arch={arch}", "-lineinfo", "-ccbin", find_host_compiler(), f"-L{nvcc.libraries}"]
    done = subprocess.run([*command, str(SOURCES[Route.STANDALONE]), "-o", str(output)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(
            f"nvcc {nvcc.version} refused {SOURCES[Route.STANDALONE].name} for {arch}:\n{(done.stderr or done.stdout).rstrip()}"
        )
    return Built(Route.STANDALONE, str(output.absolute()), arch, nvcc.version)


def run_standalone(program: str, num_elements: int = N, device: int = 0) -> tuple[RouteTime, ...]:
    """Run the program and read what it prints. Raises ``WideloadError`` with the line of the call that failed."""
    done = subprocess.run([program, str(num_elements), str(device)], capture_output=True, text=True, check=False)
    times = tuple(_read_time(row) for row in _ROW.finditer(done.stdout))
    if done.returncode and not any(time.fault for time in times):
        raise WideloadError(f"{program} exited with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return times


def _read_time(row: re.Match[str]) -> RouteTime:
    share = float(row["percent"]) / 100 if row["percent"] else None
    fault = f"{row['wrong']} of {row['checked']} results are wrong" if int(row["wrong"]) else ""
    return RouteTime(row["dtype"], float(row["us"]), float(row["gbps"]), share, fault=fault)


# ---- the extension

_NAME = "wideload_vector_add"
_DECLARATION = "#include <torch/extension.h>\nat::Tensor vector_add(const at::Tensor& x, const at::Tensor& y);"


def build_extension(arch: str) -> tuple[Built, Any]:
    """Compile the extension for ``arch`` by torch's ``load_inline`` and import it: ``module.vector_add(x, y)`` returns a new tensor.

    torch keeps it in a folder of its own (``TORCH_EXTENSIONS_DIR``), and builds only what has changed. Raises ``CompileError`` for what
    is missing: a torch with CUDA, nvcc, a host compiler, ninja.
    """
    if torch.version.cuda is None:
        raise CompileError(
            f"this torch, {torch.__version__}, is built without CUDA, and extensions with kernels need one with it: "
            "pip install torch --index-url https://download.pytorch.org/whl/cu130"
        )
    nvcc = find_nvcc()
    find_host_compiler()
    with _build_environment(nvcc, find_ninja(), arch):
        cpp_extension: Any = importlib.import_module("torch.utils.cpp_extension")  # it looks for CUDA when it is imported
        cpp_extension.CUDA_HOME = str(nvcc.root)
        folder = Path(cpp_extension._get_build_directory(_NAME, False))
        try:
            module = cpp_extension.load_inline(
                name=_NAME,
                cpp_sources=[_DECLARATION],
                cuda_sources=[f'#include "{SOURCES[Route.EXTENSION]}"'],  # errors then name the file, and ninja sees it change
                functions=["vector_add"],
                extra_cuda_cflags=["-O3", "-lineinfo"],
                extra_ldflags=[f"-L{_link_runtime(nvcc, folder)}"],
                build_directory=str(folder),
                with_cuda=True,
                no_implicit_headers=True,
            )
        except (RuntimeError, OSError, ImportError) as error:
            raise CompileError(f"torch could not build {SOURCES[Route.EXTENSION]} for {arch}: {error}") from error
    return Built(Route.EXTENSION, str(module.__file__), arch, nvcc.version), module


@contextmanager
def _build_environment(nvcc: Nvcc, ninja: Path, arch: str) -> Iterator[None]:
    """What torch's builder reads."""
    major, minor = re.fullmatch(r"sm_(\d+)(\d[af]?)", arch).groups()  # type: ignore[union-attr]
    path = os.pathsep.join((str(ninja.parent), os.environ.get("PATH", "")))
    wanted = {"CUDA_HOME": str(nvcc.root), "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}", "PATH": path}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _link_runtime(nvcc: Nvcc, folder: Path) -> Path:
    """Where the linker finds ``libcudart.so``: the wheels have it only under the name with its version."""
    if (nvcc.libraries / "libcudart.so").exists():
        return nvcc.libraries
    library = next(nvcc.libraries.glob("libcudart.so.*"), None)
    if library is None:
        raise CompileError(f"{nvcc.libraries} has no libcudart.so: pip install nvidia-cuda-runtime, of nvcc's version {nvcc.version}")
    link = folder / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library)
    return folder


def check_extension(module: Any, device: torch.device | str) -> tuple[str, ...]:
    """Return where its results are not ``torch.add``'s bit for bit, at the articles' sizes: nothing if right."""
    return tuple(
        f"{name} of {n}: differs from torch.add"
        for name, dtype in _DTYPES.items()
        for n in _SIZES
        for x, y in [[random_tensor((n,), dtype, device=device, seed=seed) for seed in (0, 1)]]
        if not torch.equal(module.vector_add(x, y), torch.add(x, y))
    )


def time_extension(module: Any, device: torch.device | str, num_elements: int = N, max_seconds: float = 0.5) -> tuple[RouteTime, ...]:
    """Time it beside ``torch.add`` by `wl.bench`, which compares the results first."""
    times = []
    for name, dtype in _DTYPES.items():
        x, y = (random_tensor((num_elements,), dtype, device=device, seed=seed) for seed in (0, 1))
        result = bench(
            module.vector_add,
            x,
            y,
            name="extension",
            against={"torch": torch.add},
            check=torch.add,
            bytes=3 * x.nbytes,
            max_seconds=max_seconds,
        )
        own, torchs = result.subject, result["torch"]
        times.append(
            RouteTime(
                name,
                own.time_us.median if own.time_us else None,
                own.bytes_per_second / _BYTES_PER_GB if own.bytes_per_second else None,
                result.share_of_nominal(own),
                torchs.time_us.median if torchs.time_us else None,
                "" if own.time_us else "; ".join(map(str, own.labels)),
            )
        )
    return tuple(times)
