"""Turns a callable, its rivals and the arguments of a call into checked, comparable times.

Knows what is asked for and what is reported; how contenders are checked and timed, the session and its parts know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import torch

from wideload.errors import WideloadError
from wideload.measure.outcome import requested_tolerance
from wideload.measure.result import BenchResult
from wideload.measure.session import Options, Progress, RequestedMode, Session
from wideload.measure.statistics import require, require_number
from wideload.measure.timing import WARM_UP_SECONDS, StopRule, collect

__all__ = ["bench"]

_NOBODY: Mapping[str, Callable[..., Any]] = MappingProxyType({})


def bench(
    fn: Callable[..., Any],
    *args: Any,
    against: Mapping[str, Callable[..., Any]] = _NOBODY,
    mode: RequestedMode = "auto",
    bytes: int | None = None,
    out: Any = None,
    check: Callable[..., Any] | Literal[False] | None = None,
    recheck_on: Sequence[Any] | None = None,
    rtol: float | None = None,
    atol: float = 0.0,
    name: str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    precision: float = StopRule.precision,
    max_samples: int = StopRule.max_samples,
    max_seconds: float = StopRule.max_seconds,
    warm_up_seconds: float = WARM_UP_SECONDS,
    **kwargs: Any,
) -> BenchResult:
    """Time ``fn(*args, **kwargs)`` beside the callables of ``against``, on copies of the arguments; times are microseconds.

    On a GPU the L2 is cold, the host's cost is kept out (and reported beside), and contenders take turns in random order.
    ``mode`` is how: ``"cold"`` times single calls by CUDA events after a flush; ``"graph"`` replays a CUDA graph of many calls over
    rotated copies; ``"hot"`` leaves the operands in the L2; ``"auto"`` takes the graph where the fastest call is shorter than 50 us.
    What no graph can hold is timed by events, and labelled. CPU calls are timed by the wall clock.

    Outputs are the tensors returned or, where there are none, the arguments changed. They are compared with those of ``check``,
    else of a fused function's ``reference``, else of the first of ``against``: before anything is timed, again with the outputs
    overwritten, and afterwards on permuted arguments. ``rtol`` and ``atol`` replace the tolerance of the dtypes
    (`default_tolerance`); ``check=False`` is for functions whose results are random. A contender that is wrong gets no time.

    Permuted arguments have every value in its neighbour's place. Where the functions may count on more than that leaves in place (rows
    that are sorted, halves of a table that are alike), ``recheck_on`` gives other positional arguments of the same layouts instead.

    ``bytes`` is what the call must move at least; a fused function's is computed. ``out`` is passed to the contenders that take it.
    After ``warm_up_seconds``, and once the SM clock is steady, sampling starts; it ends when the median's standard error is
    ``precision`` of it, or at ``max_samples`` or ``max_seconds`` each.

    Raises what ``fn`` raises, ``DeviceError`` for a mode that its device does not have, and ``RangeError`` for an argument of its own
    that makes no sense. What a rival raises, its label says.

    >>> import torch
    >>> from wideload.measure import bench, random_tensor
    >>> result = bench(torch.neg, random_tensor((64,)), against={"mul": lambda x: x * -1}, max_seconds=0.1, warm_up_seconds=0.0)
    >>> result["mul"].time_us.n >= 5
    True
    """
    is_by_name = isinstance(against, Mapping) and all(isinstance(rival, str) for rival in against)
    require(is_by_name and all(map(callable, against.values())), "against", against, "callables by name")
    subject = name or str(getattr(fn, "__name__", type(fn).__name__))
    if subject in against:
        raise WideloadError(f"two contenders are called {subject!r}. Rename the one in against, or give name=.")
    require_number("seed", seed, "an integer, 0 and more", is_whole=True)
    rule = StopRule(precision=precision, max_samples=max_samples, max_seconds=max_seconds)
    options = Options(
        mode,
        bytes,
        out,
        check,
        tolerance=requested_tolerance(rtol, atol),
        device=device,
        warm_up_seconds=warm_up_seconds,
        recheck_on=recheck_on,
    )
    session = Session({subject: fn, **against}, args, kwargs, options)
    with session.current_device(), Progress(f"timing {subject}") as progress:
        session.check()
        samplers = session.prepare()
        contenders, state = session.record(collect(samplers, rule, seed, progress))
        return BenchResult(
            subject=contenders[0],
            against=contenders[1:],
            checked_against=session.checked_against,
            minimal_bytes=session.minimal_bytes,
            nominal_bytes_per_second=session.gpu.nominal_bytes_per_second if session.gpu is not None else None,
            arguments=session.arguments,
            seed=int(seed),
            gpu_state=state,
            environment=session.environment(),
        )
