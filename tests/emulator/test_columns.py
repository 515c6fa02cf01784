"""Kernels that add up rows, run on the CPU: gradients of biases and scales against sums in double, bit for bit where these are exact."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator import test_grad
from tests.emulator.test_grad import Launched, assert_gradients, launched  # noqa: F401 - a fixture
from wideload import execute, torch_op
from wideload.plan import DEFAULT, Reason, columns

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SUMMED, STORED = [("f", 1), ("f_backward", 2)], [("f", 1), ("f_backward", 1)]
"""What is launched where the kernel adds up, and another the partial sums; and where it does not."""

LARGEST = {bf16: 255, f16: 15, f32: 255, f64: 255}
"""Odd numbers up to which products are exact in the dtype's sums, and need more bits than a half has."""


@pytest.fixture(autouse=True)
def _with_kernels(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(torch_op, "has_kernels", lambda device: True)


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Kernels are run with a pattern of their text replaced; one that is not there is an error."""

    def edit(pattern: str, replacement: str) -> None:
        original = test_grad.emit_kernel

        def emit(program: Any, variant: Any) -> str:
            text = original(program, variant)
            changed, count = re.subn(pattern, replacement, text)
            assert count or variant.family != "columns", pattern
            return changed

        monkeypatch.setattr(test_grad, "emit_kernel", emit)

    return edit


def odd(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(LARGEST[dtype] + 1) // 2, LARGEST[dtype] // 2, shape, generator=generator) * 2 + 1).to(dtype)


def scale() -> wl.FusedFunction:
    """A new one, which knows no layouts from other tests."""
    return wl.fuse(lambda x, w: x * w, name="f")


def check_scale(x: torch.Tensor, grad: torch.Tensor) -> None:
    """The gradient of a scale is the exact sum of the unrounded products, rounded once."""
    columns = x.shape[-1:]
    w = odd(*columns, dtype=x.dtype, seed=1)
    got = torch.autograd.grad(scale()(x.requires_grad_(), w.requires_grad_()), (x, w), grad)
    exact = (x.detach().double() * grad.double()).flatten(0, -2).sum(0)
    assert exact.abs().max() < 2**24
    assert torch.equal(got[0], (grad.double() * w.detach().double()).to(x.dtype))
    assert torch.equal(got[1], exact.to(x.dtype))
    assert got[1].dtype == x.dtype


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64], ids=str)
def test_a_scale_receives_its_exact_sum(launched: Launched, dtype: torch.dtype) -> None:  # noqa: F811
    """Rows that fill no access of a thread, no block, several; columns of fewer accesses than a block takes, of as many, of more."""
    access = 16 // dtype.itemsize
    for rows in (32, 33, 71, 300):
        for accesses in (1, 3, 16, 17, 37):
            launched.clear()
            check_scale(odd(rows, accesses * access, dtype=dtype), odd(rows, accesses * access, dtype=dtype, seed=2))
            assert launched == SUMMED


def test_layouts_in_which_rows_are_added_up(launched: Launched) -> None:  # noqa: F811
    x = odd(40, 48, dtype=bf16)
    pitched = odd(40, 64, dtype=bf16)[:, 8:56]
    for tensor, grad in ((x, pitched), (pitched, x), (odd(5, 8, 48, dtype=bf16), odd(5, 8, 48, dtype=bf16, seed=3))):
        launched.clear()
        check_scale(tensor.detach(), grad)
        assert launched == SUMMED
    several: list[tuple[Callable[..., Any], tuple[int, ...], int]] = [
        (lambda x, w: x * w, (1, 24), 2),
        (lambda x, w: x.view(40, 3, 8) * w, (3, 8), 3),  # the gradient of x has another shape, and a kernel of its own
        (lambda x, w: x * w.view(3, 8).flatten(), (24,), 2),
        (lambda x, w: x.view(5, 8, 24) * w[None], (1, 24), 3),
        (lambda x, w: x + w, (24,), 2),  # that of w is all that is computed
    ]
    for function, shape, num_kernels in several:
        launched.clear()
        tensors = [odd(40, 24, dtype=f32), odd(*shape, dtype=f32)]
        assert_gradients(wl.fuse(function, name="f"), function, tensors, 2, odd(*function(*tensors).shape, dtype=f32, seed=4))
        assert launched == [("f", 1), ("f_backward", num_kernels)], (shape, num_kernels)


def test_operands_that_are_one_element_a_row_or_for_all(launched: Launched) -> None:  # noqa: F811
    x, w, column, one = odd(70, 48, dtype=f32), odd(48, dtype=f32, seed=1), torch.tensor([[1.0], [-2.0]]).repeat(35, 1), torch.tensor(3.0)
    several: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], int]] = [
        (lambda x, w, column: x * column * w, (x, w, column), 2),
        (lambda x, w, one: x * w * one, (x, w, one), 2),
        (lambda x, w: x * w, (x, w), 2),
        (lambda w, x: x + w, (w, x), 1),
    ]
    for function, tensors, num_wanted in several:
        for grad in (odd(70, 48, dtype=f32, seed=2), torch.ones(1, 1).expand(70, 48), torch.ones(70, 1).expand(70, 48)):
            launched.clear()
            assert_gradients(wl.fuse(function, name="f"), function, tensors, num_wanted, grad)
            assert launched == SUMMED


def test_layouts_in_which_terms_are_stored(launched: Launched) -> None:  # noqa: F811
    """Rows that are not whole accesses, not aligned, too few, across memory, in several dims; and sums of something else than rows."""
    x, w, grad = odd(40, 48, dtype=f32), odd(48, dtype=f32), odd(40, 48, dtype=f32, seed=5)
    odd_rows, shifted = odd(40, 49, dtype=f32), odd(40 * 48 + 1, dtype=f32)[1:].view(40, 48)
    for tensors, g in (
        ((odd_rows, odd(49, dtype=f32)), odd_rows),
        ((x, w), shifted),
        ((x, odd(49, dtype=f32)[1:]), grad),
        ((x, w), odd(40, 49, dtype=f32)[:, :48]),
        ((x, w), odd(48, 40, dtype=f32).t()),
        ((odd(48, 48, dtype=f32).t(), w), odd(48, 48, dtype=f32, seed=5).t()),
        ((x[:31], w), grad[:31]),
        ((x, odd(40, 1, dtype=f32)), grad),
        ((x, odd(1, 1, dtype=f32)), grad),
        ((odd(4, 40, 48, dtype=f32), odd(4, 1, 48, dtype=f32)), odd(4, 40, 48, dtype=f32)),
        ((odd(5, 80, 48, dtype=f32)[:, :40], w), odd(5, 40, 48, dtype=f32)),
    ):
        launched.clear()
        assert_gradients(scale(), lambda x, w: x * w, tensors, 2, g)
        assert launched == STORED, [(t.shape, t.stride()) for t in (*tensors, g)]


def test_values_of_an_elements_place(launched: Launched) -> None:  # noqa: F811
    """Coordinates, and a mask that forward and backward draw alike."""
    x, w = odd(90, 72, dtype=f32).requires_grad_(), odd(72, dtype=f32, seed=1).requires_grad_()
    grad = odd(90, 72, dtype=f32, seed=2)
    masked = wl.fuse(lambda x, w: torch.where(wl.index(-1) <= wl.index(-2), x * w, 0.0), name="f")
    got = torch.autograd.grad(masked(x, w), (x, w), grad)
    assert torch.equal(got[1], (x * grad).tril().sum(0).detach())
    assert launched == SUMMED
    launched.clear()
    y = wl.fuse(lambda x, w: F.dropout(x * w, 0.5), name="f")(x, w)
    got = torch.autograd.grad(y, (x, w), grad)
    kept = (y != 0).detach()
    assert 0.4 < kept.float().mean() < 0.6
    assert torch.equal(got[0], (2 * grad * w * kept).detach())
    assert torch.equal(got[1], (2 * grad * x * kept).sum(0).detach())
    assert launched == SUMMED


@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_a_bias_receives_its_sum(launched: Launched, dtype: torch.dtype, approximate: str) -> None:  # noqa: F811
    """In bf16 its terms, of up to one and a half, have the error of the half tier, a sixteenth of a rounding; fp32 adds up 100."""
    generator = torch.Generator().manual_seed(6)
    x, bias, grad = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((100, 136), (136,), (100, 136)))
    f = wl.fuse(lambda x, bias: F.gelu(x + bias, approximate=approximate), name="f")
    got = torch.autograd.grad(f(x.requires_grad_(), bias.requires_grad_()), (x, bias), grad)
    wide = [tensor.detach().double().requires_grad_() for tensor in (x, bias)]
    want = torch.autograd.grad(F.gelu(wide[0] + wide[1], approximate=approximate), wide, grad.double())
    size = want[0].abs().sum(0)
    unit, of_terms = (2**-8, 2**-13) if dtype == bf16 else (2**-24, 2**-21)
    assert ((got[1].double() - want[1]).abs() <= unit * want[1].abs() + of_terms * size).all()
    assert launched == SUMMED


def test_two_sums_of_one_kernel(launched: Launched) -> None:  # noqa: F811
    """A scale and a shift: the second waits until the first is out of shared memory. Twice the same sum is one."""
    x, w, b, grad = odd(70, 64, dtype=f32), odd(64, dtype=f32, seed=1), odd(64, dtype=f32, seed=2), odd(70, 64, dtype=f32, seed=3)
    assert_gradients(wl.fuse(lambda x, w, b: x * w + b, name="f"), lambda x, w, b: x * w + b, (x, w, b), 3, grad)
    assert launched == [("f", 1), ("f_backward", 3)]
    launched.clear()
    assert_gradients(wl.fuse(lambda x, b, c: x * 2 + b + c, name="f"), lambda x, b, c: x * 2 + b + c, (x, w, b), 3, grad)
    assert launched == [("f", 1), ("f_backward", 2)]


def test_a_sum_beside_another_part_of_the_gradient(launched: Launched) -> None:  # noqa: F811
    """It stays wide until all parts are added up: 2^10 of rounded parts of opposite signs, and one."""
    x, w = torch.ones(64, 16, dtype=bf16), torch.ones(16, dtype=bf16).requires_grad_()
    y, z = wl.fuse(lambda x, w: (x * w, w * 2), name="f")(x, w)
    grad = torch.full((64, 16), 16.0, dtype=bf16)
    grad[0] = 17
    (got,) = torch.autograd.grad((y, z), w, (grad, torch.full((16,), -512.0, dtype=bf16)))
    assert torch.equal(got, torch.ones(16, dtype=bf16))
    assert launched == [("f", 2), ("f_backward", 3)]


def test_nan_and_infinity_stay_in_their_columns(launched: Launched) -> None:  # noqa: F811
    x, grad = torch.ones(50, 16), torch.ones(50, 16)
    x[3, 1], x[49, 2], x[0, 5], x[40, 5], grad[33, 9] = torch.nan, torch.inf, torch.inf, -torch.inf, -torch.inf
    w = torch.ones(16, requires_grad=True)
    (got,) = torch.autograd.grad(scale()(x, w), w, grad)
    torch.testing.assert_close(got, (x * grad).sum(0), rtol=0, atol=0, equal_nan=True)
    assert got.isnan().sum() == 2
    assert launched == SUMMED


def test_eager_numerics_add_up_rounded_terms(launched: Launched) -> None:  # noqa: F811
    x, w, grad = odd(64, 32, dtype=bf16), odd(32, dtype=bf16, seed=1).requires_grad_(), odd(64, 32, dtype=bf16, seed=2)
    f = wl.fuse(lambda x, w: x * w, name="f", numerics="eager")
    (got,) = torch.autograd.grad(f(x, w), w, grad)
    assert torch.equal(got, (x * grad).double().sum(0).to(bf16))
    assert not torch.equal(got, (x.double() * grad.double()).sum(0).to(bf16))
    assert launched == SUMMED


def test_second_derivatives_store_terms(launched: Launched) -> None:  # noqa: F811
    x, w = odd(40, 32, dtype=f64).requires_grad_(), odd(32, dtype=f64, seed=1).requires_grad_()
    cube = wl.fuse(lambda x, w: x * w * w, name="f")
    (first,) = torch.autograd.grad(cube(x, w).sum(), w, create_graph=True)
    assert launched == STORED
    (second,) = torch.autograd.grad(first.sum(), w)
    torch.testing.assert_close(second, 2 * x.sum(0))
    assert launched[2:] == [("f_backward_backward", 2)]  # which is the last, and adds up


def test_blocks_of_many_rows(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Of up to 256 rows, whole and not, and less of them in the last group: only where blocks wait for their turn otherwise."""
    found = set()
    for at_once, sizes in ((1, (63, 64, 65, 200, 300, 600)), (2, (257, 700, 1000)), (4, (1100, 2000))):
        monkeypatch.setattr(columns, "BLOCKS_AT_ONCE", at_once)
        for rows in sizes:
            check_scale(odd(rows, 128, dtype=bf16), odd(rows, 128, dtype=bf16, seed=2))
            found.add(columns.find_parts(rows, 128))
    assert launched == SUMMED * 11
    assert {(parts.together, parts.finer) for parts in found} >= {(1, 1), (1, 2), (1, 4), (2, 2), (4, 4)}
    monkeypatch.setattr(columns, "MOST_PARTS", 1)
    check_scale(odd(100, 256, dtype=bf16), odd(100, 256, dtype=bf16, seed=2))


def test_random_layouts(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Dims in any order, equal or not, with gaps, expanded; operands broadcast along any of them: a third of the sums are over rows."""
    monkeypatch.setattr(columns, "PART_ROWS", (8, 4))
    monkeypatch.setattr(columns, "LEAST_ROWS", 4)
    draw, num_summed = random.Random(7), 0

    def laid_out(shape: list[int], order: list[int], seed: int) -> torch.Tensor:
        wider = [shape[dim] + draw.choice([0, 0, 0, 0, 8]) for dim in order]
        tensor = odd(*wider, dtype=f64, seed=seed)[tuple(slice(shape[dim]) for dim in order)]
        return tensor.permute([order.index(dim) for dim in range(len(shape))])

    for seed in range(120):
        full = [draw.choice([1, 8, 8, 8, 24]) for _ in range(draw.choice([2, 2, 3]))]
        least = draw.randrange(len(full))
        of_w = [1 if dim < least or draw.random() < 0.1 else size for dim, size in enumerate(full)][draw.choice([0, least]) :]
        order = [*range(len(full))] if draw.random() < 0.7 else draw.sample(range(len(full)), len(full))  # of x and its gradient
        x, grad = laid_out(full, order, seed), laid_out(full, order if draw.random() < 0.8 else [*range(len(full))], seed + 2)
        w = laid_out(of_w, [*range(len(of_w))], seed + 1)
        got = torch.autograd.grad(scale()(x.requires_grad_(), w.requires_grad_()), (x, w), grad)
        assert torch.equal(got[0], (w * grad).detach())
        assert torch.equal(got[1], (x * grad).detach().sum_to_size(w.shape)), (x.shape, x.stride(), w.shape, w.stride(), grad.stride())
        num_summed += launched[-1][1] == 2
    assert 30 < num_summed < 90


def test_other_cuts(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Blocks of other sizes, more accesses a thread, offsets of 64 bits."""
    for accesses, threads in ((1, 64), (2, 512), (4, 256)):
        choices = {"accesses": accesses, "narrowing_accesses": accesses}
        monkeypatch.setattr(columns, "COLUMNS_THREADS", threads)
        monkeypatch.setattr(execute, "tuning_of", lambda device, choices=choices: DEFAULT.with_choices(choices))
        for rows, width in ((50, 64), (100, 160), (130, 1056)):
            check_scale(odd(rows, width, dtype=bf16), odd(rows, width, dtype=bf16, seed=2))
    monkeypatch.setattr(execute, "tuning_of", lambda device: DEFAULT)
    monkeypatch.setattr(columns, "choose_index_bits", lambda *_: (64, Reason("index width", "64 bits", "here")))
    check_scale(odd(71, 136, dtype=bf16), odd(71, 136, dtype=bf16, seed=2))
    assert launched == SUMMED * 10


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (r"__syncthreads\(\);\n(?=    for \(unsigned column)", ""),  # lanes are read before they are written
        (r"min\(row \+ r \* (\d+), end - 1\)", r"row + r * \1"),  # rows behind the last are loaded
        (r"\+= is_row \? (\w+)\[k\] : 0;", r"+= \1[k];"),  # and added up
        (r"if \(is_row\) store_vector", "store_vector"),  # and stored, where another block's are
        (r"column < across \* N && column < left", "column < across * N"),  # columns behind the last are written
        (r"warp \* across \+ column / N", "warp * across"),
        (r"(\w+ row0 = \w+ \* )", r"\1 0 * "),
        (r"warp < warps; \+\+warp", "warp + 1 < warps; ++warp"),
        (r"lanes >= across", "lanes > across"),
        (r"\(is_late \? \(unsigned\)early_groups : 0\)", "0"),
        (r"\(is_late \? \(unsigned\)early_parts : 0\)", "0"),
        (r"turn = of_these - \(of_these >> of_group << of_group\)", "turn = 0"),
        (r"warp_lanes < across\)", "warp_lanes < across / 2)"),
    ],
)
def test_wrong_kernels_are_found(
    edited: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch, pattern: str, replacement: str
) -> None:
    edited(pattern, replacement)
    monkeypatch.setattr(columns, "LEAST_TURNS", 0.001)
    monkeypatch.setattr(columns, "PART_ROWS", (128, 32))
    monkeypatch.setattr(columns, "BLOCKS_AT_ONCE", 1)
    with pytest.raises(AssertionError):
        check_scale(odd(300, 136, dtype=bf16), odd(300, 136, dtype=bf16, seed=2))


def test_a_second_sum_that_does_not_wait_is_found(edited: Callable[[str, str], None], launched: Launched) -> None:  # noqa: F811
    edited(r"__syncthreads\(\);\n    (?=add_lanes)", "")
    with pytest.raises(AssertionError):
        test_two_sums_of_one_kernel(launched)


def test_rounded_terms_are_found(edited: Callable[[str, str], None]) -> None:
    edited(r"out1_sum\[k\] \+= is_row \? out1_v\[k\] : 0;", "if (is_row) out1_sum[k] += widen(narrow_to<bf16>::from(out1_v[k]));")
    with pytest.raises(AssertionError):
        check_scale(odd(71, 136, dtype=bf16), odd(71, 136, dtype=bf16, seed=2))
