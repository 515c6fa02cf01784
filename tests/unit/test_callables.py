"""Explanations of what is neither fused nor written by hand: bytes once, and the measured time beside them."""

from __future__ import annotations

import pytest
import torch

import wideload as wl
from wideload.analyze.explain import GpuFigures
from wideload.analyze.opaque import explain_opaque
from wideload.errors import DeviceError, WideloadError
from wideload.gpus import find_target

N = 2**20


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def test_every_argument_and_every_result_once() -> None:
    x = meta(N)
    explanation = wl.explain(lambda x, y: (x + y["b"], x.sum()), x, {"b": meta(N)}, target="h200")
    assert (explanation.bytes_read.value, explanation.bytes_written.value) == (8 * N, 4 * N + 4)
    assert {f.kind for f in (explanation.minimal, explanation.bytes_read)} == {"assumed"}
    assert explanation.least_time is not None
    assert explanation.least_time.value == (12 * N + 4) / 4.8e6
    assert [verdict.limit for verdict in explanation.verdicts] == ["memory"]
    assert "kernels unknown" in str(explanation)
    assert explanation.efficiency is None
    assert "efficiency" not in str(explanation)


def test_a_view_is_not_written() -> None:
    assert wl.explain(lambda x: x[1:], meta(N), target="h200").bytes_written.value == 0


def test_fused_functions_and_kernels_explain_themselves() -> None:
    assert wl.explain(wl.ops.add, meta(N), meta(N), target="h200").eager is not None
    double = wl.raw('extern "C" __global__ void f(float* y) { y[blockIdx.x * blockDim.x + threadIdx.x] = 1; }', "f")
    assert wl.explain(double, meta(N), target="h200").kernels[0].family == "raw"


def test_what_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"exp got no tensor on a GPU, and no target"):
        wl.explain(torch.exp, torch.zeros(3))
    with pytest.raises(WideloadError, match=r"exp is neither fused nor written by hand"):
        wl.explain(torch.exp, torch.zeros(3), target="h200", ncu=True)


def test_a_measured_time_is_judged() -> None:
    figures = GpuFigures(find_target("h200"))
    slow = explain_opaque("f", figures, 8 * N, 4 * N, N, 100.0)
    assert [verdict.limit for verdict in slow.verdicts] == ["unexplained", "memory"]
    assert slow.verdicts[0].effect.value == pytest.approx(100 / (12 * N / (4800 * 0.906 * 1e3)))
    assert "wl.fuse" in slow.verdicts[0].next_step
    wall = explain_opaque("f", figures, 8 * N, 4 * N, N, 12 * N / (4800 * 0.906 * 1e3))
    assert [verdict.limit for verdict in wall.verdicts] == ["memory"]
    assert wall.verdicts[0].finding.startswith("Memory-bound at the wall")
