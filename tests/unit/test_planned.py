"""What a user reads of a plan: source, PTX, cubin, SASS, registers, reasons."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import cache

gated = wl.fuse(lambda x, y: F.silu(x) * y, name="gated")
apart = wl.fuse(lambda x, y: (x + y, y - 1), name="apart")
X = torch.ones(300, 8, dtype=torch.bfloat16)


def test_each_form_is_of_the_architecture_that_was_named() -> None:
    for target, arch in (("sm_80", "sm_80"), ("h200", "sm_90"), ("B200", "sm_100")):
        plan = gated.plan(X, X, target=target)
        assert plan.arch == arch
        assert f".target {arch}" in plan.ptx
        assert plan.cubin[:4] == b"\x7fELF"
        assert f"\t.target\t{arch}\n" in plan.sass
        assert plan.kernels[0].compiled.arch == arch


def test_the_source_is_one_kernel_in_plain_words() -> None:
    plan = gated.plan(X, X, target="sm_90")
    (kernel,) = plan.kernels
    assert kernel.name == "gated_dense"
    assert kernel.source == plan.source
    assert plan.source.count('extern "C" __global__') == 1
    assert "gated_dense(" in plan.source
    assert "F.silu(x) * y" in plan.source  # the user's line
    assert "const bf16* x_data" in plan.source
    assert "#include" not in plan.source
    assert "MUFU.EX2" in plan.sass
    assert 8 <= plan.registers <= 64
    assert plan.spill_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_gradients_of_a_scale_and_a_bias_spill_nothing(dtype: torch.dtype) -> None:
    """Two sums of each column: a thread has fewer rows in flight beside them."""

    @wl.fuse
    def scaled(x: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(x * scale + bias)

    x, row = (torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape in ((16384, 4096), (4096,)))
    plan = scaled.plan_backward(x, row, row.detach().requires_grad_(), target="sm_90")
    assert [kernel.plan.variant.family for kernel in plan.kernels] == ["columns"] * 3
    assert plan.spill_bytes == 0


def test_several_kernels_are_joined() -> None:
    plan = apart.plan(X, X[0], target="sm_90")
    first, second = plan.kernels
    assert plan.source == f"{first.source}\n{second.source}"
    assert plan.cubin == first.compiled.code + second.compiled.code
    assert plan.registers == max(first.compiled.registers, second.compiled.registers)
    assert plan.sass.count("\t.target\tsm_90\n") == 2
    assert plan.ptx.count(".entry") == 2


def test_no_elements_are_no_kernels() -> None:
    plan = gated.plan(X[:0], X[:0], target="sm_90")
    assert (plan.kernels, plan.source, plan.ptx, plan.cubin, plan.sass, plan.registers, plan.spill_bytes) == ((), "", "", b"", "", 0, 0)
    assert str(plan) == "gated for sm_90: 0 kernels"


def test_nothing_is_compiled_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    f = wl.fuse(lambda x: x * 1.0625 + 0.03125, name="lazy")
    before = cache.num_compilations()
    plan = f.plan(X, target="sm_90")
    assert plan.source
    assert str(plan)
    assert plan.to_dict()
    assert cache.num_compilations() == before
    assert plan.registers > 0
    assert plan.cubin
    assert plan.sass
    assert plan.spill_bytes == 0
    assert f.plan(X[:7], target="sm_90").registers == plan.registers
    assert cache.num_compilations() == before + 1


def test_a_plan_prints_its_kernels_and_reasons() -> None:
    text = str(gated.plan(X[:, 1:], X[:, 1:], target="sm_90"))
    assert text.startswith("gated for sm_90: 1 kernel\n  gated_")
    assert ", 2100 elements" in text
    for choice in ("family", "elements a thread", "index width", "grid"):
        assert f"\n    {choice} " in text
    assert repr(gated.plan(X, X, target="sm_90")) == str(gated.plan(X, X, target="sm_90"))
    assert "apart for sm_90: 2 kernels" in str(apart.plan(X, X[0], target="sm_90"))


def test_a_plan_as_plain_data() -> None:
    data = json.loads(json.dumps(apart.plan(X, X[0], target="sm_90").to_dict()))
    assert (data["function"], data["arch"]) == ("apart", "sm_90")
    first, second = data["kernels"]
    assert (first["name"], first["num_elements"]) == ("apart_" + first["family"], 2400)
    assert (second["name"], second["family"], second["num_elements"], second["elements_per_thread"]) == ("apart_dense", "dense", 8, 8)
    assert second["grid"] == 1
    assert {reason["choice"] for reason in first["reasons"]} >= {"family", "grid"}
    assert all(reason.keys() == {"choice", "value", "why"} for reason in first["reasons"])
