"""Turns two callables, or two stored results, into a verdict: FASTER, SLOWER, SAME or UNCLEAR, and how sure it is.

Knows when samples suffice and which results may be compared; how they are taken, the session knows.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from wideload.measure.labels import is_ranked
from wideload.measure.outcome import requested_tolerance
from wideload.measure.result import BenchResult, Contender
from wideload.measure.session import Options, Progress, RequestedMode, Session
from wideload.measure.statistics import Interval, Verdict, judge_ratio, rate_upper_bound, ratio_interval, require, require_number
from wideload.measure.timing import WARM_UP_SECONDS, Collected, Stopped
from wideload.measure.trial import reference_of

__all__ = [
    "EXIT_CODES",
    "SCHEMA",
    "Comparison",
    "Comparisons",
    "Decision",
    "SelfTest",
    "check_bounds",
    "compare",
    "compare_results",
    "decide",
    "self_test",
]

SCHEMA = "wideload.compare/1"

EXIT_CODES: dict[Verdict, int] = {"FASTER": 0, "SAME": 0, "SLOWER": 1, "UNCLEAR": 3}
"""For CI; 2 is what a shell's tools return for a wrong call."""

SAME_WITHIN = 0.01
"""Two runs of one case differ by up to this."""
CONFIDENCE = 0.99
LOOKS = (20, 40, 80, 160, 320, 640)
"""After how many samples of each to look whether the verdict is clear. Each look has its share of the error allowed (Bonferroni), so
that stopping at the first clear one keeps the whole within it."""


# ---- deciding


@dataclass(frozen=True)
class Decision:
    """Samples of both in the order of time, and what they say."""

    samples_a: tuple[float, ...]
    samples_b: tuple[float, ...]
    interval: Interval
    verdict: Verdict
    stopped: Stopped


def decide(
    sample_a: Callable[[], float],
    sample_b: Callable[[], float],
    *,
    same_within: float = SAME_WITHIN,
    confidence: float = CONFIDENCE,
    max_seconds: float = math.inf,
    report: Callable[[int, int], None] | None = None,
) -> Decision:
    """Sample both in the order a b, b a, a b, ... until a look at the interval of ``b / a`` gives a verdict.

    A drift that is steady over four samples falls on both alike. Where b is no different from a, FASTER and SLOWER together
    have a probability of at most ``1 - confidence``.
    """
    check_bounds(same_within, confidence, max_seconds)
    deadline = time.perf_counter() + max_seconds
    share = 1 - (1 - confidence) / len(LOOKS)
    a: list[float] = []
    b: list[float] = []
    for look in LOOKS:
        while len(a) < look and (len(a) < LOOKS[0] or time.perf_counter() < deadline):
            if len(a) % 2:
                b.append(sample_b())
                a.append(sample_a())
            else:
                a.append(sample_a())
                b.append(sample_b())
            if report is not None:
                report(len(a), LOOKS[-1])
        interval = ratio_interval(a, b, share)
        verdict = judge_ratio(interval, same_within)
        is_late = len(a) < look
        if verdict != "UNCLEAR" or is_late:
            break
    stopped: Stopped = "verdict" if verdict != "UNCLEAR" else "max_seconds" if is_late else "max_samples"
    return Decision(tuple(a), tuple(b), interval, verdict, stopped)


def check_bounds(same_within: float, confidence: float, max_seconds: float = 0.0) -> None:
    """Raise ``RangeError`` for a bound of a verdict that makes no sense."""
    require_number("same_within", same_within, "a share of the time, 0 and more")
    require_number("confidence", confidence, "more than 0 and less than 1")
    require(0 < confidence < 1, "confidence", confidence, "more than 0 and less than 1")
    require_number("max_seconds", max_seconds, "a number, 0 and more")


# ---- reporting


@dataclass(frozen=True)
class Comparison:
    """What can be said of the time of ``b`` beside that of ``a``: ``interval`` is that of ``b / a``, of their medians."""

    verdict: Verdict
    a: Contender | None
    b: Contender | None
    interval: Interval | None
    same_within: float
    reason: str | None = None
    """Why it is UNCLEAR."""

    @property
    def exit_code(self) -> int:
        """For CI: 0 where b is no slower, 1 where it is, 3 where that is unclear."""
        return EXIT_CODES[self.verdict]

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        return {
            "schema": SCHEMA,
            "verdict": self.verdict,
            "reason": self.reason,
            "time_ratio": asdict(self.interval) if self.interval is not None else None,
            "same_within": self.same_within,
            "method": "ratio of medians: exact intervals of the medians, combined by variance estimates recovery (Zou and Donner 2008)",
            "a": self.a.to_dict() if self.a is not None else None,
            "b": self.b.to_dict() if self.b is not None else None,
        }

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        a, b = (side.name if side is not None else "nothing" for side in (self.a, self.b))
        match self.verdict:
            case "SAME":
                yield f"{b} takes the SAME time as {a}, within {self.same_within:.1%}"
            case "UNCLEAR":
                yield f"UNCLEAR whether {b} is faster or slower than {a}: {self.reason}"
            case _:
                yield f"{b} is {self.verdict} than {a}"
        if self.interval is not None:
            i = self.interval
            bounds = f"{i.confidence:.2%} interval {i.low:.4f} .. {i.high:.4f}" if i.low > 0 else "too few samples for an interval"
            yield f"  time of {b} / time of {a} = {i.ratio:.4f}, {bounds}"
        for side in (self.a, self.b):
            if side is not None and side.time_us is not None:
                t = side.time_us
                yield f"  {side.name}: median {t.median:.2f} us, p5 .. p95 {t.p5:.2f} .. {t.p95:.2f}, n {t.n}, {side.mode}"
            if side is not None:
                yield from (f"  {side.name}: {label}" for label in side.labels)


@dataclass(frozen=True)
class Comparisons:
    """The contenders of two stored results, pair by pair."""

    rows: tuple[Comparison, ...]

    @property
    def exit_code(self) -> int:
        """That of the worst pair: 1 where one is SLOWER, else 3 where one is UNCLEAR, else 0."""
        codes = {row.exit_code for row in self.rows}
        return next((code for code in (EXIT_CODES["SLOWER"], EXIT_CODES["UNCLEAR"]) if code in codes), 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        return {"schema": SCHEMA, "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join(map(str, self.rows))


@dataclass(frozen=True)
class SelfTest:
    """How often a callable was found different from itself."""

    num_pairs: int
    verdicts: dict[Verdict, int]
    false_rate: float
    """The share of FASTER and SLOWER."""
    false_rate_bound: float
    """The largest rate that this share does not contradict, with 95 % confidence."""

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items() if count)
        rates = f"false verdicts {self.false_rate:.2%}, at most {self.false_rate_bound:.2%} with 95 % confidence"
        return f"A/A over {self.num_pairs} pairs: {counts}; {rates}"


# ---- live


def compare(
    a: Callable[..., Any],
    b: Callable[..., Any],
    *args: Any,
    same_within: float = SAME_WITHIN,
    confidence: float = CONFIDENCE,
    mode: RequestedMode = "auto",
    out: Any = None,
    check: Callable[..., Any] | Literal[False] | None = None,
    recheck_on: Sequence[Any] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    names: tuple[str, str] | None = None,
    device: torch.device | str | None = None,
    max_seconds: float = 10.0,
    warm_up_seconds: float = WARM_UP_SECONDS,
    **kwargs: Any,
) -> Comparison:
    """Say whether ``b`` is FASTER or SLOWER than ``a`` on the same arguments, takes the SAME time, or that it is UNCLEAR.

    Both are checked and timed as in `bench`, alike, and in turns (`decide`). SAME: their medians differ by less than
    ``same_within``; FASTER, SLOWER: by more; each with ``confidence``. They may compute different things, which is then noted;
    with ``check``, a reference, one that is wrong gets no verdict.
    """
    check_bounds(same_within, confidence, max_seconds)
    options = Options(
        mode,
        None,
        out,
        check,
        tolerance=requested_tolerance(rtol, atol),
        device=device,
        warm_up_seconds=warm_up_seconds,
        recheck_on=recheck_on,
    )
    session = _open_session(a, b, args, kwargs, names, options)
    with session.current_device(), Progress("comparing") as progress:
        session.check()
        samplers = session.prepare()
        if len(samplers) < 2:
            contenders, _ = session.record({})
            return _judge(contenders[0], contenders[1], None, same_within)
        sampler_a, sampler_b = samplers.values()
        decision = decide(
            sampler_a.sample, sampler_b.sample, same_within=same_within, confidence=confidence, max_seconds=max_seconds, report=progress
        )
        samples = (decision.samples_a, decision.samples_b)
        collected = {name: Collected(taken, decision.stopped) for name, taken in zip(samplers, samples, strict=True)}
        contenders, _ = session.record(collected)
        return _judge(contenders[0], contenders[1], decision.interval, same_within)


def self_test(fn: Callable[..., Any], *args: Any, num_pairs: int = 200, mode: RequestedMode = "auto", **kwargs: Any) -> SelfTest:
    """Compare ``fn`` with itself ``num_pairs`` times and return how often that gave FASTER or SLOWER.

    Both sides are prepared once, each with its own buffers, and sampled afresh for every pair.
    """
    require_number("num_pairs", num_pairs, "an integer, 1 and more", least=1, is_whole=True)
    session = _open_session(fn, fn, args, kwargs, None, Options(mode))
    verdicts: Counter[Verdict] = Counter()
    with session.current_device(), Progress("A/A") as progress:
        session.check()
        first, second = session.prepare().values()
        for pair in range(num_pairs):
            verdicts[decide(first.sample, second.sample).verdict] += 1
            progress(pair + 1, num_pairs)
    num_false = verdicts["FASTER"] + verdicts["SLOWER"]
    return SelfTest(num_pairs, dict(verdicts), num_false / num_pairs, rate_upper_bound(num_false, num_pairs))


def _open_session(
    a: Callable[..., Any],
    b: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    names: tuple[str, str] | None,
    options: Options,
) -> Session:
    """Check b against a, or both against the definition of the one that is a fused function; a difference is only noted."""
    if names is None:
        own = tuple(str(getattr(fn, "__name__", "")) for fn in (a, b))
        names = (own[0], own[1]) if own[0] != own[1] and all(name.isidentifier() for name in own) else ("a", "b")
    is_two = isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(name, str) for name in names) and names[0] != names[1]
    require(is_two, "names", names, "two that differ")
    is_binding = options.check is not None
    check = options.check if is_binding else reference_of(a) or reference_of(b) or a
    options = replace(options, check=check, is_check_binding=is_binding, is_mode_common=True)
    return Session({names[0]: a, names[1]: b}, args, kwargs, options)


# ---- stored


def compare_results(
    a: BenchResult | Mapping[str, Any] | str | Path,
    b: BenchResult | Mapping[str, Any] | str | Path,
    *,
    same_within: float = SAME_WITHIN,
    confidence: float = CONFIDENCE,
) -> Comparisons:
    """Compare two results of `bench` (or their dicts, or paths of their JSON): subject with subject, and each other one by its name.

    Runs apart in time differ by more than their samples show: ``same_within`` has to cover that. Results from different GPUs,
    drivers, arguments or ways of timing are UNCLEAR, and say why.
    """
    check_bounds(same_within, confidence)
    first, second = _read(a), _read(b)
    obstacle = _obstacle(first, second)
    rivals_a, rivals_b = ({contender.name: contender for contender in result.against} for result in (first, second))
    pairs = [(first.subject, second.subject), *((rivals_a.get(name), rivals_b.get(name)) for name in dict.fromkeys([*rivals_a, *rivals_b]))]
    rows = []
    for one, other in pairs:
        interval = None
        if one is not None and other is not None and one.time_us is not None and other.time_us is not None:
            interval = ratio_interval(one.time_us.samples, other.time_us.samples, confidence)
        rows.append(_judge(one, other, interval, same_within, obstacle))
    return Comparisons(tuple(rows))


def _judge(
    a: Contender | None, b: Contender | None, interval: Interval | None, same_within: float, obstacle: str | None = None
) -> Comparison:
    reason = obstacle or _reason(a, b)
    if reason is not None or interval is None:
        return Comparison("UNCLEAR", a, b, interval, same_within, reason or "no samples")
    verdict = judge_ratio(interval, same_within)
    crossing = f"the interval crosses the bound of {same_within:.1%}" if verdict == "UNCLEAR" else None
    return Comparison(verdict, a, b, interval, same_within, crossing)


def _reason(a: Contender | None, b: Contender | None) -> str | None:
    """Why two times may not be compared."""
    if a is None or b is None:
        return "it stands in one result only"
    for side in (a, b):
        if not is_ranked(side.labels):
            return f"{side.name} has no time to compare: {', '.join(label.code for label in side.labels)}"
    return f"{a.name} was timed {a.mode}, {b.name} {b.mode}" if a.mode != b.mode else None


def _obstacle(a: BenchResult, b: BenchResult) -> str | None:
    """Why two results may not be compared."""
    where_a, where_b = a.environment, b.environment
    for what, one, other in (
        ("GPU", where_a.gpu, where_b.gpu),
        ("GPU", where_a.gpu_uuid, where_b.gpu_uuid),
        ("driver", where_a.driver, where_b.driver),
        ("CPU", where_a.gpu is None and where_a.cpu, where_b.gpu is None and where_b.cpu),
        ("ECC", where_a.ecc, where_b.ecc),
    ):
        if one != other:
            return f"different {what}: {one} and {other}"
    for argument, other_argument in zip_longest(a.arguments, b.arguments):
        if argument != other_argument:
            return f"different arguments: {argument} and {other_argument}"
    return None


def _read(result: BenchResult | Mapping[str, Any] | str | Path) -> BenchResult:
    if isinstance(result, BenchResult):
        return result
    if isinstance(result, Mapping):
        return BenchResult.from_dict(result)
    return BenchResult.from_json(Path(result).read_text(encoding="utf-8"))
