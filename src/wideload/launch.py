"""Turns a cubin and arguments into work on a CUDA stream.

The only module that touches the driver. Knows pointers and integers, never expressions or layouts.
"""

from __future__ import annotations

import ctypes
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wideload.errors import CompileError, DeviceError
from wideload.nvrtc import Cubin

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "ADDRESS_OF",
    "KNOWN_ADDRESS_OF",
    "THREAD",
    "LoadedKernel",
    "TableKernel",
    "bind_context",
    "can_overlap",
    "current_stream",
    "device_arch",
    "has_kernels",
    "has_overlaps",
    "is_capturing",
    "refusal",
]


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


@functools.cache
def _driver() -> Any:
    """The driver's binding, which comes with cuda.core."""
    _core()
    from cuda.bindings import driver

    return driver


_GRAPHS_OVERLAP = 12030
"""The driver from which on CUDA graphs capture overlapping launches (CUDA 12.3: programmatic edges)."""


def has_kernels(device: torch.device) -> bool:
    """Whether what tensors there are given is computed by kernels, elsewhere by torch's operators."""
    return device.type == "cuda"


@functools.cache
def can_overlap(device: int) -> bool:
    """Whether a kernel may start before the one before it on its stream has ended: programmatic dependent launch, from sm_90 on."""
    return torch.cuda.get_device_capability(device) >= (9, 0) and _graphs_overlap()


def _graphs_overlap() -> bool:
    driver = _driver()
    status, version = driver.cuDriverGetVersion()
    return bool(status == driver.CUresult.CUDA_SUCCESS and version >= _GRAPHS_OVERLAP)


def has_overlaps(graph: int) -> bool:
    """Whether a kernel of the CUDA graph with this handle may start before the one ahead of it has ended."""
    if not _graphs_overlap():  # nor does such a driver have the function that tells
        return False
    driver, handle = _driver(), _driver().CUgraph(graph)
    find_edges = getattr(driver, "cuGraphGetEdges_v2", driver.cuGraphGetEdges)  # of CUDA 12, where the other one knows no kinds
    *_, num_edges = find_edges(handle)
    _, _, _, kinds, _ = find_edges(handle, num_edges)
    return any(kind.type == driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value for kind in kinds)


def current_stream(device: int) -> int:
    """The handle of the current stream of ``device``."""
    return int(torch._C._cuda_getCurrentRawStream(device))


def is_capturing(device: int) -> bool:
    """Whether the current stream of ``device`` is being captured in a CUDA graph."""
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


class _ThreadState(threading.local):
    """The devices whose context is current in this thread's history, and cuda.core's object for each stream handle."""

    def __init__(self) -> None:
        self.bound: set[int] = set()
        self.streams: dict[int, Any] = {}


THREAD = _ThreadState()

_READ = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_torchinductor_pyobject_tensor_data_ptr", 0)
"""Where a C function begins that Inductor's code reads addresses with; 0 in another torch."""

ADDRESS_OF = torch._C.TensorBase.data_ptr, 0, torch.Tensor, torch.nn.Parameter
"""How C comes by a tensor's address: a callable, which raises where there is none, in 40 ns. A plain tensor that torch's own guard finds
like another may have none: one that CUDA graphs of ``torch.compile`` wrote and will write again."""

KNOWN_ADDRESS_OF = ADDRESS_OF[0], _READ, *ADDRESS_OF[2:]
"""The same of tensors that have been asked before: that of a function that takes 3 ns, of these very types. What it throws is no exception
of Python's, and ends the process."""


class LoadedKernel:
    """A kernel ready to launch as ``grid`` blocks of ``threads``, either a number or one for each of x, y and z.

    Loading is lazy, and serves every device of its architecture. ``shared_bytes`` come on top of what the kernel declares.
    With ``overlaps`` its blocks start as soon as the kernel before it on the stream lets them, not when that one has ended.
    """

    __slots__ = (
        "_config", "_free", "_grid", "_kernel", "_launch", "_launcher", "_library", "_overlaps", "_shared_bytes", "_stream_type",
        "_threads",
    )  # fmt: skip

    def __init__(
        self,
        cubin: Cubin,
        grid: int | tuple[int, ...],
        threads: int | tuple[int, ...],
        shared_bytes: int = 0,
        *,
        overlaps: bool = False,
    ) -> None:
        core = _core()
        self._library, self._kernel = _load(cubin)  # the kernel alone would not keep its library loaded
        self._config = core.LaunchConfig(grid=grid, block=threads, shmem_size=shared_bytes, programmatic_stream_serialization=overlaps)
        self._launch, self._stream_type = core.launch, core.Stream
        self._grid, self._threads, self._shared_bytes, self._overlaps = _three(grid), _three(threads), shared_bytes, overlaps
        self._free: list[_Slot] = []
        self._launcher: tuple[str, Callable[[tuple[int | float, ...], int], object]] | None = None

    def launch(self, device: int, arguments: Sequence[int | float | np.generic]) -> None:
        """Put the kernel on the current stream of ``device``, whichever device is current; launch errors are raised here."""
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self._launch_on_current(device, arguments)
        else:
            self._launch_on_current(device, arguments)

    def _launch_on_current(self, device: int, arguments: Sequence[int | float | np.generic]) -> None:
        bind_context(device)
        handle = current_stream(device)
        stream = THREAD.streams.get(handle)
        if stream is None:
            stream = THREAD.streams[handle] = self._stream_type.from_handle(handle)
        self._launch(stream, self._config, self._kernel, *arguments)

    def launch_packed(self, device: int, types: str, arguments: tuple[int | float, ...]) -> None:
        """The same with arguments of eight bytes each, at less cost to the host: of ``types`` an ``l`` is an int, a ``d`` a float."""
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self.launch_here(device, types, arguments)
        else:
            self.launch_here(device, types, arguments)

    def launch_here(self, device: int, types: str, arguments: tuple[int | float, ...]) -> None:
        """The same where ``device`` is the current one."""
        bind_context(device)
        try:
            self.launcher(types)(arguments, torch._C._cuda_getCurrentRawStream(device))
        except RuntimeError as error:
            raise refusal(error) from None

    def launcher(self, types: str) -> Callable[[tuple[int | float, ...], int], object]:
        """What launches with arguments of these types on a stream, a handle, of the current device, to which this thread is bound.

        Gives the ``RuntimeError`` that `refusal` turns into this project's.
        """
        known = self._launcher
        if known is None or known[0] != types:
            known = self._launcher = types, self._direct_launcher(types) or functools.partial(self._launch_from_slot, _layout_of(types))
        return known[1]

    def _direct_launcher(self, types: str) -> Callable[[tuple[int | float, ...], int], object] | None:
        """By torch's own launcher, where that can tell the driver all that is to be told."""
        function, warps = _direct_function(), self._threads[0] // _WARP
        is_flat = self._threads == (warps * _WARP, 1, 1) and math.prod(self._grid) <= _MOST_DIRECT_BLOCKS
        if function is None or self._overlaps or not is_flat or len(types) > _MOST_DIRECT_ARGUMENTS:
            return None
        return functools.partial(function, int(self._kernel.handle), *self._grid, warps, self._shared_bytes, types)

    def native_launcher(
        self, native: Any, device: int, offsets: tuple[int, ...], sizes: tuple[int, ...], types: str
    ) -> Callable[..., None]:
        """`native`'s: of tensors, whose first bytes lie ``offsets`` behind their addresses, and of words of these types behind the sizes.

        ``device`` is the current one. Raises ``ValueError`` for more parameters than it takes.
        """
        config = _config_of(self)
        launch: Callable[..., None] = native.Launcher(
            launch=ctypes.cast(_launch_function(), ctypes.c_void_p).value,
            config=ctypes.string_at(config.getPtr(), _CONFIG_BYTES),
            function=int(self._kernel.handle),
            kept=(self, config),
            address_of=KNOWN_ADDRESS_OF,
            stream_of=torch._C._cuda_getCurrentRawStream,
            bind=bind_context,
            refuse=functools.partial(_refused, self._grid, self._threads),
            device=device,
            offsets=offsets,
            sizes=sizes,
            types=types,
        )
        return launch

    def _launch_from_slot(self, layout: struct.Struct, arguments: tuple[int | float, ...], stream: int) -> None:
        try:
            slot = self._free.pop()  # threads may launch one kernel at a time: each from memory of its own
        except IndexError:
            slot = _Slot(self, len(arguments))
        layout.pack_into(slot.values, 0, *arguments)
        slot.launch(stream)
        self._free.append(slot)


def refusal(error: RuntimeError) -> DeviceError:
    """What is raised where a launch has given ``error``."""
    if isinstance(error, DeviceError):
        return error
    return DeviceError(f"the driver did not launch a kernel: {error}. {_AFTER_A_FAULT}")


_AFTER_A_FAULT = (
    "Where that names an address or a fault of a kernel, an earlier kernel has failed, and this process can use the GPU no more: "
    "CUDA_LAUNCH_BLOCKING=1 finds the call."
)

_WARP = 32

_MOST_DIRECT_BLOCKS = 2**31 - 1
"""That torch's launcher knows as many from no blocks: it multiplies the grid's sizes in 32 bits."""

_MOST_DIRECT_ARGUMENTS = 25
"""That every version of torch's launcher takes (pytorch 2.7 and on; later ones take 120)."""


@functools.cache
def _direct_function() -> Callable[..., object] | None:
    """What Inductor launches Triton's kernels with; None in another torch.

    5.0 us a launch on an H200's host, of which the driver takes nearly all; 6.8 with arguments packed in a `_Slot`.
    """
    return getattr(getattr(torch._C, "_StaticCudaLauncher", None), "_launch_kernel", None)


@functools.cache
def _layout_of(types: str) -> struct.Struct:
    return struct.Struct(types.replace("l", "q"))


def _three(dims: int | tuple[int, ...]) -> tuple[int, ...]:
    given = (dims,) if isinstance(dims, int) else dims
    return (*given, *(1,) * (3 - len(given)))


@functools.cache
def _launch_function() -> Any:
    """``cuLaunchKernelEx``: with the launch described in memory, a call has four words. 6.2 us on an H200's host, 6.8 by cuda.core."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


_CONFIG_BYTES = 56
"""Of a ``CUlaunchConfig`` (cuda.h): seven sizes, the stream, the attributes and their number."""


def _config_of(kernel: LoadedKernel) -> Any:
    """The driver's description of a launch, but for the stream."""
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = kernel._grid
    config.blockDimX, config.blockDimY, config.blockDimZ = kernel._threads
    config.sharedMemBytes = kernel._shared_bytes
    if kernel._overlaps:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [attribute], 1
    return config


def _refused(grid: tuple[int, ...], threads: tuple[int, ...], status: int) -> DeviceError:
    """What is raised where the driver has answered ``status``."""
    blocks, block, name = " x ".join(map(str, grid)), " x ".join(map(str, threads)), _driver().CUresult(status).name
    return DeviceError(f"the driver did not launch {blocks} blocks of {block} threads: {name}. {_AFTER_A_FAULT}")


class _Slot:
    """The memory of one launch of a kernel: the driver's description of it, and its arguments, which the driver copies."""

    __slots__ = ("_config", "_config_at", "_function", "_handle", "_parameters", "_parameters_at", "_refused", "_stream", "values")

    def __init__(self, kernel: LoadedKernel, num_arguments: int) -> None:
        self._config, self._function, self._handle = _config_of(kernel), _launch_function(), int(kernel._kernel.handle)
        self._refused = functools.partial(_refused, kernel._grid, kernel._threads)
        self._stream = 0
        self.values = (ctypes.c_int64 * num_arguments)()
        first = ctypes.addressof(self.values)
        self._parameters = (ctypes.c_void_p * num_arguments)(*range(first, first + 8 * num_arguments, 8))
        self._config_at, self._parameters_at = self._config.getPtr(), ctypes.addressof(self._parameters)

    def launch(self, stream: int) -> None:
        """Put the kernel on ``stream``, a handle; the driver has copied the arguments when this returns."""
        if stream != self._stream:
            self._config.hStream, self._stream = _driver().CUstream(stream), stream
        status = self._function(self._config_at, self._handle, self._parameters_at, None)
        if status:
            raise self._refused(status)


class TableKernel:
    """A kernel that takes a table by value and a pointer; cuda.core passes no structs, so the driver's own binding launches it."""

    __slots__ = ("_handle", "_library", "_threads")

    def __init__(self, cubin: Cubin, threads: int) -> None:
        self._library, kernel = _load(cubin)
        self._handle, self._threads = int(kernel.handle), threads

    def launch(self, device: int, grid: int, table: npt.NDArray[np.int64], pointer: int) -> None:
        """Put the kernel on the current stream of ``device``; the driver has copied ``table`` when this returns."""
        if torch.cuda.current_device() != device:
            with torch.cuda.device(device):
                self._launch_on_current(device, grid, table, pointer)
        else:
            self._launch_on_current(device, grid, table, pointer)

    def _launch_on_current(self, device: int, grid: int, table: npt.NDArray[np.int64], pointer: int) -> None:
        bind_context(device)
        driver, cell = _driver(), np.array([pointer], np.int64)
        parameters = np.array([table.ctypes.data, cell.ctypes.data], np.uint64)
        (status,) = driver.cuLaunchKernel(
            self._handle, grid, 1, 1, self._threads, 1, 1, 0, current_stream(device), parameters.ctypes.data, 0
        )
        if status != driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"the driver refused to launch {grid} blocks of {self._threads} threads: {status.name}")


def bind_context(device: int) -> None:
    """Let this thread have a context on ``device``, the current one."""
    if device not in THREAD.bound:  # a thread that has made no runtime call has no context yet
        torch.cuda.set_device(device)
        THREAD.bound.add(device)


@functools.cache
def _load(cubin: Cubin) -> tuple[Any, Any]:
    library = _core().ObjectCode.from_cubin(cubin.code)
    return library, library.get_kernel(cubin.name)
