"""Verdicts on simulated noise of known truth, on stored results that may or may not be compared, and live on a CPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload.measure import BenchResult, Contender, compare, compare_results, random_tensor, self_test
from wideload.measure.compare import LOOKS, Decision, decide
from wideload.measure.environment import Environment, GpuState
from wideload.measure.labels import Label
from wideload.measure.operands import OperandInfo
from wideload.measure.statistics import Verdict, summarize

# ---- deciding


def noise(rng: np.random.Generator, scale: float, sigma: float) -> Callable[[], float]:
    """Times around ``scale``: log-normal, and one in thirty half as long again, as of a host that stumbles."""
    times = scale * rng.lognormal(0, sigma, LOOKS[-1]) * np.where(rng.random(LOOKS[-1]) < 1 / 30, 1.5, 1.0)
    return iter(times.tolist()).__next__


def verdicts(num: int, ratio: float, sigma: float, seed: int) -> Counter[Verdict]:
    rng = np.random.default_rng(seed)
    return Counter(decide(noise(rng, 50, sigma), noise(rng, 50 * ratio, sigma)).verdict for _ in range(num))


def test_false_verdicts_of_2000_pairs_are_at_most_1_percent() -> None:
    counts = verdicts(1000, 1.0, 0.01, seed=0) + verdicts(500, 1.0, 0.05, seed=1) + verdicts(500, 1.0, 0.002, seed=2)
    assert counts.total() == 2000
    assert counts["FASTER"] + counts["SLOWER"] <= 20
    assert counts["SAME"] >= 1400, "and most pairs are seen to be the same"


def test_false_verdicts_stay_rare_where_nothing_counts_as_the_same() -> None:
    rng = np.random.default_rng(3)
    counts = Counter(decide(noise(rng, 50, 0.01), noise(rng, 50, 0.01), same_within=0.0).verdict for _ in range(500))
    assert counts["FASTER"] + counts["SLOWER"] <= 10, "six looks, 1 % in all"


@pytest.mark.parametrize(("ratio", "verdict"), [(1.03, "SLOWER"), (1 / 1.03, "FASTER")])
def test_a_planted_3_percent_is_found(ratio: float, verdict: Verdict) -> None:
    counts = verdicts(300, ratio, 0.01, seed=4)
    assert counts[verdict] >= 299


def test_too_much_noise_is_unclear() -> None:
    counts = verdicts(100, 1.03, 0.3, seed=5)
    assert counts["UNCLEAR"] >= 95
    assert counts["FASTER"] <= 1


def test_a_drift_that_both_share_is_no_difference() -> None:
    rng = np.random.default_rng(6)
    clock = itertools.count()

    def drifting() -> float:
        return 50 * (1 + 0.001 * next(clock)) * float(rng.lognormal(0, 0.001))

    counts = Counter(decide(drifting, drifting).verdict for _ in range(20))
    assert counts["FASTER"] + counts["SLOWER"] == 0


def test_samples_are_taken_in_turns_and_stop_at_the_first_clear_look() -> None:
    log: list[str] = []
    decision = decide(lambda: log.append("a") or 1.0, lambda: log.append("b") or 2.0)
    assert "".join(log) == "abba" * (LOOKS[0] // 2)
    assert decision == Decision((1.0,) * 20, (2.0,) * 20, decision.interval, "SLOWER", "verdict")
    assert decision.interval.confidence == pytest.approx(1 - 0.01 / len(LOOKS)), "each look has its share of the error"


def test_time_that_is_up_ends_at_the_first_look_with_what_there_is() -> None:
    rng = np.random.default_rng(7)
    decision = decide(noise(rng, 1, 0.5), noise(rng, 1, 0.5), max_seconds=0.0)
    assert (decision.verdict, decision.stopped, len(decision.samples_a)) == ("UNCLEAR", "max_seconds", LOOKS[0])
    decision = decide(noise(rng, 1, 0.5), noise(rng, 1, 0.5))
    assert (decision.verdict, decision.stopped, len(decision.samples_b)) == ("UNCLEAR", "max_samples", LOOKS[-1])


# ---- stored


def contender(name: str, median_us: float, *labels: Label, mode: str = "cold", seed: int = 0) -> Contender:
    samples = (median_us * np.random.default_rng(seed).lognormal(0, 0.002, 101)).tolist()
    return Contender(name, mode, summarize(samples), 0.001, "precision", 1, 1, 10.0, None, labels)


WRONG = Contender("eager", None, None, None, None, None, None, None, None, (Label("WRONG", "3 of 4 elements differ"),))
WHERE = Environment(
    "cuda:0", "0.1.0", None, "2.11.0", "13.0", "3.12.3", "a CPU", 8, "2026-11-01T00:00:00+00:00", "NVIDIA H200", "GPU-1", "580.1", True
)
ARGUMENTS = (OperandInfo("x", "bf16", (8, 4), (4, 1), 0, "cuda:0"),)


def result(subject: Contender, *against: Contender, **changes: Any) -> BenchResult:
    parts: dict[str, Any] = {"arguments": ARGUMENTS, "environment": WHERE, **changes}
    return BenchResult(subject, against, "it.reference", 64, 4.9e12, seed=0, gpu_state=GpuState(1980, 1980, (), ()), **parts)


def test_stored_results_are_compared_name_by_name() -> None:
    a = result(contender("it", 100), contender("eager", 200), contender("gone", 1))
    b = result(contender("it", 100.1, seed=1), contender("new", 1), contender("eager", 230, seed=1))
    rows = compare_results(a, b).rows
    assert [(row.a and row.a.name, row.b and row.b.name, row.verdict) for row in rows] == [
        ("it", "it", "SAME"),
        ("eager", "eager", "SLOWER"),
        ("gone", None, "UNCLEAR"),
        (None, "new", "UNCLEAR"),
    ]
    assert rows[1].interval
    assert rows[1].interval.ratio == pytest.approx(1.15, rel=0.01)
    assert rows[1].exit_code == 1
    assert "eager is SLOWER than eager" in str(compare_results(a, b))
    assert [row.verdict for row in compare_results(b, a).rows[:2]] == ["SAME", "UNCLEAR"]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"environment": dataclasses.replace(WHERE, gpu="NVIDIA H100")}, "different GPU: NVIDIA H200 and NVIDIA H100"),
    ({"environment": dataclasses.replace(WHERE, gpu_uuid="GPU-2")}, "different GPU: GPU-1 and GPU-2"),
    ({"environment": dataclasses.replace(WHERE, driver="570.0")}, "different driver"),
    ({"environment": dataclasses.replace(WHERE, ecc=False)}, "different ECC"),
    ({"arguments": (OperandInfo("x", "bf16", (8, 4), (1, 8), 0, "cuda:0"),)}, "different arguments"),
    ({"arguments": (*ARGUMENTS, OperandInfo("n", value="3"))}, "different arguments"),
]


@pytest.mark.parametrize(("change", "reason"), CHANGES)
def test_results_that_may_not_be_compared_are_unclear_and_say_why(change: dict[str, Any], reason: str) -> None:
    compared = compare_results(result(contender("it", 100)), result(contender("it", 200), **change))
    assert [row.verdict for row in compared.rows] == ["UNCLEAR"]
    assert reason in str(compared)
    assert compared.exit_code == 3


def test_another_torch_may_be_what_is_compared() -> None:
    newer = result(contender("it", 90), environment=dataclasses.replace(WHERE, torch="2.13.0", time_utc="2026-12-01T00:00:00+00:00"))
    compared = compare_results(result(contender("it", 100)), newer)
    assert [row.verdict for row in compared.rows] == ["FASTER"]
    assert compared.exit_code == 0


def test_times_that_are_none_or_not_alike_are_unclear() -> None:
    good = result(contender("it", 100), contender("eager", 100))
    compared = compare_results(good, result(contender("it", 50, mode="graph"), WRONG))
    assert [row.verdict for row in compared.rows] == ["UNCLEAR", "UNCLEAR"]
    assert "timed cold, it graph" in str(compared.rows[0])
    assert "no time to compare: WRONG" in str(compared.rows[1])
    fast = contender("it", 50, Label("SERVED_BY_L2", "6 TB/s"))
    assert compare_results(good, result(fast, contender("eager", 100))).rows[0].verdict == "UNCLEAR"


def test_few_samples_are_unclear() -> None:
    short = dataclasses.replace(contender("it", 50), time_us=summarize([50.0] * 5))
    (row,) = compare_results(result(contender("it", 100)), result(short)).rows
    assert row.verdict == "UNCLEAR"
    json.dumps(row.to_dict(), allow_nan=False)


def test_paths_and_dicts_are_read(tmp_path: Path) -> None:
    a, b = result(contender("it", 100)), result(contender("it", 100, seed=1))
    path = tmp_path / "a.json"
    path.write_text(a.to_json(), encoding="utf-8")
    assert compare_results(path, b.to_dict()).rows == compare_results(a, b).rows
    assert compare_results(str(path), b).exit_code == 0


def test_the_worst_verdict_is_the_exit_code() -> None:
    a = result(contender("it", 100), contender("eager", 100))
    assert compare_results(a, result(contender("it", 120), WRONG)).exit_code == 1, "slower and unclear"
    assert compare_results(a, result(contender("it", 80), contender("eager", 100))).exit_code == 0


# ---- live, on a CPU

QUICK: dict[str, Any] = {"max_seconds": 0.0, "warm_up_seconds": 0.0}


def test_what_computes_something_else_is_compared_and_said_to() -> None:
    x = random_tensor((64,))
    comparison = compare(lambda v: v * 2, lambda v: (v * 2).sin(), x, **QUICK)
    assert comparison.a
    assert comparison.b
    assert [label.code for label in comparison.b.labels] == ["DIFFERS"]
    assert comparison.a.labels == ()
    assert comparison.verdict in str(comparison)
    assert comparison.interval
    assert comparison.to_dict()["time_ratio"]["ratio"] == comparison.interval.ratio
    json.loads(comparison.to_json())


def test_a_wrong_one_gets_no_verdict() -> None:
    x = random_tensor((64,))
    comparison = compare(torch.neg, torch.abs, x, check=lambda v: -v, **QUICK)
    assert comparison.verdict == "UNCLEAR"
    assert comparison.exit_code == 3
    assert "abs has no time to compare: WRONG" in str(comparison)


def test_what_counts_on_its_arguments_is_checked_again_on_others() -> None:
    """Halves that are alike, of which permuted values are none."""
    first, second = (random_tensor((4, 8), seed=seed).repeat(1, 2) for seed in (0, 1))
    fns = (lambda v: v * 2, lambda v: v[:, :8].repeat(1, 2) * 2)
    assert "CACHED" in str(compare(*fns, first, check=lambda v: v + v, **QUICK))
    comparison = compare(*fns, first, check=lambda v: v + v, recheck_on=[second], **QUICK)
    assert comparison.b is not None
    assert comparison.b.labels == ()


def test_a_fused_function_is_the_reference_on_either_side() -> None:
    fused = wl.fuse(lambda v: v * 2, name="fused")
    comparison = compare(lambda v: v * 3, fused, random_tensor((64,)), names=("other", "ours"), **QUICK)
    assert comparison.a
    assert comparison.b
    assert [label.code for label in comparison.a.labels] == ["DIFFERS"]
    assert comparison.b.labels == ()


def test_names_are_the_functions_own_where_they_tell_them_apart() -> None:
    x = random_tensor((64,))
    assert "abs" in str(compare(torch.neg, torch.abs, x, **QUICK))
    assert " b " in str(compare(lambda v: -v, lambda v: -v, x, **QUICK)).replace("b:", " b ")


def test_a_self_test_counts_every_pair() -> None:
    tested = self_test(torch.neg, random_tensor((64,)), num_pairs=3)
    assert sum(tested.verdicts.values()) == tested.num_pairs == 3
    assert tested.false_rate <= tested.false_rate_bound
    assert "A/A over 3 pairs" in str(tested)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("same_within", -0.1), ("same_within", float("nan")), ("confidence", 0.0), ("confidence", 1.0), ("confidence", float("nan"))],
        *[("max_seconds", -1.0), ("names", ("one",)), ("names", ("one", "one"))],
    ],
)
def test_arguments_that_make_no_sense_have_no_verdict(argument: str, value: Any) -> None:
    """With ``same_within=-1`` a callable would be SLOWER than itself."""

    def runs(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was called")

    with pytest.raises(wl.WideloadError, match=f"^{argument}=.*allowed") as caught:
        compare(runs, runs, torch.ones(4), **{argument: value})
    assert isinstance(caught.value, ValueError)
