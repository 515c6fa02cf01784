"""Turns a kernel's source into its cubin at most once a process, however many threads ask at the same time.

Knows what was compiled, never why.
"""

from __future__ import annotations

import threading
from collections import defaultdict

from wideload.nvrtc import Cubin, compile_cubin

__all__ = ["find_cubin", "num_compilations"]

_Key = tuple[str, str, str]
_cubins: dict[_Key, Cubin] = {}
_locks: defaultdict[_Key, threading.Lock] = defaultdict(threading.Lock)
_compilations = 0


def find_cubin(source: str, *, arch: str, name: str) -> Cubin:
    """The cubin of kernel ``name``; compiled on the first call for these arguments. Raises ``CompileError``."""
    global _compilations
    key = (source, arch, name)
    cubin = _cubins.get(key)
    if cubin is None:
        with _locks[key]:
            cubin = _cubins.get(key)
            if cubin is None:
                cubin = _cubins[key] = compile_cubin(source, arch=arch, name=name)
                _compilations += 1
    return cubin


def num_compilations() -> int:
    """How many kernels this process has compiled."""
    return _compilations
