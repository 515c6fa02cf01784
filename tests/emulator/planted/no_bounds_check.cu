// The last block has more threads than there are elements left, and all of them write.
// wideload: --against add f32[n] f32[n] --rtol 0
extern "C" __global__ void add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = x[i] + y[i];
}
