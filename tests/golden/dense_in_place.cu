DEVICE void decay_element(const float weight, const float grad, const double number, const double lr, float& out)
{
    // return weight * (1 - lr * 0.1) - lr * grad
    const float mul = weight * convert<float>(number);
    const float mul_2 = grad * convert<float>(lr);
    const float sub = mul - mul_2;
    out = sub;
}

extern "C" __global__ void __launch_bounds__(128)
decay_dense(
    const float* weight_data,
    const float* grad_data,
    float* out_data,
    const long long n,
    const double number,
    const double lr)
{
    const long long i = (long long)blockIdx.x * 512 + threadIdx.x * 4;
    const bool is_full = i + 4 <= n;
    vec<float, 4> weight_v;
    vec<float, 4> grad_v;
    if (is_full) {
        weight_v = load_vector<4>(weight_data + i);
        grad_v = load_vector<4>(grad_data + i);
    } else {  // the last elements
        weight_v = load_some<4>(weight_data, i, n);
        grad_v = load_some<4>(grad_data, i, n);
    }
    float out_v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) decay_element(widen(weight_v.get(k)), widen(grad_v.get(k)), number, lr, out_v[k]);
    if (is_full) {  // whole accesses
        store_vector(out_data + i, out_v);
    } else {  // the last elements
        store_some(out_data, i, n, out_v);
    }
}
