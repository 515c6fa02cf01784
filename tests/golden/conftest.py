"""``pytest tests/golden --update-golden`` writes the files that the tests compare with; without it a missing file is a failure."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden CUDA sources with what is generated now")


@pytest.fixture
def compare_with_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """A function of a name and a text: raises unless the file of that name has just this text."""

    def compare(name: str, text: str) -> None:
        path = FOLDER / f"{name}.cu"
        if request.config.getoption("--update-golden", default=False):  # unknown where pytest starts from another folder
            path.write_text(text, encoding="utf-8")
            return
        if not path.exists():
            raise AssertionError(f"{path} is missing: pytest tests/golden --update-golden writes it; then read it, and commit it")
        golden = path.read_text(encoding="utf-8")
        if text != golden:
            lines = difflib.unified_diff(golden.splitlines(), text.splitlines(), "golden", "generated now", lineterm="", n=2)
            raise AssertionError(f"{name}.cu has changed; --update-golden accepts it\n" + "\n".join(lines))

    return compare
