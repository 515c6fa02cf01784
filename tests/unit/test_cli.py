"""The command line: what it prints, and the exit status that scripts go by."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import wideload as wl
from wideload import cli, demo, measure
from wideload.cli import app
from wideload.measure.labels import Label


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"wideload {wl.__version__}\n")


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help")])
def test_help_says_what_there_is(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    wanted = ["demo", "--version"] if len(arguments) == 1 else ["--tokens", "--device", "--json", "Exits with 1"]
    assert all(word in result.stdout for word in wanted)


def test_the_script_is_installed_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from wideload.cli import app; app()", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"wideload {wl.__version__}\n")


def test_demo_prints_tables() -> None:
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in ("SwiGLU", "bias + GELU", "torch eager", *demo.ARCHS, "3 of 3", "H200 SXM", "293.6", "(computed)", "Good:"):
        assert words in result.stdout
    assert "(measured)" not in result.stdout


def test_demo_writes_json() -> None:
    result = run("demo", "--tokens", "8", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["tokens"], report["device"], report["faults"], report["timings"]) == (8, "CPU", [], [])
    assert [kernel["arch"] for kernel in report["kernels"]] == [*demo.ARCHS, *demo.ARCHS]
    assert report["checks"][0]["wideload"]["num_exact"] > 0
    assert {bound["tag"] for bound in report["bounds"]} == {"computed"}
    assert report["bounds"][0]["least_times"][0].keys() == {"gpu", "memory_bandwidth_gbps", "time_us"}


def test_demo_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ARCHS", ("sm_90",))
    wrong = wl.fuse(lambda gate, up: torch.nn.functional.silu(gate) * up * 1.02)
    monkeypatch.setattr(demo, "CASES", (dataclasses.replace(demo.CASES[0], fused=wrong),))
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "FAILED: SwiGLU is up to" in result.stdout
    assert json.loads(run("demo", "--tokens", "8", "--device", "cpu", "--json").stdout)["faults"]


def test_demo_fails_on_a_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ARCHS", ("sm_80",))
    compile_case = demo.compile_case
    monkeypatch.setattr(demo, "compile_case", lambda case, arch: dataclasses.replace(compile_case(case, arch), spill_bytes=4))
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "SwiGLU spills 4 bytes on sm_80" in result.stdout


def test_times_are_printed_as_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def bench(*args: Any, mode: str, **kwargs: Any) -> measure.BenchResult:  # a CPU has no cold L2
        return measure.bench(*args, max_seconds=0.02, **kwargs)

    monkeypatch.setattr(demo, "bench", bench)
    timing = demo.time_case(demo.CASES[0], 4, torch.device("cpu"))
    median_us = 123.4
    copy = timing.result["device copy"]
    subject = timing.result.subject
    assert subject.time_us is not None
    assert copy.time_us is not None
    figures = dataclasses.replace(subject, time_us=dataclasses.replace(subject.time_us, median=median_us, n=30), bytes_per_second=4.2e12)
    slow = dataclasses.replace(copy, time_us=dataclasses.replace(copy.time_us, median=2 * median_us))
    failed = dataclasses.replace(timing.result["torch eager"], time_us=None, labels=(Label("FAILED", "out of memory"),))
    result = dataclasses.replace(
        timing.result, subject=figures, against=(failed, slow), nominal_bytes_per_second=4.8e12, minimal_bytes=480_000_000
    )
    cli._print_timings([dataclasses.replace(timing, result=result)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["SwiGLU", "wideload", "123.4", "30", "4,200", "2.00"] in lines
    assert ["torch", "eager", "-"] in lines
    assert ["least", "(computed)", "100.0", "4,800"] in lines  # 0.48 GB at 4.8 TB/s
    assert "SwiGLU, torch eager: FAILED: out of memory".split() in lines
    assert any("(measured):" in line for line in lines)


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:99", "torch sees"), ("meta", "allowed: cpu, cuda, cuda:N"), ("toaster", "--device toaster")],
)
def test_a_bad_device_is_one_message(device: str, said: str) -> None:
    result = run("demo", "--device", device)
    assert result.exit_code == 1
    assert result.stderr.startswith("DeviceError: ")
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)  # not the error itself, which would print a traceback


def test_bad_usage_is_status_2() -> None:
    assert run("demo", "--tokens", "0").exit_code == 2
    assert run("demonstrate").exit_code == 2
