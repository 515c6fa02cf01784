"""Turns plans into a folder of cubins for machines without NVRTC, and calls into the text that would build them.

Knows plans, arguments and the folder's manifest; must not know how a call is bound, traced or run.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wideload.cache import compile_cubins
from wideload.dtypes import dtype_name
from wideload.manifest import ListedKernel, Recipe, kernel_key, write_built
from wideload.nvrtc import nvrtc_identity
from wideload.plan import ACCESS_BYTES
from wideload.structure import map_structure

if TYPE_CHECKING:
    from wideload.fused import FusedFunction
    from wideload.planned import Plan

__all__ = ["Build", "argument_names", "build_plans", "spell_call", "spell_tensor"]


@dataclass(frozen=True, slots=True)
class Build:
    """What was built into ``folder``: each kernel once, however many of the signatures it serves."""

    folder: Path
    kernels: tuple[ListedKernel, ...]

    @property
    def nbytes(self) -> int:
        """Of all cubins."""
        return sum(kernel.nbytes for kernel in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """For machines: the folder, and what its manifest says of these kernels."""
        return {"folder": str(self.folder), "nbytes": self.nbytes, "kernels": [asdict(kernel) for kernel in self.kernels]}

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """A table: kernel, architecture, bytes, registers a thread, bytes spilled; the names of the columns first."""
        figures = ((k.name, k.arch, f"{k.nbytes:,}", str(k.registers), str(k.spill_store_bytes + k.spill_load_bytes)) for k in self.kernels)
        return ("kernel", "arch", "bytes", "registers", "spilled"), *figures

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) if at < 2 else cell.rjust(width) for at, (cell, width) in enumerate(zip(row, widths, strict=True)))
            for row in self.rows
        ]
        return "\n".join([f"{self.folder}: {len(self.kernels)} kernels, {self.nbytes / 1e3:.1f} kB", *lines])


def build_plans(plans: Sequence[Plan], folder: Path, advance: Callable[[int, int], object] = lambda done, total: None) -> Build:
    """Compile the kernels of all plans side by side and add them to ``folder``; ``advance`` is told how many are done, of how many.

    Raises ``CompileError`` where NVRTC refuses one or is missing, and where the folder cannot be written; readers then find in it what
    they found before.
    """
    nvrtc = nvrtc_identity()
    wanted: dict[str, tuple[tuple[str, str, str], dict[Recipe, None]]] = {}
    for plan in plans:
        for kernel in plan.kernels:
            key = kernel_key(kernel.source, arch=kernel.arch, name=kernel.name)
            _, recipes = wanted.setdefault(key, ((kernel.source, kernel.arch, kernel.name), {}))
            if plan.recipe is not None:
                recipes[plan.recipe] = None
    done: list[None] = []  # appended to by several threads, each of which then sees at least its own

    def count() -> None:
        done.append(None)
        advance(len(done), len(wanted))

    cubins = compile_cubins([kernel for kernel, _ in wanted.values()], count)
    kernels = {key: (cubin, tuple(recipes)) for (key, (_, recipes)), cubin in zip(wanted.items(), cubins, strict=True)}
    return Build(folder, tuple(write_built(folder, kernels, nvrtc).values()))


# ---- spelling calls: what `wideload.spelling` reads


def spell_call(f: FusedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any = None, *, backward: bool = False) -> Recipe:
    """Return the recipe of ``f(*args, **kwargs, out=out)``; with ``backward``, of its gradients too: those that want one, or all."""
    place = _find_place(f)
    named = argument_names(f, args, kwargs)
    in_place = next((name for name, value in named.items() if isinstance(out, torch.Tensor) and value is out), None)
    operands = [_spell(value) for value in args] + [f"{name}={_spell(value)}" for name, value in kwargs.items()]
    if out is not None and in_place is None:
        operands.append(f"out={_spell(out)}")
    tensors = {name: value for name, value in named.items() if isinstance(value, torch.Tensor)}
    floats = [name for name, value in tensors.items() if value.is_floating_point() or value.is_complex()]
    wanted = tuple(name for name in floats if backward and tensors[name].requires_grad)
    can_type = (
        place is not None
        and all(map(_can_type, (*args, *kwargs.values(), out)))
        and not _share_memory([*named.values(), *([out] if in_place is None else [])])
        and len({tensor.device.type for tensor in tensors.values()}) == 1  # a 0-dim CPU tensor beside others comes by value
    )
    function = place if can_type and place else f.__name__
    return Recipe(function, tuple(operands), can_type, in_place, backward, () if len(wanted) == len(floats) else wanted)


def argument_names(f: FusedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments by the names of their parameters; ``x0``, ``x1`` where a builtin has no names, or more are given.

    >>> from wideload import ops
    >>> argument_names(ops.add, (1,), {"y": 2})
    {'x': 1, 'y': 2}
    """
    try:
        parameters = [*inspect.signature(f.__wrapped__).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return {names[at] if at < len(names) else f"x{at}": value for at, value in enumerate(args)} | dict(kwargs)


def spell_tensor(tensor: torch.Tensor) -> str:
    """Return the operand that has the layout and the alignment of ``tensor``.

    >>> spell_tensor(torch.empty(8, 64)), spell_tensor(torch.empty(64, 8).t())
    ('f32[8, 64]', 'f32[64, 8].t()')
    >>> spell_tensor(torch.empty(8, 64)[:, 1:])
    '(f32[511]@1).as_strided((8, 63), (64, 1))'
    """
    shape, itemsize = tuple(tensor.shape), tensor.element_size()
    ahead = tensor.data_ptr() % ACCESS_BYTES // itemsize
    name, at = dtype_name(tensor.dtype), f"@{ahead}" if ahead else ""

    if tensor.is_contiguous():
        return f"{name}[{', '.join(map(str, shape))}]{at}"
    if tensor.ndim == 2 and tensor.t().is_contiguous():
        stored, view = ", ".join(map(str, shape[::-1])), ".t()"
    else:
        last = sum((size - 1) * stride for size, stride in zip(shape, tensor.stride(), strict=True))
        stored, view = str(last + 1 if tensor.numel() else 0), f".as_strided({shape}, {tensor.stride()})"
    return f"({name}[{stored}]{at}){view}" if at else f"{name}[{stored}]{view}"


_WORDS = {None: "none", True: "true", False: "false"}


def _spell(value: Any) -> str:
    match value:
        case torch.Tensor():
            return spell_tensor(value)
        case None | bool():
            return _WORDS[value]
        case torch.dtype():
            return dtype_name(value)
        case list():
            return f"[{', '.join(map(_spell, value))}]"
        case dict():  # no operand, but not to be printed with the values of its tensors either
            return f"{{{', '.join(f'{key!r}: {_spell(item)}' for key, item in value.items())}}}"
        case tuple():
            return f"({', '.join(map(_spell, value))}{',' * (len(value) == 1)})"
    return repr(value)


def _can_type(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isnan(value)  # a word, of which one must not make a string
    if isinstance(value, list | tuple):
        return type(value) in (list, tuple) and all(map(_can_type, value))
    return value is None or isinstance(value, torch.Tensor | torch.dtype) or type(value) in (bool, int, complex, str)


def _share_memory(values: Sequence[Any]) -> bool:
    """Whether two of the tensors in ``values`` are views of one storage, or the same: each operand has one of its own."""
    storages: list[int] = []
    map_structure(lambda leaf: storages.append(leaf.untyped_storage()._cdata) if isinstance(leaf, torch.Tensor) else None, list(values))
    return len(set(storages)) < len(storages)


def _find_place(f: FusedFunction) -> str | None:
    """How a command names ``f``: ``module:name``, or the bare name of an op; None where it stands in no module."""
    module = sys.modules.get(f.__module__, torch)  # torch's builtins name none
    same = (f, f.__wrapped__) if f.is_default else (f,)
    name = next((name for name, value in vars(module).items() if any(value is one for one in same)), None)
    if name is None or module.__name__ == "wideload.ops":
        return name
    if module.__name__ == "__main__" or module.__name__.startswith("file_"):  # a file that was run, by Python or by a command
        return f"{module.__file__}:{name}" if getattr(module, "__file__", None) else None
    return f"{module.__name__}:{name}"
