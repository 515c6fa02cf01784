"""Random integers against Philox by Python's integers, and Philox against the known answers of those who published it."""

from __future__ import annotations

import pytest
import torch

from tests.philox import ANSWERS, integers, philox
from wideload.random import draw_integers, draw_seed
from wideload.random import philox as philox_of_tensors

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rounds", "counter", "key", "answer"), ANSWERS)
def test_both_give_the_known_answers(rounds: int, counter: str, key: str, answer: str) -> None:
    words, keys = ([int(word, 16) for word in text.split()] for text in (counter, key))
    assert " ".join(f"{word:08x}" for word in philox(words, keys, rounds)) == answer
    got = philox_of_tensors([torch.tensor([word]) for word in words], [torch.tensor([word]) for word in keys], rounds)
    assert " ".join(f"{word.item():08x}" for word in got) == answer


@pytest.mark.parametrize("bits", [16, 32, 53])
@pytest.mark.parametrize("seed", [0, 1, -1, -(2**63), 2**63 - 2, 0x123456789ABCDEF])
def test_integers_are_those_of_the_stream(seed: int, bits: int) -> None:
    for stream, shape in ((0, (3, 37)), (1, (5,)), (7, ()), (2, (4, 0)), (2**31, (8, 2))):
        positions = torch.arange(torch.Size(shape).numel()).view(shape)
        got = draw_integers(torch.tensor([seed]), stream, bits, shape)
        assert got.dtype == torch.int64
        assert torch.equal(got, integers(seed, stream, bits, positions))


def test_seeds_come_from_torch_s_generator() -> None:
    torch.manual_seed(4)
    first, second = draw_seed(CPU), draw_seed(CPU)
    torch.manual_seed(4)
    assert torch.equal(draw_seed(CPU), first)
    assert not torch.equal(first, second)
    assert (first.dtype, first.shape) == (torch.int64, (1,))
    seeds = torch.cat([draw_seed(CPU) for _ in range(64)])
    assert seeds.min() < -(2**61)
    assert seeds.max() > 2**61


def test_bits_are_even() -> None:
    """Of 2^17 integers each bit is set in a half, within 5 standard deviations; so is the exclusive or of neighbours."""
    for bits in (16, 32, 53):
        drawn = draw_integers(torch.tensor([9]), 3, bits, (2**17,))
        for values in (drawn, drawn[1:] ^ drawn[:-1], drawn ^ draw_integers(torch.tensor([9]), 4, bits, (2**17,))):
            for bit in range(bits):
                assert abs((values >> bit & 1).double().mean().item() - 0.5) < 5 * 0.5 / 2**8.5
