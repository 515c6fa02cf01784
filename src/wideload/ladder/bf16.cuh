// The part of cuda_bf16.h that the rungs use, under its names. nvcc has the header itself; NVRTC comes without headers.
#ifndef WIDELOAD_LADDER_BF16
#define WIDELOAD_LADDER_BF16

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__)
#include <cuda_bf16.h>
#else
struct __nv_bfloat16 {
    unsigned short bits;
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

__device__ __forceinline__ float __bfloat162float(__nv_bfloat16 value) { return __uint_as_float((unsigned)value.bits << 16); }

__device__ __forceinline__ __nv_bfloat16 __float2bfloat16_rn(float value)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short rounded;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(rounded) : "f"(value));
    return {rounded};
#else
    // To nearest, ties to even: half of the last bit kept, and that bit, carry into it. A NaN must not carry into infinity.
    unsigned word = __float_as_uint(value);
    return {(unsigned short)(value != value ? 0x7fff : (word + 0x7fff + (word >> 16 & 1)) >> 16)};
#endif
}

__device__ __forceinline__ __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    unsigned short sum;  // a * 1 + b: an addition of its own came with sm_90
    asm("fma.rn.bf16 %0, %1, %2, %3;" : "=h"(sum) : "h"(a.bits), "h"((unsigned short)0x3f80), "h"(b.bits));
    return {sum};
#else
    return __float2bfloat16_rn(__bfloat162float(a) + __bfloat162float(b));
#endif
}

__device__ __forceinline__ float2 __bfloat1622float2(__nv_bfloat162 pair)
{
    return make_float2(__bfloat162float(pair.x), __bfloat162float(pair.y));
}

__device__ __forceinline__ __nv_bfloat162 __floats2bfloat162_rn(float x, float y)
{
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
#endif

// Eight bf16 in the 16 bytes that one access moves.
struct __align__(16) Bf16x8 {
    __nv_bfloat162 pairs[4];
};

// `compute(a, b)` in float for each of the eight, rounded once.
template <class Compute> __device__ __forceinline__ Bf16x8 combine(Bf16x8 a, Bf16x8 b, Compute compute)
{
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        float2 left = __bfloat1622float2(a.pairs[pair]), right = __bfloat1622float2(b.pairs[pair]);
        a.pairs[pair] = __floats2bfloat162_rn(compute(left.x, right.x), compute(left.y, right.y));
    }
    return a;
}

#endif
