"""Sampling: filters equal transformers' warpers, draws follow the distribution, greedy rows are never disturbed."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from core.sampling import SamplingRows, counter_uniform, sample, token_probabilities


def rows_of(*settings: tuple[float, int, float, float], seed: int = 0) -> SamplingRows:
    temperature, top_k, top_p, min_p = zip(*settings, strict=True)
    return SamplingRows(
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=torch.tensor(top_k),
        top_p=torch.tensor(top_p, dtype=torch.float32),
        min_p=torch.tensor(min_p, dtype=torch.float32),
        seed=torch.arange(len(settings)) + seed,
    )


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.7, 3, 1.0, 0.0),
    (1.0, 0, 0.6, 0.0),
    (1.0, 0, 1.0, 0.2),
    (0.8, 9, 0.7, 0.1),
    (1.3, 1, 0.01, 0.9),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_filters_equal_transformers(setting: tuple[float, int, float, float]) -> None:
    warpers = pytest.importorskip("transformers.generation.logits_process")
    temperature, top_k, top_p, min_p = setting
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 3
    chain = [warpers.TemperatureLogitsWarper(temperature)]
    chain += [warpers.TopKLogitsWarper(top_k)] if top_k else []
    chain += [warpers.TopPLogitsWarper(top_p)] if top_p < 1 else []
    chain += [warpers.MinPLogitsWarper(min_p)] if min_p else []
    expected = logits.clone()
    for warper in chain:
        expected = warper(None, expected)
    got = token_probabilities(logits, rows_of(*[setting] * 6))
    torch.testing.assert_close(got, expected.double().softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("setting", SETTINGS)
def test_draws_follow_the_distribution(setting: tuple[float, int, float, float]) -> None:
    count = 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(5)).expand(count, 12)
    rows = rows_of(*[setting] * count, seed=11)
    drawn = sample(logits, rows, torch.full((count,), 3), any_sampled=True, any_filtered=True)
    probabilities = token_probabilities(logits[:1], rows_of(setting))[0]
    observed = torch.bincount(drawn, minlength=12)
    assert int(observed[probabilities == 0].sum()) == 0
    kept = probabilities > 0
    if int(kept.sum()) > 1:
        assert stats.chisquare(observed[kept], count * probabilities[kept]).pvalue > 1e-4


def test_a_row_does_not_depend_on_its_batch() -> None:
    """bugs.md 48: greedy rows beside filtered ones, first, middle and last, ties included."""
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(2))
    logits[3, 10] = logits[3, 20] = logits[3].max() + 1  # a tie for the greedy row
    settings = [*SETTINGS[:3], (0.0, 0, 1.0, 0.0), *SETTINGS[3:6]]
    positions = torch.arange(7) + 100
    together = sample(logits, rows_of(*settings), positions, any_sampled=True, any_filtered=True)
    for index, setting in enumerate(settings):
        alone = sample(
            logits[index : index + 1],
            rows_of(setting, seed=index),
            positions[index : index + 1],
            any_sampled=setting[0] > 0,
            any_filtered=setting[1:] != (0, 1.0, 0.0),
        )
        assert int(alone[0]) == int(together[index])
    assert int(together[3]) == 10


@pytest.mark.parametrize("temperature", [1e-8, 1e-3, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -math.inf]] * 200)
    drawn = sample(
        logits,
        rows_of(*[(temperature, 0, 1.0, 0.0)] * 200),
        torch.arange(200),
        any_sampled=True,
        any_filtered=False,
    )
    assert int((drawn == 3).sum()) == 0
    if temperature < 1:
        assert bool((drawn == 2).all())


def test_counter_draws_are_uniform_and_independent_of_neighbours() -> None:
    seeds = torch.arange(300).repeat_interleave(100)
    positions = torch.arange(100).repeat(300)
    uniform = counter_uniform(seeds, positions)
    assert float(uniform.min()) >= 0
    assert float(uniform.max()) < 1
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-4
    grid = uniform.view(300, 100)
    for left, right in ((grid[:, :-1], grid[:, 1:]), (grid[:-1], grid[1:])):
        assert abs(float(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1])) < 0.03
