"""Fused functions under torch.compile, torch.export, fake tensors and tracers: results, gradients, layouts, and how often is compiled."""

from __future__ import annotations

import collections
import dataclasses
import enum
import gc
import itertools
import subprocess
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import wideload as wl
from wideload import torch_library, torch_op
from wideload.reference import evaluate_expr
from wideload.shortcut import find_likeness
from wideload.torch_op import DifferentiableOp

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own, of its tracers
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

BACKENDS = ["eager", "aot_eager", "inductor"]

bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64


@wl.fuse
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


@wl.fuse
def residual(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


@wl.fuse
def affine(x: torch.Tensor, shift: Any, scale: float = 2.0, *, mode: str = "mul", dtype: torch.dtype | None = None) -> torch.Tensor:
    y = x * scale if mode == "mul" else x / scale
    y = y if shift is None else y + shift
    return y if dtype is None else y.to(dtype)


@wl.fuse
def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@wl.fuse
def drop(x: torch.Tensor, p: float) -> torch.Tensor:
    return F.dropout(x, p)


@wl.fuse
def several(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"sum": x + y, "rest": [x * y, (x, "text")]}


@wl.fuse(static="n")
def power(x: torch.Tensor, n: int) -> torch.Tensor:
    result = x
    for _ in range(n):
        result = result * x
    return result


@wl.fuse
def mean_scaled(x: torch.Tensor) -> torch.Tensor:
    return x / x.shape[-1]


turned_twice = wl.fuse(lambda x: x.t() * 2)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def gradients(fn: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradients of all inputs under an incoming gradient that is no constant."""
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_() for tensor in tensors]
    result = fn(*leaves)
    weights = torch.arange(result.numel(), dtype=result.dtype).view(result.shape).cos()
    return [result.detach(), *torch.autograd.grad(result, leaves, weights)]


def assert_same(have: Any, want: Any) -> None:
    torch.testing.assert_close(have, want, rtol=0, atol=0, equal_nan=True, check_stride=True)


def operators(run: Callable[[], Any]) -> list[tuple[torch._ops.OpOverload, tuple[Any, ...]]]:
    """The operators of ours that ``run`` meets, with their arguments."""
    met = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == torch_library.NAMESPACE:
                met.append((func, args))
            return func(*args, **(kwargs or {}))

    with Recorder():
        run()
    return met


def count_compiles(fn: Callable[..., Any], backend: str, **options: Any) -> tuple[Callable[..., Any], CompileCounterWithBackend]:
    counter = CompileCounterWithBackend(backend)
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


# ---- torch.compile


class Block(torch.nn.Module):
    """Three fused functions between torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = torch.nn.Linear(16, 64), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        h = swiglu(*self.wide(rope(x, cos, sin)).chunk(2, -1))
        return residual(self.narrow(h), x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_block_compiles_whole_and_trains_alike(backend: str) -> None:
    torch.manual_seed(0)
    block, x = Block(), torch.randn(3, 16)
    cos, sin = torch.randn(2, 3, 8)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    want = block(x, cos, sin)
    torch.testing.assert_close(compiled(x, cos, sin), want)
    want.square().sum().backward()
    grads = [parameter.grad.clone() for parameter in block.parameters()]
    block.zero_grad()
    compiled(x, cos, sin).square().sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in block.parameters()], grads)


def test_there_is_no_graph_break() -> None:
    explained = torch._dynamo.explain(Block())(torch.randn(3, 16), *torch.randn(2, 3, 8))
    assert (explained.graph_break_count, explained.graph_count) == (0, 1)
    called = [str(node.target) for node in explained.graphs[0].graph.nodes if torch_library.NAMESPACE in str(node.target)]
    assert [name.split("_")[-4] for name in called] == ["rope", "swiglu", "residual"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (swiglu, [(4, 6), (6,)]),
        (residual, [(4, 6), (4, 1)]),
        (lambda x: residual(x, x), [(4, 6)]),
        (lambda x, y: affine(x, shift=y, scale=0.5, mode="div"), [(4, 6), (4, 6)]),
        (lambda x: affine(x, None), [(4, 6)]),
        (rope, [(2, 3, 8), (3, 4), (3, 4)]),
        (lambda x: power(x, 3), [(5,)]),
        (mean_scaled, [(5, 7)]),
        (lambda x, y: several(x, y)["rest"][0], [(5, 7), (7,)]),
        (turned_twice, [(3, 5)]),
        (swiglu, [(0, 6), (6,)]),
    ],
)
def test_compiled_is_eager_with_gradients(fn: Callable[..., Any], shapes: list[tuple[int, ...]], backend: str) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(shape) for shape in shapes]
    want = gradients(fn, *tensors)
    assert_same(gradients(torch.compile(fn, fullgraph=True, backend=backend), *tensors), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_structure_of_results_comes_back(backend: str) -> None:
    x, y = torch.randn(2, 5)
    have, want = torch.compile(lambda x, y: several(x, y), fullgraph=True, backend=backend)(x, y), several(x, y)
    assert_same(have["sum"], want["sum"])
    assert_same(have["rest"][0], want["rest"][0])
    given, text = have["rest"][1]
    assert (given.data_ptr(), text) == (x.data_ptr(), "text")  # an argument that is returned is that argument


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_numbers_compile_nothing(backend: str) -> None:
    x = torch.randn(5)
    compiled, counter = count_compiles(lambda x, scale: affine(x, None, scale), backend)
    for scale in (2.0, 3.0, 4.5, float("inf"), -0.0):
        assert_same(compiled(x, scale), affine(x, None, scale))
    assert counter.frame_count == 2  # the first as a constant, then any


@pytest.mark.parametrize("backend", BACKENDS)
def test_new_sizes_compile_nothing(backend: str) -> None:
    def fn(x: torch.Tensor, cos: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return swiglu(rope(x, cos, cos), bias) + residual(x, bias)

    compiled, counter = count_compiles(fn, backend, dynamic=True)
    for batch, length in ((2, 3), (5, 7), (9, 4)):
        tensors = [torch.randn(batch, length, 8), torch.randn(length, 4), torch.randn(8)]
        want = gradients(fn, *tensors)
        torch.testing.assert_close(gradients(compiled, *tensors), want, check_stride=True)
    assert counter.frame_count == 1


def test_sizes_that_the_function_reads_are_part_of_what_is_compiled() -> None:
    compiled, counter = count_compiles(lambda x: mean_scaled(x), "aot_eager", dynamic=True)
    for size in (3, 5, 3):
        assert_same(compiled(torch.ones(2, size)), torch.full((2, size), 1 / size))
    assert counter.frame_count == 2


def test_a_captured_value_is_read_at_each_call() -> None:
    global FACTOR, WIDE
    FACTOR, WIDE = 3.0, torch.float64
    scaled, cast = wl.fuse(lambda x: x * FACTOR), wl.fuse(lambda x: x.to(WIDE))
    x = torch.ones(3)
    compiled = torch.compile(lambda x: scaled(x), fullgraph=True, backend="inductor")
    compiled_cast = torch.compile(lambda x: cast(x), fullgraph=True, backend="inductor")
    assert_same(compiled(x), torch.full((3,), 3.0))
    assert_same(compiled_cast(x), x.double())
    FACTOR, WIDE = 5.0, torch.bfloat16
    assert_same(compiled(x), torch.full((3,), 5.0))
    with pytest.raises(wl.TraceError, match=r"other results than when it was compiled.*reset"):
        compiled_cast(x)


FACTOR, WIDE = 3.0, torch.float64


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grows by one for each call that is bound to parameters and traced."""
    found: list[Any] = []
    bind = wl.FusedFunction._bind
    monkeypatch.setattr(wl.FusedFunction, "_bind", lambda f, args, kwargs: found.append(args) or bind(f, args, kwargs))
    return found


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, either: str) -> list[Any]:
    """Tensors of the CPU are launched for as a GPU's are, torch's operators in the place of kernels. Grows by one a launch."""
    log: list[Any] = []
    form_of = DifferentiableOp._form

    def form(op: DifferentiableOp, tensors: Sequence[torch.Tensor], *rest: Any) -> Any:
        found = form_of(op, tensors, *rest)
        if isinstance(found, str) or not found.outputs:
            return found

        def launch(operands: Sequence[torch.Tensor], numbers: tuple[Any, ...]) -> Sequence[torch.Tensor]:
            log.append(operands)
            if not op.sums_rows:
                return found.run(operands, numbers, None)
            values = evaluate_expr(op.expr, [output.node for output in found.outputs], operands, numbers, numerics=op.numerics)
            results = zip(values, found.outputs, strict=True)
            return [value if of.parts is None else value.sum(0).to(of.dtype) for value, of in results]

        return dataclasses.replace(found, launch=launch, likeness=find_likeness(tensors))

    monkeypatch.setattr(DifferentiableOp, "_form", form)
    return log


def fresh(function: Callable[..., Any]) -> wl.FusedFunction:
    """The function fused, with operators of its own also where a test has run before with another way to launch."""
    function.__qualname__ += f"_{next(NUMBERS)}"
    return wl.fuse(function, name="f")


NUMBERS = itertools.count()


def operator_of(f: wl.FusedFunction, kinds: str, results: int = 1) -> Callable[..., Any]:
    return getattr(torch.ops.wideload, f"{torch_library.base_of(f)}_{kinds}_{results}")  # type: ignore[no-any-return]


def test_a_call_like_an_earlier_one_is_launched_at_once(bound: list[Any], launched: list[Any]) -> None:
    """Whatever the order of the operands, the numbers, and the layouts that come in turn; captured values are read at each call."""
    global FACTOR
    FACTOR = 2.0
    f = fresh(lambda x, y, scale, shift: (x - y) * FACTOR / scale + shift)
    operator = operator_of(f, "tftf")
    x, y = torch.tensor([[1.0, -2.0], [3.0, 4.0]]), torch.tensor([5.0, 6.0])
    for one, other, scale, factor, is_new in (
        (x, y, 2.0, 2.0, True), (x, y, 2.0, 2.0, False), (x + 1, y + 3, 3.0, 2.0, False), (x.t(), y, 2.0, 2.0, True),
        (x, y, 4.0, 2.0, False), (x.t(), y, -2.0, 2.0, False), (x, y, 0.0, 2.0, False), (x, y, -0.0, 2.0, False),
        (x.repeat(2, 1), y, 2.0, 2.0, True), (x[1:], y, 2.0, 2.0, True), (x.double(), y, 2.0, 2.0, True), (x, y, 2.0, 2.0, False),
        (x, y, 2.0, 3.0, True), (x, y, 5.0, 3.0, False), (x, x, 2.0, 3.0, True), (x, x + 1, 2.0, 3.0, True), (x, x + 2, 2.0, 3.0, False),
    ):  # fmt: skip
        FACTOR = factor
        bound.clear(), launched.clear()
        assert_same(operator(other, 7.0, one, scale, "(_2, shift=_1, y=_0, scale=_3)"), (one - other) * factor / scale + 7)
        assert (bool(bound), len(launched)) == (is_new, 1)


def test_calls_that_differ_in_what_is_spelt_are_launched_at_once(bound: list[Any], launched: list[Any]) -> None:
    """However many there are, as of layers that each have a mode of their own."""
    operator, x = operator_of(fresh(lambda x, mode: x + len(mode)), "t"), torch.tensor([1.0, 2.0])
    for is_new in (True, False):
        for length in range(8):
            bound.clear()
            assert_same(operator(x, f"(_0, '{length * 's'}')"), x + length)
            assert bool(bound) is is_new


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_gradients_of_a_call_like_an_earlier_one_are_launched_at_once(backend: str, bound: list[Any], launched: list[Any]) -> None:
    f = fresh(lambda gate, up: F.silu(gate) * up)
    run = torch.compile(lambda x, y: f(up=y, gate=x), fullgraph=True, backend=backend)
    x, y, grad = (torch.randn(3, 5, dtype=f64) for _ in range(3))
    for step in range(4):
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x + step, y)]
        bound.clear(), launched.clear()
        got = torch.autograd.grad(run(*leaves), leaves, grad)
        want = torch.autograd.grad(F.silu(leaves[0]) * leaves[1], leaves, grad)
        torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
        assert len(launched) == 2
        assert step < 2 or not bound  # the first is made while torch compiles, in another state


def test_gradients_of_operands_that_are_not_read(bound: list[Any], launched: list[Any]) -> None:
    """Their sizes, strides and dtypes tell calls apart, as the text of the call and tensors do."""
    f = fresh(lambda x, y, s: x * s + y.float())
    name = f"{torch_library.base_of(f)}_ttf_1"
    operator = getattr(torch.ops.wideload, torch_library.registered(f"{name}_backward_mmf_110_1"))
    grad = torch.randn(4, 6)
    for strides, dtype, s, is_new in (
        ([6, 1], bf16, 2.0, True), ([6, 1], bf16, 3.0, False), ([1, 4], bf16, 3.0, True), ([6, 1], torch.float16, 3.0, True),
        ([6, 1], bf16, 4.0, False), ([1, 4], bf16, 5.0, False),
    ):  # fmt: skip
        bound.clear(), launched.clear()
        of_x, of_y = operator([4, 6], strides, f32, [4, 6], [6, 1], dtype, s, grad, "(_0, _1, _2)")
        assert_same(of_x, torch.empty_strided((4, 6), strides).copy_(grad * s))
        assert_same(of_y, grad.to(dtype))
        assert (bool(bound), len(launched)) == (is_new, 1)


def test_gradients_that_take_more_than_a_launch(bound: list[Any], launched: list[Any]) -> None:
    """Sums, one result for two operands, zeros: by the long way each time, in memory of their own."""
    same, zero = fresh(lambda x, y: (x + y) * 2), fresh(lambda x, y: torch.floor(x) + y * 2)
    grad = torch.randn(4, 6)
    for f, shape, of_x, of_y in (
        (same, [4, 6], grad * 2, grad * 2),
        (same, [1, 6], grad * 2, (grad * 2).sum(0, keepdim=True)),
        (zero, [4, 6], torch.zeros(4, 6), grad * 2),
    ):
        name = torch_library.registered(f"{torch_library.base_of(f)}_tt_1_backward_mm_11_1")
        for _ in range(2):
            bound.clear()
            have = getattr(torch.ops.wideload, name)([4, 6], [6, 1], f32, shape, [6, 1], f32, grad, "(_0, _1)")
            torch.testing.assert_close(have, (of_x, of_y))
            assert len({tensor.data_ptr() for tensor in (*have, grad)}) == 3
            assert bound


def test_sums_of_rows_are_launched_at_once(bound: list[Any], launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the kernels add them up; the parts that they leave behind are no result."""
    monkeypatch.setattr(torch_op, "has_kernels", lambda device: True)
    monkeypatch.setattr(DifferentiableOp, "_plans", lambda *_: ())
    f = fresh(lambda x, bias: F.silu(x + bias))
    run = torch.compile(lambda x, bias: f(x, bias), fullgraph=True, backend="aot_eager")
    for step in range(4):
        leaves = [torch.randn(shape, dtype=f64, requires_grad=True) for shape in ((40, 6), (6,))]
        bound.clear(), launched.clear()
        got = torch.autograd.grad(run(*leaves).cos().sum(), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(F.silu(leaves[0] + leaves[1]).cos().sum(), leaves), rtol=1e-13, atol=1e-13)
        assert len(launched) == 2
        assert step < 2 or not bound


def test_draws_and_changing_numbers_are_launched_at_once(bound: list[Any], launched: list[Any]) -> None:
    x = torch.ones(64, requires_grad=True)
    f = fresh(lambda x, s: F.dropout(x, 0.5) * s)
    compiled = torch.compile(lambda x, s: f(x, s), fullgraph=True, backend="aot_eager")
    for step, s in enumerate((1.0, 2.5, 3.5, 4.5, 5.5)):
        bound.clear()
        torch.manual_seed(step)
        have = compiled(x, s)
        (grad,) = torch.autograd.grad(have.sum(), x)
        assert step < 3 or not bound
        torch.manual_seed(step)
        assert_same(have.detach(), noisy(x.detach(), s))
        assert_same(grad, have.detach())  # of ones, with the mask that was drawn


def test_what_a_function_defaults_to_and_torchs_default_dtype(bound: list[Any], launched: list[Any]) -> None:
    def f(x: torch.Tensor, s: float = 2.0, *, shift: float = 0.0) -> torch.Tensor:
        return x * s + shift + torch.asin(torch.zeros_like(x, dtype=torch.int32))  # of ints in the default dtype

    operator, x = operator_of(fresh(f), "t"), torch.ones(3, dtype=bf16)
    for s, dtype, is_new in ((2.0, f32, True), (2.0, f32, False), (3.0, f32, True), (3.0, f64, True), (3.0, f32, False)):
        f.__defaults__ = (s,) if f.__defaults__ != (s,) else f.__defaults__
        torch.set_default_dtype(dtype)
        bound.clear()
        try:
            assert_same(operator(x, "(_0)"), torch.full((3,), s, dtype=dtype))
        finally:
            torch.set_default_dtype(f32)
        assert bool(bound) == is_new
    assert f.__kwdefaults__ is not None
    f.__kwdefaults__["shift"] = 4.0  # in place
    assert_same(operator(x, "(_0)"), torch.full((3,), 7.0))


def test_what_looks_into_a_call_or_records_it_sees_it(launched: list[Any]) -> None:
    """Also where it is like an earlier one that was launched at once."""
    operator = operator_of(fresh(lambda x, y: x * y), "tt")
    x, y = torch.randn(2, 3, 4).unbind()
    for given in ((x, y), (x.t(), y.t()), (x, y)):
        operator(*given, "(_0, _1)")
    assert len(operators(lambda: operator(x, y, "(_0, _1)"))) == 1
    graph = make_fx(lambda x, y: operator(x, y, "(_0, _1)"), tracing_mode="symbolic")(x, y)
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [operator.default]
    leaf = x.clone().requires_grad_()
    for is_enabled in (True, False, True):
        with torch.set_grad_enabled(is_enabled):
            result = operator(leaf, y, "(_0, _1)")
        assert result.requires_grad is is_enabled
    assert_same(torch.autograd.grad(result.sum(), leaf), (y,))


def test_what_is_compiled_passes_autograd(launched: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is recorded in compiled code: no call goes the way of recorded ones."""
    recorded: list[Any] = []
    passing = torch_library._passing

    class Recording:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def call_boxed(self, keys: Any, *arguments: Any) -> Any:
            recorded.append(arguments)
            return self.kernel.call_boxed(keys, *arguments)

    monkeypatch.setattr(torch_library, "_passing", lambda name, operator, kernel: passing(name, operator, Recording(kernel)))
    f = fresh(lambda x, y: F.silu(x) * y)
    run = torch.compile(lambda x, y: f(x, y), fullgraph=True, backend="aot_eager")
    leaves = [tensor.requires_grad_() for tensor in torch.randn(2, 3, 4).unbind()]
    torch.autograd.grad(run(*leaves).sum(), leaves)
    assert recorded  # by the tracer
    recorded.clear(), launched.clear()
    torch.autograd.grad(run(*leaves).sum(), leaves)
    assert (recorded, len(launched)) == ([], 2)


def test_dtypes_that_are_promised_later(launched: list[Any]) -> None:
    global WIDE
    WIDE = f64
    operator, x = operator_of(fresh(lambda x: x.to(WIDE)), "t"), torch.ones(3)
    for _ in range(2):
        assert operator(x, "(_0)").dtype == f64
    WIDE = bf16
    with FakeTensorMode() as mode:
        assert operator(mode.from_tensor(x), "(_0)").dtype == bf16  # what another graph is compiled with
    WIDE = f64
    with pytest.raises(wl.TraceError, match="other results than when it was compiled"):
        operator(x, "(_0)")


def test_shortcuts_keep_no_object_alive(launched: list[Any]) -> None:
    model, x = Scaled(2.0), torch.ones(5)
    operator = operator_of(model.act, "tt")
    for _ in range(2):
        assert_same(operator(x, x + 1, "(_0, _1)"), x * 2 + x + 1)
    assert len(launched) == 2
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    with pytest.raises(wl.TraceError, match="the object whose method"):
        operator(x, x + 1, "(_0, _1)")


class Scaled(torch.nn.Module):
    def __init__(self, alpha: float) -> None:
        super().__init__()
        self.alpha, self.weight = alpha, torch.nn.Parameter(torch.ones(5))

    @wl.fuse
    def act(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * self.alpha + y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x, y=self.weight)


@pytest.mark.parametrize("backend", BACKENDS)
def test_methods_belong_to_their_object(backend: str) -> None:
    x = torch.arange(5.0)
    model = torch.nn.Sequential(Scaled(2.0), Scaled(3.0))
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_same(compiled(x).detach(), (x * 2 + 1) * 3 + 1)
    model[0].alpha = 4.0
    assert_same(compiled(x).detach(), (x * 4 + 1) * 3 + 1)
    compiled(x).sum().backward()
    assert_same(model[0].weight.grad, torch.full((5,), 3.0))
    one = torch.compile(Scaled.forward, fullgraph=True, backend=backend)  # one code, two objects
    assert [float(one(Scaled(alpha), x)[1].detach()) for alpha in (2.0, 3.0)] == [3.0, 4.0]


class Held(torch.nn.Module):
    """Fused functions where models keep them."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.plain = swiglu, types.SimpleNamespace(act=swiglu)
        self.named, self.listed = {"act": swiglu}, [swiglu]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.act(x, y) + self.plain.act(x, y) + self.named["act"](x, y) + self.listed[0](x, y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_attributes_of_objects_are_found(backend: str) -> None:
    x, y = torch.randn(2, 5).unbind()
    torch.testing.assert_close(torch.compile(Held(), fullgraph=True, backend=backend)(x, y), 4 * F.silu(x) * y)


class Scaling:
    """Fused functions where classes keep them."""

    act = swiglu
    rate = 3.0

    @wl.fuse
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate

    @classmethod
    @wl.fuse
    def of_class(cls, x: torch.Tensor) -> torch.Tensor:
        return x * cls.rate


class Slotted:
    __slots__ = ("rate",)

    @wl.fuse
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.rate


class Faster(Scaling):
    rate = 5.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return super().scaled(x) + 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_functions_in_the_body_of_a_class_are_found_through_the_class(backend: str) -> None:
    x, y = torch.randn(2, 5).unbind()

    def fn(held: Scaling, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return type(held).act(x, y), Scaling.act(x, up=y), Scaling.act.foreach([x], [y])[0]

    have = torch.compile(fn, fullgraph=True, backend=backend)(Scaling(), x, y)
    torch.testing.assert_close(have, (F.silu(x) * y,) * 3)
    met = torch._dynamo.explain(fn)(Scaling(), x, y).graphs[0].graph.nodes
    assert sum(torch_library.NAMESPACE in str(node.target) for node in met) == 3


def test_objects_and_classes_without_attributes_of_their_own() -> None:
    """What Dynamo takes for no function breaks the graph; its results are those of eager calls all the same."""
    slotted, x = Slotted(), torch.randn(5)
    slotted.rate = 7.0
    torch.testing.assert_close(torch.compile(lambda x: slotted.scaled(x), fullgraph=True, backend="aot_eager")(x), x * 7)
    for call, rate, shift in (
        (lambda x: Scaling.of_class(x), 3, 0),
        (lambda x: Faster.of_class(x), 5, 0),
        (lambda x: Faster().of_class(x), 5, 0),
        (lambda x: Faster().scaled(x), 5, 1),
    ):
        torch.testing.assert_close(torch.compile(call, backend="aot_eager")(x), x * rate + shift)


@pytest.mark.parametrize("values", [(0.5, 0.25, 0.75, 3.5), (3, 2, 4, 5)])
def test_a_static_number_that_changes_is_compiled_for_each_value(values: Sequence[float]) -> None:
    powered = wl.fuse(lambda x, p: x**p + p, static="p")
    block, x = torch.nn.Module(), torch.tensor([1.0, 2.0, 3.0])
    compiled = torch.compile(lambda x: powered(x, block.p), fullgraph=True, backend="aot_eager")  # Dynamo lets it change from the third on
    for block.p in values:
        torch.testing.assert_close(compiled(x), torch.tensor([v**block.p + block.p for v in (1.0, 2.0, 3.0)]))


class Signed(torch.nn.Module):
    kind = "sum"

    @wl.fuse
    def act(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return {"sum": x + y, "difference": x - y, "product": x * y, "shifted": x + y + 1}[self.kind]

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.act(x, y)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["difference", "product"])
def test_gradients_that_rest_on_a_captured_value_are_refused_when_it_changes(kind: str, backend: str) -> None:
    model, leaves = Signed(), [torch.randn(5, requires_grad=True) for _ in range(2)]
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    compiled(*leaves).sum().backward()
    model.kind = "shifted"  # the same gradients of the same operands
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), (torch.ones(5), torch.ones(5)))
    model.kind = kind
    with pytest.raises(wl.TraceError, match=r"act has other gradients than when it was compiled.*torch\.compiler\.reset"):
        compiled(*leaves)
    torch.compiler.reset()
    again = torch.compile(model, fullgraph=True, backend=backend)
    want = (torch.ones(5), -torch.ones(5)) if kind == "difference" else (leaves[1].detach(), leaves[0].detach())
    torch.testing.assert_close(torch.autograd.grad(again(*leaves).sum(), leaves), want)


@wl.fuse
def first_half(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x[..., :half] * w[..., half:].exp()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fn", [rope, first_half])
def test_calls_of_other_ranks_and_sizes_are_no_calls_of_other_captured_values(fn: Callable[..., Any], backend: str) -> None:
    """Two in one graph, forward before backward, and each again on its own."""
    shapes = (2, 4, 8), (4, 8), (4, 12), (3, 2, 12)
    others = [torch.randn(*shape[:-1], shape[-1] // 2 if fn is rope else shape[-1]) for shape in shapes]
    tensors = [torch.randn(shape) for shape in shapes]

    def all_of(*given: torch.Tensor) -> torch.Tensor:
        pairs = zip(given[::2], given[1::2], strict=True)
        return torch.cat([fn(x, w, w).flatten() if fn is rope else fn(x, w).flatten() for x, w in pairs])

    given = [tensor for pair in zip(tensors, others, strict=True) for tensor in pair]
    compiled = torch.compile(all_of, fullgraph=True, backend=backend)
    for part in (given, given[:2], given[2:4], given[4:6]):
        for have, want in zip(gradients(compiled, *part), gradients(all_of, *part), strict=True):
            torch.testing.assert_close(have, want)
        torch.compiler.reset()
        compiled = torch.compile(all_of, fullgraph=True, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_depend_on_data(backend: str) -> None:
    def some(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return swiglu(x[x > 0], residual(x[x > 0], y))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(some, fullgraph=True, backend=backend)
        for size in (20, 31):
            leaves = [torch.randn(size, dtype=f64, requires_grad=True), torch.randn(1, dtype=f64, requires_grad=True)]
            have, want = compiled(*leaves), some(*leaves)
            torch.testing.assert_close(have, want)
            torch.testing.assert_close(torch.autograd.grad(have.sum(), leaves), torch.autograd.grad(want.sum(), leaves))


@pytest.mark.parametrize("backend", BACKENDS)
def test_drawing_moves_on_and_is_seeded(backend: str) -> None:
    x = torch.ones(1000, requires_grad=True)
    compiled = torch.compile(lambda x: (drop(x, 0.5), drop(x, 0.5)), fullgraph=True, backend=backend)
    torch.manual_seed(3)
    have = compiled(x)
    assert not torch.equal(*have)  # in one graph
    assert not torch.equal(have[0], compiled(x)[0])  # from call to call
    torch.manual_seed(3)
    want = drop(x, 0.5), drop(x, 0.5)
    assert_same([t.detach() for t in have], [t.detach() for t in want])
    (grad,) = torch.autograd.grad(have[0].sum(), x)
    assert_same(grad, have[0].detach())  # the mask is drawn again


@pytest.mark.parametrize("backend", BACKENDS)
def test_out_is_written(backend: str) -> None:
    x, y, out = torch.randn(3, 5, 4).unbind()
    out = out.t().contiguous().t()
    strides = out.stride()

    def into(x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        assert swiglu(x, y, out=out) is out
        return out + 1

    want = F.silu(x) * y
    torch.testing.assert_close(torch.compile(into, fullgraph=True, backend=backend)(x, y, out), want + 1)
    torch.testing.assert_close(out, want)
    assert out.stride() == strides
    in_place = x.clone()
    torch.compile(lambda x, y: swiglu(x, y, out=x), fullgraph=True, backend=backend)(in_place, y)
    torch.testing.assert_close(in_place, want)
    with pytest.raises(Exception, match="out= does not support automatic differentiation"):
        torch.compile(into, fullgraph=True, backend=backend)(x.requires_grad_(), y, out)


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("backend", BACKENDS)
def test_numbers_of_any_kind_and_place(backend: str) -> None:
    fn = wl.fuse(lambda x, pair, *more, shift=0: x * pair[0] + pair[1] + more[0] * shift, name="fn")

    def call(x: torch.Tensor, n: int) -> torch.Tensor:
        return fn(x, (n, 0.5), x, shift=2) + fn(x, [2 + 1j, True], 3.0).abs()

    compiled, counter = count_compiles(call, backend, dynamic=True)
    x = torch.arange(4.0)
    for n in (3, 5, 7):
        assert_same(compiled(x, n), x * n + 0.5 + x * 2 + (x * (2 + 1j) + 1).abs())
    assert counter.frame_count <= 2


@pytest.mark.parametrize("strict", [False, True])
def test_rows_of_rope_are_gathered_beside_its_operator(strict: bool) -> None:
    class Rope(torch.nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return wl.ops.rope(x, cos, sin=sin, position_ids=positions)

    given = torch.randn(2, 3, 4, 8), torch.randn(5, 4), torch.randn(5, 4), torch.tensor([[4, 0, 1], [2, 2, 3]])
    want = Rope()(*given)
    program = torch.export.export(Rope(), given, strict=strict)
    called = {str(node.target).split("_")[0] for node in program.graph.nodes if node.op == "call_function"}
    assert called == {"aten.index.Tensor", "wideload.wideload"}
    assert_same(program.module()(*given), want)
    assert_same(torch.compile(Rope(), fullgraph=True, backend="aot_eager")(*given), want)


def test_lists_are_an_operator_an_item() -> None:
    xs = [torch.randn(n) for n in (2, 3, 4)]
    compiled = torch.compile(lambda xs: affine.foreach(xs, xs, 0.5), fullgraph=True, backend="aot_eager")
    assert_same(compiled(xs), affine.foreach(xs, xs, 0.5))
    want = affine.foreach(xs, None, 0.5)
    torch.compile(lambda xs: affine.foreach(xs, None, 0.5, out=xs), fullgraph=True, backend="aot_eager")(xs)
    assert_same(xs, want)


def test_inline_is_the_plain_function() -> None:
    inlined = wl.fuse(lambda x: torch.sigmoid(x) * 2, compile="inline")
    explained = torch._dynamo.explain(lambda x: inlined(x))(torch.ones(3))
    assert next(node.target for node in explained.graphs[0].graph.nodes if node.op == "call_function") is torch.sigmoid
    x = torch.randn(7)
    torch.testing.assert_close(torch.compile(lambda x: inlined(x), fullgraph=True)(x), torch.sigmoid(x) * 2)


def test_views_of_arguments_stay_views() -> None:
    turned = wl.fuse(lambda x: (x.t(), x * 2))
    x = torch.randn(3, 4)
    view, twice = torch.compile(lambda x: turned(x), fullgraph=True, backend="aot_eager")(x)
    assert view.data_ptr() == x.data_ptr()
    assert_same(twice, x * 2)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_result_is_an_argument_or_another_result(dynamic: bool) -> None:
    """Where nothing has to be copied, eager calls hand on what they were given."""
    same = wl.fuse(lambda x: (x.contiguous(), x * 2, (x * 2).contiguous()))
    compiled = torch.compile(lambda x: same(x.t()), fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((1, 7), (7, 1), (3, 7)):
        x = torch.randn(shape, requires_grad=True)
        results = compiled(x)
        assert len({tensor.untyped_storage()._cdata for tensor in (x, *results)}) == 4
        assert_same(torch.autograd.grad([*results], x, [*results]), torch.autograd.grad([*same(x.t())], x, [*same(x.t())]))


def test_gradients_without_an_expression_are_torchs_own() -> None:
    fn = wl.fuse(lambda x: torch.diagonal(x) * 2)
    x = torch.randn(4, 4)
    assert_same(gradients(torch.compile(lambda x: fn(x), fullgraph=True, backend="aot_eager"), x), gradients(fn, x))


def test_unusual_arguments_are_the_plain_functions() -> None:
    pair = collections.namedtuple("pair", "a b")
    fn = wl.fuse(lambda p: p.a * p.b)
    x, y = torch.randn(2, 5)
    assert_same(torch.compile(lambda x, y: fn(pair(x, y)), fullgraph=True, backend="aot_eager")(x, y), x * y)
    z = torch.randn(5, dtype=torch.complex64)
    want = swiglu(z.conj(), z)
    torch.testing.assert_close(torch.compile(lambda z: swiglu(z.conj(), z), fullgraph=True, backend="aot_eager")(z), want)
    met = operators(lambda: residual(z.requires_grad_(), z.detach()))
    have, wanted = (torch.autograd.grad(f(z.conj(), z, *rest).abs().sum(), z) for f, *rest in ((met[0][0], met[0][1][-1]), (torch.add,)))
    assert_same(have, wanted)


def test_function_transforms_inside_what_is_compiled() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda x: swiglu(x, x).sum())(x)

    x = torch.randn(5)
    torch.testing.assert_close(torch.compile(fn, fullgraph=True, backend="aot_eager")(x), fn(x))


def test_second_derivatives_are_refused() -> None:
    x = torch.randn(3, dtype=f64, requires_grad=True)
    result = torch.compile(lambda x: swiglu(x, x), fullgraph=True, backend="eager")(x)
    (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    with pytest.raises(wl.GradError, match="no second derivatives"):
        grad.sum().backward()


def test_only_what_gradients_read_is_saved() -> None:
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    met = operators(lambda: (residual(x, y).sum() + swiglu(x, y).sum()).backward())
    backwards = [operator.__name__.partition("_backward_")[2] for operator, _ in met if "_backward_" in operator.__name__]
    assert sorted(backwards) == ["mm_01_1.default", "tt_11_1.default"]


@pytest.mark.parametrize("fn", [lambda x, y: x + y.sin(), lambda x, y: x * y, lambda x, y: y + x.floor()])
def test_a_tensor_that_is_two_operands_has_the_gradients_of_both(fn: Callable[..., torch.Tensor]) -> None:
    """A graph made with two tensors is given one."""
    operator, x = operator_of(fresh(fn), "tt"), torch.randn(3, requires_grad=True)
    assert_same(torch.autograd.grad(operator(x, x, "(_0, _1)").sum(), x), torch.autograd.grad(fn(x, x).sum(), x))


def backward_graph(fn: Callable[..., Any], *tensors: torch.Tensor, **options: Any) -> tuple[list[Any], list[torch.Tensor]]:
    """What the compiled backward of ``fn`` calls, less views of sizes, and the gradients of those tensors that want one."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward), bw_compiler=keep)
    compiled = torch.compile(fn, fullgraph=True, backend=backend, **options)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    outs = compiled(*tensors)
    outs = outs if isinstance(outs, tuple) else (outs,)
    weights = [torch.arange(out.numel()).view(out.shape).cos().to(out.dtype) for out in outs]
    grads = torch.autograd.grad(outs, leaves, weights)
    (graph,) = graphs
    torch.testing.assert_close(grads, torch.autograd.grad(fn(*tensors), leaves, weights))
    return [node.target for node in graph.graph.nodes if node.op == "call_function"], list(grads)


wide_residual = wl.fuse(lambda x, y: x.float() * 2 + y, name="wide_residual")
dropped = wl.fuse(lambda x, y, p: F.dropout(x, p) + y, name="dropped")
rounded = wl.fuse(lambda x, y: x + y, name="rounded", numerics="eager")
sum_and_first = wl.fuse(lambda x, y: (x + y, x * 1.5), name="sum_and_first")


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize(
    ("fn", "shapes", "dtypes", "bits"),
    [
        (residual, [(4, 6), (4, 6)], [f32, f32], ""),
        (residual, [(4, 6), (4, 6)], [bf16, bf16], ""),
        (rounded, [(4, 6), (4, 6)], [bf16, bf16], ""),
        (residual, [(4, 6), (6,)], [f32, f32], "01"),
        (residual, [(4, 1), (4, 6)], [f32, f32], "10"),
        (residual, [(4, 6), (4, 6)], [bf16, f32], "10"),
        (wide_residual, [(4, 6), (4, 6)], [bf16, f32], "10"),
        (swiglu, [(4, 6), (4, 6)], [f32, f32], "11"),
        (sum_and_first, [(4, 6), (4, 6)], [f32, f32], "10"),
        (lambda x, y: dropped(x, y, 0.0), [(4, 6), (4, 6)], [f32, f32], "1000"),
        (lambda x, y: residual(residual(x, y), y), [(4, 6), (4, 6)], [f32, f32], ""),
        (lambda x, y: residual(x.t(), y), [(6, 4), (4, 6)], [f32, f32], ""),
    ],
)  # fmt: skip
def test_a_gradient_that_arrives_as_it_is_wanted_is_handed_on(
    fn: Callable[..., Any], shapes: list[tuple[int, ...]], dtypes: list[torch.dtype], bits: str, is_dynamic: bool
) -> None:
    """No operator is asked for it, and nothing copies it; what is summed, cast or scaled is the operator's."""
    tensors = [torch.randn(shape).to(dtype).requires_grad_() for shape, dtype in zip(shapes, dtypes, strict=True)]
    targets, _ = backward_graph(lambda *tensors: fn(*tensors), *tensors, dynamic=is_dynamic)
    ours = [target.__name__ for target in targets if getattr(target, "namespace", None) == torch_library.NAMESPACE]
    assert [name.split("_backward_")[1].split("_")[1] for name in ours] == [bits] * bool(bits)
    assert not any(word in str(target) for target in targets for word in ("clone", "copy"))


def test_what_may_be_the_identity_at_one_size_alone_is_computed() -> None:
    """Two rows of which the first two go behind the others are as they were; five are not."""
    turned = wl.fuse(lambda x: torch.cat((x[2:], x[:2])), name="turned")
    x = torch.randn(2, 3, requires_grad=True)
    assert len(backward_graph(lambda x: turned(x), x, dynamic=False)[0]) == 0
    torch.compiler.reset()
    assert len(backward_graph(lambda x: turned(x), x, dynamic=True)[0]) == 1
    compiled = torch.compile(lambda x: turned(x), fullgraph=True, backend="aot_eager", dynamic=True)
    for size in (2, 5, 3):
        x = torch.randn(size, 3)
        assert_same(gradients(compiled, x), gradients(lambda x: torch.cat((x[2:], x[:2])), x))


# ---- operators


def calls() -> list[Callable[[], Any]]:
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    cos = torch.randn(4, 4, requires_grad=True)
    z = x.detach()
    return [
        lambda: swiglu(x, y),
        lambda: swiglu(z.t().contiguous().t(), y),
        lambda: residual(x, y),
        lambda: affine(x, y, 0.5, dtype=bf16),
        lambda: rope(x, cos, cos),
        lambda: drop(x, 0.25),
        lambda: several(x, y)["sum"],
        lambda: several(z, z)["sum"],
        lambda: mean_scaled(x),
        lambda: swiglu(z, y.detach(), out=torch.empty(4, 8)),
        lambda: drop(z, 0.25, out=torch.empty(4, 8)),
    ]


@pytest.mark.parametrize("number", range(len(calls())))
def test_operators_pass_opcheck(number: int) -> None:
    def run() -> None:
        result = calls()[number]()
        if result.requires_grad:
            result.sum().backward()

    met = operators(run)
    assert met
    for operator, args in met:
        is_backward = "_backward_" in operator.__name__
        args = [arg.detach() if is_backward and isinstance(arg, torch.Tensor) else arg for arg in args]  # has no gradient itself
        torch.library.opcheck(operator, tuple(args))


def test_tags_and_schemas() -> None:
    x = torch.ones(3)
    (seed, _), (drawing, _) = operators(lambda: drop(x, 0.5))
    assert torch.Tag.nondeterministic_seeded in seed.tags
    assert str(drawing._schema).partition("(")[2] == "Tensor _0, float _1, Tensor _2, str call) -> Tensor"
    ((writing, _),) = operators(lambda: drop(x, 0.5, out=torch.empty(3)))
    assert torch.Tag.nondeterministic_seeded in writing.tags
    assert str(writing._schema).partition("(")[2] == "Tensor _0, float _1, Tensor(a2!) _2, str call) -> ()"
    ((_, args),) = operators(lambda: affine(x, x, mode="div", dtype=bf16))
    assert args[1:] == ("(_0, _0, mode='div', dtype=torch.bfloat16)",)


def test_names_tell_functions_apart() -> None:
    def name_of(f: wl.FusedFunction) -> str:
        ((operator, _),) = operators(lambda: f(torch.ones(2)))
        return operator.__name__.removesuffix(".default")

    def make(factor: float) -> wl.FusedFunction:
        return wl.fuse(lambda x: x * factor)

    twice, thrice = wl.fuse(lambda x: x * 2), wl.fuse(lambda x: x * 3)
    names = [name_of(twice), name_of(thrice), name_of(make(2.0)), name_of(make(3.0)), name_of(make(3.0))]
    assert len(set(names)) == 5
    assert names[4].startswith(names[3].removesuffix("_t_1"))  # alike in code and values: numbered
    assert name_of(wl.fuse(lambda x: x * 2, numerics="eager")) not in names
    assert all(name.startswith("tests_unit_test_torch_library_test_names_tell_functions_apart_locals") for name in names)


def test_eager_calls_register_nothing(tmp_path: Path) -> None:
    program = """
import sys, torch, wideload as wl
f = wl.fuse(lambda x, y: x * y)
x = torch.ones(3, requires_grad=True)
f(x, x).sum().backward()
f.foreach([x.detach()], [x.detach()])
from wideload import torch_library
from wideload.shortcut import find_likeness
from wideload.torch_op import DifferentiableOp
assert not torch_library._registrations, torch_library._registrations
assert "torch._dynamo" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)


# ---- fake tensors and tracers


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(2, 1, 4, 5).expand(2, 3, 4, 5)),
        lambda: (torch.randn(3, 4).t(), torch.randn(4, 3)),
        lambda: (torch.randn(4, 3), torch.randn(3, 4).t()),
        lambda: (torch.randn(4, 2, 3).permute(2, 0, 1), torch.randn(3, 1, 1)),
        lambda: (torch.randn(8, 3)[::2], torch.tensor(2.0)),
        lambda: (torch.randn(0, 3), torch.randn(3)),
        lambda: (torch.randn(4, 6, dtype=bf16)[:, 1:], torch.randn(5)),
        lambda: (torch.randn(()), torch.randn(2, 1)),
    ],
)
def test_fake_results_are_laid_out_as_real_ones(tensors: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    real = tensors()
    for f in (swiglu, lambda x, y: several(x, y)["rest"][0], lambda x, y: affine(x, y, 2, dtype=bf16)):
        want = f(*real)
        with FakeTensorMode() as mode:
            have = f(*map(mode.from_tensor, real))
        assert type(have).__name__ == "FakeTensor"
        assert (have.shape, have.stride(), have.dtype) == (want.shape, want.stride(), want.dtype)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_fake_tensors_have_gradients_and_out(device: str) -> None:
    with FakeTensorMode(), torch.device(device):
        x, y = torch.empty(3, 4, requires_grad=True), torch.empty(4, requires_grad=True)
        swiglu(x, y).sum().backward()
        assert (x.grad.shape, y.grad.shape, y.grad.device.type) == ((3, 4), (4,), device)
        out = torch.empty(3, 4)
        assert swiglu(x.detach(), y.detach(), out=out) is out


def test_fake_tensors_of_a_gpu_need_none() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 3, device="cuda", dtype=bf16).t()
        have = affine(x, torch.empty(4, device="cuda"), dtype=f64)
    assert (have.device.type, have.shape, have.stride(), have.dtype) == ("cuda", (3, 4), (1, 3), f64)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_operators(mode: str) -> None:
    x, y = torch.randn(3, 4), torch.randn(4)
    graph = make_fx(lambda x, y: drop(swiglu(x, y), 0.5), tracing_mode=mode)(x, y)
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert [target.namespace for target in called] == [torch_library.NAMESPACE] * 3
    x = torch.randn(5, 4)
    torch.manual_seed(0)
    have = graph(x, y)
    torch.manual_seed(0)
    assert_same(have, drop(swiglu(x, y), 0.5))


def test_symbolic_trace_keeps_the_call() -> None:
    graph = torch.fx.symbolic_trace(lambda x, y: affine(swiglu(x, up=y), None, mode="div"))
    assert [node.target for node in graph.graph.nodes if node.op == "call_function"] == [swiglu, affine]
    x, y = torch.randn(2, 4)
    assert_same(graph(x, y), swiglu(x, y) / 2)


MODEL = """
import torch, torch.nn.functional as F, wideload as wl

@wl.fuse
def swiglu(gate, up):
    return F.silu(gate) * up

@wl.fuse
def mixed(x, y, scale, mode="mul"):
    return {"a": F.dropout(x, 0.5) + y, "b": x * scale if mode == "mul" else x / scale}

class Model(torch.nn.Module):
    def forward(self, x, y):
        found = mixed(swiglu(x, y), y, 2.5, mode="div")
        return found["a"], found["b"]
"""


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs_in_another_process(strict: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / f"model{strict}.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    model = __import__(f"model{strict}").Model()
    x, y = torch.randn(4, 8), torch.randn(8)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(model, (x, y), strict=strict, dynamic_shapes=({0: batch}, None))
    namespaces = {node.target.namespace for node in program.graph.nodes if isinstance(node.target, torch._ops.OpOverload)}
    assert namespaces == {torch_library.NAMESPACE}
    torch.export.save(program, tmp_path / "program.pt2")
    x = torch.randn(7, 8)
    torch.manual_seed(0)
    want = model(x, y)
    torch.manual_seed(0)
    assert_same(program.module()(x, y), want)
    torch.save((x, y, want), tmp_path / "tensors.pt")
    run = f"""
import torch, model{strict}
program = torch.export.load("program.pt2")
x, y, want = torch.load("tensors.pt")
torch.manual_seed(0)
torch.testing.assert_close(program.module()(x, y), want, rtol=0, atol=0)
"""
    subprocess.run([sys.executable, "-c", run], check=True, cwd=tmp_path)


# ---- torch.func, which looks into torch's own operators


def test_function_transforms_of_torch() -> None:
    x, y = torch.randn(2, 3, 4, dtype=f64)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * y

    for transform in (
        lambda f: torch.func.grad(lambda x, y: f(x, y).sum()),
        lambda f: torch.func.vmap(f),
        lambda f: torch.func.vmap(torch.func.grad(lambda x, y: f(x, y).sum())),
        lambda f: torch.func.jacrev(f),
        lambda f: torch.func.jacfwd(f),
        lambda f: torch.func.hessian(lambda x, y: f(x, y).sum()),
        lambda f: lambda x, y: torch.func.jvp(f, (x, y), (y, x)),
        lambda f: lambda x, y: torch.func.vjp(f, x, y)[1](y),
    ):
        torch.testing.assert_close(transform(swiglu)(x, y), transform(plain)(x, y))


# ---- other arrays and subclasses


class Array:
    """An array of another library."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack__(self, **options: Any) -> Any:
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()


def test_arrays_of_other_libraries_are_read_where_they_lie() -> None:
    x, y = torch.randn(3, 2).t(), torch.randn(2, 3)
    assert_same(swiglu(Array(x), y), swiglu(x, y))
    same, _ = wl.fuse(lambda x, y: (x, x * y))(Array(x), y)
    assert (same.data_ptr(), same.stride()) == (x.data_ptr(), (1, 2))


class Labelled(torch.Tensor):
    """A subclass that torch's own operators hand on."""


def test_subclasses_give_what_torchs_operators_give() -> None:
    x = torch.randn(3)
    for given in (torch.nn.Parameter(x), torch.nn.Buffer(x), x.as_subclass(Labelled)):
        assert_same(swiglu(given, x).detach().as_subclass(torch.Tensor), swiglu(x, x))


# ---- names, constants and devices that operators and schemas do not take as they are


@wl.fuse
def noisy(x: torch.Tensor, s: float) -> torch.Tensor:
    return F.dropout(x, 0.5) * s


@pytest.mark.parametrize("is_leaf", [False, True])
def test_draws_and_a_number_that_changes(is_leaf: bool) -> None:
    x = torch.ones(64, requires_grad=is_leaf)
    compiled = torch.compile(lambda x, s: noisy(x, s), fullgraph=True, backend="aot_eager")
    for s in (1.0, 2.5, 3.5):
        torch.manual_seed(3)
        have = compiled(x, s)
        torch.manual_seed(3)
        torch.testing.assert_close(have, noisy(x, s), rtol=0, atol=0)


def test_any_name_of_a_function_and_a_module() -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = torch.randn(5)
    for module, name in ((__name__, "größe"), ("01_notebook", "twice"), ("_", "_")):
        twice.__module__, twice.__qualname__ = module, name
        f = wl.fuse(twice, name=name)
        assert torch.equal(torch.compile(lambda x, f=f: f(x), fullgraph=True, backend="aot_eager")(x), x * 2)
        torch.compiler.reset()


class Mode(str, enum.Enum):  # noqa: UP042  # as users write it
    MUL = "mul"
    DIV = "div"


def test_members_of_enums_are_inlined() -> None:
    x = torch.randn(5)
    compiled = torch.compile(lambda x: affine(x, None, mode=Mode.DIV), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x / 2)


@pytest.mark.skipif(torch.__version__.startswith("2.10."), reason="of plain torch, too, Dynamo of 2.10 puts it on the default device")
def test_a_changing_number_is_on_the_host_whatever_the_default_device() -> None:
    x = torch.randn(5)
    compiled = torch.compile(lambda x, s: affine(x, None, s), fullgraph=True, backend="aot_eager")
    compiled(x, 1.0)
    with torch.device("meta"):
        torch.testing.assert_close(compiled(x, 2.5), x * 2.5)


def test_an_operator_that_could_not_be_registered_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    f = wl.fuse(lambda x: x * 3.25)
    name = f"{torch_library.base_of(f)}_t_1"

    def fail(name: str) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(torch_library, "_register", fail)
        with pytest.raises(RuntimeError, match="planted"):
            torch_library.registered(name)
    assert torch_library.registered(name) == name
    assert hasattr(torch.ops.wideload, name)
