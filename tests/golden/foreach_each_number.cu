DEVICE void shifted_gelu_element(const float x, const float bias, const double rate, float& out)
{
    // y = F.gelu(x + bias)
    const float add = x + bias;
    const float gelu = ::half_gelu(add);
    // return y * rate
    const float mul = gelu * convert<float>(rate);
    out = mul;
}

struct shifted_gelu_lists_data {  // of each tensor, by value
    const bf16* x_data[102];
    const float* bias_data[102];
    bf16* out_data[102];
    long long n[102];
    double rate[102];
};

extern "C" __global__ void __launch_bounds__(128)
shifted_gelu_foreach(
    const __grid_constant__ shifted_gelu_lists_data lists_data,
    const int* __restrict__ chunks_data)
{
    const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);
    const int slot = chunk_v.at[0];
    const long long n = lists_data.n[slot];
    const bf16* const x_data = lists_data.x_data[slot];
    const float bias = widen(*lists_data.bias_data[slot]);
    bf16* const out_data = lists_data.out_data[slot];
    const double rate = lists_data.rate[slot];
    const long long first = (long long)chunk_v.at[1] * 2048 - phase_of<8>(out_data);
    if (first >= n) return;
    const long long e = first + threadIdx.x * 8;
    const bool is_full = first >= 0 && first + 2048 <= n && is_aligned<8>(x_data) && is_aligned<8>(out_data);
    vec<bf16, 8> x_v[2];
    if (is_full) {  // whole accesses, no bounds
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            x_v[m] = load_vector<8>(x_data + e + m * 1024);
        }
    } else {  // the ends of a tensor, or addresses that are not aligned
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            x_v[m] = load_part<8>(x_data, e + m * 1024, n);
        }
    }
    float out_v[2][8];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 8; ++k) shifted_gelu_element(widen(x_v[m].get(k)), bias, rate, out_v[m][k]);
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
