"""From a plan to a kernel's arguments: their order, their types, and the numbers that are refused before anything runs."""

from __future__ import annotations

import operator
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import execute, launch
from wideload.emit.kernel import emit_kernel
from wideload.execute import Launch, kernel_arguments, phase_of, run_launches, scalar_argument, stage_launches
from wideload.expr import HostCall, HostInput
from wideload.lower import ScalarParameter
from wideload.plan import KernelPlan

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i64, u8 = torch.int8, torch.int64, torch.uint8


class Recorder:
    """In the place of a loaded kernel."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, list[Any]]] = []

    def launch(self, device: int, arguments: tuple[Any, ...]) -> None:
        self.launched.append((device, [*arguments]))

    def launch_packed(self, device: int, types: str, arguments: tuple[Any, ...]) -> None:
        assert [{int: "l", float: "d"}[type(value)] for value in arguments] == [*types]
        self.launch(device, arguments)


def plans(f: wl.FusedFunction, *args: Any, out: Any = None) -> list[KernelPlan]:
    return [kernel.plan for kernel in f.plan(*args, out=out, target="sm_90").kernels]


def launches(kernels: list[KernelPlan]) -> tuple[list[Launch], list[Recorder]]:
    recorders = [Recorder() for _ in kernels]
    return [Launch(recorder, plan) for recorder, plan in zip(recorders, kernels, strict=True)], recorders  # type: ignore[arg-type]


def arguments_of(*given: Any) -> list[Any]:
    return [*kernel_arguments(*given)]


def place(tensor: torch.Tensor, offset_bytes: int) -> tuple[int, int]:
    """In the place of a pointer: which tensor, and how far behind its first element."""
    return id(tensor), offset_bytes


# ---- the order of arguments


def test_loads_stores_sizes_numbers() -> None:
    f = wl.fuse(lambda x, n, y, s: (x * s + y, y - n), name="f")
    x, y = torch.ones(4, 6)[:, ::2], torch.ones(3)
    outs = [torch.empty(4, 3), torch.empty(3)]
    first, second = plans(f, x, 7, y, 0.5)
    assert arguments_of(first, [x, y], outs, (7, 0.5), place) == [(id(x), 0), (id(y), 0), (id(outs[0]), 0), *first.sizes, 0.5]
    assert arguments_of(second, [x, y], outs, (7, 0.5), place) == [(id(y), 0), (id(outs[1]), 0), *second.sizes, 7]
    assert first.sizes[0] == 12
    assert second.sizes == (3,)


def test_a_view_inside_the_function_is_its_tensor_and_an_offset() -> None:
    f = wl.fuse(lambda x: (lambda gate, up: gate * up)(*x.chunk(2, -1)), name="f")
    x, out = torch.ones(4, 12, dtype=bf16), torch.empty(4, 6, dtype=bf16)
    (plan,) = plans(f, x)
    assert arguments_of(plan, [x], [out], (), place)[:3] == [(id(x), 0), (id(x), 12), (id(out), 0)]


def test_a_phase_is_the_address_modulo_a_whole_access() -> None:
    x = torch.zeros(100, dtype=f16)
    start = x.data_ptr() // 2 % 8
    assert [phase_of(x[k:]) for k in range(10)] == [(start + k) % 8 * 2 for k in range(10)]


def test_a_number_is_an_int_or_a_float_as_it_was_traced() -> None:
    f = wl.fuse(lambda x, n, s: x * (n + 1) + s / n, name="f")
    x, out = torch.ones(4), torch.empty(4)
    (plan,) = plans(f, x, 2, 3.0)
    arguments = arguments_of(plan, [x], [out], (2, 3.0), place)
    assert arguments[2:] == [4, 3, 1.5]
    assert [type(a) for a in arguments[2:]] == [int, int, float]


def test_a_host_tensor_is_passed_by_its_value() -> None:
    f = wl.fuse(lambda x, a, b, c: x * a + b.to(f32) - c, name="f")
    on_meta, out = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    a, b, c = torch.tensor(0.1, dtype=f16), torch.tensor(True), torch.tensor(-(2**40))
    (plan,) = plans(f, on_meta, a, b, c)
    values = arguments_of(plan, [on_meta, a, b, c], [out], (), place)[1:4]
    assert values == [a.item(), 1, -(2**40)]
    assert [type(value) for value in values] == [float, int, int]


def test_kernels_are_launched_in_order_on_the_device_of_the_tensors() -> None:
    f = wl.fuse(lambda x, y: (x + y, y + 1), name="f")
    x, y, outs = torch.ones(2, 3), torch.ones(3), [torch.empty(2, 3), torch.empty(3)]
    prepared, recorders = launches(plans(f, x, y))
    run_launches(prepared, 5, [x, y], outs, ())
    assert [recorder.launched[0][0] for recorder in recorders] == [5, 5]
    assert recorders[0].launched[0][1][:3] == [x.data_ptr(), y.data_ptr(), outs[0].data_ptr()]
    assert recorders[1].launched[0][1] == [y.data_ptr(), outs[1].data_ptr(), 3]


def test_staged_tensors_live_until_they_are_launched() -> None:
    """A seed's memory would else be given to the next seed."""
    f = wl.fuse(lambda x: F.dropout(x), name="f")
    x, out, seed = torch.ones(3), torch.empty(3), torch.tensor([7])
    kept = weakref.ref(seed)
    prepared, _ = launches(plans(f, x))
    run = stage_launches(prepared, 0, [x, seed], [out], ())
    del seed
    assert kept() is not None
    run()
    del run
    assert kept() is None


# ---- numbers refused


def parameter(value: Any, kind: type) -> ScalarParameter:
    return ScalarParameter(value, kind, "s")


def test_a_float_takes_any_real_number() -> None:
    s = HostInput(0, "s")
    for value, want in ((2.5, 2.5), (3, 3.0), (True, 1.0), (-0.0, -0.0), (float("inf"), float("inf"))):
        got = scalar_argument(parameter(s, float), (value,))
        assert type(got) is float
        assert (got, str(got)) == (want, str(want))


def test_an_int_stays_in_64_bits_and_an_int() -> None:
    s = HostInput(0, "s")
    for value in (2**63 - 1, -(2**63), 0):
        assert scalar_argument(parameter(s, int), (value,)) == value
    for value in (2**63, -(2**63) - 1):
        with pytest.raises(wl.TraceError, match=rf"s is {value}, which does not fit in 64 bits.*Pass a float"):
            scalar_argument(parameter(s, int), (value,))
    power = HostCall(operator.pow, (2, s))
    assert scalar_argument(parameter(power, int), (3,)) == 8
    with pytest.raises(wl.TraceError, match=r"pow\(2, s\) was an int when the function was traced and is now 0\.5.*static="):
        scalar_argument(parameter(power, int), (-1,))


def test_a_float_that_became_complex_is_refused_by_name() -> None:
    root = HostCall(operator.pow, (HostInput(0, "s"), 0.5))
    with pytest.raises(wl.WideloadError, match=r"pow\(s, 0\.5\) was a float when the function was traced and is now \(.*j\).*static="):
        scalar_argument(parameter(root, float), (-8.0,))


@pytest.mark.parametrize("dtype", [i8, u8, torch.int16, torch.int32, i64], ids=str)
def test_an_int_beyond_the_dtype_is_judged_as_torch_judges_it(dtype: torch.dtype) -> None:
    """Sums wrap around; a bound of clamp, a choice of where and a filling value are refused."""
    x, info = torch.zeros(4, dtype=dtype), torch.iinfo(dtype)
    functions = [
        lambda x, n: x + n, lambda x, n: x * n, lambda x, n: x.clamp(max=n), lambda x, n: torch.where(x == 0, x, n),
        lambda x, n: torch.full_like(x, n), lambda x, n: x.masked_fill(x == 0, n), lambda x, n: x - n,
    ]  # fmt: skip
    for function in functions:
        f = wl.fuse(function, name="f")
        (plan,) = plans(f, x, 1)
        for n in (info.max, info.min, 1, info.max + 1, info.min - 1, 2 * info.max + 4):
            if not -(2**63) <= n < 2**63:
                continue
            try:
                function(x, n)
            except RuntimeError:
                with pytest.raises(wl.DtypeError):
                    arguments_of(plan, [x], [x], (n,), place)
            else:
                assert arguments_of(plan, [x], [x], (n,), place)[-1] == n


def test_nothing_is_launched_when_a_number_is_refused() -> None:
    f = wl.fuse(lambda x, y, n: (x + 1.0, y.clamp(max=n)), name="f")
    x, y = torch.ones(2, 3), torch.ones(3, dtype=i8)
    prepared, recorders = launches(plans(f, x, y, 100))
    with pytest.raises(wl.DtypeError):
        run_launches(prepared, 0, [x, y], [torch.empty(2, 3), torch.empty(3, dtype=i8)], (1000,))
    assert [recorder.launched for recorder in recorders] == [[], []]


# ---- several kernels of one call


def two_shapes(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return q * 2, k * 2


def plans_of(*shapes: tuple[int, ...]) -> list[KernelPlan]:
    return plans(wl.fuse(two_shapes), *(torch.empty(shape, device="meta") for shape in shapes))


def test_kernels_of_several_shapes_run_side_by_side_and_one_alone_waits_first() -> None:
    def statements(plan: KernelPlan) -> list[str]:
        text = emit_kernel(plan.program, plan.variant)
        return text[text.index("{", text.index("__global__")) + 1 :].rstrip().removesuffix("}").strip().splitlines()

    start = "if (gridDim.x <= 2048) let_next_start();"
    for plan in plans_of((64, 64), (32, 64)):
        first, *_, last = statements(plan)
        assert (first.strip(), last.strip()) == (start, "wait_for_previous();")
    first, *_, last = statements(*plans_of((64, 64), (64, 64)))
    assert (first.strip(), last.strip()) == ("wait_for_previous();", "let_next_start();")  # 8 KiB a block


@pytest.mark.parametrize(("arch", "count"), [("sm_80", 0), ("sm_90", 1)])
def test_only_later_architectures_have_the_instructions(arch: str, count: int) -> None:
    kernels = wl.fuse(two_shapes).plan(torch.empty(64, 64, device="meta"), torch.empty(32, 64, device="meta"), target=arch).kernels
    for kernel in kernels:
        assert [kernel.sass.count(name) for name in ("PREEXIT", "ACQBULK")] == [count, count]


@pytest.mark.parametrize(("capability", "driver", "overlaps"), [((9, 0), 12030, True), ((9, 0), 12020, False), ((8, 9), 13000, False)])
def test_all_but_the_first_of_several_overlap_where_the_gpu_and_the_driver_can(
    capability: tuple[int, int], driver: int, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[bool] = []
    bindings = SimpleNamespace(CUresult=SimpleNamespace(CUDA_SUCCESS=0), cuDriverGetVersion=lambda: (0, driver))
    monkeypatch.setattr(launch, "_driver", lambda: bindings)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(execute, "can_overlap", launch.can_overlap.__wrapped__)
    monkeypatch.setattr(execute, "device_arch", lambda device: "sm_90")
    monkeypatch.setattr(execute, "LoadedKernel", lambda cubin, grid, threads, *, overlaps: made.append(overlaps))
    execute.prepare_launches(plans_of((64, 64), (32, 64)), 0)
    execute.prepare_launches(plans_of((64, 64), (64, 64)), 0)
    assert made == [False, overlaps, overlaps]
