"""What bench reports on a CPU: honest contenders, liars of each kind that can show there, bytes, labels and the record itself."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from wideload.errors import DeviceError, LayoutError, WideloadError
from wideload.judge import judge
from wideload.measure import BenchResult, bench, random_tensor
from wideload.measure.labels import Label
from wideload.measure.session import Progress
from wideload.measure.sweep import compare_sweeps

QUICK: dict[str, Any] = {"max_samples": 6, "warm_up_seconds": 0.0}

axpy = wl.fuse(lambda x, y: x * 2 + y, name="axpy")


@pytest.fixture
def x() -> torch.Tensor:
    return random_tensor((64, 32), seed=1)


@pytest.fixture
def y() -> torch.Tensor:
    return random_tensor((32,), seed=2)


def codes(result: BenchResult, name: str) -> list[str]:
    return [label.code for label in result[name].labels]


def median(result: BenchResult, name: str) -> float | None:
    time_us = result[name].time_us
    return None if time_us is None else time_us.median


# ---- wrong contenders


def half_done(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, math.nan)
    out[:32] = x[:32] * 2 + y
    return out


def off_by_a_little(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x * 2 + y * 1.001


WRONG: list[Callable[..., Any]] = [
    half_done,
    off_by_a_little,
    lambda x, y: x * 2,
    lambda x, y: torch.zeros_like(x),
    lambda x, y: (x * 2 + y).half(),
    lambda x, y: (x * 2 + y).t(),
    lambda x, y: (x * 2 + y, x),
    lambda x, y: None,
    lambda x, y: x,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_contender_gets_no_time(x: torch.Tensor, y: torch.Tensor, wrong: Callable[..., Any]) -> None:
    result = bench(axpy, x, y, against={"wrong": wrong, "right": lambda x, y: x * 2 + y}, **QUICK)
    assert codes(result, "wrong") == ["WRONG"]
    assert median(result, "wrong") is None
    assert result.to_dict()["against"]["wrong"]["time_us"] is None
    assert codes(result, "right") == []
    assert median(result, "right")
    assert result.checked_against == "axpy.reference"
    assert "WRONG" in str(result)


def test_without_a_definition_the_first_rival_is_the_reference(x: torch.Tensor) -> None:
    result = bench(lambda x: x * 2, x, name="it", against={"first": lambda x: x * 3, "second": lambda x: x * 3}, **QUICK)
    assert result.checked_against == "first"
    assert [codes(result, name) for name in ("it", "first", "second")] == [["WRONG"], [], []]


def test_check_is_the_reference_where_given(x: torch.Tensor) -> None:
    result = bench(lambda x: x * 2, x, name="it", against={"first": lambda x: x * 3}, check=lambda x: x + x, **QUICK)
    assert [codes(result, name) for name in ("it", "first")] == [[], ["WRONG"]]


def test_tolerance_can_be_given(x: torch.Tensor) -> None:
    near = {"near": lambda x: x * 2.002}
    assert codes(bench(lambda x: x * 2, x, name="it", check=lambda x: x * 2, against=near, **QUICK), "near") == ["WRONG"]
    assert codes(bench(lambda x: x * 2, x, name="it", check=lambda x: x * 2, against=near, rtol=0.01, **QUICK), "near") == []


def test_a_lone_callable_is_unchecked(x: torch.Tensor) -> None:
    result = bench(torch.neg, x, **QUICK)
    assert codes(result, "neg") == ["UNCHECKED"]
    assert result.checked_against is None
    assert median(result, "neg")


def test_random_results_are_not_compared_when_asked(x: torch.Tensor) -> None:
    drop = torch.nn.functional.dropout
    result = bench(drop, x, 0.5, check=False, against={"again": lambda x, p: drop(x, p)}, **QUICK)
    assert codes(result, "dropout") == ["UNCHECKED"]
    assert result["again"].is_ranked


def test_a_rival_that_raises_is_reported_and_the_subject_raises(x: torch.Tensor) -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no kernel for this")

    result = bench(torch.neg, x, against={"right": lambda x: -x, "broken": broken}, **QUICK)
    assert str(result["broken"].labels[0]) == "FAILED: ValueError: no kernel for this"
    with pytest.raises(ValueError, match="no kernel"):
        bench(broken, x, **QUICK)


def test_a_reference_that_raises_is_none(x: torch.Tensor) -> None:
    result = bench(lambda x: x * 2, x, name="it", against={"first": lambda x: x.no_such_method(), "second": lambda x: x + x}, **QUICK)
    assert result.checked_against is None
    assert [codes(result, name) for name in ("it", "first", "second")] == [["UNCHECKED"], ["FAILED"], ["UNCHECKED"]]
    with pytest.raises(AttributeError):
        bench(torch.neg, x, check=lambda x: x.no_such_method(), **QUICK)


# ---- liars


def test_a_cached_result_is_not_timed(x: torch.Tensor, y: torch.Tensor) -> None:
    known: dict[Any, torch.Tensor] = {}

    def by_version(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return known.setdefault((x.data_ptr(), x._version), x * 2 + y)

    def by_address(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return known.setdefault(x.data_ptr(), x * 2 + y).clone()

    result = bench(axpy, x, y, against={"by_version": by_version, "by_address": by_address}, **QUICK)
    for name in ("by_version", "by_address"):
        assert codes(result, name) == ["CACHED"]
        assert median(result, name) is None


def test_a_constant_that_is_returned_stays_what_it_was(x: torch.Tensor) -> None:
    table = x * 2
    before = table.clone()
    result = bench(lambda x: table, x, name="it", check=lambda x: x * 2, **QUICK)
    assert "CACHED" in codes(result, "it")
    assert torch.equal(table, before)


def test_a_callable_that_does_nothing_is_labelled(x: torch.Tensor) -> None:
    for idle in (lambda x: x, lambda x: x.t(), lambda x: None):
        result = bench(idle, x, name="idle", **QUICK)
        assert "NO_WORK" in codes(result, "idle")
        assert not result["idle"].is_ranked


def test_mutated_arguments_are_restored_for_each_sample_and_the_callers_are_safe(x: torch.Tensor) -> None:
    before = x.clone()
    seen: list[float] = []

    def double_in_place(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0, 0]))
        return x.mul_(2)

    result = bench(double_in_place, x, against={"new": lambda x: x * 2}, **QUICK)
    assert torch.equal(x, before)
    assert "MUTATES" in codes(result, "double_in_place")
    assert "x, restored" in str(result)
    assert codes(result, "new") == []
    assert set(seen[-8:-2]) == {float(before[0, 0])}, "the six samples, before the two calls of the last check"


def test_what_returns_nothing_is_checked_by_what_it_writes_on_changed_inputs_too(x: torch.Tensor) -> None:
    y = random_tensor((64, 32), seed=3)

    def add_to(y: torch.Tensor, x: torch.Tensor) -> None:
        y.add_(x)

    def add_once(y: torch.Tensor, x: torch.Tensor) -> None:
        y.copy_(kept)

    kept = y + x
    result = bench(add_to, y, x, against={"torch": lambda y, x: y.add_(x), "kept": add_once}, **QUICK)
    assert codes(result, "add_to") == codes(result, "torch") == ["MUTATES"], str(result)
    assert "CACHED" in codes(result, "kept")


def test_what_is_returned_and_what_is_changed_beside_it_are_both_compared(x: torch.Tensor) -> None:
    out = torch.zeros(64, 32)

    def times(factor: float, result: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fn(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            out.copy_(x * factor)
            return result(x)

        return fn

    for result in (lambda x: torch.zeros(1), lambda x: x):  # a new tensor, and an argument that is not changed
        rivals = {"wrong": times(3, result), "idle": lambda x, out, result=result: result(x), "same": times(2, result)}
        found = bench(times(2, result), x, out, name="right", check=times(2, result), against=rivals, **QUICK)
        assert [codes(found, name)[0] for name in ("right", "wrong", "idle", "same")] == ["MUTATES", "WRONG", "WRONG", "MUTATES"]


def test_results_in_a_dataclass_are_compared(x: torch.Tensor) -> None:
    @dataclasses.dataclass
    class Pair:
        first: torch.Tensor
        rest: list[torch.Tensor]

    found = bench(
        lambda x: Pair(x + 1, [x * 2]), x, name="it", against={"wrong": lambda x: Pair(x + 1, [x * 3])}, check=lambda x: [x + 1, x * 2]
    )
    assert [codes(found, name) for name in ("it", "wrong")] == [[], ["WRONG"]]
    numbers = bench(lambda x: float(x.sum()), x, name="it", against={"one": lambda x: 1.0}, **QUICK)
    assert codes(numbers, "it") == ["NO_WORK", "UNCHECKED"]


def test_a_rival_that_serves_from_a_cache_spoils_no_one(x: torch.Tensor) -> None:
    kept: dict[int, torch.Tensor] = {}

    def memo(x: torch.Tensor) -> torch.Tensor:
        return kept.setdefault(x.data_ptr(), x * 2)

    found = bench(lambda x: x * 2, x, name="it", against={"memo": memo}, **QUICK)
    assert codes(found, "it") == ["UNCHECKED"]
    assert "memo, its reference, is not to be trusted" in str(found)
    assert "CACHED" in codes(found, "memo")


def test_a_rival_that_mutates_does_not_spoil_the_others(x: torch.Tensor) -> None:
    result = bench(
        lambda x: x + 1, x, name="it", check=lambda x: x + 1, against={"in_place": lambda x: x.add_(1), "last": lambda x: 1 + x}, **QUICK
    )
    assert [codes(result, name) for name in ("it", "in_place", "last")] == [[], ["MUTATES"], []]


def turn(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Whole rows by whole rows."""
    return x * table


def turn_in_place(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same where both halves of the table's rows are alike, as it counts on."""
    return x.mul_(table[:, :16].repeat(1, 2))


def tables(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return random_tensor((8, 32), seed=seed), random_tensor((8, 16), seed=seed + 1).repeat(1, 2)


def test_what_counts_on_its_arguments_is_checked_again_on_others_that_keep_to_it() -> None:
    rivals = {"in_place": turn_in_place}
    permuted = bench(turn, *tables(0), check=turn, against=rivals, **QUICK)
    assert codes(permuted, "in_place") == ["CACHED", "MUTATES"]
    assert str(permuted["in_place"].labels[0]).endswith(", on changed arguments")
    others = tables(10)
    kept = [tensor.clone() for tensor in others]
    found = bench(turn, *tables(0), check=turn, against=rivals, recheck_on=others, **QUICK)
    assert (codes(found, "turn"), codes(found, "in_place")) == ([], ["MUTATES"])
    assert found["in_place"].is_ranked
    assert all(map(torch.equal, others, kept)), "and the caller's others are only read"


def test_other_arguments_show_what_serves_from_a_cache() -> None:
    known: dict[Any, torch.Tensor] = {}

    def by_version(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return known.setdefault((x.data_ptr(), x._version), x * table)

    def by_address(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return known.setdefault(x.data_ptr(), x * table).clone()

    def by_address_in_place(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x.copy_(known.setdefault((x.data_ptr(),), x * table))

    def twice_as_much(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return x.mul_(2 * table)

    rivals = {fn.__name__: fn for fn in (by_version, by_address, by_address_in_place, twice_as_much)}
    found = bench(turn, *tables(0), check=turn, against=rivals, recheck_on=tables(10), **QUICK)
    assert [codes(found, name)[0] for name in rivals] == ["CACHED"] * 3 + ["WRONG"]
    assert not any(found[name].is_ranked for name in rivals)


def test_other_arguments_that_are_the_same_are_no_second_check() -> None:
    args = tables(0)
    found = bench(turn, *args, check=turn, recheck_on=args, **QUICK)
    assert "checked once" in found["turn"].labels[0].text


def test_other_arguments_of_another_layout_are_refused_before_anything_runs() -> None:
    def runs(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was called")

    with pytest.raises(LayoutError, match=r"recheck_on has x f32\[5\] on cpu; allowed is the layout of x f32\[4\] on cpu"):
        bench(runs, torch.ones(4), recheck_on=[torch.ones(5)])


def test_held_tensors_are_named(x: torch.Tensor, y: torch.Tensor) -> None:
    result = bench(lambda x: x * 2 + y, x, name="it", against={"eager": lambda x: x * 2 + y}, **QUICK)
    assert codes(result, "it") == ["HOLDS_TENSORS"]
    assert "y are no arguments" in str(result)


def test_inputs_that_cannot_change_are_said_to_be_checked_once() -> None:
    result = bench(torch.neg, torch.zeros(8), against={"mul": lambda x: x * -1}, check=lambda x: -x, **QUICK)
    assert "checked once" in result["neg"].labels[0].text


# ---- bytes


def test_minimal_bytes_of_a_fused_function(x: torch.Tensor, y: torch.Tensor) -> None:
    n = 64 * 32
    assert bench(axpy, x, y, **QUICK).minimal_bytes == 4 * (n + 32 + n)
    assert bench(axpy, x.bfloat16(), x, **QUICK).minimal_bytes == 2 * n + 4 * n + 4 * n
    assert bench(axpy, x, x, **QUICK).minimal_bytes == 4 * (n + n), "one operand, given twice, is read once"
    assert bench(axpy, x, y.expand(64, 32), **QUICK).minimal_bytes == 4 * (n + 32 + n)


def test_in_place_reads_and_writes(x: torch.Tensor, y: torch.Tensor) -> None:
    n = 64 * 32
    result = bench(axpy, x, y, out=x, **QUICK)
    assert result.minimal_bytes == 4 * (n + 32 + n)
    assert "MUTATES" in codes(result, "axpy")
    assert bench(axpy, x, y, out=torch.empty_like(x), **QUICK).minimal_bytes == 4 * (n + 32 + n), "out is written, not read"


def test_out_reaches_only_those_that_take_it(x: torch.Tensor, y: torch.Tensor) -> None:
    out = torch.zeros_like(x)
    rivals = {"eager": lambda x, y: x * 2 + y, "add": lambda x, y, out: torch.add(y, x, alpha=2, out=out)}
    result = bench(axpy, x, y, out=out, against=rivals, **QUICK)
    assert [label.text for label in result["add"].labels] == ["it writes out, to the same values each time"]
    assert codes(result, "eager") == []
    assert out.eq(0).all(), "the caller's out is not written"


def test_bytes_of_other_callables_are_what_is_declared(x: torch.Tensor) -> None:
    assert bench(torch.neg, x, **QUICK).minimal_bytes is None
    result = bench(torch.neg, x, bytes=16384, **QUICK)
    assert result.minimal_bytes == 16384
    time_us = median(result, "neg")
    assert time_us
    assert result["neg"].bytes_per_second == pytest.approx(16384 / (time_us * 1e-6))


# ---- the record


def test_a_result_goes_to_json_and_back(x: torch.Tensor, y: torch.Tensor) -> None:
    result = bench(axpy, x[:, 1:-1], y[1:-1], against={"wrong": lambda x, y: x, "eager": lambda x, y: x * 2 + y}, seed=7, **QUICK)
    record = json.loads(result.to_json())
    assert BenchResult.from_json(result.to_json()) == result
    assert record == result.to_dict()
    assert record["schema"] == "wideload.bench/2"
    assert record["seed"] == 7
    assert record["arguments"][0] == {
        "name": "x",
        "dtype": "f32",
        "shape": [64, 30],
        "strides": [32, 1],
        "offset": 1,
        "device": "cpu",
        "value": None,
    }
    times = record["against"]["eager"]["time_us"]
    assert list(times) == ["min", "p5", "p20", "median", "p80", "p95", "n", "samples"]
    assert len(times["samples"]) == times["n"] == 6
    assert all(isinstance(sample, float) for sample in times["samples"])
    assert 0 < times["min"] <= times["p5"] <= times["median"] <= times["p95"]
    assert set(record["gpu_state"]) == {"sm_clock_before_mhz", "sm_clock_after_mhz", "throttle_before", "throttle_after"}


def test_another_schema_is_refused(x: torch.Tensor) -> None:
    record = bench(torch.neg, x, **QUICK).to_dict()
    with pytest.raises(WideloadError, match=r"wideload\.bench/0"):
        BenchResult.from_dict({**record, "schema": "wideload.bench/0"})


def test_it_prints_a_plain_table(x: torch.Tensor, y: torch.Tensor) -> None:
    text = str(bench(axpy, x, y, against={"eager": lambda x, y: x * 2 + y}, **QUICK))
    lines = text.splitlines()
    assert lines[0].split()[:2] == ["median", "us"]
    assert [line.split()[0] for line in lines[1:3]] == ["axpy", "eager"]
    assert "1.00x" in text
    assert "\x1b" not in text
    assert "on x f32[64, 32], y f32[32]" in lines


def test_no_share_above_the_nominal_is_printed(x: torch.Tensor) -> None:
    result = bench(torch.neg, x, bytes=1000, **QUICK)
    fast = dataclasses.replace(result.subject, bytes_per_second=5e12, labels=(Label("SERVED_BY_L2", "5 TB/s"),))
    shown = str(dataclasses.replace(result, subject=fast, nominal_bytes_per_second=4.8e12))
    assert "104" not in shown
    assert " - " in shown.splitlines()[1], "and no rank"
    assert result["neg"] == result.subject
    with pytest.raises(KeyError):
        result["nobody"]
    slow = dataclasses.replace(result.subject, bytes_per_second=4.32e12, labels=())
    assert "90.0%" in str(dataclasses.replace(result, subject=slow, nominal_bytes_per_second=4.8e12))


def test_how_sampling_ended_is_recorded(x: torch.Tensor) -> None:
    assert bench(torch.neg, x, **QUICK)["neg"].stopped in ("max_samples", "precision")
    assert bench(torch.neg, x, max_seconds=0.0, precision=0.0, warm_up_seconds=0.0)["neg"].stopped == "max_seconds"
    assert bench(torch.neg, x, precision=1e9, warm_up_seconds=0.0)["neg"].stopped == "precision"


# ---- refusals and progress


def test_modes_of_the_l2_need_a_gpu(x: torch.Tensor) -> None:
    for mode in ("cold", "hot", "graph"):
        with pytest.raises(DeviceError, match="runs on cpu"):
            bench(torch.neg, x, mode=mode)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="allowed: auto"):
        bench(torch.neg, x, mode="warm")  # type: ignore[arg-type]


NO_NUMBERS = (None, "1", True, -1, math.nan, (1,), torch.ones(()), 1j)


@pytest.mark.parametrize(
    "name", ["precision", "max_samples", "max_seconds", "warm_up_seconds", "seed", "atol", "rtol", "bytes", "same_within", "confidence"]
)
def test_what_is_no_number_is_refused_by_the_name_of_its_argument(x: torch.Tensor, name: str) -> None:
    def call_with(value: Any) -> list[Callable[[], object]]:
        given = {name: value}
        of_verdicts = name in ("same_within", "confidence")
        calls = [lambda: wl.bench(torch.neg, x, **given)] if not of_verdicts else []
        if of_verdicts or name in ("max_seconds", "warm_up_seconds", "atol", "rtol"):
            calls.append(lambda: wl.compare(torch.neg, torch.neg, x, **given))
        empty = BenchResult  # bounds come before results
        if of_verdicts:
            calls.append(lambda: wl.compare_results(empty, empty, **given))  # type: ignore[arg-type]
            calls.append(lambda: compare_sweeps(empty, empty, **given))  # type: ignore[arg-type]
        if name == "max_seconds":
            calls.append(lambda: judge(None, **given))  # type: ignore[arg-type]
        return calls

    values = [value for value in NO_NUMBERS if value is not None or name not in ("rtol", "bytes")]
    values += [0.5] if name in ("max_samples", "seed", "bytes") else [1, 0] if name == "confidence" else []
    for value in values:
        for call in call_with(value):
            with pytest.raises(wl.RangeError, match=rf"^{name}={re.escape(repr(value))}; allowed: "):
                call()


def test_numbers_of_numpy_are_numbers(x: torch.Tensor) -> None:
    result = bench(
        torch.neg, x, max_samples=np.int64(5), precision=np.float32(0), warm_up_seconds=np.float64(0), bytes=np.int32(8), seed=np.int8(3)
    )
    assert BenchResult.from_json(result.to_json()) == result
    assert (result["neg"].time_us.n, result.minimal_bytes) == (5, 8)  # type: ignore[union-attr]


@pytest.mark.parametrize("num_pairs", [None, 0, 2.0, True])
def test_a_number_of_pairs_is_an_integer(x: torch.Tensor, num_pairs: Any) -> None:
    with pytest.raises(wl.RangeError, match=r"num_pairs=.*; allowed: an integer, 1 and more"):
        wl.self_test(torch.neg, x, num_pairs=num_pairs)


@pytest.mark.parametrize("against", [None, torch.neg, {1: torch.neg}, {"neg": None}, ["neg"]])
def test_rivals_are_callables_by_name(x: torch.Tensor, against: Any) -> None:
    with pytest.raises(wl.RangeError, match=r"against=.*; allowed: callables by name"):
        bench(torch.abs, x, against=against)


@pytest.mark.parametrize("names", ["ab", 1, ("a",), ("a", "a"), ("a", 1), ("a", ["b"])])
def test_names_are_two_that_differ(x: torch.Tensor, names: Any) -> None:
    with pytest.raises(wl.RangeError, match=r"names=.*; allowed: two that differ"):
        wl.compare(torch.neg, torch.abs, x, names=names)


def test_two_contenders_of_one_name_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(WideloadError, match="two contenders are called 'neg'"):
        bench(torch.neg, x, against={"neg": torch.neg})


def test_keyword_arguments_reach_every_contender(x: torch.Tensor) -> None:
    result = bench(torch.add, x, other=x, alpha=3, against={"mul": lambda x, other, alpha: x + alpha * other}, **QUICK)
    assert codes(result, "mul") == []
    assert [argument.name for argument in result.arguments] == ["argument 0", "other", "alpha"]


def test_progress_shows_on_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("quick") as progress:
        progress(1, 2)
    monkeypatch.setattr("wideload.measure.session._QUIET_SECONDS", -1.0)
    with Progress("not a terminal") as progress:
        progress(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with Progress("slow work") as progress:
        progress(1, 2)
        assert progress._bar is not None
    captured = capsys.readouterr()
    assert captured.out == ""


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *[("precision", -0.1), ("precision", math.nan), ("max_samples", 0), ("max_seconds", -1.0), ("max_seconds", math.nan)],
        *[("warm_up_seconds", -1.0), ("warm_up_seconds", math.nan), ("bytes", -1), ("rtol", -1e-3), ("rtol", math.nan), ("atol", -1.0)],
        *[("check", True), ("check", "eager"), ("against", {1: torch.neg}), ("recheck_on", torch.ones(1))],
    ],
)
def test_arguments_that_make_no_sense_are_refused_before_anything_runs(argument: str, value: Any) -> None:
    def runs(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it was called")

    with pytest.raises(wl.WideloadError, match=f"^{argument}=.*allowed") as caught:
        bench(runs, torch.ones(4), **{argument: value})
    assert isinstance(caught.value, ValueError)
