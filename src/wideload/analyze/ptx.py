"""Turns PTX and a launch into what its warps do: the addresses that each access touches, bank conflicts, divergence, instructions.

Executes integers and addresses of sampled blocks; values in memory are unknown, and so is all that follows from them. It must not
know tensors, nor what a GPU makes of the accesses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wideload.analyze.budget import UNITS, Unit
from wideload.analyze.sectors import SECTOR_BYTES, WARP_SIZE
from wideload.errors import CompileError

__all__ = ["MAX_STEPS", "SAMPLED_THREADS", "Dim3", "Outside", "PtxAccess", "Touched", "Walk", "walk_ptx"]

Kind = Literal["load", "store", "atomic"]
Space = Literal["global", "shared"]
Dim3 = tuple[int, int, int]

MAX_STEPS = 100_000
"""Instructions executed, all lanes of the sampled blocks at once, some microseconds each; beyond, a walk ends and says so."""
SAMPLED_THREADS = 1 << 12
"""Of all sampled blocks together, where a caller names no other number."""
_TALLIED_TURNS = 32
"""Of a loop; what its accesses touch in later turns is taken to be like it."""
_MIN_SAMPLED_BLOCKS = 5
_NUM_BANKS, _BANK_BYTES = 32, 4
"""Of shared memory, on every architecture since Kepler (CUDA C++ Programming Guide)."""
_SHARED_BASE = 1 << 40
"""Where shared variables stand in the walk: no parameter points there."""
_SHARED_END = _SHARED_BASE + (1 << 20)
"""Behind what any SM has of it."""

_Values = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class PtxAccess:
    """One load, store or atomic of the PTX, over all of the grid (extrapolated from the sampled blocks).

    ``requests`` are warps that execute it, ``sectors`` those that the requests touch, each request's by itself, and ``ideal_sectors``
    those that the bytes of the active lanes would fill. ``region`` is the one it touches first; None where it is outside of all, or in
    shared memory. ``is_known`` is False where addresses hang on values in memory: each lane counts as a sector of its own then.
    """

    kind: Kind
    space: Space
    width_bytes: int
    region: int | None
    requests: float
    sectors: float
    ideal_sectors: float
    wavefronts: float
    ideal_wavefronts: float
    is_known: bool
    is_repeated: bool
    """Whether a thread executes it more than once: it stands in a loop."""
    is_aligned: bool = True
    """Whether every known address is a multiple of the width; a GPU stops at one that is not."""


@dataclass(frozen=True, slots=True)
class Touched:
    """What the grid touches of one region by loads, or by stores and atomics: bytes and sectors, each once a block."""

    nbytes: float
    sectors: float
    end: int
    """The address behind the last byte that is touched."""
    is_by_last: bool = False
    """Whether the last block of the grid touches any of it."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Accesses of global memory that are in no region: loads of which no byte is in one, stores and atomics of which some byte is not.

    ``region`` is the one nearest, and ``nbytes`` how far they reach behind its last byte, or before its first.
    """

    kind: Kind
    region: int
    is_behind: bool
    nbytes: int


@dataclass(frozen=True, slots=True)
class Walk:
    """What a launch does. ``units`` are instructions of a warp's 32 lanes, active or not, for each thread of the grid."""

    accesses: tuple[PtxAccess, ...]
    reads: dict[int, Touched]
    writes: dict[int, Touched]
    """By region."""
    units: dict[Unit, float]
    lane_share: float
    """Active lanes of those that the issued instructions occupy."""
    has_loops: bool
    is_exact: bool
    """Whether every branch and address was known, and the walk came to its end."""
    is_cut: bool = False
    """Whether it ended after `MAX_STEPS`, before the kernel did."""
    is_whole: bool = False
    """Whether all blocks were executed, and all turns of their loops counted: bytes and sectors are then no estimate."""
    outside: tuple[Outside, ...] = ()
    """Of addresses that are known, where no value in memory decides whether they are touched."""
    raced_bytes: int = 0
    """Of shared memory, in the sampled blocks: written by one warp, and read or written by another, with no barrier in between.
    What lies between two barriers counts by itself."""


@dataclass(slots=True)
class _Instruction:
    operation: str
    suffixes: tuple[str, ...]
    operands: list[str]
    predicate: str | None
    negated: bool
    target: int = -1


@dataclass(slots=True)
class _Tally:
    """Of one memory instruction, by block of the sample."""

    kind: Kind
    space: Space
    width: int
    requests: _Values
    """Of warps, all of them; the other counts are those of the first `_TALLIED_TURNS` turns."""
    tallied: _Values
    sectors: _Values
    ideal: _Values
    wavefronts: _Values
    ideal_wavefronts: _Values
    num_turns: int = 0
    touched: list[tuple[_Values, _Values]] = field(default_factory=list)
    """Block of the sample and address, of each active lane."""
    region: int | None = None
    is_known: bool = True
    is_aligned: bool = True

    @property
    def turns_per_tallied(self) -> npt.NDArray[np.float64]:
        """By block: all requests over those that were tallied."""
        turns: npt.NDArray[np.float64] = self.requests / np.maximum(self.tallied, 1)
        return turns


def walk_ptx(
    ptx: str,
    kernel: str,
    grid: Dim3,
    block: Dim3,
    arguments: Sequence[int | float | None],
    regions: Sequence[tuple[int, int]],
    sampled_threads: int = SAMPLED_THREADS,
) -> Walk:
    """Execute ``kernel`` for the first, the last and some blocks in between, which stand for those beside them.

    ``arguments`` are the kernel's, pointers as byte addresses; None is a number that is not known. ``regions`` are the first address of
    each operand and the one behind its last. A grid of no more than ``sampled_threads`` is executed as a whole.
    Branches on values in memory are taken to fall through, unless they skip a loop (a slow path). Raises ``CompileError`` where ``ptx``
    has no such kernel.
    """
    return _Machine(_parse(ptx, kernel), grid, block, arguments, regions, sampled_threads).run()


# ---- reading

_STATEMENT = re.compile(r"(?:@(?P<not>!?)(?P<predicate>%\w+)\s+)?(?P<opcode>[a-z][\w.:]*)(?:\s+(?P<operands>.*))?", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|\([^)]*\)|[^,\s][^,]*")


@dataclass(slots=True)
class _Program:
    instructions: list[_Instruction]
    parameters: list[str]
    shared: dict[str, int]
    """The address of each variable in shared memory."""
    others: set[str]
    """Variables in global, constant and local memory: tables of CUDA's own arithmetic, stacks."""


def _parse(ptx: str, kernel: str) -> _Program:
    text = re.sub(r"//[^\n]*", "", ptx)
    opened = re.search(rf"\.entry\s+{re.escape(kernel)}\s*\(", text)
    if opened is None:
        raise CompileError(f"the PTX has no kernel {kernel!r}")
    head_end = text.index(")", opened.end())
    parameters = re.findall(r"\.param\s+(?:\.align\s+\d+\s+)?\.[a-z]\d+\s+([\w$]+)", text[opened.end() : head_end])
    start = text.index("{", head_end)
    body = text[start + 1 : _closing(text, start)]
    shared: dict[str, int] = {}
    offset = _SHARED_BASE
    variables = re.finditer(r"\.shared\s+\.align\s+(\d+)\s+\.[a-z](\d+)\s+([\w$]+)(?:\[(\d*)\])?", text)
    for variable in sorted(variables, key=lambda found: found[4] == ""):  # what has no size, the launch gives: behind all others
        align = int(variable[1])
        offset = -(-offset // align) * align
        shared[variable[3]] = offset
        offset += int(variable[2]) // 8 * int(variable[4] or 1)
    others = set(re.findall(r"\.(?:global|const|local)\s+\.align\s+\d+\s+\.[a-z]\d+\s+([\w$]+)", text))
    instructions: list[_Instruction] = []
    labels: dict[str, int] = {}
    for statement in _statements(body):
        while label := re.match(r"([$\w]+):\s*", statement):
            labels[label[1]] = len(instructions)
            statement = statement[label.end() :]
        found = _STATEMENT.fullmatch(statement)
        if found is None or not statement or statement.startswith("."):
            continue
        operation, *suffixes = found["opcode"].split(".")
        instructions.append(
            _Instruction(
                operation,
                tuple(suffixes),
                [operand.strip() for operand in _OPERAND.findall(found["operands"] or "")],
                found["predicate"],
                bool(found["not"]),
            )
        )
    for instruction in instructions:
        if instruction.operation == "bra":
            instruction.target = labels.get(instruction.operands[-1], len(instructions))
    return _Program(instructions, parameters, shared, others)


_VECTOR_OPERAND = re.compile(r"\{([^{};]*)\}")


def _statements(body: str) -> list[str]:
    """What stands between semicolons; braces that only scope the registers of inline assembly are no matter: names do not clash."""
    text = re.sub(r"^\s*\.loc\b[^\n]*$", "", body, flags=re.MULTILINE)
    text = _VECTOR_OPERAND.sub(r"<\1>", text)
    text = re.sub(r"[{}]", "\n", text)
    return [statement.strip().replace("<", "{").replace(">", "}") for statement in text.split(";")]


def _closing(text: str, start: int) -> int:
    depth = 0
    for found in re.finditer(r"[{}]", text[start:]):
        depth += 1 if found[0] == "{" else -1
        if depth == 0:
            return start + found.start()
    raise CompileError("the PTX of the kernel has no end")


# ---- executing

_SIGN_AND_SIZE = re.compile(r"([subf])(\d+)")


def _integer_type(suffixes: Sequence[str]) -> tuple[bool, int] | None:
    """Signedness and bits of the last integer type among an opcode's suffixes."""
    for suffix in reversed(suffixes):
        found = _SIGN_AND_SIZE.fullmatch(suffix)
        if found:
            return None if found[1] == "f" else (found[1] == "s", int(found[2]))
    return None


def _as_int64(number: int) -> int:
    """The number of the same 64 bits that registers are kept as."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _wrapped(value: _Values, is_signed: bool, bits: int) -> _Values:
    if bits >= 64:
        return value
    masked = value & ((1 << bits) - 1)
    return np.where(masked >> (bits - 1), masked - (1 << bits), masked) if is_signed else masked


def _unsigned(value: _Values) -> npt.NDArray[np.uint64]:
    return value.astype(np.uint64)


def _divide(a: _Values, b: _Values, is_signed: bool) -> _Values:
    safe = np.where(b == 0, 1, b)
    if not is_signed:
        whole: _Values = (_unsigned(a) // _unsigned(safe)).astype(np.int64)
        return whole
    quotient = np.abs(a) // np.abs(safe)
    return np.where((a < 0) != (safe < 0), -quotient, quotient)


def _shift_right(a: _Values, b: _Values, is_signed: bool, bits: int) -> _Values:
    amount = np.minimum(np.maximum(b, 0), 63)
    if is_signed or bits < 64:
        return a >> amount
    shifted: _Values = (_unsigned(a) >> amount.astype(np.uint64)).astype(np.int64)
    return shifted


def _shift_left(a: _Values, b: _Values, bits: int) -> _Values:
    return np.where(b >= bits, 0, a << np.minimum(np.maximum(b, 0), 63))


def _multiply_high(a: _Values, b: _Values, is_signed: bool, bits: int) -> _Values:
    if bits < 64:
        product = a * b if is_signed else (_unsigned(a) * _unsigned(b) >> np.uint64(bits)).astype(np.int64)
        return product >> bits if is_signed else product
    mask = -1 if is_signed else (1 << 64) - 1
    high = ((int(x) & mask) * (int(y) & mask) >> 64 for x, y in zip(a, b, strict=True))
    return np.array([value - (1 << 64) if value >= 1 << 63 else value for value in high], dtype=np.int64)


_COMPARE: dict[str, Callable[[_Values, _Values], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_LOGIC: dict[str, Callable[[_Values, _Values], Any]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
_SPECIAL = frozenset("sin cos ex2 lg2 rcp rsqrt sqrt tanh".split())
_FREE = frozenset("mov ld st cvta bra ret exit bar barrier trap atom red cp prefetch membar fence isspacep pragma call nanosleep".split())
"""Moves, which ptxas renames away, and what `Walk.units` counts elsewhere or not at all."""
_DIVIDE_COST: dict[str, dict[Unit, float]] = {
    "f32": {"special": 1, "fp32": 8},
    "f64": {"special": 1, "fp64": 8},
    "int": {"special": 2, "fp32": 6, "integer": 10},
}
"""A division's fast path as ptxas writes it for sm_90, of each unit's instructions; an integer one goes through a float reciprocal."""


def _unit_costs(instruction: _Instruction) -> dict[Unit, float]:
    """The units' instructions that ptxas makes of one of PTX, about."""
    operation, suffixes = instruction.operation, instruction.suffixes
    if operation in ("ld", "st", "atom", "red"):
        return {} if "param" in suffixes else {"load_store": 1, "issue": 1}
    if operation in _FREE:
        return {"issue": 1} if operation in ("bra", "bar", "barrier") else {}
    kind = next((s for s in reversed(suffixes) if _SIGN_AND_SIZE.fullmatch(s)), "")
    is_float = kind.startswith("f") or any("f16" in suffix for suffix in suffixes)
    if operation in ("div", "rem") and "approx" not in suffixes and "full" not in suffixes:
        costs = dict(_DIVIDE_COST[kind if kind in _DIVIDE_COST else "f32" if is_float else "int"])
    elif operation == "div":
        costs = {"special": 1, "fp32": 2}
    elif operation in _SPECIAL:
        costs = {"special": 1} if "approx" in suffixes else {"special": 1, "fp64" if kind == "f64" else "fp32": 6}
    elif operation == "cvt":
        types = [s for s in suffixes if _SIGN_AND_SIZE.fullmatch(s)]
        crosses = len({t[0] == "f" for t in types}) > 1 or "f64" in types
        costs = {"special": 1} if crosses else {"integer": 0 if all(t[0] != "f" for t in types) else 1}
    elif kind == "f64":
        costs = {"fp64": 1}
    elif operation in ("mad", "mul") or (is_float and operation not in ("setp", "selp", "abs", "neg", "min", "max")):
        costs = {"fp32": 1}
    else:
        costs = {"integer": 2 if kind.endswith("64") else 1}
    return {**costs, "issue": sum(costs.values())}


class _Machine:
    """The lanes of the sampled blocks, side by side; at each step those at the lowest address execute."""

    def __init__(
        self,
        program: _Program,
        grid: Dim3,
        block: Dim3,
        arguments: Sequence[int | float | None],
        regions: Sequence[tuple[int, int]],
        sampled_threads: int,
    ) -> None:
        self.program, self.regions = program, regions
        threads = block[0] * block[1] * block[2]
        num_blocks = grid[0] * grid[1] * grid[2]
        wanted = min(num_blocks, max(_MIN_SAMPLED_BLOCKS, sampled_threads // threads))
        self.blocks = np.unique(np.linspace(0, num_blocks - 1, wanted).astype(np.int64))
        # Partial last warps are padded, so that warps do not straddle blocks.
        padded = -(-threads // WARP_SIZE) * WARP_SIZE
        self.padded, self.num_blocks, self.threads = padded, num_blocks, threads
        lane = np.tile(np.arange(padded, dtype=np.int64), len(self.blocks))
        block_of = np.repeat(self.blocks, padded)
        self.block_index = np.repeat(np.arange(len(self.blocks), dtype=np.int64), padded)
        self.warp = np.arange(len(lane), dtype=np.int64) // WARP_SIZE
        self.num_warps = len(lane) // WARP_SIZE
        self.exists = lane < threads
        full = np.ones(len(lane), dtype=np.int64)
        tid = np.minimum(lane, threads - 1)
        self.registers: dict[str, _Values | None] = {
            "%tid.x": tid % block[0], "%tid.y": tid // block[0] % block[1], "%tid.z": tid // (block[0] * block[1]),
            "%ctaid.x": block_of % grid[0], "%ctaid.y": block_of // grid[0] % grid[1], "%ctaid.z": block_of // (grid[0] * grid[1]),
            "%laneid": lane % WARP_SIZE, "%warpid": lane // WARP_SIZE, "WARP_SZ": full * WARP_SIZE,
            **{f"%ntid.{axis}": full * size for axis, size in zip("xyz", block, strict=True)},
            **{f"%nctaid.{axis}": full * size for axis, size in zip("xyz", grid, strict=True)},
        }  # fmt: skip
        self.full = full
        self.parameters: dict[str, _Values | None] = {}
        for name, argument in zip(program.parameters, arguments, strict=True):
            self.parameters[name] = None if argument is None or isinstance(argument, float) else full * _as_int64(int(argument))
        self.tallies: dict[int, _Tally] = {}
        self.origins: dict[str, int] = {}
        """The region into which a register of unknown value points."""
        self.executed = np.zeros(len(program.instructions), dtype=np.int64)
        self.warp_executed = np.zeros(len(program.instructions), dtype=np.int64)
        self.is_exact = True
        self.is_certain = True
        """Whether all that was executed so far is executed whatever values in memory are."""
        self.is_cut = False
        self.starts, self.ends = np.array(regions, dtype=np.int64).reshape(-1, 2).T
        self.outside: dict[tuple[Kind, int, bool], int] = {}
        self.barriers = np.zeros(len(lane), dtype=np.int64)
        """That each lane has passed."""
        self.shared: list[tuple[bool, int, _Values, _Values, _Values]] = []
        """Whether it stores, the width, and of each active lane the address, the warp and the barriers passed."""

    def run(self) -> Walk:
        instructions = self.program.instructions
        end = len(instructions)
        pc = np.where(self.exists, 0, end).astype(np.int64)
        steps = 0
        while (at := int(pc.min())) < end:
            steps += 1
            if steps > MAX_STEPS:
                self.is_exact, self.is_cut = False, True
                break
            active = pc == at
            instruction = instructions[at]
            num_active = int(active.sum())
            self.executed[at] += num_active
            warps = num_active if num_active == len(pc) else int(active.reshape(-1, WARP_SIZE).any(axis=1).sum()) * WARP_SIZE
            self.warp_executed[at] += warps
            chosen, is_known = self._predicate(instruction, active)
            if instruction.operation == "bra":
                self._branch(instruction, at, pc, active, chosen, is_known)
                continue
            pc[active] = at + 1
            if instruction.operation in ("ret", "exit", "trap"):
                pc[chosen & is_known] = end
            else:
                self._execute(at, instruction, chosen)
        return self._result()

    def _predicate(self, instruction: _Instruction, active: _Mask) -> tuple[_Mask, bool]:
        if instruction.predicate is None:
            return active, True
        value = self.registers.get(instruction.predicate)
        if value is None:
            self.is_exact = False
            self.is_certain = self.is_certain and instruction.operation == "bra"
            return active, False
        return active & ((value == 0) if instruction.negated else (value != 0)), True

    def _branch(self, instruction: _Instruction, at: int, pc: _Values, active: _Mask, chosen: _Mask, is_known: bool) -> None:
        if not is_known:
            skipped = range(at + 1, instruction.target)
            inner = (self.program.instructions[position] for position in skipped)
            taken = any(other.operation == "bra" and other.target in skipped and other.target < position
                        for position, other in zip(skipped, inner, strict=True))  # fmt: skip
            chosen = active if taken else np.zeros_like(active)
            self.is_certain = self.is_certain and taken
        pc[chosen] = instruction.target
        pc[active & ~chosen] = at + 1

    # ---- values

    def _read(self, operand: str) -> _Values | None:
        if operand in self.registers:
            return self.registers[operand]
        if re.fullmatch(r"-?(?:0x[0-9a-fA-F]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            return self.full * _as_int64(number)
        if operand in self.program.shared:
            return self.full * self.program.shared[operand]
        return None

    def _write(self, operand: str, value: _Values | None, chosen: _Mask) -> None:
        self.origins.pop(operand, None)
        if value is None:
            self.registers[operand] = None
            return
        old = self.registers.get(operand)
        # What a register held before in lanes that have never written it is never read.
        self.registers[operand] = np.where(chosen, value, 0 if old is None else old) if not chosen.all() else value

    def _execute(self, at: int, instruction: _Instruction, chosen: _Mask) -> None:
        operation, suffixes, operands = instruction.operation, instruction.suffixes, instruction.operands
        if operation in ("ld", "st", "atom", "red", "cp"):
            self._access(at, instruction, chosen)
            return
        if operation == "call":
            self.is_exact = False
            return
        if operation in ("bar", "barrier") and "warp" not in suffixes:
            self.barriers[chosen] += 1
        if operation in ("bar", "barrier", "membar", "fence", "pragma", "prefetch", "nanosleep") or not operands:
            return
        if operation == "mov" and operands[0].startswith("{"):
            self._unpack(operands, chosen)
            return
        if operation == "mov" and operands[1].startswith("{"):
            self._pack(operands, suffixes, chosen)
            return
        target = operands[0].split("|")[0]
        values = [self._read(operand) for operand in operands[1:]]
        result = self._compute(operation, suffixes, values)
        origin = self._origin(operands[1:], values) if result is None and operation in ("add", "mad", "mov", "cvta") else None
        self._write(target, result, chosen)
        if origin is not None:
            self.origins[target] = origin
        if "|" in operands[0]:
            self.registers[operands[0].split("|")[1]] = None

    def _origin(self, operands: Sequence[str], values: Sequence[_Values | None]) -> int | None:
        """A pointer to which something unknown is added points into its region still."""
        regions = (
            self.origins.get(operand) if value is None else self._region(int(value[0]))
            for operand, value in zip(operands, values, strict=True)
        )
        return next((region for region in regions if region is not None), None)

    def _unpack(self, operands: list[str], chosen: _Mask) -> None:
        parts = [part.strip() for part in operands[0].strip("{}").split(",")]
        value = self._read(operands[1])
        bits = 32 if len(parts) == 2 and parts[0].startswith("%r") and not parts[0].startswith("%rs") else 16
        for position, part in enumerate(parts):
            self._write(part, None if value is None else _wrapped(value >> (bits * position), False, bits), chosen)

    def _pack(self, operands: list[str], suffixes: tuple[str, ...], chosen: _Mask) -> None:
        parts = [self._read(part.strip()) for part in operands[1].strip("{}").split(",")]
        kind = _integer_type(suffixes)
        known = [part for part in parts if part is not None]
        if kind is None or len(known) < len(parts):
            self._write(operands[0], None, chosen)
            return
        bits = kind[1] // len(parts)
        packed = sum((_wrapped(part, False, bits) << (bits * position) for position, part in enumerate(known)), self.full * 0)
        self._write(operands[0], packed, chosen)

    def _compute(self, operation: str, suffixes: tuple[str, ...], values: list[_Values | None]) -> _Values | None:
        kind = _integer_type(suffixes)
        if operation in ("mov", "cvta"):
            return values[0]
        if operation == "setp" or operation in _LOGIC or operation in ("not", "selp"):
            return self._logic(operation, suffixes, values, kind)
        known = [value for value in values if value is not None]
        if kind is None or len(known) < len(values) or not known:
            return None
        if operation == "cvt":
            types = [found for suffix in suffixes if (found := _SIGN_AND_SIZE.fullmatch(suffix))]
            if any(found[1] == "f" for found in types):
                return None
            source, to = types[-1], types[0]
            narrow = _wrapped(known[0], source[1] == "s", int(source[2]))
            return _wrapped(narrow, to[1] == "s", int(to[2]))
        return self._arithmetic(operation, suffixes, known, *kind)

    def _logic(
        self, operation: str, suffixes: tuple[str, ...], values: list[_Values | None], kind: tuple[bool, int] | None
    ) -> _Values | None:
        if operation == "selp":
            a, b, predicate = values
            return None if a is None or b is None or predicate is None else np.where(predicate != 0, a, b)
        known = [value for value in values if value is not None]
        if len(known) < len(values):
            if operation == "and" and any((value == 0).all() for value in known):
                return self.full * 0
            return None
        if operation == "setp":
            if kind is None:
                return None
            a, b = (_wrapped(value, kind[0], kind[1]) for value in known[:2])
            found = next(suffix for suffix in suffixes if suffix in _COMPARE)
            if not kind[0] and kind[1] == 64:
                a, b = _unsigned(a), _unsigned(b)  # type: ignore[assignment]
            result: _Values = _COMPARE[found](a, b).astype(np.int64)
            joined = next((suffix for suffix in suffixes if suffix in _LOGIC), None)
            return _LOGIC[joined](result, known[2]) if joined and len(known) > 2 else result
        is_predicate = suffixes[-1] == "pred"
        if operation == "not":
            return (known[0] == 0).astype(np.int64) if is_predicate else _wrapped(~known[0], True, kind[1] if kind else 64)
        both: _Values = _LOGIC[operation](known[0], known[1])
        return both if is_predicate or kind is None else _wrapped(both, True, kind[1])

    def _arithmetic(self, operation: str, suffixes: tuple[str, ...], known: list[_Values], is_signed: bool, bits: int) -> _Values | None:
        a, *rest = (_wrapped(value, is_signed, bits) for value in known)
        result_bits = bits
        if operation in ("mul", "mad"):
            if "wide" in suffixes:
                result_bits = 2 * bits
            product = _multiply_high(a, rest[0], is_signed, bits) if "hi" in suffixes else a * rest[0]
            result = product if operation == "mul" else product + known[2]
        elif operation == "add":
            result = a + rest[0]
        elif operation == "sub":
            result = a - rest[0]
        elif operation == "neg":
            result = -a
        elif operation == "abs":
            result = np.abs(a)
        elif operation in ("div", "rem"):
            quotient = _divide(a, rest[0], is_signed)
            result = quotient if operation == "div" else a - quotient * rest[0]
        elif operation in ("min", "max"):
            result = np.minimum(a, rest[0]) if operation == "min" else np.maximum(a, rest[0])
        elif operation == "shl":
            result = _shift_left(a, known[1], bits)
        elif operation == "shr":
            result = _shift_right(a, known[1], is_signed, bits)
        elif operation == "bfe":
            result = _shift_right(a, known[1], False, bits) & ((1 << np.minimum(known[2], 62)) - 1)
        elif operation == "bfi":
            field_mask = ((1 << np.minimum(known[3], 62)) - 1) << known[2]
            result = (known[1] & ~field_mask) | ((a << known[2]) & field_mask)
        elif operation == "shf":
            low, high, amount = (_wrapped(value, False, 32) for value in known)
            whole, amount = (high << 32) | low, amount & 31
            result = whole >> amount if "r" in suffixes else _shift_right(whole << amount, self.full * 32, False, 64)
        else:
            return None
        # Kept sign-extended, as an address or an index is used; an unsigned 32-bit value stays what it is.
        return _wrapped(result, is_signed, result_bits)

    # ---- memory

    def _access(self, at: int, instruction: _Instruction, chosen: _Mask) -> None:
        suffixes, operands = instruction.suffixes, instruction.operands
        if "param" in suffixes:
            name, _, offset = operands[-1].strip("[]").partition("+")
            value = None if offset else self.parameters.get(name.strip())
            self._write_loaded(operands[0], value, chosen)
            return
        if instruction.operation in ("ld", "atom"):
            self._write_loaded(operands[0], None, chosen)
        if (instruction.operation == "cp" and not operands) or "wait_group" in suffixes:
            return
        if instruction.operation == "cp" and ("async" not in suffixes or "bulk" in suffixes or len(operands) < 3):
            self.is_exact = False
            return
        kind: Kind = "atomic"
        if instruction.operation == "cp":
            place, width, kind, space = operands[1], int(operands[2]), "load", "global"
        else:
            place = next((operand for operand in operands if operand.startswith("[")), "")
            space = "shared" if "shared" in suffixes else "local" if "local" in suffixes else "global"
            lanes = int(next((s[1:] for s in suffixes if re.fullmatch(r"v[248]", s)), 1))
            size = next((found[2] for s in reversed(suffixes) if (found := _SIGN_AND_SIZE.fullmatch(s))), "32")
            width = int(size) // 8 * lanes
            if instruction.operation in ("ld", "st"):
                kind = "load" if instruction.operation == "ld" else "store"
        if space == "local" or "const" in suffixes:
            return
        base, _, offset = place.strip("[]").partition("+")
        if base.strip() in self.program.others:
            return
        address = self._read(base.strip())
        if space == "global" and base.strip() in self.registers and address is None and self._is_constant_table(base.strip()):
            return
        if address is not None and offset:
            address = address + int(offset)
        tally = self.tallies.get(at)
        if tally is None:
            counts = [_zeros(len(self.blocks)) for _ in range(6)]
            where: Space = "shared" if space == "shared" else "global"
            tally = self.tallies[at] = _Tally(kind, where, width, counts[0], counts[1], counts[2], counts[3], counts[4], counts[5])
        if chosen.any():
            if address is None:
                tally.region = self.origins.get(base.strip())
            self._tally(tally, address, chosen)

    def _is_constant_table(self, register: str) -> bool:
        """Whether a register holds the address of a table of CUDA's own arithmetic."""
        return any(
            instruction.operation == "mov" and instruction.operands[0] == register and instruction.operands[-1] in self.program.others
            for instruction in self.program.instructions
        )

    def _write_loaded(self, operand: str, value: _Values | None, chosen: _Mask) -> None:
        for part in operand.strip("{}").split(","):
            self._write(part.strip(), value, chosen)

    def _tally(self, tally: _Tally, address: _Values | None, chosen: _Mask) -> None:
        width = tally.width
        if tally.space == "global" and address is not None:
            self._note_outside(tally, address[chosen])
        lanes_of = chosen.reshape(-1, WARP_SIZE).sum(axis=1)
        tally.requests += self._by_block(lanes_of > 0)
        tally.num_turns += 1
        if tally.num_turns > _TALLIED_TURNS:
            return
        tally.tallied += self._by_block(lanes_of > 0)
        if address is None:
            self.is_exact = tally.is_known = False
            tally.sectors += self._by_block(lanes_of * -(-width // SECTOR_BYTES))
            tally.ideal += self._by_block(-(-lanes_of * width // SECTOR_BYTES))
            return
        at_address = address[chosen]
        tally.is_aligned = tally.is_aligned and not (at_address % width).any()
        if tally.space == "shared":
            if self.is_certain and tally.kind != "atomic":
                self.shared.append((tally.kind == "store", width, at_address, self.warp[chosen], self.barriers[chosen]))
            self._tally_shared(tally, width, at_address, self.warp[chosen])
            return
        if tally.region is None:
            tally.region = self._region(int(at_address[0]))
        sectors = _sectors_of(at_address, width)
        owner = np.repeat(self.warp[chosen], sectors.shape[1])
        pairs = _unique_pairs(owner, sectors.ravel())
        tally.sectors += self._by_block(np.bincount(pairs[0], minlength=self.num_warps))
        # Lanes at one address share it.
        distinct = _unique_pairs(self.warp[chosen], at_address)
        lanes_apart = np.bincount(distinct[0], minlength=self.num_warps)
        tally.ideal += self._by_block(-(-lanes_apart * width // SECTOR_BYTES))
        tally.touched.append((self.block_index[chosen], at_address))

    def _note_outside(self, tally: _Tally, address: _Values) -> None:
        if not self.is_certain or not len(self.starts):
            return
        first, last = int(address.min()), int(address.max()) + tally.width
        if ((self.starts <= first) & (last <= self.ends)).any():
            return
        address = address[(address < _SHARED_BASE) | (address >= _SHARED_END)]  # a generic address of shared memory
        before, behind = self.starts - address[:, None], address[:, None] + tally.width - self.ends
        beyond = np.maximum(before, behind)
        is_outside = (beyond >= tally.width if tally.kind == "load" else beyond > 0).all(axis=1)
        nearest = beyond.argmin(axis=1)
        for region in np.unique(nearest[is_outside]).tolist():
            for is_behind, reach in ((True, behind), (False, before)):
                farthest = int(reach[is_outside & (nearest == region), region].max())
                key = tally.kind, region, is_behind
                if farthest > 0:
                    self.outside[key] = max(self.outside.get(key, 0), farthest)

    def _by_block(self, by_warp: npt.NDArray[Any]) -> _Values:
        summed: _Values = by_warp.reshape(len(self.blocks), -1).sum(axis=1, dtype=np.int64)
        return summed

    def _tally_shared(self, tally: _Tally, width: int, address: _Values, warp: _Values) -> None:
        """Wavefronts: a phase of 128 bytes a warp at best, and as many as the fullest bank has different words otherwise."""
        lanes_per_phase = max(1, WARP_SIZE * _BANK_BYTES // max(width, _BANK_BYTES))
        order = np.arange(len(address))
        first = np.searchsorted(warp, np.unique(warp))
        rank = order - np.repeat(first, np.diff(np.append(first, len(warp))))
        words = -(-width // _BANK_BYTES)
        word = (address[:, None] // _BANK_BYTES + np.arange(words)).ravel()
        phase = np.repeat(warp * WARP_SIZE + rank // lanes_per_phase, words)
        pairs = _unique_pairs(phase, word)
        banks = pairs[0] * _NUM_BANKS + pairs[1] % _NUM_BANKS
        found, counts = np.unique(banks, return_counts=True)
        phases = found // _NUM_BANKS
        starts = np.flatnonzero(np.diff(phases, prepend=-1))
        worst = np.maximum.reduceat(counts, starts)
        block = (phases[starts] // WARP_SIZE) * WARP_SIZE // self.padded
        np.add.at(tally.wavefronts, block, worst)
        np.add.at(tally.ideal_wavefronts, block, 1)

    # ---- all of the grid

    def _whole(self, by_block: _Values | npt.NDArray[np.float64]) -> float:
        """The ends as they are, and the blocks between them like those that were sampled."""
        if len(by_block) == self.num_blocks:
            return float(by_block.sum())
        return float(by_block[0] + by_block[-1] + by_block[1:-1].mean() * (self.num_blocks - 2))

    def _result(self) -> Walk:
        threads = len(self.blocks) * self.threads
        accesses = [self._access_of(at, tally, threads) for at, tally in sorted(self.tallies.items())]
        reads: dict[int, Touched] = {}
        writes: dict[int, Touched] = {}
        for region in range(len(self.regions)):
            for kinds, found in ((("load",), reads), (("store", "atomic"), writes)):
                if touched := self._touched(region, kinds):
                    found[region] = touched
        lanes_issued, lanes_active = int(self.warp_executed.sum()), int(self.executed.sum())
        units: dict[Unit, float] = dict.fromkeys(UNITS, 0.0)
        for instruction, count in zip(self.program.instructions, self.warp_executed, strict=True):
            for unit, cost in _unit_costs(instruction).items():
                units[unit] += cost * float(count) / threads
        return Walk(
            accesses=tuple(access for access in accesses if access.requests),
            reads=reads,
            writes=writes,
            units=units,
            lane_share=lanes_active / lanes_issued if lanes_issued else 1.0,
            has_loops=bool((self.executed > threads).any()),
            is_exact=self.is_exact,
            is_cut=self.is_cut,
            is_whole=len(self.blocks) == self.num_blocks and all((t.tallied == t.requests).all() for t in self.tallies.values()),
            outside=tuple(Outside(*key, nbytes) for key, nbytes in self.outside.items()),
            raced_bytes=self._raced_bytes(),
        )

    def _raced_bytes(self) -> int:
        """Between two barriers of a block, a byte that is written belongs to one warp; the lanes of a warp go together."""
        if not any(is_store for is_store, *_ in self.shared):
            return 0
        span = _SHARED_END - _SHARED_BASE
        columns: tuple[list[_Values], list[_Values], list[_Values]] = ([], [], [])
        for is_store, width, address, warp, passed in self.shared:
            scope = (warp * WARP_SIZE // self.padded) * (int(self.barriers.max()) + 1) + passed
            key = scope[:, None] * span + (address - _SHARED_BASE)[:, None] + np.arange(width)
            for column, values in zip(columns, (key.ravel(), np.repeat(warp, width), np.full(key.size, is_store)), strict=True):
                column.append(values)
        keys, warps, stores = (np.concatenate(column) for column in columns)
        found, place = np.unique(keys, return_inverse=True)
        first, last = np.full(len(found), self.num_warps), np.full(len(found), -1)
        np.minimum.at(first, place, warps)
        np.maximum.at(last, place, warps)
        is_written = np.bincount(place, weights=stores) > 0
        return int((is_written & (first < last)).sum())

    def _access_of(self, at: int, tally: _Tally, threads: int) -> PtxAccess:
        return PtxAccess(
            kind=tally.kind,
            space=tally.space,
            width_bytes=tally.width,
            region=tally.region,
            requests=self._whole(tally.requests),
            sectors=self._whole(tally.sectors * tally.turns_per_tallied),
            ideal_sectors=self._whole(tally.ideal * tally.turns_per_tallied),
            wavefronts=self._whole(tally.wavefronts * tally.turns_per_tallied),
            ideal_wavefronts=self._whole(tally.ideal_wavefronts * tally.turns_per_tallied),
            is_known=tally.is_known,
            is_repeated=bool(self.executed[at] > threads),
            is_aligned=tally.is_aligned,
        )

    def _region(self, address: int) -> int | None:
        return next((position for position, (start, end) in enumerate(self.regions) if start <= address < end), None)

    def _touched(self, region: int, kinds: tuple[str, ...]) -> Touched | None:
        tallies = [tally for tally in self.tallies.values() if tally.kind in kinds and tally.touched and tally.region == region]
        if not tallies:
            return None
        turns = sum(tally.requests for tally in tallies) / np.maximum(sum(tally.tallied for tally in tallies), 1)
        cells = []
        for width in {tally.width for tally in tallies}:
            touched = [part for tally in tallies if tally.width == width for part in tally.touched]
            blocks, addresses = _unique_pairs(*(np.concatenate(parts) for parts in zip(*touched, strict=True)))
            cells.append((width, blocks, addresses))
        grain = min(width for width, *_ in cells)
        grain = grain if all(not (addresses % grain).any() and not width % grain for width, _, addresses in cells) else 1
        spread = [
            (np.repeat(blocks, width // grain), (addresses[:, None] + np.arange(0, width, grain)).ravel())
            for width, blocks, addresses in cells
        ]
        blocks, places = _unique_pairs(*(np.concatenate(parts) for parts in zip(*spread, strict=True)))
        sectors = _sectors_of(places, grain)
        sector_blocks, _ = _unique_pairs(np.repeat(blocks, sectors.shape[1]), sectors.ravel())
        num = len(self.blocks)
        counts = (np.bincount(blocks, minlength=num) * grain, np.bincount(sector_blocks, minlength=num))
        nbytes, num_sectors = (self._whole(count * turns) for count in counts)
        return Touched(nbytes, num_sectors, int(places.max()) + grain, bool((blocks == num - 1).any()))


def _zeros(size: int) -> _Values:
    return np.zeros(size, dtype=np.int64)


def _unique_pairs(owner: _Values, value: _Values) -> tuple[_Values, _Values]:
    """Each pair once, owners not negative: sorted as one number, which is ten times as fast as by columns or by hashes."""
    least = value.min() if value.size else 0
    span = (value.max() if value.size else 0) - least + 1
    keys = np.sort(owner * span + (value - least))
    keys = keys[np.flatnonzero(np.diff(keys, prepend=-1))]
    return keys // span, keys % span + least


def _sectors_of(address: _Values, width: int) -> _Values:
    """The sectors of each access, one row an access."""
    first = address[:, None] // SECTOR_BYTES
    if width <= SECTOR_BYTES and not (address % width).any():  # aligned: within one sector
        return first
    last = (address[:, None] + width - 1) // SECTOR_BYTES
    most = int((last - first).max()) + 1
    spread: _Values = np.minimum(first + np.arange(most), last)
    return spread
