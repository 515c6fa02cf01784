"""Results as a GPU would give them, with figures that are easy to reckon with: nothing here was measured."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch

import wideload as wl
from wideload.analyze.explain import Explanation
from wideload.analyze.figure import Figure
from wideload.measure.environment import Environment, GpuState
from wideload.measure.labels import Label
from wideload.measure.operands import OperandInfo
from wideload.measure.result import BenchResult, Contender
from wideload.measure.roofline import Roofline
from wideload.measure.statistics import summarize
from wideload.measure.sweep import Point, Sweep

UUID = "GPU-12345678"
NOMINAL_GBPS = 4000.0


def contender(name: str, samples: Sequence[float], *, nbytes: int = 6_000_000, labels: tuple[Label, ...] = ()) -> Contender:
    times = summarize(samples)
    bandwidth = nbytes / times.median * 1e6
    return Contender(name, "cold", times, 0.004, "precision", 1, 1, 12.5, bandwidth, labels)


def bench_result(*contenders: Contender, nbytes: int | None = 6_000_000, is_gpu: bool = True) -> BenchResult:
    where = Environment(
        "cuda:0" if is_gpu else "cpu", "0.1.0", "abc123", "2.11.0", "13.0", "3.12.3", "Xeon", 16, "2026-01-01T00:00:00+00:00"
    )
    if is_gpu:
        where = dataclasses.replace(where, gpu="NVIDIA H200", gpu_uuid=UUID, driver="580", num_sms=132, l2_bytes=60 * 2**20)
    return BenchResult(
        subject=contenders[0],
        against=contenders[1:],
        checked_against="eager",
        minimal_bytes=nbytes,
        nominal_bytes_per_second=NOMINAL_GBPS * 1e9 if is_gpu else None,
        arguments=(OperandInfo("x", "bf16", (1000, 1000), (1000, 1), 0, "cuda:0"),),
        seed=0,
        gpu_state=GpuState(1980, 1965, (), ()) if is_gpu else GpuState(None, None, None, None),
        environment=where,
    )


def sweep() -> Sweep:
    """At n = 2^20 to 2^27: 6 n bytes in 1 us + the time at 3.6 and at 1.8 TB/s."""
    points = []
    for exponent in range(20, 28):
        nbytes = 6 * 2**exponent
        times = [1 + nbytes / gbps / 1e3 for gbps in (3600, 1800)]
        both = [
            contender(name, [0.99 * time, time, 1.01 * time], nbytes=nbytes) for name, time in zip(("fused", "eager"), times, strict=True)
        ]
        points.append(Point({"n": 2**exponent}, bench_result(*both, nbytes=nbytes)))
    return Sweep(tuple(points))


def roofline() -> Roofline:
    def measured(value: float, unit: str) -> Figure:
        return Figure(value, unit, "measured", "cold L2")

    return Roofline(
        device="NVIDIA H200",
        uuid=UUID,
        driver="580",
        arch="sm_90",
        nominal=Figure(NOMINAL_GBPS, "GB/s", "computed", "device attributes"),
        by_table=None,
        ceilings={"1R1W": measured(3500, "GB/s"), "2R1W": measured(3600, "GB/s"), "1R0W": measured(3800, "GB/s")},
        launch_floor={"in a graph": measured(1.1, "us")},
        ridges={
            "fp32": Figure(16, "FLOP/B", "computed", "64 TFLOP/s / nominal"),
            "bf16 tensor": Figure(256, "FLOP/B", "computed", "1024 TFLOP/s / nominal"),
            "special functions": Figure(1, "op/B", "computed", "4 Top/s / nominal"),
        },
        notes=("nobody measured this",),
    )


def explanation(*, measured_us: float | None = None) -> Explanation:
    """Of silu(gate) * up in bf16: 6 bytes an element, with 3 fp32 and 1.5 special-function instructions an element."""
    found = _explain_swiglu()
    instructions = {
        unit: Figure({"fp32": 3, "special": 1.5}.get(unit, 0), "an element", "computed", "made up") for unit in ("fp32", "special")
    }
    kernels = tuple(dataclasses.replace(kernel, instructions=instructions, unit_times={}) for kernel in found.kernels)
    time = None if measured_us is None else Figure(measured_us, "us", "measured", "wl.bench")
    return dataclasses.replace(found, kernels=kernels, measured_time=time)


@functools.cache
def _explain_swiglu() -> Explanation:
    return wl.ops.swiglu.explain(*(torch.empty(2**20, dtype=torch.bfloat16, device="meta") for _ in range(2)), target="h200")
