"""What is drawn stands where arithmetic puts it, no text covers another, and files are whole."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from matplotlib.patches import StepPatch
from matplotlib.text import Text

from tests.results import NOMINAL_GBPS, bench_result, contender, explanation, roofline, sweep
from wideload.analyze.figure import Figure
from wideload.analyze.pattern import Pattern, operand_pattern, strided_pattern
from wideload.errors import WideloadError
from wideload.measure.labels import Label
from wideload.measure.statistics import summarize
from wideload.pictures import DARK, LIGHT, Mark, Style, assume_roof, draw_access, draw_roof, draw_samples, draw_sweep, mark_call, render
from wideload.pictures.access import Piece, find_pieces
from wideload.pictures.bandwidth import find_curves
from wideload.pictures.samples import sort_samples

NUM_ELEMENTS = 2**20


def texts(canvas: Any) -> list[str]:
    return [text.get_text() for text in canvas.findobj(Text) if text.get_text()]


# ---- the roofline


def test_marks_stand_where_arithmetic_puts_them() -> None:
    fp32, special = mark_call(explanation(measured_us=2.0))
    assert (fp32.intensity.value, special.intensity.value) == (6 / 6, 1.5 / 6)  # 3 multiply-adds, 1.5 exponentials, 6 bytes an element
    assert fp32.rate.value == pytest.approx(6 * NUM_ELEMENTS / 2e-6)
    assert special.rate.value == pytest.approx(1.5 * NUM_ELEMENTS / 2e-6)
    assert (fp32.intensity.kind, fp32.rate.kind) == ("computed", "measured")


def test_without_a_measured_time_the_mark_is_on_its_roof() -> None:
    found = explanation()
    (fp32, _) = mark_call(found)
    assert found.achievable_bandwidth is not None
    assert fp32.rate.value == pytest.approx(fp32.intensity.value * found.achievable_bandwidth.value * 1e9)
    assert fp32.rate.kind == "assumed"
    assert mark_call(dataclasses.replace(found, achievable_time=None)) == ()


def test_a_call_that_a_unit_holds_back_is_no_higher_than_that_unit() -> None:
    found = explanation()
    busy = dataclasses.replace(found.kernels[0].instructions["fp32"], value=100.0, unit="us", kind="assumed")
    held = dataclasses.replace(found, kernels=(dataclasses.replace(found.kernels[0], unit_times={"fp32": busy}),))
    assert mark_call(held)[0].rate.value == pytest.approx(6 * NUM_ELEMENTS / 100e-6)


def test_the_roofline_shows_ceilings_ridges_and_marks() -> None:
    marks = mark_call(explanation(measured_us=2.0))
    canvas = draw_roof(roofline(), [marks])
    (axes,) = canvas.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    nominal = axes.lines[0].get_xydata()
    assert nominal[-1] == pytest.approx([256, 256 * NOMINAL_GBPS * 1e9])  # up to the last ridge: 1024 TFLOP/s
    ridges = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() == "D"]
    assert ridges == [(16, 64e12), (256, 1024e12), (1, 4e12)]
    drawn = {line.get_marker(): tuple(line.get_xydata()[0]) for line in axes.lines if line.get_marker() in ("o", "^")}
    assert drawn == {"o": (1.0, 6 * NUM_ELEMENTS / 2e-6), "^": (0.25, 1.5 * NUM_ELEMENTS / 2e-6)}
    shown = texts(canvas)
    assert "computed: 4.00 TB/s (nominal)" in shown
    assert "measured: 3.50 TB/s (1R1W) to 3.80 TB/s (1R0W)" in shown
    assert "fp32: 64 TFLOP/s (computed)\nridge at 16 FLOP/B" in shown
    assert "swiglu, special functions: 0.25 op/B (measured)" in shown


def test_hollow_marks_were_not_measured() -> None:
    def faces(measured_us: float | None) -> set[Any]:
        (axes,) = draw_roof(roofline(), [mark_call(explanation(measured_us=measured_us))]).axes
        return {line.get_markerfacecolor() for line in axes.lines if line.get_marker() in ("o", "^")}

    assert faces(None) == {LIGHT.ground}
    assert faces(2.0) == {LIGHT.colour(1)}


def test_a_roof_follows_from_an_explanation() -> None:
    roof = assume_roof(explanation())
    assert (roof.device, roof.nominal.value) == ("H200 SXM", 4800)
    assert roof.ridges["fp32"].value == pytest.approx(132 * 1980e6 * 256 / 4.8e12)
    assert {figure.kind for figure in (roof.nominal, *roof.ceilings.values(), *roof.ridges.values())} == {"assumed"}
    with pytest.raises(WideloadError, match="Name a GPU"):
        assume_roof(dataclasses.replace(explanation(), gpu=None))


def test_each_call_has_a_colour_of_its_own_and_each_unit_a_marker() -> None:
    (axes,) = draw_roof(roofline(), [mark_call(explanation()), mark_call(explanation())]).axes  # of the same name
    drawn = [(line.get_marker(), line.get_markeredgecolor()) for line in axes.lines if line.get_marker() in ("o", "^")]
    assert drawn == [(marker, LIGHT.colour(call)) for call in (1, 2) for marker in ("o", "^")]


def many_calls(num_calls: int) -> list[list[Mark]]:
    """Two marks each, on a roof of 3.5 TB/s, from 0.15 operations a byte on and close to each other."""
    units = {"fp32": 1.0, "special functions": 0.5}

    def mark(number: int, unit: str, factor: float) -> Mark:
        intensity = factor * 0.3 * 1.1**number
        return Mark(
            f"operation_{number}", unit, Figure(intensity, "op/B", "computed", ""), Figure(3.5e12 * intensity, "op/s", "assumed", "")
        )

    return [[mark(number, unit, factor) for unit, factor in units.items()] for number in range(1, num_calls + 1)]


@pytest.mark.parametrize("num_calls", [1, 3, 11, 25])
def test_a_long_legend_takes_nothing_from_the_plot(num_calls: int) -> None:
    canvas = draw_roof(roofline(), many_calls(num_calls))
    canvas.draw_without_rendering()
    (axes,) = canvas.axes
    assert axes.get_window_extent().height / canvas.dpi > 3
    (legend,) = canvas.legends
    assert len(legend.get_texts()) == 2 + 2 * num_calls
    assert legend.get_window_extent().width <= canvas.bbox.width


def test_where_colours_repeat_the_marks_have_numbers() -> None:
    few, many = (draw_roof(roofline(), many_calls(num_calls)) for num_calls in (5, 6))
    assert len({LIGHT.colour(number) for number in range(6)}) == 6  # of the ceilings, and of five calls
    assert [text for text in texts(few) if text.isdecimal()] == []
    assert sorted(text for text in texts(many) if text.isdecimal()) == sorted("123456" * 2)
    assert "6 operation_6, fp32: 0.531 op/B (assumed)" in texts(many)  # 0.3 x 1.1^6


def test_legends_have_the_columns_that_fit() -> None:
    wide = [[dataclasses.replace(mark, name="W" * 30) for mark in call] for call in many_calls(2)]
    heights = [draw_roof(roofline(), calls).get_figheight() for calls in (many_calls(2), wide)]
    assert heights[1] - heights[0] == pytest.approx(3 * 1.7 * 8 / 72)  # 6 entries in one column, not in two


# ---- bandwidth


def test_curves_are_bytes_over_times() -> None:
    fused, eager = find_curves(sweep())
    assert (fused.name, eager.name, len(fused.points)) == ("fused", "eager", 8)
    first = fused.points[0]
    assert first.nbytes == 6 * NUM_ELEMENTS
    assert first.gbps == pytest.approx(6 * NUM_ELEMENTS / (1 + 6 * NUM_ELEMENTS / 3600e3) / 1e3)  # 6.3 MB in 2.75 us
    assert first.low_gbps < first.gbps < first.high_gbps


def test_the_sweep_shows_the_l2_and_the_wall() -> None:
    canvas = draw_sweep(sweep(), roofline())
    (axes,) = canvas.axes
    assert any(line.get_linestyle() == ":" and list(line.get_xdata()) == [60 * 2**20] * 2 for line in axes.lines)
    assert any(list(line.get_ydata()) == [NOMINAL_GBPS / 1e3] * 2 for line in axes.lines)
    shown = texts(canvas)
    assert " L2: 60 MiB" in shown
    assert "the wall, measured: 3.50 to 3.80 TB/s by mix" in shown
    assert "nominal 4.00 TB/s (computed)" in shown
    assert "the wall" not in " ".join(texts(draw_sweep(sweep())))


def test_unranked_points_are_hollow() -> None:
    result = bench_result(contender("warm", [1.0] * 3, labels=(Label("SERVED_BY_L2", "too fast"),)))
    points = dataclasses.replace(sweep().points[0], result=result)
    (axes,) = draw_sweep(dataclasses.replace(sweep(), points=(points,))).axes
    assert [line.get_markerfacecolor() for line in axes.lines if line.get_marker() == "o"] == [LIGHT.ground]


def test_a_sweep_without_bytes_has_no_bandwidth() -> None:
    point = dataclasses.replace(sweep().points[0], result=bench_result(contender("f", [1.0]), nbytes=None))
    with pytest.raises(WideloadError, match="--bytes"):
        draw_sweep(dataclasses.replace(sweep(), points=(point,)))


# ---- samples


def test_samples_far_above_are_counted_apart() -> None:
    histogram = sort_samples(summarize([1.0] * 50 + [2.0] * 49 + [100.0]))
    assert (histogram.counts[0], histogram.counts[-1], sum(histogram.counts), histogram.num_beyond) == (50, 49, 99, 1)
    assert (histogram.edges[0], histogram.edges[-1]) == (1.0, 2.0)
    assert len(sort_samples(summarize([float(i**3) for i in range(5000)])).counts) <= 60
    assert sum(sort_samples(summarize([3.0] * 7)).counts) == 7


def test_each_contender_has_its_histogram() -> None:
    result = bench_result(contender("fused", [1.0, 2.0, 3.0]), contender("eager", [5.0, 6.0, 7.0]))
    canvas = draw_samples(result)
    assert [axes.get_title(loc="left") for axes in canvas.axes] == ["fused", "eager"]
    assert [axes.get_title(loc="right") for axes in canvas.axes] == ["median 2 us of 3 samples", "median 6 us of 3 samples"]
    with pytest.raises(WideloadError, match="nothing was timed"):
        draw_samples(bench_result(dataclasses.replace(result.subject, time_us=None)))


@pytest.mark.parametrize(
    ("longest_us", "scale", "unit", "median"),
    [(568_000.0, "log", "ms", "568 ms"), (60_000.0, "linear", "ms", "60 ms")],
)
def test_contenders_share_an_axis_of_time(longest_us: float, scale: str, unit: str, median: str) -> None:
    result = bench_result(contender("fused", [53_000.0] * 9), contender("eager", [longest_us] * 9))
    canvas = draw_samples(result)
    canvas.draw_without_rendering()
    first, last = canvas.axes
    assert first.get_xlim() == last.get_xlim()
    assert (last.get_xscale(), last.get_xlabel()) == (scale, f"time of a call, {unit} (measured)")
    assert (first.lines[0].get_xdata()[0], last.lines[0].get_xdata()[0]) == (53, longest_us / 1000)
    assert last.get_title(loc="right") == f"median {median} of 9 samples"
    assert last.xaxis.get_offset_text().get_text() == ""
    labels = [label.get_text() for label in last.get_xticklabels()]
    assert [float(label) for label in labels] == pytest.approx(list(last.get_xticks()))  # plain numbers, such as 100
    for axes in canvas.axes:
        (bar,) = (patch for patch in axes.patches if isinstance(patch, StepPatch))
        corners = axes.transData.transform(bar.get_path().vertices)
        assert corners[:, 0].max() - corners[:, 0].min() > 2, "the bar is hidden behind the line of the median"


def test_bars_are_as_wide_as_asked_for() -> None:
    few = sort_samples(summarize([float(i % 100) for i in range(1000)]), narrowest_us=30.0)
    assert few.edges == (0, 33, 66, 99)
    assert few.counts == (330, 330, 340)
    one = sort_samples(summarize([5.0] * 4), narrowest_us=2.0)
    assert (one.edges, one.counts) == ((4, 6), (4,))


# ---- access patterns


def test_every_second_float_covers_half_of_two_lines() -> None:
    pieces = list(find_pieces(strided_pattern(4, stride=2)))
    assert pieces[1] == Piece(line=0, start=8, stop=12, lanes=(1,))
    assert pieces[16] == Piece(line=1, start=0, stop=4, lanes=(16,))
    assert len(pieces) == 32


def test_an_item_in_two_lines_is_two_pieces_and_a_broadcast_one() -> None:
    assert list(find_pieces(Pattern(16, ((120,),)))) == [Piece(0, 120, 128, (0,)), Piece(1, 0, 8, (0,))]
    (shared,) = find_pieces(strided_pattern(4, stride=0))
    assert (shared.lanes, shared.label) == (tuple(range(32)), "0-31")


@pytest.mark.parametrize(("stride", "num_lines", "num_sectors"), [(1, 1, 4), (2, 2, 8), (8, 8, 32), (4096, 12, 12)])
def test_as_many_sectors_are_drawn_as_move(stride: int, num_lines: int, num_sectors: int) -> None:
    canvas = draw_access(strided_pattern(4, stride))
    (axes,) = canvas.axes
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == num_sectors + 1  # and one in the key
    assert [text for text in texts(canvas) if text.startswith("+")] == [
        f"{128 * line * (stride // 32 or 1):+d}" for line in range(num_lines)
    ]
    assert ("and 20 more lines" in texts(canvas)) == (stride == 4096)


def test_the_drawing_says_what_is_used() -> None:
    found = explanation()
    gate = operand_pattern(found, found.operands[0])
    assert gate is not None
    canvas = draw_access(gate, "gate")
    assert canvas.axes[0].get_title(loc="left") == "gate: 32 lanes touch 16 sectors in 4 lines: 512 of 512 bytes are used (100%)"
    assert "lanes 0-31" in texts(draw_access(strided_pattern(4, 0)))


# ---- all of them


def long_names() -> Any:
    names = ("a/rather/long/path/to/a/file.py:function_of_mine", "<lambda>", "eager")
    return bench_result(*(contender(name, [float(i % 17 + 3) for i in range(200)]) for name in names))


PICTURES: dict[str, Callable[[Style], Any]] = {
    "roofline": lambda style: draw_roof(roofline(), [mark_call(explanation(measured_us=2.0))] * 3, style=style),
    "long names on a roofline": lambda style: draw_roof(
        assume_roof(explanation()),
        [[dataclasses.replace(mark, name="a/rather/long/path/to/file.py:function") for mark in mark_call(explanation())]],
        style=style,
    ),
    "many calls": lambda style: draw_roof(roofline(), many_calls(25), style=style),
    "sweep": lambda style: draw_sweep(sweep(), roofline(), style=style),
    "samples": lambda style: draw_samples(long_names(), style=style),
    "far apart": lambda style: draw_samples(
        bench_result(*(contender(f"f{us}", [us, us, 1.1 * us]) for us in (3.0, 900.0, 1e6))), style=style
    ),
    "stride 2": lambda style: draw_access(strided_pattern(4, 2), "x", style=style),
    "stride 4096": lambda style: draw_access(strided_pattern(2, 4096, 17), "x", style=style),
    "vectors": lambda style: draw_access(strided_pattern(16, 1), "gate, up, out", style=style),
    "broadcast": lambda style: draw_access(strided_pattern(2, 0), style=style),
    "reversed": lambda style: draw_access(strided_pattern(4, -1), style=style),
}


def assert_texts_are_legible(canvas: Any) -> None:
    """No text covers another, and all of them lie inside the picture."""
    drawn: list[Text] = []
    draw = Text.draw
    with mock.patch.object(Text, "draw", lambda text, renderer: (drawn.append(text), draw(text, renderer))):
        canvas.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn if text.get_text().strip() and text.get_visible()]
    whole = canvas.bbox
    for text, box in boxes:
        if box.x0 < whole.x0 or box.x1 > whole.x1 or box.y0 < whole.y0 or box.y1 > whole.y1:
            raise AssertionError(f"{text!r} leaves the picture")
    for (one, box), (other, other_box) in itertools.combinations(boxes, 2):
        if box.overlaps(other_box):
            raise AssertionError(f"{one!r} covers {other!r}")


@pytest.mark.parametrize("name", PICTURES)
def test_texts_are_legible(name: str) -> None:
    assert_texts_are_legible(PICTURES[name](LIGHT))


def test_texts_that_are_not_legible_are_found() -> None:
    canvas = draw_access(strided_pattern(4, 2))
    canvas.axes[0].text(0, 0.5, "+0 again")
    with pytest.raises(AssertionError, match="covers"):
        assert_texts_are_legible(canvas)
    canvas = draw_access(strided_pattern(4, 2))
    canvas.text(0.95, 0.5, "far to the right")
    with pytest.raises(AssertionError, match="leaves the picture"):
        assert_texts_are_legible(canvas)


def test_files_are_whole_and_always_the_same() -> None:
    svg, again = (render(PICTURES["stride 2"](style), "svg") for style in (LIGHT, LIGHT))
    assert svg == again
    assert svg.rstrip().endswith(b"</svg>")
    assert DARK.ground.encode() in render(PICTURES["stride 2"](DARK), "svg")
    assert render(PICTURES["stride 2"](LIGHT), "png").startswith(b"\x89PNG\r\n\x1a\n")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(WideloadError, match=r"pip install 'wideload\[plots\]'"):
        draw_access(strided_pattern(4, 2))
