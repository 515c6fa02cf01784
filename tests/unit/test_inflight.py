"""Little's law against the reference article's figures for an A100, and bytes in flight by hand."""

from __future__ import annotations

import pytest

from wideload.analyze.inflight import bytes_in_flight_per_sm, littles_law_bytes, warps_needed
from wideload.errors import DeviceError

A100_SMS = 108
WARPS_OF_AN_SM = 64


def test_the_articles_a100() -> None:
    whole = littles_law_bytes(2000, 600)
    assert whole == 1.2e6
    assert whole / A100_SMS == pytest.approx(11_111, abs=1)  # "about 11 KB an SM"
    assert warps_needed(whole / A100_SMS, 16) == 22  # one 128-bit load a lane: 512 bytes a warp
    assert warps_needed(whole / A100_SMS, 16, loads_in_flight=2) == 11
    assert warps_needed(11 * 1024, 4) == 88 > WARPS_OF_AN_SM  # 32-bit loads: more warps than there can be
    assert warps_needed(512, 16) == 1
    assert warps_needed(513, 16) == 2


@pytest.mark.parametrize(
    ("per_thread", "threads", "blocks", "grid", "sms", "expected"),
    [
        (32, 256, 8, 10**6, 132, 65_536),  # two 16-byte loads, 2048 threads
        (16, 128, 16, 10**6, 132, 32_768),
        (16, 128, 16, 132, 132, 2_048),  # one block an SM
        (16, 128, 16, 66, 132, 1_024),  # half of the SMs have one
        (16, 128, 16, 1, None, 32_768),  # a grid that fills an unknown GPU
        (0, 128, 16, 10**6, 132, 0),
    ],
)
def test_in_flight_by_hand(per_thread: int, threads: int, blocks: int, grid: int, sms: int | None, expected: float) -> None:
    assert bytes_in_flight_per_sm(per_thread, threads, blocks, grid, sms) == expected


def test_no_load_needs_no_warps() -> None:
    with pytest.raises(DeviceError, match="bytes_per_load is 0, loads_in_flight 1; allowed are at least 1"):
        warps_needed(100, 0)
