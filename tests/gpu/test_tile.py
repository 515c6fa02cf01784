"""Tile kernels on a GPU against torch's own: every item size, edges that are no multiple of anything, offsets, pitches, permutes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import wideload as wl
from tests.gpu.test_dense import DEVICE, assert_same, random
from wideload.fused import FusedFunction

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_blocks")]

DTYPES = (torch.int8, torch.bfloat16, torch.float32, torch.int64)
SIZES = ((256, 512), (272, 400), (277, 391), (1031, 769), (65, 127), (129, 2050))

copy = wl.fuse(lambda x: x.clone(memory_format=torch.contiguous_format), name="copy")
add = wl.fuse(lambda x, w: x + w, name="add")


def held(*shape: int, dtype: torch.dtype, offset: int = 0, pitch: int = 0) -> torch.Tensor:
    """Random values in rows ``pitch`` elements longer than they are, from element ``offset`` of the storage on."""
    rows = random(*shape[:-1], shape[-1] + pitch, dtype=dtype)
    store = torch.cat((rows.new_zeros(offset), rows.flatten()))
    return store[offset:].view(rows.shape)[..., : shape[-1]]


def check(f: FusedFunction, *args: torch.Tensor) -> str:
    (kernel,) = f.plan(*args).kernels
    family: str = kernel.plan.variant.family
    assert_same(f(*args), f.__wrapped__(*args), [(a.shape, a.stride(), a.storage_offset()) for a in args])
    return family


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transposed_copy(dtype: torch.dtype, size: tuple[int, int]) -> None:
    for offset in range(9):
        for pitch in (0, 1, 3, 8):
            assert check(copy, held(*size, dtype=dtype, offset=offset, pitch=pitch).t()) == "tile"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_transposed_operand_beside_one_that_is_not(dtype: torch.dtype) -> None:
    for rows, columns in SIZES:
        for offset in (0, 1, 8):
            turned = held(columns, rows, dtype=dtype, offset=offset, pitch=offset).t()
            assert check(add, held(rows, columns, dtype=dtype, offset=3 * offset % 8), turned) == "tile"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_out_in_rows_of_any_alignment_and_nothing_beside_it(dtype: torch.dtype) -> None:
    for rows, columns in SIZES:
        for offset in range(4):
            for pitch in (1, 8):
                x, poison = held(columns, rows, dtype=dtype, offset=offset).t(), random(rows + 2, columns + pitch, dtype=dtype)
                room = poison.clone()
                out = room[1:-1, :columns]
                copy(x, out=out)
                assert_same(out, poison[1:-1, :columns].copy_(x), (offset, pitch))
                assert_same(room, poison, (offset, pitch))


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((2, 3, 70, 90), (0, 1, 3, 2)),
        ((2, 5, 64, 80), (0, 3, 1, 2)),
        ((2, 64, 5, 72), (0, 3, 2, 1)),
        ((3, 48, 10, 10), (0, 2, 3, 1)),
        ((3, 10, 10, 48), (0, 3, 1, 2)),
        ((40, 3, 2, 65), (3, 2, 1, 0)),
        ((4, 1024, 16, 128), (0, 3, 2, 1)),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_permuted_copies(dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...]) -> None:
    check(copy, random(*shape, dtype=dtype).permute(order))


MIXES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], tuple[torch.Tensor, ...]]]] = {
    "half and float": (lambda x, w: x + w, lambda: (held(500, 300, dtype=torch.float32), held(300, 500, dtype=torch.bfloat16).t())),
    "float and half": (lambda x, w: x + w, lambda: (held(500, 300, dtype=torch.bfloat16), held(300, 500, dtype=torch.float32).t())),
    "a row": (
        lambda x, b: (x + b).contiguous(),
        lambda: (held(300, 500, dtype=torch.bfloat16).t(), held(300, dtype=torch.bfloat16, offset=1)),
    ),
    "a column": (lambda x, b: (x + b).contiguous(), lambda: (held(300, 500, dtype=torch.bfloat16).t(), held(500, 1, dtype=torch.bfloat16))),
    "a mask": (
        lambda m, x, y: torch.where(m, x, y),
        lambda: (
            random(300, 500, dtype=torch.int8).t() > 0,
            held(500, 300, dtype=torch.bfloat16),
            held(300, 500, dtype=torch.bfloat16).t(),
        ),
    ),
    "channels_last": (
        lambda x, w: x + w,
        lambda: (
            random(4, 64, 30, 30, dtype=torch.bfloat16).to(memory_format=torch.channels_last),
            random(4, 64, 30, 30, dtype=torch.bfloat16),
        ),
    ),
}


@pytest.mark.parametrize("name", MIXES)
def test_mixes(name: str) -> None:
    function, make = MIXES[name]
    torch.manual_seed(0)
    assert check(wl.fuse(function, name="mix"), *make()) == "tile"


@pytest.mark.big(8)
def test_more_than_2_to_the_31_elements() -> None:
    x = torch.randint(-100, 100, ((1 << 16) + 3, (1 << 15) + 5), dtype=torch.int8, device=DEVICE).t()
    check(copy, x)
