"""Plans: which kernel family, how wide, with which index width, and why; and that what may differ from call to call compiles nothing."""

from __future__ import annotations

import itertools
import re
from math import prod
from typing import Any

import pytest
import torch

import wideload as wl
from tests.torch_gaps import has_where
from wideload.dtypes import DTYPES
from wideload.execute import phase_of
from wideload.expr import Expr, Load
from wideload.plan import ACCESS_BYTES, DEFAULT, THREADS, Columns, KernelPlan, Operand, Strip, Target, Tuning, find_parts, plan_kernels
from wideload.plan.columns import MOST_PARTS, Parts
from wideload.replay import NodeLayout
from wideload.trace import TensorArg, trace_function

pytestmark = pytest.mark.usefixtures("full_blocks")

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, i64, u8, boolean = torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool

copy = wl.fuse(lambda x: x.clone(), name="copy")
add = wl.fuse(lambda x, y: x + y, name="add")
biased = wl.fuse(lambda x, bias: torch.tanh(x + bias), name="biased")


def meta(*shape: int, strides: tuple[int, ...] | None = None, dtype: torch.dtype = f32) -> torch.Tensor:
    """A tensor of any size: nothing is allocated."""
    plain = torch.empty(shape, dtype=dtype, device="meta")
    return plain if strides is None else torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def plan(function: Any, *args: Any, out: Any = None) -> KernelPlan:
    (kernel,) = function.plan(*args, out=out, target="sm_90").kernels
    return kernel.plan


def reasons(kernel: KernelPlan) -> dict[str, tuple[str, str]]:
    return {reason.choice: (reason.value, reason.why) for reason in kernel.reasons}


def at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy of ``x`` whose address is ``offset`` elements past an aligned one."""
    store = torch.empty(x.numel() + offset + 64, dtype=x.dtype)
    skip = (-store.data_ptr() % 64) // x.element_size() + offset
    return store[skip : skip + x.numel()].copy_(x.flatten()).view(x.shape)


# ---- what the L2 keeps

summed = wl.fuse(lambda x, a, b, c: x + a + b + c, name="summed")
HALVES = wl.fuse(lambda x, t: torch.cat((x[..., :64] * t, x[..., 64:] - t), -1), name="halves")
"""Of x [batch, positions, heads, 128] and t [positions, 1, 64]: as RoPE reads its tables."""


@pytest.mark.parametrize(
    ("function", "args", "kept"),
    [
        # By hand: 4096 x 32 x 128 x 2 bytes are read and as many written between two reads of the tables, 64 MiB.
        (HALVES, (meta(8, 4096, 32, 128, dtype=bf16), meta(4096, 1, 64, dtype=bf16)), {"t"}),
        (HALVES, (meta(1, 4096, 32, 128, dtype=bf16), meta(4096, 1, 64, dtype=bf16)), set()),  # once alone
        (HALVES, (meta(8, 64, 32, 128, dtype=bf16), meta(64, 1, 64, dtype=bf16)), set()),  # 1 MiB
        # 3 x 2 x 2048 x 2048 bytes, 24 MiB; of 1024 x 1024, 6 MiB; of 4096 x 4096 the mask alone has 32 MiB.
        (add, (meta(2, 32, 2048, 2048, dtype=bf16), meta(2048, 2048, dtype=bf16)), {"y"}),
        (add, (meta(2, 32, 1024, 1024, dtype=bf16), meta(1024, 1024, dtype=bf16)), set()),
        (add, (meta(2, 32, 4096, 4096, dtype=bf16), meta(4096, 4096, dtype=bf16)), set()),
        # 8 MiB each, of which 20 MiB are kept; the last is one too many.
        (summed, (meta(8, 32, 2048, 2048, dtype=bf16), *(meta(2048, 2048, dtype=bf16) for _ in range(3))), {"a", "b"}),
        (add, (meta(16384, 16384), meta(16384)), set()),  # the next row reads it again
        (add, (meta(16384, 16384), meta(16384, 1)), set()),
        (biased, (meta(64, 4096, 1024), meta(4096, 1024)), {"bias"}),  # in strips
    ],
)
def test_the_l2_keeps_what_an_outer_dim_reads_again_much_later(function: Any, args: tuple[torch.Tensor, ...], kept: set[str]) -> None:
    kernel = plan(function, *args)
    flags = kernel.variant.kept or [False] * len(kernel.program.parameters)
    assert {p.name.split("_")[0] for p, is_kept in zip(kernel.program.parameters, flags, strict=True) if is_kept} == kept
    assert ("L2" in reasons(kernel)) == bool(kept)


@pytest.mark.parametrize(
    ("dtype", "beside", "nbytes"),
    [(f32, f32, 16), (f64, bf16, 32), (boolean, bf16, 8), (torch.float8_e4m3fn, f32, 4), (boolean, f64, 2), (boolean, torch.complex128, 1)],
)
def test_a_load_of_what_the_l2_keeps_says_so(dtype: torch.dtype, beside: torch.dtype, nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the bytes of an access, of which one of 16 is the widest."""
    monkeypatch.setattr("wideload.plan.choice.KEPT_AFTER_BYTES", 1)
    f = wl.fuse(lambda x, t: x * t.to(x.dtype), name="kept_product")
    planned = f.plan(meta(3, 16, 48, dtype=beside), meta(16, 48, dtype=dtype), target="sm_90")
    (kernel,) = planned.kernels
    variant = kernel.plan.variant
    assert [variant.kept, variant.elements * dtype.itemsize] == [(False, True), nbytes]
    assert planned.ptx.count("ld.global.L2::cache_hint") == max(nbytes // 16, 1)


@pytest.mark.parametrize(("target", "is_kept"), [("sm_75", False), ("sm_80", True), ("sm_90", True), ("sm_120", True)])
@pytest.mark.parametrize("size", [2048, 2052], ids=["whole", "edges"])
def test_of_a_tile_the_l2_keeps_what_is_turned_and_nothing_else(size: int, target: str, is_kept: bool) -> None:
    """Each chunk is one of two loads, with and without the block of 256 bytes around it."""
    planned = add.plan(meta(size, size), meta(size, size).t(), target=target)
    (kernel,) = planned.kernels
    assert kernel.plan.variant.family == "tile"
    chunks = kernel.plan.variant.elements * f32.itemsize // ACCESS_BYTES
    loads = re.findall(r"\bld\.global\S*\.v4\S* ", planned.ptx)
    asked = [load for load in loads if "L2::cache_hint" in load]
    assert len(asked) == (2 * chunks if is_kept else 0)
    assert sum("L2::256B" in load for load in asked) == len(asked) // 2
    assert len(loads) - len(asked) >= (chunks if is_kept else 2 * chunks)
    assert set(re.findall(r"\bcreatepolicy\S*", planned.ptx)) == ({"createpolicy.fractional.L2::evict_last.b64"} if is_kept else set())


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("dtype", [i8, bf16, f32, f64], ids=str)
def test_the_l2_keeps_the_words_of_rings_by_a_policy_that_is_there(dtype: torch.dtype, target: str) -> None:
    """A policy is a pair of uniform registers and begins at an even one; what ptxas leaves without one begins at UR1."""
    planned = wl.fuse(lambda x: x.contiguous(), name="turned").plan(meta(4099, 4111, dtype=dtype).t(), target=target)
    (kernel,) = planned.kernels
    assert kernel.plan.variant.tile is not None
    assert kernel.plan.variant.tile.ring
    copies = re.findall(r"cp\.async\.cg\S*", planned.ptx)
    assert {*copies} == {"cp.async.cg.shared.global.L2::cache_hint.L2::256B"}
    policies = re.findall(r"LDGSTS\.\S+ \[R\d+\S*\], desc\[UR(\d+)\]", planned.sass)
    assert len(policies) >= len(copies)
    assert not [number for number in policies if int(number) % 2]


# ---- family

DENSE = [
    meta(4, 5),
    meta(4, 5).t(),
    meta(2, 3, 4, 5, strides=(60, 1, 15, 3)),
    meta(1, 7, 1, strides=(99, 1, 5)),
    meta(3, 4, 5).permute(2, 0, 1),
    meta(1),
    meta(),
    meta(1, 1, strides=(3, 9)),
    meta(6, 4)[2:4],
    meta(6, 4)[3],
]
ROWS = [meta(4, 6)[:, 1:], meta(4, 1).expand(4, 6), meta(2, 3, 4)[:, 1], meta(4, 6).t()[1:], meta(9, 6)[::2], meta(2, 8, strides=(0, 1))]
"""The result of each is one run, and its own rows are at least a vector long."""
STRIDED = [meta(4, 6)[:, ::2], meta(8)[::2], meta(4, 6)[:, 1:4], meta(3, 2, 5).permute(0, 2, 1)[:, 1:4], meta(5, 1).expand(5, 3)]
"""A stride inside a row, or rows shorter than a vector."""


def described(x: torch.Tensor) -> str:
    return f"{tuple(x.shape)} {x.stride()}"


@pytest.mark.parametrize("x", DENSE, ids=described)
def test_one_run_of_memory_is_dense(x: torch.Tensor) -> None:
    kernel = plan(copy, x)
    assert kernel.variant.family == "dense"
    assert reasons(kernel)["family"] == ("dense", "every operand walks memory in one aligned run, or is one element")
    assert (kernel.num_elements, kernel.sizes) == (x.numel(), (x.numel(),))


@pytest.mark.parametrize("x", ROWS, ids=described)
def test_a_result_in_one_run_of_rows_is_written_along_it(x: torch.Tensor) -> None:
    kernel = plan(copy, x)
    assert kernel.variant.family == "rows"
    assert reasons(kernel)["family"][1].startswith("the output is one run, every input rows of ")
    assert kernel.variant.stores == ("vector",)


@pytest.mark.parametrize("x", STRIDED, ids=described)
def test_anything_else_is_strided_and_the_operand_is_named(x: torch.Tensor) -> None:
    kernel = plan(copy, x)
    assert kernel.variant.family == "strided"
    assert reasons(kernel)["family"][1].startswith("x does not walk memory in one run")
    assert (kernel.variant.elements, kernel.variant.loads, kernel.variant.stores) == (DEFAULT.strided_elements, ("strided",), ("strided",))


def test_the_family_of_several_operands_is_that_of_the_worst() -> None:
    for x, y, family in (
        (meta(4, 5), meta(5), "rows"),
        (meta(4, 1), meta(4, 5), "rows"),
        (meta(4, 5, strides=(6, 1)), meta(4, 5, strides=(6, 1)), "rows"),
        (meta(4, 5), meta(5, 4).t(), "strided"),
        (meta(4, 5), meta(4, 10)[:, ::2], "strided"),
        (meta(5, 4).t(), meta(5, 4).t(), "dense"),
    ):
        kernel = plan(add, x, y)
        assert kernel.variant.family == family
        if family == "strided":
            assert reasons(kernel)["family"][1].startswith("y does not walk memory in one run")


def test_out_decides_the_family_too() -> None:
    x = torch.ones(4, 6)
    assert plan(copy, x, out=torch.empty(4, 6)).variant.family == "dense"
    kernel = plan(copy, x, out=torch.empty(6, 4).t())
    assert kernel.variant.family == "strided"
    assert reasons(kernel)["family"][1].startswith("x does not walk")  # the loops follow the output
    pitched = plan(copy, x, out=torch.empty(4, 8)[:, :6])
    assert pitched.variant.family == "pitched"
    assert reasons(pitched)["family"][1] == "rows of 6 elements, with gaps between those of the output"
    assert plan(copy, x[:, :3], out=torch.empty(4, 8)[:, :3]).variant.family == "strided"
    assert plan(copy, x, out=torch.empty(4, 12)[:, ::2]).variant.family == "strided"


# ---- elements a thread and accesses


@pytest.mark.parametrize("dtypes", [*itertools.combinations_with_replacement(DTYPES, 2)], ids=str)
def test_the_widest_operand_uses_a_whole_access(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    x, y = (meta(4096, dtype=dtype) for dtype in dtypes)
    if not has_where(dtypes[0]):
        pytest.skip(f"torch {torch.__version__} has no where of {dtypes[0]}")
    kernel = plan(wl.fuse(lambda x, y: torch.where(y != 0, x, torch.zeros_like(x)), name="f"), x, y)
    itemsizes = [DTYPES[dtype].itemsize for dtype in dtypes]
    # Two where the result, of the first operand's dtype, is narrower than the other.
    assert kernel.variant.elements * max(itemsizes) == (1 if itemsizes[0] == max(itemsizes) else 2) * ACCESS_BYTES
    assert ACCESS_BYTES == 16
    assert kernel.variant.loads == ("vector", "vector")
    assert kernel.variant.stores == ("vector",)


def test_a_wide_output_counts_and_one_value_for_all_does_not() -> None:
    assert plan(wl.fuse(lambda x: x.double()), meta(100, dtype=i8)).variant.elements == 2
    kernel = plan(add, meta(100, dtype=bf16), meta(dtype=f64))
    assert (kernel.variant.elements, kernel.variant.loads) == (8, ("vector", "uniform"))
    assert plan(wl.fuse(lambda x: (x.exp(), x > 0)), meta(100, dtype=f16)).variant.elements == 8


@pytest.mark.parametrize("dtype", [u8, bf16, f32, f64], ids=str)
def test_the_output_sets_the_beat_and_inputs_off_it_are_realigned(dtype: torch.dtype) -> None:
    x, y = torch.ones(4096).to(dtype), torch.ones(4096).to(dtype)
    elements = 16 // x.element_size()
    for offsets in itertools.product((0, 1, 3, elements, 33), repeat=3):
        phases = [offset % elements for offset in offsets]
        out = at(torch.empty_like(x), offsets[2])
        kernel = plan(add, at(x, offsets[0]), at(y, offsets[1]), out=out)
        assert kernel.variant.family == ("rows" if any(phases) else "dense")
        assert kernel.variant.loads == tuple("vector" if phase == phases[2] else "realigned" for phase in phases[:2])
        assert kernel.variant.stores == ("vector",)
        named = reasons(kernel).get("realigned", ("", ""))[0]
        assert named == ", ".join(name for name, phase in zip("xy", phases, strict=False) if phase != phases[2])


def test_a_second_output_off_the_beat_of_the_first_is_stored_by_elements() -> None:
    f = wl.fuse(lambda x: (x + 1, x - 1), name="f")
    x = at(torch.ones(64), 0)
    for first, second, stores in ((0, 0, "vector vector"), (1, 5, "vector vector"), (0, 1, "vector elements"), (2, 0, "vector elements")):
        outs = tuple(at(torch.empty(64), offset) for offset in (first, second))
        assert plan(f, x, out=outs).variant.stores == tuple(stores.split())


def test_outputs_with_gaps_follow_the_first() -> None:
    """Two outputs, of rows of 8 f32 a pitch apart, the first element of each so many past a whole access."""
    f = wl.fuse(lambda x: (x + 1, x - 1), name="f")
    x = at(torch.ones(4, 8), 0)
    for (pitch, late), (second, also_late), family, stores in (
        ((8, 0), (12, 0), "pitched", "vector vector"),
        ((12, 0), (12, 1), "pitched", "vector elements"),
        ((12, 1), (12, 0), "pitched", "vector elements"),
        ((12, 1), (16, 1), "pitched", "vector vector"),
        ((12, 0), (10, 0), "pitched", "vector elements"),
        ((10, 1), (14, 1), "pitched", "vector vector"),  # 10 and 14 shift the beat by 2 a row
        ((8, 1), (8, 1), "rows", "vector vector"),
    ):
        outs = tuple(at(torch.empty(4 * p), o).view(4, p)[:, :8] for p, o in ((pitch, late), (second, also_late)))
        kernel = plan(f, x, out=outs)
        assert (kernel.variant.family, kernel.variant.stores) == (family, tuple(stores.split()))


def test_a_narrow_operand_needs_only_its_own_share_aligned() -> None:
    """bf16 beside f32: 4 elements a thread, 8 bytes of bf16."""
    f = wl.fuse(lambda x, y: x + y, name="mixed")
    wide, narrow = torch.ones(64), torch.ones(64, dtype=bf16)
    for offset, access in ((0, "vector"), (4, "vector"), (12, "vector"), (2, "realigned"), (1, "realigned"), (6, "realigned")):
        assert plan(f, at(narrow, offset), at(wide, 0)).variant.loads == (access, "vector")
    assert plan(f, at(narrow, 0), at(wide, 2)).variant.loads == ("vector", "realigned")


def test_a_phase_is_of_the_address_in_bytes() -> None:
    x = torch.ones(64, dtype=u8)
    assert [phase_of(at(x, offset)) for offset in (0, 1, 2, 15, 16, 35)] == [0, 1, 2, 15, 0, 3]
    assert phase_of(at(torch.ones(8, dtype=f64), 3)) == 8


def test_one_value_for_all_is_uniform_and_one_a_row_is_row() -> None:
    x = meta(8, 16)
    for y in (meta(), meta(1), meta(1, 1), meta(1).expand(8, 16)):
        assert plan(add, x, y).variant.loads == ("vector", "uniform")
    assert plan(add, x, meta(8, 1)).variant.loads == ("vector", "row")
    assert plan(add, x, meta(16)).variant.loads == ("vector", "vector")
    kernel = plan(add, x[:, ::2], meta())
    assert (kernel.variant.family, kernel.variant.loads) == ("strided", ("strided", "uniform"))
    assert plan(add, meta(1), meta()).variant.loads == ("vector", "vector")  # one element in all


def test_rows_that_do_not_start_on_the_beat_are_realigned() -> None:
    """Rows of 18 f32 in a pitch of 20: 18 of the output shift the beat by 2 a row, 20 of the input by 0."""
    for columns, pitch, access in ((16, 20, "vector"), (16, 18, "realigned"), (18, 20, "realigned"), (18, 22, "vector")):
        assert plan(copy, meta(4, columns, strides=(pitch, 1))).variant.loads == (access,)


def test_every_few_elements_are_picked_from_whole_words_of_which_all_registers_are_wanted() -> None:
    """Up to 4 bytes from one to the next, in words that lie alike in all rows; the span is from the first to the last element."""
    for dtype, step, first, pitch, access in (
        (bf16, 2, 0, 96, "stepped"),
        (bf16, 2, 1, 96, "stepped"),
        (u8, 4, 3, 192, "stepped"),
        (bf16, 3, 0, 104, "strided"),
        (f32, 2, 0, 96, "strided"),
        (bf16, 2, 2, 96, "strided"),  # begins between two words
        (bf16, 2, 0, 66, "strided"),  # rows begin anywhere
    ):
        x = torch.empty(4 * pitch + 16, dtype=dtype).as_strided((4, 32), (pitch, step), first)
        kernel = plan(copy, x, out=torch.empty(4, 32, dtype=dtype))
        assert kernel.variant.loads == (access,), (dtype, step, first, pitch)
        if access == "stepped":
            assert (kernel.variant.steps, kernel.variant.is_whole) == (((step, first),), False)
            assert kernel.sizes[-2:] == (pitch, 3 * pitch + 31 * step + 1)
    misaligned = torch.empty(129, dtype=bf16)[1:].view(4, 32)
    assert plan(copy, torch.empty(4, 64, dtype=bf16)[:, ::2], out=misaligned).variant.family == "strided"


def test_rows_of_long_arithmetic_along_which_operands_repeat_are_taken_in_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 2^21 strips on, four rows each where they are a multiple of that: here from one on."""
    gelu = wl.fuse(lambda x, b: torch.nn.functional.gelu(x + b), name="gelu")
    row = meta(64, dtype=bf16)
    assert plan(gelu, meta(8, 64, dtype=bf16), row).variant.family == "rows"
    monkeypatch.setattr("wideload.plan.strips.LEAST_STRIPS", 1)
    for rows, strip in ((8, Strip(1, 4)), (6, Strip(1, 2)), (7, None)):
        kernel = plan(gelu, meta(rows, 64, dtype=bf16), row)
        assert kernel.variant.strip == strip
        if strip:
            assert (kernel.variant.family, kernel.variant.loads) == ("strips", ("vector", "repeated"))
            assert (kernel.variant.elements, kernel.grid) == (8 * strip.rows, 1)
            assert kernel.sizes == (rows // strip.rows * 8, 8, 2**31, 34, 64, 0, 64)
    heads, table = meta(2, 8, 3, 64, dtype=bf16), meta(2, 1, 3, 72, dtype=bf16)[..., :64]
    assert plan(gelu, heads, table).variant.strip == Strip(2, 4)
    wide, b = meta(8, 64), meta(64)
    for many, strip in ((1, Strip(1, 4)), (3, Strip(1, 4)), (4, Strip(1, 2)), (7, None)):  # of 4 elements an access, 48 are inlined
        f = wl.fuse(lambda x, b, many=many: sum((torch.sin(x * (k + 2) + b) for k in range(many - 1)), torch.sin(x + b)), static="many")
        assert plan(f, wide, b).variant.strip == strip
    assert plan(add, heads, table).variant.family == "rows"  # bytes alone
    few = Strip(1, 2)  # beside another row for other rows
    for rows, b, strip in ((8, meta(3, 1, 64), few), (7, meta(3, 1, 64), None), (8, meta(1, 1, 64), None), (8, meta(3, 8, 1), None)):
        assert plan(add, meta(3, rows, 64), b).variant.strip == strip
    for x, b in ((meta(8, 62), meta(62)), (meta(8, 65)[:, :64], meta(64)), (meta(8, 64), meta(8, 1)), (meta(8, 64), meta(65)[1:])):
        assert plan(gelu, x, b).variant.family != "strips"
    own = wl.fuse(lambda x, y, b: torch.tanh(x + y + b), name="own")
    assert plan(own, meta(8, 64), meta(8, 64), meta(64)).variant.family == "rows"


def test_rows_are_added_up_by_columns() -> None:
    """A block of 16 accesses and as many rows as 256 threads leave, four accesses in flight of each of two operands; then the totals."""
    x, bias = meta(8192, 11008, dtype=bf16), meta(11008, dtype=bf16)
    first, total = (kernel.plan for kernel in biased.plan_backward(x, bias, target="sm_90").kernels)
    assert (first.name, total.name) == ("biased_backward_columns", "biased_backward_total_columns")
    assert sorted(first.variant.loads) == ["repeated", "vector", "vector"]
    assert (first.variant.stores, first.variant.columns, first.variant.elements) == (("vector", "summed"), Columns(16, 4, True), 32)
    assert (first.variant.rows, first.variant.access_elements, first.variant.is_whole) == (4, 8, True)
    assert (first.grid, first.variant.threads) == (86 * (7 * 4 + 16), 256)  # of 128 columns, and 256 rows or 64
    assert first.sizes[:8] == (8192, 11008, 4 * 256, 2, 28, 7, 4, 86)
    assert first.sizes[10:] == (11008,) * 3
    assert first.target_layouts[1] == NodeLayout((44, 11008), (11008, 1))
    assert reasons(first)["sums"][0] == "44 x 11008"
    assert (total.sources, total.targets) == (((~2, 0),), ((1, 0),))  # of the partial sums, which are behind the results
    assert (total.variant.loads, total.variant.stores, total.variant.columns) == (("vector",), ("summed",), Columns(8, 4, False))
    assert (total.grid, total.sizes[:8]) == (344, (44, 11008, 44, 0, 0, 0, 0, 344))
    assert (first.variant.reads_results, total.variant.reads_results) == (False, True)
    assert first.variant.is_one_of_several
    assert total.variant.is_one_of_several


def test_columns_of_a_block_and_rows_of_partial_sums() -> None:
    for width, across in ((8, 1), (16, 2), (40, 8), (128, 16), (4096, 16)):
        first, _ = plans_of_sum(64, width)
        assert first.variant.columns == Columns(across, 4, True)
    for num_rows, num_columns, parts in (
        (32, 128, (64, 1, 1, 1)),
        (1152, 11008, (64, 2, 9, 1)),  # by fours they would be 20
        (1000, 11008, (64, 4, 4, 1)),
        (1 << 11, 11008, (128, 4, 4, 2)),
        (1 << 13, 11008, (256, 4, 8, 4)),
        (1 << 16, 8192, (256, 8, 32, 4)),
        (1000, 8, (1024, 1, 1, 1)),
    ):
        assert find_parts(num_rows, num_columns) == Parts(*parts)
    assert find_parts(1 << 22, 64).count <= MOST_PARTS
    assert find_parts(1 << 19, 512).count <= MOST_PARTS
    _, many = plans_of_sum(1 << 20, 64)
    assert many.variant.columns == Columns(1, 4, False)
    assert many.sizes[0] == 2048


def plans_of_sum(*shape: int, tuning: Tuning = DEFAULT) -> tuple[KernelPlan, ...]:
    x, bias = meta(*shape, dtype=bf16), meta(*shape[-1:], dtype=bf16)
    return biased._run(
        biased._bind((x, bias), {}),
        lambda _, traced: biased._operation(traced).plan_gradient((x, bias), (True, True), x.device, tuning)[1],
    )


def test_rows_that_are_not_added_up_in_kernels() -> None:
    """Of half an access more, not aligned, with gaps of half an access, too few: the terms are stored, as the gradient of x."""
    bias = meta(64, dtype=bf16)
    for x, b in (
        (meta(40, 60, dtype=bf16), meta(60, dtype=bf16)),
        (meta(40, 68, dtype=bf16)[:, :64], bias),
        (meta(40, 72, dtype=bf16)[:, 4:68], bias),
        (meta(40, 64, dtype=bf16), meta(65, dtype=bf16)[1:]),
        (meta(31, 64, dtype=bf16), bias),
        (meta(4, 20, 64, dtype=bf16)[:, :10], bias),
        (meta(64, 40, dtype=bf16).t(), bias),
    ):
        (kernel,) = biased.plan_backward(x, b, target="sm_90").kernels
        assert len(kernel.plan.targets) == 1
        assert kernel.plan.variant.family != "columns"
    first, _ = biased.plan_backward(meta(40, 72, dtype=bf16)[:, 8:], bias, target="sm_90").kernels
    assert first.plan.variant.family == "columns"


def test_a_plan_that_cannot_add_up_rows_says_so() -> None:
    load = Load(0, "x", f32, 2)
    expr = Expr("f", (load,), (load,), (0,))
    layout = NodeLayout((40, 6), (6, 1))
    target = Target(0, f32, layout, 0, 0, num_columns=6)
    with pytest.raises(wl.LayoutError, match=r"f cannot add up rows of these operands: .* Store the terms"):
        plan_kernels(expr, [Operand(f32, layout, 0, 0)], [target], numerics="fused", fast_math=False)


def test_rows_in_flight_are_those_of_a_part_and_few_enough_functions() -> None:
    """A block of 16 accesses has 16 rows at a time: a part of 64 rows has four, two beside many sums; of functions 48 are inlined."""
    for accesses, rows in ((1, 4), (4, 2)):
        tuning = DEFAULT.with_choices({"accesses": accesses, "narrowing_accesses": accesses})
        first, _ = plans_of_sum(64, 512, tuning=tuning)
        assert (first.variant.access_elements, first.variant.rows) == (8 * accesses, rows)
    x, bias = meta(8192, 11008, dtype=bf16), meta(11008, dtype=bf16)
    for many, rows in ((1, 4), (3, 2), (7, 1)):
        f = wl.fuse(lambda x, b, many=many: sum((torch.sin(x * (k + 2) + b) for k in range(many - 1)), torch.sin(x + b)), static="many")
        first, _ = (kernel.plan for kernel in f.plan_backward(x, bias, target="sm_90").kernels)
        assert first.variant.rows == rows


def test_a_zero_dim_tensor_of_the_host_is_passed_by_value() -> None:
    assert plan(add, torch.tensor(2.0), meta(64)).variant.loads == ("value", "vector")
    assert plan(add, meta(8, 8)[:, ::2], torch.tensor(2)).variant.loads == ("strided", "value")
    assert plan(add, torch.tensor(2.0), torch.ones(64)).variant.loads == ("uniform", "vector")  # on one device it has an address


# ---- index width and grid


def test_the_index_width_of_strided_kernels_changes_where_31_bits_end() -> None:
    """An element count up to 2^31 - 1, and a last byte up to offset 2^31 - 1."""
    cases: list[tuple[torch.Tensor, int]] = [
        (meta(2, 2, strides=(2**31 - 3, 2), dtype=u8), 32),  # last byte at 2^31 - 1
        (meta(2, 2, strides=(2**31 - 2, 2), dtype=u8), 64),
        (meta(2, 2, strides=(2**29 - 3, 2), dtype=f32), 32),  # bytes 2^31 - 4 to 2^31 - 1
        (meta(2, 2, strides=(2**29 - 2, 2), dtype=f32), 64),
        (meta(2**15, 2**16 - 1, strides=(0, 5), dtype=u8), 32),  # 2^31 - 2^15 results
        (meta(2**15, 2**16, strides=(0, 5), dtype=u8), 64),
    ]
    for x, bits in cases:
        kernel = plan(copy, x)
        assert (kernel.variant.family, kernel.variant.index_bits) == ("strided", bits), (tuple(x.shape), x.stride())
        value, why = reasons(kernel)["index width"]
        assert value == f"{bits} bits"
        assert ("more than 31 bits" in why) == (bits == 64)


def test_the_index_width_of_rows_leaves_room_for_the_last_block() -> None:
    """An index past the end must not wrap either: up to a block of 128 vectors of 16."""
    cases: list[tuple[torch.Tensor, int]] = [
        (meta(2, 2**30 - 1024, strides=(2**30, 1), dtype=u8), 64),  # 2^31 - 2048 elements, and 2048 more
        (meta(2, 2**30 - 1025, strides=(2**30, 1), dtype=u8), 32),
        (meta(2, 16, strides=(2**31 - 16, 1), dtype=u8), 32),  # last byte at 2^31 - 1
        (meta(2, 16, strides=(2**31 - 15, 1), dtype=u8), 64),  # few elements, far apart
    ]
    for x, bits in cases:
        kernel = plan(copy, x)
        assert (kernel.variant.family, kernel.variant.index_bits) == ("rows", bits), (tuple(x.shape), x.stride())


def test_the_index_width_of_a_pitched_output_counts_slots() -> None:
    """A row of 129 bytes that starts with an access takes 9 of 16, one that may start anywhere up to (129 + 15) / 16 = 9 as well."""
    for rows, pitch, bits in ((2**16, 2**14, 32), (14913066, 144, 32), (14913067, 144, 64), (2, 2**31 - 129, 32), (2, 2**31 - 128, 64)):
        kernel = plan(copy, meta(rows, 129, strides=(0, 1), dtype=u8), out=meta(rows, 129, strides=(pitch, 1), dtype=u8))
        assert (kernel.variant.family, kernel.variant.index_bits) == ("pitched", bits), (rows, pitch)


def test_the_output_counts_for_the_index_width() -> None:
    """2^29 bytes read, four times as many written."""
    f = wl.fuse(lambda x: x.float(), name="widen")
    for columns, bits in ((2**28 + 1, 64), (2**28, 32)):
        assert plan(f, meta(2, columns, strides=(columns + 1, 1), dtype=u8)).variant.index_bits == bits


def test_dense_kernels_of_any_size_are_one_text() -> None:
    sources = {copy.plan(meta(n, dtype=u8), target="sm_90").source for n in (1, 100, 2**31 - 1, 2**31, 2**33 + 1)}
    assert len(sources) == 1
    kernel = plan(copy, meta(2**33 + 1, dtype=u8))
    assert (kernel.variant.index_bits, kernel.num_elements, kernel.sizes) == (64, 2**33 + 1, (2**33 + 1,))


@pytest.mark.parametrize("n", [1, 2047, 2048, 2049, 10**6, 2**35])
def test_the_grid_covers_every_element_once(n: int) -> None:
    for x in (meta(n, dtype=u8), meta(2, n, strides=(n + 1, 1), dtype=bf16), meta(n, dtype=f64), meta(2, n, strides=(2 * n, 2))):
        kernel = plan(copy, x)
        per_block = THREADS * kernel.variant.elements
        assert (kernel.grid - 1) * per_block < x.numel() <= kernel.grid * per_block
        assert kernel.grid < 2**31
        assert reasons(kernel)["grid"][0] == f"{kernel.grid} x {THREADS}"


def test_sizes_tell_a_strided_kernel_where_each_element_lies() -> None:
    """The kernel's index arithmetic, done here with the integers that it gets."""
    generator = torch.Generator().manual_seed(5)
    checked = 0
    for shape, strides in (
        ((3, 4), (1, 5)),
        ((2, 3, 4), (40, 1, 7)),
        ((5, 2, 3), (0, 9, 2)),
        ((2, 2, 2, 3), (100, 30, 9, 2)),
        ((7, 300), (301, 1)),
    ):
        x, y = meta(*shape, strides=strides), meta(*shape[1:], strides=tuple(range(11, 11 + len(shape) - 1)))
        kernel = plan(add, x, y)
        rank = kernel.variant.rank
        n, *divisors = kernel.sizes[: 1 + 3 * (rank - 1)]
        rows = [kernel.sizes[1 + 3 * (rank - 1) + row * rank :][:rank] for row in range(3)]
        assert n == prod(shape)
        out = add(x, y)
        seen = set()
        for i in [*torch.randint(n, (50,), generator=generator).tolist(), 0, n - 1]:
            rest, coordinates = i, []
            for size, multiplier, shift in zip(*[iter(divisors)] * 3, strict=True):
                quotient = (rest * multiplier) >> shift
                coordinates.append(rest - quotient * size)
                rest = quotient
            coordinates.append(rest)
            offsets = [sum(c * s for c, s in zip(coordinates, row, strict=True)) for row in rows]
            # The output's offset names the element; the others must lie where that element does.
            index = element_at(out, offsets[2])
            assert offsets[0] == sum(a * s for a, s in zip(index, x.stride(), strict=True))
            assert offsets[1] == sum(a * s for a, s in zip(index[1:], y.stride(), strict=True))
            seen.add(offsets[2])
            checked += 1
        assert max(seen) == n - 1
    assert checked == 5 * 52


# Size, multiplier and shift: below 2^31, n * 3435973837 >> 34 is n // 5, and so on.
BY_2, BY_3, BY_5, BY_7 = (2, 2**31, 32), (3, 2863311531, 33), (5, 3435973837, 34), (7, 2454267027, 34)


def test_sizes_tell_a_rows_kernel_where_each_row_lies() -> None:
    """Elements and padding, the division by a row, then for each input its pitch and, where it is realigned, its span."""
    x, bias, factor = at(torch.ones(24), 0).view(4, 6)[:, 1:], at(torch.ones(5), 0), torch.ones(4, 1)
    f = wl.fuse(lambda x, bias, factor, s: x * factor + bias * s, name="f")
    kernel = plan(f, x, bias, factor, torch.tensor(2.0))
    assert [p.name for p in kernel.program.parameters] == ["x", "factor", "bias", "s"]
    assert kernel.variant.loads == ("realigned", "row", "realigned", "uniform")
    assert kernel.sizes == (20, 0, *BY_5, 6, 1 + 3 * 6 + 4, 1, 0, 5)
    late = plan(f, x, bias, factor, torch.tensor(2.0), out=at(torch.empty(4, 5), 3))
    assert late.sizes == (20, 3, *kernel.sizes[2:])
    assert plan(copy, at(torch.ones(510), 1), out=at(torch.empty(510), 3)).sizes == (510, 3, 510)
    assert [plan(copy, at(torch.ones(n), 1), out=at(torch.empty(n), 3)).grid for n in (1, 509, 510)] == [1, 1, 2]  # 512 and the 3 before
    blocks = at(torch.ones(3, 4, 8), 0)[:, :2, :7]
    kernel = plan(copy, blocks)
    assert (kernel.variant.rank, kernel.sizes) == (3, (42, 0, *BY_7, *BY_2, 8, 32, 1 + 2 * 32 + 8 + 6))


def test_sizes_tell_a_pitched_kernel_where_each_row_lies() -> None:
    """Accesses, a row's length, the first row's phase, the division by a row's accesses, the inputs as for rows, the outputs' pitches."""
    x = at(torch.ones(24), 0).view(4, 6)
    kernel = plan(copy, x, out=at(torch.empty(32), 0).view(4, 8)[:, 1:7])  # each row 1 past an access: 1 + 6 elements in 2
    assert (kernel.variant.loads, kernel.sizes) == (("realigned",), (8, 6, 1, *BY_2, 6, 24, 8))
    kernel = plan(copy, x, out=at(torch.empty(28), 0).view(4, 7)[:, :6])  # 0, 3, 2 and 1 past one: up to 3 + 6 elements in 3
    assert (kernel.variant.loads, kernel.sizes) == (("realigned",), (12, 6, 0, *BY_3, 6, 24, 7))
    wide = at(torch.ones(32), 0).view(4, 8)
    kernel = plan(copy, wide[:, 1:7], out=at(torch.empty(48), 0).view(4, 12)[:, 1:7])  # 8 and 12 apart, both 1 past an access
    assert (kernel.variant.loads, kernel.sizes) == (("vector",), (8, 6, 1, *BY_2, 8, 12))
    tall = plan(copy, torch.ones(1000, 6), out=at(torch.empty(8000), 0).view(1000, 8)[:, :6])
    assert (tall.sizes[0], tall.grid) == (2000, 16)  # a thread an access, 128 a block


def element_at(out: torch.Tensor, offset: int) -> tuple[int, ...]:
    """Which element of a dense tensor lies ``offset`` elements from its start."""
    index = [0] * out.ndim
    for dim in sorted(range(out.ndim), key=lambda dim: -out.stride(dim)):
        if out.shape[dim] > 1:
            index[dim], offset = divmod(offset, out.stride(dim))
    return tuple(index)


# ---- views inside the function


def twice_of(view: Any) -> Any:
    return wl.fuse(lambda x: view(x) * 2, name="f")


def test_a_view_of_an_argument_is_planned_as_the_view_itself() -> None:
    packed = at(torch.ones(4, 16), 0)
    views: list[tuple[Any, int]] = [
        (lambda x: x.chunk(2, -1)[1], 32), (lambda x: x[1:, 3:], 76), (lambda x: x.t()[5], 20), (lambda x: x[:, ::2], 0),
        (lambda x: x.reshape(8, 8)[3:, 1], 100), (lambda x: x[None, 2].expand(3, 16), 128),
    ]  # fmt: skip
    for view, offset_bytes in views:
        inside, outside = plan(twice_of(view), packed), plan(twice_of(lambda x: x), view(packed))
        assert inside.sources == ((0, offset_bytes),)
        assert (inside.variant, inside.sizes, inside.grid) == (outside.variant, outside.sizes, outside.grid)
        assert inside.source_layouts == outside.source_layouts


def test_halves_are_two_sources_and_a_concatenation_two_targets() -> None:
    x = at(torch.ones(4, 16, dtype=bf16), 0)
    kernel = plan(wl.fuse(lambda x: x.chunk(2, -1)[0] * x.chunk(2, -1)[1], name="f"), x)
    assert (kernel.variant.family, kernel.variant.loads) == ("rows", ("vector", "vector"))
    assert (kernel.sources, kernel.targets, kernel.num_elements) == (((0, 0), (0, 16)), ((0, 0),), 32)
    turned = plan(wl.fuse(lambda x: torch.cat([-x[:, 8:], x[:, :8]], -1), name="f"), x)
    assert (turned.variant.family, turned.variant.loads, turned.variant.stores) == ("pitched", ("vector",) * 2, ("vector",) * 2)
    assert (turned.sources, turned.targets) == (((0, 16), (0, 0)), ((0, 0), (0, 16)))
    assert turned.target_layouts == (NodeLayout((4, 8), (16, 1)),) * 2
    stacked = plan(wl.fuse(lambda x: torch.stack([x * 2, x + 1]), name="f"), x)
    assert (stacked.variant.family, stacked.sources, stacked.targets) == ("dense", ((0, 0),), ((0, 0), (0, 128)))
    pairs = plan(wl.fuse(lambda x: torch.stack([x * 2, x + 1], -1), name="f"), x)
    assert (pairs.variant.family, pairs.targets) == ("strided", ((0, 0), (0, 2)))


# ---- several results, no elements


def test_results_of_one_shape_are_one_kernel_and_of_several_are_several() -> None:
    f = wl.fuse(lambda x, y: (x + y, x * 2, y - 1, x - y, y + 1), name="f")
    x, y = meta(4, 5), meta(5)
    kernels = f.plan(x, y, target="sm_90").kernels
    assert [[output for output, _ in kernel.plan.targets] for kernel in kernels] == [[0, 1, 3], [2, 4]]
    assert [kernel.plan.sources for kernel in kernels] == [((0, 0), (1, 0)), ((1, 0),)]
    assert [[p.name for p in kernel.plan.program.parameters] for kernel in kernels] == [["x", "y"], ["y"]]
    assert [kernel.plan.num_elements for kernel in kernels] == [20, 5]
    assert len(f.plan(x, x, target="sm_90").kernels) == 1


def test_results_without_elements_run_nothing() -> None:
    assert copy.plan(meta(3, 0), target="sm_90").kernels == ()
    mixed = wl.fuse(lambda x, y: (x + 1, y + 1)).plan(meta(0), meta(3), target="sm_90")
    assert [kernel.plan.targets for kernel in mixed.kernels] == [((1, 0),)]
    with pytest.raises(wl.DtypeError):
        wl.fuse(lambda x: x.float()).plan(meta(0, dtype=torch.bits8), target="sm_90")  # the same refusal as with elements


def test_an_argument_returned_unchanged_is_copied_only_into_out() -> None:
    f = wl.fuse(lambda x: (x, x + 1), name="f")
    x = torch.ones(8)
    kernel = plan(f, x, out=(torch.empty(8), torch.empty(8)))
    assert [result.text for result in kernel.program.results] == ["x", "add"]


# ---- what compiles again


def test_ten_calls_of_one_class_are_one_source() -> None:
    f = wl.fuse(lambda x, b, s: torch.tanh(x + b) * s, name="f")
    lengths = (1, 2, 5, 8, 31, 32, 33, 1000, 4097, 9999)
    assert len({f.plan(torch.ones(n), torch.ones(n), 0.5 * n, target="sm_90").source for n in lengths}) == 1
    on_the_beat, off_the_beat, short = (
        (4, 8, 12, 16, 64, 100, 128, 1000, 1004, 4096),
        (5, 6, 7, 9, 10, 33, 131, 1001, 1003, 4097),
        [2, 3] * 5,
    )
    for columns in (on_the_beat, off_the_beat, short):
        sources = {
            f.plan(torch.ones(9 + k, 2 * n + k)[:, 1 : n + 1], torch.ones(n), 0.1 * k, target="sm_90").source for k, n in enumerate(columns)
        }
        assert len(sources) == 1
    for columns in (on_the_beat, off_the_beat):  # an output with gaps
        texts = {
            f.plan(torch.ones(n, n), torch.ones(n, 1), 0.1, out=torch.empty(n, n + 4)[:, :n], target="sm_90").source for n in columns[:7]
        }
        assert len(texts) == 1
    x = torch.ones(4096, dtype=u8)
    aligned = {copy.plan(at(x, 16 * k), target="sm_90").source for k in range(5)}
    odd = {copy.plan(at(x, k), target="sm_90").source for k in (1, 2, 4, 8, 3)}
    assert (len(aligned), len(odd)) == (1, 1)
    assert aligned != odd


def test_numbers_of_a_call_are_never_in_the_source() -> None:
    f = wl.fuse(lambda x, s, n: x * s + n * (s - 2 * n), name="f")
    sources = {f.plan(meta(100), s, n, target="sm_90").source for s, n in ((0.1234567, 7654321), (-1.5, 3), (float("nan"), 2**62))}
    assert len(sources) == 1
    (source,) = sources
    assert "0.1234567" not in source
    assert "7654321" not in source
    assert "const double s" in source


def test_what_changes_the_code_changes_the_source() -> None:
    x, y = torch.ones(64), torch.ones(64)
    sources = [
        add.plan(x, y, target="sm_90").source,
        add.plan(x.half(), y, target="sm_90").source,
        add.plan(x, y[0], target="sm_90").source,
        add.plan(at(x, 1), y, target="sm_90").source,
        add.plan(x.view(8, 8), y[:8], target="sm_90").source,
        add.plan(x.view(4, 4, 4), y[:16].view(4, 1, 4), target="sm_90").source,
        add.plan(x, y, out=torch.empty(64, dtype=f64), target="sm_90").source,
        wl.fuse(lambda x, y: x + y, name="add", numerics="eager").plan(x.half(), y.half(), target="sm_90").source,
    ]
    assert len(set(sources)) == len(sources)


def test_the_target_does_not_change_the_source() -> None:
    assert len({add.plan(meta(9), meta(9), target=target).source for target in ("sm_75", "sm_80", "h200", "b200", "sm_120")}) == 1


def test_real_and_meta_tensors_are_planned_alike() -> None:
    for x in (torch.ones(6, 5), torch.ones(6, 5).t(), torch.ones(6, 5)[:, ::2]):
        on_meta = torch.empty_strided(x.shape, x.stride(), device="meta")
        assert plan(add, x, x) == plan(add, on_meta, on_meta)


# ---- in place


def test_in_place_takes_the_kernel_that_new_memory_takes() -> None:
    x, y = torch.ones(64), torch.ones(64)
    kernel, apart = (add.plan(x, y, out=out, target="sm_90").kernels[0] for out in (x, torch.empty(64)))
    assert kernel.plan.variant == apart.plan.variant
    assert kernel.source == apart.source


# ---- the function itself


def test_plan_kernels_needs_no_tensors() -> None:
    arguments = (TensorArg("x", bf16, (8, 4), torch.device("cuda")), TensorArg("s", f64, (), torch.device("cpu")))
    expr = trace_function(lambda x, s: x * s, "f", arguments, {}).expr
    operands = [Operand(bf16, NodeLayout((8, 4), (4, 1)), 0, 0), Operand(f64, NodeLayout((), ()), 0, 1, on_host=True)]
    target = Target(expr.outputs[0], bf16, NodeLayout((8, 4), (4, 1)), 2, 0)
    (kernel,) = plan_kernels(expr, operands, [target], numerics="fused", fast_math=False)
    assert (kernel.name, kernel.sources, kernel.targets, kernel.grid) == ("f_rows", ((0, 0), (1, 0)), ((0, 0),), 1)
    assert (kernel.variant.loads, kernel.variant.stores) == (("realigned", "value"), ("vector",))
    assert reasons(kernel)["realigned"] == ("x", "not aligned to whole accesses: aligned words are read and shifted in registers")


def test_every_plan_has_its_reasons() -> None:
    for x in (*DENSE, *ROWS, *STRIDED):
        for y in (x, meta()):
            chosen = reasons(plan(add, x, y))
            assert set(chosen) >= {"family", "index width", "grid"}
            assert all(value and why for value, why in chosen.values())


@pytest.mark.parametrize(
    ("x", "beside", "blocks"),
    [
        (meta(256, 256, dtype=torch.int8), None, 2),
        (meta(257, 256, dtype=torch.int8), None, 3),  # lines that are not aligned alike are stored
        (meta(257, 256, dtype=torch.bfloat16), None, 3),
        (meta(257, 256), None, 2),
        (meta(256, 257, dtype=torch.int8), None, 4),  # and read
        (meta(256, 257, dtype=torch.bfloat16), None, 4),
        (meta(256, 257), None, 3),
        (meta(256, 257), meta(257, 256), 2),
        (meta(256, 257, dtype=torch.bfloat16), meta(257, 256, dtype=torch.bfloat16), 3),
        (meta(256, 257, dtype=torch.int8), meta(257, 256, dtype=torch.int8), 3),
        (meta(257, 256, dtype=torch.int8), meta(256, 257, dtype=torch.int8), 2),
    ],
)
def test_blocks_that_the_registers_of_a_tile_leave_room_for(x: torch.Tensor, beside: torch.Tensor | None, blocks: int) -> None:
    f = wl.fuse(lambda x, *beside: torch.add(*beside, x) if beside else x.contiguous(), name="f")
    (kernel,) = f.plan(x.t(), *([] if beside is None else [beside]), target="h200").kernels
    assert kernel.name == "f_tile"
    assert re.search(r"__launch_bounds__\(\d+, (\d)\)", kernel.source)[1] == str(blocks)  # type: ignore[index]
