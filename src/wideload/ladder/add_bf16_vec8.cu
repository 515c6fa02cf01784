// Eight elements in one access of 16 bytes. All three pointers must be multiples of 16: a slice x[1:] is not, and is refused.
// Block 0 finishes the n % 8 elements behind the last vector. Expect the wall.
#include "bf16.cuh"

__device__ __forceinline__ float add(float x, float b) { return x + b; }

extern "C" __global__ void add_bf16_vec8(
    const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ b, __nv_bfloat16* __restrict__ y, long long n)
{
    long long num_vectors = n / 8, i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < num_vectors) ((Bf16x8*)y)[i] = combine(((const Bf16x8*)x)[i], ((const Bf16x8*)b)[i], add);

    long long last = 8 * num_vectors + threadIdx.x;
    if (blockIdx.x == 0 && last < n) y[last] = __float2bfloat16_rn(__bfloat162float(x[last]) + __bfloat162float(b[last]));
}
