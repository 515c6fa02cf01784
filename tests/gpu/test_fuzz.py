"""A bounded fuzz on a GPU against eager CUDA: fixed seeds, fresh ones, and a proof that it finds a wrong kernel in each family."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from tests.fuzz import check
from tests.fuzz.jobs import run_share
from wideload import execute
from wideload.emit.kernel import emit_kernel
from wideload.lower import Program
from wideload.plan import Variant

pytestmark = pytest.mark.gpu

NUM_SHARES = 24
"""Of the pool of programs; the kernels of a few programs meet more layouts than few kernels of all."""
DRAWS, KERNELS = 800, 60
FRESH = random.SystemRandom().randrange(2**32)


@pytest.fixture(autouse=True)
def _new_functions() -> Iterator[None]:
    """A fused function keeps its kernels, and must not keep those with a fault."""
    check._fused.cache_clear()
    yield
    check._fused.cache_clear()


def assert_none(seed: int, share: int) -> None:
    done = run_share("cuda", seed, DRAWS, job=share, jobs=NUM_SHARES, max_kernels=KERNELS)
    assert not done.mismatches, "\n\n".join((f"seeds from {seed}", *done.reports))
    assert done.draws == DRAWS


@pytest.mark.parametrize("share", [0, 6, 10, 12, 13, 20])
def test_kernels_of_fixed_seeds(share: int) -> None:
    assert_none(0, share)


def test_kernels_of_fresh_seeds() -> None:
    print(f"fresh seeds from {FRESH}")
    assert_none(FRESH, FRESH % NUM_SHARES)


@pytest.mark.parametrize(
    ("family", "pattern", "fault"),
    [
        # Of those that stay inside their operands: a fault of the GPU would end the process.
        *((family, r"out = (\w+);\n}", r"out = \1 + 1;\n}") for family in ("dense", "strips", "rows", "pitched")),
        ("tile", r"line0 \+ \(int\)along", "line0 + (int)(along ^ 1)"),
        ("strided", r"first \+ k \* 128", "first + k * 127"),
    ],
)
def test_a_fault_in_the_text_of_a_family_is_found(monkeypatch: pytest.MonkeyPatch, family: str, pattern: str, fault: str) -> None:
    def emit(program: Program, variant: Variant) -> str:
        return re.sub(pattern, fault, emit_kernel(program, variant))

    monkeypatch.setattr(execute, "emit_kernel", emit)
    assert run_share("cuda", 0, 20, family=family, max_mismatches=1).mismatches == 1
