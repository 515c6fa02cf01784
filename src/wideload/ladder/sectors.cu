// The sector table: a warp reads 32 floats, `stride` apart and `offset` behind a line's start, or scattered.
extern "C" __global__ void read_strided(const float* __restrict__ x, float* __restrict__ y, long long n, long long stride, long long offset)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i * stride + offset];
}

// Of 2^bits floats, each is read once: multiplying by an odd number and folding the high bits in are one to one.
extern "C" __global__ void read_scattered(const float* __restrict__ x, float* __restrict__ y, long long bits)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, mask = (1u << bits) - 1, half = bits / 2 + 1, place = i;
    if (i > mask) return;
    for (int round = 0; round < 2; ++round) {
        place = place * 2654435769u & mask;  // 2^32 over the golden ratio
        place ^= place >> half;
    }
    y[i] = x[place];
}
