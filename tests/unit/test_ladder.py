"""The ladder without a GPU: what each rung compiles to, against figures by hand, and how claims are judged."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wideload as wl
from tests.emulator.test_ladder import run_emulated
from tests.nvcc import nvcc
from tests.results import bench_result, contender
from wideload.analyze.explain import GpuFigures
from wideload.analyze.figure import Figure
from wideload.cli import app
from wideload.errors import CompileError, DeviceError, WideloadError
from wideload.gpus import find_target
from wideload.ladder import climb as climbing
from wideload.ladder.check import CHECK_MACHINE, _count_wrong
from wideload.ladder.climb import Claim, Ladder, Measured, Row, climb, compile_rung, judge_rows, time_rung
from wideload.ladder.rungs import RUNGS, Launch, Machine, Problem, Rung, find_rungs, read_rung
from wideload.ladder.toolkit import Nvcc
from wideload.measure import random_tensor

__all__ = ["nvcc"]

FOLDER = Path(str(resources.files("wideload"))) / "ladder"

# By hand: the widest load and store in bits, sectors of the first input that a warp's request touches, the part of them used,
# bytes an element, and microseconds at 4.8 TB/s of 2^28 elements (2^26 from points_aos on, twice as many numbers in pairs).
BY_HAND = {
    "vector_add_f32": (32, 32, 4, 1.0, 12, 671.1),
    "vector_add_bf16": (16, 16, 2, 1.0, 6, 335.5),
    "f32_to_bf16": (32, 16, 4, 1.0, 6, 335.5),
    "add_bf16_naive": (16, 16, 2, 1.0, 6, 335.5),
    "add_bf16_vec8": (128, 128, 16, 1.0, 6, 335.5),
    "add_bf16_vec8_grid": (128, 128, 16, 1.0, 6, 335.5),
    "add_f32_grid": (32, 32, 4, 1.0, 12, 671.1),
    "add_f32_vec4": (128, 128, 16, 1.0, 12, 671.1),
    "strided2d": (16, 16, 2, 1.0, 6, 335.5),
    "strided2d_broadcast": (16, 16, 2, 1.0, 4, 223.7),
    "strided2d_transposed": (16, 16, 32, 1 / 16, 4, 223.7),
    "bias_gelu_grid": (32, 32, 4, 1.0, 8, 447.4),
    "bias_gelu_2d": (32, 32, 4, 1.0, 8, 447.4),
    "silu_three": (128, 128, 16, 1.0, 16, 894.8),
    "silu_fused": (128, 128, 16, 1.0, 8, 447.4),
    "points_aos": (32, 32, 12, 1 / 3, 8, 111.8),
    "points_soa": (32, 32, 4, 1.0, 8, 111.8),
    "rotate_pairs": (64, 64, 8, 1.0, 12, 335.5),
    "rotate_apart": (64, 64, 8, 1.0, 12, 335.5),
    "stride_1": (32, 32, 4, 1.0, 8, 111.8),
    "offset_4_bytes": (32, 32, 5, 0.8, 8, 111.8),
    "stride_2": (32, 32, 8, 0.5, 8, 111.8),
    "stride_4": (32, 32, 16, 0.25, 8, 111.8),
    "stride_8": (32, 32, 32, 0.125, 8, 111.8),
    "scattered": (32, 32, 32, 0.125, 8, 111.8),
}


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@functools.cache
def compiled(name: str, target: str = "h200") -> Ladder:
    return climb(find_rungs([name]), target)


@pytest.mark.parametrize("name", BY_HAND)
def test_figures_by_hand(name: str) -> None:
    load, store, sectors, used, nbytes, least_us = BY_HAND[name]
    ladder = compiled(name)
    (row,) = ladder.rows
    assert (row.loads[0][0], row.stores[0][0]) == (load, store)
    assert round(row.sectors) == sectors
    assert row.sectors_used == pytest.approx(used, rel=0.01)
    assert (row.bytes_per_element, row.bytes_read + row.bytes_written) == (nbytes, pytest.approx(least_us * 4.8e6, rel=1e-3))
    assert row.least_time_us == pytest.approx(least_us, rel=1e-3)
    assert row.spill_bytes == 0
    assert row.measured is None
    # What the articles say of sectors is so; of times, nothing is said without a GPU.
    assert [claim.holds for claim in row.claims] == [True if claim.what == "sectors" else None for claim in row.claims]
    assert ladder.notes == ()


def test_every_rung_is_in_the_table_and_every_file_on_the_ladder() -> None:
    assert [rung.name for rung in RUNGS] == list(BY_HAND)
    assert {path.name for path in FOLDER.glob("*.cu")} == {rung.file for rung in RUNGS}
    for path in FOLDER.glob("*.cu"):
        assert path.read_text().startswith("// "), f"{path.name} says first what it shows"


@pytest.mark.parametrize("name", ["add_bf16_vec8_grid", "strided2d_broadcast", "silu_three", "points_aos", "rotate_pairs"])
def test_the_bytes_of_a_rung_are_those_that_its_ptx_touches(name: str) -> None:
    (rung,) = find_rungs([name])
    shape = (1 << 16,) if len(rung.shape) == 1 else (1 << 10, 1 << 10)
    problem = rung.make(meta, *shape)
    read = written = 0.0
    for launch in rung.launch(Machine(132, 8), problem):
        found = wl.raw(read_rung(rung.file), launch.kernel).explain(*launch.arguments, grid=launch.grid, target="h200")
        read, written = read + found.bytes_read.value, written + found.bytes_written.value
    n = problem.out.numel()
    assert (read / n, written / n) == pytest.approx(rung.nbytes, rel=0.01)


def test_registers_decide_the_grid_of_a_loop() -> None:
    (rung,) = find_rungs(["add_bf16_vec8_grid"])
    problem = rung.make(meta, 1 << 28)
    grids = [
        rung.launch(Machine(sms=108, blocks_per_sm=8), Problem(tuple(x[:n] for x in problem.inputs), problem.out[:n]))[0].grid
        for n in (1 << 28, 8 * 256 + 8, 21, 0)
    ]
    assert grids == [(108 * 8 * 2,), (2,), (1,), (0,)]
    # 40 registers of 256 threads let six blocks live where there is room for eight.
    (row,) = compiled("add_f32_vec4").rows
    assert row.occupancy == {32: 1.0, 40: 0.75}[row.registers]


def test_what_is_not_aligned_is_refused_by_name() -> None:
    (rung,) = find_rungs(["add_f32_vec4"])
    a, b, c = (torch.empty(64, device="meta") for _ in range(3))
    with pytest.raises(wl.LayoutError, match=r"argument y \(float4\*\) starts 4 bytes behind a multiple of 16"):
        compile_rung(rung, CHECK_MACHINE, "h200", Problem((a[:60], b[1:61]), c[:60]))


@pytest.mark.parametrize(
    ("name", "edit", "is_right"),
    [("add_bf16_vec8", ("", ""), True), ("add_bf16_vec8", ("x + b", "x - b"), False), ("silu_three", ("", ""), True)],
)
def test_a_wrong_rung_gets_no_time(name: str, edit: tuple[str, str], is_right: bool) -> None:
    (rung,) = find_rungs([name])
    row = dataclasses.replace(ROW, bytes_read=1000, bytes_written=500)
    seeds = iter(range(9))
    problem = rung.make(lambda n, dtype: random_tensor((n,), dtype, seed=next(seeds)), 1001)

    def run(rung: Rung, launches: Iterable[Launch]) -> None:
        run_emulated(rung, launches, edit)

    found = time_rung(rung, row, CHECK_MACHINE, problem, None, run, max_seconds=0.05)
    assert (found.time_us is not None) is is_right
    assert found.torch_us is not None
    assert (found.bytes_per_second is not None) is is_right
    assert found.share_of_wall is None


def test_results_are_compared_with_signs_and_nans() -> None:
    nan, exact = float("nan"), (0.0, 0.0)
    assert _count_wrong(torch.tensor([1.0, nan, -0.0]), torch.tensor([1.0, nan, -0.0]), exact) == 0
    assert _count_wrong(torch.tensor([1.0, nan, 0.0, 2.0]), torch.tensor([1.0, 1.0, -0.0, nan]), exact) == 3
    assert _count_wrong(torch.tensor([1.0, 1.0]), torch.tensor([1.00001, 1.1]), (1e-3, 0.0)) == 1


def test_the_table_of_systems_names_what_exists() -> None:
    root = Path(__file__).parents[2]
    rows = [line for line in (root / "docs" / "ladder.md").read_text().splitlines() if re.match(r"\| S\d+ \|", line)]
    assert [row.split()[1] for row in rows] == [f"S{number}" for number in range(1, 27)]
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", row)
        for file, name in tests:
            assert f"def {name}(" in (root / file).read_text() if name else (root / file).is_file(), f"{file}::{name}"
        for words in re.findall(r"`wideload ladder ([\w ]+)`", row):
            find_rungs(words.split())
        assert tests or "`wideload" in row or "not yet" in row, row


# ---- judging

ROW = Row("a", "a.cu", "", "", (1,), ("a",), ((32, 1),), ((32, 1),), 8, 0, 1.0, 4.0, 1.0, 8, 4, 12, 1.0, "memory", why_not="because")


def measured(time_us: float, share: float) -> Measured:
    return Measured(time_us, 1.0, 1e9, share, share / 0.9)


def test_claims_are_judged_by_what_was_measured() -> None:
    claims = (Claim("sectors", 4, 4), Claim("share", 0.6, 0.8), Claim("ratio", 0.9, 1.0, "b"))
    a, b = (
        dataclasses.replace(ROW, claims=claims, measured=measured(95, 0.44)),
        dataclasses.replace(ROW, name="b", measured=measured(100, 0.9)),
    )
    first, _ = judge_rows([a, b])
    assert [(claim.found, claim.holds) for claim in first.claims] == [(4.0, True), (0.44, False), (0.95, True)]
    slower, _ = judge_rows([dataclasses.replace(a, measured=measured(104, 0.6)), b])
    assert [claim.holds for claim in slower.claims] == [True, True, False]
    alone, _ = judge_rows([dataclasses.replace(a, measured=None, sectors=5.0), b])
    assert [claim.holds for claim in alone.claims] == [False, None, None]
    table = Ladder("G", "sm_90", 1000.0, True, (first,))
    assert table.notes == ("a: the article expects 60%-80%; here it is 0.44. because.",)
    assert len(table.columns) == len(table.cells(first))
    assert "44.0%" in table.to_markdown()
    assert Ladder("G", "sm_90", 1000.0, True, (dataclasses.replace(first, faults=("wrong",)),)).faults == ("wrong",)


def test_what_cannot_be_climbed_is_said() -> None:
    with pytest.raises(DeviceError, match="--target h200"):
        climb(RUNGS[:1])
    with pytest.raises(DeviceError, match="name a GPU"):
        climb(RUNGS[:1], "sm_90")
    with pytest.raises(WideloadError, match="no rung 'vec9'; it has vector_add_f32"):
        find_rungs(["vec9"])


@pytest.mark.parametrize("fault", ["", "add_bf16_vec8 of 7: 7 of 7 results differ from torch's"])
def test_what_a_gpu_measures_goes_into_the_table(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    checked: list[str] = []

    def check_fake(rung: Rung, on: torch.device) -> tuple[str, ...]:
        checked.append(rung.name)
        return (fault,) if fault and rung.name == "add_bf16_vec8" else ()

    pretend_h200(monkeypatch)
    monkeypatch.setattr(climbing, "check_rung", check_fake)
    times = {"add_bf16_vec8": 400.0, "add_bf16_vec8_grid": 430.0}
    monkeypatch.setattr(
        climbing, "time_rung", lambda rung, row, *_, **__: Measured(times[rung.name], 401.0, 4e12, 0.83, 0.91, ("THROTTLED: power",))
    )
    run = command(*times, "--json")
    assert run.exit_code == (1 if fault else 0), run.output
    report = json.loads(run.stdout)
    assert report["is_measured"]
    assert checked == list(times)
    first, second = report["rows"]
    assert first["faults"] == ([fault] if fault else [])
    assert [claim["holds"] for claim in first["claims"]] == [True, False]  # 0.83 is below 0.85
    assert [claim["holds"] for claim in second["claims"]] == [True, False, False]
    assert second["claims"][2]["found"] == pytest.approx(1.075)
    table = command(*times).stdout
    assert "401.0" in table
    assert "add_bf16_vec8: THROTTLED: power" in table
    assert "3.94 to 4.15 TB/s" in table


def pretend_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU by its figures alone, whose nominal bandwidth differs from the table's."""
    figures = dataclasses.replace(GpuFigures(find_target("h200")), nominal=Figure(4917.0, "GB/s", "computed", "attributes"))
    monkeypatch.setattr(climbing, "read_device", lambda on: figures)
    monkeypatch.setattr(climbing, "roofline", lambda on: "a roof")
    monkeypatch.setattr(climbing, "_maker", lambda on: meta)
    monkeypatch.setattr(climbing, "check_rung", lambda rung, on: ())
    monkeypatch.setattr(climbing, "read_environment", lambda on: bench_result(contender("x", [1.0, 1.0])).environment)
    monkeypatch.setattr("wideload.cli._find_device", lambda name: torch.device("cuda", 0))


def test_a_rung_that_fails_leaves_the_others_their_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)

    def compile_or_fail(rung: Rung, *arguments: Any) -> Row:
        if rung.name == "f32_to_bf16":
            raise CompileError("nvdisasm was not found")
        return compile_rung(rung, *arguments)

    def time_or_fail(rung: Rung, *_: Any, **__: Any) -> Measured:
        if rung.name == "add_bf16_naive":
            raise RuntimeError("an illegal memory access")
        return measured(400.0, 0.83)

    monkeypatch.setattr(climbing, "compile_rung", compile_or_fail)
    monkeypatch.setattr(climbing, "time_rung", time_or_fail)
    run = command("f32_to_bf16", "add_bf16_naive", "add_bf16_vec8", "--json")
    assert run.exit_code == 1
    ladder = Ladder.from_dict(json.loads(run.stdout))
    assert [(row.name, row.measured and row.measured.time_us) for row in ladder.rows] == [
        ("add_bf16_naive", None),
        ("add_bf16_vec8", 400.0),
    ]
    assert ladder.faults == (
        "add_bf16_naive: RuntimeError: an illegal memory access",
        "f32_to_bf16: CompileError: nvdisasm was not found",
    )
    assert "| add_bf16_naive | 2x16 | 1x16 |" in ladder.to_markdown()
    assert len({len(ladder.cells(row)) for row in ladder.rows} | {len(ladder.columns)}) == 1
    for words in (["f32_to_bf16"], ["f32_to_bf16", "--target", "h200"]):
        assert "CompileError: nvdisasm was not found" in command(*words).output


def test_the_json_carries_samples_environment_and_commit_and_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_h200(monkeypatch)
    bench = bench_result(contender("add_bf16_vec8", [400.0, 401.0]), contender("torch", [402.0, 402.0])).to_dict()
    monkeypatch.setattr(climbing, "time_rung", lambda *_, **__: dataclasses.replace(measured(400.5, 0.83), bench=bench))
    ladder = climb(find_rungs(["add_bf16_vec8"]), device=torch.device("cuda", 0))
    written = json.loads(json.dumps(ladder.to_dict()))
    assert (written["environment"]["gpu"], written["environment"]["commit"]) == ("NVIDIA H200", "abc123")
    assert written["rows"][0]["measured"]["bench"]["subject"]["time_us"]["samples"] == [400.0, 401.0]
    assert Ladder.from_dict(written).to_markdown() == ladder.to_markdown()
    assert ladder.rows[0].least_time_us == pytest.approx(6 * 2**28 / 4917e3)  # of the GPU's own nominal bandwidth
    nowhere = dataclasses.replace(bench_result(contender("x", [1.0, 1.0])).environment, commit=None)
    monkeypatch.setattr(climbing, "read_environment", lambda on: nowhere)
    monkeypatch.setenv("WIDELOAD_COMMIT", "def456")
    found = climb(find_rungs(["add_bf16_vec8"]), device=torch.device("cuda", 0)).environment
    assert found is not None
    assert found.commit == "def456"
    with pytest.raises(WideloadError, match=r"schema 'wideload\.ladder/0'"):
        Ladder.from_dict({**written, "schema": "wideload.ladder/0"})


def test_what_goes_on_is_reported() -> None:
    reports: list[tuple[str, int, int]] = []
    climb(find_rungs(["points_aos", "points_soa"]), "h200", report=lambda *report: reports.append(report))
    assert reports == [("compiling", 0, 2), ("compiling", 1, 2)]


# ---- the command


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["ladder", *words])


def test_the_command() -> None:
    run = command("add_bf16_vec8", "points_aos", "--target", "a100", "--json")
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["schema"], report["gpu"], [row["name"] for row in report["rows"]]) == (
        "wideload.ladder/1",
        "A100 80GB SXM",
        ["add_bf16_vec8", "points_aos"],
    )
    assert report["rows"][0]["loads"][0] == [128, 2]
    assert "| add_bf16_vec8 | 2x128 2x16 | 1x128 1x16 |" in command("add_bf16_vec8", "--target", "a100", "--markdown").stdout
    assert "2x128 2x16" in command("add_bf16_vec8", "--target", "a100").stdout
    assert "no rung 'x'" in command("x", "--target", "a100").output


def test_the_command_prints_sources_that_can_be_explained() -> None:
    printed = command("points_aos", "points_soa", "--source").stdout
    assert printed.count("struct Point {") == 1
    path = printed.splitlines()[0].removeprefix("// ")
    assert Path(path) == FOLDER / "points.cu"
    words = ["explain", f"{FOLDER}/add_bf16_vec8.cu:add_bf16_vec8", *["bf16[n]"] * 3, "n", "--size", "n=2^20", "--grid", "n//2048"]
    run = CliRunner().invoke(app, [*words, "--target", "h200", "--json"])
    assert run.exit_code == 0, run.output
    assert json.loads(run.stdout)["bytes_read"]["value"] == 4 << 20


@pytest.mark.parametrize("file", ["silu_three.cu", "vector_add_bf16.cu"])
def test_nvcc_takes_the_rungs_with_cuda_s_own_header(nvcc: Nvcc, tmp_path: Path, file: str) -> None:
    subprocess.run([nvcc.path, "-arch=sm_90", "-cubin", "-Werror", "all-warnings", FOLDER / file, "-o", tmp_path / "x"], check=True)
