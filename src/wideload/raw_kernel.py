"""Turns a CUDA kernel that was written by hand into a callable that checks its arguments, and into what is known of it.

Compiled, kept and launched like wideload's own; it must not know what the kernel computes.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wideload.cache import find_cubin
from wideload.errors import CompileError, DeviceError, LayoutError, RangeError, WideloadError
from wideload.gpus import find_target
from wideload.launch import LoadedKernel, device_arch
from wideload.nvrtc import Cubin, compile_ptx
from wideload.prototype import Parameter, parse_parameters
from wideload.sass import Access, disassemble, memory_accesses, parse_sass

if TYPE_CHECKING:
    from wideload.analyze.explain import Explanation
    from wideload.analyze.handwritten import Operand

__all__ = ["RawKernel", "RawPlan", "check_block", "check_grid", "raw"]

Dim3 = tuple[int, int, int]
Dims = int | Sequence[int] | Callable[..., int | Sequence[int]]
"""A number, up to three of them, or a function that gives these from the kernel's arguments."""

THREADS = 256
"""A block where nothing is said: enough warps for any occupancy, and few enough for any SM."""
_MAX_GRID = (2**31 - 1, 65_535, 65_535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024
"""Of every architecture (CUDA C++ Programming Guide, technical specifications)."""
_MAX_DYNAMIC_SHARED_BYTES = 48 << 10
"""Without asking the driver for more."""
_KEPT_GEOMETRIES = 256
"""Grids of one kernel that are kept ready."""


@dataclass(frozen=True)
class RawPlan:
    """A hand-written kernel for one architecture; compiled when first looked at."""

    name: str
    source: str
    arch: str

    @property
    def compiled(self) -> Cubin:
        """The cubin with ptxas' figures. Raises ``CompileError``."""
        return find_cubin(self.source, arch=self.arch, name=self.name, fma=True)

    @property
    def ptx(self) -> str:
        """The PTX between the source and the cubin."""
        return compile_ptx(self.source, arch=self.arch, name=self.name, fma=True)

    @property
    def cubin(self) -> bytes:
        """The machine code."""
        return self.compiled.code

    @property
    def sass(self) -> str:
        """The disassembled cubin."""
        return disassemble(self.cubin)

    @property
    def registers(self) -> int:
        """Registers a thread."""
        return self.compiled.registers

    @property
    def spill_bytes(self) -> int:
        """Bytes spilled to local memory, stores and loads."""
        return self.compiled.spill_store_bytes + self.compiled.spill_load_bytes

    @property
    def shared_bytes(self) -> int:
        """What the kernel declares, a block."""
        return self.compiled.shared_bytes

    @property
    def accesses(self) -> tuple[Access, ...]:
        """The loads and stores of the SASS, constants apart."""
        return tuple(access for access in memory_accesses(parse_sass(self.sass)) if access.space != "constant")


@dataclass(frozen=True, slots=True)
class _Call:
    """A call's arguments, as the kernel takes them, and its geometry. ``grid`` has a zero where nothing is launched."""

    values: tuple[torch.Tensor | np.generic, ...]
    grid: Dim3
    block: Dim3

    @property
    def is_empty(self) -> bool:
        return 0 in self.grid

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.values if isinstance(value, torch.Tensor)]


class RawKernel:
    """What `raw` returns: call it with the kernel's arguments in their order, or by name."""

    def __init__(self, source: str, name: str, grid: Dims | None, block: Dims, shared_bytes: int) -> None:
        self.source, self.__name__ = source, name
        self.parameters: tuple[Parameter, ...] = parse_parameters(source, name)
        if not 0 <= shared_bytes <= _MAX_DYNAMIC_SHARED_BYTES:
            raise RangeError(f"shared_bytes is {shared_bytes}; allowed: 0 to {_MAX_DYNAMIC_SHARED_BYTES}")
        self._grid, self._block, self._shared_bytes = grid, block, shared_bytes
        self._loaded = functools.lru_cache(_KEPT_GEOMETRIES)(self._load)

    def __repr__(self) -> str:
        return f"wideload.raw({self.__name__}({', '.join(p.name for p in self.parameters)}))"

    def __call__(self, *args: Any, grid: Dims | None = None, block: Dims | None = None, **named: Any) -> None:
        """Put the kernel on the current stream of the tensors' device; return None: results are in the tensors.

        ``grid`` and ``block`` replace those given to `raw`. A grid with a zero launches nothing. Raises ``DtypeError``, ``LayoutError``,
        ``RangeError`` or ``DeviceError``, which name the argument, and ``DeviceError`` for what the driver refuses.
        """
        call = self._bind(args, named, grid, block)
        device = self._device_of(call)
        if call.is_empty:
            return
        kernel = self._loaded(device_arch(device), call.grid, call.block)
        arguments = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in call.values]
        try:
            kernel.launch(device, arguments)
        except WideloadError:
            raise
        except Exception as error:  # cuda.core's own classes are private
            raise DeviceError(f"{self.__name__}: the driver refused {_geometry(call.grid, call.block)}: {error}") from error

    def plan(self, target: str | None = None) -> RawPlan:
        """The kernel as it is compiled for ``target``, a GPU's name (``"h200"``) or an architecture; the current GPU if left out."""
        if target is None and not torch.cuda.is_available():
            raise DeviceError(f'{self.__name__}.plan: there is no GPU and no target. Name one: target="h200" or target="sm_90".')
        return RawPlan(self.__name__, self.source, device_arch(torch.cuda.current_device()) if target is None else find_target(target).arch)

    def explain(
        self,
        *args: Any,
        grid: Dims | None = None,
        block: Dims | None = None,
        target: str | None = None,
        measure: bool = True,
        ncu: bool = False,
        **named: Any,
    ) -> Explanation:
        """How far a call is from its bound, and why. Tensors may be on ``meta``, if ``target`` names the GPU.

        The bytes, sectors, bank conflicts and divergence are those of the kernel's PTX, executed for some blocks with these arguments:
        no GPU is needed, and values in memory are unknown. Without ``target``, ``measure`` adds the time of the call by ``wl.bench``,
        and ``ncu`` the hardware counters of Nsight Compute. Raises as a call does.

        >>> import torch, wideload as wl
        >>> scale = wl.raw('extern "C" __global__ void scale(const float* x, float* y, int n) '
        ...     '{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) y[i] = 2 * x[4 * i]; }', "scale")
        >>> x, y = (torch.empty(size, device="meta") for size in (2**24, 2**22))
        >>> scale.explain(x, y, 2**22, target="h200").verdicts[0].limit  # a quarter of each sector of x is used
        'sectors'
        """
        from wideload.analyze.explain import GpuFigures
        from wideload.analyze.handwritten import explain_raw

        call = self._bind(args, named, grid, block)
        if ncu and target is not None:
            raise DeviceError(f"{self.__name__}.explain: ncu counts on the GPU that is here, not on {target}. Leave out target.")
        time_us = None
        if target is not None:
            figures = GpuFigures(find_target(target))
        else:
            try:
                device = self._device_of(call)
            except DeviceError:
                stray = next((tensor.device for tensor in call.tensors if tensor.device.type != "cuda"), None)
                if stray is None and torch.cuda.is_available():
                    raise
                got = "no GPU" if stray is None else f"tensors on {stray}"
                raise DeviceError(
                    f'{self.__name__}.explain got {got} and no target. Name the GPU: target="h200" or target="sm_90".'
                ) from None
            from wideload.measure import bench
            from wideload.measure.roofline import read_device

            figures = read_device(device)
            if measure and not call.is_empty:
                # By place: a kernel may call its parameters as bench calls its options.
                ordered = [value if isinstance(value, torch.Tensor) else value.item() for value in call.values]
                measured = bench(self, *ordered, grid=grid, block=block, check=False).subject.time_us
                time_us = None if measured is None else measured.median
        plan = RawPlan(self.__name__, self.source, figures.target.arch)
        explanation = explain_raw(
            plan.name,
            plan.source,
            figures,
            _build(plan),
            self._operands(call),
            _numbers(call),
            call.grid,
            call.block,
            self._shared_bytes,
            time_us,
        )
        return self._with_counters(explanation, plan, call) if ncu and not call.is_empty else explanation

    # ---- arguments

    def _bind(self, args: Sequence[Any], named: dict[str, Any], grid: Dims | None, block: Dims | None) -> _Call:
        names = [parameter.name for parameter in self.parameters]
        given = dict(zip(names, args, strict=False))
        twice = next((name for name in named if name in given), None)
        unknown = next((name for name in named if name not in names), None)
        missing = [name for name in names if name not in given and name not in named]
        wanted = f"{self.__name__} takes {len(names)} arguments: {', '.join(names)}"
        if len(args) > len(names) or twice or unknown or missing:
            fault = (
                f"{len(args)} were given" if len(args) > len(names)
                else f"{twice} is given twice" if twice
                else f"it has none called {unknown}" if unknown
                else f"{', '.join(missing)} missing"
            )  # fmt: skip
            raise LayoutError(f"{wanted}; {fault}")
        given |= named
        values = tuple(p.check_tensor(given[p.name]) if p.is_pointer else p.check_number(given[p.name]) for p in self.parameters)
        ordered = [given[name] for name in names]
        threads = check_block(self.__name__, _dims("block", self._block if block is None else block, ordered))
        return _Call(values, self._find_grid(values, self._grid if grid is None else grid, threads, ordered), threads)

    def _find_grid(self, values: Sequence[Any], wanted: Dims | None, block: Dim3, ordered: Sequence[Any]) -> Dim3:
        if wanted is not None:
            return check_grid(self.__name__, _dims("grid", wanted, ordered))
        outputs = (value for p, value in zip(self.parameters, values, strict=True) if p.is_pointer and not p.is_const)
        first = next(outputs, None)
        if first is None:
            raise LayoutError(
                f"{self.__name__} writes no tensor (no pointer but to const) whose elements a grid could be reckoned by: give grid="
            )
        return check_grid(self.__name__, (-(-first.numel() // math.prod(block)), 1, 1))

    def _device_of(self, call: _Call) -> int:
        placed = [(p.name, value.device) for p, value in zip(self.parameters, call.values, strict=True) if isinstance(value, torch.Tensor)]
        if not torch.cuda.is_available():
            raise DeviceError(f"{self.__name__}: a raw kernel needs a GPU, and none is here. To explain it needs none: name a target.")
        if not placed:
            return torch.cuda.current_device()
        first_name, first = placed[0]
        for name, device in placed:
            if device.type != "cuda":
                raise DeviceError(f'{self.__name__}: argument {name} is on {device}; allowed: a CUDA device. Use .to("cuda").')
            if device != first:
                raise DeviceError(f"{self.__name__}: argument {name} is on {device}, {first_name} on {first}; allowed: one device for all")
        return first.index

    def _load(self, arch: str, grid: Dim3, block: Dim3) -> LoadedKernel:
        cubin = find_cubin(self.source, arch=arch, name=self.__name__, fma=True)
        return LoadedKernel(cubin, grid, block, self._shared_bytes)

    # ---- explaining

    def _operands(self, call: _Call) -> list[Operand | None]:
        """The tensor arguments and where they lie; None for numbers."""
        from wideload.analyze.handwritten import Operand

        meta: dict[int, int] = {}
        operands: list[Operand | None] = []
        for parameter, value in zip(self.parameters, call.values, strict=True):
            if not isinstance(value, torch.Tensor):
                operands.append(None)
                continue
            address = value.data_ptr()
            if value.device.type == "meta":  # storages apart from each other, at addresses of their own
                base = meta.setdefault(int(value.untyped_storage()._cdata), (len(meta) + 1) * _META_PITCH)
                address = base + int(value.storage_offset()) * value.element_size()
            operands.append(Operand(parameter.name, value.dtype, tuple(value.shape), value.stride(), address, not parameter.is_const))
        return operands

    def _with_counters(self, explanation: Explanation, plan: RawPlan, call: _Call) -> Explanation:
        from wideload.analyze.handwritten import requested_sectors, walk_kernel
        from wideload.measure.ncu import add_counters
        from wideload.measure.relaunch import Pointer, Relaunch

        walk = walk_kernel(plan.ptx, plan.name, call.grid, call.block, self._operands(call), _numbers(call))
        arguments = tuple(Pointer(value) if isinstance(value, torch.Tensor) else value for value in call.values)
        sectors = requested_sectors(walk)
        return add_counters(explanation, [Relaunch(plan.name, plan.cubin, call.grid, call.block, self._shared_bytes, arguments, sectors)])


_META_PITCH = 1 << 42
"""Between the storages of tensors without memory: more than any tensor has."""


def raw(source: str, name: str, *, grid: Dims | None = None, block: Dims = THREADS, shared_bytes: int = 0) -> RawKernel:
    """Return kernel ``name`` of CUDA C++ ``source`` as a callable whose arguments are checked by its declaration.

    The kernel is ``extern "C" __global__`` and includes nothing. A pointer takes a tensor of the dtype that its type says (unsigned
    integers take any bits of that size, ``void`` any dtype), at an address aligned for that type; strides are the kernel's own matter.
    Numbers are checked against their type's range. ``grid`` and ``block`` are numbers, up to three of them, or functions of the
    arguments; without ``grid``, there is a thread for each element of the first tensor that is not ``const``. ``shared_bytes`` are
    dynamic. Raises ``CompileError`` where there is no such kernel; what NVRTC refuses is raised by the first call.

    >>> import wideload as wl
    >>> add = wl.raw('extern "C" __global__ void add(const float* x, const float* y, float* out, int n) '
    ...     '{ int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i]; }', "add")
    >>> [access.width_bits for access in add.plan("h200").accesses]
    [32, 32, 32]
    """
    return RawKernel(source, name, grid, block, shared_bytes)


def check_block(name: str, block: Sequence[int]) -> Dim3:
    """Return the threads of a block along x, y and z. Raises ``RangeError`` for what no architecture launches."""
    threads = _three("block", block)
    if math.prod(threads) > _MAX_THREADS or any(not 1 <= size <= most for size, most in zip(threads, _MAX_BLOCK, strict=True)):
        raise RangeError(f"{name}: block is {threads}; allowed: at least 1 thread, at most {_MAX_BLOCK}, and {_MAX_THREADS} together")
    return threads


def check_grid(name: str, grid: Sequence[int]) -> Dim3:
    """Return the blocks of a grid along x, y and z; 0 launches nothing. Raises ``RangeError`` for what no architecture launches."""
    blocks = _three("grid", grid)
    for axis, size, most in zip("xyz", blocks, _MAX_GRID, strict=True):
        if not 0 <= size <= most:
            raise RangeError(f"{name}: grid.{axis} is {size}; allowed: 0 to {most}. Let a thread do more, or use another axis.")
    return blocks


def _dims(what: str, wanted: Dims, arguments: Sequence[Any]) -> Dim3:
    found = wanted(*arguments) if callable(wanted) else wanted
    return _three(what, tuple(found) if isinstance(found, Sequence) else (found,))


def _three(what: str, sizes: Sequence[int]) -> Dim3:
    try:
        if not 1 <= len(sizes) <= 3 or any(isinstance(size, bool | np.bool_) for size in sizes):
            raise TypeError
        x, y, z = (*map(operator.index, sizes), 1, 1)[:3]
    except TypeError:
        raise LayoutError(f"{what} is {sizes[0] if len(sizes) == 1 else sizes!r}; allowed: one to three ints") from None
    return x, y, z


def _numbers(call: _Call) -> list[int | float | None]:
    return [None if isinstance(value, torch.Tensor) else value.item() for value in call.values]


def _geometry(grid: Dim3, block: Dim3) -> str:
    return f"a grid of {' x '.join(map(str, grid))} blocks of {' x '.join(map(str, block))} threads"


def _build(plan: RawPlan) -> Any:
    """The kernel as far as it can be compiled and disassembled here."""
    from wideload.analyze.handwritten import BuiltRaw

    cubin = plan.compiled  # without it there is nothing to explain, and the error says which line NVRTC refused
    try:
        return BuiltRaw(cubin, plan.ptx, disassemble(cubin.code, lineinfo=True))
    except CompileError as error:
        return BuiltRaw(cubin, plan.ptx, None, str(error))
