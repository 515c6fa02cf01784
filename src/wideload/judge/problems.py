"""Turns the name of a problem into files to start from: a kernel that still does nothing, and a page that says what it should do.

Data and the writing of files; it must not know how an answer is judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from wideload.errors import WideloadError
from wideload.gpus import find_target

__all__ = ["PROBLEMS", "Problem", "find_problem", "read_solution", "write_problem"]

_US_PER_BYTE_AT_1_GBPS = 1e-3
_ELEMENTS = 1 << 27
"""What `wideload check` times."""
_PAGE_GPUS = ("a100", "h100", "h200")
_LADDER = resources.files("wideload") / "ladder"
_HEADER = "bf16.cuh"


@dataclass(frozen=True, slots=True)
class Problem:
    """One kernel to write. ``bytes_per_element`` are (read, written); ``words`` are the ``// wideload:`` line, ``parameters`` the kernel's.

    ``hints`` say in which order to go on from the first version that is right.
    """

    name: str
    task: str
    formula: str
    parameters: tuple[str, ...]
    words: str
    index: str
    bytes_per_element: tuple[float, float]
    rounding: str
    hints: tuple[str, ...]

    @property
    def is_bf16(self) -> bool:
        """Whether it needs the conversions of ``bf16.cuh``."""
        return any("bfloat16" in parameter for parameter in self.parameters)

    @property
    def source(self) -> str:
        """The file to start from."""
        include = f'#include "{_HEADER}"  // __nv_bfloat16, __bfloat162float, __float2bfloat16_rn, Bf16x8\n' if self.is_bf16 else ""
        indent = ",\n    ".join(self.parameters)
        return (
            f"// {self.task} {self.name}.md says what is asked; judge it by: wideload check {self.name}.cu:{self.name}\n"
            f"// wideload: {self.words}\n{include}\n"
            f'extern "C" __global__ void {self.name}(\n    {indent})\n{{\n'
            "    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;  // 64 bits before the product, which may pass 2^32\n"
            f"    if (i < {self.index}) {{\n        // {self.formula}\n    }}\n}}\n"
        )

    @property
    def page(self) -> str:
        """The problem page, in Markdown."""
        read, written = self.bytes_per_element
        nbytes = read + written
        times = "".join(_row(name, nbytes) for name in _PAGE_GPUS)
        hints = "".join(f"{number}. {hint}\n" for number, hint in enumerate(self.hints, start=1))
        return (
            f"# {self.name}\n\n{self.task} For every element:\n\n    {self.formula}\n\n"
            f"Inputs are pointers to `const`, in the function's order; the result is the other pointer. {self.rounding}\n\n"
            f"At least {read:g} bytes are read and {written:g} written an element. Of {_ELEMENTS:,} elements, that takes at least:\n\n"
            f"| GPU | nominal GB/s | us | us at 90 % of it, about the best there is |\n|---|---:|---:|---:|\n{times}\n"
            f"## What is tried\n\n"
            "No element, 1, 2 and 6, around a vector of eight and around a warp (7 to 10, 31, 32, 33), 1000, 1002, 4097, 10007, or such "
            "matrices; more than 2^31 elements, where there is room; NaN, infinities, -0 and subnormals; every pointer 1, 2 and 4 elements "
            "off a multiple of 16 bytes; memory before and behind every tensor.\n\n"
            f"## How to go on\n\n{hints}\n"
            f"Judge it:\n\n    wideload check {self.name}.cu:{self.name}\n"
        )


def _row(name: str, nbytes: float) -> str:
    gpu = find_target(name).gpu
    assert gpu is not None
    least = nbytes * _ELEMENTS / gpu.memory_bandwidth_gbps * _US_PER_BYTE_AT_1_GBPS
    return f"| {gpu.name} | {gpu.memory_bandwidth_gbps:,.0f} | {least:.0f} | {least / 0.9:.0f} |\n"


_ONE = "Let a thread do one element: right at every size first. Expect 60 to 90 % of the wall for floats, half of it for bf16."
_WIDE = "Let it move 16 bytes an access, and say so: `--items {items}` on the `// wideload:` line. Do what is left over by single elements."
_APART = "Take single elements too where a pointer is no multiple of 16: a slice `x[1:]` is not."
_DONE = "At 97 % of the wall nothing is left but to move fewer bytes: fuse it with what comes before or after."
_BF16_IN = "const __nv_bfloat16* __restrict__ "
_BF16_OUT = "__nv_bfloat16* __restrict__ "
_ROUNDED = "Compute in float and round once."
_EXACT = "Every bit of the result is compared."


def _hints(items: int) -> tuple[str, ...]:
    return (_ONE, _WIDE.format(items=items), _APART, _DONE)


PROBLEMS: tuple[Problem, ...] = (
    Problem(
        "vector_add",
        "Add two vectors of float.",
        "out[i] = x[i] + y[i]",
        ("const float* __restrict__ x", "const float* __restrict__ y", "float* __restrict__ out", "long long n"),
        "--against add f32[n] f32[n] --rtol 0",
        "n",
        (8, 4),
        _EXACT,
        _hints(4),
    ),
    Problem(
        "cast",
        "Convert a vector of float to bf16.",
        "out[i] = (bf16)x[i], rounded to nearest, ties to even",
        ("const float* __restrict__ x", f"{_BF16_OUT}out", "long long n"),
        "--against cast f32[n] bf16 --rtol 0",
        "n",
        (4, 2),
        _EXACT,
        (
            *_hints(8)[:2],
            "A thread of eight elements reads two vectors and writes one: load both before the first is used.",
            *_hints(8)[2:],
        ),
    ),
    Problem(
        "bias_gelu",
        "Add a bias to every row of a matrix of bf16, and take its GELU (tanh).",
        "v = x[i] + bias[i % cols];  out[i] = v / 2 * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v^3)))",
        (f"{_BF16_IN}x", f"{_BF16_IN}bias", f"{_BF16_OUT}out", "long long rows", "long long cols"),
        '--against bias_gelu "bf16[rows, cols]" bf16[cols] approximate=tanh',
        "rows * cols",
        (2, 2),
        _ROUNDED,
        (
            _ONE,
            "A remainder of 64 bits takes tens of instructions. Divide once a thread and count on from there, or give the columns to the "
            "grid's x and the rows to its y: `--grid (cols+block-1)//block,rows`, within 65,535 rows.",
            _WIDE.format(items=8),
            "tanhf takes more time than the memory does: with e = __expf(2u), tanh(u) = 1 - 2 / (e + 1).",
            _APART,
            _DONE,
        ),
    ),
    Problem(
        "swiglu",
        "Multiply the SiLU of one vector of bf16 by another.",
        "out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]",
        (f"{_BF16_IN}gate", f"{_BF16_IN}up", f"{_BF16_OUT}out", "long long n"),
        "--against swiglu bf16[n] bf16[n]",
        "n",
        (4, 2),
        _ROUNDED,
        _hints(8),
    ),
    Problem(
        "bias_silu_mul",
        "Add a bias to every row of a matrix of bf16, take the SiLU, and multiply by another matrix.",
        "v = x[i] + bias[i % cols];  out[i] = v / (1 + exp(-v)) * y[i]",
        (f"{_BF16_IN}x", f"{_BF16_IN}bias", f"{_BF16_IN}y", f"{_BF16_OUT}out", "long long rows", "long long cols"),
        '--against bias_silu_mul "bf16[rows, cols]" bf16[cols] "bf16[rows, cols]"',
        "rows * cols",
        (4, 2),
        _ROUNDED,
        (
            _ONE,
            "As one kernel it moves 6 bytes an element; as an add, a SiLU and a product it would be 14.",
            "Divide once a thread for the column and count on from there.",
            *_hints(8)[1:],
        ),
    ),
    Problem(
        "rope",
        "Turn neighbouring pairs of every head's 64 components by the angles of its position (rotary embedding, interleaved).",
        "(a, b) = x[t, h, 2k], x[t, h, 2k + 1];  out = a * cos[t, k] - b * sin[t, k], b * cos[t, k] + a * sin[t, k]",
        (
            f"{_BF16_IN}x",
            "const float* __restrict__ cosines",
            "const float* __restrict__ sines",
            f"{_BF16_OUT}out",
            "long long tokens",
            "long long heads",
        ),
        '--against rope "bf16[1, tokens, heads, 64]" "f32[tokens, 32]" "f32[tokens, 32]" interleaved=true --items 2',
        "tokens * heads * 32",
        (2, 2),
        f"{_ROUNDED} A thread has a pair here, so `--items` is 2.",
        (
            "Let a thread turn one pair: i % 32 is its number in the head, i / 32 / heads the token.",
            "Read the pair in one access of 4 bytes, then four pairs in one of 16: `--items 8`.",
            "A token's angles are the same for all its heads: they come from the caches, and count for little.",
            _APART,
            _DONE,
        ),
    ),
)
"""From a plain sum to the one that is fused and indexed."""


def find_problem(name: str) -> Problem:
    """The problem of this name. Raises ``WideloadError`` with the names that there are."""
    found = next((problem for problem in PROBLEMS if problem.name == name), None)
    if found is None:
        raise WideloadError(f"there is no problem {name!r}; there are {', '.join(problem.name for problem in PROBLEMS)}")
    return found


def read_solution(name: str) -> Path:
    """Where a problem's solution is."""
    return Path(str(_LADDER / "solutions" / f"{find_problem(name).name}.cu"))


def write_problem(name: str, folder: Path) -> tuple[Path, ...]:
    """Write ``NAME.cu``, ``NAME.md`` and what the former includes into ``folder``; return their paths.

    Nothing is overwritten: raises ``WideloadError`` where one is there already, and then writes none.
    """
    problem = find_problem(name)
    files = {folder / f"{name}.cu": problem.source, folder / f"{name}.md": problem.page}
    if problem.is_bf16:
        files[folder / _HEADER] = (_LADDER / _HEADER).read_text(encoding="utf-8")
    if not folder.is_dir():
        raise WideloadError(f"there is no folder {folder}")
    for path, text in files.items():
        if path.exists() and (path.name != _HEADER or path.read_text(encoding="utf-8") != text):
            raise WideloadError(f"{path} is there already, and is not overwritten. Move it away, or name another folder.")
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return tuple(files)
