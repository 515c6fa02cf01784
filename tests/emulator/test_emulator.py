"""The emulator itself: what it computes, and that it reports each kind of fault a kernel can have, on the kernel's line."""

from __future__ import annotations

import doctest
import functools
import math
import re
from collections.abc import Callable
from importlib import resources

import numpy as np
import pytest
import torch

from tests.emulator import emulator
from tests.emulator.emulator import Approx, EmulatorError, Memory, Pointer, build, run_on

VECTOR_ADD = """
#define DEVICE static __device__ __forceinline__
template <class T, int N> struct alignas(sizeof(T) * N) vec { T at[N]; };
template <int N, class T> DEVICE vec<T, N> load_vector(const T* p) { return *reinterpret_cast<const vec<T, N>*>(p); }

extern "C" __global__ void __launch_bounds__(64)
add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, const long long n, const double scale)
{
    const long long first = (long long)blockIdx.x * 256;
    if (first + 256 <= n) {
        const long long i = first + threadIdx.x * 4;
        vec<float, 4> a = load_vector<4>(x + i);
        const vec<float, 4> b = load_vector<4>(y + i);
#pragma unroll
        for (int k = 0; k < 4; ++k) a.at[k] = a.at[k] * (float)scale + b.at[k];
        *reinterpret_cast<vec<float, 4>*>(out + i) = a;
    } else {
        for (long long i = first + threadIdx.x; i < n; i += 64) out[i] = x[i] * (float)scale + y[i];
    }
}
"""

REVERSE = """
extern "C" __global__ void reverse(const float* x, float* out)
{
    __shared__ float tile[96];
    const unsigned i = threadIdx.x;
    tile[i] = x[blockIdx.x * 96 + i];
    __syncthreads();
    out[blockIdx.x * 96 + i] = tile[95 - i];
}
"""


def run_block(source: str, args: list[torch.Tensor | int | float | None], threads: int = 1, *, approx: Approx = "exact") -> None:
    """One block of kernel ``f``."""
    run_on(build(source), "f", (1, 1, 1), (threads, 1, 1), args, approx=approx)


CTYPES = {
    torch.float32: "float", torch.float64: "double", torch.int16: "unsigned short", torch.int32: "int", torch.int64: "long long",
}  # fmt: skip


def map_elements(expression: str, x: torch.Tensor, dtype: torch.dtype = torch.float32, approx: Approx = "exact") -> torch.Tensor:
    """``expression`` of every ``x``."""
    source = f"""extern "C" __global__ void f(const {CTYPES[x.dtype]}* in, {CTYPES[dtype]}* out, const long long n)
    {{ for (long long i = threadIdx.x; i < n; i += blockDim.x) {{ const {CTYPES[x.dtype]} x = in[i]; out[i] = {expression}; }} }}"""
    y = torch.empty(x.shape, dtype=dtype)
    run_block(source, [x, y, x.numel()], 32, approx=approx)
    return y


def same(x: float, y: float) -> bool:
    """Equal, zeros by their sign, or both NaN."""
    return (math.isnan(x) and math.isnan(y)) or (x == y and math.copysign(1, x) == math.copysign(1, y))


@pytest.mark.parametrize("sanitize", [True, False])
def test_vector_add_is_right_at_every_size(sanitize: bool) -> None:
    program = build(VECTOR_ADD, sanitize=sanitize)
    for n in [*range(1, 34), 255, 256, 257, 1000, 4097]:
        x, y, out = torch.randn(n), torch.randn(n), torch.empty(n)
        run_on(program, "add", (-(-n // 256), 1, 1), (64, 1, 1), [x, y, out, n, 0.5], outputs=[out])
        assert torch.equal(out, x * 0.5 + y), n


def test_every_thread_of_a_3d_grid_runs_once() -> None:
    source = """extern "C" __global__ void f(long long* out) {
        const long long block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        const long long thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
        out[block * 24 + thread] += block * 24 + thread;
    }"""
    out = torch.zeros(30 * 24, dtype=torch.int64)
    run_on(build(source), "f", (5, 3, 2), (4, 3, 2), [out])
    assert torch.equal(out, torch.arange(30 * 24))


def test_one_source_may_hold_several_kernels_with_any_order_of_parameters() -> None:
    program = build("""
        // extern "C" __global__ void absent(float* x) {}
        extern "C" __global__ void first(const double a, float* x, const long long b) { x[0] = a + b; }
        extern "C" __global__ __launch_bounds__(32, 4) void second(const long long b, const double a, float* x) { x[0] = a - b; }
    """)
    assert program.max_threads == {"first": 1024, "second": 32}
    x = torch.empty(1)
    run_on(program, "first", (1, 1, 1), (1, 1, 1), [0.5, x, 2**40])
    assert x.item() == 2.0**40
    run_on(program, "second", (1, 1, 1), (1, 1, 1), [-3, 0.5, x])
    assert x.item() == 3.5


# Faults: the statement, what the report says, and the operand or reason.
FAULTS = {
    "read behind the end": ("out[0] = x[n];", "use-after-poison", "0 bytes behind the end of the memory of argument 0, 7 bytes long"),
    "read before the start": ("out[0] = x[-1];", "use-after-poison", "1 bytes before the start of the memory of argument 0"),
    "write behind the end": ("out[n] = 1;", "use-after-poison", "0 bytes behind the end of the memory of argument 1"),
    "write before the start": ("out[-1] = 1;", "use-after-poison", "1 bytes before the start of the memory of argument 1"),
    "read far away": ("out[0] = x[1ll << 40];", "SEGV", ""),
    "null pointer": ("*(null + n) = 1;", "SEGV on unknown address 0x000000000007", ""),
    "misaligned vector": ("out[0] = *(const short*)(x + 1);", "misaligned address", "requires 2 byte alignment"),
    "signed overflow": ("out[0] = (int)(n + 0x7ffffff8) + (int)n;", "signed integer overflow", "cannot be represented"),
    "shift by the width": ("out[0] = 1 << (n + 25);", "shift exponent 32 is too large", ""),
    "integer division by zero": ("out[0] = 5 / (n - 7);", "division by zero", ""),
    "cast out of range": ("out[0] = (int)(n * 1e9);", "is outside the range of representable values", ""),
    "local array": ("int a[4] = {}; a[n] = 1; out[0] = a[2];", "index 7 out of bounds", ""),
    "aligned shared array": ("alignas(128) __shared__ int a[8]; int* volatile p = a; p[n + 1] = 1;", "global-buffer-overflow", ""),
    "shared array": ("__shared__ int a[7]; int* volatile p = a; p[n] = 1;", "global-buffer-overflow", ""),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported_on_its_line(name: str) -> None:
    statement, kind, detail = FAULTS[name]
    source = f"""extern "C" __global__ void f(const signed char* x, signed char* out, const long long n, signed char* null)
    {{
        {statement}
    }}"""
    x, out = torch.ones(7, dtype=torch.int8), torch.full((7,), 9, dtype=torch.int8)
    with pytest.raises(EmulatorError) as error:
        run_block(source, [x, out, 7, None])
    message = str(error.value)
    summary = message.split("\n\n")[0]
    assert summary.startswith("f: ")
    assert f"kernel.cu:3: {statement}" in summary
    assert kind in summary
    assert detail in message
    assert (out == 9).all(), "results of a faulty launch are not copied back"


def test_the_line_of_a_fault_in_an_inlined_function_comes_with_its_callers() -> None:
    x, out = torch.randn(257)[1:], torch.empty(256)
    with pytest.raises(EmulatorError, match="misaligned address") as error:
        run_on(build(VECTOR_ADD), "add", (1, 1, 1), (64, 1, 1), [x, out, out, 256, 1.0])
    assert re.search(r"kernel\.cu:4: template .*\n +kernel\.cu:12: vec<float, 4> a = load_vector<4>\(x \+ i\);", str(error.value))


def test_a_fault_leaves_the_next_launch_unharmed() -> None:
    program = build("""extern "C" __global__ void f(float* x, const long long i) { x[i] = 1; }""")
    x = torch.zeros(3)
    with pytest.raises(EmulatorError, match="4 bytes behind the end"):
        run_on(program, "f", (1, 1, 1), (1, 1, 1), [x, 4])
    run_on(program, "f", (1, 1, 1), (1, 1, 1), [x, 2])
    assert x.tolist() == [0, 0, 1]


def test_an_endless_kernel_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulator, "_HANG_S", 1)
    with pytest.raises(EmulatorError, match="no answer within 1 s"):
        run_block("""extern "C" __global__ void f(volatile float* x) { while (x[0] == 0) {} }""", [torch.zeros(1)])


@pytest.mark.parametrize("offset", range(16))
def test_bytes_around_an_unaligned_memory_are_guarded(offset: int) -> None:
    program = build("""extern "C" __global__ void f(unsigned char* x, const long long i) { x[i] = 7; }""")
    memory = Memory(np.zeros(5, np.uint8), address=offset)
    program.run("f", (1, 1, 1), (1, 1, 1), [Pointer(memory), 4])
    program.run("f", (1, 1, 1), (1, 1, 1), [Pointer(memory, 4), -4])
    assert memory.data.tolist() == [7, 0, 0, 0, 7]
    for outside, place in ((-1, "1 bytes before the start"), (5, "0 bytes behind the end")):
        with pytest.raises(EmulatorError, match=place):
            program.run("f", (1, 1, 1), (1, 1, 1), [Pointer(memory), outside])


def test_a_read_that_shares_the_first_granule_finds_nan() -> None:
    program = build("""extern "C" __global__ void f(const float* x, float* out) { out[0] = x[-1]; }""")
    out = Memory(np.zeros(4, np.uint8))
    program.run("f", (1, 1, 1), (1, 1, 1), [Pointer(Memory(np.zeros(8, np.uint8), address=4)), Pointer(out)])
    assert np.isnan(out.data.view(np.float32)).all()


def test_the_kernel_sees_the_hosts_address_modulo_256() -> None:
    program = build("""extern "C" __global__ void f(const char* x, long long* out) { out[0] = (unsigned long long)x % 256; }""")
    storage, out = torch.zeros(1000, dtype=torch.int8), torch.empty(1, dtype=torch.int64)
    for offset in (0, 1, 2, 16, 255, 999):
        run_on(program, "f", (1, 1, 1), (1, 1, 1), [storage[offset:], out])
        assert out.item() == storage[offset:].data_ptr() % 256


def test_arguments_of_one_storage_alias() -> None:
    x = torch.arange(300.0)
    expected = x * 2 + x
    run_on(build(VECTOR_ADD), "add", (2, 1, 1), (64, 1, 1), [x, x, x, 300, 2.0])
    assert torch.equal(x, expected)
    shift = build("""extern "C" __global__ void f(const float* x, float* y) { for (int i = 0; i < 4; ++i) y[i] = x[i]; }""")
    x = torch.arange(5.0)
    run_on(shift, "f", (1, 1, 1), (1, 1, 1), [x[:4], x[1:]])
    assert x.tolist() == [0, 0, 0, 0, 0], "each write is read by the next iteration"


def test_an_empty_tensor_has_no_byte_to_touch() -> None:
    source = """extern "C" __global__ void f(float* x, const long long n) { for (long long i = 0; i < n; ++i) x[i] = 1; }"""
    run_block(source, [torch.empty(0), 0])
    with pytest.raises(EmulatorError, match="0 bytes long"):
        run_block(source, [torch.empty(0), 1])


WRITE_STEPS = """extern "C" __global__ void f(const float* x, float* out, const long long step)
{ for (long long i = 0; i < 4; ++i) out[i * step] = x[i]; }"""


def test_gaps_of_an_output_must_come_back_unchanged() -> None:
    program = build(WRITE_STEPS)
    x, storage = torch.ones(4), torch.zeros(4, 3)
    out = storage[:, 1]
    run_on(program, "f", (1, 1, 1), (1, 1, 1), [x, out, 3], outputs=[out])
    assert torch.equal(storage, torch.tensor([0.0, 1.0, 0.0]).expand(4, 3))
    # A wrong step writes elements 1, 3, 5, 7 of the storage: 3 and 5 lie in gaps. 1.0f differs from 0 in its last two bytes.
    with pytest.raises(EmulatorError, match="wrote 4 bytes that must not change, the first is byte 14 of the memory of argument 1"):
        run_on(program, "f", (1, 1, 1), (1, 1, 1), [x, out.zero_(), 2], outputs=[out])
    assert not storage.any()


def test_an_input_must_come_back_unchanged() -> None:
    source = """extern "C" __global__ void f(float* x, float* out) { out[0] = x[0]; x[1] = 5; }"""
    x, out = torch.zeros(2), torch.empty(1)
    with pytest.raises(EmulatorError, match="of the memory of argument 0"):
        run_on(build(source), "f", (1, 1, 1), (1, 1, 1), [x, out], outputs=[out])
    assert x.tolist() == [0, 0]
    run_on(build(source), "f", (1, 1, 1), (1, 1, 1), [x, out])
    assert x.tolist() == [0, 5]


@pytest.mark.parametrize("sanitize", [True, False])
def test_a_barrier_orders_the_threads_of_a_block(sanitize: bool) -> None:
    x, out = torch.randn(4 * 96), torch.empty(4 * 96)
    run_on(build(REVERSE, sanitize=sanitize), "reverse", (4, 1, 1), (96, 1, 1), [x, out], outputs=[out])
    assert torch.equal(out, x.view(4, 96).flip(1).flatten())


def test_barriers_in_a_loop() -> None:
    source = """extern "C" __global__ void f(float* out) {
        __shared__ float sum[2][32];
        int side = 0;
        sum[0][threadIdx.x] = threadIdx.x;
        for (int step = 1; step < 32; step *= 2, side ^= 1) {
            __syncthreads();
            sum[side ^ 1][threadIdx.x] = sum[side][threadIdx.x] + (threadIdx.x >= step ? sum[side][threadIdx.x - step] : 0);
        }
        out[threadIdx.x] = sum[side][threadIdx.x];
    }"""
    out = torch.empty(32)
    run_block(source, [out], 32)
    assert torch.equal(out, torch.arange(32.0).cumsum(0))


def test_a_missing_barrier_shows() -> None:
    """Nothing outlives a block in shared memory: what a thread reads before it is written is NaN."""
    x, out = torch.randn(2 * 96), torch.empty(2 * 96)
    run_on(build(REVERSE.replace("__syncthreads();", "")), "reverse", (2, 1, 1), (96, 1, 1), [x, out])
    assert out.view(2, 96)[:, :48].isnan().all()


@pytest.mark.parametrize(
    ("barrier", "message"),
    [
        ("if (i < 40) __syncthreads();", "thread 32 of a block waits at the barrier of kernel.cu:7, thread 40 has returned"),
        ("if (i < 32) __syncthreads();", "thread 0 of a block waits at the barrier of kernel.cu:7, thread 32 has returned"),
        ("if (i == 0) return; __syncthreads();", "thread 0 of a block has returned, thread 1 waits at the barrier of kernel.cu:7"),
        (
            "if (i < 40) __syncthreads();\n else __syncthreads();",
            "thread 32 of a block waits at the barrier of kernel.cu:7, thread 40 waits at the barrier of kernel.cu:8",
        ),
    ],
)
def test_a_barrier_that_not_all_threads_reach_is_an_error(barrier: str, message: str) -> None:
    x = torch.randn(96)
    with pytest.raises(EmulatorError, match=message):
        run_on(build(REVERSE.replace("__syncthreads();", barrier)), "reverse", (1, 1, 1), (96, 1, 1), [x, torch.empty(96)])


# What the PTX ISA and the CUDA C++ Programming Guide state. A bound in ulp counts from the correctly rounded result: (centre, bound).
Bound = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]


def in_ulp(count: float | Callable[[np.ndarray], np.ndarray]) -> Bound:
    def bound(x: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rounded = exact.astype(np.float32).astype(np.float64)
        return rounded, (count(x) if callable(count) else count) * 2.0 ** (np.floor(np.log2(np.abs(rounded))) - 23)

    return bound


def in_units(size: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Bound:
    return lambda x, exact: (exact, size(x, exact))


APPROXIMATE: dict[str, tuple[Callable[[np.ndarray], np.ndarray], Bound, tuple[float, float]]] = {
    "ex2_approx(x)": (np.exp2, in_units(lambda x, y: 2**-22.5 * y), (-126, 127)),
    "ex2_approx_ftz(x)": (np.exp2, in_units(lambda x, y: 2**-22.5 * y), (-125, 127)),
    "ex2_approx(x) ": (np.exp2, in_units(lambda x, y: 2**-21.5 * y + 2.0**-150), (-140, -126)),
    "rcp_approx(x)": (lambda x: 1 / x, in_ulp(1), (2.0**-20, 2.0**20)),
    "div_full(3.0f, x)": (lambda x: 3 / x, in_ulp(2), (-50, -0.01)),
    "div_full(x, 3e38f)": (lambda x: x / float(np.float32(3e38)), in_ulp(2), (2.0**20, 2.0**40)),
    "sqrt_approx(x)": (np.sqrt, in_units(lambda x, y: 2**-23 * y), (0.01, 50)),
    "lg2_approx(x)": (np.log2, in_units(lambda x, y: 2**-22 * np.where((x > 0.5) & (x < 2), 1, np.abs(y))), (0.01, 50)),
    "__expf(x)": (np.exp, in_ulp(lambda x: 2 + np.floor(np.abs(1.173 * x))), (-80, 80)),
    "__fdividef(3.0f, x)": (lambda x: 3 / x, in_ulp(2), (-50, -0.01)),
    "expf(x)": (np.exp, in_ulp(2), (-80, 80)),
    "log1p(x)": (np.log1p, in_ulp(1), (-0.9, 50)),
}


@pytest.mark.parametrize("expression", APPROXIMATE)
def test_approximations_lie_at_the_end_of_their_bound(expression: str) -> None:
    function, bound, (low, high) = APPROXIMATE[expression]
    x = torch.empty(4000).uniform_(low, high, generator=torch.Generator().manual_seed(1))
    inputs = x.double().numpy()
    exact = function(inputs)
    centre, size = bound(inputs, exact)
    results = {approx: map_elements(expression, x, approx=approx).numpy() for approx in ("exact", "up", "down", "mixed")}
    assert np.array_equal(results["exact"], exact.astype(np.float32))
    # The bounds are stated here as powers of two, in the runtime as hexadecimal floats of seven digits.
    for approx, direction in (("up", 1), ("down", -1)):
        outward = np.sign(exact) * direction
        step = np.nextafter(results[approx], (outward * np.inf).astype(np.float32))
        assert (np.abs(results[approx] - centre) <= size * 1.000001).all()
        assert (outward * (step - centre) >= size * 0.999999).all()
    assert ((results["mixed"] == results["up"]) | (results["mixed"] == results["down"])).all()
    two_sided = results["up"] != results["down"]
    assert 0.4 < (results["mixed"] == results["up"])[two_sided].mean() < 0.6


def test_an_absolute_bound_may_change_the_sign() -> None:
    x = torch.tensor([1 + 2.0**-23, 1.0])
    assert map_elements("lg2_approx(x)", x, approx="down").tolist() == pytest.approx([-(2.0**-22) + math.log2(1 + 2.0**-23), 0])


@pytest.mark.parametrize("approx", ["exact", "up", "down", "mixed"])
def test_approximations_keep_special_values(approx: Approx) -> None:
    x = torch.tensor([math.inf, -math.inf, 0.0, -0.0, math.nan])
    for expression, expected in {
        "ex2_approx(x)": [math.inf, 0.0, None, None, math.nan],
        "rcp_approx(x)": [0.0, -0.0, math.inf, -math.inf, math.nan],
        "lg2_approx(x)": [math.inf, math.nan, -math.inf, -math.inf, math.nan],
        "sqrt_approx(x)": [math.inf, math.nan, 0.0, -0.0, math.nan],
        "div_full(1.0f, x)": [0.0, -0.0, math.inf, -math.inf, math.nan],
        "div_full(x, 0.0f)": [math.inf, -math.inf, math.nan, math.nan, math.nan],
        "rsqrtf(x)": [0.0, math.nan, math.inf, -math.inf, math.nan],
        "expf(x)": [math.inf, 0.0, None, None, math.nan],
        "sinf(x)": [math.nan, math.nan, 0.0, -0.0, math.nan],
    }.items():
        got = map_elements(expression, x, approx=approx)
        for value, wanted in zip(got.tolist(), expected, strict=True):
            if wanted is not None:
                assert (math.isnan(value) and math.isnan(wanted)) or (
                    value == wanted and math.copysign(1, value) == math.copysign(1, wanted)
                )


# CUDA's functions by torch's in fp64, which is exact for fp32 once rounded.
LIBRARY = {
    "exp": torch.exp, "exp2": torch.exp2, "expm1": torch.expm1, "log": torch.log, "log2": torch.log2, "log10": torch.log10,
    "log1p": torch.log1p, "sin": torch.sin, "cos": torch.cos, "tan": torch.tan, "asin": torch.asin, "acos": torch.acos, "atan": torch.atan,
    "sinh": torch.sinh, "cosh": torch.cosh, "tanh": torch.tanh, "asinh": torch.asinh, "acosh": torch.acosh, "atanh": torch.atanh,
    "erf": torch.erf, "erfc": torch.erfc, "erfcx": torch.special.erfcx, "lgamma": torch.lgamma,
    "rsqrt": torch.rsqrt, "sqrt": torch.sqrt, "floor": torch.floor, "ceil": torch.ceil, "trunc": torch.trunc, "rint": torch.round,
    "fabs": torch.abs,
    "normcdf": lambda x: torch.erfc(-x / math.sqrt(2)) / 2,
    "exp10": lambda x: torch.pow(10.0, x), "cbrt": lambda x: torch.copysign(x.abs().pow(1 / 3), x),
}  # fmt: skip


@functools.cache
def library_program() -> emulator.Program:
    """For each function a kernel of its fp64 form, its fp32 form, and its fp32 overload."""
    kernels = [
        f"""extern "C" __global__ void {name}_{kind}(const {ctype}* x, {ctype}* out, const long long n)
        {{ for (long long i = 0; i < n; ++i) out[i] = {call}(x[i]); }}"""
        for name in LIBRARY
        for kind, ctype, call in (("wide", "double", name), ("narrow", "float", f"{name}f"), ("overload", "float", name))
    ]
    return build("\n".join(kernels))


@pytest.mark.parametrize("name", LIBRARY)
def test_library_functions(name: str) -> None:
    magnitudes = torch.logspace(-6, 1.5, 500)
    x = torch.cat([magnitudes, -magnitudes, torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.5, math.inf, -math.inf, math.nan])])
    expected = LIBRARY[name](x.double())
    wide, narrow, overload = torch.empty_like(expected), torch.empty_like(x), torch.empty_like(x)
    for kind, operand, out in (("wide", x.double(), wide), ("narrow", x, narrow), ("overload", x, overload)):
        run_on(library_program(), f"{name}_{kind}", (1, 1, 1), (1, 1, 1), [operand, out, len(x)])
    # The references' own arguments are rounded: their tails are less exact than fp64.
    torch.testing.assert_close(wide, expected, rtol=3e-13, atol=1e-15, equal_nan=True)
    torch.testing.assert_close(narrow, expected.float(), rtol=2**-23, atol=0, equal_nan=True)
    assert torch.equal(overload.view(torch.int32), narrow.view(torch.int32))
    zeros = expected == 0
    assert torch.equal(narrow[zeros].signbit(), expected[zeros].signbit())


@pytest.mark.parametrize("approx", ["exact", "up", "down"])
def test_ftz_flushes_subnormals_and_keeps_their_sign(approx: Approx) -> None:
    x = torch.tensor([2.0**-127, -(2.0**-127), 2.0**127, -(2.0**127)])
    assert map_elements("rcp_approx(x)", x, approx=approx).tolist() == [math.inf, -math.inf, 0, 0]
    assert map_elements("1 / rcp_approx(x)", x, approx=approx).tolist() == [0, 0, math.inf, -math.inf]
    assert map_elements("lg2_approx(x)", x[:2], approx=approx).tolist() == [-math.inf, -math.inf]
    assert map_elements("ex2_approx(-127.0f)", x[:1]).tolist() == [2.0**-127]
    assert map_elements("ex2_approx_ftz(-127.0f)", x[:1], approx=approx).tolist() == [0]


def test_minimum_and_maximum_drop_nan_and_order_zeros() -> None:
    for name, x, y, expected in [
        ("fmin", math.nan, 1.0, 1.0), ("fmin", 1.0, math.nan, 1.0), ("fmax", math.nan, -1.0, -1.0), ("fmax", -1.0, math.nan, -1.0),
        ("fmin", 0.0, -0.0, -0.0), ("fmin", -0.0, 0.0, -0.0), ("fmax", 0.0, -0.0, 0.0), ("fmax", -0.0, 0.0, 0.0),
        ("fmin", -math.inf, 2.0, -math.inf), ("fmax", 3.0, 2.0, 3.0), ("min", 3.0, math.nan, 3.0), ("max", math.nan, 2.0, 2.0),
    ]:  # fmt: skip
        for dtype, ctype in ((torch.float32, "float"), (torch.float64, "double")):
            operands, out = torch.tensor([x, y], dtype=dtype), torch.empty(1, dtype=dtype)
            run_block(
                f"""extern "C" __global__ void f(const {ctype}* x, {ctype}* out) {{ out[0] = {name}(x[0], x[1]); }}""", [operands, out]
            )
            assert out.item() == expected
            assert math.copysign(1, out.item()) == math.copysign(1, expected)


# PTX ISA, cvt: clamped; NaN gives 0 from f32 to 32 bits, else the top bit alone.
INT32, INT64 = (-(2**31), 2**31 - 1), (-(2**63), 2**63 - 1)
CONVERSIONS = [
    ("float2int_rz", torch.float32, torch.int32, [(1e10, INT32[1]), (-1e10, INT32[0]), (math.nan, 0), (-1.9, -1), (math.inf, INT32[1])]),
    ("float2int_rn", torch.float32, torch.int32, [(2.5, 2), (3.5, 4), (-2.5, -2), (2.0**31, INT32[1]), (-(2.0**31), INT32[0])]),
    ("float2int_rd", torch.float32, torch.int32, [(-1.1, -2), (1.9, 1)]),
    ("float2int_ru", torch.float32, torch.int32, [(-1.9, -1), (1.1, 2)]),
    ("float2uint_rz", torch.float32, torch.int32, [(-5.0, 0), (1e10, -1), (math.nan, 0), (3e9, 3000000000 - 2**32)]),
    ("float2ll_rz", torch.float32, torch.int64, [(1e30, INT64[1]), (-1e30, INT64[0]), (math.nan, INT64[0]), (-2.5, -2)]),
    ("float2ull_rz", torch.float32, torch.int64, [(1e30, -1), (-1.0, 0), (math.nan, INT64[0]), (2.0**63, INT64[0])]),
    ("double2int_rz", torch.float64, torch.int32, [(1e10, INT32[1]), (-1e10, INT32[0]), (math.nan, INT32[0]), (2147483647.5, INT32[1])]),
    ("double2uint_rz", torch.float64, torch.int32, [(1e10, -1), (-1e10, 0), (math.nan, INT32[0])]),
    ("double2ll_rz", torch.float64, torch.int64, [(1e30, INT64[1]), (-1e30, INT64[0]), (math.nan, INT64[0])]),
    ("double2ull_rz", torch.float64, torch.int64, [(1e30, -1), (-1e30, 0), (math.nan, INT64[0])]),
]


@pytest.mark.parametrize(("name", "source", "target", "rows"), CONVERSIONS)
def test_conversions_to_integers_saturate(name: str, source: torch.dtype, target: torch.dtype, rows: list[tuple[float, int]]) -> None:
    x = torch.tensor([value for value, _ in rows], dtype=source)
    assert map_elements(f"__{name}(x)", x, target).tolist() == [expected for _, expected in rows]


def float_samples() -> torch.Tensor:
    """Every half, the fp32 half way between neighbours, both sides of it, and random bits."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).float()
    steps = torch.arange(0, 2**16, dtype=torch.int32) << 16
    near = torch.cat([steps + offset for offset in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]).view(torch.float32)
    ties = torch.cat([(halves.view(torch.int32) + offset).view(torch.float32) for offset in (0x0FFF, 0x1000, 0x1001)])
    small = torch.ldexp(torch.arange(4096.0), torch.tensor(-26))
    return torch.cat([halves, near, ties, small, -small])


@pytest.mark.parametrize(
    ("expression", "dtype"),
    [
        ("f16_bits(x)", torch.float16),
        ("(unsigned short)f16_word(x, 0)", torch.float16),
        ("(unsigned short)(f16_word(0, x) >> 16)", torch.float16),
        ("(unsigned short)bf16_word(x, 0)", torch.bfloat16),
        ("(unsigned short)(bf16_word(0, x) >> 16)", torch.bfloat16),
    ],
)
def test_halves_are_rounded_to_nearest_even(expression: str, dtype: torch.dtype) -> None:
    x = float_samples()
    expected = x.to(dtype).view(torch.int16)
    expected[x.isnan()] = 0x7FFF
    assert torch.equal(map_elements(expression, x, torch.int16), expected)


def test_halves_are_widened_exactly() -> None:
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    out = map_elements("f16_value(x)", bits)
    expected = bits.view(torch.float16).float()
    numbers = ~expected.isnan()
    assert torch.equal(out.isnan(), ~numbers)
    assert torch.equal(out[numbers].view(torch.int32), expected[numbers].view(torch.int32))


INTEGERS = {
    "__umulhi(0xdeadbeefu, 0x12345678u)": 0xDEADBEEF * 0x12345678 >> 32,
    "__mulhi(-5, 0x40000000)": -5 * 0x40000000 >> 32,
    "__umul64hi(0xdeadbeefcafebabeull, 0x123456789abcdef0ull)": 0xDEADBEEFCAFEBABE * 0x123456789ABCDEF0 >> 64,
    "__popc(0xf0f1u)": 9, "__clz(1)": 31, "__clz(0)": 32, "__clzll(1)": 63, "__ffs(8)": 4, "__ffs(0)": 0, "__brev(6u)": 0x60000000,
    "__byte_perm(0x33221100u, 0x77665544u, 0x5140u)": 0x55114400, "__byte_perm(0x80u, 0u, 0x1908u)": 0x00008080,
    "__funnelshift_r(0x11223344u, 0x55667788u, 8)": 0x88112233, "__funnelshift_r(0x11223344u, 0x55667788u, 32)": 0x11223344,
    "__funnelshift_rc(0x11223344u, 0x55667788u, 32)": 0x55667788, "__funnelshift_l(0x11223344u, 0x55667788u, 8)": 0x66778811,
    "__funnelshift_lc(0x11223344u, 0x55667788u, 40)": 0x11223344,
    "min(-1, 1u)": 1, "max(-1, 1u)": 0xFFFFFFFF, "max(-1ll, 1ll)": 1, "abs(-3)": 3,
    "__float_as_uint(-0.0f)": 0x80000000, "__double_as_longlong(1.0)": 0x3FF0000000000000, "__double2hiint(1.0)": 0x3FF00000,
    "(long long)__hiloint2double(0x40080000, 0)": 3,
}  # fmt: skip


def test_integer_intrinsics() -> None:
    stores = "\n".join(f"out[{row}] = (long long)({expression});" for row, expression in enumerate(INTEGERS))
    out = torch.empty(len(INTEGERS), dtype=torch.int64)
    run_block(f'extern "C" __global__ void f(long long* out) {{ {stores} }}', [out])
    assert dict(zip(INTEGERS, out.tolist(), strict=True)) == INTEGERS


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        ((1, 1, 1), (65, 1, 1), "block .65, 1, 1. has 65 threads, allowed are 64"),
        ((0, 1, 1), (64, 1, 1), "grid is .0, 1, 1."),
        ((1, 65536, 1), (64, 1, 1), "grid is .1, 65536, 1."),
        ((1, 1, 1), (1, 1, 65), "block is .1, 1, 65."),
    ],
)
def test_a_launch_that_no_gpu_allows_is_refused(grid: tuple[int, int, int], block: tuple[int, int, int], message: str) -> None:
    x = torch.zeros(1)
    with pytest.raises(EmulatorError, match=message):
        run_on(build(VECTOR_ADD), "add", grid, block, [x, x, x, 0, 1.0])


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([1], "got 4 arguments, it takes 5"),
        ([1.5, 1.0], "argument 3 is 1.5, the kernel takes a long long"),
        ([1, None], "argument 4 is None, the kernel takes a double"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(args: list[float | None], message: str) -> None:
    x = torch.zeros(1)
    with pytest.raises(EmulatorError, match=message):
        run_on(build(VECTOR_ADD), "add", (1, 1, 1), (64, 1, 1), [x, x, x, *args])


def test_a_struct_by_value() -> None:
    source = """
        struct lists { const float* from[2]; float* to[2]; long long n; double scale; };
        extern "C" __global__ void __launch_bounds__(4) scale(const __grid_constant__ lists by_value, const int* which)
        {
            const int slot = which[blockIdx.x], i = threadIdx.x;
            if (i < by_value.n) by_value.to[slot][i] = by_value.from[slot][i] * (float)by_value.scale;
        }"""
    inputs, outputs = [torch.arange(3.0), torch.arange(3.0) + 10], [torch.zeros(3), torch.zeros(3)]
    which = torch.tensor([1, 0], dtype=torch.int32)
    run_on(build(source), "scale", (2, 1, 1), (4, 1, 1), [[*inputs, *outputs, 3, 2.0], which], outputs=outputs)
    assert [out.tolist() for out in outputs] == [[0.0, 2.0, 4.0], [20.0, 22.0, 24.0]]
    with pytest.raises(EmulatorError, match="0 bytes behind the end of the memory"):
        run_on(build(source), "scale", (2, 1, 1), (4, 1, 1), [[*inputs, *outputs, 4, 2.0], which], outputs=outputs)
    with pytest.raises(EmulatorError, match="argument 0 is 5, the kernel takes a struct"):
        run_on(build(source), "scale", (2, 1, 1), (4, 1, 1), [5, which])


def test_what_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(EmulatorError, match=r"kernel\.cu:2:.*error: 'cosine' was not declared"):
        build("""extern "C" __global__ void f(float* x)\n{ x[0] = cosine(x[0]); }""")
    with pytest.raises(EmulatorError, match="no kernel in the source"):
        build("__device__ void f() {}")
    with pytest.raises(EmulatorError, match="a kernel takes pointers, long long, double and structs of them, no other type"):
        build("""extern "C" __global__ void f(float* x, int n) {}""")


def test_a_missing_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    emulator._compiler.cache_clear()
    try:
        with pytest.raises(EmulatorError, match=r"g\+\+ was not found"):
            build(VECTOR_ADD)
    finally:
        emulator._compiler.cache_clear()


def test_the_shim_defines_what_the_prelude_guards() -> None:
    """The shim names, for each function that the prelude wraps around PTX, the same instruction; and all else compiles."""
    prelude = resources.files("wideload.emit.prelude")
    text = "\n\n".join(prelude.joinpath(file).read_text() for file in ("types.cuh", "math.cuh", "memory.cuh", "fp8.cuh"))
    shim = (emulator._HERE / "shim.h").read_text()
    wrapped = {}
    for guarded in re.findall(r"#ifdef __CUDACC__\n((?:(?!#ifdef).)*?)\n#endif\n(?=\n)", text, re.DOTALL):
        for function in re.split(r"^(?=DEVICE )", guarded, flags=re.MULTILINE)[1:]:
            wrapped[re.match(r"DEVICE .*?(\w+)\(", function)[1]] = re.search(r'asm\("([\w.]+)', function)[1]
    assert wrapped["ex2_approx"] == "ex2.approx.f32"
    assert wrapped == dict(re.findall(r"^[\w ]* (\w+)\([^)]*\);  // ([a-z]\w*\.[\w.]+)$", shim, re.MULTILINE))
    build(f'{text}\nextern "C" __global__ void f(float* x) {{}}')


def test_examples_of_the_docstrings() -> None:
    assert doctest.testmod(emulator, extraglobs={"torch": torch}).failed == 0
