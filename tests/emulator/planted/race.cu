// A thread takes the element that another has brought, of another warp, and does not wait for it.
// wideload: --against add f32[n] f32[n] --rtol 0
extern "C" __global__ void add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, long long n)
{
    __shared__ float brought[256];
    long long start = (long long)blockIdx.x * blockDim.x, i = start + threadIdx.x;
    if (i < n) brought[threadIdx.x] = x[i];
    unsigned other = blockDim.x - 1 - threadIdx.x;
    if (start + other < n) out[start + other] = brought[other] + y[start + other];
}
