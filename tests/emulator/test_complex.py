"""Complex numbers in kernels: values, infinities, NaN and signs of zero against torch, errors in units, and every kernel family."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import wideload as wl
from tests.emulator.emulated import behind, run_emulated
from tests.emulator.emulator import Program, build, run_on
from tests.emulator.test_numerics import kernel, result_dtype
from wideload.emit.kernel import emit_kernel
from wideload.emit.prelude import select_prelude
from wideload.execute import kernel_arguments
from wideload.ops_table import OPS, Op
from wideload.plan import Operand, Target, plan_kernels
from wideload.replay import NodeLayout
from wideload.trace import TensorArg, trace_function

f16, f32, f64, c64, c128 = torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128
nan, inf = math.nan, math.inf
EPS = {c64: 2.0**-24, c128: 2.0**-53}
ROWS = [op for op in OPS.values() if "complex" in op.cuda and "shape" not in op.types and op.name != "float_power"]
UNARY = [op.name for op in ROWS if len(op.operands) == 1]


@functools.cache
def program(dtype: torch.dtype) -> Program:
    """Every row on complex operands: kernels ``row_<name>``."""
    kernels = []
    for op in ROWS:
        result = result_dtype(op, dtype)
        assert result is not None
        kernels.append(kernel(op.name, op, op.cuda["complex"], dtype, result))
    body = "\n\n".join(kernels)
    return build(f"{select_prelude(body)}\n\n{body}")


def compute(op: Op, *operands: Any) -> torch.Tensor:
    """The kernel's results; numbers among the operands are repeated."""
    first = next(x for x in operands if isinstance(x, torch.Tensor) and x.is_complex())
    result = result_dtype(op, first.dtype)
    assert result is not None
    tensors = [x if isinstance(x, torch.Tensor) else torch.full_like(first, x) for x in operands]
    out = torch.zeros(len(first), dtype=result)
    run_on(program(first.dtype), f"row_{op.name}", (1, 1, 1), (1, 1, 1), [*tensors, out, len(first)], outputs=[out])
    return out


def parts(z: torch.Tensor) -> torch.Tensor:
    """Real numbers, with a last dim for the parts of each."""
    return torch.view_as_real(z.resolve_conj()) if z.is_complex() else z.unsqueeze(-1)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num(0.5).view({4: torch.int32, 8: torch.int64}[x.element_size()]) if x.is_floating_point() else x


def grid(values: list[float], dtype: torch.dtype = c64) -> torch.Tensor:
    """Every pair of ``values`` as parts."""
    return torch.tensor([complex(a, b) for a in values for b in values], dtype=dtype)


# ---- special values

SPECIAL = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, -3e38, 1e-39, inf, -inf, nan, 88.9, -200.0, 1e4]
FINITE_WHERE_TORCH_IS_NAN = {"expm1", "log1p", "sigmoid", "silu", "sinc", "tanhshrink"}
"""torch's exp(-z) overflows; its tanh is NaN as a whole where a part is; its expm1 multiplies infinity by sin(0)."""
ANY_ZERO = {"neg", "sigmoid", "silu", "sinc"}
"""A zero's sign is lost in torch's vectorised negation, and in a sum of terms decided by their rounding."""


def agrees(got: torch.Tensor, wants: list[torch.Tensor], slack: float = 0) -> torch.Tensor:
    """Where each part is that of one of ``wants``: NaN for NaN, within 1e-5, zeros with their sign."""
    found, fits = parts(got), torch.zeros_like(parts(got), dtype=torch.bool)
    for want in map(parts, wants):
        close = (found == want) | ((found - want).abs() <= 1e-5 * want.abs() + 1e-44 + slack)
        fits |= (found.isnan() & want.isnan()) | (close & ((want != 0) | (found.signbit() == want.signbit())))
    return fits


@pytest.mark.parametrize("name", UNARY)
def test_special_values_are_torchs(name: str) -> None:
    """By torch in fp64 or in fp32, which differ in what is large or cancels."""
    op, z = OPS[name], grid(SPECIAL)
    got, wide = compute(op, z), op.torch(z.to(c128))
    if got.dtype == torch.bool:
        assert torch.equal(got, op.torch(z))
        return
    want = wide.to(got.dtype)
    fits = agrees(got, [want, op.torch(z)], slack=1e-6 if name in ("sinc", "tanhshrink") else 0)
    if name in FINITE_WHERE_TORCH_IS_NAN:
        fits |= parts(want).isnan()
    if name == "sinc":  # torch's is the sine of a rounded product
        fits |= (z.real.abs() > 1e9).unsqueeze(-1)
    any_zero = ~torch.isfinite(parts(z)).all(-1, keepdim=True) & ~torch.isfinite(parts(want)).all(-1, keepdim=True)
    any_zero |= (z.real.isinf() & ~torch.isfinite(z.imag)).unsqueeze(-1) | (~torch.isfinite(z.real) & (z.imag.abs() > 1e9)).unsqueeze(-1)
    if name in ANY_ZERO:
        any_zero[:] = True
    elif name in ("tan", "tanh"):
        any_zero |= ~torch.isfinite(parts(z)).all(-1, keepdim=True)
    fits |= any_zero & (parts(got) == 0) & (parts(want) == 0)
    bad = (~fits).any(-1).nonzero()[:, 0]
    shown = [(z[i].item(), got[i].item(), wide[i].item()) for i in bad[:5]]
    assert not len(bad), f"{name}: {len(bad)} of {len(z)}, (of, got, torch in fp64): {shown}"


@pytest.mark.parametrize("name", ["add", "sub", "mul", "div", "eq", "ne"])
def test_special_pairs(name: str) -> None:
    """Sums and differences part by part: torch multiplies by alpha = 1, of which the imaginary part, 0, makes NaN of infinities."""
    values = grid([0.0, -0.0, 1.0, -2.5, 1e-39, 3e38, inf, -inf, nan])
    x, y = (v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij"))
    got, op = compute(OPS[name], x, y), OPS[name].torch
    if got.dtype == torch.bool:
        assert torch.equal(got, op(x, y))
        return
    by_part = name in ("add", "sub")
    wants = [torch.view_as_complex(op(parts(x), parts(y)))] if by_part else [op(x.to(c128), y.to(c128)).to(c64), op(x, y)]
    fits = agrees(got, wants, slack=1e-7) | ((parts(got) == 0) & (parts(wants[0]) == 0))
    bad = (~fits).any(-1).nonzero()[:, 0]
    assert not len(bad), f"{name}: {len(bad)} {[(x[i].item(), y[i].item(), got[i].item(), wants[0][i].item()) for i in bad[:5]]}"


# ---- accuracy

BOUNDS = {
    "exp2": 200,
    "sinc": 200,
    "expm1": 6,
    "log2": 8,
    "log10": 8,
    "log": 4,
    "tan": 8,
    "tanh": 8,
    "rsqrt": 8,
    "sinh": 6,
    "cosh": 6,
    "sin": 6,
    "cos": 6,
    "sigmoid": 16,
    "silu": 16,
}
"""In units of half the last place of |result|; ``exp2`` and ``sinc`` round an argument of up to 120 first. 4 for the others."""


@pytest.mark.parametrize("name", [name for name in UNARY if result_dtype(OPS[name], c64) in (c64, f32) and name != "tanhshrink"])
def test_functions_are_close_to_the_exact_value(name: str) -> None:
    rng = np.random.default_rng(3)
    small = torch.complex(*(torch.from_numpy(rng.uniform(-4, 4, 4000)) for _ in range(2)))
    wide = torch.complex(*(torch.from_numpy(rng.uniform(-80, 80, 2000)) for _ in range(2)))
    on_circle = torch.polar(torch.ones(2000, dtype=f64), torch.from_numpy(rng.uniform(-3.14, 3.14, 2000)))
    scaled = torch.polar(torch.from_numpy(2.0 ** rng.uniform(-140, 127, 4000)), torch.from_numpy(rng.uniform(-3.14, 3.14, 4000)))
    past_overflow = 88.75 + (0.72 if name in ("sinh", "cosh") else 0)  # of exp(x), or sinh(x), by less than the parts' factor
    edge = torch.complex(*(torch.from_numpy(rng.uniform(*ends, 500)) for ends in ((past_overflow, past_overflow + 0.2), (0.7, 0.87))))
    has_range = name in ("abs", "sgn", "sqrt", "rsqrt", "log", "log2", "log10", "reciprocal", "angle", "neg", "conj")
    z = torch.cat([small, wide, on_circle, edge, *([scaled] if has_range else [])]).to(c64)
    want, got = OPS[name].torch(z.to(c128)), compute(OPS[name], z)
    keep = (want.abs() < 4.5e38) & (want.abs() > 2.0**-125) & torch.isfinite(parts(want.to(got.dtype))).all(-1)
    if name in ("sigmoid", "silu"):
        keep &= (1 + torch.exp(-z.to(c128))).abs() > 0.25  # nearer to its poles the function magnifies the error of z
    error = ((got.to(want.dtype) - want).abs() / want.abs() / EPS[c64])[keep]
    assert keep.sum() > 5000
    assert name not in ("exp", "sinh", "cosh") or keep[-500:].sum() > 400
    assert error.max() <= BOUNDS.get(name, 4), f"{name}: {error.max()} at {z[keep][error.argmax()].item()}"


def exponents(dtype: torch.dtype, low: float, high: float, n: int, seed: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.complex(*(torch.from_numpy(2.0 ** rng.uniform(low, high, n) * rng.choice([-1, 1], n)) for _ in range(2))).to(dtype)


def test_quotients_neither_overflow_nor_vanish_on_the_way() -> None:
    x, y = exponents(c64, -149, 127.9, 60_000, 1), exponents(c64, -149, 127.9, 60_000, 2)
    x, y = x[y != 0], y[y != 0]
    got, want = compute(OPS["div"], x, y), x.to(c128) / y.to(c128)
    finite = torch.isfinite(parts(want.to(c64))).all(-1)
    assert torch.equal(torch.isfinite(parts(got)).all(-1), finite)
    allowed = 3 * EPS[c64] * want.abs() + 2.0**-149
    assert ((got.to(c128) - want).abs() <= allowed)[finite].all()
    assert finite.sum() > 30_000


def test_a_small_part_of_the_divisor_counts() -> None:
    """The quotient of i X by c + i d is d X / c^2 + i X / c, of which d / c is subnormal or none."""
    for c, d in ((1.0, 1e-40), (1e10, 1e-36), (-1e30, 1e-8), (2.0**100, -(2.0**-40))):
        divisor = torch.tensor([complex(c, d), complex(d, c)])
        dividend = torch.tensor([complex(0, 1e38), complex(1e38, 0)])
        want = dividend.to(c128) / divisor.to(c128)
        got = compute(OPS["div"], dividend, divisor)
        assert torch.allclose(parts(got).double(), parts(want), rtol=2.0**-22, atol=2.0**-149)


def test_fp64_quotients_and_moduli_use_the_whole_range() -> None:
    big, small = 2.0**1023, 2.0**-1074
    z = torch.tensor([complex(big, big), complex(small, small), complex(big, small), complex(small, -big)], dtype=c128)
    assert compute(OPS["div"], z, z).tolist() == [1, 1, 1, 1]
    assert compute(OPS["div"], z, torch.full_like(z, complex(big, 0)))[[0, 2]].tolist() == [1 + 1j, 1]
    assert compute(OPS["abs"], z[2:]).tolist() == [big, big]
    assert compute(OPS["sgn"], z[2:]).tolist() == [1, -1j]
    root = compute(OPS["sqrt"], torch.tensor([complex(-(2.0**1022), 0), complex(2.0**-1074, 0)], dtype=c128)).tolist()
    assert root == [complex(0, 2.0**511), complex(2.0**-537, 0)]


def test_a_sigmoid_has_tails() -> None:
    z = torch.tensor([-200 + 1j, 200 - 1j, -95 + 3j, -89 + 0j, -87 - 2j])
    wide = z.to(c128)
    logistic = torch.where(wide.real < 0, torch.exp(wide) / (1 + torch.exp(wide)), 1 / (1 + torch.exp(-wide)))
    for name, want in (("sigmoid", logistic), ("silu", wide * logistic)):
        assert torch.allclose(parts(compute(OPS[name], z)).double(), parts(want), rtol=1e-5, atol=2.0**-142)


def test_powers() -> None:
    z = exponents(c64, -3, 3, 4000, 5)
    for exponent in (0, 1, 2, 3, -1, -2, 0.5, -0.5, 2.5, 1 + 2j):
        want = z.to(c128) ** exponent
        error = ((compute(OPS["pow_number"], z, exponent).to(c128) - want).abs() / want.abs()).max() / EPS[c64]
        assert error <= (40 if exponent in (2.5, 1 + 2j) else 5), f"** {exponent}: {error}"
    assert compute(OPS["pow_number"], torch.tensor([0j, complex(inf, 0), complex(nan, 1)]), 0).tolist() == [1, 1, 1]
    w = exponents(c64, -2, 1, 4000, 6)
    want = z.to(c128) ** w.to(c128)
    for name in ("pow", "rpow"):
        assert ((compute(OPS[name], z, w).to(c128) - want).abs() / want.abs()).max() <= 60 * EPS[c64]


def test_sums_of_terms() -> None:
    x, y, z = (exponents(c64, -3, 3, 4000, seed) for seed in (7, 8, 9))
    for name, operands in {
        "addcmul": (x, y, z, 2.0),
        "addcdiv": (x, y, z, 2.0),
        "lerp": (x, y, z / 8),
        "logaddexp": (x, y),
        "add_alpha": (x, y, 1 + 2j),
        "sub_alpha": (x, y, 1 + 2j),
    }.items():
        wide = [v.to(c128) if isinstance(v, torch.Tensor) else v for v in operands]
        want = OPS[name].torch(*wide)
        largest = torch.stack([v.abs() for v in wide if isinstance(v, torch.Tensor)] + [want.abs()]).amax(0) * 16
        assert ((compute(OPS[name], *operands).to(c128) - want).abs() <= 8 * EPS[c64] * largest).all(), name
    assert torch.equal(compute(OPS["lerp"], x, y, 1.0), y)
    assert torch.equal(compute(OPS["lerp"], x, y, 0.0), x)


# ---- kernels


def ramp(*shape: int, dtype: torch.dtype, start: int = 0) -> torch.Tensor:
    """Small integers in both parts: sums and products of a few are exact."""
    n = math.prod(shape)
    return (((torch.arange(n) + start) % 13) + 1j * ((torch.arange(n) + 2 * start) % 7)).to(dtype).view(shape)


def shifted(values: torch.Tensor, offset: int) -> torch.Tensor:
    """The values at a storage offset, with no element after the last."""
    store = torch.empty(offset + values.numel(), dtype=values.dtype)
    store[offset:] = values.reshape(-1)
    return store[offset:].view(values.shape)


scaled_sum = wl.fuse(lambda x, y: x * 3 + y * 1j, name="scaled_sum")


@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
def test_every_length_and_alignment(dtype: torch.dtype) -> None:
    for n in (0, 1, 2, 3, 7, 255, 256, 257, 1029):
        x, y = ramp(n, dtype=dtype), ramp(n, dtype=dtype, start=5)
        for ox, oy, oo in ((0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 1), (2, 1, 3)):
            out = shifted(torch.zeros(n, dtype=dtype), oo)
            run_emulated(scaled_sum, shifted(x, ox), shifted(y, oy), out=out)
            assert torch.equal(out, x * 3 + y * 1j), f"n={n} offsets {ox} {oy} {oo}"


LAYOUTS: dict[str, Callable[[torch.dtype], tuple[torch.Tensor, torch.Tensor]]] = {
    "dense": lambda t: (ramp(33, 64, dtype=t), ramp(33, 64, dtype=t, start=3)),
    "rows": lambda t: (ramp(33, 64, dtype=t), ramp(64, dtype=t, start=3)),
    "tile": lambda t: (ramp(64, 96, dtype=t), ramp(96, 64, dtype=t, start=3).t()),
    "tile with edges": lambda t: (ramp(61, 97, dtype=t), ramp(97, 61, dtype=t, start=3).t()),
    "strided": lambda t: (ramp(20, 30, dtype=t)[:, ::3], ramp(20, 10, dtype=t, start=3)),
}


@pytest.mark.usefixtures("full_blocks")
@pytest.mark.parametrize("dtype", [c64, c128], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, dtype: torch.dtype) -> None:
    x, y = LAYOUTS[layout](dtype)
    (kernel_plan,) = (k.plan for k in scaled_sum.plan(x, y, target="sm_90").kernels)
    assert kernel_plan.variant.family == layout.split()[0]
    got, want = run_emulated(scaled_sum, x, y), x * 3 + y * 1j
    assert (got.dtype, got.stride()) == (want.dtype, want.stride())
    assert torch.equal(got, want)


def test_rows_with_gaps() -> None:
    for dtype in (c64, c128):
        x, out = ramp(33, 64, dtype=dtype), torch.zeros(33, 70, dtype=dtype)
        run_emulated(scaled_sum, x, x, out=out[:, :64])
        assert torch.equal(out[:, :64], x * 3 + x * 1j)


def test_mixed_dtypes_and_numbers() -> None:
    z, real, whole, half = ramp(1029, dtype=c64), torch.arange(1029.0) % 9, torch.arange(1029) % 5, (torch.arange(1029) % 3).bfloat16()
    f = wl.fuse(lambda z, x, n, h, s, t, u: (z * x + n, x * s, z * t - u, h + z, z == x, z.double() if z.is_floating_point() else z.real))
    for args in ((z, real, whole, half, 2j, 3.0, 2), (z.to(c128), real, whole, half, 1 - 1j, 0.5, -3)):
        for got, want in zip(run_emulated(f, *args), f.__wrapped__(*args), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got, want)
    constants = wl.fuse(lambda x: (x * 2j, torch.where(x > 3, x, complex(nan, -inf)), torch.full_like(x, 1 + 2j, dtype=c128)))
    for got, want in zip(run_emulated(constants, real), constants.__wrapped__(real), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(bits_of(parts(got)), bits_of(parts(want)))


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_conversions() -> None:
    z = torch.tensor([0j, -0.0 + 0j, 2.7 - 3j, 1j, -5 + 0.5j, complex(nan, 0), complex(0, nan), complex(1e30, 1)])
    f = wl.fuse(lambda z: (z.real, z.imag, z.float(), z.double(), z.bfloat16(), z.bool(), z.to(c128), z.to(torch.complex128).to(c64)))
    for got, want in zip(run_emulated(f, z), f.__wrapped__(z), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(parts(got).nan_to_num(7.0), parts(want).nan_to_num(7.0))
    g = wl.fuse(lambda z: (z.to(torch.int32), z.to(torch.uint8)))
    for got, want in zip(run_emulated(g, z[:4]), g.__wrapped__(z[:4]), strict=True):
        assert torch.equal(got, want)
    real, out = torch.tensor([1.5, -2.5]), torch.zeros(2, dtype=c64)
    run_emulated(wl.fuse(lambda x: x + 1), real, out=out)
    assert out.tolist() == [2.5, -1.5]


def test_conjugation_inside_and_outside() -> None:
    z = ramp(6, 8, dtype=c64)
    f = wl.fuse(lambda z, w: (z.conj() * w, z.H, z.mH + 1, z.imag + z.conj().imag, z.conj().resolve_conj(), torch.conj(w.real)))
    for got, want in zip(run_emulated(f, z, z), f.__wrapped__(z, z), strict=True):
        assert torch.equal(got, want.resolve_conj())
    triple = wl.fuse(lambda v: v * 3)
    for pending in (z.conj(), z.conj().imag, z.conj().t(), z.real):
        assert torch.equal(run_emulated(triple, pending), (pending * 3).resolve_conj())


def test_complex32_is_computed_in_complex64_and_rounded() -> None:
    c32 = torch.complex32
    x, y = (exponents(c64, -3, 3, 1029, seed).to(c32) for seed in (11, 12))
    wide, other = x.to(c64), y.to(c64)
    f = wl.fuse(lambda x, y: (x * y + 1j, x / y, x.abs(), x.real, x.to(c64), x.exp(), x * 0.3, x == y, x.clone()))
    want = (wide * other + 1j, wide / other, wide.abs(), wide.real, wide, wide.exp(), wide * 0.3, wide == other, wide)
    dtypes = (c32, c32, f16, f16, c64, c32, c32, torch.bool, c32)
    for got, exact, dtype in zip(run_emulated(f, x, y), want, dtypes, strict=True):
        assert got.dtype == dtype
        if dtype == torch.bool:
            assert torch.equal(got, exact)
        else:  # a unit of the part's, for an error of the kernel's or of torch's in fp32
            assert torch.allclose(parts(got.to(exact.dtype)), parts(exact), rtol=2.0**-11 + 2.0**-20, atol=2.0**-25 + 1e-6)
    for ours, theirs in zip(f(x, y), want, strict=True):
        assert torch.allclose(parts(ours.to(theirs.dtype)).double(), parts(theirs).double(), rtol=2.0**-10, atol=1e-6)
    eager = wl.fuse(lambda x, y: x * y * y, numerics="eager")
    twice = ((wide * other).to(c32).to(c64) * other).to(c32).to(c64)
    assert torch.equal(run_emulated(eager, x, y).to(c64), twice)
    narrowed = wl.fuse(lambda z: z.to(c32))
    assert torch.equal(run_emulated(narrowed, wide * 1.001).to(c64), (wide * 1.001).to(c32).to(c64))


def test_made_of_real_numbers() -> None:
    x, y = torch.linspace(-3, 3, 301), torch.linspace(0.1, 2, 301)
    f = wl.fuse(lambda x, y: (torch.complex(x, y), torch.polar(y, x), torch.angle(x), torch.angle(torch.complex(x, y))))
    got = run_emulated(f, x, y)
    for ours, theirs in zip(got, f.__wrapped__(x.double(), y.double()), strict=True):
        assert ours.dtype == (c64 if theirs.is_complex() else f32)
        assert ((ours.to(theirs.dtype) - theirs).abs() <= 4 * EPS[c64] * theirs.abs()).all()


def test_a_0_dim_cpu_tensor_is_passed_by_its_parts() -> None:
    traced = trace_function(
        lambda z, s: z * s, "f", (TensorArg("z", c64, (8,), torch.device("cuda")), TensorArg("s", c128, (), torch.device("cpu"))), {}
    )
    layout, z, s = NodeLayout((8,), (1,)), ramp(8, dtype=c64), torch.tensor(2 - 1j, dtype=c128)
    operands = [Operand(c64, layout, 0, 0), Operand(c128, NodeLayout((), ()), 0, 1, on_host=True)]
    target = Target(traced.expr.outputs[0], c64, layout, 0, 0)
    (plan,) = plan_kernels(traced.expr, operands, [target], numerics="fused", fast_math=False)
    assert plan.variant.loads == ("vector", "value")
    out = torch.zeros(8, dtype=c64)
    arguments = kernel_arguments(plan, [z, s], [out], (), behind)
    run_on(
        build(emit_kernel(plan.program, plan.variant)), plan.name, (plan.grid, 1, 1), (plan.variant.threads, 1, 1), arguments, outputs=[out]
    )
    assert torch.equal(out, z * s)


def test_modulus_and_division_of_the_extremes() -> None:
    z = torch.tensor([complex(3e30, 4e30), complex(3e-30, 4e-30), complex(-inf, nan), 3 + 4j])
    for n in (4, 1029):
        tiled = z.repeat(n // 4 + 1)[:n]
        got = run_emulated(wl.fuse(lambda v: torch.abs(v)), tiled)
        want = torch.tensor([5e30, 5e-30, inf, 5.0], dtype=f64).repeat(n // 4 + 1)[:n]
        assert torch.allclose(got.double(), want, rtol=2.0**-22, atol=0)
    p, q = torch.tensor([complex(3e30, 3e30), 0j]), torch.tensor([complex(3e30, 3e30), complex(2e-37, 0)])
    assert run_emulated(wl.fuse(lambda p, q: p / q), p, q).tolist() == [1, 0]
