"""Turns the layouts of results, and the caller's ``out=``, into tensors to write to; every rule of torch's on ``out=`` is checked first.

Allocates and compares addresses; knows nothing of expressions or kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from wideload.errors import DeviceError, DtypeError, GradError, LayoutError, OverlapError
from wideload.overlap import Extent, overlaps_itself, relation
from wideload.replay import NodeLayout

__all__ = ["check_outputs", "extent_of"]


def extent_of(tensor: torch.Tensor) -> Extent:
    """The memory that a strided tensor reaches."""
    return Extent(tensor.data_ptr(), tensor.element_size(), tuple(tensor.shape), tensor.stride())


def _is_same_view(one: torch.Tensor, other: torch.Tensor) -> bool:
    layouts = ((t.untyped_storage()._cdata, t.storage_offset(), t.dtype, t.shape, t.stride()) for t in (one, other))
    return next(layouts) == next(layouts)


def check_outputs(
    outs: Sequence[torch.Tensor],
    names: Sequence[str],
    layouts: Sequence[NodeLayout],
    dtypes: Sequence[torch.dtype],
    inputs: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
) -> bool:
    """Raise unless each of ``outs`` may receive its result; return whether one of them is also an input, element for element.

    Raises ``LayoutError`` (another shape), ``DtypeError`` (torch cannot cast the result to it), ``DeviceError``, ``GradError``
    (autograd would be bypassed) and ``OverlapError`` (an output that overlaps itself, another output, or partly an input).
    """
    inputs = list(inputs)
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (*outs, *(t for _, t in inputs)))
    if wants_grad:
        raise GradError(
            "out= does not support automatic differentiation, but a tensor requires grad. Call under torch.no_grad(), or without out=."
        )
    for out, name, layout, dtype in zip(outs, names, layouts, dtypes, strict=True):
        if tuple(out.shape) != layout.shape:
            raise LayoutError(
                f"{name} has shape {tuple(out.shape)}, the result has shape {layout.shape}. Give it that shape; it is not resized."
            )
        if not torch.can_cast(dtype, out.dtype):
            raise DtypeError(
                f"{name} is {out.dtype}, which cannot hold a {dtype} result. Use an out= of that kind, or convert inside the function."
            )
        if out.device != device:
            raise DeviceError(f"{name} is on {out.device}, the arguments are on {device}. Put all on one device.")
        if out.layout != torch.strided:
            raise LayoutError(f"{name} has layout {out.layout}; allowed: a strided tensor.")
        if out.is_inference() and not torch.is_inference_mode_enabled():
            raise GradError(
                f"{name} was made in inference mode, outside which torch lets nobody write it. Use .clone(), or write it there."
            )
        if out.is_conj() or out.is_neg():
            raise LayoutError(f"{name} is a lazily conjugated or negated view, which cannot be written through. Pass the tensor itself.")
    if device.type == "meta":  # without addresses, the memory of an argument is that of its storage
        return any(_is_same_view(out, tensor) for out in outs for _, tensor in inputs)
    extents = [extent_of(out) for out in outs]
    for name, extent in zip(names, extents, strict=True):
        if overlaps_itself(extent):
            raise OverlapError(
                f"{name} has several elements in one memory cell (strides {extent.strides}). Use a tensor of its own, such as .clone()."
            )
    for position, extent in enumerate(extents):
        for other in range(position):
            if relation(extent, extents[other]) != "none":
                raise OverlapError(f"{names[position]} and {names[other]} share memory. Give each result memory of its own.")
    is_in_place = False
    for argument, tensor in inputs:
        if tensor.device.type != device.type:
            continue
        have = extent_of(tensor)
        for name, extent in zip(names, extents, strict=True):
            match relation(extent, have):
                case "exact":
                    is_in_place = True
                case "partial":
                    raise OverlapError(
                        f"{name} shares part of its memory with argument {argument}. Use the very same view (in place), or other memory."
                    )
    return is_in_place
