"""Turns callables and the arguments of a call into contenders that are checked, warm and ready to be sampled in turn.

Knows the order in which all of them go through their trials; it must not know what is done with their samples.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

from wideload.errors import DeviceError
from wideload.measure import timing
from wideload.measure.environment import Environment, GpuState, read_environment
from wideload.measure.labels import SHORT_CALL_US
from wideload.measure.operands import OperandInfo, Operands, describe_operands, held_tensors, unique_bytes
from wideload.measure.outcome import Tolerance, tensors_of
from wideload.measure.result import Contender
from wideload.measure.statistics import require, require_number
from wideload.measure.timing import Collected, Mode, Sampler
from wideload.measure.trial import Gpu, Rotation, Trial, frozen, reference_of

__all__ = ["Options", "Progress", "RequestedMode", "Session"]

_cuda: Any = torch.cuda  # typed in part only

RequestedMode = Literal["auto", "cold", "hot", "graph"]
_MODES = ("auto", "cold", "hot", "graph")


@dataclass(frozen=True)
class Options:
    """How contenders are to be checked and timed; `bench` says what each means."""

    mode: RequestedMode = "auto"
    nbytes: int | None = None
    out: Any = None
    check: Callable[..., Any] | Literal[False] | None = None
    is_check_binding: bool = True
    is_mode_common: bool = False
    """Whether all are to be timed alike, one by one where a graph cannot hold each of them."""
    tolerance: Tolerance | None = None
    device: torch.device | str | None = None
    warm_up_seconds: float = timing.WARM_UP_SECONDS
    recheck_on: Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.nbytes is not None:
            require_number("bytes", self.nbytes, "an integer, 0 and more, or None", is_whole=True)
        require(self.check is None or self.check is False or callable(self.check), "check", self.check, "a callable, False or None")
        is_list = isinstance(self.recheck_on, (list, tuple))
        require(self.recheck_on is None or is_list, "recheck_on", self.recheck_on, "a list or tuple of arguments, or None")
        require_number("warm_up_seconds", self.warm_up_seconds, "a number, 0 and more")


class Session:
    """Contenders on copies of one call's arguments. The first is the subject: where it raises, so does the session."""

    def __init__(self, fns: Mapping[str, Callable[..., Any]], args: tuple[Any, ...], kwargs: dict[str, Any], options: Options) -> None:
        if options.mode not in _MODES:
            raise DeviceError(f"mode={options.mode!r}; allowed: {', '.join(_MODES)}")
        self._fns, self._options = dict(fns), options
        self._subject = next(iter(fns))
        names = _parameter_names(fns[self._subject], len(args))
        self.arguments: tuple[OperandInfo, ...] = describe_operands(names, args, kwargs, options.out)
        try:
            self._shared = Operands(names, args, kwargs, options.out, options.recheck_on)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"timing needs a copy of the arguments, and there is no memory for one ({error}).") from error
        self.device = self._find_device()
        if self.device.type != "cuda" and options.mode != "auto":
            raise DeviceError(f"mode={options.mode!r} is about a GPU's L2, but the call runs on {self.device}. Leave it out.")
        self.gpu = Gpu(self.device) if self.device.type == "cuda" else None
        rotation = Rotation(self._shared)
        self._trials = {name: Trial(name, fn, rotation, self.gpu, options.tolerance) for name, fn in fns.items()}
        self.checked_against, reference = self._find_reference()
        self._judge = Trial("reference", reference, rotation, self.gpu, None) if reference is not None else None
        self._state_before: tuple[int | None, tuple[str, ...] | None] = (None, None)

    # ---- choosing

    def _find_device(self) -> torch.device:
        """Where the call runs: as its tensors, the ones it holds or the ones it returns are; a GPU where it launches work all the same."""
        if self._options.device is not None:
            return _with_index(torch.device(self._options.device))
        subject = Trial(self._subject, self._fns[self._subject], Rotation(self._shared), None, None)
        tensors = [tensor for _, tensor in (*self._shared.tensors, *held_tensors(self._fns[self._subject]))]
        on_gpu = [tensor.device for tensor in tensors if tensor.is_cuda]
        if not on_gpu and _cuda.is_initialized():
            on_gpu = [tensor.device for tensor in tensors_of(subject.call(self._shared)) if tensor.is_cuda]
            if not on_gpu:
                captured = timing.capture([lambda: subject.call(self._shared)], 1)
                on_gpu = [torch.device("cuda")] if isinstance(captured, str) or not captured.is_empty else []
            self._shared.restore()
        return _with_index(on_gpu[0]) if on_gpu else torch.device("cpu")

    def _find_reference(self) -> tuple[str | None, Callable[..., Any] | None]:
        check, subject = self._options.check, self._fns[self._subject]
        if check is False:
            return None, None
        if check is not None:
            return getattr(check, "__name__", "check"), check
        own = reference_of(subject)
        if own is not None:
            return f"{self._subject}.reference", own
        return next(((name, fn) for name, fn in self._fns.items() if name != self._subject), (None, None))

    # ---- the course of things

    @contextlib.contextmanager
    def current_device(self) -> Iterator[None]:
        """Make the GPU of the session the current one, as its streams, events and graphs need."""
        with torch.cuda.device(self.device) if self.gpu is not None else contextlib.nullcontext():
            yield

    def check(self) -> None:
        """Call every contender and compare it with the reference, before anything is timed."""
        want = self._first_reference_answer()
        is_random = self._options.check is False
        for trial in self._trials.values():
            trial.beside = self._judge.beside if self._judge is not None else None
            self._attempt(trial, partial(trial.check, want, is_binding=self._options.is_check_binding, is_random=is_random))
            if want is None:
                trial.note_unchecked("no reference to check it against")

    def prepare(self) -> dict[str, Sampler]:
        """Choose how to time, the same way for all where they allow it, and return a warm sampler for each contender that is sound."""
        for trial in self._sound():
            if self.gpu is not None:
                self._attempt(trial, trial.probe)
        mode = self._choose_mode()
        for trial in self._sound():
            is_hot_graph = mode == "graph" and self._options.mode == "auto" and not trial.is_graph_cold
            self._attempt(trial, partial(trial.prepare, "cold" if is_hot_graph else mode))
        samplers = {trial.name: trial.sampler for trial in self._sound() if trial.sampler is not None}
        if samplers:
            clock = self.gpu.monitor.clock_mhz if self.gpu is not None else lambda: None
            timing.warm_up(list(samplers.values()), clock, self._options.warm_up_seconds)
        self._state_before = self._read_state()
        return samplers

    def _choose_mode(self) -> Mode:
        if self._options.mode != "auto":
            return self._options.mode
        sound = self._sound()
        is_short = min((trial.probe_us for trial in sound), default=0.0) < SHORT_CALL_US
        is_graph_for_all = not self._options.is_mode_common or all(trial.is_graph_cold for trial in sound)
        return "graph" if is_short and is_graph_for_all else "cold"

    def record(self, collected: Mapping[str, Collected]) -> tuple[tuple[Contender, ...], GpuState]:
        """Check every contender again, on other inputs, and return all their figures, in their order."""
        (clock_before, throttle_before), (clock_after, throttle_after) = self._state_before, self._read_state()
        state = GpuState(clock_before, clock_after, throttle_before, throttle_after)
        is_permuted = self._shared.permute()
        rival = self._trials.get(self.checked_against or "")
        is_trusted = rival is None or rival.is_sound
        want = self._reference_answer(is_permuted=True) if is_trusted else None
        for trial in self._sound():
            self._attempt(trial, partial(trial.recheck, want))
            if not is_trusted:
                trial.note_unchecked(f"checked once: {self.checked_against}, its reference, is not to be trusted")
            elif not is_permuted:
                trial.note_unchecked("checked once: its inputs could not be changed for a second check")
        nbytes = self.minimal_bytes
        return tuple(trial.record(collected.get(trial.name), nbytes, state.throttle) for trial in self._trials.values()), state

    def _first_reference_answer(self) -> list[torch.Tensor] | None:
        """A rival that should be the reference and raises is reported as any other, and nobody is checked against it."""
        try:
            return self._reference_answer()
        except Exception as error:
            if self.checked_against not in self._trials:
                raise
            self._trials[self.checked_against].fail(error)
            self.checked_against = self._judge = None
            return None

    def _reference_answer(self, *, is_permuted: bool = False) -> list[torch.Tensor] | None:
        if self._judge is None:
            return None
        answer = frozen(self._judge.answer(self._shared, is_permuted=is_permuted))
        if self._shared.changed() or is_permuted:
            self._shared.restore()
            if is_permuted:
                self._shared.permute()
        return answer

    def _attempt(self, trial: Trial, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception as error:  # a contender may raise anything; it then takes no part
            if trial.name == self._subject:
                raise
            trial.fail(error)

    def _sound(self) -> list[Trial]:
        return [trial for trial in self._trials.values() if trial.is_sound]

    # ---- facts

    @property
    def minimal_bytes(self) -> int | None:
        """What was declared; else, where a contender is a fused function, every operand read once and every result written once."""
        if self._options.nbytes is not None:
            return int(self._options.nbytes)  # NumPy's are none for JSON
        fused = next((trial for trial in self._trials.values() if reference_of(trial.fn) is not None and trial.is_sound), None)
        if fused is None:
            return None
        return unique_bytes(self._shared.inputs) + fused.written_bytes

    def _read_state(self) -> tuple[int | None, tuple[str, ...] | None]:
        return (self.gpu.monitor.clock_mhz(), self.gpu.monitor.throttle()) if self.gpu is not None else (None, None)

    def environment(self) -> Environment:
        """Read where this runs."""
        if self.gpu is None:
            return read_environment(self.device)
        return read_environment(self.device, persisting_l2=self.gpu.flush.persisting_l2, monitor=self.gpu.monitor)


class Progress:
    """A bar on stderr for what takes longer than `_QUIET_SECONDS`, where stderr is a terminal. Call it with steps done and steps in all."""

    def __init__(self, what: str) -> None:
        self._what, self._start = what, time.perf_counter()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __call__(self, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` steps are done."""
        if self._bar is None and sys.stderr.isatty() and time.perf_counter() - self._start > _QUIET_SECONDS:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=total)
            self._bar.start()
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()


_QUIET_SECONDS = 2.0


def _parameter_names(fn: Callable[..., Any], num: int) -> list[str]:
    """Names for ``num`` positional arguments, as far as the signature gives them."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # builtins
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in positional][:num]


def _with_index(device: torch.device) -> torch.device:
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())
