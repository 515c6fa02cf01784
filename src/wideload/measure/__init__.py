"""Turns callables into figures that can be trusted: times, what they were checked against, and whether two of them differ."""

from __future__ import annotations

from wideload.measure.bench import bench
from wideload.measure.compare import EXIT_CODES, Comparison, Comparisons, SelfTest, compare, compare_results, self_test
from wideload.measure.operands import count_cells, random_tensor, unique_bytes
from wideload.measure.result import BenchResult, Contender
from wideload.measure.roofline import Roofline, roofline

__all__ = [
    "EXIT_CODES",
    "BenchResult",
    "Comparison",
    "Comparisons",
    "Contender",
    "Roofline",
    "SelfTest",
    "bench",
    "compare",
    "compare_results",
    "count_cells",
    "random_tensor",
    "roofline",
    "self_test",
    "unique_bytes",
]
