"""Times backward passes in bf16 on one GPU: wideload, eager PyTorch and torch.compile against the wall of the same bytes.

    python benchmarks/backward.py [--rows 16384] [--samples 30] [--only TEXT] [--no-compile] [--json backward.json]

Of each function the backward alone, and forward and backward together, as GPU time with a cold L2. Gradients are checked beside those
in float64 before anything is timed. The exit status is 0 where every case passes, 1 where one does not, 2 without a GPU.
``WIDELOAD_COMMIT`` names the commit where there is no git checkout.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

import wideload as wl
from table import NOT_BEHIND, PEERS, SEED, Draw, Timed, choose_cases, find_device, new_parser, run_table
from wideload.measure import unique_bytes
from wideload.measure.outcome import find_difference
from wideload.measure.wall import FAULT_RATIO, Ceiling, find_ceiling, nearest_mix, prepare_movers, time_cold
from wideload.nn import packed_swiglu

AT_THE_WALL = 0.95
COLUMNS = 11008
"""Of the feed-forward of a Llama of 7 B parameters."""
ROWS = 16384
"""2^27 elements and more, as the other tables have. Of half as many, a second kernel, which adds up partial sums, takes 1 % more."""

CHECK_ROUNDINGS = 2
"""Half units in the last place: what a gradient rounded once, of approximated functions, may differ by from the exact one."""
CHECK_FLOOR = 2.0**-12
"""Of the root mean square: near the zero of a derivative fp32's own digits, of terms some hundred times as large, are all that is left."""
SUM_ROUNDINGS = 4
"""The same of a summed gradient's root mean square: the terms may be rounded first. Of n terms rounded by up to half a unit, evenly
spread, the sum is off by 0.2 units of a term's size times the root of n, as which the sum itself grows: six times that is 2.4 halves."""

Part = Literal["backward", "both"]
Build = Callable[[Draw, int], list[torch.Tensor]]


@dataclass(frozen=True)
class Case:
    """A fused function, what it is in torch's operators, and its arguments, each of which wants a gradient."""

    function: str
    subject: Callable[..., torch.Tensor]
    fn: Callable[..., torch.Tensor]
    build: Build
    part: Part

    @property
    def name(self) -> str:
        """``"swiglu, backward"``."""
        return f"{self.function}, {'backward' if self.part == 'backward' else 'forward + backward'}"


def tanh_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`wl.ops.bias_gelu` by tanh, as peers are given it too."""
    return F.gelu(x + bias, approximate="tanh")


def matrices(draw: Draw, rows: int) -> list[torch.Tensor]:
    """Gate and up."""
    return [draw(rows, COLUMNS), draw(rows, COLUMNS)]


def packed(draw: Draw, rows: int) -> list[torch.Tensor]:
    """Rows of two halves."""
    return [draw(rows, 2 * COLUMNS)]


def matrix_and_bias(draw: Draw, rows: int) -> list[torch.Tensor]:
    """A matrix, and a row for all of its rows."""
    return [draw(rows, COLUMNS), draw(COLUMNS)]


FUNCTIONS: tuple[tuple[str, Any, Any, Build], ...] = (
    ("swiglu", wl.ops.swiglu, wl.ops.swiglu.__wrapped__, matrices),
    ("packed swiglu", packed_swiglu, packed_swiglu.__wrapped__, packed),
    ("bias_gelu, erf", wl.ops.bias_gelu, wl.ops.bias_gelu.__wrapped__, matrix_and_bias),
    ("bias_gelu, tanh", wl.fuse(tanh_bias_gelu), tanh_bias_gelu, matrix_and_bias),
)
PARTS: tuple[Part, ...] = ("backward", "both")
CASES = tuple(Case(*function, part) for function in FUNCTIONS for part in PARTS)


@dataclass(frozen=True)
class Row(Timed):
    """What one case gave; ``excess`` is the largest difference from the exact gradients over what is allowed."""

    case: str
    part: Part
    nbytes: tuple[int, int]
    """The least to be read and written."""
    ceiling: Ceiling
    samples_us: Mapping[str, Sequence[float]]
    excess: float
    not_run: Mapping[str, str]

    @property
    def verdict(self) -> str:
        """``PASS``, or what is wrong."""
        if not self.excess <= 1:
            return f"WRONG: {self.excess:.3g} times the difference that is allowed"
        times = self.times_us
        if self.part == "backward" and self.wall_ratio > FAULT_RATIO:  # a backward after its forward may find data in the L2
            return f"FAULT of the measurement: {self.wall_ratio:.3f} of the wall"
        short = [f"{self.wall_ratio:.3f} of the wall"] if self.wall_ratio < AT_THE_WALL else []
        short += [
            f"{times['wideload'] / times[peer] - 1:.1%} behind {peer}"
            for peer in PEERS
            if peer in times and times["wideload"] > NOT_BEHIND * times[peer]
        ]
        return f"short: {', '.join(short)}" if short else "PASS"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        figures["ceiling"] = dataclasses.asdict(self.ceiling)
        return {**figures, "times_us": self.times_us, "wall_ratio": self.wall_ratio, "verdict": self.verdict}


def minimal_bytes(part: Part, args: Sequence[torch.Tensor], result: torch.Tensor) -> tuple[int, int]:
    """What a pass must read and write: a backward every argument and the incoming gradient, and a gradient for each argument."""
    of_arguments, of_result = unique_bytes(args), unique_bytes([result])
    backward = of_arguments + of_result, of_arguments
    return backward if part == "backward" else (backward[0] + of_arguments, backward[1] + of_result)


def find_excess(found: Sequence[torch.Tensor], exact: Sequence[torch.Tensor], num_terms: Sequence[int]) -> float:
    """The largest difference over what is allowed; ``num_terms`` says how many terms each element of a gradient is the sum of."""
    worst = 0.0
    for gradient, right, terms in zip(found, exact, num_terms, strict=True):
        half_unit = torch.finfo(gradient.dtype).eps / 2
        floor = SUM_ROUNDINGS * half_unit if terms > 1 else CHECK_FLOOR
        allowed = CHECK_ROUNDINGS * half_unit * right.abs() + floor * right.square().mean().sqrt()
        worst = max(worst, float(((gradient.double() - right).abs() / allowed).nan_to_num(torch.inf).max()))
    return worst


def gradients(fn: Callable[..., torch.Tensor], args: Sequence[torch.Tensor], grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Forward and backward."""
    return torch.autograd.grad(fn(*args), args, grad)


def backward_of(fn: Callable[..., torch.Tensor], args: Sequence[torch.Tensor], grad: torch.Tensor) -> Callable[[], object]:
    """The backward alone, as often as it is called."""
    return functools.partial(torch.autograd.grad, fn(*args), args, grad, retain_graph=True)


@contextmanager
def repeatable_backward() -> Iterator[None]:
    """A backward that torch compiles within may run more than once: it does not write over what was saved for it."""
    import torch._functorch.config

    with torch._functorch.config.patch(donated_buffer=False):
        yield


def check_peers(
    peers: Mapping[str, Callable[..., torch.Tensor]], args: Sequence[torch.Tensor], grad: torch.Tensor, mine: Sequence[torch.Tensor]
) -> dict[str, str]:
    """By the name of each peer whose gradients are not wideload's, or that raises, the reason."""
    not_run = {}
    for name, fn in peers.items():
        try:
            difference = find_difference(gradients(fn, args, grad), mine)
            if difference is not None:
                not_run[name] = f"WRONG: {difference}"
        except Exception as error:  # a peer may raise anything; it then takes no part
            not_run[name] = f"FAILED: {type(error).__name__}: {error}"
    return not_run


def run_case(case: Case, rows: int, num_samples: int, device: torch.device, with_compile: bool) -> Row:
    """Check, then time in turns: each contender's pass and each kernel of the wall for the same bytes."""
    draw = Draw(device)
    args = [tensor.requires_grad_() for tensor in case.build(draw, rows)]
    with torch.no_grad():
        result = case.subject(*args)
        nbytes = minimal_bytes(case.part, args, result)
    grad = draw(*result.shape)
    mine = gradients(case.subject, args, grad)
    exact = gradients(case.fn, [tensor.detach().double().requires_grad_() for tensor in args], grad.double())
    excess = find_excess(mine, exact, [max(1, grad.numel() // tensor.numel()) for tensor in args])
    del result, exact

    with repeatable_backward():
        peers = {"eager": case.fn, "compile": torch.compile(case.fn, dynamic=False)} if with_compile else {"eager": case.fn}
        not_run = check_peers(peers, args, grad, mine)
        del mine
        take = backward_of if case.part == "backward" else functools.partial(functools.partial, gradients)
        fns = {"wideload": case.subject, **{name: fn for name, fn in peers.items() if name not in not_run}}
        calls = {name: take(fn, args, grad) for name, fn in fns.items()}
        mix = nearest_mix(*nbytes)
        movers, nbytes_moved = prepare_movers(mix, sum(nbytes), device.index)
        samples = time_cold({**calls, **movers}, device.index, num_samples)
    return Row(
        case=case.name,
        part=case.part,
        nbytes=nbytes,
        ceiling=find_ceiling(mix, nbytes_moved, {name: samples[name] for name in movers}),
        samples_us={name: samples[name] for name in calls},
        excess=excess,
        not_run=not_run,
    )


def format_table(rows: Sequence[Row]) -> str:
    """One line a case: times in microseconds, the wall's for the same bytes, and wideload's share of it."""
    width = max((len(row.case) for row in rows), default=0) + 2
    lines = [f"{'case':<{width}}{'mix':>5}{'wall':>9}{'wideload':>10}{''.join(f'{peer:>9}' for peer in PEERS)}{'of wall':>9}  verdict"]
    for row in rows:
        times = row.times_us
        peers = "".join(f"{times[peer]:>9.1f}" if peer in times else f"{'not run':>9}" for peer in PEERS)
        figures = f"{row.wall_ratio * times['wideload']:>9.1f}{times['wideload']:>10.1f}{peers}{row.wall_ratio:>9.3f}"
        lines.append(f"{row.case:<{width}}{row.ceiling.mix.name:>5}{figures}  {row.verdict}")
    return "\n".join((*lines, *sorted({f"{peer} not run: {reason}" for row in rows for peer, reason in row.not_run.items()})))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return its exit status."""
    parser = new_parser(__doc__, 30)
    parser.add_argument("--rows", type=int, default=ROWS, help=f"of {COLUMNS} elements; {ROWS} if left out")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    options = parser.parse_args(arguments)
    chosen = choose_cases(parser, CASES, options.only)
    device = find_device()
    if device is None:
        return 2
    with_compile = not options.no_compile
    return run_table(
        chosen,
        lambda case: run_case(case, options.rows, options.samples, device, with_compile),
        device,
        {"rows": options.rows, "columns": COLUMNS, "samples": options.samples, "seed": SEED},
        options.json,
        f"[{options.rows}, {COLUMNS}] bf16, cold L2, median of {options.samples}, microseconds",
        format_table,
        told=lambda row: f"{row.wall_ratio:.3f} of the wall: {row.verdict}",
        with_compile=with_compile,
    )


if __name__ == "__main__":
    sys.exit(main())
