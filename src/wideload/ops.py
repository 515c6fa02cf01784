"""Ready-made fused functions: each a few lines of plain PyTorch.

Nothing here is special; a user's own function runs the same way.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wideload.errors import LayoutError
from wideload.fused import FusedFunction, FuseOptions, fuse
from wideload.trace import index

__all__ = [
    "add",
    "bias_dropout_add",
    "bias_gelu",
    "bias_silu_mul",
    "causal_mask",
    "clip",
    "dequantize_fp8",
    "dequantize_int8",
    "quantize_fp8",
    "quantize_int8",
    "rope",
    "swiglu",
]


@fuse
def add(x: Tensor, y: Tensor) -> Tensor:
    """``x + y``, with broadcasting; 3 elements of traffic for each of the result."""
    return x + y


@fuse
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) * up``: the gate of a Llama-style feed-forward. ``gate.chunk(2, -1)`` halves are read in place."""
    return F.silu(gate) * up


@fuse
def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(x + bias)`` with ``bias`` broadcast; ``approximate="tanh"`` as in ``torch.nn.functional.gelu``."""
    return F.gelu(x + bias, approximate=approximate)


@fuse
def bias_silu_mul(x: Tensor, bias: Tensor, y: Tensor) -> Tensor:
    """``silu(x + bias) * y`` with ``bias`` broadcast: 8 bytes an element in bf16 where eager moves 16."""
    return F.silu(x + bias) * y


@fuse
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool = True) -> Tensor:
    """``dropout(x + bias, p) + residual`` with ``bias`` broadcast; ``p`` may change from call to call."""
    return F.dropout(x + bias, p, training) + residual


@fuse
def causal_mask(scores: Tensor, value: float = -math.inf, offset: int = 0) -> Tensor:
    """``scores`` [..., queries, keys] with ``value`` where a key comes after its query, with no mask tensor.

    Query ``i`` sees the keys up to ``i + offset``: with keys of earlier steps in a cache, ``offset`` is their number.

    >>> import torch
    >>> causal_mask(torch.ones(2, 3), 0.0, offset=1)
    tensor([[1., 1., 0.],
            [1., 1., 1.]])
    """
    return torch.where(index(-1) <= index(-2) + offset, scores, value)


class _Rope(FusedFunction):
    """Rotary embedding, with the rows of its tables gathered before the kernel: which rows is not known from where an element lies."""

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = dict(zip(("x", "cos", "sin"), args, strict=False))
        positions = kwargs.get("position_ids")
        if positions is None or len(args) > len(given) or given.keys() & kwargs.keys():
            return super()._bind(args, kwargs)
        given |= kwargs | {"position_ids": None}
        for name in ("cos", "sin"):
            if name in given:
                given[name] = given[name][positions]
        return super()._bind((), given)


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, position_ids: Tensor | None = None, inverse: bool = False
) -> Tensor:
    """Rotary embedding of ``x`` [batch, positions, heads, dim] by tables ``cos`` and ``sin`` [positions, dim / 2], usually fp32.

    Component ``i`` of the first half turns with component ``i`` of the second (GPT-NeoX, Llama); ``interleaved`` turns neighbours
    2i and 2i + 1 instead (GPT-J). Tables of ``r / 2`` columns turn the first ``r`` components and leave the rest (partial rotary).
    ``position_ids`` [batch, positions] or [positions] choose the rows of the tables, which torch gathers in a kernel of its own.
    ``inverse`` turns back, which is also the gradient with respect to ``x``. The result has the dtype of ``x``, rounded once.
    Raises ``LayoutError`` where the tables are wider than ``x``.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    width = 2 * cos.shape[-1]
    if width > x.shape[-1]:
        raise LayoutError(f"cos and sin have {width // 2} columns, x has {x.shape[-1]} components; allowed: half as many, or fewer")
    turned = x[..., :width]
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    c, s = cos.unsqueeze(-2), -sin.unsqueeze(-2) if inverse else sin.unsqueeze(-2)
    pair = (first * c - second * s).to(x.dtype), (second * c + first * s).to(x.dtype)
    result = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return result if width == x.shape[-1] else torch.cat((result, x[..., width:]), dim=-1)


_rotated.__name__ = _rotated.__qualname__ = "rope"
rope = _Rope(_rotated, FuseOptions())


@fuse
def clip(x: Tensor, lo: Any = None, hi: Any = None) -> Tensor:
    """``x`` limited to ``[lo, hi]``, numbers or tensors, either of them None; NaN stays NaN, and ``hi`` wins where ``lo > hi``."""
    return x.clamp(lo, hi)


@fuse
def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """``x / scale`` in fp32, limited to what ``dtype`` can hold, in one rounding; NaN stays NaN, infinities become the largest value.

    ``scale`` is one value, a row [n] or a column [m, 1]: anything that broadcasts to ``x``.
    """
    top = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-top, top).to(dtype)


@fuse
def dequantize_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``q * scale`` in fp32, rounded once to ``dtype``; ``scale`` as in `quantize_fp8`."""
    return (q.float() * scale).to(dtype)


@fuse
def quantize_int8(x: Tensor, scale: Tensor, zero_point: Any = None) -> Tensor:
    """``x / scale`` in fp32, rounded to even, ``zero_point`` added, limited to -128 .. 127; ``scale`` and ``zero_point`` broadcast."""
    q = (x.float() / scale).round()
    return (q if zero_point is None else q + zero_point).clamp(-128, 127).to(torch.int8)


@fuse
def dequantize_int8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, zero_point: Any = None) -> Tensor:
    """``(q - zero_point) * scale`` in fp32, rounded once to ``dtype``; as `quantize_int8` made ``q``."""
    value = q.float()
    return ((value if zero_point is None else value - zero_point) * scale).to(dtype)
