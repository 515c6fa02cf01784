// The sums that a block's threads have of its columns, N of each thread, added up and written: thread t has those from t % across * N
// on, and the lanes t / across follow one another. `left` columns from `to` on are there. Neighbouring columns lie in a thread's sums, in
// rows of their own, that end with as many elements more as keep 32 neighbours in 32 banks.
template <int threads, int across, class R, class T, int N, class U> DEVICE void add_lanes(R* to, const T (&sums)[N], U left)
{
    const unsigned pitch = threads + 32 / N;
    __shared__ T own[N * pitch];
#pragma unroll
    for (int k = 0; k < N; ++k) own[k * pitch + threadIdx.x] = sums[k];
    __syncthreads();
    for (unsigned column = threadIdx.x; column < across * N && column < left; column += threads) {
        T sum = 0;
#pragma unroll
        for (unsigned lane = 0; lane < threads / across; ++lane) sum += own[column % N * pitch + lane * across + column / N];
        to[column] = narrow_to<R>::from(sum);
    }
}
