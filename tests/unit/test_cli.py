"""The command line: what it prints, and the exit status that scripts go by."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import wideload as wl
from wideload import cli, demo, measure
from wideload.cli import app
from wideload.measure.labels import Label
from wideload.measure.roofline import Figure, Roofline
from wideload.spelling import make_arguments


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"wideload {wl.__version__}\n")


HELP = {
    (): ["demo", "bench", "roofline", "compare", "--version"],
    ("demo",): ["--tokens", "--device", "--json", "Exits with 1"],
    ("bench",): ["--against", "--sweep", "'bf16[n]' 'bf16[n]' --sweep n=2^10..2^28", "[:, 1:-1]", "Exits with 1"],
    ("roofline",): ["--refresh", "--markdown", "Exits with 1 without a GPU"],
    ("report",): ["--output", "--pictures", "wideload report bench.json explain.json", "'wideload[plots]'", "Exits with 1"],
    ("build",): ["wideload build swiglu 'bf16[8192, 14336]'", "--in-place", "out=bf16[n]", "WIDELOAD_BUILT_DIR", "Exits with 1"],
    ("compare",): ["wideload compare before.json after.json", "3 if something is UNCLEAR"],
}


@pytest.mark.parametrize("command", HELP)
def test_help_says_what_there_is(command: tuple[str, ...]) -> None:
    result = run(*command, "--help")
    assert result.exit_code == 0
    assert [words for words in HELP[command] if words not in result.stdout] == []


def test_the_script_is_installed_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from wideload.cli import app; app()", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"wideload {wl.__version__}\n")


def test_demo_prints_tables() -> None:
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for words in ("SwiGLU", "bias + GELU", "torch eager", *demo.ARCHS, "3 of 3", "H200 SXM", "293.6", "(computed)", "Good:"):
        assert words in result.stdout
    assert "(measured)" not in result.stdout


def test_demo_writes_json() -> None:
    result = run("demo", "--tokens", "8", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["tokens"], report["device"], report["faults"], report["timings"]) == (8, "CPU", [], [])
    assert [kernel["arch"] for kernel in report["kernels"]] == [*demo.ARCHS, *demo.ARCHS]
    assert report["checks"][0]["wideload"]["num_exact"] > 0
    assert {bound["tag"] for bound in report["bounds"]} == {"computed"}
    assert report["bounds"][0]["least_times"][0].keys() == {"gpu", "memory_bandwidth_gbps", "time_us"}


def test_demo_fails_on_a_wrong_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ARCHS", ("sm_90",))
    wrong = wl.fuse(lambda gate, up: torch.nn.functional.silu(gate) * up * 1.02)
    monkeypatch.setattr(demo, "CASES", (dataclasses.replace(demo.CASES[0], fused=wrong),))
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "FAILED: SwiGLU is up to" in result.stdout
    assert json.loads(run("demo", "--tokens", "8", "--device", "cpu", "--json").stdout)["faults"]


def test_demo_fails_on_a_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ARCHS", ("sm_80",))
    compile_case = demo.compile_case
    monkeypatch.setattr(demo, "compile_case", lambda case, arch: dataclasses.replace(compile_case(case, arch), spill_bytes=4))
    result = run("demo", "--tokens", "8", "--device", "cpu")
    assert result.exit_code == 1
    assert "SwiGLU spills 4 bytes on sm_80" in result.stdout


def test_times_are_printed_as_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def bench(*args: Any, mode: str, **kwargs: Any) -> measure.BenchResult:  # a CPU has no cold L2
        return measure.bench(*args, max_seconds=0.02, **kwargs)

    monkeypatch.setattr(demo, "bench", bench)
    timing = demo.time_case(demo.CASES[0], 4, torch.device("cpu"))
    median_us = 123.4
    copy = timing.result["device copy"]
    subject = timing.result.subject
    assert subject.time_us is not None
    assert copy.time_us is not None
    figures = dataclasses.replace(subject, time_us=dataclasses.replace(subject.time_us, median=median_us, n=30), bytes_per_second=4.2e12)
    slow = dataclasses.replace(copy, time_us=dataclasses.replace(copy.time_us, median=2 * median_us))
    failed = dataclasses.replace(timing.result["torch eager"], time_us=None, labels=(Label("FAILED", "out of memory"),))
    result = dataclasses.replace(
        timing.result, subject=figures, against=(failed, slow), nominal_bytes_per_second=4.8e12, minimal_bytes=480_000_000
    )
    cli._print_timings([dataclasses.replace(timing, result=result)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["SwiGLU", "wideload", "123.4", "30", "4,200", "2.00"] in lines
    assert ["torch", "eager", "-"] in lines
    assert ["least", "(computed)", "100.0", "4,800"] in lines  # 0.48 GB at 4.8 TB/s
    assert "SwiGLU, torch eager: FAILED: out of memory".split() in lines
    assert any("(measured):" in line for line in lines)


@pytest.mark.parametrize(
    ("device", "said"),
    [("cuda:99", "torch sees"), ("meta", "allowed: cpu, cuda, cuda:N"), ("toaster", "--device toaster")],
)
def test_a_bad_device_is_one_message(device: str, said: str) -> None:
    result = run("demo", "--device", device)
    assert result.exit_code == 1
    assert result.stderr.startswith("DeviceError: ")
    assert said in result.stderr
    assert isinstance(result.exception, SystemExit)  # not the error itself, which would print a traceback


def test_bad_usage_is_status_2() -> None:
    assert run("demo", "--tokens", "0").exit_code == 2
    assert run("demonstrate").exit_code == 2


# ---- bench

FUNCTIONS = """
import torch, wideload as wl

@wl.fuse
def scaled(x, y, factor=2.0):
    return (x + y) * factor

def plain(x, y, factor=2.0):
    return (x + y) * factor

def off(x, y, factor=2.0):
    return (x + y) * factor * 1.1

def noise(x):
    return torch.rand_like(x)

def fails(x):
    raise RuntimeError("[n] is wrong")

def fails_in_torch(x):
    return torch.nn.functional.dropout(x, p=7.0)

def fails_from_16(x):
    return x.neg() if x.numel() < 16 else fails(x)

def sized(x, mode):
    return x + mode
"""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return str(path)


def run_bench(*arguments: str) -> Result:
    return run("bench", *arguments, "--device", "cpu", "--max-seconds", "0.02", "--no-explain")


def test_bench_explains_what_it_timed(monkeypatch: pytest.MonkeyPatch, functions: str) -> None:
    monkeypatch.setattr(demo, "CPU_TOKENS", 3)
    quick = ("--device", "cpu", "--max-seconds", "0.02")
    text = run("bench", "swiglu", *quick).stdout
    table, _, explanation = text.partition("There is no GPU here: what follows is computed for an H200, with 16384 tokens.")
    assert "on gate bf16[3, 14336], up bf16[3, 14336]" in table
    assert "swiglu on H200 SXM (sm_90): 1 kernel, 234,881,024 elements" in explanation  # 16384 x 14336
    assert "1. Memory-bound at the wall: 6 bytes an element" in explanation
    own = run("bench", f"{functions}:plain", "f32[64,3]", "f32[3]", *quick, "--markdown").stdout
    assert "| x, read: f32[64, 3] | 768 | B | computed |" in own  # the operands' own size
    assert "**Verdict**" in own
    for silent in (("--no-explain",), ("--csv",), ("--json", "-"), ("--sweep", "tokens=2")):
        assert "Verdict" not in run("bench", "swiglu", *quick, *silent).stdout


def test_what_cannot_be_explained_is_timed_all_the_same() -> None:
    result = run("bench", "torch:sum", "f32[8]", "--check", "none", "--device", "cpu", "--max-seconds", "0.02")
    assert result.exit_code == 0, result.output
    assert "torch:sum is not explained: " in result.stdout


def test_bench_times_what_is_spelt(functions: str) -> None:
    operands = ("bf16[64,9].t()[:, 1:-1]@3", "bf16[]", "factor=3")
    result = run_bench(f"{functions}:scaled", *operands, "--against", "eager", "--against", f"{functions}:plain", "--json", "-")
    assert result.exit_code == 0, result.output
    measured = wl.BenchResult.from_json(result.stdout)
    assert measured.subject.name == f"{functions}:scaled"
    assert [contender.name for contender in measured.against] == ["eager", f"{functions}:plain"]
    assert all(contender.time_us is not None for contender in measured.contenders)
    x, y, factor = measured.arguments
    assert (x.shape, x.strides, x.offset, y.shape, factor.value) == ((9, 62), (1, 9), 12, (), "3")
    assert measured.minimal_bytes == 2 * (9 * 62 + 1 + 9 * 62)
    assert measured.checked_against == f"{functions}:scaled.reference"


def test_bench_of_an_op_needs_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "CPU_TOKENS", 3)
    result = run_bench("swiglu")
    assert result.exit_code == 0, result.output
    assert "on gate bf16[3, 14336], up bf16[3, 14336]" in result.stdout
    assert wl.BenchResult.from_json(run_bench("swiglu", "--json", "-").stdout).arguments[1].shape == (3, 14336)
    sized = run_bench("swiglu", "--sweep", "tokens=2")
    assert "on gate bf16[2, 14336], up bf16[2, 14336] at tokens=2" in sized.stdout


def test_bench_fails_on_a_wrong_subject_alone(functions: str) -> None:
    operands = ("f32[8]", "f32[8]")
    wrong = run_bench(f"{functions}:off", *operands, "--check", f"{functions}:plain")
    assert wrong.exit_code == 1
    assert "WRONG: 8 of 8 elements differ" in wrong.stdout
    rival = run_bench(f"{functions}:scaled", *operands, "--against", f"{functions}:off")
    assert rival.exit_code == 0
    assert "WRONG: 8 of 8 elements differ" in rival.stdout


def test_bench_of_random_results_is_not_checked(functions: str) -> None:
    result = run_bench(f"{functions}:noise", "f32[8]", "--check", "none", "--csv")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1].endswith(",UNCHECKED")


def test_bench_takes_negative_operands_and_out_and_bytes() -> None:
    result = run_bench("torch:clamp", "f32[6]", "-1", "1", "out=f32[6]", "--bytes", "2 * 4 * 6", "--json", "-")
    assert result.exit_code == 0, result.output
    measured = wl.BenchResult.from_json(result.stdout)
    assert [argument.name for argument in measured.arguments][-1] == "out"
    assert [argument.value for argument in measured.arguments][1:3] == ["-1", "1"]
    assert measured.minimal_bytes == 48


def test_the_seed_is_that_of_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(cli, "make_arguments", lambda *args, **options: made.append(make_arguments(*args, **options)) or made[-1])
    result = run_bench("torch:neg", "f32[8]", "--seed", "3", "--json", "-")
    assert json.loads(result.stdout)["seed"] == 3
    assert torch.equal(made[0][0][0], measure.random_tensor((8,), seed=3))


def test_bench_sweeps_into_every_format(tmp_path: Path) -> None:
    path = tmp_path / "sweep.json"
    arguments = ("torch:neg", "f32[n]", "--against", "torch:negative", "--sweep", "n=4..8", "--bytes", "8*n", "--json", str(path))
    table = run_bench(*arguments)
    assert table.exit_code == 0, table.output
    rows = [line.split()[:2] for line in table.stdout.splitlines()[1:5]]
    assert rows == [["4", "torch:neg"], ["4", "torch:negative"], ["8", "torch:neg"], ["8", "torch:negative"]]
    points = json.loads(path.read_text())["points"]
    assert [(point["sizes"], point["result"]["minimal_bytes"]) for point in points] == [({"n": 4}, 32), ({"n": 8}, 64)]
    csv = run_bench(*arguments, "--csv").stdout.splitlines()
    assert csv[0].startswith("n,contender,mode,median_us,")
    assert [line.split(",")[:3] for line in csv[1:]] == [[*row, "wall"] for row in rows]
    markdown = run_bench(*arguments, "--markdown").stdout.splitlines()
    assert markdown[0].startswith("| n |  | median us |")
    assert [[cell.strip() for cell in line.split("|")[1:3]] for line in markdown[2:6]] == rows


def test_what_a_function_raises_is_one_message_with_its_line(functions: str) -> None:
    result = run_bench(f"{functions}:fails", "f32[4]")
    assert result.exit_code == 1
    line = FUNCTIONS.splitlines().index('    raise RuntimeError("[n] is wrong")') + 1
    assert result.stderr == f"WideloadError: {functions}:fails raised RuntimeError: [n] is wrong (at {functions}:{line})\n"
    in_torch = run_bench(f"{functions}:fails_in_torch", "f32[4]")
    assert in_torch.stderr.endswith(f"(at {functions}:{FUNCTIONS.splitlines().index('def fails_in_torch(x):') + 2})\n")
    shapes = run_bench("torch:add", "f32[4]", "f32[3]")
    assert "torch:add raised RuntimeError: The size of tensor a (4)" in shapes.stderr
    assert "(at " not in shapes.stderr


def test_a_sweep_that_fails_keeps_what_it_has(functions: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    result = run_bench(f"{functions}:fails_from_16", "f32[n]", "--sweep", "n=4..16", "--json", str(path))
    assert result.exit_code == 1
    assert [point["sizes"]["n"] for point in json.loads(path.read_text())["points"]] == [4, 8]
    assert "RuntimeError: [n] is wrong" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("swigul",), 1, "Did you mean 'swiglu'?"),
        (("torch:neg", "f32[4"), 1, "operand 'f32[4' cannot be read"),
        (("torch:neg", "f32[n]"), 1, "--sweep n=1024"),
        (("torch:neg", "f32[4]", "--sweep", "n=4"), 1, "'n' stands in none of the operands"),
        (("torch:neg", "f32[4]", "--against", "eager"), 1, "not fused"),
        (("torch:neg", "f32[4]", "--against", "torch:ngea"), 1, "has no 'ngea'"),
        (("torch:neg", "f32[4]", "--mode", "cold"), 1, "mode='cold' is about a GPU's L2"),
        (("torch:neg", "f32[4]", "--mode", "warm"), 2, "warm"),
        (("torch:neg", "f32[4]", "--jsno", "x"), 2, "there is no option --jsno"),
        (("torch:neg", "f32[4]", "--json", "-", "--csv"), 2, "choose one"),
        (("torch:neg", "f32[4]", "--json", "no/such/folder.json"), 2, "there is no such folder"),
        (("torch:neg", "f32[4]", "--json", "."), 2, "--json . is a folder"),
        (("torch:neg", "f32[4]", "--json", ""), 2, "is a folder"),
        ((), 2, "function"),
    ],
)
def test_what_bench_refuses(arguments: tuple[str, ...], status: int, said: str) -> None:
    result = run_bench(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert said in " ".join(result.stderr.replace("│", " ").split())
    assert isinstance(result.exception, SystemExit)


def test_results_that_cannot_be_kept_are_printed() -> None:
    result = run_bench("torch:neg", "f32[4]", "--json", "/dev/full")
    assert result.exit_code == 1
    assert "torch:neg" in result.stdout
    assert result.stderr == "WideloadError: --json /dev/full cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("explain", "{}:fails", "f32[4]", "--target", "h200"), "{}:fails raised KeyError: 'it' (at {}:"),
        (("explain", "{}:fails", "--target", "h200"), "{}:fails raised TypeError: "),
        (("build", "{}:fails", "f32[4]", "--target", "h200", "-o", "kernels"), "{}:fails raised KeyError: 'it' (at {}:"),
        (("build", "{}:ends", "f32[4]", "--target", "h200", "-o", "kernels"), "could not be run: SystemExit: 7 (at "),
        (("demo", "--tokens", "100000000000000", "--device", "cpu"), "the demo with --tokens 100000000000000 raised RuntimeError"),
        (("demo", "--device", "cuda:-1"), "DeviceError: --device cuda:-1: Invalid device string"),  # and no emoji
    ],
)
def test_what_users_code_and_memory_make_go_wrong_is_one_message(arguments: tuple[str, ...], said: str, tmp_path: Path) -> None:
    path = tmp_path / "functions.py"
    path.write_text("def fails(x):\n    raise KeyError('it')\n")
    if "{}:ends" in arguments:
        path.write_text("raise SystemExit(7)\n")
    result = run(*(word.replace("{}", str(path)) for word in arguments))
    assert (result.exit_code, result.stdout) == (1, "")
    assert said.replace("{}", str(path)) in result.stderr
    assert isinstance(result.exception, SystemExit)


def test_a_full_disk_below_standard_output_is_one_message() -> None:
    command = [sys.executable, "-m", "wideload", "cache", "ls"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "OSError: [Errno 28] No space left on device\n")


def test_the_number_of_a_gpu_is_of_decimal_digits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WIDELOAD_TUNING", str(tmp_path / "tuning.json"))
    result = run("tune", "--device", "²")
    assert (result.exit_code, isinstance(result.exception, SystemExit)) == (1, True)
    assert "DeviceError" in result.stderr


def test_a_keyword_that_bench_has_as_well_is_refused(functions: str) -> None:
    result = run_bench(f"{functions}:sized", "f32[4]", "mode=2")
    assert result.exit_code == 1
    assert "mode= is an option of wl.bench as well. Give it by its place" in result.stderr
    assert run_bench(f"{functions}:sized", "f32[4]", "2").exit_code == 0


# ---- compare


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = measure.bench(torch.neg, measure.random_tensor((8,)), name="neg", max_samples=5, warm_up_seconds=0.0)
    folder = tmp_path_factory.mktemp("stored")
    for name, time_us in (("fast", 2.0), ("slow", 3.0)):
        times = dataclasses.replace(
            result.subject, time_us=measure.statistics.summarize([time_us] * 40), relative_error=0.0, calls_per_sample=1, labels=()
        )
        (folder / f"{name}.json").write_text(dataclasses.replace(result, subject=times).to_json())
    noisy = dataclasses.replace(result.subject, time_us=measure.statistics.summarize([1.0, 5.0] * 20), labels=())
    (folder / "noisy.json").write_text(dataclasses.replace(result, subject=noisy).to_json())
    return folder


@pytest.mark.parametrize(
    ("a", "b", "verdict", "status"),
    [("fast", "slow", "SLOWER", 1), ("slow", "fast", "FASTER", 0), ("fast", "fast", "SAME", 0), ("noisy", "fast", "UNCLEAR", 3)],
)
def test_compare_exits_by_its_verdict(a: str, b: str, verdict: str, status: int, stored: Path) -> None:
    paths = [str(stored / f"{name}.json") for name in (a, b)]
    text = run("compare", *paths)
    assert text.exit_code == status
    assert verdict in text.stdout
    as_json = run("compare", *paths, "--json")
    assert as_json.exit_code == status
    report = json.loads(as_json.stdout)
    assert (report["exit_code"], [row["verdict"] for row in report["rows"]]) == (status, [verdict])


def test_compare_has_a_margin(stored: Path) -> None:
    assert run("compare", str(stored / "fast.json"), str(stored / "slow.json"), "--same-within", "0.6").exit_code == 0


def test_files_that_cannot_be_compared_are_status_2(stored: Path) -> None:
    missing = run("compare", str(stored / "fast.json"), str(stored / "none.json"))
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "cannot be read: No such file" in missing.stderr
    assert run("compare", str(stored / "fast.json")).exit_code == 2


# ---- roofline


def roof(device: Any, *, refresh: bool) -> Roofline:
    figure = Figure(4800.0, "GB/s", "computed", "device attributes")
    return Roofline(f"GPU {device}", "GPU-0", "580", "sm_90", figure, None, {"1R1W": figure}, {}, {}, (f"refreshed: {refresh}",))


def test_roofline_prints_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "roofline", roof)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    text = run("roofline").stdout
    assert text.splitlines()[0] == "GPU None (GPU-0), driver 580, sm_90"
    assert "note: refreshed: False" in text
    assert json.loads(run("roofline", "--json", "--refresh").stdout)["notes"] == ["refreshed: True"]
    markdown = run("roofline", "--markdown", "--device", "1").stdout.splitlines()
    assert markdown[0].startswith("GPU cuda:1 ")
    assert "| ceiling 1R1W | 4800 | GB/s | computed | device attributes |" in markdown


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "said"), [((), "torch sees none"), (("--device", "0"), "cuda:0"), (("--device", "toaster"), "toaster")]
)
def test_roofline_without_a_gpu_is_an_error(arguments: tuple[str, ...], said: str) -> None:
    result = run("roofline", *arguments)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("DeviceError: ")
    assert said in result.stderr
