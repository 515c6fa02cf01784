"""Turns kernels that a call will need into compiled ones in threads of their own, and says of a call whether it has to wait.

Knows texts and threads; never what is computed meanwhile. NVRTC alone runs there: no driver, which a captured graph might be disturbed by.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from wideload.cache import MAX_THREADS, are_at_hand, find_cubins
from wideload.remembered import remember

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

    from wideload.manifest import Recipe

__all__ = ["Backlog"]

Kernels = Sequence[tuple[str, str, str]]
"""(source, architecture, name) of each."""


@functools.cache
def _threads() -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(min(os.cpu_count() or 1, MAX_THREADS), thread_name_prefix="wideload-compile")


if hasattr(os, "register_at_fork"):  # a child has none of its parent's threads
    os.register_at_fork(after_in_child=_threads.cache_clear)


class Backlog:
    """Calls of one function whose kernels are being compiled. What NVRTC refuses stays, and is raised at each call like it."""

    __slots__ = ("_known", "_process")

    def __init__(self) -> None:
        self._known: dict[Any, Future[Any] | None] = {}  # None: nothing to wait for
        self._process = os.getpid()

    def has_to_wait(self, call: Any, find_kernels: Callable[[], Kernels], recipe: Callable[[], Recipe | None]) -> bool:
        """Whether kernels of ``call``, any key, are not there yet; the first time, their compilation is begun.

        Kernels that this process, a build or the disk has are never waited for. Raises the ``CompileError`` of the compilation.
        """
        if self._process != os.getpid():  # the parent's threads have not come along
            self._known, self._process = {}, os.getpid()
        if call not in self._known:
            remember(self._known, call, self._begin(find_kernels(), recipe))
        started = self._known.get(call)
        if started is None:
            return False
        if not started.done():
            return True
        started.result()
        self._known[call] = None
        return False

    @staticmethod
    def _begin(kernels: Kernels, recipe: Callable[[], Recipe | None]) -> Future[Any] | None:
        if are_at_hand(kernels):
            return None
        spelt = recipe()  # now: a thread would keep the call's tensors alive
        return _threads().submit(find_cubins, kernels, lambda: spelt)
