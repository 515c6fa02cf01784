"""What a call costs the host, beside one eager operation: a new result, ``out=``, gradients, numbers, random numbers.

python benchmarks/host.py --json results/host.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import wideload as wl
from table import Draw, Finding, describe_environment
from wideload.native import native_state

SCHEMA = 1
SHAPE = (64, 1024)
"""So small that the GPU is never waited for."""
CALLS = 100
"""A batch: fewer than a stream takes before the host has to wait."""
ROUNDS = 41
WARM_UP = 300


@dataclass(frozen=True)
class Row:
    """One call and the eager operation that it must cost no more than ``most`` times of: medians of batches taken in turn, in us a call."""

    name: str
    eager: str
    most: float
    wideload_us: float
    eager_us: float

    @property
    def ratio(self) -> float:
        """To the eager operation."""
        return self.wideload_us / self.eager_us

    @property
    def finding(self) -> Finding:
        """As a line of the table."""
        found = f"{self.wideload_us:.1f} us, {self.eager} {self.eager_us:.1f} us: {self.ratio:.2f}"
        return Finding(self.name, found, f"at most {self.most:.1f}", self.ratio <= self.most)


Call = Callable[[], Any]


def cases(device: torch.device) -> list[tuple[str, str, float, Call, Call]]:
    """Name, the eager operation's, the goal, and both."""
    draw = Draw(device)
    x, y, z = (draw(*SHAPE) for _ in range(3))
    out, leaf, other = torch.empty_like(x), draw(*SHAPE).requires_grad_(), draw(*SHAPE).requires_grad_()
    gated = wl.fuse(lambda x, y, z: F.silu(x + y) * z, name="gated")
    scaled = wl.fuse(lambda x, s: x * s + 1, name="scaled")
    pair = wl.fuse(lambda x, y: (x + y, x - y), name="pair")
    drop = wl.fuse(lambda x: F.dropout(x, 0.1), name="drop")
    grad = draw(*SHAPE)

    def back(f: Callable[..., torch.Tensor]) -> Call:
        return lambda: torch.autograd.grad(f(leaf, other), (leaf, other), grad)

    swiglu = wl.fuse(lambda gate, up: F.silu(gate) * up, name="swiglu")
    return [
        ("silu(x + y) * z", "x + y", 1.0, lambda: gated(x, y, z), lambda: x + y),
        ("silu(x + y) * z into out=", "torch.add(out=)", 1.1, lambda: gated(x, y, z, out=out), lambda: torch.add(x, y, out=out)),
        ("silu(x + y) * z, gradients wanted", "x + y with one", 2.0, lambda: gated(leaf, y, z), lambda: leaf + y),
        ("swiglu forward and backward", "eager's", 1.0, back(swiglu), back(lambda gate, up: F.silu(gate) * up)),
        ("x * s + 1, a number", "x + y", 1.0, lambda: scaled(x, 0.5), lambda: x + y),
        ("two results", "x + y", 1.5, lambda: pair(x, y), lambda: x + y),
        ("dropout", "F.dropout", 1.5, lambda: drop(x), lambda: F.dropout(x, 0.1)),
    ]


def time_calls(calls: Sequence[Call], rounds: int = ROUNDS) -> list[float]:
    """The median cost to the host of each call, in us; batches of all of them in turn, each begun with an idle GPU."""
    for call in calls:
        for _ in range(WARM_UP):
            call()
    samples: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, sample in zip(calls, samples, strict=True):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            sample.append((time.perf_counter() - start) / CALLS * 1e6)
    return [statistics.median(sample) for sample in samples]


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a call costs more than its goal."""
    parser = argparse.ArgumentParser("host.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("host.py times launches: it needs a CUDA device.", file=sys.stderr)
        return 2
    return run(torch.device("cuda", torch.cuda.current_device()), given.json)


def run(device: torch.device, to: Path | None = None, rounds: int = ROUNDS) -> int:
    """Time the cases on ``device`` and print them."""
    print(native := native_state(wait=True))
    rows = []
    for name, eager_name, most, mine, eager in cases(device):
        rows.append(Row(name, eager_name, most, *time_calls([mine, eager], rounds)))
        print(rows[-1].finding, flush=True)
    if to:
        figures = [{**dataclasses.asdict(row), "ratio": row.ratio} for row in rows]
        content = {"schema": SCHEMA, "environment": describe_environment(device), "native": native.is_ready, "rows": figures}
        to.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    return int(any(not row.finding.is_kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
