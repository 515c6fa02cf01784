"""Patch a small Llama that knows nothing of wideload: what changes, how far its loss and gradients move, and that it is undone."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wideload as wl


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys [batch, heads, positions, dim]."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2
    q_half, k_half = (torch.cat((-x[..., half:], x[..., :half]), -1) for x in (q, k))
    return q * cos + q_half * sin, k * cos + k_half * sin


class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv_proj, self.o_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` [batch, positions, width], by tables [1, positions, width / num_heads]."""
        q, k, v = self.qkv_proj(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """A gated feed-forward."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj, self.act_fn = nn.Linear(hidden, width, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., width]."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Llama(nn.Module):
    """Two layers of it."""

    def __init__(self, vocabulary: int = 256, width: int = 64, num_layers: int = 2, num_heads: int = 4) -> None:
        super().__init__()
        self.dim = width // num_heads
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.attention = nn.ModuleList(Attention(width, num_heads) for _ in range(num_layers))
        self.mlp = nn.ModuleList(MLP(width, 3 * width) for _ in range(num_layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * num_layers + 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, positions, vocabulary] of tokens [batch, positions]."""
        x = self.embed(tokens)
        frequencies = 10000.0 ** (-torch.arange(0, self.dim, 2, device=x.device) / self.dim)
        angles = (torch.arange(tokens.shape[1], device=x.device)[:, None] * frequencies).repeat(1, 2)[None]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for at, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * at](x), cos, sin)
            x = x + mlp(self.norms[2 * at + 1](x))
        return self.head(self.norms[-1](x))


device = "cuda" if torch.cuda.is_available() else "cpu"
model = Llama().to(device, torch.bfloat16)
tokens = torch.randint(256, (2, 33), device=device)


def loss_and_gradients() -> tuple[Tensor, ...]:
    """Of the next tokens."""
    loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    return loss, *torch.autograd.grad(loss, list(model.parameters()))


before = loss_and_gradients()
with wl.patch(model) as patch:
    patched = loss_and_gradients()
    print(patch)
after = loss_and_gradients()

distances = [((a - b).double().norm() / a.double().norm()).item() for a, b in zip(before, patched, strict=True)]
print(
    f"loss {before[0].item():.4f}, patched {patched[0].item():.4f}; gradients {max(distances[1:]):.4f} apart, a step of bf16 is {2**-7:.4f}"
)
print("as before:", all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
