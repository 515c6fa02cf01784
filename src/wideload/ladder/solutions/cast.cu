// A thread reads two vectors of four floats and writes one of eight bf16.
// wideload: --against cast f32[n] bf16 --rtol 0 --items 8
#include "../bf16.cuh"

extern "C" __global__ void cast(const float* __restrict__ x, __nv_bfloat16* __restrict__ out, long long n)
{
    long long first = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    bool is_aligned = (((size_t)x | (size_t)out) & 15) == 0;
    if (is_aligned && first + 8 <= n) {
        float4 low = ((const float4*)(x + first))[0], high = ((const float4*)(x + first))[1];
        Bf16x8 rounded = {{__floats2bfloat162_rn(low.x, low.y), __floats2bfloat162_rn(low.z, low.w),
                           __floats2bfloat162_rn(high.x, high.y), __floats2bfloat162_rn(high.z, high.w)}};
        *(Bf16x8*)(out + first) = rounded;
    } else {
        for (long long i = first; i < first + 8 && i < n; ++i) out[i] = __float2bfloat16_rn(x[i]);
    }
}
