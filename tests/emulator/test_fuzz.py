"""A bounded fuzz: fixed seeds, fresh ones, and proofs that it finds a wrong kernel in each family. ``python -m tests.fuzz`` runs longer."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.fuzz import check
from tests.fuzz.check import Mismatch, Session
from tests.fuzz.jobs import Share, run_share
from wideload import fused, planned
from wideload.emit.kernel import emit_kernel
from wideload.reference import evaluate_expr

NUM_SHARES = 24
"""Of the pool of programs; the kernels of a few programs meet more layouts than few kernels of all."""
FIXED = (6, 10, 12, 13, 20)
DRAWS, KERNELS = 500, 20
FAMILIES = {"dense", "strips", "rows", "pitched", "tile", "strided"}
FRESH = random.SystemRandom().randrange(2**32)


def assert_none(share: Share, note: str = "") -> None:
    assert not share.mismatches, "\n\n".join((note, *share.reports))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A fused function keeps its kernels, and must not keep those with a fault."""
    check._fused.cache_clear()
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # operands are small, and tests run side by side
    yield
    torch.set_num_threads(num_threads)
    check._fused.cache_clear()


@pytest.mark.parametrize("share", FIXED)
def test_kernels_of_fixed_seeds(share: int) -> None:
    done = run_share("emulator", 0, DRAWS, job=share, jobs=NUM_SHARES, max_kernels=KERNELS)
    assert_none(done)
    assert done.draws == DRAWS


def test_draws_reach_every_family(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_run(*_: Any) -> Any:
        raise Mismatch("planned alone")

    monkeypatch.setattr(Session, "_call", not_run)
    share = run_share("emulator", 0, 1000)
    assert {family for family, count in share.families.items() if count >= 20} == FAMILIES


def test_kernels_of_fresh_seeds() -> None:
    share = FRESH % NUM_SHARES
    print(f"fresh seeds from {FRESH}, share {share} of {NUM_SHARES}")
    assert_none(run_share("emulator", FRESH, DRAWS, job=share, jobs=NUM_SHARES, max_kernels=KERNELS), f"fresh seeds from {FRESH}")


def test_reference_of_fixed_and_fresh_seeds() -> None:
    for seed in (0, FRESH):
        share = run_share("reference", seed, 1500)
        assert_none(share, f"seeds from {seed}")
        assert share.refused > 0


# ---- planted faults


def replaced(emit: Callable[..., str], pattern: str, fault: str) -> Callable[..., str]:
    return lambda *args: re.sub(pattern, fault, emit(*args))


@pytest.mark.parametrize(
    ("family", "pattern", "fault"),
    [
        ("dense", r"i \+ \d+ <= n;", "true;"),
        ("rows", r"e \+ (\d+) <= \(int\)n;", r"e + \1 <= (int)n + 1;"),
        ("strips", r"(store_vector\(.*)\+ r\)", r"\1+ (r ^ 1))"),
        ("strips", r"const unsigned column = at0 \*", "const unsigned column = 0 * at0 *"),
        ("pitched", r"% (\d+);  // the row's start", r"% \1 + 1;  // the row's start"),
        ("tile", r"line0 \+ \(int\)along", "line0 + (int)(along ^ 1)"),
        ("strided", r"first \+ k \* 128", "first + k * 127"),
        ("strided", r"\* \(unsigned\)size0;", "* (unsigned)size0 + 1;"),
        ("strided", r"const unsigned at0 = i -", "const unsigned at0 = i + 0 *"),
    ],
)
def test_a_fault_in_the_text_of_a_family_is_found(monkeypatch: pytest.MonkeyPatch, family: str, pattern: str, fault: str) -> None:
    monkeypatch.setattr(planned, "emit_kernel", replaced(emit_kernel, pattern, fault))
    share = run_share("emulator", 0, 40, family=family, max_mismatches=1)
    assert share.mismatches == 1
    assert re.search(r"\nreproduce: python -m tests\.fuzz --backend emulator --draws 1 --seed \d+$", share.reports[0])


def test_a_fault_of_the_reference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return [result.roll(1) for result in evaluate_expr(*args, **kwargs)]

    monkeypatch.setattr(fused, "evaluate_expr", off_by_one)
    assert run_share("reference", 0, 100).mismatches > 20


def test_a_write_beside_an_output_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the eight bytes before it, which no sanitizer sees where they are the storage's own."""
    call = Session._call

    def spill(self: Session, case: Any, f: Any, args: list[Any], out: Any) -> Any:
        result = call(self, case, f, args, out)
        if isinstance(out, torch.Tensor) and out.storage_offset() and out.numel() and case.out == "fresh":
            before = out.as_strided((1,), (1,), out.storage_offset() - 1)
            before.copy_(before == 0)
        return result

    monkeypatch.setattr(Session, "_call", spill)
    share = run_share("reference", 0, 200)
    assert any("bytes around it were changed" in report for report in share.reports)


def test_a_missing_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "check_outputs", lambda *args: False)
    share = run_share("reference", 0, 1000)
    assert any("was accepted, but" in report for report in share.reports)
