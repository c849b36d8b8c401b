"""Whatever is drafted, verified, chunked, preempted or overlapped: the tokens are those of plain decoding."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from core.engine.plan import BudgetChoice, BudgetQuestion
from core.spec.budgets import ForcedRows, FullWidth
from core.types import Request, SamplingParams
from metrics.stats import StepStats
from tests.engines import (
    Finished,
    ScriptedDrafter,
    adaptive_tiers,
    engine_config,
    greedy,
    random_prompts,
    random_tier,
    run,
    scripted_engine,
)
from tests.tiny import VOCAB_SIZE, write_tiny_llama

NUM_PROMPTS, MAX_TOKENS = 7, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(NUM_PROMPTS, VOCAB_SIZE, seed=3)


def decode(model: Path, prompts: list[list[int]], params: object, **options: object) -> list[Finished]:
    engine = scripted_engine(engine_config(model, **options), None)
    try:
        return run(engine, prompts, params)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def plain(model: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [r.tokens for r in decode(model, prompts, greedy(MAX_TOKENS))]


def speculate(
    model: Path,
    prompts: list[list[int]],
    plain: list[list[int]],
    params: object,
    *,
    width: int = 5,
    budgets: int | None = None,
    wrong: object = lambda position: position % 7 in (0, 3),
    confidence: object = lambda position, slot: ((position * 31 + slot * 17) % 10) / 10,
    on_step: object = lambda stats: None,
    concurrency: int | None = None,
    **options: object,
) -> list[Finished]:
    recorded = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter = ScriptedDrafter(width, recorded, vocab_size=VOCAB_SIZE, wrong=wrong, confidence=confidence)
    tiers = adaptive_tiers(width)
    adaptive = budgets is not None
    config = engine_config(model, width=width, adaptive=adaptive, **options)
    budget = ForcedRows(tiers, draft_width=width, pick=random_tier(tiers, seed=budgets)) if adaptive else None
    engine = scripted_engine(config, drafter, budget)
    try:
        return run(engine, prompts, params, on_step=on_step, concurrency=concurrency)
    finally:
        engine.close()


def test_plain_decoding_equals_a_full_forward_pass(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    transformers = pytest.importorskip("transformers")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, tokens in zip(prompts, plain, strict=True):
        ids = torch.tensor([prompt + tokens])
        with torch.no_grad():
            expected = oracle(ids).logits[0, len(prompt) - 1 : -1].argmax(-1)
        assert tokens == expected.tolist()


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 5, 7])
def test_fixed_width_emits_the_same_tokens(
    model: Path, prompts: list[list[int]], plain: list[list[int]], width: int, lag: int
) -> None:
    steps: list[StepStats] = []
    got = speculate(model, prompts, plain, greedy(MAX_TOKENS), width=width, lag=lag, on_step=steps.append)
    assert [r.tokens for r in got] == plain
    assert sum(s.accepted for s in steps) > 0
    assert sum(s.accepted for s in steps) < sum(s.verified for s in steps)


@pytest.mark.parametrize("seed", range(6))
def test_any_budget_emits_the_same_tokens(
    model: Path, prompts: list[list[int]], plain: list[list[int]], seed: int
) -> None:
    steps: list[StepStats] = []
    got = speculate(
        model,
        prompts,
        plain,
        greedy(MAX_TOKENS),
        width=(5, 7)[seed % 2],
        budgets=seed,
        lag=1 + seed % 2,
        page_size=(1, 3, 16)[seed % 3],
        chunk=(5, 16, 64)[seed % 3],
        graph=("cpugraph", "none")[seed % 2],
        on_step=steps.append,
    )
    assert [r.tokens for r in got] == plain
    assert len({s.target_rows for s in steps}) > 3


def test_all_drafts_right_emit_a_whole_block_per_step(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    steps: list[StepStats] = []
    got = speculate(
        model, prompts[:1], plain[:1], greedy(MAX_TOKENS), wrong=lambda p: False, on_step=steps.append
    )
    assert got[0].tokens == plain[0]
    # 1 token from prefill, then blocks of 6: 1 + 6 * 4 covers 24, and the pipeline may add discarded steps.
    assert sum(1 for s in steps if s.emitted) == 5


def test_chunking_changes_neither_tokens_nor_acceptance(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    accepted = []
    for chunk in (1, 7, 16, 64):
        steps: list[StepStats] = []
        got = speculate(
            model, prompts, plain, greedy(MAX_TOKENS), chunk=chunk, on_step=steps.append, concurrency=1
        )
        assert [r.tokens for r in got] == plain
        accepted.append(sum(s.accepted for s in steps))
    assert len(set(accepted)) == 1


@pytest.mark.parametrize("budgets", [None, 1])
def test_a_stop_token_ends_a_request_wherever_it_stands(
    model: Path, prompts: list[list[int]], plain: list[list[int]], budgets: int | None
) -> None:
    """bugs.md 1, 2, 46: every position inside a block, against every cap around it."""
    for position in range(1, 15):
        stop = plain[0][position]
        first = plain[0].index(stop)
        for cap in {max(first, 1), first + 1, first + 2, MAX_TOKENS}:
            params = greedy(cap, stop_token_ids=(stop,))
            want = decode(model, prompts[:1], params)[0] if position == 1 else None
            got = speculate(
                model, prompts[:1], plain[:1], params, width=7, wrong=lambda p: False, budgets=budgets
            )[0]
            assert got.tokens == plain[0][: min(first + 1, cap)]
            assert got.reason == ("stop" if first < cap else "length")
            assert want is None or (want.tokens, want.reason) == (got.tokens, got.reason)


def test_max_tokens_and_the_end_of_the_context_are_exact(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """bugs.md 27: prompts that end near max_model_len, next to one that does not."""
    for length in range(1, 12):
        got = (
            speculate(
                model,
                prompts,
                plain,
                greedy(MAX_TOKENS),
                wrong=lambda p: False,
                max_model_len=30 + length,
                page_size=4,
            )
            if all(len(p) < 30 + length for p in prompts)
            else []
        )
        for prompt, want, result in zip(prompts, plain, got, strict=False):
            count = min(MAX_TOKENS, 30 + length - len(prompt))
            assert (result.tokens, result.reason) == (want[:count], "length")


@pytest.mark.parametrize("budgets", [None, 2])
def test_small_kv_preempts_and_changes_nothing(
    model: Path, prompts: list[list[int]], plain: list[list[int]], budgets: int | None
) -> None:
    steps: list[StepStats] = []
    layers = (
        3 * 2 * 2 * 20 * 4 * 4 + 2 * 2 * 4 * 4
    )  # bytes of a page of 4 tokens: target and scripted drafter
    got = speculate(
        model,
        prompts,
        plain,
        greedy(MAX_TOKENS),
        budgets=budgets,
        kv_cache_bytes=layers * 30,
        max_model_len=64,
        on_step=steps.append,
    )
    assert [r.tokens for r in got] == plain
    assert sum(s.preemptions for s in steps) > 0


def test_seeded_sampling_does_not_depend_on_speculation_or_batch(
    model: Path, prompts: list[list[int]]
) -> None:
    """Draws are counter based, so even sampled tokens are equal, mixed with greedy rows in one batch."""
    params = [
        SamplingParams(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_k=(0, 5, 0)[i % 3],
            top_p=(1.0, 1.0, 0.8)[i % 3],
            min_p=(0.0, 0.05, 0.0)[i % 3],
            seed=100 + i,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        for i in range(NUM_PROMPTS)
    ]
    alone = [decode(model, [p], q)[0].tokens for p, q in zip(prompts, params, strict=True)]
    assert [r.tokens for r in decode(model, prompts, params)] == alone
    for budgets in (None, 5):
        got = speculate(model, prompts, alone, params, budgets=budgets)
        assert [r.tokens for r in got] == alone


@pytest.mark.parametrize("when", range(9))
def test_abort_at_any_moment_leaves_the_others_and_a_successor_alone(
    model: Path, prompts: list[list[int]], plain: list[list[int]], when: int
) -> None:
    """bugs.md 38: queued, in prefill, launched, retired; twice; unknown; and the row is reused at once."""
    recorded = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter = ScriptedDrafter(5, recorded, vocab_size=VOCAB_SIZE, wrong=lambda p: p % 2 == 0)
    engine = scripted_engine(engine_config(model, width=5, max_seqs=2, buckets=(1, 2)), drafter)
    tokens: dict[int, list[int]] = {i: [] for i in range(1, 6)}

    def add(request_id: int, index: int) -> None:
        engine.add(
            Request(request_id=request_id, prompt_token_ids=tuple(prompts[index]), params=greedy(MAX_TOKENS))
        )

    for request_id in (1, 2, 3):
        add(request_id, request_id)
    moment = 0
    while engine.has_work:
        if moment == when:
            assert engine.abort(2) is not None
            assert engine.abort(2) is None
            assert engine.abort(999) is None
            add(4, 2)
        moment += 1
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
    assert tokens[1] == plain[1]
    assert tokens[3] == plain[3]
    assert tokens[4] == plain[2]
    assert plain[2][: len(tokens[2])] == tokens[2]
    engine.loop.scheduler.check_idle()
    engine.close()


def test_padding_and_rejected_rows_touch_only_the_dummy_page(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    """bugs.md 16: canaries in every page that no sequence holds, three sequences padded to a bucket of four."""
    recorded = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter = ScriptedDrafter(7, recorded, vocab_size=VOCAB_SIZE, wrong=lambda p: p % 4 == 0)
    engine = scripted_engine(engine_config(model, width=7, buckets=(4,)), drafter)
    storage, pages = engine.loop.worker.storage, engine.loop.scheduler.pages
    for index in range(3):
        engine.add(
            Request(request_id=index, prompt_token_ids=tuple(prompts[index]), params=greedy(MAX_TOKENS))
        )
    touched: set[int] = set()
    for layer in storage.layers:
        layer.key.fill_(123.0)
    while engine.has_work:
        engine.step()
        touched |= pages._held
    untouched = [p for p in range(1, pages.num_pages) if p not in touched]
    assert untouched
    for layer in storage.layers:
        assert bool((layer.key[untouched] == 123.0).all())
    state = engine.loop.worker.state
    assert int(state.positions[state.pad_row]) == 0
    assert int(state.limits[state.pad_row]) == 0
    engine.close()


def test_every_committed_position_is_published_once_in_its_own_slot(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    recorded = [prompts[0] + plain[0]]
    drafter = ScriptedDrafter(5, recorded, vocab_size=VOCAB_SIZE, wrong=lambda p: p % 3 == 0)
    engine = scripted_engine(engine_config(model, width=5), drafter)
    run(engine, prompts[:1], greedy(MAX_TOKENS))
    engine.close()
    total = len(prompts[0]) + MAX_TOKENS - 1  # the last token is never an input
    positions = [position for _, position in drafter.published]
    assert sorted(p for p in positions if p < total) == list(range(total))
    assert len({slot for slot, position in drafter.published if position < total}) == total


def test_statistics_close_their_conservation_law(
    model: Path, prompts: list[list[int]], plain: list[list[int]]
) -> None:
    steps: list[StepStats] = []
    got = speculate(
        model,
        prompts,
        plain,
        greedy(MAX_TOKENS, stop_token_ids=tuple({t[9] for t in plain})),
        budgets=4,
        wrong=lambda p: p % 9 == 0,
        on_step=steps.append,
    )
    total = {
        name: sum(getattr(s, name) for s in steps)
        for name in (
            "proposed", "verified", "accepted", "emitted", "truncated", "discarded",
            "speculative_sequence_steps", "plain_sequence_steps",
        )
    }  # fmt: skip
    assert total["emitted"] == sum(len(r.tokens) for r in got)
    assert total["emitted"] + total["truncated"] == (
        total["accepted"] + total["speculative_sequence_steps"] + total["plain_sequence_steps"]
    )
    assert total["accepted"] <= total["verified"] <= total["proposed"]
    assert total["discarded"] > 0
    for s in steps:
        assert sum(s.position_verified) == s.verified
        assert sum(s.position_accepted) == s.accepted


class Pausing(FullWidth):
    """Drafts in some steps only; which ones is written down."""

    def __init__(self, width: int, pattern: tuple[int, ...]) -> None:
        super().__init__(adaptive_tiers(width), draft_width=width)
        self.pattern = pattern

    def choose(self, question: BudgetQuestion) -> BudgetChoice:
        choice = super().choose(question)
        return dataclasses.replace(
            choice, propose_depth=choice.propose_depth * self.pattern[question.step % len(self.pattern)]
        )


@pytest.mark.parametrize("lag", [1, 2])
@pytest.mark.parametrize("pattern", [(1, 0), (0,), (0, 0, 1), (1, 1, 1, 0, 0, 0, 0)])
def test_a_draft_pause_changes_no_token_and_no_later_acceptance(
    model: Path, prompts: list[list[int]], plain: list[list[int]], pattern: tuple[int, ...], lag: int
) -> None:
    """bugs.md 4 and 17: nothing stale is verified after a pause, and drafts after it are as good as before."""
    recorded = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter = ScriptedDrafter(5, recorded, vocab_size=VOCAB_SIZE)
    config = engine_config(model, width=5, lag=lag, graph="none")
    engine = scripted_engine(config, drafter, Pausing(5, pattern))
    engine.loop.worker.state.drafts.fill_(2**31 - 1)  # poison: an id that no vocabulary has
    steps: list[StepStats] = []
    got = run(engine, prompts, greedy(MAX_TOKENS), on_step=steps.append)
    engine.close()
    assert [r.tokens for r in got] == plain
    verified, accepted = sum(s.verified for s in steps), sum(s.accepted for s in steps)
    assert (verified > 0) == (1 in pattern)
    # Every draft is right, so only drafts of sequences that had already ended are lost.
    assert accepted == verified
    assert sorted({p for _, p in drafter.published}) == list(
        range(max(len(p) for p in prompts) + MAX_TOKENS - 1)
    )
