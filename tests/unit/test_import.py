"""What ``import wideload`` brings into a process: its own stages, and nothing that is heavy or needed later alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import wideload as wl

LATER = ("wideload.cli", "wideload.demo", "wideload.doctor", "wideload.measure", "wideload.analyze", "typer", "rich", "cuda", "matplotlib")
LATER += (
    "pynvml",
    "triton",
    "email",
    "importlib.metadata",
    "concurrent.futures",
    "subprocess",
    "sqlite3",
    "torch._dynamo",
    "torch._inductor",
)
LATER += tuple(
    f"wideload.{stage}"
    for stage in (
        *("build", "callables", "derivatives", "foreach", "grad", "lists", "manifest", "nn", "ops", "optim", "patched", "prototype"),
        *("raw_kernel", "report", "sass", "sharding", "torch_op", "tune", "warmed"),
    )
)
"""The CLI and the measuring half, CUDA's Python, what is slow to import, and the stages that the call of a function of one's own does
without; torch itself may bring some of the others."""

KEPT = ("wideload", "wideload.fused", "wideload.execute", "wideload.cache")
"""The import brings what every first call needs: that would be no faster for an import that leaves it to the call."""


def modules_after(statement: str) -> set[str]:
    program = f"import json, sys, torch\nbefore = set(sys.modules)\n{statement}\nprint(json.dumps(sorted(set(sys.modules) - before)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.fixture(scope="module")
def added() -> set[str]:
    return modules_after("import wideload")


@pytest.mark.parametrize("name", LATER)
def test_is_not_imported(name: str, added: set[str]) -> None:
    assert not [module for module in added if module == name or module.startswith(f"{name}.")]


@pytest.mark.parametrize("name", KEPT)
def test_is_imported(name: str, added: set[str]) -> None:
    assert name in added


def test_nothing_comes_from_other_packages(added: set[str]) -> None:
    others = {module.partition(".")[0] for module in added if not module.startswith("_sysconfigdata")} - {"wideload"}  # sysconfig's own
    assert others <= sys.stdlib_module_names | {"torch", "numpy"}


def test_the_measuring_half_is_imported_when_it_is_used() -> None:
    names = ("bench", "compare", "roofline")  # which are names of modules as well
    imports = "import wideload.measure.roofline, wideload.measure.compare; from wideload import bench, compare, roofline"
    checks = f"assert all(callable(getattr(wideload, name)) for name in {names}) and all(map(callable, (bench, compare, roofline)))"
    assert "wideload.measure.bench" in modules_after(f"{imports}; {checks}")


def test_a_function_and_a_module_of_one_name_are_not_mistaken() -> None:
    """Whatever is imported first: the import of a module puts it in the place of a name of its package."""
    imports = "import wideload.patched, wideload.warmed, wideload.raw_kernel, wideload.callables"
    checks = "assert all(callable(getattr(wideload, name)) for name in ('patch', 'warmup', 'raw', 'explain'))"
    assert "wideload.ops" in modules_after(f"{imports}; {checks}; wideload.ops.swiglu")


def test_the_first_call_imports_nothing_but_what_plans_tell() -> None:
    """On the CPU and to plan a kernel: of the package, only what spells the call for a build."""
    call = "import wideload as wl; f = wl.fuse(lambda x: x + 1); before.update(sys.modules); f(torch.ones(2)); "
    call += "f.plan(torch.empty(64, device='meta'), target='h200').source"
    assert {name for name in modules_after(call) if name.startswith("wideload")} == {"wideload.build", "wideload.manifest"}


def test_every_public_name_is_there_and_no_other() -> None:
    assert [name for name in wl.__all__ if not hasattr(wl, name) or name not in dir(wl)] == []
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        wl.nothing  # noqa: B018


def test_planning_imports_no_cuda_either() -> None:
    statement = "import wideload as wl; wl.ops.swiglu.plan(*[torch.empty(64, 64, device='meta')] * 2, target='h200').source"
    assert not [module for module in modules_after(statement) if module.partition(".")[0] in ("cuda", "typer", "rich")]
