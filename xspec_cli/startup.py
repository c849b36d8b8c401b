"""What people see of a launch: phases with times and progress, where it listens, why it ended.

On a terminal a live table on stderr; elsewhere one log line per phase, and no escape code. The ready line
goes to stdout in both cases, for scripts that wait for it.
"""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import Protocol, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from core.launcher import Listening
from core.logs import get_logger
from core.ranks import RankDeath
from core.server.wire import PhaseChanged

PHASES = {
    "start": "start the rank",
    "load": "load the model",
    "kv": "allocate the KV cache",
    "warmup": "warm up and capture graphs",
    "calibrate": "calibrate step costs",
}
PROGRESS_LOG_SECONDS = 5.0
REFRESH_SECONDS = 0.125
# Whoever writes to the terminal holds this: the loop, the thread that relays a rank's lines, the one that redraws.
# rich composes "up five lines, text, table" before it writes it, so two writers would erase each other's lines.
_WRITING = threading.RLock()


@dataclass(slots=True)
class PhaseTime:
    """One phase: when it began and ended (monotonic seconds), and how far it is."""

    begin: float
    end: float | None = None
    detail: str = ""
    done: int = 0
    total: int = 0

    def elapsed_seconds(self) -> float:
        return (time.monotonic() if self.end is None else self.end) - self.begin

    def progress(self) -> str:
        return f"{self.done}/{self.total}" if self.total else ""

    def is_told(self) -> bool:
        """Whether the detail says something: that of the last of many items does not outlive the phase."""
        return self.end is None or self.total <= 1


class PhaseClock:
    """Turns PhaseChanged messages into phases with times. A phase ends when the next one begins."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.current = "start"
        self.phases: dict[str, PhaseTime] = {"start": PhaseTime(begin=self.began)}

    def take(self, message: PhaseChanged) -> bool:
        """Apply a message; True if it begins a new phase."""
        is_new = message.phase != self.current
        if is_new:
            now = time.monotonic()
            self.phases[self.current].end = now
            self.current = message.phase
            self.phases.setdefault(message.phase, PhaseTime(begin=now))
        phase = self.phases[message.phase]
        phase.detail, phase.done, phase.total = message.detail, message.done, message.total
        return is_new

    def finish(self) -> None:
        """The engine is ready: no phase runs any more."""
        phase = self.phases[self.current]
        phase.end = time.monotonic() if phase.end is None else phase.end

    def total_seconds(self) -> float:
        return time.monotonic() - self.began


class StartupDisplay(Protocol):
    """How phases are shown until the engine is ready."""

    def phase_changed(self, message: PhaseChanged) -> None: ...

    def finish(self) -> None:
        """The engine is ready."""
        ...

    def close(self) -> None: ...


class LogDisplay:
    """One log line per phase, and progress every few seconds: for files, pipes and service managers."""

    def __init__(self) -> None:
        self.clock = PhaseClock()
        self._logger = get_logger("xspec.startup")
        self._last_progress = time.monotonic()

    def phase_changed(self, message: PhaseChanged) -> None:
        if message.phase == "ready":
            return
        previous = self.clock.current
        if self.clock.take(message):
            seconds = round(self.clock.phases[previous].elapsed_seconds(), 2)
            self._logger.info(
                "startup.phase",
                phase=message.phase,
                detail=message.detail,
                previous_phase=previous,
                previous_seconds=seconds,
            )
        elif message.total and time.monotonic() - self._last_progress >= PROGRESS_LOG_SECONDS:
            self._last_progress = time.monotonic()
            self._logger.info(
                "startup.progress",
                phase=message.phase,
                done=message.done,
                total=message.total,
                detail=message.detail,
            )

    def finish(self) -> None:
        self.clock.finish()

    def close(self) -> None:
        pass


class LiveDisplay:
    """A table of phases that redraws itself; what else is written to stderr appears above it."""

    def __init__(self, console: Console) -> None:
        self.clock = PhaseClock()
        self._spinner = Spinner("dots")
        self._closed = threading.Event()
        self._live = Live(
            console=console, get_renderable=self._render, auto_refresh=False, redirect_stdout=False
        )
        with _WRITING:
            self._live.start(refresh=True)
        self._redrawing = threading.Thread(target=self._redraw, name="startup-table", daemon=True)
        self._redrawing.start()

    def phase_changed(self, message: PhaseChanged) -> None:
        self.clock.take(message)

    def finish(self) -> None:
        self.clock.finish()

    def close(self) -> None:
        with _WRITING:
            self._closed.set()
            self._live.stop()
        self._redrawing.join()

    def _redraw(self) -> None:
        while not self._closed.wait(REFRESH_SECONDS):
            with _WRITING:
                if not self._closed.is_set():
                    self._live.refresh()

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, phase in list(self.clock.phases.items()):
            if name not in PHASES:
                continue
            seconds = f"{phase.elapsed_seconds():6.1f} s"
            detail = Text(phase.detail if phase.is_told() else "", style="dim")
            table.add_row(self._mark(phase), PHASES[name], seconds, phase.progress(), detail)
        return Group(table)

    def _mark(self, phase: PhaseTime) -> RenderableType:
        if phase.end is not None:
            return Text("✓", style="green")
        return Text("✗", style="red") if self._closed.is_set() else self._spinner


def startup_display() -> StartupDisplay:
    """The display that fits stderr."""
    console = Console(stderr=True)
    return LiveDisplay(console) if console.is_terminal else LogDisplay()


class CurrentStderr:
    """A stream that writes to whatever sys.stderr is now, so that log lines appear above a live table."""

    def write(self, text: str) -> int:
        with _WRITING:
            return sys.stderr.write(text)

    def flush(self) -> None:
        with _WRITING:
            sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()


def current_stderr() -> TextIO:
    return cast(TextIO, CurrentStderr())


class LaunchView:
    """The launcher's mouth: implements `core.launcher.LaunchObserver`."""

    def __init__(self) -> None:
        self._display = startup_display()
        self._began = time.monotonic()

    def phase_changed(self, message: PhaseChanged) -> None:
        self._display.phase_changed(message)

    def ready(self, listening: Listening) -> None:
        self._display.finish()
        self.close()
        seconds = time.monotonic() - self._began
        print(
            f"xspec is ready: {listening.url}/v1 (model {listening.model_name}, started in {seconds:.1f} s;"
            f" metrics {listening.url}/metrics)",
            flush=True,
        )

    def relay(self, line: str) -> None:
        with _WRITING:
            print(line, file=sys.stderr, flush=True)

    def draining(self, *, running: int, limit_seconds: float) -> None:
        if not sys.stderr.isatty():
            get_logger("xspec.launcher").info("launch.draining", running=running, limit_seconds=limit_seconds)
        elif running:
            who = "1 running request gets" if running == 1 else f"{running} running requests get"
            limit = f"up to {limit_seconds:g} s; again to stop at once"
            print(f"stopping: {who} {limit}", file=sys.stderr, flush=True)
        else:
            print("stopping", file=sys.stderr, flush=True)

    def failed(self, death: RankDeath) -> None:
        self.close()
        print(root_cause(death), file=sys.stderr, flush=True)

    def close(self) -> None:
        self._display.close()


def root_cause(death: RankDeath) -> str:
    """The one account of a failed launch: rank, phase, reason; traceback and last lines where they help."""
    if death.is_user_error:
        assert death.report is not None
        where = f"rank {death.rank}, phase {death.phase!r}: {death.report.error_type}"
        return f"error: {death.report.message}\n({where})"
    head = f"xspec: rank {death.rank} failed in phase {death.phase!r}: {death.reason()}"
    parts = [head]
    if death.report is not None:
        parts.append(death.report.traceback.rstrip())
    if death.last_lines:
        parts.append(
            "\n".join([f"last lines of rank {death.rank}:", *(f"  {line}" for line in death.last_lines)])
        )
    rule = "=" * 78
    return "\n".join([rule, ("\n" + "-" * 78 + "\n").join(parts), rule])
