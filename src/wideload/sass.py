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

__all__ = [
    "Access",
    "Instruction",
    "accesses_by_line",
    "disassemble",
    "edge_lines",
    "find_cuobjdump",
    "find_nvdisasm",
    "main_path",
    "memory_accesses",
    "parse_sass",
]

MAIN_PATH_MARKER = "if (is_full"
"""How generated kernels open the blocks of whole accesses; what threads at an edge do instead stands in their ``else`` blocks."""
_EDGE_FUNCTION = re.compile(r"\bDEVICE\b[^;{}]*\b(?:load_some|load_within|store_some)\([^;{}]*(?={)")
"""What threads at an edge call. The line of an inlined call may be lost, so that those of the function alone tell the edge."""
_BRACE = re.compile("[{}]")
_ELSE = re.compile(r"\s*else\s*(?={)")

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


def main_path(cubin: bytes, source: str) -> tuple[Access, ...]:
    """Return the global and generic accesses of the path that all thread blocks take but those at the edge: none is of `edge_lines`.

    ``cubin`` was compiled from ``source`` with line information. A narrow access of the edge's code is no matter then, and a wide one
    there is no alibi. Raises ``CompileError`` where no access of the path comes from a line of the source, as without line information.
    """
    edge = edge_lines(source)
    accesses = tuple(
        access for access in accesses_by_line(cubin) if access.space in ("global", "generic") and edge.isdisjoint(access.lines)
    )
    if not any(access.lines for access in accesses):
        raise CompileError(f"none of {len(accesses)} global accesses comes from a line of the main path: compile with lineinfo=True")
    return accesses


def edge_lines(source: str) -> frozenset[int]:
    """Return the numbers of the lines that only threads at an edge execute.

    They are the ``else`` blocks of the ifs of `MAIN_PATH_MARKER`, and the bodies of the prelude's functions for some elements of an
    access (``store_some`` and such). What stands elsewhere is the main path, and all of a kernel without such an if. Raises
    ``CompileError`` where a block is not closed.

    >>> sorted(edge_lines("if (is_full) {\\n    whole();\\n} else {\\n    part();\\n}\\nrest();"))
    [3, 4, 5]
    """
    text = "\n".join(line.split("//")[0] for line in source.splitlines())
    whole = (opened.end() for opened in re.finditer(rf"{re.escape(MAIN_PATH_MARKER)}[^{{]*", text))
    otherwise = (_ELSE.match(text, _block_end(text, start)) for start in whole)
    starts = [found.end() for found in (*otherwise, *_EDGE_FUNCTION.finditer(text)) if found]
    blocks = ((text.count("\n", 0, at) + 1 for at in (start, _block_end(text, start))) for start in starts)
    return frozenset(line for first, last in blocks for line in range(first, last + 1))


def _width_bits(opcode: str) -> int:
    found = _WIDTH.search(opcode)
    return int(found[1]) if found else _DEFAULT_WIDTH_BITS


def _block_end(text: str, start: int) -> int:
    """Where the block that opens at ``start`` is closed: behind its last brace."""
    depth = 0
    for brace in _BRACE.finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.end()
    line = text.count("\n", 0, start) + 1
    raise CompileError(f"the block that opens on line {line} of the source is never closed")


@cache
def find_nvdisasm() -> Path:
    """Look in NVIDIA's wheels, Conda, ``CUDA_HOME``, ``PATH`` and triton, in this order; ``CompileError`` where it is in none."""
    return _find_tool("nvdisasm")


@cache
def find_cuobjdump() -> Path:
    """Look where `find_nvdisasm` does; ``CompileError`` where cuobjdump is in none."""
    return _find_tool("cuobjdump")


def _find_tool(name: str) -> Path:
    found = _find_by_cuda_pathfinder(name) or shutil.which(name) or _find_in_triton(name)
    if found is None:
        raise CompileError(f"{name} was not found: install the wheel nvidia-cuda-{name} (wideload[cu13] and wideload[cu12] bring it)")
    return Path(found)


def _find_by_cuda_pathfinder(name: str) -> str | None:
    try:
        from cuda.pathfinder import find_nvidia_binary_utility
    except ImportError:
        return None
    found: str | None = find_nvidia_binary_utility(name)
    return found


def _find_in_triton(name: str) -> str | None:
    triton = importlib.util.find_spec("triton")
    locations = triton.submodule_search_locations or () if triton else ()
    return next((str(path) for location in locations if (path := Path(location, "backends/nvidia/bin", name)).is_file()), None)
