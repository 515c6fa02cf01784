"""Copies of arguments, byte counts and random data, each against what the memory holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from wideload.errors import LayoutError
from wideload.measure.operands import Operands, count_cells, describe_operands, held_tensors, random_tensor, same_bits, unique_bytes

ALIGNMENT_BYTES = 64


def copies_of(*args: Any, out: Any = None, **kwargs: Any) -> Operands:
    return Operands(["x", "y", "z"], args, kwargs, out)


# ---- counting


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((), ()),
        ((7,), (1,)),
        ((7,), (3,)),
        ((3, 4), (4, 1)),
        ((3, 4), (0, 1)),
        ((3, 4), (1, 0)),
        ((5, 3), (1, 1)),
        ((10, 3), (2, 2)),
        ((2, 0), (1, 1)),
    ],
)
def test_cells_are_the_distinct_offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    grid = torch.zeros(shape, dtype=torch.int64)
    for dim, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        grid += (torch.arange(size) * stride).view([-1 if d == dim else 1 for d in range(len(shape))])
    assert count_cells(shape, strides) == len(set(grid.reshape(-1).tolist()))


def test_broadcast_operands_count_once() -> None:
    assert unique_bytes([torch.empty(1000, 1024), torch.empty(1024).expand(1000, 1024)]) == 4 * (1000 * 1024 + 1024)


def test_shared_memory_counts_once() -> None:
    x = torch.empty(101, dtype=torch.bfloat16)
    assert unique_bytes([x, x]) == 202
    assert unique_bytes([x[:-1], x[1:]]) == 202
    packed = torch.empty(8, 64)
    assert unique_bytes(packed.chunk(2, dim=-1)) == 8 * 64 * 4
    assert unique_bytes([packed[:, :32]]) == 8 * 32 * 4


def test_meta_tensors_are_counted_too() -> None:
    assert unique_bytes([torch.empty(10, device="meta"), torch.empty(10, device="meta")]) == 80


# ---- copying


@pytest.mark.parametrize(
    "make",
    [
        lambda base: base[1:],
        lambda base: base[::3],
        lambda base: base[:60].view(6, 10).t(),
        lambda base: base[:60].view(6, 10)[:, 1:-1],
        lambda base: base[5],
        lambda base: base[3:4].expand(7, 1),
        lambda base: base[:0],
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex128])
def test_copy_has_layout_alignment_and_values(make: Any, dtype: torch.dtype) -> None:
    source = make(random_tensor((97,), dtype))
    (copy,) = copies_of(source).args
    assert copy.dtype == source.dtype
    assert copy.shape == source.shape
    assert copy.stride() == source.stride()
    assert same_bits(copy, source)
    if source.numel():
        assert copy.data_ptr() % ALIGNMENT_BYTES == source.data_ptr() % ALIGNMENT_BYTES
        assert copy.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_views_of_one_storage_stay_views_of_one_storage() -> None:
    packed = random_tensor((4, 10))
    gate, up = packed.chunk(2, dim=-1)
    operands = copies_of(gate, up, {"again": [gate]}, out=packed)
    copied_gate, copied_up, rest = operands.args
    assert copied_up.data_ptr() - copied_gate.data_ptr() == up.data_ptr() - gate.data_ptr()
    assert rest["again"][0] is copied_gate
    assert operands.out.data_ptr() == copied_gate.data_ptr()
    copied_gate.zero_()
    assert operands.out[:, :5].eq(0).all()
    assert not packed.eq(0).any(), "the caller's memory is only read"


def test_parameters_and_gradients_stay_what_they_are() -> None:
    parameter, leaf = torch.nn.Parameter(torch.ones(3)), torch.ones(3, requires_grad=True)
    first, second, number = copies_of(parameter, leaf, 3).args
    assert isinstance(first, torch.nn.Parameter)
    assert second.requires_grad
    assert second.is_leaf
    assert number == 3


def test_what_cannot_be_copied_is_named() -> None:
    sparse = torch.ones(3).to_sparse()
    operands = copies_of(torch.ones(3), sparse, torch.ones(2, dtype=torch.complex64).conj())
    assert operands.uncopied == ("y", "z")
    assert operands.args[1] is sparse


def test_changes_are_found_and_undone() -> None:
    x, y = random_tensor((8,)), random_tensor((8,))
    x[0] = float("nan")
    operands = copies_of(x, y)
    assert operands.changed() == ()
    operands.args[1][2] = -0.0
    operands.args[1][3] = 5.0
    assert operands.changed() == ("y",)
    assert 0 < operands.num_changed_bytes() <= 8
    operands.restore()
    assert operands.changed() == ()


def test_a_change_beside_a_view_is_no_change_of_the_view() -> None:
    base = random_tensor((4, 4))
    operands = copies_of(base[:, :2], base[:, 2:])
    operands.args[1].zero_()
    assert operands.changed() == ("y",)


def test_values_are_permuted_alike_in_every_copy() -> None:
    x = random_tensor((5, 7), torch.float16)
    operands = copies_of(x)
    other = operands.replicate()
    assert operands.permute()
    assert other.permute()
    assert operands.same_as(other)
    assert torch.equal(operands.args[0].reshape(-1).sort().values, x.reshape(-1).sort().values)
    assert not torch.equal(operands.args[0], x)


def test_equal_values_are_halved_and_zeros_cannot_change() -> None:
    ones, zeros, flags = copies_of(torch.ones(4)), copies_of(torch.zeros(4)), copies_of(torch.ones(4, dtype=torch.bool))
    assert ones.permute()
    assert ones.args[0].tolist() == [0.5] * 4
    assert not zeros.permute()
    assert not flags.permute()


def test_values_of_other_arguments_are_taken_alike_in_every_copy() -> None:
    def build(seed: int) -> tuple[torch.Tensor, ...]:
        gate, up = random_tensor((4, 6), torch.bfloat16, seed=seed).chunk(2, -1)
        return gate, up, random_tensor((5,), seed=seed).expand(3, 5)

    first, second = build(1), build(2)
    operands = Operands(["gate", "up", "x"], first, {}, None, second)
    copy, versions = operands.replicate(), [tensor._version for tensor in operands.args]
    assert operands.permute()
    assert copy.permute()
    assert operands.same_as(copy)
    assert all(same_bits(tensor, other) for tensor, other in zip(operands.args, second, strict=True))
    assert [tensor._version for tensor in operands.args] == versions, "by which a cache could tell"
    operands.restore()
    assert operands.changed() == ()
    assert not Operands(["gate", "up", "x"], first, {}, None, first).permute(), "nothing changed"


@pytest.mark.parametrize(
    ("others", "told"),
    [
        ([], "no x"),
        ([torch.ones(3)], r"x f32\[3\]"),
        ([torch.ones(4, dtype=torch.float64)], r"x f64\[4\]"),
        ([torch.ones(8)[::2]], r"strides \[2\]"),
        ([[torch.ones(4)]], "no x"),
        ([torch.ones(4), torch.ones(4)], r"y f32\[4\]"),
    ],
)
def test_other_arguments_are_of_the_same_layouts(others: list[Any], told: str) -> None:
    with pytest.raises(LayoutError, match=f"recheck_on has .*{told}.*; allowed is the layout of"):
        Operands(["x", "y"], (torch.ones(4),), {}, None, others)


def test_elements_that_share_memory_take_no_other_values() -> None:
    windows = torch.arange(8.0).unfold(0, 3, 1)
    with pytest.raises(LayoutError, match=r"elements of x .* share memory"):
        Operands(["x"], (windows,), {}, None, (windows,))


def test_same_bits_tells_zeros_apart_and_nan_the_same() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert same_bits(torch.tensor([1 + 2j], dtype=torch.complex128), torch.tensor([1 + 2j], dtype=torch.complex128))


# ---- describing and finding


def test_description_shows_what_is_not_dense() -> None:
    base = torch.empty(10, 8, dtype=torch.bfloat16)
    infos = describe_operands(["x"], (base[1:, 2:], 3.5), {"flag": True})
    assert list(map(str, infos)) == ["x bf16[9, 6] strides [8, 1] @10", "argument 1=3.5", "flag=True"]


WEIGHT = torch.ones(3)


def scale(x: torch.Tensor) -> torch.Tensor:
    return x * WEIGHT


def test_tensors_that_a_callable_holds_are_found() -> None:
    y, hidden = torch.ones(2), {"state": [torch.ones(4)]}

    def step(x: torch.Tensor, bias: torch.Tensor = y) -> torch.Tensor:
        return scale(x) + bias + hidden["state"][0]

    names = dict(held_tensors(step))
    assert names["WEIGHT"] is WEIGHT
    assert names["step[0]"] is y
    assert names['hidden["state"][0]'] is hidden["state"][0]
    assert [name for name, _ in held_tensors(torch.nn.Linear(2, 2))] == ["self.weight", "self.bias"]
    assert [tensor for _, tensor in held_tensors(functools.partial(torch.add, y))] == [y]
    assert held_tensors(torch.add) == ()


# ---- making


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.uint16,
        torch.int64,
        torch.complex64,
        torch.complex32,
    ],
)
def test_random_data_has_no_zeros_and_is_repeatable(dtype: torch.dtype) -> None:
    x = random_tensor((100, 50), dtype, seed=3)
    values = x.to(torch.complex128 if dtype.is_complex else torch.float64)
    assert not values.eq(0).any()
    assert len(set(values.reshape(-1).tolist())) > 50
    assert same_bits(x, random_tensor((100, 50), dtype, seed=3))
    assert not same_bits(x, random_tensor((100, 50), dtype, seed=4))


def test_random_data_takes_strides_and_offset() -> None:
    x = random_tensor((3, 4), torch.int8, strides=(1, 16), offset=5)
    assert x.stride() == (1, 16)
    assert x.storage_offset() == 5
    assert random_tensor((0, 4)).numel() == 0
    assert random_tensor((200,), torch.bool).unique().tolist() == [False, True]
