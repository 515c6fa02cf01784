from pathlib import Path

import pytest
import torch

import wideload as wl
from tests.dtensor.jobs import CASES, run_cases
from wideload.sharding import Operand, find_sharding, is_linear


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(4, "cpu", tmp_path_factory.mktemp("dtensor"))


@pytest.mark.parametrize("name", CASES)
def test_four_processes(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]


@pytest.mark.parametrize(
    ("f", "terms", "linear"),
    [
        (lambda x, y: x + y, {0, 1}, True),
        (lambda x, y: x + y, {0}, False),
        (lambda x, y: torch.sub(x, y, alpha=2), {0, 1}, True),
        (lambda x, y: 2 * x / y, {0}, True),
        (lambda x, y: x / y, {1}, False),
        (lambda x, y: x * y, {0, 1}, False),
        (lambda x, y: x + 1, {0}, False),
        (lambda x, y: -x.to(torch.float64) * torch.exp(y), {0}, True),
        (lambda x, y: x.to(torch.int32), {0}, False),
        (lambda x, y: torch.relu(x), {0}, False),
        (lambda x, y: (x * 2, y * 2), {0}, False),
        (lambda x, y: (x * 2, y * 2), {0, 1}, True),
    ],
)
def test_sums_stay_pending_where_the_expression_is_linear(f, terms, linear) -> None:
    expr = wl.fuse(f).plan(torch.ones(3), torch.ones(3), target="h200").expr
    assert is_linear(expr, frozenset(terms)) is linear


def test_bools_are_no_terms() -> None:
    expr = wl.fuse(lambda x, y: x + y).plan(torch.ones(3, dtype=torch.bool), torch.ones(3, dtype=torch.bool), target="h200").expr
    assert not is_linear(expr, frozenset({0, 1}))


def test_the_largest_operand_is_followed() -> None:
    from torch.distributed.tensor import Replicate, Shard

    expr = wl.fuse(lambda x, y: x * y).plan(torch.ones(4, 6), torch.ones(6), target="h200").expr
    operands = Operand((6,), (Shard(0),)), Operand((4, 6), (Shard(0),))
    found = find_sharding(expr, operands, (4, 6), 1)
    assert found is not None
    assert found.results == (Shard(0),)
    assert found.operands == ((Replicate(),), (Shard(0),))
    found = find_sharding(expr, operands, (4, 6), 1, unsplit=frozenset({0}))
    assert found is not None
    assert found.results == (Shard(1),)


def test_fused_functions_do_not_import_dtensor() -> None:
    import subprocess
    import sys

    code = (
        "import sys, torch, wideload as wl; wl.fuse(lambda x: x + 1)(torch.ones(2)); assert 'torch.distributed.tensor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
