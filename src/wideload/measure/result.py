"""Turns what was measured into a record that prints as a table and goes to JSON and back.

Knows figures only; it must not know how they were measured. Times are microseconds, sizes bytes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from wideload.analyze.figure import Figure, assumed, computed
from wideload.decode import check_schema, decode
from wideload.errors import DeviceError
from wideload.gpus import find_target
from wideload.measure.environment import Environment, GpuState
from wideload.measure.labels import Label, is_ranked
from wideload.measure.operands import OperandInfo
from wideload.measure.statistics import Summary

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

__all__ = ["SCHEMA", "BenchResult", "Contender", "print_plain"]

SCHEMA = "wideload.bench/2"
"""The number behind the slash grows when a key changes its name or its meaning."""


@dataclass(frozen=True)
class Contender:
    """One callable's figures. ``time_us`` is ``None`` where what ran was not the work: see ``labels``."""

    name: str
    mode: str | None
    time_us: Summary | None
    relative_error: float | None
    """Standard error of the median over the median."""
    stopped: str | None
    """What ended the sampling: ``precision``, ``max_samples``, ``max_seconds`` or ``verdict``."""
    calls_per_sample: int | None
    num_buffers: int | None
    host_us: float | None
    """What a call costs the host; no part of ``time_us``."""
    bytes_per_second: float | None
    """The work's minimal bytes over the median time."""
    labels: tuple[Label, ...] = ()
    gap_us: float | None = None
    """What lay between two calls in a graph and is taken off ``time_us``; ``None`` where nothing is."""

    @property
    def is_ranked(self) -> bool:
        """Whether there is a time that may be compared with others."""
        return self.time_us is not None and is_ranked(self.labels)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        return _listed(asdict(self))


@dataclass(frozen=True)
class BenchResult:
    """What `bench` measured: the subject, those it was measured against, and where, on what and how."""

    subject: Contender
    against: tuple[Contender, ...]
    checked_against: str | None
    """The reference's name."""
    minimal_bytes: int | None
    """Every operand read once and every result written once; ``None`` where nobody declared them."""
    nominal_bytes_per_second: float | None
    arguments: tuple[OperandInfo, ...]
    seed: int
    gpu_state: GpuState
    environment: Environment

    @property
    def contenders(self) -> tuple[Contender, ...]:
        """All of them, the subject first."""
        return (self.subject, *self.against)

    def __getitem__(self, name: str) -> Contender:
        """Return the contender of that name."""
        return {contender.name: contender for contender in self.contenders}[name]

    @property
    def nominal_bandwidth(self) -> Figure | None:
        """The GPU's, in GB/s: computed from its attributes, or assumed where it is that of the table of GPUs."""
        if self.nominal_bytes_per_second is None:
            return None
        gbps = self.nominal_bytes_per_second / 1e9
        with contextlib.suppress(DeviceError):
            gpu = find_target(self.environment.gpu or "").gpu
            if gpu is not None and gpu.memory_bandwidth_gbps == gbps:
                return assumed(gbps, "GB/s", f"gpus.csv, {gpu.name}: {gpu.source}")
        return computed(gbps, "GB/s", "device attributes")

    def share_of_nominal(self, contender: Contender) -> float | None:
        """Return which part of the nominal bandwidth a ranked time with cold caches is; never more than 1."""
        if not (contender.is_ranked and contender.bytes_per_second and self.nominal_bytes_per_second) or contender.mode == "hot":
            return None
        return contender.bytes_per_second / self.nominal_bytes_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON; each of ``against`` stands under its name."""
        return {
            "schema": SCHEMA,
            "subject": self.subject.to_dict(),
            "against": {contender.name: contender.to_dict() for contender in self.against},
            "checked_against": self.checked_against,
            "minimal_bytes": self.minimal_bytes,
            "nominal_bytes_per_second": self.nominal_bytes_per_second,
            "arguments": [_listed(asdict(argument)) for argument in self.arguments],
            "seed": self.seed,
            "gpu_state": _listed(asdict(self.gpu_state)),
            "environment": asdict(self.environment),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> BenchResult:
        """Read what `to_dict` has written. Raises ``WideloadError`` for another schema, and for what is damaged."""
        check_schema(values, SCHEMA)
        return decode(cls, {**values, "against": list(values.get("against", {}).values())}, cls.__name__)

    def to_json(self) -> str:
        """`to_dict` as text; numbers are real numbers, never NaN."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> BenchResult:
        """Read what `to_json` has written."""
        return cls.from_dict(json.loads(text))

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.table import Table

        table = Table(box=None, pad_edge=False)
        for heading in ("", "median us", "p5 .. p95", "+-", "n", "GB/s", "of nominal", "vs best", "host us", "timed"):
            table.add_column(heading, justify="left" if heading in ("", "timed") else "right")
        best = min((c.time_us.median for c in self.contenders if c.is_ranked and c.time_us), default=None)
        for contender in self.contenders:
            table.add_row(*self._cells(contender, best))
        return Group(table, *self._notes())

    def _cells(self, contender: Contender, best: float | None) -> Iterator[str]:
        time_us, bandwidth = contender.time_us, contender.bytes_per_second
        yield contender.name
        if time_us is None:
            yield from [contender.labels[0].code, *[""] * 8]
            return
        yield f"{time_us.median:.2f}"
        yield f"{time_us.p5:.2f} .. {time_us.p95:.2f}"
        yield "" if contender.relative_error is None else f"{contender.relative_error:.1%}"
        yield str(time_us.n)
        yield "" if bandwidth is None else f"{bandwidth / 1e9:.0f}"
        share = self.share_of_nominal(contender)
        yield "" if share is None else f"{share:.1%}"
        yield f"{time_us.median / best:.2f}x" if best is not None and contender.is_ranked else "-"
        yield "" if contender.host_us is None else f"{contender.host_us:.1f}"
        calls = f"{contender.calls_per_sample} calls over {contender.num_buffers} buffer{'s' * (contender.num_buffers != 1)}"
        calls += f", gaps of {contender.gap_us:.2f} us off" if contender.gap_us is not None else ""
        yield f"{contender.mode}, {calls}" if contender.calls_per_sample != 1 else str(contender.mode)

    def _notes(self) -> Iterator[str]:
        for contender in self.contenders:
            yield from (f"  {contender.name}: {label}" for label in contender.labels)
        yield "on " + ", ".join(map(str, self.arguments))
        state, where = self.gpu_state, self.environment
        if where.gpu is None:
            yield f"{where.cpu}, {where.num_threads} threads, torch {where.torch}"
            return
        clocks = f"SM clock {_unknown(state.sm_clock_before_mhz)} -> {_unknown(state.sm_clock_after_mhz)} MHz"
        unread = f" ({where.unread})" if where.unread else ""
        if where.persisting_l2 is not None and not where.persisting_l2.startswith("reset"):
            yield f"lines that are set to persist in the L2 were {where.persisting_l2}"
        yield f"{where.gpu}, driver {_unknown(where.driver)}, torch {where.torch}, {clocks}{unread}"

    def __str__(self) -> str:
        return print_plain(self.__rich__())


def print_plain(renderable: RenderableType) -> str:
    """Render for `str`: no colours, no markup, no wrapping."""
    from rich.console import Console

    console = Console(width=_PLAIN_WIDTH, color_system=None, force_terminal=False, markup=False, highlight=False)
    with console.capture() as captured:
        console.print(renderable, soft_wrap=True)
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


_PLAIN_WIDTH = 160


def _listed(values: dict[str, Any]) -> dict[str, Any]:
    """Tuples as lists, as JSON will have them."""
    return {key: _as_lists(value) for key, value in values.items()}


def _as_lists(value: Any) -> Any:
    if isinstance(value, dict):
        return _listed(value)
    return [_as_lists(item) for item in value] if isinstance(value, (tuple, list)) else value


def _unknown(value: Any) -> str:
    return "unknown" if value is None else str(value)
