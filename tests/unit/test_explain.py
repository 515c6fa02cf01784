"""Explanations against figures worked out by hand: bytes, sectors, occupancy, bytes in flight; verdicts on known-bad calls."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner, Result

import wideload as wl
from wideload import planned
from wideload.analyze.explain import ACHIEVABLE_SHARE, LIMITS, BuiltKernel, Explanation, GpuFigures
from wideload.analyze.figure import Figure
from wideload.cli import app
from wideload.errors import CompileError
from wideload.gpus import find_target

rooflines = importlib.import_module("wideload.measure.roofline")  # the package's attribute of this name may be the function

N = 2**20
bf16, f32, i8 = torch.bfloat16, torch.float32, torch.int8
H200_SMS = 132


def meta(*shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def explain(fn: Callable[..., Any], *args: Any, target: str = "h200", **kwargs: Any) -> Explanation:
    return wl.fuse(fn).explain(*args, target=target, **kwargs)


def limits(explanation: Explanation) -> list[str]:
    return [verdict.limit for verdict in explanation.verdicts]


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


# ---- bytes

_X = meta(N + 2)
BYTES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], int, int, int]] = {
    # arguments; bytes read, written, and of whole sectors
    "two operands": (lambda x, y: x + y, (meta(N), meta(N)), 4 * N, 2 * N, 6 * N),
    "one operand twice": (lambda x, y: x + y, (_X[2:], _X[2:]), 2 * N, 2 * N, 4 * N + 32),
    "shifted by one": (lambda x, y: x + y, (_X[:N], _X[1 : N + 1]), 2 * N + 2, 2 * N, 4 * N + 32),
    "mixed dtypes": (lambda x, y: x + y, (meta(N), meta(N, dtype=f32)), 6 * N, 4 * N, 10 * N),
    "a cast": (lambda x: x.to(f32), (meta(N),), 2 * N, 4 * N, 6 * N),
    "a 0-dim tensor": (lambda x, y: x + y, (meta(N), meta()), 2 * N + 2, 2 * N, 4 * N + 32),
    "a number": (lambda x, y: x + y, (meta(N), 2.5), 2 * N, 2 * N, 4 * N),
    "a row": (lambda x, y: x + y, (meta(1024, 1024), meta(1024)), 2 * N + 2048, 2 * N, 4 * N + 2048),
    "a column": (lambda x, y: x + y, (meta(1024, 1024), meta(1024, 1)), 2 * N + 2048, 2 * N, 4 * N + 2048),
    "expanded": (lambda x, y: x + y, (meta(1024, 1024), meta(1, 8).expand(1024, 8).repeat(1, 1)[:1, :1]), 2 * N + 2, 2 * N, 4 * N + 32),
    "every other": (lambda x: x * 2, (meta(2 * N)[::2],), 2 * N, 2 * N, 6 * N),
    "every 16th": (lambda x: x * 2, (meta(16 * N)[::16],), 2 * N, 2 * N, 34 * N),
    # rows of 2044 bytes in 2048, 2 bytes behind a sector's start: 64 sectors each
    "columns cut": (lambda x: x * 2, (meta(1024, 1024)[:, 1:-1],), 2 * 1022 * 1024, 2 * 1022 * 1024, 2 * N + 2 * 1022 * 1024),
    "packed halves": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (meta(1024, 2048),), 4 * N, 2 * N, 6 * N),
    "half of what is given": (lambda x: x[:, :1024] * 2, (meta(1024, 2048),), 2 * N, 2 * N, 4 * N),
    "interleaved": (lambda x: x[:, ::2] + x[:, 1::2], (meta(1024, 2048),), 4 * N, 2 * N, 6 * N),
    "transposed": (lambda x, y: x.t() + y, (meta(1024, 1024), meta(1024, 1024)), 4 * N, 2 * N, 6 * N),
    "windows": (lambda x: x * 2, (meta(N + 2).unfold(0, 3, 1),), 2 * (N + 2), 6 * N, 8 * N + 32),
    "several results": (lambda x: (x + 1, x.float(), x > 0), (meta(N),), 2 * N, 7 * N, 9 * N),
    "results of two shapes": (lambda x, y: (x + y, x * 2), (meta(1024, 1), meta(1024)), 4096, 2 * N + 2048, 2 * N + 8192),
    "concatenated": (rope, (meta(8, 1024, 128), meta(1024, 64), meta(1024, 64)), 2 * N + 2**18, 2 * N, 4 * N + 2**18),
    "an argument that is not used": (lambda x, y: x * 2, (meta(N), meta(N)), 2 * N, 2 * N, 4 * N),
    "no input at all": (lambda x: torch.ones_like(x), (meta(N),), 0, 2 * N, 2 * N),
    "a view, which is returned": (lambda x: x[1:], (meta(N),), 0, 0, 0),
    "no elements": (lambda x: x * 2, (meta(0, 3),), 0, 0, 0),
    "more than 32 bits count": (lambda x, y: x + y, (meta(2**33), meta(2**33)[:1]), 2**34 + 2, 2**34, 2**35 + 32),
}


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What hangs on layouts alone needs no compiler, and no time for one."""

    def missing(*args: Any, **kwargs: Any) -> Any:
        raise CompileError("NVRTC could not be loaded: install it")

    monkeypatch.setattr(planned, "find_cubin", missing)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("case", BYTES)
def test_bytes_by_hand(case: str) -> None:
    fn, args, read, written, moved = BYTES[case]
    explanation = explain(fn, *args)
    assert (explanation.bytes_read.value, explanation.bytes_written.value) == (read, written)
    assert explanation.minimal.value == read + written
    assert explanation.moved.value == moved
    assert (explanation.efficiency and explanation.efficiency.value) == ((read + written) / moved if moved else None)
    assert {f.kind for f in (explanation.bytes_read, explanation.minimal, explanation.moved)} == {"computed"}


@pytest.mark.usefixtures("no_compiler")
def test_real_tensors_share_memory_by_address() -> None:
    x = torch.zeros(N + 8, dtype=f32)
    assert explain(lambda a, b: a + b, x[:N], x[8:]).bytes_read.value == 4 * (N + 8)
    assert explain(lambda a, b: a + b, x[:N], x[:N].clone()).bytes_read.value == 8 * N


@pytest.mark.usefixtures("no_compiler")
def test_tensors_on_the_cpu_stand_for_tensors_on_the_gpu() -> None:
    # On the CPU, add converts the expanded operand first, and its copy decides the result's strides; on CUDA the other operand does.
    def strides(device: str) -> list[tuple[int, ...]]:
        x, y = torch.ones(1, 5, dtype=bf16, device=device).expand(4, 5), torch.ones(5, 4, device=device).t()
        return [operand.strides for operand in explain(lambda a, b: a + b, x, y).operands]

    assert strides("cpu") == strides("meta") == [(0, 1), (1, 4), (1, 4)]


@pytest.mark.usefixtures("no_compiler")
def test_into_memory_that_exists() -> None:
    x, y = meta(N), meta(N, dtype=f32)
    wide = explain(lambda a: a * 2, x, out=y)
    assert (wide.bytes_read.value, wide.bytes_written.value) == (2 * N, 4 * N)
    pitched = explain(lambda a: a * 2, meta(1024, 4), out=meta(1024, 32)[:, :4])
    assert (pitched.bytes_written.value, pitched.moved.value) == (8 * 1024, 8 * 1024 + 32 * 1024)


@pytest.mark.usefixtures("no_compiler")
def test_in_place_saves_no_bytes() -> None:
    x = torch.zeros(N, dtype=f32)
    assert explain(lambda a: a + 1, x, out=x).minimal.value == explain(lambda a: a + 1, x).minimal.value == 8 * N


@pytest.mark.usefixtures("no_compiler")
def test_a_number_on_the_host_is_no_operand() -> None:
    explanation = explain(lambda x, s: x * s, meta(N), torch.tensor(2.0))
    assert explanation.minimal.value == 4 * N
    assert [operand.name for operand in explanation.operands] == ["x", "out"]


# ---- the dozen, by the command line, every figure by hand

_FUNCTIONS = """
import torch, torch.nn.functional as F
def add(x, y): return x + y
def double(x): return x * 2
def silu_mul(x, b, y): return F.silu(x + b) * y
def cast(x): return x.float()
def turned(x, y): return x.t() + y
def relu(x): return x.relu()
"""

DOZEN = [
    # function, operands; minimal bytes, sectors of each operand, bytes a thread loads, threads a block
    ("add", ["bf16[2^24]", "bf16[2^24]"], 6 << 24, [1 << 20] * 3, 32, 128),
    ("add", ["f32[2^24]", "f32[2^24]"], 12 << 24, [2 << 20] * 3, 32, 128),
    ("add", ["bf16[2^24]", "f32[2^24]"], 10 << 24, [1 << 20, 2 << 20, 2 << 20], 24, 128),
    ("add", ["bf16[2^12, 2^12]", "bf16[2^12]"], (4 << 24) + 8192, [1 << 20, 256, 1 << 20], 32, 128),
    ("add", ["bf16[2^12, 2^12]", "bf16[2^12, 1]"], (4 << 24) + 8192, [1 << 20, 256, 1 << 20], 16, 128),
    ("double", ["bf16[2^25][::2]"], 4 << 24, [2 << 20, 1 << 20], 32, 128),
    ("double", ["f32[2^24]@1"], 8 << 24, [(2 << 20) + 1, 2 << 20], 16, 128),
    ("double", ["bf16[2^12, 2^12][:, 1:-1]"], 4 * 4094 * 4096, [256 * 4096, 4094 * 256], 16, 128),
    ("silu_mul", ["bf16[2^24]", "bf16[2^24]", "bf16[2^24]"], 8 << 24, [1 << 20] * 4, 48, 128),
    ("cast", ["bf16[2^24]"], 6 << 24, [1 << 20, 2 << 20], 8, 128),
    ("turned", ["bf16[2^12, 2^12]", "bf16[2^12, 2^12]"], 6 << 24, [1 << 20] * 3, 128, 512),
    ("relu", ["i8[2^24]"], 2 << 24, [1 << 19, 1 << 19], 16, 128),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["explain", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("explain") / "functions.py"
    path.write_text(_FUNCTIONS)
    return str(path)


def warps_by_registers(registers: int) -> int:
    """What fits an SM's four parts of 16384 registers, given out to a warp in 256s; 64 warps at most."""
    return min(64, 4 * (16384 // (256 * math.ceil(registers * 32 / 256))))


@pytest.mark.parametrize("row", DOZEN, ids=lambda row: f"{row[0]} {' '.join(row[1])}")
def test_a_dozen_functions_by_hand(row: tuple[str, list[str], int, list[int], int, int], functions: str) -> None:
    name, operands, minimal, sectors, per_thread, threads = row
    result = run(f"{functions}:{name}", *operands, "--target", "h200", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["minimal"]["value"] == minimal
    assert [operand["sectors"]["value"] for operand in found["operands"]] == sectors
    assert found["moved"]["value"] == 32 * sum(sectors)
    assert found["least_time"]["value"] == pytest.approx(minimal / 4.8e6)
    assert found["achievable_time"]["value"] == pytest.approx(minimal / 4.8e6 / 0.906)
    (kernel,) = found["kernels"]
    assert (kernel["threads"], kernel["in_flight_per_thread"]["value"]) == (threads, per_thread)
    assert kernel["spill_bytes"]["value"] == 0
    warps = warps_by_registers(kernel["registers"]["value"]) // (threads // 32) * (threads // 32)
    assert kernel["occupancy"]["value"] == warps / 64
    assert kernel["waves"]["value"] == pytest.approx(kernel["grid"] / (H200_SMS * warps * 32 // threads))
    assert kernel["in_flight_per_sm"]["value"] == per_thread * 32 * warps
    assert kernel["littles_law_per_sm"]["value"] == pytest.approx(4.8e12 * 600e-9 / H200_SMS)
    assert kernel["target_per_sm"]["value"] == 48 * 1024


def figures(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "value" in node:
            yield node
        for child in node.values():
            yield from figures(child)
    elif isinstance(node, list):
        for child in node:
            yield from figures(child)


def test_every_figure_is_tagged() -> None:
    found = explain(lambda x, b, y: F.silu(x + b) * y, meta(1024, 1024), meta(1024), meta(1024, 1024)).to_dict()
    tagged = list(figures(found))
    assert len(tagged) > 50
    assert {figure["kind"] for figure in tagged} == {"computed", "assumed"}
    assert all(figure["unit"] and figure["source"] for figure in tagged)


@pytest.mark.usefixtures("no_compiler")
def test_the_articles_example_shows_both_byte_counts() -> None:
    explanation = explain(lambda x, b, y: F.silu(x + b) * y, meta(N), meta(N), meta(N))
    assert (explanation.eager.bytes_per_element.value, explanation.bytes_per_element.value) == (16, 8)
    again = explain(lambda x, b: F.relu(x) * 2 + b, meta(N), meta(N))
    assert (again.eager.bytes_per_element.value, again.bytes_per_element.value) == (14, 6)


def test_kernels_of_one_name_are_told_apart() -> None:
    explanation = explain(lambda x, y: (x * 2, y * 2), meta(2**28), meta(64))
    assert [kernel.name for kernel in explanation.kernels] == ["lambda_dense", "lambda_dense"]
    assert [(o.kernel, o.minimal.value) for o in explanation.operands] == [(0, 2**29), (0, 2**29), (1, 128), (1, 128)]
    # The small kernel is idle most of its short time, which the call hardly notices.
    assert limits(explanation) == ["memory"]


# ---- a warp's accesses


@pytest.mark.usefixtures("no_compiler")
def test_a_warps_accesses_by_hand() -> None:
    """As the article's table: 16-byte vectors, a stride of 2, and one element a sector, of 2 bytes: 6.25 %."""
    cases = [
        (lambda x: x * 2, (meta(N),), 16, 1.0),
        (lambda x: x * 2, (meta(2 * N)[::2],), 32, 0.5),
        (lambda x: x * 2, (meta(3 * N)[::3],), 6, 1 / 3),
        (lambda x: x * 2, (meta(16 * N)[::16],), 32, 0.0625),
        (lambda x: x * 2, (meta(N + 1)[1:],), 17, 512 / (17 * 32)),
        (lambda x, y: x + y, (meta(N), meta()), 16, 1.0),
    ]
    for fn, args, sectors, efficiency in cases:
        first = explain(fn, *args).operands[0]
        assert (first.warp_sectors.value, first.warp_efficiency.value) == (sectors, efficiency)


@pytest.mark.usefixtures("no_compiler")
def test_one_element_for_all_touches_one_sector() -> None:
    for fn, args in ((lambda x, y: x + y, (meta(N), meta())), (lambda x, y: x + y, (meta(1024, 1024), meta(1024, 1)))):
        second = explain(fn, *args).operands[1]
        assert (second.access, second.warp_sectors.value, second.warp_efficiency.value) in (("uniform", 1, 1 / 16), ("row", 1, 1 / 16))


@pytest.mark.usefixtures("no_compiler")
def test_an_operand_that_runs_across_is_uncoalesced() -> None:
    # Three dims reversed: too short for a tile (8 columns), so each lane has a sector of its own, 2 of 32 bytes used.
    explanation = explain(lambda x, y: x + y, meta(64, 1024, 4).permute(2, 1, 0), meta(4, 1024, 64)[:, :, ::1])
    across = [o for o in explanation.operands if o.access == "strided" and o.warp_efficiency.value < 0.5]
    assert across, "no operand is read across its memory"
    assert "uncoalesced" in limits(explanation)


# ---- verdicts


def verdict(explanation: Explanation, limit: str) -> Any:
    return next(v for v in explanation.verdicts if v.limit == limit)


def test_at_the_wall_nothing_is_left_but_fusing() -> None:
    explanation = explain(lambda x, y: x + y, meta(2**28), meta(2**28))
    assert limits(explanation) == ["memory"]
    assert "Nothing is left but fusing" in str(explanation)


def test_special_functions() -> None:
    explanation = explain(lambda x: x.exp().sqrt().rsqrt().exp().sqrt().rsqrt().exp().sqrt(), meta(2**28))
    # Three ex2, three rsq of a square root, two rsqrt; the memory takes 4 bytes / 4348.8 GB/s an element.
    assert explanation.kernels[0].instructions["special"].value == 8
    found = verdict(explanation, "special")
    assert found.effect.value == pytest.approx((8 / (16 * H200_SMS * 1980e6)) / (4 / 4348.8e9))
    assert "Special-function-bound: 8.0 instructions an element" in str(found)


def test_a_small_call() -> None:
    explanation = explain(lambda x, y: x + y, meta(4096), meta(4096))
    assert set(limits(explanation)) == {"launch", "small_grid", "memory"}
    memory_us = 6 * 4096 / 4348.8e3
    assert verdict(explanation, "launch").effect.value == pytest.approx(1 + 1.1 / memory_us)
    # 4 blocks of 128 threads with 32 bytes each, where two thirds of 48 KiB an SM are wanted.
    assert verdict(explanation, "small_grid").effect.value == pytest.approx(32 * 1024 / (32 * 128 * 4 / H200_SMS))


def test_a_tail() -> None:
    # Full SMs hold 16 blocks of 128 threads: 2112 blocks a wave of the GPU. 1.25 waves of 8 elements a thread.
    blocks = 2112 * 5 // 4
    explanation = explain(lambda x, y: x + y, meta(blocks * 1024), meta(blocks * 1024))
    assert explanation.kernels[0].waves is not None
    assert explanation.kernels[0].waves.value == 1.25
    assert verdict(explanation, "tail").effect.value == 2 / 1.25
    assert "the last 25% full" in verdict(explanation, "tail").finding


def test_wasted_sectors() -> None:
    found = verdict(explain(lambda x: x * 2, meta(2**30, dtype=f32)[::8]), "sectors")
    assert found.effect.value == pytest.approx((32 + 4) / (4 + 4))
    assert "12% of x's are used" in found.finding


def test_narrow_accesses_and_too_few_in_flight() -> None:
    explanation = explain(lambda x: x * 2, meta(3 * 2**27)[::3])
    assert limits(explanation)[0] == "narrow"
    assert {"in_flight", "sectors"} <= set(limits(explanation))
    # 4 elements of 2 bytes by 2048 threads, and half of the bytes are reads: 16 of 24 KiB.
    assert verdict(explanation, "in_flight").effect.value == pytest.approx(24 / 16)


def test_a_narrow_dtype_beside_a_wide_one_is_as_planned() -> None:
    # 16 bytes of float64 are 2 elements: 2 bytes of int8 an access, which no layout could widen.
    explanation = explain(lambda x, y: x + y, meta(2**28, dtype=torch.float64), meta(2**28, dtype=i8))
    assert {a.width_bits for a in explanation.kernels[0].accesses} == {128, 16}
    assert "narrow" not in limits(explanation)


def test_stores_that_the_compiler_split_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    build = planned.PlannedKernel.build

    def split(self: planned.PlannedKernel) -> BuiltKernel:
        built = build(self)
        assert built.sass is not None
        return dataclasses.replace(built, sass=built.sass.replace("STG.E.128 ", "STG.E "))

    monkeypatch.setattr(planned.PlannedKernel, "build", split)
    found = verdict(explain(lambda x: x * 2, meta(2**28)), "narrow")
    # 4 of 20 bytes are stored, by an access of 4.
    assert found.effect.value == pytest.approx(1 + 4 / 20 * 0.3)
    assert "the compiler split them for sm_90" in str(found)


def test_limits_stand_in_the_order_of_their_effect() -> None:
    for args in ((meta(2**24)[::2],), (meta(2**10),), (meta(2**26)[::16],)):
        effects = [v.effect.value for v in explain(lambda x: x.exp().sin() * 2, *args).verdicts]
        assert effects == sorted(effects, reverse=True)
        assert effects[-1] == 1.0


def replaced(monkeypatch: pytest.MonkeyPatch, **figures_of_cubin: int) -> None:
    """Make ptxas report other figures."""
    build = planned.PlannedKernel.build

    def changed(self: planned.PlannedKernel) -> BuiltKernel:
        built = build(self)
        assert built.cubin is not None
        return dataclasses.replace(built, cubin=dataclasses.replace(built.cubin, **figures_of_cubin))

    monkeypatch.setattr(planned.PlannedKernel, "build", changed)


def test_spills_and_occupancy(monkeypatch: pytest.MonkeyPatch) -> None:
    replaced(monkeypatch, registers=255, spill_store_bytes=64, spill_load_bytes=64)
    explanation = explain(lambda x, y: x + y, meta(2**28), meta(2**28))
    # 256 registers a thread: 2 warps in each of 4 parts, 256 threads with 32 bytes each; two thirds of the bytes are reads.
    assert explanation.kernels[0].occupancy == Figure(8 / 64, "of the warps", "computed", "limited by registers")
    assert verdict(explanation, "in_flight").effect.value == pytest.approx(48 * 1024 * 2 / 3 / (256 * 32))
    assert "occupancy 12%, limited by registers" in verdict(explanation, "in_flight").finding
    assert verdict(explanation, "spills").effect.value == 1 + 128 / (6 * 8)


@pytest.mark.usefixtures("no_compiler")
def test_what_cannot_be_compiled_is_left_out() -> None:
    explanation = explain(lambda x, y: x + y, meta(N), meta(N))
    (kernel,) = explanation.kernels
    assert explanation.minimal.value == 6 * N
    assert (kernel.registers, kernel.occupancy, kernel.accesses, kernel.instructions) == (None, None, (), {})
    assert "NVRTC could not be loaded" in str(explanation)


def test_an_architecture_alone_has_no_times() -> None:
    explanation = explain(lambda x, y: x + y, meta(N), meta(N), target="sm_86")
    assert (explanation.gpu, explanation.least_time, explanation.achievable_time) == (None, None, None)
    assert explanation.kernels[0].waves is None
    assert explanation.kernels[0].occupancy is not None
    assert "least time" not in str(explanation)


def test_every_limit_is_explained() -> None:
    text = (Path(__file__).parents[2] / "docs/explain.md").read_text(encoding="utf-8")
    assert [limit for limit in LIMITS if f"`{limit}`" not in text] == []


# ---- a GPU that is here


def own_gpu(roof: Callable[[int, int], Figure] | None, time_us: float) -> Explanation:
    """An add explained as on an H200 that is here: its figures and its time are planted, all else is real."""
    add = wl.fuse(lambda x, y: x + y)
    call = add._bind((meta(2**28), meta(2**28)), {})
    figures_of_gpu = GpuFigures(find_target("h200"), sm_clock=Figure(1755.0, "MHz", "computed", "device attributes"), ceiling=roof)
    return add._run(call, lambda key, traced: add._explain_call(call, figures_of_gpu, time_us, None, key, traced))


def test_a_measured_ceiling_stands_in_place_of_the_assumed_share() -> None:
    asked = []

    def ceiling(read: int, written: int) -> Figure:
        asked.append((read, written))
        return Figure(4360.0, "GB/s", "measured", "direct 1x256")

    explanation = own_gpu(ceiling, 372.5)
    assert asked == [(4 << 28, 2 << 28)]
    assert explanation.achievable_time == Figure(6 * 2**28 / 4.36e6, "us", "computed", "minimal bytes / achievable bandwidth")
    assert explanation.measured_time is not None
    assert (explanation.measured_time.value, explanation.measured_time.kind) == (372.5, "measured")
    assert limits(explanation) == ["memory"]
    times = explanation.kernels[0].unit_times
    assert times["fp32"].kind == "computed"
    assert "1755 MHz" in times["fp32"].source


def test_a_time_that_nothing_explains_is_said_to_be_so() -> None:
    explanation = own_gpu(None, 700.0)
    assert explanation.achievable_bandwidth is not None
    assert explanation.achievable_bandwidth.value == pytest.approx(4800 * ACHIEVABLE_SHARE)
    assert limits(explanation) == ["unexplained", "memory"]


def test_a_device_is_read_without_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    h200 = rooflines.Attributes("NVIDIA H200", "GPU-0", "580", (9, 0), 132, 1_980_000, 3_201_000, 6144)
    monkeypatch.setattr(rooflines, "cuda_index", lambda device: 0)
    monkeypatch.setattr(rooflines, "_read_attributes", lambda index: h200)
    monkeypatch.setattr(rooflines, "_read", lambda path: None)
    found = rooflines.read_device()
    assert found.target.gpu is not None
    assert (found.target.arch, found.target.gpu.name, found.nominal and found.nominal.value) == ("sm_90", "H200 SXM", 4800)
    assert found.sm_clock == Figure(1980.0, "MHz", "computed", "device attributes")
    assert found.ceiling is None


def test_without_a_target_there_must_be_a_gpu() -> None:
    with pytest.raises(wl.DeviceError, match=r'explain got tensors on meta and no target. Name the GPU: target="h200"'):
        wl.ops.add.explain(meta(8), meta(8))


# ---- the command line


def test_the_command_prints_what_the_call_prints() -> None:
    result = run("add", "bf16[n]", "bf16[n]", "--size", "n=2^20", "--target", "h200")
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{wl.ops.add.explain(meta(N), meta(N), target='h200')}\n"
    for words in ("moved by sectors", "Eager PyTorch would run", "Verdict", "by Little's law", "computed", "assumed"):
        assert words in result.stdout


def test_the_command_writes_markdown_and_takes_plain_functions() -> None:
    result = run("torch:mul", "bf16[64]", "-1", "--target", "sm_80", "--markdown")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("### mul on sm_80: 1 kernel, 64 elements\n")
    rows = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in rows} == {6}


def test_operands_of_an_op_are_its_own() -> None:
    found = json.loads(run("bias_silu_mul", "--target", "h200", "--json").stdout)
    assert found["bytes_per_element"]["value"] == pytest.approx(6, abs=0.001)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("add", "bf16[8]", "bf16[8]"), 1, "no target"),
        (("add", "bf16[8]", "bf16[8]", "--target", "h999"), 1, "no GPU is called 'h999'"),
        (("add", "bf16[n]", "bf16[n]", "--size", "n=8,16", "--target", "h200"), 2, "several sizes"),
        (("add", "--json", "--markdown", "--target", "h200"), 2, "choose one"),
        (("add", "--nothing", "--target", "h200"), 2, "no option --nothing"),
    ],
)
def test_what_the_command_refuses(arguments: tuple[str, ...], status: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert words in " ".join(result.output.split())


@pytest.mark.usefixtures("no_compiler")
def test_elements_are_those_of_the_result_whatever_its_kernels_write() -> None:
    """Two parts of one concatenation by two kernels, and two halves of a rotation by one."""
    joined = explain(lambda x, y: torch.cat((x, y), 1), meta(4096, 100), meta(4096, 28))
    assert (joined.num_elements, joined.bytes_per_element.value) == (4096 * 128, 4.0)
    turned = explain(rope, meta(8, 1024, 128), meta(1024, 64), meta(1024, 64))
    assert turned.num_elements == 8 * 1024 * 128


@pytest.mark.usefixtures("no_compiler")
def test_the_launches_of_calls_of_any_size_are_counted_at_once() -> None:
    """2^60 bytes are halved 29 times: parts of 2^31 bytes do not fit 31 bits."""
    huge = explain(lambda x: x + 1, torch.empty(2**60, dtype=torch.int8, device="meta"))
    assert huge.eager.kernels[0].launches == 2**30
    square = explain(lambda x, y: x + y, meta(1, 2**31, dtype=f32), meta(2**31, 1, dtype=f32))
    assert square.eager.kernels[0].launches > 2**31


def test_unaligned_transposes_spill_nothing() -> None:
    explanation = explain(lambda x, y: x.t() + y, meta(4097, 4095), meta(4095, 4097))
    assert any(operand.access == "turned_realigned" for operand in explanation.operands)
    assert [kernel.spill_bytes.value for kernel in explanation.kernels if kernel.spill_bytes] == [0]
