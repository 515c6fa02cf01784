"""What benchmarks have written, summed up: verdicts of each kind of file, means, the row furthest from the wall, tables, the run of all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import run_all
import summary
from summary import Row, find_latest, format_summary, read_program, render_summary, render_table, summarize

ROOT = Path(__file__).parents[2]


def write(folder: Path, name: str, rows: list[dict[str, Any]], **others: Any) -> Path:
    path = folder / f"{name}.json"
    environment = {"commit": "abc123", "time_utc": others.pop("time_utc", "2026-11-30T00:00:00+00:00")}
    path.write_text(json.dumps({"schema": 1, "environment": environment, "rows": rows, **others}))
    return path


def cased(name: str, verdict: str = "PASS", wideload_us: float = 100.0, **peers_us: float) -> dict[str, Any]:
    """A row of table.py, whose bench took twice as long as its run beside the wall."""
    bench = {"subject": {"time_us": {"median": 2 * wideload_us}}}
    figures = {"wideload_us": wideload_us, "wall_ratio": 50 / wideload_us, "ratio": 0.5, "counted": "wall"}
    return {"case": name, "verdict": verdict, "bench": bench, "peers_us": peers_us, **figures}


def test_rows_of_every_kind(tmp_path: Path) -> None:
    backward = {"wideload": 10.0, "eager": 30.0, "compile": 5.0}
    adamw = {"wideload": 1.0, "torch fused": 2.0}
    kinds = {
        "dense": [cased("x + b", eager=400.0, compile=100.0)],
        "backward": [{"case": "swiglu", "verdict": "PASS", "wall_ratio": 0.9, "times_us": backward}],
        "optimizers": [{"case": "AdamW", "verdict": "short: 0.9 of the wall", "wall_ratio": 0.9, "times_us": adamw}],
        "ruler": [{"what": " bench ", "found": "1 us", "allowed": "", "is_kept": False}],
        "host": [
            {"name": "call", "eager": "x + y", "most": 1.0, "ratio": 1.0},
            {"name": "other", "eager": "x + y", "most": 1.0, "ratio": 1.66},
        ],
        "sizes": [{"function": "x + b", "elements": 1024, "verdict": "PASS", "times_of": {"eager": 0.5, "compile": 0.25, "clone": 1.0}}],
    }
    found = {name: read_program(write(tmp_path, name, rows)).rows for name, rows in kinds.items()}
    assert found == {
        "dense": (Row("x + b", "PASS", 0.5, {"eager": 2.0, "compile": 0.5}),),
        "backward": (Row("swiglu", "PASS", 0.9, {"eager": 3.0, "compile": 0.5}),),
        "optimizers": (Row("AdamW", "short: 0.9 of the wall", 0.9),),
        "ruler": (Row("bench", "short: 1 us"),),
        "host": (Row("call", "PASS"), Row("other", "short: 1.66 times x + y, allowed 1.0")),
        "sizes": (Row("x + b, n = 1024", "PASS", None, {"compile": 4.0}),),
    }
    path = tmp_path / "first_call.json"
    path.write_text(json.dumps({"parts_ms": {"import": 90.0, "new": 200.0, "more": 1.0}, "goals_ms": {"import": 100, "new": 150}}))
    assert read_program(path).rows == (Row("import", "PASS"), Row("new", "short: 200 ms, allowed 150"))


def test_what_is_wrong_or_failed_counts_in_no_mean(tmp_path: Path) -> None:
    rows = [
        cased("good", eager=400.0),
        cased("wrong", "WRONG: 3 steps off", 1.0, eager=4e4),
        cased("short", "short: 0.1", 1000.0, eager=1000.0),
    ]
    of = summarize([read_program(write(tmp_path, "dense-h200-abc", rows, failed={"broken": "RuntimeError: no"}))])
    assert of.times_as_fast == {"eager": (pytest.approx(1.0), 2)}  # 2 and 1/2
    assert (of.num_kept, of.num_rows) == (1, 4)
    assert of.furthest is not None
    assert of.furthest[1].name == "short"
    assert format_summary(of).splitlines() == [
        "dense      1 of 4    PASS",
        "       wrong: WRONG: 3 steps off",
        "       short: short: 0.1",
        "       broken: FAILED: RuntimeError: no",
        "",
        "1 of 4 rows pass",
        "1.00 times as fast as eager: geometric mean over the 2 rows that it ran",
        "smallest share of the wall: 0.050, short (dense.py)",
    ]
    assert "| `dense.py` | 4 | 1 | abc123 |" in render_summary(of)
    assert format_summary(summarize([])).strip() == "0 of 0 rows pass"


def test_the_table_of_a_document() -> None:
    rows = [
        cased("x + b", eager=400.0, compile=101.04),
        {**cased("x[1:]", "short: 0.9 of the aligned", eager=300.0), "counted": "aligned", "ratio": 0.9},
    ]
    assert render_table({"rows": rows}, "function").splitlines()[2:] == [
        "| x + b | 50.0 | 100.0 | 400.0 | 101.0 | 0.500 |",
        "| x[1:] | 50.0 | 100.0 | 300.0 |  | **0.900 of aligned** |",
    ]


def test_the_newest_result_counts(tmp_path: Path) -> None:
    write(tmp_path, "dense-h200-zzz", [], time_utc="2026-01-01T00:00:00+00:00")
    newest = write(tmp_path, "dense-h200-aaa", [], time_utc="2026-02-01T00:00:00+00:00")
    write(tmp_path, "dense_more-h200-bbb", [], time_utc="2026-03-01T00:00:00+00:00")
    assert find_latest("dense", tmp_path) == newest
    assert find_latest("host", tmp_path) is None


def test_all_committed_results_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    paths = sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert all(read_program(path).rows for path in paths if not path.name.startswith("ladder"))
    with pytest.raises(ValueError, match=r"ladder-.* is no result of a benchmark here"):
        read_program(next(path for path in paths if path.name.startswith("ladder")))
    assert summary.main([str(path) for path in paths]) == 1
    assert "is no result" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        summary.main([])


# ---- the run of all


def test_every_benchmark_is_found() -> None:
    found = run_all.find_scripts()
    assert {"dense", "explained", "first_call", "host", "layouts", "optimizers", "ruler", "sizes"} <= set(found)
    assert not set(found) & set(run_all.NO_BENCHMARKS)
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in (*found, *run_all.NO_BENCHMARKS))


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three programs: one that passes, one that writes a short row and returns 1, one that fails."""
    guard = 'if __name__ == "__main__":\n    '
    passing = json.dumps({"schema": 1, "rows": [cased("x", eager=400.0)], "environment": {}})
    short = json.dumps({"schema": 1, "rows": [cased("y", "short: 1")], "environment": {}})
    (tmp_path / "good.py").write_text(f"import sys\n{guard}open(sys.argv[2], 'w').write({passing!r})\n")
    (tmp_path / "bad.py").write_text(f"import sys\n{guard}open(sys.argv[2], 'w').write({short!r}); sys.exit(1)\n")
    (tmp_path / "broken.py").write_text(f"import sys\n{guard}sys.exit(3)\n")
    (tmp_path / "table.py").write_text("")
    monkeypatch.setattr(run_all, "HERE", tmp_path)
    monkeypatch.setattr(run_all, "find_scripts", lambda: ["bad", "broken", "good"])
    monkeypatch.setattr(run_all, "find_device", lambda: torch.device("cpu"))
    return tmp_path


def test_all_are_run_and_summed_up(scripts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run_all.main(["--out", str(scripts / "out")]) == 1
    printed = capfd.readouterr().out
    assert "1 of 2 rows pass" in printed
    assert printed.splitlines()[-1] == "broken.py FAILED with status 3: see above"
    assert run_all.main(["--out", str(scripts / "out"), "--only", "good"]) == 0
    assert run_all.main(["--out", str(scripts / "out"), "--skip", "bad", "--skip", "broken"]) == 0


def test_samples_are_asked_of_the_scripts_that_take_them(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "SAMPLED", ("good",))
    (scripts / "good.py").write_text(
        "import json, sys\n" + 'if __name__ == "__main__":\n    '
        "open(sys.argv[-1], 'w').write(json.dumps({'schema': 1, 'environment': {}, 'rows': [], 'arguments': sys.argv[1:-2]}))\n"
    )
    out = scripts / "out"
    assert run_all.main(["--out", str(out), "--only", "good", "--samples", "7"]) == 0
    assert json.loads((out / "good.json").read_text())["arguments"] == ["--samples", "7"]
    assert run_all.main(["--out", str(out), "--only", "good"]) == 0
    assert json.loads((out / "good.json").read_text())["arguments"] == []


def test_the_scripts_that_take_samples() -> None:
    texts = {name: (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8") for name in run_all.find_scripts()}
    assert {name for name, text in texts.items() if "run_cases(" in text or "new_parser(" in text} == set(run_all.SAMPLED)


def test_a_script_that_writes_to_standard_output(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (scripts / "good.py").write_text('import json\nprint(json.dumps({"parts_ms": {"new": 1.0}, "goals_ms": {"new": 2}}))\n')
    monkeypatch.setattr(run_all, "TO_STDOUT", ("good",))
    assert run_all.main(["--out", str(scripts / "out"), "--only", "good"]) == 0
    assert json.loads((scripts / "out" / "good.json").read_text())["parts_ms"] == {"new": 1.0}


def test_without_a_gpu_nothing_is_run(scripts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_all, "find_device", lambda: None)
    assert run_all.main(["--out", str(scripts / "out")]) == 2
    assert not (scripts / "out").exists()


def test_the_make_target_runs_it() -> None:
    assert "$(BIN)/python benchmarks/run_all.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
