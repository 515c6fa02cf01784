"""Every row of the table on a GPU: eager mode against eager PyTorch bit for bit, fused mode against the exact value rounded once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import wideload as wl
from tests.emulator.test_numerics import NUMBERS
from tests.proofs.check import Settings, check
from tests.proofs.report import RESULT, read_report, unlike_eager
from tests.proofs.rows import UNARY, Row
from wideload.ops_table import OPS, Op

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 0.5, -2.5, 3.0, 6e-8, -6e-5, 65504.0, -65504.0, float("inf"), float("-inf"), float("nan"))
NUM_RANDOM = 1 << 20
UNLIKE_EAGER = unlike_eager(read_report(RESULT)[1])
"""Ops that torch computes by series of its own, as docs/numerics.md lists them."""
NOT_TRIED = ("rpow", "nextafter_bf16", "nextafter_f16", "gelu_slope", "gelu_tanh_slope", *UNLIKE_EAGER)
"""Of a number first; of a half beside fp32; of gradients alone, which no function can call."""
ROWS = [op for op in OPS.values() if "shape" not in op.types and op.name not in NOT_TRIED]


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """All values of a dtype of 16 bits and less; random bits of wider ones, small values and specials behind them."""
    if dtype == torch.bool:
        return torch.tensor([False, True], device=DEVICE)
    size = dtype.itemsize
    if size <= 2:
        return torch.arange(1 << 8 * size, device=DEVICE).to(BITS[size]).view(dtype)
    info = torch.iinfo(BITS[size])
    bits = torch.randint(info.min, info.max, (NUM_RANDOM,), dtype=BITS[size], device=DEVICE)
    if not dtype.is_floating_point:
        return torch.cat((bits, torch.arange(-300, 300, device=DEVICE, dtype=dtype), bits.new_tensor([info.min, info.max, -1, 0])))
    small = torch.cat([torch.rand(NUM_RANDOM // 4, dtype=dtype, device=DEVICE) * 2 * scale - scale for scale in (1, 15, 110, 1e4)])
    return torch.cat((bits.view(dtype), small, torch.tensor(SPECIAL, dtype=dtype, device=DEVICE)))


def pairs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of values of 8 bits; of wider ones specials with each other and with all, then random ones."""
    values = every_value(dtype)
    if dtype.itemsize == 1:
        return values.repeat_interleave(len(values)), values.repeat(len(values))
    some = torch.tensor(SPECIAL, dtype=dtype, device=DEVICE) if dtype.is_floating_point else values[-40:]
    shuffled = values[torch.randperm(len(values), device=DEVICE)]
    near = values + 1
    x = torch.cat((some.repeat_interleave(len(values)), values.repeat(len(some)), values, values, values))
    y = torch.cat((values.repeat(len(some)), some.repeat_interleave(len(values)), shuffled, values, near))
    return x, y


def operands_of(op: Op, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Tensors for the operands that are not numbers."""
    count = len(op.operands) - len(numbers_of(op, dtype))
    if count == 1:
        return (every_value(dtype),)
    x, y = pairs(dtype)
    tensors = [x, y, *(x[torch.randperm(len(x), device=DEVICE)] for _ in range(count - 2))]
    return tuple(t.bool() if mark == "bool" else t for t, mark in zip(tensors, op.types, strict=False))


def numbers_of(op: Op, dtype: torch.dtype) -> tuple[float, ...]:
    number = float if dtype.is_floating_point else int
    if op.name in NUMBERS:
        return tuple(map(number, NUMBERS[op.name]))
    if op.name.endswith("_number"):
        return (number(3),)
    numbers = {"alpha": number(3), "value": number(3), "number": number(3), "decimals": 0}
    return tuple(numbers[name] for name in op.operands if name in numbers)


def ordered(tensor: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the values, neighbours one apart: -1 for -0.0."""
    if not tensor.dtype.is_floating_point:
        return tensor.long()
    bits = tensor.view(BITS[tensor.element_size()]).long()
    return torch.where(bits >= 0, bits, ~(bits & torch.iinfo(BITS[tensor.element_size()]).max))


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> tuple[int, int]:
    """(the most values of the dtype between two of them, where); a NaN for a number is further than anything."""
    assert got.dtype == want.dtype
    steps = (ordered(got) - ordered(want)).abs()
    if got.dtype.is_floating_point:
        either, both = got.isnan() | want.isnan(), got.isnan() & want.isnan()
        steps = torch.where(both, 0, torch.where(either, 1 << 62, steps))
    at = int(steps.argmax())
    return int(steps[at]), at


def call_of(op: Op, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    numbers = numbers_of(op, dtype)
    function: Callable[..., torch.Tensor] = op.torch
    return lambda *tensors: function(*tensors, *numbers)


def eager_difference(op: Op, dtype: torch.dtype) -> tuple[int, str] | None:
    """Steps between ``numerics="eager"`` and eager PyTorch, and at which operands; None where torch has no such kernel."""
    torch.manual_seed(0)
    function, tensors = call_of(op, dtype), operands_of(op, dtype)
    if op.name in BY_ZERO and not dtype.is_floating_point:
        tensors = tuple(t if k == 0 else t.masked_fill(t == 0, 1) for k, t in enumerate(tensors))
    try:
        want = function(*tensors)
    except (RuntimeError, TypeError, NotImplementedError):
        return None
    if want.is_complex():
        return None
    fused = wl.fuse(function, name=op.name, numerics="eager")
    got = fused(*tensors)
    steps, at = steps_apart(got, want)
    return steps, f"{[t[at].item() for t in tensors]}: {got[at].item()!r}, eager has {want[at].item()!r}"


EAGER_STEPS = {
    # ATen rounds every step of its quotient to fp16.
    "div_floor": {torch.float16: 1},
    # By compiling with contraction, which wideload does nowhere, the C library's pow of fp64 comes out otherwise.
    "pow": {torch.float64: 1},
    "pow_number": {torch.float64: 1},
    "float_power": dict.fromkeys((*FLOATING, *WHOLE), 1),
}
"""Where ``numerics="eager"`` is not bit for bit what eager PyTorch gives: rows, dtypes, and by how many values of the dtype."""
BY_ZERO = ("div_floor", "div_trunc", "fmod", "remainder")
"""By an integer zero, eager PyTorch gives whatever the instructions leave; wideload's values are in docs/numerics.md."""


@pytest.mark.parametrize("dtype", [*FLOATING, *WHOLE], ids=str)
@pytest.mark.parametrize("op", ROWS, ids=lambda op: op.name)
def test_eager_mode_is_eager_pytorch_bit_for_bit(op: Op, dtype: torch.dtype) -> None:
    if op.name == "abs" and dtype == torch.bool:
        pytest.skip("torch's CPU, which is asked for the dtype, has no abs of bool")
    found = eager_difference(op, dtype)
    if found is None:
        pytest.skip("torch has no such CUDA kernel")
    steps, where = found
    assert steps <= EAGER_STEPS.get(op.name, {}).get(dtype, 0), f"{steps} steps: {where}"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("row", [row for row in UNARY if not row.needs_precision], ids=lambda row: row.name)
def test_halves_of_one_operand_are_within_the_contract(row: Row, dtype: str) -> None:
    """All 65,536 inputs, by the GPU's own approximate instructions, in every mode. Polygamma takes minutes: `python -m tests.proofs`."""
    settings = Settings("cuda")
    assert [record.faults(settings) for record in check(row, dtype, settings) if record.faults(settings)] == []
