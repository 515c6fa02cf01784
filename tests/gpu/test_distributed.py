"""The cases of tests/dtensor/steps.py with a GPU a process."""

import pytest

from tests.dtensor import steps
from tests.dtensor.jobs import run_cases

pytestmark = pytest.mark.gpus(2)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases(2, "cuda", tmp_path_factory.mktemp("steps"), steps.__name__)


@pytest.mark.parametrize("name", steps.CASES)
def test_two_gpus(outcomes: dict[str, str], name: str) -> None:
    assert not outcomes[name], outcomes[name]
