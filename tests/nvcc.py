"""The nvcc that tests compile with: where there is none, they are skipped, and fail in CI."""

from __future__ import annotations

import os

import pytest

from wideload.errors import CompileError
from wideload.ladder.toolkit import Nvcc, find_host_compiler, find_nvcc


@pytest.fixture(scope="session")
def nvcc() -> Nvcc:
    try:
        find_host_compiler()
        return find_nvcc()
    except CompileError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
