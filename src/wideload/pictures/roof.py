"""Turns the roofline of a GPU and explained calls into the picture of what bounds them: operations a second by operations a byte.

Knows figures only; it must not know how they came about, beyond what they say themselves.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wideload.analyze.budget import Unit, boost_clock_mhz
from wideload.analyze.explain import Explanation
from wideload.analyze.figure import Figure
from wideload.errors import WideloadError
from wideload.gpus import find_target
from wideload.measure.roofline import Attributes, Roofline, find_ridges
from wideload.pictures.canvas import FONT_POINTS, LIGHT, Style, new_canvas, place_legend, style_axes

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["Mark", "assume_roof", "draw_roof", "mark_call"]

_UNITS: dict[str, tuple[Unit, int, str]] = {"fp32": ("fp32", 2, "o"), "special functions": ("special", 1, "^")}
"""By the names of ridges: the unit of an explanation, operations an instruction, marker. As a multiply-add, an instruction is two FLOP: so
a mark lies right of its ridge exactly where its unit takes longer than the memory."""

_BYTES_PER_GB = 1e9
_US_PER_S = 1e6
_WIDEST = 5.0
"""The axis goes so far beyond the last ridge, as a factor."""
_INCHES_WITHOUT_LEGEND = 4.1
_LEGEND_COLUMNS = 2
_NARROWEST = 0.1
"""Operations a byte where the axis begins: an add of fp32 does 0.17."""
_NUMBER_COLUMNS = 36
"""Numbers of two digits that stand beside each other along the axis."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Where a call stands: operations of ``unit`` a byte that it must move, and operations a second."""

    name: str
    unit: str
    intensity: Figure
    rate: Figure


def mark_call(explanation: Explanation) -> tuple[Mark, ...]:
    """Return the marks of a call, for each unit that it keeps busy.

    Its time is the measured one, else the longer of what its bytes take at the achievable bandwidth and its instructions at the units'
    rates; without bandwidth, and without compiled kernels, there are no marks.
    """
    time = explanation.measured_time or _bound(explanation)
    if time is None or not explanation.minimal.value:
        return ()
    marks = []
    for name, (unit, weight, _) in _UNITS.items():
        operations = weight * sum(
            kernel.instructions[unit].value * kernel.num_elements for kernel in explanation.kernels if unit in kernel.instructions
        )
        if operations:
            intensity = Figure(operations / explanation.minimal.value, "op/B", "computed", "instructions of the SASS / minimal bytes")
            rate = Figure(operations / time.value * _US_PER_S, "op/s", time.kind, f"the same instructions / {time.source}")
            marks.append(Mark(explanation.function, name, intensity, rate))
    return tuple(marks)


def _bound(explanation: Explanation) -> Figure | None:
    busy_us = sum(max((time.value for time in kernel.unit_times.values()), default=0.0) for kernel in explanation.kernels)
    memory = explanation.achievable_time
    if memory is None or memory.value >= busy_us:
        return memory
    return Figure(busy_us, "us", "assumed", "the time of the unit that is busy longest")


def assume_roof(explanation: Explanation) -> Roofline:
    """Return the roofline that an explanation reckons with, of a GPU that need not be here. Raises ``WideloadError`` if none was named."""
    nominal, achievable = explanation.nominal_bandwidth, explanation.achievable_bandwidth
    if nominal is None or achievable is None or explanation.gpu is None:
        raise WideloadError(f"{explanation.function} was explained for {explanation.arch} alone: it has no bandwidth. Name a GPU: h200")
    gpu = find_target(explanation.gpu).gpu
    ridges: dict[str, Figure] = {}
    if gpu is not None:
        clock_mhz, sheet = boost_clock_mhz(gpu.compute_capability)
        sheet_of = Attributes(gpu.name, "", "", gpu.compute_capability, gpu.sms, clock_mhz * 1000, 0, 0)
        ridges = {
            unit: Figure(ridge.value, ridge.unit, "assumed", f"{ridge.source}; boost clock of {sheet}")
            for unit, ridge in find_ridges(sheet_of, nominal.value).items()
        }
    return Roofline(explanation.gpu, "", "", explanation.arch, nominal, None, {"achievable": achievable}, {}, ridges, ())


def draw_roof(roof: Roofline, calls: Sequence[Sequence[Mark]] = (), *, style: Style = LIGHT) -> Canvas:
    """Draw the memory's diagonals, the units' levels and, below them, the marks of each call: filled where its time was measured.

    Both axes are logarithmic: operations a byte, operations a second. Where there are more calls than colours, the marks have the numbers
    of their calls in the legend. Raises ``WideloadError`` without matplotlib.
    """
    marks = [mark for call in calls for mark in call]
    canvas = new_canvas(style, _INCHES_WITHOUT_LEGEND)
    axes = canvas.add_subplot()
    nominal = roof.nominal.value * _BYTES_PER_GB
    right = max([*(ridge.value for ridge in roof.ridges.values()), *(mark.intensity.value for mark in marks), 1.0]) * _WIDEST
    left = min([_NARROWEST, *(mark.intensity.value / 2 for mark in marks)])
    highest = max((ridge.value for ridge in roof.ridges.values()), default=right) * nominal
    top = max([highest, *(mark.rate.value for mark in marks)]) * 4

    axes.plot([left, highest / nominal], [left * nominal, highest], color=style.ink, linewidth=1.2, linestyle=(0, (5, 3)))
    entries: list[tuple[Artist, str]] = [(axes.lines[-1], f"{roof.nominal.kind}: {_terabytes(roof.nominal.value)} (nominal)")]
    if roof.ceilings:
        low, high = (choose(roof.ceilings.items(), key=lambda item: item[1].value) for choose in (min, max))
        ends = [left, highest / nominal]
        floor, ceiling = ([end * bandwidth.value * _BYTES_PER_GB for end in ends] for _, bandwidth in (low, high))
        band = axes.fill_between(ends, floor, ceiling, color=style.colour(0), alpha=0.35, linewidth=1.2)
        lowest = "" if low == high else f"{_terabytes(low[1].value)} ({low[0]}) to "
        entries.append((band, f"{high[1].kind}: {lowest}{_terabytes(high[1].value)} ({high[0]})"))
    for unit, ridge in roof.ridges.items():
        peak = ridge.value * nominal
        axes.plot([ridge.value, right], [peak, peak], color=style.ink, linewidth=1.2)
        axes.plot([ridge.value, ridge.value], [left * nominal, peak], color=style.faint, linewidth=0.8, linestyle=":")
        axes.plot([ridge.value], [peak], marker="D", markersize=4, color=style.ink)
        text = f"{unit}: {_spell(peak)}{ridge.unit.partition('/')[0]}/s ({ridge.kind})\nridge at {ridge.value:.3g} {ridge.unit}"
        box = {"facecolor": style.ground, "edgecolor": "none", "pad": 1}
        place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom"}
        axes.annotate(text, (right, peak), (-2, 4), color=style.ink, fontsize=FONT_POINTS - 1, bbox=box, **place)
    is_numbered = len(calls) >= len(style.series)  # the first colour is the ceilings'
    for number, call in enumerate(calls, start=1):
        entries += _draw_marks(axes, call, f"{number} " if is_numbered else "", style.colour(number), style)
    if is_numbered:
        _draw_numbers(axes, calls, left, right, style)

    axes.set(xscale="log", yscale="log", xlim=(left, right), ylim=(left * nominal, top))
    axes.set(xlabel="operations a byte of memory traffic", ylabel="operations a second")
    style_axes(axes, style, f"Roofline of {roof.device}")
    handles, labels = zip(*entries, strict=True)
    place_legend(canvas, style, _LEGEND_COLUMNS, handles=handles, labels=labels)
    return canvas


def _draw_marks(axes: Axes, marks: Sequence[Mark], number: str, colour: str, style: Style) -> list[tuple[Artist, str]]:
    entries: list[tuple[Artist, str]] = []
    for mark in marks:
        (point,) = axes.plot(
            [mark.intensity.value],
            [mark.rate.value],
            linestyle="none",
            marker=_UNITS[mark.unit][2],
            markersize=8,
            markeredgewidth=1.6,
            markeredgecolor=colour,
            markerfacecolor=colour if mark.rate.kind == "measured" else style.ground,
            zorder=5,
        )
        entries.append((point, f"{number}{mark.name}, {mark.unit}: {mark.intensity.value:.3g} op/B ({mark.rate.kind})"))
    return entries


def _draw_numbers(axes: Axes, calls: Sequence[Sequence[Mark]], left: float, right: float, style: Style) -> None:
    """Above each mark the number of its call; those of marks with nearly as many operations a byte stand above each other."""
    column = math.log(right / left) / _NUMBER_COLUMNS
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for number, call in enumerate(calls, start=1):
        for mark in call:
            found[math.floor(math.log(mark.intensity.value / left) / column)].append((mark.rate.value, number))
    box = {"facecolor": style.ground, "edgecolor": "none", "pad": 0.3, "alpha": 0.8}
    look: dict[str, Any] = {"color": style.ink, "fontsize": FONT_POINTS - 2, "bbox": box, "zorder": 4}  # above lines, below marks
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "bottom"}
    for index, numbers in found.items():
        foot = (left * math.exp((index + 0.5) * column), max(rate for rate, _ in numbers))
        for row, number in enumerate(sorted({number for _, number in numbers})):
            axes.annotate(str(number), foot, (0, 6 + row * FONT_POINTS), **look, **place)


def _terabytes(gbps: float) -> str:
    return f"{gbps / 1e3:.2f} TB/s" if gbps >= 1e3 else f"{gbps:.0f} GB/s"


def _spell(per_second: float) -> str:
    """With the prefix of the SI: an operation is slower than 1e12 and faster than 1e18 a second on no GPU."""
    return f"{per_second / 1e15:.3g} P" if per_second >= 1e15 else f"{per_second / 1e12:.3g} T"
