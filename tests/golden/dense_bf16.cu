DEVICE void swiglu_element(const float gate, const float up, float& out)
{
    // return F.silu(gate) * up
    const float silu = ::half_silu(gate);
    const float mul = silu * up;
    out = mul;
}

extern "C" __global__ void __launch_bounds__(128)
swiglu_dense(
    const bf16* gate_data,
    const bf16* up_data,
    bf16* out_data,
    const long long n)
{
    wait_for_previous();
    const long long i = (long long)blockIdx.x * 1024 + threadIdx.x * 8;
    const bool is_full = i + 8 <= n;
    vec<bf16, 8> gate_v;
    vec<bf16, 8> up_v;
    if (is_full) {
        gate_v = load_vector<8>(gate_data + i);
        up_v = load_vector<8>(up_data + i);
    } else {  // the last elements
        gate_v = load_some<8>(gate_data, i, n);
        up_v = load_some<8>(up_data, i, n);
    }
    float out_v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) swiglu_element(widen(gate_v.get(k)), widen(up_v.get(k)), out_v[k]);
    if (is_full) {  // whole accesses
        store_vector(out_data + i, out_v);
    } else {  // the last elements
        store_some(out_data, i, n, out_v);
    }
    let_next_start();
}
