"""Nested results: leaves exchanged, containers kept."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import pytest
import torch

from wideload.structure import map_structure, same_structure


class Pair(NamedTuple):
    first: Any
    second: Any


class Fields(OrderedDict[str, Any]):
    """As the model outputs of transformers: a dict that is also its own class."""


def test_leaves_are_mapped_in_order_and_containers_keep_their_types() -> None:
    seen: list[int] = []
    tree = (1, [2, {"b": 3, "a": 4}], Pair(5, ()), Fields(x=6))
    got = map_structure(lambda leaf: seen.append(leaf) or -leaf, tree)
    assert got == (-1, [-2, {"b": -3, "a": -4}], Pair(-5, ()), Fields(x=-6))
    assert [type(part) for part in got] == [int, list, Pair, Fields]
    assert list(got[1][1]) == ["b", "a"]
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_leaf_alone_is_a_tree_and_empty_containers_have_none() -> None:
    assert map_structure(str, None) == "None"
    assert map_structure(lambda leaf: 1 / 0, ((), [], {})) == ((), [], {})
    assert map_structure(len, "text") == 4  # a string is no container


def test_several_trees_are_walked_together_by_key_and_by_place() -> None:
    got = map_structure(lambda a, b, c: a + b + c, {"x": 1, "y": [2]}, {"y": [20], "x": 10}, {"x": 100, "y": (200,)})
    assert got == {"x": 111, "y": [222]}
    with pytest.raises(ValueError, match="zip"):
        map_structure(max, (1, 2), (1,))


def test_torchs_own_named_results_are_kept() -> None:
    got = map_structure(lambda leaf: leaf + 1, torch.frexp(torch.tensor([4.0])))
    assert isinstance(got, torch.return_types.frexp)
    assert (got.mantissa.item(), got.exponent.item()) == (1.5, 4)
    assert isinstance(map_structure(lambda leaf: leaf, torch.Size([2, 3])), torch.Size)


def test_a_dict_with_a_factory_is_kept() -> None:
    got = map_structure(lambda leaf: -leaf, defaultdict(int, a=1))
    assert got == {"a": -1}
    assert got["b"] == 0


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, "x"),
        ((1, 2), [3, 4]),  # out= may be a list for a tuple
        (Pair(1, 2), (3, 4)),
        ({"a": 1, "b": (2,)}, {"b": [3], "a": 4}),
        ((), []),
        ([[1], {}], ((2,), {})),
    ],
)
def test_the_same_structure(a: Any, b: Any) -> None:
    assert same_structure(a, b)
    assert same_structure(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, (1,)), (1, {}), ((1, 2), (1,)), ((1,), {"a": 1}), ({"a": 1}, {"b": 1}), ({"a": 1}, {"a": 1, "b": 2}), ([[1]], [1]), ((1,), 1)],
)
def test_another_structure(a: Any, b: Any) -> None:
    assert not same_structure(a, b)
    assert not same_structure(b, a)
