// Complex numbers: the type, and functions with the special values of C99's Annex G, which torch on CUDA has too. Each is scaled so
// that nothing overflows or vanishes on the way to a result that does neither. Operators and conversions are members and friends, so
// that kernels without complex numbers hold none of this.

template <class T> struct alignas(2 * sizeof(T)) complex {
    T re, im;
    complex() = default;
    __device__ __forceinline__ complex(T re, T im) : re(re), im(im) {}
    template <class U> __device__ __forceinline__ explicit complex(U x) : re((T)x), im(0) {}
    template <class U> __device__ __forceinline__ explicit complex(complex<U> z) : re((T)z.re), im((T)z.im) {}
    friend __device__ __forceinline__ complex operator+(complex a, complex b) { return {a.re + b.re, a.im + b.im}; }
    friend __device__ __forceinline__ complex operator-(complex a, complex b) { return {a.re - b.re, a.im - b.im}; }
    friend __device__ __forceinline__ complex operator-(complex a) { return {-a.re, -a.im}; }
    friend __device__ __forceinline__ complex operator*(complex a, complex b) { return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re}; }
    friend __device__ __forceinline__ bool operator==(complex a, complex b) { return a.re == b.re && a.im == b.im; }
    friend __device__ __forceinline__ bool operator!=(complex a, complex b) { return a.re != b.re || a.im != b.im; }
};

template <class T> DEVICE complex<T> make_complex(T re, T im) { return {re, im}; }

template <class T> DEVICE complex<T> conjugate(complex<T> z) { return {z.re, -z.im}; }

template <class T> DEVICE complex<T> scaled(complex<T> z, T factor) { return {z.re * factor, z.im * factor}; }

// The exponent of the smallest normal number, that number, and a power of two of which the third power is in range.
template <class T> struct complex_range { static constexpr int lowest = -126; static constexpr T normal = (T)1.17549435e-38, root = (T)4294967296.0; };
template <> struct complex_range<double> { static constexpr int lowest = -1022; static constexpr double normal = 2.2250738585072014e-308, root = 1.157920892373162e77; };

DEVICE float power_of_two(float, int exponent) { return __int_as_float((exponent + 127) << 23); }
DEVICE double power_of_two(double, int exponent) { return __longlong_as_double((long long)(exponent + 1023) << 52); }

// The exponent of the power of two that brings m >= 0 to [1/4, 1/2); the largest m come to [2, 4). A subnormal m is lifted first.
DEVICE int unit_exponent(float m)
{
    const bool is_low = m < complex_range<float>::normal;
    return max((is_low ? 149 : 125) - (__float_as_int(is_low ? m * 16777216.0f : m) >> 23), -126);
}
DEVICE int unit_exponent(double m)
{
    const bool is_low = m < complex_range<double>::normal;
    return max((is_low ? 1074 : 1021) - (int)(__double_as_longlong(is_low ? m * 9007199254740992.0 : m) >> 52), -1022);
}

template <class T> DEVICE T unit_scale(T m) { return power_of_two(m, min(unit_exponent(m), -complex_range<T>::lowest)); }

// z * 2^exponent, up to twice the range of exponents.
template <class T> DEVICE complex<T> lifted(complex<T> z, int exponent)
{
    const int half = exponent / 2;
    return scaled(scaled(z, power_of_two(z.re, half)), power_of_two(z.re, exponent - half));
}

// Smith's formula, the larger part of the divisor brought to 1 and that of the dividend near the top of the range, so that the smaller
// one keeps its bits: what overflows or vanishes does so in the result, in its last step. The quotient of the divisor's parts may
// vanish, and a product with it too: then the other order of its factors is taken.
template <class T> DEVICE complex<T> complex_divide(complex<T> a, complex<T> b)
{
    const int lowest = complex_range<T>::lowest, lift_b = unit_exponent(fmax(fabs(b.re), fabs(b.im)));
    const int lift_a = min(unit_exponent(fmax(fabs(a.re), fabs(a.im))) - lowest - 2, -lowest);
    const complex<T> n = scaled(a, power_of_two(a.re, lift_a)), d = lifted(b, lift_b);
    if (d.re == 0 && d.im == 0) return {a.re / fabs(d.re), a.im / fabs(d.re)};
    const bool is_wide = fabs(d.re) >= fabs(d.im);
    const T large = is_wide ? d.re : d.im, small = is_wide ? d.im : d.re, ratio = small / large, divisor = large + small * ratio;
    const T low = is_wide ? b.im : b.re;
    const bool is_tiny = fabs(ratio) < complex_range<T>::normal && low != 0;
    const T factor = power_of_two(low, is_tiny ? lift_b : 0);
    const T re = is_tiny ? n.re / large * low * factor : n.re * ratio, im = is_tiny ? n.im / large * low * factor : n.im * ratio;
    const complex<T> q((is_wide ? n.re + im : re + n.im) / divisor, (is_wide ? n.im - re : im - n.re) / divisor);
    return lifted(q, lift_b - lift_a);
}

template <class T> DEVICE complex<T> complex_reciprocal(complex<T> z) { return complex_divide(complex<T>(1, 0), z); }

template <class T> DEVICE complex<T> complex_sign(complex<T> z)
{
    const complex<T> unit = scaled(z, unit_scale(fmax(fabs(z.re), fabs(z.im))));
    const T size = hypot(unit.re, unit.im);
    return size == 0 ? complex<T>(0, 0) : complex<T>(unit.re / size, unit.im / size);
}

template <class T> DEVICE T real_angle(T x) { return x != x ? x : x < 0 ? (T)3.1415926535897931 : (T)0; }

template <class T> DEVICE T real_nan_to_num(T x, T nan, T posinf, T neginf) { return x != x ? nan : !isinf(x) ? x : x > 0 ? posinf : neginf; }

template <class T> DEVICE complex<T> complex_nan_to_num(complex<T> z, T nan, T posinf, T neginf)
{
    return {real_nan_to_num(z.re, nan, posinf, neginf), real_nan_to_num(z.im, nan, posinf, neginf)};
}

template <class T> DEVICE complex<T> complex_interpolate(complex<T> a, complex<T> b, complex<T> weight)
{
    return hypot(weight.re, weight.im) < (T)0.5 ? a + weight * (b - a) : b - (b - a) * (complex<T>(1, 0) - weight);
}

template <class T> FUNCTION complex<T> polar(T size, T angle) { return {size * math_cos(angle), size * math_sin(angle)}; }

template <class T> FUNCTION complex<T> complex_exp(complex<T> z)
{
    if (z.im == 0) return {exp(z.re), z.im};
    if (isinf(z.re) && !isfinite(z.im)) return z.re < 0 ? complex<T>(0, 0) : complex<T>(z.re, z.im - z.im);
    const bool is_large = z.re > tail<T>::shift;
    const T e = exp(is_large ? z.re - tail<T>::shift : z.re), unit = is_large ? 1 / tail<T>::scale : (T)1;
    return {e * math_cos(z.im) * unit, e * math_sin(z.im) * unit};
}

// Near |z| = 1 the logarithm of |z| is that of 1 + (|z|^2 - 1); where |z| is very large or small, that of a multiple.
template <class T> FUNCTION complex<T> complex_log(complex<T> z)
{
    const T x = fabs(z.re), y = fabs(z.im), large = x > y ? x : y, small = x > y ? y : x, s = unit_scale(large);
    const bool is_near = large > (T)0.5 && large < 2;
    const bool is_extreme = !(large < 1 / tail<T>::scale && large > tail<T>::scale);
    const T size = is_near ? log1p(fma(large - 1, large + 1, small * small)) / 2 : is_extreme ? log(hypot(x * s, y * s)) - log(s) : log(hypot(x, y));
    return {size, atan2(z.im, z.re)};
}

template <class T> DEVICE complex<T> complex_exp2(complex<T> z) { return complex_exp(scaled(z, (T)0.69314718055994531)); }

template <class T> DEVICE complex<T> complex_log2(complex<T> z) { return scaled(complex_log(z), (T)1.4426950408889634); }

template <class T> DEVICE complex<T> complex_log10(complex<T> z) { return scaled(complex_log(z), (T)0.43429448190325183); }

template <class T> FUNCTION complex<T> complex_sqrt(complex<T> z)
{
    if (isinf(z.im)) return {fabs(z.im), z.im};
    if (isinf(z.re)) return z.re < 0 ? complex<T>(fabs(z.im - z.im), copysign(z.re, z.im)) : complex<T>(z.re, copysign(z.im - z.im, z.im));
    if (z.re == 0 && z.im == 0) return {0, z.im};
    const T m = fmax(fabs(z.re), fabs(z.im)), r = complex_range<T>::root, limit = r * r;
    const T root = m > limit ? r : m < 1 / limit ? 1 / r : (T)1;
    const T x = fabs(z.re) / root / root, y = z.im / root / root, t = sqrt((x + hypot(x, y)) / 2), u = y / (2 * t);
    return z.re >= 0 ? complex<T>(t * root, u * root) : complex<T>(fabs(u) * root, copysign(t * root, z.im));
}

template <class T> DEVICE complex<T> complex_rsqrt(complex<T> z) { return complex_reciprocal(complex_sqrt(z)); }

template <class T> FUNCTION complex<T> complex_sinh(complex<T> z)
{
    if (z.im == 0) return {sinh(z.re), z.im};
    if ((z.re == 0 || isinf(z.re)) && !isfinite(z.im)) return {z.re, z.im - z.im};
    const T x = fabs(z.re), unit = 1 / tail<T>::scale;
    if (!(x > tail<T>::shift)) return {sinh(z.re) * math_cos(z.im), cosh(x) * math_sin(z.im)};
    const T e = exp(x - tail<T>::shift) / 2;
    return {copysign(e, z.re) * math_cos(z.im) * unit, e * math_sin(z.im) * unit};
}

template <class T> FUNCTION complex<T> complex_cosh(complex<T> z)
{
    if (z.im == 0) return {cosh(z.re), copysign((T)0, z.re) * z.im};
    if (z.re == 0) return {math_cos(z.im), isfinite(z.im) ? z.re * math_sin(z.im) : z.re};
    if (isinf(z.re) && !isfinite(z.im)) return {fabs(z.re), z.im - z.im};
    const T x = fabs(z.re), unit = 1 / tail<T>::scale;
    if (!(x > tail<T>::shift)) return {cosh(x) * math_cos(z.im), sinh(z.re) * math_sin(z.im)};
    const T e = exp(x - tail<T>::shift) / 2;
    return {e * math_cos(z.im) * unit, copysign(e, z.re) * math_sin(z.im) * unit};
}

// By tan(y), sinh(x) and no difference that cancels (Kahan, "Branch Cuts for Complex Elementary Functions", 1987).
template <class T> FUNCTION complex<T> complex_tanh(complex<T> z)
{
    if (isinf(z.re)) return {copysign((T)1, z.re), copysign((T)0, isfinite(z.im) ? math_sin(2 * z.im) : z.im)};
    if (!isfinite(z.im)) return {z.re == 0 ? z.re : z.im - z.im, z.im - z.im};
    if (z.re != z.re) return {z.re, z.im == 0 ? z.im : z.re};
    if (fabs(z.re) > (sizeof(T) == 4 ? 11 : 22)) {
        const T e = exp(-fabs(z.re));
        return {copysign((T)1, z.re), 4 * math_sin(z.im) * math_cos(z.im) * e * e};
    }
    const T t = math_tan(z.im), beta = 1 + t * t, s = sinh(z.re), divisor = 1 + beta * s * s;
    return {beta * sqrt(1 + s * s) * s / divisor, t / divisor};
}

template <class T> DEVICE complex<T> complex_sin(complex<T> z)
{
    const complex<T> w = complex_sinh(complex<T>(-z.im, z.re));
    return {w.im, -w.re};
}

template <class T> DEVICE complex<T> complex_cos(complex<T> z) { return complex_cosh(complex<T>(-z.im, z.re)); }

template <class T> DEVICE complex<T> complex_tan(complex<T> z)
{
    const complex<T> w = complex_tanh(complex<T>(-z.im, z.re));
    return {w.im, -w.re};
}

template <class T> FUNCTION complex<T> complex_expm1(complex<T> z)
{
    if (z.im == 0) return {expm1(z.re), z.im};
    if (!(fabs(z.re) < tail<T>::shift)) return complex_exp(z) - complex<T>(isinf(z.re) && z.re > 0 ? 0 : 1, 0);
    const T half = math_sin(z.im / 2);
    return {expm1(z.re) * math_cos(z.im) - 2 * half * half, exp(z.re) * math_sin(z.im)};
}

// |1 + z|^2 - 1 = x (2 + x) + y^2, where 1 + x would round x away.
template <class T> FUNCTION complex<T> complex_log1p(complex<T> z)
{
    if (!(fabs(z.re) < (T)0.5 && fabs(z.im) < (T)0.5)) return complex_log(complex<T>(1 + z.re, z.im));
    return {z.im == 0 ? log1p(z.re) : log1p(fma(z.im, z.im, z.re * (2 + z.re))) / 2, atan2(z.im, 1 + z.re)};
}

template <class T> FUNCTION complex<T> complex_log_add_exp(complex<T> a, complex<T> b)
{
    const complex<T> low = a.re < b.re ? a : b, high = a.re < b.re ? b : a;
    if (isinf(low.re) && low.re == high.re) return low.re < 0 ? high : complex_log(complex_exp(low) + complex_exp(high));
    return high + complex_log1p(complex_exp(low - high));
}

// The inverse functions by roots of 1 + z and 1 - z, of which no difference cancels (Kahan, as above); far away by log(2 |z|), which
// is the logarithm of what would overflow.
template <class T> DEVICE bool is_far(complex<T> z) { return fmax(fabs(z.re), fabs(z.im)) > complex_range<T>::root; }

template <class T> DEVICE T log_twice(complex<T> z) { return complex_log(z).re + (T)0.69314718055994531; }

template <class T> FUNCTION complex<T> complex_asin(complex<T> z)
{
    if (is_far(z)) return {atan2(z.re, fabs(z.im)), copysign(log_twice(z), z.im)};
    if (z.re != z.re || z.im != z.im) return {z.re == 0 ? z.re : z.re + z.im, z.re + z.im};
    const complex<T> up = complex_sqrt(complex<T>(1 + z.re, z.im)), down = complex_sqrt(complex<T>(1 - z.re, -z.im));
    return {atan2(z.re, up.re * down.re - up.im * down.im), asinh(down.re * up.im - down.im * up.re)};
}

template <class T> FUNCTION complex<T> complex_acos(complex<T> z)
{
    if (is_far(z)) return {atan2(fabs(z.im), z.re), copysign(log_twice(z), -z.im)};
    if (z.re != z.re || z.im != z.im) return {z.re == 0 ? (T)1.5707963267948966 : z.re + z.im, z.re + z.im};
    const complex<T> up = complex_sqrt(complex<T>(1 + z.re, z.im)), down = complex_sqrt(complex<T>(1 - z.re, -z.im));
    return {2 * atan2(down.re, up.re), asinh(up.re * down.im - up.im * down.re)};
}

template <class T> FUNCTION complex<T> complex_acosh(complex<T> z)
{
    if (is_far(z)) return {log_twice(z), atan2(z.im, z.re)};
    if (z.re != z.re || z.im != z.im) return {z.re + z.im, z.re == 0 ? (T)1.5707963267948966 : z.re + z.im};
    const complex<T> down = complex_sqrt(complex<T>(z.re - 1, z.im)), up = complex_sqrt(complex<T>(z.re + 1, z.im));
    return {asinh(down.re * up.re + down.im * up.im), 2 * atan2(down.im, up.re)};
}

// log1p(4 x / |1 - z|^2) / 4 and the angle of (1 - x)(1 + x) - y^2 and 2 y, for x >= 0. Near 1 the quotient may overflow: its logarithm
// is then taken apart; far away both parts are those of 1 / z.
template <class T> FUNCTION complex<T> complex_atanh(complex<T> z)
{
    constexpr T right_angle = (T)1.5707963267948966;
    if (isinf(z.re) || isinf(z.im)) return {copysign((T)0, z.re), z.im != z.im ? z.im : copysign(right_angle, z.im)};
    if (z.re != z.re || z.im != z.im) return {z.re == 0 ? z.re : z.re + z.im, z.re + z.im};
    const T x = fabs(z.re), y = fabs(z.im), size = fmax(x, y);
    if (is_far(z)) {
        const T u = x / size, v = y / size;
        return {copysign(u / (u * u + v * v) / size, z.re), copysign(right_angle, z.im)};
    }
    const T apart = hypot(1 - x, y);
    const T re = apart < (T)0.125 ? (log(fma(apart, apart, 4 * x)) - 2 * log(apart)) / 4 : log1p(4 * x / apart / apart) / 4;
    return {copysign(re, z.re), copysign(atan2(2 * y, (1 - x) * (1 + x) - y * y) / 2, z.im)};
}

template <class T> DEVICE complex<T> complex_asinh(complex<T> z)
{
    const complex<T> w = complex_asin(complex<T>(-z.im, z.re));
    return {w.im, -w.re};
}

template <class T> DEVICE complex<T> complex_atan(complex<T> z)
{
    const complex<T> w = complex_atanh(complex<T>(-z.im, z.re));
    return {w.im, -w.re};
}

template <class T> FUNCTION complex<T> complex_sinc(complex<T> z)
{
    if (z.re == 0 && z.im == 0) return {1, 0};
    const complex<T> angle = scaled(z, (T)3.1415926535897931);
    const T s = sinpi(z.re), c = cospi(z.re), y = fabs(angle.im), unit = 1 / tail<T>::scale;
    if (!(y > tail<T>::shift)) return complex_divide(complex<T>(s * cosh(y), c * sinh(angle.im)), angle);
    const complex<T> q = complex_divide(complex<T>(s, z.im < 0 ? -c : c), angle);
    const T e = exp(y - tail<T>::shift) / 2;
    return {q.re == 0 ? q.re : q.re * e * unit, q.im == 0 ? q.im : q.im * e * unit};
}

FUNCTION complex<double> complex_power(complex<double> base, complex<double> exponent) { return complex_exp(exponent * complex_log(base)); }

// In fp64: the product's rounding is an error of the angle and of the logarithm, and grows with them.
DEVICE complex<float> complex_power(complex<float> base, complex<float> exponent)
{
    const complex<double> w = complex_power(complex<double>(base.re, base.im), complex<double>(exponent.re, exponent.im));
    return {(float)w.re, (float)w.im};
}

// tensor ** number: torch computes these exponents otherwise.
template <class T> FUNCTION complex<T> complex_power_number(complex<T> base, complex<T> exponent)
{
    const complex<T> one(1, 0);
    if (exponent.im == 0) {
        if (exponent.re == 0) return one;
        if (exponent.re == 1) return base;
        if (exponent.re == 2) return base * base;
        if (exponent.re == 3) return base * base * base;
        if (exponent.re == (T)0.5) return complex_sqrt(base);
        if (exponent.re == (T)-0.5) return complex_divide(one, complex_sqrt(base));
        if (exponent.re == -1) return complex_divide(one, base);
        if (exponent.re == -2) return complex_divide(one, base * base);
    }
    return complex_power(base, exponent);
}

// exp of the side that does not overflow.
template <class T> DEVICE complex<T> complex_sigmoid(complex<T> z)
{
    const bool is_negative = z.re < 0;
    const complex<T> one(1, 0), e = complex_exp(is_negative ? z : -z);
    return complex_divide(is_negative ? e : one, one + e);
}

// Two fp16.
struct alignas(4) complex32 {
    unsigned short re, im;
    complex32() = default;
    __device__ __forceinline__ complex32(complex<float> z)
    {
        const unsigned word = f16_word(z.re, z.im);
        re = (unsigned short)word;
        im = (unsigned short)(word >> 16);
    }
    friend __device__ __forceinline__ complex<float> widen(complex32 z) { return {f16_value(z.re), f16_value(z.im)}; }
};

DEVICE complex<float> round_complex32(complex<float> z) { return widen(complex32(z)); }
