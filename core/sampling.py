"""Logits to tokens: temperature, top-k, top-p, min-p, one draw per row. Knows nothing of speculation.

Draws are counter based: row r uses u = hash(seed_r, absolute position of the sampled token), so a token does not
depend on the batch it is computed in, nor on how often its position was evaluated with other contexts before.
Filters are applied in transformers' order: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.layers.linear import vocab_argmax


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingRows:
    """Parameters of N rows. temperature 0 is greedy; top_k 0, top_p 1, min_p 0 are off."""

    temperature: torch.Tensor  # [N] float32
    top_k: torch.Tensor  # [N] int64
    top_p: torch.Tensor  # [N] float32
    min_p: torch.Tensor  # [N] float32
    seed: torch.Tensor  # [N] int64


def sample(
    logits: torch.Tensor,
    rows: SamplingRows,
    positions: torch.Tensor,
    *,
    any_sampled: bool,
    any_filtered: bool,
) -> torch.Tensor:
    """Draw one token per row.

    logits [N, V]; positions [N] int64, where the drawn tokens will stand; returns [N] int64. any_sampled and
    any_filtered are host facts about the batch: they skip work, they never change a row's result.
    """
    greedy = vocab_argmax(logits)
    if not any_sampled:
        return greedy
    uniform = counter_uniform(rows.seed, positions)
    drawn = _draw(_weights(logits, rows, any_filtered=any_filtered), uniform)
    return torch.where(rows.temperature > 0, drawn, greedy)


def token_probabilities(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """The distribution that `sample` draws from, [N, V] float64; greedy rows are one-hot. For tests and tools."""
    weights = _weights(logits, rows, any_filtered=True).double()
    greedy = torch.nn.functional.one_hot(vocab_argmax(logits), logits.shape[-1]).double()
    return torch.where(rows.temperature[:, None] > 0, weights / weights.sum(-1, keepdim=True), greedy)


def _weights(logits: torch.Tensor, rows: SamplingRows, *, any_filtered: bool) -> torch.Tensor:
    """Unnormalised probabilities [N, V] float32 in vocabulary order, 0 for what the filters remove.

    A row without filters gets the same bits whether or not its batch has some: draws don't depend on neighbours.
    """
    # Greedy rows go through with temperature 1: finite, and thrown away by the caller.
    temperature = torch.where(rows.temperature > 0, rows.temperature, 1.0)
    # Subtracting the maximum first keeps tiny temperatures finite.
    scaled = logits.float()
    scaled = (scaled - scaled.amax(dim=-1, keepdim=True)) / temperature[:, None]
    weights = scaled.softmax(dim=-1)
    return weights * _kept(scaled, rows) if any_filtered else weights


def _kept(scaled: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Which tokens [N, V] bool survive top-k, top-p and min-p; the likeliest always does."""
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    in_top_k = (rank < rows.top_k[:, None]) | (rows.top_k[:, None] == 0)
    probs = ordered.masked_fill(~in_top_k, float("-inf")).softmax(dim=-1)
    before = probs.cumsum(dim=-1) - probs
    keep = in_top_k & ((before < rows.top_p[:, None]) | (rows.top_p[:, None] >= 1.0))
    keep &= probs >= rows.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    return torch.empty_like(keep).scatter_(1, order, keep)


def _draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Inverse of the cumulative distribution: weights [N, V] >= 0 need not be normalised; uniform [N] in [0, 1)."""
    cumulative = weights.double().cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # Rounding may put the threshold on the total: the last token with weight, not one behind it.
    last = torch.searchsorted(cumulative, total, right=False)[:, 0]
    return torch.minimum(index, last)


# splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"); int64 wraps as uint64 does.
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15
_MIX1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX2 = -7723592293110705685  # 0x94D049BB133111EB


def counter_uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """hash(seed, position) as float64 in [0, 1). seed, position [N] int64."""
    z = _mix(_mix(seed + _GAMMA) + (position + 1) * _GAMMA)
    return _shift_right(z, 11).double() * 2.0**-53


def _mix(z: torch.Tensor) -> torch.Tensor:
    z = (z ^ _shift_right(z, 30)) * _MIX1
    z = (z ^ _shift_right(z, 27)) * _MIX2
    return z ^ _shift_right(z, 31)


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
