"""The vocabulary that parent and ranks share: requests, sampling parameters, results. No torch, no numpy."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request samples, already validated and with every default filled in.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 mean "off". `max_tokens` is always concrete.
    Presence and frequency count generated tokens, repetition the prompt's as well. Log-probabilities are the
    model's own, before anything here changes them.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    max_tokens: int = 16
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    min_tokens: int = 0  # no EOS and none of stop_token_ids before so many tokens
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    logprobs: int | None = (
        None  # likeliest tokens to report beside each generated one; None: no log-probabilities
    )
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: str | None = None  # what core.grammar made of a schema or an expression

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_filter(self) -> bool:
        """Whether top-k, top-p or min-p narrow the distribution."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def is_shaped(self) -> bool:
        """Whether anything but temperature and filters changes a draw, or log-probabilities are wanted."""
        return (
            self.has_penalty
            or self.min_tokens > 0
            or bool(self.logit_bias)
            or self.grammar is not None
            or self.logprobs is not None
            or self.prompt_logprobs is not None
        )

    @property
    def has_penalty(self) -> bool:
        """Whether tokens that came before change the logits."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine needs to generate: `request_id` is unique and ours, never the client's."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams


class SpecStats(msgspec.Struct, kw_only=True):
    """Speculation figures of one request, summed over its sequence-steps."""

    steps: int = 0
    proposed: int = 0
    verified: int = 0
    accepted: int = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token and of the likeliest ones at its position, likeliest first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class RequestOutput(msgspec.Struct, kw_only=True):
    """New tokens of one request in one retired step; the last one carries `finish_reason`.

    A stop token (EOS or one of stop_token_ids) is included in `token_ids` as the last entry and named in
    `stop_token_id`: text and usage layers decide what to show.
    """

    request_id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    queue_seconds: float | None = None  # intake to the first step with rows of it, by the engine's clock
    spec: SpecStats | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None  # one for each of token_ids, where asked for
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt's tokens from the second on, sent once
