"""The parent of a launch: binds the port, starts the ranks, runs the HTTP server, ends all of it in order.

    start ──ready──► serve ──SIGINT/SIGTERM──► drain ──idle──► exit 0
      │ signal: 130    │ a rank dies: 8           │ time is up, or SIGTERM again: 9
      ▼                ▼ (or its own code)        ▼ SIGINT again: 130

Whatever the way out: no process is left, the private directory is gone, the port is free. Knows nothing of
how people are told (an observer does that) and nothing of the engine beyond its messages. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Protocol

from core.config import EngineConfig, to_plain, without_secrets
from core.config_codec import config_sha256
from core.errors import EngineFailed, ExitCode
from core.logs import get_logger, log_effective_configuration
from core.models.builtin import ensure_builtin_model
from core.ranks import ErrorReport, LocalRanks, RankDeath
from core.server.app import bind_socket, create_app, serve_http
from core.server.frontend import Frontend
from core.server.text import TextProcessor
from core.server.wire import EngineFailure, EngineReady, FromEngine, PhaseChanged
from metrics.prometheus import ServerMetrics

WATCH_SECONDS = 0.2
# After a death the server answers a little longer: clients get their errors, and a probe can see the 503.
LINGER_SECONDS = 2.0
RANK_STOP_SECONDS = 5.0
HTTP_STOP_SECONDS = 2.0
# A rank that announced its failure but does not end is helped along after this time.
FAILED_RANK_SECONDS = 3.0
# The path of a Unix socket holds 107 bytes; this is what is left of them for the temporary directory.
MAX_TEMPORARY_ROOT = 80

log = get_logger("xspec.launcher")


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a ready server is reached."""

    url: str
    model_name: str


class LaunchObserver(Protocol):
    """What the launcher tells people, in the order in which it happens. Every call returns at once."""

    def phase_changed(self, message: PhaseChanged) -> None: ...

    def relay(self, line: str) -> None:
        """Show a line that a rank printed. Comes from another thread."""

    def ready(self, listening: Listening) -> None: ...

    def draining(self, *, running: int, limit_seconds: float) -> None: ...

    def failed(self, death: RankDeath) -> None: ...

    def close(self) -> None: ...


def launch_server(
    config: EngineConfig, observer: LaunchObserver, *, rank_module: str = "core.rank_main"
) -> int:
    """Serve until told to stop or until something dies; return the exit code. Call from the main thread.

    Raises AddressInUse before anything is started. `rank_module` is what ranks run; tests put a script there.
    """
    listener = bind_socket(config.server.host, config.server.port)
    try:
        with listener, tempfile.TemporaryDirectory(prefix="xspec-", dir=_temporary_root()) as directory:
            running = ServerLaunch(
                config, observer, listener, directory=Path(directory), rank_module=rank_module
            )
            return int(asyncio.run(running.run()))
    finally:
        observer.close()


class ServerLaunch:
    """One launch from its first process to its last."""

    def __init__(
        self,
        config: EngineConfig,
        observer: LaunchObserver,
        listener: socket.socket,
        *,
        directory: Path,
        rank_module: str,
    ) -> None:
        self.config = config
        self.observer = observer
        self.listener = listener
        self.metrics = server_metrics(config)
        self.to_engine = f"ipc://{directory}/to-engine"
        self.from_engine = f"ipc://{directory}/from-engine"
        self.frontend = Frontend(
            to_engine=self.to_engine,
            from_engine=self.from_engine,
            model_name=config.model.served_name,
            capacity=config.schedule.max_seqs_per_batch + config.server.max_queue,
            metrics=self.metrics,
            on_message=self._on_message,
        )
        self.ranks = LocalRanks(
            for_ranks(config), directory=directory, module=rank_module, relay=observer.relay
        )
        self._stop_asked = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._stop_now_code = ExitCode.INTERRUPTED
        self._model_prepared = asyncio.Event()  # the built-in model stands in the cache
        self._http_up = asyncio.Event()
        self._http_stop = asyncio.Event()
        self._failure: EngineFailure | None = None
        self._is_ready = False

    async def run(self) -> ExitCode:
        """Start everything, serve, end everything."""
        self._take_signals()
        await self.frontend.start()
        http = asyncio.create_task(self._serve_http(), name="http")
        code = ExitCode.UNEXPECTED
        try:
            self.ranks.start(to_engine=self.to_engine, from_engine=self.from_engine)
            code = await self._serve(http)
        finally:
            await self._end(http, in_order=code is ExitCode.OK)
        # Someone who lost patience during the orderly end gets the code of that.
        return self._stop_now_code if self._stop_now.is_set() else code

    async def _serve(self, http: asyncio.Task[None]) -> ExitCode:
        """Run until something ends the launch; return what it ends with."""
        watch = asyncio.create_task(self._watch(), name="watch-ranks")
        announce = asyncio.create_task(self._announce(), name="announce")
        try:
            await self._first(watch, http, until=self._stop_asked)
            if watch.done():
                return await self._fail(watch.result())
            if http.done():
                http.result()
                raise RuntimeError("the HTTP server ended without being asked")
            if not self._is_ready:
                return ExitCode.INTERRUPTED
            return await self._drain(watch)
        finally:
            watch.cancel()
            announce.cancel()

    async def _serve_http(self) -> None:
        """Serve from the moment that the model's tokenizer is there until asked to stop."""
        path = self.config.model.path
        if path is None:
            # The rank converts it where that is due; afterwards this only finds it.
            await self._model_prepared.wait()
            path = await asyncio.to_thread(ensure_builtin_model)
        text = await asyncio.to_thread(TextProcessor, path)
        # Its start and stop lines tell nothing that the launch does not tell itself, and would come last.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        app = create_app(self.frontend, text, self.config, self.metrics)
        self._http_up.set()
        await serve_http(app, self.listener, self._http_stop, graceful_seconds=HTTP_STOP_SECONDS)

    async def _announce(self) -> None:
        """When the engine is ready, say so, and log what really runs."""
        with contextlib.suppress(EngineFailed):  # the watch tells that story
            await self.frontend.wait_ready()
            await self._http_up.wait()
            self._is_ready = True
            self.ranks.phase = "serve"
            self._fill_metrics()
            settings = to_plain(self.config)
            log.info("config.effective", sources=settings.pop("sources"), settings=settings)
            speculation = self.config.speculation
            if speculation is not None and speculation.calibration is not None:
                log_effective_configuration(log, speculation.algorithm, self.frontend.effective)
            host, port = self.listener.getsockname()[:2]
            self.observer.ready(Listening(url=url_of(host, port), model_name=self.config.model.served_name))

    def _fill_metrics(self) -> None:
        """What is known only when the engine is ready and does not change afterwards."""
        speculation = self.config.speculation
        calibration = speculation.calibration if speculation is not None else None
        self.metrics.set_info(
            version=version("xspec"),
            torch=version("torch"),
            device_type=self.config.device.kind,
            cost_model=calibration.model if calibration is not None else "",
            world_size=self.config.parallel.world_size,
            config_sha256=config_sha256(self.config),
        )
        for rank in range(self.config.parallel.world_size):
            self.metrics.set_rank_up(rank, True)
        if speculation is None or calibration is None:
            self.metrics.set_policy_state("off" if speculation is None else "fixed")
        else:
            is_measured = speculation.cost_table is None
            record_costs(
                self.metrics, self.frontend.effective.get("calibration", {}), is_measured=is_measured
            )

    def _on_message(self, message: FromEngine) -> None:
        match message:
            case PhaseChanged(phase=phase):
                self.ranks.phase = phase
                if phase not in ("start", "load"):
                    self._model_prepared.set()
                self.observer.phase_changed(message)
            case EngineReady():
                self._model_prepared.set()
            case EngineFailure():
                self._failure = message

    # -- ways to end --

    async def _watch(self) -> RankDeath:
        """Return the death of the rank that failed first."""
        announced_at: float | None = None
        while (death := self.ranks.first_death()) is None:
            if self._failure is not None:
                announced_at = announced_at or time.monotonic()
                if time.monotonic() - announced_at > FAILED_RANK_SECONDS:
                    self.ranks.kill()
                    continue
            self.frontend.report_silence()
            await asyncio.sleep(WATCH_SECONDS)
        await asyncio.sleep(0.05)  # its last messages may still be in the socket: they name the phase
        report = death.report or (_report_of(self._failure) if self._failure is not None else None)
        return dataclasses.replace(death, phase=self.ranks.phase, report=report)

    async def _fail(self, death: RankDeath) -> ExitCode:
        self.frontend.fail(death.reason())
        self.metrics.set_rank_up(death.rank, False)
        self.observer.failed(death)
        if self._is_ready:
            await self._first(until=self._stop_asked, timeout=LINGER_SECONDS)
        return ExitCode(death.exit_code)

    async def _drain(self, watch: asyncio.Task[RankDeath]) -> ExitCode:
        limit = self.config.server.drain_timeout_seconds
        self.frontend.drain()
        self.observer.draining(running=self.frontend.num_active, limit_seconds=limit)
        idle = asyncio.create_task(self.frontend.wait_idle())
        try:
            await self._first(idle, watch, until=self._stop_now, timeout=limit)
        finally:
            idle.cancel()
        if self._stop_now.is_set():
            return self._stop_now_code
        if watch.done():
            return await self._fail(watch.result())
        return ExitCode.OK if idle.done() else ExitCode.DRAIN_FORCED

    async def _end(self, http: asyncio.Task[None], *, in_order: bool) -> None:
        """Leave nothing behind. Out of order means: at once."""
        if in_order:
            self.frontend.send_shutdown()
            stop = asyncio.create_task(self.ranks.stop(RANK_STOP_SECONDS))
            await self._first(stop, until=self._stop_now)
            stop.cancel()
        self.ranks.kill()
        await (
            self.frontend.stop()
        )  # open streams end with an error, so that the server need not wait for them
        self._http_stop.set()
        if not self._http_up.is_set() or self._stop_now.is_set():
            http.cancel()
        await asyncio.wait({http}, timeout=HTTP_STOP_SECONDS + 1.0)
        if not http.cancel() and not http.cancelled():
            http.exception()  # seen: what ended the launch has been told

    def _take_signals(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGINT, self._on_signal, signal.SIGINT)
        loop.add_signal_handler(signal.SIGTERM, self._on_signal, signal.SIGTERM)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays what it says
            loop.add_signal_handler(signal.SIGHUP, self._on_signal, signal.SIGHUP)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop_asked.is_set():
            self._stop_asked.set()
        elif not self._stop_now.is_set():
            if number != signal.SIGINT:
                self._stop_now_code = ExitCode.DRAIN_FORCED
            self._stop_now.set()

    async def _first(
        self, *tasks: asyncio.Task[object], until: asyncio.Event, timeout: float | None = None
    ) -> None:
        """Wait for the first of some tasks, an event, or the time."""
        event = asyncio.create_task(until.wait())
        try:
            await asyncio.wait({event, *tasks}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            event.cancel()


def server_metrics(config: EngineConfig) -> ServerMetrics:
    """The registry of one launch."""
    return ServerMetrics(
        model_name=config.model.served_name,
        max_draft_tokens=config.draft_width,
        max_model_len=config.model.max_model_len,
        drafter=config.speculation.algorithm if config.speculation else None,
        world_size=config.parallel.world_size,
        compat=config.server.metrics_compat,
    )


def record_costs(metrics: ServerMetrics, summary: Mapping[str, Any], *, is_measured: bool) -> None:
    """Record the engine's account of the step costs in use: of several contexts the worst fit."""
    metrics.set_policy_state("flat" if summary.get("flat") else "adaptive")
    fits = summary.get("fit", [])
    metrics.set_calibration(
        result="ok" if is_measured else "loaded",
        timestamp_seconds=time.time() if is_measured else None,
        mean_relative_error=max((fit["mean_relative_error"] for fit in fits), default=None),
        max_relative_error=max((fit["max_relative_error"] for fit in fits), default=None),
    )


def for_ranks(config: EngineConfig) -> EngineConfig:
    """The configuration as ranks get it: without secrets, and with the log format of the parent's stderr.

    They write into a pipe, so they could not find that out themselves.
    """
    config = without_secrets(config)
    if config.server.log_format != "auto":
        return config
    log_format: Literal["console", "json"] = "console" if sys.stderr.isatty() else "json"
    return dataclasses.replace(config, server=dataclasses.replace(config.server, log_format=log_format))


def url_of(host: str, port: int) -> str:
    """An address that a client on this machine can use."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _temporary_root() -> str | None:
    root = tempfile.gettempdir()
    return root if len(root) <= MAX_TEMPORARY_ROOT else "/tmp"


def _report_of(failure: EngineFailure) -> ErrorReport:
    return ErrorReport(
        error_type=failure.error_type,
        message=failure.message,
        traceback="",
        exit_code=failure.exit_code,
        timestamp=time.time(),
    )
