// Where a result goes that is one value of all elements: the largest word that any thread stores, and what was there before. Whatever
// place and width a store is given, the word is kept in a register. Of a warp whose words are larger than what it finds in memory, one
// lane makes one atomic. What it finds comes through the L1, or every warp would ask one sector of the L2, which answers one request at a
// time: 0.56 of the wall on an H200. It may be old: memory only grows, so that nothing is lost but an atomic.
template <class W> struct largest {
    W* const at;
    W own = 0;
    __device__ __forceinline__ explicit largest(W* at) : at(at) {}
    __device__ __forceinline__ void operator=(W word) { own = word > own ? word : own; }
    template <class I> __device__ __forceinline__ largest& operator+(I) { return *this; }
    template <class I> __device__ __forceinline__ largest& operator[](I) { return *this; }
    template <int N> friend __device__ __forceinline__ void store_reduced(largest& to, const W (&words)[N])
    {
#pragma unroll
        for (int k = 0; k < N; ++k) to = words[k];
    }
    template <int N, class I> friend __device__ __forceinline__ void store_some(largest& to, I i, long long n, const W (&words)[N])
    {
#pragma unroll
        for (int k = 0; k < N; ++k)
            if (i + k >= 0 && i + k < (I)n) to = words[k];
    }
    __device__ __forceinline__ void settle()
    {
        if (!__any_sync(0xffffffffu, own > 0 && own > __ldca(at))) return;
#pragma unroll
        for (int lanes = 16; lanes > 0; lanes /= 2) *this = __shfl_xor_sync(0xffffffffu, own, lanes);
        if (threadIdx.x % 32 == 0) atomicMax(at, own);
    }
};
