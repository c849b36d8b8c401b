"""What the engine asks of a device. The only folder that names cuda or npu.

Work is ordered by one stream per rank; the host waits on one event per step. A graph is a captured function over
static buffers: replaying it reads what the buffers hold when the stream reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

import torch

from core.engine.plan import StepExtent


class RowLengths(Enum):
    """How a device's attention operator takes the row lengths of decode and verify rows."""

    ROWS_ON_DEVICE = "device tensors"
    ROWS_ON_HOST = "host lists"
    ONE_TOKEN_ROWS = "one row per token, its context length on the device"


class Event(Protocol):
    def wait(self) -> None:
        """Block the host until everything before the event has run; raise what the stream raised."""
        ...


class Graph(Protocol):
    def replay(self, extent: StepExtent) -> None:
        """Run the captured function on the stream."""
        ...


class Device(Protocol):
    kind: str
    torch_device: torch.device
    graph_backend: str
    row_lengths: RowLengths

    def run(self, work: Callable[[], None]) -> None:
        """Order `work` on the stream and return at once."""
        ...

    def record(self) -> Event:
        """An event behind everything ordered so far."""
        ...

    def capture(self, function: Callable[[StepExtent], None]) -> Graph:
        """Capture `function(extent)`; called on the stream, once per shape, at startup."""
        ...

    def describe(self) -> str:
        """For compatibility fields of cost bundles: what the measured costs depend on."""
        ...

    def close(self) -> None: ...


def open_device(kind: str, *, num_threads: int, graph_backend: str) -> Device:
    """The device layer of `kind`. cuda and npu execution are refused by resolve() for now."""
    if kind == "cpu":
        from core.devices.cpu import CpuDevice

        return CpuDevice(num_threads=num_threads, graph_backend=graph_backend)
    raise NotImplementedError(f"device kind {kind!r} has no execution layer yet; resolve() refuses it")
