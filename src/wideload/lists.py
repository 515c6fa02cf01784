"""Turns lists of tensors into few launches: which members share a kernel, once a signature, and the table of pointers, each call.

Knows tensors, plans and kernels; never Python functions or how arguments were spelt.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wideload.cache import find_cubins
from wideload.emit.kernel import emit_kernel
from wideload.errors import DeviceError, LayoutError, OverlapError
from wideload.execute import Output, place_call, scalar_argument, value_of
from wideload.expr import Expr, HostCall, HostInput, HostValue, Numerics, Reduced
from wideload.launch import TableKernel, current_stream, device_arch, is_capturing
from wideload.lower import Program, Store, lower_expr
from wideload.outputs import extent_of
from wideload.overlap import relation
from wideload.plan import Access, Variant, walked_targets
from wideload.plan_foreach import choose_accesses, chunk_map, list_variant, table_words
from wideload.replay import NodeLayout

__all__ = [
    "Column", "ListKernel", "ListPlan", "Lists", "Member", "Words", "check_apart", "gather_addresses", "is_list", "list_arguments",
    "meeting_pairs", "plan_lists", "plan_member", "prepare_lists", "read_column", "run_lists", "split_lists",
    "tensors_like",
]  # fmt: skip

Words = npt.NDArray[np.int64]


# ---- arguments


@dataclass(frozen=True, slots=True)
class Lists:
    """The arguments of a ``foreach`` call: each list or tuple has one item a member, anything else is the same for all."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    length: int

    def at(self, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of one member."""
        args = tuple(value[member] if is_list(value) else value for value in self.args)
        return args, {name: value[member] if is_list(value) else value for name, value in self.kwargs.items()}

    @property
    def values(self) -> tuple[Any, ...]:
        """All arguments in order."""
        return (*self.args, *self.kwargs.values())


def is_list(value: Any) -> bool:
    """Whether an argument is one item a member: a list or a tuple, no class derived of them (a size, a named tuple)."""
    return type(value) in (list, tuple)


def split_lists(function: str, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Lists:
    """Raises ``LayoutError`` where no argument is a list, or two are of different lengths."""
    named = {names[at] if at < len(names) else f"x{at}": value for at, value in enumerate(args)} | kwargs
    lengths = {name: len(value) for name, value in named.items() if is_list(value)}
    if not lengths:
        given = ", ".join(f"{name} a {type(value).__name__}" for name, value in named.items()) or "nothing"
        raise LayoutError(f"{function}.foreach was given no list: {given}. Pass lists or tuples of tensors, or call {function} itself.")
    if out is not None:
        if not is_list(out):
            raise LayoutError(f"out= of {function}.foreach is a {type(out).__name__}; allowed: a list or a tuple, one item a member.")
        lengths["out="] = len(out)
    if len(set(lengths.values())) > 1:
        have = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise LayoutError(f"the lists of {function}.foreach have different lengths: {have}. Give each one item a member.")
    return Lists(args, kwargs, out, next(iter(lengths.values())))


@dataclass(frozen=True, slots=True)
class Column:
    """One list: ``kind`` of its items, and what a plan depends on of them; on the host are 0-dim CPU tensors beside other devices."""

    kind: str
    key: tuple[Any, ...]


_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_NUMBERS = frozenset({int, float})
_STATIC = frozenset({bool, type(None), str, torch.dtype})


def read_column(items: Sequence[Any], device: torch.device, *, is_static: bool = False) -> Column | None:
    """What a plan depends on of a list's items; ``None`` where they need a look one by one. ``is_static``: on the values of numbers too.

    A few C calls an item: thousands of gradients are new tensors at each step.
    """
    types = set(map(type, items))
    if types <= _PLAIN:
        return _read_tensors(items, device)
    if types <= _NUMBERS:
        return Column("numbers", tuple(map(repr if is_static else type, items)))
    return Column("static", (*map(type, items), *items)) if types <= _STATIC else None


def _read_tensors(items: Sequence[torch.Tensor], device: torch.device) -> Column | None:
    try:
        dtypes, shapes, strides = tuple(map(_dtype, items)), tuple(map(_shape, items)), tuple(map(torch.Tensor.stride, items))
    except RuntimeError:  # nested tensors have no strides
        return None
    devices = set(map(_device, items))
    is_lazy = any(map(torch.Tensor.is_neg, items)) or (any(t.is_complex for t in set(dtypes)) and any(map(torch.Tensor.is_conj, items)))
    if is_lazy or len(devices) > 1 or set(map(_layout, items)) != {torch.strided}:
        return None
    if torch.is_grad_enabled() and any(map(_requires_grad, items)):
        return None
    on_host = devices != {device}
    if on_host and (devices != {torch.device("cpu")} or any(shapes)):
        return None
    return Column("host" if on_host else "tensors", (dtypes, shapes, strides))


_dtype, _shape, _layout, _device, _requires_grad = map(attrgetter, ("dtype", "shape", "layout", "device", "requires_grad"))


def tensors_like(columns: Sequence[Sequence[torch.Tensor]]) -> Callable[[Sequence[Sequence[torch.Tensor]]], bool] | None:
    """Tells whether lists hold tensors of the types, dtypes, shapes, strides and devices that these have now.

    Also whether they are as lazy (conj, neg) and as differentiable. TorchDynamo's own check, in C: 0.1 us a tensor, where ``read_column``
    takes 0.4. ``None`` where this version of torch has none.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        guards = TensorGuards(*itertools.chain(*columns), dynamic_dims_sizes=None, dynamic_dims_strides=None)
    except (AttributeError, ImportError, RuntimeError, TypeError):
        return None

    def check(others: Sequence[Sequence[torch.Tensor]]) -> bool:
        try:
            return bool(guards.check(*itertools.chain(*others)))
        except TypeError:  # not a tensor
            return False

    return check


# ---- planning


@dataclass(frozen=True)
class Member:
    """One item of the lists, as a foreach kernel takes it: ``loads`` are (column, bytes behind the first element, one for all).

    ``num_elements`` is 1 where runs and single elements are the same; ``accesses`` says "vector" then.
    """

    program: Program
    accesses: tuple[Access, ...]
    loads: tuple[tuple[int, int, bool], ...]
    stores: tuple[int, ...]
    num_elements: int


@dataclass(frozen=True, eq=False)
class ListPlan:
    """One launch: the members at ``positions`` of the lists, in a table whose static words are in ``template``.

    ``loads`` and ``stores`` are columns, and for loads the bytes behind each tensor's first element; ``places`` the words of each entry.
    """

    program: Program
    variant: Variant
    positions: npt.NDArray[np.intp]
    loads: tuple[tuple[int, npt.NDArray[np.int64]], ...]
    stores: tuple[int, ...]
    sizes: tuple[int, ...]
    template: Words
    places: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """The kernel's name in the source."""
        return f"{self.program.name}_{self.variant.family}"


def plan_member(
    expr: Expr,
    layouts: Sequence[NodeLayout],
    tensors: Sequence[torch.Tensor],
    columns: Sequence[tuple[int, bool]],
    outputs: Sequence[Output],
    out_columns: Sequence[int],
    device: torch.device,
    *,
    numerics: Numerics,
    fast_math: bool,
    is_written: bool,
) -> Member | None:
    """One item of the lists; ``None`` where it needs a kernel of its own. ``columns`` are (column, one for all) of its tensors.

    ``is_written``: the outputs are the caller's, and may be arguments too; then each element is to be read where it is written.
    """
    pushed, operands, targets = place_call(expr, layouts, tensors, outputs, device)
    for target in targets:
        node = expr.nodes[outputs[target.output].node]
        if target.layout != (layouts[node.operand] if isinstance(node, Reduced) else outputs[target.output].layout):
            return None
    is_reduced = any(target.reduction for target in targets)
    if is_reduced and len({target.layout.shape for target in targets}) > 1:
        return None
    if is_reduced and is_written and any(t.numel() == 1 and not shared for t, (_, shared) in zip(tensors, columns, strict=True)):
        return None  # what is written may be an operand, and is set to zero before any is read
    whole = [NodeLayout(tuple(tensor.shape), tensor.stride()) for tensor in tensors]
    if is_written and any(operand.layout != whole[operand.tensor] for operand in operands):
        return None
    program = lower_expr(pushed.expr, tuple(Store(t.node, t.dtype, t.reduction) for t in targets), numerics=numerics, fast_math=fast_math)
    if all(0 in target.layout.shape for target in targets):
        return Member(program, (), (), (), 0)
    walks = [pushed.walks[position.walk] for position in program.positions]
    chosen = choose_accesses(program, operands, walked_targets(targets, operands), walks)
    if chosen is None:
        return None
    read = [operands[parameter.operand] for parameter in program.parameters]
    loads = tuple((columns[load.tensor][0], load.offset_bytes, columns[load.tensor][1]) for load in read)
    return Member(program, chosen[0], loads, tuple(out_columns[target.output] for target in targets), chosen[1])


def plan_lists(members: Sequence[Member | None], shared_slots: Callable[[int], bool]) -> tuple[ListPlan, ...]:
    """The launches for the members that are not ``None``: one a program, and one more where its table is full.

    ``shared_slots`` says of a runtime scalar, by its slot, whether it is one number for all members.
    """
    groups: dict[Any, list[int]] = {}
    single = []
    for position, member in enumerate(members):
        if member is None or not member.num_elements:
            continue
        columns = tuple((column, shared) for column, _, shared in member.loads)
        key = (_without_checks(member.program), member.accesses, columns, member.stores)
        if member.num_elements > 1:
            groups.setdefault(key, []).append(position)
        else:
            single.append((position, key))
    for position, key in single:  # one element may go with any group of its program: a run of one, or the one element
        program, accesses, *rest = key
        fitting = (g for g in groups if g[0] == program and list(g[2:]) == rest and _fits_one(accesses, g[1]))
        groups.setdefault(next(fitting, key), []).append(position)
    plans = []
    for (_, accesses, loads, _), positions in groups.items():
        program = next(member.program for member in map(members.__getitem__, positions) if member is not None)
        shared_loads = tuple(shared for _, shared in loads)
        shared_scalars = tuple(all(map(shared_slots, _slots_of(parameter.value))) for parameter in program.scalars)
        in_place = _in_place(accesses, [members[position] for position in positions])
        variant = list_variant(program, accesses, shared_loads, shared_scalars, in_place, len(positions))
        assert variant.table is not None
        for start in range(0, len(positions), variant.table.capacity):
            part = sorted(positions)[start : start + variant.table.capacity]
            plans.append(_plan_part(program, variant, part, [members[position] for position in part]))
    return tuple(plans)


def _without_checks(program: Program) -> Program:
    """Range checks tell a 0-dim operand from others, and kernels do not."""
    return program._replace(scalars=tuple(scalar._replace(checks=()) for scalar in program.scalars))


def _fits_one(accesses: tuple[Access, ...], others: tuple[Access, ...]) -> bool:
    return all((mine == "value") == (other == "value") for mine, other in zip(accesses, others, strict=True))


def _slots_of(value: HostValue) -> set[int]:
    """The runtime scalars that a number is made of."""
    if isinstance(value, HostInput):
        return {value.slot}
    return set().union(*map(_slots_of, value.args)) if isinstance(value, HostCall) else set()


def _in_place(accesses: Sequence[Access], members: Sequence[Any]) -> tuple[int | None, ...]:
    """For each store of members that are reached alike, the load that begins at the same address."""
    starts: dict[int, int] = {}
    for k, access in enumerate(accesses):
        places = {member.loads[k] for member in members}
        (column, offset_bytes, is_shared), *others = places
        if access == "vector" and not (others or offset_bytes or is_shared):
            starts[column] = k
    return tuple(map(starts.get, members[0].stores))


def _plan_part(program: Program, variant: Variant, positions: Sequence[int], members: Sequence[Any]) -> ListPlan:
    words = table_words(program, variant)
    template = np.zeros(sum(words[-1]), np.int64)
    sizes = tuple(member.num_elements for member in members)
    assert variant.table is not None
    at, _ = words[len(program.parameters) + variant.table.in_place.count(None)]
    template[at : at + len(sizes)] = sizes
    columns = [column for column, *_ in members[0].loads]
    offsets = [np.array([member.loads[k][1] for member in members], np.int64) for k in range(len(columns))]
    return ListPlan(
        program, variant, np.array(positions, np.intp), tuple(zip(columns, offsets, strict=True)), members[0].stores, sizes, template,
        tuple(words),
    )  # fmt: skip


# ---- running


@dataclass(frozen=True, eq=False)
class ListKernel:
    """A plan and its loaded kernel."""

    plan: ListPlan
    kernel: TableKernel


def prepare_lists(plans: Sequence[ListPlan], device: int) -> tuple[ListKernel, ...]:
    """Compile and load the kernels."""
    arch = device_arch(device)
    cubins = find_cubins([(emit_kernel(plan.program, plan.variant), arch, plan.name) for plan in plans])
    return tuple(ListKernel(plan, TableKernel(cubin, plan.variant.threads)) for cubin, plan in zip(cubins, plans, strict=True))


def gather_addresses(tensors: Sequence[torch.Tensor]) -> Words:
    """The address of each tensor's first element."""
    return np.fromiter(map(torch.Tensor.data_ptr, tensors), np.int64, len(tensors))


def list_arguments(
    plan: ListPlan,
    columns: Sequence[Sequence[torch.Tensor]],
    addresses: Sequence[Words | None],
    scalars: Callable[[int], tuple[Any, ...]],
    seeds: int = 0,
) -> Words:
    """The table of one launch. ``columns`` have a tensor a member, or one for all; ``addresses`` theirs, ``None`` on the host.

    ``scalars`` are the runtime scalars of a member, ``seeds`` the address of one seed a member. Raises as ``scalar_argument`` does.
    """
    program, table, words = plan.program, plan.variant.table, plan.template.copy()
    assert table is not None
    places = iter(plan.places)
    for parameter, access, is_shared, (column, offsets) in zip(
        program.parameters, plan.variant.loads, table.shared_loads, plan.loads, strict=True
    ):
        at, _ = next(places)
        if access == "value":
            tensors = columns[column][:1] if is_shared else [columns[column][position] for position in plan.positions]
            _put_numbers(words, at, [value_of(tensor) for tensor in tensors], parameter.type.kind == "float")
        else:
            found = addresses[column]
            assert found is not None
            values = found[:1] + offsets[:1] if is_shared else found[plan.positions] + offsets
            words[at : at + len(values)] = values
    for column, load in zip(plan.stores, table.in_place, strict=True):
        if load is None:
            at, _ = next(places)
            found = addresses[column]
            assert found is not None
            words[at : at + len(plan.positions)] = found[plan.positions]
    next(places)  # the element counts are in the template
    for scalar, is_shared in zip(program.scalars, table.shared_scalars, strict=True):
        at, _ = next(places)
        positions = plan.positions[:1] if is_shared else plan.positions
        _put_numbers(words, at, [scalar_argument(scalar, scalars(position)) for position in positions], scalar.kind is not int)
    for at, _ in places:
        words[at] = seeds
    return words


def _put_numbers(words: Words, at: int, values: Sequence[Any], is_float: bool) -> None:
    target = words.view(np.float64) if is_float else words
    target[at : at + len(values)] = values


def run_lists(kernels: Sequence[ListKernel], device: int, tables: Sequence[Words]) -> None:
    """Put the kernels on the current stream of ``device``; their tables are copied at once."""
    maps = [_find_map(device, kernel.plan.variant, kernel.plan.sizes) for kernel in kernels]
    for kernel, table, chunks in zip(kernels, tables, maps, strict=True):
        kernel.kernel.launch(device, len(chunks), table, chunks.data_ptr())


_MAX_MAPS = 64
"""Chunk maps that are kept: of a list of 200 M elements, one takes 0.8 MB (8 bytes a chunk of 2048)."""

_maps: OrderedDict[Any, tuple[torch.Tensor, int]] = OrderedDict()
"""On the device, the one used last at the end, with the stream that was current when each was made."""
_captured: dict[Any, torch.Tensor] = {}
"""Those that a CUDA graph reads, which may be replayed as long as the process lives; never replaced."""
_maps_lock = threading.Lock()
"""Held while either is looked at."""


def _find_map(device: int, variant: Variant, sizes: tuple[int, ...]) -> torch.Tensor:
    """The chunk map, made once for lists of these sizes. Raises ``DeviceError`` where it would have to be made inside a capture."""
    table = variant.table
    assert table is not None
    key = (device, variant.threads, variant.elements, table.accesses, sizes)
    stream, capturing = current_stream(device), is_capturing(device)
    with _maps_lock:
        if key in _captured:
            return _captured[key]
        if key not in _maps:
            if capturing:
                raise DeviceError(
                    "a foreach call of lists of these sizes was not made before this CUDA graph capture, in which the map of their chunks "
                    "cannot be copied to the device. Make the call once before the capture, to warm up."
                )
            # A copy from pageable memory is over when .to returns, so that every stream may read it.
            _maps[key] = torch.from_numpy(chunk_map(variant, sizes)).to(torch.device("cuda", device)), stream
        _maps.move_to_end(key)
        if len(_maps) > _MAX_MAPS:
            _maps.popitem(last=False)
        chunks, made_on = _maps[key]
        if capturing:
            _captured[key] = chunks
            del _maps[key]
        elif stream != made_on:
            chunks.record_stream(torch.cuda.current_stream(device))
        return chunks


# ---- memory that members share


def check_apart(writes: Iterable[tuple[int, str, torch.Tensor]], reads: Iterable[tuple[int, str, torch.Tensor]]) -> None:
    """Raise ``OverlapError`` unless each output has memory of its own, but for the very same view as an argument of its own member.

    Each tensor comes with its member, -1 for an argument of all, and its name.
    """
    entries = [(*entry, True) for entry in writes] + [(*entry, False) for entry in reads]
    entries = [entry for entry in entries if entry[2].numel()]
    extents = [extent_of(tensor) for _, _, tensor, _ in entries]
    starts = np.array([extent.address_bytes for extent in extents], np.int64)
    ends = np.array([extent.end_bytes for extent in extents], np.int64)
    for a, b in meeting_pairs(starts, ends, np.array([is_write for *_, is_write in entries], bool)):
        how = relation(extents[a], extents[b])
        (a_member, a_name, _, a_writes), (b_member, b_name, _, b_writes) = entries[a], entries[b]
        if how == "none" or (how == "exact" and a_member == b_member and not (a_writes and b_writes)):
            continue
        places = [f"{name}[{member}]" if member >= 0 else name for member, name in ((a_member, a_name), (b_member, b_name))]
        raise OverlapError(
            f"{places[0]} and {places[1]} of a foreach call share memory. Give each result memory of its own, or the very same view as an "
            "argument of its own member (in place)."
        )


def meeting_pairs(starts: Words, ends: Words, is_write: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """The pairs of ranges ``starts .. ends`` (not empty) that have a byte in common, of which at least one is written.

    >>> meeting_pairs(np.array([0, 8, 4]), np.array([4, 12, 9]), np.array([False, False, True]))
    [(2, 1)]
    """
    order = np.argsort(starts, kind="stable")
    starts, ends, written = starts[order], ends[order], is_write[order]
    later = np.searchsorted(starts, ends, "left")  # ranges up to here begin before this one ends
    after = np.arange(1, len(starts) + 1)
    num_written = np.concatenate(([0], np.cumsum(written)))
    counts = np.where(written, later - after, num_written[later] - num_written[after])
    pairs = []
    for a in np.flatnonzero(counts > 0):
        pairs += [(int(order[a]), int(order[b])) for b in range(a + 1, later[a]) if written[a] or written[b]]
    return pairs
