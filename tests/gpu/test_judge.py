"""The judge on a GPU: every planted bug is named though some of them kill the process that runs them, and every solution passes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tests.emulator.test_judge import BUGS, PLANTED
from wideload.cli import app
from wideload.judge import PROBLEMS, Judgement, judge, read_request
from wideload.judge.problems import Problem, read_solution
from wideload.judge.sanitizer import find_sanitizer

pytestmark = pytest.mark.gpu


def judge_here(path: Path, *, sanitize: bool = False) -> Judgement:
    (name,) = re.findall(r"__global__ void (\w+)", path.read_text())
    request = read_request(f"{path}:{name}")
    return judge(request, device=torch.device("cuda", 0), sanitizing="yes" if sanitize else "no", max_seconds=0.3)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_named(name: str) -> None:
    found = judge_here(PLANTED / f"{name}.cu")
    assert BUGS[name][0] in [finding.bug for finding in found.findings], found
    assert found.findings[0].bug == BUGS[name][0]
    assert found.is_run
    assert found.measured is None
    assert int(torch.ones(8, device="cuda").sum()) == 8  # whatever the kernel did, this process has its GPU still


def test_a_launch_on_stream_0_is_named() -> None:
    request = read_request(f"{PLANTED / 'wrong_stream.py'}:add", ["--against=torch:add", "f32[n]", "f32[n]"])
    found = judge(request, device=torch.device("cuda", 0), sanitizing="no", max_seconds=0.3)
    assert [finding.bug for finding in found.findings] == ["wrong_stream"], found
    right = judge(
        read_request("torch:add", ["--against=torch:add", "f32[n]", "f32[n]"]),
        device=torch.device("cuda", 0),
        sanitizing="no",
        max_seconds=0.3,
    )
    assert right.exit_code == 0, right


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_solutions_pass(problem: Problem) -> None:
    found = judge_here(read_solution(problem.name))
    assert found.findings == (), found
    assert found.exit_code == 0
    assert found.measured is not None
    assert found.measured.time_us
    assert found.measured.against_us
    assert 0 < (found.measured.share_of_nominal or 0) <= 1
    assert 0 < (found.measured.share_of_wall or 0) < 1.1
    assert found.explanation is not None
    assert found.explanation.measured_time is not None


@pytest.mark.big(100)
def test_more_than_2_to_the_31_elements_are_run() -> None:
    found = judge_here(read_solution("cast"))
    assert found.findings == (), found
    assert not any("2^31" in note for note in found.notes)


@pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer")
@pytest.mark.parametrize(("name", "bug"), [("no_bounds_check", "no_bounds_check"), ("race", "race")])
def test_the_sanitizer_names_the_line(name: str, bug: str) -> None:
    found = judge_here(PLANTED / f"{name}.cu", sanitize=True)
    assert found.findings[0].bug == bug
    assert re.search(r"compute-sanitizer: .* at line \d+", found.findings[0].evidence), found


@pytest.mark.skipif(find_sanitizer() is None, reason="needs compute-sanitizer")
def test_the_sanitizer_finds_nothing_in_a_solution() -> None:
    assert judge_here(read_solution("swiglu"), sanitize=True).findings == ()


def test_the_command() -> None:
    run = CliRunner().invoke(app, ["check", f"{read_solution('vector_add')}:vector_add", "--max-seconds", "0.3", "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert report["is_run"]
    assert report["measured"]["time_us"] > 0
