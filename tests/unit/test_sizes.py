"""The sweep over sizes without its GPU: which sizes, what is counted, what passes, what is written and drawn."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch

import sizes
import table
import wideload as wl
from sizes import FUNCTIONS, Point, find_findings, find_sizes, is_compiled, moved_bytes
from table import Draw
from wideload.measure import unique_bytes
from wideload.measure.environment import read_environment
from wideload.measure.timing import Call

CPU = torch.device("cpu")


def point(wideload_us: float, n: int = 1000, *, steps: int = 0, eager_us: float = 100.0) -> Point:
    """Eager's op moves as many bytes."""
    samples = {"wideload": (wideload_us,) * 3, "eager": (eager_us, eager_us, 5000.0)}
    return Point("x + b", n, {"wideload": 6 * n, "eager": 6 * n}, samples, steps, 0)


def test_sizes_are_spread_by_their_logarithms_and_half_of_them_are_odd() -> None:
    found = find_sizes(100)
    assert (found[0], found[-1], len(set(found))) == (1 << 10, (1 << 24) + 1, 100)
    assert all(1.09 < b / a < 1.12 for a, b in itertools.pairwise(found))  # 2^(14 / 99) = 1.103
    assert sum(n % 2 for n in found) >= 50
    assert [n for n in found if is_compiled(n, found)] == [
        min(found, key=lambda n: abs(n - size) / size) for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24)
    ]
    assert doctest.testmod(sizes).failed == 0


def test_verdicts() -> None:
    assert point(105.0).verdict == "PASS"
    assert point(105.1).verdict == "short: 1.051 times eager's time"
    assert point(50.0, steps=1).verdict == "WRONG: 1 steps off, allowed are 0"


def test_times_are_compared_byte_for_byte() -> None:
    """Twice the bytes in twice the time are level."""
    assert dataclasses.replace(point(200.0), nbytes={"wideload": 12, "eager": 6}).times_of("eager") == 1.0
    assert dataclasses.replace(point(200.0), nbytes={"wideload": 6, "eager": 12}).times_of("eager") == 4.0


def test_the_worst_point_and_every_short_one_are_named() -> None:
    lines = [str(line).split() for line in find_findings([point(50.0), point(200.0, 7)])]
    assert " ".join(lines[0]) == "x + b 2 sizes, mean 1.000, worst 2.000 at n = 7 1.05 of eager's time short"
    assert " ".join(lines[1]) == "n = 7 short: 2.000 times eager's time short"
    assert [line.is_kept for line in find_findings([point(50.0)])] == [True]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
@pytest.mark.parametrize("n", [1024, 1025, 4097])
def test_eager_moves_the_same_bytes(function: sizes.Function, n: int) -> None:
    draw = Draw(CPU)
    for operation in (function, function.eager, *function.shown):
        (args,) = sizes.draw_copies(draw, operation.shapes(n), 1)
        assert moved_bytes(operation, n) == unique_bytes(args) + unique_bytes([operation.fn(*args)])
        assert abs(moved_bytes(operation, n) - moved_bytes(function, n)) <= 6  # 4/3 of n, rounded
    num_operands = len(function.shapes(n)) + 1
    assert abs(moved_bytes(function, n) / (2 * num_operands) - n) <= 3 * n**0.5  # of squares, their sides are whole numbers


def test_copies_lie_apart_and_are_aligned() -> None:
    copies = sizes.draw_copies(Draw(CPU), [(31, 31), (1000,)], 3)
    addresses = [[tensor.data_ptr() for tensor in copy] for copy in copies]
    assert [[b - a for a, b in zip(*pair, strict=True)] for pair in itertools.pairwise(addresses)] == [[2048, 2048]] * 2
    assert not any(address % 16 for copy in addresses for address in copy)
    assert len({tuple(copy[0].flatten().tolist()) for copy in copies}) == 3


class CountingTimer:
    """Runs every call and takes wideload for as slow as it is told."""

    l2_bytes, bytes_per_us = 1 << 12, 1e6

    def __init__(self, wideload_us: Sequence[float] = (1.0,)) -> None:
        self._wideload_us, self.asked = iter(wideload_us), list[tuple[list[str], int, int, int]]()

    def sample(self, calls: Mapping[str, Sequence[Call]], num_calls: int, num_samples: int) -> dict[str, tuple[float, ...]]:
        for copies in calls.values():
            for call in copies:
                call()
        self.asked.append((list(calls), len(calls["eager"]), num_calls, num_samples))
        mine = next(self._wideload_us, 1.0)
        return {name: (mine if name == "wideload" else 1.0,) * num_samples for name in calls}


def test_a_point_above_the_limit_is_timed_again_with_more_samples() -> None:
    fused = wl.fuse(FUNCTIONS[0].fn)
    timer = CountingTimer([1.06, 1.04])
    assert sizes.time_point(FUNCTIONS[0], fused, 1000, timer, Draw(CPU), 5, compiled=False).verdict == "PASS"  # type: ignore[arg-type]
    assert [asked[3] for asked in timer.asked] == [5, 20]
    timer = CountingTimer([1.06, 1.06])
    assert sizes.time_point(FUNCTIONS[0], fused, 1000, timer, Draw(CPU), 5, compiled=False).verdict.startswith("short")  # type: ignore[arg-type]
    assert timer.asked[0] == (["wideload", "eager"], 4, 336, 5)  # 5 * 4096 / 6000; 500 us of 1.506 us


def test_a_wrong_result_is_found() -> None:
    made = sizes.time_point(FUNCTIONS[0], lambda x, b: x + b + 1, 100, CountingTimer(), Draw(CPU), 1, compiled=False)  # type: ignore[arg-type]
    assert made.verdict.startswith("WRONG")


def test_a_run_writes_and_draws_every_point(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sizes, "find_device", lambda: CPU)
    monkeypatch.setattr(sizes, "Timer", lambda device: CountingTimer())
    monkeypatch.setattr(sizes, "MOST_LOG2", 12)
    monkeypatch.setattr(table, "read_environment", lambda device: dataclasses.replace(read_environment(CPU), commit="abc"))
    to, png = tmp_path / "sizes.json", tmp_path / "sizes.png"
    assert sizes.main(["--points", "3", "--samples", "2", "--no-compile", "--json", str(to), "--png", str(png)]) == 0
    written = json.loads(to.read_text())
    assert [(row["function"], row["elements"]) for row in written["rows"]] == [
        (function.name, n) for function in FUNCTIONS for n in (1024, 2049, 4096)
    ]
    assert written["rows"][-1]["samples_us"] == {name: [1.0, 1.0] for name in ("wideload", "eager", "clone")}
    assert (written["failed"], written["environment"]["commit"]) == ({}, "abc")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("PASS") == 3


def test_a_point_that_fails_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def time_point(function: sizes.Function, fused: object, n: int, *others: object) -> Point:
        if n == 1024:
            raise RuntimeError("out of memory")
        return point(1.0, n)

    monkeypatch.setattr(sizes, "find_device", lambda: CPU)
    monkeypatch.setattr(sizes, "Timer", lambda device: CountingTimer())
    monkeypatch.setattr(sizes, "time_point", time_point)
    assert sizes.main(["--points", "2", "--only", "x + b"]) == 1
    printed = capsys.readouterr()
    assert "x + b, n = 1024  FAILED: RuntimeError: out of memory" in printed.out
    assert "out of memory" in printed.err
