"""What some of the supported versions of torch lack, asked of the one that is here; must not know of wideload."""

from __future__ import annotations

import torch


def has_where(dtype: torch.dtype) -> bool:
    """Whether the CPU, which a trace asks, has ``torch.where`` of ``dtype``: of the wide unsigned ones 2.13 has, 2.10 and 2.11 have not."""
    x = torch.zeros(1, dtype=dtype)
    try:
        torch.where(torch.ones(1, dtype=torch.bool), x, x)
    except NotImplementedError:
        return False
    return True
