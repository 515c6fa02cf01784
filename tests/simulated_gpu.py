"""A GPU of arithmetic: a host clock, a device clock and an L2 of recently used memory, to test timing and checks where there is none.

Kernels are Python functions on CPU tensors. They run when the device would run them: at once from a stream, at each replay from a graph.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from wideload.measure import timing
from wideload.measure.timing import Capture

LAUNCH_HOST_US = 5.0
LAUNCH_DEVICE_US = 1.0


class SimulatedGpu:
    """Time passes on the host by `launch` and `wait`, on the device by the bytes that are not in its L2."""

    def __init__(self, *, l2_bytes: int = 1 << 20, bytes_per_us: float = 1e4) -> None:
        self.l2_bytes, self.bytes_per_us = l2_bytes, bytes_per_us
        self.host_us = self.device_us = self.side_us = 0.0
        self.num_flushes = 0
        self._l2: OrderedDict[int, int] = OrderedDict()
        self._capturing: list[tuple[Callable[[], Any], tuple[torch.Tensor, ...]]] | None = None
        self._synchronized_in_capture = False

    def launch(self, kernel: Callable[[], Any], *touched: torch.Tensor, host_us: float = LAUNCH_HOST_US, stream: str = "current") -> None:
        """Enqueue a kernel that reads or writes the tensors ``touched``."""
        if stream == "side":
            kernel()
            self.side_us = max(self.side_us, self.host_us) + self._memory_us(touched)
        elif self._capturing is not None:
            self._capturing.append((kernel, touched))
        else:
            self.host_us += host_us
            self._run(kernel, touched)

    def wait(self) -> None:
        """Let the host wait for the device; an error while a graph is captured."""
        if self._capturing is not None:
            self._synchronized_in_capture = True
            raise RuntimeError("operation not permitted when stream is capturing")
        self.host_us = max(self.host_us, self.device_us)

    def _run(self, kernel: Callable[[], Any], touched: Sequence[torch.Tensor]) -> None:
        kernel()
        self.device_us = max(self.device_us, self.host_us) + LAUNCH_DEVICE_US + self._memory_us(touched)

    def _memory_us(self, touched: Sequence[torch.Tensor]) -> float:
        missed = 0
        for tensor in touched:
            key, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
            missed += nbytes if self._l2.pop(key, None) is None else 0
            self._l2[key] = nbytes
            while sum(self._l2.values()) > self.l2_bytes:
                self._l2.popitem(last=False)
        return missed / self.bytes_per_us

    # ---- what stands in for torch.cuda and the driver

    def flush(self, times: int = 1) -> None:
        for _ in range(times):
            self.num_flushes += 1
            self.launch(self._l2.clear)
            self.device_us += 2 * self.l2_bytes / self.bytes_per_us

    def event(self, **_: Any) -> Any:
        event = SimpleNamespace(us=0.0)
        event.record = lambda: setattr(event, "us", max(self.device_us, self.host_us))
        event.query = lambda: self.host_us >= event.us
        event.synchronize = lambda: setattr(self, "host_us", max(self.host_us, event.us))
        event.elapsed_time = lambda end: (end.us - event.us) / 1e3
        return event

    def capture(self, calls: Sequence[Callable[[], Any]], num_calls: int) -> Capture | str:
        nodes = self._capturing = []
        results: deque[Any] = deque(maxlen=len(calls))
        try:
            for index in range(num_calls):
                results.append(calls[index % len(calls)]())
        except RuntimeError as error:
            return str(error)
        finally:
            self._capturing = None

        def replay() -> None:
            self.host_us += LAUNCH_HOST_US
            for kernel, touched in nodes:
                self._run(kernel, touched)

        return Capture(SimpleNamespace(replay=replay), tuple(results), not nodes)  # type: ignore[arg-type]

    def parts(self, nominal_bytes_per_second: float | None = None, gap_us: float | None = None) -> Any:
        """What a ``Trial`` takes for its GPU."""
        flush = SimpleNamespace(l2_bytes=self.l2_bytes)
        flush = type("Flush", (), {"l2_bytes": self.l2_bytes, "__call__": lambda _, times=1: self.flush(times)})()
        return SimpleNamespace(
            flush=flush, nominal_bytes_per_second=nominal_bytes_per_second or 2e6 * self.bytes_per_us, find_gap_us=lambda: gap_us
        )


@pytest.fixture
def simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGpu:
    gpu = SimulatedGpu()
    monkeypatch.setattr(timing, "_cuda", SimpleNamespace(Event=gpu.event))
    monkeypatch.setattr(timing, "capture", gpu.capture)
    monkeypatch.setattr(timing, "drain_us", lambda call, flush: (call(), max(0.0, gpu.side_us - gpu.device_us))[1])
    monkeypatch.setattr(torch.cuda, "synchronize", gpu.wait)
    return gpu
