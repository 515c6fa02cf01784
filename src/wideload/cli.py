"""Turns the command line into calls of the library, and their results into tables or JSON.

One function a command; it computes nothing itself.
"""

from __future__ import annotations

import inspect
import io
import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from enum import StrEnum
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

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
from wideload import measure, store, tuned
from wideload import report as reports
from wideload import tune as tunings
from wideload.analyze import targets as compatibility
from wideload.analyze.explain import Explanation
from wideload.build import argument_names
from wideload.cache import read_stored
from wideload.dtypes import dtype_name
from wideload.errors import DeviceError, TraceError, WideloadError
from wideload.fused import FusedFunction, fuse
from wideload.gpus import find_target
from wideload.ide import find_headers, write_clangd
from wideload.judge import PROBLEMS, judge, read_request, write_problem
from wideload.judge.problems import read_solution
from wideload.ladder import routes
from wideload.ladder.climb import MAX_SECONDS, Ladder, climb
from wideload.ladder.rungs import find_rungs
from wideload.launch import device_arch
from wideload.measure.sweep import Point, Sweep, compare_sweeps, read_sweep
from wideload.nvrtc import nvrtc_version
from wideload.plan import BUILT_IN
from wideload.raw_kernel import RawKernel
from wideload.spelling import default_operands, evaluate_size, evaluate_sizes, find_function, find_rival, make_arguments, sweep_sizes

__all__ = ["app"]

_out = Console(highlight=False, emoji=False)
_err = Console(stderr=True, highlight=False, emoji=False)
"""Progress and errors, so that standard output holds results alone."""

_US_PER_S = 1e6
_BYTES_PER_GB = 1e9
_EXPECTED_LABELS = ("UNCHECKED", "HOLDS_TENSORS")
"""What the demo does on purpose: it compares results itself, and the copy has buffers of its own."""


class _Commands(TyperGroup):
    """Every command reports a ``WideloadError``, and a file that cannot be read or written, as one message and exit status 1."""

    def invoke(self, ctx: Any) -> Any:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":  # names of files and functions may be any text
                stream.reconfigure(errors="backslashreplace")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # who reads has enough: typer ends quietly
            raise
        except (WideloadError, OSError) as error:
            raise _failure(error, 1) from None


def _failure(error: Exception, status: int) -> typer.Exit:
    _err.print(f"{type(error).__name__}: {error}", style="red", markup=False, soft_wrap=True)
    return typer.Exit(status)


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
        checks = _run_subject(
            f"the demo with --tokens {tokens}",  # which may take more memory than there is
            lambda: tuple(demos.check_case(case, tokens, where, lambda num_rows: progress.advance(rows, num_rows)) for case in demos.CASES),
        )
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
        _out.print(f"{folder.path or 'no folder'}: {folder.fault}", style="yellow", markup=False, soft_wrap=True)
        return
    table = _table(("kernel", "arch", "registers", "kB", "used"), 2)
    for entry, stored in rows:
        names = (stored.name, stored.arch, str(stored.registers)) if stored else ("damaged", "", "")
        table.add_row(*names, f"{entry.nbytes / 1e3:.1f}", f"{datetime.fromtimestamp(entry.used_at):%Y-%m-%d %H:%M}")
    _print(f"{folder.path}: {len(rows)} kernels, {folder.nbytes / 1e6:.1f} MB", table)


@_cache.command("clear")
def cache_clear(as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a line.")] = False) -> None:
    """Remove the kernels kept on the disk; they are compiled again when they are next wanted."""
    folder, removed = store.cache_folder(), store.clear_entries()
    nbytes = sum(entry.nbytes for entry in removed)
    if as_json:
        _out.print_json(json.dumps({"folder": folder and str(folder), "removed": len(removed), "nbytes": nbytes}))
    else:
        where = folder or "no folder: there is none"
        _out.print(f"removed {len(removed)} kernels, {nbytes / 1e6:.1f} MB, from {where}", markup=False, soft_wrap=True)


@app.command()
def tune(
    show: Annotated[bool, typer.Option("--show", help="Measure nothing: say what kernels are cut by, and why.")] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Remove what was measured; the built-in choices hold again.")] = False,
    device: Annotated[str | None, typer.Option(help="Which GPU: its number, or cuda:N.", metavar="N")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of tables.")] = False,
) -> None:
    """Measure how kernels are best cut for this GPU, and keep it: vector bytes and elements a thread, threads a block, tiles.

    Takes some half a minute. What was chosen lies in tuning.json in the cache folder, or in the file that WIDELOAD_TUNING names, and holds
    for GPUs of this name in processes that start afterwards. Exits with 1 without a GPU, unless --show or --reset is given.
    """
    if show and reset:
        raise typer.BadParameter("--show and --reset are two things: choose one")
    path = tuned.tuned_path()
    if show:
        _show_tuning(path, as_json)
        return
    if path is None:
        raise WideloadError("there is no cache folder to keep a tuning in (WIDELOAD_CACHE=0, or no home). Name a file in WIDELOAD_TUNING.")
    if reset:
        removed = tuned.remove_tuned(path)
        if as_json:
            _out.print_json(json.dumps({"path": str(path), "removed": removed}))
        else:
            _out.print(f"removed {path}" if removed else f"there is no {path}", markup=False, soft_wrap=True)
        return
    index = measure.wall.cuda_index(int(device) if device and device.isdecimal() else device)
    with _progress() as progress:
        bar = progress.add_task("tuning")
        found = tunings.tune(
            torch.cuda.get_device_name(index),
            device_arch(index),
            torch.device("cuda", index),
            advance=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    tuned.write_tuned(found.record, path)
    if as_json:
        _out.print_json(json.dumps({**found.to_dict(), "path": str(path)}))
        return
    heading, *rows = found.rows
    table = _table(heading, 1)
    for row in rows:
        table.add_row(*row)
    _print(f"{found.gpu}, {found.arch}", table)
    _out.print(f"\nchosen: {tunings.spell_choices(found.choices)}", markup=False, soft_wrap=True)
    _out.print(f"kept in {path}", markup=False, soft_wrap=True)


def _show_tuning(path: Path | None, as_json: bool) -> None:
    try:
        kept = tuned.read_tuned(path)
    except WideloadError as error:  # as for a call: the built-in choices hold
        kept = ()
        _err.print(f"{error}. The built-in choices are taken.", style="yellow", markup=False, soft_wrap=True)
    if as_json:
        built_in = {arch: {"source": of.source, "choices": of.choices} for arch, of in BUILT_IN.items()}
        _out.print_json(json.dumps({"path": path and str(path), "kept": [asdict(gpu) for gpu in kept], "built_in": built_in}))
        return
    _out.print(f"{path or 'no file'}: {len(kept)} GPUs tuned", style="bold", markup=False, soft_wrap=True)
    records = [*((f"{gpu.gpu}, {gpu.arch}", gpu.tuning) for gpu in kept), *((f"{arch}, built in", of) for arch, of in BUILT_IN.items())]
    for name, tuning in records:
        _out.print(f"{name}: {tunings.spell_choices(tuning.choices)}", markup=False, soft_wrap=True)
        _out.print(f"  {tuning.source}", style="dim", markup=False, soft_wrap=True)


# ---- measuring


class _Mode(StrEnum):
    AUTO = "auto"
    COLD = "cold"
    HOT = "hot"
    GRAPH = "graph"


_Function = Annotated[str, typer.Argument(help="An op of wl.ops, module:function, or path/file.py:function.", show_default=False)]
_TO_STDOUT = "-"
_BENCH_OPTIONS = frozenset(inspect.signature(measure.bench).parameters)


@app.command(context_settings={"ignore_unknown_options": True})  # an operand may be -1
def bench(
    function: _Function,
    operands: Annotated[
        list[str] | None, typer.Argument(help="Tensors of random values, their views, numbers, name=value. An op has its own.")
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(help="eager (what a fused one wraps), compile (that by torch.compile), or a function; repeatable.", metavar="RIVAL"),
    ] = None,
    mode: Annotated[_Mode, typer.Option(help="What the L2 holds, and whether a CUDA graph is timed. On a GPU only.")] = _Mode.AUTO,
    sweep: Annotated[
        list[str] | None,
        typer.Option("--sweep", "--sizes", help="Sizes for a name in the operands: n=2^10..2^28, n=1..1000x10, n=7,9.", metavar="SIZES"),
    ] = None,
    device: Annotated[str | None, typer.Option(help="Where to run, such as cuda:1 or cpu: the GPU, if there is one.")] = None,
    check: Annotated[
        str | None, typer.Option(help="A function whose results are right; none if they are random. A fused one knows.", metavar="FUNCTION")
    ] = None,
    nbytes: Annotated[
        str | None, typer.Option("--bytes", help="What a call must move, such as 6*n: computed for a fused function.", metavar="SIZE")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the random values, and of the order of turns.")] = 0,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Sampling each contender at each size ends then at the latest.")] = 2.0,
    json_to: Annotated[
        str | None, typer.Option("--json", help="Write all results, with their samples, to a file, or to - .", metavar="FILE")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write a line for each contender and size instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write the table in Markdown.")] = False,
    explain_it: Annotated[
        bool,
        typer.Option("--explain/--no-explain", help="Without --sweep, explain the function below the table, as wideload explain does."),
    ] = True,
) -> None:
    """Check functions against each other and time them: cold L2, random data, the host's cost apart.

    \b
    wideload bench swiglu
    wideload bench swiglu --against eager --against compile
    wideload bench torch:add 'bf16\\[n]' 'bf16\\[n]' --sweep n=2^10..2^28 --bytes '6*n' --csv
    wideload bench swiglu '*bf16[16384,28672].chunk(2,-1)' --against eager --json now.json
    wideload bench my.py:gate 'bf16[64,128].t()' 'f32[128,66][:, 1:-1]' 'f32[64]@1' kind=tanh

    Exits with 1 if the first function is wrong or could not be run. docs/measuring.md says how it is measured.
    """
    if sum((json_to == _TO_STDOUT, as_csv, as_markdown)) > 1:
        raise typer.BadParameter("--json -, --csv and --markdown all write to standard output: choose one")
    if json_to is not None and not Path(json_to).absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {json_to}: there is no such folder")
    if json_to is not None and Path(json_to).is_dir():
        raise typer.BadParameter(f"--json {json_to or '.'} is a folder; name a file in it")
    unknown = [text for text in operands or () if text.startswith("--")]
    if unknown:
        raise typer.BadParameter(f"there is no option {unknown[0]}")
    where = _find_device(device)
    subject = find_function(function)
    texts = operands or default_operands(subject)
    usual = {} if operands or not texts else {"tokens": demos.FULL_TOKENS if where.type == "cuda" else demos.CPU_TOKENS}
    points: list[Point] = []
    try:
        for swept in sweep_sizes(sweep or []):
            sizes = {**usual, **swept}
            args, named = make_arguments(texts, sizes=sizes, device=where, seed=seed)
            out = named.pop("out", None)
            reserved = _BENCH_OPTIONS & named.keys()
            if reserved:
                raise WideloadError(f"{min(reserved)}= is an option of wl.bench as well. Give it by its place, or wrap the function.")
            run = partial(
                measure.bench,
                subject,
                *args,
                against={rival: find_rival(rival, subject) for rival in against or ()},
                mode=mode.value,
                bytes=None if nbytes is None else evaluate_size(nbytes, sizes),
                out=out,
                check=_find_check(check),
                name=function,
                seed=seed,
                max_seconds=max_seconds,
                **named,
            )
            points.append(Point(swept, _run_subject(function, run)))
    finally:
        if points:  # those before the one that failed
            _write_sweep(Sweep(tuple(points)), json_to, as_csv, as_markdown)
    if explain_it and not (sweep or as_csv or json_to == _TO_STDOUT):
        _explain_subject(subject, texts, usual, where, points[0].result, as_markdown)
    raise typer.Exit(1 if any(point.result.subject.time_us is None for point in points) else 0)


@app.command()
def roofline(
    device: Annotated[str | None, typer.Option(help="Which GPU: its number, or cuda:N.", metavar="N")] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure again, even if this GPU and driver have been measured.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write the table in Markdown.")] = False,
) -> None:
    """Say how fast this GPU's memory is: nominal, measured for each mix of reads and writes, and what a launch costs.

    Measured once for each GPU and driver, in some ten seconds, and kept. Exits with 1 without a GPU.
    """
    name = f"cuda:{device}" if device and device.isdecimal() else device
    with _err.status("measuring the memory"):
        roof = measure.roofline(None if name is None else _find_device(name), refresh=refresh)
    typer.echo(json.dumps(roof.to_dict(), indent=1) if as_json else roof.to_markdown() if as_markdown else str(roof))


@app.command(context_settings={"ignore_unknown_options": True})  # an operand may be -1
def explain(
    function: _Function,
    operands: Annotated[
        list[str] | None, typer.Argument(help="Tensors, their views, numbers, name=value, as for bench. An op has its own.")
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A GPU or an architecture that need not be here: h200, sm_80. This GPU if left out.", metavar="GPU")
    ] = None,
    size: Annotated[list[str] | None, typer.Option(help="A size for a name in the operands: n=2^28.", metavar="NAME=SIZE")] = None,
    device: Annotated[str | None, typer.Option(help="Without --target, the GPU to explain and measure on: cuda:1.")] = None,
    measure_it: Annotated[bool, typer.Option("--measure/--no-measure", help="Without --target, add the measured time.")] = True,
    ncu: Annotated[bool, typer.Option("--ncu", help="Without --target, add the hardware counters of Nsight Compute.")] = False,
    grid: Annotated[
        str | None,
        typer.Option(help="Blocks of a CUDA kernel, such as n//1024 or 32,32: a thread an element, if left out.", metavar="SIZES"),
    ] = None,
    block: Annotated[str | None, typer.Option(help="Threads a block of a CUDA kernel, such as 256 or 32,8.", metavar="SIZES")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of tables.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write the tables in Markdown.")] = False,
) -> None:
    """Say how far a call is from its bound, and why: bytes, sectors, occupancy, bytes in flight, instructions, and what to try next.

    \b
    wideload explain bias_silu_mul --target h200
    wideload explain torch:add 'bf16\\[n]' 'bf16\\[n]' --size n=2^28 --target a100 --json
    wideload explain my.py:gate 'bf16[8192,8192].t()' 'f32[8192]' --target sm_80 --markdown
    wideload explain my.cu:scale 'f32\\[n]' 'f32\\[n]' n --size n=2^26 --block 128 --ncu

    Every figure says whether it was measured, computed or assumed; what cannot be fused is explained as it is. docs/explain.md says how.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown both write to standard output: choose one")
    unknown = [text for text in operands or () if text.startswith("--")]
    if unknown:
        raise typer.BadParameter(f"there is no option {unknown[0]}")
    subject = find_function(function)
    texts = operands or default_operands(subject)
    usual = {} if operands or not texts else {"tokens": demos.FULL_TOKENS}
    sizes, *more = sweep_sizes(size or [])
    if more:
        raise typer.BadParameter("--size names several sizes; give one: n=2^28")
    where = _find_device(device)
    is_here = target is None and where.type == "cuda"  # of a GPU that is not here, only layouts are needed
    args, named = make_arguments(texts, sizes={**usual, **sizes}, device=where if is_here else "meta")
    given = {**usual, **sizes}
    for name, text in (("grid", grid), ("block", block)):
        if text is not None and not isinstance(subject, RawKernel):
            raise typer.BadParameter(f"--{name} is for CUDA kernels: FILE.cu:KERNEL")
        if text is not None:
            named[name] = evaluate_sizes(text, given)

    def explain_as(fn: Callable[..., Any]) -> Explanation:
        return _run_subject(function, lambda: wideload.explain(fn, *args, target=target, measure=measure_it, ncu=ncu, **named))

    try:
        found = explain_as(subject if isinstance(subject, FusedFunction | RawKernel) else fuse(subject))
    except TraceError:
        if isinstance(subject, FusedFunction):
            raise
        found = explain_as(subject)
    typer.echo(found.to_json() if as_json else found.to_markdown() if as_markdown else str(found))


@app.command(context_settings={"ignore_unknown_options": True})  # an operand may be -1
def build(
    function: _Function,
    target: Annotated[
        list[str], typer.Option(help="A GPU or an architecture to compile for: h200, sm_80; repeatable.", metavar="GPU", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Made if it is not there, added to if it is.", metavar="FOLDER")],
    operands: Annotated[
        list[str] | None, typer.Argument(help="Tensors, their views, numbers, name=value, as for bench. An op has its own.")
    ] = None,
    size: Annotated[
        list[str] | None,
        typer.Option(
            "--sizes", "--sweep", help="Sizes for a name in the operands, each of them built: n=1,64, n=2^0..2^20.", metavar="SIZES"
        ),
    ] = None,
    in_place: Annotated[
        str | None,
        typer.Option(help="The parameter whose argument is out= as well; out=bf16\\[n] is an output of its own.", metavar="NAME"),
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Build the kernels of the gradients of all arguments too.")] = False,
    grad: Annotated[
        list[str] | None, typer.Option(help="Build the kernel of the gradients of these parameters only; repeatable.", metavar="NAME")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
) -> None:
    """Compile a function's kernels into a folder, for machines that have no NVRTC: they name it in WIDELOAD_BUILT_DIR.

    \b
    wideload build swiglu 'bf16\\[8192, 14336]' 'bf16\\[8192, 14336]' --target h200 --target a100 -o kernels
    wideload build my.py:gate 'bf16\\[n, 4096]' 'f32\\[4096]' --sizes n=1,8192 --target sm_90 -o kernels
    wideload build ema_ 'f32\\[n]' 'f32\\[n]' 0.999 --in-place target --sizes n=2^20 --target l4 -o kernels

    Sizes are arguments of a kernel, so that one call stands for many: docs/build.md says for which, and what chooses another kernel.
    Exits with 1 where something cannot be compiled or written; readers then find in it what they found before.
    """
    subject = find_function(function)
    if isinstance(subject, RawKernel):
        raise typer.BadParameter("a kernel written by hand is compiled where it is launched; name a function")
    fused = subject if isinstance(subject, FusedFunction) else fuse(subject)
    texts = operands or default_operands(subject)
    usual = {} if operands or not texts else {"tokens": demos.FULL_TOKENS}
    signatures = [_find_signature(fused, texts, {**usual, **sizes}, in_place, grad or ()) for sizes in sweep_sizes(size or [])]
    with _progress() as progress:
        task = progress.add_task("compiling", total=None)
        built = _run_subject(
            function,
            lambda: fused.build(
                signatures,
                target,
                output,
                backward=backward or bool(grad),
                advance=lambda done, total: progress.update(task, completed=done, total=total),
            ),
        )
    if as_json:
        typer.echo(json.dumps(built.to_dict(), indent=1))
        return
    table = _table(built.rows[0], 2)
    for row in built.rows[1:]:
        table.add_row(*row)
    _print(f"{output}: {len(built.kernels)} kernels, {built.nbytes / 1e3:.1f} kB", table)


def _find_signature(
    fused: FusedFunction, texts: Sequence[str], sizes: dict[str, int], in_place: str | None, grad: Sequence[str]
) -> tuple[Any, ...] | dict[str, Any]:
    args, named = make_arguments(texts, sizes=sizes, device="meta")
    known = argument_names(fused, tuple(args), named)
    for option, name in (("--in-place", in_place), *(("--grad", name) for name in grad)):
        if name is not None and not isinstance(known.get(name), torch.Tensor):
            raise typer.BadParameter(f"{option} {name} is no tensor among the operands; the parameters are {', '.join(known)}")
    for name in grad:
        if not (known[name].is_floating_point() or known[name].is_complex()):
            raise typer.BadParameter(f"--grad {name}: {dtype_name(known[name].dtype)} has no gradient; allowed: floats and complex numbers")
        known[name].requires_grad_()
    if in_place is not None:
        known["out"] = known[in_place]
    return known if named or in_place is not None else tuple(args)


@app.command()
def report(
    results: Annotated[
        list[Path],
        typer.Argument(help="What bench, explain and roofline wrote with --json, in any order.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The page.", metavar="FILE")] = Path("report.html"),
    pictures: Annotated[
        Path | None, typer.Option(help="Write each picture there too, as SVG; made if it is not there.", metavar="FOLDER")
    ] = None,
    as_png: Annotated[bool, typer.Option("--png", help="Write the pictures as PNG too.")] = False,
) -> None:
    """Make one page of HTML from results: tables, pictures and verdicts, with nothing to load from elsewhere.

    \b
    wideload bench swiglu --against eager --json bench.json
    wideload explain swiglu --target h200 --json > explain.json
    wideload roofline --json > roofline.json
    wideload report bench.json explain.json roofline.json --output report.html

    Pictures: the roofline with the explained calls on it, bandwidth against size for a sweep, samples of each contender, and which sectors
    a warp touches of each operand. Needs pip install 'wideload\\[plots]'. Exits with 1 if a file cannot be read, shown or written.
    """
    if not output.absolute().parent.is_dir():
        raise typer.BadParameter(f"--output {output}: there is no such folder")
    if as_png and pictures is None:
        raise typer.BadParameter("--png needs --pictures FOLDER, where to write them")
    sections = reports.build_sections((path.name, reports.read_record(path)) for path in results)
    with _err.status("drawing"):
        written = reports.write_report(sections, output, pictures, with_png=as_png, inputs=results)
    for path in written:
        typer.echo(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="What wideload bench --json wrote before.", show_default=False)],
    b: Annotated[Path, typer.Argument(help="What it wrote after.", show_default=False)],
    same_within: Annotated[float, typer.Option(min=0.0, help="Two times are the SAME up to this part of them.")] = 0.01,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of lines.")] = False,
) -> None:
    """Say of each function whether B is FASTER or SLOWER than A, takes the SAME time, or whether that is UNCLEAR.

    \b
    wideload bench swiglu --json before.json
    wideload bench swiglu --json after.json
    wideload compare before.json after.json

    Exits with 0 if nothing is slower, 1 if something is SLOWER, 3 if something is UNCLEAR, and 2 if the files cannot be read.
    """
    try:
        comparison = compare_sweeps(read_sweep(a), read_sweep(b), same_within=same_within)
    except WideloadError as error:
        raise _failure(error, 2) from None  # 1 is a verdict
    typer.echo(json.dumps(comparison.to_dict(), indent=1) if as_json else str(comparison))
    raise typer.Exit(comparison.exit_code)


@app.command()
def ladder(
    rungs: Annotated[list[str] | None, typer.Argument(help="Rungs, such as add_bf16_vec8: all of them if left out.")] = None,
    target: Annotated[
        str | None, typer.Option(help="A GPU that need not be here, to compile for: h200, a100. Nothing is run.", metavar="GPU")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Without --target, the GPU to check and time on: cuda:1.")] = None,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Sampling each kernel ends then at the latest.")] = MAX_SECONDS,
    route: Annotated[
        routes.Route | None, typer.Option(help="Build and run the vector add without wl.raw: a program by nvcc, an extension by torch.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Where --route standalone puts its program.", metavar="FILE")] = Path(
        "vector_add"
    ),
    source: Annotated[bool, typer.Option("--source", help="Print the CUDA of the rungs or the route instead, and where it is.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Write the table in Markdown.")] = False,
) -> None:
    """Climb from the first vector add to the fused kernel: each rung compiled, checked and timed beside torch.

    \b
    wideload ladder
    wideload ladder --target a100 --markdown
    wideload ladder add_bf16_vec8 --source
    wideload ladder --route standalone
    wideload ladder --route extension

    With --target, what can be said without a GPU: access widths, registers, occupancy, sectors, the least time; a route is only built.
    Exits with 1 if a result is wrong. docs/ladder.md walks the rungs.
    """
    if as_json and as_markdown:
        raise typer.BadParameter("--json and --markdown both write to standard output: choose one")
    if route is not None and (rungs or as_markdown):
        raise typer.BadParameter(
            "--route takes no rungs and no --markdown: a route has one kernel for each dtype, and prints a line for it"
        )
    chosen = find_rungs(rungs or ())
    if source:
        folder = Path(str(resources.files("wideload"))) / "ladder"
        paths = [routes.SOURCES[route]] if route else [folder / file for file in dict.fromkeys(rung.file for rung in chosen)]
        for path in paths:
            typer.echo(f"// {path}\n{path.read_text(encoding='utf-8')}")
        return
    where = None if target else _find_device(device)
    if route is not None:
        _take_route(route, target, where, output, as_json, max_seconds)
        return
    with _progress() as progress:
        task = progress.add_task("", total=len(chosen))
        found = climb(
            chosen,
            target,
            where,
            lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
            max_seconds,
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    elif as_markdown:
        typer.echo(found.to_markdown(), nl=False)
    else:
        _print_ladder(found)
    raise typer.Exit(1 if found.faults else 0)


def _take_route(
    route: routes.Route, target: str | None, where: torch.device | None, output: Path, as_json: bool, max_seconds: float
) -> None:
    """Build and, where there is a GPU and no target, run. Exits with 1 if a result is wrong."""
    if where is not None and where.type != "cuda":
        raise DeviceError("there is no GPU to run it on; name one to build for: --target h200")
    arch = find_target(target).arch if target else device_arch(where.index if where is not None else 0)
    faults: tuple[str, ...] = ()
    times: tuple[routes.RouteTime, ...] = ()
    with _err.status(f"building for {arch}") as status:
        if route is routes.Route.STANDALONE:
            built = routes.build_standalone(arch, output)
            status.update("running")
            times = routes.run_standalone(built.path, device=where.index) if where is not None else ()
        else:
            built, module = routes.build_extension(arch)
            status.update("running")
            if where is not None:
                faults = routes.check_extension(module, where)
                times = routes.time_extension(module, where, max_seconds=max_seconds)
    if as_json:
        typer.echo(json.dumps({**built.to_dict(times), "faults": faults}, indent=1))
    else:
        typer.echo("\n".join((f"{built.path}: for {built.arch}, by nvcc {built.nvcc}", *map(str, times), *faults)))
    raise typer.Exit(1 if faults or any(time.fault for time in times) else 0)


@app.command(context_settings={"ignore_unknown_options": True})  # an operand may be -1
def check(
    subject: Annotated[str | None, typer.Argument(help="FILE.cu:KERNEL, or a function that launches one.", show_default=False)] = None,
    operands: Annotated[
        list[str] | None, typer.Argument(help="As for bench, with one or two sizes left open: f32[n], bf16[rows, cols].")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="What it should compute: an op of wl.ops, torch:add, module:function.", metavar="OP")
    ] = None,
    items: Annotated[int | None, typer.Option(min=1, help="Elements a thread, where no --grid is given: 1.")] = None,
    block: Annotated[str | None, typer.Option(help="Threads a block, such as 256 or 32,8: 256.", metavar="SIZES")] = None,
    grid: Annotated[
        str | None,
        typer.Option(help="Blocks, in the operands' sizes, n, items and block: min(n // block + 1, 132), or two.", metavar="SIZES"),
    ] = None,
    shared: Annotated[
        str | None, typer.Option(help="Bytes of dynamic shared memory (extern __shared__) a block: 4 * block.", metavar="BYTES")
    ] = None,
    let: Annotated[
        list[str] | None,
        typer.Option(help="What a parameter takes that is no size: alpha=0.5, stride=cols; repeatable.", metavar="NAME=VALUE"),
    ] = None,
    rtol: Annotated[
        float | None,
        typer.Option(min=0.0, help="Relative difference that is allowed: some roundings of the dtype. 0: none; a NaN is a NaN."),
    ] = None,
    atol: Annotated[float | None, typer.Option(min=0.0, help="Absolute difference that is allowed.")] = None,
    most: Annotated[
        str | None, typer.Option(help="The most elements that it is for, such as 2^31-1, where n is an int: any number.", metavar="SIZE")
    ] = None,
    sanitizing: Annotated[
        bool | None,
        typer.Option("--sanitize/--no-sanitize", help="Run it under compute-sanitizer too: if it is found.", show_default=False),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="A GPU that need not be here, to compile for: h200, a100. Nothing is run.", metavar="GPU")
    ] = None,
    device: Annotated[str | None, typer.Option(help="Without --target, the GPU to run on: cuda:1.")] = None,
    max_seconds: Annotated[float, typer.Option(min=0.0, help="Sampling each contender ends then at the latest.")] = 2.0,
    new: Annotated[
        str | None,
        typer.Option(help=f"Write a file to start from and its page: {', '.join(p.name for p in PROBLEMS)}.", metavar="PROBLEM"),
    ] = None,
    folder: Annotated[Path, typer.Option("--into", help="Where --new writes.", metavar="FOLDER")] = Path("."),
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of lines.")] = False,
) -> None:
    """Judge your own CUDA kernel: right at the hard sizes, or which bug it has; how far from the wall; what to do next.

    \b
    wideload check --new swiglu
    wideload check swiglu.cu:swiglu
    wideload check mine.cu:add --against torch:add 'bf16\\[n]' 'bf16\\[n]' --items 8
    wideload check mine.cu:gelu --against bias_gelu 'bf16\\[rows, cols]' 'bf16\\[cols]' --target a100

    Pointers to const are the inputs, in order, other pointers the results; numbers are matched by their names. A line
    // wideload: --against ... in the file gives the options that are not typed. docs/judge.md says what is tried, and what is named.
    Exits with 0 if it is right, 1 if something is wrong, 3 if nothing is known to be wrong but no GPU checked results.
    """
    if new is not None:
        if subject is not None:
            raise typer.BadParameter("--new writes files to start from, and judges none: leave out the kernel")
        written = write_problem(new, folder)
        if as_json:
            typer.echo(json.dumps({"written": [str(path) for path in written], "solution": str(read_solution(new))}))
        else:
            typer.echo("".join(f"{path}\n" for path in written) + f"A solution is in {read_solution(new)}")
        return
    if subject is None:
        raise typer.BadParameter("name a kernel, FILE.cu:KERNEL, or begin one with --new PROBLEM")
    given = {
        "--against": against, "--items": items, "--block": block, "--grid": grid, "--shared": shared, "--rtol": rtol, "--atol": atol,
        "--most": most,
    }  # fmt: skip
    words = [*(operands or ()), *(f"{name}={value}" for name, value in given.items() if value is not None)]
    request = read_request(subject, [*words, *(f"--let={text}" for text in let or ())])
    with _err.status("judging") as status:
        found = judge(
            request,
            target=target,
            device=None if target else _find_device(device),
            sanitizing="auto" if sanitizing is None else "yes" if sanitizing else "no",
            max_seconds=max_seconds,
            advance=status.update,
        )
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else str(found))
    raise typer.Exit(found.exit_code)


def _print_ladder(found: Ladder) -> None:
    table = _table(found.columns, 3)
    table.columns[-1].justify = "left"
    for row in found.rows:
        table.add_row(*found.cells(row))
    _out.print(f"{found.title}\n", style="bold", markup=False, soft_wrap=True)
    _print_table(table)
    for note in found.notes:
        _out.print(f"  {note}", markup=False, soft_wrap=True)


@app.command()
def ide(
    folder: Annotated[Path, typer.Argument(help="Where the CUDA files are: this folder, if left out.")] = Path("."),
    arch: Annotated[str, typer.Option(help="What clang parses for; it knows no newer one than itself.")] = "sm_80",
    replace: Annotated[bool, typer.Option("--replace", help="Replace a .clangd that something else has written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of lines.")] = False,
) -> None:
    """Let editors with clangd find CUDA's and torch's headers, on a machine without a CUDA toolkit.

    Writes .clangd, and a folder .clangd-cuda of links, into the folder. The headers are those of NVIDIA's wheels:
    pip install nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl. Exits with 1 where they are missing.
    """
    headers = find_headers()
    path = write_clangd(folder, headers, arch=arch, replace=replace)
    if as_json:
        beside = [str(other) for other in headers.beside]
        typer.echo(json.dumps({"path": str(path), "cuda": str(headers.cuda), "beside": beside}, indent=1))
    else:
        typer.echo(f"{path}: CUDA's headers in {headers.cuda}, {len(headers.beside)} folders beside. Restart the language server.")


@app.command(context_settings={"ignore_unknown_options": True})  # nvcc's options begin with one dash
def targets(
    compiled: Annotated[
        list[str],
        typer.Argument(help="nvcc's -arch, -code and -gencode, TORCH_CUDA_ARCH_LIST's words, or files: cubin, fatbin, PTX, .so."),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object instead of a table.")] = False,
) -> None:
    """Say on which GPUs compiled code runs: natively, by the driver's JIT, or not, and why.

    \b
    wideload targets -arch=sm_80
    wideload targets -gencode arch=compute_80,code=sm_80 -gencode arch=compute_90a,code=sm_90a
    wideload targets '8.0 9.0+PTX'
    wideload targets kernel.cubin

    Exits with 1 for what is no target.
    """
    images = _find_images(compiled)
    support = compatibility.find_support(images)
    if as_json:
        named = {"schema": compatibility.SCHEMA, "images": [image.name for image in images], "gpus": [row.to_dict() for row in support]}
        typer.echo(json.dumps(named, indent=1))
        return
    _print_support(images, support)


def _find_images(compiled: Sequence[str]) -> tuple[compatibility.Image, ...]:
    """The images of all files among the words, then those of the flags."""
    paths = [Path(word) for word in compiled if Path(word).is_file()]
    words = [word for word in compiled if not Path(word).is_file()]
    images = [image for path in paths for image in compatibility.read_images(path)]
    return tuple(dict.fromkeys([*images, *(compatibility.parse_flags(words) if words else ())]))


def _print_support(images: Sequence[compatibility.Image], support: Sequence[compatibility.Support]) -> None:
    colours = {"native": "green", "jit": "yellow", "no": "red"}
    for row in support:
        major, minor = row.compute_capability
        how = f"{row.way} {row.image or ''}".rstrip()
        _out.print(f"{major:>2}.{minor}  [{colours[row.way]}]{how:<18}[/] {escape(', '.join(row.gpus))}", soft_wrap=True)
        _out.print(f"      {row.why}", style="dim", markup=False, soft_wrap=True)
    counts = Counter(row.way for row in support)
    _out.print(
        f"\n{', '.join(image.name for image in images)}: native on {counts['native']} architectures, "
        f"by JIT on {counts['jit']}, not on {counts['no']}."
    )


_ELSEWHERE = "h200"
"""What a function is explained for where there is no GPU: the one that wideload is measured on."""


def _explain_subject(
    subject: Callable[..., Any],
    texts: Sequence[str],
    usual: dict[str, int],
    where: torch.device,
    result: measure.BenchResult,
    as_markdown: bool,
) -> None:
    """Explain what was timed: on its GPU with the measured time, or for one that is not here, where default operands take its size.

    Not every function that can be timed is elementwise: why one cannot be explained is a line, and no failure.
    """
    is_here = where.type == "cuda"
    sizes = usual if is_here else dict.fromkeys(usual, demos.FULL_TOKENS)
    time_us = result.subject.time_us.median if is_here and result.subject.time_us else None
    try:
        args, named = make_arguments(texts, sizes=sizes, device=where if is_here else "meta")  # elsewhere, only layouts are needed
        fused = subject if isinstance(subject, FusedFunction) else fuse(subject)
        found = fused.explain(*args, target=None if is_here else _ELSEWHERE, measure=False, measured_us=time_us, **named)
    except Exception as error:  # tracing runs code of others
        typer.echo(f"\n{result.subject.name} is not explained: {error}")
        return
    if not is_here:
        typer.echo(f"\nThere is no GPU here: what follows is computed for an {_ELSEWHERE.upper()}{_spell_sizes(sizes)}.")
    typer.echo(f"\n{found.to_markdown() if as_markdown else found}")


def _spell_sizes(sizes: dict[str, int]) -> str:
    return f", with {' and '.join(f'{size} {name}' for name, size in sizes.items())}" if sizes else ""


def _find_check(text: str | None) -> Callable[..., Any] | Literal[False] | None:
    return None if text is None else False if text == "none" else find_function(text)


_OUR_CODE = (str(Path(__file__).parent), str(Path(torch.__file__).parent))


_T = TypeVar("_T")


def _run_subject(name: str, run: Callable[[], _T]) -> _T:
    """What the function itself raises is one message, with the line of its own that raised it."""
    try:
        return run()
    except WideloadError:
        raise
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_OUR_CODE)]
        where = f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""
        raise WideloadError(f"{name} raised {type(error).__name__}: {error}{where}") from error


def _write_sweep(sweep: Sweep, json_to: str | None, as_csv: bool, as_markdown: bool) -> None:
    if json_to == _TO_STDOUT:
        typer.echo(sweep.to_json())
        return
    typer.echo(sweep.to_csv() if as_csv else sweep.to_markdown() if as_markdown else str(sweep), nl=not (as_csv or as_markdown))
    if json_to is None:
        return
    try:
        Path(json_to).write_text(sweep.to_json() + "\n", encoding="utf-8")
    except OSError as error:
        raise WideloadError(f"--json {json_to} cannot be written: {error.strerror}") from None


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
    _out.print(f"\n{title}", style="bold", markup=False, soft_wrap=True)
    _print_table(table)


def _print_table(table: Table) -> None:
    """Not cut to the terminal, and least of all to the 80 columns that are taken for a pipe's: a line that wraps still says all."""
    natural = _out.measure(table, options=_out.options.update(width=_WIDEST)).maximum
    Console(highlight=False, emoji=False, width=max(_out.width, natural)).print(table)


_WIDEST = 1000
"""Columns of no table."""


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
