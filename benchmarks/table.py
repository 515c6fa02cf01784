"""Turns cases into a table of one GPU: what each is counted against, its peers, and whether it passes.

Knows how a case is checked, timed and reported; it must not know which functions or layouts there are.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

import wideload as wl
from wideload.analyze.sectors import SECTOR_BYTES
from wideload.measure import BenchResult, random_tensor, unique_bytes
from wideload.measure.environment import read_environment
from wideload.measure.outcome import tensors_of
from wideload.measure.wall import FAULT_RATIO, Ceiling, cuda_index, find_ceiling, nearest_mix, prepare_movers, time_cold

SCHEMA = 2
NOT_BEHIND = 1.01
"""Of a peer's time: what counts as level with it."""
SEED = 0
CHECK_CHUNK = 1 << 24
"""Elements compared at a time: their places among all values take 128 MiB."""
PEERS = ("eager", "compile")


class Draw:
    """Random tensors on one device, no two alike and never zeros, which are faster."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._seeds = device, itertools.count(SEED)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Normally distributed floats, integers over the dtype's whole range, fair bools; contiguous and aligned."""
        return random_tensor(shape, dtype, device=self._device, seed=next(self._seeds))


Build = Callable[[Draw, int], Sequence[torch.Tensor]]
"""The arguments of a call whose results have so many elements, or some more where the shape asks for it."""


def count_sectors(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the sectors under tensors whose neighbours are no further apart than one: those from the first to the last element.

    >>> count_sectors([torch.empty(64, dtype=torch.float32)[1::2]])
    256
    """
    return sum(_sectors_of(tensor) for tensor in tensors) * SECTOR_BYTES


def _sectors_of(tensor: torch.Tensor) -> int:
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return (start + (reach + 1) * tensor.element_size() - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1


@dataclass(frozen=True)
class Beside:
    """Another call of the same function, byte for byte beside which a case must do."""

    name: str
    build: Build


@dataclass(frozen=True)
class InPlace:
    """A rival that is said to write its results over arguments: of copies that are its own, restored before each sample.

    One that does so unsaid is not ranked.
    """

    fn: Callable[..., Any]


Rival = Callable[..., Any] | InPlace


@dataclass(frozen=True)
class Case:
    """A function, its arguments, and which share of the wall, or of the speed of the call ``beside``, it must reach.

    ``max_steps`` counts in values of the result's dtype: 0 is bit for bit what eager gives; otherwise the exact value, rounded once.
    That is ``exact`` in float64, or ``fn`` itself where that loses no digits there.
    """

    name: str
    fn: Callable[..., Any]
    build: Build
    goal: float
    max_steps: int = 0
    exact: Callable[..., Any] | None = None
    beside: Beside | None = None
    count_read: Callable[[Sequence[torch.Tensor]], int] = unique_bytes
    """The least that must be read of the arguments, in bytes."""
    subject: Callable[..., Any] | None = None
    """What is timed, where it is not ``fn`` fused here."""
    rivals: Mapping[str, Rival] = field(default_factory=dict)
    """Other libraries' functions, beside eager and torch.compile; what one raises is told as the reason why it was not run."""
    given: Callable[..., Any] | None = None
    """Of a function that draws random numbers: makes of its result and the arguments what is right where these numbers were drawn."""


@dataclass(frozen=True)
class BesideTime:
    """What the call ``beside`` a case took."""

    name: str
    nbytes: int
    time_us: float


@dataclass(frozen=True)
class Finding:
    """A figure, what it must keep to, and whether it does."""

    what: str
    found: str
    allowed: str
    is_kept: bool

    def __str__(self) -> str:
        return f"{self.what:<48}{self.found:<62}{self.allowed:<24}{'PASS' if self.is_kept else 'short'}"


class Timed:
    """A row's contenders beside the wall of the bytes that the case must move."""

    nbytes: tuple[int, int]
    ceiling: Ceiling
    samples_us: Mapping[str, Sequence[float]]

    @property
    def times_us(self) -> dict[str, float]:
        """The median of each contender."""
        return {name: statistics.median(samples) for name, samples in self.samples_us.items()}

    @property
    def wall_ratio(self) -> float:
        """Wideload's share of the wall."""
        return self.ceiling.ratio(sum(self.nbytes), self.times_us["wideload"])


@dataclass(frozen=True)
class Row:
    """What one case gave: ``samples_us`` beside the wall, and ``bench`` beside its peers."""

    case: str
    goal: float
    nbytes_read: int
    nbytes_written: int
    ceiling: Ceiling
    wideload_us: float
    beside: BesideTime | None
    samples_us: Mapping[str, Sequence[float]]
    bench: BenchResult
    steps: int
    max_steps: int
    may_write: tuple[str, ...] = ()
    """The peers that are said to work in place."""

    @property
    def nbytes(self) -> int:
        """The least that must move."""
        return self.nbytes_read + self.nbytes_written

    @property
    def wall_ratio(self) -> float:
        """Of the wall."""
        return self.ceiling.ratio(self.nbytes, self.wideload_us)

    @property
    def counted(self) -> str:
        """What the goal is a share of."""
        return self.beside.name if self.beside is not None else "wall"

    @property
    def ratio(self) -> float:
        """Of what the goal is a share of, byte for byte."""
        if self.beside is None:
            return self.wall_ratio
        return self.nbytes / self.beside.nbytes * self.beside.time_us / self.wideload_us

    @property
    def peers_us(self) -> dict[str, float]:
        """The median of each peer that did the work."""
        return {peer.name: peer.time_us.median for peer in self.bench.against if peer.name not in self.not_run and peer.time_us}

    @property
    def not_run(self) -> dict[str, str]:
        """The reason for each peer that did not."""
        unranked = {peer.name: str(peer.labels[0]) for peer in self.bench.against if not peer.is_ranked}
        unsaid = {name: f"not said to work in place: {text}" for name, text in self._written.items() if name not in self.may_write}
        return {**unsaid, **unranked}

    @property
    def in_place(self) -> dict[str, str]:
        """The peers that did the work in arguments, as was found: which, and how often these were restored."""
        return {name: text for name, text in self._written.items() if name in self.peers_us}

    @property
    def _written(self) -> dict[str, str]:
        return {peer.name: label.text for peer in self.bench.against for label in peer.labels if label.code == "MUTATES"}

    @property
    def verdict(self) -> str:
        """``PASS``, or what is wrong."""
        subject = self.bench.subject
        if self.steps > self.max_steps:
            return f"WRONG: {self.steps} steps off, allowed are {self.max_steps}"
        if not subject.is_ranked or subject.time_us is None:
            return str(subject.labels[0])
        if self.wall_ratio > FAULT_RATIO:
            return f"FAULT of the measurement: {self.wall_ratio:.3f} of the wall"
        short = [f"{self.ratio:.3f} of the {self.counted}"] if self.ratio < self.goal else []
        short += [
            f"{subject.time_us.median / peer_us - 1:.1%} behind {peer}"
            for peer, peer_us in self.peers_us.items()
            if subject.time_us.median > NOT_BEHIND * peer_us
        ]
        return f"short: {', '.join(short)}" if short else "PASS"

    def to_dict(self) -> dict[str, Any]:
        """All figures, for JSON."""
        figures = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        figures |= {"ceiling": dataclasses.asdict(self.ceiling), "beside": self.beside and dataclasses.asdict(self.beside)}
        figures |= {"bench": self.bench.to_dict(), "peers_us": self.peers_us, "in_place": self.in_place, "not_run": self.not_run}
        return {**figures, "counted": self.counted, "ratio": self.ratio, "wall_ratio": self.wall_ratio, "verdict": self.verdict}


# ---- checking


def count_steps(case: Case, args: Sequence[torch.Tensor], result: Any) -> int:
    """How many values of the dtype ``result`` lies away from what is right, at most; NaN and the sign of a zero count."""
    doubles = (tensor.double() if tensor.is_floating_point() else tensor for tensor in args)
    if case.given is not None:
        right = case.given(result, *doubles)
    elif case.max_steps:
        right = (case.exact or case.fn)(*doubles)
    else:
        right = case.fn(*args)
    return max(_count_tensor_steps(*pair) for pair in zip(tensors_of(result), tensors_of(right), strict=True))


def _count_tensor_steps(found: torch.Tensor, right: torch.Tensor) -> int:
    if found.shape != right.shape:
        raise wl.LayoutError(f"the result's shape is {tuple(found.shape)}; eager gives {tuple(right.shape)}")
    worst = 0
    for a, b in zip(torch.split(found.reshape(-1), CHECK_CHUNK), torch.split(right.reshape(-1), CHECK_CHUNK), strict=True):
        a, b = _ordered(a), _ordered(b.to(found.dtype))
        # Between 8-byte values of different signs the distance may overflow, to what is not positive.
        worst = max(worst, int((a - b).abs().max()), int(not torch.equal(a, b)))
    return worst


def _ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart: the bits where they are not negative, -1 for -0.0 and down."""
    if not tensor.dtype.is_floating_point:
        return tensor.long()
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    bits = tensor.view(integer).long()
    return torch.where(bits >= 0, bits, ~(bits & torch.iinfo(integer).max))


# ---- timing


def run_case(case: Case, num_elements: int, num_samples: int, device: torch.device, with_compile: bool) -> Row:
    """Check, then time in turns: wideload and its peers; wideload, the call beside, and each kernel of the wall for the same bytes."""
    draw = Draw(device)
    args = case.build(draw, num_elements)
    fused = case.subject or wl.fuse(case.fn, name="benchmark")
    result = fused(*args)
    steps = count_steps(case, args, result)
    nbytes_read, nbytes_written = case.count_read(args), unique_bytes(tensors_of(result))
    del result

    peers = {"eager": case.fn, "compile": torch.compile(case.fn, dynamic=False)} if with_compile else {"eager": case.fn}
    peers |= {name: rival.fn if isinstance(rival, InPlace) else rival for name, rival in case.rivals.items()}
    rule: dict[str, Any] = {"precision": 0.0, "max_samples": num_samples, "seed": SEED, "check": False if case.given is not None else None}
    # Others of the same kind: permuted values may break what the arguments have to keep to, such as tables whose halves are alike.
    others = case.build(draw, num_elements)
    bench = wl.bench(fused, *args, against=peers, name="wideload", mode="cold", recheck_on=others, **rule)
    del others

    mix = nearest_mix(nbytes_read, nbytes_written)
    movers, nbytes_moved = prepare_movers(mix, nbytes_read + nbytes_written, device.index)
    calls: dict[str, Callable[[], object]] = {"wideload": functools.partial(fused, *args)}
    if case.beside is not None:
        beside_args = case.beside.build(draw, num_elements)
        beside_nbytes = case.count_read(beside_args) + unique_bytes(tensors_of(fused(*beside_args)))
        calls[case.beside.name] = functools.partial(fused, *beside_args)
    samples = time_cold({**calls, **movers}, device.index, num_samples)
    beside = None
    if case.beside is not None:
        beside = BesideTime(case.beside.name, beside_nbytes, statistics.median(samples[case.beside.name]))
    return Row(
        case=case.name,
        goal=case.goal,
        nbytes_read=nbytes_read,
        nbytes_written=nbytes_written,
        ceiling=find_ceiling(mix, nbytes_moved, {name: samples[name] for name in movers}),
        wideload_us=statistics.median(samples["wideload"]),
        beside=beside,
        samples_us=samples,
        bench=bench,
        steps=steps,
        max_steps=case.max_steps,
        may_write=tuple(name for name, rival in case.rivals.items() if isinstance(rival, InPlace)),
    )


# ---- reporting


def format_table(rows: Sequence[Row]) -> str:
    """One line a case: times in microseconds, the wall's for the same bytes, and wideload's share of what the goal counts.

    A star stands at the time of a peer that works in place.
    """
    width = max((len(row.case) for row in rows), default=0) + 2
    against = max((len(row.counted) for row in rows), default=0)
    names = (*PEERS, *dict.fromkeys(name for row in rows for name in (*row.peers_us, *row.not_run) if name not in PEERS))
    peers = "".join(f"{peer:>9}" for peer in names)
    lines = [f"{'case':<{width}}{'mix':>5}{'wall':>9}{'wideload':>10}{peers}{'TB/s':>7}{'ratio':>8} of {'':<{against}}{'goal':>6}  verdict"]
    for row in rows:
        peers = "".join(_peer_cell(row, name) for name in names)
        wall_us, bandwidth_tbps = row.wall_ratio * row.wideload_us, row.nbytes / row.wideload_us / 1e6
        figures = f"{wall_us:>9.1f}{row.wideload_us:>10.1f}{peers}{bandwidth_tbps:>7.2f}{row.ratio:>8.3f} of {row.counted:<{against}}"
        lines.append(f"{row.case:<{width}}{row.ceiling.mix.name:>5}{figures}{row.goal:>6.2f}  {row.verdict}")
    reasons = {f"{peer} not run: {reason}" for row in rows for peer, reason in row.not_run.items()}
    notes = {f"* {peer} works in place: {text}" for row in rows for peer, text in row.in_place.items()}
    return "\n".join((*lines, *sorted(notes), *sorted(reasons)))


def _peer_cell(row: Row, name: str) -> str:
    if name in row.peers_us:
        return f"{row.peers_us[name]:>8.1f}*" if name in row.in_place else f"{row.peers_us[name]:>9.1f}"
    return f"{'not run' if name in PEERS or name in row.not_run else '':>9}"


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class _Judged(Protocol):
    @property
    def verdict(self) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


_NamedT = TypeVar("_NamedT", bound=_Named)
_RowT = TypeVar("_RowT", bound=_Judged)


def new_parser(description: str | None, num_samples: int) -> argparse.ArgumentParser:
    """What every benchmark of cases is asked: how many samples, which cases, and where the result goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=num_samples, help=f"of each contender, {num_samples} if left out; the median counts")
    parser.add_argument("--only", action="append", metavar="TEXT", help="run the cases with TEXT in their names; may be repeated")
    parser.add_argument("--json", type=Path, help="where to write all samples and the environment")
    return parser


def run_cases(description: str | None, cases: Sequence[Case], num_elements: int, num_samples: int, arguments: Sequence[str] | None) -> int:
    """Run the cases asked for on the command line, print the table last, write all samples where asked to; return the exit status."""
    parser = new_parser(description, num_samples)
    parser.add_argument("--elements", type=int, default=num_elements, help=f"of a result, at least; {num_elements} if left out")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    options = parser.parse_args(arguments)
    chosen = choose_cases(parser, cases, options.only)
    device = find_device()
    if device is None:
        return 2
    with_compile = not options.no_compile
    return run_table(
        chosen,
        lambda case: run_case(case, options.elements, options.samples, device, with_compile),
        device,
        {"elements": options.elements, "samples": options.samples, "seed": SEED},
        options.json,
        f"{options.elements} elements and more, cold L2, median of {options.samples}, microseconds",
        format_table,
        told=lambda row: f"{row.ratio:.3f} of {row.counted}: {row.verdict}",
        with_compile=with_compile,
    )


def run_table(
    cases: Sequence[_NamedT],
    run: Callable[[_NamedT], _RowT],
    device: torch.device,
    arguments: Mapping[str, Any],
    path: Path | None,
    heading: str,
    format_rows: Callable[[Sequence[_RowT]], str],
    *,
    told: Callable[[_RowT], str] = lambda row: row.verdict,
    with_compile: bool = False,
) -> int:
    """Run each case, print the table last, write all rows to ``path`` where there is one; return 0 where every verdict is ``PASS``.

    A case that raises is ``FAILED`` and does not end the run. ``told`` is what is told of a row when it is done.
    """
    environment = describe_environment(device)
    rows: list[_RowT] = []
    failed: dict[str, str] = {}
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case.name} ...", file=sys.stderr, flush=True)
        try:
            rows.append(row := run(case))
            print(f"  {told(row)}", file=sys.stderr, flush=True)
        except Exception as error:  # the other cases are still worth their time on the GPU
            traceback.print_exc()
            failed[case.name] = f"{type(error).__name__}: {error}"
        _free_memory(with_compile)
    if path:
        content = {
            "schema": SCHEMA,
            "environment": environment,
            "arguments": arguments,
            "rows": [row.to_dict() for row in rows],
            "failed": failed,
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(name_environment(environment))
    print(heading)
    print(format_rows(rows))
    for name in failed:
        print(f"{name}  FAILED: see the traceback above")
    return int(bool(failed) or any(row.verdict != "PASS" for row in rows))


def choose_cases(parser: argparse.ArgumentParser, cases: Sequence[_NamedT], texts: Sequence[str] | None) -> list[_NamedT]:
    """The cases with one of ``texts`` in their names, or all. Exits by the parser's error where there are none."""
    chosen = [case for case in cases if texts is None or any(text in case.name for text in texts)]
    if not chosen:
        parser.error(f"--only {' '.join(texts or ())}: no case has that in its name. Cases: {'; '.join(case.name for case in cases)}")
    return chosen


def find_device() -> torch.device | None:
    """The current CUDA device; None, with the reason on stderr, where there is none."""
    try:
        return torch.device("cuda", cuda_index())
    except wl.DeviceError as error:
        print(error, file=sys.stderr)
        return None


def describe_environment(device: torch.device) -> dict[str, Any]:
    """GPU, driver, versions and clocks; the commit by ``WIDELOAD_COMMIT`` where there is no git checkout."""
    environment = dataclasses.asdict(read_environment(device))
    return {**environment, "commit": environment["commit"] or os.environ.get("WIDELOAD_COMMIT")}


def name_environment(environment: Mapping[str, Any]) -> str:
    """What stands above a table."""
    return f"{environment['gpu']}, driver {environment['driver']}, torch {environment['torch']}, commit {environment['commit']}"


def _free_memory(with_compile: bool) -> None:
    """Give back what a case used, so that the next has the whole GPU."""
    if with_compile:
        torch.compiler.reset()  # a function that several cases share would reach the limit of its recompilations
    gc.collect()
    torch.cuda.empty_cache()
