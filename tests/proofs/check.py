"""Holds one row in one dtype to its exact values on all inputs, in every mode, and eager torch beside it.

The only module here that calls wideload.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import wideload as wl
from tests.proofs import precise
from tests.proofs.rows import DOMAINS, Mode, Row, all_bits, every_bits, make_pairs
from tests.proofs.ulp import Exact, Tally, floats_of, is_same, measure, num_different, state_exact, unit_of
from wideload.errors import DtypeError, TraceError

__all__ = ["DTYPES", "Device", "Record", "Settings", "check"]

Device = Literal["cuda", "cpu", "emulator"]
"""``cuda``: the kernels. ``cpu``: the reference. ``emulator``: the kernels, compiled by g++."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

_SPECIAL_BITS = (0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
"""Of fp32: both zeros, the ends of the subnormals, 1, the largest number, infinities and NaN, which a stride would miss."""
_FP64_OFF = 0.01
"""Units that fp64 may be off multiple precision at the worst input before an error above the bound is looked at in the latter."""
_LEAST_ULP_OF_EAGER = 1
"""A bound may exceed what eager torch is off by so many units, where NVIDIA states none."""


@dataclass(frozen=True)
class Settings:
    """How much is tried: every ``stride``-th fp32 input, ``pairs`` pairs, ``points`` inputs in multiple precision; at a time ``chunk``."""

    device: Device
    stride: int = 1
    pairs: int = 100_000_000
    points: int = 100_000
    chunk: int = 1 << 27

    @property
    def of_torch(self) -> str:
        """Where the tensors are."""
        return "cuda" if self.device == "cuda" else "cpu"

    @property
    def is_complete(self) -> bool:
        """Whether eager's largest error is that of the GPU, over all inputs."""
        return self.device == "cuda" and self.stride == 1


@dataclass(frozen=True)
class Record:
    """What was found of one row, dtype and mode.

    ``against``: ``fp64`` or ``mpmath``. ``bound``: in units in the last place, None where eager torch's bits are promised. ``eager`` and
    ``eager_at``: the largest error of eager torch on the same inputs. ``fp64_off``: units by which fp64 misses multiple precision at
    the worst input, None where that was not asked.
    """

    op: str
    dtype: str
    mode: Mode
    num_tensors: int
    against: str
    bound: float | None
    documented: int | None
    tally: Tally
    eager: float
    eager_at: tuple[int, ...]
    fp64_off: float | None
    seconds: float

    @property
    def key(self) -> tuple[str, str]:
        """(row, dtype): what is run at once."""
        return self.op, self.dtype

    def faults(self, settings: Settings) -> list[str]:
        """What breaks the contract, in words."""
        found = []
        if self.bound is None:
            if self.tally.differs and settings.device != "emulator":  # whose library is not that of eager torch
                found.append(f"{self.tally.differs} results are not eager's bits")
            return found
        if self.tally.above:
            found.append(f"{self.tally.above} of {self.tally.count} results are more than {self.bound:g} ulp off")
        if self.tally.zero:
            found.append(f"{self.tally.zero} zeros have the other sign")
        allowed = max(self.documented or 0, self.eager + _LEAST_ULP_OF_EAGER)
        if settings.is_complete and self.mode == "fused" and self.against == "fp64" and self.bound > allowed:
            found.append(f"the bound is loose: {self.bound:g} ulp, eager torch is {self.eager:g} off")
        return found


def check(row: Row, name: str, settings: Settings, on_chunk: Callable[[], None] = lambda: None) -> list[Record]:
    """Every mode of ``row`` in the dtype called ``name``; nothing where torch has no such op. ``on_chunk`` is called before each chunk."""
    dtype, began = DTYPES[name], time.monotonic()
    try:
        result = row.function(*(torch.ones(1, dtype=dtype, device=settings.of_torch) for _ in range(row.num_tensors))).dtype
        functions = {mode: _fuse(row, mode, settings) for mode in row.modes(dtype)}
        for f in functions.values():
            f(*(torch.ones(1, dtype=dtype, device=settings.of_torch) for _ in range(row.num_tensors)))
    except (DtypeError, TraceError, RuntimeError, NotImplementedError):
        return []
    against = "mpmath" if row.needs_precision else "fp64"
    chunks = _precise_chunks(row, dtype, settings, ()) if row.needs_precision else _chunks(row, dtype, settings)
    tallies = _run(row, dtype, result, functions, chunks, on_chunk)
    offs = {mode: _fp64_off(row, dtype, result, tally) for mode, tally in tallies.items()}
    is_suspect = any(
        (bound := row.bound(dtype, mode)) is not None and tallies[mode].largest > bound and (offs[mode] or 0) > _FP64_OFF for mode in functions
    )
    if is_suspect and against == "fp64":
        worst = tuple(tally.at[0] for tally in tallies.values() if tally.at)
        against, tallies = "mpmath", _run(row, dtype, result, functions, _precise_chunks(row, dtype, settings, worst), on_chunk)
    eager = tallies.pop("torch")
    seconds = time.monotonic() - began
    return [
        Record(
            row.name,
            name,
            mode,
            row.num_tensors,
            against,
            row.bound(dtype, mode),
            row.documented if dtype == torch.float32 else None,
            tallies[mode],
            eager.largest,
            eager.at,
            offs[mode],
            round(seconds, 2),
        )
        for mode in functions
    ]


def _fuse(row: Row, mode: Mode, settings: Settings) -> Callable[..., torch.Tensor]:
    numerics: Any = "eager" if mode == "eager" else "fused"
    f = wl.fuse(row.function, name=row.op.name, numerics=numerics, fast_math=mode == "fast_math")
    if settings.device != "emulator":
        return f
    from tests.emulator.emulated import run_emulated  # needs g++

    return functools.partial(run_emulated, f)


Chunk = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""Inputs, and the exact value of each in fp64."""


def _chunks(row: Row, dtype: torch.dtype, settings: Settings) -> Iterator[Chunk]:
    for inputs in _inputs(row, dtype, settings):
        yield inputs, row.exact(*inputs)


def _inputs(row: Row, dtype: torch.dtype, settings: Settings) -> Iterator[tuple[torch.Tensor, ...]]:
    device = settings.of_torch
    if row.num_tensors == 2:
        for seed, first in enumerate(range(0, settings.pairs, settings.chunk)):
            yield make_pairs(row, device, min(settings.chunk, settings.pairs - first), seed)
        return
    if dtype != torch.float32:
        yield (floats_of(every_bits(device, dtype.itemsize), dtype),)
        return
    count = -(-(1 << 32) // settings.stride)
    for first in range(0, count, settings.chunk):
        yield (all_bits(device, first, min(settings.chunk, count - first), settings.stride).view(dtype),)
    if settings.stride > 1:
        special = torch.tensor(_SPECIAL_BITS, dtype=torch.int32, device=device).view(dtype)
        yield (torch.cat([special, -special]),)


def _precise_chunks(row: Row, dtype: torch.dtype, settings: Settings, more: tuple[int, ...]) -> Iterator[Chunk]:
    """One chunk: ``settings.points`` inputs evenly over all bit patterns, or all if these are fewer, and ``more``."""
    device, total = settings.of_torch, 1 << 8 * dtype.itemsize
    count = min(total, settings.points)
    bits = torch.cat([torch.arange(count, device=device) * (total // count), torch.tensor(more, dtype=torch.int64, device=device)])
    x = floats_of(bits, dtype)
    if row.op.name in DOMAINS:
        low, high = DOMAINS[row.op.name]
        x = x[(x >= low) & (x <= high)]
    value = row.exact(x)
    finite = x.isfinite().nonzero()[:, 0]
    for at, exact in zip(finite.tolist(), precise.compute_many(row.name, x[finite].double().tolist()), strict=True):
        if exact is not None:
            value[at] = exact
    yield (x,), value


def _run(
    row: Row,
    dtype: torch.dtype,
    result: torch.dtype,
    functions: dict[Mode, Callable[..., torch.Tensor]],
    chunks: Iterator[Chunk],
    on_chunk: Callable[[], None],
) -> dict[Any, Tally]:
    """The tallies of the modes, and of eager torch as ``"torch"``; results of the same bits are measured once."""
    tallies = {mode: Tally() for mode in ("torch", *functions)}
    for inputs, value in chunks:
        on_chunk()
        exact = state_exact(value, result, row.scale(value, *inputs) if result.is_floating_point else None)
        eager = row.function(*inputs)
        seen: list[tuple[torch.Tensor, float, Tally]] = []
        for mode in tallies:
            got = eager if mode == "torch" else functions[mode](*inputs)
            bound = math.inf if mode == "torch" else row.bound(dtype, mode)
            found = _measure_once(got, exact, math.inf if bound is None else bound, inputs, row.any_zero, seen)
            differs = num_different(got, eager) if mode == "eager" and not is_same(got, eager) else 0
            tallies[mode] += replace(found, differs=differs)
    return tallies


def _measure_once(
    got: torch.Tensor,
    exact: Exact,
    bound: float,
    inputs: tuple[torch.Tensor, ...],
    any_zero: bool,
    seen: list[tuple[torch.Tensor, float, Tally]],
) -> Tally:
    if got.dtype != exact.want.dtype or got.shape != exact.want.shape:
        raise AssertionError(f"a result of {got.dtype} {tuple(got.shape)}, expected {exact.want.dtype} {tuple(exact.want.shape)}")
    for other, its_bound, tally in seen:
        if (its_bound == bound or tally.largest <= min(bound, its_bound)) and is_same(got, other):
            return tally
    tally = measure(got, exact, bound, inputs, any_zero=any_zero)
    seen.append((got, bound, tally))
    return tally


def _fp64_off(row: Row, dtype: torch.dtype, result: torch.dtype, tally: Tally) -> float | None:
    """Units by which the row's fp64 is off multiple precision at the tally's worst input."""
    if not tally.at or row.num_tensors != 1 or row.name not in precise.FUNCTIONS:
        return None
    x = floats_of(torch.tensor(tally.at), dtype)
    true = precise.compute(row.name, float(x)) if math.isfinite(float(x)) else None
    if true is None or math.isnan(true):
        return None
    value = torch.tensor([true], dtype=torch.float64)
    return float((row.exact(x) - value).abs() / unit_of(value, result))
