"""Turns the command line into calls of the library, and their results into tables or JSON.

One function a command; it computes nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from typer.core import TyperGroup

import wideload
from wideload import demo as demos
from wideload import doctor as doctors
from wideload import store
from wideload.cache import read_stored
from wideload.errors import DeviceError, WideloadError
from wideload.nvrtc import nvrtc_version

__all__ = ["app"]

_out = Console(highlight=False)
_err = Console(stderr=True, highlight=False)
"""Progress and errors, so that standard output holds results alone."""

_US_PER_S = 1e6
_BYTES_PER_GB = 1e9
_EXPECTED_LABELS = ("UNCHECKED", "HOLDS_TENSORS")
"""What the demo does on purpose: it compares results itself, and the copy has buffers of its own."""


class _Commands(TyperGroup):
    """Every command reports a ``WideloadError`` as one message and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WideloadError as error:
            _err.print(f"{type(error).__name__}: {error}", style="red", markup=False)
            raise typer.Exit(1) from None


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        _out.print(f"wideload {wideload.__version__}")
        raise typer.Exit


@app.callback()
def _wideload(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Write an elementwise function in plain PyTorch; get one CUDA kernel at the memory wall."""


@app.command()
def demo(
    tokens: Annotated[
        int | None, typer.Option(min=1, help=f"Rows of the tensors: {demos.FULL_TOKENS} on a GPU, {demos.CPU_TOKENS} on a CPU if left out.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to compute, such as cuda:1 or cpu: the GPU, if there is one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of tables.")] = False,
) -> None:
    """Fuse two functions of Llama 3 8B, check them and show their kernels.

    A SwiGLU and a bias + GELU in bf16, each compared with torch and with the exact result. On a GPU, they are then timed. Without one,
    they are compiled for four architectures, and each known GPU's least time is computed.
    Exits with 1 if a result is more than one step of bf16 off, or a kernel spills registers.
    """
    where = _find_device(device)
    is_gpu = where.type == "cuda"
    tokens = tokens or (demos.FULL_TOKENS if is_gpu else demos.CPU_TOKENS)
    archs = ["sm_{}{}".format(*torch.cuda.get_device_capability(where))] if is_gpu else demos.ARCHS

    with _progress() as progress:
        rows = progress.add_task("comparing with torch", total=tokens * len(demos.CASES))
        checks = tuple(demos.check_case(case, tokens, where, lambda num_rows: progress.advance(rows, num_rows)) for case in demos.CASES)
        to_compile = [(case, arch) for case in demos.CASES for arch in archs]
        kernels = tuple(demos.compile_case(case, arch) for case, arch in progress.track(to_compile, description="compiling"))
    timings = tuple(demos.time_case(case, tokens, where) for case in demos.CASES) if is_gpu else ()  # with progress of its own
    bounds = () if is_gpu else tuple(demos.bound_case(case, demos.FULL_TOKENS) for case in demos.CASES)
    report = demos.Report(tokens, _device_name(where), checks, kernels, timings, bounds)
    if as_json:
        _out.print_json(json.dumps({**_versions(), **report.to_dict()}))
    else:
        _print_report(report)
    raise typer.Exit(1 if report.faults else 0)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False) -> None:
    """Say what is there, what is missing, and the one command that gets it.

    Compiles a kernel and runs one on each GPU. Exits with 1 unless kernels can be compiled and, where there is a GPU, run.
    """
    diagnosis = doctors.diagnose()
    if as_json:
        _out.print_json(json.dumps({**asdict(diagnosis), "is_healthy": diagnosis.is_healthy}))
    else:
        _print_diagnosis(diagnosis)
    raise typer.Exit(0 if diagnosis.is_healthy else 1)


_cache = typer.Typer(no_args_is_help=True, help="Compiled kernels on the disk: list or remove them.")
app.add_typer(_cache, name="cache")


@_cache.command("ls")
def cache_ls(as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False) -> None:
    """List the kernels kept on the disk, the one used last first."""
    folder = store.inspect_folder()
    rows = [(entry, read_stored(entry)) for entry in folder.entries]
    if as_json:
        kernels = [
            {**(asdict(stored) if stored else {}), "path": str(entry.path), "nbytes": entry.nbytes, "used_at": entry.used_at}
            for entry, stored in rows
        ]
        where = str(folder.path) if folder.path else None
        _out.print_json(json.dumps({"folder": where, "fault": folder.fault, "nbytes": folder.nbytes, "kernels": kernels}))
        return
    if folder.fault:
        _out.print(f"{folder.path}: {folder.fault}", style="yellow", markup=False)
        return
    table = _table(("kernel", "arch", "registers", "kB", "used"), 2)
    for entry, stored in rows:
        names = (stored.name, stored.arch, str(stored.registers)) if stored else ("damaged", "", "")
        table.add_row(*names, f"{entry.nbytes / 1e3:.1f}", f"{datetime.fromtimestamp(entry.used_at):%Y-%m-%d %H:%M}")
    _print(f"{folder.path}: {len(rows)} kernels, {folder.nbytes / 1e6:.1f} MB", table)


@_cache.command("clear")
def cache_clear(as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a line.")] = False) -> None:
    """Remove the kernels kept on the disk; they are compiled again when they are next wanted."""
    try:
        removed = store.clear_entries()
    except OSError as error:
        _err.print(f"{type(error).__name__}: {error}", style="red", markup=False)
        raise typer.Exit(1) from None
    nbytes = sum(entry.nbytes for entry in removed)
    if as_json:
        _out.print_json(json.dumps({"folder": str(store.cache_folder()), "removed": len(removed), "nbytes": nbytes}))
    else:
        _out.print(f"removed {len(removed)} kernels, {nbytes / 1e6:.1f} MB, from {store.cache_folder()}", markup=False)


def _find_device(name: str | None) -> torch.device:
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise DeviceError(f"--device {name}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise DeviceError(f"--device {name}; allowed: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise DeviceError(f"--device {name}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _versions() -> dict[str, str]:
    return {"wideload": wideload.__version__, "torch": torch.__version__.partition("+")[0], "NVRTC": "{}.{}".format(*nvrtc_version())}


@contextmanager
def _progress() -> Iterator[Progress]:
    columns = TextColumn("{task.description:<20}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=_err, transient=True) as progress:
        yield progress


# ---- tables


def _table(columns: Iterable[str], num_text_columns: int) -> Table:
    """A table without a frame: the first columns hold text, the others numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for position, name in enumerate(columns):
        table.add_column(name, justify="left" if position < num_text_columns else "right", header_style="dim", no_wrap=True)
    return table


def _print(title: str, table: Table) -> None:
    _out.print(f"\n{title}", style="bold", markup=False)
    _out.print(table)


def _print_diagnosis(diagnosis: doctors.Diagnosis) -> None:
    colours = {"ok": "green", "missing": "yellow", "problem": "red"}
    for check in diagnosis.checks:
        line = f"[{colours[check.state]}]{check.state:<8}[/] {check.name:<14}"
        _out.print(f"{line} {escape(check.found)}", soft_wrap=True)
        for text, style in ((check.follows, "dim"), (check.command, "bold")):
            if text:
                _out.print(f"{'':24}{text}", style=style, markup=False, soft_wrap=True)
    launch = "run" if diagnosis.can_launch else "not be run" if diagnosis.has_gpu else "be compiled, and there is no GPU to run them on"
    verdict = f"Kernels can {launch}." if diagnosis.can_compile else "Kernels cannot be compiled."
    _out.print(f"\n{verdict}", style="green" if diagnosis.is_healthy else "red")


def _print_report(report: demos.Report) -> None:
    _out.print(" · ".join((*(f"{name} {version}" for name, version in _versions().items()), report.device)))
    _print_checks(report.checks, "kernels" if report.timings else "CPU reference")
    _print_kernels(report.kernels)
    if report.timings:
        _print_timings(report.timings)
    if report.bounds:
        _print_bounds(report.bounds)
    _out.print()
    if report.faults:
        _out.print(f"FAILED: {'; '.join(report.faults)}.", style="red", markup=False)
    else:
        _out.print("Good: no result is more than one step off, and no kernel spills.", style="green")


def _print_checks(checks: Iterable[demos.Check], path: str) -> None:
    table = _table(("", "", "exact", "1 step", "further", "furthest"), 2)
    for check in checks:
        for name, steps in (("wideload", check.wideload), ("torch eager", check.torch_eager)):
            counts = (steps.num_exact, steps.num_one_step, steps.num_further, steps.max_steps)
            label = check.case if name == "wideload" else " x ".join(map(str, check.shape))
            table.add_row(label, name, *(f"{count:,}" for count in counts))
    _print(f"Steps of bf16 from float64 rounded once; wideload by its {path}", table)


def _print_kernels(kernels: Iterable[demos.CompiledKernel]) -> None:
    table = _table(("", "arch", "kernel", "registers", "spilled", "16-byte accesses", "B/element"), 3)
    last = None
    for kernel in kernels:
        share = f"{kernel.num_wide_accesses} of {kernel.num_accesses}"
        figures = (str(kernel.registers), str(kernel.spill_bytes), share, f"{kernel.bytes_per_element:.2f}")
        table.add_row(kernel.case if kernel.case != last else "", kernel.arch, kernel.family, *figures)
        last = kernel.case
    _print("Kernels, from ptxas' report and the SASS of the path that inner blocks take", table)


def _print_timings(timings: Sequence[demos.Timing]) -> None:
    table = _table(("", "", "us", "median of", "GB/s", "of copy"), 2)
    notes = []
    for timing in timings:
        copy_us = timing.result["device copy"].time_us
        for contender in timing.result.contenders:
            label = timing.case if contender is timing.result.subject else ""
            notes += [f"{timing.case}, {contender.name}: {note}" for note in contender.labels if note.code not in _EXPECTED_LABELS]
            if contender.time_us is None:
                table.add_row(label, contender.name, "-", "", "", "")
                continue
            share = f"{copy_us.median / contender.time_us.median:.2f}" if copy_us else ""
            gbps = f"{(contender.bytes_per_second or 0) / _BYTES_PER_GB:,.0f}"
            table.add_row(label, contender.name, f"{contender.time_us.median:.1f}", str(contender.time_us.n), gbps, share)
        if timing.result.minimal_bytes and timing.result.nominal_bytes_per_second:
            least_us = timing.result.minimal_bytes / timing.result.nominal_bytes_per_second * _US_PER_S
            table.add_row(
                "", "least (computed)", f"{least_us:.1f}", "", f"{timing.result.nominal_bytes_per_second / _BYTES_PER_GB:,.0f}", ""
            )
    _print(f"Time (measured): {timings[0].tokens:,} tokens, cold L2", table)
    for note in notes:
        _out.print(f"  {note}", markup=False)


def _print_bounds(bounds: Sequence[demos.Bound]) -> None:
    table = _table(("", "GB/s", *(f"{bound.case}, us" for bound in bounds)), 1)
    for rows in zip(*(bound.least_times for bound in bounds), strict=True):
        table.add_row(rows[0].gpu, f"{rows[0].memory_bandwidth_gbps:,.0f}", *(f"{row.time_us:,.1f}" for row in rows))
    _print(f"Least time (computed): bytes / nominal bandwidth, {bounds[0].tokens:,} tokens", table)
