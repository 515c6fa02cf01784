// The same on a grid of two dimensions: the column is the block's and the thread's own, and nothing is divided.
// A thread reads its bias once, and takes as many rows as the grid leaves it.
__device__ __forceinline__ float gelu(float v)
{
    float inner = 0.7978845608f * v * (1.0f + 0.044715f * v * v);  // sqrt(2 / pi)
    return 0.5f * v * (1.0f + tanhf(inner));
}

extern "C" __global__ void bias_gelu_2d(
    const float* __restrict__ x, const float* __restrict__ bias, float* __restrict__ y, long long rows, long long columns)
{
    long long column = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (column >= columns) return;
    float shift = bias[column];
    for (long long row = blockIdx.y; row < rows; row += gridDim.y) y[row * columns + column] = gelu(x[row * columns + column] + shift);
}
