"""When the engine was last heard, and when silence is a fault. Knows neither sockets nor HTTP."""

from __future__ import annotations

from collections.abc import Callable

# Ranks beat once a second from a thread of their own, long steps or not. What is silent for this long is stopped,
# swapped out or behind a dead connection; anything shorter may be a machine that is merely busy.
SILENT_SECONDS = 30.0
# Every step is reported. None takes this long: a prefill chunk of a large model on few cores takes tens of
# seconds. A loop that waits for something that never comes still beats, so requests need a bound of their own.
STALLED_SECONDS = 120.0


class Pulse:
    """Signs of life of all ranks. A rank is judged from its first beat on; startup has phases instead."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._beats: dict[int, float] = {}
        self._step_at = clock()

    def beat(self, rank: int) -> None:
        self._beats[rank] = self._clock()

    def step(self) -> None:
        """A step was reported, or the first request after an idle time went out."""
        self._step_at = self._clock()

    def fault(self, *, is_busy: bool) -> str | None:
        """Say what has been silent for too long, or None. `is_busy`: requests wait for steps."""
        now = self._clock()
        for rank, at in self._beats.items():
            if now - at > SILENT_SECONDS:
                return f"rank {rank} has been silent for {now - at:.0f} seconds"
        if is_busy and now - self._step_at > STALLED_SECONDS:
            return f"the engine has finished no step for {now - self._step_at:.0f} seconds, and requests wait"
        return None
