"""The judge without a kernel that runs: which facts are which bug, how parameters are matched, what the PTX shows, what is written."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import wideload as wl
from wideload.analyze.ptx import walk_ptx
from wideload.cli import app
from wideload.decode import decode
from wideload.errors import DeviceError, LayoutError, RangeError, WideloadError
from wideload.gpus import find_target
from wideload.judge import BUGS, NOT_CHECKED, PROBLEMS, Request, diagnose, judge, read_request, write_problem
from wideload.judge.child import job_text, run_in_children
from wideload.judge.diagnosis import Bug
from wideload.judge.matching import match
from wideload.judge.problems import read_solution
from wideload.judge.sanitizer import Fault, parse_report, sanitize
from wideload.judge.trial import (
    NO_ANSWER,
    SHAPES,
    SIZES,
    Case,
    Trial,
    alignment_cases,
    huge_case,
    largest_cases,
    needed_bytes,
    run_case,
    size_cases,
)  # fmt: skip
from wideload.judge.walked import walk_case
from wideload.nvrtc import compile_ptx

ADD = 'extern "C" __global__ void add(const float* x, const float* y, float* out, {n}) {{ {body} }}'
ONE_EACH = "long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i];"


def kernel_file(folder: Path, body: str = ONE_EACH, n: str = "long long n", line: str = "--against add f32[n] f32[n]") -> str:
    path = folder / "mine.cu"
    path.write_text(f"// wideload: {line}\n" + ADD.format(n=n, body=body))
    return f"{path}:add"


# ---- facts and bugs, by hand


def trial(n: int, *, shifted: bool = False, special: bool = False, bits: int = 0, on_stream: bool = False, **facts: Any) -> Trial:
    return Trial(Case((("n", n),), (1, 0) if shifted else (), special, bits, on_stream), num_elements=n, **facts)


RIGHT = [trial(n) for n in (0, 8, 32, 1000)]


@pytest.mark.parametrize(
    ("wrong", "faults", "bugs", "evidence"),
    [
        ([], [], [], ""),
        ([trial(7, behind=249), trial(9, behind=247)], [], ["no_bounds_check"], "n = 7, the kernel wrote 249 elements behind its output"),
        ([trial(7, behind=249, is_walked=True)], [], ["no_bounds_check"], "the kernel writes 249 elements behind its output, by its PTX"),
        ([trial(7, error="CUDA error: an illegal memory access was encountered")], [], ["no_bounds_check"], "illegal memory access"),
        ([trial(7, reads=(("x", 3),), is_walked=True)], [], ["outside"], "reads 3 elements beside x"),
        ([trial(9, before=2)], [], ["outside"], "2 elements before its output"),
        ([], [Fault("outside", "Invalid __global__ read of size 4 bytes", 3)], ["outside"], "at line 3"),
        ([trial(9, num_wrong=1, num_unwritten=1, first_unwritten=8), trial(7, num_wrong=7, num_unwritten=7)], [], ["tail"], "n % 8"),
        ([trial(1001, num_wrong=1, num_unwritten=1), trial(9, num_wrong=5, num_unwritten=5)], [], ["unwritten"], "5 of 9"),
        ([trial(1000, shifted=True, error="CUDA error: misaligned address")], [], ["misaligned"], "pointers one element behind"),
        ([trial(1000, shifted=True, num_wrong=4)], [], ["misaligned"], "4 of 1,000 results are wrong"),
        ([trial(1000, shifted=True, misaligned=("x",), is_walked=True)], [], ["misaligned"], "x is accessed"),
        ([], [Fault("misaligned", "Invalid __global__ read of size 16 bytes")], ["misaligned"], "of size 16"),
        ([trial(2**31 + 9, bits=31, num_wrong=9, first_wrong=2**31)], [], ["index_32"], "from element 2,147,483,648 on"),
        ([trial(2**31 + 9, bits=31, error="CUDA error: an illegal memory access was encountered")], [], ["index_32"], "illegal memory"),
        ([trial(2**31 + 9, bits=31, refused="argument n (int) is 2147483657; allowed: -1 to 2")], [], ["index_32"], "(int)"),
        ([trial(2**32 + 9, bits=32, num_unwritten=9, is_walked=True)], [], ["index_32"], "the last results are not written"),
        ([trial(2**31 + 9, bits=31, num_wrong=9), trial(9, num_wrong=9, first_wrong=0)], [], ["wrong"], "9 of 9 results differ"),
        ([trial(1000, is_unstable=True, num_wrong=40), trial(4097, num_wrong=4)], [], ["race"], "two runs gave different results"),
        ([trial(1000, raced_bytes=128, is_walked=True), trial(1000, num_wrong=5)], [], ["race"], "128 bytes of shared memory"),
        ([], [Fault("race", "Race reported between Write access", 8, 3)], ["race"], "at line 8 (3 times)"),
        ([trial(7, behind=249, is_unstable=True)], [], ["no_bounds_check"], "249"),
        ([trial(9, written_inputs=("y",))], [], ["input_written"], "memory of y changed"),
        ([trial(1000, on_stream=True, num_wrong=1000)], [], ["wrong_stream"], "it does not wait for that stream"),
        ([trial(1000, on_stream=True, num_wrong=9), trial(9, num_wrong=9, first_wrong=0)], [], ["wrong"], "9 of 9"),
        ([trial(9, is_result_read=True, num_wrong=9), trial(1000, on_stream=True, num_wrong=9)], [], ["result_read"], "with n = 9"),
        ([trial(9, special=True, num_wrong=2)], [], ["special_values"], "2 of 9"),
        ([trial(9, num_wrong=2, first_wrong=4), trial(9, special=True, num_wrong=3, first_wrong=0)], [], ["wrong"], "from element 4 on"),
        ([trial(9, error="no answer within 120 s")], [], ["hang"], "no answer"),
        ([trial(9, refused="Argument x is on cpu")], [], ["refused"], "argument x is on cpu"),
        ([trial(9, error="CUDA error: unspecified launch failure")], [], ["error"], "unspecified"),
        ([trial(7, behind=249), trial(9, special=True, num_wrong=2)], [], ["no_bounds_check", "special_values"], "249"),
    ],
)  # fmt: skip
def test_facts_are_bugs(wrong: list[Trial], faults: list[Fault], bugs: list[Bug], evidence: str) -> None:
    found = diagnose([*RIGHT, *wrong], faults)
    assert [finding.bug for finding in found] == bugs
    assert evidence in " ".join(map(str, found))
    assert all(finding.cure == BUGS[finding.bug] for finding in found)


def test_a_tail_is_of_rows_where_rows_have_one() -> None:
    def matrix(rows: int, columns: int, missing: int = 0) -> Trial:
        return Trial(Case((("rows", rows), ("cols", columns))), rows * columns, num_wrong=missing, num_unwritten=missing)

    wrong = [matrix(7, 9, 7), matrix(1000, 7, 3000), matrix(3, 4097, 3)]
    (finding,) = diagnose([*wrong, matrix(8, 8), matrix(5, 12)])
    assert (finding.bug, "the last cols % 4 elements" in finding.evidence) == ("tail", True)


def test_what_writes_nothing_has_no_tail() -> None:
    (finding,) = diagnose([trial(0), *(trial(n, num_wrong=n, num_unwritten=n, first_unwritten=0) for n in (1, 7, 1000))])
    assert finding.bug == "unwritten"


# ---- requests and parameters


def test_a_request_is_read_from_the_file_and_the_command_line(tmp_path: Path) -> None:
    subject = kernel_file(tmp_path, line="--against add 'f32[n]' f32[n] --items 4 --rtol 0 --block 32,8 --let k=n//2")
    expected = Request(subject, "add", ("f32[n]", "f32[n]"), "", (32, 8), 4, "", (("k", "n//2"),), 0.0)
    assert read_request(subject) == expected
    words = ["--items=8", "--against=torch:add", "--grid=n//8,2", "--most=2^31-1", "--shared=4*block"]
    assert read_request(subject, words) == replace(expected, items=8, against="torch:add", grid="n//8,2", most=2**31 - 1, shared="4*block")
    both = tmp_path / "two.cu"
    both.write_text("// wideload: first: --against add --items 2\n// wideload: second: --against swiglu\n")
    assert read_request(f"{both}:second").against == "swiglu"
    assert read_request(f"{both}:first").items == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("f32[n]", "what is .* held against"),
        ("--against add --itms 4", r"wideload: line of .*--itms"),
        ("--against add --items 0", "allowed: 1 and more"),
        ("--against add --let 5", "NAME=VALUE"),
        ("--against 'add f32[n]", r"line of .*mine\.cu:add cannot be read: No closing quotation: --against 'add"),
        ("--against add --block abc", "argument --block: 'abc' is no number of threads; allowed: one to three, such as 256 or 32,8"),
        ("--against add --block 1,1,1,1", "one to three"),
        ("--against add --most 0", "allowed: 1 and more"),
        ("--against add --most lots", "'lots' is no dtype, and no size"),
    ],
)
def test_words_that_mean_nothing_are_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(WideloadError, match=message):
        read_request(kernel_file(tmp_path, line=line))


def launch(source: str, words: str, sizes: dict[str, int], tmp_path: Path) -> tuple[Any, ...]:
    path = tmp_path / "k.cu"
    path.write_text(f'extern "C" __global__ void k({source}) {{}}')
    matched = match(read_request(f"{path}:k", words.split()))
    operands = matched.make(sizes)
    found = matched.launch(sizes, operands, matched.shapes(operands))
    return tuple(tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in found.arguments), found.grid


@pytest.mark.parametrize(
    ("source", "words", "sizes", "arguments", "grid"),
    [
        ("const float* x, const float* y, float* z, long long n", "--against add", {"n": 600}, ((600,), (600,), (600,), 600), (3,)),
        ("float* z, const float4* x, const float* y, int size", "--against add --items 4", {"n": 9}, ((9,), (9,), (9,), 9), (1,)),
        (
            "const float* x, const float* b, float* z, int rows, int columns",
            "--against torch:add f32[m,k] f32[k] --grid (k+31)//32,m --block 32",
            {"m": 5, "k": 70},
            ((5, 70), (70,), (5, 70), 5, 70),
            (3, 5),
        ),
        ("const float* x, float* z, int height, int width", "--against torch:neg", {"height": 3, "width": 8}, ((3, 8), (3, 8), 3, 8), (1,)),
        ("const float* x, float* z, float lo, float hi, int n", "--against clip f32[n] -1 0.5", {"n": 4}, ((4,), (4,), -1, 0.5, 4), (1,)),
        ("const float* x, float* z, int k, float a", "--against torch:neg --let k=2*n --let a=0.5", {"n": 4}, ((4,), (4,), 8, 0.5), (1,)),
        ("const float* x, float* z, long long n", "--against torch:neg", {"n": 0}, ((0,), (0,), 0), (0,)),
        ("const float* x, float* z, int n", "--against torch:neg --grid min(n//9,132),2", {"n": 999}, ((999,), (999,), 999), (111, 2)),
        ("const float* x, float* z, int n", "--against torch:neg --grid min((n+255)//256,3)", {"n": 999}, ((999,), (999,), 999), (3,)),
    ],
)  # fmt: skip
def test_parameters_are_matched(source: str, words: str, sizes: dict[str, int], arguments: Any, grid: Any, tmp_path: Path) -> None:
    assert launch(source, words, sizes, tmp_path) == (arguments, grid)


@pytest.mark.parametrize(
    ("source", "words", "message"),
    [
        ("const float* x, float* z, int k", "--against torch:neg", r"parameter k \(int\) means nothing here.*--let k=n"),
        ("float* x, float* z, int n", "--against torch:neg f32[n]", r"0 pointers to const, which are inputs; torch:neg has 1 of f32\[n\]"),
        ("const float* x, int n", "--against torch:neg f32[n]", "0 pointers that are written"),
        ("const unsigned short* x, unsigned short* z, int n", "--against torch:neg", "argument x .* may be of several dtypes"),
        ("const float* x, float* z, int n", "--against torch:neg f32[a,b,c]", "leave 3 sizes open"),
        ("const float* x, float* z, int n", "--against clip f32[n] -1 1", "takes 2 numbers fewer"),
        ("const float* x, float* z, int n", "--against torch:neg --block 0", "block is .0, 1, 1.; allowed: at least 1 thread"),
        ("const float* x, float* z, int n", "--against torch:neg --block 2048", "and 1024 together"),
        ("const float* x, float* z, int n", "--against torch:neg --shared 49153", "shared_bytes is 49153; allowed: 0 to 49152"),
        ("const float* x, float* z, int n", "--against torch:where f32[n]", r"torch:where does not take f32\[n\]: "),
    ],
)
def test_what_does_not_match_is_named(source: str, words: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(WideloadError, match=message):
        launch(source, words, {"n": 8}, tmp_path)


# ---- trials, with kernels in Python


def python_kernel(tmp_path: Path, spoil: Any) -> Trial:
    matched = match(read_request(kernel_file(tmp_path)))

    def run(kernel: Any, launch: Any) -> None:
        x, y, out, _ = launch.arguments
        spoil(x, y, out)

    return run_case(matched, Case((("n", 9),), (1, 0, 0)), torch.device("cpu"), run)


def stray(tensor: torch.Tensor, at: int) -> None:
    """Change an element that is beside the tensor."""
    tensor.as_strided((1,), (1,), tensor.storage_offset() + at).fill_(3.0)


def both(first: Any, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> None:
    torch.add(x, y, out=out)
    first(x, y, out)


@pytest.mark.parametrize(
    ("spoil", "facts"),
    [
        (lambda x, y, out: None, {}),
        (lambda x, y, out: stray(out, 9), {"behind": 1}),
        (lambda x, y, out: stray(out, 257), {"behind": 249}),
        (lambda x, y, out: stray(out, -2), {"before": 2}),
        (lambda x, y, out: stray(x, 9), {"written_inputs": ("x",)}),
        (lambda x, y, out: y.neg_(), {"written_inputs": ("y",)}),
        (lambda x, y, out: out[7:].fill_(100.0), {"num_wrong": 2, "first_wrong": 7}),
        (lambda x, y, out: out[8:].view(torch.int32).fill_(-1), {"num_wrong": 1, "first_wrong": 8}),
    ],
)  # fmt: skip
def test_what_a_launch_touches_is_seen(spoil: Any, facts: dict[str, Any], tmp_path: Path) -> None:
    found = python_kernel(tmp_path, lambda *tensors: both(spoil, *tensors))
    assert found == Trial(found.case, 9, **facts)
    assert found.is_right is not bool(facts)


@pytest.mark.parametrize(
    ("dtype", "value"), [("f32", math.nan), ("f32", 0.0), ("bf16", 1.5), ("bool", True), ("bool", False), ("i32", -1), ("u8", 255)]
)
def test_a_result_that_is_not_written_is_seen_whatever_is_due(tmp_path: Path, dtype: str, value: float) -> None:
    path = tmp_path / "k.cu"
    path.write_text('extern "C" __global__ void k(const void* x, void* out, long long n) {}')
    matched = match(read_request(f"{path}:k", ["--against=torch:clone", f"{dtype}[n]"]))

    def launch_with(end: int) -> Trial:
        def run(kernel: Any, launch: Any) -> None:
            x, out, _ = launch.arguments
            out[:end] = x[:end]

        def fill(like: Any, *_: Any) -> None:
            like.tensor.fill_(value)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("wideload.judge.trial._fill", fill)
            return run_case(matched, Case((("n", 9),)), torch.device("cpu"), run)

    assert launch_with(9).is_right
    missing = launch_with(8)
    assert missing == Trial(missing.case, 9, num_wrong=1, first_wrong=8, num_unwritten=1, first_unwritten=8)


def test_a_result_that_is_read_before_it_is_written_is_no_race(tmp_path: Path) -> None:
    found = python_kernel(tmp_path, lambda x, y, out: out.add_(x).add_(y))
    assert found == Trial(found.case, 9, num_wrong=9, first_wrong=0, is_result_read=True)


def test_launches_that_differ_and_launches_that_raise_are_seen(tmp_path: Path) -> None:
    values = itertools.count(1)
    found = python_kernel(tmp_path, lambda x, y, out: torch.add(x, y, out=out).add_(1e-7 * next(values)))
    assert found.is_unstable
    assert not found.num_wrong

    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: misaligned address\nmore")

    assert python_kernel(tmp_path, fail).error == "CUDA error: misaligned address"


def test_bits_are_compared_where_none_may_differ(tmp_path: Path) -> None:
    subject = kernel_file(tmp_path, line="--against add f32[n] f32[n] --rtol 0")
    matched = match(read_request(subject))
    cpu = torch.device("cpu")

    def run(kernel: Any, launch: Any) -> None:
        x, y, out, _ = launch.arguments
        torch.add(x, y, out=out).mul_(1 + 2**-23)

    assert run_case(matched, Case((("n", 1000),)), cpu, run).num_wrong > 900
    assert run_case(match(read_request(subject, ["--rtol=1e-6"])), Case((("n", 1000),)), cpu, run).num_wrong == 0

    def lose_sign(kernel: Any, launch: Any) -> None:
        x, y, out, _ = launch.arguments
        torch.add(x, y, out=out).add_(0.0)  # -0 + 0 is 0

    special = Case((("n", 1000),), is_special=True)
    assert 0 < run_case(matched, special, cpu, lose_sign).num_wrong < 100


def test_cases() -> None:
    matched = match(read_request(f"{read_solution('rope')}:rope"))
    assert [case.sizes for case in size_cases(matched)][:4] == [
        (("tokens", rows), ("heads", cols)) for rows, cols in ((0, 8), (1, 1)) for _ in "ab"
    ]
    # By 2, 4 and 8 bytes, of bf16 and of f32.
    assert [case.shifts for case in alignment_cases(matched)][:13] == [
        *((1, 0, 0, 0), (2, 0, 0, 0), (4, 0, 0, 0), (0, 1, 0, 0), (0, 2, 0, 0), (0, 0, 1, 0), (0, 0, 2, 0)),
        *((0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 0, 4), (1, 1, 1, 1), (2, 2, 2, 2), (4, 2, 2, 4)),
    ]
    assert {n % 4 for n in SIZES if n > 4} == {0, 1, 2, 3}
    assert {columns % 4 for _, columns in SHAPES if columns > 8} == {0, 1, 2, 3}
    for bits in (31, 32):
        sizes = dict(huge_case(matched, bits).sizes)
        assert 2**bits < sizes["tokens"] * sizes["heads"] * 64 < 2**bits * 1.001
        assert (sizes["tokens"] * sizes["heads"]) % 2
    # Inputs of 9 * 1000 * 64 * 2 bytes and twice 9 * 32 * 4; results as the first.
    case = next(case for case in size_cases(matched) if dict(case.sizes)["tokens"] == 9)
    assert needed_bytes(matched, case) == 2 * (3 * 9 * 1000 * 64 * 2 + 2 * 9 * 32 * 4)


# ---- the walk


def walked(tmp_path: Path, body: str, case: Case, n: str = "long long n", words: tuple[str, ...] = ()) -> Trial:
    matched = match(read_request(kernel_file(tmp_path, body, n), list(words)))
    assert matched.kernel is not None
    return walk_case(matched, matched.kernel.plan("sm_90").ptx, case)


INDEX = "long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; "


@pytest.mark.parametrize(
    ("body", "case", "facts"),
    [
        (ONE_EACH, Case((("n", 10_007),)), {}),
        (ONE_EACH, Case((("n", 0),)), {}),
        (ONE_EACH, Case((("n", 2**32 + 4097),), bits=32), {}),
        (INDEX + "out[i] = x[i] + y[i];", Case((("n", 7),)), {"behind": 249, "reads": (("x", 249), ("y", 249))}),
        (INDEX + "if (i < n / 8 * 8) out[i] = x[i] + y[i];", Case((("n", 4097),)), {"num_unwritten": 1}),
        (INDEX + "if (i < n) out[i - 2] = x[i] + y[i];", Case((("n", 7),)), {"before": 2}),
        (INDEX + "if (i < n) ((float*)x)[i] = y[i];", Case((("n", 7),)), {"written_inputs": ("x",), "num_unwritten": 7}),
        (INDEX + "if (i < n / 2) ((float2*)out)[i] = ((float2*)x)[i];", Case((("n", 8),), (1, 0, 0)), {"misaligned": ("x",)}),
        (INDEX + "if (i < n / 2) ((float2*)out)[i] = ((float2*)x)[i];", Case((("n", 8),), (2, 0, 2)), {}),
    ],
)  # fmt: skip
def test_addresses_are_walked(tmp_path: Path, body: str, case: Case, facts: dict[str, Any]) -> None:
    assert walked(tmp_path, body, case) == Trial(case, dict(case.sizes)["n"], is_walked=True, **facts)


LATE = """
#pragma unroll 1
for (int k = 0; k < 80; ++k) { long long i = max(0, k - 40) * 256LL + threadIdx.x; if (i < n) out[i] = x[i] + y[i]; }"""
STRIDED = INDEX + "for (; i < n; i += (long long)gridDim.x * blockDim.x) out[i] = x[i] + y[i];"


@pytest.mark.parametrize(
    ("body", "grid", "n", "bits", "missing"),
    [
        (STRIDED, "132", 1000, 0, 0),  # most blocks have nothing to do, and not all are walked
        (STRIDED, "132", 10_007, 0, 0),
        (LATE, "1", 10_007, 0, 0),  # eighty turns, of which those that are counted write 256 elements
        (ONE_EACH, "(n+255)//256+1", 2**31 + 4097, 31, 0),  # the last block has none
        (ONE_EACH, "(n+255)//256+7", 2**32 + 4097, 32, 0),
        (ONE_EACH, "(n+255)//256", 2**32 + 4097, 32, 0),
        (ONE_EACH, "n//256", 1000, 0, 1000 % 256),
        (INDEX + "if (i < n - 3) out[i] = x[i] + y[i];", "(n+255)//256", 10_007, 0, 3),
    ],
)  # fmt: skip
def test_results_are_missing_only_where_that_is_certain(tmp_path: Path, body: str, grid: str, n: int, bits: int, missing: int) -> None:
    assert walked(tmp_path, body, Case((("n", n),), bits=bits), words=(f"--grid={grid}",)).num_unwritten == missing


def test_what_lies_behind_an_index_that_wraps_is_missing(tmp_path: Path) -> None:
    body = "unsigned i = blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i];"
    assert walked(tmp_path, body, Case((("n", 2**32 + 4097),), bits=32)).num_unwritten >= 4097


def test_of_a_case_that_ran_right_no_walk_says_that_results_are_missing() -> None:
    missing = trial(1000, num_unwritten=744, is_walked=True)
    huge = trial(2**31 + 9, bits=31, num_unwritten=9, is_walked=True)
    assert [finding.bug for finding in diagnose([missing])] == ["unwritten"]
    assert diagnose([*RIGHT, missing]) == ()
    assert [finding.bug for finding in diagnose([*RIGHT, huge])] == ["index_32"]
    assert diagnose([*RIGHT, huge, trial(2**32 + 9, bits=32)]) == ()
    assert [finding.bug for finding in diagnose([*RIGHT, replace(missing, reads=(("x", 2),))])] == ["outside"]  # a run cannot see that


def test_what_does_not_fit_a_parameter_is_refused(tmp_path: Path) -> None:
    found = walked(tmp_path, ONE_EACH, Case((("n", 2**31 + 1),), bits=31), "int n")
    assert found.refused == "argument n (int) is 2147483649; allowed: -2147483648 to 2147483647"
    assert diagnose([*RIGHT, found])[0].bug == "index_32"


SHARED = """
extern "C" __global__ void through(const float* x, float* out) {{
    __shared__ float tile[{size}];
    for (int turn = 0; turn < 2; ++turn) {{
        tile[{write}] = x[threadIdx.x + turn];
        {between}
        out[threadIdx.x + 64 * turn] = tile[{read}];
        {behind}
    }}
}}"""


@pytest.mark.parametrize(
    ("write", "read", "between", "behind", "raced"),
    [
        ("threadIdx.x", "63 - threadIdx.x", "__syncthreads();", "__syncthreads();", 0),
        ("threadIdx.x", "63 - threadIdx.x", "", "", 256),  # every byte of 64 floats
        ("threadIdx.x", "63 - threadIdx.x", "__syncthreads();", "", 256),  # written again while others read
        ("threadIdx.x", "threadIdx.x", "", "", 0),  # each its own
        ("threadIdx.x", "threadIdx.x ^ 1", "__syncwarp();", "__syncwarp();", 0),  # within a warp
        ("0", "threadIdx.x", "__syncthreads();", "__syncthreads();", 8),  # two warps write one place, twice
    ],
)
def test_races_in_shared_memory(write: str, read: str, between: str, behind: str, raced: int) -> None:
    source = SHARED.format(size=64, write=write, read=read, between=between, behind=behind)
    ptx = compile_ptx(source, arch="sm_90", name="through", fma=True)
    regions = [(1 << 42, (1 << 42) + 260), (2 << 42, (2 << 42) + 512)]
    assert walk_ptx(ptx, "through", (1, 1, 1), (64, 1, 1), [start for start, _ in regions], regions).raced_bytes == raced


# ---- children


def child_of(text: str) -> list[str]:
    return [sys.executable, "-c", f"import json, sys, time\njob = json.load(sys.stdin)\ncases = job['cases']\n{text}"]


SAY = "say = lambda case, **facts: print('wideload-trial ' + json.dumps({'case': case, **facts}), flush=True)\n"
CASES = [Case((("n", n),)) for n in (1, 7, 9)]


@pytest.mark.parametrize(
    ("text", "errors"),
    [
        ("for case in cases: say(case)", ["", "", ""]),
        ("print('of the user')\nfor case in cases: say(case)", ["", "", ""]),
        # A sticky error ends a child, and the next goes on behind it.
        ("for case in cases:\n  n = case['sizes'][0][1]\n  say(case, error='bad' * (n == 7))\n  if n == 7: break", ["", "bad", ""]),
        ("say(cases[0])\nif len(cases) > 1: sys.exit('no')", ["", "the process ended with status 1: no", ""]),
        ("import os\nos.kill(os.getpid(), 11)", ["the process ended with status -11"] * 2),  # and then no more
        ("say(cases[0])\ntime.sleep(60)", ["", "no answer within 1 s", ""]),
    ],
)  # fmt: skip
def test_children_may_die(text: str, errors: list[str]) -> None:
    timeout_s = 1.0 if "sleep" in text else 60.0
    found = run_in_children(Request("a.cu:add", "add"), CASES, "cuda:0", child_of(SAY + text), timeout_s)
    assert [trial.error for trial in found] == errors
    assert [trial.case for trial in found] == CASES[: len(errors)]


def test_a_case_without_room_is_left_out() -> None:
    found = run_in_children(Request("a.cu:add", "add"), CASES, "cuda:0", child_of(SAY + "for case in cases: say(case, refused='no room')"))
    assert found == ()


def test_a_job_says_all_that_was_asked() -> None:
    request = Request("a.cu:add", "add", ("f32[n]",), "n", (32, 4), 2, "64", (("k", "1"),), 0.0, 1.0, 5)
    job = json.loads(job_text(request, CASES, "cuda:1", 0))
    assert (job["device"], job["guard"], len(job["cases"])) == ("cuda:1", 0, 3)
    assert decode(Request, job["request"], "the request") == request


# ---- the sanitizer's report

REPORT = """
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at add+0x110 in kernel.cu:6
=========     by thread (249,0,0) in block (0,0,0)
=========     Address 0x7f5b2d20041c is out of bounds
=========
========= Invalid __global__ write of size 4 bytes
=========     at add+0x110 in kernel.cu:6
=========     by thread (250,0,0) in block (0,0,0)
=========     Address 0x7f5b2d200420 is out of bounds
=========
========= Invalid __global__ read of size 16 bytes
=========     at add+0x90 in kernel.cu:7
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f5b2d200404 is misaligned
=========
========= Error: Race reported between Write access at add+0x80 in kernel.cu:7
=========     and Read access at add+0xd0 in kernel.cu:9 [512 hazards]
=========
========= ERROR SUMMARY: 4 errors
"""


def test_a_sanitizer_s_report_is_read() -> None:
    assert parse_report(REPORT) == (
        Fault("outside", "Invalid __global__ write of size 4 bytes", 6, 2),
        Fault("misaligned", "Invalid __global__ read of size 16 bytes", 7, 1),
        Fault("race", "Error: Race reported between Write access", 7, 1),
    )
    assert parse_report("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == ()


# ---- problems


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_a_problem_starts_with_what_compiles_and_writes_nothing(problem: Any, tmp_path: Path) -> None:
    written = write_problem(problem.name, tmp_path)
    page = (tmp_path / f"{problem.name}.md").read_text()
    assert str(problem.formula) in page
    h200 = find_target("h200").gpu
    assert h200 is not None
    # By hand: bytes an element of 2^27, at 4.8 TB/s.
    least_us = sum(problem.bytes_per_element) * 2**27 / 4.8e6
    assert f"| {h200.name} | 4,800 | {least_us:.0f} | {least_us / 0.9:.0f} |" in page
    assert len(written) == 3 if problem.is_bf16 else 2
    found = judge(read_request(f"{tmp_path / problem.name}.cu:{problem.name}"))
    assert [finding.bug for finding in found.findings] == ["unwritten"]
    with pytest.raises(WideloadError, match="is there already"):
        write_problem(problem.name, tmp_path)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_a_solution_has_its_problem_s_parameters_and_bytes(problem: Any) -> None:
    solution = wl.raw(re.sub(r'#include "[^"]*"', "struct __nv_bfloat16;", read_solution(problem.name).read_text()), problem.name)
    start = wl.raw(re.sub(r'#include "[^"]*"[^\n]*', "struct __nv_bfloat16;", problem.source), problem.name)
    assert solution.parameters == start.parameters
    found = judge(read_request(f"{read_solution(problem.name)}:{problem.name}"))
    assert found.exit_code == NOT_CHECKED
    assert found.explanation is not None
    assert found.explanation.bytes_per_element.value == pytest.approx(sum(problem.bytes_per_element), rel=0.05)
    widths = {access.width_bits for access in found.explanation.kernels[0].accesses}
    assert 128 in widths


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    (tmp_path / "swiglu.md").write_text("mine")
    with pytest.raises(WideloadError, match=r"swiglu\.md is there already"):
        write_problem("swiglu", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["swiglu.md"]
    with pytest.raises(WideloadError, match="there is no folder"):
        write_problem("cast", tmp_path / "none")
    with pytest.raises(WideloadError, match="there are vector_add, cast, bias_gelu"):
        write_problem("swigl", tmp_path)


# ---- the command


def command(*words: str) -> Any:
    return CliRunner().invoke(app, ["check", *words])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert command("--new", "vector_add").stdout.splitlines()[:2] == ["vector_add.cu", "vector_add.md"]
    assert "is there already" in command("--new", "vector_add").output
    subject = kernel_file(tmp_path)
    run = command(subject, "--target", "a100", "--json")
    assert run.exit_code == NOT_CHECKED, run.output
    report = json.loads(run.stdout)
    assert (report["schema"], report["is_run"], report["findings"], report["exit_code"]) == ("wideload.judgement/1", False, [], 3)
    assert report["explanation"]["arch"] == "sm_80"
    assert "RESULTS WERE NOT CHECKED" in command(subject, "--target", "a100").stdout
    spoilt = command(kernel_file(tmp_path, "out[blockIdx.x * blockDim.x + threadIdx.x] = x[0] + y[0];"), "--target", "a100", "--json")
    assert spoilt.exit_code == 1
    assert json.loads(spoilt.stdout)["findings"][0]["name"] == "no bounds check"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "begin one with --new"),
        (("mine.cu:add", "--new", "cast"), "leave out the kernel"),
        (("missing.cu:add", "--against", "add"), "there is no file missing.cu"),
        (("missing.cu", "--against", "add"), "there is no file missing.cu"),
        (("torch:add", "--against", "torch:add", "f32[n]", "f32[n]", "--target", "h200"), "has to be called on a GPU"),
    ],
)
def test_what_cannot_be_judged_is_said(words: tuple[str, ...], message: str) -> None:
    run = command(*words)
    assert run.exit_code in (1, 2)
    assert message in re.sub(r"[│\s]+", " ", run.output)


def test_what_nvrtc_refuses_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(wl.CompileError, match="undefined_name"):
        judge(read_request(kernel_file(tmp_path, "out[n] = undefined_name;")))


def test_a_sanitizer_needs_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="there is no GPU"):
        judge(read_request(kernel_file(tmp_path)), sanitizing="yes")


# ---- what a GPU adds


def test_on_a_gpu_bugs_stop_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wideload.analyze.explain import GpuFigures

    asked: list[tuple[Case, ...]] = []

    def run_fake(request: Request, cases: Any, device: str) -> tuple[Trial, ...]:
        asked.append(tuple(cases))
        return tuple(Trial(case, 9, num_wrong=int(case.is_special)) for case in cases)

    monkeypatch.setattr(sys.modules["wideload.judge.child"], "run_in_children", run_fake)
    monkeypatch.setattr(sys.modules["wideload.judge.judge"], "read_device", lambda device: GpuFigures(find_target("h200")))
    found = judge(read_request(kernel_file(tmp_path)), device=torch.device("cuda", 0), sanitizing="no")
    assert [finding.bug for finding in found.findings] == ["special_values"]
    assert found.notes == ("more than 2^31 elements were not run: small sizes are wrong already",)
    assert any(case.is_on_stream for case in asked[0])
    assert sum(any(case.shifts) for case in asked[0]) == 16  # three pointers and all of them, by 4 and by 8 bytes, at two sizes
    assert len(asked) == 1
    assert "launches checked" in str(found)


def test_a_function_s_operands_must_be_said() -> None:
    with pytest.raises(WideloadError, match="says not what it takes"):
        match(read_request("torch:add", ["--against=torch:add"]))
    assert issubclass(LayoutError, WideloadError)


def test_a_pointer_to_vectors_is_moved_by_what_it_demands(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text('extern "C" __global__ void k(const float4* x, const float2* y, double* out, long long n) {}')
    matched = match(read_request(f"{path}:k", ["--against=torch:add", "f32[n]", "f64[n]"]))
    assert matched.kernel is not None
    assert [case.shifts for case in alignment_cases(matched)][:4] == [(4, 0, 0), (0, 1, 0), (0, 0, 1), (4, 1, 1)]


# ---- what is said of a file, a grid and a launch that do not fit


def test_a_file_without_its_kernel_is_told_how_it_is_spelt(tmp_path: Path) -> None:
    path = tmp_path / "two.cu"
    path.write_text("__global__ void first(int n) {}\n// __global__ void not_this() {}\n__global__ void second(int n) {}")
    for subject in (str(path), f"{path}:"):
        with pytest.raises(WideloadError, match=r"name its kernel: .*two\.cu:KERNEL. There is first, second"):
            read_request(subject, ["--against=add"])
    path.write_bytes(b"\xff\xfe\n")
    with pytest.raises(WideloadError, match=r"two\.cu is no text in UTF-8"):
        read_request(f"{path}:first", ["--against=add"])


def test_shared_memory_that_the_launch_gives_has_to_be_said(tmp_path: Path) -> None:
    body = "extern __shared__ float s[]; " + INDEX + "s[threadIdx.x] = x[i]; __syncthreads(); out[i] = s[threadIdx.x ^ 32] + y[i];"
    with pytest.raises(WideloadError, match=r"uses extern __shared__.* --shared '4 \* block'; --shared 0 if"):
        match(read_request(kernel_file(tmp_path, body)))
    subject = kernel_file(tmp_path, f"// no extern __shared__ float s[];\n{ONE_EACH}")
    assert match(read_request(subject)).kernel is not None
    kernel = match(read_request(kernel_file(tmp_path, body), ["--shared=4*block*items", "--block=64", "--items=2"])).kernel
    assert kernel is not None
    assert kernel._shared_bytes == 512


@pytest.mark.parametrize("bits", [31, 32])
def test_a_huge_matrix_has_no_more_rows_than_its_grid_takes(tmp_path: Path, bits: int) -> None:
    words = ["--against=torch:add", "f32[rows, cols]", "f32[rows, cols]"]
    body = INDEX + "long long at = blockIdx.y * cols + i; if (i < cols) out[at] = x[at] + y[at];"
    subject = kernel_file(tmp_path, body, "long long rows, long long cols")
    by_rows = match(read_request(subject, ["--grid=(cols+255)//256,rows", *words]))
    sizes = dict(huge_case(by_rows, bits).sizes)
    assert sizes["rows"] <= 65_535 < sizes["cols"]
    assert 2**bits < sizes["rows"] * sizes["cols"] < 2**bits * 1.001
    assert by_rows.refusal(sizes) == ""
    assert by_rows.refusal({"rows": 65_536, "cols": 1}) == (
        "add: grid.y is 65536; allowed: 0 to 65535. Let a thread do more, or use another axis."
    )
    assert dict(huge_case(match(read_request(subject, words)), bits).sizes)["cols"] == 1031


def test_a_grid_that_no_gpu_takes_is_an_error_if_small_and_a_note_if_huge(tmp_path: Path) -> None:
    with pytest.raises(RangeError, match=r"with n = 1,000, add: grid\.z is 80000; allowed: 0 to 65535"):
        judge(read_request(kernel_file(tmp_path), ["--grid=n,1,80*min(n,1000)"]))
    case = Case((("n", 70_000),))
    body = "long long i = blockIdx.y; if (i < n) out[i] = x[i] + y[i];"
    assert walked(tmp_path, body, case, words=("--grid=1,n",)).refused.startswith("add: grid.y is 70000")
    found = judge(read_request(kernel_file(tmp_path, body), ["--grid=1,n", "--block=1"]))
    assert found.exit_code == NOT_CHECKED
    assert [note.partition(":")[0] for note in found.notes] == [
        "n = 2,147,487,745 was not tried",
        "n = 4,294,971,393 was not tried",
        "not timed and not explained",
    ]


def test_a_kernel_is_judged_up_to_the_most_that_it_is_for(tmp_path: Path) -> None:
    subject = kernel_file(tmp_path, ONE_EACH, "int n")
    assert [finding.bug for finding in judge(read_request(subject)).findings] == ["index_32"]
    found = judge(read_request(subject, ["--most=2^31-1"]))
    assert (found.exit_code, found.notes) == (NOT_CHECKED, ("judged with up to 2,147,483,647 elements, as --most says",))
    assert found.explanation is not None
    assert found.explanation.num_elements == 2**27
    few = match(read_request(subject, ["--most=1000"]))
    assert max(dict(case.sizes)["n"] for case in size_cases(few)) == 1000
    assert [(case.sizes, case.bits) for case in largest_cases(few)] == [((("n", 1000),), 0)]
    assert {dict(case.sizes)["n"] for case in alignment_cases(few)} == {1000}
    assert [(dict(case.sizes)["n"], case.bits) for case in largest_cases(match(read_request(subject, ["--most=2^31-1"])))] == [
        (2**31 - 1, 30)
    ]
    explained = judge(read_request(subject, ["--most=1000"])).explanation
    assert explained is not None
    assert explained.num_elements == 1000


def test_what_is_a_little_beside_its_tensor_is_no_index_that_wraps() -> None:
    huge = trial(2**31 + 9, bits=31, reads=(("y", 1),), is_walked=True)
    (finding,) = diagnose([*RIGHT, huge])
    assert (finding.bug, "reads 1 element beside y" in finding.evidence) == ("outside", True)
    assert [finding.bug for finding in diagnose([*RIGHT, replace(huge, reads=(("y", 2**31),))])] == ["index_32"]
    assert [finding.bug for finding in diagnose([*RIGHT, replace(huge, num_unwritten=5)])] == ["index_32"]


def test_results_in_another_order_are_told_where_they_are_due(tmp_path: Path) -> None:
    path = tmp_path / "k.cu"
    path.write_text('extern "C" __global__ void k(const float* x, float* out, long long rows, long long cols) {}')
    matched = match(read_request(f"{path}:k", ["--against=torch:neg", "f32[rows, cols].t()"]))

    def run(kernel: Any, launch: Any) -> None:
        x, out, *_ = launch.arguments
        out.as_strided((30,), (1,)).copy_(-x.reshape(-1))  # row by row

    found = run_case(matched, Case((("rows", 5), ("cols", 6))), torch.device("cpu"), run)
    assert (found.strides, found.num_wrong > 0) == ((1, 6), True)
    (finding,) = diagnose([found])
    assert "they are due where the function has them, with strides (1, 6), not row by row" in finding.evidence


# ---- what does not end


def test_a_walk_that_does_not_end_is_the_last_and_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.analyze.ptx.MAX_STEPS", 1000)
    found = judge(read_request(kernel_file(tmp_path, INDEX + "for (; i < n; i += 0) out[i] = x[i] + y[i];")))
    assert found.num_walked == 2  # no element, and one
    assert [note for note in found.notes if "n = 1, the walk of its PTX was stopped" in note]


def test_after_a_launch_that_did_not_end_no_sanitizer_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wideload.analyze.explain import GpuFigures

    monkeypatch.setattr(
        sys.modules["wideload.judge.child"],
        "run_in_children",
        lambda request, cases, device: (Trial(cases[2], error=f"{NO_ANSWER} 120 s"),),
    )
    monkeypatch.setattr(sys.modules["wideload.judge.judge"], "read_device", lambda device: GpuFigures(find_target("h200")))
    found = judge(read_request(kernel_file(tmp_path)), device=torch.device("cuda", 0), sanitizing="yes")
    assert [finding.bug for finding in found.findings] == ["hang"]
    assert "compute-sanitizer was not run: a launch did not end" in found.notes


def test_a_sanitizer_that_takes_too_long_ends_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool, started = tmp_path / "compute-sanitizer", tmp_path / "pid"
    tool.write_text(f"#!/bin/sh\nsleep 60 &\necho $! > {started}\nwait\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sys.modules["wideload.judge.sanitizer"], "_TIMEOUT_S", 1)
    with pytest.raises(WideloadError, match="had not ended after 1 s"):
        sanitize(tool, ["true"], "", {"PATH": os.environ["PATH"]})
    child = Path("/proc", started.read_text().strip())
    for _ in range(100):  # until whoever inherits it has taken note of its end
        if not child.exists() or " Z " in (child / "stat").read_text():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"{child} is still there")
