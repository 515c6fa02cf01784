DEVICE void bias_gelu_backward_element(const float grad, const float x, const float bias, float& out0, float& out1)
{
    // return F.gelu(x + bias, approximate="tanh")
    const float add = x + bias;
    const float gelu_tanh_slope = ::half_gelu_tanh_slope(add);
    const float mul = grad * gelu_tanh_slope;
    out0 = mul;
    out1 = mul;
}

extern "C" __global__ void __launch_bounds__(256, 4)
bias_gelu_backward_columns(
    const bf16* grad_data,
    const bf16* x_data,
    const bf16* bias_data,
    bf16* out0_data,
    float* out1_data,
    const long long rows,
    const long long columns,
    const long long group_rows,
    const long long shift,
    const long long early_parts,
    const long long early_groups,
    const long long late_shift,
    const long long tiles,
    const long long multiplier0,
    const long long shift0,
    const long long grad_stride1,
    const long long x_stride1,
    const long long out0_stride1)
{
    let_next_start();
    const unsigned i = blockIdx.x;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned tile = i - rest0 * (unsigned)tiles;
    const bool is_late = rest0 >= (unsigned)early_parts;
    const unsigned of_these = rest0 - (is_late ? (unsigned)early_parts : 0);
    const int of_group = (int)(is_late ? late_shift : shift);
    const unsigned group = (of_these >> of_group) + (is_late ? (unsigned)early_groups : 0);
    const unsigned turn = of_these - (of_these >> of_group << of_group), row0 = group * (unsigned)group_rows;
    const unsigned first = tile * 128;
    const unsigned column = first + threadIdx.x % 16 * 8;
    const bool is_inside = column < (unsigned)columns;
    const unsigned step = (unsigned)64 << of_group;
    const unsigned end = is_inside ? min(row0 + (unsigned)group_rows, (unsigned)rows) : 0;
    vec<bf16, 8> bias_v = {};
    if (is_inside) bias_v = load_vector<8>(bias_data + column);
    float out1_sum[8] = {};
    unsigned row = row0 + turn * 64 + threadIdx.x / 16;
    for (; row < end; row += step) {
        vec<bf16, 8> grad_v[4];
        vec<bf16, 8> x_v[4];
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = min(row + r * 16, end - 1);
            grad_v[r] = load_vector<8>(grad_data + (at * (unsigned)grad_stride1 + column));
            x_v[r] = load_vector<8>(x_data + (at * (unsigned)x_stride1 + column));
        }
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = row + r * 16;
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
    }
    add_lanes<256, 16, true>(out1_data + (rest0 * (unsigned)columns + first), out1_sum, (unsigned)columns - first);
    wait_for_previous();
}
