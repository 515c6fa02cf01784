"""Text that becomes functions, operands and sizes, held to what torch gives for the same written in Python; and text that is refused."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import wideload as wl
from wideload import ops, spelling
from wideload.errors import DtypeError, LayoutError, WideloadError
from wideload.measure import random_tensor
from wideload.spelling import default_operands, evaluate_size, evaluate_sizes, find_function, find_rival, make_arguments, sweep_sizes


@pytest.fixture(autouse=True)
def _import_paths_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


def operand(text: str, **sizes: int) -> Any:
    """The one positional operand that ``text`` spells."""
    (value,), named = make_arguments([text], sizes=sizes)
    assert named == {}
    return value


# ---- functions


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("swiglu", ops.swiglu),
        ("wideload.ops:swiglu", ops.swiglu),
        ("torch:add", torch.add),
        ("torch.nn.functional:silu", torch.nn.functional.silu),
        ("torch:nn.functional.silu", torch.nn.functional.silu),
        ("torch:Tensor.mul", torch.Tensor.mul),
    ],
)
def test_functions_are_found(text: str, found: Any) -> None:
    assert find_function(text) is found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("swigul", "no op of wl.ops is called 'swigul'. Did you mean 'swiglu'?"),
        ("conv", "There are: add, "),
        ("torch.add", "spelt torch:add"),
        ("torhc:add", "no module is called 'torhc'"),
        ("torch.Tensor:mul", "write torch:Tensor.<name>"),
        ("torch:nn.functional.silo", "torch:nn.functional has no 'silo'. Did you mean 'silu'?"),
        ("torch:nn.SiLU", "torch:nn.SiLU is a class; give a function"),
        ("torch:pi", "torch:pi is a float"),
        ("torch:", "torch has no ''"),
        (":f", "no op of wl.ops is called ':f'"),
        ("no/such.py:f", "there is no file no/such.py"),
        ("no_such.py:f", "there is no file no_such.py"),
    ],
)
def test_what_is_not_there_is_said(text: str, said: str) -> None:
    with pytest.raises(WideloadError) as raised:
        find_function(text)
    assert said in str(raised.value)


def test_a_file_is_run_once_and_sees_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "spelt_neighbour.py").write_text("FACTOR = 3\n")
    path = tmp_path / "my-functions.py"
    path.write_text(
        "import torch, wideload as wl\nfrom spelt_neighbour import FACTOR\n"
        "@wl.fuse\ndef triple(x):\n    return x * FACTOR\n\n"
        "class Holder:\n    def double(self, x):\n        return x * 2\nholder = Holder()\n"
        "if __name__ == '__main__':\n    raise SystemExit\n"
    )
    triple = find_function(f"{path}:triple")
    assert isinstance(triple, wl.FusedFunction)
    assert triple(torch.ones(2)).tolist() == [3.0, 3.0]
    assert find_function(f"{path}:triple") is triple
    assert find_function(f"{path}:holder.double")(torch.ones(1)).tolist() == [2.0]
    with pytest.raises(WideloadError, match=r"has no 'tripel'. Did you mean 'triple'\?"):
        find_function(f"{path}:tripel")


def test_a_module_of_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spelt_local.py").write_text("def same(x):\n    return x\n")
    monkeypatch.chdir(tmp_path)
    assert find_function("spelt_local:same")(7) == 7


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("x = 1 / 0\n", "ZeroDivisionError: division by zero (at {path}:1)"),
        ("def f(:\n", "line 1"),
        ("import spelt_nowhere\n", "No module named"),
    ],
)
def test_a_module_that_raises_says_where(code: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"spelt_broken_{len(code)}.py"
    path.write_text(code)
    for text in (f"{path}:f", f"{path.stem}:f"):
        with pytest.raises(WideloadError) as raised:
            find_function(text)
        assert "could not be" in str(raised.value)
        assert said.format(path=path) in str(raised.value)


def test_rivals() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert find_rival("eager", wl.fuse(plain)) is plain
    assert find_rival("torch:relu", wl.fuse(plain)) is torch.relu
    with pytest.raises(WideloadError, match="not fused"):
        find_rival("eager", plain)


@pytest.mark.parametrize("fused", [True, False])
def test_compile_is_of_the_plain_function_and_of_one_shape(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: asked.append((fn, options)) or torch.neg)
    monkeypatch.setattr(torch.compiler, "reset", lambda: asked.append("reset"))

    def plain(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    assert find_rival("compile", wl.fuse(plain) if fused else plain) is torch.neg
    assert asked == ["reset", (plain, {"dynamic": False})]


# ---- operands


@pytest.mark.parametrize(
    ("text", "dtype", "shape"),
    [
        ("bf16[16,40]", torch.bfloat16, (16, 40)),
        ("bfloat16[16, 40]", torch.bfloat16, (16, 40)),
        ("half[3]", torch.float16, (3,)),
        ("f32[7]", torch.float32, (7,)),
        ("f64[]", torch.float64, ()),
        ("f32[ ]", torch.float32, ()),
        ("f32[0,3]", torch.float32, (0, 3)),
        ("i8[2^10]", torch.int8, (1024,)),
        ("i64[2^3*3]", torch.int64, (24,)),  # as in mathematics: powers first
        ("u8[2Ki]", torch.uint8, (2048,)),
        ("u8[2k]", torch.uint8, (2000,)),
        ("bool[n, 2*n+1, n//2, n-1]", torch.bool, (4, 9, 2, 3)),
        ("uint16[2]", torch.uint16, (2,)),
        ("complex64[2]", torch.complex64, (2,)),
        ("float8_e4m3fn[2]", torch.float8_e4m3fn, (2,)),
    ],
)
def test_dense_tensors(text: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = operand(text, **({"n": 4} if "n]" in text or "n," in text else {}))
    assert (tensor.dtype, tuple(tensor.shape), tensor.storage_offset()) == (dtype, shape, 0)
    assert tensor.is_contiguous()
    assert tensor.flatten().view(torch.uint8).tolist() == random_tensor(shape, dtype).flatten().view(torch.uint8).tolist()


VIEWS = {
    "f32[8,6].t()": lambda x: x.t(),
    "f32[8,6].T": lambda x: x.T,
    "f32[64,128][:, 1:-1]": lambda x: x[:, 1:-1],
    "f32[64,128][::2, 3]": lambda x: x[::2, 3],
    "f32[2,3,4][..., None, -1]": lambda x: x[..., None, -1],
    "f32[2,3,4].permute(0,2,1)": lambda x: x.permute(0, 2, 1),
    "f32[2,3,4].mT": lambda x: x.mT,
    "f32[1,5].expand(4,5)": lambda x: x.expand(4, 5),
    "f32[1,5].expand(4,-1)": lambda x: x.expand(4, -1),
    "f32[6,10].chunk(2,-1)[1]": lambda x: x.chunk(2, -1)[1],
    "f32[6,10].chunk(2, dim=-1)[0].t()[1:]": lambda x: x.chunk(2, dim=-1)[0].t()[1:],
    "f32[20].unfold(0, 3, 1)": lambda x: x.unfold(0, 3, 1),
    "f32[20].as_strided((4, 5), (1, 3))": lambda x: x.as_strided((4, 5), (1, 3)),
    "f32[2,6].unflatten(1, [2, 3]).transpose(0, 1)": lambda x: x.unflatten(1, [2, 3]).transpose(0, 1),
    "f32[4].view(i32)": lambda x: x.view(torch.int32),
}


@pytest.mark.parametrize("text", VIEWS)
def test_views_are_those_of_torch(text: str) -> None:
    base = random_tensor([int(size) for size in text[text.index("[") + 1 : text.index("]")].split(",")])
    want, got = VIEWS[text](base), operand(text)
    assert (got.shape, got.stride(), got.storage_offset()) == (want.shape, want.stride(), want.storage_offset())
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("text", "shape", "strides", "offset"),
    [
        ("bf16[1024]@1", (1024,), (1,), 1),
        ("(bf16[4,6]@1).t()", (6, 4), (1, 6), 1),
        ("bf16[4,6].t()@1", (6, 4), (1, 6), 1),
        ("bf16[4,6][:, 1:-1] @ 2^4", (4, 4), (6, 1), 17),
        ("bf16[]@1@2", (), (), 3),
    ],
)
def test_offsets_count_elements(text: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> None:
    tensor = operand(text)
    assert (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()) == (shape, strides, offset)


def test_unpacked_chunks_share_their_storage() -> None:
    (gate, up, bias), _ = make_arguments(["*bf16[4,16].chunk(2,-1)", "bf16[8]"])
    assert gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr() != bias.untyped_storage().data_ptr()
    assert [tensor.storage_offset() for tensor in (gate, up)] == [0, 8]


def test_tensors_differ_and_a_seed_gives_them_again() -> None:
    texts = ["f32[64]", "[f32[64], f32[64]]"]
    (a, (b, c)), _ = make_arguments(texts)
    assert not torch.equal(a, b)
    assert not torch.equal(b, c)
    (other, _), _ = make_arguments(texts, seed=1)
    assert torch.equal(other, b)  # seed 1 is that of the second tensor
    (again, _), _ = make_arguments(texts)
    assert torch.equal(again, a)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.5", 0.5),
        ("-3", -3),
        ("1e-3", 1e-3),
        ("1/4", 0.25),
        ("-inf", -math.inf),
        ("true", True),
        ("False", False),
        ("none", None),
        ("2^20", 2**20),
        ("f16", torch.float16),
        ("'2k^'", "2k^"),
        ("(1, 2)", (1, 2)),
        ("[]", []),
        ("2j", 2j),
    ],
)
def test_other_values(text: str, value: Any) -> None:
    got = operand(text)
    assert (got, type(got)) == (value, type(value))


def test_nan_is_a_number() -> None:
    assert math.isnan(operand("nan"))


def test_keywords() -> None:
    args, named = make_arguments(
        ["f32[2]", "approximate=tanh", "lo = -1", "dtype=bf16", "bias=f32[3].expand(2,3)", "to=none", "size=n"], sizes={"n": 5}
    )
    assert len(args) == 1
    assert named.pop("bias").shape == (2, 3)
    assert named == {"approximate": "tanh", "lo": -1, "dtype": torch.bfloat16, "to": None, "size": 5}


def test_meta_tensors_have_the_same_layout() -> None:
    (tensor,), _ = make_arguments(["bf16[4,6].t()[1:]@1"], device="meta")
    real = operand("bf16[4,6].t()[1:]@1")
    assert tensor.is_meta
    assert (tensor.shape, tensor.stride(), tensor.storage_offset()) == (real.shape, real.stride(), real.storage_offset())


@pytest.mark.parametrize(
    ("text", "error", "said"),
    [
        ("bf61[4]", DtypeError, "'bf61' is no dtype. Did you mean 'bf16'?"),
        ("qint8[4]", DtypeError, "no dtype"),
        ("f32[-1]", LayoutError, "-1 is -1; sizes and offsets are integers from 0 on"),
        ("f32[1.5]", LayoutError, "1.5 is 1.5"),
        ("f32[true]", LayoutError, "true is True"),
        ("f32[2^-1]", LayoutError, "0.5"),
        ("f32[2^64]", LayoutError, "exponent"),
        ("f32[n]", WideloadError, "'n' is no dtype, and no size is given to it, as by --sweep n=1024"),
        ("f32[4]@-1", LayoutError, "from 0 on"),
        ("3@1", LayoutError, "@ stands behind 3, which is no tensor"),
        ("f32[4][5]", LayoutError, "index 5 is out of bounds"),
        ("f32[4][[0, 1]]", LayoutError, "copy nothing"),
        ("f32[4][true]", LayoutError, "copy nothing"),
        ("f32[4,5].expand(3,5)", LayoutError, "expanded size"),
        ("f32[4].t", LayoutError, "write .t() for a view"),
        ("f32[4].abs()", LayoutError, ".abs() is not allowed; views are: as_strided, "),
        ("f32[4].resize_(8)", LayoutError, "not allowed"),
        ("f32[2,4].t().view(8)", LayoutError, "view size is not compatible"),
        ("f32[4].view(*(2, 2))", WideloadError, "means nothing"),
        ("f32[4].view(**none)", LayoutError, None),
        ("(1, 2).t()", LayoutError, "which is no tensor"),
        ("2[0]", LayoutError, "no tensor"),
        ("f32[4] + f32[4]", WideloadError, "no number"),
        ("*f32[4]", WideloadError, "stands before one tensor"),
        ("tanh", WideloadError, "Quote a string"),
        ("bf16[4", WideloadError, "cannot be read"),
        ("1.5k", WideloadError, "cannot be read"),
        ("", WideloadError, "cannot be read"),
        ("x=", WideloadError, "cannot be read"),
        ("1/0", LayoutError, "division by zero"),
        ("__import__('os').system('true')", LayoutError, "not allowed"),
        ("f32[4].__class__", LayoutError, "not allowed"),
        ("(lambda: 1)()", WideloadError, "means nothing"),
        ("[x for x in (1, 2)]", WideloadError, "means nothing"),
        ("(" * 10_000 + "1" + ")" * 10_000, WideloadError, "cannot be read"),
    ],
)
def test_what_is_refused(text: str, error: type[WideloadError], said: str | None) -> None:
    with pytest.raises(WideloadError) as raised:
        make_arguments([text])
    assert type(raised.value) is error
    assert str(raised.value).startswith(f"operand {text!r}")
    assert (said or "") in str(raised.value)


def test_a_size_that_stands_nowhere_is_refused() -> None:
    with pytest.raises(WideloadError, match="'m' stands in none of the operands: f32"):
        make_arguments(["f32[n]"], sizes={"n": 2, "m": 3})
    with pytest.raises(WideloadError, match="given twice"):
        make_arguments(["lo=1", "lo=2"])


# ---- the ops' own operands


@pytest.mark.parametrize("name", ops.__all__)
def test_every_op_has_operands_that_fit(name: str) -> None:
    op = getattr(ops, name)
    args, named = make_arguments(default_operands(op), sizes={"tokens": 2}, device="cpu")
    assert args
    plain = op.__wrapped__
    if name == "bias_dropout_add":  # the masks of two calls differ
        named["training"] = False
    elif name.endswith("_mask"):  # coordinates have no eager form; the window, and the prefix, are wider than two tokens

        def plain(scores: torch.Tensor, *_: int) -> torch.Tensor:
            masked = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) == 1, -math.inf)
            return scores if name == "prefix_mask" else masked

    if name == "unscale_":  # comes back with what it found alone

        def plain(*given: torch.Tensor) -> torch.Tensor:
            return op.__wrapped__(*given)[1]

    result, want = op(*args, **named), plain(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args), **named)
    for got, due in zip(*(found if isinstance(found, tuple) else (found,) for found in (result, want)), strict=True):
        torch.testing.assert_close(got.double(), due.double(), rtol=2**-8, atol=2**-8)


def test_other_functions_have_none() -> None:
    assert default_operands(torch.add) == ()
    assert set(spelling.DEFAULT_OPERANDS) == set(ops.__all__)


# ---- sizes


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("n=2^10..2^13", [1024, 2048, 4096, 8192]),
        ("n=3..13", [3, 6, 12]),
        ("n=1..1000x10", [1, 10, 100, 1000]),
        ("n = 1k, 4Ki, 7..14, 7", [1000, 4096, 7, 14]),
        ("n=5..5", [5]),
    ],
)
def test_sweeps(text: str, sizes: list[int]) -> None:
    assert sweep_sizes([text]) == tuple({"n": size} for size in sizes)


def test_sweeps_combine() -> None:
    assert sweep_sizes([]) == ({},)
    combined: Iterator[tuple[int, ...]] = (tuple(sizes.values()) for sizes in sweep_sizes(["n=1..2", "m=7,9"]))
    assert list(combined) == [(1, 7), (1, 9), (2, 7), (2, 9)]


@pytest.mark.parametrize("text", ["n", "=3", "2n=3", "n=", "n=8..4", "n=0..4", "n=1..8x1", "n=a..b", "n=1..", "n=-1", "n=f32[2]"])
def test_sweeps_that_are_refused(text: str) -> None:
    with pytest.raises(WideloadError):
        sweep_sizes([text])


def test_a_name_is_swept_once() -> None:
    with pytest.raises(WideloadError, match="each name once"):
        sweep_sizes(["n=1", "n=2"])


def test_sizes_are_arithmetic() -> None:
    assert evaluate_size("2*3*n^2 + 1Mi", {"n": 5}) == 150 + 2**20
    assert evaluate_size("max(2, min(n, 3), n // 2)", {"n": 9}) == 4
    assert evaluate_sizes("min(n, 3), (n + 1) * 2", {"n": 9}) == (3, 20)
    assert evaluate_sizes("7") == (7,)
    for text in ("min()", "abs(3)", "min(3, key=4)", "min(f32, 3)"):
        with pytest.raises(WideloadError):
            evaluate_size(text)
    with pytest.raises(WideloadError, match="'m' is no dtype"):
        evaluate_size("m", {"n": 5})


@pytest.mark.parametrize(
    ("text", "spelt"),
    [("my.cu", "my.cu:KERNEL"), ("in/my.py", "in/my.py:FUNCTION"), ("torch.add", "torch:add"), ("py", "module:function or")],
)
def test_a_file_without_a_name_is_told_how_it_is_spelt(text: str, spelt: str) -> None:
    with pytest.raises(WideloadError, match=re.escape(f"Any other function is spelt {spelt}")):
        find_function(text)
