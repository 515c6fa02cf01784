"""Turns a kernel's parameters and a function's operands into the arguments of a launch at any sizes.

Pointers to const take the inputs in their order, other pointers the results, numbers what their names say. It must not know what is
launched with them, nor whether that is right.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wideload.dtypes import dtype_name
from wideload.errors import LayoutError, RangeError, WideloadError
from wideload.fused import FusedFunction
from wideload.judge.request import Request
from wideload.measure.outcome import tensors_of
from wideload.prototype import Parameter
from wideload.raw_kernel import RawKernel, check_block, check_grid, raw
from wideload.spelling import evaluate_size, evaluate_sizes, find_function, make_arguments

__all__ = ["Launch", "Match", "Operands", "match"]

Dims = tuple[int, ...]

_ELEMENTS = frozenset("n N numel num_elements elements count total size length len num".split())
_ROWS = frozenset("rows num_rows height".split())
_COLUMNS = frozenset("cols columns num_cols num_columns width".split())
"""Names of integers, of the first result: its elements, all its dims but the last, its last dim."""
_SHAPE = re.compile(r"\[([^\]]*)\]")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


@dataclass(frozen=True, slots=True)
class Operands:
    """A call of the function: ``args`` and ``named`` as it takes them; ``inputs`` are the tensors among ``args``, in order."""

    args: tuple[Any, ...]
    named: dict[str, Any]

    @property
    def inputs(self) -> list[torch.Tensor]:
        """The tensors."""
        return [value for value in self.args if isinstance(value, torch.Tensor)]

    @property
    def numbers(self) -> list[int | float]:
        """What is passed on to parameters that are no sizes."""
        return [value for value in self.args if isinstance(value, (int, float)) and not isinstance(value, bool)]

    def replace(self, inputs: Sequence[torch.Tensor]) -> Operands:
        """The same call on other tensors."""
        others = iter(inputs)
        return Operands(tuple(next(others) if isinstance(value, torch.Tensor) else value for value in self.args), self.named)


@dataclass(frozen=True, slots=True)
class Launch:
    """The arguments of a kernel in their order, and its geometry. A grid with a zero launches nothing."""

    arguments: tuple[torch.Tensor | int | float, ...]
    grid: Dims
    block: Dims


@dataclass(frozen=True)
class Match:
    """A kernel, or another function, beside the function that it is held against.

    ``names`` are the sizes that the operands leave open. ``subject`` is called where there is no ``kernel``.
    """

    request: Request
    subject: Callable[..., Any]
    function: Callable[..., Any]
    operands: tuple[str, ...]
    names: tuple[str, ...]

    @property
    def kernel(self) -> RawKernel | None:
        """The kernel; None for what is a function."""
        return self.subject if isinstance(self.subject, RawKernel) else None

    def make(self, sizes: Mapping[str, int]) -> Operands:
        """The operands at these sizes, on ``meta``."""
        args, named = make_arguments(self.operands, sizes=sizes, device="meta")
        return Operands(tuple(args), named)

    def shapes(self, operands: Operands) -> list[torch.Tensor]:
        """What the function returns for them, on ``meta``. Raises ``LayoutError`` with what it raises itself."""
        plain = self.function.__wrapped__ if isinstance(self.function, FusedFunction) else self.function
        try:
            found = tensors_of(plain(*operands.args, **operands.named))
        except WideloadError:
            raise
        except Exception as error:  # whatever a user's function raises
            said = (str(error) or type(error).__name__).splitlines()[0]
            raise LayoutError(f"{self.request.against} does not take {' '.join(self.operands)}: {said}") from error
        if not found:
            raise LayoutError(f"{self.request.against} returns no tensor for {' '.join(self.operands)}, and nothing is there to compare")
        return found

    def compute(self, operands: Operands) -> list[torch.Tensor]:
        """What the function returns: torch's own operators, of a fused function."""
        plain = self.function.reference if isinstance(self.function, FusedFunction) else self.function
        return tensors_of(plain(*operands.args, **operands.named))

    def launch(self, sizes: Mapping[str, int], operands: Operands, results: Sequence[torch.Tensor]) -> Launch:
        """Bind the kernel's parameters. Raises ``LayoutError``, which names the parameter and what would be understood."""
        assert self.kernel is not None
        parameters = self.kernel.parameters
        pointers = iter(self._pointers(parameters, operands.inputs, results))
        numbers = iter(operands.numbers)
        given = dict(self.request.let)
        arguments = tuple(
            next(pointers) if p.is_pointer else self._number(p, given.get(p.name), sizes, results, numbers) for p in parameters
        )
        left = sum(1 for _ in numbers)
        if left:
            raise LayoutError(f"{self.kernel.__name__} takes {left} numbers fewer than the operands have: {' '.join(self.operands)}")
        return Launch(arguments, self._grid(sizes, results), self.request.block)

    def _pointers(
        self, parameters: Sequence[Parameter], inputs: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        assert self.kernel is not None
        pointers = [p for p in parameters if p.is_pointer]
        for what, found, values in (
            ("to const, which are inputs", [p for p in pointers if p.is_const], inputs),
            ("that are written, which are results", [p for p in pointers if not p.is_const], results),
        ):
            if len(found) != len(values):
                names = f" ({', '.join(p.name for p in found)})" if found else ""
                raise LayoutError(
                    f"{self.kernel.__name__} has {len(found)} pointers {what}{names}; {self.request.against} has {len(values)} of "
                    f"{' '.join(self.operands)}. Declare inputs as const T*, and give the operands in the order of the pointers."
                )
        read, written = iter(inputs), iter(results)
        return [next(read) if p.is_const else next(written) for p in pointers]

    def _number(
        self, parameter: Parameter, text: str | None, sizes: Mapping[str, int], results: Sequence[torch.Tensor], numbers: Any
    ) -> int | float:
        name = parameter.name
        known: dict[str, int] = self._sizes(sizes, results)
        if text is not None:
            value = make_arguments([text], sizes={k: v for k, v in known.items() if re.search(rf"\b{k}\b", text)})[0][0]
            if not isinstance(value, (int, float)):
                raise LayoutError(f"--let {name}={text} is no number")
            return value
        if name in known:
            return known[name]
        number: int | float | None = next(numbers, None)
        if number is None:
            raise LayoutError(
                f"parameter {name} ({parameter.ctype}) means nothing here: it is no size of the operands ({', '.join(self.names)}), "
                f"no name for the number of elements ({', '.join(sorted(_ELEMENTS, key=str.lower))}), and no number is left among the "
                f"operands. Say it: --let {name}=n"
            )
        return number

    def _sizes(self, sizes: Mapping[str, int], results: Sequence[torch.Tensor]) -> dict[str, int]:
        shape = tuple(results[0].shape) if results else ()
        elements = math.prod(shape)
        columns = shape[-1] if shape else 1
        return {
            **dict.fromkeys(_ELEMENTS, elements),
            **dict.fromkeys(_ROWS, math.prod(shape[:-1])),
            **dict.fromkeys(_COLUMNS, columns),
            **sizes,
        }

    def _grid(self, sizes: Mapping[str, int], results: Sequence[torch.Tensor]) -> Dims:
        items, block = self.request.items, math.prod(self.request.block)
        known = {**self._sizes(sizes, results), "items": items, "block": block}
        return evaluate_sizes(self.request.grid, known) if self.request.grid else (-(-results[0].numel() // (items * block)),)

    def refusal(self, sizes: Mapping[str, int]) -> str:
        """Why no GPU launches the kernel's grid at these sizes; empty where it does, and for what is no kernel."""
        if self.kernel is None:
            return ""
        try:
            check_grid(self.kernel.__name__, self._grid(sizes, self.shapes(self.make(sizes))))
        except RangeError as error:
            return str(error)
        return ""


def match(request: Request) -> Match:
    """Find the subject and the function, and read the operands. Raises ``WideloadError`` for what is not there or means nothing."""
    subject, function = _find_subject(request), find_function(request.against)
    operands = request.operands or _made_up(subject, request)
    inside = " ".join(found for operand in operands for found in _SHAPE.findall(operand))
    names = tuple(dict.fromkeys(_NAME.findall(inside)))
    if not 1 <= len(names) <= _MOST_NAMES:
        raise WideloadError(
            f"the operands {' '.join(operands)} leave {len(names)} sizes open ({', '.join(names) or 'none'}); allowed: one or two, "
            "such as f32[n] or bf16[rows, cols]"
        )
    return Match(request, subject, function, operands, names)


_MOST_NAMES = 2
_DYNAMIC_SHARED = re.compile(r"\bextern\b[^;{}]*?\b__shared__\b")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)


def _find_subject(request: Request) -> Callable[..., Any]:
    """The subject; a kernel with the shared memory that was said, and a block that can be launched."""
    subject = find_function(request.subject)
    if not isinstance(subject, RawKernel):
        return subject
    check_block(subject.__name__, request.block)
    if request.shared:
        known = {"block": math.prod(request.block), "items": request.items}
        return raw(subject.source, subject.__name__, shared_bytes=evaluate_size(request.shared, known))
    if _DYNAMIC_SHARED.search(_COMMENT.sub("", subject.source)):
        raise WideloadError(
            f"{request.subject} uses extern __shared__, which holds as many bytes as the launch says. Say them: --shared '4 * block'; "
            "--shared 0 if this kernel uses none"
        )
    return subject


def _made_up(subject: Callable[..., Any], request: Request) -> tuple[str, ...]:
    """An operand for every pointer to const: a vector, or a matrix where the kernel takes rows and columns."""
    example = f"the operands of {request.against}, such as 'f32[n]' 'f32[n]', behind the options"
    if not isinstance(subject, RawKernel):
        raise WideloadError(f"{request.subject} is no CUDA kernel, and says not what it takes: give {example}")
    names = {p.name for p in subject.parameters if not p.is_pointer}
    rows, columns = (next((name for name in sorted(names) if name in known), None) for known in (_ROWS, _COLUMNS))
    shape = f"{rows}, {columns}" if rows and columns else "n"
    found = []
    for p in (p for p in subject.parameters if p.is_pointer and p.is_const):
        if not p.dtypes or len({dtype.itemsize for dtype in p.dtypes}) == 1 < len(p.dtypes):
            raise WideloadError(f"argument {p.name} ({p.ctype}*) may be of several dtypes: give {example}")
        found.append(f"{dtype_name(p.dtypes[0])}[{shape}]")
    return tuple(found)
