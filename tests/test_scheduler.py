"""The scheduler alone: random arrivals, aborts and scarce pages for thousands of steps, against a scripted device."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from core.engine.plan import BudgetChoice, BudgetQuestion, StepPlan, StepResult
from core.engine.scheduler import Scheduler
from core.kvcache.pages import PagePool
from core.types import Request, SamplingParams

BUCKETS, CHUNKS, EOS = (1, 2, 4, 6), (8, 16), 7


class ScriptedDevice:
    """Emits between one and draft_limit + 1 tokens per row, never beyond a sequence's limit, as the device would."""

    def __init__(self, width: int, source: random.Random, page_size: int) -> None:
        self.width, self.source, self.page_size = width, source, page_size
        self.length: dict[tuple[int, int], int] = {}
        self.limit: dict[tuple[int, int], int] = {}
        self.pages: dict[int, list[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            key = admission.req_idx, admission.generation
            self.length[key], self.limit[key] = admission.num_tokens, admission.limit
            self.pages[admission.req_idx] = []
        for update in plan.page_updates:
            held = self.pages[update.req_idx]
            assert len(held) == update.first_index
            held.extend(update.pages)
        for row in plan.decode:
            self._check_room(row.req_idx, row.generation, row.draft_limit)
        emitted, verified = [], []
        for index, key in enumerate(plan.sampling_rows):
            room = self.limit[key] - self.length[key]
            drafts = plan.decode[index].draft_limit if index < len(plan.decode) else 0
            drafts = max(min(drafts, room - 1), 0)
            count = self.source.randint(1, drafts + 1) if room > 0 else 0
            self.length[key] += count
            emitted.append(count)
            verified.append(drafts)
        tokens = np.full((len(emitted), self.width + 1), 3)
        for row in range(len(emitted)):
            if self.source.random() < 0.02:
                tokens[row, self.source.randrange(self.width + 1)] = EOS
        return StepResult(
            plan=plan,
            token_ids=tokens,
            num_emitted=np.array(emitted, np.int64),
            num_verified=np.array(verified, np.int64),
            executed_rows=plan.shape.target_rows,
            confidence=None,
        )

    def _check_room(self, req_idx: int, generation: int, draft_limit: int) -> None:
        """Every position that this step can write has a page: anchor and drafts, then W temporary rows."""
        length, limit = self.length[req_idx, generation], self.limit[req_idx, generation]
        if length < limit:
            drafts = min(draft_limit, limit - length - 1)
            assert len(self.pages[req_idx]) * self.page_size >= length + drafts + self.width


def check(scheduler: Scheduler, live: list[StepPlan]) -> None:
    scheduler.pages.check_integrity()
    held: list[int] = []
    sequences = [*scheduler.running, *scheduler._ended]
    for sequence in sequences:
        held += sequence.pages
        assert sequence.in_flight == sum(
            sum(
                (r.req_idx, r.generation) == (sequence.req_idx, sequence.generation)
                for r in (*p.decode, *p.chunks)
            )
            for p in live
        )
    assert len(held) == len(set(held)) == scheduler.pages.num_used
    assert 0 not in held
    assert all(not seq.pages for seq in scheduler.waiting)


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize(
    ("width", "num_pages", "page_size"), [(0, 60, 4), (5, 60, 4), (7, 400, 1), (3, 25, 16)]
)
def test_random_traffic_keeps_every_invariant(lag: int, width: int, num_pages: int, page_size: int) -> None:
    source = random.Random(lag * 1000 + width)
    scheduler = Scheduler(
        pages=PagePool(num_pages, page_size),
        max_seqs=BUCKETS[-1],
        max_model_len=120,
        draft_width=width,
        prefill_chunk_tokens=CHUNKS[-1],
        request_buckets=BUCKETS,
        chunk_buckets=CHUNKS,
        eos_token_ids=frozenset({EOS}),
    )
    device = ScriptedDevice(width, source, page_size)
    in_flight: deque[StepPlan] = deque()
    waiting_since: dict[int, int] = {}
    got: dict[int, int] = {}
    finished: dict[int, str] = {}
    limits: dict[int, int] = {}
    preemptions = step = request_id = 0

    def choose(question: BudgetQuestion) -> BudgetChoice:
        rows_full, rows = question.request_bucket * (width + 1), question.rows
        paused = width and source.random() < 0.1
        return BudgetChoice(
            target_rows=max(len(rows), source.randint(0, rows_full)) if rows else rows_full,
            propose_depth=0 if paused else width,
        )

    for moment in range(3000):
        if source.random() < 0.25 and len(scheduler.waiting) < 20 and moment < 2700:
            request_id += 1
            request = Request(
                request_id=request_id,
                prompt_token_ids=(5,) * source.randint(1, 70),
                params=SamplingParams(max_tokens=source.randint(1, 60), temperature=0.0),
            )
            if scheduler.refusal(request) is None:
                scheduler.add(request)
                waiting_since[request_id], got[request_id] = moment, 0
                limits[request_id] = min(
                    len(request.prompt_token_ids) + request.params.max_tokens, 120
                ) - len(request.prompt_token_ids)
        if source.random() < 0.03 and request_id:
            victim = source.randint(1, request_id)
            if scheduler.abort(victim) is not None:
                finished[victim] = "abort"
        plan = scheduler.plan(step, choose)
        if plan is not None:
            assert plan.shape.request_bucket >= len(plan.sampling_rows)
            assert plan.shape.chunk_rows >= sum(len(c.token_ids) for c in plan.chunks)
            assert len({k for k in plan.sampling_rows}) == len(plan.sampling_rows)
            in_flight.append(plan)
            step += 1
        check(scheduler, list(in_flight))
        if in_flight and (plan is None or len(in_flight) >= lag):
            outputs, _ = scheduler.apply(device.execute(in_flight.popleft()))
            for output in outputs:
                assert output.request_id not in finished
                got[output.request_id] += len(output.token_ids)
                if output.finish_reason is not None:
                    finished[output.request_id] = str(output.finish_reason)
            check(scheduler, list(in_flight))
        preemptions, scheduler.num_preemptions = preemptions + scheduler.num_preemptions, 0
    for _ in range(5000):
        if not scheduler.has_work and not in_flight:
            break
        plan = scheduler.plan(step, choose)
        if plan is not None:
            in_flight.append(plan)
            step += 1
        if in_flight and (plan is None or len(in_flight) >= lag):
            for output in scheduler.apply(device.execute(in_flight.popleft()))[0]:
                got[output.request_id] += len(output.token_ids)
                if output.finish_reason is not None:
                    finished[output.request_id] = str(output.finish_reason)
    scheduler.check_idle()
    assert set(finished) == set(got), "a request starved"
    assert len(finished) > 100
    for done, reason in finished.items():
        assert got[done] <= limits[done]
        if reason == "length":
            assert got[done] == limits[done]
    if num_pages * page_size < 300:
        assert preemptions > 0


def test_requests_that_can_never_run_are_refused_with_the_reason() -> None:
    scheduler = Scheduler(
        pages=PagePool(5, 4),
        max_seqs=2,
        max_model_len=64,
        draft_width=3,
        prefill_chunk_tokens=8,
        request_buckets=(1, 2),
        chunk_buckets=(8,),
        eos_token_ids=frozenset(),
    )

    def refusal(prompt: int, max_tokens: int) -> str:
        params = SamplingParams(max_tokens=max_tokens)
        return scheduler.refusal(Request(request_id=1, prompt_token_ids=(1,) * prompt, params=params)) or ""

    assert "no tokens" in refusal(0, 1)
    assert "63" in refusal(64, 1)
    assert "lower max_tokens" in refusal(8, 20)
    assert refusal(8, 4) == ""


def test_the_page_pool_is_all_or_nothing() -> None:
    pool = PagePool(6, 4)
    first = pool.take(3)
    assert first == (1, 2, 3)
    assert pool.take(3) is None
    assert pool.num_free == 2
    pool.release([2])
    assert pool.take(3) == (2, 4, 5)
    pool.check_integrity()
    with pytest.raises(KeyError):
        pool.release([0])
