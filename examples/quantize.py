"""Quantise a weight by rows to 8 and to 4 bits, and choose each row's scale by what it loses, which no kernel has to store."""

import torch

import wideload as wl


@wl.fuse
def quantize(w: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    """``w`` in steps of ``scale``, rounded to the nearest, ties to even, between ``-most`` and ``most``."""
    return (w.float() / scale).round().clamp(-most, most).to(torch.int8)


@wl.fuse
def squared_error(w: torch.Tensor, scale: torch.Tensor, most: int) -> torch.Tensor:
    """What quantising and reading back loses of each element."""
    return ((w.float() / scale).round().clamp(-most, most) * scale - w.float()).square()


device = "cuda" if torch.cuda.is_available() else "cpu"
w = torch.randn(256, 1024, dtype=torch.bfloat16, device=device)
widest = w.abs().amax(1, keepdim=True).float()
assert torch.equal(quantize(w, widest / 127, 127), wl.ops.quantize_int8(w, widest / 127))  # ready-made

shares = torch.tensor([1.0, 0.9, 0.8, 0.7, 0.6], device=device)  # a narrower range has finer steps, and clips the rest
for most in (127, 7):
    scales = widest / most * shares
    errors = torch.stack([squared_error(w, scale[:, None], most).mean(1) for scale in scales.unbind(1)], 1)
    least, choice = errors.min(1)
    best = scales.gather(1, choice[:, None])
    q = quantize(w, best, most)
    read_back = wl.ops.dequantize_int8(q, best, torch.float32)
    assert torch.allclose((read_back - w.float()).square().mean(1), least, rtol=1e-4)
    kept = shares[choice].mean().item()
    gain = (least.mean() / errors[:, 0].mean()).item()
    print(f"{2 * most + 1:3} steps: keeping {kept:.2f} of the range, the error is {gain:.2f} of what it is of all")
