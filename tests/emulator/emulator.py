"""Compile emitted CUDA C++ with g++ and run it on the CPU, under AddressSanitizer and UndefinedBehaviorSanitizer.

Turns kernel text and operands' bytes into results' bytes; must not know how kernels are planned or emitted.

>>> program = build('extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2; }')
>>> x = torch.arange(4.0)
>>> run_on(program, "twice", (1, 1, 1), (4, 1, 1), [x])
>>> x
tensor([0., 2., 4., 6.])
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import mmap
import os
import re
import select
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Approx", "EmulatorError", "Memory", "Pointer", "Program", "Struct", "build", "run_on"]

Approx = Literal["exact", "up", "down", "mixed"]
"""Where approximate instructions and library functions land within their documented error.

``exact``: the exact value, rounded once. ``up``, ``down``: the float furthest from it inside the bound, away from or
towards zero. ``mixed``: one of the two by a hash of the input.
"""

_APPROX: dict[Approx, int] = {"exact": 0, "up": 1, "down": 2, "mixed": 3}

_LOAD, _LAUNCH = 0, 1  # the child's commands
_NULL = -1  # a null pointer, where offsets into the arena travel

_HERE = Path(__file__).parent
_CACHE = _HERE.parents[1] / "build" / "emulator"

# fp-contract: g++ would fuse a * b + c where NVRTC was told not to. float-cast-overflow: a plain cast saturates on the GPU only.
_COMMON_FLAGS = ("-std=c++17", "-g", "-w", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti")
_SANITIZERS = ("-fsanitize=address,undefined,float-cast-overflow", "-fno-sanitize-recover=all", "-fsanitize-sections=emulator_shared")
_KERNEL_FLAGS = (*_COMMON_FLAGS, "-fPIC", "-shared", "-fvisibility=hidden")

_SANITIZER_OPTIONS = {
    # A block's threads are fibers, whose frames die unseen: no fake stack. The parent kills the child: no leaks to look for.
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:print_legend=0:allocator_may_return_null=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

_ALIGNMENT = 256  # bytes: an address in the child is congruent to the host's modulo this, the alignment of cudaMalloc
_GUARD = 1024  # bytes of pattern kept free before and behind every operand
_PATTERN = np.tile(np.array([0xFD, 0xFF], np.uint8), _GUARD // 2)  # a NaN in fp16, bf16, fp32 and fp64, and not a GPU's NaN
_FIRST_ARENA = 1 << 20
_HANG_S = 120

# CUDA C++ Programming Guide, "Compute Capabilities", "Technical Specifications".
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
_MAX_THREADS = 1024

_KERNEL = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:void\s+)?(?:__launch_bounds__\(\s*(?P<threads>\d+)[^)]*\)\s*)?(?:void\s+)?(?P<name>\w+)\s*\('
)
_FIBER_WARNING = "ASan doesn't fully support makecontext/swapcontext"  # the runtime tells it of every switch
_BARRIER = re.compile(r"__syncthreads|__(shfl_xor|any)_sync")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_SHARED_ALIGNMENT = re.compile(r"\balignas\(128\)(?=\s+__shared__)")
"""Nothing that is more strictly aligned than 64 bytes gets a red zone behind it (GCC's asan.cc, asan_protect_global)."""
_FRAME = re.compile(r"kernel\.cu:(\d+)")
_FAULT_ADDRESS = re.compile(r"on (?:unknown )?address (0x[0-9a-f]+)")


class EmulatorError(AssertionError):
    """A kernel did what it must not do, does not compile, or was launched as no GPU would allow."""


@dataclass(frozen=True, eq=False)
class Memory:
    """One allocation: the kernel may touch its bytes and no others.

    ``data`` (uint8, contiguous) is read before the launch and overwritten after it. ``address`` is congruent to the
    address that the kernel sees, modulo 256. ``writable`` (bool, one a byte) says which bytes a kernel may change; None: all.

    An access behind the end is seen to the byte. One before the start is seen to the byte where ``address`` is a multiple
    of 8, AddressSanitizer's granule; otherwise a read of the up to 7 bytes before it shows only as the NaN found there.
    """

    data: npt.NDArray[np.uint8]
    address: int = 0
    writable: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Pointer:
    """An argument that points ``offset`` bytes into ``memory``; several may point into one."""

    memory: Memory
    offset: int = 0


@dataclass(frozen=True, eq=False)
class Struct:
    """A struct by value, of 8 bytes a member: a pointer, an int for a ``long long``, a float for a ``double``."""

    words: Sequence[Pointer | int | float]


Argument = Pointer | Struct | int | float | None


@dataclass(frozen=True, eq=False)
class Program:
    """Compiled kernels of one source text."""

    source: str
    library: Path
    sanitize: bool
    max_threads: dict[str, int]

    def run(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        args: Sequence[Argument],
        *,
        approx: Approx = "exact",
    ) -> None:
        """Launch and wait.

        Arguments: ``Pointer`` or None (null) for pointers, int for ``long long``, int or float for ``double``, ``Struct``.
        Raises ``EmulatorError`` with the sanitizer's report and the kernel's line; no memory is then changed.
        """
        _check_launch(self, kernel, grid, block)
        server = _server(self.sanitize)
        index, number, kinds = server.load(self, kernel)
        _check_arguments(kernel, kinds, args)
        server.launch(self, kernel, (index, number, *grid, *block, _APPROX[approx]), kinds, args)


def build(source: str, *, sanitize: bool = True) -> Program:
    """Compile ``source``, the text that NVRTC gets; the result is kept under build/emulator by the text's hash.

    Without ``sanitize`` kernels run several times faster and only stray writes next to an operand are seen.
    """
    code = _COMMENT.sub(" ", source)
    kernels = {match["name"]: int(match["threads"] or _MAX_THREADS) for match in _KERNEL.finditer(code)}
    if not kernels:
        raise EmulatorError('no kernel in the source: extern "C" __global__ void NAME(...) is what is looked for')
    has_barrier = "true" if _BARRIER.search(code) else "false"
    rows = ", ".join(f"EMULATOR_KERNEL({name}, {has_barrier})" for name in kernels)
    text = f"{_SHARED_ALIGNMENT.sub('alignas(64)', source)}\nEMULATOR_TABLE({rows})\n"
    flags = (*_KERNEL_FLAGS, "-O1", *_SANITIZERS) if sanitize else (*_KERNEL_FLAGS, "-O2")
    shim = (_HERE / "shim.h").read_text()
    folder = _cache_folder(text, shim, *flags)
    library = folder / "kernel.so"
    if not library.exists():
        _write(folder / "kernel.cu", text)
        _compile(library, [*flags, "-include", str(_HERE / "shim.h"), "-x", "c++", str(folder / "kernel.cu")])
    return Program(source, library, sanitize, kernels)


def run_on(
    program: Program,
    kernel: str,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    args: Sequence[torch.Tensor | Sequence[torch.Tensor | int | float] | int | float | None],
    *,
    outputs: Iterable[torch.Tensor] | None = None,
    approx: Approx = "exact",
) -> None:
    """``Program.run`` on CPU tensors: each storage is one memory, at the tensor's own address modulo 256.

    A sequence is a struct of its items. Results are written to the tensors. With ``outputs``, every byte of every storage
    that is no element of one of them must come back unchanged: inputs, and the gaps of strided outputs.
    """
    memories: dict[int, Memory] = {}
    writable: dict[int, npt.NDArray[np.bool_]] | None = None
    if outputs is not None:
        writable = {}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            mask = writable.setdefault(storage.data_ptr(), np.zeros(storage.nbytes(), np.bool_))
            _mark_elements(torch.from_numpy(mask), tensor)

    def argument(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return Struct([argument(item) for item in value])
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        base = storage.data_ptr()
        if base not in memories:
            data = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            mask = None if writable is None else writable.get(base, np.zeros(len(data), np.bool_))
            memories[base] = Memory(data, base, mask)
        return Pointer(memories[base], int(value.storage_offset()) * value.element_size())

    program.run(kernel, grid, block, [argument(value) for value in args], approx=approx)


def _mark_elements(mask: torch.Tensor, tensor: torch.Tensor) -> None:
    """Set the bytes of a storage's ``mask`` that are elements of ``tensor``."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    mask.as_strided((*tensor.shape, size), (*strides, 1), tensor.storage_offset() * size).fill_(True)


def _check_launch(program: Program, kernel: str, grid: tuple[int, int, int], block: tuple[int, int, int]) -> None:
    if kernel not in program.max_threads:
        raise EmulatorError(f"no kernel {kernel!r} in the source; it has {', '.join(program.max_threads)}")
    for name, size, largest in (("grid", grid, _MAX_GRID), ("block", block, _MAX_BLOCK)):
        if len(size) != 3 or not all(1 <= n <= most for n, most in zip(size, largest, strict=True)):
            raise EmulatorError(f"{kernel}: {name} is {size}, allowed is 1 to {largest}")
    threads = block[0] * block[1] * block[2]
    if threads > program.max_threads[kernel]:
        raise EmulatorError(f"{kernel}: block {block} has {threads} threads, allowed are {program.max_threads[kernel]}")


def _check_arguments(kernel: str, kinds: str, args: Sequence[Argument]) -> None:
    if len(args) != len(kinds):
        raise EmulatorError(f"{kernel}: got {len(args)} arguments, it takes {len(kinds)}")
    allowed = {"p": (Pointer, type(None)), "i": (int,), "d": (int, float), "s": (Struct,)}
    names = {"p": "a pointer", "i": "a long long", "d": "a double", "s": "a struct"}
    for position, (value, kind) in enumerate(zip(args, kinds, strict=True)):
        if not isinstance(value, allowed[kind]):
            raise EmulatorError(f"{kernel}: argument {position} is {value!r}, the kernel takes {names[kind]}")


@functools.cache
def _compiler() -> str:
    """g++ and its version."""
    if shutil.which("g++") is None:
        raise EmulatorError("g++ was not found; the emulator compiles kernels with it (apt-get install g++)")
    return subprocess.run(["g++", "--version"], check=True, capture_output=True, text=True).stdout.splitlines()[0]


def _cache_folder(*inputs: str) -> Path:
    """The folder of what ``inputs``, and this compiler, make."""
    folder = _CACHE / hashlib.sha256("\0".join((*inputs, _compiler())).encode()).hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(path: Path, text: str) -> None:
    """Whole or not at all, also when two processes write the same file."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.replace(file.name, path)


def _compile(target: Path, arguments: Sequence[str]) -> None:
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    result = subprocess.run(["g++", *arguments, "-o", str(temporary)], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    if result.returncode:
        raise EmulatorError(f"g++ refused the source:\n{result.stderr}")
    os.replace(temporary, target)


def _build_runtime(sanitize: bool) -> Path:
    sources = [_HERE / "shim.h", _HERE / "runtime.cpp"]
    compile_flags = (*_COMMON_FLAGS, "-O2", "-fno-math-errno", *(("-DEMULATOR_SANITIZE",) if sanitize else ()))
    link_flags = ("-rdynamic", "-ldl", *(_SANITIZERS[:1] if sanitize else ()))
    folder = _cache_folder(*(source.read_text() for source in sources), *compile_flags, *link_flags)
    runtime = folder / "runtime"
    if not runtime.exists():
        compiled = folder / f"runtime.{os.getpid()}.o"
        _compile(compiled, [*compile_flags, "-c", str(sources[1])])
        _compile(runtime, [str(compiled), *link_flags])
        compiled.unlink()
    return runtime


@dataclass(frozen=True)
class _Placed:
    """A memory in the arena."""

    memory: Memory
    position: int  # of the first argument that points into it
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.memory.data)


class _Server:
    """The child process that runs kernels, and the arena of operands shared with it."""

    def __init__(self, sanitize: bool) -> None:
        self._descriptor = os.memfd_create("emulator")
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            [_build_runtime(sanitize), str(self._descriptor)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            pass_fds=(self._descriptor,),
            env={**os.environ, **_SANITIZER_OPTIONS},
        )
        self._loaded: dict[Path, tuple[int, dict[str, tuple[int, str]]]] = {}
        self._grow(_FIRST_ARENA)

    def _grow(self, nbytes: int) -> None:
        os.ftruncate(self._descriptor, nbytes)
        self._nbytes = nbytes
        self._arena = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)

    def load(self, program: Program, kernel: str) -> tuple[int, int, str]:
        """(library, kernel, parameter kinds), as the child counts them."""
        if program.library not in self._loaded:
            path = os.fsencode(program.library)
            answer = self._ask(struct.pack("<2q", _LOAD, len(path)) + path, program, kernel, [])
            rows = [line.split(" ") for line in answer.splitlines()]
            self._loaded[program.library] = (len(self._loaded), {name: (number, kinds) for number, (name, kinds) in enumerate(rows)})
        index, kernels = self._loaded[program.library]
        return index, *kernels[kernel]

    def launch(self, program: Program, kernel: str, head: tuple[int, ...], kinds: str, args: Sequence[Argument]) -> None:
        """``head``: library, kernel, grid, block, approx, as the child counts them."""
        structs = {id(value): Memory(np.zeros(8 * len(value.words), np.uint8)) for value in args if isinstance(value, Struct)}
        pointed = [item for value in args for item in (value.words if isinstance(value, Struct) else (value,))]
        placed = self._place([*pointed, *map(Pointer, structs.values())])
        relocated: list[int] = []  # where in the arena an offset stands that the child makes an address
        for value in args:
            if isinstance(value, Struct):
                place = placed[id(structs[id(value)])]
                relocated += [place.start + 8 * k for k, word in enumerate(value.words) if isinstance(word, Pointer)]
                words = [placed[id(word.memory)].start + word.offset if isinstance(word, Pointer) else word for word in value.words]
                packed = b"".join(struct.pack("<d" if isinstance(word, float) else "<q", word) for word in words)
                place.memory.data[:] = np.frombuffer(packed, np.uint8)
        for place in placed.values():
            self._arena[place.start - _GUARD : place.start] = _PATTERN
            self._arena[place.start : place.end] = place.memory.data
            self._arena[place.end : place.end + _GUARD] = _PATTERN
        message = [struct.pack("<12q", _LAUNCH, *head, self._nbytes, len(placed))]
        message += [struct.pack("<2q", place.start, len(place.memory.data)) for place in placed.values()]
        message.append(struct.pack("<q", len(args)))
        for value, kind in zip(args, kinds, strict=True):
            if isinstance(value, Struct):
                value = placed[id(structs[id(value)])].start
            elif isinstance(value, Pointer):
                value = placed[id(value.memory)].start + value.offset
            message.append(struct.pack("<d" if kind == "d" else "<q", _NULL if value is None else value))
        message.append(struct.pack(f"<{1 + len(relocated)}q", len(relocated), *relocated))
        self._ask(b"".join(message), program, kernel, list(placed.values()))
        for memory in structs.values():
            del placed[id(memory)]  # the kernel has a copy
        for place in placed.values():
            self._check_writes(kernel, place)
        for place in placed.values():
            place.memory.data[:] = self._arena[place.start : place.end]

    def _place(self, args: Sequence[Any]) -> dict[int, _Placed]:
        """Where each memory goes, by its id; the arena is made large enough."""
        placed: dict[int, _Placed] = {}
        cursor = _ALIGNMENT
        for position, value in enumerate(args):
            if isinstance(value, Pointer) and id(value.memory) not in placed:
                start = -(-(cursor + _GUARD) // _ALIGNMENT) * _ALIGNMENT + value.memory.address % _ALIGNMENT
                placed[id(value.memory)] = place = _Placed(value.memory, position, start)
                cursor = place.end + _GUARD
        if cursor > self._nbytes:
            self._grow(1 << cursor.bit_length())
        return placed

    def _check_writes(self, kernel: str, place: _Placed) -> None:
        arena = self._arena
        faults = [place.start - _GUARD + np.flatnonzero(arena[place.start - _GUARD : place.start] != _PATTERN)]
        faults.append(place.end + np.flatnonzero(arena[place.end : place.end + _GUARD] != _PATTERN))
        if place.memory.writable is not None:
            changed = arena[place.start : place.end] != place.memory.data
            faults.append(place.start + np.flatnonzero(changed & ~place.memory.writable))
        offsets = np.concatenate(faults)
        if len(offsets):
            first = _whereabouts(int(offsets[0]), [place])
            raise EmulatorError(f"{kernel}: wrote {len(offsets)} bytes that must not change, the first is {first}")

    def _ask(self, message: bytes, program: Program, kernel: str, placed: list[_Placed]) -> str:
        assert self._process.stdin is not None
        try:
            while message:
                message = message[self._process.stdin.write(message) :]
            (length,) = struct.unpack("<q", self._receive(8))
            return self._receive(length).decode()
        except (EOFError, BrokenPipeError):
            raise EmulatorError(self._report(program, kernel, placed)) from None

    def _receive(self, nbytes: int) -> bytes:
        assert self._process.stdout is not None
        answer = b""
        while len(answer) < nbytes:
            if not select.select([self._process.stdout], [], [], _HANG_S)[0]:
                self._process.kill()
                raise EOFError
            part = self._process.stdout.read(nbytes - len(answer))
            if not part:
                raise EOFError
            answer += part
        return answer

    def _report(self, program: Program, kernel: str, placed: list[_Placed]) -> str:
        """What the child wrote before it died, led by the kind of fault, the operand and the kernel's lines."""
        code, log = self.close()
        report = "".join(line for line in log.splitlines(keepends=True) if _FIBER_WARNING not in line)
        summary = next((line for line in report.splitlines() if re.search(r"ERROR: |runtime error: |^emulator: ", line)), None)
        if summary is None:
            summary = f"no answer within {_HANG_S} s" if code == -9 else f"the child ended with status {code}"
        lines = [summary.strip()]
        fault = _FAULT_ADDRESS.search(summary)
        offset = int(fault[1], 16) - int.from_bytes(self._arena[:8].tobytes(), "little") if fault else -1
        if placed and 0 <= offset < self._nbytes:
            lines.append(f"that is {_whereabouts(offset, placed)}")
        text = program.source.splitlines()
        numbers = dict.fromkeys(int(match) for match in _FRAME.findall(report))
        lines += [f"kernel.cu:{number}: {text[number - 1].strip()}" for number in numbers if number <= len(text)]
        return f"{kernel}: " + "\n  ".join(lines) + f"\n\n{report}"

    def close(self) -> tuple[int, str]:
        """End the child; its exit status, and what it wrote to stderr."""
        global _servers
        _servers = {key: server for key, server in _servers.items() if server is not self}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        os.close(self._descriptor)
        with self._log:
            self._log.seek(0)
            return code, self._log.read().decode(errors="replace")


def _whereabouts(offset: int, placed: Sequence[_Placed]) -> str:
    """An offset in the arena, told by the nearest memory."""
    place = min(placed, key=lambda place: max(place.start - offset, offset - place.end + 1, 0))
    memory = f"the memory of argument {place.position}, {len(place.memory.data)} bytes long"
    if offset < place.start:
        return f"{place.start - offset} bytes before the start of {memory}"
    if offset >= place.end:
        return f"{offset - place.end} bytes behind the end of {memory}"
    return f"byte {offset - place.start} of {memory}"


_servers: dict[bool, _Server] = {}


def _server(sanitize: bool) -> _Server:
    if sanitize not in _servers:
        _servers[sanitize] = _Server(sanitize)
    return _servers[sanitize]


@atexit.register
def _close_servers() -> None:
    for server in list(_servers.values()):
        server.close()
