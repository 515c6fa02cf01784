"""``torch.nn`` modules over fused functions: gated activations, on two inputs or one packed one, and a dropout that stores no mask.

Turns what a module's ``forward`` is given into one fused call; must not know of models or of how functions become kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from wideload.errors import LayoutError
from wideload.fused import fuse
from wideload.ops import geglu, reglu, swiglu

__all__ = ["GEGLU", "Dropout", "ReGLU", "SwiGLU", "packed_geglu", "packed_reglu", "packed_swiglu"]


# ---- packed inputs: the halves are taken inside, so that the gradient is one tensor as well, written by one kernel


@fuse
def packed_swiglu(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate, up = x.chunk(2, -1)``: [..., 2 n] to [..., n]."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


@fuse
def packed_geglu(x: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate, approximate) * up`` of ``gate, up = x.chunk(2, -1)``: [..., 2 n] to [..., n]."""
    gate, up = x.chunk(2, -1)
    return F.gelu(gate, approximate=approximate) * up


@fuse
def packed_reglu(x: Tensor) -> Tensor:
    """``relu(gate) * up`` of ``gate, up = x.chunk(2, -1)``: [..., 2 n] to [..., n]."""
    gate, up = x.chunk(2, -1)
    return torch.relu(gate) * up


@fuse(static=("p",))  # a probability that the trace knows may take 16 random bits an element instead of 32
def dropped(x: Tensor, p: float) -> Tensor:
    """``x`` with each element dropped with probability ``p``, else scaled by ``1 / (1 - p)``."""
    return F.dropout(x, p)


# ---- modules


class _Gated(torch.nn.Module):
    """A gated unit; ``_separate`` is the fused function of two inputs, ``_packed`` that of one."""

    _separate: ClassVar[Callable[..., Any]]
    _packed: ClassVar[Callable[..., Any]]

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """The gate's activation times ``up``, or of the two halves of ``gate``'s last dim where ``up`` is left out."""
        given = self._options()
        if up is not None:
            result: Tensor = type(self)._separate(gate, up, *given)
            return result
        width = gate.shape[-1] if gate.ndim else 1
        if width % 2:
            raise LayoutError(
                f"{type(self).__name__} got one tensor with a last dim of {width}; allowed: an even one, whose first half is the gate and "
                "whose second is up. Or give both: module(gate, up)."
            )
        packed: Tensor = type(self)._packed(gate, *given)
        return packed

    def _options(self) -> tuple[Any, ...]:
        return ()


class SwiGLU(_Gated):
    """``silu(gate) * up``: of Llama, Mistral and Qwen.

    ``module(gate, up)`` takes two tensors [..., n] that broadcast, ``module(x)`` one [..., 2 n] whose first half is the gate and whose
    halves are read in place; both give [..., n] in the dtype that torch promotes to, rounded once. 3 elements of traffic for each of
    the result. Raises ``LayoutError`` for an odd last dim.

    >>> import torch, wideload as wl
    >>> gate, up = torch.tensor([0.0, 1.0]), torch.tensor([3.0, 2.0])
    >>> wl.nn.SwiGLU()(gate, up)
    tensor([0.0000, 1.4621])
    >>> wl.nn.SwiGLU()(torch.cat((gate, up)))
    tensor([0.0000, 1.4621])
    """

    _separate, _packed = swiglu, packed_swiglu


class GEGLU(_Gated):
    """``gelu(gate, approximate) * up``: of T5 v1.1 and, with ``approximate="tanh"``, Gemma. Inputs and result as `SwiGLU`'s."""

    _separate, _packed = geglu, packed_geglu

    def __init__(self, approximate: str = "none") -> None:
        """``approximate`` is ``"none"`` or ``"tanh"``, as of ``torch.nn.GELU``."""
        super().__init__()
        self.approximate = approximate

    def _options(self) -> tuple[Any, ...]:
        return (self.approximate,)

    def extra_repr(self) -> str:
        """What its ``repr`` shows."""
        return f"approximate={self.approximate!r}"


class ReGLU(_Gated):
    """``relu(gate) * up``. Inputs and result as `SwiGLU`'s."""

    _separate, _packed = reglu, packed_reglu


class Dropout(torch.nn.Dropout):
    """``torch.nn.Dropout`` that keeps no mask: the backward draws it again from the saved seed.

    In training, each element of a float tensor of any shape is 0 with probability ``p`` and else multiplied by ``1 / (1 - p)``; the
    result has the dtype and strides of eager PyTorch's. In eval mode the input itself is returned. 2 elements of traffic for each, where
    torch moves a byte more for its mask, twice. Random numbers come from torch's generator, but are not those that torch would draw.
    Raises ``ValueError`` for a ``p`` outside [0, 1].

    >>> import torch, wideload as wl
    >>> set(wl.nn.Dropout(0.5)(torch.ones(1000)).tolist()) == {0.0, 2.0}
    True
    """

    def __init__(self, p: float = 0.5) -> None:
        """``p`` as torch's; there is no ``inplace``."""
        super().__init__(p)

    def forward(self, input: Tensor) -> Tensor:
        """``input``, with elements dropped in training."""
        if not self.training or self.p == 0:
            return input
        result: Tensor = dropped(input, self.p)
        return result
