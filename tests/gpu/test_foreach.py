"""Lists on a GPU against torch's own: lengths, alignments, dtypes, numbers, in place, streams, graphs, devices, more than 2^31 elements."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import wideload as wl
from tests.gpu.test_dense import DEVICE, DTYPES, assert_same, random

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 7, 8, 9, 1000, 2048, 4095, 4096, 4097, 100_003)

add = wl.fuse(lambda x, y: x + y, name="add")
scaled = wl.fuse(lambda x, a, b: x * a + b, name="scaled")


def adam(p: Any, g: Any, m: Any, v: Any, lr: Any, step: Any) -> Any:
    m = m + (g - m) * 0.1
    v = v * 0.99 + g * g * 0.01
    return p - lr * m / (v.sqrt() + 1e-8) * step, m, v


step_of_adam = wl.fuse(adam, name="step_of_adam")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_length_and_alignment_in_one_list(dtype: torch.dtype) -> None:
    cases = list(itertools.product(SIZES, range(0, 16, 3), range(0, 16, 5), (0, 1, 8)))
    xs = [random(n + x, dtype=dtype)[x:] for n, x, _, _ in cases]
    ys = [random(n + y, dtype=dtype)[y:] for n, _, y, _ in cases]
    rooms = [random(n + o + 16, dtype=dtype) for n, _, _, o in cases]
    before = [room.clone() for room in rooms]
    outs = [room[o : o + n] for room, (n, _, _, o) in zip(rooms, cases, strict=True)]
    assert add.foreach(xs, ys, out=outs) is outs
    fresh = add.foreach(xs, ys)
    for case, x, y, room, old, out, new in zip(cases, xs, ys, rooms, before, outs, fresh, strict=True):
        assert_same(out, x + y, case)
        assert_same(new, x + y, case)
        assert_same(room[: case[3]], old[: case[3]], case)
        assert_same(room[case[3] + case[0] :], old[case[3] + case[0] :], case)


@pytest.mark.parametrize("count", [1, 127, 128, 424, 511, 512, 2000])
def test_long_lists_in_place_are_the_function_item_by_item(count: int) -> None:
    ps, gs, ms, vs = ([random(i % 97 * 31, dtype=torch.float32) for i in range(count)] for _ in range(4))
    step = torch.tensor(0.75, device=DEVICE)
    want = [step_of_adam(*item, 0.01, step) for item in zip(ps, gs, ms, vs, strict=True)]
    for _ in range(2):
        state = [[t.clone() for t in column] for column in (ps, ms, vs)]
        out = list(zip(*state, strict=True))
        step_of_adam.foreach(state[0], [g.clone() for g in gs], state[1], state[2], 0.01, step, out=out)
        for position, (got, results) in enumerate(zip(out, want, strict=True)):
            for mine, theirs in zip(got, results, strict=True):
                assert_same(mine, theirs, position)


def test_mixed_dtypes_shapes_and_layouts() -> None:
    xs = [random(40, 50, dtype=dtype) for dtype in DTYPES] + [
        random(64, 32, dtype=torch.float32).t(),
        random(9, 12, dtype=torch.bfloat16)[:, ::2],
    ]
    ys = [random(50, dtype=torch.float32) if i % 2 else random(*x.shape, dtype=x.dtype) for i, x in enumerate(xs[:4])]
    ys += [random(32, 64, dtype=torch.float32), random(9, 6, dtype=torch.bfloat16)]
    for got, x, y in zip(add.foreach(xs, ys), xs, ys, strict=True):
        assert_same(got, x + y)


def test_numbers_wherever_they_are() -> None:
    xs = [random(n, dtype=torch.float32) for n in (5, 5000, 1, 0)]
    numbers = [2.0, 3.0, 0.5, -1.0]
    on_host, on_device = [torch.tensor(s) for s in numbers], [torch.tensor(s, device=DEVICE) for s in numbers]
    for column in (numbers, tuple(numbers), on_host, on_device):
        for got, x, s in zip(scaled.foreach(xs, column, 2), xs, numbers, strict=True):
            assert_same(got, x * s + 2)
    for one in (3.0, torch.tensor(3.0), torch.tensor(3.0, device=DEVICE)):
        for got, x, b in zip(scaled.foreach(xs, one, [1, 2, 3, 4]), xs, (1, 2, 3, 4), strict=True):
            assert_same(got, x * 3.0 + b)


def test_complex_numbers_for_all() -> None:
    turned = wl.fuse(lambda x, z: x * z, name="turned")
    xs = [torch.arange(1.0, n + 1, device=DEVICE) for n in (5, 5000, 1, 0)]
    for z in (2 - 3j, torch.tensor(2 - 3j), torch.tensor(2 - 3j, device=DEVICE), [2 - 3j] * 4, [torch.tensor(2 - 3j)] * 4):
        for got, x in zip(turned.foreach(xs, z), xs, strict=True):
            assert torch.equal(got, x * (2 - 3j))


def test_calls_of_one_function_in_turn() -> None:
    f = wl.fuse(lambda x, y, n=2: x * n - y, static=("n",), name="in_turn")
    xs, ys, shared = ([random(n, dtype=torch.float32) for n in (50, 50)] for _ in range(3))
    one = shared[0]
    for x, y, n in ((xs, ys, [2, 3]), (xs, ys, [2, 40]), (ys, xs, 2), (xs, one, 2), (one, xs, 2), (xs, one.neg(), [2, 3])):
        given = {"x": x, "y": y, "n": n}
        for order in itertools.permutations(given):
            items = [tuple(value[k] if type(value) is list else value for value in (x, y, n)) for k in range(2)]
            for got, (a, b, c) in zip(f.foreach(**{name: given[name] for name in order}), items, strict=True):
                assert_same(got, a * c - b)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_number_on_the_device_does_not_synchronise() -> None:
    xs, step = [random(5000, dtype=torch.float32) for _ in range(50)], torch.tensor(3.0, device=DEVICE)
    scaled.foreach(xs, step, 1.0, out=xs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        scaled.foreach(xs, step, 1.0, out=xs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_on_another_stream_with_lists_of_one_signature() -> None:
    xs = [random(50_000, dtype=torch.float32) for _ in range(20)]
    want = [x + x for x in xs]
    add.foreach(xs, xs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        got = add.foreach(xs, xs)
    side.synchronize()
    for mine, theirs in zip(got, want, strict=True):
        assert_same(mine, theirs)


def test_items_that_draw_share_a_launch_and_draw_their_own() -> None:
    noise = wl.fuse(lambda x: torch.rand_like(x), name="noise")
    room = random(300_001, dtype=torch.float32)
    xs = [room[1:], room[:100_000], room[:0], room[:77].view(7, 11), room[:100_000]]
    torch.manual_seed(5)
    first, second = noise.foreach(xs), noise.foreach(xs)
    torch.manual_seed(5)
    for got, again, other in zip(noise.foreach(xs), first, second, strict=True):
        assert_same(got, again)
        assert not got.numel() or not torch.equal(got, other)
    assert not torch.equal(first[1], first[4])
    assert abs(float(first[0].double().mean()) - 0.5) < 5 * (1 / 12 / 300_000) ** 0.5
    outs = [torch.zeros_like(x) for x in xs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        noise.foreach(xs, out=outs)
    graph.replay()
    kept = [out.clone() for out in outs]
    graph.replay()
    assert not torch.equal(outs[0], kept[0])
    assert not torch.equal(outs[0][:100_000], outs[1])


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_graph_replays_with_new_contents_and_outlives_the_function() -> None:
    f = wl.fuse(lambda x, y: x * 2 + y, name="replayed")
    xs, ys = ([random(n * 31, dtype=torch.float32) for n in range(1, 300)] for _ in range(2))
    outs = [torch.zeros_like(x) for x in xs]
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(wl.DeviceError, match="warm up"), torch.cuda.graph(graph):
        f.foreach(xs, ys, out=outs)
    f.foreach(xs, ys, out=outs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f.foreach(xs, ys, out=outs)
    for k in range(80):  # other lists, whose chunk maps drive out that of the graph
        add.foreach([random(k + 1, dtype=torch.float32)], [random(k + 1, dtype=torch.float32)])
    later = torch.cuda.CUDAGraph()
    f.foreach(xs, ys, out=outs)
    with torch.cuda.graph(later):
        f.foreach(xs, ys, out=outs)
    f = None  # type: ignore[assignment]
    torch.cuda.empty_cache()
    for _ in range(3):
        torch._foreach_add_(xs, 1.0)
        graph.replay()
        torch.cuda.synchronize()
        for out, x, y in zip(outs, xs, ys, strict=True):
            assert_same(out, x * 2 + y)


@pytest.mark.gpus(2)
def test_items_on_two_devices_and_on_one_that_is_not_current() -> None:
    xs = [torch.ones(1000, device=f"cuda:{k}") for k in (0, 1, 1, 0)]
    for got, x in zip(add.foreach(xs, xs), xs, strict=True):
        assert_same(got, x + x)
    second = [x for x in xs if x.device.index == 1]
    for got, x in zip(add.foreach(second, second), second, strict=True):
        assert_same(got, x + x)
    with pytest.raises(wl.DeviceError):
        add.foreach(xs[:2], [xs[0], xs[0]])


@pytest.mark.big(16)
def test_more_than_2_to_the_31_elements_among_small_ones() -> None:
    xs = [torch.ones(n, dtype=torch.int8, device=DEVICE) for n in (5, 2**31 + 12345, 7)]
    add.foreach(xs, xs, out=xs)
    for x in xs:
        assert bool((x[-20_000:] == 2).all())
        assert int(x.sum(dtype=torch.int64)) == 2 * x.numel()
