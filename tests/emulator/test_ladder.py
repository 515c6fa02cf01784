"""The rungs' own text, run on the CPU at the articles' sizes, under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest

from tests.emulator.emulator import EmulatorError, build, run_on
from wideload.ladder.check import check_rung
from wideload.ladder.rungs import RUNGS, THREADS, Launch, Rung, find_rungs, read_rung


def run_emulated(rung: Rung, launches: Iterable[Launch], edit: tuple[str, str] = ("", "")) -> None:
    """With ``edit``, the text of the rung is spoilt."""
    assert edit[0] in read_rung(rung.file)
    program = build(read_rung(rung.file).replace(*edit, 1) if edit[0] else read_rung(rung.file))
    for launch in launches:
        if math.prod(launch.grid):
            x, y, z = (*launch.grid, 1, 1)[:3]
            run_on(program, launch.kernel, (x, y, z), (THREADS, 1, 1), launch.arguments)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_every_rung_is_right(rung: Rung) -> None:
    assert check_rung(rung, "cpu", run_emulated) == ()


@pytest.mark.parametrize(
    ("name", "edit", "fault"),
    [
        ("vector_add_f32", ("if (i < n) ", ""), "heap-buffer-overflow|use-after-poison"),
        ("vector_add_f32", ("x[i] + y[i]", "x[i] - y[i]"), "results differ"),
        ("vector_add_bf16", ("(word >> 16 & 1)", "1"), "results differ"),
        ("add_bf16_vec8", ("blockIdx.x == 0 && last < n", "false"), "results differ"),
        ("add_bf16_vec8", ("n / 8", "(n + 7) / 8"), "heap-buffer-overflow|use-after-poison"),
        ("add_bf16_vec8_grid", ("i += num_threads", "i += 2 * num_threads"), "results differ"),
        ("strided2d_transposed", ("column * x_column", "column"), "results differ"),
        ("bias_gelu_grid", ("i % columns", "0"), "results differ"),
        ("add_f32_vec4", ("i += num_threads", "i += num_threads + 1"), "results differ"),
        ("bias_gelu_2d", ("row += gridDim.y", "row += gridDim.y + 1"), "results differ"),
        ("stride_2", ("i * stride", "i"), "results differ"),
    ],
)
def test_what_is_spoilt_is_found(name: str, edit: tuple[str, str], fault: str) -> None:
    (rung,) = find_rungs([name])

    def run(rung: Rung, launches: Iterable[Launch]) -> None:
        run_emulated(rung, launches, edit)

    try:
        found = " ".join(check_rung(rung, "cpu", run))
    except EmulatorError as error:
        found = str(error)
    assert any(part in found for part in fault.split("|")), found


def test_bytes_beside_the_result_are_seen() -> None:
    (rung,) = find_rungs(["stride_1"])

    def run(rung: Rung, launches: Iterable[Launch]) -> None:
        for launch in launches:
            out: Any = launch.arguments[1]
            out.copy_(launch.arguments[0])
            out.untyped_storage()[out.storage_offset() * out.element_size() - 1] = 0

    faults = check_rung(rung, "cpu", run)
    assert len(faults) == 2 * len(rung.shapes)
    assert all(fault.endswith("bytes beside the result were written") for fault in faults)
