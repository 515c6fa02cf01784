"""Turns a command line, and the ``// wideload:`` line of a CUDA file, into what is to be judged, against what, and how it is launched.

Words and sizes alone: it must not know tensors, nor what a kernel's parameters are.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from wideload.errors import WideloadError
from wideload.prototype import find_kernels
from wideload.spelling import evaluate_size

__all__ = ["Request", "read_request"]

_DIRECTIVE = re.compile(r"^\s*//\s*wideload:\s*(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Request:
    """What is judged, spelt as on the command line, so that another process can be told the same.

    ``subject`` is ``FILE.cu:KERNEL``, or a function in any of `find_function`'s spellings; ``against`` is a function of the same inputs.
    ``operands`` are those of ``wideload bench``, with names for their sizes; none: made up from the kernel's pointers. ``grid`` is up to
    three sizes in the operands' names, ``n``, ``items`` and ``block``; empty: a thread for every ``items`` elements. ``shared`` is a size
    in ``block`` and ``items``, the bytes of dynamic shared memory a block; empty: none was said. ``let`` gives values to parameters.
    ``rtol`` 0 asks for every bit, None for the rounding that its dtype leaves open (`default_tolerance`). ``most`` is the largest number
    of elements of the first result that the subject is for; None: any.
    """

    subject: str
    against: str
    operands: tuple[str, ...] = ()
    grid: str = ""
    block: tuple[int, ...] = (256,)
    items: int = 1
    shared: str = ""
    let: tuple[tuple[str, str], ...] = ()
    rtol: float | None = None
    atol: float = 0.0
    most: int | None = None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise WideloadError(message)


def _block(text: str) -> tuple[int, ...]:
    if re.fullmatch(r"\d+(,\d+){0,2}", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of threads; allowed: one to three, such as 256 or 32,8")
    return tuple(map(int, text.split(",")))


def _most(text: str) -> int:
    try:
        most = evaluate_size(text)
    except WideloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if most < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: 1 and more elements")
    return most


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip().isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not spelt NAME=VALUE")
    return name.strip(), value.strip()


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("operands", nargs="*", default=())
    parser.add_argument("--against", default=None)
    parser.add_argument("--grid", default=None)
    parser.add_argument("--block", type=_block, default=None)
    parser.add_argument("--items", type=int, default=None)
    parser.add_argument("--shared", default=None)
    parser.add_argument("--let", type=_pair, action="append", default=None)
    parser.add_argument("--rtol", type=float, default=None)
    parser.add_argument("--atol", type=float, default=None)
    parser.add_argument("--most", type=_most, default=None)
    return parser


def read_request(subject: str, words: Sequence[str] = ()) -> Request:
    """Return what ``words`` ask of ``subject``; what they leave out is taken from the file's ``// wideload:`` lines.

    A file of several kernels has a line for each, which begins with the kernel's name and a colon. Raises ``WideloadError`` for words
    that mean nothing, and where neither says against what.

    >>> read_request("my.module:add", ["f32[n]", "--against", "add", "--items", "4", "f32[n]"]).operands
    ('f32[n]', 'f32[n]')
    """
    options = {**_parse(_directive(subject), f"the // wideload: line of {subject}"), **_parse(words, "the command line")}
    if "against" not in options:
        raise WideloadError(f"what is {subject} held against? Name a function: --against swiglu, --against torch:add")
    request = Request(subject, **options)
    if request.items < 1:
        raise WideloadError(f"--items is {request.items}; allowed: 1 and more elements a thread")
    return request


def _parse(words: Sequence[str], where: str) -> dict[str, Any]:
    try:
        found = vars(_parser().parse_intermixed_args(list(words)))
    except WideloadError as error:
        raise WideloadError(f"{where}: {error}") from None
    return {name: tuple(value) if isinstance(value, list) else value for name, value in found.items() if value not in (None, [], ())}


def _directive(subject: str) -> list[str]:
    path, _, kernel = (subject, "", "") if subject.endswith(".cu") else subject.rpartition(":")
    if not path.endswith(".cu"):
        return []
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WideloadError(f"{path} is no text in UTF-8: {error}") from None
    except OSError as error:
        raise WideloadError(f"there is no file {path}" if isinstance(error, FileNotFoundError) else f"{path}: {error.strerror}") from None
    if not kernel:
        there = ", ".join(find_kernels(text))
        raise WideloadError(f"{path} is a file; name its kernel: {path}:KERNEL" + (f". There is {there}." if there else ""))
    for line in _DIRECTIVE.findall(text):
        named = re.match(r"(\w+):\s+(.*)", line)
        if named is None or named[1] == kernel:
            try:
                return shlex.split(named[2] if named else line)
            except ValueError as error:
                raise WideloadError(f"the // wideload: line of {subject} cannot be read: {error}: {line}") from None
    return []
