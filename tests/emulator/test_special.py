"""Special functions, run on the CPU, against multiple precision: torch's own fp64 is off by up to 1e-6 in some of them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch

import wideload as wl
from tests.emulator.emulated import run_emulated
from tests.emulator.emulator import Program, build, run_on
from tests.emulator.test_numerics import assert_within, kernel
from wideload.emit.prelude import select_prelude
from wideload.ops_table import OPS

f32, f64 = torch.float32, torch.float64
nan, inf = math.nan, math.inf
Domain = tuple[float, float]


def _scaled(function: Callable[[Any], Any], sign: int) -> Callable[[Any], Any]:
    return lambda x: function(x) * mpmath.exp(sign * abs(x))


UNARY: dict[str, tuple[Callable[[Any], Any], list[Domain]]] = {
    "digamma": (mpmath.digamma, [(0.01, 12), (12, 1e6), (-20, -0.05)]),
    "lgamma": (lambda x: mpmath.loggamma(x).real, [(0.01, 12), (3, 1e6), (-2, -0.05)]),
    "log_ndtr": (lambda x: mpmath.log(mpmath.erfc(-x / mpmath.sqrt(2)) / 2), [(-40, -1), (-1, 8)]),
    "ndtri": (lambda x: mpmath.sqrt(2) * mpmath.erfinv(2 * x - 1), [(0.001, 0.999)]),
    "erfinv": (mpmath.erfinv, [(-0.999, 0.999)]),
    "i0": (lambda x: mpmath.besseli(0, x), [(-20, 20)]),
    "i1": (lambda x: mpmath.besseli(1, x), [(-20, 20)]),
    "i0e": (_scaled(lambda x: mpmath.besseli(0, x), -1), [(-40, 40), (29, 31), (40, 1e4)]),
    "i1e": (_scaled(lambda x: mpmath.besseli(1, x), -1), [(-40, 40), (29, 31), (40, 1e4)]),
    "modified_bessel_k0": (lambda x: mpmath.besselk(0, x), [(0.001, 2), (2, 80)]),
    "modified_bessel_k1": (lambda x: mpmath.besselk(1, x), [(0.001, 2), (2, 80)]),
    "scaled_modified_bessel_k0": (_scaled(lambda x: mpmath.besselk(0, x), 1), [(0.001, 2), (2, 80), (80, 1e4)]),
    "scaled_modified_bessel_k1": (_scaled(lambda x: mpmath.besselk(1, x), 1), [(0.001, 2), (2, 80), (80, 1e4)]),
    "bessel_j0": (lambda x: mpmath.besselj(0, x), [(-25, 25), (25, 1000)]),
    "bessel_j1": (lambda x: mpmath.besselj(1, x), [(-25, 25), (-1000, -25)]),
    "bessel_y0": (lambda x: mpmath.bessely(0, x), [(0.01, 25), (25, 1000)]),
    "bessel_y1": (lambda x: mpmath.bessely(1, x), [(0.01, 25), (25, 1000)]),
    "airy_ai": (mpmath.airyai, [(-3.5, 2), (2, 20), (-40, -3.5)]),
    "spherical_bessel_j0": (mpmath.sinc, [(-20, 20), (-1e-3, 1e-3)]),
    "sinc": (lambda x: mpmath.sincpi(x), [(-20, 20), (-1e-3, 1e-3)]),
}
SCALES = {"digamma": 1, "lgamma": 1, "airy_ai": 0.25} | dict.fromkeys(("bessel_j0", "bessel_j1", "bessel_y0", "bessel_y1"), 0.05)
SCALES |= {"spherical_bessel_j0": 0.05, "sinc": 0.05}
"""Of functions with zeros, near which the error is that of the terms: their size, the least that an error is seen beside."""

BINARY: dict[str, tuple[Callable[[Any, Any], Any], list[tuple[Domain, Domain]]]] = {
    "zeta": (mpmath.zeta, [((1.05, 12), (0.05, 20)), ((12, 30), (0.5, 20))]),
    "igamma": (
        lambda a, x: mpmath.gammainc(a, 0, x, regularized=True),
        [((0.05, 12), (0.01, 15)), ((10, 300), (5, 400)), ((5100, 6000), (5100, 6000))],
    ),
    "igammac": (
        lambda a, x: mpmath.gammainc(a, x, mpmath.inf, regularized=True),
        [((0.001, 1), (0.001, 1.2)), ((0.05, 12), (0.01, 15)), ((10, 300), (5, 400)), ((5100, 6000), (5100, 6000))],
    ),
}


def _chebyshev(slope: int, offset: int) -> Callable[[int, Any], Any]:
    """The kind of which the first two are 1 and ``slope * x + offset``."""

    def polynomial(n: int, x: Any) -> Any:
        p, q = mpmath.mpf(1), slope * x + offset
        for _ in range(n):
            p, q = q, 2 * x * q - p
        return p

    return polynomial


POLYNOMIALS: dict[str, Callable[[int, Any], Any]] = {
    "chebyshev_polynomial_t": _chebyshev(1, 0),
    "chebyshev_polynomial_u": _chebyshev(2, 0),
    "chebyshev_polynomial_v": _chebyshev(2, -1),
    "chebyshev_polynomial_w": _chebyshev(2, 1),
    "hermite_polynomial_h": mpmath.hermite,
    "hermite_polynomial_he": lambda n, x: mpmath.hermite(n, x / mpmath.sqrt(2)) / mpmath.sqrt(2) ** n,
    "laguerre_polynomial_l": lambda n, x: mpmath.laguerre(n, 0, x),
    "legendre_polynomial_p": mpmath.legendre,
}
POLYNOMIALS |= {
    f"shifted_chebyshev_polynomial_{letter}": (lambda n, x, p=POLYNOMIALS[f"chebyshev_polynomial_{letter}"]: p(n, 2 * x - 1))
    for letter in "tuvw"
}
NAMES = [
    *UNARY,
    *BINARY,
    *POLYNOMIALS,
    "polygamma",
    "ndtr",
    "logit",
    "logit_eps",
    "entr",
    "nextafter_bf16",
    "nextafter_f16",
    "prelu",
    "glu",
]


@functools.cache
def program(dtype: torch.dtype) -> Program:
    body = "\n\n".join(kernel(name, OPS[name], OPS[name].cuda["float"], dtype, dtype) for name in NAMES)
    return build(f"{select_prelude(body)}\n\n{body}")


def compute(name: str, *operands: torch.Tensor) -> torch.Tensor:
    out = torch.zeros_like(operands[0])
    run_on(program(out.dtype), f"row_{name}", (1, 1, 1), (1, 1, 1), [*operands, out, len(out)], outputs=[out])
    return out


def points(domains: list[Domain], dtype: torch.dtype, n: int = 24) -> torch.Tensor:
    rng = np.random.default_rng(1)
    return torch.from_numpy(np.concatenate([rng.uniform(*ends, n) for ends in domains])).to(dtype)


def precisely(function: Callable[..., Any], *operands: torch.Tensor) -> torch.Tensor:
    """In 60 digits, rounded to fp64."""
    with mpmath.workdps(60):
        values = [float(mpmath.re(function(*(mpmath.mpf(float(x)) for x in row)))) for row in zip(*operands, strict=True)]
    return torch.tensor(values, dtype=f64)


def assert_near(name: str, got: torch.Tensor, want: torch.Tensor, scale: float, operands: tuple[torch.Tensor, ...]) -> None:
    """Within the table's bound, in units of |want| or of ``scale`` if that is larger."""
    ulp = OPS[name].ulp[got.dtype == f64]
    near = torch.full_like(want, scale).maximum(want.abs()).to(got.dtype)
    units = (got.double() - want).abs() / torch.nextafter(near, near * 2).sub(near).double()
    worst = int(units.argmax())
    at = ", ".join(repr(x[worst].item()) for x in operands)
    assert units.max() <= ulp, f"{name}({at}): got {got[worst].item()!r}, expected {want[worst].item()!r}: {units[worst]} units"


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_number(name: str, dtype: torch.dtype) -> None:
    function, domains = UNARY[name]
    x = points(domains, dtype)
    assert_near(name, compute(name, x), precisely(function, x), SCALES.get(name, 0), (x,))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_numbers(name: str, dtype: torch.dtype) -> None:
    function, domains = BINARY[name]
    x = torch.cat([points([first], dtype, 12) for first, _ in domains])
    y = torch.cat([points([second], dtype, 12).roll(7) for _, second in domains])
    want = precisely(function, x, y)
    keep = want.abs() > (1e-30 if dtype == f32 else 1e-250)
    assert_near(name, compute(name, x, y)[keep], want[keep], 0, (x[keep], y[keep]))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("order", [0, 1, 2, 3, 8])
def test_polygamma(order: int, dtype: torch.dtype) -> None:
    x = points([(0.1, 12), (12, 100), (-6, -0.1)], dtype)
    want = precisely(lambda v: mpmath.polygamma(order, v), x)
    assert_near("polygamma", compute("polygamma", x, torch.full_like(x, order)), want, 0 if order % 2 else 1, (x,))


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_polynomials(name: str, dtype: torch.dtype) -> None:
    is_shifted = name.startswith("shifted")
    for degree in (0, 1, 2, 5, 9, 30):
        x = points([(0, 1) if is_shifted else (-1, 1), (1, 3)], dtype, 10)
        want = precisely(lambda v, n=degree: POLYNOMIALS[name](n, v), x)
        assert_near(name, compute(name, x, torch.full_like(x, degree)), want, max(1.0, float(want[:10].abs().max())), (x,))
    x = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0], dtype=dtype)
    assert compute(name, x, torch.full_like(x, -1)).tolist() == [0] * 5
    for degree in (7, 12):  # at the ends of the range
        want = precisely(lambda v, n=degree: POLYNOMIALS[name](n, v), x)
        assert_near(name, compute(name, x, torch.full_like(x, degree + 0.5)), want, 1, (x,))


SPECIAL: dict[str, list[tuple[tuple[float, ...], float]]] = {
    "digamma": [((0.0,), -inf), ((-0.0,), inf), ((-3.0,), nan), ((inf,), inf), ((-inf,), nan), ((nan,), nan)],
    "lgamma": [((0.0,), inf), ((-3.0,), inf), ((inf,), inf), ((nan,), nan)],
    "polygamma": [((0.0, 1), inf), ((-2.0, 2), -inf), ((inf, 1), 0.0), ((nan, 1), nan)],
    "zeta": [((1.0, 2.0), inf), ((0.5, 2.0), nan), ((2.0, 0.0), inf), ((2.5, -1.5), nan), ((3.0, -2.0), inf), ((nan, 1.0), nan)],
    "igamma": [
        ((0.0, 0.0), nan),
        ((0.0, 1.0), 1),
        ((1.0, 0.0), 0),
        ((inf, 1.0), 0),
        ((inf, inf), nan),
        ((1.0, inf), 1),
        ((-1.0, 1.0), nan),
    ],
    "igammac": [((0.0, 0.0), nan), ((0.0, 1.0), 0), ((1.0, 0.0), 1), ((inf, 1.0), 1), ((1.0, inf), 0), ((1.0, -1.0), nan)],
    "bessel_j0": [((0.0,), 1), ((inf,), nan), ((nan,), nan)],
    "bessel_j1": [((0.0,), 0), ((-inf,), nan)],
    "bessel_y0": [((0.0,), -inf), ((-1.0,), nan), ((inf,), nan)],
    "bessel_y1": [((0.0,), -inf), ((-1.0,), nan), ((inf,), nan)],
    "modified_bessel_k0": [((0.0,), inf), ((-1.0,), nan), ((inf,), 0)],
    "scaled_modified_bessel_k1": [((0.0,), inf), ((-1.0,), nan), ((inf,), 0)],
    "i0e": [((inf,), 0), ((0.0,), 1)],
    "i1e": [((-inf,), 0), ((0.0,), 0)],
    "airy_ai": [((inf,), nan), ((-inf,), nan)],
    "ndtri": [((0.0,), -inf), ((1.0,), inf), ((2.0,), nan)],
    "erfinv": [((1.0,), inf), ((-1.0,), -inf), ((2.0,), nan)],
    "entr": [((0.0,), 0), ((-1.0,), -inf), ((inf,), -inf), ((nan,), nan)],
    "logit": [((0.0,), -inf), ((1.0,), inf), ((2.0,), nan), ((0.5,), 0)],
    "logit_eps": [((0.0, 0.5), 0), ((nan, 0.25), nan)],
    "log_ndtr": [((inf,), 0), ((-inf,), -inf)],
    "sinc": [((0.0,), 1), ((3.0,), 0), ((inf,), nan)],
    "spherical_bessel_j0": [((0.0,), 1), ((inf,), 0)],
}


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
@pytest.mark.parametrize("name", SPECIAL)
def test_special_values(name: str, dtype: torch.dtype) -> None:
    operands = [torch.tensor(column, dtype=dtype) for column in zip(*(of for of, _ in SPECIAL[name]), strict=True)]
    want = torch.tensor([value for _, value in SPECIAL[name]], dtype=dtype)
    assert_within(compute(name, *operands) + 0.0, want, 0, tuple(operands), name)


@pytest.mark.parametrize(("name", "dtype"), [("nextafter_bf16", torch.bfloat16), ("nextafter_f16", torch.float16)])
def test_the_next_half(name: str, dtype: torch.dtype) -> None:
    """Every half towards special values, by the order of numpy's integers; bf16 by torch too."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    for target in (0.0, -0.0, 1.0, inf, -inf, nan):
        toward = torch.full_like(every, target)
        got = compute(name, every.float(), toward.float())
        if dtype == torch.bfloat16:
            want = torch.nextafter(every, toward).float()
        else:  # numpy returns the first of equal numbers, C and torch the second
            with np.errstate(over="ignore"):
                want = torch.from_numpy(np.nextafter(every.numpy(), toward.numpy())).where(every != toward, toward).float()
        assert_within(got, want, 0, (every,), f"{name} to {target}")


def test_a_slope_and_a_gate() -> None:
    x, w = torch.tensor([-2.0, -0.0, 3.0, nan]), torch.tensor([0.5, 2.0, 4.0, 1.0])
    assert_within(compute("prelu", x, w), torch.tensor([-1.0, -0.0, 3.0, nan]), 0, (x,), "prelu")
    gate = torch.tensor([0.0, 100.0, -100.0, nan], dtype=f64)
    want = torch.tensor([-1.0, -0.0, 3 / (1 + math.exp(100)), nan], dtype=f64)
    assert_within(compute("glu", x.double(), gate), want, OPS["glu"].ulp[1], (x, gate), "glu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_gate_that_is_no_number_of_fp32_is_one_of_the_product(dtype: torch.dtype) -> None:
    """By kernel and reference, against fp64."""
    gated = wl.fuse(lambda z: torch.nn.functional.glu(z, -1), name="gated")
    z = torch.tensor([[1e30, -150.0], [1e30, -100.0], [3e38, -170.0], [-2e20, -90.0], [1.0, 3.0]]).to(dtype)
    want = z[:, 0].double() / (1 + (-z[:, 1].double()).exp())
    for got in (run_emulated(gated, z), gated(z)):
        torch.testing.assert_close(got.double()[:, 0], want, rtol=2**-7 if dtype == torch.bfloat16 else 1e-6, atol=0)
