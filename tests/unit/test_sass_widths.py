"""The machine code of contiguous kernels: every global access of the main path is as wide as it can be, and nothing spills.

Kernels are compiled many to a module and disassembled together: nvdisasm takes a second a call. The source lines of an access
tell its kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload.emit.kernel import emit_kernel
from wideload.emit.prelude import select_prelude
from wideload.foreach import find_listed
from wideload.lists import split_lists
from wideload.nvrtc import compile_cubin
from wideload.plan import ACCESS_BYTES
from wideload.planned import PlannedKernel
from wideload.sass import Access, main_path

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i64, boolean = torch.int8, torch.int64, torch.bool
c64, c128, e4m3, e5m2, u16 = torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16

ARCHS = ("sm_80", "sm_90", "sm_100")
Widths = Counter[tuple[str, int]]
"""How many (load or store, bits)."""


def contiguous(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1 << 16, dtype=dtype, device="meta")


def plan(name: str, function: Callable[..., Any], *args: Any, out: Any = None, **options: Any) -> PlannedKernel:
    (kernel,) = wl.fuse(function, name=name, **options).plan(*args, out=out, target="sm_90").kernels
    return kernel


# ---- sums over rows


@pytest.mark.parametrize("arch", ARCHS)
def test_what_a_thread_reads_of_its_rows_is_in_flight_before_it_stores(arch: str) -> None:
    """The row that repeats, four rows of two operands before any store; a partial sum, which the L2 keeps. Four rows of these."""
    x, bias = (torch.empty(shape, dtype=bf16, device="meta") for shape in ((8192, 11008), (11008,)))
    for approximate in ("tanh", "none"):
        f = wl.fuse(lambda x, bias, approximate: F.gelu(x + bias, approximate=approximate), name="f")
        plan = f.plan_backward(x, bias, approximate, target=arch)
        accesses = re.findall(r"\b(?:LDG|STG)\.\S+", plan.sass)
        assert accesses == [*["LDG.E.128"] * 9, *["STG.E.128"] * 4, "STG.E", *["LDG.E.128"] * 4, "STG.E.U16"]
        policies = re.findall(r"\bSTG\.\S+ (?:desc\[(\w+)\])?", plan.sass)
        assert policies[4] not in {*policies[:4], ""}
        assert plan.spill_bytes <= (8 if arch == "sm_80" else 0)  # by tanh, one register of another's eight loads
        assert plan.registers <= 64


# ---- the check


@dataclass(frozen=True)
class Module:
    """Kernels compiled together: where the text of each lies, the accesses of their main paths, and what ptxas said."""

    lines: dict[str, range]
    accesses: tuple[Access, ...]
    log: str


def compile_module(codes: dict[str, str], arch: str) -> Module:
    """``codes`` are kernels' texts below the prelude, by name."""
    source = select_prelude("\n".join(codes.values()))
    lines = {}
    for name, code in codes.items():
        start = source.count("\n") + 1
        source += f"\n{code}"
        lines[name] = range(start + 1, source.count("\n") + 2)
    cubin = compile_cubin(source, arch=arch, name=next(iter(codes)))
    return Module(lines, main_path(cubin.code, source), cubin.log)


def code_of(kernel: PlannedKernel) -> str:
    return kernel.source[kernel.source.index(f"DEVICE void {kernel.plan.program.name}_element(") :]


def expected_widths(kernel: PlannedKernel) -> Widths:
    """Of each operand: the widest uses a whole access, two where all results are narrower, the others as many elements."""
    program = kernel.plan.program
    operands = [("load", parameter.type) for parameter in program.parameters] + [("store", result.type) for result in program.results]
    widest = max(operand.itemsize for _, operand in operands)
    elements = (1 if any(result.type.itemsize == widest for result in program.results) else 2) * ACCESS_BYTES // widest
    found: Widths = Counter()
    for kind, operand in operands:
        nbytes = operand.itemsize * elements
        found[kind, 8 * min(nbytes, ACCESS_BYTES)] += max(nbytes // ACCESS_BYTES, 1)
    return found


def require_wide(module: Module, name: str, expected: Widths) -> None:
    """Raise unless the accesses of the kernel's main path are the expected ones, in global memory, and it has no local memory at all.

    Without a stack frame there is no local memory, so no LDL and no STL.
    """
    mine = [access for access in module.accesses if not set(module.lines[name]).isdisjoint(access.lines)]
    found = Counter((access.kind, access.width_bits) for access in mine if access.space == "global")
    if found != expected:
        raise AssertionError(f"the main path of {name} has {dict(sorted(found.items()))}, expected {dict(sorted(expected.items()))}")
    (figures,) = re.findall(rf"Function properties for {name}\n\D*(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", module.log)
    if len(mine) != found.total() or any(map(int, figures)):
        raise AssertionError(f"{name} uses local memory: stack, spill stores, spill loads: {figures}")


# ---- what is wide

FLOATING: dict[int, Callable[..., Any]] = {
    1: lambda x: F.silu(x),
    2: lambda x, b: x + b,
    3: lambda x, b, y: F.silu(x + b) * y,
    4: lambda x, b, y, z: torch.where(x > b, y, z) * 2 + b,
}
WHOLE: dict[int, Callable[..., Any]] = {
    1: lambda x: -x,
    2: lambda x, b: x + b,
    3: lambda x, b, y: torch.maximum(x, b) * y,
    4: lambda x, b, y, z: torch.where(x > b, y, z) * 2 + b,
}
ALIKE = {
    f"{str(dtype)[6:]}_of_{num_inputs}": ((FLOATING if dtype.is_floating_point else WHOLE)[num_inputs], [dtype] * num_inputs)
    for dtype in (bf16, f16, f32, i8)
    for num_inputs in (1, 2, 3, 4)
}
MIXED: dict[str, tuple[Callable[..., Any], list[torch.dtype], dict[tuple[str, int], int]]] = {
    "bf16_plus_f32": (lambda x, y: x + y, [bf16, f32], {("load", 64): 1, ("load", 128): 1, ("store", 128): 1}),
    "bf16_to_f32": (lambda x: x.float(), [bf16], {("load", 64): 1, ("store", 128): 1}),
    "f32_to_bf16": (lambda x: x.bfloat16(), [f32], {("load", 128): 2, ("store", 128): 1}),
    "f32_to_int8": (lambda x: x.clamp(-128, 127).to(i8), [f32], {("load", 128): 2, ("store", 64): 1}),
    "int8_to_f16": (lambda x: x.half() * 0.5, [i8], {("load", 64): 1, ("store", 128): 1}),
    "mask": (lambda m, x, y: torch.where(m, x, y), [boolean, f32, f32], {("load", 32): 1, ("load", 128): 2, ("store", 128): 1}),
    "bool_result": (lambda x: x > 0, [bf16], {("load", 128): 2, ("store", 128): 1}),
    "f64_and_int8": (lambda x, y: x * y, [f64, i8], {("load", 128): 1, ("load", 16): 1, ("store", 128): 1}),
    "two_results": (lambda x, y: (x * y, (x - y).half()), [f32, f32], {("load", 128): 2, ("store", 128): 1, ("store", 64): 1}),
    "complex64": (lambda x, y: x * y.conj() + 1j, [c64, c64], {("load", 128): 2, ("store", 128): 1}),
    "complex64_quotient": (lambda x, y: x / y, [c64, c64], {("load", 128): 2, ("store", 128): 1}),
    "complex64_to_parts": (lambda z: (z.real + 1, z.imag + 1, z.abs()), [c64], {("load", 128): 2, ("store", 128): 3}),
    "complex128": (lambda x, y: x * y, [c128, c128], {("load", 128): 2, ("store", 128): 1}),
    "complex64_by_f32": (lambda z, x: z * x, [c64, f32], {("load", 128): 1, ("load", 64): 1, ("store", 128): 1}),
    "complex32": (lambda x, y: x * y, [torch.complex32] * 2, {("load", 128): 2, ("store", 128): 1}),
    "f32_to_e4m3": (lambda x: x.to(e4m3), [f32], {("load", 128): 2, ("store", 64): 1}),
    "bf16_to_e5m2": (lambda x: (x * 0.5).to(e5m2), [bf16], {("load", 128): 2, ("store", 128): 1}),
    "e4m3_to_bf16": (lambda x: x.bfloat16(), [e4m3], {("load", 64): 1, ("store", 128): 1}),
    "e5m2_to_f32": (lambda x: x.float() * 2, [e5m2], {("load", 32): 1, ("store", 128): 1}),
    "e4m3_to_e4m3": (lambda x: (x.float() * 2).to(e4m3), [e4m3], {("load", 128): 1, ("store", 128): 1}),
    "uint16": (lambda x, y: x * y, [u16, u16], {("load", 128): 2, ("store", 128): 1}),
    "int64_to_bf16": (lambda n: n.bfloat16(), [i64], {("load", 128): 2, ("store", 64): 1}),
}
ACTIVATIONS: dict[str, Callable[..., Any]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "exp": torch.exp,
    "mish": F.mish,
}
WEIGHT, GRAD = torch.zeros(4096), torch.zeros(4096)


@cache
def wide_kernels() -> dict[str, PlannedKernel]:
    kernels = {name: plan(name, function, *map(contiguous, dtypes)) for name, (function, dtypes) in ALIKE.items()}
    kernels |= {name: plan(name, function, *map(contiguous, dtypes)) for name, (function, dtypes, _) in MIXED.items()}
    for name, function in ACTIVATIONS.items():
        kernels |= {f"{name}_{str(dtype)[6:]}": plan(f"{name}_{str(dtype)[6:]}", function, contiguous(dtype)) for dtype in (bf16, f32)}
    bias_silu_mul = wl.ops.bias_silu_mul.__wrapped__
    kernels["eager"] = plan("eager", bias_silu_mul, *[contiguous(bf16)] * 3, numerics="eager")
    kernels["in_place"] = plan("in_place", lambda w, g, lr: w * (1 - lr) - lr * g, WEIGHT, GRAD, 0.1, out=WEIGHT)
    return kernels


@cache
def wide_module(arch: str) -> Module:
    return compile_module({kernel.name: code_of(kernel) for kernel in wide_kernels().values()}, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ALIKE)
def test_operands_of_one_dtype_move_in_16_bytes(name: str, arch: str) -> None:
    require_wide(wide_module(arch), f"{name}_dense", Counter({("load", 128): len(ALIKE[name][1]), ("store", 128): 1}))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", MIXED)
def test_narrower_operands_take_their_share_of_the_vector(name: str, arch: str) -> None:
    require_wide(wide_module(arch), f"{name}_dense", Counter(MIXED[name][2]))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_other_kernel_is_wide(arch: str) -> None:
    for kernel in wide_kernels().values():
        require_wide(wide_module(arch), kernel.name, expected_widths(kernel))


# ---- rows

ROWS: dict[str, tuple[Callable[[], PlannedKernel], dict[tuple[str, int], int]]] = {
    "bias": (
        lambda: plan("bias", lambda x, b: x + b, meta(64, 2048), meta(2048)),
        {("load", 128): 2, ("store", 128): 1},
    ),
    "column": (
        lambda: plan("column", lambda x, b: x + b, meta(64, 2048), meta(64, 1)),
        {("load", 128): 1, ("load", 16): 1, ("store", 128): 1},
    ),
    "halves_of_rows": (
        lambda: plan("halves_of_rows", lambda x: (lambda gate, up: F.silu(gate) * up)(*x.chunk(2, -1)), meta(64, 4096)),
        {("load", 128): 2, ("store", 128): 1},
    ),
    "narrow_rows": (
        lambda: plan("narrow_rows", lambda x, b: x.float() + b, meta(64, 2048), torch.empty(2048, device="meta")),
        {("load", 64): 1, ("load", 128): 1, ("store", 128): 1},
    ),
}


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=bf16, device="meta")


@cache
def rows_module(arch: str) -> Module:
    kernels = [make() for make, _ in ROWS.values()]
    return compile_module({kernel.name: code_of(kernel) for kernel in kernels}, arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ROWS)
def test_rows_are_walked_in_16_bytes(name: str, arch: str) -> None:
    require_wide(rows_module(arch), f"{name}_rows", Counter(ROWS[name][1]))


@pytest.mark.parametrize("arch", ARCHS)
def test_every_other_element_is_read_in_whole_words(arch: str) -> None:
    """The last access of all is guarded, so that the stores are split (see `test_rows_are_walked_in_16_bytes` for those that are not)."""
    kernels = [
        plan("every_other", lambda x: x * 2, meta(64, 4096)[:, 1::2]),
        plan("every_fourth", lambda x: x + 1, torch.empty(64, 4096, dtype=i8, device="meta")[:, ::4]),
    ]
    for kernel, num_loads in zip(kernels, (2, 4), strict=True):
        accesses = PlannedKernel(kernel.plan, arch).main_accesses
        assert [access.width_bits for access in accesses if access.kind == "load"] == [128] * num_loads


# ---- lists


def adam(p: Any, g: Any, m: Any, v: Any, lr: Any, step: Any) -> Any:
    m, v = m + (g - m) * 0.1, v * 0.99 + g * g * 0.01
    return p - lr * m / (v.sqrt() + 1e-8) * step, m, v


LISTS: dict[str, tuple[Callable[..., Any], list[torch.dtype], list[Any], dict[tuple[str, int], int]]] = {
    "list_unary": (lambda x: -x, [i8], [], {("load", 128): 2, ("store", 128): 2}),
    "list_bf16": (lambda x, y: x + y, [bf16, bf16], [], {("load", 128): 4, ("store", 128): 2}),
    "list_f32": (lambda x, y: x * 2 + y, [f32, f32], [], {("load", 128): 4, ("store", 128): 2}),
    "list_mixed": (lambda x, y: (x * y).half(), [bf16, f32], [], {("load", 64): 2, ("load", 128): 2, ("store", 64): 2}),
    "list_f64": (lambda x, y: x * y, [f64, f32], [], {("load", 128): 2, ("load", 64): 2, ("store", 128): 2}),
    "list_adam": (adam, [f32] * 4, [0.1, torch.tensor(1.0)], {("load", 128): 8, ("load", 32): 1, ("store", 128): 6}),
}
CHUNK: Widths = Counter({("load", 64): 1})
"""Which chunk of which tensor a block computes: one load, of the map."""


@cache
def list_codes() -> dict[str, str]:
    codes = {}
    for name, (function, dtypes, numbers, _) in LISTS.items():
        f, args = wl.fuse(function, name=name), ([[torch.zeros(64, dtype=dtype)] * 424 for dtype in dtypes])
        args = [[x.clone() for x in column] for column in args]
        lists = split_lists(name, (), (*args, *numbers), {}, None)
        call = find_listed(f, lists, f._bind(*lists.at(0)))
        assert call is not None
        (kernel,) = call.listed.plans or ()
        source = emit_kernel(kernel.program, kernel.variant)
        codes[kernel.name] = source[source.index(f"DEVICE void {name}_element(") :]
    return codes


@cache
def lists_module(arch: str) -> Module:
    return compile_module(list_codes(), arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", LISTS)
def test_lists_move_in_16_bytes(name: str, arch: str) -> None:
    """With the pointers in a table of 32 KB by value, which must not go through local memory."""
    require_wide(lists_module(arch), f"{name}_foreach", Counter(LISTS[name][3]) + CHUNK)


def test_a_plain_store_in_a_list_kernel_is_found() -> None:
    codes = {"list_f32_foreach": list_codes()["list_f32_foreach"].replace("store_whole(", "store_vector(")}
    with pytest.raises(AssertionError, match=r"'store', 32"):
        require_wide(compile_module(codes, "sm_90"), "list_f32_foreach", Counter(LISTS["list_f32"][3]) + CHUNK)


# ---- what is not


def test_kernels_made_narrow_are_found() -> None:
    add = lambda x, y: x + y  # noqa: E731
    kernels = {
        "scalar_load": plan("scalar_load", add, contiguous(bf16), contiguous(bf16)),
        "by_elements": plan("by_elements", add, contiguous(bf16), contiguous(bf16)),
        "like_an_edge": plan("like_an_edge", add, contiguous(bf16), contiguous(bf16)),
        "half_as_wide": plan("half_as_wide", lambda x: x * 2, contiguous(f32)),
        "indexed": plan("indexed", lambda x: x * 2, contiguous(f32)),
        "sound": plan("sound", add, contiguous(bf16), contiguous(bf16)),
    }
    changes = {
        "scalar_load": [("x_v = load_vector<8>(x_data + i);", "x_v = load_elements<8>(x_data + i);")],
        "by_elements": [("    store_vector(out_data + i, out_v);", "    store_elements(out_data + i, out_v);")],
        "like_an_edge": [("    store_vector(out_data + i, out_v);", "    store_some(out_data, i, n, out_v);")],
        "half_as_wide": [("4>", "2>"), ("[4]", "[2]"), ("k < 4", "k < 2"), ("threadIdx.x * 4", "threadIdx.x * 2"), ("512", "256")],
        "indexed": [("#pragma unroll\n", "#pragma unroll 1\n")],  # an array indexed at run time does not fit registers
    }
    codes = {kernel.name: code_of(kernel) for kernel in kernels.values()}
    for name, replacements in changes.items():
        for old, new in replacements:
            assert old in codes[f"{name}_dense"]
            codes[f"{name}_dense"] = codes[f"{name}_dense"].replace(old, new)
    module = compile_module(codes, "sm_90")
    complaints = {
        "scalar_load": r"\{\('load', 16\): [78], \('load', 128\): [12], \('store', 128\): 1\}, expected \{\('load', 128\): 2, ",
        "by_elements": r"\{\('load', 128\): 2, \('store', 16\): \d\}, expected ",
        "like_an_edge": r"\{\('load', 128\): 2\}, expected ",
        "half_as_wide": r"\{\('load', 64\): 1, \('store', 64\): 1\}, expected \{\('load', 128\): 1, \('store', 128\): 1\}",
        "indexed": r"indexed_dense uses local memory: stack, spill stores, spill loads: \('[1-9]\d*', '0', '0'\)",
    }
    require_wide(module, "sound_dense", expected_widths(kernels["sound"]))
    for name, complaint in complaints.items():
        with pytest.raises(AssertionError, match=complaint):
            require_wide(module, f"{name}_dense", expected_widths(kernels[name]))
