DEVICE void bias_gelu_backward_total_element(const float parts, float& out)
{
    out = parts;
}

extern "C" __global__ void __launch_bounds__(128, 8)
bias_gelu_backward_total_columns(
    const float* parts_data,
    bf16* out_data,
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
    const long long parts_stride1)
{
    let_next_start();
    wait_for_previous();
    const unsigned i = blockIdx.x;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned tile = i - rest0 * (unsigned)tiles;
    const bool is_late = rest0 >= (unsigned)early_parts;
    const unsigned of_these = rest0 - (is_late ? (unsigned)early_parts : 0);
    const int of_group = (int)(is_late ? late_shift : shift);
    const unsigned group = (of_these >> of_group) + (is_late ? (unsigned)early_groups : 0);
    const unsigned turn = of_these - (of_these >> of_group << of_group), row0 = group * (unsigned)group_rows;
    const unsigned first = tile * 32;
    const unsigned column = first + threadIdx.x % 8 * 4;
    const bool is_inside = column < (unsigned)columns;
    const unsigned step = (unsigned)64 << of_group;
    const unsigned end = is_inside ? min(row0 + (unsigned)group_rows, (unsigned)rows) : 0;
    float out_sum[4] = {};
    unsigned row = row0 + turn * 64 + threadIdx.x / 8;
    for (; row < end; row += step) {
        vec<float, 4> parts_v[4];
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = min(row + r * 16, end - 1);
            parts_v[r] = load_vector<4>(parts_data + (at * (unsigned)parts_stride1 + column));
        }
#pragma unroll
        for (unsigned r = 0; r < 4; ++r) {
            const unsigned at = row + r * 16;
            const bool is_row = at < end;
            float out_v[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                bias_gelu_backward_total_element(widen(parts_v[r].get(k)), out_v[k]);
                out_sum[k] += is_row ? out_v[k] : 0;
            }
        }
    }
    add_lanes<128, 8, false>(out_data + (rest0 * (unsigned)columns + first), out_sum, (unsigned)columns - first);
}
