"""Functions that run where the NVRTC library cannot be loaded, from cubins that another process has built."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import wideload as wl

pytestmark = pytest.mark.gpu

bf16 = torch.bfloat16

WITHOUT_NVRTC = """
from cuda import pathfinder

load = pathfinder.load_nvidia_dynamic_lib

def load_all_but_nvrtc(name):
    if name == "nvrtc":
        raise pathfinder.DynamicLibNotFoundError("hidden")
    return load(name)

pathfinder.load_nvidia_dynamic_lib = load_all_but_nvrtc  # before the bindings take it from there
import torch
import torch.nn.functional as F
import wideload as wl
from wideload import cache, nvrtc

nvrtc._WHEELS = ()
assert not nvrtc.has_nvrtc()

def randn(*shape):
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

def check(got, want):
    torch.testing.assert_close(got, want.to(got.dtype))

"""


def run_without_nvrtc(program: str, folder: Path) -> str:
    environment = {**os.environ, "WIDELOAD_CACHE": "0", "WIDELOAD_BUILT_DIR": str(folder)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NVRTC + program], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def here() -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=bf16, device="meta")


def test_built_functions_run(tmp_path: Path) -> None:
    x = meta(64, 128)
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], here(), tmp_path, backward=True)
    wl.ops.bias_gelu.build([(meta(64, 128), meta(128))], here(), tmp_path)
    wl.ops.add.build([{"x": x, "y": meta(64, 128), "out": x}], here(), tmp_path)
    wl.ops.ema_.build([(meta(64), meta(64), 0.5)], here(), tmp_path)
    program = """
for shape in ((64, 128), (1000, 14336), (7,)):
    gate, up = randn(*shape), randn(*shape)
    for _ in range(2):
        check(wl.ops.swiglu(gate, up), F.silu(gate.float()) * up.float())
x, bias = randn(64, 128), randn(128)
check(wl.ops.bias_gelu(x, bias), F.gelu(x.float() + bias.float()))
y = randn(64, 128)
want = x + y
assert wl.ops.add(x, y, out=x) is x
check(x, want)
average, source = randn(64), randn(64)
want = 0.5 * average.float() + 0.5 * source.float()
check(wl.ops.ema_(average, source, 0.5), want)
gate, up = (randn(9, 33).requires_grad_() for _ in range(2))
wl.ops.swiglu(gate, up).backward(randn(9, 33))
assert gate.grad.isfinite().all() and up.grad.isfinite().all()
print(cache.num_compilations(), nvrtc.has_nvrtc())
"""
    assert run_without_nvrtc(program, tmp_path).split() == ["0", "False"]


def test_calls_that_were_not_built_say_what_builds_them(tmp_path: Path) -> None:
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], here(), tmp_path)
    program = """
def said(call):
    try:
        call()
    except wl.CompileError as error:
        print(str(error).splitlines()[0])
    else:
        raise AssertionError("it ran")

gate, up = randn(64, 128), randn(64, 128)
said(lambda: wl.ops.swiglu(gate[:, 1:], up[:, 1:]))
wl.ops.swiglu(gate, up, out=gate)  # in place it is the kernel that was built
said(lambda: wl.ops.swiglu.foreach([gate, up], [up, gate]))
result = wl.ops.swiglu(gate.requires_grad_(), up)
said(lambda: result.backward(randn(64, 128)))
"""
    lines = run_without_nvrtc(program, tmp_path).splitlines()
    command = f"wideload build swiglu {{}} --target {here()} -o {tmp_path}"
    views = " ".join(["'(bf16[8191]@1).as_strided((64, 127), (128, 1))'"] * 2)
    assert lines[0].endswith(command.format(views))
    assert lines[1].endswith("no build adds it: it is of a foreach call, of a second derivative, or written by hand.")
    assert "kernel swiglu_backward_dense of swiglu" in lines[2]
    assert lines[2].endswith(command.format("'bf16[64, 128]' 'bf16[64, 128]' --grad gate"))


def test_a_folder_for_another_gpu_is_refused(tmp_path: Path) -> None:
    other = "sm_75" if here() != "sm_75" else "sm_80"
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], other, tmp_path)
    program = """
try:
    wl.ops.swiglu(randn(64, 128), randn(64, 128))
except wl.CompileError as error:
    print(error)
"""
    assert f"for {here()} ({tmp_path} has it for {other})" in run_without_nvrtc(program, tmp_path)
