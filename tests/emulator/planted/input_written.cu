// The sum is kept in the first input on its way.
// wideload: --against add f32[n] f32[n] --rtol 0
extern "C" __global__ void add(const float* x, const float* y, float* out, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = const_cast<float*>(x)[i] = x[i] + y[i];
}
