"""ATen's paths, as its sources have them, and eager's bytes as the reference articles count them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import planned
from wideload.analyze.aten import PATHS, AtenKernel
from wideload.errors import CompileError

N = 2**20
bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """ATen's kernels are not wideload's: none of those needs to be compiled."""

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise CompileError("not needed here")

    monkeypatch.setattr(planned, "find_cubin", missing)


def eager(fn: Callable[..., Any], *args: Any, target: str = "sm_90") -> tuple[AtenKernel, ...]:
    return wl.fuse(fn).explain(*args, target=target).eager.kernels


def test_three_ops_of_the_article() -> None:
    kernels = eager(lambda x, b, y: F.silu(x + b) * y, meta(N), meta(N), meta(N))
    assert [(k.op, k.bytes_read, k.bytes_written) for k in kernels] == [
        ("add", 4 * N, 2 * N),
        ("silu", 2 * N, 2 * N),
        ("mul", 4 * N, 2 * N),
    ]
    assert sum(k.nbytes for k in kernels) == 16 * N  # fused: 8
    assert {(k.path, k.threads, k.elements, k.grid) for k in kernels} == {("vectorized", 128, 8, N // 1024)}


def test_relu_times_two_plus_b() -> None:
    assert sum(k.nbytes for k in eager(lambda x, b: F.relu(x) * 2 + b, meta(N), meta(N))) == 14 * N


def test_a_hidden_round_trip_through_fp32_costs_eight_bytes_more() -> None:
    plain = sum(k.nbytes for k in eager(lambda x: F.silu(x), meta(N)))
    wide = eager(lambda x: F.silu(x.float()).to(bf16), meta(N))
    assert plain == 4 * N
    assert [(k.op, k.path, k.nbytes) for k in wide] == [
        ("to", "cast", 6 * N),
        ("silu", "vectorized", 8 * N),
        ("to", "vectorized", 6 * N),  # float32 to a half has a kernel of its own
    ]


@pytest.mark.parametrize(
    ("target", "dtype", "offset", "path", "vector", "elements"),
    [
        ("sm_90", bf16, 0, "vectorized", 8, 8),  # 16 bytes
        ("sm_100", bf16, 0, "vectorized", 8, 8),
        ("sm_80", bf16, 0, "vectorized", 4, 8),  # 8 elements on sm_90 and sm_100 alone
        ("sm_120", bf16, 0, "vectorized", 4, 8),
        ("sm_80", f32, 0, "vectorized", 4, 8),
        ("sm_90", torch.float64, 0, "vectorized", 2, 8),
        ("sm_90", i8, 0, "vectorized", 4, 8),  # one byte: 4 at most
        ("sm_90", bf16, 4, "vectorized", 4, 8),
        ("sm_90", bf16, 2, "vectorized", 2, 8),
        ("sm_90", bf16, 1, "unrolled", 1, 4),
        ("sm_90", f32, 1, "unrolled", 1, 4),
    ],
)
def test_contiguous_operands(target: str, dtype: torch.dtype, offset: int, path: str, vector: int, elements: int) -> None:
    (kernel,) = eager(lambda x, y: x + y, meta(N + offset, dtype=dtype)[offset:], meta(N, dtype=dtype), target=target)
    assert (kernel.path, kernel.vector, kernel.elements) == (path, vector, elements)
    assert kernel.grid == -(-N // (128 * elements))


OTHER_PATHS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...], str, int]] = {
    "mixed dtypes convert at run time": (lambda x, y: x + y, (meta(N), meta(N, dtype=f32)), "cast", 4),
    "a comparison computes in its operands' dtype": (lambda x, y: x < y, (meta(N), meta(N)), "vectorized", 8),
    "integers divided convert": (lambda x: x / 2, (meta(N, dtype=torch.int32),), "cast", 4),
    "a number is no operand": (lambda x: x + 1.5, (meta(N),), "vectorized", 8),
    "a 0-dim tensor is one": (lambda x, y: x + y, (meta(N), meta()), "strided", 4),
    "a row bias": (lambda x, y: x + y, (meta(1024, 1024), meta(1024)), "strided", 4),
    "a row bias, 4 bytes": (lambda x, y: x + y, (meta(1024, 1024, dtype=f32), meta(1024, dtype=f32)), "strided", 2),
    "a gap": (lambda x: x * 2, (meta(1024, 1024)[:, 1:-1],), "strided", 4),
    "every other element": (lambda x: x * 2, (meta(N)[::2],), "strided", 4),
    "one element a sector": (lambda x: x * 2, (meta(N)[::16],), "transposed", 4),
    "transposed alone is one run": (lambda x: x * 2, (meta(512, 1024).t(),), "vectorized", 8),
    "transposed beside rows": (lambda x, y: x.t() + y, (meta(512, 1024), meta(1024, 512)), "transposed", 4),
}


@pytest.mark.parametrize("case", OTHER_PATHS)
def test_other_paths(case: str) -> None:
    fn, args, path, elements = OTHER_PATHS[case]
    (kernel,) = eager(fn, *args)
    assert (kernel.path, kernel.elements) == (path, elements)
    assert kernel.path in PATHS


def test_where_converts_first() -> None:
    kernels = eager(lambda x, y: torch.where(x > 0, x, y), meta(N), meta(N, dtype=f32))
    assert [(k.op, k.nbytes) for k in kernels] == [("gt", 3 * N), ("to", 6 * N), ("where", (1 + 4 + 4 + 4) * N)]


def test_a_constant_reads_nothing() -> None:
    assert [(k.bytes_read, k.bytes_written) for k in eager(lambda x: torch.ones_like(x), meta(N))] == [(0, 2 * N)]


def test_views_launch_nothing_and_cat_copies() -> None:
    kernels = eager(lambda x: torch.cat([x[:, :8] + 1, x[:, 8:]], 1), meta(N, 16))
    assert [(k.op, k.bytes_read, k.bytes_written) for k in kernels] == [("add", 16 * N, 16 * N), ("cat", 32 * N, 32 * N)]
    assert eager(lambda x: x.contiguous(), meta(N)) == ()
    assert [k.op for k in eager(lambda x: x.t().contiguous(), meta(16, 8))] == ["contiguous"]


def test_what_32_bit_offsets_do_not_reach_is_launched_in_parts() -> None:
    # 2**31 float32 are 2**33 bytes: halved until a part spans less than 2**31 - 1 bytes.
    (kernel,) = eager(lambda x: x * 2, meta(2**31, dtype=f32))
    assert kernel.launches == 4
    (kernel,) = eager(lambda x: x * 2, meta(2**29, dtype=f32))
    assert kernel.launches == 1


def test_nothing_is_launched_for_no_elements() -> None:
    assert eager(lambda x: x * 2, meta(0, 4)) == ()
