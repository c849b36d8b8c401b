"""Cost models and their fit: planted tables come back, undetermined or absurd ones are refused."""

from __future__ import annotations

import math

import numpy as np
import pytest

from core.errors import ConfigError
from core.spec.costs import (
    AdditiveCost,
    CostSample,
    SpsCost,
    check_connected,
    cost_model_from_json,
    fit_costs,
    is_flat,
    shape_report,
)
from core.spec.json_reader import JsonNode

WIDTH = 7


def tiers(bucket: int) -> list[int]:
    return sorted({bucket, 2 * bucket, 4 * bucket, bucket * (WIDTH + 1)})


def planted(bucket: int, rows: int) -> float:
    return 0.010 + 0.0004 * math.log2(bucket) + 0.0002 * rows


def sample(bucket: int, rows: int, *seconds: float) -> CostSample:
    return CostSample(request_bucket=bucket, target_rows=rows, seconds=seconds or (planted(bucket, rows),))


def test_additive_fit_recovers_a_planted_table() -> None:
    fit = fit_costs([sample(b, g) for b in (1, 2, 4, 8) for g in tiers(b)], "additive")
    assert isinstance(fit.model, AdditiveCost)
    assert fit.max_relative_error < 1e-9
    assert fit.model.alpha_seconds[1] == 0.0
    assert fit.model.theta_seconds[1] == 0.0
    for bucket, rows in [(1, 8), (2, 16), (8, 64), (8, 8)]:
        assert fit.model.cost_ms(bucket, rows) == pytest.approx(1000 * planted(bucket, rows), rel=1e-9)


def test_a_points_cost_is_the_median_of_its_windows() -> None:
    fit = fit_costs([sample(1, 4, 0.010, 0.011, 0.5)], "sps")
    assert fit.model.cost_ms(1, 4) == pytest.approx(11.0)


def test_sps_is_the_median_over_buckets() -> None:
    fit = fit_costs([sample(1, 8, 0.010), sample(2, 8, 0.012), sample(4, 8, 0.040)], "sps")
    assert fit.model.cost_ms(99, 8) == pytest.approx(12.0)
    assert fit.max_relative_error == pytest.approx(28 / 40)


def test_fit_errors_are_relative_to_what_was_measured() -> None:
    noisy = [sample(b, g, planted(b, g) * (1 + 0.01 * (-1) ** (b + g))) for b in (1, 2, 4) for g in tiers(b)]
    fit = fit_costs(noisy, "additive")
    assert 0 < fit.mean_relative_error <= fit.max_relative_error < 0.03


@pytest.mark.parametrize(
    ("buckets", "connected"),
    [((1, 16), False), ((1, 8), True), ((1, 2, 4, 8, 16), True), ((4,), True), ((1, 2, 32), False)],
)
def test_probe_grids_connect_through_shared_row_counts(buckets: tuple[int, ...], connected: bool) -> None:
    grid = {bucket: tiers(bucket) for bucket in buckets}
    problem = check_connected(grid)
    assert (problem is None) == connected
    if problem is not None:
        assert "connected" in problem
        with pytest.raises(ConfigError, match="connected"):
            fit_costs([sample(b, g) for b in buckets for g in tiers(b)], "additive")
        fit_costs([sample(b, g) for b in buckets for g in tiers(b)], "sps")  # needs no connection


def test_a_measured_point_always_has_a_cost() -> None:
    """Samples so contradictory that the fitted cost of one of them is not positive are refused."""
    samples = [
        sample(1, 1, 0.1),
        sample(1, 2, 0.001),
        sample(2, 2, 0.001),
        sample(1, 4, 0.1),
        sample(2, 4, 1e-4),
    ]
    with pytest.raises(ConfigError, match="too noisy"):
        fit_costs(samples, "additive")


def test_an_empty_grid_is_refused() -> None:
    assert check_connected({}) is not None
    with pytest.raises(ConfigError, match="no samples"):
        fit_costs([], "sps")


def test_a_repeated_point_is_refused() -> None:
    with pytest.raises(ConfigError, match="bucket 1 with 2 rows twice"):
        fit_costs([sample(1, 2), sample(1, 2)], "sps")


@pytest.mark.parametrize("rate", [0.0, -1.0, math.nan, math.inf])
def test_sps_refuses_rates_that_are_none(rate: float) -> None:
    with pytest.raises(ConfigError, match="8 rows"):
        SpsCost({4: 100.0, 8: rate})


@pytest.mark.parametrize(
    ("bias", "alpha", "theta"),
    [
        (0.0, 0.0, 0.0),
        (math.nan, 0.0, 0.0),
        (0.01, math.inf, 0.0),
        (0.01, 0.0, math.nan),
        (-0.01, 0.1, 0.1),
    ],
)
def test_additive_refuses_costs_that_are_none(bias: float, alpha: float, theta: float) -> None:
    with pytest.raises(ConfigError):
        AdditiveCost(bias, {1: 0.0, 2: alpha}, {1: 0.0, 2: theta})


@pytest.mark.parametrize("seconds", [(), (0.0,), (0.01, math.nan), (-0.01,)])
def test_samples_refuse_times_that_are_none(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="finite"):
        CostSample(request_bucket=1, target_rows=1, seconds=seconds)


def test_noise_at_pairs_that_never_run_is_no_fault() -> None:
    """A compute-bound machine: a tiny bias and a noisy alpha make (32, 1) negative, which nobody can run."""
    costs = AdditiveCost(0.001, {1: 0.0, 32: -0.0015}, {1: 0.0, 32: 0.03})
    assert not costs.has(32, 1)
    assert not AdditiveCost(0.01, {1: 0.0}, {1: 0.0, 64: -0.02}).has(1, 64)
    assert costs.cost_ms(32, 32) == pytest.approx(29.5)


def test_tables_survive_json_and_are_sorted() -> None:
    for costs in (SpsCost({16: 95.0, 8: 120.0}), AdditiveCost(0.004, {4: 0.002, 1: 0.0}, {8: 0.1, 4: 0.0})):
        again = cost_model_from_json(JsonNode(costs.to_json(), "t"))
        assert again == costs
        assert again.to_json() == costs.to_json()
    assert list(SpsCost({16: 95.0, 8: 120.0}).steps_per_second) == [8, 16]


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"model": "cubic"}, "$.model"),
        ({"steps_per_second": {"8": 1.0}}, "model"),
        ({"model": "sps", "steps_per_second": {}}, "$.steps_per_second"),
        ({"model": "sps", "steps_per_second": {"08": 1.0}}, "'08'"),
        ({"model": "sps", "steps_per_second": {"8": "fast"}}, "$.steps_per_second.8"),
        ({"model": "sps", "steps_per_second": {"8": 0}}, "8 rows"),
        ({"model": "sps", "steps_per_second": {"8": 1.0}, "theta": {}}, "$.theta"),
        (
            {"model": "additive", "bias_seconds": 0.1, "alpha_seconds": {"1": 0.0}},
            "$.theta_seconds is missing",
        ),
        (
            {"model": "additive", "bias_seconds": True, "alpha_seconds": {}, "theta_seconds": {}},
            "$.bias_seconds",
        ),
        ([1], "cost table"),
    ],
)
def test_reading_a_table_says_what_is_wrong_and_where(table: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cost_model_from_json(JsonNode(table, "table.json"))
    assert words in str(caught.value)
    assert "table.json" in str(caught.value)


def test_flat_costs_are_reported() -> None:
    flat = SpsCost(dict.fromkeys(tiers(8), 100.0))
    assert is_flat(flat, 8, tiers(8))
    assert any("flat" in line for line in shape_report(flat, {8: tiers(8)}))
    rising = SpsCost({g: 100.0 / g for g in tiers(8)})
    assert not is_flat(rising, 8, tiers(8))
    assert shape_report(rising, {8: tiers(8)}) == []


def test_costs_that_fall_are_reported() -> None:
    [line] = shape_report(SpsCost({8: 100.0, 16: 120.0, 32: 50.0}), {8: [8, 16, 32]})
    assert "a budget of 8 will never be chosen" in line


def test_the_fit_is_an_ordinary_least_squares_one() -> None:
    """Residuals of the unweighted fit are orthogonal to every column of its design."""
    rng = np.random.default_rng(1)
    points = [(b, g) for b in (1, 2, 4, 8) for g in tiers(b)]
    samples = [sample(b, g, planted(b, g) + rng.normal(0, 2e-4)) for b, g in points]
    fit = fit_costs(samples, "additive")
    residual = np.array([s.median_seconds for s in samples]) - np.array(fit.predicted_ms) / 1000
    for bucket in (1, 2, 4, 8):
        assert abs(residual[[b == bucket for b, _ in points]].sum()) < 1e-12
    for rows in {g for _, g in points}:
        assert abs(residual[[g == rows for _, g in points]].sum()) < 1e-12
