"""Turns a file of CUDA C++ into one text without includes of files beside it, as NVRTC is given it.

Text alone; it must not know what the source computes or how it is compiled.
"""

from __future__ import annotations

import re
from importlib.resources.abc import Traversable

from wideload.errors import CompileError

__all__ = ["read_cuda"]

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"[^\n]*$', re.MULTILINE)


def read_cuda(folder: Traversable, name: str) -> str:
    """Return the text of ``folder/name``; each ``#include "..."`` is replaced by that file, once, as an include guard would have it.

    Includes in angle brackets stay. Raises ``CompileError`` for a file that is not there, and for one that cannot be read.
    """
    seen: set[str] = set()

    def read(wanted: str, of: str) -> str:
        if wanted in seen:
            return ""
        seen.add(wanted)
        try:
            text = folder.joinpath(wanted).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CompileError(f"{of}{wanted} cannot be read: {error}") from error
        return _INCLUDE.sub(lambda found: read(found[1], f"{wanted} has {found[0].strip()}, and "), text)

    return read(name, "")
