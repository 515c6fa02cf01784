// Special functions that CUDA has none of, in fp64; those of fp32 are these, rounded: a unit in the last place wherever fp64 does not
// cancel, for functions that nobody calls on every element of a training step. The polynomials are Chebyshev fits with 40 digits.
// Loops stay loops: unrolled, with fp64 divisions and powers in them, they would cost NVRTC seconds.

template <int N> DEVICE double polynomial(const double (&coefficients)[N], double x)
{
    double p = coefficients[0];
#pragma unroll
    for (int k = 1; k < N; ++k) p = fma(p, x, coefficients[k]);
    return p;
}

DEVICE double not_a_number() { return __longlong_as_double(0x7ff8000000000000ll); }

DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }

// Below, sin(x) / x is 1 to half a unit in the last place.
template <class T> struct sine_range { static constexpr T least = (T)1.22070312e-4; };
template <> struct sine_range<double> { static constexpr double least = 3.7252902984619141e-9; };

template <class T> DEVICE T sinc(T x) { return fabs(x) < sine_range<T>::least ? (T)1 : sinpi(x) / (x * (T)3.1415926535897931); }

template <class T> DEVICE T sinc_eager(T x)
{
    const T y = x * (T)3.1415926535897931;
    return x == 0 ? (T)1 : math_sin(y) / y;
}

// log(x / (1 - x)), about 1/2 by the exact 2 x - 1.
template <class T> DEVICE T logit(T x) { return fabs(x - (T)0.5) < (T)0.25 ? log1p((2 * x - 1) / (1 - x)) : log(x / (1 - x)); }

template <class T> DEVICE T clamp_logit(T x, T eps) { return x < eps ? eps : x > 1 - eps ? 1 - eps : x; }

template <class T> DEVICE T entropy(T x) { return x > 0 ? -x * log(x) : x == 0 ? (T)0 : x != x ? x : (T)-infinity(); }

FUNCTION double log_normal_cdf(double x)
{
    return x < -1 ? log(erfcx(x * -0.70710678118654752) / 2) - x * x / 2 : log1p(-normcdf(-x));
}
DEVICE float log_normal_cdf(float x) { return (float)log_normal_cdf((double)x); }

template <class T> DEVICE T spherical_bessel(T x) { return fabs(x) < sine_range<T>::least ? (T)1 : isinf(x) ? (T)0 : math_sin(x) / x; }

// The Bessel functions beyond 25 by Hankel's expansion, of which the 18th term is 2^-50 and the phase is exact; 4 order^2 is `four`.
FUNCTION double bessel_far(double x, double four, bool is_second)
{
    double term = 1, p = 1, q = 0;
#pragma unroll 1
    for (int k = 1; k < 19; ++k) {
        term *= (four - (2 * k - 1) * (2 * k - 1)) / (8 * k * x);
        (k % 2 ? q : p) += k % 4 == 1 || k % 4 == 0 ? term : -term;
    }
    const double plus = math_sin(x) + math_cos(x), minus = math_sin(x) - math_cos(x);
    const double cosine = four == 0 ? plus : minus, sine = four == 0 ? minus : -plus;
    return (is_second ? p * sine + q * cosine : p * cosine - q * sine) / sqrt(3.1415926535897931 * x);
}

// NaN at infinity, as torch's.
FUNCTION double bessel_j0(double x) { return fabs(x) > 25 ? bessel_far(fabs(x), 0, false) : j0(x); }
DEVICE float bessel_j0(float x) { return (float)bessel_j0((double)x); }

FUNCTION double bessel_j1(double x)
{
    if (!(fabs(x) > 25)) return j1(x);
    const double y = bessel_far(fabs(x), 4, false);
    return x < 0 ? -y : y;
}
DEVICE float bessel_j1(float x) { return (float)bessel_j1((double)x); }

FUNCTION double bessel_y0(double x) { return x > 25 ? bessel_far(x, 0, true) : x == 0 ? -infinity() : y0(x); }
DEVICE float bessel_y0(float x) { return (float)bessel_y0((double)x); }

FUNCTION double bessel_y1(double x) { return x > 25 ? bessel_far(x, 4, true) : x == 0 ? -infinity() : y1(x); }
DEVICE float bessel_y1(float x) { return (float)bessel_y1((double)x); }

FUNCTION double bessel_i0(double x) { return isinf(x) ? not_a_number() : cyl_bessel_i0(x); }
DEVICE float bessel_i0(float x) { return (float)bessel_i0((double)x); }

FUNCTION double bessel_i1(double x)
{
    const double y = isinf(x) ? not_a_number() : cyl_bessel_i1(fabs(x));
    return x < 0 ? -y : y;
}
DEVICE float bessel_i1(float x) { return (float)bessel_i1((double)x); }

// exp(-x) I(x) beyond 30 by its asymptotic series, of which the 17th term is 2^-56.
DEVICE double scaled_bessel_series(double x, double four)
{
    double term = 1, sum = 1;
#pragma unroll 1
    for (int k = 1; k < 18; ++k) {
        term *= ((2 * k - 1) * (2 * k - 1) - four) / (8 * k * x);
        sum += term;
    }
    return sum / sqrt(6.2831853071795865 * x);
}

FUNCTION double scaled_bessel_i0(double x)
{
    const double a = fabs(x);
    return a > 30 ? scaled_bessel_series(a, 0) : exp(-a) * cyl_bessel_i0(a);
}
DEVICE float scaled_bessel_i0(float x) { return (float)scaled_bessel_i0((double)x); }

FUNCTION double scaled_bessel_i1(double x)
{
    const double a = fabs(x), y = a > 30 ? scaled_bessel_series(a, 4) : exp(-a) * cyl_bessel_i1(a);
    return x < 0 ? -y : y;
}
DEVICE float scaled_bessel_i1(float x) { return (float)scaled_bessel_i1((double)x); }

// exp(x) K(x), K the modified Bessel function of the second kind: up to 2 by the series about 0 (Abramowitz and Stegun 9.6.11 and
// 9.6.13), then sqrt(x) exp(x) K(x) as a polynomial in 1 / x.
FUNCTION double scaled_bessel_k0(double x)
{
    if (!(x > 0)) return x == 0 ? infinity() : not_a_number();
    if (x > 2) {
        constexpr double decay[] = {
            -6.183509185741941e-11, 1.0806290149518295e-10, 1.7977981899954878e-10, -3.0539020868001565e-10, -4.506683106759898e-10,
            7.977983533091815e-10, 3.233433692180319e-11, 6.837018659348517e-11, -1.8006773523392004e-09, 3.791192703615846e-09,
            -7.3618275080282515e-09, 1.7056674605334674e-08, -4.131061283701578e-08, 1.0295120376495239e-07, -2.689135887009184e-07,
            7.427807838466459e-07, -2.1911767539401716e-06, 7.002245564109627e-06, -2.473520464665274e-05, 9.956054742546008e-05,
            -0.0004797690567629981, 0.0030328918102751935, -0.031071461824889554, 1.2185953385133905
        };
        return polynomial(decay, 4 / x - 1) / sqrt(x);
    }
    const double s = x * x / 4;
    double term = 1, i0 = 1, sum = 0, harmonic = 0;
#pragma unroll 1
    for (int k = 1; k < 16; ++k) {
        term *= s / (k * k);
        harmonic += 1.0 / k;
        i0 += term;
        sum += term * harmonic;
    }
    return (sum - (log(x / 2) + 0.57721566490153286) * i0) * exp(x);
}
DEVICE float scaled_bessel_k0(float x) { return (float)scaled_bessel_k0((double)x); }

FUNCTION double scaled_bessel_k1(double x)
{
    if (!(x > 0)) return x == 0 ? infinity() : not_a_number();
    if (x > 2) {
        constexpr double decay[] = {
            6.73716173849808e-11, -1.1801191034535537e-10, -1.948680720152238e-10, 3.3153918291421876e-10, 4.921710202548386e-10,
            -8.740019154894709e-10, -2.104015257574649e-11, -1.0584430289297026e-10, 2.0346220468711174e-09, -4.313336112817399e-09,
            8.49114322410236e-09, -1.9827457966367164e-08, 4.843094038201199e-08, -1.220284967173793e-07, 3.2298873862640425e-07,
            -9.067094776630646e-07, 2.730040312895642e-06, -8.961207299463647e-06, 3.284386565057862e-05, -0.00013959021956830856,
            0.0007357241549046456, -0.005566729880074451, 0.10334973775386527, 1.363151890371342
        };
        return polynomial(decay, 4 / x - 1) / sqrt(x);
    }
    const double s = x * x / 4;
    double term = x / 2, i1 = 0, sum = 0, harmonics = 1 - 2 * 0.57721566490153286;
#pragma unroll 1
    for (int k = 1; k < 17; ++k) {
        i1 += term;
        sum += term * harmonics;
        term *= s / (k * (k + 1));
        harmonics += 1.0 / k + 1.0 / (k + 1);
    }
    return (1 / x + log(x / 2) * i1 - sum / 2) * exp(x);
}
DEVICE float scaled_bessel_k1(float x) { return (float)scaled_bessel_k1((double)x); }

// exp(-x), at 0 and below the special values of the scaled function.
FUNCTION double bessel_k0(double x) { return x > 0 ? (isinf(x) ? 0.0 : scaled_bessel_k0(x) * exp(-x)) : scaled_bessel_k0(x); }
DEVICE float bessel_k0(float x) { return (float)bessel_k0((double)x); }

FUNCTION double bessel_k1(double x) { return x > 0 ? (isinf(x) ? 0.0 : scaled_bessel_k1(x) * exp(-x)) : scaled_bessel_k1(x); }
DEVICE float bessel_k1(float x) { return (float)bessel_k1((double)x); }

// Airy's Ai, NaN at the infinities as torch's: the series about 0, and beyond it in z = 2/3 |x|^(3/2) as polynomials in 1 / z and 1 / z^2.
FUNCTION double airy_ai(double x)
{
    if (!isfinite(x)) return not_a_number();
    const double a = fabs(x), z = 2 * a * sqrt(a) / 3, root = sqrt(sqrt(a));
    if (x > 2) {
        constexpr double decay[] = {
            -4.843286683941047e-11, 8.319202972661437e-11, 1.459568246434664e-10, -2.4438044698817276e-10, -3.50073421904526e-10,
            6.070149495604203e-10, 8.099243227482072e-11, -5.857081685429259e-11, -1.1719183348888062e-09, 2.4027096157916705e-09,
            -4.396488383518083e-09, 9.99234762282201e-09, -2.379735386015867e-08, 5.801773667635132e-08, -1.4812636113155263e-07,
            3.997093524096636e-07, -1.1510252662494373e-06, 3.587832900669974e-06, -1.2354390756678582e-05, 4.8463340538145154e-05,
            -0.00022785221368840485, 0.0014132014717028515, -0.014613458724023247, 0.983679282828043
        };
        return polynomial(decay, 3.7712361663282534 / z - 1) * exp(-z) / (3.5449077018110321 * root);
    }
    if (x < -3.5) {
        constexpr double even[] = {
            -4.409917404198228e-12, 7.0404225170508976e-12, 1.058822824271373e-11, -1.6133762978361412e-11, -2.2056487321082185e-11,
            3.6435216789284086e-11, -7.165637710274555e-12, 2.3063379883133802e-11, -1.0457613910588685e-10, 2.4253832159908016e-10,
            -5.878848578360295e-10, 1.617515696929762e-09, -4.9193447951222565e-09, 1.6939626857373987e-08, -6.876662027111663e-08,
            3.494889388970651e-07, -2.4605546069701882e-06, 2.9077859884488432e-05, -0.0009069100368941837, 0.9990611088081194
        };
        constexpr double odd[] = {
            -1.3442103962308792e-11, 1.948700662591415e-11, 5.2072388950916295e-11, -7.447267573627758e-11, -1.0415655764590736e-10,
            1.499591301563674e-10, 1.0071028295461795e-10, -1.399722522553584e-10, -1.1085795596732413e-10, 1.7415584763403677e-10,
            -9.197153823783812e-11, 2.0981289213109366e-10, -5.645445256679178e-10, 1.2623169993611452e-09, -2.981569024599423e-09,
            7.662940720623924e-09, -2.1505284022789922e-08, 6.732892410671941e-08, -2.4277068624525203e-07, 1.0574555785573805e-06,
            -6.011927230962392e-06, 5.12117782820529e-05, -0.0008703312347967206, 0.06851548746567507
        };
        const double s = 38.111111111111114 / (z * z) - 1, phase = z - 0.78539816339744831;
        return (math_cos(phase) * polynomial(even, s) + math_sin(phase) * polynomial(odd, s) / z) / (1.7724538509055160 * root);
    }
    const double cube = x * x * x;
    double f = 1, g = x, f_term = 1, g_term = x;
#pragma unroll 1
    for (int k = 1; k < 22; ++k) {
        f_term *= cube / ((3 * k - 1) * (3 * k));
        g_term *= cube / ((3 * k) * (3 * k + 1));
        f += f_term;
        g += g_term;
    }
    return 0.35502805388781724 * f - 0.25881940379280680 * g;
}
DEVICE float airy_ai(float x) { return (float)airy_ai((double)x); }

// Below 0 by reflection, up to 10 by recurrence, then Stirling's series.
FUNCTION double digamma(double x)
{
    if (x == 0) return 1 / -x;
    double sum = 0;
    if (x < 0) {
        if (x == trunc(x)) return not_a_number();
        sum = -3.1415926535897931 * cospi(x) / sinpi(x);
        x = 1 - x;
    }
    for (; x < 10; x += 1) sum -= 1 / x;
    constexpr double bernoulli[] = {
        -0.4432598039215686, 0.08333333333333333, -0.021092796092796094, 0.007575757575757576, -0.004166666666666667,
        0.003968253968253968, -0.008333333333333333, 0.08333333333333333
    };
    const double w = 1 / (x * x);
    return sum + (log(x) - 0.5 / x - w * polynomial(bernoulli, w));
}
DEVICE float digamma(float x) { return (float)digamma((double)x); }

// The sum of (q + k)^-s for s > 1, q > 0: ten terms, the rest by Euler and Maclaurin's formula.
FUNCTION double zeta_sum(double s, double q)
{
    constexpr double bernoulli[] = {
        0.08333333333333333, -0.001388888888888889, 3.306878306878307e-05, -8.267195767195768e-07, 2.08767569878681e-08,
        -5.284190138687493e-10, 1.3382536530684679e-11, -3.3896802963225827e-13, 8.586062056277845e-15, -2.174868698558062e-16,
        5.5090028283602295e-18, -1.3954464685812522e-19
    };
    double sum = 0;
#pragma unroll 1
    for (int k = 0; k < 10; ++k) sum += pow(q + k, -s);
    const double a = q + 10, p = pow(a, -s);
    double term = s * p / a;
    sum += pow(a, 1 - s) / (s - 1) + p / 2;
#pragma unroll 1
    for (int j = 1; j < 13; ++j) {
        sum += bernoulli[j - 1] * term;
        term *= (s + (2 * j - 1)) * (s + 2 * j) / (a * a);
    }
    return sum;
}

// Hurwitz's zeta function. Where q < 0, its first n terms are those of two sums from r = q + n - 1 up, by (-x)^-s = +-x^-s.
FUNCTION double zeta(double s, double q)
{
    if (s == 1 || (!(s < 1) && q <= 0 && q == floor(q))) return infinity();
    if (!(s > 1) || q != q) return not_a_number();
    if (isinf(s)) return q == 1 ? 1 : q < 1 && !isinf(q) ? infinity() : not_a_number();  // as torch has it, where all terms are 0 too
    if (q > 0) return isinf(q) ? not_a_number() : zeta_sum(s, q);
    if (s != floor(s)) return not_a_number();
    const double n = ceil(-q), r = -(q + (n - 1)), sign = fmod(s, 2) == 0 ? 1 : -1;
    return zeta_sum(s, q + n) + sign * zeta_sum(s, r) - sign * zeta_sum(s, r + n);  // the first two cancel half way between integers
}
DEVICE float zeta(float s, float q) { return (float)zeta((double)s, (double)q); }

// Of x >= 0: that it is compared leaves tgamma's half for negative numbers, a reflection by sin and pow, out of
// the kernel: NVRTC takes 30 ms less.
DEVICE double gamma_of_positive(double x) { return x >= 0 ? tgamma(x) : not_a_number(); }

FUNCTION double polygamma(double x, double n)
{
    if (n == 0) return digamma(x);
    if (n == 1 && x == -infinity()) return not_a_number();  // as torch's own function of the first degree
    if (n == 1 && isinf(x) && x > 0) return 0;
    return (fmod(n, 2) == 0 ? -1 : 1) * gamma_of_positive(n + 1) * zeta(n + 1, x);
}
DEVICE float polygamma(float x, float n) { return (float)polygamma((double)x, (double)n); }

// log(Gamma(1 + a)) / a for a in [0, 1].
DEVICE double log_gamma_1p_over(double a)
{
    constexpr double fit[] = {
        7.639092521777215e-12, -2.3933398839462246e-11, 3.311835672167677e-11, -1.0474712795206161e-10, 4.320413056213583e-10,
        -1.3699500407040754e-09, 4.224420317065063e-09, -1.3498077369276839e-08, 4.3429278490077415e-08, -1.4006572569595664e-07,
        4.5435332271160426e-07, -1.484540063588933e-06, 4.892819541320356e-06, -1.6302861339725934e-05, 5.5097616218622696e-05,
        -0.0001898258024931559, 0.0006721846829855331, -0.0024816898010490236, 0.009820705603133714, -0.044353899112896854,
        0.27805444924906697, -0.24156447527049044
    };
    return polynomial(fit, 2 * a - 1);
}

// x - log(1 + x) for |x| <= 0.25, without cancellation.
DEVICE double minus_log1p(double x)
{
    double sum = 0;
#pragma unroll 1
    for (int k = 28; k >= 2; --k) sum = 1.0 / k - x * sum;
    return x * x * sum;
}

// exp and log where they stand in several places: inlined in each, NVRTC took 1.15 times as long for the incomplete gamma functions.
FUNCTION double called_exp(double x) { return exp(x); }

FUNCTION double called_log(double x) { return log(x); }

// x^a exp(-x) / Gamma(1 + a), by Stirling's series from 10 on. In two places of one function: inlined, NVRTC took 1.4 times as long.
FUNCTION double gamma_prefactor(double a, double x)
{
    if (a < 10) return (x < 700 ? pow(x, a) * called_exp(-x) : called_exp(a * called_log(x) - x)) / gamma_of_positive(a + 1);
    constexpr double stirling[] = {
        -0.0019175269175269176, 0.0008417508417508417, -0.0005952380952380953, 0.0007936507936507937, -0.002777777777777778,
        0.08333333333333333
    };
    const double m = (x - a) / a, w = 1 / (a * a);
    const double exponent = -a * (fabs(m) <= 0.25 ? minus_log1p(m) : m - called_log(x / a)) - polynomial(stirling, w) / a;
    return called_exp(exponent) / sqrt(6.2831853071795865 * a);
}

// The regularised incomplete gamma functions, P and Q = 1 - P: for large a near x Temme's expansion (DLMF 8.12), else the series of P,
// the continued fraction of Q (DLMF 8.9.2), or for small a and x the series of Q, of which no part cancels.
FUNCTION double incomplete_gamma(double a, double x, bool upper)
{
    if (!(a >= 0 && x >= 0) || (a == 0 && x == 0) || (isinf(a) && isinf(x))) return not_a_number();
    if (x == 0 || isinf(a)) return upper ? 1 : 0;
    if (a == 0 || isinf(x)) return upper ? 0 : 1;
    constexpr int most = 2000;
    if (a > 5000 && fabs(x - a) < 0.1 * a) {
        constexpr double c0[] = {
            6.707853543401498e-09, -1.7665952736826078e-07, 8.296711340953087e-07, -1.85406221071516e-06, -2.185448510679992e-06,
            3.919263178522438e-05, -0.0001787551440329218, 0.0003527336860670194, 0.0011574074074074073, -0.014814814814814815,
            0.08333333333333333, -0.3333333333333333
        };
        constexpr double c1[] = {
            7.64916091608111e-06, -1.8098550334489977e-05, -4.018775720164609e-07, 0.00020576131687242798, -0.0009902263374485596,
            0.0026455026455026454, -0.003472222222222222, -0.001851851851851852
        };
        constexpr double c2[] = {
            5.2923448829120125e-05, -0.0001073665322636516, 2.0093878600823047e-06, 0.0007716049382716049, -0.0026813271604938273,
            0.004133597883597883
        };
        const double m = (x - a) / a, phi = minus_log1p(m), eta = copysign(sqrt(2 * phi), m), side = upper ? 1 : -1;
        const double rest = polynomial(c0, eta) + (polynomial(c1, eta) + polynomial(c2, eta) / a) / a;
        return 0.5 * erfc(side * eta * sqrt(a / 2)) + side * called_exp(-a * phi) * rest / sqrt(6.2831853071795865 * a);
    }
    if (a < 1 && x < 1.1 && upper) {
        const double log_power = a * (called_log(x) - log_gamma_1p_over(a));
        double term = 1, sum = 0;
#pragma unroll 1
        for (int n = 1; n < 30; ++n) {
            term *= -x / n;
            sum += term / (a + n);
        }
        return -expm1(log_power) - a * called_exp(log_power) * sum;
    }
    if (x < (a < 1 ? 1.1 : a + 1)) {
        double term = 1, sum = 1;
#pragma unroll 1
        for (int n = 1; n < most && term > sum * 1e-17; ++n) {
            term *= x / (a + n);
            sum += term;
        }
        const double p = gamma_prefactor(a, x) * sum;
        return upper ? 1 - p : p;
    }
    double b = x + 1 - a, c = 1e300, d = 1 / b, h = d;
#pragma unroll 1
    for (int n = 1; n < most; ++n) {
        const double numerator = -n * (n - a);
        b += 2;
        d = 1 / (numerator * d + b);
        c = b + numerator / c;
        h *= c * d;
        if (fabs(c * d - 1) < 1e-16) break;
    }
    const double q = gamma_prefactor(a, x) * a * h;
    return upper ? q : 1 - q;
}
DEVICE float incomplete_gamma(float a, float x, bool upper) { return (float)incomplete_gamma((double)a, (double)x, upper); }

// Orthogonal polynomials of degree n, cut to an integer; 0 for a negative one. Chebyshev's within (-1, 1) by their trigonometric form,
// as torch: the angle is kept to n digits less, but no degree takes longer.
DEVICE bool is_even(long long n) { return n % 2 == 0; }

// p(k + 1) = 2 x p(k) - p(k - 1) from p(0) = 1 and p(1), until it is NaN.
DEVICE double chebyshev(double x, double first, long long n)
{
    double p = 1, q = first;
    if (n == 0) return p;
#pragma unroll 1
    for (long long k = 2; k <= n && q == q; ++k) {
        const double r = 2 * x * q - p;
        p = q;
        q = r;
    }
    return q;
}

FUNCTION double chebyshev_t(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    if (n < 0) return 0;
    if (fabs(x) == 1) return x > 0 || is_even(n) ? 1 : -1;
    return n > 6 && fabs(x) < 1 ? math_cos(n * acos(x)) : chebyshev(x, x, n);
}
DEVICE float chebyshev_t(float x, float degree) { return (float)chebyshev_t((double)x, (double)degree); }

FUNCTION double chebyshev_u(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    if (n < 0) return 0;
    if (fabs(x) == 1) return x > 0 || is_even(n) ? n + 1.0 : -(n + 1.0);
    return n > 8 && fabs(x) < 1 ? math_sin((n + 1) * acos(x)) / sqrt((1 - x) * (1 + x)) : chebyshev(x, 2 * x, n);
}
DEVICE float chebyshev_u(float x, float degree) { return (float)chebyshev_u((double)x, (double)degree); }

FUNCTION double chebyshev_v(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    if (n < 0) return 0;
    if (fabs(x) == 1) return x > 0 ? 1 : is_even(n) ? n + n + 1.0 : -(n + n + 1.0);
    return n > 8 && fabs(x) < 1 ? math_cos((n + 0.5) * acos(x)) / sqrt((1 + x) / 2) : chebyshev(x, 2 * x - 1, n);
}
DEVICE float chebyshev_v(float x, float degree) { return (float)chebyshev_v((double)x, (double)degree); }

FUNCTION double chebyshev_w(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    if (n < 0) return 0;
    if (fabs(x) == 1) return x > 0 ? n + n + 1.0 : is_even(n) ? 1 : -1;
    return n > 8 && fabs(x) < 1 ? math_sin((n + 0.5) * acos(x)) / sqrt((1 - x) / 2) : chebyshev(x, 2 * x + 1, n);
}
DEVICE float chebyshev_w(float x, float degree) { return (float)chebyshev_w((double)x, (double)degree); }

// By the degree and 2 x - 1, which fp64 holds of every fp32 x to a rounding.
template <class T> DEVICE T shifted_chebyshev_t(T x, T degree) { return (T)chebyshev_t(2 * (double)x - 1, (double)degree); }

template <class T> DEVICE T shifted_chebyshev_u(T x, T degree) { return (T)chebyshev_u(2 * (double)x - 1, (double)degree); }

template <class T> DEVICE T shifted_chebyshev_v(T x, T degree) { return (T)chebyshev_v(2 * (double)x - 1, (double)degree); }

template <class T> DEVICE T shifted_chebyshev_w(T x, T degree) { return (T)chebyshev_w(2 * (double)x - 1, (double)degree); }

// p(k + 1) = (a x + b) p(k) - c p(k - 1), of which a, b and c hang on k.
FUNCTION double hermite_h(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    double p = 1, q = 2 * x;
    if (n <= 0) return n == 0;
#pragma unroll 1
    for (long long k = 1; k < n && q == q; ++k) {
        const double r = 2 * x * q - 2 * k * p;
        p = q;
        q = r;
    }
    return q;
}
DEVICE float hermite_h(float x, float degree) { return (float)hermite_h((double)x, (double)degree); }

FUNCTION double hermite_he(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    double p = 1, q = x;
    if (n <= 0) return n == 0;
#pragma unroll 1
    for (long long k = 1; k < n && q == q; ++k) {
        const double r = x * q - k * p;
        p = q;
        q = r;
    }
    return q;
}
DEVICE float hermite_he(float x, float degree) { return (float)hermite_he((double)x, (double)degree); }

FUNCTION double laguerre_l(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    double p = 1, q = 1 - x;
    if (n <= 0 || x == 0) return n >= 0;
#pragma unroll 1
    for (long long k = 1; k < n && q == q; ++k) {
        const double r = ((2 * k + 1 - x) * q - k * p) / (k + 1);
        p = q;
        q = r;
    }
    return q;
}
DEVICE float laguerre_l(float x, float degree) { return (float)laguerre_l((double)x, (double)degree); }

FUNCTION double legendre_p(double x, double degree)
{
    const long long n = __double2ll_rz(degree);
    double p = 1, q = x;
    if (n <= 0) return n == 0;
    if (fabs(x) == 1) return x > 0 || is_even(n) ? 1 : -1;
#pragma unroll 1
    for (long long k = 1; k < n && q == q; ++k) {
        const double r = ((2 * k + 1) * x * q - k * p) / (k + 1);
        p = q;
        q = r;
    }
    return q;
}
DEVICE float legendre_p(float x, float degree) { return (float)legendre_p((double)x, (double)degree); }

// Integers: by Euclid, the sign and the wrap of the largest negative number as torch's.
template <class T> DEVICE T common_divisor(T a, T b)
{
    a = wrap_abs(a);
    b = wrap_abs(b);
    while (a != 0) {
        const T r = modulo_trunc(b, a);
        b = a;
        a = r;
    }
    return b;
}

// The product of narrow integers is one of int, as torch's: cut after its sign.
template <class T> DEVICE T common_multiple(T a, T b)
{
    const T d = common_divisor(a, b);
    return d == 0 ? (T)0 : (T)wrap_abs(wrap_mul(+divide_trunc(a, d), +b));
}

// The next value of bf16, whose bits are the upper ones of fp32's, and of fp16. Both arguments are rounded to the type first.
DEVICE unsigned next_bits(unsigned a, unsigned b, unsigned sign)
{
    const bool is_up = (b & sign) == 0 ? (a & sign) != 0 || a < b : (a & sign) != 0 && a > b;
    if (a == b || (a | b) == sign) return b;
    if ((a & ~sign) == 0) return (b & sign) | 1u;
    return is_up == ((a & sign) == 0) ? a + 1 : a - 1;
}

DEVICE float next_bf16(float a, float b)
{
    return a != a ? a : b != b ? b : __uint_as_float(next_bits(bf16_word(a, 0.0f) & 0xffffu, bf16_word(b, 0.0f) & 0xffffu, 0x8000u) << 16);
}

DEVICE float next_f16(float a, float b)
{
    return a != a ? a : b != b ? b : f16_value((unsigned short)next_bits(f16_bits(a), f16_bits(b), 0x8000u));
}
