"""Times functions of operands that are no plain run of memory: misaligned, broadcast, of several dtypes, sliced, turned, large.

    python benchmarks/layouts.py [--elements 134217728] [--samples 30] [--only TEXT] [--no-compile] [--json layouts.json]

Each case is checked before it is timed, with a cold L2, and counted against the wall of the same bytes or against an easier call of
the same function. The exit status is 0 where every case passes, 1 where one does not, 2 without a GPU. ``WIDELOAD_COMMIT`` names the
commit where there is no git checkout.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from table import Beside, Build, Case, Draw, count_sectors, run_cases

AS_ALIGNED = 0.98
BROADCAST = MIXED = 0.97
SLICED = 0.96
TURNED = STEPPED = 0.95
SWIGLU, ROPE = 0.96, 0.95
GELU_TANH, GELU_ERF = 0.97, 0.95
NO_SLOWER = 0.99
"""Two runs of one case differ by up to 1 %."""

LARGE = 16
"""Times the elements of the other cases, which makes 2^31 of 2^27: more than 32-bit signed integers count."""

COLUMNS, PRIME_COLUMNS = 4096, 4099

bf16, f32, f64, i8 = torch.bfloat16, torch.float32, torch.float64, torch.int8


# ---- functions


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One rounding, so that it is to be bit for bit what eager gives."""
    return x + y


def turned_copy(x: torch.Tensor) -> torch.Tensor:
    """The matrix transposed, in memory too."""
    return x.t().contiguous()


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """As models have it behind one matrix product for both halves."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """As Hugging Face's Llama has it."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """As Hugging Face's Llama has it: q and k are (B, H, S, D), cos and sin (B, S, D)."""
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def exact_gelu_tanh(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``F.gelu(x + b, approximate="tanh")`` without the difference 1 + tanh, in which negative tails cancel."""
    x = x + b
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def exact_gelu(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``F.gelu(x + b)`` without the difference 1 + erf, in which negative tails cancel."""
    x = x + b
    tail: torch.Tensor = torch.special.erfc(-x / math.sqrt(2))
    return x * tail / 2


# ---- shapes


def num_rows(num_elements: int, row: int) -> int:
    """Rows of ``row`` elements that hold as many elements, two at least."""
    return max(2, -(-num_elements // row))


def least_side(num_elements: int) -> int:
    """The side of the smallest square of as many elements."""
    return math.isqrt(num_elements - 1) + 1


def whole_side(num_elements: int) -> int:
    """The next multiple of 128: lines of every dtype are aligned, and all tiles whole."""
    return -(-least_side(num_elements) // 128) * 128


def prime_side(num_elements: int) -> int:
    """The next prime: no two lines in a row are aligned alike."""
    side = max(2, least_side(num_elements))
    while any(side % divisor == 0 for divisor in range(2, math.isqrt(side) + 1)):
        side += 1
    return side


# ---- arguments


def runs(x_offset: int, b_offset: int, dtype: torch.dtype) -> Build:
    """Two runs of memory that begin so many elements behind an aligned address."""
    return lambda draw, n: [draw(n + x_offset, dtype=dtype)[x_offset:], draw(n + b_offset, dtype=dtype)[b_offset:]]


def matrix_and_row(columns: int, times: int = 1) -> Build:
    """A matrix, of ``times`` as many elements, and one row for all of its rows."""
    return lambda draw, n: [draw(num_rows(times * n, columns), columns), draw(columns)]


def matrix_and_column(draw: Draw, n: int) -> list[torch.Tensor]:
    """A matrix, and one element for each of its rows."""
    rows = num_rows(n, COLUMNS)
    return [draw(rows, COLUMNS), draw(rows, 1)]


def interleaved(draw: Draw, n: int) -> list[torch.Tensor]:
    """(B, S, C) and (B, 1, C): a row for all rows of one batch, another for the next."""
    batches = num_rows(n, 128 * 1024)
    return [draw(batches, 128, 1024), draw(batches, 1, 1024)]


def turned_and_row(draw: Draw, n: int) -> list[torch.Tensor]:
    """A transposed matrix and a row: in memory, one element for each run."""
    rows = num_rows(n, COLUMNS)
    return [draw(rows, COLUMNS).t(), draw(rows)]


def two_dtypes(x: torch.dtype, y: torch.dtype) -> Build:
    """Two runs of memory of unlike items."""
    return lambda draw, n: [draw(n, dtype=x), draw(n, dtype=y)]


def mask_and_two(draw: Draw, n: int) -> list[torch.Tensor]:
    """What ``torch.where`` takes."""
    return [draw(n, dtype=torch.bool), draw(n), draw(n)]


def inner_columns(columns: int) -> Build:
    """``x[:, 1:-1]``, of rows that are two elements longer."""
    return lambda draw, n: [draw(num_rows(n, columns - 2), columns)[:, 1:-1]]


def packed(draw: Draw, n: int) -> list[torch.Tensor]:
    """Rows of two halves."""
    return [draw(num_rows(n, COLUMNS), 2 * COLUMNS)]


def halves(draw: Draw, n: int) -> list[torch.Tensor]:
    """Both halves of each row, as ``chunk`` gives them."""
    return list(packed(draw, n)[0].chunk(2, dim=-1))


def odd_rows(draw: Draw, n: int) -> list[torch.Tensor]:
    """Rows of an odd length, of rows that are two elements longer, and a matrix of as many."""
    rows, columns = num_rows(n, PRIME_COLUMNS - 2), PRIME_COLUMNS - 2
    return [draw(rows, columns + 2)[:, 2:], draw(rows, columns)]


def square(side: Callable[[int], int], dtype: torch.dtype) -> Build:
    """One square matrix."""
    return lambda draw, n: [draw(side(n), side(n), dtype=dtype)]


def square_turned_and_not(side: Callable[[int], int]) -> Build:
    """``x.t()``, and another that is not transposed."""
    return lambda draw, n: [draw(side(n), side(n)).t(), draw(side(n), side(n))]


def heads(draw: Draw, n: int) -> list[torch.Tensor]:
    """(B, S, H, D)."""
    return [draw(4, num_rows(n, 4 * 32 * 128), 32, 128)]


def images(draw: Draw, n: int) -> list[torch.Tensor]:
    """(N, C, H, W), its channels last in memory, and one contiguous."""
    shape = (num_rows(n, 256 * 56 * 56), 256, 56, 56)
    return [draw(*shape).to(memory_format=torch.channels_last), draw(*shape)]


def every_second(draw: Draw, n: int) -> list[torch.Tensor]:
    """``x[:, ::2]``."""
    return [packed(draw, n)[0][:, ::2]]


def queries_and_keys(draw: Draw, n: int) -> list[torch.Tensor]:
    """Queries of 32 heads and keys of 8, as (B, S, H, D) transposed to (B, H, S, D), and the cosines and sines of (B, S, D)."""
    positions = num_rows(n, 4 * 40 * 128)
    q, k = (draw(4, positions, num_heads, 128).transpose(1, 2) for num_heads in (32, 8))
    return [q, k, draw(4, positions, 128), draw(4, positions, 128)]


def one_run(dtype: torch.dtype, times: int = 1, more: int = 0) -> Build:
    """One run of memory, of ``times`` as many elements and ``more``."""
    return lambda draw, n: [draw(times * n + more, dtype=dtype)]


def pitched(pitch: int) -> Build:
    """Rows of ``COLUMNS`` elements whose starts are ``pitch`` apart."""
    return lambda draw, n: [draw(num_rows(n, COLUMNS), pitch)[:, :COLUMNS]]


# ---- the table

MISALIGNED = tuple(
    Case(f"{name}, {label}", add, runs(*offsets, dtype), AS_ALIGNED, beside=Beside("aligned", runs(0, 0, dtype)))
    for name, offsets, label, dtype in (
        ("x[1:] + b[1:]", (1, 1), "bf16", bf16),
        ("x[1:] + b[3:]", (1, 3), "bf16", bf16),
        ("x[1:] + b[1:]", (1, 1), "f32", f32),
        ("x[1:] + b[3:]", (1, 3), "f32", f32),
        ("x[1:] + b[1:]", (1, 1), "int8", i8),
        ("x[1:] + b[3:]", (1, 3), "int8", i8),
    )
)

BROADCASTS = (
    Case("x + row", add, matrix_and_row(COLUMNS), BROADCAST),
    Case("x + row, prime width", add, matrix_and_row(PRIME_COLUMNS), BROADCAST),
    Case("x + column", add, matrix_and_column, BROADCAST),
    Case("x + (B, 1, C)", add, interleaved, BROADCAST),
    Case("x.t() + row", add, turned_and_row, BROADCAST),
)

DTYPES = (
    Case("bf16 + f32 -> f32", add, two_dtypes(bf16, f32), MIXED),
    Case("bf16 -> f32", lambda x: x.float(), one_run(bf16), MIXED),
    Case("f32 -> bf16", lambda x: x.bfloat16(), one_run(f32), MIXED),
    Case("int8 -> bf16", lambda x: x.bfloat16(), one_run(i8), MIXED),
    Case("where(bool, bf16, bf16)", lambda m, x, y: torch.where(m, x, y), mask_and_two, MIXED),
)

SLICES = (
    Case("x[:, 1:-1] * 2", lambda x: x * 2, inner_columns(COLUMNS), SLICED),
    Case("x[:, 1:-1] * 2, prime width", lambda x: x * 2, inner_columns(PRIME_COLUMNS), SLICED),
    Case("silu(g) * u, halves", lambda g, u: F.silu(g) * u, halves, SLICED, max_steps=1),
    Case("x[:, 2:] + b, odd rows", add, odd_rows, SLICED),
)

TRANSPOSES = (
    *(
        Case(f"x.t().contiguous(), {kind}{label}", turned_copy, square(side, dtype), TURNED)
        for kind, side in (("", whole_side), ("prime, ", prime_side))
        for label, dtype in (("int8", i8), ("bf16", bf16), ("f32", f32), ("f64", f64))
    ),
    Case("x.t() + w", add, square_turned_and_not(whole_side), TURNED),
    Case("x.t() + w, prime", add, square_turned_and_not(prime_side), TURNED),
    Case("BSHD -> BHSD", lambda x: x.transpose(1, 2).contiguous(), heads, TURNED),
    Case("channels_last + contiguous", add, images, TURNED),
)

STEPS = (Case("x[:, ::2] * 2", lambda x: x * 2, every_second, STEPPED, count_read=count_sectors),)

LARGES = (
    Case("-x, > 2^31 int8", lambda x: -x, one_run(i8, LARGE, 11), NO_SLOWER, beside=Beside("fewer elements", one_run(i8))),
    Case(
        "x + row, > 2^31",
        add,
        matrix_and_row(PRIME_COLUMNS, LARGE),
        NO_SLOWER,
        beside=Beside("fewer elements", matrix_and_row(PRIME_COLUMNS)),
    ),
    Case(
        "x * 2, offsets > 2^31",
        lambda x: x * 2,
        pitched((LARGE + 1) * COLUMNS),
        NO_SLOWER,
        beside=Beside("near rows", pitched(2 * COLUMNS)),
    ),
)

PASTED = (
    Case("packed SwiGLU", swiglu, packed, SWIGLU, max_steps=1),
    Case("rotate_half RoPE", rope, queries_and_keys, ROPE, max_steps=1),
    Case(
        "gelu(x + row), tanh",
        lambda x, b: F.gelu(x + b, approximate="tanh"),
        matrix_and_row(COLUMNS),
        GELU_TANH,
        max_steps=1,
        exact=exact_gelu_tanh,
    ),
    Case("gelu(x + row), erf", lambda x, b: F.gelu(x + b), matrix_and_row(COLUMNS), GELU_ERF, max_steps=1, exact=exact_gelu),
)

CASES = (*MISALIGNED, *BROADCASTS, *DTYPES, *SLICES, *TRANSPOSES, *STEPS, *LARGES, *PASTED)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    return run_cases(__doc__, CASES, 1 << 27, 30, arguments)


if __name__ == "__main__":
    sys.exit(main())
