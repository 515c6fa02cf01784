"""The least time for a number of bytes, against the division done by hand."""

from __future__ import annotations

import pytest

from wideload.analyze.bound import least_time_us, least_times_us
from wideload.gpus import GPUS, find_target


@pytest.mark.parametrize(
    ("nbytes", "name", "time_us"),
    [
        (4_800_000_000_000, "H200 SXM", 1e6),  # 4.8 TB at 4.8 TB/s: one second
        (3 * 2 * 2**28, "H200 SXM", 335.54432),
        (2_039_000, "A100 80GB SXM", 1.0),
        (0, "T4", 0.0),
    ],
)
def test_least_time_is_bytes_over_nominal_bandwidth(nbytes: int, name: str, time_us: float) -> None:
    gpu = find_target(name).gpu
    assert gpu is not None
    assert least_time_us(nbytes, gpu) == pytest.approx(time_us, rel=1e-12)


def test_every_supported_gpu_has_its_bound_and_the_fastest_comes_first() -> None:
    rows = least_times_us(10**9)
    assert {gpu.name for gpu, _ in rows} == {gpu.name for gpu in GPUS} - {"V100 SXM2", "V100S"}
    assert rows[0][0].name == "GB200"
    assert rows[-1][0].name == "Jetson AGX Orin 64GB"
    # The same bytes on each: time times bandwidth gives them back.
    assert [time_us * gpu.memory_bandwidth_gbps * 1e3 for gpu, time_us in rows] == pytest.approx([10**9] * len(rows), rel=1e-12)
    assert [time_us for _, time_us in rows] == sorted(time_us for _, time_us in rows)
