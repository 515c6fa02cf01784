"""Turn queries and keys by their positions in one call: the rotary embedding of Llama, written as models write it, and turned back."""

import torch

import wideload as wl


@wl.fuse
def rotate(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys [batch, positions, heads, dim] turned by tables [positions, 1, dim / 2]; halves are rounded once."""
    results = []
    for x in (q, k):
        first, second = x.chunk(2, -1)
        results.append(torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype))
    return results[0], results[1]


device = "cuda" if torch.cuda.is_available() else "cpu"
batch, positions, heads, dim = 2, 64, 8, 64
q, k = torch.randn(2, batch, positions, heads, dim, dtype=torch.bfloat16, device=device)
frequencies = 10000.0 ** (-torch.arange(0, dim, 2, device=device) / dim)
angles = torch.arange(positions, device=device)[:, None] * frequencies
cos, sin = angles.cos(), angles.sin()

turned_q, turned_k = rotate(q, k, cos[:, None], sin[:, None])
assert torch.equal(turned_q, wl.ops.rope(q, cos, sin))  # ready-made, of one tensor

# What attention sees hangs on the distance of positions alone: all queries and keys alike, the scores are one band.
turned_q, turned_k = rotate(q[:1, :1].expand_as(q), k[:1, :1].expand_as(k), cos[:, None], sin[:, None])
scores = torch.einsum("bqhd,bkhd->bhqk", turned_q.double(), turned_k.double())
spread = (scores[..., 1:, 1:] - scores[..., :-1, :-1]).abs().max().item()
back = wl.ops.rope(wl.ops.rope(q, cos, sin), cos, sin, inverse=True)
print(f"scores along a diagonal differ by {spread:.2f} of {scores.abs().max().item():.0f}")
print(f"turned back, they are {(back - q).abs().max().item():.3f} off")
print(rotate.plan(q, k, cos[:, None], sin[:, None], target="h200"))
