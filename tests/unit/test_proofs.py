"""The proof of the numerics contract is tried itself: its units by hand, its command on a few ops, and a fault that it must find."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import pytest
import torch

from tests.emulator.test_numerics import round_once as round_once_in_numpy
from tests.proofs import precise
from tests.proofs.__main__ import UNFINISHED, WITHIN, WRONG, main
from tests.proofs.check import Record, Settings
from tests.proofs.report import RESULT, read_report, render_report, summarize, write_report
from tests.proofs.rows import PAIRS, UNARY, all_bits, every_bits, make_pairs
from tests.proofs.ulp import Tally, floats_of, measure, round_once, state_exact, unit_of
from wideload.ops_table import OPS

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
inf, nan = math.inf, math.nan

# ---- units


def test_units_by_hand() -> None:
    x = torch.tensor([0.0, 2.0**-30, 2.0**-14, 1.0, -1.999, 2.0, 65504.0, 1e6], dtype=f64)
    assert unit_of(x, f16).tolist() == [2.0**-24, 2.0**-24, 2.0**-24, 2.0**-10, 2.0**-10, 2.0**-9, 32.0, 32.0]
    x = torch.tensor([2.0**-149, 2.0**-126, 1.0, 3e38, 1e300], dtype=f64)
    assert unit_of(x, f32).tolist() == [2.0**-149, 2.0**-149, 2.0**-23, 2.0**104, 2.0**104]
    assert unit_of(x, bf16).tolist() == [2.0**-133, 2.0**-133, 2.0**-7, 2.0**120, 2.0**120]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2.0**-11, 1.0),  # half way: the even one
        (1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-10),  # through fp32 it would be half way
        (65519.99, 65504.0),
        (65520.0, inf),
        (-1e300, -inf),
        (2.0**-25, 0.0),
        (1.5 * 2.0**-25, 2.0**-24),
        (nan, nan),
    ],
)
def test_one_rounding_to_fp16(value: float, rounded: float) -> None:
    got = float(round_once(torch.tensor([value], dtype=f64), f16))
    assert got == rounded or (math.isnan(got) and math.isnan(rounded))


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_one_rounding_is_that_of_the_emulators_tests(dtype: torch.dtype) -> None:
    x = (torch.rand(50_000, dtype=f64) * 2 - 1) * torch.exp2(torch.randint(-160, 130, (50_000,)).double())
    x = torch.cat([x, floats_of(every_bits("cpu", 2), dtype).double() * (1 + 2.0**-9)])
    got, want = round_once(x, dtype), round_once_in_numpy(x, dtype)
    assert torch.equal(got.nan_to_num(7.0, inf, -inf), want.nan_to_num(7.0, inf, -inf))
    assert torch.equal(got.signbit(), want.signbit())


def tally(got: list[float], want: list[float], bound: float = 1, dtype: torch.dtype = f32, **options: Any) -> Tally:
    inputs = torch.arange(len(got), dtype=f32)
    return measure(torch.tensor(got, dtype=dtype), state_exact(torch.tensor(want, dtype=f64), dtype), bound, (inputs,), **options)


def test_errors_by_hand() -> None:
    largest = (2 - 2.0**-23) * 2.0**127
    assert tally([1 + 2.0**-23], [1.0]).largest == 1
    assert tally([1 - 2.0**-24], [1.0]).largest == 0.5  # numbers are twice as near below a power of two
    assert tally([1.0], [1 + 2.0**-24]).largest == 0  # the exact value is rounded first
    assert tally([5 * 2.0**-149], [2.0**-148]).largest == 3
    assert tally([inf], [largest]).largest == 1
    assert tally([-largest], [-1e300]).largest == 1
    assert tally([1 + 2.0**-6], [1.0], dtype=bf16).largest == 2
    assert tally([65504.0], [inf], dtype=f16).largest == 1
    assert tally([nan, inf, -inf], [nan, inf, -inf]) == Tally(3)


def test_what_is_wrong_is_counted_by_kind() -> None:
    got = [1.0, nan, 2.0, inf, 0.0, 1.0 + 2.0**-22, -0.0, 0.0]
    want = [1.0, 1.0, nan, 1e38, 2.0**-140, 1.0, 0.0, -0.0]
    found = tally(got, want)
    assert (found.count, found.above, found.nan, found.inf, found.subnormal, found.zero) == (8, 5, 2, 1, 1, 2)
    assert found.largest == inf
    assert floats_of(torch.tensor(found.at), f32).item() in (1.0, 2.0)  # the inputs of the NaN
    assert tally(got, want, any_zero=True).zero == 0
    found = tally([0.0, 1.0 + 2.0**-22], [2.0**-140, 1.0], bound=1)
    assert (found.largest, found.at, found.got, found.want) == (512, (0,), 0.0, 2.0**-140)  # 2^-140 is 2^9 subnormals


def test_underflow_keeps_its_sign() -> None:
    assert tally([0.0], [-1e-60]).zero == 1
    assert tally([-0.0], [-1e-60]).zero == 0


def test_results_that_are_no_floats_are_right_or_off() -> None:
    exact = state_exact(torch.tensor([True, False, True]), torch.bool)
    found = measure(torch.tensor([True, True, False]), exact, 0, (torch.tensor([0.0, 1.0, 2.0]),))
    assert (found.largest, found.above, found.at) == (1, 2, (0x3F800000,))


def test_terms_that_cancel_have_their_own_unit() -> None:
    scale = torch.tensor([4.0], dtype=f64)
    exact = state_exact(torch.tensor([2.0**-20], dtype=f64), f32, scale)
    assert measure(torch.tensor([2.0**-20 + 2.0**-21]), exact, 1, (torch.ones(1),)).largest == 1  # 2^-21 is the unit of 4


def test_tallies_add_up() -> None:
    a, b = Tally(10, 2.0, (1,), 1.0, 2.0, above=1, zero=2), Tally(5, 3.0, (7,), 4.0, 5.0, above=3, nan=1, differs=2)
    assert a + b == b + a == Tally(15, 3.0, (7,), 4.0, 5.0, above=4, nan=1, zero=2, differs=2)


# ---- rows and inputs


def test_every_row_of_one_real_operand_is_tried() -> None:
    names = {row.op.name for row in UNARY}
    unary = {op.name for op in OPS.values() if len(op.operands) == 1 and "float" in op.cuda and "shape" not in op.types}
    assert names >= unary - {"gelu_slope", "gelu_tanh_slope"}
    assert names >= {"clamp", "celu", "pow_number", "polygamma", "bessel_j0"}
    assert {row.op.name for row in PAIRS} >= {"add", "div_floor", "pow", "atan2", "hypot", "nextafter", "logaddexp", "zeta", "eq"}


def test_all_bit_patterns_are_reached() -> None:
    patterns = torch.cat([all_bits("cpu", first, 1 << 10, 1 << 20) for first in range(0, 1 << 12, 1 << 10)])
    assert len(patterns.unique()) == 1 << 12
    assert set((patterns >> 20).tolist()) == set(range(-(1 << 11), 1 << 11))  # every sign, exponent and the first bits
    assert all_bits("cpu", (1 << 32) - 2, 2, 1).tolist() == [-2, -1]


@pytest.mark.parametrize("row", PAIRS, ids=lambda row: row.name)
def test_pairs_are_so_many_and_the_same_again(row: Any) -> None:
    x, y = make_pairs(row, "cpu", 100_000, 0)
    again = make_pairs(row, "cpu", 100_000, 0)
    assert x.shape == y.shape == (100_000,)
    assert x.dtype == y.dtype == f32
    assert torch.equal(x.view(torch.int32), again[0].view(torch.int32))
    assert torch.equal(y.view(torch.int32), again[1].view(torch.int32))
    assert not torch.equal(x.view(torch.int32), make_pairs(row, "cpu", 100_000, 1)[0].view(torch.int32))


def test_pairs_hold_what_goes_wrong() -> None:
    (row,) = (row for row in PAIRS if row.name == "div_floor")
    x, y = make_pairs(row, "cpu", 200_000, 0)
    for a in (0.0, -0.0, 1.0, inf, -inf, 2.0**-149):
        for b in (0.0, -0.0, 3.0, inf, 3.4028234663852886e38):
            assert ((x == a) & (x.signbit() == (math.copysign(1, a) < 0)) & (y == b) & (y.signbit() == (math.copysign(1, b) < 0))).any()
    quotient = x.double() / y.double()
    assert (((quotient * 2).round() == quotient * 2) & (quotient.abs() < 1e4) & (quotient != 0)).sum() > 1000  # whole and half
    assert (quotient.abs() > 1e40).sum() > 1000
    assert (x.isnan() & ~y.isnan()).any()


# ---- multiple precision


def test_functions_in_multiple_precision() -> None:
    assert precise.compute("exp", 1.0) == math.e
    assert precise.compute("lgamma", -3.0) is None  # a pole
    assert math.isnan(precise.compute("log", -1.0) or 0)  # complex
    assert precise.compute("sin", 2.0**120) == pytest.approx(math.sin(2.0**120), rel=1e-15)  # the C library's reduction is exact
    assert precise.compute_many("tanh", [0.5, -1e-30, 3e38]) == [math.tanh(0.5), -1e-30, 1.0]


@pytest.mark.parametrize("name", precise.FUNCTIONS)
def test_multiple_precision_agrees_with_torch(name: str) -> None:
    """A formula that is off by more than torch's fp64 is a wrong formula."""
    (row,) = (row for row in UNARY if row.name == name)
    x = torch.tensor([-7.3, -1.75, -0.3, 0.2, 0.4999, 0.75, 1.25, 3.7, 12.5], dtype=f32)
    for value, want in zip(x.tolist(), row.exact(x).tolist(), strict=True):
        got = precise.compute(name, value)
        if got is None:
            assert not math.isfinite(want), value
            continue
        assert got == pytest.approx(want, rel=1e-6 if row.needs_precision else 1e-13, abs=1e-300, nan_ok=True), value


def test_zeta_of_negative_halves_is_of_what_does_not_cancel() -> None:
    """Of 149 and -1.5 the terms 1.5 and 0.5 to the power of -149 cancel, and 2.5 to it is left; by multiple precision."""
    (row,) = (row for row in PAIRS if row.name == "zeta")
    pairs = (149.0, -1.5), (3.0, -2.5), (5.0, -0.5), (4.0, -2.5), (3.0, -2.25)
    with mpmath.workprec(400):
        want = [float(sum(mpmath.mpf(q + k) ** -s for k in range(8)) + mpmath.zeta(s, q + 8)) for s, q in pairs]
    assert row.exact(*torch.tensor(pairs).unbind(1)).tolist() == pytest.approx(want, rel=1e-14)


def test_rows_with_a_bound_can_be_looked_at_in_multiple_precision() -> None:
    without = {row.name for row in UNARY if any(row.op.ulp)} - set(precise.FUNCTIONS)
    assert without == {"huber", "smooth_l1", *(row.name for row in UNARY if row.op.name == "pow_number")}  # sums and products: fp64 does


# ---- the contract


def record(**changes: Any) -> Record:
    found = Record("exp", "f32", "fused", 1, "fp64", 2.0, 2, Tally(100, 1.0, (0x3F800000,), 2.0, 2.5), 1.0, (0x40000000,), 1e-9, 0.5)
    return replace(found, **changes)


GPU = Settings("cuda")


def test_what_breaks_the_contract() -> None:
    assert record().faults(GPU) == []
    assert "3 of 100" in record(tally=Tally(100, 4.0, (1,), above=3)).faults(GPU)[0]
    assert "other sign" in record(tally=Tally(100, zero=1)).faults(GPU)[0]
    assert "not eager's" in record(bound=None, tally=Tally(100, 900.0, (1,), differs=2)).faults(GPU)[0]
    assert record(bound=None, tally=Tally(100, 900.0, (1,))).faults(GPU) == []
    assert record(bound=None, tally=Tally(100, differs=2)).faults(Settings("emulator")) == []


def test_a_bound_is_no_looser_than_nvidias_or_eagers() -> None:
    assert "loose" in record(bound=4.0, documented=2, eager=2.0).faults(GPU)[0]
    assert record(bound=4.0, documented=4, eager=0.0).faults(GPU) == []
    assert record(bound=4.0, documented=None, eager=3.0).faults(GPU) == []
    assert record(bound=4.0, documented=None, eager=inf).faults(GPU) == []
    assert record(bound=4.0, documented=2, eager=2.0).faults(replace(GPU, stride=3)) == []  # eager's largest may lie between
    assert record(bound=4.0, documented=2, eager=2.0).faults(Settings("cpu")) == []


# ---- the report

RECORDS = [
    record(op="div", num_tensors=2, bound=0.0, tally=Tally(50), eager=0.0, eager_at=()),
    record(),
    record(mode="eager"),
    record(
        op="log",
        dtype="bf16",
        bound=1.0,
        documented=None,
        tally=Tally(65536, inf, (0x4049,), nan, 1.0, above=1, nan=1),
        eager=None,
        eager_at=(),
    ),
    record(op="silu", mode="eager", bound=None, tally=Tally(9, 7.5e7, (0xC2B00000,), inf, -inf), eager=7.5e7),
]
ABOUT = {"device": "cuda", "on": "NVIDIA H200", "torch": "2.11.0", "stride": 1, "pairs": 10, "points": 10}


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    write_report(path, ABOUT, RECORDS)
    about, records = read_report(path)
    assert about == ABOUT
    assert str(records) == str(RECORDS)  # NaN is no equal of itself
    text = path.read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["records"][1]["at"] == ["0x3f800000"]
    assert json.loads(text)["records"][1]["values"] == ["1"]


def test_the_table_of_the_documents(tmp_path: Path) -> None:
    path = tmp_path / "cuda.json"
    write_report(path, ABOUT, RECORDS)
    lines = render_report(path).splitlines()
    assert lines[0].startswith("On NVIDIA H200 with torch 2.11.0: 65,795 results")
    assert lines[2] == "Every result correctly rounded: `div`."
    assert not any("bits of eager torch" in line for line in lines)  # all of whose they have
    write_report(path, ABOUT, [*RECORDS, record(op="polygamma(1)", mode="eager", tally=Tally(9, 1.0, (1,), differs=3))])
    assert "bits of eager torch, but those of `polygamma`: " in render_report(path)
    assert lines[-3:] == [
        "| `exp` | f32 | fused, eager | 2 | 1 | 1 (`0x3f800000`) | 1 | fp64 |",
        "| `log` | bf16 | fused | 1 | NaN | 3.140625 (`0x4049`) |  | fp64 |",
        "| `silu` | f32 | eager | eager's bits | 7.5e+07 | -88 (`0xc2b00000`) | 7.5e+07 | fp64 |",
    ]


def test_the_summary_names_what_is_wrong() -> None:
    text = summarize(RECORDS, GPU)
    assert text.splitlines()[0] == "4 of 5 (row, dtype, mode) within the contract"
    assert "log bf16 fused: 1 of 65536 results are more than 1 ulp off; largest NaN ulp at 3.140625 (0x4049)" in text


def test_the_record_breaks_nothing() -> None:
    if not RESULT.exists():
        pytest.skip("the proof has not been run on a GPU")
    about, records = read_report(RESULT)
    assert (about["device"], about["stride"]) == ("cuda", 1)
    assert {row.name for row in (*UNARY, *PAIRS)} == {record.op for record in records}
    assert {record.key: record.faults(GPU) for record in records if record.faults(GPU)} == {}


# ---- the command

STRIDE = "655211"  # a prime; 6,556 inputs


def test_the_command_passes_what_is_right(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert main(["--device", "cpu", "--only", "tan", "--stride", STRIDE, "--json", str(path)]) == WITHIN
    about, records = read_report(path)
    assert (about["device"], about["stride"]) == ("cpu", int(STRIDE))
    assert [(r.dtype, r.mode) for r in records] == [(dtype, mode) for dtype in ("f32", "bf16", "f16") for mode in ("fused", "eager")]
    assert [r.tally.count for r in records] == [6556 + 16] * 2 + [65536] * 4
    assert all(r.fp64_off is not None and r.fp64_off < 1e-6 for r in records if r.tally.at)


def test_kernels_are_tried_by_the_emulator(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["--device", "emulator", "--stride", STRIDE, "--pairs", "20000", "--dtypes", "f32", "--json", str(path)]
    for only in ("exp", "hypot", "div", "sqrt"):
        assert main([*arguments, "--only", only, "--resume", str(path)]) == WITHIN
    assert [(r.op, r.mode) for r in read_report(path)[1]] == [
        *((op, mode) for op in ("div", "exp") for mode in ("fused", "eager", "fast_math")),
        *(("hypot", mode) for mode in ("fused", "eager")),
        *(("sqrt", mode) for mode in ("fused", "eager", "fast_math")),
    ]


PLANTED = "::log({input}) * ({input} > 3.0f && {input} < 3.25f ? 1.0f + 2 * 1.1920929e-7f : 1.0f)"
"""Two units off between 3 and 3.25."""


def test_a_planted_fault_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    op, path = OPS["log"], tmp_path / "run.json"
    arguments = ["--device", "emulator", "--only", "log", "--dtypes", "f32", "--stride", "65521", "--json", str(path)]
    right = op.cuda
    object.__setattr__(op, "cuda", {**right, "float": PLANTED})
    try:
        assert main(arguments) == WRONG
    finally:
        object.__setattr__(op, "cuda", right)
    assert "results are more than 1 ulp off" in capsys.readouterr().out
    found = read_report(path)[1][0]
    assert found.tally.largest >= 2
    assert 3 < float(floats_of(torch.tensor(found.tally.at), f32)) < 3.25
    assert found.tally.above <= 32  # 2^21 inputs lie there
    assert main(arguments) == WITHIN


def test_a_crash_is_no_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def crash(*_: Any) -> None:
        raise ValueError("planted")

    monkeypatch.setattr("tests.proofs.__main__.check", crash)
    assert main(["--device", "cpu", "--only", "tan", "--dtypes", "f16"]) == WRONG
    assert "crashed: ValueError: planted" in capsys.readouterr().out


def test_the_emulator_takes_one_job() -> None:
    with pytest.raises(SystemExit):
        main(["--device", "emulator", "--only", "neg", "--jobs", "2"])


def test_a_run_that_tries_nothing_is_no_pass() -> None:
    assert main(["--device", "cpu", "--only", "no such op"]) == WRONG


def test_a_run_stops_in_time_and_is_taken_up_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--only", "sin", "--jobs", "2", "--stride", STRIDE, "--json", str(path), "--resume", str(path)]
    assert main([*arguments, "--dtypes", "f32"]) == WITHIN
    first = read_report(path)[1]
    assert main([*arguments, "--seconds", "0"]) == UNFINISHED
    assert str(read_report(path)[1]) == str(first)
    capsys.readouterr()
    assert main(arguments) == WITHIN
    assert "f32" not in capsys.readouterr().out
    assert [r.dtype for r in read_report(path)[1]] == ["f32", "f32", "bf16", "bf16", "f16", "f16"]
    assert str(read_report(path)[1][:2]) == str(first)
    with pytest.raises(SystemExit):
        main([*arguments, "--stride", "3"])  # of another run


def test_a_run_stops_between_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(10_000))
    monkeypatch.setattr("tests.proofs.__main__.time.monotonic", lambda: next(seconds))
    path = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--only", "neg", "--dtypes", "f32", "--stride", STRIDE, "--chunk", "100", "--json", str(path)]
    assert main([*arguments, "--seconds", "20"]) == UNFINISHED
    assert not path.exists()
