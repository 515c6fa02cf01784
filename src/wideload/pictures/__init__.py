"""Turns results, rooflines, explanations and access patterns into matplotlib figures, and these into PNG and SVG.

Every function is pure: frozen data in, a figure out, in no window and with no global state; none may measure anything.
"""

from wideload.pictures.access import describe_access, draw_access
from wideload.pictures.bandwidth import draw_sweep
from wideload.pictures.canvas import DARK, LIGHT, Style, render
from wideload.pictures.roof import Mark, assume_roof, draw_roof, mark_call
from wideload.pictures.samples import draw_samples

__all__ = [
    "DARK",
    "LIGHT",
    "Mark",
    "Style",
    "assume_roof",
    "describe_access",
    "draw_access",
    "draw_roof",
    "draw_samples",
    "draw_sweep",
    "mark_call",
    "render",
]
