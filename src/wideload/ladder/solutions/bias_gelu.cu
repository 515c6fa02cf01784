// Eight bf16 of a row in one access; rows of any other length, and memory that is not aligned, by single elements.
// wideload: --against bias_gelu "bf16[rows, cols]" bf16[cols] approximate=tanh --items 8
#include "../bf16.cuh"

// v * sigmoid(2u), which is v / 2 * (1 + tanh(u)): one exponential instead of a tanh.
__device__ __forceinline__ float gelu(float x, float bias)
{
    float v = x + bias;
    float twice = 1.5957691216f * v * (1.0f + 0.044715f * v * v);  // 2 sqrt(2 / pi)
    return v / (1.0f + __expf(-twice));
}

extern "C" __global__ void bias_gelu(
    const __nv_bfloat16* __restrict__ x, const __nv_bfloat16* __restrict__ bias, __nv_bfloat16* __restrict__ out, long long rows,
    long long cols)
{
    long long n = rows * cols, first = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= n) return;
    bool is_small = n <= 0xffffffffLL;  // a remainder of 32 bits is several times as fast
    long long column = is_small ? (unsigned)first % (unsigned)cols : first % cols;
    bool is_aligned = (((size_t)x | (size_t)bias | (size_t)out) & 15) == 0 && cols % 8 == 0;
    if (is_aligned) {
        *(Bf16x8*)(out + first) = combine(*(const Bf16x8*)(x + first), *(const Bf16x8*)(bias + column), gelu);
    } else {
        for (long long i = first; i < first + 8 && i < n; ++i, column = column + 1 == cols ? 0 : column + 1) {
            out[i] = __float2bfloat16_rn(gelu(__bfloat162float(x[i]), __bfloat162float(bias[column])));
        }
    }
}
