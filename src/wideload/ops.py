"""Ready-made fused functions: each a few lines of plain PyTorch.

A user's own function runs the same way; only `rope` does more, which given ``position_ids`` gathers rows before its kernel.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from wideload.errors import DeviceError, DtypeError, LayoutError, RangeError
from wideload.fused import FusedFunction, FuseOptions, fuse
from wideload.modes import is_looked_into
from wideload.trace import amax, any_nonfinite, index

if TYPE_CHECKING:
    from wideload.planned import Plan

__all__ = [
    "add",
    "bias_dropout_add",
    "bias_gelu",
    "bias_silu_mul",
    "cast",
    "causal_mask",
    "clip",
    "dequantize_fp8",
    "dequantize_int8",
    "ema_",
    "geglu",
    "lerp",
    "prefix_mask",
    "quantize_fp8",
    "quantize_int8",
    "reglu",
    "residual_add_scale",
    "rope",
    "sliding_window_mask",
    "swiglu",
    "swiglu_quantize_fp8",
    "unscale",
    "unscale_",
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
def geglu(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """``gelu(gate, approximate) * up``: the gate of T5 v1.1 and Gemma. ``gate.chunk(2, -1)`` halves are read in place."""
    return F.gelu(gate, approximate=approximate) * up


@fuse
def reglu(gate: Tensor, up: Tensor) -> Tensor:
    """``relu(gate) * up``. ``gate.chunk(2, -1)`` halves are read in place."""
    return torch.relu(gate) * up


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
    """``dropout(x + bias, p) + residual``; ``p`` may change from call to call, and ``training=False`` drops nothing.

    ``bias`` and ``residual`` broadcast with ``x``: for ``x`` [..., n], usually [n] and [..., n]. Each element of ``x + bias`` is dropped
    with probability ``p``, else scaled by ``1 / (1 - p)``. Raises ``RangeError`` for a ``p`` outside [0, 1] in training, ``DtypeError``
    where ``x + bias`` is not floating-point, ``LayoutError`` for shapes that do not broadcast.

    >>> import torch
    >>> x, bias, residual = torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0]), torch.full((2, 3), 10.0)
    >>> bias_dropout_add(x, bias, residual, 0.1, training=False)
    tensor([[12., 13., 14.],
            [12., 13., 14.]])
    >>> bias_dropout_add(x, bias, residual, 1.0)
    tensor([[10., 10., 10.],
            [10., 10., 10.]])
    """
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


@fuse
def sliding_window_mask(scores: Tensor, window: int, value: float = -math.inf, offset: int = 0) -> Tensor:
    """As `causal_mask`, where a query sees the last ``window`` keys alone: query ``i`` those from ``i + offset - window + 1`` on.

    >>> import torch
    >>> sliding_window_mask(torch.ones(3, 3), 2, 0.0)
    tensor([[1., 0., 0.],
            [1., 1., 0.],
            [0., 1., 1.]])
    """
    behind = index(-2) + offset - index(-1)
    return torch.where((behind >= 0) & (behind < window), scores, value)


@fuse
def prefix_mask(scores: Tensor, prefix: int, value: float = -math.inf, offset: int = 0) -> Tensor:
    """As `causal_mask`, where every query sees the first ``prefix`` keys as well (prefix language models).

    >>> import torch
    >>> prefix_mask(torch.ones(2, 4), 2, 0.0)
    tensor([[1., 1., 0., 0.],
            [1., 1., 0., 0.]])
    """
    return torch.where((index(-1) < prefix) | (index(-1) <= index(-2) + offset), scores, value)


class _Rope(FusedFunction):
    """Rotary embedding, with the rows of its tables gathered before the kernel: which rows is not known from where an element lies."""

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._signature is not None
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return super()._bind(args, kwargs)  # says what is wrong
        given = bound.arguments
        positions = given.get("position_ids")
        if positions is not None:
            rows = {name: _gather_rows(name, given[name], positions) for name in ("cos", "sin")}
            given.update(rows, position_ids=None)
        return super()._bind(bound.args, bound.kwargs)

    def _around_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The gathers stand in a compiled graph as torch's own."""
        positions = kwargs.get("position_ids")
        if positions is None:
            return args, kwargs
        given = {**dict(zip(("x", "cos", "sin"), args, strict=False)), **kwargs}
        return (), {**given, "cos": given["cos"][positions], "sin": given["sin"][positions], "position_ids": None}


_POSITION_DTYPES = torch.int64, torch.int32  # torch takes uint8 and bool for masks


def _gather_rows(name: str, table: Any, positions: Any) -> Tensor:
    """Rows ``positions`` of ``table``. Their range is looked at on the CPU alone; a GPU would have to be waited for."""
    if not isinstance(positions, Tensor) or positions.dtype not in _POSITION_DTYPES:
        got = positions.dtype if isinstance(positions, Tensor) else type(positions).__name__
        raise DtypeError(f"position_ids is {got}; allowed: a tensor of {' or '.join(map(str, _POSITION_DTYPES))}. Convert it with .to().")
    if positions.ndim not in (1, 2):
        raise LayoutError(f"position_ids has the shape {tuple(positions.shape)}; allowed: [positions] or [batch, positions].")
    if not isinstance(table, Tensor):
        raise DtypeError(f"{name} is {type(table).__name__}; allowed beside position_ids: a tensor [positions, dim / 2].")
    if table.ndim != 2:
        raise LayoutError(f"{name} has the shape {tuple(table.shape)}; allowed beside position_ids: [positions, dim / 2].")
    if table.device != positions.device:
        raise DeviceError(f"position_ids is on {positions.device} and {name} on {table.device}. Put them on one device.")
    if positions.device.type == "cpu" and positions.numel() and not is_looked_into((positions,)):
        low, high = (int(end) for end in positions.aminmax())
        if low < -table.shape[0] or high >= table.shape[0]:
            raise RangeError(
                f"position_ids go from {low} to {high}, and {name} has {table.shape[0]} rows; allowed: {-table.shape[0]} to "
                f"{table.shape[0] - 1}, negative ones counted from the end. Make the tables longer."
            )
    rows: Tensor = table[positions]
    return rows


def _rotated(
    x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, position_ids: Tensor | None = None, inverse: bool = False
) -> Tensor:
    """Rotary embedding of ``x`` [batch, positions, heads, dim] by tables ``cos`` and ``sin`` [positions, dim / 2], usually fp32.

    Component ``i`` of the first half turns with component ``i`` of the second (GPT-NeoX, Llama); ``interleaved`` turns neighbours
    2i and 2i + 1 instead (GPT-J). Tables of ``r / 2`` columns turn the first ``r`` components and leave the rest (partial rotary).
    ``position_ids`` [batch, positions] or [positions], int64 or int32, choose the rows of the tables, which torch gathers in a kernel of
    its own: not inside another fused function, and a position that the tables lack is found on the CPU alone, as by torch.
    ``inverse`` turns back, which is also the gradient with respect to ``x``. The result has the dtype of ``x``, rounded once.
    Raises ``LayoutError`` where the tables are wider than ``x``, and that or ``DtypeError``, ``DeviceError`` or ``RangeError`` for
    ``position_ids`` that are not as said.

    >>> import torch
    >>> x, angle = torch.tensor([1.0, 0.0]).expand(1, 3, 1, 2), torch.arange(4.0)[:, None] * (math.pi / 2)
    >>> rope(x, angle.cos(), angle.sin(), position_ids=torch.tensor([2, 0, 1])).flatten(1).round() + 0.0
    tensor([[-1.,  0.,  1.,  0.,  0.,  1.]])
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    if x.ndim < 3:
        raise LayoutError(f"x has {x.ndim} dims; allowed: [..., positions, heads, dim]. Give it a dim of heads: x.unsqueeze(-2)")
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
def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in another dtype, as ``x.to(dtype)`` rounds and limits it; ``cast.foreach(tensors, dtype)`` for lists."""
    return x.to(dtype)


@fuse
def lerp(x: Tensor, y: Tensor, w: Any) -> Tensor:
    """``x + w * (y - x)`` as ``torch.lerp`` computes it; ``w`` is a number, or a tensor that broadcasts with ``x`` and ``y``."""
    return torch.lerp(x, y, w)


@fuse
def residual_add_scale(x: Tensor, residual: Tensor, scale: Any) -> Tensor:
    """``residual + x * scale``; ``scale`` is a number or a tensor that broadcasts, usually [n] for ``x`` [..., n] (LayerScale)."""
    result: Tensor = residual + x * scale
    return result


class _InPlace(FusedFunction):
    """A function whose results go into its first argument where no ``out=`` is given; of a list call, into the list."""

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        return super().__call__(*args, out=self._target(args, kwargs) if out is None else out, **kwargs)

    def foreach(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        return super().foreach(*args, out=self._target(args, kwargs) if out is None else out, **kwargs)

    def plan(self, *args: Any, out: Any = None, target: str | None = None, **kwargs: Any) -> Plan:
        return super().plan(*args, out=self._target(args, kwargs) if out is None else out, target=target, **kwargs)

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args[0] if args else kwargs.get(self._parameters()[0])


def _averaged(target: Tensor, source: Tensor, decay: float) -> Tensor:
    """``decay * target + (1 - decay) * source`` in place of ``target``, rounded once: an exponential moving average.

    ``source`` may have any shape that broadcasts to ``target``, and any dtype that casts to its. ``ema_.foreach(targets, sources, decay)``
    updates lists. Returns ``target``; as every in-place call it raises where ``target`` wants a gradient: use ``torch.no_grad()``.

    >>> import torch
    >>> average = torch.zeros(2)
    >>> ema_(average, torch.tensor([1.0, 2.0]), 0.75)
    tensor([0.2500, 0.5000])
    """
    return target + (1 - decay) * (source - target)


_averaged.__name__ = _averaged.__qualname__ = "ema_"
ema_ = _InPlace(_averaged, FuseOptions())


_FP8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz


def _limited(x: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    if dtype not in _FP8:
        raise DtypeError(f"{name} got dtype={dtype}; allowed: {', '.join(map(str, _FP8))}")
    top = torch.finfo(dtype).max
    return x.clamp(-top, top).to(dtype)


@fuse
def quantize_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, with_amax: bool = False) -> Any:
    """``x / scale``, limited to what ``dtype`` can hold and rounded to it; NaN stays NaN, infinities become the largest value.

    ``x`` is taken as fp32, and so is the quotient; a ``scale`` in fp64 with dims divides in fp64, as torch promotes, and torch's cast
    rounds that to fp32 first. ``scale`` is one value [], a row [n], a column [m, 1], or anything else that broadcasts with ``x`` [m, n].
    ``with_amax`` adds `wideload.amax` of ``x``, in the same pass, of which delayed scaling makes the next ``scale``.
    Raises ``DtypeError`` for a ``dtype`` other than e4m3fn, e5m2 and their fnuz forms, ``LayoutError`` for shapes that do not broadcast.

    >>> import torch
    >>> quantize_fp8(torch.tensor([[3.0, -1e6], [2.3, 8.0]]), torch.tensor([[0.5], [2.0]])).float()
    tensor([[   6.0000, -448.0000],
            [   1.1250,    4.0000]])
    """
    q = _limited(x.float() / scale, dtype, "quantize_fp8")
    return (q, amax(x)) if with_amax else q


@fuse
def swiglu_quantize_fp8(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, with_amax: bool = False) -> Any:
    """`quantize_fp8` of `swiglu`, in one pass: what stands between the two matrix products of an fp8 feed-forward.

    ``silu(gate) * up / scale``, computed in fp32 and rounded once: nothing is rounded to the dtype of ``gate`` in between. ``scale``
    broadcasts with them as in `quantize_fp8`. ``with_amax`` adds `wideload.amax` of ``silu(gate) * up``, float32. Raises as `quantize_fp8`
    does.

    >>> import torch
    >>> swiglu_quantize_fp8(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 2.0]), torch.tensor(2.0)).float()
    tensor([ 0., 96.])
    >>> swiglu_quantize_fp8(torch.tensor([0.0, 100.0]), torch.tensor([1.0, 2.0]), torch.tensor(2.0), with_amax=True)[1]
    tensor(200.)
    """
    y = F.silu(gate.float()) * up.float()
    q = _limited(y / scale, dtype, "swiglu_quantize_fp8")
    return (q, amax(y)) if with_amax else q


@fuse
def dequantize_fp8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``q * scale``, rounded once to ``dtype``; computed in fp32, or in fp64 where `quantize_fp8` computes in it.

    ``scale`` broadcasts with ``q`` as in `quantize_fp8`. Raises ``LayoutError`` for shapes that do not.

    >>> import torch
    >>> dequantize_fp8(torch.tensor([6.0, -448.0]).to(torch.float8_e4m3fn), torch.tensor(0.5))
    tensor([   3., -224.], dtype=torch.bfloat16)
    """
    return (q.float() * scale).to(dtype)


@fuse
def quantize_int8(x: Tensor, scale: Tensor, zero_point: Any = None) -> Tensor:
    """``x / scale``, rounded to even, ``zero_point`` added, limited to -128 .. 127.

    ``x`` is taken as fp32, and so is the rest; a ``scale`` or ``zero_point`` in fp64 with dims makes what follows it fp64, as torch
    promotes. ``scale`` is one value [], a row [n], a column [m, 1], or anything else that broadcasts with ``x`` [m, n]; ``zero_point`` is
    the same, a number, or None. NaN becomes what torch's cast to int8 makes of it on that device, which torch leaves open. Raises
    ``LayoutError`` for shapes that do not broadcast.

    >>> import torch
    >>> quantize_int8(torch.tensor([0.25, 0.75, -1.0, 100.0]), torch.tensor(0.5), 3)
    tensor([  3,   5,   1, 127], dtype=torch.int8)
    """
    q = (x.float() / scale).round()
    return (q if zero_point is None else q + zero_point).clamp(-128, 127).to(torch.int8)


@fuse
def dequantize_int8(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16, zero_point: Any = None) -> Tensor:
    """``(q - zero_point) * scale``, rounded once to ``dtype``; computed in fp32, or in fp64 where `quantize_int8` computes in it.

    ``scale`` and ``zero_point`` are those that made ``q``, and broadcast with it as in `quantize_int8`. Raises ``LayoutError`` for
    shapes that do not.

    >>> import torch
    >>> dequantize_int8(torch.tensor([3, 5, 1, 127], dtype=torch.int8), torch.tensor(0.5), torch.float32, 3)
    tensor([ 0.,  1., -1., 62.])
    """
    value = q.float()
    return ((value if zero_point is None else value - zero_point) * scale).to(dtype)


@fuse
def unscale(grad: Tensor, inv_scale: Any) -> tuple[Tensor, Tensor]:
    """``grad * inv_scale``, and whether ``grad`` has an infinity or a NaN: 1.0 or 0.0, as `wideload.any_nonfinite` gives it.

    Computed in fp32, or in fp64 where ``grad`` is, and rounded once. ``inv_scale`` is a number, or a tensor that broadcasts.
    ``unscale.foreach(grads, inv_scale)`` takes one launch for a list, and gives each tensor a value of its own.

    >>> import torch
    >>> unscale(torch.tensor([4.0, 8.0]), 0.5)
    (tensor([2., 4.]), tensor(0.))
    """
    return grad * inv_scale, any_nonfinite(grad)


class _Unscale(_InPlace):
    """`unscale` in place of gradients; what comes back is whether any of them is not finite."""

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        return super().__call__(*args, out=out, **kwargs)[1]

    def foreach(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        found = [result[1] for result in super().foreach(*args, out=out, **kwargs)]
        return torch.stack(found).amax() if found else torch.zeros((), dtype=torch.float32)

    def _target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The gradients, with memory for what is found of each; what is no tensor comes back, for the call to refuse."""
        grads = super()._target(args, kwargs)
        if isinstance(grads, Tensor):
            return grads, torch.empty((), dtype=torch.float32, device=grads.device)
        if not isinstance(grads, list | tuple):
            return grads
        devices = sorted({str(grad.device) for grad in grads if isinstance(grad, Tensor)})
        if len(devices) > 1:
            listed = " and ".join(devices)
            raise DeviceError(f"unscale_.foreach got gradients on {listed}; what is found is on one device: call it for each device")
        return [self._target((grad,), {}) for grad in grads]


def _unscaled(grad: Tensor, inv_scale: Any) -> tuple[Tensor, Tensor]:
    """``grad * inv_scale`` in place of ``grad``; return whether it had an infinity or a NaN, 1.0 or 0.0: the step's ``found_inf``.

    ``unscale_.foreach(grads, inv_scale)`` takes one launch for a list and returns one value for all of it, as
    ``torch._amp_foreach_non_finite_check_and_unscale_`` sets one: that of a ``torch.amp.GradScaler``. The gradients may have different
    dtypes, shapes and strides. Raises as every call with ``out=`` does.

    >>> import torch
    >>> grads = [torch.tensor([4.0, 8.0]), torch.tensor([math.nan])]
    >>> unscale_.foreach(grads, 0.5), grads[0]
    (tensor(1.), tensor([2., 4.]))
    """
    return unscale(grad, inv_scale)  # type: ignore[no-any-return]


_unscaled.__name__ = _unscaled.__qualname__ = "unscale_"
unscale_ = _Unscale(_unscaled, FuseOptions())
