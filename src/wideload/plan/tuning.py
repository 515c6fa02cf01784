"""Turns an architecture into how kernels are cut for it: accesses and elements a thread, threads a block, bytes of a tile.

One frozen table, each record with where its numbers come from; knows no GPU by name, no file, and not what the numbers do to a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType

from wideload.errors import DeviceError
from wideload.plan.variant import THREADS

__all__ = ["ALLOWED", "BUILT_IN", "DEFAULT", "Tuning", "built_in_tuning"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What the planner chooses by architecture; ``source`` says what it rests on. Any choice gives right kernels: they differ in speed.

    What is one rule for all is not here: the rows of a strip and from which size on there are strips (`wideload.plan.strips`), the blocks
    an SM that registers leave room for (`wideload.plan.variant`), the chunks of lists (`wideload.plan_foreach`).
    """

    arch: str
    source: str
    accesses: int = 1
    """Of 16 bytes, of its widest operand, that a thread makes where a result is as wide. On an H200 one is best: bf16 add 4.33 TB/s with
    one, with 2, 4 and 8 4.28, 4.27 and 4.18."""
    narrowing_accesses: int = 2
    """The same where all results are narrower: its stores are wider then. On an H200, of the wall: fp32 to int8 0.991 against 0.934 with
    one, int64 to bf16 0.991 and 0.935, fp32 to bf16 0.993 and 0.983; four as two. Where a result is as wide, two lose: bf16 to fp32
    0.768 against 1.003."""
    threads: int = THREADS
    """A block, but of tiles, lists and sums."""
    strided_elements: int = 4
    """Elements that a thread of a strided kernel has in flight: its loads are narrow, so that one would leave the memory idle."""
    tile_bytes: int = 32768
    """Shared memory of a block of a ``tile`` kernel, at most: 128 x 128 elements of 2 bytes, with which a transposed copy of bf16 measured
    4.00 TB/s on an H200 (64 x 64: 3.70, 128 x 64: 3.84). Two blocks fit on an SM of every architecture (sm_75 has 64 KiB), four on sm_90,
    where threads are the limit. A halo adds up to an eighth."""
    tile_threads: int = 512
    """Threads of such a block, at most: four 16-byte loads each (512 to 1024 threads measured equal on an H200; two blocks of 1024 would
    leave 32 registers a thread)."""

    def __post_init__(self) -> None:
        """Raise ``DeviceError`` for a choice that is not among the `ALLOWED`."""
        for name, allowed in ALLOWED.items():
            if getattr(self, name) not in allowed:
                listed = ", ".join(map(str, allowed))
                raise DeviceError(f"{name} of a tuning for {self.arch} is {getattr(self, name)!r}; allowed: {listed}")

    @property
    def choices(self) -> dict[str, int]:
        """The numbers, by their names."""
        return {name: value for name, value in asdict(self).items() if name in ALLOWED}

    def with_choices(self, choices: Mapping[str, int]) -> Tuning:
        """The same with other numbers for those named. Raises ``DeviceError`` as above, ``TypeError`` for a name that is none."""
        return Tuning(self.arch, self.source, **{**self.choices, **choices})


ALLOWED: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "accesses": (1, 2, 4),
        "narrowing_accesses": (1, 2, 4),
        "threads": (64, 128, 256, 512),
        "strided_elements": (1, 2, 4, 8),
        "tile_bytes": (16384, 32768),
        "tile_threads": (256, 512),
    }
)
"""What kernels can be cut by: powers of two. A block of more tile bytes would need shared memory that has to be asked for, and more
threads a block would leave an SM's registers to fewer than two."""

_UNMEASURED = "public figures, not measured: "

BUILT_IN: Mapping[str, Tuning] = MappingProxyType(
    {
        tuning.arch: tuning
        for tuning in (
            Tuning(
                "sm_75",
                _UNMEASURED
                + "CUB's DeviceTransform wants 12 KiB in flight an SM on sm_70; 1024 threads with one access have 16 an operand",
            ),
            Tuning(
                "sm_80",
                _UNMEASURED + "CUB's DeviceTransform wants 16 KiB in flight an SM; 2048 threads with one access have 32 an operand. "
                "ATen gives a thread one 16-byte access of bf16, in blocks of 128",
            ),
            Tuning("sm_86", _UNMEASURED + "as sm_80; 1536 threads with one access have 24 KiB in flight an operand"),
            Tuning("sm_87", _UNMEASURED + "as sm_86"),
            Tuning("sm_89", _UNMEASURED + "as sm_86"),
            Tuning(
                "sm_90",
                "measured on H200: results/dense-h200-455f4e3.json and results/layouts-h200-455f4e3.json with these choices; the figures "
                "of the others stand with each choice",
            ),
            Tuning(
                "sm_100",
                _UNMEASURED + "CUB's DeviceTransform wants 64 KiB in flight an SM; 2048 threads with one access have 32 an operand. "
                "32-byte accesses, which no kernel has yet, gain 2 to 12 % where others measured them",
            ),
            Tuning("sm_103", _UNMEASURED + "as sm_100"),
            Tuning("sm_110", _UNMEASURED + "as sm_86"),
            Tuning(
                "sm_120",
                _UNMEASURED + "as sm_86: 170 SMs on 1.8 TB/s need less in flight each than the 132 of an H200 on 4.8",
            ),
            Tuning("sm_121", _UNMEASURED + "as sm_120"),
        )
    }
)
"""By architecture, the oldest first."""

DEFAULT = BUILT_IN["sm_90"]


def built_in_tuning(arch: str) -> Tuning:
    """The record of ``arch``; of one that has none, that of the newest older one.

    >>> built_in_tuning("sm_90").threads, built_in_tuning("sm_101").arch
    (128, 'sm_100')
    """
    oldest, *others = BUILT_IN.values()
    older = [tuning for tuning in others if _number(tuning.arch) <= _number(arch)]
    return older[-1] if older else oldest


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))
