"""What startup calibration will measure: defaults, or the built-in model's preset, and a file over them.

Pure arithmetic over sizes. A probe's sequences must fit its KV interval from the first step to the last,
both in-flight slots included, because a profile only speaks for KV lengths that it has seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.calibration_files import (
    CALIBRATION_FLAG,
    check_draft_step_config,
    from_cost_table,
    overridden,
)
from core.config import CalibrationConfig, ContextConfig, default_tiers
from core.errors import ConfigError
from core.facts import Facts
from core.options import LaunchOptions
from core.rules import draft_width
from core.spec.calibration import steps_per_point
from core.spec.costs import check_connected

DEFAULT_PREFILL_TOKENS = 2048
DEFAULT_MAX_KV_LENGTH = 4096
PRESET_PREFILL_TOKENS = 128
PRESET_MAX_BUCKET = 32
IN_FLIGHT_SLOTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """KV capacity in tokens, if it is known before the model is loaded."""

    tokens: int | None

    def per_sequence(self, num_sequences: int) -> int | None:
        return None if self.tokens is None else self.tokens // num_sequences


def request_buckets(options: LaunchOptions) -> tuple[int, ...]:
    """Powers of two up to the limit, plus the limit."""
    limit = options.graph_decode_batch_size_limit or options.max_seqs_per_batch
    limit = max(
        limit, options.max_seqs_per_batch
    )  # less is allowed only without graphs, where nothing is captured
    powers = {1 << exponent for exponent in range(limit.bit_length())}
    return tuple(sorted({bucket for bucket in powers if bucket <= limit} | {limit}))


def default_grid(buckets: tuple[int, ...], width: int) -> dict[int, tuple[int, ...]]:
    """Default tiers of every bucket, connected enough for an additive fit.

    Powers of two share row counts. A limit between two of them may share none (24 and 16 at width 7): its
    bucket then gets the next power of two as one more tier, which the bucket below has as its 2B.
    """
    grid = {bucket: default_tiers(bucket, width) for bucket in buckets}
    limit = buckets[-1]
    if limit.bit_count() > 1 and check_connected(grid) is not None:
        grid[limit] = tuple(sorted({*grid[limit], 1 << limit.bit_length()}))
    return grid


def worst_case_tokens(settings: CalibrationConfig, width: int) -> int:
    """Tokens that a probe may add to a sequence: all steps, both slots in flight, all drafts accepted."""
    return steps_per_point(settings, lag=IN_FLIGHT_SLOTS) * (width + 1) + width


def kv_values_per_token(target: Mapping[str, Any] | None, draft: Mapping[str, Any] | None) -> int | None:
    """Values that one token keeps in KV, over all layers; None if config.json does not say."""
    total = 0
    for config in (target, draft):
        if config is None:
            continue
        heads = config.get("num_key_value_heads", config.get("num_attention_heads"))
        layers = config.get("num_hidden_layers")
        size = config.get("head_dim")
        if size is None and config.get("hidden_size") and config.get("num_attention_heads"):
            size = config["hidden_size"] // config["num_attention_heads"]
        if not (isinstance(heads, int) and isinstance(layers, int) and isinstance(size, int)):
            return None
        total += 2 * layers * heads * size
    return total or None


def calibration_violations(
    options: LaunchOptions, facts: Facts, *, max_model_len: int, room: CacheRoom
) -> list[str]:
    """What is wrong with the calibration that these options ask for."""
    if facts.cost_table is not None and facts.cost_table.problem:
        return []  # told with the other files; with that table nothing would be calibrated
    try:
        if options.enable_adaptive_draft_step:
            check_draft_step_config(facts.draft_step_config)
        else:
            effective_calibration(options, facts, max_model_len=max_model_len, room=room)
    except ConfigError as error:
        return error.problems
    return []


def effective_calibration(
    options: LaunchOptions, facts: Facts, *, max_model_len: int, room: CacheRoom
) -> CalibrationConfig:
    """Settings of adaptive target verification, defaults filled in; ConfigError if they cannot work."""
    width = draft_width(options)
    buckets = request_buckets(options)
    if facts.cost_table is not None and not facts.cost_table.problem:
        return from_cost_table(
            facts.cost_table, options.speculative_algorithm, buckets, width, max_model_len=max_model_len
        )
    if options.model is None:
        settings = _preset(buckets, width, max_model_len)
    else:
        settings = _defaults(buckets, width, max_model_len)
    asked: tuple[ContextConfig, ...] | None = None
    if facts.calibration is not None and not facts.calibration.problem:
        settings, asked = overridden(settings, facts.calibration, buckets, width)
    if asked is None:
        settings = _fit_context(settings, width, max_model_len, room)
    else:
        _check_contexts(settings, width, max_model_len, room)
    if settings.model == "additive":
        _check_grid(settings)
    return settings


def _defaults(buckets: tuple[int, ...], width: int, max_model_len: int) -> CalibrationConfig:
    return CalibrationConfig(
        source="defaults",
        model="additive",
        request_buckets=buckets,
        target_graph_rows=default_grid(buckets, width),
        contexts=(_whole_context(DEFAULT_PREFILL_TOKENS, min(DEFAULT_MAX_KV_LENGTH, max_model_len)),),
        warmup_steps=8,
        window_steps=32,
        windows_per_point=3,
        token_seed=1,
    )


def _preset(buckets: tuple[int, ...], width: int, max_model_len: int) -> CalibrationConfig:
    """The built-in model's: small enough for two CPU cores, valid for its whole context."""
    measured = tuple(bucket for bucket in buckets if bucket <= PRESET_MAX_BUCKET)
    return CalibrationConfig(
        source="preset",
        model="additive",
        request_buckets=measured,
        target_graph_rows=default_grid(measured, width),
        contexts=(_whole_context(PRESET_PREFILL_TOKENS, max_model_len),),
        warmup_steps=2,
        window_steps=8,
        windows_per_point=2,
        token_seed=1,
    )


def _whole_context(prefill_tokens: int, max_kv_length: int) -> ContextConfig:
    return ContextConfig(prefill_tokens=prefill_tokens, min_kv_length=1, max_kv_length=max_kv_length)


def _fit_context(
    settings: CalibrationConfig, width: int, max_model_len: int, room: CacheRoom
) -> CalibrationConfig:
    """Reduce the one default context's prefill until its longest probe fits; ConfigError if none does."""
    (context,) = settings.contexts
    longest, limit = _longest_sequence(context, settings, max_model_len, room)
    prefill = min(context.prefill_tokens, longest - worst_case_tokens(settings, width))
    if prefill < 1:
        worst = worst_case_tokens(settings, width)
        raise ConfigError(
            f"calibration does not fit: a prompt and up to {worst} tokens per sequence are too "
            f"many for {limit}; give a smaller explicit configuration with {CALIBRATION_FLAG} (fewer "
            "warmup_steps, window_steps, windows_per_point or request_buckets)"
        )
    return dataclasses.replace(settings, contexts=(dataclasses.replace(context, prefill_tokens=prefill),))


def _longest_sequence(
    context: ContextConfig, settings: CalibrationConfig, max_model_len: int, room: CacheRoom
) -> tuple[int, str]:
    """Tokens that a probe's sequence can have, and the setting that limits it."""
    limits = [
        (context.max_kv_length, f"the context's max_kv_length={context.max_kv_length}"),
        (max_model_len, f"max_model_len={max_model_len}"),
    ]
    largest = max(settings.request_buckets)
    share = room.per_sequence(largest)
    if share is not None:
        limits.append((share, f"kv_cache_gb, which holds {share} tokens for each of {largest} sequences"))
    return min(limits)


def _check_contexts(settings: CalibrationConfig, width: int, max_model_len: int, room: CacheRoom) -> None:
    """Explicit contexts are honoured or refused, never reduced."""
    worst = worst_case_tokens(settings, width)
    problems = []
    for context in settings.contexts:
        name = f"{CALIBRATION_FLAG}: context {context.min_kv_length}..{context.max_kv_length}"
        longest, limit = _longest_sequence(context, settings, max_model_len, room)
        if context.max_kv_length > max_model_len:
            problems.append(f"{name} does not fit max_model_len={max_model_len}: lower max_kv_length")
        elif context.prefill_tokens + worst > longest:
            problems.append(
                f"{name} does not fit: prefill_tokens={context.prefill_tokens} and up to {worst} tokens of "
                f"its steps are more than {limit}; lower prefill_tokens, warmup_steps, window_steps or "
                "windows_per_point"
            )
        elif context.prefill_tokens + 1 < context.min_kv_length:
            problems.append(
                f"{name} would measure shorter KV: prefill_tokens={context.prefill_tokens} must be at least "
                f"{context.min_kv_length - 1}"
            )
    if problems:
        raise ConfigError(problems)


def _check_grid(settings: CalibrationConfig) -> None:
    fault = check_connected({b: settings.target_graph_rows[b] for b in settings.request_buckets})
    if fault is not None:
        raise ConfigError(f"{CALIBRATION_FLAG}: {fault}")
