"""The demo's figures against rational arithmetic, hand arithmetic and planted faults."""

from __future__ import annotations

import dataclasses
import json
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import demo, measure
from wideload.demo import Case, Check, CompiledKernel, Report, Steps
from wideload.measure import BenchResult

CPU = torch.device("cpu")
SWIGLU, BIAS_GELU = demo.CASES

# Every finite bf16 number by its ordinal, and what follows the largest: 2^128, which stands for infinity.
_MAGNITUDES = [Fraction(x) for x in torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).tolist()]
_MAGNITUDES.append(Fraction(2) ** 128)


def round_by_search(x: float) -> float:
    """The bf16 number nearest to ``x``, ties to the even ordinal, by exact comparison with its neighbours."""
    magnitude = abs(Fraction(x))
    above = next(i for i, candidate in enumerate(_MAGNITUDES) if candidate >= magnitude)
    below = max(above - 1, 0)
    to_above, to_below = _MAGNITUDES[above] - magnitude, magnitude - _MAGNITUDES[below]
    ordinal = below if to_below < to_above or (to_below == to_above and below % 2 == 0) else above
    value = float("inf") if ordinal == 0x7F80 else float(_MAGNITUDES[ordinal])
    return -value if x < 0 else value


_HALF_STEP = 2.0**-8  # between 1 and its neighbour 1 + 2**-7
HARD = [
    0.0,
    1.0,
    1 + _HALF_STEP,  # a tie: to 1, the even one
    1 + 3 * _HALF_STEP,  # a tie: up
    1 + _HALF_STEP + 2**-40,  # above the tie, which rounding to fp32 first would make one
    1 + _HALF_STEP - 2**-40,
    2.0**-133,  # the smallest subnormal
    2.0**-134,  # half of it: to zero
    2.0**-134 * (1 + 2**-40),
    2.0**-160,
    float(_MAGNITUDES[0x7F7F]),
    float(2**128 - 2**119),  # the tie between the largest number and infinity
    float(2**128 - 2**119) * (1 - 2**-50),
]


@pytest.mark.parametrize("x", [*HARD, *(-x for x in HARD[1:])])
def test_round_to_bf16_is_one_rounding(x: float) -> None:
    got = demo.round_to_bf16(torch.tensor([x], dtype=torch.float64))
    assert got.dtype == torch.bfloat16
    assert got.item() == round_by_search(x)


def test_round_to_bf16_on_random_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, dtype=torch.float64, generator=generator) * 2.0 ** torch.randint(-140, 124, (300,), generator=generator)
    assert demo.round_to_bf16(x).tolist() == [round_by_search(value) for value in x.tolist()]


def test_rounding_twice_is_not_one_rounding() -> None:
    x = torch.tensor([1 + _HALF_STEP + 2**-40], dtype=torch.float64)
    assert x.to(torch.bfloat16).item() == 1.0
    assert demo.round_to_bf16(x).item() == 1 + 2 * _HALF_STEP


# ---- the comparison


def case_of(fused: object, exact: object, eager: object = None) -> Case:
    return Case("case", "", wl.fuse(fused), eager or fused, exact, 5, ("x",))  # type: ignore[arg-type]


def shifted(steps: int) -> Case:
    """A case whose results are ``steps`` steps above the exact ones; those of eager torch are exact."""
    factor = 1 + steps * 2.0**-7

    def fused(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x > 0, torch.full_like(x, factor), 1.0)  # of the numbers drawn, the positive ones are off

    return case_of(fused, torch.ones_like, eager=torch.ones_like)


@pytest.mark.parametrize(("steps", "is_right"), [(0, True), (1, True), (2, False), (100, False)])
def test_check_counts_steps(steps: int, is_right: bool) -> None:
    tokens = 1000  # more than one chunk, and not a multiple
    check = demo.check_case(shifted(steps), tokens, CPU)
    assert sum((check.wideload.num_exact, check.wideload.num_one_step, check.wideload.num_further)) == tokens * 5
    assert check.wideload.max_steps == steps
    assert check.torch_eager == Steps(tokens * 5, 0, 0, 0)
    assert check.is_right is is_right
    off = {0: 0, 1: check.wideload.num_one_step}.get(steps, check.wideload.num_further)
    assert (2000 < off < 3000) == (steps > 0)


def test_check_of_nan_fails() -> None:
    check = demo.check_case(case_of(lambda x: x * float("nan"), torch.ones_like), 3, CPU)
    assert check.wideload.num_further == 15
    assert not check.is_right


def test_steps_across_zero() -> None:
    tiny = 2.0**-133
    check = demo.check_case(case_of(lambda x: x * 0 - tiny, lambda x: torch.full_like(x, tiny)), 1, CPU)
    assert check.wideload.max_steps == 2  # -tiny, zero, tiny
    check = demo.check_case(case_of(lambda x: x.abs() * 0, lambda x: -torch.zeros_like(x)), 1, CPU)
    assert check.wideload == Steps(5, 0, 0, 0)


def test_progress_counts_rows() -> None:
    rows: list[int] = []
    demo.check_case(shifted(0), 1025, CPU, rows.append)
    assert rows == [512, 512, 1]


@pytest.mark.parametrize("case", demo.CASES, ids=lambda case: case.name)
def test_the_cases_are_right(case: Case) -> None:
    check = demo.check_case(case, 16, CPU)
    assert check.shape == (16, case.columns)
    assert check.is_right


def test_exact_bias_gelu_is_the_definition() -> None:
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    bias = torch.full((1,), 0.25, dtype=torch.float64)
    torch.testing.assert_close(BIAS_GELU.exact(x, bias), F.gelu(x + bias, approximate="tanh"), rtol=1e-13, atol=0)


def test_exact_bias_gelu_keeps_its_tail() -> None:
    # gelu_tanh(-9) = -9 * sigmoid(2u), u = sqrt(2 / pi) * (-9 - 0.044715 * 729); e^2u is 3.6e-29, in mpmath -9 e^2u = -3.2457e-28.
    got = BIAS_GELU.exact(torch.tensor([-9.0], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)).item()
    u = (2 / 3.14159265358979323846) ** 0.5 * (-9 - 0.044715 * 729)
    assert got == pytest.approx(-9 * 2.718281828459045 ** (2 * u), rel=1e-9)


# ---- kernels


@pytest.mark.parametrize("arch", demo.ARCHS)
def test_swiglu_compiles_to_whole_accesses(arch: str) -> None:
    kernel = demo.compile_case(SWIGLU, arch)
    assert (kernel.family, kernel.num_accesses, kernel.num_wide_accesses, kernel.spill_bytes) == ("dense", 3, 3, 0)
    assert 0 < kernel.registers <= 64
    assert kernel.bytes_per_element == 6.0


def test_bias_gelu_moves_four_bytes_an_element() -> None:
    kernel = demo.compile_case(BIAS_GELU, "sm_90")
    assert kernel.family == "strips"  # the bias is one row for all
    assert kernel.bytes_per_element == pytest.approx(4 + 2 / demo.FULL_TOKENS)
    assert kernel.num_wide_accesses == kernel.num_accesses == 4 + 1 + 4  # four rows, the bias, four results
    assert kernel.spill_bytes == 0


def test_narrow_accesses_are_counted_as_narrow() -> None:
    class Sliced(Case):
        def shapes(self, tokens: int) -> tuple[tuple[int, ...], ...]:
            return (8, 1), (1, 7)  # rows of 7 bf16, shorter than an access

    sliced = Sliced("sliced", "", wl.ops.add, torch.add, torch.add, 7, ("x", "y"))
    kernel = demo.compile_case(sliced, "sm_90")
    assert kernel.family == "strided"
    assert (kernel.num_wide_accesses, kernel.num_accesses > 0) == (0, True)


# ---- bounds


def test_bounds_by_hand() -> None:
    bound = demo.bound_case(SWIGLU, 16384)
    assert bound.minimal_nbytes == 3 * 2 * 16384 * 14336
    times = {row.gpu: row for row in bound.least_times}
    assert times["H200 SXM"].memory_bandwidth_gbps == 4800
    assert times["H200 SXM"].time_us == pytest.approx(293.6012)  # 1,409,286,144 B / 4800 GB/s
    assert [row.time_us for row in bound.least_times] == sorted(row.time_us for row in bound.least_times)
    assert demo.bound_case(BIAS_GELU, 2).minimal_nbytes == 2 * (2 * 4096 + 4096 + 2 * 4096)


# ---- the verdict

GOOD = Report(
    tokens=1,
    device="CPU",
    checks=(Check("a", (1, 1), "cpu", Steps(1, 0, 0, 0), Steps(0, 0, 1, 9)),),
    kernels=(CompiledKernel("a", "sm_90", "a_dense", "dense", 32, 0, 3, 3, 6.0),),
    timings=(),
    bounds=(),
)


def test_a_good_report_has_no_faults() -> None:
    assert GOOD.faults == ()


def test_each_fault_is_named() -> None:
    wrong = dataclasses.replace(GOOD.checks[0], wideload=Steps(0, 0, 1, 1234))
    spilled = dataclasses.replace(GOOD.kernels[0], spill_bytes=8)
    faults = dataclasses.replace(GOOD, checks=(*GOOD.checks, wrong), kernels=(*GOOD.kernels, spilled)).faults
    assert faults == ("a is up to 1,234 steps off, allowed: 1", "a spills 8 bytes on sm_90")


# ---- times


def test_contenders_are_timed_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def bench(*args: object, mode: str, **kwargs: object) -> BenchResult:  # a CPU has no cold L2
        asked.update(kwargs, mode=mode)
        return measure.bench(*args, max_seconds=0.02, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(demo, "bench", bench)
    timing = demo.time_case(BIAS_GELU, 3, CPU)
    assert (asked["mode"], timing.tag) == ("cold", "measured")
    assert [contender.name for contender in timing.result.contenders] == ["wideload", "torch eager", "device copy"]
    assert all(contender.time_us and contender.time_us.n for contender in timing.result.contenders)
    assert timing.result.minimal_bytes == 2 * (3 * 4096 + 4096 + 3 * 4096)
    report = dataclasses.replace(GOOD, timings=(timing,)).to_dict()
    assert json.loads(json.dumps(report))["timings"][0]["bench"]["subject"]["name"] == "wideload"


@pytest.mark.gpu
@pytest.mark.parametrize("case", demo.CASES, ids=lambda case: case.name)
def test_on_a_gpu(case: Case) -> None:
    device = torch.device("cuda", 0)
    assert demo.check_case(case, 777, device).is_right
    timing = demo.time_case(case, 1024, device)
    assert all(contender.time_us for contender in timing.result.contenders)
