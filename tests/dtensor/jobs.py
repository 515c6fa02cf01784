"""Cases that run in a few processes, each with a part of every ``DTensor``: compared with torch's own operators on the whole tensors.

``run_cases`` starts the processes once for all cases; a case raises in any of them where it fails.
"""

import importlib
import math
import multiprocessing
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl

TIMEOUT_S = 240
"""For all cases together; they take a few seconds."""

WAIT_S = 20
"""For one collective: where another process has failed, it never comes."""


@dataclass(frozen=True)
class World:
    """One process among others: a mesh of all of them, and one of two dims."""

    device: str
    line: Any
    grid: Any

    def draw(self, *shape: int, seed: int = 0) -> torch.Tensor:
        """The same numbers in each process, positive ones."""
        return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5).to(self.device)


Case = Callable[[World], None]
CASES: dict[str, Case] = {}


def case(fn: Case) -> Case:
    """List a case under its name."""
    CASES[fn.__name__] = fn
    return fn


def run_cases(num_processes: int, device: str, folder: Path, module: str = __name__) -> dict[str, str]:
    """By the name of each case of ``module`` what went wrong, or nothing."""
    context = multiprocessing.get_context("spawn")  # a forked process has no CUDA
    queue = context.Queue()
    workers = [
        context.Process(target=_work, args=(rank, num_processes, device, str(folder / "store"), queue, module))
        for rank in range(num_processes)
    ]
    for worker in workers:
        worker.start()
    try:
        found = [queue.get(timeout=TIMEOUT_S) for _ in workers]
    finally:
        for worker in workers:
            worker.join(timeout=10)
            worker.kill()
    return {name: "\n".join(filter(None, (outcome[name] for outcome in found))) for name in found[0]}


def _work(rank: int, num_processes: int, device: str, store: str, queue: Any, module: str) -> None:
    torch.set_num_threads(1)
    from torch.distributed.tensor import init_device_mesh

    if device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if device == "cpu" else "nccl"
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.FileStore(store, num_processes),
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=WAIT_S),
    )
    line = init_device_mesh(device, (num_processes,))
    grid = init_device_mesh(device, (2, num_processes // 2), mesh_dim_names=("rows", "columns"))
    cases: dict[str, Case] = importlib.import_module(module).CASES
    outcome = dict.fromkeys(cases, "not run: an earlier case failed")
    for name, run in cases.items():
        try:
            run(World(device, line, grid))
            outcome[name] = ""
        except Exception:  # to be told in the process that asked; the others may wait for this one in vain
            outcome[name] = f"rank {rank}: {traceback.format_exc()}"
            break
    queue.put(outcome)
    torch.distributed.destroy_process_group()


# ---- comparing


def spread(whole: torch.Tensor, mesh: Any, placements: Any) -> Any:
    """The ``DTensor`` of that value. A pending sum has another term on each device."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    pending = [dim for dim, placement in enumerate(placements) if isinstance(placement, Partial)]
    if not pending:
        return distribute_tensor(whole, mesh, placements)
    resting = [Replicate() if dim in pending else placement for dim, placement in enumerate(placements)]
    local = distribute_tensor(whole, mesh, resting).to_local()
    for dim in pending:
        size, rank = mesh.size(dim), mesh.get_local_rank(dim)
        if placements[dim].reduce_op == "sum":  # 1, 2, ... of 1 + 2 + ...
            local = local * (rank + 1) / (size * (size + 1) / 2)
        else:
            local = local * (rank + 1) / ((size + 1) / 2)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def check(
    f: Any, operands: list[torch.Tensor], mesh: Any, placements: list[Any], result: Any, *, comms: int = 0, numbers: tuple[Any, ...] = ()
) -> list[Any]:
    """Compare values and gradients with those of the plain function of the whole tensors; return the gradients as they lie.

    Results have to lie as ``result`` says, and the forward to trace so many collectives.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    whole = [operand.clone().requires_grad_(operand.is_floating_point()) for operand in operands]
    want = f.__wrapped__(*whole, *numbers)
    parts = [
        spread(operand, mesh, at).requires_grad_(operand.is_floating_point()) for operand, at in zip(operands, placements, strict=True)
    ]
    with count_parts() as counted:
        have = f(*parts, *numbers)
        with CommDebugMode() as mode:
            again = f(*parts, *numbers)
    assert counted == [2], counted
    assert mode.get_total_counts() == comms, mode.get_comm_counts()
    as_tuple = have if isinstance(have, tuple) else (have,)
    wants = want if isinstance(want, tuple) else (want,)
    for one, other, w in zip(as_tuple, again if isinstance(again, tuple) else (again,), wants, strict=True):
        assert one.placements == tuple(result) == other.placements, (one.placements, other.placements)
        assert one.shape == w.shape
        assert one.stride() == w.stride()
        torch.testing.assert_close(one.full_tensor(), w)
        torch.testing.assert_close(other.full_tensor(), w)
    weights = [torch.rand(w.shape, generator=torch.Generator().manual_seed(9)).to(w.device) for w in wants]
    torch.autograd.backward(wants, weights)
    from torch.distributed.tensor import Partial, Replicate, distribute_tensor

    resting = [Replicate() if isinstance(placement, Partial) else placement for placement in result]
    torch.autograd.backward(as_tuple, [distribute_tensor(weight, mesh, resting) for weight in weights])
    for part, w in zip(parts, whole, strict=True):
        if w.grad is not None:
            torch.testing.assert_close(part.grad.full_tensor(), w.grad)
    return [part.grad for part in parts]


class count_parts:
    """How many calls are computed part by part, not by torch's operators one by one."""

    def __enter__(self) -> list[int]:
        from wideload import sharding

        self._run, counted = sharding.ShardedCall.run, [0]

        def run(call: Any) -> Any:
            counted[0] += 1
            return self._run(call)

        sharding.ShardedCall.run = run  # type: ignore[method-assign]
        return counted

    def __exit__(self, *_: object) -> None:
        from wideload import sharding

        sharding.ShardedCall.run = self._run  # type: ignore[method-assign]


# ---- functions


@wl.fuse
def gate(x, y):
    return F.silu(x) * y


@wl.fuse
def bias_gelu(x, bias):
    return F.gelu(x + bias)


@wl.fuse
def two(x, y, s):
    return x * s, torch.exp(x) + y


@wl.fuse
def weighted(x, y, w, s):
    return x * s - y * w + x / w


@wl.fuse
def positions(x):
    return torch.where(wl.index(0) > wl.index(-1), x, -x)


@wl.fuse
def columns(x):
    return x * wl.index(1)


@wl.fuse
def noisy(x):
    return F.dropout(x, 0.5)


@wl.fuse
def noisy_bias(x, bias):
    return x + F.dropout(bias, 0.5)


@wl.fuse
def rotated(x):
    a, b = x.chunk(2, -1)
    return torch.cat((a - b, a + b), -1)


# ---- cases


@case
def shards(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard

    x, y = world.draw(8, 12), world.draw(8, 12, seed=1)
    for placement in (Shard(0), Shard(1), Replicate(), Shard(-1)):
        at = Shard(1) if placement == Shard(-1) else placement
        grads = check(gate, [x, y], world.line, [[placement], [placement]], [at])
        assert all(grad.placements == (at,) for grad in grads)


@case
def uneven_shards(world: World) -> None:
    from torch.distributed.tensor import Shard

    for rows in (1, 5, 7):
        check(bias_gelu, [world.draw(rows, 3), world.draw(3, seed=1)], world.line, [[Shard(0)], [_replicate()]], [Shard(0)])
    check(gate, [world.draw(3, 5), world.draw(3, 5, seed=1)], world.line, [[Shard(1)], [Shard(1)]], [Shard(1)])


def _replicate() -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate()


@case
def broadcast_bias(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    x, bias = world.draw(8, 12), world.draw(12, seed=1)
    _, grad = check(bias_gelu, [x, bias], world.line, [[Shard(0)], [Replicate()]], [Shard(0)])
    assert grad.placements == (Partial(),)
    _, grad = check(bias_gelu, [x, bias], world.line, [[Shard(1)], [Shard(0)]], [Shard(1)])
    assert grad.placements == (Shard(0),)
    check(bias_gelu, [x, bias], world.line, [[Shard(1)], [Replicate()]], [Shard(1)])  # a part of the bias is taken without a word
    check(bias_gelu, [x, bias], world.line, [[Replicate()], [Shard(0)]], [Shard(1)])
    check(bias_gelu, [x, bias], world.line, [[Shard(0)], [Shard(0)]], [Shard(0)], comms=1)
    check(bias_gelu, [world.draw(8, 1), bias], world.line, [[Shard(0)], [Replicate()]], [Shard(0)])
    part = spread(x, world.line, [Shard(0)])
    with CommDebugMode() as mode:  # the first call of a function
        wl.fuse(lambda x: x + 1)(part)
    assert not mode.get_total_counts()
    check(bias_gelu, [x, world.draw()], world.line, [[Shard(0)], [Replicate()]], [Shard(0)])


@case
def plain_numbers(world: World) -> None:
    from torch.distributed.tensor import Shard

    x = spread(world.draw(8, 3), world.line, [Shard(0)])
    with count_parts() as counted:
        have = bias_gelu(x, torch.tensor(0.5))
    assert counted == [1]
    assert have.placements == (Shard(0),)
    torch.testing.assert_close(have.full_tensor(), F.gelu(world.draw(8, 3) + 0.5))


@case
def values_of_all_elements(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    both = wl.fuse(lambda x: (x * 2, wl.amax(x * 2), wl.any_nonfinite(x)))
    x = world.draw(8, 12)
    x[7, 3] = 9.0
    for placement, left in ((Shard(0), Partial("max")), (Shard(1), Partial("max")), (Replicate(), Replicate())):
        with count_parts() as counted:
            have = both(spread(x, world.line, [placement]))
            alone = wl.fuse(lambda x: wl.amax(x))(spread(x, world.line, [placement]))
        assert counted == [2]
        assert [of.placements for of in have] == [(placement,), (left,), (left,)]
        assert torch.equal(have[0].full_tensor(), x * 2)
        assert [of.full_tensor().item() for of in (*have[1:], alone)] == [18.0, 0.0, 9.0]
    x[0, 0] = math.inf  # of one part
    have = both(spread(x, world.line, [Shard(0)]))
    assert [of.full_tensor().item() for of in have[1:]] == [math.inf, 1.0]
    part = spread(x, world.line, [Shard(0)])
    with pytest.raises(wl.LayoutError, match="of which each part has its own"):
        wl.fuse(lambda x: wl.amax(x))(part, out=part)


@case
def several_results(world: World) -> None:
    from torch.distributed.tensor import Shard

    x, y = world.draw(8, 12), world.draw(8, 12, seed=1)
    check(two, [x, y], world.line, [[Shard(0)], [Shard(0)]], [Shard(0)], numbers=(3.0,))
    same, twice = wl.fuse(lambda x: (x, x * 2))(part := spread(x, world.line, [Shard(1)]))
    assert same is part
    assert twice.placements == (Shard(1),)


@case
def transposed(world: World) -> None:
    from torch.distributed.tensor import Shard

    check(gate, [world.draw(12, 8).t(), world.draw(12, 8, seed=1).t()], world.line, [[Shard(0)], [Shard(0)]], [Shard(0)])


@case
def pending_sums(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, y, w = world.draw(8, 12), world.draw(8, 12, seed=1), world.draw(12, seed=2)
    for kind in (Partial(), Partial("avg")):
        grads = check(weighted, [x, y, w], world.line, [[kind], [kind], [Replicate()]], [kind], numbers=(3,))
        assert [grad.placements[0] for grad in grads] == [Replicate(), Replicate(), kind]
    check(weighted, [x, y, w], world.line, [[Partial()], [Replicate()], [Replicate()]], [Replicate()], comms=1, numbers=(3,))
    check(weighted, [x, y, w], world.line, [[Partial()], [Partial()], [Partial()]], [Replicate()], comms=3, numbers=(3,))
    check(gate, [x, y], world.line, [[Partial()], [Replicate()]], [Replicate()], comms=1)
    check(gate, [x, y], world.line, [[Partial()], [Shard(0)]], [Shard(0)], comms=1)
    check(gate, [x, y], world.line, [[Replicate()], [Partial()]], [Partial()])


@case
def grids(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, bias = world.draw(8, 12), world.draw(12, seed=1)
    both = [Shard(0), Shard(1)]
    _, grad = check(bias_gelu, [x, bias], world.grid, [both, [Replicate(), Shard(0)]], both)
    assert grad.placements == (Partial(), Shard(0))
    check(bias_gelu, [x, bias], world.grid, [[Shard(0), Shard(0)], [Replicate(), Replicate()]], [Shard(0), Shard(0)])
    check(gate, [x, world.draw(8, 12, seed=1)], world.grid, [[Shard(0), Replicate()], [Replicate(), Shard(1)]], both)
    check(gate, [x, bias], world.grid, [[Shard(0), Replicate()], [Replicate(), Partial()]], [Shard(0), Partial()])


@case
def coordinates(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard

    x = world.draw(8, 12)
    want = torch.where(torch.arange(8).view(8, 1) > torch.arange(12), x.cpu(), -x.cpu())
    for f, at, result, value in (
        (positions, Shard(0), Replicate(), want),
        (positions, Replicate(), Replicate(), want),
        (columns, Shard(0), Shard(0), x.cpu() * torch.arange(12)),
        (columns, Shard(1), Replicate(), x.cpu() * torch.arange(12)),
    ):
        have = f(spread(x, world.line, [at]))
        assert have.placements == (result,)
        torch.testing.assert_close(have.full_tensor().cpu(), value)


@case
def random_numbers(world: World) -> None:
    from torch.distributed.tensor import Replicate, Shard

    ones, size = torch.ones(64 * world.line.size(), 64, device=world.device), world.line.size()
    for seeds in (lambda rank: 1, lambda rank: 1 + rank):
        torch.manual_seed(seeds(world.line.get_local_rank()))
        x = spread(ones, world.line, [Shard(0)]).requires_grad_()
        y = noisy(x)
        y.backward(spread(ones, world.line, [Shard(0)]))
        assert y.placements == (Shard(0),)
        assert torch.equal(x.grad.full_tensor(), y.full_tensor())
        pieces = y.full_tensor().chunk(size)
        assert all(0.4 < (piece != 0).double().mean() < 0.6 and set(piece.unique().tolist()) == {0.0, 2.0} for piece in pieces)
        assert not any(torch.equal(pieces[0], piece) for piece in pieces[1:])
        alike(noisy(spread(ones, world.line, [Replicate()])), world)
        whole = noisy_bias(spread(ones, world.line, [Shard(0)]), spread(ones[0], world.line, [Replicate()]))
        alike(whole, world)  # one mask for all rows
        assert len({tuple(row.tolist()) for row in whole.full_tensor()}) == 1


def alike(tensor: Any, world: World) -> None:
    """A replica is the same on each device."""
    from torch.distributed.tensor import Replicate

    assert tensor.placements == (Replicate(),)
    local = tensor.to_local().detach().contiguous()
    found = [torch.empty_like(local) for _ in range(world.line.size())]
    torch.distributed.all_gather(found, local)
    assert all(torch.equal(found[0], other) for other in found[1:])


@case
def in_place(world: World) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, bias = world.draw(8, 12), world.draw(12, seed=1)
    part = spread(x, world.line, [Shard(0)])
    local, version = part.to_local(), part._version
    assert bias_gelu(part, spread(bias, world.line, [Replicate()]), out=part) is part
    assert part.to_local().data_ptr() == local.data_ptr()
    assert part._version > version
    torch.testing.assert_close(part.full_tensor(), F.gelu(x + bias))
    out = spread(torch.zeros_like(x), world.line, [Replicate()])
    bias_gelu(spread(x, world.line, [Shard(0)]), spread(bias, world.line, [Shard(0)]), out=out)
    torch.testing.assert_close(out.to_local(), F.gelu(x + bias))
    raises(wl.errors.LayoutError, "which results", lambda: gate(part, part, out=spread(x, world.line, [Partial()])))
    raises(wl.errors.LayoutError, "must be DTensors", lambda: gate(part, part, out=torch.empty_like(x)))
    raises(wl.errors.LayoutError, "shape", lambda: gate(part, part, out=spread(world.draw(8, 1), world.line, [Shard(0)])))
    raises(wl.errors.GradError, "out=", lambda: gate(part.detach().requires_grad_(), part, out=out))


def raises(kind: type[Exception], text: str, run: Callable[[], object]) -> None:
    """``run`` has to fail so."""
    with pytest.raises(kind, match=text):
        run()


@case
def by_torchs_operators(world: World) -> None:
    """Views are cut as torch cuts them."""
    from torch.distributed.tensor import Shard

    x = world.draw(8, 12)
    with count_parts() as counted:
        have = rotated(spread(x, world.line, [Shard(0)]))
    assert counted == [0]
    torch.testing.assert_close(have.full_tensor(), rotated.__wrapped__(x))


@case
def lists(world: World) -> None:
    from torch.distributed.tensor import Shard

    tensors = [world.draw(8, 3), world.draw(5, 4)]
    with count_parts() as counted:
        have = gate.foreach([spread(t, world.line, [Shard(0)]) for t in tensors], [spread(t, world.line, [Shard(0)]) for t in tensors])
    assert counted == [2]
    for h, t in zip(have, tensors, strict=True):
        torch.testing.assert_close(h.full_tensor(), gate.__wrapped__(t, t))


@case
def second_derivatives(world: World) -> None:
    from torch.distributed.tensor import Shard

    def second(x: Any) -> Any:
        (first,) = torch.autograd.grad(gate(x, x).sum(), x, create_graph=True)
        (found,) = torch.autograd.grad((first * first).sum(), x)
        return found

    x = world.draw(8, 3)
    have = second(spread(x, world.line, [Shard(0)]).requires_grad_())
    torch.testing.assert_close(have.full_tensor(), second(x.clone().requires_grad_()))


# ---- training


class Block(torch.nn.Module):
    """Two linear layers with a fused activation between, whose bias is a parameter of its own."""

    def __init__(self, activation: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(6, 16, bias=False), torch.nn.Linear(16, 6)
        self.bias = torch.nn.Parameter(torch.randn(16))
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One residual step."""
        return x + self.second(self.activation(self.first(x), self.bias))


def train(world: World, wrap: Callable[[Any], Any], activation: Any, optimizer: Any, num_parts: int) -> list[torch.Tensor]:
    """The parameters after three steps on this process's part of the data."""
    model = wrap(Block(activation).to(world.device))
    steps = optimizer(model.parameters(), lr=0.1)
    for step in range(3):
        batch = world.draw(8, 6, seed=step)
        part = batch.chunk(num_parts)[world.line.get_local_rank()] if num_parts > 1 else batch
        model(part).square().mean().backward()
        steps.step()
        steps.zero_grad()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def _same_training(world: World, wrap: Callable[[Any], Any], num_parts: int) -> None:
    have = train(world, wrap, bias_gelu, wl.optim.AdamW, num_parts)
    want = train(world, lambda model: model, bias_gelu.__wrapped__, torch.optim.AdamW, 1)
    for h, w in zip(have, want, strict=True):
        torch.testing.assert_close(h, w, rtol=1e-4, atol=1e-5)


@case
def ddp(world: World) -> None:
    _same_training(world, torch.nn.parallel.DistributedDataParallel, world.line.size())


@case
def fsdp2(world: World) -> None:
    from torch.distributed.fsdp import fully_shard

    _same_training(world, lambda model: fully_shard(model, mesh=world.line), world.line.size())


@case
def tensor_parallel(world: World) -> None:
    """Columns of the first layer, rows of the second: the activation and its bias are sharded along the columns."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def wrap(model: Any) -> Any:
        plan = {"first": ColwiseParallel(use_local_output=False), "second": RowwiseParallel(input_layouts=Shard(-1))}
        parallelize_module(model, world.line, plan)
        model.bias = torch.nn.Parameter(distribute_tensor(model.bias.detach(), world.line, [Shard(0)]))
        return model

    with count_parts() as counted:
        _same_training(world, wrap, 1)
    assert counted == [3]
