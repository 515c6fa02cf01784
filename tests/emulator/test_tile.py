"""Operands that run along another dim than the output: the kernels' own text against torch, bit for bit, and its banks counted."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import wideload as wl
from tests.emulator.emulated import behind, run_emulated
from tests.emulator.emulator import EmulatorError, build, run_on
from tests.emulator.test_kernels import assert_same
from wideload.execute import kernel_arguments
from wideload.fused import FusedFunction
from wideload.plan import Variant
from wideload.planned import PlannedKernel

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i64, u8 = torch.int8, torch.int64, torch.uint8

copy = wl.fuse(lambda x: x.clone(), name="copy")
add = wl.fuse(lambda x, w: w + x, name="add")
choose = wl.fuse(lambda m, x, y: torch.where(m, x, y), name="choose")


pytestmark = pytest.mark.usefixtures("full_blocks")


def tensor(*shape: int, dtype: torch.dtype, offset: int = 0, pitch: int = 0, seed: int = 0) -> torch.Tensor:
    """Random values, NaN and -0 among them; rows ``pitch`` elements longer than they are, from element ``offset`` of the storage on."""
    held = (*shape[:-1], shape[-1] + pitch)
    store = torch.empty(offset + torch.Size(held).numel() - pitch, dtype=dtype)
    view = store.as_strided(shape, torch.empty(held, device="meta").stride(), offset)
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        numbers = torch.randn(shape, generator=generator)
        numbers.view(-1)[::7], numbers.view(-1)[3::11] = float("nan"), -0.0
        return view.copy_(numbers)
    return view.copy_(torch.randint(*((0, 2) if dtype == torch.bool else (-100, 100)), shape, generator=generator))


def kernel_of(f: FusedFunction, *args: Any, out: Any = None) -> PlannedKernel:
    (kernel,) = f.plan(*args, out=out, target="sm_90").kernels
    assert kernel.plan.variant.family == "tile"
    return kernel


def check(f: FusedFunction, *args: torch.Tensor, offset: int = 0, pitch: int = 0) -> Variant:
    """Run into a contiguous output, or one of that offset and pitch; compare with torch; return what ran."""
    want = f.__wrapped__(*args)
    out = tensor(*want.shape, dtype=want.dtype, offset=offset, pitch=pitch)
    run_emulated(f, *args, out=out)
    assert_same(plain(out), plain(want))
    return kernel_of(f, *args, out=out).plan.variant


def plain(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def run_source(source: str, kernel: PlannedKernel, args: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """A kernel's edited text."""
    grid, block = (kernel.plan.grid, 1, 1), (kernel.plan.variant.threads, 1, 1)
    run_on(build(source), kernel.name, grid, block, kernel_arguments(kernel.plan, args, [out], (), behind), outputs=[out])


# ---- layouts


@pytest.mark.parametrize("dtype", [i8, bf16, f32, f64], ids=str)
def test_a_transposed_copy_of_every_item_size(dtype: torch.dtype) -> None:
    """Whole tiles, tiles with edges, and sizes that align nothing."""
    for rows, columns in ((256, 512), (272, 400), (277, 391)):
        variant = check(copy, tensor(rows, columns, dtype=dtype).t())
        is_aligned = columns % (16 // dtype.itemsize) == 0 and rows % (16 // dtype.itemsize) == 0
        assert variant.loads == ("turned" if is_aligned else "turned_realigned",)
        assert bool(variant.tile and variant.tile.ring) is not is_aligned
        assert variant.stores == ("vector",)
        assert variant.tile is not None
        assert bool(variant.tile.halo) is not is_aligned


def test_every_offset_of_both_sides() -> None:
    for offset in range(9):
        check(copy, tensor(200, 136, dtype=bf16, offset=offset).t(), offset=(3 * offset) % 8)
        check(copy, tensor(195, 131, dtype=bf16, offset=8 - offset, pitch=offset).t(), offset=offset, pitch=offset % 4)


def test_every_size_around_a_tile() -> None:
    """Edges of both kinds, down to spaces of less than a tile."""
    for size in (65, 71, 127, 128, 129):
        for other in (127, 128, 136):
            check(copy, tensor(size, other, dtype=bf16).t())
            check(copy, tensor(other, size, dtype=bf16).t())


@pytest.mark.parametrize("dtype", [i8, bf16, f32, f64], ids=str)
def test_tiles_of_every_size(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the smallest, which leave most blocks something to do, to one of full size."""
    found = set()
    shapes = {1: ((277, 391), (256, 384)), 8: ((277, 391), (256, 384)), 64: ((64, 128), (128, 256))}
    for fill, sizes in shapes.items():
        monkeypatch.setattr("wideload.plan.tile.share_of_block", lambda count, fill=fill: 1 << (count // fill).bit_length() - 1)
        for rows, columns in sizes:
            variant = check(add, tensor(rows, columns, dtype=dtype).t(), tensor(columns, rows, dtype=dtype, seed=1))
            assert variant.tile is not None
            found.add(variant.tile.columns * (variant.tile.ring or variant.tile.lines) * dtype.itemsize)
    assert 2048 in found
    assert len(found) >= 2, found


def test_small_spaces_are_strided() -> None:
    for rows, columns in ((31, 500), (500, 3)):
        x = tensor(rows, columns, dtype=bf16).t()
        (kernel,) = copy.plan(x, out=torch.empty(x.shape, dtype=bf16), target="sm_90").kernels
        assert kernel.plan.variant.family == "strided"


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 3, 70, 90), (0, 1, 3, 2)),
        ((2, 5, 64, 80), (0, 3, 1, 2)),
        ((2, 64, 5, 72), (0, 3, 2, 1)),
        ((3, 48, 10, 10), (0, 2, 3, 1)),  # to channels_last
        ((3, 10, 10, 48), (0, 3, 1, 2)),  # from it
        ((40, 3, 2, 65), (3, 2, 1, 0)),
    ],
)
def test_permuted_copies(shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    assert check(copy, tensor(*shape, dtype=f32).permute(order)).tile is not None


def test_a_block_for_each_tile_of_each_batch() -> None:
    """Tiles of 64 x 64: two along the columns, nine along the lines."""
    kernel = kernel_of(copy, tensor(2, 70, 576, dtype=f64).mT, out=torch.empty(2, 576, 70, dtype=f64))
    assert kernel.plan.grid == 2 * 2 * 9
    check(copy, tensor(2, 70, 576, dtype=f64).mT)


def test_an_output_of_other_width() -> None:
    for to, dtype in ((f64, i8), (f32, bf16), (bf16, f32), (i8, f64)):
        check(wl.fuse(lambda x, to=to: x.to(to), name="cast"), tensor(140, 260, dtype=dtype).nan_to_num(0).mT)


def test_random_permutations() -> None:
    draw = random.Random(20)
    for number in range(7):
        rank = draw.choice((2, 3, 4))
        order = draw.sample(range(rank), rank)
        shape = [draw.choice((1, 2, 3, 5)) for _ in range(rank)]
        for dim in {rank - 1, order[-1]}:
            shape[dim] = draw.choice((64, 67, 100, 128))
        dtype = draw.choice((f32, i64))
        x = tensor(*shape, dtype=dtype, offset=draw.choice((0, 1, 4)), pitch=draw.choice((0, 0, 3)), seed=number).permute(order)
        w = tensor(*x.shape, dtype=dtype, offset=draw.choice((0, 2, 5)), seed=-number - 1)
        out = tensor(*x.shape, dtype=dtype, offset=draw.choice((0, 1)), pitch=draw.choice((0, 1)))
        run_emulated(add, x, w, out=out)
        assert_same(plain(out), plain(w + x), f"draw {number}")


# ---- several operands


def test_a_turned_operand_beside_one_that_is_not() -> None:
    for rows, columns in ((256, 384), (190, 261)):
        x, w = tensor(rows, columns, dtype=bf16), tensor(columns, rows, dtype=bf16, seed=1)
        check(add, x.t(), w)
        check(add, x.t(), tensor(columns, rows, dtype=bf16, offset=3, pitch=1))


def test_turned_operands_of_several_widths() -> None:
    m, x, y = tensor(150, 210, dtype=torch.bool), tensor(150, 210, dtype=f32), tensor(210, 150, dtype=bf16)
    variant = check(choose, m.t(), x.t(), y)
    assert sorted(variant.loads) == ["turned_realigned", "turned_realigned", "vector"]
    assert variant.tile is not None
    assert (variant.tile.lines, variant.tile.ring) == (48, 64)  # 16 bytes less than a ring of bytes has
    assert check(choose, m.t(), tensor(150, 210, dtype=f64).t(), x.t()).loads == ("turned_realigned", "turned", "turned_realigned")
    even = [tensor(160, 208, dtype=dtype).t() for dtype in (torch.bool, f32)]
    variant = check(choose, *even, tensor(208, 160, dtype=bf16))
    assert variant.tile is not None
    assert variant.tile.depth == 4  # four lines of bytes in one word, and of fp32 in one 16-byte access


def test_every_kind_of_operand_at_once() -> None:
    """Turned, along the output, one a row, one a column, one for all, through strides; two results."""
    f = wl.fuse(lambda x, y, row, column, one, apart, s: ((x * row + y) * column - one * s, (x + apart).to(f16)), name="all_kinds")
    for rows, columns in ((160, 144), (133, 150)):
        x, y = tensor(rows, columns, dtype=f32).t(), tensor(columns, rows, dtype=bf16)
        row, column, one = tensor(rows, dtype=f32), tensor(columns, 1, dtype=f16), tensor(1, dtype=f32, offset=1)
        apart = tensor(columns, rows, 2, dtype=f32)[:, :, 1]
        outs = torch.empty(columns, rows), tensor(columns, rows, dtype=f16, offset=1)
        run_emulated(f, x, y, row, column, one, apart, 0.5, out=outs)
        for got, want in zip(outs, f.__wrapped__(x, y, row, column, one, apart, 0.5), strict=True):
            assert_same(got, want.contiguous())
        variant = kernel_of(f, x, y, row, column, one, apart, 0.5, out=outs).plan.variant
        assert {"row", "uniform", "strided"} < set(variant.loads)


def test_in_place() -> None:
    x, w = tensor(200, 136, dtype=bf16), tensor(136, 200, dtype=bf16, seed=1)
    want = w + x.t()
    run_emulated(add, x.t(), w, out=w)
    assert_same(w, want)


def test_64_bit_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.layout.INT31_MAX", 3)
    for rows, columns in ((256, 256), (131, 150)):
        x, w = tensor(2, rows, columns, dtype=bf16).mT, tensor(columns, rows, dtype=bf16)
        assert check(add, x, w).index_bits == 64


def test_arguments_may_be_called_what_the_kernel_calls_its_variables() -> None:
    f = wl.fuse(lambda x, line, column, turn, m=2.0, phase=3: (x + line) * m - column * phase + turn, name="tile")
    x, y = tensor(150, 140, dtype=f32).t(), tensor(140, 150, dtype=f32)
    out = torch.empty(140, 150)
    run_emulated(f, x, y, y, y, 0.5, 4, out=out)
    assert_same(out, plain((x + y) * 0.5 - y * 4 + y))


# ---- what the hardware sees

LOG = 512
"""Words that a thread may record, half of them of its writes to shared memory, half of its reads."""

RECORD = "{ *log_at++ = (long long)p; *log_at++ = sizeof(V);"


def with_recorder(source: str, threads: int) -> str:
    """The kernel, with the address and the width of every access of a full tile written to its first argument."""
    start = f"log_at = log + ((long long)blockIdx.x * {threads} + threadIdx.x) * {LOG}"
    source = "static long long* log_at;\n\n" + re.sub(r"(DEVICE (?:V read_tile|void write_tile)\([^)]*\)) \{", rf"\1 {RECORD}", source)
    source = source.replace("_tile(\n", "_tile(\n    long long* log,\n", 1)
    source = re.sub(r"const \w+ line0 = .*\n", rf"\g<0>    {start};\n    *log_at++ = 1;\n", source)
    source = re.sub(r"} else {  // a tile at an edge.*\n", r"\g<0>    log_at[-1] = 0;\n", source)
    return source.replace("__syncthreads();", f"__syncthreads();\n    {start} + {LOG // 2};")


def banks_met(f: FusedFunction, *args: torch.Tensor, edit: Sequence[tuple[str, str]] = ()) -> tuple[int | None, int]:
    """The most accesses of one bank, to different words, in any step of a warp: of writes and of reads. A step moves 128 bytes.

    Words come to rings past the registers, each quarter of a warp's to one cache line: of them there are no writes to count.
    """
    want = f.__wrapped__(*args)
    out = torch.empty(want.shape, dtype=want.dtype)
    kernel = kernel_of(f, *args, out=out)
    threads, grid = kernel.plan.variant.threads, kernel.plan.grid
    source = with_recorder(kernel.source, threads)
    for old, new in edit:
        assert old in source
        source = source.replace(old, new)
    log = torch.zeros(grid, threads, LOG, dtype=i64)
    arguments = [log, *kernel_arguments(kernel.plan, args, [out], (), behind)]
    run_on(build(source), kernel.name, (grid, 1, 1), (threads, 1, 1), arguments, outputs=[out, log])
    assert_same(out, want.contiguous())
    (full,) = log[:, 0, 0].nonzero(as_tuple=True)
    assert len(full)
    writes, reads = log[full, :, 1 : LOG // 2], log[full, :, LOG // 2 :]
    tile = kernel.plan.variant.tile
    return None if tile and tile.ring else _most_met(writes), _most_met(reads)


def _most_met(records: torch.Tensor) -> int:
    """Of (blocks, threads, 2 x accesses): addresses and widths."""
    most = 0
    addresses, widths = records[..., 0::2], records[..., 1::2]
    num_accesses = int((widths[0, 0] > 0).sum())
    assert num_accesses
    for block in range(min(2, len(records))):
        for access in range(num_accesses):
            width = int(widths[block, 0, access])
            lanes = 128 // max(width, 4)
            for start in range(0, records.shape[1], min(lanes, 32)):
                step = addresses[block, start : start + min(lanes, 32), access]
                words = {int(at) // 4 + k for at in step[step != 0] for k in range(max(1, width // 4))}
                most = max(most, 0, *Counter(word % 32 for word in words).values())
    return most


@pytest.mark.parametrize("size", [384, 389])
@pytest.mark.parametrize("dtype", [i8, bf16, f32], ids=str)
def test_no_bank_is_met_twice(dtype: torch.dtype, size: int) -> None:
    """Neither where the output's lines are aligned alike nor where each begins elsewhere."""
    assert banks_met(copy, tensor(size, 400, dtype=dtype).t()) == (1, 1)
    assert banks_met(copy, tensor(384, size + 16, dtype=dtype).t()) in ((1, 1), (None, 1))


@pytest.mark.parametrize("dtype", [i8, bf16, f32, f64], ids=str)
def test_banks_of_rings_are_met_four_times_at_most(dtype: torch.dtype) -> None:
    """Four lines are read at once, and where each begins elsewhere nothing keeps them apart; columns that are aligned alike are turned."""
    for rows, columns, offset in ((389, 405, 0), (384, 402, 0), (384, 404, 0), (384, 400, 3)):
        assert banks_met(copy, tensor(rows, columns, dtype=dtype, offset=offset).t())[1] <= (2 if offset else 4)
    straight = [("column / width * 32", "0")]
    assert banks_met(copy, tensor(384, 400, dtype=dtype, offset=3).t(), edit=straight)[1] == {i8: 8, bf16: 8, f32: 8, f64: 4}[dtype]


def test_no_bank_is_met_twice_by_operands_of_several_widths() -> None:
    m, x = tensor(384, 272, dtype=torch.bool), tensor(384, 272, dtype=f32)
    assert banks_met(choose, m.t(), x.t(), tensor(272, 384, dtype=f32)) == (1, 1)


def test_without_the_turn_banks_are_met_often() -> None:
    """The count can fail."""
    straight = [("return __brev(access) >> 29;", "return 0;")]
    assert banks_met(copy, tensor(256, 256, dtype=bf16).t(), edit=straight) == (1, 8)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("dtype", [bf16, f32], ids=str)
def test_the_main_path_is_wide(dtype: torch.dtype, arch: str) -> None:
    even, odd = (torch.empty(size, size, dtype=dtype, device="meta") for size in (1024, 1021))
    for f, args in ((copy, (even.t(),)), (add, (even.t(), even)), (copy, (odd.t(),))):
        kernel = PlannedKernel(kernel_of(f, *args, out=torch.empty_like(args[0].mT)).plan, arch)
        compiled = kernel.compiled
        assert {access.width_bits for access in kernel.main_accesses} == {128}
        assert (compiled.spill_store_bytes, compiled.spill_load_bytes) == (0, 0)
        assert compiled.registers <= 64  # two blocks of 512 threads an SM, three of 480 where an operand lies in rings
        assert compiled.shared_bytes <= 48 * 1024


# ---- planted faults


@pytest.mark.parametrize(
    ("pitch", "old", "new"),
    [
        (0, "__syncthreads();", ""),
        (0, "address + e * step", "address"),
        (0, "place + 15 - before < bytes + 15", "place < bytes"),
        (0, "(first >= begin && first + N <= end)", "true"),
        (0, "line - before + place)) / 16", "line + place)) / 16"),
        (3, "tile_turn(i / chunks / width)), v[k]", "tile_turn(i / chunks / width + 1)), v[k]"),
        (3, "(skip < width - e ? low_at : high_at)", "low_at"),
        (3, "line + N > size1)", "false)"),
        (3, "% 16)", "% 16 + 1)"),
    ],
    ids=[
        "no barrier",
        "columns aligned alike",
        "the last words left out",
        "words outside the operand",
        "another place in the ring",
        "another turn",
        "one turn for all",
        "no ends of lines",
        "another alignment",
    ],
)
def test_a_planted_fault_is_found(pitch: int, old: str, new: str) -> None:
    x = tensor(389, 277, dtype=bf16, pitch=pitch).t()
    out = torch.zeros(277, 389, dtype=bf16)
    kernel = kernel_of(copy, x, out=out)
    assert old in kernel.source
    source = kernel.source.replace(old, new)
    with pytest.raises((AssertionError, EmulatorError)):
        run_and_compare(source, kernel, x, out)


def run_and_compare(source: str, kernel: PlannedKernel, x: torch.Tensor, out: torch.Tensor) -> None:
    run_source(source, kernel, [x], out)
    assert_same(out, plain(x))


def test_a_missing_bound_is_found() -> None:
    x = tensor(130, 140, dtype=f32).t()
    out = torch.zeros(140, 130)
    kernel = kernel_of(copy, x, out=out)
    source = re.sub(r"const bool is_full = [^;]*;", "const bool is_full = true;", kernel.source)
    with pytest.raises(EmulatorError, match=r"overflow|poison|SEGV"):
        run_source(source, kernel, [x], out)


def test_shapes_of_one_class_are_one_text() -> None:
    sources = {kernel_of(copy, tensor(n, 2 * n, dtype=bf16).t(), out=torch.empty(2 * n, n, dtype=bf16)).source for n in range(136, 400, 8)}
    assert len(sources) == 1
