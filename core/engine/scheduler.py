"""Decides which sequences run in a step and which pages they may write. No torch, no phases.

A sequence has a length that is known (results retired) and an upper bound (results in flight). Its prompt is
scheduled in chunks; after the last chunk it samples in every step until it ends. Nothing here knows whether a step
speculates: `draft_width` is 0 without a drafter, and that is all.

Page rule: a step may write positions below min(limit, bound + W + 1), and a drafter W temporary rows behind those.
Pages return to the pool when the last launched step that names the sequence has retired.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence

from core.engine.plan import (
    Admission,
    BudgetChoice,
    BudgetQuestion,
    DecodeRow,
    Draws,
    PageUpdate,
    PrefillChunk,
    Shaping,
    StepExtent,
    StepPlan,
    StepResult,
    StepShape,
)
from core.engine.sequence import SequenceState
from core.grammar import GrammarMatcher
from core.kvcache.pages import PagePool
from core.types import FinishReason, Request, RequestOutput

ChooseBudget = Callable[[BudgetQuestion], BudgetChoice]
NOTHING_SAMPLES = BudgetChoice(target_rows=0, propose_depth=0)


class Scheduler:
    """Owns all sequences of one engine and the page pool."""

    def __init__(
        self,
        *,
        pages: PagePool,
        max_seqs: int,
        max_model_len: int,
        draft_width: int,
        prefill_chunk_tokens: int,
        request_buckets: Sequence[int],
        chunk_buckets: Sequence[int],
        eos_token_ids: frozenset[int],
    ) -> None:
        self.pages = pages
        self.max_seqs = max_seqs
        self.max_model_len = max_model_len
        self.draft_width = draft_width
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.request_buckets = tuple(request_buckets)
        self.chunk_buckets = tuple(chunk_buckets)
        self.eos_token_ids = eos_token_ids
        self.waiting: deque[SequenceState] = deque()
        self.running: list[SequenceState] = []  # in order of admission
        self.num_preemptions = 0  # since whoever counts them last took them
        self.prefill_first = (
            False  # no decode rows while a prompt is unfinished: calibration fills batches so
        )
        self._by_id: dict[int, SequenceState] = {}
        # A finished sequence keeps its row until its launched steps have retired, so twice as many rows as
        # sequences keep admission from waiting for that.
        self._rows: list[SequenceState | None] = [None] * (2 * max_seqs)
        self._generations = [0] * (2 * max_seqs)
        self._ended: list[SequenceState] = []  # finished, pages still named by a launched step
        self._proposed_depth = 0
        self._readmitted: list[SequenceState] = []  # restarted since the last plan
        self._starved = False  # a running sequence found no page in the plan being made

    def refusal(self, request: Request) -> str | None:
        """Why this request can never run here, or None."""
        prompt, needed = len(request.prompt_token_ids), 0
        if prompt == 0:
            return "the prompt has no tokens"
        if prompt >= self.max_model_len:
            return f"the prompt has {prompt} tokens; at most {self.max_model_len - 1} fit max_model_len"
        limit = min(prompt + request.params.max_tokens, self.max_model_len)
        needed = self.pages.pages_for(limit + self.draft_width)
        if needed > self.pages.capacity:
            return f"it needs {needed} KV pages and this engine has {self.pages.capacity}; lower max_tokens"
        return None

    def add(self, request: Request, matcher: GrammarMatcher | None = None) -> None:
        """Queue a request that `refusal` accepts, with a matcher if it has a grammar."""
        params = request.params
        sequence = SequenceState(
            request=request,
            limit=min(len(request.prompt_token_ids) + params.max_tokens, self.max_model_len),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            stop_ids=frozenset(params.stop_token_ids)
            | (frozenset() if params.ignore_eos else self.eos_token_ids),
            tokens=list(request.prompt_token_ids),
            matcher=matcher,
        )
        self._by_id[request.request_id] = sequence
        self.waiting.append(sequence)

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request now; None when it is unknown or already finished (abort is idempotent)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return None
        self._finish(sequence, FinishReason.ABORT)
        return RequestOutput(
            request_id=request_id, token_ids=[], finish_reason=FinishReason.ABORT, spec=sequence.spec
        )

    def restart(self, request_id: int) -> None:
        """Take a running sequence back to the end of its prompt, whose KV stays where it is.

        Calibration starts every point so. Nothing of the sequence may be in flight.
        """
        seq = self._by_id[request_id]
        assert seq.in_flight == 0, f"request {request_id} has {seq.in_flight} steps in flight"
        assert not seq.in_prefill, f"request {request_id} is still in its prompt"
        seq.tokens = list(seq.request.prompt_token_ids)
        self._take_row(seq, seq.req_idx)
        seq.num_scheduled = seq.prefill_len - 1
        self._readmitted.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self._ended)

    def plan(self, step: int, choose: ChooseBudget) -> StepPlan | None:
        """Plan step `step`, or None when nothing can run before more results retire.

        `choose` is the speculator's host verb; it fixes the tier and the next depth.
        """
        updates: list[PageUpdate] = []
        admissions: list[Admission] = []
        for seq in self._readmitted:
            self._announce(seq, updates, admissions)
        self._readmitted.clear()
        decode = self._plan_decode(updates)
        chunks = self._plan_chunks(updates, admissions, room=self.prefill_chunk_tokens)
        if not decode and not chunks:
            return None
        finishing = [seq for seq, chunk in chunks if chunk.samples]
        sampling = [seq for seq, _ in decode] + finishing
        bucket = _round_up(len(sampling), self.request_buckets) if sampling else 0
        longest = max(self._extent(seq) for seq in sampling) if sampling else 0
        rows = tuple(row for _, row in decode)
        choice = NOTHING_SAMPLES
        if sampling:
            choice = choose(
                BudgetQuestion(
                    step=step,
                    request_bucket=bucket,
                    rows=rows,
                    max_kv_length=longest,
                    transient=bool(chunks),
                )
            )
        prompt_rows = sum(len(chunk.token_ids) for _, chunk in chunks)
        shaping = max((seq.shaping for seq in sampling), default=Shaping.NONE)
        if any(seq.scores_chunk() for seq, _ in chunks):
            shaping = Shaping.PROMPT_SCORED
        plan = StepPlan(
            step=step,
            shape=StepShape(
                request_bucket=bucket,
                target_rows=choice.target_rows if decode else 0,
                chunk_rows=_round_up(prompt_rows, self.chunk_buckets) if chunks else 0,
                propose_depth=choice.propose_depth,
                draws=max((seq.draws for seq in sampling), default=Draws.GREEDY),
                shaping=shaping,
            ),
            decode=rows,
            chunks=tuple(chunk for _, chunk in chunks),
            admissions=tuple(admissions),
            page_updates=tuple(updates),
            extent=StepExtent(
                context_pages=self.pages.pages_for(longest + self.draft_width) if sampling else 0,
                rows_per_sequence=min(self.draft_width, choice.target_rows - len(decode)) + 1
                if decode
                else 0,
                penalties=any(seq.request.params.has_penalty for seq in sampling),
                masks=any(seq.matcher is not None for seq in sampling),
                scores=any(seq.request.params.logprobs is not None for seq in sampling),
            ),
            verify_depth=self._proposed_depth,
            choice=choice,
            shard_budgets=(max(choice.target_rows - len(decode), 0),),
            masks=tuple(
                (row, seq.matcher.mask()) for row, seq in enumerate(sampling) if seq.matcher is not None
            ),
        )
        self._launched(plan, sampling, [seq for seq, _ in chunks])
        return plan

    def _plan_decode(self, updates: list[PageUpdate]) -> list[tuple[SequenceState, DecodeRow]]:
        planned: list[tuple[SequenceState, DecodeRow]] = []
        self._starved = False
        if self.prefill_first and (self.waiting or any(seq.in_prefill for seq in self.running)):
            return planned
        for seq in list(self.running):
            if self._rows[seq.req_idx] is not seq:
                continue  # preempted by one that came earlier in this very loop
            if seq.preempting or seq.in_prefill or seq.certain >= seq.limit:
                continue
            if seq.matcher is not None and seq.in_flight:
                continue  # its mask needs the token in flight
            if not self._grow(
                seq, min(seq.limit, seq.bound + self.draft_width + 1) + self.draft_width, updates
            ):
                self._starved = True
                self._preempt_one()
                continue
            remaining = seq.limit - seq.certain
            limit = min(self.draft_width, remaining - 1) if seq.has_drafts and seq.matcher is None else 0
            planned.append(
                (
                    seq,
                    DecodeRow(
                        req_idx=seq.req_idx,
                        generation=seq.generation,
                        draft_limit=limit,
                    ),
                )
            )
        return planned

    def _plan_chunks(
        self, updates: list[PageUpdate], admissions: list[Admission], *, room: int
    ) -> list[tuple[SequenceState, PrefillChunk]]:
        chunks = []
        for seq in self.running:
            if room > 0 and seq.in_prefill and not seq.preempting:
                chunks.append((seq, self._chunk(seq, room)))
                room -= len(chunks[-1][1].token_ids)
        # Pages that come back go to running sequences first: nobody is admitted while one of them lacks pages.
        while room > 0 and self.waiting and not self._starved and len(self.running) < self.max_seqs:
            if not self._admit(self.waiting[0], updates, admissions):
                break
            seq = self.waiting.popleft()
            chunks.append((seq, self._chunk(seq, room)))
            room -= len(chunks[-1][1].token_ids)
        return chunks

    def _chunk(self, seq: SequenceState, room: int) -> PrefillChunk:
        start = seq.num_scheduled
        end = min(start + room, seq.prefill_len)
        last = end == seq.prefill_len
        return PrefillChunk(
            req_idx=seq.req_idx,
            generation=seq.generation,
            start=start,
            token_ids=tuple(seq.tokens[start:end]),
            next_token_id=None if last else seq.tokens[end],
            pages=tuple(seq.pages[: self.pages.pages_for(end)]),
            samples=last,
        )

    def _admit(self, seq: SequenceState, updates: list[PageUpdate], admissions: list[Admission]) -> bool:
        """Give the sequence a row and pages for its whole prompt and its first drafts."""
        if None not in self._rows:
            return False  # rows of ended sequences come back when their launched steps have retired
        if not self._grow_unplaced(seq, len(seq.tokens) + self.draft_width + 1):
            return False
        self._take_row(seq, self._rows.index(None))
        if seq.num_admissions == 0:
            seq.queue_seconds = time.monotonic() - seq.queued_at
        seq.num_admissions += 1
        self.running.append(seq)
        self._announce(seq, updates, admissions)
        return True

    def _take_row(self, seq: SequenceState, req_idx: int) -> None:
        """A new tenancy of a device row, at the beginning of its prompt."""
        seq.req_idx = req_idx
        self._rows[req_idx] = seq
        self._generations[req_idx] += 1
        seq.generation = self._generations[req_idx]
        seq.num_scheduled, seq.prefill_len = 0, len(seq.tokens)
        seq.has_drafts = False

    def _announce(self, seq: SequenceState, updates: list[PageUpdate], admissions: list[Admission]) -> None:
        """Tell the device about a tenancy: pages and parameters."""
        updates.append(PageUpdate(req_idx=seq.req_idx, first_index=0, pages=tuple(seq.pages)))
        admissions.append(
            Admission(
                req_idx=seq.req_idx,
                generation=seq.generation,
                num_tokens=len(seq.tokens),
                limit=seq.limit,
                prompt_len=len(seq.request.prompt_token_ids),
                params=seq.request.params,
                stop_ids=tuple(seq.stop_ids),
                history=tuple(seq.tokens) if seq.request.params.has_penalty else (),
                seed=seq.seed,
            )
        )

    def _grow_unplaced(self, seq: SequenceState, num_positions: int) -> bool:
        taken = self.pages.take(max(self.pages.pages_for(num_positions) - len(seq.pages), 0))
        if taken is None:
            return False
        seq.pages.extend(taken)
        return True

    def _grow(self, seq: SequenceState, num_positions: int, updates: list[PageUpdate]) -> bool:
        before = len(seq.pages)
        if not self._grow_unplaced(seq, num_positions):
            return False
        if len(seq.pages) > before:
            updates.append(
                PageUpdate(req_idx=seq.req_idx, first_index=before, pages=tuple(seq.pages[before:]))
            )
        return True

    def _extent(self, seq: SequenceState) -> int:
        """Upper bound of its KV length behind the step being planned."""
        return min(seq.limit, seq.bound + self.draft_width + 1)

    def _preempt_one(self) -> None:
        """Stop the youngest sequence; it resumes by recomputation once its in-flight results are applied."""
        if any(seq.preempting for seq in self.running):
            return  # pages are already on their way back
        victim = self.running[-1]
        victim.preempting = True
        self.num_preemptions += 1
        self._requeue_if_idle(victim)

    def _requeue_if_idle(self, seq: SequenceState) -> None:
        if seq.preempting and seq.in_flight == 0:
            self._vacate(seq)
            seq.preempting = False
            self.waiting.appendleft(seq)

    def _launched(self, plan: StepPlan, sampling: list[SequenceState], chunked: list[SequenceState]) -> None:
        for seq, chunk in zip(chunked, plan.chunks, strict=True):
            seq.num_scheduled += len(chunk.token_ids)
            seq.in_flight += 1
        for index, seq in enumerate(sampling):
            decodes = index < len(plan.decode)
            seq.pending.append(plan.decode[index].draft_limit + 1 if decodes else 1)
            seq.in_flight += decodes
            seq.has_drafts = plan.choice.propose_depth > 0
        if sampling:
            self._proposed_depth = plan.choice.propose_depth

    def apply(self, result: StepResult) -> tuple[list[RequestOutput], list[int]]:
        """Apply one retired step. Returns outputs, and per result row the tokens kept (-1: nobody's any more)."""
        outputs: list[RequestOutput] = []
        kept: list[int] = []
        self._take_prompt_scores(result)
        finished_chunks = [c for c in result.plan.chunks if not c.samples]
        for row, (req_idx, generation) in enumerate(result.plan.sampling_rows):
            seq = self._sequence(req_idx, generation)
            if seq is None:
                kept.append(-1)
                continue
            seq.in_flight -= 1
            seq.pending.popleft()
            count = int(result.num_emitted[row])
            if seq.finish_reason is not None or count == 0:
                kept.append(-1)
            else:
                self._count(seq, result, row)
                output = seq.take([int(t) for t in result.token_ids[row, :count]], result.scores, row)
                if output.finish_reason is not None:
                    self._finish(seq, output.finish_reason)
                outputs.append(output)
                kept.append(len(output.token_ids))
            self._settle(seq)
        for chunk in finished_chunks:
            seq = self._sequence(chunk.req_idx, chunk.generation)
            if seq is not None:
                seq.in_flight -= 1
                self._settle(seq)
        return outputs, kept

    def _take_prompt_scores(self, result: StepResult) -> None:
        if result.prompt_scores is None:
            return
        first_row = 0
        for chunk in result.plan.chunks:
            seq = self._sequence(chunk.req_idx, chunk.generation)
            if seq is not None and seq.scores_chunk():
                seq.take_prompt_scores(result.prompt_scores, first_row, chunk.start, len(chunk.token_ids))
            first_row += len(chunk.token_ids)

    def _count(self, seq: SequenceState, result: StepResult, row: int) -> None:
        if row < len(result.plan.decode):
            seq.spec.steps += 1
            seq.spec.verified += int(result.num_verified[row])
            seq.spec.accepted += int(result.num_accepted[row])
        seq.spec.proposed += result.plan.choice.propose_depth

    def _finish(self, seq: SequenceState, reason: FinishReason) -> None:
        seq.finish_reason = reason
        seq.preempting = False  # its pages come back anyway, and it must never be queued again
        self._by_id.pop(seq.request.request_id, None)
        if seq in self.waiting:
            self.waiting.remove(seq)
        if seq in self.running:
            self.running.remove(seq)
            self._ended.append(seq)
            self._settle(seq)

    def _settle(self, seq: SequenceState) -> None:
        """Free what no launched step names any more."""
        if seq.in_flight > 0:
            return
        if seq in self._ended:
            self._ended.remove(seq)
            self._vacate(seq)
        else:
            self._requeue_if_idle(seq)

    def _vacate(self, seq: SequenceState) -> None:
        if seq in self.running:
            self.running.remove(seq)
        self.pages.release(seq.pages)
        seq.pages = []
        self._rows[seq.req_idx] = None

    def _sequence(self, req_idx: int, generation: int) -> SequenceState | None:
        seq = self._rows[req_idx]
        return seq if seq is not None and seq.generation == generation else None

    def check_idle(self) -> None:
        """Nothing is left behind once all work is done."""
        assert not self.has_work, "work is left at idle"
        assert not self._by_id, f"sequences {sorted(self._by_id)} are left at idle"
        assert self.pages.num_used == 0, f"{self.pages.num_used} pages are held at idle"
        self.pages.check_integrity()


def _round_up(value: int, buckets: Sequence[int]) -> int:
    """Smallest captured size that holds `value`."""
    return next(bucket for bucket in buckets if bucket >= value)
