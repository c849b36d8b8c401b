"""The parent's end of the engine: numbers requests, routes results, knows whether the engine lives.

Owns the two sockets of core.server.wire. Everything runs on one event loop; no method blocks. The engine's
process is the launcher's business: it calls `fail` when a rank has died.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import zmq
import zmq.asyncio

from core.errors import EngineFailed, RequestRejected, XspecError
from core.logs import get_logger
from core.server import wire
from core.server.generation import Choice, Delta, Generation
from core.server.pulse import Pulse
from core.server.text import TextProcessor
from core.types import FinishReason, Request, RequestOutput, SamplingParams
from metrics.prometheus import ServerMetrics

log = get_logger("xspec.server")

METRICS_STATE_OF_PHASE = {"load": "loading", "kv": "loading", "warmup": "warmup", "calibrate": "calibrating"}


class EngineState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class Unavailable(RequestRejected):
    """The server cannot take the request now. `retry_after` is None when trying again is of no use."""

    def __init__(self, message: str, *, status: int, code: str, retry_after: int | None) -> None:
        super().__init__(message, status=status, code=code)
        self.retry_after = retry_after


class Frontend:
    """Requests in, generations out. `capacity` bounds the choices that run or wait at one time."""

    def __init__(
        self,
        *,
        to_engine: str,
        from_engine: str,
        model_name: str,
        capacity: int,
        metrics: ServerMetrics,
        on_message: Callable[[wire.FromEngine], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.state = EngineState.STARTING
        self.phase = "launch"
        self.detail = ""
        self.effective: dict[str, Any] = {}
        self.capacity = capacity
        self.clock = clock
        self._to_engine, self._from_engine = to_engine, from_engine
        self._model_name = model_name
        self._metrics = metrics
        self._on_message = on_message
        self._next_id = 0
        self._active: dict[int, tuple[Choice, Generation]] = {}
        self._ready = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._context: zmq.asyncio.Context | None = None
        self._reader: asyncio.Task[None] | None = None
        self._started_at = self._phase_since = clock()
        self._pulse = Pulse(clock)
        self._reported_silence: str | None = None

    # -- life --

    async def start(self) -> None:
        """Bind both sockets and begin to read. Call it before any rank is told the addresses."""
        self._context = zmq.asyncio.Context()
        self._pull = self._context.socket(zmq.PULL)
        # A plain socket: sending must be possible without awaiting, also while a request is being cancelled.
        self._push: zmq.Socket[bytes] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUSH)
        for socket, address in ((self._pull, self._from_engine), (self._push, self._to_engine)):
            # Unbounded: `capacity` bounds what is in flight, and a full socket would lose an abort.
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.LINGER, 0)
            socket.bind(address)
        self._reader = asyncio.create_task(self._read(), name="engine-reader")

    async def stop(self) -> None:
        """Close the sockets. Streams that are still open end with an error."""
        self.drain()
        self._fail_streams(
            Unavailable("the server is shutting down", status=503, code="draining", retry_after=10)
        )
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        if self._context is not None:
            self._push.close(linger=0)
            self._pull.close(linger=0)
            self._context.term()

    async def wait_ready(self) -> None:
        """Return when the engine serves; raise EngineFailed when it never will."""
        await self._ready.wait()
        if self.state is EngineState.FAILED:
            raise EngineFailed(self.detail)

    def drain(self) -> None:
        """Take no new requests; those that run go on."""
        if self.state in (EngineState.STARTING, EngineState.READY):
            self._set_state(EngineState.DRAINING, phase="drain")

    async def wait_idle(self) -> None:
        """Return when nothing runs or waits."""
        await self._idle.wait()

    def send_shutdown(self) -> None:
        """Tell rank 0 to leave its loop."""
        self._send(wire.Shutdown())

    def fail(self, reason: str) -> None:
        """The engine is gone for good: end every stream with an error. The first reason stays."""
        if self.state is not EngineState.FAILED:
            self._set_state(EngineState.FAILED, phase="failed", detail=reason)
            log.error("engine.failed", reason=reason, open_requests=len(self._active))
            self._ready.set()
        message = f"the engine failed: {reason}"
        self._fail_streams(Unavailable(message, status=503, code="engine_failed", retry_after=None))

    @property
    def is_alive(self) -> bool:
        """Liveness: whether the engine may still answer (it may also still be starting)."""
        return self.state is not EngineState.FAILED and self.silence is None

    @property
    def is_ready(self) -> bool:
        """Readiness: whether a request would be taken now."""
        return self.state is EngineState.READY and self.silence is None

    @property
    def silence(self) -> str | None:
        """What has been silent for too long while it should serve; None when all is well. It may come back."""
        if self.state not in (EngineState.READY, EngineState.DRAINING):
            return None
        return self._pulse.fault(is_busy=bool(self._active))

    def report_silence(self) -> None:
        """Log when the engine falls silent, and when it is heard again. Call it now and then."""
        silence = self.silence
        if silence is not None and self._reported_silence is None:
            log.error("engine.silent", reason=silence, open_requests=len(self._active))
        elif silence is None and self._reported_silence is not None:
            log.warning("engine.heard_again", reason=self._reported_silence)
        self._reported_silence = silence

    @property
    def num_active(self) -> int:
        return len(self._active)

    # -- requests --

    def check_available(self) -> None:
        """Refuse when no request at all can be taken now."""
        if self.state is EngineState.FAILED:
            raise Unavailable("the engine has failed", status=503, code="engine_failed", retry_after=None)
        if self.state is EngineState.DRAINING:
            raise Unavailable("the server is shutting down", status=503, code="draining", retry_after=10)
        if self.state is EngineState.STARTING:
            message = f"the server is starting (phase {self.phase})"
            raise Unavailable(message, status=503, code="starting", retry_after=5)
        if (silence := self.silence) is not None:
            raise Unavailable(silence, status=503, code="engine_silent", retry_after=10)

    def check_fits(self, num_prompts: int, *, num_choices: int) -> None:
        """Refuse more prompts, with this many choices each, than this server holds even when it is idle."""
        if num_prompts * num_choices <= self.capacity:
            return
        param, each = ("prompt", "") if num_choices == 1 else ("n", f" with {num_choices} choices each")
        message = (
            f"{param}: {num_prompts} prompts{each} are more than the {self.capacity} that this server holds"
        )
        raise RequestRejected(message, param=param)

    def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        *,
        num_choices: int = 1,
        text: TextProcessor,
        stops: Sequence[str] = (),
        skip_special_tokens: bool = True,
        endpoint: str,
        client_request_id: str,
        arrived: float,
    ) -> Generation:
        """Start one generation with `num_choices` choices per prompt: all of them, or none and RequestRejected.

        Choices are numbered prompt by prompt, as `params` are.
        """
        self.check_available()
        self.check_fits(len(prompts), num_choices=num_choices)
        if len(self._active) + len(params) > self.capacity:
            message = f"the queue is full ({len(self._active)} requests); try again later"
            raise Unavailable(message, status=429, code="queue_full", retry_after=1)
        repeated = [prompt for prompt in prompts for _ in range(num_choices)]
        choices = [
            Choice(
                request_id=self._next_id + index,
                index=index,
                sibling=index % num_choices,
                prompt_tokens=len(prompt),
                detokenizer=text.detokenizer(prompt_ids=prompt, skip_special_tokens=skip_special_tokens),
                stops=stops,
            )
            for index, prompt in enumerate(repeated)
        ]
        self._next_id += len(choices)
        facts = {"request_id": client_request_id, "endpoint": endpoint, "model": self._model_name}
        generation = Generation(
            choices, facts=facts, arrived=arrived, clock=self.clock, on_close=self._abort_unfinished
        )
        if not self._active:
            self._pulse.step()
        self._idle.clear()
        for choice, prompt, sampling in zip(choices, repeated, params, strict=True):
            self._active[choice.request_id] = (choice, generation)
            self._metrics.request_started()
            request = Request(request_id=choice.request_id, prompt_token_ids=tuple(prompt), params=sampling)
            self._send(wire.AddRequest(request))
        return generation

    def _abort_unfinished(self, generation: Generation) -> None:
        for choice in generation.choices:
            if choice.request_id in self._active:
                choice.finish_reason = FinishReason.ABORT
                self._leave(choice, generation)
                self._send(wire.AbortRequest(choice.request_id))

    def _leave(self, choice: Choice, generation: Generation) -> None:
        """A choice is over, for whatever reason: forget it and count it."""
        del self._active[choice.request_id]
        if not self._active:
            self._idle.set()
        now = self.clock()
        first, queued = choice.first_token_at, choice.queue_seconds
        self._metrics.request_finished(
            str(choice.finish_reason),
            prompt_tokens=choice.prompt_tokens,
            cached_tokens=min(choice.cached_tokens, choice.prompt_tokens),
            generation_tokens=choice.completion_tokens,
            duration_seconds=now - generation.arrived,
            time_per_output_token=choice.time_per_output_token,
            queue_seconds=queued,
            prefill_seconds=None
            if first is None or queued is None
            else max(0.0, first - generation.arrived - queued),
            decode_seconds=None if first is None else now - first,
        )

    def _send(self, message: wire.ToEngine) -> None:
        try:
            self._push.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            # No rank is connected any more; whoever watches the ranks says so through `fail`.
            log.warning("engine.unreachable", message=type(message).__name__)

    # -- results --

    async def _read(self) -> None:
        try:
            while True:
                self._handle(wire.decode_from_engine(await self._pull.recv()))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            # Without a reader every stream would hang for ever: a fault in here is the end of service.
            log.exception("engine.reader_failed")
            self.fail(f"results of the engine could not be read: {error!r}")

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Heartbeat(rank=rank):
                self._pulse.beat(rank)
                self._metrics.rank_heard(rank)
            case wire.StepOutputs():
                self._pulse.step()
                if message.stats is not None:
                    self._metrics.observe_step(message.stats)
                for output in message.outputs:
                    self._route(output)
            case wire.PhaseChanged():
                self._enter_phase(message)
            case wire.EngineReady():
                self._become_ready(message)
            case wire.EngineFailure():
                self.fail(f"{message.error_type} in phase {message.phase or self.phase}: {message.message}")
        if self._on_message is not None:
            try:
                self._on_message(message)
            except Exception:
                # Whoever watches (a progress view on a closed terminal) must not stop results.
                self._on_message = None
                log.exception("engine.watcher_failed")

    def _route(self, output: RequestOutput) -> None:
        entry = self._active.get(output.request_id)
        if entry is None:
            return  # aborted or stopped here; the engine had not heard of it yet
        choice, generation = entry
        if output.error is not None:
            choice.finish_reason = FinishReason.ERROR
            self._leave(choice, generation)
            # The engine refuses what can never run (its cache is too small) before it computes anything.
            refused = choice.completion_tokens == 0
            error = RequestRejected(output.error, param="prompt") if refused else EngineFailed(output.error)
            generation.put(error)
            return
        delta = choice.take(output)
        self._count_tokens(choice, delta, arrived=generation.arrived)
        if delta.finish_reason is not None:
            self._leave(choice, generation)
            if output.finish_reason is None:  # a stop string: only the parent knows
                self._send(wire.AbortRequest(choice.request_id))
        generation.put(delta)

    def _count_tokens(self, choice: Choice, delta: Delta, *, arrived: float) -> None:
        if delta.num_tokens == 0:
            return  # no tokens, no event: the time of the last token stays
        now = self.clock()
        if choice.last_token_at is None:
            choice.first_token_at = now
            self._metrics.first_token(now - arrived, delta.num_tokens)
        else:
            self._metrics.tokens(now - choice.last_token_at, delta.num_tokens)
            self._metrics.output_interval(now - choice.last_token_at)
        choice.last_token_at = now

    def _fail_streams(self, error: XspecError) -> None:
        for choice, generation in list(self._active.values()):
            choice.finish_reason = FinishReason.ERROR
            self._leave(choice, generation)
            generation.put(error)

    # -- states --

    def _enter_phase(self, message: wire.PhaseChanged) -> None:
        if self.state is not EngineState.STARTING:
            return
        if message.phase != self.phase:
            self._close_phase()
            self.phase = message.phase
            if (state := METRICS_STATE_OF_PHASE.get(message.phase)) is not None:
                self._metrics.set_state(state)
        progress = f"{message.done}/{message.total}" if message.total else ""
        self.detail = " ".join(part for part in (message.detail, progress) if part)

    def _close_phase(self) -> None:
        now = self.clock()
        if self.phase in METRICS_STATE_OF_PHASE:
            self._metrics.set_phase_seconds(self.phase, now - self._phase_since)
        self._phase_since = now

    def _become_ready(self, message: wire.EngineReady) -> None:
        self.effective = message.effective
        if self.state is EngineState.STARTING:
            self._close_phase()
            self._metrics.set_phase_seconds("ready", self.clock() - self._started_at)
            self._set_state(EngineState.READY, phase="ready")
        self._ready.set()

    def _set_state(self, state: EngineState, *, phase: str, detail: str = "") -> None:
        self.state, self.phase, self.detail = state, phase, detail
        self._metrics.set_state(str(state))
