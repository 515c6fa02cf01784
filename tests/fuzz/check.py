"""Runs a case on a backend and holds it to eager torch: dtypes, shapes, strides, every bit, what lies around ``out=``, and errors.

The only module of the fuzz that calls wideload.
"""

from __future__ import annotations

import functools
import unittest.mock
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from tests.fuzz.cases import Case, Out, draw_case, draw_out, make_operands, make_tensor
from tests.fuzz.programs import Program
from wideload.execute import is_safe_in_place
from wideload.fused import FusedFunction
from wideload.outputs import extent_of
from wideload.overlap import relation
from wideload.plan import KernelPlan, choice, strips

__all__ = ["MAX_ELEMENTS", "Backend", "Mismatch", "Session"]

Backend = Literal["emulator", "cuda", "reference"]

_FILLS = (1, choice.FILL_BLOCKS)

MAX_ELEMENTS: dict[Backend, int] = {"emulator": 1 << 13, "reference": 1 << 13, "cuda": 1 << 18}
"""Of the largest shape drawn: several blocks of every family; on a GPU more blocks than run at a time."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Mismatch(AssertionError):
    """wideload and eager torch differ."""


@dataclass
class Session:
    """Runs cases on one backend and counts.

    ``max_kernels`` bounds the distinct kernel texts: a case that needs one more is skipped, and so is one without a kernel of
    ``family``. ``families`` counts kernels run by family.
    """

    backend: Backend
    max_kernels: int | None = None
    max_elements: int = 0
    family: str | None = None
    num_checked: int = 0
    num_skipped: int = 0
    num_refused: int = 0
    texts: set[str] = field(default_factory=set)
    families: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.max_elements = self.max_elements or MAX_ELEMENTS[self.backend]
        self._device = "cuda" if self.backend == "cuda" else "cpu"

    def run(self, seed: int) -> None:
        """Draw the case of ``seed`` and check it; raises ``Mismatch`` with the line that reproduces it."""
        case = draw_case(seed, self.max_elements)
        skipped = self.num_skipped
        try:
            # Or no shape drawn is large enough for strips, nor for tiles of full size.
            large = (
                unittest.mock.patch.object(strips, "LEAST_STRIPS", 1),
                unittest.mock.patch.object(choice, "FILL_BLOCKS", _FILLS[seed % 2]),
            )
            with large[0], large[1]:
                self._check(case)
        except Mismatch as mismatch:
            raise Mismatch(f"{mismatch}\n{case}\nreproduce: {self.command(seed)}") from None
        finally:
            self.num_checked += self.num_skipped == skipped

    def command(self, seed: int) -> str:
        """The command line that runs one seed."""
        elements = "" if self.max_elements == MAX_ELEMENTS[self.backend] else f" --elements {self.max_elements}"
        return f"python -m tests.fuzz --backend {self.backend} --draws 1 --seed {seed}{elements}"

    # ---- one case

    def _check(self, case: Case) -> None:
        f, tame = _fused(case.program), case.program.oracle == "double"
        args, stores = make_operands(case, self._device, self.max_elements)
        try:
            wants = _expect(case.program, args)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            self._check_refused(case, args, stores, None, [], f"eager raises {type(error).__name__}: {error}")
            return
        if case.out == "none":
            if self._admit(f, args, None):
                got = self._call(case, f, args, None)
                self._compare(case, got, wants)
                self._check_stores(case, stores, ())
            return
        parts = draw_out(case, [want.result for want in _leaves(wants)], self.max_elements)
        rooms = [  # each output's storage
            stores[part.argument] if part.argument is not None else make_tensor(part, self._device, self.max_elements, tame=tame)[1]
            for part in parts
        ]
        outs = [room.as_strided(p.layout.shape, p.layout.strides, p.layout.offset) for room, p in zip(rooms, parts, strict=True)]
        out = _rebuilt(wants, iter(outs))
        refusal = _refusal(case, parts, outs, wants)
        if refusal:
            self._check_refused(case, args, stores, out, rooms, refusal)
            return
        if not self._admit(f, args, out):
            return
        after = [room.clone() for room in rooms]
        expected = [room.as_strided(x.shape, x.stride(), x.storage_offset()) for room, x in zip(after, outs, strict=True)]
        for target, want in zip(expected, _leaves(wants), strict=True):
            target.copy_(want.value)
        returned = self._call(case, f, args, out)
        if any(a is not b for a, b in zip(_leaves(returned), outs, strict=True)):
            raise Mismatch("out= is not what is returned")
        for number, (tensor, target) in enumerate(zip(outs, expected, strict=True)):
            _compare_bits(case, f"out[{number}]", tensor, target)
            target.copy_(tensor)
            if not torch.equal(_as_bytes(rooms[number]), _as_bytes(after[number])):
                raise Mismatch(f"out[{number}]: bytes around it were changed")
        self._check_stores(case, stores, [part.argument for part in parts])

    def _admit(self, f: FusedFunction, args: Sequence[Any], out: Any) -> bool:
        """Count the kernels of a call; false where it needs more texts than are allowed."""
        if self.backend == "reference":
            return True
        try:
            kernels = f.plan(*args, out=out, target=None if self.backend == "cuda" else "sm_90").kernels
        except wl.WideloadError as error:
            raise Mismatch(f"eager accepts what wideload refuses, {type(error).__name__}: {error}") from error
        texts, families = {kernel.source for kernel in kernels}, [kernel.plan.variant.family for kernel in kernels]
        is_over = self.max_kernels is not None and len(self.texts | texts) > self.max_kernels
        if is_over or (self.family is not None and self.family not in families):
            self.num_skipped += 1
            return False
        self.texts |= texts
        self.families.update(families)
        return True

    def _call(self, case: Case, f: FusedFunction, args: list[Any], out: Any) -> Any:
        try:
            return _emulate(f, args, out) if self.backend == "emulator" else f(*args, out=out)
        except Exception as error:  # whatever it is, eager accepts these arguments
            raise Mismatch(f"{type(error).__name__}: {error}") from error

    def _check_refused(
        self, case: Case, args: list[Any], stores: list[torch.Tensor], out: Any, rooms: list[torch.Tensor], why: str
    ) -> None:
        """What must raise a ``WideloadError``, and write nothing."""
        self.num_refused += 1
        f = _fused(case.program)
        before = [store.clone() for store in rooms]
        try:
            if self.backend == "emulator":
                f.plan(*args, out=out, target="sm_90")
            else:
                f(*args, out=out)
        except wl.WideloadError:
            self._check_stores(case, stores, ())
            if not all(torch.equal(_as_bytes(a), _as_bytes(b)) for a, b in zip(rooms, before, strict=True)):
                raise Mismatch(f"out= was written though the call raised; {why}") from None
            return
        except Exception as error:
            raise Mismatch(f"raised {type(error).__name__}, not a WideloadError: {error}; {why}") from error
        raise Mismatch(f"was accepted, but {why}")

    def _compare(self, case: Case, got: Any, wants: Any) -> None:
        for number, (tensor, want) in enumerate(zip(_leaves(got), _leaves(wants), strict=True)):
            have = (tensor.dtype, tuple(tensor.shape), tensor.device, tensor.stride())
            need = (want.result.dtype, tuple(want.result.shape), want.result.device, want.result.stride())
            if have != need:
                raise Mismatch(f"result {number} has dtype, shape, device, strides {have}; eager's has {need}")
            _compare_bits(case, f"result {number}", tensor, want.value)

    def _check_stores(self, case: Case, stores: Sequence[torch.Tensor], written: Sequence[int | None]) -> None:
        """Arguments that are no outputs keep every byte."""
        tame = case.program.oracle == "double"
        for position, (operand, store) in enumerate(zip(case.operands, stores, strict=True)):
            if operand.owns_storage and position not in written:
                _, fresh = make_tensor(operand, store.device.type, self.max_elements, tame=tame)
                if not torch.equal(_as_bytes(store), _as_bytes(fresh)):
                    raise Mismatch(f"argument {'abcd'[position]} was changed")


@functools.cache
def _fused(program: Program) -> FusedFunction:
    return wl.fuse(program.function(), name=program.name, numerics=program.numerics)


def _emulate(f: FusedFunction, args: list[Any], out: Any) -> Any:
    """A call as on a GPU, with the emulator in place of the launches."""
    if out is None:
        return run_emulated(f, *args)
    tensors, outs = f._bind(tuple(args), {}).tensors, list(_leaves(out))
    plans: list[KernelPlan] = [kernel.plan for kernel in f.plan(*args, out=out, target="sm_90").kernels]
    is_in_place = any(relation(extent_of(out), extent_of(tensor)) != "none" for out in outs for tensor in tensors)
    if not is_in_place or is_safe_in_place(plans, tensors, outs):
        return run_emulated(f, *args, out=out)
    fresh = [torch.empty_like(tensor) for tensor in outs]
    run_emulated(f, *args, out=_rebuilt(out, iter(fresh)))
    for tensor, value in zip(outs, fresh, strict=True):
        tensor.copy_(value)
    return out


# ---- what eager gives


@dataclass(frozen=True)
class _Want:
    """Eager's own result, for its dtype and layout, and the value that is expected in it."""

    result: torch.Tensor
    value: torch.Tensor


def _expect(program: Program, args: list[Any]) -> Any:
    function = program.function()
    result = function(*args)
    if program.oracle == "eager":
        return _map(lambda tensor: _Want(tensor, tensor), result)
    wider = [_widened(arg, program.oracle) for arg in args]
    values = iter(list(_leaves(function(*wider))))
    return _map(lambda tensor: _Want(tensor, next(values).to(tensor.dtype)), result)


def _widened(arg: Any, oracle: str) -> Any:
    if not isinstance(arg, torch.Tensor) or not arg.dtype.is_floating_point:
        return arg
    return arg.double() if oracle == "double" else arg.float() if arg.dtype.itemsize == 2 else arg


def _refusal(case: Case, parts: Sequence[Out], outs: list[torch.Tensor], wants: Any) -> str:
    """Why torch would not write these outputs; empty where it would."""
    for number, (out, want) in enumerate(zip(outs, _leaves(wants), strict=True)):
        if not torch.can_cast(want.result.dtype, out.dtype):
            return f"out[{number}] is {out.dtype}, the result {want.result.dtype}"
        if number in case.program.values and out.dtype != want.result.dtype:
            return f"out[{number}] is {out.dtype}, and blocks combine theirs in {want.result.dtype}"
        if out.numel() > 1 and not any(out.stride()):
            return f"out[{number}] is one cell for {out.numel()} elements"
    if case.fault == "partial overlap" and any(part.argument is not None for part in parts):
        return "out[0] lies one element before an argument"
    return ""


# ---- comparison


def _compare_bits(case: Case, name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Every bit, but that one NaN is as good as another, and within the program's ``ulps``."""
    got, want = got.contiguous(), want.contiguous()
    bits, wanted = (tensor.view(_BITS[tensor.element_size()]) for tensor in (got, want))
    if torch.equal(bits, wanted):
        return
    same = bits == wanted
    if got.dtype.is_floating_point:
        same |= got.isnan() & want.isnan()
        if not case.program.zeros_differ:
            same |= got == want
        if case.program.ulps:
            same |= (_rank(bits) - _rank(wanted)).abs() <= case.program.ulps
    if not same.all():
        at = tuple(int(i) for i in (~same).nonzero()[0])
        raise Mismatch(
            f"{name}: {int((~same).sum())} of {same.numel()} differ, at {at} got {got[at].item()!r}, expected {want[at].item()!r}"
        )


def _rank(bits: torch.Tensor) -> torch.Tensor:
    """The position of a float among all floats of its dtype, from its bits; finite ones are neighbours where ranks are."""
    wide = bits.long()
    return torch.where(wide < 0, torch.iinfo(bits.dtype).min - wide, wide)


def _as_bytes(store: torch.Tensor) -> torch.Tensor:
    return store.view(torch.uint8)


# ---- nested results


def _leaves(value: Any) -> Any:
    """The tensors of a tensor, a tuple or a dict of them, in order."""
    if isinstance(value, tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_map(function, item) for item in value)
    if isinstance(value, dict):
        return {key: _map(function, item) for key, item in value.items()}
    return function(value)


def _rebuilt(like: Any, leaves: Any) -> Any:
    return _map(lambda _: next(leaves), like)
