"""Names the rungs: which kernels of which file each launches, on which tensors, what torch computes for the same, what to expect.

Data and the launch rules of each kernel; it must not know how a rung is compiled, checked or timed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources

import torch
import torch.nn.functional as F

from wideload.cuda_source import read_cuda
from wideload.errors import WideloadError

__all__ = ["RUNGS", "THREADS", "Launch", "Machine", "Make", "Problem", "Ratio", "Rung", "find_rungs", "read_rung"]

Make = Callable[..., torch.Tensor]
"""``make(*shape, dtype=torch.float32)``: a tensor of random values, or one on ``meta``."""
Interval = tuple[float, float]

THREADS = 256
_VECTOR_BYTES = 16
_WAVES = 2
"""Of a grid-stride loop: twice the blocks that the GPU holds at once."""
_GELU_BLOCKS_PER_SM = 32
_STRIDED_BLOCKS_PER_SM = 16

N = 1 << 28
"""Elements of a vector: 1.5 GiB as three of bf16, 3 GiB as three of f32; 25 and 50 times the L2 of an H200."""
N_SECTORS = 1 << 26
"""Floats that the sector rungs read, up to eight apart: 2 GiB."""
SIDE = 1 << 14
"""Of a matrix of as many elements as a vector has."""

_SIZES = tuple((n,) for n in (0, 1, 7, 8, 9, 1000, 4097, 10_007))
"""The articles': single, around one vector of eight, one more than a multiple of everything. And none, and more than a small grid takes."""
_SHAPES = ((0, 8), (1, 1), (7, 9), (8, 8), (9, 1000), (1000, 7), (3, 4097))


@dataclass(frozen=True, slots=True)
class Machine:
    """What a launch is reckoned by. ``blocks_per_sm`` are of `THREADS`, as many as live on an SM."""

    sms: int
    blocks_per_sm: int


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, its arguments and its grid of blocks of `THREADS`."""

    kernel: str
    arguments: tuple[torch.Tensor | int, ...]
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Problem:
    """Tensors to read, and the one to write."""

    inputs: tuple[torch.Tensor, ...]
    out: torch.Tensor


@dataclass(frozen=True, slots=True)
class Ratio:
    """A rung's time over that of rung ``to``."""

    to: str
    interval: Interval


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of the ladder.

    ``make`` gives the tensors of a shape, ``launch`` what a call launches for them, ``eager`` torch's result for the same inputs.
    ``nbytes`` are what must be read and written for each element of the result; a row that is broadcast is not counted.
    ``shape`` is that of the timing, ``shapes`` are those of the check. Results are equal bit for bit unless ``tolerance`` (relative,
    absolute) says otherwise. ``share`` is the part of an A100's nominal bandwidth that the articles expect, ``ratio`` a time over
    another rung's, ``sectors`` how many of the first input a warp's request touches; ``why_not`` is said where a GPU differs.
    """

    name: str
    file: str
    shows: str
    seeds: str
    make: Callable[..., Problem]
    launch: Callable[[Machine, Problem], tuple[Launch, ...]]
    eager: Callable[..., torch.Tensor]
    nbytes: tuple[int, int]
    shape: tuple[int, ...] = (N,)
    shapes: tuple[tuple[int, ...], ...] = _SIZES
    tolerance: tuple[float, float] = (0.0, 0.0)
    share: Interval | None = None
    ratio: Ratio | None = None
    sectors: int | None = None
    why_not: str = ""


@functools.cache
def read_rung(file: str) -> str:
    """The text of a rung's file, with ``bf16.cuh`` in its place."""
    return read_cuda(resources.files("wideload") / "ladder", file)


# ---- tensors


def _vectors(num_inputs: int, dtype: torch.dtype, out: torch.dtype | None = None) -> Callable[..., Problem]:
    def make_problem(make: Make, n: int) -> Problem:
        return Problem(tuple(make(n, dtype=dtype) for _ in range(num_inputs)), make(n, dtype=out or dtype))

    return make_problem


def _matrix_and_row(dtype: torch.dtype) -> Callable[..., Problem]:
    def make_problem(make: Make, rows: int, columns: int) -> Problem:
        return Problem((make(rows, columns, dtype=dtype), make(columns, dtype=dtype)), make(rows, columns, dtype=dtype))

    return make_problem


def _strided(x_is_transposed: bool, b_is_row: bool) -> Callable[..., Problem]:
    def make_problem(make: Make, rows: int, columns: int) -> Problem:
        dtype = torch.bfloat16
        x = make(columns, rows, dtype=dtype).t() if x_is_transposed else make(rows, columns, dtype=dtype)
        b = make(1, columns, dtype=dtype).expand(rows, columns) if b_is_row else make(rows, columns, dtype=dtype)
        return Problem((x, b), make(rows, columns, dtype=dtype))

    return make_problem


def _points(make: Make, n: int) -> Problem:
    return Problem((make(n, 3),), make(n))


def _pairs(make: Make, n: int) -> Problem:
    return Problem((make(n, 2), make(n, 2)), make(n, 2))


def _apart(make: Make, n: int) -> Problem:
    return Problem((make(n, 2), make(n), make(n)), make(n, 2))


def _spread(stride: int, offset: int) -> Callable[..., Problem]:
    def make_problem(make: Make, n: int) -> Problem:
        return Problem((make(n * stride + offset),), make(n))

    return make_problem


# ---- launches


def _blocks(num_threads: int) -> int:
    return -(-num_threads // THREADS)


def _one_shot(kernel: str, per_thread: int = 1) -> Callable[[Machine, Problem], tuple[Launch, ...]]:
    """A thread for every ``per_thread`` elements; what is left over is block 0's, so there is one wherever there is an element."""

    def launch(_: Machine, problem: Problem) -> tuple[Launch, ...]:
        n = problem.out.numel()
        return (Launch(kernel, (*problem.inputs, problem.out, n), (_vector_blocks(n, per_thread),)),)

    return launch


def _vector_blocks(n: int, per_thread: int) -> int:
    return max(_blocks(n // per_thread), 1) if n else 0


def _grid_stride(kernel: str, per_thread: int = 1) -> Callable[[Machine, Problem], tuple[Launch, ...]]:
    def launch(machine: Machine, problem: Problem) -> tuple[Launch, ...]:
        n = problem.out.numel()
        blocks = min(_vector_blocks(n, per_thread), machine.sms * machine.blocks_per_sm * _WAVES)
        return (Launch(kernel, (*problem.inputs, problem.out, n), (blocks,)),)

    return launch


def _launch_strided(machine: Machine, problem: Problem) -> tuple[Launch, ...]:
    x, b = problem.inputs
    blocks = min(_blocks(x.numel()), machine.sms * _STRIDED_BLOCKS_PER_SM)
    return (Launch("add_bf16_strided2d", (x, b, problem.out, *x.shape, *x.stride(), *b.stride()), (blocks,)),)


def _launch_gelu_grid(machine: Machine, problem: Problem) -> tuple[Launch, ...]:
    x, bias = problem.inputs
    blocks = min(_blocks(x.numel()), machine.sms * _GELU_BLOCKS_PER_SM)
    return (Launch("bias_gelu_grid", (x, bias, problem.out, x.numel(), bias.numel()), (blocks,)),)


def _launch_gelu_2d(machine: Machine, problem: Problem) -> tuple[Launch, ...]:
    x, bias = problem.inputs
    rows, columns = x.shape
    across = _blocks(columns)
    down = min(rows, max(machine.sms * _GELU_BLOCKS_PER_SM // across, 1))
    return (Launch("bias_gelu_2d", (x, bias, problem.out, rows, columns), (across, down)),)


def _launch_three(_: Machine, problem: Problem) -> tuple[Launch, ...]:
    (x, b, y), out, n = problem.inputs, problem.out, problem.out.numel()
    grid = (_vector_blocks(n, 8),)
    return (
        Launch("silu_add", (x, b, out, n), grid),
        Launch("silu_in_place", (out, n), grid),
        Launch("silu_multiply", (y, out, n), grid),
    )


def _launch_rotate(kernel: str) -> Callable[[Machine, Problem], tuple[Launch, ...]]:
    def launch(_: Machine, problem: Problem) -> tuple[Launch, ...]:
        n = problem.out.shape[0]
        return (Launch(kernel, (*problem.inputs, problem.out, n), (_blocks(n),)),)

    return launch


def _launch_strides(stride: int, offset: int) -> Callable[[Machine, Problem], tuple[Launch, ...]]:
    def launch(_: Machine, problem: Problem) -> tuple[Launch, ...]:
        n = problem.out.numel()
        return (Launch("read_strided", (*problem.inputs, problem.out, n, stride, offset), (_blocks(n),)),)

    return launch


def _launch_scattered(_: Machine, problem: Problem) -> tuple[Launch, ...]:
    n = problem.out.numel()
    return (Launch("read_scattered", (*problem.inputs, problem.out, n.bit_length() - 1), (_blocks(n),)),)


# ---- what torch computes


def _gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias, approximate="tanh")


def _silu_mul(x: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.silu(x + b) * y


def _rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    first, second = x.unbind(-1)
    return torch.stack((first * cosines - second * sines, first * sines + second * cosines), -1)


def _read(stride: int, offset: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def eager(x: torch.Tensor) -> torch.Tensor:
        return x[offset:][::stride].clone()

    return eager


@functools.lru_cache(1)  # torch is timed as it reads, not as it finds out where
def scattered_places(bits: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Where ``read_scattered`` of sectors.cu reads its ``2**bits`` elements."""
    place, mask, half = torch.arange(1 << bits, device=device), (1 << bits) - 1, bits // 2 + 1
    for _ in range(2):
        place = place * 2_654_435_769 & mask
        place = place ^ place >> half
    return place


def _read_scattered(x: torch.Tensor) -> torch.Tensor:
    return x[scattered_places(x.numel().bit_length() - 1, x.device)]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def _to_bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16)


def _first_coordinate(points: torch.Tensor) -> torch.Tensor:
    return points[:, 0].clone()


def _rotate_by_pairs(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return _rotate(x, *turns.unbind(-1))


# ---- the ladder

_BF16, _F32 = torch.bfloat16, torch.float32
_NAIVE: Interval = (0.60, 0.80)
_WALL: Interval = (0.85, 0.92)
_NARROW = "the more bytes an SM must have on their way (an H200's: twice an A100's), the further narrow accesses fall behind"


def _sector_rung(name: str, stride: int, offset: int, sectors: int, shows: str) -> Rung:
    make, launch, eager = _spread(stride, offset), _launch_strides(stride, offset), _read(stride, offset)
    return Rung(name, "sectors.cu", shows, "S8", make, launch, eager, (4, 4), shape=(N_SECTORS,), sectors=sectors)


RUNGS: tuple[Rung, ...] = (
    Rung(
        "vector_add_f32",
        "vector_add_f32.cu",
        "one float a thread",
        "S1, S10",
        _vectors(2, _F32),
        _one_shot("vector_add_f32"),
        torch.add,
        (8, 4),
        share=(0.80, 0.92),
        sectors=4,
        why_not=_NARROW,
    ),
    Rung(
        "vector_add_bf16",
        "vector_add_bf16.cu",
        "one bf16 a thread, added in bf16",
        "S1",
        _vectors(2, _BF16),
        _one_shot("vector_add_bf16"),
        torch.add,
        (4, 2),
        share=(0.80, 0.95),
        sectors=2,
        why_not="half the bytes a load; the second article expects 60 to 80 % of the same accesses",
    ),
    Rung(
        "f32_to_bf16",
        "f32_to_bf16.cu",
        "a cast, one element a thread",
        "S1",
        _vectors(1, _F32, _BF16),
        _one_shot("f32_to_bf16"),
        _to_bf16,
        (4, 2),
        sectors=4,
    ),
    Rung(
        "add_bf16_naive",
        "add_bf16_naive.cu",
        "one bf16 a thread, added in float",
        "S16",
        _vectors(2, _BF16),
        _one_shot("add_bf16_naive"),
        torch.add,
        (4, 2),
        share=_NAIVE,
        sectors=2,
        why_not=_NARROW,
    ),
    Rung(
        "add_bf16_vec8",
        "add_bf16_vec8.cu",
        "16 bytes an access",
        "S9, S16",
        _vectors(2, _BF16),
        _one_shot("add_bf16_vec8", 8),
        torch.add,
        (4, 2),
        share=_WALL,
        sectors=16,
    ),
    Rung(
        "add_bf16_vec8_grid",
        "add_bf16_vec8_grid.cu",
        "16 bytes an access, grid-stride",
        "S10, S16",
        _vectors(2, _BF16),
        _grid_stride("add_bf16_vec8_grid", 8),
        torch.add,
        (4, 2),
        share=_WALL,
        ratio=Ratio("add_bf16_vec8", (0.97, 1.0)),
        sectors=16,
        why_not="on an H200, loops over bf16 have measured 3.94 to 4.15 TB/s where one vector a thread reaches 4.35",
    ),
    Rung(
        "add_f32_grid",
        "add_f32_grid.cu",
        "one float a turn, grid-stride",
        "S10",
        _vectors(2, _F32),
        _grid_stride("add_f32_grid"),
        torch.add,
        (8, 4),
        sectors=4,
    ),
    Rung(
        "add_f32_vec4",
        "add_f32_vec4.cu",
        "float4 a turn, grid-stride",
        "S10",
        _vectors(2, _F32),
        _grid_stride("add_f32_vec4", 4),
        torch.add,
        (8, 4),
        sectors=16,
    ),
    Rung(
        "strided2d",
        "add_bf16_strided2d.cu",
        "strides that happen to be dense",
        "S12, S16",
        _strided(False, False),
        _launch_strided,
        torch.add,
        (4, 2),
        shape=(SIDE, SIDE),
        shapes=_SHAPES,
        share=_NAIVE,
        sectors=2,
        why_not=_NARROW,
    ),
    Rung(
        "strided2d_broadcast",
        "add_bf16_strided2d.cu",
        "a row for all rows: stride 0",
        "S12, S16",
        _strided(False, True),
        _launch_strided,
        torch.add,
        (2, 2),
        shape=(SIDE, SIDE),
        shapes=_SHAPES,
        sectors=2,
    ),
    Rung(
        "strided2d_transposed",
        "add_bf16_strided2d.cu",
        "x.t(): a sector a lane",
        "S12, S16",
        _strided(True, True),
        _launch_strided,
        torch.add,
        (2, 2),
        shape=(SIDE, SIDE),
        shapes=_SHAPES,
        share=(0.0, 0.10),
        sectors=32,
        why_not="the rows that follow may find the same sectors in the L2",
    ),
    Rung(
        "bias_gelu_grid",
        "bias_gelu_grid.cu",
        "grid-stride, the column by a remainder",
        "S18",
        _matrix_and_row(_F32),
        _launch_gelu_grid,
        _gelu,
        (4, 4),
        shape=(SIDE, SIDE),
        shapes=_SHAPES,
        tolerance=(1e-5, 1e-6),
        sectors=4,
    ),
    Rung(
        "bias_gelu_2d",
        "bias_gelu_2d.cu",
        "a 2-D grid, no remainder",
        "S18",
        _matrix_and_row(_F32),
        _launch_gelu_2d,
        _gelu,
        (4, 4),
        shape=(SIDE, SIDE),
        shapes=_SHAPES,
        tolerance=(1e-5, 1e-6),
        sectors=4,
    ),
    Rung(
        "silu_three",
        "silu_three.cu",
        "silu(x + b) * y in three launches",
        "S15",
        _vectors(3, _BF16),
        _launch_three,
        _silu_mul,
        (10, 6),
        shape=(N,),
        tolerance=(2**-5, 0.0),
        sectors=16,
    ),
    Rung(
        "silu_fused",
        "silu_fused.cu",
        "silu(x + b) * y in one",
        "S15",
        _vectors(3, _BF16),
        _one_shot("silu_fused", 8),
        _silu_mul,
        (6, 2),
        shape=(N,),
        tolerance=(2**-5, 0.0),
        ratio=Ratio("silu_three", (0.45, 0.55)),
        sectors=16,
    ),
    Rung(
        "points_aos",
        "points.cu",
        "one field of an array of structs",
        "S8",
        _points,
        _one_shot("points_aos"),
        _first_coordinate,
        (4, 4),
        shape=(N_SECTORS,),
        sectors=12,
    ),
    Rung(
        "points_soa",
        "points.cu",
        "the same of a struct of arrays",
        "S8",
        _vectors(1, _F32),
        _one_shot("points_soa"),
        _same,
        (4, 4),
        shape=(N_SECTORS,),
        sectors=4,
    ),
    Rung(
        "rotate_pairs",
        "rotate.cu",
        "(cos, sin) as one float2",
        "S23",
        _pairs,
        _launch_rotate("rotate_pairs"),
        _rotate_by_pairs,
        (8, 4),
        shape=(N_SECTORS,),
        tolerance=(1e-5, 1e-6),
        sectors=8,
    ),
    Rung(
        "rotate_apart",
        "rotate.cu",
        "cos and sin as two arrays",
        "S23",
        _apart,
        _launch_rotate("rotate_apart"),
        _rotate,
        (8, 4),
        shape=(N_SECTORS,),
        tolerance=(1e-5, 1e-6),
        sectors=8,
    ),
    _sector_rung("stride_1", 1, 0, 4, "neighbours, aligned"),
    _sector_rung("offset_4_bytes", 1, 1, 5, "neighbours, 4 bytes off"),
    _sector_rung("stride_2", 2, 0, 8, "every second float"),
    _sector_rung("stride_4", 4, 0, 16, "every fourth"),
    _sector_rung("stride_8", 8, 0, 32, "a sector a lane"),
    Rung(
        "scattered",
        "sectors.cu",
        "each somewhere else",
        "S8",
        _vectors(1, _F32),
        _launch_scattered,
        _read_scattered,
        (4, 4),
        shape=(N_SECTORS,),
        shapes=tuple((1 << bits,) for bits in (0, 1, 3, 10, 12)),
        sectors=32,
    ),
)
"""From the first kernel to the fused one, then the sector table."""


def find_rungs(names: Sequence[str] = ()) -> tuple[Rung, ...]:
    """The rungs of these names, in the ladder's order; all of them for none. Raises ``WideloadError`` for a name that is none."""
    known = [rung.name for rung in RUNGS]
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise WideloadError(f"the ladder has no rung {unknown!r}; it has {', '.join(known)}")
    return tuple(rung for rung in RUNGS if not names or rung.name in names)
