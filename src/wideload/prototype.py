"""Turns the text of a CUDA kernel into its parameters: their names, and which tensors and numbers each takes.

Reads declarations only; it must not know what the kernel does with them, nor how it is launched.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wideload.errors import CompileError, DtypeError, LayoutError, RangeError

__all__ = ["Parameter", "find_kernels", "parse_parameters"]

_FLOATS: dict[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "__half": torch.float16,
    "__nv_bfloat16": torch.bfloat16,
    "nv_bfloat16": torch.bfloat16,
    "__nv_fp8_e4m3": torch.float8_e4m3fn,
    "__nv_fp8_e5m2": torch.float8_e5m2,
    "bool": torch.bool,
}
_SIGNED: dict[str, torch.dtype] = {
    "char": torch.int8,
    "short": torch.int16,
    "int": torch.int32,
    "long long": torch.int64,
}
_SCALARS: dict[str, type[np.generic]] = {
    "float": np.float32,
    "double": np.float64,
    "bool": np.bool_,
    "char": np.int8,
    "short": np.int16,
    "int": np.int32,
    "long long": np.int64,
    "unsigned char": np.uint8,
    "unsigned short": np.uint16,
    "unsigned int": np.uint32,
    "unsigned long long": np.uint64,
}
_ALIASES = {
    "size_t": "unsigned long long",
    "ptrdiff_t": "long long",
    **{f"int{bits}_t": name for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))},
    **{f"uint{bits}_t": f"unsigned {name}" for bits, name in ((8, "char"), (16, "short"), (32, "int"), (64, "long long"))},
    "half2": "half x2",
    "__half2": "half x2",
    "__nv_bfloat162": "__nv_bfloat16 x2",
    "nv_bfloat162": "__nv_bfloat16 x2",
}
_VECTOR = re.compile(r"(u?)(char|short|int|long|longlong|float|double)([1234])")
"""CUDA's vector types: ``float4``, ``uint2``, ``ulonglong2``."""
_MAX_ALIGNMENT = 16
_COMPLEX = {("float", 2): torch.complex64, ("double", 2): torch.complex128}
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_KERNEL = re.compile(r"__global__\b[^;{}]*?\b(?!__launch_bounds__)(\w+)\s*\((?!\s*\d)")
_QUALIFIERS = re.compile(r"\b(?:const|volatile|__restrict__|__restrict|restrict|__grid_constant__|std::|struct)(?:\s|\b)")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a kernel.

    A pointer takes a tensor of one of ``dtypes`` (of any where there are none), whose address is a multiple of ``alignment`` bytes;
    anything else a number, passed as ``scalar``. A pointer to what is not ``const`` is written.
    """

    name: str
    ctype: str
    is_pointer: bool
    is_const: bool
    dtypes: tuple[torch.dtype, ...] = ()
    alignment: int = 1
    scalar: type[np.generic] | None = None

    def check_tensor(self, value: Any) -> torch.Tensor:
        """Return ``value``; ``DtypeError`` for what is no tensor of ``dtypes``, ``LayoutError`` for an address that is not aligned."""
        if not isinstance(value, torch.Tensor):
            raise DtypeError(f"argument {self.name} ({self.ctype}*) is a {type(value).__name__}; allowed: a tensor{self._of_dtypes()}")
        if value.layout != torch.strided:
            raise LayoutError(f"argument {self.name} has layout {value.layout}; allowed: strided tensors")
        if self.dtypes and value.dtype not in self.dtypes:
            raise DtypeError(f"argument {self.name} ({self.ctype}*) is {value.dtype}; allowed:{self._of_dtypes()}. Convert it with .to().")
        for is_lazy, what in ((value.is_conj(), "conj"), (value.is_neg(), "neg")):
            if is_lazy:
                raise LayoutError(
                    f"argument {self.name} is a {what} view: its memory does not hold its values; allowed: tensors whose memory does. "
                    f"Call .resolve_{what}()."
                )
        start = value.storage_offset() * value.element_size() if value.device.type == "meta" else value.data_ptr()
        if value.numel() and start % self.alignment:
            raise LayoutError(
                f"argument {self.name} ({self.ctype}*) starts {start % self.alignment} bytes behind a multiple of {self.alignment}, which "
                "the kernel's type demands. Pass a tensor that starts there, such as its .clone(), or read single elements."
            )
        return value

    def check_number(self, value: Any) -> np.generic:
        """Return ``value`` as the kernel takes it; ``DtypeError`` for what is no such number, ``RangeError`` for one that does not fit."""
        assert self.scalar is not None
        is_integer = issubclass(self.scalar, np.integer)
        allowed = (int, np.integer) if is_integer else (bool, np.bool_) if self.scalar is np.bool_ else (int, float, np.number)
        if not isinstance(value, allowed) or (self.scalar is not np.bool_ and isinstance(value, bool)):
            raise DtypeError(f"argument {self.name} ({self.ctype}) is a {type(value).__name__}; allowed: {self._number()}")
        if is_integer:
            limits = np.iinfo(np.dtype(self.scalar))
            if not limits.min <= value <= limits.max:
                raise RangeError(f"argument {self.name} ({self.ctype}) is {value}; allowed: {limits.min} to {limits.max}")
        try:
            with np.errstate(over="ignore"):
                number = self.scalar(value)
        except OverflowError:  # an int that no float holds
            number = self.scalar(math.inf)
        if np.isinf(number) and value not in (math.inf, -math.inf):
            raise RangeError(f"argument {self.name} ({self.ctype}) is {value}; allowed: what a {self.ctype} holds, and infinities")
        return number

    def _number(self) -> str:
        return (
            "a bool" if self.scalar is np.bool_ else "an int" if issubclass(self.scalar or np.generic, np.integer) else "a float or an int"
        )

    def _of_dtypes(self) -> str:
        return f" of {', '.join(str(dtype).removeprefix('torch.') for dtype in self.dtypes)}" if self.dtypes else ""


def parse_parameters(source: str, kernel: str) -> tuple[Parameter, ...]:
    """Read the parameters of ``__global__ void kernel(...)`` in CUDA C++.

    Pointers to unsigned integers, to ``void`` and to types that are not CUDA's own take any bits: tensors of every dtype of that size,
    or of every dtype. Raises ``CompileError`` where there is no such kernel, or where it takes a struct by value.

    >>> x, n = parse_parameters('extern "C" __global__ void f(const float4* __restrict__ x, int n) {}', "f")
    >>> x.name, x.dtypes, x.alignment, x.is_const, n.scalar.__name__
    ('x', (torch.float32,), 16, True, 'int32')
    """
    text = _COMMENT.sub(" ", source)
    declarations = [_listed(text, opened.end()) for opened in re.finditer(rf"__global__\b[^;{{}}]*?\b{re.escape(kernel)}\s*\(", text)]
    if not declarations:
        kernels = find_kernels(source)
        there = f"its kernels are {', '.join(kernels)}" if kernels else "it has none"
        raise CompileError(f"the source has no __global__ function {kernel!r}; {there}")
    # Names stand in the definition; where a macro hides its brace, in the last declaration.
    declared = next((listed for listed, is_defined in declarations if is_defined), declarations[-1][0])
    return tuple(_parameter(part.strip(), kernel) for part in declared.split(",")) if declared not in ("", "void") else ()


def find_kernels(source: str) -> tuple[str, ...]:
    """The names of the kernels of ``source``, in their order.

    >>> find_kernels("__global__ void f(int n); __global__ void __launch_bounds__(256) g() {}")
    ('f', 'g')
    """
    return tuple(dict.fromkeys(_KERNEL.findall(_COMMENT.sub(" ", source))))


def _listed(text: str, start: int) -> tuple[str, bool]:
    """What stands between the parenthesis before ``start`` and the one that closes it, and whether a brace comes next."""
    depth, end = 1, start
    while depth and end < len(text):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        end += 1
    return text[start : end - 1].strip(), text[end:].lstrip().startswith("{")


def _parameter(text: str, kernel: str) -> Parameter:
    if "=" in text:
        raise CompileError(
            f"kernel {kernel} has a parameter with a default: {text!r}; allowed: none, since every argument is given. Leave it out."
        )
    found = re.fullmatch(r"(.*?)\b(\w+)\s*(\[\s*\d*\s*\])?", text, re.DOTALL)
    if found is None or not found[1].strip():
        raise CompileError(f"kernel {kernel} has a parameter without a name: {text!r}")
    declared, name, is_array = found.groups()
    is_pointer = "*" in declared or bool(is_array)
    ctype = _spelling(declared.replace("*", " "))
    if not is_pointer:
        scalar = _SCALARS.get(ctype)
        if scalar is None:
            raise CompileError(f"kernel {kernel} takes {name} by value, a {ctype}; allowed: pointers and {', '.join(_SCALARS)}")
        return Parameter(name, ctype, False, True, scalar=scalar)
    if declared.count("*") > 1:
        return Parameter(name, f"{ctype}*", True, True, alignment=8)
    before_star = declared.partition("*")[0]
    base, lanes = _base(ctype)
    dtypes = _dtypes(base, lanes)
    itemsize = _itemsize(base)
    alignment = min(itemsize * lanes, _MAX_ALIGNMENT) if lanes != 3 else itemsize
    return Parameter(name, ctype, True, bool(re.search(r"\bconst\b", before_star)), dtypes, alignment)


def _spelling(declared: str) -> str:
    """One spelling for each type: ``unsigned long long`` for ``size_t``, ``int`` for ``signed``."""
    words = _QUALIFIERS.sub(" ", declared).split()
    integer_words = {"unsigned", "signed", "char", "short", "int", "long"}
    if not words or not set(words) <= integer_words:
        joined = " ".join(words)
        return _ALIASES.get(joined, joined)
    size = "char" if "char" in words else "short" if "short" in words else "long long" if "long" in words else "int"
    return f"unsigned {size}" if "unsigned" in words else size


def _base(ctype: str) -> tuple[str, int]:
    """The type of one component, and how many there are."""
    vector = _VECTOR.fullmatch(ctype)
    if vector:
        name = {"long": "long long", "longlong": "long long"}.get(vector[2], vector[2])
        return f"{'unsigned ' * bool(vector[1])}{name}", int(vector[3])
    name, _, lanes = ctype.partition(" x")
    return name, int(lanes or 1)


def _itemsize(base: str) -> int:
    if base in _FLOATS:
        return _FLOATS[base].itemsize
    signed = _SIGNED.get(base.removeprefix("unsigned "))
    return signed.itemsize if signed else 1


def _dtypes(base: str, lanes: int) -> tuple[torch.dtype, ...]:
    if base in _FLOATS:
        also = _COMPLEX.get((base, lanes))
        return (_FLOATS[base], also) if also else (_FLOATS[base],)
    if base in _SIGNED:
        return (_SIGNED[base],)
    if base.startswith("unsigned ") and lanes == 1:
        size = _SIGNED[base.removeprefix("unsigned ")].itemsize
        return tuple(dtype for dtype in _BITS if dtype.itemsize == size)
    return ()


_BITS = (
    *(
        torch.uint8,
        torch.int8,
        torch.bool,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ),
    *(torch.uint16, torch.int16, torch.float16, torch.bfloat16, torch.uint32, torch.int32, torch.float32),
    *(torch.uint64, torch.int64, torch.float64, torch.complex64),
)
"""What an unsigned integer of the same size holds the bits of."""
