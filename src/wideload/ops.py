"""Ready-made fused functions: each a few lines of plain PyTorch.

Nothing here is special; a user's own function runs the same way.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from wideload.fused import fuse

__all__ = ["add", "bias_gelu", "bias_silu_mul", "clip", "swiglu"]


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
def clip(x: Tensor, lo: Any = None, hi: Any = None) -> Tensor:
    """``x`` limited to ``[lo, hi]``, numbers or tensors, either of them None; NaN stays NaN, and ``hi`` wins where ``lo > hi``."""
    return x.clamp(lo, hi)
