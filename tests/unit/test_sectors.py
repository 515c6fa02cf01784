"""Sectors of a warp's access: the reference article's table, and counts over a bitmap of memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wideload.analyze.sectors import WarpAccess, aos_access, indexed_access, strided_access, warp_sectors
from wideload.errors import LayoutError


def count_on_bitmap(addresses: list[int], itemsize: int) -> WarpAccess:
    """Mark the wanted bytes in a picture of memory, cut it into rows of 32 bytes, and count rows and marks."""
    start = min(addresses, default=0) // 32 * 32
    end = max(addresses, default=0) + itemsize
    wanted = np.zeros(-(-(end - start) // 32) * 32, np.bool_)
    for address in addresses:
        wanted[address - start : address - start + itemsize] = True
    return WarpAccess(int(wanted.reshape(-1, 32).any(axis=1).sum()), int(wanted.sum()))


@pytest.mark.parametrize(
    ("pattern", "sectors", "moved_bytes", "efficiency"),
    [
        (strided_access(4, 1), 4, 128, 1.0),
        (strided_access(4, 1, offset=1), 5, 160, 0.8),
        (strided_access(4, 2), 8, 256, 0.5),
        (strided_access(4, 4), 16, 512, 0.25),
        (strided_access(4, 8), 32, 1024, 0.125),
        (strided_access(4, 1000), 32, 1024, 0.125),
        (aos_access(12, 0, 4), 12, 384, 1 / 3),
        (aos_access(12, 8, 4), 12, 384, 1 / 3),
    ],
    ids=["contiguous", "4 bytes off", "stride 2", "stride 4", "stride 8", "stride 1000", "AoS x", "AoS z"],
)
def test_the_table_of_the_reference_article(pattern: WarpAccess, sectors: int, moved_bytes: int, efficiency: float) -> None:
    """32 lanes of 4 bytes, 128 useful bytes."""
    assert (pattern.sectors, pattern.moved_bytes, pattern.useful_bytes) == (sectors, moved_bytes, 128)
    assert pattern.efficiency == pytest.approx(efficiency, rel=1e-12)


@pytest.mark.parametrize(
    ("access", "expected"),
    [
        (strided_access(2, 1), WarpAccess(2, 64)),  # bf16
        (strided_access(2, 4096), WarpAccess(32, 64)),  # bf16 of a transposed 4096 x 4096 matrix: 6.25 %
        (strided_access(16, 1), WarpAccess(16, 512)),  # bf16x8 vectors
        (strided_access(1, 1), WarpAccess(1, 32)),
        (strided_access(1, 1, offset=31), WarpAccess(2, 32)),
        (strided_access(4, 0), WarpAccess(1, 4)),  # broadcast
        (strided_access(4, -1, offset=31), WarpAccess(4, 128)),  # reversed
        (strided_access(4, -1), WarpAccess(5, 128)),  # reversed from element 0: elements -31 to 0
        (strided_access(8, 1, offset=1), WarpAccess(9, 256)),
        (aos_access(8, 4, 4), WarpAccess(8, 128)),  # one of an interleaved (cos, sin)
        (aos_access(8, 0, 8), WarpAccess(8, 256)),  # both, as a float2
        (aos_access(3, 1, 1), WarpAccess(3, 32)),
        (aos_access(40, 30, 4), WarpAccess(40, 128)),  # the field straddles a sector in every fourth struct
    ],
)
def test_other_patterns_by_hand(access: WarpAccess, expected: WarpAccess) -> None:
    assert access == expected


def test_random_addresses_move_at_most_a_sector_each() -> None:
    indices = np.random.default_rng(0).integers(0, 2**28, 32)
    access = indexed_access(indices.tolist(), itemsize=4)
    assert access == WarpAccess(32, 128)  # of 2^25 sectors, these 32 draws meet no sector twice
    assert access.efficiency == 0.125


@given(st.lists(st.integers(-5000, 5000), max_size=32), st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 40]))
def test_any_addresses_agree_with_a_bitmap(addresses: list[int], itemsize: int) -> None:
    if addresses:
        assert warp_sectors(addresses, itemsize) == count_on_bitmap(addresses, itemsize)


@given(st.integers(1, 16), st.integers(-70, 70), st.integers(-70, 70))
def test_strides_and_indices_are_elements(itemsize: int, stride: int, offset: int) -> None:
    expected = count_on_bitmap([(offset + lane * stride) * itemsize for lane in range(32)], itemsize)
    assert strided_access(itemsize, stride, offset) == expected
    assert indexed_access([offset + lane * stride for lane in range(32)], itemsize) == expected


def test_a_warp_with_no_active_lane_moves_nothing() -> None:
    assert warp_sectors([], 4) == WarpAccess(0, 0)
    assert WarpAccess(0, 0).efficiency == 1.0


@pytest.mark.parametrize("call", [lambda: warp_sectors(range(33), 4), lambda: warp_sectors([0], 0), lambda: strided_access(0, 1)])
def test_what_no_warp_can_do_is_refused(call: object) -> None:
    with pytest.raises(LayoutError, match=r"itemsize is .* allowed"):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("arguments", [(12, 9, 4), (12, -1, 4), (4, 0, 8)])
def test_a_field_outside_its_struct_is_refused(arguments: tuple[int, int, int]) -> None:
    with pytest.raises(LayoutError, match="inside a struct"):
        aos_access(*arguments)
