"""The foreach kernels' own text and table, run on the CPU: list lengths, member lengths, alignments, numbers, in place, bit for bit."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from tests.emulator.emulated import run_lists_emulated
from tests.emulator.emulator import EmulatorError, Memory, Pointer, Struct, build
from wideload import foreach as foreach_module
from wideload import reference as reference_module
from wideload.emit.kernel import emit_kernel
from wideload.foreach import ListedCall, find_listed
from wideload.lists import split_lists
from wideload.optim import round_stochastically

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, i64, u8 = torch.int8, torch.int32, torch.int64, torch.uint8

axpy = wl.fuse(lambda x, y: x * 2 + y, name="axpy")
plus_one = wl.fuse(lambda x: x + 1, name="plus_one")
scaled = wl.fuse(lambda x, a, b: x * a + b, name="scaled")


def adam(p: Any, g: Any, m: Any, v: Any, lr: Any, step: Any) -> Any:
    m = m + (g - m) * 0.125
    v = v * 0.5 + g * g * 0.5
    return p - lr * m / (v + step), m, v


step_of_adam = wl.fuse(adam, name="step_of_adam")


def find(f: wl.FusedFunction, *args: Any, out: Any = None) -> ListedCall:
    lists = split_lists(f.__name__, f._parameters(), args, {}, out)
    call = find_listed(f, lists, f._bind(*lists.at(0)))
    assert call is not None
    return call


def ramp(n: int, dtype: torch.dtype, start: int = 0, offset: int = 0) -> torch.Tensor:
    """Small integers at a storage offset, with no element after the last."""
    store = torch.empty(offset + n, dtype=dtype)
    store[offset:] = ((torch.arange(n) + start) % 13).to(dtype)
    return store[offset:]


def assert_same(got: Any, want: Any, note: object = "") -> None:
    assert len(got) == len(want)
    for position, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride()), (note, position)
        assert torch.equal(g, w), (note, position)


SIZES = [*range(10), 15, 16, 17, 31, 33, 1023, 1024, 1025, 2047, 2048, 2049, 4095, 4096, 4097, 8192, 8193, 10_000]


@pytest.mark.parametrize("dtype", [u8, bf16, f32, f64], ids=str)
def test_every_length_and_alignment_in_one_list(dtype: torch.dtype) -> None:
    offsets = [(0, 0, 0), (1, 1, 1), (0, 1, 0), (0, 0, 3), (5, 2, 7), (8, 8, 4)]
    cases = list(itertools.product(SIZES, offsets))
    xs = [ramp(n, dtype, i, x) for i, (n, (x, _, _)) in enumerate(cases)]
    ys = [ramp(n, dtype, 3 * i, y) for i, (n, (_, y, _)) in enumerate(cases)]
    outs = [torch.full((o + n + 3,), 99, dtype=dtype)[o : o + n] for n, (_, _, o) in cases]
    want = [x * 2 + y for x, y in zip(xs, ys, strict=True)]
    got, launches = run_lists_emulated(axpy, xs, ys, out=outs)
    assert got is outs
    assert launches == 1
    assert_same(outs, want)
    got, _ = run_lists_emulated(axpy, xs, ys)
    assert_same(got, want)


@pytest.mark.parametrize("count", [1, 2, 126, 127, 128, 129, 500, 700])
def test_lists_of_any_length_in_as_few_launches_as_their_table_allows(count: int) -> None:
    ps, gs, ms, vs = ([ramp(i % 7, f32, start + i) for i in range(count)] for start in (0, 2, 5, 7))
    want = [adam(*item, 0.5, 1.0) for item in zip(ps, gs, ms, vs, strict=True)]
    got, launches = run_lists_emulated(step_of_adam, ps, gs, ms, vs, 0.5, 1.0)
    for mine, theirs in zip(got, want, strict=True):
        assert type(mine) is tuple
        assert_same(mine, theirs)
    num_not_empty = sum(i % 7 > 0 for i in range(count))
    assert launches == -(-num_not_empty // 511)  # eight words a tensor in 32,764 bytes, less a pointer and two shared numbers


def test_empty_tensors_anywhere() -> None:
    for sizes in ((2, 1, 0, 3, 0, 0), (0, 0, 5), (0, 1029, 0, 1), (0,), (0, 0)):
        xs = [torch.zeros(n) for n in sizes]
        _, launches = run_lists_emulated(plus_one, xs, out=xs)
        assert_same(xs, [torch.ones(n) for n in sizes], sizes)
        assert launches == any(sizes)


def test_one_launch_a_dtype_signature_and_each_item_promoted_by_itself() -> None:
    dtypes = [f32, bf16, i64, f32, u8, bf16, torch.bool, i32]
    xs = [ramp(100 + i, dtype) for i, dtype in enumerate(dtypes)]
    got, launches = run_lists_emulated(plus_one, xs)
    assert_same(got, [x + 1 for x in xs])
    assert launches == 6
    got, _ = run_lists_emulated(wl.fuse(lambda x: x + 2.5, name="half_more"), xs)
    assert_same(got, [x + 2.5 for x in xs])
    outs = [torch.zeros(len(x), dtype=dtype) for x, dtype in zip(xs, [f64, f32, f32, bf16, i64, f16, i32, i32], strict=True)]
    run_lists_emulated(plus_one, xs, out=outs)
    assert_same(outs, [(x + 1).to(out.dtype) for x, out in zip(xs, outs, strict=True)])


def test_shapes_ranks_and_formats_that_are_one_run_share_a_launch() -> None:
    shapes = [(5,), (), (3, 7), (1,), (1, 1), (4, 1, 3), (16, 16)]
    xs = [ramp(torch.Size(shape).numel(), f32, i).view(shape) for i, shape in enumerate(shapes)]
    xs.append(ramp(2 * 3 * 4 * 5, f32).view(2, 3, 4, 5).contiguous(memory_format=torch.channels_last))
    xs.append(ramp(35, f32).view(7, 5).t())
    ys = [x.flip(0) * 2 if x.ndim == 1 else x.clone() for x in xs]
    got, launches = run_lists_emulated(axpy, xs, ys)
    assert_same(got, [x * 2 + y for x, y in zip(xs, ys, strict=True)])
    assert launches == 1
    got, launches = run_lists_emulated(scaled, xs, torch.tensor(3.0), 2)
    assert_same(got, [x * 3 + 2 for x in xs])
    assert launches == 1


def test_items_that_are_no_run_take_kernels_of_their_own() -> None:
    xs = [ramp(100, f32), ramp(120, f32).view(10, 12)[:, ::2], ramp(35, f32).view(7, 5), torch.ones(4, 1).expand(4, 6)]
    ys = [ramp(100, f32, 3), ramp(6, f32), ramp(35, f32, 2).view(5, 7).t(), ramp(24, f32).view(4, 6)]
    want = [x * 2 + y for x, y in zip(xs, ys, strict=True)]
    call = find(axpy, xs, ys)
    assert call.listed.others == (1, 2, 3)
    got, launches = run_lists_emulated(axpy, xs, ys)
    assert_same(got, want)
    assert launches == 1
    outs = [torch.zeros_like(w) for w in want]
    run_lists_emulated(axpy, xs, ys, out=outs)
    assert_same(outs, want)


SEEDS = torch.tensor([17, -(2**63), 2**62 + 5, 3, 2**40, -1, 8, 9])


@pytest.mark.parametrize("dtype", [torch.bfloat16, f32, torch.float64], ids=str)
def test_items_that_draw_share_a_launch_and_each_has_its_seed(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of an item are those of a call of its own with that seed, whatever its address and its place in the list."""
    noisy = wl.fuse(lambda x: (x + torch.rand_like(x), F.dropout(x, 0.25)), name="noisy")
    cases = [(3, 0), (0, 0), (4100, 1), (1, 5), (2049, 3), (64, 0)]
    xs = [ramp(n, dtype, 0, offset) for n, offset in cases]
    outs = [(ramp(n, dtype, 0, (3 * offset + 1) % 8), ramp(n, dtype, 0, 2)) for n, offset in cases]
    monkeypatch.setattr(foreach_module, "draw_seed", lambda device, count: SEEDS[:count].clone())
    _, launches = run_lists_emulated(noisy, xs, out=outs)
    assert launches == 1
    seeds = iter(SEEDS)
    for x, got in zip(xs, outs, strict=True):
        if x.numel():
            seed = next(seeds).view(1)
            monkeypatch.setattr(reference_module, "draw_seed", lambda device, seed=seed: seed)
            assert_same(list(got), list(noisy(x)))
    assert next(seeds) == SEEDS[5]


def test_stochastic_rounding_is_the_reference_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = wl.fuse(round_stochastically, name="rounded")
    bits = torch.arange(0, 2**31 - 2**23, 2**31 // 6007, dtype=torch.int64).to(torch.int32)
    edges = (torch.arange(1, 255, dtype=torch.int32)[:, None] * 2**23 + torch.tensor([-65537, -32768, -1, 0, 1, 32768])).flatten()
    x = torch.cat([bits, edges.to(torch.int32)]).view(f32)
    x = torch.cat([x, -x, torch.tensor([0.0, -0.0, float("inf"), -float("inf")])])
    monkeypatch.setattr(foreach_module, "draw_seed", lambda device, count: SEEDS[:count].clone())
    (got,), launches = run_lists_emulated(rounded, [x])
    assert launches == 1
    monkeypatch.setattr(reference_module, "draw_seed", lambda device: SEEDS[:1])
    want = rounded(x)
    assert torch.equal(got.view(torch.int16), want.view(torch.int16))
    assert (want.float() > x).float().mean() > 0.4  # up as often as down


@pytest.mark.parametrize("dtype", [f32, bf16, f64], ids=str)
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_a_step_of_adam_in_place(dtype: torch.dtype, found: float | None) -> None:
    """Each thread reads all of an element before it writes any; a step that is skipped leaves every bit."""
    sizes = [(3, 0), (0, 0), (4100, 1), (1, 5), (2049, 3), (64, 0)]
    scale, found_inf = (None, None) if found is None else (torch.tensor(8.0), torch.tensor(found))

    def columns() -> list[list[torch.Tensor]]:
        ps, gs, ms, vs, most = ([ramp(n, dtype, k, (offset + k) % 8) / 8 for n, offset in sizes] for k in range(5))
        return [ps, gs, ms, vs, most, [torch.tensor(float(k)) for k in range(len(sizes))]]

    numbers = 0.25, 0.75, 0.5, math.log(0.75), math.log(0.5), 1e-3, 0.125, True, True, scale, found_inf, False
    mine, theirs = columns(), columns()
    results = [list(zip(c[0], c[2], c[3], c[4], strict=True)) for c in (mine, theirs)]
    before = columns()
    _, launches = run_lists_emulated(wl.optim.adam, *mine, *numbers, out=results[0])
    wl.optim.adam.foreach(*theirs, *numbers, out=results[1])
    assert launches == 1
    for column, want, old in zip(mine, theirs, before, strict=True):
        for a, b, c in zip(column, want, old, strict=True):
            torch.testing.assert_close(a, b, rtol=4 * torch.finfo(a.dtype).eps, atol=1e-6 if dtype == f32 else 1e-9, equal_nan=True)
            assert not found or torch.equal(a, c)
    assert found or not torch.equal(mine[0][2], before[0][2])


def test_coordinates_count_along_each_item() -> None:
    xs = [torch.ones(5), torch.ones(0), torch.ones(3, 4), torch.ones(70, 30), torch.ones(())]
    counted = wl.fuse(lambda x: x + wl.linear_index(), name="counted")
    got, launches = run_lists_emulated(counted, xs)
    assert launches == 1
    assert_same(got, [torch.arange(x.numel()).view(x.shape) + 1.0 for x in xs])


def test_positions_that_are_not_counted_along_memory_take_kernels_of_their_own() -> None:
    xs = [torch.ones(4, 3).t(), torch.ones(3, 4)]
    for f, want in (
        (wl.fuse(lambda x: x + wl.index(0), name="rows"), torch.arange(3.0)[:, None].expand(3, 4) + 1),
        (wl.fuse(lambda x: x + wl.linear_index(), name="turned"), torch.arange(12.0).view(3, 4) + 1),
    ):
        got, launches = run_lists_emulated(f, xs)
        assert launches == (0 if f.__name__ == "rows" else 1)  # of which the transposed item is no part
        assert_same(got, [want.t().contiguous().t(), want])
    later = wl.fuse(lambda x: (x + wl.linear_index())[2:], name="later")
    got, launches = run_lists_emulated(later, [torch.ones(5)])
    assert launches == 0
    assert_same(got, [torch.arange(2.0, 5) + 1])


def test_in_place_also_through_another_view_of_the_same_memory() -> None:
    for offset in (0, 1):
        xs, ys = [ramp(n, f32, 0, offset) for n in (3000, 5, 1)], [ramp(n, f32, 4) for n in (3000, 5, 1)]
        want = [x * 2 + y for x, y in zip(xs, ys, strict=True)]
        run_lists_emulated(axpy, xs, ys, out=xs if not offset else [x.view(-1) for x in xs])
        assert_same(xs, want)


def test_arguments_named_as_the_kernel_names_its_own() -> None:
    def f(chunk: Any, chunks: Any, lists: Any, slot: Any, is_aligned: Any, phase_of: Any, n: Any) -> Any:
        return chunk + chunks * lists + slot * is_aligned - phase_of * n

    columns = [[ramp(size, f32, start) for size in (5, 2100)] for start in range(3)]
    got, _ = run_lists_emulated(wl.fuse(f, name="lists"), *columns, 2.0, 3.0, 4.0, [5.0, 6.0])
    assert_same(got, [f(*item, 2.0, 3.0, 4.0, n) for *item, n in zip(*columns, (5.0, 6.0), strict=True)])


def test_several_results_in_place() -> None:
    ps, gs, ms, vs = ([ramp(n, f32, start) for n in (2050, 0, 7, 1, 4096)] for start in (0, 2, 5, 7))
    want = [adam(*item, 0.5, 1.0) for item in zip(ps, gs, ms, vs, strict=True)]
    run_lists_emulated(step_of_adam, ps, gs, ms, vs, 0.5, torch.tensor(1.0), out=list(zip(ps, ms, vs, strict=True)))
    for got, item in zip(zip(ps, ms, vs, strict=True), want, strict=True):
        assert_same(got, item)


def test_numbers_for_all_or_one_an_item() -> None:
    xs = [ramp(n, f32, n) for n in (5, 2100, 1, 33)]
    a, b = [2.0, 3.0, 0.5, -1.0], [1, 2, 3, 2**40]
    forms: list[tuple[Any, Any]] = [(2.0, 3), (a, 3), (2.0, b), (a, b), (tuple(a), b)]
    for first, second in forms:
        firsts, seconds = (list(s) if isinstance(s, (list, tuple)) else [s] * 4 for s in (first, second))
        got, launches = run_lists_emulated(scaled, xs, first, second)
        assert_same(got, [x * s + t for x, s, t in zip(xs, firsts, seconds, strict=True)])
        assert launches == 1
    arithmetic = wl.fuse(lambda x, lr, beta, t: x * (lr * (1 - beta**t)), name="arithmetic")
    got, launches = run_lists_emulated(arithmetic, xs, 0.5, 0.5, [1, 2, 3, 4])
    assert_same(got, [x * (0.5 * (1 - 0.5**t)) for x, t in zip(xs, (1, 2, 3, 4), strict=True)])
    assert launches == 1
    mixed, launches = run_lists_emulated(plus := wl.fuse(lambda x, s: x + s, name="plus"), [ramp(4, i32)] * 2, [1, 1.5])
    assert_same(mixed, [ramp(4, i32) + 1, ramp(4, i32) + 1.5])
    assert launches == 2
    assert plus._listed


def test_numbers_on_the_device() -> None:
    xs = [ramp(n, f32, n) for n in (5, 2100, 1, 33)]
    scales = [torch.tensor(float(k)) for k in (2, 3, 4, 5)]
    for first, firsts in ((scales[1], [scales[1]] * 4), (scales, scales)):
        got, launches = run_lists_emulated(scaled, xs, first, 1.0)
        assert_same(got, [x * s + 1 for x, s in zip(xs, firsts, strict=True)])
        assert launches == 1


def test_one_tensor_in_two_places() -> None:
    """An item whose arguments are one tensor is another call than one of two tensors; which items are so is part of the signature."""
    xs, ys = [ramp(40, f32, i) for i in range(3)], [ramp(40, f32, 7 * i + 1) for i in range(3)]
    for seconds in ([ys[0], xs[1], ys[2]], ys, [xs[0], ys[1], ys[2]], xs, ys):
        got, _ = run_lists_emulated(axpy, xs, seconds)
        assert_same(got, [x * 2 + y for x, y in zip(xs, seconds, strict=True)])
    got, _ = run_lists_emulated(axpy, xs, xs[0])
    assert_same(got, [x * 2 + xs[0] for x in xs])


def test_views_inside_the_function() -> None:
    halves = wl.fuse(lambda x: (lambda a, b: a * b)(*x.chunk(2)), name="halves")
    xs = [ramp(2 * n, f32, n) for n in (5, 1024, 1)]
    got, launches = run_lists_emulated(halves, xs)
    assert_same(got, [x[: len(x) // 2] * x[len(x) // 2 :] for x in xs])
    assert launches == 1
    joined = wl.fuse(lambda x: torch.cat((x + 1, x * 2)), name="joined")
    got, _ = run_lists_emulated(joined, xs)
    assert_same(got, [torch.cat((x + 1, x * 2)) for x in xs])


def test_structures_of_results() -> None:
    named = wl.fuse(lambda x: {"more": x + 1, "less": [x - 1, None]}, name="named")
    xs = [ramp(5, f32), ramp(2100, f32)]
    got, launches = run_lists_emulated(named, xs)
    for item, x in zip(got, xs, strict=True):
        assert item["less"][1] is None
        assert_same([item["more"], item["less"][0]], [x + 1, x - 1])
    assert launches == 1


def test_a_signature_is_planned_once_and_every_change_of_it_is_seen() -> None:
    f = wl.fuse(lambda x, y: x * 2 + y, name="axpy")
    xs, ys = [ramp(6, f32), ramp(4, f32)], [ramp(6, f32), ramp(4, f32)]
    first = find(f, xs, ys).listed
    assert find(f, [x.clone() for x in xs], ys).listed is first
    others = [
        [ramp(6, f32), ramp(1, f32)],
        [ramp(6, f32), ramp(8, f32)[::2]],
        [ramp(6, f32), ramp(4, bf16)],
        [xs[0], xs[1]],
    ]
    for other in others:
        assert find(f, xs, other).listed is not first
    assert find(f, xs, ys).listed is first
    assert find(f, xs, ys, out=[torch.empty(6), torch.empty(4)]).listed is not first
    assert find(f, xs, ys).listed is first


def assert_calls_in_turn(f: wl.FusedFunction, *calls: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Each call's lists give what its items give, whatever the calls before it left behind; all go in launches for lists."""
    for args, kwargs in calls:
        lists = split_lists(f.__name__, f._parameters(), args, kwargs, None)
        got, launches = run_lists_emulated(f, *args, **kwargs)
        assert_same(got, [f(*args, **kwargs) for args, kwargs in map(lists.at, range(lists.length))], (args, kwargs))
        assert launches > 0


def test_static_numbers_of_every_item_are_part_of_the_signature() -> None:
    f = wl.fuse(lambda x, n, s: x * n + s, static=("n",), name="static")
    xs = [ramp(6, f32), ramp(40, f32, 2)]
    assert_calls_in_turn(f, *(((xs, n, [1.0, 2.0]), {}) for n in ([2, 3], [2, 40], [2, 40.0], [3, 2], 2)))
    assert find(f, xs, [2, 3], [5.0, 6.0]).listed is find(f, xs, [2, 3], [7.0, 8.0]).listed
    signed = wl.fuse(lambda x, n: x.copysign(n), static=("n",), name="signed")
    assert_calls_in_turn(signed, ((xs, [0.0, 0.0]), {}), ((xs, [0.0, -0.0]), {}))


def test_arguments_by_keyword_in_any_order() -> None:
    f = wl.fuse(lambda x, y, s=1.0: x * 2 - y * s, name="spelt")
    xs, ys = [ramp(6, f32), ramp(40, f32, 2)], [ramp(6, f32, 5), ramp(40, f32, 3)]
    same = [((xs, ys), {}), ((), {"x": xs, "y": ys}), ((), {"y": ys, "x": xs}), ((xs,), {"y": ys})]
    assert_calls_in_turn(f, *same, ((ys, xs), {}), *same)
    numbers = [2.0, 3.0]
    assert_calls_in_turn(f, ((xs,), {"s": numbers, "y": ys}), ((xs,), {"y": ys, "s": numbers}), ((xs, ys, numbers), {}))


def test_what_is_one_for_all_may_be_another_argument_at_each_call() -> None:
    xs, shared, numbers = [ramp(6, f32), ramp(6, f32, 2)], ramp(6, f32, 5), [2.0, 3.0]
    f = wl.fuse(lambda x, y: x * 2 - y, name="either")
    assert_calls_in_turn(f, ((xs, shared), {}), ((shared, xs), {}), ((xs, xs[::-1]), {}))
    g = wl.fuse(lambda x, a, b: x * a - b, name="number")
    assert_calls_in_turn(g, ((xs, numbers, 0.0), {}), ((xs, 0.0, numbers), {}), ((xs, numbers, numbers), {}))


def test_complex_numbers_take_kernels_of_their_own() -> None:
    xs = [ramp(6, f32), ramp(40, f32, 2)]
    f = wl.fuse(lambda x, z: x * z, name="turned")
    got, launches = run_lists_emulated(f, xs, 2 - 3j)
    assert_same(got, [x * (2 - 3j) for x in xs])
    assert launches == 0
    meta = [torch.empty(6, device="meta"), torch.empty(7, device="meta")]
    for z in (torch.tensor(2 - 3j), [torch.tensor(2 - 3j), torch.tensor(1j)]):
        assert find(f, meta, z).listed.others == (0, 1)


def test_beyond_2_to_the_31_elements() -> None:
    """A tensor of 2^32 + 5 elements, of which only the last chunk's memory is there."""
    xs = [torch.zeros(8192, dtype=u8)]
    (plan,) = find(plus_one, xs).listed.plans or ()
    n, chunk = 2**32 + 5, 2**32 // (plan.variant.threads * plan.variant.elements)
    x, out = Memory(np.arange(5, dtype=np.uint8)), Memory(np.zeros(5, np.uint8))
    table = plan.variant.table
    assert table is not None
    words: list[Any] = [0] * len(plan.template)
    words[0], words[table.capacity], words[2 * table.capacity] = Pointer(x, -(2**32)), Pointer(out, -(2**32)), n
    chunks = Memory(np.array([0, chunk], np.int32).view(np.uint8))
    program = build(emit_kernel(plan.program, plan.variant))
    program.run(plan.name, (1, 1, 1), (plan.variant.threads, 1, 1), [Struct(words), Pointer(chunks)])
    assert out.data.tolist() == [1, 2, 3, 4, 5]


def test_a_planted_fault_is_seen() -> None:
    """A table that says one element more than a tensor has is caught, and so is a map that leaves a chunk out."""
    xs = [ramp(6, f32), ramp(3000, f32)]
    call = find(plus_one, xs)
    (plan,) = call.listed.plans or ()
    table = plan.variant.table
    assert table is not None
    plan.template[2 * table.capacity + 1] += 1
    with pytest.raises(EmulatorError, match="behind the end"):
        run_lists_emulated(plus_one, xs)
    plan.template[2 * table.capacity + 1] -= 1
    object.__setattr__(plan, "sizes", (6, 2000))
    got, _ = run_lists_emulated(plus_one, xs)
    assert not torch.equal(got[1], xs[1] + 1)
    plus_one._listed.clear()
    plus_one._alike.clear()
