// Where a result goes that is one value of all elements: the largest word that any thread stores, and what was there before. Whatever
// place and width a store is given, the word is kept in a register. A block whose words are no larger than what it found when it began
// leaves memory alone; of the others, each makes one atomic. The value found may be old by then: it only grows, so that nothing is lost.
template <class W> struct largest {
    W* const at;
    const W found;
    W own;
    __device__ __forceinline__ explicit largest(W* at) : at(at), found(*(const volatile W*)at), own(0) {}
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
        __shared__ W block;
        if (threadIdx.x == 0) block = 0;
        if (!__syncthreads_or(own > found)) return;
        if (own > found) atomicMax(&block, own);
        __syncthreads();
        if (threadIdx.x == 0) atomicMax(at, block);
    }
};
