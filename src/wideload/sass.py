"""Turns a cubin into SASS, and SASS into the memory accesses of a kernel: which space, how wide, from which source line.

It runs nvdisasm and reads text; it must not know how the kernel was planned, nor what widths it should have.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from wideload.errors import CompileError

__all__ = ["Access", "Instruction", "accesses_by_line", "disassemble", "find_nvdisasm", "main_path", "memory_accesses", "parse_sass"]

MAIN_PATH_MARKER = "if (is_full"
"""How generated kernels open the blocks that only thread blocks with nothing but whole accesses enter."""

_OPCODES: dict[str, tuple[Literal["load", "store"], Literal["global", "shared", "local", "generic", "constant"]]] = {
    "LDG": ("load", "global"),
    "LDGSTS": ("load", "global"),  # into shared memory, past the registers
    "STG": ("store", "global"),
    "LDS": ("load", "shared"),
    "STS": ("store", "shared"),
    "LDL": ("load", "local"),
    "STL": ("store", "local"),
    "LD": ("load", "generic"),
    "ST": ("store", "generic"),
    "LDC": ("load", "constant"),
    "LDCU": ("load", "constant"),
    "ULDC": ("load", "constant"),
}
_WIDTH = re.compile(r"\.[US]?(8|16|64|128|256)\b")
_DEFAULT_WIDTH_BITS = 32
"""Of an opcode that names none."""

_INSTRUCTION = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)\s*(?P<operands>[^;]*?)\s*;"
)
_LOCATION = re.compile(r'//## File ".*", line \d+')
_FUNCTION_LABEL = re.compile(r"[$\w][^\s:]*:")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of SASS.

    ``predicate`` is ``"P0"`` or ``"!P0"`` where the instruction stands under one. ``lines`` are the source lines it comes from,
    the innermost inlined function's first, the kernel's own last; empty where the cubin has no line information for it.
    """

    opcode: str
    operands: str
    address: int
    predicate: str | None = None
    lines: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Access:
    """One memory instruction: how many bits of which memory one thread moves by it.

    Local memory holds spills and arrays that did not fit registers; generic means that the compiler could not tell the space.
    """

    kind: Literal["load", "store"]
    space: Literal["global", "shared", "local", "generic", "constant"]
    width_bits: int
    opcode: str
    lines: tuple[int, ...] = ()


def disassemble(cubin: bytes, *, lineinfo: bool = False) -> str:
    """Return the SASS of ``cubin``, with a comment for each source location where ``lineinfo``.

    Raises ``CompileError`` where nvdisasm is missing or cannot read the cubin.
    """
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(find_nvdisasm()), "--print-code", *(["--print-line-info-inline"] if lineinfo else []), file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"{command[0]} could not read a cubin of {len(cubin)} bytes: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def parse_sass(sass: str) -> tuple[Instruction, ...]:
    """Read nvdisasm's text.

    >>> parse_sass("/*0010*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;")
    (Instruction(opcode='LDG.E.128', operands='R4, desc[UR4][R2.64]', address=16, predicate='!P0', lines=()),)
    """
    instructions: list[Instruction] = []
    lines: tuple[int, ...] = ()
    is_new_location = True
    for text in sass.splitlines():
        if _LOCATION.search(text):
            # An inlined location takes several comments: "line 3 inlined at ..., line 9", then "line 9".
            lines = () if is_new_location else lines
            is_new_location = False
            lines = tuple(dict.fromkeys((*lines, *(int(line) for line in re.findall(r'", line (\d+)', text)))))
        elif found := _INSTRUCTION.search(text):
            is_new_location = True
            instructions.append(Instruction(found["opcode"], found["operands"], int(found["address"], 16), found["predicate"], lines))
        elif _FUNCTION_LABEL.match(text):
            lines = ()
    return tuple(instructions)


def memory_accesses(instructions: Iterable[Instruction]) -> tuple[Access, ...]:
    """Pick the loads and stores, in order. Atomics and bulk copies are neither.

    >>> memory_accesses(parse_sass("/*0010*/  STG.E.U16 desc[UR4][R2.64], R5 ;"))
    (Access(kind='store', space='global', width_bits=16, opcode='STG.E.U16', lines=()),)
    """
    return tuple(
        Access(*_OPCODES[operation], _width_bits(instruction.opcode), instruction.opcode, instruction.lines)
        for instruction in instructions
        if (operation := instruction.opcode.split(".")[0]) in _OPCODES
    )


def accesses_by_line(cubin: bytes) -> tuple[Access, ...]:
    """Return the loads and stores of ``cubin``, each with the source lines that it comes from. Errors as `disassemble`."""
    return memory_accesses(parse_sass(disassemble(cubin, lineinfo=True)))


def main_path(cubin: bytes, source: str, *, marker: str = MAIN_PATH_MARKER) -> tuple[Access, ...]:
    """Return the global and generic accesses of the path that all thread blocks take but those at the edge.

    ``cubin`` was compiled from ``source`` with line information. In ``source``, the path is what stands in the braces after
    each line that contains ``marker``, and what is inlined there: so a narrow access of the edge's code is no matter,
    and a wide one there is no alibi. Raises ``CompileError`` where the path has no load or store at all: no line contains ``marker``,
    or the cubin has no line information.
    """
    marked = _braced_lines(source, marker)
    accesses = tuple(
        access for access in accesses_by_line(cubin) if access.space in ("global", "generic") and not marked.isdisjoint(access.lines)
    )
    if not accesses:
        raise CompileError(
            f"no global access comes from the {len(marked)} source lines in the braces after {marker!r}; "
            "mark the path there, and compile with lineinfo=True"
        )
    return accesses


def _width_bits(opcode: str) -> int:
    found = _WIDTH.search(opcode)
    return int(found[1]) if found else _DEFAULT_WIDTH_BITS


def _braced_lines(source: str, marker: str) -> frozenset[int]:
    """Return the numbers of the lines from each with ``marker`` to the brace that closes the block it opens, that last line left out."""
    lines = source.splitlines()
    code = [line.split("//")[0] for line in lines]
    return frozenset(number for start, line in enumerate(lines) if marker in line for number in _block(code, start))


def _block(code: list[str], start: int) -> range:
    depth = 0
    for index in range(start, len(code)):
        text = code[index] if depth else code[index][code[index].find("{") :]
        for brace in re.findall("[{}]", text):
            depth += 1 if brace == "{" else -1
            if depth == 0:
                return range(start + 1, max(index, start + 1) + 1)
    raise CompileError(f"the block that opens on line {start + 1} of the source is never closed")


@cache
def find_nvdisasm() -> Path:
    """Look in NVIDIA's wheels, Conda, ``CUDA_HOME``, ``PATH`` and triton, in this order; ``CompileError`` where it is in none."""
    found = _find_by_cuda_pathfinder() or shutil.which("nvdisasm") or _find_in_triton()
    if found is None:
        raise CompileError("nvdisasm was not found: install the wheel nvidia-cuda-nvdisasm (wideload[cu13] and wideload[cu12] bring it)")
    return Path(found)


def _find_by_cuda_pathfinder() -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    found: str | None = find_nvidia_binary_utility("nvdisasm")
    return found


def _find_in_triton() -> str | None:
    triton = importlib.util.find_spec("triton")
    locations = triton.submodule_search_locations or () if triton else ()
    return next((str(path) for location in locations if (path := Path(location, "backends/nvidia/bin/nvdisasm")).is_file()), None)
