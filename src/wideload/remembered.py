"""Turns a dict into one that holds so many entries: the oldest goes first. Knows no key and no value."""

from __future__ import annotations

from typing import Any, TypeVar

__all__ = ["MAX_REMEMBERED", "remember"]

MAX_REMEMBERED = 4096
"""Traces, layouts, and calls, that one function keeps. An entry takes some 10 kB."""

_T = TypeVar("_T")


def remember(cache: dict[Any, _T], key: Any, value: _T, most: int | None = None) -> _T:
    """Keep ``value``, in the place of the oldest of ``most`` (`MAX_REMEMBERED`); return it."""
    if len(cache) >= (MAX_REMEMBERED if most is None else most):
        cache.pop(next(iter(cache)), None)
    cache[key] = value
    return value
