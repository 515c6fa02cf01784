"""The record of OpInfo's pairs: a part of it is run again, and what tells a wrong result from a right one is tried on wrong ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.opinfo.check import PASSES, Outcome, check_pair
from tests.opinfo.jobs import list_pairs
from tests.opinfo.report import RESULTS, read_report, render_report, summarize, write_report
from tests.opinfo.selection import Sample, select_ops

OPS = {op.name: op for op in select_ops()}
EVERY = 17
"""One pair of so many is run: about 130, in some seconds, of most operators and every dtype."""
LEAST_SHARE = 0.98


def test_the_record_is_what_a_run_gives() -> None:
    about, recorded = read_report(RESULTS["cpu"])
    outcomes = {(outcome.op, outcome.dtype): outcome for outcome in recorded}
    pairs = list_pairs(tuple(OPS.values()), "cpu")
    if about["torch"] == torch.__version__.partition("+")[0]:  # another torch has other operators and samples
        assert {(name, str(dtype).removeprefix("torch.")) for name, dtype in pairs} == set(outcomes)
    for name, dtype in pairs[::EVERY]:
        got = check_pair(OPS[name], dtype, "cpu")
        want = outcomes.get((got.op, got.dtype), got)
        assert (got.status in PASSES) == (want.status in PASSES), f"{got}, recorded: {want}"


EAGER_IS_WRONG = {
    **dict.fromkeys(
        [("__rmod__", dtype) for dtype in ("int8", "int16", "int32", "int64", "uint8")], "a remainder by zero, undefined on a GPU"
    ),
    **dict.fromkeys(
        [
            (op, dtype)
            for op in (*(f"polygamma.polygamma_n_{n}" for n in range(5)), "special.polygamma.special_polygamma_n_0")
            for dtype in ("int8", "int16")
        ],
        "infinite at poles, where eager has the rounding of sin(pi x)",
    ),
    ("sinc", "complex64"): "eager rounds pi * x before the sine",
    ("ldexp", "complex64"): "a complex power, whose rounding in fp32 grows with the exponent",
    ("special.ndtr", "bfloat16"): "eager rounds to bf16 in the midst of it: 0 where 2.1e-5 is right",
    ("special.bessel_j0", "float64"): "3.6e-7 off near 5.03, by mpmath",
    ("special.bessel_y1", "float64"): "8.3e-7 off near 5.03, by mpmath",
}
"""Where a GPU's results differ from eager's on purpose."""


def test_the_record_holds_the_share() -> None:
    for path in RESULTS.values():
        if path.exists():
            outcomes = [outcome for outcome in read_report(path)[1] if outcome.status != "none"]
            assert sum(outcome.status in PASSES for outcome in outcomes) >= LEAST_SHARE * len(outcomes)
            wrong = [
                outcome
                for outcome in outcomes
                if outcome.status not in (*PASSES, "refused") and (outcome.op, outcome.dtype) not in EAGER_IS_WRONG
            ]
            assert not wrong, "a crash or a wrong result"
            assert all(outcome.reason for outcome in outcomes if outcome.status == "refused")


def pair_of(function: Any, *args: Any) -> Any:
    """An operator of one sample, for CPU tensors alone."""
    return SimpleNamespace(name="planted", function=function, dtypes=lambda device: (torch.float32,), samples=lambda *_: [Sample(args, {})])


class Planted:
    """Eager torch gets another answer than wideload, which calls this with traced tensors."""

    def __init__(self, eager: Any) -> None:
        self.eager = eager

    def __call__(self, x: torch.Tensor) -> Any:
        return torch.mul(x, 2) if hasattr(x, "_node") else self.eager(x)  # of traced tensors


X = torch.tensor([[1.0, -0.0, float("nan")], [2.0, 3.0, 0.5]])


@pytest.mark.parametrize(
    ("eager", "what"),
    [
        (lambda x: x * 2 + 1, "element 0"),
        (lambda x: (x * 2).abs(), "element 1"),  # the sign of a zero
        (lambda x: (x * 2).nan_to_num(), "element 2"),
        (lambda x: (x * 2).double(), "dtype"),
        (lambda x: (x * 2)[None], "shape"),
        (lambda x: (x * 2).t().contiguous().t(), "strides"),
        (lambda x: (x * 2, x), "a tuple"),
    ],
)
def test_a_wrong_result_differs(eager: Any, what: str) -> None:
    outcome = check_pair(pair_of(Planted(eager), X), torch.float32, "cpu")
    assert outcome.status == "differs"
    assert what in outcome.reason


def test_refusals_crashes_and_samples_that_torch_refuses() -> None:
    def crash(x: torch.Tensor) -> torch.Tensor:
        if hasattr(x, "_node"):  # traced
            raise KeyError("planted")
        return x

    assert check_pair(pair_of(lambda x: x * 2, X), torch.float32, "cpu", compiles=True).status == "equal"
    assert check_pair(pair_of(lambda x: x.cumsum(0), X), torch.float32, "cpu").status == "refused"
    assert check_pair(pair_of(crash, X), torch.float32, "cpu").status == "crashes"
    assert check_pair(pair_of(lambda x: x & 1, X), torch.float32, "cpu").status == "none"
    assert check_pair(pair_of(lambda x: torch.ones_like(x, device="meta"), X), torch.float32, "cpu").status == "none"


def test_a_report_says_what_it_was_told(tmp_path: Path) -> None:
    outcomes = [Outcome("add", "float32", "equal"), Outcome("add", "int8", "refused", "why: so"), Outcome("sub", "int8", "none")]
    about = {"on": "a machine", "torch": "2.13.0", "numerics": "eager", "compiled": "sm_90"}
    write_report(tmp_path / "x.json", about, outcomes)
    assert read_report(tmp_path / "x.json") == (about, outcomes)
    assert summarize(outcomes).startswith("1 of 2 pairs pass: 50.00 %\nequal 1, refused 1\nrefused  add [int8]: why: so")
    text = render_report(tmp_path / "x.json")
    assert "| `add` | int8 | refused | why: so |" in text
    assert "**1 of 2 pairs pass: 50.00 %**; every kernel compiled for sm_90." in text
