"""What `wideload ide` writes, and that clangd finds CUDA by it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wideload import ide
from wideload.cli import app
from wideload.errors import WideloadError
from wideload.ide import Headers, find_headers, write_clangd

LADDER = Path(str(resources.files("wideload"))) / "ladder"


def make_headers(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("")
    return folder


def test_what_is_written(tmp_path: Path) -> None:
    cuda = make_headers(tmp_path / "it's cuda", "cuda_runtime.h")
    path = write_clangd(tmp_path, Headers(cuda, (Path("/a b"), Path("/it's"))), arch="sm_90")
    text = path.read_text()
    flags = [line.strip(" -'").replace("''", "'") for line in text.splitlines() if line.startswith("    - ")]
    links = tmp_path / ".clangd-cuda"
    assert path == tmp_path / ".clangd"
    assert "  PathMatch: .*\\.cuh?\n" in text
    assert {"xcuda", "cuda-gpu-arch=sm_90", f"cuda-path={links}", "nocudalib", "isystem/a b", "isystem/it's"} <= set(flags)
    assert "    - '-isystem/it''s'\n" in text
    assert (links / "include" / "cuda_runtime.h").is_file()
    assert all((links / name).is_dir() for name in ("bin", "lib64"))
    assert (links / ".gitignore").read_text() == "*\n"


def test_it_is_written_again_but_nothing_of_others_is_replaced(tmp_path: Path) -> None:
    headers = Headers(make_headers(tmp_path / "cuda", "cuda_runtime.h"), ())
    path = write_clangd(tmp_path, headers)
    moved = Headers(make_headers(tmp_path / "moved", "cuda_runtime.h"), ())
    write_clangd(tmp_path, moved)
    assert (tmp_path / ".clangd-cuda" / "include").resolve() == moved.cuda.resolve()
    path.write_text("Diagnostics: {}\n")
    with pytest.raises(WideloadError, match="not written by wideload"):
        write_clangd(tmp_path, headers)
    assert path.read_text() == "Diagnostics: {}\n"
    write_clangd(tmp_path, headers, replace=True)
    assert "CompileFlags" in path.read_text()
    with pytest.raises(WideloadError, match="is no folder"):
        write_clangd(tmp_path / "none", headers)
    with pytest.raises(WideloadError, match="arch is 'h100'"):
        write_clangd(tmp_path, headers, arch="h100")


def test_headers_of_several_wheels_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = {
        "cudart": make_headers(tmp_path / "runtime", "cuda_runtime.h"),
        "nvcc": make_headers(tmp_path / "nvcc", "crt/host_defines.h"),
        "cccl": make_headers(tmp_path / "cccl", "nv/target"),
    }
    monkeypatch.setattr(ide, "_find_cuda_headers", folders.get)
    found = find_headers()
    assert found.cuda == folders["cudart"]
    assert found.beside[:2] == (folders["nvcc"], folders["cccl"])
    assert any((folder / "torch" / "extension.h").is_file() for folder in found.beside)
    for name, header in (("cudart", "cuda_runtime.h"), ("nvcc", "crt/host_defines.h"), ("cccl", "nv/target")):
        monkeypatch.setattr(ide, "_find_cuda_headers", {key: folder for key, folder in folders.items() if key != name}.get)
        with pytest.raises(WideloadError, match=f"{header} were not found: pip install nvidia-cuda-runtime"):
            find_headers()


def check(path: Path) -> list[str]:
    """The errors that clangd shows."""
    run = subprocess.run(["clangd", f"--check={path}"], capture_output=True, text=True, timeout=120, check=False)
    assert "All checks completed" in run.stderr, run.stderr
    return re.findall(r"^E\[[\d:.]+\] (.*)", run.stderr, re.MULTILINE)


@pytest.mark.skipif(shutil.which("clangd") is None or ide._find_cuda_headers("cudart") is None, reason="needs clangd and CUDA's headers")
def test_clangd_reads_the_rungs(tmp_path: Path) -> None:
    for name in ("bf16.cuh", "add_bf16_vec8.cu", "bias_gelu_2d.cu"):
        shutil.copy(LADDER / name, tmp_path)
    own = tmp_path / "own.cu"
    own.write_text("#include <cuda_bf16.h>\n__global__ void f(const float* x, __nv_bfloat16* y) { y[blockDim.x] = __ldg(x); }\n")
    (tmp_path / "empty").mkdir()
    write_clangd(tmp_path, Headers(tmp_path / "empty", ()))
    assert check(own)  # what is not there is missed, though clang might find a toolkit of its own
    assert CliRunner().invoke(app, ["ide", str(tmp_path)]).exit_code == 0
    for path in tmp_path.glob("*.cu"):
        assert check(path) == []
    own.write_text(own.read_text().replace("blockDim", "blockDin"))
    assert any("blockDin" in error for error in check(own))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.cli.find_headers", lambda: Headers(tmp_path, (tmp_path,)))
    run = CliRunner().invoke(app, ["ide", str(tmp_path), "--json"])
    assert json.loads(run.stdout) == {"path": str(tmp_path / ".clangd"), "cuda": str(tmp_path), "beside": [str(tmp_path)]}
