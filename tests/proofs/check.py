"""Holds one row in one dtype to its exact values on all inputs, in every mode, and eager torch beside it.

The only module here that calls wideload.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

import wideload as wl
from tests.proofs import precise
from tests.proofs.rows import DOMAINS, Mode, Row, all_bits, every_bits, make_pairs
from tests.proofs.ulp import Exact, Tally, floats_of, is_same, measure, num_different, state_exact, unit_of

__all__ = ["DTYPES", "Device", "Record", "Settings", "check", "prepare"]

Device = Literal["cuda", "cpu", "emulator"]
"""``cuda``: the kernels. ``cpu``: the reference. ``emulator``: the kernels, compiled by g++."""
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}

_SPECIAL_BITS = (0x00000000, 0x00000001, 0x007FFFFF, 0x00800000, 0x3F800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000)
"""Of fp32: both zeros, the ends of the subnormals, 1, the largest number, infinities and NaN, which a stride would miss."""
_FP64_OFF = 0.01
"""Units that fp64 may be off multiple precision at the worst input before an error above the bound is looked at in the latter."""
_BEYOND_EAGER = 1
"""Units by which a bound may exceed the largest error of eager torch, where NVIDIA states none or a smaller one."""
_TARGET = "sm_90"
_MANY = 1 << 20  # elements of the tensors that kernels are planned for to see whether modes have the same


Chunk = tuple[tuple[torch.Tensor, ...], torch.Tensor]
"""Inputs, and the exact value of each in fp64."""


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

    ``against``: ``fp64`` or ``mpmath``. ``bound``: in units in the last place, None where eager torch's bits are promised.
    ``eager`` and ``eager_at``: the largest error of eager torch on the same inputs, None where it has no such op. ``fp64_off``: units by
    which fp64 misses multiple precision at the worst input, None where that was not asked. ``commit``: whose kernels they were.
    """

    op: str
    dtype: str
    mode: Mode
    num_tensors: int
    against: str
    bound: float | None
    documented: int | None
    tally: Tally
    eager: float | None
    eager_at: tuple[int, ...]
    fp64_off: float | None
    seconds: float
    commit: str | None = None

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
        if self.eager is None or not settings.is_complete or self.mode != "fused":
            return found
        if self.bound > max(self.documented or 0, self.eager + _BEYOND_EAGER):
            found.append(f"the bound is loose: {self.bound:g} ulp, eager torch is {self.eager:g} off")
        return found


def check(
    row: Row, name: str, settings: Settings, on_chunk: Callable[[], None] = lambda: None, prepared: Future[Chunk] | None = None
) -> list[Record]:
    """Every mode of ``row`` in the dtype called ``name``; nothing where torch has no such op.

    ``on_chunk`` is called before each chunk. ``prepared`` is what ``prepare`` gives, where it was begun before.
    """
    dtype, began = DTYPES[name], time.monotonic()
    results = {device: _result_dtype(row, dtype, device) for device in ("cpu", settings.of_torch)}
    result = results[settings.of_torch] or results["cpu"]
    if result is None:
        return []
    functions = _functions(row, dtype, settings)
    eager = row.function if results[settings.of_torch] else None
    against = "mpmath" if row.needs_precision else "fp64"
    if row.needs_precision:
        chunks = iter([prepared.result() if prepared else prepare(row, name, settings)])
    else:
        chunks = _chunks(row, dtype, settings)
    tallies = _run(row, dtype, result, functions, eager, chunks, on_chunk)
    offs = {mode: _fp64_off(row, dtype, result, tally, settings) for mode, tally in tallies.items()}
    is_suspect = any(tallies[mode].above and row.bound(dtype, mode) is not None and (offs[mode] or 0) > _FP64_OFF for mode in functions)
    if is_suspect and against == "fp64":
        worst = tuple(tally.at[0] for tally in tallies.values() if tally.at)
        chunks = iter([prepare(row, name, settings, worst)])
        against, tallies = "mpmath", _run(row, dtype, result, functions, eager, chunks, on_chunk)
    torchs = tallies.pop("torch", None)
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
            torchs.largest if torchs else None,
            torchs.at if torchs else (),
            offs[mode],
            round(seconds, 2),
        )
        for mode in functions
    ]


def _result_dtype(row: Row, dtype: torch.dtype, device: str) -> torch.dtype | None:
    """What eager torch returns there; None where it has no such op."""
    try:
        return row.function(*(torch.ones(1, dtype=dtype, device=device) for _ in range(row.num_tensors))).dtype
    except (RuntimeError, NotImplementedError):
        return None


Functions = dict[Mode, Callable[..., torch.Tensor]]


def _functions(row: Row, dtype: torch.dtype, settings: Settings) -> Functions:
    """What each mode computes with; one function for modes whose kernels have the same text."""
    functions: Functions = {}
    by_source: dict[str, Callable[..., torch.Tensor]] = {}
    for mode in row.modes(dtype):
        f = wl.fuse(row.function, name=row.op.name, numerics="eager" if mode == "eager" else "fused", fast_math=mode == "fast_math")
        tensors = [torch.empty(_MANY, dtype=dtype, device="meta") for _ in range(row.num_tensors)]
        source = "".join(kernel.source for kernel in f.plan(*tensors, target=_TARGET).kernels)
        functions[mode] = by_source.setdefault(source, _emulated(f) if settings.device == "emulator" else f)
    return functions


def _emulated(f: Any) -> Callable[..., torch.Tensor]:
    from tests.emulator.emulated import run_emulated  # needs g++

    return functools.partial(run_emulated, f)


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
        x = floats_of(every_bits(device, dtype.itemsize), dtype)
        yield (x.masked_fill(x.isnan(), math.nan) if dtype == torch.float16 else x,)  # a GPU widens NaN of fp16 without its sign
        return
    count = -(-(1 << 32) // settings.stride)
    for first in range(0, count, settings.chunk):
        yield (all_bits(device, first, min(settings.chunk, count - first), settings.stride).view(dtype),)
    if settings.stride > 1:
        special = torch.tensor(_SPECIAL_BITS, dtype=torch.int32, device=device).view(dtype)
        yield (torch.cat([special, -special]),)


def prepare(row: Row, name: str, settings: Settings, more: tuple[int, ...] = ()) -> Chunk:
    """Exact values in multiple precision, of ``settings.points`` inputs evenly over all bit patterns, or of all, and of ``more`` patterns.

    Of infinities and NaN, and at poles, they are torch's.
    """
    dtype, device = DTYPES[name], settings.of_torch
    total = 1 << 8 * dtype.itemsize
    count = min(total, settings.points)
    bits = torch.cat([torch.arange(count, device=device) * (total // count), torch.tensor(more, dtype=torch.int64, device=device)])
    x = floats_of(bits, dtype)
    if row.op.name in DOMAINS:
        low, high = DOMAINS[row.op.name]
        x = x[(x >= low) & (x <= high)]
    value = row.exact(x)
    finite = x.isfinite().nonzero()[:, 0]
    precisely = precise.compute_many(row.name, x[finite].double().tolist())
    known = [(at, exact) for at, exact in zip(finite.tolist(), precisely, strict=True) if exact is not None]
    places, values = zip(*known, strict=True)
    value[torch.tensor(places, device=device)] = torch.tensor(values, dtype=torch.float64, device=device)
    return (x,), value


def _run(
    row: Row,
    dtype: torch.dtype,
    result: torch.dtype,
    functions: Functions,
    eager: Callable[..., torch.Tensor] | None,
    chunks: Iterator[Chunk],
    on_chunk: Callable[[], None],
) -> dict[Any, Tally]:
    """The tallies of the modes, and of eager torch as ``"torch"``; results of the same bits are measured once."""
    computes: dict[Any, Callable[..., torch.Tensor]] = {**({"torch": eager} if eager else {}), **functions}
    bounds = {mode: math.inf if mode == "torch" or (bound := row.bound(dtype, mode)) is None else bound for mode in computes}
    tallies = {mode: Tally() for mode in computes}
    for inputs, value in chunks:
        on_chunk()
        exact = state_exact(value, result, row.scale(value, *inputs) if result.is_floating_point else None)
        del value
        results: dict[Any, torch.Tensor] = {}
        seen: list[tuple[torch.Tensor, float, Tally]] = []
        for mode, compute in computes.items():
            same = next((earlier for earlier in results if computes[earlier] is compute), None)
            got = results[mode] = compute(*inputs) if same is None else results[same]
            found = _measure_once(got, exact, bounds[mode], inputs, row.any_zero, seen)
            if mode == "eager" and eager and not is_same(got, results["torch"]):
                found = replace(found, differs=num_different(got, results["torch"]))
            tallies[mode] += found
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


def _fp64_off(row: Row, dtype: torch.dtype, result: torch.dtype, tally: Tally, settings: Settings) -> float | None:
    """Units by which the row's fp64 is off multiple precision at the tally's worst input."""
    if not tally.at or row.num_tensors != 1 or row.name not in precise.FUNCTIONS:
        return None
    x = floats_of(torch.tensor(tally.at), dtype)
    true = precise.compute(row.name, float(x)) if math.isfinite(float(x)) else None
    if true is None or math.isnan(true):
        return None
    value = torch.tensor([true], dtype=torch.float64)
    return float((row.exact(x.to(settings.of_torch)).cpu() - value).abs() / unit_of(value, result))
