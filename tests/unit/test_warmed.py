"""Warming calls up: which kernels are compiled and found, in how many threads, and what is said of calls that fail."""

from __future__ import annotations

import importlib
import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import wideload as wl
from wideload import cache
from wideload.nvrtc import Cubin
from wideload.plan import built_in_tuning

bf16 = torch.bfloat16

gate = wl.fuse(lambda x, y: torch.sigmoid(x) * y, name="gate")
scale = wl.fuse(lambda x, s: x * s + 1, name="scale")


@wl.fuse
def branches(x: torch.Tensor) -> torch.Tensor:
    return x if x > 0 else -x


@wl.fuse
def fails(x: torch.Tensor) -> torch.Tensor:
    raise KeyError("of the user's own")


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for NVRTC, in a process that has compiled nothing; returns the names of the kernels that it was given."""
    asked: list[str] = []

    def compile_text(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        asked.append(f"{name} {arch}")
        if name.startswith("refused"):
            raise wl.CompileError("NVRTC refused it")
        return Cubin(b"code", arch, name, 24, 0, 0, 0, 0, log="ptxas info")

    for memory in ("_cubins", "_locks", "_compiled"):
        monkeypatch.setattr(cache, memory, type(getattr(cache, memory))())
    monkeypatch.setattr(cache, "compile_cubin", compile_text)
    return asked


def test_the_calls_themselves_compile_nothing(compiler: list[str]) -> None:
    x, half = meta(64, 1024), meta(63, 1000)
    warm = wl.warmup([(gate, (x, x.clone())), (scale, {"x": x, "s": 0.5}), (gate, (half[1:], half[:1]))], target="h200")
    assert (warm.errors, warm.num_compiled) == ({}, 3)
    assert [(k.function, k.kernel, k.arch, k.found) for k in warm.kernels] == [
        ("gate", "gate_dense", "sm_90", "compiled"),
        ("scale", "scale_dense", "sm_90", "compiled"),
        ("gate", "gate_rows", "sm_90", "compiled"),
    ]
    assert sorted(compiler) == ["gate_dense sm_90", "gate_rows sm_90", "scale_dense sm_90"]
    other = meta(2, 512)
    for plan in (
        gate.plan(x, x.clone(), target="sm_90"),
        scale.plan(other, 2.5, target="h100"),
        gate.plan(half[1:], half[:1], target="h200"),
    ):
        assert plan.cubin == b"code"
    assert len(compiler) == 3
    again = wl.warmup([(gate, (x, x.clone()))], target="h200")
    assert [kernel.found for kernel in again.kernels] == ["in memory"]
    assert [kernel.found for kernel in wl.warmup([(gate, (x, x.clone()))], target="a100").kernels] == ["compiled"]


def test_a_kernel_that_calls_share_is_compiled_once(compiler: list[str]) -> None:
    warm = wl.warmup([(gate, (meta(n), meta(n))) for n in (8, 1000, 4096)], target="h200")
    assert (len(warm.kernels), len(compiler)) == (1, 1)


def test_gradients_and_results_into_given_memory(compiler: list[str]) -> None:
    x = meta(4096)
    assert {k.kernel for k in wl.warmup([(gate, (x, x.clone()))], target="h200", backward=True).kernels} == {
        "gate_dense",
        *(f"{name}" for name in [gate.plan_backward(x, x.clone(), target="h200").kernels[0].name]),
    }
    before = len(compiler)
    for out in (x.clone(), x):  # one kernel for both
        wl.warmup([(scale, {"x": x, "s": 2.0, "out": out})], target="h200")
    assert len(compiler) == before + 1


def test_a_fake_tensor_counts_as_what_it_stands_for(compiler: list[str]) -> None:
    with FakeTensorMode():
        x = torch.empty(65, 1024, dtype=bf16)
        views = [(x[1:], x[:-1]), (x.view(-1)[1:], x.view(-1)[1:]), (x.t(), torch.empty(1024, 65, dtype=bf16))]
    warm = wl.warmup([(gate, view) for view in views], target="h200")
    assert not warm.errors
    y = meta(65, 1024)
    real = [(y[1:], y[:-1]), (y.view(-1)[1:], y.view(-1)[1:]), (y.t(), meta(1024, 65))]
    want = [kernel.source for view in real for kernel in gate.plan(*view, target="h200").kernels]
    assert len(compiler) == len({*want})
    for view in real:
        assert gate.plan(*view, target="h200").cubin
    assert len(compiler) == len({*want})


def test_a_fake_number_in_the_hosts_memory_stays_one() -> None:
    with FakeTensorMode():
        x, s = torch.empty(64, dtype=bf16, device="meta"), torch.empty((), dtype=bf16)
    (kernel,) = wl.warmup([(gate, (x, s))], target="h200").kernels
    assert kernel.kernel == "gate_dense"
    assert cache.is_in_memory(gate.plan(meta(64), torch.zeros((), dtype=bf16), target="h200").source, arch="sm_90", name="gate_dense")


def test_errors_are_named_and_cost_the_others_nothing(compiler: list[str]) -> None:
    refused = wl.fuse(lambda x: x + 1, name="refused")
    x = meta(64)
    warm = wl.warmup(
        [(branches, (x,)), (refused, (x,)), (fails, (x,)), (gate, (x,)), (scale, (x, 2.0)), (refused, (x[:9],))], target="h200"
    )
    assert [kernel.function for kernel in warm.kernels] == ["scale"]
    assert {name: type(error) for name, error in warm.errors.items()} == {
        "0: branches": wl.TraceError,
        "2: fails": KeyError,
        "3: gate": wl.TraceError,
        "1: refused": wl.CompileError,
        "5: refused": wl.CompileError,
    }
    with pytest.raises(wl.CompileError, match=r"5 calls cannot be warmed up:\n0: branches: a branch"):
        warm.check()
    wl.warmup([(scale, (x, 2.0))], target="h200").check()
    assert json.loads(json.dumps(warm.to_dict()))["errors"]["1: refused"] == "CompileError: NVRTC refused it"
    assert "5: refused: CompileError: NVRTC refused it" in str(warm)


@pytest.mark.parametrize("calls", [None, 5, "swiglu", (gate, (meta(8), meta(8)))])
def test_what_is_no_list_of_calls(calls: Any) -> None:
    with pytest.raises(wl.TraceError, match=r"wl\.warmup got .*allowed: a list of calls"):
        wl.warmup(calls, target="h200")


def test_a_full_disk_costs_the_calls_of_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_text(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        if "const bf16*" in source:
            raise OSError(28, "No space left on device")
        return Cubin(b"code", arch, name, 24, 0, 0, 0, 0, log="ptxas info")

    monkeypatch.setattr(cache, "compile_cubin", compile_text)
    warm = wl.warmup([(gate, (meta(8, dtype=dtype), meta(8, dtype=dtype))) for dtype in (bf16, torch.float32)], target="h200")
    assert (list(warm.errors), len(warm.kernels)) == (["0: gate"], 1)


def test_as_many_threads_as_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three kernels meet in the compiler, which goes on when all are there; with two threads they never would."""
    meeting = threading.Barrier(3, timeout=10)

    def compile_text(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        meeting.wait()
        return Cubin(b"code", arch, name, 24, 0, 0, 0, 0, log="ptxas info")

    monkeypatch.setattr(cache, "compile_cubin", compile_text)
    calls: list[tuple[wl.FusedFunction, tuple[Any, ...]]] = [
        (gate, (meta(8, dtype=d), meta(8, dtype=d))) for d in (bf16, torch.float16, torch.float32)
    ]
    assert wl.warmup(calls, workers=3, target="h200").errors == {}
    with pytest.raises(wl.RangeError, match=r"workers of wl\.warmup is 0; allowed: an int"):
        wl.warmup(calls, workers=0, target="h200")


def test_progress_counts_kernels() -> None:
    told: list[tuple[int, int]] = []
    wl.warmup(
        [(gate, (meta(8, dtype=d), meta(8, dtype=d))) for d in (bf16, torch.float32)], target="h200", advance=lambda *at: told.append(at)
    )
    assert told == [(1, 2), (2, 2)]


def test_without_a_target_it_is_the_gpu_that_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(wl.warmup([(gate, (meta(8), meta(8)))]).errors["0: gate"], wl.DeviceError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(importlib.import_module("wideload.warmed"), "tuning_of", lambda device: built_in_tuning("sm_89"))
    assert [kernel.arch for kernel in wl.warmup([(gate, (meta(8), meta(8)))]).kernels] == ["sm_89"]


@pytest.mark.parametrize("call", [gate, (gate,), (gate, meta(8)), (lambda x: x, (meta(8),)), SimpleNamespace()])
def test_what_is_no_call_is_refused_before_anything_is_compiled(call: Any, compiler: list[str]) -> None:
    with pytest.raises(wl.TraceError, match="allowed: \\(function, arguments\\)"):
        wl.warmup([(gate, (meta(8), meta(8))), call], target="h200")
    assert compiler == []
