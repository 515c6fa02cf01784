"""Fused functions on a GPU against torch's own: every size and alignment around a vector, every kind of view, streams, devices, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import wideload as wl

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int8)
SIZES = (0, 1, 7, 8, 9, 31, 32, 33, 1000, 4097, 1_000_003)
OFFSETS = range(16)

add = wl.fuse(lambda x, b: x + b, name="add")


def random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Of the dtype's whole range, a few of the floats infinite, NaN or -0.0."""
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, min(info.max + 1, 2**63 - 1), shape, dtype=dtype, device=DEVICE)
    tensor = torch.randn(shape, dtype=torch.float32, device=DEVICE) * 100
    choice = torch.rand(shape, device=DEVICE)
    for value, where in (
        (torch.inf, choice < 0.01),
        (-torch.inf, choice > 0.99),
        (torch.nan, (choice - 0.5).abs() < 0.005),
        (-0.0, (choice - 0.3).abs() < 0.02),
    ):
        tensor[where] = value
    return tensor.to(dtype)


def assert_same(result: torch.Tensor, expected: torch.Tensor, note: object = "") -> None:
    """Dtype, shape, strides and every bit, but that one NaN is as good as another."""
    assert (result.dtype, result.shape, result.stride(), result.device) == (
        expected.dtype,
        expected.shape,
        expected.stride(),
        expected.device,
    ), note
    if expected.is_complex():
        result, expected = (torch.view_as_real(tensor.resolve_conj()) for tensor in (result, expected))
    is_nan = expected.isnan()
    assert torch.equal(result.isnan(), is_nan), note
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    bits = [tensor.masked_fill(is_nan, 0).contiguous().view(integer) for tensor in (result, expected)]
    assert torch.equal(*bits), note


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_at_every_offset(dtype: torch.dtype, size: int) -> None:
    """Both operands off by as much, and each against one that is aligned."""
    xs, bs = random(size + 16, dtype=dtype), random(size + 16, dtype=dtype)
    for offset in OFFSETS:
        for x_offset, b_offset in ((offset, offset), (offset, 0), (0, offset), (offset, 15 - offset)):
            x, b = xs[x_offset : x_offset + size], bs[b_offset : b_offset + size]
            assert_same(add(x, b), x + b, (x_offset, b_offset))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_out_at_every_offset_and_nothing_beside_it(dtype: torch.dtype, size: int) -> None:
    x, b, poison = random(size, dtype=dtype), random(size, dtype=dtype), random(size + 48, dtype=dtype)
    expected = x + b
    for offset in OFFSETS:
        room = poison.clone()
        out = room[16 + offset : 16 + offset + size]
        assert add(x, b, out=out) is out
        assert_same(out, expected, offset)
        assert_same(room[: 16 + offset], poison[: 16 + offset], offset)
        assert_same(room[16 + offset + size :], poison[16 + offset + size :], offset)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(dtype: torch.dtype) -> None:
    for offset in (0, 1, 8):
        room, b = random(4097 + offset, dtype=dtype), random(4097, dtype=dtype)
        x = room[offset:]
        expected = x + b
        assert add(x, b, out=x) is x
        assert_same(x, expected, offset)
        doubled = x + x
        assert_same(add(x, x, out=x), doubled, offset)


VIEWS: dict[str, Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]] = {
    "row": lambda dtype: (random(65, 129, dtype=dtype), random(129, dtype=dtype)),
    "column": lambda dtype: (random(65, 129, dtype=dtype), random(65, 1, dtype=dtype)),
    "row + column": lambda dtype: (random(1, 129, dtype=dtype), random(65, 1, dtype=dtype)),
    "0-dim": lambda dtype: (random(65, 128, dtype=dtype), random(dtype=dtype)),
    "two 0-dim": lambda dtype: (random(dtype=dtype), random(dtype=dtype)),
    "expanded": lambda dtype: (random(1, 129, dtype=dtype).expand(65, 129), random(65, 129, dtype=dtype)),
    "both expanded": lambda dtype: (random(1, 1, dtype=dtype).expand(65, 129), random(65, 1, dtype=dtype).expand(65, 129)),
    "t() + contiguous": lambda dtype: (random(129, 65, dtype=dtype).t(), random(65, 129, dtype=dtype)),
    "t() + t()": lambda dtype: (random(129, 64, dtype=dtype).t(), random(129, 64, dtype=dtype).t()),
    "columns 1:-1": lambda dtype: (random(65, 131, dtype=dtype)[:, 1:-1], random(65, 129, dtype=dtype)),
    "steps": lambda dtype: (random(130, 258, dtype=dtype)[::2, ::2], random(65, 387, dtype=dtype)[:, 1::3]),
    "halves": lambda dtype: tuple(random(65, 256, dtype=dtype).chunk(2, dim=-1)),  # type: ignore[return-value, dict-item]
    "permuted": lambda dtype: (random(5, 7, 6, 9, dtype=dtype).permute(0, 2, 1, 3), random(5, 6, 7, 9, dtype=dtype)),
    "channels last": lambda dtype: (random(3, 8, 5, 7, dtype=dtype).to(memory_format=torch.channels_last), random(3, 8, 5, 7, dtype=dtype)),
    "both channels last": lambda dtype: tuple(random(3, 8, 5, 7, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2)),  # type: ignore[return-value, dict-item]
    "overlapping windows": lambda dtype: (random(200, dtype=dtype).as_strided((50, 30), (3, 1)), random(50, 30, dtype=dtype)),
    "no elements": lambda dtype: (random(0, 129, dtype=dtype), random(1, 129, dtype=dtype)),
    "six dims": lambda dtype: (random(2, 3, 2, 3, 2, 5, dtype=dtype).permute(5, 3, 1, 0, 2, 4), random(5, 3, 3, 2, 2, 2, dtype=dtype)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    for dtype in DTYPES:
        x, b = VIEWS[name](dtype)
        assert_same(add(x, b), x + b, dtype)
        assert_same(add(b, x), b + x, dtype)


@pytest.mark.parametrize("name", VIEWS)
def test_views_into_a_strided_out(name: str) -> None:
    """Every other column of a wider tensor receives the result; the columns between stay as they were."""
    for dtype in DTYPES:
        x, b = VIEWS[name](dtype)
        expected = x + b
        if expected.ndim:
            room = random(*expected.shape[:-1], 2 * expected.shape[-1], dtype=dtype)
            kept = room[..., 1::2].clone()
            out = room[..., ::2]
            add(x, b, out=out)
            assert_same(packed(out), packed(expected), dtype)
            assert_same(packed(room[..., 1::2]), packed(kept), dtype)


def packed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in row-major order; unlike ``contiguous()`` also where there are no elements."""
    return tensor.clone(memory_format=torch.contiguous_format)


def test_mixed_dtypes() -> None:
    for x_dtype in DTYPES:
        for b_dtype in DTYPES:
            for size in (1, 9, 33, 4097):
                x, b = random(size + 1, dtype=x_dtype), random(size + 1, dtype=b_dtype)
                for offset in (0, 1):
                    assert_same(add(x[offset:], b[offset:]), x[offset:] + b[offset:], (x_dtype, b_dtype, size, offset))


@pytest.mark.big(12)
def test_more_than_2_to_the_31_elements() -> None:
    n = 2**31 + 12345
    x, b = random(n, dtype=torch.int8), random(n, dtype=torch.int8)
    assert torch.equal(add(x, b), x + b)


@pytest.mark.big(12)
def test_more_than_2_to_the_31_elements_of_a_view() -> None:
    rows, columns = 32_769, 65_536
    x, b = random(rows, columns + 2, dtype=torch.int8)[:, 1:-1], random(rows, columns, dtype=torch.int8)
    assert torch.equal(add(x, b), x + b)


# ---- streams, threads, devices


def delayed(target: torch.Tensor, value: torch.Tensor) -> None:
    """Fill ``target`` on the current stream, some 10 ms from now."""
    torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
    target.copy_(value)


def test_a_kernel_runs_on_the_current_stream() -> None:
    """On another stream it would read what was there before."""
    x, b, late = (random(4097, dtype=torch.int8) for _ in range(3))
    expected = late + b
    add(x, b)  # compiled before the clock runs
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        delayed(x, late)
        result = add(x, b)
    assert not stream.query()  # nothing waited
    stream.synchronize()
    assert_same(result, expected)


def test_a_graph_replays_a_kernel() -> None:
    x, b, y = random(4097, dtype=torch.float16), random(4097, dtype=torch.float16), torch.empty(4097, dtype=torch.float16, device=DEVICE)
    add(x, b, out=y)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, b, out=y)
    x.copy_(random(4097, dtype=torch.float16))
    y.zero_()
    graph.replay()
    assert_same(y, x + b)


def test_a_thread_that_has_made_no_cuda_call() -> None:
    x, b = random(4097, dtype=torch.float32), random(4097, dtype=torch.float32)
    results: list[object] = []

    def work() -> None:
        try:
            results.append(add(x, b))
        except BaseException as error:  # shown by the assertion below
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert isinstance(results[0], torch.Tensor), results[0]
    assert_same(results[0], x + b)


@pytest.mark.gpus(2)
def test_a_device_that_is_not_current() -> None:
    assert torch.cuda.current_device() == 0
    for size in (9, 4097):
        x, b = (random(size, dtype=torch.float32).to("cuda:1") for _ in range(2))
        assert_same(add(x, b), x + b)
        assert torch.cuda.current_device() == 0
        y = torch.empty_like(x)
        with torch.cuda.stream(torch.cuda.Stream("cuda:1")) as stream:
            torch.cuda.synchronize("cuda:1")
            add(x, b, out=y)
        del stream
        torch.cuda.synchronize("cuda:1")
        assert_same(y, x + b)


@pytest.mark.gpus(2)
def test_two_devices_in_one_call() -> None:
    with pytest.raises(wl.DeviceError, match=r"cuda:0.*cuda:1|cuda:1.*cuda:0"):
        add(torch.ones(4, device="cuda:0"), torch.ones(4, device="cuda:1"))


# ---- errors


def ones(*shape: int, **options: object) -> torch.Tensor:
    return torch.ones(shape, **{"device": DEVICE, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: add(ones(4), ones(4, device="cpu")), wl.DeviceError),
        (lambda: add(ones(4), ones(5)), wl.LayoutError),
        (lambda: add(ones(4), "four"), wl.WideloadError),
        (lambda: add(1.0, 2.0), wl.TraceError),
        (lambda: add(ones(4).to_sparse(), ones(4)), wl.LayoutError),
        (lambda: add(ones(4), ones(4, dtype=torch.float8_e4m3fn)), wl.DtypeError),
        (lambda: add(ones(4), ones(4), out=ones(5)), wl.LayoutError),
        (lambda: add(ones(4), ones(4), out=ones(4, dtype=torch.int32)), wl.DtypeError),
        (lambda: add(ones(4), ones(4), out=ones(4, device="cpu")), wl.DeviceError),
        (lambda: add(ones(4), ones(4), out=ones(1).expand(4)), wl.OverlapError),
    ],
    ids=[
        "two devices",
        "shapes",
        "a string",
        "no tensor",
        "sparse",
        "fp8",
        "shape of out",
        "dtype of out",
        "device of out",
        "out on itself",
    ],
)
def test_what_cannot_be_fused_is_an_error(call: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error) as raised:
        call()
    assert isinstance(raised.value, wl.WideloadError)
    torch.cuda.synchronize()


def test_an_error_writes_nothing() -> None:
    room = random(1000, dtype=torch.float32)
    before = room.clone()
    with pytest.raises(wl.OverlapError):
        add(room[:500], room[500:], out=room[250:750])
    torch.cuda.synchronize()
    assert_same(room, before)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_what_the_l2_keeps_is_what_is_read(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accesses of 4 to 64 bytes; of a call beside another, and of gradients, whose kernels wait for each other."""
    monkeypatch.setattr("wideload.plan.choice.KEPT_AFTER_BYTES", 1)
    x, t = (torch.randn(shape, device=DEVICE).to(dtype) for shape in ((5, 37, 48), (37, 48)))
    f = wl.fuse(lambda x, t: (x.float() + t.float(), t.float() * 2), name="kept_sum")
    assert "load_kept<" in "".join(kernel.source for kernel in f.plan(x, t).kernels)
    got, doubled = f(x, t)
    assert_same(got, x.float() + t.float())
    assert_same(doubled, t.float() * 2)
    if dtype.itemsize == 1:
        return
    x.requires_grad_(), t.requires_grad_()
    product = wl.fuse(lambda x, t: x * t, name="kept_product")
    gradients = torch.autograd.grad(product(x, t), (x, t), torch.ones_like(x))
    assert_same(gradients[0], t.detach().expand_as(x).contiguous())
    torch.testing.assert_close(gradients[1], x.detach().double().sum(0).to(dtype))


@pytest.mark.parametrize(
    ("dtype", "beside"),
    [(torch.bool, torch.bfloat16), (torch.uint8, torch.float32), (torch.bool, torch.float64), (torch.bool, torch.complex128)],
)
def test_what_the_l2_keeps_of_narrow_operands_is_what_is_read(
    dtype: torch.dtype, beside: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accesses of 8, 4, 2 bytes and 1."""
    monkeypatch.setattr("wideload.plan.choice.KEPT_AFTER_BYTES", 1)
    x, t = torch.randn(5, 37, 48, device=DEVICE).to(beside), torch.randint(0, 2, (37, 48), device=DEVICE).to(dtype)
    f = wl.fuse(lambda x, t: x * t.to(x.dtype), name="kept_product")
    assert "load_kept<" in f.plan(x, t).kernels[0].source
    assert_same(f(x, t), x * t.to(x.dtype))
