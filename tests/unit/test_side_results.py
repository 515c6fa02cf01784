"""One value of all elements beside other results, where no kernel runs: traces, results, refusals, gradients, compiled calls, lists."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.unit.test_torch_library import operators
from wideload import steps
from wideload.execute import Output, new_output
from wideload.execute import _new as allocate
from wideload.replay import NodeLayout
from wideload.steps import define, steps_of_new

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@wl.fuse
def swiglu_fp8(g: Any, u: Any, scale: Any) -> Any:
    y = F.silu(g.float()) * u.float()
    return (y / scale).clamp(-448, 448).to(torch.float8_e4m3fn), wl.amax(y)


@wl.fuse
def product(x: Any, y: Any) -> Any:
    z = x * y
    return z, wl.amax(z), wl.any_nonfinite(z)


# ---- results


def test_the_largest_value_is_taken_before_it_is_rounded() -> None:
    g, u = torch.randn(2, 7, 9).to(bf16)
    q, largest = swiglu_fp8(g, u, torch.tensor(0.25))
    exact = F.silu(g.float()) * u.float()
    torch.testing.assert_close(largest, exact.abs().max(), rtol=1e-6, atol=0)
    assert q.dtype == torch.float8_e4m3fn
    x = torch.tensor([1.0 + 2**-7, 1.0], dtype=bf16)  # whose square has twice the bits of a bf16
    square = wl.fuse(lambda x: wl.amax(x * x))
    assert square(x).item() == (1 + 2**-7) ** 2
    assert wl.fuse(lambda x: wl.amax(x * x), numerics="eager")(x).item() == (x * x)[0].item()
    assert wl.fuse(lambda x: wl.amax((x * x).to(bf16).to(f32)))(x).item() == (1 + 2**-7) ** 2  # `.to` what it is already rounds nothing


def test_what_overflows_when_it_is_stored_is_not_finite() -> None:
    x = torch.tensor([60000.0, 1.0], dtype=f16)
    z, largest, found = product(x, torch.tensor(2.0, dtype=f16))
    assert z[0].item() == math.inf
    assert (largest.item(), found.item()) == (120000.0, 1.0)


def test_several_and_only_side_results_and_the_same_twice() -> None:
    x = torch.tensor([[1.0, -4.0], [2.0, 3.0]])

    def several(x: Any) -> Any:
        one = wl.amax(x)
        return {"x": one, "row": wl.amax(x[0] * 2), "again": one, "other": wl.amax(x), "empty": wl.amax(x[:0]), "n": wl.any_nonfinite(x)}

    got = wl.fuse(several)(x)
    assert {name: value.item() for name, value in got.items()} == {"x": 4, "row": 8, "again": 4, "other": 4, "empty": 0, "n": 0}
    assert got["x"] is got["again"]
    assert got["x"].data_ptr() != got["other"].data_ptr()
    assert {name: value.item() for name, value in several(x).items()} == {name: value.item() for name, value in got.items()}  # not fused


def test_a_value_is_that_of_its_moment() -> None:
    def later(x: Any) -> Any:
        y = x * 2
        before = wl.amax(y)
        y.mul_(2)
        return before, wl.amax(y)

    assert [value.item() for value in wl.fuse(later)(torch.tensor([3.0]))] == [6, 12]


def test_the_expression_shows_it() -> None:
    text = str(product.plan(torch.ones(3), torch.ones(3), target="h200").expr)
    assert "%3 = amax of %2: f32" in text
    assert "return %2, %3, %4" in text


# ---- refusals


@pytest.mark.parametrize(
    "use",
    [
        lambda value, x: value + 1,
        lambda value, x: x / value,
        lambda value, x: value[None],
        lambda value, x: value.T,
        lambda value, x: value.to(f16),
        lambda value, x: value.view(1),
        lambda value, x: value.mul_(2),
        lambda value, x: x.clone().mul_(value),
        lambda value, x: torch.stack([value, value]),
        lambda value, x: wl.any_nonfinite(value),
        lambda value, x: float(value),
        lambda value, x: 1 if value else 2,
        lambda value, x: product(value, x),
    ],
)
def test_nothing_can_be_computed_of_a_value_of_all_elements(use: Any) -> None:
    with pytest.raises(wl.TraceError, match=r"needs the result of wl\.amax, which is known when the kernel has ended .*Return it"):
        wl.fuse(lambda x: use(wl.amax(x), x))(torch.ones(3))


def test_what_is_no_traced_tensor_is_refused_and_its_dtype_may_be_asked() -> None:
    for bad, match in (
        (lambda x: wl.amax(2.0), "not float"),
        (lambda x: wl.amax(torch.ones(3)), "not a tensor that is not an argument"),
        (lambda x: wl.amax(wl.index(0)), "have none before they meet a tensor"),
    ):
        with pytest.raises(wl.TraceError, match=match):
            wl.fuse(bad)(torch.ones(3))
    assert wl.fuse(lambda x: (wl.amax(x), wl.amax(x).dtype, wl.amax(x).ndim))(torch.ones(3, dtype=bf16))[1:] == (f32, 0)


def test_out_is_overwritten_and_has_the_dtype_and_shape_of_the_value() -> None:
    x, y = torch.randn(2, 5)
    outs = (torch.empty(5), torch.full((), 1e9), torch.full((), 7.0))
    assert product(x, y, out=outs) is outs
    for got, want in zip(outs, product(x, y), strict=True):
        assert torch.equal(got, want)
    with pytest.raises(wl.DtypeError, match=r"out\[1\] is torch\.float64; allowed for one value of all elements: torch\.float32"):
        product(x, y, out=(torch.empty(5), torch.empty((), dtype=f64), torch.empty(())))
    with pytest.raises(wl.LayoutError, match=r"out\[1\] has shape \(1,\)"):
        product(x, y, out=(torch.empty(5), torch.empty(1), torch.empty(())))
    both = torch.empty(())
    with pytest.raises(wl.OverlapError, match="share memory"):
        product(x, y, out=(torch.empty(5), both, both.view(())))
    with pytest.raises(wl.OverlapError, match="shares part of its memory"):
        wl.fuse(lambda x: wl.amax(x))(x, out=x[2])


def test_a_value_in_the_place_of_the_only_element() -> None:
    x = torch.tensor(-3.0)
    assert wl.fuse(lambda x: wl.amax(x * 2))(x, out=x) is x
    assert x.item() == 6


# ---- plans


def test_kernels_are_planned_as_without_values() -> None:
    x, bias = torch.empty(2048, 1024, dtype=bf16, device="meta"), torch.empty(1024, dtype=bf16, device="meta")
    plain = wl.fuse(lambda x, bias: F.gelu(x + bias), name="f")
    with_values = wl.fuse(lambda x, bias: (wl.any_nonfinite(x), y := F.gelu(x + bias), wl.amax(y)), name="f")
    for given in ((x, bias), (x[:, 1:], bias[1:]), (x[:1000, :1000].t(), bias[:1000]), (x[:, ::3], bias[::3])):
        shape = given[0].shape
        room = torch.empty(shape[1] + 1, shape[0] + 1, dtype=bf16, device="meta").t()
        for out in (torch.empty(shape, dtype=bf16, device="meta"), torch.empty(shape[0], shape[1] + 3, device="meta")[:, 3:], room[1:, 1:]):
            (due,) = plain.plan(*given, out=out, target="sm_90").kernels
            value = torch.empty((), device="meta")
            (kernel,) = with_values.plan(*given, out=(value, out, torch.empty((), device="meta")), target="sm_90").kernels
            assert kernel.plan.variant.stores == ("reduced", *due.plan.variant.stores, "reduced")
            for name in ("family", "loads", "elements", "rank", "index_bits", "tile", "strip", "is_whole"):
                assert getattr(kernel.plan.variant, name) == getattr(due.plan.variant, name), name
            assert kernel.plan.grid == due.plan.grid


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_kernels_compile_without_spills_and_with_whole_accesses(arch: str) -> None:
    x = torch.empty(1 << 16, dtype=bf16, device="meta")
    plan = wl.fuse(lambda x: (x * 2, wl.amax(x), wl.any_nonfinite(x * 2), wl.amax(x.double()))).plan(x, target=arch)
    (kernel,) = plan.kernels
    assert plan.spill_bytes == 0
    widths = [(access.kind, access.width_bits) for access in kernel.main_accesses]
    assert widths.count(("load", 128)) == widths.count(("store", 128)) == 1
    assert plan.ptx.count("atom.global.max.u") == 3  # the only writes of a value
    assert "atom.shared" not in plan.ptx
    assert "bar.sync" not in plan.ptx
    assert "ATOMG" not in plan.sass  # nothing waits for what was there


# ---- memory


def test_memory_of_values_starts_as_zero() -> None:
    def output(node: int) -> Output:
        plan = product.plan(torch.ones(3), torch.ones(3), target="h200")
        return new_output(plan.expr, [NodeLayout((3,), (1,))] * 3 + [NodeLayout((), ())] * 2, node)

    assert [output(node).is_reduced for node in (2, 3, 4)] == [False, True, True]
    for _ in range(20):
        torch.full((), 9.0)  # what a new allocation would find
        assert [tensor.item() for tensor in allocate([output(3), output(4)], torch.device("cpu"))] == [0, 0]


def test_a_shortcut_starts_them_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(steps, "THREAD", SimpleNamespace(bound={None}))
    of = Output(0, f32, NodeLayout((), ()), 0, is_reduced=True)
    run = define("def call():", steps_of_new([], [of], torch.device("cpu"), 0, 0))
    kept = [run() for _ in range(3)]
    for value in kept:
        assert value.item() == 0
        value.fill_(9)  # what a new allocation would find
    del kept, value
    assert run().item() == 0


def test_an_operand_is_no_place_for_a_value_before_it_is_read() -> None:
    from wideload.execute import is_safe_in_place

    f = wl.fuse(lambda x, s: wl.amax(x * s))
    x, s, apart = torch.randn(40), torch.tensor(2.0), torch.tensor(0.0)
    kernels = [kernel.plan for kernel in f.plan(x, s, target="h200").kernels]
    assert is_safe_in_place(kernels, [x, s], [apart])
    assert not is_safe_in_place(kernels, [x, s], [s])


# ---- gradients, compiled calls, other tensors


def test_values_have_no_gradient_and_leave_that_of_others_alone() -> None:
    x, y = torch.randn(2, 4, 5, dtype=f64)
    x.requires_grad_()
    for compute in (product, product.reference):
        z, largest, found = compute(x, y)
        assert z.requires_grad
        assert not largest.requires_grad
        assert not found.requires_grad
    z, largest, _ = product(x, y)
    (z * largest).sum().backward()
    assert torch.equal(x.grad, y * largest)
    assert not wl.fuse(lambda x: wl.amax(x))(x).requires_grad
    assert torch.autograd.gradcheck(lambda x: product(x, y)[0], (x,))
    assert [tuple(result.shape) for result in torch.func.vmap(product)(x.detach(), y)] == [(4, 5), (4,), (4,)]


def test_meta_and_empty_tensors() -> None:
    got = product(torch.empty(4, 5, device="meta"), torch.empty(5, device="meta"))
    assert [(of.device.type, tuple(of.shape)) for of in got] == [("meta", (4, 5)), ("meta", ()), ("meta", ())]
    z, largest, found = product(torch.empty(0, 3), torch.empty(3))
    assert (tuple(z.shape), largest.item(), found.item()) == ((0, 3), 0, 0)
    assert product.plan(torch.empty(0, 3), torch.empty(3), target="h200").kernels == ()


@pytest.mark.parametrize("how", ["op", "inline"])
def test_compiled_calls(how: str) -> None:
    f = wl.fuse(product.__wrapped__, compile=how)
    compiled = torch.compile(lambda x, y: f(x, y), fullgraph=True, backend="aot_eager")
    x, y = torch.randn(2, 4, 5)
    for got, want in zip(compiled(x, y), product(x, y), strict=True):
        assert torch.equal(got, want)
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    if how == "op":
        x.requires_grad_()
        z, largest, found = compiled(x, y)
        assert [of.requires_grad for of in (z, largest, found)] == [True, False, False]
        z.sum().backward()
        assert torch.equal(x.grad, y)


def test_operators_pass_opcheck() -> None:
    x, y = torch.randn(2, 4, 5)
    met = operators(lambda: product(x, y))
    met += operators(lambda: product(x, y, out=(torch.empty(4, 5), torch.empty(()), torch.empty(()))))
    assert len(met) == 2
    for operator, args in met:
        torch.library.opcheck(operator, tuple(args))


def test_lists_have_a_value_an_item() -> None:
    xs = [torch.tensor([1.0, -2.0]), torch.empty(0), torch.tensor(math.inf)]
    got = product.foreach(xs, 2.0)
    assert [(largest.item(), found.item()) for _, largest, found in got] == [(4, 0), (0, 0), (math.inf, 1)]
    found = torch.empty(())
    with pytest.raises(wl.OverlapError, match="share memory"):
        product.foreach(xs, 2.0, out=[(x, torch.empty(()), found) for x in xs])


def test_built_kernels_are_those_that_run(tmp_path: Path) -> None:
    x, y = torch.randn(2, 64)
    built = product.build([(x, y)], ["sm_90"], tmp_path)
    assert "product_dense" in str(built)


def test_explanations_count_the_value_once() -> None:
    x = torch.empty(1 << 20, dtype=bf16, device="meta")
    explained = wl.fuse(lambda x: (x * 2, wl.amax(x))).explain(x, target="h200")
    assert explained.bytes_written.value == 2 * (1 << 20) + 4
    assert explained.bytes_read.value == 2 * (1 << 20)
    assert [of.access for of in explained.operands] == ["vector", "vector", "reduced"]
    assert [kernel.op for kernel in explained.eager.kernels] == ["mul", "amax"]
    assert wl.fuse(lambda x: wl.amax(x)).explain(x, target="h200").num_elements == 1 << 20
