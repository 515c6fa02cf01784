"""Views pushed to the operands and concatenations to the results: worked out by hand, and evaluated against torch on random functions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.expr import Apply, Cast, Joined, Load, Viewed
from wideload.promotion import operand_dtypes
from wideload.push import PushedExpr, PushedLoad, push_views
from wideload.reference import evaluate_expr
from wideload.replay import NodeLayout, replay_layout
from wideload.trace import TensorArg, trace_function
from wideload.views import View

f32, f64 = torch.float32, torch.float64


def push(function: Callable[..., Any], *tensors: torch.Tensor, out: NodeLayout | None = None) -> PushedExpr:
    """Traced and pushed, for new outputs or for one that is laid out as ``out``."""
    arguments = tuple(TensorArg(f"x{i}", x.dtype, tuple(x.shape), x.device) for i, x in enumerate(tensors))
    expr = trace_function(function, "f", arguments, {}).expr
    layouts = replay_layout(expr, [NodeLayout(tuple(x.shape), x.stride()) for x in tensors], "cuda")
    return push_views(expr, layouts, [(node, output, out or layouts[node]) for output, node in enumerate(expr.outputs)])


def evaluate_into(out: torch.Tensor, pushed: PushedExpr, *tensors: torch.Tensor) -> None:
    """What the kernels do, by torch: every element of ``out`` is written, and once."""
    reads = []
    for load in pushed.loads:
        x, view = tensors[load.operand], load.view
        reads.append(x.as_strided(view.shape, view.strides, x.storage_offset() + view.offset))
    values = evaluate_expr(pushed.expr, [store.node for store in pushed.stores], reads, (), numerics="eager")
    num_writes = torch.zeros_like(out)
    for store, value in zip(pushed.stores, values, strict=True):
        assert value.shape == store.view.shape
        out.as_strided(store.view.shape, store.view.strides, store.view.offset).copy_(value)
        num_writes.as_strided(store.view.shape, store.view.strides, store.view.offset).add_(1)
    assert torch.equal(num_writes, torch.ones_like(out))


def views(pushed: PushedExpr) -> list[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
    return [(load.operand, load.view.shape, load.view.strides, load.view.offset) for load in pushed.loads]


def targets(pushed: PushedExpr) -> list[tuple[int, tuple[int, ...], tuple[int, ...], int]]:
    return [(store.output, store.view.shape, store.view.strides, store.view.offset) for store in pushed.stores]


def ops(pushed: PushedExpr) -> list[str]:
    return [node.op.name if isinstance(node, Apply) else "cast" for node in pushed.expr.nodes if isinstance(node, Apply | Cast)]


X, Y = torch.arange(24.0).view(4, 6), torch.arange(6.0)


# ---- views


def test_without_views_an_expression_is_as_it_was() -> None:
    pushed = push(lambda x, y: x * 2 + y, X, Y)
    assert views(pushed) == [(0, (4, 6), (6, 1), 0), (1, (6,), (1,), 0)]
    assert targets(pushed) == [(0, (4, 6), (6, 1), 0)]
    assert ops(pushed) == ["mul", "add"]


def test_a_view_of_an_operand_is_its_load() -> None:
    pushed = push(lambda x: x.chunk(2, -1)[1] * 2, X)
    assert views(pushed) == [(0, (4, 3), (6, 1), 3)]
    assert views(push(lambda x: x.t()[1:, ::2] * 2, X)) == [(0, (5, 2), (1, 12), 1)]
    assert views(push(lambda x: x[2].unsqueeze(-1).expand(6, 3) * 2, X)) == [(0, (6, 3), (1, 0), 12)]
    turned = X.t()  # a view counts from the tensor that was given
    assert views(push(lambda x: x[2:, 1] * 2, turned)) == [(0, (4,), (1,), 2 + 6)]


def test_a_view_of_a_result_is_the_result_of_views() -> None:
    pushed = push(lambda x, y: (x * y).t()[1:3], X, Y)  # y is stretched to (4, 6), turned and cut as the product is
    assert views(pushed) == [(0, (2, 4), (1, 6), 1), (1, (2, 4), (1, 0), 1)]
    assert ops(pushed) == ["mul"]
    pushed = push(lambda x, y: (x.to(f64) * y)[0, 2:], X, Y)
    assert views(pushed) == [(0, (4,), (1,), 2), (1, (4,), (1,), 2)]
    assert ops(pushed) == ["cast", "mul"]


def test_views_of_views_of_results() -> None:
    pushed = push(lambda x, y: ((x[1:] + 1).t() * y[:, None])[::2], X, Y)
    assert views(pushed) == [(0, (3, 3), (2, 6), 6), (1, (3, 3), (2, 0), 0)]
    assert ops(pushed) == ["add", "mul"]


def test_constants_have_no_views() -> None:
    pushed = push(lambda x: (x * 3.0)[1], X)
    assert views(pushed) == [(0, (6,), (1,), 6)]


def test_equal_views_are_one_load_and_equal_steps_one_node() -> None:
    pushed = push(lambda x: (x[:, :3].exp() + 1, x.chunk(2, -1)[0].exp() * 2, x[:, 3:].exp()), X)
    assert views(pushed) == [(0, (4, 3), (6, 1), 0), (0, (4, 3), (6, 1), 3)]
    assert ops(pushed).count("exp") == 2
    pushed = push(lambda x: x.exp()[1] + x.exp()[1], X)
    assert (len(pushed.loads), ops(pushed)) == (1, ["exp", "add"])


def test_one_step_of_two_views_is_two_nodes() -> None:
    def halves(x: Any) -> Any:
        first, second = F.silu(x).chunk(2, -1)
        return first * second

    pushed = push(halves, X)
    assert views(pushed) == [(0, (4, 3), (6, 1), 0), (0, (4, 3), (6, 1), 3)]
    assert ops(pushed) == ["silu", "silu", "mul"]


# ---- concatenations


def test_a_concatenation_is_a_store_for_each_part() -> None:
    pushed = push(lambda x, y: torch.cat([x[:, 4:] * 2, x[:, :1], y.expand(4, 6)], -1), X, Y)
    assert targets(pushed) == [(0, (4, 2), (9, 1), 0), (0, (4, 1), (9, 1), 2), (0, (4, 6), (9, 1), 3)]
    assert views(pushed) == [(0, (4, 2), (6, 1), 4), (0, (4, 1), (6, 1), 0), (1, (4, 6), (0, 1), 0)]
    assert ops(pushed) == ["mul"]


def test_a_stack_is_a_concatenation_of_unsqueezed_parts() -> None:
    pushed = push(lambda x: torch.stack([x + 1, x], 1), X)
    assert targets(pushed) == [(0, (4, 1, 6), (12, 6, 1), 0), (0, (4, 1, 6), (12, 6, 1), 6)]
    assert views(pushed) == [(0, (4, 1, 6), (6, 6, 1), 0)]


def test_what_is_computed_of_a_concatenation_is_computed_part_by_part() -> None:
    """rotate_half as users paste it: the other operands are cut where the halves meet."""

    def rotated(x: Any, cos: Any) -> Any:
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1)

    pushed = push(rotated, X, Y)
    assert targets(pushed) == [(0, (4, 3), (6, 1), 0), (0, (4, 3), (6, 1), 3)]
    assert views(pushed) == [(0, (4, 3), (6, 1), 0), (1, (3,), (1,), 0), (0, (4, 3), (6, 1), 3), (1, (3,), (1,), 3)]
    assert ops(pushed) == ["mul", "neg", "add", "mul", "add"]


def test_concatenations_along_two_dims_cut_the_result_in_four() -> None:
    pushed = push(lambda x: torch.cat([x[:2], x[1:3]], 0) + torch.cat([x[:, :2], x[:, :4]], 1), X)
    assert targets(pushed) == [(0, (2, 2), (6, 1), 0), (0, (2, 4), (6, 1), 2), (0, (2, 2), (6, 1), 12), (0, (2, 4), (6, 1), 14)]


def test_concatenations_that_meet_at_other_places_cut_the_result_in_three() -> None:
    pushed = push(lambda x, y: torch.cat([y[:2], y[:4]]) * torch.cat([y[:5], y[:1]]), X, Y)
    assert targets(pushed) == [(0, (2,), (1,), 0), (0, (3,), (1,), 2), (0, (1,), (1,), 5)]


def test_a_concatenation_inside_a_concatenation() -> None:
    pushed = push(lambda x, y: torch.cat([y[:1], torch.cat([y[:2], y[3:]])]), X, Y)
    assert targets(pushed) == [(0, (1,), (1,), 0), (0, (2,), (1,), 1), (0, (3,), (1,), 3)]
    assert views(pushed) == [(1, (1,), (1,), 0), (1, (2,), (1,), 0), (1, (3,), (1,), 3)]


def test_the_stores_follow_the_layout_of_the_output() -> None:
    pushed = push(lambda x: torch.cat([x, x * 2], 1), X, out=NodeLayout((4, 12), (1, 5)))
    assert targets(pushed) == [(0, (4, 6), (1, 5), 0), (0, (4, 6), (1, 5), 30)]


def test_an_operand_without_elements_is_no_part() -> None:
    pushed = push(lambda x: torch.cat([x[:, :0], x, x[:, 6:] + 1], 1), X)
    assert targets(pushed) == [(0, (4, 6), (6, 1), 0)]
    assert ops(pushed) == []


@pytest.mark.parametrize("function", [lambda x: torch.cat([x[:, :0], x[:, 6:]], 1), lambda x: torch.cat([x[:0], x[:0] * 2]) + 1])
def test_a_concatenation_of_nothing_is_nothing(function: Callable[..., Any]) -> None:
    assert all(0 in shape for _, shape, _, _ in targets(push(function, X)))
    assert wl.fuse(function).plan(X, target="sm_90").kernels == ()


def test_a_flattened_stack_is_two_strided_stores() -> None:
    """Interleaved rotary embedding: pairs of neighbours are read with stride 2, and written with stride 2."""

    def rotated(x: Any, y: Any) -> Any:
        first, second = x[..., ::2], x[..., 1::2]
        return torch.stack((first * y - second, first + second * y), -1).flatten(-2)

    pushed = push(rotated, X, torch.arange(3.0))
    assert [(shape, strides[:2], offset) for _, shape, strides, offset in targets(pushed)] == [
        ((4, 3, 1), (6, 2), 0),
        ((4, 3, 1), (6, 2), 1),
    ]
    assert {(operand, strides[:2], offset) for operand, _, strides, offset in views(pushed)} == {
        (0, (6, 2), 0),
        (0, (6, 2), 1),
        (1, (0, 1), 0),
    }


def test_what_is_computed_of_a_flattened_stack_is_computed_part_by_part() -> None:
    """The paste of GPT-J: the other operands are read with stride 2 as well."""
    pushed = push(lambda x, y: x * y + torch.stack((-x[:, 1::2], x[:, ::2]), -1).flatten(-2), X, Y)
    assert [(shape, offset) for _, shape, _, offset in targets(pushed)] == [((4, 3, 1), 0), ((4, 3, 1), 1)]
    assert {(operand, strides[:2], offset) for operand, _, strides, offset in views(pushed)} == {
        *((0, (6, 2), offset) for offset in (0, 1)),
        *((1, (0, 2), offset) for offset in (0, 1)),
    }
    assert ops(pushed) == ["mul", "neg", "add", "mul", "add"]


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (lambda x: torch.cat([x, x * 2])[1:], [(3, 6), (4, 6)]),
        (lambda x: torch.cat([x, x * 2])[1::3] + 1, [(1, 6), (2, 6)]),
        (lambda x: torch.cat([x, x * 2])[5] * x, [(4, 6)]),
        (lambda x: torch.cat([x, x * 2], 1).t() * 2, [(6, 4), (6, 4)]),
        (lambda x: torch.cat([x, x * 2], 1).unflatten(1, (4, 3)) * 2, [(4, 2, 3), (4, 2, 3)]),
        (lambda x: torch.cat([x, x * 2], 1).unsqueeze(0).expand(3, 4, 12) * 1, [(3, 4, 6), (3, 4, 6)]),
        (lambda x: torch.cat([torch.stack([x, -x], -1).flatten(-2), x[:, 1:]], 1), [(4, 6, 1), (4, 6, 1), (4, 5)]),
        (lambda x: torch.stack([x, x + 1]).flatten(), [(24,), (24,)]),
        (lambda x: torch.cat([x[:0], x])[2:] * 1, [(2, 6)]),
    ],
)
def test_views_of_concatenations_are_views_of_their_parts(function: Callable[..., Any], parts: list[tuple[int, ...]]) -> None:
    want = function(X)
    out = torch.empty(want.shape)
    pushed = push(function, X, out=NodeLayout(tuple(out.shape), out.stride()))
    assert [math.prod(shape) for _, shape, _, _ in targets(pushed)] == [math.prod(shape) for shape in parts]
    evaluate_into(out, pushed, X)
    assert torch.equal(out, want)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat([x, x + 1]).diagonal() * 2,
        lambda x: torch.cat([x, x + 1], 1).unflatten(1, (3, 4)) * 2,
        lambda x: torch.stack([x, x + 1], -1).flatten()[1:7] * 1,
    ],
    ids=["along two dims", "windows across the edge", "from the middle of a pair"],
)
def test_a_view_of_a_concatenation_that_no_part_gives_is_refused_with_the_line(function: Callable[..., Any]) -> None:
    with pytest.raises(wl.LayoutError, match=r"a view of a concatenation \(at .*test_push\.py:\d+: .*Take the view of its parts"):
        push(function, X)


# ---- against torch


def test_loads_carry_the_name_and_the_dtype_of_their_operand() -> None:
    pushed = push(lambda x, y: x[0] + y, X.to(f64), Y)
    first, second = pushed.expr.operands
    assert (first.name, first.dtype, second.name, second.dtype) == ("x0", f64, "x1", f32)
    assert all(isinstance(node, Load) for node in pushed.expr.operands)
    assert pushed.loads[0] == PushedLoad(0, View((6,), (1,), 0))


@pytest.mark.parametrize(
    "function",
    [lambda x, y: (x.to(f32) == y.to(f64)[0])[0], lambda x, y: (x * 1)[0] == y],
    ids=["a view of a comparison", "a comparison with a view"],
)
def test_a_pushed_view_leaves_the_dtype_that_a_comparison_computes_in(function: Callable[..., Any]) -> None:
    """fp64 without dims beside fp32 with dims is compared in fp32, as torch does: 0.1 is then equal to itself in both."""
    x, y = torch.tensor([0.1, 1.0], dtype=f64), torch.tensor([0.1, 1.0])
    pushed = push(function, x, y)
    (compared,) = (node for node in pushed.expr.nodes if isinstance(node, Apply) and node.op.name == "eq")
    assert operand_dtypes(pushed.expr.nodes, compared) == (f32, f32)


STEPS: list[Callable[[Any, random.Random], Any]] = [
    lambda x, rng: x * 2 + 1,
    lambda x, rng: x.t(),
    lambda x, rng: x[rng.randrange(x.shape[0]) :],
    lambda x, rng: x[:, :: rng.randint(1, 2)],
    lambda x, rng: x.chunk(2, 0)[0] - 1,
    lambda x, rng: x[:1].expand(3, -1),
    lambda x, rng: x + x[0],
    lambda x, rng: x * x[:, :1],
    lambda x, rng: x[:, -1:] - x[0:1],
    lambda x, rng: x.unsqueeze(0).squeeze(0) * 3,
    lambda x, rng: x.to(torch.float64).flatten(0, 0),
    lambda x, rng: x.unfold(1, 1, 1).squeeze(-1),
]
JOINS: list[Callable[[Any, random.Random], Any]] = [
    lambda x, rng: torch.cat([x, -x], rng.randint(0, 1)),
    lambda x, rng: torch.stack([x, x + x[0]], rng.randint(0, 2)),
    lambda x, rng: torch.cat([x, x], 1) * torch.cat([x[:, :1], x, x[:, 1:]], 1),
    lambda x, rng: torch.cat([x, x * 2], 0) + x[0],
    lambda x, rng: torch.where(torch.cat([x, -x], 1) > 0, torch.cat([-x, x * 2], 1), 0.5),
]


@pytest.mark.parametrize("seed", range(120))
def test_random_functions_of_views_are_as_in_torch(seed: int) -> None:
    rng = random.Random(seed)
    chosen = [rng.choice(STEPS) for _ in range(rng.randint(1, 5))] + ([rng.choice(JOINS)] if rng.random() < 0.6 else [])
    state = rng.getstate()
    store = torch.randn(200, generator=torch.Generator().manual_seed(seed))
    x = rng.choice([store[:24].view(4, 6), store[5:29].view(6, 4).t(), store[3:99].view(8, 12)[1::2, 2:8], store[:6].expand(4, 6)])

    def run(x: Any) -> Any:
        rng.setstate(state)
        for step in chosen:
            x = step(x, rng)
        return x * 1

    want = run(x)
    out = torch.empty(want.shape, dtype=want.dtype)
    pushed = push(run, x, out=NodeLayout(tuple(out.shape), out.stride()))
    assert not any(isinstance(node, Viewed | Joined) for node in pushed.expr.nodes)
    evaluate_into(out, pushed, x)
    assert torch.equal(out, want)


VIEWS_OF_JOINS: list[Callable[[Any, random.Random], Any]] = [
    *(lambda x, rng: x.flatten(), lambda x, rng: x.transpose(0, -1), lambda x, rng: x.flatten(-2) if x.ndim > 1 else x),
    *(lambda x, rng: x[..., rng.randint(0, 2) :], lambda x, rng: x[::2], lambda x, rng: x[0] if x.ndim > 1 else x),
    *(lambda x, rng: x.unflatten(-1, (-1, 1)), lambda x, rng: x.unsqueeze(0).expand(2, *x.shape), lambda x, rng: x * x[..., :1]),
    *(lambda x, rng: torch.stack([x, -x], -1), lambda x, rng: torch.cat([x, x * 3]), lambda x, rng: torch.cat([x[..., 1:], x], -1)),
    *(lambda x, rng: x + torch.stack([x, x * 5], -1)[..., rng.randint(0, 1)], lambda x, rng: x * 2 + 1),
]


def test_random_views_of_concatenations_are_as_in_torch() -> None:
    """Most are views of the parts; the others are refused."""
    num_fused, refusals = 0, []
    for seed in range(400):
        rng = random.Random(seed)
        chosen = [rng.choice(JOINS[:2]), *(rng.choice(VIEWS_OF_JOINS) for _ in range(rng.randint(1, 4)))]
        state = rng.getstate()

        def run(x: Any, rng: random.Random = rng, state: Any = state, chosen: Any = chosen) -> Any:
            rng.setstate(state)
            for step in chosen:
                x = step(x, rng)
            return x * 1

        want = run(X)
        if not want.numel():
            continue
        out = torch.empty(want.shape)
        try:
            pushed = push(run, X, out=NodeLayout(tuple(out.shape), out.stride()))
        except wl.LayoutError as error:
            refusals.append(str(error))
            continue
        evaluate_into(out, pushed, X)
        assert torch.equal(out, want), seed
        num_fused += 1
    assert num_fused > 300
    assert all("a view of a concatenation" in refusal or "flatten" in refusal for refusal in refusals)
