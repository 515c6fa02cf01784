"""The table of GPUs, and what a name stands for."""

from __future__ import annotations

import csv
from importlib import resources
from typing import Any

import pytest

from wideload.errors import DeviceError
from wideload.gpus import GPUS, MIN_COMPUTE_CAPABILITY, SM_LIMITS, Target, bytes_in_flight_target, find_target, sm_limits


def test_every_row_of_the_csv_has_its_six_fields() -> None:
    rows = list(csv.reader((resources.files("wideload") / "gpus.csv").read_text(encoding="utf-8").splitlines()))
    assert [len(row) for row in rows] == [6] * len(rows)
    assert len(GPUS) == len(rows) - 1
    assert len({gpu.name for gpu in GPUS}) == len(GPUS)
    assert all(gpu.memory_bandwidth_gbps > 0 and gpu.l2_mib > 0 and gpu.sms > 0 and gpu.source for gpu in GPUS)


def test_figures_of_a_known_gpu() -> None:
    h200 = next(gpu for gpu in GPUS if gpu.name == "H200 SXM")
    assert (h200.compute_capability, h200.arch) == ((9, 0), "sm_90")
    assert (h200.memory_bandwidth_gbps, h200.l2_mib, h200.sms) == (4800.0, 60.0, 132)
    with pytest.raises(AttributeError):
        h200.sms = 1  # type: ignore[misc]


def test_limits_of_an_sm() -> None:
    # CUDA Programming Guide, technical specifications per compute capability.
    assert (sm_limits("sm_90").blocks, sm_limits("sm_90").threads, sm_limits("sm_90").shared_bytes) == (32, 2048, 233472)
    assert sm_limits("sm_90").shared_bytes_per_block == 232448
    assert (sm_limits("sm_86").blocks, sm_limits("sm_86").threads, sm_limits("sm_86").shared_bytes_per_block) == (16, 1536, 101376)
    assert (sm_limits("sm_75").blocks, sm_limits("sm_75").threads, sm_limits("sm_75").shared_bytes_per_block) == (16, 1024, 65536)
    assert {limits.registers for limits in SM_LIMITS.values()} == {65536}


def test_every_gpu_has_limits_of_its_sm() -> None:
    assert {gpu.compute_capability for gpu in GPUS} <= SM_LIMITS.keys()


@pytest.mark.parametrize(
    ("compute_capability", "kib"), [((7, 0), 12), ((7, 5), 12), ((8, 0), 16), ((8, 9), 16), ((9, 0), 48), ((10, 0), 64), ((12, 1), 64)]
)
def test_bytes_in_flight_are_cubs(compute_capability: tuple[int, int], kib: int) -> None:
    assert bytes_in_flight_target(compute_capability) == kib * 1024


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200", "H200 SXM"),
        ("H200 SXM", "H200 SXM"),
        ("sxm h200", "H200 SXM"),
        ("h200sxm", "H200 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("h100", "H100 SXM"),  # the NVL has more bandwidth
        ("H100-PCIe", "H100 PCIe"),
        ("a100", "A100 80GB SXM"),
        ("A100-SXM4-80GB", "A100 80GB SXM"),
        ("a100 40gb", "A100 40GB"),
        ("A100 PCIe", "A100 80GB PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("rtx5080", "RTX 5080"),
        ("b200", "B200"),  # not GB200
        ("a10", "A10"),  # not A100
        ("t4", "T4"),
    ],
)
def test_a_loose_name_finds_its_gpu(name: str, found: str) -> None:
    target = find_target(name)
    assert target.gpu is not None
    assert target.gpu.name == found
    assert (target.arch, target.compute_capability) == (target.gpu.arch, target.gpu.compute_capability)


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.compute_capability >= MIN_COMPUTE_CAPABILITY], ids=lambda gpu: gpu.name)
def test_a_full_name_finds_that_very_gpu(gpu: object) -> None:
    assert find_target(gpu.name).gpu is gpu  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "arch", "compute_capability"),
    [
        ("sm_80", "sm_80", (8, 0)),
        ("90", "sm_90", (9, 0)),
        ("compute_90", "sm_90", (9, 0)),
        ("8.9", "sm_89", (8, 9)),
        ("sm_121", "sm_121", (12, 1)),
    ],
)
def test_an_architecture_is_a_target_without_a_gpu(name: str, arch: str, compute_capability: tuple[int, int]) -> None:
    assert find_target(name) == Target(arch, None)
    assert find_target(name).compute_capability == compute_capability


@pytest.mark.parametrize("name", [90, None, ["h200"], b"h200"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(DeviceError, match=r"a target is .*; allowed: a GPU or an architecture by its name"):
        find_target(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rtx 4091", r"no GPU is called 'rtx 4091' \(did you mean 'RTX 4090'\?\).*H200 SXM.*sm_75"),
        ("h20", r"no GPU is called 'h20' \(did you mean 'H200 SXM'\?\)"),
        ("", "no GPU is called ''"),
        ("nvidia", "no GPU is called 'nvidia'"),
        ("sm_90a", "no GPU is called 'sm_90a'.*sm_90, sm_100"),
        ("rtx", r"fits GPUs of several architectures: RTX 2080 Ti \(sm_75\), .*name one of them"),
        ("v100", "V100 SXM2 is sm_70; wideload needs sm_75 or newer"),
        ("sm_70", "'sm_70' is not an architecture.*allowed are sm_75, sm_80"),
        ("sm_95", "'sm_95' is not an architecture"),
        ("sm_9", "'sm_9' is not an architecture"),
    ],
)
def test_what_is_unknown_is_refused_with_what_is_allowed(name: str, said: str) -> None:
    with pytest.raises(DeviceError, match=said):
        find_target(name)


def test_limits_of_an_unknown_architecture_are_refused() -> None:
    with pytest.raises(DeviceError, match="'hopper' is not an architecture that wideload supports"):
        sm_limits("hopper")
