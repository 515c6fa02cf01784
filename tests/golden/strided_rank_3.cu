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
shifted_gelu_strided(
    const float* x_data,
    const float* bias_data,
    float* out_data,
    const long long n,
    const long long size0,
    const long long multiplier0,
    const long long shift0,
    const long long size1,
    const long long multiplier1,
    const long long shift1,
    const long long x_stride0,
    const long long x_stride1,
    const long long x_stride2,
    const long long bias_stride0,
    const long long bias_stride1,
    const long long bias_stride2,
    const long long out_stride0,
    const long long out_stride1,
    const long long out_stride2,
    const double rate)
{
    wait_for_previous();
    const unsigned first = (unsigned)blockIdx.x * 512 + threadIdx.x;
    float x_v[4];
    float bias_v[4];
    unsigned out_at[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {  // where element i lies in each operand
        const unsigned i = first + k * 128;
        if (i >= (unsigned)n) break;
        const unsigned rest0 = divide_u31(i, multiplier0, shift0);
        const unsigned at0 = i - rest0 * (unsigned)size0;
        const unsigned rest1 = divide_u31(rest0, multiplier1, shift1);
        const unsigned at1 = rest0 - rest1 * (unsigned)size1;
        x_v[k] = x_data[at0 * (unsigned)x_stride0 + at1 * (unsigned)x_stride1 + rest1 * (unsigned)x_stride2];
        bias_v[k] = bias_data[at0 * (unsigned)bias_stride0 + at1 * (unsigned)bias_stride1 + rest1 * (unsigned)bias_stride2];
        out_at[k] = at0 * (unsigned)out_stride0 + at1 * (unsigned)out_stride1 + rest1 * (unsigned)out_stride2;
    }
#pragma unroll
    for (int k = 0; k < 4; ++k) {
        if (first + k * 128 >= (unsigned)n) break;
        float out;
        shifted_gelu_element(widen(x_v[k]), widen(bias_v[k]), rate, out);
        out_data[out_at[k]] = narrow_to<float>::from(out);
    }
    if (gridDim.x <= 2048) let_next_start();
}
