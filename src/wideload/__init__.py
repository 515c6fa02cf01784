"""Write an elementwise function in plain PyTorch; get one CUDA kernel at the memory wall; see how far it is from the limit, and why."""

from __future__ import annotations

from wideload import ops
from wideload.errors import CompileError, DeviceError, DtypeError, GradError, LayoutError, OverlapError, TraceError, WideloadError
from wideload.fused import FusedFunction, fuse

__all__ = [
    "CompileError",
    "DeviceError",
    "DtypeError",
    "FusedFunction",
    "GradError",
    "LayoutError",
    "OverlapError",
    "TraceError",
    "WideloadError",
    "fuse",
    "ops",
]

__version__ = "0.1.0"
