"""Turns what was compiled, flags of nvcc or a file, into the GPUs that run it: natively, by the driver's JIT, or not, and why.

Rules and tables alone; it must not know which GPU is here, nor what the code does.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from wideload.errors import CompileError, WideloadError
from wideload.gpus import GPUS
from wideload.sass import find_cuobjdump

__all__ = ["Fit", "Image", "Support", "find_support", "judge_image", "parse_flags", "read_images"]

SCHEMA = "wideload.targets/1"

Way = Literal["native", "jit", "no"]

_TEGRA = frozenset({(5, 3), (6, 2), (7, 2), (8, 7), (11, 0)})
"""Chips with the CPU on them (Jetson): SASS of theirs and of other GPUs is not compatible (CUDA Programming Guide, 5.1)."""
_ALL = (75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""What ``-arch=all`` compiles for: ``nvcc --list-gpu-code`` of CUDA 13.0."""
_ALL_MAJOR = (75, 80, 90, 100, 110, 120)
"""What ``-arch=all-major`` compiles for, by ``nvcc -dryrun`` of CUDA 13.0."""

_TARGET = re.compile(r"(sm|compute|lto)_(\d+)(\d)([af]?)")
_TORCH_TARGET = re.compile(r"(\d+)\.(\d)([af]?)(\+PTX)?")
_OPTION = re.compile(r"--?(arch|gpu-architecture|code|gpu-code|gencode|generate-code)(?:=(.*))?")
_LONG = {"gpu-architecture": "arch", "gpu-code": "code", "generate-code": "gencode"}
_FATBIN_MEMBER = re.compile(r"^Fatbin (elf|ptx) code:\n=+\narch = (\S+)", re.MULTILINE)
_CUBIN_NAME = re.compile(r"\.(sm_\w+)\.cubin$", re.MULTILINE)
_PTX_TARGET = re.compile(r"^\s*\.target\s+(sm_\w+)", re.MULTILINE)
_ELF_MAGIC, _ELF_CUDA = b"\x7fELF", 190
"""``EM_CUDA`` in the two bytes at 18 of an ELF header: the file is a cubin."""
_CUOBJDUMP_SECONDS = 120
"""Of libtorch_cuda.so, more than a gigabyte, the members are listed in some ten."""


@dataclass(frozen=True, slots=True)
class Image:
    """One member of a fatbin: ``sass`` for a real architecture, or ``ptx`` for a virtual one.

    ``suffix`` is ``"a"`` for an architecture's own features, ``"f"`` for those of its family, else empty.
    """

    kind: Literal["sass", "ptx"]
    compute_capability: tuple[int, int]
    suffix: str = ""

    @property
    def name(self) -> str:
        """As nvcc spells it: ``"sm_90a"``, ``"compute_80"``."""
        return "{}_{}{}{}".format("sm" if self.kind == "sass" else "compute", *self.compute_capability, self.suffix)


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether one image runs on a GPU, and why."""

    image: str
    way: Way
    why: str


@dataclass(frozen=True, slots=True)
class Support:
    """What a GPU's driver does with a set of images. ``image`` is the one it takes; ``fits`` are all, in the order it looks at them."""

    gpus: tuple[str, ...]
    compute_capability: tuple[int, int]
    way: Way
    image: str | None
    why: str
    fits: tuple[Fit, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and strings."""
        return asdict(self)


def judge_image(image: Image, compute_capability: tuple[int, int]) -> Fit:
    """Say whether ``image`` runs on a GPU of ``compute_capability``.

    The rules are those of the CUDA Programming Guide: SASS runs where the major version is the same and the minor one no lower;
    PTX is compiled by the driver (one that knows the PTX's version) for anything no older; with ``a``, both are for that architecture
    alone; with ``f``, for its family: the same major version, the minor one no lower.

    >>> judge_image(Image("sass", (8, 0)), (8, 6)).way, judge_image(Image("sass", (8, 0)), (9, 0)).way
    ('native', 'no')
    >>> judge_image(Image("ptx", (9, 0), "a"), (10, 0)).why
    'compute_90a uses what only 9.0 has'
    """
    return Fit(image.name, *_judge(image, compute_capability))


def _judge(image: Image, gpu: tuple[int, int]) -> tuple[Way, str]:
    own, text = image.compute_capability, "{}.{}".format(*image.compute_capability)
    way: Way = "native" if image.kind == "sass" else "jit"
    if own == gpu:
        return way, f"{image.name} is this architecture's" + ("" if image.kind == "sass" else " PTX")
    if image.suffix == "a":
        return "no", f"{image.name} uses what only {text} has"
    if gpu < own:
        return "no", f"{image.name} is newer than {gpu[0]}.{gpu[1]}"
    same_family = own[0] == gpu[0]
    if image.kind == "ptx":
        if image.suffix == "f" and not same_family:
            return "no", f"{image.name} uses what only the family of {text} has: {own[0]}.x from {text} on"
        return "jit", f"PTX of {text} is compiled by the driver for what is newer"
    if not same_family:
        return "no", f"SASS runs within a major version: {image.name} on {own[0]}.x from {text} on"
    if own in _TEGRA or gpu in _TEGRA:
        return "no", f"SASS of {text} and of {gpu[0]}.{gpu[1]} differ: one of them is a Tegra's"
    return "native", f"same major version, and {image.name} is older"


def find_support(images: Sequence[Image]) -> tuple[Support, ...]:
    """Say for every GPU of `wideload.gpus.GPUS`, those of one architecture together, which of ``images`` its driver takes.

    It looks for SASS of the very architecture, then for the newest other SASS that runs, then for the newest PTX. Raises
    ``WideloadError`` without images.

    >>> [row.image for row in find_support(parse_flags(["-arch=sm_80"])) if row.compute_capability in ((8, 6), (9, 0))]
    ['sm_80', 'compute_80']
    """
    if not images:
        raise WideloadError("there is nothing to run: no SASS and no PTX")
    rows = []
    for gpu, named in groupby(sorted(GPUS, key=lambda row: row.compute_capability), key=lambda row: row.compute_capability):
        # The driver's order; of what is equally new, what uses more of the architecture goes first.
        order = sorted(set(images), key=lambda image: (image.kind == "sass", image.compute_capability, image.suffix == "a"), reverse=True)
        fits = tuple(judge_image(image, gpu) for image in order)
        taken = next((fit for fit in fits if fit.way != "no"), None)
        names = tuple(row.name for row in named)
        if taken:
            rows.append(Support(names, gpu, taken.way, taken.image, taken.why, fits))
        else:
            rows.append(Support(names, gpu, "no", None, "; ".join(fit.why for fit in fits), fits))
    return tuple(rows)


def parse_flags(words: Iterable[str]) -> tuple[Image, ...]:
    """Return the images that nvcc makes for ``words``: ``-arch``, ``-code``, ``-gencode`` (or their long names), and any others ignored.

    ``-arch=sm_80`` alone stands for SASS and PTX. A bare ``8.0`` or ``9.0+PTX`` is read as ``TORCH_CUDA_ARCH_LIST`` spells it.
    Raises ``WideloadError`` for what is no target, for a ``code`` older than its ``arch``, and where there is none.

    >>> [image.name for image in parse_flags(["-gencode", "arch=compute_90a,code=[sm_90a,compute_90a]", "-O3"])]
    ['sm_90a', 'compute_90a']
    """
    images: list[Image] = []
    arch: str | None = None
    codes: list[str] = []
    for option, value in _read_options(words):
        if option == "arch":
            arch = value
        elif option == "code":
            codes += value.split(",")
        elif option == "gencode":
            images += _parse_gencode(value)
        else:
            images += _parse_torch_target(value)
    if codes and arch is None:
        raise WideloadError("-code stands without -arch; nvcc wants both, as in -arch=compute_80 -code=sm_80")
    if arch is not None:
        images += _pair(arch, codes) if codes else _parse_arch(arch)
    if not images:
        raise WideloadError("no target was named; give -arch=sm_80, -gencode arch=compute_80,code=sm_80, or a file that was compiled")
    return tuple(dict.fromkeys(images))


def _read_options(words: Iterable[str]) -> Iterable[tuple[str, str]]:
    """Each option with its value, whether ``=`` or a space stands between."""
    rest = iter(word for text in words for word in text.replace(";", " ").split())
    for word in rest:
        option = _OPTION.fullmatch(word)
        if option:
            value = option[2] if option[2] is not None else next(rest, "")
            yield _LONG.get(option[1], option[1]), value.strip("\"'")
        elif _TORCH_TARGET.fullmatch(word):
            yield "torch", word
        elif target := _TARGET.fullmatch(word):
            kind, major, minor, suffix = target.groups()
            number = f"{major}{minor}{suffix}"
            alone = "" if kind != "sm" else f", or -gencode arch=compute_{number},code=sm_{number} for its SASS without PTX"
            raise WideloadError(f"{word} stands without its option: write -arch={word}{alone}")
        elif not word.startswith("-"):
            raise WideloadError(f"{word!r} is no option of nvcc, no target such as 8.0+PTX, and no file")


def _parse_gencode(text: str) -> list[Image]:
    found = re.fullmatch(r"arch=(\w+),code=\[?([\w,]+)\]?", text.replace('"', "").replace("'", ""))
    if found is None:
        raise WideloadError(f"-gencode {text!r}; allowed: arch=compute_80,code=sm_80 or arch=compute_80,code=[sm_80,compute_80]")
    return _pair(found[1], found[2].split(","))


def _pair(arch: str, codes: Sequence[str]) -> list[Image]:
    virtual = _parse_target(arch)
    if virtual.kind != "ptx":
        raise WideloadError(f"arch={arch} with a code; allowed: a virtual architecture, such as compute_80")
    return [_find_code(virtual, _parse_target(code)) for code in codes]


def _find_code(virtual: Image, code: Image) -> Image:
    """What nvcc makes of PTX for ``code``: PTX for itself alone, SASS for what is no older and may use what the PTX uses."""
    fit = judge_image(virtual, code.compute_capability)
    may_use_all = virtual.suffix != "a" or code.suffix == "a"
    if not (code == virtual if code.kind == "ptx" else fit.way != "no" and may_use_all):
        raise WideloadError(f"arch={virtual.name},code={code.name}: nvcc refuses to make the one of the other")
    return replace(code, suffix=code.suffix or virtual.suffix) if code.kind == "sass" else code


def _parse_arch(arch: str) -> list[Image]:
    """``-arch`` alone."""
    if arch in ("all", "all-major"):
        numbers = _ALL if arch == "all" else _ALL_MAJOR
        return [*(_parse_target(f"sm_{number}") for number in numbers), _parse_target(f"compute_{numbers[-1]}")]
    if arch == "native":
        raise WideloadError("-arch=native means the GPU of the machine that compiles; name it: -arch=sm_90")
    image = _parse_target(arch)
    return [image] if image.kind == "ptx" else [image, Image("ptx", image.compute_capability, image.suffix)]


def _parse_target(text: str) -> Image:
    found = _TARGET.fullmatch(text)
    if found is None:
        raise WideloadError(f"{text!r} is no target; allowed: sm_80, compute_80, sm_90a, sm_100f and the like")
    kind, major, minor, suffix = found.groups()
    if kind == "lto":
        raise WideloadError(f"{text} is code for the linker, which no GPU loads; give the -gencode of the link as well and leave this out")
    return Image("sass" if kind == "sm" else "ptx", (int(major), int(minor)), suffix)


def _parse_torch_target(text: str) -> list[Image]:
    found = _TORCH_TARGET.fullmatch(text)
    assert found is not None
    where = (int(found[1]), int(found[2]))
    return [Image("sass", where, found[3]), *([Image("ptx", where, found[3])] if found[4] else [])]


def read_images(path: Path) -> tuple[Image, ...]:
    """Return what a file holds: a cubin, a fatbin, PTX, or an object, program or library with fatbins in it.

    A cubin for a family says only which member it was compiled for; it runs where that member's would. All but PTX needs cuobjdump.
    Raises ``WideloadError`` for a file without device code, and ``CompileError`` where there is no cuobjdump.
    """
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        raise WideloadError(f"{path} cannot be read: {error.strerror}") from error
    target = _PTX_TARGET.search(head.decode("latin-1"))
    if target and not head.startswith(_ELF_MAGIC):
        found = [("ptx", target[1])]
    elif head.startswith(_ELF_MAGIC) and int.from_bytes(head[18:20], "little") == _ELF_CUDA:
        found = [("elf", name) for name in _CUBIN_NAME.findall(_run_cuobjdump(path, "--list-elf"))]
    else:
        found = _FATBIN_MEMBER.findall(_run_cuobjdump(path))
    if not found:
        raise WideloadError(f"{path} holds no device code; give a cubin, a fatbin, PTX, or what was linked from them")
    images = (_parse_target(name.replace("sm_", "compute_") if kind == "ptx" else name) for kind, name in found)
    return tuple(dict.fromkeys(images))


def _run_cuobjdump(path: Path, *options: str) -> str:
    try:
        run = subprocess.run([find_cuobjdump(), *options, path], capture_output=True, text=True, timeout=_CUOBJDUMP_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CompileError(f"cuobjdump could not read {path}: {error}") from error
    return run.stdout  # what it says of files without device code stands on stderr
