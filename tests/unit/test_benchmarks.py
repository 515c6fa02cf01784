"""The benchmarks of kernels without their GPU: which calls are made, what is counted, what passes, what is written."""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import dense
import host
import layouts
import operators
import optimizers
import ruler
import table
import wideload as wl
from table import NOT_BEHIND, BesideTime, Build, Case, Draw, Row, count_sectors, count_steps, format_table
from wideload.errors import DeviceError, LayoutError
from wideload.measure import BenchResult, Contender, unique_bytes
from wideload.measure.environment import GpuState, read_environment
from wideload.measure.labels import Label
from wideload.measure.operands import Operands, same_bits
from wideload.measure.outcome import tensors_of
from wideload.measure.statistics import summarize
from wideload.measure.timing import Collected
from wideload.measure.wall import Ceiling, Mix
from wideload.native import native_state

CPU = torch.device("cpu")
bf16, f32 = torch.bfloat16, torch.float32


def flat(num_inputs: int, dtype: torch.dtype = bf16) -> Build:
    return lambda draw, n: [draw(n, dtype=dtype) for _ in range(num_inputs)]


ADD = Case("x + b", lambda x, b: x + b, flat(2), 0.98)
N = 1 << 27
"""Elements of a full run."""


def contender(name: str, time_us: float | None, *labels: Label) -> Contender:
    return Contender(name, "cold", summarize([time_us]) if time_us else None, 0.0, "max_samples", 1, 1, None, None, labels)


def row(wideload_us: float, *, beside_peers: float | None = None, steps: int = 0, **peers_us: float) -> Row:
    """600 bytes, which the wall moves in 100 us; peers take 100 us unless said."""
    ceiling = Ceiling(Mix(2, 1), 600, 100.0, "direct 1x256", (100.0,), {"direct 1x256": 100.0})
    subject = contender("wideload", beside_peers or wideload_us)
    peers = tuple(contender(name, us) for name, us in ({"eager": 100.0, "compile": 100.0} | peers_us).items())
    state = GpuState(None, None, None, None)
    bench = BenchResult(subject, peers, None, None, None, (), 0, state, read_environment(CPU))
    return Row("x + b", 0.98, 400, 200, ceiling, wideload_us, None, {}, bench, steps, 0)


def with_bench(result: Row, **changes: Any) -> Row:
    return dataclasses.replace(result, bench=dataclasses.replace(result.bench, **changes))


# ---- verdicts


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (row(100.0), "PASS"),
        (row(102.0, eager=102.0, compile=101.0), "PASS"),  # 0.980 of the wall, 0.99 % behind
        (row(102.1, eager=103.0, compile=103.0), "short: 0.979 of the wall"),
        (row(101.5, eager=100.0, compile=101.5), "short: 1.5% behind eager"),
        (row(110.0, eager=100.0, compile=100.0), "short: 0.909 of the wall, 10.0% behind eager, 10.0% behind compile"),
        (row(100.0, beside_peers=103.0), "short: 3.0% behind eager, 3.0% behind compile"),  # as it was timed beside them
        (row(99.1), "PASS"),
        (row(98.9), "FAULT of the measurement: 1.011 of the wall"),
        (row(100.0, steps=1), "WRONG: 1 steps off, allowed are 0"),
        (row(90.0, steps=7), "WRONG: 7 steps off, allowed are 0"),  # being wrong comes before being fast
        (with_bench(row(100.0), subject=contender("wideload", None, Label("CACHED", "served"))), "CACHED: served"),
        (with_bench(row(100.0), subject=contender("wideload", 9.0, Label("OFF_STREAM", "elsewhere"))), "OFF_STREAM: elsewhere"),
    ],
)
def test_verdicts(result: Row, verdict: str) -> None:
    assert result.verdict == verdict
    assert verdict in format_table([result])


def test_the_wall_is_scaled_to_the_bytes_of_the_case() -> None:
    half = dataclasses.replace(row(50.0), nbytes_read=200, nbytes_written=100)
    assert half.ratio == 1.0
    assert format_table([half]).splitlines()[1].split()[4:6] == ["50.0", "50.0"]  # the wall's time, then wideload's


def test_a_goal_beside_another_call_is_counted_byte_for_byte() -> None:
    """The wall is far, and the other call moves a tenth of the bytes in a tenth of 98 us."""
    beside = dataclasses.replace(row(200.0, eager=300.0, compile=300.0), beside=BesideTime("aligned", 60, 19.6))
    assert (beside.wall_ratio, beside.ratio, beside.verdict) == (0.5, 0.98, "PASS")
    short = dataclasses.replace(beside, beside=BesideTime("aligned", 60, 19.4))
    assert short.verdict == "short: 0.970 of the aligned"
    assert "0.970 of aligned" in format_table([short])
    assert dataclasses.replace(beside, beside=BesideTime("aligned", 60, 22.0)).verdict == "PASS"  # faster than the easier call is no fault
    assert dataclasses.replace(short, wideload_us=98.0).verdict.startswith("FAULT")  # that of the wall counts, whatever the goal


def test_a_peer_that_did_not_run_is_named_with_its_reason() -> None:
    result = row(100.0)
    failed = contender("compile", None, Label("FAILED", "RuntimeError: no Triton"))
    alone = with_bench(result, against=(result.bench.against[0], failed))
    lines = format_table([alone, alone]).splitlines()
    assert "not run" in lines[1]
    assert lines[3:] == ["compile not run: FAILED: RuntimeError: no Triton"]
    elsewhere = contender("compile", 9.0, Label("OFF_STREAM", "elsewhere"))  # a time, but not of the work
    assert with_bench(result, against=(elsewhere,)).verdict == "PASS"
    assert with_bench(result, against=(elsewhere,)).not_run == {"compile": "OFF_STREAM: elsewhere"}


def test_a_peer_that_works_in_place_is_marked_and_one_that_does_so_unsaid_is_not_ranked() -> None:
    writes = Label("MUTATES", "it writes x, restored before each sample")
    found = with_bench(row(100.0), against=(contender("eager", 100.0), contender("other", 50.0, writes)))
    assert (found.peers_us, found.in_place) == ({"eager": 100.0}, {})
    assert found.not_run == {"other": "not said to work in place: it writes x, restored before each sample"}
    assert found.verdict == "PASS"
    said = dataclasses.replace(found, may_write=("other",))
    assert (said.peers_us, said.not_run) == ({"eager": 100.0, "other": 50.0}, {})
    assert said.in_place == said.to_dict()["in_place"] == {"other": writes.text}
    assert said.verdict == "short: 100.0% behind other"
    lines = format_table([said, row(100.0)]).splitlines()
    assert ["*" in line for line in lines] == [False, True, False, True]
    assert " 50.0* " in lines[1]
    assert lines[3] == "* other works in place: it writes x, restored before each sample"
    served = contender("other", None, Label("CACHED", "served"), writes)
    assert with_bench(said, against=(served,)).not_run == with_bench(found, against=(served,)).not_run == {"other": "CACHED: served"}
    assert with_bench(said, against=(served,)).in_place == {}
    new = with_bench(said, against=(contender("other", 50.0),))
    assert (new.peers_us, new.in_place) == ({"other": 50.0}, {}), "it may, and did not"


# ---- checking


def test_steps_are_counted_in_values_of_the_dtype() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 300.0], dtype=bf16)
    zero = torch.zeros_like(x)
    assert count_steps(ADD, [x, zero], x.clone()) == 0
    for index, off in ((0, 1.0078125), (1, -1.0078125), (3, 302.0)):  # the next bf16 away from zero
        wrong = x.clone()
        wrong[index] = off
        assert count_steps(ADD, [x, zero], wrong) == 1
    wrong = x.clone()
    wrong[2] = -0.0
    assert count_steps(ADD, [x, zero], wrong) == 1
    wrong[0] = float("nan")
    assert count_steps(ADD, [x, zero], wrong) > 100
    same = Case("x", lambda x: x, flat(1), 1.0)
    assert count_steps(same, [torch.tensor([-128, 127], dtype=torch.int8)], torch.tensor([-128, 120], dtype=torch.int8)) == 7
    below = -math.nextafter(2.0, 0.0)  # 2^63 values below 2: a distance that is no 64-bit integer
    assert count_steps(same, [torch.tensor([2.0, 1.0], dtype=torch.float64)], torch.tensor([below, 1.0], dtype=torch.float64)) > 0


def test_a_rounded_result_is_held_to_the_exact_one() -> None:
    case = dataclasses.replace(ADD, max_steps=1)
    x, b = (torch.tensor([v], dtype=bf16) for v in (256.0, 1.0))  # 257 lies between bf16's 256 and 258
    assert count_steps(case, [x, b], torch.tensor([256.0], dtype=bf16)) == 0
    assert count_steps(case, [x, b], torch.tensor([258.0], dtype=bf16)) == 1
    exact = dataclasses.replace(case, exact=lambda x, b: x + 6 * b)
    assert count_steps(exact, [x, b], torch.tensor([258.0], dtype=bf16)) == 2


def test_every_result_is_checked_and_every_chunk_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "CHECK_CHUNK", 8)
    both = Case("both", lambda x: (x.t(), x), flat(1), 1.0)
    x = torch.arange(20, dtype=bf16).view(4, 5)
    assert count_steps(both, [x], (x.t().contiguous(), x.clone())) == 0
    for result in range(2):
        wrong = (x.t().contiguous(), x.clone())
        wrong[result].view(-1)[17] = 0
        assert count_steps(both, [x], wrong) > 0
    with pytest.raises(LayoutError, match=r"the result's shape is \(4, 5\); eager gives \(5, 4\)"):
        count_steps(both, [x], (x, x))
    with pytest.raises(ValueError, match="longer"):
        count_steps(both, [x], x.t())


def test_the_exact_gelus_are_those_of_torch_where_nothing_cancels() -> None:
    x, zero = torch.linspace(-2, 6, 1001, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(layouts.exact_gelu(x, zero), torch.nn.functional.gelu(x), rtol=1e-13, atol=0.0)
    torch.testing.assert_close(layouts.exact_gelu_tanh(x, zero), torch.nn.functional.gelu(x, approximate="tanh"), rtol=1e-13, atol=0.0)
    assert layouts.exact_gelu(torch.tensor(-10.0).double(), zero).item() == pytest.approx(-7.61985302416047e-23, rel=1e-9)  # -10 Phi(-10)


# ---- operands


def test_draws_differ_and_use_the_whole_range() -> None:
    draw = Draw(CPU)
    for dtype in (bf16, f32, torch.int8):
        x, y = draw(100, 100, dtype=dtype), draw(100, 100, dtype=dtype)
        assert x.dtype == dtype
        assert not torch.equal(x, y)
        assert (x == 0).float().mean() < 0.05
        if dtype == torch.int8:
            assert (int(x.min()), int(x.max())) == (-128, 127)


def test_sectors_are_counted_from_the_first_to_the_last() -> None:
    x = torch.empty(16, 64, dtype=f32)
    assert count_sectors([x[:, ::2]]) == 16 * 64 * 4
    assert count_sectors([x[:, 1::3]]) == 16 * 64 * 4  # 12 bytes apart: no sector of 32 is skipped
    assert count_sectors([x[0, 7:9]]) == 64  # two elements on both sides of a boundary
    assert count_sectors([x[0, 8:16], x[0, 8]]) == 64
    assert doctest.testmod(table).failed == 0


def test_sides_of_squares() -> None:
    assert [layouts.whole_side(n) for n in (2, 128**2, 128**2 + 1, N)] == [128, 128, 256, 11648]
    assert [layouts.prime_side(n) for n in (2, 4, 10, 24 * 24, N)] == [2, 2, 5, 29, 11587]
    assert 11586**2 > N > 11585**2


class DrawNothing(Draw):
    """Tensors of any size, without their values."""

    def __call__(self, *shape: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")


on_meta = DrawNothing(torch.device("meta"))


def subject(case: Case) -> Any:
    return case.subject or wl.fuse(case.fn, name="benchmark")


def case_named(name: str) -> Case:
    (case,) = (case for case in (*layouts.CASES, *operators.CASES) if case.name == name)
    return case


@pytest.mark.parametrize(
    ("name", "nbytes_read", "nbytes_written"),
    [
        ("x[1:] + b[3:], bf16", 4 * N, 2 * N),
        ("x[1:] + b[3:], f32", 8 * N, 4 * N),
        ("x[1:] + b[3:], int8", 2 * N, N),
        ("x + row", 2 * N + 2 * 4096, 2 * N),
        ("x + row, prime width", 2 * 32745 * 4099 + 2 * 4099, 2 * 32745 * 4099),  # 2^27 / 4099 = 32744.02
        ("x + column", 2 * N + 2 * 32768, 2 * N),
        ("x + (B, 1, C)", 2 * N + 2 * 1024 * 1024, 2 * N),
        ("x.t() + row", 2 * N + 2 * 32768, 2 * N),
        ("bf16 + f32 -> f32", 6 * N, 4 * N),
        ("bf16 -> f32", 2 * N, 4 * N),
        ("f32 -> bf16", 4 * N, 2 * N),
        ("int8 -> bf16", N, 2 * N),
        ("where(bool, bf16, bf16)", 5 * N, 2 * N),
        ("x[:, 1:-1] * 2", 2 * 32785 * 4094, 2 * 32785 * 4094),
        ("silu(g) * u, halves", 4 * N, 2 * N),
        ("x[:, 2:] + b, odd rows", 4 * 32761 * 4097, 2 * 32761 * 4097),
        ("x.t().contiguous(), f64", 8 * 11648**2, 8 * 11648**2),
        ("x.t().contiguous(), prime, int8", 11587**2, 11587**2),
        ("x.t() + w, prime", 4 * 11587**2, 2 * 11587**2),
        ("BSHD -> BHSD", 2 * N, 2 * N),
        ("channels_last + contiguous", 4 * 168 * 256 * 56 * 56, 2 * 168 * 256 * 56 * 56),
        ("x[:, ::2] * 2", 4 * N, 2 * N),  # all sectors of rows twice as long
        ("-x, > 2^31 int8", 2**31 + 11, 2**31 + 11),
        ("x * 2, offsets > 2^31", 2 * N, 2 * N),
        ("packed SwiGLU", 4 * N, 2 * N),
        ("rotate_half RoPE", 2 * 4 * 6554 * (32 + 8 + 2) * 128, 2 * 4 * 6554 * (32 + 8) * 128),
        ("gelu(x + row), erf", 2 * N + 2 * 4096, 2 * N),
        ("softplus", 2 * N, 2 * N),
        ("dropout 0.1", 2 * N, 2 * N),
        ("causal mask", 2 * N, 2 * N),
        ("bf16 -> fp8, one scale", 2 * N + 4, N),
        ("fp8 -> bf16, scale by row", N + 4 * 32768, 2 * N),
        ("bf16 -> int8, scale by row", 2 * N + 4 * 32768, N),
        ("int8 -> bf16, scale by row", N + 4 * 32768, 2 * N),
        ("swiglu", 4 * N, 2 * N),
        ("packed swiglu", 4 * N, 2 * N),
        ("bias_silu_mul", 4 * N + 2 * 4096, 2 * N),
        ("swiglu -> fp8, scale by row", 4 * N + 4 * 32768, N),
        ("rope", 2 * N + 2 * 8192 * 64 * 4, 2 * N),
        ("rope of q and k", 2 * 4 * 6554 * 40 * 128 + 2 * 6554 * 128 * 2, 2 * 4 * 6554 * 40 * 128),
    ],
)
def test_minimal_bytes(name: str, nbytes_read: int, nbytes_written: int) -> None:
    case = case_named(name)
    args = case.build(on_meta, N)
    results = tensors_of(case.fn(*args))
    assert (case.count_read(args), unique_bytes(results)) == (nbytes_read, nbytes_written)
    assert sum(result.numel() for result in results) >= N


FAMILIES = {
    "misaligned": (layouts.MISALIGNED, {"rows"}),
    "broadcast": (layouts.BROADCASTS, {"rows", "strips"}),
    "dtypes": (layouts.DTYPES, {"dense"}),
    "slices": (layouts.SLICES, {"rows", "pitched", "strips"}),
    "large": (layouts.LARGES, {"dense", "rows"}),
    "pasted": (layouts.PASTED, {"rows", "pitched", "strips"}),
    "operators": (operators.CASES, {"dense", "rows", "pitched", "strips"}),
}


@pytest.mark.parametrize("group", FAMILIES)
def test_which_kernels_run(group: str) -> None:
    cases, families = FAMILIES[group]
    for case in cases:
        for kernel in subject(case).plan(*case.build(on_meta, N), target="sm_90").kernels:
            assert kernel.plan.variant.family in families, case.name


def test_transposed_operands_are_turned() -> None:
    for case in layouts.TRANSPOSES:
        (kernel,) = wl.fuse(case.fn, name="benchmark").plan(*case.build(on_meta, N), target="sm_90").kernels
        if case.name == "BSHD -> BHSD":  # whole heads are moved: their elements stay neighbours
            assert kernel.plan.variant.family == "rows"
        else:
            assert kernel.plan.variant.family == "tile"
            assert ("turned_realigned" in kernel.plan.variant.loads) == ("prime" in case.name)


def test_the_large_ones_need_64_bits_and_what_they_stand_beside_does_not() -> None:
    for case in layouts.LARGES:
        assert case.beside is not None
        fused = wl.fuse(case.fn, name="benchmark")
        reach = max(1 + sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True)) for x in case.build(on_meta, N))
        near = max(1 + sum((s - 1) * t for s, t in zip(x.shape, x.stride(), strict=True)) for x in case.beside.build(on_meta, N))
        assert reach > 2**31 > 4 * near
        plan, easy = (fused.plan(*build(on_meta, N), target="sm_90").kernels[0].plan for build in (case.build, case.beside.build))
        assert plan.variant.family == easy.variant.family
        if plan.variant.family == "rows":
            assert (plan.variant.index_bits, easy.variant.index_bits) == (64, 32)


def test_misaligned_operands_are_and_those_beside_are_not() -> None:
    for case in layouts.MISALIGNED:
        assert case.beside is not None
        args, aligned = (build(Draw(CPU), 1000) for build in (case.build, case.beside.build))
        assert [x.shape for x in args] == [x.shape for x in aligned] == [(1000,)] * 2
        assert all(x.data_ptr() % 16 for x in args)
        assert not any(x.data_ptr() % 16 for x in aligned)


@pytest.mark.parametrize("case", [*dense.CASES, *layouts.CASES, *operators.CASES], ids=lambda case: case.name)
def test_every_case_is_right_on_the_cpu_and_what_is_wrong_is_seen(case: Case) -> None:
    args = case.build(Draw(CPU), 5000)
    result = subject(case)(*args)
    assert count_steps(case, args, result) <= case.max_steps
    wrong = [tensor.contiguous() for tensor in tensors_of(result)]
    bits = wrong[-1].view(-1).view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[wrong[-1].element_size()])
    bits[int(wrong[-1].double().abs().argmax())] ^= 4  # four values off
    assert count_steps(case, args, wrong if len(wrong) > 1 else wrong[0]) > case.max_steps


@pytest.mark.parametrize("case", [*dense.CASES, *layouts.CASES, *operators.CASES], ids=lambda case: case.name)
def test_every_case_has_other_arguments_of_the_same_layouts(case: Case) -> None:
    draw = Draw(CPU)
    args, others = case.build(draw, 5000), case.build(draw, 5000)
    operands = Operands([], tuple(args), {}, None, others)
    assert operands.permute()
    assert all(map(same_bits, operands.args, others))


def test_names_are_told_apart_and_goals_are_those_promised() -> None:
    names = [case.name for case in (*dense.CASES, *layouts.CASES, *operators.CASES)]
    assert len(set(names)) == len(names)
    goals = [{case.goal for case in cases} for cases in (layouts.MISALIGNED, layouts.BROADCASTS, layouts.DTYPES, layouts.SLICES)]
    assert goals == [{0.98}, {0.97}, {0.97}, {0.96}]
    assert {case.goal for case in (*layouts.TRANSPOSES, *layouts.STEPS)} == {0.95}
    assert {case.name: case.goal for case in layouts.PASTED} == {
        "packed SwiGLU": 0.96,
        "rotate_half RoPE": 0.95,
        "gelu(x + row), tanh": 0.97,
        "gelu(x + row), erf": 0.95,
    }


def test_goals_of_operators() -> None:
    unlike = dict.fromkeys(
        ("gelu, erf", "dropout 0.1", "swiglu -> fp8, scale by row", "swiglu -> fp8 with amax", "rope", "rope of q and k"), 0.95
    )
    converted = {
        case.name: 0.96 for case in operators.CASES if "8 -> " in case.name or "-> int8" in case.name or case.name.startswith("bf16")
    }
    assert len(converted) == 6
    assert {case.name: case.goal for case in operators.CASES} == {case.name: 0.97 for case in operators.CASES} | converted | unlike


def test_dropout_is_held_to_its_probability_and_to_what_it_kept() -> None:
    case, x = case_named("dropout 0.1"), Draw(CPU)(100, 1000)
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) >= operators.P
    right = (x.double() * kept / 0.9).bfloat16()
    assert count_steps(case, [x], right) == 0
    assert count_steps(case, [x], right.abs()) > 1000  # a dropped negative number is -0, as torch has it
    assert count_steps(case, [x], (x.double() * kept).bfloat16()) > 10  # not made up for
    for wrong in (x.clone(), right.index_fill(0, torch.arange(20), 0.0)):
        with pytest.raises(wl.WideloadError, match=r"of the elements were dropped; allowed: 0.1 \+- 0.006"):
            count_steps(case, [x], wrong)


def test_scales_use_fp8_to_its_top() -> None:
    case = case_named("bf16 -> fp8, scale by row")
    result = case.fn(*case.build(Draw(CPU), 1 << 19)).float().abs()
    assert result.max() == 448
    assert 0 < (result == 448).float().mean() < 0.02
    assert (result < 1).float().mean() < 0.01


# ---- a whole run


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Mix, int]]:
    """Runs on the CPU, the clock replaced: a call takes as many microseconds as its name has letters. Returns what movers moved."""

    def time_cold(calls: Mapping[str, Callable[[], object]], device: int, num_samples: int) -> dict[str, tuple[float, ...]]:
        for call in calls.values():
            call()
        return {name: (float(len(name)),) * num_samples for name in calls}

    def collect(samplers: Mapping[str, object], rule: Any, *others: object) -> dict[str, Collected]:
        return {name: Collected((float(len(name)),) * rule.max_samples, "max_samples") for name in samplers}

    launched: list[tuple[Mix, int]] = []

    def prepare_movers(mix: Mix, nbytes: int, device: int) -> tuple[dict[str, Callable[[], object]], int]:
        return {"eight ch": lambda: launched.append((mix, nbytes))}, nbytes

    bench = wl.bench
    environment = dataclasses.replace(read_environment(CPU), commit=None)
    fakes: dict[str, Any] = {
        "time_cold": time_cold,
        "prepare_movers": prepare_movers,
        "find_device": lambda: CPU,
        "read_environment": lambda device: environment,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(table, name, fake)
    monkeypatch.setattr(importlib.import_module("wideload.measure.bench"), "collect", collect)
    monkeypatch.setattr(wl, "bench", lambda *args, **options: bench(*args, **{**options, "mode": "auto", "warm_up_seconds": 0.0}))
    monkeypatch.setenv("WIDELOAD_COMMIT", "abc123")
    return launched


def test_a_run_writes_every_sample(simulated: list[tuple[Mix, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "dense.json"
    arguments = ["--elements", "1000", "--samples", "3", "--no-compile", "--json", str(path)]
    assert dense.main(arguments) == 1  # wideload (8) against eager (5)

    written = json.loads(path.read_text())
    assert written["environment"]["commit"] == "abc123"
    assert written["arguments"] == {"elements": 1000, "samples": 3, "seed": 0}
    assert written["failed"] == {}
    assert [r["case"] for r in written["rows"]] == [case.name for case in dense.CASES]
    assert [(r["nbytes_read"], r["nbytes_written"]) for r in written["rows"]] == [
        (4000, 2000),
        (6000, 2000),
        (8000, 4000),
        (4000, 4000),
        (1000, 1000),
        (1000, 1000),
    ]
    assert [mix.name for mix, _ in simulated] == ["2R1W", "3R1W", "2R1W", "1R1W", "1R1W", "1R1W"]
    assert [nbytes for _, nbytes in simulated] == [6000, 8000, 12000, 8000, 2000, 2000]
    for r in written["rows"]:
        assert r["samples_us"] == {"wideload": [8.0] * 3, "eight ch": [8.0] * 3}
        assert r["peers_us"] == {"eager": 5.0}
        bench = BenchResult.from_dict(r["bench"])
        assert bench["eager"].time_us is not None
        assert bench["eager"].time_us.samples == (5.0,) * 3
        assert bench.checked_against == "wideload.reference"
        assert r["ratio"] == r["wall_ratio"] == 1.0
        assert r["steps"] <= r["max_steps"]
        assert r["verdict"] == "short: 60.0% behind eager"
    assert "60.0% behind eager" in capsys.readouterr().out.splitlines()[-1]


def test_a_run_of_some_layouts(simulated: list[tuple[Mix, int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "layouts.json"
    only = ["--only", "b[3:], bf16", "--only", "::2", "--only", "RoPE"]
    assert layouts.main(["--elements", "1600", "--samples", "2", "--no-compile", "--json", str(path), *only]) == 1
    misaligned, stepped, rope = json.loads(path.read_text())["rows"]
    assert misaligned["beside"] == {"name": "aligned", "nbytes": 9600, "time_us": 7.0}
    assert misaligned["ratio"] == 7 / 8  # the letters of aligned, and of wideload
    assert misaligned["verdict"] == "short: 0.875 of the aligned, 60.0% behind eager"
    assert [argument["offset"] for argument in misaligned["bench"]["arguments"]] == [1, 3]
    assert (stepped["nbytes_read"], stepped["nbytes_written"], stepped["beside"]) == (2 * 8192 * 2, 2 * 4096 * 2, None)
    assert [a["name"] for a in rope["bench"]["arguments"]] == ["q", "k", "cos", "sin"]
    assert [a["strides"] for a in rope["bench"]["arguments"][:2]] == [[2 * 4096, 128, 4096, 1], [2 * 1024, 128, 1024, 1]]  # two positions
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 3 + 3
    assert "3/3 rotate_half RoPE ...\n  1.000 of wall: short: 60.0% behind eager\n" in printed.err


def test_a_run_of_operators_beside_another_library(
    simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "operators.json"
    arguments = [
        "--elements",
        "1600",
        "--samples",
        "2",
        "--no-compile",
        "--json",
        str(path),
        "--only",
        "packed swiglu",
        "--only",
        "dropout",
    ]
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    assert operators.main(arguments) == 1
    dropout, swiglu = json.loads(path.read_text())["rows"]
    assert (dropout["steps"], dropout["bench"]["checked_against"], dropout["not_run"]) == (0, None, {})
    assert (swiglu["peers_us"], list(swiglu["not_run"])) == ({"eager": 5.0}, ["liger"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].startswith("liger not run: FAILED: ModuleNotFoundError: ")
    assert [line.count("not run") for line in printed[3:5]] == [1, 2]  # Liger has no dropout

    def run(x: torch.Tensor) -> torch.Tensor:
        assert x.shape == (2, 2 * 4096)
        return torch.nn.functional.silu(x[:, :4096]) * x[:, 4096:]

    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    fake = SimpleNamespace(LigerFusedGateUpSiLUMulFunction=SimpleNamespace(apply=run))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.swiglu", fake)
    operators.main(arguments)
    _, swiglu = json.loads(path.read_text())["rows"]
    assert swiglu["peers_us"] == {"eager": 5.0, "liger": 5.0}
    assert swiglu["verdict"] == "short: 60.0% behind eager, 60.0% behind liger"
    assert " 8.0 5.0 not run 5.0 " in " ".join(capsys.readouterr().out.splitlines()[-1].split())


def turn_as_liger(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What liger_kernel.ops.rope does in 0.8.5: where nothing has to be made contiguous, in place; by the first halves of the tables."""
    assert cos.shape == sin.shape == (1, q.shape[2], q.shape[3])
    turned = []
    for heads in (q, k):
        assert heads.transpose(1, 2).is_contiguous()
        x = heads.transpose(1, 2).contiguous()
        half = x.shape[-1] // 2
        left, right = x[..., :half].clone(), x[..., half:].clone()
        c, s = (table.contiguous()[:, :, None, :half] for table in (cos, sin))
        x[..., :half] = left * c - right * s
        x[..., half:] = right * c + left * s
        turned.append(x.transpose(1, 2))
    return turned[0], turned[1]


def test_a_run_of_rope_beside_one_that_turns_in_place(
    simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "operators.json"
    arguments = ["--elements", "100000", "--samples", "2", "--no-compile", "--json", str(path), "--only", "rope of q and k"]
    for name in ("liger_kernel", "liger_kernel.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    fake = SimpleNamespace(LigerRopeFunction=SimpleNamespace(apply=turn_as_liger))
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.rope", fake)
    assert operators.main(arguments) == 1
    (found,) = json.loads(path.read_text())["rows"]
    written = "it writes q, k, restored before each sample"
    assert (found["peers_us"], found["not_run"]) == ({"eager": 5.0, "liger": 5.0}, {})
    assert (found["may_write"], found["in_place"]) == (["liger"], {"liger": written})
    assert found["bench"]["minimal_bytes"] == found["nbytes_read"] + found["nbytes_written"]
    *_, line, note = capsys.readouterr().out.splitlines()
    assert " 8.0 5.0 not run 5.0* " in " ".join(line.split())
    assert note == f"* liger works in place: {written}"

    def turn_q(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turn_as_liger(q, k.clone(memory_format=torch.preserve_format), cos, sin)[0], k

    def turn_back(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return turn_as_liger(q, k, cos, -sin)

    for wrong in (turn_q, turn_back):
        fake.LigerRopeFunction.apply = wrong
        operators.main(arguments)
        (found,) = json.loads(path.read_text())["rows"]
        assert found["not_run"]["liger"].startswith("WRONG: ")
        assert found["in_place"] == {}


def test_rivals_that_write_where_they_may_and_where_they_may_not(simulated: list[tuple[Mix, int]]) -> None:
    known: dict[int, torch.Tensor] = {}

    def add_in_place(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x.add_(b)

    def add_once(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return known.setdefault(x.data_ptr(), x + b)

    def add_twice_in_place(x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x.add_(b).add_(b)

    rivals = {
        "said": table.InPlace(add_in_place),
        "unsaid": add_in_place,
        "cached": add_once,
        "said but cached": table.InPlace(add_once),
        "said but wrong": table.InPlace(add_twice_in_place),
        "said but new": table.InPlace(lambda x, b: x + b),
    }
    found = table.run_case(dataclasses.replace(ADD, rivals=rivals), 1000, 1, CPU, with_compile=False)
    assert found.peers_us == {"eager": 5.0, "said": 4.0, "said but new": 12.0}
    assert found.in_place == {"said": "it writes x, restored before each sample"}
    assert {name: reason.partition(": ")[0] for name, reason in found.not_run.items()} == {
        "unsaid": "not said to work in place",
        "cached": "CACHED",
        "said but cached": "CACHED",
        "said but wrong": "WRONG",
    }


def test_a_level_run_passes(simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "NOT_BEHIND", 2.0)
    assert dense.main(["--elements", "100", "--samples", "1", "--no-compile", "--only", "int8"]) == 0


def test_a_case_that_fails_does_not_end_the_run(
    simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_case(case: Case, *arguments: object) -> Row:
        if "float32" in case.name:
            raise RuntimeError("out of memory")
        return row(100.0)

    monkeypatch.setattr(table, "run_case", run_case)
    path = tmp_path / "dense.json"
    assert dense.main(["--elements", "8", "--no-compile", "--json", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("PASS") == 4
    assert printed.out.count("FAILED") == 2
    assert "out of memory" in printed.err
    assert set(json.loads(path.read_text())["failed"].values()) == {"RuntimeError: out of memory"}


def test_without_a_gpu_the_status_is_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cuda_index() -> int:
        raise DeviceError("no GPU")

    monkeypatch.setattr(table, "cuda_index", cuda_index)
    assert layouts.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_name_that_no_case_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        layouts.main(["--only", "softmax"])
    assert exit_info.value.code == 2
    assert "no case has that in its name. Cases: x[1:] + b[1:], bf16; " in capsys.readouterr().err


def test_a_compiler_that_is_missing_is_a_reason(simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(fn: object, dynamic: bool) -> Callable[..., torch.Tensor]:
        def call(*args: object) -> torch.Tensor:
            raise RuntimeError("Cannot find a working triton installation")

        return call

    monkeypatch.setattr(torch, "compile", compile)
    result = table.run_case(ADD, 100, 1, CPU, with_compile=True)
    assert result.not_run == {"compile": "FAILED: RuntimeError: Cannot find a working triton installation"}
    assert result.peers_us == {"eager": 5.0}


def test_a_compiled_peer_that_is_wrong_is_not_timed(simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: lambda x, b: x)
    assert table.run_case(ADD, 100, 1, CPU, with_compile=True).not_run["compile"].startswith("WRONG: ")
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: lambda x, b: x + b)
    assert table.run_case(ADD, 100, 1, CPU, with_compile=True).peers_us == {"eager": 5.0, "compile": 7.0}
    assert math.isclose(table.run_case(ADD, 100, 1, CPU, with_compile=True).ratio, 1.0)


# ---- the ruler


def bench_of(time_us: float | None) -> BenchResult:
    state = GpuState(None, None, None, None)
    return BenchResult(contender("negate", time_us), (), None, None, None, (), 0, state, read_environment(CPU))


@pytest.mark.parametrize(
    ("second_us", "profiled_us", "kept"),
    [(101.0, 97.5, [True, True]), (101.1, 100.0, [False, True]), (98.9, 97.0, [False, False]), (100.0, 103.2, [True, False])],
)
def test_a_result_is_held_to_the_next_and_to_the_profiler(
    second_us: float, profiled_us: float, kept: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 us first: 1 % from one to the next, 3 % beside the profiler."""
    times = iter([100.0, second_us])
    monkeypatch.setattr(ruler, "cases", lambda device: [("case", ruler.negate, torch.ones(1))])
    monkeypatch.setattr(ruler, "kernel_us", lambda fn, x: profiled_us)
    monkeypatch.setattr("wideload.bench", lambda fn, x: bench_of(next(times)))
    assert [found.is_kept for found in ruler.bench_rows(CPU)] == kept


def test_a_call_that_was_not_timed_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ruler, "cases", lambda device: [("case", ruler.negate, torch.ones(1))])
    monkeypatch.setattr("wideload.bench", lambda fn, x: bench_of(None))
    with pytest.raises(SystemExit, match="was not timed"):
        list(ruler.bench_rows(CPU))


def test_false_verdicts_and_low_ceilings_are_short(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = iter(
        [SimpleNamespace(verdicts={"SAME": 198, "FASTER": 2}, false_rate=0.01), SimpleNamespace(verdicts={"SLOWER": 3}, false_rate=0.015)]
    )
    monkeypatch.setattr("wideload.self_test", lambda fn, x, num_pairs: next(tested))
    assert [(found.found, found.is_kept) for found in ruler.itself_rows(CPU, 200)] == [("2 FASTER, 198 SAME", True), ("3 SLOWER", False)]
    ceilings = {mix: SimpleNamespace(value=gbps) for mix, gbps in {"1R1W": 4200.0, "1R0W": 4399.0, "0R1W": 4600.0, "2R1W": 4300.0}.items()}
    monkeypatch.setattr("wideload.roofline", lambda device, refresh: SimpleNamespace(ceilings=ceilings))
    assert [found.is_kept for found in ruler.ceiling_rows(CPU)] == [True, False, True, True]


def test_the_ruler_prints_and_writes_each_row_and_fails_where_one_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = ruler.Finding("a", "1", "2", True), ruler.Finding("b", "1", "2", False)
    monkeypatch.setattr(ruler, "find_device", lambda: CPU)
    for name in ("bench_rows", "ceiling_rows"):
        monkeypatch.setattr(ruler, name, lambda device: iter([good]))
    for last, status in ((good, 0), (bad, 1)):
        monkeypatch.setattr(ruler, "itself_rows", lambda device, num_pairs, last=last: iter([last]))
        assert ruler.main(["--json", str(tmp_path / "r.json")]) == status
        written = json.loads((tmp_path / "r.json").read_text())
        assert [kept["what"] for kept in written["rows"]] == ["a", last.what, "a"]
        assert written["environment"]["torch"] == torch.__version__
    assert capsys.readouterr().out.count("short") == 1


def test_the_ruler_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert ruler.main([]) == 2
    assert "CUDA" in capsys.readouterr().err


# ---- optimizers


def adam_row(**changes: Any) -> optimizers.Row:
    """700 bytes, which the wall moves in 100 us, and wideload too; torch's fused takes 130, and the host as long for both."""
    ceiling = Ceiling(Mix(4, 3), 700, 100.0, "direct 1x256", (100.0,), {"direct 1x256": 100.0})
    times = {"wideload": [100.0], "torch fused": [130.0], "torch foreach": [400.0]}
    figures: dict[str, Any] = {"samples_us": times, "host_us": {"wideload": 900.0, "torch fused": 900.0}, "wall_goal": 0.97}
    base = {"case": "case", "num_tensors": 1, "num_elements": 25, "nbytes": (400, 300), "ceiling": ceiling, "excess": 0.5, "not_run": {}}
    return optimizers.Row(**{**base, **figures, **changes})


def adam_times(wideload_us: float, fused_us: float = 1000.0) -> dict[str, Any]:
    return {"samples_us": {"wideload": [wideload_us], "torch fused": [fused_us]}}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "PASS"),
        (adam_times(103.0), "PASS"),
        (adam_times(103.2), "short: 0.969 of the wall"),
        (adam_times(100.0, 124.0), "short: 1.24 times as fast as torch fused"),
        ({"host_us": {"wideload": 920.0, "torch fused": 900.0}}, "short: the host takes 1.02 times as long as for torch fused"),
        (adam_times(98.0), "FAULT of the measurement: 1.020 of the wall"),
        ({**adam_times(300.0, 299.0), "wall_goal": None}, "PASS"),
        ({**adam_times(300.0, 280.0), "wall_goal": None}, "short: 0.93 times as fast as torch fused"),
        ({"samples_us": {"wideload": [100.0]}, "host_us": {"wideload": 900.0}}, "PASS"),  # torch has no such state
        ({"excess": 1.5}, "WRONG: 1.5 times the difference that is allowed"),
        ({"excess": math.nan}, "WRONG: nan times the difference that is allowed"),
    ],
)
def test_verdicts_of_optimizers(changes: dict[str, Any], verdict: str) -> None:
    assert adam_row(**changes).verdict == verdict
    assert verdict in optimizers.format_table([adam_row(**changes)])


def test_the_parameters_of_the_optimizers() -> None:
    by_dtype = {case.name: case for case in optimizers.CASES}
    model, halves, mixed, small = by_dtype.values()
    assert (len(model.shapes), len(small.shapes), small.num_elements) == (424, 1000, 1_000_000)
    assert 198e6 < model.num_elements < 202e6
    n = model.num_elements
    assert (model.nbytes, halves.nbytes, mixed.nbytes) == ((16 * n, 12 * n), (8 * n, 6 * n), (12 * n, 10 * n))
    assert [case.wall_goal for case in by_dtype.values()] == [0.97, 0.97, 0.97, None]
    assert (optimizers.FASTER_THAN_FUSED, NOT_BEHIND) == (1.25, 1.01)


@pytest.mark.parametrize("case", optimizers.CASES, ids=lambda case: case.name)
def test_optimizers_are_checked(case: optimizers.Case) -> None:
    small = dataclasses.replace(case, shapes=((30, 7), (5,), (1,)))
    contenders = optimizers.make_contenders(small, Draw(CPU))
    assert set(contenders) == ({"wideload"} if case.state_dtype else {"wideload", "torch fused", "torch foreach"})
    assert 0 <= optimizers.find_excess(small, contenders) <= 1
    for fault in ({"lr": 1.05 * optimizers.LR}, {"eps": 0.1}):
        wrong = optimizers.make_contenders(small, Draw(CPU))
        wrong["wideload"].optimizer.param_groups[0].update(fault)
        assert optimizers.find_excess(small, wrong) > 1 or case.dtype == bf16  # which a small update hardly moves
    wrong["wideload"].params[2].data.fill_(math.nan)
    assert optimizers.find_excess(small, wrong) == math.inf


def test_a_run_of_the_optimizers(
    simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("time_cold", "prepare_movers", "find_device"):
        monkeypatch.setattr(optimizers, name, getattr(table, name))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    cases = [dataclasses.replace(case, shapes=((8, 4), (3,))) for case in optimizers.CASES[:3]]
    monkeypatch.setattr(optimizers, "CASES", cases)
    path = tmp_path / "optimizers.json"
    assert optimizers.main(["--samples", "2", "--json", str(path)]) == 1
    written = json.loads(path.read_text())
    assert written["failed"] == {}
    assert simulated[0] == (Mix(4, 3), 35 * 28)
    assert [set(row["samples_us"]) for row in written["rows"]] == [{"wideload", "torch fused", "torch foreach"}] * 2 + [{"wideload"}]
    assert all(row["excess"] <= 1 for row in written["rows"])
    assert len(capsys.readouterr().out.splitlines()) == 3 + 2 * 3

    def exposed(calls: Mapping[str, Any], *others: Any) -> Any:
        if "torch foreach" in calls:
            raise DeviceError("torch foreach: the GPU was idle")
        return table.time_cold(calls, *others)

    monkeypatch.setattr(optimizers, "time_cold", exposed)
    optimizers.main(["--samples", "2", "--only", "float32"])
    assert "torch foreach not timed: torch foreach: the GPU was idle" in capsys.readouterr().out


# ---- the host


def test_a_call_is_held_to_an_eager_one() -> None:
    row = host.Row("f", "x + y", 1.5, 3.0, 2.0)
    assert row.ratio == 1.5
    assert row.finding.is_kept
    assert not dataclasses.replace(row, wideload_us=3.1).finding.is_kept
    assert "3.0 us, x + y 2.0 us: 1.50" in str(row.finding)


def test_the_host_s_calls_run_and_are_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(host, "WARM_UP", 1)
    monkeypatch.setattr(host, "CALLS", 1)
    status = host.run(CPU, tmp_path / "host.json", rounds=1)
    found = json.loads((tmp_path / "host.json").read_text())
    assert [row["name"] for row in found["rows"]] == [name for name, *_ in host.cases(CPU)]
    assert all(row["wideload_us"] > 0 and row["ratio"] == row["wideload_us"] / row["eager_us"] for row in found["rows"])
    assert status == int(any(row["ratio"] > row["most"] for row in found["rows"]))
    assert found["native"] is native_state().is_ready
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(found["rows"])


def test_the_host_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host.main([]) == 2
    assert "needs a CUDA device" in capsys.readouterr().err
