"""The CUDA text that kernels share, cut to the blocks that one kernel names.

Text in, text out: knows how blocks depend on one another, never what they compute.
"""

from __future__ import annotations

import functools
import pkgutil
import re

__all__ = ["select_prelude"]

_FILES = (
    "types.cuh",
    "convert.cuh",
    "math.cuh",
    "special.cuh",
    "memory.cuh",
    "largest.cuh",
    "columns.cuh",
    "tile.cuh",
    "philox.cuh",
    "fp8.cuh",
    "complex.cuh",
)
_COMMENT = re.compile(r"//[^\n]*")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(
    r"(?:template <.*?> )?struct (?:alignas\([^{]*?\) )?(\w+)"  # a struct or a class template
    r"|(?:template <.*?> )?(?:DEVICE|FUNCTION)[^(]*\b(\w+)\("  # a function, all its overloads in one block
    r"|#define (\w+)"
)
_OPENINGS = ("template", "struct", "DEVICE", "FUNCTION", "#define")
"""Of lines that may define something: each first call in a process searches all texts."""


@functools.cache
def _blocks() -> tuple[list[str], dict[str, list[int]]]:
    """The blocks' texts in file order, and by name the numbers of those that define it."""
    texts = [(pkgutil.get_data(__name__, file) or b"").decode().strip() for file in _FILES]
    blocks = [block for text in texts for block in text.split("\n\n")]
    defining: dict[str, list[int]] = {}
    for number, block in enumerate(blocks):
        for line in block.split("\n"):
            if line.startswith(_OPENINGS) and (match := _DEFINED.match(line)):
                defining.setdefault(match[match.lastindex or 0], []).append(number)
    return blocks, defining


@functools.cache
def _used(number: int) -> frozenset[str]:
    return _identifiers(_blocks()[0][number])


def _identifiers(code: str) -> frozenset[str]:
    return frozenset(_IDENTIFIER.findall(_COMMENT.sub("", code)))


def select_prelude(code: str) -> str:
    """The blocks that ``code`` names, and those that they name, in the order of the files."""
    blocks, defining = _blocks()
    chosen: set[int] = set()
    wanted = [*_identifiers(code)]
    while wanted:
        for number in defining.get(wanted.pop(), ()):
            if number not in chosen:
                chosen.add(number)
                wanted += _used(number)
    return "\n\n".join(blocks[number] for number in sorted(chosen))
