"""How many draft steps a decode batch runs: adaptive draft steps of MTP.

See docs/design.md, Adaptive draft steps. Pure Python over counts that ordinary retirement brings to the host.
One depth per batch, chosen by predicted throughput B * (1 + sum of prefix acceptance) / cost_ms(Bcap, d);
depth 0 pauses the drafter.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from core.spec.depth_costs import DepthCosts
from core.spec.draft_step_config import DraftDepthSettings

TIE_TOLERANCE = 1e-12  # relative; closer throughputs are a tie and go to the smaller depth
MIN_HORIZON = 100  # completed batches after which an observation is old, at least
HORIZON_WINDOWS = 5  # the same, in windows
PROBE_EVERY = 50  # at depth 0 one batch in so many runs depth 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthCandidate:
    depth: int
    tokens_per_second: float
    expected_tokens: float
    cost_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthDecision:
    """A scored choice. `reason`: "first", "best", "kept" (gain too small), or "no_costs"."""

    depth: int
    candidates: tuple[DepthCandidate, ...]
    reason: str

    @property
    def chosen(self) -> DepthCandidate | None:
        return next((c for c in self.candidates if c.depth == self.depth), None)


class AcceptanceWindows:
    """prefix_acceptance[j]: of the sequence-steps that verified draft j, the share with all of 1..j accepted.

    Pooled over sequences. Each position keeps the last `window_size` completed batches that observed it and
    forgets what is older than the horizon, except that position 1 keeps its newest observation.
    """

    def __init__(self, max_depth: int, window_size: int) -> None:
        self.max_depth = max_depth
        self.completed = 0  # batches, depth 0 included
        self.horizon = max(MIN_HORIZON, HORIZON_WINDOWS * window_size)
        # per position: (batch number, sequences verified there, of them accepted up to there)
        self._observed: list[deque[tuple[int, int, int]]] = [
            deque(maxlen=window_size) for _ in range(max_depth)
        ]

    def record(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Take one completed batch: per sequence how many drafts were verified (0 when paused) and accepted.

        A sequence whose drafts were capped near a limit counts only for positions that it really verified.
        """
        self.completed += 1
        for position in range(1, self.max_depth + 1):
            num_verified = sum(v >= position for v in verified)
            if num_verified:
                hits = sum(a >= position for v, a in zip(verified, accepted, strict=True) if v >= position)
                self._observed[position - 1].append((self.completed, num_verified, hits))
        self._expire()

    def observations(self, position: int) -> int:
        """Batches in the window of a position (1-based)."""
        return len(self._observed[position - 1])

    def prefix_acceptance(self) -> list[float]:
        """P(all of positions 1..j accepted), j = 1..K: never rising, extrapolated where unobserved."""
        if not self._observed[0]:
            return [1.0] * self.max_depth  # optimism until something was seen
        rates = [1.0]  # P[0]
        for window in self._observed:
            if not window:
                break
            rate = sum(hits for _, _, hits in window) / sum(count for _, count, _ in window)
            rates.append(min(rate, rates[-1]))
        ratio = rates[-1] / rates[-2] if rates[-2] > 0 else 0.0
        while len(rates) <= self.max_depth:
            rates.append(rates[-1] * ratio)
        return rates[1:]

    def _expire(self) -> None:
        for position, window in enumerate(self._observed):
            keep = 1 if position == 0 else 0
            # An observation's age counts its own batch: the newest has age 1.
            while len(window) > keep and self.completed - window[0][0] + 1 > self.horizon:
                window.popleft()


def choose_depth(
    *,
    num_sequences: int,
    prefix_acceptance: Sequence[float],
    cost_ms: Sequence[float | None],
    current_depth: int | None,
    switch_min_gain: float,
) -> DepthDecision:
    """Score depths 0..K and choose one.

    prefix_acceptance: [K]; cost_ms: [K + 1], None where a depth was not measured (no candidate). Without a
    current depth the best one is taken; else a switch needs a relative gain strictly above `switch_min_gain`.
    Ties go to the smaller depth.
    """
    candidates = []
    best: DepthCandidate | None = None
    expected = float(num_sequences)
    for depth, cost in enumerate(cost_ms):
        if depth:
            expected += num_sequences * prefix_acceptance[depth - 1]
        if cost is None:
            continue
        candidate = DepthCandidate(
            depth=depth,
            tokens_per_second=1000.0 * expected / cost,
            expected_tokens=expected,
            cost_ms=cost,
        )
        candidates.append(candidate)
        if best is None or candidate.tokens_per_second > best.tokens_per_second * (1.0 + TIE_TOLERANCE):
            best = candidate
    if best is None:
        # Nothing measured for this bucket: full depth, as fixed speculation would run.
        return DepthDecision(depth=len(cost_ms) - 1, candidates=(), reason="no_costs")
    current = next((c for c in candidates if c.depth == current_depth), None)
    if current is None:
        return DepthDecision(depth=best.depth, candidates=tuple(candidates), reason="first")
    threshold = current.tokens_per_second * (1.0 + switch_min_gain)
    if best.tokens_per_second > threshold * (1.0 + TIE_TOLERANCE):
        return DepthDecision(depth=best.depth, candidates=tuple(candidates), reason="best")
    return DepthDecision(depth=current.depth, candidates=tuple(candidates), reason="kept")


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthChoice:
    """The depth that one batch runs, and the scoring behind it (`decision.depth` differs in a probe)."""

    depth: int
    is_probe: bool
    decision: DepthDecision


@dataclass(slots=True, kw_only=True)
class _BucketState:
    decision: DepthDecision
    scored_at: int  # completed batches then


class DraftDepthPolicy:
    """Chooses the depth per decode batch: windows are global, the current depth is per request bucket."""

    def __init__(self, costs: DepthCosts, *, max_depth: int, settings: DraftDepthSettings) -> None:
        self.windows = AcceptanceWindows(max_depth, settings.window_size)
        self.num_switches = 0
        self._costs = costs
        self._max_depth = max_depth
        self._settings = settings
        self._buckets: dict[int, _BucketState] = {}
        self._paused_batches = 0

    def choose(self, *, request_bucket: int, num_sequences: int) -> DepthChoice:
        """Choose for the batch about to be submitted; the current depth stands until scoring is due."""
        state = self._buckets.get(request_bucket)
        due = state is None or self.windows.completed - state.scored_at >= self._settings.update_interval
        if state is None or due:
            decision = choose_depth(
                num_sequences=num_sequences,
                prefix_acceptance=self.windows.prefix_acceptance(),
                cost_ms=self._costs.costs_of(request_bucket, self._max_depth),
                current_depth=None if state is None else state.decision.depth,
                switch_min_gain=self._settings.switch_min_gain,
            )
            if state is not None and decision.depth != state.decision.depth:
                self.num_switches += 1
            state = _BucketState(decision=decision, scored_at=self.windows.completed)
            self._buckets[request_bucket] = state
        return self._with_probes(state.decision)

    def record(self, verified: Sequence[int], accepted: Sequence[int]) -> None:
        """Take one retired decode batch, depth 0 included."""
        self.windows.record(verified, accepted)

    def _with_probes(self, decision: DepthDecision) -> DepthChoice:
        """At depth 0 nothing would be observed any more: one batch in 50 runs depth 1, whatever it costs."""
        if decision.depth > 0 or self._max_depth == 0:
            return DepthChoice(depth=decision.depth, is_probe=False, decision=decision)
        self._paused_batches += 1
        is_probe = self._paused_batches % PROBE_EVERY == 0
        return DepthChoice(depth=int(is_probe), is_probe=is_probe, decision=decision)
