"""Turns kernels into the lines of a Python function that launches them, with nothing left to look up.

Knows kernels and where each of their arguments comes from; never what makes two calls alike.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from wideload.execute import Launch, Output, empty_here, run_new, scalar_words
from wideload.launch import THREAD, bind_context, refusal
from wideload.native import Either, bind_names
from wideload.random import draw_seed
from wideload.remembered import MAX_REMEMBERED

__all__ = ["Steps", "define", "run_steps", "runner_of", "steps_into", "steps_of_new", "tuple_of"]


@dataclass(frozen=True)
class Steps:
    """What a call does whose arguments have been taken apart: lines of a function, and what the names in them stand for.

    Tensors are ``t0``, ``t1``, ..., the tuple of run-time numbers ``numbers``, what is written ``out``; the tensors' device is the
    current one. Calls that differ in nothing but sizes have the same lines, which are compiled once. An `Either` that a name stands for
    is one of its two functions.
    """

    lines: tuple[str, ...]
    names: Mapping[str, Any] = field(default_factory=dict)


def define(head: str, steps: Steps) -> Callable[..., Any]:
    """The function of that head with those lines."""

    def defined(names: dict[str, Any]) -> Callable[..., Any]:
        exec(_code_of("\n    ".join((head, *steps.lines))), names)
        function: Callable[..., Any] = names.pop("call")
        return function

    return bind_names(defined, steps.names)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=MAX_REMEMBERED)
def _code_of(text: str) -> CodeType:
    return compile(text, "<a call like an earlier one>", "exec")


def tuple_of(items: Iterable[str]) -> str:
    """The text of a tuple of no, one or more items."""
    return f"({''.join(f'{item}, ' for item in items)})"


def run_steps(
    run: Callable[[tuple[torch.Tensor, ...], tuple[Any, ...]], Sequence[torch.Tensor]],
    returned: int | Sequence[int],
    tensors: Iterable[int],
    numbers: Iterable[int] | None = None,
) -> Steps:
    """Return one of what ``run`` makes of these tensors and these of the numbers, or of all, or a tuple of some."""
    given = "numbers" if numbers is None else tuple_of(f"numbers[{at}]" for at in numbers)
    lines = f"outs = run({_tensors(tensors)}, {given})", f"return {_returned('outs[{}]', returned)}"
    return Steps(lines, {"run": run})


def _returned(each: str, returned: int | Sequence[int]) -> str:
    return each.format(returned) if isinstance(returned, int) else tuple_of(map(each.format, returned))


def _tensors(places: Iterable[int]) -> str:
    return tuple_of(f"t{at}" for at in places)


def steps_of_new(
    launches: Sequence[Launch],
    outputs: Sequence[Output],
    device: torch.device,
    returned: int | Sequence[int],
    num_tensors: int,
    *,
    draws: bool = False,
) -> Steps:
    """Allocate ``outputs`` on ``device``, launch, and return one of them, or a tuple of some; ``draws`` a seed behind the tensors."""
    lines: list[str] = []
    names: dict[str, Any] = {"empty": empty_here(device)}
    for at, output in enumerate(outputs):
        shape, strides, dtype = output.layout.shape, output.layout.strides, output.dtype
        if output.is_reduced:
            lines.append(f"r{at} = zeros{at}()")
            names[f"zeros{at}"] = functools.partial(torch.zeros, shape, dtype=dtype, device=device)
        else:
            lines.append(f"r{at} = empty(shape{at}, strides{at}, dtype{at})")
            names |= {f"shape{at}": shape, f"strides{at}": strides, f"dtype{at}": dtype}
    written = [f"r{at}" for at in range(len(outputs))]
    launching = _launching(launches, written, device, num_tensors if draws else None)
    return Steps((*lines, *launching.lines, f"return {_returned('r{}', returned)}"), {**names, **launching.names})


def steps_into(launches: Sequence[Launch], device: torch.device, num_tensors: int, *, draws: bool = False) -> Steps:
    """Launch what writes ``out`` and return it."""
    launching = _launching(launches, ["out"], device, num_tensors if draws else None)
    names = {**launching.names, "changed": _INCREMENT_VERSION}
    return Steps((*launching.lines, "changed((out,))", "return out"), names)


_INCREMENT_VERSION = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
"""Of the tensors in a tuple; 0.3 us less than the public function that asks whether it is one tensor."""


def runner_of(
    launches: Sequence[Launch], outputs: Sequence[Output], device: torch.device, num_tensors: int
) -> Callable[[Sequence[torch.Tensor], tuple[Any, ...]], Sequence[torch.Tensor]]:
    """`run_new` of so many tensors and their numbers, as a function of them, on whichever device is current."""

    def run(tensors: Sequence[torch.Tensor], numbers: tuple[Any, ...]) -> Sequence[torch.Tensor]:
        return run_new(launches, device, tensors, outputs, numbers)

    if any(launch.reads_host for launch in launches):
        return run
    steps = steps_of_new(launches, outputs, device, range(len(outputs)), num_tensors)
    lines = ["if current() != index: return elsewhere(tensors, numbers)"]
    lines += [f"{_tensors(range(num_tensors))} = tensors"] if num_tensors else []
    names = {"current": torch._C._cuda_getDevice, "index": device.index, "elsewhere": run}
    return define("def call(tensors, numbers):", Steps((*lines, *steps.lines), {**steps.names, **names}))


def _launching(launches: Sequence[Launch], written: Sequence[str], device: torch.device, drawn: int | None) -> Steps:
    """All numbers before the first launch: one may be refused, and nothing is written then."""
    names: dict[str, Any] = {}
    lines, calls = [], []
    for number, launch in enumerate(launches):
        plan = launch.plan
        tensors = [written[~tensor] if tensor < 0 else f"t{tensor}" for tensor, _ in plan.sources]
        tensors += [written[of] for of, _ in plan.targets] + ([] if plan.seed is None else [f"t{plan.seed}"])
        slots = [parameter.given_slot for parameter in plan.program.scalars]
        if None not in slots:
            tensors += [f"numbers[{slot}]" for slot in slots]
        else:
            names |= {"find_words": scalar_words, f"plan{number}": plan}
            lines.append(f"words{number} = find_words(plan{number}, numbers)")
            tensors.append(f"*words{number}")
        launcher = _Launcher(launch, device.index)
        names[f"launch{number}"] = Either(launcher.of_python, launcher.of_native)
        calls.append(f"launch{number}({', '.join(tensors)})")
    if drawn is not None:  # after what may be refused: that leaves the generator as it was
        lines.append(f"t{drawn} = draw(device)")
        names |= {"draw": draw_seed, "device": device}
    return Steps((*lines, *calls), names)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """Launches a kernel with tensors in the order of its parameters, and the words of its numbers: by `native`'s, or in Python."""

    launch: Launch
    device: int

    @property
    def _offsets(self) -> tuple[int, ...]:
        plan = self.launch.plan
        return (*[offset for _, offset in (*plan.sources, *plan.targets)], *([] if plan.seed is None else [0]))

    def of_native(self, native: Any) -> Callable[..., None]:
        offsets, sizes = self._offsets, tuple(self.launch.plan.sizes)
        types = self.launch.types[len(offsets) + len(sizes) :]
        return self.launch.kernel.native_launcher(native, self.device, offsets, sizes, types)

    def of_python(self) -> Callable[..., None]:
        offsets, sizes = self._offsets, tuple(self.launch.plan.sizes)
        tensors = [f"t{at}" for at in range(len(offsets))]
        arguments = [f"t{at}.data_ptr()" + f" + offset{at}" * bool(offset) for at, offset in enumerate(offsets)] + ["*sizes", "*words"]
        lines = (
            "if index not in thread.bound: bind(index)",
            f"try: launch({tuple_of(arguments)}, stream(index))",
            "except RuntimeError as error: raise refusal(error) from None",
        )
        names: dict[str, Any] = {"index": self.device, "thread": THREAD, "bind": bind_context, "refusal": refusal, "sizes": sizes}
        names |= {"launch": self.launch.kernel.launcher(self.launch.types), "stream": torch._C._cuda_getCurrentRawStream}
        names |= {f"offset{at}": offset for at, offset in enumerate(offsets)}
        return define(f"def call({', '.join([*tensors, '*words'])}):", Steps(lines, names))
