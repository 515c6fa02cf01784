"""Turns a rung and a way to run kernels into what it got wrong: results that differ from torch's, bytes written that are not its own.

Whoever runs the kernels, a GPU or an emulator, is handed in; it must not know how, nor how fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from wideload.ladder.rungs import THREADS, Launch, Machine, Problem, Rung, read_rung
from wideload.measure import random_tensor
from wideload.raw_kernel import RawKernel, raw

__all__ = ["CHECK_MACHINE", "Run", "check_rung", "run_launches"]

Run = Callable[[Rung, Iterable[Launch]], None]
"""Puts launches on the device of their tensors, in order."""

CHECK_MACHINE = Machine(sms=1, blocks_per_sm=1)
"""Small, so that the loops of a grid that does not grow with n go round several times at sizes as small as the articles'."""
_GUARD_BYTES = 1024
"""Kept free before and behind the result, and looked at afterwards."""
_PATTERN = 0xA5
_SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 0.0)


@functools.cache
def _kernel(file: str, name: str) -> RawKernel:
    return raw(read_rung(file), name, block=THREADS)


def run_launches(rung: Rung, launches: Iterable[Launch]) -> None:
    """Compile what is not yet compiled, and launch on the current stream of the tensors' device. Raises as `wl.raw`'s kernels do."""
    for launch in launches:
        _kernel(rung.file, launch.kernel)(*launch.arguments, grid=launch.grid)


def check_rung(rung: Rung, device: torch.device | str, run: Run = run_launches) -> tuple[str, ...]:
    """Return what is wrong with a rung at each of its shapes, on random values and on NaN, infinities and signed zeros: nothing if right.

    Results are held against ``rung.eager`` on the same device.
    """
    return tuple(
        f"{rung.name} of {' x '.join(map(str, shape))}{' with special values' if is_special else ''}: {fault}"
        for shape in rung.shapes
        for is_special in (False, True)
        for fault in _check_shape(rung, device, run, shape, is_special)
    )


def _check_shape(rung: Rung, device: torch.device | str, run: Run, shape: tuple[int, ...], is_special: bool) -> Iterable[str]:
    seeds = iter(range(100))

    def make(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        seed = next(seeds)
        values = random_tensor(size, dtype, device=device, seed=seed)
        if is_special:
            flat = values.view(-1)
            for first, value in enumerate(_SPECIAL):
                flat[first + seed :: len(_SPECIAL) + 2 + seed] = value  # inputs take them at other places, so that most pairs meet
        return values

    drawn = rung.make(make, *shape)
    expected = rung.eager(*drawn.inputs)
    store, out = _guarded(drawn.out)
    run(rung, rung.launch(CHECK_MACHINE, Problem(drawn.inputs, out)))
    wrong = _count_wrong(out, expected, rung.tolerance)
    if wrong:
        yield f"{wrong} of {out.numel()} results differ from torch's"
    nbytes = out.numel() * out.element_size()
    if not (store[:_GUARD_BYTES] == _PATTERN).all() or not (store[_GUARD_BYTES + nbytes :] == _PATTERN).all():
        yield "bytes beside the result were written"


def _guarded(like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory full of a pattern, and a dense tensor like ``like`` in its middle."""
    nbytes = like.numel() * like.element_size()
    store = torch.full((2 * _GUARD_BYTES + nbytes,), _PATTERN, dtype=torch.uint8, device=like.device)
    return store, store[_GUARD_BYTES : _GUARD_BYTES + nbytes].view(like.dtype).view(like.shape)


def _count_wrong(got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float]) -> int:
    """Results that are not equal, or not within the tolerance; every NaN equals every NaN, and -0 is not 0."""
    relative, absolute = tolerance
    if relative or absolute:
        return int((~torch.isclose(got, expected, relative, absolute, equal_nan=True)).sum())
    is_equal = (got == expected) & (got.signbit() == expected.signbit()) | got.isnan() & expected.isnan()
    return int((~is_equal).sum())
