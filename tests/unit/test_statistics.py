"""Quantiles and intervals against published figures, hand arithmetic and simulated truth."""

from __future__ import annotations

import math

import numpy as np
import pytest

from wideload.measure.statistics import (
    Interval,
    Verdict,
    judge_ratio,
    median_bounds,
    median_error,
    rate_upper_bound,
    ratio_interval,
    summarize,
)


def test_quantiles_of_0_to_100_are_their_own_names() -> None:
    samples = [float(value) for value in np.random.default_rng(0).permutation(101)]
    summary = summarize(samples)
    assert (summary.min, summary.p5, summary.p20, summary.median, summary.p80, summary.p95, summary.n) == (0, 5, 20, 50, 80, 95, 101)
    assert summary.samples == tuple(samples), "the samples stay in the order of time"


def test_quantiles_lie_between_neighbours() -> None:
    summary = summarize([10.0, 20.0])
    assert (summary.p5, summary.median, summary.p95) == (10.5, 15.0, 19.5)


# The examples in the documentation of statpsych's ci.median, by the authors of the method.
PUBLISHED_ERRORS = [
    ([30.2, 20.4, 15.1, 10.2, 10.5, 60.8, 20.8, 25.0, 20.7, 30.9, 10.8, 5.1, 50.9, 40.0, 20.9, 10.8, 0, 20.5, 50.8], 4.292277),
    ([25, 29, 35, 36, 36, 40, 41, 43, 44, 54], 3.261774),
]


@pytest.mark.parametrize(("samples", "error"), PUBLISHED_ERRORS)
def test_error_of_the_median_as_published(samples: list[float], error: float) -> None:
    assert median_error(samples) == pytest.approx(error, abs=5e-7)


# From tables of the interval of the median: n, ranks, and the confidence in per cent.
TABULATED_RANKS = [(6, 1, 96.9), (10, 2, 97.9), (14, 3, 98.7), (14, 4, 94.3), (19, 5, 98.1), (20, 4, 99.7), (20, 5, 98.8), (20, 6, 95.9)]


@pytest.mark.parametrize(("n", "rank", "percent"), TABULATED_RANKS)
def test_bounds_of_the_median_as_tabulated(n: int, rank: int, percent: float) -> None:
    samples = [float(value) for value in range(n, 0, -1)]
    assert median_bounds(samples, (percent - 0.06) / 100) == (rank, n - rank + 1)
    low, high = median_bounds(samples, (percent + 0.06) / 100)
    assert (low, high) == ((rank - 1, n - rank + 2) if rank > 1 else (-math.inf, math.inf)), "a little more confidence takes the next ranks"


def test_interval_of_the_ratio_by_hand() -> None:
    a, b = [2.0**k for k in range(-4, 4)], [3 * 4.0**k for k in range(-4, 4)]  # at 99 % the bounds of 8 are the first and the last
    median_a, median_b = (0.5 + 1) / 2, (3 / 4 + 3) / 2
    down = math.hypot(math.log(median_b / (3 / 256)), math.log(8 / median_a))
    up = math.hypot(math.log(192 / median_b), math.log(median_a * 16))
    expected = (median_b / median_a, median_b / median_a * math.exp(-down), median_b / median_a * math.exp(up))
    interval = ratio_interval(a, b, 0.99)
    assert (interval.ratio, interval.low, interval.high) == pytest.approx(expected)


def test_error_of_the_median_is_the_spread_of_medians() -> None:
    draws = np.random.default_rng(1).normal(100, 1, size=(4000, 101))
    spread = float(np.median(draws, axis=1).std())
    estimated = float(np.mean([median_error(row.tolist()) for row in draws[:1000]]))
    assert estimated == pytest.approx(spread, rel=0.05)


def test_one_sample_says_nothing() -> None:
    assert median_error([1.0]) == math.inf
    interval = ratio_interval([1.0], [2.0], 0.99)
    assert interval.ratio == 2.0
    assert interval.low == 0.0
    assert 1e9 < interval.high < math.inf, "a number that JSON can hold"


def test_ratio_of_times_that_are_not_positive_is_refused() -> None:
    with pytest.raises(ValueError, match="positive"):
        ratio_interval([1.0, 2.0], [0.0, 1.0], 0.99)


@pytest.mark.parametrize("confidence", [0.9, 0.99, 0.998])
def test_interval_holds_the_true_ratio_as_often_as_it_says(confidence: float) -> None:
    rng, num = np.random.default_rng(2), 2000
    hits = 0
    for _ in range(num):
        a, b = rng.lognormal(0, 0.05, 40), 1.2 * rng.lognormal(0, 0.2, 40)
        interval = ratio_interval(a.tolist(), b.tolist(), confidence)
        hits += interval.low <= 1.2 <= interval.high
    slack = 3 * math.sqrt(confidence * (1 - confidence) / num)
    assert confidence - slack <= hits / num <= confidence + slack + 0.03, "nominal, or a little more"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (1.011, 1.05, "SLOWER"),
        (0.95, 0.989, "FASTER"),
        (0.995, 1.005, "SAME"),
        (1.002, 1.009, "SAME"),
        (0.98, 1.02, "UNCLEAR"),
        (1.005, 1.02, "UNCLEAR"),
        (0.98, 0.995, "UNCLEAR"),
    ],
)
def test_verdicts(low: float, high: float, verdict: Verdict) -> None:
    assert judge_ratio(Interval(math.sqrt(low * high), low, high, 0.99), same_within=0.01) == verdict


def test_largest_rate_that_a_count_does_not_contradict() -> None:
    assert rate_upper_bound(0, 200) == pytest.approx(1 - 0.05 ** (1 / 200))  # (1 - rate) ** 200 == 5 %
    rate = rate_upper_bound(3, 50)
    assert sum(math.comb(50, k) * rate**k * (1 - rate) ** (50 - k) for k in range(4)) == pytest.approx(0.05)
    assert rate_upper_bound(7, 7) == 1.0
