"""Runs every benchmark in this folder, one after the other in processes of their own, and sums up what they found.

    python benchmarks/run_all.py [--out build/benchmarks] [--only NAME] [--skip NAME] [--samples N]

Each script's table goes to standard output as it comes, its JSON to the folder. The exit status is 0 where every row passes, 1 where one
does not or a script fails, 2 without a GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from summary import format_summary, read_program, summarize
from table import find_device

HERE = Path(__file__).parent
NO_BENCHMARKS = ("run_all", "summary", "spoilt", "table")
TO_STDOUT = ("first_call",)
"""Scripts whose ``--json`` takes no file."""
SAMPLED = ("backward", "dense", "layouts", "operators", "optimizers", "sizes")
"""Scripts that take ``--samples``."""
FAILS = (0, 1)
"""Exit statuses of a script that has written what it found."""


def find_scripts(folder: Path = HERE) -> list[str]:
    """The names of all benchmarks: programs with a ``main``, in the order of the alphabet."""
    scripts = [path for path in folder.glob("*.py") if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")]
    return sorted(path.stem for path in scripts if path.stem not in NO_BENCHMARKS)


def run_script(name: str, to: Path, num_samples: int | None = None) -> int:
    """Run one script, with so many samples where it takes them, its JSON written to ``to``; return its exit status."""
    command = [sys.executable, str(HERE / f"{name}.py")]
    if num_samples is not None and name in SAMPLED:
        command += ["--samples", str(num_samples)]
    if name not in TO_STDOUT:
        return subprocess.run([*command, "--json", str(to)], check=False).returncode
    with to.open("w", encoding="utf-8") as file:
        return subprocess.run([*command, "--json"], stdout=file, check=False).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all that are asked for; print the summary last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "benchmarks", help="the folder for what they write")
    parser.add_argument("--only", action="append", choices=find_scripts(), help="run this script; may be repeated")
    parser.add_argument("--skip", action="append", choices=find_scripts(), default=[], help="leave this script out; may be repeated")
    parser.add_argument("--samples", type=int, metavar="N", help="of each contender, where a script times several")
    options = parser.parse_args(arguments)
    if find_device() is None:
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in options.only or find_scripts() if name not in options.skip]
    programs, failed = [], []
    for number, name in enumerate(names, 1):
        print(f"\n{number}/{len(names)} {name}.py", flush=True)
        start, to = time.perf_counter(), options.out / f"{name}.json"
        to.unlink(missing_ok=True)
        status = run_script(name, to, options.samples)
        if status in FAILS and to.exists() and to.stat().st_size:
            programs.append(read_program(to))
        else:
            failed.append(f"{name}.py FAILED with status {status}: see above")
        print(f"{name}.py took {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    summary = summarize(programs)
    print()
    print("\n".join([format_summary(summary), *failed]))
    return int(bool(failed) or summary.num_kept < summary.num_rows)


if __name__ == "__main__":
    sys.exit(main())
