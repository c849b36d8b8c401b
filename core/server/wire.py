"""Messages between the parent and rank 0, and the sockets that carry them. No torch, no engine imports.

Both directions are one-way PUSH/PULL sockets with msgpack bodies. The parent binds both, so that it knows the
addresses before any rank exists. Timestamps never cross a process: clocks differ.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.types import Request, RequestOutput
from metrics.stats import StepStats


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    request: Request


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Stop generating; unknown or finished ids are ignored (abort is idempotent)."""

    request_id: int


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Leave the loop now. The parent has already drained or given up on what is running."""


class PhaseChanged(msgspec.Struct, frozen=True, tag="phase"):
    """Startup progress: phase is one of load, kv, warmup, calibrate, ready; `detail` is for people."""

    phase: str
    detail: str = ""
    done: int = 0
    total: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The rank's process runs. Sent every second by every rank, whatever its loop does."""

    rank: int


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once. `effective` is the engine's effective configuration, geometry and calibration summary."""

    effective: dict[str, Any]


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """Everything one retired step produced. `stats` is None for outputs without a step (refusals, aborts)."""

    outputs: list[RequestOutput]
    stats: StepStats | None = None


class EngineFailure(msgspec.Struct, frozen=True, tag="failure"):
    """Rank 0's own account of why it ends, sent best effort before it exits."""

    phase: str
    error_type: str
    message: str
    exit_code: int


ToEngine = AddRequest | AbortRequest | Shutdown
FromEngine = PhaseChanged | Heartbeat | EngineReady | StepOutputs | EngineFailure

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
