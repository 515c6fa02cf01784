"""Turns a request into a judgement: the bugs that were found, or how far the kernel is from the wall, and what to do next.

Puts the parts in order; it must not know how each is done.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from wideload.analyze.explain import Explanation
from wideload.analyze.ptx import MAX_STEPS
from wideload.errors import DeviceError, RangeError, WideloadError
from wideload.gpus import find_target
from wideload.judge import child
from wideload.judge.diagnosis import Finding, diagnose
from wideload.judge.matching import Match, Operands, match
from wideload.judge.request import Request
from wideload.judge.sanitizer import Fault, find_sanitizer, sanitize
from wideload.judge.trial import Case, Run, Trial, alignment_cases, largest_cases, run_case, size_cases
from wideload.judge.walked import walk_case
from wideload.measure import bench, random_tensor, roofline
from wideload.measure.roofline import read_device
from wideload.measure.statistics import require_number

__all__ = ["NOT_CHECKED", "SCHEMA", "Judgement", "Measured", "judge"]

SCHEMA = "wideload.judgement/1"
"""The number behind the slash grows when a key changes its name or its meaning."""

NOT_CHECKED = 3
"""The exit status where nothing is known to be wrong, and no result was looked at."""
_ELSEWHERE = "h200"
"""What is explained for where there is no GPU."""
_TIMED_ELEMENTS = 1 << 27
"""Of what is timed and explained: several times any L2, as three vectors of halves."""
_COLUMNS, _FEW_COLUMNS = 4096, 32
"""Of what is timed: as wide as a model's rows, or, where each column is a vector of its own (a head), as many as a model has."""
_AT_THE_WALL = 0.97
_BYTES_PER_GB = 1e9

Sanitize = Literal["auto", "yes", "no"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Times by `wl.bench`, in us; shares are of the bytes that must move over the bandwidth. None where it could not be timed."""

    time_us: float | None
    against_us: float | None
    bytes_per_second: float | None
    share_of_nominal: float | None
    share_of_wall: float | None
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found. ``is_run`` is False where there was no GPU: results were not looked at, and only addresses were."""

    subject: str
    against: str
    where: str
    is_run: bool
    num_run: int
    num_walked: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    next_step: str
    measured: Measured | None = None
    explanation: Explanation | None = None

    @property
    def exit_code(self) -> int:
        """1 for a bug, `NOT_CHECKED` where no result was looked at, else 0."""
        return 1 if self.findings else 0 if self.is_run else NOT_CHECKED

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers."""
        plain: dict[str, Any] = json.loads(json.dumps({"schema": SCHEMA, **dataclasses.asdict(self), "exit_code": self.exit_code}))
        for finding, values in zip(self.findings, plain["findings"], strict=True):
            values.update(name=finding.name, cure=finding.cure)
        plain["explanation"] = self.explanation.to_dict() if self.explanation else None
        return plain

    @property
    def title(self) -> str:
        """What was judged, where, and how."""
        how = f"{self.num_run} launches checked" if self.is_run else "no GPU: RESULTS WERE NOT CHECKED"
        walked = (
            f", the addresses of {self.num_walked} more read from its PTX" if self.is_run else f"; {self.num_walked} launches walked in PTX"
        )
        return f"{self.subject} against {self.against} on {self.where}: {how}{walked if self.num_walked else ''}"

    def __str__(self) -> str:
        lines = [self.title, ""]
        if self.findings:
            lines += [f"WRONG. {finding.name}: {finding.evidence}.\n       {finding.cure}" for finding in self.findings]
        else:
            lines.append("Right." if self.is_run else "No address is wrong; whether the values are right, a GPU must say.")
        if self.measured:
            lines += ["", _say(self.measured, self.against)]
        lines += [f"note: {note}" for note in self.notes]
        if self.explanation:
            lines += ["", _figures(self.explanation)]
        return "\n".join([*lines, "", f"Next: {self.next_step}"])


def _say(measured: Measured, against: str) -> str:
    if measured.time_us is None:
        return "Not timed."
    parts = [f"{measured.time_us:.1f} us"]
    if measured.bytes_per_second is not None:
        parts.append(f"{measured.bytes_per_second / _BYTES_PER_GB:,.0f} GB/s")
    parts += [
        f"{share:.1%} of {what}"
        for share, what in ((measured.share_of_nominal, "nominal"), (measured.share_of_wall, "the wall"))
        if share is not None
    ]
    if measured.against_us is not None:
        parts.append(f"{against} takes {measured.against_us:.1f} us")
    return ", ".join(parts)


def _figures(explanation: Explanation) -> str:
    """The explanation in some lines; all of it is in the JSON."""
    lines = [f"{explanation.num_elements:,} elements, {explanation.bytes_per_element.value:.3g} bytes each"]
    if explanation.least_time:
        lines[0] += f", {explanation.least_time.value:.1f} us at least"
    for kernel in explanation.kernels:
        accesses = ", ".join(f"{a.count} x {a.width_bits}-bit {a.kind}" for a in kernel.accesses if a.space in ("global", "generic"))
        registers = f"{kernel.registers.value:.0f} registers" if kernel.registers else "registers unknown"
        spills = f"{kernel.spill_bytes.value:.0f} bytes spilled" if kernel.spill_bytes else "spills unknown"
        lives = f"{kernel.occupancy.value:.0%} occupancy" if kernel.occupancy else "occupancy unknown"
        lines.append(f"{accesses or 'no SASS'}; {registers}, {spills}, {lives}")
    lines += [
        f"{o.name} {o.role}: {o.warp_sectors.value:.3g} sectors a request, {o.warp_efficiency.value:.0%} of them used"
        for o in explanation.operands
    ]
    return "\n".join(f"  {line}" for line in (*lines, *map(str, explanation.verdicts)))


def judge(
    request: Request,
    *,
    target: str | None = None,
    device: torch.device | None = None,
    run: Run | None = None,
    sanitizing: Sanitize = "auto",
    max_seconds: float = 2.0,
    advance: Callable[[str], None] = lambda stage: None,
) -> Judgement:
    """Check, and where right, time and explain.

    On a CUDA ``device`` every launch is made by a process of its own, which may die. Elsewhere, ``run`` runs launches on the CPU; without
    it only the kernel's addresses are looked at, for ``target``, a GPU's name. ``advance`` is told what begins. Raises ``CompileError``
    for what NVRTC refuses, ``LayoutError`` for parameters that mean nothing, ``RangeError`` for a block or a grid that no GPU launches,
    ``DeviceError`` for a function without a GPU.
    """
    require_number("max_seconds", max_seconds, "a number, 0 and more")
    matched = match(request)
    is_gpu = device is not None and device.type == "cuda" and target is None
    if matched.kernel is None and not is_gpu and run is None:
        raise DeviceError(f"{request.subject} is no CUDA kernel: to judge it, it has to be called on a GPU")
    meant = read_device(device).target if is_gpu else find_target(target or _ELSEWHERE)
    notes: list[str] = []
    if matched.kernel is not None:
        sizes = dict(size_cases(matched)[-1].sizes)
        laid_out = matched.make(sizes)
        matched.launch(sizes, laid_out, matched.shapes(laid_out))  # what does not match is one error, not one a case
        for case in size_cases(matched):
            if refusal := matched.refusal(dict(case.sizes)):
                raise RangeError(f"with {case}, {refusal}")
    largest = _largest(matched, notes)
    advance("compiling")
    walked = _walk(matched, meant.arch, largest, notes) if matched.kernel else ()
    ran: tuple[Trial, ...] = ()
    faults: tuple[Fault, ...] = ()
    if is_gpu:
        advance("running")
        ran = _run(request, matched, largest, str(device), notes)
        if any(trial.has_hung for trial in ran):
            notes.append("compute-sanitizer was not run: a launch did not end")
        else:
            faults = _sanitize(request, matched, str(device), sanitizing, notes)
    elif run is not None:
        cpu = torch.device("cpu")
        ran = tuple(run_case(matched, case, cpu, run) for case in (*size_cases(matched), *alignment_cases(matched)))
    if sanitizing == "yes" and not is_gpu:
        raise DeviceError("--sanitize runs the kernel, and there is no GPU")
    findings = diagnose((*ran, *walked), faults)
    explanation = measured = None
    if not findings:
        advance("measuring")
        if refusal := matched.refusal(_timed_sizes(matched)):
            notes.append(f"not timed and not explained: {refusal}")
        else:
            explanation, measured = _measure(matched, device if is_gpu else None, target or _ELSEWHERE, max_seconds)
    gpu = meant.gpu.name if meant.gpu else meant.arch
    next_step = _next(findings, explanation, measured, bool(ran))
    where = f"{gpu} ({meant.arch})"
    return Judgement(
        request.subject, request.against, where, bool(ran), len(ran), len(walked), findings, tuple(notes), next_step, measured, explanation
    )


def _largest(matched: Match, notes: list[str]) -> tuple[Case, ...]:
    """The largest cases whose grid a GPU launches."""
    cases = []
    for case in largest_cases(matched):
        if refusal := matched.refusal(dict(case.sizes)):
            notes.append(f"{case} was not tried: {refusal}")
        else:
            cases.append(case)
    if matched.request.most is not None:
        notes.append(f"judged with up to {matched.request.most:,} elements, as --most says")
    return tuple(cases)


def _walk(matched: Match, arch: str, largest: Sequence[Case], notes: list[str]) -> tuple[Trial, ...]:
    """Walk each case, small ones first; one that does not come to its end is the last, since each larger one would take as long."""
    assert matched.kernel is not None
    plan = matched.kernel.plan(arch)
    ptx = plan.ptx  # raises what NVRTC refuses
    walked: list[Trial] = []
    for case in (*size_cases(matched), *alignment_cases(matched), *largest):
        if case.is_special:
            continue
        walked.append(walk_case(matched, ptx, case))
        if walked[-1].is_cut:
            notes.append(f"with {case}, the walk of its PTX was stopped after {MAX_STEPS:,} instructions; what follows was not walked")
            break
    return tuple(walked)


def _run(request: Request, matched: Match, largest: Sequence[Case], device: str, notes: list[str]) -> tuple[Trial, ...]:
    on_stream = Case(size_cases(matched)[-1].sizes, is_on_stream=True)
    small = (*size_cases(matched), *(case for case in largest if not case.bits), on_stream, *alignment_cases(matched))
    ran = child.run_in_children(request, small, device)
    huge = [case for case in largest if case.bits]
    if not huge:
        return ran
    is_wrong = not all(trial.is_right for trial in ran)
    for case in () if is_wrong else reversed(huge):  # what the largest shows, the smaller ones do
        if found := child.run_in_children(request, [case], device):
            return (*ran, *found)
    why = "small sizes are wrong already" if is_wrong else "the device has no room for them"
    notes.append(f"more than 2^{huge[0].bits} elements were not run: {why}")
    return ran


def _sanitize(request: Request, matched: Match, device: str, sanitizing: Sanitize, notes: list[str]) -> tuple[Fault, ...]:
    tool = find_sanitizer() if sanitizing != "no" else None
    if tool is None:
        if sanitizing == "yes":
            raise WideloadError("compute-sanitizer was not found. It comes with the CUDA toolkit; put it on the PATH.")
        if sanitizing == "auto":
            notes.append("compute-sanitizer was not found: reads beside inputs, and races that gave the same results, were not looked for")
        return ()
    cases = [case for case in size_cases(matched) if not case.is_special]
    text = child.job_text(request, cases, device, guard_bytes=0)
    try:
        return sanitize(tool, child.COMMAND, text, child.child_environment())
    except WideloadError as error:
        if sanitizing == "yes":
            raise
        notes.append(str(error))
        return ()


# ---- measuring


def _timed_sizes(matched: Match) -> dict[str, int]:
    """About `_TIMED_ELEMENTS`, or the most that the subject is for, with whole rows."""
    most = min(_TIMED_ELEMENTS, matched.request.most or _TIMED_ELEMENTS)
    for columns in (_COLUMNS, _FEW_COLUMNS):  # few, where a column has many elements
        last = {name: min(columns, most) for name in matched.names[1:]}
        per_unit = max(1, matched.shapes(matched.make({matched.names[0]: 1, **last}))[0].numel())
        if per_unit <= _TIMED_ELEMENTS // _COLUMNS:
            break
    return {matched.names[0]: max(1, most // per_unit), **last}


def _measure(matched: Match, device: torch.device | None, target: str, max_seconds: float) -> tuple[Explanation | None, Measured | None]:
    sizes = _timed_sizes(matched)
    laid_out = matched.make(sizes)
    shapes = matched.shapes(laid_out)
    kernel = matched.kernel
    if device is None:
        assert kernel is not None
        launch = matched.launch(sizes, laid_out, shapes)
        return kernel.explain(*launch.arguments, grid=launch.grid, block=launch.block, target=target), None
    operands = laid_out.replace(_draw(laid_out.inputs, device))
    results = [torch.empty_like(x, device=device) for x in shapes]
    found = _time(matched, sizes, operands, results, max_seconds, device)
    if kernel is None:
        return None, found
    launch = matched.launch(sizes, operands, results)
    return kernel.explain(*launch.arguments, grid=launch.grid, block=launch.block, measure=True), found


def _draw(like: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [random_tensor(tuple(x.shape), x.dtype, strides=x.stride(), device=device, seed=seed) for seed, x in enumerate(like)]


def _time(
    matched: Match, sizes: dict[str, int], operands: Operands, results: Sequence[torch.Tensor], max_seconds: float, device: torch.device
) -> Measured:
    """Beside the function, by `wl.bench`, which checks both once more."""
    kernel, request = matched.kernel, matched.request

    def launch_kernel(*args: Any, out: Any) -> Any:
        assert kernel is not None
        launch = matched.launch(sizes, Operands(args, operands.named), out)
        kernel(*launch.arguments, grid=launch.grid, block=launch.block)
        return out

    def call_subject(*args: Any) -> Any:
        return matched.subject(*args, **operands.named)

    def right(*args: Any) -> Any:
        return matched.compute(Operands(args, operands.named))

    def against(*args: Any) -> Any:
        return [matched.function(*args, **operands.named)]

    read = sum(x.numel() * x.element_size() for x in operands.inputs)
    written = sum(x.numel() * x.element_size() for x in results)
    rival = request.against if request.against != request.subject else f"{request.against} itself"
    result = bench(
        call_subject if kernel is None else launch_kernel,
        *operands.args,
        out=list(results) if kernel is not None else None,
        name=request.subject,
        against={rival: against},
        check=right,
        bytes=read + written,
        rtol=request.rtol or None,
        atol=request.atol,
        max_seconds=max_seconds,
    )
    own, other = result.subject, result[rival]
    wall = roofline(device).ceiling(read, written).value * _BYTES_PER_GB
    return Measured(
        own.time_us.median if own.time_us else None,
        other.time_us.median if other.time_us else None,
        own.bytes_per_second,
        result.share_of_nominal(own),
        own.bytes_per_second / wall if own.bytes_per_second else None,
        tuple(str(label) for label in own.labels if label.code != "MUTATES"),  # a kernel writes into out, on purpose
    )


def _next(findings: Sequence[Finding], explanation: Explanation | None, measured: Measured | None, is_run: bool) -> str:
    if findings:
        return f"{findings[0].cure} Then check again."
    share = measured.share_of_wall if measured else None
    if share is not None and share >= _AT_THE_WALL:
        return "nothing: it is at the wall. Only moving fewer bytes is faster: fuse it with what comes before or after (wl.fuse)."
    advice = explanation.verdicts[0].next_step if explanation and explanation.verdicts else ""
    if not is_run:
        return f"run wideload check where there is a GPU. {advice}".rstrip()
    return advice or "wideload explain says more."
