DEVICE void bias_gelu_backward_element(const float grad, const float x, const float bias, float& out0, float& out1)
{
    // return F.gelu(x + bias, approximate="tanh")
    const float add = x + bias;
    const float gelu_tanh_slope = ::half_gelu_tanh_slope(add);
    const float mul = grad * gelu_tanh_slope;
    out0 = mul;
    out1 = mul;
}

extern "C" __global__ void __launch_bounds__(128, 7)
bias_gelu_backward_columns(
    const bf16* grad_data,
    const bf16* x_data,
    const bf16* bias_data,
    bf16* out0_data,
    float* out1_data,
    const long long rows,
    const long long columns,
    const long long part_rows,
    const long long tiles0,
    const long long multiplier0,
    const long long shift0,
    const long long tiles1,
    const long long multiplier1,
    const long long shift1,
    const long long grad_stride1,
    const long long x_stride1,
    const long long out0_stride1)
{
    let_next_start();
    const unsigned i = blockIdx.x;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned at0 = i - rest0 * (unsigned)tiles0;
    const unsigned rest1 = divide_u31(rest0, multiplier1, shift1);
    const unsigned at1 = rest0 - rest1 * (unsigned)tiles1;
    const unsigned first = at0 * 128;
    const unsigned column = first + threadIdx.x % 16 * 8;
    const bool is_inside = column < (unsigned)columns;
    const unsigned step = (unsigned)tiles1 * 16, row0 = rest1 * (unsigned)tiles1 * (unsigned)part_rows;
    const unsigned end = is_inside ? min(row0 + (unsigned)tiles1 * (unsigned)part_rows, (unsigned)rows) : 0;
    vec<bf16, 8> bias_v = {};
    if (is_inside) bias_v = load_vector<8>(bias_data + column);
    float out1_sum[8] = {};
    unsigned row = row0 + at1 * 16 + threadIdx.x / 16;
    vec<bf16, 8> grad_v[2];
    vec<bf16, 8> x_v[2];
    if (row < end) {
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
            const unsigned at = min(row + r * 8, end - 1);
            grad_v[r] = load_vector<8>(grad_data + (at * (unsigned)grad_stride1 + column));
            x_v[r] = load_vector<8>(x_data + (at * (unsigned)x_stride1 + column));
        }
    }
    for (; row < end; row += step) {
        vec<bf16, 8> grad_next[2];
        vec<bf16, 8> x_next[2];
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
            const unsigned at = min(row + step + r * 8, end - 1);
            grad_next[r] = load_vector<8>(grad_data + (at * (unsigned)grad_stride1 + column));
            x_next[r] = load_vector<8>(x_data + (at * (unsigned)x_stride1 + column));
        }
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
            const unsigned at = row + r * 8;
            const bool is_row = at < end;
            float out0_v[8];
            float out1_v[8];
#pragma unroll
            for (int k = 0; k < 8; ++k) {
                bias_gelu_backward_element(widen(grad_v[r].get(k)), widen(x_v[r].get(k)), widen(bias_v.get(k)), out0_v[k], out1_v[k]);
                out1_sum[k] += is_row ? out1_v[k] : 0;
            }
            if (is_row) store_vector(out0_data + (at * (unsigned)out0_stride1 + column), out0_v);
        }
#pragma unroll
        for (unsigned r = 0; r < 2; ++r) {
            grad_v[r] = grad_next[r];
            x_v[r] = x_next[r];
        }
    }
    add_lanes<128, 16>(out1_data + ((rest1 * (unsigned)tiles1 + at1) * (unsigned)columns + first), out1_sum, (unsigned)columns - first);
    wait_for_previous();
}
