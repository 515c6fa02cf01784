"""out=: every rule of torch's, checked before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import wideload as wl
from wideload.dtypes import DTYPES
from wideload.outputs import check_outputs, extent_of
from wideload.overlap import Extent
from wideload.replay import NodeLayout

f16, bf16, f32, f64, i32, i64 = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64

twice = wl.fuse(lambda x: x * 2)
add = wl.fuse(lambda x, y: x + y)
both = wl.fuse(lambda x, y: (x + y, x * y))


@contextmanager
def unwritten(*tensors: torch.Tensor) -> Iterator[None]:
    """Every byte of the tensors' storages is as it was, and so is their version."""
    storages = [torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage()) for tensor in tensors]
    before = [(storage.clone(), tensor._version) for storage, tensor in zip(storages, tensors, strict=True)]
    yield
    for storage, tensor, (content, version) in zip(storages, tensors, before, strict=True):
        assert torch.equal(storage, content)
        assert tensor._version == version


def check(
    outs: list[torch.Tensor], inputs: list[torch.Tensor], dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None
) -> bool:
    layouts = [NodeLayout(tuple(out.shape) if shape is None else shape, out.stride()) for out in outs]
    names = [f"out[{i}]" for i in range(len(outs))]
    named = [(f"x{i}", x) for i, x in enumerate(inputs)]
    return check_outputs(outs, names, layouts, [dtype or out.dtype for out in outs], named, outs[0].device)


# ---- what may be written


def test_results_go_into_out_and_out_comes_back() -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.ones(3)
    out = torch.empty(3, 2).t()
    assert add(x, y, out=out) is out
    assert torch.equal(out, x + y)
    assert out.stride() == (1, 2)
    gaps = torch.zeros(2, 6)
    assert add(x, y, out=gaps[:, ::2]).stride() == (6, 2)
    assert torch.equal(gaps[:, ::2], x + y)
    assert not gaps[:, 1::2].any()


def test_out_has_the_structure_of_the_results() -> None:
    class Pair(NamedTuple):
        sum: Any
        product: Any

    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])
    named = wl.fuse(lambda x, y: {"a": (x + y, [x * y]), "b": Pair(x - y, x / y)})
    out = {"b": Pair(torch.empty(2), torch.empty(2)), "a": [torch.empty(2), (torch.empty(2),)]}
    assert named(x, y, out=out) is out
    assert [out["a"][0].tolist(), out["a"][1][0].tolist()] == [[4.0, 7.0], [3.0, 10.0]]
    assert torch.equal(out["b"].sum, x - y)
    assert torch.equal(out["b"].product, x / y)


STRUCTURES = [
    (torch.empty(2), r"out= of \S+ has the structure tensor, the results have \(tensor, tensor\)"),
    ((torch.empty(2),), r"structure \(tensor,\)"),
    ((torch.empty(2), [torch.empty(2)]), r"structure \(tensor, \[tensor\]\)"),
    ({"a": torch.empty(2), "b": torch.empty(2)}, r"structure \{a: tensor, b: tensor\}"),
    ((torch.empty(2), None), "holds NoneType for a result that is tensor; allowed: a tensor for each tensor"),
    ((torch.empty(2), 3.0), "holds float for a result that is tensor"),
    (3, "structure int"),
]


@pytest.mark.parametrize(("out", "message"), STRUCTURES, ids=range(len(STRUCTURES)))
def test_another_structure_is_refused(out: Any, message: str) -> None:
    with pytest.raises(wl.LayoutError, match=message):
        both(torch.ones(2), torch.ones(2), out=out)


def test_a_result_that_is_no_tensor_has_no_out() -> None:
    f = wl.fuse(lambda x, s: (x * s, s + 1))
    with pytest.raises(wl.LayoutError, match="holds tensor for a result that is number"):
        f(torch.ones(2), 2.0, out=(torch.empty(2), torch.empty(2)))


@pytest.mark.parametrize("have", DTYPES, ids=str)
def test_a_dtype_is_allowed_where_torch_allows_it(have: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1]).to(have)
    clone = wl.fuse(torch.clone)
    for want in DTYPES:
        out = torch.full((3,), 1).to(want)
        if not torch.can_cast(have, want):
            with pytest.raises(wl.DtypeError, match=rf"out= is {want}, which cannot hold a {have} result"), unwritten(out):
                clone(x, out=out)
        else:
            assert clone(x, out=out) is out
            assert torch.equal(out.to(torch.complex128), x.to(want).to(torch.complex128))  # what torch compares in any dtype


def test_out_of_another_dtype_receives_the_rounded_result() -> None:
    x = torch.tensor([1.0, 3.0], dtype=bf16)
    third = torch.tensor([1 / 3, 1 / 3], dtype=bf16)
    product = (x.float() * third.float()).to(bf16)
    mul = wl.fuse(lambda x, y: x * y)
    assert torch.equal(mul(x, third, out=torch.empty(2)), product.float())
    assert torch.equal(mul(x, third, out=torch.empty(2, dtype=f16)), product.to(f16))
    assert torch.equal(twice(torch.tensor([0.3]), out=torch.empty(1, dtype=f64)), torch.tensor([0.6000000238418579], dtype=f64))


def test_the_version_counter_moves_once_a_call() -> None:
    x, out = torch.ones(4), torch.empty(4)
    saved = out.detach()
    version = out._version
    twice(x, out=out)
    assert out._version == saved._version == version + 1
    twice(x, out=x)
    assert x._version == 1


def test_writing_into_what_a_backward_pass_needs_is_noticed() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        twice(torch.ones(3), out=y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- in place


def test_in_place_is_the_very_same_view() -> None:
    x, y = torch.arange(4.0), torch.ones(4)
    assert add(x, y, out=x) is x
    assert x.tolist() == [1, 2, 3, 4]
    assert add(y, y, out=y).tolist() == [2, 2, 2, 2]
    turned = torch.arange(6.0).view(2, 3).t()
    twice(turned, out=turned)
    assert turned.tolist() == [[0, 6], [2, 8], [4, 10]]
    shared = torch.arange(4.0)
    twice(shared.view(2, 2), out=shared.view(2, 2))
    assert shared.tolist() == [0, 2, 4, 6]


def test_in_place_results_read_all_arguments_before_any_is_written() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([10.0, 20.0])
    both(x, y, out=(x, y))
    assert (x.tolist(), y.tolist()) == ([11.0, 22.0], [10.0, 40.0])
    swap = wl.fuse(lambda x, y: (y, x))
    swap(x, y, out=(x, y))
    assert (x.tolist(), y.tolist()) == ([10.0, 40.0], [11.0, 22.0])
    keep = wl.fuse(lambda x: (x + 1, x))
    old = torch.empty(2)
    keep(x, out=(x, old))
    assert (x.tolist(), old.tolist()) == ([11.0, 41.0], [10.0, 40.0])


def test_an_argument_returned_unchanged_is_copied_into_out() -> None:
    x, out = torch.tensor([1.0, 2.0]), torch.empty(2)
    same = wl.fuse(lambda x: x)
    assert same(x, out=out) is out
    assert torch.equal(out, x)
    assert same(x, out=x) is x


def test_whether_an_output_is_an_input_is_reported() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert not check([y], [x])
    assert check([x], [x])
    assert check([y, x], [x])
    assert check([x[2:]], [x[2:], y])
    assert not check([x[2:]], [x[:2]])
    assert check([x.view(i32)], [x])  # element for element, whatever the type
    assert not check([torch.empty(0)], [torch.empty(0)])


# ---- what is refused, untouched


def test_another_shape_is_refused_not_resized() -> None:
    x = torch.ones(2, 3)
    for shape in ((3,), (2, 3, 1), (3, 2), (6,), (), (2, 4), (0,)):
        out = torch.zeros(shape)
        with pytest.raises(wl.LayoutError, match=r"out= has shape .*, the result has shape \(2, 3\)"), unwritten(out):
            twice(x, out=out)
        assert out.shape == shape


def test_another_device_is_refused() -> None:
    with pytest.raises(wl.DeviceError, match="out= is on meta, the arguments are on cpu"):
        twice(torch.ones(2), out=torch.empty(2, device="meta"))
    out = torch.zeros(2)
    with pytest.raises(wl.DeviceError, match="out= is on cpu, the arguments are on meta"), unwritten(out):
        twice(torch.empty(2, device="meta"), out=out)


@pytest.mark.parametrize("order", [1, -1])
def test_a_zero_dim_cpu_tensor_does_not_choose_the_device(order: int) -> None:
    arguments = [torch.tensor(2.0), torch.empty(3, device="meta")][::order]
    out = torch.empty(3, device="meta")
    assert add(*arguments, out=out) is out
    with pytest.raises(wl.DeviceError, match="out= is on cpu, the arguments are on meta"):
        add(*arguments, out=torch.empty(3))


def test_gradients_are_not_bypassed() -> None:
    x, leaf, out = torch.ones(2), torch.ones(2, requires_grad=True), torch.zeros(2)
    for arguments, target in (((leaf, x), out), ((x, x), leaf), ((x, x), leaf * 1)):
        with pytest.raises(wl.GradError, match=r"out= does not support automatic differentiation.*torch\.no_grad"), unwritten(out):
            add(*arguments, out=target)
    with torch.no_grad():
        add(leaf, x, out=out)
        add(x, x, out=leaf)
    assert out.tolist() == [2.0, 2.0]
    assert leaf.tolist() == [2.0, 2.0]


def test_an_output_that_overlaps_itself_is_refused() -> None:
    for out in (torch.zeros(1).expand(4), torch.zeros(5).as_strided((2, 2), (1, 1)), torch.zeros(4, 1).expand(4, 3)):
        with pytest.raises(wl.OverlapError, match=r"out= has several elements in one memory cell \(strides .*\.clone\(\)"), unwritten(out):
            twice(torch.ones(out.shape), out=out)
    single = torch.zeros(1).expand(1, 1)
    assert twice(torch.ones(1, 1), out=single).item() == 2.0


def test_outputs_that_share_memory_are_refused() -> None:
    x, y, buffer = torch.ones(4), torch.ones(4), torch.zeros(8)
    pairs = [(buffer[:4], buffer[:4]), (buffer[:4], buffer[1:5]), (buffer[::2], buffer[:4]), (buffer[4:], buffer.view(2, 4)[1])]
    for first, second in pairs:
        with pytest.raises(wl.OverlapError, match=r"out\[1\] and out\[0\] share memory"), unwritten(buffer):
            both(x, y, out=(first, second))
    both(x, y, out=(buffer[::2], buffer[1::2]))  # interleaved, but apart
    assert buffer.tolist() == [2, 1, 2, 1, 2, 1, 2, 1]


OVERLAPPING: list[Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = [
    lambda b: (b[:8], b[1:9]),
    lambda b: (b[1:9], b[:8]),
    lambda b: (b[:16:2], b[:8]),
    lambda b: (b[:16].view(4, 4).t(), b[:16].view(4, 4)),
    lambda b: (b[3].expand(8), b[:8]),
    lambda b: (b[:1], b[:8]),
    lambda b: (b[:8].view(i32), b.view(i32)[1:9]),
    lambda b: (b[:8], b[:8].view(f16)[:8].view(2, 4).flatten()),
]


@pytest.mark.parametrize("views", OVERLAPPING, ids=range(len(OVERLAPPING)))
def test_an_output_that_is_partly_an_input_is_refused(views: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]) -> None:
    buffer = torch.arange(20.0)
    x, out = views(buffer)
    ones = torch.ones(out.shape, dtype=out.dtype)
    f = wl.fuse(lambda y, x: y + x.to(y.dtype))
    with pytest.raises(wl.OverlapError, match="out= shares part of its memory with argument x"), unwritten(buffer):
        f(ones, x, out=out)


def test_views_of_one_storage_that_do_not_meet_are_allowed() -> None:
    buffer = torch.arange(16.0)
    for x, out in ((buffer[:8], buffer[8:]), (buffer[::2], buffer[1::2]), (buffer.view(4, 4)[:, :2], buffer.view(4, 4)[:, 2:])):
        want = x * 2
        assert torch.equal(twice(x, out=out), want)


def test_an_output_that_cannot_be_written_through_is_refused() -> None:
    z = torch.zeros(3, dtype=torch.complex64)
    f = wl.fuse(lambda x: x + 1)
    for out in (z.conj(), z.conj().imag):
        x = torch.ones(3, dtype=out.dtype)
        with pytest.raises(wl.LayoutError, match="lazily conjugated or negated view"), unwritten(z):
            f(x, out=out)
    with pytest.raises(wl.LayoutError, match=r"out= has layout torch\.sparse_coo; allowed: a strided tensor"):
        f(torch.ones(3), out=torch.zeros(3).to_sparse())


def test_nothing_is_written_when_a_later_output_is_refused() -> None:
    x, y, first = torch.ones(3), torch.ones(3), torch.full((3,), 7.0)
    bad = [torch.zeros(4), torch.zeros(3, dtype=i64), torch.zeros(1).expand(3), first[:], x[1:].expand(2, 2)[0]]
    for second in bad:
        with pytest.raises(wl.WideloadError), unwritten(first, x):
            both(x, y, out=(first, second))
    with pytest.raises(wl.LayoutError), unwritten(first):
        both(x, torch.ones(4), out=(first, torch.zeros(3)))


def test_a_failing_host_expression_writes_nothing() -> None:
    out = torch.full((3,), 7.0)
    f = wl.fuse(lambda x, s: x * (1 / s))
    with pytest.raises(ZeroDivisionError), unwritten(out):
        f(torch.ones(3), 0, out=out)


def test_errors_name_the_output_by_its_place() -> None:
    x = torch.ones(3)
    with pytest.raises(wl.LayoutError, match=r"^out\[1\] has shape"):
        both(x, x, out=(torch.zeros(3), torch.zeros(4)))
    with pytest.raises(wl.DtypeError, match=r"^out\[0\] is torch\.int32"):
        both(x, x, out=(torch.zeros(3, dtype=i32), torch.zeros(3)))


def test_an_extent_is_what_a_tensor_reaches() -> None:
    x = torch.zeros(6, 4, dtype=f64)[1:, ::2]
    assert extent_of(x) == Extent(x.data_ptr(), 8, (5, 2), (4, 2))


def test_pairs_of_random_views_are_judged_as_their_bytes_are() -> None:
    """Which cells two views of one buffer touch, found by marking them, against the verdict."""
    generator = torch.Generator().manual_seed(7)
    verdicts = set()

    def pick(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    for _ in range(400):
        shape = ((4,), (2, 3), (3, 2))[pick(3)]
        buffer = torch.zeros(40)
        views = [buffer.as_strided(shape, [pick(6) + 1 for _ in shape], pick(12)) for _ in range(2)]
        cells = [(buffer.zero_().as_strided(v.shape, v.stride(), v.storage_offset()).add_(1), buffer.clone())[1] for v in views]
        x, out = views
        if len(set(torch.arange(40).as_strided(shape, out.stride(), out.storage_offset()).flatten().tolist())) < out.numel():
            want = "itself"
        elif (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride()):
            want = "in place"
        else:
            want = "partly" if (cells[0].bool() & cells[1].bool()).any() else "apart"
        try:
            got = "in place" if check([out], [x]) else "apart"
        except wl.OverlapError as error:
            got = "itself" if "one memory cell" in str(error) else "partly"
        assert got == want, f"{x.stride()} at {x.storage_offset()}, {out.stride()} at {out.storage_offset()}, {shape}"
        verdicts.add(got)
    assert verdicts >= {"itself", "partly", "apart"}
