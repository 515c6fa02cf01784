"""What a call allocates on a GPU: its results, and nothing beside them, by the counters of torch's allocator."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.measure.outcome import tensors_of

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
SEED_BYTES = 8
"""Of the tensor from which a call's random numbers start."""


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def requested(call: Callable[[], Any]) -> tuple[int, int, Any]:
    """Bytes that were asked for at most at a time while ``call`` ran, how often, and what it returned."""
    gc.collect()  # or what earlier tests left is given back meanwhile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    result = call()
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    nbytes = after["requested_bytes.all.peak"] - before["requested_bytes.all.current"]
    return nbytes, after["allocation.all.allocated"] - before["allocation.all.allocated"], result


def test_the_counters_see_what_eager_allocates() -> None:
    """Two results of 2 MiB at a time, three in all: the check would not pass by itself."""
    x = randn(1 << 20)
    nbytes, count, _ = requested(lambda: (x + 1) * 2 + 3)
    assert nbytes > x.nbytes
    assert count == 3


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], list[torch.Tensor]]]] = {
    "run": (lambda x, b, y: F.silu(x + b) * y, lambda: [randn(1 << 20) for _ in range(3)]),
    "misaligned": (lambda x, b: x + b, lambda: [randn(1 << 20)[1:], randn((1 << 20) + 2)[3:]]),
    "row": (lambda x, b: F.gelu(x + b), lambda: [randn(1024, 1024), randn(1024)]),
    "column": (lambda x, b: x * b, lambda: [randn(1000, 1031), randn(1000, 1)]),
    "pitched": (lambda x: x * 2, lambda: [randn(1024, 1024)[:, 1:-1]]),
    "packed": (lambda x: F.silu(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1], lambda: [randn(512, 4096)]),
    "turned": (lambda x: x.t().contiguous(), lambda: [randn(1024, 1024)]),
    "turned, odd": (lambda x, w: x.t() + w, lambda: [randn(1031, 1021), randn(1021, 1031)]),
    "strided": (lambda x, b: x + b, lambda: [randn(512, 1024, 5)[:, :, 2].t(), randn(512)]),
    "two dtypes": (lambda x, y: x + y, lambda: [randn(1 << 20), randn(1 << 20, dtype=torch.float32)]),
    "two results": (lambda x, y: (x + y, (x * y).float()), lambda: [randn(1 << 20), randn(1 << 20)]),
    "results of two shapes": (lambda x, y: (x + y, y * 2), lambda: [randn(1024, 1024), randn(1024)]),
    "put together": (lambda x: torch.cat((-x, x), dim=-1), lambda: [randn(1024, 512)]),
    "in channels": (lambda x, y: x + y, lambda: [randn(2, 64, 56, 56).to(memory_format=torch.channels_last), randn(2, 64, 56, 56)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_allocates_its_results_alone(name: str) -> None:
    """At its first call, which plans and compiles, at the second, and as a call like an earlier one."""
    fn, make = CALLS[name]
    f, args = wl.fuse(fn), make()
    for _ in range(3):
        nbytes, count, result = requested(lambda: f(*args))
        results = tensors_of(result)
        assert nbytes == sum(tensor.untyped_storage().nbytes() for tensor in results)
        assert count == len(results)
        del result, results


def test_the_reference_of_the_same_call_allocates_more() -> None:
    fn, make = CALLS["run"]
    args = make()
    nbytes, count, result = requested(lambda: wl.fuse(fn).reference(*args))
    assert nbytes > result.nbytes
    assert count > 1


def test_results_into_given_memory_and_in_place_allocate_nothing() -> None:
    f = wl.fuse(lambda x, b: torch.sigmoid(x + b) * 2)
    x, b, out = randn(1024, 1024), randn(1024), torch.empty(1024, 1024, dtype=torch.bfloat16, device=DEVICE)
    strided = torch.empty(1024, 2048, dtype=torch.bfloat16, device=DEVICE)[:, ::2]
    for _ in range(3):
        for target in (out, strided, x):
            assert requested(lambda target=target: f(x, b, out=target))[:2] == (0, 0)  # type: ignore[misc]


def test_random_numbers_cost_a_seed() -> None:
    f = wl.fuse(lambda x: F.dropout(x, 0.1))
    x = randn(1 << 20)
    for _ in range(3):
        nbytes, count, result = requested(lambda: f(x))
        assert result.nbytes < nbytes <= result.nbytes + SEED_BYTES
        assert count == 2
        del result


def test_gradients_are_all_that_a_backward_allocates() -> None:
    """Nothing is saved but the inputs: the forward allocates its result, the backward one gradient an input."""
    f = wl.fuse(lambda gate, up: F.silu(gate) * up)
    gate, up = (randn(1024, 1024).requires_grad_() for _ in range(2))
    grad = randn(1024, 1024)
    for _ in range(3):
        nbytes, count, result = requested(lambda: f(gate, up))
        assert (nbytes, count) == (result.nbytes, 1)
        nbytes, count, grads = requested(lambda result=result: torch.autograd.grad(result, (gate, up), grad))  # type: ignore[misc]
        assert (nbytes, count) == (sum(tensor.nbytes for tensor in grads), 2)
        del result, grads


def test_a_captured_call_allocates_its_result_alone() -> None:
    f = wl.fuse(lambda x, b: x + b)
    x, b = randn(1 << 20), randn(1 << 20)
    f(x, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = f(x, b)
    assert requested(graph.replay)[:2] == (0, 0)
    assert torch.equal(out, x + b)
