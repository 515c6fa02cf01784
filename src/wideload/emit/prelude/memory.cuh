// The next kernel on the stream may start when each block has come here or has ended (programmatic dependent launch: sm_90 and later, where
// that one was launched so). It finds what this one writes behind its own wait_for_previous() alone, and so do those after it: none ends
// before the one ahead of it has. A kernel waits before it reads or writes. Of the kernels of one call none reads or writes what another
// writes: all but the first, which is launched when all before it has ended, wait at their end.
DEVICE void let_next_start()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

DEVICE void wait_for_previous()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// N elements of one operand: one access of up to 16 bytes, the widest that sm_75 to sm_90 have, or several of 16. What is narrower than
// a word stays in words from the load to the arithmetic, which then need not wait for the load where a vector is joined of two branches:
// dropout of bf16 0.985 of the wall against 0.964 on an H200, int8 negation 4.14 against 4.10 TB/s, others equal within 0.6 %.

template <class T> struct element_bits { DEVICE unsigned of(T x) { return x.bits; } DEVICE T value(unsigned bits) { T x; x.bits = bits; return x; } };
template <> struct element_bits<signed char> { DEVICE unsigned of(signed char x) { return (unsigned char)x; } DEVICE signed char value(unsigned bits) { return (signed char)bits; } };
template <> struct element_bits<unsigned char> { DEVICE unsigned of(unsigned char x) { return x; } DEVICE unsigned char value(unsigned bits) { return (unsigned char)bits; } };
template <> struct element_bits<unsigned short> { DEVICE unsigned of(unsigned short x) { return x; } DEVICE unsigned short value(unsigned bits) { return (unsigned short)bits; } };
template <> struct element_bits<short> { DEVICE unsigned of(short x) { return (unsigned short)x; } DEVICE short value(unsigned bits) { return (short)bits; } };

template <class T, int N, bool in_words = (sizeof(T) < 4 && sizeof(T) * N % 4 == 0)> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) vec {
    T at[N];
    __device__ __forceinline__ T get(int k) const { return at[k]; }
    __device__ __forceinline__ void set(int k, T x) { at[k] = x; }
};
template <class T, int N> struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) vec<T, N, true> {
    static const int in_word = 4 / sizeof(T), bits = 8 * sizeof(T);
    unsigned words[N / in_word];
    __device__ __forceinline__ T get(int k) const { return element_bits<T>::value(words[k / in_word] >> k % in_word * bits); }
    __device__ __forceinline__ void set(int k, T x) { words[k / in_word] |= element_bits<T>::of(x) << k % in_word * bits; }
};

// A load of sizeof(T) * N bytes; `p` must be aligned as a vec is.
template <int N, class T> DEVICE vec<T, N> load_vector(const T* p) { return *reinterpret_cast<const vec<T, N>*>(p); }

// What a load tells the L2 of memory that it is to keep longer than what else passes through.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
DEVICE unsigned long long keeping_policy()
{
    unsigned long long policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
#endif

// As load_vector, of what is read again when much else has been read and written: the L2 is to keep it. Volatile, or the compiler might move
// it to before the wait for the kernel that writes it.
template <int N, class T> DEVICE vec<T, N> load_kept(const T* p)
{
#if __CUDA_ARCH__ >= 800
    const int bytes = sizeof(T) * N;
    const unsigned long long policy = keeping_policy();
    union { vec<T, N> elements; unsigned words[bytes < 8 ? 2 : bytes / 4]; } read = {};
#pragma unroll
    for (int k = 0; k < bytes / 16; ++k)
        asm volatile("ld.global.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
            : "=r"(read.words[4 * k]), "=r"(read.words[4 * k + 1]), "=r"(read.words[4 * k + 2]), "=r"(read.words[4 * k + 3])
            : "l"(reinterpret_cast<const unsigned*>(p) + 4 * k), "l"(policy));
    if (bytes == 8) asm volatile("ld.global.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;" : "=r"(read.words[0]), "=r"(read.words[1]) : "l"(p), "l"(policy));
    if (bytes == 4) asm volatile("ld.global.L2::cache_hint.u32 %0, [%1], %2;" : "=r"(read.words[0]) : "l"(p), "l"(policy));
    if (bytes == 2) asm volatile("ld.global.L2::cache_hint.u16 %0, [%1], %2;" : "=r"(read.words[0]) : "l"(p), "l"(policy));
    if (bytes == 1) asm volatile("ld.global.L2::cache_hint.u8 %0, [%1], %2;" : "=r"(read.words[0]) : "l"(p), "l"(policy));
    return read.elements;
#else
    return load_vector<N>(p);
#endif
}

// A single store of what a later kernel of the call reads. The stores of other threads are no reason to let it go.
DEVICE void store_kept(float* p, float x)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("st.global.L2::cache_hint.f32 [%0], %1, %2;" :: "l"(p), "f"(x), "l"(keeping_policy()) : "memory");
#else
    *p = x;
#endif
}

DEVICE void store_kept(double* p, double x)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("st.global.L2::cache_hint.f64 [%0], %1, %2;" :: "l"(p), "d"(x), "l"(keeping_policy()) : "memory");
#else
    *p = x;
#endif
}

// Every step-th of the elements from the first on that lie in step accesses; `p` must be aligned as a vec is. Each word has one that is
// wanted; settled, or the compiler would load that one alone.
template <int N, int step, int first, class T> DEVICE vec<T, N> load_stepped(const T* p)
{
    const int in_word = 4 / sizeof(T), num_words = N / in_word;
    vec<unsigned, num_words> whole[step];
    vec<T, N> v = {};
#pragma unroll
    for (int j = 0; j < step; ++j) {
        whole[j] = load_kept<num_words>(reinterpret_cast<const unsigned*>(p + j * N));
#pragma unroll
        for (int k = 0; k < num_words; ++k) whole[j].at[k] = settled(whole[j].at[k]);
    }
#pragma unroll
    for (int k = 0; k < N; ++k) {
        const int i = k * step + first;
        v.set(k, element_bits<T>::value(whole[i / N].at[i % N / in_word] >> i % in_word * (8 * sizeof(T))));
    }
    return v;
}

// N single loads.
template <int N, class T> DEVICE vec<T, N> load_elements(const T* p)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k) v.set(k, p[k]);
    return v;
}

// Results to the elements of one access; halves are rounded in pairs, one instruction for two.
template <class T, bool in_words, class C, int N> DEVICE void pack(vec<T, N, in_words>& v, const C (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; ++k) v.set(k, narrow_to<T>::from(x[k]));
}
template <int N> DEVICE void pack(vec<bf16, N, true>& v, const float (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; k += 2) v.words[k / 2] = bf16_word(x[k], x[k + 1]);
}
template <int N> DEVICE void pack(vec<f16, N, true>& v, const float (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; k += 2) v.words[k / 2] = f16_word(x[k], x[k + 1]);
}

// A store of sizeof(T) * N bytes; `p` must be aligned as a vec is.
template <class T, class C, int N> DEVICE void store_vector(T* p, const C (&x)[N])
{
    typedef vec<T, N, (sizeof(T) < 4 && sizeof(T) * N % 4 == 0)> V;
    V v = {};
    pack(v, x);
    *reinterpret_cast<V*>(p) = v;
}

// N single stores, for an output that is not aligned.
template <class T, class C, int N> DEVICE void store_elements(T* p, const C (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; ++k) p[k] = narrow_to<T>::from(x[k]);
}

// The elements i, i + 1, ... of an operand of n, which fits I as well; past the end, zeros that no one stores.
template <int N, class T, class I> DEVICE vec<T, N> load_some(const T* p, I i, long long n)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k < (I)n) v.set(k, p[i + k]);
    return v;
}

// The elements i, i + 1, ... of an operand of n, as far as they are in it; i may be negative. Zeros elsewhere.
template <int N, class T, class I> DEVICE vec<T, N> load_within(const T* p, I i, long long n)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k >= 0 && i + k < (I)n) v.set(k, p[i + k]);
    return v;
}

// The elements i, i + 1, ... of an output of n, as far as they are in it; i may be negative.
template <class T, class C, int N, class I> DEVICE void store_some(T* p, I i, long long n, const C (&x)[N])
{
#pragma unroll
    for (int k = 0; k < N; ++k)
        if (i + k >= 0 && i + k < (I)n) p[i + k] = narrow_to<T>::from(x[k]);
}

// Division by multiply and shift: exact for every numerator below 2^31 (2^63); multiplier and shift as layout.magic_divisor gives them.
DEVICE unsigned divide_u31(unsigned n, unsigned multiplier, unsigned shift) { return (unsigned)(((unsigned long long)n * multiplier) >> shift); }

DEVICE unsigned long long divide_u63(unsigned long long n, unsigned long long multiplier, unsigned shift) { return (__umul64hi(n, multiplier) + n) >> shift; }

// The same element N times.
template <int N, class T> DEVICE vec<T, N> repeat_element(T x)
{
    vec<T, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k) v.set(k, x);
    return v;
}

// N elements from any address as two aligned accesses and a shift: first whole words, then the bytes in a word. Both accesses must be
// inside the operand. No branch, so that all loads of a thread are in flight at once.
template <int N, class T> DEVICE vec<T, N> load_shifted(const T* p)
{
    const int bytes = sizeof(T) * N, words = bytes / 4;
    if (bytes < 4) return load_elements<N>(p);
    typedef vec<unsigned, words == 0 ? 1 : words> W;
    const unsigned offset = (unsigned)((unsigned long long)p % bytes);
    const W* aligned = reinterpret_cast<const W*>((const char*)p - offset);
    const W low = aligned[0], high = aligned[1];
    unsigned w[2 * words + 1];
#pragma unroll
    for (int k = 0; k < words; ++k) w[k] = low.at[k], w[words + k] = high.at[k];
#pragma unroll
    for (int step = words / 2; step > 0; step /= 2) {
#pragma unroll
        for (int k = 0; k < words + step; ++k) w[k] = offset & 4 * step ? w[k + step] : w[k];
    }
    W shifted;
#pragma unroll
    for (int k = 0; k < words; ++k) shifted.at[k] = sizeof(T) < 4 ? __funnelshift_r(w[k], w[k + 1], offset % 4 * 8) : w[k];
    return *reinterpret_cast<vec<T, N>*>(&shifted);
}

// How many elements an address lies behind an aligned access of N.
template <int N, class T> DEVICE int phase_of(const T* p) { return (int)((unsigned long long)p % (sizeof(T) * N) / sizeof(T)); }

template <int N, class T> DEVICE bool is_aligned(const T* p) { return (unsigned long long)p % (sizeof(T) * N) == 0; }

// Whether the elements i to i + N are one aligned access that is wholly inside an operand of n.
template <int N, class T> DEVICE bool is_whole(const T* p, long long i, long long n) { return i >= 0 && i + N <= n && is_aligned<N>(p + i); }

// The elements i, i + 1, ... of an operand of n at any address; outside it, zeros that no one stores.
template <int N, class T> DEVICE vec<T, N> load_part(const T* p, long long i, long long n)
{
    if (is_whole<N>(p, i, n)) return load_vector<N>(p + i);
    if (i >= N && i + 2 * N <= n) return load_shifted<N>(p + i);
    return load_within<N>(p, i, n);
}

template <int bytes> struct bytes_word { typedef uint4 type; };
template <> struct bytes_word<8> { typedef uint2 type; };
template <> struct bytes_word<4> { typedef unsigned type; };
template <> struct bytes_word<2> { typedef unsigned short type; };
template <> struct bytes_word<1> { typedef unsigned char type; };

// As store_vector, by name: NVVM takes a plain store apart for sm_80 and sm_90 beside stores of single elements to the same place, and
// of fp32 behind 64-bit indices. The L2 then gets four requests for each: 4.0 times the sectors on an H200.
template <class T, class C, int N> DEVICE void store_whole(T* p, const C (&x)[N])
{
    typedef vec<T, N, (sizeof(T) < 4 && sizeof(T) * N % 4 == 0)> V;
    const int bytes = sizeof(V) < 16 ? sizeof(V) : 16;
    typedef typename bytes_word<bytes>::type W;
    V v = {};
    pack(v, x);
#pragma unroll
    for (int k = 0; k < (int)sizeof(V) / bytes; ++k) __stwb(reinterpret_cast<W*>(p) + k, reinterpret_cast<W*>(&v)[k]);
}
