"""One compilation a kernel: for all threads of a process, and for the processes after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import wideload
from wideload import cache, nvrtc, store
from wideload.cache import find_cubin, find_cubins, num_compilations, read_stored
from wideload.cli import app
from wideload.errors import CompileError
from wideload.nvrtc import Cubin, compile_cubin
from wideload.store import inspect_folder

SCALE = 'extern "C" __global__ void scale(float* x) { x[threadIdx.x] *= 3; }'
ARGUMENTS = {"arch": "sm_90", "name": "scale"}


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has compiled nothing, with an empty folder on the disk."""
    monkeypatch.delenv("WIDELOAD_CACHE", raising=False)
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield
    forget()


def forget() -> None:
    for memory in (cache._cubins, cache._locks, cache._compiled):
        memory.clear()


class Compiler:
    """Stands in for NVRTC: makes a cubin of the source's own bytes, and notes who asked."""

    def __init__(self, seconds: float = 0) -> None:
        self.asked: list[str] = []
        self._seconds = seconds

    def __call__(self, source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        self.asked.append(source)
        time.sleep(self._seconds)
        return Cubin(source.encode() + b"\n\0\n", arch, name, 16, 4, 8, 32, 64, log="")


# ---- in a process


def test_many_threads_that_ask_at_once_compile_one_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(seconds=0.05)
    monkeypatch.setattr(cache, "compile_cubin", compiler)
    start = threading.Barrier(16)

    def ask(number: int) -> Cubin:
        start.wait()
        return find_cubin(f"source {number % 2}", **ARGUMENTS)

    with ThreadPoolExecutor(16) as threads:
        cubins = list(threads.map(ask, range(16)))
    assert sorted(compiler.asked) == ["source 0", "source 1"]
    assert num_compilations() == 2
    assert [id(cubin) for cubin in cubins] == [id(cubins[number % 2]) for number in range(16)]


def test_several_kernels_are_compiled_side_by_side_and_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(2, timeout=60)

    def compile_beside_another(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        together.wait()  # passes only if two are here at once
        return Compiler()(source, arch=arch, name=name, fma=fma)

    monkeypatch.setattr(cache, "compile_cubin", compile_beside_another)
    monkeypatch.setattr(cache.os, "cpu_count", lambda: 2)
    sources = [f"source {number}" for number in range(6)]
    cubins = find_cubins([(source, "sm_90", "k") for source in [*sources, *sources[:2]]])
    assert [cubin.code for cubin in cubins] == [f"source {number}\n\0\n".encode() for number in (*range(6), 0, 1)]
    assert num_compilations() == 6


def test_no_kernels_need_nothing() -> None:
    assert find_cubins([]) == ()


def test_a_refused_source_is_refused_again_and_not_kept() -> None:
    broken = SCALE.replace("*=", "*==")
    for _ in range(2):
        with pytest.raises(CompileError, match="refused 'scale'"):
            find_cubin(broken, **ARGUMENTS)
    with pytest.raises(CompileError, match="refused 'scale'"):
        find_cubins([(SCALE, "sm_90", "scale"), (broken, "sm_90", "scale")])
    assert len(inspect_folder().entries) == 1
    assert num_compilations() == 1


def test_a_fork_while_another_thread_compiles_does_not_wait_for_it() -> None:
    program = f"""
import os, signal, threading, time
from wideload import cache
compiling, done = threading.Event(), threading.Event()

def compile_until_told(source, *, arch, name, fma):
    compiling.set()
    done.wait()
    return cache.Cubin(b"code", arch, name, 1, 0, 0, 0, 0, log="")

cache.compile_cubin = compile_until_told
thread = threading.Thread(target=cache.find_cubin, args=({SCALE!r},), kwargs={ARGUMENTS!r})
thread.start()
compiling.wait()
child = os.fork()
if child == 0:
    signal.alarm(30)
    done.set()
    os._exit(cache.find_cubin({SCALE!r}, **{ARGUMENTS!r}).code != b"code")
status = os.waitpid(child, 0)[1]
done.set()
thread.join()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    assert subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], check=False).returncode == 0


# ---- over processes


def test_the_next_process_reads_what_this_one_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = compile_cubin(SCALE, **ARGUMENTS)
    assert find_cubin(SCALE, **ARGUMENTS) == fresh
    forget()
    monkeypatch.setattr(cache, "compile_cubin", None)
    assert find_cubin(SCALE, **ARGUMENTS) == fresh
    assert num_compilations() == 0


def test_a_call_is_spelt_only_where_nothing_compiles_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[None] = []
    kernels = [(SCALE, "sm_90", "scale")]
    monkeypatch.setattr(cache, "compile_cubin", Compiler())
    for _ in range(2):  # compiled, then read
        find_cubins(kernels, lambda: asked.append(None))
        forget()
    assert not asked

    def refuse(*_: object, **__: object) -> Cubin:
        raise CompileError("NVRTC could not be loaded")

    monkeypatch.setattr(cache, "compile_cubin", refuse)
    monkeypatch.setattr(cache, "has_nvrtc", lambda: False)
    with pytest.raises(CompileError, match="NVRTC could not be loaded"):
        find_cubins([(SCALE + " ", "sm_90", "scale")], lambda: asked.append(None))
    assert len(asked) == 1


def test_every_figure_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(cache, "compile_cubin", compiler)
    written = find_cubin(SCALE, **ARGUMENTS)
    forget()
    assert find_cubin(SCALE, **ARGUMENTS) == written
    assert len(compiler.asked) == 1
    assert written == Cubin(SCALE.encode() + b"\n\0\n", "sm_90", "scale", 16, 4, 8, 32, 64, log="")


def test_a_process_that_finds_its_cubin_loads_neither_nvrtc_nor_cuda_core() -> None:
    program = f"""
import sys
import torch
of_torch = "libnvrtc" in open("/proc/self/maps").read()  # builds for CUDA load it
from wideload.cache import find_cubin, num_compilations
cubin = find_cubin({SCALE!r}, **{ARGUMENTS!r})
is_loaded = "libnvrtc" in open("/proc/self/maps").read()
print(num_compilations(), is_loaded and not of_torch, "cuda.core" in sys.modules, cubin.registers, of_torch)
"""
    said = [subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    *_, registers, of_torch = said[0]
    rest = [registers, of_torch]
    assert said == [["1", str(of_torch == "False"), "True", *rest], ["0", "False", "False", *rest]]


def test_all_that_decides_the_cubin_decides_the_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    key = (SCALE, "sm_90", "scale", False)
    digests = [cache._digest(key), cache._digest((SCALE + " ", *key[1:])), cache._digest((SCALE, "sm_80", "scale", False))]
    digests.append(cache._digest((SCALE, "sm_90", "scales", False)))
    digests.append(cache._digest((SCALE, "sm_90", "scale", True)))

    def decided_by(module: object, name: str, value: object) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            return cache._digest(key)

    digests.append(decided_by(cache, "_SCHEMA", cache._SCHEMA + 1))
    digests.append(decided_by(cache, "nvrtc_identity", lambda: "nvidia-cuda-nvrtc 99.9"))
    digests.append(
        decided_by(cache, "compile_options", lambda **_: {**nvrtc.compile_options(arch="sm_90", name="scale"), "lineinfo": False})
    )
    digests.append(decided_by(wideload, "__version__", "99.9"))
    assert len(set(digests)) == len(digests)
    assert cache._digest(key) == digests[0]


def test_a_damaged_entry_is_compiled_again_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler()
    monkeypatch.setattr(cache, "compile_cubin", compiler)
    written = find_cubin(SCALE, **ARGUMENTS)
    (entry,) = inspect_folder().entries
    whole = entry.path.read_bytes()
    for content in (whole[:100], b"", bytes(len(whole)), whole[:-1] + bytes([whole[-1] ^ 255])):
        entry.path.write_bytes(content)
        forget()
        assert find_cubin(SCALE, **ARGUMENTS) == written
        assert entry.path.read_bytes() == whole
    assert len(compiler.asked) == 5


@pytest.mark.parametrize("payload", [b"", b"code", b"code\n[]", b"code\n{}", b'code\n{"compiler": "", "name": "scale"}', b"code\n\xff"])
def test_an_entry_of_other_sources_is_compiled_again(payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "compile_cubin", Compiler())
    store.write_entry(cache._digest((SCALE, "sm_90", "scale", False)), payload)
    assert find_cubin(SCALE, **ARGUMENTS).registers == 16
    assert num_compilations() == 1


def test_turned_off_each_process_compiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    monkeypatch.setattr(cache, "compile_cubin", Compiler())
    for _ in range(2):
        forget()
        find_cubin(SCALE, **ARGUMENTS)
        assert num_compilations() == 1
    assert not (tmp_path / "cache").exists()


def test_an_entry_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = find_cubin(SCALE, **ARGUMENTS)
    (entry,) = inspect_folder().entries
    stored = read_stored(entry)
    assert stored is not None
    assert (stored.name, stored.arch, stored.registers) == ("scale", "sm_90", cubin.registers)
    assert stored.compiler == f"wideload {wideload.__version__}, {nvrtc.nvrtc_identity()}"
    unfit = b'{"name": 5, "arch": null, "registers": "x", "compiler": []}'
    for content in (b"", b"short", bytes(5000), b"\n" + b"[" * 3900 + bytes(32), b"\n" + unfit + bytes(32)):
        entry.path.write_bytes(content)
        assert read_stored(entry._replace(nbytes=len(content))) is None
    entry.path.unlink()
    assert read_stored(entry) is None


# ---- which NVRTC


def test_nvrtc_is_told_by_its_wheel_or_else_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = nvrtc.nvrtc_identity.__wrapped__
    monkeypatch.setattr(nvrtc, "_wheel_version", {"nvidia-cuda-nvrtc": "13.5.37", "nvidia-cuda-nvrtc-cu12": "12.8.93"}.get)
    assert identity() == "nvidia-cuda-nvrtc 13.5.37, nvidia-cuda-nvrtc-cu12 12.8.93"
    monkeypatch.setattr(nvrtc, "_wheel_version", lambda wheel: None)
    assert identity() == "NVRTC {}.{}".format(*nvrtc.nvrtc_version())


def test_a_wheel_that_is_not_installed_has_no_version() -> None:
    assert nvrtc._wheel_version("wideload-no-such-wheel") is None


# ---- the command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_the_command_lists_and_clears(tmp_path: Path) -> None:
    cubin = find_cubin(SCALE, **ARGUMENTS)
    nbytes = inspect_folder().nbytes
    store.write_entry("0" * 64, b"of something else")
    listed = run("cache", "ls")
    assert listed.exit_code == 0
    for words in ("2 kernels", "scale    sm_90", f" {cubin.registers} ", "damaged"):
        assert words in listed.stdout
    report = json.loads(run("cache", "ls", "--json").stdout)
    assert (report["folder"], report["fault"], len(report["kernels"])) == (str(tmp_path / "cache"), None, 2)
    (kernel,) = [kernel for kernel in report["kernels"] if "name" in kernel]
    assert (kernel["name"], kernel["arch"], kernel["nbytes"]) == ("scale", "sm_90", nbytes)
    cleared = run("cache", "clear")
    assert (cleared.exit_code, inspect_folder().entries) == (0, ())
    assert cleared.stdout.startswith("removed 2 kernels")
    assert json.loads(run("cache", "clear", "--json").stdout) == {"folder": str(tmp_path / "cache"), "removed": 0, "nbytes": 0}


def test_the_command_clears_nothing_where_the_cache_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    assert json.loads(run("cache", "clear", "--json").stdout) == {"folder": None, "removed": 0, "nbytes": 0}
    assert run("cache", "clear").stdout == "removed 0 kernels, 0.0 MB, from no folder: there is none\n"
    assert run("cache", "ls").stdout == "no folder: WIDELOAD_CACHE=0 turns it off, or this user has no home\n"


def test_the_list_is_not_cut_to_the_width_of_a_terminal(tmp_path: Path) -> None:
    name = "scale_" + "x" * 100
    find_cubin(SCALE.replace("scale(", f"{name}("), arch="sm_90", name=name)
    for columns in ("20", "80"):
        lines = CliRunner().invoke(app, ["cache", "ls"], env={"COLUMNS": columns, "NO_COLOR": "1"}).stdout.splitlines()
        assert lines[1] == f"{tmp_path / 'cache'}: 1 kernels, 0.0 MB"
        assert lines[2].split() == ["kernel", "arch", "registers", "kB", "used"]
        assert lines[3].split()[:2] == [name, "sm_90"]
        assert len(lines) == 4
        assert "…" not in lines[3]


def test_the_command_writes_names_that_the_terminal_has_not(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = tmp_path / "caché"
    environment = {**os.environ, "WIDELOAD_CACHE_DIR": str(folder), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-m", "wideload", "cache", "ls"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] == f"{tmp_path}/cach\\xe9: 0 kernels, 0.0 MB"


def test_the_command_says_why_a_folder_is_not_used(tmp_path: Path) -> None:
    find_cubin(SCALE, **ARGUMENTS)
    (tmp_path / "cache").chmod(0o777)
    assert "others may write to it" in run("cache", "ls").stdout
    assert "others may write to it" in json.loads(run("cache", "ls", "--json").stdout)["fault"]


def test_the_command_fails_where_it_cannot_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr(store, "clear_entries", fail)
    result = run("cache", "clear")
    assert (result.exit_code, result.stderr) == (1, "PermissionError: not yours\n")
