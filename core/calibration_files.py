"""Files that change or replace calibration: overrides, saved costs, and the settings of adaptive draft steps.

Formats are read elsewhere (`core.spec`); here their content is held against the launch, before a model loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from core.config import CalibrationConfig, ContextConfig, EngineConfig, default_tiers
from core.errors import ConfigError
from core.facts import Document
from core.options import RETIRED_FLAGS
from core.spec.calibration_config import parse_calibration_overrides
from core.spec.cost_bundle import CostBundle, bundle_from_json, canonical_sha256, settings_compared
from core.spec.cost_table import LEGACY_DRAFT_WIDTH, bare_table_from_json
from core.spec.draft_step_config import parse_draft_step_config
from core.spec.json_reader import JsonNode

CALIBRATION_FLAG = "adaptive_target_verify_calibration"
TABLE_FLAG = "adaptive_target_verify_cost_table"


def check_draft_step_config(document: Document | None) -> None:
    """Refuse a file that `adaptive_draft_step_config` could not use."""
    if document is not None and not document.problem:
        parse_draft_step_config(_node(document, "adaptive_draft_step_config"))


def overridden(
    settings: CalibrationConfig, document: Document, buckets: tuple[int, ...], width: int
) -> tuple[CalibrationConfig, tuple[ContextConfig, ...] | None]:
    """Apply a file's keys over `settings`; also the contexts that it asks for, if it does.

    Raises one ConfigError with everything in the file that the launch has not captured.
    """
    given = parse_calibration_overrides(_node(document, CALIBRATION_FLAG))
    subject = f"{CALIBRATION_FLAG}={document.source}"
    problems = []
    if given.draft_width not in (None, width):
        problems.append(
            f"{subject}: draft_width={given.draft_width} is not the launch's num_speculative_tokens={width}: "
            "make them equal"
        )
    own_rows = dict(given.target_graph_rows or {})
    measured = given.request_buckets or settings.request_buckets
    unknown = sorted({*measured, *own_rows} - {*buckets})
    if unknown:
        problems.append(
            f"{subject}: request buckets {unknown} are not captured: use some of {list(buckets)}, or change "
            "graph_decode_batch_size_limit"
        )
    problems += [f"{subject}: {fault}" for fault in _tier_faults(own_rows, width)]
    if problems:
        raise ConfigError(problems)
    rows = {
        bucket: settings.target_graph_rows.get(bucket, default_tiers(bucket, width)) for bucket in measured
    }
    kept = {name: value for name in _PLAIN_KEYS if (value := getattr(given, name)) is not None}
    changed = dataclasses.replace(
        settings,
        source="file",
        request_buckets=tuple(measured),
        target_graph_rows={**rows, **own_rows},
        contexts=given.contexts or settings.contexts,
        **kept,
    )
    return changed, given.contexts


def from_cost_table(
    document: Document, algorithm: str, buckets: tuple[int, ...], width: int, *, max_model_len: int
) -> CalibrationConfig:
    """Settings behind saved costs. Tiers are captured as they were when a bundle was measured."""
    node = _node(document, TABLE_FLAG)
    content = node.value if isinstance(node.value, dict) else {}
    if "mode" in content or content.get("algorithm") not in (None, algorithm):
        saved = f"{content.get('algorithm')}{' draft steps' if 'mode' in content else ''}"
        raise ConfigError(
            f"{TABLE_FLAG}={document.source}: algorithm differs: saved {saved}, current {algorithm}; "
            "costs never move between them: calibrate this launch"
        )
    if "model" in content and "profiles" not in content:
        return _from_bare_table(node, document, buckets, width, max_model_len)
    bundle = bundle_from_json(node)
    problems = [
        f"{TABLE_FLAG}={document.source}: {fault}"
        for fault in _bundle_faults(bundle, content, buckets, width)
    ]
    if problems:
        raise ConfigError(problems)
    rows = dict(bundle.compatibility.captured_target_rows)
    return dataclasses.replace(bundle.calibration, source="saved bundle", target_graph_rows=rows)


def bundle_differences(document: Document, config: EngineConfig) -> list[str]:
    """Compatibility fields of a saved bundle that differ, of those known before a model is loaded."""
    node = _node(document, TABLE_FLAG)
    if not isinstance(node.value, dict) or "profiles" not in node.value:
        return []
    saved = bundle_from_json(node).compatibility
    current = dataclasses.replace(saved, **settings_compared(config))
    return [
        f"{TABLE_FLAG}={document.source}: {difference}; restore it or calibrate again"
        for difference in saved.differences(current)
    ]


def _from_bare_table(
    node: JsonNode, document: Document, buckets: tuple[int, ...], width: int, max_model_len: int
) -> CalibrationConfig:
    saved_width, costs = bare_table_from_json(node)
    saved_width = saved_width or LEGACY_DRAFT_WIDTH
    if saved_width != width:
        raise ConfigError(
            f"{TABLE_FLAG}={document.source}: draft_width differs: saved {saved_width}, current {width}; "
            f"set num_speculative_tokens={saved_width} or calibrate again"
        )
    covered = tuple(bucket for bucket in buckets if costs.has(bucket, bucket * (width + 1)))
    if not covered:
        raise ConfigError(
            f"{TABLE_FLAG}={document.source}: has no cost of full width for any captured request bucket "
            f"{list(buckets)}; calibrate again"
        )
    return CalibrationConfig(
        source="bare table",
        model="sps" if costs.to_json()["model"] == "sps" else "additive",
        request_buckets=covered,
        target_graph_rows={bucket: default_tiers(bucket, width) for bucket in buckets},
        contexts=(ContextConfig(prefill_tokens=0, min_kv_length=1, max_kv_length=max_model_len),),
        warmup_steps=0,
        window_steps=0,
        windows_per_point=0,
        token_seed=0,
    )


def _bundle_faults(
    bundle: CostBundle, content: Mapping[str, object], buckets: tuple[int, ...], width: int
) -> Iterator[str]:
    saved = bundle.compatibility
    if content["sha256"] != canonical_sha256(content):
        yield "its sha256 does not match its content: it was edited or damaged; calibrate again"
    if bundle.draft_width != width:
        yield (
            f"draft_width differs: saved {bundle.draft_width}, current {width}; set num_speculative_tokens="
            f"{bundle.draft_width} or calibrate again"
        )
        return
    if saved.captured_request_buckets != buckets:
        yield (
            f"captured_request_buckets differs: saved {list(saved.captured_request_buckets)}, current "
            f"{list(buckets)}; set graph_decode_batch_size_limit={saved.captured_request_buckets[-1]} or "
            "calibrate again"
        )
    elif set(saved.captured_target_rows) != set(buckets):
        yield "captured_target_rows does not name every captured request bucket; calibrate again"
    yield from _tier_faults(saved.captured_target_rows, width)


def _tier_faults(rows: Mapping[int, tuple[int, ...]], width: int) -> Iterator[str]:
    """Tiers that cannot be captured, and buckets that lost their full width."""
    for bucket, tiers in rows.items():
        full = bucket * (width + 1)
        outside = [tier for tier in tiers if not bucket <= tier <= full]
        if outside:
            yield (
                f"target_graph_rows {outside} of request bucket {bucket} cannot be captured: "
                f"use {bucket}..{full}"
            )
        if full not in tiers:
            yield f"target_graph_rows of request bucket {bucket} lack its full width: add {full}"


_PLAIN_KEYS = ("model", "warmup_steps", "window_steps", "windows_per_point", "token_seed")


def _node(document: Document, flag: str) -> JsonNode:
    """The document's content; a retired name in it is refused here, since readers only know it as unknown."""
    if isinstance(document.content, dict):
        for name in RETIRED_FLAGS.keys() & document.content.keys():
            raise ConfigError(
                f"{flag}={document.source}: $.{name} is a retired name and has no effect: use the flag "
                f"{RETIRED_FLAGS[name]}"
            )
    return JsonNode(document.content, f"{flag}={document.source}")
