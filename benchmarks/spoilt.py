"""Kernels that were spoilt on purpose: what each is launched with, and which limit holds it back.

The kernels themselves stand in ``spoilt.cu``; it must not know how they are explained or timed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import wideload as wl
from wideload.analyze.explain import Limit

_KERNEL = re.compile(r"^// (\w+): .*?(?=^// \w+: |\Z)", re.MULTILINE | re.DOTALL)
SOURCES = {found[1]: found[0] for found in _KERNEL.finditer((Path(__file__).parent / "spoilt.cu").read_text(encoding="utf-8"))}
"""Each kernel's text, by its name."""

N = 1 << 26
"""Floats: 256 MiB, several times the L2 of any GPU."""
SIDE = 1 << 13
"""Of a square matrix of as many."""
_SMALL_GRID = 32
_TAIL_BLOCKS = 8
"""More than fit the GPU at once."""

Make = Callable[..., torch.Tensor]
"""``make(*shape, dtype=...)``: a tensor of random values, or one on ``meta``."""


@dataclass(frozen=True)
class Spoilt:
    """A kernel, its launch, and the limit that explain must name first."""

    name: str
    cause: Limit
    arguments: Callable[[Make], Sequence[Any]]
    grid: Any = None
    block: Any = 256

    @property
    def kernel(self) -> wl.RawKernel:
        """The callable."""
        return wl.raw(SOURCES[self.name], self.name, grid=self.grid, block=self.block)


def _vectors(make: Make) -> Sequence[Any]:
    """Floats to read and to write, and how many vectors of four they are."""
    return make(N), make(N), N // 4


def _squares(make: Make) -> Sequence[Any]:
    return make(SIDE, SIDE), make(SIDE, SIDE), SIDE


def spoilt_kernels(sms: int) -> tuple[Spoilt, ...]:
    """All of them, for a GPU of so many SMs, each with room for 2048 threads."""
    bf16, i32 = torch.bfloat16, torch.int32
    return (
        Spoilt("narrow", "narrow", lambda make: (make(4 * N, dtype=bf16), make(4 * N, dtype=bf16), 4 * N)),
        Spoilt("shared_occupancy", "in_flight", _vectors, N // 4 // 64, 64),
        Spoilt("register_occupancy", "in_flight", _vectors, N // 4 // (128 * 16), 128),
        Spoilt("strided", "sectors", lambda make: (make(8 * N), make(N), N)),
        Spoilt("misaligned", "misaligned", lambda make: (make(N + 1)[1:], make(N + 1)[1:], N), N // 1024),
        Spoilt("structs", "sectors", lambda make: (make(3 * N), make(N), N)),
        Spoilt("scattered", "sectors", lambda make: (make(N), make(N, dtype=i32), make(N), N)),
        Spoilt("small_grid", "small_grid", _vectors, _SMALL_GRID),
        Spoilt("tail", "tail", _vectors, sms * (2048 // 256) + _TAIL_BLOCKS),
        Spoilt("special", "special", _vectors, N // 4 // 256),
        Spoilt("doubles", "fp64", _vectors, N // 4 // 256),
        Spoilt("spilled", "spills", lambda make: (make(N), make(N)), N // (64 * 1024), 1024),
        Spoilt("uncoalesced", "uncoalesced", _squares, (SIDE // 32, SIDE // 8), (32, 8)),
        Spoilt("divergent", "divergent", lambda make: (make(N), make(N), N)),
        Spoilt("bank_conflicts", "bank_conflicts", _squares, (SIDE // 32, SIDE // 32), (32, 8)),
    )
