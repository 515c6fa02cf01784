"""Turns a style into empty figures and axes, and a finished figure into PNG or SVG.

The only module that imports matplotlib, which is optional; it must not know what is drawn.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from wideload.errors import WideloadError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["DARK", "FONT_POINTS", "LIGHT", "Style", "new_canvas", "place_legend", "render", "style_axes"]

WIDTH_INCHES = 7.5
"""720 CSS pixels: beside that, a font of 9 points is the text of a page."""
FONT_POINTS = 9.0
_PNG_DOTS_PER_INCH = 160
_INCHES_PER_ENTRY = 1.7 * (FONT_POINTS - 1) / 72
"""A row of a legend: a line of 1.2 times its font, and the half of a font that matplotlib leaves below it."""


@dataclass(frozen=True, slots=True)
class Style:
    """The colours of a picture: of text, of what stands back, of the ground, and of what is compared."""

    ink: str
    faint: str
    ground: str
    series: tuple[str, ...]

    def colour(self, index: int) -> str:
        """Return the colour of contender ``index``; they repeat."""
        return self.series[index % len(self.series)]


# Wong, "Points of view: Color blindness", Nature Methods 8, 2011; on dark ground its lighter ones and lightened others.
LIGHT = Style("#20242c", "#9298a3", "#ffffff", ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07c00", "#3a9bd0"))
DARK = Style("#e6e8ec", "#747c89", "#15181d", ("#56b4e9", "#ff9347", "#2fc29a", "#e59ac6", "#f0e442", "#9db7ff"))


def new_canvas(style: Style, height_inches: float) -> Canvas:
    """An empty figure, of no window and no global state. Raises ``WideloadError`` where matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise WideloadError(f"pictures need matplotlib, which cannot be imported ({error}): pip install 'wideload[plots]'") from None
    return Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained", facecolor=style.ground)


def style_axes(axes: Axes, style: Style, title: str = "") -> None:
    """Give axes the colours of ``style``, faint grid lines behind all else, and a title on the left."""
    axes.set_facecolor(style.ground)
    axes.set_axisbelow(True)
    axes.grid(color=style.faint, alpha=0.25, linewidth=0.6)
    axes.tick_params(which="both", colors=style.ink, labelsize=FONT_POINTS - 1)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(style.faint)
    axes.xaxis.label.set(color=style.ink, fontsize=FONT_POINTS)
    axes.yaxis.label.set(color=style.ink, fontsize=FONT_POINTS)
    axes.set_title(title, loc="left", color=style.ink, fontsize=FONT_POINTS + 1, fontweight="bold")


def place_legend(canvas: Canvas, style: Style, most_columns: int, **entries: Any) -> None:
    """Put the legend below all axes, in as many columns as fit, and make the picture higher by its rows: the axes keep their height."""
    look = {"fontsize": FONT_POINTS - 1, "labelcolor": style.ink, "frameon": False}
    look |= {"handlelength": 2.0, "handletextpad": 0.6, "columnspacing": 1.2, "borderpad": 0.3}  # in fonts
    for num_columns in range(most_columns, 0, -1):
        legend = canvas.legend(loc="outside lower left", ncols=num_columns, **look, **entries)
        if num_columns == 1 or legend.get_window_extent().width <= canvas.bbox.width:
            break
        legend.remove()
    num_rows = math.ceil(len(legend.get_texts()) / num_columns)
    canvas.set_figheight(canvas.get_figheight() + num_rows * _INCHES_PER_ENTRY)


def render(canvas: Canvas, kind: Literal["png", "svg"]) -> bytes:
    """The figure as a file: the same for the same figure, without a date."""
    import matplotlib

    file = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if kind == "svg" else {"Software": None}
    with matplotlib.rc_context({"svg.hashsalt": "wideload", "svg.fonttype": "path"}):
        canvas.savefig(file, format=kind, dpi=_PNG_DOTS_PER_INCH, metadata=metadata, facecolor=canvas.get_facecolor())
    return file.getvalue()
