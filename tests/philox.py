"""Philox 4x32 by Python's integers, from the published algorithm, and what wideload documents that it makes of the blocks."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["ANSWERS", "integers", "philox"]

ANSWERS = [
    (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
    (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
    (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
    (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Rounds, counter, key, result: the known answers that Random123 ships (kat_vectors, philox4x32)."""


def philox(counter: list[int], key: list[int], rounds: int = 7) -> list[int]:
    """The block of a counter under a key."""
    x, k = list(counter), list(key)
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * x[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x[2], 2**32)
        x = [high1 ^ x[1] ^ k[0], low1, high0 ^ x[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return x


def integers(seed: int, stream: int, bits: int, positions: torch.Tensor) -> torch.Tensor:
    """The random integers at these positions of a stream: 8 of 16 bits in a block, 4 of 32, 2 of 53."""
    key = [seed % 2**32, seed % 2**64 >> 32]
    size = {16: 16, 32: 32, 53: 64}[bits]
    found = []
    for position in positions.flatten().tolist():
        block, place = divmod(position, 128 // size)
        words = philox([block % 2**32, block >> 32, stream, 0], key)
        whole = sum(word << 32 * i for i, word in enumerate(words))
        found.append((whole >> place * size) % 2**size >> size - bits)
    return torch.from_numpy(np.array(found, dtype=np.int64)).view(positions.shape)
