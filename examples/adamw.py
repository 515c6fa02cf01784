"""AdamW in ten lines: one function of one tensor, one launch for a whole model, held against torch's own."""

import torch

import wideload as wl


@wl.fuse
def adamw(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, lr: float, b1: float, b2: float, eps: float, decay: float, t: int
) -> tuple[torch.Tensor, ...]:
    """Step ``t`` of one parameter: itself and both moments."""
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g * g
    update = m / (1 - b1**t) / ((v / (1 - b2**t)).sqrt() + eps)
    return p * (1 - lr * decay) - lr * update, m, v


device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
peer = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
peer.load_state_dict(model.state_dict())
reference = torch.optim.AdamW(peer.parameters(), lr=1e-2)
x = torch.randn(256, 20, device=device)

ps = list(model.parameters())
ms, vs = ([torch.zeros_like(p) for p in ps] for _ in range(2))
for t in range(1, 21):
    gs = torch.autograd.grad((model(x) - x.sum(1, keepdim=True)).square().mean(), ps)
    with torch.no_grad():
        adamw.foreach(ps, gs, ms, vs, 1e-2, 0.9, 0.999, 1e-8, 0.01, t, out=list(zip(ps, ms, vs, strict=True)))

    loss = (peer(x) - x.sum(1, keepdim=True)).square().mean()
    reference.zero_grad()
    loss.backward()
    reference.step()

difference = max((p - q).abs().max().item() for p, q in zip(ps, peer.parameters(), strict=True))
print(f"loss after 20 steps: {loss.item():.4f}; largest difference from torch.optim.AdamW: {difference:.1e}")
