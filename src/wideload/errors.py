"""The errors that users see: each is a ``WideloadError`` and also the built-in type that torch raises for the same fault.

Nothing else lives here, so that every layer may raise them.
"""

from __future__ import annotations

__all__ = [
    "CompileError",
    "DeviceError",
    "DtypeError",
    "GradError",
    "LayoutError",
    "OverlapError",
    "RangeError",
    "TraceError",
    "WideloadError",
]


class WideloadError(Exception):
    """Base of every error that wideload raises on purpose. When one is raised, no output has been written."""


class TraceError(WideloadError, TypeError):
    """The function cannot be traced: a branch on a value, an op that is not elementwise, a captured object whose value may change."""


class DtypeError(WideloadError, TypeError):
    """A dtype that an op, an operand or ``out=`` does not allow."""


class LayoutError(WideloadError, ValueError):
    """Shapes that do not broadcast, an ``out=`` of another shape, or a tensor that has no strides."""


class RangeError(WideloadError, ValueError):
    """A number outside the range that torch, a GPU or a measurement allows."""


class OverlapError(WideloadError, RuntimeError):
    """An output shares memory with itself, with another output, or partly with an input."""


class DeviceError(WideloadError, RuntimeError):
    """Tensors on different devices, or on a device that is not supported."""


class CompileError(WideloadError, RuntimeError):
    """NVRTC refused the generated source, or it or the CUDA driver could not be loaded."""


class GradError(WideloadError, RuntimeError):
    """Gradients were asked for where none can be given: ``out=`` beside a tensor that requires grad, an op without a derivative."""
