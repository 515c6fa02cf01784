DEVICE void threshold_mask_element(const signed char x, const float limit, const double scale, bool& out)
{
    // return (x.float() * scale > limit) & (x < 100)
    const float cast = convert<float>(x);
    const float mul = cast * convert<float>(scale);
    const bool gt = mul > limit;
    const bool lt = x < (signed char)100;
    const bool bitwise_and = gt && lt;
    out = bitwise_and;
}

extern "C" __global__ void __launch_bounds__(128)
threshold_mask_dense(
    const signed char* x_data,
    const f16* limit_data,
    boolean* out_data,
    const long long n,
    const double scale)
{
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 2048 + threadIdx.x * 16;
    const bool is_full = i + 16 <= n;
    vec<signed char, 16> x_v;
    vec<f16, 16> limit_v;
    if (is_full) {
        x_v = load_vector<16>(x_data + i);
        limit_v = load_vector<16>(limit_data + i);
    } else {  // the last elements
        x_v = load_some<16>(x_data, i, n);
        limit_v = load_some<16>(limit_data, i, n);
    }
    bool out_v[16];
#pragma unroll
    for (int k = 0; k < 16; ++k) threshold_mask_element(widen(x_v.get(k)), widen(limit_v.get(k)), scale, out_v[k]);
    if (is_full) {  // whole accesses
        store_vector(out_data + i, out_v);
    } else {  // the last elements
        store_some(out_data, i, n, out_v);
    }
    let_next_start();
}
