"""Turns the bytes that a warp's lanes ask for into a drawing of the sectors and lines that move for them.

Knows addresses only; it must not know which tensor they belong to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wideload.analyze.pattern import Pattern
from wideload.analyze.sectors import LINE_BYTES, SECTOR_BYTES, WARP_SIZE
from wideload.pictures.canvas import FONT_POINTS, LIGHT, Style, new_canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

__all__ = ["Piece", "describe_access", "draw_access", "find_pieces"]

_MOST_LINES = 12
"""More lines than that only say the same again: the rest is counted."""
_LABELLED_BYTES = 4
"""What two digits take; the number of a lane stands where it fits."""
_INCHES_PER_LINE = 0.36


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of one line, and the lanes that ask for them; a lane's item may lie in two lines."""

    line: int
    start: int
    stop: int
    lanes: tuple[int, ...]

    @property
    def label(self) -> str:
        """The lanes' numbers: one, or the first and the last."""
        return str(self.lanes[0]) if len(self.lanes) == 1 else f"{self.lanes[0]}-{self.lanes[-1]}"


def find_pieces(pattern: Pattern) -> Iterator[Piece]:
    """Yield what each item covers of each line, items of several lanes once."""
    lanes_at: dict[int, list[int]] = defaultdict(list)
    for lane, addresses in enumerate(pattern.lanes):
        for address in addresses:
            lanes_at[address].append(lane)
    for address, lanes in sorted(lanes_at.items()):
        start, stop = address, address + pattern.itemsize
        while start < stop:
            line = start // LINE_BYTES
            end = min(stop, (line + 1) * LINE_BYTES)
            yield Piece(line, start - line * LINE_BYTES, end - line * LINE_BYTES, tuple(dict.fromkeys(lanes)))
            start = end


def describe_access(pattern: Pattern) -> str:
    """Say what the drawing shows.

    >>> from wideload.analyze.pattern import strided_pattern
    >>> describe_access(strided_pattern(4, stride=2))
    '32 lanes touch 8 sectors in 2 lines: 128 of 256 bytes are used (50%)'
    """
    access, lines = pattern.access, len(pattern.lines)
    sectors = f"{access.sectors} sector{'s' * (access.sectors != 1)} in {lines} line{'s' * (lines != 1)}"
    return (
        f"{len(pattern.lanes)} lane{'s' * (len(pattern.lanes) != 1)} touch {sectors}: "
        f"{access.useful_bytes} of {access.moved_bytes} bytes are used ({100 * access.efficiency:.3g}%)"
    )


def draw_access(pattern: Pattern, title: str = "", *, style: Style = LIGHT) -> Canvas:
    """Draw each line of 128 bytes that is touched as a row of four sectors: bytes in the colour of their lane, others hatched.

    Sectors that do not move stay empty. Raises ``WideloadError`` without matplotlib.
    """
    lines = pattern.lines[:_MOST_LINES]
    num_more = len(pattern.lines) - len(lines)
    num_rows = len(lines) + bool(num_more)
    canvas = new_canvas(style, 1.1 + _INCHES_PER_LINE * num_rows)
    axes = canvas.add_subplot()
    from matplotlib.patches import Rectangle

    for row, line in enumerate(lines):
        axes.text(-1.5, row + 0.5, f"{line * LINE_BYTES:+d}", ha="right", va="center", color=style.ink, fontsize=FONT_POINTS - 1)
        for sector in range(LINE_BYTES // SECTOR_BYTES):
            moves = line * LINE_BYTES // SECTOR_BYTES + sector in pattern.sectors
            look: dict[str, Any] = {"hatch": "////"} if moves else {"alpha": 0.4}
            place = (sector * SECTOR_BYTES, row + 0.1)
            axes.add_artist(Rectangle(place, SECTOR_BYTES, 0.8, facecolor="none", edgecolor=style.faint, linewidth=0.6, **look))
    pieces = [piece for piece in find_pieces(pattern) if piece.line in lines]
    for piece in pieces:
        _draw_piece(axes, piece, lines.index(piece.line), style)
    if len(pieces) == 1 and len(pieces[0].lanes) > 1 and not _fits(pieces[0]):
        ground: dict[str, Any] = {"facecolor": style.ground, "edgecolor": "none", "pad": 1.5}
        text = f"lanes {pieces[0].label}"
        axes.text(pieces[0].stop + 1, 0.5, text, va="center", color=style.ink, fontsize=FONT_POINTS - 1, bbox=ground, zorder=5)
    for row, line in enumerate(lines):  # once more, above the bytes
        for sector in range(LINE_BYTES // SECTOR_BYTES):
            if line * LINE_BYTES // SECTOR_BYTES + sector in pattern.sectors:
                place = (sector * SECTOR_BYTES, row + 0.1)
                axes.add_artist(Rectangle(place, SECTOR_BYTES, 0.8, facecolor="none", edgecolor=style.ink, linewidth=1.2))
    if num_more:
        text = f"and {num_more} more lines"
        axes.text(0, len(lines) + 0.5, text, va="center", color=style.ink, fontsize=FONT_POINTS - 1)
    _draw_key(axes, num_rows, style)
    axes.set(xlim=(-9, LINE_BYTES + 1), ylim=(num_rows + 1.3, -0.1))
    axes.set_axis_off()
    for artist in (*axes.patches, *axes.texts):  # inside the limits: to measure them would be a third of the work
        artist.set(in_layout=False, clip_on=False)
    heading = f"{title}: {describe_access(pattern)}" if title else describe_access(pattern)
    axes.set_title(heading, loc="left", y=1.0, color=style.ink, fontsize=FONT_POINTS, fontweight="bold")
    return canvas


def _draw_piece(axes: Axes, piece: Piece, row: int, style: Style) -> None:
    from matplotlib.patches import Rectangle

    colour = _lane_colour(piece.lanes[0])
    width = piece.stop - piece.start
    axes.add_artist(Rectangle((piece.start, row + 0.1), width, 0.8, facecolor=colour, edgecolor=style.ground, linewidth=0.5))
    if _fits(piece):
        ink = "#ffffff" if sum(colour[:3]) < 1.5 else "#000000"
        axes.text(piece.start + width / 2, row + 0.5, piece.label, ha="center", va="center", color=ink, fontsize=FONT_POINTS - 2)


def _fits(piece: Piece) -> bool:
    return 2 * (piece.stop - piece.start) >= _LABELLED_BYTES * max(2, len(piece.label))


def _lane_colour(lane: int) -> tuple[float, ...]:
    import matplotlib

    colour: tuple[float, ...] = matplotlib.colormaps["viridis"](0.12 + 0.83 * lane / (WARP_SIZE - 1))  # its ends vanish on dark and light
    return colour


def _draw_key(axes: Axes, num_rows: int, style: Style) -> None:
    """Below the rows: what the colours, the hatching and the empty boxes are."""
    from matplotlib.patches import Rectangle

    top, height = num_rows + 0.55, 0.4
    text: dict[str, Any] = {"va": "center", "color": style.ink, "fontsize": FONT_POINTS - 1}
    axes.text(0, top + height / 2, "lane 0", **text)
    for lane in range(WARP_SIZE):
        axes.add_artist(Rectangle((10 + lane / 2, top), 0.5, height, color=_lane_colour(lane), linewidth=0.3))
    axes.text(27, top + height / 2, f"{WARP_SIZE - 1}", **text)
    axes.add_artist(Rectangle((38, top), 6, height, facecolor="none", edgecolor=style.faint, hatch="////", linewidth=0.6))
    axes.text(45.5, top + height / 2, "moves and is not used", **text)
    axes.add_artist(Rectangle((82, top), 6, height, facecolor="none", edgecolor=style.faint, alpha=0.4, linewidth=0.6))
    axes.text(89.5, top + height / 2, "does not move", **text)
    axes.text(LINE_BYTES, top + height / 2, f"a box: {SECTOR_BYTES} bytes", ha="right", **text)
