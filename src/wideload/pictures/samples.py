"""Turns the samples of a benchmark into a histogram for each contender.

Knows results only; it must not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wideload.errors import WideloadError
from wideload.measure.result import BenchResult
from wideload.measure.statistics import Summary
from wideload.pictures.canvas import FONT_POINTS, LIGHT, Style, new_canvas, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["Histogram", "draw_samples", "sort_samples"]

_MOST_BINS = 60
_LONG_TAIL = 3.0
"""Samples further above the median than so many times the 95th percentile is are counted, not drawn: one would flatten all others."""
_LARGE_RATIO = 4.0
"""From here on the axis is logarithmic."""
_MANY_DECADES = 1e3
"""From here on only powers of ten have room for their labels."""
_NARROWEST_BAR = 1 / 150
"""Of the axis: three points, more than the line of the median."""
_UNITS_US = {"s": 1e6, "ms": 1e3}


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many samples lie between two neighbours of ``edges``, in microseconds, and how many beyond the last."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_beyond: int


def sort_samples(time_us: Summary, narrowest_us: float = 0.0) -> Histogram:
    """Return the histogram of a contender's samples, with numpy's own choice of bins, up to 60, none narrower than ``narrowest_us``."""
    samples = np.asarray(time_us.samples)
    drawn = samples[samples <= _furthest_us(time_us)]
    edges = np.histogram_bin_edges(drawn, bins="auto")
    low, high = edges[0], edges[-1]
    if high - low < narrowest_us:
        low = (low + high - narrowest_us) / 2
        edges = np.array([low, low + narrowest_us])
    else:
        most = min(_MOST_BINS, int((high - low) / narrowest_us)) if narrowest_us else _MOST_BINS
        edges = np.linspace(low, high, min(len(edges) - 1, most) + 1)
    counts, edges = np.histogram(drawn, edges)
    return Histogram(tuple(map(float, edges)), tuple(map(int, counts)), len(samples) - len(drawn))


def _furthest_us(time_us: Summary) -> float:
    return time_us.median + _LONG_TAIL * (time_us.p95 - time_us.median)


def draw_samples(result: BenchResult, *, style: Style = LIGHT) -> Canvas:
    """Draw a histogram for each contender that was timed, with its median, above each other on one axis of time.

    The axis is logarithmic where the longest time is more than four times the shortest.
    Raises ``WideloadError`` where none was timed, and without matplotlib.
    """
    timed = [(contender.name, contender.time_us) for contender in result.contenders if contender.time_us is not None]
    if not timed:
        raise WideloadError("nothing was timed, and so there are no samples to draw")
    canvas = new_canvas(style, 0.5 + 1.25 * len(timed))
    rows: list[Axes] = list(canvas.subplots(len(timed), 1, squeeze=False, sharex=True).flat)
    shortest = min(min(time_us.samples) for _, time_us in timed)
    longest = max(min(max(time_us.samples), _furthest_us(time_us)) for _, time_us in timed)
    is_log = 0 < _LARGE_RATIO * shortest < longest
    unit = next((unit for unit, unit_us in _UNITS_US.items() if shortest >= unit_us), "us")
    for index, (axes, (name, time_us)) in enumerate(zip(rows, timed, strict=True)):
        whole_us = time_us.median * np.log(longest / shortest) if is_log else longest - shortest
        histogram = sort_samples(time_us, _NARROWEST_BAR * whole_us)
        _draw_histogram(axes, name, time_us, histogram, unit, style.colour(index), style)
    last = rows[-1]
    last.set_xlabel(f"time of a call, {unit} (measured)")
    if is_log:
        _set_log(last, (1, 2, 5) if longest / shortest < _MANY_DECADES else (1,))
    last.xaxis.set_major_formatter(lambda time, _: f"{time:,.12g}")
    canvas.supylabel("samples", color=style.ink, fontsize=FONT_POINTS)
    return canvas


def _set_log(axes: Axes, digits: Sequence[int]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=digits))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _draw_histogram(axes: Axes, name: str, time_us: Summary, histogram: Histogram, unit: str, colour: str, style: Style) -> None:
    unit_us = _UNITS_US.get(unit, 1.0)
    axes.stairs(histogram.counts, [edge / unit_us for edge in histogram.edges], fill=True, color=colour, alpha=0.75)
    axes.axvline(time_us.median / unit_us, color=style.ink, linewidth=1.2)
    beyond = f", {histogram.num_beyond} beyond, up to {spell_time(max(time_us.samples), unit)}" if histogram.num_beyond else ""
    style_axes(axes, style, name)
    text = f"median {spell_time(time_us.median, unit)} of {time_us.n} sample{'s' * (time_us.n != 1)}{beyond}"
    axes.set_title(text, loc="right", color=style.ink, fontsize=FONT_POINTS - 1)


def spell_time(time_us: float, unit: str) -> str:
    """Spell a time in a unit, to four digits or more.

    >>> spell_time(71462.4, "us"), spell_time(71462.4, "ms"), spell_time(3.14159, "us")
    ('71,462 us', '71.46 ms', '3.142 us')
    """
    time = time_us / _UNITS_US.get(unit, 1.0)
    return f"{time:,.0f} {unit}" if time >= 1000 else f"{time:.4g} {unit}"
