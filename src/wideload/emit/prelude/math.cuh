// Functions of the op table, on the types that arithmetic uses. Integers wrap, as torch's do: through unsigned long long,
// of which the low bits are those of the narrower type.

#define FUNCTION static __device__ __noinline__

// PTX: 2^x and 1/x with subnormals kept, which CUDA has no function for.
#ifdef __CUDACC__
DEVICE float ex2_approx(float x) { float y; asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float rcp_approx(float x) { float y; asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
DEVICE float lg2_approx(float x) { float y; asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif

template <class T> DEVICE T wrap_add(T a, T b) { return (T)((unsigned long long)a + (unsigned long long)b); }

template <class T> DEVICE T wrap_sub(T a, T b) { return (T)((unsigned long long)a - (unsigned long long)b); }

template <class T> DEVICE T wrap_mul(T a, T b) { return (T)((unsigned long long)a * (unsigned long long)b); }

template <class T> DEVICE T wrap_neg(T a) { return (T)(0ull - (unsigned long long)a); }

template <class T> DEVICE T wrap_abs(T a) { return a < 0 ? wrap_neg(a) : a; }

// A shift by a negative count, or by the width or more, leaves nothing but the sign.
template <class T> DEVICE T shift_left(T a, T count) { return count < (T)0 || count >= (T)(8 * sizeof(T)) ? (T)0 : (T)((unsigned long long)a << count); }

template <class T> DEVICE T shift_right(T a, T count) { return count < (T)0 || count >= (T)(8 * sizeof(T)) ? (T)(a < (T)0 ? -1 : 0) : (T)(a >> count); }

// Quotients and remainders. An integer divided by zero gives -1, the remainder is the dividend; minimum / -1 wraps.
template <class T> DEVICE T divide_trunc(T a, T b) { return b == 0 ? (T)-1 : (T)(b + 1) == 0 ? wrap_neg(a) : (T)(a / b); }

template <class T> DEVICE T modulo_trunc(T a, T b) { return b == 0 ? a : (T)(b + 1) == 0 ? (T)0 : (T)(a % b); }
FUNCTION float modulo_trunc(float a, float b) { return fmod(a, b); }
FUNCTION double modulo_trunc(double a, double b) { return fmod(a, b); }

template <class T> DEVICE T modulo_floor(T a, T b)
{
    const T r = modulo_trunc(a, b);
    return r != 0 && (r < 0) != (b < 0) ? (T)(r + b) : r;
}

// Of floats: the exact quotient (a - a mod b) / b rounded to a whole number, one less where a mod b has not b's sign.
template <class T> DEVICE T quotient_floor(T a, T b)
{
    const T r = modulo_trunc(a, b);
    T q = (a - r) / b;
    if (r != 0 && (r < 0) != (b < 0)) q -= 1;
    if (q == 0) return copysign((T)0, a / b);
    const T f = floor(q);
    return q - f > (T)0.5 ? f + 1 : f;
}

template <class T> DEVICE T divide_floor(T a, T b)
{
    const T q = divide_trunc(a, b);
    return (a < 0) != (b < 0) && (T)wrap_mul(q, b) != a ? (T)(q - 1) : q;
}
DEVICE float divide_floor(float a, float b) { return b == 0 ? a / b : quotient_floor(a, b); }
DEVICE double divide_floor(double a, double b) { return b == 0 ? a / b : quotient_floor(a, b); }

// NaN if either operand is.
template <class T> DEVICE T maximum(T a, T b) { return a > b || a != a ? a : b; }

template <class T> DEVICE T minimum(T a, T b) { return a < b || a != a ? a : b; }

template <class T> DEVICE T power(T base, T exponent)
{
    if (exponent < 0) return base == 1 ? (T)1 : (T)(base + 1) != 0 ? (T)0 : exponent % 2 ? base : (T)1;
    unsigned long long result = 1, factor = (unsigned long long)base;
    for (unsigned long long n = (unsigned long long)exponent; n != 0; n >>= 1) {
        if (n & 1) result *= factor;
        factor *= factor;
    }
    return (T)result;
}
FUNCTION float power(float base, float exponent) { return pow(base, exponent); }
FUNCTION double power(double base, double exponent) { return pow(base, exponent); }

// tensor ** number: torch computes these exponents otherwise, which differs at -0 and infinities.
template <class T> DEVICE T power_number(T base, T exponent)
{
    if (exponent == 2) return base * base;
    if (exponent == 3) return base * base * base;
    if (exponent == (T)0.5) return sqrt(base);
    if (exponent == (T)-0.5) return rsqrt(base);
    const T inverse = 1 / base;
    if (exponent == -1) return inverse;
    if (exponent == -2) return inverse * inverse;
    return power(base, exponent);
}

FUNCTION float math_sin(float x) { return sin(x); }
FUNCTION double math_sin(double x) { return sin(x); }

FUNCTION float math_cos(float x) { return cos(x); }
FUNCTION double math_cos(double x) { return cos(x); }

FUNCTION float math_tan(float x) { return tan(x); }
FUNCTION double math_tan(double x) { return tan(x); }

FUNCTION float math_lgamma(float x) { return lgamma(x); }
FUNCTION double math_lgamma(double x) { return lgamma(x); }

template <class T> DEVICE T frexp_mantissa(T x) { int exponent; return frexp(x, &exponent); }

template <class T> DEVICE int frexp_exponent(T x) { int exponent; frexp(x, &exponent); return exponent; }

// The power of ten is exact up to 10^22.
template <class T> DEVICE T round_decimals(T x, T decimals)
{
    double scale = 1;
    for (T n = fabs(decimals); n >= 1; n -= 1) scale *= 10;
    return decimals < 0 ? rint(x / (T)scale) * (T)scale : rint(x * (T)scale) / (T)scale;
}

template <class T> DEVICE T lerp_value(T a, T b, T weight) { return fabs(weight) < (T)0.5 ? fma(weight, b - a, a) : fma(a - b, 1 - weight, b); }

template <class T> DEVICE T log_add_exp(T a, T b)
{
    if (a == b && isinf(a)) return a;
    return maximum(a, b) + log1p(exp(-fabs(a - b)));
}

template <class T> DEVICE T log_add_exp2(T a, T b)
{
    if (a == b && isinf(a)) return a;
    return maximum(a, b) + log1p(exp2(-fabs(a - b))) * (T)1.4426950408889634;  // 1 / log 2
}

template <class T> DEVICE T x_log_y(T x, T y) { return y != y ? y : x == 0 ? (T)0 : x * log(y); }

template <class T> DEVICE T x_log1p_y(T x, T y) { return y != y ? y : x == 0 ? (T)0 : x * log1p(y); }

// Activations. exp of a negative number alone, so that nothing overflows.
template <class T> DEVICE T sigmoid(T x)
{
    const T e = exp(-fabs(x));
    return (x < 0 ? e : (T)1) / (1 + e);
}

template <class T> DEVICE T silu(T x)
{
    const T shift = sizeof(T) == 4 ? 64 : 512, scale = sizeof(T) == 4 ? (T)1.6038108905486378e-28 : (T)4.3774910500352e-223;  // exp(-shift)
    const bool deep = x < -shift;
    const T e = exp(deep ? x + shift : -fabs(x));
    const T y = (x < 0 ? x * e : x) / (deep ? (T)1 : 1 + e);
    return deep ? y * scale : y;
}

template <class T> DEVICE T sqrt_half(T) { return (T)0.70710678118654752; }

template <class T> DEVICE T gelu_tanh(T x) { return x * sigmoid((T)1.5957691216057308 * (x + (T)0.044715 * x * x * x)); }

template <class T> DEVICE T gelu_tanh_eager(T x) { return (T)0.5 * x * (1 + tanh((T)0.79788456080286536 * fma((T)0.044715, x * x * x, x))); }

template <class T> DEVICE T mish(T x)
{
    const T n = exp(x), w = n * (n + 2);
    return x > 20 ? x : x * (w / (w + 2));
}

template <class T> DEVICE T softplus(T x, T beta, T threshold)
{
    const T y = x * beta;
    return y > threshold ? x : (fmax(y, (T)0) + log1p(exp(-fabs(y)))) / beta;
}

template <class T> DEVICE T log_sigmoid(T x) { return fmin(x, (T)0) - log1p(exp(-fabs(x))); }

template <class T> DEVICE T selu(T x) { return x > 0 ? x * (T)1.0507009873554805 : expm1(x) * (T)1.7580993408473768; }

template <class T> DEVICE T hard_sigmoid(T x) { return minimum(maximum(x + 3, (T)0), (T)6) / 6; }

// Half tier: results within one unit of fp16 and bf16 at a few special-function instructions.
DEVICE float half_exp(float x) { return ex2_approx(x * 1.44269504f); }

DEVICE float half_sigmoid(float x)
{
    const float e = ex2_approx(-fabsf(x) * 1.44269504f);
    return (x < 0.0f ? e : 1.0f) * rcp_approx(1.0f + e);
}

DEVICE float half_silu(float x) { return x * half_sigmoid(x); }

DEVICE float half_tanh(float x)
{
    const float e = ex2_approx(-fabsf(x) * 2.88539008f);
    return fabsf(x) < 0.03125f ? x : copysignf((1.0f - e) * rcp_approx(1.0f + e), x);
}

DEVICE float half_gelu_tanh(float x) { return x * half_sigmoid(x * fmaf(0.0713548163f * x, x, 1.59576912f)); }

DEVICE float half_gelu(float x) { return x * normcdff(x); }

DEVICE float half_mish(float x)
{
    const float n = ex2_approx(x * 1.44269504f), w = n * (n + 2.0f);
    return x > 20.0f ? x : x * (w * rcp_approx(w + 2.0f));
}

DEVICE float half_softplus(float x, float beta, float threshold) { return softplus(x, beta, threshold); }
