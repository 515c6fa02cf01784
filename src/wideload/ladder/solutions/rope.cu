// Four pairs of bf16 in one access of 16 bytes, and their four cosines and sines in one each.
// wideload: --against rope "bf16[1, tokens, heads, 64]" "f32[tokens, 32]" "f32[tokens, 32]" interleaved=true --items 8
#include "../bf16.cuh"

__device__ __forceinline__ float2 turn(float2 v, float cosine, float sine)
{
    return make_float2(v.x * cosine - v.y * sine, v.y * cosine + v.x * sine);
}

extern "C" __global__ void rope(
    const __nv_bfloat16* __restrict__ x, const float* __restrict__ cosines, const float* __restrict__ sines,
    __nv_bfloat16* __restrict__ out, long long tokens, long long heads)
{
    long long n = tokens * heads * 64, first = 8 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first >= n) return;
    bool is_small = n <= 0xffffffffLL;
    long long row = first / 64, token = is_small ? (unsigned)row / (unsigned)heads : row / heads;
    long long angle = token * 32 + first % 64 / 2;  // 64 is a multiple of 8: the four pairs are of one head
    bool is_aligned = (((size_t)x | (size_t)cosines | (size_t)sines | (size_t)out) & 15) == 0;
    if (is_aligned) {
        Bf16x8 pairs = *(const Bf16x8*)(x + first);
        float4 c = *(const float4*)(cosines + angle), s = *(const float4*)(sines + angle);
        float cs[4] = {c.x, c.y, c.z, c.w}, ss[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            float2 turned = turn(__bfloat1622float2(pairs.pairs[pair]), cs[pair], ss[pair]);
            pairs.pairs[pair] = __floats2bfloat162_rn(turned.x, turned.y);
        }
        *(Bf16x8*)(out + first) = pairs;
    } else {
        for (int pair = 0; pair < 4; ++pair) {
            long long i = first + 2 * pair;
            float2 v = make_float2(__bfloat162float(x[i]), __bfloat162float(x[i + 1]));
            float2 turned = turn(v, cosines[angle + pair], sines[angle + pair]);
            out[i] = __float2bfloat16_rn(turned.x);
            out[i + 1] = __float2bfloat16_rn(turned.y);
        }
    }
}
