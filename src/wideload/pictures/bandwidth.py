"""Turns a sweep over sizes into the picture of bandwidth against bytes, with the edge of the L2 and the wall.

Knows results only; it must not know what the sizes are sizes of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wideload.errors import WideloadError
from wideload.measure.roofline import Roofline
from wideload.measure.sweep import Sweep
from wideload.pictures.canvas import FONT_POINTS, LIGHT, Style, new_canvas, place_legend, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

__all__ = ["Curve", "Reached", "draw_sweep", "find_curves"]

_INCHES_WITHOUT_LEGEND = 3.7
_LEGEND_COLUMNS = 4


@dataclass(frozen=True, slots=True)
class Reached:
    """What a contender reached with ``nbytes``, in GB/s: by the median, the 80th and the 20th percentile of its times."""

    nbytes: int
    gbps: float
    low_gbps: float
    high_gbps: float
    is_ranked: bool


@dataclass(frozen=True, slots=True)
class Curve:
    """One contender over the sizes, the smallest first."""

    name: str
    points: tuple[Reached, ...]


def find_curves(sweep: Sweep) -> tuple[Curve, ...]:
    """Return each contender's bandwidth at each size. Raises ``WideloadError`` where nobody said how many bytes a call must move."""
    found: dict[str, list[Reached]] = {}
    for point in sweep.points:
        nbytes = point.result.minimal_bytes
        for contender in point.result.contenders:
            time_us = contender.time_us
            if nbytes and time_us is not None:
                median, low, high = (nbytes / time / 1e3 for time in (time_us.median, time_us.p80, time_us.p20))  # bytes/us are MB/s
                found.setdefault(contender.name, []).append(Reached(nbytes, median, low, high, contender.is_ranked))
    if not found:
        raise WideloadError("this sweep has no bytes, and so no bandwidth: measure with --bytes, such as --bytes '6*n'")
    return tuple(Curve(name, tuple(sorted(points, key=lambda point: point.nbytes))) for name, points in found.items())


def draw_sweep(sweep: Sweep, roof: Roofline | None = None, *, style: Style = LIGHT) -> Canvas:
    """Draw bandwidth against the bytes that a call must move, in bands from the 20th to the 80th percentile.

    Hollow points take no part in rankings. ``roof`` adds the measured ceilings of its GPU. Raises ``WideloadError`` as `find_curves`
    does, and without matplotlib.
    """
    curves = find_curves(sweep)
    result = sweep.points[0].result
    nominal = result.nominal_bandwidth
    ceilings = [figure.value for figure in roof.ceilings.values()] if roof else []
    highest = max([point.high_gbps for curve in curves for point in curve.points] + ceilings + ([nominal.value] if nominal else []))
    scale, unit = (1e3, "TB/s") if highest >= 1e3 else (1.0, "GB/s")

    canvas = new_canvas(style, _INCHES_WITHOUT_LEGEND)
    axes = canvas.add_subplot()
    for index, curve in enumerate(curves):
        colour = style.colour(index)
        sizes = [point.nbytes for point in curve.points]
        low, high = ([getattr(point, name) / scale for point in curve.points] for name in ("low_gbps", "high_gbps"))
        axes.fill_between(sizes, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(sizes, [point.gbps / scale for point in curve.points], color=colour, linewidth=1.6, label=curve.name)
        for point in curve.points:
            face = colour if point.is_ranked else style.ground
            axes.plot([point.nbytes], [point.gbps / scale], marker="o", markersize=4.5, color=colour, markerfacecolor=face)

    axes.set(xscale="log", ylim=(0, highest / scale * 1.12), xlabel="bytes that a call must move", ylabel=f"{unit} (measured)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: spell_bytes(nbytes))
    box = {"facecolor": style.ground, "edgecolor": "none", "pad": 1, "alpha": 0.7}
    notes: dict[str, Any] = {"color": style.ink, "fontsize": FONT_POINTS - 1, "bbox": box}
    at_left = axes.get_yaxis_transform()  # x by the axes, y by the data
    if nominal:
        axes.axhline(nominal.value / scale, color=style.ink, linewidth=1.0, linestyle=(0, (5, 3)))
        text = f"nominal {nominal.value / scale:.2f} {unit} ({nominal.kind})"
        axes.text(0.01, nominal.value / scale, text, transform=at_left, va="bottom", **notes)
    if ceilings:
        low_wall, high_wall = min(ceilings) / scale, max(ceilings) / scale
        axes.axhspan(low_wall, high_wall, color=style.faint, alpha=0.3, linewidth=0)
        text = f"the wall, measured: {low_wall:.2f} to {high_wall:.2f} {unit} by mix"
        axes.text(0.01, low_wall, text, transform=at_left, va="top", **notes)
    l2_bytes = result.environment.l2_bytes
    if l2_bytes:
        axes.axvline(l2_bytes, color=style.faint, linewidth=1.2, linestyle=":")
        axes.text(l2_bytes, 0.02, f" L2: {spell_bytes(l2_bytes)}", transform=axes.get_xaxis_transform(), va="bottom", **notes)
    style_axes(axes, style, f"Bandwidth on {result.environment.gpu or result.environment.cpu}")
    place_legend(canvas, style, _LEGEND_COLUMNS)
    return canvas


def spell_bytes(nbytes: float) -> str:
    """Spell a size by powers of 1024.

    >>> spell_bytes(62914560), spell_bytes(1536)
    ('60 MiB', '1.5 KiB')
    """
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while nbytes >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.3g} {units[power]}"
