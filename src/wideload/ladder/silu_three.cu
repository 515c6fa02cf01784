// silu(x + b) * y as three kernels, each at the wall by itself: 6 + 4 + 6 = 16 bytes an element. What is done in place saves none.
#include "bf16.cuh"

__device__ __forceinline__ float add(float x, float b) { return x + b; }
__device__ __forceinline__ float silu(float x, float) { return x / (1.0f + __expf(-x)); }
__device__ __forceinline__ float multiply(float x, float y) { return x * y; }

extern "C" __global__ void silu_add(
    const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ b, __nv_bfloat16* __restrict__ out, long long n)
{
    long long num_vectors = n / 8, i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_vectors) ((Bf16x8*)out)[i] = combine(((const Bf16x8*)x)[i], ((const Bf16x8*)b)[i], add);

    long long last = 8 * num_vectors + threadIdx.x;
    if (blockIdx.x == 0 && last < n) out[last] = __float2bfloat16_rn(add(__bfloat162float(x[last]), __bfloat162float(b[last])));
}

extern "C" __global__ void silu_in_place(__nv_bfloat16* out, long long n)
{
    long long num_vectors = n / 8, i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_vectors) {
        Bf16x8 values = ((Bf16x8*)out)[i];
        ((Bf16x8*)out)[i] = combine(values, values, silu);
    }
    long long last = 8 * num_vectors + threadIdx.x;
    if (blockIdx.x == 0 && last < n) out[last] = __float2bfloat16_rn(silu(__bfloat162float(out[last]), 0.0f));
}

extern "C" __global__ void silu_multiply(const __nv_bfloat16* __restrict__ y, __nv_bfloat16* __restrict__ out, long long n)
{
    long long num_vectors = n / 8, i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_vectors) ((Bf16x8*)out)[i] = combine(((Bf16x8*)out)[i], ((const Bf16x8*)y)[i], multiply);

    long long last = 8 * num_vectors + threadIdx.x;
    if (blockIdx.x == 0 && last < n) out[last] = __float2bfloat16_rn(multiply(__bfloat162float(out[last]), __bfloat162float(y[last])));
}
