"""Turns a command into what NVIDIA's compute-sanitizer finds wrong with the kernels that it runs.

Knows the tool and its report; it must not know what the command checks.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wideload.errors import WideloadError

__all__ = ["TOOLS", "Fault", "find_sanitizer", "parse_report", "sanitize"]

TOOLS = ("memcheck", "racecheck")
"""For addresses, and for shared memory. Values that were never written, the judge's own trials find."""
_TIMEOUT_S = 300
_PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")

FaultKind = Literal["outside", "misaligned", "race", "error"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One kind of fault of the report: its own words, where in the source, and how often."""

    kind: FaultKind
    text: str
    line: int | None = None
    count: int = 1

    def __str__(self) -> str:
        where = f" at line {self.line}" if self.line else ""
        return f"{self.text}{where} ({self.count} times)"


def find_sanitizer() -> Path | None:
    """Where compute-sanitizer is: on the path, or in a toolkit; None where it is not."""
    found = shutil.which("compute-sanitizer") or next(
        (str(path) for place in _PLACES if os.access(path := Path(place, "compute-sanitizer"), os.X_OK)), None
    )
    return Path(found) if found else None


_HEADS: tuple[tuple[FaultKind, re.Pattern[str]], ...] = (
    ("race", re.compile(r"(?:Error|Warning): Race reported between .*?access")),
    ("race", re.compile(r"Potential \w+ hazard detected at \S+")),
    ("outside", re.compile(r"Invalid __(?:global|shared|local)__ (?:read|write|atomic) of size \d+(?: bytes)?")),
    ("error", re.compile(r"Barrier error detected\b.*")),
)
_MISALIGNED = re.compile(r"is misaligned|Misaligned .*access", re.IGNORECASE)
_LINE = re.compile(r"\bat .*?(?:\+0x[0-9a-f]+)? in (?:\S+?):(\d+)(?::\w+)?")


def parse_report(report: str) -> tuple[Fault, ...]:
    """Read what the tool wrote: a line that names the fault, then lines that say where.

    >>> parse_report('''========= Invalid __global__ read of size 4 bytes
    ... =========     at add+0x90 in kernel.cu:3
    ... =========     Address 0x7f0 is out of bounds
    ... ''')
    (Fault(kind='outside', text='Invalid __global__ read of size 4 bytes', line=3, count=1),)
    """
    found: list[Fault] = []
    lines = [line.removeprefix("=========").strip() for line in report.splitlines() if line.startswith("=========")]
    heads = [(at, kind, head[0]) for at, line in enumerate(lines) for kind, pattern in _HEADS if (head := pattern.search(line))]
    ends = [*(at for at, *_ in heads), len(lines)][1:]
    for (at, kind, text), following in zip(heads, ends, strict=True):
        block = "\n".join(lines[at:following])
        line = _LINE.search(block)
        is_misaligned = kind == "outside" and _MISALIGNED.search(block)
        found.append(Fault("misaligned" if is_misaligned else kind, text, int(line[1]) if line else None))
    counts: dict[Fault, int] = {}
    for fault in found:
        counts[fault] = counts.get(fault, 0) + 1
    return tuple(Fault(fault.kind, fault.text, fault.line, count) for fault, count in counts.items())


def _run(command: Sequence[str], stdin: str, environment: Mapping[str, str]) -> str:
    """What ``command`` writes. The tool starts the process that uses the GPU: both end if it takes too long."""
    with subprocess.Popen(
        list(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=dict(environment),
        start_new_session=True,
    ) as process:
        try:
            return process.communicate(stdin, timeout=_TIMEOUT_S)[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # not yet waited for, so that the number is still its own
            raise


def sanitize(tool: Path, command: Sequence[str], stdin: str, environment: Mapping[str, str]) -> tuple[Fault, ...]:
    """Run ``command`` under each of `TOOLS`, and return what they found. Raises ``WideloadError`` where they could not run it."""
    found: list[Fault] = []
    for name in TOOLS:
        try:
            report = _run(
                # API errors aside: the bindings ask a driver that is older than they are for functions it has not.
                [str(tool), "--tool", name, "--print-limit", "20", "--report-api-errors", "no", *command],
                stdin,
                {**environment, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},  # or one allocation holds many tensors
            )
        except subprocess.TimeoutExpired:
            raise WideloadError(f"{tool.name} --tool {name} had not ended after {_TIMEOUT_S} s") from None
        if "COMPUTE-SANITIZER" not in report or "Unable to" in report or "Target application terminated before" in report:
            raise WideloadError(f"{tool.name} --tool {name} could not run: {report.strip()[-300:]}")
        found += parse_report(report)
    return tuple(found)
