"""The CPU as a device: its stream is a worker thread with a FIFO of closures, its graph a recorded function.

So the pipeline is really asynchronous here too: the host plans step n while the thread computes step n - 1. PyTorch
releases the GIL inside its operators, and the host thread sleeps on an event for most of a step.
"""

from __future__ import annotations

import platform
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from core.devices.base import RowLengths
from core.engine.plan import StepExtent


class CpuEvent:
    """Set by the stream when it gets there; carries an exception of the stream to whoever waits."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self._error: BaseException | None = None

    def set(self, error: BaseException | None) -> None:
        self._error = error
        self._reached.set()

    def wait(self) -> None:
        self._reached.wait()
        if self._error is not None:
            raise self._error


class CpuGraph:
    """A recorded function: it owns no buffers of its own, its inputs are the static buffers it closes over."""

    def __init__(self, function: Callable[[StepExtent], None]) -> None:
        self._function = function

    def replay(self, extent: StepExtent) -> None:
        self._function(extent)


class CpuDevice:
    kind = "cpu"
    torch_device = torch.device("cpu")
    row_lengths = RowLengths.ROWS_ON_DEVICE

    def __init__(self, *, num_threads: int, graph_backend: str) -> None:
        self.graph_backend = graph_backend
        self.num_threads = num_threads
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        # Only the stream may own an OpenMP team. With a second one libgomp counts more threads than processors and
        # cuts the spinning of both to almost nothing: every parallel region of a step then waits for a wake-up.
        _use_threads(1)
        self._thread = threading.Thread(target=self._serve, name="cpu-stream", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        _use_threads(self.num_threads)
        with torch.inference_mode():
            while (work := self._work.get()) is not None:
                try:
                    work()
                except BaseException as error:  # an edge: handed to the next waiter, later work is skipped
                    self._error = self._error or error

    def run(self, work: Callable[[], None]) -> None:
        def unless_broken() -> None:
            if self._error is None:
                work()

        self._work.put(unless_broken)

    def record(self) -> CpuEvent:
        event = CpuEvent()
        self._work.put(lambda: event.set(self._error))
        return event

    def capture(self, function: Callable[[StepExtent], None]) -> CpuGraph:
        return CpuGraph(function)

    def describe(self) -> str:
        return f"cpu:{_cpu_model()}:{torch.backends.cpu.get_cpu_capability()}"

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(timeout=10)


def _use_threads(count: int) -> None:
    """Set the size of the calling thread's OpenMP team; it belongs to the thread that calls operators.

    Asking for it back settles it: torch otherwise takes over the last value that any thread set, at its first operator.
    """
    torch.set_num_threads(count)
    torch.get_num_threads()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
