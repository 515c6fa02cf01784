"""The benchmark of training without its GPU: models of tiny sizes train on the CPU, and what is wrong with them is seen."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import training
import wideload as wl
from table import Finding
from training import CURVE, FUSED, PLAIN, Sizes
from wideload.errors import DeviceError

CPU = torch.device("cpu")
TINY = Sizes(vocabulary=32, layers=1, dim=16, heads=2, hidden=24, batch=4, sequence=12)
STEPS = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations of a few elements are slower on several threads, by much where other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def kept(rows: Any) -> dict[str, bool]:
    return {row.what: row.is_kept for row in rows}


# ---- the model


def test_fused_and_plain_models_have_the_same_weights_and_losses() -> None:
    fused, plain = (training.make_model(parts, TINY, CPU, torch.float32) for parts in (FUSED, PLAIN))
    assert all(torch.equal(a, b) for a, b in zip(fused.parameters(), plain.parameters(), strict=True))
    half = training.make_model(PLAIN, TINY, CPU)
    assert all(torch.equal(a.float(), b) for a, b in zip(half.parameters(), plain.parameters(), strict=True))
    assert half.cos.dtype == torch.float32
    (tokens,) = training.batches(TINY, 1, CPU)
    torch.testing.assert_close(fused(tokens), plain(tokens), rtol=1e-5, atol=0.0)
    assert fused(tokens).item() != plain.train()(tokens + 1 - 2 * (tokens == 31)).item()  # other tokens, another loss


def test_the_next_token_follows_from_the_last() -> None:
    first, second = training.batches(TINY, 2, CPU)
    assert first.shape == (TINY.batch, TINY.sequence + 1)
    assert torch.equal(first[:, 1:], (5 * first[:, :-1] + 3) % TINY.vocabulary)
    assert not torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip((first, second), training.batches(TINY, 2, CPU), strict=True))


# ---- what is checked


def test_tiny_models_train_alike() -> None:
    figures: dict[str, Any] = {}
    rows = kept(training.check_curves(TINY, CPU, STEPS, False, figures))
    assert rows == {"wideload: gradients, from fp32's": True, f"wideload: losses of {STEPS} steps": True}
    assert {name: len(losses) for name, losses in figures["losses"].items()} == dict.fromkeys(("eager, fp32", "eager", "wideload"), STEPS)
    assert figures["losses"]["eager"] != figures["losses"]["eager, fp32"]


FAULTS: dict[str, dict[str, Callable[..., Tensor]]] = {
    "gate": {"swiglu": lambda gate, up: F.gelu(gate) * up},
    "halves": {"swiglu": lambda gate, up: F.silu(up) * gate},
    "rope": {"rope": lambda x, cos, sin: wl.ops.rope(x, cos, sin, inverse=True) * 1.02},
    "no residual": {"dropped_sum": lambda x, residual, p: x},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_part_shows_in_the_gradients(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "FUSED", dataclasses.replace(FUSED, **FAULTS[fault]))
    assert not kept(training.check_curves(TINY, CPU, 2, False, {}))["wideload: gradients, from fp32's"]


def test_a_wrong_optimizer_shows_in_the_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    adamw = wl.optim.AdamW
    monkeypatch.setattr(wl.optim, "AdamW", lambda params, lr, fused: adamw(params, lr=2 * lr, fused=fused))
    rows = kept(training.check_curves(TINY, CPU, STEPS, False, {}))
    assert rows == {"wideload: gradients, from fp32's": True, f"wideload: losses of {STEPS} steps": False}


def test_dropout_is_held_to_the_mean_of_its_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: dict[str, Any] = {}
    (row,) = training.check_dropout(TINY, CPU, STEPS, figures)
    assert row.is_kept
    assert len(set(figures["dropout"]["wideload"])) == training.DRAWS
    unscaled = dataclasses.replace(FUSED, dropped_sum=lambda x, residual, p: F.dropout(x + residual, 0.9))
    monkeypatch.setattr(training, "FUSED", unscaled)
    (row,) = training.check_dropout(TINY, CPU, STEPS, {})
    assert not row.is_kept


def test_curves_are_held_to_eager_s_distance_from_fp32() -> None:
    eager, exact = [3.0, 2.0, 1.0], [3.0, 2.01, 1.0]
    assert training.curve_finding("f", [3.0, 2.0, 1.029], eager, exact).is_kept
    assert not training.curve_finding("f", [3.0, 2.0, 1.031], eager, exact).is_kept
    assert not training.curve_finding("f", [3.0, 2.0, float("nan")], eager, exact).is_kept
    assert not training.curve_finding("f", [1.0, 1.01, 1.0], [1.0, 1.0, 1.0], [1.0, 1.01, 1.0]).is_kept  # it learns nothing
    assert not training.curve_finding("f", [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]).is_kept


def test_means_of_drawn_losses_are_held_to_their_spread() -> None:
    """Of 1 and 3 the mean is 2, its standard error 1: six of the difference's are 8.49."""
    assert training.drawn_finding([1.0, 3.0], [9.4, 11.4]).is_kept
    assert not training.drawn_finding([1.0, 3.0], [9.6, 11.6]).is_kept


def test_distances_between_gradients() -> None:
    assert training.gradient_distance([torch.tensor([3.0, 4.0]), None], [torch.tensor([0.0, 4.0]), None]) == 0.75
    assert training.gradient_finding("f", 0.011, 0.01).is_kept
    assert not training.gradient_finding("f", 0.0111, 0.01).is_kept
    assert not training.gradient_finding("f", float("nan"), 0.01).is_kept


# ---- what is timed


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], list[str]()

    def work(name: str, seconds: float) -> Callable[[], None]:
        def call() -> None:
            order.append(name)
            clock[0] += seconds

        return call

    def wait() -> None:
        order.append("wait")

    monkeypatch.setattr(training, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    samples = training.time_turns({"a": work("a", 0.5), "b": work("b", 0.25)}, 2, wait)
    assert samples == {"a": [500.0, 500.0], "b": [250.0, 250.0]}
    assert order == ["a", "a", "b", "b", *["wait", "a", "wait", "wait", "b", "wait"] * 2]
    times = {"a": 101.0, "b": 100.0}
    assert training.time_finding("step", "a", "b", times).is_kept
    assert not training.time_finding("step", "a", "b", {**times, "a": 101.1}).is_kept


def test_a_compiler_that_is_missing_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(model: object, dynamic: bool) -> Callable[..., Tensor]:
        def call(tokens: Tensor) -> Tensor:
            raise RuntimeError("no Triton\nand more")

        return call

    monkeypatch.setattr(torch, "compile", compile)
    rows = [*training.check_curves(TINY, CPU, 2, True, {}), *training.time_steps(TINY, CPU, 1, True, {})]
    missing = {row.what for row in rows if row.found == "not run: RuntimeError: no Triton"}
    assert missing == {"compile", "wideload + compile", "times of compile", "times of wideload + compile"}
    assert all(row.is_kept for row in rows if row.what in missing)
    monkeypatch.setattr(training, "FUSED", dataclasses.replace(FUSED, swiglu=broken))
    with pytest.raises(RuntimeError, match="broken"):
        list(training.time_steps(TINY, CPU, 1, True, {}))


def broken(*args: Tensor) -> Tensor:
    raise RuntimeError("broken")


def test_compiled_models_are_timed_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
    figures: dict[str, Any] = {}
    rows = kept(training.time_steps(TINY, CPU, 2, True, figures))
    assert list(rows) == [f"{what}: {name}" for what in figures for name in ("wideload", "wideload + compile")]
    assert list(figures) == ["forward + backward", "step with AdamW"]
    assert all({name: len(of) for name, of in samples.items()} == dict.fromkeys(samples, 2) for samples in figures.values())
    assert set(figures["step with AdamW"]) == {"eager", "wideload", "compile", "wideload + compile"}


# ---- a model of another library, and another library's patch


class FakeMLP(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (nn.Linear(dim, dim) for _ in range(3))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return result


class FakeLlama(nn.Module):
    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        self.embedding, self.mlp = nn.Embedding(config.vocab_size, config.hidden_size), FakeMLP(config.hidden_size)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=self.mlp(self.embedding(input_ids)).float().square().mean())


rotary = "a global function of the model's module"


def llama_rows(figures: dict[str, Any]) -> list[Finding]:
    return list(training.llama_rows({"vocab_size": 16, "hidden_size": 64}, (2, 8), CPU, 2, figures))


def test_a_patched_model_is_timed_beside_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (row,) = llama_rows({})
    assert row.is_kept
    assert row.found.startswith("not run: ModuleNotFoundError: ")

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(LlamaForCausalLM=FakeLlama, LlamaConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    figures: dict[str, Any] = {}
    patched, liger, timed = llama_rows(figures)
    assert patched.is_kept
    assert (liger.what, liger.is_kept, liger.found[:8]) == ("Liger's Llama", True, "not run:")
    assert timed.what == "Llama beside eager: wideload"
    assert {name: len(of) for name, of in figures["llama"].items()} == {"eager": 4, "wideload": 4, "liger": 0}


def test_liger_s_patch_is_timed_and_its_globals_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def apply_liger_kernel_to_llama(**options: Any) -> None:
        seen.append(options)
        monkeypatch.setitem(globals(), "rotary", "Liger's")

    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(LlamaForCausalLM=FakeLlama, LlamaConfig=SimpleNamespace))
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    fake = SimpleNamespace(apply_liger_kernel_to_llama=apply_liger_kernel_to_llama)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or SimpleNamespace(**globals()))
    figures: dict[str, Any] = {}
    rows = kept(llama_rows(figures))
    assert set(rows) == {
        "patched Llama: gradients, from fp32's",
        "Liger's Llama: gradients, from fp32's",
        "Llama beside eager: wideload",
        "Llama beside liger: wideload",
    }
    assert len(figures["llama"]["liger"]) == 2
    (options,) = seen
    assert isinstance(options.pop("model"), FakeLlama)
    assert options == {"rope": True, "swiglu": True, "cross_entropy": False, "fused_linear_cross_entropy": False, "rms_norm": False}
    assert rotary == "a global function of the model's module"


# ---- a whole run


def test_a_run_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"CURVE": TINY, "TIMED": TINY, "find_device": lambda: CPU}.items():
        monkeypatch.setattr(training, name, value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    path = tmp_path / "training.json"
    status = training.main(["--steps", "10", "--rounds", "1", "--no-compile", "--json", str(path)])
    written = json.loads(path.read_text())
    assert len(written["rows"]) == 2 + 1 + 2 + 1
    assert written["arguments"] == {"steps": 10, "rounds": 1, "seed": 0}
    assert set(written["figures"]) == {"losses", "dropout", "forward + backward", "step with AdamW"}
    assert written["environment"]["torch"] == torch.__version__
    assert status == int(not all(row["is_kept"] for row in written["rows"]))
    assert len(capsys.readouterr().out.splitlines()) == 1 + 6


def test_a_section_that_fails_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    good = Finding("f", "1", "1", True)

    def section() -> Any:
        yield good
        raise RuntimeError("out of memory")

    first, second = training.attempt("times", section)
    assert first is good
    assert (second.what, second.found, second.is_kept) == ("times", "FAILED: RuntimeError: see the traceback", False)
    assert "out of memory" in capsys.readouterr().err


def test_without_a_gpu_the_status_is_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def cuda_index() -> int:
        raise DeviceError("no GPU")

    monkeypatch.setattr("table.cuda_index", cuda_index)
    assert training.main([]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert CURVE.sequence >= 128  # losses are means of many tokens
