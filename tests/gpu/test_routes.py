"""The ladder's other routes on a GPU: the program, the extension, the lanes of a partial warp, and when errors are told."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wideload as wl
from tests.nvcc import nvcc
from wideload.cli import app
from wideload.cuda_source import read_cuda
from wideload.ladder.routes import build_extension, build_standalone, check_extension, run_standalone
from wideload.ladder.toolkit import Nvcc
from wideload.launch import device_arch

__all__ = ["nvcc"]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def program(nvcc: Nvcc, tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_standalone(device_arch(torch.cuda.current_device()), tmp_path_factory.mktemp("standalone") / "vector_add").path


@pytest.fixture(scope="module")
def extension(nvcc: Nvcc) -> Any:
    if torch.version.cuda is None:
        pytest.skip("needs a torch with CUDA")
    return build_extension(device_arch(torch.cuda.current_device()))[1]


# ---- the program


@pytest.mark.parametrize("n", [1, 7, 9, 4097, 1 << 26])
def test_the_program_is_right(program: str, n: int) -> None:
    times = run_standalone(program, n)
    assert [(time.dtype, time.fault) for time in times] == [("f32", ""), ("bf16", "")]
    assert all(time.time_us for time in times)
    if n >= 1 << 26:
        assert all(time.share_of_nominal and time.share_of_nominal < 1 for time in times)


def test_the_program_adds_nothing_up(program: str) -> None:
    assert run_standalone(program, 0) == ()


def test_the_program_exits_with_1_where_a_call_fails(program: str) -> None:
    with pytest.raises(wl.WideloadError, match=r"exited with 1: .*vector_add\.cu:\d+: cudaSetDevice.*cudaErrorInvalidDevice"):
        run_standalone(program, 100, torch.cuda.device_count())
    with pytest.raises(wl.WideloadError, match=r"exited with 1: .*vector_add\.cu:\d+: cudaMalloc.*cudaErrorMemoryAllocation"):
        run_standalone(program, 1 << 38)


def test_the_program_finds_a_kernel_that_is_wrong(nvcc: Nvcc, tmp_path: Path) -> None:
    folder = Path(str(resources.files("wideload"))) / "ladder"
    shutil.copytree(folder, tmp_path / "ladder")
    for file, edit in (("vector_add_f32.cu", ("if (i < n) ", "if (i + 1 < n) ")), ("vector_add_bf16.cu", ("__hadd(x[i], y[i])", "x[i]"))):
        text = (tmp_path / "ladder" / file).read_text()
        assert edit[0] in text
        (tmp_path / "ladder" / file).write_text(text.replace(*edit))
    program = tmp_path / "add"
    arch = device_arch(torch.cuda.current_device())
    source = tmp_path / "ladder" / "standalone" / "vector_add.cu"
    subprocess.run([nvcc.path, f"-arch={arch}", f"-L{nvcc.libraries}", source, "-o", program], check=True)
    assert subprocess.run([program, "4097"], capture_output=True).returncode == 1
    last, every = run_standalone(str(program), 1000)
    assert last.fault == "1 of 1000 results are wrong"
    assert re.fullmatch("9[0-9][0-9] of 1000 results are wrong", every.fault)  # to some x[i], bf16 adds a y[i] that is lost


def test_the_command_builds_and_runs_the_program(nvcc: Nvcc, tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["ladder", "--route", "standalone", "--output", str(tmp_path / "add"), "--json"])
    assert run.exit_code == 0, run.output
    assert [time["dtype"] for time in json.loads(run.stdout)["times"]] == ["f32", "bf16"]


# ---- the extension


def test_the_extension_is_right(extension: Any) -> None:
    assert check_extension(extension, "cuda") == ()
    x = wl.random_tensor((3, 0, 5), device="cuda")
    assert extension.vector_add(x, x).shape == (3, 0, 5)


def test_the_extension_names_the_argument_that_it_refuses(extension: Any) -> None:
    x = torch.ones(4, 6, device="cuda")
    for args, error, message in (
        ((x.cpu(), x), ValueError, "argument x is on cpu; allowed: a CUDA device"),
        ((x, x.cpu()), ValueError, "argument y is on cpu, x on cuda:0"),
        ((x.half(), x.half()), TypeError, "argument x is Half; allowed: Float, BFloat16"),
        ((x, x.bfloat16()), TypeError, "argument y is BFloat16, x is Float"),
        ((x, x[:2]), ValueError, r"argument y has shape \[2, 6\], x has \[4, 6\]"),
        ((x.t(), x.t()), ValueError, r"argument x has strides \[1, 6\]; allowed: contiguous"),
        ((x.new_ones(6, 4), x.t()), ValueError, r"argument y has strides \[1, 6\]; allowed: contiguous"),
    ):
        with pytest.raises(error, match=message):
            extension.vector_add(*args)


def test_the_extension_uses_the_current_stream(extension: Any) -> None:
    x, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        x.fill_(1)
        out = extension.vector_add(x, x)  # on another stream, it would have read zeros
    side.synchronize()
    assert torch.equal(out, torch.full_like(out, 2))


@pytest.mark.big(24)
def test_the_extension_indexes_by_64_bits(extension: Any) -> None:
    n = 2**32 + 9
    x = torch.ones(n, dtype=torch.bfloat16, device="cuda")
    out = extension.vector_add(x, x)
    assert [float(out[i]) for i in (0, 2**31, 2**32, n - 1)] == [2.0] * 4


def test_the_command_builds_and_runs_the_extension(extension: Any) -> None:
    run = CliRunner().invoke(app, ["ladder", "--route", "extension", "--json", "--max-seconds", "0.2"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["route"], report["faults"]) == ("extension", [])
    assert all(time["time_us"] and time["torch_us"] for time in report["times"])


# ---- lanes of a partial warp

TAIL = read_cuda(resources.files("wideload") / "ladder" / "warps", "tail.cu")


@pytest.mark.parametrize("n", [1, 7, 31, 32, 33, 1000])
def test_the_lanes_behind_the_end_bring_what_changes_nothing(n: int) -> None:
    x, out = torch.arange(1.0, n + 1, device="cuda"), torch.full((n,), -1.0, device="cuda")
    wl.raw(TAIL, "sum_with_next", block=64)(x, out, n)
    assert out.tolist() == [k if k % 32 == 0 or k == n else 2 * k + 1 for k in range(1, n + 1)]


def test_a_ballot_says_which_lanes_have_an_element() -> None:
    out = torch.zeros(2 * 2, dtype=torch.int32, device="cuda")
    wl.raw(TAIL, "lanes_within", grid=(2, 1), block=(16, 4))(out, 19, 3)
    # By hand: a warp is two rows of 16; the second block has 3 columns, and row 3 is none.
    assert [mask & 0xFFFFFFFF for mask in out.tolist()] == [0xFFFFFFFF, 0x0000FFFF, 0x00070007, 0x00000007]


# ---- errors

_ASTRAY = """
import torch, wideload as wl
x = torch.zeros(1, device="cuda")
y = x + 1
torch.cuda.synchronize()
stray = wl.raw('extern "C" __global__ void stray(float* x, long long far) { x[far] = 1; }', "stray", grid=1, block=1)
def told_at(where, call):
    try:
        call()
    except Exception as error:
        print(where, "illegal" in str(error).lower(), flush=True)
told_at("call", lambda: stray(x, 1 << 42))
told_at("wait", torch.cuda.synchronize)
told_at("next", lambda: (y + 1).sum().item())
"""


@pytest.mark.parametrize(("is_blocking", "first"), [(False, "wait True"), (True, "call True")])
def test_an_error_of_a_kernel_is_told_at_the_next_wait_and_stays(is_blocking: bool, first: str) -> None:
    """In a process of its own: nothing works on its GPU afterwards."""
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1" if is_blocking else "0"}
    done = subprocess.run([sys.executable, "-c", _ASTRAY], capture_output=True, text=True, env=environment, timeout=120)
    told = done.stdout.splitlines()
    assert told[0] == first, done.stderr
    assert told[-1] == "next True"


@pytest.fixture
def sanitizer() -> str:
    found = shutil.which("compute-sanitizer")
    if found is None:
        pytest.skip("needs compute-sanitizer")
    return found


@pytest.mark.parametrize("tool", ["memcheck", "initcheck"])
def test_compute_sanitizer_finds_nothing_in_the_program(program: str, sanitizer: str, tool: str) -> None:
    done = subprocess.run([sanitizer, "--tool", tool, "--error-exitcode", "9", program, "4097"], capture_output=True, text=True)
    if "Device not supported" in done.stdout + done.stderr:
        pytest.skip("compute-sanitizer does not support this machine")
    assert done.returncode == 0, done.stdout
    assert "ERROR SUMMARY: 0 errors" in done.stdout
