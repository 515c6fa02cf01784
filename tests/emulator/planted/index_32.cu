// The index is an int: beyond 2^31 elements it is negative, and passes the check.
// wideload: --against cast f32[n] bf16 --rtol 0
#include "../../../src/wideload/ladder/bf16.cuh"

extern "C" __global__ void cast(const float* __restrict__ x, __nv_bfloat16* __restrict__ out, long long n)
{
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = __float2bfloat16_rn(x[i]);
}
