"""The contracts of one step: what rank 0 decides, and what comes back. Plain data, no torch.

A plan fixes totals (buckets, tiers, budgets, pages); the contents of rows are known to the device alone. Lengths of
sequences with results in flight are upper bounds here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from core.types import SamplingParams, TokenLogprobs


class Draws(IntEnum):
    """What sampling a step needs; the largest need of its sequences decides for all, without changing any."""

    GREEDY = 0
    SAMPLED = 1  # some sequence has temperature > 0
    FILTERED = 2  # some sequence has top-k, top-p or min-p as well

    @classmethod
    def of(cls, params: SamplingParams) -> Draws:
        """What one sequence needs."""
        if params.is_greedy:
            return cls.GREEDY
        return cls.FILTERED if params.has_filter else cls.SAMPLED


class Shaping(IntEnum):
    """Whether logits are changed or reported; again the largest need decides, without changing other sequences."""

    NONE = 0
    SHAPED = 1  # some sequence has penalties, a bias, min_tokens, a grammar, or wants log-probabilities
    PROMPT_SCORED = 2  # some prompt chunk wants the log-probabilities of its own tokens as well


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """The captured shape that runs a step: the only graph key."""

    request_bucket: int  # sequences that may sample, padded; 0: nothing samples
    target_rows: int  # G: anchors and verify rows, padded to a tier; 0: no decode rows
    chunk_rows: int  # prompt rows, padded to a chunk bucket; 0: none
    propose_depth: int  # drafts made behind verification; 0: no draft pass
    draws: Draws = Draws.GREEDY
    shaping: Shaping = Shaping.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepExtent:
    """Host totals of one step that bound work inside a captured shape.

    Kernels that take lengths from the device ignore it; plain torch attention gathers no more than this.
    """

    context_pages: int  # pages that cover the longest sequence's upper bound, draft rows included
    rows_per_sequence: int  # most decode rows that one sequence can have
    penalties: bool = False  # some sequence's logits depend on the tokens before
    masks: bool = False  # some sequence's next token must fit a grammar
    scores: bool = False  # somebody wants log-probabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A sequence takes (or retakes, after preemption) a device row before this step runs."""

    req_idx: int
    generation: int
    num_tokens: int  # tokens known when it starts: prompt, plus what it had generated before a preemption
    limit: int  # total length at which it ends: min(prompt + max_tokens, max_model_len)
    prompt_len: int  # of the request: behind it generated tokens begin
    params: SamplingParams
    stop_ids: tuple[int, ...]  # tokens that may not be drawn before params.min_tokens
    history: tuple[int, ...]  # its num_tokens tokens if penalties count them, else nothing
    seed: int  # of the counter-based draws, 64 bit


@dataclass(frozen=True, slots=True, kw_only=True)
class PageUpdate:
    """Pages appended to a sequence: entries first_index .. of its row of the page table."""

    req_idx: int
    first_index: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """A sequence with an anchor on the device. draft_limit is an upper bound; the device knows the exact one."""

    req_idx: int
    generation: int
    draft_limit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Prompt tokens start .. start + len(token_ids) of a sequence. `samples` marks the last chunk."""

    req_idx: int
    generation: int
    start: int
    token_ids: tuple[int, ...]
    next_token_id: int | None  # the token behind the chunk, None behind the last one
    pages: tuple[int, ...]  # every page of the sequence up to the end of the chunk
    samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetQuestion:
    """What a policy may know when it chooses the budget of a step, apart from what it kept of retired ones."""

    step: int
    request_bucket: int  # 0: nothing samples
    rows: tuple[DecodeRow, ...]
    max_kv_length: int  # upper bound over the sequences that sample
    transient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetChoice:
    """How many rows one step verifies and why. Predictions are None where nothing was predicted."""

    target_rows: int
    propose_depth: int  # drafts that this step makes for the next one; 0 pauses the drafter
    decided: bool = False  # by a policy from feedback and costs
    fallback: str | None = None  # why a deciding policy took full width
    expected_tokens: float | None = None
    predicted_seconds: float | None = None
    plain_seconds: float | None = None
    nan_confidences: int = 0
    feedback_step: int | None = None  # newest step whose results were used


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything about step `step` that ranks must agree on. Rank 0 makes it, others obey."""

    step: int
    shape: StepShape
    decode: tuple[DecodeRow, ...]
    chunks: tuple[PrefillChunk, ...]
    admissions: tuple[Admission, ...]
    page_updates: tuple[PageUpdate, ...]
    extent: StepExtent
    verify_depth: int  # what the last step that sampled proposed
    choice: BudgetChoice
    shard_budgets: tuple[int, ...]  # draft rows per DP shard
    # (index into sampling_rows, [ceil(V / 32)] int32 words of allowed tokens) of sequences that follow a grammar
    masks: tuple[tuple[int, np.ndarray], ...] = ()

    @property
    def transient(self) -> bool:
        """A step with prompt rows: it makes no budget decision and enters no cost comparison."""
        return bool(self.chunks)

    @property
    def sampling_rows(self) -> list[tuple[int, int]]:
        """(req_idx, generation) in the order of result rows: decode rows, then chunks that end their prompt."""
        rows = [(row.req_idx, row.generation) for row in self.decode]
        return rows + [(chunk.req_idx, chunk.generation) for chunk in self.chunks if chunk.samples]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """Log-probabilities of tokens [...] and of the TOP_LOGPROBS likeliest at their positions, by the model alone."""

    logprob: np.ndarray  # [...] float32
    top_ids: np.ndarray  # [..., K] int64
    top_logprobs: np.ndarray  # [..., K] float32, falling

    def of(self, index: tuple[int, ...], token_id: int, count: int) -> TokenLogprobs:
        """What a request that wants `count` of the likeliest tokens gets for the token at `index`."""
        tops = zip(self.top_ids[index][:count], self.top_logprobs[index][:count], strict=True)
        return TokenLogprobs(
            token_id, float(self.logprob[index]), tuple((int(token), float(value)) for token, value in tops)
        )


TOP_LOGPROBS = 20  # K, as many as the OpenAI API can ask for


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Host copies of one step's results; row i belongs to plan.sampling_rows[i]."""

    plan: StepPlan
    token_ids: np.ndarray = field(repr=False)  # [N, W + 1] int64: the first num_emitted of a row count
    num_emitted: np.ndarray  # [N] int64: accepted + 1; 0 for a sequence that had reached its limit
    num_verified: np.ndarray  # [N] int64: draft rows verified
    executed_rows: int  # decode rows that went through the target, counted where they ran
    confidence: np.ndarray | None = field(repr=False)  # [N, W] float32 of the drafts made in this step
    scores: Scores | None = field(repr=False, default=None)  # [N, W + 1] of token_ids
    prompt_scores: Scores | None = field(repr=False, default=None)  # [C] of the token behind each prompt row

    @property
    def num_accepted(self) -> np.ndarray:
        accepted: np.ndarray = np.maximum(self.num_emitted - 1, 0)
        return accepted
