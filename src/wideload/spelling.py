"""Turns what is typed on a command line into functions, operands and sizes: ``torch:add``, ``bf16[8192, n].t()``, ``n=2^10..2^20``.

Knows names, a grammar of views and random data, and evaluates no text as Python; it must not know what is done with the outcome.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib
import importlib.util
import itertools
import math
import operator
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import EllipsisType, MappingProxyType, ModuleType
from typing import Any, TypeVar

import torch

from wideload import ops
from wideload.cuda_source import read_cuda
from wideload.dtypes import DTYPES, dtype_name
from wideload.errors import DtypeError, LayoutError, WideloadError
from wideload.fused import FusedFunction
from wideload.measure import random_tensor
from wideload.raw_kernel import raw

__all__ = [
    "DEFAULT_OPERANDS",
    "default_operands",
    "evaluate_size",
    "evaluate_sizes",
    "find_function",
    "find_rival",
    "make_arguments",
    "sweep_sizes",
]

_Value = TypeVar("_Value")

# ---- functions


def find_function(text: str) -> Callable[..., Any]:
    """Return the callable that ``text`` names: ``module:function``, ``path/file.py:function``, or an op of ``wl.ops``.

    Behind the colon may stand a dotted name (``torch:nn.functional.silu``). Modules are looked for in the working directory too, and
    a file is run as ``python path/file.py`` would run it, under another ``__name__``. ``path/file.cu:kernel`` is a hand-written kernel.
    Raises ``WideloadError`` for what is not there, with what is.

    >>> find_function("torch.nn.functional:silu")(torch.zeros(1))
    tensor([0.])
    """
    place, _, name = text.rpartition(":")
    if not place:
        return _find_op(text)
    if place.endswith(".cu"):
        if not Path(place).is_file():
            raise WideloadError(f"there is no file {place}")
        return raw(read_cuda(Path(place).parent, Path(place).name), name)
    is_file = place.endswith(".py") or "/" in place
    found: Any = _load_file(Path(place)) if is_file else _import_module(place)
    parts = name.split(".")
    for position, part in enumerate(parts):
        if not hasattr(found, part):
            owner = f"{place}:{'.'.join(parts[:position])}" if position else place
            raise WideloadError(f"{owner} has no {part!r}. {_offer(part, _callables(found))}")
        found = getattr(found, part)
    if isinstance(found, type) or not callable(found):
        kind = "a class" if isinstance(found, type) else f"a {type(found).__name__}"
        raise WideloadError(f"{text} is {kind}; give a function, or an object that can be called.")
    return found  # type: ignore[no-any-return]


def find_rival(text: str, subject: Callable[..., Any]) -> Callable[..., Any]:
    """Return what ``subject`` is held against.

    ``eager`` is the plain function that a fused one wraps, ``compile`` the same by ``torch.compile``, for the shapes of one call;
    anything else is a function of its own.
    """
    plain = subject.__wrapped__ if isinstance(subject, FusedFunction) else subject
    if text == "compile":
        torch.compiler.reset()  # or the shapes of earlier calls make this one compile for any shape, or not at all
        return torch.compile(plain, dynamic=False)
    if text != "eager":
        return find_function(text)
    if plain is subject:
        raise WideloadError("eager is the plain function that a fused one wraps, and this function is not fused. Name another.")
    return plain


def _find_op(name: str) -> Callable[..., Any]:
    if name not in ops.__all__:
        module, _, function = name.rpartition(".")
        of_file = {"cu": f"{name}:KERNEL", "py": f"{name}:FUNCTION"}.get(function) if module else None
        example = of_file or (f"{module}:{function}" if module else "module:function or path/file.py:function")
        raise WideloadError(f"no op of wl.ops is called {name!r}. {_offer(name, ops.__all__)} Any other function is spelt {example}.")
    return getattr(ops, name)  # type: ignore[no-any-return]


def _import_module(name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise WideloadError(f"module {name} could not be imported: {_describe(error)}") from error
        parent, _, rest = name.rpartition(".")
        hint = f"If {rest} is no module, write {parent}:{rest}.<name>." if parent else "A file is spelt with its .py."
        raise WideloadError(f"no module is called {error.name!r}, neither installed nor in {Path.cwd()}. {hint}") from None
    except (Exception, SystemExit) as error:  # a module that is being written may raise anything
        raise WideloadError(f"module {name} could not be imported: {_describe(error)}") from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise WideloadError(f"there is no file {path}")
    return _load_resolved(path.resolve())


@functools.cache
def _load_resolved(path: Path) -> ModuleType:
    """Run a file once, however often it is named."""
    name = "file_" + re.sub(r"\W", "_", str(path))
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise WideloadError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    _look_in(path.parent)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a script may end with sys.exit(main())
        del sys.modules[name]
        raise WideloadError(f"{path} could not be run: {_describe(error)}") from error
    return module


def _look_in(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _describe(error: BaseException) -> str:
    """What was raised, and where: a ``SyntaxError`` says that itself."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = "" if isinstance(error, SyntaxError) else f" (at {frame.filename}:{frame.lineno})"
    return f"{type(error).__name__}: {error}{where}"


def _callables(owner: object) -> list[str]:
    return [name for name in dir(owner) if not name.startswith("_") and callable(getattr(owner, name, None))]


_MOST_OFFERED = 8


def _offer(name: str, known: Iterable[str]) -> str:
    """Say what was meant, or what there is."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    rest = f" and {len(names) - _MOST_OFFERED} more" if len(names) > _MOST_OFFERED else ""
    return f"There are: {', '.join(names[:_MOST_OFFERED])}{rest}." if names else "There is nothing to call."


# ---- operands

# Llama 3 8B: `hidden_size`, `intermediate_size` and `num_attention_heads` of its `config.json`.
DEFAULT_OPERANDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "add": ("bf16[tokens, 4096]", "bf16[tokens, 4096]"),
        "bias_dropout_add": ("bf16[tokens, 4096]", "bf16[4096]", "bf16[tokens, 4096]", "0.1"),
        "bias_gelu": ("bf16[tokens, 4096]", "bf16[4096]"),
        "bias_silu_mul": ("bf16[tokens, 14336]", "bf16[14336]", "bf16[tokens, 14336]"),
        "cast": ("f32[tokens, 4096]", "bf16"),
        "causal_mask": ("bf16[32, tokens, tokens]",),
        "clip": ("bf16[tokens, 4096]", "-1", "1"),
        "dequantize_fp8": ("e4m3fn[tokens, 4096]", "f32[tokens, 1]"),
        "dequantize_int8": ("i8[tokens, 4096]", "f32[tokens, 1]"),
        "ema_": ("f32[tokens, 4096]", "f32[tokens, 4096]", "0.999"),
        "geglu": ("bf16[tokens, 14336]", "bf16[tokens, 14336]"),
        "lerp": ("bf16[tokens, 4096]", "bf16[tokens, 4096]", "0.5"),
        "prefix_mask": ("bf16[32, tokens, tokens]", "256"),
        "quantize_fp8": ("bf16[tokens, 4096]", "f32[tokens, 1]"),
        "quantize_int8": ("bf16[tokens, 4096]", "f32[tokens, 1]"),
        "reglu": ("bf16[tokens, 14336]", "bf16[tokens, 14336]"),
        "residual_add_scale": ("bf16[tokens, 4096]", "bf16[tokens, 4096]", "bf16[4096]"),
        "rope": ("bf16[1, tokens, 32, 128]", "f32[tokens, 64]", "f32[tokens, 64]"),
        "sliding_window_mask": ("bf16[32, tokens, tokens]", "1024"),
        "swiglu": ("bf16[tokens, 14336]", "bf16[tokens, 14336]"),
        "swiglu_quantize_fp8": ("bf16[tokens, 14336]", "bf16[tokens, 14336]", "f32[tokens, 1]"),
        "unscale": ("f32[tokens, 4096]", "f32[]"),
        "unscale_": ("f32[tokens, 4096]", "f32[]"),
    }
)
"""What an op of ``wl.ops`` is called with where nothing is said; the size ``tokens`` is to be given."""


def default_operands(fn: Callable[..., Any]) -> tuple[str, ...]:
    """Return the operands of `DEFAULT_OPERANDS` for an op of ``wl.ops``, none for any other function."""
    return next((operands for name, operands in DEFAULT_OPERANDS.items() if getattr(ops, name) is fn), ())


def make_arguments(
    texts: Iterable[str], *, sizes: Mapping[str, int] = MappingProxyType({}), device: torch.device | str = "cpu", seed: int = 0
) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments that ``texts`` spell, with tensors of random values on ``device``.

    ========================================  =================================================================
    ``bf16[16384, 4096]``, ``f32[]``          a tensor; dtypes by wideload's names or torch's
    ``i8[2^20]``, ``i8[1Mi]``, ``f32[2*n]``   sizes by ``+ - * // ^``, by ``Ki Mi Gi`` and ``k M G``, by ``sizes``
    ``bf16[8192, 8192].t()``                  a view: any of `VIEWS`
    ``bf16[64, 128][:, 1:-1]``                a view by integers, slices, ``None`` and ``...``
    ``bf16[1024]@1``                          the same, one element further into its storage
    ``*bf16[64, 256].chunk(2, -1)``           several operands in one storage
    ``[f32[8], f32[9]]``, ``(1, 2)``          a list, a tuple
    ``0.5``, ``true``, ``none``, ``bf16``     a number, a bool, None, a dtype
    ``approximate=tanh``, ``lo=-1``           by keyword; there, a word that means nothing else is a string
    ========================================  =================================================================

    The seed of the first tensor is ``seed``, and each next one's is greater by 1. Raises ``WideloadError`` for text outside this
    grammar and for sizes that stand in no text, ``DtypeError`` for an unknown dtype, ``LayoutError`` for shapes and views that
    cannot be.

    >>> (x, lo), named = make_arguments(["bf16[64, n][:, 1:-1]", "-0.5", "approximate=tanh"], sizes={"n": 128})
    >>> x.shape, x.stride(), lo, named
    (torch.Size([64, 126]), (128, 1), -0.5, {'approximate': 'tanh'})
    """
    operands = [(text, *_parse_operand(text)) for text in texts]
    used = {node.id for *_, tree in operands for node in ast.walk(tree) if isinstance(node, ast.Name)}
    unused = [name for name in sizes if name not in used]
    if unused:
        raise WideloadError(f"the size {unused[0]!r} stands in none of the operands: {', '.join(text for text, *_ in operands) or 'none'}")
    maker = _Maker(sizes, torch.device(device), itertools.count(seed))
    args: list[Any] = []
    named: dict[str, Any] = {}
    for text, keyword, is_unpacked, tree in operands:
        value = _evaluate(text, maker.word_or_value if keyword else maker.value, tree)
        if is_unpacked and not isinstance(value, (tuple, list)):
            raise WideloadError(f"operand {text!r}: * stands before one tensor or number; allowed before several, such as a chunk's.")
        if keyword is None:
            args += value if is_unpacked else [value]
        elif keyword in named:
            raise WideloadError(f"operand {text!r}: {keyword} is given twice")
        else:
            named[keyword] = value
    return args, named


def evaluate_size(text: str, sizes: Mapping[str, int] = MappingProxyType({})) -> int:
    """Return the integer that ``text`` spells, with the names in ``sizes``.

    >>> evaluate_size("3 * n + 2^10", {"n": 2}), evaluate_size("64Ki")
    (1030, 65536)
    >>> evaluate_size("min(n // 256, 132)", {"n": 2**20})
    132
    """
    return _evaluate(text, _Maker(sizes, torch.device("cpu"), itertools.count()).size, _parse(text, text))


def evaluate_sizes(text: str, sizes: Mapping[str, int] = MappingProxyType({})) -> tuple[int, ...]:
    """Return the integers that ``text`` spells, with commas between.

    >>> evaluate_sizes("min(n, 132), 4", {"n": 200})
    (132, 4)
    """
    tree = _parse(text, text)
    maker = _Maker(sizes, torch.device("cpu"), itertools.count())
    return tuple(_evaluate(text, maker.size, node) for node in (tree.elts if isinstance(tree, ast.Tuple) else [tree]))


VIEWS = frozenset(
    "as_strided broadcast_to chunk diagonal expand movedim narrow permute select split squeeze swapaxes t tensor_split transpose unbind "
    "unflatten unfold unsqueeze view".split()
)
"""Tensor methods that never copy."""
_VIEW_ATTRIBUTES = frozenset({"T", "mT", "imag", "real"})

_DTYPES = {dtype_name(dtype): dtype for dtype in DTYPES} | {
    name: dtype for name, dtype in vars(torch).items() if isinstance(dtype, torch.dtype) and dtype in DTYPES
}
"""By wideload's names and torch's: every dtype that random values can be drawn in."""
_WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}

_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
_LARGEST_EXPONENT = 63
"""No size is larger than 2^63, and a larger power would only take time."""

_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
_NOT_PYTHON = re.compile(
    r"""(?P<quoted>'[^']*'|"[^"]*")|(?P<power>\^)|(?P<no_dims>(?<=\w)\[\s*\])|(?<![\w.])(?P<number>\d+)(?P<unit>[KMG]i|[kMG])\b"""
)


def _as_python(text: str) -> str:
    """Spell what Python's grammar does not have as something that it has."""

    def replace(match: re.Match[str]) -> str:
        if match["number"]:
            return str(int(match["number"]) * _UNITS[match["unit"]])
        return match["quoted"] or ("**" if match["power"] else "[()]")

    return _NOT_PYTHON.sub(replace, text.strip())


def _parse(text: str, whole: str) -> ast.expr:
    try:
        return ast.parse(_as_python(text), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise WideloadError(f"operand {whole!r} cannot be read; {_EXAMPLES}") from error


_EXAMPLES = "operands are spelt such as bf16[1024, 4096], f32[4096].t(), i8[2^20]@1, bf16[64, 128][:, 1:-1], 0.5, none, approximate=tanh"


def _parse_operand(text: str) -> tuple[str | None, bool, ast.expr]:
    """The keyword, whether ``*`` unpacks it, and the tree of the value."""
    keyword = re.match(r"\s*([A-Za-z_]\w*)\s*=(?!=)", text)
    value = text[keyword.end() :] if keyword else text
    is_unpacked = keyword is None and value.lstrip().startswith("*")
    return keyword and keyword[1], is_unpacked, _parse(value.lstrip()[1:] if is_unpacked else value, text)


def _evaluate(text: str, evaluate: Callable[[ast.expr], _Value], tree: ast.expr) -> _Value:
    """Return the value; what is raised names the operand."""
    try:
        return evaluate(tree)
    except WideloadError as error:
        raise type(error)(f"operand {text!r}: {error}") from None
    except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, RecursionError) as error:
        raise LayoutError(f"operand {text!r}: {(str(error) or type(error).__name__).splitlines()[0]}") from error


class _Maker:
    """Evaluates the trees of a call's operands."""

    def __init__(self, sizes: Mapping[str, int], device: torch.device, seeds: Iterator[int]) -> None:
        self._sizes, self._device, self._seeds = sizes, device, seeds

    def word_or_value(self, node: ast.expr) -> Any:
        """The value, or the word itself where it means nothing."""
        return node.id if isinstance(node, ast.Name) and not self._is_known(node.id) else self.value(node)

    def value(self, node: ast.AST, offset: int = 0) -> Any:
        """Evaluate one node; the storages of its tensors begin ``offset`` elements before them."""
        match node:
            case ast.Constant(value=bool() | int() | float() | complex() | str() | None as constant):
                return constant
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=inner):
                number = self._number(inner)
                return -number if isinstance(sign, ast.USub) else number
            case ast.BinOp(op=ast.MatMult(), left=left, right=right):
                return self._viewed(left, "@", offset + self.size(right))
            case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATORS:
                return self._combine(op, self._number(left), self._number(right))
            case ast.Call(func=ast.Name(id="min" | "max" as name), args=[_, *_] as args, keywords=[]):
                return (min if name == "min" else max)(map(self._number, args))
            case ast.List(elts=items):
                return [self.value(item, offset) for item in items]
            case ast.Tuple(elts=items):
                return tuple(self.value(item, offset) for item in items)
            case ast.Name(id=word):
                return self._word(word)
            case ast.Subscript(value=ast.Name(id=dtype), slice=shape):
                return self._tensor(dtype, shape, offset)
            case ast.Subscript(value=inner, slice=index):
                return self._index(self.value(inner, offset), index)
            case ast.Call(func=ast.Attribute(value=inner, attr=name), args=args, keywords=keywords) if name in VIEWS:
                options = {str(keyword.arg): self.value(keyword.value) for keyword in keywords}
                return getattr(self._viewed(inner, f".{name}", offset), name)(*map(self.value, args), **options)
            case ast.Attribute(value=inner, attr=name) if name in _VIEW_ATTRIBUTES:
                return getattr(self._viewed(inner, f".{name}", offset), name)
            case ast.Call(func=ast.Attribute(attr=name)):
                raise LayoutError(f".{name}() is not allowed; views are: {', '.join(sorted(VIEWS))}")
            case ast.Attribute(attr=name):
                raise LayoutError(f".{name} is not allowed; write .{name}() for a view")
        raise WideloadError(f"{ast.unparse(node)!r} means nothing; {_EXAMPLES}")

    def size(self, node: ast.AST) -> int:
        """Evaluate what must be an integer that is not negative."""
        number = self.value(node)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise LayoutError(f"{ast.unparse(node)} is {number!r}; sizes and offsets are integers from 0 on")
        return number

    def _number(self, node: ast.AST) -> Any:
        number = self.value(node)
        if not isinstance(number, (int, float, complex)):
            raise WideloadError(f"{ast.unparse(node)} is no number; arithmetic is for sizes and numbers alone")
        return number

    def _combine(self, op: ast.operator, left: Any, right: Any) -> Any:
        if isinstance(op, ast.Pow) and abs(right) > _LARGEST_EXPONENT:
            raise LayoutError(f"the exponent is {right}; allowed are up to {_LARGEST_EXPONENT}")
        return _OPERATORS[type(op)](left, right)

    def _is_known(self, word: str) -> bool:
        return word in self._sizes or word in _WORDS or word in _DTYPES

    def _word(self, word: str) -> Any:
        if not self._is_known(word):
            raise WideloadError(f"{word!r} is no dtype, and no size is given to it, as by --sweep {word}=1024. Quote a string.")
        return self._sizes[word] if word in self._sizes else {**_WORDS, **_DTYPES}[word]

    def _tensor(self, name: str, shape_node: ast.expr, offset: int) -> torch.Tensor:
        if name not in _DTYPES:
            raise DtypeError(f"{name!r} is no dtype. {_offer(name, _DTYPES)}")
        dtype = _DTYPES[name]
        dims = shape_node.elts if isinstance(shape_node, ast.Tuple) else [shape_node]
        shape = tuple(map(self.size, dims))
        seed = next(self._seeds)
        if self._device.type == "meta":
            return torch.empty(offset + math.prod(shape), dtype=dtype, device="meta")[offset:].view(shape)
        return random_tensor(shape, dtype, device=self._device, offset=offset, seed=seed)

    def _viewed(self, node: ast.expr, suffix: str, offset: int) -> torch.Tensor:
        tensor = self.value(node, offset)
        if not isinstance(tensor, torch.Tensor):
            raise LayoutError(f"{suffix} stands behind {ast.unparse(node)}, which is no tensor")
        return tensor

    def _index(self, value: Any, node: ast.expr) -> Any:
        index = self._index_item(node)
        if not isinstance(value, torch.Tensor) and not (isinstance(value, (tuple, list)) and isinstance(index, int)):
            raise LayoutError(f"[{ast.unparse(node)}] stands behind what is no tensor")
        return value[index]

    def _index_item(self, node: ast.expr) -> Any:
        match node:
            case ast.Tuple(elts=items):
                return tuple(map(self._index_item, items))
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(bound and self._index_item(bound) for bound in (lower, upper, step)))
            case ast.Constant(value=EllipsisType()):
                return ...
        item = self.value(node)
        if item is not None and (not isinstance(item, int) or isinstance(item, bool)):
            raise LayoutError(f"{ast.unparse(node)} is no index; allowed are integers, slices, None and ..., which copy nothing")
        return item


# ---- sweeps

_RANGE = re.compile(r"(?P<first>.+?)\.\.(?P<last>.+?)(?:x(?P<factor>\d+))?")


def sweep_sizes(texts: Sequence[str]) -> tuple[dict[str, int], ...]:
    """Return every combination of the sizes that ``texts`` give to names, the last name's changing fastest.

    ``n=2^10..2^28`` doubles from the first to the last, ``n=1..1000x10`` multiplies by 10, ``n=1000,4096`` lists. Raises ``WideloadError``.

    >>> sweep_sizes(["n=1Ki..4Ki", "m=5,7"])[:3]
    ({'n': 1024, 'm': 5}, {'n': 1024, 'm': 7}, {'n': 2048, 'm': 5})
    """
    swept: dict[str, list[int]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals or not name.isidentifier() or name in swept:
            raise WideloadError(f"the sweep {text!r} cannot be read; it is spelt n=2^10..2^28, n=1..1000x10 or n=1000,4096, each name once")
        swept[name] = list(dict.fromkeys(size for item in values.split(",") for size in _range(item, text)))
    return tuple(dict(zip(swept, combination, strict=True)) for combination in itertools.product(*swept.values()))


def _range(item: str, text: str) -> Iterator[int]:
    ends = _RANGE.fullmatch(item.strip())
    if not ends:
        yield evaluate_size(item)
        return
    size, last, factor = evaluate_size(ends["first"]), evaluate_size(ends["last"]), int(ends["factor"] or 2)
    if not 0 < size <= last or factor < 2:
        raise WideloadError(f"the sweep {text!r} is empty or has no end: it must rise from at least 1, by a factor of at least 2")
    while size <= last:
        yield size
        size *= factor
