"""Turns off ``torch.autocast`` where torch is asked what its operators give: what a kernel computes does not depend on the caller's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["without_autocast"]


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, torch's operators compute in the dtypes of their operands, whatever ``torch.autocast`` the caller has turned on."""
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                stack.enter_context(torch.autocast(device_type, enabled=False))
        yield
