"""Update a parameter in place, two results from one kernel, with a learning rate that changes at every step."""

import torch

import wideload as wl


@wl.fuse
def sgd(
    parameter: torch.Tensor, velocity: torch.Tensor, gradient: torch.Tensor, lr: float, momentum: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of SGD with momentum."""
    velocity = momentum * velocity + gradient
    return parameter - lr * velocity, velocity


device = "cuda" if torch.cuda.is_available() else "cpu"
target = torch.linspace(-1, 1, 1000, device=device)
parameter, velocity = torch.zeros_like(target), torch.zeros_like(target)
for step in range(100):
    gradient = parameter - target
    sgd(parameter, velocity, gradient, 0.5 * 0.97**step, 0.5, out=(parameter, velocity))
print(f"distance to the target after 100 steps: {(parameter - target).norm().item():.6f}")
