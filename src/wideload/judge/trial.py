"""Turns a matched kernel, sizes and places in memory into what was seen when it ran: wrong results, bytes that are not its own, errors.

Whoever runs kernels, a GPU or an emulator, is handed in. It must not know which bug would explain what was seen.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from wideload.errors import WideloadError
from wideload.judge.matching import Launch, Match
from wideload.measure import random_tensor
from wideload.measure.outcome import Tolerance, default_tolerance, tensors_of
from wideload.raw_kernel import RawKernel

__all__ = [
    "GUARD_BYTES",
    "Case",
    "Run",
    "Trial",
    "alignment_cases",
    "huge_case",
    "largest_cases",
    "launch_and_wait",
    "run_case",
    "size_cases",
]

Run = Callable[[RawKernel, Launch], None]
"""Runs one launch on the device of its tensors, and returns when it has ended; raises what the device reports."""

GUARD_BYTES = 1 << 16
"""Kept free before and behind every tensor, and looked at afterwards: a block of 1024 threads of 16 floats each fits into it."""
_UNWRITTEN = (0xFF, 0x00)
"""Bytes where a result is due, of the first launch and of the second: a NaN, True or -1, then zero. No due value is both."""
_BESIDE_RESULT, _BESIDE_INPUT = 0xA5, 0x5A
"""Bytes elsewhere: no NaN, which some additions would hand on as it is."""
NO_ANSWER = "no answer within"
"""So begins the error of a launch that did not end."""
_PERIOD = 1_000_003
"""Of the random values of large tensors: prime, so that no index that is off by a power of two finds the value it wants."""
_CHUNK = 1 << 24
"""Elements compared at a time: 128 MiB of float64."""
_BLOCKING_CYCLES = 100_000_000
"""Some 50 ms: much longer than a launch takes to reach the GPU."""

SIZES = (0, 1, 2, 6, 7, 8, 9, 10, 31, 32, 33, 1000, 1002, 4097, 10_007)
SHAPES = ((0, 8), (1, 1), (3, 2), (5, 6), (7, 9), (7, 10), (8, 8), (5, 12), (9, 1000), (9, 1002), (1000, 7), (33, 31), (3, 4097))
"""None, one, around a vector of eight and around a warp, rows of whole vectors, halves and odd ones, more than some blocks take; of
a vector of four, each remainder."""
SHIFTED_SIZES = (1000, 1001)
SHIFTED_SHAPES = ((8, 1000), (7, 1001))
_VECTOR_BYTES = 16
"""The widest access, and so the least alignment that any kernel asks for: shifts are less, if the type of the pointer allows it."""
_BEYOND = {31: 2**31, 32: 2**32}
_BEYOND_ELEMENTS = 4097
"""Some blocks' worth, and a multiple of no power of two."""
_HUGE_COLUMNS = (1031, 131_101)
"""Primes: many rows, and fewer than the 65,535 blocks that a grid's y takes, with 2**32 elements."""
_LEAST_HUGE_BITS = 27
"""From more than 2**27 elements on, an index in bytes may wrap, and memory is short."""


@dataclass(frozen=True, slots=True)
class Case:
    """One launch. ``shifts`` are elements by which pointers, inputs then results, start behind a multiple of `GUARD_BYTES`.

    ``bits`` are other than 0 in a huge case, of more than 2**bits elements. ``is_on_stream``: on a stream of its own, behind work that
    makes the inputs.
    """

    sizes: tuple[tuple[str, int], ...]
    shifts: tuple[int, ...] = ()
    is_special: bool = False
    bits: int = 0
    is_on_stream: bool = False

    def __str__(self) -> str:
        return ", ".join(f"{name} = {size:,}" for name, size in self.sizes)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was seen of one case. Counts are elements.

    ``is_walked``: nothing ran, the PTX was executed for some blocks, and no value is known. ``before`` and ``behind`` are how far a result
    was written beside; ``reads`` name inputs that are read beside, and how far. ``is_unstable``: two launches gave different bits;
    ``is_result_read``: they do only if the results' memory held different ones. ``strides`` are the first result's, where it does not
    lie row by row. ``is_cut``: a walk that was stopped, and knows nothing of what follows. ``refused`` is why a launch was not even tried.
    """

    case: Case
    num_elements: int = 0
    is_walked: bool = False
    num_wrong: int = 0
    first_wrong: int | None = None
    num_unwritten: int = 0
    first_unwritten: int | None = None
    before: int = 0
    behind: int = 0
    reads: tuple[tuple[str, int], ...] = ()
    written_inputs: tuple[str, ...] = ()
    misaligned: tuple[str, ...] = ()
    is_unstable: bool = False
    is_result_read: bool = False
    raced_bytes: int = 0
    strides: tuple[int, ...] = ()
    is_cut: bool = False
    error: str = ""
    refused: str = ""

    @property
    def has_hung(self) -> bool:
        """Whether it did not end."""
        return self.error.startswith(NO_ANSWER)

    @property
    def is_right(self) -> bool:
        """Whether nothing is wrong with it."""
        plain = replace(self, case=Case(()), num_elements=0, is_walked=False, strides=(), is_cut=False)
        return plain == Trial(Case(()))


# ---- cases


def _named(match: Match, sizes: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple(zip(match.names, sizes, strict=True))


def _num_elements(match: Match, sizes: Mapping[str, int]) -> int:
    return match.shapes(match.make(sizes))[0].numel()


def _shapes(match: Match, sizes: Sequence[int], shapes: Sequence[tuple[int, int]]) -> list[tuple[tuple[str, int], ...]]:
    """Those of the sizes, or of the shapes, that the subject is for."""
    named = [_named(match, (size,)) for size in sizes] if len(match.names) == 1 else [_named(match, shape) for shape in shapes]
    most = match.request.most
    return [sizes for sizes in named if most is None or _num_elements(match, dict(sizes)) <= most]


def size_cases(match: Match) -> tuple[Case, ...]:
    """The hard sizes, each with random values, and with NaN, infinities, signed zeros and subnormals among them."""
    return tuple(Case(sizes, is_special=is_special) for sizes in _shapes(match, SIZES, SHAPES) for is_special in (False, True))


def alignment_cases(match: Match) -> tuple[Case, ...]:
    """Each pointer by itself, and all of them, off by 1, 2, 4 ... elements below `_VECTOR_BYTES`; by no less than its type demands."""
    if match.kernel is None:
        return ()
    pointers = [p for p in match.kernel.parameters if p.is_pointer]
    ordered = [p for p in pointers if p.is_const] + [p for p in pointers if not p.is_const]
    laid_out = match.make(dict.fromkeys(match.names, 1))
    sizes = [x.element_size() for x in (*laid_out.inputs, *match.shapes(laid_out))]
    steps = [_steps(max(1, p.alignment // size), size) for p, size in zip(ordered, sizes, strict=True)]
    shifts = [tuple(step if index == which else 0 for index in range(len(steps))) for which, own in enumerate(steps) for step in own]
    together = [tuple(own[min(turn, len(own) - 1)] for own in steps) for turn in range(max(map(len, steps), default=0))]
    return tuple(Case(s, shifts=shift) for s in _shapes(match, SHIFTED_SIZES, SHIFTED_SHAPES) for shift in (*shifts, *together))


def _steps(least: int, itemsize: int) -> tuple[int, ...]:
    """Shifts in elements: the least that the pointer's type allows, and its doubles below `_VECTOR_BYTES`."""
    doubled = itertools.takewhile(lambda step: step * itemsize < _VECTOR_BYTES, (least << turn for turn in itertools.count(1)))
    return (least, *doubled)


def huge_case(match: Match, bits: int) -> Case:
    """More than 2**bits elements, and no multiple of anything; of a matrix, with as many columns as its grid needs to be launched."""
    least = _BEYOND[bits]
    if len(match.names) == 1:
        return Case(_named(match, (least // _elements_per(match) + _BEYOND_ELEMENTS,)), bits=bits)
    shapes = [(least // _elements_per(match, columns) + 3 | 1, columns) for columns in _HUGE_COLUMNS]
    cases = [Case(_named(match, shape), bits=bits) for shape in shapes]
    return next((case for case in cases if not match.refusal(dict(case.sizes))), cases[0])


def _elements_per(match: Match, *columns: int) -> int:
    """Of the first result, for each unit of the first size."""
    return max(1, _num_elements(match, dict(zip(match.names, (1, *columns), strict=True))))


def largest_cases(match: Match) -> tuple[Case, ...]:
    """The most that the subject is for: more than 2**31 and more than 2**32 elements, or what was said, in whole rows."""
    most = match.request.most
    huge = tuple(huge_case(match, bits) for bits in _BEYOND)
    if most is None:
        return huge
    columns = () if len(match.names) == 1 else (min(most, _HUGE_COLUMNS[0]),)
    bits = (most - 1).bit_length() - 1
    largest = Case(_named(match, (most // _elements_per(match, *columns), *columns)), bits=bits if bits >= _LEAST_HUGE_BITS else 0)
    return (*(case for case in huge if _num_elements(match, dict(case.sizes)) <= most), largest)


def needed_bytes(match: Match, case: Case) -> int:
    """What a case takes of the device's memory, at most: its tensors, what they are held against, and that once more in between."""
    operands = match.make(dict(case.sizes))
    inputs = sum(x.numel() * x.element_size() for x in operands.inputs)
    results = sum(x.numel() * x.element_size() for x in match.shapes(operands))
    return 2 * (inputs + 2 * results)


# ---- memory


@dataclass(frozen=True, slots=True)
class _Placed:
    """A tensor in the middle of memory that is full of a pattern."""

    tensor: torch.Tensor
    store: torch.Tensor
    pattern: int
    start: int
    nbytes: int

    def beside(self) -> tuple[int, int]:
        """How many elements before and behind it something was written, counted to the farthest."""
        size = self.tensor.element_size()
        before = torch.nonzero(self.store[: self.start] != self.pattern)
        behind = torch.nonzero(self.store[self.start + self.nbytes :] != self.pattern)
        return (
            -(-(self.start - int(before[0])) // size) if len(before) else 0,
            -(-(int(behind[-1]) + 1) // size) if len(behind) else 0,
        )


def _place(like: torch.Tensor, shift: int, pattern: int, device: torch.device, guard_bytes: int) -> _Placed:
    """Memory for a tensor laid out like ``like``."""
    size = like.element_size()
    span = sum((length - 1) * stride for length, stride in zip(like.shape, like.stride(), strict=True)) + 1 if like.numel() else 0
    start, nbytes = guard_bytes + shift * size, span * size
    store = torch.full((start + nbytes + guard_bytes,), pattern, dtype=torch.uint8, device=device)
    flat = store[start : start + nbytes].view(like.dtype)
    return _Placed(flat.as_strided(like.shape, like.stride(), flat.storage_offset()), store, pattern, start, nbytes)


def _fill(place: _Placed, seed: int, is_special: bool) -> None:
    flat = place.store[place.start : place.start + place.nbytes].view(place.tensor.dtype)
    values = random_tensor((min(flat.numel(), _PERIOD),), flat.dtype, device=flat.device, seed=seed)
    if is_special and flat.dtype.is_floating_point and flat.dtype.itemsize > 1:
        subnormal = torch.finfo(flat.dtype).smallest_normal / 4
        special = (math.nan, math.inf, -math.inf, -0.0, 0.0, subnormal, -subnormal)
        for first, value in enumerate(special):
            values[first + seed :: len(special) + 2 + seed] = value  # inputs take them at other places, so that most pairs meet
    for at in range(0, flat.numel(), _PERIOD):
        part = flat[at : at + _PERIOD]
        part.copy_(values[: part.numel()])


# ---- comparing


def _is_wrong(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, scale: float) -> torch.Tensor:
    if got.dtype.is_complex:
        got, want = torch.view_as_real(got), torch.view_as_real(want)
        return _is_wrong(got, want, tolerance, scale).any(-1)
    if not got.dtype.is_floating_point:
        return got != want
    a, b = got.double(), want.double()
    both_nan = a.isnan() & b.isnan()
    if not tolerance.relative and not tolerance.absolute:
        return ~((a == b) & (a.signbit() == b.signbit()) | both_nan)
    is_close = b.isfinite() & ((a - b).abs() <= tolerance.relative * (b.abs() + scale) + tolerance.absolute)
    return ~(is_close | (a == b) | both_nan)


def _chunks(*tensors: torch.Tensor) -> Iterator[tuple[int, tuple[torch.Tensor, ...]]]:
    flat = [tensor.reshape(-1) for tensor in tensors]
    for at in range(0, flat[0].numel(), _CHUNK):
        yield at, tuple(tensor[at : at + _CHUNK] for tensor in flat)


def _scale(want: torch.Tensor) -> float:
    """The root mean square of what is finite: a value near zero may be the difference of two rounded ones."""
    total, count = 0.0, 0
    if want.dtype.is_floating_point:
        for _, (piece,) in _chunks(want):
            finite = piece.double()[piece.isfinite()]
            total, count = total + float(finite.square().sum()), count + finite.numel()
    return math.sqrt(total / count) if count else 0.0


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _holds(tensor: torch.Tensor, byte: int) -> torch.Tensor:
    """Which elements are made of nothing but this byte."""
    return (_bytes(tensor).view(-1, tensor.element_size()) == byte).all(1)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bytes(a), _bytes(b))


def _agree(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two launches, one on each pattern of `_UNWRITTEN`, gave the same bits wherever they wrote."""
    if _same_bits(first, second):
        return True
    written = ~(_holds(first, _UNWRITTEN[0]) & _holds(second, _UNWRITTEN[1]))
    return _same_bits(first.reshape(-1)[written], second.reshape(-1)[written])


def _compare(match: Match, runs: Sequence[torch.Tensor], want: torch.Tensor) -> dict[str, Any]:
    """The counts of a `Trial`: of one launch, or of one on each pattern of `_UNWRITTEN`."""
    request = match.request
    tolerance = default_tolerance(want.dtype) if request.rtol is None and not request.atol else Tolerance(request.rtol or 0.0, request.atol)
    counts: dict[str, Any] = {"num_wrong": 0, "first_wrong": None, "num_unwritten": 0, "first_unwritten": None}
    scale = _scale(want)
    for at, (due, *got) in _chunks(want, *runs):
        wrong = torch.stack([_is_wrong(a, due, tolerance, scale) for a in got]).any(0)
        if not wrong.any():
            continue
        unwritten = torch.stack([wrong, *(_holds(a, byte) for a, byte in zip(got, _UNWRITTEN, strict=False))]).all(0)
        for key, mask in (("wrong", wrong), ("unwritten", unwritten)):
            found = torch.nonzero(mask)
            counts[f"num_{key}"] += len(found)
            if len(found) and counts[f"first_{key}"] is None:
                counts[f"first_{key}"] = at + int(found[0])
    return counts


# ---- running


def launch_and_wait(kernel: RawKernel, launch: Launch) -> None:
    """Launch on the current stream, and wait."""
    kernel(*launch.arguments, grid=launch.grid, block=launch.block)
    torch.cuda.synchronize()


def run_case(match: Match, case: Case, device: torch.device, run: Run, guard_bytes: int = GUARD_BYTES) -> Trial:
    """Run one case and look at everything that it may have touched.

    What the subject raises is the trial's ``error``, or ``refused`` where nothing was launched: a misaligned tensor, a number that does
    not fit. A launch at small sizes is repeated over other bytes, and must give the same bits.
    """
    sizes = dict(case.sizes)
    laid_out = match.make(sizes)
    shifts = itertools.chain(case.shifts, itertools.repeat(0))
    inputs = [_place(x, next(shifts), _BESIDE_INPUT, device, guard_bytes) for x in laid_out.inputs]
    for seed, place in enumerate(inputs):
        _fill(place, seed, case.is_special)
    operands = laid_out.replace([place.tensor for place in inputs])
    want = match.compute(operands)
    results = [_place(torch.empty_like(x, device="meta"), next(shifts), _BESIDE_RESULT, device, guard_bytes) for x in want]
    trial = Trial(case, num_elements=want[0].numel(), strides=() if want[0].is_contiguous() else want[0].stride())
    snapshots = [] if case.bits else [place.store.clone() for place in inputs]
    is_repeated = not (case.bits or case.is_on_stream)

    def launch_over(byte: int) -> list[torch.Tensor]:
        for place, snapshot in zip(inputs, snapshots, strict=False):
            place.store.copy_(snapshot)
        for place in results:
            place.store[place.start : place.start + place.nbytes] = byte
        if case.is_on_stream:
            got = _call_on_stream(match, sizes, operands, results, inputs, device)
        elif match.kernel is not None:
            run(match.kernel, match.launch(sizes, operands, [place.tensor for place in results]))
            got = [place.tensor for place in results]
        else:
            got = tensors_of(match.subject(*operands.args, **operands.named))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return [x if case.bits else _copy(x) for x in got]

    try:
        seen = [launch_over(byte) for byte in _UNWRITTEN[: 1 + is_repeated]]
        is_unstable = is_repeated and not all(map(_agree, *seen))
        # What differs by what was there before is no race: over the same bytes, it comes out the same.
        is_result_read = (
            is_unstable
            and match.kernel is not None
            and all(all(map(_same_bits, first, launch_over(byte))) for first, byte in zip(seen, _UNWRITTEN, strict=True))
        )
    except WideloadError as error:
        return replace(trial, refused=str(error))
    except Exception as error:  # whatever a driver or an emulator raises
        return replace(trial, error=_first_line(error))
    fault = next((f"{_kind(a)} where {_kind(b)} is due" for a, b in zip(seen[-1], want, strict=False) if _kind(a) != _kind(b)), None)
    if fault or len(seen[-1]) != len(want):
        return replace(trial, refused=fault or f"{len(seen[-1])} results where {len(want)} are due")
    found = [_compare(match, runs, due) for *runs, due in zip(*seen, want, strict=True)]
    beside = [place.beside() for place in results] if match.kernel is not None else []
    return replace(
        trial,
        **max(found, key=lambda counts: counts["num_wrong"]),
        before=max((before for before, _ in beside), default=0),
        behind=max((behind for _, behind in beside), default=0),
        written_inputs=tuple(
            name
            for name, place, snapshot in zip(_input_names(match, len(inputs)), inputs, snapshots, strict=False)
            if not torch.equal(place.store, snapshot)
        ),
        is_unstable=is_unstable and not is_result_read,
        is_result_read=is_result_read,
    )


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, row by row: a bool that is copied as one is 0 or 1 then, whatever it was."""
    raw = tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor
    return raw.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _input_names(match: Match, count: int) -> list[str]:
    if match.kernel is None:
        return [f"input {index}" for index in range(count)]
    return [p.name for p in match.kernel.parameters if p.is_pointer and p.is_const]


def _call_on_stream(
    match: Match, sizes: Mapping[str, int], operands: Any, results: Sequence[_Placed], inputs: Sequence[_Placed], device: torch.device
) -> list[torch.Tensor]:
    """Let the inputs be made late, on a stream of their own: what does not wait for that stream reads zeros."""
    values = [place.tensor.clone() for place in inputs]
    for place in inputs:
        place.tensor.zero_()
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(_BLOCKING_CYCLES)  # type: ignore[no-untyped-call]
        for place, value in zip(inputs, values, strict=True):
            place.tensor.copy_(value)
        if match.kernel is not None:
            launch = match.launch(sizes, operands, [place.tensor for place in results])
            match.kernel(*launch.arguments, grid=launch.grid, block=launch.block)
            got = [place.tensor for place in results]
        else:
            got = tensors_of(match.subject(*operands.args, **operands.named))
        kept = [x.clone() for x in got]
    torch.cuda.synchronize(device)
    return kept
