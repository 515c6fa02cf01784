"""Errors of whole tensors in units of the last place: results and exact values in; the largest error, where it is and what is wrong out.

Knows floating-point formats; never ops, devices or files.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch

__all__ = ["BITS", "Exact", "Tally", "bits_of", "floats_of", "is_same", "measure", "num_different", "round_once", "state_exact", "unit_of"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer type of as many bytes."""


@dataclass(frozen=True)
class _Format:
    """Bits of precision, exponents of the smallest normal and of the largest finite number."""

    precision: int
    lowest: int
    highest: int


_FORMATS = {torch.float16: _Format(11, -14, 15), torch.bfloat16: _Format(8, -126, 127), torch.float32: _Format(24, -126, 127)}
_EXPONENT_BITS = 0x7FF << 52  # of fp64
_NAN = 2.0**200
"""Stands for NaN where distances are taken: further from every number of the formats than from itself."""


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The same memory as integers."""
    return x if x.dtype == torch.bool else x.view(BITS[x.element_size()])


def floats_of(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of ``dtype`` of the bit patterns that the low bits of integers are."""
    return bits.to(BITS[dtype.itemsize]).view(dtype)


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return torch.equal(bits_of(x), bits_of(y))


def num_different(x: torch.Tensor, y: torch.Tensor) -> int:
    """How many elements differ in their bits; one NaN is as good as another."""
    return int(((bits_of(x) != bits_of(y)) & ~((x != x) & (y != y))).sum())


def unit_of(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The unit in the last place that a number of ``dtype`` has where fp64 ``x`` lies: at least the smallest subnormal.

    >>> unit_of(torch.tensor([1.0, 1.9, 2.0, 0.0], dtype=torch.float64), torch.float16).tolist() == [2**-10, 2**-10, 2**-9, 2**-24]
    True
    """
    form = _FORMATS[dtype]
    power = (x.view(torch.int64) & _EXPONENT_BITS).view(torch.float64)
    return power.clamp_(2.0**form.lowest, 2.0**form.highest).mul_(2.0 ** (1 - form.precision))


def round_once(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 to the nearest number of ``dtype``, of two the even one; ``Tensor.to`` goes to halves through fp32 and rounds twice."""
    if dtype == torch.float32:
        return x.to(dtype)
    unit = unit_of(x, dtype)
    rounded = (x / unit).round_().mul_(unit)
    form = _FORMATS[dtype]
    return torch.where(rounded.abs() >= 2.0 ** (form.highest + 1), torch.copysign(torch.full_like(x, math.inf), x), rounded).to(dtype)


def _numbers(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp64 without infinities, which are what follows the largest number, and without NaN."""
    beyond = 2.0 ** (_FORMATS[dtype].highest + 1)
    return x.double().clamp_(-beyond, beyond).nan_to_num_(_NAN)


@dataclass(frozen=True)
class Exact:
    """The correctly rounded results, and what errors from them are reckoned with, once it is asked for.

    ``scale`` (fp64): the largest term that each is a sum of, whose unit counts where the terms cancel.
    """

    want: torch.Tensor
    scale: torch.Tensor | None = None

    @functools.cached_property
    def numbers(self) -> torch.Tensor:
        """fp64 with finite numbers in place of infinities and NaN."""
        return _numbers(self.want, self.want.dtype)

    @functools.cached_property
    def unit(self) -> torch.Tensor:
        """The units that errors are seen in."""
        unit = unit_of(self.numbers, self.want.dtype)
        return unit if self.scale is None else torch.maximum(unit, unit_of(self.scale.abs(), self.want.dtype))


def state_exact(value: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> Exact:
    """What a result of ``dtype`` should be, of the exact ``value`` in fp64."""
    return Exact(round_once(value, dtype), scale) if dtype.is_floating_point else Exact(value)


@dataclass(frozen=True)
class Tally:
    """The errors of ``count`` results in units of the last place from the correctly rounded ones.

    ``largest`` is infinite where a NaN is wanted or returned and the other is not. ``at``: the bits of the inputs of the largest,
    none where nothing is wrong at all. ``above`` counts results beyond the bound; of them ``nan`` differ in being NaN, ``inf`` in being
    infinite, ``subnormal`` should be subnormal or zero. ``zero`` counts zeros of the other sign. ``differs`` counts results whose bits
    are not those of eager torch.
    """

    count: int = 0
    largest: float = 0.0
    at: tuple[int, ...] = ()
    got: float | None = None
    want: float | None = None
    above: int = 0
    nan: int = 0
    inf: int = 0
    subnormal: int = 0
    zero: int = 0
    differs: int = 0

    def __add__(self, other: Tally) -> Tally:
        worst = self if self.largest >= other.largest else other
        sums = {
            name: getattr(self, name) + getattr(other, name) for name in ("count", "above", "nan", "inf", "subnormal", "zero", "differs")
        }
        return replace(worst, **sums)


def measure(got: torch.Tensor, exact: Exact, bound: float, inputs: tuple[torch.Tensor, ...], *, any_zero: bool = False) -> Tally:
    """Hold results to the exact ones; with ``any_zero`` a zero may have either sign."""
    count, is_real = got.numel(), got.dtype.is_floating_point
    if count == 0 or is_same(got, exact.want):
        return Tally(count)
    error = _numbers(got, got.dtype).sub_(exact.numbers).div_(exact.unit) if is_real else got.double() - exact.want.double()
    error.abs_()
    largest = float(error.max())
    tally = Tally(count, zero=_num_zeros_of_other_sign(got, exact.want) if is_real and not any_zero else 0)
    if largest == 0:
        return tally
    worst = int(error.argmax())
    at = tuple(int(bits_of(x)[worst]) % (1 << 8 * x.element_size()) for x in inputs)
    one, other = float(got[worst]), float(exact.want[worst])
    tally = replace(tally, largest=math.inf if math.isnan(one) != math.isnan(other) else largest, at=at, got=one, want=other)
    if largest <= bound:
        return tally
    above, nan = error > bound, (got != got) != (exact.want != exact.want)
    counts = {"above": above, "nan": nan, "inf": above & ~nan & (got.isinf() != exact.want.isinf())}
    if is_real:
        counts["subnormal"] = above & (exact.want.abs() < 2.0 ** _FORMATS[got.dtype].lowest)
    return replace(tally, **{name: int(found.sum()) for name, found in counts.items()})


def _num_zeros_of_other_sign(got: torch.Tensor, want: torch.Tensor) -> int:
    """Bits that differ in the sign alone are the least integer of their type."""
    differing = bits_of(got) ^ bits_of(want)
    least = torch.iinfo(differing.dtype).min
    return int(((differing == least) & (want == 0)).sum()) if int(differing.min()) == least else 0
