"""What a test may ask of the machine: a test that needs more than is there is skipped, and says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

from wideload import native

os.environ["WIDELOAD_CACHE"] = "0"  # every test compiles what it looks at; those of the cache turn it on, in a folder of their own


def pytest_runtest_setup(item: pytest.Item) -> None:
    wants = {marker.name: marker.args for marker in item.iter_markers()}
    if not wants.keys() & {"gpu", "gpus", "big"}:
        return
    num_gpus, wanted_gpus = torch.cuda.device_count(), wants.get("gpus", (1,))[0]
    if num_gpus < wanted_gpus:
        pytest.skip(f"needs {wanted_gpus} CUDA devices, found {num_gpus}")
    free_gib, wanted_gib = torch.cuda.mem_get_info()[0] / 2**30, wants.get("big", (0,))[0]
    if free_gib < wanted_gib:
        pytest.skip(f"needs {wanted_gib} GiB of free GPU memory, found {free_gib:.1f}")


@pytest.fixture
def impatient() -> Iterator[None]:
    """What waits for ever fails."""

    def fail(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def full_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are cut as for much work, also where tensors are small enough for an emulator."""
    for family in ("tile", "strided"):
        monkeypatch.setattr(f"wideload.plan.{family}.share_of_block", lambda count: 1 << 40)


@pytest.fixture(params=["python", "native"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By Python's guards and launchers, and by those in C, whichever of them this process has made until now."""
    state = native.native_state(wait=True)
    assert state.is_ready, state.fault
    if request.param == "python":
        off = native._Module()
        off._fault, off._thread = "a test", native._module._thread
        monkeypatch.setattr(native, "_module", off)
    return str(request.param)
