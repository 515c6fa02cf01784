"""Kernels that add up rows, run on the CPU: gradients of biases and scales against sums in double, bit for bit where these are exact."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator import test_grad
from tests.emulator.test_grad import Launched, assert_gradients, launched  # noqa: F401 - a fixture
from wideload import torch_op
from wideload.plan import columns

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SUMMED, STORED = [("f", 1), ("f_backward", 2)], [("f", 1), ("f_backward", 1)]
"""What is launched where the kernel adds up, and another the partial sums; and where it does not."""

LARGEST = {bf16: 255, f16: 15, f32: 255, f64: 255}
"""Odd numbers up to which products are exact in the dtype's sums, and need more bits than a half has."""

scale = wl.fuse(lambda x, w: x * w, name="f")
bias_gelu = wl.fuse(lambda x, bias: F.gelu(x + bias, approximate="tanh"), name="f")


@pytest.fixture(autouse=True)
def _with_kernels(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(torch_op, "_has_kernels", lambda device: True)


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


def check_scale(x: torch.Tensor, grad: torch.Tensor) -> None:
    """The gradient of a scale is the exact sum of the unrounded products, rounded once."""
    columns = x.shape[-1:]
    w = odd(*columns, dtype=x.dtype, seed=1)
    got = torch.autograd.grad(scale(x.requires_grad_(), w.requires_grad_()), (x, w), grad)
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
    for function, shape in (
        (lambda x, w: x * w, (1, 24)),
        (lambda x, w: x.view(40, 3, 8) * w, (3, 8)),
        (lambda x, w: x.view(5, 8, 24) + w[None], (1, 24)),
    ):
        launched.clear()
        assert_gradients(wl.fuse(function, name="f"), function, [odd(40, 24, dtype=f32), odd(*shape, dtype=f32)], 2, torch.ones(40, 24)
                         if shape == (1, 24) and function(odd(40, 24, dtype=f32), odd(1, 24, dtype=f32)).ndim == 2
                         else torch.ones(function(odd(40, 24, dtype=f32), odd(*shape, dtype=f32)).shape))
        assert launched == SUMMED
