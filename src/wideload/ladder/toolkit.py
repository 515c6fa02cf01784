"""Turns what is installed into the compilers that CUDA C++ needs beyond NVRTC: nvcc, a host compiler, ninja.

Looks, and says what is missing and how to get it; it must not know what will be compiled.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from wideload.errors import CompileError

__all__ = ["NVCC_WHEELS", "Nvcc", "find_host_compiler", "find_ninja", "find_nvcc"]

NVCC_WHEELS = "nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm nvidia-cuda-runtime nvidia-cuda-cccl"
"""All that nvcc needs to make a program, from CUDA 13 on; the wheels of CUDA 12 hold no nvcc."""


@dataclass(frozen=True, slots=True)
class Nvcc:
    """An nvcc that runs. ``root`` is its toolkit's folder, with ``include`` and ``lib64``, or ``lib`` in the wheels."""

    path: Path
    root: Path
    version: str

    @property
    def libraries(self) -> Path:
        """Where the runtime's libraries are."""
        return next((folder for folder in (self.root / "lib64", self.root / "lib") if folder.is_dir()), self.root / "lib64")


def find_nvcc() -> Nvcc:
    """Look in NVIDIA's wheels, Conda, ``CUDA_HOME`` and ``PATH``. Raises ``CompileError`` where it is in none, or does not run."""
    found = _find_by_cuda_pathfinder() or shutil.which("nvcc")
    if found is None:
        raise CompileError(f"nvcc was not found: pip install {NVCC_WHEELS}, of one version, or install a CUDA toolkit")
    # A dry run names the toolkit, wherever links and scripts lead.
    said = _ask(found, "--version"), _ask(found, "--dryrun", "none.cu")
    version, here = re.search(r"release [\d.]+, V([\d.]+)", said[0]), re.search(r"^#\$ _HERE_=(.+)$", said[1], re.MULTILINE)
    if version is None or here is None:
        raise CompileError(f"{found} is no nvcc that runs; it said: {' '.join(''.join(said).split())[:200]}")
    return Nvcc(Path(found), Path(here[1]).parent, version[1])


def find_host_compiler() -> str:
    """``CXX`` or g++, with which nvcc compiles what runs on the CPU. Raises ``CompileError`` where there is none."""
    wanted = os.environ.get("CXX") or "g++"
    found = shutil.which(wanted)
    if found is None:
        raise CompileError(f"{wanted} was not found: install g++ (apt-get install g++), or name a compiler in CXX")
    return found


def find_ninja() -> Path:
    """On ``PATH``, or beside this Python. Raises ``CompileError`` where it is at neither."""
    found = shutil.which("ninja") or shutil.which("ninja", path=sysconfig.get_path("scripts"))
    if found is None:
        raise CompileError("ninja was not found, with which torch builds extensions: pip install ninja")
    return Path(found)


def _find_by_cuda_pathfinder() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    found: str | None = find_nvidia_binary_utility("nvcc")
    return found


def _ask(nvcc: str, *options: str) -> str:
    try:
        done = subprocess.run([nvcc, *options], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return done.stdout + done.stderr
