"""Runs pairs of an operator and a dtype in several processes.

A module of its own, since a new process imports what it runs by name.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Iterator

import torch

from tests.opinfo.check import Outcome, check_pair
from tests.opinfo.selection import Selected, select_ops
from wideload.expr import Numerics

__all__ = ["list_pairs", "run_pairs"]


def list_pairs(ops: tuple[Selected, ...], device: str) -> list[tuple[str, torch.dtype]]:
    """The pairs that torch supports; on the CPU those of CUDA too: their kernels are planned and compiled there."""
    devices = ("cpu", "cuda") if device == "cpu" else ("cuda",)
    return [(op.name, dtype) for op in ops for dtype in sorted({d for name in devices for d in op.dtypes(name)}, key=str)]


_ops: dict[str, Selected] = {}


def _check(name: str, dtype: torch.dtype, device: str, numerics: Numerics, compiles: bool) -> Outcome:
    if not _ops:
        _ops.update((op.name, op) for op in select_ops())
        torch.set_num_threads(1)  # operands are small
    return check_pair(_ops[name], dtype, device, numerics=numerics, compiles=compiles)


def run_pairs(
    pairs: list[tuple[str, torch.dtype]], device: str, *, numerics: Numerics = "eager", compiles: bool = False, jobs: int = 1
) -> Iterator[Outcome]:
    """The outcomes, in the order of ``pairs``, computed in ``jobs`` processes."""
    if jobs == 1:
        yield from (_check(name, dtype, device, numerics, compiles) for name, dtype in pairs)
        return
    context = multiprocessing.get_context("spawn")  # a forked process has no CUDA
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        settings = ([value] * len(pairs) for value in (device, numerics, compiles))
        yield from pool.map(_check, [name for name, _ in pairs], [dtype for _, dtype in pairs], *settings, chunksize=4)
