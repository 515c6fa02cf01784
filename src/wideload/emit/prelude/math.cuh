// Functions of the op table, on the types that arithmetic uses. Integers wrap as torch's do: through unsigned long long,
// of which the low bits are those of the narrower type. Special values are those of torch on CUDA.

#define FUNCTION static __device__ __noinline__

// PTX: 2^x, its subnormal results kept, for which CUDA has no function; 1/x and log2(x) of a normal x whose result is normal; a quotient
// of any two numbers, of 8 instructions where the rounded one takes 14 and a call for the rest (div.approx has 5, and makes zeros of
// quotients by more than 2^126); the root of any number.
#ifdef __CUDACC__
DEVICE float ex2_approx(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float ex2_approx_ftz(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rcp_approx(float x) { float y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float lg2_approx(float x) { float y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float div_full(float a, float b) { float y; asm("div.full.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b)); return y; }
DEVICE float sqrt_approx(float x) { float y; asm("sqrt.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

// The low bits as a T. Where these are 16 the compiler does not look through, or it would negate with neg.s16, which ptxas (13.0, 13.5) does
// in 32 bits: what shifts, compares or widens it finds another number than -(-32768). Of 8 bits it does so where they become 16: `convert`.
template <class T> DEVICE T wrapped(unsigned long long x) { return sizeof(T) == 2 ? (T)settled((unsigned)x) : (T)x; }

template <class T> DEVICE T wrap_add(T a, T b) { return wrapped<T>((unsigned long long)a + (unsigned long long)b); }

template <class T> DEVICE T wrap_sub(T a, T b) { return wrapped<T>((unsigned long long)a - (unsigned long long)b); }

template <class T> DEVICE T wrap_mul(T a, T b) { return wrapped<T>((unsigned long long)a * (unsigned long long)b); }

template <class T> DEVICE T wrap_neg(T a) { return wrapped<T>(0ull - (unsigned long long)a); }

template <class T> DEVICE T wrap_abs(T a) { return a < 0 ? wrap_neg(a) : a; }

// A count that is negative, or the width or more, shifts every bit out: only a sign is left.
template <class T> DEVICE bool shifts_out(T count) { return count < (T)0 || count >= (T)(8 * sizeof(T)); }

template <class T> DEVICE T shift_left(T a, T count) { return shifts_out(count) ? (T)0 : (T)((unsigned long long)a << count); }

template <class T> DEVICE T shift_right(T a, T count) { return shifts_out(count) ? (T)(a < (T)0 ? -1 : 0) : (T)(a >> count); }

// Quotients and remainders. An integer divided by zero is -1, its remainder the dividend; minimum / -1 wraps.
template <class T> DEVICE bool is_minus_one(T a) { return (T)-1 < (T)0 && a == (T)-1; }

template <class T> DEVICE T divide_trunc(T a, T b) { return b == 0 ? (T)-1 : is_minus_one(b) ? wrap_neg(a) : (T)(a / b); }

template <class T> DEVICE T modulo_trunc(T a, T b) { return b == 0 ? a : is_minus_one(b) ? (T)0 : (T)(a % b); }
FUNCTION float modulo_trunc(float a, float b) { return fmod(a, b); }
FUNCTION double modulo_trunc(double a, double b) { return fmod(a, b); }

template <class T> DEVICE T modulo_floor(T a, T b)
{
    const T r = modulo_trunc(a, b);
    return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}

// The whole number next to q, the rounded quotient of a dividend less its remainder r; one less if r has not the sign of the
// divisor b. A zero takes the sign of the quotient.
template <class T> DEVICE T whole_quotient(T q, T r, T b, T quotient)
{
    if (r != 0 && (r < 0) != (b < 0)) q -= 1;
    if (q == 0) return copysign((T)0, quotient);
    const T f = floor(q);
    return q - f > (T)0.5 ? f + 1 : f;
}

template <class T> DEVICE T divide_floor(T a, T b)
{
    const T q = divide_trunc(a, b);
    return (a < 0) != (b < 0) && wrap_mul(q, b) != a ? wrap_sub(q, (T)1) : q;
}
FUNCTION float divide_floor(float a, float b) { const float r = fmod(a, b); return b == 0 ? a / b : whole_quotient((a - r) / b, r, b, a / b); }
FUNCTION double divide_floor(double a, double b) { const double r = fmod(a, b); return b == 0 ? a / b : whole_quotient((a - r) / b, r, b, a / b); }

// numerics="eager": by a number, torch multiplies by the reciprocal.
template <class T> DEVICE T divide_floor_number(T a, T b)
{
    const T r = modulo_trunc(a, b), inverse = 1 / b;
    return b == 0 ? a * inverse : whole_quotient((a - r) * inverse, r, b, a * inverse);
}

// NaN if an operand is.
template <class T> DEVICE T maximum(T a, T b) { return a > b ? a : b; }
DEVICE float maximum(float a, float b) { return a != a ? a : b != b ? b : fmax(a, b); }
DEVICE double maximum(double a, double b) { return a != a ? a : b != b ? b : fmax(a, b); }

template <class T> DEVICE T minimum(T a, T b) { return a < b ? a : b; }
DEVICE float minimum(float a, float b) { return a != a ? a : b != b ? b : fmin(a, b); }
DEVICE double minimum(double a, double b) { return a != a ? a : b != b ? b : fmin(a, b); }

// The upper bound wins over the lower.
template <class T> DEVICE T clamp(T x, T low, T high) { return minimum(maximum(x, low), high); }
DEVICE float clamp(float x, float low, float high) { return x != x ? x : low != low ? low : high != high ? high : fmin(fmax(x, low), high); }
DEVICE double clamp(double x, double low, double high) { return x != x ? x : low != low ? low : high != high ? high : fmin(fmax(x, low), high); }

// In 32 bits: of a comparison in 8 the compiler makes three more instructions an element, and int8 is bound by them.
template <class T> DEVICE T relu_signed(T x) { return (T)__vimax_s32_relu(x, 0); }
DEVICE long long relu_signed(long long x) { return x < 0 ? 0 : x; }

template <class T> DEVICE T power(T base, T exponent)
{
    if (exponent < 0) return base == 1 ? base : is_minus_one(base) ? (exponent % 2 ? base : (T)1) : (T)0;
    unsigned long long result = 1, factor = (unsigned long long)base;
    for (unsigned long long n = (unsigned long long)exponent; n != 0; n >>= 1) {
        if (n & 1) result *= factor;
        factor *= factor;
    }
    return (T)result;
}
FUNCTION float power(float base, float exponent) { return pow(base, exponent); }
FUNCTION double power(double base, double exponent) { return pow(base, exponent); }

// tensor ** number: torch computes these exponents otherwise, which shows at -0 and infinities.
template <class T> DEVICE T power_number(T base, T exponent)
{
    if (exponent == 2) return base * base;
    if (exponent == 3) return base * base * base;
    if (exponent == (T)0.5) return sqrt(base);
    if (exponent == (T)-0.5) return rsqrt(base);
    if (exponent == -1) return 1 / base;
    if (exponent == -2) return (1 / base) * (1 / base);  // 1 / (base * base) would overflow inside
    return power(base, exponent);
}

FUNCTION float math_sin(float x) { return sin(x); }
FUNCTION double math_sin(double x) { return sin(x); }

FUNCTION float math_cos(float x) { return cos(x); }
FUNCTION double math_cos(double x) { return cos(x); }

FUNCTION float math_tan(float x) { return tan(x); }
FUNCTION double math_tan(double x) { return tan(x); }

// CUDA's fp32 lgamma has no bound between -10 and -2, where it has zeros.
FUNCTION double math_lgamma(double x) { return lgamma(x); }
DEVICE float math_lgamma(float x) { return (float)math_lgamma((double)x); }

template <class T> DEVICE T frexp_mantissa(T x) { int exponent; return frexp(x, &exponent); }

template <class T> DEVICE int frexp_exponent(T x) { int exponent; frexp(x, &exponent); return isfinite(x) ? exponent : 0; }

// 10^|decimals|; the product in double is exact up to 10^22.
template <class T> DEVICE T ten_to(T decimals)
{
    double p = 1;
    for (T n = fabs(decimals); n >= 1; n -= 1) p *= 10;
    return (T)p;
}

// fma where torch's own kernels are contracted.
template <class T> DEVICE T interpolate(T a, T b, T weight) { return fabs(weight) < (T)0.5 ? fma(weight, b - a, a) : fma(-(b - a), 1 - weight, b); }

template <class T> DEVICE T log_add_exp(T a, T b) { return a == b && isinf(a) ? a : maximum(a, b) + log1p(exp(-fabs(a - b))); }

template <class T> DEVICE T log_add_exp2(T a, T b)
{
    const T log1p_e = log1p(exp2(-fabs(a - b)));
    return a == b && isinf(a) ? a : fma(log1p_e, (T)1.4426950408889634, maximum(a, b));
}

// Below -shift, exp(x) comes near the subnormals and loses the bits that a factor brings back. There exp(x + shift), of which the
// argument is exact, is computed instead, and the product is scaled by exp(-shift).
template <class T> struct tail { static constexpr T shift = 64, scale = (T)1.6038108905486378e-28; };
template <> struct tail<double> { static constexpr double shift = 512, scale = 4.3774910370530515e-223; };

// The same of 2^x in fp32: 2^-64.
struct binary_tail { static constexpr float scale = 5.42101086e-20f; };

// x / s for what is limited or rounded to a narrow type next, where many x have the same s: the compiler finds its reciprocal once. Where
// the quotient is at least 2^-40 and at most 2^60 it is rounded as IEEE has it: one correction of the product by the rounded reciprocal
// was found to give that for all mantissas of s, with those of x whose quotients lie nearest to half way between two numbers. Scaled by a
// power of two, an s that is very small or large leaves every bit of the remainder a number.
DEVICE float divide_steady(float x, float s)
{
    const float scale = fabsf(s) < 0x1p-40f ? 0x1p100f : fabsf(s) > 0x1p40f ? 0x1p-64f : 1.0f;
    const float d = s * scale, r = __frcp_rn(d), y = x * scale, q = y * r;
    return fabsf(q) >= 0x1p-40f && fabsf(q) <= 0x1p60f ? fmaf(fmaf(-q, d, y), r, q) : q;
}

// a / d for 1 <= d < 2^64: one Newton step from rcp_approx, without the branches of a division for other divisors.
DEVICE float over(float a, float d) { const float r = rcp_approx(d); return a * fmaf(r, fmaf(-d, r, 1.0f), r); }
DEVICE double over(double a, double d) { return a / d; }

// Activations: exp of negative numbers alone, so that nothing overflows.
template <class T> DEVICE T sigmoid(T x)
{
    const T e = exp(-fabs(x));
    return over(x < 0 ? e : (T)1, 1 + e);
}

// x * sigmoid(z), also where the sigmoid alone is too small for a number: it is exp(z) then.
template <class T> DEVICE T gated(T x, T z)
{
    if (z > (T)(sizeof(T) == 4 ? -80 : -700)) return x * sigmoid(z);
    const T half = exp(z / 2);
    return x * half * half;
}

template <class T> DEVICE T silu(T x)
{
    const bool deep = x < -tail<T>::shift;
    const T e = exp(deep ? x + tail<T>::shift : -fabs(x));
    const T y = x < 0 ? x * e : x;
    return deep ? y * tail<T>::scale : over(y, 1 + e);
}

// tanh(log(1 + n)), n = exp(x), is w / (w + 2), w = n (n + 2); it is 1 for x > 20 in every type.
template <class T> DEVICE T mish(T x)
{
    const bool deep = x < -tail<T>::shift;
    const T n = exp(deep ? x + tail<T>::shift : x), w = n * (n + 2);
    return x > 20 ? x : deep ? x * n * tail<T>::scale : x * over(w, w + 2);
}

// x * Phi(x). With a = |x|, Phi(-a) = exp(-a^2 / 2) * E(a), E(a) = erfcx(a / sqrt 2) / 2. a^2 is kept to twice the precision: its
// absolute error is the result's relative error. Beyond the bound on a, Phi(-a) is 0. In fp32 the exponential is a power of two,
// and E is t P(t), t = 1 / (1 + 0.35 a), P the minimax polynomial for a in [0, 15.2], off by 2^-22 with its roundings.
DEVICE float gelu(float x)
{
    const float a = fminf(fabsf(x), 24.0f), t = over(1.0f, fmaf(0.35f, a, 1.0f));
    float p = fmaf(t, -0.0291643925f, 0.144063413f);
    p = fmaf(t, p, -0.255907923f);
    p = fmaf(t, p, 0.159400657f);
    p = fmaf(t, p, -0.0232697111f);
    p = fmaf(t, p, 0.105577528f);
    p = fmaf(t, p, 0.119814746f);
    p = fmaf(t, p, 0.139864445f);
    p = fmaf(t, p, 0.139621243f);
    const float k = -0.721347520f, k_low = -9.62981517e-09f;  // -log2(e) / 2
    const float s = a * a, v = s * k, v_low = fmaf(s, k_low, fmaf(fmaf(a, a, -s), k, fmaf(s, k, -v)));
    const bool deep = v < -64.0f;
    const float e = ex2_approx(deep ? v + 64.0f : v);
    const float q = t * p * fmaf(e, v_low * 0.693147181f, e);
    const float y = x * (x < 0.0f ? q : deep ? 1.0f : 1.0f - q);
    return deep && x < 0.0f ? y * binary_tail::scale : y;
}
DEVICE double gelu(double x)
{
    const double a = fmin(fabs(x), 64.0), s = a * a, v = -0.5 * s;
    const bool deep = v < -tail<double>::shift;
    const double e = exp(deep ? v + tail<double>::shift : v);
    const double q = 0.5 * erfcx(a * 0.70710678118654752) * fma(e, -0.5 * fma(a, a, -s), e);
    return x < 0 ? (deep ? x * q * tail<double>::scale : x * q) : x * (1 - (deep ? 0 : q));
}

// 0.5 x (1 + tanh(v / 2)) = x * sigmoid(v), v = 2 sqrt(2 / pi) (x + 0.044715 x^3). v is kept to twice the precision: its absolute
// error is the result's relative error. Beyond the bound on x, sigmoid(v) is 0 or 1. In fp32 v is in units of log 2, and its
// first coefficient c1 is cut to 19 binary places, so that p - c1 is exact.
DEVICE float gelu_tanh(float x)
{
    const float c1 = 2.30220795f, c1_low = 2.5136697e-07f, c3 = 0.102943242f, c3_low = -2.01619854e-09f;
    const float a = fminf(fmaxf(x, -16.0f), 16.0f), s = a * a, p = fmaf(c3, s, c1);
    const float p_low = fmaf(c3, s, c1 - p) + fmaf(c3, fmaf(a, a, -s), fmaf(c3_low, s, c1_low));
    const float v = a * p, v_low = fmaf(a, p_low, fmaf(a, p, -v));
    const float w = -fabsf(v), w_low = x < 0.0f ? v_low : -v_low;
    const bool deep = w < -64.0f;
    float e = ex2_approx(deep ? w + 64.0f : w);
    e = fmaf(e, w_low * 0.693147181f, e);
    const float y = over(x < 0.0f ? x * e : x, deep ? 1.0f : 1.0f + e);
    return deep && x < 0.0f ? y * binary_tail::scale : y;
}
DEVICE double gelu_tanh(double x)
{
    const double c1 = 1.5957691216057308, c1_low = -9.969308809e-17, c3 = 0.071354816272600249, c3_low = -6.175149918e-19;
    const double a = fmin(fmax(x, -32.0), 32.0), s = a * a, q = c3 * s, p = q + c1, r = p - q;
    const double p_low = (q - (p - r)) + (c1 - r) + fma(c3, s, -q) + fma(c3, fma(a, a, -s), fma(c3_low, s, c1_low));
    const double v = a * p, v_low = fma(a, p_low, fma(a, p, -v));
    const bool deep = v < -tail<double>::shift;
    double e = exp(deep ? v + tail<double>::shift : -fabs(v));
    e = fma(e, v < 0 ? v_low : -v_low, e);
    const double y = v < 0 ? x * e : x;
    return deep ? y * tail<double>::scale : y / (1 + e);
}

// Their derivatives: Phi(x) + x phi(x), and s + s (1 - s) x v', v' of gelu_tanh's v.
// x^2 is kept to twice the precision, as in gelu; that of v is not: its absolute error is the tail's relative error.
template <class T> DEVICE T gelu_slope(T x)
{
    const T a = fmin(fabs(x), (T)64), s = a * a, e = exp(s * (T)-0.5);
    return normcdf(x) + x * (fma(e, fma(a, a, -s) * (T)-0.5, e) * (T)0.39894228040143268);
}

template <class T> DEVICE T gelu_tanh_slope(T x)
{
    const T square = x * x, s = sigmoid(x * (square * (T)0.071354816272600249 + (T)1.5957691216057308));
    return s + s * (1 - s) * x * (square * (T)0.21406444881780075 + (T)1.5957691216057308);
}

template <class T> DEVICE T softplus(T x, T beta, T threshold)
{
    const T y = x * beta;
    return y > threshold ? x : (fmax(y, (T)0) + log1p(exp(-fabs(y)))) / beta;
}

template <class T> DEVICE T log_sigmoid(T x) { return fmin(x, (T)0) - log1p(exp(-fabs(x))); }

template <class T> DEVICE T selu(T x) { return x > 0 ? x * (T)1.0507009873554805 : expm1(x) * (T)1.7580993408473768; }

// y / 6: the remainder of the rounded product corrects it.
template <class T> DEVICE T hard_sigmoid(T x)
{
    const T y = clamp(x + 3, (T)0, (T)6), q = y * (T)(1.0 / 6);
    return fma(fma((T)-6, q, y), (T)(1.0 / 6), q);
}

// x - tanh(x) without its cancellation below 1: x (cosh(x) - sinh(x) / x) / cosh(x), of which the series, p = x^2k / (2k)!, have
// positive terms.
template <class T> DEVICE T tanh_shrink(T x)
{
    const T s = x * x;
    T p = 1, difference = 0, cosh_x = 1;
#pragma unroll
    for (int k = 1; k <= (sizeof(T) == 4 ? 5 : 9); ++k) {
        p *= s * ((T)1 / ((2 * k - 1) * (2 * k)));
        difference += p * ((T)(2 * k) / (2 * k + 1));
        cosh_x += p;
    }
    return fabs(x) < 1 ? x * over(difference, cosh_x) : x - tanh(x);
}

// numerics="eager": torch's own formulas, where they differ.
template <class T> DEVICE T gelu_eager(T x) { return x * (T)0.5 * (1 + erf(x * (T)0.70710678118654752)); }

template <class T> DEVICE T gelu_tanh_eager(T x) { return (T)0.5 * x * (1 + tanh((T)0.79788456080286536 * fma((T)0.044715, x * x * x, x))); }

template <class T> DEVICE T selu_eager(T x) { return x > 0 ? x * (T)1.0507009873554805 : expm1(x) * ((T)1.6732632423543772 * (T)1.0507009873554805); }

template <class T> DEVICE T hard_sigmoid_eager(T x) { return clamp(x + 3, (T)0, (T)6) * (T)(1.0f / 6); }

template <class T> DEVICE T hard_swish_eager(T x) { return x * clamp(x + 3, (T)0, (T)6) * (T)(1.0f / 6); }

// Half tier: within one unit of fp16 and bf16, subnormals included, for at most two special-function instructions. exp(x) is
// 2^(x / log 2); an argument of up to 150 costs 2^-17 of the result.
DEVICE float half_exp(float x) { return ex2_approx(x * 1.44269504f); }

// 1 / (1 + 2^z) from z - 64: ex2.approx without .ftz takes three instructions more, for subnormal results, and with it loses the tail
// of half results. 2^-64 / (2^-64 + 2^(z - 64)) neither overflows nor loses one where it is more than 2^-190, with no branch on
// the sign; the argument, of up to 128, costs 2^-18 of the result.
DEVICE float half_logistic(float z_less_64) { return rcp_approx(binary_tail::scale + ex2_approx_ftz(z_less_64)) * binary_tail::scale; }

DEVICE float half_sigmoid(float x) { return half_logistic(fmaf(x, -1.44269504f, -64.0f)); }

DEVICE float half_gated(float x, float z)
{
    const float half = ex2_approx(z * 0.72134752f);
    return z > -64.0f ? x * half_sigmoid(z) : x * half * half;
}

DEVICE float half_silu(float x) { return x * half_sigmoid(x); }

// (1 - e) / (1 + e), e = exp(-2|x|), is off by 3e-6 at |x| = 2^-4, where it cancels; x - x^3 / 3 too, where it leaves out 2 x^5 / 15.
DEVICE float half_tanh(float x)
{
    const float e = ex2_approx_ftz(fabsf(x) * -2.88539008f);
    return fabsf(x) < 0.0625f ? x * fmaf(x * x, -0.333333333f, 1.0f) : copysignf((1.0f - e) * rcp_approx(1.0f + e), x);
}

// With erfcx(a / sqrt 2) / 2 = t P(t), t = 1 / (1 + 0.309 a); P is the minimax polynomial for a in [0, 15], off by 1.5e-7: GELU's slope
// next to its zero is a difference of two terms. Its coefficients are times 2^-64, the exponential times 2^64.
DEVICE float half_normal_polynomial(float t)
{
    constexpr float unit = binary_tail::scale;
    float p = fmaf(t, 0.0360633901f * unit, -0.144046585f * unit);
    p = fmaf(t, p, 0.161323894f * unit);
    p = fmaf(t, p, -0.0195207429f * unit);
    p = fmaf(t, p, 0.112272755f * unit);
    p = fmaf(t, p, 0.106914195f * unit);
    p = fmaf(t, p, 0.12373957f * unit);
    return fmaf(t, p, 0.123253597f * unit);
}

DEVICE float half_normal_cdf(float x)
{
    const float a = fabsf(x), t = rcp_approx(fmaf(0.309f, a, 1.0f));
    const float q = t * half_normal_polynomial(t) * ex2_approx_ftz(fmaf(a * a, -0.721347520f, 64.0f));
    return x < 0.0f ? q : 1.0f - q;
}

// The same, with a polynomial that is off by 4.3e-6: nothing cancels.
DEVICE float half_gelu(float x)
{
    const float a = fabsf(x), t = rcp_approx(fmaf(0.309f, a, 1.0f));
    constexpr float unit = binary_tail::scale;
    float p = fmaf(t, -0.0746564195f * unit, 0.184932813f * unit);
    p = fmaf(t, p, 0.0116477469f * unit);
    p = fmaf(t, p, 0.134901777f * unit);
    p = fmaf(t, p, 0.119682647f * unit);
    p = fmaf(t, p, 0.123489581f * unit);
    const float q = t * p * ex2_approx_ftz(fmaf(a * a, -0.721347520f, 64.0f));
    return x * (x < 0.0f ? q : 1.0f - q);
}

// As gelu_tanh, log2(e) within the coefficients.
DEVICE float half_gelu_tanh(float x)
{
    return x * half_logistic(fmaf(-x, fmaf(x * x, 0.102943240f, 2.30220820f), -64.0f));
}

// Phi(x) + x phi(x), by one exponential: with the P of half_normal_cdf, Phi(-a) - a phi(a) is exp(-a^2 / 2) (t P(t) - a / sqrt(2 pi)).
DEVICE float half_gelu_slope(float x)
{
    const float a = fabsf(x), t = rcp_approx(fmaf(0.309f, a, 1.0f));
    constexpr float unit = binary_tail::scale;
    const float p = half_normal_polynomial(t);
    const float q = fmaf(t, p, a * (-0.398942280f * unit)) * ex2_approx_ftz(fmaf(a * a, -0.721347520f, 64.0f));
    return x < 0.0f ? q : 1.0f - q;
}

// s + s (1 - s) x v', s = sigmoid(v) as half_logistic has it: with 2^z at most 2^190, so that 1 - s is 2^z s.
DEVICE float half_gelu_tanh_slope(float x)
{
    const float square = x * x, e = ex2_approx_ftz(fminf(fmaf(-x, fmaf(square, 0.102943240f, 2.30220820f), -64.0f), 126.0f));
    const float r = rcp_approx(binary_tail::scale + e), s = binary_tail::scale * r;
    return fmaf(s * (e * r) * x, fmaf(square, 0.214064448f, 1.59576912f), s);
}

DEVICE float half_mish(float x)
{
    const float n = ex2_approx_ftz(fmaf(x, 1.44269504f, 64.0f)) * binary_tail::scale, w = n * (n + 2.0f);
    return x > 20.0f ? x : x * (w * rcp_approx(w + 2.0f));
}

// log(1 + e) is e - e^2 / 2 + e^3 / 3 up to e = 2^-5: it, by e^4 / 4, and lg2_approx(1 + e), by 2^-22, are off by 1e-5 there.
DEVICE float half_softplus(float x, float beta, float threshold)
{
    const float y = x * beta, e = ex2_approx_ftz(fmaf(fabsf(y), -1.44269504f, 64.0f)) * binary_tail::scale;
    const float log1p_e = e < 0.03125f ? fmaf(e * e, fmaf(e, 0.333333333f, -0.5f), e) : lg2_approx(1.0f + e) * 0.693147181f;
    return y > threshold ? x : (fmaxf(y, 0.0f) + log1p_e) / beta;
}
