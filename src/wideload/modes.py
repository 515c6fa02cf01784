"""Says of tensors whether torch looks into what is done with them, and keeps its modes out of what is done aside.

Knows torch's state and the types of tensors; never what is computed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch

__all__ = ["has_shards", "is_looked_into", "no_modes"]

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def is_looked_into(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether ``torch.func``, forward-mode differentiation, a dispatch mode or a tensor subclass is at work, which see no kernel."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or any(type(tensor).__torch_dispatch__ is not _PLAIN_DISPATCH for tensor in tensors)
    )


def has_shards(tensors: Sequence[Any]) -> bool:
    """Whether one is a ``DTensor``, whose module takes a second to import."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and any(isinstance(tensor, kind) for tensor in tensors)


@contextlib.contextmanager
def no_modes() -> Iterator[None]:
    """A trace asks torch for dtypes, on small tensors: no mode looks on, of dispatch or of functions (export's notes ``no_grad``)."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes(), contextlib.ExitStack() as stack:
        for _ in range(torch._C._len_torch_function_stack()):
            stack.callback(torch._C._push_on_torch_function_stack, torch._C._pop_torch_function_stack())
        yield
