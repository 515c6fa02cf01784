"""The module in C: how it is come by, what is done without it, and what its guards and launchers do with what is wrong."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import native
from wideload.launch import ADDRESS_OF, KNOWN_ADDRESS_OF
from wideload.native import Either, NativeState, bind_names
from wideload.shortcut import find_likeness
from wideload.store import read_entry, write_entry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> native._Module:
    """As at the start of a process, on a machine where nothing is kept."""
    monkeypatch.delenv("WIDELOAD_CACHE")
    monkeypatch.setenv("WIDELOAD_CACHE_DIR", str(tmp_path))
    module = native._Module()
    monkeypatch.setattr(native, "_module", module)
    return module


@pytest.fixture(scope="module")
def made() -> Any:
    state = native.native_state(wait=True)
    assert state.is_ready, state.fault
    return native._module._native


BOTH = Either(lambda: lambda: "Python", lambda module: lambda: "C")


def called(names: dict[str, Any]) -> Callable[[], Any]:
    exec("def call(): return which()", names)
    function: Callable[[], Any] = names["call"]
    return function


# ---- coming by it


def test_a_call_takes_python_until_the_module_is_there(fresh: native._Module, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end, compiled = threading.Event(), native._compiled

    def slow() -> bytes:
        assert may_end.wait(60)
        return compiled()

    monkeypatch.setattr(native, "_compiled", slow)
    early = bind_names(called, {"which": BOTH})
    assert (early(), native.native_state()) == ("Python", NativeState(False, None))
    forgotten = weakref.ref(bind_names(called, {"which": BOTH}))
    gc.collect()
    assert forgotten() is None  # what waits is not held
    may_end.set()
    assert native.native_state(wait=True) == NativeState(True, None)
    assert early() == "C"
    assert bind_names(called, {"which": BOTH})() == "C"


def test_what_was_compiled_is_read_from_the_disk(fresh: native._Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.native_state(wait=True).is_ready
    code = read_entry(native._key(), "native")
    assert code is not None
    monkeypatch.setattr(native, "_module", native._Module())
    monkeypatch.setattr(native, "_compiled", lambda: pytest.fail("compiled again"))
    assert bind_names(called, {"which": BOTH})() == "C"  # at the first call
    assert wl.fuse(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize("kept", [b"", b"not a library", b"\x7fELF" + bytes(1000)])
def test_a_damaged_one_is_compiled_again(fresh: native._Module, kept: bytes) -> None:
    """In a process that has not loaded it: the loader knows a library by its path."""
    write_entry(native._key(), kept, "native")
    script = "from wideload import native; print(native.native_state(wait=True))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "NativeState(is_ready=True, fault=None)\n", done.stderr
    assert read_entry(native._key(), "native") not in (None, kept)


def test_kernels_alone_count_as_kernels(fresh: native._Module, tmp_path: Path) -> None:
    from wideload.store import clear_entries, inspect_folder

    native.native_state(wait=True)
    assert inspect_folder().entries == ()
    assert clear_entries() == ()
    assert read_entry(native._key(), "native") is None


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ("0", "WIDELOAD_CC=0 turns it off"),
        ("no-such-compiler", "WIDELOAD_CC=no-such-compiler is no program"),
        ("false", "non-zero exit status 1"),
    ],
)
def test_without_a_compiler_python_serves(fresh: native._Module, monkeypatch: pytest.MonkeyPatch, compiler: str, told: str) -> None:
    monkeypatch.setenv("WIDELOAD_CC", compiler)
    early = bind_names(called, {"which": BOTH})
    state = native.native_state(wait=True)
    assert not state.is_ready
    assert told in str(state.fault)
    assert (early(), bind_names(called, {"which": BOTH})()) == ("Python", "Python")


def test_what_a_compiler_says_is_told(fresh: native._Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_text", lambda: "int x = nothing;")
    assert re.search(r"error: \W*nothing\W* undeclared", str(native.native_state(wait=True).fault))


@pytest.mark.parametrize(
    ("said", "told"),
    [(r"caf\351: no", "status 1.: caf\N{REPLACEMENT CHARACTER}: no"), (r"\n \n", "status 1.$")],
    ids=["latin-1", "nothing"],
)
def test_a_compiler_may_say_anything(fresh: native._Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, said: str, told: str) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("WIDELOAD_CC", str(compiler))
    assert re.search(told, str(native.native_state(wait=True).fault))


def test_a_finalizer_may_call_while_the_module_is_looked_for(fresh: native._Module, monkeypatch: pytest.MonkeyPatch) -> None:
    inner: list[Any] = []

    def refuse() -> str:
        inner.append(bind_names(called, {"which": BOTH}))  # as garbage that is collected here might
        return "a test"

    monkeypatch.setattr(native, "_refusal", refuse)
    thread = threading.Thread(target=bind_names, args=(called, {"which": BOTH}), daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert inner[0]() == "Python"


def test_python_without_its_header_is_told(fresh: native._Module, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    assert native.native_state(wait=True).fault == f"{tmp_path} has no Python.h"


def test_no_more_threads(fresh: native._Module, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert bind_names(called, {"which": BOTH})() == "Python"
    assert native.native_state() == NativeState(False, "can't start new thread")


def test_what_is_too_much_for_c_is_python_s(made: Any) -> None:
    def refuse(module: Any) -> Any:
        raise ValueError("more than it takes")

    assert Either(lambda: lambda: "Python", refuse).make(made)() == "Python"


def test_a_child_compiles_for_itself(tmp_path: Path) -> None:
    """Forked while its parent's thread compiles, it has no such thread."""
    script = """
import os, threading
from wideload import native
compiled, may_end = native._compiled, threading.Event()
native._compiled = lambda: may_end.wait(60) and compiled()
native._module.begin()
child = os.fork()
may_end.set()
state = native.native_state(wait=True)
assert state.is_ready, state
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("both")
"""
    environment = {**os.environ, "WIDELOAD_CACHE": "0"}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "both\n", done.stderr


# ---- guards


def guard(
    made: Any, *tensors: torch.Tensor, pairs: tuple[int, ...] = (), found: tuple[Any, ...] = (), address_of: tuple[Any, ...] = ADDRESS_OF
) -> Callable[..., bool]:
    likeness = find_likeness(tensors)
    assert likeness is not None
    phases = tuple(likeness.phases)
    made_guard: Callable[..., bool] = made.Guard(
        check=likeness.check, address_of=address_of, phases=phases, access_bytes=16, pairs=pairs, found=found
    )
    return made_guard


def test_a_guard_asks_what_was_found(made: Any) -> None:
    class Owner:
        value: Any = None

    x, owner, value = torch.ones(4), Owner(), object()
    owner.value = value
    is_alike = guard(made, x, found=((owner, "value", value), (lambda: owner.value, None, value)))
    assert is_alike(x) is True
    owner.value = object()
    assert is_alike(x) is False
    del owner.value
    owner.value = value
    assert is_alike(x) is True
    del owner.value, Owner.value
    assert is_alike(x) is False  # and raises nothing


def test_a_guard_asks_a_dict_for_its_items(made: Any) -> None:
    class Other(dict[str, Any]):
        value = None

    x, value = torch.ones(4), object()
    items, other = {"value": value}, Other(value=value)
    is_alike, of_other = (guard(made, x, found=((owner, "value", value),)) for owner in (items, other))
    assert is_alike(x) is True
    items["value"] = object()
    assert is_alike(x) is False
    del items["value"]
    assert is_alike(x) is False
    items["value"] = value
    assert is_alike(x) is True
    assert of_other(x) is False  # of any other kind of object its attribute
    other.value = value
    assert of_other(x) is True
    assert guard(made, x, found=(({}, [], value),))(x) is False  # a key that none has


def test_what_interrupts_is_raised(made: Any) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guard(made, torch.ones(4), found=((interrupt, None, True),))(torch.ones(4))


def test_a_guard_of_pairs(made: Any) -> None:
    store = torch.zeros(64)
    low, high = store[:16], store[32:48]
    apart = guard(made, low, high, pairs=(0, 1, -64, 64))
    for first, second, is_apart in ((0, 16, True), (16, 0, True), (0, 12, False), (12, 0, False), (0, 0, False)):
        assert apart(store[first : first + 16], store[second : second + 16]) is is_apart
    same = guard(made, low, store[:16], pairs=(0, 1, 0, 0))
    assert same(high, store[32:48]) is True
    assert same(low, high) is False


def test_a_guard_is_for_so_many_tensors(made: Any) -> None:
    x = torch.ones(4)
    with pytest.raises(TypeError, match="got 1 tensors, not 2"):
        guard(made, x, x.clone())(x)
    with pytest.raises(TypeError, match="got 0 tensors, not 1"):
        guard(made, x)(x=x)
    with pytest.raises(ValueError, match="more than 64 tensors"):
        guard(made, *[torch.ones(4) for _ in range(65)])
    with pytest.raises(TypeError):
        made.Guard(check=None, address_of=ADDRESS_OF, phases=("x",), access_bytes=16, pairs=(), found=())


def test_a_guard_in_a_circle_is_collected(made: Any) -> None:
    class Owner:
        pass

    owner: Any = Owner()
    owner.guard = guard(made, torch.ones(4), found=((owner, "guard", None),))
    gone = weakref.ref(owner)
    del owner
    gc.collect()
    assert gone() is None


# ---- launchers


class Driver:
    """Notes what it is given, as the driver reads it."""

    def __init__(self, num_parameters: int, status: int = 0) -> None:
        self.calls: list[tuple[list[int], int]] = []

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)
        def launch(config: int, function: int, parameters: Any, extra: None) -> int:
            words = [ctypes.c_int64.from_address(parameters[at]).value for at in range(num_parameters)]
            self.calls.append((words, ctypes.c_uint64.from_address(config + 32).value))
            return status

        self.launch = launch


def launcher(made: Any, driver: Driver, **changes: Any) -> Callable[..., None]:
    given: dict[str, Any] = {
        "launch": ctypes.cast(driver.launch, ctypes.c_void_p).value,
        "config": struct.pack("7I4xQQI4x", 1, 1, 1, 128, 1, 1, 0, 0, 0, 0),
        "function": 77,
        "kept": driver,
        "address_of": KNOWN_ADDRESS_OF,
        "stream_of": lambda device: 2**63 + device,
        "bind": lambda device: None,
        "refuse": lambda status: wl.DeviceError(f"refused: {status}"),
        "device": 0,
        "offsets": (0, 8),
        "sizes": (2**40, -1),
        "types": "ld",
    }
    made_launcher: Callable[..., None] = made.Launcher(**{**given, **changes})
    return made_launcher


def test_addresses_are_read_in_memory_of_plain_tensors_alone(made: Any) -> None:
    """Of anything else torch is asked, which may raise."""

    class Named(torch.Tensor):
        pass

    asked: list[Any] = []

    def ask(tensor: Any) -> int:
        asked.append(tensor)
        return DATA_PTR(tensor)

    DATA_PTR, read, *plain = KNOWN_ADDRESS_OF
    assert read
    x, store = torch.ones(4), torch.ones(64)
    fast, slow = (ask, read, *plain), (ask, 0, *plain)
    for tensor in (x, store[3:7], torch.nn.Parameter(x), store.view(8, 8).t(), torch.empty(0), x.as_subclass(Named)):
        for address_of in (fast, slow):
            driver = Driver(6)
            launcher(made, driver, address_of=address_of)(tensor, tensor, 1, 0.5)
            assert driver.calls[0][0][:2] == [tensor.data_ptr(), tensor.data_ptr() + 8]
            assert len(asked) == (2 if address_of is slow or type(tensor) is Named else 0)
            asked.clear()
    with pytest.raises(TypeError):
        launcher(made, Driver(6), address_of=fast)(x, None, 1, 0.5)
    for wrong in ((), (DATA_PTR, read), (DATA_PTR, None, *plain), (DATA_PTR, read, x, x)):
        with pytest.raises(TypeError):
            launcher(made, Driver(6), address_of=wrong)


def test_a_guard_asks_for_addresses_of_what_is_alike(made: Any) -> None:
    x, store = torch.ones(4), torch.ones(64)
    is_alike = guard(made, store[:4])
    assert [is_alike(store[at : at + 4]) for at in (4, 5, 8)] == [True, False, True]
    meta = x.to("meta")
    assert is_alike(meta) is False
    assert torch.func.vmap(lambda row: row * is_alike(row))(torch.ones(2, 4)).tolist() == [[0] * 4] * 2  # it has no address


def test_a_guard_raises_what_torch_does_of_a_plain_tensor_without_an_address(made: Any) -> None:
    """As the results of a CUDA graph that has run again are; what torch's C++ throws into C would end the process."""
    x, gone = torch.ones(4), torch.ones(4)
    is_alike = guard(made, x)
    torch._C._set_throw_on_mutable_data_ptr(gone)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        is_alike(gone)
    assert is_alike(x) is True


def bits(number: float) -> int:
    return int(struct.unpack("q", struct.pack("d", number))[0])


@pytest.mark.parametrize(("integer", "real"), [(0, 0.0), (-1, -0.0), (2**63 - 1, float("inf")), (-(2**63), 5e-324), (True, 3)])
def test_parameters_lie_in_their_order(made: Any, integer: int, real: float) -> None:
    driver, (x, y) = Driver(6), (torch.ones(4), torch.ones(4))
    assert launcher(made, driver)(x, y, integer, real) is None
    assert driver.calls == [([x.data_ptr(), y.data_ptr() + 8, 2**40, -1, int(integer), bits(real)], 2**63)]


def test_a_number_that_is_minus_one_in_bits_is_a_number(made: Any) -> None:
    """A NaN of all ones."""
    driver, x = Driver(6), torch.ones(4)
    (ones,) = struct.unpack("d", struct.pack("q", -1))
    launcher(made, driver)(x, x, -1, ones)
    assert driver.calls[0][0][-1] == -1


@pytest.mark.parametrize(
    ("words", "error"), [((2**63, 0.5), OverflowError), ((0.5, 0.5), TypeError), ((1, "x"), TypeError), ((1, 10**400), OverflowError)]
)
def test_words_that_are_none_are_refused(made: Any, words: tuple[Any, Any], error: type[Exception]) -> None:
    driver, x = Driver(6), torch.ones(4)
    with pytest.raises(error):
        launcher(made, driver)(x, x, *words)
    with pytest.raises(TypeError):
        launcher(made, driver)(x, None, 1, 0.5)
    with pytest.raises(TypeError, match="got 3 arguments, not 2 tensors and 2 words"):
        launcher(made, driver)(x, x, 1)
    assert not driver.calls


def test_a_refused_launch_is_raised(made: Any) -> None:
    with pytest.raises(wl.DeviceError, match="refused: 700"):
        launcher(made, Driver(6, status=700))(torch.ones(4), torch.ones(4), 1, 0.5)


def test_what_describes_a_launch_is_whole(made: Any) -> None:
    with pytest.raises(ValueError, match="in 56 bytes, not 10"):
        launcher(made, Driver(6), config=bytes(10))
    with pytest.raises(ValueError, match="more than 512 parameters"):
        launcher(made, Driver(6), sizes=(0,) * 512)
    with pytest.raises(OverflowError):
        launcher(made, Driver(6), sizes=(2**63,))


def test_each_thread_is_bound_once_a_device(made: Any) -> None:
    seen: list[int] = []

    def bind(device: int) -> None:
        seen.append(device)

    launchers = [launcher(made, Driver(6), bind=bind, device=device) for device in (40, 41, 70)]

    def run() -> None:
        for _ in range(3):
            for launch in launchers:
                launch(torch.ones(4), torch.ones(4), 1, 0.5)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert sorted(seen) == [40] * 3 + [41] * 3 + [70] * 9  # beyond 64 devices each time


def test_what_binding_raises_comes_before_the_launch(made: Any) -> None:
    def bind(device: int) -> None:
        raise RuntimeError("no such device")

    driver = Driver(6)
    with pytest.raises(RuntimeError, match="no such device"):
        launcher(made, driver, bind=bind, device=50)(torch.ones(4), torch.ones(4), 1, 0.5)
    assert not driver.calls


def test_nothing_leaks(made: Any) -> None:
    class Owner:
        value = object()

    x, y, items, missing = torch.ones(4), torch.ones(4), {"value": object()}, {"": object()}
    found = (items, "value", items["value"]), (Owner, "value", Owner.value), (lambda: items, None, items)
    launch, is_alike = launcher(made, Driver(6)), guard(made, x, y, found=found)
    are_gone = [guard(made, x, y, found=(other,)) for other in ((missing, "value", None), (Owner, "other", None), (items, "value", x))]
    objects = x, y, *ADDRESS_OF, None, True, False, items, missing, Owner, items["value"], Owner.value, *are_gone
    before = [sys.getrefcount(each) for each in objects]
    for _ in range(1000):
        launch(x, y, 7, 0.5)
        assert is_alike(x, y)
        is_alike(y, x[:2])
        assert not any(gone(x, y) for gone in are_gone)
        for wrong in ((x, y, 7, None), (x, None, 7, 0.5), (x, y, 2**63, 0.5)):
            with pytest.raises((TypeError, OverflowError)):
                launch(*wrong)
    after = [sys.getrefcount(each) for each in objects]
    assert all(abs(now - then) < 100 for now, then in zip(after, before, strict=True))
