"""Turns samples of a time into what is reported and decided: quantiles, the error of a median, the interval of a ratio, a verdict.

Knows numbers only: not what was timed, nor in which unit.
"""

from __future__ import annotations

import functools
import math
import numbers
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from wideload.errors import RangeError

__all__ = [
    "Interval",
    "Summary",
    "Verdict",
    "judge_ratio",
    "median_bounds",
    "median_error",
    "rate_upper_bound",
    "ratio_interval",
    "require",
    "require_number",
    "summarize",
]

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


def require(is_allowed: bool, name: str, value: object, allowed: str) -> None:
    """Raise ``RangeError`` where ``value`` of argument ``name`` is none of the ``allowed``; a comparison with NaN allows nothing."""
    if not is_allowed:
        raise RangeError(f"{name}={value!r}; allowed: {allowed}")


def require_number(name: str, value: object, allowed: str, *, least: float = 0, is_whole: bool = False) -> None:
    """As `require`, unless ``value`` is a number of ``least`` and more: no bool, and with ``is_whole`` an integer."""
    kind = numbers.Integral if is_whole else numbers.Real
    require(isinstance(value, kind) and not isinstance(value, bool) and value >= least, name, value, allowed)  # type: ignore[operator]


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
    rank, z = _error_rank(len(samples))
    if z == 0:
        return math.inf
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[len(samples) - rank] - ordered[rank - 1]) / (2 * z)


def median_bounds(samples: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the two samples between which the median lies with at least ``confidence``; infinite where there are too few.

    Exact for independent samples of any distribution: how many of them lie below the median is binomial with 1/2.

    >>> median_bounds(range(1, 9), 0.99)  # 254 of the 256 ways to fall on either side
    (1.0, 8.0)
    """
    rank = _bounds_rank(len(samples), confidence)
    if rank == 0:
        return -math.inf, math.inf
    ordered = np.sort(np.asarray(samples, dtype=np.float64))
    return float(ordered[rank - 1]), float(ordered[len(samples) - rank])


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float) -> Interval:
    """Return ``median(b) / median(a)`` with its confidence interval; samples must be positive.

    The exact intervals of the two medians' logarithms (`median_bounds`) give that of their difference by the method of variance
    estimates recovery: Zou and Donner, "Construction of confidence limits about effect measures", Stat. Med. 27, 2008, 1693-1702.
    It keeps its confidence at 99.8 %, where a normal interval with an estimated error does not. Drift that both samples
    share makes it wider than it need be, not narrower.

    >>> ratio_interval([2.0] * 9, [3.0] * 9, 0.99)
    Interval(ratio=1.5, low=1.5, high=1.5, confidence=0.99)
    """
    if min(*a, *b) <= 0:
        raise ValueError(f"the ratio of medians needs positive samples, got {min(*a, *b)}")
    median_a, median_b = float(np.median(a)), float(np.median(b))
    (low_a, high_a), (low_b, high_b) = median_bounds(a, confidence), median_bounds(b, confidence)
    if low_a <= 0 or low_b <= 0:
        return Interval(median_b / median_a, 0.0, _LARGEST_RATIO, confidence)
    down = math.hypot(math.log(median_b / low_b), math.log(high_a / median_a))
    up = math.hypot(math.log(high_b / median_b), math.log(median_a / low_a))
    return Interval(median_b / median_a, median_b / median_a * math.exp(-down), median_b / median_a * math.exp(up), confidence)


_LARGEST_RATIO = sys.float_info.max
"""Too few samples say nothing: their interval is everything, as far as a JSON number can say so."""


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
def _error_rank(n: int) -> tuple[int, float]:
    """Return the rank of the lower order statistic, counted from 1, and how many standard errors it lies below the median."""
    rank = max(1, round(n / 2 - math.sqrt(n)))
    below = next(below for r, below in _shares_below(n) if r == rank)
    return rank, NormalDist().inv_cdf(1 - below) if n > 1 else 0.0


@functools.cache
def _bounds_rank(n: int, confidence: float) -> int:
    """Return the largest rank, counted from 1, whose sample lies above the median with no more than half the error allowed."""
    return max((rank for rank, below in _shares_below(n) if below <= (1 - confidence) / 2), default=0)


def _shares_below(n: int) -> Iterator[tuple[int, float]]:
    """Yield each rank of the lower half, counted from 1, with the probability that fewer than so many of ``n`` lie below the median."""
    combinations, below = 1, 0
    for rank in range(1, n // 2 + 2):
        below += combinations
        yield rank, below / 2**n
        combinations = combinations * (n - rank + 1) // rank
