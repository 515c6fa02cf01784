"""The decorator as users meet it: arguments refused, methods, captured values, gradients, threads, copies."""

from __future__ import annotations

import abc
import copy
import enum
import functools
import gc
import inspect
import pickle
import re
import threading
import types
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import wideload as wl
from wideload import cache, promotion
from wideload.trace import trace_function

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

X, Y = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor([3.0, -2.0, 0.25])
add = wl.fuse(lambda x, y: x + y, name="add")
gain = 2.0


def count_traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    traced: list[str] = []

    def counted(fn: Any, name: str, *rest: Any) -> Any:
        traced.append(name)
        return trace_function(fn, name, *rest)

    monkeypatch.setattr("wideload.fused.trace_function", counted)
    return traced


# ---- what a function may be


def test_a_decorator_with_and_without_options() -> None:
    @wl.fuse
    def plain(x: Any, s: Any = 2.0) -> Any:
        """Scale it."""
        return x * s

    @wl.fuse(numerics="eager", name="kernel")
    def optioned(x: Any) -> Any:
        return x + 1

    assert torch.equal(plain(X), X * 2)
    assert torch.equal(optioned(X), X + 1)
    assert (plain.__name__, plain.__doc__, plain.__module__) == ("plain", "Scale it.", __name__)
    assert plain.__qualname__.endswith("<locals>.plain")
    assert "plain" in repr(plain)
    assert optioned.__name__ == "kernel"
    assert isinstance(plain, wl.FusedFunction)
    assert torch.equal(plain.__wrapped__(X), X * 2)
    assert list(inspect.signature(plain).parameters) == ["x", "s"]


def test_callables_of_every_kind() -> None:
    class Doubler:
        def __call__(self, x: Any) -> Any:
            return x * 2

    kinds: list[Any] = [
        torch.square,
        torch.nn.ReLU6(),
        torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Softsign()),
        functools.partial(torch.add, alpha=3),
        functools.partial(lambda x, y, s: x * s + y, s=2.0),
        Doubler(),
        Doubler().__call__,
        wl.fuse(lambda x: x - 1),
    ]
    for fn in kinds:
        arguments = (X, Y) if isinstance(fn, functools.partial) else (X,)
        assert torch.equal(wl.fuse(fn)(*arguments), fn(*arguments)), fn


def test_what_cannot_be_fused() -> None:
    for fn, message in ((3, "got a int"), (torch.nn.SiLU, "got the class SiLU"), ("f", "got a str")):
        with pytest.raises(wl.TraceError, match=message):
            wl.fuse(fn)  # type: ignore[call-overload]
    with pytest.raises(wl.TraceError, match="contents may change"):
        wl.fuse(torch.nn.PReLU())(X)


def test_options_are_checked_at_once() -> None:
    with pytest.raises(wl.TraceError, match='numerics=\'fast\'; allowed: "fused" and "eager"'):
        wl.fuse(lambda x: x, numerics="fast")  # type: ignore[call-overload]
    for option, allowed, values in (
        ("name", "a string, and None", (3, ["x"], float("nan"), torch.ones(2))),
        ("fast_math", "True and False", (None, 1, "no")),
        ("static", "the name of a parameter, or several", (None, 3, (1,), torch.ones(2), ["x", None])),
    ):
        for value in values:
            with pytest.raises(wl.TraceError, match=rf"^{option}={re.escape(repr(value))}; allowed: {allowed}"):
                wl.fuse(lambda x: x, **{option: value})
    with pytest.raises(wl.TraceError, match='compile=\'jit\'; allowed: "op" and "inline"'):
        wl.fuse(lambda x: x, compile="jit")
    with pytest.raises(wl.TraceError, match=r"static= names \['m', 'n'\], but f has the parameters \['x', 's'\]"):
        wl.fuse(lambda x, s: x, name="f", static=("n", "s", "m"))
    with pytest.raises(wl.TraceError, match="a parameter of the fused function is called out, which is taken"):
        wl.fuse(lambda x, *, out=None: x)


# ---- arguments refused


def test_wrong_arguments_show_the_signature() -> None:
    f = wl.fuse(lambda x, y, *, s=1.0: x + y * s, name="f")
    for args, kwargs, message in (
        ((X,), {}, "missing a required argument: 'y'"),
        ((X, Y, 2.0), {}, "too many positional arguments"),
        ((X, Y), {"t": 1}, "unexpected keyword argument 't'"),
        ((X, Y), {"x": X}, "multiple values for argument 'x'"),
    ):
        with pytest.raises(wl.TraceError, match=rf"f\(x, y, \*, s=1\.0\): .*{message}"):
            f(*args, **kwargs)
        with pytest.raises(TypeError):
            f.plan(*args, target="sm_90", **kwargs)


def test_a_call_without_tensors_is_refused() -> None:
    for f, args in ((wl.fuse(lambda s: s + 1, name="f"), (2.0,)), (wl.fuse(lambda *xs: sum(xs), name="f"), ())):
        with pytest.raises(wl.TraceError, match=r"f was given no tensor\. A fused function needs at least one tensor argument"):
            f(*args)


class Holder:
    value = 1


@pytest.mark.parametrize(
    "value",
    [X.numpy(), {1, 2}, object(), Holder(), Holder, range(3), slice(3), iter("x"), torch.Generator()],
    ids=lambda v: type(v).__name__,
)
def test_arguments_of_other_types_are_refused_by_name(value: Any) -> None:
    f = wl.fuse(lambda x, odd: x + 1, name="f")
    for given in (value, (value,), {"k": value}):
        with pytest.raises(wl.TraceError, match=r"argument odd\w* of f is a \S+; allowed: tensors, numbers, and bool, str, None, dtypes"):
            f(X, given)


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:.*quantize:UserWarning")
def test_tensors_without_strides_are_refused() -> None:
    dense = torch.eye(3)
    for x, error, message in (
        (dense.to_sparse(), wl.LayoutError, r"argument y is a torch\.sparse_coo tensor; .*\.to_dense\(\)"),
        (dense.to_sparse_csr(), wl.LayoutError, r"argument y is a torch\.sparse_csr tensor"),
        (dense.to_mkldnn(), wl.LayoutError, r"argument y is a torch\._mkldnn tensor"),
        (torch.quantize_per_tensor(dense, 0.1, 0, torch.qint8), wl.DtypeError, r"y is quantised \(torch\.qint8\).*\.dequantize\(\)"),
    ):
        with pytest.raises(error, match=message):
            add(X, x)


@pytest.mark.filterwarnings("ignore:.*nested:UserWarning")
def test_a_nested_tensor_of_the_old_layout_is_refused() -> None:
    with pytest.raises(wl.LayoutError, match="nested"):
        add(X, torch.nested.nested_tensor([X, X[:2]]))


def test_tensors_on_different_devices_are_refused() -> None:
    on_meta = torch.empty(3, device="meta")
    with pytest.raises(wl.DeviceError, match=r"add got x on cpu and y on meta\. Put all tensors on one device"):
        add(X, on_meta)
    with pytest.raises(wl.DeviceError, match="add got x on meta and y on cpu"):
        add(on_meta, X)
    with pytest.raises(wl.DeviceError, match="add got x on meta and y on cpu"):
        add(on_meta[0], X)  # only the CPU's 0-dim tensors act as numbers
    assert add(X[0], on_meta).device == add(on_meta, X[0]).device == on_meta.device


def test_shapes_that_do_not_broadcast_are_refused_at_every_call() -> None:
    f = wl.fuse(lambda x, y: x + y)
    for _ in range(2):
        with pytest.raises(wl.LayoutError, match="do not broadcast"):
            f(X, torch.ones(4))
        f(X, Y)


def test_complex_numbers_run_on_the_cpu_and_dtypes_without_kernels_are_refused_by_plans() -> None:
    f = wl.fuse(lambda x: x * 2, name="f")
    z = torch.tensor([1 + 2j, -3j])
    assert torch.equal(f(z), z * 2)
    half = f(z.to(torch.complex32))  # which torch on the CPU does not multiply
    assert (half.dtype, half.to(torch.complex64).tolist()) == (torch.complex32, [2 + 4j, -6j])
    assert torch.equal(wl.fuse(lambda x, s: x + s)(X, 1j), X + 1j)
    with pytest.raises(wl.DtypeError, match=r"argument x is torch.bits8, .*allowed: f64, .*bool\. Convert it with \.to\(\)"):
        wl.fuse(lambda x: x.float()).plan(torch.zeros(3, dtype=torch.bits8), target="sm_90")


def test_conjugate_and_negative_views_are_read_as_they_are() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(wl.fuse(lambda x: x * 2)(z.conj()), z.conj() * 2)
    assert torch.equal(wl.fuse(lambda x: x + 1)(z.conj().imag), torch.tensor([-1.0, 5.0]))


# ---- plans


def test_a_plan_needs_a_target_without_a_gpu() -> None:
    with pytest.raises(wl.DeviceError, match=r'add\.plan got tensors on cpu and no target.*target="h200"'):
        add.plan(X, Y)
    with pytest.raises(wl.DeviceError, match="no GPU is called 'h2000'"):
        add.plan(X, Y, target="h2000")
    assert add.plan(X, Y, target="h200").arch == add.plan(X, Y, target="sm_90").arch == "sm_90"


def test_a_plan_checks_out_as_a_call_does() -> None:
    with pytest.raises(wl.LayoutError, match="out= has shape"):
        add.plan(X, Y, out=torch.empty(4), target="sm_90")
    buffer = torch.zeros(4)
    with pytest.raises(wl.OverlapError):
        add.plan(buffer[:3], Y, out=buffer[1:], target="sm_90")
    assert len(add.plan(X, Y, out=X, target="sm_90").kernels) == 1
    assert X.tolist() == [-1.0, 0.5, 2.0]


def test_out_of_results_that_are_no_tensors_or_one_tensor_twice() -> None:
    def f(x: Any, s: Any) -> Any:
        y = x + 1
        return y, (y, None), s

    out = torch.zeros(3)
    assert wl.fuse(f)(X, 2.0, out=(out, (out, None), None))[1][0] is out
    assert torch.equal(out, X + 1)
    with pytest.raises(wl.LayoutError, match="two tensors for one that is returned twice"):
        wl.fuse(f)(X, 2.0, out=(out, (torch.zeros(3), None), None))
    with pytest.raises(wl.LayoutError, match="holds float for a result that is number"):
        wl.fuse(f)(X, 2.0, out=(out, (out, None), 2.0))
    with pytest.raises(wl.LayoutError, match="holds NoneType for a result that is tensor"):
        wl.fuse(f)(X, 2.0, out=(out, (None, None), None))


# ---- shapes that decide


def either(x: Any, y: Any) -> Any:
    try:
        return x + y
    except ValueError:
        return x * 10


def halved(x: Any) -> Any:
    try:
        return x.view(2, -1) + 1
    except ValueError:
        return x * 10


@pytest.mark.parametrize("order", [(3, 4, 3), (4, 3, 4)])
def test_a_function_that_catches_a_misfit_is_traced_for_its_shapes(order: tuple[int, ...]) -> None:
    add_or_scale, halve_or_scale = wl.fuse(either), wl.fuse(halved)
    for size in order:
        x, y = torch.ones(size), torch.ones(3)
        assert torch.equal(add_or_scale(x, y), x + y if size == 3 else x * 10)
        assert torch.equal(halve_or_scale(x), x.view(2, -1) + 1 if size == 4 else x * 10)


@pytest.mark.parametrize("sizes", [(8, 5, 8), (5, 8, 5)])
def test_the_number_of_chunks_follows_the_shape(sizes: tuple[int, ...]) -> None:
    f = wl.fuse(lambda x: x.chunk(4, -1))
    for size in sizes:
        x = torch.arange(float(size))
        assert [piece.tolist() for piece in f(x)] == [piece.tolist() for piece in x.chunk(4, -1)]


def test_traces_of_many_shapes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wideload.remembered.MAX_REMEMBERED", 4)
    f = wl.fuse(lambda x: x * x.shape[0])
    for size in (*range(1, 9), 1):
        assert f(torch.ones(size)).tolist() == [size] * size
    assert len(f._traces) == 4


# ---- methods


class Scaler:
    rate = 2.0

    def __init__(self, shift: float = 0.0) -> None:
        self.shift = shift

    @wl.fuse
    def apply(self, x: Any, s: Any = 1.0) -> Any:
        return x * self.rate * s + self.shift

    @staticmethod
    @wl.fuse
    def static(x: Any) -> Any:
        return x + 1

    @classmethod
    @wl.fuse
    def of_class(cls, x: Any) -> Any:
        return x * cls.rate


def test_a_method_binds_self_and_sees_its_attributes_change() -> None:
    a, b = Scaler(1.0), Scaler(-1.0)
    assert torch.equal(a.apply(X), X * 2 + 1)
    assert torch.equal(b.apply(X, s=3.0), X * 2 * 3 - 1)
    a.shift = 5.0
    assert torch.equal(a.apply(X), X * 2 + 5)
    assert torch.equal(b.apply(X), X * 2 - 1)
    b.rate = 4.0
    assert torch.equal(b.apply(X), X * 4 - 1)
    assert torch.equal(a.apply(X), X * 2 + 5)
    assert a.apply is a.apply
    assert isinstance(Scaler.apply, wl.FusedFunction)
    assert a.apply.plan(X, target="sm_90").kernels[0].name == "apply_dense"
    assert torch.equal(Scaler.static(X), X + 1)
    assert torch.equal(a.static(X), X + 1)
    assert torch.equal(Scaler.apply(b, X, s=2.0), X * 4 * 2 - 1)
    assert torch.equal(Scaler.of_class(X), X * 2)


def test_a_class_method_is_bound_once_a_class() -> None:
    fused = Scaler.__dict__["of_class"].__func__
    slower = type("Slower", (Scaler,), {"rate": 0.5})
    for _ in range(2):
        assert torch.equal(slower.of_class(X), X * 0.5)
        assert torch.equal(Scaler.of_class(X), X * 2)
    assert fused.bound_to(slower) is fused.bound_to(slower) is not fused.bound_to(Scaler)
    assert pickle.loads(pickle.dumps(Scaler.__dict__["apply"]))._function is Scaler.apply


def test_copies_of_an_object_have_methods_of_their_own() -> None:
    first = Scaler(1.0)
    first.apply(X)
    for second in (copy.copy(first), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        second.shift = 3.0
        assert torch.equal(second.apply(X), X * 2 + 3)
        assert torch.equal(first.apply(X), X * 2 + 1)


def test_methods_of_objects_that_have_no_weak_references_or_hashes() -> None:
    class Slotted:
        __slots__ = ("s",)

        @wl.fuse
        def apply(self, x: Any) -> Any:
            return x * self.s

    @dataclass
    class Unhashable:
        s: float

        @wl.fuse
        def apply(self, x: Any) -> Any:
            return x * self.s

    slotted = Slotted()
    slotted.s = 3.0
    assert torch.equal(slotted.apply(X), X * 3)
    assert torch.equal(Unhashable(4.0).apply(X), X * 4)


def test_methods_of_one_name_are_not_mixed_up() -> None:
    def times(k: float) -> wl.FusedFunction:
        return wl.fuse(lambda self, x: x * k)

    class Two:
        double, triple = times(2.0), times(3.0)

    two = Two()
    assert torch.equal(two.double(X), X * 2)
    assert torch.equal(two.triple(X), X * 3)


def test_a_fused_function_is_a_method_where_a_class_has_it_in_its_body() -> None:
    double = wl.fuse(lambda self, x: x * 2 * self.rate)

    class Names:
        rate = 3.0
        first = second = double

    assert Names.first is double
    assert torch.equal(Names().second(X), X * 6)
    Names.later = double  # as builtins are: it cannot know
    assert Names().later is double
    assert not Names.first.is_unbound((int, X))
    # Dynamo takes a descriptor in an object's __dict__ for one of its class and finds none there (torch 2.10, 2.11).
    assert not hasattr(wl.FusedFunction, "__get__")


def test_a_method_of_a_class_with_slots_is_called_through_the_class() -> None:
    @dataclass(frozen=True, slots=True)  # makes a second class of the first one's body
    class Slotted:
        rate: float

        @wl.fuse
        def apply(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.rate

    assert torch.equal(Slotted.apply(Slotted(3.0), X), X * 3)


def test_a_method_of_any_kind_of_class() -> None:
    class Modes(enum.Enum):
        TWO = 2

        @wl.fuse
        def times(self, x: Any) -> Any:
            return x * self.value

    assert [*Modes] == [Modes.TWO]
    assert torch.equal(Modes.TWO.times(X), X * 2)

    class Strict(type):
        def __setattr__(cls, name: str, value: object) -> None:
            raise AttributeError(name)

    class Closed(metaclass=Strict):
        rate = 3.0

        @wl.fuse
        def plain(self, x: Any, s: Any) -> Any:
            return x * self.rate * s

        half = functools.partialmethod(wl.fuse(lambda self, x, s: x * self.rate * s), s=0.5)

    assert torch.equal(Closed().plain(X, 1.0), X * 3)
    assert torch.equal(Closed().half(X), X * 1.5)

    class Abstract(abc.ABC):
        @wl.fuse
        @abc.abstractmethod
        def apply(self, x: Any) -> Any: ...

    class Whole(Abstract):
        apply = wl.fuse(lambda self, x: x + 1)

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]
    assert torch.equal(Whole().apply(X), X + 1)


def test_a_class_that_has_gone_is_not_kept_by_its_functions() -> None:
    double = wl.fuse(lambda self, x: x * 2)
    cls = type("Short", (), {"double": double})
    assert cls.double is double
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


def test_a_method_calls_the_overridden_one() -> None:
    class Child(Scaler):
        @wl.fuse
        def apply(self, x: Any) -> Any:
            return super().apply(x) * 10

    assert torch.equal(Child(1.0).apply(X), (X * 2 + 1) * 10)


def test_equal_instances_are_not_mixed_up() -> None:
    @dataclass(frozen=True)
    class Named:
        name: str
        s: float = field(compare=False)

        @wl.fuse
        def apply(self, x: Any) -> Any:
            return x * self.s

    first, second = Named("a", 2.0), Named("a", 3.0)
    assert torch.equal(first.apply(X), X * 2)
    assert torch.equal(second.apply(X), X * 3)


def test_an_instance_is_freed() -> None:
    scaler = Scaler()
    scaler.apply(X)
    freed = weakref.ref(scaler)
    del scaler
    gc.collect()
    assert freed() is None


def test_a_static_method_may_be_fused_from_outside() -> None:
    class Holds:
        @wl.fuse
        @staticmethod
        def apply(x: Any) -> Any:
            return x + 1

    assert torch.equal(Holds.apply(X), X + 1)
    assert torch.equal(Holds().apply(X), X + 1)


# ---- values from outside


def test_globals_and_closures_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    local = 1.0

    @wl.fuse
    def scaled(x: Any) -> Any:
        return x * gain + local

    assert torch.equal(scaled(X), X * 2 + 1)
    monkeypatch.setitem(globals(), "gain", 3.0)
    assert torch.equal(scaled(X), X * 3 + 1)
    local = 7.0
    assert torch.equal(scaled(X), X * 3 + 7)


@pytest.mark.parametrize("other", [3.0, float("nan")])
def test_a_value_that_another_thread_changes_while_it_is_traced(monkeypatch: pytest.MonkeyPatch, other: float) -> None:
    values = types.SimpleNamespace(gain=2.0)
    scaled = wl.fuse(lambda x: x * values.gain, name="scaled")
    traced: list[float] = []

    def trace(*given: Any) -> Any:
        if not traced:
            values.gain = other
        traced.append(values.gain)
        return trace_function(*given)

    monkeypatch.setattr("wideload.fused.trace_function", trace)
    assert torch.equal(scaled(X), X * other) or other != other
    values.gain = 2.0
    assert torch.equal(scaled(X), X * 2)
    assert len(traced) == 3


def test_a_value_met_before_is_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = count_traces(monkeypatch)
    config = types.SimpleNamespace(eps=1.0)

    @wl.fuse
    def shifted(x: Any) -> Any:
        return x + config.eps

    for eps in (1.0, 2.0, 1.0, 2.0, -0.0, 0.0, 1):
        config.eps = eps
        assert torch.equal(shifted(X), X + eps)
    assert traced == ["shifted"] * 5


def test_a_refused_capture_may_be_mended() -> None:
    table: Any = [2.0]
    f = wl.fuse(lambda x: x * table[0])
    for _ in range(2):
        with pytest.raises(wl.TraceError, match=r"`table` is of type list.*make it a tuple"):
            f(X)
    table = (2.0,)
    assert torch.equal(f(X), X * 2)


def test_the_default_dtype_is_part_of_a_trace() -> None:
    f = wl.fuse(lambda n: n / 3 + torch.where(n > 1, 0.1, 0.2))
    n = torch.tensor([1, 2])
    assert f(n).dtype == f32
    torch.set_default_dtype(f64)
    try:
        assert f(n).dtype == f64
        assert torch.equal(f(n), n / 3 + torch.where(n > 1, 0.1, 0.2))
    finally:
        torch.set_default_dtype(f32)
    assert f(n).dtype == f32


# ---- results on every kind of tensor


def test_results_have_the_strides_of_eager() -> None:
    base = torch.randn(2, 3, 5, 5)
    views = [
        base,
        base.to(memory_format=torch.channels_last),
        base.permute(3, 1, 0, 2),
        base[:, ::2],
        base[:1].expand(3, 3, 5, 5),
        base[0, 0, 0, 0],
    ]
    for x in views:
        y_views = [torch.randn(x.shape[-1:]), torch.randn(()), torch.randn((*x.shape[-2:-1], 1)).double(), x.bfloat16()]
        for y in y_views:
            for function in (lambda x, y: x + y, lambda x, y: torch.where(x > y, x, y) * 2, lambda x, y: (x * 2).half() - y):
                got, want = wl.fuse(function)(x, y), function(x, y)
                assert (got.shape, got.stride(), got.dtype) == (want.shape, want.stride(), want.dtype)


def test_shapes_of_every_size() -> None:
    for shape in ((), (0,), (1,), (3, 0, 2), (1, 1, 1), (2, 1)):
        x = torch.full(shape, 2.0)
        got = wl.fuse(lambda x: x * 3)(x)
        assert torch.equal(got, x * 3)
        assert got.stride() == (x * 3).stride()


def test_meta_tensors_give_meta_tensors() -> None:
    x, y = torch.empty(4, 1, 6, device="meta", dtype=bf16), torch.empty(5, 1, device="meta")
    got = wl.fuse(lambda x, y, s: {"sum": x + y, "same": x, "number": s * 2})(x, y, 3)
    assert (got["sum"].device.type, got["sum"].shape, got["sum"].dtype) == ("meta", (4, 5, 6), f32)
    assert got["same"] is x
    assert got["number"] == 6
    with pytest.raises(wl.LayoutError):
        add(x, torch.empty(4, device="meta"))


def test_halves_are_rounded_once_or_at_each_step() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3)).to(bf16)
    function = lambda x: torch.exp(x * 1.1 + 0.3) * x - 0.7  # noqa: E731
    fused, eager = wl.fuse(function), wl.fuse(function, numerics="eager")
    exact = function(x.double())
    assert torch.equal(eager(x), function(x))
    assert torch.equal(fused(x), function(x.float()).to(bf16))
    assert not torch.equal(fused(x), eager(x))
    assert (fused(x).double() - exact).abs().sum() < (eager(x).double() - exact).abs().sum()


def test_reference_is_what_a_call_on_the_cpu_computes() -> None:
    f = wl.fuse(lambda x, y: (F.gelu(x) + y, x))
    assert torch.equal(f.reference(X, Y)[0], f(X, Y)[0])
    assert f.reference(X, Y)[1] is X
    with pytest.raises(wl.TraceError, match="unexpected keyword argument 'out'"):
        f.reference(X, Y, out=X)


# ---- gradients


def grads(f: Callable[..., Any], *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = f(*leaves)
    weights = torch.arange(1.0, out.numel() + 1).view(out.shape).to(out.dtype)
    return list(torch.autograd.grad((out * weights).sum(), leaves))


def test_gradients_on_the_cpu_are_torchs() -> None:
    functions = [
        lambda x, y: F.silu(x) * y,
        lambda x, y: torch.where(x > 0, x.exp(), y) + x.clamp(-0.5, 0.5),
        lambda x, y: torch.lerp(x, y, 0.3) ** 2 / (1 + y.abs()),
        lambda x, y: F.gelu(x, approximate="tanh").to(f64) * y.sigmoid(),
        lambda x, y: F.mish(x) + F.hardswish(y) + F.gelu(x),
    ]
    for function in functions:
        for x, y in ((torch.randn(3, 4), torch.randn(4)), (torch.randn(3, 4).double(), torch.randn(3, 1).double())):
            for got, want in zip(grads(wl.fuse(function), x, y), grads(function, x, y), strict=True):
                torch.testing.assert_close(got, want)


def test_gradients_of_halves_have_their_dtype() -> None:
    x, y = torch.randn(3, 4).to(bf16), torch.randn(4).to(bf16)
    for got, want in zip(grads(wl.fuse(torch.mul), x, y), grads(torch.mul, x.float(), y.float()), strict=True):
        assert got.dtype == bf16
        assert torch.allclose(got.float(), want, rtol=2**-6, atol=2**-6)


def test_second_derivatives() -> None:
    x = torch.randn(4, dtype=f64, requires_grad=True)
    assert torch.autograd.gradgradcheck(wl.fuse(lambda x: F.silu(x) * x.sin()), (x,))


def test_only_a_call_that_needs_gradients_records_them() -> None:
    leaf = X.clone().requires_grad_()
    assert add(leaf, Y).requires_grad
    assert add(leaf, Y).grad_fn is not None
    with torch.no_grad():
        assert not add(leaf, Y).requires_grad
    with torch.inference_mode():
        assert add(leaf, Y).is_inference()
    assert not add(X, Y).requires_grad
    assert not wl.fuse(lambda x: x > 0)(leaf).requires_grad


# ---- several threads


def test_the_first_call_from_many_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_CACHE", "0")  # nothing is found on the disk
    barrier, results, num_threads = threading.Barrier(8, timeout=60), {}, 8
    f = wl.fuse(lambda x, y: torch.tanh(x) * 3.25 + y, name="at_once")
    before = cache.num_compilations()

    def run(index: int) -> None:
        barrier.wait()
        value = f(X, Y)
        barrier.wait()
        results[index] = value, f.plan(X, Y, target="sm_90").cubin

    threads = [threading.Thread(target=run, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == num_threads
    assert all(torch.equal(value, torch.tanh(X) * 3.25 + Y) for value, _ in results.values())
    assert len({code for _, code in results.values()}) == 1
    assert cache.num_compilations() == before + 1


# ---- copies


def test_deep_copies_work_on_their_own() -> None:
    f = wl.fuse(lambda x, s=2.0: x * s)
    for copied in (copy.copy(f), copy.deepcopy(f)):
        assert torch.equal(copied(X), X * 2)
    module = torch.nn.Module()
    module.act = f  # type: ignore[assignment]
    module.act(X)
    assert torch.equal(copy.deepcopy(module).act(X, 3.0), X * 3)  # type: ignore[operator]


def test_a_function_of_a_module_is_pickled_by_reference() -> None:
    assert pickle.loads(pickle.dumps(wl.ops.swiglu)) is wl.ops.swiglu


def test_keyword_defaults_changed_in_place_are_seen() -> None:
    def scale(x: Any, *, s: float = 2.0) -> Any:
        return x * s

    f = wl.fuse(scale)
    assert torch.equal(f(X), X * 2)
    assert scale.__kwdefaults__ is not None
    scale.__kwdefaults__["s"] = 3.0
    assert torch.equal(f(X), X * 3)


def test_a_number_at_its_default_is_static_and_one_that_is_given_is_not() -> None:
    """As in rotary embeddings that many models share: the dim is a parameter that nobody passes."""

    @wl.fuse
    def moved(x: torch.Tensor, y: torch.Tensor, dim: int = 1, scale: float = 2.0) -> torch.Tensor:
        return x * y.unsqueeze(dim) * scale

    x, y = torch.randn(2, 3, 4), torch.randn(2, 4)
    for _ in range(2):
        assert torch.equal(moved(x, y), x * y.unsqueeze(1) * 2.0)
        for scale in (0.5, 3.0):
            assert torch.equal(moved(x, y, scale=scale), x * y.unsqueeze(1) * scale)
    numbers = [str(moved.plan(x, y, target="sm_90", **given).expr).count("number scale") for given in ({}, {"scale": 0.5})]
    assert numbers == [0, 1]
    with pytest.raises(wl.TraceError, match=r'static=\("dim",\)'):
        moved(x, y, 1)


def test_a_result_of_inference_mode_is_refused_before_it_is_written() -> None:
    with torch.inference_mode():
        out = torch.zeros(4)
        assert torch.equal(wl.fuse(lambda x: x * 2)(torch.ones(4), out=out), torch.full((4,), 2.0))
    with pytest.raises(wl.GradError, match="inference mode"):
        wl.fuse(lambda x: x * 3)(torch.ones(4), out=out)
    assert out.tolist() == [2.0] * 4


class Scaled(torch.nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    forward = wl.fuse(lambda self, x: x * self.scale)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_module_whose_method_is_a_fused_lambda_is_copied(copied: Callable[[Any], Any]) -> None:
    x, module = torch.ones(3), Scaled(2.0)
    assert module(x).tolist() == [2.0] * 3
    other = copied(module)
    other.scale = 3.0
    assert other(x).tolist() == [3.0] * 3
    assert module(x).tolist() == [2.0] * 3


AUTOCAST = (  # what torch computes in fp32 under autocast, what in the type of autocast, and what in the widest
    lambda x, y: F.mse_loss(x, y, reduction="none"),
    lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
    lambda x, y: F.binary_cross_entropy_with_logits(x, y, reduction="none"),
    lambda x, y: F.prelu(x, y[:1]),
    lambda x, y: torch.cat([x, y]),
)


@pytest.mark.parametrize("body", AUTOCAST, ids=["mse", "smooth_l1", "bce", "prelu", "cat"])
@pytest.mark.parametrize("numerics", ["fused", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_first", [True, False])
def test_autocast_changes_neither_this_call_nor_the_next(body: Any, numerics: Any, dtype: torch.dtype, is_first: bool) -> None:
    """The types are those of the arguments, and what was found out under autocast is not remembered for calls outside it."""
    promotion.infer_dtype.cache_clear()
    x, y = torch.tensor([-1.1, 0.3], dtype=dtype), torch.tensor([0.7, 1.3], dtype=dtype)
    fused, want = wl.fuse(body, numerics=numerics), body(x, y)
    if not is_first:
        torch.testing.assert_close(fused(x, y), want)
    with torch.autocast("cpu", torch.float16):
        inside = fused(x, y)
        grad = torch.autograd.grad(fused(x.requires_grad_(), y).sum(), x)[0]
    torch.testing.assert_close(inside, want)
    torch.testing.assert_close(fused(x.detach(), y), want)
    torch.testing.assert_close(grad, torch.autograd.grad(body(x, y).sum(), x)[0])


def test_autocast_inside_a_fused_function_is_refused() -> None:
    def body(x: Any, enabled: bool) -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return x * 2

    with pytest.raises(wl.TraceError, match=r"autocast has no effect.*x \* 2.*\.to\(dtype\)"):
        wl.fuse(body)(torch.ones(2), True)
    assert torch.equal(wl.fuse(body)(torch.ones(2), False), torch.full((2,), 2.0))
