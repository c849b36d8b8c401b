"""Sampled output under the adaptive policy has the target's distribution, position by position.

A context-free target (the next token depends on position alone) with a handful of tokens: its exact probabilities
are known, the drafter always proposes one fixed token with confidences of its own, and the real policy chooses
budgets from lagged feedback and a cost table under which budgets really vary.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from core.config import ContextConfig
from core.sampling import SamplingRows, token_probabilities
from core.spec.budgets import AdaptiveVerify
from core.spec.cost_table import CostProfiles
from core.spec.costs import AdditiveCost
from core.types import SamplingParams
from metrics.stats import StepStats
from tests.engines import Finished, ScriptedDrafter, adaptive_tiers, engine_config, run, scripted_engine
from tests.tiny import VOCAB_SIZE, write_tiny_llama

WIDTH, LENGTH, REQUESTS = 5, 6, 4000
KINDS = ((1.0, 0, 1.0, 0.0), (0.6, 0, 1.0, 0.0), (1.0, 3, 1.0, 0.0), (1.4, 0, 0.8, 0.05), (0.0, 0, 1.0, 0.0))


def position_logits() -> torch.Tensor:
    """[positions, V]: five likely tokens that change with the position."""
    logits = torch.full((32, VOCAB_SIZE), -30.0)
    generator = torch.Generator().manual_seed(9)
    logits[:, 10:15] = torch.randn(32, 5, generator=generator)
    return logits


def costs() -> CostProfiles:
    buckets = (1, 2, 4, 8)
    tiers = adaptive_tiers(WIDTH)
    rows = sorted({g for b in buckets for g in tiers(b)})
    table = AdditiveCost(
        bias_seconds=0.004,
        alpha_seconds={b: 0.0002 * i for i, b in enumerate(buckets)},
        theta_seconds={g: 0.0004 * (g - rows[0]) for g in rows},
    )
    context = ContextConfig(prefill_tokens=1, min_kv_length=1, max_kv_length=64)
    return CostProfiles(((context, frozenset(buckets), table),))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Finished], list[StepStats]]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("target"))
    tiers = adaptive_tiers(WIDTH)
    config = engine_config(path, width=WIDTH, adaptive=True, max_seqs=8, buckets=(1, 2, 4, 8))
    drafter = ScriptedDrafter(
        WIDTH,
        [],
        vocab_size=VOCAB_SIZE,
        confidence=lambda position, slot: (0.35, 0.95, 0.7)[(position + slot) % 3],
    )
    policy = AdaptiveVerify(tiers, costs(), num_rows=16, draft_width=WIDTH)
    engine = scripted_engine(config, drafter, policy)
    table = position_logits()
    # The real engine around a target whose distribution is known: only the last matrix product is replaced.
    model = engine.loop.worker.model
    model.forward = lambda batch, caches, feature_layers=(): type(  # type: ignore[method-assign]
        "Output", (), {"hidden": batch.positions[:, None].float(), "features": None}
    )()
    model.logits = lambda hidden: table[hidden[:, 0].long()]  # type: ignore[method-assign]
    drafter.propose = propose_fixed(drafter)  # type: ignore[method-assign]
    steps: list[StepStats] = []
    params = [
        SamplingParams(
            temperature=t, top_k=k, top_p=p, min_p=m, seed=1000 + i, max_tokens=LENGTH, ignore_eos=True
        )
        for i, (t, k, p, m) in ((i, KINDS[i % len(KINDS)]) for i in range(REQUESTS))
    ]
    results = run(engine, [[5]] * REQUESTS, params, on_step=steps.append)
    engine.close()
    return results, steps


def propose_fixed(drafter: ScriptedDrafter):
    original = drafter.propose

    def propose(request, caches):
        out = original(request, caches)
        block = request.anchor_positions[:, None] + torch.arange(1, WIDTH + 1)
        return type(out)(token_ids=10 + (block % 5), confidence=out.confidence)

    return propose


def test_budgets_varied_and_drafts_were_accepted(served: tuple[list[Finished], list[StepStats]]) -> None:
    _, steps = served
    decided = [s for s in steps if s.decided]
    assert len({s.target_rows for s in decided}) >= 3
    assert 0.05 < sum(s.accepted for s in steps) / sum(s.verified for s in steps) < 0.95


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_every_position_has_the_target_distribution(
    served: tuple[list[Finished], list[StepStats]], kind: int
) -> None:
    results, _ = served
    temperature, top_k, top_p, min_p = KINDS[kind]
    chosen = [r.tokens for r in results[kind :: len(KINDS)]]
    rows = SamplingRows(
        temperature=torch.full((32,), temperature),
        top_k=torch.full((32,), top_k),
        top_p=torch.full((32,), top_p),
        min_p=torch.full((32,), min_p),
        seed=torch.zeros(32, dtype=torch.int64),
    )
    exact = token_probabilities(position_logits(), rows).numpy()
    for position in range(LENGTH):
        counts = Counter(tokens[position] for tokens in chosen)
        expected = exact[position] * len(
            chosen
        )  # token i is drawn by the row at position i of a prompt of one
        observed = np.array([counts.get(token, 0) for token in range(VOCAB_SIZE)])
        likely = expected > 1e-3
        assert observed[~likely].sum() == 0
        if likely.sum() > 1:
            scaled = expected[likely] * observed[likely].sum() / expected[likely].sum()
            assert stats.chisquare(observed[likely], scaled).pvalue > 1e-4, (kind, position)


def test_a_policy_that_looks_at_its_own_draws_would_fail(
    served: tuple[list[Finished], list[StepStats]],
) -> None:
    """The statistic can fail: against another temperature's distribution it does."""
    results, _ = served
    hot = [r.tokens[2] for r in results[0 :: len(KINDS)]]
    cold = position_logits()[2].div(0.6).double().softmax(-1)[10:15].numpy()
    observed = np.array([hot.count(token) for token in range(10, 15)])
    assert stats.chisquare(observed, cold / cold.sum() * observed.sum()).pvalue < 1e-6
