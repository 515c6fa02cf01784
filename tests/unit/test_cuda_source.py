"""Includes of files beside a CUDA file are put in its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from wideload.cuda_source import read_cuda
from wideload.errors import CompileError


def test_files_beside_it_are_put_in_once(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include <cuda_bf16.h>\n#include "b.cuh"\n  #  include "c.cuh" // again\nint a;\n')
    (tmp_path / "b.cuh").write_text('#include "c.cuh"\nint b;\n')
    (tmp_path / "c.cuh").write_text("int c;\n")
    assert read_cuda(tmp_path, "a.cu").split("\n") == ["#include <cuda_bf16.h>", "int c;", "", "int b;", "", "", "int a;", ""]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.cu").write_text('#include "none.cuh"\n')
    with pytest.raises(CompileError, match=r'a\.cu has #include "none\.cuh", and none\.cuh cannot be read'):
        read_cuda(tmp_path, "a.cu")
    (tmp_path / "b.cu").write_bytes(b"\xff\xfe")
    with pytest.raises(CompileError, match=r"b\.cu cannot be read"):
        read_cuda(tmp_path, "b.cu")
