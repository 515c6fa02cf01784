"""Turns a ``foreach`` call of a fused function into work: few launches for its lists on a GPU, item by item elsewhere.

The part of ``fused`` that knows of lists; must not know which items share a kernel, nor what a kernel gets.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wideload.compiled import call_operator
from wideload.errors import WideloadError
from wideload.execute import Output, new_output
from wideload.expr import is_reduced, is_view_of_operand
from wideload.launch import has_kernels
from wideload.lists import (
    ListKernel,
    ListPlan,
    Lists,
    Member,
    Words,
    check_apart,
    gather_addresses,
    is_list,
    list_arguments,
    meeting_pairs,
    plan_lists,
    plan_member,
    prepare_lists,
    read_column,
    run_lists,
    split_lists,
    tensors_like,
)
from wideload.modes import has_shards
from wideload.random import draw_seed
from wideload.remembered import remember
from wideload.replay import NodeLayout
from wideload.structure import are_same, map_structure
from wideload.trace import HostResult, NumberArg, TensorArg, TensorResult, Traced, is_traced

if TYPE_CHECKING:
    from wideload.fused import FusedFunction

__all__ = ["Listed", "Repeat", "call_in_place", "call_lists", "find_listed"]

_MAX_APART = 8
"""Sets of addresses of one signature that are known to share no memory: those of gradients come again, as the allocator hands them out."""
_MAX_REPEATS = 8
"""Planned calls that a caller of `call_in_place` has made again: momentum's first step and later ones, sets of missing gradients."""


@dataclass(slots=True, eq=False)
class Listed:
    """What lists of one signature need: launches for most items, and ``others``, which take kernels of their own.

    ``outputs`` and ``results`` are each item's new tensors and the structure around them; ``slots`` the column of each runtime scalar
    that is a list; ``reduced`` are (item, output) of the values of all elements that launches combine; ``spans`` is how many bytes each
    tensor reaches, ``apart_at`` the addresses at which they were lately found to share none with an output. ``plans`` is ``None`` where all
    items are to be called one by one.
    """

    plans: tuple[ListPlan, ...] | None
    others: tuple[int, ...] = ()
    outputs: tuple[tuple[Output, ...], ...] = ()
    results: tuple[Any, ...] = ()
    slots: tuple[tuple[int, int], ...] = ()
    reduced: tuple[tuple[int, int], ...] = ()
    kernels: tuple[ListKernel, ...] = ()
    spans: Words = field(default_factory=lambda: np.empty(0, np.int64))
    apart_at: dict[bytes, None] = field(default_factory=dict)


def call_lists(f: FusedFunction, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """``f.foreach``; see there."""
    lists = split_lists(f.__name__, f._parameters(), args, kwargs, out)
    outs = [None] * lists.length if out is None else out
    if torch.compiler.is_dynamo_compiling():
        return [call_operator(f, *lists.at(item), outs[item]) for item in range(lists.length)]
    if is_traced(args, kwargs):
        return [f._inline(*lists.at(item), outs[item]) for item in range(lists.length)]
    if not lists.length:
        return [] if out is None else out
    call = _find_call(f, lists)
    return _call_each(f, lists) if call is None else call.run()


def _find_call(f: FusedFunction, lists: Lists) -> ListedCall | None:
    with _naming(0):
        first = f._bind(*lists.at(0))
    return find_listed(f, lists, first) if has_kernels(first.device) and not has_shards(first.tensors) else None


@dataclass(frozen=True, eq=False, slots=True)
class Repeat:
    """A planned call in place, to be made again for tensors that are ``like`` those it was planned for, and for numbers of their types."""

    like: Callable[[Sequence[Sequence[torch.Tensor]]], bool]
    device: torch.device
    listed: Listed
    aliases: tuple[int | None, ...]


def call_in_place(f: FusedFunction, args: tuple[Any, ...], targets: tuple[int, ...], repeats: dict[Any, Repeat]) -> None:
    """``f.foreach(*args, out=...)`` where the outputs of each item are its items of the lists at ``targets``.

    ``repeats`` are the caller's calls of this ``f``: one like an earlier one is not taken apart again, only its addresses and its numbers
    are read. ``f`` must not ask whether two of its arguments are one tensor: which are may change from call to call.
    """
    key = None if torch.compiler.is_dynamo_compiling() else _repeat_key(f, args)
    columns = [value if is_list(value) else [value] if isinstance(value, torch.Tensor) else None for value in args]
    outs = [args[place] for place in targets]
    repeat = repeats.get(key)
    if repeat is not None and repeat.like([column for column in columns if column is not None]):
        lists = Lists(args, {}, outs, len(outs[0]))
        ListedCall(f, lists, repeat.device, _numbers(args), repeat.listed, columns, outs, repeat.aliases).run()
        return
    out = list(zip(*outs, strict=True))
    call = None
    if key is not None and len(outs[0]):
        call = _find_call(f, split_lists(f.__name__, f._parameters(), args, {}, out))
    if call is None:
        f.foreach(*args, out=out)
        return
    call.run()
    if call.is_repeatable(args) and (like := tensors_like([column for column in columns if column is not None])) is not None:
        remember(repeats, key, Repeat(like, call.device, call.listed, call.aliases), _MAX_REPEATS)


def _repeat_key(f: FusedFunction, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """All that a plan depends on but the tensors themselves."""
    return (*map(_kind_of, args), f._captures.read(), torch.get_default_dtype(), torch.is_grad_enabled())


def _kind_of(value: Any) -> Any:
    kind = type(value)
    return len(value) if is_list(value) else kind if kind in _NUMBERS or isinstance(value, torch.Tensor) else (kind, value)


_NUMBERS = (int, float)


def _numbers(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value for value in args if type(value) in _NUMBERS)


def _call_each(f: FusedFunction, lists: Lists) -> Any:
    """Every item by itself; where there is ``out=``, everything is checked before anything is written."""
    calls = []
    for item in range(lists.length):
        with _naming(item):
            calls.append(f._bind(*lists.at(item)))
    if any(has_shards(call.tensors) for call in calls):
        outs = [None] * lists.length if lists.out is None else lists.out
        results = [f(*args, out=outs[item], **kwargs) for item, (args, kwargs) in enumerate(map(lists.at, range(lists.length)))]
        return results if lists.out is None else lists.out
    if lists.out is None:
        results = []
        for item, call in enumerate(calls):
            with _naming(item):
                results.append(f._call(call))
        return results
    writes, staged = [], []
    for item, call in enumerate(calls):
        with _naming(item):
            staged.append(f._run(call, functools.partial(f._stage_into, call, lists.out[item])))
        writes += [(item, "out=", tensor) for tensor in _leaves(lists.out[item])]
    reads = [(item, name, t) for item, call in enumerate(calls) for name, t in zip(call.names, call.tensors, strict=True)]
    check_apart(writes, [(item, name, t) for item, name, t in reads if t.device.type != "meta"])
    for write in staged:
        write()
    return lists.out


@contextlib.contextmanager
def _naming(item: int) -> Iterator[None]:
    """Errors inside say which item of the lists they are about."""
    try:
        yield
    except WideloadError as error:
        raise type(error)(f"item {item} of the lists: {error}") from None


def _leaves(out: Any) -> list[torch.Tensor]:
    """The tensors of an item of ``out=``, each once, meta tensors left out."""
    found: dict[int, torch.Tensor] = {}

    def note(leaf: Any) -> None:
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":
            found[id(leaf)] = leaf

    map_structure(note, out)
    return list(found.values())


# ---- the call of lists on one device


@dataclass(slots=True, eq=False)
class ListedCall:
    """A call whose signature is planned. ``columns`` are the arguments in order, one tensor a member or one for all, then the outputs.

    ``is_distinct`` says that no item has a tensor twice; ``seeds`` are those of the members that draw, launch by launch.
    """

    f: FusedFunction
    lists: Lists
    device: torch.device
    scalars: tuple[Any, ...]
    listed: Listed
    columns: list[Sequence[Any] | None]
    outs: list[Sequence[torch.Tensor]] | None
    aliases: tuple[int | None, ...]
    is_distinct: bool = True
    seeds: torch.Tensor | None = None

    def is_repeatable(self, args: tuple[Any, ...]) -> bool:
        """Whether tensors at other addresses and other numbers are all that a call of this plan may have new."""
        listed, is_plain = self.listed, are_same(_numbers(args), self.scalars)
        return self.is_distinct and is_plain and not (listed.others or listed.slots or listed.reduced)

    def run(self) -> Any:
        """Launch everything; nothing has been written where this raises."""
        f, lists, listed, device = self.f, self.lists, self.listed, self.device
        made, tables = self.fill()
        if lists.out is None:
            self.clear(made)
            run_lists(listed.kernels, device.index, tables)
            others = iter([f._call(f._bind(*lists.at(item))) for item in listed.others])
            return [next(others) if tensors is None else self._result(item, tensors) for item, tensors in enumerate(made)]
        staged = []
        for item in listed.others:
            call = f._bind(*lists.at(item))
            staged.append(f._run(call, functools.partial(f._stage_into, call, lists.out[item])))
        self.clear(made)
        run_lists(listed.kernels, device.index, tables)
        for write in staged:
            write()
        assert self.outs is not None
        torch.autograd.graph.increment_version(list(itertools.chain(*self.outs)))
        return lists.out

    def fill(self) -> tuple[list[list[torch.Tensor] | None], list[Words]]:
        """New outputs of each item (``None`` for the others), and the tables of the launches. Raises where outputs share memory."""
        listed, device, length = self.listed, self.device, self.lists.length
        assert listed.plans is not None
        made: list[list[torch.Tensor] | None] = []
        columns: list[Any] = list(self.columns)
        if self.outs is None:
            skipped = frozenset(listed.others)
            for item, outputs in enumerate(listed.outputs):
                made.append(None if item in skipped else [_empty(output, device) for output in outputs])
            addresses = [self._addresses(column) for column in columns]
            for k in range(max(map(len, listed.outputs))):
                own = [tensors[k].data_ptr() if tensors is not None and k < len(tensors) else 0 for tensors in made]
                addresses.append(np.array(own, np.int64))
        else:
            addresses = [self._addresses(column) for column in columns]
            for column, alias in zip(self.outs, self.aliases, strict=True):
                addresses.append(gather_addresses(column) if alias is None else addresses[alias])
            self._check_apart(addresses)
        base, by_slot = self.scalars, {slot: columns[column] for slot, column in listed.slots}

        def scalars(item: int) -> tuple[Any, ...]:
            return tuple(by_slot[slot][item] if slot in by_slot else value for slot, value in enumerate(base)) if by_slot else base

        num_seeds = [len(plan.positions) if plan.program.has_draws else 0 for plan in listed.plans]
        self.seeds = draw_seed(device, sum(num_seeds)) if any(num_seeds) else None
        starts = itertools.accumulate(num_seeds, initial=0)
        seeds = [0 if self.seeds is None else self.seeds.data_ptr() + start * self.seeds.itemsize for start in starts]
        tables = [list_arguments(plan, columns, addresses, scalars, at) for plan, at in zip(listed.plans, seeds, strict=False)]
        return made or [None] * length, tables

    def clear(self, made: Sequence[Sequence[torch.Tensor] | None]) -> None:
        """Set to zero what kernels combine values in, of each item that they compute; ``made`` has new outputs, if there is no ``out=``.

        It is work on the current stream, as the kernels are.
        """
        if self.listed.reduced:
            outs = self.outs
            found = [(made[item] or ())[k] if outs is None else outs[k][item] for item, k in self.listed.reduced]
            torch._foreach_zero_(found)

    def _addresses(self, column: Sequence[Any] | None) -> Words | None:
        if column is None or not isinstance(column[0], torch.Tensor) or column[0].device != self.device:
            return None
        return gather_addresses(column)

    def _result(self, item: int, tensors: list[torch.Tensor]) -> Any:
        result = self.listed.results[item]
        if isinstance(result, TensorResult):
            return tensors[result.output]
        return map_structure(lambda leaf: tensors[leaf.output] if isinstance(leaf, TensorResult) else leaf, result)

    def _check_apart(self, addresses: Sequence[Words | None]) -> None:
        """No byte of an output is another item's; looked at again whenever an address is another."""
        assert self.outs is not None
        num_inputs, aliased = len(self.columns), set(self.aliases)
        looked_at = [c for c, found in enumerate(addresses) if found is not None and (c >= num_inputs or c not in aliased)]
        starts: Words = np.concatenate([addresses[c] for c in looked_at])
        apart_at = starts.tobytes()
        if apart_at in self.listed.apart_at:
            return
        columns = [column or () for column in (*self.columns, *self.outs)]
        if not len(self.listed.spans):
            self.listed.spans = np.concatenate([_spans(columns[c]) for c in looked_at])
        spans = self.listed.spans
        written = np.repeat([c >= num_inputs for c in looked_at], [len(columns[c]) for c in looked_at])
        held = spans > 0
        if meeting_pairs(starts[held], (starts + spans)[held], written[held]):  # some meet: is it in place, or between the strides?
            values = [*self.lists.values, *self.outs]
            entries = [
                (item if is_list(values[c]) or self.lists.length == 1 else -1, "out=" if c >= num_inputs else f"argument {c}", tensor)
                for c in looked_at
                for item, tensor in enumerate(columns[c])
            ]
            check_apart(itertools.compress(entries, written), itertools.compress(entries, ~written))
        remember(self.listed.apart_at, apart_at, None, _MAX_APART)


def _spans(tensors: Sequence[torch.Tensor]) -> Words:
    """Bytes from each tensor's first to behind its last; 0 where it has none."""
    spans = []
    for tensor in tensors:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        spans.append((last + 1) * tensor.element_size() if tensor.numel() else 0)
    return np.array(spans, np.int64)


def _empty(output: Output, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(output.layout.shape, output.layout.strides, dtype=output.dtype, device=device)


# ---- signatures


def find_listed(f: FusedFunction, lists: Lists, first: Any) -> ListedCall | None:
    """The planned call; ``None`` where items have to be called one by one: gradients, views of arguments returned, unusual arguments.

    A plan holds the places of arguments in the call, so that how the call is spelt is part of its key.
    """
    device, values = first.device, lists.values
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in first.tensors):
        return None
    trace_key, traced = f._trace(first)
    outs = _out_columns(traced.result, lists.out)
    if (outs is None) != (lists.out is None):
        return None
    columns = [value if is_list(value) else [value] if isinstance(value, torch.Tensor) else None for value in values]
    tensors = [c for c, column in enumerate(columns) if column is not None and isinstance(column[0], torch.Tensor)]
    listed_tensors = [c for c in tensors if is_list(values[c])]
    aliases = tuple(next((c for c in listed_tensors if all(map(operator.is_, targets, values[c]))), None) for targets in outs or ())
    # Defaults, tensors in tuples, and what is made of an argument (of a lazy conjugate) have no column, and their addresses no place.
    if _num_tensors(first) != len(tensors) or not set(map(id, first.tensors)) <= {id(column[0]) for column in columns if column}:
        return None
    static = _static_columns(f, lists, first)
    others = tuple(read_column(v, device, is_static=c in static) for c, v in enumerate(values) if is_list(v) and c not in listed_tensors)
    if None in others:
        return None
    spelling = (tuple(lists.kwargs), tuple(map(is_list, values)))
    layouts = tuple((tuple(tensor.shape), tensor.stride()) for tensor in first.tensors)
    same = _same_items(columns, tensors, lists.length)
    known = (trace_key, torch.is_grad_enabled(), lists.length, spelling, others, layouts, aliases, same)
    read = [values[c] for c in listed_tensors]
    read += [targets for targets, alias in zip(outs or (), aliases, strict=True) if alias is None]
    like, listed = f._alike.get(known, (None, None))
    if listed is None or like is None or not like(read):
        keys = tuple(read_column(items, device) for items in read)
        if any(key is None for key in keys) or any(key and key.kind != "tensors" for key in keys[len(listed_tensors) :]):
            return None
        listed = f._listed.get((known, keys))
        if listed is None:
            listed = _plan_listed(f, lists, first, traced, columns, outs, aliases)
            if listed.plans and device.type == "cuda":
                listed.kernels = prepare_lists(listed.plans, device.index)
            f._keep(f._listed, (known, keys), listed)
        f._keep(f._alike, known, (tensors_like(read), listed))
    return None if listed.plans is None else ListedCall(f, lists, device, tuple(first.scalars), listed, columns, outs, aliases, not same)


def _out_columns(result: Any, out: Any) -> list[Sequence[torch.Tensor]] | None:
    """``out=`` by output, where an item is one tensor or a flat tuple or list of them; ``None`` for anything else."""
    if out is None:
        return None
    if isinstance(result, TensorResult):
        return [out] if result.output == 0 else None
    if type(result) not in (tuple, list) or [leaf for leaf in result if not isinstance(leaf, TensorResult)]:
        return None
    if [leaf.output for leaf in result] != list(range(len(result))) or not set(map(type, out)) <= {tuple, list}:
        return None
    return list(zip(*out, strict=True)) if set(map(len, out)) == {len(result)} else None


def _same_items(columns: Sequence[Any], tensors: Sequence[int], length: int) -> tuple[Any, ...]:
    """Which arguments are one and the same tensor, for each item: a call takes such for one operand."""
    found = []
    for a, b in itertools.combinations(tensors, 2):
        mine, other = (columns[c] if len(columns[c]) == length else [columns[c][0]] * length for c in (a, b))
        if any(map(operator.is_, mine, other)):
            found.append((a, b, tuple(map(operator.is_, mine, other))))
    return tuple(found)


def _plan_listed(
    f: FusedFunction,
    lists: Lists,
    first: Any,
    template: Traced,
    columns: Sequence[Any],
    outs: list[Sequence[torch.Tensor]] | None,
    aliases: Sequence[int | None],
) -> Listed:
    """The launches for lists of one signature."""
    members: list[Member | None] = []
    outputs: list[tuple[Output, ...]] = []
    results: list[Any] = []
    known: dict[Any, Member | None] = {}

    def plan_item(item: int, call: Any, key: Any, traced: Traced) -> bool:
        """Note one item; ``False`` where no list of this signature can be planned."""
        places = [_column_of(tensor, lists.values, item) for tensor in call.tensors]
        if outs is not None and traced.result != template.result:
            return False
        layouts, nodes = f._layouts(call, traced), traced.expr.outputs
        if outs is None:
            own = tuple(new_output(traced.expr, layouts, node) for node in nodes)
        else:
            targets = [column[item] for column in outs]
            f._check_outputs(call, traced, layouts, targets)
            own = tuple(
                Output(node, target.dtype, NodeLayout(tuple(target.shape), target.stride()), 0, is_reduced(traced.expr, node))
                for node, target in zip(nodes, targets, strict=True)
            )
        known_key = (key, tuple((t.dtype, tuple(t.shape), t.stride(), t.device) for t in call.tensors), tuple(places), own)
        if outs is None and not _is_new(traced):
            known[known_key] = None
        elif known_key not in known:
            known[known_key] = plan_member(
                traced.expr,
                layouts,
                call.tensors,
                places,
                own,
                [len(columns) + k if alias is None else alias for k, alias in enumerate(aliases or (None,) * len(nodes))],
                call.device,
                numerics=f._options.numerics,
                fast_math=f._options.fast_math,
                is_written=outs is not None,
            )
        members.append(known[known_key])
        outputs.append(own)
        results.append(traced.result)
        return True

    for item in range(lists.length):
        with _naming(item):
            call = f._bind(*lists.at(item))
            if call.device != first.device or not f._run(call, functools.partial(plan_item, item, call)):
                return Listed(None)
    slots = _list_slots(f, lists, first)
    own_slots = {slot for slot, _ in slots}
    plans = plan_lists(members, lambda slot: slot not in own_slots)
    others = tuple(item for item, member in enumerate(members) if member is None)
    own = [(item, outputs[item]) for item, member in enumerate(members) if member is not None]
    reduced = tuple((item, k) for item, found in own for k, output in enumerate(found) if output.is_reduced)
    return Listed(plans, others, tuple(outputs), tuple(results), slots, reduced)


def _is_new(traced: Traced) -> bool:
    """Whether every tensor of the result is computed, and no number is: no argument or view of one comes back."""
    leaves: list[Any] = []
    map_structure(leaves.append, traced.result)
    if any(isinstance(leaf, HostResult) or (isinstance(leaf, TensorResult) and leaf.argument is not None) for leaf in leaves):
        return False
    return not any(is_view_of_operand(traced.expr, node) for node in traced.expr.outputs)


def _column_of(tensor: torch.Tensor, values: Sequence[Any], item: int) -> tuple[int, bool]:
    """The argument that a tensor of an item came from, and whether it is one for all."""
    return next((c, not is_list(value)) for c, value in enumerate(values) if (value[item] if is_list(value) else value) is tensor)


def _num_tensors(call: Any) -> int:
    """How many tensors a call was given, also in tuples and dicts and as defaults; each as often as it was."""
    leaves: list[Any] = []
    map_structure(leaves.append, call.spec)
    return sum(isinstance(leaf, TensorArg) for leaf in leaves)


def _static_columns(f: FusedFunction, lists: Lists, first: Any) -> frozenset[int]:
    """The arguments that are lists of numbers of which each is part of the kernel, by ``static=``."""
    if not f._static:
        return frozenset()
    runtime = {column for _, column in _list_slots(f, lists, first)}
    return frozenset(c for c, value in enumerate(lists.values) if is_list(value) and c not in runtime)


def _list_slots(f: FusedFunction, lists: Lists, first: Any) -> tuple[tuple[int, int], ...]:
    """(slot, argument) of the runtime scalars that are lists of numbers."""
    marks = [_Mark(c, is_list(value)) for c, value in enumerate(lists.values)]
    args, kwargs = f._arrange(tuple(marks[: len(lists.args)]), dict(zip(lists.kwargs, marks[len(lists.args) :], strict=True)))
    slots, slot = [], 0
    for given, mark in zip((*first.spec[0], *first.spec[1].values()), (*args, *kwargs.values()), strict=True):
        numbers: list[Any] = []
        map_structure(lambda leaf, numbers=numbers: numbers.append(leaf) if isinstance(leaf, NumberArg) else None, given)
        if numbers and isinstance(mark, _Mark) and mark.is_list:
            slots.append((slot, mark.column))
        slot += len(numbers)
    return tuple(slots)


@dataclass(frozen=True)
class _Mark:
    """Stands for argument ``column`` of a call."""

    column: int
    is_list: bool
