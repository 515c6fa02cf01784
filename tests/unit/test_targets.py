"""Which GPU runs what was compiled: the rules of the CUDA Programming Guide and of nvcc, written out by hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wideload.analyze import targets
from wideload.analyze.targets import Image, find_support, judge_image, parse_flags, read_images
from wideload.cli import app
from wideload.errors import CompileError, WideloadError
from wideload.gpus import GPUS
from wideload.nvrtc import compile_cubin

KERNEL = 'extern "C" __global__ void f(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }'


def image(name: str) -> Image:
    """The one image that ``name`` says, PTX for ``compute_..``."""
    found = parse_flags([f"-arch={name}"])
    return next(made for made in found if made.name == name)


@pytest.mark.parametrize(
    ("name", "gpu", "way"),
    [
        # SASS: the same major version, the minor one no lower.
        ("sm_80", (8, 0), "native"),
        ("sm_80", (8, 6), "native"),
        ("sm_80", (8, 9), "native"),
        ("sm_86", (8, 0), "no"),
        ("sm_80", (9, 0), "no"),
        ("sm_90", (8, 0), "no"),
        ("sm_90", (10, 0), "no"),
        ("sm_100", (10, 3), "native"),
        ("sm_100", (11, 0), "no"),
        ("sm_120", (12, 1), "native"),
        # Tegra keeps to itself.
        ("sm_80", (8, 7), "no"),
        ("sm_87", (8, 7), "native"),
        ("sm_87", (8, 9), "no"),
        # PTX: anything no older.
        ("compute_80", (8, 0), "jit"),
        ("compute_80", (8, 7), "jit"),
        ("compute_80", (9, 0), "jit"),
        ("compute_80", (12, 0), "jit"),
        ("compute_90", (8, 0), "no"),
        ("compute_86", (8, 0), "no"),
        # One architecture's own.
        ("sm_90a", (9, 0), "native"),
        ("sm_90a", (10, 0), "no"),
        ("compute_90a", (9, 0), "jit"),
        ("compute_90a", (10, 0), "no"),
        ("sm_100a", (10, 3), "no"),
        ("compute_100a", (10, 3), "no"),
        # A family's: table 25 of the CUDA C++ Programming Guide 13.0.
        ("compute_100f", (10, 0), "jit"),
        ("compute_100f", (10, 3), "jit"),
        ("compute_103f", (10, 0), "no"),
        ("compute_103f", (10, 3), "jit"),
        ("compute_100f", (11, 0), "no"),
        ("compute_100f", (12, 0), "no"),
        ("compute_120f", (12, 1), "jit"),
        ("compute_121f", (12, 0), "no"),
        ("sm_100f", (10, 3), "native"),
        ("sm_100f", (12, 0), "no"),
    ],
)
def test_the_rules(name: str, gpu: tuple[int, int], way: str) -> None:
    fit = judge_image(image(name), gpu)
    assert (fit.way, fit.image) == (way, name)
    assert fit.why


@pytest.mark.parametrize(
    ("words", "names"),
    [
        # What `nvcc -dryrun` of CUDA 13.0 hands to fatbinary.
        (["-arch=sm_80"], ["sm_80", "compute_80"]),
        (["-arch", "sm_90a"], ["sm_90a", "compute_90a"]),
        (["-arch=compute_80"], ["compute_80"]),
        (["-arch=compute_80", "-code=sm_86,compute_80"], ["sm_86", "compute_80"]),
        (["--gpu-architecture=compute_80", "--gpu-code", "sm_80"], ["sm_80"]),
        (["-gencode", "arch=compute_80,code=sm_80"], ["sm_80"]),
        (["-gencode=arch=compute_80,code=[sm_80,sm_86,compute_80]"], ["sm_80", "sm_86", "compute_80"]),
        (["--generate-code", 'arch=compute_90,code="compute_90"', "-O3", "-lineinfo"], ["compute_90"]),
        (["-gencode arch=compute_80,code=sm_80 -gencode arch=compute_90,code=sm_90"], ["sm_80", "sm_90"]),
        (["-gencode", "arch=compute_100f,code=sm_103"], ["sm_103f"]),
        (["-gencode", "arch=compute_90,code=sm_90a"], ["sm_90a"]),
        (["-arch=all-major"], ["sm_75", "sm_80", "sm_90", "sm_100", "sm_110", "sm_120", "compute_120"]),
        # TORCH_CUDA_ARCH_LIST.
        (["8.0;9.0a", "10.0+PTX"], ["sm_80", "sm_90a", "sm_100", "compute_100"]),
    ],
)
def test_flags(words: list[str], names: list[str]) -> None:
    assert [made.name for made in parse_flags(words)] == names


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no target was named"),
        (["-O3"], "no target was named"),
        (["-arch=sm_8x"], "'sm_8x' is no target"),
        (["-code=sm_80"], "without -arch"),
        (["-arch=native"], "name it: -arch=sm_90"),
        (["-gencode", "arch=compute_80"], "allowed: arch=compute_80,code=sm_80"),
        (["-gencode", "arch=sm_80,code=sm_80"], "a virtual architecture"),
        (["-gencode", "arch=compute_80,code=lto_80"], "for the linker"),
        # nvcc 13.0: "Incompatible code generation requested".
        (["-gencode", "arch=compute_80,code=sm_75"], "refuses"),
        (["-gencode", "arch=compute_80,code=compute_90"], "refuses"),
        (["-gencode", "arch=compute_80,code=compute_75"], "refuses"),
        (["-gencode", "arch=compute_90a,code=sm_90"], "refuses"),
        (["-gencode", "arch=compute_90a,code=sm_100"], "refuses"),
        (["-gencode", "arch=compute_100f,code=sm_110"], "refuses"),
        (["kernel.cu"], "no file"),
    ],
)
def test_what_is_no_target_is_named(words: list[str], said: str) -> None:
    with pytest.raises(WideloadError, match=said):
        parse_flags(words)


def taken(*words: str) -> dict[tuple[int, int], tuple[str, str | None]]:
    return {row.compute_capability: (row.way, row.image) for row in find_support(parse_flags(words))}


def test_the_driver_takes_sass_before_ptx_and_the_newest_of_each() -> None:
    # The fatbin of the article: three SASS and the newest PTX.
    found = taken(
        "-gencode arch=compute_80,code=sm_80 -gencode arch=compute_86,code=sm_86 "
        "-gencode arch=compute_90,code=sm_90 -gencode arch=compute_90,code=compute_90"
    )
    assert found[7, 5] == ("no", None)
    assert found[8, 0] == ("native", "sm_80")
    assert found[8, 6] == found[8, 9] == ("native", "sm_86")
    assert found[9, 0] == ("native", "sm_90")
    assert found[12, 0] == ("jit", "compute_90")
    assert found[8, 7] == ("no", None)  # a Tegra, and the PTX is newer


def test_sass_alone_is_the_article_s_no_kernel_image() -> None:
    found = taken("-gencode", "arch=compute_80,code=sm_80")
    assert found[9, 0] == ("no", None)
    assert taken("-arch=sm_80")[9, 0] == ("jit", "compute_80")


def test_every_gpu_of_the_table_stands_in_one_row() -> None:
    rows = find_support(parse_flags(["-arch=sm_80"]))
    assert sorted(name for row in rows for name in row.gpus) == sorted(gpu.name for gpu in GPUS)
    h100 = next(row for row in rows if "H100 SXM" in row.gpus)
    assert h100.why == "PTX of 8.0 is compiled by the driver for what is newer"
    assert [(fit.image, fit.way) for fit in h100.fits] == [("sm_80", "no"), ("compute_80", "jit")]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_cubin_says_what_it_is_for(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "of_another_name.bin"
    path.write_bytes(compile_cubin(KERNEL, arch=arch, name="f").code)
    assert [made.name for made in read_images(path)] == [arch]


def test_ptx_is_read_without_a_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "find_cuobjdump", lambda: pytest.fail("PTX is text"))
    path = tmp_path / "f.ptx"
    path.write_text("//\n// Generated\n//\n.version 9.0\n.target sm_90a\n.address_size 64\n")
    assert [made.name for made in read_images(path)] == ["compute_90a"]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
def test_fatbins_and_what_is_linked_from_them(tmp_path: Path) -> None:
    source = tmp_path / "f.cu"
    source.write_text(KERNEL)
    flags = [*("-gencode", "arch=compute_90a,code=sm_90a"), *("-gencode", "arch=compute_100f,code=[sm_100f,compute_100f]")]
    for kind, output in (("-fatbin", "f.fatbin"), ("-c", "f.o")):
        subprocess.run(["nvcc", kind, *flags, str(source), "-o", str(tmp_path / output)], check=True, capture_output=True)
        assert {made.name for made in read_images(tmp_path / output)} == {"sm_90a", "sm_100f", "compute_100f"}


def test_a_file_without_device_code_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "text", Path(sys.executable)):
        if path.name == "text":
            path.write_text("nothing")
        with pytest.raises(WideloadError, match=f"{path.name} holds no device code"):
            read_images(path)
    with pytest.raises(WideloadError, match="cannot be read"):
        read_images(tmp_path / "absent")


def test_without_cuobjdump_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wideload import sass

    sass.find_cuobjdump.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sass, "_find_in_triton", lambda _: None)  # which builds of torch for CUDA bring
    (tmp_path / "x").write_text("nothing")
    with pytest.raises(CompileError, match="install the wheel nvidia-cuda-cuobjdump"):
        read_images(tmp_path / "x")
    sass.find_cuobjdump.cache_clear()


def test_the_command() -> None:
    run = CliRunner().invoke(app, ["targets", "-gencode", "arch=compute_80,code=sm_80", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["schema"], report["images"]) == ("wideload.targets/1", ["sm_80"])
    ways = {tuple(row["compute_capability"]): row["way"] for row in report["gpus"]}
    assert (ways[8, 6], ways[9, 0]) == ("native", "no")
    run = CliRunner().invoke(app, ["targets", "-arch=sm_80"])
    assert "jit compute_80" in run.stdout
    assert "native on 3 architectures, by JIT on 7, not on 2" in " ".join(run.stdout.split())
    assert CliRunner().invoke(app, ["targets", "-arch=sm_8x"]).exit_code == 1


def test_the_command_reads_files(tmp_path: Path) -> None:
    path = tmp_path / "f.cubin"
    path.write_bytes(compile_cubin(KERNEL, arch="sm_86", name="f").code)
    run = CliRunner().invoke(app, ["targets", str(path), "--json"])
    assert json.loads(run.stdout)["images"] == ["sm_86"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sm_90", "write -arch=sm_90, or -gencode arch=compute_90,code=sm_90 for its SASS without PTX"),
        ("sm_90a", "write -arch=sm_90a, or -gencode arch=compute_90a,code=sm_90a for"),
        ("compute_80", "write -arch=compute_80$"),
    ],
)
def test_a_target_by_itself_is_told_its_option(word: str, message: str) -> None:
    with pytest.raises(WideloadError, match=message):
        parse_flags([word])
    option = message.removeprefix("write ").partition(", or ")[0].removesuffix("$")
    assert parse_flags([option])[0].name == word
