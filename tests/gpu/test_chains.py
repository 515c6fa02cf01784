"""Kernels that start before the one ahead of them on the stream has ended: each reads what that one writes, and writes what it reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import wideload as wl

pytestmark = pytest.mark.gpu

LINKS = 60
SIZES = [(5, 7), (64, 1000), (333, 517), (2048, 2048)]

Link = Callable[[torch.Tensor], torch.Tensor]


def randint(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(-100, 100, shape, device="cuda").to(dtype)


LINKS_OF: dict[str, tuple[Link, ...]] = {
    "dense": (lambda x: x * 3 + 1, lambda x: x ^ (x + 7)),
    "tile": (lambda x: (x * 3).t().contiguous(), lambda x: (x + 1).t().contiguous()),
    "rows": (lambda x: x + x[:1] * 3, lambda x: x - x[:, 1:2]),
    "steps": (lambda x: torch.cat((x[:, ::2], x[:, 1::2] + 1), 1), lambda x: torch.cat((x[:, 3:] * 5, x[:, :3]), 1)),
    "mixed": (lambda x: x * 3 + 1, lambda x: (x + 1).t().contiguous(), lambda x: x - x[:1], lambda x: torch.cat((x[1:], x[:1]))),
}


def run(links: tuple[Link, ...], x: torch.Tensor) -> torch.Tensor:
    for number in range(LINKS):
        x = links[number % len(links)](x)
    return x


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("name", LINKS_OF)
def test_each_reads_what_the_one_before_has_written(name: str, size: tuple[int, int]) -> None:
    links = LINKS_OF[name]
    fused = tuple(wl.fuse(link, name="link") for link in links)
    x = randint(*size)
    want = run(links, x)
    for _ in range(5):
        assert torch.equal(run(fused, x), want)
    mixed = tuple(link if number % 3 else fused[number] for number, link in enumerate(links)) + fused
    assert torch.equal(run(mixed, x), run(links + links, x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(fused, x)
    for _ in range(5):
        x.copy_(randint(*size))
        graph.replay()
        assert torch.equal(got, run(links, x))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_memory_is_written_after_it_was_read(size: tuple[int, int]) -> None:
    """In place, and to and fro between two tensors: what is written is what the kernel before reads."""
    add, turn = wl.fuse(lambda x, y: x * 3 + y, name="add"), wl.fuse(lambda x: x.t() + 1, name="turn")
    x, y = randint(*size), randint(*size)
    x_want, y_want = x.clone(), y.clone()
    t, t_want = x.t().contiguous(), x.t().contiguous()
    for _ in range(LINKS):
        add(x, y, out=x)
        add(y, x, out=y)
        turn(x, out=t)
        add(x, turn(t), out=x)
        x_want = x_want * 3 + y_want
        y_want = y_want * 3 + x_want
        t_want = x_want.t() + 1
        x_want = x_want * 3 + (t_want.t() + 1)
    assert torch.equal(x, x_want)
    assert torch.equal(y, y_want)
    assert torch.equal(t, t_want)


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_several_kernels_of_one_call_between_others(size: tuple[int, int]) -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:1] * 3, x + 1

    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * 5 + y

    def both(halves: Callable[..., tuple[torch.Tensor, torch.Tensor]], add: Callable[..., torch.Tensor]) -> torch.Tensor:
        y = x
        for _ in range(LINKS):
            row, rest = halves(y)
            y = add(rest, row)
        return y

    x = randint(*size)
    for _ in range(5):
        assert torch.equal(both(wl.fuse(halves), wl.fuse(add)), both(halves, add))


def test_gradients_and_lists_and_draws_in_a_row() -> None:
    """Sums of parts, foreach's kernels and torch's own between them."""
    f = wl.fuse(lambda x, bias: torch.relu(x + bias) * 2, name="f")
    step = wl.fuse(lambda p, g: p - g * 0.5, name="step")
    x, bias = randint(512, 256, dtype=torch.float32), randint(256, dtype=torch.float32)
    mine, theirs = [x.clone(), bias.clone()], [x.clone(), bias.clone()]
    for _ in range(10):
        for values, call, update in (
            (mine, f, lambda values, grads: step.foreach(values, grads, out=values)),
            (theirs, lambda x, bias: torch.relu(x + bias) * 2, lambda values, grads: torch._foreach_add_(values, grads, alpha=-0.5)),
        ):
            leaves = [value.clone().requires_grad_() for value in values]
            call(*leaves).sum().backward()
            update(values, [leaf.grad for leaf in leaves])
        for one, other in zip(mine, theirs, strict=True):
            assert torch.equal(one, other)
