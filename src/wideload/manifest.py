"""Turns compiled kernels into a folder that needs no compiler, and such folders into cubins: files, and a manifest that is checked.

Knows kernels' texts, files and figures; never how a function becomes a text, nor whether anything can be compiled here.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from wideload.decode import decode, parse_json
from wideload.errors import CompileError, WideloadError
from wideload.nvrtc import Cubin, compile_options
from wideload.store import built_folders, read_file

__all__ = [
    "MANIFEST", "ListedKernel", "Manifest", "Recipe", "describe_missing", "find_built", "kernel_key", "read_manifest",
    "write_built",
]  # fmt: skip

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the manifest and of the keys in it. A folder of another format is refused, and begun anew by whoever builds into it."""

_LOCK = ".lock"
_FILE = re.compile(r"\w+\.sm_\d+\.[0-9a-f]{16}\.cubin(\.part)?")
"""Files of our own making: kernel, architecture, and the first `_DIGITS` of the cubin's digest."""
_DIGITS = 16
"""64 bits: two of a thousand cubins share them with a probability of 3e-14."""
_COMMENT = re.compile(r"[ \t]*//.*")
_FIGURES = tuple(field.name for field in fields(Cubin) if field.name not in ("code", "log"))


@dataclass(frozen=True, slots=True)
class Recipe:
    """The call that a kernel is built for, as ``wideload build`` takes it.

    ``is_command`` says that it can be typed: the function has a place in a module, and each argument a spelling. ``in_place`` is the
    argument that is ``out=`` as well; ``wanted`` are those whose gradients are built, none of them where all are.
    """

    function: str
    operands: tuple[str, ...]
    is_command: bool = True
    in_place: str | None = None
    backward: bool = False
    wanted: tuple[str, ...] = ()

    def command(self, arch: str, folder: object) -> str:
        """What adds the kernels of this call to ``folder``: a command or, where it cannot be typed, Python.

        >>> Recipe("swiglu", ("bf16[8, 64]", "bf16[8, 64]")).command("sm_90", "kernels")
        "wideload build swiglu 'bf16[8, 64]' 'bf16[8, 64]' --target sm_90 -o kernels"
        """
        if not self.is_command:
            operands = ", ".join((*self.operands, *(() if self.in_place is None else (f"out={self.in_place}",))))
            rest = ", backward=True" if self.backward else ""
            return f"{self.function}.build([signature], [{arch!r}], {str(folder)!r}{rest}), of the signature ({operands})"
        words = [self.function, *self.operands, *(() if self.in_place is None else ("--in-place", self.in_place))]
        words += [word for name in self.wanted for word in ("--grad", name)] or ["--backward"] * self.backward
        return shlex.join(["wideload", "build", *words, "--target", arch, "-o", str(folder)])


@dataclass(frozen=True, slots=True)
class ListedKernel:
    """One cubin of a folder: its file and digest, ptxas' figures as in `Cubin`, which NVRTC made it, and the calls it was built for."""

    name: str
    arch: str
    file: str
    nbytes: int
    sha256: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    shared_bytes: int
    nvrtc: str
    recipes: tuple[Recipe, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder holds, by `kernel_key`; ``wideload`` is the version that planned the kernels."""

    format: int
    wideload: str
    kernels: dict[str, ListedKernel]


def kernel_key(source: str, *, arch: str, name: str, fma: bool = False) -> str:
    """Return what a kernel is found by: 64 hex digits of all that decides what it computes, for which NVRTC need not be there.

    Comments are left out: they quote lines of the user's source, which need not be where the function runs.
    """
    inputs = (FORMAT, compile_options(arch=arch, name=name, fma=fma), _COMMENT.sub("", source))
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


# ---- reading


def find_built(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin | None:
    """Return the cubin of a kernel from the first of `built_folders` that lists it, None where none does.

    Raises ``CompileError``: a folder without a manifest, a manifest that cannot be read or is another version's, a cubin that is not
    the one listed.
    """
    folders = built_folders()
    if not folders:
        return None
    key = kernel_key(source, arch=arch, name=name, fma=fma)
    for folder in folders:
        kernel = read_manifest(folder).kernels.get(key)
        if kernel is not None:
            return _read_cubin(folder, kernel, arch, name)
    return None


def read_manifest(folder: Path) -> Manifest:
    """Return what a folder holds. Raises ``CompileError`` as `find_built` does."""
    path = folder / MANIFEST
    try:
        status = path.stat()
    except OSError as error:
        raise CompileError(
            f"WIDELOAD_BUILT_DIR names {folder}, which is no folder that wideload build wrote: {error.strerror}: {path}. "
            f"Name another, or build it: wideload build FUNCTION OPERANDS --target GPU -o {folder}"
        ) from None
    return _parse_manifest(path, status.st_mtime_ns, status.st_size, status.st_ino)


@functools.lru_cache
def _parse_manifest(path: Path, *_: int) -> Manifest:
    """Parsed again when the file is another."""
    try:
        values = parse_json(read_file(path))
        written = values.get("format"), values.get("wideload")
        if written == (FORMAT, _version()):
            return decode(Manifest, values, "the manifest")
    except (OSError, ValueError, AttributeError, WideloadError) as error:
        raise CompileError(f"{path} cannot be read: {error}. Remove {path.parent}, and build it again: its calls are lost.") from None
    raise CompileError(
        f"{path} was written by wideload {written[1]} in format {written[0]}; this is wideload {_version()}, which reads format {FORMAT} "
        f"and may plan other kernels. Build {path.parent} again with this version: the recipes in the manifest are the calls."
    )


def _read_cubin(folder: Path, kernel: ListedKernel, arch: str, name: str) -> Cubin:
    path = folder / kernel.file
    again = f"Build it again: {kernel.recipes[0].command(arch, folder)}" if kernel.recipes else "Build it again."
    if (kernel.name, kernel.arch) != (name, arch):
        raise CompileError(f"{folder / MANIFEST} lists {kernel.name} for {kernel.arch} under the key of {name} for {arch}. {again}")
    if not _FILE.fullmatch(kernel.file):
        raise CompileError(f"{folder / MANIFEST} lists the file {kernel.file!r:.80}, and no build writes one of that name. {again}")
    try:
        code = read_file(path)
    except OSError as error:
        raise CompileError(f"{path}, which the manifest lists, cannot be read: {error.strerror}. {again}") from None
    if len(code) != kernel.nbytes:
        raise CompileError(f"{path} has {len(code)} bytes, and the manifest says {kernel.nbytes}: it was cut or replaced. {again}")
    if hashlib.sha256(code).hexdigest() != kernel.sha256:
        raise CompileError(f"{path} is damaged: its SHA-256 is not that of the manifest. {again}")
    return Cubin(code=code, log="", **{figure: getattr(kernel, figure) for figure in _FIGURES})


def describe_missing(source: str, *, arch: str, name: str, fma: bool, recipe: Recipe | None, reason: str) -> str:
    """Say which kernel no folder holds and why it is not compiled, for which architectures folders do hold it, and what would add it."""
    folders = built_folders()
    what = f"kernel {name} of {recipe.function.rpartition(':')[2]} for {arch}" if recipe else f"kernel {name} for {arch}"
    command = recipe.command(arch, folders[0] if folders else "FOLDER") if recipe else ""
    if not folders:
        way = f"\nOr build {what} where NVRTC is installed, and name the folder in WIDELOAD_BUILT_DIR: {command}"
        return f"{reason}{way if recipe else ''}"
    have = []
    for folder in folders:
        kernels = read_manifest(folder).kernels
        archs = sorted({kernel.arch for kernel in kernels.values()})
        held = [other for other in archs if kernel_key(source, arch=other, name=name, fma=fma) in kernels]
        have += [f"{folder} has it for {', '.join(held)}"] if held else []
    found = f" ({'; '.join(have)})" if have else ""
    no_build = "no build adds it: it is of a foreach call, of a second derivative, or written by hand."
    way = f"Add it on a machine that has NVRTC: {command}" if recipe else f"Install NVRTC: {no_build}"
    return f"{', '.join(map(str, folders))} has no cubin of {what}{found}. {way}\n{reason}"


# ---- writing


def write_built(folder: Path, kernels: Mapping[str, tuple[Cubin, Sequence[Recipe]]], nvrtc: str) -> dict[str, ListedKernel]:
    """Add cubins, by `kernel_key`, to a folder that is made if it is not there; return what the manifest now says of them.

    Builders take turns, and readers see the old manifest or the new one, each with all its cubins. What another version of wideload
    built is removed, as this one would refuse it. Raises ``CompileError`` where the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            try:
                have = dict(read_manifest(folder).kernels)
            except CompileError:  # none, or one that no reader of this version would take
                have = {}
            written = {key: _describe(cubin, recipes, nvrtc, have.get(key)) for key, (cubin, recipes) in kernels.items()}
            for key, kernel in written.items():
                _replace(folder / kernel.file, kernels[key][0].code)
            manifest = Manifest(FORMAT, _version(), {**have, **written})
            _replace(folder / MANIFEST, json.dumps(asdict(manifest), indent=1, sort_keys=True).encode() + b"\n")
            listed = {kernel.file for kernel in manifest.kernels.values()}
            for path in folder.iterdir():
                if _FILE.fullmatch(path.name) and path.name not in listed:
                    path.unlink()
    except OSError as error:
        raise CompileError(f"{folder} cannot be written: {error}. Name another folder.") from error
    return written


def _describe(cubin: Cubin, recipes: Sequence[Recipe], nvrtc: str, before: ListedKernel | None) -> ListedKernel:
    digest = hashlib.sha256(cubin.code).hexdigest()
    figures: dict[str, Any] = {figure: getattr(cubin, figure) for figure in _FIGURES}
    file = f"{cubin.name}.{cubin.arch}.{digest[:_DIGITS]}.cubin"
    kernel = ListedKernel(file=file, nbytes=len(cubin.code), sha256=digest, nvrtc=nvrtc, recipes=(), **figures)
    return replace(kernel, recipes=tuple(dict.fromkeys((*(before.recipes if before else ()), *recipes))))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder against other builders; the lock goes with the process, whatever ends it."""
    import fcntl  # here: Windows, where the reference works, has none

    with open(os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666), "wb", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, content: bytes) -> None:
    """Write beside, then rename: what a killed builder leaves, the next one removes or overwrites."""
    beside = path.with_name(f"{path.name}.part")
    beside.unlink(missing_ok=True)
    with beside.open("xb") as file:
        file.write(content)
    os.replace(beside, path)


def _version() -> str:
    return str(sys.modules["wideload"].__version__)
