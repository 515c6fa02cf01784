"""Turns an expression and CUDA tensors into launched kernels: plans once a layout, compiles once a variant, then only fills in pointers.

Knows tensors, plans and kernels; never Python functions or how arguments were spelt.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from wideload.cache import find_cubins
from wideload.dtypes import widened
from wideload.emit.kernel import emit_kernel
from wideload.errors import LayoutError, TraceError
from wideload.expr import Const, Expr, Number, Numerics, Reduced, evaluate_host, is_reduced, number_of_kind
from wideload.launch import LoadedKernel, can_overlap, device_arch
from wideload.layout import contiguous_strides
from wideload.lower import ScalarParameter
from wideload.overlap import Extent, relation
from wideload.plan import ACCESS_BYTES, KernelPlan, Operand, Target, Total, Tuning, find_parts, plan_kernels
from wideload.promotion import infer_dtype
from wideload.push import PushedExpr, push_views
from wideload.replay import NodeLayout
from wideload.tuned import tuning_of

if TYPE_CHECKING:
    from wideload.manifest import Recipe

__all__ = [
    "Launch", "Output", "checked_number", "clear_reduced", "empty_here", "is_safe_in_place", "kernel_arguments", "kernel_texts",
    "new_output", "new_sums", "node_dtype", "phase_of", "place_call", "plan_call", "prepare_launches", "run_launches", "run_new",
    "scalar_argument", "stage_launches", "value_of",
]  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A loaded kernel and the plan that its arguments follow."""

    kernel: LoadedKernel
    plan: KernelPlan

    @functools.cached_property
    def reads_host(self) -> bool:
        """Whether an argument is the value of a tensor in the host's memory."""
        return "value" in self.plan.variant.loads

    @functools.cached_property
    def types(self) -> str:
        """Of the arguments, eight bytes each: ``l`` an int, ``d`` a float."""
        plan = self.plan
        integers = len(plan.sources) + len(plan.targets) + (plan.seed is not None) + len(plan.sizes)
        return "l" * integers + "".join(_TYPES[parameter.kind] for parameter in plan.program.scalars)

    def arguments(self, inputs: Sequence[int], outputs: Sequence[int], scalars: tuple[Any, ...]) -> tuple[int | float, ...]:
        """As `kernel_arguments`, of addresses: those of the tensors, the seed last, and of what is written."""
        plan = self.plan
        loads = [(outputs[~tensor] if tensor < 0 else inputs[tensor]) + offset for tensor, offset in plan.sources]
        stores = [outputs[output] + offset for output, offset in plan.targets]
        return _arranged(plan, loads, stores, () if plan.seed is None else (inputs[plan.seed],), scalars)

    def fire(self, device: int, arguments: tuple[int | float, ...]) -> None:
        """Put the kernel on the current stream of ``device``."""
        if self.reads_host:
            self.kernel.launch(device, arguments)
        else:
            self.kernel.launch_packed(device, self.types, arguments)


_TYPES = {int: "l", float: "d", complex: "dd"}


class Output(NamedTuple):
    """A tensor to be written with node ``node``: ``phase_bytes`` is its address modulo a whole access.

    What ``is_reduced`` is one value of all elements, and has to be zero when a kernel starts. With ``num_columns`` it is partial sums of
    the node over rows of so many elements: of each of `find_parts` one row, along ``layout``'s first dim. With ``parts`` it is the
    sum of the rows of that output, which are such sums.
    """

    node: int
    dtype: torch.dtype
    layout: NodeLayout
    phase_bytes: int
    is_reduced: bool = False
    num_columns: int = 0
    parts: int | None = None


def new_output(expr: Expr, layouts: Sequence[NodeLayout], node: int) -> Output:
    """The output of a node whose tensor is still to be allocated: aligned."""
    return Output(node, node_dtype(expr, node), layouts[node], 0, is_reduced(expr, node))


def new_sums(expr: Expr, layouts: Sequence[NodeLayout], node: int, columns: tuple[int, ...]) -> Output:
    """The output of the partial sums of a node over rows of shape ``columns``, in fp32 or wider, still to be allocated."""
    num_columns = math.prod(columns)
    num_rows = math.prod(layouts[node].shape) // num_columns
    shape = (find_parts(num_rows, num_columns).count, *columns)
    layout = NodeLayout(shape, contiguous_strides(shape))
    return Output(node, widened(node_dtype(expr, node)), layout, 0, num_columns=num_columns)


def clear_reduced(expr: Expr, outs: Sequence[torch.Tensor]) -> None:
    """Set those of the tensors of ``expr``'s results to zero that kernels combine values in; on the current stream, which a graph keeps."""
    for node, out in zip(expr.outputs, outs, strict=True):
        if is_reduced(expr, node):
            out.zero_()


def node_dtype(expr: Expr, node: int) -> torch.dtype:
    """The dtype of a node that is no number."""
    found = expr.nodes[node]
    assert not isinstance(found, Const | Number)
    return found.dtype


def phase_of(tensor: torch.Tensor) -> int:
    """The address modulo a whole access, in bytes."""
    return tensor.data_ptr() % ACCESS_BYTES


def plan_call(
    expr: Expr,
    layouts: Sequence[NodeLayout],
    tensors: Sequence[torch.Tensor],
    outputs: Sequence[Output],
    device: torch.device,
    *,
    numerics: Numerics,
    fast_math: bool,
    tuning: Tuning | None = None,
) -> tuple[KernelPlan, ...]:
    """The kernels for these tensors: views pushed down to the operands, then planned. ``layouts`` are those of every node.

    ``tuning`` is that of ``device`` where left out.
    """
    pushed, operands, targets = place_call(expr, layouts, tensors, outputs, device)
    return plan_kernels(
        pushed.expr,
        operands,
        targets,
        numerics=numerics,
        fast_math=fast_math,
        walks=pushed.walks,
        seed=len(expr.operands),
        totals=_totals(outputs),
        tuning=tuning_of(device) if tuning is None else tuning,
    )


def _totals(outputs: Sequence[Output]) -> list[Total]:
    totals = []
    for position, output in enumerate(outputs):
        if output.parts is not None:
            parts = outputs[output.parts]
            shape = parts.layout.shape[0], parts.num_columns
            totals.append(Total(position, output.dtype, output.parts, parts.dtype, shape))
    return totals


def place_call(
    expr: Expr, layouts: Sequence[NodeLayout], tensors: Sequence[torch.Tensor], outputs: Sequence[Output], device: torch.device
) -> tuple[PushedExpr, list[Operand], list[Target]]:
    """The expression without views, and the views of these tensors that it reads and writes."""
    written: list[tuple[int, int, NodeLayout]] = []
    for position, output in enumerate(outputs):
        if output.parts is not None:
            continue
        node = expr.nodes[output.node]
        number = node.operand if isinstance(node, Reduced) else output.node
        layout = layouts[number] if isinstance(node, Reduced) or output.num_columns else output.layout
        written.append((number, position, layout))
    pushed = push_views(expr, layouts, written)
    operands = []
    for load in pushed.loads:
        tensor, on_host = tensors[load.operand], tensors[load.operand].device != device
        offset = load.view.offset * tensor.dtype.itemsize
        phase = 0 if on_host else (phase_of(tensor) + offset) % ACCESS_BYTES
        operands.append(Operand(tensor.dtype, NodeLayout(load.view.shape, load.view.strides), phase, load.operand, offset, on_host))
    targets = []
    for store in pushed.stores:
        output, node = outputs[store.output], expr.nodes[outputs[store.output].node]
        layout = NodeLayout(store.view.shape, store.view.strides)
        if isinstance(node, Reduced):
            targets.append(Target(store.node, output.dtype, layout, 0, store.output, reduction=node.reduction))
            continue
        if output.num_columns:
            if layout.shape != layouts[output.node].shape:
                raise LayoutError(f"{expr.name} cannot add up rows of a value that is computed in parts. Store the terms, and add them up.")
            targets.append(Target(store.node, output.dtype, layout, 0, store.output, num_columns=output.num_columns))
            continue
        offset = store.view.offset * output.dtype.itemsize
        phase = (output.phase_bytes + offset) % ACCESS_BYTES
        targets.append(Target(store.node, output.dtype, layout, phase, store.output, offset))
    return pushed, operands, targets


def kernel_texts(plans: Sequence[KernelPlan], device: int) -> list[tuple[str, str, str]]:
    """(source, architecture, name) of each kernel, as the compiler gets it."""
    return [(emit_kernel(plan.program, plan.variant), device_arch(device), plan.name) for plan in plans]


def prepare_launches(plans: Sequence[KernelPlan], device: int, recipe: Callable[[], Recipe | None] = lambda: None) -> tuple[Launch, ...]:
    """Compile and load the kernels, side by side where there are several; ``recipe`` makes the call that they are for."""
    cubins = find_cubins(kernel_texts(plans, device), recipe)
    return tuple(
        Launch(LoadedKernel(cubin, plan.grid, plan.variant.threads, overlaps=(number > 0 or len(plans) == 1) and can_overlap(device)), plan)
        for number, (cubin, plan) in enumerate(zip(cubins, plans, strict=True))
    )


def empty_here(device: torch.device) -> Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]:
    """What allocates a tensor of a shape, strides and a dtype on ``device``, the current one.

    It is what Inductor's code allocates with, at half the cost of ``torch.empty_strided``, which it is in another torch.
    """
    return _EMPTY or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


_EMPTY = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


def _new(outputs: Sequence[Output], device: torch.device) -> list[torch.Tensor]:
    return [
        torch.zeros(output.layout.shape, dtype=output.dtype, device=device)
        if output.is_reduced
        else torch.empty_strided(output.layout.shape, output.layout.strides, dtype=output.dtype, device=device)
        for output in outputs
    ]


def run_new(
    launches: Sequence[Launch], device: torch.device, tensors: Sequence[torch.Tensor], outputs: Sequence[Output], scalars: tuple[Any, ...]
) -> list[torch.Tensor]:
    """Put the kernels on the current stream of ``device``; the outputs, in memory of their own."""
    outs = _new(outputs, device)
    run_launches(launches, device.index, tensors, outs, scalars)
    return outs


def run_launches(
    launches: Sequence[Launch], device: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], scalars: tuple[Any, ...]
) -> None:
    """Put the kernels on the current stream of ``device``."""
    for launch, arguments in _stage(launches, tensors, outs, scalars):
        launch.fire(device, arguments)


def stage_launches(
    launches: Sequence[Launch], device: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], scalars: tuple[Any, ...]
) -> Callable[[], None]:
    """What puts the kernels on the current stream of ``device``, when all arguments of all of them have been found right."""
    return functools.partial(_fire_all, device, _stage(launches, tensors, outs, scalars), (tensors, outs))


def _fire_all(device: int, staged: Sequence[tuple[Launch, tuple[int | float, ...]]], held: object) -> None:
    """``held`` are the tensors whose addresses are among the arguments: none may be freed, and its memory given to another, before."""
    for launch, arguments in staged:
        launch.fire(device, arguments)


def _stage(
    launches: Sequence[Launch], tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor], scalars: tuple[Any, ...]
) -> list[tuple[Launch, tuple[Any, ...]]]:
    """Each kernel's arguments."""
    inputs, outputs = [tensor.data_ptr() for tensor in tensors], [out.data_ptr() for out in outs]
    return [
        (
            launch,
            kernel_arguments(launch.plan, tensors, outs, scalars, _address)
            if launch.reads_host
            else launch.arguments(inputs, outputs, scalars),
        )
        for launch in launches
    ]


def kernel_arguments(
    plan: KernelPlan,
    tensors: Sequence[torch.Tensor],
    outs: Sequence[torch.Tensor],
    scalars: tuple[Any, ...],
    pointer: Callable[[torch.Tensor, int], Any],
) -> tuple[Any, ...]:
    """A kernel's arguments in the order of its parameters: loads, stores, seed, sizes, runtime scalars.

    ``pointer`` makes an argument of a tensor and a number of bytes behind its first element.
    """
    loads = [
        argument
        for (tensor, offset), access in zip(plan.sources, plan.variant.loads, strict=True)
        for argument in (
            _numbers(tensors[tensor].item()) if access == "value" else (pointer(outs[~tensor] if tensor < 0 else tensors[tensor], offset),)
        )
    ]
    stores = [pointer(outs[output], offset) for output, offset in plan.targets]
    return _arranged(plan, loads, stores, () if plan.seed is None else (pointer(tensors[plan.seed], 0),), scalars)


def _arranged(plan: KernelPlan, loads: list[Any], stores: list[Any], seed: tuple[Any, ...], scalars: tuple[Any, ...]) -> tuple[Any, ...]:
    words = [word for parameter in plan.program.scalars for word in _numbers(scalar_argument(parameter, scalars))]
    return (*loads, *stores, *seed, *plan.sizes, *words)


def is_safe_in_place(plans: Sequence[KernelPlan], tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> bool:
    """Whether outputs that share memory with arguments may be written at once: by one kernel, each element read where it is written."""
    if len(plans) > 1:
        return False
    for plan in plans:
        assert all(tensor >= 0 for tensor, _ in plan.sources)  # none of its own outputs, as sums of parts have
        reads = [
            _extent(tensors[tensor], offset, layout) for (tensor, offset), layout in zip(plan.sources, plan.source_layouts, strict=True)
        ]
        writes = [_extent(outs[output], offset, layout) for (output, offset), layout in zip(plan.targets, plan.target_layouts, strict=True)]
        for write, result in zip(writes, plan.program.results, strict=True):
            refused = ("partial", "exact") if result.is_reduced else ("partial",)  # what is reduced to is set to zero before any is read
            if any(relation(read, write) in refused for read in reads):
                return False
    return True


def _extent(tensor: torch.Tensor, offset_bytes: int, layout: NodeLayout) -> Extent:
    address = tensor.data_ptr() + offset_bytes
    if tensor.device.type == "meta":  # whose addresses all count from 0: each storage has an address space of its own
        address += tensor.untyped_storage()._cdata << 64
    return Extent(address, tensor.element_size(), layout.shape, layout.strides)


def _address(tensor: torch.Tensor, offset_bytes: int) -> int:
    return tensor.data_ptr() + offset_bytes


def _numbers(value: complex) -> tuple[int | float, ...]:
    """What a number is passed as: a complex one as its parts, an int or a bool as the 64 bits of a ``long long``."""
    if isinstance(value, complex):
        return value.real, value.imag
    return (value,) if isinstance(value, float) else ((int(value) + (1 << 63)) % (1 << 64) - (1 << 63),)


def value_of(tensor: torch.Tensor) -> int | float:
    """The real number that a 0-dim tensor holds, as a kernel takes it."""
    return _numbers(tensor.item())[0]


def scalar_argument(parameter: ScalarParameter, scalars: tuple[Any, ...]) -> Any:
    """The runtime scalar's value for this call; raises as `checked_number`."""
    return checked_number(parameter, evaluate_host(parameter.value, scalars))


def checked_number(parameter: ScalarParameter, number: Any) -> Any:
    """What the kernel takes of the ``number`` that the runtime scalar is in this call.

    Raises ``TraceError`` where it is no longer of the kind that was traced, ``DtypeError`` where torch refuses a number of this size.
    """
    value = number_of_kind(parameter.value, parameter.kind, number)
    if parameter.kind is int and not -(1 << 63) <= value < 1 << 63:
        raise TraceError(f"{parameter.name} is {value}, which does not fit in 64 bits, as torch requires of an int. Pass a float.")
    for check in parameter.checks:
        if not check.low <= value <= check.high and value == value and abs(value) != math.inf:
            samples = (*check.samples[: check.position], (parameter.kind, repr(value)), *check.samples[check.position + 1 :])
            infer_dtype(check.op, samples, torch.get_default_dtype())
    return value
