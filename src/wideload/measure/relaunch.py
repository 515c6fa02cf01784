"""Turns launches into a file and, in another process, the file into the same launches on memory of the same layout.

``python -m wideload.measure.relaunch FILE`` is what a profiler watches: no function is traced, and nothing else is launched but fills.
It must not know who watches.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wideload.launch import LoadedKernel
from wideload.nvrtc import Cubin

__all__ = ["Pointer", "Relaunch", "read_launches", "relaunch", "write_launches"]


@dataclass(frozen=True, slots=True)
class Pointer:
    """An argument that points so many bytes behind the first element of a tensor."""

    tensor: torch.Tensor
    offset_bytes: int = 0


Argument = Pointer | int | float | np.generic


@dataclass(frozen=True, slots=True)
class Relaunch:
    """One launch: a compiled kernel, its geometry and its arguments; tensors that need not be kept may be on ``meta``.

    ``sectors`` are those that its requests load and store, where they were computed.
    """

    name: str
    code: bytes
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    shared_bytes: int
    arguments: tuple[Argument, ...]
    sectors: tuple[float, float] | None = None


def write_launches(launches: Sequence[Relaunch], path: Path) -> None:
    """Write kernels, arguments and what the storages of tensors hold: integers as they are (they may be indices), floats not at all."""
    storages: dict[tuple[str, int], int] = {}
    memory: list[dict[str, Any]] = []
    written = []
    for launch in launches:
        arguments: list[tuple[Any, ...]] = []
        for argument in launch.arguments:
            if not isinstance(argument, Pointer):
                arguments.append(("number", type(argument).__name__, argument.item() if isinstance(argument, np.generic) else argument))
                continue
            tensor, storage = argument.tensor, argument.tensor.untyped_storage()
            is_meta = tensor.device.type == "meta"
            key = (tensor.device.type, int(storage._cdata) if is_meta else storage.data_ptr())
            if key not in storages:
                storages[key] = len(memory)
                is_kept = not is_meta and not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
                held = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage).cpu() if is_kept else None
                memory.append({"nbytes": storage.nbytes(), "dtype": str(tensor.dtype).removeprefix("torch."), "held": held})
            offset = int(tensor.storage_offset()) * tensor.element_size() + argument.offset_bytes
            arguments.append(("pointer", storages[key], offset))
        written.append({"name": launch.name, "code": launch.code, "grid": launch.grid, "block": launch.block,
                        "shared_bytes": launch.shared_bytes, "arguments": arguments})  # fmt: skip
    torch.save({"memory": memory, "launches": written}, path)


def read_launches(path: Path, device: torch.device | str) -> tuple[list[torch.Tensor], list[Relaunch]]:
    """Allocate and fill the memory, and return it (as bytes) with the launches, whose pointers point into it."""
    content = torch.load(path, weights_only=True)
    memory = [_fill(row, torch.device(device)) for row in content["memory"]]
    launches = []
    for row in content["launches"]:
        arguments: list[Argument] = []
        for kind, first, second in row["arguments"]:
            if kind == "pointer":
                arguments.append(Pointer(memory[first], second))
            else:
                arguments.append(second if first in ("int", "float") else getattr(np, first)(second))
        launches.append(Relaunch(row["name"], row["code"], row["grid"], row["block"], row["shared_bytes"], tuple(arguments)))
    return memory, launches


def _fill(row: dict[str, Any], device: torch.device) -> torch.Tensor:
    if row["held"] is not None:
        held: torch.Tensor = row["held"].to(device)
        return held
    dtype = getattr(torch, row["dtype"])
    filled = torch.empty(row["nbytes"], dtype=torch.uint8, device=device)
    whole = filled[: row["nbytes"] // dtype.itemsize * dtype.itemsize]
    if dtype.is_floating_point and dtype.itemsize > 1:
        whole.view(dtype).normal_()
    else:
        whole.random_()
    return filled


def relaunch(path: Path, device: int = 0) -> None:
    """Launch all that was written to ``path``, one after the other, and wait for them."""
    _, launches = read_launches(path, torch.device("cuda", device))
    for launch in launches:
        cubin = Cubin(launch.code, "", launch.name, 0, 0, 0, 0, 0, "")
        kernel = LoadedKernel(cubin, launch.grid, launch.block, launch.shared_bytes)
        kernel.launch(
            device,
            [value.tensor.data_ptr() + value.offset_bytes if isinstance(value, Pointer) else value for value in launch.arguments],
        )
    torch.cuda.synchronize(device)


if __name__ == "__main__":
    relaunch(Path(sys.argv[1]))
