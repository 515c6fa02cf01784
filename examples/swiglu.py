"""Fuse the gate of a Llama feed-forward and hold it against eager PyTorch and float64."""

import torch
import torch.nn.functional as F

import wideload as wl


@wl.fuse
def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up``."""
    return F.silu(gate) * up


device = "cuda" if torch.cuda.is_available() else "cpu"
gate, up = torch.randn(2, 256, 14336, dtype=torch.bfloat16, device=device)
exact = F.silu(gate.double()) * up.double()
for name, result in (("wideload", swiglu(gate, up)), ("eager", F.silu(gate) * up)):
    error = ((result.double() - exact) / exact).abs().max().item()
    print(f"{name:<8} largest relative error {error:.4f}, half a step of bf16 is {2**-8:.4f}")
