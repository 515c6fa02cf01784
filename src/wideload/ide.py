"""Turns the headers that are installed, CUDA's from NVIDIA's wheels and torch's own, into a ``.clangd`` by which editors find them.

It writes a file and a folder of links; it must not know what the sources there do.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch

from wideload.errors import WideloadError

__all__ = ["Headers", "find_headers", "write_clangd"]

_FILE, _LINKS = ".clangd", ".clangd-cuda"
_MARK = "# Written by `wideload ide`; run it again when the environment has moved."
_WHEELS = "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl"
_NEEDED = ("cuda_runtime.h", "crt/host_defines.h", "nv/target")
"""Of the runtime, of the compiler, and of CCCL, which cuda_fp16.h includes."""
_LIBRARIES = ("cublas", "cusparse", "cusolver", "cufft", "curand")
"""What ATen's headers for CUDA include besides."""
_CLANG_INSTALLATION = ("bin", "lib64")
"""Folders without which clang takes no folder for a CUDA installation; the wheels do not have them all."""


@dataclass(frozen=True, slots=True)
class Headers:
    """``cuda`` holds ``cuda_runtime.h``; ``beside`` are the other folders to look in."""

    cuda: Path
    beside: tuple[Path, ...]


def find_headers() -> Headers:
    """Look for CUDA's headers in NVIDIA's wheels, Conda and ``CUDA_HOME``, and for torch's and Python's where they run.

    Raises ``WideloadError`` where some of CUDA's are missing, with the command that gets them.
    """
    found = {name: _find_cuda_headers(name) for name in ("cudart", "nvcc", "cccl", *_LIBRARIES)}
    cuda = found.pop("cudart")
    folders = [folder for folder in found.values() if folder is not None]
    missing = [name for name in _NEEDED if not any((folder / name).is_file() for folder in [*([cuda] if cuda else []), *folders])]
    if missing or cuda is None:
        raise WideloadError(f"CUDA's headers {', '.join(missing)} were not found: pip install {_WHEELS}, of one version")
    torchs = Path(torch.__file__).parent / "include"
    others = (*folders, torchs, torchs / "torch/csrc/api/include", Path(sysconfig.get_path("include")))
    return Headers(cuda, tuple(dict.fromkeys(folder for folder in others if folder != cuda and folder.is_dir())))


def _find_cuda_headers(name: str) -> Path | None:
    try:
        from cuda.pathfinder import find_nvidia_header_directory
    except ImportError:
        return None
    found: str | None = find_nvidia_header_directory(name)
    return None if found is None else Path(found)


def write_clangd(folder: Path, headers: Headers, *, arch: str = "sm_80", replace: bool = False) -> Path:
    """Write ``.clangd`` into ``folder``, for the CUDA files in it and below, and return its path.

    clang parses them as CUDA for ``arch``; ``blockIdx``, ``__ldg`` and the rest come from its own headers and from CUDA's. A folder
    ``.clangd-cuda`` of links beside it looks like a CUDA installation. Raises ``WideloadError`` for a ``.clangd`` that is someone
    else's, unless ``replace``, and for what is no folder or no architecture.
    """
    if not folder.is_dir():
        raise WideloadError(f"{folder} is no folder")
    if re.fullmatch(r"sm_\d{2,3}a?", arch) is None:
        raise WideloadError(f"arch is {arch!r}; allowed: one that the editor's clang knows, such as sm_80")
    path, links = folder / _FILE, folder / _LINKS
    if path.exists() and not replace and not path.read_text(encoding="utf-8").startswith(_MARK):
        raise WideloadError(f"{path} is there, and not written by wideload; move it away, or replace it by --replace")
    for name in _CLANG_INSTALLATION:
        (links / name).mkdir(parents=True, exist_ok=True)
    include = links / "include"
    include.unlink(missing_ok=True)
    include.symlink_to(headers.cuda)
    (links / ".gitignore").write_text("*\n", encoding="utf-8")
    flags = [
        "-xcuda",
        "-std=c++17",
        f"--cuda-gpu-arch={arch}",
        f"--cuda-path={links.absolute()}",
        "-nocudalib",  # what is linked is none of an editor's business
        "--no-cuda-version-check",  # clang does not know the newest CUDA, and need not
        "-Wno-unknown-cuda-version",
        *(f"-isystem{other}" for other in headers.beside),
    ]
    quoted = "".join(f"    - '{flag}'\n" for flag in (flag.replace("'", "''") for flag in flags))
    path.write_text(f"{_MARK}\nIf:\n  PathMatch: .*\\.cuh?\nCompileFlags:\n  Add:\n{quoted}", encoding="utf-8")
    return path
