"""Turns what was observed of one contender into labels: what is wrong with it, and what its time does and does not include.

Pure rules on numbers and names; they must not know how the observations were made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EVENT_OVERHEAD_US", "SHORT_CALL_US", "Evidence", "Label", "LabelCode", "find_labels", "is_ranked", "voids_time"]

LabelCode = Literal[
    "FAILED",
    "WRONG",
    "DIFFERS",
    "CACHED",
    "NO_WORK",
    "OFF_STREAM",
    "SERVED_BY_L2",
    "HOT",
    "HOST_BOUND",
    "HOST_EXPOSED",
    "MUTATES",
    "HOLDS_TENSORS",
    "NOT_COPIED",
    "EVENT_TIMED",
    "UNCHECKED",
    "THROTTLED",
]

_VOID: frozenset[str] = frozenset({"FAILED", "WRONG", "CACHED"})
"""What ran was not the work: its time is not reported."""
_UNRANKED: frozenset[str] = _VOID | {"NO_WORK", "OFF_STREAM", "SERVED_BY_L2", "HOST_BOUND"}
"""The time is not that of the work on the GPU with cold caches: it is reported and takes no part in the ranking."""

EVENT_OVERHEAD_US = 2.0
"""What two events around a call add to its time: an empty kernel between them reads 2 us and more on sm_90."""

SHORT_CALL_US = 50.0
"""Under this, the events are more than 4 % of the time between them, and calls are timed in a graph where one can hold them."""

_WARM_RATIO = 2.0
_WARM_SLACK_US = 10.0
"""A call right after a flush pays, beside its own bytes, for the write-back of as many: up to twice the time, plus the events and
the launch. Slower than that beside its own graph means that the graph found its data in the L2."""

_HOST_SHARE = 0.9
"""Of the time: from here on, an exposed call is taken to be bound by its host."""


@dataclass(frozen=True, slots=True)
class Label:
    """One thing to know about a contender."""

    code: LabelCode
    text: str

    def __str__(self) -> str:
        return f"{self.code}: {self.text}"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What was observed of one contender; the defaults are those of one with nothing to hide. Times in microseconds."""

    failure: str | None = None
    difference: str | None = None
    """From the reference, at the first call."""
    is_reference_binding: bool = True
    """Whether the contender must compute what the reference computes."""
    stale: str | None = None
    """From the reference, after the inputs had changed or the outputs had been overwritten."""
    has_effect: bool = True
    """A tensor was returned that is no argument, or an argument changed."""
    is_capture_empty: bool = False
    is_off_stream: bool = False
    """Replaying its graph, or waiting for its stream, did not do or await its work."""
    capture_failure: str | None = None
    mode: str = "cold"
    median_us: float | None = None
    host_us: float | None = None
    is_host_hidden: bool = True
    cold_call_us: float | None = None
    """A single call after a flush, between events, its host cost hidden."""
    bytes_per_second: float | None = None
    nominal_bytes_per_second: float | None = None
    mutated: tuple[str, ...] = ()
    is_drifting: bool = False
    """A second call on what the first one left gives something else."""
    held: tuple[str, ...] = ()
    uncopied: tuple[str, ...] = ()
    unchecked: str | None = None
    """Why there was no check, or no second one."""
    throttle: tuple[str, ...] = ()


def find_labels(e: Evidence) -> tuple[Label, ...]:
    """Return the labels that the evidence calls for, the gravest first."""
    if e.failure is not None:
        return (Label("FAILED", e.failure),)
    if e.difference is not None and e.is_reference_binding:
        return (Label("WRONG", e.difference),)
    return (*_work_labels(e), *_host_labels(e), *_operand_labels(e), *_run_labels(e))


def _work_labels(e: Evidence) -> list[Label]:
    labels = []
    if e.difference is not None:
        labels.append(Label("DIFFERS", f"it computes something else: {e.difference}"))
    if e.stale is not None:
        labels.append(Label("CACHED", f"served from a cache, not computed: {e.stale}"))
    elif not e.has_effect:
        labels.append(Label("NO_WORK", "it returns no new tensor and changes no argument"))
    elif e.is_off_stream or e.is_capture_empty:
        labels.append(Label("OFF_STREAM", "work outside the current stream, which the time does not include"))
    if e.mode == "hot":
        labels.append(Label("HOT", "as asked, its operands are in the L2 where they fit: no time of the memory"))
    elif e.bytes_per_second and e.nominal_bytes_per_second and e.bytes_per_second > e.nominal_bytes_per_second:
        figures = f"{e.bytes_per_second / 1e12:.2f} TB/s is above the memory's nominal {e.nominal_bytes_per_second / 1e12:.2f}"
        labels.append(Label("SERVED_BY_L2", f"{figures}: served by L2, or not all bytes are moved"))
    elif e.mode == "graph" and e.median_us and e.cold_call_us and e.cold_call_us > _WARM_RATIO * e.median_us + _WARM_SLACK_US:
        labels.append(Label("SERVED_BY_L2", f"a call after a flush takes {e.cold_call_us:.1f} us: the graph found data in the L2"))
    return labels


def _host_labels(e: Evidence) -> list[Label]:
    labels = []
    is_whole = not (e.is_off_stream or e.is_capture_empty)
    if e.mode == "cold" and is_whole and e.median_us is not None and e.median_us < SHORT_CALL_US:
        why = f"no graph can hold it ({e.capture_failure})" if e.capture_failure is not None else "by choice, or for what it holds"
        labels.append(Label("EVENT_TIMED", f"{why}; its time includes about {EVENT_OVERHEAD_US:.0f} us of events"))
    if e.mode == "wall" or e.is_host_hidden or e.median_us is None:
        return labels
    if e.host_us is not None and e.host_us >= _HOST_SHARE * e.median_us:
        labels.append(Label("HOST_BOUND", f"the host takes {e.host_us:.1f} us a call and could not be hidden: host-bound"))
    else:
        labels.append(Label("HOST_EXPOSED", "it waits for the GPU or outlasts the lead it is given: its time includes gaps of the host"))
    return labels


def _operand_labels(e: Evidence) -> list[Label]:
    labels = []
    if e.mutated:
        how = "restored before each sample" if e.is_drifting else "to the same values each time"
        labels.append(Label("MUTATES", f"it writes {', '.join(e.mutated)}, {how}"))
    if e.held:
        labels.append(Label("HOLDS_TENSORS", f"{', '.join(e.held)} are no arguments: not copied, checked or rotated"))
    if e.uncopied:
        labels.append(Label("NOT_COPIED", f"{', '.join(e.uncopied)} cannot be copied: timed where they are, neither restored nor rotated"))
    return labels


def _run_labels(e: Evidence) -> list[Label]:
    labels = []
    if e.unchecked is not None:
        labels.append(Label("UNCHECKED", e.unchecked))
    if e.throttle:
        labels.append(Label("THROTTLED", ", ".join(e.throttle)))
    return labels


def voids_time(labels: tuple[Label, ...]) -> bool:
    """Return whether a label says that the time is not that of the work."""
    return any(label.code in _VOID for label in labels)


def is_ranked(labels: tuple[Label, ...]) -> bool:
    """Return whether the time may be compared with others."""
    return not any(label.code in _UNRANKED for label in labels)
