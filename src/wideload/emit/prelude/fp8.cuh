// fp8: bytes in memory, fp32 in arithmetic. Conversions are members and friends, so that kernels without fp8 hold none of this. As in
// torch, an fp32 value is rounded once, to nearest even.

// The bits of |x|, below the format's limit, as one of `mantissa` bits below the point and an exponent of this bias. Adding a power of
// two of which the last place is the format's smallest number rounds to a multiple of that.
template <int mantissa, int bias> DEVICE unsigned fp8_magnitude(unsigned bits)
{
    const unsigned shift = 23 - mantissa, power = (unsigned)(151 - bias - mantissa) << 23;
    const unsigned subnormal = __float_as_uint(__uint_as_float(bits) + __uint_as_float(power)) - power;
    const unsigned normal = ((bits + (1u << (shift - 1)) - 1 + (bits >> shift & 1u)) >> shift) - ((unsigned)(127 - bias) << mantissa);
    return bits < (unsigned)(128 - bias) << 23 ? subnormal : normal;
}

// The value of seven bits: as fp32 they are too small by a power of two, subnormals too.
template <int mantissa, int bias> DEVICE float fp8_value(unsigned bits)
{
    const float value = __uint_as_float((bits & 0x7fu) << (23 - mantissa)) * __uint_as_float((unsigned)(254 - bias) << 23);
    return bits & 0x80u ? -value : value;
}

// PTX of sm_89 and later: two fp32 to two fp8, `low` in the low byte, saturated; two e4m3 to two fp16, exact.
#ifdef __CUDACC__
#if __CUDA_ARCH__ >= 890
DEVICE unsigned e4m3_saturated(float low, float high) { unsigned short word; asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(word) : "f"(high), "f"(low)); return word; }
DEVICE unsigned e5m2_saturated(float low, float high) { unsigned short word; asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(word) : "f"(high), "f"(low)); return word; }
DEVICE unsigned e4m3_halves(unsigned word) { unsigned halves; asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)word)); return halves; }
#endif
#endif

// Beyond 464, half way from the largest number, 448, to what would be the next, torch before 2.13 gives NaN, all bits of the exponent
// and the mantissa, and later ones the largest number, which is a bit less; `saturates` says which.
template <bool saturates> DEVICE unsigned e4m3fn_word(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    const unsigned word = e4m3_saturated(low, high);
    return saturates ? word : word | (fabsf(low) <= 464.0f ? 0u : 0x7fu) | (fabsf(high) <= 464.0f ? 0u : 0x7f00u);
#else
    const unsigned a = __float_as_uint(low) & 0x7fffffffu, b = __float_as_uint(high) & 0x7fffffffu, limit = 0x43e80000u;
    const unsigned infinity = 0x7f800000u, above = saturates ? 0x7eu : 0x7fu, p = fp8_magnitude<3, 7>(a), q = fp8_magnitude<3, 7>(b);
    const unsigned x = a > infinity ? 0x7fu : a > limit ? above : p, y = b > infinity ? 0x7fu : b > limit ? above : q;
    return x | y << 8 | (__float_as_uint(low) >> 24 & 0x80u) | (__float_as_uint(high) >> 16 & 0x8000u);
#endif
}

DEVICE float e4m3fn_value(unsigned bits)
{
#if __CUDA_ARCH__ >= 890
    return f16_value((unsigned short)e4m3_halves(bits));
#else
    return (bits & 0x7fu) == 0x7fu ? __uint_as_float(bits << 24 | 0x7fffffffu) : fp8_value<3, 7>(bits);
#endif
}

// From 61440 on, half way from the largest number, 57344, to the next power of two: infinity, which follows the largest number.
DEVICE unsigned e5m2_word(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    return e5m2_saturated(low, high) + (fabsf(low) >= 61440.0f ? 1u : 0u) + (fabsf(high) >= 61440.0f ? 0x100u : 0u);
#else
    const unsigned a = __float_as_uint(low) & 0x7fffffffu, b = __float_as_uint(high) & 0x7fffffffu, limit = 0x47700000u, infinity = 0x7f800000u;
    const unsigned p = fp8_magnitude<2, 15>(a), q = fp8_magnitude<2, 15>(b);
    const unsigned x = a > infinity ? 0x7fu : a >= limit ? 0x7cu : p, y = b > infinity ? 0x7fu : b >= limit ? 0x7cu : q;
    return x | y << 8 | (__float_as_uint(low) >> 24 & 0x80u) | (__float_as_uint(high) >> 16 & 0x8000u);
#endif
}

// The types without negative zero, whose bits are NaN: what is too large carries into them, or is found too large before.
template <int mantissa, int bias, unsigned limit> DEVICE unsigned fnuz_bits(float x)
{
    const unsigned a = __float_as_uint(x) & 0x7fffffffu;
    if (a >= limit) return 0x80u;
    const unsigned magnitude = fp8_magnitude<mantissa, bias>(a);
    return magnitude == 0 ? 0u : magnitude | (__float_as_uint(x) >> 24 & 0x80u);
}

template <int mantissa, int bias> DEVICE float fnuz_value(unsigned bits) { return bits == 0x80u ? __uint_as_float(0x7fffffffu) : fp8_value<mantissa, bias>(bits); }

// The exponent of |x| alone, rounded as a significand of one bit is: 1.5 up, and of subnormals what is above 2^-127.
DEVICE unsigned e8m0fnu_bits(float x)
{
    const unsigned a = __float_as_uint(x) & 0x7fffffffu, exponent = a >> 23, fraction = a & 0x7fffffu;
    return exponent == 255 ? 255u : exponent + (fraction > 0x400000u || (fraction == 0x400000u && exponent > 0));
}

DEVICE float e8m0fnu_value(unsigned bits) { return __uint_as_float(bits == 0 ? 0x00400000u : bits == 255 ? 0x7fffffffu : bits << 23); }

template <bool saturates> struct e4m3fn {
    unsigned char bits;
    e4m3fn() = default;
    __device__ __forceinline__ e4m3fn(float x) : bits((unsigned char)e4m3fn_word<saturates>(x, 0.0f)) {}
    friend __device__ __forceinline__ float widen(e4m3fn x) { return e4m3fn_value(x.bits); }
    template <int N> friend __device__ __forceinline__ void pack(vec<e4m3fn, N, true>& v, const float (&x)[N])
    {
#pragma unroll
        for (int k = 0; k < N; k += 4) v.words[k / 4] = e4m3fn_word<saturates>(x[k], x[k + 1]) | e4m3fn_word<saturates>(x[k + 2], x[k + 3]) << 16;
    }
};

struct e5m2 {
    unsigned char bits;
    e5m2() = default;
    __device__ __forceinline__ e5m2(float x) : bits((unsigned char)e5m2_word(x, 0.0f)) {}
    friend __device__ __forceinline__ float widen(e5m2 x) { return f16_value((unsigned short)(x.bits << 8)); }
    template <int N> friend __device__ __forceinline__ void pack(vec<e5m2, N, true>& v, const float (&x)[N])
    {
#pragma unroll
        for (int k = 0; k < N; k += 4) v.words[k / 4] = e5m2_word(x[k], x[k + 1]) | e5m2_word(x[k + 2], x[k + 3]) << 16;
    }
};

// For values that are limited to the largest number, or shall be.
DEVICE unsigned e5m2_limited_word(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    return e5m2_saturated(low, high);
#else
    return e5m2_word(low != low ? low : fminf(fmaxf(low, -57344.0f), 57344.0f), high != high ? high : fminf(fmaxf(high, -57344.0f), 57344.0f));
#endif
}

struct e5m2_limited {
    unsigned char bits;
    e5m2_limited() = default;
    __device__ __forceinline__ e5m2_limited(float x) : bits((unsigned char)e5m2_limited_word(x, 0.0f)) {}
    template <int N> friend __device__ __forceinline__ void pack(vec<e5m2_limited, N, true>& v, const float (&x)[N])
    {
#pragma unroll
        for (int k = 0; k < N; k += 4) v.words[k / 4] = e5m2_limited_word(x[k], x[k + 1]) | e5m2_limited_word(x[k + 2], x[k + 3]) << 16;
    }
};

struct e4m3fnuz {
    unsigned char bits;
    e4m3fnuz() = default;
    __device__ __forceinline__ e4m3fnuz(float x) : bits((unsigned char)fnuz_bits<3, 8, 0x43800000u>(x)) {}
    friend __device__ __forceinline__ float widen(e4m3fnuz x) { return fnuz_value<3, 8>(x.bits); }
};

struct e5m2fnuz {
    unsigned char bits;
    e5m2fnuz() = default;
    __device__ __forceinline__ e5m2fnuz(float x) : bits((unsigned char)fnuz_bits<2, 16, 0x47800000u>(x)) {}
    friend __device__ __forceinline__ float widen(e5m2fnuz x) { return fnuz_value<2, 16>(x.bits); }
};

struct e8m0fnu {
    unsigned char bits;
    e8m0fnu() = default;
    __device__ __forceinline__ e8m0fnu(float x) : bits((unsigned char)e8m0fnu_bits(x)) {}
    friend __device__ __forceinline__ float widen(e8m0fnu x) { return e8m0fnu_value(x.bits); }
};

// A value as fp8 holds it: an explicit .to().
template <bool saturates> DEVICE float round_e4m3fn(float x) { return widen(e4m3fn<saturates>(x)); }

DEVICE float round_e5m2(float x) { return widen(e5m2(x)); }

DEVICE float round_e4m3fnuz(float x) { return widen(e4m3fnuz(x)); }

DEVICE float round_e5m2fnuz(float x) { return widen(e5m2fnuz(x)); }

DEVICE float round_e8m0fnu(float x) { return widen(e8m0fnu(x)); }
