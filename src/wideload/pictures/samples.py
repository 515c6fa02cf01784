"""Turns the samples of a benchmark into a histogram for each contender.

Knows results only; it must not know how they were measured.
"""

from __future__ import annotations

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


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many samples lie between two neighbours of ``edges``, in microseconds, and how many beyond the last."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]
    num_beyond: int


def sort_samples(time_us: Summary) -> Histogram:
    """Return the histogram of a contender's samples, with numpy's own choice of bins, up to 60."""
    samples = np.asarray(time_us.samples)
    furthest = time_us.median + _LONG_TAIL * (time_us.p95 - time_us.median)
    drawn = samples[samples <= furthest]
    edges = np.histogram_bin_edges(drawn, bins="auto")
    if len(edges) > _MOST_BINS + 1:
        edges = np.linspace(drawn.min(), drawn.max(), _MOST_BINS + 1)
    counts, edges = np.histogram(drawn, edges)
    return Histogram(tuple(map(float, edges)), tuple(map(int, counts)), len(samples) - len(drawn))


def draw_samples(result: BenchResult, *, style: Style = LIGHT) -> Canvas:
    """Draw a histogram for each contender that was timed, each on an axis of its own, with its median.

    Raises ``WideloadError`` where none was timed, and without matplotlib.
    """
    timed = [(contender.name, contender.time_us) for contender in result.contenders if contender.time_us is not None]
    if not timed:
        raise WideloadError("nothing was timed, and so there are no samples to draw")
    canvas = new_canvas(style, 0.5 + 1.25 * len(timed))
    rows: list[Axes] = list(canvas.subplots(len(timed), 1, squeeze=False).flat)
    for index, (axes, (name, time_us)) in enumerate(zip(rows, timed, strict=True)):
        _draw_histogram(axes, name, time_us, style.colour(index), style)
    rows[-1].set_xlabel("time of a call, us (measured)")
    canvas.supylabel("samples", color=style.ink, fontsize=FONT_POINTS)
    return canvas


def _draw_histogram(axes: Axes, name: str, time_us: Summary, colour: str, style: Style) -> None:
    histogram = sort_samples(time_us)
    axes.stairs(histogram.counts, histogram.edges, fill=True, color=colour, alpha=0.75)
    axes.axvline(time_us.median, color=style.ink, linewidth=1.2)
    beyond = f", {histogram.num_beyond} beyond, up to {spell_us(max(time_us.samples))}" if histogram.num_beyond else ""
    style_axes(axes, style, name)
    text = f"median {spell_us(time_us.median)} of {time_us.n}{beyond}"
    axes.set_title(text, loc="right", color=style.ink, fontsize=FONT_POINTS - 1)


def spell_us(time_us: float) -> str:
    """Spell a time to four digits or more.

    >>> spell_us(71462.4), spell_us(3.14159)
    ('71,462 us', '3.142 us')
    """
    return f"{time_us:,.0f} us" if time_us >= 1000 else f"{time_us:.4g} us"
