// The child process that runs kernels: the definitions behind shim.h, the launch loops, and a command loop that loads
// compiled kernels and launches them on operands in shared memory. It knows bytes and addresses, never tensors.
//
// Built once without sanitizer instrumentation and linked with the sanitizers' runtime; only the kernels are instrumented.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#ifdef EMULATOR_SANITIZE
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#include "shim.h"

namespace emulator {

enum class Approx : int64_t { exact, up, down, mixed };
static Approx approx = Approx::exact;

[[noreturn]] static void fail(const std::string& message)
{
    std::fprintf(stderr, "emulator: %s\n", message.c_str());
    std::fflush(stderr);
    std::_Exit(1);
}

// Which end of the error interval the run takes: +1 further from zero, -1 nearer to zero, 0 the exact value.
static int side(uint32_t input)
{
    switch (approx) {
    case Approx::up: return 1;
    case Approx::down: return -1;
    case Approx::mixed: {
        // The finaliser of MurmurHash3: every input bit reaches the lowest output bit.
        input ^= input >> 16;
        input *= 0x85ebca6bu;
        input ^= input >> 13;
        input *= 0xc2b2ae35u;
        return (input ^ input >> 16) & 1 ? 1 : -1;
    }
    default: return 0;
    }
}

// The float at the chosen end of [exact - bound, exact + bound]: the furthest one inside, or the nearest to exact where none
// is. Zeros, infinities and NaN stay.
static float perturb(double exact, double bound, uint32_t input)
{
    const int direction = side(input);
    const float nearest = (float)exact;
    if (!direction || !std::isfinite(nearest) || exact == 0) return nearest;
    const double outward = std::copysign(1.0, exact) * direction, target = exact + outward * bound;
    float result = (float)target;
    if (outward * result > outward * target) result = std::nextafter(result, nearest);
    return outward * result < outward * exact ? nearest : result;
}

// The distance between neighbouring floats at x: 2^-149 for subnormals.
static double ulp_of(double x)
{
    int exponent;
    std::frexp(x, &exponent);
    return std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Bounds in ulp count from the correctly rounded result, and do not reach beyond zero.
static float within_ulp(double exact, double ulp, uint32_t input)
{
    const float rounded = (float)exact;
    return perturb(rounded, approx == Approx::up ? ulp * ulp_of(rounded) : std::fmin(ulp * ulp_of(rounded), std::fabs(rounded)), input);
}
static float within_ulp(double exact, double ulp, float input) { return within_ulp(exact, ulp, device::__float_as_uint(input)); }
static float within_ulp(double exact, double ulp, float x, float y)
{
    return within_ulp(exact, ulp, device::__float_as_uint(x) * 31 + device::__float_as_uint(y));
}
static float within_absolute(double exact, double bound, float input) { return perturb(exact, bound, device::__float_as_uint(input)); }

// .ftz: a subnormal input or result becomes zero and keeps its sign.
static float flush(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

}  // namespace emulator

namespace device {

using namespace emulator;

uint3 threadIdx, blockIdx, blockDim, gridDim;

unsigned __brev(unsigned x)
{
    unsigned reversed = 0;
    for (int k = 0; k < 32; ++k) reversed |= (x >> k & 1u) << (31 - k);
    return reversed;
}

// A nibble of the selector picks one of 8 bytes by its low three bits; the sign replication of PTX's prmt is not reached.
unsigned __byte_perm(unsigned low, unsigned high, unsigned selector)
{
    const uint64_t bytes = (uint64_t)high << 32 | low;
    unsigned result = 0;
    for (int k = 0; k < 4; ++k) result |= (unsigned)(bytes >> 8 * (selector >> 4 * k & 7u) & 255u) << 8 * k;
    return result;
}

// PTX ISA, cvt: float to integer clamps to the integer's range. NaN gives 0 from f32 to a 32-bit type, and otherwise, from
// f64 or to a 64-bit type, the word whose top bit alone is set.
template <class T, class F> static T to_integer(F rounded)
{
    const bool wide = sizeof(F) == 8 || sizeof(T) == 8;
    if (std::isnan(rounded)) return wide ? (T)((T)1 << (sizeof(T) * 8 - 1)) : (T)0;
    const T lowest = (T)-1 < 0 ? (T)((T)1 << (sizeof(T) * 8 - 1)) : (T)0, highest = (T)~lowest;
    // 2^31, 2^32, 2^63 or 2^64, which every F holds exactly.
    const F limit = std::ldexp((F)1, sizeof(T) * 8 - ((T)-1 < 0));
    if (rounded >= limit) return highest;
    if (rounded < (F)lowest) return lowest;
    return (T)rounded;
}
#define TO_INTEGER(from, F, to, T) \
    T __##from##2##to##_rz(F x) { return to_integer<T>(std::trunc(x)); } \
    T __##from##2##to##_rn(F x) { return to_integer<T>(std::nearbyint(x)); } \
    T __##from##2##to##_rd(F x) { return to_integer<T>(std::floor(x)); } \
    T __##from##2##to##_ru(F x) { return to_integer<T>(std::ceil(x)); }
TO_INTEGER(float, float, int, int)
TO_INTEGER(float, float, uint, unsigned)
TO_INTEGER(float, float, ll, long long)
TO_INTEGER(float, float, ull, unsigned long long)
TO_INTEGER(double, double, int, int)
TO_INTEGER(double, double, uint, unsigned)
TO_INTEGER(double, double, ll, long long)
TO_INTEGER(double, double, ull, unsigned long long)

// PTX ISA, cvt: a NaN becomes the canonical NaN, 0x7fff.
float f16_value(unsigned short bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float sign = bits >> 15 ? -1.0f : 1.0f;
    if (exponent == 31) return mantissa ? __uint_as_float(0x7fffffffu) : sign * INFINITY;
    // 2^-24 is the unit of subnormals; a normal number has the hidden bit 2^10.
    return exponent ? sign * std::ldexp((float)(1024 + mantissa), exponent - 25) : sign * std::ldexp((float)mantissa, -24);
}
unsigned short f16_bits(float x)
{
    if (std::isnan(x)) return 0x7fff;
    const unsigned short sign = __float_as_uint(x) >> 31 << 15;
    const float magnitude = std::fabs(x);
    if (magnitude >= 65520.0f) return sign | 0x7c00;  // half way from the largest, 65504, to 2^16
    // In units of the last place, 2^(e-10) and at least 2^-24, rounded to nearest even; a carry runs into the exponent.
    const int exponent = std::max(std::ilogb(magnitude == 0 ? 0x1p-14f : magnitude), -14);
    const int units = (int)std::nearbyint(std::ldexp(magnitude, 10 - exponent));
    return sign | (unsigned short)(((exponent + 14) << 10) + units);
}
unsigned f16_word(float low, float high) { return f16_bits(low) | (unsigned)f16_bits(high) << 16; }
static unsigned bf16_bits(float x)
{
    if (std::isnan(x)) return 0x7fff;
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
unsigned bf16_word(float low, float high) { return bf16_bits(low) | bf16_bits(high) << 16; }

// In units of the last place, 2^(e - mantissa), rounded to nearest even; a carry runs into the exponent. NaN has no sign.
static unsigned saturated_fp8(float x, int mantissa, int lowest, float largest)
{
    if (std::isnan(x)) return 0x7f;
    const unsigned sign = __float_as_uint(x) >> 31 << 7;
    const float magnitude = std::fmin(std::fabs(x), largest);
    const int exponent = std::max(std::ilogb(magnitude == 0 ? std::ldexp(1.0f, lowest) : magnitude), lowest);
    const int units = (int)std::nearbyint(std::ldexp(magnitude, mantissa - exponent));
    return sign | (unsigned)(((exponent - lowest) << mantissa) + units);
}
unsigned e4m3_saturated(float low, float high) { return saturated_fp8(low, 3, -6, 448) | saturated_fp8(high, 3, -6, 448) << 8; }
unsigned e5m2_saturated(float low, float high) { return saturated_fp8(low, 2, -14, 57344) | saturated_fp8(high, 2, -14, 57344) << 8; }
unsigned e4m3_halves(unsigned word)
{
    unsigned halves = 0;
    for (int k = 0; k < 2; ++k) {
        const int code = word >> 8 * k & 0x7f, exponent = code >> 3, units = (exponent ? 8 : 0) + (code & 7);
        const float magnitude = std::ldexp((float)units, std::max(exponent, 1) - 10);
        halves |= (code == 0x7f ? 0x7fffu : (unsigned)f16_bits(word >> (8 * k + 7) & 1 ? -magnitude : magnitude)) << 16 * k;
    }
    return halves;
}

// Error bounds of the PTX ISA, "Floating Point Instructions".
// ex2.approx.f32: 2^-22.5 for a result in [1, 2). A subnormal result is the square of 2^(x/2): twice that, and its rounding.
float ex2_approx(float x)
{
    const double exact = std::exp2((double)x), bound = 0x1.6a09e6p-23 * exact;
    return within_absolute(exact, exact < 0x1p-126 ? 2 * bound + 0x1p-150 : bound, x);
}
// ex2.approx.ftz.f32: the same, with subnormal arguments and results flushed.
float ex2_approx_ftz(float x) { return flush(ex2_approx(flush(x))); }
// rcp.approx.ftz.f32: 1 ulp.
float rcp_approx(float x) { return flush(within_ulp(1.0 / flush(x), 1, x)); }
// div.full.f32: 2 ulp over the full range; subnormal numbers are kept.
float div_full(float a, float b) { return within_ulp((double)a / b, 2, a, b); }
// sqrt.approx.f32: 2^-23, relative, over the full range; subnormal numbers are kept.
float sqrt_approx(float x)
{
    const double exact = std::sqrt((double)x);
    return within_absolute(exact, 0x1p-23 * exact, x);
}
// lg2.approx.ftz.f32: 2^-22, absolute between 0.5 and 2, relative elsewhere.
float lg2_approx(float x)
{
    const double exact = std::log2((double)flush(x));
    return within_absolute(exact, x > 0.5f && x < 2 ? 0x1p-22 : 0x1p-22 * std::fabs(exact), x);
}

float __fmaf_rn(float x, float y, float z) { return std::fma(x, y, z); }
double __fma_rn(double x, double y, double z) { return std::fma(x, y, z); }
float __saturatef(float x) { return !(x > 0) ? 0.0f : x < 1 ? x : 1.0f; }  // NaN gives +0
float __frsqrt_rn(float x) { return (float)(1 / std::sqrt((double)x)); }

// Error bounds of the CUDA C++ Programming Guide, "Mathematical Functions", "Intrinsic Functions".
float __fdividef(float x, float y)
{
    const float magnitude = std::fabs(y);
    if (magnitude > 0x1p126f && std::isfinite(y)) return x * std::copysign(0.0f, y);
    return within_ulp((double)x / y, 2, x, y);
}
float __expf(float x) { return within_ulp(std::exp((double)x), 2 + std::floor(std::fabs(1.173 * x)), x); }
float __exp10f(float x) { return within_ulp(std::pow(10.0, (double)x), 2 + std::floor(std::fabs(2.97 * x)), x); }
static float log_intrinsic(double exact, double absolute, double ulp, float x)
{
    return x >= 0.5f && x <= 2 ? within_absolute(exact, absolute, x) : within_ulp(exact, ulp, x);
}
float __logf(float x) { return log_intrinsic(std::log((double)x), 0x1.8157dap-22, 3, x); }  // 2^-21.41
float __log2f(float x) { return log_intrinsic(std::log2((double)x), 0x1p-22, 2, x); }
float __log10f(float x) { return log_intrinsic(std::log10((double)x), 0x1p-24, 3, x); }

// The same guide, "Standard Functions": the largest error in ulp over the full range; lgamma's is larger between -10.001 and
// -2.264. Double precision is the C library's.
#define UNARY(name, ulp) \
    float name##f(float x) { return within_ulp(std::name((double)x), ulp, x); } \
    double name(double x) { return std::name(x); }
#define BINARY(name, ulp) \
    float name##f(float x, float y) { return within_ulp(std::name((double)x, (double)y), ulp, x, y); } \
    double name(double x, double y) { return std::name(x, y); }
#define EXACT_UNARY(name) \
    float name##f(float x) { return std::name(x); } \
    double name(double x) { return std::name(x); }
#define EXACT_BINARY(name) \
    float name##f(float x, float y) { return std::name(x, y); } \
    double name(double x, double y) { return std::name(x, y); }
UNARY(exp, 2) UNARY(exp2, 2) UNARY(expm1, 1)
UNARY(log, 1) UNARY(log2, 1) UNARY(log10, 2) UNARY(log1p, 1)
UNARY(sin, 2) UNARY(cos, 2) UNARY(tan, 4) UNARY(asin, 2) UNARY(acos, 2) UNARY(atan, 2)
UNARY(sinh, 3) UNARY(cosh, 2) UNARY(tanh, 2) UNARY(asinh, 3) UNARY(acosh, 4) UNARY(atanh, 3)
UNARY(erf, 2) UNARY(erfc, 4) UNARY(lgamma, 6) UNARY(tgamma, 5) UNARY(cbrt, 1)
BINARY(pow, 4) BINARY(atan2, 3) BINARY(hypot, 3)
EXACT_UNARY(sqrt) EXACT_UNARY(floor) EXACT_UNARY(ceil) EXACT_UNARY(trunc) EXACT_UNARY(round) EXACT_UNARY(rint) EXACT_UNARY(nearbyint)
EXACT_UNARY(fabs)
EXACT_BINARY(fmod) EXACT_BINARY(remainder) EXACT_BINARY(copysign) EXACT_BINARY(nextafter) EXACT_BINARY(fdim)

// PTX ISA, min and max: a NaN gives way to a number, and -0 is less than +0.
template <class T> static T minimum(T x, T y)
{
    if (std::isnan(x) || std::isnan(y)) return std::isnan(x) ? y : x;
    return x < y || (x == y && std::signbit(x)) ? x : y;
}
float fminf(float x, float y) { return minimum(x, y); }
double fmin(double x, double y) { return minimum(x, y); }
float fmaxf(float x, float y) { return -minimum(-x, -y); }
double fmax(double x, double y) { return -minimum(-x, -y); }

double exp10(double x) { return std::pow(10.0, x); }
float exp10f(float x) { return within_ulp(std::pow(10.0, (double)x), 2, x); }
double rsqrt(double x) { return 1 / std::sqrt(x); }
float rsqrtf(float x) { return within_ulp(1 / std::sqrt((double)x), 2, x); }

// exp(x^2) erfc(x). From 2^3 on, erfc nears its subnormals: the continued fraction of Abramowitz and Stegun 7.1.14, whose
// 60 terms are exact to double precision there.
double erfcx(double x)
{
    if (x < 8) return std::exp(x * x) * std::erfc(x);
    double tail = x;
    for (int k = 60; k > 0; --k) tail = x + k / 2.0 / tail;
    return 1 / (tail * std::sqrt(M_PI));
}
float erfcxf(float x) { return within_ulp(erfcx((double)x), 4, x); }

// The normal distribution function. In the tail a rounded x / sqrt(2) would cost hundreds of ulp: extended precision.
double normcdf(double x) { return (double)(0.5L * std::erfc(-(long double)x / std::sqrt(2.0L))); }
float normcdff(float x) { return within_ulp(normcdf((double)x), 5, x); }

// sin(pi x) and cos(pi x) of an exact remainder.
double sinpi(double x)
{
    const double r = std::remainder(x, 2);
    return r == std::trunc(r) ? std::copysign(0.0, x) : (double)std::sin(M_PIl * (std::fabs(r) > 0.5 ? std::copysign(1.0L, r) - r : (long double)r));
}
double cospi(double x)
{
    const double r = std::fabs(std::remainder(x, 2));
    return r == 0.5 ? 0.0 : (double)(r > 0.5 ? -std::cos(M_PIl * (1 - (long double)r)) : std::cos(M_PIl * (long double)r));
}
float sinpif(float x) { return within_ulp(sinpi((double)x), 1, x); }
float cospif(float x) { return within_ulp(cospi((double)x), 1, x); }

// The inverses of erfc and of the normal distribution function, by Newton's method in extended precision from the asymptotic tail.
static long double inverse_erfc(long double y)
{
    if (!(y > 0 && y < 2)) return y == 0 ? INFINITY : y == 2 ? -INFINITY : NAN;
    if (y > 1) return -inverse_erfc(2 - y);
    long double x = y > 0.3L ? (1 - y) * 0.886L : std::sqrt(-std::log(y * std::sqrt(M_PIl * -std::log(y / 2))));
    for (int k = 0; k < 12; ++k) x += (std::erfc(x) - y) * std::exp(x * x) * std::sqrt(M_PIl) / 2;
    return x;
}
double erfinv(double x)
{
    if (x == 0 || !(std::fabs(x) <= 1)) return x == 0 ? x : NAN;
    if (std::fabs(x) > 0.5) return (double)std::copysign(inverse_erfc(1 - (long double)std::fabs(x)), (long double)x);
    long double z = x * 0.886L;
    for (int k = 0; k < 8; ++k) z -= (std::erf(z) - x) * std::exp(z * z) * std::sqrt(M_PIl) / 2;
    return (double)z;
}
float erfinvf(float x) { return within_ulp(erfinv((double)x), 2, x); }
double normcdfinv(double x) { return x == 0.5 ? 0.0 : (double)(-std::sqrt(2.0L) * inverse_erfc(2 * (long double)x)); }
float normcdfinvf(float x) { return within_ulp(normcdfinv((double)x), 5, x); }

double j0(double x) { return ::j0(x); }
double j1(double x) { return ::j1(x); }
double y0(double x) { return ::y0(x); }
double y1(double x) { return ::y1(x); }
// The modified Bessel functions by their series, whose terms are positive; infinite from 714 on.
static double modified_bessel(int order, double x)
{
    if (!(x < 714)) return x + INFINITY;
    long double term = order ? x / 2.0L : 1, sum = 0;
    for (int k = 1; term > sum * 1e-21L; ++k) {
        sum += term;
        term *= x * (long double)x / 4 / ((long double)k * (k + order));
    }
    return (double)sum;
}
double cyl_bessel_i0(double x) { return modified_bessel(0, std::fabs(x)); }
double cyl_bessel_i1(double x) { return std::copysign(modified_bessel(1, std::fabs(x)), x); }

float fmaf(float x, float y, float z) { return std::fma(x, y, z); }
double fma(double x, double y, double z) { return std::fma(x, y, z); }
float ldexpf(float x, int exponent) { return std::ldexp(x, exponent); }
double ldexp(double x, int exponent) { return std::ldexp(x, exponent); }
float frexpf(float x, int* exponent) { return std::frexp(x, exponent); }
double frexp(double x, int* exponent) { return std::frexp(x, exponent); }

}  // namespace device

namespace emulator {

// A kernel with barriers: a block's threads are fibers, switched at every barrier. One without: a loop.
//
// A fiber is entered once through ucontext and lives on, a thread of one block after another; from then on it is switched
// with __builtin_setjmp, which makes no system call and, unlike longjmp, leaves AddressSanitizer's shadow of the stack as it is.
struct Context {
    void* registers[5];  // what __builtin_setjmp asks for
    void* fake_stack;
};

struct Fiber {
    Context context;
    ucontext_t entry;
    char* stack;
    int line;  // of the barrier at which it waits, negative where that is its warp's, 0 when the thread has returned
};

static const size_t STACK_BYTES = 1 << 18;  // a sanitizer writes its report on the stack of the thread that failed
static std::vector<Fiber*> fibers;
static Context scheduler;
static ucontext_t scheduler_entry;
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
static Fiber* running;
static const unsigned WARP = 32;
static unsigned long long exchanged[2][WARP];  // in turns: nobody writes what another lane has yet to read
static int turn;
static const Kernel* current_kernel;
static const Slot* current_slots;

static void start_switch(Context& from, const void* stack, size_t bytes)
{
#ifdef EMULATOR_SANITIZE
    __sanitizer_start_switch_fiber(&from.fake_stack, stack, bytes);
#else
    (void)from, (void)stack, (void)bytes;
#endif
}

static void finish_switch(Context& to, const void** stack, size_t* bytes)
{
#ifdef EMULATOR_SANITIZE
    __sanitizer_finish_switch_fiber(to.fake_stack, stack, bytes);
#else
    (void)to, (void)stack, (void)bytes;
#endif
}

// The compiler allows no __builtin_longjmp in the function of the __builtin_setjmp.
__attribute__((noinline)) static void jump(Context& to) { __builtin_longjmp(to.registers, 1); }
__attribute__((noinline)) static void switch_context(Context& from, Context& to)
{
    if (!__builtin_setjmp(from.registers)) jump(to);
}

void barrier(int line)
{
    Fiber& fiber = *running;
    fiber.line = line;
    start_switch(fiber.context, scheduler_stack, scheduler_stack_bytes);
    switch_context(fiber.context, scheduler);
    finish_switch(fiber.context, &scheduler_stack, &scheduler_stack_bytes);
}

static unsigned thread_number()
{
    return (device::threadIdx.z * device::blockDim.y + device::threadIdx.y) * device::blockDim.x + device::threadIdx.x;
}
unsigned lane() { return thread_number() % WARP; }

// The words of a warp's lanes, of which there are 32: each lane's own, until the next exchange but one.
const unsigned long long* exchange(int line, unsigned mask, unsigned long long own)
{
    if (mask != ~0u) fail("kernel.cu:" + std::to_string(line) + " names some lanes of a warp: only all of them exchange words here");
    const unsigned threads = device::blockDim.x * device::blockDim.y * device::blockDim.z;
    if (threads % WARP) fail("lanes exchange words in a block of " + std::to_string(threads) + " threads, which has a partial warp");
    unsigned long long* const words = exchanged[turn];
    words[lane()] = own;
    barrier(-line);
    return words;
}

bool any(const unsigned long long* words) { return std::any_of(words, words + WARP, [](unsigned long long word) { return word != 0; }); }

static void fiber_main()
{
    finish_switch(running->context, &scheduler_stack, &scheduler_stack_bytes);
    for (;;) {
        current_kernel->run_thread(current_slots);
        barrier(0);
    }
}

__attribute__((noinline)) static void enter(Fiber& fiber)
{
    if (!__builtin_setjmp(scheduler.registers)) swapcontext(&scheduler_entry, &fiber.entry);
}

static void resume(Fiber& fiber, bool first)
{
    running = &fiber;
    start_switch(scheduler, fiber.stack, STACK_BYTES);
    if (first) enter(fiber);
    else switch_context(scheduler, fiber.context);
    finish_switch(scheduler, nullptr, nullptr);
}

static Fiber* new_fiber()
{
    Fiber* fiber = new Fiber{};
    fiber->stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (fiber->stack == MAP_FAILED) fail("no memory for the stacks of a block");
    getcontext(&fiber->entry);
    fiber->entry.uc_stack.ss_sp = fiber->stack;
    fiber->entry.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber->entry, fiber_main, 0);
    return fiber;
}

static void run_to_barrier(size_t k)
{
    const bool first = k == fibers.size();
    if (first) fibers.push_back(new_fiber());
    const uint3& dim = device::blockDim;
    device::threadIdx = {(unsigned)k % dim.x, (unsigned)k / dim.x % dim.y, (unsigned)k / dim.x / dim.y};
    resume(*fibers[k], first);
}

static void require_same_barrier(size_t k, size_t beside)
{
    if (fibers[k]->line == fibers[beside]->line) return;
    const auto place = [](const Fiber& fiber) {
        return fiber.line ? "waits at the barrier of kernel.cu:" + std::to_string(std::abs(fiber.line)) : std::string("has returned");
    };
    fail("divergent barrier: thread " + std::to_string(beside) + " of a block " + place(*fibers[beside]) + ", thread " + std::to_string(k) +
         " " + place(*fibers[k]));
}

// One pass brings every thread of the block to its next barrier, which must be the same, or to its end; a warp whose lanes wait for
// each other alone goes on meanwhile.
static int run_to_barrier()
{
    const size_t threads = (size_t)device::blockDim.x * device::blockDim.y * device::blockDim.z;
    for (size_t first = 0; first < threads; first += WARP) {
        do {
            for (size_t k = first; k < std::min(first + WARP, threads); ++k) {
                run_to_barrier(k);
                require_same_barrier(k, first);
            }
            turn = !turn;
        } while (fibers[first]->line < 0);
        require_same_barrier(first, 0);
    }
    return fibers[0]->line;
}

static void run_loop()
{
    uint3& t = device::threadIdx;
    for (t.z = 0; t.z < device::blockDim.z; ++t.z)
        for (t.y = 0; t.y < device::blockDim.y; ++t.y)
            for (t.x = 0; t.x < device::blockDim.x; ++t.x) current_kernel->run_thread(current_slots);
}

struct Section { char* begin; char* end; };

static void run_grid(const Kernel& kernel, const Slot* slots, Section shared)
{
    current_kernel = &kernel;
    current_slots = slots;
    uint3& b = device::blockIdx;
    for (b.z = 0; b.z < device::gridDim.z; ++b.z)
        for (b.y = 0; b.y < device::gridDim.y; ++b.y)
            for (b.x = 0; b.x < device::gridDim.x; ++b.x) {
                for (volatile char* byte = shared.begin; byte < shared.end; ++byte) *byte = (char)0xff;  // NaN in every float type
                if (!kernel.has_barrier) run_loop();
                else while (run_to_barrier()) {}
            }
}

// Commands come on stdin, answers leave on stdout; emulator.py holds the other end. Everything is 64-bit words.
static void receive(void* target, size_t bytes)
{
    for (char* at = (char*)target; bytes;) {
        const ssize_t got = read(STDIN_FILENO, at, bytes);
        if (got <= 0) std::_Exit(0);  // the parent has gone
        at += got;
        bytes -= (size_t)got;
    }
}

static int64_t receive_word()
{
    int64_t word;
    receive(&word, sizeof word);
    return word;
}

static void send(const std::string& text)
{
    const int64_t length = (int64_t)text.size();
    std::string message((const char*)&length, sizeof length);
    message += text;
    for (size_t sent = 0; sent < message.size();) {
        const ssize_t wrote = write(STDOUT_FILENO, message.data() + sent, message.size() - sent);
        if (wrote <= 0) std::_Exit(0);
        sent += (size_t)wrote;
    }
}

struct Library { const Kernel* kernels; Section shared; };
static std::vector<Library> libraries;

static void load()
{
    std::string path((size_t)receive_word(), 0);
    receive(&path[0], path.size());
    void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!handle) fail(dlerror());
    const auto kernels = (const Kernel*)dlsym(handle, "emulator_kernels");
    const auto shared = (const Section*)dlsym(handle, "emulator_shared_bytes");
    libraries.push_back({kernels, *shared});
    std::string answer;
    for (const Kernel* kernel = kernels; kernel->name; ++kernel) answer += std::string(kernel->name) + " " + kernel->parameters + "\n";
    send(answer);
}

struct Arena { char* base = nullptr; size_t bytes = 0; };
static Arena arena;

static void poison(const char* at, size_t bytes)
{
#ifdef EMULATOR_SANITIZE
    __asan_poison_memory_region(at, bytes);
#else
    (void)at, (void)bytes;
#endif
}

static void unpoison(const char* at, size_t bytes)
{
#ifdef EMULATOR_SANITIZE
    __asan_unpoison_memory_region(at, bytes);
#else
    (void)at, (void)bytes;
#endif
}

static void map_arena(int descriptor, size_t bytes)
{
    if (arena.base) {
        unpoison(arena.base, arena.bytes);
        munmap(arena.base, arena.bytes);
    }
    arena = {(char*)mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0), bytes};
    if (arena.base == MAP_FAILED) fail("the operands' shared memory cannot be mapped");
    *(char**)arena.base = arena.base;  // read by the parent, to say where a faulty address lies
    poison(arena.base, arena.bytes);
}

// library, kernel, grid, block, approx, bytes of the arena; then counted: (offset, bytes) of the operands; arguments; where in
// the arena an offset stands that is to be an address.
static void launch(int descriptor)
{
    int64_t head[10];
    receive(head, sizeof head);
    const Library& library = libraries[(size_t)head[0]];
    const Kernel& kernel = library.kernels[head[1]];
    device::gridDim = {(unsigned)head[2], (unsigned)head[3], (unsigned)head[4]};
    device::blockDim = {(unsigned)head[5], (unsigned)head[6], (unsigned)head[7]};
    approx = (Approx)head[8];
    if ((size_t)head[9] != arena.bytes) map_arena(descriptor, (size_t)head[9]);

    struct Extent { int64_t offset, bytes; };
    std::vector<Extent> operands((size_t)receive_word());
    receive(operands.data(), operands.size() * sizeof(Extent));
    std::vector<Slot> slots((size_t)receive_word());
    receive(slots.data(), slots.size() * sizeof(Slot));
    for (size_t k = 0; k < slots.size(); ++k)
        if (kernel.parameters[k] == 'p' || kernel.parameters[k] == 's')
            slots[k].pointer = slots[k].integer < 0 ? nullptr : arena.base + slots[k].integer;
    std::vector<int64_t> relocated((size_t)receive_word());
    receive(relocated.data(), relocated.size() * sizeof(int64_t));

    for (const Extent& operand : operands) unpoison(arena.base + operand.offset, (size_t)operand.bytes);
    for (int64_t at : relocated) ((Slot*)(arena.base + at))->pointer = arena.base + ((Slot*)(arena.base + at))->integer;
    run_grid(kernel, slots.data(), library.shared);
    for (const Extent& operand : operands) poison(arena.base + operand.offset, (size_t)operand.bytes);
    send("");
}

}  // namespace emulator

int main(int, char** argv)
{
    const int descriptor = std::atoi(argv[1]);
    for (;;) {
        if (emulator::receive_word() == 0) emulator::load();
        else emulator::launch(descriptor);
    }
}
