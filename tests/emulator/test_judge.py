"""The judge on kernels' own text, run on the CPU: every planted bug is named, and every solution passes."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.emulator.emulator import build, run_on
from wideload.judge import PROBLEMS, Judgement, judge, read_request
from wideload.judge.matching import Launch
from wideload.judge.problems import read_solution
from wideload.raw_kernel import RawKernel

PLANTED = Path(__file__).parent / "planted"

# What is said of each, of the run and of the walk: the bug, and a part of the evidence that was worked out by hand.
BUGS = {
    "no_bounds_check": ("no_bounds_check", "with n = 1, the kernel wrote 255 elements behind its output"),
    "index_32": ("index_32", "with n = 2,147,487,745, more than 2^31 elements, an index of 32 bits wraps"),
    "index_32_unsigned": ("index_32", "with n = 4,294,971,393, more than 2^32 elements, an index of 32 bits wraps"),
    "misaligned": ("misaligned", "x and y and out are accessed where its width is no divisor of the address"),
    "missing_tail": ("tail", "the last n % 8 elements are not written: with n = 1, 1 is missing"),
    "race": ("race", "bytes of shared memory are written by one warp and used by another with no barrier between"),
    "input_written": ("input_written", "memory of x changed"),
    "special_values": ("special_values", "and NaN, infinities, -0 and subnormals among the values"),
}


def launch_emulated(kernel: RawKernel, launch: Launch) -> None:
    if math.prod(launch.grid):
        grid, block = ((*dims, 1, 1)[:3] for dims in (launch.grid, launch.block))
        run_on(build(kernel.source), kernel.__name__, (grid[0], grid[1], grid[2]), (block[0], block[1], block[2]), launch.arguments)


def judge_file(path: Path, text: str | None = None) -> Judgement:
    name = re.findall(r"__global__ void (\w+)", text or path.read_text())[0]
    return judge(read_request(f"{path}:{name}"), run=launch_emulated)


def test_there_is_a_kernel_for_each_bug() -> None:
    assert {path.stem for path in PLANTED.glob("*.cu")} == set(BUGS)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_named(name: str) -> None:
    bug, evidence = BUGS[name]
    found = judge_file(PLANTED / f"{name}.cu")
    assert [finding.bug for finding in found.findings] == [bug]
    assert evidence in found.findings[0].evidence
    assert found.exit_code == 1
    assert found.measured is None
    assert found.next_step.startswith(found.findings[0].cure)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_solutions_pass(problem: object) -> None:
    found = judge_file(read_solution(problem.name))  # type: ignore[attr-defined]
    assert found.findings == ()
    assert found.is_run
    assert found.exit_code == 0
    assert found.explanation is not None
    assert found.explanation.kernels[0].spill_bytes is not None
    assert found.explanation.kernels[0].spill_bytes.value == 0


@pytest.mark.parametrize(
    ("name", "edit", "bug"),
    [
        ("vector_add", ("a.x + b.x", "a.x - b.x"), "wrong"),
        ("vector_add", ("i < first + 4 && i < n", "i < first + 4"), "no_bounds_check"),
        ("vector_add", ("is_aligned && first + 4 <= n", "first + 4 <= n"), "misaligned"),
        ("vector_add", ("& 15", "& 7"), "misaligned"),  # right but for pointers at 8 bytes of 16
        ("vector_add", ("&& i < n;", "&& i < n - (n % 4 == 2);"), "unwritten"),
        ("vector_add", ("++i) out", "++i) if (x[i] == x[i]) out"), "unwritten"),  # NaNs are due where none is written
        ("vector_add", ("++i) out[i] =", "++i) out[i] +="), "result_read"),
        ("vector_add", ("} else {", "} else if (!is_aligned) {"), "tail"),
        ("vector_add", ("4 * ((long long)", "4 * (1 + (long long)"), "unwritten"),
        ("vector_add", ("(long long)blockIdx.x * blockDim.x + threadIdx.x", "(int)(blockIdx.x * blockDim.x + threadIdx.x)"), "index_32"),
        ("cast", ("__float2bfloat16_rn(x[i])", "__nv_bfloat16{(unsigned short)(__float_as_uint(x[i]) >> 16)}"), "wrong"),
        ("bias_gelu", ("column = column + 1 == cols ? 0 : column + 1", "++column"), "outside"),
        ("bias_gelu", (" && cols % 8 == 0", ""), "misaligned"),
        ("bias_silu_mul", ("cols % 8 == 0", "cols % 4 == 0"), "misaligned"),
        ("rope", ("v.y * cosine + v.x * sine", "v.y * cosine - v.x * sine"), "wrong"),
    ],
)  # fmt: skip
def test_what_is_spoilt_is_named(tmp_path: Path, name: str, edit: tuple[str, str], bug: str) -> None:
    text = read_solution(name).read_text().replace('"../', f'"{read_solution(name).parents[1]}/')
    assert edit[0] in text
    path = tmp_path / f"{name}.cu"
    path.write_text(text.replace(*edit, 1))
    found = [finding.bug for finding in judge_file(path).findings]
    assert found[:1] == [bug], found
