"""Bytes and sectors under strided views: by hand, and against every address listed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wideload.analyze import bytes as counted
from wideload.analyze.bytes import Cover, Span, count_bytes, count_sectors, span_of

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]


def listed(views: list[View], unit: int) -> int:
    """The distinct units under the views, address by address."""
    touched = set()
    for address, itemsize, shape, strides in views:
        for index in itertools.product(*map(range, shape)):
            start = address + itemsize * sum(i * stride for i, stride in zip(index, strides, strict=True))
            touched |= {byte // unit for byte in range(start, start + itemsize)}
    return len(touched) * unit


def spans(views: list[View]) -> list[Span]:
    return [span for view in views if (span := span_of(*view)) is not None]


N = 2**31
BY_HAND: dict[str, tuple[list[View], int, int]] = {
    # views of f32 from a sector's start unless said otherwise; bytes, bytes of sectors
    "contiguous": ([(0, 4, (N,), (1,))], 4 * N, 4 * N),
    "one element": ([(4, 4, (), ())], 4, 32),
    "4 bytes behind a sector": ([(4, 4, (N,), (1,))], 4 * N, 4 * N + 32),
    "[::2]": ([(0, 4, (N,), (2,))], 4 * N, 8 * N),
    "[::2] from 1 on": ([(4, 4, (N,), (2,))], 4 * N, 8 * N),
    "[::8]": ([(0, 4, (N,), (8,))], 4 * N, 32 * N),
    "[::1000]": ([(0, 4, (N,), (1000,))], 4 * N, 32 * N),
    "expanded": ([(0, 4, (N, 8), (0, 1))], 32, 32),
    "a column, expanded": ([(0, 4, (8, N), (1, 0))], 32, 32),
    "transposed": ([(0, 4, (1 << 16, 1 << 15), (1, 1 << 16))], 4 * N, 4 * N),
    # 16 of 24 bytes, 3 rows in 72 bytes: 2 rows share a sector in a third of all cases ... per 96 bytes (4 rows) all 3 sectors
    "rows of 16 in 24 bytes": ([(0, 4, (4096, 4), (6, 1))], 16 * 4096, 24 * 4096),
    "rows of 16 in 64 bytes": ([(0, 4, (4096, 4), (16, 1))], 16 * 4096, 32 * 4096),
    "windows of 5, 2 apart": ([(0, 4, (1000, 5), (2, 1))], 4 * (2 * 999 + 5), 8032),
    "windows of 3, 5 apart": ([(0, 4, (1000, 3), (5, 1))], 12000, 20000),
    "the same twice": ([(0, 4, (N,), (1,)), (0, 4, (N,), (1,))], 4 * N, 4 * N),
    "x[:-1] and x[1:]": ([(0, 4, (N,), (1,)), (4, 4, (N,), (1,))], 4 * N + 4, 4 * N + 32),
    "x and x.t()": ([(0, 4, (512, 512), (512, 1)), (0, 4, (512, 512), (1, 512))], 2**20, 2**20),
    "halves by chunk": ([(0, 2, (N, 64), (128, 1)), (128, 2, (N, 64), (128, 1))], 256 * N, 256 * N),
    "thirds": ([(0, 2, (N, 8), (24, 1)), (16, 2, (N, 8), (24, 1)), (32, 2, (N, 8), (24, 1))], 48 * N, 48 * N),
    "two of three": ([(0, 2, (N, 8), (24, 1)), (32, 2, (N, 8), (24, 1))], 32 * N, 48 * N),
    "x[::2] and x[1::2]": ([(0, 4, (N,), (2,)), (4, 4, (N,), (2,))], 8 * N, 8 * N),
    "x[::2] and x[::3]": ([(0, 4, (3000,), (2,)), (0, 4, (2000,), (3,))], 4 * (3000 + 2000 - 1000), 24000),
    "x and a slice of x": ([(0, 4, (4096, 6), (8, 1)), (32, 4, (4095, 6), (8, 1))], 24 * 4096, 32 * 4096),
    "x and rows of x": ([(0, 4, (4096, 8), (8, 1)), (640, 4, (100, 8), (8, 1))], 2**17, 2**17),
    "a storage read as f32 and as u8": ([(0, 4, (100,), (1,)), (396, 1, (8,), (1,))], 404, 416),
    "a thousand chunks": ([(8 * k, 4, (N, 2), (2000, 1)) for k in range(1000)], 8000 * N, 8000 * N),
    "apart": ([(0, 4, (8,), (1,)), (1 << 40, 4, (8,), (1,))], 64, 64),
    "no elements": ([(0, 4, (0, 5), (5, 1))], 0, 0),
    "nothing": ([], 0, 0),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_by_hand(case: str) -> None:
    views, nbytes, sector_bytes = BY_HAND[case]
    assert count_bytes(spans(views)) == Cover(nbytes)
    assert count_sectors(spans(views)) == Cover(sector_bytes)


def test_three_irregular_dims_of_many_elements() -> None:
    # x[:, 1:-1, 1:-1] of 2**18 images of 33 x 35 in 2 bytes. Rows of 66 bytes, 70 apart: consecutive rows lie 4 bytes apart and
    # share a sector unless a boundary lies in or at the gap; the images repeat every 16 (2310 = 2 * 1155), and are counted once by one.
    view: View = (72, 2, (16, 31, 33), (33 * 35, 35, 1))
    period = 16 * 33 * 35 * 2
    whole: View = (72, 2, (2**18, 31, 33), (33 * 35, 35, 1))
    assert period % 32 == 0
    assert count_bytes(spans([whole])) == Cover(2**18 * 31 * 33 * 2)
    assert count_sectors(spans([whole])) == Cover(2**14 * listed([view], 32))  # images are 142 bytes apart: more than a sector


def test_runs_that_cross_the_end_of_a_period() -> None:
    # Runs of 24 bytes, 40 apart, and of 12 bytes, 56 apart: 280 bytes later both begin anew.
    found: list[View] = [(20, 4, (50, 6), (10, 1)), (8, 4, (36, 3), (14, 1))]
    assert count_bytes(spans(found)) == Cover(listed(found, 1))
    assert count_sectors(spans(found)) == Cover(listed(found, 32))


@st.composite
def views(draw: st.DrawFn) -> View:
    rank = draw(st.integers(0, 3))
    shape = tuple(draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 0))) for _ in range(rank))
    strides = tuple(draw(st.integers(0, 40)) for _ in range(rank))
    itemsize = draw(st.sampled_from((1, 2, 4, 8)))
    return itemsize * draw(st.integers(0, 60)), itemsize, shape, strides


@settings(max_examples=1000)
@given(st.lists(views(), max_size=3), st.sampled_from((1, 32)))
def test_as_many_as_are_listed(found: list[View], unit: int) -> None:
    count = count_bytes if unit == 1 else count_sectors
    assert count(spans(found)) == Cover(listed(found, unit))


def test_what_is_too_much_is_bounded_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    tangled: list[View] = [(0, 4, (9, 8, 7), (3, 5, 7)), (4, 4, (9, 8), (5, 7))]
    monkeypatch.setattr(counted, "MAX_PIECES", 1)
    for count, unit in ((count_bytes, 1), (count_sectors, 32)):
        cover = count(spans(tangled))
        assert not cover.is_exact
        assert cover.nbytes >= listed(tangled, unit)
