DEVICE void adapt_element(const float p, const float steps, const float mean, const float square, const double log_beta, const double rate, const float rdiv, float& out)
{
    // return p - rate / correction * mean / (square.sqrt() + 1e-8)
    const float mul_2 = rdiv * mean;
    const float sqrt = ::sqrt(square);
    const float add = sqrt + 1e-08f;
    const float div = mul_2 / add;
    const float sub = p - div;
    out = sub;
}

DEVICE void adapt_uniform(const float steps, const double log_beta, const double rate, float& rdiv_once)
{
    // correction = -(steps * log_beta).expm1()
    const float mul = steps * convert<float>(log_beta);
    const float expm1 = ::expm1(mul);
    const float neg = -expm1;
    // return p - rate / correction * mean / (square.sqrt() + 1e-8)
    const float rdiv = convert<float>(rate) / neg;
    rdiv_once = rdiv;
}

struct adapt_lists_data {  // of each tensor, by value
    const bf16* p_data[84];
    const float* steps_data[84];
    const bf16* mean_data[84];
    const bf16* square_data[84];
    bf16* out_data[84];
    long long n[84];
    double log_beta;
    double rate;
};

extern "C" __global__ void __launch_bounds__(128)
adapt_foreach(
    const __grid_constant__ adapt_lists_data lists_data,
    const int* __restrict__ chunks_data)
{
    const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);
    const int slot = chunk_v.at[0];
    const long long n = lists_data.n[slot];
    const bf16* const p_data = lists_data.p_data[slot];
    const float steps = widen(*lists_data.steps_data[slot]);
    const bf16* const mean_data = lists_data.mean_data[slot];
    const bf16* const square_data = lists_data.square_data[slot];
    bf16* const out_data = lists_data.out_data[slot];
    const double log_beta = lists_data.log_beta;
    const double rate = lists_data.rate;
    const long long first = (long long)chunk_v.at[1] * 2048 - phase_of<8>(out_data);
    if (first >= n) return;
    const long long e = first + threadIdx.x * 8;
    const bool is_full = first >= 0 && first + 2048 <= n && is_aligned<8>(p_data) && is_aligned<8>(mean_data) && is_aligned<8>(square_data) && is_aligned<8>(out_data);
    vec<bf16, 8> p_v[2];
    vec<bf16, 8> mean_v[2];
    vec<bf16, 8> square_v[2];
    if (is_full) {  // whole accesses, no bounds
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            p_v[m] = load_vector<8>(p_data + e + m * 1024);
            mean_v[m] = load_vector<8>(mean_data + e + m * 1024);
            square_v[m] = load_vector<8>(square_data + e + m * 1024);
        }
    } else {  // the ends of a tensor, or addresses that are not aligned
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            p_v[m] = load_part<8>(p_data, e + m * 1024, n);
            mean_v[m] = load_part<8>(mean_data, e + m * 1024, n);
            square_v[m] = load_part<8>(square_data, e + m * 1024, n);
        }
    }
    __shared__ float rdiv_once;
    if (threadIdx.x == 0) adapt_uniform(steps, log_beta, rate, rdiv_once);
    __syncthreads();
    float out_v[2][8];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 8; ++k) adapt_element(widen(p_v[m].get(k)), steps, widen(mean_v[m].get(k)), widen(square_v[m].get(k)), log_beta, rate, rdiv_once, out_v[m][k]);
    }
    if (is_full) {  // whole accesses
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            store_whole(out_data + e + m * 1024, out_v[m]);
        }
    } else {  // the ends
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if (is_whole<8>(out_data, e + m * 1024, n)) store_whole(out_data + e + m * 1024, out_v[m]); else store_some(out_data, e + m * 1024, n, out_v[m]);
        }
    }
}
