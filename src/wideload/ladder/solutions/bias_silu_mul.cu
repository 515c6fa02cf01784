// silu(x + bias) * y: eight bf16 of a row in one access, 6 bytes an element.
// wideload: --against bias_silu_mul "bf16[rows, cols]" bf16[cols] "bf16[rows, cols]" --items 8
#include "../bf16.cuh"

__device__ __forceinline__ float silu(float v) { return v / (1.0f + __expf(-v)); }

extern "C" __global__ void bias_silu_mul(
    const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ bias, const __nv_bfloat16* __restrict__ y,
    __nv_bfloat16* __restrict__ out, long long rows, long long cols)
{
    long long n = rows * cols, first = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= n) return;
    bool is_small = n <= 0xffffffffLL;  // a remainder of 32 bits is several times as fast
    long long column = is_small ? (unsigned)first % (unsigned)cols : first % cols;
    bool is_aligned = (((size_t)x | (size_t)bias | (size_t)y | (size_t)out) & 15) == 0 && cols % 8 == 0;
    if (is_aligned) {
        Bf16x8 xs = *(const Bf16x8*)(x + first), shifts = *(const Bf16x8*)(bias + column), ys = *(const Bf16x8*)(y + first);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float2 v = __bfloat1622float2(xs.pairs[pair]), b = __bfloat1622float2(shifts.pairs[pair]), w = __bfloat1622float2(ys.pairs[pair]);
            xs.pairs[pair] = __floats2bfloat162_rn(silu(v.x + b.x) * w.x, silu(v.y + b.y) * w.y);
        }
        *(Bf16x8*)(out + first) = xs;
    } else {
        for (long long i = first; i < first + 8 && i < n; ++i, column = column + 1 == cols ? 0 : column + 1) {
            out[i] = __float2bfloat16_rn(silu(__bfloat162float(x[i]) + __bfloat162float(bias[column])) * __bfloat162float(y[i]));
        }
    }
}
