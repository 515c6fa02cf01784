"""Turns a cubin and arguments into work on a CUDA stream.

The only module that touches the driver. Knows pointers and integers, never expressions or layouts.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from wideload.errors import CompileError
from wideload.nvrtc import Cubin

__all__ = ["LoadedKernel", "device_arch"]


@functools.cache
def device_arch(device: int) -> str:
    """``sm_90`` for the CUDA device of that index."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _core() -> Any:
    """cuda.core, imported when the first kernel is launched: it costs 100 ms."""
    try:
        import cuda.core
    except ImportError as error:
        raise CompileError(
            f"launching a kernel needs cuda.core ({error}). Install wideload[cu13], or wideload[cu12] for a CUDA 12 driver."
        ) from error
    return cuda.core


class _ThreadState(threading.local):
    """The devices whose context is current in this thread's history, and cuda.core's object for each stream handle."""

    def __init__(self) -> None:
        self.bound: set[int] = set()
        self.streams: dict[int, Any] = {}


_thread = _ThreadState()


class LoadedKernel:
    """A kernel ready to launch as ``grid`` blocks of ``threads``; loading is lazy, and serves every device of its architecture."""

    __slots__ = ("_config", "_kernel", "_launch", "_library", "_stream_type")

    def __init__(self, cubin: Cubin, grid: int, threads: int) -> None:
        core = _core()
        self._library, self._kernel = _load(cubin)  # the kernel alone would not keep its library loaded
        self._config = core.LaunchConfig(grid=grid, block=threads)
        self._launch, self._stream_type = core.launch, core.Stream

    def launch(self, device: int, arguments: Sequence[int | float]) -> None:
        """Put the kernel on the current stream of ``device``, whichever device is current; launch errors are raised here."""
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self._launch_on_current(device, arguments)
        else:
            self._launch_on_current(device, arguments)

    def _launch_on_current(self, device: int, arguments: Sequence[int | float]) -> None:
        if device not in _thread.bound:  # a thread that has made no runtime call has no context yet
            torch.cuda.set_device(device)
            _thread.bound.add(device)
        handle = torch._C._cuda_getCurrentRawStream(device)
        stream = _thread.streams.get(handle)
        if stream is None:
            stream = _thread.streams[handle] = self._stream_type.from_handle(handle)
        self._launch(stream, self._config, self._kernel, *arguments)


@functools.cache
def _load(cubin: Cubin) -> tuple[Any, Any]:
    library = _core().ObjectCode.from_cubin(cubin.code)
    return library, library.get_kernel(cubin.name)
