DEVICE void bias_gelu_element(const float x, const float bias, float& out)
{
    // return F.gelu(x + bias, approximate="tanh")
    const float add = x + bias;
    const float gelu_tanh = ::half_gelu_tanh(add);
    out = gelu_tanh;
}

extern "C" __global__ void __launch_bounds__(128, 8)
bias_gelu_strips(
    const bf16* x_data,
    const bf16* bias_data,
    bf16* out_data,
    const long long n,
    const long long slots0,
    const long long multiplier0,
    const long long shift0,
    const long long x_stride1,
    const long long bias_stride1,
    const long long out_stride1)
{
    wait_for_previous();
    const unsigned i = (unsigned)blockIdx.x * 128 + threadIdx.x;
    if (i >= (unsigned)n) return;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned at0 = i - rest0 * (unsigned)slots0;
    const unsigned at1 = rest0;
    const unsigned column = at0 * 8;
    vec<bf16, 8> x_v[4];
    vec<bf16, 8> bias_v;
#pragma unroll
    for (unsigned r = 0; r < 4; ++r) {
        x_v[r] = load_vector<8>(x_data + ((at1 * 4 + r) * (unsigned)x_stride1 + column));
    }
    // once for all rows
    bias_v = load_vector<8>(bias_data + ((at1 * 4 + 0) * (unsigned)bias_stride1 + column));
#pragma unroll
    for (unsigned r = 0; r < 4; ++r) {
        float out_v[8];
#pragma unroll
        for (int k = 0; k < 8; ++k) bias_gelu_element(widen(x_v[r].get(k)), widen(bias_v.get(k)), out_v[k]);
        store_vector(out_data + ((at1 * 4 + r) * (unsigned)out_stride1 + column), out_v);
    }
    let_next_start();
}
