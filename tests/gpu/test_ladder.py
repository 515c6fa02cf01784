"""The rungs on a GPU: right at the articles' sizes, and timed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import pytest
import torch

from wideload.ladder.check import check_rung, run_launches
from wideload.ladder.climb import climb
from wideload.ladder.rungs import RUNGS, Launch, Rung, find_rungs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_is_right(rung: Rung) -> None:
    assert check_rung(rung, "cuda") == ()


def test_a_kernel_that_leaves_the_tail_is_found() -> None:
    (rung,) = find_rungs(["add_bf16_vec8"])

    def run(rung: Rung, launches: Iterable[Launch]) -> None:
        run_launches(
            rung, [dataclasses.replace(launch, arguments=(*launch.arguments[:3], launch.arguments[3] // 8 * 8)) for launch in launches]
        )  # type: ignore[operator]

    faults = check_rung(rung, "cuda", run)
    assert any("of 7:" in fault for fault in faults)
    assert not any("of 8:" in fault for fault in faults)


def test_what_is_climbed_is_timed() -> None:
    rungs = [
        dataclasses.replace(rung, shape=(1 << 26,)) for rung in find_rungs(["add_bf16_naive", "add_bf16_vec8", "silu_three", "silu_fused"])
    ]
    ladder = climb(rungs, device=torch.device("cuda", torch.cuda.current_device()), max_seconds=0.3)
    assert ladder.faults == ()
    for row in ladder.rows:
        assert row.measured is not None
        assert row.measured.time_us
        assert row.measured.torch_us
        assert 0 < (row.measured.share_of_nominal or 0) <= 1
        assert 0 < (row.measured.share_of_wall or 0) < 1.1
    assert len({len(ladder.cells(row)) for row in ladder.rows} | {len(ladder.columns)}) == 1
