"""Lists taken apart: what is one item a call, what depends on a list's tensors, which memory meets, which words a table gets."""

from __future__ import annotations

import itertools
import random
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload import lists as lists_module
from wideload.foreach import find_listed
from wideload.lists import check_apart, gather_addresses, list_arguments, meeting_pairs, read_column, split_lists, tensors_like
from wideload.plan import Variant

f32, bf16 = torch.float32, torch.bfloat16
CPU, META = torch.device("cpu"), torch.device("meta")

# ---- arguments


def test_lists_and_tuples_are_one_item_a_call_and_all_else_is_for_all() -> None:
    size = torch.Size((2, 3))
    lists = split_lists("f", ("a", "b"), ([1, 2], "same"), {"c": (3, 4), "size": size}, None)
    assert lists.length == 2
    assert lists.at(0) == ((1, "same"), {"c": 3, "size": size})
    assert lists.at(1) == ((2, "same"), {"c": 4, "size": size})


def test_lengths_that_differ_are_named() -> None:
    with pytest.raises(wl.LayoutError, match=r"different lengths: a has 2, c has 3, out= has 2"):
        split_lists("f", ("a", "b"), ([1, 2], 5), {"c": (1, 2, 3)}, [1, 2])
    with pytest.raises(wl.LayoutError, match=r"f\.foreach was given no list: a a generator, b a int\. Pass"):
        split_lists("f", ("a", "b"), ((x for x in [1]), 1), {}, None)
    with pytest.raises(wl.LayoutError, match=r"out= of f\.foreach is a Tensor"):
        split_lists("f", ("a",), ([1],), {}, torch.zeros(1))


CHANGES = {
    "dtype": lambda x: x.to(bf16),
    "shape": lambda x: x.view(3, 2),
    "strides": lambda x: x.clone().t().contiguous().t(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_plan_depends_on_is_in_the_key_and_in_the_guard(change: str) -> None:
    xs = [torch.ones(2, 3) for _ in range(4)]
    column, like = read_column(xs, CPU), tensors_like([xs, xs[:1]])
    assert like is not None
    alike = [x.clone() for x in xs]
    assert read_column(alike, CPU) == column
    assert like([alike, xs[:1]])
    other = [*alike[:3], CHANGES[change](alike[3])]
    assert read_column(other, CPU) != column
    assert not like([other, xs[:1]])


def test_items_that_need_a_look_one_by_one() -> None:
    x = torch.ones(2, 3)
    strange = [
        torch.ones(2, requires_grad=True),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch._neg_view(x),
        x.to_sparse(),
        torch.empty(2, device="meta"),
        type("Mine", (torch.Tensor,), {})(),
        1.0,
        (x, x),
    ]
    like = tensors_like([[x, x]])
    assert like is not None
    for item in strange:
        assert read_column([x, item], CPU) is None
        assert not like([[x, item]])
    with torch.no_grad():
        assert read_column([x, strange[0]], CPU) is not None


def test_0_dim_host_tensors_stand_beside_a_device() -> None:
    steps = [torch.tensor(1.0), torch.tensor(2.0)]
    column = read_column(steps, META)
    assert column is not None
    assert column.kind == "host"
    assert read_column([*steps, torch.ones(1)], META) is None


def test_numbers_go_by_their_kind_and_static_items_by_value() -> None:
    assert read_column([1, 2], CPU) == read_column([3, 4], CPU) != read_column([1, 2.0], CPU)
    static = [read_column(items, CPU, is_static=True) for items in ([1, 2], [1, 3], [1, 3.0], [1, -0.0], [1, 0.0])]
    assert len(set(static)) == len(static)
    assert read_column([True, None], CPU) != read_column([False, None], CPU)
    assert read_column([object()], CPU) is None


# ---- memory


def test_ranges_that_meet_are_all_found_and_no_others() -> None:
    rng = random.Random(1)
    for _ in range(300):
        count = rng.randrange(1, 12)
        starts = np.array([rng.randrange(40) for _ in range(count)], np.int64)
        ends = starts + np.array([rng.randrange(1, 12) for _ in range(count)], np.int64)
        is_write = np.array([rng.random() < 0.5 for _ in range(count)], bool)
        want = {
            (a, b)
            for a, b in itertools.combinations(range(count), 2)
            if starts[a] < ends[b] and starts[b] < ends[a] and (is_write[a] or is_write[b])
        }
        got = meeting_pairs(starts, ends, is_write)
        assert len(got) == len(want)
        assert {tuple(sorted(pair)) for pair in got} == want


def test_an_output_keeps_to_its_own_item() -> None:
    whole = torch.zeros(20)
    a, b = whole[:10], whole[10:]
    check_apart([(0, "out=", a), (1, "out=", b)], [(0, "x", a), (1, "x", b), (0, "y", torch.ones(10))])
    check_apart([(0, "out=", whole[::2]), (1, "out=", whole[1::2])], [])
    check_apart([(0, "out=", a), (1, "out=", whole[:0])], [(1, "x", whole[:0])])
    for writes, reads, message in (
        ([(0, "out=", a), (2, "out=", a)], [], r"out=\[0\] and out=\[2\] of a foreach call share memory"),
        ([(0, "out=", whole[:6]), (1, "out=", whole[5:])], [], r"out=\[0\] and out=\[1\]"),
        ([(0, "out=", a), (1, "out=", b)], [(0, "x", b), (1, "x", a)], "x"),
        ([(0, "out=", a)], [(0, "x", whole[1:11])], r"out=\[0\] and x\[0\]"),
        ([(0, "out=", a)], [(-1, "scale", a[3])], r"out=\[0\] and scale of"),
    ):
        with pytest.raises(wl.OverlapError, match=message):
            check_apart(writes, reads)


# ---- the table


def test_numbers_of_host_tensors_are_read_at_each_call() -> None:
    f = wl.fuse(lambda x, s, t: x * s + t, name="f")
    xs = [torch.empty(4, device="meta"), torch.empty(6, device="meta")]
    steps, shift = [torch.tensor(1.5), torch.tensor(2.5)], torch.tensor(7)
    lists = split_lists("f", (), (xs, steps, shift), {}, None)
    call = find_listed(f, lists, f._bind(*lists.at(0)))
    assert call is not None
    (plan,) = call.listed.plans or ()
    assert plan.variant.loads == ("vector", "value", "value")
    table = plan.variant.table
    assert table is not None
    capacity = table.capacity
    for add in (0, 1):
        for step in steps:
            step += add
        (words,) = call.fill()[1]
        assert words.view(np.float64)[capacity : capacity + 2].tolist() == [1.5 + add, 2.5 + add]
        assert words[2 * capacity] == 7
    addresses = [np.array([96, 160]), None, None, np.array([32, 64])]
    found = list_arguments(plan, [xs, steps, [shift], []], addresses, lambda item: ())
    assert found[:2].tolist() == [96, 160]
    assert found[2 * capacity + 1 :][:2].tolist() == [32, 64]
    assert found[3 * capacity + 1 :][:2].tolist() == [4, 6]


def test_addresses_are_those_of_the_first_elements() -> None:
    store = torch.zeros(20)
    assert gather_addresses([store[3:], store, store[:0]]).tolist()[:2] == [store.data_ptr() + 12, store.data_ptr()]


# ---- chunk maps


class ChunkMaps:
    """Finds the chunk maps of lists of some sizes, on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        f = wl.fuse(lambda x: x + 1, name="f")
        lists = split_lists("f", (), ([torch.zeros(5000), torch.zeros(7)],), {}, None)
        call = find_listed(f, lists, f._bind(*lists.at(0)))
        assert call is not None
        (self.plan,) = call.listed.plans or ()
        self.is_capturing = False
        monkeypatch.setattr(lists_module, "is_capturing", lambda device: self.is_capturing)
        monkeypatch.setattr(lists_module, "current_stream", lambda device: 0)
        monkeypatch.setattr(lists_module, "_maps", OrderedDict())
        monkeypatch.setattr(lists_module, "_captured", {})
        monkeypatch.setattr(torch, "device", lambda *args: "cpu")

    def find(self, *sizes: int) -> torch.Tensor:
        return lists_module._find_map(0, self.plan.variant, sizes)


@pytest.fixture
def chunk_maps(monkeypatch: pytest.MonkeyPatch) -> ChunkMaps:
    return ChunkMaps(monkeypatch)


def test_a_chunk_map_is_made_once_and_never_in_a_capture(chunk_maps: ChunkMaps) -> None:
    chunk_maps.is_capturing = True
    with pytest.raises(wl.DeviceError, match="before the capture, to warm up"):
        chunk_maps.find(5000, 7)
    chunk_maps.is_capturing = False
    made = chunk_maps.find(2500, 7)
    assert made.tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert chunk_maps.find(2500, 7) is made


def test_the_chunk_map_that_is_used_at_every_step_stays(chunk_maps: ChunkMaps) -> None:
    made = chunk_maps.find(5000, 7)
    for k in range(2 * lists_module._MAX_MAPS):
        chunk_maps.find(k + 1)
        assert chunk_maps.find(5000, 7) is made
    assert len(lists_module._maps) == lists_module._MAX_MAPS


def test_what_a_graph_reads_is_never_replaced(chunk_maps: ChunkMaps) -> None:
    warm = chunk_maps.find(5000, 7)
    chunk_maps.is_capturing = True
    assert chunk_maps.find(5000, 7) is warm
    chunk_maps.is_capturing = False
    for k in range(lists_module._MAX_MAPS + 1):
        chunk_maps.find(k + 1)
    assert chunk_maps.find(5000, 7) is warm
    chunk_maps.is_capturing = True
    assert chunk_maps.find(5000, 7) is warm
    assert list(map(id, lists_module._captured.values())) == [id(warm)]


def test_threads_keep_to_the_number_of_chunk_maps(chunk_maps: ChunkMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads ask for every map at about the same time, and one is made at a time."""
    build = lists_module.chunk_map
    num_making, most_making = 0, 0

    def make(variant: Variant, sizes: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.int32]]:
        nonlocal num_making, most_making
        num_making += 1
        most_making = max(most_making, num_making)
        time.sleep(1e-4)
        num_making -= 1
        return build(variant, sizes)

    monkeypatch.setattr(lists_module, "chunk_map", make)
    num_maps = 2 * lists_module._MAX_MAPS
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(chunk_maps.find, [k // 2 + 1 for k in range(2 * num_maps)]))
    assert len(found) == 2 * num_maps
    assert len(lists_module._maps) == lists_module._MAX_MAPS
    assert most_making == 1
