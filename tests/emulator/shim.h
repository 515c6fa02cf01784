// What CUDA gives every kernel and g++ does not: force-included before the emitted text, which is compiled unchanged.
// Declarations only, and no standard header: what NVRTC would refuse is refused here too, and a kernel compiles in a
// fraction of a second. The definitions are in runtime.cpp, with the source of every error bound.
#pragma once

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A section of its own, so that the runtime can overwrite it before every block: nothing may live on in shared memory.
#define __shared__ static __attribute__((section("emulator_shared")))

typedef decltype(sizeof(0)) size_t;

#define EMULATOR_VECTORS(T, name) \
    struct name##2 { T x, y; } __attribute__((aligned(2 * sizeof(T)))); \
    struct name##3 { T x, y, z; }; \
    struct name##4 { T x, y, z, w; } __attribute__((aligned(4 * sizeof(T) > 16 ? 16 : 4 * sizeof(T)))); \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTORS(signed char, char)
EMULATOR_VECTORS(unsigned char, uchar)
EMULATOR_VECTORS(short, short)
EMULATOR_VECTORS(unsigned short, ushort)
EMULATOR_VECTORS(int, int)
EMULATOR_VECTORS(unsigned, uint)
EMULATOR_VECTORS(long long, longlong)
EMULATOR_VECTORS(unsigned long long, ulonglong)
EMULATOR_VECTORS(float, float)
EMULATOR_VECTORS(double, double)
#undef EMULATOR_VECTORS

// In a namespace, so that no name meets the C library's; the kernel finds them as CUDA's global ones.
namespace device {

extern uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

// Bits.
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline long long __double_as_longlong(double x) { return __builtin_bit_cast(long long, x); }
inline double __longlong_as_double(long long x) { return __builtin_bit_cast(double, x); }
inline int __double2hiint(double x) { return (int)(__double_as_longlong(x) >> 32); }
inline int __double2loint(double x) { return (int)__double_as_longlong(x); }
inline double __hiloint2double(int high, int low)
{
    return __longlong_as_double((long long)((unsigned long long)(unsigned)high << 32 | (unsigned)low));
}

// Integers.
inline unsigned __umulhi(unsigned x, unsigned y) { return (unsigned)((unsigned long long)x * y >> 32); }
inline int __mulhi(int x, int y) { return (int)((long long)x * y >> 32); }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y)
{
    return (unsigned long long)((unsigned __int128)x * y >> 64);
}
inline long long __mul64hi(long long x, long long y) { return (long long)((__int128)x * y >> 64); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
unsigned __brev(unsigned);
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector);
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift)
{
    return (unsigned)(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? high : __funnelshift_r(low, high, shift);
}
inline unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned shift)
{
    return shift >= 32 ? low : __funnelshift_l(low, high, shift);
}
inline int abs(int x) { return __builtin_abs(x); }
inline long long abs(long long x) { return __builtin_llabs(x); }
inline long long llabs(long long x) { return __builtin_llabs(x); }
inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x < y ? y : x; }
inline unsigned min(unsigned x, unsigned y) { return x < y ? x : y; }
inline unsigned max(unsigned x, unsigned y) { return x < y ? y : x; }
inline unsigned min(int x, unsigned y) { return min((unsigned)x, y); }
inline unsigned max(int x, unsigned y) { return max((unsigned)x, y); }
inline unsigned min(unsigned x, int y) { return min(x, (unsigned)y); }
inline unsigned max(unsigned x, int y) { return max(x, (unsigned)y); }
inline long long min(long long x, long long y) { return x < y ? x : y; }
inline long long max(long long x, long long y) { return x < y ? y : x; }
inline unsigned long long min(unsigned long long x, unsigned long long y) { return x < y ? x : y; }
inline unsigned long long max(unsigned long long x, unsigned long long y) { return x < y ? y : x; }

// Conversions that saturate: float or double to an integer, by truncation, to nearest even, down, up.
#define EMULATOR_TO_INTEGER(from, F, to, T) \
    T __##from##2##to##_rz(F); \
    T __##from##2##to##_rn(F); \
    T __##from##2##to##_rd(F); \
    T __##from##2##to##_ru(F);
EMULATOR_TO_INTEGER(float, float, int, int)
EMULATOR_TO_INTEGER(float, float, uint, unsigned)
EMULATOR_TO_INTEGER(float, float, ll, long long)
EMULATOR_TO_INTEGER(float, float, ull, unsigned long long)
EMULATOR_TO_INTEGER(double, double, int, int)
EMULATOR_TO_INTEGER(double, double, uint, unsigned)
EMULATOR_TO_INTEGER(double, double, ll, long long)
EMULATOR_TO_INTEGER(double, double, ull, unsigned long long)
#undef EMULATOR_TO_INTEGER
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline float __ll2float_rn(long long x) { return (float)x; }
inline float __ull2float_rn(unsigned long long x) { return (float)x; }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return (double)x; }
inline double __ull2double_rn(unsigned long long x) { return (double)x; }
inline float __double2float_rn(double x) { return (float)x; }

// One thread of one block runs at a time, to its next barrier or its end.
inline unsigned atomicMax(unsigned* p, unsigned x) { const unsigned old = *p; *p = max(old, x); return old; }
inline unsigned long long atomicMax(unsigned long long* p, unsigned long long x) { const unsigned long long old = *p; *p = max(old, x); return old; }

template <class T> inline T __ldca(const T* p) { return *p; }  // which may be old on a GPU: this is what it was at the latest
template <class T> inline void __stwb(T* p, T x) { *p = x; }  // a store that may stay in the caches, as every store may

inline int __vimax_s32_relu(int x, int y) { return x > y ? (x > 0 ? x : 0) : (y > 0 ? y : 0); }

// The PTX that the prelude wraps, under the prelude's names.
unsigned short f16_bits(float);  // cvt.rn.f16.f32
float f16_value(unsigned short);  // cvt.f32.f16
unsigned f16_word(float low, float high);  // cvt.rn.f16x2.f32
unsigned bf16_word(float low, float high);  // cvt.rn.bf16x2.f32
unsigned e4m3_saturated(float low, float high);  // cvt.rn.satfinite.e4m3x2.f32
unsigned e5m2_saturated(float low, float high);  // cvt.rn.satfinite.e5m2x2.f32
unsigned e4m3_halves(unsigned);  // cvt.rn.f16x2.e4m3x2
float ex2_approx(float);  // ex2.approx.f32
float ex2_approx_ftz(float);  // ex2.approx.ftz.f32
float lg2_approx(float);  // lg2.approx.ftz.f32
float rcp_approx(float);  // rcp.approx.ftz.f32
float div_full(float, float);  // div.full.f32
float sqrt_approx(float);  // sqrt.approx.f32

// Correctly rounded.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dsub_rn(double x, double y) { return x - y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return __builtin_sqrt(x); }
float __fmaf_rn(float, float, float);
double __fma_rn(double, double, double);
float __saturatef(float);

// Approximate, within CUDA's stated bounds, but the last, which is correctly rounded.
float __fdividef(float, float);
float __expf(float);
float __exp10f(float);
float __logf(float);
float __log2f(float);
float __log10f(float);
float __frsqrt_rn(float);

// The math library. CUDA declares each for float, under both names, and for double.
#define EMULATOR_UNARY(name) \
    float name##f(float); \
    double name(double); \
    inline float name(float x) { return name##f(x); }
#define EMULATOR_BINARY(name) \
    float name##f(float, float); \
    double name(double, double); \
    inline float name(float x, float y) { return name##f(x, y); }
EMULATOR_UNARY(exp) EMULATOR_UNARY(exp2) EMULATOR_UNARY(exp10) EMULATOR_UNARY(expm1)
EMULATOR_UNARY(log) EMULATOR_UNARY(log2) EMULATOR_UNARY(log10) EMULATOR_UNARY(log1p)
EMULATOR_UNARY(sin) EMULATOR_UNARY(cos) EMULATOR_UNARY(tan) EMULATOR_UNARY(asin) EMULATOR_UNARY(acos) EMULATOR_UNARY(atan)
EMULATOR_UNARY(sinh) EMULATOR_UNARY(cosh) EMULATOR_UNARY(tanh) EMULATOR_UNARY(asinh) EMULATOR_UNARY(acosh) EMULATOR_UNARY(atanh)
EMULATOR_UNARY(erf) EMULATOR_UNARY(erfc) EMULATOR_UNARY(erfcx) EMULATOR_UNARY(normcdf) EMULATOR_UNARY(lgamma) EMULATOR_UNARY(tgamma)
EMULATOR_UNARY(cbrt) EMULATOR_UNARY(rsqrt) EMULATOR_UNARY(sqrt)
EMULATOR_UNARY(floor) EMULATOR_UNARY(ceil) EMULATOR_UNARY(trunc) EMULATOR_UNARY(round) EMULATOR_UNARY(rint) EMULATOR_UNARY(nearbyint)
EMULATOR_UNARY(fabs)
EMULATOR_UNARY(sinpi) EMULATOR_UNARY(cospi) EMULATOR_UNARY(erfinv) EMULATOR_UNARY(normcdfinv)
EMULATOR_BINARY(pow) EMULATOR_BINARY(atan2) EMULATOR_BINARY(hypot) EMULATOR_BINARY(fmod) EMULATOR_BINARY(remainder)
EMULATOR_BINARY(copysign) EMULATOR_BINARY(nextafter) EMULATOR_BINARY(fmin) EMULATOR_BINARY(fmax) EMULATOR_BINARY(fdim)
#undef EMULATOR_UNARY
#undef EMULATOR_BINARY
// In fp64 alone.
double j0(double);
double j1(double);
double y0(double);
double y1(double);
double cyl_bessel_i0(double);
double cyl_bessel_i1(double);
float fmaf(float, float, float);
double fma(double, double, double);
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
float ldexpf(float, int);
double ldexp(double, int);
inline float ldexp(float x, int exponent) { return ldexpf(x, exponent); }
float frexpf(float, int*);
double frexp(double, int*);
inline float frexp(float x, int* exponent) { return frexpf(x, exponent); }
inline float abs(float x) { return __builtin_fabsf(x); }
inline double abs(double x) { return __builtin_fabs(x); }
inline float min(float x, float y) { return fminf(x, y); }
inline float max(float x, float y) { return fmaxf(x, y); }
inline double min(double x, double y) { return fmin(x, y); }
inline double max(double x, double y) { return fmax(x, y); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

}  // namespace device

using namespace device;

// The launcher: one instance a kernel, listed by the table that emulator.py appends to the source.
namespace emulator {

union Slot { char* pointer; long long integer; double real; };

// By value a kernel takes pointers, long long, double, and structs of these: the last as a pointer to their bytes.
template <class P> struct Parameter {
    static_assert(__is_class(P), "a kernel takes pointers, long long, double and structs of them, no other type");
    static constexpr char kind = 's';
    static const P& from(Slot slot) { return *(const P*)slot.pointer; }
};
template <class T> struct Parameter<T*> { static constexpr char kind = 'p'; static T* from(Slot slot) { return (T*)slot.pointer; } };
template <> struct Parameter<long long> { static constexpr char kind = 'i'; static long long from(Slot slot) { return slot.integer; } };
template <> struct Parameter<double> { static constexpr char kind = 'd'; static double from(Slot slot) { return slot.real; } };

struct Kernel {
    const char* name;
    const char* parameters;  // one character each: pointer, integer, double
    void (*run_thread)(const Slot*);
    bool has_barrier;
};

void barrier(int line);
const unsigned long long* exchange(int line, unsigned mask, unsigned long long own);
unsigned lane();
bool any(const unsigned long long* words);

template <class T> T shuffle_xor(int line, unsigned mask, T own, unsigned lanes)
{
    unsigned long long word = 0;
    __builtin_memcpy(&word, &own, sizeof own);
    word = exchange(line, mask, word)[lane() ^ lanes];
    __builtin_memcpy(&own, &word, sizeof own);
    return own;
}

template <int... I> struct Indices {};

template <class... P> struct Signature {
    static constexpr char kinds[] = {Parameter<P>::kind..., 0};
    template <void (*kernel)(P...), int... I> static void unpack(const Slot* slots, Indices<I...>)
    {
        kernel(Parameter<P>::from(slots[I])...);
    }
    template <void (*kernel)(P...)> static void run_thread(const Slot* slots)
    {
        unpack<kernel>(slots, Indices<__integer_pack((int)sizeof...(P))...>());
    }
};
template <class... P> Signature<P...> signature_of(void (*)(P...));

}  // namespace emulator

#define __syncthreads() emulator::barrier(__LINE__)
#define __shfl_xor_sync(mask, own, lanes) emulator::shuffle_xor(__LINE__, mask, own, lanes)
#define __any_sync(mask, predicate) emulator::any(emulator::exchange(__LINE__, mask, (predicate) != 0))

// The bounds of shared memory, made by the linker; null where a source has none.
extern "C" char __start_emulator_shared __attribute__((weak, visibility("hidden")));
extern "C" char __stop_emulator_shared __attribute__((weak, visibility("hidden")));

#define EMULATOR_EXPORT extern "C" __attribute__((visibility("default")))
#define EMULATOR_SIGNATURE(name) decltype(emulator::signature_of(&name))
#define EMULATOR_KERNEL(name, has_barrier) \
    {#name, EMULATOR_SIGNATURE(name)::kinds, &EMULATOR_SIGNATURE(name)::run_thread<&name>, has_barrier}
#define EMULATOR_TABLE(...) \
    EMULATOR_EXPORT const emulator::Kernel emulator_kernels[] = {__VA_ARGS__, {}}; \
    EMULATOR_EXPORT char* const emulator_shared_bytes[] = {&__start_emulator_shared, &__stop_emulator_shared};
