"""Turns two functions of a language model into what they show: how exact they are, how compiled, how fast, and how fast at best.

Pure functions that give frozen results; it must not know how they are printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F

from wideload import ops
from wideload.analyze.bound import least_times_us
from wideload.fused import FusedFunction
from wideload.measure import BenchResult, bench

__all__ = [
    "ARCHS",
    "CASES",
    "CPU_TOKENS",
    "FULL_TOKENS",
    "Bound",
    "Case",
    "Check",
    "CompiledKernel",
    "LeastTime",
    "Report",
    "Steps",
    "Timing",
    "bound_case",
    "check_case",
    "compile_case",
    "round_to_bf16",
    "time_case",
]

HIDDEN_SIZE, INTERMEDIATE_SIZE = 4096, 14336
"""Of Llama 3 8B: ``hidden_size`` and ``intermediate_size`` of its ``config.json``."""

FULL_TOKENS = 16384
"""Tokens of the full size: 1.4 GB of traffic for the SwiGLU, many times any L2."""

CPU_TOKENS = 512
"""Enough for seven million results, few enough for a laptop's second."""

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
"""Those of the A100, the H100 and H200, the B200, and the RTX 50 series."""

MAX_STEPS = 1
"""The contract of ``numerics="fused"`` for halves, which both functions keep."""

_SEED = 0
_CHUNK_ROWS = 512  # rows compared at a time: float64 copies of the whole would take ten times the memory of the tensors
_WIDE_BITS = 128


@dataclass(frozen=True)
class Case:
    """A function and what it is held against.

    Each of its ``inputs`` has ``columns`` columns; those in ``row_inputs`` are one row, the others have a row a token.
    ``fused`` and ``eager`` take ``options`` besides.
    """

    name: str
    formula: str
    fused: FusedFunction
    eager: Callable[..., torch.Tensor]
    exact: Callable[..., torch.Tensor]
    columns: int
    inputs: tuple[str, ...]
    row_inputs: frozenset[str] = frozenset()
    options: Mapping[str, Any] = field(default_factory=dict)

    def shapes(self, tokens: int) -> tuple[tuple[int, ...], ...]:
        """The shape of each input."""
        return tuple((self.columns,) if name in self.row_inputs else (tokens, self.columns) for name in self.inputs)


def _exact_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _exact_bias_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # 0.5 * (1 + tanh(u)) is sigmoid(2u), which does not cancel where tanh(u) is near -1.
    y = x + bias
    return y * torch.sigmoid((8 / torch.pi) ** 0.5 * (y + 0.044715 * y**3))


CASES = (
    Case("SwiGLU", "silu(gate) * up", ops.swiglu, lambda gate, up: F.silu(gate) * up, _exact_swiglu, INTERMEDIATE_SIZE, ("gate", "up")),
    Case(
        "bias + GELU",
        'gelu(x + bias, approximate="tanh")',
        ops.bias_gelu,
        lambda x, bias, approximate: F.gelu(x + bias, approximate=approximate),
        _exact_bias_gelu,
        HIDDEN_SIZE,
        ("x", "bias"),
        frozenset({"bias"}),
        {"approximate": "tanh"},
    ),
)


# ---- how exact


@dataclass(frozen=True, slots=True)
class Steps:
    """How many results lie how far from the exact ones; a step is the distance of two neighbouring bf16 numbers."""

    num_exact: int
    num_one_step: int
    num_further: int
    max_steps: int


@dataclass(frozen=True, slots=True)
class Check:
    """Results beside the exact ones, which are computed in float64 and rounded once."""

    case: str
    shape: tuple[int, ...]
    device: str
    wideload: Steps
    torch_eager: Steps

    @property
    def is_right(self) -> bool:
        """Whether no result of wideload is more than `MAX_STEPS` from the exact one."""
        return self.wideload.max_steps <= MAX_STEPS


def check_case(case: Case, tokens: int, device: torch.device, on_rows: Callable[[int], None] = lambda rows: None) -> Check:
    """Compute ``case`` by wideload and by eager torch on normally distributed bf16 numbers, and compare each result with the exact one.

    ``on_rows`` is told the number of rows each time some have been compared.
    """
    inputs = _make_inputs(case, tokens, device)
    results = case.fused(*inputs, **case.options), case.eager(*inputs, **case.options)
    counts = [[0, 0, 0, 0], [0, 0, 0, 0]]
    for start in range(0, tokens, _CHUNK_ROWS):
        rows = slice(start, min(start + _CHUNK_ROWS, tokens))
        exact = round_to_bf16(case.exact(*((x if x.ndim == 1 else x[rows]).double() for x in inputs)))
        for count, result in zip(counts, results, strict=True):
            steps = (_ordinal(result[rows]) - _ordinal(exact)).abs()
            num_exact, num_one_step = int((steps == 0).sum()), int((steps == 1).sum())
            count[0] += num_exact
            count[1] += num_one_step
            count[2] += steps.numel() - num_exact - num_one_step
            count[3] = max(count[3], int(steps.max()))
        on_rows(rows.stop - rows.start)
    return Check(case.name, tuple(results[0].shape), str(device), Steps(*counts[0]), Steps(*counts[1]))


def _make_inputs(case: Case, tokens: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(device).manual_seed(_SEED)
    return tuple(torch.randn(shape, dtype=torch.bfloat16, device=device, generator=generator) for shape in case.shapes(tokens))


def round_to_bf16(exact: torch.Tensor) -> torch.Tensor:
    """Round float64 to bf16 once, to nearest even; ``.to`` goes through fp32 and rounds twice.

    >>> round_to_bf16(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)).item()  # just above the middle of 1 and 1 + 2**-7
    1.0078125
    """
    # First to fp32, to odd: towards zero, then the last bit set if anything was lost. That bit keeps the second rounding off a false tie.
    single = exact.float()
    bits = single.view(torch.int32) - (single.double().abs() > exact.abs()).int()
    return (bits | (single.double() != exact).int()).view(torch.float32).to(torch.bfloat16)


def _ordinal(x: torch.Tensor) -> torch.Tensor:
    """Neighbouring bf16 numbers to neighbouring integers; both zeros to 0. NaN is further from any number than infinity is."""
    bits = x.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


# ---- how compiled


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """A kernel for one architecture, read from ptxas' report and the SASS of the path that all blocks but the last take.

    ``num_accesses`` counts the instructions there that load or store global memory, ``num_wide_accesses`` those of 16 bytes.
    """

    case: str
    arch: str
    kernel: str
    family: str
    registers: int
    spill_bytes: int
    num_accesses: int
    num_wide_accesses: int
    bytes_per_element: float


def compile_case(case: Case, arch: str) -> CompiledKernel:
    """Compile ``case`` at full size for ``arch``; needs no GPU. Raises ``CompileError``."""
    inputs = tuple(torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in case.shapes(FULL_TOKENS))
    plan = case.fused.plan(*inputs, target=arch, **case.options)
    (kernel,) = plan.kernels
    accesses = kernel.main_accesses
    return CompiledKernel(
        case.name,
        arch,
        kernel.name,
        kernel.plan.variant.family,
        plan.registers,
        plan.spill_bytes,
        len(accesses),
        sum(access.width_bits >= _WIDE_BITS for access in accesses),
        _minimal_nbytes(case, FULL_TOKENS) / kernel.plan.num_elements,
    )


def _minimal_nbytes(case: Case, tokens: int) -> int:
    """Each input read once, the result written once."""
    num_elements = sum(torch.Size(shape).numel() for shape in (*case.shapes(tokens), (tokens, case.columns)))
    return num_elements * torch.bfloat16.itemsize


# ---- how fast, at best and here


@dataclass(frozen=True, slots=True)
class LeastTime:
    """Bytes over the nominal bandwidth of one GPU."""

    gpu: str
    memory_bandwidth_gbps: float
    time_us: float


@dataclass(frozen=True, slots=True)
class Bound:
    """The least time that each GPU could take, the fastest GPU first. Computed, not measured."""

    case: str
    tokens: int
    minimal_nbytes: int
    least_times: tuple[LeastTime, ...]
    tag: Literal["computed"] = "computed"


def bound_case(case: Case, tokens: int) -> Bound:
    """Divide the bytes of ``case`` by the bandwidth of every supported GPU."""
    nbytes = _minimal_nbytes(case, tokens)
    least_times = (LeastTime(gpu.name, gpu.memory_bandwidth_gbps, time_us) for gpu, time_us in least_times_us(nbytes))
    return Bound(case.name, tokens, nbytes, tuple(least_times))


@dataclass(frozen=True, slots=True)
class Timing:
    """GPU times from a cold L2 of wideload, of eager torch, and of a device-to-device copy that moves as many bytes. Measured."""

    case: str
    tokens: int
    result: BenchResult
    tag: Literal["measured"] = "measured"


def time_case(case: Case, tokens: int, device: torch.device) -> Timing:
    """Time ``case`` on the CUDA device ``device``. Its results are not compared again: `check_case` has done so, more finely."""
    inputs = _make_inputs(case, tokens, device)
    nbytes = _minimal_nbytes(case, tokens)
    source = torch.randint(256, (nbytes // 2,), dtype=torch.uint8, device=device)  # read once and written once
    target = torch.empty_like(source)
    rivals = {"torch eager": case.eager, "device copy": lambda *_, **__: target.copy_(source)}
    result = bench(
        case.fused, *inputs, against=rivals, mode="cold", bytes=nbytes, check=False, name="wideload", device=device, **case.options
    )
    return Timing(case.name, tokens, result)


# ---- all of it


@dataclass(frozen=True, slots=True)
class Report:
    """What one run of the demo showed."""

    tokens: int
    device: str
    checks: tuple[Check, ...]
    kernels: tuple[CompiledKernel, ...]
    timings: tuple[Timing, ...]
    bounds: tuple[Bound, ...]

    @property
    def faults(self) -> tuple[str, ...]:
        """What must not be: a result further than `MAX_STEPS` from the exact one, a kernel that spills."""
        wrong = (
            f"{check.case} is up to {check.wideload.max_steps:,} steps off, allowed: {MAX_STEPS}"
            for check in self.checks
            if not check.is_right
        )
        spills = (f"{kernel.case} spills {kernel.spill_bytes} bytes on {kernel.arch}" for kernel in self.kernels if kernel.spill_bytes)
        return (*wrong, *spills)

    def to_dict(self) -> dict[str, Any]:
        """Plain containers and numbers, for JSON."""
        return {
            "tokens": self.tokens,
            "device": self.device,
            "checks": [asdict(check) for check in self.checks],
            "kernels": [asdict(kernel) for kernel in self.kernels],
            "timings": [{"case": t.case, "tokens": t.tokens, "tag": t.tag, "bench": t.result.to_dict()} for t in self.timings],
            "bounds": [asdict(bound) for bound in self.bounds],
            "faults": list(self.faults),
        }
