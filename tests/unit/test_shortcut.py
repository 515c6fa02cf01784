"""Calls like an earlier one: which arguments and circumstances are not, on tensors of the CPU in the place of a GPU's."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from wideload.captures import find_captures
from wideload.shortcut import MISSED, Found, Shortcut, are_immutable, find_circumstances, find_shortcut, kinds_of, shortcut_key
from wideload.steps import Steps, tuple_of

SCALE = 2.0


def scaled(x: torch.Tensor, y: torch.Tensor, s: float = 1.0, *, flag: bool = False) -> torch.Tensor:
    return x * SCALE + y * s if flag else y


CURRENT: list[int | None] = [None]
"""The current device: CPU tensors have no device's number."""


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch, either: str) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: CURRENT[0], raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(64, 48), torch.randn(48, 64).t()


def found(num_tensors: int, num_numbers: int = 0, *, into: bool = False) -> Callable[[], Steps]:
    """Return what a call is taken apart into."""
    tensors, numbers = [f"t{at}" for at in range(num_tensors)] + ["out"] * into, [f"n{at}" for at in range(num_numbers)]
    return lambda: Steps((f"return {tuple_of(tensors)}, {tuple_of(numbers)}",))


def circumstances(function: Callable[..., Any] = scaled) -> tuple[Found, ...]:
    captures = find_captures(function)
    now = find_circumstances(function, captures, captures.read(), torch.get_default_dtype())
    assert now is not None
    return now


def lay(args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, function: Callable[..., Any] = scaled) -> Shortcut:
    kwargs = kwargs or {}
    values = (*args, *kwargs.values())
    given = [value for value in values if isinstance(value, torch.Tensor)]
    numbers = [value for value in values if type(value) in (int, float, complex)]
    shortcut = find_shortcut(
        args,
        kwargs,
        None,
        given,
        numbers,
        kinds_of(values, [False] * len(values)),
        circumstances(function),
        found(len(given), len(numbers)),
    )
    assert shortcut is not None
    return shortcut


def test_tensors_like_the_first_ones_are_handed_on() -> None:
    shortcut, others = lay(tensors()), tensors()
    got, scalars = shortcut(others, {})
    assert all(mine is other for mine, other in zip(got, others, strict=True))
    assert scalars == ()


def test_numbers_and_names() -> None:
    x, y = tensors()
    shortcut = lay((x, y, 0.5), {"flag": True})
    assert shortcut((x, y, 7.5), {"flag": True})[1] == (7.5,)
    for args, kwargs in (
        ((x, y, 7), {"flag": True}),  # an int where a float was
        ((x, y, True), {"flag": True}),
        ((x, y, 0.5), {"flag": False}),
        ((x, y, 0.5), {"flag": 1}),
        ((x, y, 0.5), {}),
        ((x, y), {"flag": True}),
        ((x, y), {"s": 0.5, "flag": True}),
        ((x, y, 0.5, 0.5), {"flag": True}),
        ((x, 0.5, y), {"flag": True}),
    ):
        assert shortcut(args, kwargs) is MISSED


def test_keyword_defaults_change_in_place() -> None:
    def flagged(x: torch.Tensor, *, s: float | None = 1.0) -> torch.Tensor:
        return x * s

    given = torch.randn(8), torch.randn(8)
    shortcut, keywords = lay(given, function=flagged), flagged.__kwdefaults__
    assert keywords is not None
    assert shortcut(given, {}) is not MISSED
    keywords["s"] = 2.0
    assert shortcut(given, {}) is MISSED
    keywords["s"] = None
    again = lay(given, function=flagged)
    assert again(given, {}) is not MISSED
    del keywords["s"]
    assert again(given, {}) is MISSED


def test_what_has_only_to_be_equal() -> None:
    x, text = torch.randn(8), "(_0)"
    shortcut = find_shortcut((x, [2, 3], text), {}, None, [x], [], [*"tee"], circumstances(), found(1), are_apart=False)
    assert shortcut is not None
    for sizes, given, is_taken in (([2, 3], "(_0" + ")", True), ([2, 4], text, False), ([2], text, False), ([2, 3], "(_1)", False)):
        assert (shortcut((x, sizes, given), {}) is not MISSED) is is_taken


def test_operands_in_one_place() -> None:
    x, _ = tensors()
    one, other = x.view_as(x), x.view_as(x)
    shortcut = find_shortcut((one, other), {}, None, [one, other], [], [*"tt"], circumstances(), found(2), are_apart=False)
    assert shortcut is not None
    assert shortcut((x, x.view_as(x)), {}) is not MISSED
    assert shortcut((x, x + 1), {}) is not MISSED
    assert find_shortcut((one, other), {}, None, [one, other], [], [*"tt"], circumstances(), found(2)) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.double(),
        lambda x: x[:, :47],
        lambda x: x.t().contiguous().t(),
        lambda x: x.clone().requires_grad_(),
        lambda x: torch.nn.Parameter(x, requires_grad=False),
        lambda x: torch._neg_view(x),
        lambda x: torch.cat((x.reshape(-1), x[0]))[1 : x.numel() + 1].view(x.shape),  # another alignment
        lambda x: x.tolist(),
        lambda x: x[None],
        lambda x: torch.complex(x, x),
        lambda x: 1.0,
        lambda x: None,
    ],
)
def test_other_tensors_miss(change: Callable[[torch.Tensor], Any]) -> None:
    x, y = tensors()
    shortcut = lay((x, y))
    assert shortcut((x, y), {}) is not MISSED
    assert shortcut((change(x), y), {}) is MISSED
    assert shortcut((x, y, y), {}) is MISSED
    assert shortcut((x,), {}) is MISSED


def test_one_tensor_twice_is_another_call() -> None:
    x = torch.randn(8, 8)
    shortcut = lay((x, torch.randn(8, 8)))
    assert shortcut((x, x), {}) is MISSED
    assert find_shortcut((x, x), {}, None, [x], [], ["t"] * 2, circumstances(), found(1)) is None


def test_what_misaligned_calls_keep_is_their_alignment() -> None:
    store = torch.randn(64)
    shortcut = lay((store[1:33], store[34:]), function=torch.add)
    assert shortcut((torch.randn(40)[1:33], torch.randn(40)[2:32]), {}) is not MISSED
    assert shortcut((torch.randn(40)[1:33], torch.randn(40)[3:33]), {}) is MISSED


def test_what_is_written_lies_to_the_arguments_as_it_did() -> None:
    store, (x, y) = torch.zeros(4, 64), (torch.randn(64), torch.randn(64))

    def lay_into(*args: torch.Tensor, out: torch.Tensor) -> Shortcut | None:
        return find_shortcut(args, {}, out, args, [], ["t"] * 2, circumstances(), found(2, into=True))

    apart, in_place = lay_into(x, y, out=store[0]), lay_into(x, store[1], out=store[1])
    assert apart is not None
    assert in_place is not None
    for args, out, is_apart, is_in_place in (
        ((x, y), store[0], True, False),
        ((store[0], y), store[1], True, False),  # neighbours
        ((store[1], y), store[0], True, False),
        ((x, store[0]), store[0], False, True),
        ((store[0], y), store[0], False, False),  # the other argument
        ((x, store.view(-1)[4:68]), store[0], False, False),  # 16 bytes apart
        ((x, x), store[0], False, False),
    ):
        assert (apart(args, {}, out) is not MISSED) is is_apart
        assert (in_place(args, {}, out) is not MISSED) is is_in_place
    assert apart((x, y), {}) is MISSED
    assert apart((x,), {}, y) is MISSED
    assert lay((x, y, 2.0))((x, y, 2.0), {}, store[0]) is MISSED
    assert lay_into(x, store.view(-1)[4:68], out=store[0]) is None


def test_an_argument_that_is_written() -> None:
    x, y, z = (torch.randn(64) for _ in range(3))
    shortcut = find_shortcut((x, y), {}, y, [x, y], [], ["t"] * 2, circumstances(), found(2, into=True))
    assert shortcut is not None
    others = torch.randn(64), torch.randn(64)
    (a, b, out), _ = shortcut(others, {}, others[1])
    assert (a is others[0], b is others[1], out is others[1]) == (True, True, True)
    for args, out in (((x, y), x), ((x, y), z), ((x, y), None), ((y, y), y), ((x, y), y.view(64))):
        assert shortcut(args, {}, out) is MISSED
    store = torch.randn(256)
    for first, second, is_apart in ((0, 64, True), (64, 0, True), (0, 60, False), (60, 0, False), (0, 4, False)):
        a, b = store[first : first + 64], store[second : second + 64]
        assert (shortcut((a, b), {}, b) is not MISSED) is is_apart  # what is written lies across the other one
    assert lay_out_of(store[:64], store[4:68]) is None


def lay_out_of(x: torch.Tensor, y: torch.Tensor) -> Shortcut | None:
    """Of a call that writes its second argument."""
    return find_shortcut((x, y), {}, y, [x, y], [], ["t"] * 2, circumstances(), found(2, into=True))


def test_static_numbers_are_what_they_were() -> None:
    x, y = tensors()
    shortcut = find_shortcut((x, y, 0.0, 3), {}, None, [x, y], [3], ["t", "t", "c", "n"], circumstances(), found(2, 1))
    assert shortcut is not None
    assert shortcut((x, y, 0.0, 3), {})[1] == (3,)
    assert shortcut((x, y, 0.0, 4), {})[1] == (4,)
    for numbers in ((-0.0, 3), (0, 3), (0.0, 3.0), (0.5, 3), (float("nan"), 3)):
        assert shortcut((x, y, *numbers), {}) is MISSED


@pytest.mark.parametrize(
    ("defaults", "fixed"), [(None, True), ((1.0, "tanh", None, (1, 2)), True), (([],), False), (({},), False), (((1, []),), False)]
)
def test_defaults_that_change_in_place_are_told(defaults: Any, fixed: bool) -> None:
    assert are_immutable(defaults) is fixed


def test_what_was_captured_when_the_kernels_were_made_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread changes it while they are compiled."""
    captures = find_captures(scaled)
    made_with = captures.read()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert find_circumstances(scaled, captures, made_with, torch.float32) is None
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert find_circumstances(scaled, captures, made_with, torch.float32) is not None
    of_dtype = find_circumstances(scaled, captures, made_with, torch.float64)
    assert of_dtype is not None
    assert (torch.get_default_dtype, None, torch.float64) in of_dtype


def test_circumstances(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = tensors()
    shortcut = lay((x, y))

    def misses() -> bool:
        return shortcut((x, y), {}) is MISSED

    assert not misses()
    with torch.no_grad():
        assert not misses()  # none of the tensors wants a gradient
    with forward_ad.dual_level():
        assert misses()
    with torch.autocast("cpu"):
        assert misses()
    with torch.inference_mode():
        assert misses()
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert misses()
    torch.set_default_dtype(torch.float64)
    try:
        assert misses()
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.func.vmap(lambda z: z + float(misses()))(torch.zeros(2)).tolist() == [1, 1]
    CURRENT[0] = 1
    assert misses()
    CURRENT[0] = None
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
    assert misses()
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2.0)
    assert lay((x, y))((x, y), {}) is not MISSED
    monkeypatch.setattr(scaled, "__defaults__", (2.0,))
    assert misses()


@pytest.mark.parametrize("wanting", ["x", "out"])
def test_gradients_are_on_or_off_as_they_were_where_one_is_wanted(wanting: str) -> None:
    x, out = torch.randn(8).requires_grad_(wanting == "x"), torch.zeros(8).requires_grad_(wanting == "out")
    for is_on in (True, False):
        with torch.set_grad_enabled(is_on):
            shortcut = find_shortcut((x,), {}, out, [x], [], ["t"], circumstances(), found(1, into=True))
        assert shortcut is not None
        for is_now in (True, False):
            with torch.set_grad_enabled(is_now):
                assert (shortcut((x,), {}, out) is not MISSED) is (is_now is is_on)


def test_what_a_function_captures_is_looked_for_where_it_was() -> None:
    """A name of a module, an attribute, a method, what is not there: what is gone or another is missed, and what comes back is taken."""
    holder, module = types.SimpleNamespace(scale=2.0, inner=types.SimpleNamespace(shift=1.0)), types.ModuleType("constants")
    vars(module).update(factor=3.0, __getattr__=lambda name: 3.0)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x * holder.scale + holder.inner.shift + module.factor if SCALE else x * ABSENT  # type: ignore[name-defined]  # noqa: F821

    x = torch.randn(8)
    shortcut = lay((x,), function=f)
    for owner, name, other in ((holder, "scale", 3.0), (holder.inner, "shift", None), (module, "factor", 4.0), (holder, "inner", holder)):
        kept = vars(owner)[name]
        for change in (functools.partial(setattr, owner, name, other), functools.partial(delattr, owner, name)):
            assert shortcut((x,), {}) is not MISSED
            change()
            assert shortcut((x,), {}) is MISSED
            setattr(owner, name, kept)
    assert shortcut((x,), {}) is not MISSED
    globals()["ABSENT"] = 1.0
    try:
        assert shortcut((x,), {}) is MISSED
    finally:
        del globals()["ABSENT"]
    assert shortcut((x,), {}) is not MISSED


@pytest.mark.parametrize("values", [(torch.ones(3), [1, 2]), (torch.ones(3), torch.Size([3])), (torch.empty(0), 1.0)])
def test_calls_without_a_route(values: tuple[Any, ...]) -> None:
    numbers = [value for value in values if isinstance(value, float)]
    assert find_shortcut(values, {}, None, [values[0]], numbers, kinds_of(values, [False] * 2), circumstances(), found(1)) is None


def test_a_resolved_argument_has_no_route() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    resolved = x.conj().resolve_conj()
    assert find_shortcut((x.conj(),), {}, None, [resolved], [], ["t"], circumstances(), found(1)) is None


def test_another_torch_has_no_routes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    x, y = tensors()
    assert find_shortcut((x, y), {}, None, [x, y], [], ["t"] * 2, circumstances(), found(1)) is None


def test_a_key_reads_the_shapes_of_tensors_alone() -> None:
    class Traced:
        @property
        def shape(self) -> Any:
            raise AssertionError("a traced size was read")

    x, y = tensors()
    assert shortcut_key((x, 1.0), {"y": y}) == shortcut_key((x + 1, 2.0), {"y": y})
    shortcut_key((x, Traced()), {})
    for other in ((x.double(), 1.0), (x, 1), (x, None), (x.clone().requires_grad_(), 1.0)):
        assert shortcut_key(other, {"y": y}) != shortcut_key((x, 1.0), {"y": y})
    assert shortcut_key((x, "tanh"), {}) != shortcut_key((x, "none"), {})
    assert shortcut_key((x,), {}) != shortcut_key((y.t()[:1],), {})
    with torch.no_grad():
        other = shortcut_key((x, 1.0), {"y": y})
    assert other != shortcut_key((x, 1.0), {"y": y})
