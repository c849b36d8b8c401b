"""Adaptive draft steps: windows, choice and controller, in simulated load with seeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from core.errors import ConfigError
from core.spec.costs import CostSample
from core.spec.depth_costs import DepthCosts, fit_depth_costs
from core.spec.draft_depth import PROBE_EVERY, AcceptanceWindows, DraftDepthPolicy, choose_depth
from core.spec.draft_step_config import DraftDepthSettings

K = 7
BUCKETS = (1, 2, 4, 8, 16)


def depth_costs(
    base_ms: float = 10.0, draft_ms: float = 1.0, row_ms: float = 0.2, max_depth: int = K
) -> DepthCosts:
    """Cycle time: a base, one draft forward per depth, and every verified row."""
    return fit_depth_costs(
        {
            depth: [
                CostSample(
                    request_bucket=bucket,
                    target_rows=bucket * (depth + 1),
                    seconds=((base_ms + draft_ms * depth + row_ms * bucket * (depth + 1)) / 1000,),
                )
                for bucket in BUCKETS
            ]
            for depth in range(max_depth + 1)
        },
        "additive",
    )


def make_policy(costs: DepthCosts | None = None, max_depth: int = K, **settings: float) -> DraftDepthPolicy:
    chosen = DraftDepthSettings(**settings)  # type: ignore[arg-type]
    return DraftDepthPolicy(costs or depth_costs(max_depth=max_depth), max_depth=max_depth, settings=chosen)


def draw_accepted(rng: np.random.Generator, acceptance: float, verified: int) -> int:
    misses = np.flatnonzero(rng.random(verified) >= acceptance)
    return int(misses[0]) if misses.size else verified


def serve(
    policy: DraftDepthPolicy, rng: np.random.Generator, *, acceptance: float, steps: int, sequences: int = 1
) -> list[int]:
    """Run decode batches one after the other and return the depths that ran."""
    depths = []
    for _ in range(steps):
        depth = policy.choose(request_bucket=bucket_of(sequences), num_sequences=sequences).depth
        depths.append(depth)
        accepted = [draw_accepted(rng, acceptance, depth) for _ in range(sequences)]
        policy.record([depth] * sequences, accepted)
    return depths


def bucket_of(sequences: int) -> int:
    return next(b for b in BUCKETS if b >= sequences)


def throughput(costs: DepthCosts, acceptance: float, depth: int, sequences: int = 1) -> float:
    cost = costs.cost_ms(bucket_of(sequences), depth)
    assert cost is not None
    return sequences * sum(acceptance**j for j in range(depth + 1)) / cost


def best_depth(costs: DepthCosts, acceptance: float, sequences: int = 1) -> int:
    return max(range(K + 1), key=lambda d: throughput(costs, acceptance, d, sequences))


# Windows


def test_acceptance_is_pooled_over_sequences_not_a_mean_of_batches() -> None:
    windows = AcceptanceWindows(1, 20)
    windows.record([1], [1])
    windows.record([1] * 9, [0] * 9)
    assert windows.prefix_acceptance() == [pytest.approx(0.1)]


def test_before_any_observation_everything_is_expected_to_survive() -> None:
    windows = AcceptanceWindows(3, 20)
    windows.record([0, 0], [0, 0])
    assert windows.prefix_acceptance() == [1.0, 1.0, 1.0]


def test_unobserved_positions_continue_the_last_ratio() -> None:
    windows = AcceptanceWindows(4, 20)
    windows.record([2] * 10, [2] * 4 + [1] * 4 + [0] * 2)  # P = 0.8, 0.4
    assert windows.prefix_acceptance() == pytest.approx([0.8, 0.4, 0.2, 0.1])


def test_a_ratio_of_nothing_is_zero() -> None:
    windows = AcceptanceWindows(3, 20)
    windows.record([2], [0])
    assert windows.prefix_acceptance() == [0.0, 0.0, 0.0]


def test_deeper_positions_never_look_better() -> None:
    windows = AcceptanceWindows(2, 20)
    windows.record([1] * 9, [0] * 9)
    windows.record([2], [2])
    assert windows.prefix_acceptance() == pytest.approx([0.1, 0.1])


def test_capped_sequences_count_only_where_they_were_verified() -> None:
    windows = AcceptanceWindows(2, 20)
    windows.record([2, 1, 0], [2, 1, 0])
    windows.record([1, 1], [0, 0])
    assert windows.prefix_acceptance() == pytest.approx([0.5, 0.5])
    assert windows.observations(2) == 1


def test_a_window_holds_the_last_batches_that_observed_the_position() -> None:
    windows = AcceptanceWindows(2, 3)
    for accepted in (0, 1, 1, 1):
        windows.record([1], [accepted])
        windows.record([0], [0])  # batches without it do not push it out
    assert windows.observations(1) == 3
    assert windows.prefix_acceptance()[0] == 1.0


@pytest.mark.parametrize(("window_size", "horizon"), [(5, 100), (20, 100), (40, 200)])
def test_observations_expire_beyond_the_horizon(window_size: int, horizon: int) -> None:
    windows = AcceptanceWindows(2, window_size)
    windows.record([2], [1])
    for _ in range(horizon - 1):
        windows.record([0], [0])
    assert windows.observations(2) == 1  # age = horizon is still kept
    windows.record([0], [0])
    assert windows.observations(2) == 0
    assert windows.observations(1) == 1  # position 1 keeps its newest one


# Choice


def test_ties_go_to_the_smaller_depth() -> None:
    decision = choose_depth(
        num_sequences=4,
        prefix_acceptance=[0.5, 0.25],
        cost_ms=[10.0, 15.0, 17.5],
        current_depth=None,
        switch_min_gain=0.05,
    )
    assert decision.depth == 0
    assert decision.reason == "first"


@pytest.mark.parametrize(("gain", "depth"), [(0.0, 1), (0.0999, 1), (0.1, 0), (0.2, 0)])
def test_a_switch_needs_strictly_more_than_the_minimal_gain(gain: float, depth: int) -> None:
    decision = choose_depth(
        num_sequences=1,
        prefix_acceptance=[0.1],
        cost_ms=[10.0, 10.0],
        current_depth=0,
        switch_min_gain=gain,
    )
    assert decision.depth == depth


def test_depths_without_costs_are_no_candidates() -> None:
    costs: Sequence[float | None] = [10.0, None, 11.0]
    decision = choose_depth(
        num_sequences=1, prefix_acceptance=[1.0, 1.0], cost_ms=costs, current_depth=1, switch_min_gain=0.5
    )
    assert [c.depth for c in decision.candidates] == [0, 2]
    assert decision.depth == 2


def test_a_bucket_without_costs_runs_full_depth() -> None:
    policy = make_policy()
    choice = policy.choose(request_bucket=64, num_sequences=50)
    assert choice.depth == K
    assert choice.decision.reason == "no_costs"


# Controller


def test_rescoring_waits_for_the_interval_except_for_a_new_bucket() -> None:
    policy = make_policy(depth_costs(draft_ms=0.1), update_interval=5)
    first = policy.choose(request_bucket=1, num_sequences=1)
    assert first.depth == K
    for _ in range(4):
        policy.record([K], [0])
        assert policy.choose(request_bucket=1, num_sequences=1).decision is first.decision
    assert (
        policy.choose(request_bucket=2, num_sequences=2).depth == 0
    )  # first use: scored at once, no hysteresis
    policy.record([K], [0])
    assert policy.choose(request_bucket=1, num_sequences=1).depth == 0
    assert policy.num_switches == 1  # a first choice is no switch


def test_at_depth_zero_one_batch_in_fifty_probes_and_is_no_switch() -> None:
    policy = make_policy(depth_costs(draft_ms=100.0))
    depths = serve(policy, np.random.default_rng(0), acceptance=0.0, steps=10 * PROBE_EVERY)
    assert [i for i, d in enumerate(depths, 1) if d] == [PROBE_EVERY * n for n in range(1, 11)]
    assert set(depths) == {0, 1}
    assert policy.num_switches == 0


@pytest.mark.parametrize("start", [0, 1, 3, 7])
def test_the_policy_climbs_back_when_drafts_get_good_again(start: int) -> None:
    """Low depths see only shallow positions. From every depth, 0 included, it must recover, and soon."""
    recovered = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        costs = depth_costs(draft_ms=0.3)
        policy = make_policy(costs)
        # A bad phase that leaves the policy at `start`: acceptance of positions beyond it is poor.
        for _ in range(150):
            policy.choose(request_bucket=1, num_sequences=1)
            policy.record([start], [0 if start == 0 else draw_accepted(rng, 0.1, start)])
        best = throughput(costs, 0.95, best_depth(costs, 0.95))
        depths = serve(policy, rng, acceptance=0.95, steps=2000)
        settled = [throughput(costs, 0.95, d) >= 0.9 * best for d in depths]
        recovered.append(next(i for i in range(len(settled)) if np.mean(settled[i : i + 50]) >= 0.9))
        assert max(depths) >= best_depth(costs, 0.95) - 1
    assert max(recovered) <= 400


def test_a_long_pause_ends_when_drafts_get_good() -> None:
    """Depth 0 for a thousand batches; then the probes alone must bring speculation back."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        policy = make_policy(depth_costs(draft_ms=1.5))
        assert set(serve(policy, rng, acceptance=0.0, steps=1000)[100:]) <= {0, 1}
        depths = serve(policy, rng, acceptance=0.95, steps=600)
        assert np.mean(depths[400:]) > 4


def test_a_cold_start_does_not_shut_speculation_off() -> None:
    """A healthy head (0.75) must survive unlucky first samples, and every decision lies in range."""
    shut_off = 0
    for seed in range(2000):
        policy = make_policy(max_depth=3)
        depths = serve(policy, np.random.default_rng(seed), acceptance=0.75, steps=20)
        assert all(0 <= depth <= 3 for depth in depths)
        shut_off += 0 in depths
    assert shut_off < 20


@pytest.mark.parametrize("overhead_ms", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_no_fixed_depth_is_better(overhead_ms: float, acceptance: float, sequences: int) -> None:
    """Costs are full cycles, so a fixed overhead is inside them and even low load cannot lose by adapting."""
    costs = depth_costs(base_ms=2.0 + overhead_ms)
    best = throughput(costs, acceptance, best_depth(costs, acceptance, sequences), sequences)
    decision = choose_depth(
        num_sequences=sequences,
        prefix_acceptance=[acceptance**j for j in range(1, K + 1)],
        cost_ms=costs.costs_of(sequences, K),
        current_depth=None,
        switch_min_gain=0.05,
    )
    assert throughput(costs, acceptance, decision.depth, sequences) == pytest.approx(best)
    # Estimated from 20 batches the choice wanders: most at one sequence, where a window is 20 draws.
    settled = []
    for seed in range(5):
        depths = serve(
            make_policy(costs),
            np.random.default_rng(seed),
            acceptance=acceptance,
            steps=400,
            sequences=sequences,
        )
        settled += [throughput(costs, acceptance, d, sequences) for d in depths[100:]]
    assert np.mean(settled) >= (0.92 if sequences == 1 else 0.97) * best


def test_prefills_that_come_and_go_do_not_make_the_depth_thrash() -> None:
    """Batches swing across a bucket border every third step; each bucket keeps its own depth."""
    policy = make_policy()
    rng = np.random.default_rng(2)
    by_bucket: dict[int, list[int]] = {2: [], 4: []}
    for step in range(600):
        sequences = 3 if step % 3 == 0 else 2
        bucket = bucket_of(sequences)
        depth = policy.choose(request_bucket=bucket, num_sequences=sequences).depth
        by_bucket[bucket].append(depth)
        policy.record([depth] * sequences, [draw_accepted(rng, 0.6, depth) for _ in range(sequences)])
    assert policy.num_switches <= 30  # five per hundred steps
    costs = depth_costs()
    for bucket, depths in by_bucket.items():
        count = min(bucket, 3)
        best = throughput(costs, 0.6, best_depth(costs, 0.6, count), count)
        assert np.mean([throughput(costs, 0.6, d, count) for d in depths]) >= 0.95 * best


# Costs per depth


@pytest.mark.parametrize("model", ["additive", "sps"])
def test_depth_costs_go_through_what_was_measured(model: str) -> None:
    samples = {
        d: [
            CostSample(request_bucket=b, target_rows=b * (d + 1), seconds=(0.01 + d / 1000 + b / 1e4,))
            for b in (1, 3)
        ]
        for d in (0, 2)
    }
    costs = fit_depth_costs(samples, "sps" if model == "sps" else "additive")
    assert costs.cost_ms(3, 2) == pytest.approx(12.3)
    assert costs.costs_of(1, 2) == [pytest.approx(10.1), None, pytest.approx(12.1)]
    assert costs.cost_ms(2, 0) is None
    assert costs.to_json()["mode"] == "draft_step"


def test_a_bucket_measured_twice_at_a_depth_is_refused() -> None:
    point = CostSample(request_bucket=1, target_rows=1, seconds=(0.1,))
    with pytest.raises(ConfigError, match="twice"):
        fit_depth_costs({0: [point, point]}, "sps")
    with pytest.raises(ConfigError, match="no samples"):
        fit_depth_costs({0: []}, "sps")
