"""Calls like earlier ones on a GPU: their results beside eager's, whatever changes between two calls."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("either")]

DEVICE = torch.device("cuda")
bf16, f32 = torch.bfloat16, torch.float32
SCALE = 2.0


def gated(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return (x + y) * z


def randn(*shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def taken(f: wl.FusedFunction) -> int:
    """How many shortcuts there are."""
    return len(f._shortcuts)


def test_the_second_call_takes_the_route(monkeypatch: pytest.MonkeyPatch) -> None:
    f = wl.fuse(gated)
    for _ in range(2):
        args = [randn(64, 48) for _ in range(3)]
        assert torch.equal(f(*args), gated(*args))
    assert taken(f) == 1
    monkeypatch.setattr(f, "_bind", lambda *_: pytest.fail("the call was taken apart"))
    args = [randn(64, 48) for _ in range(3)]
    assert torch.equal(f(*args), gated(*args))


def test_shapes_dtypes_layouts_and_alignments_in_turn() -> None:
    f = wl.fuse(gated)
    store = randn(3, 5000)
    calls: list[list[torch.Tensor]] = [
        [randn(64, 48) for _ in range(3)],
        [randn(48, 64).t() for _ in range(3)],
        [randn(64, 48), randn(48), randn(64, 1)],
        [randn(64, 48).to(bf16) for _ in range(3)],
        [row[:3072].view(64, 48) for row in store],
        [row[1:3073].view(64, 48) for row in store],
        [store[0][:3072].view(64, 48), store[1][3:3075].view(64, 48), store[2][:3072].view(64, 48)],
        [randn(0, 48), randn(0, 48), randn(0, 48)],
    ]
    for _ in range(3):
        for args in calls:
            got, want = f(*args), gated(*(x.double() for x in args)).to(args[0].dtype)
            assert (got.shape, got.stride(), got.dtype) == (want.shape, gated(*args).stride(), want.dtype)
            torch.testing.assert_close(got, want, rtol=0, atol=2**-7 if want.dtype == bf16 else 1e-6)
    x = randn(64, 48)
    for _ in range(2):
        assert torch.equal(f(x, x, x), gated(x, x, x))
        assert torch.equal(f(x, x.clone(), x), gated(x, x, x))


def test_numbers_names_and_tuples() -> None:
    @wl.fuse
    def f(x: torch.Tensor, s: float, y: torch.Tensor, flag: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        return (x * s + y if flag else x - y), x * 2

    x, y = randn(1000), randn(1000)
    for s in (0.5, 3.0, -1.0, 2):
        for flag in (True, False):
            got = f(x, s, y=y, flag=flag)
            assert type(got) is tuple
            torch.testing.assert_close(got[0], x * s + y if flag else x - y)
            assert torch.equal(got[1], x * 2)
            assert torch.equal(f(x, s, flag=flag, y=y)[0], got[0])
    assert got[0].data_ptr() != f(x, 2, y=y, flag=False)[0].data_ptr()


def test_circumstances_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    f = wl.fuse(lambda x, y: x * SCALE + y)
    x, y = randn(64), randn(64)
    for scale in (2.0, 2.0, 3.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        torch.testing.assert_close(f(x, y), x * scale + y)
    z = torch.randn(64, dtype=torch.complex64, device=DEVICE)
    g = wl.fuse(lambda a: a.real + a.imag)
    for a in (z, z, z.conj(), z, z.conj()):
        torch.testing.assert_close(g(a), a.real + a.imag)
    assert torch.equal(f(x, torch._neg_view(y)), x * SCALE - y)
    with torch.inference_mode():
        for _ in range(2):
            assert f(x, y).is_inference()
    assert not f(x, y).is_inference()


def test_gradients_and_modes_in_turn() -> None:
    f = wl.fuse(gated)
    args = [randn(64, 48) for _ in range(3)]
    for wanted in ((), (0,), (0, 2), (), (0, 1, 2), (0,)):
        leaves = [x.clone().requires_grad_(at in wanted) for at, x in enumerate(args)]
        others = [x.clone().requires_grad_(at in wanted) for at, x in enumerate(args)]
        for _ in range(2):
            with torch.no_grad():
                assert not f(*leaves).requires_grad
            got = f(*leaves)
            assert got.requires_grad is bool(wanted)
            if wanted:
                got.sum().backward()
                gated(*others).sum().backward()
        for mine, other in zip(leaves, others, strict=True):
            assert (mine.grad is None) == (other.grad is None)
            if mine.grad is not None:
                torch.testing.assert_close(mine.grad, other.grad)


def test_results_into_memory_in_turn() -> None:
    f = wl.fuse(lambda x, y: x * 2 + y)
    store = torch.zeros(4, 4096, device=DEVICE)
    x, y = randn(4096), randn(4096)
    for _ in range(3):
        for out in (store[0], store[1], y.clone(), store.view(-1)[1:4097]):
            version = out._version
            assert f(x, y, out=out) is out
            torch.testing.assert_close(out, x * 2 + y)
            assert out._version == version + 1
        for args in ((x.clone(), y), (x, y.clone())):
            want = args[0] * 2 + args[1]
            for out in args:
                mine = [a.clone() for a in args]
                f(*mine, out=mine[0] if out is args[0] else mine[1])
                torch.testing.assert_close(mine[0] if out is args[0] else mine[1], want)
    with pytest.raises(wl.OverlapError):
        f(x, store.view(-1)[:4096], out=store.view(-1)[4:4100])
    with pytest.raises(wl.GradError):
        f(x.clone().requires_grad_(), y, out=store[0])


def test_results_into_memory_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    f = wl.fuse(lambda x, y: x * 2 + y)
    x, y = randn(4096), randn(4096)
    f(x, y, out=torch.empty_like(x))
    f(x, y.clone(), out=x.clone())
    mine = y.clone()
    f(x, mine, out=mine)
    assert taken(f) == 2
    store = randn(4100)
    with pytest.raises(wl.OverlapError):
        f(store[:4096], store[4:], out=store[4:])
    monkeypatch.setattr(f, "_bind", lambda *_: pytest.fail("the call was taken apart"))
    out, want = torch.empty_like(x), x * 2 + y
    assert torch.equal(f(x, y, out=out), want)
    assert torch.equal(f(x, y, out=y), want)


def test_what_changes_in_place_is_seen() -> None:
    def act(x: torch.Tensor, how: list[str] = ["tanh"]) -> torch.Tensor:  # noqa: B006
        return torch.tanh(x) if how[0] == "tanh" else x * 2

    f, x = wl.fuse(act), randn(100)
    for how in ("tanh", "none", "tanh"):
        act.__defaults__[0][0] = how  # type: ignore[index]
        torch.testing.assert_close(f(x), act(x))


def test_draws_differ_from_call_to_call() -> None:
    f = wl.fuse(lambda x: F.dropout(x, 0.5))
    x = torch.ones(4096, device=DEVICE)
    torch.manual_seed(0)
    first = [f(x) for _ in range(4)]
    assert len({tuple(y.tolist()) for y in first}) == 4
    torch.manual_seed(0)
    assert all(torch.equal(y, f(x)) for y in first)


def test_streams_threads_and_graphs() -> None:
    f = wl.fuse(lambda x, y, s: x * s + y)
    x, y = randn(1 << 20), randn(1 << 20)
    wrong: list[Any] = []

    def call(number: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            wrong.extend(number for _ in range(50) if not torch.equal(f(x, y, float(number)), x * float(number) + y))

    torch.testing.assert_close(f(x, y, 2.0), x * 2.0 + y)
    torch.cuda.synchronize()
    f = wl.fuse(lambda x, y, s: (x * s) + y, numerics="eager")
    f(x, y, 1.0)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        z = f(static, y, 3.0)
    static.copy_(y)
    graph.replay()
    assert torch.equal(z, y * 3.0 + y)


def test_another_current_device_is_left_alone() -> None:
    f = wl.fuse(lambda x, y: x + y)
    x, y = randn(100), randn(100)
    for _ in range(3):
        assert torch.equal(f(x, y), x + y)
        assert torch.cuda.current_device() == x.device.index


@pytest.mark.gpus(2)
def test_devices_in_turn() -> None:
    f = wl.fuse(lambda x, y: x + y)
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            x, y = (torch.randn(100, device=device) for _ in range(2))
            got = f(x, y)
            assert got.device == x.device
            assert torch.equal(got, x + y)
            assert torch.equal(f(x, y, out=got), x + y)
        with torch.cuda.device(1):
            x, y = (torch.randn(100, device="cuda:1") for _ in range(2))
            assert torch.equal(f(x, y), x + y)
        assert torch.cuda.current_device() == 0


@pytest.mark.parametrize(
    ("fn", "more"),
    [
        (gated, ()),
        (lambda x, y, z: (x + y, z * 2), ()),
        (lambda x, y, z, s, flag: F.silu(x) * y + z * s if flag else x, (0.5, True)),
        (lambda x, y, z: F.dropout(x + y, 0.5) * z, ()),
    ],
    ids=["one", "two", "number", "dropout"],
)
@pytest.mark.parametrize("wants_grad", [False, True])
def test_every_kind_of_call_takes_it(fn: Any, more: tuple[Any, ...], wants_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    f = wl.fuse(fn, name="f")
    args = [randn(64, 48).requires_grad_(wants_grad) for _ in range(3)]
    torch.manual_seed(1)
    want = f(*args, *more)
    monkeypatch.setattr(f, "_bind", lambda *_: pytest.fail("the call was taken apart"))
    torch.manual_seed(1)
    torch.testing.assert_close(f(*args, *more), want, rtol=0, atol=0)
