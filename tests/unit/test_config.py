"""Settings: for the process, for a block, and in other threads."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from typing import Any

import pytest

import wideload as wl
from wideload.config import Config, Settings


def test_a_block_ends_with_what_was_before() -> None:
    config = Config()
    with config(background_compile=True):
        assert config.background_compile
        with config(background_compile=False):
            assert not config.background_compile
        with config():
            assert config.background_compile
    assert config.settings == Settings()
    with pytest.raises(KeyError), config(background_compile=True):
        raise KeyError
    assert not config.background_compile


def test_an_attribute_holds_for_the_process_and_within_a_block_for_the_block() -> None:
    config = Config()
    config.background_compile = True
    assert (config.background_compile, in_thread(config)) == (True, True)
    with config(background_compile=False):
        assert (config.background_compile, in_thread(config)) == (False, True)
        config.background_compile = True
        assert config.background_compile
        config.background_compile = False
    assert config.background_compile
    assert repr(config) == "Config(background_compile=True)"


def in_thread(config: Config) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(config.background_compile))
    thread.start()
    thread.join()
    return found[0]


def test_names_and_values_that_are_none_are_refused() -> None:
    with pytest.raises(wl.WideloadError, match="no setting 'backgroud_compile'; it has background_compile"):
        wl.config(backgroud_compile=True)
    value: Any = 1
    with pytest.raises(wl.WideloadError, match="background_compile is 1; allowed: True and False"):
        wl.config(background_compile=value)
    with pytest.raises(wl.WideloadError, match="allowed: True and False"):
        wl.config.background_compile = value
    with pytest.raises(AttributeError):
        wl.config.backgroud_compile = True  # type: ignore[attr-defined]
    assert not wl.config.background_compile


@pytest.mark.parametrize(("value", "found"), [("1", True), ("0", False), ("", False)])
def test_the_environment_says_how_a_process_begins(value: str, found: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WIDELOAD_BACKGROUND_COMPILE", value)
    program = "import wideload as wl; print(wl.config.background_compile)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(found)


def test_a_block_may_be_entered_again() -> None:
    config = Config()
    block = config(background_compile=True)
    for _ in range(2):
        with block, block:
            assert config.background_compile
        assert not config.background_compile


def test_a_block_may_be_entered_by_two_at_once() -> None:
    config = Config()
    block = config(background_compile=True)
    one, other = contextvars.copy_context(), contextvars.copy_context()
    for context, leave in ((one, False), (other, False), (one, True), (other, True)):  # neither is the inner one
        context.run(block.__exit__, None, None, None) if leave else context.run(block.__enter__)
        assert context.run(lambda: config.background_compile) is not leave
    assert not config.background_compile
