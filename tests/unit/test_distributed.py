"""The cases of tests/dtensor/steps.py in two processes of gloo."""

import pytest

from tests.dtensor import steps
from tests.dtensor.jobs import run_cases


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(2, "cpu", tmp_path_factory.mktemp("steps"), steps.__name__)


@pytest.mark.parametrize("name", steps.CASES)
def test_two_processes(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]
