"""Turns what a call returned or wrote into whether it agrees with a reference, and makes memory unlike any right answer.

Knows tensors and tolerances; not what was called, nor whether it was timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from wideload.measure.operands import same_size_integer, without_expansion
from wideload.measure.statistics import require_number

__all__ = ["Tolerance", "default_tolerance", "find_difference", "is_poisoned", "poison", "requested_tolerance", "tensors_of"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may lie from the reference: ``relative`` of its own size and of the root mean square of all, plus ``absolute``.

    Without the mean square a value near zero, the difference of two rounded ones, could never be close.
    """

    relative: float
    absolute: float = 0.0


_HALF_ROUNDINGS = 4
"""Units in the last place: what a chain of eight ops loses that rounds to a half each time, half a unit each."""
_FULL_ROUNDINGS = 32
"""The same eight ops in float32 or float64, each within the four units that CUDA documents for its worst common functions."""


def default_tolerance(dtype: torch.dtype) -> Tolerance:
    """Return what two right ways to compute the same thing may differ by, in results of ``dtype``; nothing for integers.

    >>> default_tolerance(torch.bfloat16)
    Tolerance(relative=0.03125, absolute=0.0)
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return Tolerance(0.0)
    roundings = {1: 1, 2: _HALF_ROUNDINGS}.get(dtype.itemsize, _FULL_ROUNDINGS)
    return Tolerance(torch.finfo(dtype).eps * roundings)


def requested_tolerance(rtol: float | None, atol: float) -> Tolerance | None:
    """Return the tolerance that a caller asks for; ``None`` for that of the dtypes. Raises ``RangeError`` for what is negative or NaN."""
    if rtol is not None:
        require_number("rtol", rtol, "a number, 0 and more, or None")
    require_number("atol", atol, "a number, 0 and more")
    return None if rtol is None and atol == 0.0 else Tolerance(rtol or 0.0, atol)


def tensors_of(result: object) -> list[torch.Tensor]:
    """Return the tensors in nested containers and dataclasses, in order; nothing else counts as a result."""
    if isinstance(result, torch.Tensor):
        return [result.detach()]
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        result = [getattr(result, field.name) for field in dataclasses.fields(result)]
    if isinstance(result, dict):
        result = list(result.values())
    return [tensor for item in result for tensor in tensors_of(item)] if isinstance(result, (tuple, list)) else []


def find_difference(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor], tolerance: Tolerance | None = None) -> str | None:
    """Say how the first tensor that disagrees differs from its reference; ``None`` where all agree.

    Number, dtype and shape must be equal, and NaN, infinities and their places; strides may differ. The tolerance is that of
    each dtype where none is given.
    """
    if len(got) != len(want):
        return f"{len(got)} results where the reference has {len(want)}"
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        difference = _difference(a, b, tolerance or default_tolerance(b.dtype))
        if difference is not None:
            return difference if len(want) == 1 else f"result {index}: {difference}"
    return None


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance) -> str | None:
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{_kind(got)} where the reference has {_kind(want)}"
    if not want.is_floating_point() and not want.is_complex() and not tolerance.absolute:
        num_wrong = int((_bits(got) != _bits(want)).sum())  # a bool in memory may be any byte
        return f"{num_wrong} of {want.numel()} elements differ" if num_wrong else None
    if want.is_complex():
        got, want = torch.view_as_real(got.resolve_conj()), torch.view_as_real(want.resolve_conj())
    scale = _root_mean_square(want)
    num_wrong, worst = 0, 0.0
    for a, b in zip(_pieces(got), _pieces(want), strict=True):
        distance = (a - b).abs()
        is_close = b.isfinite() & (distance <= tolerance.relative * (b.abs() + scale) + tolerance.absolute)
        is_wrong = ~(is_close | (a == b) | (a.isnan() & b.isnan()))
        if is_wrong.any():
            num_wrong += int(is_wrong.sum())
            worst = max(worst, float(distance[is_wrong].nan_to_num(nan=torch.inf).max()))
    return f"{num_wrong} of {want.numel()} elements differ, by up to {worst:.3g}" if num_wrong else None


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


_PIECE_ELEMENTS = 1 << 24
"""Compared at a time: 128 MiB of float64."""


def _pieces(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    return (piece.double() for piece in torch.split(tensor.reshape(-1), _PIECE_ELEMENTS))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return real.view(same_size_integer(real.dtype))


def _root_mean_square(tensor: torch.Tensor) -> float:
    """Of the finite elements; 0 where there is none."""
    total, count = 0.0, 0
    for piece in _pieces(tensor):
        finite = piece[piece.isfinite()]
        total, count = total + float(finite.square().sum()), count + finite.numel()
    return (total / count) ** 0.5 if count else 0.0


@torch.no_grad()
def poison(tensors: Sequence[torch.Tensor]) -> None:
    """Set every bit: NaN in every float dtype, -1 or the largest integer in others. A result that is not written again then shows."""
    for tensor in tensors:
        bits = _bits(without_expansion(tensor))
        bits.fill_(_all_ones(bits))


def is_poisoned(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether some tensor holds nothing but what `poison` put there."""
    return any(tensor.numel() > 0 and bool((_bits(tensor) == _all_ones(_bits(tensor))).all()) for tensor in tensors)


def _all_ones(bits: torch.Tensor) -> int:
    return _LARGEST_BYTE if bits.dtype == torch.uint8 else -1


_LARGEST_BYTE = 255
