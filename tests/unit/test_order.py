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
    "kept": ("pitched", plan(rope, meta(4, 4096, 32, 128).transpose(1, 2), TABLE, TABLE)),
    "pitched": ("pitched", plan(lambda x: torch.cat((x[:, :64], x[:, 96:] * 2), 1), meta(4096, 128))),
    "tile": ("tile", plan(lambda x, y: x.t() + y, meta(4096, 4096), meta(4096, 4096))),
    "ring": ("tile", plan(lambda x: x.t().contiguous(), meta(4099, 4093))),
    "one value": ("dense", plan(lambda x, y: x * y, meta(1 << 20), meta(1))),
    "stepped": ("rows", plan(lambda x: x[:, ::2] * x[:, 1::2], meta(64, 2048))),
    "narrow": ("rows", plan(lambda x: x[:, 1:] + 1, meta(64, 77, dtype=i8))),
    "kept mask": ("rows", plan(lambda x, mask: torch.where(mask, x, 0), meta(16, 32, 2048, 2048), meta(2048, 2048, dtype=torch.bool))),
    "tile in rows": ("tile", plan(lambda x, b: x.transpose(1, 2).contiguous() + b, meta(8, 333, 512), meta(333))),
    "drawn tile": ("tile", plan(lambda x: F.dropout(x.t(), 0.1).contiguous(), meta(4096, 4096))),
    "side results of rows": ("rows", plan(lambda x, y: (x + y, wl.any_nonfinite(x)), meta(64, 2048), meta(64, 1))),
    "side results of a tile": ("tile", plan(lambda x: (x.t() * 2, wl.amax(x.abs())), meta(4096, 4096))),
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
    assert any(kernels[0].plan.variant.kept) == name.startswith("kept")
    for number, kernel in enumerate(kernels):
        assert kernel.sass.count(_WAIT) == 1
        variant = kernel.plan.variant
        assert variant.is_one_of_several == (len(kernels) > 1)
        waits_first = not variant.is_one_of_several or variant.reads_results
        assert is_late(kernel.sass) == waits_first, number


@pytest.mark.parametrize("name", ["dense", "kept", "kept mask", "tile", "ring"])
def test_a_planted_fault_is_found(name: str) -> None:
    (kernel,) = PLANS[name][1]("sm_90").kernels
    head, body = kernel.source.rsplit("    wait_for_previous();\n", 1)
    late = head + body.replace("    let_next_start();\n", "    wait_for_previous();\n")
    assert not is_late(disassemble(compile_cubin(late, arch="sm_90", name=kernel.name).code))


def test_earlier_architectures_do_not_wait() -> None:
    (kernel,) = PLANS["dense"][1]("sm_80").kernels
    assert _WAIT not in kernel.sass
    assert "PREEXIT" not in kernel.sass


@pytest.mark.parametrize(
    ("fn", "args", "moves_much"),
    [
        (lambda x, y: x + y, (meta(1 << 20), meta(1 << 20)), True),  # 8 elements a thread of 2 + 2 + 2 bytes, 128 threads: 6 KiB
        (lambda x: x * 2, (meta(1 << 20),), False),  # 4 KiB
        (lambda x: x.float(), (meta(1 << 20),), False),  # 4 elements of 2 + 4 bytes: 3 KiB
        (lambda x, row: x + row, (meta(1024, 1024), meta(1024)), False),  # a row is read once
        (lambda x, y: x + y, (meta(1024, 1024)[:, 8:], meta(1024, 1024)[:, 8:]), True),
        (lambda x: (x * 2, wl.any_nonfinite(x)), (meta(1 << 20),), False),  # one word is no traffic
        (lambda x: x * 2, (meta(5),), False),
        (lambda x, y: x + y, (meta(5), meta(5)), True),  # as of any other size
        (lambda x: x.t().contiguous(), (meta(4096, 4096),), True),
    ],
)
def test_a_block_that_moves_little_lets_the_next_kernel_start_in_small_grids_alone(
    fn: Any, args: tuple[Any, ...], moves_much: bool
) -> None:
    (kernel,) = wl.fuse(fn, name="f").plan(*args, target="sm_90").kernels
    assert kernel.plan.variant.moves_much == moves_much
    assert ("    let_next_start();\n" in kernel.source) == moves_much
    assert ("    if (gridDim.x <= 2048) let_next_start();\n" in kernel.source) == (not moves_much)
