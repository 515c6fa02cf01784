"""Trains a small Llama-style model in bf16 on one GPU with its elementwise parts fused, in eager PyTorch and in torch.compile.

    python benchmarks/training.py [--steps 50] [--rounds 10] [--no-compile] [--json training.json]

Gradients, loss curves and, with dropout, the statistics of losses are held to eager's; forward and backward, and whole steps with AdamW,
are timed by the wall clock; so is a Llama of transformers under `wl.patch`, beside Liger-Kernel's patch, where these are installed.
The exit status is 0 where every row passes, 1 where one does not, 2 without a GPU. ``WIDELOAD_COMMIT`` names the commit where there is
no git checkout.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import json
import math
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wideload as wl
from table import NOT_BEHIND, SEED, Finding, describe_environment, find_device, name_environment

LR = 1e-3
DROPOUT = 0.1
DRAWS = 4
"""Runs with dropout of each kind, from seeds of their own."""
LAST_STEPS = 10
"""Whose mean is the loss that a run ends with."""

GRADIENT_SPREAD = 1.1
"""Times eager's distance from the gradients in fp32: fused functions round less often, and both sum over millions of elements."""
CURVE_SPREAD = 3.0
"""Times the farthest that eager's losses are from those in fp32. Two roundings of one run are as far apart as both distances together,
and that of one may be twice that of the other by chance: a step's rounding moves all later ones."""
DRAWN_SIGMAS = 6.0
"""Between means of two times `DRAWS` runs, of the standard error of their difference: by chance once in a thousand runs."""


@dataclass(frozen=True)
class Sizes:
    """Of a model and its batches."""

    vocabulary: int
    layers: int
    dim: int
    heads: int
    hidden: int
    batch: int
    sequence: int


CURVE = Sizes(vocabulary=512, layers=4, dim=256, heads=4, hidden=704, batch=8, sequence=256)
"""Small: its losses are looked at."""
TIMED = Sizes(vocabulary=8192, layers=4, dim=2048, heads=16, hidden=5632, batch=4, sequence=2048)
"""Layers as wide as those of a Llama of 1 B parameters."""


# ---- the model


@wl.fuse(static=("p",))
def dropped_sum(x: Tensor, residual: Tensor, p: float) -> Tensor:
    """``dropout(x, p) + residual``."""
    return F.dropout(x, p) + residual


@dataclass(frozen=True)
class Parts:
    """The elementwise functions of a model."""

    swiglu: Callable[..., Tensor]
    rope: Callable[..., Tensor]
    dropped_sum: Callable[..., Tensor]


FUSED = Parts(wl.ops.swiglu, wl.ops.rope, dropped_sum)
PLAIN = Parts(wl.ops.swiglu.__wrapped__, wl.ops.rope.__wrapped__, dropped_sum.__wrapped__)


class Block(nn.Module):
    """Attention and a gated feed-forward, each behind a norm and added to what came in."""

    def __init__(self, parts: Parts, sizes: Sizes, p: float) -> None:
        super().__init__()
        self.parts, self.heads, self.p = parts, sizes.heads, p
        self.norms = nn.ModuleList(nn.RMSNorm(sizes.dim) for _ in range(2))
        self.qkv = nn.Linear(sizes.dim, 3 * sizes.dim, bias=False)
        self.out = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.gate, self.up = (nn.Linear(sizes.dim, sizes.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """``x`` is [batch, sequence, dim], the tables [sequence, dim of a head / 2]."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k = self.parts.rope(q, cos, sin), self.parts.rope(k, cos, sin)
        heads = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = self.parts.dropped_sum(self.out(heads.transpose(1, 2).flatten(-2)), x, self.p)
        y = self.norms[1](x)
        return self.parts.dropped_sum(self.down(self.parts.swiglu(self.gate(y), self.up(y))), x, self.p)


class Model(nn.Module):
    """Returns the mean loss of tokens [batch, sequence + 1]."""

    def __init__(self, parts: Parts, sizes: Sizes, p: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.blocks = nn.ModuleList(Block(parts, sizes, p) for _ in range(sizes.layers))
        self.norm, self.head = nn.RMSNorm(sizes.dim), nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        half = sizes.dim // sizes.heads // 2
        angle = torch.arange(sizes.sequence)[:, None] * 10000.0 ** (-torch.arange(half) / half)
        self.cos, self.sin = angle.cos(), angle.sin()  # no buffers: they stay in fp32 when the model does not

    def place(self, device: torch.device, dtype: torch.dtype) -> Model:
        """The model there, its tables in fp32."""
        self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self.to(device, dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss, in fp32."""
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), tokens[:, 1:].flatten())


def make_model(parts: Parts, sizes: Sizes, device: torch.device, dtype: torch.dtype = torch.bfloat16, p: float = 0.0) -> Model:
    """The same weights whatever the parts, rounded to ``dtype``."""
    torch.manual_seed(SEED)
    model = Model(parts, sizes, p)
    return model.bfloat16().place(device, dtype)  # fp32 begins with the numbers that bf16 has


def batches(sizes: Sizes, num: int, device: torch.device) -> list[Tensor]:
    """Sequences in which each token decides the next: what can be learnt in a few steps."""
    generator = torch.Generator().manual_seed(SEED)
    found = []
    for _ in range(num):
        tokens = [torch.randint(sizes.vocabulary, (sizes.batch,), generator=generator)]
        for _ in range(sizes.sequence):
            tokens.append((5 * tokens[-1] + 3) % sizes.vocabulary)
        found.append(torch.stack(tokens, dim=1).to(device))
    return found


@dataclass
class Contender:
    """A model and its optimizer."""

    model: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer

    def run(self, tokens: Tensor) -> Tensor:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.model(tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self, tokens: Tensor) -> Tensor:
        """Forward, backward, and the parameters moved."""
        loss = self.run(tokens)
        self.optimizer.step()
        return loss


def contend(parts: Parts, sizes: Sizes, device: torch.device, *, is_compiled: bool = False, **options: Any) -> Contender:
    """Fused parts go with wideload's AdamW, plain ones with torch's fused one."""
    model = make_model(parts, sizes, device, **options)
    make: Any = wl.optim.AdamW if parts is FUSED else torch.optim.AdamW
    optimizer = make(model.parameters(), lr=LR, fused=True)
    return Contender(torch.compile(model, dynamic=False) if is_compiled else model, optimizer)


def contenders(sizes: Sizes, device: torch.device, with_compile: bool) -> dict[str, Contender]:
    """Eager first; each kind of parts alone and compiled."""
    kinds = {"eager": (PLAIN, False), "wideload": (FUSED, False)}
    if with_compile:
        kinds |= {"compile": (PLAIN, True), "wideload + compile": (FUSED, True)}
    return {name: contend(parts, sizes, device, is_compiled=is_compiled) for name, (parts, is_compiled) in kinds.items()}


# ---- what is checked


def not_run(what: str, error: Exception) -> Finding:
    """A row of what this machine cannot run, which fails nothing."""
    reason = str(error).strip().splitlines()
    return Finding(what, f"not run: {type(error).__name__}: {reason[0] if reason else ''}", "", True)


def gradient_distance(found: Sequence[Tensor | None], exact: Sequence[Tensor | None]) -> float:
    """Between two lists of gradients, relative to the second."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, exact, strict=True) if a is not None and b is not None]
    apart, size = (sum(float(t.square().sum()) for t in terms) for terms in ([a - b for a, b in pairs], [b for _, b in pairs]))
    return math.sqrt(apart / size)


def gradient_finding(what: str, mine: float, eager: float) -> Finding:
    """Whether one distance from fp32's gradients is no more than eager's."""
    allowed = GRADIENT_SPREAD * eager
    return Finding(f"{what}: gradients, from fp32's", f"{mine:.2%}; eager's are {eager:.2%}", f"at most {allowed:.2%}", mine <= allowed)


def gradients_of(contender: Contender, tokens: Tensor) -> list[Tensor | None]:
    """Of all parameters."""
    contender.run(tokens)
    found = [p.grad for group in contender.optimizer.param_groups for p in group["params"]]
    contender.optimizer.zero_grad(set_to_none=True)
    return found


def train(contender: Contender, data: Sequence[Tensor]) -> list[float]:
    """The loss before each step."""
    return [float(contender.step(tokens)) for tokens in data]


def curve_finding(what: str, mine: Sequence[float], eager: Sequence[float], exact: Sequence[float]) -> Finding:
    """Whether one curve of losses is as near to eager's as roundings let it be, and falls."""
    apart, noise = (max(abs(a - b) for a, b in zip(losses, eager, strict=True)) for losses in (mine, exact))
    allowed = CURVE_SPREAD * noise
    found = f"up to {apart:.4f} from eager's, {mine[0]:.3f} to {mine[-1]:.3f}"
    return Finding(
        f"{what}: losses of {len(mine)} steps", found, f"at most {allowed:.4f}, and falling", apart <= allowed and mine[-1] < mine[0]
    )


def drawn_finding(mine: Sequence[float], eager: Sequence[float]) -> Finding:
    """Whether runs that draw other numbers end with losses of one mean."""
    means, errors = zip(*((statistics.mean(of), statistics.variance(of) / len(of)) for of in (mine, eager)), strict=True)
    allowed = DRAWN_SIGMAS * math.sqrt(sum(errors))
    found = f"{means[0]:.4f}; eager's {means[1]:.4f}, of {len(mine)} runs each"
    return Finding(f"dropout {DROPOUT}: the last {LAST_STEPS} losses", found, f"{allowed:.4f} apart", abs(means[0] - means[1]) <= allowed)


def check_curves(sizes: Sizes, device: torch.device, num_steps: int, with_compile: bool, figures: dict[str, Any]) -> Iterator[Finding]:
    """Gradients of the first step, and the losses of all, of each contender."""
    data = batches(sizes, num_steps, device)
    exact = contend(PLAIN, sizes, device, dtype=torch.float32)
    found = contenders(sizes, device, with_compile)
    right = gradients_of(exact, data[0])
    exact_losses, eager = train(exact, data), found.pop("eager")
    eager_distance, eager_losses = gradient_distance(gradients_of(eager, data[0]), right), train(eager, data)
    figures["losses"] = {"eager, fp32": exact_losses, "eager": eager_losses}
    for name, contender in found.items():
        try:
            distance = gradient_distance(gradients_of(contender, data[0]), right)
            losses = train(contender, data)
        except Exception as error:  # a compiler that is missing
            if name == "wideload":
                raise
            yield not_run(name, error)
            continue
        figures["losses"][name] = losses
        if name != "compile":
            yield gradient_finding(name, distance, eager_distance)
        yield curve_finding(name, losses, eager_losses, exact_losses)


def check_dropout(sizes: Sizes, device: torch.device, num_steps: int, figures: dict[str, Any]) -> Iterator[Finding]:
    """The losses that runs with dropout end with."""
    data, ends = batches(sizes, num_steps, device), dict[str, list[float]]()
    for name, parts in (("wideload", FUSED), ("eager", PLAIN)):
        for seed in range(DRAWS):
            contender = contend(parts, sizes, device, p=DROPOUT)
            torch.manual_seed(SEED + 1 + seed)
            ends.setdefault(name, []).append(statistics.mean(train(contender, data)[-LAST_STEPS:]))
    figures["dropout"] = ends
    yield drawn_finding(ends["wideload"], ends["eager"])


# ---- what is timed


def time_turns(calls: Mapping[str, Callable[[], object]], num_rounds: int, wait: Callable[[], None]) -> dict[str, list[float]]:
    """Milliseconds by the wall clock, the host's work and the wait for the GPU among them; calls take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(2):  # what is compiled or captured is, and the allocator has the memory
            call()
    for _ in range(num_rounds):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def time_finding(what: str, name: str, peer: str, times_ms: Mapping[str, float]) -> Finding:
    """Whether one is not behind the other."""
    ratio = times_ms[peer] / times_ms[name]
    found = f"{times_ms[name]:.2f} ms, {peer} {times_ms[peer]:.2f} ms: {ratio:.3f}x"
    return Finding(f"{what}: {name}", found, f"at least {1 / NOT_BEHIND:.2f}x", ratio >= 1 / NOT_BEHIND)


def waiting(device: torch.device) -> Callable[[], None]:
    """What waits until the device is idle."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def time_steps(sizes: Sizes, device: torch.device, num_rounds: int, with_compile: bool, figures: dict[str, Any]) -> Iterator[Finding]:
    """Fused parts beside eager, and compiled beside the compiled plain ones: forward and backward, and the whole step."""
    found, (tokens,) = contenders(sizes, device, with_compile), batches(sizes, 1, device)
    for name in list(found):
        try:
            found[name].run(tokens)
        except Exception as error:  # a compiler that is missing
            if name in ("eager", "wideload"):
                raise
            del found[name]
            yield not_run(f"times of {name}", error)
    for what, kind in (("forward + backward", "run"), ("step with AdamW", "step")):
        calls = {name: functools.partial(getattr(contender, kind), tokens) for name, contender in found.items()}
        samples = time_turns(calls, num_rounds, waiting(device))
        figures[what] = samples
        times = {name: statistics.median(of) for name, of in samples.items()}
        yield time_finding(what, "wideload", "eager", times)
        if {"compile", "wideload + compile"} <= times.keys():
            yield time_finding(what, "wideload + compile", "compile", times)


# ---- a model of transformers


LLAMA = {
    "vocab_size": 8192,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}
LLAMA_TOKENS = (4, 2048)


@contextlib.contextmanager
def liger_patched(model: Any) -> Iterator[None]:
    """Liger-Kernel's SwiGLU and RoPE in a Llama: what `wl.patch` swaps too. The model stays patched, its module's globals do not."""
    transformers: Any = importlib.import_module("liger_kernel.transformers")
    namespace = vars(importlib.import_module(type(model).__module__))
    before = dict(namespace)
    others = dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy", "rms_norm"), False)
    try:
        transformers.apply_liger_kernel_to_llama(rope=True, swiglu=True, model=model, **others)
        yield
    finally:
        namespace.update(before)


def time_llama(
    config: Mapping[str, int], shape: tuple[int, int], device: torch.device, num_rounds: int, figures: dict[str, Any]
) -> Iterator[Finding]:
    """A patched Llama beside itself: its gradients, and forward and backward. Patches are global, so that they take turns as a whole."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(SEED)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)).to(device, torch.bfloat16)
    tokens = torch.randint(config["vocab_size"], shape, generator=torch.Generator().manual_seed(SEED)).to(device)

    def run(of: Any) -> list[Tensor | None]:
        of.zero_grad(set_to_none=True)
        of(input_ids=tokens, labels=tokens).loss.backward()
        return [p.grad for p in of.parameters()]

    right = run(exact := copy.deepcopy(model).float())
    del exact
    eager = gradient_distance(run(model), right)
    samples: dict[str, list[float]] = {"eager": [], "wideload": [], "liger": []}

    def time_one(name: str) -> None:
        samples[name] += time_turns({name: lambda: run(model)}, num_rounds, waiting(device))[name]

    for turn in range(2):
        time_one("eager")
        with wl.patch(model) as patch:
            if not turn:
                print(patch, file=sys.stderr)
                yield gradient_finding("patched Llama", gradient_distance(run(model), right), eager)
            time_one("wideload")
    try:
        with liger_patched(model):
            yield dataclasses.replace(gradient_finding("Liger's Llama", gradient_distance(run(model), right), eager), is_kept=True)
            time_one("liger")
    except Exception as error:  # another library's, of any version
        yield not_run("Liger's Llama", error)
    figures["llama"] = samples
    times = {name: statistics.median(of) for name, of in samples.items() if of}
    for peer in times.keys() - {"wideload"}:
        yield time_finding(f"Llama beside {peer}", "wideload", peer, times)


def llama_rows(
    config: Mapping[str, int], shape: tuple[int, int], device: torch.device, num_rounds: int, figures: dict[str, Any]
) -> Iterator[Finding]:
    """As `time_llama`; where transformers is missing, that is said."""
    try:
        yield from time_llama(config, shape, device, num_rounds, figures)
    except ImportError as error:
        yield not_run("patched Llama", error)


# ---- the whole


def attempt(name: str, section: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The rows of a section; where it raises, a row that says so: the others are still worth their time on the GPU."""
    try:
        yield from section()
    except Exception as error:
        traceback.print_exc()
        yield Finding(name, f"FAILED: {type(error).__name__}: see the traceback", "", False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a row as soon as it is known; write all of them where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="of each training run")
    parser.add_argument("--rounds", type=int, default=10, help="in which each contender is timed once; the median counts")
    parser.add_argument("--no-compile", action="store_true", help="leave out torch.compile")
    parser.add_argument("--json", type=Path, help="where to write all rows, losses, samples and the environment")
    options = parser.parse_args(arguments)
    device = find_device()
    if device is None:
        return 2
    environment, with_compile = describe_environment(device), not options.no_compile
    print(name_environment(environment))
    rows: list[Finding] = []
    figures: dict[str, Any] = {}
    sections = {
        "losses": lambda: check_curves(CURVE, device, options.steps, with_compile, figures),
        "dropout": lambda: check_dropout(CURVE, device, options.steps, figures),
        "times": lambda: time_steps(TIMED, device, options.rounds, with_compile, figures),
        "llama": lambda: llama_rows(LLAMA, LLAMA_TOKENS, device, options.rounds, figures),
    }
    for name, section in sections.items():
        for row in attempt(name, section):
            rows.append(row)
            print(row, flush=True)
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
    if options.json:
        content = {
            "schema": 1,
            "environment": environment,
            "arguments": {"steps": options.steps, "rounds": options.rounds, "seed": SEED},
            "rows": [dataclasses.asdict(row) for row in rows],
            "figures": figures,
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return int(not all(row.is_kept for row in rows))


if __name__ == "__main__":
    sys.exit(main())
