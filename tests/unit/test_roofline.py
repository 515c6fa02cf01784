"""The roofline's arithmetic against published peaks, its cross-check, and its cache; what needs no GPU."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import stat
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from wideload.errors import DeviceError
from wideload.gpus import MIN_COMPUTE_CAPABILITY, SM_LIMITS
from wideload.measure.roofline import Attributes, Figure, Roofline, find_ridges, nominal_bandwidth, roofline, table_bandwidth
from wideload.measure.wall import MIXES, Ceiling, Wall
from wideload.store import inspect_folder

module = importlib.import_module("wideload.measure.roofline")  # the package's attribute of this name may be the function

H200 = Attributes("NVIDIA H200", "GPU-1", "580.159.04", (9, 0), 132, 1_980_000, 3_201_000, 6144)
A100 = Attributes("NVIDIA A100-SXM4-80GB", "GPU-2", "580.159.04", (8, 0), 108, 1_410_000, 1_593_000, 5120)
LAUNCHES = {"in a graph": Figure(1.0, "us", "measured", "a test"), "single": Figure(2.5, "us", "measured", "a test")}


def wall_of(gbps: float) -> Wall:
    """Every mix at one bandwidth: 1 GB in the time that it takes."""
    time_us = 1e6 / gbps
    return Wall("GPU", tuple(Ceiling(mix, 10**9, time_us, "direct 1x256", (time_us,) * 30, {"direct 1x256": time_us}) for mix in MIXES))


def assemble(attributes: Attributes, gbps: float = 4300.0) -> Roofline:
    return module._assemble(attributes, wall_of(gbps), LAUNCHES)


@pytest.mark.parametrize(
    ("attributes", "gbps"),
    [
        (H200, 4917),  # what its attributes gave; sheet 4800
        (A100, 2039),
        (replace(A100, memory_clock_khz=1_215_000), 1555),  # A100 40GB
        (replace(H200, memory_clock_khz=5_001_000, memory_bus_bits=256), 320),  # T4
    ],
)
def test_nominal_bandwidth_is_that_of_the_sheet(attributes: Attributes, gbps: float) -> None:
    figure = nominal_bandwidth(attributes)
    assert figure is not None
    assert figure.value == pytest.approx(gbps, rel=1e-3)
    assert (figure.unit, figure.kind) == ("GB/s", "computed")
    assert f"{attributes.memory_bus_bits} bits" in figure.source


@pytest.mark.parametrize("silent", [{"memory_clock_khz": 0}, {"memory_bus_bits": 0}])
def test_what_the_driver_does_not_tell_comes_from_the_table_or_is_an_error(silent: dict[str, int]) -> None:
    attributes = replace(H200, **silent)  # type: ignore[arg-type]
    assert nominal_bandwidth(attributes) is None
    assert assemble(attributes).nominal == Figure(4800.0, "GB/s", "assumed", table_source())
    with pytest.raises(DeviceError, match=r"no memory clock.*Mystery"):
        assemble(replace(attributes, name="Mystery"))


def table_source() -> str:
    figure = table_bandwidth(H200)
    assert figure is not None
    return figure.source


@pytest.mark.parametrize(
    ("attributes", "gbps"),
    [
        (H200, 4800.0),
        (A100, 2039.0),
        (replace(A100, name="NVIDIA A100 80GB PCIe"), 1935.0),
        (replace(H200, name="NVIDIA H200 NVL"), None),  # not in the table, though H200 is
        (replace(H200, name="NVIDIA H100", sms=114), None),  # would be the SXM, which has 132 SMs
        (replace(H200, name="Mystery"), None),
        (replace(H200, compute_capability=(8, 0)), None),
    ],
)
def test_the_table_answers_to_the_exact_gpu_only(attributes: Attributes, gbps: float | None) -> None:
    figure = table_bandwidth(attributes)
    assert (figure and figure.value) == gbps
    assert figure is None or figure.source.startswith("gpus.csv, ")


@pytest.mark.parametrize(
    ("compute_capability", "sms", "clock_mhz", "unit", "tera_ops"),
    [
        ((7, 5), 40, 1590, "fp32", 8.1),  # T4
        ((8, 0), 108, 1410, "fp32", 19.5),  # A100
        ((8, 0), 108, 1410, "bf16 tensor", 312),
        ((8, 6), 82, 1695, "fp32", 35.6),  # RTX 3090
        ((8, 6), 84, 1740, "bf16 tensor", 149.7),  # A40
        ((8, 7), 16, 1300, "fp32", 5.3),  # Jetson AGX Orin
        ((8, 9), 142, 2505, "fp32", 91.1),  # RTX 6000 Ada
        ((8, 9), 142, 2505, "bf16 tensor", 364.2),
        ((9, 0), 132, 1980, "fp32", 66.9),  # H100 SXM
        ((9, 0), 132, 1830, "bf16 tensor", 989.4),
        ((12, 0), 188, 2617, "fp32", 126),  # RTX PRO 6000 Blackwell
        ((12, 0), 188, 2617, "bf16 tensor", 503.8),
    ],
)
def test_ridges_are_the_published_peak_over_bandwidth(
    compute_capability: tuple[int, int], sms: int, clock_mhz: int, unit: str, tera_ops: float
) -> None:
    attributes = replace(H200, compute_capability=compute_capability, sms=sms, sm_clock_khz=clock_mhz * 1000)
    ridge = find_ridges(attributes, bandwidth_gbps=2000.0)[unit]
    assert ridge.value == pytest.approx(tera_ops / 2, rel=0.01)
    assert (ridge.unit, ridge.kind) == ("FLOP/B", "computed")
    assert f"{sms} SMs x {clock_mhz} MHz" in ridge.source


def test_special_functions_have_a_ridge_of_sixteen_a_clock() -> None:
    ridge = find_ridges(H200, bandwidth_gbps=4800.0)["special functions"]
    assert ridge.value == pytest.approx(132 * 1.98e9 * 16 / 4.8e12, rel=1e-12)
    assert ridge.unit == "op/B"


def test_no_ridge_is_invented() -> None:
    assert "bf16 tensor" not in find_ridges(replace(H200, compute_capability=(7, 5)), 320.0)
    assert find_ridges(replace(H200, compute_capability=(99, 0)), 1000.0) == {}
    assert find_ridges(replace(H200, sm_clock_khz=0), 1000.0) == {}


def test_every_architecture_that_is_supported_has_its_rates() -> None:
    assert set(module._RATES) == {capability for capability in SM_LIMITS if capability >= MIN_COMPUTE_CAPABILITY}


def test_the_printed_table_has_a_kind_and_a_source_for_every_figure() -> None:
    roof = assemble(H200)
    lines = str(roof).splitlines()
    assert lines[0] == "NVIDIA H200 (GPU-1), driver 580.159.04, sm_90"
    assert len(lines) == 1 + 2 + len(MIXES) + 2 + 3
    for line in lines[1:]:
        assert any(f" {kind} " in line for kind in ("measured", "computed", "assumed")), line
    assert "4300" in next(line for line in lines if "ceiling 2R1W" in line)
    assert "87.5% of nominal" in next(line for line in lines if "ceiling 2R1W" in line)
    assert roof.notes == ()


def test_ceilings_are_found_by_bytes() -> None:
    roof = assemble(H200)
    assert roof.ceiling(4, 2) is roof.ceilings["2R1W"]
    assert set(roof.ceilings) == {"1R1W", "2R1W", "3R1W", "3R2W", "4R3W", "1R2W", "1R0W", "0R1W"}


@pytest.mark.parametrize(
    ("attributes", "gbps", "note"),
    [
        (replace(H200, memory_clock_khz=3_300_000), 4300.0, r"attributes say 5069 GB/s, gpus.csv 4800 \(\+6%\)"),
        (replace(H200, memory_clock_khz=2_900_000), 4300.0, r"\(-7%\): one of them is wrong"),
        (replace(H200, name="Mystery"), 4300.0, "could not be checked"),
        (H200, 5000.0, "ceiling 1R0W is above nominal"),
    ],
)
def test_what_does_not_fit_together_is_said(attributes: Attributes, gbps: float, note: str) -> None:
    roof = assemble(attributes, gbps)
    assert any(re.search(note, found) for found in roof.notes)
    assert f"note: {roof.notes[0]}" in str(roof)


def test_a_difference_of_less_than_five_percent_is_no_note() -> None:
    for memory_clock_khz in (2_990_000, 3_270_000):  # 4593 and 5023 GB/s
        assert assemble(replace(H200, memory_clock_khz=memory_clock_khz)).notes == ()


def test_a_roofline_survives_json() -> None:
    for roof in (assemble(H200), assemble(replace(H200, name="Mystery"))):
        assert json.loads(json.dumps(roof.to_dict())) == roof.to_dict()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A GPU of paper: every measurement of it is one more entry of the list."""
    measured: list[str] = []

    def measure_wall(index: int) -> Wall:
        measured.append("wall")
        return wall_of(4300.0 + len(measured))

    monkeypatch.delenv("WIDELOAD_CACHE", raising=False)
    monkeypatch.delenv("WIDELOAD_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "cuda_index", lambda device: 0)
    monkeypatch.setattr(module, "_read_attributes", lambda index: H200)
    monkeypatch.setattr(module, "measure_wall", measure_wall)
    monkeypatch.setattr(module, "_measure_launches", lambda index: LAUNCHES)
    return measured


def test_a_gpu_is_measured_once_for_each_driver(gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = roofline()
    assert roofline() == first
    assert len(gpu) == 1
    assert [path.name for path in (tmp_path / "wideload").iterdir()] == ["roofline-GPU-1-580.159.04.json"]
    assert roofline(refresh=True) != first
    assert len(gpu) == 2
    monkeypatch.setattr(module, "_read_attributes", lambda index: replace(H200, driver="590.10.01"))
    roofline()
    assert len(gpu) == 3
    assert len(list((tmp_path / "wideload").iterdir())) == 2


def test_a_roofline_lies_in_the_cache_folder_and_nowhere_where_it_is_off(
    gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path / "own"))
    before = os.umask(0o002)
    try:
        first = roofline()
    finally:
        os.umask(before)
    assert roofline() == first
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["roofline-GPU-1-580.159.04.json"]
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700  # what the kernels' cache refuses otherwise
    assert inspect_folder().fault is None
    monkeypatch.setenv("WIDELOAD_CACHE", "0")
    assert roofline() != first
    assert (len(gpu), [path.name for path in tmp_path.iterdir()]) == (2, ["own"])


def test_a_roofline_that_cannot_be_written_leaves_nothing(gpu: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    assert roofline().ceilings
    assert list((tmp_path / "wideload").iterdir()) == []


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "[" * 100_000,
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "\0" * len(text),
        lambda text: text[:-1],
        lambda text: "[]",
        lambda text: text.replace("wideload.roofline/1", "wideload.roofline/0"),
        lambda text: text.replace('"kernels": "', '"kernels": "0'),
        lambda text: text.replace('"ceilings"', '"cellars"'),
        lambda text: text.replace('"value"', '"worth"', 1),
        lambda text: text.replace('"uuid"', '"guid"'),
        lambda text: text.replace('"device"', '"device_name"'),
    ],
)
def test_a_damaged_or_older_file_is_measured_again(damage: object, gpu: list[str], tmp_path: Path) -> None:
    roofline()
    path = tmp_path / "wideload" / "roofline-GPU-1-580.159.04.json"
    broken = damage(path.read_text())  # type: ignore[operator]
    assert broken != path.read_text()
    path.write_text(broken)
    second = roofline()
    assert len(gpu) == 2
    assert roofline() == second  # and written anew
    assert len(gpu) == 2


def test_a_folder_that_cannot_be_written_costs_only_the_cache(gpu: list[str], tmp_path: Path) -> None:
    (tmp_path / "wideload").write_text("a file where the folder should be")
    assert roofline().ceilings.keys() == roofline().ceilings.keys()
    assert len(gpu) == 2


def test_without_a_gpu_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"torch sees none.*NVIDIA GPU"):
        roofline()
