"""Turns the SASS of a kernel into instructions an element, and these into the time that each unit of the SMs needs for them.

Where a unit needs longer than the memory does, the kernel is no longer bound by memory. It must not know how bytes are moved.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, get_args

from wideload.sass import Instruction, edge_lines, memory_accesses, parse_sass

__all__ = ["UNITS", "Unit", "boost_clock_mhz", "count_units", "main_instructions", "unit_of", "unit_rates", "unit_time_us"]

Unit = Literal["special", "fp32", "fp64", "integer", "load_store", "issue"]
"""``special``: exponentials, reciprocals, sines, conversions between integers and floats. ``fp32``: add, multiply, fused multiply-add,
of halves too, and integer multiply-add, which shares their pipe. ``integer``: all else that computes: integers, logic, comparisons,
selections, packing, moves. ``load_store``: loads and stores. ``issue``: every instruction, by the four schedulers."""

UNITS: tuple[Unit, ...] = get_args(Unit)

_LANES = 32
_SCHEDULERS = 4

_SPECIAL = frozenset("MUFU I2F F2I F2F FRND POPC FLO BREV".split())
_FP32 = frozenset("FADD FMUL FFMA FADD32I FMUL32I FFMA32I FSWZADD HADD2 HMUL2 HFMA2 IMAD FADD2 FMUL2 FFMA2".split())
_FP64 = frozenset("DADD DMUL DFMA DSETP DMNMX".split())
_CONTROL = frozenset("BRA BRX EXIT RET CALL BSSY BSYNC BREAK BAR NOP WARPSYNC YIELD DEPBAR MEMBAR ERRBAR LDC S2R S2UR CS2R R2UR".split())
"""They are issued, and no unit is kept busy by them."""


def unit_of(opcode: str) -> Unit | None:
    """Return the unit that executes an instruction; None of control flow and of the uniform datapath, which are only issued.

    >>> unit_of("MUFU.EX2"), unit_of("FFMA.FTZ"), unit_of("LDG.E.128.CONSTANT"), unit_of("ULDC.64"), unit_of("ISETP.GE.AND")
    ('special', 'fp32', 'load_store', None, 'integer')
    """
    operation = opcode.split(".")[0]
    if operation in _SPECIAL:
        return "special"
    if operation in _FP32:
        return "fp32"
    if operation in _FP64:
        return "fp64"
    if any(access.space != "constant" for access in memory_accesses((Instruction(opcode, "", 0),))):
        return "load_store"
    # The uniform datapath has a U before the opcode of the vector one; UMOV, ULDC, UIADD3, ...
    return None if operation in _CONTROL or operation.startswith("U") else "integer"


def unit_rates(compute_capability: tuple[int, int]) -> dict[Unit, int]:
    """Return what one SM does in one clock, in lanes (results).

    CUDA C++ Programming Guide, throughput of native arithmetic instructions; loads and stores: the 32 lanes of the LSU pipe (Nsight
    Compute's pipelines; 16 on Turing).

    >>> unit_rates((9, 0))["special"], unit_rates((9, 0))["fp32"], unit_rates((8, 0))["fp32"]
    (16, 128, 64)
    """
    has_wide_fp64 = compute_capability in ((8, 0), (9, 0), (10, 0))
    return {
        "special": 16,
        "fp32": 64 if compute_capability <= (8, 0) else 128,
        "fp64": (32 if compute_capability == (8, 0) else 64) if has_wide_fp64 else 2,
        "integer": 64,
        "load_store": 16 if compute_capability < (8, 0) else 32,
        "issue": _LANES * _SCHEDULERS,
    }


_BOOST_CLOCK_MHZ: tuple[tuple[tuple[int, int], int, str], ...] = (
    ((12, 0), 2407, "RTX 5090"),
    ((11, 0), 1575, "Jetson Thor"),
    ((10, 0), 1965, "B200"),
    ((9, 0), 1980, "H100 and H200 SXM"),
    ((8, 9), 2520, "RTX 4090 and L40S"),
    ((8, 7), 1300, "Jetson AGX Orin"),
    ((8, 6), 1695, "RTX 3090"),
    ((8, 0), 1410, "A100"),
    ((7, 5), 1590, "T4"),
)
"""From which compute capability on; the boost clock on NVIDIA's sheet of that GPU."""


def boost_clock_mhz(compute_capability: tuple[int, int]) -> tuple[int, str]:
    """Return the SM clock to reckon with where none was read, and the GPU whose sheet it is from.

    >>> boost_clock_mhz((9, 0))
    (1980, 'H100 and H200 SXM')
    """
    return next((clock, gpu) for since, clock, gpu in _BOOST_CLOCK_MHZ if compute_capability >= since)


def unit_time_us(per_element: float, num_elements: int, rate: int, sms: int, clock_mhz: float) -> float:
    """Return the time that the SMs' units need for so many instructions an element.

    >>> round(unit_time_us(4, 2**30, 16, 132, 1980))  # four exponentials an element on an H200
    1027
    """
    return per_element * num_elements / (rate * sms * clock_mhz)


# ---- counting

_LABEL = re.compile(r"^(?!\.)(\S+):\s*$", re.MULTILINE)
_CALLED = re.compile(r"`\((\S+)\)")
_TARGET = re.compile(r"^(\.L_x_\d+):\s*\n(?:(?!\.L_x_)[^\n]*\n)*?\s*/\*([0-9a-f]{4,})\*/", re.MULTILINE)
"""A label, and the address of the instruction behind it."""
_RARE_FUNCTION = re.compile("slowpath|mediumpath")
"""In the names of the functions that CUDA's own arithmetic calls for operands that its fast path cannot do."""


def main_instructions(sass: str, source: str, kernel: str) -> tuple[Instruction, ...]:
    """Return what a thread executes that is not at an edge, of SASS with line information (``disassemble(..., lineinfo=True)``).

    Left out are the source's `edge_lines`, and the slow paths of CUDA's arithmetic: functions, and loops that a branch skips. A function
    that was not inlined stands once for each call. Other branches inside an op count as if they were taken: this is an upper bound.
    """
    edge = edge_lines(source)
    labels = list(_LABEL.finditer(sass))
    ends = [label.start() for label in labels[1:]] + [len(sass)]
    functions = {label[1]: _executed(sass[label.end() : end], edge) for label, end in zip(labels, ends, strict=True)}

    def body(name: str, callers: tuple[str, ...]) -> Iterator[Instruction]:
        for instruction in functions.get(name, ()):
            yield instruction
            called = _CALLED.search(instruction.operands) if instruction.opcode.startswith("CALL") else None
            if called and called[1] not in callers and not _RARE_FUNCTION.search(called[1]):
                yield from body(called[1], (*callers, called[1]))

    return tuple(body(kernel, (kernel,)))


def _executed(sass: str, edge: frozenset[int]) -> list[Instruction]:
    """One function's instructions without those at an edge, in rare loops, and behind its end: a branch to itself, and padding."""
    instructions = parse_sass(sass)
    rare = _rare_loops(sass, instructions)
    found = [
        item
        for item in instructions
        if item.opcode != "NOP" and edge.isdisjoint(item.lines) and not any(item.address in addresses for addresses in rare)
    ]
    return found[:-1] if found and found[-1].opcode == "BRA" else found


def _rare_loops(sass: str, instructions: Sequence[Instruction]) -> list[range]:
    """The addresses between a branch and its target that hold a loop.

    Generated kernels have no loops: these are the compiler's, for operands that an op's straight path cannot do (sines of huge
    numbers, remainders of huge quotients).
    """
    targets = {name: int(address, 16) for name, address in _TARGET.findall(sass)}
    jumps = [
        (item.address, targets[found[1]])
        for item in instructions
        if item.opcode.startswith("BRA") and (found := _CALLED.search(item.operands)) and found[1] in targets
    ]
    loops = [(to, at) for at, to in jumps if to < at]
    skips = [range(at + 1, to) for at, to in jumps if to > at]
    around = ([skip for skip in skips if start in skip and end in skip] for start, end in loops)
    return [min(enclosing, key=len) for enclosing in around if enclosing]


def count_units(instructions: Iterable[Instruction], elements: int) -> dict[Unit, float]:
    """Return the instructions of each unit for one element, of a thread that computes ``elements``."""
    counts = dict.fromkeys(UNITS, 0)
    for instruction in instructions:
        unit = unit_of(instruction.opcode)
        counts["issue"] += 1
        if unit is not None:
            counts[unit] += 1
    return {unit: count / elements for unit, count in counts.items()}
