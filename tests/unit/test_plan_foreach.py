"""Which tensors of a list may share a kernel, how many fit its table, and which chunk is whose."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wideload.lower import Program, Store, lower_expr
from wideload.plan import Operand, Target, Variant
from wideload.plan_foreach import FOREACH_THREADS, choose_accesses, chunk_map, chunk_size, list_variant, table_words
from wideload.replay import NodeLayout
from wideload.trace import NumberArg, TensorArg, trace_function

bf16, f32, f64, c64 = torch.bfloat16, torch.float32, torch.float64, torch.complex64


def program_of(num_inputs: int, dtype: torch.dtype = f32, num_outputs: int = 1) -> Program:
    args = [TensorArg(f"x{k}", dtype, (8,), torch.device("cpu")) for k in range(num_inputs)]
    expr = trace_function(lambda *xs: tuple(sum(xs) + k for k in range(num_outputs)), "f", tuple(args), {}).expr
    return lower_expr(expr, tuple(Store(node, dtype) for node in expr.outputs), numerics="fused")


def accesses(out: torch.Tensor, *inputs: torch.Tensor) -> object:
    operands = [Operand(x.dtype, NodeLayout(tuple(x.shape), x.stride()), 0, k) for k, x in enumerate(inputs)]
    target = Target(0, out.dtype, NodeLayout(tuple(out.shape), out.stride()), 0, 0)
    return choose_accesses(program_of(len(inputs)), operands, [target])


def test_one_run_or_one_element() -> None:
    run, one = torch.empty(4, 6), torch.empty(())
    assert accesses(run, run, run) == (("vector", "vector"), 24)
    assert accesses(run, run, one) == (("vector", "uniform"), 24)
    assert accesses(run.t(), run.t(), one.expand(6, 4)) == (("vector", "uniform"), 24)
    assert accesses(run, run.view(4, 1, 6)[:, 0]) == (("vector",), 24)
    assert accesses(run[:1, :1], one, run[:1, :1]) == (("vector", "vector"), 1)


def test_what_is_no_run_needs_a_kernel_of_its_own() -> None:
    run = torch.empty(4, 6)
    for out, other in ((run, run[:, :1]), (run, run[0]), (run, torch.empty(6, 4).t()), (run, torch.empty(4, 12)[:, ::2])):
        assert accesses(out, run, other) is None
    assert accesses(torch.empty(4, 12)[:, :6], run, run) is None
    assert accesses(torch.empty(48)[::2], torch.empty(48)[::2]) is None


@pytest.mark.parametrize("form", ["on the device", "on the host", "a number"])
def test_a_complex_number_by_value_needs_a_kernel_of_its_own(form: str) -> None:
    x = TensorArg("x", c64, (4,), torch.device("cpu"))
    z = NumberArg("z", complex) if form == "a number" else TensorArg("z", c64, (), torch.device("cpu"))
    expr = trace_function(lambda x, z: x * z, "f", (x, z), {}).expr
    program = lower_expr(expr, (Store(expr.outputs[0], c64),), numerics="fused")
    run, one = NodeLayout((4,), (1,)), NodeLayout((), ())
    operands = [Operand(c64, run, 0, 0), Operand(c64, one, 0, 1, on_host=form == "on the host")]
    found = choose_accesses(program, operands, [Target(expr.outputs[0], c64, run, 0, 0)])
    assert found == ((("vector", "uniform"), 4) if form == "on the device" else None)


def variant(
    num_inputs: int, num_members: int, dtype: torch.dtype = f32, shared: tuple[bool, ...] | None = None, in_place: int | None = None
) -> Variant:
    program, loads = program_of(num_inputs, dtype), ("vector",) * num_inputs
    return list_variant(program, loads, shared or (False,) * num_inputs, (), (in_place,), num_members)  # type: ignore[arg-type]


def test_the_table_is_the_smallest_that_holds_the_list() -> None:
    """Two inputs, an output and a count: 4 words a tensor in 4096 or 32764 bytes, 8 of which point to the map."""
    sizes = {1: 127, 127: 127, 128: 1023, 1023: 1023, 5000: 1023}
    for num_members, capacity in sizes.items():
        table = variant(2, num_members).table
        assert table is not None
        assert table.capacity == capacity
    table = variant(2, 1, shared=(False, True)).table
    assert table is not None
    assert table.capacity == (4096 - 8 - 8) // 8 // 3
    table = variant(2, 5000, in_place=1).table  # the output by the second input's pointer
    assert table is not None
    assert table.capacity == (32764 - 8) // 8 // 3


def test_words_of_the_table_follow_one_another_and_fit_the_parameters() -> None:
    for num_members in (1, 5000):
        chosen = variant(2, num_members, shared=(True, False))
        assert chosen.table is not None
        capacity = chosen.table.capacity
        words = table_words(program_of(2), chosen)
        assert words == [(0, 1), (1, capacity), (1 + capacity, capacity), (1 + 2 * capacity, capacity)]
        assert table_words(program_of(2), variant(2, num_members, in_place=0))[2:] == [(2 * (room := _room(num_members)), room)]
        nbytes = 8 * sum(words[-1]) + 8
        assert (4096 if num_members == 1 else 32764) - 8 * 3 < nbytes <= (4096 if num_members == 1 else 32764)


def _room(num_members: int) -> int:
    table = variant(2, num_members, in_place=0).table
    assert table is not None
    return table.capacity


@pytest.mark.parametrize(("num_inputs", "dtype", "elements"), [(1, f32, 8), (2, bf16, 16), (4, f32, 8), (1, f64, 4)])
def test_a_thread_makes_two_accesses_of_each_operand(num_inputs: int, dtype: torch.dtype, elements: int) -> None:
    chosen = variant(num_inputs, 10, dtype)
    assert chosen.table is not None
    assert (chosen.table.accesses, chosen.elements, chosen.threads) == (2, elements, 128)


def test_chunks_cover_every_element_wherever_the_first_access_begins() -> None:
    chosen = variant(2, 10)
    size, per_access = chunk_size(chosen), 4
    assert size == FOREACH_THREADS * 2 * per_access
    sizes = [1, size - 3, size - 2, size, 0 + 5, 3 * size + 1]
    chunks = chunk_map(chosen, sizes)
    assert chunks.dtype == np.int32
    assert chunks.shape[1] == 2
    for member, n in enumerate(sizes):
        mine = chunks[chunks[:, 0] == member, 1].tolist()
        assert mine == list(range(len(mine)))
        for before in range(per_access):  # elements of the first access that lie before the tensor
            assert len(mine) * size - before >= n
        assert (len(mine) - 1) * size < n + per_access - 1
