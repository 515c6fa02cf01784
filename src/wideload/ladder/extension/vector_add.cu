// The first kernels as a function of torch: what a host wrapper has to ask before it launches.
// Built by torch.utils.cpp_extension.load_inline: wideload ladder --route extension.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <limits>
#include <string>

#include "../vector_add_bf16.cu"
#include "../vector_add_f32.cu"

// By std::to_string: in any extension of torch 2.11's wheels that g++ 13 compiled, streaming a number into an ostringstream crashed.
static std::string listed(at::IntArrayRef numbers)
{
    std::string text;
    for (const int64_t number : numbers) text += (text.empty() ? "" : ", ") + std::to_string(number);
    return "[" + text + "]";
}

static void check_like(const at::Tensor& x, const at::Tensor& y)
{
    TORCH_CHECK_VALUE(x.is_cuda(), "vector_add: argument x is on ", x.device(), "; allowed: a CUDA device");
    TORCH_CHECK_VALUE(y.device() == x.device(), "vector_add: argument y is on ", y.device(), ", x on ", x.device());
    TORCH_CHECK_TYPE(
        x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16,
        "vector_add: argument x is ", x.scalar_type(), "; allowed: Float, BFloat16");
    TORCH_CHECK_TYPE(y.scalar_type() == x.scalar_type(), "vector_add: argument y is ", y.scalar_type(), ", x is ", x.scalar_type());
    TORCH_CHECK_VALUE(y.sizes() == x.sizes(), "vector_add: argument y has shape ", listed(y.sizes()), ", x has ", listed(x.sizes()));
    TORCH_CHECK_VALUE(x.is_contiguous(), "vector_add: argument x has strides ", listed(x.strides()), "; allowed: contiguous. Use .contiguous()");
    TORCH_CHECK_VALUE(y.is_contiguous(), "vector_add: argument y has strides ", listed(y.strides()), "; allowed: contiguous. Use .contiguous()");
}

at::Tensor vector_add(const at::Tensor& x, const at::Tensor& y)
{
    constexpr int64_t threads = 256;
    check_like(x, y);
    const c10::cuda::CUDAGuard guard(x.device());  // the tensors' device need not be the current one
    at::Tensor out = at::empty_like(x);
    const int64_t n = x.numel(), blocks = (n + threads - 1) / threads;
    if (n == 0) return out;  // a grid without blocks is an error
    TORCH_CHECK_VALUE(blocks <= std::numeric_limits<int>::max(), "vector_add: argument x has ", std::to_string(n), " elements; a grid has 2^31 - 1 blocks");

    const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();  // stream 0 would not wait for it
    if (x.scalar_type() == at::kFloat) {
        vector_add_f32<<<blocks, threads, 0, stream>>>(x.const_data_ptr<float>(), y.const_data_ptr<float>(), out.mutable_data_ptr<float>(), n);
    } else {
        const auto bits = [](const at::Tensor& tensor) { return static_cast<__nv_bfloat16*>(tensor.data_ptr()); };
        vector_add_bf16<<<blocks, threads, 0, stream>>>(bits(x), bits(y), bits(out), n);
    }
    C10_CUDA_KERNEL_LAUNCH_CHECK();  // asks for what the launch refused; what the kernel does wrong is known after a wait
    return out;
}
