DEVICE void moments_element(const float grad, const float mean, const float square, const double beta, const double number, float& out0, float& out1, float& out2)
{
    // new_mean = torch.lerp(grad, mean, beta)
    const float lerp = ::interpolate(grad, mean, convert<float>(beta));
    // new_square = square * beta + grad * grad * (1 - beta)
    const float mul = square * convert<float>(beta);
    const float mul_2 = grad * grad;
    const float mul_3 = mul_2 * convert<float>(number);
    const float add = mul + mul_3;
    // return new_mean, new_square, (new_mean / (new_square.sqrt() + 1e-8)).to(bf16)
    const float sqrt = ::sqrt(add);
    const float add_2 = sqrt + 1e-08f;
    const float div = lerp / add_2;
    const float cast = div;
    out0 = lerp;
    out1 = add;
    out2 = cast;
}

extern "C" __global__ void __launch_bounds__(128)
moments_dense(
    const float* grad_data,
    const float* mean_data,
    const float* square_data,
    float* out0_data,
    float* out1_data,
    bf16* out2_data,
    const long long n,
    const double beta,
    const double number)
{
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 512 + threadIdx.x * 4;
    const bool is_full = i + 4 <= n;
    vec<float, 4> grad_v;
    vec<float, 4> mean_v;
    vec<float, 4> square_v;
    if (is_full) {
        grad_v = load_vector<4>(grad_data + i);
        mean_v = load_vector<4>(mean_data + i);
        square_v = load_vector<4>(square_data + i);
    } else {  // the last elements
        grad_v = load_some<4>(grad_data, i, n);
        mean_v = load_some<4>(mean_data, i, n);
        square_v = load_some<4>(square_data, i, n);
    }
    float out0_v[4];
    float out1_v[4];
    float out2_v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) moments_element(widen(grad_v.get(k)), widen(mean_v.get(k)), widen(square_v.get(k)), beta, number, out0_v[k], out1_v[k], out2_v[k]);
    if (is_full) {  // whole accesses
        store_vector(out0_data + i, out0_v);
        store_vector(out1_data + i, out1_v);
        store_vector(out2_data + i, out2_v);
    } else {  // the last elements
        store_some(out0_data, i, n, out0_v);
        store_some(out1_data, i, n, out1_v);
        store_some(out2_data, i, n, out2_v);
    }
    let_next_start();
}
