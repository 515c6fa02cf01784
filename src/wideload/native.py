"""Turns the C text beside it into a module, once a machine and beside the calls; until then, and without a compiler, Python serves.

Knows a compiler, the disk and names of functions; never what a guard or a launch is.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any, TypeAlias

from wideload.store import read_entry, write_entry

__all__ = ["Either", "NativeState", "bind_names", "native_state"]

_NAME = "wideload_native"
_COMPILERS = "cc", "gcc", "clang"
_FLAGS = "-O2", "-shared", "-fPIC", "-x", "c", "-"
_MOST_SECONDS = 60
"""Of a compilation, which takes half a second."""

Native: TypeAlias = Any
"""The module: it has no Python to take types from."""


@dataclass(frozen=True, slots=True)
class Either:
    """A function in C, and the same in Python: each is made when it is wanted. ``ValueError`` of the one in C: it is too much for it."""

    of_python: Callable[[], Callable[..., Any]]
    of_native: Callable[[Native], Callable[..., Any]]

    def make(self, native: Native | None) -> Callable[..., Any]:
        """The one in C where there is the module."""
        if native is not None:
            try:
                return self.of_native(native)
            except ValueError:
                pass
        return self.of_python()


@dataclass(frozen=True, slots=True)
class NativeState:
    """Whether calls take C: ``is_ready``, or the ``fault`` that there is none for; neither while it is compiled or nothing has asked."""

    is_ready: bool
    fault: str | None


class _Module:
    """The module of this process. What was given Python's functions in the meantime is given those in C when these are there."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer or a signal's handler may call a function while this thread holds it
        self._native: Native | None = None
        self._fault: str | None = None
        self._thread: threading.Thread | None = None
        self._waiting: list[tuple[weakref.ref[Any], Mapping[str, Either]]] = []

    def begin(self) -> Native | None:
        """The module, where it is there: once compiled, it is read from the disk; else another thread compiles it."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._make, name="wideload-native")  # the process's end waits for it
                    self._read_or_start(self._thread)
        return self._native

    def _read_or_start(self, thread: threading.Thread) -> None:
        self._fault = _refusal()
        if self._fault is None and (stored := _stored()) is not None:
            self._settle(stored)
        elif self._fault is None:
            try:
                thread.start()
            except RuntimeError as error:  # no more threads, or the interpreter is ending
                self._fault = str(error)

    def wait(self) -> NativeState:
        """The state when the compilation has ended."""
        self.begin()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        return self.state()

    def state(self) -> NativeState:
        return NativeState(self._native is not None, self._fault)

    def improve_later(self, function: Any, eithers: Mapping[str, Either]) -> None:
        """Put functions in C among the globals of ``function`` when they are there."""
        with self._lock:
            if self._native is None and self._fault is None:
                self._waiting.append((weakref.ref(function), eithers))
                return
        if self._native is not None:
            _improve(function, eithers, self._native)

    def _make(self) -> None:
        try:
            code = _compiled()
            native = _loaded(code)
        except (OSError, ImportError, subprocess.SubprocessError) as error:
            with self._lock:
                self._fault, self._waiting = _told(error), []
            return
        with self._lock:
            self._settle(native)
        write_entry(_key(), code, "native")

    def _settle(self, native: Native) -> None:
        self._native = native
        for reference, eithers in self._waiting:
            if (function := reference()) is not None:
                _improve(function, eithers, native)
        self._waiting = []


def _improve(function: Any, eithers: Mapping[str, Either], native: Native) -> None:
    function.__globals__.update({name: either.make(native) for name, either in eithers.items()})


def _told(error: Exception) -> str:
    said = (getattr(error, "stderr", None) or "").strip()
    return f"{error}: {said.splitlines()[0]}" if said else str(error)


def _stored() -> Native | None:
    code = read_entry(_key(), "native")
    if code is None:
        return None
    try:
        return _loaded(code)
    except (OSError, ImportError):
        return None


def _text() -> str:
    return (resources.files("wideload") / "native.c").read_text(encoding="utf-8")


def _key() -> str:
    parts = _text(), *_FLAGS, sys.version, str(sysconfig.get_config_var("SOABI")), platform.machine(), os.environ.get("WIDELOAD_CC", "")
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _refusal() -> str | None:
    """Why there is to be no module here."""
    if os.environ.get("WIDELOAD_CC") == "0":
        return "WIDELOAD_CC=0 turns it off"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it is made for Pythons with a global interpreter lock"
    return None if sys.platform == "linux" else f"it is made for Linux, not for {sys.platform}"


def _compiler() -> str:
    """Raises ``OSError`` where there is none."""
    chosen = os.environ.get("WIDELOAD_CC", "")
    for name in (chosen,) if chosen else _COMPILERS:
        if found := shutil.which(name):
            return found
    raise OSError(f"WIDELOAD_CC={chosen} is no program" if chosen else f"none of {', '.join(_COMPILERS)} is a program here")


def _compiled() -> bytes:
    """The shared library. Raises ``OSError`` or ``CalledProcessError``."""
    compiler, include = _compiler(), sysconfig.get_paths()["include"]
    if not Path(include, "Python.h").is_file():
        raise OSError(f"{include} has no Python.h")
    with tempfile.TemporaryDirectory(prefix="wideload-") as folder:
        library = Path(folder, f"{_NAME}.so")
        command = (compiler, f"-I{include}", "-o", str(library), *_FLAGS)
        # What it says may be in an encoding that is not this process's.
        subprocess.run(command, input=_text(), check=True, capture_output=True, text=True, errors="replace", timeout=_MOST_SECONDS)
        return library.read_bytes()


def _loaded(code: bytes) -> Native:
    """From memory: what the disk holds was checked when it was read. Raises ``OSError`` or ``ImportError``."""
    file = os.memfd_create(_NAME)
    try:
        with open(file, "wb", closefd=False) as memory:
            memory.write(code)
        loader = ExtensionFileLoader(_NAME, f"/proc/{os.getpid()}/fd/{file}")  # not self: the loader would know another's by that path
        spec = importlib.util.spec_from_loader(_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        os.close(file)


_module = _Module()


def _begin_again() -> None:
    """In a child, which has none of its parent's threads."""
    global _module
    if not _module.state().is_ready:
        _module = _Module()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_again)


def bind_names(function_of: Callable[[dict[str, Any]], Any], names: Mapping[str, Any]) -> Any:
    """The Python function that ``function_of`` makes with ``names`` as its globals, each `Either` among them one of the two.

    It has those in C as soon as there are any, also when it has been called before.
    """
    eithers = {name: value for name, value in names.items() if isinstance(value, Either)}
    native = _module.begin() if eithers else None
    function = function_of({name: value.make(native) if isinstance(value, Either) else value for name, value in names.items()})
    if eithers and native is None:
        _module.improve_later(function, eithers)
    return function


def native_state(*, wait: bool = False) -> NativeState:
    """Whether calls like earlier ones take C, or why not; with ``wait``, when that has been found out."""
    return _module.wait() if wait else _module.state()
