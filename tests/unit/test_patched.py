"""Patched models beside themselves: what is swapped and what is left, values, gradients, undoing, copies, compilers, and look-alikes.

The models are small and have the structure of Llama, Phi-3 and GPT-2; where transformers is installed, its own are tried as well.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import math
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import wideload as wl
from wideload import patched as patching

f32, bf16 = torch.float32, torch.bfloat16

WIDTH, HIDDEN, HEADS = 16, 24, 2


# ---- models that know nothing of wideload


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


ORIGINAL = apply_rotary_pos_emb


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH // HEADS, bias=False)
        self.v_proj, self.o_proj = nn.Linear(WIDTH, WIDTH // HEADS, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        angles = torch.arange(x.shape[1])[:, None] * 0.5 ** torch.arange(WIDTH // HEADS // 2)
        tables = angles.repeat(1, 2)[None]
        q, k = apply_rotary_pos_emb(q, k, tables.cos().to(x.dtype), tables.sin().to(x.dtype))
        mixed = F.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q), is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, act: Any = None, layer: Callable[..., nn.Module] = nn.Linear) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = layer(WIDTH, HIDDEN), layer(WIDTH, HIDDEN), layer(HIDDEN, WIDTH)
        self.act_fn = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class PackedMLP(nn.Module):
    def __init__(self, act: Any = None) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.activation_fn = act or nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.activation_fn(gate))


class NewGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


class Conv1D(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(num_in, num_out) * 0.1), nn.Parameter(torch.randn(num_out) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class GPT2MLP(nn.Module):
    def __init__(self, p: float = 0.0, act: nn.Module | None = None) -> None:
        super().__init__()
        self.c_fc, self.c_proj, self.act, self.dropout = Conv1D(WIDTH, HIDDEN), Conv1D(HIDDEN, WIDTH), act or NewGELU(), nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, mlp: nn.Module, with_attention: bool = True) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), mlp
        self.attention = Attention() if with_attention else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, make: Callable[[], nn.Module], with_attention: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32, bias=False)
        self.layers = nn.ModuleList(Block(make(), with_attention) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _tanh_gelu() -> nn.Module:
    return nn.GELU(approximate="tanh")


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # and how many swaps
    "llama": (lambda: Model(MLP), 3),
    "llama, a function": (lambda: Model(lambda: MLP(F.silu)), 3),
    "gelu": (lambda: Model(lambda: MLP(nn.GELU())), 3),
    "gemma": (lambda: Model(lambda: MLP(_tanh_gelu())), 3),
    "gemma, composed": (lambda: Model(lambda: MLP(NewGELU())), 3),
    "reglu": (lambda: Model(lambda: MLP(nn.ReLU())), 3),
    "phi3": (lambda: Model(PackedMLP), 3),
    "phi3, gelu": (lambda: Model(lambda: PackedMLP(nn.GELU())), 3),
    "gpt2": (lambda: Model(lambda: GPT2MLP(0.0), False), 2),
    "gpt2, dropout": (lambda: Model(lambda: GPT2MLP(0.1), False), 4),
    "clip": (lambda: Model(lambda: GPT2MLP(act=QuickGELU()), False), 2),
}
TOKENS = torch.arange(14).view(2, 7) * 5 % 32


@pytest.fixture(autouse=True)
def rotary_is_restored() -> Iterator[None]:
    yield
    was = globals()["apply_rotary_pos_emb"]
    globals()["apply_rotary_pos_emb"] = ORIGINAL
    assert was is ORIGINAL, "a test left the rotary embedding fused"


def make_model(name: str, dtype: torch.dtype = f32) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().to(dtype).eval()


def outcome(model: nn.Module) -> tuple[Tensor, ...]:
    """Logits and the gradients of all parameters."""
    logits = model(TOKENS)
    return logits, *torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))


def assert_near(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], steps: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert a.shape == e.shape
        size = e.double().norm()
        assert (a.double() - e.double()).norm() <= steps * torch.finfo(e.dtype).eps * size + 1e-30


def swaps(patch: wl.Patch) -> list[Any]:
    return [change for change in patch.changes if change.is_swap]


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that a patch might touch."""
    return [(path, type(m), id(m), dict(vars(m)), id(type(m).forward)) for path, m in model.named_modules()]


# ---- the same model


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("dtype", "steps"), [(f32, 16.0), (bf16, 4.0)])
def test_a_patched_model_computes_the_same(name: str, dtype: torch.dtype, steps: float) -> None:
    model = make_model(name, dtype)
    expected = outcome(model)
    with wl.patch(model) as patch:
        assert len(swaps(patch)) == MODELS[name][1], str(patch)
        assert_near(outcome(model), expected, steps)


@pytest.mark.parametrize("name", ["llama", "gemma, composed", "phi3", "gpt2"])
def test_the_fused_calls_are_made(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    call = wl.FusedFunction.__call__

    def counted(self: wl.FusedFunction, *args: Any, **kwargs: Any) -> Any:
        called.append(self.__name__)
        return call(self, *args, **kwargs)

    model = make_model(name)
    with wl.patch(model):
        monkeypatch.setattr(wl.FusedFunction, "__call__", counted)
        model(TOKENS)
    expected = {
        "llama": ["full_rotary", "swiglu"] * 2,
        "gemma, composed": ["full_rotary", "geglu"] * 2,
        "phi3": ["full_rotary", "packed_swiglu"] * 2,
        "gpt2": ["gelu_tanh"] * 2,
    }
    assert called == expected[name]
    called.clear()
    model(TOKENS)
    assert called == []


@pytest.mark.parametrize("name", MODELS)
def test_undoing_leaves_no_trace(name: str) -> None:
    model = make_model(name)
    before, expected = snapshot(model), outcome(model)
    patch = wl.patch(model)
    assert snapshot(model) != before
    patch.undo()
    assert snapshot(model) == before
    assert globals()["apply_rotary_pos_emb"] is ORIGINAL
    assert all(torch.equal(a, b) for a, b in zip(outcome(model), expected, strict=True))
    patch.undo()  # once more does nothing


def test_patching_twice_changes_nothing_more() -> None:
    model = make_model("gpt2, dropout")
    llama = make_model("llama")
    for each in (model, llama):
        with wl.patch(each):
            before = snapshot(each)
            with wl.patch(each) as second:
                assert second.changes == []
                assert snapshot(each) == before
            assert snapshot(each) == before


def test_new_parts_of_a_patched_model_are_swapped() -> None:
    model = make_model("llama")
    with wl.patch(model):
        model.layers.append(Block(MLP()))
        with wl.patch(model) as second:
            assert [change.path for change in swaps(second)] == ["layers.2.mlp", f"{__name__}.apply_rotary_pos_emb"]
        assert type(model.layers[2].mlp) is MLP
        assert type(model.layers[0].mlp) is not MLP


def test_two_models_share_the_rotary_embedding() -> None:
    first, second = make_model("llama"), make_model("llama")
    one, two = wl.patch(first), wl.patch(second)
    one.undo()
    assert globals()["apply_rotary_pos_emb"] is not ORIGINAL
    two.undo()
    assert globals()["apply_rotary_pos_emb"] is ORIGINAL


def test_the_random_state_and_the_mode_stay() -> None:
    model = make_model("gpt2, dropout").train()
    state = torch.get_rng_state()
    with wl.patch(model):
        assert torch.equal(torch.get_rng_state(), state)
        assert all(module.training for module in model.modules())


def test_a_model_that_is_trained_learns_as_it_did() -> None:
    model = make_model("llama").train()
    other = copy.deepcopy(model)
    losses: list[float] = []
    for each, is_patched in ((model, True), (other, False)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.5)
        with wl.patch(each) if is_patched else torch.enable_grad():
            for _step in range(5):
                optimizer.zero_grad()
                loss = F.cross_entropy(each(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())
                loss.backward()
                optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert_near(tuple(model.parameters()), tuple(other.parameters()), 1000)


def test_a_swapped_dropout_drops_in_training_alone() -> None:
    model = make_model("gpt2, dropout")
    with wl.patch(model):
        assert torch.equal(model(TOKENS), model(TOKENS))
        model.train()
        assert not torch.equal(model(TOKENS), model(TOKENS))
        model.layers[0].mlp.dropout.p = 1.0
        assert torch.equal(model.layers[0].mlp(torch.randn(3, WIDTH)), torch.zeros(3, WIDTH))


# ---- what others see of a model


def test_parameters_and_state_stay() -> None:
    model = make_model("llama")
    parameters, state = dict(model.named_parameters()), model.state_dict()
    other = make_model("llama")
    torch.nn.init.ones_(other.head.weight)
    with wl.patch(model):
        assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in parameters.items()}
        assert list(model.state_dict()) == list(state)
        assert all(isinstance(layer.mlp, MLP) and type(layer.mlp).__name__ == "MLP" for layer in model.layers)
        model.load_state_dict(other.state_dict())
        other.load_state_dict(model.state_dict())
        assert_near(outcome(model), outcome(other), 16)
        model.to(bf16)
        assert model(TOKENS).dtype == bf16


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt2, dropout"])
@pytest.mark.parametrize("protocol", [None, 0, 2, 5])
def test_copies_and_pickles_are_patched_and_of_their_own(name: str, protocol: int | None) -> None:
    model = make_model(name)
    patch = wl.patch(model)
    # pickle finds the classes of this file by its name
    other = copy.deepcopy(model) if protocol is None else pickle.loads(pickle.dumps(model, protocol))
    assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
    assert torch.equal(other(TOKENS), model(TOKENS))
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert not torch.equal(other(TOKENS), model(TOKENS))
    patch.undo()
    assert [type(m) for m in other.modules()] != [type(m) for m in model.modules()]


def test_hooks_run_as_before() -> None:
    model = make_model("llama")
    seen: list[str] = []
    mlp = model.layers[0].mlp
    for name, part in (("mlp", mlp), ("gate", mlp.gate_proj), ("down", mlp.down_proj)):
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    with wl.patch(model) as patch:
        assert len(swaps(patch)) == 3
        model(TOKENS)
    assert seen == ["gate", "down", "mlp"]


class Wrapped(nn.Module):
    """As DistributedDataParallel and its like hold a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def test_a_wrapped_model_is_patched_within_and_a_patched_one_wrapped() -> None:
    model = make_model("llama")
    expected = outcome(model)
    with wl.patch(Wrapped(model)) as patch:
        assert [change.path for change in swaps(patch)][:2] == ["module.layers.0.mlp", "module.layers.1.mlp"]
        assert_near(outcome(Wrapped(model)), expected, 16)
    assert all(torch.equal(a, b) for a, b in zip(outcome(model), expected, strict=True))


def test_an_argument_may_be_given_by_its_name() -> None:
    mlp, x = PackedMLP(), torch.randn(3, WIDTH)
    expected = mlp(hidden_states=x)
    with wl.patch(mlp) as patch:
        assert patch.changes[0].path == ""
        torch.testing.assert_close(mlp(hidden_states=x), expected)


def test_a_patched_model_is_compiled_and_an_undone_one_anew() -> None:
    model = make_model("llama")
    expected = outcome(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_near((compiled(TOKENS),), expected[:1], 16)
    with wl.patch(model):
        patched = compiled(TOKENS)
        assert_near((patched,), expected[:1], 16)
        assert_near(outcome(compiled), expected, 16)
    assert torch.equal(compiled(TOKENS), expected[0])


# ---- tables, and nothing to do


def test_a_patch_is_a_table() -> None:
    with wl.patch(make_model("llama")) as patch:
        assert repr(patch) == "<wl.patch of Model: 3 swaps>"
        assert str(patch).splitlines() == [
            "Model: 3 swapped, 0 left as they were",
            f"  layers.*.mlp{' ' * (len(__name__) + 9)}  2 x  silu(gate) * up -> fused silu(gate) * up        1 kernel instead of 2",
            f"  {__name__}.apply_rotary_pos_emb  1 x  apply_rotary_pos_emb -> fused rotary embedding  "
            "q and k in one call, for every model of this Python module",
        ]
        path, was, now, _why = patch.changes[0]
        assert (path, was, now) == ("layers.0.mlp", "silu(gate) * up", "fused silu(gate) * up")


def test_an_unknown_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(4))
    before = snapshot(model)
    with wl.patch(model) as patch:
        assert patch.changes == []
        assert str(patch) == "Sequential: nothing to swap, nothing changed"
        assert snapshot(model) == before


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(wl.TraceError, match=r"wl\.patch got a function"):
        wl.patch(apply_rotary_pos_emb)  # type: ignore[arg-type]


@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU(), nn.GELU("tanh"), nn.ReLU(), nn.ReLU(inplace=True), nn.LeakyReLU()], ids=repr)
def test_one_kernel_is_left_as_it_is(activation: nn.Module) -> None:
    with wl.patch(nn.Sequential(activation)) as patch:
        assert [(change.is_swap, change.why) for change in patch.changes] == [
            (False, "one kernel already, which a fused one would only repeat")
        ]


# ---- look-alikes


class ScaledMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.0001


class InnerScaledMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * 1.00001)


class SwappedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class ResidualMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x)) + x


class ScaledInputMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * 2)


class TwiceMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.ndim == 1 else self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(self.gate_proj(x)))


class TrainingMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2 if self.training else super().forward(x)


class DroppedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.5, self.training))


class FloatMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.float() if h.dtype == bf16 else h)


class MoreMLP(MLP):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class ReadsWeightMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(F.linear(x, self.gate_proj.weight)) * self.up_proj(x))


class GainedMLP(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x) * self.gain)


class Swish(nn.Module):
    """``x * sigmoid(beta * x)``."""

    def __init__(self, beta: float = 1.0, is_learnt: bool = False) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.tensor(beta)) if is_learnt else beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


def clamped_silu(x: Tensor) -> Tensor:
    return F.silu(x).clamp(max=1000.0)


def thresholded_silu(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1e-3, 0.0, F.silu(x))


def _hooked() -> nn.Module:
    act = nn.SiLU()
    act.register_forward_hook(lambda module, args, result: result * 2)
    return MLP(act)


def _replaced() -> nn.Module:
    mlp = MLP()
    mlp.forward = functools.partial(MLP.forward, mlp)  # type: ignore[method-assign]
    return mlp


LOOKALIKES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "scaled": (ScaledMLP, "it does more than"),
    "scaled inside": (InnerScaledMLP, "it computes none of"),
    "gate and up swapped": (SwappedMLP, "it computes none of"),
    "residual": (ResidualMLP, "it does more than"),
    "scaled input": (ScaledInputMLP, "its input is changed"),
    "up of the gate": (TwiceMLP, "it does more than"),
    "other in training": (TrainingMLP, "it does more than"),
    "dropout": (DroppedMLP, "it computes none of"),
    "other in bf16": (FloatMLP, "it computes none of"),
    "another argument": (MoreMLP, "its forward takes more than one argument"),
    "reads a weight": (ReadsWeightMLP, "trying it raised AttributeError"),
    "a parameter": (GainedMLP, "it has parameters or buffers"),
    "swish": (lambda: MLP(Swish(1.0001)), "it computes none of"),
    "learnt swish": (lambda: MLP(Swish(is_learnt=True)), "it has parameters or buffers"),
    "clamped": (lambda: MLP(clamped_silu), "it computes none of"),
    "thresholded": (lambda: MLP(thresholded_silu), "it computes none of"),
    "leaky": (lambda: MLP(nn.LeakyReLU(1e-6)), "it computes none of"),
    "packed, nearly": (lambda: PackedMLP(lambda x: F.silu(x) * 1.0000001), "it computes none of"),
    "hooked activation": (_hooked, "its activation has hooks"),
    "replaced forward": (_replaced, "its forward has been replaced"),
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_a_lookalike_is_left_alone(name: str) -> None:
    make, why = LOOKALIKES[name]
    model = nn.ModuleDict({"mlp": make()})
    before = snapshot(model)
    with wl.patch(model) as patch:
        (change,) = [change for change in patch.changes if change.path == "mlp"]
        assert change.was == change.now == type(model["mlp"]).__name__
        assert change.why.startswith(why)
        assert type(model["mlp"]) is before[1][1]
    assert snapshot(model) == before


class Quantised(nn.Module):
    """A linear layer whose weight is int8 and no parameter."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(num_out, 1) / 127)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, (self.weight * self.scale).to(x.dtype))


class Adapted(nn.Linear):
    """A linear layer with an adapter."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(num_in, num_out)
        self.down, self.up = nn.Linear(num_in, 2), nn.Linear(2, num_out)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


class InheritingMLP(MLP):
    """Another name, the same forward."""


@pytest.mark.parametrize("make", [lambda: MLP(layer=Quantised), lambda: MLP(layer=Adapted), InheritingMLP, lambda: MLP(Swish(1.0))])
def test_other_layers_and_equal_functions_are_swapped(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    mlp, x = make(), torch.randn(4, WIDTH)
    expected = mlp(x)
    with wl.patch(mlp) as patch:
        assert [change.now for change in patch.changes] == ["fused silu(gate) * up"]
        torch.testing.assert_close(mlp(x), expected)


class CubicGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.0447 * torch.pow(x, 3.0))))


class CountedGELU(NewGELU):
    """What it is tried for leaves no mark on it."""

    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


class HalfClampedMLP(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(h.clamp(-1e-3, 1e-3) if h.dtype == torch.float16 else h)


def test_a_dtype_that_the_module_does_not_have_yet_is_tried() -> None:
    assert not any(change.is_swap for change in wl.patch(nn.Sequential(HalfClampedMLP())).changes)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_scripted_module_is_left_alone_and_the_others_are_not() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(WIDTH, WIDTH)), MLP())
    assert [change.path for change in wl.patch(model).changes if change.is_swap] == ["1"]


def test_activations_with_other_constants_are_left_alone() -> None:
    with wl.patch(nn.Sequential(CubicGELU(), Swish(), QuickGELU())) as patch:
        assert [change.is_swap for change in patch.changes] == [False, True, True]
        assert patch.changes[0].why == "it computes none of gelu, gelu_tanh, silu, quick_gelu"
        assert patch.changes[2].why == "1 kernel instead of 3"


class CountedMLP(MLP):
    num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x)


def test_trying_a_module_leaves_it_alone() -> None:
    model = nn.Sequential(CountedGELU(), CountedMLP(CountedGELU()), ScaledMLP(CountedGELU()))
    before = snapshot(model)
    wl.patch(model).undo()
    assert snapshot(model) == before


def test_trying_a_module_that_draws_leaves_the_random_state() -> None:
    model, state = DroppedMLP(), torch.get_rng_state()
    wl.patch(model).undo()
    assert torch.equal(torch.get_rng_state(), state)


class OtherDropout(nn.Dropout):
    pass


def test_other_dropouts_are_left_alone() -> None:
    with wl.patch(nn.Sequential(nn.Dropout(0.1, inplace=True), OtherDropout(0.1), nn.Dropout2d(0.1), nn.Dropout(0.1))) as patch:
        assert [(change.path, change.is_swap) for change in patch.changes] == [("0", False), ("1", False), ("3", True)]


# ---- rotary embeddings


def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s for x in (q, k))


def backwards(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    return ORIGINAL(q, k, cos, -sin, unsqueeze_dim=unsqueeze_dim)


def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    q, k = ORIGINAL(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return q * 1.000001, k


def other_signature(q: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Tensor:
    return ORIGINAL(q, q, cos, sin, unsqueeze_dim=unsqueeze_dim)[0]


def renamed(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    return ORIGINAL(query, key, cos, sin, unsqueeze_dim=unsqueeze_dim)


def sections(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, mrope_section: Any, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    return ORIGINAL(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)


def kept_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    turned = ORIGINAL(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)
    return turned[0].to(q.dtype), turned[1].to(k.dtype)


def partial(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
    width = cos.shape[-1]
    turned = ORIGINAL(q[..., :width], k[..., :width], cos, sin, unsqueeze_dim=unsqueeze_dim)
    return tuple(torch.cat((t, x[..., width:]), -1) for t, x in zip(turned, (q, k), strict=True))


def patched_rotary(function: Callable[..., Any]) -> tuple[wl.Patch, Callable[..., Any]]:
    globals()["apply_rotary_pos_emb"] = function
    patch = wl.patch(Attention())
    now = globals()["apply_rotary_pos_emb"]
    patch.undo()
    assert globals()["apply_rotary_pos_emb"] is function
    globals()["apply_rotary_pos_emb"] = ORIGINAL
    return patch, now


@pytest.mark.parametrize("function", [interleaved, backwards, scaled, other_signature, renamed, sections])
def test_other_rotary_embeddings_are_left_alone(function: Callable[..., Any]) -> None:
    patch, now = patched_rotary(function)
    assert now is function
    assert [change.is_swap for change in patch.changes] == [False]


@pytest.mark.parametrize("function", [ORIGINAL, kept_dtype, partial])
@pytest.mark.parametrize("q_dtype", [f32, bf16])
@pytest.mark.parametrize("table_dtype", [f32, bf16])
@pytest.mark.parametrize("width", [8, 4])
@pytest.mark.parametrize("given", [{}, {"unsqueeze_dim": 2}])
def test_a_fused_rotary_embedding_is_the_original_for_whatever_it_is_given(
    function: Callable[..., Any], q_dtype: torch.dtype, table_dtype: torch.dtype, width: int, given: dict[str, int]
) -> None:
    _patch, now = patched_rotary(function)
    assert now is not function
    heads = 2 if "unsqueeze_dim" in given else 1
    q = torch.randn(2, 5, 5, 8).narrow(3 - heads, 0, 4).to(q_dtype)
    k = torch.randn(2, 5, 5, 8).narrow(3 - heads, 0, 4).to(q_dtype)
    q, k = (x.narrow(heads, 0, num) for x, num in ((q, 4), (k, 2)))
    cos, sin = torch.randn(2, 2, 4, width).to(table_dtype)
    if width == 4 and function is not partial:
        with pytest.raises(RuntimeError, match="must match"):  # the original's own
            now(q, k, cos, sin, **given)
        return
    for a, e in zip(now(q, k, cos, sin, **given), function(q, k, cos, sin, **given), strict=True):
        assert a.dtype == e.dtype
        assert_near((a,), (e,), 4)


def test_what_was_not_tried_goes_to_the_original() -> None:
    calls: list[Any] = []

    def recording(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Any = None, unsqueeze_dim: int = 1) -> tuple[Tensor, ...]:
        calls.append(position_ids)
        return ORIGINAL(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    _patch, now = patched_rotary(recording)
    q, table = torch.randn(1, 2, 3, 4), torch.randn(1, 3, 4)
    calls.clear()
    now(q, q, table, table)
    now(q, q, table, table, None, 1)
    assert calls == []
    now(q, q, table, table, "ids")
    now(q, q, table, table, position_ids="ids")
    assert calls == ["ids", "ids"]
    with pytest.raises(TypeError, match="nothing"):
        now(q, q, table, table, nothing=1)


# ---- faults


def test_a_failure_midway_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama")
    before = snapshot(model)

    def fails(self: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(patching._RotarySwap, "apply", fails)
    with pytest.raises(RuntimeError, match="planted"):
        wl.patch(model)
    assert snapshot(model) == before


def test_what_another_hand_changed_is_said_and_the_rest_undone() -> None:
    model = make_model("llama")
    patch = wl.patch(model)
    model.layers[0].mlp.__class__ = ScaledMLP
    with pytest.raises(wl.WideloadError, match="1 of the swaps in Model could not be undone"):
        patch.undo()
    assert type(model.layers[0].mlp) is ScaledMLP
    assert type(model.layers[1].mlp) is MLP


def test_a_fused_function_that_is_wrong_is_not_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {
        shown: patching._Form(form.shown, form.formula, lambda *given, op=form.op: op(*given) * 1.00001, form.inputs)
        for shown, form in patching._GATED_FORMS.items()
    }
    monkeypatch.setattr(patching, "_GATED_FORMS", wrong)
    with wl.patch(nn.Sequential(MLP(), PackedMLP())) as patch:
        assert [change.path for change in swaps(patch)] == []


# ---- transformers' own, where it is installed


def _transformers_models() -> dict[str, tuple[str, str, dict[str, Any], int]]:
    if importlib.util.find_spec("transformers") is None:
        return {}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "Llama": ("LlamaForCausalLM", "LlamaConfig", sizes, 3),
        "Qwen2": ("Qwen2ForCausalLM", "Qwen2Config", sizes, 3),
        "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", sizes, 3),
        "Gemma": ("GemmaForCausalLM", "GemmaConfig", {**sizes, "head_dim": 8}, 3),
        "Phi3": ("Phi3ForCausalLM", "Phi3Config", sizes, 3),
        "GPT-2": ("GPT2LMHeadModel", "GPT2Config", gpt2, 9),
    }


TRANSFORMERS = _transformers_models()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRANSFORMERS or [pytest.param("none", marks=pytest.mark.skip(reason="transformers is not installed"))])
@pytest.mark.parametrize(("dtype", "steps"), [(f32, 32.0), (bf16, 4.0)])
def test_models_of_transformers(name: str, dtype: torch.dtype, steps: float) -> None:
    transformers = importlib.import_module("transformers")
    model_name, config_name, sizes, num_swaps = TRANSFORMERS[name]
    torch.manual_seed(0)
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**sizes)).to(dtype).eval()

    def results() -> tuple[Tensor, ...]:
        logits = model(TOKENS).logits
        return logits, *torch.autograd.grad(logits.float().square().mean(), list(model.parameters()))

    before = results()
    with wl.patch(model) as patch:
        assert len(swaps(patch)) == num_swaps
        patched = results()
        assert torch.equal(copy.deepcopy(model)(TOKENS).logits, patched[0])
    assert_near(patched, before, steps)
    assert all(torch.equal(a, b) for a, b in zip(results(), before, strict=True))
