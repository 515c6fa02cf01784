"""Turns the bytes that a call must move, and its time, into how far it is from its bound: all that can be said of code that is not read.

It must not know what the call does, nor how many kernels it runs.
"""

from __future__ import annotations

from dataclasses import replace

from wideload.analyze.explain import (
    Explanation,
    GpuFigures,
    Verdict,
    achievable_bandwidth,
    judge_measured,
    judge_memory,
    nominal_bandwidth,
    time_at,
)
from wideload.analyze.figure import Figure, assumed, computed

__all__ = ["explain_opaque"]


def explain_opaque(
    function: str, figures: GpuFigures, nbytes_read: int, nbytes_written: int, num_elements: int, measured_us: float | None
) -> Explanation:
    """Explain a call that reads and writes so many bytes at least, each once."""
    nominal, achievable = nominal_bandwidth(figures), achievable_bandwidth(figures, nbytes_read, nbytes_written)
    nbytes = nbytes_read + nbytes_written
    explanation = Explanation(
        function=function,
        arch=figures.target.arch,
        gpu=figures.target.gpu.name if figures.target.gpu else None,
        num_elements=num_elements,
        bytes_read=assumed(nbytes_read, "B", "the memory of every argument, once"),
        bytes_written=assumed(nbytes_written, "B", "the memory of every result, once"),
        minimal=assumed(nbytes, "B", "read and written"),
        moved=assumed(nbytes, "B", "the same: what its kernels move is not known"),
        efficiency=None,
        bytes_per_element=assumed(nbytes / num_elements if num_elements else 0.0, "B/element", "minimal bytes / elements"),
        nominal_bandwidth=nominal,
        achievable_bandwidth=achievable,
        least_time=time_at(nbytes, nominal, "assumed", "minimal bytes / nominal bandwidth"),
        achievable_time=time_at(nbytes, achievable, "assumed", "minimal bytes / achievable bandwidth"),
        measured_time=None if measured_us is None else Figure(measured_us, "us", "measured", "wl.bench: median, cold L2"),
        operands=(),
        kernels=(),
        eager=None,
        verdicts=(),
    )
    if measured_us is None:
        text = f"At least {nbytes:,} bytes move; whether more do is not known without a measured time"
        verdicts: tuple[Verdict, ...] = (Verdict("memory", computed(1.0, "x", "the bound itself"), text, _NEXT),)
    else:
        slower = [replace(verdict, next_step=_NEXT) for verdict in judge_measured(explanation, ())]
        verdicts = (*slower, judge_memory(explanation, bool(slower)))
    return replace(explanation, verdicts=verdicts)


_NEXT = "Give it to wl.fuse, if it is elementwise: one kernel, each byte once. Its explain says what limits that."
