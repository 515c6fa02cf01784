"""Turns the plain values of a JSON file back into the frozen dataclasses that wrote them.

Goes by the annotations alone; it must not know any of the dataclasses.
"""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from wideload.errors import WideloadError

__all__ = ["check_schema", "decode", "parse_json"]

_T = TypeVar("_T")

_LONGEST_SHOWN = 40


def parse_json(text: str | bytes) -> Any:
    """Return what ``json.loads`` does. Raises ``ValueError`` for all that it cannot read, nested too deep for Python as well."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def check_schema(values: Mapping[str, Any], schema: str) -> None:
    """Raise ``WideloadError`` unless ``values`` were written under ``schema``."""
    if values.get("schema") != schema:
        raise WideloadError(f"got a result of schema {values.get('schema')!r}, this version reads {schema!r}. Measure again.")


def decode(kind: type[_T], values: Any, at: str = "it") -> _T:
    """Return the ``kind`` that ``dataclasses.asdict`` and ``json`` made ``values`` of.

    Knows dataclasses, ``tuple``, ``Mapping``, ``dict``, ``Literal``, unions and plain types. Keys that are not fields are left out, and
    fields that have defaults may be missing. Raises ``WideloadError`` for anything else, with its place below ``at``.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Size:
    ...     name: str
    ...     shape: tuple[int, ...] = ()
    >>> decode(Size, {"name": "x", "shape": [2, 3]})
    Size(name='x', shape=(2, 3))
    >>> decode(Size, {"name": "x", "shape": [2, "3"]})
    Traceback (most recent call last):
    wideload.errors.WideloadError: it.shape[1] is '3', and should be int
    """
    found: _T = _decode(kind, values, at)
    return found


def _decode(kind: Any, value: Any, at: str) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _decode_fields(kind, value, at)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, at)
    if origin is Literal and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[-1] is ... else inner
        if len(kinds) == len(value):
            return tuple(_decode(each, item, f"{at}[{index}]") for index, (each, item) in enumerate(zip(kinds, value, strict=True)))
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {_decode(inner[0], key, at): _decode(inner[1], item, f"{at}.{key}") for key, item in value.items()}
    if kind is Any or (isinstance(kind, type) and not origin and _is_plain(kind, value)):
        return value
    shown = repr(value)
    shown = shown if len(shown) <= _LONGEST_SHOWN else f"{shown[:_LONGEST_SHOWN]}..."
    raise WideloadError(f"{at} is {shown}, and should be {_name(kind)}")


def _is_plain(kind: type, value: Any) -> bool:
    if isinstance(value, bool):  # which Python takes for an int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _decode_fields(kind: Any, values: dict[str, Any], at: str) -> Any:
    hints = get_type_hints(kind)
    missing = [
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise WideloadError(f"{at} has no {missing[0]!r}")
    given = [field.name for field in dataclasses.fields(kind) if field.name in values]
    return kind(**{name: _decode(hints[name], values[name], f"{at}.{name}") for name in given})


def _decode_union(kind: Any, value: Any, at: str) -> Any:
    """As the first member that fits; where none does, what the last one that is not ``None`` lacks."""
    members = [member for member in get_args(kind) if member is not type(None)]
    if value is None and len(members) < len(get_args(kind)):
        return None
    for member in members[:-1]:
        try:
            return _decode(member, value, at)
        except WideloadError:
            continue
    return _decode(members[-1], value, at)


def _name(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    return "an object" if dataclasses.is_dataclass(kind) else getattr(kind, "__name__", str(kind)) if not get_args(kind) else str(kind)
