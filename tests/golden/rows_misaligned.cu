DEVICE void shifted_gelu_element(const float x, const float bias, const double rate, float& out)
{
    // y = F.gelu(x + bias)
    const float add = x + bias;
    const float gelu = ::gelu(add);
    // return y * rate
    const float mul = gelu * convert<float>(rate);
    out = mul;
}

extern "C" __global__ void __launch_bounds__(128)
shifted_gelu_rows(
    const float* x_data,
    const float* bias_data,
    float* out_data,
    const long long n,
    const long long pad,
    const long long size0,
    const long long multiplier0,
    const long long shift0,
    const long long x_stride1,
    const long long x_span,
    const long long bias_stride1,
    const double rate)
{
    wait_for_previous();
    const int e = ((int)blockIdx.x * 128 + (int)threadIdx.x) * 4 - (int)pad;
    if (e >= (int)n) return;
    const bool is_full = e >= 0 && e + 4 <= (int)n;
    vec<float, 4> x_v = {};
    vec<float, 4> bias_v = {};
    const unsigned rest0 = divide_u31((unsigned)(e), multiplier0, shift0);
    const unsigned at0 = (unsigned)(e) - rest0 * (unsigned)size0;
    if (is_full && at0 + 4 <= (unsigned)size0
    && (rest0 * (unsigned)x_stride1 + (unsigned)at0) >= 4
    && (rest0 * (unsigned)x_stride1 + (unsigned)at0) + 8 <= (unsigned)x_span) {  // whole accesses
        x_v = load_shifted<4>(x_data + (rest0 * (unsigned)x_stride1 + (unsigned)at0));
        bias_v = repeat_element<4>(bias_data[rest0 * (unsigned)bias_stride1 + 0]);
    } else {  // the ends of a row or of the output
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            if (e + k < 0 || e + k >= (int)n) continue;
            const unsigned rest0 = divide_u31((unsigned)(e + k), multiplier0, shift0);
            const unsigned at0 = (unsigned)(e + k) - rest0 * (unsigned)size0;
            x_v.set(k, x_data[rest0 * (unsigned)x_stride1 + at0]);
            bias_v.set(k, bias_data[rest0 * (unsigned)bias_stride1 + 0]);
        }
    }
    float out_v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) shifted_gelu_element(widen(x_v.get(k)), widen(bias_v.get(k)), rate, out_v[k]);
    if (is_full) {  // whole accesses
        store_whole(out_data + e, out_v);
    } else {  // the ends of the output
        store_some(out_data, e, n, out_v);
    }
    if (gridDim.x <= 2048) let_next_start();
}
