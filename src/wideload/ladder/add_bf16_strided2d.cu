// Any strides, in elements; 0 broadcasts. The output is dense: its index is split into a row and a column by a 64-bit division.
// With a column stride of 1, warps stay coalesced. Of a transpose, each lane's 2 bytes lie in a sector of their own: 1/16 is used.
#include "bf16.cuh"

extern "C" __global__ void __launch_bounds__(256) add_bf16_strided2d(
    const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ b, __nv_bfloat16* __restrict__ y,
    long long rows, long long columns, long long x_row, long long x_column, long long b_row, long long b_column)
{
    long long n = rows * columns, num_threads = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += num_threads) {
        long long row = i / columns, column = i - row * columns;
        float left = __bfloat162float(x[row * x_row + column * x_column]);
        y[i] = __float2bfloat16_rn(left + __bfloat162float(b[row * b_row + column * b_column]));
    }
}
