"""The yardstick on a GPU: every kernel moves every byte, ceilings come from the set alone, and a roofline is measured once."""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

import pytest
import torch

from wideload.errors import DeviceError
from wideload.measure.roofline import roofline
from wideload.measure.wall import MIXES, Mix, measure_wall, movers, prepare_movers, time_cold

pytestmark = pytest.mark.gpu

module = importlib.import_module("wideload.measure.roofline")  # the package's attribute of this name may be the function

MIB = 2**20
KEY = (0x243F6A88, 0x85A308D3 - 2**32, 0x13198A2E, 0x03707344)
POISON = 0x7FC0DEAD


@pytest.mark.parametrize("mix", [mix for mix in MIXES if mix.writes], ids=lambda mix: mix.name)
def test_every_kernel_of_the_set_writes_every_byte(mix: Mix) -> None:
    """The outputs of each kernel are the xor of the inputs in every word; a fill's are the same from all kernels, and no constant."""
    launches, nbytes = prepare_movers(mix, 3 * MIB, torch.cuda.current_device())
    assert nbytes <= 3 * MIB
    fills = []
    for name, launch in launches.items():
        assert isinstance(launch, functools.partial)
        _, _, source, target, pitch = launch.args
        assert nbytes == (mix.reads + mix.writes) * pitch * 16
        target.fill_(POISON)
        launch()
        if mix.reads:
            streams = source.view(mix.reads, pitch * 4)
            expected = functools.reduce(torch.bitwise_xor, streams.unbind())
        else:
            fills.append(target[: pitch * 4].clone())
            expected = fills[0]
        assert torch.equal(target.view(mix.writes, pitch * 4), expected.expand(mix.writes, -1)), name
    for fill in fills:
        assert fill.unique().numel() > fill.numel() // 2


def test_every_kernel_of_the_set_reads_every_byte() -> None:
    """A read-only kernel stores once the xor of what a thread reads is the key: so one vector among zeros, anywhere, must be seen."""
    launches, _ = prepare_movers(Mix(1, 0), MIB, torch.cuda.current_device())
    key = torch.tensor(KEY, dtype=torch.int32, device="cuda")
    for name, launch in launches.items():
        assert isinstance(launch, functools.partial)
        _, _, source, target, pitch = launch.args
        for position in (0, 1, 255, 256, pitch // 2 + 77, pitch - 1):
            for vector, seen in ((key, True), (key ^ 1, False)):
                source.zero_()
                target.zero_()
                source.view(pitch, 4)[position] = vector
                launch()
                assert torch.equal(target, key) == seen, f"{name} at {position}"


def test_a_ceiling_is_the_lowest_median_of_its_set() -> None:
    wall = measure_wall(mixes=[Mix(2, 1), Mix(1, 0)], nbytes=48 * MIB, num_samples=5)
    assert wall.device == torch.cuda.get_device_name()
    for ceiling, mix in zip(wall.ceilings, (Mix(2, 1), Mix(1, 0)), strict=True):
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        assert set(ceiling.medians_us) == {mover.name for mover in movers(mix, arch)}
        assert ceiling.time_us == min(ceiling.medians_us.values()) == ceiling.medians_us[ceiling.mover]
        assert len(ceiling.samples_us) == 5
        assert 0 < min(ceiling.samples_us) <= ceiling.time_us <= max(ceiling.samples_us)
        assert ceiling.nbytes <= 48 * MIB


def test_a_call_that_waits_for_the_gpu_is_not_timed() -> None:
    x = torch.ones(1000, device="cuda")
    with pytest.raises(DeviceError, match="waits"):
        time_cold({"quick": lambda: x * 2, "waits": lambda: (x * 2).sum().item()}, torch.cuda.current_device(), 3)


def test_the_current_stream_and_device_stay_as_they_were() -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        measure_wall(mixes=[Mix(1, 1)], nbytes=4 * MIB, num_samples=3)
        assert torch.cuda.current_stream() == stream


@pytest.mark.gpus(2)
def test_another_device_than_the_current_one_is_measured() -> None:
    assert torch.cuda.current_device() == 0
    wall = measure_wall("cuda:1", mixes=[Mix(1, 1)], nbytes=4 * MIB, num_samples=3)
    assert wall.device == torch.cuda.get_device_name(1)
    assert torch.cuda.current_device() == 0


@pytest.mark.big(6)
def test_a_roofline_is_measured_once_and_again_when_its_file_is_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    roof = roofline()
    print(roof)
    assert set(roof.ceilings) == {mix.name for mix in MIXES}
    assert {figure.kind for figure in (*roof.ceilings.values(), *roof.launch_floor.values())} == {"measured"}
    assert all(figure.value > 0 for figure in (*roof.ceilings.values(), *roof.launch_floor.values(), *roof.ridges.values()))
    assert roof.arch == "sm_{}{}".format(*torch.cuda.get_device_capability())
    assert roof.uuid
    assert roof.driver
    assert all(figure.value <= roof.nominal.value for figure in roof.ceilings.values()) or any(
        "above nominal" in note for note in roof.notes
    )

    measured = []
    monkeypatch.setattr(module, "measure_wall", lambda index: measured.append(index) or measure_wall(index, nbytes=48 * MIB, num_samples=3))
    assert roofline("cuda:0") == roof
    assert measured == []
    (path,) = (tmp_path / "wideload").iterdir()
    assert json.loads(path.read_text())["roofline"] == roof.to_dict()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    again = roofline()
    assert measured == [0]
    assert (again.uuid, again.driver, again.nominal) == (roof.uuid, roof.driver, roof.nominal)
    assert roofline() == again
