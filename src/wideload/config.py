"""Turns what a user sets, for the process or for a ``with`` block, into the settings that a call finds.

Knows names, values and where they hold; never what they change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from wideload.errors import WideloadError

__all__ = ["Config", "Settings", "config"]


@dataclass(frozen=True, slots=True)
class Settings:
    """``background_compile``: while a call's kernel is being compiled, torch's own operators compute its results."""

    background_compile: bool = False


class Config:
    """``wl.config``: the settings of this process as attributes, and those of a ``with`` block by a call.

    A block's settings hold in the thread, or the asyncio task, that runs it; those of the process in all others.

    >>> config = Config()
    >>> with config(background_compile=True):
    ...     print(config)
    Config(background_compile=True)
    >>> config.background_compile
    False
    """

    __slots__ = ("_of_blocks", "_of_process")

    def __init__(self, settings: Settings | None = None) -> None:
        """With the settings of the process."""
        self._of_process = settings or Settings()
        self._of_blocks: ContextVar[tuple[Settings, ...]] = ContextVar("wideload settings", default=())

    def __call__(self, **settings: bool) -> contextlib.AbstractContextManager[None]:
        """Set what is named until the block ends. Raises ``WideloadError`` for names and values that are none."""
        return _Block(self, _checked(settings))

    @property
    def settings(self) -> Settings:
        """All that hold here and now."""
        blocks = self._of_blocks.get()
        return blocks[-1] if blocks else self._of_process

    @property
    def background_compile(self) -> bool:
        """Whether torch's own operators compute a call's results until its kernel has been compiled, in a thread of its own.

        A call of ``f.foreach``, ``wl.optim`` or ``wl.raw`` waits for its kernel all the same.
        """
        return self.settings.background_compile

    @background_compile.setter
    def background_compile(self, value: bool) -> None:
        """For the process; within a block, for the block."""
        changed = _checked({"background_compile": value})
        settings = dataclasses.replace(self.settings, **changed)
        if blocks := self._of_blocks.get():
            self._of_blocks.set((*blocks[:-1], settings))
        else:
            self._of_process = settings

    def __repr__(self) -> str:
        values = ", ".join(f"{field.name}={getattr(self.settings, field.name)}" for field in dataclasses.fields(Settings))
        return f"Config({values})"


class _Block:
    """A ``with`` block, which may be entered again, also by several threads and tasks at once: what it began lies in their contexts."""

    def __init__(self, of: Config, settings: dict[str, Any]) -> None:
        self._of, self._settings = of, settings

    def __enter__(self) -> None:
        blocks = self._of._of_blocks
        blocks.set((*blocks.get(), dataclasses.replace(self._of.settings, **self._settings)))

    def __exit__(self, *_: object) -> None:
        blocks = self._of._of_blocks
        blocks.set(blocks.get()[:-1])


def _checked(settings: dict[str, Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(Settings)]
    for name, value in settings.items():
        if name not in names:
            raise WideloadError(f"wl.config has no setting {name!r}; it has {', '.join(names)}")
        if not isinstance(value, bool):
            raise WideloadError(f"wl.config.{name} is {value!r}; allowed: True and False")
    return settings


config = Config(Settings(background_compile=os.environ.get("WIDELOAD_BACKGROUND_COMPILE") == "1"))
