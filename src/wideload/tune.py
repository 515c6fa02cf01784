"""Turns a GPU into the way of cutting kernels that is fastest on it: candidates measured beside each other, over dtypes, operands, sizes.

Knows functions, candidates and a timer; never how a time is taken, nor what a choice does to a kernel's text.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from wideload.errors import CompileError, DeviceError, WideloadError
from wideload.fused import FusedFunction, fuse
from wideload.measure.operands import random_tensor
from wideload.measure.wall import time_cold
from wideload.plan import ALLOWED, Tuning, built_in_tuning
from wideload.tuned import TunedGpu, trying

__all__ = ["CASES", "Case", "Tried", "TuneResult", "tune"]

WORTH = 1.01
"""By how much a candidate must be faster than the built-in choice, in the mean over its cases: two runs differ by up to 1 %."""
SIZES = (1 << 18, 1 << 22, 1 << 26)
"""Elements of a result: less than a wave of an H200's blocks, some waves, and far more than its L2 holds."""
SAMPLES = 21
"""Of each candidate, in turns; medians count."""

Call = Callable[[], Any]
Timer = Callable[[Mapping[str, Call], int, int], Mapping[str, Sequence[float]]]
"""Of calls by name, on a device, so many times each; the samples in microseconds."""

bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8


@dataclass(frozen=True, slots=True)
class Case:
    """A function, its operands for ``n`` elements, and the choices that its kernel is cut by."""

    name: str
    fn: Callable[..., torch.Tensor]
    build: Callable[[Callable[..., torch.Tensor], int], Sequence[torch.Tensor]]
    choices: tuple[str, ...]


RUNS, NARROWING, STRIDED, TILES = ("accesses", "threads"), ("narrowing_accesses",), ("strided_elements",), ("tile_bytes", "tile_threads")
"""Choices that are tried together."""


def _side(n: int) -> int:
    return math.isqrt(n)


CASES = (
    Case("x * 2, int8", lambda x: x * 2, lambda draw, n: [draw(n, dtype=i8)], RUNS),
    Case("x * 2, bf16", lambda x: x * 2, lambda draw, n: [draw(n)], RUNS),
    Case("x + b, bf16", lambda x, b: x + b, lambda draw, n: [draw(n), draw(n)], RUNS),
    Case("x + b, f32", lambda x, b: x + b, lambda draw, n: [draw(n, dtype=f32), draw(n, dtype=f32)], RUNS),
    Case("bf16 + f32", lambda x, b: x + b, lambda draw, n: [draw(n), draw(n, dtype=f32)], RUNS),
    Case(
        "silu(x + b) * y, bf16",
        lambda x, b, y: torch.nn.functional.silu(x + b) * y,
        lambda draw, n: [draw(n), draw(n), draw(n)],
        RUNS,
    ),
    Case("x + row, bf16", lambda x, b: x + b, lambda draw, n: [draw(n // 1024, 1024), draw(1024)], RUNS),
    Case("x[1:] + b[1:], bf16", lambda x, b: x + b, lambda draw, n: [draw(n + 1)[1:], draw(n + 1)[1:]], RUNS),
    Case("f32 -> bf16", lambda x: x.bfloat16(), lambda draw, n: [draw(n, dtype=f32)], NARROWING),
    Case("f32 -> int8", lambda x: x.to(torch.int8), lambda draw, n: [draw(n, dtype=f32)], NARROWING),
    Case("x[:, ::5] + b, bf16", lambda x, b: x + b, lambda draw, n: [draw(n // 256, 1280)[:, ::5], draw(n // 256, 256)], STRIDED),
    Case(
        "x[:, ::5] + b, f32 and bf16",
        lambda x, b: x + b,
        lambda draw, n: [draw(n // 256, 1280, dtype=f32)[:, ::5], draw(n // 256, 256)],
        STRIDED,
    ),
    Case("x.t() copied, bf16", lambda x: x.t().contiguous(), lambda draw, n: [draw(_side(n), _side(n))], TILES),
    Case("x.t() copied, f32", lambda x: x.t().contiguous(), lambda draw, n: [draw(_side(n), _side(n), dtype=f32)], TILES),
    Case("x.t() + w, bf16", lambda x, w: x.t() + w, lambda draw, n: [draw(_side(n), _side(n)), draw(_side(n), _side(n))], TILES),
)


@dataclass(frozen=True, slots=True)
class Tried:
    """One candidate in one case: its median in microseconds, beside that of the built-in choice; or why it took no part."""

    case: str
    elements: int
    choices: Mapping[str, int]
    time_us: float | None
    built_in_us: float | None
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class TuneResult:
    """What each candidate took in each case, and what is chosen: the built-in choice unless another is faster by more than `WORTH`."""

    gpu: str
    arch: str
    tried: tuple[Tried, ...]
    choices: Mapping[str, int]
    built_in: Mapping[str, int]

    @property
    def record(self) -> TunedGpu:
        """What is kept of it."""
        source = f"measured on {self.gpu}: wideload tune, {len({(of.case, of.elements) for of in self.tried})} cases"
        return TunedGpu(self.gpu, self.arch, source, dict(self.choices))

    @property
    def scores(self) -> list[tuple[Mapping[str, int], float | None, int]]:
        """Of each candidate, how many times as fast as the built-in choice it is in the mean, and in how many cases; None where refused."""
        scores = []
        for choices in _distinct(tried.choices for tried in self.tried):
            of = [tried for tried in self.tried if tried.choices == choices]
            ratios = [tried.built_in_us / tried.time_us for tried in of if tried.built_in_us is not None and tried.time_us is not None]
            scores.append((choices, statistics.geometric_mean(ratios) if len(ratios) == len(of) else None, len(of)))
        return scores

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        tried = [{**asdict(of), "choices": dict(of.choices)} for of in self.tried]
        scores = [{"choices": dict(choices), "times_as_fast": score, "cases": cases} for choices, score, cases in self.scores]
        about = {"gpu": self.gpu, "arch": self.arch, "choices": dict(self.choices), "built_in": dict(self.built_in)}
        return {**about, "scores": scores, "tried": tried}

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """A table: each candidate, its score, its cases, and whether it is chosen; the names of the columns first."""
        rows: list[tuple[str, ...]] = [("candidate", "times as fast", "cases", "")]
        for choices, score, cases in self.scores:
            is_chosen = all(self.choices[name] == value for name, value in choices.items())
            is_built_in = all(self.built_in[name] == value for name, value in choices.items())
            note = ", ".join(word for word, holds in (("built in", is_built_in), ("chosen", is_chosen)) if holds)
            rows.append((spell_choices(choices), "refused" if score is None else f"{score:.3f}", str(cases), note))
        return rows


def spell_choices(choices: Mapping[str, int]) -> str:
    """As a table has them.

    >>> spell_choices({"accesses": 2, "threads": 256})
    'accesses 2, threads 256'
    """
    return ", ".join(f"{name} {value}" for name, value in choices.items())


def tune(
    gpu: str,
    arch: str,
    device: torch.device,
    *,
    cases: Sequence[Case] = CASES,
    sizes: Sequence[int] = SIZES,
    num_samples: int = SAMPLES,
    timer: Timer = time_cold,
    advance: Callable[[int, int], object] = lambda done, total: None,
) -> TuneResult:
    """Try what kernels can be cut by on ``device``, and return all times and the choices that were fastest.

    Choices that one kernel is cut by are tried together, the others as they are built in. Every candidate's result must be that of the
    built-in choice, bit for bit; one that NVRTC refuses or that is wrong is not chosen, and says why. ``advance`` is told how many calls
    have been timed, of how many. Raises ``DeviceError`` where memory runs out, or the timer cannot time a call.
    """
    built_in = built_in_tuning(arch)
    work = [(case, n) for case in cases for n in sizes]
    tried: list[Tried] = []
    for number, (case, n) in enumerate(work):
        seeds = itertools.count()
        draw = functools.partial(_draw, device, seeds)
        try:
            tried += _try_case(case, n, case.build(draw, n), built_in, device, num_samples, timer)
        except torch.OutOfMemoryError as error:
            raise DeviceError(f"{case.name} of {n} elements does not fit beside what else is in the GPU's memory ({error})") from None
        advance(number + 1, len(work))
    result = TuneResult(gpu, arch, tuple(tried), built_in.choices, built_in.choices)
    choices = dict(built_in.choices)
    for names in _distinct(case.choices for case in cases):
        scores = [(score, of) for of, score, _ in result.scores if tuple(of) == names and score is not None]
        best, chosen = max(scores, key=lambda scored: (round(scored[0], 3), _num_kept(scored[1], choices)), default=(0.0, {}))
        if best > WORTH:
            choices.update(chosen)
    return replace(result, choices=choices)


def _num_kept(choices: Mapping[str, int], built_in: Mapping[str, int]) -> int:
    """How many are as they are built in: of candidates that are level, the one that changes least is taken."""
    return sum(built_in[name] == value for name, value in choices.items())


def _try_case(
    case: Case, n: int, args: Sequence[torch.Tensor], built_in: Tuning, device: torch.device, num_samples: int, timer: Timer
) -> list[Tried]:
    own = {name: built_in.choices[name] for name in case.choices}
    right = _planned(case, built_in, args)(*args)
    calls: dict[str, Call] = {}
    candidates, refused = _candidates(case.choices), dict[str, str]()
    for choices in candidates:
        name = spell_choices(choices)
        try:
            f = _planned(case, built_in.with_choices(choices), args)
            if not torch.equal(_bits(f(*args)), _bits(right)):
                raise CompileError("its result is not that of the built-in choice")
            calls[name] = functools.partial(f, *args)
        except WideloadError as error:
            refused[name] = f"{type(error).__name__}: {error}"
    samples = timer(calls, device.index or 0, num_samples)
    medians = {name: statistics.median(of) for name, of in samples.items()}
    built_in_us = medians.get(spell_choices(own))
    return [
        Tried(case.name, n, choices, medians.get(name), built_in_us, refused.get(name))
        for choices, name in ((choices, spell_choices(choices)) for choices in candidates)
    ]


def _planned(case: Case, tuning: Tuning, args: Sequence[torch.Tensor]) -> FusedFunction:
    """The function, with its kernel for these arguments cut as ``tuning`` says: once planned, it stays so."""
    f = fuse(case.fn, name="tuned")
    with trying(tuning):
        f(*args)
    return f


def _candidates(names: Sequence[str]) -> list[dict[str, int]]:
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(ALLOWED[name] for name in names))]


def _draw(device: torch.device, seeds: itertools.count[int], *shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return random_tensor(shape, dtype, device=device, seed=next(seeds))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Integers, which compare NaNs and the signs of zeros as well."""
    return tensor.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def _distinct(items: Any) -> list[Any]:
    found: list[Any] = []
    for item in items:
        if item not in found:
            found.append(item)
    return found
