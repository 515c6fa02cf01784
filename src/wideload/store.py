"""Turns keys and bytes into files that outlive the process: written whole or not at all, checked when read, bounded in size.

Knows folders and files, never what the bytes mean. No fault of the disk is raised: it costs the entry, and one warning a process.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

__all__ = [
    "DIGEST_BYTES",
    "Entry",
    "FolderState",
    "built_folders",
    "cache_folder",
    "clear_entries",
    "inspect_folder",
    "max_bytes",
    "named_path",
    "open_file",
    "own_environment",
    "read_entry",
    "read_file",
    "write_entry",
    "write_whole",
]

DEFAULT_MAX_BYTES = 1 << 30
"""Some 40,000 kernels of the usual 25 kB."""

Kind = Literal["cubins", "native"]
"""What is kept, each in a folder of its own: kernels, and what runs on the host (`wideload.native`)."""

_SUFFIXES: Mapping[str, str] = {"cubins": ".cubin", "native": ".so"}
_TEMPORARY, _UNFINISHED = "tmp", ".part"
_KEY = re.compile(r"[0-9a-f]{64}")
DIGEST_BYTES = hashlib.sha256().digest_size
"""Of the digest that ends each file."""
_LOOKS_PER_LIMIT = 16
"""The folder's size is looked at again once a process has written this part of the limit: what others write meanwhile is not seen."""

_headroom: dict[Path, int] = {}
"""Bytes that may be written to a folder before the next look."""
_has_warned = False


class Entry(NamedTuple):
    """One file: ``used_at`` is when it was last written or read, in seconds since the epoch."""

    key: str
    path: Path
    nbytes: int
    used_at: float


class FolderState(NamedTuple):
    """The cache folder as it is found; ``fault`` says why nothing is read or written there, and is None where it is used.

    ``owner`` is that of the folder or, before it is made, of the one that it will be made in. The entry used last comes first.
    """

    path: Path | None
    owner: int | None
    fault: str | None
    entries: tuple[Entry, ...]

    @property
    def nbytes(self) -> int:
        """What the entries take."""
        return sum(entry.nbytes for entry in self.entries)


def cache_folder() -> Path | None:
    """Return ``$WIDELOAD_CACHE_DIR``, else ``wideload`` in ``$XDG_CACHE_HOME``, else in ``~/.cache``.

    None with ``WIDELOAD_CACHE=0``, and where the user has no home.
    """
    if os.environ.get("WIDELOAD_CACHE") == "0":
        return None
    if chosen := os.environ.get("WIDELOAD_CACHE_DIR"):
        return named_path(chosen)
    # The XDG Base Directory Specification has relative paths ignored.
    candidates = (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache"))
    return next((Path(base, "wideload") for base in candidates if os.path.isabs(base)), None)


def built_folders() -> tuple[Path, ...]:
    """Return the folders that ``$WIDELOAD_BUILT_DIR`` names, with ``:`` between them as in ``$PATH``."""
    return tuple(named_path(name) for name in os.environ.get("WIDELOAD_BUILT_DIR", "").split(os.pathsep) if name)


def named_path(text: str) -> Path:
    """Return the absolute path that ``text`` is, ``~`` expanded where there is such a user; as it stands where the working folder is gone.

    What is relative is of the folder that the process was in when it met this text first: when wideload was imported, for what
    the environment held then.
    """
    path = Path(os.path.expanduser(text))
    with contextlib.suppress(FileNotFoundError):
        return _as_first_met(path)
    return path


@functools.cache
def _as_first_met(path: Path) -> Path:
    return path.absolute()


def own_environment() -> dict[str, str]:
    """The environment, for a process that is to find what this one finds, whatever folder either is in."""
    named = {name: str(named_path(text)) for name in ("WIDELOAD_CACHE_DIR", "WIDELOAD_TUNING") if (text := os.environ.get(name))}
    built = os.pathsep.join(map(str, built_folders()))
    return {**os.environ, **named, **({"WIDELOAD_BUILT_DIR": built} if built else {})}


def open_file(path: Path) -> BinaryIO:
    """Open a file to be read. Raises ``OSError``, also for what is no regular file: a pipe would be waited for, a device may never end."""
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    handle = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError(errno.EINVAL, "it is no regular file", path)


def read_file(path: Path) -> bytes:
    """Return what a file holds. Raises ``OSError`` as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def max_bytes() -> int:
    """Return ``$WIDELOAD_CACHE_MAX_BYTES``, 1 GiB where it is unset or no number."""
    with contextlib.suppress(ValueError):
        return int(os.environ.get("WIDELOAD_CACHE_MAX_BYTES", DEFAULT_MAX_BYTES))
    return DEFAULT_MAX_BYTES


def read_entry(key: str, kind: Kind = "cubins") -> bytes | None:
    """Return what was written under ``key``, 64 hex digits; None where there is nothing, or not exactly what was written."""
    folder = cache_folder()
    if folder is None:
        return None
    try:
        _refuse_foreign(folder)
        entries = folder / kind
        _sweep_once(entries / _TEMPORARY)
        with open_file(entries / f"{key}{_SUFFIXES[kind]}") as file:
            if _writer_fault(os.fstat(file.fileno())):  # it was left while others could write to the folder
                return None
            content = file.read()
            with contextlib.suppress(OSError):  # a read-only file system
                os.utime(file.fileno())
    except FileNotFoundError:
        return None
    except OSError as error:
        _warn_once(folder, error)
        return None
    payload = content[:-DIGEST_BYTES]
    return payload if content[-DIGEST_BYTES:] == _digest(key, payload) else None


def write_entry(key: str, payload: bytes, kind: Kind = "cubins") -> None:
    """Keep ``payload`` under ``key``, 64 hex digits, in place of what was there; entries used longest ago make room for it.

    Readers and other writers see the old file or the new one. Nothing is flushed to the disk: what a crash of the machine tears,
    `read_entry` notices. A writer that is killed leaves a temporary file, which the next process removes.
    """
    folder = cache_folder()
    content = payload + _digest(key, payload)
    if folder is None or len(content) > max_bytes():
        return
    entries = folder / kind
    try:
        for path in (folder, entries, entries / _TEMPORARY):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_foreign(folder)
        _make_room(entries, len(content))
        _write_file(entries / f"{key}{_SUFFIXES[kind]}", content, entries / _TEMPORARY)
    except (FileNotFoundError, BlockingIOError):  # swept between its creation and its lock, or the folder was removed meanwhile
        return
    except OSError as error:
        _warn_once(folder, error)


def clear_entries() -> tuple[Entry, ...]:
    """Remove every entry and return the kernels among those removed. Raises ``OSError`` where one cannot be."""
    folder = cache_folder()
    if folder is None:
        return ()
    entries = {kind: tuple(_scan(folder / kind)) for kind in _SUFFIXES}
    for kind, found in entries.items():
        for entry in found:
            entry.path.unlink(missing_ok=True)
        _sweep(folder / kind / _TEMPORARY)
    return entries["cubins"]


def inspect_folder() -> FolderState:
    """Return the state of the cache folder, without creating it."""
    folder = cache_folder()
    if folder is None:
        return FolderState(None, None, "WIDELOAD_CACHE=0 turns it off, or this user has no home", ())
    owner = None
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists() or path.is_symlink())
        owner = existing.stat().st_uid
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"{existing} cannot be written")
        if existing == folder:
            _refuse_foreign(folder)
        return FolderState(folder, owner, None, tuple(sorted(_scan(folder / "cubins"), key=lambda entry: -entry.used_at)))
    except OSError as error:
        return FolderState(folder, owner, str(error), ())


def _digest(key: str, payload: bytes) -> bytes:
    """Of the key too: an entry under another's name is not that one."""
    return hashlib.sha256(key.encode() + payload).digest()


def _refuse_foreign(folder: Path) -> None:
    if fault := _writer_fault(folder.stat()):
        raise PermissionError(fault)


def _writer_fault(status: os.stat_result) -> str | None:
    """Why another user may have written here, or None: what is read will run as this user."""
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, and this is user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it, its mode is {stat.S_IMODE(status.st_mode):o} (chmod go-w it)"
    return None


def _write_file(path: Path, content: bytes, tmp: Path) -> None:
    """Write beside, then rename. The lock says that the writer lives: it goes with it, whatever ends it and on whatever machine."""
    import fcntl  # here: Windows, where the reference works, has none

    handle, name = tempfile.mkstemp(suffix=_UNFINISHED, dir=tmp)
    try:
        with open(handle, "wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(content)
            file.flush()
            os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_whole(path: Path, text: str) -> None:
    """Put ``text`` in the place of a file: whole or not at all, also when several processes write; a folder that is made is this user's.

    Raises ``OSError``.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _sweep(tmp: Path) -> None:
    """Remove what killed writers have left: the files that nobody holds locked. What cannot be removed stays."""
    import fcntl

    with contextlib.suppress(FileNotFoundError):
        for path in [tmp / name for name in os.listdir(tmp) if name.endswith(_UNFINISHED)]:
            # NFS locks exclusively only what is open for writing.
            with contextlib.suppress(OSError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()


_sweep_once = functools.cache(_sweep)
"""Once a process and folder."""


def _make_room(entries: Path, nbytes: int) -> None:
    left = _headroom.get(entries, 0) - nbytes
    _headroom[entries] = left if left >= 0 else _evict(entries, nbytes)


def _evict(entries: Path, nbytes: int) -> int:
    """Remove entries, used longest ago first, until ``nbytes`` more fit; return how many may be written after them unseen."""
    limit = max_bytes()
    slack = limit // _LOOKS_PER_LIMIT
    found = sorted(_scan(entries), key=lambda entry: entry.used_at)
    total = sum(entry.nbytes for entry in found) + nbytes
    if total > limit:
        for entry in found:
            if total <= limit - slack:
                break
            entry.path.unlink(missing_ok=True)
            total -= entry.nbytes
    return min(slack, limit - total)


def _scan(entries: Path) -> Iterator[Entry]:
    """Yield the files of our own making: the user may have pointed the cache at a folder that holds others."""
    suffix = _SUFFIXES[entries.name]
    with contextlib.suppress(FileNotFoundError), os.scandir(entries) as files:
        for file in files:
            key = file.name.removesuffix(suffix)
            if file.name.endswith(suffix) and _KEY.fullmatch(key) and not file.is_dir(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    status = file.stat(follow_symlinks=False)
                    yield Entry(key, Path(file.path), status.st_size, status.st_mtime)


def _warn_once(folder: Path, error: OSError) -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        message = (
            f"wideload keeps compiled kernels in memory only, not in {folder}: {error}. "
            "Name another folder in WIDELOAD_CACHE_DIR, or turn the disk cache off with WIDELOAD_CACHE=0."
        )
        with contextlib.suppress(RuntimeWarning):  # also where warnings are errors, the cache fails no call
            warnings.warn(message, RuntimeWarning, stacklevel=2)


own_environment()  # meets what is named there
