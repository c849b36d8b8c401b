"""A rank's life: assemble, warm up, calibrate, say ready, then serve messages until told to stop."""

from __future__ import annotations

from collections.abc import Callable

import zmq

from core.config import EngineConfig, to_plain
from core.devices.base import Device
from core.engine.build import Engine, Report, assemble, no_report, warm_up
from core.engine.costs import install_costs
from core.errors import RequestRejected
from core.server.wire import (
    AbortRequest,
    AddRequest,
    EngineReady,
    FromEngine,
    PhaseChanged,
    Shutdown,
    StepOutputs,
    ToEngine,
    decode_to_engine,
    encode,
)
from core.types import FinishReason, RequestOutput

IDLE_POLL_MS = 1000
SEND_LINGER_MS = 2000


def build_engine(config: EngineConfig, report: Report = no_report, *, device: Device | None = None) -> Engine:
    """An engine that is ready to serve: loaded, warmed up, calibrated. Raises XspecError with its exit code."""
    engine = assemble(config, report, device=device)
    try:
        step_seconds = warm_up(engine, report)
        install_costs(engine, report, step_seconds)
    except BaseException:
        engine.close()
        raise
    engine.effective = {**effective_configuration(engine), **engine.effective}
    return engine


def effective_configuration(engine: Engine) -> dict[str, object]:
    """Every effective setting and the captured geometry, as plain values."""
    config, scheduler = engine.config, engine.loop.scheduler
    return {
        "algorithm": config.speculation.algorithm if config.speculation else None,
        "draft_width": config.draft_width,
        "target": str(engine.target_path),
        "draft": str(engine.draft_path) if engine.draft_path else None,
        "device": engine.device.describe(),
        "vocab_size": engine.vocab_size,
        "captured_request_buckets": list(config.schedule.request_buckets),
        "captured_target_rows": {
            str(b): list(config.target_tiers(b)) for b in config.schedule.request_buckets
        },
        "captured_chunk_rows": list(scheduler.chunk_buckets),
        "kv_pages": scheduler.pages.capacity,
        "page_size": config.cache.page_size,
        "max_model_len": config.model.max_model_len,
        "lag": config.schedule.lag,
        "settings": to_plain(config),
    }


def run_rank(config: EngineConfig, to_engine_address: str, from_engine_address: str) -> None:
    """Serve one engine over the parent's sockets until Shutdown. Exceptions end the rank; its entry reports them."""
    context = zmq.Context()
    intake, outlet = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    intake.connect(to_engine_address)
    outlet.setsockopt(zmq.LINGER, SEND_LINGER_MS)
    outlet.connect(from_engine_address)

    def send(message: FromEngine) -> None:
        outlet.send(encode(message))

    engine: Engine | None = None
    try:
        engine = build_engine(
            config,
            lambda phase, detail, done, total: send(
                PhaseChanged(phase=phase, detail=detail, done=done, total=total)
            ),
        )
        send(EngineReady(effective=engine.effective))
        _serve(engine, intake, send)
    finally:
        if engine is not None:
            engine.close()
        intake.close(linger=0)
        outlet.close()
        context.term()


def _serve(engine: Engine, intake: zmq.Socket[bytes], send: Callable[[FromEngine], None]) -> None:
    while True:
        # With work to do the socket is only looked at; without, the rank sleeps on it.
        timeout = 0 if engine.has_work else IDLE_POLL_MS
        while intake.poll(timeout):
            timeout = 0
            message = decode_to_engine(intake.recv())
            if isinstance(message, Shutdown):
                return
            outputs = _take(engine, message)
            if outputs:
                send(StepOutputs(outputs=outputs))
        if not engine.has_work:
            continue
        outcome = engine.advance()
        if outcome is not None:
            send(StepOutputs(outputs=outcome.outputs, stats=outcome.stats))
        if not engine.has_work:
            engine.loop.scheduler.check_idle()


def _take(engine: Engine, message: ToEngine) -> list[RequestOutput]:
    match message:
        case AddRequest(request=request):
            try:
                engine.add(request)
            except RequestRejected as refusal:
                return [
                    RequestOutput(
                        request_id=request.request_id,
                        token_ids=[],
                        finish_reason=FinishReason.ERROR,
                        error=str(refusal),
                    )
                ]
        case AbortRequest(request_id=request_id):
            output = engine.abort(request_id)
            return [output] if output else []
    return []
