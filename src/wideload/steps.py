"""Turns kernels into the lines of a Python function that launches them, with nothing left to look up.

Knows kernels and where each of their arguments comes from; never what makes two calls alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any

import torch

from wideload.execute import Launch, Output, checked_number, empty_here, run_new
from wideload.expr import HostCall, HostInput, HostValue
from wideload.launch import THREAD, bind_context, refusal
from wideload.lower import ScalarParameter
from wideload.native import Either, bind_names
from wideload.random import SEEDS
from wideload.remembered import MAX_REMEMBERED

__all__ = ["Steps", "define", "run_steps", "runner_of", "steps_into", "steps_of_new", "tuple_of"]


@dataclass(frozen=True)
class Steps:
    """What a call does whose arguments have been taken apart: lines of a function, and what the names in them stand for.

    Tensors are ``t0``, ``t1``, ..., run-time numbers ``n0``, ``n1``, ..., what is written ``out``; the tensors' device is the
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
        function.__code__ = function.__code__.replace()  # of its own: the interpreter notes in it where these very globals are
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
    numbers: Iterable[int],
) -> Steps:
    """Return one of what ``run`` makes of these tensors and these numbers, or a tuple of some."""
    given = tuple_of(f"n{at}" for at in numbers)
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
    number: str = "n{}",
) -> Steps:
    """Allocate ``outputs`` on ``device``, launch, and return one of them, or a tuple of some; ``draws`` a seed behind the tensors.

    ``number`` is how the lines spell a number, by its slot.
    """
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
    launching = _launching(launches, written, device, num_tensors if draws else None, number)
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
    steps = steps_of_new(launches, outputs, device, range(len(outputs)), num_tensors, number="numbers[{}]")
    lines = ["if current() != index: return elsewhere(tensors, numbers)"]
    lines += [f"{_tensors(range(num_tensors))} = tensors"] if num_tensors else []
    names = {"current": torch._C._cuda_getDevice, "index": device.index, "elsewhere": run}
    return define("def call(tensors, numbers):", Steps((*lines, *steps.lines), {**steps.names, **names}))


def _launching(launches: Sequence[Launch], written: Sequence[str], device: torch.device, drawn: int | None, number: str = "n{}") -> Steps:
    """All numbers before the first launch: one may be refused, and nothing is written then."""
    numbers, calls = _Numbers(number), []
    lines, names = numbers.lines, numbers.names
    for at, launch in enumerate(launches):
        plan = launch.plan
        tensors = [written[~tensor] if tensor < 0 else f"t{tensor}" for tensor, _ in plan.sources]
        tensors += [written[of] for of, _ in plan.targets] + ([] if plan.seed is None else [f"t{plan.seed}"])
        tensors += map(numbers.write, plan.program.scalars)
        launcher = _Launcher(launch, device.index)
        names[f"launch{at}"] = Either(launcher.of_python, launcher.of_native)
        calls.append(f"launch{at}({', '.join(tensors)})")
    if drawn is not None:  # after what may be refused: that leaves the generator as it was
        lines.append(f"t{drawn} = empty(one, one, int64).random_(*seeds)")  # as `draw_seed`, whose seed it is
        names |= {"empty": empty_here(device), "one": (1,), "int64": torch.int64, "seeds": SEEDS}
    return Steps((*lines, *calls), names)


class _Numbers:
    """Writes the lines that find what kernels are passed of numbers; those given are spelt ``number``, by their slots."""

    def __init__(self, number: str) -> None:
        self.lines: list[str] = []
        self.names: dict[str, Any] = {}
        self._number = number
        self._known: dict[int, str] = {}

    def write(self, parameter: ScalarParameter) -> str:
        """The arguments that a number is; one of the usual kind and size costs no call."""
        word, (low, high), tests = f"w{len(self.lines)}", parameter.limits, []
        if not isinstance(parameter.value, HostInput):
            tests.append(f"type({word}) is {self._name(parameter.kind)}")
        if (low, high) != (-math.inf, math.inf):
            tests.append(f"{self._name(low)} <= {word} <= {self._name(high)}")
        self.lines.append(f"{word} = {self._text(parameter.value)}")
        if tests:
            checked = self._name(functools.partial(checked_number, parameter))
            self.lines.append(f"if not ({' and '.join(tests)}): {word} = {checked}({word})")
        return f"{word}.real, {word}.imag" if parameter.kind is complex else word

    def _text(self, value: HostValue) -> str:
        """As `evaluate_host`, but each call once, on a line of its own."""
        if isinstance(value, HostInput):
            return self._number.format(value.slot)
        if not isinstance(value, HostCall):
            return self._name(value)
        if id(value) not in self._known:
            called = f"{self._name(value.fn)}({', '.join(map(self._text, value.args))})"
            self._known[id(value)] = f"h{len(self.lines)}"
            self.lines.append(f"h{len(self.lines)} = {called}")
        return self._known[id(value)]

    def _name(self, constant: object) -> str:
        name = f"host{len(self.names)}"
        self.names[name] = constant
        return name


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
