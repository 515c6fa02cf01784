DEVICE void noisy_decay_element(const float weight, const float grad, const unsigned draw, const double number, const double lr, float& out)
{
    // return weight * (1 - lr * 0.1) - lr * grad + torch.rand_like(weight, dtype=f32) * 0.01
    const float mul = weight * convert<float>(number);
    const float mul_2 = grad * convert<float>(lr);
    const float sub = mul - mul_2;
    const float uniform_f32 = (float)(draw >> 8) * 0x1p-24f;
    const float mul_3 = uniform_f32 * 0.01f;
    const float add = sub + mul_3;
    out = add;
}

struct noisy_decay_lists_data {  // of each tensor, by value
    bf16* weight_data[169];
    const bf16* grad_data[169];
    long long n[169];
    double number;
    double lr;
    const long long* seed_data;
};

extern "C" __global__ void __launch_bounds__(128)
noisy_decay_foreach(
    const __grid_constant__ noisy_decay_lists_data lists_data,
    const int* __restrict__ chunks_data)
{
    const vec<int, 2> chunk_v = load_vector<2>(chunks_data + 2ll * blockIdx.x);
    const int slot = chunk_v.at[0];
    const long long n = lists_data.n[slot];
    const bf16* const weight_data = lists_data.weight_data[slot];
    const bf16* const grad_data = lists_data.grad_data[slot];
    bf16* const out_data = lists_data.weight_data[slot];
    const double number = lists_data.number;
    const double lr = lists_data.lr;
    const unsigned long long seed = (unsigned long long)lists_data.seed_data[slot];
    const long long first = (long long)chunk_v.at[1] * 2048 - phase_of<8>(out_data);
    if (first >= n) return;
    const long long e = first + threadIdx.x * 8;
    const bool is_full = first >= 0 && first + 2048 <= n && is_aligned<8>(weight_data) && is_aligned<8>(grad_data) && is_aligned<8>(out_data);
    vec<bf16, 8> weight_v[2];
    vec<bf16, 8> grad_v[2];
    if (is_full) {  // whole accesses, no bounds
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            weight_v[m] = load_vector<8>(weight_data + e + m * 1024);
            grad_v[m] = load_vector<8>(grad_data + e + m * 1024);
        }
    } else {  // the ends of a tensor, or addresses that are not aligned
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            weight_v[m] = load_part<8>(weight_data, e + m * 1024, n);
            grad_v[m] = load_part<8>(grad_data, e + m * 1024, n);
        }
    }
    vec<unsigned, 8> draw_v[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        draw_v[m] = draw_run<32, 8>(seed, 0, (unsigned long long)(e + m * 1024));
    }
    float out_v[2][8];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int k = 0; k < 8; ++k) noisy_decay_element(widen(weight_v[m].get(k)), widen(grad_v[m].get(k)), draw_v[m].get(k), number, lr, out_v[m][k]);
    }
    if (is_full) {  // whole accesses
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            store_whole(out_data + e + m * 1024, out_v[m]);
        }
    } else {  // the ends
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            if (is_whole<8>(out_data, e + m * 1024, n)) store_whole(out_data + e + m * 1024, out_v[m]); else store_some(out_data, e + m * 1024, n, out_v[m]);
        }
    }
}
