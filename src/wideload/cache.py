"""Turns a kernel's source into its cubin, compiled at most once: by this process for all its threads, or by one before it.

Knows what was compiled and with what, never why. A process that finds a cubin on the disk does not load NVRTC.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from wideload import store
from wideload.nvrtc import Cubin, compile_cubin, compile_options, nvrtc_identity

__all__ = ["StoredCubin", "find_cubin", "find_cubins", "num_compilations", "read_stored"]

_SCHEMA = 1
"""Of an entry on the disk: a cubin, a line feed, and one line of JSON. In another schema, entries of this one are not found."""
_MAX_THREADS = 8
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


def find_cubin(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
    """Return the cubin of kernel ``name``: from memory, from the disk (``log`` is then empty), or compiled.

    However many threads ask, one looks and compiles. Raises ``CompileError``.
    """
    key = (source, arch, name, fma)
    cubin = _cubins.get(key)
    if cubin is None:
        with _locks.setdefault(key, threading.Lock()):
            cubin = _cubins.get(key)
            if cubin is None:
                cubin = _cubins[key] = _read(key) or _compile(key)
    return cubin


def find_cubins(kernels: Sequence[tuple[str, str, str]]) -> tuple[Cubin, ...]:
    """Return the cubin of each (source, arch, name), those to compile side by side: NVRTC releases the interpreter. As `find_cubin`."""
    if len(kernels) == 1 or all((*key, False) in _cubins for key in kernels):
        return tuple(find_cubin(source, arch=arch, name=name) for source, arch, name in kernels)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(len(kernels), os.cpu_count() or 1, _MAX_THREADS)) as threads:
        return tuple(threads.map(lambda key: find_cubin(key[0], arch=key[1], name=key[2]), kernels))


def num_compilations() -> int:
    """How many kernels this process has compiled."""
    return len(_compiled)


def read_stored(entry: store.Entry) -> StoredCubin | None:
    """Return what an entry of the disk says of itself, its cubin unread and unchecked; None where it is damaged."""
    try:
        with entry.path.open("rb") as file:
            file.seek(-min(_TAIL_BYTES, entry.nbytes), os.SEEK_END)
            header = json.loads(file.read()[: -store.DIGEST_BYTES].rpartition(b"\n")[2])
        return StoredCubin(**{field.name: header[field.name] for field in fields(StoredCubin)})
    except (OSError, ValueError, LookupError, TypeError):
        return None


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
