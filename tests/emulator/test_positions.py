"""Coordinates and random integers in the kernels' own text: every family, layout and width against torch.arange and Philox by Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import wideload as wl
from tests.emulator.emulated import behind, run_emulated
from tests.emulator.emulator import build, run_on
from tests.emulator.test_kernels import RANDOM, SHAPES, family, shifted, sliced, views
from tests.philox import integers
from wideload.execute import kernel_arguments

pytestmark = pytest.mark.usefixtures("full_blocks")

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i64 = torch.int8, torch.int64
SEED = 5

LAYOUTS: dict[str, tuple[str, Callable[[torch.dtype], torch.Tensor]]] = {
    "dense": ("dense", lambda dtype: torch.zeros(1037, dtype=dtype)),
    "one element": ("dense", lambda dtype: torch.zeros(1, dtype=dtype)),
    "no dims": ("dense", lambda dtype: torch.zeros((), dtype=dtype)),
    "misaligned": ("rows", lambda dtype: shifted(torch.zeros(600, dtype=dtype), 3)),
    "turned": ("rows", lambda dtype: torch.zeros(41, 37, dtype=dtype).t()),
    "columns of a matrix": ("rows", lambda dtype: torch.zeros(9, 50, dtype=dtype)[:, 3:38]),
    "channels last": ("rows", lambda dtype: torch.zeros(2, 17, 3, 5, dtype=dtype).to(memory_format=torch.channels_last)),
    "narrow rows": ("strided", lambda dtype: torch.zeros(3, 7, 2, dtype=dtype).permute(2, 0, 1)),
}


def seed_of() -> int:
    """The seed of a call after ``torch.manual_seed(SEED)``, which is set again."""
    torch.manual_seed(SEED)
    seed = int(torch.randint(-(2**63), 2**63 - 1, (1,)).item())
    torch.manual_seed(SEED)
    return seed


def counted(shape: Any) -> torch.Tensor:
    return torch.arange(math.prod(shape)).view(tuple(shape))


def same(got: torch.Tensor, want: torch.Tensor, note: str = "") -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape), note
    assert torch.equal(got, want), f"{note}: {(got != want).sum()} of {want.numel()} differ"


def into(shape: tuple[int, ...], dtype: torch.dtype, gap: int) -> torch.Tensor:
    """An output with gaps between its rows."""
    return torch.zeros(*shape[:-1], shape[-1] + 1 + gap, dtype=dtype)[..., 1 : shape[-1] + 1]


@pytest.mark.parametrize("dtype", [i8, bf16, f64], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_linear_index_in_every_family(name: str, dtype: torch.dtype) -> None:
    x = LAYOUTS[name][1](dtype)
    f = wl.fuse(lambda v: v + (wl.linear_index() % 101).to(v.dtype), name="count")
    same(run_emulated(f, x), (counted(x.shape) % 101).to(dtype), family(f, x))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "no dims"])
def test_coordinates_in_every_family(name: str) -> None:
    x = LAYOUTS[name][1](f32)
    f = wl.fuse(lambda v: v.long() * 0 + wl.index(-1) * 1000 + wl.index(0), name="count")
    want = torch.arange(x.shape[-1]) * 1000 + torch.arange(x.shape[0]).view(-1, *[1] * (x.ndim - 1))
    same(run_emulated(f, x), want.expand(x.shape))


def test_the_families_are_those_meant() -> None:
    f = wl.fuse(lambda v: v + wl.linear_index(), name="count")
    assert {name: family(f, make(f32)) for name, (_, make) in LAYOUTS.items()} == {name: meant for name, (meant, _) in LAYOUTS.items()}


@pytest.mark.parametrize(("dtype", "shape"), [(f32, (96, 72)), (bf16, (200, 136)), (i8, (131, 260))], ids=str)
def test_in_tiles(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """A turned operand; edges and halos where sizes and pitches do not fit."""
    seed = seed_of()
    f = wl.fuse(lambda v, w: (v + w).to(i64) * 0 + wl.linear_index() * 7 + wl.index(0), name="count")
    g = wl.fuse(lambda v, w: torch.rand_like(v + w, dtype=f32) + (v + w) * 0, name="drawn")
    n = counted(shape)
    want = n * 7 + torch.arange(shape[0])[:, None]
    x, y = torch.zeros(shape, dtype=dtype), torch.zeros(shape[::-1], dtype=dtype).t()
    uniform = (integers(seed, 0, 32, n[:3]) >> 8).float() / 2**24
    for gap in (0, 3):
        for function, result in ((f, i64), (g, f32)):
            out = into(shape, result, gap) if gap else torch.zeros(shape, dtype=result)
            assert family(function, x, y, out=out) == "tile"
            torch.manual_seed(SEED)
            run_emulated(function, x, y, out=out)
            if result == i64:
                same(out, want)
            else:
                same(out[:3], uniform)


@pytest.mark.parametrize("dtype", [bf16, i8], ids=str)
def test_in_tiles_whose_lines_begin_at_sectors(dtype: torch.dtype) -> None:
    """Narrow results with gaps: a line's first access may begin more than an access before it."""
    seed, shape = seed_of(), (131, 141)
    f = wl.fuse(lambda v, w: torch.bernoulli(v, 0.5) + v + w + (wl.linear_index() % 61 * 2).to(v.dtype), name="both")
    x, y = torch.zeros(shape, dtype=dtype), torch.zeros(shape[::-1], dtype=dtype).t()
    out = into(shape, dtype, 3)
    plan = f.plan(x, y, out=out, target="sm_90").kernels[0].plan
    assert plan.variant.tile is not None
    assert plan.variant.tile.halo * dtype.itemsize == 32
    torch.manual_seed(SEED)
    n = counted(shape)
    same(run_emulated(f, x, y, out=out), ((integers(seed, 0, 16, n) < 32768) + n % 61 * 2).to(dtype))


def test_in_tiles_whose_lines_run_along_an_outer_dim() -> None:
    """The kernel nests its loops in another order than the output's: positions follow."""
    f = wl.fuse(lambda v, w: (v + w) * 0 + wl.linear_index() + wl.index(0) * 10000 + wl.index(1) * 100000, name="count")
    shape = (64, 5, 96)
    x, y = torch.zeros(shape), torch.zeros(5, 96, 64).permute(2, 0, 1)
    assert family(f, x, y) == "tile"
    first, second = (torch.arange(size).view(-1, *[1] * dims) for size, dims in ((64, 2), (5, 1)))
    same(run_emulated(f, x, y), (counted(shape) + first * 10000 + second * 100000).float())


@pytest.mark.parametrize("dtype", [bf16, f16, f32, f64], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_draws_in_every_family_are_philox(name: str, dtype: torch.dtype) -> None:
    """16 bits for dropout by 0.3, 32 by 1e-3, and for uniform numbers as many as the dtype takes; a stream each."""
    x = LAYOUTS[name][1](dtype) * 0 + 1
    f = wl.fuse(lambda v: (F.dropout(v, 0.3), F.dropout(v, 1e-3), torch.rand_like(v)), name="drawn")
    seed, n = seed_of(), counted(x.shape)
    bits, digits = {bf16: (16, 8), f16: (16, 11), f32: (32, 24), f64: (53, 53)}[dtype]
    coarse, fine, uniform = run_emulated(f, x)
    wide = f64 if dtype == f64 else f32
    same(coarse, ((integers(seed, 0, 16, n) >= 19661) * torch.tensor(1 / 0.7, dtype=wide)).to(dtype), "16 bits")
    same(fine, ((integers(seed, 1, 32, n) >= 4294967) * torch.tensor(1 / 0.999, dtype=wide)).to(dtype), "32 bits")
    same(uniform, ((integers(seed, 2, bits, n) >> bits - digits).double() / 2**digits).to(dtype), "uniform")


@pytest.mark.parametrize("dtype", [i8, f32], ids=str)
def test_rows_that_begin_anywhere(dtype: torch.dtype) -> None:
    """Outputs with gaps, of every length from one access to beyond three: positions at the ends of rows, and blocks cut by them."""
    seed = seed_of()
    f = wl.fuse(lambda v: v * 0 + (wl.linear_index() % 97).to(v.dtype), name="count")
    g = wl.fuse(lambda v: torch.bernoulli(v, 0.5), name="mask")
    for columns in range(16 // dtype.itemsize, 3 * 16 // dtype.itemsize + 2):
        n = counted((5, columns))
        for gap in (0, 2, 7):
            x = sliced(5, columns, columns + gap, gap, dtype)
            out = into((5, columns), dtype, gap)
            same(run_emulated(f, x, out=out), (n % 97).to(dtype), f"{columns} columns")
            torch.manual_seed(SEED)
            same(run_emulated(g, x, out=out), (integers(seed, 0, 16, n) < 32768).to(dtype), f"{columns} columns")


@RANDOM
@given(data=st.data(), shape=SHAPES.filter(lambda shape: 0 not in shape), dtype=st.sampled_from((f32, bf16)))
def test_any_layout(data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The mask of a dropout and a count, of operands that are stretched and turned; the draw is of the first's shape."""
    x, y = data.draw(views(shape, dtype)), data.draw(views(shape, dtype))
    f = wl.fuse(lambda v, w: (torch.bernoulli(v, 0.5) + w * 0).nan_to_num() + (v + w * 0).isnan() * 0 + wl.linear_index() * 2, name="any")
    seed = seed_of()
    whole = torch.broadcast_shapes(x.shape, y.shape)
    want = (integers(seed, 0, 16, counted(x.shape)) < 32768).to(f32).expand(whole)
    got = run_emulated(f, x, y)
    want = torch.where((torch.zeros(x.shape) + y.float() * 0).isnan(), 0.0, want)  # what * 0 leaves of NaN
    assert torch.equal(got.float(), (want + counted(whole) * 2).to(got.dtype).float())


def test_positions_beyond_31_bits() -> None:
    """Of a stretched tensor's last elements: the kernel has five, their positions have 36 bits."""
    x = torch.zeros(1, dtype=i64)
    last = torch.arange(2**36 - 5, 2**36)
    g = wl.fuse(lambda v: (v.expand(2**36) + wl.linear_index())[-5:] * 1, name="far")
    assert "(unsigned long long)index_offset" in g.plan(x, target="sm_90").source
    same(run_emulated(g, x), last)
    seed = seed_of()
    h = wl.fuse(lambda v: torch.rand_like(v.expand(2**36))[-5:] * 1, name="far")
    same(run_emulated(h, torch.zeros(1)), (integers(seed, 0, 32, last) >> 8).float() / 2**24)
    near = wl.fuse(lambda v: (v.expand(2**31) + wl.linear_index())[-5:] * 1, name="near")
    assert "(unsigned)index_offset" in near.plan(x, target="sm_90").source
    same(run_emulated(near, x), torch.arange(2**31 - 5, 2**31))


@pytest.mark.parametrize("name", LAYOUTS)
def test_64_bit_positions_in_every_family(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.layout.INT31_MAX", 3)
    monkeypatch.setattr("wideload.plan.choice.INT31_MAX", 3)
    monkeypatch.setattr("wideload.plan.kernel_plan.INT31_MAX", 3)
    x = LAYOUTS[name][1](f32)
    f = wl.fuse(lambda v: (v + wl.linear_index() * 3, torch.bernoulli(v, 0.5)), name="wide")
    seed = seed_of()
    got, mask = run_emulated(f, x)
    same(got, (counted(x.shape) * 3).float())
    same(mask, (integers(seed, 0, 16, counted(x.shape)) < 32768).float())
    if x.numel() > 4:
        assert "(unsigned long long)index_offset" in f.plan(x, target="sm_90").source


@pytest.mark.parametrize("make", [lambda n: torch.zeros(n), lambda n: shifted(torch.zeros(n), 1)], ids=["dense", "misaligned"])
def test_two_accesses_a_thread(make: Callable[[int], torch.Tensor]) -> None:
    """Results narrower than the operand: a thread's elements take several blocks of a draw."""
    f = wl.fuse(lambda v: ((v + wl.linear_index() % 101).to(i8), F.dropout(v + 1).to(i8)), name="narrow")
    x, n, seed = make(1037), torch.arange(1037), seed_of()
    assert f.plan(x, target="sm_90").kernels[0].plan.variant.elements == 8
    got, mask = run_emulated(f, x)
    same(got, (n % 101).to(i8))
    same(mask, ((integers(seed, 0, 16, n) >= 32768) * 2).to(i8))


def test_beside_every_second_element_of_whole_words() -> None:
    f = wl.fuse(lambda v: (v + (wl.linear_index() % 101).to(bf16), torch.bernoulli(v, 0.5)), name="stepped")
    for x in (torch.zeros(2074, dtype=bf16)[::2], torch.zeros(9, 144, dtype=bf16)[:, ::2][:, :64]):
        assert f.plan(x, target="sm_90").kernels[0].plan.variant.loads == ("stepped",)
        seed, n = seed_of(), counted(x.shape)
        got, mask = run_emulated(f, x)
        same(got, (n % 101).to(bf16))
        same(mask, (integers(seed, 0, 16, n) < 32768).to(bf16))


def test_views_and_concatenations_keep_positions() -> None:
    seed = seed_of()
    x = torch.zeros(6, 40)
    n = counted((6, 40))
    kept = (integers(seed, 0, 16, n) >= 32768) * 2.0
    turned = wl.fuse(lambda v: F.dropout(v + 1)[1:, ::3].t() * 1, name="turned")
    same(run_emulated(turned, x), kept[1:, ::3].t())
    joined = wl.fuse(lambda v: torch.cat([v, v + wl.index(1)], 1) + wl.linear_index() * 100, name="joined")
    want = counted((6, 80)) * 100
    want[:, 40:] += torch.arange(40)
    same(run_emulated(joined, x), want.float())
    pairs = wl.fuse(lambda v: torch.stack((v, v + 1), -1).flatten(-2) + wl.index(-1) * 10, name="pairs")
    same(run_emulated(pairs, x), (torch.arange(80) * 10 + torch.tensor([0, 1]).repeat(40)).float().expand(6, 80))


def test_a_causal_mask_and_a_runtime_probability() -> None:
    scores = torch.randn(2, 3, 17, 33).to(bf16)
    for offset in (0, 16, -3):
        mask = torch.ones(17, 33, dtype=torch.bool).tril(offset)
        same(run_emulated(wl.ops.causal_mask, scores, -math.inf, offset), scores.masked_fill(~mask, -math.inf))
    x = torch.ones(500)
    for p in (0.25, 0.0, 1.0):
        seed = seed_of()
        want = (integers(seed, 0, 32, torch.arange(500)) >= round(p * 2**32)) * (1 / (1 - p) if p < 1 else 0.0)
        same(run_emulated(wl.fuse(lambda v, p: F.dropout(v, p), name="drop"), x, p), want.float())


def test_a_constant_probability_near_one() -> None:
    """Its threshold of 32 bits, 4290672329, is no int."""
    x, n = torch.ones(5000), torch.arange(5000)
    f = wl.fuse(lambda v: (F.dropout(v, 0.999), torch.bernoulli(v, 0.999)), name="rare")
    seed = seed_of()
    rare, mask = run_emulated(f, x)
    same(rare, (integers(seed, 0, 32, n) >= 4290672329) * torch.tensor(1 / (1 - 0.999)), "dropout")
    same(mask, (integers(seed, 1, 32, n) < 4290672329).float(), "bernoulli")
    assert rare.any()


def test_a_planted_fault_is_found() -> None:
    """A round less of Philox gives another mask."""
    f = wl.fuse(lambda v: F.dropout(v), name="drop")
    x, out = torch.ones(300), torch.zeros(300)
    plan = f.plan(x, target="sm_90").kernels[0]
    for text in (plan.source, plan.source.replace("round < 7", "round < 6")):
        arguments = kernel_arguments(plan.plan, [x, torch.tensor([3])], [out], (), behind)
        run_on(build(text), plan.name, (plan.plan.grid, 1, 1), (plan.plan.variant.threads, 1, 1), arguments, outputs=[out])
        want = (integers(3, 0, 16, torch.arange(300)) >= 32768) * 2.0
        assert torch.equal(out, want) == ("round < 7" in text)
