// narrow: negates halves, one of 2 bytes a thread
extern "C" __global__ void narrow(const unsigned short* x, unsigned short* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i] ^ 0x8000;
}

// shared_occupancy: doubles vectors through 48 KiB of shared memory a block, so that an SM holds four blocks of 64 threads
extern "C" __global__ void shared_occupancy(const float4* x, float4* y, int n) {
    __shared__ volatile float kept[12 * 1024 - 16];
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    kept[threadIdx.x * 4] = v.x;
    v.x = kept[threadIdx.x * 4] * 2;
    v.y *= 2;
    v.z *= 2;
    v.w *= 2;
    y[i] = v;
}

// register_occupancy: doubles vectors and keeps 160 running means of them, so that an SM holds two blocks of 128 threads
extern "C" __global__ void register_occupancy(const float4* x, float4* y, int n) {
    float mean[160];
#pragma unroll
    for (int k = 0; k < 160; k++) mean[k] = k;
#pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float4 v = x[i];
#pragma unroll
        for (int k = 0; k < 160; k++) mean[k] = mean[k] * 0.5f + v.x;
        y[i] = make_float4(v.x * 2, v.y * 2, v.z * 2, v.w * 2);
    }
    float product = 1;
#pragma unroll
    for (int k = 0; k < 160; k++) product *= mean[k];
    if (product == 0.5f) y[0].x = product;
}

// strided: doubles every eighth float
extern "C" __global__ void strided(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[8 * i] * 2;
}

// misaligned: doubles four floats a thread, by one vector where the addresses allow it, else one after the other
extern "C" __global__ void misaligned(const float* x, float* y, int n) {
    int i = 4 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i + 3 >= n) return;
    if ((((unsigned long long)x | (unsigned long long)y) & 15) == 0) {
        float4 v = *(const float4*)(x + i);
        *(float4*)(y + i) = make_float4(v.x * 2, v.y * 2, v.z * 2, v.w * 2);
    } else {
        for (int k = 0; k < 4; k++) y[i + k] = x[i + k] * 2;
    }
}

// structs: doubles the first of three floats that lie together
extern "C" __global__ void structs(const float* xyz, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = xyz[3 * i] * 2;
}

// scattered: gathers floats by random indices
extern "C" __global__ void scattered(const float* x, const int* index, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[index[i] & (n - 1)];
}

// small_grid: doubles vectors in a loop, by 32 blocks
extern "C" __global__ void small_grid(const float4* x, float4* y, int n) {
#pragma unroll 1
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
        float4 v = x[i];
        y[i] = make_float4(v.x * 2, v.y * 2, v.z * 2, v.w * 2);
    }
}

// tail: doubles as many vectors by each of a few blocks more than fit the GPU at once
extern "C" __global__ void tail(const float4* x, float4* y, int n) {
    int each = (n + gridDim.x - 1) / gridDim.x;
    int end = min(n, (int)(blockIdx.x + 1) * each);
#pragma unroll 1
    for (int i = blockIdx.x * each + threadIdx.x; i < end; i += blockDim.x) {
        float4 v = x[i];
        y[i] = make_float4(v.x * 2, v.y * 2, v.z * 2, v.w * 2);
    }
}

// special: 32 sines an element
__device__ float sines(float v) {
#pragma unroll
    for (int k = 0; k < 32; k++) v = __sinf(v);
    return v;
}
extern "C" __global__ void special(const float4* x, float4* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    y[i] = make_float4(sines(v.x), sines(v.y), sines(v.z), sines(v.w));
}

// doubles: a polynomial of degree 64 in fp64
__device__ float polynomial(double v) {
    double sum = 1;
#pragma unroll
    for (int k = 0; k < 64; k++) sum = sum * v + 0.5;
    return (float)sum;
}
extern "C" __global__ void doubles(const float4* x, float4* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float4 v = x[i];
    y[i] = make_float4(polynomial(v.x), polynomial(v.y), polynomial(v.z), polynomial(v.w));
}

// spilled: multiplies 64 floats by their sum in a thread that may have 32 registers
extern "C" __global__ void __launch_bounds__(1024, 2) spilled(const float4* x, float4* y) {
    float4 v[16];
    float sum = 0;
    int first = blockIdx.x * blockDim.x * 16 + threadIdx.x;
#pragma unroll
    for (int k = 0; k < 16; k++) {
        v[k] = x[first + k * blockDim.x];
        sum += v[k].x + v[k].y + v[k].z + v[k].w;
    }
#pragma unroll
    for (int k = 0; k < 16; k++) y[first + k * blockDim.x] = make_float4(v[k].x * sum, v[k].y * sum, v[k].z * sum, v[k].w * sum);
}

// uncoalesced: transposes a square matrix, reading rows and writing columns
extern "C" __global__ void uncoalesced(const float* x, float* y, int size) {
    int column = blockIdx.x * 32 + threadIdx.x;
    int row = blockIdx.y * 8 + threadIdx.y;
    if (column < size && row < size) y[(long long)column * size + row] = x[(long long)row * size + column];
}

// divergent: a loop of 512 turns in one lane of each warp, and of 16 in the others
extern "C" __global__ void divergent(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float v = x[i];
    int turns = threadIdx.x % 32 == 0 ? 512 : 16;
#pragma unroll 4
    for (int k = 0; k < turns; k++) v = v * 0.5f + 1;
    y[i] = v;
}

// bank_conflicts: transposes a square matrix by tiles whose columns lie in one bank
extern "C" __global__ void bank_conflicts(const float* x, float* y, int size) {
    __shared__ float tile[32][32];
    int column = blockIdx.x * 32, row = blockIdx.y * 32;
#pragma unroll
    for (int k = 0; k < 32; k += 8) tile[threadIdx.y + k][threadIdx.x] = x[(long long)(row + threadIdx.y + k) * size + column + threadIdx.x];
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 32; k += 8) y[(long long)(column + threadIdx.y + k) * size + row + threadIdx.x] = tile[threadIdx.x][threadIdx.y + k];
}
