"""Stored values become the dataclasses that wrote them, or an error that says where they do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from wideload.decode import check_schema, decode, parse_json
from wideload.errors import WideloadError


@dataclass(frozen=True)
class Inner:
    kind: Literal["a", "b"] | Literal["c"]
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Outer:
    name: str | None
    pair: tuple[int, str]
    inner: Mapping[str, Inner]
    is_on: bool
    first: Inner | None = None


WHOLE = Outer(None, (1, "x"), {"k": Inner("c", (1.5, 2))}, True, Inner("a"))


def test_what_was_written_is_read() -> None:
    assert decode(Outer, json.loads(json.dumps(asdict(WHOLE)))) == WHOLE
    assert decode(Outer, {"name": "n", "pair": [1, "x"], "inner": {}, "is_on": False, "newer": 7}) == Outer("n", (1, "x"), {}, False)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"name": 7}, "file.name is 7, and should be str"),
        ({"pair": [1]}, "file.pair is [1], and should be tuple[int, str]"),
        ({"pair": [True, "x"]}, "file.pair[0] is True, and should be int"),  # a bool is no number
        ({"is_on": 1}, "file.is_on is 1, and should be bool"),
        ({"inner": {"k": {"kind": "d"}}}, "file.inner.k.kind is 'd', and should be 'c'"),
        ({"inner": {"k": {"kind": "a", "values": [1.0, "2"]}}}, "file.inner.k.values[1] is '2', and should be float"),
        ({"inner": {"k": {"values": []}}}, "file.inner.k has no 'kind'"),
        ({"inner": [1] * 100}, "file.inner is [1, 1, 1"),
        ({"first": []}, "file.first is [], and should be an object"),
    ],
)
def test_damage_is_named_by_its_place(damage: dict[str, Any], said: str) -> None:
    with pytest.raises(WideloadError) as caught:
        decode(Outer, {**json.loads(json.dumps(asdict(WHOLE))), **damage}, "file")
    assert said in str(caught.value)
    assert len(str(caught.value)) < 150


def test_another_schema_is_refused() -> None:
    check_schema({"schema": "x/1"}, "x/1")
    with pytest.raises(WideloadError, match="schema None, this version reads 'x/1'"):
        check_schema({}, "x/1")


@pytest.mark.parametrize("text", ["", "[" * 100_000, '{"a":' * 100_000, b"\xff", "9" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match=r"recursion|decode|Expecting|digits"):
        parse_json(text)


def test_json_is_read() -> None:
    assert parse_json('{"a": [1, null]}') == parse_json(b'{"a": [1, null]}') == {"a": [1, None]}
