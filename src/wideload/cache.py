"""Turns a kernel's source into its cubin, compiled at most once: by this process for all its threads, by one before it, or by a build.

Knows what was compiled and with what, never why. A process that finds a cubin on the disk does not load NVRTC; where one was built,
NVRTC need not be installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wideload import store
from wideload.decode import decode, parse_json
from wideload.errors import CompileError, WideloadError
from wideload.nvrtc import Cubin, compile_cubin, compile_options, has_nvrtc, nvrtc_identity

if TYPE_CHECKING:
    from wideload.manifest import Recipe

__all__ = [
    "MAX_THREADS", "StoredCubin", "are_at_hand", "compile_cubins", "find_cubin", "find_cubins", "is_in_memory", "num_compilations",
    "read_stored",
]  # fmt: skip

_SCHEMA = 1
"""Of an entry on the disk: a cubin, a line feed, and one line of JSON. In another schema, entries of this one are not found."""
MAX_THREADS = 8
"""Compiling at once: NVRTC takes some 100 MB for each, and few functions need more kernels."""
_TAIL_BYTES = 4096
"""Enough for the JSON of an entry."""

_Key = tuple[str, str, str, bool]
"""Source, architecture, name, and whether ``a * b + c`` may be contracted."""
_cubins: dict[_Key, Cubin] = {}
_locks: dict[_Key, threading.Lock] = {}
_compiled: list[_Key] = []

if hasattr(os, "register_at_fork"):  # a lock that another thread holds during a fork would never be released in the child
    os.register_at_fork(after_in_child=_locks.clear)


@dataclass(frozen=True, slots=True)
class StoredCubin:
    """What an entry on the disk says of its cubin; ``compiler`` is wideload's version and NVRTC's."""

    name: str
    arch: str
    registers: int
    compiler: str


def find_cubin(source: str, *, arch: str, name: str, fma: bool = False, recipe: Recipe | None = None) -> Cubin:
    """Return the cubin of kernel ``name``: from memory, from the folders of built ones, from the disk (``log`` is then empty), or compiled.

    However many threads ask, one looks and compiles. Raises ``CompileError``, which names what would build the kernel of ``recipe`` where
    there is nothing to compile it with.
    """
    return _find((source, arch, name, fma), lambda: recipe)


def _find(key: _Key, recipe: Callable[[], Recipe | None]) -> Cubin:
    cubin = _cubins.get(key)
    if cubin is None:
        with _locks.setdefault(key, threading.Lock()):
            cubin = _cubins.get(key)
            if cubin is None:
                cubin = _cubins[key] = _find_built(key) or _read_or_compile(key, recipe)
    return cubin


def find_cubins(kernels: Sequence[tuple[str, str, str]], recipe: Callable[[], Recipe | None] = lambda: None) -> tuple[Cubin, ...]:
    """Return the cubin of each (source, arch, name), those to compile side by side: NVRTC releases the interpreter. As `find_cubin`.

    ``recipe`` is asked for the call only where there is nothing to compile with.
    """
    keys = [(*kernel, False) for kernel in kernels]
    if all(key in _cubins for key in keys):
        return tuple(_cubins[key] for key in keys)
    return _side_by_side(lambda key: _find(key, recipe), keys)


def is_in_memory(source: str, *, arch: str, name: str) -> bool:
    """Whether this process has the cubin of a kernel."""
    return (source, arch, name, False) in _cubins


def are_at_hand(kernels: Sequence[tuple[str, str, str]]) -> bool:
    """Whether none of these (source, arch, name) needs a compiler: memory has each of them now, from a build or the disk if need be."""
    for source, arch, name in kernels:
        key = (source, arch, name, False)
        if key not in _cubins:
            try:
                cubin = _find_built(key) or _read(key)
            except CompileError:  # for who compiles to raise
                return False
            if cubin is None:
                return False
            _cubins.setdefault(key, cubin)
    return True


def compile_cubins(kernels: Sequence[tuple[str, str, str]], advance: Callable[[], object] = lambda: None) -> tuple[Cubin, ...]:
    """Return the cubin that the NVRTC installed here makes of each (source, arch, name), from the disk where it has been made before.

    ``advance`` is called once a kernel. Raises ``CompileError``.
    """

    def compile_one(key: _Key) -> Cubin:
        cubin = _read(key) or _compile(key)
        advance()
        return cubin

    return _side_by_side(compile_one, [(*kernel, False) for kernel in kernels])


def _side_by_side(make: Callable[[_Key], Cubin], keys: Sequence[_Key]) -> tuple[Cubin, ...]:
    if len(keys) <= 1:
        return tuple(map(make, keys))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(keys), os.cpu_count() or 1, MAX_THREADS)) as threads:
        return tuple(threads.map(make, keys))


def num_compilations() -> int:
    """How many kernels this process has compiled."""
    return len(_compiled)


def read_stored(entry: store.Entry) -> StoredCubin | None:
    """Return what an entry of the disk says of itself, its cubin unread and unchecked; None where it is damaged."""
    try:
        with store.open_file(entry.path) as file:
            file.seek(-min(_TAIL_BYTES, entry.nbytes), os.SEEK_END)
            header = parse_json(file.read()[: -store.DIGEST_BYTES].rpartition(b"\n")[2])
        return decode(StoredCubin, header)
    except (OSError, ValueError, WideloadError):
        return None


def _find_built(key: _Key) -> Cubin | None:
    if not store.built_folders():
        return None
    from wideload.manifest import find_built  # here: most processes have no such folder

    source, arch, name, fma = key
    return find_built(source, arch=arch, name=name, fma=fma)


def _read_or_compile(key: _Key, recipe: Callable[[], Recipe | None]) -> Cubin:
    try:
        return _read(key) or _compile(key)
    except CompileError as error:
        if has_nvrtc():
            raise
        from wideload.manifest import describe_missing

        source, arch, name, fma = key
        raise CompileError(describe_missing(source, arch=arch, name=name, fma=fma, recipe=recipe(), reason=str(error))) from error


def _compile(key: _Key) -> Cubin:
    source, arch, name, fma = key
    cubin = compile_cubin(source, arch=arch, name=name, fma=fma)
    _compiled.append(key)
    figures = {field: value for field, value in asdict(cubin).items() if field not in ("code", "log")}
    header = json.dumps({**figures, "compiler": _compiler()})
    store.write_entry(_digest(key), cubin.code + b"\n" + header.encode())
    return cubin


def _read(key: _Key) -> Cubin | None:
    payload = store.read_entry(_digest(key))
    if payload is None:
        return None
    code, _, header = payload.rpartition(b"\n")
    try:
        figures: dict[str, Any] = json.loads(header)
        del figures["compiler"]
        return Cubin(code=code, log="", **figures)
    except (ValueError, LookupError, TypeError):  # another state of the sources wrote it under this version and schema
        return None


def _digest(key: _Key) -> str:
    """Of all that decides the cubin."""
    source, arch, name, fma = key
    inputs = (_SCHEMA, _compiler(), compile_options(arch=arch, name=name, fma=fma), source)
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()


def _compiler() -> str:
    return f"wideload {sys.modules['wideload'].__version__}, {nvrtc_identity()}"
