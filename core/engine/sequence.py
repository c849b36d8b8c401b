"""One sequence as rank 0 knows it: what has retired, and bounds of what is in flight. No torch."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from core.types import FinishReason, Request, SpecStats


@dataclass(slots=True, eq=False)
class SequenceState:
    """One request's life on rank 0. eq=False: identity, so that it can be kept in sets."""

    request: Request
    limit: int  # total length at which it ends
    seed: int
    stop_ids: frozenset[int]
    tokens: list[int]  # prompt and everything retired
    req_idx: int = -1
    generation: int = -1
    pages: list[int] = field(default_factory=list)
    num_scheduled: int = 0  # prompt tokens launched since the last admission
    prefill_len: int = 0  # tokens to prefill since the last admission
    in_flight: int = 0  # launched steps that name it and have not retired
    pending: deque[int] = field(default_factory=deque)  # most tokens each in-flight sampling step can add
    has_drafts: bool = False
    preempting: bool = False
    finish_reason: FinishReason | None = None
    num_admissions: int = 0
    queued_at: float = field(default_factory=time.monotonic)
    queue_seconds: float | None = None  # until its first admission; None again once it was reported
    spec: SpecStats = field(default_factory=SpecStats)

    @property
    def in_prefill(self) -> bool:
        return self.num_scheduled < self.prefill_len

    @property
    def bound(self) -> int:
        """Most tokens it can have once every launched step has retired."""
        return min(self.limit, len(self.tokens) + sum(self.pending))

    @property
    def certain(self) -> int:
        """Fewest tokens it can have then: every sampling step adds at least one."""
        return min(self.limit, len(self.tokens) + len(self.pending))
