"""Turns torch's random functions into draws of random integers, and into rows that make numbers, masks and dropout of these.

Knows torch's functions and CUDA's expressions as the table of ops does; never how an integer is drawn, nor where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from wideload.dtypes import DTYPES, dtype_name, is_half
from wideload.errors import DtypeError, RangeError
from wideload.ops_table import Call, Op, Spelling

__all__ = ["DRAW_OPS", "DRAW_SPELLINGS", "Bits"]


@dataclass(frozen=True)
class Bits:
    """An operand that is drawn: an int64 of ``bits`` random bits (16, 32 or 53) for each element of the traced tensor ``like``."""

    like: Any
    bits: int


# ---- rows

_DIGITS = {torch.float16: (16, 11), torch.bfloat16: (16, 8), torch.float32: (32, 24), torch.float64: (53, 53)}
"""Bits that are drawn and bits that are kept for a uniform number: as many as every number below 1 has, so that none rounds up to 1."""

_COARSE_BITS, _COARSE_ERROR = 16, 1e-3
"""So few bits are drawn where they hold both ``p`` and ``1 - p`` with this relative error: twice as many elements share a block."""
_FINE_BITS = 32
"""They hold both with that error down to 1.2e-7, and are off by half of 2^-32 at most."""


def _uniform(dtype: torch.dtype) -> Op:
    bits, digits = _DIGITS[dtype]
    shift, row = bits - digits, DTYPES[dtype]
    return Op(
        f"uniform_{row.name}",
        ("draw",),
        lambda draw: (draw >> shift).to(dtype) * 2.0**-digits,
        {"signed": f"({row.compute})({{draw}} >> {shift}) * 0x1p-{digits}{'f' if row.compute == 'float' else ''}"},
        ("own",),
        (0, 0),
        keeps_format=True,
    )


def _dropout_of(input: torch.Tensor, draw: torch.Tensor, threshold: Any, scale: Any) -> torch.Tensor:
    wide = input.float() if is_half(input.dtype) else input
    kept: torch.Tensor = wide * ((draw >= threshold).to(wide.dtype) * scale)
    return kept.to(input.dtype)


DRAW_OPS: dict[str, Op] = {
    op.name: op
    for op in (
        *map(_uniform, _DIGITS),
        # A factor, as torch's: a dropped NaN stays NaN, a dropped negative number is -0.
        Op(
            "dropout",
            ("input", "draw", "threshold", "scale"),
            _dropout_of,
            {"float": "{input} * ({draw} >= {threshold} ? {scale} : 0)"},
            ("result", "own", "own", "result"),
            (1, 1),
        ),
        Op(
            "bernoulli",
            ("input", "draw"),
            lambda input, draw: ((draw >> 8) * 2.0**-24 < input).to(input.dtype),
            {"float": "({draw} >> 8) * 0x1p-24f < {input}"},
            ("result", "own"),
            (0, 0),
        ),
        Op(
            "bernoulli_number",
            ("input", "draw", "threshold"),
            lambda input, draw, threshold: (draw < threshold).to(input.dtype),
            {"signed": "{draw} < {threshold}"},
            ("shape", "own", "own"),
            (0, 0),
            keeps_format=True,
        ),
    )
}
"""As ``OPS``, of rows with an operand ``draw``."""


def _call(name: str, *operands: Any) -> Call:
    return Call(DRAW_OPS[name], operands)


# ---- probabilities


def _check_probability(p: Any, name: str) -> None:
    if not 0 <= p <= 1:
        raise RangeError(f"{name} has to be between 0 and 1, but got {p}")


def _fine_threshold(p: Any) -> int:
    _check_probability(p, "a probability")
    threshold: int = round(p * 2**_FINE_BITS)
    return threshold


def _kept_scale(p: Any) -> float:
    return 1 / (1 - p) if p < 1 else 0.0


def _is_runtime(p: Any) -> bool:
    return hasattr(p, "derived")


def _threshold(p: Any, name: str) -> tuple[int, Any]:
    """How many bits to draw, and the integer that these are below with probability ``p``."""
    if _is_runtime(p):
        return _FINE_BITS, p.derived(_fine_threshold, int)
    _check_probability(p, name)
    coarse = p * 2**_COARSE_BITS
    if abs(coarse - round(coarse)) <= _COARSE_ERROR * min(coarse, 2**_COARSE_BITS - coarse):  # dropout divides by 1 - p
        return _COARSE_BITS, round(coarse)
    return _FINE_BITS, _fine_threshold(p)


# ---- spellings


def _check_floating(input: Any, name: str) -> None:
    if not input.dtype.is_floating_point:
        raise DtypeError(f"{name} takes a floating-point tensor, not {dtype_name(input.dtype)}. Convert it with .to() first.")


def _rand_like(input: Any, *, dtype: torch.dtype | None = None) -> Call:
    wanted = input.dtype if dtype is None else dtype
    if wanted not in _DIGITS:
        raise DtypeError(
            f"rand_like makes {', '.join(DTYPES[d].name for d in _DIGITS)}, not {dtype_name(wanted)}. Give it a dtype of these."
        )
    return _call(f"uniform_{DTYPES[wanted].name}", Bits(input, _DIGITS[wanted][0]))


def _dropout(input: Any, p: Any = 0.5, training: bool = True) -> Any:
    bits, threshold = _threshold(p, "dropout probability")
    if not training or (not _is_runtime(p) and p == 0):
        return input
    _check_floating(input, "dropout")
    scale = p.derived(_kept_scale, float) if _is_runtime(p) else _kept_scale(p)
    return _call("dropout", input, Bits(input, bits), threshold, scale)


def _torch_dropout(input: Any, p: Any, train: bool) -> Any:
    return _dropout(input, p, train)


def _bernoulli(input: Any, p: Any = None, *, generator: None = None) -> Call:
    if generator is not None:
        raise TypeError("generator= is not taken inside a fused function, which draws from the device's own: seed it by torch.manual_seed")
    if p is None:
        _check_floating(input, "bernoulli")
        return _call("bernoulli", input, Bits(input, _FINE_BITS))
    bits, threshold = _threshold(p, "the probability of bernoulli")
    return _call("bernoulli_number", input, Bits(input, bits), threshold)


DRAW_SPELLINGS: dict[Callable[..., Any], Spelling] = {
    torch.rand_like: _rand_like,
    F.dropout: _dropout,
    torch.dropout: _torch_dropout,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
}
"""As ``SPELLINGS``, of the torch functions that draw."""
