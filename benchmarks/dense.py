"""Times contiguous functions on one GPU: wideload, eager PyTorch and torch.compile against the wall of the same bytes.

    python benchmarks/dense.py [--elements 268435456] [--samples 50] [--only TEXT] [--no-compile] [--json dense.json]

Each case is checked before it is timed, with a cold L2. The exit status is 0 where every case passes, 1 where one does not,
2 without a GPU. ``WIDELOAD_COMMIT`` names the commit where there is no git checkout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from table import Build, Case, run_cases

AT_THE_WALL = 0.98
"""The goal for contiguous operands of 2^26 elements and more."""


def flat(num_inputs: int, dtype: torch.dtype) -> Build:
    """So many contiguous arguments of one dim."""
    return lambda draw, n: [draw(n, dtype=dtype) for _ in range(num_inputs)]


def dense_case(name: str, fn: Callable[..., torch.Tensor], dtype: torch.dtype, num_inputs: int, max_steps: int = 0) -> Case:
    """``"x + b, bfloat16"``."""
    return Case(f"{name}, {str(dtype).removeprefix('torch.')}", fn, flat(num_inputs, dtype), AT_THE_WALL, max_steps)


CASES = (
    dense_case("x + b", lambda x, b: x + b, torch.bfloat16, 2),
    dense_case("silu(x + b) * y", lambda x, b, y: F.silu(x + b) * y, torch.bfloat16, 3, max_steps=1),
    dense_case("x + b", lambda x, b: x + b, torch.float32, 2),
    dense_case("relu(x)", lambda x: torch.relu(x), torch.float32, 1),
    dense_case("-x", lambda x: -x, torch.int8, 1),
    dense_case("relu(x)", lambda x: torch.relu(x), torch.int8, 1),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    return run_cases(__doc__, CASES, 1 << 28, 50, arguments)


if __name__ == "__main__":
    sys.exit(main())
