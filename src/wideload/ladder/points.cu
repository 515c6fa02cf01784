// One coordinate of many points. As an array of structs, a warp's 32 floats lie 12 bytes apart: 12 sectors, a third of them used.
// As a struct of arrays, they fill four.
struct Point {
    float x, y, z;
};

extern "C" __global__ void points_aos(const float* __restrict__ points, float* __restrict__ out, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = ((const Point*)points)[i].x;
}

extern "C" __global__ void points_soa(const float* __restrict__ x, float* __restrict__ out, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[i];
}
