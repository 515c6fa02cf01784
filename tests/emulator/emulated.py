"""Runs a fused function's kernels on the CPU through the emulator: the launcher's work, without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.emulator.emulator import Approx, build, run_on
from wideload.emit.kernel import emit_kernel
from wideload.execute import clear_reduced, kernel_arguments
from wideload.foreach import find_listed
from wideload.fused import FusedFunction
from wideload.lists import ListPlan, Words, split_lists
from wideload.plan_foreach import chunk_map, table_words
from wideload.reference import with_seed
from wideload.structure import map_structure
from wideload.trace import TensorResult

__all__ = ["behind", "run_emulated", "run_lists_emulated"]

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
    clear_reduced(traced.expr, outs)
    for kernel in plan.kernels:
        arguments = kernel_arguments(kernel.plan, tensors, outs, tuple(call.scalars), behind)
        places = zip(kernel.plan.targets, kernel.plan.target_layouts, strict=True)
        written = [behind(outs[output], offset).as_strided(layout.shape, layout.strides) for (output, offset), layout in places]
        grid, block = (kernel.plan.grid, 1, 1), (kernel.plan.variant.threads, 1, 1)
        run_on(build(kernel.source), kernel.name, grid, block, arguments, outputs=written, approx=approx)
    return out if out is not None else _as_structure(traced.result, outs)


def run_lists_emulated(f: FusedFunction, *args: Any, out: Any = None, approx: Approx = "exact", **kwargs: Any) -> tuple[Any, int]:
    """What ``f.foreach(...)`` would return on a GPU, and in how many launches for lists; every byte outside the outputs must stay."""
    lists = split_lists(f.__name__, f._parameters(), args, kwargs, out)
    call = find_listed(f, lists, f._bind(*lists.at(0)))
    assert call is not None, "called item by item"
    made, tables = call.fill()
    plans = call.listed.plans or ()
    for tensor in (tensor for tensors in made for tensor in tensors or ()):
        torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(_POISON)
    call.clear(made)
    fresh = [[tensors[k] if tensors else None for tensors in made] for k in range(max(len(tensors or ()) for tensors in made))]
    columns = [*call.columns, *(call.outs or fresh)]
    for plan, table in zip(plans, tables, strict=True):
        written = [columns[column][position] for column in plan.stores for position in plan.positions]
        chunks = torch.from_numpy(chunk_map(plan.variant, plan.sizes))
        grid, block = (len(chunks), 1, 1), (plan.variant.threads, 1, 1)
        source = emit_kernel(plan.program, plan.variant)
        run_on(build(source), plan.name, grid, block, [_words(plan, table, columns, call.seeds), chunks], outputs=written, approx=approx)
    own: dict[int, Any] = {}
    for item in call.listed.others:
        item_args, item_kwargs = lists.at(item)
        result = run_emulated(f, *item_args, out=None if out is None else out[item], approx=approx, **item_kwargs)
        own[item] = result
    if out is not None:
        return out, len(plans)
    return [own[item] if tensors is None else call._result(item, tensors) for item, tensors in enumerate(made)], len(plans)


def _words(plan: ListPlan, table: Words, columns: list[Any], seeds: torch.Tensor | None) -> list[torch.Tensor | int | float]:
    """The table's words, with the tensor in the place of each address: the very words that the launcher filled in."""
    words: list[Any] = table.tolist()
    doubles = table.view(np.float64).tolist()
    places = iter(table_words(plan.program, plan.variant))

    def address(at: int, tensor: torch.Tensor) -> None:
        offset = words[at] - tensor.untyped_storage().data_ptr()
        assert 0 <= offset <= tensor.untyped_storage().nbytes(), "an address outside its tensor"
        words[at] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage(), offset, (0,), (1,))

    for (column, _), access in zip(plan.loads, plan.variant.loads, strict=True):
        at, count = next(places)
        for slot in range(min(count, len(plan.positions))):
            tensor = columns[column][plan.positions[slot] if len(columns[column]) > 1 else 0]
            if access != "value":
                address(at + slot, tensor)
    assert plan.variant.table is not None
    for column, load in zip(plan.stores, plan.variant.table.in_place, strict=True):
        at, _ = next(places) if load is None else (0, 0)
        for slot, position in enumerate(plan.positions if load is None else ()):
            address(at + slot, columns[column][position])
    next(places)
    for scalar in plan.program.scalars:
        at, count = next(places)
        if scalar.kind is not int:
            words[at : at + count] = doubles[at : at + count]
    for at, _ in places:
        assert seeds is not None
        address(at, seeds)
    return words


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
