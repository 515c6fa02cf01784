"""Tuning without a GPU: which candidates are tried, what is chosen and kept, and what the command says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import wideload as wl
from wideload import tune as tunings
from wideload import tuned
from wideload.cli import app
from wideload.errors import CompileError, DeviceError
from wideload.plan import ALLOWED, BUILT_IN, DEFAULT, Tuning
from wideload.tune import CASES, NARROWING, RUNS, STRIDED, TILES, TuneResult, tune
from wideload.tuned import TunedGpu, read_tuned, trying, write_tuned

CPU = torch.device("cpu")
GPU_NAME = "NVIDIA H200"


@pytest.fixture(autouse=True)
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("WIDELOAD_TUNING", str(path))
    tuned._forget()
    yield path
    tuned._forget()


class Timer:
    """A clock for which a call takes 100 us, times what its choices say: those of ``factors`` that stand in the candidate's name."""

    def __init__(self, factors: Mapping[str, float]) -> None:
        self.factors, self.timed = factors, list[tuple[str, ...]]()

    def __call__(self, calls: Mapping[str, Callable[[], Any]], device: int, num_samples: int) -> dict[str, Sequence[float]]:
        for call in calls.values():
            call()
        self.timed.append(tuple(calls))
        return {name: [100.0 * self._factor(name)] * num_samples for name in calls}

    def _factor(self, name: str) -> float:
        factor = 1.0
        for choice in name.split(", "):
            factor *= self.factors.get(choice, 1.0)
        return factor


def run_tune(factors: Mapping[str, float], **options: Any) -> TuneResult:
    return tune(GPU_NAME, "sm_90", CPU, sizes=(4096,), num_samples=1, timer=Timer(factors), **options)


def test_every_allowed_combination_is_tried_beside_the_built_in_one() -> None:
    timer = Timer({})
    told: list[tuple[int, int]] = []
    found = tune(GPU_NAME, "sm_90", CPU, sizes=(1024, 4096), num_samples=1, timer=timer, advance=lambda *at: told.append(at))
    assert [len(names) for names in timer.timed] == [
        n for case in CASES for n in [{RUNS: 12, NARROWING: 3, STRIDED: 4, TILES: 4}[case.choices]] * 2
    ]
    assert (told[0], told[-1]) == ((1, 30), (30, 30))
    assert found.choices == found.built_in == DEFAULT.choices
    assert {name for case in CASES for name in case.choices} == set(ALLOWED)
    assert "accesses 1, threads 128" in timer.timed[0]


def test_the_cases_are_cut_by_the_choices_that_they_are_for() -> None:
    for case in CASES:
        args = case.build(lambda *shape, dtype=torch.bfloat16: torch.empty(shape, dtype=dtype, device="meta"), 1 << 22)
        f = wl.fuse(case.fn, name="tuned")
        texts = set()
        for choices in tunings._candidates(case.choices):
            with trying(Tuning("sm_90", "", **{**DEFAULT.choices, **choices})):
                (kernel,) = f.plan(*args, target="h200").kernels
            texts.add((kernel.source, kernel.plan.variant.threads))
        assert len(texts) == len(tunings._candidates(case.choices)), case.name


def test_the_fastest_is_chosen_where_it_is_worth_it() -> None:
    found = run_tune(
        {"accesses 2": 0.9, "threads 256": 0.95, "strided_elements 8": 0.995, "tile_bytes 16384": 0.5, "narrowing_accesses 4": 1.5}
    )
    assert found.choices == {**DEFAULT.choices, "accesses": 2, "threads": 256, "tile_bytes": 16384}
    scores = {tunings.spell_choices(choices): score for choices, score, _ in found.scores}
    assert scores["accesses 2, threads 256"] == pytest.approx(1 / (0.9 * 0.95))
    assert scores["narrowing_accesses 4"] == pytest.approx(1 / 1.5)
    notes = {row[0]: row[3] for row in found.rows}
    assert (notes["accesses 2, threads 256"], notes["accesses 1, threads 128"], notes["narrowing_accesses 2"]) == (
        "chosen",
        "built in",
        "built in, chosen",
    )
    assert found.record == TunedGpu(GPU_NAME, "sm_90", "measured on NVIDIA H200: wideload tune, 15 cases", dict(found.choices))
    assert json.loads(json.dumps(found.to_dict()))["choices"] == found.choices


@pytest.mark.parametrize("kind", ["wrong", "refused"])
def test_a_candidate_that_is_wrong_or_refused_is_not_chosen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = tunings._planned

    def spoilt(case: Any, tuning: Tuning, args: Any) -> Any:
        if tuning.accesses == 4:
            if kind == "refused":
                raise CompileError("NVRTC refused it")
            return lambda *args: -case.fn(*args)
        return planned(case, tuning, args)

    monkeypatch.setattr(tunings, "_planned", spoilt)
    found = run_tune({"accesses 4": 0.1, "accesses 2": 0.8})
    assert found.choices["accesses"] == 2
    said = {of.refused for of in found.tried if of.choices.get("accesses") == 4}
    assert said == {
        "CompileError: NVRTC refused it" if kind == "refused" else "CompileError: its result is not that of the built-in choice"
    }
    assert [row[1] for row in found.rows if row[0].startswith("accesses 4")] == ["refused"] * 4


def test_memory_that_is_too_small_is_said() -> None:
    def timer(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(DeviceError, match=r"int8 of 4096 elements does not fit .* \(no room\)"):
        tune(GPU_NAME, "sm_90", CPU, sizes=(4096,), timer=timer)


# ---- the command


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["tune", *arguments], env={"NO_COLOR": "1"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.measure.wall.cuda_index", lambda device=None: 0)
    monkeypatch.setattr("wideload.cli.device_arch", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: GPU_NAME)
    monkeypatch.setattr(tunings, "tune", lambda name, arch, device, advance: run_tune({"accesses 2": 0.9}))


def test_without_a_gpu_it_says_so(path: Path) -> None:
    done = command()
    assert done.exit_code == 1
    assert "DeviceError" in done.stderr
    assert "CUDA device" in done.stderr
    assert not path.exists()


def test_what_is_chosen_is_kept_and_read_by_the_planner(gpu: None, path: Path) -> None:
    done = command()
    assert done.exit_code == 0, done.output
    assert "accesses 2, threads 128" in done.stdout
    assert str(path) in done.stdout
    (kept,) = read_tuned(path)
    assert (kept.gpu, kept.choices["accesses"]) == (GPU_NAME, 2)
    x = torch.empty(1 << 16, dtype=torch.bfloat16, device="meta")
    assert wl.ops.add.plan(x, x.clone(), target="h200").kernels[0].plan.variant.elements == 16
    shown = command("--show").stdout
    assert f"{path}: 1 GPUs tuned" in shown
    assert "measured on NVIDIA H200: wideload tune, 15 cases" in shown
    assert json.loads(command("--show", "--json").stdout)["kept"][0]["choices"]["accesses"] == 2
    assert json.loads(command("--reset", "--json").stdout) == {"path": str(path), "removed": True}
    assert not path.exists()
    assert wl.ops.add.plan(x, x.clone(), target="h200").kernels[0].plan.variant.elements == 8
    assert "there is no" in command("--reset").stdout


def test_json(gpu: None, path: Path) -> None:
    written = json.loads(command("--json").stdout)
    assert (written["gpu"], written["choices"]["accesses"], written["path"]) == (GPU_NAME, 2, str(path))
    assert len(written["scores"]) == 12 + 3 + 4 + 4


def test_the_built_in_table_is_shown_without_a_gpu() -> None:
    shown = command("--show").stdout
    for arch, tuning in BUILT_IN.items():
        assert f"{arch}, built in: accesses 1, " in shown
        assert tuning.source in shown


def test_a_damaged_file_is_said_and_can_be_removed(path: Path) -> None:
    path.write_text("{")
    shown = command("--show")
    assert shown.exit_code == 0
    assert "is no tuning" in shown.stderr
    assert "The built-in choices are taken" in shown.stderr
    assert "sm_90, built in" in shown.stdout
    assert command("--reset").exit_code == 0
    assert command("--show").exit_code == 0


def test_what_cannot_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command("--show", "--reset").exit_code == 2
    monkeypatch.delenv("WIDELOAD_TUNING")
    done = command()
    assert done.exit_code == 1
    assert "Name a file in WIDELOAD_TUNING" in done.stderr
    assert "no file" in command("--show").stdout


def test_records_are_shown_with_their_gpu(path: Path) -> None:
    write_tuned(TunedGpu("RTX 9", "sm_120", "measured on RTX 9", {"threads": 512}), path)
    assert "RTX 9, sm_120: accesses 1, narrowing_accesses 2, threads 512" in command("--show").stdout
