"""What a kernel may not do before the one ahead of it on the stream has ended: read or write global memory. As compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.nvrtc import compile_cubin
from wideload.planned import Plan
from wideload.sass import disassemble

bf16, i8 = torch.bfloat16, torch.int8
ARCHS = ("sm_90", "sm_100")

_GLOBAL = re.compile(r"\b(?:LDG|STG|LDGSTS|ATOMG|ATOM|REDG|RED|LD|ST|UBLKCP)\b")
_WAIT = "ACQBULK"


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan(fn: Callable[..., Any], *args: Any) -> Callable[[str], Plan]:
    return lambda arch: wl.fuse(fn, name="f").plan(*args, target=arch)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


TABLE = meta(4096, 128)
BIAS_GELU = wl.fuse(lambda x, b: F.gelu(x + b), name="f")
PLANS: dict[str, tuple[str, Callable[[str], Plan]]] = {
    "dense": ("dense", plan(lambda x, y: F.silu(x) * y, meta(1 << 20), meta(1 << 20))),
    "misaligned": ("rows", plan(lambda x, y: x + y, meta(1 << 20), meta((1 << 20) + 1)[1:])),
    "draws": ("dense", plan(lambda x: F.dropout(x, 0.1), meta(1 << 20))),
    "rows": ("rows", plan(lambda x, y: x + y, meta(64, 2048), meta(64, 1))),
    "strips": ("strips", plan(lambda x, y: F.gelu(x + y), meta(8192, 4096), meta(4096))),
    "kept": ("pitched", plan(rope, meta(8, 32, 4096, 128), TABLE, TABLE)),
    "pitched": ("pitched", plan(lambda x: torch.cat((x[:, :64], x[:, 96:] * 2), 1), meta(4096, 128))),
    "tile": ("tile", plan(lambda x, y: x.t() + y, meta(4096, 4096), meta(4096, 4096))),
    "ring": ("tile", plan(lambda x: x.t().contiguous(), meta(4099, 4093))),
    "strided": ("strided", plan(lambda x: x[::2, ::3] * 2, meta(512, 999))),
    "side results": ("dense", plan(lambda x: (x * 2, wl.amax(x.abs())), meta(1 << 20))),
    "sums": (
        "columns",
        lambda arch: wl.fuse(lambda x, b: F.gelu(x + b), name="f").plan_backward(meta(8192, 1024), meta(1024), target=arch),
    ),
    "several": ("dense", plan(lambda x, y: (x * 2, y * 3), meta(1 << 20), meta(1 << 19))),
}


def is_late(sass: str) -> bool:
    """Whether the wait comes before the first access, in the order of the text, in which no branch leads back."""
    wait, access = sass.find(_WAIT), _GLOBAL.search(sass)
    assert access is not None
    return 0 <= wait < access.start()


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", PLANS)
def test_nothing_is_read_or_written_before_the_wait(name: str, arch: str) -> None:
    family, make = PLANS[name]
    kernels = make(arch).kernels
    assert kernels[0].plan.variant.family == family
    for number, kernel in enumerate(kernels):
        assert kernel.sass.count(_WAIT) == 1
        variant = kernel.plan.variant
        assert variant.is_one_of_several == (len(kernels) > 1)
        waits_first = not variant.is_one_of_several or variant.reads_results
        assert is_late(kernel.sass) == waits_first, number


@pytest.mark.parametrize("name", ["dense", "kept", "tile", "ring"])
def test_a_planted_fault_is_found(name: str) -> None:
    (kernel,) = PLANS[name][1]("sm_90").kernels
    head, body = kernel.source.rsplit("    wait_for_previous();\n", 1)
    late = head + body.replace("    let_next_start();\n", "    wait_for_previous();\n")
    assert not is_late(disassemble(compile_cubin(late, arch="sm_90", name=kernel.name).code))


def test_earlier_architectures_do_not_wait() -> None:
    (kernel,) = PLANS["dense"][1]("sm_80").kernels
    assert _WAIT not in kernel.sass
    assert "PREEXIT" not in kernel.sass
