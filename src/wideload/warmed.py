"""Turns functions and the arguments of calls to come into compiled kernels, many at a time, and into what was compiled and what was not.

Knows plans and cubins; launches nothing and looks at no element, so that tensors may be on ``meta`` or fake.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from wideload.cache import MAX_THREADS, find_cubin, is_in_memory
from wideload.errors import CompileError, DeviceError, RangeError, TraceError
from wideload.fused import FusedFunction
from wideload.gpus import find_target
from wideload.structure import map_structure
from wideload.tuned import trying, tuning_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from wideload.planned import PlannedKernel

__all__ = ["Warmed", "Warmup", "warmup"]

Signature = tuple[Any, ...] | Mapping[str, Any]
Found = Literal["compiled", "on disk", "in memory"]


@dataclass(frozen=True, slots=True)
class Warmed:
    """One kernel that is now in memory: where it was found, and how long that took. Shared ones stand at the first that needs them."""

    function: str
    kernel: str
    arch: str
    found: Found
    ms: float


@dataclass(frozen=True, slots=True)
class Warmup:
    """What `warmup` has done. ``errors`` has a message for each call that failed, by ``"number: function"``; the others are ready."""

    kernels: tuple[Warmed, ...]
    errors: Mapping[str, Exception]
    ms: float
    """From the first plan to the last kernel, with the threads side by side."""
    workers: int

    @property
    def num_compiled(self) -> int:
        """Kernels that nothing had before."""
        return sum(kernel.found == "compiled" for kernel in self.kernels)

    def check(self) -> None:
        """Raise ``CompileError`` with all errors, where there is one."""
        if self.errors:
            raise CompileError(
                "\n".join([f"{len(self.errors)} calls cannot be warmed up:", *(f"{k}: {v}" for k, v in self.errors.items())])
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        errors = {name: f"{type(error).__name__}: {error}" for name, error in self.errors.items()}
        return {"ms": self.ms, "workers": self.workers, "kernels": [asdict(kernel) for kernel in self.kernels], "errors": errors}

    def __str__(self) -> str:
        rows = [("function", "kernel", "arch", "found", "ms")]
        rows += [(k.function, k.kernel, k.arch, k.found, f"{k.ms:.0f}") for k in self.kernels]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = f"{len(self.kernels)} kernels, {self.num_compiled} of them compiled, in {self.ms:.0f} ms on {self.workers} threads"
        return "\n".join([head, *lines, *(f"{name}: {type(error).__name__}: {error}" for name, error in self.errors.items())])


def warmup(
    calls: Iterable[tuple[FusedFunction, Signature]],
    *,
    workers: int | None = None,
    target: str | None = None,
    backward: bool = False,
    advance: Callable[[int, int], object] | None = None,
) -> Warmup:
    """Compile the kernels of many calls side by side, so that the calls themselves need not; nothing is launched.

    A call is a fused function and a signature as `build` has it, a tuple of arguments or a dict of them by name (``out=`` among them).
    Tensors may be real, on ``meta`` or fake: their dtypes, shapes, strides and alignment count. The kernels are for ``target``, a GPU or
    an architecture: without it for the arguments' own GPU, else for the current one. ``backward`` adds the kernels of the gradients.

    As many threads as ``workers`` compile, one for each CPU and 8 at most if left out: NVRTC releases the interpreter, and takes some
    100 MB for each. ``advance`` is told how many kernels are done, of how many that are known; without it, a bar on a terminal shows it.

    What one call's function, arguments or kernels make go wrong is among the errors of the result, and costs no other call its kernels.
    Raises ``DeviceError`` where there is no target and no GPU, ``TraceError`` for what is no list of calls, ``RangeError`` for ``workers``.

    >>> import torch, wideload as wl
    >>> x = torch.empty(64, 1024, dtype=torch.bfloat16, device="meta")
    >>> warm = wl.warmup([(wl.ops.swiglu, (x, x.clone())), (wl.ops.add, {"x": x, "y": 1.5})], target="h200")
    >>> [kernel.kernel for kernel in warm.kernels], dict(warm.errors)
    (['swiglu_dense', 'add_dense'], {})
    """
    from concurrent.futures import ThreadPoolExecutor

    if workers is not None and (type(workers) is not int or workers < 1):
        raise RangeError(f"workers of wl.warmup is {workers!r}; allowed: an int, 1 and more")
    given = _checked_calls(calls)
    if target is not None:
        find_target(str(target))
    num_threads = workers or min(os.cpu_count() or 1, MAX_THREADS)
    start = time.perf_counter()
    run = _Run()
    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(num_threads))
        if advance is None:
            from wideload.measure.session import Progress

            advance = stack.enter_context(Progress("compiling"))
        for number, (function, signature) in enumerate(given):
            name = f"{number}: {function.__name__}"
            try:
                for kernel in _plan(function, signature, target, backward):
                    run.want(name, function.__name__, kernel, threads.submit)
            except Exception as error:  # the function is the user's and may raise anything; the others are still to be compiled
                run.errors[name] = error
        done = [run.collect(job, lambda number: advance(number, len(run.jobs))) for job in run.jobs.values()]
    ms = (time.perf_counter() - start) * 1e3
    return Warmup(tuple(kernel for kernel in done if kernel is not None), run.errors, ms, num_threads)


@dataclass(slots=True)
class _Job:
    function: str
    kernel: PlannedKernel
    calls: list[str]
    future: Future[tuple[Found, float]]


@dataclass(slots=True)
class _Run:
    """Kernels on their way, each once, with the calls that need it."""

    jobs: dict[tuple[str, str, str], _Job] = field(default_factory=dict)
    errors: dict[str, Exception] = field(default_factory=dict)
    num_done: int = 0

    def want(self, call: str, function: str, kernel: PlannedKernel, submit: Callable[..., Future[tuple[Found, float]]]) -> None:
        source = kernel.source
        key = (source, kernel.arch, kernel.name)
        if key in self.jobs:
            self.jobs[key].calls.append(call)
        else:
            self.jobs[key] = _Job(function, kernel, [call], submit(_find, source, kernel))

    def collect(self, job: _Job, advance: Callable[[int], object]) -> Warmed | None:
        try:
            found, ms = job.future.result()
        except Exception as error:  # a disk that is full costs the calls of this kernel, and no other
            self.errors.update(dict.fromkeys(job.calls, error))
            return None
        finally:
            self.num_done += 1
            advance(self.num_done)
        return Warmed(job.function, job.kernel.name, job.kernel.arch, found, ms)


def _find(source: str, kernel: PlannedKernel) -> tuple[Found, float]:
    if is_in_memory(source, arch=kernel.arch, name=kernel.name):
        return "in memory", 0.0
    start = time.perf_counter()
    cubin = find_cubin(source, arch=kernel.arch, name=kernel.name, recipe=kernel.recipe)
    return "compiled" if cubin.log else "on disk", (time.perf_counter() - start) * 1e3  # ptxas' log is not kept


def _plan(function: FusedFunction, signature: Signature, target: str | None, backward: bool) -> list[PlannedKernel]:
    known: dict[int, torch.Tensor] = {}
    args, kwargs = (signature, {}) if isinstance(signature, tuple) else ((), dict(signature))
    args, kwargs = map_structure(lambda leaf: _without_fakes(leaf, known), (args, kwargs))
    with contextlib.ExitStack() as stack:
        if target is None and not _is_on_gpu((args, kwargs)):
            target = _current_arch()
            stack.enter_context(trying(tuning_of(torch.device("cuda"))))
        plans = function.plan_build(target, args, kwargs, backward)
    return [kernel for plan in plans for kernel in plan.kernels]


def _without_fakes(leaf: Any, known: dict[int, torch.Tensor]) -> Any:
    """A fake tensor as one on ``meta``, the same each time; one of no dims on the CPU keeps its place: it may act as a number."""
    from torch._subclasses.fake_tensor import FakeTensor

    if not isinstance(leaf, FakeTensor):
        return leaf
    if id(leaf) not in known:
        device = "cpu" if leaf.device.type == "cpu" and not leaf.ndim else "meta"
        offset, shape, strides = leaf.storage_offset(), tuple(leaf.shape), leaf.stride()
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if leaf.numel() else 0
        memory = torch.empty(offset + last + 1, dtype=leaf.dtype, device=device)
        known[id(leaf)] = memory.as_strided(shape, strides, offset).requires_grad_(leaf.requires_grad)
    return known[id(leaf)]


def _is_on_gpu(arguments: Any) -> bool:
    found: list[bool] = []
    map_structure(lambda leaf: found.append(isinstance(leaf, torch.Tensor) and leaf.is_cuda), arguments)
    return any(found)


def _current_arch() -> str:
    if not torch.cuda.is_available():
        raise DeviceError('wl.warmup got tensors of no GPU, and there is none here. Name one: target="h200" or target="sm_90".')
    return find_target("sm_{}{}".format(*torch.cuda.get_device_capability())).arch


def _checked_calls(calls: Any) -> list[tuple[FusedFunction, Signature]]:
    if isinstance(calls, tuple) and calls and isinstance(calls[0], FusedFunction):
        raise TraceError(f"wl.warmup got one call, of {calls[0].__name__}; allowed: a list of calls. Write [(function, arguments)].")
    if isinstance(calls, str) or not isinstance(calls, Iterable):
        raise TraceError(f"wl.warmup got {calls!r:.80}; allowed: a list of calls, each (function, arguments).")
    return [_checked_call(call) for call in calls]


def _checked_call(call: Any) -> tuple[FusedFunction, Signature]:
    match call:
        case (FusedFunction() as function, tuple() | Mapping() as signature):
            return function, signature
    raise TraceError(
        f"wl.warmup got {call!r:.80} among its calls; allowed: (function, arguments), a function of wl.fuse or wl.ops and a tuple of "
        "arguments, or a dict of them by name."
    )
