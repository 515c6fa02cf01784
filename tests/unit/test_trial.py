"""Honest contenders and liars of each kind, on a simulated GPU whose true times are known by arithmetic."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.simulated_gpu import LAUNCH_DEVICE_US, SimulatedGpu, simulated_gpu
from wideload.measure import timing
from wideload.measure.operands import Operands, random_tensor
from wideload.measure.result import Contender
from wideload.measure.timing import Collected, GraphSampler, Mode
from wideload.measure.trial import Rotation, Trial

__all__ = ["simulated_gpu"]

NUM = 20_000
NBYTES = 4 * NUM
"""Of one operand; the simulated L2 holds 13 of them."""


def copy_us(gpu: SimulatedGpu, num_operands: int = 2) -> float:
    return LAUNCH_DEVICE_US + num_operands * NBYTES / gpu.bytes_per_us


def trial_of(gpu: SimulatedGpu, fn: Callable[..., Any], *args: Any, **parts: Any) -> Trial:
    operands = Operands(["x", "y"], args, {})
    return Trial("it", fn, Rotation(operands), gpu.parts(**parts), None)


def run(trial: Trial, mode: Mode = "graph", *, check: Callable[..., torch.Tensor] | None = None, num: int = 6) -> Contender:
    """What a session does with one contender; its inputs are never shared here."""
    operands = trial._operands
    want = [check(*operands.args)] if check is not None else None
    trial.check(want, is_binding=True, is_random=False)
    if not trial.is_sound:
        return trial.record(None, None, ())
    trial.probe()
    trial.prepare(mode)
    assert trial.sampler is not None
    collected = Collected(tuple(trial.sampler.sample() for _ in range(num)), "max_samples")
    trial._operands.restore()
    trial._operands.permute()
    trial.recheck([check(*trial._operands.args)] if check is not None else None)
    return trial.record(collected, None, ())


def codes(contender: Contender) -> set[str]:
    return {label.code for label in contender.labels}


def median(contender: Contender) -> float:
    assert contender.time_us is not None
    return contender.time_us.median


def double(gpu: SimulatedGpu, *, host_us: float = 5.0, stream: str = "current") -> Callable[[torch.Tensor], torch.Tensor]:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        gpu.launch(lambda: torch.mul(x, 2, out=out), x, out, host_us=host_us, stream=stream)
        return out

    return fn


@pytest.mark.parametrize("mode", ["cold", "graph"])
def test_an_honest_contender_is_timed_cold(simulated_gpu: SimulatedGpu, mode: Mode) -> None:
    contender = run(trial_of(simulated_gpu, double(simulated_gpu), random_tensor((NUM,))), mode, check=lambda x: x * 2)
    assert median(contender) == pytest.approx(copy_us(simulated_gpu), rel=1e-6)
    assert contender.mode == mode
    assert codes(contender) <= {"EVENT_TIMED"}
    assert contender.is_ranked


def test_the_gap_between_calls_in_a_graph_is_taken_off(simulated_gpu: SimulatedGpu) -> None:
    for mode, gap_us, taken in (("graph", 0.25, 0.25), ("graph", None, 0.0), ("graph", 1e6, copy_us(simulated_gpu)), ("cold", 0.25, 0.0)):
        trial = trial_of(simulated_gpu, double(simulated_gpu), random_tensor((NUM,)), gap_us=gap_us)
        contender = run(trial, mode, check=lambda x: x * 2)  # type: ignore[arg-type]
        if gap_us == 1e6:
            assert trial.sampler is not None
            assert trial.sampler.sample() == 0.0
            continue
        assert median(contender) == pytest.approx(copy_us(simulated_gpu) - taken, rel=1e-6)
        assert contender.gap_us == (gap_us if mode == "graph" else None)


def test_kernels_that_overlap_have_no_gaps_to_be_taken_off(simulated_gpu: SimulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "capture", lambda *given: dataclasses.replace(simulated_gpu.capture(*given), overlaps=True))  # type: ignore[type-var]
    contender = run(trial_of(simulated_gpu, double(simulated_gpu), random_tensor((NUM,)), gap_us=0.25), "graph", check=lambda x: x * 2)
    assert median(contender) == pytest.approx(copy_us(simulated_gpu), rel=1e-6)
    assert contender.gap_us is None


def test_a_graph_rotates_through_five_times_the_l2(simulated_gpu: SimulatedGpu) -> None:
    trial = trial_of(simulated_gpu, double(simulated_gpu), random_tensor((NUM,)))
    run(trial)
    assert isinstance(trial.sampler, GraphSampler)
    results = trial.sampler.captured.results
    assert trial.sampler.num_buffers * 2 * NBYTES >= 5 * simulated_gpu.l2_bytes
    assert len({result.data_ptr() for result in results}) == trial.sampler.num_buffers
    assert trial.sampler.calls_per_sample % trial.sampler.num_buffers == 0


def test_hot_is_hot_and_says_so(simulated_gpu: SimulatedGpu) -> None:
    def fn(x: torch.Tensor, y: torch.Tensor) -> None:
        simulated_gpu.launch(lambda: torch.mul(x, 2, out=y), x, y)

    contender = run(trial_of(simulated_gpu, fn, random_tensor((NUM,)), random_tensor((NUM,), seed=1)), "hot")
    assert median(contender) == pytest.approx(LAUNCH_DEVICE_US, rel=1e-6)
    assert "HOT" in codes(contender)


def test_the_host_is_hidden_behind_more_flushes(simulated_gpu: SimulatedGpu) -> None:
    fn = double(simulated_gpu, host_us=900.0)  # a flush takes 211 us
    contender = run(trial_of(simulated_gpu, fn, random_tensor((NUM,))), "cold")
    assert median(contender) == pytest.approx(copy_us(simulated_gpu), rel=1e-6)
    assert "HOST_BOUND" not in codes(contender)


def test_a_call_that_waits_for_the_gpu_is_exposed(simulated_gpu: SimulatedGpu) -> None:
    fn = double(simulated_gpu, host_us=50.0)

    def waiting(x: torch.Tensor) -> torch.Tensor:
        out = fn(x)
        simulated_gpu.wait()
        return out

    trial = trial_of(simulated_gpu, waiting, random_tensor((NUM,)))
    contender = run(trial)
    assert contender.mode == "cold", "no graph can hold it"
    assert codes(contender) >= {"EVENT_TIMED"}
    assert codes(contender) & {"HOST_BOUND", "HOST_EXPOSED"}


def test_no_work(simulated_gpu: SimulatedGpu) -> None:
    contender = run(trial_of(simulated_gpu, lambda x: x, random_tensor((NUM,))))
    assert "NO_WORK" in codes(contender)
    assert not contender.is_ranked


def test_work_on_another_stream(simulated_gpu: SimulatedGpu) -> None:
    contender = run(trial_of(simulated_gpu, double(simulated_gpu, stream="side"), random_tensor((NUM,))), check=lambda x: x * 2)
    assert "OFF_STREAM" in codes(contender)
    assert not contender.is_ranked


def test_part_of_the_work_on_another_stream(simulated_gpu: SimulatedGpu) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        half = NUM // 2
        simulated_gpu.launch(lambda: torch.mul(x[:half], 2, out=out[:half]), x)
        simulated_gpu.launch(lambda: torch.mul(x[half:], 2, out=out[half:]), x, stream="side")
        return out

    assert "OFF_STREAM" in codes(run(trial_of(simulated_gpu, fn, random_tensor((NUM,))), check=lambda x: x * 2))


def test_work_on_another_stream_that_also_waits(simulated_gpu: SimulatedGpu) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        simulated_gpu.wait()
        simulated_gpu.launch(lambda: torch.mul(x, 2, out=out), *[x] * 1000, stream="side")
        simulated_gpu.side_us += 10_000
        return out

    assert "OFF_STREAM" in codes(run(trial_of(simulated_gpu, fn, random_tensor((NUM,)))))


def memo_of(
    compute: Callable[[torch.Tensor], torch.Tensor], key: Callable[[torch.Tensor], Any], *, is_cloned: bool
) -> Callable[..., torch.Tensor]:
    known: dict[Any, torch.Tensor] = {}

    def fn(x: torch.Tensor) -> torch.Tensor:
        if key(x) not in known:
            known[key(x)] = compute(x)
        return known[key(x)].clone() if is_cloned else known[key(x)]

    return fn


KEYS: list[Callable[[torch.Tensor], Any]] = [id, lambda x: x.data_ptr(), lambda x: (x.data_ptr(), x._version), lambda x: tuple(x.shape)]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_result_from_a_cache(simulated_gpu: SimulatedGpu, key: Callable[[torch.Tensor], Any], is_checked: bool) -> None:
    fn = memo_of(double(simulated_gpu), key, is_cloned=False)
    contender = run(trial_of(simulated_gpu, fn, random_tensor((NUM,))), check=(lambda x: x * 2) if is_checked else None)
    assert "CACHED" in codes(contender)
    assert contender.time_us is None


def test_a_copy_of_a_result_from_a_cache(simulated_gpu: SimulatedGpu) -> None:
    fn = memo_of(double(simulated_gpu), lambda x: x.data_ptr(), is_cloned=True)
    contender = run(trial_of(simulated_gpu, fn, random_tensor((NUM,))), "cold", check=lambda x: x * 2)
    assert "CACHED" in codes(contender)
    assert contender.time_us is None


def test_an_argument_that_drifts_is_restored_and_the_callers_is_not_touched(simulated_gpu: SimulatedGpu) -> None:
    x = random_tensor((NUM,))
    before = x.clone()
    seen: list[float] = []

    def grow(x: torch.Tensor) -> None:
        simulated_gpu.launch(lambda: (seen.append(float(x[0])), x.mul_(3)), x)

    trial = trial_of(simulated_gpu, grow, x)
    contender = run(trial)
    assert torch.equal(x, before)
    assert "MUTATES" in codes(contender)
    assert "restored before each sample" in str(contender.labels)
    assert isinstance(trial.sampler, GraphSampler)
    assert trial.sampler.num_buffers == trial.sampler.calls_per_sample, "each buffer is touched once between two restorations"
    num_calls = trial.sampler.calls_per_sample
    timed = seen[-7 * num_calls - 1 : -num_calls - 1]  # after six samples: one call on other inputs, and one replay on them
    assert set(timed) == {float(before[0])}, "every timed call saw the caller's values"


def test_what_works_in_place_is_timed_on_what_is_restored_and_then_cold(simulated_gpu: SimulatedGpu) -> None:
    x, seen = random_tensor((NUM,)), []

    def grow(x: torch.Tensor) -> torch.Tensor:
        simulated_gpu.launch(lambda: (seen.append((float(x[0]), simulated_gpu.num_flushes)), x.mul_(3)), x)
        return x

    contender = run(trial_of(simulated_gpu, grow, x), "cold", check=lambda x: x * 3)
    assert contender.is_ranked
    assert median(contender) == pytest.approx(copy_us(simulated_gpu, 1), rel=1e-6)
    timed = seen[-8:-2]  # the six samples, before the two calls of the last check
    assert {value for value, _ in timed} == {float(x[0])}
    assert len({flushes for _, flushes in timed}) == 6, "a flush before each"


def test_an_argument_that_is_only_written_needs_no_restoring(simulated_gpu: SimulatedGpu) -> None:
    def copy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        simulated_gpu.launch(lambda: y.copy_(x), x, y)
        return y

    contender = run(trial_of(simulated_gpu, copy, random_tensor((NUM,)), random_tensor((NUM,), seed=1)), check=lambda x, y: x)
    assert median(contender) == pytest.approx(copy_us(simulated_gpu), rel=1e-6)
    assert [label.text for label in contender.labels] == ["it writes y, to the same values each time"]


def test_a_bandwidth_above_nominal_is_served_by_the_l2(simulated_gpu: SimulatedGpu) -> None:
    trial = trial_of(
        simulated_gpu, double(simulated_gpu), random_tensor((NUM,)), nominal_bytes_per_second=0.4 * 1e6 * simulated_gpu.bytes_per_us
    )
    contender = run(trial)
    assert "SERVED_BY_L2" in codes(contender)
    assert not contender.is_ranked


def test_a_held_operand_that_a_graph_keeps_hot_is_timed_by_events(simulated_gpu: SimulatedGpu) -> None:
    w = random_tensor((NUM,), seed=5)

    def fn(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        simulated_gpu.launch(lambda: torch.mul(x, w, out=out), x, w, out)
        return out

    trial = trial_of(simulated_gpu, fn, random_tensor((NUM,)))
    trial.check(None, is_binding=True, is_random=False)
    assert not trial.is_graph_cold
    contender = run(trial_of(simulated_gpu, fn, random_tensor((NUM,))), "cold")
    assert median(contender) == pytest.approx(copy_us(simulated_gpu, 3), rel=1e-6)
    assert "HOLDS_TENSORS" in codes(contender)


def test_an_operand_hidden_from_sight_is_caught_by_its_speed(simulated_gpu: SimulatedGpu) -> None:
    class Layer:
        def __init__(self) -> None:
            self.w = random_tensor((100_000,), seed=5)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(x)
            simulated_gpu.launch(lambda: torch.mul(x, self.w[: x.numel()], out=out), x, self.w, out)
            return out

    contender = run(trial_of(simulated_gpu, Layer(), random_tensor((1000,))))
    assert "SERVED_BY_L2" in codes(contender), contender


def test_small_operands_are_flushed_before_each_replay(simulated_gpu: SimulatedGpu) -> None:
    trial = trial_of(simulated_gpu, double(simulated_gpu), random_tensor((8,)))
    contender = run(trial)
    assert isinstance(trial.sampler, GraphSampler)
    before = simulated_gpu.num_flushes
    trial.sampler.sample()
    assert simulated_gpu.num_flushes > before
    assert median(contender) == pytest.approx(LAUNCH_DEVICE_US + 64 / simulated_gpu.bytes_per_us, rel=1e-6)


def test_random_results_are_not_compared(simulated_gpu: SimulatedGpu) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        simulated_gpu.launch(lambda: out.copy_(torch.rand(x.shape)), x, out)
        return out

    contender = run(trial_of(simulated_gpu, noisy, random_tensor((NUM,))))
    assert contender.is_ranked
    assert [label.text for label in contender.labels] == ["its results differ from call to call"]
