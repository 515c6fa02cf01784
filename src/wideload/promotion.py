"""Turns an op and the dtypes of its operands into the dtype that torch gives the result, by asking torch.

Each op is asked alone, on one-element CPU tensors of ones: propagated values would raise or mislead, and the ``meta`` device
imports two seconds of Python on first use.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from wideload.autocast import without_autocast
from wideload.dtypes import dtype_name, is_half, is_storage, widened
from wideload.errors import DtypeError
from wideload.expr import Apply, Const, Node, Number
from wideload.ops_table import Op

__all__ = ["Sample", "infer_dtype", "operand_dtypes", "sample_of"]

Sample = tuple[torch.dtype, bool] | tuple[type, str] | type
"""What torch must be told of an operand: (dtype, has no dims), a constant as (type, repr), or the type of a runtime scalar."""


def sample_of(node: Node) -> Sample:
    """How ``node`` looks to torch's promotion rules."""
    if isinstance(node, Const):
        return type(node.value), repr(node.value)
    if isinstance(node, Number):
        return node.kind
    return node.dtype, node.ndim == 0


def _instance(sample: Sample, is_widened: bool = False) -> Any:
    """A one-element tensor or a number like ``sample``; with ``is_widened``, halves as the type twice as wide."""
    if isinstance(sample, type):
        return sample(1)
    first, second = sample
    if isinstance(first, torch.dtype):
        return torch.ones(() if second else (1,), dtype=widened(first) if is_widened else first)
    value = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}.get(str(second))
    return value if value is not None else first(second == "True") if first is bool else first(second)


@functools.lru_cache(maxsize=65536)
def infer_dtype(op: Op, samples: tuple[Sample, ...], default_dtype: torch.dtype) -> torch.dtype:
    """The dtype of ``op``'s result: torch is asked on one-element tensors of ones. Raises ``DtypeError`` with torch's own words."""
    with torch.no_grad(), without_autocast():
        try:
            result = op.torch(*map(_instance, samples))
        except NotImplementedError as error:  # the CPU lacks the dtype, CUDA need not: ask one width up
            halves = {s[0] for s in samples if isinstance(s, tuple) and isinstance(s[0], torch.dtype) and is_half(s[0])}
            if not halves:
                raise DtypeError(_refusal(op, samples, error)) from None
            result = op.torch(*(_instance(sample, is_widened=True) for sample in samples))
            if result.dtype == torch.float32 and len(halves) == 1:
                half = halves.pop()
                return torch.float16 if half.is_complex else half  # of complex32: a part
            if result.dtype == torch.complex64:
                values = list(map(_instance, samples))
                tensor = max((value for value in values if isinstance(value, torch.Tensor)), key=torch.Tensor.dim)
                return functools.reduce(torch.promote_types, (torch.result_type(tensor, value) for value in values))
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise DtypeError(_refusal(op, samples, error)) from None
    return result.dtype  # type: ignore[no-any-return]


def _refusal(op: Op, samples: tuple[Sample, ...], error: Exception) -> str:
    kinds = ", ".join(
        f"{name}: {s.__name__ if isinstance(s, type) else dtype_name(s[0]) if isinstance(s[0], torch.dtype) else s[1]}"
        for name, s in zip(op.operands, samples, strict=True)
    )
    stored = any(isinstance(s, tuple) and isinstance(s[0], torch.dtype) and is_storage(s[0]) for s in samples)
    way_out = ". fp8 is stored and converted, not computed with: use .float() first" if stored else ""
    return f"torch refuses {op.name}({kinds}): {str(error).splitlines()[0]}{way_out}"


def operand_dtypes(nodes: Sequence[Node], node: Apply) -> tuple[torch.dtype | None, ...]:
    """The dtype that each operand of ``node`` is brought to before the op computes; None where only its shape counts."""
    marked = tuple(sample_of(nodes[i]) for i, mark in zip(node.operands, node.op.types, strict=True) if mark == "common")
    common = _common_dtype(marked, torch.get_default_dtype()) if marked else None
    dtypes = {"result": node.dtype, "common": common, "bool": torch.bool, "shape": None}
    return tuple(_own_dtype(nodes[i]) if mark == "own" else dtypes[mark] for i, mark in zip(node.operands, node.op.types, strict=True))


def _own_dtype(node: Node) -> torch.dtype:
    if isinstance(node, Const | Number):
        kind = node.kind if isinstance(node, Number) else type(node.value)
        return {bool: torch.bool, int: torch.int64}.get(kind, torch.float64)
    return node.dtype


@functools.lru_cache(maxsize=65536)
def _common_dtype(samples: tuple[Sample, ...], default_dtype: torch.dtype) -> torch.dtype:
    """``torch.result_type`` of one or two operands."""
    values = list(map(_instance, samples))
    return torch.result_type(values[0], values[-1])
