"""The rows of the table against values that are known: results, dtypes, and the words that kernels combine, bit by bit."""

from __future__ import annotations

import math
import struct

import pytest
import torch

import wideload as wl
from wideload.reductions import REDUCTIONS

f16, bf16, f32, f64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
NAN, INF = math.nan, math.inf

VALUES = [
    # elements, amax, any_nonfinite
    ([], 0.0, 0.0),
    ([0.0], 0.0, 0.0),
    ([-0.0], 0.0, 0.0),
    ([1.5, -2.5, 2.0], 2.5, 0.0),
    ([-INF, 3.0], INF, 1.0),
    ([INF, NAN], NAN, 1.0),
    ([NAN, 1.0], NAN, 1.0),
    ([-NAN], NAN, 1.0),
]


@pytest.mark.parametrize("dtype", [f16, bf16, f32, f64], ids=str)
@pytest.mark.parametrize(("elements", "largest", "is_nonfinite"), VALUES, ids=str)
def test_results_are_those_worked_out_by_hand(elements: list[float], largest: float, is_nonfinite: float, dtype: torch.dtype) -> None:
    x = torch.tensor(elements, dtype=dtype)
    for got, want, of in ((wl.amax(x), largest, f64 if dtype == f64 else f32), (wl.any_nonfinite(x), is_nonfinite, f32)):
        assert (got.dtype, got.shape) == (of, ())
        assert got.item() == want or (math.isnan(want) and math.isnan(got.item()))
        assert not torch.signbit(got) or math.isnan(want)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_what_has_no_floating_point_elements_is_refused_and_the_way_out_named(name: str) -> None:
    reduction = getattr(wl, name)
    for dtype, way_out in (
        *((dtype, r"\.float\(\)") for dtype in (torch.int8, torch.uint8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)),
        (torch.complex64, r"\.abs\(\)"),
    ):
        x = torch.zeros(3).to(dtype)
        for call in (reduction, wl.fuse(lambda x: reduction(x), name="f")):
            with pytest.raises(wl.DtypeError, match=rf"wl\.{name} got a tensor of \w+; allowed: floating-point .* {way_out}"):
                call(x)
    with pytest.raises(wl.TraceError, match="takes a tensor, not a float"):
        reduction(1.0)


def word(name: str, value: float, ctype: str) -> int:
    """The row's C++ expression, read as Python: the bits of ``value`` by `struct`, the operators as they stand."""
    bits = struct.unpack("<Q", struct.pack("<d", value))[0] if ctype == "double" else struct.unpack("<I", struct.pack("<f", value))[0]
    text = REDUCTIONS[name].words[ctype].replace("(unsigned long long)", "")
    for spelt in ("::__float_as_uint({x})", "::__double_as_longlong({x})"):
        text = text.replace(spelt, str(bits))
    for suffix in ("ull", "ll", "u"):
        text = text.replace(suffix, "")
    condition, chosen, choices = text.partition(" ? ")
    if not chosen:
        return int(eval(condition))
    return int(eval(choices.split(" : ")[0 if eval(condition) else 1]))


@pytest.mark.parametrize("ctype", ["float", "double"])
def test_words_grow_as_the_results_do_and_are_their_bits(ctype: str) -> None:
    values = [0.0, 2.0**-149 if ctype == "float" else 2.0**-1074, 1e-30, 1.0, 1.0000002, 448.0, 3e38, INF, NAN]
    words = [word("amax", value, ctype) for value in values]
    assert words == sorted(set(words))
    assert [word("amax", -value, ctype) for value in values] == words
    form = "<f" if ctype == "float" else "<d"
    for value, bits in zip(values[:-1], words, strict=False):
        (back,) = struct.unpack(form, bits.to_bytes(struct.calcsize(form), "little"))
        assert back == struct.unpack(form, struct.pack(form, value))[0]
    flags = [struct.unpack("<f", word("any_nonfinite", value, ctype).to_bytes(4, "little"))[0] for value in (*values, -INF)]
    assert flags == [0.0] * 7 + [1.0, 1.0, 1.0]
