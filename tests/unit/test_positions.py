"""Coordinates inside fused functions: which shape they take, which numbers they are, and what is refused; by torch.arange and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wideload as wl
from wideload.emit.positions import position_at
from wideload.lower import ProgramPosition
from wideload.plan import Pace

bf16, f32, i32, i64 = torch.bfloat16, torch.float32, torch.int32, torch.int64


def along(shape: tuple[int, ...], dim: int) -> torch.Tensor:
    view = [1] * len(shape)
    view[dim] = shape[dim]
    return torch.arange(shape[dim]).view(view).expand(shape)


def counted(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2, -3])
def test_a_coordinate_counts_along_a_dim_of_what_it_meets(dim: int) -> None:
    x = torch.zeros(3, 4, 5, dtype=i64)
    f = wl.fuse(lambda v: v + wl.index(dim))
    assert torch.equal(f(x), along((3, 4, 5), dim))
    assert torch.equal(f(x.permute(2, 0, 1)), along((5, 3, 4), dim))
    assert torch.equal(f(x[:, ::2, 1:]), along((3, 2, 4), dim))
    assert torch.equal(f(x.new_zeros(1).expand(2, 3, 4)), along((2, 3, 4), dim))


def test_the_linear_index_is_row_major_whatever_the_strides() -> None:
    f = wl.fuse(lambda v: v + wl.linear_index())
    for x in (torch.zeros(3, 5), torch.zeros(5, 3).t(), torch.zeros(3, 9)[:, 2:7], torch.zeros(5).expand(3, 5)):
        assert torch.equal(f(x), counted((3, 5)).float())
    assert f(torch.zeros(())).item() == 0
    assert f(torch.zeros(2, 0)).shape == (2, 0)


def test_a_coordinate_leaves_the_strides_to_what_it_meets() -> None:
    turned = torch.zeros(5, 3).t()
    for f in (lambda v: v + wl.index(0), lambda v: wl.linear_index() * v, lambda v: torch.where(wl.index(0) > wl.index(1), v, 0.0)):
        assert wl.fuse(f)(turned).stride() == turned.stride()
    wide = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert wl.fuse(lambda v: torch.where((wl.index(1) + wl.linear_index()) % 2 == 0, v, 1.0))(wide).stride() == wide.stride()


def test_it_has_dims_and_dtype_int64() -> None:
    """As torch.arange: beside a tensor of integers the wider wins, beside floats these do; explicit conversions hold."""
    for x, want in ((torch.zeros(3, dtype=i32), i64), (torch.zeros(3, dtype=bf16), bf16), (torch.zeros(3, dtype=torch.bool), i64)):
        assert wl.fuse(lambda v: v + wl.index(0))(x).dtype == want == (x + torch.arange(3)).dtype
    assert wl.fuse(lambda v: v + wl.index(0).float())(torch.zeros(3, dtype=bf16)).dtype == f32

    def look(v: Any) -> Any:
        mask = wl.index(0) > 1
        told = wl.linear_index().dtype, mask.dtype, (wl.index(0) / 2).dtype, mask.is_floating_point(), wl.index(0).itemsize
        return torch.where(mask, v, 0.0), *told

    got, *told = wl.fuse(look)(torch.ones(3))
    assert got.tolist() == [0, 0, 1]
    assert told == [i64, torch.bool, f32, False, 8]


def test_the_shape_is_the_broadcast_of_what_it_meets_first() -> None:
    column, row = torch.zeros(3, 1, dtype=i64), torch.zeros(4, dtype=i64)
    got = wl.fuse(lambda c, r: (c + wl.linear_index()) * 100 + (r + wl.linear_index()))(column, row)
    assert torch.equal(got, along((3, 4), 0) * 100 + along((3, 4), 1))
    got = wl.fuse(lambda c, r: torch.where(wl.linear_index() >= 0, c, r) + torch.where(wl.linear_index() > 4, c + 1, r))(column, row)
    assert torch.equal(got, (counted((3, 4)) > 4).long())


def test_one_coordinate_serves_several_shapes() -> None:
    def f(a: Any, b: Any) -> Any:
        last = wl.index(-1) * 2 + 1
        return a + last, b + last

    a, b = wl.fuse(f)(torch.zeros(2, 3, dtype=i64), torch.zeros(5, dtype=i64))
    assert torch.equal(a, along((2, 3), 1) * 2 + 1)
    assert torch.equal(b, torch.arange(5) * 2 + 1)


def test_views_and_concatenations_keep_the_numbers() -> None:
    x = torch.zeros(4, 6, dtype=i64)
    n = counted((4, 6))
    assert torch.equal(wl.fuse(lambda v: (v + wl.linear_index())[1:, ::2].t() * 1)(x), n[1:, ::2].t())
    assert torch.equal(wl.fuse(lambda v: v.t() + wl.index(0))(x), along((6, 4), 0))
    assert torch.equal(wl.fuse(lambda v: torch.cat([v, v]) + wl.index(0))(x), along((8, 6), 0))
    assert torch.equal(wl.fuse(lambda v: torch.cat([v, v + wl.index(0)]))(x), torch.cat([n * 0, along((4, 6), 0)]))


def test_a_mask_and_a_runtime_scalar() -> None:
    scores = torch.randn(2, 3, 4)
    f = wl.fuse(lambda s, offset: torch.where(wl.index(-1) <= wl.index(-2) + offset, s, -math.inf))
    for offset in (0, 1, -1):
        mask = torch.ones(3, 4, dtype=torch.bool).tril(offset)
        assert torch.equal(f(scores, offset), scores.masked_fill(~mask, -math.inf))


@pytest.mark.parametrize("make", [lambda: wl.index(0), lambda: wl.linear_index()])
def test_outside_a_fused_function_there_is_no_element(make: Callable[[], Any]) -> None:
    with pytest.raises(wl.TraceError, match=r"wl\.(index|linear_index) was called outside a fused function.*Use torch\.arange there"):
        make()


@pytest.mark.parametrize(
    ("function", "error", "what"),
    [
        (lambda v: wl.index(0), wl.TraceError, "the function returns coordinates"),
        (lambda v: (v, wl.index(0) > 1), wl.TraceError, "the function returns coordinates"),
        (lambda v: v + wl.index(1.0), wl.TraceError, "wl.index takes the number of a dim, not 1.0"),  # type: ignore[arg-type]
        (lambda v: v + wl.index(2), wl.LayoutError, r"wl\.index\(2\) meets a tensor of 2-d shape \(\d+, \d+\); allowed: -2 to 1"),
        (lambda v: v + wl.index(-3), wl.LayoutError, "allowed: -2 to 1"),
        (lambda v: v[0, 0] + wl.index(0), wl.LayoutError, "meets a tensor of 0-d shape .*allowed: none; wl.linear_index"),
        (lambda v: v + wl.index(0).shape[0], wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + wl.index(0)[1:], wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + wl.index(0).t(), wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + wl.index(0).T, wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + next(iter(wl.index(0))), wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + torch.rand_like(wl.index(0).float()), wl.TraceError, "needs the shape of coordinates"),
        (lambda v: torch.cat([v, wl.index(0)]), wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + wl.index(0).sum(), wl.TraceError, "needs the shape of coordinates"),
        (lambda v: v + wl.index(0).add_(1), wl.TraceError, "writes into coordinates"),
        (lambda v: v if wl.index(0) > 0 else v + 1, wl.TraceError, "a branch"),
        (lambda v: v[wl.index(0)], wl.TraceError, "an index that makes a view must be an integer"),
    ],
)
def test_what_is_refused(function: Callable[..., Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        wl.fuse(function)(torch.ones(3, 4))


def test_a_new_shape_compiles_nothing() -> None:
    f = wl.fuse(lambda v: torch.nn.functional.dropout(v, 0.1) + wl.index(0) + wl.linear_index(), name="f")
    sources = {f.plan(torch.ones(shape), target="sm_90").source for shape in ((64, 32), (8, 96), (1024, 4))}
    assert len(sources) == 1
    assert f.plan(torch.ones(3, 32), target="sm_90").kernels[0].plan.reasons[-1].choice == "random numbers"


def test_the_text_of_a_position() -> None:
    position = ProgramPosition(0, "index", None)
    assert position_at(position, Pace("run", 32), ["i"]) == "(unsigned)index_offset + (unsigned)(i)"
    assert position_at(position, Pace("row", 32), ["c", "r"]) == "(unsigned)index_offset + (unsigned)(r) * (unsigned)index_stride1"
    wide = "(unsigned long long)"
    assert position_at(position, Pace("apart", 64), ["c"]) == f"{wide}index_offset + {wide}(c) * {wide}index_stride0"
