"""What a GPU's kernels are cut by: the built-in table, the file that a measurement leaves, and what a damaged one does."""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import tuned
from wideload.errors import DeviceError, WideloadError
from wideload.gpus import SM_LIMITS, find_target
from wideload.plan import ALLOWED, BUILT_IN, DEFAULT, THREADS, Tuning, built_in_tuning
from wideload.tuned import TunedGpu, read_tuned, remove_tuned, trying, tuned_path, tuning_for, tuning_of, write_tuned

pytestmark = pytest.mark.usefixtures("full_blocks")

CHOICES = {"accesses": 2, "threads": 256}
MINE = TunedGpu("NVIDIA H200", "sm_90", "measured on NVIDIA H200", CHOICES)
GPU = torch.device("cuda", 0)

add = wl.fuse(lambda x, y: x + y, name="add")


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    tuned._forget()
    yield
    tuned._forget()


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "folder" / "tuning.json"
    monkeypatch.setenv("WIDELOAD_TUNING", str(path))
    return path


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuned, "device_arch", lambda index: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")


# ---- the table


def test_every_architecture_has_a_record_that_says_what_it_rests_on() -> None:
    assert set(BUILT_IN) == {"sm_{}{}".format(*capability) for capability in SM_LIMITS if capability >= (7, 5)}
    assert all(arch == tuning.arch for arch, tuning in BUILT_IN.items())
    measured = [tuning.arch for tuning in BUILT_IN.values() if tuning.source.startswith("measured on ")]
    assert measured == ["sm_90"]
    assert all(tuning.source.startswith("public figures, not measured: ") for tuning in BUILT_IN.values() if tuning.arch not in measured)
    for name in ("results/dense-h200-455f4e3.json", "results/layouts-h200-455f4e3.json"):
        assert name in DEFAULT.source
        assert (Path(__file__).parents[2] / "benchmarks" / name).exists()


def test_every_choice_can_be_allowed_or_not() -> None:
    assert set(ALLOWED) == {field.name for field in dataclasses.fields(Tuning)} - {"arch", "source"}
    assert DEFAULT.choices == {
        "accesses": 1,
        "narrowing_accesses": 2,
        "threads": 128,
        "strided_elements": 4,
        "tile_bytes": 32768,
        "tile_threads": 512,
    }
    with pytest.raises(DeviceError, match="threads of a tuning for sm_90 is 96; allowed: 64, 128, 256, 512"):
        Tuning("sm_90", "", threads=96)
    assert built_in_tuning("sm_70").arch == "sm_75"
    assert built_in_tuning("sm_88").arch == "sm_87"


# ---- what it does to kernels


def planned(tuning: Tuning, f: wl.FusedFunction, *args: torch.Tensor) -> Any:
    with trying(tuning):
        (kernel,) = f.plan(*args, target="h200").kernels
    return kernel.plan


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_planner_follows_the_choices() -> None:
    x, y = meta(1 << 20), meta(1 << 20)
    plain, other = planned(DEFAULT, add, x, y), planned(dataclasses.replace(DEFAULT, accesses=4, threads=64), add, x, y)
    assert (plain.variant.elements, plain.variant.threads, plain.grid) == (8, 128, 1024)
    assert (other.variant.elements, other.variant.threads, other.grid) == (32, 64, 512)
    narrow = wl.fuse(lambda x: x.bfloat16())
    wide = meta(1 << 20, dtype=torch.float32)
    assert planned(dataclasses.replace(DEFAULT, narrowing_accesses=1), narrow, wide).variant.elements == 4
    strided = planned(dataclasses.replace(DEFAULT, strided_elements=8, threads=256), add, meta(64, 100)[:, ::7], meta(64, 15))
    assert (strided.variant.family, strided.variant.elements, strided.variant.threads) == ("strided", 8, 256)
    turned = wl.fuse(lambda x: x.t().contiguous())
    tile = planned(dataclasses.replace(DEFAULT, tile_bytes=16384, tile_threads=256), turned, meta(4096, 4096))
    assert (tile.variant.tile.columns * tile.variant.tile.lines, tile.variant.threads) == (8192, 256)


@pytest.mark.parametrize("threads", [64, 128, 256, 512])
def test_the_text_follows_the_threads(threads: int) -> None:
    """A block's size stands in the launch bounds and in where a block begins; room for 64 registers a thread stays."""
    with trying(dataclasses.replace(DEFAULT, threads=threads)):
        (kernel,) = add.plan(meta(1000), meta(1000), target="h200").kernels
        many = wl.fuse(lambda a, b, c, d: a + b + c + d).plan(*[meta(64, 4096) for _ in range(3)], meta(4096), target="h200").source
    assert f"__launch_bounds__({threads})" in kernel.source
    assert f"(long long)blockIdx.x * {threads * 8} + " in kernel.source
    assert f"__launch_bounds__({threads}, {1024 // threads})" in many
    assert THREADS == 128


def test_trying_ends_with_its_block() -> None:
    with pytest.raises(KeyError), trying(dataclasses.replace(DEFAULT, threads=64)):
        raise KeyError
    assert tuning_of(torch.device("cpu")) is DEFAULT


# ---- the file


def test_a_gpu_is_planned_for_by_its_own_record(path: Path, gpu: None) -> None:
    assert tuning_of(GPU) is BUILT_IN["sm_90"]
    write_tuned(MINE, path)
    assert tuning_of(GPU) == Tuning("sm_90", "measured on NVIDIA H200", **CHOICES)
    assert tuning_for(find_target("h200")).accesses == 2
    assert tuning_for(find_target("h100")) is BUILT_IN["sm_90"]  # another GPU of the same architecture
    assert tuning_for(find_target("sm_90")) is BUILT_IN["sm_90"]  # no GPU is named
    assert add.plan(meta(64), meta(64), target="h200").kernels[0].plan.variant.threads == 256
    assert add.plan(meta(64), meta(64), target="a100").kernels[0].plan.variant.threads == 128


def test_a_record_replaces_its_own_and_leaves_the_others(path: Path) -> None:
    other = dataclasses.replace(MINE, gpu="Unknown GPU 9000", arch="sm_120")
    for gpu in (MINE, other, dataclasses.replace(MINE, choices={"threads": 512})):
        write_tuned(gpu, path)
    assert read_tuned(path) == (other, dataclasses.replace(MINE, choices={"threads": 512}))
    assert tuning_for(find_target("rtx 5090")) is BUILT_IN["sm_120"]
    assert [file.name for file in path.parent.iterdir()] == ["tuning.json"]
    assert remove_tuned(path)
    assert not remove_tuned(path)
    assert read_tuned(path) == ()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is no tuning .JSONDecodeError"),
        ("[]", "is no tuning .TypeError"),
        pytest.param("[" * 100_000, "is no tuning .ValueError", id="nested too deep"),
        ("{}", "is no tuning .KeyError: 'format'"),
        ('{"format": 9, "gpus": []}', "it is of format 9, and this wideload reads 1"),
        (json.dumps({"format": 1, "gpus": [{**dataclasses.asdict(MINE), "arch": 90}]}), "is no tuning"),
        (json.dumps({"format": 1, "gpus": [{**dataclasses.asdict(MINE), "choices": {"threads": 100}}]}), "threads .* is 100; allowed: 64"),
        (json.dumps({"format": 1, "gpus": [{**dataclasses.asdict(MINE), "choices": {"waves": 1}}]}), "chooses waves; allowed: accesses"),
    ],
)
def test_a_damaged_file_is_said_and_costs_no_call(content: str, said: str, path: Path, gpu: None) -> None:
    path.parent.mkdir()
    path.write_text(content)
    with pytest.warns(RuntimeWarning, match=rf"(?s){said}.*wideload tune --reset"):
        assert tuning_of(GPU) is BUILT_IN["sm_90"]
    assert tuning_for(find_target("h200")) is BUILT_IN["sm_90"]  # warned of once: a second warning would be an error
    with pytest.raises(WideloadError, match=said):
        read_tuned(path)
    tuned._forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning_of(GPU) is BUILT_IN["sm_90"]
    write_tuned(MINE, path)  # begun anew
    assert read_tuned(path) == (MINE,)


@pytest.mark.usefixtures("impatient")
def test_a_pipe_in_the_place_of_the_file_is_not_waited_for(path: Path, gpu: None) -> None:
    path.parent.mkdir()
    os.mkfifo(path)
    with pytest.warns(RuntimeWarning, match="cannot be read: it is no regular file"):
        assert tuning_of(GPU) is BUILT_IN["sm_90"]
    write_tuned(MINE, path)
    assert read_tuned(path) == (MINE,)


def test_where_the_file_lies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WIDELOAD_TUNING", raising=False)
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    assert tuned_path() is None
    assert read_tuned(None) == ()
    monkeypatch.setenv("WIDELOAD_CACHE", "1")
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path))
    assert tuned_path() == tmp_path / "tuning.json"
    monkeypatch.setenv("WIDELOAD_TUNING", str(tmp_path / "other.json"))
    assert tuned_path() == tmp_path / "other.json"


def test_what_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WideloadError, match=r"cannot be written: .* Name another file in WIDELOAD_TUNING"):
        write_tuned(MINE, tmp_path / "file" / "tuning.json")
    with pytest.raises(WideloadError, match="cannot be removed"):
        remove_tuned(tmp_path)
    with pytest.raises(WideloadError, match="cannot be read"):
        read_tuned(tmp_path)
