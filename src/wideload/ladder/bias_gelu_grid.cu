// gelu(x + bias) by tanh: a grid-stride loop, at most 32 blocks an SM, and the column by a 64-bit remainder for each element.
// The bias is read from the caches. Expect that remainder to take longer than the memory.
__device__ __forceinline__ float gelu(float v)
{
    float inner = 0.7978845608f * v * (1.0f + 0.044715f * v * v);  // sqrt(2 / pi)
    return 0.5f * v * (1.0f + tanhf(inner));
}

extern "C" __global__ void bias_gelu_grid(
    const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y, long long n, long long columns)
{
    long long num_threads = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += num_threads) {
        y[i] = gelu(x[i] + bias[i % columns]);
    }
}
