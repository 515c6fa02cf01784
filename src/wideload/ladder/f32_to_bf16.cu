// A cast: 4 bytes in, 2 out, rounded to nearest even.
// Input and output move in accesses of different width.
#include "bf16.cuh"

extern "C" __global__ void f32_to_bf16(const float* __restrict__ x, __nv_bfloat16* __restrict__ y, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = __float2bfloat16_rn(x[i]);
}
