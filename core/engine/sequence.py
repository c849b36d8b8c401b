"""One sequence as rank 0 knows it: what has retired, and bounds of what is in flight. No torch."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from core.engine.plan import Draws, Scores, Shaping
from core.grammar import GrammarMatcher
from core.types import FinishReason, Request, RequestOutput, SpecStats, TokenLogprobs


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
    matcher: GrammarMatcher | None = None  # where its committed tokens stand in its grammar
    prompt_scores: list[TokenLogprobs] = field(default_factory=list)
    prompt_reported: bool = False
    error: str | None = None

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

    @property
    def draws(self) -> Draws:
        return Draws.of(self.request.params)

    @property
    def shaping(self) -> Shaping:
        """What its own sampling steps need; a prompt chunk that is scored needs more."""
        return Shaping.SHAPED if self.request.params.is_shaped else Shaping.NONE

    def scores_chunk(self) -> bool:
        """Whether the log-probabilities of its prompt are still to be collected."""
        wanted = self.request.params.prompt_logprobs is not None
        return wanted and len(self.prompt_scores) < len(self.request.prompt_token_ids) - 1

    def take_prompt_scores(self, scores: Scores, first_row: int, start: int, num_tokens: int) -> None:
        """Collect those of one chunk: row i of it scored the token at position start + i + 1."""
        prompt, count = self.request.prompt_token_ids, self.request.params.prompt_logprobs or 0
        for row, position in enumerate(range(start + 1, start + 1 + num_tokens), start=first_row):
            # A preempted sequence computes its prompt again.
            if len(self.prompt_scores) + 1 == position < len(prompt):
                self.prompt_scores.append(scores.of((row,), prompt[position], count))

    def take(self, tokens: list[int], scores: Scores | None, row: int) -> RequestOutput:
        """Keep tokens up to the first that ends it, in order: stop token, end of its grammar, limit."""
        stop: int | None = None
        for index, token in enumerate(tokens):
            if token in self.stop_ids:
                stop, self.finish_reason = token, FinishReason.STOP
            elif self.matcher is not None:
                self._follow_grammar(self.matcher, token)
            if self.finish_reason is not None:
                tokens = tokens[: index + 1]
                break
        self.tokens.extend(tokens)
        assert len(self.tokens) <= self.limit, (
            f"sequence of {len(self.tokens)} tokens has the limit {self.limit}"
        )
        if self.finish_reason is None and len(self.tokens) >= self.limit:
            self.finish_reason = FinishReason.LENGTH
        queue_seconds, self.queue_seconds = self.queue_seconds, None
        output = RequestOutput(
            request_id=self.request.request_id,
            token_ids=tokens,
            finish_reason=self.finish_reason,
            stop_token_id=stop,
            spec=self.spec,
            queue_seconds=queue_seconds,
            error=self.error,
        )
        count = self.request.params.logprobs
        if count is not None and scores is not None:
            output.logprobs = [scores.of((row, i), token, count) for i, token in enumerate(tokens)]
        if self.prompt_scores and not self.prompt_reported:
            output.prompt_logprobs, self.prompt_reported = list(self.prompt_scores), True
        return output

    def _follow_grammar(self, matcher: GrammarMatcher, token: int) -> None:
        matcher.advance(token)
        if matcher.error is not None:
            self.finish_reason, self.error = FinishReason.ERROR, f"the grammar failed: {matcher.error}"
        elif matcher.is_over:
            self.finish_reason = FinishReason.STOP
