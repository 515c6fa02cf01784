"""Holds wideload to eager torch on one operator and dtype: values, dtypes, shapes and strides, and that its kernels compile.

The only module here that calls wideload.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import wideload as wl
from tests.opinfo.selection import Sample, Selected
from wideload.errors import DtypeError, TraceError
from wideload.expr import Apply, Numerics
from wideload.fused import FusedFunction
from wideload.nvrtc import compile_cubin

__all__ = ["ARCH", "PASSES", "Outcome", "Status", "check_pair"]

Status = Literal["equal", "bounded", "close", "as_cpu", "refused", "differs", "crashes", "none"]
"""``equal`` bit for bit; ``bounded`` by the table's error bounds of the ops it is made of, beside
eager or beside torch's fp64 of the same numbers, rounded; ``close`` by torch.testing's tolerances for
the dtype, as torch's own tests ask; ``as_cpu`` one of these beside eager on the CPU, where it
contradicts eager on the GPU. ``refused`` with a ``TraceError`` or a ``DtypeError``. ``none``: torch
itself computes no sample, or puts the results of all on another device, which a fused function must refuse."""

PASSES: tuple[Status, ...] = ("equal", "bounded", "close", "as_cpu")
_ORDER: tuple[Status, ...] = ("none", *PASSES, "refused", "differs", "crashes")
ARCH = "sm_90"
"""What kernels are planned and compiled for where there is no GPU."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Outcome:
    """What became of one operator and dtype: the worst of its samples, and why that is not ``equal``."""

    op: str
    dtype: str
    status: Status
    reason: str = ""

    def to_dict(self) -> dict[str, str]:
        """For a JSON file."""
        return asdict(self)


class _Differs(Exception):
    """What wideload returned is not what eager torch does."""


def check_pair(op: Selected, dtype: torch.dtype, device: str, *, numerics: Numerics = "eager", compiles: bool = False) -> Outcome:
    """Run every sample of ``op`` in ``dtype``.

    On the CPU the reference computes, and the kernels of each call are planned for an H200 too; with ``compiles`` NVRTC compiles those
    of the first sample of each way to call it. A dtype that torch has on CUDA alone is only planned there.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        worst, compiled = Outcome(op.name, _name(dtype), "none"), set[str]()
        runs = device == "cuda" or dtype in op.dtypes("cpu")
        plans = device == "cpu" and dtype in op.dtypes("cuda")
        for sample in op.samples(dtype, device):
            status, reason = _check_sample(op, sample, numerics, runs, plans, compiles, compiled)
            if _ORDER.index(status) > _ORDER.index(worst.status):
                worst = Outcome(op.name, _name(dtype), status, reason)
        return worst


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_sample(
    op: Selected, sample: Sample, numerics: Numerics, runs: bool, plans: bool, compiles: bool, compiled: set[str]
) -> tuple[Status, str]:
    text, tensors, constants = _spell(sample)
    want = None
    if runs:
        try:
            want = op.function(*sample.args, **sample.kwargs)
        except Exception:  # whatever torch's reason
            return "none", ""
    status: Status = "equal"
    elsewhere = runs and bool(_devices(want) - _devices(tensors))
    try:
        f = _fuse(op.function, text, constants, numerics)
        plan = f.plan(*tensors, target=ARCH) if plans else None
        if plan is not None and compiles and text not in compiled:
            compiled.add(text)
            for kernel in plan.kernels:
                _compile(kernel.source, kernel.name)
        if runs:
            got, wide = f(*tensors), functools.partial(_in_double, op, sample)
            try:
                status = max(_compare(f, tensors, got, want, wide), key=_ORDER.index)
            except _Differs:
                if not _is_cpus(f, tensors, got, op, sample, wide):
                    raise
                status = "as_cpu"
        if elsewhere:
            raise _Differs("a result on another device was not refused")
    except (TraceError, DtypeError) as error:
        return ("none", "") if elsewhere else ("refused", _first_line(error))
    except _Differs as error:
        return "differs", f"{text}: {error}"
    except Exception as error:
        return "crashes", f"{text}: {type(error).__name__}: {_first_line(error)}"
    return status, text if status != "equal" else ""


def _is_cpus(f: FusedFunction, tensors: list[torch.Tensor], got: Any, op: Selected, sample: Sample, wide: Callable[[], Any]) -> bool:
    """Whether a GPU's result, which is not its eager torch's, is that of eager torch on the CPU."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return False
    try:
        want = op.function(*_to_cpu(sample.args), **_to_cpu(sample.kwargs))
        list(_compare(f, tensors, _to_cpu(got), want, lambda: _to_cpu(wide())))
    except Exception:  # whatever torch's reason, or another difference
        return False
    return True


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    return type(value)(map(_to_cpu, value)) if isinstance(value, (tuple, list)) else value


def _devices(value: Any) -> set[torch.device]:
    if isinstance(value, torch.Tensor):
        return {value.device}
    return set[torch.device]().union(*map(_devices, value)) if isinstance(value, (tuple, list)) else set()


def _first_line(error: Exception) -> str:
    line = (str(error) or "?").splitlines()[0]
    return line.split(" (at ")[0].split(". ")[0]


def _in_double(op: Selected, sample: Sample) -> Any:
    """What torch computes of the same numbers in fp64, or None where that is no answer: other dtypes in, or an operator of bits."""

    def widen(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not (x.is_floating_point() or x.is_complex()):
            return x
        return x.to(torch.complex128 if x.is_complex() else torch.float64)

    try:
        found = op.function(*map(widen, sample.args), **{name: widen(x) for name, x in sample.kwargs.items()})
        return _parts(found) if isinstance(found, torch.Tensor) else found
    except Exception:  # whatever torch's reason
        return None


# ---- the call as a function of its tensors alone


def _spell(sample: Sample) -> tuple[str, list[torch.Tensor], dict[str, Any]]:
    """``op(x0, 2.5, x1, value=2)``, its tensors, and what it names besides: numbers stand in the text, as users write them."""
    tensors: list[torch.Tensor] = []
    constants: dict[str, Any] = {}

    def spell(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return f"x{len(tensors) - 1}"
        if isinstance(value, (tuple, list)):
            inner = "".join(f"{spell(item)}, " for item in value)
            return f"({inner})" if isinstance(value, tuple) else f"[{inner}]"
        if isinstance(value, (bool, int, str, type(None))) or (isinstance(value, (float, complex)) and _is_finite(value)):
            return repr(value)
        constants[f"c{len(constants)}"] = value
        return f"c{len(constants) - 1}"

    spelled = [*map(spell, sample.args), *(f"{name}={spell(value)}" for name, value in sample.kwargs.items())]
    return f"op({', '.join(spelled)})", tensors, constants


def _is_finite(value: complex) -> bool:
    return value - value == 0


def _fuse(function: Callable[..., Any], text: str, constants: dict[str, Any], numerics: Numerics) -> FusedFunction:
    count = 0
    while f"x{count}" in text:
        count += 1
    scope: dict[str, Any] = {"op": function, **constants}
    exec(f"def call({', '.join(f'x{i}' for i in range(count))}):\n    return {text}", scope)
    return wl.fuse(scope["call"], numerics=numerics)


@functools.lru_cache(maxsize=4096)
def _compile(source: str, name: str) -> None:
    compile_cubin(source, arch=ARCH, name=name, lineinfo=False)


# ---- comparing


def _compare(f: FusedFunction, tensors: list[torch.Tensor], got: Any, want: Any, wide: Callable[[], Any]) -> Iterator[Status]:
    yield "equal"
    if isinstance(want, (tuple, list)):
        if type(got) is not type(want) or len(got) != len(want):
            raise _Differs(f"returns a {type(got).__name__}, eager a {type(want).__name__}")
        for mine, eager in zip(got, want, strict=True):
            yield from _compare(f, tensors, mine, eager, lambda: None)
        return
    for what in ("dtype", "shape", "device"):
        if getattr(got, what) != getattr(want, what):
            raise _Differs(f"{what} {getattr(got, what)}, eager's {getattr(want, what)}")
    if got.stride() != want.stride():
        raise _Differs(f"strides {got.stride()} of shape {tuple(got.shape)}, eager's {want.stride()}")
    yield _compare_values(f, tensors, *(_parts(tensor.detach()) for tensor in (got, want)), wide)


def _parts(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return torch.view_as_real(tensor.contiguous()) if tensor.is_complex() else tensor.contiguous()


def _compare_values(
    f: FusedFunction, tensors: list[torch.Tensor], got: torch.Tensor, want: torch.Tensor, wide: Callable[[], Any]
) -> Status:
    if not got.dtype.is_floating_point or got.dtype.itemsize == 1:
        bits = (lambda x: x) if got.dtype == torch.bool else lambda x: x.view(_BITS[x.element_size()])
        _demand(bits(got) == bits(want), got, want)
        return "equal"
    both_nan = got.isnan() & want.isnan()
    _demand(got.isnan() == want.isnan(), got, want)
    if bool(((got == want) & (got.signbit() == want.signbit()) | both_nan).all()):
        return "equal"
    _demand((got != want) | (got != 0) | (got.signbit() == want.signbit()), got, want)
    bound = _bound(f, tensors, want.dtype)
    if _steps(got, want).masked_fill(both_nan, 0).max() <= bound:
        return "bounded"
    exact = wide()
    if isinstance(exact, torch.Tensor) and exact.dtype == torch.float64 and exact.shape == want.shape:
        exact = exact.to(want.dtype)
        if bool((exact.isnan() == got.isnan()).all()) and _steps(got, exact).masked_fill(both_nan, 0).max() <= bound:
            return "bounded"
    rtol, atol = _TOLERANCES[want.dtype]
    _demand((got == want) | both_nan | ((got.double() - want.double()).abs() <= atol + rtol * want.double().abs()), got, want)
    return "close"


_TOLERANCES = {torch.float64: (1e-7, 1e-7), torch.float32: (1.3e-6, 1e-5), torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
"""(relative, absolute): torch.testing.assert_close's own."""


def _demand(fits: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> None:
    if not bool(fits.all()):
        at = int((~fits).reshape(-1).nonzero()[0])
        shown = f"{got.reshape(-1)[at].item()!r}, eager's {want.reshape(-1)[at].item()!r}"
        raise _Differs(f"element {at} is {shown}; {int((~fits).sum())} of {fits.numel()}")


def _steps(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """How many values of the dtype lie between two of them; -0 and 0 are one apart."""
    bits = _BITS[got.element_size()]

    def ordered(x: torch.Tensor) -> torch.Tensor:
        whole = x.view(bits).long()
        return torch.where(whole >= 0, whole, ~(whole & torch.iinfo(bits).max))

    return (ordered(got) - ordered(want)).abs()


def _bound(f: FusedFunction, tensors: list[torch.Tensor], dtype: torch.dtype) -> float:
    """The sum of the bounds of the ops that the function is made of, and a rounding for each, on either side."""
    ops = [node.op for node in f.plan(*tensors, target=ARCH).expr.nodes if isinstance(node, Apply)]
    wide = dtype in (torch.float32, torch.float64)
    return 2 * sum((op.ulp[dtype == torch.float64] if wide else 1) for op in ops) if any(any(op.ulp) for op in ops) else 0
