"""When sampling stops, who is sampled when, how many buffers and calls a graph gets, and what hides the host."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from tests.simulated_gpu import LAUNCH_HOST_US, SimulatedGpu, simulated_gpu
from wideload.measure.timing import (
    MAX_GRAPH_CALLS,
    EventSampler,
    Flush,
    Mode,
    StopRule,
    WallSampler,
    collect,
    host_cost_us,
    num_graph_calls,
    num_rotated_buffers,
    warm_up,
)

__all__ = ["simulated_gpu"]

MIB = 1 << 20


class Scripted:
    """A sampler whose times are given."""

    mode: Mode = "wall"
    calls_per_sample = num_buffers = 1
    is_host_hidden = True

    def __init__(self, times: Iterator[float], log: list[str] | None = None, name: str = "") -> None:
        self._times, self._log, self._name = times, log, name

    def sample(self) -> float:
        if self._log is not None:
            self._log.append(self._name)
        return next(self._times)


def flush_of(gpu: SimulatedGpu) -> Flush:
    flush: Flush = gpu.parts().flush
    return flush


# ---- graphs


@pytest.mark.parametrize(
    ("bytes_per_call", "l2_bytes", "num"),
    [
        (48 * MIB, 60 * MIB, 7),  # 7 x 48 = 336 >= 300
        (300 * MIB, 60 * MIB, 1),
        (100 * MIB, 60 * MIB, 3),
        (8, 60 * MIB, MAX_GRAPH_CALLS),
        (0, 60 * MIB, MAX_GRAPH_CALLS),
    ],
)
def test_buffers_fill_the_l2_five_times(bytes_per_call: int, l2_bytes: int, num: int) -> None:
    assert num_rotated_buffers(bytes_per_call, l2_bytes) == num


@pytest.mark.parametrize(
    ("call_us", "num_buffers", "num"),
    [
        (10.0, 1, 100),
        (10.0, 7, 105),
        (400.0, 7, 7),
        (0.5, 1, MAX_GRAPH_CALLS),
        (2.0, 700, 700),
        (2.0, 1024, 1024),
        (0.0, 1, MAX_GRAPH_CALLS),
    ],
)
def test_calls_fill_a_millisecond_in_whole_rounds(call_us: float, num_buffers: int, num: int) -> None:
    assert num_graph_calls(call_us, num_buffers) == num


# ---- stopping


def test_equal_samples_stop_at_the_fewest() -> None:
    collected = collect({"a": Scripted(itertools.repeat(5.0))}, StopRule(min_samples=30), seed=0)["a"]
    assert collected.stopped == "precision"
    assert collected.samples_us == (5.0,) * 30


def test_noise_stops_at_the_cap_and_calm_before() -> None:
    noisy = itertools.cycle([1.0, 3.0])
    collected = collect({"noisy": Scripted(noisy), "calm": Scripted(itertools.repeat(2.0))}, StopRule(max_samples=50), seed=0)
    assert (collected["noisy"].stopped, len(collected["noisy"].samples_us)) == ("max_samples", 50)
    assert (collected["calm"].stopped, len(collected["calm"].samples_us)) == ("precision", 30)
    assert list(collected) == ["noisy", "calm"]


def test_time_stops_what_neither_does() -> None:
    collected = collect({"a": Scripted(itertools.cycle([1.0, 3.0]))}, StopRule(max_seconds=0.0), seed=0)["a"]
    assert collected.stopped == "max_seconds"
    assert len(collected.samples_us) == 5


def test_every_round_samples_each_once_in_an_order_that_the_seed_gives() -> None:
    def order(seed: int) -> list[str]:
        log: list[str] = []
        samplers = {name: Scripted(itertools.repeat(1.0), log, name) for name in "abc"}
        collect(samplers, StopRule(min_samples=30), seed=seed)
        return log

    log = order(1)
    rounds = [log[start : start + 3] for start in range(0, len(log), 3)]
    assert all(sorted(names) == ["a", "b", "c"] for names in rounds)
    assert len({tuple(names) for names in rounds}) > 1
    assert order(1) == order(1)
    assert order(1) != order(2)


def test_no_garbage_is_collected_meanwhile() -> None:
    seen = []

    def times() -> Iterator[float]:
        while True:
            seen.append(gc.isenabled())
            yield 1.0

    collect({"a": Scripted(times())}, StopRule(), seed=0)
    assert not any(seen)
    assert gc.isenabled()


def test_progress_is_reported() -> None:
    told: list[tuple[int, int]] = []
    collect({"a": Scripted(itertools.repeat(1.0))}, StopRule(max_samples=40), seed=0, report=lambda done, total: told.append((done, total)))
    assert told == [(n, 40) for n in range(1, 31)]


# ---- warming up


@pytest.fixture
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host clock that goes on 10 us each time it is looked at."""
    ticks = itertools.count(step=10)
    monkeypatch.setattr("wideload.measure.timing.time.perf_counter", lambda: next(ticks) / 1e6)
    monkeypatch.setattr("wideload.measure.timing.time.perf_counter_ns", lambda: next(ticks) * 1000)


@pytest.mark.usefixtures("host_clock")
def test_warm_up_goes_on_until_the_clock_is_steady() -> None:
    clocks = iter([500.0, 1200.0, 1975.0, 1980.0, 1980.0])
    read: list[float] = []
    warm_up([Scripted(itertools.repeat(1.0))], lambda: read.append(next(clocks)) or read[-1], 0.002)
    assert read[-2:] == [1975.0, 1980.0]


def test_warm_up_ends_where_the_clock_is_unknown_or_never_steady() -> None:
    warm_up([Scripted(itertools.repeat(1.0))], lambda: None, 0.002)
    restless = itertools.cycle([1000.0, 1500.0])
    warm_up([Scripted(itertools.repeat(1.0))], lambda: next(restless), 0.002)


# ---- the wall clock


@pytest.mark.usefixtures("host_clock")
def test_short_calls_are_timed_many_at_a_time() -> None:
    """A call takes 10 us, and so does looking at the clock: four are a sample of 50 us."""
    calls = itertools.count()
    sampler = WallSampler(lambda: [next(calls), time.perf_counter()])
    assert sampler.calls_per_sample == 4
    before = next(calls)
    assert sampler.sample() > 0
    assert next(calls) - before - 1 == sampler.calls_per_sample


def test_what_must_be_restored_is_timed_one_at_a_time() -> None:
    log: list[str] = []
    sampler = WallSampler(lambda: log.append("call"), lambda: log.append("restore"))
    sampler.sample()
    sampler.sample()
    assert log == ["restore", "call", "restore", "call"]


# ---- events, on a simulated GPU


def test_a_host_stumble_by_chance_does_not_lengthen_the_lead(simulated_gpu: SimulatedGpu) -> None:
    costs = iter([5.0, 5.0, 900.0, *[5.0] * 10])
    sampler = EventSampler(lambda: simulated_gpu.launch(lambda: None, host_us=next(costs)), flush_of(simulated_gpu))
    num_flushes = []
    for _ in range(4):
        before = simulated_gpu.num_flushes
        assert sampler.sample() == pytest.approx(1.0)
        num_flushes.append(simulated_gpu.num_flushes - before)
    assert num_flushes == [1, 1, 2, 1], "the third sample was taken again"
    assert sampler.is_host_hidden


def test_what_nothing_hides_is_given_up_once(simulated_gpu: SimulatedGpu) -> None:
    def call() -> None:
        simulated_gpu.wait()
        simulated_gpu.launch(lambda: None)

    sampler = EventSampler(call, flush_of(simulated_gpu))
    assert sampler.sample() == pytest.approx(1.0 + LAUNCH_HOST_US)
    assert not sampler.is_host_hidden
    before = simulated_gpu.num_flushes
    sampler.sample()
    assert simulated_gpu.num_flushes == before + 1


def test_a_hot_call_finds_what_the_call_before_it_left(simulated_gpu: SimulatedGpu) -> None:
    x = torch.ones(1000)
    times = {}
    for mode in ("cold", "hot"):
        sampler = EventSampler(lambda: simulated_gpu.launch(lambda: None, x), flush_of(simulated_gpu), mode=mode)  # type: ignore[arg-type]
        times[mode] = sampler.sample()
    assert times == pytest.approx({"cold": 1 + 4000 / simulated_gpu.bytes_per_us, "hot": 1.0})


def test_arguments_are_restored_before_the_flush(simulated_gpu: SimulatedGpu) -> None:
    log: list[str] = []
    sampler = EventSampler(lambda: log.append("call"), lambda times: log.append("flush"), restore=lambda: log.append("restore"))  # type: ignore[arg-type]
    sampler.sample()
    assert log[:3] == ["restore", "flush", "call"]


def test_host_cost_never_waits_inside_a_batch() -> None:
    log: list[str] = []
    cost = host_cost_us(lambda: log.append("call"), lambda: log.append("wait"), 10.0)
    assert cost > 0
    runs = ["".join(group) for is_call, group in itertools.groupby(log, key=lambda entry: entry == "call") if is_call]
    assert set(runs) == {"call" * 20}
    assert len(runs) == 25


def test_host_cost_of_long_calls_takes_few_of_them() -> None:
    calls: list[None] = []
    host_cost_us(lambda: calls.append(None), lambda: None, 200_000.0)
    assert len(calls) == 3
