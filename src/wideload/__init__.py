"""Write an elementwise function in plain PyTorch; get one CUDA kernel at the memory wall; see how far it is from the limit, and why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from wideload.trace import amax, any_nonfinite, index, linear_index

if TYPE_CHECKING:
    from wideload import nn, ops, optim
    from wideload.callables import explain
    from wideload.measure.bench import bench
    from wideload.measure.compare import Comparison, Comparisons, SelfTest, compare, compare_results, self_test
    from wideload.measure.operands import random_tensor
    from wideload.measure.result import BenchResult
    from wideload.measure.roofline import Roofline, roofline
    from wideload.patched import Patch, patch
    from wideload.raw_kernel import RawKernel, raw
    from wideload.warmed import warmup

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


_MODULES = ("nn", "ops", "optim")
_LATER = {
    **dict.fromkeys(("BenchResult", "Comparison", "Comparisons", "Roofline", "SelfTest", "bench", "compare"), "measure"),
    **dict.fromkeys(("compare_results", "random_tensor", "roofline", "self_test"), "measure"),
    **dict.fromkeys(("Patch", "patch"), "patched"),
    **dict.fromkeys(("RawKernel", "raw"), "raw_kernel"),
    "explain": "callables",
    "warmup": "warmed",
}
"""Of names that a process which only calls functions of its own does without, the module."""

if not TYPE_CHECKING:  # or a checker would take every name to exist

    def __getattr__(name: str) -> Any:
        """Import what `fuse` does without when it is first used."""
        if name in _MODULES:
            return import_module(f"wideload.{name}")
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"wideload.{_LATER[name]}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
