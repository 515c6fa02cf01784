"""Turns a function into what it reads from outside its arguments: a key that follows those values, or the reason to refuse them.

It must not know tracing, tensors' contents or kernels; it looks at bytecode, never runs the function, and never raises before ``check``.

Three steps, each with its own class:

- ``_Scan`` runs a code object on an abstract stack and lists its *reads*: a root (a global, a closure cell, the bound ``self``,
  ``super()``, an import) with the attributes that follow it, and what becomes of the value: called, passed to which callee, or used.
- ``_Walk`` resolves the reads to today's values, recursively through functions, methods, classes and modules. Each immutable end
  becomes a *part* of the key; an end that may change unseen (a list, a tensor, ``time.time``) is a ``TraceError``; and every
  dictionary entry or attribute that was followed becomes a *guard*.
- ``Captures.read`` evaluates the guards, one generated expression of identity tests (20 ns each), and walks again only
  when one fails. Guards and keys hold strong references, so that an id is never mistaken for that of a dead object.

Code of torch, numpy, math and the like (``_TRUSTED``) counts as constant and is not walked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import enum
import functools
import importlib.util
import inspect
import keyword
import operator
import re
import struct
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, cast

import numpy as np
import torch

from wideload.errors import TraceError

__all__ = ["Captures", "Found", "find_captures", "unwrap_callable"]

Found = tuple[Any, str | None, Any]
"""An object, the name of its attribute, of a dict the key of its item, or None to call it, and what that is found to be: the same object as
long as nothing has changed. What raises has changed."""

# Top-level packages whose functions depend on their arguments alone, and the parts of them that do not.
_TRUSTED = tuple(
    "_collections _collections_abc _functools _operator abc builtins cmath collections dataclasses enum functools itertools math "
    "numbers numpy operator torch types typing wideload".split()
)
_STATEFUL_MODULES = ("numpy.random", "torch.backends", "torch.cuda", "torch.distributed", "torch.random")
_MODE = re.compile(r"(is|are)_\w+_enabled|get_(autocast|deterministic|float32|num)_\w+|get_default_device")  # the default dtype is a key
_STATEFUL: frozenset[object] = (
    frozenset((__import__, breakpoint, eval, exec, globals, id, input, open))
    | {torch.initial_seed, torch.normal, torch.rand, torch.randint, torch.randn, torch.randperm, torch.seed}
    | {function for name, function in vars(torch).items() if _MODE.fullmatch(name)}
)
_QUIET_MODULES = frozenset(("_warnings", "logging", "warnings"))  # a call there, its result dropped, leaves nothing in a trace
_TYPE_TESTS: tuple[object, ...] = (isinstance, issubclass, cast)
_DYNAMIC: tuple[object, ...] = (getattr, vars, dir, operator.attrgetter, operator.methodcaller)  # reach any attribute name

_SCALARS = frozenset(
    (int, bool, str, bytes, type(None), type(...), type(NotImplemented), torch.dtype, torch.device, torch.memory_format, torch.layout)
)
_CONSTANTS = (torch.finfo, torch.iinfo, np.finfo, np.iinfo, types.UnionType, types.GenericAlias)
_C_METHODS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_C_FUNCTIONS = (types.BuiltinFunctionType, types.MethodWrapperType, *_C_METHODS)
_SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch._C.ScriptMethod)
# Special methods that no expression calls: what they read cannot reach a trace.
_UNCALLED = frozenset(
    f"__{name}__"
    for name in "repr str format reduce reduce_ex getstate setstate getnewargs replace annotate annotate_func copy deepcopy "
    "init_subclass class_getitem del delattr dir hash sizeof".split()
)


# --- Scan: code to reads -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False, slots=True)
class _Read:
    """One value that a code object takes from outside, and what becomes of it.

    ``uses``: ``call`` (it is called), ``result``, ``raised`` (that call's result is used, raised), ``value`` (anything that may
    read its contents), ``test`` (compared with None), ``store`` (it is assigned, or an attribute of it), ``none`` (extended by
    an attribute, or dropped). ``callees``: the reads to which it is passed as an argument. ``of_locals``: it is called with
    something that the function was given or has computed; ``is_compared``: what that call returned is.
    """

    root: str  # global, cell, self, super, import
    name: str
    attributes: tuple[str, ...]
    line: int | None
    uses: set[str] = dataclasses.field(default_factory=set)
    callees: list[_Read] = dataclasses.field(default_factory=list)
    of_locals: bool = False
    is_compared: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Value:
    """A stack entry: a read itself (``exact``), something computed from ``reads``, or the result of calling ``callee``.

    ``holds``: the calls whose results it may be or have in it, out of a local or a tuple; it is as unknown as without.
    """

    reads: tuple[_Read, ...] = ()
    exact: bool = False
    callee: _Read | None = None
    holds: tuple[_Read, ...] = dataclasses.field(default=(), compare=False)

    @property
    def calls(self) -> tuple[_Read, ...]:
        return (self.callee, *self.holds) if self.callee else self.holds


_UNKNOWN = _Value()
_NULL = _Value()  # the entry that CPython pushes beside a callable that is not a method
_NULL_FIRST = sys.version_info < (3, 13)  # where: below the callable up to 3.12, above it since

_STARRED = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
_JUMPS = frozenset(dis.hasjrel) | frozenset(dis.hasjabs)
_ALWAYS_JUMPS = frozenset("JUMP_FORWARD JUMP_BACKWARD JUMP_BACKWARD_NO_INTERRUPT".split())
_IGNORED = _ALWAYS_JUMPS | set("CACHE COPY_FREE_VARS DELETE_FAST EXTENDED_ARG KW_NAMES MAKE_CELL NOP NOT_TAKEN PRECALL RESUME".split())
_ENDS = _ALWAYS_JUMPS | frozenset("RETURN_VALUE RETURN_CONST RAISE_VARARGS RERAISE".split())
_PUSHES = ("LOAD_", "BUILD_", "PUSH_", "FOR_ITER")  # where the stack grows, these pop nothing
_PUSHES_NOTHING = ("JUMP_", "STORE_", "DELETE_", "POP_", "RETURN_", "RAISE_", "RERAISE", "END_")
_COMPARISONS = ("COMPARE_OP", "CONTAINS_OP", "IS_OP")
# The result is as good as its operands: a class in a tuple for isinstance, a list in an f-string for print.
_COMBINES = ("BUILD_TUPLE", "BUILD_STRING", "FORMAT_", "CONVERT_VALUE", "BINARY_")


class _Scan:
    """Runs ``code`` once, in order, on an abstract stack.

    ``free``: its free variables that are captured; ``this``: its variable that holds the bound object, or None. Where paths
    meet, and in exception handlers, entries that are not the same become unknown and count as used: the scan errs towards
    ``value``.
    """

    def __init__(self, code: types.CodeType, free: frozenset[str], this: str | None) -> None:
        self.free, self.this = free, this
        self.reads: list[_Read] = []
        self.stack: list[_Value] = []
        self.line: int | None = code.co_firstlineno
        self.aliases: dict[str, _Read] = {}  # locals assigned once, from a read
        self.held: dict[str, tuple[_Read, ...]] = {}  # the calls of whose results locals hold one
        num_parameters = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & flag) for flag in _STARRED)
        self.loaded = set(code.co_varnames[:num_parameters])  # has a value before any store, or is loaded before one
        self.constants: list[Any] = []
        instructions = list(dis.get_instructions(code))
        self.stored = [local for i in instructions for verb, local in _locals(i) if verb == "STORE"]
        self.cells = frozenset(code.co_cellvars + code.co_freevars)
        self.run(instructions)
        self.names = frozenset(code.co_names)
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                outer_names = frozenset(inner.co_freevars)
                nested = _Scan(inner, free & outer_names, this if this in outer_names else None)
                self.reads += nested.reads
                self.names |= nested.names

    def run(self, instructions: list[dis.Instruction]) -> None:
        arriving: dict[int, list[_Value]] = {}
        ended = False
        for instruction in instructions:
            if ended:
                self.stack = arriving.pop(instruction.offset, [])
            elif instruction.offset in arriving:
                self.stack = self.merged(arriving.pop(instruction.offset))
            if instruction.positions is not None and instruction.positions.lineno is not None:
                self.line = instruction.positions.lineno
            before = list(self.stack)
            if instruction.opname not in _IGNORED:
                self.step(instruction)
            if instruction.opcode in _JUMPS and instruction.argval > instruction.offset:
                depth = len(before) + dis.stack_effect(instruction.opcode, instruction.arg, jump=True)
                landing = (before + [_UNKNOWN] * (depth - len(before)))[: max(depth, 0)]
                there = arriving.get(instruction.argval)
                arriving[instruction.argval] = landing if there is None else self.merged(there, landing)
            ended = instruction.opname in _ENDS

    def merged(self, there: list[_Value], here: list[_Value] | None = None) -> list[_Value]:
        pairs = zip(reversed(there), reversed(self.stack if here is None else here), strict=False)
        return [a if a is b else self.settle(a, b) for a, b in pairs][::-1]

    def settle(self, *values: _Value, use: str = "value") -> _Value:
        """The values leave the scan's sight: record the use."""
        for value in values:
            for read in value.reads:
                read.uses.add(use)
            if value.callee and use == "value":
                value.callee.uses.add("result")
        return _UNKNOWN

    def pop(self) -> _Value:
        return self.stack.pop() if self.stack else _UNKNOWN

    def read(self, root: str, name: str = "", attributes: tuple[str, ...] = ()) -> _Value:
        self.reads.append(_Read(root, name, attributes, self.line))
        return _Value((self.reads[-1],), exact=True)

    def attribute(self, value: _Value, name: str) -> _Value:
        if value.exact:
            self.settle(value, use="none")
            (read,) = value.reads
            return self.read(read.root, read.name, (*read.attributes, name))
        return value if value.callee else self.settle(value)

    def variable(self, name: str) -> _Value:
        """A local or cell variable's value."""
        if name == self.this:
            return self.read("self", name)
        if name in self.free:
            return self.read("cell", name)
        alias = self.aliases.get(name)
        return self.read(alias.root, alias.name, alias.attributes) if alias else _Value(holds=self.held.get(name, ()))

    def store(self, value: _Value, name: str) -> None:
        """Into a local, which stands for the read from now on if nothing else is ever stored there."""
        is_alias = value.exact and self.stored.count(name) == 1 and name not in self.loaded | self.cells
        self.settle(value, use="none" if is_alias else "value")
        if is_alias:
            self.aliases[name] = value.reads[0]
        self.held[name] = self.held.get(name, ()) + value.calls

    def call(self, arguments: list[_Value]) -> None:
        above, below = self.pop(), self.pop()
        callee, extra = (above, _NULL) if below is _NULL else (below, above)
        if extra is not _NULL:
            arguments = [*arguments, extra]
        target = callee.reads[0] if callee.exact else callee.callee
        if target is None:
            self.settle(callee, *arguments)
            self.stack.append(_UNKNOWN)
            return
        if callee.exact:
            target.uses.add("call")
        target.of_locals |= _UNKNOWN in arguments
        for argument in arguments:
            for read in argument.reads:
                read.callees.append(target)
            if argument.callee:
                argument.callee.uses.add("result")
        is_super = callee.exact and (target.root, target.name, target.attributes) == ("global", "super", ()) and not arguments
        self.stack.append(self.read("super") if is_super else _Value(callee=target))

    def step(self, instruction: dis.Instruction) -> None:
        op, arg, stack = instruction.opname, instruction.arg or 0, self.stack
        name = instruction.argval
        if op in ("LOAD_GLOBAL", "LOAD_NAME"):
            value = self.read("global", name)
            nulls = [_NULL] if op == "LOAD_GLOBAL" and arg & 1 else []
            stack += [*nulls, value] if _NULL_FIRST else [value, *nulls]
        elif locals_ := _locals(instruction):
            for verb, local in locals_:
                if verb == "STORE":
                    self.store(self.pop(), local)
                else:
                    self.loaded.add(local)
                    stack.append(_UNKNOWN if local in self.cells else self.variable(local))
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            stack.append(self.variable(name))
        elif op in ("LOAD_FROM_DICT_OR_DEREF", "LOAD_FROM_DICT_OR_GLOBALS"):
            self.settle(self.pop())
            stack.append(self.variable(name) if op.endswith("DEREF") else self.read("global", name))
        elif op in ("LOAD_ATTR", "LOAD_METHOD"):
            stack.append(self.attribute(self.pop(), name))
            if op == "LOAD_METHOD" or (sys.version_info >= (3, 12) and arg & 1):
                stack.append(_NULL)
        elif op == "LOAD_SUPER_ATTR":
            has_arguments = bool(arg & 2)
            self.settle(self.pop(), self.pop(), self.pop(), use="value" if has_arguments else "none")
            stack.append(_UNKNOWN if has_arguments else self.read("super", attributes=(name,)))
            if arg & 1:
                stack.append(_NULL)
        elif op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            self.constants.append(name)
            stack.append(_UNKNOWN)
        elif op == "PUSH_NULL":
            stack.append(_NULL)
        elif op == "IMPORT_NAME":
            level, names = self.constants[-2:]
            self.settle(self.pop(), self.pop())
            stack.append(self.read("import", "." * level + (name if names else name.partition(".")[0])))
        elif op == "IMPORT_FROM":
            stack.append(self.attribute(stack[-1] if stack else _UNKNOWN, name))
        elif op in ("CALL", "CALL_KW", "CALL_FUNCTION_EX"):
            if op == "CALL_KW":
                self.settle(self.pop())
            count = arg if op != "CALL_FUNCTION_EX" else -1 - dis.stack_effect(instruction.opcode, instruction.arg)
            self.call([self.pop() for _ in range(count)])
        elif op == "POP_TOP":
            value = self.pop()
            self.settle(value, use="none" if value.exact or value.callee else "value")  # `table[key]` alone may still raise
        elif op == "RAISE_VARARGS":
            for value in [self.pop() for _ in range(arg)]:
                self.settle(value, use="none")
                if value.callee:
                    value.callee.uses.add("raised")
        elif op.startswith("POP_JUMP") and op.endswith("NONE"):
            value = self.pop()
            self.settle(value, use="test" if value.exact else "value")
        elif op == "COPY" and arg <= len(stack):
            stack.append(self.settle(stack[-arg]))
        elif op == "SWAP" and arg <= len(stack):
            stack[-1], stack[-arg] = stack[-arg], stack[-1]
        elif op in ("STORE_ATTR", "DELETE_ATTR"):
            self.settle(self.pop(), use="store")
            if op == "STORE_ATTR":
                self.settle(self.pop())
        elif op in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF"):
            if op.startswith("STORE"):
                self.settle(self.pop())
            if op.endswith("GLOBAL") or name in self.free:
                self.settle(self.read("global" if op.endswith("GLOBAL") else "cell", name), use="store")
        else:
            self.apply(instruction)

    def apply(self, instruction: dis.Instruction) -> None:
        """Any other instruction: the pops that its net effect implies, all of them used."""
        op = instruction.opname
        growth = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        pops = max(int(not op.startswith(_PUSHES_NOTHING)) - growth, int(not op.startswith(_PUSHES)))
        popped = [self.pop() for _ in range(pops)]
        if op in _COMPARISONS:
            for call in (call for value in popped for call in value.calls):
                call.is_compared = True
        if op.startswith(_COMBINES) and not any(value.callee for value in popped):
            self.stack.append(_Value(tuple(read for value in popped for read in value.reads)))
        else:
            self.settle(*popped)
            holds = tuple(call for value in popped for call in value.calls) if op == "BUILD_TUPLE" else ()
            self.stack += [_Value(holds=holds)] * (pops + growth)


def _locals(instruction: dis.Instruction) -> list[tuple[str, str]]:
    """The loads and stores of locals in an instruction, in order; since 3.13 there may be two."""
    if instruction.opname == "LOAD_FAST_AND_CLEAR":
        return []
    names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
    return list(zip(re.findall("(LOAD|STORE)_FAST", instruction.opname), names, strict=False))


@functools.lru_cache(maxsize=1024)
def _scan_code(code: types.CodeType, has_self: bool) -> _Scan:
    this = code.co_varnames[0] if has_self and code.co_argcount else None
    return _Scan(code, frozenset(code.co_freevars), this)


# --- Walk: reads to parts and guards -------------------------------------------------------------------------------------------

_IMPURE = "may return something else at the next call", "call it before and pass the result as an argument"
_MISSING: Any = object()  # a name or attribute that does not exist: an error at run time, or a branch not taken
_UNBOUND: Any = object()  # the ``this`` of a plain function

_IS = "{o}.{n} is {e}"
_IS_ITEM = "{o}[{n!r}] is {e}"
_IS_METHOD = "{o}.{n}.__func__ is {e}.__func__ and {o}.{n}.__self__ is {e}.__self__"
_IS_EQUAL = "is_equal({o}.{n}, {e})"


class _Same:
    """An object as a part of a key: equal to itself alone, and alive as long as the key."""

    __slots__ = ("target",)

    def __init__(self, target: object) -> None:
        self.target = target

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.target is self.target

    def __hash__(self) -> int:
        return id(self.target)

    def __repr__(self) -> str:
        return repr(self.target)


def _token(value: Any) -> tuple[Any, ...] | None:
    """A hashable stand-in for an immutable value, None for any other: 1, 1.0, True, 0.0 and -0.0 all differ, NaN equals itself."""
    kind = type(value)
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in _SCALARS or isinstance(value, np.dtype):
        return kind, value
    if kind in (tuple, torch.Size, frozenset):  # a frozenset in its order of iteration, which a trace can see
        tokens = tuple(_token(item) for item in value)
        return None if None in tokens else (kind, tokens)
    if kind in (range, slice):
        token = _token((value.start, value.stop, value.step))
        return token and (kind, token)
    if isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
        return kind, value.dtype.str, value.tobytes()
    return None


def _is_equal(value: object, expected: object) -> bool:
    return value is expected or ((token := _token(value)) is not None and token == _token(expected))


@functools.lru_cache(maxsize=1024)
def _is_within(module: object, packages: tuple[str, ...]) -> bool:
    return isinstance(module, str) and f"{module}.".startswith(tuple(f"{package}." for package in packages))


def _is_trusted(module: object) -> bool:
    return _is_within(module, _TRUSTED) and not _is_within(module, _STATEFUL_MODULES)


def _home(function: types.FunctionType) -> object:
    """The module whose code this is; ``__module__`` is the wrapped function's after ``functools.wraps``."""
    return function.__globals__.get("__name__")


def _is_quiet(value: object) -> bool:
    return value is print or getattr(value, "__module__", None) in _QUIET_MODULES


def _is_constant(value: object) -> bool:
    """Instances of the trusted packages that never change: ufuncs, operator packets, attrgetters, typing's forms, sentinels."""
    kind = type(value)
    is_fixed = callable(value) or hasattr(kind, "__get__") or kind.__module__ in ("dataclasses", "typing")
    return kind is object or kind in _CONSTANTS or (_is_trusted(kind.__module__) and is_fixed)


class _Walk:
    """Follows a callable's reads to their values.

    ``parts`` are the values in the order met; each says enough that equal parts mean an equal walk. ``guards`` map a test of
    one dictionary entry or attribute to its owner and the value found. ``run`` raises ``TraceError`` at the first read that is
    not allowed; the guards of all that led there are kept.
    """

    def __init__(self) -> None:
        self.parts: list[tuple[Any, ...]] = []
        self.guards: dict[tuple[str, int, str], tuple[object, Any]] = {}
        self.seen: dict[tuple[int, ...], tuple[int, tuple[object, ...]]] = {}
        self.names: set[str] = set()  # attribute names that the walked code mentions
        self.any_name = False  # ... or computes
        self.pending: dict[tuple[int, str], tuple[Any, str, str]] = {}
        self.defaults_are_arguments = True  # those of the outermost function

    def run(self, target: Callable[..., Any], name: str) -> None:
        self.value(target, name, {"call"}, "")
        while reached := [key for key in self.pending if self.any_name or key[1] in self.names]:
            for key in reached:
                owner, path, at = self.pending.pop(key)
                self.value(self.attribute(owner, key[1]), f"{path}.{key[1]}", {"value"}, at)

    def is_new(self, path: str, *identity: object) -> bool:
        """Whether this is the first visit; a later one refers to the first. Keeps the objects, so that their ids stay theirs."""
        index, _ = self.seen.setdefault(tuple(map(id, identity)), (len(self.parts), identity))
        self.parts.append((path, "visit", index))
        return index == len(self.parts) - 1

    def refuse(self, path: str, fault: str, remedy: str, at: str) -> NoReturn:
        raise TraceError(f"`{path}` {fault}: {remedy}{f' ({at})' if at else ''}")

    # The three ways to a value, each guarded.

    def item(self, container: dict[str, Any], key: str) -> Any:
        if key in container:
            return self.guards.setdefault((_IS_ITEM, id(container), key), (container, container[key]))[1]
        self.guards["{n!r} not in {o}", id(container), key] = (container, None)
        return _MISSING

    def attribute(self, owner: Any, name: str) -> Any:
        for test in (_IS, _IS_METHOD, _IS_EQUAL):
            if found := self.guards.get((test, id(owner), name)):
                return found[1]
        if isinstance(owner, torch.nn.Module) and not hasattr(type(owner), name):
            for namespace in (vars(owner), vars(owner).get("_modules", {})):
                if name in namespace:
                    return self.item(namespace, name)  # a guard 10 times faster than one through Module.__getattr__
        try:
            value, again = getattr(owner, name), getattr(owner, name)
        except Exception:  # a property may raise anything; the trace raises it where the user expects it
            self.guards["not hasattr({o}, {n!r})", id(owner), name] = (owner, None)
            return _MISSING
        if value is not again and isinstance(value, _C_FUNCTIONS):
            return value  # a method of a built-in type
        test = _IS if value is again else _IS_METHOD if isinstance(value, types.MethodType) else _IS_EQUAL
        self.guards[test, id(owner), name] = (owner, value)
        return value

    def size(self, container: Any) -> int:
        return cast("int", self.guards.setdefault(("len({o}) == {e}", id(container), ""), (container, len(container)))[1])

    def later(self, owner: Any, names: Iterable[str], path: str, at: str) -> None:
        """Attributes of an object that the function holds: each is read if the walked code mentions its name."""
        for name in names:
            if name.startswith("__") and name.endswith("__"):
                kinds = (types.FunctionType, classmethod, staticmethod, property)
                if name in _UNCALLED or not isinstance(inspect.getattr_static(owner, name, None), kinds):
                    continue
                self.names.add(name)
            if name.isidentifier() and not keyword.iskeyword(name):
                self.pending.setdefault((id(owner), name), (owner, path, at))

    # What a read may end in.

    def value(self, value: Any, path: str, uses: set[str], at: str) -> None:
        kind = type(value)
        self.any_name |= any(value is reader or kind is reader for reader in _DYNAMIC)
        if value is _MISSING:
            self.parts.append((path, "missing"))
        elif "store" in uses:
            self.refuse(path, "is assigned by the function, which would happen only when it is traced", "return the new value instead", at)
        elif uses == {"test"}:
            self.parts.append((path, value is None))
        elif uses <= {"test", "type"}:
            self.parts.append((path, _Same(value if isinstance(value, type | tuple | types.UnionType) else kind)))
        elif (token := _token(value)) is not None:
            self.parts.append((path, *token))
        elif isinstance(value, _SCRIPTED):
            self.refuse(path, "is compiled by torch.jit.script", "pass the plain Python function or module", at)
        elif isinstance(value, types.FunctionType):
            self.function(value, path, at)
        elif isinstance(value, types.MethodType):
            self.method(value, path, at)
        elif isinstance(value, _C_FUNCTIONS):
            self.c_function(value, path, at)
        elif isinstance(value, functools.partial):
            self.partial(value, path, at)
        elif isinstance(value, torch.nn.Module):
            self.module(value, path, uses, at)
        elif isinstance(value, type):
            self.class_(value, path, at)
        elif isinstance(value, types.ModuleType):
            if not _is_trusted(value.__name__):
                self.refuse(path, "is a module, used as a value", f"read its attributes directly, `{path}.name`", at)
            self.parts.append((path, _Same(value)))
        elif isinstance(value, property | functools.cached_property):
            self.value(value.fget if isinstance(value, property) else value.func, path, {"call"}, at)
        elif kind in (tuple, frozenset) or (isinstance(value, tuple) and hasattr(kind, "_fields")):
            self.parts.append((path, _Same(kind), len(value)))
            for index, item in enumerate(value):
                self.value(item, f"{path}[{index}]", {"value"}, at)
            self.class_(kind, path, at)
        elif isinstance(value, enum.Enum):
            self.parts.append((path, _Same(value)))
            self.later(value, ("value", *vars(value)), path, at)
            self.class_(kind, path, at)
        elif _is_constant(value):
            self.parts.append((path, _Same(value)))
            if hasattr(value, "__wrapped__"):  # a FusedFunction, functools.lru_cache
                self.value(self.attribute(value, "__wrapped__"), path, {"call"}, at)
        elif dataclasses.is_dataclass(value) and cast("Any", value).__dataclass_params__.frozen:
            self.class_(kind, path, at)
            for field in dataclasses.fields(value):
                self.value(self.attribute(value, field.name), f"{path}.{field.name}", {"value"}, at)
        elif uses <= {"call", "test", "type"} and callable(value):
            self.parts.append((path, _Same(kind)))
            call = self.attribute(kind, "__call__")
            if isinstance(call, types.FunctionType):
                self.function(call, path, at, value, path)
            else:
                self.value(call, path, {"call"}, at)
        else:
            self.refuse(
                path, f"is of type {kind.__name__}, whose contents may change while the compiled kernel stays", _remedy(value, path), at
            )

    def function(self, function: types.FunctionType, path: str, at: str, this: Any = _UNBOUND, this_path: str = "") -> None:
        if not self.is_new(path, function, this):
            return
        home = _home(function)
        if _is_within(home, _STATEFUL_MODULES) or function in _STATEFUL:
            self.refuse(path, *_IMPURE, at)
        is_trusted = _is_trusted(home)
        if is_trusted and not isinstance(this, torch.nn.Module):
            self.parts.append((path, _Same(function)))
            for cell in function.__closure__ or ():  # torch.compile, torch.vmap and the like hold the user's function
                if isinstance(inner := self.attribute(cell, "cell_contents"), types.FunctionType | types.MethodType | functools.partial):
                    self.value(inner, path, {"call"}, at)
            return
        code = function.__code__ if is_trusted else self.attribute(function, "__code__")
        self.parts.append((path, code))
        self.defaults(function, code, path, at)
        scan = _scan_code(code, this is not _UNBOUND)
        self.names |= scan.names
        found: dict[_Read, Any] = {}

        def find(read: _Read) -> Any:
            if read not in found:
                found[read] = self.resolve(read, function, this)
            return found[read]

        if this is not _UNBOUND and not code.co_argcount:
            self.value(this, this_path, {"value"}, at)  # it arrives in *args
        # of a class that is walked: its ``self``, of which it may ask the type, is none of the function's arguments
        is_of_class = this is _UNBOUND and code.co_varnames[: code.co_argcount][:1] in (("self",), ("cls",))
        for read in scan.reads:
            if read.of_locals and read.is_compared and not is_of_class and find(read) is type:
                here = f"{code.co_qualname}, {code.co_filename}:{read.line}" + (f", reached from {at}" if at else "")
                self.refuse("type", "is not that of a tensor or a number while the function is traced", "ask isinstance", here)
            uses = read.uses - {"none"}
            for callee in read.callees:
                target = find(callee)
                if "result" in callee.uses or not ("raised" in callee.uses or _is_quiet(target)):
                    uses.add("type" if any(target is test for test in _TYPE_TESTS) else "value")
            if uses == {"call"} and _is_quiet(find(read)):
                self.parts.append((read.name, "quiet"))
                continue
            uses -= {"result", "raised"}
            if uses or not (read.uses or read.callees):
                root = this_path if read.root == "self" else read.name or "super()"
                here = f"{code.co_qualname}, {code.co_filename}:{read.line}" + (f", reached from {at}" if at else "")
                self.value(find(read), ".".join((root, *read.attributes)), uses or {"value"}, here)

    def defaults(self, function: types.FunctionType, code: types.CodeType, path: str, at: str) -> None:
        """Values of parameters that a call leaves out. The outermost function's are its arguments: only immutable ones are keyed."""
        are_arguments, self.defaults_are_arguments = self.defaults_are_arguments, False
        positional: tuple[Any, ...] = (code.co_argcount and self.attribute(function, "__defaults__")) or ()
        keywords: dict[str, Any] = (code.co_kwonlyargcount and self.attribute(function, "__kwdefaults__")) or {}
        values = dict(zip(code.co_varnames[code.co_argcount - len(positional) :], positional, strict=False))
        values.update((name, self.item(keywords, name)) for name in keywords)
        for name, value in values.items():
            if not are_arguments:
                self.value(value, f"{path}({name}=...)", {"value"}, at)
            elif (token := _token(value)) is not None:
                self.parts.append((name, *token))

    def resolve(self, read: _Read, function: types.FunctionType, this: Any) -> Any:
        code = function.__code__
        closure = dict(zip(code.co_freevars, function.__closure__ or (), strict=False))
        if read.root == "global":
            value = self.item(function.__globals__, read.name)
            if value is _MISSING:
                value = self.item(cast(Any, function).__builtins__, read.name)
        elif read.root == "cell":
            value = self.attribute(closure[read.name], "cell_contents")
        elif read.root == "super":
            value = _MISSING
            with contextlib.suppress(KeyError, TypeError):  # no class around the function, or not one of its objects
                owner = self.attribute(closure["__class__"], "cell_contents")
                value = super(owner, owner if this is _UNBOUND else this)
        elif read.root == "import":
            package = function.__globals__.get("__package__") or ""
            name = importlib.util.resolve_name(read.name, package) if package else read.name
            value = self.item(cast("dict[str, Any]", sys.modules), name)
        else:
            value = this
        for name in read.attributes:
            if value is not _MISSING:
                value = self.attribute(value, name)
        return value

    def method(self, method: types.MethodType, path: str, at: str) -> None:
        function, this = method.__func__, method.__self__
        this_path = path.rpartition(".")[0] or f"{path}.__self__"
        while not isinstance(function, types.FunctionType) and _is_constant(function) and hasattr(function, "__wrapped__"):
            self.parts.append((path, _Same(function)))  # a fused or cached method
            function = self.attribute(function, "__wrapped__")
        if isinstance(function, types.FunctionType) and (isinstance(this, torch.nn.Module) or not _is_trusted(_home(function))):
            self.parts.append((path, _Same(type(this))))
            self.function(function, path, at, this, this_path)
        else:
            self.value(function, path, {"call"}, at)
            self.value(this, this_path, {"value"}, at)

    def c_function(self, function: Any, path: str, at: str) -> None:
        owner = getattr(function, "__objclass__", None) or getattr(function, "__self__", None)
        if isinstance(owner, type):
            home: str | None = owner.__module__
        elif owner is None or isinstance(owner, types.ModuleType):
            home = function.__module__
        else:
            self.parts.append((path, function.__name__))
            if _token(owner) is None and not isinstance(owner, torch.Tensor | np.ndarray | Iterable):
                self.refuse(path, *_IMPURE, at)
            return self.value(owner, path.rpartition(".")[0] or f"{path}.__self__", {"value"}, at)  # as constant as its object
        if function in _STATEFUL or not _is_trusted(home):
            self.refuse(path, *_IMPURE, at)
        self.parts.append((path, _Same(function)))

    def partial(self, partial: functools.partial[Any], path: str, at: str) -> None:
        self.value(self.attribute(partial, "func"), path, {"call"}, at)
        positional, keywords = self.attribute(partial, "args"), self.attribute(partial, "keywords")
        self.parts.append((path, len(positional), self.size(keywords)))
        for index, value in enumerate(positional):
            self.value(value, f"{path}.args[{index}]", {"value"}, at)
        for name in keywords:
            self.value(self.item(keywords, name), f"{path}({name}=...)", {"value"}, at)

    def module(self, module: torch.nn.Module, path: str, uses: set[str], at: str) -> None:
        """An nn.Module: what its ``forward`` reads; and, where the function may do more than call it, its whole state."""
        is_called = uses <= {"call", "test", "type"}
        if not self.is_new(path, module, is_called):
            return
        self.parts.append((path, _Same(type(module))))
        if self.size(module._forward_pre_hooks) + self.size(module._forward_hooks):
            self.refuse(path, "is an nn.Module with forward hooks", "remove them, or write what they do into the function", at)
        if not is_called:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                self.value(tensor, f"{path}.{name}", {"value"}, at)
            submodules = cast("dict[str, Any]", module._modules)
            self.parts.append((path, self.size(submodules)))
            for name in submodules:
                self.value(self.item(submodules, name), f"{path}.{name}", {"value"}, at)
            self.later(module, (name for name in vars(module) if not name.startswith("_")), path, at)
            self.later(module, (name for name in self.class_names(type(module)) if name != "__init__"), path, at)
        self.value(self.attribute(module, "forward"), f"{path}.forward", {"call"}, at)

    def class_(self, cls: type, path: str, at: str) -> None:
        """A class: what its methods read, as far as an instance made by the function may call them."""
        self.parts.append((path, _Same(cls)))
        if _is_within(cls.__module__, _STATEFUL_MODULES):
            self.refuse(path, *_IMPURE, at)
        if _is_trusted(cls.__module__) or not self.is_new(path, cls):
            return
        if issubclass(cls, torch.nn.Module):
            self.names.add("forward")
        if type(cls) is not type:
            self.class_(type(cls), path, at)
        for base in cls.__mro__:
            members = () if _is_within(base.__module__, _TRUSTED) else vars(base).values()
            if any(isinstance(member, _C_METHODS) and member.__objclass__ is base for member in members):
                self.refuse(
                    path, f"is a class of {base.__module__}, not written in Python", "pass what its object holds as an argument", at
                )
        self.later(cls, self.class_names(cls), path, at)

    def class_names(self, cls: type) -> Iterator[str]:
        return (name for base in cls.__mro__ if not _is_within(base.__module__, _TRUSTED) for name in vars(base))


_Guards = Mapping[tuple[str, int, str], tuple[object, Any]]


def _guard_of(guards: _Guards) -> Callable[[], bool]:
    """A function that evaluates the guards; it may raise where one no longer applies."""
    namespace: dict[str, Any] = {"is_equal": _is_equal}
    tests = []
    for index, ((test, _, name), (owner, expected)) in enumerate(guards.items()):
        tests.append(test.format(o=f"o{index}", n=name, e=f"e{index}"))
        namespace |= {f"o{index}": owner, f"e{index}": expected}
    return cast("Callable[[], bool]", eval(_compile_guard(" and ".join(tests) or "True"), namespace))


@functools.lru_cache(maxsize=1024)
def _compile_guard(tests: str) -> types.CodeType:
    """The text holds names alone, so that a walk that meets other values needs no compilation."""
    return compile(f"lambda: {tests}", "<wideload captures>", "eval")


def _remedy(value: object, path: str) -> str:
    if isinstance(value, torch.Tensor | np.ndarray):
        return "pass it as an argument"
    if isinstance(value, list | bytearray):
        return "pass it as an argument, or make it a tuple"
    if isinstance(value, set):
        return "pass it as an argument, or make it a frozenset"
    if isinstance(value, Mapping):
        return "take the entry out before, or pass it as an argument"
    return f"read its attributes directly, `{path}.name`, pass what it holds as an argument, or make it a frozen dataclass or a tuple"


# --- Captures -------------------------------------------------------------------------------------------------------------------


def _path(target: Callable[..., Any]) -> str:
    """What messages call the function itself: the object behind a method, a module or a callable object is ``self``."""
    if isinstance(target, types.MethodType):
        return f"self.{getattr(target, '__name__', '__call__')}"
    return getattr(target, "__name__", "partial" if isinstance(target, functools.partial) else "self")


class _State:
    """One combination of captured values. There is one such object for equal parts, so that it hashes and compares by identity."""

    __slots__ = ("__weakref__", "parts")

    def __init__(self, parts: tuple[tuple[Any, ...], ...]) -> None:
        self.parts = parts

    def __repr__(self) -> str:
        return f"_State{self.parts}"


_STATES: weakref.WeakValueDictionary[tuple[tuple[Any, ...], ...], _State] = weakref.WeakValueDictionary()
_STATES_LOCK = threading.Lock()


def _describe(part: object) -> str:
    """No address and no order of a set in it."""
    match part:
        case tuple():
            return f"({', '.join(map(_describe, part))})"
        case _Same(target=target):
            return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', type(target).__qualname__)}"
        case types.CodeType():
            constants = ", ".join(_describe(item) for item in part.co_consts)
            return f"{part.co_qualname} {part.co_code.hex()} ({constants}) {part.co_names} {part.co_varnames} {part.co_freevars}"
        case frozenset():
            return f"{{{', '.join(sorted(map(_describe, part)))}}}"
        case type():
            return part.__qualname__
    return repr(part)


class Captures:
    """What one callable reads from outside its arguments. Made by ``find_captures``; safe to use from several threads."""

    __slots__ = ("_name", "_snapshot", "_target")

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._name = _path(target)
        self._snapshot: tuple[Callable[[], bool], tuple[object, ...], str | None, _Guards] = (lambda: False, (), None, {})

    def read(self) -> tuple[object, ...]:
        """The captured values as they are now, as a hashable key: equal keys mean equal values, of equal types.

        The values may change while the function is traced: read again afterwards, and trace again if the key differs.
        """
        is_current, key, *_ = self._snapshot
        try:
            if is_current():
                return key
        except Exception:  # a guarded name or attribute is gone
            pass
        return self._walk()[1]

    def find_guards(self, key: tuple[object, ...]) -> tuple[Found, ...] | None:
        """What is found again as long as `read` gives ``key``; None where it gives another by now."""
        self.read()
        _, found, _, guards = self._snapshot
        if found != key:
            return None
        plain: list[Found] = []
        others: dict[tuple[str, int, str], tuple[object, Any]] = {}
        for (test, _, name), (owner, expected) in guards.items():
            if test == _IS and type(owner) is types.ModuleType and vars(owner).get(name) is expected:
                test, owner = _IS_ITEM, vars(owner)
            if test == (_IS_ITEM if type(owner) is dict else _IS):
                plain.append((owner, name, expected))
            else:
                others[test, id(owner), name] = owner, expected
        return (*plain, (_guard_of(others), None, True)) if others else tuple(plain)

    def check(self) -> None:
        """Raise ``TraceError`` if the function reads something whose value a key cannot follow; name it, its line and the remedy."""
        self.read()
        error = self._snapshot[2]
        if error is not None:
            raise TraceError(error)

    def describe(self) -> Iterator[str]:
        """The function's code and the captured values as they are now, in words that are the same in every process of one Python."""
        self.read()
        for state in self._snapshot[1]:
            yield from map(_describe, cast("_State", state).parts)

    def _walk(self) -> tuple[Callable[[], bool], tuple[object, ...], str | None, _Guards]:
        walk, error = _Walk(), None
        try:
            walk.run(self._target, self._name)
        except TraceError as refusal:
            error = str(refusal)
        parts = tuple(walk.parts)
        with _STATES_LOCK:
            state = _STATES.setdefault(parts, _State(parts))
        self._snapshot = _guard_of(walk.guards), (state,), error, walk.guards
        return self._snapshot


def find_captures(fn: Callable[..., Any]) -> Captures:
    """The values that ``fn`` reads from outside its arguments. Never raises; ``Captures.check`` does.

    >>> scale = functools.partial(torch.mul, other=2.0)
    >>> captures = find_captures(scale)
    >>> before = captures.read()
    >>> scale.keywords["other"] = 3.0
    >>> captures.read() == before
    False
    """
    return Captures(fn)


def unwrap_callable(fn: object) -> Callable[..., Any]:
    """The callable that a user means: a function, lambda, partial, method, callable object, nn.Module or builtin, as it is.

    A ``staticmethod`` object gives its function. ``TraceError`` for a ``torch.jit.script`` function, a bare ``classmethod``, a
    class, and anything that cannot be called.
    """
    if isinstance(fn, staticmethod):
        return unwrap_callable(fn.__func__)
    if isinstance(fn, classmethod):
        raise TraceError("got a classmethod object, which is not bound to a class: put @classmethod above @fuse, or fuse `Class.method`")
    if isinstance(fn, _SCRIPTED):
        raise TraceError(f"got a {type(fn).__name__}, compiled by torch.jit.script: pass the plain Python function or module")
    if isinstance(fn, type):
        raise TraceError(f"got the class {fn.__name__}: pass an instance of it, or a function")
    if not callable(fn):
        raise TraceError(f"got a {type(fn).__name__}: expected a function, a method, an nn.Module or a builtin such as torch.sigmoid")
    return fn
