// The sums that a block's threads have of its columns, N of each thread, added up and written: thread t has those from t % across * N
// on. First the lanes of each warp, then the warps one after the other. `left` columns from `to` on are there. Neighbouring columns lie in
// a thread's sums, in rows of their own, that end with as many elements more as keep 32 neighbours in 32 banks.
template <int threads, int across, bool is_kept, class R, class T, int N, class U> DEVICE void add_lanes(R* to, T (&sums)[N], U left)
{
    const unsigned warp_lanes = 32, warps = threads / warp_lanes, pitch = warps * across + warp_lanes / N;
    __shared__ T own[N * pitch];
#pragma unroll
    for (int k = 0; k < N; ++k) {
#pragma unroll
        for (int lanes = warp_lanes / 2; lanes >= across; lanes /= 2) sums[k] += __shfl_xor_sync(0xffffffffu, sums[k], lanes);
        if (threadIdx.x % warp_lanes < across) own[k * pitch + threadIdx.x / warp_lanes * across + threadIdx.x % warp_lanes] = sums[k];
    }
    __syncthreads();
    for (unsigned column = threadIdx.x; column < across * N && column < left; column += threads) {
        T sum = 0;
#pragma unroll
        for (unsigned warp = 0; warp < warps; ++warp) sum += own[column % N * pitch + warp * across + column / N];
        if constexpr (is_kept) store_kept(to + column, sum);
        else to[column] = narrow_to<R>::from(sum);
    }
}
