// The types of elements in memory and their conversions. Blocks are separated by blank lines; a kernel's source holds
// only the blocks that it names, directly or through another block. No header is included: cuda_bf16.h alone would cost
// 100 ms of NVRTC. What g++ lacks (PTX) stands between __CUDACC__ guards, and the emulator brings its own.

#define DEVICE static __device__ __forceinline__

struct f16 { unsigned short bits; };

struct bf16 { unsigned short bits; };

struct boolean { unsigned char bits; };

// A number whose making the compiler does not look through.
DEVICE unsigned settled(unsigned x)
{
#ifdef __CUDACC__
    asm("" : "+r"(x));
#endif
    return x;
}

// PTX: fp32 to fp16 bits, round to nearest even; fp16 bits to fp32, exact.
#ifdef __CUDACC__
DEVICE unsigned short f16_bits(float x) { unsigned short bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); return bits; }
DEVICE float f16_value(unsigned short bits) { float x; asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits)); return x; }
#endif

// PTX: two fp32 to two bf16 in one word, `low` in the low half; sm_75 has no such instruction and rounds with integers.
#ifdef __CUDACC__
DEVICE unsigned bf16_word(float low, float high)
{
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    const unsigned a = __float_as_uint(low), b = __float_as_uint(high);
    const unsigned x = low != low ? 0x7fffu : (a + 0x7fffu + ((a >> 16) & 1u)) >> 16;
    const unsigned y = high != high ? 0x7fffu : (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
    return x | y << 16;
#endif
}
#endif

// PTX: two fp32 to two fp16 in one word; sm_75 packs two single conversions.
#ifdef __CUDACC__
DEVICE unsigned f16_word(float low, float high)
{
#if __CUDA_ARCH__ >= 800
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
#else
    return f16_bits(low) | (unsigned)f16_bits(high) << 16;
#endif
}
#endif

// widen: an element in memory to the type that arithmetic uses. Any non-zero byte of a bool is true.
DEVICE float widen(f16 x) { return f16_value(x.bits); }
DEVICE float widen(bf16 x) { return __uint_as_float((unsigned)x.bits << 16); }
DEVICE bool widen(boolean x) { return x.bits != 0; }
template <class T> DEVICE T widen(T x) { return x; }

// narrow: the other way, round to nearest even.
template <class T> struct narrow_to { template <class C> DEVICE T from(C x) { return x; } };
template <> struct narrow_to<f16> { DEVICE f16 from(float x) { return f16{f16_bits(x)}; } };
template <> struct narrow_to<bf16> { DEVICE bf16 from(float x) { return bf16{(unsigned short)bf16_word(x, 0.0f)}; } };
template <> struct narrow_to<boolean> { DEVICE boolean from(bool x) { return boolean{x}; } };

// A half's value in fp32: an explicit .to(), or every step of numerics="eager".
DEVICE float round_f16(float x) { return f16_value(f16_bits(x)); }
DEVICE float round_bf16(float x) { return __uint_as_float(bf16_word(0.0f, x) & 0xffff0000u); }
