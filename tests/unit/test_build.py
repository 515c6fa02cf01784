"""Building calls into a folder, and finding their kernels where NVRTC is not: what is built, how it is spelt, what is said of the rest."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import wideload as wl
from wideload import cache, execute
from wideload.build import argument_names, spell_call, spell_tensor
from wideload.cli import app
from wideload.errors import CompileError
from wideload.manifest import Recipe, read_manifest
from wideload.nvrtc import Cubin
from wideload.planned import Plan
from wideload.spelling import find_function, make_arguments

bf16, f32 = torch.bfloat16, torch.float32


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gate(x: torch.Tensor, bias: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return torch.sigmoid(x + bias) * scale


gated = wl.fuse(gate)
eager_gated = wl.fuse(gate, numerics="eager", name="eager_gate")


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has compiled nothing and looks in no folder."""
    for memory in ("_cubins", "_locks", "_compiled"):
        monkeypatch.setattr(cache, memory, type(getattr(cache, memory))())
    monkeypatch.delenv("WIDELOAD_BUILT_DIR", raising=False)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stands in for NVRTC: cubins of the texts' own bytes; returns the names of those asked for."""
    asked: list[str] = []

    def compile_text(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        asked.append(f"{name} {arch}")
        return Cubin(f"{arch} {source}".encode(), arch, name, 24, 0, 0, 0, 0, log="")

    monkeypatch.setattr(cache, "compile_cubin", compile_text)
    return asked


def hide(monkeypatch: pytest.MonkeyPatch, folder: Path | None) -> None:
    """From here on, a process without NVRTC that looks in ``folder``."""

    def fail(*_: Any, **__: Any) -> Any:
        raise CompileError("NVRTC could not be loaded")

    for name in ("compile_cubin", "nvrtc_identity"):
        monkeypatch.setattr(cache, name, fail)
    monkeypatch.setattr(cache, "has_nvrtc", lambda: False)
    monkeypatch.setattr(cache, "_cubins", {})
    if folder is not None:
        monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(folder))


def names(folder: Path) -> list[str]:
    return sorted(f"{kernel.name} {kernel.arch}" for kernel in read_manifest(folder).kernels.values())


def said(call: Callable[[], Any]) -> str:
    with pytest.raises(CompileError) as caught:
        call()
    return str(caught.value)


# ---- a process without NVRTC

WITHOUT_NVRTC = """
import importlib.abc, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "cuda":
            raise ModuleNotFoundError(f"{name} is hidden")

sys.meta_path.insert(0, Hidden())
import torch
import wideload as wl
from wideload import cache, nvrtc
nvrtc._WHEELS = ()
assert not nvrtc.has_nvrtc()

def meta(*shape):
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")

for shape in ((8192, 14336), (7,), (3, 5, 2)):
    plan = wl.ops.swiglu.plan(meta(*shape), meta(*shape), target="h200")
    assert plan.cubin[:4] == b"\\x7fELF" and plan.registers > 8, shape
for target in ("h200", "b200"):
    try:
        print(len(wl.ops.bias_gelu.plan(meta(64, 128), meta(128), target=target).cubin))
    except wl.CompileError as error:
        print(error)
assert cache.num_compilations() == 0
"""


def test_without_nvrtc_what_was_built_is_there_and_nothing_else(tmp_path: Path) -> None:
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], "h200", tmp_path)
    wl.ops.bias_gelu.build([(meta(64, 128), meta(128))], ["h200"], tmp_path)
    environment = {**os.environ, "WIDELOAD_CACHE": "0", "WIDELOAD_BUILT_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_NVRTC], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    nbytes, *lines = done.stdout.splitlines()
    assert int(nbytes) in {kernel.nbytes for kernel in read_manifest(tmp_path).kernels.values()}
    assert lines[0] == (
        f"{tmp_path} has no cubin of kernel bias_gelu_rows of bias_gelu for sm_100 ({tmp_path} has it for sm_90). Add it on a machine that "
        f"has NVRTC: wideload build bias_gelu 'bf16[64, 128]' 'bf16[128]' --target sm_100 -o {tmp_path}"
    )
    assert lines[1].startswith("NVRTC could not be loaded: install wideload[cu13]")
    environment.pop("WIDELOAD_BUILT_DIR")
    done = subprocess.run([sys.executable, "-c", WITHOUT_NVRTC], env=environment, capture_output=True, text=True, check=False)
    assert "NVRTC could not be loaded: install wideload[cu13]" in done.stderr


def test_a_cubin_that_was_built_is_taken_before_one_is_compiled(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gated.build([(meta(64), meta(64))], "h200", tmp_path)
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(tmp_path))
    assert len(compiler) == 1
    assert gated.plan(meta(9), meta(9), target="h200").registers == 24
    assert len(compiler) == 1
    assert gated.plan(meta(9), meta(9), target="a100").registers == 24  # NVRTC is here: what was not built is compiled
    assert compiler == ["gate_dense sm_90", "gate_dense sm_80"]


def test_a_damaged_folder_is_said_even_where_nvrtc_is(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    built = gated.build([(meta(64), meta(64))], "h200", tmp_path)
    (tmp_path / built.kernels[0].file).write_bytes(b"cut")
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(tmp_path))
    assert "has 3 bytes" in said(lambda: gated.plan(meta(9), meta(9), target="h200").cubin)


def test_a_build_is_by_the_nvrtc_that_is_here(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not copied from another folder, whose cubins another NVRTC may have made."""
    gated.build([(meta(64), meta(64))], "h200", tmp_path / "first")
    monkeypatch.setenv("WIDELOAD_BUILT_DIR", str(tmp_path / "first"))
    gated.build([(meta(64), meta(64))], "h200", tmp_path / "second")
    assert compiler == ["gate_dense sm_90"] * 2


def test_nvrtcs_own_refusals_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Cubin:
        raise CompileError("NVRTC 13.0 refused 'gate_dense'")

    monkeypatch.setattr(cache, "compile_cubin", refuse)
    assert said(lambda: gated.plan(meta(9), meta(9), target="h200").cubin) == "NVRTC 13.0 refused 'gate_dense'"


# ---- what is built


def test_shapes_of_one_kernel_are_built_once(compiler: list[str], tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    signatures = [(meta(n, 64), meta(n, 64)) for n in (1, 7, 4096)] + [(meta(n, 64), meta(64)) for n in (2, 4096)]
    built = gated.build(signatures, ["h200", "a100"], tmp_path, advance=lambda done, total: seen.append((done, total)))
    assert sorted(compiler) == names(tmp_path) == sorted(f"{k.name} {k.arch}" for k in built.kernels)
    dense = next(kernel for kernel in built.kernels if kernel.name == "gate_dense")
    assert [recipe.operands for recipe in dense.recipes] == [(f"bf16[{n}, 64]",) * 2 for n in (1, 7, 4096)]
    assert seen == [(done, len(compiler)) for done in range(1, len(compiler) + 1)]
    lines = str(built).splitlines()
    assert lines[0] == f"{tmp_path}: {len(compiler)} kernels, {built.nbytes / 1e3:.1f} kB"
    assert (lines[1].split(), len(lines)) == (["kernel", "arch", "bytes", "registers", "spilled"], 2 + len(compiler))
    assert lines[2].split() == ["gate_dense", "sm_90", f"{dense.nbytes:,}", "24", "0"]


def test_arguments_by_name_numbers_and_outputs(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, bias = meta(64), meta(64)
    gated.build([{"bias": bias, "x": x, "scale": 2.0}, {"x": x, "bias": bias, "out": meta(64, dtype=f32)}], "h200", tmp_path)
    hide(monkeypatch, tmp_path)
    assert gated.plan(meta(9), meta(9), 0.5, target="h200").cubin  # a number is an argument of the kernel
    assert gated.plan(meta(9), meta(9), out=meta(9, dtype=f32), target="h200").cubin
    missing = said(lambda: gated.plan(meta(9), meta(9), target="h200").cubin)  # left at its default, it is a part of the kernel
    assert "wideload build " in missing
    assert ":gate 'bf16[9]' 'bf16[9]' --target sm_90" in missing


def test_in_place_is_the_kernel_of_new_memory(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x, bias = meta(8192, 512), meta(512)
    gated.build([{"x": x, "bias": bias}, {"x": x, "bias": bias, "out": x}], "h200", tmp_path)
    assert len(compiler) == 1
    hide(monkeypatch, tmp_path)
    real = torch.empty(8192, 512, dtype=bf16)
    assert gated.plan(real, torch.empty(512, dtype=bf16), out=real, target="h200").cubin
    assert ":gate 'bf16[8192, 512]' 'bf16[512]' --in-place x --target sm_80" in said(
        lambda: gated.plan(x, bias, out=x, target="a100").cubin
    )


def test_what_cannot_be_written_in_place_is_built_for_other_memory_too(
    compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    turned = wl.fuse(lambda x: x + x.t(), name="turned")
    x = meta(256, 256)
    turned.build([{"x": x, "out": x}], "h200", tmp_path)
    hide(monkeypatch, tmp_path)
    assert turned.plan(x, out=x, target="h200").cubin
    assert turned.plan(x, out=torch.empty_like(x), target="h200").cubin


def test_ops_in_place_build_what_their_calls_run(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    average, source = meta(64, dtype=f32), meta(64, dtype=f32)
    wl.ops.ema_.build([(average, source, 0.9)], "h200", tmp_path)
    hide(monkeypatch, tmp_path)
    assert wl.ops.ema_.plan(average, source, 0.9, out=average, target="h200").cubin


def test_gradients_are_built_where_they_are_wanted(compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], "h200", tmp_path / "forward")
    wl.ops.swiglu.build([(meta(64, 128), meta(64, 128))], "h200", tmp_path / "both", backward=True)
    assert names(tmp_path / "forward") == ["swiglu_dense sm_90"]
    assert names(tmp_path / "both") == ["swiglu_backward_dense sm_90", "swiglu_dense sm_90"]
    x, y = meta(9), meta(9)
    hide(monkeypatch, tmp_path / "forward")
    command = "wideload build swiglu 'bf16[9]' 'bf16[9]' {} --target sm_90"
    assert command.format("--backward") in said(lambda: wl.ops.swiglu.plan_backward(x, y, target="h200").cubin)
    hide(monkeypatch, tmp_path / "both")
    assert wl.ops.swiglu.plan_backward(x, y, target="h200").cubin
    y.requires_grad_()
    assert command.format("--grad up") in said(lambda: wl.ops.swiglu.plan_backward(x, y, target="h200").cubin)
    assert spell_call(wl.ops.swiglu, (x.requires_grad_(), y), {}, backward=True).wanted == ()  # all that there are


def test_what_is_no_signature_is_refused(tmp_path: Path) -> None:
    with pytest.raises(wl.TraceError, match=r"a signature of gate.build is a Tensor; allowed: a tuple of arguments, or a dict"):
        gated.build((meta(64), meta(64)), "h200", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(wl.DeviceError, match="no GPU is called 'h2000'"):
        gated.build([(meta(64), meta(64))], "h2000", tmp_path)
    for targets in (90, None, [90]):
        with pytest.raises(wl.DeviceError, match=r"a target is (90|None); allowed"):
            gated.build([(meta(64), meta(64))], targets, tmp_path)  # type: ignore[arg-type]
    with pytest.raises(wl.TraceError, match=r"a signature of gate.build is a NoneType"):
        gated.build(None, "h200", tmp_path)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_leaves_the_folder_as_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        if arch == "sm_80":
            raise CompileError("refused")
        return Cubin(b"code", arch, name, 24, 0, 0, 0, 0, log="")

    monkeypatch.setattr(cache, "compile_cubin", refuse)
    with pytest.raises(CompileError, match="refused"):
        gated.build([(meta(64), meta(64))], ["h200", "a100"], tmp_path / "kernels")
    assert not (tmp_path / "kernels").exists()


# ---- calls on a GPU say what they miss


def test_a_call_says_what_would_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wl.ops.add.build([(meta(64), meta(64))], "h200", tmp_path)
    hide(monkeypatch, tmp_path)
    monkeypatch.setattr(execute, "device_arch", lambda _: "sm_90")
    monkeypatch.setattr(execute, "can_overlap", lambda _: False)
    monkeypatch.setattr(execute, "LoadedKernel", lambda cubin, *_, **__: SimpleNamespace(cubin=cubin))

    def prepare(*args: torch.Tensor) -> Any:
        call = wl.ops.add._bind(args, {})
        return wl.ops.add._run(call, lambda _, traced: wl.ops.add._prepare(call, traced))

    (launch,) = prepare(meta(5, 7), meta(5, 7)).launches
    assert launch.kernel.cubin.name == "add_dense"
    column = meta(64, 128).t()
    assert "wideload build add 'bf16[64, 128].t()' 'bf16[128, 64]' --target sm_90" in said(lambda: prepare(column, meta(128, 64)))


# ---- spelling


def layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride(), tensor.data_ptr() % 16


BASE = torch.empty(64, 128)


@pytest.mark.parametrize(
    "tensor",
    [
        BASE,
        BASE[0, 0],
        BASE.t(),
        BASE[:, ::2],
        BASE[:, 1:],
        BASE[:, 1:].t(),
        BASE.view(-1)[1:],
        BASE.view(-1)[3:4099].view(64, 64).t(),
        BASE[:1].expand(8, 128),
        BASE.to(torch.float8_e4m3fn)[1:, 5:],
        torch.empty(0, 4),
        torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last),
        BASE.to(torch.complex64).t(),
        meta(8, 8)[1:, 1:],
    ],
    ids=lambda tensor: f"{tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}",
)
def test_a_tensor_is_spelt_with_its_layout_and_alignment(tensor: torch.Tensor) -> None:
    (found,), named = make_arguments([spell_tensor(tensor)], device="meta")
    assert (layout(found), named) == (layout(tensor), {})


@pytest.mark.parametrize(
    "value",
    [True, False, None, 2, -3, 0.5, -1e-7, 1e30, float("inf"), float("-inf"), 1 + 2j, bf16, "tanh", [1, 2], (1,), (1, (2.0, None)), ()],
)
def test_other_arguments_are_spelt_as_they_are(value: Any) -> None:
    recipe = spell_call(gated, (meta(4), value), {"scale": value})
    assert recipe.is_command
    (_, positional), named = make_arguments(recipe.operands, device="meta")
    assert (positional, named) == (value, {"scale": value})
    assert type(positional) is type(named["scale"]) is type(value)


@pytest.mark.parametrize("value", [float("nan"), torch.device("cpu"), {"a": 1}, torch.Size([2])])
def test_what_has_no_spelling_is_no_command(value: Any) -> None:
    assert not spell_call(gated, (meta(4), value), {}).is_command


def test_values_are_not_read_for_a_spelling() -> None:
    assert spell_call(gated, ({"a": torch.ones(2)}, torch.ones(3)), {}).operands == ("{'a': f32[2]}", "f32[3]")


def test_operands_have_memory_of_their_own() -> None:
    x = meta(4)
    assert not spell_call(gated, (x, x), {}).is_command
    assert not spell_call(gated, (x[:2], x[2:]), {}).is_command
    assert not spell_call(gated, (x[:2], meta(2)), {}, x[2:]).is_command
    assert not spell_call(gated, (x, torch.ones(())), {}).is_command  # by value, beside a tensor on a device
    assert spell_call(gated, (x, meta(4)), {}, x) == Recipe(f"{__name__}:gate", ("bf16[4]", "bf16[4]"), in_place="x")
    assert spell_call(gated, (x, meta(4)), {}, meta(4)).operands == ("bf16[4]", "bf16[4]", "out=bf16[4]")


def test_functions_are_named_as_commands_find_them() -> None:
    def place(f: wl.FusedFunction) -> str | None:
        recipe = spell_call(f, (meta(4),), {})
        return recipe.function if recipe.is_command else None

    assert place(eager_gated) == f"{__name__}:eager_gated"  # not the plain function, which has no such option
    assert place(gated) == place(wl.fuse(gate)) == f"{__name__}:gate"  # which the command fuses in the same way
    assert place(wl.fuse(gate, fast_math=True)) is None
    assert place(wl.fuse(lambda x: x + 1)) is None
    assert place(wl.ops.ema_) == "ema_"
    assert place(wl.fuse(torch.sigmoid)) == "torch:sigmoid"
    assert place(wl.fuse(torch.nn.functional.silu)) == "torch.nn.functional:silu"
    for text in ("ema_", "torch:sigmoid", "torch.nn.functional:silu"):
        assert callable(find_function(text))


def test_arguments_have_the_names_of_parameters() -> None:
    assert argument_names(gated, (1,), {"scale": 3}) == {"x": 1, "scale": 3}
    assert argument_names(wl.fuse(torch.add), (1, 2), {}) == {"x0": 1, "x1": 2}
    assert argument_names(wl.fuse(lambda x, *more: x), (1, 2, 3), {}) == {"x": 1, "x1": 2, "x2": 3}


# ---- the command


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["build", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_the_command_builds(compiler: list[str], tmp_path: Path) -> None:
    result = run(
        "swiglu", "bf16[n, 14336]", "bf16[n, 14336]", "--sizes", "n=1,8192", "--target", "h200", "--target", "a100", "-o", str(tmp_path)
    )
    assert result.exit_code == 0, result.output
    assert names(tmp_path) == ["swiglu_dense sm_80", "swiglu_dense sm_90"]
    assert re.search(r"^swiglu_dense +sm_90 +[\d,]+ +24 +0$", result.stdout, re.MULTILINE)
    assert f"{tmp_path}: 2 kernels" in result.stdout.replace("\n", "")


def test_the_command_takes_an_ops_own_operands_and_writes_json(compiler: list[str], tmp_path: Path) -> None:
    result = run("swiglu", "--target", "h200", "-o", str(tmp_path), "--backward", "--json")
    said = json.loads(result.stdout)
    assert (said["folder"], [kernel["name"] for kernel in said["kernels"]]) == (str(tmp_path), ["swiglu_dense", "swiglu_backward_dense"])
    assert said["nbytes"] == sum(kernel["nbytes"] for kernel in said["kernels"])


def test_the_command_for_a_plain_function_fuses_it(compiler: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(x, s):\n    return x * s\n")
    result = run(f"{tmp_path / 'mine.py'}:twice", "f32[8]", "-2.5", "--target", "sm_90", "-o", str(tmp_path / "k"))
    assert result.exit_code == 0, result.output
    (kernel,) = read_manifest(tmp_path / "k").kernels.values()
    assert kernel.recipes == (Recipe(f"{tmp_path / 'mine.py'}:twice", ("f32[8]", "-2.5")),)


@pytest.mark.parametrize(
    "call",
    [
        lambda: wl.ops.bias_gelu.plan(meta(64, 128), meta(128), target="h200"),
        lambda: wl.ops.clip.plan(meta(64, 128)[:, 1:], -1.0, 1, target="h200"),
        lambda: (lambda x: wl.ops.add.plan(x, meta(64), out=x, target="h200"))(meta(64)),
        lambda: wl.ops.cast.plan(meta(64), torch.float32, target="h200"),
        lambda: wl.ops.lerp.plan(meta(64), meta(64), w=0.5, out=meta(64, dtype=f32), target="h200"),
        lambda: wl.ops.swiglu.plan_backward(meta(64), meta(64), target="h200"),
        lambda: wl.ops.swiglu.plan_backward(meta(64).requires_grad_(), meta(64), target="h200"),
    ],
)
def test_the_command_that_is_named_adds_what_is_missing(
    call: Callable[[], Plan], compiler: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wl.ops.reglu.build([(meta(4), meta(4))], "h200", tmp_path)
    with monkeypatch.context() as patch:
        hide(patch, tmp_path)
        command = re.search(r"wideload build (.*)", said(lambda: call().cubin))
    assert command
    assert run(*shlex.split(command[1])).exit_code == 0
    hide(monkeypatch, tmp_path)
    assert call().cubin


@pytest.mark.parametrize("option", ["--in-place", "--grad"])
def test_an_option_that_names_no_tensor_is_refused(option: str, tmp_path: Path) -> None:
    result = run("add", "bf16[8]", "bf16[8]", option, "z", "--target", "h200", "-o", str(tmp_path))
    assert result.exit_code == 2
    assert f"{option} z is no tensor" in result.stderr
    assert "x, y" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_gradient_of_integers_is_refused(tmp_path: Path) -> None:
    result = run("add", "i32[8]", "i32[8]", "--grad", "x", "--target", "h200", "-o", str(tmp_path / "kernels"))
    assert (result.exit_code, (tmp_path / "kernels").exists()) == (2, False)
    assert "--grad x: i32 has no gradient" in result.stderr


def test_the_command_without_nvrtc_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, None)
    result = run("add", "bf16[8]", "bf16[8]", "--target", "h200", "-o", str(tmp_path / "k"))
    assert (result.exit_code, result.stderr.strip()) == (1, "CompileError: NVRTC could not be loaded")
    assert not (tmp_path / "k").exists()


@pytest.mark.parametrize(
    ("signatures", "targets", "folder", "message"),
    [
        ([], "h200", "kernels", "no signature"),
        ([(torch.ones(4),)], [], "kernels", "no target"),
        ([(torch.ones(4),)], "h200", "", "an empty folder"),
    ],
)
def test_nothing_is_not_built(
    signatures: Any, targets: Any, folder: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(wl.CompileError, match=message):
        wl.fuse(lambda x: x * 2).build(signatures, targets, folder)
    assert not list(tmp_path.iterdir())
