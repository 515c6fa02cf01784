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

struct moments_lists_data {  // of each tensor, by value
    const float* grad_data[72];
    const float* mean_data[72];
    const float* square_data[72];
    float* out0_data[72];
    float* out1_data[72];
    bf16* out2_data[72];
    long long n[72];
    double beta;
    double number;
};

extern "C" __global__ void __launch_bounds__(128)
moments_foreach(
    const __grid_constant__ moments_lists_data lists_data,
    const int* __restrict__ chunks_data)
{
    const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);
    const int slot = chunk_v.at[0];
    const long long n = lists_data.n[slot];
    const float* const grad_data = lists_data.grad_data[slot];
    const float* const mean_data = lists_data.mean_data[slot];
    const float* const square_data = lists_data.square_data[slot];
    float* const out0_data = lists_data.out0_data[slot];
    float* const out1_data = lists_data.out1_data[slot];
    bf16* const out2_data = lists_data.out2_data[slot];
    const double beta = lists_data.beta;
    const double number = lists_data.number;
    const long long first = (long long)chunk_v.at[1] * 1024 - phase_of<4>(out0_data);
    if (first >= n) return;
    const long long e = first + threadIdx.x * 4;
    const bool is_full = first >= 0 && first + 1024 <= n && is_aligned<4>(grad_data) && is_aligned<4>(mean_data) && is_aligned<4>(square_data) && is_aligned<4>(out0_data) && is_aligned<4>(out1_data) && is_aligned<4>(out2_data);
    vec<float, 4> grad_v[2];
    vec<float, 4> mean_v[2];
    vec<float, 4> square_v[2];
    if (is_full) {  // whole accesses, no bounds
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            grad_v[m] = load_vector<4>(grad_data + e + m * 512);
            mean_v[m] = load_vector<4>(mean_data + e + m * 512);
            square_v[m] = load_vector<4>(square_data + e + m * 512);
        }
    } else {  // the ends of a tensor, or addresses that are not aligned
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            grad_v[m] = load_part<4>(grad_data, e + m * 512, n);
            mean_v[m] = load_part<4>(mean_data, e + m * 512, n);
            square_v[m] = load_part<4>(square_data, e + m * 512, n);
        }
    }
    float out0_v[2][4];
    float out1_v[2][4];
    float out2_v[2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 4; ++k) moments_element(widen(grad_v[m].get(k)), widen(mean_v[m].get(k)), widen(square_v[m].get(k)), beta, number, out0_v[m][k], out1_v[m][k], out2_v[m][k]);
    }
    if (is_full) {  // whole accesses
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            store_whole(out0_data + e + m * 512, out0_v[m]);
            store_whole(out1_data + e + m * 512, out1_v[m]);
            store_whole(out2_data + e + m * 512, out2_v[m]);
        }
    } else {  // the ends
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if (is_whole<4>(out0_data, e + m * 512, n)) store_whole(out0_data + e + m * 512, out0_v[m]); else store_some(out0_data, e + m * 512, n, out0_v[m]);
            if (is_whole<4>(out1_data, e + m * 512, n)) store_whole(out1_data + e + m * 512, out1_v[m]); else store_some(out1_data, e + m * 512, n, out1_v[m]);
            if (is_whole<4>(out2_data, e + m * 512, n)) store_whole(out2_data + e + m * 512, out2_v[m]); else store_some(out2_data, e + m * 512, n, out2_v[m]);
        }
    }
}
