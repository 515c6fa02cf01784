"""Turns an expression into an operation that torch's autograd knows: one kernel forward, one for the gradients of all its inputs.

Only inputs are saved, and a seed where numbers were drawn. Knows expressions, tensors and autograd; never Python functions or how
arguments were spelt.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from wideload.dtypes import widened
from wideload.errors import DtypeError, LayoutError
from wideload.execute import Output, new_output, new_sums, phase_of, plan_call, prepare_launches
from wideload.expr import Expr, Load, Numerics, is_view_of_operand
from wideload.grad import Gradient, InputGradient, RowSum, Term, connected_nodes, derive_gradient, missing_rules
from wideload.launch import has_kernels
from wideload.layout import Strides, contiguous_strides, like_strides
from wideload.plan import KernelPlan, Tuning
from wideload.random import draw_seed
from wideload.reference import evaluate_expr
from wideload.remembered import remember
from wideload.replay import NodeLayout, replay_layout
from wideload.shortcut import Likeness, find_likeness
from wideload.steps import runner_of

if TYPE_CHECKING:
    from wideload.manifest import Recipe

__all__ = ["DifferentiableOp", "Launched"]

_MOST_IN_SUBSETS = 3
"""Results up to which each subset of them is looked at for the inputs that its gradients read; of more, all inputs are saved."""


class Launched(NamedTuple):
    """All that a call has done: ``launch`` of ``tensors`` and numbers, which returned its results in the places ``outputs``."""

    launch: Callable[[Sequence[torch.Tensor], tuple[Any, ...]], Sequence[torch.Tensor]]
    tensors: Sequence[torch.Tensor]
    outputs: Sequence[int]


@dataclass(frozen=True, slots=True)
class _Form:
    """What tensors of one layout need. ``launch`` is None where the reference computes; a seed is the last of its tensors.

    ``saved`` are the inputs that gradients read, ``constant`` the outputs that have none. ``layouts`` are those of all nodes, ``shapes``
    those of the inputs. ``recipe`` is the call whose build has the kernels of its gradients. ``likeness`` is to the tensors that it was
    first needed for, with gradients on or off as ``is_grad_enabled``; None where no kernel is launched.
    """

    op: DifferentiableOp
    device: torch.device
    devices: tuple[torch.device, ...]
    layouts: tuple[NodeLayout, ...]
    shapes: tuple[tuple[int, ...], ...]
    outputs: tuple[Output, ...]
    launch: Callable[[Sequence[torch.Tensor], tuple[Any, ...]], Sequence[torch.Tensor]] | None
    is_recorded: bool
    wanted: tuple[bool, ...]
    saved: tuple[int, ...]
    constant: tuple[int, ...]
    recipe: Recipe | None
    likeness: Likeness | None = None
    is_grad_enabled: bool = False
    backwards: dict[Any, _Backward] = field(default_factory=dict)

    def is_of(self, tensors: Sequence[torch.Tensor], device: torch.device, is_grad_enabled: bool) -> bool:
        """Whether these tensors are known to need it, at little cost."""
        if self.likeness is None or self.is_grad_enabled is not is_grad_enabled or self.device != device:
            return False
        return self.likeness.holds(tensors)

    def run(self, tensors: Sequence[torch.Tensor], scalars: tuple[Any, ...], seed: torch.Tensor | None) -> Sequence[torch.Tensor]:
        """The outputs, in memory of their own."""
        operands = tensors if seed is None else [*tensors, seed]
        if self.launch is not None:
            return self.launch(operands, scalars)
        nodes = [output.node for output in self.outputs]
        results = evaluate_expr(self.op.expr, nodes, operands, scalars, numerics=self.op.numerics)
        return [
            result if result.stride() == output.layout.strides else _empty(output, self.device).copy_(result)
            for result, output in zip(results, self.outputs, strict=True)
        ]

    def backward(self, present: tuple[bool, ...], wanted: tuple[bool, ...]) -> _Backward:
        """The operation that gives inputs ``wanted`` their gradients where those of outputs ``present`` have arrived."""
        found = self.backwards.get((present, wanted))
        if found is None:
            found = self._find_backward(present, wanted, sums_rows=False)
            if found.is_summed and has_kernels(self.device):
                summing = self._find_backward(present, wanted, sums_rows=True)
                found = replace(found, summing=summing if summing.op.sums_rows else None)
            self.backwards[present, wanted] = found
        return found

    def _find_backward(self, present: tuple[bool, ...], wanted: tuple[bool, ...], sums_rows: bool) -> _Backward:
        gradient, op = self.op.derive(self.layouts, present, wanted, sums_rows=sums_rows)
        if not set(gradient.inputs) <= set(self.saved):  # a shape was taken from another input: of all that were wanted none is missing
            gradient, op = self.op.derive(self.layouts, present, self.wanted, sums_rows=sums_rows)
        given = gradient.gradients
        is_direct = [len(of.terms) == 1 and not of.terms[0].num_summed and self.devices[of.operand] == self.device for of in given]
        reached = {of.operand for of in given if of.terms}
        zeros = _where(wanted) if self.op.is_derived else tuple(of.operand for of in given)
        return _Backward(
            op,
            tuple(self.saved.index(operand) for operand in gradient.inputs),
            tuple(self.op.fresh.index(position) for position in gradient.incoming),
            tuple((of.operand, of.terms[0].output) for of, direct in zip(given, is_direct, strict=True) if direct),
            tuple(of for of, direct in zip(given, is_direct, strict=True) if of.terms and not direct),
            tuple(operand for operand in zeros if operand not in reached),
        )

    def gradients(
        self,
        back: _Backward,
        saved: Sequence[torch.Tensor],
        scalars: tuple[Any, ...],
        seed: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
    ) -> tuple[torch.Tensor | None, ...]:
        """What ``back`` gives each input, where ``grads`` arrive at the outputs."""
        results: list[torch.Tensor | None] = [None] * len(self.devices)
        outs: list[torch.Tensor] | None = None
        if back.summing is not None and not torch.is_grad_enabled():  # what is added up in a kernel has no second derivative
            operands = back.summing.operands(saved, grads)
            outs = back.summing.op.attempt(operands, scalars, self.device, seed, recipe=lambda: self.recipe)
        if outs is not None and back.summing is not None:
            back = back.summing
        elif back.op.expr.outputs:
            outs = back.op(back.operands(saved, grads), scalars, self.device, seed, recipe=lambda: self.recipe)
        outs = outs or []
        for operand, output in back.direct:
            results[operand] = outs[output]
        for of in back.others:
            dtype = self.op.expr.operands[of.operand].dtype
            total = functools.reduce(torch.add, [_term(outs[term.output], term, dtype) for term in of.terms])
            results[of.operand] = total.to(device=self.devices[of.operand], dtype=dtype)
        for operand in back.zeros:
            dtype = self.op.expr.operands[operand].dtype
            results[operand] = torch.zeros(self.shapes[operand], dtype=dtype, device=self.devices[operand])
        return tuple(results)


@dataclass(frozen=True, slots=True)
class _Backward:
    """The operation that gives the gradients, what it reads (positions among the saved, among the incoming), and what its results are.

    ``direct`` are (input, result) that are a gradient as they stand, ``others`` those still to be summed, ``zeros`` the inputs whose
    gradient is zero everywhere. ``summing`` is the same with rows added up in the kernel, for the layouts in which it can.
    """

    op: DifferentiableOp
    inputs: tuple[int, ...]
    incoming: tuple[int, ...]
    direct: tuple[tuple[int, int], ...]
    others: tuple[InputGradient, ...]
    zeros: tuple[int, ...]
    summing: _Backward | None = None

    @property
    def is_summed(self) -> bool:
        """Whether a gradient is a sum."""
        return any(term.num_summed for of in self.others for term in of.terms)

    def operands(self, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """What the operation reads."""
        return [*[saved[at] for at in self.inputs], *[_resolved(grads[at]) for at in self.incoming]]


class DifferentiableOp:
    """``expr`` as an operation on tensors; the gradients that it is asked for are derived once a layout, and are operations again.

    ``strides`` has a derived operation: those that each result shall have, or None for those that eager PyTorch would give it. As in
    torch, what a derived operation reads has a gradient, of zeros where it has no other: that of ``relu`` reads its input. ``sums`` are
    those of a `Gradient`.
    """

    def __init__(
        self,
        expr: Expr,
        numerics: Numerics,
        *,
        fast_math: bool = False,
        strides: Sequence[Strides | None] | None = None,
        sums: Sequence[RowSum | None] | None = None,
    ) -> None:
        """Nothing is derived or compiled before the first call."""
        self.expr, self.numerics, self._fast_math = expr, numerics, fast_math
        sums = sums or [None] * len(expr.outputs)
        self._is_view = [is_view_of_operand(expr, node) and of is None for node, of in zip(expr.outputs, sums, strict=True)]
        self._views = [node for node, is_view in zip(expr.outputs, self._is_view, strict=True) if is_view]
        self.fresh = [position for position, is_view in enumerate(self._is_view) if not is_view]
        self.is_derived = strides is not None
        self._strides = [None if strides is None else strides[position] for position in self.fresh]
        self._sums = [sums[position] for position in self.fresh]
        self.sums_rows = any(of is not None for of in sums)
        self._last: _Form | None = None
        self._forms: dict[Any, _Form | Literal["contiguous", "reference"]] = {}
        self._backward_forms: dict[Any, _Form] = {}

    def __call__(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: tuple[Any, ...],
        device: torch.device,
        seed: torch.Tensor | None = None,
        *,
        recipe: Callable[[], Recipe | None] = lambda: None,
    ) -> list[torch.Tensor]:
        """The results on ``device``, recorded by autograd where a tensor wants a gradient; ``recipe`` makes the call that they are of.

        Raises ``LayoutError`` where the tensors' shapes do not fit the expression.
        """
        if seed is None and self.expr.has_draws:
            seed = draw_seed(device)
        enabled = torch.is_grad_enabled()
        last = self._last
        if last is not None and last.is_of(tensors, device, enabled):
            return self._apply(last, tensors, scalars, seed)
        form = self._known_form(tensors, device, enabled, recipe)
        if form == "reference":
            return self._recorded(tensors, scalars, seed)
        if form == "contiguous":
            return self([tensor.contiguous() for tensor in tensors], scalars, device, seed, recipe=recipe)
        self._last = form
        return self._apply(form, tensors, scalars, seed)

    def attempt(
        self,
        tensors: Sequence[torch.Tensor],
        scalars: tuple[Any, ...],
        device: torch.device,
        seed: torch.Tensor | None,
        *,
        recipe: Callable[[], Recipe | None],
    ) -> list[torch.Tensor] | None:
        """The results, where kernels give them of these very tensors; recorded they are not. Else None, and nothing is done."""
        last = self._last
        if last is None or not last.is_of(tensors, device, False):
            form = self._known_form(tensors, device, False, recipe)
            if not isinstance(form, _Form):
                return None
            last = self._last = form
        return self._apply(last, tensors, scalars, seed)

    def _known_form(
        self, tensors: Sequence[torch.Tensor], device: torch.device, enabled: bool, recipe: Callable[[], Recipe | None]
    ) -> _Form | Literal["contiguous", "reference"]:
        """What these tensors need; found when they first come."""
        try:
            key = (device, *[(enabled and t.requires_grad, t.shape, t.stride(), phase_of(t)) for t in tensors])
        except RuntimeError:
            if not self.is_derived:
                raise
            return "reference"  # several gradients in one tensor (is_grads_batched): it has no address
        form = self._forms.get(key)
        if form is None:
            wanted = tuple(enabled and tensor.requires_grad for tensor in tensors)
            form = "reference" if missing_rules(self.expr, _where(wanted)) else self._find_form(tensors, device, wanted, recipe)
            remember(self._forms, key, form)
        return form

    def again(
        self, tensors: Sequence[torch.Tensor], device: torch.device
    ) -> Callable[[Sequence[torch.Tensor], tuple[Any, ...]], Sequence[torch.Tensor]]:
        """The operation on tensors that are in all ways like these, which it has just been called with."""
        form = self._last
        if form is None or not form.is_of(tensors, device, torch.is_grad_enabled()):
            return lambda others, scalars: self(others, scalars, device)
        if self.expr.has_draws:
            return lambda others, scalars: self._apply(form, others, scalars, draw_seed(device))
        if form.is_recorded and self.fresh and not self._views:
            return lambda others, scalars: _record((form, scalars, None), *others)
        return lambda others, scalars: self._apply(form, others, scalars, None)

    def launched(self, tensors: Sequence[torch.Tensor], device: torch.device, seed: torch.Tensor | None) -> Launched | None:
        """What was launched for the ``fresh`` results of these tensors, which it has just been called with; None where not only that."""
        form = self._known_form(tensors, device, torch.is_grad_enabled(), lambda: None)
        if not isinstance(form, _Form) or form.launch is None or form.is_recorded:
            return None
        return Launched(form.launch, tensors if seed is None else [*tensors, seed], range(len(self.fresh)))

    def _apply(
        self, form: _Form, tensors: Sequence[torch.Tensor], scalars: tuple[Any, ...], seed: torch.Tensor | None
    ) -> list[torch.Tensor]:
        outs: Sequence[torch.Tensor] = ()
        if self.fresh:
            outs = _record((form, scalars, seed), *tensors) if form.is_recorded else form.run(tensors, scalars, seed)
        if not self._views:
            return list(outs)
        views, fresh = iter(evaluate_expr(self.expr, self._views, tensors, (), numerics="eager", differentiable=True)), iter(outs)
        return [next(views if is_view else fresh) for is_view in self._is_view]

    def _recorded(self, tensors: Sequence[torch.Tensor], scalars: tuple[Any, ...], seed: torch.Tensor | None) -> list[torch.Tensor]:
        """By torch's own operators, each of them recorded."""
        operands = [*tensors] if seed is None else [*tensors, seed]
        return evaluate_expr(self.expr, self.expr.outputs, operands, scalars, numerics=self.numerics, differentiable=True)

    def _find_form(
        self, tensors: Sequence[torch.Tensor], device: torch.device, wanted: tuple[bool, ...], recipe: Callable[[], Recipe | None]
    ) -> _Form | Literal["contiguous", "reference"]:
        """Plan these layouts. What a derived operation cannot view in them, it views in copies of the tensors, or torch does."""
        try:
            return self._form(tensors, device, wanted, recipe)
        except (DtypeError, LayoutError) as error:
            if not self.is_derived:
                raise
            is_final = isinstance(error, DtypeError) or all(tensor.is_contiguous() for tensor in tensors)
            return "reference" if is_final else "contiguous"

    def _form(
        self, tensors: Sequence[torch.Tensor], device: torch.device, wanted: tuple[bool, ...], recipe: Callable[[], Recipe | None]
    ) -> _Form | Literal["reference"]:
        layouts = _layouts(self.expr, tensors, device.type)
        if any(wanted) and any(0 in layout.shape for layout in layouts):
            return "reference"  # no elements, no kernel; torch knows the shapes of such gradients
        recorded = self.recorded_results(wanted)
        try:
            saved = self._find_saved(layouts, recorded, wanted)
        except DtypeError:  # a rule compares, and these numbers are complex
            return "reference"
        outputs, launch = self._outputs(layouts), None
        plans = self._plans(layouts, tensors, outputs, device) if outputs and has_kernels(device) else ()
        if device.type == "cuda" and outputs:
            launches = prepare_launches(plans, device.index, recipe)
            launch = runner_of(launches, outputs, device, len(tensors) + self.expr.has_draws)
        constant = () if self.is_derived else _where([not is_recorded for is_recorded in recorded])
        devices = tuple(tensor.device for tensor in tensors)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        call = recipe() if any(wanted) and launch and not self.is_derived else None  # no build has second derivatives
        likeness, enabled = find_likeness(tensors) if launch else None, torch.is_grad_enabled()
        return _Form(
            self, device, devices, layouts, shapes, outputs, launch, any(wanted), wanted, saved, constant, call, likeness, enabled
        )  # fmt: skip

    def find_read(self, operands: Sequence[NodeLayout], device_type: str, wanted: tuple[bool, ...]) -> tuple[int, ...] | None:
        """The inputs whose values the gradients of inputs ``wanted`` read. None where torch's own autograd has to record the expression."""
        if missing_rules(self.expr, _where(wanted)):
            return None
        layouts = replay_layout(self.expr, operands, device_type)
        try:
            return self._find_saved(layouts, self.recorded_results(wanted), wanted)
        except DtypeError:  # a rule compares, and these numbers are complex
            return None

    def find_passed(
        self, operands: Sequence[NodeLayout], device_type: str, present: tuple[bool, ...], wanted: tuple[bool, ...]
    ) -> dict[int, int]:
        """Of the inputs ``wanted``, those whose gradient is an incoming one as it stands: that of which of the ``fresh`` results."""
        gradient, _ = self.derive(replay_layout(self.expr, operands, device_type), present, wanted)
        incoming = {len(gradient.inputs) + at: self.fresh.index(position) for at, position in enumerate(gradient.incoming)}
        nodes = {
            of.operand: gradient.expr.nodes[gradient.expr.outputs[of.terms[0].output]]
            for of in gradient.gradients
            if len(of.terms) == 1 and not of.terms[0].num_summed
        }
        return {at: incoming[node.operand] for at, node in nodes.items() if isinstance(node, Load) and node.operand in incoming}

    def gradients(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        seed: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
        wanted: tuple[bool, ...],
        scalars: tuple[Any, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of inputs ``wanted`` where ``grads`` arrive at the ``fresh`` results; nothing is recorded."""
        form = self._backward_form(tensors, device, wanted)
        back = form.backward(tuple(grad is not None for grad in grads), wanted)
        return form.gradients(back, tensors, scalars, seed if back.op.expr.has_draws else None, grads)

    def launched_gradients(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        seed: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
        wanted: tuple[bool, ...],
    ) -> Launched | None:
        """What `gradients` has just launched for the gradients of inputs ``wanted``; None where it has done more than that, or other."""
        back = self._backward_form(tensors, device, wanted).backward(tuple(grad is not None for grad in grads), wanted)
        back = back.summing or back
        found = dict(back.direct)
        if found.keys() != {*_where(wanted)} or not {*found.values()} <= {*back.op.fresh}:
            return None
        launched = back.op.launched(back.operands(tensors, grads), device, seed if back.op.expr.has_draws else None)
        return launched and launched._replace(outputs=[back.op.fresh.index(found[operand]) for operand in _where(wanted)])

    def _backward_form(self, tensors: Sequence[torch.Tensor], device: torch.device, wanted: tuple[bool, ...]) -> _Form:
        key = (device, wanted, *[(tensor.shape, tensor.stride()) for tensor in tensors])
        form = self._backward_forms.get(key)
        if form is None:
            layouts = _layouts(self.expr, tensors, device.type)
            devices, shapes = tuple(tensor.device for tensor in tensors), tuple(tuple(tensor.shape) for tensor in tensors)
            read = tuple(range(len(tensors)))
            form = _Form(self, device, devices, layouts, shapes, self._outputs(layouts), None, True, wanted, read, (), None)
            remember(self._backward_forms, key, form)
        return form

    def _find_saved(self, layouts: Sequence[NodeLayout], recorded: tuple[bool, ...], wanted: tuple[bool, ...]) -> tuple[int, ...]:
        """The inputs that gradients read, whichever of the results have one: other inputs may be read where another result has none."""
        if not any(wanted):
            return ()
        results = _where(recorded)
        if len(results) > _MOST_IN_SUBSETS:
            return tuple(range(len(wanted)))
        inputs: set[int] = set()
        for number in range(1, 1 << len(results)):
            subset = {result for at, result in enumerate(results) if number >> at & 1}
            inputs |= set(self.derive(layouts, tuple(at in subset for at in range(len(recorded))), wanted)[0].inputs)
        return tuple(sorted(inputs))

    def recorded_results(self, wanted: tuple[bool, ...]) -> tuple[bool, ...]:
        """Which of the ``fresh`` results tensors ``wanted`` have a gradient through."""
        connected = connected_nodes(self.expr, _where(wanted))
        return tuple(self.expr.outputs[position] in connected for position in self.fresh)

    def _outputs(self, layouts: Sequence[NodeLayout]) -> tuple[Output, ...]:
        """Those of the ``fresh`` results, and behind them the partial sums that some are the totals of."""
        outputs: list[Output] = []
        parts: list[Output] = []
        for position, strides, of in zip(self.fresh, self._strides, self._sums, strict=True):
            node = self.expr.outputs[position]
            if of is not None:
                layout = NodeLayout(of.shape, contiguous_strides(of.shape))
                outputs.append(Output(node, of.dtype, layout, 0, parts=len(self.fresh) + len(parts)))
                parts.append(new_sums(self.expr, layouts, node, of.shape))
                continue
            output = new_output(self.expr, layouts, node)
            outputs.append(output if strides is None else output._replace(layout=NodeLayout(output.layout.shape, strides)))
        return (*outputs, *parts)

    def _plans(
        self,
        layouts: Sequence[NodeLayout],
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[Output],
        device: torch.device,
        tuning: Tuning | None = None,
    ) -> tuple[KernelPlan, ...]:
        return plan_call(
            self.expr,
            layouts,
            tensors,
            outputs,
            device,
            numerics=self.numerics,
            fast_math=self._fast_math,
            tuning=tuning,
        )

    def plan_gradient(
        self, tensors: Sequence[torch.Tensor], wanted: tuple[bool, ...], device: torch.device, tuning: Tuning | None = None
    ) -> tuple[Expr, tuple[KernelPlan, ...]]:
        """The gradients of tensors ``wanted`` and their kernels, where each result's gradient arrives in that result's own layout.

        ``tuning`` is that of ``device`` where left out.

        Raises ``GradError`` where torch's own autograd has to record the expression.
        """
        layouts = _layouts(self.expr, tensors, "cuda")
        present = self.recorded_results(wanted)
        gradient, op = self.derive(layouts, present, wanted, sums_rows=True)
        if op.sums_rows:
            with contextlib.suppress(LayoutError):
                return op.expr, op._plans_of_gradient(gradient, layouts, self, tensors, device, tuning)
            gradient, op = self.derive(layouts, present, wanted)
        return op.expr, op._plans_of_gradient(gradient, layouts, self, tensors, device, tuning)

    def derive(
        self, layouts: Sequence[NodeLayout], present: tuple[bool, ...], wanted: tuple[bool, ...], *, sums_rows: bool = False
    ) -> tuple[Gradient, DifferentiableOp]:
        """The gradients of tensors ``wanted``, from those of the ``fresh`` results ``present``, and the operation that they are.

        With ``sums_rows`` its kernels add up rows; nothing else computes it then.
        """
        positions = [self.fresh[at] for at in _where(present)]
        shapes = [layout.shape for layout in layouts]
        sums_rows = sums_rows and not any(0 in shape for shape in shapes)  # of no rows there is nothing to add up
        gradient = derive_gradient(self.expr, shapes, _where(wanted), positions, rounds=self.numerics == "eager", sums_rows=sums_rows)
        loads = {node.operand: layout for node, layout in zip(self.expr.nodes, layouts, strict=True) if isinstance(node, Load)}
        strides = [None if of is None else like_strides(loads[of].shape, loads[of].strides) for of in gradient.shaped]
        return gradient, DifferentiableOp(gradient.expr, "fused", fast_math=self._fast_math, strides=strides, sums=gradient.sums)

    def _plans_of_gradient(
        self,
        gradient: Gradient,
        layouts: Sequence[NodeLayout],
        function: DifferentiableOp,
        tensors: Sequence[torch.Tensor],
        device: torch.device,
        tuning: Tuning | None,
    ) -> tuple[KernelPlan, ...]:
        """The kernels of this, the ``gradient`` of ``function`` at ``tensors``, whose nodes have ``layouts``."""
        arriving = [new_output(function.expr, layouts, function.expr.outputs[position]) for position in gradient.incoming]
        operands = [*(tensors[at] for at in gradient.inputs), *(_empty(output, device) for output in arriving)]
        own = _layouts(self.expr, operands, "cuda")
        return self._plans(own, operands, self._outputs(own), device, tuning)


_Call = tuple[_Form, tuple[Any, ...], torch.Tensor | None]
"""What a call has besides tensors, its numbers and its seed: one argument to torch's graph, which looks at each."""


class _Fused(torch.autograd.Function):
    """One operation in torch's graph."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        form, scalars, seed = call
        outs = form.run(tensors, scalars, seed)
        ctx.form, ctx.scalars = form, scalars
        ctx.save_for_backward(*[tensors[at] for at in form.saved], *(() if seed is None else (seed,)))
        ctx.set_materialize_grads(False)
        if form.constant:
            ctx.mark_non_differentiable(*[outs[at] for at in form.constant])
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        form: _Form = ctx.form
        present = tuple([grad is not None for grad in grads])
        if not any(present):
            return (None,) * (1 + len(form.devices))
        back = form.backward(present, ctx.needs_input_grad[1:])
        saved: tuple[torch.Tensor, ...] = (
            ctx.saved_tensors if back.inputs or back.op.expr.has_draws else ()
        )  # torch refuses them the second time
        seed = saved[-1] if back.op.expr.has_draws else None
        return None, *form.gradients(back, saved, ctx.scalars, seed, grads)


_record: Callable[..., Any] = super(torch.autograd.Function, _Fused).apply
"""``_Fused.apply`` less what that does for ``torch.func``, which never comes here: a third of its cost to the host."""


def _resolved(grad: torch.Tensor | None) -> torch.Tensor:
    """A gradient that has arrived, in memory, with pending conjugation and negation done."""
    assert grad is not None
    if grad._is_zerotensor():  # zeros without memory
        return grad.clone()
    return grad.resolve_conj().resolve_neg() if grad.is_conj() or grad.is_neg() else grad


def _term(value: torch.Tensor, term: Term, dtype: torch.dtype) -> torch.Tensor:
    """A part of the gradient of an input of ``dtype``, in that input's shape; summed in fp32 or wider."""
    if not term.num_summed:
        return value
    for step in term.steps:
        value = value.squeeze(step.args) if step.name == "squeeze" else getattr(value, step.name)(*step.args)
    wide = torch.promote_types(widened(value.dtype), widened(dtype))
    return value.sum(tuple(range(term.num_summed)), dtype=wide)


def _layouts(expr: Expr, tensors: Sequence[torch.Tensor], device_type: str) -> tuple[NodeLayout, ...]:
    return replay_layout(expr, [NodeLayout(tuple(tensor.shape), tensor.stride()) for tensor in tensors], device_type)


def _where(marks: Sequence[bool]) -> tuple[int, ...]:
    return tuple(at for at, mark in enumerate(marks) if mark)


def _empty(output: Output, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(output.layout.shape, output.layout.strides, dtype=output.dtype, device=device)
