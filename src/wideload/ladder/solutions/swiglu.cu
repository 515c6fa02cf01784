// Eight bf16 in one access of 16 bytes, computed in float and rounded once.
// wideload: --against swiglu bf16[n] bf16[n] --items 8
#include "../bf16.cuh"

__device__ __forceinline__ float silu_mul(float gate, float up) { return gate / (1.0f + __expf(-gate)) * up; }

extern "C" __global__ void swiglu(
    const __nv_bfloat16* __restrict__ gate, const __nv_bfloat16* __restrict__ up, __nv_bfloat16* __restrict__ out, long long n)
{
    long long first = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    bool is_aligned = (((size_t)gate | (size_t)up | (size_t)out) & 15) == 0;
    if (is_aligned && first + 8 <= n) {
        *(Bf16x8*)(out + first) = combine(*(const Bf16x8*)(gate + first), *(const Bf16x8*)(up + first), silu_mul);
    } else {
        for (long long i = first; i < first + 8 && i < n; ++i) {
            out[i] = __float2bfloat16_rn(silu_mul(__bfloat162float(gate[i]), __bfloat162float(up[i])));
        }
    }
}
