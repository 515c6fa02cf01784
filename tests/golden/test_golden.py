"""Generated kernels as a reader sees them, below the prelude: a change of the generator shows as a change of these files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.emit.kernel import emit_kernel
from wideload.foreach import find_listed
from wideload.lists import split_lists
from wideload.nvrtc import compile_cubin

pytestmark = pytest.mark.usefixtures("full_blocks")

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32


def meta(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@wl.fuse
def swiglu(gate: Any, up: Any) -> Any:
    return F.silu(gate) * up


@wl.fuse
def threshold_mask(x: Any, limit: Any, scale: Any) -> Any:
    return (x.float() * scale > limit) & (x < 100)


@wl.fuse
def shifted_gelu(x: Any, bias: Any, rate: Any) -> Any:
    y = F.gelu(x + bias)
    return y * rate


@wl.fuse
def decay(weight: Any, grad: Any, lr: Any) -> Any:
    return weight * (1 - lr * 0.1) - lr * grad


@wl.fuse
def noisy_decay(weight: Any, grad: Any, lr: Any) -> Any:
    return weight * (1 - lr * 0.1) - lr * grad + torch.rand_like(weight, dtype=f32) * 0.01


@wl.fuse(numerics="eager")
def rounded(x: Any, y: Any) -> Any:
    return torch.where(x > y, x * 2 + y, x / 3)


@wl.fuse
def moments(grad: Any, mean: Any, square: Any, beta: Any) -> Any:
    new_mean = torch.lerp(grad, mean, beta)
    new_square = square * beta + grad * grad * (1 - beta)
    return new_mean, new_square, (new_mean / (new_square.sqrt() + 1e-8)).to(bf16)


@wl.fuse
def scaled_with_amax(x: Any, scale: Any) -> Any:
    y = x.float() * scale
    return y.to(bf16), wl.amax(y), wl.any_nonfinite(y)


@wl.fuse
def causal_dropout(scores: Any) -> Any:
    return torch.where(wl.index(-1) <= wl.index(-2), F.dropout(scores, 0.1), 0.0)


@wl.fuse
def bias_gelu(x: Any, bias: Any) -> Any:
    return F.gelu(x + bias, approximate="tanh")


@wl.fuse
def rope(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


WEIGHT, GRAD = torch.zeros(4096), torch.zeros(4096)
KERNELS: dict[str, Callable[[], Any]] = {
    "dense_bf16": lambda: swiglu.plan(meta(4096, dtype=bf16), meta(4096, dtype=bf16), target="sm_90"),
    "dense_mixed_bool": lambda: threshold_mask.plan(meta(4096, dtype=torch.int8), meta(4096, dtype=f16), 0.5, target="sm_90"),
    "strided_rank_3": lambda: shifted_gelu.plan(meta(4, 6, 10)[:, :5, ::2], meta(5, 1), 2.0, target="sm_90"),
    "rows_misaligned": lambda: shifted_gelu.plan(torch.zeros(5, 30)[:, 1:], torch.zeros(5, 1), 2.0, target="sm_90"),
    "pitched_rope": lambda: rope.plan(*(meta(*shape, 64, dtype=bf16) for shape in ((2, 7, 3), (7, 1), (7, 1))), target="sm_90"),
    "strips_gelu": lambda: bias_gelu.plan(meta(1 << 15, 2048, dtype=bf16), meta(2048, dtype=bf16), target="sm_90"),
    "rows_positions": lambda: causal_dropout.plan(meta(2, 32, 32, dtype=bf16), target="sm_90"),
    "dense_eager": lambda: rounded.plan(meta(4096, dtype=f16), meta(4096, dtype=f16), target="sm_90"),
    "dense_several_results": lambda: moments.plan(meta(4096), meta(4096), meta(4096), 0.9, target="sm_90"),
    "dense_side_results": lambda: scaled_with_amax.plan(meta(4096, dtype=bf16), 2.0, target="sm_90"),
    "columns_bias_gelu": lambda: bias_gelu.plan_backward(meta(96, 200, dtype=bf16), meta(200, dtype=bf16), target="sm_90"),
    "columns_total": lambda: SimpleNamespace(kernels=KERNELS["columns_bias_gelu"]().kernels[1:]),
    "rows_side_results": lambda: scaled_with_amax.plan(torch.zeros(5, 30, dtype=bf16)[:, 1:], 2.0, target="sm_90"),
}


@wl.fuse
def adapt(p: Any, mean: Any, square: Any, steps: Any, rate: float, log_beta: float) -> Any:
    correction = -(steps * log_beta).expm1()
    return p - rate / correction * mean / (square.sqrt() + 1e-8)


LISTED = [torch.zeros(8, dtype=bf16)]
LISTS: dict[str, tuple[wl.FusedFunction, tuple[Any, ...], Any]] = {
    "foreach_several_results": (moments, ([torch.zeros(8)], [torch.zeros(8)], [torch.zeros(8)], 0.9), None),
    "foreach_side_results": (scaled_with_amax, ([torch.zeros(8, dtype=bf16)], 2.0), None),
    "foreach_in_place": (noisy_decay, (LISTED, [torch.zeros(8, dtype=bf16)], 0.01), LISTED),
    "foreach_uniform": (adapt, (*([torch.zeros(8, dtype=bf16)] for _ in range(3)), [torch.tensor(1.0)], 0.01, -0.1), None),
    "foreach_each_number": (shifted_gelu, ([torch.zeros(8, dtype=bf16)], [torch.tensor(1.0)], [2.0]), None),
}


def generate(name: str) -> tuple[str, str, str]:
    """The kernel's name, the prelude and the code below it."""
    if name in LISTS:
        f, args, out = LISTS[name]
        lists = split_lists(name, (), args, {}, out)
        call = find_listed(f, lists, f._bind(*lists.at(0)))
        assert call is not None
        (plan,) = call.listed.plans or ()
        kernel, program, source = plan.name, plan.program, emit_kernel(plan.program, plan.variant)
    else:
        planned = KERNELS[name]().kernels[0]
        kernel, program, source = planned.name, planned.plan.program, planned.source
    start = source.index(f"DEVICE void {program.name}_element(")
    return kernel, source[:start], source[start:]


@pytest.mark.parametrize("name", [*KERNELS, *LISTS])
def test_a_generated_kernel_is_as_it_was(name: str, compare_with_golden: Callable[[str, str], None]) -> None:
    _, _, code = generate(name)
    compare_with_golden(name, code)


@pytest.mark.parametrize("name", [*KERNELS, *LISTS])
def test_a_golden_kernel_compiles(name: str) -> None:
    kernel, prelude, _ = generate(name)
    compile_cubin(prelude + (Path(__file__).parent / f"{name}.cu").read_text(encoding="utf-8"), arch="sm_75", name=kernel)


def test_every_golden_file_is_generated_here() -> None:
    assert {path.stem for path in Path(__file__).parent.glob("*.cu")} == {*KERNELS, *LISTS}


def test_a_missing_and_a_changed_file_are_failures(compare_with_golden: Callable[[str, str], None], request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden", default=False):
        pytest.skip("files are being written")
    with pytest.raises(AssertionError, match=r"no_such_kernel\.cu is missing: pytest tests/golden --update-golden writes it"):
        compare_with_golden("no_such_kernel", "")
    _, _, code = generate("dense_bf16")
    with pytest.raises(AssertionError, match=r"(?s)dense_bf16\.cu has changed.*-    const float mul = silu \* up;.*\+ .*silu \+ up;"):
        compare_with_golden("dense_bf16", code.replace("silu * up", "silu + up"))
