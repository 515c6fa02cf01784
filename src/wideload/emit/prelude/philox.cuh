// Positions of a thread's N elements, and random integers counted by them: Philox 4x32 (Salmon, Moraes, Dror and Shaw, SC 2011)
// of 7 rounds. Element i of a stream is number i % held of block i / held, which has 128 bits.

// N numbers from `first` on, `stride` apart.
template <int N, class I> DEVICE vec<I, N> count_apart(I first, I stride)
{
    vec<I, N> v = {};
#pragma unroll
    for (int k = 0; k < N; ++k) v.set(k, first + (I)k * stride);
    return v;
}

template <int N, class I> DEVICE vec<I, N> count_run(I first) { return count_apart<N>(first, (I)1); }

// All 64 bits of x * y: one instruction. Where the compiler makes it of a 64-bit product, it adds a zero to the upper half each time.
DEVICE unsigned long long whole_product(unsigned x, unsigned y)
{
#ifdef __CUDACC__
    unsigned long long product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
    return product;
#else
    return (unsigned long long)x * y;
#endif
}

struct philox_block { unsigned at[4]; };

DEVICE philox_block philox(unsigned long long seed, unsigned stream, unsigned long long block)
{
    unsigned a = (unsigned)block, b = (unsigned)(block >> 32), c = stream, d = 0, low = (unsigned)seed, high = (unsigned)(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
        const unsigned long long first = whole_product(0xd2511f53u, a), second = whole_product(0xcd9e8d57u, c);
        a = (unsigned)(second >> 32) ^ b ^ low, b = (unsigned)second;
        c = (unsigned)(first >> 32) ^ d ^ high, d = (unsigned)first;
        low += 0x9e3779b9u, high += 0xbb67ae85u;
    }
    return philox_block{{a, b, c, d}};
}

// Number i of a block.
template <int bits> struct drawn {
    typedef unsigned type;
    static const int held = 128 / bits;
    DEVICE unsigned of(philox_block w, unsigned i)
    {
        const unsigned j = bits == 16 ? i / 2 : i;
        const unsigned word = j & 2 ? (j & 1 ? w.at[3] : w.at[2]) : (j & 1 ? w.at[1] : w.at[0]);
        return bits == 16 ? word >> 16 * (i & 1) & 0xffffu : word;
    }
};
template <> struct drawn<53> {
    typedef unsigned long long type;
    static const int held = 2;
    DEVICE unsigned long long of(philox_block w, unsigned i)
    {
        return ((unsigned long long)(i & 1 ? w.at[3] : w.at[1]) << 32 | (i & 1 ? w.at[2] : w.at[0])) >> 11;
    }
};

template <int bits, class I> DEVICE typename drawn<bits>::type draw_one(unsigned long long seed, unsigned stream, I i)
{
    return drawn<bits>::of(philox(seed, stream, i / drawn<bits>::held), (unsigned)i % drawn<bits>::held);
}

// A block an element: as many as there are elements.
template <int bits, int N, class I> DEVICE vec<typename drawn<bits>::type, N> draw_apart(unsigned long long seed, unsigned stream, I first, I stride)
{
    vec<typename drawn<bits>::type, N> v = {};
#pragma unroll 1
    for (int k = 0; k < N; ++k) {
        const typename drawn<bits>::type x = draw_one<bits>(seed, stream, (I)(first + (I)k * stride));
#pragma unroll
        for (int j = 0; j < N; ++j)
            if (j == k) v.set(j, x);
    }
    return v;
}

// The blocks that N elements in a row share: as few as these fill where the first begins one, one more elsewhere. Elements before
// number 0, which an access of a tile may have, wrap: so do their blocks.
template <int bits, int N, class I> DEVICE vec<typename drawn<bits>::type, N> draw_run(unsigned long long seed, unsigned stream, I first)
{
    const int held = drawn<bits>::held, in_step = N < held ? N : held, blocks = (N + held - 1) / held;
    const unsigned shift = (unsigned)first % held;
    vec<typename drawn<bits>::type, N> v = {};
    if (shift % in_step == 0) {
#pragma unroll
        for (int b = 0; b < blocks; ++b) {
            const philox_block w = philox(seed, stream, (I)(first / held + b) & (I)~(I)0 / held);
#pragma unroll
            for (int j = 0; j < in_step; ++j) v.set(b * held + j, drawn<bits>::of(w, N < held ? shift + j : j));
        }
    } else {
        typename drawn<bits>::type x[(blocks + 1) * held];
#pragma unroll
        for (int b = 0; b <= blocks; ++b) {
            const philox_block w = philox(seed, stream, (I)(first / held + b) & (I)~(I)0 / held);
#pragma unroll
            for (int j = 0; j < held; ++j) x[b * held + j] = drawn<bits>::of(w, j);
        }
#pragma unroll
        for (int bit = held / 3; bit >= 0; --bit) {
#pragma unroll
            for (int k = 0; k < N + held / 2; ++k) x[k] = shift >> bit & 1 ? x[k + (1 << bit)] : x[k];
        }
#pragma unroll
        for (int k = 0; k < N; ++k) v.set(k, x[k]);
    }
    return v;
}
