"""Which bytes a warp's lanes ask for: worked out by hand, and as `explain` counts them for each way to reach an operand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import wideload as wl
from wideload.analyze.explain import ExplainedOperand, Explanation
from wideload.analyze.pattern import Pattern, indexed_pattern, operand_pattern, strided_pattern
from wideload.analyze.sectors import strided_access, warp_sectors
from wideload.errors import LayoutError


def test_every_second_float_of_a_warp() -> None:
    pattern = strided_pattern(4, stride=2)
    assert pattern.lanes[:3] == ((0,), (8,), (16,))
    assert pattern.lanes[31] == (248,)
    assert (pattern.sectors, pattern.lines) == (tuple(range(8)), (0, 1))  # 32 floats in 256 bytes, the last sector half used
    assert pattern.access == warp_sectors(range(0, 256, 8), 4)


def test_an_offset_touches_one_sector_more() -> None:
    pattern = strided_pattern(2, stride=1, offset=17)
    assert pattern.lanes[0] == (34,)
    assert (pattern.sectors, pattern.lines) == ((1, 2, 3), (0,))  # bytes 34 to 97: 64 bytes in 3 sectors instead of 2
    assert (pattern.access.useful_bytes, pattern.access.moved_bytes) == (64, 96)


def test_reversed_and_broadcast() -> None:
    assert strided_pattern(4, stride=-1).sectors == (-4, -3, -2, -1, 0)
    assert strided_pattern(4, stride=0).access == strided_access(4, 0)
    assert indexed_pattern(4, [0, 1, 8, 8]).access == warp_sectors([0, 4, 32, 32], 4)


def test_more_lanes_than_a_warp_are_refused() -> None:
    with pytest.raises(LayoutError, match="33 lanes"):
        indexed_pattern(4, range(33))
    with pytest.raises(LayoutError, match="at least 1 byte"):
        Pattern(0, ())


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def pattern_of(explanation: Explanation, operand: ExplainedOperand) -> Pattern:
    pattern = operand_pattern(explanation, operand)
    assert pattern is not None
    return pattern


X = meta(512, 1024)
PATHS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "vector": (lambda x: x + 1, (X,)),
    "vector of mixed widths": (lambda x, y: x + y, (X, X.float())),
    "repeated": (lambda x, b: torch.nn.functional.gelu(x + b), (meta(16384, 4096), meta(4096))),
    "realigned": (lambda x: x + 1, (meta(512 * 1024 + 1)[1:],)),
    "stepped": (lambda x: x + 1, (X[:, ::2],)),
    "strided": (lambda x: x + 1, (X[:, ::40],)),
    "turned": (lambda x, y: x + y, (meta(1024, 512).t(), X)),
    "row": (lambda x, c: x + c, (X, meta(512, 1))),
    "uniform": (lambda x, c: x + c, (X, meta(1))),
    "few elements": (lambda x: x + 1, (meta(13),)),
    "no more than a lane": (lambda x: x + 1, (meta(1),)),
}


@pytest.mark.parametrize("path", PATHS)
def test_an_operand_has_the_sectors_that_are_explained(path: str) -> None:
    function, operands = PATHS[path]
    explanation = wl.fuse(function).explain(*operands, target="h200")
    assert " " in path or path in {operand.access for operand in explanation.operands}
    for operand in explanation.operands:
        access = pattern_of(explanation, operand).access
        assert (access.sectors, access.efficiency) == (operand.warp_sectors.value, operand.warp_efficiency.value), operand


def test_lanes_of_a_misaligned_and_of_a_transposed_operand() -> None:
    explanation = wl.fuse(lambda x, y: x + y).explain(meta(8193)[1:].view(64, 128), meta(128, 64).t(), target="h200")
    x, y, out = explanation.operands
    assert x.line_byte == 2
    assert pattern_of(explanation, x).lanes[0] == (2,)
    assert pattern_of(explanation, y).lanes[0] == (0,)
    assert pattern_of(explanation, out).lanes[1] == (16,)


def test_of_a_kernel_without_a_plan_nothing_is_known() -> None:
    explanation = wl.fuse(lambda x: x + 1).explain(X, target="h200")
    assert operand_pattern(explanation, dataclasses.replace(explanation.operands[0], access="16 B + 2 B")) is None
