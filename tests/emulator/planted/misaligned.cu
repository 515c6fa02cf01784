// float4 behind a pointer to float: right at multiples of 16 bytes, and a GPU stops anywhere else.
// wideload: --against add f32[n] f32[n] --rtol 0 --items 4
extern "C" __global__ void add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, long long n)
{
    long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    if (first + 4 <= n) {
        float4 a = *reinterpret_cast<const float4*>(x + first), b = *reinterpret_cast<const float4*>(y + first);
        *reinterpret_cast<float4*>(out + first) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else {
        for (long long i = first; i < n; ++i) out[i] = x[i] + y[i];
    }
}
