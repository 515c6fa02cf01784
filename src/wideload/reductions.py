"""What a kernel can give of all elements at once beside its results: one row a reduction, its reference and its CUDA text.

Must not know where elements lie, nor how threads combine. Every row takes an element for an unsigned word, and the result's bits are the
largest word: 0 where there is none, whatever the order, so that one atomic maximum on zeroed memory is all that kernels need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from wideload.dtypes import dtype_name, is_storage, widened
from wideload.errors import DtypeError

__all__ = ["REDUCTIONS", "Reduction"]


@dataclass(frozen=True, eq=False)
class Reduction:
    """``reference`` of a tensor is the 0-dim result; ``words`` are, by the type that an element is computed in, the C++ of its word.

    ``dtype`` is the result's for a dtype of elements. ``rounds`` says that it looks at elements as they are stored: halves are rounded.
    """

    name: str
    reference: Callable[[torch.Tensor], torch.Tensor]
    words: Mapping[str, str]
    dtype: Callable[[torch.dtype], torch.dtype]
    rounds: bool

    def __repr__(self) -> str:
        return self.name

    def result_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the result for elements of ``dtype``. Raises ``DtypeError`` where they are no floating-point numbers."""
        if not dtype.is_floating_point or is_storage(dtype):
            way_out = "Take .abs() first" if dtype.is_complex else "Convert it with .float() first"
            allowed = "floating-point tensors of 16 bits or more"
            raise DtypeError(f"wl.{self.name} got a tensor of {dtype_name(dtype)}; allowed: {allowed}. {way_out}.")
        return self.dtype(dtype)

    def of(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The result for ``values``, which stand for elements of ``dtype``; without a gradient."""
        values = values.detach()
        return self.reference(values.to(dtype) if self.rounds else values).to(self.dtype(dtype))


def _amax(values: torch.Tensor) -> torch.Tensor:
    return values.abs().amax() if values.numel() else values.new_zeros(())


def _any_nonfinite(values: torch.Tensor) -> torch.Tensor:
    return (~torch.isfinite(values)).any()


_ONE = "0x3f800000u"  # the bits of 1.0f

REDUCTIONS: dict[str, Reduction] = {
    row.name: row
    for row in (
        Reduction(
            "amax",
            _amax,
            # Of numbers that are not negative the bits grow with the value, up to infinity, and those of NaN are larger still.
            {
                "float": "::__float_as_uint({x}) & 0x7fffffffu",
                "double": "(unsigned long long)::__double_as_longlong({x}) & 0x7fffffffffffffffull",
            },
            widened,
            rounds=False,
        ),
        Reduction(
            "any_nonfinite",
            _any_nonfinite,
            {
                "float": f"(::__float_as_uint({{x}}) & 0x7f800000u) == 0x7f800000u ? {_ONE} : 0u",
                "double": f"(::__double_as_longlong({{x}}) & 0x7ff0000000000000ll) == 0x7ff0000000000000ll ? {_ONE} : 0u",
            },
            lambda _: torch.float32,
            rounds=True,
        ),
    )
}
