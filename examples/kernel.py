"""Look at the kernel that a function becomes on GPUs that are not here: why it is so, its registers, its CUDA C++."""

import torch
import torch.nn.functional as F

import wideload as wl


@wl.fuse
def scaled_relu(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``relu(x) * scale``, rounded to bf16."""
    return (F.relu(x) * scale).to(torch.bfloat16)


x = torch.empty(8192, 8192, device="meta")  # shapes and strides, no memory
print(scaled_relu.plan(x, 0.5, target="b200"))
for target in ("a100", "h200", "sm_120"):
    plan = scaled_relu.plan(x, 0.5, target=target)
    print(f"{target}: {plan.registers} registers, {plan.spill_bytes} bytes spilled")
source = scaled_relu.plan(x, 0.5, target="h200").source
print(source[source.index("DEVICE void scaled_relu") :])
