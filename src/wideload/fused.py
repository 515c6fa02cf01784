"""Turns a plain Python function over torch tensors into one that runs as a single kernel.

Binds a call's arguments, traces once a signature, and sends CUDA tensors to kernels and CPU tensors to the
reference. The only stage that sees all others; each call takes the path drawn in docs/architecture.md.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, overload

import numpy as np
import torch
from torch.compiler import is_dynamo_compiling

from wideload.background import Backlog
from wideload.captures import find_captures, unwrap_callable
from wideload.compiled import bind_method, call_operator, find_proxy, is_operator_wanted
from wideload.config import config
from wideload.errors import CompileError, DeviceError, DtypeError, GradError, LayoutError, TraceError
from wideload.execute import (
    Launch,
    Output,
    clear_reduced,
    is_safe_in_place,
    kernel_texts,
    new_output,
    node_dtype,
    phase_of,
    plan_call,
    prepare_launches,
    run_new,
    stage_launches,
)
from wideload.expr import Numerics, evaluate_host, is_reduced, is_view_of_operand
from wideload.gpus import find_target
from wideload.launch import is_capturing
from wideload.modes import has_shards, is_looked_into, no_modes
from wideload.outputs import check_outputs
from wideload.plan import KernelPlan, Tuning
from wideload.planned import Plan
from wideload.reference import evaluate_expr, with_seed
from wideload.remembered import remember
from wideload.replay import NodeLayout, replay_layout
from wideload.shortcut import MISSED, STATIC_TYPES, Found, Shortcuts, are_immutable, find_circumstances, find_shortcut, kinds_of
from wideload.steps import Steps, run_steps, steps_into, steps_of_new
from wideload.structure import are_same, map_structure, same_structure
from wideload.torch_library import note_function
from wideload.trace import HostResult, NumberArg, TensorArg, TensorResult, Traced, is_traced, trace_function
from wideload.tuned import tuning_for, tuning_of

if TYPE_CHECKING:
    from wideload.analyze.explain import Explanation, GpuFigures
    from wideload.build import Build
    from wideload.foreach import Listed
    from wideload.manifest import Recipe
    from wideload.sharding import Sharding
    from wideload.torch_op import DifferentiableOp

__all__ = ["FusedFunction", "fuse"]

_T = TypeVar("_T")


@dataclass(slots=True)
class _Call:
    """One call's arguments, taken apart: ``spec`` has a ``TensorArg``, ``NumberArg`` or static value at each leaf.

    ``arguments`` are as they were passed; ``given`` too, where calls like this one may take a shortcut. ``traced_with``: what the function
    had captured, and the default dtype.
    """

    spec: tuple[Any, Any] = ((), {})
    tensors: list[torch.Tensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    scalars: list[Any] = field(default_factory=list)
    entered: dict[int, tuple[int, TensorArg]] = field(default_factory=dict)
    key: list[Any] = field(default_factory=list)
    given: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    arguments: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    traced_with: tuple[Any, ...] = ()
    shapes: list[tuple[int, ...]] | None = None  # to be traced with, where those of the tensors are symbols

    @property
    def traced_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Those that it is traced with."""
        return tuple(self.shapes or [tuple(tensor.shape) for tensor in self.tensors])


class _Prepared(NamedTuple):
    """What one layout of one trace needs: where results go, and the kernels that fill them."""

    outputs: tuple[Output, ...]
    launches: tuple[Launch, ...]


class FuseOptions(NamedTuple):
    """What :func:`fuse` was told; see there."""

    name: str | None = None
    static: tuple[str, ...] = ()
    numerics: Numerics = "fused"
    fast_math: bool = False
    compile: str = "op"


class _Method:
    """What stands in a class for a fused function.

    The function is no descriptor itself: Dynamo takes any for one of a class, also where it is an attribute of an object (torch 2.11).
    Of a class Dynamo reads the very object that stands there, which is called then, and has the function's attributes.
    """

    __slots__ = ("_function",)

    def __init__(self, function: FusedFunction) -> None:
        self._function = function

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        if instance is None:
            return self._function
        if is_dynamo_compiling():
            return bind_method(self._function, instance)
        return self._function.bound_to(instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Method, (self._function,)


class FusedFunction:
    """A function fused by :func:`fuse`; call it as the function it wraps, with ``out=`` for results into existing memory."""

    def __init__(self, fn: Callable[..., Any], options: FuseOptions) -> None:
        """Wrap ``fn``; nothing is traced before the first call."""
        self.__wrapped__ = fn
        self._fn = unwrap_callable(fn)
        self._captures = find_captures(fn)
        self._options, self._static = options, frozenset(options.static)
        self.__name__ = options.name or str(getattr(fn, "__name__", type(fn).__name__))
        self.__qualname__ = str(getattr(fn, "__qualname__", self.__name__))
        self.__doc__ = fn.__doc__
        self.__module__ = str(getattr(fn, "__module__", __name__))
        name = "".join(c if c.isascii() and c.isalnum() else "_" for c in self.__name__).strip("_") or "fused"
        self._kernel_name = f"fused_{name}" if name[0].isdigit() else name
        self._signature, self._defaults = _signature_of(fn), _defaults_of(fn)
        parameters = self._parameters()
        unknown = self._static.difference(parameters) if self._signature else ()
        if unknown:
            raise TraceError(f"static= names {sorted(unknown)}, but {self.__name__} has the parameters {parameters}")
        self._shortcuts = Shortcuts()
        self._names, self._starred = _positional_names(self._signature)
        self._identity = note_function(self)
        self._operator_bases: dict[Any, str] = {}  # by what it has captured
        self._operator_shortcuts: dict[str, Shortcuts] = {}  # by the operator's name: it outlives a method's object
        self._descriptor: FusedFunction | None = None  # what this is the bound method of
        self._names_in_classes = {self.__name__, getattr(fn, "__name__", self.__name__)}
        setattr(self, "__get__", self._get)  # noqa: B010  enum and functools ask the object whether it is a method; Dynamo asks its type
        self._traces: dict[Any, Traced] = {}
        self._sized: dict[Any, None] = {}  # signatures of functions that read sizes: their traces hold for one set of shapes
        self._prepared: dict[Any, _Prepared] = {}
        self._backlog = Backlog()
        self._ops: dict[Any, DifferentiableOp] = {}
        self._listed: dict[Any, Listed] = {}
        self._shardings: dict[Any, Sharding | None] = {}
        self._alike: dict[Any, tuple[Any, Listed]] = {}  # the last lists of some kind: tells in one C call whether they are like them

    def __repr__(self) -> str:
        return f"<wideload.fuse of {self.__qualname__}>"

    def __set_name__(self, owner: type, name: str) -> None:
        """A fused function in the body of a class is a method: ``self`` is bound, and what it reads of ``self`` is read at each call."""
        if not isinstance(self.__wrapped__, staticmethod):
            self._names_in_classes.add(name)
            type.__setattr__(owner, name, _Method(self))  # whatever its metaclass allows later

    def _get(self, instance: Any, owner: Any = None) -> FusedFunction:
        return self if instance is None else self.bound_to(instance)

    def is_unbound(self, args: tuple[Any, ...]) -> bool:
        """Whether the first of a call's arguments is what a method is bound to: a class that has it, or an object of one."""
        if len(args) == 0 or isinstance(args[0], torch.Tensor):
            return False
        cls = args[0] if isinstance(args[0], type) else type(args[0])
        return any(getattr(getattr(cls, name, None), "_function", None) is self for name in self._names_in_classes)

    @property
    def __isabstractmethod__(self) -> bool:
        """Whether a subclass has to override it: that of the plain function."""
        return bool(getattr(self.__wrapped__, "__isabstractmethod__", False))

    @property
    def _function(self) -> FusedFunction:
        """Itself, where what stands in a class for it has it: Dynamo traces through the one, and its guards look into the other."""
        return self

    def bound_to(self, instance: Any) -> FusedFunction:
        """The function with ``instance``, or a class, as its first argument: the same object where that can have more attributes."""
        attributes = getattr(instance, "__dict__", {})
        key = f"__wideload_{self.__qualname__}_{id(self)}"  # two methods of a class may have one name: lambdas, closures
        bound = attributes.get(key)
        # a copied instance has copied the attribute as well, and one read from a file brings another process's ids
        if bound is None or bound._descriptor is not self or bound.__wrapped__.__self__ is not instance:
            bound = type(self)(types.MethodType(self.__wrapped__, instance), self._options)
            bound._descriptor = self
            if isinstance(attributes, dict):
                attributes[key] = bound
            elif isinstance(instance, type):
                with contextlib.suppress(TypeError):  # a builtin class
                    setattr(instance, key, bound)
        return bound

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by reference, as functions are; a method by the name that it has in its class, which a lambda's own is not."""
        if isinstance(self.__wrapped__, types.MethodType):
            instance = self.__wrapped__.__self__
            names = (
                name
                for cls in type(instance).__mro__
                for name, value in vars(cls).items()
                if isinstance(value, _Method) and value._function is self._descriptor
            )
            return getattr, (instance, next(names, self.__wrapped__.__name__))
        return self.__qualname__

    # ---- calling

    def __call__(self, /, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Compute the function; new tensors as eager PyTorch would return them, or ``out`` filled in and returned.

        Raises a ``WideloadError`` for what cannot be fused or written; nothing has been written then.
        """
        if is_dynamo_compiling():
            return call_operator(self, args, kwargs, out)
        last = self._shortcuts.last
        if last is not None and (out is None or isinstance(out, torch.Tensor)):
            result = last(args, kwargs, out)
            if result is not MISSED:
                return result
            if (result := self._shortcuts.take_another(last, args, kwargs, out)) is not MISSED:
                return result
        if is_traced(args, kwargs):
            return self._inline(args, kwargs, out)
        if self.is_unbound(args):
            return self.bound_to(args[0])(*args[1:], out=out, **kwargs)
        try:
            call = self._bind(args, kwargs)
        except TraceError:
            proxy = find_proxy((args, kwargs))
            if proxy is None:
                raise
            return proxy.tracer.create_proxy("call_function", self, args, kwargs if out is None else {**kwargs, "out": out})
        call.given = (args, kwargs)
        is_plain = not is_looked_into(call.tensors)
        if not is_plain and has_shards(call.tensors):
            from wideload.sharding import find_sharded_call  # here, as other stages that most calls do without

            with no_modes():
                sharded = self._run(call, functools.partial(find_sharded_call, self, call, out))
            if sharded is not None:
                return sharded.run()
        if not is_plain and self._options.compile == "op" and is_operator_wanted(call.tensors):
            return call_operator(self, args, kwargs, out)
        return self._call(call, is_plain) if out is None else self._run(call, functools.partial(self._call_into, call, out))

    def foreach(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        """Compute the function for every item of lists, on a GPU in one launch for all items of the same dtypes.

        A ``list`` or ``tuple`` among the arguments has one item a call, a tensor or a number; anything else is the same for all. Returns
        the list of what each call by itself would return: dtype, shape and strides as eager PyTorch gives them; ``out=`` is a list of
        the same structure, filled in and returned; in place is ``out=`` the very list of the argument. Numbers may be a Python number
        for all, a list of them, or 0-dim tensors, which are read on their device, without a synchronisation.

        Items whose operands do not walk memory in one run, or whose coordinates and random numbers are not counted along it, take a
        launch each. Each item that draws has a seed of its own; those that share a launch take theirs at once. Raises as a call does;
        ``LayoutError`` for lists of different lengths, ``OverlapError`` where an output shares memory with another item's. Nothing has
        been written then.

        >>> import torch, wideload as wl
        >>> scale = wl.fuse(lambda x, s: x * s)
        >>> scale.foreach([torch.ones(2), torch.ones(3)], 2.0)
        [tensor([2., 2.]), tensor([2., 2., 2.])]
        """
        from wideload.foreach import call_lists

        return call_lists(self, args, kwargs, out)

    def _call(self, call: _Call, is_plain: bool | None = None) -> Any:
        """New results of a call."""
        if is_plain is None:
            is_plain = not is_looked_into(call.tensors)
        wants_grad = _wants_grad(call.tensors)
        if call.device.type == "cuda" and is_plain and not wants_grad:
            return self._run(call, functools.partial(self._launch, call))
        if call.device.type == "meta" and not wants_grad:
            return self._run(call, functools.partial(self._call_meta, call))
        if is_plain and wants_grad:
            return self._run(call, functools.partial(self._call_differentiable, call))
        return self._run(call, functools.partial(self._call_reference, call))

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the function with torch's own operators, on any device: the definition that kernels are held to.

        Halves are kept in fp32 between ops and rounded once (``numerics="fused"``), or rounded at every op (``"eager"``).
        """
        call = self._bind(args, kwargs)
        return self._run(call, functools.partial(self._call_reference, call))

    def plan(self, *args: Any, out: Any = None, target: str | None = None, **kwargs: Any) -> Plan:
        """What would run for these arguments (real, CPU or ``device="meta"`` tensors) and why, without running it.

        ``target`` is a GPU's name (``"h200"``) or an architecture (``"sm_80"``); the arguments' own GPU if left out.
        """
        call = self._bind(args, kwargs)
        arch, tuning = self._find_target("plan", call, target)
        return self._run(call, functools.partial(self._plan_call, call, arch, tuning, out))

    def _plan_call(self, call: _Call, arch: str, tuning: Tuning, out: Any, _: Any, traced: Traced) -> Plan:
        layouts = self._layouts(call, traced, "cuda")
        outputs, _ = self._planned_outputs(call, traced, layouts, out)
        kernels = self._plan(call, traced, layouts, outputs, tuning)
        return Plan(self.__name__, arch, traced.expr, kernels, self._recipe(call, out))

    def plan_backward(self, *args: Any, target: str | None = None, **kwargs: Any) -> Plan:
        """As `plan`, of the kernels that give tensors their gradients: those that want one, or all of floats where none does.

        Each result's gradient is taken to arrive in that result's own layout. Raises ``GradError`` for functions whose gradients
        torch's own operators compute.
        """
        call = self._bind(args, kwargs)
        arch, tuning = self._find_target("plan_backward", call, target)
        return self._run(call, functools.partial(self._plan_gradient, call, arch, tuning))

    def _plan_gradient(self, call: _Call, arch: str, tuning: Tuning, _: Any, traced: Traced) -> Plan:
        wanted = tuple(tensor.requires_grad for tensor in call.tensors)
        if not any(wanted):
            wanted = tuple(tensor.is_floating_point() or tensor.is_complex() for tensor in call.tensors)
        expr, kernels = self._operation(traced).plan_gradient(call.tensors, wanted, call.device, tuning)
        return Plan(f"{self.__name__}_backward", arch, expr, kernels, self._recipe(call, backward=True))

    def build(
        self,
        signatures: Iterable[tuple[Any, ...] | Mapping[str, Any]],
        targets: Iterable[str] | str,
        folder: str | Path,
        *,
        backward: bool = False,
        advance: Callable[[int, int], object] = lambda done, total: None,
    ) -> Build:
        """Compile the kernels of these calls for these GPUs into ``folder``, which a machine without NVRTC names in ``WIDELOAD_BUILT_DIR``.

        A signature is what `plan` takes, a tuple of arguments or a dict of them by name (``out=`` among them): real, CPU or ``meta``
        tensors, numbers. It stands for all calls that take the same kernels: docs/build.md says which do. ``targets`` are GPUs or
        architectures. ``backward`` builds the kernels of the gradients as well. ``advance`` is told how many kernels are done, of how many.

        The folder is made, or added to, by any number of builders at once. Raises as `plan` does, and ``CompileError`` where NVRTC is
        missing or the folder cannot be written; readers then find in it what they found before.
        """
        from wideload.build import build_plans  # here: a process that only runs functions builds none

        plans: list[Plan] = []
        names = [*targets] if isinstance(targets, Iterable) and not isinstance(targets, str) else [targets]
        for name in names:
            find_target(name)  # refused before anything is planned
        for signature in signatures if isinstance(signatures, Iterable) else [signatures]:
            if not isinstance(signature, tuple | Mapping):
                raise TraceError(
                    f"a signature of {self.__name__}.build is a {type(signature).__name__}; allowed: a tuple of arguments, or a dict of "
                    "them by name. Give a list of these, also of one."
                )
            args, kwargs = (signature, {}) if isinstance(signature, tuple) else ((), {**signature})
            for name in names:
                plans += self.plan_build(name, args, kwargs, backward)
        if not plans or not str(folder):
            missing = "signature" if names else "target"
            what = f"no {missing}: give at least one of each" if str(folder) else "an empty folder name: name a folder"
            raise CompileError(f"{self.__name__}.build was given {what}. Nothing was built.")
        return build_plans(plans, Path(folder).absolute(), advance)

    def plan_build(self, target: str | None, args: tuple[Any, ...], kwargs: dict[str, Any], backward: bool) -> list[Plan]:
        """Of all that a call may run, and its gradients; ``target`` as in `plan`."""
        out, named = kwargs.get("out"), {name: value for name, value in kwargs.items() if name != "out"}
        with torch.no_grad():  # arguments that want gradients may stand beside an out= where none is wanted
            plans = [self.plan(*args, out=out, target=target, **named)]
            if out is not None:
                call = self._bind(args, named)
                arch, tuning = self._find_target("plan", call, target)
                plans += self._run(call, functools.partial(self._plan_elsewhere, call, arch, tuning, out))
        return [*plans, self.plan_backward(*args, target=target, **named)] if backward else plans

    def _plan_elsewhere(self, call: _Call, arch: str, tuning: Tuning, out: Any, key: Any, traced: Traced) -> list[Plan]:
        """What fills other memory, to be copied to ``out``, where kernels cannot write in place."""
        outs = self._match_out(traced, out)
        layouts = self._layouts(call, traced, "cuda")
        is_in_place = self._check_outputs(call, traced, layouts, outs)
        outputs = [_output(node, tensor) for node, tensor in zip(traced.expr.outputs, outs, strict=True)]
        if not is_in_place or is_safe_in_place(self._plan(call, traced, layouts, outputs, tuning), call.tensors, outs):
            return []
        fresh = [_output(node, torch.empty_like(tensor)) for node, tensor in zip(traced.expr.outputs, outs, strict=True)]
        kernels = self._plan(call, traced, layouts, fresh, tuning)
        return [Plan(self.__name__, arch, traced.expr, kernels, self._recipe(call, out))]

    def _recipe(self, call: _Call, out: Any = None, *, backward: bool = False) -> Recipe:
        from wideload.build import spell_call

        return spell_call(self, *call.arguments, out, backward=backward)

    @property
    def defaults(self) -> tuple[Any, ...]:
        """The values of the function's parameters that have one, as they are now."""
        return _defaults_of(self.__wrapped__)

    @property
    def is_default(self) -> bool:
        """Whether ``wl.fuse`` of the plain function, with no options, gives the same kernels."""
        return type(self) is FusedFunction and self._options == FuseOptions() and self._descriptor is None

    def _planned_outputs(
        self, call: _Call, traced: Traced, layouts: Sequence[NodeLayout], out: Any
    ) -> tuple[list[Output], list[torch.Tensor] | None]:
        """What a call would write: new outputs, or the tensors of ``out``."""
        if out is None:
            fresh = [node for node in traced.expr.outputs if not is_view_of_operand(traced.expr, node)]
            return [new_output(traced.expr, layouts, node) for node in fresh], None
        outs = self._match_out(traced, out)
        self._check_outputs(call, traced, layouts, outs)
        return [_output(node, tensor) for node, tensor in zip(traced.expr.outputs, outs, strict=True)], outs

    def explain(
        self,
        *args: Any,
        out: Any = None,
        target: str | None = None,
        measure: bool = True,
        measured_us: float | None = None,
        ncu: bool = False,
        **kwargs: Any,
    ) -> Explanation:
        """How far a call with these arguments is from its bound, and why: bytes, sectors, occupancy, bytes in flight, instructions.

        Takes what `plan` takes. Without ``target``, the arguments' own GPU is reckoned with, and ``measure`` adds the time of the
        call, by ``wl.bench``, unless ``measured_us`` gives it, and ``ncu`` the hardware counters of Nsight Compute, which runs the kernels
        in a process of its own. Raises as `plan` does; where NVRTC or nvdisasm is missing, what comes of them is left out.

        >>> import torch, wideload as wl
        >>> x = torch.empty(2**28, dtype=torch.bfloat16, device="meta")
        >>> wl.ops.add.explain(x, x, target="h200").minimal.value  # one operand given twice is read once
        1073741824
        """
        from wideload.analyze.explain import GpuFigures  # here: a model that runs fused functions explains none

        call = self._bind(args, kwargs)
        if target is not None:
            if ncu:
                raise DeviceError(f"{self.__name__}.explain: ncu counts on the GPU that is here, not on {target}. Leave out target.")
            figures, time_us, tuning = GpuFigures(find_target(target)), None, tuning_for(find_target(target))
        else:
            self._check_has_target("explain", call)
            from wideload.measure import bench
            from wideload.measure.roofline import read_device

            figures = read_device(call.device)
            measured = bench(self, *args, out=out, **kwargs).subject.time_us if measure and measured_us is None else None
            time_us, tuning = measured_us if measured is None else measured.median, tuning_of(call.device)
        explanation = self._run(call, functools.partial(self._explain_call, call, figures, time_us, out, tuning=tuning))
        return self._run(call, functools.partial(self._with_counters, explanation, call, out)) if ncu else explanation

    def _explain_call(
        self, call: _Call, figures: GpuFigures, time_us: float | None, out: Any, _: Any, traced: Traced, *, tuning: Tuning | None = None
    ) -> Explanation:
        from wideload.analyze.explain import Place, explain_call

        layouts = self._layouts(call, traced, "cuda")
        outputs, outs = self._planned_outputs(call, traced, layouts, out)
        plan = Plan(self.__name__, figures.target.arch, traced.expr, self._plan(call, traced, layouts, outputs, tuning))
        places = [Place(*_address(tensor), on_host=tensor.device != call.device) for tensor in call.tensors]
        fresh = [Place(("result", position), 0) for position in range(len(outputs))]
        return explain_call(
            self.__name__,
            figures,
            traced.expr,
            layouts,
            places,
            fresh if outs is None else [Place(*_address(tensor)) for tensor in outs],
            [kernel.build() for kernel in plan.kernels],
            time_us,
        )

    def _with_counters(self, explanation: Explanation, call: _Call, out: Any, _: Any, traced: Traced) -> Explanation:
        from wideload.measure.ncu import add_counters

        layouts = self._layouts(call, traced, "cuda")
        outputs, outs = self._planned_outputs(call, traced, layouts, out)
        plan = Plan(self.__name__, explanation.arch, traced.expr, self._plan(call, traced, layouts, outputs))
        tensors = with_seed(traced.expr, call.tensors, call.device)
        written = [_empty(output.layout, output.dtype, torch.device("meta")) for output in outputs] if outs is None else outs
        launches = [kernel.relaunch(tensors, written, tuple(call.scalars)) for kernel in plan.kernels]
        return add_counters(explanation, launches) if launches else explanation

    def _find_target(self, method: str, call: _Call, target: str | None) -> tuple[str, Tuning]:
        """The architecture to plan for, and how kernels are cut for it: for the GPU that is named, else for the arguments' own."""
        if target is not None:
            found = find_target(target)
            return found.arch, tuning_for(found)
        self._check_has_target(method, call)
        return find_target("sm_{}{}".format(*torch.cuda.get_device_capability(call.device))).arch, tuning_of(call.device)

    def _check_has_target(self, method: str, call: _Call) -> None:
        if call.device.type != "cuda":
            raise DeviceError(
                f'{self.__name__}.{method} got tensors on {call.device} and no target. Name the GPU: target="h200" or target="sm_90".'
            )

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
        """Inside another trace, or left to Inductor, this is the plain function, to be fused with its neighbours."""
        result = self._fn(*args, **kwargs)
        if out is None:
            return result
        return map_structure(lambda target, value: target.copy_(value), out, result)

    def _around_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the operator, of these; what is done to them stands beside it in a compiled graph."""
        return args, kwargs

    @staticmethod
    def _keep(cache: dict[Any, _T], key: Any, value: _T) -> _T:
        """Remember what belongs to lists of one signature."""
        return remember(cache, key, value, _MAX_LISTED)

    # ---- arguments

    def _parameters(self) -> list[str]:
        return list(self._signature.parameters) if self._signature else []

    def _arrange(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments in the order of a call's ``spec``."""
        if self._signature is None:
            return args, kwargs
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound.args, bound.kwargs

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call:
        call = _Call(arguments=(args, kwargs))
        defaults = self.defaults
        if not are_same(defaults, self._defaults):
            self._signature, self._defaults = _signature_of(self.__wrapped__), defaults
        if self._signature is None:
            positional = [self._enter(call, f"x{position}", value) for position, value in enumerate(args)]
            call.spec = (tuple(positional), {name: self._enter(call, name, value) for name, value in kwargs.items()})
            call.key.append((len(args), tuple(kwargs)))
        else:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TraceError(f"{self.__name__}{self._signature}: {error}") from None
            given = frozenset(bound.arguments)
            bound.apply_defaults()
            for name, value in bound.arguments.items():
                bound.arguments[name] = self._enter_parameter(call, name, value, is_default=name not in given)
            call.spec = (bound.args, bound.kwargs)
        if not call.tensors:
            raise TraceError(f"{self.__name__} was given no tensor. A fused function needs at least one tensor argument.")
        self._check_devices(call)
        return call

    def _enter_parameter(self, call: _Call, name: str, value: Any, *, is_default: bool) -> Any:
        """A number that the call leaves at its default is static, as is any that stands in the function."""
        assert self._signature is not None
        kind = self._signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            call.key.append(len(value))
            return tuple(self._enter(call, f"{name}{position}", item, name in self._static) for position, item in enumerate(value))
        if kind is inspect.Parameter.VAR_KEYWORD:
            call.key.append(tuple(value))
            return {key: self._enter(call, key, item) for key, item in value.items()}
        return self._enter(call, name, value, is_default or None if isinstance(value, (int, float, complex)) else None)

    def _enter(self, call: _Call, name: str, value: Any, is_static: bool | None = None) -> Any:
        """Note one argument in ``call``; return what the trace is given for it."""
        is_static = name in self._static if is_static is None else is_static
        if isinstance(value, torch.Tensor):
            if is_static:
                raise TraceError(f"static= of {self.__name__} names {name}, which is a tensor; allowed: numbers. Leave it out.")
            position, argument = call.entered.get(id(value), (0, None))
            if argument is not None:  # one tensor passed twice is one operand, and ``a is b`` holds
                call.key.append(position)
                return argument
            readable = _readable(value, name)
            argument = TensorArg(name, readable.dtype, tuple(readable.shape), readable.device)
            call.entered[id(value)] = len(call.tensors), argument
            call.tensors.append(readable)
            call.names.append(name)
            call.key.append((readable.dtype, readable.ndim, readable.device))
            return argument
        if isinstance(value, np.generic):
            value = value.item()
        kind = type(value)
        if kind in (int, float, complex) and not is_static:
            call.scalars.append(value)
            call.key.append(kind)
            return NumberArg(name, kind)
        if isinstance(value, (tuple, list)):
            kind = tuple if kind is torch.Size else kind
            call.key.append((kind, len(value)))
            items = [self._enter(call, f"{name}{position}", item, is_static) for position, item in enumerate(value)]
            return kind(*items) if hasattr(value, "_fields") else kind(items)
        if isinstance(value, dict):
            call.key.append((kind, tuple(value)))
            entered = value.copy()
            entered.update((key, self._enter(call, f"{name}_{key}", item, is_static)) for key, item in value.items())
            return entered
        if kind in (bool, int, float, complex):
            call.key.append((kind, repr(value)))
            return value
        if isinstance(value, STATIC_TYPES):
            call.key.append((kind, value))
            return value
        if hasattr(kind, "__dlpack__") and kind is not np.ndarray:  # another library's array, read where it lies; torch refuses numpy's
            return self._enter(call, name, torch.utils.dlpack.from_dlpack(value), is_static)
        raise TraceError(
            f"argument {name} of {self.__name__} is a {kind.__module__}.{kind.__qualname__}; allowed: tensors, numbers, "
            f"and bool, str, None, dtypes or tuples "
            f"of them. Pass the tensor or number that it holds."
        )

    def _check_devices(self, call: _Call) -> None:
        """All tensors on one device; a 0-dim CPU tensor may stand beside others and acts as a number."""
        placed = [(name, t.device) for name, t in zip(call.names, call.tensors, strict=True) if t.device.type != "cpu" or t.ndim]
        first, device = placed[0] if placed else (call.names[0], call.tensors[0].device)
        if device.type not in ("cpu", "cuda", "meta"):
            raise DeviceError(f"argument {first} of {self.__name__} is on {device}; allowed: CUDA, CPU and meta tensors.")
        for name, other in placed:
            if other != device:
                raise DeviceError(f"{self.__name__} got {first} on {device} and {name} on {other}. Put all tensors on one device.")
        call.device = device

    # ---- tracing

    def _trace(self, call: _Call) -> tuple[Any, Traced]:
        call.traced_with = self._captures.read(), torch.get_default_dtype()
        signature: Any = (tuple(call.key), *call.traced_with)
        key = (signature, call.traced_shapes) if signature in self._sized else signature
        traced = self._traces.get(key)
        return (key, traced) if traced is not None else self._retrace(call, signature)

    def _retrace(self, call: _Call, signature: Any) -> tuple[Any, Traced]:
        self._captures.check()
        traced = trace_function(self._fn, self._kernel_name, *call.spec)
        if call.traced_with != (self._captures.read(), torch.get_default_dtype()):  # another thread has changed it meanwhile
            return self._trace(call)
        key = signature
        if traced.reads_sizes:
            remember(self._sized, signature, None)
            key = (signature, call.traced_shapes)
        return key, remember(self._traces, key, traced)

    def _run(self, call: _Call, use: Callable[[Any, Traced], _T]) -> _T:
        """``use(key, traced)``; shapes that do not fit the trace of other shapes are traced themselves, and may take another path."""
        key, traced = self._trace(call)
        try:
            return use(key, traced)
        except LayoutError:
            if traced.reads_sizes:
                raise
            key, traced = self._retrace(call, key)
            if not traced.reads_sizes:
                raise
        return use(key, traced)

    def _layouts(self, call: _Call, traced: Traced, device_type: str | None = None) -> tuple[NodeLayout, ...]:
        """Shape and strides of every node, as eager gives them: where the tensors are, or on another type of device."""
        return replay_layout(traced.expr, [NodeLayout(tuple(t.shape), t.stride()) for t in call.tensors], device_type or call.device.type)

    def _plan(
        self,
        call: _Call,
        traced: Traced,
        layouts: Sequence[NodeLayout],
        outputs: list[Output],
        tuning: Tuning | None = None,
    ) -> tuple[KernelPlan, ...]:
        return plan_call(
            traced.expr,
            layouts,
            call.tensors,
            outputs,
            call.device,
            numerics=self._options.numerics,
            fast_math=self._options.fast_math,
            tuning=tuning,
        )

    def _check_outputs(self, call: _Call, traced: Traced, layouts: Sequence[NodeLayout], outs: list[torch.Tensor]) -> bool:
        nodes = traced.expr.outputs
        dtypes = [node_dtype(traced.expr, node) for node in nodes]
        for node, name, out, dtype in zip(nodes, _out_names(outs), outs, dtypes, strict=True):
            if is_reduced(traced.expr, node) and out.dtype != dtype:
                raise DtypeError(f"{name} is {out.dtype}; allowed for one value of all elements: {dtype}, in which warps combine theirs.")
        return check_outputs(
            outs, _out_names(outs), [layouts[n] for n in nodes], dtypes, zip(call.names, call.tensors, strict=True), call.device
        )

    # ---- calls like earlier ones

    def _keep_shortcut(self, call: _Call, find_steps: Callable[[], Steps], out: torch.Tensor | None = None) -> None:
        """Let calls like this one take these steps from now on, where calls like it can be told."""
        found = None if call.given is None else self.find_circumstances(call.traced_with)
        if call.given is None or found is None:
            return
        args, kwargs = call.given
        if kwargs and self._signature and [*self._signature.bind(*args, **kwargs).arguments][-len(kwargs) :] != [*kwargs]:
            return  # given in another order than the parameters'
        kinds = kinds_of((*args, *kwargs.values()), [name in self._static for name in (*self._given_names(len(args)), *kwargs)])
        shortcut = find_shortcut(args, kwargs, out, call.tensors, call.scalars, kinds, found, find_steps)
        if shortcut is not None:
            self._shortcuts.keep(shortcut, args, kwargs, out)

    def find_circumstances(self, traced_with: tuple[Any, ...]) -> tuple[Found, ...] | None:
        """What a call depends on that was ``traced_with`` this, besides its arguments; None where it has changed, or may without a sign."""
        fn = self.__wrapped__
        defaults = *(getattr(fn, "__defaults__", None) or ()), *(getattr(fn, "__kwdefaults__", None) or {}).values()
        return find_circumstances(fn, self._captures, *traced_with) if are_immutable(defaults) else None

    def _given_names(self, num_positional: int) -> list[str]:
        """The parameters that so many positional arguments go to."""
        return [*self._names[:num_positional], *[self._starred] * (num_positional - len(self._names))]

    # ---- running

    def _evaluate(self, call: _Call, traced: Traced, layouts: Sequence[NodeLayout]) -> list[torch.Tensor]:
        """Results by the reference, in the strides that eager gives."""
        grad = _wants_grad(call.tensors) or is_looked_into(call.tensors)
        outputs = traced.expr.outputs
        tensors = with_seed(traced.expr, call.tensors, call.device)
        results = evaluate_expr(traced.expr, outputs, tensors, tuple(call.scalars), numerics=self._options.numerics, differentiable=grad)
        return [
            result if result.stride() == layouts[node].strides or grad else _restrided(result, layouts[node])
            for result, node in zip(results, outputs, strict=True)
        ]

    def _call_reference(self, call: _Call, _: Any, traced: Traced) -> Any:
        layouts = self._layouts(call, traced)  # first: it refuses shapes that do not broadcast
        return self._assemble(call, traced, self._evaluate(call, traced, layouts))

    def _call_differentiable(self, call: _Call, key: Any, traced: Traced) -> Any:
        if self._has_to_wait(call, key, lambda: self._plan_with_gradients(call, key, traced)):
            return self._call_reference(call, key, traced)
        op, returned = self._operation_of(key, traced), _returned(traced)
        results = op(call.tensors, tuple(call.scalars), call.device, recipe=functools.partial(self._recipe, call, backward=True))
        if returned is not None and call.device.type == "cuda":
            given = range(len(call.tensors)), range(len(call.scalars))
            self._keep_shortcut(call, lambda: run_steps(op.again(call.tensors, call.device), returned, *given))
        return self._assemble(call, traced, results)

    def _operation_of(self, key: Any, traced: Traced) -> DifferentiableOp:
        op = self._ops.get(key)
        if op is None or op.expr is not traced.expr:
            op = remember(self._ops, key, self._operation(traced))
        return op

    def _operation(self, traced: Traced) -> DifferentiableOp:
        from wideload.torch_op import DifferentiableOp

        return DifferentiableOp(traced.expr, self._options.numerics, fast_math=self._options.fast_math)

    def _call_meta(self, call: _Call, _: Any, traced: Traced) -> Any:
        layouts = self._layouts(call, traced)
        return self._assemble(call, traced, [_empty(layouts[n], node_dtype(traced.expr, n), call.device) for n in traced.expr.outputs])

    def _launch(self, call: _Call, key: Any, traced: Traced) -> Any:
        layout_key = (key, *((tuple(t.shape), t.stride(), phase_of(t)) for t in call.tensors))
        prepared = self._prepared.get(layout_key)
        if prepared is None:
            if self._has_to_wait(call, key, lambda: self._plan_new(call, traced)[1]):
                return self._call_reference(call, key, traced)
            prepared = remember(self._prepared, layout_key, self._prepare(call, traced))
        tensors = with_seed(traced.expr, call.tensors, call.device)
        written = iter(run_new(prepared.launches, call.device, tensors, prepared.outputs, tuple(call.scalars)))
        self._lay_launches(call, traced, prepared)
        nodes = traced.expr.outputs
        shared = [node for node in nodes if is_view_of_operand(traced.expr, node)]
        views = iter(evaluate_expr(traced.expr, shared, call.tensors, (), numerics="eager") if shared else ())
        return self._assemble(call, traced, [next(views if is_view_of_operand(traced.expr, node) else written) for node in nodes])

    def _lay_launches(self, call: _Call, traced: Traced, prepared: _Prepared) -> None:
        """Let calls like this one take these launches, where all results are new tensors."""
        returned = _returned(traced)
        if returned is None or any(is_view_of_operand(traced.expr, node) for node in traced.expr.outputs):
            return
        of_new = prepared.launches, prepared.outputs, call.device, returned, len(call.tensors)
        self._keep_shortcut(call, functools.partial(steps_of_new, *of_new, draws=traced.expr.has_draws))

    def _prepare(self, call: _Call, traced: Traced) -> _Prepared:
        outputs, plans = self._plan_new(call, traced)
        return _Prepared(outputs, prepare_launches(plans, call.device.index, functools.partial(self._recipe, call)))

    def _plan_new(self, call: _Call, traced: Traced) -> tuple[tuple[Output, ...], tuple[KernelPlan, ...]]:
        """The kernels for new outputs; arguments and their views come back as they are, as from eager."""
        layouts = self._layouts(call, traced)
        fresh = [node for node in traced.expr.outputs if not is_view_of_operand(traced.expr, node)]
        outputs = tuple(new_output(traced.expr, layouts, node) for node in fresh)
        return outputs, self._plan(call, traced, layouts, list(outputs))

    def _plan_with_gradients(self, call: _Call, key: Any, traced: Traced) -> tuple[KernelPlan, ...]:
        """Those for new outputs, and for the gradients, where kernels compute these."""
        _, plans = self._plan_new(call, traced)
        wanted = tuple(tensor.requires_grad for tensor in call.tensors)
        with contextlib.suppress(GradError, DtypeError, LayoutError):  # torch's own operators do, or their layouts are not known yet
            plans += self._operation_of(key, traced).plan_gradient(call.tensors, wanted, call.device)[1]
        return plans

    def _has_to_wait(
        self,
        call: _Call,
        key: Any,
        plan: Callable[[], Sequence[KernelPlan]],
        outs: Sequence[torch.Tensor] = (),
    ) -> bool:
        """Whether torch's own operators are to compute this call, since its kernels are being compiled; a graph captures kernels alone."""
        if not config.background_compile or call.device.type != "cuda" or is_capturing(call.device.index):
            return False
        tensors = (*call.tensors, *outs)
        like = (key, len(outs), *[(t.dtype, t.shape, t.stride(), phase_of(t), t.requires_grad) for t in tensors])
        return self._backlog.has_to_wait(
            (*like, torch.is_grad_enabled()),
            lambda: kernel_texts(plan(), call.device.index),
            functools.partial(self._recipe, call),
        )

    def _call_into(self, call: _Call, out: Any, key: Any, traced: Traced) -> Any:
        self._stage_into(call, out, key, traced)()
        return out

    def _stage_into(self, call: _Call, out: Any, key: Any, traced: Traced) -> Callable[[], None]:
        """What writes the results to ``out``, when everything that could be refused has been looked at."""
        outs = self._match_out(traced, out)
        layouts = self._layouts(call, traced)
        is_in_place = self._check_outputs(call, traced, layouts, outs)
        if call.device.type == "cuda":
            return self._stage_launch(call, key, traced, layouts, outs, is_in_place, out)
        if call.device.type == "meta":
            return lambda: None
        return self._stage_reference(call, traced, layouts, outs, is_in_place)

    def _stage_reference(
        self, call: _Call, traced: Traced, layouts: Sequence[NodeLayout], outs: list[torch.Tensor], is_in_place: bool
    ) -> Callable[[], None]:
        values = self._evaluate(call, traced, layouts)
        if is_in_place:  # a result may be a view of an argument that a copy overwrites
            values = [value.clone() for value in values]
        return functools.partial(_copy_all, outs, values)

    def _stage_launch(
        self, call: _Call, key: Any, traced: Traced, layouts: Sequence[NodeLayout], outs: list[torch.Tensor], is_in_place: bool, out: Any
    ) -> Callable[[], None]:
        out_key = tuple((t.dtype, tuple(t.shape), t.stride(), phase_of(t)) for t in outs)
        layout_key = (key, out_key, *((tuple(t.shape), t.stride(), phase_of(t)) for t in call.tensors))
        prepared = self._prepared.get(layout_key)
        if prepared is None:
            outputs = [_output(node, tensor) for node, tensor in zip(traced.expr.outputs, outs, strict=True)]
            plans = self._plan(call, traced, layouts, outputs)
            if self._has_to_wait(call, key, lambda: plans, outs):
                return self._stage_reference(call, traced, layouts, outs, is_in_place)
            recipe = functools.partial(self._recipe, call, out)
            prepared = remember(self._prepared, layout_key, _Prepared((), prepare_launches(plans, call.device.index, recipe)))
        if is_in_place and not is_safe_in_place([launch.plan for launch in prepared.launches], call.tensors, outs):
            fresh = [torch.empty_like(t) for t in outs]
            compute = self._stage_launch(call, key, traced, layouts, fresh, False, out)

            def compute_and_copy() -> None:
                compute()
                _copy_all(outs, fresh)

            return compute_and_copy
        tensors = with_seed(traced.expr, call.tensors, call.device)
        launch = stage_launches(prepared.launches, call.device.index, tensors, outs, tuple(call.scalars))
        if isinstance(traced.result, TensorResult) and not is_reduced(traced.expr, traced.expr.outputs[0]):
            into = functools.partial(steps_into, prepared.launches, call.device, len(call.tensors), draws=traced.expr.has_draws)
            self._keep_shortcut(call, into, outs[0])

        def run() -> None:
            clear_reduced(traced.expr, outs)
            launch()
            torch.autograd.graph.increment_version(outs)

        return run

    # ---- results

    def _match_out(self, traced: Traced, out: Any) -> list[torch.Tensor]:
        """The tensors of ``out``, in the order of the expression's outputs."""
        if not same_structure(traced.result, out):
            have, want = _outline(out), _outline(traced.result)
            raise LayoutError(f"out= of {self.__name__} has the structure {have}, the results have {want}. Give out= the same structure.")
        outs: dict[int, torch.Tensor] = {}

        def match(leaf: Any, target: Any) -> None:
            if isinstance(leaf, TensorResult) and isinstance(target, torch.Tensor):
                if outs.setdefault(leaf.output, target) is not target:
                    raise LayoutError(f"out= of {self.__name__} holds two tensors for one that is returned twice. Give one tensor twice.")
            elif isinstance(leaf, TensorResult) or target is not None:
                raise LayoutError(
                    f"out= of {self.__name__} holds {_outline(target)} for a result that is {_outline(leaf)}; "
                    "allowed: a tensor for each tensor, and None for any other result."
                )

        map_structure(match, traced.result, out)
        return list(outs.values())

    def _assemble(self, call: _Call, traced: Traced, outs: Iterable[torch.Tensor]) -> Any:
        tensors = list(outs)

        def leaf(item: Any) -> Any:
            if isinstance(item, TensorResult):
                return call.tensors[item.argument] if item.argument is not None else tensors[item.output]
            return evaluate_host(item.value, tuple(call.scalars)) if isinstance(item, HostResult) else item

        return map_structure(leaf, traced.result)


@overload
def fuse(
    fn: Callable[..., Any],
    /,
    *,
    name: str | None = ...,
    static: Iterable[str] | str = ...,
    numerics: Numerics = ...,
    fast_math: bool = ...,
    compile: str = ...,
) -> FusedFunction: ...
@overload
def fuse(
    fn: None = None,
    /,
    *,
    name: str | None = ...,
    static: Iterable[str] | str = ...,
    numerics: Numerics = ...,
    fast_math: bool = ...,
    compile: str = ...,
) -> Callable[[Callable[..., Any]], FusedFunction]: ...
def fuse(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    static: Iterable[str] | str = (),
    numerics: Numerics = "fused",
    fast_math: bool = False,
    compile: str = "op",
) -> Any:
    """Fuse an elementwise function of tensors into one kernel.

    ``fn`` is ordinary code over torch functions, tensor methods, operators and numbers. Tensors and Python numbers are run-time
    arguments; numbers whose names are in ``static`` or that a call leaves at their default, and bools, strings, None and dtypes, become
    part of the kernel.
    ``numerics="fused"`` keeps fp16 and bf16 in fp32 until a result is stored; ``"eager"`` rounds every step as eager PyTorch does.
    ``fast_math`` allows the cheap formulas of half results for fp32 results too. ``name`` names the kernel. Inside ``torch.compile`` it
    is an operator, ``compile="op"``; with ``"inline"`` the plain function is traced, to be fused by Inductor with its neighbours.
    In the body of a class the fused function is a method; one that a class is given later is not bound, as builtins are not.

    >>> import torch, wideload as wl
    >>> @wl.fuse
    ... def scale(x, s):
    ...     return x * s + 1
    >>> scale(torch.tensor([1.0, 2.0]), 3.0)
    tensor([4., 7.])
    """
    if numerics not in ("fused", "eager"):
        raise TraceError(f'numerics={numerics!r}; allowed: "fused" and "eager"')
    if compile not in ("op", "inline"):
        raise TraceError(f'compile={compile!r}; allowed: "op" and "inline"')
    if not (name is None or isinstance(name, str)):
        raise TraceError(f"name={name!r}; allowed: a string, and None")
    if not isinstance(fast_math, bool):
        raise TraceError(f"fast_math={fast_math!r}; allowed: True and False")
    names = (static,) if isinstance(static, str) or not isinstance(static, Iterable) else tuple(static)
    if not all(isinstance(of, str) for of in names):
        raise TraceError(f"static={static!r}; allowed: the name of a parameter, or several")
    options = FuseOptions(name, names, numerics, fast_math, compile)
    return FusedFunction(fn, options) if fn is not None else functools.partial(FusedFunction, options=options)


_MAX_LISTED = 64
"""Signatures of lists that one function keeps; an entry takes some 1 kB an item."""


def _returned(traced: Traced) -> int | tuple[int, ...] | None:
    """Which of the expression's outputs a call returns, one or some in a tuple; None where it returns anything else."""
    result = traced.result
    items = result if type(result) is tuple else (result,)
    if not items or not all(isinstance(item, TensorResult) and item.argument is None for item in items):
        return None
    places = tuple(item.output for item in items)
    return places if items is result else places[0]


def _positional_names(signature: inspect.Signature | None) -> tuple[tuple[str, ...], str]:
    """The parameters that positional arguments go to, and the one that takes all others, or ``""``."""
    parameters = list(signature.parameters.values()) if signature else []
    names = tuple(of.name for of in parameters if of.kind in (of.POSITIONAL_ONLY, of.POSITIONAL_OR_KEYWORD))
    return names, next((of.name for of in parameters if of.kind is of.VAR_POSITIONAL), "")


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins such as torch.sigmoid
        return None
    if "out" in signature.parameters:
        raise TraceError("a parameter of the fused function is called out, which is taken: out= receives the results. Rename it.")
    return signature


def _defaults_of(fn: Any) -> tuple[Any, ...]:
    """The objects that a function's parameters default to, to be compared by identity; dicts of them are changed in place."""
    positional, keyword = getattr(fn, "__defaults__", None) or (), getattr(fn, "__kwdefaults__", None) or {}
    return (*positional, None, *keyword, *keyword.values())


def _copy_all(outs: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    for tensor, value in zip(outs, values, strict=True):
        tensor.copy_(value)


def _readable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """The tensor with pending conjugation and negation done; an error for what has no strides."""
    if tensor.is_nested:
        raise LayoutError(f"argument {name} is a nested tensor; allowed: strided tensors. Pass its parts, or .to_padded_tensor().")
    if tensor.layout != torch.strided:
        raise LayoutError(f"argument {name} is a {tensor.layout} tensor; allowed: strided tensors. Use .to_dense().")
    if tensor.is_quantized:
        raise DtypeError(f"argument {name} is quantised ({tensor.dtype}); allowed: plain dtypes. Use .dequantize().")
    if tensor.is_conj():
        tensor = tensor.resolve_conj()
    return tensor.resolve_neg() if tensor.is_neg() else tensor


def _address(tensor: torch.Tensor) -> tuple[int | str, int]:
    """What a tensor's address counts from, and its address: meta tensors have no memory, but storages that views share."""
    if tensor.device.type == "meta":
        return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset()) * tensor.element_size()
    return str(tensor.device), tensor.data_ptr()


def _wants_grad(tensors: Iterable[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _empty(layout: NodeLayout, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(layout.shape, layout.strides, dtype=dtype, device=device)


def _restrided(tensor: torch.Tensor, layout: NodeLayout) -> torch.Tensor:
    return _empty(layout, tensor.dtype, tensor.device).copy_(tensor)


def _output(node: int, tensor: torch.Tensor) -> Output:
    return Output(node, tensor.dtype, NodeLayout(tuple(tensor.shape), tensor.stride()), phase_of(tensor))


def _out_names(outs: list[torch.Tensor]) -> list[str]:
    return ["out="] if len(outs) == 1 else [f"out[{position}]" for position in range(len(outs))]


def _outline(tree: Any) -> str:
    """The structure of results or of ``out=``, for messages."""

    def name(leaf: Any) -> str:
        if isinstance(leaf, torch.Tensor | TensorResult):
            return "tensor"
        return "number" if isinstance(leaf, HostResult) else type(leaf).__name__

    return str(map_structure(name, tree)).replace("'", "")
