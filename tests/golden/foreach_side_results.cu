DEVICE void scaled_with_amax_element(const float x, const double scale, float& out0, unsigned& out1, unsigned& out2)
{
    // y = x.float() * scale
    const float cast = x;
    const float mul = cast * convert<float>(scale);
    // return y.to(bf16), wl.amax(y), wl.any_nonfinite(y)
    const float cast_2 = mul;
    out0 = cast_2;
    out1 = ::__float_as_uint(mul) & 0x7fffffffu;
    out2 = (::__float_as_uint(mul) & 0x7f800000u) == 0x7f800000u ? 0x3f800000u : 0u;
}

struct scaled_with_amax_lists_data {  // of each tensor, by value
    const bf16* x_data[102];
    bf16* out0_data[102];
    unsigned* out1_word[102];
    unsigned* out2_word[102];
    long long n[102];
    double scale;
};

extern "C" __global__ void __launch_bounds__(128)
scaled_with_amax_foreach(
    const __grid_constant__ scaled_with_amax_lists_data lists_data,
    const int* __restrict__ chunks_data)
{
    const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);
    const int slot = chunk_v.at[0];
    const long long n = lists_data.n[slot];
    const bf16* const x_data = lists_data.x_data[slot];
    bf16* const out0_data = lists_data.out0_data[slot];
    largest<unsigned> out1_data(lists_data.out1_word[slot]);
    largest<unsigned> out2_data(lists_data.out2_word[slot]);
    const double scale = lists_data.scale;
    const long long first = (long long)chunk_v.at[1] * 2048 - phase_of<8>(out0_data);
    if (first >= n) return;
    const long long e = first + threadIdx.x * 8;
    const bool is_full = first >= 0 && first + 2048 <= n && is_aligned<8>(x_data) && is_aligned<8>(out0_data);
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
    float out0_v[2][8];
    unsigned out1_v[2][8];
    unsigned out2_v[2][8];
    if (is_full) {  // whole accesses
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int k = 0; k < 8; ++k) scaled_with_amax_element(widen(x_v[m].get(k)), scale, out0_v[m][k], out1_v[m][k], out2_v[m][k]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            store_whole(out0_data + e + m * 1024, out0_v[m]);
            store_reduced(out1_data + e + m * 1024, out1_v[m]);
            store_reduced(out2_data + e + m * 1024, out2_v[m]);
        }
    } else {  // the ends
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int k = 0; k < 8; ++k) scaled_with_amax_element(widen(x_v[m].get(k)), scale, out0_v[m][k], out1_v[m][k], out2_v[m][k]);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if (is_whole<8>(out0_data, e + m * 1024, n)) store_whole(out0_data + e + m * 1024, out0_v[m]); else store_some(out0_data, e + m * 1024, n, out0_v[m]);
            store_some(out1_data, e + m * 1024, n, out1_v[m]);
            store_some(out2_data, e + m * 1024, n, out2_v[m]);
        }
    }
    out1_data.settle();
    out2_data.settle();
}
