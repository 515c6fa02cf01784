"""Coordinates and random numbers on a GPU: the numbers of the reference, the generator, replayed graphs, more than 2^31 elements."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.gpu.test_dense import DEVICE, assert_same
from wideload import ops

pytestmark = pytest.mark.gpu

drawn = wl.fuse(lambda x: (F.dropout(x, 0.3), F.dropout(x, 1e-3), torch.rand_like(x)), name="drawn")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_kernels_draw_what_the_reference_draws(dtype: torch.dtype) -> None:
    x = torch.ones(129, 1031, dtype=dtype, device=DEVICE)
    for view in (x, x.t(), x[:, 3:1030], x[::2, 1::3], x[0].expand(7, 1031)):
        torch.manual_seed(3)
        got = drawn(view)
        torch.manual_seed(3)
        for one, other in zip(got, drawn.reference(view), strict=True):
            assert_same(one, other, view.stride())


def test_the_gradient_has_the_mask() -> None:
    x = torch.ones(4099, device=DEVICE, requires_grad=True)
    y = wl.fuse(lambda v: F.dropout(v * 2, 0.4))(x)
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad != 0, y != 0)


def test_each_replay_of_a_graph_draws_anew() -> None:
    x = torch.ones(5000, device=DEVICE)
    drawn(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, _, uniform = drawn(x)
    torch.cuda.synchronize()  # torch sets the graph's seed on the stream of the capture, and before a replay on the current one
    replays = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        graph.replay()
        replays.append(uniform.clone())
    graph.replay()
    assert torch.equal(replays[0], replays[1])
    assert not torch.equal(replays[0], replays[2])
    assert not torch.equal(replays[2], uniform)


def test_masks_and_rotations() -> None:
    scores = torch.randn(2, 3, 257, 301, device=DEVICE, dtype=torch.bfloat16)
    mask = torch.ones(257, 301, dtype=torch.bool, device=DEVICE).tril(5)
    assert_same(ops.causal_mask(scores, offset=5), scores.masked_fill(~mask, -math.inf), "causal")
    x = torch.randn(2, 67, 3, 64, device=DEVICE, dtype=torch.bfloat16)
    angle = torch.arange(67.0, device=DEVICE)[:, None] * 0.9 ** torch.arange(32.0, device=DEVICE)
    ids = torch.randint(67, (2, 67), device=DEVICE)
    for interleaved in (False, True):
        for positions in (None, ids):
            arguments = (x, angle.cos(), angle.sin())
            got = ops.rope(*arguments, interleaved=interleaved, position_ids=positions)
            assert_same(got, ops.rope.reference(*arguments, interleaved=interleaved, position_ids=positions), interleaved)


@pytest.mark.big(7)
def test_positions_beyond_two_to_the_31() -> None:
    n = 2**31 + 4099
    x = torch.zeros(n, dtype=torch.int8, device=DEVICE)
    wl.fuse(lambda v: v + (wl.linear_index() % 101).to(torch.int8))(x, out=x)
    for start in (0, 2**31 - 50, n - 100):
        want = torch.arange(start, start + 100, device=DEVICE) % 101
        assert torch.equal(x[start : start + 100].long(), want)
