// Lanes that work together, where n is no multiple of 32. A mask names the lanes that will come to this instruction, and all of them
// must; and a lane that is not there has no value to give. So: every lane shuffles, those behind the end bring what changes nothing,
// and only then does i < n say who stores.
extern "C" __global__ void sum_with_next(const float* __restrict__ x, float* __restrict__ out, long long n)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    float own = i < n ? x[i] : 0.0f;
    float next = __shfl_down_sync(0xffffffffu, own, 1);  // the last lane of a warp gets its own value back
    if (i < n) out[i] = own + (threadIdx.x % 32 < 31 ? next : 0.0f);
}

// Which lanes of each warp have an element, one word a warp. Threads are counted along x, then y, then z; each 32 are a warp.
extern "C" __global__ void lanes_within(unsigned* __restrict__ masks, long long columns, long long rows)
{
    long long column = (long long)blockIdx.x * blockDim.x + threadIdx.x, row = (long long)blockIdx.y * blockDim.y + threadIdx.y;
    unsigned mask = __ballot_sync(0xffffffffu, column < columns && row < rows);
    long long thread = (long long)threadIdx.y * blockDim.x + threadIdx.x;
    long long block = (long long)blockIdx.y * gridDim.x + blockIdx.x, warps = (blockDim.x * blockDim.y + 31) / 32;
    if (thread % 32 == 0) masks[block * warps + thread / 32] = mask;
}
