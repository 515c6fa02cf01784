"""The benchmark of dense kernels without its GPU: what passes, what is counted, what is written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import dense
from benchmarks.dense import CASES, Case, Row, count_steps, format_table, random_inputs
from wideload.errors import DeviceError
from wideload.measure.wall import Ceiling, Mix

ADD = Case("x + b", lambda x, b: x + b, torch.bfloat16, 2)


def row(wideload_us: float, *, eager: float = 100.0, compiled: float = 100.0, steps: int = 0) -> Row:
    """600 bytes, which the wall moves in 100 us."""
    ceiling = Ceiling(Mix(2, 1), 600, 100.0, "direct 1x256", (100.0,), {"direct 1x256": 100.0})
    return Row("x + b", 400, 200, ceiling, wideload_us, {"eager": eager, "compile": compiled}, {}, {}, steps, 0)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (row(100.0), "PASS"),
        (row(102.0, eager=102.0, compiled=101.0), "PASS"),  # 0.980 of the wall, 0.99 % behind
        (row(102.1, eager=103.0, compiled=103.0), "short: 0.979 of the wall"),
        (row(101.5, eager=100.0, compiled=101.5), "short: 1.5% behind eager"),
        (row(110.0, eager=100.0, compiled=100.0), "short: 0.909 of the wall, 10.0% behind eager, 10.0% behind compile"),
        (row(99.1), "PASS"),
        (row(98.9), "FAULT of the measurement: 1.011 of the wall"),
        (row(100.0, steps=1), "WRONG: 1 steps off, allowed are 0"),
        (row(90.0, steps=7), "WRONG: 7 steps off, allowed are 0"),  # being wrong comes before being fast
    ],
)
def test_verdicts(result: Row, verdict: str) -> None:
    assert result.verdict == verdict
    assert verdict in format_table([result])


def test_the_wall_is_scaled_to_the_bytes_of_the_case() -> None:
    half = dataclasses.replace(row(50.0), nbytes_read=200, nbytes_written=100)
    assert half.ratio == 1.0
    assert format_table([half]).splitlines()[1].split()[4:6] == ["50.0", "50.0"]  # the wall's time, then wideload's


def test_a_peer_that_did_not_run_is_named_with_its_reason() -> None:
    alone = dataclasses.replace(row(100.0), peers_us={"eager": 100.0}, not_run={"compile": "RuntimeError: no Triton"})
    lines = format_table([alone, alone]).splitlines()
    assert "not run" in lines[1]
    assert lines[3:] == ["compile not run: RuntimeError: no Triton"]


def test_steps_are_counted_in_values_of_the_dtype() -> None:
    x = torch.tensor([1.0, -1.0, 0.0, 300.0], dtype=torch.bfloat16)
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
    integers = torch.tensor([-128, 127], dtype=torch.int8)
    assert count_steps(Case("x", lambda x: x, torch.int8, 1), [integers], torch.tensor([-128, 120], dtype=torch.int8)) == 7


def test_a_rounded_result_is_held_to_the_exact_one() -> None:
    case = dataclasses.replace(ADD, max_steps=1)
    x, b = (torch.tensor([v], dtype=torch.bfloat16) for v in (256.0, 1.0))  # 257 lies between bf16's 256 and 258
    assert count_steps(case, [x, b], torch.tensor([256.0], dtype=torch.bfloat16)) == 0
    assert count_steps(case, [x, b], torch.tensor([258.0], dtype=torch.bfloat16)) == 1


def test_later_chunks_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "CHECK_CHUNK", 8)
    x = torch.arange(20, dtype=torch.bfloat16)
    wrong = x.clone()
    wrong[17] = 0
    assert count_steps(ADD, [x, torch.zeros_like(x)], x.clone()) == 0
    assert count_steps(ADD, [x, torch.zeros_like(x)], wrong) > 0


def test_inputs_are_random_and_use_the_whole_range() -> None:
    for case in CASES:
        for tensor in random_inputs(case, 10_000, torch.device("cpu")):
            assert tensor.dtype == case.dtype
            assert (tensor == 0).float().mean() < 0.05
            if case.dtype == torch.int8:
                assert (int(tensor.min()), int(tensor.max())) == (-128, 127)


def test_a_run_writes_every_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole of it on the CPU, the clock replaced: each call is made once and takes as many microseconds as its name has letters."""

    def time_cold(calls: Mapping[str, Callable[[], object]], device: int, num_samples: int) -> dict[str, tuple[float, ...]]:
        for call in calls.values():
            call()
        return {name: (float(len(name)),) * num_samples for name in calls}

    launched: list[tuple[Mix, int]] = []

    def prepare_movers(mix: Mix, nbytes: int, device: int) -> tuple[dict[str, Callable[[], object]], int]:
        return {"eight ch": lambda: launched.append((mix, nbytes))}, nbytes

    def compile_peer(case: Case, inputs: Any) -> str:
        return "RuntimeError: no compiler here"

    real_inputs = random_inputs
    for name, fake in {
        "time_cold": time_cold,
        "prepare_movers": prepare_movers,
        "compile_peer": compile_peer,
        "cuda_index": lambda: 0,
        "random_inputs": lambda case, n, device: real_inputs(case, n, torch.device("cpu")),
    }.items():
        monkeypatch.setattr(dense, name, fake)
    environment = dense.read_environment(torch.device("cpu"))
    monkeypatch.setattr(dense, "read_environment", lambda device: dataclasses.replace(environment, commit=None))
    monkeypatch.setenv("WIDELOAD_COMMIT", "abc123")
    path = tmp_path / "dense.json"
    assert dense.main(["--elements", "1000", "--samples", "3", "--json", str(path)]) == 1  # wideload (8) against eager (5)

    written = json.loads(path.read_text())
    assert written["environment"]["commit"] == "abc123"
    assert written["arguments"] == {"elements": 1000, "samples": 3, "seed": 0}
    assert [r["case"] for r in written["rows"]] == [case.label for case in CASES]
    assert [(r["nbytes_read"], r["nbytes_written"]) for r in written["rows"]] == [
        (4000, 2000),
        (6000, 2000),
        (8000, 4000),
        (4000, 4000),
        (1000, 1000),
        (1000, 1000),
    ]
    assert [mix.name for mix, _ in launched] == ["2R1W", "3R1W", "2R1W", "1R1W", "1R1W", "1R1W"]
    assert [nbytes for _, nbytes in launched] == [6000, 8000, 12000, 8000, 2000, 2000]
    for r in written["rows"]:
        assert r["samples_us"] == {"wideload": [8.0] * 3, "eager": [5.0] * 3, "eight ch": [8.0] * 3}
        assert r["ratio"] == 1.0
        assert r["steps"] <= r["max_steps"]
        assert r["verdict"] == "short: 60.0% behind eager"
        assert r["not_run"] == {"compile": "RuntimeError: no compiler here"}
    assert capsys.readouterr().out.splitlines()[-1] == "compile not run: RuntimeError: no compiler here"


def test_a_case_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_case(case: Case, *arguments: object) -> Row:
        if case.dtype == torch.float32:
            raise RuntimeError("out of memory")
        return row(100.0)

    monkeypatch.setattr(dense, "run_case", run_case)
    monkeypatch.setattr(dense, "cuda_index", lambda: 0)
    environment = dense.read_environment(torch.device("cpu"))
    monkeypatch.setattr(dense, "read_environment", lambda device: environment)
    assert dense.main(["--elements", "8"]) == 1
    printed = capsys.readouterr()
    assert printed.out.count("PASS") == 4
    assert printed.out.count("FAILED") == 2
    assert "out of memory" in printed.err


def test_without_a_gpu_the_status_is_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cuda_index() -> int:
        raise DeviceError("no GPU")

    monkeypatch.setattr(dense, "cuda_index", cuda_index)
    assert dense.main([]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_a_compiler_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(fn: object, dynamic: bool) -> object:
        raise RuntimeError("Cannot find a working triton installation\nmore text")

    monkeypatch.setattr(torch, "compile", no_compiler)
    assert dense.compile_peer(ADD, []) == "RuntimeError: Cannot find a working triton installation"


def test_a_compiled_peer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = random_inputs(ADD, 100, torch.device("cpu"))
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: lambda x, b: x)
    assert str(dense.compile_peer(ADD, inputs)).startswith("wrong: ")
    monkeypatch.setattr(torch, "compile", lambda fn, dynamic: fn)
    assert dense.compile_peer(ADD, inputs) is ADD.fn
