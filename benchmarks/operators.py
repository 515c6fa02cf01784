"""Times activations, gates, masks, dropout, RoPE and quantisation in bf16 on one GPU against the wall of the same bytes and the peers.

    python benchmarks/operators.py [--elements 268435456] [--samples 30] [--only TEXT] [--no-compile] [--json operators.json]

Peers are eager PyTorch, torch.compile and, where it is installed and has the operation, Liger-Kernel. Each case is checked before it is
timed, with a cold L2. The exit status is 0 where every case passes, 1 where one does not, 2 without a GPU. ``WIDELOAD_COMMIT`` names the
commit where there is no git checkout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

import wideload as wl
from layouts import COLUMNS, exact_gelu, exact_gelu_tanh, halves, matrix_and_row, num_rows, rope
from table import Build, Case, Draw, InPlace, run_cases
from wideload.nn import packed_swiglu

AT_THE_WALL = 0.97
GELU_ERF = DROPOUT = ROPE = GATE_TO_FP8 = 0.95
QUANTIZED = 0.96

P = 0.1
"""The probability of dropout."""
SHARE_SIGMAS = 6
"""Of the dropped elements' share, from `P`: a right draw is further off once in 5e8."""

f32, f64, fp8 = torch.float32, torch.float64, torch.float8_e4m3fn
FP8_TOP = torch.finfo(fp8).max


# ---- definitions


def exact_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` limited to what e4m3fn holds."""
    return (x / scale).clamp(-FP8_TOP, FP8_TOP).float().to(fp8)


def exact_gate_to_fp8(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """SwiGLU, and `exact_fp8` of it."""
    return exact_fp8(F.silu(gate) * up, scale)


def gate_to_fp8_with_amax(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> Any:
    """`wl.ops.swiglu_quantize_fp8`, and the largest magnitude that it met."""
    return wl.ops.swiglu_quantize_fp8.__wrapped__(gate, up, scale, with_amax=True)


def exact_gate_to_fp8_with_amax(gate: torch.Tensor, up: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`exact_gate_to_fp8`, and the largest magnitude before it."""
    return exact_gate_to_fp8(gate, up, scale), (F.silu(gate) * up).abs().amax()


def exact_unscaled(grad: torch.Tensor, inv_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Finite gradients times ``inv_scale``, and that they are finite."""
    return grad * inv_scale, torch.zeros_like(inv_scale)


def exact_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``F.gelu(gate) * up`` without cancellation."""
    return exact_gelu(gate, torch.zeros_like(gate[:1])) * up


def exact_geglu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``F.gelu(gate, approximate="tanh") * up`` without cancellation."""
    return exact_gelu_tanh(gate, torch.zeros_like(gate[:1])) * up


def exact_int8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``x / scale`` rounded to even, limited."""
    return (x / scale).round().clamp(-128, 127).to(torch.int8)


def exact_dequantized(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """``q * scale``, with the digits that the dtype of neither has."""
    return q.double() * scale


def tanh_geglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`wl.ops.geglu` by tanh, as peers are given it too."""
    return F.gelu(gate, approximate="tanh") * up


def tanh_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`wl.ops.bias_gelu` by tanh, as peers are given it too."""
    return F.gelu(x + bias, approximate="tanh")


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Numbers that fp8 has."""
    return x.to(fp8)


def causal_where(scores: torch.Tensor) -> torch.Tensor:
    """The causal mask from the coordinates of queries and keys, as torch's operators have them."""
    queries, keys = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
    return torch.where(keys <= queries[:, None], scores, -math.inf)


def given_dropped(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What dropout is of ``x``, none of it zero, where ``result`` is: a kept element over ``1 - P``, a dropped one times 0.

    Raises ``WideloadError`` where the share of dropped elements is not `P`, or the same in all.
    """
    kept = result != 0
    share, sigma = 1 - float(kept.sum(dtype=f64)) / kept.numel(), math.sqrt(P * (1 - P) / kept.numel())
    if abs(share - P) > SHARE_SIGMAS * sigma:
        raise wl.WideloadError(f"{share:.6f} of the elements were dropped; allowed: {P} +- {SHARE_SIGMAS * sigma:.1g}")
    return x * kept / (1 - P)


def masked(x: torch.Tensor) -> torch.Tensor:
    """Dropout."""
    return F.dropout(x, P)


# ---- Liger-Kernel, imported at the first call: where it is missing, that is the reason for which it was not run


def liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Liger's ``silu(gate) * up``."""
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def liger_packed_swiglu(x: torch.Tensor) -> Any:
    """Liger's, of rows of two halves."""
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    return LigerFusedGateUpSiLUMulFunction.apply(x)


def liger_geglu(gate: torch.Tensor, up: torch.Tensor) -> Any:
    """Liger's ``gelu(gate) * up``, by tanh."""
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def liger_rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Liger's RoPE, which turns ``q`` and ``k`` in place where they are transposed (B, S, H, D), and reads the tables' first halves."""
    from liger_kernel.ops.rope import LigerRopeFunction

    return LigerRopeFunction.apply(q, k, cos, sin)[:2]  # some versions return the tables too


# ---- arguments


def matrices(num: int) -> Build:
    """So many matrices of ``COLUMNS`` columns."""
    return lambda draw, n: [draw(num_rows(n, COLUMNS), COLUMNS) for _ in range(num)]


def packed(draw: Draw, n: int) -> list[torch.Tensor]:
    """Rows of two halves."""
    return [draw(num_rows(n, COLUMNS), 2 * COLUMNS)]


def matrix_row_matrix(draw: Draw, n: int) -> list[torch.Tensor]:
    """A matrix, a row for all of its rows, another matrix."""
    return [*matrix_and_row(COLUMNS)(draw, n), draw(num_rows(n, COLUMNS), COLUMNS)]


def squares(draw: Draw, n: int) -> list[torch.Tensor]:
    """Scores [batch, queries, keys], of as many queries as keys: 4096, fewer where ``n`` is small."""
    side = min(4096, max(128, math.isqrt(n) // 128 * 128))
    return [draw(num_rows(n, side * side), side, side)]


def scales(draw: Draw, *shape: int) -> torch.Tensor:
    """Positive numbers from 1/256 on: some quotients of normal numbers pass what fp8 and int8 hold, most do not."""
    return draw(*shape, dtype=f32).abs() / 128 + 1 / 256


def scaled(num: int, is_by_row: bool, convert: Callable[[torch.Tensor], torch.Tensor] = lambda x: x) -> Build:
    """So many matrices, converted, and one scale for all, or one for each row."""

    def build(draw: Draw, n: int) -> Sequence[torch.Tensor]:
        rows = num_rows(n, COLUMNS)
        return [*(convert(draw(rows, COLUMNS)) for _ in range(num)), scales(draw, *((rows, 1) if is_by_row else ()))]

    return build


def bytes_and_scale(draw: Draw, n: int) -> Sequence[torch.Tensor]:
    """int8, and one scale for each row."""
    rows = num_rows(n, COLUMNS)
    return [draw(rows, COLUMNS, dtype=torch.int8), scales(draw, rows, 1)]


def heads_and_tables(draw: Draw, n: int) -> list[torch.Tensor]:
    """(B, S, H, D), and fp32 tables of (S, D / 2) whose values have the digits of bf16.

    A product with one of them is exact in fp32, so that the difference of two can be held to the exact value however small it is.
    """
    positions = num_rows(n, 4 * 32 * 128)
    return [draw(4, positions, 32, 128), draw(positions, 64).float(), draw(positions, 64).float()]


def queries_and_keys(draw: Draw, n: int) -> list[torch.Tensor]:
    """(B, H, S, D) as transposed (B, S, H, D) of 32 and of 8 heads, and tables of (1, S, D) whose two halves are alike."""
    positions = num_rows(n, 4 * 40 * 128)
    q, k = (draw(4, positions, num_heads, 128).transpose(1, 2) for num_heads in (32, 8))
    return [q, k, *(draw(1, positions, 64).repeat(1, 1, 2) for _ in range(2))]


# ---- the table


def unary(name: str, fn: Callable[[torch.Tensor], torch.Tensor], goal: float = AT_THE_WALL, exact: Any = None) -> Case:
    """``fn`` of one matrix, right to one step of bf16."""
    return Case(name, fn, matrices(1), goal, max_steps=1, exact=exact)


def ready_made(name: str, op: Any, build: Build, goal: float = AT_THE_WALL, exact: Any = None, rival: Any = None) -> Case:
    """A fused function of the library, right to one step; its peers run what it is written as, in torch's operators."""
    return Case(name, op.__wrapped__, build, goal, 1, exact, subject=op, rivals={"liger": rival} if rival else {})


def no_bias(exact: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """``exact`` of ``x`` and a bias, of ``x`` alone."""
    return lambda x: exact(x, torch.zeros_like(x[:1]))


ACTIVATIONS = (
    unary("gelu, tanh", lambda x: F.gelu(x, approximate="tanh"), exact=no_bias(exact_gelu_tanh)),
    unary("gelu, erf", lambda x: F.gelu(x), GELU_ERF, exact=no_bias(exact_gelu)),
    unary("tanh", lambda x: torch.tanh(x)),
    unary("sigmoid", lambda x: torch.sigmoid(x)),
    unary("silu", lambda x: F.silu(x)),
    unary("mish", lambda x: F.mish(x)),
    unary("softplus", lambda x: F.softplus(x)),
)

MASKS = (
    Case(f"dropout {P}", masked, matrices(1), DROPOUT, max_steps=1, given=given_dropped),
    Case("causal mask", causal_where, squares, AT_THE_WALL, subject=wl.ops.causal_mask),
)

QUANTIZATIONS = (
    ready_made("bf16 -> fp8, one scale", wl.ops.quantize_fp8, scaled(1, False), QUANTIZED, exact_fp8),
    ready_made("bf16 -> fp8, scale by row", wl.ops.quantize_fp8, scaled(1, True), QUANTIZED, exact_fp8),
    ready_made("fp8 -> bf16, one scale", wl.ops.dequantize_fp8, scaled(1, False, to_fp8), QUANTIZED, exact_dequantized),
    ready_made("fp8 -> bf16, scale by row", wl.ops.dequantize_fp8, scaled(1, True, to_fp8), QUANTIZED, exact_dequantized),
    ready_made("bf16 -> int8, scale by row", wl.ops.quantize_int8, scaled(1, True), QUANTIZED, exact_int8),
    ready_made("int8 -> bf16, scale by row", wl.ops.dequantize_int8, bytes_and_scale, QUANTIZED, exact_dequantized),
)

GATES = (
    ready_made("swiglu", wl.ops.swiglu, matrices(2), rival=liger_swiglu),
    ready_made("swiglu of halves", wl.ops.swiglu, halves, rival=liger_swiglu),
    ready_made("packed swiglu", packed_swiglu, packed, rival=liger_packed_swiglu),
    ready_made("geglu, erf", wl.ops.geglu, matrices(2), exact=exact_geglu),
    Case("geglu, tanh", tanh_geglu, matrices(2), AT_THE_WALL, 1, exact_geglu_tanh, rivals={"liger": liger_geglu}),
    ready_made("bias_gelu, erf", wl.ops.bias_gelu, matrix_and_row(COLUMNS), exact=exact_gelu),
    Case("bias_gelu, tanh", tanh_bias_gelu, matrix_and_row(COLUMNS), AT_THE_WALL, 1, exact_gelu_tanh),
    ready_made("bias_silu_mul", wl.ops.bias_silu_mul, matrix_row_matrix),
    ready_made("swiglu -> fp8, scale by row", wl.ops.swiglu_quantize_fp8, scaled(2, True), GATE_TO_FP8, exact_gate_to_fp8),
    Case("swiglu -> fp8 with amax", gate_to_fp8_with_amax, scaled(2, False), GATE_TO_FP8, 1, exact_gate_to_fp8_with_amax),
)

GRADIENTS = (ready_made("unscale and found_inf", wl.ops.unscale, scaled(1, False), exact=exact_unscaled),)

ROPES = (
    ready_made("rope", wl.ops.rope, heads_and_tables, ROPE),
    Case("rope of q and k", rope, queries_and_keys, ROPE, 1, rivals={"liger": InPlace(liger_rope)}),
)

CASES = (*ACTIVATIONS, *MASKS, *QUANTIZATIONS, *GATES, *GRADIENTS, *ROPES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    return run_cases(__doc__, CASES, 1 << 28, 30, arguments)


if __name__ == "__main__":
    sys.exit(main())
