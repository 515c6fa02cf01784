"""A changed captured value changes the key, an unchanged one does not, and what cannot be keyed is refused by name and line."""

import ast
import builtins
import collections
import contextlib
import dataclasses
import enum
import functools
import gc
import importlib
import inspect
import itertools
import logging
import math
import operator
import os
import random
import re
import sys
import textwrap
import time
import types
import typing
import uuid
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from wideload.captures import Captures, _Scan, find_captures, unwrap_callable
from wideload.errors import TraceError

K = 1.0
LIST, DICT, SET = [1.0, 2.0], {"a": 1.0}, {1, 2}
TENSOR, ARRAY = torch.ones(3), np.ones(3)
PAIR = (1.0, 2.0)
TEXT = "12"
ACTIVATION = F.silu
LOG = logging.getLogger("captures")
plug = types.ModuleType("plug")
plug.scale, plug.inner = 2.0, types.SimpleNamespace(bias=1)
cfg = types.SimpleNamespace(eps=1e-5, inner=types.SimpleNamespace(b=2), table=[1.0], act=F.relu)


def helper(x):
    return x * K


def offset(x, by=1.0, *, scale=2.0):
    return x * scale + by


def key(fn):
    captures = find_captures(fn)
    captures.check()
    return captures.read()


@contextlib.contextmanager
def changed(owner, name, value):
    """``mock.patch`` for attributes and dictionary entries alike; ``_GONE`` removes."""
    is_dict = isinstance(owner, dict)
    old = owner.get(name, _GONE) if is_dict else getattr(owner, name, _GONE)
    put = operator.setitem if is_dict else setattr
    drop = operator.delitem if is_dict else delattr
    drop(owner, name) if value is _GONE else put(owner, name, value)
    try:
        yield
    finally:
        drop(owner, name) if old is _GONE else put(owner, name, old)


_GONE = object()


def are_found(guards):
    """As `native`'s guard finds them."""

    def find(owner, name):
        return owner() if name is None else owner[name] if type(owner) is dict else getattr(owner, name)

    with contextlib.suppress(Exception):
        return all(find(owner, name) is value for owner, name, value in guards)
    return False


def assert_follows(fn, owner, name, value):
    """The key differs while ``owner.name`` is ``value``, comes back with the old value, and stays as it is between changes."""
    captures = find_captures(fn)
    captures.check()
    before = captures.read()
    hash(before)
    guards = captures.find_guards(before)
    assert are_found(guards)
    with changed(owner, name, value):
        assert not are_found(guards)
        assert captures.find_guards(before) is None
        during = captures.read()
        assert during != before, f"{name} changed unseen"
        assert captures.read() == during == find_captures(fn).read()
    assert captures.read() == before == find_captures(fn).read()
    assert are_found(captures.find_guards(before))
    with mock.patch.object(Captures, "_walk", side_effect=AssertionError("walked again though nothing changed")):
        assert captures.read() == before


def refusal(fn):
    captures = find_captures(fn)
    first = captures.read()  # must not raise, must be hashable
    hash(first)
    with pytest.raises(TraceError) as caught:
        captures.check()
    return str(caught.value)


# --- What is followed


def make_closure(value):
    def fn(x):
        return x * value

    def assign(new):
        nonlocal value
        value = new

    return fn, assign


class Scaled:
    gain, table = 3.0, [1.0]

    def __init__(self, alpha=2.0):
        self.alpha = alpha

    def plain(self, x):
        return x * self.alpha

    def through(self, x):
        return self.plain(x) + (lambda y: y * self.gain)(x)

    def listed(self, x):
        return [x * self.alpha for _ in range(2)]

    @property
    def doubled(self):
        return self.alpha * 2.0

    def uses_property(self, x):
        return x * self.doubled

    @classmethod
    def of_class(cls, x):
        return x * cls.gain

    @staticmethod
    def of_no_one(x):
        return x * K

    @functools.lru_cache  # noqa: B019 - the method under test
    def cached(self, x):
        return x * self.alpha

    def uses_cached(self, x):
        return self.cached(x)

    def __call__(self, x):
        return x * self.alpha

    def starred(*args):
        return args[1]

    def bad_table(self, x):
        return x * self.table[0]

    def counts(self, x):
        self.calls = 1
        return x

    def leaks(self, x):
        return read_alpha(x, self)


def read_alpha(x, holder):
    return x * holder.alpha


def typed_in_a_local(x):
    kind = type(x)
    return x if kind is torch.Tensor else -x


def type_in_a_local(pair):
    kind = type(pair)
    return kind(pair)


class Checked:
    @staticmethod
    def typed(x):
        return x if type(x) is torch.Tensor else -x


class Half(Scaled):
    def plain(self, x):
        return super().plain(x) * 0.5


scaled, half = Scaled(), Half()


class Act(torch.nn.Module):
    def __init__(self, alpha=2.0):
        super().__init__()
        self.alpha, self.proj = alpha, None
        self.act = torch.nn.GELU()
        self.seq = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(0.5))
        self.acts = torch.nn.ModuleList([torch.nn.SiLU(), torch.nn.Softplus(beta=2.0)])

    def forward(self, x):
        x = self.seq(self.act(x) * self.alpha)
        if self.proj is not None:
            x = self.proj(x)
        for act in self.acts:
            x = act(x) * act.beta if isinstance(act, torch.nn.Softplus) else act(x)
        return x


class Child(Act):
    def forward(self, x):
        return super().forward(x)


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def forward(self, x):
        return x * self.weight


act, child = Act(), Child()
Bounds = collections.namedtuple("Bounds", "low high")
bounds = Bounds(0.0, 1.0)
closed, assign_closed = make_closure(1.0)
partial = functools.partial(offset, by=2.0)


class Mode(enum.Enum):
    FAST, SLOW, MANY = 1, 2, [1.0]

    def weight(self):
        return K * self.value


Mode.FAST.alpha = 2.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    eps: float = 1e-5
    act: typing.Any = F.relu

    def shifted(self, x):
        return x * K


@dataclasses.dataclass
class Pair:
    low: typing.Any
    high: typing.Any = None
    rest: list = dataclasses.field(default_factory=list)

    def width(self):
        return (self.high - self.low) * K

    @property
    def middle(self):
        return (self.high + self.low) * plug.scale

    def unused(self):
        return LIST[0]

    def __repr__(self):
        return f"{LIST}"


class Base:
    def __init__(self, value):
        self.value = value * K

    def shifted(self):
        return self.value + cfg.eps


class Derived(Base):
    def __init__(self, value):
        super().__init__(value)


class Meta(type):
    def __call__(cls, x):
        return x * K


class WithMeta(metaclass=Meta):
    pass


class Tagged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tag = 2.0

    def forward(self, x):
        return x * K


tagged = torch.nn.ModuleList([Tagged()])


def iterates(x):
    for module in tagged:
        x = module(x) * module.tag
    return x


def reassigns(x):
    scale = cfg.eps
    for _ in range(2):
        x, scale = x * scale, K
    return x


def loads_before_it_stores(x):
    for i in range(2):
        if i:
            x = x * _late  # noqa: F821 - stored by the turn before
        _late = K
    return x


def branches(x, flag):
    scale = cfg.eps
    if flag:
        x, scale = -x, K
    return x * scale


frozen = Frozen()


class FakeFused:
    """What this module knows of a FusedFunction: its package and ``__wrapped__``."""

    __module__ = "wideload.fused"

    def __init__(self, fn):
        self.__wrapped__ = fn

    def __call__(self, x):
        return self.__wrapped__(x)


fused = FakeFused(helper)


def nested(x):
    y = 2.0

    def inner(z):
        nonlocal y
        y = 3.0
        return [z * y * cfg.eps for _ in range(2)]

    return inner(x)


def aliased(x):
    import torch.nn.functional as G

    inner = cfg.inner
    for _ in range(2):
        x = G.silu(x) * inner.b
    return x


def many_ways(x, *rest, flag=None, **more):
    with torch.no_grad(), contextlib.nullcontext():
        try:
            x = F.gelu(x if K else x * 2, approximate="tanh" if plug.scale > 1 else "none")
        except ValueError as error:
            raise RuntimeError(f"{cfg} {DICT}") from error
        finally:
            x = ACTIVATION(*rest, **more) if rest else x
    while flag:
        x, flag = x * PAIR[0], None
    return x and (x or helper)(x)


def fresh(name):
    """A function whose globals are its own."""
    space = {"__builtins__": builtins, "__name__": "fresh", "unused": 0}
    exec(f"def fn(x):\n    return x * {name}", space)
    return space["fn"], space


GLOBALS = globals()
FOLLOWED = [
    ("a global", lambda x: x * K, GLOBALS, "K", 2.0),
    ("a global's type", lambda x: x * K, GLOBALS, "K", 1),
    ("a global, in a lambda", lambda x: (lambda y: y * K)(x), GLOBALS, "K", 2.0),
    ("a global, in a comprehension", lambda x: [x * K for _ in range(2)], GLOBALS, "K", 2.0),
    ("a global that goes away", lambda x: x * K, GLOBALS, "K", _GONE),
    ("a name that does not exist yet", lambda x: x * not_yet, GLOBALS, "not_yet", 1.0),  # noqa: F821
    ("a builtin that a global hides", lambda x: abs(x), GLOBALS, "abs", helper),
    ("a global torch function", lambda x: ACTIVATION(x), GLOBALS, "ACTIVATION", F.gelu),
    ("a global module", lambda x: F.silu(x), GLOBALS, "F", plug),
    ("a tuple", lambda x: x * PAIR[0], GLOBALS, "PAIR", (1.0, 3.0)),
    ("a tuple's length", lambda x: x * PAIR[0], GLOBALS, "PAIR", (1.0, 2.0, None)),
    ("a function in a tuple", lambda x: PAIR[1](x), GLOBALS, "PAIR", (1.0, helper)),
    ("an attribute", lambda x: x * cfg.eps, cfg, "eps", 1e-6),
    ("an attribute that goes away", lambda x: x * cfg.eps, cfg, "eps", _GONE),
    ("a longer chain", lambda x: x * cfg.inner.b, cfg.inner, "b", 3),
    ("the middle of a chain", lambda x: x * cfg.inner.b, cfg, "inner", types.SimpleNamespace(b=3)),
    ("the root of a chain", lambda x: x * cfg.eps, GLOBALS, "cfg", types.SimpleNamespace(eps=1.0)),
    ("a function in an attribute", lambda x: cfg.act(x), cfg, "act", F.gelu),
    ("a module's attribute", lambda x: x * plug.scale, plug, "scale", 3.0),
    ("an attribute below a module", lambda x: x * plug.inner.bias, plug.inner, "bias", 2),
    ("a local alias", aliased, cfg.inner, "b", 3),
    ("a local assigned twice", reassigns, GLOBALS, "K", 2.0),
    ("a local assigned in one of two branches", branches, cfg, "eps", 2.0),
    ("a local assigned below its use", loads_before_it_stores, GLOBALS, "K", 2.0),
    ("an inner function", nested, cfg, "eps", 1e-6),
    ("a chain among jumps", many_ways, plug, "scale", 0.5),
    ("a call with stars", many_ways, GLOBALS, "ACTIVATION", F.gelu),
    ("a helper replaced", lambda x: helper(x), GLOBALS, "helper", offset),
    ("a helper's global", lambda x: helper(x), GLOBALS, "K", 2.0),
    ("a helper's code", lambda x: helper(x), helper, "__code__", (lambda x: x + K).__code__),
    ("a helper's default", lambda x: offset(x), offset, "__defaults__", (3.0,)),
    ("a helper's keyword default", lambda x: offset(x), offset.__kwdefaults__, "scale", 3.0),
    ("a helper passed on", lambda *xs: functools.reduce(helper, xs), GLOBALS, "K", 2.0),
    ("the function's own code", helper, helper, "__code__", (lambda x: x + K).__code__),
    ("the function's own default", offset, offset, "__defaults__", (3.0,)),
    ("a partial's content", partial, partial.keywords, "by", 3.0),
    ("a partial's function's default", partial, offset.__kwdefaults__, "scale", 3.0),
    ("a captured partial", lambda x: partial(x), partial.keywords, "more", 3.0),
    ("a method's self", scaled.plain, scaled, "alpha", 3.0),
    ("a callable object", scaled, scaled, "alpha", 3.0),
    ("a callable object, captured", lambda x: scaled(x), scaled, "alpha", 3.0),
    ("a method's method", scaled.through, scaled, "alpha", 3.0),
    ("a class attribute", scaled.through, Scaled, "gain", 4.0),
    ("an instance attribute that hides the class's", scaled.through, scaled, "gain", 4.0),
    ("a method replaced on the class", scaled.through, Scaled, "plain", lambda self, x: x),
    ("a method replaced on the instance", scaled.through, scaled, "plain", helper),
    ("self in a comprehension", scaled.listed, scaled, "alpha", 3.0),
    ("a property's input", scaled.uses_property, scaled, "alpha", 3.0),
    ("super()", half.through, half, "alpha", 3.0),
    ("super()'s method", half.plain, Scaled, "plain", lambda self, x: x),
    ("a class method", Scaled.of_class, Scaled, "gain", 4.0),
    ("a class attribute by name", lambda x: x * Scaled.gain, Scaled, "gain", 4.0),
    ("a static method", lambda x: scaled.of_no_one(x), GLOBALS, "K", 2.0),
    ("a cached method", scaled.uses_cached, scaled, "alpha", 3.0),
    ("an nn.Module's number", act, act, "alpha", 3.0),
    ("an nn.Module's mode", act, act.seq[1], "training", False),
    ("a submodule's option", act, act.act, "approximate", "tanh"),
    ("a submodule replaced", act, act, "act", torch.nn.SiLU()),
    ("a submodule in a list", act, act.acts._modules, "0", torch.nn.GELU()),
    ("a submodule added", act, act.acts._modules, "2", torch.nn.GELU()),
    ("an attribute of a submodule in a list", act, act.acts[1], "beta", 3.0),
    ("a module where None was", act, act, "proj", torch.nn.GELU()),
    ("super().forward", child, child, "alpha", 3.0),
    ("an nn.Module's forward", child, Act, "forward", lambda self, x: x),
    ("an nn.Module, captured", lambda x: act(x), act.act, "approximate", "tanh"),
    ("a nested fused function", lambda x: fused(x), GLOBALS, "K", 2.0),
    ("a nested fused function replaced", lambda x: fused(x), GLOBALS, "fused", FakeFused(helper)),
    ("an enum's method", lambda x: x * Mode.FAST.weight(), GLOBALS, "K", 2.0),
    ("an enum member", lambda x: x * (PAIR == Mode.FAST), GLOBALS, "PAIR", Mode.SLOW),
    ("an enum member passed on", lambda x: read_alpha(x, Mode.FAST), Mode.FAST, "alpha", 3.0),
    ("a named tuple's field", lambda x: x * bounds.low, GLOBALS, "bounds", Bounds(0.5, 1.0)),
    ("a named tuple passed on", lambda x: clip(x, bounds), GLOBALS, "bounds", Bounds(0.0, 2.0)),
    ("a frozen dataclass passed on", lambda x: apply(x, frozen), GLOBALS, "frozen", Frozen(1e-6)),
    ("a frozen dataclass's function", lambda x: apply(x, frozen), GLOBALS, "frozen", Frozen(act=F.gelu)),
    ("a frozen dataclass's method", lambda x: shift(x, frozen), GLOBALS, "K", 2.0),
    ("an attribute of a module passed on", iterates, tagged[0], "tag", 3.0),
    ("the forward of a module made inside", lambda x: Tagged()(x), GLOBALS, "K", 2.0),
    ("a base's __init__", lambda x: Derived(x).value, GLOBALS, "K", 2.0),
    ("a metaclass", lambda x: WithMeta(x), GLOBALS, "K", 2.0),
    ("a method by computed name", lambda x: getattr(Derived(x), TEXT[2:] + "shift" + "ed")(), cfg, "eps", 2.0),
    ("a method of an object made inside", lambda x: Pair(x, x).width(), GLOBALS, "K", 2.0),
    ("a property of an object made inside", lambda x: Pair(x, x).middle, plug, "scale", 3.0),
    ("a tensor's metadata", lambda x: x * TENSOR.ndim, GLOBALS, "TENSOR", torch.ones(1, 1)),
    ("a function under torch.compile", lambda x: compiled(x), GLOBALS, "K", 2.0),
    ("a function under torch.vmap", lambda x: mapped(x), GLOBALS, "K", 2.0),
    ("a function under torch.no_grad", lambda x: without_grad(x), GLOBALS, "K", 2.0),
]
compiled = torch.compile(lambda x: x * K, backend="eager")
mapped, without_grad = torch.vmap(lambda x: x * K), torch.no_grad()(lambda x: x * K)


def clip(x, limits):
    return x.clamp(limits.low, limits.high)


def shift(x, settings):
    return settings.shifted(x)


def apply(x, settings):
    return settings.act(x) + settings.eps


@pytest.mark.parametrize(("fn", "owner", "name", "value"), [case[1:] for case in FOLLOWED], ids=[case[0] for case in FOLLOWED])
def test_a_changed_value_changes_the_key(fn, owner, name, value):
    assert_follows(fn, owner, name, value)


def test_what_a_module_gives_when_asked_and_dicts_of_other_kinds_are_found_again():
    lazy, outer = types.ModuleType("lazy"), torch.nn.Module()
    lazy.__getattr__ = {"scale": 2.0}.__getitem__
    outer._modules = collections.OrderedDict(inner=torch.nn.ReLU())

    def fn(x):
        return outer.inner(x) * lazy.scale

    captures = find_captures(fn)
    guards = captures.find_guards(captures.read())
    assert are_found(guards)
    with changed(outer._modules, "inner", torch.nn.Tanh()):
        assert not are_found(guards)
    with changed(lazy, "scale", 3.0):
        assert not are_found(guards)
    assert are_found(guards)


def test_a_closure_follows_nonlocal_assignment():
    captures = find_captures(closed)
    before = captures.read()
    assign_closed(2.0)
    during = captures.read()
    assign_closed(1.0)
    assert before != during
    assert captures.read() == before


def test_a_closure_is_followed_into_an_inner_function():
    def make(value):
        return lambda x: (lambda y: [y * value for _ in range(2)])(x)

    assert key(make(1.0)) == key(make(1.0)) != key(make(2.0))


def test_a_cell_that_is_still_empty_is_no_error():
    def fn(x):
        return x * later

    captures = find_captures(fn)
    captures.check()
    before = captures.read()
    later = 1.0
    assert captures.read() != before


def test_functions_of_one_text_have_keys_of_their_values():
    def make(k):
        return lambda x: x * k

    for functions in (
        [make(k) for k in (2.0, 3.0, 2.0)],
        [lambda v, k=k: v * k for k in (2.0, 3.0, 2.0)],
        [functools.partial(operator.mul, k) for k in (2.0, 3.0, 2.0)],
        [Scaled(k).plain for k in (2.0, 3.0, 2.0)],
        [Act(k) for k in (2.0, 3.0, 2.0)],
    ):
        first, second, third = map(key, functions)
        assert first != second
        assert first == third


def test_a_submodule_made_later_is_seen(tmp_path, monkeypatch):
    """An import inside the function names a module that the first call has yet to import."""
    (tmp_path / "late_constants.py").write_text("SCALE = 2.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def fn(x):
        from late_constants import SCALE  # type: ignore[import-not-found]

        return x * SCALE

    captures = find_captures(fn)
    captures.check()
    before = captures.read()
    late = importlib.import_module("late_constants")
    during = captures.read()
    late.SCALE = 3.0
    assert len({before, during, captures.read()}) == 3
    del sys.modules["late_constants"]


VALUES = [
    *(
        None,
        ...,
        True,
        False,
        0,
        1,
        -1,
        2**70,
        0.0,
        -0.0,
        1.0,
        math.nan,
        math.inf,
        1j,
        complex(0.0, -0.0),
        complex(-0.0, 0.0),
        "1",
        b"1",
        "",
    ),
    *((), (1,), (1.0,), (True,), ((1,),), (1, 2), [(1,)][0] + (None,), frozenset(), frozenset({1}), frozenset({1.0}), torch.Size([1])),
    *(range(3), range(0, 3, 2), slice(3), slice(3.0), torch.float32, torch.float16, torch.device("cpu"), torch.device("cuda", 1)),
    *(torch.channels_last, torch.strided, np.float32(1), np.float64(1), np.float32(-0.0), np.int64(1), np.bool_(True), np.dtype("f4")),
    *(math.sin, math.cos, torch.sigmoid, F.silu, torch.Tensor.add, torch.ops.aten.relu, np.sqrt, len, int, float, torch.finfo(torch.half)),
    *(
        Mode.FAST,
        Mode.SLOW,
        Mode,
        bounds,
        Bounds(1.0, 1.0),
        Bounds,
        frozen,
        Frozen(2.0),
        object(),
        operator.itemgetter(0),
        typing.Any,
        int | str,
    ),
    *(
        "".join,
        "a".join,
        functools.partial(max, 1),
        functools.partial(max, 1.0),
        functools.partial(max, key=len),
        helper,
        offset,
        scaled.plain,
    ),
]


def test_each_value_has_a_key_of_its_own():
    fn, space = fresh("value")
    captures, keys = find_captures(fn), []
    for value in VALUES:
        space["value"] = value
        captures.check()
        keys.append(captures.read())
    for (i, one), (j, other) in itertools.combinations(enumerate(keys), 2):
        assert one != other, f"{VALUES[i]!r} and {VALUES[j]!r} share a key"
    assert len(set(keys)) == len(keys)
    for value, earlier in zip(VALUES, keys, strict=True):
        space["value"] = value
        assert captures.read() == earlier, repr(value)


def test_equal_values_share_a_key():
    fn, space = fresh("value")
    captures = find_captures(fn)
    for make in (
        lambda: float("nan"),
        lambda: float("1.5"),
        lambda: int("9" * 30),
        lambda: (float("2.5"), "".join(["a", "b"])),
        lambda: np.float64("1.5"),
        lambda: torch.Size([int("3")]),
        lambda: Bounds(float("1"), None),
        lambda: functools.partial(max, float("1.5")),
        lambda: lambda x: x * K,
        lambda: Scaled(float("2.5")).plain,
    ):
        space["value"] = make()
        first = captures.read()
        space["value"] = make()
        assert captures.read() == first


def test_no_id_is_taken_for_that_of_a_dead_object():
    """Objects that come and go at one address, hundreds of times; each key stands for one value."""
    fn, space = fresh("value")
    captures, value_of, addresses = find_captures(fn), {}, collections.Counter()
    for i in range(300):
        k = float(i % 50)
        space["value"] = [eval(f"lambda x: x * {k}"), make_closure(k)[0], functools.partial(max, k), Scaled(k).plain][i % 4]
        addresses[id(space["value"])] += 1
        assert value_of.setdefault(captures.read(), (k, i % 4)) == (k, i % 4)
        space["value"] = None
        captures.read()
        gc.collect(0)
    assert addresses.most_common(1)[0][1] > 1, "no address was used twice, so this proved nothing"


def test_recursion_and_cycles_end():
    def even(x, n=4):
        return x if n == 0 else odd(x, n - 1)

    def odd(x, n=3):
        return x if n == 0 else even(x, n - 1) * scale

    scale = 2.0
    captures = find_captures(even)
    captures.check()
    before = captures.read()
    scale = 3.0
    assert captures.read() != before


def test_a_trusted_function_alone_has_a_constant_key():
    for fn in (torch.sigmoid, F.silu, torch.Tensor.sin, math.sin, operator.add):
        assert key(fn) == find_captures(fn).read()
    assert key(torch.sigmoid) != key(torch.tanh)


# --- What is allowed


def quiet(x):
    logging.getLogger(__name__).debug(f"x {DICT} {cfg}")
    LOG.info("%s %s", DICT["a"], TENSOR)
    print(LIST, cfg, TENSOR.shape)
    warnings.warn(f"{LIST[0]}", stacklevel=2)
    if not isinstance(x, Scaled | torch.Tensor) or isinstance(LIST, (list, Weighted)):
        raise ValueError(f"{DICT} {LIST[0]}", cfg)
    return typing.cast(Weighted, x)


def matched(x, mode):
    match mode:
        case Mode.FAST:
            return x
        case {"a": scale}:
            return x * scale
        case [first, *_]:
            return x * first
    return x


class Color(enum.IntEnum):
    RED = 1


ALLOWED = {
    "swiglu": lambda g, u: F.silu(g) * u,
    "constants": lambda x: x * math.sqrt(2 / math.pi) + np.float32(2) * torch.pi + float("inf") + torch.finfo(x.dtype).eps,
    "the type of an argument, called": lambda pair: type(pair)(pair),
    "the type of an argument, in a local": type_in_a_local,
    "the type of a captured value": lambda x: x if type(K) is float else -x,
    "getattr": lambda x: getattr(torch, "relu")(x),  # noqa: B009 - the spelling under test
    "named tuple result": lambda x: Bounds(x, x + 1),
    "dataclass result": lambda x: Pair(x, x + 1),
    "frozen dataclass inside": lambda x: apply(x, Frozen(1e-3)),
    "list result": lambda x: [x + i for i in range(3)],
    "dict result": lambda x: {"a": x, **{"b": x}},
    "sum and zip": lambda *xs: sum(a * b for a, b in zip(xs, range(9), strict=False)),
    "dtype": lambda x: x.to(torch.float16) if x.dtype == torch.float32 else x.float(),
    "rand_like": lambda x: x * torch.rand_like(x) + F.dropout(x, 0.5),
    "modules made inside": lambda x: torch.nn.GELU()(x),
    "int enum": lambda x: x * Color.RED,
    "undefined name": lambda x: x * not_defined,  # noqa: F821
    "unused list": lambda x: (lambda y: y)(x),
    "module in a sequential": torch.nn.Sequential(torch.nn.GELU(), torch.nn.SiLU()),
    "quiet calls": quiet,
    "is None": lambda x: x if cfg is None else x * cfg.eps,
    "a method of a string": lambda x: x * float(TEXT.strip()),
    "a module passed on": iterates,
    "pattern matching": matched,
    "every kind of jump": many_ways,
}


@pytest.mark.parametrize("fn", ALLOWED.values(), ids=ALLOWED)
def test_ordinary_code_is_allowed(fn):
    captures = find_captures(fn)
    captures.check()
    before = captures.read()
    with mock.patch.object(Captures, "_walk", side_effect=AssertionError("walked again though nothing changed")):
        assert captures.read() == before


def test_the_outermost_defaults_are_arguments():
    """A tensor or list as a default is passed like any argument; a helper's default is captured."""

    def outer(x, bias=TENSOR, sizes=LIST):
        return x + bias

    find_captures(outer).check()
    assert "bias" in refusal(lambda x: outer(x))


# --- What is refused


def branch(x):
    return x if LIST else -x


def loop(x):
    for value in LIST:
        x = x * value
    return x


def sets_global(x):
    global K
    K = 2.0
    return x


def sets_attribute(x):
    cfg.eps = 2.0
    return x


def probes(x):
    try:
        DICT["b"]
    except KeyError:
        return x
    return -x


def aliases_list(x):
    values = LIST
    return x * values[0]


def hooked():
    module = torch.nn.GELU()
    module.register_forward_hook(lambda *_: None)
    return module


def make_counter():
    count = 0

    def fn(x):
        nonlocal count
        count += 1
        return x * count

    return fn


@functools.lru_cache
def cached_list():
    return LIST[0]


def script(target, *inputs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.trace(target, *inputs) if inputs else torch.jit.script(target)


def plus_one(x: torch.Tensor):
    return x + 1


scripted, traced, hooked_gelu = script(plus_one), script(torch.nn.GELU(), torch.ones(1)), hooked()
module_list = torch.nn.ModuleList([Weighted()])
parameters = torch.nn.ParameterList([torch.ones(1)])
holder = types.SimpleNamespace(weighted=Weighted(), act=act)

REFUSED = [
    (lambda x: x * LIST[0], "`LIST`", "list", "argument, or make it a tuple"),
    (lambda x: x * DICT["a"], "`DICT`", "dict", "argument"),
    (lambda x: x * DICT.get("a"), "`DICT`", "dict", "argument"),
    (lambda x: x * (1 in SET), "`SET`", "set", "frozenset"),
    (lambda x: x + TENSOR, "`TENSOR`", "Tensor", "pass it as an argument"),
    (lambda x: x + ARRAY, "`ARRAY`", "ndarray", "pass it as an argument"),
    (lambda x: x * TENSOR.item(), "`TENSOR`", "Tensor", "argument"),
    (lambda x: x * TENSOR.T, "`TENSOR.T`", "Tensor", "argument"),
    (lambda x: [x * v for v in LIST], "`LIST`", "list", "tuple"),
    (lambda x: x * len(LIST), "`LIST`", "list", "tuple"),
    (lambda x: torch.tensor(LIST) * x, "`LIST`", "list", "tuple"),
    (lambda x: LIST.append(x) or x, "`LIST`", "list", "tuple"),
    (lambda x: x * (LIST or PAIR)[0], "`LIST`", "list", "tuple"),
    (lambda x: x * cfg.table[0], "`cfg.table`", "list", "tuple"),
    (lambda x: apply(x, cfg), "`cfg`", "SimpleNamespace", "cfg.name"),
    (lambda x: apply(x, getattr(cfg, "inner")), "`cfg`", "SimpleNamespace", "cfg.name"),  # noqa: B009
    (lambda x: apply(x, plug), "`plug`", "module", "plug.name"),
    (lambda x: (lambda m: m.scale * x)(plug), "`plug`", "module", "plug.name"),
    (lambda x, y=LIST: offset(x, *PAIR, **DICT), "`DICT`", "dict", "argument"),
    (branch, "`LIST`", "list", "tuple"),
    (loop, "`LIST`", "list", "tuple"),
    (probes, "`DICT`", "dict", "argument"),
    (aliases_list, "`LIST`", "list", "tuple"),
    (sets_global, "`K`", "assigned", "return"),
    (sets_attribute, "`cfg`", "assigned", "return"),
    (make_counter(), "`count`", "assigned", "return"),
    (scaled.bad_table, "`self.table`", "list", "tuple"),
    (scaled.counts, "`self`", "assigned", "return"),
    (scaled.leaks, "`self`", "Scaled", "self.name"),
    (scaled.starred, "`self`", "Scaled", "self.name"),
    (lambda x: scaled.bad_table(x), "`scaled.table`", "list", "tuple"),
    (lambda x: time.time() * x, "`time.time`", "next call", "before"),
    (lambda x: random.random() * x, "`random.random`", "next call", "before"),
    (lambda x: random.uniform(0, 1) * x, "`random.random`", "next call", "before"),
    (lambda x: np.random.rand() * x, "`np.random.rand`", "next call", "before"),
    (lambda x: np.random.default_rng().random() * x, "`np.random.default_rng`", "next call", "before"),
    (lambda x: uuid.uuid4().int * x, "urandom`", "next call", "before"),
    (lambda x: torch.rand(3) * x, "`torch.rand`", "next call", "before"),
    (lambda x: x * torch.cuda.device_count(), "`torch.cuda.device_count`", "next call", "before"),
    (lambda x: x if torch.is_inference_mode_enabled() else -x, "`torch.is_inference_mode_enabled`", "next call", "before"),
    (lambda x: x if torch.are_deterministic_algorithms_enabled() else -x, "`torch.are_deterministic", "next call", "before"),
    (lambda x: x.to(torch.get_autocast_dtype("cpu")), "`torch.get_autocast_dtype`", "next call", "before"),
    (lambda x: x * torch.get_num_threads(), "`torch.get_num_threads`", "next call", "before"),
    (lambda x: x if torch.get_default_device().type == "cpu" else -x, "`torch.get_default_device`", "next call", "before"),
    (lambda x: x if type(x) is torch.Tensor else -x, "`type`", "traced", "isinstance"),
    (Checked.typed, "`type`", "traced", "isinstance"),
    (typed_in_a_local, "`type`", "traced", "isinstance"),
    (lambda x, s: x if (type(x), type(s)) == (torch.Tensor, float) else -x, "`type`", "traced", "isinstance"),
    (lambda x: Checked.typed(x), "`type`", "traced", "isinstance"),
    (lambda x, s: x if type(s) in (int, float) else -x, "`type`", "traced", "isinstance"),
    (lambda x, s: x if type(s).__name__ == "float" else -x, "`type`", "traced", "isinstance"),
    (lambda x: float(os.environ["K"]) * x, "`os.environ`", "_Environ", "argument"),
    (lambda x: float(os.environ.get("K")) * x, "`os.environ`", "_Environ", "argument"),
    (lambda x: float(os.getenv("K")) * x, "`environ`", "_Environ", "argument"),
    (lambda x: x * globals()["K"], "`globals`", "next call", "before"),
    (lambda x: x * eval("K"), "`eval`", "next call", "before"),
    (lambda x: x * random.Random(0).random(), "`random.Random`", "not written in Python", "argument"),
    (lambda x: cached_list() * x, "`LIST`", "list", "tuple"),
    (lambda x: Pair(x, x).unused(), "`LIST`", "list", "tuple"),
    (lambda x: torch.vmap(loop)(x), "`LIST`", "list", "tuple"),
    (lambda x: scripted(x), "`scripted`", "torch.jit.script", "plain"),
    (lambda x: traced(x), "`traced`", "torch.jit.script", "plain"),
    (lambda x: hooked_gelu(x), "`hooked_gelu`", "hooks", "remove"),
    (lambda x: module_list[0](x), "`module_list.0.weight`", "Parameter", "argument"),
    (lambda x: holder.weighted(x), "`holder.weighted.weight`", "Parameter", "argument"),
    (Weighted(), "`self.weight`", "Parameter", "argument"),
    (lambda x: x * parameters[0], "`parameters.0`", "Parameter", "argument"),
    (lambda x: offset(x, Mode.MANY.value), "`Mode.MANY.value`", "list", "tuple"),
    (lambda x: (lambda m: x * m.value[0])(Mode.MANY), "`Mode.MANY.value`", "list", "tuple"),
    (lambda x: np.random.RandomState(0), "`np.random.RandomState`", "next call", "before"),
    (lambda x: offset(x, logging.getLevelName(10)), "`_levelToName`", "dict", "argument"),
    (torch.nn.PReLU(), "`self.weight`", "Parameter", "argument"),
    (torch.nn.Sequential(torch.nn.GELU(), Weighted()), "`self.1.weight`", "Parameter", "argument"),
    (functools.partial(offset, by=TENSOR), "by=...", "Tensor", "argument"),
    (functools.partial(max, LIST), "args[0]", "list", "tuple"),
    (make_closure([1.0])[0], "`value`", "list", "tuple"),
    (make_closure((1.0, [2.0]))[0], "`value[1]`", "list", "tuple"),
    (make_closure(iter(PAIR))[0], "`value`", "tuple_iterator", "argument"),
    (make_closure(Frozen(act=LIST))[0], "`value.act`", "list", "tuple"),
    (make_closure(Bounds(0.0, TENSOR))[0], "`value[1]`", "Tensor", "argument"),
]


@pytest.mark.parametrize(("fn", "name", "fault", "remedy"), REFUSED)
def test_what_may_change_unseen_is_refused(fn, name, fault, remedy):
    message = refusal(fn)
    for text in (name, fault, remedy):
        assert text in message, message
    if isinstance(fn, types.FunctionType):
        lines, first = inspect.getsourcelines(fn)
        numbers = [int(number) for number in re.findall(rf"{re.escape(__file__)}:(\d+)", message)]
        assert any(first <= number < first + len(lines) for number in numbers), message


def test_the_message_gives_the_line_of_the_read_and_of_the_call():
    message = refusal(lambda x: loop(x))
    first = inspect.getsourcelines(loop)[1]
    assert f"loop, {__file__}:{first + 1}, reached from" in message


def test_a_refused_value_made_immutable_is_allowed():
    fn, space = fresh("value")
    space["value"] = [1.0]
    captures = find_captures(fn)
    with pytest.raises(TraceError):
        captures.check()
    refused = captures.read()
    space["value"] = (1.0,)
    captures.check()
    assert captures.read() != refused
    space["value"] = [1.0]
    with pytest.raises(TraceError):
        captures.check()


def test_each_check_raises_its_own_error():
    captures = find_captures(loop)
    errors = []
    for _ in range(2):
        with pytest.raises(TraceError) as caught:
            captures.check()
        errors.append(caught.value)
    assert errors[0] is not errors[1]


# --- What fuse() accepts


@pytest.mark.parametrize(
    "fn", [helper, lambda x: x, partial, scaled.plain, Scaled.of_class, Scaled.of_no_one, scaled, act, torch.sigmoid, F.silu, fused]
)
def test_callables_are_accepted_as_they_are(fn):
    assert unwrap_callable(fn) is fn or unwrap_callable(fn) == fn


def test_a_staticmethod_gives_its_function():
    assert unwrap_callable(Scaled.__dict__["of_no_one"]) is Scaled.of_no_one
    assert_follows(Scaled.__dict__["of_no_one"], GLOBALS, "K", 2.0)


def test_a_wrapped_function_is_read_as_it_is():
    """``functools.wraps`` hides nothing: the wrapper's own captures count, and the wrapped one's if it is called."""

    def decorate(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return fn(x) * cfg.eps

        return wrapper

    for inner in (helper, F.silu):
        assert_follows(decorate(inner), cfg, "eps", 1e-6)
    assert_follows(decorate(helper), GLOBALS, "K", 2.0)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (scripted, "torch.jit.script"),
        (script(torch.nn.GELU()), "torch.jit.script"),
        (Scaled.__dict__["of_class"], "classmethod"),
        (Act, "class Act"),
        (3, "got a int"),
        (TENSOR, "got a Tensor"),
    ],
)
def test_what_cannot_be_fused_is_named(fn, text):
    with pytest.raises(TraceError, match=text):
        unwrap_callable(fn)


# --- The scan against the syntax tree

SOURCES = [collections, contextlib, dataclasses, enum, functools, logging, operator, random, textwrap, torch.nn.modules.activation, typing]


def chains_by_syntax(function):
    """Each maximal ``name.attr...`` that a function's tree reads, and those that only name a local or leave by ``raise``."""
    found, ignored = set(), set()

    def visit(node, into):
        if isinstance(node, ast.Raise):
            into = ignored
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            visit(node.value, ignored if isinstance(node.value, ast.Attribute | ast.Name) else into)
            return
        elif isinstance(node, ast.AnnAssign):
            if node.value:
                visit(node.value, ignored)
            return
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Attribute | ast.Name):
            into = ignored
        elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load):
            chain, root = [], node
            while isinstance(root, ast.Attribute):
                chain.append(root.attr)
                root = root.value
            if isinstance(root, ast.Name):
                into.add((root.id, *reversed(chain)))
                return
        for inner in ast.iter_child_nodes(node):
            visit(inner, into)

    for statement in function.body:
        visit(statement, found)
    return found - ignored


def functions_of(code, path=()):
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield (*path, inner.co_name), inner
            if not inner.co_flags & inspect.CO_OPTIMIZED:  # a class body
                yield from functions_of(inner, (*path, inner.co_name))


@pytest.mark.parametrize("module", SOURCES, ids=lambda module: module.__name__)
def test_the_scan_sees_every_chain_that_the_syntax_tree_has(module):
    source = inspect.getsource(module)
    codes = {(code.co_name, code.co_firstlineno): code for _, code in functions_of(compile(source, "module", "exec"))}
    checked = 0
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or any(
            isinstance(n, ast.FunctionDef | ast.ClassDef | ast.Lambda) for n in ast.walk(node) if n is not node
        ):
            continue
        code = codes.get((node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])))
        if code is None or code.co_freevars:
            continue
        this = code.co_varnames[0] if code.co_varnames[:1] == ("self",) else None
        reads = _Scan(code, frozenset(), this).reads
        used = {(read.name, *read.attributes) for read in reads if read.uses - {"none"} or read.callees}
        is_global = {read.name for read in reads if read.root == "global"}
        for chain in chains_by_syntax(node):
            if (
                (chain[0] in is_global or chain[0] == this)
                and chain[0] not in code.co_varnames[1:]
                and not any("__" in n[:2] for n in chain)
            ):
                assert chain in used, f"{module.__name__}:{node.lineno} {node.name} reads {'.'.join(chain)}"
                checked += 1
    assert checked > 20
