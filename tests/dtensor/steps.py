"""Training steps in two processes: FSDP2 beside DDP beside one process that sees the whole batch, with fused functions and AdamW.

`tests.dtensor.jobs` starts the processes; a case raises in any of them where it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import wideload as wl
from tests.dtensor.jobs import Case, World, bias_gelu, spread

CASES: dict[str, Case] = {}

STEPS = 4
LR = 1e-2
EPS = 1e-3
"""Of AdamW: a step is then a smooth function of the gradient, also near zero, where roundings would decide its sign."""
WIDTH, HIDDEN, BATCH = 24, 64, 16

APART = {torch.float32: 1e-5, torch.bfloat16: 0.1}
"""What parameters may be apart after all steps, of the way that they went: norms over all elements. One process sums the gradient over the
whole batch, two average the sums over halves, and each sum is rounded: to 2^-24 or 2^-8 of its size. Adam divides by that size or by
`EPS`, so that a step is rounded as much, and more where terms cancel. bf16 rounds the parameters as well."""


def case(fn: Case) -> Case:
    """List a case under its name."""
    CASES[fn.__name__] = fn
    return fn


class Block(nn.Module):
    """A gated feed-forward and one with a bias, both fused, each added to what came in."""

    def __init__(self, gated: Callable[..., Tensor], biased: Callable[..., Tensor]) -> None:
        super().__init__()
        self.gated, self.biased = gated, biased
        self.gate, self.up, self.first = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(3))
        self.down, self.second = (nn.Linear(HIDDEN, WIDTH) for _ in range(2))
        self.bias = nn.Parameter(torch.randn(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Two residual steps."""
        x = x + self.down(self.gated(self.gate(x), self.up(x)))
        result: Tensor = x + self.second(self.biased(self.first(x), self.bias))
        return result


FUSED = wl.ops.swiglu, bias_gelu
PLAIN = tuple(fn.__wrapped__ for fn in FUSED)


def make_model(world: World, dtype: torch.dtype, parts: Any = FUSED) -> nn.Sequential:
    """The same in each process."""
    torch.manual_seed(5)
    return nn.Sequential(*(Block(*parts) for _ in range(2))).to(world.device, dtype)


def alone(model: Any, world: World) -> Any:
    """Not distributed."""
    return model


def by_ddp(model: Any, world: World) -> Any:
    """Each process has all parameters."""
    return nn.parallel.DistributedDataParallel(model)


def by_fsdp2(model: Any, world: World) -> Any:
    """Each process has a part of each parameter, gathered block by block."""
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block, mesh=world.line)
    return fully_shard(model, mesh=world.line)


def loss_of(model: Any, world: World, dtype: torch.dtype, step: int, num_parts: int) -> Tensor:
    """Of this process's part of a batch."""
    batch = (world.draw(BATCH, WIDTH, seed=step) - 1).to(dtype)
    part = batch.chunk(num_parts)[world.line.get_local_rank() if num_parts > 1 else 0]
    loss: Tensor = model(part).float().square().mean()
    return loss


def train(world: World, wrap: Callable[..., Any], dtype: torch.dtype, optimizer: Any = wl.optim.AdamW, parts: Any = FUSED) -> list[Tensor]:
    """All parameters, whole, after `STEPS` steps."""
    model = wrap(make_model(world, dtype, parts), world)
    steps = optimizer(model.parameters(), lr=LR, eps=EPS)
    for step in range(STEPS):
        loss_of(model, world, dtype, step, 1 if wrap is alone else world.line.size()).backward()
        steps.step()
        steps.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in map(Tensor.detach, model.parameters())]


def assert_moved_alike(have: list[Tensor], want: list[Tensor], start: list[Tensor], allowed: float) -> None:
    """``have`` is as near to ``want`` as so much of the way from ``start`` to there."""

    def norm(first: list[Tensor], second: list[Tensor]) -> float:
        return sum(float((a.double() - b.double()).square().sum()) for a, b in zip(first, second, strict=True)) ** 0.5

    apart, way = norm(have, want), norm(want, start)
    assert way > 0
    assert apart <= allowed * way, f"{apart / way:.2e} of the way apart; allowed: {allowed:.0e}"


def compare(world: World, dtype: torch.dtype) -> None:
    """FSDP2 as DDP, DDP as one process, and that as plain functions with torch's AdamW."""
    start = [p.detach() for p in make_model(world, dtype).parameters()]
    one, ddp, fsdp2 = (train(world, wrap, dtype) for wrap in (alone, by_ddp, by_fsdp2))
    # The sum of two gradients is the same in any order, and its half exact. On GPUs cuBLAS may take another kernel for another address.
    exactly = 0.0 if world.device == "cpu" and world.line.size() == 2 else APART[dtype]
    assert_moved_alike(fsdp2, ddp, start, exactly)
    assert_moved_alike(ddp, one, start, APART[dtype])
    plain = train(world, alone, dtype, torch.optim.AdamW, PLAIN)
    assert_moved_alike(one, plain, start, APART[dtype])


@case
def steps_in_float32(world: World) -> None:
    compare(world, torch.float32)


@case
def steps_in_bfloat16(world: World) -> None:
    compare(world, torch.bfloat16)


@case
def faults_are_seen(world: World) -> None:
    """The bounds are narrower than a step of another size, a gradient that is not averaged, or another function."""
    start = [p.detach() for p in make_model(world, torch.float32).parameters()]
    want = train(world, alone, torch.float32)

    def unaveraged(model: Any, world: World) -> Any:
        return model

    def faster(params: Any, lr: float, eps: float) -> Any:
        return wl.optim.AdamW(params, lr=1.01 * lr, eps=eps)

    wrong = {
        "one half of the batch": train(world, unaveraged, torch.float32),
        "1 % more": train(world, by_fsdp2, torch.float32, faster),
        "gelu by tanh": train(
            world, by_ddp, torch.float32, parts=(FUSED[0], lambda x, bias: nn.functional.gelu(x + bias, approximate="tanh"))
        ),
    }
    for name, have in wrong.items():
        try:
            assert_moved_alike(have, want, start, APART[torch.float32])
        except AssertionError:
            continue
        raise AssertionError(f"{name} was not seen")


@case
def fused_functions_gather_nothing_in_fsdp2(world: World) -> None:
    """A step has the collectives of FSDP2 and no others: as many as with plain functions."""
    from torch.distributed.tensor.debug import CommDebugMode

    counts = []
    for parts in (FUSED, PLAIN):
        model = by_fsdp2(make_model(world, torch.float32, parts), world)
        loss_of(model, world, torch.float32, 0, world.line.size()).backward()  # the first call of a function
        with CommDebugMode() as mode:
            loss_of(model, world, torch.float32, 1, world.line.size()).backward()
        counts.append(dict(mode.get_comm_counts()))
    assert counts[0] == counts[1], counts
    assert sum(counts[1].values()) > 0


@case
def optimizer_state_is_sharded(world: World) -> None:
    """Each process has the moments of its part."""
    from torch.distributed.tensor import DTensor

    model = by_fsdp2(make_model(world, torch.float32), world)
    steps = wl.optim.AdamW(model.parameters(), lr=LR)
    loss_of(model, world, torch.float32, 0, world.line.size()).backward()
    steps.step()
    for p in model.parameters():
        moment = steps.state[p]["exp_avg"]
        assert isinstance(moment, DTensor)
        assert moment.placements == p.placements
        assert moment.to_local().shape == p.to_local().shape
        assert p.to_local().numel() * world.line.size() == p.numel()


@case
def no_collective_forward_or_backward(world: World) -> None:
    """Shards along either dim, replicas, pending sums where the function is linear, and a row that is broadcast, in every placement."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    unlike = [spread(tensor, world.line, [Shard(0)]) for tensor in (world.draw(8, 12), world.draw(12))]
    with CommDebugMode() as mode:  # shards of a row that is broadcast along another dim have to meet
        bias_gelu(*unlike)
    assert mode.get_total_counts() == 1
    doubled = wl.fuse(lambda x, y: 2 * x + y)
    x, y, bias = world.draw(8, 12), world.draw(8, 12, seed=1), world.draw(12, seed=2)
    for f, operands, placements, result in (
        (wl.ops.swiglu, (x, y), (Shard(0), Shard(0)), Shard(0)),
        (wl.ops.swiglu, (x, y), (Shard(1), Shard(1)), Shard(1)),
        (wl.ops.swiglu, (x, y), (Replicate(), Replicate()), Replicate()),
        (doubled, (x, y), (Partial(), Partial()), Partial()),
        (bias_gelu, (x, bias), (Shard(0), Replicate()), Shard(0)),
        (bias_gelu, (x, bias), (Shard(1), Shard(0)), Shard(1)),
        (bias_gelu, (x, bias), (Replicate(), Replicate()), Replicate()),
    ):
        parts = [spread(tensor, world.line, [at]).requires_grad_() for tensor, at in zip(operands, placements, strict=True)]
        whole = [tensor.clone().requires_grad_() for tensor in operands]
        arriving = Replicate() if result == Partial() else result
        grad = distribute_tensor(torch.ones_like(x), world.line, [arriving])
        with CommDebugMode() as mode:
            have = f(*parts)
            have.backward(grad)
        assert mode.get_total_counts() == 0, (placements, mode.get_comm_counts())
        assert have.placements == (result,)
        want = f.__wrapped__(*whole)
        want.backward(torch.ones_like(x))
        torch.testing.assert_close(have.full_tensor(), want)
        for part, one in zip(parts, whole, strict=True):
            torch.testing.assert_close(part.grad.full_tensor(), one.grad)
