"""Fused functions in torch's graph: gradients of compositions and layouts, what is saved, second derivatives, torch's own routes."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import wideload as wl
from wideload import torch_op
from wideload.fused import FusedFunction

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Tensors = Sequence[torch.Tensor]


def is_fused(result: torch.Tensor) -> bool:
    """Whether the graph has one operation of ours, not torch's own one by one."""
    return result.grad_fn is not None and "_Fused" in result.grad_fn.name()


# ---- compositions and layouts


UNARY: tuple[Callable[[Any], Any], ...] = (
    torch.sin,
    torch.tanh,
    torch.sigmoid,
    F.silu,
    F.gelu,
    F.relu,
    torch.abs,
    torch.square,
    lambda t: t * 0.5,
    lambda t: 1 - t,
    lambda t: -t,
    lambda t: t.clamp(-0.5, 0.8),
    lambda t: t.exp() * 0.1,
)
BINARY: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b,
    lambda a, b: a * b,
    lambda a, b: a - b,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 2),
    lambda a, b: a / (b * b + 1),
    lambda a, b: torch.addcmul(a, a, b, value=0.5),
    lambda a, b: torch.lerp(a, b, 0.3),
)
SHAPES = ((4, 6), (6,), (4, 1), (1, 6), (), (2, 4, 6), (1,))

Step = tuple[Callable[..., Any], tuple[int, ...]]


def draw_view(draw: random.Random, shape: torch.Size) -> Callable[[Any], Any]:
    """A view, or a concatenation of views, along some dim."""
    rank, dim = len(shape), draw.randrange(len(shape))
    size, first, step = shape[dim], draw.randrange(min(shape[dim], 2)), draw.choice((2, 3))
    order = tuple(draw.sample(range(rank), rank))
    shapes = (*shape[:dim], 3, *shape[dim + 1 :])
    views: list[Callable[[Any], Any]] = [
        lambda t: t.narrow(dim, 0, max(1, size - 1)),
        lambda t: t[(slice(None),) * dim + (slice(first, None, step),)],
        lambda t: t.unsqueeze(dim),
        lambda t: t.permute(order),
        lambda t: t.select(dim, first),
    ]
    if size % 2 == 0:
        views += [
            lambda t: t.chunk(2, dim)[first],
            lambda t: torch.cat((-t.chunk(2, dim)[1], t.chunk(2, dim)[0]), dim),
            lambda t: torch.stack((t.unflatten(dim, (-1, 2)).select(dim + 1, 1), t.unflatten(dim, (-1, 2)).select(dim + 1, 0)), dim + 1),
        ]
    if size == 1:
        views += [lambda t: t.squeeze(dim), lambda t: t.expand(shapes)]
    return draw.choice(views)


def compose(draw: random.Random) -> tuple[list[tuple[int, ...]], Callable[..., Any]]:
    """A random function of up to three tensors of shapes that broadcast, with views inside, and one or two results."""
    shapes = [draw.choice(SHAPES) for _ in range(draw.randint(1, 3))]
    made = [torch.empty(shape, device="meta") for shape in shapes]
    steps: list[Step] = []
    while len(steps) < 2 or (len(steps) < 7 and draw.random() < 0.8):
        one, other = draw.randrange(len(made)), draw.randrange(len(made))
        kind = draw.random()
        if kind < 0.25 and made[one].ndim:
            step: Step = draw_view(draw, made[one].shape), (one,)
        elif kind < 0.6:
            step = draw.choice(UNARY), (one,)
        else:
            step = draw.choice(BINARY), (one, other)
        try:
            made.append(step[0](*(made[at] for at in step[1])))
        except RuntimeError:  # shapes that do not broadcast
            continue
        steps.append(step)
    outputs = (len(made) - 1, draw.randrange(len(shapes), len(made)))[: draw.randint(1, 2)]
    fixed = tuple(steps)

    def function(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = list(tensors)
        for fn, operands in fixed:
            values.append(fn(*(values[at] for at in operands)))
        return tuple(values[at] for at in outputs)

    return shapes, function


def laid_out(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """The same shape in another layout: transposed, every second element, expanded."""
    kind = draw.randrange(5)
    if kind == 1 and tensor.ndim > 1:
        return tensor.mT.contiguous().mT
    if kind == 2 and tensor.ndim:
        return torch.stack((tensor, tensor), -1).flatten(-2)[..., ::2]
    return tensor[:1].expand(tensor.shape) if kind == 3 and tensor.ndim else tensor


def gradients(function: Callable[..., Any], inputs: Tensors, seed: int) -> list[torch.Tensor | None]:
    """First gradients of weighted results, then second ones; zeros count as none."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    generator, draw = torch.Generator().manual_seed(seed), random.Random(seed)
    results = [result for result in function(*leaves) if result.requires_grad]
    drawn = [torch.randn(result.shape, dtype=result.dtype, generator=generator) for result in results]
    weights = [laid_out(draw, weight.to(leaves[0].device)) for weight in drawn]
    firsts = torch.autograd.grad(results, leaves, weights, allow_unused=True, create_graph=True)
    total = sum((first * first.cos()).sum() for first in firsts if first is not None)
    has_seconds = isinstance(total, torch.Tensor) and total.requires_grad
    seconds = torch.autograd.grad(total, leaves, allow_unused=True) if has_seconds else [None] * len(leaves)
    return [None if g is None or not g.any() else g.detach() for g in (*firsts, *seconds)]


@pytest.mark.parametrize("seeds", [range(start, start + 50) for start in range(0, 200, 50)], ids=str)
def test_gradients_of_compositions_are_torchs(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        shapes, function = compose(draw)
        generator = torch.Generator().manual_seed(seed)
        inputs = [laid_out(draw, torch.randn(shape, dtype=f64, generator=generator)) for shape in shapes]
        for got, want in zip(gradients(wl.fuse(function), inputs, seed), gradients(function, inputs, seed), strict=True):
            assert (got is None) == (want is None), seed
            if got is not None and want is not None:
                torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11, msg=lambda text, seed=seed: f"seed {seed}: {text}")


@pytest.mark.parametrize("dtypes", [(bf16, bf16), (f16, f32), (f32, bf16), (f32, f64), (bf16, f16)], ids=str)
def test_gradients_of_mixed_types_are_rounded_once(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """In double and rounded, to half a unit in the last place of each input's dtype and what fp32 loses before."""
    f = wl.fuse(lambda x, y: torch.tanh(x * y) + x.to(bf16) * F.silu(y))
    generator = torch.Generator().manual_seed(0)
    for shapes in (((40, 6), (40, 6)), ((40, 6), (6,)), ((40, 6), (40, 1)), ((40, 6), ())):
        inputs = [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        leaves = [tensor.requires_grad_() for tensor in inputs]
        wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
        result = f(*leaves)
        weights = torch.randn(result.shape, generator=generator).to(result.dtype)
        got = torch.autograd.grad(result, leaves, weights)
        rounded = inputs[0].detach().to(bf16).double()
        x = wide[0] + (rounded - wide[0]).detach()
        want = torch.autograd.grad(torch.tanh(wide[0] * wide[1]) + x * F.silu(wide[1]), wide, weights.double())
        for one, other, tensor in zip(got, want, inputs, strict=True):
            assert (one.dtype, one.shape) == (tensor.dtype, tensor.shape)
            error = max(torch.finfo(tensor.dtype).eps / 2, 2e-6)
            if one.dtype == bf16 and tensor.ndim < 2:
                error += 2**-9  # summed from what the other input receives, each element rounded
            torch.testing.assert_close(one.double(), other, rtol=error * 1.01, atol=error * 4)


# ---- what is saved


def saved_by(function: Callable[[], torch.Tensor]) -> list[torch.Tensor]:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert is_fused(function())
    return saved


def test_only_inputs_that_gradients_read_are_saved() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    assert saved_by(lambda: wl.fuse(lambda a, b: a + b)(x, y)) == []
    assert [id(t) for t in saved_by(lambda: wl.fuse(lambda a, b: a + b.sin())(x, y))] == [id(y)]
    assert [id(t) for t in saved_by(lambda: wl.fuse(lambda a, b: torch.tanh(a * b).exp())(x, y))] == [id(x), id(y)]
    assert [id(t) for t in saved_by(lambda: wl.fuse(lambda a, b: a * b)(x, y.detach()))] != [id(x)]
    (seed,) = saved_by(lambda: wl.fuse(lambda a: F.dropout(a, 0.5))(x))
    assert (seed.dtype, seed.shape) == (torch.int64, (1,))


def test_only_what_is_read_may_not_change() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    a, b = x * 1, y * 1
    result = wl.fuse(lambda a, b: a + b.sin())(a, b)
    with torch.no_grad():
        a.zero_()
    result.sum().backward(retain_graph=True)
    with torch.no_grad():
        b.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


# ---- results and incoming gradients


def test_results_without_a_gradient() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    f = wl.fuse(lambda x, y: (x * y, y + 1, x > y, x.detach() * 2, (x * 2).to(torch.int32), x.floor()))
    results = f(x, y)
    assert [result.requires_grad for result in results] == [True, False, False, False, False, True]
    assert torch.equal(torch.autograd.grad(results[5].sum(), x)[0], torch.zeros(3))


def test_gradients_that_do_not_arrive() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    sine, product = wl.fuse(lambda x, y: (x.sin(), x * y))(x, y)
    (gx,) = torch.autograd.grad(sine.sum(), x, retain_graph=True)
    torch.testing.assert_close(gx, x.cos().detach())
    assert torch.autograd.grad(sine.sum(), y, retain_graph=True, allow_unused=True) == (None,)
    torch.testing.assert_close(torch.autograd.grad(product.sum(), (x, y)), (y.detach(), x.detach()))


def test_arguments_and_their_views_come_back_as_torch_has_them() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    same, view, computed = wl.fuse(lambda x: (x, x[:, 1:3].t(), x * 2))(x)
    assert same is x
    assert view._base is x
    (gx,) = torch.autograd.grad(view.sum() + computed.sum() + same.sum(), x)
    want = torch.full((4, 6), 3.0)
    want[:, 1:3] += 1
    assert torch.equal(gx, want)


def test_one_tensor_given_twice_and_results_returned_twice() -> None:
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    product, again, other = wl.fuse(lambda a, b: (lambda p: (p, p, a * b))(a * b))(x, x)
    assert product is again
    assert product is not other
    (gx,) = torch.autograd.grad(product.sum() + other.sum() * 10, x)
    assert gx.tolist() == [44.0, 66.0]


def test_gradients_have_the_layout_of_their_inputs() -> None:
    """Else torch would copy them where they are accumulated."""
    x = torch.randn(6, 4).t().requires_grad_()
    y = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_()
    packed = torch.randn(4, 12)
    z = packed[:, :6].detach().requires_grad_()
    for leaf in (x, y, z):
        f = wl.fuse(lambda v: v.sin())
        (got,) = torch.autograd.grad(f(leaf), leaf, torch.randn(leaf.shape))
        assert got.stride() == torch.empty_like(leaf).stride()
    (first, second) = torch.autograd.grad(wl.fuse(lambda a, b: a * b)(x, x.detach().requires_grad_()).sum(), (x,), retain_graph=True) * 2
    assert first.stride() == second.stride() == x.stride()


def test_empty_tensors_and_numbers() -> None:
    x, bias = torch.randn(0, 5, requires_grad=True), torch.randn(5, requires_grad=True)
    gx, gb = torch.autograd.grad(wl.fuse(lambda x, b: (x + b).sin())(x, bias).sum(), (x, bias))
    assert gx.shape == (0, 5)
    assert gb.tolist() == [0.0] * 5
    s = torch.tensor(3.0, requires_grad=True)
    (gs,) = torch.autograd.grad(wl.fuse(lambda s: s * s)(s), s)
    assert gs.tolist() == 6.0
    p = wl.fuse(lambda x, n: x**n)
    for n, want in ((0, 0.0), (1, 1.0), (3, 12.0), (0.5, 0.5 / 2**0.5), (-1.0, -0.25)):
        x = torch.tensor([2.0], requires_grad=True)
        (gx,) = torch.autograd.grad(p(x, n), x)
        assert gx.item() == pytest.approx(want)
    x = torch.zeros(1, requires_grad=True)
    assert torch.autograd.grad(p(x, 0), x)[0].item() == 0.0


# ---- second derivatives and torch's own routes


def test_second_derivatives_through_one_operation() -> None:
    x, y = torch.randn(3, 4, dtype=f64, requires_grad=True), torch.randn(4, dtype=f64, requires_grad=True)
    f = wl.fuse(lambda x, y: (F.silu(x) * y, torch.cat((x, x * y)).sigmoid()))
    assert torch.autograd.gradgradcheck(f, (x, y))
    (first,) = torch.autograd.grad(f(x, y)[0].sum(), x, create_graph=True)
    assert is_fused(first)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    plain = x.detach().requires_grad_()
    want = (F.silu(plain) * y).sum()
    for _ in range(3):
        (want_grad,) = torch.autograd.grad(want, plain, create_graph=True)
        want = want_grad.sum()
    torch.testing.assert_close(third, want_grad.detach())


def test_what_the_gradient_of_relu_reads_has_zeros() -> None:
    """As torch: a gradient penalty on a piecewise linear function is not an error."""
    x = torch.tensor([1.0, -1.0], requires_grad=True)
    (first,) = torch.autograd.grad(wl.fuse(lambda x: F.relu(x) * 2)(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    assert second.tolist() == [0.0, 0.0]


def test_dropout_draws_its_mask_again() -> None:
    x = torch.randn(1000, requires_grad=True)
    f = wl.fuse(lambda x, p: F.dropout(x.sin(), p))
    torch.manual_seed(1)
    y = f(x, 0.3)
    torch.rand(5)  # the generator has moved on
    (gx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    kept = y != 0
    assert 600 < kept.sum() < 800
    torch.testing.assert_close(gx, torch.where(kept, x.cos() / 0.7, 0.0))
    (ggx,) = torch.autograd.grad(gx.sum(), x)
    torch.testing.assert_close(ggx, torch.where(kept, -x.sin() / 0.7, 0.0).detach())


def test_checkpoints_and_hooks() -> None:
    f = wl.fuse(lambda x, w: F.gelu(x * w))
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, requires_grad=True)
    want = torch.autograd.grad(f(x, w).sum(), (x, w))
    got = torch.autograd.grad(checkpoint(f, x, w, use_reentrant=False).sum(), (x, w))
    torch.testing.assert_close(got, want)
    with torch.autograd.graph.save_on_cpu():
        y = f(x, w)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), (x, w)), want)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, in its formulas of forward mode
def test_transforms_go_through_torchs_operators() -> None:
    f = wl.fuse(lambda x: x.sin() * x)
    x = torch.randn(4, requires_grad=True)
    want = (x.cos() * x + x.sin()).detach()
    torch.testing.assert_close(torch.func.grad(lambda x: f(x).sum())(x.detach()), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(x.detach()), want)
    _, tangent = torch.func.jvp(f, (x.detach(),), (torch.ones(4),))
    torch.testing.assert_close(tangent, want)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones(4))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(f(dual)).tangent, want)


def test_ops_without_a_rule_are_recorded_by_torch() -> None:
    x = torch.randn(5, requires_grad=True)
    f = wl.fuse(lambda x: torch.frexp(x).mantissa * x.sin())
    assert not is_fused(f(x))
    plain = x.detach().requires_grad_()
    want = torch.autograd.grad((torch.frexp(plain).mantissa * plain.sin()).sum(), plain)
    torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x), want)
    assert is_fused(wl.fuse(lambda x, y: torch.frexp(x).mantissa * y)(x.detach(), x))  # the way of the gradient does not lead there


def test_views_that_an_incoming_gradient_does_not_have() -> None:
    """Where the gradient cannot be viewed as its input, it is copied first."""
    x = torch.randn(4, 6, dtype=f64, requires_grad=True)
    f = wl.fuse(lambda x: x.reshape(2, 2, 6).sin())
    g = torch.randn(6, 2, 2, dtype=f64).permute(2, 1, 0)
    (got,) = torch.autograd.grad(f(x), x, g)
    torch.testing.assert_close(got, (g * x.reshape(2, 2, 6).cos()).reshape(4, 6).detach())


def test_several_gradients_at_once() -> None:
    x = torch.randn(3, 4, dtype=f64, requires_grad=True)
    y = wl.fuse(lambda x: torch.cat((x[:, ::2].sin(), x[:, 1::2]), 1).t())(x)
    grads = torch.randn(5, 4, 3, dtype=f64)
    (got,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    want = [torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads]
    torch.testing.assert_close(got, torch.stack(want))


def test_plans_of_gradients() -> None:
    f = wl.fuse(lambda x, w, n: torch.tanh(x * w) + n)
    x, w = torch.empty(64, 128, dtype=bf16, device="meta"), torch.empty(128, dtype=bf16, device="meta", requires_grad=True)
    plan = f.plan_backward(x, w, 2, target="h200")
    assert [node.name for node in plan.expr.operands] == ["x", "w", "grad"]
    assert [(kernel.name, len(kernel.plan.targets)) for kernel in plan.kernels] == [
        ("lambda_backward_columns", 1),
        ("lambda_backward_total_columns", 1),
    ]
    assert len(f.plan_backward(x, w.detach(), 2, target="h200").kernels[0].plan.targets) == 2  # of no tensor that wants one: of all
    few = f.plan_backward(x[:31], w, 2, target="h200")
    assert [(kernel.name, len(kernel.plan.targets)) for kernel in few.kernels] == [("lambda_backward_rows", 1)]
    with pytest.raises(wl.GradError, match="no rule for heaviside"):
        wl.fuse(lambda x: torch.heaviside(x, x)).plan_backward(x, target="h200")
    with pytest.raises(wl.DeviceError, match="no target"):
        f.plan_backward(torch.ones(3), torch.ones(3), 2)


def test_derived_once_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    derived: list[int] = []
    original = torch_op.derive_gradient

    def counted(*args: Any, **kwargs: Any) -> Any:
        derived.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(torch_op, "derive_gradient", counted)
    f: FusedFunction = wl.fuse(lambda x, s: x.sin() * s)
    for n in (3, 3, 3, 4):
        x = torch.randn(n, requires_grad=True)
        f(x, float(n)).sum().backward()
    assert len(derived) == 4  # forward and backward, of two layouts


def test_wrong_gradients_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: a view handed on wrong, a broadcast dim summed wrong."""
    from wideload import grad

    permuted = grad._ADJOINTS["permute"]
    monkeypatch.setitem(grad._ADJOINTS, "permute", grad._ADJOINTS["reshape"])
    with pytest.raises(AssertionError, match="seed"):
        test_gradients_of_compositions_are_torchs(range(200))
    monkeypatch.setitem(grad._ADJOINTS, "permute", permuted)
    term_of = torch_op._term
    monkeypatch.setattr(torch_op, "_term", lambda value, term, dtype: term_of(value, term, dtype) * (2 if term.num_summed else 1))
    with pytest.raises(AssertionError, match="seed"):
        test_gradients_of_compositions_are_torchs(range(200))


# ---- results without a gradient, and without elements


@pytest.mark.parametrize(
    "f",
    [
        lambda x: (x.exp()[:, :2], x * 2),
        lambda x: (torch.where(wl.index(-1) <= wl.index(-2), x, 0.0)[:, :2], x * 2),
        lambda x: ((x * torch.full_like(x, 3.0))[:, :2], x * 2),
        lambda x: (x.sin()[:, 1:], x * 2, x[:1] * 3, x.cos()[:, :1], x + 1),
    ],
    ids=["slice", "coordinates", "a constant", "more than are looked at"],
)
def test_any_of_the_results_may_have_no_gradient(f: Any) -> None:
    fused = wl.fuse(f)
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    num_results = len(fused(x))
    for number in range(num_results):
        (alone,) = torch.autograd.grad(fused(x)[number].sum(), x)
        masked = [result.sum() * (at == number) for at, result in enumerate(fused.reference(x))]
        (want,) = torch.autograd.grad(sum(masked), x)
        torch.testing.assert_close(alone, want)


def _scaled_without_gradient(x: Any) -> Any:
    with torch.no_grad():
        scale = x * 2
        scale += 1  # of what was made here
        left, right = x.chunk(2)
        same = x.float()  # the argument itself, which keeps its gradient
        with torch.enable_grad():
            squared = x.square()
    return x * scale, x[:2] * left + x[2:] * right, same * 3, squared + 0 * scale, scale


@pytest.mark.parametrize("numerics", ["fused", "eager"])
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_computed_where_gradients_are_off_has_none(numerics: Any, compiled: bool) -> None:
    """d/dx of ``x * c`` is ``c``: 2 x + 1, x, 3 and 2 x."""
    fused = wl.fuse(_scaled_without_gradient, numerics=numerics)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    results = torch.compile(lambda x: fused(x), fullgraph=True, backend="aot_eager")(x) if compiled else fused(x)
    wants = ([3.0, 5.0, 7.0, 9.0], [1.0, 2.0, 3.0, 4.0], [3.0] * 4, [2.0, 4.0, 6.0, 8.0])
    assert [result.requires_grad for result in results] == [True] * 4 + [False]
    assert results[4].tolist() == [3.0, 5.0, 7.0, 9.0]
    for result, want in zip(results, wants, strict=False):
        (got,) = torch.autograd.grad(result.sum(), x, retain_graph=True)
        assert got.tolist() == want


VIEWS = {
    "an attribute": lambda x: x.mT,
    "an index": lambda x: x[:2],
    "an index of all": lambda x: x[:],
    "an index of all of the same": lambda x: (+x)[:],
    "iteration": lambda x: next(iter(x)),
    "a method": lambda x: x.view(2, 2),
    "a cast": lambda x: x.double().float(),
    "in place": lambda x: (x * 0).add_(x),
    "a concatenation": lambda x: torch.cat([x[:1], x[1:]]),
}


@pytest.mark.parametrize("made", VIEWS.values(), ids=VIEWS)
def test_what_is_made_where_gradients_are_off_has_none(made: Any) -> None:
    """Torch's own gradient is the expected one."""

    def body(x: Any) -> Any:
        with torch.no_grad():
            y = made(x)
        return x * y

    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (wl.fuse(body), body))
    assert torch.equal(got, want)
    assert torch.equal(got, made(x).expand_as(x))


SAME = {
    "positive": lambda x: +x,
    "real": lambda x: x.real,
    "conj": lambda x: x.conj(),
    "conj_physical": lambda x: x.conj_physical(),
    "resolve_neg": lambda x: x.resolve_neg(),
    "to": lambda x: x.to(torch.float32),
    "dropout": lambda x: F.dropout(x, 0.5, training=False),
    "contiguous": lambda x: x.contiguous(),
    "flatten": lambda x: x.flatten(),
}


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x * 1], ids=["an argument", "a value"])
@pytest.mark.parametrize("same", SAME.values(), ids=SAME)
def test_what_torch_returns_as_it_is_keeps_its_gradient_where_gradients_are_off(same: Any, of: Any) -> None:
    def body(x: Any) -> Any:
        y = of(x)
        with torch.no_grad():
            z = same(y)
        return x * z

    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    for f in (body, wl.fuse(body)):
        assert torch.autograd.grad(f(x).sum(), x)[0].tolist() == [2.0, 4.0, 6.0]


def _strided(x: Any) -> Any:
    return x.transpose(1, 3)


def _channels_last(x: Any) -> Any:
    return x.to(memory_format=torch.channels_last)


@pytest.mark.parametrize("of", [lambda x: x, lambda x: x * 2], ids=["an argument", "a value"])
@pytest.mark.parametrize("laid_out", [lambda x: x, _strided, _channels_last], ids=["row-major", "strided", "channels last"])
@pytest.mark.parametrize(
    "same",
    [
        lambda x: x.contiguous(),
        lambda x: x.contiguous()[:],
        lambda x: +x.contiguous(),
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x.to(memory_format=torch.contiguous_format),
        lambda x: x.to(torch.float64, memory_format=torch.contiguous_format),
        lambda x: x.clone(memory_format=torch.contiguous_format),
    ],
)
def test_a_format_that_is_there_keeps_its_gradient_where_gradients_are_off_and_a_copy_has_none(same: Any, laid_out: Any, of: Any) -> None:
    """Torch's own gradient is the expected one, of each layout by one function."""

    def body(x: Any) -> Any:
        y = of(x)
        with torch.no_grad():
            z = same(y)
        return x * z, z.sin()

    fused = wl.fuse(body)
    for layout in (laid_out, lambda x: x):
        x = layout(torch.arange(120.0).view(2, 3, 4, 5)).detach().requires_grad_()
        (got, more), (want, other) = fused(x), body(x)
        assert more.requires_grad == (other.grad_fn is not None and any(function for function, _ in other.grad_fn.next_functions))
        torch.testing.assert_close((got, more), (want, other))
        assert torch.equal(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


@pytest.mark.parametrize("to", [torch.channels_last, torch.contiguous_format])
def test_a_format_that_may_be_there_is_not_written_into(to: torch.memory_format) -> None:
    """Torch would write into both."""

    def later(x: Any) -> Any:
        y = x * 2
        z = y.to(memory_format=to)
        y.mul_(3)
        return z

    def sooner(x: Any) -> Any:
        y = x * 2
        y.to(memory_format=to).mul_(3)
        return y

    for body in (later, sooner):
        with pytest.raises(wl.TraceError, match="where another tensor shares the memory"):
            wl.fuse(body)(torch.ones(2, 3, 2, 2).to(memory_format=to))


def test_parts_of_what_is_complex_have_no_gradient_where_gradients_are_off() -> None:
    def body(x: Any) -> Any:
        with torch.no_grad():
            y, z = x.real, x.conj()
        return y * x.real + (z * x).real

    x = torch.tensor([1.0 + 2.0j, 3.0 - 1.0j], requires_grad=True)
    (got,), (want,) = (torch.autograd.grad(f(x).sum(), x) for f in (wl.fuse(body), body))
    assert torch.equal(got, want)


@pytest.mark.parametrize("index", [slice(1, None), slice(None), ...])
def test_a_view_is_not_written_into_where_gradients_are_off(index: Any) -> None:
    def body(x: Any) -> Any:
        with torch.no_grad():
            y = x * 2
            y[index].mul_(3)
        return y

    with pytest.raises(wl.TraceError, match="where another tensor shares the memory"):
        wl.fuse(body)(torch.ones(3))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_function_that_turns_gradients_off_returns_what_has_none(mode: Any) -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    result, argument, count = wl.fuse(mode()(lambda x: (F.softplus(x), x, (x > 1).int())))(x)
    assert not result.requires_grad
    assert argument is x
    assert count.tolist() == [0, 1]
    assert torch.is_grad_enabled()


def test_gradients_are_off_in_the_function_and_on_around_it() -> None:
    """What the caller's mode is has no part in the trace."""
    fused = wl.fuse(_scaled_without_gradient)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    with torch.no_grad():
        assert not fused(x)[0].requires_grad
    (got,) = torch.autograd.grad(fused(x)[0].sum(), x)
    assert got.tolist() == [3.0, 5.0, 7.0, 9.0]


def test_in_place_where_gradients_are_off_the_gradient_of_what_was_there_would_stay() -> None:
    """Torch's is then that of the value before."""

    def bounded(x: Any) -> Any:
        y = x * 2
        with torch.no_grad():
            y.clamp_(max=3)
        return y

    with pytest.raises(wl.TraceError, match=r"clamp_ writes in place where gradients are off.*out-of-place"):
        wl.fuse(bounded)(torch.ones(3))


def test_dropped_elements_get_nothing_where_another_result_has_no_gradient() -> None:
    x = torch.ones(64, 8, requires_grad=True)
    dropped, _ = wl.fuse(lambda x: (F.dropout(x, 0.5)[:, :2], x * 2))(x)
    (grad,) = torch.autograd.grad(dropped.sum(), x)
    assert torch.equal(grad[:, :2], dropped.detach())
    assert not grad[:, 2:].any()


@pytest.mark.parametrize("shape", [(3, 1), (3, 0), (0, 4)])
def test_slices_without_elements(shape: tuple[int, int]) -> None:
    x = torch.randn(shape, requires_grad=True)
    result = wl.fuse(lambda x: x.sin()[:, 1:3])(x)
    assert result.shape == x.sin()[:, 1:3].shape
    (grad,) = torch.autograd.grad(result.sum(), x)
    (want,) = torch.autograd.grad(x.sin()[:, 1:3].sum(), x)
    assert torch.equal(grad, want)


def test_what_saves_nothing_goes_backward_twice() -> None:
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    total, grad = wl.ops.add(x, y), torch.ones(3)
    for _ in range(2):
        assert torch.equal(torch.autograd.grad(total, x, grad)[0], grad)


def test_vmap_over_any_dim_of_tensors_without_gradients() -> None:
    f = wl.fuse(lambda x, y: torch.tanh(x) * y)
    x, y = torch.randn(3, 4, 5), torch.randn(4, 3, 5)
    torch.testing.assert_close(torch.vmap(f, (1, 0))(x, y), torch.tanh(x.transpose(0, 1)) * y)


def test_what_looks_into_torch_never_meets_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tangents and batches are torch's, on a GPU too, where nothing wants a gradient."""
    launched: list[Any] = []
    monkeypatch.setattr(wl.FusedFunction, "_launch", lambda self, call, key, traced: launched.append(call) or call.tensors[0])

    def as_on_a_gpu(self: Any, call: Any) -> None:
        call.device = torch.device("cuda", 0)

    f, x = wl.fuse(lambda x: x * 2), torch.ones(3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(wl.FusedFunction, "_check_devices", as_on_a_gpu)
        f(x)
    assert len(launched) == 1
    monkeypatch.setattr(wl.FusedFunction, "_check_devices", as_on_a_gpu)
    monkeypatch.setattr(wl.FusedFunction, "_call_reference", lambda self, call, key, traced: call.tensors[0])
    torch.func.jvp(f, (x,), (x,))
    torch.vmap(f)(x)
    assert len(launched) == 1


@pytest.mark.parametrize(("rows", "columns"), [(0, 64), (64, 0), (0, 0)])
def test_of_no_elements_nothing_is_planned(rows: int, columns: int) -> None:
    f = wl.fuse(lambda x, b: torch.nn.functional.gelu(x + b))
    x, b = torch.zeros(rows, columns, requires_grad=True), torch.zeros(columns, requires_grad=True)
    assert f.plan_backward(x, b, target="h200").kernels == ()
    assert [(grad.shape, float(grad.sum())) for grad in torch.autograd.grad(f(x, b).sum(), (x, b))] == [(x.shape, 0), (b.shape, 0)]


def test_meta_tensors_have_gradients_of_their_shapes() -> None:
    f = wl.fuse(lambda x, b: (F.dropout(F.silu(x), 0.5) + b, x > 0))
    x, b = (torch.empty(shape, dtype=bf16, device="meta", requires_grad=True) for shape in ((4, 6), (6,)))
    result, mask = f(x.t(), b[:4])
    assert (result.shape, result.stride(), result.requires_grad, mask.requires_grad) == ((6, 4), (1, 6), True, False)
    result.sum().backward()
    for tensor in (x, b):
        assert tensor.grad is not None
        assert (tensor.grad.shape, tensor.grad.dtype, tensor.grad.device.type) == (tensor.shape, bf16, "meta")
    with torch.no_grad():
        assert not f(x.t(), b[:4])[0].requires_grad
