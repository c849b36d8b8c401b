"""A DeepSpec-format config.json as typed values, refused with all its problems at once where it does not fit.

Knows the checkpoint's dialect and the target it must belong to; knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from core.errors import ModelLoadError
from core.layers.norm_rope import rope_theta
from core.models.base import TargetModel

ARCHITECTURE = "Qwen3DSparkModel"
MARKOV_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    block_size: int
    mask_token_id: int
    feature_layers: tuple[int, ...]
    markov_type: str
    markov_rank: int  # 0: no Markov head
    has_confidence: bool
    confidence_with_markov: bool


def parse_dspark_config(raw: dict[str, Any], target: TargetModel, *, width: int) -> DSparkConfig:
    """Check `raw` against the target and the width; raise ModelLoadError that names every problem."""
    problems = _format_problems(raw)
    if not problems:
        config = _convert(raw)
        problems = _fit_problems(raw, config, target, width)
    if problems:
        raise ModelLoadError(
            "the DSpark draft cannot be used:\n" + "\n".join(f"  {text}" for text in problems)
        )
    return config


def _format_problems(raw: dict[str, Any]) -> list[str]:
    """Checkpoints of another kind, whose other keys would only confuse."""
    if "speculators_model_type" in raw or "transformer_layer_config" in raw:
        return [
            "config.json is in the speculators format, whose anchor slot predicts nothing; "
            "use a checkpoint in DeepSpec's format"
        ]
    if raw.get("sample_from_anchor", True) is not True:
        return [
            f"sample_from_anchor is {raw['sample_from_anchor']!r}: only drafts whose anchor slot predicts "
            "the next token are supported; use a checkpoint in DeepSpec's format"
        ]
    names = raw.get("architectures") or ["(none)"]
    if names[0] != ARCHITECTURE:
        return [f"architecture {names[0]!r} is not a supported DSpark draft; use a {ARCHITECTURE} checkpoint"]
    required = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_target_layers num_attention_heads "
        "num_key_value_heads block_size mask_token_id target_layer_ids"
    )
    missing = [key for key in required.split() if raw.get(key) is None]
    return [f"config.json lacks {', '.join(missing)}; use a complete DeepSpec checkpoint"] if missing else []


def _convert(raw: dict[str, Any]) -> DSparkConfig:
    rank = raw.get("markov_rank") or 0
    return DSparkConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_kv_heads=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        rope_theta=rope_theta(raw),
        block_size=raw["block_size"],
        mask_token_id=raw["mask_token_id"],
        feature_layers=tuple(raw["target_layer_ids"]),
        markov_type=raw.get("markov_head_type", "vanilla"),
        markov_rank=rank,
        has_confidence=bool(raw.get("enable_confidence_head", False)),
        confidence_with_markov=bool(raw.get("confidence_head_with_markov", False)) and rank > 0,
    )


def _fit_problems(raw: dict[str, Any], config: DSparkConfig, target: TargetModel, width: int) -> list[str]:
    problems = []
    for key, own, theirs in (
        ("num_target_layers", raw["num_target_layers"], target.num_layers),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            problems.append(
                f"{key} is {own} but the target has {theirs}; use a draft trained for this target"
            )
    problems += _feature_problems(config.feature_layers, target.num_layers)
    if not 1 <= width <= config.block_size:
        problems.append(
            f"num_speculative_tokens is {width} but the draft's block_size is {config.block_size}; "
            f"choose 1 to {config.block_size}"
        )
    if config.markov_rank and config.markov_type not in MARKOV_TYPES:
        problems.append(
            f"markov_head_type {config.markov_type!r} is not supported; use one of {', '.join(MARKOV_TYPES)}"
        )
    kinds = set(raw.get("layer_types") or ()) - {"full_attention"}
    if kinds or raw.get("use_sliding_window"):
        kind = sorted(kinds)[0] if kinds else "sliding_attention"
        problems.append(
            f"draft layers of type {kind!r} are not supported; use a draft with full attention only"
        )
    if not 0 <= config.mask_token_id < config.vocab_size:
        problems.append(
            f"mask_token_id {config.mask_token_id} is outside the vocabulary of {config.vocab_size}"
        )
    for key, allowed in (("hidden_act", "silu"), ("attention_bias", False)):
        if raw.get(key, allowed) != allowed:
            problems.append(f"{key} {raw[key]!r} is not supported (only {allowed!r}); use another draft")
    return problems


def _feature_problems(layers: tuple[int, ...], num_target_layers: int) -> list[str]:
    ascending = all(first < second for first, second in pairwise(layers))
    if not layers or not ascending or layers[0] < -1:
        return [f"target_layer_ids {list(layers)} must rise strictly from -1 (the embedding) or more"]
    if layers[-1] >= num_target_layers - 1:
        # Where drafts are trained, the last layer's output exists only behind the final norm.
        return [
            f"target_layer_ids {list(layers)} must stay below {num_target_layers - 1}, the target's last "
            "layer, whose plain output a draft cannot have been trained with"
        ]
    return []
