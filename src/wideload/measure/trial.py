"""Turns one callable into a checked sampler and, once that has been sampled, into a record: the life of one contender.

Knows the order of checks and timings, on a CPU or a GPU; it must not know who else takes part.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from wideload.measure import timing
from wideload.measure.environment import GpuMonitor, nominal_bytes_per_second
from wideload.measure.gap import launch_gap_us
from wideload.measure.labels import EVENT_OVERHEAD_US, Evidence, Label, find_labels, voids_time
from wideload.measure.operands import Operands, held_tensors, unique_bytes
from wideload.measure.outcome import Tolerance, find_difference, is_poisoned, poison, tensors_of
from wideload.measure.result import Contender
from wideload.measure.statistics import median_error, summarize
from wideload.measure.timing import Collected, EventSampler, Flush, GraphSampler, Mode, Sampler, WallSampler

__all__ = ["Gpu", "Rotation", "Trial", "frozen", "reference_of"]

_NUM_PROBES = 5


class Gpu:
    """What timing on one GPU needs; made once for all contenders."""

    def __init__(self, device: torch.device) -> None:
        self.flush = Flush(device)
        self.monitor = GpuMonitor(device)
        self.nominal_bytes_per_second = nominal_bytes_per_second(device)
        self._device = device

    def find_gap_us(self) -> float | None:
        """Between the kernels of a graph (`launch_gap_us`): measured at the first call of a process."""
        return launch_gap_us(torch.cuda.current_device() if self._device.index is None else self._device.index)


class Rotation:
    """Copies of a call's arguments, made when first needed."""

    def __init__(self, first: Operands) -> None:
        self._copies = [first]

    def take(self, num: int) -> list[Operands]:
        """Return ``num`` of them, always the same ones first."""
        while len(self._copies) < num:
            self._copies.append(self._copies[0].replicate())
        return self._copies[:num]


class Trial:
    """One contender: called and checked (`check`), timed (`probe`, `prepare`, ``sampler``), checked on other inputs (`recheck`)."""

    def __init__(self, name: str, fn: Callable[..., Any], rotation: Rotation, gpu: Gpu | None, tolerance: Tolerance | None) -> None:
        self.name, self.fn = name, fn
        self.sampler: Sampler | None = None
        self.probe_us = 0.0
        """The time of one call after a flush; 0 before `probe`."""
        self.written_bytes = 0
        """What a call writes: new results, ``out``, and arguments that it changes, whole."""
        self._rotation, self._gpu, self._tolerance = rotation, gpu, tolerance
        self._takes_out = _takes_out(fn)
        self._is_permuted = False
        self._written: tuple[str, ...] = ()
        self.beside: tuple[str, ...] | None = None
        """The arguments that are outputs beside the tensors that are returned: those that the reference changed, or it itself."""
        self._answers_for_itself = False
        self._is_repeatable = True
        self._host_us: float | None = None
        self._captured: timing.Capture | None = None
        self._captured_copies: list[Operands] = []
        self._result_bytes = self._least_written_bytes = 0
        self._held = held_tensors(fn)
        self._seen: dict[str, Any] = {"held": tuple(name for name, _ in self._held), "uncopied": self._operands.uncopied}

    # ---- calling

    @property
    def _operands(self) -> Operands:
        return self._rotation.take(1)[0]

    @property
    def _is_drifting(self) -> bool:
        return bool(self._seen.get("is_drifting"))

    def call(self, operands: Operands) -> Any:
        """Call it on one copy of the arguments."""
        if self._takes_out and operands.out is not None:
            return self.fn(*operands.args, out=operands.out, **operands.kwargs)
        return self.fn(*operands.args, **operands.kwargs)

    def answer(self, operands: Operands, *, is_permuted: bool = False) -> list[torch.Tensor]:
        """Call it and return its outputs: the tensors that it returns, and the arguments that it changed beside them.

        On permuted arguments (``is_permuted``) these are the ones that it changed the first time.
        """
        self._is_permuted = is_permuted
        self._synchronize()
        return self._outputs(self.call(operands), operands)

    def _outputs(self, result: Any, operands: Operands) -> list[torch.Tensor]:
        self._synchronize()
        returned, arguments = tensors_of(result), dict(operands.tensors)
        if not self._is_permuted and (not returned or self.beside is None):  # later every argument differs from the caller's
            self._written = operands.changed()
        if not returned:
            return [arguments[name].detach() for name in self._written]
        if self.beside is None:
            self.beside = tuple(name for name in self._written if not any(_is_same_view(arguments[name], tensor) for tensor in returned))
        return [*returned, *(arguments[name].detach() for name in self.beside)]

    def _call_first(self) -> Any:
        return self.call(self._operands)

    def _call_alone(self) -> Any:
        """Call it when all work on its arguments is done: one that runs on another stream does not wait for it."""
        self._synchronize()
        return self._call_first()

    def _synchronize(self) -> None:
        if self._gpu is not None:
            torch.cuda.synchronize()

    def _reset(self) -> None:
        """Give the arguments back the values that they had before the calls."""
        if self._seen.get("mutated"):
            self._operands.restore()
            if self._is_permuted:
                self._operands.permute()

    # ---- checking

    def fail(self, error: Exception) -> None:
        """Note that it raised."""
        self._seen["failure"] = f"{type(error).__name__}: {error}"

    @property
    def is_sound(self) -> bool:
        """Whether nothing was seen that makes its time worthless."""
        return not voids_time(find_labels(Evidence(**self._seen)))

    def check(self, want: list[torch.Tensor] | None, *, is_binding: bool, is_random: bool) -> None:
        """Call it twice and compare with ``want``, or with its own first answer; find out what it writes; capture it and replay it.

        With ``is_random`` no values are compared, only whether outputs are written again.
        """
        operands = self._operands
        result = self._call_alone()
        got = self._outputs(result, operands)
        self._observe_writes(result)
        if want is not None:
            if not got and not want:
                self.note_unchecked("nothing to compare: no tensor is returned or changed")
            difference = find_difference(got, want, self._tolerance)
            if difference is not None:
                self._seen |= {"difference": difference, "is_reference_binding": is_binding}
                want = None
                if is_binding:
                    operands.restore()
                    return
        if want is None:
            self._answers_for_itself, want = True, frozen(got)
        del result, got
        self._leave_shared_operands()
        previous = self._call_alone()
        again = self._outputs(previous, self._operands)
        if self._answers_for_itself and (is_random or find_difference(again, want, self._tolerance) is not None):
            self._is_repeatable, want = False, None
            self._seen["unchecked"] = "as asked" if is_random else "its results differ from call to call"
        self._reset()
        stale = self._find_stale(previous, self._call_alone, want)
        self._seen["stale"] = stale
        self._reset()
        if self._gpu is not None and stale is None:
            self._capture_once(want)
            self._reset()

    def _observe_writes(self, result: Any) -> None:
        operands = self._operands
        mutated, fresh = operands.changed(), self._fresh(result)
        given = tensors_of(operands.out) if self._takes_out else []
        self.written_bytes = unique_bytes([*fresh, *given, *(tensor for name, tensor in operands.tensors if name in mutated)])
        self._result_bytes = unique_bytes(fresh)
        self._least_written_bytes = self._result_bytes + operands.num_changed_bytes()
        self._seen |= {"mutated": mutated, "has_effect": bool(mutated or fresh)}

    def _fresh(self, result: Any) -> list[torch.Tensor]:
        return [tensor for tensor in tensors_of(result) if not self._operands.holds(tensor)]

    def _leave_shared_operands(self) -> None:
        """A contender that writes to its arguments gets its own; find out whether it would do something else on what it leaves."""
        if not self._seen["mutated"]:
            return
        shared, own = self._operands, self._operands.replicate()
        self._rotation = Rotation(own)
        self._call_alone()
        self._call_alone()
        self._synchronize()
        self._seen["is_drifting"] = not own.same_as(shared)
        shared.restore()
        own.restore()

    def _find_stale(self, previous: Any, run: Callable[[], Any], want: list[torch.Tensor] | None) -> str | None:
        """Overwrite what was returned before, run again, and say what is wrong with the outputs now."""
        targets = self._fresh(previous)
        if want is None:  # a tensor that it holds may be its state, which cannot be told from an output
            held = {tensor.untyped_storage().data_ptr() for _, tensor in self._held}
            targets = [tensor for tensor in targets if tensor.untyped_storage().data_ptr() not in held]
        saved = [tensor.clone() for tensor in targets]
        poison(targets)
        got = self._outputs(run(), self._operands)
        if want is not None:
            stale = find_difference(got, want, self._tolerance)
        else:
            stale = "its outputs are not written again" if is_poisoned(got) else None
        if stale is not None:
            for tensor, values in zip(targets, saved, strict=True):
                tensor.copy_(values)
        return stale

    def _capture_once(self, want: list[torch.Tensor] | None) -> None:
        """Replay a graph of one call: it holds exactly the work that the current stream waits for."""
        assert self._gpu is not None
        captured = timing.capture([self._call_first], 1)
        self._reset()
        if isinstance(captured, str):
            is_unjoined = "unjoined" in captured.lower()
            self._seen |= {"capture_failure": captured, "is_off_stream": is_unjoined or self._outlasts_stream()}
            return
        self._seen["is_capture_empty"] = captured.is_empty
        if not captured.is_empty:
            self._seen["is_off_stream"] = self._find_stale(captured.results[0], partial(_replay, captured), want) is not None

    def _outlasts_stream(self) -> bool:
        assert self._gpu is not None
        return float(np.median([timing.drain_us(self._call_first, self._gpu.flush) for _ in range(_NUM_PROBES)])) > _DRAIN_SLACK_US

    def recheck(self, want: list[torch.Tensor] | None) -> None:
        """Compare once more, on changed arguments: what was timed must still do the work. ``want`` is the reference's answer to them."""
        for operands in self._captured_copies or [self._operands]:  # all: their calls may write to one tensor, which fn holds
            operands.restore()
            operands.permute()
        self._is_permuted = True
        if self._answers_for_itself:
            fresh = self._operands.replicate()
            fresh.permute()
            want = frozen(self.answer(fresh, is_permuted=True)) if self._is_repeatable else None
        if self._captured is not None:
            stale = self._find_stale(self._captured.results[0], partial(_replay, self._captured), want)
        else:
            previous = self._call_alone()
            self._synchronize()
            self._reset()
            stale = self._find_stale(previous, self._call_alone, want)
        self._seen["stale"] = stale and f"{stale}, on changed arguments"

    def note_unchecked(self, why: str) -> None:
        """Note why a check was not made, unless there is a reason already."""
        self._seen.setdefault("unchecked", why)

    # ---- timing

    def probe(self) -> None:
        """Time a few single calls after a flush, to choose how to time it; and what the host spends on a call."""
        assert self._gpu is not None
        sampler = EventSampler(self._call_first, self._gpu.flush)
        self.probe_us = float(np.median([sampler.sample() for _ in range(_NUM_PROBES)]))
        if sampler.is_host_hidden:
            self._seen["cold_call_us"] = self.probe_us
        self._host_us = timing.host_cost_us(self._call_first, torch.cuda.synchronize, self.probe_us)
        self._reset()

    @property
    def _is_capturable(self) -> bool:
        """Whether a graph does all of the work."""
        return self._seen.get("capture_failure") is None and not (self._seen.get("is_capture_empty") or self._seen.get("is_off_stream"))

    @property
    def is_graph_cold(self) -> bool:
        """Whether a graph can hold it, and the tensors that no rotation moves cost less time than the events it saves."""
        if self._gpu is None or not self._is_capturable:
            return False
        held_bytes = unique_bytes(tensor for _, tensor in self._held)
        return held_bytes * 1e6 <= EVENT_OVERHEAD_US * (self._gpu.nominal_bytes_per_second or 0.0)

    def prepare(self, mode: Mode) -> None:
        """Make the ``sampler``. Where no graph can hold it, its calls are timed one by one."""
        if self._gpu is None:
            self.sampler = WallSampler(self._call_first, self._restore)
            return
        if mode == "graph" or (mode == "hot" and not self._is_drifting):
            self.sampler = self._graph_sampler(mode) if self._is_capturable else None
        if self.sampler is None:
            self.sampler = EventSampler(self._call_first, self._gpu.flush, mode="hot" if mode == "hot" else "cold", restore=self._restore)

    @property
    def _restore(self) -> Callable[[], None] | None:
        return self._operands.restore if self._is_drifting else None

    def _graph_sampler(self, mode: Mode) -> GraphSampler | None:
        assert self._gpu is not None
        bytes_per_call, l2_bytes = self._operands.nbytes + self._result_bytes, self._gpu.flush.l2_bytes
        num_buffers = 1 if mode == "hot" else timing.num_rotated_buffers(bytes_per_call, l2_bytes)
        num_calls = timing.num_graph_calls(self.probe_us, num_buffers)
        if self._is_drifting:
            num_buffers = num_calls
        is_short = mode != "hot" and num_buffers * bytes_per_call < timing.ROTATION_L2S * l2_bytes
        copies = self._rotation.take(num_buffers)
        captured = timing.capture([partial(self.call, operands) for operands in copies], num_calls)
        if isinstance(captured, str):
            self._seen["capture_failure"] = captured
            return None
        self._captured, self._captured_copies = captured, copies
        restore = (lambda: _restore_all(copies)) if self._is_drifting else None
        flush = self._gpu.flush if is_short or restore is not None else None
        gap_us = None if captured.overlaps else self._gpu.find_gap_us()
        return GraphSampler(captured, num_calls, num_buffers, flush, mode=mode, restore=restore, gap_us=gap_us)

    # ---- recording

    def record(self, collected: Collected | None, minimal_bytes: int | None, throttle: tuple[str, ...]) -> Contender:
        """Return its figures; ``collected`` is ``None`` where it was not timed."""
        sampler = self.sampler
        if sampler is None or collected is None:
            return _untimed(self.name, find_labels(Evidence(**self._seen)))
        time_us = summarize(collected.samples_us)
        moved_bytes = minimal_bytes or self._least_written_bytes
        evidence = Evidence(
            **self._seen,
            mode=sampler.mode,
            median_us=time_us.median,
            host_us=self._host_us,
            is_host_hidden=sampler.is_host_hidden,
            bytes_per_second=_per_second(moved_bytes, time_us.median),
            nominal_bytes_per_second=self._gpu.nominal_bytes_per_second if self._gpu is not None else None,
            throttle=throttle,
        )
        labels = find_labels(evidence)
        if voids_time(labels):
            return _untimed(self.name, labels)
        return Contender(
            name=self.name,
            mode=sampler.mode,
            time_us=time_us,
            relative_error=median_error(collected.samples_us) / time_us.median if time_us.n > 1 and time_us.median else None,
            stopped=collected.stopped,
            calls_per_sample=sampler.calls_per_sample,
            num_buffers=sampler.num_buffers,
            host_us=self._host_us,
            bytes_per_second=_per_second(minimal_bytes, time_us.median),
            labels=labels,
            gap_us=sampler.gap_us,
        )


_DRAIN_SLACK_US = 20.0
"""Waiting for an idle device takes some 5 us, give or take as much."""


def reference_of(fn: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a fused function's own definition in torch's operators; ``None`` for any other callable."""
    reference = getattr(fn, "reference", None)
    return reference if callable(reference) and callable(getattr(fn, "plan", None)) else None


def frozen(outputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return outputs that no later call changes."""
    return [tensor.clone() for tensor in outputs]


def _untimed(name: str, labels: tuple[Label, ...]) -> Contender:
    return Contender(name, None, None, None, None, None, None, None, None, labels)


def _per_second(nbytes: int | None, time_us: float) -> float | None:
    return nbytes / time_us * 1e6 if nbytes and time_us else None


def _is_same_view(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())


def _replay(captured: timing.Capture) -> Any:
    captured.graph.replay()
    return captured.results[0]


def _restore_all(copies: Sequence[Operands]) -> None:
    for operands in copies:
        operands.restore()


def _takes_out(fn: Callable[..., Any]) -> bool:
    """Whether ``out=`` may be passed; builtins such as ``torch.add`` do not tell their parameters, and take it. A reference does not."""
    owner = getattr(fn, "__self__", None)
    if owner is not None and fn == reference_of(owner):
        return False
    if reference_of(fn) is not None:
        return True
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return True
    return "out" in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
