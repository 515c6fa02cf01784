"""What counts as agreement: NaN, infinities, tolerances by dtype, and memory that was not written."""

from __future__ import annotations

import math

import pytest
import torch

from wideload.measure.outcome import Tolerance, default_tolerance, find_difference, is_poisoned, poison, tensors_of

NAN, INF = math.nan, math.inf


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance | None = None) -> str | None:
    return find_difference([got], [want], tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int32, torch.bool])
def test_equal_values_agree(dtype: torch.dtype) -> None:
    x = torch.arange(12).view(3, 4).to(dtype)
    assert difference(x, x.clone()) is None
    assert difference(x.t().contiguous().t(), x) is None, "strides may differ"


def test_specials_must_match_in_place_and_kind() -> None:
    want = torch.tensor([NAN, INF, -INF, 1.0])
    assert difference(want.clone(), want) is None
    for wrong in ([1.0, INF, -INF, 1.0], [NAN, -INF, -INF, 1.0], [NAN, INF, -INF, NAN], [NAN, 3e38, -INF, 1.0]):
        assert "1 of 4 elements differ" in str(difference(torch.tensor(wrong), want))


def test_kind_and_number_must_match() -> None:
    x = torch.ones(4)
    assert "float16[4] where the reference has float32[4]" in str(difference(x.half(), x))
    assert "float32[2, 2]" in str(difference(x.view(2, 2), x))
    assert find_difference([x], []) == "1 results where the reference has 0"
    assert str(find_difference([x, x + 1], [x, x])).startswith("result 1: ")


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 32), (torch.float64, 32), (torch.float16, 4), (torch.bfloat16, 4)])
def test_tolerance_is_a_few_units_of_the_element_and_of_the_whole(dtype: torch.dtype, units: int) -> None:
    eps = torch.finfo(dtype).eps
    want = torch.ones(1000, dtype=dtype)
    close, far = want.clone(), want.clone()
    close[3] += units * eps
    far[3] += 2.5 * units * eps  # the root mean square, 1, allows as much again
    assert difference(close, want) is None
    assert "1 of 1000" in str(difference(far, want))


def test_a_sum_that_cancels_may_keep_the_error_of_its_terms() -> None:
    x, y = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16(), torch.randn(10_000).bfloat16()
    rounded_often = ((x * 3).bfloat16() - (y * 3).bfloat16()).bfloat16()
    rounded_once = (x.float() * 3 - y.float() * 3).bfloat16()
    assert difference(rounded_often, rounded_once) is None
    assert difference(rounded_once + 0.5, rounded_once) is not None


def test_integers_and_bools_are_exact_unless_asked() -> None:
    want = torch.tensor([1, 2, 3], dtype=torch.int8)
    assert "1 of 3 elements differ" in str(difference(torch.tensor([1, 2, 4], dtype=torch.int8), want))
    assert difference(torch.tensor([1, 2, 4], dtype=torch.int8), want, Tolerance(0.0, 1.0)) is None
    odd = torch.tensor([2, 1], dtype=torch.uint8).view(torch.bool)
    assert difference(odd, torch.tensor([True, True])) is not None


def test_default_tolerances() -> None:
    assert default_tolerance(torch.int64) == Tolerance(0.0)
    assert default_tolerance(torch.float8_e4m3fn) == Tolerance(0.125)


DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e5m2,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_found_and_unlike_right_answers(dtype: torch.dtype) -> None:
    want = torch.ones(4, 6).to(dtype)
    got = want.clone()
    view = got[:, ::2]
    assert not is_poisoned([view])
    poison([view])
    assert is_poisoned([view])
    assert got[:, 1].equal(want[:, 1]), "the memory between the elements is not touched"
    assert difference(view, want[:, ::2]) is not None
    view[0, 0] = 1
    assert not is_poisoned([view])


def test_an_expanded_result_can_be_poisoned() -> None:
    x = torch.ones(3, 1).expand(3, 4)
    poison([x, torch.empty(0)])
    assert x.isnan().all()


def test_results_are_the_tensors_in_containers() -> None:
    a, b = torch.ones(1), torch.ones(2, requires_grad=True)
    found = tensors_of({"p": (a, 3), "q": [b, None]})
    assert [t.data_ptr() for t in found] == [a.data_ptr(), b.data_ptr()]
    assert not found[1].requires_grad
