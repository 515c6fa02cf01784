"""The lines that launch kernels: each argument in its place, all before the first launch; CPU tensors stand in for a GPU's."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import execute, steps
from wideload.execute import Launch, Output
from wideload.launch import ADDRESS_OF
from wideload.random import draw_seed
from wideload.replay import NodeLayout
from wideload.steps import Steps, define, run_steps, runner_of, steps_into, steps_of_new

CPU = torch.device("cpu")


class Kernel:
    """In the place of a loaded one: what it was launched with, by either route."""

    def __init__(self, log: list[Any], refuses: bool = False) -> None:
        self.log, self.refuses = log, refuses

    def launcher(self, types: str) -> Callable[[tuple[Any, ...], int], None]:
        def launch(arguments: tuple[Any, ...], stream: int) -> None:
            if self.refuses:
                raise RuntimeError("invalid argument")
            assert [{int: "l", float: "d"}[type(value)] for value in arguments] == [*types]
            self.log.append((arguments, stream))

        return launch

    def native_launcher(self, native: Any, device: int, offsets: tuple[int, ...], sizes: tuple[int, ...], types: str) -> Any:
        count = len(offsets) + len(sizes)

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
        def driver(config: int, function: int, parameters: Any, extra: None) -> int:
            """Read the parameters as the driver does."""
            described = (ctypes.c_uint32 * 7).from_address(config)
            assert ([*described], function, extra) == ([12, 1, 1, 256, 1, 1, 64], 77, None)
            stream = ctypes.c_uint64.from_address(config + 32).value
            kinds = [{"l": ctypes.c_int64, "d": ctypes.c_double}[kind] for kind in "l" * count + types]
            self.log.append((tuple(kind.from_address(parameters[at]).value for at, kind in enumerate(kinds)), stream))
            return 1 if self.refuses else 0

        return native.Launcher(
            launch=ctypes.cast(driver, ctypes.c_void_p).value,
            config=struct.pack("7I4xQQI4x", 12, 1, 1, 256, 1, 1, 64, 0, 0, 0),
            function=77,
            kept=driver,
            address_of=ADDRESS_OF,
            stream_of=torch._C._cuda_getCurrentRawStream,
            bind=steps.bind_context,
            refuse=lambda status: wl.DeviceError(f"the driver did not launch a kernel: invalid argument ({status})"),
            device=0,
            offsets=offsets,
            sizes=sizes,
            types=types,
        )


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, either: str) -> None:
    monkeypatch.setattr(steps, "bind_context", lambda index: None)
    monkeypatch.setattr(steps, "THREAD", SimpleNamespace(bound=set()))
    monkeypatch.setattr(execute, "_EMPTY", None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)


def launches(f: wl.FusedFunction, *args: Any, refuses: bool = False) -> tuple[list[Launch], list[Any]]:
    log: list[Any] = []
    kernels = f.plan(*args, target="sm_90").kernels
    return [Launch(Kernel(log, refuses), kernel.plan) for kernel in kernels], log  # type: ignore[arg-type]


def output(dtype: torch.dtype, *shape: int) -> Output:
    return Output(0, dtype, NodeLayout(shape, torch.empty(shape).stride()), 0)


def call(of: Steps, *tensors: torch.Tensor, numbers: tuple[Any, ...] = (), out: torch.Tensor | None = None) -> Any:
    """What the steps return of arguments that a shortcut has taken apart."""
    lines = [f"t{at} = tensors[{at}]" for at in range(len(tensors))] + [f"n{at} = numbers[{at}]" for at in range(len(numbers))]
    return define("def call(tensors, numbers, out):", Steps((*lines, *of.lines), of.names))(tensors, numbers, out)


def test_new_results_are_allocated_and_written() -> None:
    f = wl.fuse(lambda x, s: (x[:, 2:] * s, x + 1), name="f")
    x = torch.ones(4, 6)
    prepared, log = launches(f, x, 0.5)
    outputs = output(torch.float32, 4, 4), output(torch.float32, 4, 6)
    second, first = call(steps_of_new(prepared, outputs, CPU, (1, 0), 1), x, numbers=(0.5,))
    assert (first.shape, first.dtype, second.shape, second.stride()) == ((4, 4), torch.float32, (4, 6), (6, 1))
    sizes = [launch.plan.sizes for launch in prepared]
    assert log == [
        ((x.data_ptr() + 8, first.data_ptr(), *sizes[0], 0.5), 7),
        ((x.data_ptr(), second.data_ptr(), *sizes[1]), 7),
    ]
    log.clear()
    alone = call(steps_of_new(prepared, outputs, CPU, 1, 1), x, numbers=(0.5,))
    assert log[1][0][1] == alone.data_ptr()


def test_a_kernel_reads_what_the_one_before_has_written() -> None:
    """Of a bias: the gradient of x, that of the bias, and behind them the partial sums; by both ways that launch."""
    x, bias, grad = torch.ones(40, 64), torch.ones(64), torch.ones(40, 64)
    log: list[Any] = []
    kernels = wl.fuse(lambda x, bias: (x + bias).tanh(), name="f").plan_backward(x, bias, target="sm_90").kernels
    prepared = [Launch(Kernel(log), kernel.plan) for kernel in kernels]  # type: ignore[arg-type]
    outputs = output(torch.float32, 40, 64), output(torch.float32, 64), output(torch.float32, 2, 64)
    outs = call(steps_of_new(prepared, outputs, CPU, range(3), 3), x, bias, grad)
    of_x, of_bias, parts = (out.data_ptr() for out in outs)
    (first, _), (total, _) = log
    assert first[3:5] == (of_x, parts)
    assert total[:2] == (parts, of_bias)
    inputs = [tensor.data_ptr() for tensor in (x, bias, grad)]
    assert [launch.arguments(inputs, [of_x, of_bias, parts], ()) for launch in prepared] == [first, total]


def test_what_is_written_into_counts_as_changed() -> None:
    f = wl.fuse(lambda x: x + 1, name="f")
    x, out = torch.ones(64), torch.zeros(64)
    prepared, log = launches(f, x)
    version = out._version
    assert call(steps_into(prepared, CPU, 1), x, out=out) is out
    assert log == [((x.data_ptr(), out.data_ptr(), *prepared[0].plan.sizes), 7)]
    assert out._version == version + 1


def test_a_seed_is_drawn_behind_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of `draw_seed`, by the same generator; where a number is refused none is drawn."""
    made: list[torch.Tensor] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.empty_strided(shape, strides, dtype=dtype))
        return made[-1]

    monkeypatch.setattr(execute, "_EMPTY", empty)
    x, out = torch.ones(64), torch.zeros(64)
    prepared, log = launches(wl.fuse(lambda x: F.dropout(x, 0.25), name="f"), x)
    torch.manual_seed(3)
    want = [draw_seed(CPU) for _ in range(2)]
    torch.manual_seed(3)
    call(steps_into(prepared, CPU, 1, draws=True), x, out=out)
    result = call(steps_of_new(prepared, [output(torch.float32, 64)], CPU, 0, 1, draws=True), x)
    first, _, second = made
    assert [arguments[:3] for arguments, _ in log] == [
        (x.data_ptr(), written.data_ptr(), seed.data_ptr()) for written, seed in ((out, first), (result, second))
    ]
    assert [(seed.dtype, seed.tolist()) for seed in (first, second)] == [(seed.dtype, seed.tolist()) for seed in want]
    prepared, _ = launches(wl.fuse(lambda x, p: F.dropout(x, p), name="f"), x, 0.5)
    state = torch.get_rng_state()
    with pytest.raises(wl.RangeError):
        call(steps_into(prepared, CPU, 1, draws=True), x, numbers=(1.5,), out=out)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_number_is_refused_before_anything_is_launched() -> None:
    x = torch.ones(64, dtype=torch.int64)
    prepared, log = launches(wl.fuse(lambda x, n: (x[:32] + 1, x * n), name="f"), x, 3)
    of = steps_of_new(prepared, (output(torch.int64, 32), output(torch.int64, 64)), CPU, (0, 1), 1)
    with pytest.raises(wl.TraceError, match="does not fit in 64 bits"):
        call(of, x, numbers=(2**63,))
    assert not log
    call(of, x, numbers=(2**63 - 1,))
    assert log[1][0][-1] == 2**63 - 1


def words(f: Callable[..., Any], x: torch.Tensor, traced: tuple[Any, ...], *given: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """What kernels are passed of these numbers, where the function was traced with others; by both ways that launch alike."""
    prepared, log = launches(wl.fuse(f, name="f"), x, *traced)
    outputs = [output(x.dtype, *x.shape)]
    of, run = steps_of_new(prepared, outputs, CPU, 0, 1), runner_of(prepared, outputs, CPU, 1)
    for numbers in given:
        call(of, x, numbers=numbers)
        run([x], numbers)
    skipped = 2 + len(prepared[0].plan.sizes)
    found = [arguments[skipped:] for arguments, _ in log]
    assert repr(found[::2]) == repr(found[1::2])
    return found[::2]


INF, NAN = float("inf"), float("nan")


def test_numbers_are_passed_as_they_are() -> None:
    x = torch.ones(64)
    floats = [0.5, -0.0, 3.4e38, 1e300, -INF, NAN]
    assert repr(words(lambda x, s: x * s, x, (2.0,), *[(s,) for s in floats])) == repr([(s,) for s in floats])
    assert words(lambda x, n: x * n, x, (2,), (7,), (-(2**63),)) == [(7,), (-(2**63),)]
    assert words(lambda x, n: x * n, x.to(torch.int8), (2,), (300,)) == [(300,)]
    assert words(lambda x, c: x * c, x.to(torch.complex64), (2j,), (1 - 0.5j,), (complex(INF, 0),)) == [(1, -0.5), (INF, 0)]
    assert words(lambda x, s, t: x * t + s, x, (2.0, 3.0), (0.25, 0.5)) == [(0.5, 0.25)]


def test_numbers_made_of_numbers_are_worked_out_at_each_call() -> None:
    x = torch.ones(64)
    assert words(lambda x, s, n: x * (1 - s) ** n, x, (0.5, 2), (0.25, 3), (2.0, 2)) == [(0.421875,), (1.0,)]
    assert words(lambda x, n: x * (n / 4), x, (3,), (2,), (2**70,)) == [(0.5,), (2.0**68,)]

    def long(x: torch.Tensor, s: float) -> torch.Tensor:
        for _ in range(10):
            s = s + s  # one number twice, worked out once
        for _ in range(210):  # more than brackets may be nested
            s = s * 0.5
        return x * s

    assert words(long, x, (2.0,), (1.0,)) == [(2.0**-200,)]
    assert len(steps_of_new(launches(wl.fuse(long), x, 2.0)[0], [output(x.dtype, 64)], CPU, 0, 1).lines) < 230


def test_a_number_that_is_another_kind_now_is_taken_or_refused() -> None:
    x = torch.ones(64)
    assert words(lambda x, s, n: x * s**n, x, (0.5, 2), (0.5, -1)) == [(2.0,)]
    with pytest.raises(wl.TraceError, match=r"was an int when the function was traced and is now 0\.5"):
        words(lambda x, n: x * 2**n, x, (2,), (-1,))
    with pytest.raises(ZeroDivisionError):
        words(lambda x, s: x * (1 / s), x, (2.0,), (0.0,))
    with pytest.raises(wl.TraceError, match="does not fit in 64 bits"):
        words(lambda x, n: x * (n * n), x, (2,), (2**40,))
    with pytest.raises(wl.DtypeError, match="without overflow"):
        words(lambda x, n: x.clamp(max=n), x.to(torch.uint8), (2,), (300,))


def test_a_refused_launch_is_told() -> None:
    prepared, _ = launches(wl.fuse(lambda x: x + 1, name="f"), torch.ones(64), refuses=True)
    with pytest.raises(wl.DeviceError, match="did not launch a kernel: invalid argument"):
        call(steps_into(prepared, CPU, 1), torch.ones(64), out=torch.ones(64))


def test_a_runner_takes_tensors_and_numbers_on_any_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.ones(64), torch.ones(64)
    prepared, log = launches(wl.fuse(lambda x, y, s: x * s + y, name="f"), x, y, 0.5)
    run = runner_of(prepared, (output(torch.float32, 64),), CPU, 2)
    (out,) = run([x, y], (0.25,))
    assert log == [((x.data_ptr(), y.data_ptr(), out.data_ptr(), *prepared[0].plan.sizes, 0.25), 7)]
    elsewhere: list[Any] = []
    monkeypatch.setattr(steps, "run_new", lambda *given: elsewhere.append(given))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1)
    runner_of(prepared, (output(torch.float32, 64),), CPU, 2)([x, y], (0.25,))
    assert elsewhere == [(prepared, CPU, [x, y], (output(torch.float32, 64),), (0.25,))]
    assert len(log) == 1


def test_calls_of_other_sizes_have_the_same_lines() -> None:
    f = wl.fuse(lambda x: x + 1, name="f")
    of = [steps_of_new(launches(f, torch.ones(n))[0], (output(torch.float32, n),), CPU, 0, 1) for n in (64, 128)]
    assert of[0].lines == of[1].lines
    codes = [define("def call(t0):", each).__code__ for each in of]
    assert codes[0] == codes[1]
    assert codes[0] is not codes[1]  # what the interpreter notes of one's globals is not of the other's
    assert run_steps(print, (1, 0), range(2), ()).lines == ("outs = run((t0, t1, ), ())", "return (outs[1], outs[0], )")
    assert run_steps(print, 0, (2, 0), (1, 0)).lines == ("outs = run((t2, t0, ), (n1, n0, ))", "return outs[0]")
