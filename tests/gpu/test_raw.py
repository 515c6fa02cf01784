"""Hand-written kernels on a GPU: results, streams, devices, sizes, and their explanations with measured times."""

from __future__ import annotations

import pytest
import torch

import wideload as wl
from spoilt import Spoilt, spoilt_kernels

pytestmark = pytest.mark.gpu

SOURCE = """
extern "C" __global__ void axpy(const float* x, float* y, float a, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + y[i];
}
extern "C" __global__ void wait_and_set(int* y, long long clocks) {
    long long start = clock64();
    while (clock64() - start < clocks) {}
    *y = 1;
}
extern "C" __global__ void fill(unsigned char* y, long long n) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 7;
}
extern "C" __global__ void where(unsigned short* y) { y[threadIdx.y * 8 + threadIdx.x + 64 * blockIdx.y] = blockIdx.y * 100 + threadIdx.y; }
"""
AXPY = wl.raw(SOURCE, "axpy")


@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 4097, 100_003])
def test_results(n: int) -> None:
    x, y = (wl.random_tensor((n,), device="cuda", seed=seed) for seed in (0, 1))
    expected = (x.double() * 2.5 + y.double()).float()
    AXPY(x, y, 2.5, n)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_types_and_geometry() -> None:
    y = torch.zeros(3 * 64, dtype=torch.int16, device="cuda")
    wl.raw(SOURCE, "where", grid=(1, 3), block=(8, 8))(y)
    expected = torch.tensor([block * 100 + row for block in range(3) for row in range(8) for _ in range(8)], dtype=torch.int16)
    assert torch.equal(y.cpu(), expected)


def test_errors_are_raised_at_the_call_and_nothing_is_written() -> None:
    x, y = torch.ones(10, device="cuda"), torch.ones(10, device="cuda")
    for args, error in (
        ((x, y.double(), 1.0, 10), wl.DtypeError),
        ((x.cpu(), y, 1.0, 10), wl.DeviceError),
        ((x, y, 1.0, 2**63), wl.RangeError),
        ((x, y, 1.0), wl.LayoutError),
    ):
        with pytest.raises(error):
            AXPY(*args)
    torch.cuda.synchronize()
    assert torch.equal(y, torch.ones_like(y))


def test_too_many_registers_for_a_block_are_refused_by_the_driver() -> None:
    values = "".join(f"float v{k} = y[{k} * n];" for k in range(100))
    used = " + ".join(f"v{k} * v{99 - k}" for k in range(100))
    body = f"{{ {values} __syncthreads(); y[n] = {used}; }}"
    kernel = wl.raw(f'extern "C" __global__ void __launch_bounds__(256) f(float* y, int n) {body}', "f", grid=1, block=1024)
    if kernel.plan().registers <= 64:
        pytest.skip("the compiler found a way with 64 registers")
    with pytest.raises(wl.DeviceError, match=r"f: the driver refused a grid of 1 x 1 x 1 blocks of 1024 x 1 x 1 threads"):
        kernel(torch.zeros(1000, device="cuda"), 1)


def test_the_current_stream_is_used() -> None:
    y = torch.zeros(1, dtype=torch.int32, device="cuda")
    set_late = wl.raw(SOURCE, "wait_and_set", grid=1, block=1)
    set_late(y, 1)
    torch.cuda.synchronize()
    y.zero_()
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        set_late(y, 200_000_000)
    assert not side.query(), "it runs on the side stream"
    assert torch.cuda.current_stream().query(), "and not on the other"
    side.synchronize()
    assert y.item() == 1


def test_a_cuda_graph_captures_it() -> None:
    x, y = torch.ones(1000, device="cuda"), torch.zeros(1000, device="cuda")
    AXPY(x, y, 1.0, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        AXPY(x, y, 1.0, 1000)
    y.zero_()
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 2))


@pytest.mark.gpus(2)
def test_the_tensors_device_is_used() -> None:
    x, y = torch.ones(1000, device="cuda:1"), torch.zeros(1000, device="cuda:1")
    AXPY(x, y, 3.0, 1000)
    assert torch.equal(y, torch.full_like(y, 3))
    with pytest.raises(wl.DeviceError, match="argument y is on cuda:0, x on cuda:1"):
        AXPY(x, y.to("cuda:0"), 3.0, 1000)


@pytest.mark.big(8)
def test_more_elements_than_32_bits_count() -> None:
    n = 2**32 + 1000
    y = torch.zeros(n, dtype=torch.uint8, device="cuda")
    wl.raw(SOURCE, "fill")(y, n)
    assert (int(y[0]), int(y[2**31]), int(y[-1])) == (7, 7, 7)
    assert int((y[-2000:] == 7).sum()) == 2000


def test_it_is_benched_and_explained() -> None:
    n = 2**22
    x, y = (wl.random_tensor((n,), device="cuda", seed=seed) for seed in (0, 1))
    before = y.clone()
    explanation = AXPY.explain(x, y, 2.0, n)
    assert explanation.measured_time is not None
    assert explanation.measured_time.value > 0
    assert explanation.minimal.value == 12 * n
    assert torch.equal(y, before), "measured on copies"
    result = wl.bench(AXPY, x, y, 2.0, n, against={"torch": lambda x, y, a, n: y.add_(x, alpha=a)})
    assert result.subject.time_us is not None
    assert wl.explain(torch.exp, x).measured_time is not None


@pytest.mark.parametrize("spoilt", spoilt_kernels(132), ids=lambda spoilt: spoilt.name)
def test_spoilt_kernels_run(spoilt: Spoilt) -> None:
    arguments = spoilt.arguments(lambda *shape, dtype=torch.float32: wl.random_tensor(shape, dtype, device="cuda"))
    spoilt.kernel(*arguments)
    torch.cuda.synchronize()
