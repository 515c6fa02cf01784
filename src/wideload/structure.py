"""Takes the leaves out of nested tuples, lists, dicts and namedtuples, and puts others in their place.

Knows containers only; what a leaf is, its callers decide.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

__all__ = ["are_same", "map_structure", "same_structure"]


def are_same(one: Collection[Any], other: Collection[Any]) -> bool:
    """Whether both hold the very same objects in the same places; none is hashed or compared, as tensors cannot be at little cost.

    >>> x = []
    >>> are_same([x, 1], (x, 1)), are_same([x], [[]]), are_same([x], [x, x])
    (True, False, False)
    """
    return len(one) == len(other) and all(map(operator.is_, one, other))


def map_structure(fn: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """``fn`` of every leaf of ``tree`` (and of the leaves in the same places of ``others``), in containers of the same types.

    >>> map_structure(lambda x: x + 1, (1, [2, {"a": 3}]))
    (2, [3, {'a': 4}])
    """
    if isinstance(tree, dict):
        mapped = tree.copy()  # the same kind of dict, whatever its constructor takes
        mapped.update((key, map_structure(fn, value, *(other[key] for other in others))) for key, value in tree.items())
        return mapped
    if isinstance(tree, (tuple, list)):
        values = [map_structure(fn, *items) for items in zip(tree, *others, strict=True)]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return fn(tree, *others)


def same_structure(tree: Any, other: Any) -> bool:
    """Whether both have containers of the same kind, length and keys in the same places (a list may stand for a tuple)."""
    if isinstance(tree, dict):
        return isinstance(other, dict) and tree.keys() == other.keys() and all(same_structure(tree[key], other[key]) for key in tree)
    if isinstance(tree, (tuple, list)):
        return isinstance(other, (tuple, list)) and len(tree) == len(other) and all(map(same_structure, tree, other))
    return not isinstance(other, (tuple, list, dict))
