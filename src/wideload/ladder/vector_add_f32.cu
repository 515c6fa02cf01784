// The first kernel: one float a thread.
// A warp's 32 floats fill four sectors exactly, so nothing is wasted; each load brings 128 bytes a warp, a quarter of what one could.
extern "C" __global__ void vector_add_f32(const float* __restrict__ a, const float* __restrict__ b, float* __restrict__ c, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;  // 64 bits before the product, which may pass 2^32
    if (i < n) c[i] = a[i] + b[i];
}
