"""Write an elementwise function in plain PyTorch; get one CUDA kernel at the memory wall; see how far it is from the limit, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wideload import nn, ops, optim
from wideload.callables import explain
from wideload.config import config
from wideload.errors import (
    CompileError,
    DeviceError,
    DtypeError,
    GradError,
    LayoutError,
    OverlapError,
    RangeError,
    TraceError,
    WideloadError,
)
from wideload.fused import FusedFunction, fuse
from wideload.patch import Patch, patch
from wideload.raw_kernel import RawKernel, raw
from wideload.trace import amax, any_nonfinite, index, linear_index
from wideload.warmup import warmup

if TYPE_CHECKING:
    from wideload.measure.bench import bench
    from wideload.measure.compare import Comparison, Comparisons, SelfTest, compare, compare_results, self_test
    from wideload.measure.operands import random_tensor
    from wideload.measure.result import BenchResult
    from wideload.measure.roofline import Roofline, roofline

__all__ = [
    "BenchResult",
    "Comparison",
    "Comparisons",
    "CompileError",
    "DeviceError",
    "DtypeError",
    "FusedFunction",
    "GradError",
    "LayoutError",
    "OverlapError",
    "Patch",
    "RangeError",
    "RawKernel",
    "Roofline",
    "SelfTest",
    "TraceError",
    "WideloadError",
    "amax",
    "any_nonfinite",
    "bench",
    "compare",
    "compare_results",
    "config",
    "explain",
    "fuse",
    "index",
    "linear_index",
    "nn",
    "ops",
    "optim",
    "patch",
    "random_tensor",
    "raw",
    "roofline",
    "self_test",
    "warmup",
]

__version__ = "0.1.0"


if not TYPE_CHECKING:  # or a checker would take every name to exist

    def __getattr__(name: str) -> Any:
        """Import the measuring half when it is first used: a model that runs fused functions never does."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from wideload import measure

        value = globals()[name] = getattr(measure, name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
