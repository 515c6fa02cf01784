"""Turns the PTX of a matched kernel and a case into a trial in which nothing ran: which addresses are touched, and which are not.

Some blocks are executed with their addresses, and no value is known. It must not know which bug would explain what was seen.
"""

from __future__ import annotations

import math

import torch

from wideload.analyze.handwritten import Operand, walk_kernel
from wideload.analyze.ptx import SAMPLED_THREADS, Walk
from wideload.errors import WideloadError
from wideload.judge.matching import Match
from wideload.judge.trial import Case, Trial

__all__ = ["walk_case"]

_PITCH = 1 << 42
"""Between tensors: more than any has, so that an index that is off is off all of them."""
_WHOLE_THREADS = 1 << 14
"""Grids up to this are walked as a whole: a thread for each element of the usual sizes, whose missing results can then be counted."""


def walk_case(match: Match, ptx: str, case: Case) -> Trial:
    """Walk one case. What `wl.raw` would refuse, a number that does not fit its parameter, is ``refused`` here too."""
    assert match.kernel is not None
    sizes = dict(case.sizes)
    laid_out = match.make(sizes)
    results = match.shapes(laid_out)
    launch = match.launch(sizes, laid_out, results)
    num_elements = results[0].numel()
    if refused := match.refusal(sizes):
        return Trial(case, num_elements, is_walked=True, refused=refused)
    shifts = dict(zip(map(id, (*laid_out.inputs, *results)), case.shifts, strict=False))
    operands: list[Operand | None] = []
    numbers: list[int | float | None] = []
    for position, (parameter, value) in enumerate(zip(match.kernel.parameters, launch.arguments, strict=True)):
        if isinstance(value, torch.Tensor):
            address = (position + 1) * _PITCH + shifts.get(id(value), 0) * value.element_size()
            operands.append(Operand(parameter.name, value.dtype, tuple(value.shape), value.stride(), address, not parameter.is_const))
            numbers.append(None)
            continue
        operands.append(None)
        try:
            numbers.append(parameter.check_number(value).item())
        except WideloadError as error:
            return Trial(case, num_elements, is_walked=True, refused=str(error))
    if 0 in launch.grid:
        missing = 0 if num_elements == 0 else num_elements
        return Trial(case, num_elements, is_walked=True, num_unwritten=missing)
    grid, block = ((*dims, 1, 1)[:3] for dims in (launch.grid, launch.block))
    x, y, z = grid
    sampled = _WHOLE_THREADS if math.prod((*grid, *block)) <= _WHOLE_THREADS else SAMPLED_THREADS
    walk = walk_kernel(ptx, match.kernel.__name__, (x, y, z), (block[0], block[1], block[2]), operands, numbers, sampled)
    return _trial(case, num_elements, walk, [operand for operand in operands if operand])


def _trial(case: Case, num_elements: int, walk: Walk, operands: list[Operand]) -> Trial:
    before = behind = 0
    reads: dict[str, int] = {}
    written: set[str] = set()
    for outside in walk.outside:
        operand = operands[outside.region]
        distance = math.ceil(outside.nbytes / operand.dtype.itemsize)
        if outside.kind == "load":
            reads[operand.name] = max(reads.get(operand.name, 0), distance)
        elif not operand.is_written:
            written.add(operand.name)
        elif outside.is_behind:
            behind = max(behind, distance)
        else:
            before = max(before, distance)
    written |= {operands[region].name for region in walk.writes if not operands[region].is_written}
    unwritten = [_unwritten(walk, position, operand, case) for position, operand in enumerate(operands) if operand.is_written]
    return Trial(
        case,
        num_elements,
        is_walked=True,
        num_unwritten=max(unwritten, default=0),
        before=before,
        behind=behind,
        reads=tuple(sorted(reads.items())),
        written_inputs=tuple(sorted(written)),
        misaligned=tuple(
            dict.fromkeys(
                operands[a.region].name for a in walk.accesses if a.region is not None and a.space == "global" and not a.is_aligned
            )
        ),
        raced_bytes=walk.raced_bytes,
        is_cut=walk.is_cut,
    )


def _unwritten(walk: Walk, position: int, operand: Operand, case: Case) -> int:
    """Elements that no store reaches, as far as that is certain: all of them where the whole grid was walked.

    Of a huge result, those behind the last that is written, if the last block writes some: one that writes nothing may be spare.
    """
    if not walk.is_exact or operand.span is None or any(outside.kind != "load" for outside in walk.outside):
        return 0
    start, end = operand.region
    touched = walk.writes.get(position)
    if walk.is_whole:
        return max(0, round((end - start - (touched.nbytes if touched else 0)) / operand.dtype.itemsize))
    if not case.bits or walk.has_loops or touched is None or not touched.is_by_last:
        return 0
    return max(0, end - touched.end) // operand.dtype.itemsize
