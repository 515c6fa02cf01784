"""An explanation on the GPU that it is about: its own figures, and a measured time."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

import wideload as wl
from wideload.cli import app

pytestmark = pytest.mark.gpu

N = 2**22


def test_the_call_is_measured_on_copies() -> None:
    x, y = (wl.random_tensor((N,), torch.bfloat16, device="cuda", seed=seed) for seed in (0, 1))
    out = torch.zeros_like(x)
    explanation = wl.ops.add.explain(x, y, out=out)
    assert explanation.minimal.value == 6 * N
    assert explanation.measured_time is not None
    assert (explanation.measured_time.kind, explanation.measured_time.value > 0) == ("measured", True)
    assert explanation.arch == "sm_{}{}".format(*torch.cuda.get_device_capability())
    assert explanation.gpu is not None
    assert explanation.least_time is not None
    assert not out.any(), "the caller's out= was written"


def test_nothing_is_measured_where_that_is_not_wanted() -> None:
    x = wl.random_tensor((N,), device="cuda")
    assert wl.fuse(torch.exp).explain(x, measure=False).measured_time is None
    assert wl.fuse(torch.exp).explain(x, target="a100").measured_time is None


def test_a_roofline_that_was_measured_is_used() -> None:
    x = wl.random_tensor((N,), device="cuda")
    wl.roofline()
    explanation = wl.fuse(torch.exp).explain(x, measure=False)
    assert explanation.achievable_bandwidth is not None
    assert explanation.achievable_bandwidth.kind == "measured"


def test_a_time_that_is_known_is_not_measured_again() -> None:
    explanation = wl.fuse(torch.exp).explain(wl.random_tensor((N,), device="cuda"), measured_us=1e6)
    assert explanation.measured_time is not None
    assert (explanation.measured_time.value, explanation.measured_time.kind) == (1e6, "measured")
    assert "unexplained" in [verdict.limit for verdict in explanation.verdicts]


def test_bench_explains_with_the_time_that_it_has_measured() -> None:
    result = CliRunner().invoke(app, ["bench", "swiglu", "--max-seconds", "0.5"])
    assert result.exit_code == 0, result.output
    table, _, explanation = result.stdout.partition("\nBytes\n")
    median_us = float(table.splitlines()[1].split()[1])
    (measured,) = (line.split() for line in explanation.splitlines() if line.startswith("  measured time"))
    assert measured[2] == f"{median_us:,.1f}"
    assert "There is no GPU here" not in table
