"""Turns a call of anything, fused, written by hand or plain torch code, into an explanation of it.

Chooses who explains; it must not know how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from wideload.errors import DeviceError, WideloadError
from wideload.fused import FusedFunction
from wideload.gpus import find_target
from wideload.raw_kernel import RawKernel
from wideload.structure import map_structure

if TYPE_CHECKING:
    from wideload.analyze.explain import Explanation

__all__ = ["explain"]


def explain(
    fn: Callable[..., Any], *args: Any, target: str | None = None, measure: bool = True, ncu: bool = False, **kwargs: Any
) -> Explanation:
    """How far ``fn(*args, **kwargs)`` is from its bound.

    A fused function and a hand-written kernel explain themselves: this is their ``explain``. Of any other callable, the least bytes (every
    argument's memory read once, every result's written once) stand beside the measured time; ``target`` names a GPU that is not here,
    for which there are only the bytes and the least time. ``ncu`` is for the former two. ``fn`` is called once, and by ``wl.bench`` on
    copies. Raises what ``fn`` raises, and ``DeviceError`` for tensors that are on no GPU where no ``target`` is named.

    >>> import torch, wideload as wl
    >>> x = torch.empty(2**28, dtype=torch.bfloat16, device="meta")
    >>> wl.explain(torch.sigmoid, x, target="h200").minimal.value == 2 * 2 * 2**28
    True
    """
    if isinstance(fn, FusedFunction | RawKernel):
        return fn.explain(*args, target=target, measure=measure, ncu=ncu, **kwargs)
    from wideload.analyze.explain import GpuFigures
    from wideload.analyze.opaque import explain_opaque
    from wideload.measure import bench, unique_bytes
    from wideload.measure.outcome import tensors_of
    from wideload.measure.roofline import read_device

    name = str(getattr(fn, "__name__", type(fn).__name__))
    if ncu:
        raise WideloadError(
            f"{name} is neither fused nor written by hand, and may launch any kernels: ncu counts those of the other two alone"
        )
    given = tensors_of((args, kwargs))
    device = next((tensor.device for tensor in given if tensor.device.type == "cuda"), None)
    if device is None and target is None:
        raise DeviceError(f'{name} got no tensor on a GPU, and no target. Name the GPU: target="h200".')
    if target is not None:
        args, kwargs = map_structure(lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, (args, kwargs))
        given = tensors_of((args, kwargs))
    read = unique_bytes(given)
    with torch.no_grad():
        results = tensors_of(fn(*args, **kwargs))
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    written = [tensor for tensor in results if tensor.untyped_storage()._cdata not in storages]
    num_elements = max((tensor.numel() for tensor in (*results, *given)), default=0)
    nbytes_written = unique_bytes(written)
    if target is not None:
        return explain_opaque(name, GpuFigures(find_target(target)), read, nbytes_written, num_elements, None)
    del results, written
    measured = bench(fn, *args, bytes=read + nbytes_written, check=False, **kwargs).subject.time_us if measure else None
    return explain_opaque(name, read_device(device), read, nbytes_written, num_elements, None if measured is None else measured.median)
