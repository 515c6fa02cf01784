"""Tries every fp32, bf16 and fp16 input of every op against its exact value, and 10^8 pairs of every op of two operands.

    python -m tests.proofs --device cuda --json tests/proofs/cuda.json          # the whole proof, on a GPU
    python -m tests.proofs --device cuda --json F --resume F --seconds 60       # a part of it, behind what F holds
    python -m tests.proofs --device emulator --only exp                         # the kernels on the CPU; --device cpu is the reference

An error is counted in units in the last place from the correctly rounded value. A stride should be odd: an even one leaves the last bits
of every input the same. The exit status is 1 where a bound is broken or is looser than NVIDIA's and eager torch's own largest error and
1, and 3 where time ran out. docs/numerics.md shows tests/proofs/cuda.json; ``python -m tests.unit.test_documents`` writes it.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.proofs.check import DTYPES, Record, Settings, check, prepare
from tests.proofs.report import read_report, summarize, write_report
from tests.proofs.rows import PAIRS, UNARY, Row
from wideload.measure.environment import own_commit

__all__ = ["main"]

_CHUNK = {"cuda": 1 << 27, "cpu": 1 << 20, "emulator": 1 << 20}
_STRIDE = {"cuda": 1, "cpu": 65_521, "emulator": 65_521}
_PAIRS = {"cuda": 100_000_000, "cpu": 1_000_000, "emulator": 1_000_000}
_JOBS = {"cuda": 3, "cpu": 1, "emulator": 1}
WITHIN, WRONG, UNFINISHED = 0, 1, 3


class _OutOfTime(Exception):
    """``--seconds`` have passed."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; the exit status."""
    parser = argparse.ArgumentParser("python -m tests.proofs", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu", "emulator"), default="cuda")
    parser.add_argument("--only", default="*", metavar="GLOB", help="ops by name, such as 'bessel_*'")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help="some of f32, bf16, f16")
    parser.add_argument("--operands", default="1,2", help="1 for ops of one operand, 2 for pairs")
    parser.add_argument("--stride", type=int, metavar="N", help="every Nth fp32 input; 1 on a GPU if not given")
    parser.add_argument("--pairs", type=int, metavar="N", help="pairs of each op of two operands")
    parser.add_argument("--points", type=int, default=Settings.points, metavar="N", help="inputs that are held to multiple precision")
    parser.add_argument("--chunk", type=int, metavar="N", help="inputs at a time")
    parser.add_argument("--jobs", type=int, metavar="J", help="threads: some compile while one waits for the device")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop then, with what is finished")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every record there, as they come")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="leave out what FILE holds, and keep it")
    given = parser.parse_args(arguments)
    if given.device == "emulator" and (given.jobs or 1) > 1:
        parser.error("--jobs: the emulator is one process, which takes a call at a time")
    os.environ["WIDELOAD_CACHE"] = "0"
    stride, pairs = given.stride or _STRIDE[given.device], given.pairs or _PAIRS[given.device]
    settings = Settings(given.device, stride, pairs, given.points, given.chunk or _CHUNK[given.device])
    about, commit = _describe(settings), os.environ.get("WIDELOAD_COMMIT") or own_commit()
    records = _read_earlier(given.resume, about, parser)
    done = {record.key for record in records}
    cases = [case for case in _list_cases(given) if (case[0].name, case[1]) not in done]
    deadline = time.monotonic() + given.seconds

    def on_chunk() -> None:
        if time.monotonic() > deadline:
            raise _OutOfTime

    def run(row: Row, dtype: str) -> tuple[list[Record], float]:
        on_chunk()
        began = time.monotonic()
        return check(row, dtype, settings, on_chunk, prepared.get((row, dtype))), time.monotonic() - began

    ahead = ThreadPoolExecutor(1)  # one case at a time, each by all processors, beside what the device does
    prepared = {case: ahead.submit(prepare, *case, settings) for case in cases if case[0].needs_precision}
    workers = ThreadPoolExecutor(given.jobs or _JOBS[given.device])
    running = {workers.submit(run, *case): case for case in cases}
    crashed, num_left = list[str](), 0
    for position, future in enumerate(as_completed(running), start=1):
        row, dtype = running[future]
        try:
            found, seconds = future.result()
        except _OutOfTime:
            num_left += 1
            continue
        except Exception as error:  # the rest of a long run is worth having
            print(f"{position:4} of {len(cases)}  {row.name} {dtype} crashed: {type(error).__name__}: {error}", flush=True)
            crashed.append(f"{row.name} {dtype}")
            continue
        records += [replace(record, commit=commit) for record in found]
        print(f"{position:4} of {len(cases)}  {_line(row, dtype, found, settings, seconds)}", flush=True)
        if given.json:
            write_report(given.json, about, records)
    ahead.shutdown(cancel_futures=True)
    if num_left:
        print(f"stopped after {given.seconds:g} s: {num_left} of {len(cases)} are left")
    status = UNFINISHED if num_left else WITHIN
    print(summarize(records, settings))
    if not records:
        print("nothing was tried: no row matches, or torch has none in these dtypes", file=sys.stderr)
        return status or WRONG
    if crashed:
        print(f"crashed: {', '.join(crashed)}")
    return WRONG if crashed or any(record.faults(settings) for record in records) else status


def _list_cases(given: argparse.Namespace) -> list[tuple[Row, str]]:
    names = [name for name in given.dtypes.split(",") if name]
    if unknown := set(names) - set(DTYPES):
        raise SystemExit(f"--dtypes has {', '.join(sorted(unknown))}; allowed: {', '.join(DTYPES)}")
    unary = [(row, name) for row in UNARY for name in names] if "1" in given.operands.split(",") else []
    pairs = [(row, "f32") for row in PAIRS] if "2" in given.operands.split(",") and "f32" in names else []
    cases = [case for case in unary + pairs if fnmatch.fnmatch(case[0].name, given.only)]
    return sorted(cases, key=lambda case: case[0].needs_precision)  # last, since multiple precision takes the processors long


def _describe(settings: Settings) -> dict[str, Any]:
    on = torch.cuda.get_device_name() if settings.device == "cuda" else "the CPU"
    return {
        "device": settings.device,
        "on": on,
        "torch": torch.__version__.partition("+")[0],
        "stride": settings.stride,
        "pairs": settings.pairs,
        "points": settings.points,
    }


def _read_earlier(path: Path | None, about: dict[str, Any], parser: argparse.ArgumentParser) -> list[Record]:
    if path is None or not path.exists():
        return []
    earlier, records = read_report(path)
    if earlier != about:
        parser.error(f"{path} holds a run of {earlier}, this one is of {about}: take the same settings, or another file")
    return records


def _line(row: Row, dtype: str, found: list[Record], settings: Settings, seconds: float) -> str:
    shown = [f"{record.mode} {record.tally.largest:g}{' WRONG' if record.faults(settings) else ''}" for record in found]
    eager = [f"eager torch {found[0].eager}"] if found else ["torch has no such op"]
    return f"{row.name:32} {dtype:5} {seconds:6.2f} s  {', '.join([*shown, *eager])}"


if __name__ == "__main__":
    sys.exit(main())
