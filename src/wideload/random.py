"""Turns a seed and an element's row-major index into random integers, by torch's own operators: Philox 4x32, as kernels compute it.

Also draws the seeds, from torch's generator. Knows nothing of expressions or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

__all__ = ["BLOCK_BITS", "ROUNDS", "SEEDS", "draw_integers", "draw_seed", "philox"]

ROUNDS = 7
"""Of Philox 4x32: the fewest that pass TestU01's BigCrush (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3",
SC 2011). In hand-written kernels measured on an H200, not those made here, ten, which torch takes, outlasted the memory's time with a block
for every 4 elements; seven with 16 bits an element did not."""

BLOCK_BITS = 128
"""Random bits of one block: 8 elements of 16 bits, 4 of 32, 2 of 53 (which take the upper bits of 64)."""

SEEDS = -(2**63), 2**63 - 1
"""The least of them, and what all are below."""

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF


def draw_seed(device: torch.device, count: int = 1) -> torch.Tensor:
    """``count`` int64s from torch's generator of ``device``, in memory there: a replayed CUDA graph draws others."""
    return torch.randint(*SEEDS, (count,), device=device)


def draw_integers(seed: torch.Tensor, stream: int, bits: int, shape: Sequence[int]) -> torch.Tensor:
    """Integers of ``bits`` (16, 32 or 53) bits, as int64: element ``i`` in row-major order is number ``i`` of the seed's stream."""
    num_elements = math.prod(shape)
    in_block = BLOCK_BITS // {16: 16, 32: 32, 53: 64}[bits]
    block = torch.arange(-(-num_elements // in_block), device=seed.device)
    counter = (block & _LOW, block >> 32, torch.full_like(block, stream), torch.zeros_like(block))
    words = torch.stack(philox(counter, (seed & _LOW, seed >> 32 & _LOW)), -1)
    if bits == 16:
        words = torch.stack((words & 0xFFFF, words >> 16), -1)
    elif bits == 53:
        words = words[:, 1::2] << 21 | words[:, ::2] >> 11
    return words.reshape(-1)[:num_elements].view(tuple(shape))


def philox(counter: Sequence[torch.Tensor], key: Sequence[torch.Tensor], rounds: int = ROUNDS) -> list[torch.Tensor]:
    """The four words of the blocks with these counters, of four words, under a key of two; words are int64 in [0, 2**32)."""
    a, b, c, d = counter
    low, high = key
    for _ in range(rounds):
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]  # 64 bits each, the sign bit one of them
        a, b, c, d = second >> 32 & _LOW ^ b ^ low, second & _LOW, first >> 32 & _LOW ^ d ^ high, first & _LOW
        low, high = low + _WEYL[0] & _LOW, high + _WEYL[1] & _LOW
    return [a, b, c, d]
