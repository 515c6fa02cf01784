"""Turns samples of a time into what is reported and decided: quantiles, the error of a median, the interval of a ratio, a verdict.

Knows numbers only: not what was timed, nor in which unit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

__all__ = ["Interval", "Summary", "Verdict", "judge_ratio", "median_error", "rate_upper_bound", "ratio_interval", "summarize"]

Verdict = Literal["FASTER", "SLOWER", "SAME", "UNCLEAR"]


@dataclass(frozen=True, slots=True)
class Summary:
    """Quantiles of ``n`` samples, linear between neighbours (type 7 of Hyndman and Fan), and the samples in the order of time."""

    min: float
    p5: float
    p20: float
    median: float
    p80: float
    p95: float
    n: int
    samples: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """The ratio of two medians, and where it lies with probability ``confidence``."""

    ratio: float
    low: float
    high: float
    confidence: float


def summarize(samples: Sequence[float]) -> Summary:
    """Return the quantiles of at least one sample.

    >>> summarize([3.0, 1.0, 2.0]).median
    2.0
    """
    quantiles = np.quantile(np.asarray(samples, dtype=np.float64), [0, 0.05, 0.2, 0.5, 0.8, 0.95])
    low, p5, p20, median, p80, p95 = (float(q) for q in quantiles)
    return Summary(low, p5, p20, median, p80, p95, len(samples), tuple(float(s) for s in samples))


def median_error(samples: Sequence[float]) -> float:
    """Return the standard error of the median, from two order statistics; infinite for fewer than two samples.

    Distribution-free: the width between the order statistics of ranks ``c = n/2 - sqrt(n)`` and ``n - c + 1`` is about four
    standard errors; how many exactly, the binomial distribution of the median's rank says.
    Source: Bonett and Price, "Confidence intervals for ratios of means and medians", J. Educ. Behav. Stat. 45(6), 2020, 750-770.
    """
    rank, z = _order_bounds(len(samples))
    if z == 0:
        return math.inf
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[len(samples) - rank] - ordered[rank - 1]) / (2 * z)


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval:
    """Return ``median(b) / median(a)`` with its confidence interval; samples must be positive.

    Distribution-free, of independent samples: a normal interval for the difference of the medians' logarithms, whose errors
    are those of `median_error`; same source. Drift that both share makes it wider than it need be, not narrower.

    >>> ratio_interval([2.0] * 9, [3.0] * 9, 0.95)
    Interval(ratio=1.5, low=1.5, high=1.5, confidence=0.95)
    """
    if min(*a, *b) <= 0:
        raise ValueError(f"the ratio of medians needs positive samples, got {min(*a, *b)}")
    ratio = float(np.median(b) / np.median(a))
    error = math.hypot(median_error(np.log(a).tolist()), median_error(np.log(b).tolist()))
    reach = math.exp(min(NormalDist().inv_cdf((1 + confidence) / 2) * error, _MAX_LOG_RATIO))
    return Interval(ratio, ratio / reach, ratio * reach, confidence)


_MAX_LOG_RATIO = 100.0
"""One sample says nothing: its interval is everything, as far as a JSON number can say so."""


def judge_ratio(interval: Interval, same_within: float) -> Verdict:
    """Return what an interval of ``time of b / time of a`` says of b.

    SAME where the interval lies within a factor of ``1 + same_within`` of 1, FASTER or SLOWER where it lies outside
    altogether, UNCLEAR where it crosses that bound: a difference is reported only when it is real and large enough to matter.

    >>> judge_ratio(Interval(1.03, 1.02, 1.04, 0.99), same_within=0.01)
    'SLOWER'
    """
    bound = 1 + same_within
    if interval.low > bound:
        return "SLOWER"
    if interval.high < 1 / bound:
        return "FASTER"
    return "SAME" if interval.low >= 1 / bound and interval.high <= bound else "UNCLEAR"


def rate_upper_bound(count: int, n: int, confidence: float = 0.95) -> float:
    """Return the largest rate that ``count`` of ``n`` does not contradict: the one-sided bound of Clopper and Pearson, 1934.

    >>> round(rate_upper_bound(0, 200), 4)
    0.0149
    """
    if count >= n:
        return 1.0
    low, high = count / n, 1.0
    for _ in range(_BISECTIONS):
        rate = (low + high) / 2
        low, high = (rate, high) if _binomial_at_most(count, n, rate) > 1 - confidence else (low, rate)
    return high


_BISECTIONS = 50
"""Of an interval no longer than 1: to the last bits of a double."""


def _binomial_at_most(count: int, n: int, rate: float) -> float:
    chosen = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(count + 1))
    return math.fsum(math.exp(c + k * math.log(rate) + (n - k) * math.log1p(-rate)) for k, c in enumerate(chosen))


@functools.cache
def _order_bounds(n: int) -> tuple[int, float]:
    """Return the rank of the lower order statistic, counted from 1, and how many standard errors it lies below the median."""
    rank = max(1, round(n / 2 - math.sqrt(n)))
    combinations, below = 1, 0
    for k in range(rank):
        below += combinations
        combinations = combinations * (n - k) // (k + 1)
    return rank, NormalDist().inv_cdf(1 - below / 2**n) if n > 1 else 0.0
