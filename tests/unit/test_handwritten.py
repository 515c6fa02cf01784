"""Explanations of hand-written kernels: figures by hand, and the true cause of kernels that were spoilt on purpose."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import explained
import wideload as wl
from spoilt import SOURCES, Spoilt, spoilt_kernels
from wideload.analyze.explain import Explanation
from wideload.cli import app

H200_SMS = 132
N = 1 << 24
HEAD = 'extern "C" __global__ void'
INDEX = "int i = blockIdx.x * blockDim.x + threadIdx.x;"
SCALE4 = wl.raw(
    f"{HEAD} scale(const float4* x, float4* y, int n) {{ {INDEX} if (i < n) {{ float4 v = x[i]; v.x *= 2; y[i] = v; }} }}",
    "scale",
    grid=lambda x, y, n: -(-n // 256),
)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("spoilt", spoilt_kernels(H200_SMS), ids=lambda spoilt: spoilt.name)
def test_the_first_verdict_is_the_true_cause(spoilt: Spoilt) -> None:
    explanation = spoilt.kernel.explain(*spoilt.arguments(meta), target="h200")
    assert explanation.verdicts[0].limit == spoilt.cause, str(explanation)
    assert explanation.verdicts[0].effect.value > 1.3
    assert explanation.verdicts[-1].limit == "memory"


def test_every_spoilt_kernel_is_explained() -> None:
    assert {spoilt.name for spoilt in spoilt_kernels(H200_SMS)} == SOURCES.keys()
    assert len(SOURCES) >= 12


def test_a_kernel_that_is_not_spoilt_has_no_limit_but_memory() -> None:
    explanation = SCALE4.explain(meta(4 * N), meta(4 * N), N, target="h200")
    assert [verdict.limit for verdict in explanation.verdicts] == ["memory"]
    assert (explanation.bytes_read.value, explanation.bytes_written.value, explanation.moved.value) == (16 * N, 16 * N, 32 * N)
    assert explanation.efficiency is not None
    assert explanation.efficiency.value == 1.0
    (kernel,) = explanation.kernels
    assert [(a.kind, a.width_bits, a.count) for a in kernel.accesses] == [("load", 128, 1), ("store", 128, 1)]
    assert (kernel.occupancy.value, kernel.occupancy_limiter, kernel.grid) == (1.0, "threads", N // 256)  # type: ignore[union-attr]
    assert kernel.in_flight_per_sm.value == 2048 * 16  # type: ignore[union-attr]
    assert explanation.least_time is not None
    assert explanation.least_time.value == 32 * N / 4.8e6
    assert {o.name: (o.role, o.warp_sectors.value, o.sectors.value) for o in explanation.operands} == {
        "x": ("read", 16, N / 2),
        "y": ("written", 16, N / 2),
    }


def test_a_third_of_each_struct_is_used() -> None:
    (spoilt,) = (spoilt for spoilt in spoilt_kernels(H200_SMS) if spoilt.name == "structs")
    explanation = spoilt.kernel.explain(*spoilt.arguments(meta), target="h200")
    assert {o.name: round(o.efficiency.value, 3) for o in explanation.operands} == {"xyz": 0.333, "y": 1.0}
    assert "33% of xyz's are used" in explanation.verdicts[0].finding


def test_shared_memory_limits_occupancy() -> None:
    (spoilt,) = (spoilt for spoilt in spoilt_kernels(H200_SMS) if spoilt.name == "shared_occupancy")
    explanation = spoilt.kernel.explain(*spoilt.arguments(meta), target="h200")
    (kernel,) = explanation.kernels
    # 49,088 B and 1 KiB a block: four blocks of 64 threads in 228 KiB
    assert (kernel.occupancy_limiter, kernel.blocks_per_sm.value, kernel.occupancy.value) == ("shared", 4, 0.125)  # type: ignore[union-attr]
    assert "limited by shared" in explanation.verdicts[0].finding
    assert "less shared memory" in explanation.verdicts[0].next_step


def test_an_operand_that_is_read_and_written_counts_twice() -> None:
    twice = wl.raw(f"{HEAD} twice(float* x, int n) {{ {INDEX} if (i < n) x[i] *= 2; }}", "twice")
    explanation = twice.explain(meta(N), N, target="h200")
    assert [(o.name, o.role) for o in explanation.operands] == [("x", "read"), ("x", "written")]
    assert explanation.minimal.value == 8 * N


def test_a_row_that_every_block_reads_counts_once() -> None:
    add = wl.raw(f"{HEAD} add(const float* x, const float* row, float* y, int n) {{ {INDEX} y[i] = x[i] + row[i % n]; }}", "add")
    explanation = add.explain(meta(N), meta(1024), meta(N), 1024, target="h200")
    assert {o.name: o.minimal.value for o in explanation.operands} == {"x": 4 * N, "row": 4096, "y": 4 * N}


def test_a_small_table_is_taken_to_be_cached() -> None:
    gather = wl.raw(f"{HEAD} gather(const float* x, const int* at, float* y) {{ {INDEX} y[i] = x[at[i]]; }}", "gather")
    small, large = (gather.explain(meta(size), meta(N, dtype=torch.int32), meta(N), target="h200") for size in (1024, N * 4))
    assert {o.name: o.moved.value for o in small.operands}["x"] == 4096
    assert {o.name: (o.minimal.value, o.moved.value) for o in large.operands}["x"] == (4 * N, 32 * N)
    assert "not known" in {o.name: o.minimal.source for o in large.operands}["x"] or large.verdicts[0].limit == "sectors"


def test_without_a_bandwidth_there_are_no_times() -> None:
    explanation = SCALE4.explain(meta(4 * N), meta(4 * N), N, target="sm_80")
    assert (explanation.least_time, explanation.kernels[0].waves, explanation.kernels[0].unit_times) == (None, None, {})
    assert explanation.minimal.value == 32 * N


def test_nothing_is_launched() -> None:
    explanation = SCALE4.explain(meta(0), meta(0), 0, target="h200")
    assert [verdict.limit for verdict in explanation.verdicts] == ["empty"]
    assert explanation.minimal.value == 0

    assert explanation.efficiency is None
    assert "0 kernels, 0 elements" in str(explanation)


STARVED = {
    "no_parameters": ("", "", (), ["empty"]),
    "nothing_done": ("float* x", "", (meta(256),), ["empty"]),
    "pointers_in_memory": ("float* const* x", "x[0][threadIdx.x] = 1;", (meta(256, dtype=torch.int64),), ["memory"]),
    "outside": ("float* x", "x[threadIdx.x + 1000000] = 1;", (meta(256),), ["outside", "empty"]),
    "endless": ("float* x, int n", "for (;;) { x[threadIdx.x] += 1; if (n == 5) break; }", (meta(256), 4), ["unfinished", "empty"]),
}


@pytest.mark.parametrize("name", STARVED)
def test_a_kernel_that_moves_nothing_known_is_explained(name: str) -> None:
    declared, body, arguments, limits = STARVED[name]
    explanation = wl.raw(f"{HEAD} k({declared}) {{ {body} }}", "k", grid=1).explain(*arguments, target="h200")
    found = [verdict.limit for verdict in explanation.verdicts]
    assert set(limits) <= set(found)
    assert found[0] == limits[0] or limits == ["memory"]
    assert (explanation.efficiency is None) == ("empty" in found)
    assert json.loads(explanation.to_json())["minimal"]["value"] == explanation.minimal.value
    assert Explanation.from_dict(explanation.to_dict()) == explanation


def test_what_is_outside_of_every_operand_is_named_first() -> None:
    forgotten = wl.raw(f"{HEAD} forgotten(const float* x, float* y) {{ {INDEX} y[i] = 2 * x[i]; }}", "forgotten")
    explanation = forgotten.explain(meta(N - 100), meta(N - 100), target="h200")
    first, second, *_ = explanation.verdicts
    assert (first.limit, second.limit) == ("outside", "outside")
    assert {first.finding, second.finding} == {
        "Outside of every operand: loads reach at least 400 bytes behind the last byte of x",
        "Outside of every operand: stores reach at least 400 bytes behind the last byte of y",
    }
    assert [v.limit for v in forgotten.explain(meta(N), meta(N), target="h200").verdicts if v.limit == "outside"] == []


def test_the_largest_numbers() -> None:
    whole = wl.raw(f"{HEAD} k(float* y, unsigned long n) {{ y[threadIdx.x] = n; }}", "k")
    assert whole.explain(meta(256), 2**64 - 1, target="h200").bytes_written.value == 1024


def test_every_figure_is_tagged_and_printed() -> None:
    explanation = SCALE4.explain(meta(4 * N), meta(4 * N), N, target="h200")
    assert json.loads(explanation.to_json())["eager"] is None
    text = str(explanation)
    assert "scale on H200 SXM (sm_90): 1 kernel, 67,108,864 elements" in text
    assert "Kernel scale: 65,536 blocks of 256 threads" in text
    assert explanation.to_markdown().startswith("### scale on H200")


def test_the_command_line(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "my.cu"
    path.write_text(SCALE4.source)
    arguments = ["explain", f"{path}:scale", "f32[n]", "f32[n]", "n//4", "--size", "n=2^26", "--grid", "n//1024", "--target", "h200"]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kernels"][0]["grid"] == 2**16
    for wrong, message in (
        (["explain", f"{path}:other", "--target", "h200"], "its kernels are scale"),
        (["explain", f"{tmp_path}/none.cu:scale", "--target", "h200"], "there is no file"),
        (["explain", "add", "--grid", "7", "--target", "h200"], "--grid is for CUDA kernels"),
        ([*arguments, "--ncu"], "Leave out target"),
        (["bench", f"{path}:scale", "f32[8]", "f32[8]", "2", "--device", "cpu"], "scale: a raw kernel needs a GPU, and none is here"),
        (arguments[:-2], 'scale.explain got tensors on meta and no target. Name the GPU: target="h200"'),
    ):
        failed = CliRunner().invoke(app, wrong)
        assert failed.exit_code != 0
        assert message in failed.output.replace("\n", " "), failed.output


def test_the_benchmark_without_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    few = spoilt_kernels(H200_SMS)[:2]
    monkeypatch.setattr(explained, "spoilt_kernels", lambda sms: few)
    assert explained.main(["--target", "h200", "--json", str(tmp_path / "all.json")]) == 0
    assert capsys.readouterr().out.count("PASS") == 2
    content = json.loads((tmp_path / "all.json").read_text())
    assert [row["is_kept"] for row in content["rows"]] == [True, True]
    wrong = Spoilt(few[0].name, "tail", few[0].arguments)
    monkeypatch.setattr(explained, "spoilt_kernels", lambda sms: [wrong])
    assert explained.main(["--target", "h200"]) == 1
    assert "short" in capsys.readouterr().out
