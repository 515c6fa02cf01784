DEVICE void rope_element(const float x, const float cos, const float x_2, const float sin, const float cos_2, const float sin_2, float& out0, float& out1)
{
    // return x * cos + torch.cat((-second, first), dim=-1) * sin
    const float mul = x * cos;
    const float neg = -x_2;
    const float mul_2 = neg * sin;
    const float add = mul + mul_2;
    const float mul_3 = x_2 * cos_2;
    const float mul_4 = x * sin_2;
    const float add_2 = mul_3 + mul_4;
    out0 = add;
    out1 = add_2;
}

extern "C" __global__ void __launch_bounds__(128, 8)
rope_pitched(
    const bf16* x_data,
    const bf16* cos_data,
    const bf16* x_2_data,
    const bf16* sin_data,
    const bf16* cos_2_data,
    const bf16* sin_2_data,
    bf16* out0_data,
    bf16* out1_data,
    const long long n,
    const long long size0,
    const long long phase,
    const long long slots0,
    const long long multiplier0,
    const long long shift0,
    const long long size1,
    const long long multiplier1,
    const long long shift1,
    const long long size2,
    const long long multiplier2,
    const long long shift2,
    const long long x_stride1,
    const long long x_stride2,
    const long long x_stride3,
    const long long cos_stride1,
    const long long cos_stride2,
    const long long cos_stride3,
    const long long x_2_stride1,
    const long long x_2_stride2,
    const long long x_2_stride3,
    const long long sin_stride1,
    const long long sin_stride2,
    const long long sin_stride3,
    const long long cos_2_stride1,
    const long long cos_2_stride2,
    const long long cos_2_stride3,
    const long long sin_2_stride1,
    const long long sin_2_stride2,
    const long long sin_2_stride3,
    const long long out0_stride1,
    const long long out0_stride2,
    const long long out0_stride3,
    const long long out1_stride1,
    const long long out1_stride2,
    const long long out1_stride3)
{
    wait_for_previous();
    const unsigned i = (unsigned)blockIdx.x * 128 + threadIdx.x;
    if (i >= (unsigned)n) return;
    const unsigned rest0 = divide_u31(i, multiplier0, shift0);
    const unsigned slot = i - rest0 * (unsigned)slots0;
    const unsigned rest1 = divide_u31(rest0, multiplier1, shift1);
    const unsigned at1 = rest0 - rest1 * (unsigned)size1;
    const unsigned rest2 = divide_u31(rest1, multiplier2, shift2);
    const unsigned at2 = rest1 - rest2 * (unsigned)size2;
    const unsigned at3 = rest2;
    const unsigned out0_at = at1 * (unsigned)out0_stride1 + at2 * (unsigned)out0_stride2 + at3 * (unsigned)out0_stride3;
    const unsigned out1_at = at1 * (unsigned)out1_stride1 + at2 * (unsigned)out1_stride2 + at3 * (unsigned)out1_stride3;
    const int column = (int)slot * 8;
    vec<bf16, 8> x_v = {};
    vec<bf16, 8> cos_v = {};
    vec<bf16, 8> x_2_v = {};
    vec<bf16, 8> sin_v = {};
    vec<bf16, 8> cos_2_v = {};
    vec<bf16, 8> sin_2_v = {};
    x_v = load_vector<8>(x_data + (at1 * (unsigned)x_stride1 + at2 * (unsigned)x_stride2 + at3 * (unsigned)x_stride3 + (unsigned)column));
    cos_v = load_vector<8>(cos_data + (at1 * (unsigned)cos_stride1 + at2 * (unsigned)cos_stride2 + at3 * (unsigned)cos_stride3 + (unsigned)column));
    x_2_v = load_vector<8>(x_2_data + (at1 * (unsigned)x_2_stride1 + at2 * (unsigned)x_2_stride2 + at3 * (unsigned)x_2_stride3 + (unsigned)column));
    sin_v = load_vector<8>(sin_data + (at1 * (unsigned)sin_stride1 + at2 * (unsigned)sin_stride2 + at3 * (unsigned)sin_stride3 + (unsigned)column));
    cos_2_v = load_vector<8>(cos_2_data + (at1 * (unsigned)cos_2_stride1 + at2 * (unsigned)cos_2_stride2 + at3 * (unsigned)cos_2_stride3 + (unsigned)column));
    sin_2_v = load_vector<8>(sin_2_data + (at1 * (unsigned)sin_2_stride1 + at2 * (unsigned)sin_2_stride2 + at3 * (unsigned)sin_2_stride3 + (unsigned)column));
    float out0_v[8];
    float out1_v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) rope_element(widen(x_v.get(k)), widen(cos_v.get(k)), widen(x_2_v.get(k)), widen(sin_v.get(k)), widen(cos_2_v.get(k)), widen(sin_2_v.get(k)), out0_v[k], out1_v[k]);
    store_vector(out0_data + out0_at + column, out0_v);
    store_vector(out1_data + out1_at + column, out1_v);
    let_next_start();
}
