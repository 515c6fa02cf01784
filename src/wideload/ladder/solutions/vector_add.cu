// Four floats in one access of 16 bytes; single elements where memory is not aligned, and behind the last vector.
// wideload: --against add f32[n] f32[n] --rtol 0 --items 4
extern "C" __global__ void vector_add(const float* __restrict__ x, const float* __restrict__ y, float* __restrict__ out, long long n)
{
    long long first = 4 * ((long long)blockIdx.x * blockDim.x + threadIdx.x);
    bool is_aligned = (((size_t)x | (size_t)y | (size_t)out) & 15) == 0;
    if (is_aligned && first + 4 <= n) {
        float4 a = *(const float4*)(x + first), b = *(const float4*)(y + first);
        *(float4*)(out + first) = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
    } else {
        for (long long i = first; i < first + 4 && i < n; ++i) out[i] = x[i] + y[i];
    }
}
