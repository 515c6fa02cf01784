"""Kernels cut in every way that is allowed: whatever a tuning chooses, the results are the same, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from wideload.plan import ALLOWED, DEFAULT, Tuning
from wideload.tuned import trying

pytestmark = pytest.mark.usefixtures("full_blocks")

bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8

CUTS = [replace(DEFAULT, **{name: value}) for name, values in ALLOWED.items() for value in values if value != getattr(DEFAULT, name)] + [
    Tuning("sm_90", "", accesses=4, narrowing_accesses=4, threads=512, strided_elements=8, tile_bytes=16384, tile_threads=256),
    Tuning("sm_90", "", accesses=2, narrowing_accesses=1, threads=64, strided_elements=1, tile_bytes=32768, tile_threads=256),
]


def ramp(n: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small integers: sums and products of a few are exact in every dtype."""
    return ((torch.arange(n) + start) % 13).to(dtype)


def name_of(tuning: Tuning) -> str:
    return " ".join(f"{name}={value}" for name, value in tuning.choices.items() if value != getattr(DEFAULT, name))


@pytest.mark.parametrize("tuning", CUTS, ids=name_of)
def test_every_cut_is_right(tuning: Tuning) -> None:
    x, b, row = ramp(4200, bf16), ramp(4200, bf16, 5), ramp(100, bf16, 3)
    matrix, bytes_ = x[:4200].view(42, 100), ramp(4200, i8)
    square, wide = ramp(260 * 131, bf16).view(260, 131), ramp(4200, f32)
    calls = [
        (
            wl.fuse(lambda x, b: x * 3 + b, name="run"),
            [(x, b), (x[1:], b[1:]), (x[1:-3], b[4:]), (x[:7], b[1:8]), (bytes_[5:], bytes_[2:-3])],
        ),
        (
            wl.fuse(lambda x, y: x + y, name="row"),
            [(matrix, row), (matrix[:, 1:-1], row[2:]), (matrix[::3, ::2], row[::2]), (matrix, row[5])],
        ),
        (wl.fuse(lambda x: x.to(bf16) + 1, name="narrow"), [(wide,), (wide[3:],), (bytes_,)]),
        (wl.fuse(lambda x, y: x + y, name="any"), [(x[:4000].view(40, 20, 5).permute(2, 0, 1), row[:20]), (x[::11], b[::11])]),
        (wl.fuse(lambda x: x.t().contiguous(), name="turned"), [(square,), (square[1:, :128],), (bytes_.view(42, 100),)]),
    ]
    for f, each in calls:
        for args in each:
            with trying(tuning):
                got = run_emulated(f, *args)
            want = f.reference(*args)
            assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
            assert torch.equal(got, want), (f.__name__, [tuple(arg.shape) for arg in args])


def test_strips_are_cut_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.plan.strips.LEAST_STRIPS", 1)
    f = wl.fuse(lambda x, b: torch.nn.functional.gelu(x + b), name="strip")
    x, b = torch.randn(16, 256, dtype=f32), torch.randn(256, dtype=f32)
    results = []
    for tuning in (DEFAULT, replace(DEFAULT, threads=256), replace(DEFAULT, accesses=2, threads=64)):
        with trying(tuning):
            assert f.plan(x, b, target="sm_90").kernels[0].plan.variant.family == "strips"
            results.append(run_emulated(f, x, b))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
