"""How many rows a step verifies: the policy against brute force, its lag, and faults other engines had."""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt
import pytest

from core.errors import ConfigError
from core.spec.costs import AdditiveCost, CostModel, SpsCost, cost_model_from_json, is_flat
from core.spec.json_reader import JsonNode
from core.spec.verify_budget import BudgetDecision, FeedbackTable, choose_budget

W = 7
Survival = npt.NDArray[np.float64]


def tiers(bucket: int, width: int = W) -> tuple[int, ...]:
    return tuple(sorted({bucket, 2 * bucket, 4 * bucket, bucket * (width + 1)}))


def decide(
    survival: Survival,
    costs: CostModel | None,
    *,
    bucket: int | None = None,
    limits: list[int] | None = None,
    captured: tuple[int, ...] | None = None,
) -> BudgetDecision:
    count, width = survival.shape
    bucket = bucket or count
    return choose_budget(
        survival=survival,
        draft_limit=np.array(limits if limits is not None else [width] * count),
        num_sequences=count,
        request_bucket=bucket,
        tiers=captured or tiers(bucket, width),
        costs=costs,
    )


def survival_at(rate: float, count: int, width: int = W) -> Survival:
    return np.tile(np.cumprod(np.full(width, rate)), (count, 1))


def by_brute_force(survival: Survival, limits: list[int], captured: tuple[int, ...], costs: CostModel) -> int:
    """Try every tier with every draft sorted, in exact sums; ties to the smaller tier."""
    count = len(limits)
    drafts = sorted((survival[r, j] for r, limit in enumerate(limits) for j in range(limit)), reverse=True)
    rates = {
        g: (count + math.fsum(drafts[: g - count])) / costs.cost_ms(count, g) for g in captured if g >= count
    }
    best = max(rates.values())
    return min(g for g, rate in rates.items() if rate >= best * (1 - 1e-12))


def test_the_choice_is_the_global_argmax_over_staircase_costs() -> None:
    rng = np.random.default_rng(11)
    chosen = set()
    for _ in range(2000):
        count = int(rng.integers(1, 9))
        survival = np.cumprod(rng.random((count, W)) ** rng.choice([0.1, 1.0]), axis=1)
        limits = rng.integers(0, W + 1, count).tolist()
        captured = tuple(sorted(set(rng.integers(count, 8 * count + 1, 4).tolist()) | {8 * count}))
        costs = SpsCost({g: float(rng.choice([1, 2, 3, 4])) for g in captured})
        decision = decide(survival, costs, limits=limits, captured=captured)
        assert decision.target_rows == by_brute_force(survival, limits, captured, costs)
        assert [c.target_rows for c in decision.candidates] == list(captured)
        chosen.add(captured.index(decision.target_rows))
    assert len(chosen) > 3  # every place in the list wins sometimes


def test_the_first_drop_does_not_end_the_search() -> None:
    costs = SpsCost({1: 100.0, 2: 50.0, 4: 49.0, 8: 48.0})
    decision = decide(survival_at(1.0, 1), costs)
    rates = [c.tokens_per_second for c in decision.candidates]
    assert rates[1] <= rates[0] < rates[3]
    assert decision.target_rows == 8


def test_ties_within_rounding_go_to_fewer_rows() -> None:
    survival = np.zeros((2, W))
    costs = SpsCost({2: 100.0, 4: 100.0 * (1 + 1e-14), 8: 100.0, 16: 100.0 * (1 - 1e-14)})
    assert decide(survival, costs).target_rows == 2


def test_tiers_below_the_sequences_and_tiers_without_cost_are_no_candidates() -> None:
    costs = SpsCost({4: 1e9, 16: 10.0, 64: 9.0})  # nothing at 32
    decision = decide(survival_at(0.5, 5), costs, bucket=8, captured=(4, 8, 16, 32, 64))
    assert [c.target_rows for c in decision.candidates] == [16, 64]


def test_rows_beyond_the_limits_buy_nothing() -> None:
    costs = SpsCost(dict.fromkeys(tiers(2), 100.0))
    decision = decide(survival_at(1.0, 2), costs, limits=[0, 1])
    assert [c.expected_tokens for c in decision.candidates] == [2.0, 3.0, 3.0, 3.0]
    assert decision.target_rows == 4


@pytest.mark.parametrize("costs", [None, SpsCost({999: 1.0}), AdditiveCost(0.01, {64: 0.0}, {8: 0.0})])
def test_without_costs_full_width_runs_and_the_decision_says_so(costs: CostModel | None) -> None:
    decision = decide(survival_at(0.1, 8), costs)
    assert decision.target_rows == 64
    assert decision.candidates == ()
    assert decision.chosen is None
    assert decision.reason == "no_profile"


def test_flat_costs_choose_full_width_and_rising_ones_do_not() -> None:
    """A flat table can only ever verify everything; the same doubtful drafts over rising costs are cut."""
    survival = survival_at(0.3, 64)
    flat = SpsCost(dict.fromkeys(tiers(64), 50.0))
    rising = SpsCost({g: 1000.0 / g for g in tiers(64)})
    assert decide(survival, flat).target_rows == 512
    assert is_flat(flat, 64, tiers(64))
    assert decide(survival, rising).target_rows < 512
    assert not is_flat(rising, 64, tiers(64))


@pytest.mark.parametrize("rate", [0, -1, "NaN", None])
def test_tables_with_absurd_rates_never_reach_the_policy(rate: object) -> None:
    table = {"model": "sps", "steps_per_second": {"8": rate, "16": 1.0}}
    with pytest.raises(ConfigError):
        cost_model_from_json(JsonNode(table, "t"))


@pytest.mark.parametrize("overhead_ms", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
def test_the_choice_is_never_behind_a_fixed_width(overhead_ms: float, acceptance: float) -> None:
    """With true survivals and costs the pick is the best width in every cell, verifying nothing included."""
    for bucket in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        costs = SpsCost({g: 1000.0 / (overhead_ms + 1.0 + 0.02 * g) for g in tiers(bucket)})
        survival = survival_at(acceptance, bucket)
        chosen = decide(survival, costs).chosen
        assert chosen is not None
        for depth in range(W + 1):
            rows = bucket * (depth + 1)
            if rows in tiers(bucket):
                fixed = 1000 * (bucket + survival[:, :depth].sum()) / costs.cost_ms(bucket, rows)
                assert chosen.tokens_per_second >= fixed * (1 - 1e-9)


def test_deciding_is_cheap() -> None:
    """Host time per step is throughput lost: far below 0.1 ms on an idle core at 256 sequences."""
    survival = survival_at(0.8, 256)
    costs = SpsCost({g: 1000.0 / g for g in tiers(256)})
    best = math.inf
    for _ in range(300):
        begin = time.perf_counter()
        decide(survival, costs)
        best = min(best, time.perf_counter() - begin)
    assert best < 100e-6


def confident(value: float) -> list[float]:
    return [value] * W


def test_a_plan_uses_exactly_feedback_of_two_steps_ago() -> None:
    """Also when the step in between has retired already, as it always has with one slot in flight."""
    table = FeedbackTable(4, W)
    for step in range(10):
        table.record(step, [1], [0], [confident(step / 10)])
        survival, newest = table.survival_for(step + 1, [1], [0])
        assert newest == step - 1
        assert survival[0, 0] == (pytest.approx((step - 1) / 10) if step else 1.0)
        survival, newest = table.survival_for(step + 2, [1], [0])
        assert newest == step


def test_rows_missing_from_that_step_use_their_newest_older_feedback() -> None:
    table = FeedbackTable(2, W)
    table.record(3, [0, 1], [0, 0], [confident(0.3), confident(0.4)])
    table.record(4, [0], [0], [confident(0.5)])
    survival, newest = table.survival_for(6, [0, 1], [0, 0])
    assert newest == 4
    assert survival[:, 0].tolist() == [0.5, 0.4]


def test_sequences_that_never_retired_count_as_certain() -> None:
    survival, newest = FeedbackTable(3, W).survival_for(5, [0, 2], [0, 7])
    assert newest == -1
    assert (survival == 1.0).all()


def test_another_generation_has_no_feedback() -> None:
    table = FeedbackTable(1, W)
    table.record(0, [0], [4], [confident(0.1)])
    assert table.survival_for(2, [0], [5])[0][0, 0] == 1.0
    assert table.survival_for(2, [0], [4])[0][0, 0] == pytest.approx(0.1)
    table.record(2, [0], [5], [confident(0.9)])  # the row's next owner: the old entry is still in the ring
    assert table.survival_for(3, [0], [5])[0][0, 0] == 1.0
    assert table.survival_for(4, [0], [5])[0][0, 0] == pytest.approx(0.9)


def test_survival_is_clamped_before_the_product_and_nan_is_zero_and_counted() -> None:
    table = FeedbackTable(1, 4)
    assert table.record(0, 0, 0, [0.5, 1.5, math.nan, 0.9]) == 1
    survival, _ = table.survival_for(2, [0], [0])
    assert survival.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_steps_must_retire_in_order() -> None:
    table = FeedbackTable(1, W)
    table.record(3, 0, 0, confident(0.5))
    with pytest.raises(AssertionError):
        table.record(3, 0, 0, confident(0.5))


def test_an_answer_is_not_a_view_of_the_table() -> None:
    table = FeedbackTable(1, W)
    table.record(0, 0, 0, confident(0.5))
    table.survival_for(2, [0], [0])[0][:] = 0.0
    assert table.survival_for(2, [0], [0])[0][0, 0] == 0.5


def test_random_schedules_agree_with_a_list_of_everything_that_retired() -> None:
    rng = np.random.default_rng(5)
    table = FeedbackTable(6, 3)
    history: dict[int, list[tuple[int, int, Survival]]] = {row: [] for row in range(6)}
    generation = [0] * 6
    for step in range(600):
        for row in range(6):  # what the plan of this step may know: steps up to step - 1 have retired
            usable = [s for at, gen, s in history[row] if at <= step - 2 and gen == generation[row]]
            survival, newest = table.survival_for(step, [row], [generation[row]])
            assert np.array_equal(survival[0], usable[-1] if usable else np.ones(3))
            assert newest == -1 or newest <= step - 2
        for row in np.flatnonzero(rng.random(6) < 0.6).tolist():
            confidence = rng.random(3)
            table.record(step, row, generation[row], confidence)
            history[row].append((step, generation[row], np.cumprod(confidence, dtype=np.float64)))
        if rng.random() < 0.05:
            generation[int(rng.integers(6))] += 1
