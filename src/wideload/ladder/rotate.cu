// Where an array of structs is right: both of a (cosine, sine) pair are used, and one load of 8 bytes brings them.
// As two arrays, the same bytes take two loads of 4.
__device__ __forceinline__ float2 rotate(float2 v, float cosine, float sine)
{
    return make_float2(v.x * cosine - v.y * sine, v.x * sine + v.y * cosine);
}

extern "C" __global__ void rotate_pairs(const float2* __restrict__ x, const float2* __restrict__ turns, float2* __restrict__ y, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        float2 turn = turns[i];
        y[i] = rotate(x[i], turn.x, turn.y);
    }
}

extern "C" __global__ void rotate_apart(
    const float2* __restrict__ x, const float* __restrict__ cosines, const float* __restrict__ sines, float2* __restrict__ y, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = rotate(x[i], cosines[i], sines[i]);
}
