"""Instructions an element from real SASS, the units' rates, and the budgets that were measured on an H200."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.analyze.budget import UNITS, count_units, main_instructions, unit_of, unit_rates, unit_time_us
from wideload.dtypes import DTYPES, dtype_name
from wideload.plan import ACCESS_BYTES
from wideload.sass import Instruction, memory_accesses

N = 2**20


def compiled(fn: Callable[..., Any], *args: torch.Tensor, target: str = "sm_90") -> tuple[tuple[Instruction, ...], int]:
    (kernel,) = wl.fuse(fn).plan(*args, target=target).kernels
    built = kernel.build()
    assert built.sass is not None, built.missing
    return main_instructions(built.sass, built.source, kernel.name), kernel.plan.variant.elements


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("opcode", "unit"),
    [
        ("MUFU.RCP", "special"),
        ("I2F.S64", "special"),
        ("FMUL.FTZ", "fp32"),
        ("HFMA2.BF16_V2", "fp32"),
        ("IMAD.WIDE.U32", "fp32"),
        ("DFMA", "fp64"),
        ("F2FP.BF16.F32.PACK_AB", "integer"),
        ("FSETP.GT.AND", "integer"),
        ("PRMT", "integer"),
        ("STG.E.128", "load_store"),
        ("LDS.U16", "load_store"),
        ("LDC.64", None),
        ("ULDC.64", None),
        ("BRA", None),
        ("EXIT", None),
    ],
)
def test_units(opcode: str, unit: str | None) -> None:
    assert unit_of(opcode) == unit


def test_the_budget_of_an_h200_that_was_measured() -> None:
    # 4 bytes an element at 4.35 TB/s: about 4 special functions and 30 plain instructions fit under them.
    memory_us = 4 * 2**30 / 4.35e6
    rates = unit_rates((9, 0))
    per_special, per_fp32 = (memory_us / unit_time_us(1, 2**30, rates[unit], 132, 1980) for unit in ("special", "fp32"))
    assert per_special == pytest.approx(3.85, abs=0.01)
    assert per_fp32 == pytest.approx(30.8, abs=0.1)


def test_rates_by_architecture() -> None:
    assert {cc: unit_rates(cc)["fp32"] for cc in ((7, 5), (8, 0), (8, 6), (9, 0), (12, 0))} == {
        (7, 5): 64,
        (8, 0): 64,
        (8, 6): 128,
        (9, 0): 128,
        (12, 0): 128,
    }
    assert [unit_rates(cc)["fp64"] for cc in ((7, 5), (8, 0), (8, 9), (9, 0), (12, 0))] == [2, 32, 2, 64, 2]


def test_an_add_by_hand() -> None:
    instructions, elements = compiled(lambda x, y: x + y, meta(N), meta(N))
    assert elements == 8
    assert Counter((a.kind, a.width_bits) for a in memory_accesses(instructions) if a.space == "global") == {
        ("load", 128): 2,
        ("store", 128): 1,
    }
    mix = count_units(instructions, elements)
    assert set(mix) == set(UNITS)
    assert mix["load_store"] == 3 / 8
    assert Counter(i.opcode.split(".")[0] for i in instructions)["FADD"] == 8
    assert mix["special"] == mix["fp64"] == 0
    assert mix["issue"] == len(instructions) / 8


def test_the_tanh_gelu_takes_two_special_functions() -> None:
    instructions, elements = compiled(lambda x: F.gelu(x, approximate="tanh"), meta(N))
    assert count_units(instructions, elements)["special"] == 2


def test_a_function_that_is_called_counts_once_a_call() -> None:
    instructions, elements = compiled(torch.sin, meta(N, dtype=torch.float32))
    calls = [i for i in instructions if i.opcode.startswith("CALL")]
    assert len(calls) == elements == 4
    # Its reduction of huge angles is a loop over a table in local memory, which is left out.
    assert not [a for a in memory_accesses(instructions) if a.space == "local"]
    assert count_units(instructions, elements)["fp32"] > 10


def test_slow_paths_of_a_division_are_left_out() -> None:
    instructions, _ = compiled(lambda x, y: x / y, meta(N, dtype=torch.float32), meta(N, dtype=torch.float32))
    assert [i for i in instructions if i.opcode.startswith("CALL")]
    assert Counter(i.opcode for i in instructions)["MUFU.RCP"] == 4  # a fifth stands in the slow path


# Rows of 1020 elements end in the middle of an access of 8; beside them, one element a row.
EDGED = (lambda x, b: x + b, meta(1024, 1020), meta(1024, 1))


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_edges_of_rows_are_left_out(target: str) -> None:
    instructions, _ = compiled(*EDGED, target=target)
    loads = Counter(a.width_bits for a in memory_accesses(instructions) if (a.kind, a.space) == ("load", "global"))
    assert loads == {128: 1, 16: 1}


def test_ends_of_realigned_operands_are_left_out() -> None:
    instructions, _ = compiled(lambda x: x * 2, meta(1024, 1026)[:, 1:-1])
    loads = Counter(a.width_bits for a in memory_accesses(instructions) if (a.kind, a.space) == ("load", "global"))
    assert set(loads) == {128}


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_the_budget_and_the_plan_have_the_same_main_path(target: str) -> None:
    """Two elements of 8 bytes an access: beside them two int8 that are not aligned, in a load each."""
    realigned = meta(1 << 16, dtype=torch.float64), meta((1 << 16) + 1, dtype=torch.int8)[1:]
    turned = meta(1024, 1024), meta(1024, 1024).t()
    for fn, args in ((torch.add, realigned), (torch.add, EDGED[1:]), (torch.add, turned)):
        (kernel,) = wl.fuse(fn).plan(*args, target=target).kernels
        instructions, _ = compiled(fn, *args, target=target)
        counted = Counter((a.kind, a.width_bits) for a in memory_accesses(instructions) if a.space == "global")
        assert counted == Counter((a.kind, a.width_bits) for a in kernel.main_accesses)
        if args is realigned:
            assert (counted["load", 128], counted["load", 8]) == (1, 2)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize < ACCESS_BYTES], ids=dtype_name)
def test_the_main_path_stores_each_byte_once(dtype: torch.dtype) -> None:
    """Of misaligned rows, in whose narrow stores at the ends the compiler may keep the prelude's line alone."""
    fused, x = wl.fuse(lambda x: x.clone()), meta(2**20 + 5, dtype=dtype)[1:-4]
    (kernel,) = fused.explain(x, target="h200").kernels
    assert kernel.family == "rows"
    stores = {access.width_bits: access.count for access in kernel.accesses if (access.kind, access.space) == ("store", "global")}
    assert stores == {128: kernel.elements_per_thread * dtype.itemsize // ACCESS_BYTES}
    large = meta(2**26 + 5, dtype=dtype)[1:-4]
    assert "narrow" not in {verdict.limit for verdict in fused.explain(large, target="h200").verdicts}


def test_edges_are_counted_where_they_are_no_edges() -> None:
    """The check can fail: without the source's braces, the narrow accesses of the edge are seen."""
    fn, *args = EDGED
    (kernel,) = wl.fuse(fn).plan(*args, target="sm_90").kernels
    built = kernel.build()
    assert built.sass is not None
    everything = memory_accesses(main_instructions(built.sass, "", kernel.name))
    assert sum(a.width_bits == 16 and a.kind == "load" for a in everything) > 8
