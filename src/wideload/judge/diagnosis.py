"""Turns what was seen of a kernel into the bugs that explain it, each with its name, the evidence and the cure.

A pure function of trials and of a sanitizer's findings; it must not know how these came about.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from wideload.judge.sanitizer import Fault
from wideload.judge.trial import Trial

__all__ = ["BUGS", "Bug", "Finding", "diagnose"]

Bug = Literal[
    "race", "index_32", "no_bounds_check", "outside", "tail", "misaligned", "input_written", "wrong_stream", "result_read",
    "unwritten", "special_values", "wrong", "refused", "hang", "error",
]  # fmt: skip
"""docs/judge.md says what each means."""

BUGS: dict[Bug, str] = {
    "race": "Put __syncthreads() between writing shared memory and reading what other threads wrote, and before it is written again.",
    "index_32": "Make the index 64 bits wide before it is multiplied: (long long)blockIdx.x * blockDim.x + threadIdx.x, and n a long long. "
    "If so many are not asked for, say how many are: --most 2^31-1.",
    "no_bounds_check": "Guard the index: if (i < n). The last block has more threads than there are elements left.",
    "outside": "See which index is computed beside its tensor; --sanitize on a GPU names the line.",
    "tail": "Let what is left behind the last whole vector be done too, by single elements.",
    "misaligned": "Test the pointers for the vector's alignment and take single elements where it does not hold, or declare the parameter "
    "as a pointer to the vector (float4*), so that what is misaligned is refused.",
    "input_written": "Write through the output's pointer alone; read inputs through const __restrict__ pointers.",
    "wrong_stream": "Launch on the current stream: torch.cuda.current_stream(), at::cuda::getCurrentCUDAStream(); never stream 0.",
    "result_read": "Write results, out[i] = v: what their memory held before the launch is no zero to add to (+=, atomicAdd).",
    "unwritten": "Write every element: see --items and --grid, and that the loop goes on until n.",
    "special_values": "Keep NaN a NaN, an infinity one, and the sign of zero: fmax drops NaN, inf - inf and 0 * inf make one, "
    "exp overflows from 88.7 on.",
    "wrong": "Compare the expression with the function's, and the place where each index comes from.",
    "refused": "Pass what the parameters take, or declare them for what is passed.",
    "hang": "See that every loop ends: that its step is not 0, and its index wide enough to reach n.",
    "error": "Run it with --sanitize, which names the line.",
}  # fmt: skip
"""What to do about each."""

_LEAST_WRAP = 1 << 27
"""Elements by which an index that wraps is off, at least: 2^31 bytes of 16 bytes each."""
_OUTSIDE = re.compile(r"illegal (memory access|address)|use-after-poison|heap-buffer-overflow|SEGV|must not change", re.IGNORECASE)
_MISALIGNED = re.compile(r"misaligned", re.IGNORECASE)
_DOES_NOT_FIT = re.compile(r"argument \w+ \([\w ]+\) is \d+; allowed: ")
_TAIL_WIDTHS = tuple(1 << power for power in range(1, 14))
"""Elements that a thread, or a block, may take at a time: a vector's two up to 1024 threads of eight."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One bug: ``evidence`` is what was seen, ``cure`` what to change."""

    bug: Bug
    evidence: str

    @property
    def name(self) -> str:
        """As it is printed."""
        return _TITLES[self.bug]

    @property
    def cure(self) -> str:
        """What to change."""
        return BUGS[self.bug]

    def __str__(self) -> str:
        return f"{self.name}: {self.evidence}. {self.cure}"


_TITLES: dict[Bug, str] = {
    "race": "race",
    "index_32": "32-bit index",
    "no_bounds_check": "no bounds check",
    "outside": "memory of others",
    "tail": "missing tail",
    "misaligned": "misaligned vector access",
    "input_written": "input written",
    "wrong_stream": "wrong stream",
    "result_read": "result read",
    "unwritten": "results not written",
    "special_values": "special values",
    "wrong": "wrong results",
    "refused": "launch refused",
    "hang": "no end",
    "error": "error",
}


def diagnose(trials: Sequence[Trial], faults: Sequence[Fault] = ()) -> tuple[Finding, ...]:
    """Name the bugs that explain the trials that are not right, and a sanitizer's faults; none where all are right.

    Each rule takes the trials that it explains, and what is left is for the next: a race is not also a wrong result. A walk and a run
    of the same bug are one finding, by the run.
    """
    found: list[Finding] = []
    trials = _credible(trials)
    left = [trial for trial in trials if not trial.is_right]
    right = [trial for trial in trials if trial.is_right]
    for rule in _RULES:
        finding, explained = rule(left, right, faults)
        if finding is not None:
            found.append(finding)
        left = [trial for trial in left if trial not in explained]
    return tuple(found)


def _credible(trials: Sequence[Trial]) -> list[Trial]:
    """Without results that a walk misses, and a right run of the same case, or of a larger huge one, has."""
    right = [trial.case for trial in trials if trial.is_right and not trial.is_walked]
    most = max((case.bits for case in right), default=0)
    return [replace(t, num_unwritten=0) if t.is_walked and (t.case in right or 0 < t.case.bits <= most) else t for t in trials]


_Rule = Callable[[Sequence[Trial], Sequence[Trial], Sequence[Fault]], tuple[Finding | None, Sequence[Trial]]]
_NOTHING: tuple[None, tuple[Trial, ...]] = (None, ())


def _plain(trials: Sequence[Trial]) -> list[Trial]:
    """Neither shifted, nor special, nor huge, nor on a stream of its own: what ordinary calls are."""
    return [t for t in trials if not any(t.case.shifts) and not t.case.is_special and not t.case.bits and not t.case.is_on_stream]


def _first(trials: Sequence[Trial]) -> Trial:
    """A trial that ran, if one did, of the fewest elements."""
    return min(trials, key=lambda trial: (trial.is_walked, trial.num_elements))


def _source(trial: Trial) -> str:
    return ", by its PTX" if trial.is_walked else ""


def _race(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    unstable = [t for t in left if t.is_unstable and not _beside(t)]
    raced = [t for t in left if t.raced_bytes]
    reported = [fault for fault in faults if fault.kind == "race"]
    if not (unstable or raced or reported):
        return _NOTHING
    parts = []
    if raced:
        t = max(raced, key=lambda trial: trial.raced_bytes)
        parts.append(
            f"with {t.case}, {t.raced_bytes:,} bytes of shared memory are written by one warp and used by another with no barrier between, "
            "by its PTX"
        )
    if unstable:
        parts.append(f"with {_first(unstable).case}, two runs gave different results")
    if reported:
        parts.append(f"compute-sanitizer: {reported[0]}")
    # Values that hang on who comes first are wrong at some sizes, and all of these are the race's.
    explained = [t for t in left if t.is_unstable or t.raced_bytes or (t.num_wrong and not _beside(t))]
    return Finding("race", "; ".join(parts)), explained


def _index(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    """What is wrong only in huge cases, unless no more than an access that is a little beside its tensor."""
    huge = [t for t in left if t.case.bits and not _is_little_beside(t)]
    if not huge:
        return _NOTHING
    too_narrow = [t for t in huge if _DOES_NOT_FIT.search(t.refused)]
    small = _plain(left)
    if not too_narrow and any(not t.refused for t in small):
        return None, huge  # the same as at small sizes
    t = _first(too_narrow or huge)
    where = f"with {t.case}, more than 2^{t.case.bits} elements,"
    if too_narrow:
        return Finding("index_32", f"{where} {_lower(t.refused)}"), huge
    if t.refused:
        return _NOTHING
    seen = (
        f"the device reported {t.error!r}" if t.error
        else f"an index of 32 bits wraps: {_beside(t)}" if t.before or t.behind or t.reads
        else "an index of 32 bits wraps: the last results are not written" if t.num_unwritten and t.is_walked
        else f"{t.num_unwritten:,} results are not written" if t.num_unwritten
        else f"{t.num_wrong:,} results are wrong, from element {t.first_wrong:,} on" if t.num_wrong
        else f"inputs were written: {', '.join(t.written_inputs)}" if t.written_inputs
        else "accesses are misaligned"
    )  # fmt: skip
    return Finding("index_32", f"{where} {seen}{_source(t)}; with few elements it is right"), huge


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _is_little_beside(t: Trial) -> bool:
    """Whether all that is wrong is an access beside a tensor, by less than an index that wraps is off."""
    beside = max(t.before, t.behind, *(count for _, count in t.reads), 0)
    return 0 < beside < _LEAST_WRAP and replace(t, before=0, behind=0, reads=()).is_right


def _elements(count: int) -> str:
    return f"{count:,} element{'s' if count != 1 else ''}"


def _beside(t: Trial) -> str:
    verb = "writes" if t.is_walked else "wrote"
    parts = []
    if t.behind:
        parts.append(f"{verb} {_elements(t.behind)} behind its output")
    if t.before:
        parts.append(f"{verb} {_elements(t.before)} before its output")
    if t.reads:
        parts.append(f"reads {_elements(max(count for _, count in t.reads))} beside {' and '.join(name for name, _ in t.reads)}")
    return "the kernel " + " and ".join(parts) if parts else ""


def _bounds(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    def is_outside(t: Trial) -> bool:
        return bool(t.before or t.behind or t.reads or _OUTSIDE.search(t.error))

    explained = [t for t in left if is_outside(t)]
    reported = [fault for fault in faults if fault.kind == "outside"]
    if not explained and not reported:
        return _NOTHING
    if not explained:
        return Finding("outside", f"compute-sanitizer: {reported[0]}"), ()
    # A small overhang names the bug best: the evidence is that of the smallest size.
    t = min(explained, key=lambda t: (not (t.behind or t.before), t.is_walked, bool(t.reads), t.num_elements))
    bug: Bug = (
        "outside" if t.before or (t.reads and not any(t.behind for t in explained)) or not (t.behind or t.error) else "no_bounds_check"
    )
    seen = _beside(t) or f"the device reported {t.error!r}"
    text = f"with {t.case}, {seen}{_source(t)}"
    if reported:
        text += f"; compute-sanitizer: {reported[0]}"
    return Finding(bug, text), explained


def _tail(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    """A width such that n % width results are missing at every size, whether that is none or some."""
    missing = [t for t in _plain(left) if t.num_unwritten]
    others = _plain(right)
    if not missing or not any(t.num_elements for t in others):
        return _NOTHING  # what writes nothing at all has no tail
    for width in _TAIL_WIDTHS:
        rows = [t.num_elements // _columns(t) for t in missing]
        per_row = all(t.num_unwritten == _columns(t) % width * row for t, row in zip(missing, rows, strict=True))
        whole = all(t.num_unwritten == t.num_elements % width for t in missing)
        if whole and all(t.num_elements % width == 0 for t in others):
            what = "n"
        elif per_row and all(_columns(t) % width == 0 for t in others if t.num_elements):
            what = missing[0].case.sizes[-1][0]
        else:
            continue
        t = _first(missing)
        verb = "are" if t.num_unwritten > 1 else "is"
        explained = [t for t in left if not t.behind and not t.before and not t.error and not t.case.is_on_stream and not t.misaligned]
        return (
            Finding(
                "tail", f"the last {what} % {width} elements are not written: with {t.case}, {t.num_unwritten} {verb} missing{_source(t)}"
            ),
            explained,
        )
    return _NOTHING


def _columns(t: Trial) -> int:
    return max(1, t.case.sizes[-1][1]) if len(t.case.sizes) > 1 else max(1, t.num_elements)


def _alignment(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    explained = [t for t in left if t.misaligned or _MISALIGNED.search(t.error)]
    shifted = [t for t in left if any(t.case.shifts) and not t.refused]
    if not explained and not _plain(left):
        explained = shifted  # right at multiples, wrong beside them
    reported = [fault for fault in faults if fault.kind == "misaligned"]
    if not explained and not reported:
        return _NOTHING
    if not explained:
        return Finding("misaligned", f"compute-sanitizer: {reported[0]}"), ()
    t = _first(explained)
    off = " and ".join(f"{shift} elements" if shift > 1 else "one element" for shift in sorted({*t.case.shifts} - {0}))
    where = f" and pointers {off} behind a multiple of 16 bytes" if off else ""
    walked = list(dict.fromkeys(name for t in explained for name in t.misaligned))
    by_ptx = (
        f"{' and '.join(walked)} {'are' if len(walked) > 1 else 'is'} accessed where its width is no divisor of the address, by its PTX"
    )
    parts = [f"the device reported {t.error!r}"] if t.error else []
    parts += [f"{t.num_wrong:,} of {t.num_elements:,} results are wrong"] if t.num_wrong else []
    parts += [by_ptx] if walked else []
    return Finding("misaligned", f"with {t.case}{where}, {'; '.join(parts)}"), [*explained, *shifted]


def _inputs(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    explained = [t for t in left if t.written_inputs]
    if not explained:
        return _NOTHING
    t = _first(explained)
    return Finding("input_written", f"with {t.case}, memory of {', '.join(t.written_inputs)} changed{_source(t)}"), explained


def _stream(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    explained = [t for t in left if t.case.is_on_stream and t.num_wrong]
    if not explained or any(t.num_wrong for t in _plain(left)):
        return _NOTHING
    t = explained[0]
    text = (
        f"on a stream of its own, where inputs come late, {t.num_wrong:,} of {t.num_elements:,} results are wrong: "
        "it does not wait for that stream"
    )
    return Finding("wrong_stream", text), explained


def _result_read(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    explained = [t for t in left if t.is_result_read]
    if not explained:
        return _NOTHING
    t = _first(explained)
    launched_once = [t for t in left if t.case.is_on_stream]
    text = f"with {t.case}, results hang on what their memory held before the launch"
    return Finding("result_read", text), [*explained, *launched_once]


def _rest(bug: Bug, wants: Callable[[Trial], bool], say: Callable[[Trial], str]) -> _Rule:
    def rule(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
        explained = [t for t in left if wants(t)]
        if not explained:
            return _NOTHING
        t = _first(explained)
        return Finding(bug, f"with {t.case}, {say(t)}{_source(t)}"), explained

    return rule


def _special(left: Sequence[Trial], right: Sequence[Trial], faults: Sequence[Fault]) -> tuple[Finding | None, Sequence[Trial]]:
    explained = [t for t in left if t.case.is_special and t.num_wrong]
    if not explained or any(t.num_wrong for t in _plain(left)):
        return _NOTHING
    t = _first(explained)
    text = f"with {t.case} and NaN, infinities, -0 and subnormals among the values, {t.num_wrong:,} of {t.num_elements:,} results are wrong"
    return Finding("special_values", text), explained


_RULES: tuple[_Rule, ...] = (
    _rest("hang", lambda t: t.has_hung, lambda t: t.error),
    _race,
    _index,
    _alignment,
    _bounds,
    _tail,
    _inputs,
    _stream,
    _result_read,
    _rest(
        "unwritten",
        lambda t: bool(t.num_unwritten),
        lambda t: (
            f"{t.num_unwritten:,} of {t.num_elements:,} results are not written"
            + ("" if t.first_unwritten is None else f", from element {t.first_unwritten:,} on")
        ),
    ),
    _special,
    _rest(
        "wrong",
        lambda t: bool(t.num_wrong),
        lambda t: (
            f"{t.num_wrong:,} of {t.num_elements:,} results differ, from element {t.first_wrong:,} on"
            + (f"; they are due where the function has them, with strides {t.strides}, not row by row" if t.strides else "")
        ),
    ),
    _rest("refused", lambda t: bool(t.refused), lambda t: _lower(t.refused)),
    _rest("error", lambda t: bool(t.error), lambda t: f"the device reported {t.error!r}"),
)
"""In the order in which they explain: what makes values undefined before what looks at values."""
