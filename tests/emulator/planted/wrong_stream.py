"""A function that launches its kernel on stream 0, whatever the current stream is."""

from __future__ import annotations

import torch

import wideload as wl

_ADD = wl.raw(
    'extern "C" __global__ void add(const float* x, const float* y, float* out, long long n)'
    "{ long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; if (i < n) out[i] = x[i] + y[i]; }",
    "add",
)


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    with torch.cuda.stream(torch.cuda.default_stream(x.device)):
        _ADD(x, y, out, x.numel())
    return out
