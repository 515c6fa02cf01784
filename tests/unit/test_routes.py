"""The ladder's program and its extension of torch: built where nvcc is, and what is said where something is missing or wrong."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests.nvcc import nvcc
from wideload.analyze.targets import read_images
from wideload.cli import app
from wideload.errors import CompileError, WideloadError
from wideload.ladder import routes, toolkit
from wideload.ladder.routes import (
    SOURCES,
    Route,
    RouteTime,
    build_extension,
    build_standalone,
    check_extension,
    run_standalone,
    time_extension,
)
from wideload.ladder.toolkit import Nvcc, find_nvcc

__all__ = ["nvcc"]

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["ladder", *words])


# ---- the program


def test_nvcc_builds_the_program_for_the_architecture_asked_for(nvcc: Nvcc, tmp_path: Path) -> None:
    built = build_standalone("sm_80", tmp_path / "add")
    assert (built.arch, built.nvcc) == ("sm_80", nvcc.version)
    assert {image.name for image in read_images(Path(built.path))} >= {"sm_80", "compute_80"}
    assert os.access(built.path, os.X_OK)


def test_the_program_builds_by_the_command_in_its_head_without_warnings(nvcc: Nvcc, tmp_path: Path) -> None:
    words = next(line for line in SOURCES[Route.STANDALONE].read_text().splitlines() if "nvcc -O3" in line).partition("&&")[0].split()[1:]
    assert words == ["nvcc", "-O3", "-arch=sm_90", "vector_add.cu", "-o", "vector_add"]
    strict = [str(nvcc.path), *words[1:3], "-Werror", "all-warnings", f"-L{nvcc.libraries}", words[3], "-o", str(tmp_path / "add")]
    subprocess.run(strict, cwd=SOURCES[Route.STANDALONE].parent, check=True)


def test_a_program_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "add").write_text("mine")
    run = command("--route", "standalone", "--target", "a100", "--output", str(tmp_path / "add"))
    assert run.exit_code == 1
    assert "is there already, and is not overwritten" in run.output
    assert (tmp_path / "add").read_text() == "mine"


@needs_no_gpu
def test_a_call_that_fails_names_its_line_and_the_error(nvcc: Nvcc, tmp_path: Path) -> None:
    built = build_standalone("sm_90", tmp_path / "add")
    done = subprocess.run([built.path], capture_output=True, text=True)
    source = SOURCES[Route.STANDALONE].read_text().splitlines()
    line = next(number for number, text in enumerate(source, 1) if "CHECK(cudaSetDevice" in text)
    assert done.returncode == 1
    assert f"vector_add.cu:{line}: cudaSetDevice((int)index): cuda" in done.stderr
    with pytest.raises(WideloadError, match=rf"exited with 1: .*vector_add\.cu:{line}: cudaSetDevice"):
        run_standalone(built.path)


@pytest.mark.parametrize("words", [["-1"], ["many"], ["7x"], [""], [str(2**40)], ["7", "-1"], ["7", "x"], ["7", "0", "0"]])
def test_the_program_refuses_arguments_that_make_no_sense(nvcc: Nvcc, tmp_path_factory: pytest.TempPathFactory, words: list[str]) -> None:
    program = tmp_path_factory.getbasetemp() / "add_for_arguments"
    if not program.exists():
        build_standalone("sm_90", program)
    done = subprocess.run([program, *words], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage:" in done.stderr


def printing(folder: Path, text: str, status: int) -> str:
    """A program that prints what the real one would."""
    program = folder / "program"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return str(program)


HEAD = "NVIDIA H200, 4917 GB/s nominal; 268435456 elements, cold L2, median of 100"
F32 = "f32       815.23 us   3951.3 GB/s   80.4 % of nominal, least 655.13 us; 0 of 1024 results wrong"


def test_what_the_program_prints_is_read(tmp_path: Path) -> None:
    rows = f"{HEAD}\n{F32}\nbf16      700.00 us   2300.9 GB/s; 0 of 1024 results wrong"
    assert run_standalone(printing(tmp_path, rows, 0)) == (
        RouteTime("f32", 815.23, 3951.3, 0.804),
        RouteTime("bf16", 700.0, 2300.9, None),
    )
    assert run_standalone(printing(tmp_path, HEAD, 0)) == ()
    wrong = run_standalone(printing(tmp_path, F32.replace("; 0 of", "; 7 of"), 1))
    assert [time.fault for time in wrong] == ["7 of 1024 results are wrong"]
    assert str(wrong[0]) == "f32   815.2 us, 3951 GB/s, 80.4% of nominal; 7 of 1024 results are wrong"
    with pytest.raises(WideloadError, match="exited with 1: NVIDIA"):
        run_standalone(printing(tmp_path, f"{HEAD}\n{F32}", 1))


def test_the_rows_are_those_that_the_source_prints() -> None:
    source = SOURCES[Route.STANDALONE].read_text()
    for part in ('"%-5s %10.2f us %8.1f GB/s"', '" %6.1f %% of nominal, least %.2f us"', '"; %lld of %lld results wrong\\n"'):
        assert part in source


# ---- the extension


class Add:
    """What the extension does, on the CPU."""

    def __init__(self, spoil: int = 0) -> None:
        self.spoil = spoil

    def vector_add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = x + y
        if self.spoil and x.numel() >= self.spoil:
            out[-1] += 1
        return out


def test_the_extension_is_checked_and_timed() -> None:
    assert check_extension(Add(), "cpu") == ()
    assert check_extension(Add(spoil=1000), "cpu") == tuple(
        f"{dtype} of {n}: differs from torch.add" for dtype in ("f32", "bf16") for n in (1000, 4097)
    )
    times = time_extension(Add(), "cpu", 5000, max_seconds=0.02)
    assert [(time.dtype, time.fault) for time in times] == [("f32", ""), ("bf16", "")]
    assert all(time.time_us and time.torch_us and time.gbps for time in times)
    wrong = time_extension(Add(spoil=1), "cpu", 5000, max_seconds=0.02)
    assert all(time.time_us is None and time.fault for time in wrong)


def test_nvcc_compiles_the_extension_against_torch(nvcc: Nvcc, tmp_path: Path) -> None:
    """All but the link: a torch without CUDA has the headers and not the libraries."""
    include = Path(torch.__file__).parent / "include"
    torchs = ["-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF_CONVERSIONS__", "-D__CUDA_NO_HALF_OPERATORS__"]
    options = ["-c", "-O1", "-arch=sm_90", "-std=c++20", "-isystem", str(include), "--expt-relaxed-constexpr", *torchs]
    build_options = [] if torch.version.cuda else ["-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE"]
    target = tmp_path / "extension.o"
    subprocess.run([nvcc.path, *options, *build_options, SOURCES[Route.EXTENSION], "-o", target], check=True)
    symbols = subprocess.run(["nm", "-C", target], capture_output=True, text=True, check=True).stdout
    assert " T vector_add(at::Tensor const&, at::Tensor const&)" in symbols


@pytest.mark.skipif(torch.version.cuda is not None, reason="is about a torch without CUDA")
def test_a_torch_without_cuda_builds_no_extension() -> None:
    with pytest.raises(CompileError, match="is built without CUDA, and extensions with kernels need one with it: pip install torch"):
        build_extension("sm_90")


def test_the_runtime_of_the_wheels_can_be_linked(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    nvcc = Nvcc(tmp_path / "bin" / "nvcc", tmp_path, "13.0.88")
    with pytest.raises(CompileError, match=r"has no libcudart\.so: pip install nvidia-cuda-runtime, of nvcc's version 13\.0\.88"):
        routes._link_runtime(nvcc, tmp_path)
    (tmp_path / "lib" / "libcudart.so.13").touch()
    build = tmp_path / "build"
    build.mkdir()
    for _ in range(2):
        assert routes._link_runtime(nvcc, build) == build
        assert (build / "libcudart.so").resolve() == tmp_path / "lib" / "libcudart.so.13"
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart.so").touch()
    assert routes._link_runtime(nvcc, build) == tmp_path / "lib64"


@pytest.mark.parametrize(("arch", "wanted"), [("sm_90", "9.0"), ("sm_90a", "9.0a"), ("sm_120", "12.0"), ("sm_103", "10.3")])
def test_torch_is_told_the_architecture_and_the_environment_comes_back(monkeypatch: pytest.MonkeyPatch, arch: str, wanted: str) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    before = dict(os.environ)
    with routes._build_environment(Nvcc(Path("nvcc"), Path("/root/of"), ""), Path("/of/ninja"), arch):
        assert (os.environ["TORCH_CUDA_ARCH_LIST"], os.environ["CUDA_HOME"]) == (wanted, "/root/of")
        assert os.environ["PATH"].startswith(f"/of{os.pathsep}")
    assert dict(os.environ) == before


# ---- what is missing


def test_missing_tools_are_named_with_what_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolkit, "_find_by_cuda_pathfinder", lambda: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(CompileError, match="nvcc was not found: pip install nvidia-cuda-nvcc nvidia-cuda-crt nvidia-nvvm"):
        find_nvcc()
    with pytest.raises(CompileError, match=r"g\+\+ was not found: .*apt-get install g\+\+"):
        toolkit.find_host_compiler()
    with pytest.raises(CompileError, match=r"ninja was not found.*pip install ninja"):
        toolkit.find_ninja()
    monkeypatch.setenv("CXX", "clang++-99")
    with pytest.raises(CompileError, match=r"clang\+\+-99 was not found"):
        toolkit.find_host_compiler()
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho 'install CUDA first'\n")
    (tmp_path / "nvcc").chmod(0o755)
    with pytest.raises(CompileError, match="is no nvcc that runs; it said: install CUDA first"):
        find_nvcc()
    run = command("--route", "standalone", "--target", "h200")
    assert run.exit_code == 1
    assert "is no nvcc that runs" in run.output


def test_what_nvcc_refuses_is_said(nvcc: Nvcc, tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"nvcc [\d.]+ refused vector_add\.cu for sm_12:\n.*sm_12"):
        build_standalone("sm_12", tmp_path / "add")


# ---- the command


def test_the_command_builds_for_a_target(nvcc: Nvcc, tmp_path: Path) -> None:
    run = command("--route", "standalone", "--target", "a100", "--output", str(tmp_path / "add"), "--json")
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["schema"], report["route"], report["arch"], report["times"]) == ("wideload.route/1", "standalone", "sm_80", [])
    assert Path(report["path"]) == tmp_path / "add"


@pytest.mark.parametrize(("wrong", "status"), [("", 0), ("7 of 1024 results are wrong", 1)])
def test_the_command_runs_what_it_builds(monkeypatch: pytest.MonkeyPatch, wrong: str, status: int) -> None:
    built = routes.Built(Route.STANDALONE, "/of/add", "sm_90", "13.0.88")
    monkeypatch.setattr("wideload.cli._find_device", lambda name: torch.device("cuda", 1))
    monkeypatch.setattr("wideload.cli.device_arch", lambda index: "sm_90")
    monkeypatch.setattr(routes, "build_standalone", lambda arch, output: built)
    monkeypatch.setattr(routes, "run_standalone", lambda program, device: (RouteTime("f32", 815.2, 3951.0, 0.8, fault=wrong),) * device)
    run = command("--route", "standalone")
    assert run.exit_code == status
    assert run.stdout.splitlines()[0] == "/of/add: for sm_90, by nvcc 13.0.88"
    assert f"f32   815.2 us, 3951 GB/s, 80.0% of nominal{f'; {wrong}' if wrong else ''}" in run.stdout
    monkeypatch.setattr(routes, "build_extension", lambda arch: (built, Add(spoil=8 if wrong else 0)))
    monkeypatch.setattr(routes, "time_extension", lambda module, device, max_seconds: ())
    monkeypatch.setattr(routes, "check_extension", lambda module, device: check_extension(module, "cpu"))
    assert command("--route", "extension").exit_code == status


def test_the_command_prints_the_source_and_refuses_what_does_not_fit() -> None:
    assert command("--route", "extension", "--source").stdout.startswith(
        f"// {SOURCES[Route.EXTENSION]}\n// The first kernels as a function"
    )
    assert command("add_bf16_vec8", "--route", "extension").exit_code == 2


@needs_no_gpu
def test_without_a_gpu_a_route_needs_a_target() -> None:
    run = command("--route", "standalone")
    assert run.exit_code == 1
    assert "name one to build for: --target h200" in run.output
