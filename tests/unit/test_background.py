"""Compiling in the background: who computes the first results, when the kernel takes over, what errors and captured graphs do.

A GPU is pretended: calls on CPU tensors are sent where those of a GPU go, and a kernel fills its results with 42.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import background, cache, execute, fused, torch_op
from wideload.nvrtc import Cubin
from wideload.plan import DEFAULT

GPU = torch.device("cuda", 0)
OF_KERNEL = 42.0


class Compiler:
    """Stands in for NVRTC: compiles when it is let, and fails where it is told to."""

    def __init__(self) -> None:
        self.may_go_on, self.has_begun, self.asked, self.fails = threading.Event(), threading.Event(), list[str](), False

    def __call__(self, source: str, *, arch: str, name: str, fma: bool = False) -> Cubin:
        self.asked.append(name)
        self.has_begun.set()
        assert self.may_go_on.wait(10)
        if self.fails:
            raise wl.CompileError("NVRTC refused it")
        return Cubin(b"code", arch, name, 24, 0, 0, 0, 0, log="ptxas info")

    def finish(self) -> None:
        """Let it go on, and wait until all that was begun is done."""
        self.may_go_on.set()
        background._threads().shutdown()
        background._threads.cache_clear()


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiler]:
    compiler = Compiler()
    for memory in ("_cubins", "_locks", "_compiled"):
        monkeypatch.setattr(cache, memory, type(getattr(cache, memory))())
    monkeypatch.setattr(cache, "compile_cubin", compiler)

    def prepare(plans: Any, device: int, recipe: Any = None) -> tuple[Any, ...]:
        cache.find_cubins(execute.kernel_texts(plans, device))
        return tuple(execute.Launch(None, plan) for plan in plans)  # type: ignore[arg-type]

    def run_new(launches: Any, device: Any, tensors: Any, outputs: Any, scalars: Any) -> list[torch.Tensor]:
        return [torch.full(output.layout.shape, OF_KERNEL, dtype=output.dtype) for output in outputs]

    def run(launches: Any, device: Any, outputs: Any, tensors: Any, scalars: Any) -> list[torch.Tensor]:
        return run_new(launches, device, tensors, outputs, scalars)

    def stage(launches: Any, device: int, tensors: Any, outs: Any, scalars: Any) -> Any:
        return lambda: [out.fill_(OF_KERNEL) for out in outs]

    monkeypatch.setattr(fused.FusedFunction, "_check_devices", lambda self, call: setattr(call, "device", GPU))
    monkeypatch.setattr(fused.FusedFunction, "_keep_shortcut", lambda *_: None)
    monkeypatch.setattr(fused, "steps_of_new", lambda *_, draws: None)
    monkeypatch.setattr(fused, "steps_into", lambda *_, draws: None)
    monkeypatch.setattr(fused, "is_capturing", lambda device: False)
    check = fused.check_outputs
    monkeypatch.setattr(fused, "check_outputs", lambda *given: check(*given[:-1], torch.device("cpu")))
    monkeypatch.setattr(fused, "stage_launches", stage)
    monkeypatch.setattr(execute, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(execute, "tuning_of", lambda device: DEFAULT)
    empty = torch_op._empty
    monkeypatch.setattr(torch_op, "_empty", lambda output, device: empty(output, torch.device("cpu")))
    for module in (fused, torch_op):
        monkeypatch.setattr(module, "prepare_launches", prepare)
    monkeypatch.setattr(fused, "run_new", run_new)
    monkeypatch.setattr(torch_op, "runner_of", lambda launches, outputs, device, _: functools.partial(run, launches, device, outputs))
    yield compiler
    compiler.finish()


def new() -> wl.FusedFunction:
    return wl.fuse(lambda x, y: x * y + 1, name="mul_add")


X, Y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
RIGHT = [4.0, 9.0]


def test_the_first_results_are_torchs_and_the_next_the_kernels(compiler: Compiler) -> None:
    f = new()
    with wl.config(background_compile=True):
        assert f(X, Y).tolist() == RIGHT
        assert compiler.has_begun.wait(10)
        assert f(X, Y).tolist() == RIGHT  # still being compiled, once
        assert compiler.asked == ["mul_add_dense"]
        compiler.finish()
        assert f(X, Y).tolist() == [OF_KERNEL] * 2
        assert f(X[:1], Y[:1]).tolist() == [OF_KERNEL]  # another shape of the same kernel
        assert compiler.asked == ["mul_add_dense"]


def test_what_is_on_the_disk_is_not_waited_for(compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE", "1")
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path))
    compiler.may_go_on.set()
    assert new()(X, Y).tolist() == [OF_KERNEL] * 2
    cache._cubins.clear()
    compiler.may_go_on.clear()
    with wl.config(background_compile=True):
        assert new()(X, Y).tolist() == [OF_KERNEL] * 2
    assert len(compiler.asked) == 1


def test_off_by_default(compiler: Compiler) -> None:
    compiler.may_go_on.set()
    assert new()(X, Y).tolist() == [OF_KERNEL] * 2


def test_results_into_given_memory_and_in_place(compiler: Compiler) -> None:
    f, out, x = new(), torch.zeros(2), X.clone()
    with wl.config(background_compile=True):
        assert f(X, Y, out=out) is out
        assert out.tolist() == RIGHT
        f(x, Y, out=x)
        assert x.tolist() == RIGHT
        compiler.finish()
        f(X, Y, out=out)
        f(x, Y, out=x)
    assert out.tolist() == x.tolist() == [OF_KERNEL] * 2


def test_gradients(compiler: Compiler) -> None:
    """Those of torch's own operators until forward and backward are both compiled: y and x, times 3."""
    f, x, y = new(), X.clone().requires_grad_(), Y.clone().requires_grad_()
    with wl.config(background_compile=True):
        result = f(x, y)
        assert result.tolist() == RIGHT
        assert [grad.tolist() for grad in torch.autograd.grad(3 * result.sum(), (x, y))] == [[9.0, 12.0], [3.0, 6.0]]
        compiler.finish()
        result = f(x, y)
        assert result.tolist() == [OF_KERNEL] * 2
        num_asked = len(compiler.asked)
        assert num_asked == 2  # forward, and the gradients of both
        assert [grad.tolist() for grad in torch.autograd.grad(result.sum(), (x, y))] == [[OF_KERNEL] * 2] * 2
        assert len(compiler.asked) == num_asked


def test_random_numbers_are_drawn_by_either(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "with_seed", lambda expr, tensors, device: [*tensors, torch.tensor([7])])
    f = wl.fuse(lambda x: torch.nn.functional.dropout(x, 0.5), name="drop")
    with wl.config(background_compile=True):
        first = f(torch.ones(1000))
        assert set(first.unique().tolist()) == {0.0, 2.0}
        compiler.finish()
        assert f(torch.ones(1000)).tolist() == [OF_KERNEL] * 1000


def test_an_error_is_raised_at_the_next_calls(compiler: Compiler) -> None:
    f = new()
    compiler.fails = True
    with wl.config(background_compile=True):
        assert f(X, Y).tolist() == RIGHT
        compiler.finish()
        for _ in range(2):
            with pytest.raises(wl.CompileError, match="NVRTC refused it"):
                f(X, Y)
        assert compiler.asked == ["mul_add_dense"]  # once
    with pytest.raises(wl.CompileError, match="NVRTC refused it"):
        f(X, Y)


def test_a_graph_captures_the_kernel(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the compilation has begun: the call waits for it."""
    f = new()
    with wl.config(background_compile=True):
        assert f(X, Y).tolist() == RIGHT
        monkeypatch.setattr(fused, "is_capturing", lambda device: True)
        threading.Timer(0.05, compiler.may_go_on.set).start()
        assert f(X, Y).tolist() == [OF_KERNEL] * 2
        assert new()(X, Y).tolist() == [OF_KERNEL] * 2
    assert compiler.asked == ["mul_add_dense"]


def test_threads_hold_no_tensors(compiler: Compiler) -> None:
    import gc
    import weakref

    f, x = new(), X.clone()
    with wl.config(background_compile=True):
        f(x, Y)
    alive = weakref.ref(x)
    del x
    gc.collect()
    assert alive() is None


def test_a_forked_child_begins_anew(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    backlog = background.Backlog()
    kernels = [("text", "sm_90", "kernel")]
    assert backlog.has_to_wait("call", lambda: kernels, lambda: None)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert backlog.has_to_wait("call", lambda: kernels, lambda: None)
    assert backlog._process == -1


def test_the_oldest_call_is_forgotten(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.remembered.MAX_REMEMBERED", 2)
    backlog = background.Backlog()
    for call in range(5):
        backlog.has_to_wait(call, lambda: [("text", "sm_90", "kernel")], lambda: None)
    assert list(backlog._known) == [3, 4]


def test_in_place_has_the_kernel_of_other_memory(compiler: Compiler) -> None:
    f, x, out = new(), torch.tensor([1.0, 2.0]), torch.empty(2)
    with wl.config(background_compile=True):
        f(x, Y, out=out)
        assert compiler.has_begun.wait(10)
        compiler.has_begun.clear()
        f(x, Y, out=x)  # returns at once
        assert not compiler.has_begun.is_set()
        assert x.tolist() == RIGHT
