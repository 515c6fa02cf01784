// N elements of one operand: one access of up to 16 bytes, the widest that sm_75 to sm_90 have, or several of 16.

template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) vec { T at[N]; };

// A load of sizeof(T) * N bytes; `p` must be aligned as a vec is.
template <int N, class T> DEVICE vec<T, N> load_vector(const T* p) { return *reinterpret_cast<const vec<T, N>*>(p); }

// N single loads, for an operand that is not aligned.
template <int N, class T> DEVICE vec<T, N> load_elements(const T* p)
{
    vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] = p[k];
    return v;
}

// pack: N results to the N elements of one access; halves are rounded in pairs, one instruction for two.
template <class T> struct packed { typedef T word; static const int elements = 1; DEVICE T from(const T* x) { return *x; } };
template <> struct packed<boolean> { typedef boolean word; static const int elements = 1; DEVICE boolean from(const bool* x) { return narrow_to<boolean>::from(*x); } };
template <> struct packed<bf16> { typedef unsigned word; static const int elements = 2; DEVICE unsigned from(const float* x) { return bf16_word(x[0], x[1]); } };
template <> struct packed<f16> { typedef unsigned word; static const int elements = 2; DEVICE unsigned from(const float* x) { return f16_word(x[0], x[1]); } };

// A store of sizeof(T) * N bytes; `p` must be aligned as a vec is, and N even for halves.
template <class T, class C, int N> DEVICE void store_vector(T* p, const C (&x)[N])
{
    typedef packed<T> P;
    vec<typename P::word, N / P::elements> v;
#pragma unroll
    for (int k = 0; k < N / P::elements; ++k) v.at[k] = P::from(x + k * P::elements);
    *reinterpret_cast<vec<typename P::word, N / P::elements>*>(p) = v;
}

// N single stores, for an output that is not aligned.
template <class T, class C, int N> DEVICE void store_elements(T* p, const C (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; ++k) p[k] = narrow_to<T>::from(x[k]);
}

// The elements i, i + 1, ... of an operand of n; past the end, zeros that no one stores.
template <int N, class T> DEVICE vec<T, N> load_some(const T* p, long long i, long long n)
{
    vec<T, N> v;
#pragma unroll
    for (int k = 0; k < N; ++k) v.at[k] = i + k < n ? p[i + k] : T{};
    return v;
}

// The elements i, i + 1, ... of an output of n, as far as it reaches.
template <class T, class C, int N> DEVICE void store_some(T* p, long long i, long long n, const C (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k < n) p[i + k] = narrow_to<T>::from(x[k]);
}

// Division by multiply and shift: exact for every numerator below 2^31 (2^63); multiplier and shift as layout.magic_divisor gives them.
DEVICE unsigned divide_u31(unsigned n, unsigned multiplier, unsigned shift) { return (unsigned)(((unsigned long long)n * multiplier) >> shift); }

DEVICE unsigned long long divide_u63(unsigned long long n, unsigned long long multiplier, unsigned shift) { return (__umul64hi(n, multiplier) + n) >> shift; }
