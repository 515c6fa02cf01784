// The first kernels as a program that needs nothing but CUDA: checked calls, the median of timed launches, a check on the host.
//   nvcc -O3 -arch=sm_90 vector_add.cu -o vector_add && ./vector_add [elements] [device]
// Exits with 1 where a call fails or a result is wrong, with 2 for arguments that make no sense.
#include "../vector_add_bf16.cu"
#include "../vector_add_f32.cu"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// The names of the file, the line and the error, and out: after an error of a kernel, no other call of this process would work.
#define CHECK(call) check((call), #call, __FILE__, __LINE__)

static void check(cudaError_t status, const char* call, const char* file, int line)
{
    if (status == cudaSuccess) return;
    std::fprintf(stderr, "%s:%d: %s: %s, %s\n", file, line, call, cudaGetErrorName(status), cudaGetErrorString(status));
    std::exit(1);
}

static const int THREADS = 256;
static const int WARM_UPS = 10;
static const int ITERATIONS = 100;
static const int FLUSH_L2S = 2;            // how often a flush fills the L2
static const long long NUM_CHECKED = 1024;  // spread over the results; the first and the last are among them
static const unsigned X_SEED = 1, Y_SEED = 4;

// A value for each place, the same on both sides, which bf16 holds exactly; none is zero. Two seeds differ in scale, so that sums round.
__host__ __device__ inline float value_at(long long i, unsigned seed)
{
    unsigned word = (unsigned)(i ^ i >> 32) * 2654435769u + seed;  // 2^32 over the golden ratio
    word = (word ^ word >> 15) * 2246822519u;                      // a multiplier of xxHash32, to mix the bits
    return (float)((int)(word >> 24) - 128 + (int)(word >> 31)) / (float)(64 << seed);
}

template <class T> __host__ __device__ inline T rounded(float value);
template <> __host__ __device__ inline float rounded<float>(float value) { return value; }
template <> __host__ __device__ inline __nv_bfloat16 rounded<__nv_bfloat16>(float value) { return __float2bfloat16_rn(value); }

template <class T> __global__ void fill(T* x, long long n, unsigned seed)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = rounded<T>(value_at(i, seed));
}

static unsigned blocks_for(long long n) { return (unsigned)((n + THREADS - 1) / THREADS); }

// A launch returns nothing: what it refuses is asked for behind it. What the kernel does wrong is known after the next wait.
static void add(const float* x, const float* y, float* out, long long n)
{
    vector_add_f32<<<blocks_for(n), THREADS>>>(x, y, out, n);
    CHECK(cudaGetLastError());
}

static void add(const __nv_bfloat16* x, const __nv_bfloat16* y, __nv_bfloat16* out, long long n)
{
    vector_add_bf16<<<blocks_for(n), THREADS>>>(x, y, out, n);
    CHECK(cudaGetLastError());
}

template <class T> static long long count_wrong(const T* out, long long n, long long num_checked)
{
    long long num_wrong = 0;
    for (long long k = 0; k < num_checked; ++k) {
        long long i = num_checked > 1 ? k * (n - 1) / (num_checked - 1) : 0;
        T found, right = rounded<T>(value_at(i, X_SEED) + value_at(i, Y_SEED));
        CHECK(cudaMemcpy(&found, out + i, sizeof(T), cudaMemcpyDeviceToHost));
        num_wrong += std::memcmp(&found, &right, sizeof(T)) != 0;
    }
    return num_wrong;
}

struct Device {
    double nominal_gbps;
    size_t l2_bytes;
};

// The median in microseconds. Each launch finds its operands in memory, not in the L2; and while the GPU flushes, the host enqueues,
// so that its own time is not in the events'.
template <class T> static float time_us(const T* x, const T* y, T* out, long long n, const Device& device)
{
    void* l2;
    size_t flush_bytes = FLUSH_L2S * device.l2_bytes;
    cudaEvent_t start, stop;
    CHECK(cudaMalloc(&l2, flush_bytes));
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&stop));
    std::vector<float> times;
    for (int k = 0; k < WARM_UPS + ITERATIONS; ++k) {
        float ms;
        CHECK(cudaMemsetAsync(l2, k, flush_bytes));
        CHECK(cudaEventRecord(start));
        add(x, y, out, n);
        CHECK(cudaEventRecord(stop));
        CHECK(cudaEventSynchronize(stop));
        CHECK(cudaEventElapsedTime(&ms, start, stop));
        if (k >= WARM_UPS) times.push_back(1e3f * ms);
    }
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(stop));
    CHECK(cudaFree(l2));
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
}

template <class T> static bool run(const char* dtype, long long n, const Device& device)
{
    T *x, *y, *out;
    size_t nbytes = n * sizeof(T);
    for (T** tensor : {&x, &y, &out}) CHECK(cudaMalloc((void**)tensor, nbytes));
    fill<<<blocks_for(n), THREADS>>>(x, n, X_SEED);
    CHECK(cudaGetLastError());
    fill<<<blocks_for(n), THREADS>>>(y, n, Y_SEED);
    CHECK(cudaGetLastError());
    CHECK(cudaMemset(out, 0xff, nbytes));  // NaN: what is not written is no result
    add(x, y, out, n);
    CHECK(cudaDeviceSynchronize());
    long long num_checked = std::min(n, NUM_CHECKED), num_wrong = count_wrong(out, n, num_checked);

    double us = time_us(x, y, out, n, device), gbps = 3.0 * nbytes / us / 1e3;
    std::printf("%-5s %10.2f us %8.1f GB/s", dtype, us, gbps);
    if (device.nominal_gbps > 0) {
        std::printf(" %6.1f %% of nominal, least %.2f us", 100 * gbps / device.nominal_gbps, 3.0 * nbytes / device.nominal_gbps / 1e3);
    }
    std::printf("; %lld of %lld results wrong\n", num_wrong, num_checked);
    for (T* tensor : {x, y, out}) CHECK(cudaFree(tensor));
    return num_wrong == 0;
}

static int attribute(cudaDeviceAttr what, int index)
{
    int value;
    CHECK(cudaDeviceGetAttribute(&value, what, index));
    return value;
}

int main(int argc, char** argv)
{
    char *rest = nullptr, *rest_of_index = nullptr;
    long long n = argc > 1 ? std::strtoll(argv[1], &rest, 10) : 1ll << 28;
    long index = argc > 2 ? std::strtol(argv[2], &rest_of_index, 10) : 0;
    const long long most = 0x7fffffffll * THREADS;  // blocks that a grid may have
    if (argc > 3 || (rest && (*rest || rest == argv[1])) || (rest_of_index && *rest_of_index) || n < 0 || n > most || index < 0) {
        std::fprintf(stderr, "usage: %s [elements, 0 to %lld] [device]\n", argv[0], most);
        return 2;
    }
    CHECK(cudaSetDevice((int)index));
    cudaDeviceProp properties;
    CHECK(cudaGetDeviceProperties(&properties, (int)index));
    double clock_hz = 1e3 * attribute(cudaDevAttrMemoryClockRate, (int)index);
    double bus_bytes = attribute(cudaDevAttrGlobalMemoryBusWidth, (int)index) / 8.0;
    Device device = {2 * clock_hz * bus_bytes / 1e9, (size_t)properties.l2CacheSize};  // twice: data moves at both edges of the clock

    std::printf("%s, %.0f GB/s nominal; %lld elements, cold L2, median of %d\n", properties.name, device.nominal_gbps, n, ITERATIONS);
    if (n == 0) return 0;  // a grid without blocks is an error
    bool is_right = run<float>("f32", n, device);
    is_right = run<__nv_bfloat16>("bf16", n, device) && is_right;
    return is_right ? 0 : 1;
}
