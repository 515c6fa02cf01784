"""Lanes of a partial warp: the rule for the tail of the ladder's `warps/tail.cu`, and what its breach is told.

The emulator knows barriers of blocks. Here a block is one warp, whose shuffle is a word a lane in shared memory, between two barriers at
which all lanes must meet: as a mask of all lanes demands.
"""

from __future__ import annotations

from importlib import resources

import pytest
import torch

from tests.emulator.emulator import EmulatorError, build, run_on
from wideload.cuda_source import read_cuda

WARP = """
__shared__ unsigned words[32];

inline unsigned exchange(unsigned mask, unsigned own, unsigned from)
{
    (void)mask;
    words[threadIdx.y * blockDim.x + threadIdx.x] = own;
    __syncthreads();
    unsigned got = from < 32 ? words[from] : own;
    __syncthreads();
    return got;
}

inline float __shfl_down_sync(unsigned mask, float own, unsigned delta)
{
    return __uint_as_float(exchange(mask, __float_as_uint(own), threadIdx.y * blockDim.x + threadIdx.x + delta));
}

inline unsigned __ballot_sync(unsigned mask, bool is_set)
{
    exchange(mask, is_set, 0);
    unsigned lanes = 0;
    for (unsigned lane = 0; lane < 32; ++lane) lanes |= words[lane] << lane;
    __syncthreads();
    return lanes;
}
"""
TAIL = read_cuda(resources.files("wideload") / "ladder" / "warps", "tail.cu")


@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 63, 64])
def test_the_lanes_behind_the_end_bring_what_changes_nothing(n: int) -> None:
    x, out = torch.arange(1.0, n + 1), torch.full((n,), -1.0)
    run_on(build(WARP + TAIL), "sum_with_next", (-(-n // 32), 1, 1), (32, 1, 1), [x, out, n], outputs=[out])
    # By hand: k + (k + 1), but the last of each warp and of all stand alone.
    assert out.tolist() == [k if k % 32 == 0 or k == n else 2 * k + 1 for k in range(1, n + 1)]


@pytest.mark.parametrize("n", [1, 31, 33])
def test_a_shuffle_that_some_lanes_of_the_mask_never_reach_is_found(n: int) -> None:
    branch = "float own = i < n ? x[i] : 0.0f;"
    assert branch in TAIL
    spoilt = TAIL.replace(branch, "if (i >= n) return; float own = x[i];")
    x, out = torch.ones(n), torch.ones(n)
    with pytest.raises(EmulatorError, match=r"divergent barrier: thread 0 of a block waits .*, thread .* has returned"):
        run_on(build(WARP + spoilt), "sum_with_next", (-(-n // 32), 1, 1), (32, 1, 1), [x, out, n])


def test_an_identity_that_is_none_shows() -> None:
    spoilt = TAIL.replace(": 0.0f;\n    float next", ": 5.0f;\n    float next")
    assert spoilt != TAIL
    x, out = torch.ones(3), torch.zeros(3)
    run_on(build(WARP + spoilt), "sum_with_next", (1, 1, 1), (32, 1, 1), [x, out, 3])
    assert out.tolist() == [2.0, 2.0, 6.0]


# By hand: threads of a block of 8 x 4 are counted along x first, so a row of the block is 8 lanes of its one warp.
@pytest.mark.parametrize(
    ("columns", "rows", "masks"),
    [
        (16, 4, [0xFFFFFFFF, 0xFFFFFFFF]),
        (11, 4, [0xFFFFFFFF, 0x07070707]),
        (11, 3, [0x00FFFFFF, 0x00070707]),
        (8, 1, [0x000000FF, 0]),
    ],
)
def test_a_ballot_says_which_lanes_have_an_element(columns: int, rows: int, masks: list[int]) -> None:
    out = torch.zeros(2, dtype=torch.int32)
    run_on(build(WARP + TAIL), "lanes_within", (2, 1, 1), (8, 4, 1), [out, columns, rows])
    assert [mask & 0xFFFFFFFF for mask in out.tolist()] == masks
