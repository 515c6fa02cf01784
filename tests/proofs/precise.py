"""Functions in multiple precision: numbers in, the nearest fp64 out, in several processes.

Knows mpmath alone, so that a process starts at once: ``python -m tests.proofs.precise NAME`` reads hexadecimal numbers, one a line.
"""

from __future__ import annotations

import concurrent.futures
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mpmath
from mpmath.libmp import NoConvergence

__all__ = ["FUNCTIONS", "compute", "compute_many"]

_ROOT = Path(__file__).parents[2]
_PRECISION = 400
"""Bits: x - tanh(x) of an fp32 x whose cube does not vanish loses 100 of them, sines of the largest x 128."""
_LEAST_PRECISION = 120
"""Bits, of functions whose relative error mpmath bounds itself, and whose series it sums ten times faster so."""
_LEAST_SHARE = 200
"""Numbers worth a process of their own."""

_SELU_SCALE, _SELU_ALPHA = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717


def _root_2() -> Any:
    return mpmath.sqrt(2)


def _scaled(function: Callable[[Any], Any], sign: int) -> Callable[[Any], Any]:
    return lambda x: function(x) * mpmath.exp(sign * abs(x))


def _of_positive(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: mpmath.nan if x < 0 else function(x)


def _softplus(x: Any) -> Any:
    return x if x > 20 else mpmath.log1p(mpmath.exp(x))


def _expm1_below(scale: Any, alpha: float, above: Any = 1) -> Callable[[Any], Any]:
    return lambda x: x * above if x > 0 else scale * mpmath.expm1(x / alpha)


def _gate(x: Any) -> Any:
    return min(max(x + 3, 0), 6) / mpmath.mpf(6)


def _log_ratio(x: Any) -> Any:
    return mpmath.log(x / (1 - x))


def _is_pole(x: Any) -> bool:
    return bool(x <= 0 and x == mpmath.floor(x))


def _trigamma(x: Any) -> Any:
    if _is_pole(x):
        return mpmath.inf
    return mpmath.polygamma(1, x) if x > 0 else (mpmath.pi / mpmath.sinpi(x)) ** 2 - mpmath.polygamma(1, 1 - x)


def _tetragamma(x: Any) -> Any:
    if _is_pole(x):
        return -mpmath.inf
    return mpmath.polygamma(2, x) if x > 0 else mpmath.polygamma(2, 1 - x) - 2 * mpmath.pi**3 * mpmath.cospi(x) / mpmath.sinpi(x) ** 3


def _entropy(x: Any) -> Any:
    return -x * mpmath.log(x) if x > 0 else (0 if x == 0 else -mpmath.inf)


def _inverse_normal(p: Any) -> Any:
    """By Newton's method, where mpmath's erfinv(2p - 1) loses p near 0."""
    if not 0 <= p <= 1:
        return mpmath.nan
    if p in (0, 1):
        return mpmath.inf if p else -mpmath.inf
    if p > 0.5:
        return -_inverse_normal(1 - p)
    logarithm = -2 * mpmath.log(p)
    x = -mpmath.sqrt(logarithm - mpmath.log(max(2 * mpmath.pi * logarithm, 1)) if p < 0.1 else 0)
    for _ in range(60):
        value = mpmath.erfc(-x / _root_2()) / 2
        step = mpmath.log(value / p) * value * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(x * x / 2)
        x -= step
        if abs(step) <= abs(x) * mpmath.mpf(2) ** -100:
            break
    return x


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    **{name: getattr(mpmath, name) for name in "exp expm1 log log10 log1p asin acos atan sinh cosh tanh asinh acosh atanh".split()},
    **{name: getattr(mpmath, name) for name in "sin cos tan erf erfc erfinv digamma".split()},
    "exp2": lambda x: mpmath.mpf(2) ** x,
    "log2": lambda x: mpmath.log(x, 2),
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "angle": lambda x: mpmath.pi if x < 0 else 0,
    "sinc": mpmath.sincpi,
    "spherical_bessel_j0": mpmath.sinc,
    "logit": _log_ratio,
    "logit_eps": lambda x: _log_ratio(min(max(x, mpmath.mpf(0.125)), mpmath.mpf(0.875))),
    "entr": _entropy,
    "ndtr": lambda x: mpmath.erfc(-x / _root_2()) / 2,
    "log_ndtr": lambda x: mpmath.log(mpmath.erfc(-x / _root_2()) / 2) if x < 0 else mpmath.log1p(-mpmath.erfc(x / _root_2()) / 2),
    "ndtri": _inverse_normal,
    "erfcx": lambda x: mpmath.exp(x * x) * mpmath.erfc(x) if x < 1e6 else (1 - 1 / (2 * x * x)) / (x * mpmath.sqrt(mpmath.pi)),
    "lgamma": lambda x: mpmath.re(mpmath.loggamma(x)),
    **{f"{prefix}i{n}": (lambda x, n=n: mpmath.besseli(n, x)) for prefix in ("", "modified_bessel_") for n in (0, 1)},
    **{f"i{n}e": _scaled(lambda x, n=n: mpmath.besseli(n, x), -1) for n in (0, 1)},
    **{f"modified_bessel_k{n}": _of_positive(lambda x, n=n: mpmath.besselk(n, x)) for n in (0, 1)},
    **{f"scaled_modified_bessel_k{n}": _of_positive(_scaled(lambda x, n=n: mpmath.besselk(n, x), 1)) for n in (0, 1)},
    **{f"bessel_j{n}": (lambda x, n=n: mpmath.besselj(n, x)) for n in (0, 1)},
    **{f"bessel_y{n}": _of_positive(lambda x, n=n: mpmath.bessely(n, x)) for n in (0, 1)},
    "airy_ai": mpmath.airyai,
    "polygamma(1)": _trigamma,
    "polygamma(2)": _tetragamma,
    "sigmoid": lambda x: 1 / (1 + mpmath.exp(-x)),
    "silu": lambda x: x / (1 + mpmath.exp(-x)),
    "gelu": lambda x: x * mpmath.erfc(-x / _root_2()) / 2,
    "gelu_tanh": lambda x: x / (1 + mpmath.exp(-mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
    "mish": lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))),
    "softplus": _softplus,
    "logsigmoid": lambda x: -mpmath.log1p(mpmath.exp(-x)),
    "elu": _expm1_below(1.5, 1),
    "celu": _expm1_below(1.5, 1.5),
    "selu": _expm1_below(_SELU_SCALE * mpmath.mpf(_SELU_ALPHA), 1, _SELU_SCALE),
    "hardswish": lambda x: x * _gate(x),
    "hardsigmoid": _gate,
    "tanhshrink": lambda x: x - mpmath.tanh(x),
}
"""By row; a row that takes numbers besides is of those that tests/proofs/rows.py gives it."""

_SUMMED = ("bessel_j", "bessel_y", "bessel_k", "airy", "polygamma")


@functools.cache
def compute(name: str, x: float) -> float | None:
    """The function of a finite ``x``, rounded to fp64; NaN where it is complex; None at poles and where mpmath does not converge."""
    with mpmath.workprec(_LEAST_PRECISION if any(part in name for part in _SUMMED) else _PRECISION):
        try:
            value = FUNCTIONS[name](mpmath.mpf(x))
            return float(value) if isinstance(value, (int, float, mpmath.mpf)) or value.imag == 0 else float("nan")
        except (ValueError, ZeroDivisionError, OverflowError, NotImplementedError, NoConvergence):
            return None


def compute_many(name: str, values: Sequence[float]) -> list[float | None]:
    """The same of many numbers, by all processors; the share of each is spread over the whole range."""
    num = max(1, min(len(os.sched_getaffinity(0)), len(values) // _LEAST_SHARE))
    with concurrent.futures.ThreadPoolExecutor(num) as pool:
        shares = list(pool.map(lambda k: _in_process(name, values[k::num]), range(num)))
    results: list[float | None] = [None] * len(values)
    for k, share in enumerate(shares):
        results[k::num] = share
    return results


def _in_process(name: str, values: Sequence[float]) -> list[float | None]:
    command = [sys.executable, "-m", "tests.proofs.precise", name]
    text = "\n".join(float(x).hex() for x in values)
    lines = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=_ROOT).stdout.splitlines()
    return [None if line == "-" else float.fromhex(line) for line in lines]


if __name__ == "__main__":
    for value in (compute(sys.argv[1], float.fromhex(line)) for line in sys.stdin):
        print("-" if value is None else value.hex())
