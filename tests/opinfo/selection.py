"""Turns PyTorch's OpInfo database into the operators that are elementwise, and each into calls on sample tensors.

Knows torch's testing internals; never wideload.
"""

from __future__ import annotations

import importlib.util
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ASIDE", "Sample", "Selected", "select_ops"]

if (
    "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None
):  # torch's testing modules import it for one base class, unused here
    _stand_in = types.ModuleType("expecttest")
    _stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules["expecttest"] = _stand_in

from torch.testing._internal import common_methods_invocations as invocations
from torch.testing._internal.opinfo.core import OpInfo

_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss huber_loss kl_div l1_loss
    margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss soft_margin_loss
"""
_OTHERS = """
    addcdiv addcmul alias_copy clamp clone contiguous full_like lerp logaddexp2 masked_fill ones_like
    resolve_conj resolve_neg to where zeros_like
"""
_ACTIVATIONS = "gelu glu hardswish leaky_relu"
_MORE = frozenset([*_OTHERS.split(), *(f"nn.functional.{name}" for name in (_LOSSES + _ACTIVATIONS).split())])
"""The elementwise operators outside the database's lists of unary and binary ones."""

ASIDE = ("_refs.", "jiterator_")
"""Prefixes of what is no operator of its own: torch's Python references and its own fused kernels."""


@dataclass(frozen=True)
class Sample:
    """One call: ``function(*args, **kwargs)``."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Selected:
    """An elementwise operator of the database."""

    info: OpInfo

    @property
    def name(self) -> str:
        """The operator's name, with its variant behind a dot."""
        return ".".join(filter(None, (self.info.name, self.info.variant_test_name)))

    @property
    def function(self) -> Callable[..., Any]:
        """The torch function that the samples call."""
        return self.info.op  # type: ignore[no-any-return]

    def dtypes(self, device: str) -> tuple[torch.dtype, ...]:
        """The dtypes that torch says it supports on ``"cpu"`` or ``"cuda"``, in a fixed order."""
        return tuple(sorted(self.info.supported_dtypes(device), key=str))

    def samples(self, dtype: torch.dtype, device: str) -> Iterator[Sample]:
        """The database's own samples; losses with ``reduction="none"``, each such call once."""
        seen: set[str] = set()
        is_loss = self.info.name.rpartition(".")[2] in _LOSSES.split()
        for given in self.info.sample_inputs(device, dtype, requires_grad=False):
            kwargs = dict(given.kwargs)
            if is_loss:
                kwargs["reduction"] = "none"
                key = repr([[tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in (given.input, *given.args)], sorted(kwargs)])
                key += repr({name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)})
                if key in seen:
                    continue
                seen.add(key)
            yield Sample((given.input, *given.args), kwargs)


def select_ops() -> tuple[Selected, ...]:
    """Every elementwise operator of the database, by name."""
    ufuncs = {id(info) for info in (*invocations.unary_ufuncs, *invocations.binary_ufuncs)}
    chosen = [info for info in invocations.op_db if id(info) in ufuncs or info.name in _MORE]
    return tuple(sorted((Selected(info) for info in chosen if not info.name.startswith(ASIDE)), key=lambda op: op.name))
