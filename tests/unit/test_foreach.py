"""Lists of tensors, item by item what the function gives: on the CPU, with gradients, and what is refused before anything is written."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import foreach as foreach_module
from wideload.foreach import call_in_place, find_listed
from wideload.lists import list_arguments, split_lists

f32, i8 = torch.float32, torch.int8

plus_one = wl.fuse(lambda x: x + 1, name="plus_one")
both = wl.fuse(lambda x, y: (x + y, x * y), name="both")
DEFAULT = torch.tensor([1.0, 2.0, 3.0, 4.0])


def sums(x: Any, y: Any = DEFAULT, s: Any = 1.0, n: Any = 2) -> Any:
    return x * n + y * s, x - y * n


def test_each_item_is_what_the_function_gives() -> None:
    xs = [torch.ones(3), torch.ones(2, 4, dtype=i8)[:, ::2], torch.ones(())]
    ys = (torch.ones(2, 1), torch.tensor([1.5, 2.0]), torch.tensor(True))
    got = both.foreach(xs, ys)
    assert type(got) is list
    for item, x, y in zip(got, xs, ys, strict=True):
        for result, want in zip(item, (x + y, x * y), strict=True):
            assert (result.dtype, result.stride()) == (want.dtype, want.stride())
            assert torch.equal(result, want)


def test_out_is_filled_and_returned() -> None:
    xs, ys = [torch.ones(3), torch.ones(2)], [torch.full((3,), 2.0), torch.full((2,), 3.0)]
    outs = [(torch.empty(3), torch.empty(3)), (torch.empty(2), torch.empty(2))]
    assert both.foreach(xs, ys, out=outs) is outs
    assert [t.tolist() for item in outs for t in item] == [[3.0] * 3, [2.0] * 3, [4.0] * 2, [3.0] * 2]
    assert plus_one.foreach(xs, out=xs) is xs
    assert xs[1].tolist() == [2.0, 2.0]


def test_no_items() -> None:
    outs: list[torch.Tensor] = []
    assert plus_one.foreach([]) == []
    assert plus_one.foreach((), out=outs) is outs


def test_gradients_flow_through_every_item() -> None:
    square = wl.fuse(lambda x, s: x * x * s)
    xs = [torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    sum(y.sum() for y in square.foreach(xs, [2.0, 5.0])).backward()  # type: ignore[union-attr]
    assert [x.grad.tolist() for x in xs if x.grad is not None] == [[4.0, 8.0], 30.0]


def test_inside_another_fused_function_it_is_the_plain_function() -> None:
    outer = wl.fuse(lambda x, y: sum(plus_one.foreach([x, y])))
    assert torch.equal(outer(torch.ones(3), torch.zeros(3)), torch.full((3,), 3.0))


def test_meta_tensors_give_meta_tensors() -> None:
    (got,) = plus_one.foreach([torch.empty(3, 4, device="meta", dtype=i8)])
    assert (got.device.type, got.shape, got.dtype) == ("meta", (3, 4), i8)


def test_errors_say_which_item_and_write_nothing() -> None:
    xs, two = [torch.zeros(3), torch.zeros(2)], [torch.zeros(3), torch.zeros(3)]
    clamp = wl.fuse(lambda x, n: x.clamp(max=n))
    small = [torch.zeros(3, dtype=i8), torch.zeros(3, dtype=i8)]
    cases: list[tuple[type[Exception], str, Any]] = [
        (wl.LayoutError, "item 1 of the lists: out= has shape", lambda: plus_one.foreach(xs, out=[xs[0], torch.zeros(5)])),
        (wl.LayoutError, "item 1 of the lists", lambda: both.foreach(xs, two, out=[tuple(two), (xs[1], xs[1])])),
        (wl.LayoutError, "item 1 of the lists: out= of plus_one has the structure", lambda: plus_one.foreach(xs, out=[xs[0], (xs[1],)])),
        (wl.DtypeError, "item 1 of the lists", lambda: plus_one.foreach(xs, out=[xs[0], torch.zeros(2, dtype=torch.int32)])),
        (wl.OverlapError, r"out=\[0\] and out=\[1\]", lambda: plus_one.foreach([xs[0], xs[0]], out=[xs[0], xs[0]])),
        (wl.OverlapError, "share memory", lambda: plus_one.foreach(two, out=two[::-1])),
        (wl.TraceError, "item 1 of the lists", lambda: plus_one.foreach([xs[0], object()], out=xs)),
        (RuntimeError, "without overflow", lambda: clamp.foreach(small, [5, 300], out=small)),  # torch's own, by the reference
        (wl.LayoutError, "no list", lambda: plus_one.foreach(xs[0])),
    ]
    for error, message, call in cases:
        with pytest.raises(error, match=message):
            call()
        assert not any(t.any() for t in (*xs, *two, *small)), message
    grads = [torch.zeros(3, requires_grad=True)]
    with pytest.raises(wl.GradError, match="item 0 of the lists"):
        plus_one.foreach(grads, out=[torch.zeros(3)])
    with pytest.raises(wl.DeviceError, match="item 1"):
        both.foreach(xs, [xs[0], torch.zeros(2, device="meta")])


# ---- the call of lists on one device, with a recorder in the place of the driver


def find(f: wl.FusedFunction, *args: Any, out: Any = None) -> Any:
    lists = split_lists(f.__name__, f._parameters(), args, {}, out)
    return find_listed(f, lists, f._bind(*lists.at(0)))


def test_what_needs_a_call_an_item_is_left_to_it() -> None:
    xs = [torch.ones(3), torch.ones(2)]
    assert find(plus_one, xs) is not None
    assert find(plus_one, [x.requires_grad_() for x in map(torch.clone, xs)]) is None
    with torch.no_grad():
        assert find(plus_one, [x.requires_grad_() for x in map(torch.clone, xs)]) is not None
    later = [xs[0], xs[1].clone().requires_grad_()]
    with torch.no_grad():
        assert find(plus_one, later) is not None
    assert find(plus_one, later) is None
    assert find(wl.fuse(lambda x, p: x * p[0]), xs, [(1.0, 2), (3.0, 4)]) is None
    assert find(wl.fuse(lambda x, p: x * p["s"]), xs, {"s": torch.tensor(2.0)}) is None
    assert find(both, xs, torch.full((3,), 1j).conj()) is find(both, xs, torch._neg_view(xs[0])) is None
    assert find(wl.fuse(sums), [DEFAULT, DEFAULT]) is None  # a default, which another call may have in other places
    assert find(wl.fuse(lambda x: {"y": x + 1}), xs, out=[{"y": x} for x in xs]) is None
    assert find(wl.fuse(lambda x: (x, x + 1)), xs).listed.others == (0, 1)
    assert find(wl.fuse(lambda x, n: (x + 1, n * 2)), xs, 3).listed.others == (0, 1)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tables each call launched."""
    counts: list[int] = []
    monkeypatch.setattr(foreach_module, "run_lists", lambda kernels, device, tables: counts.append(len(tables)))
    return counts


def test_results_outputs_and_versions(launched: list[int]) -> None:
    xs, ys = [torch.ones(3), torch.ones(2, 2)], [torch.ones(3), torch.ones(2, 2)]
    got = find(both, xs, ys).run()
    assert [tuple(t.shape for t in item) for item in got] == [((3,), (3,)), ((2, 2), (2, 2))]
    outs = list(zip(xs, ys, strict=True))
    versions = [t._version for item in outs for t in item]
    assert find(both, xs, ys, out=outs).run() is outs
    assert [t._version for item in outs for t in item] == [version + 1 for version in versions]
    assert launched == [1, 1]


def test_nothing_is_launched_where_a_later_item_is_refused(launched: list[int]) -> None:
    clamp = wl.fuse(lambda x, n: x.clamp(max=n))
    small = [torch.zeros(3, dtype=i8), torch.zeros(8, dtype=i8), torch.zeros(8, dtype=i8)[::2]]
    for numbers in ([5, 300, 5], [5, 5, 300]):
        with pytest.raises((wl.WideloadError, RuntimeError)):  # of a kernel's table, or by the reference
            find(clamp, small, numbers, out=small).run()
    assert not launched
    assert not any(x.any() for x in small)


def test_memory_is_looked_at_again_when_addresses_change(launched: list[int]) -> None:
    whole = torch.zeros(16)
    for first, second, is_refused in ((0, 4, False), (0, 3, True), (8, 4, False), (4, 4, True), (4, 0, False)):
        outs = [whole[first:][:4], whole[second:][:4]]
        call = find(plus_one, [torch.ones(4), torch.ones(4)], out=outs)
        if is_refused:
            with pytest.raises(wl.OverlapError, match=r"out=\[\d\] and out=\[\d\]"):
                call.run()
        else:
            call.run()
    swapped = [torch.zeros(4), torch.zeros(4)]
    with pytest.raises(wl.OverlapError):
        find(plus_one, swapped, out=swapped[::-1]).run()
    halves = [whole[:4], whole[4:8]]
    find(plus_one, halves, out=[h.view(4) for h in halves]).run()
    assert len(launched) == 4


# ---- calls in place that are made again

UNIT = 2.0


@wl.fuse
def moved(x: Any, g: Any, rate: Any, scale: Any, is_up: bool) -> Any:
    y = x + rate * g * UNIT if is_up else x - rate * g * UNIT
    return (y if scale is None else y * scale,)


class Steps:
    """Calls in place that would go to a GPU: how many were planned, and the words of the tables of the last."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_planned, self.repeats = 0, dict[Any, Any]()
        self.tables: list[list[int]] = []
        monkeypatch.setattr(foreach_module, "has_kernels", lambda device: True)
        monkeypatch.setattr(foreach_module, "find_listed", self.find)
        monkeypatch.setattr(foreach_module, "run_lists", self.run)

    def find(self, *args: Any) -> Any:
        self.num_planned += 1
        return find_listed(*args)

    def run(self, kernels: Any, device: Any, tables: Any) -> None:
        self.tables = [table.tolist() for table in tables]

    def step(self, *args: Any, f: wl.FusedFunction = moved, targets: Any = (0,)) -> bool:
        """Whether the call was planned."""
        before = self.num_planned
        call_in_place(f, args, targets, self.repeats)
        assert self.tables
        return self.num_planned > before


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def test_a_call_in_place_is_planned_once_for_new_addresses_and_numbers(steps: Steps) -> None:
    xs = [torch.ones(3), torch.ones(2, 2)]
    assert steps.step(xs, [torch.ones(3), torch.ones(2, 2)], 0.5, None, True)
    for rate in (0.25, -0.0):
        gs, versions = [torch.ones(3), torch.ones(2, 2)], [x._version for x in xs]
        assert not steps.step(xs, gs, rate, None, True)
        assert [x._version for x in xs] == [version + 1 for version in versions]
        (table,), call = steps.tables, find(moved, xs, gs, rate, None, True, out=[(x,) for x in xs])
        assert [table] == [words.tolist() for words in call.fill()[1]]
        assert {t.data_ptr() for t in (*xs, *gs)} <= set(table)
    assert not steps.step([torch.ones(3), torch.ones(2, 2)], gs, 0.5, None, True)


def test_a_call_in_place_of_another_kind_is_planned(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    xs, gs, scale = [torch.ones(4), torch.ones(2, 2)], [torch.ones(4), torch.ones(2, 2)], torch.tensor(2.0)
    assert steps.step(xs, gs, 0.5, None, True)
    others: list[tuple[Any, ...]] = [
        (xs, [gs[0], gs[1].bfloat16()], 0.5, None, True),
        (xs, [gs[0], torch.ones(4, 4)[::2, ::2]], 0.5, None, True),
        (xs[:1], gs[:1], 0.5, None, True),
        (xs, gs, 1, None, True),
        (xs, gs, scale, None, True),
        (xs, gs, 0.5, scale, True),
        (xs, gs, 0.5, None, False),
        (tuple(x.double() for x in xs), gs, 0.5, None, True),
    ]
    for args in others:
        assert steps.step(*args)
    assert steps.step(xs, gs, 0.25, None, True)  # of calls that differ in tensors alone, the last is kept
    assert not steps.step(xs, gs, 0.5, None, True)
    assert not steps.step(xs, gs, 0.5, scale + 1, True)
    resized = [torch.ones(4), torch.ones(2, 2)]
    resized[0].data = torch.ones(3)
    with pytest.raises(wl.LayoutError):
        steps.step(resized, gs, 0.5, None, True)
    monkeypatch.setitem(moved.__wrapped__.__globals__, "UNIT", 3.0)
    assert steps.step(xs, gs, 0.5, None, True)


def test_memory_is_looked_at_in_calls_that_are_made_again(steps: Steps) -> None:
    whole, gs = torch.zeros(16), [torch.ones(4), torch.ones(4)]
    assert steps.step([whole[:4], whole[4:8]], gs, 0.5, None, True)
    assert not steps.step([whole[4:8], whole[8:12]], gs, 0.5, None, True)
    steps.tables = []
    with pytest.raises(wl.OverlapError):
        steps.step([whole[4:8], whole[6:10]], gs, 0.5, None, True)
    with pytest.raises(wl.OverlapError):
        steps.step([whole[:4], whole[4:8]], [whole[4:8], gs[1]], 0.5, None, True)
    assert not steps.tables


def test_what_is_not_made_again(steps: Steps) -> None:
    xs = [torch.ones(4), torch.ones(2, 2)]
    for _ in range(2):
        assert steps.step(xs, xs, 0.5, None, True)  # one operand, which others are not
        assert steps.step(xs, [torch.ones(4), torch.ones(2, 2)], [0.5, 0.25], None, True)  # a number each
    assert not steps.repeats


def test_a_call_in_place_on_the_cpu_is_that_of_its_items() -> None:
    xs, gs = [torch.ones(3), torch.ones(2)], [torch.ones(3), torch.full((2,), 2.0)]
    call_in_place(moved, (xs, gs, 0.5, None, True), (0,), {})
    assert [x.tolist() for x in xs] == [[2.0] * 3, [3.0] * 2]


# ---- what was planned for one call and is taken for another


def planned(f: wl.FusedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """All that a call takes of its plan, and the words of its tables where the outputs lie at 0; ``None``: it goes item by item."""
    lists = split_lists(f.__name__, f._parameters(), args, kwargs, None)
    first = f._bind(*lists.at(0))
    call = find_listed(f, lists, first)
    if call is None:
        return None
    addresses = [*map(call._addresses, call.columns), *[torch.zeros(lists.length, dtype=torch.int64).numpy()] * 2]
    slots = dict(call.listed.slots)

    def scalars(item: int) -> tuple[Any, ...]:
        return tuple(lists.values[slots[slot]][item] if slot in slots else value for slot, value in enumerate(first.scalars))

    return call.listed.outputs, [
        (plan.program, plan.variant, plan.sizes, list_arguments(plan, call.columns, addresses, scalars).tolist())  # type: ignore[arg-type]
        for plan in call.listed.plans or ()
    ]


def test_tensors_that_are_made_of_arguments_are_left_to_a_call_an_item() -> None:
    tables = torch.ones(4, 1), torch.zeros(4, 1)
    assert planned(wl.ops.rope, ([torch.ones(1, 4, 1, 2)], *tables), {}) is not None
    assert planned(wl.ops.rope, ([torch.ones(1, 4, 1, 2)], *tables), {"position_ids": torch.tensor([3, 1, 0, 2])}) is None


POOL = [torch.full((4,), 5.0), torch.full((4,), 6.0), DEFAULT, torch.ones(6)[:4].to(torch.bfloat16), torch.ones(8)[::2], torch.ones(1)]
POOL += [torch.ones(4, dtype=torch.complex64), torch.full((4,), 1j).conj(), torch.ones(4, requires_grad=True)]
NUMBERS: dict[str, list[Any]] = {"s": [1.0, 2.0, 3, 1j, True, *POOL], "n": [2, 3, 2.0, 0.0, -0.0, True]}


@pytest.mark.parametrize("seed", range(30))
def test_a_call_takes_the_plan_that_a_new_function_makes(seed: int) -> None:
    """Calls that differ in a thing or two from the one before: values, kinds, dtypes, shapes, aliases, lengths, spelling and order.

    A key that leaves out any of it gives a call the plan of another.
    """
    rng, f, length = random.Random(seed), wl.fuse(sums, static=("n",)), 2
    given: dict[str, Any] = {"x": [POOL[0]] * length, "y": [POOL[1]] * length, "s": 2.0, "n": [2] * length}
    order, num_positional, num_planned = ["x", "y", "s", "n"], 0, 0

    def new_value(name: str) -> Any:
        """One for all or a list, mostly of two values: calls are to come back to what was, but for one thing."""
        choices = NUMBERS.get(name, POOL)
        common = choices if rng.random() < 0.25 else choices[:2]
        return rng.choice(common) if rng.random() < 0.4 else [rng.choice(common) for _ in range(length)]

    for _ in range(40):
        change = rng.choice(["value"] * 5 + ["swap", "order", "order", "positional", "length"])
        if change == "value":
            name = rng.choice("xysn")
            given[name] = new_value(name)
        elif change == "swap":
            given["x"], given["y"] = given["y"], given["x"]
        elif change == "order":
            rng.shuffle(order)
        elif change == "positional":
            num_positional = rng.randrange(5)
        else:
            length = rng.choice([1, 2, 2, 3])
            given = {name: new_value(name) if type(value) is list else value for name, value in given.items()}
        if type(given["x"]) is not list and type(given["y"]) is not list:
            given["x"] = [rng.choice(POOL[:2]) for _ in range(length)]
        positional = "xysn"[:num_positional]
        left_out = rng.choice("ysn") if rng.random() < 0.1 and type(given["x"]) is list else ""
        kwargs = {name: given[name] for name in order if name not in positional and name != left_out}
        args = tuple(given[name] for name in positional)
        want = planned(wl.fuse(sums, static=("n",)), args, kwargs)
        assert planned(f, args, kwargs) == want, (args, kwargs)
        num_planned += bool(want and want[1])
    assert num_planned > 10
