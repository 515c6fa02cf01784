"""Turns planned kernels into what a user reads: source, PTX, cubin, SASS, registers, and the reason for each choice.

Compiles when asked, for the target named; launches nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wideload.cache import find_cubin
from wideload.emit.kernel import emit_kernel
from wideload.errors import CompileError
from wideload.execute import kernel_arguments
from wideload.expr import Expr
from wideload.nvrtc import Cubin, compile_ptx
from wideload.plan import KernelPlan

if TYPE_CHECKING:
    from wideload.analyze.explain import BuiltKernel
    from wideload.manifest import Recipe
    from wideload.measure.relaunch import Relaunch
    from wideload.sass import Access

__all__ = ["Plan", "PlannedKernel"]


class PlannedKernel(NamedTuple):
    """One kernel of a plan for one architecture; compiled when first looked at."""

    plan: KernelPlan
    arch: str
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        """The kernel's name in ``source``."""
        return self.plan.name

    @property
    def source(self) -> str:
        """The CUDA C++ that NVRTC gets."""
        return emit_kernel(self.plan.program, self.plan.variant)

    @property
    def compiled(self) -> Cubin:
        """The cubin with ptxas' figures. Raises ``CompileError``."""
        return find_cubin(self.source, arch=self.arch, name=self.name, recipe=self.recipe)

    def build(self) -> BuiltKernel:
        """The kernel as far as it can be compiled and disassembled here, for `wideload.analyze.explain`."""
        from wideload.analyze.explain import BuiltKernel
        from wideload.sass import disassemble

        cubin = None
        try:
            cubin = self.compiled
            return BuiltKernel(self.plan, self.source, cubin, disassemble(cubin.code, lineinfo=True))
        except CompileError as error:
            return BuiltKernel(self.plan, self.source, cubin, missing=str(error))

    def relaunch(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], scalars: tuple[Any, ...]) -> Relaunch:
        """The launch for these arguments (``outs`` may be on ``meta``), for `wideload.measure.ncu`, and the sectors that it requests."""
        from wideload.analyze.handwritten import requested_sectors
        from wideload.analyze.ptx import walk_ptx
        from wideload.measure.relaunch import Pointer, Relaunch

        arguments = kernel_arguments(self.plan, tensors, outs, scalars, Pointer)
        memory = (*tensors, *outs)
        starts = [_start_of(tensor, position) for position, tensor in enumerate(memory)]
        regions = [(start, start + tensor.untyped_storage().nbytes()) for start, tensor in zip(starts, memory, strict=True)]
        start_of = {id(tensor): start for start, tensor in zip(starts, memory, strict=True)}
        addresses = [
            start_of[id(value.tensor)] + int(value.tensor.storage_offset()) * value.tensor.element_size() + value.offset_bytes
            if isinstance(value, Pointer)
            else value
            for value in arguments
        ]
        grid, block = (self.plan.grid, 1, 1), (self.plan.variant.threads, 1, 1)
        walk = walk_ptx(self.ptx, self.name, grid, block, addresses, regions)
        return Relaunch(self.name, self.compiled.code, grid, block, 0, tuple(arguments), requested_sectors(walk))

    @property
    def ptx(self) -> str:
        """The PTX between the source and the cubin."""
        return compile_ptx(self.source, arch=self.arch, name=self.name)

    @property
    def sass(self) -> str:
        """The disassembled cubin."""
        from wideload.sass import disassemble  # here: most plans are not disassembled

        return disassemble(self.compiled.code)

    @property
    def main_accesses(self) -> tuple[Access, ...]:
        """The global loads and stores of the path that all blocks take but those at an edge; of all the kernel where it has no edge."""
        from wideload.sass import main_path

        return main_path(self.compiled.code, self.source)


_META_PITCH = 1 << 42
"""Between the storages of tensors without memory: more than any tensor has."""


def _start_of(tensor: torch.Tensor, position: int) -> int:
    """The address of a tensor's storage."""
    return (position + 1) * _META_PITCH if tensor.device.type == "meta" else tensor.untyped_storage().data_ptr()


class Plan:
    """What a call would run: usually one kernel; one for each shape among the results; none where there are no elements."""

    def __init__(self, function: str, arch: str, expr: Expr, kernels: tuple[KernelPlan, ...], recipe: Recipe | None = None) -> None:
        self.function, self.arch, self.expr, self.recipe = function, arch, expr, recipe
        self.kernels = tuple(PlannedKernel(kernel, arch, recipe) for kernel in kernels)

    @functools.cached_property
    def source(self) -> str:
        """The CUDA C++ of every kernel."""
        return "\n".join(kernel.source for kernel in self.kernels)

    @functools.cached_property
    def ptx(self) -> str:
        """The PTX of every kernel."""
        return "\n".join(kernel.ptx for kernel in self.kernels)

    @property
    def cubin(self) -> bytes:
        """The machine code of the kernel; of all, one after the other, where there are several."""
        return b"".join(kernel.compiled.code for kernel in self.kernels)

    @functools.cached_property
    def sass(self) -> str:
        """The disassembly of every kernel."""
        return "\n".join(kernel.sass for kernel in self.kernels)

    @property
    def registers(self) -> int:
        """Registers a thread, of the kernel that takes most."""
        return max((kernel.compiled.registers for kernel in self.kernels), default=0)

    @property
    def spill_bytes(self) -> int:
        """Bytes spilled to local memory, stores and loads."""
        return sum(kernel.compiled.spill_store_bytes + kernel.compiled.spill_load_bytes for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The plan for machines: names, families, geometry and reasons, without compiling."""
        return {
            "function": self.function,
            "arch": self.arch,
            "kernels": [
                {
                    "name": kernel.name,
                    "family": kernel.plan.variant.family,
                    "elements_per_thread": kernel.plan.variant.elements,
                    "index_bits": kernel.plan.variant.index_bits,
                    "num_elements": kernel.plan.num_elements,
                    "grid": kernel.plan.grid,
                    "threads": kernel.plan.variant.threads,
                    "reasons": [{"choice": r.choice, "value": r.value, "why": r.why} for r in kernel.plan.reasons],
                }
                for kernel in self.kernels
            ],
        }

    def __str__(self) -> str:
        lines = [f"{self.function} for {self.arch}: {len(self.kernels)} kernel{'s' * (len(self.kernels) != 1)}"]
        for kernel in self.kernels:
            lines.append(f"  {kernel.name}, {kernel.plan.num_elements} elements")
            lines += [f"    {r.choice:<18} {r.value:<16} {r.why}" for r in kernel.plan.reasons]
        return "\n".join(lines)

    __repr__ = __str__
