"""Which observation earns which label, and which labels cost a contender its time or its rank."""

from __future__ import annotations

from typing import Any

import pytest

from wideload.measure.labels import Evidence, find_labels, is_ranked, voids_time


def codes(**evidence: Any) -> list[str]:
    return [label.code for label in find_labels(Evidence(**evidence))]


TB = 1e12

CASES: list[tuple[dict[str, Any], list[str], bool, bool]] = [
    # evidence, labels, has a time, is ranked
    ({}, [], True, True),
    ({"failure": "ValueError: no"}, ["FAILED"], False, False),
    ({"difference": "3 of 4"}, ["WRONG"], False, False),
    ({"difference": "3 of 4", "is_reference_binding": False}, ["DIFFERS"], True, True),
    ({"stale": "3 of 4"}, ["CACHED"], False, False),
    ({"has_effect": False, "is_capture_empty": True}, ["NO_WORK"], True, False),
    ({"is_capture_empty": True}, ["OFF_STREAM"], True, False),
    ({"is_off_stream": True}, ["OFF_STREAM"], True, False),
    ({"bytes_per_second": 4.9 * TB, "nominal_bytes_per_second": 4.8 * TB}, ["SERVED_BY_L2"], True, False),
    ({"bytes_per_second": 4.7 * TB, "nominal_bytes_per_second": 4.8 * TB}, [], True, True),
    ({"bytes_per_second": 9 * TB, "nominal_bytes_per_second": 4.8 * TB, "mode": "hot"}, ["HOT"], True, True),
    ({"mode": "graph", "median_us": 5.0, "cold_call_us": 25.0}, ["SERVED_BY_L2"], True, False),
    ({"mode": "graph", "median_us": 5.0, "cold_call_us": 15.0}, [], True, True),
    ({"mode": "cold", "median_us": 9.0, "capture_failure": "sync"}, ["EVENT_TIMED"], True, True),
    ({"mode": "cold", "median_us": 9.0}, ["EVENT_TIMED"], True, True),
    ({"mode": "cold", "median_us": 90.0, "capture_failure": "sync"}, [], True, True),
    ({"median_us": 90.0, "host_us": 95.0, "is_host_hidden": False}, ["HOST_BOUND"], True, False),
    ({"median_us": 90.0, "host_us": 20.0, "is_host_hidden": False}, ["HOST_EXPOSED"], True, True),
    ({"median_us": 90.0, "host_us": 95.0, "is_host_hidden": True}, [], True, True),
    ({"mode": "wall", "median_us": 90.0, "host_us": 95.0, "is_host_hidden": False}, [], True, True),
    ({"mutated": ("x",), "is_drifting": True}, ["MUTATES"], True, True),
    ({"held": ("w",)}, ["HOLDS_TENSORS"], True, True),
    ({"uncopied": ("s",)}, ["NOT_COPIED"], True, True),
    ({"unchecked": "no reference"}, ["UNCHECKED"], True, True),
    ({"throttle": ("sw_power_cap",)}, ["THROTTLED"], True, True),
]


@pytest.mark.parametrize(("evidence", "expected", "has_time", "ranked"), CASES)
def test_labels(evidence: dict[str, Any], expected: list[str], has_time: bool, ranked: bool) -> None:
    labels = find_labels(Evidence(**evidence))
    assert [label.code for label in labels] == expected
    assert voids_time(labels) is not has_time
    assert is_ranked(labels) is ranked


def test_several_labels_stand_together_gravest_first() -> None:
    assert codes(stale="old", mutated=("x",), unchecked="as asked") == ["CACHED", "MUTATES", "UNCHECKED"]


def test_texts_name_the_figures() -> None:
    (label,) = find_labels(Evidence(bytes_per_second=5.1e12, nominal_bytes_per_second=4.8e12))
    assert str(label) == "SERVED_BY_L2: 5.10 TB/s is above the memory's nominal 4.80: served by L2, or not all bytes are moved"
    (label,) = find_labels(Evidence(mutated=("x", "m"), is_drifting=True))
    assert "x, m" in label.text
