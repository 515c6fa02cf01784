import doctest
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wideload import overlap
from wideload.overlap import Extent, overlaps_itself, relation

BASE_BYTES = 1 << 20


def elements(extent):
    """The address of each element."""
    indices = product(*map(range, extent.shape))
    return [extent.address_bytes + extent.itemsize * sum(i * s for i, s in zip(index, extent.strides, strict=True)) for index in indices]


def cells(extent):
    """Every byte of every element."""
    return {first + byte for first in elements(extent) for byte in range(extent.itemsize)}


def extent_of(x):
    return Extent(x.data_ptr(), x.element_size(), tuple(x.shape), x.stride())


@st.composite
def extents(draw, max_size=5):
    rank = draw(st.integers(0, 3))
    shape = draw(st.lists(st.sampled_from((0, *range(1, max_size + 1), *range(1, max_size + 1))), min_size=rank, max_size=rank))
    strides = draw(st.lists(st.one_of(st.integers(0, 5), st.integers(0, 40)), min_size=rank, max_size=rank))
    return Extent(BASE_BYTES + draw(st.integers(0, 100)), draw(st.sampled_from((1, 2, 3, 4, 8, 16))), tuple(shape), tuple(strides))


def test_docstrings():
    result = doctest.testmod(overlap)
    assert result.failed == 0
    assert result.attempted >= 2


@given(extents())
@settings(max_examples=500, deadline=None)
def test_overlap_with_itself_is_two_elements_in_one_cell(extent):
    assert overlaps_itself(extent) == (len(set(elements(extent))) < len(elements(extent)))


@given(extents(), extents())
@settings(max_examples=500, deadline=None)
def test_relation_is_that_of_the_bytes(a, b):
    found = relation(a, b)
    assert (found == "none") == cells(a).isdisjoint(cells(b))
    assert found == relation(b, a)
    assert found != "exact" or elements(a) == elements(b)


@given(extents(max_size=3), st.data())
@settings(max_examples=300, deadline=None)
def test_equal_extents_are_exact_whatever_the_strides_of_size_1(extent, data):
    others = tuple(
        data.draw(st.integers(0, 40)) if size == 1 else stride for size, stride in zip(extent.shape, extent.strides, strict=True)
    )
    same = Extent(extent.address_bytes, extent.itemsize, extent.shape, others)
    assert relation(extent, same) == ("none" if 0 in extent.shape else "exact")


# What users write. n is large enough that a search over elements would not end.
N = 1 << 20
FLAT = Extent(BASE_BYTES, 4, (N,), (1,))
MATRIX = Extent(BASE_BYTES, 2, (N, 128), (256, 1))


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        (FLAT, FLAT, "exact"),
        (FLAT, Extent(BASE_BYTES + 4 * N, 4, (N,), (1,)), "none"),
        (FLAT, Extent(BASE_BYTES + 4 * N - 1, 1, (N,), (1,)), "partial"),
        (FLAT, Extent(BASE_BYTES + 4, 4, (N,), (1,)), "partial"),
        (FLAT, Extent(BASE_BYTES, 4, (N // 2, 2), (2, 1)), "partial"),
        (FLAT, Extent(BASE_BYTES, 4, (1, N), (N, 1)), "partial"),
        (FLAT, Extent(BASE_BYTES, 2, (N,), (1,)), "partial"),
        (FLAT, Extent(BASE_BYTES, 2, (N,), (2,)), "partial"),
        (MATRIX, Extent(BASE_BYTES + 2 * 128, 2, (N, 128), (256, 1)), "none"),
        (MATRIX, Extent(BASE_BYTES + 2 * 127, 2, (N, 128), (256, 1)), "partial"),
        (MATRIX, Extent(BASE_BYTES + 2 * 128, 2, (128, N), (1, 256)), "none"),
        (MATRIX, Extent(BASE_BYTES + 2 * 128, 1, (N, 256), (512, 1)), "none"),
        (MATRIX, Extent(BASE_BYTES + 2 * 128, 4, (N, 65), (128, 1)), "partial"),
        (Extent(BASE_BYTES, 2, (N, 64), (128, 2)), Extent(BASE_BYTES + 2, 2, (N, 64), (128, 2)), "none"),
        (Extent(BASE_BYTES, 2, (N, 64), (128, 2)), Extent(BASE_BYTES + 1, 2, (N, 64), (128, 2)), "partial"),
        (Extent(BASE_BYTES, 4, (N, 3), (8, 2)), Extent(BASE_BYTES + 4 * 6, 4, (N,), (8,)), "none"),
        (Extent(BASE_BYTES, 4, (N, 4), (8, 2)), Extent(BASE_BYTES + 4 * 6, 4, (N,), (8,)), "partial"),
        (Extent(BASE_BYTES, 4, (N,), (2,)), Extent(BASE_BYTES + 4, 4, (N,), (2,)), "none"),
        (Extent(BASE_BYTES, 4, (N,), (2,)), Extent(BASE_BYTES + 4, 4, (N,), (3,)), "partial"),
        (Extent(BASE_BYTES, 4, (N,), (6,)), Extent(BASE_BYTES + 4, 4, (N,), (4,)), "none"),
        (Extent(BASE_BYTES, 4, (8, N), (4 * N, 1)), Extent(BASE_BYTES + 4 * N, 4, (7, 2, N), (4 * N, 3 * N, 1)), "partial"),
        (Extent(BASE_BYTES, 4, (8, N), (4 * N, 1)), Extent(BASE_BYTES + 4 * N, 4, (7, 3, N), (4 * N, N, 1)), "none"),
        (Extent(BASE_BYTES, 4, (999,), (1001,)), Extent(BASE_BYTES + 4000, 4, (999,), (1000,)), "none"),
        (Extent(BASE_BYTES, 4, (0, N), (1, 1)), FLAT, "none"),
    ],
    ids=[
        "in place",
        "neighbours",
        "last byte",
        "shifted by one",
        "other shape",
        "another dim",
        "other itemsize",
        "halves of words",
        "packed halves",
        "halves that share a column",
        "packed halves, one transposed",
        "packed halves, one as bytes",
        "packed halves, one as wider words and too long",
        "even and odd columns",
        "even and odd columns, shifted by a byte",
        "the column after the last even one",
        "the last even column",
        "real and imaginary parts",
        "steps of two and three meet",
        "steps of six and four never meet",
        "rows of a batch that meet",
        "rows of a batch that interleave",
        "diagonal and the column before it",
        "no elements",
    ],
)
def test_relations_of_views(a, b, want):
    assert relation(a, b) == relation(b, a) == want


@pytest.mark.parametrize(
    ("shape", "strides", "want"),
    [
        ((N, N), (N, 1), False),
        ((N, N), (N - 1, 1), True),
        ((N, N), (0, 1), True),
        ((1, N), (0, 1), False),
        ((0, N), (0, 0), False),
        ((), (), False),
        ((N, 2), (2, 3), False),
        ((N, 3), (2, 3), True),
        ((2, N), (2, 4), False),
        ((3, N), (2, 5), False),
        ((N, 3, N), (3 * N, 2, 6), True),
        ((N // 2, 3, N), (6 * N, 2, 6), False),
        ((1000, 1001), (1001, 1000), False),
        ((1001, 1001), (1001, 1000), False),
        ((1001, 1002), (1001, 1000), True),
    ],
)
def test_self_overlap_of_layouts(shape, strides, want):
    assert overlaps_itself(Extent(BASE_BYTES, 4, shape, strides)) is want


def test_the_safe_answer_past_the_search_limit(monkeypatch):
    diagonal, column = Extent(BASE_BYTES, 4, (999,), (1001,)), Extent(BASE_BYTES + 4000, 4, (999,), (1000,))
    skewed = Extent(BASE_BYTES, 4, (30, 30, 30), (1000, 1009, 31000))
    assert (relation(diagonal, column), overlaps_itself(skewed)) == ("none", False)
    monkeypatch.setattr(overlap, "MAX_SEARCH_STEPS", 10)
    assert (relation(diagonal, column), overlaps_itself(skewed)) == ("partial", True)


@given(st.permutations((2, 3)), st.integers(0, 7), st.integers(0, 7), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_dense_views_are_refused_where_torch_refuses_them(shape, start_a, start_b, turned_a, turned_b):
    storage, (rows, columns) = torch.zeros(16), shape
    a = storage[start_a : start_a + 6].as_strided(shape, (1, rows) if turned_a else (columns, 1))
    b = storage[start_b : start_b + 6].as_strided(shape, (1, rows) if turned_b else (columns, 1))
    try:
        torch.neg(b, out=a)
    except RuntimeError:
        assert relation(extent_of(a), extent_of(b)) == "partial"
    else:
        assert relation(extent_of(a), extent_of(b)) in ("none", "exact")


def test_expanded_outputs_are_refused_as_in_torch():
    for out in (torch.zeros(1).expand(7), torch.zeros(1, 3).expand(2, 3), torch.zeros(4, 1).expand(4, 3)):
        with pytest.raises(RuntimeError, match="single memory location"):
            torch.neg(torch.zeros(out.shape), out=out)
        assert overlaps_itself(extent_of(out))
    assert not overlaps_itself(extent_of(torch.zeros(1, 1).expand(1, 1)))
