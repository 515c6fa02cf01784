"""Turns a GPU into how kernels are cut for it: by what was measured on it and kept in a file, else by the table of its architecture.

Knows one file, its checks and GPUs' names; never what was measured, nor how kernels are cut.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from wideload.decode import decode, parse_json
from wideload.errors import DeviceError, WideloadError
from wideload.gpus import Target, find_target
from wideload.launch import device_arch
from wideload.plan import ALLOWED, DEFAULT, Tuning, built_in_tuning
from wideload.store import cache_folder, named_path, read_file, write_whole

__all__ = ["TunedGpu", "read_tuned", "remove_tuned", "trying", "tuned_path", "tuning_for", "tuning_of", "write_tuned"]

FORMAT = 1
"""Of the file. One of another format is not read, and begun anew by who writes."""
_FILE = "tuning.json"


@dataclass(frozen=True, slots=True)
class TunedGpu:
    """The choices that were best on ``gpu``, as the driver calls it, and what they rest on."""

    gpu: str
    arch: str
    source: str
    choices: dict[str, int]

    @property
    def tuning(self) -> Tuning:
        """For the planner. Raises ``DeviceError`` for a choice that no kernel has."""
        unknown = sorted(set(self.choices) - set(ALLOWED))
        if unknown:
            raise DeviceError(f"a tuning for {self.gpu} chooses {', '.join(unknown)}; allowed: {', '.join(ALLOWED)}")
        return Tuning(self.arch, self.source, **self.choices)


def tuned_path() -> Path | None:
    """``$WIDELOAD_TUNING``, else ``tuning.json`` in the cache folder; None where there is neither."""
    if named := os.environ.get("WIDELOAD_TUNING"):
        return named_path(named)
    folder = cache_folder()
    return None if folder is None else folder / _FILE


def read_tuned(path: Path | None) -> tuple[TunedGpu, ...]:
    """What the file holds, nothing where there is none. Raises ``WideloadError`` where it is damaged or of another format."""
    if path is None:
        return ()
    try:
        content = parse_json(read_file(path))
        if content["format"] != FORMAT:
            raise WideloadError(f"it is of format {content['format']!r}, and this wideload reads {FORMAT}")
        found = tuple(decode(TunedGpu, entry, "gpus") for entry in content["gpus"])
        for gpu in found:
            _ = gpu.tuning
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise WideloadError(f"{path} cannot be read: {error.strerror}") from None
    except WideloadError as error:
        raise WideloadError(f"{path} is no tuning: {error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise WideloadError(f"{path} is no tuning ({type(error).__name__}: {error})") from None
    return found


def write_tuned(gpu: TunedGpu, path: Path) -> None:
    """Keep ``gpu`` in the file, in place of what was there of it; whole or not at all. Raises ``WideloadError`` where it cannot be."""
    others: tuple[TunedGpu, ...] = ()
    with contextlib.suppress(WideloadError):  # a damaged file is begun anew
        others = tuple(other for other in read_tuned(path) if (other.gpu, other.arch) != (gpu.gpu, gpu.arch))
    _write((*others, gpu), path)


def remove_tuned(path: Path) -> bool:
    """Remove the file; return whether there was one. Raises ``WideloadError`` where it cannot be."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    except OSError as error:
        raise WideloadError(f"{path} cannot be removed: {error.strerror}") from None
    finally:
        _forget()
    return True


def _write(gpus: Sequence[TunedGpu], path: Path) -> None:
    text = json.dumps({"format": FORMAT, "gpus": [asdict(gpu) for gpu in gpus]}, indent=1) + "\n"
    try:
        write_whole(path, text)
    except OSError as error:
        raise WideloadError(f"{path} cannot be written: {error.strerror}. Name another file in WIDELOAD_TUNING.") from None
    finally:
        _forget()


# ---- what the planner is given

_tried: ContextVar[Tuning | None] = ContextVar("wideload tuning", default=None)


@contextlib.contextmanager
def trying(tuning: Tuning) -> Iterator[None]:
    """Plan by ``tuning``, whatever the GPU, until the block ends: functions that have been called keep what they have planned."""
    token = _tried.set(tuning)
    try:
        yield
    finally:
        _tried.reset(token)


def tuning_of(device: torch.device) -> Tuning:
    """How kernels are cut for a CUDA device; for any other, as for an H200."""
    if (tried := _tried.get()) is not None:
        return tried
    return DEFAULT if device.type != "cuda" else _tuning_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _tuning_of(index: int) -> Tuning:
    arch, name = device_arch(index), torch.cuda.get_device_name(index)
    kept = next((gpu for gpu in _kept() if (gpu.gpu, gpu.arch) == (name, arch)), None)
    return built_in_tuning(arch) if kept is None else kept.tuning


def tuning_for(target: Target) -> Tuning:
    """How kernels are cut for a GPU that need not be here: by its own record in the file where it is named and has one."""
    if (tried := _tried.get()) is not None:
        return tried
    kept = () if target.gpu is None else _kept()
    return next((gpu.tuning for gpu in kept if _is_called(gpu, target)), built_in_tuning(target.arch))


def _is_called(gpu: TunedGpu, target: Target) -> bool:
    try:
        return find_target(gpu.gpu) == target
    except DeviceError:  # a GPU that no table has cannot be named either
        return False


def _kept() -> tuple[TunedGpu, ...]:
    path = tuned_path()
    return () if path is None else _read_once(path)


@functools.cache
def _read_once(path: Path) -> tuple[TunedGpu, ...]:
    """Once a process: a kernel that was planned is not planned anew. A damaged file costs one warning, and what it holds."""
    try:
        return read_tuned(path)
    except WideloadError as error:
        with contextlib.suppress(RuntimeWarning):  # also where warnings are errors, the file fails no call
            warnings.warn(
                f"{error}. The built-in choices are taken. Measure again: wideload tune; or remove it: wideload tune --reset",
                RuntimeWarning,
                stacklevel=2,
            )
        return ()


def _forget() -> None:
    _read_once.cache_clear()
    _tuning_of.cache_clear()
