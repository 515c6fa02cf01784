"""Strides of every result against eager PyTorch: random compositions of ops over random layouts and dtypes."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wideload as wl
from wideload.errors import LayoutError
from wideload.expr import Apply, Const, Expr, Load
from wideload.ops_table import OPS, Op
from wideload.replay import NodeLayout, replay_layout
from wideload.trace import TensorArg, Traced, trace_function

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, boolean = torch.int8, torch.int32, torch.bool

NUM_COMPOSITIONS = 3000
SIZES = (1, 1, 2, 3, 3, 4, 0)
DTYPES = (f32, f32, f32, bf16, f16, f64, i32, i8, boolean)

Term = Callable[[list[Any]], Any]

UNARY: list[Callable[[Any], Any]] = [
    torch.abs, torch.exp, torch.relu, torch.sigmoid, torch.isnan, torch.sign, torch.clone, torch.zeros_like, torch.round,
    lambda x: x * 2, lambda x: 2.5 - x, lambda x: x == 1, lambda x: torch.where(x > 0, 1.0, 0.5), lambda x: -x,
    lambda x: x.half(), lambda x: x.float(), lambda x: x.to(i32), lambda x: x.double(), lambda x: torch.full_like(x, 3),
    lambda x: torch.where(x > 0, x, 0), lambda x: torch.nn.functional.silu(x), lambda x: torch.rsqrt(x), lambda x: x.sin(),
]  # fmt: skip
BINARY: list[Callable[[Any, Any], Any]] = [
    torch.add, torch.mul, torch.maximum, torch.div, torch.eq, torch.lt, torch.atan2, torch.logical_and, torch.pow, torch.fmod,
    lambda x, y: x + y, lambda x, y: x - y, lambda x, y: x // (y + 3), lambda x, y: torch.where(x > 0, x, y),
    lambda x, y: torch.clamp_min(x, y), lambda x, y: x.copysign(y), lambda x, y: x.xlogy(y), lambda x, y: x & y,
]  # fmt: skip
TERNARY: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, y, z: torch.where(x > 0, y, z), lambda x, y, z: torch.where(x, y, z), torch.clamp, torch.lerp,
]  # fmt: skip


def random_tensor(rng: random.Random, shape: tuple[int, ...]) -> torch.Tensor:
    """A view of any kind that broadcasts to ``shape``: dims dropped or of size 1, permuted, channels_last, stepped, padded, expanded."""
    shape = shape[rng.choice((0, 0, 0, 1, len(shape))) :]
    shape = tuple(1 if rng.random() < 0.15 else size for size in shape)
    dims = list(range(len(shape)))
    order = rng.choice((dims, dims, [0, 2, 3, 1] if len(dims) == 4 else dims[::-1], rng.sample(dims, len(dims))))
    has_gaps = rng.random() < 0.3
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step * (rng.choice((1, 1, 2)) if has_gaps else 1)
        step = strides[dim] * max(shape[dim], 1) + (rng.choice((0, 1)) if has_gaps else 0)
    strides = [0 if rng.random() < 0.06 else rng.choice((1, 5)) if size == 1 and rng.random() < 0.2 else stride
               for size, stride in zip(shape, strides, strict=True)]  # fmt: skip
    cells = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.ones(cells).to(rng.choice(DTYPES)).as_strided(shape, strides)


def random_term(rng: random.Random, num_operands: int, depth: int) -> Term:
    if depth == 0 or rng.random() < 0.15:
        index = rng.randrange(num_operands)
        return lambda xs: xs[index]
    arity, table = rng.choice(((1, UNARY), (2, BINARY), (2, BINARY), (3, TERNARY)))
    function: Any = rng.choice(table)
    terms = [random_term(rng, num_operands, depth - 1) for _ in range(arity)]
    return lambda xs: function(*(term(xs) for term in terms))


def trace(function: Callable[..., Any], tensors: list[torch.Tensor]) -> Traced:
    arguments = [TensorArg(f"x{i}", x.dtype, tuple(x.shape), x.device) for i, x in enumerate(tensors)]
    return trace_function(function, "random", (arguments,), {})


def replay(function: Callable[..., Any], tensors: list[torch.Tensor], device_type: str = "cpu") -> NodeLayout:
    traced = trace(function, tensors)
    layouts = replay_layout(traced.expr, [NodeLayout(tuple(x.shape), x.stride()) for x in tensors], device_type)
    return layouts[traced.expr.outputs[0]]


# ---- random compositions


@pytest.mark.parametrize("seed", range(6))
def test_random_compositions_have_the_strides_of_eager(seed: int) -> None:
    rng = random.Random(seed)
    compared = 0
    while compared < NUM_COMPOSITIONS // 6:
        shape = tuple(rng.choice(SIZES) for _ in range(rng.choice((1, 2, 3, 4, 4, 5))))
        tensors = [random_tensor(rng, shape) for _ in range(rng.choice((1, 2, 2, 3)))]
        term = random_term(rng, len(tensors), rng.choice((1, 1, 2, 3)))
        try:
            want = term(tensors)
        except (RuntimeError, TypeError, NotImplementedError):  # torch has no such op for these dtypes
            continue
        got = replay(term, tensors)
        described = [(x.dtype, tuple(x.shape), x.stride()) for x in tensors]
        assert got == NodeLayout(tuple(want.shape), want.stride()), f"{described}: {trace(term, tensors).expr}"
        compared += 1


# ---- each op of the table

PROBES = [
    ((2, 3, 4), (12, 4, 1)),
    ((3, 2), (1, 3)),
    ((2, 3, 2, 2), (12, 1, 6, 3)),
    ((2, 4), (5, 1)),
    ((2, 1), (1, 2)),
    ((1, 4), (1, 1)),
    ((2, 3, 1, 2), (6, 1, 7, 3)),
    ((1,), (0,)),
    ((2, 3), (0, 1)),
]
"""Shape and strides: packed in three orders, with gaps, and with the odd strides that dims of size 1 may have."""


SPELT = {"pow": "TT", "pow_number": "TN", "rpow": "NT", "float_power": "TT", "hardtanh": "TNN"}
"""Ops that are spelt with some kinds of operands alone."""
COMPOSED = ("isinf", "isfinite", "nextafter_bf16", "nextafter_f16", "huber")
"""torch, or the table, composes them of several ops; only the strides of dims of size 1 tell."""


def operand_kinds(op: Op) -> list[str]:
    """Which operands are tensors and which numbers: all combinations with a tensor, tensors alone where there is one operand."""
    if op.name in SPELT:
        return [SPELT[op.name]]
    return ["".join(kinds) for kinds in itertools.product("TN", repeat=len(op.operands)) if "T" in kinds]


@pytest.mark.parametrize("name", [name for name in OPS if name != "glu"])  # whose table function stacks its halves
def test_each_op_gives_the_strides_of_eager(name: str) -> None:
    op = OPS[name]
    compared = 0
    for kinds, dtype, (shape, strides) in itertools.product(operand_kinds(op), (f32, i32, boolean), PROBES):
        if (0 in strides and kinds.count("T") > 1) or ("channels_last" in name and len(shape) != 4 + name.endswith("3d")):
            continue
        cells = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        dtypes = [boolean if mark == "bool" else dtype for mark in op.types]
        tensors = [torch.ones(cells).to(d).as_strided(shape, strides) for d in dtypes]
        numbers = iter((-1, 1) if name == "hardtanh" else itertools.repeat(2))
        operands = [tensor if kind == "T" else next(numbers) for tensor, kind in zip(tensors, kinds, strict=True)]
        try:
            want = op.torch(*operands)
        except (RuntimeError, TypeError, NotImplementedError):
            continue
        nodes: list[Any] = [Load(i, f"x{i}", dtypes[i], len(shape)) if kind == "T" else Const(2) for i, kind in enumerate(kinds)]
        nodes.append(Apply(op, tuple(range(len(nodes))), want.dtype, len(shape)))
        expr = Expr(name, tuple(node for node in nodes if isinstance(node, Load)), tuple(nodes), (len(nodes) - 1,))
        got = replay_layout(expr, [NodeLayout(shape, strides)] * len(kinds), "cpu")[-1]
        if name in COMPOSED and 1 in shape:
            continue
        assert got == NodeLayout(tuple(want.shape), want.stride()), f"{kinds} {dtype} {shape} {strides}"
        compared += 1
    assert compared or name in ("imag", "channels_last_3d", "clone_channels_last_3d")  # of complex numbers, or of 5 dims alone


# ---- shapes, and the rules of one device alone


def test_nodes_have_shapes_and_numbers_have_none() -> None:
    x, y = torch.ones(3, 1), torch.ones(4)
    traced = trace(lambda xs: (xs[0] * 2 + xs[1]).to(f16), [x, y])
    layouts = replay_layout(traced.expr, [NodeLayout((3, 1), (1, 1)), NodeLayout((4,), (1,))], "cuda")
    assert [layout.shape for layout in layouts] == [(3, 1), (4,), (), (3, 1), (3, 4), (3, 4)]
    assert layouts[-1].strides == (4, 1)


def test_shapes_of_a_later_call_that_do_not_broadcast_are_refused() -> None:
    traced = trace(lambda xs: xs[0] + xs[1], [torch.ones(3), torch.ones(3)])
    with pytest.raises(LayoutError, match=r"\(3,\) and \(4,\) do not broadcast"):
        replay_layout(traced.expr, [NodeLayout((3,), (1,)), NodeLayout((4,), (1,))], "cpu")


STRETCHED = torch.ones(12, dtype=i8).as_strided((2, 3), (6, 0))
TALL = torch.ones(23, dtype=bf16).as_strided((2, 3), (2, 10))
"""STRETCHED does not say which of its dims is inner. Its copy in another dtype is row-major, and then decides; else TALL does."""


def test_only_the_cpu_converts_operands_of_another_dtype_first() -> None:
    def total(xs: list[Any]) -> Any:
        return xs[0] + xs[1]

    assert replay(total, [STRETCHED, TALL], "cpu").strides == (STRETCHED + TALL).stride() == (3, 1)
    assert replay(total, [STRETCHED, TALL], "cuda").strides == (1, 2)


def test_where_converts_first_on_every_device() -> None:
    def choose(xs: list[Any]) -> Any:
        return torch.where(xs[0], xs[1], xs[2])

    operands = [torch.tensor(True), STRETCHED, TALL]
    assert torch.where(*operands).stride() == (3, 1)
    assert replay(choose, operands, "cpu").strides == replay(choose, operands, "cuda").strides == (3, 1)


@pytest.mark.parametrize(
    ("name", "f", "shapes", "strides"),
    [
        ("cat", lambda a, b: torch.cat((a, b * 2), -1), [(2, 32, 4, 8)] * 2, [(1024, 1, 256, 32)] * 2),
        ("cat of two formats", lambda a, b: torch.cat((a, b * 2), -1), [(2, 32, 4, 8)] * 2, [(1024, 1, 256, 32), (1024, 32, 8, 1)]),
        ("cat in 3-D", lambda a, b: torch.cat((a, b), 2), [(2, 3, 4, 5, 6)] * 2, [(360, 1, 90, 18, 3)] * 2),
        ("stack", lambda a, b: torch.stack((a, b), -1), [(31, 1, 65)] * 2, [(65, 1, 1)] * 2),
        ("stack in front", lambda a, b: torch.stack((a, b * 2)), [(2, 3, 2, 5)] * 2, [(30, 1, 15, 3)] * 2),
        ("stack of one image", lambda a, b: torch.stack((a, b), 1), [(1, 3, 2, 5)] * 2, [(30, 1, 15, 3)] * 2),
        ("stack in 3-D", lambda a, b: torch.stack((a, b), -2), [(2, 3, 4, 5, 6)] * 2, [(360, 1, 90, 18, 3)] * 2),
        ("cat of one channel", lambda a, b: torch.cat((a, b), 0), [(3, 1, 4, 5)] * 2, [(20, 20, 5, 1)] * 2),
        ("in place", lambda a, b: (a + b).mul_(2).sub_(a), [(3, 2, 1, 1), (1, 2, 1, 1)], [(2, 1, 2, 2), (2, 1, 1, 1)]),
        ("in place of another dtype", lambda a, b: a.double().mul_(b).float(), [(3, 2, 1, 1), (1, 2, 1, 1)], [(2, 1, 2, 2), (2, 1, 1, 1)]),
    ],
)
def test_joined_and_stored_results_have_the_strides_that_torch_gives(name: str, f: Any, shapes: Any, strides: Any) -> None:
    tensors = [torch.zeros(4096).as_strided(shape, stride) for shape, stride in zip(shapes, strides, strict=True)]
    assert wl.fuse(f, name="f")(*tensors).stride() == f(*tensors).stride(), name
