DEVICE void bias_gelu_backward_total_element(const float parts, float& out)
{
    out = parts;
}

extern "C" __global__ void __launch_bounds__(128, 7)
bias_gelu_backward_total_columns(
    const float* parts_data,
    bf16* out_data,
    const long long rows,
    const long long columns,
    const long long part_rows,
    const long long tiles0,
    const long long multiplier0,
    const long long shift0,
    const long long tiles1,
    const long long multiplier1,
    const long long shift1,
    const long long parts_stride1)
{
    let_next_start();
    wait_for_previous();
    const unsigned i = blockIdx.x;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned at0 = i - rest0 * (unsigned)tiles0;
    const unsigned rest1 = divide_u31(rest0, multiplier1, shift1);
    const unsigned at1 = rest0 - rest1 * (unsigned)tiles1;
    const unsigned first = at0 * 16;
    const unsigned column = first + threadIdx.x % 4 * 4;
    const bool is_inside = column < (unsigned)columns;
    const unsigned step = (unsigned)tiles1 * 128, row0 = rest1 * (unsigned)tiles1 * (unsigned)part_rows;
    const unsigned end = is_inside ? min(row0 + (unsigned)tiles1 * (unsigned)part_rows, (unsigned)rows) : 0;
    float out_sum[4] = {};
    unsigned row = row0 + at1 * 128 + threadIdx.x / 4;
    for (; row < end; row += step) {
        vec<float, 4> parts_v[4];
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = min(row + r * 32, end - 1);
            parts_v[r] = load_vector<4>(parts_data + (at * (unsigned)parts_stride1 + column));
        }
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = row + r * 32;
            const bool is_row = at < end;
            float out_v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                bias_gelu_backward_total_element(widen(parts_v[r].get(k)), out_v[k]);
                out_sum[k] += is_row ? out_v[k] : 0;
            }
        }
    }
    add_lanes<128, 4>(out_data + ((rest1 * (unsigned)tiles1 + at1) * (unsigned)columns + first), out_sum, (unsigned)columns - first);
}
