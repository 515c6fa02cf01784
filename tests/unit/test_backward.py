"""The benchmark of backward passes without its GPU: what is counted, what is checked, what passes, what is written."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import backward
import table
from backward import Case
from table import Draw
from tests.unit.test_benchmarks import on_meta, simulated
from wideload.measure.wall import Ceiling, Mix

__all__ = ["simulated"]

CPU = torch.device("cpu")
N = backward.ROWS * backward.COLUMNS


def row(wideload_us: float, part: backward.Part = "backward", excess: float = 0.5, **peers_us: float) -> backward.Row:
    """500 bytes, which the wall moves in 100 us; peers take 100 us unless said."""
    ceiling = Ceiling(Mix(3, 2), 500, 100.0, "direct 1x256", (100.0,), {"direct 1x256": 100.0})
    times = {"wideload": wideload_us, "eager": 100.0, "compile": 100.0} | peers_us
    return backward.Row("f", part, (300, 200), ceiling, {name: [us] for name, us in times.items()}, excess, {})


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (row(100.0), "PASS"),
        (row(105.0, eager=104.0, compile=104.0), "PASS"),
        (row(106.0, eager=106.0, compile=106.0), "short: 0.943 of the wall"),
        (row(102.0, eager=102.0), "short: 2.0% behind compile"),
        (row(120.0, eager=120.0, compile=100.0), "short: 0.833 of the wall, 20.0% behind compile"),
        (row(98.0), "FAULT of the measurement: 1.020 of the wall"),
        (row(98.0, "both"), "PASS"),
        (row(90.0, excess=1.5), "WRONG: 1.5 times the difference that is allowed"),
        (row(100.0, excess=float("nan")), "WRONG: nan times the difference that is allowed"),
    ],
)
def test_verdicts(result: backward.Row, verdict: str) -> None:
    assert result.verdict == verdict
    assert verdict in backward.format_table([result])


def test_what_must_move() -> None:
    """bf16 at 8192 x 11008; a bias counts once."""
    bias = 2 * backward.COLUMNS
    wanted = {
        "swiglu": ((6 * N, 4 * N), (10 * N, 6 * N)),
        "packed swiglu": ((6 * N, 4 * N), (10 * N, 6 * N)),
        "bias_gelu, erf": ((4 * N + bias, 2 * N + bias), (6 * N + 2 * bias, 4 * N + bias)),
        "bias_gelu, tanh": ((4 * N + bias, 2 * N + bias), (6 * N + 2 * bias, 4 * N + bias)),
    }
    found: dict[str, Any] = dict.fromkeys(wanted, ())
    for case in backward.CASES:
        args = case.build(on_meta, backward.ROWS)
        found[case.function] += (backward.minimal_bytes(case.part, args, case.fn(*args)),)
    assert found == wanted
    assert backward.AT_THE_WALL == 0.95


def narrow(case: Case, monkeypatch: pytest.MonkeyPatch) -> tuple[list[torch.Tensor], torch.Tensor]:
    monkeypatch.setattr(backward, "COLUMNS", 24)
    draw = Draw(CPU)
    args = [tensor.requires_grad_() for tensor in case.build(draw, 300)]
    return args, draw(300, 24)


@pytest.mark.parametrize("case", backward.CASES[::2], ids=lambda case: case.function)
def test_gradients_are_checked(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    args, grad = narrow(case, monkeypatch)
    exact = backward.gradients(case.fn, [tensor.detach().double().requires_grad_() for tensor in args], grad.double())
    terms = [max(1, grad.numel() // tensor.numel()) for tensor in args]
    assert terms == ([1, 300] if "bias" in case.function else [1] * len(args))
    found = backward.gradients(case.subject, args, grad)
    assert backward.find_excess(found, exact, terms) <= 1
    faults: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda t: t * 1.03, lambda t: t.roll(1), lambda t: t / 0]
    for at in range(len(found)):
        for fault in faults:
            wrong = [fault(tensor) if at == index else tensor for index, tensor in enumerate(found)]
            assert backward.find_excess(wrong, exact, terms) > 1, (at, fault)


@pytest.mark.parametrize("case", backward.CASES[:2], ids=lambda case: case.part)
def test_passes_give_the_gradients_each_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    args, grad = narrow(case, monkeypatch)
    want = backward.gradients(case.fn, args, grad)
    with backward.repeatable_backward():
        call: Any = backward.backward_of(torch.compile(case.fn, dynamic=False, backend="aot_eager"), args, grad)
        for _ in range(2):
            assert all(torch.equal(one, other) for one, other in zip(call(), want, strict=True))
    assert all(tensor.grad is None for tensor in args)


def test_peers_that_are_wrong_or_fail_take_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    case = backward.CASES[0]
    args, grad = narrow(case, monkeypatch)

    def fails(*args: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no Triton")

    peers = {"eager": case.fn, "compile": fails, "other": lambda g, u: case.fn(u, g)}
    not_run = backward.check_peers(peers, args, grad, backward.gradients(case.subject, args, grad))
    assert not_run.pop("compile") == "FAILED: RuntimeError: no Triton"
    assert not_run.pop("other").startswith("WRONG: result 0: ")
    assert not not_run


def test_a_run(
    simulated: list[tuple[Mix, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("time_cold", "prepare_movers", "find_device"):
        monkeypatch.setattr(backward, name, getattr(table, name))
    monkeypatch.setattr(backward, "COLUMNS", 16)
    path = tmp_path / "backward.json"
    assert backward.main(["--rows", "8", "--samples", "2", "--no-compile", "--json", str(path)]) == 1  # wideload (8) against eager (5)
    written = json.loads(path.read_text())
    assert written["failed"] == {}
    assert written["arguments"] == {"rows": 8, "columns": 16, "samples": 2, "seed": 0}
    assert [r["case"] for r in written["rows"]] == [case.name for case in backward.CASES]
    assert [mix.name for mix, _ in simulated] == ["3R2W", "3R2W", "3R2W", "3R2W", "2R1W", "3R2W", "2R1W", "3R2W"]
    assert simulated[0][1] == 10 * 8 * 16
    assert {tuple(r["samples_us"]) for r in written["rows"]} == {("wideload", "eager")}
    assert all(0 < r["excess"] <= 1 and r["verdict"] == "short: 60.0% behind eager" for r in written["rows"])
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(backward.CASES)

    wrong = dataclasses.replace(backward.CASES[0], subject=backward.CASES[0].fn, fn=lambda gate, up: gate * up)
    monkeypatch.setattr(backward, "CASES", (wrong,))
    backward.main(["--rows", "8", "--samples", "2", "--no-compile"])
    printed = capsys.readouterr().out
    assert "WRONG: " in printed
    assert "eager not run: WRONG: result 0: " in printed
