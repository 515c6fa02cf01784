"""The CUDA text that kernels share, cut to the blocks that one kernel names.

Text in, text out: knows how blocks depend on one another, never what they compute.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

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
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_DEFINED = re.compile(
    r"^(?:template <[^\n]*?> )?struct (?:alignas\([^{]*?\) )?(\w+)"  # a struct or a class template
    r"|^(?:template <[^\n]*?> )?(?:DEVICE|FUNCTION)[^(\n]*?\b(\w+)\("  # a function, all its overloads in one block
    r"|^#define (\w+)",
    re.MULTILINE,
)


@functools.cache
def _blocks() -> tuple[tuple[frozenset[str], frozenset[str], str], ...]:
    """(names defined, identifiers used, text) of every block, in file order; a block of comments alone is left out."""
    found = []
    for file in _FILES:
        for block in resources.files(__package__).joinpath(file).read_text().strip().split("\n\n"):
            code = re.sub(r"//[^\n]*", "", block)
            if code.strip():
                names = frozenset(name for match in _DEFINED.finditer(code) for name in match.groups() if name)
                found.append((names, frozenset(_IDENTIFIER.findall(code)), block))
    return tuple(found)


def select_prelude(code: str) -> str:
    """The blocks that ``code`` names, and those that they name, in the order of the files."""
    wanted = set(_IDENTIFIER.findall(re.sub(r"//[^\n]*", "", code)))
    chosen: set[int] = set()
    grew = True
    while grew:
        grew = False
        for number, (names, used, _) in enumerate(_blocks()):
            if number not in chosen and names & wanted:
                chosen.add(number)
                wanted |= used
                grew = True
    return "\n\n".join(_blocks()[number][2] for number in sorted(chosen))
