"""Results over sizes: each format holds the figures that were measured, and verdicts are given size by size."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from wideload.errors import WideloadError
from wideload.measure import BenchResult, Contender, bench, random_tensor
from wideload.measure.labels import Label
from wideload.measure.statistics import summarize
from wideload.measure.sweep import Point, Sweep, compare_sweeps, read_sweep


@pytest.fixture(scope="module")
def measured() -> BenchResult:
    return bench(torch.neg, random_tensor((8,)), against={"a|b": lambda x: -x}, name="subject", max_samples=5, warm_up_seconds=0.0)


def with_times(result: BenchResult, subject_us: float, rival_us: float | None) -> BenchResult:
    """Forty samples at these times; a rival without a time is wrong."""

    def timed(contender: Contender, time_us: float) -> Contender:
        return dataclasses.replace(
            contender, time_us=summarize([time_us] * 40), relative_error=0.001, bytes_per_second=64 / time_us * 1e6, host_us=3.25, labels=()
        )

    (rival,) = result.against
    wrong = dataclasses.replace(rival, time_us=None, relative_error=None, bytes_per_second=None, labels=(Label("WRONG", "8 of 8 differ"),))
    rivals = (wrong if rival_us is None else timed(rival, rival_us),)
    return dataclasses.replace(result, subject=timed(result.subject, subject_us), against=rivals, nominal_bytes_per_second=64e6)


@pytest.fixture
def sweep(measured: BenchResult) -> Sweep:
    return Sweep((Point({"n": 8, "m": 1}, with_times(measured, 2.0, 4.0)), Point({"n": 16, "m": 1}, with_times(measured, 10.0, None))))


def test_one_result_is_stored_and_printed_as_bench_does(measured: BenchResult) -> None:
    single = Sweep((Point({}, measured),))
    assert single.to_dict() == measured.to_dict()
    assert str(single) == str(measured)
    assert Sweep.from_dict(json.loads(single.to_json())) == single


def test_a_sweep_survives_json(sweep: Sweep, tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    path.write_text(sweep.to_json())
    assert read_sweep(path) == sweep
    assert json.loads(sweep.to_json())["points"][1]["sizes"] == {"n": 16, "m": 1}


def test_csv_has_a_line_for_each_contender_and_size(sweep: Sweep) -> None:
    rows = list(csv.DictReader(io.StringIO(sweep.to_csv())))
    assert [(row["n"], row["m"], row["contender"], row["median_us"]) for row in rows] == [
        ("8", "1", "subject", "2.0"),
        ("8", "1", "a|b", "4.0"),
        ("16", "1", "subject", "10.0"),
        ("16", "1", "a|b", ""),
    ]
    assert [row["labels"] for row in rows] == ["", "", "", "WRONG"]
    assert (rows[0]["n"], rows[0]["gbps"], rows[0]["share_of_nominal"], rows[0]["host_us"]) == ("8", "0.032", "0.5", "3.25")


def test_a_size_may_be_called_as_a_figure_is(measured: BenchResult) -> None:
    """``n`` is the name that most sizes have; the samples are counted by another."""
    (row,) = list(csv.DictReader(io.StringIO(Sweep((Point({"n": 7}, dataclasses.replace(measured, against=())),)).to_csv())))
    assert (row["n"], row["num_samples"]) == ("7", "5")


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace("\\|", "/").strip().strip("|").split("|")]


def test_markdown_has_the_same_rows(sweep: Sweep) -> None:
    heading, rule, *lines = sweep.to_markdown().splitlines()
    assert cells(heading) == ["n", "m", "", "median us", "+-", "GB/s", "of nominal", "vs best", "host us", "labels"]
    assert cells(rule) == ["---"] * 3 + ["---:"] * 6 + ["---"]
    assert cells(lines[0]) == ["8", "1", "subject", "2.00", "0.1%", "0.03", "50.0%", "1.00", "3.2", ""]
    assert cells(lines[1])[2:8] == ["a/b", "4.00", "0.1%", "0.02", "25.0%", "2.00"]
    assert cells(lines[3]) == ["16", "1", "a/b", "", "", "", "", "", "", "WRONG"]
    assert lines[4] == ""
    assert lines[5] == "- a|b at n=16, m=1: WRONG: 8 of 8 differ"
    assert lines[6].startswith("- on ")
    assert lines[6].endswith(" f32[8] at n=8, m=1")


def test_the_table_has_them_too(sweep: Sweep) -> None:
    lines = str(sweep).splitlines()
    assert lines[1].split() == ["8", "1", "subject", "2.00", "0.1%", "0.03", "50.0%", "1.00", "3.2"]
    assert lines[4].split() == ["16", "1", "a|b", "WRONG"]
    assert "  a|b at n=16, m=1: WRONG: 8 of 8 differ" in lines


def points(*pairs: tuple[int, BenchResult]) -> Sweep:
    return Sweep(tuple(Point({"n": n}, result) for n, result in pairs))


def verdicts(a: Sweep, b: Sweep) -> Iterator[tuple[int, str]]:
    for sizes, comparisons in compare_sweeps(a, b).points:
        yield from ((sizes["n"], row.verdict) for row in comparisons.rows)


def test_verdicts_are_given_size_by_size(measured: BenchResult) -> None:
    before = points((8, with_times(measured, 2.0, 4.0)), (16, with_times(measured, 10.0, 4.0)))
    after = points((16, with_times(measured, 9.0, 4.0)), (8, with_times(measured, 2.2, 4.0)))
    assert list(verdicts(before, after)) == [(8, "SLOWER"), (8, "SAME"), (16, "FASTER"), (16, "SAME")]
    comparison = compare_sweeps(before, after)
    assert comparison.exit_code == 1
    assert [row["sizes"] for row in comparison.to_dict()["rows"]] == [{"n": 8}] * 2 + [{"n": 16}] * 2
    assert comparison.to_dict()["exit_code"] == 1
    assert str(comparison).splitlines()[:2] == ["n=8", "subject is SLOWER than subject"]
    assert compare_sweeps(before, before).exit_code == 0
    assert compare_sweeps(before, after, same_within=0.2).exit_code == 0


def test_a_size_in_one_of_them_only_is_unclear(measured: BenchResult) -> None:
    both, one = (
        points((8, with_times(measured, 2.0, 4.0)), (16, with_times(measured, 2.0, 4.0))),
        points((8, with_times(measured, 2.0, 4.0))),
    )
    for a, b in ((both, one), (one, both)):
        comparison = compare_sweeps(a, b)
        assert comparison.exit_code == 3
        assert "this size stands in one result only" in str(comparison)


def test_too_few_samples_have_no_interval(measured: BenchResult) -> None:
    few = dataclasses.replace(measured, against=(), subject=dataclasses.replace(measured.subject, time_us=summarize([2.0, 2.1])))
    text = str(compare_sweeps(Sweep((Point({}, few),)), Sweep((Point({}, few),))))
    assert "= 1.0000, too few samples for an interval" in text


@pytest.mark.parametrize(
    "text",
    ["", "[]", "3", "null", "{}", '{"schema": "wideload.bench/0"}', '{"schema": "wideload.bench/2"}', '{"schema": "wideload.sweep/1"}'],
)
def test_other_files_are_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(WideloadError) as raised:
        read_sweep(path)
    assert str(raised.value).startswith(str(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WideloadError, match=r"nothing\.json cannot be read: No such file"):
        read_sweep(tmp_path / "nothing.json")
