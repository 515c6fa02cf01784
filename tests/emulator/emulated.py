"""Runs a fused function's kernels on the CPU through the emulator: the launcher's work, without a GPU."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulator.emulator import Approx, build, run_on
from wideload.execute import kernel_arguments
from wideload.fused import FusedFunction
from wideload.reference import with_seed
from wideload.structure import map_structure
from wideload.trace import TensorResult

__all__ = ["behind", "run_emulated"]

_POISON = 0xA5


def run_emulated(f: FusedFunction, *args: Any, out: Any = None, approx: Approx = "exact", **kwargs: Any) -> Any:
    """What ``f(*args, out=out, **kwargs)`` would return on a GPU; every byte outside the outputs must stay as it was."""
    call = f._bind(args, kwargs)
    _, traced = f._trace(call)
    layouts = f._layouts(call, traced)
    if out is None:
        outs = [_poisoned(layouts[node].shape, layouts[node].strides, traced.expr.nodes[node].dtype) for node in traced.expr.outputs]
    else:
        outs = f._match_out(traced, out)
    plan = f.plan(*args, out=_as_structure(traced.result, outs), target="sm_90", **kwargs)
    tensors = with_seed(traced.expr, call.tensors, call.device)
    for kernel in plan.kernels:
        arguments = kernel_arguments(kernel.plan, tensors, outs, tuple(call.scalars), behind)
        places = zip(kernel.plan.targets, kernel.plan.target_layouts, strict=True)
        written = [behind(outs[output], offset).as_strided(layout.shape, layout.strides) for (output, offset), layout in places]
        grid, block = (kernel.plan.grid, 1, 1), (kernel.plan.variant.threads, 1, 1)
        run_on(build(kernel.source), kernel.name, grid, block, arguments, outputs=written, approx=approx)
    return out if out is not None else _as_structure(traced.result, outs)


def behind(tensor: torch.Tensor, offset_bytes: int) -> torch.Tensor:
    """A view that starts so many bytes behind the tensor's first element."""
    offset = tensor.storage_offset() + offset_bytes // tensor.element_size()
    return torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage(), offset, (0,), (1,))


def _poisoned(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty_strided(shape, strides, dtype=dtype)
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.fill_(_POISON)
    return tensor


def _as_structure(result: Any, outs: list[torch.Tensor]) -> Any:
    """The result with its tensors in place, and None for any other leaf, as ``out=`` takes it."""
    return map_structure(lambda leaf: outs[leaf.output] if isinstance(leaf, TensorResult) else None, result)
