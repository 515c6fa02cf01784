DEVICE void causal_dropout_element(const float scores, const long long index, const long long index_2, const unsigned draw, float& out)
{
    // return torch.where(wl.index(-1) <= wl.index(-2), F.dropout(scores, 0.1), 0.0)
    const bool le = index <= index_2;
    const float dropout = scores * (draw >= 6554ll ? 1.1111112f : 0);
    const float where = le ? dropout : 0.0f;
    out = where;
}

extern "C" __global__ void __launch_bounds__(128)
causal_dropout_rows(
    const bf16* scores_data,
    bf16* out_data,
    const long long* seed_data,
    const long long n,
    const long long pad,
    const long long size0,
    const long long multiplier0,
    const long long shift0,
    const long long size1,
    const long long multiplier1,
    const long long shift1,
    const long long scores_stride1,
    const long long scores_stride2,
    const long long index_offset,
    const long long index_stride1,
    const long long index_stride2,
    const long long index_2_offset,
    const long long index_2_stride1,
    const long long index_2_stride2,
    const long long draw_offset,
    const long long draw_stride1,
    const long long draw_stride2)
{
    wait_for_previous();
    const int e = ((int)blockIdx.x * 128 + (int)threadIdx.x) * 8;
    if (e >= (int)n) return;
    const unsigned long long seed = (unsigned long long)*seed_data;
    vec<bf16, 8> scores_v = {};
    vec<unsigned, 8> index_v = {};
    vec<unsigned, 8> index_2_v = {};
    vec<unsigned, 8> draw_v = {};
    const unsigned rest0 = divide_u31((unsigned)(e), multiplier0, shift0);
    const unsigned at0 = (unsigned)(e) - rest0 * (unsigned)size0;
    const unsigned rest1 = divide_u31(rest0, multiplier1, shift1);
    const unsigned at1 = rest0 - rest1 * (unsigned)size1;
    scores_v = load_vector<8>(scores_data + (at1 * (unsigned)scores_stride1 + rest1 * (unsigned)scores_stride2 + (unsigned)at0));
    index_v = count_run<8>((unsigned)index_offset + (unsigned)(at0) + (unsigned)(at1) * (unsigned)index_stride1 + (unsigned)(rest1) * (unsigned)index_stride2);
    index_2_v = repeat_element<8>((unsigned)index_2_offset + (unsigned)(at1) * (unsigned)index_2_stride1 + (unsigned)(rest1) * (unsigned)index_2_stride2);
    draw_v = draw_run<16, 8>(seed, 0, (unsigned)draw_offset + (unsigned)(at0) + (unsigned)(at1) * (unsigned)draw_stride1 + (unsigned)(rest1) * (unsigned)draw_stride2);
    float out_v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) causal_dropout_element(widen(scores_v.get(k)), index_v.get(k), index_2_v.get(k), draw_v.get(k), out_v[k]);
    store_vector(out_data + e, out_v);
    if (gridDim.x <= 2048) let_next_start();
}
