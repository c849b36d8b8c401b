"""What startup calibration will measure, and files that change or replace it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from core.calibration_plan import default_grid, request_buckets, worst_case_tokens
from core.config import CalibrationConfig, EngineConfig
from core.facts import BUILTIN_CONFIG, Checkpoint, Document
from core.options import LaunchOptions
from core.spec.cost_bundle import Compatibility, CostBundle, CostProfile
from core.spec.costs import CostSample, SpsCost, check_connected
from tests.launch_facts import MODEL, MTP_STEP, VERIFY, problems, resolved


def calibration_of(config: EngineConfig) -> CalibrationConfig:
    assert config.speculation is not None
    assert config.speculation.calibration is not None
    return config.speculation.calibration


def with_calibration(content: dict[str, Any], **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    document = Document(source="c.json", content=content)
    return {**VERIFY, "adaptive_target_verify_calibration": "c.json", **options}, {"calibration": document}


def test_buckets_are_powers_of_two_and_the_limit() -> None:
    assert request_buckets(LaunchOptions(max_seqs_per_batch=6)) == (1, 2, 4, 6)
    assert request_buckets(LaunchOptions(max_seqs_per_batch=4, graph_decode_batch_size_limit=8)) == (
        1,
        2,
        4,
        8,
    )


def test_default_tiers() -> None:
    config = resolved(VERIFY)
    assert [config.target_tiers(b) for b in (1, 4)] == [(1, 2, 4, 8), (4, 8, 16, 32)]


@pytest.mark.parametrize("width", [5, 7])
def test_default_grid_is_connected_for_every_limit(width: int) -> None:
    for limit in range(1, 130):
        buckets = request_buckets(LaunchOptions(max_seqs_per_batch=limit))
        grid = default_grid(buckets, width)
        assert check_connected(grid) is None, limit
        assert all(tiers[0] == b and tiers[-1] == b * (width + 1) for b, tiers in grid.items())


def test_preset_of_the_builtin_model() -> None:
    calibration = calibration_of(resolved({**VERIFY, "max_seqs_per_batch": 64}))
    assert calibration.source == "preset"
    assert calibration.request_buckets == (1, 2, 4, 8, 16, 32)
    assert (calibration.warmup_steps, calibration.window_steps, calibration.windows_per_point) == (2, 8, 2)
    assert dataclasses.astuple(calibration.contexts[0]) == (128, 1, 4096)


def test_defaults_of_another_model() -> None:
    config = resolved({**VERIFY, **MODEL}, target=Checkpoint(path=Path("/m"), config=BUILTIN_CONFIG))
    calibration = calibration_of(config)
    assert calibration.source == "defaults"
    assert (calibration.warmup_steps, calibration.window_steps, calibration.windows_per_point) == (8, 32, 3)
    assert dataclasses.astuple(calibration.contexts[0]) == (2048, 1, 4096)
    assert worst_case_tokens(calibration, 7) == (8 + 96 + 3) * 8 + 7


def test_prefill_is_reduced_to_leave_room() -> None:
    target = Checkpoint(path=Path("/m"), config={**BUILTIN_CONFIG, "max_position_embeddings": 1024})
    calibration = calibration_of(resolved({**VERIFY, **MODEL}, target=target))
    assert dataclasses.astuple(calibration.contexts[0]) == (1024 - 863, 1, 1024)


def test_calibration_that_cannot_fit_asks_for_a_smaller_one() -> None:
    target = Checkpoint(path=Path("/m"), config={**BUILTIN_CONFIG, "max_position_embeddings": 512})
    (problem,) = problems({**VERIFY, **MODEL}, target=target)
    assert "max_model_len=512" in problem
    assert "give a smaller explicit configuration with adaptive_target_verify_calibration" in problem


def test_small_cache_limits_calibration_and_a_sequence() -> None:
    (problem,) = problems({"kv_cache_gb": 0.01})
    assert problem.startswith("kv_cache_gb=0.01 holds")
    (problem,) = problems({**VERIFY, "kv_cache_gb": 0.1})
    assert "kv_cache_gb, which holds" in problem


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ({"draft_width": 5}, "draft_width=5 is not the launch's num_speculative_tokens=7"),
        ({"request_buckets": [1, 3]}, "request buckets [3] are not captured"),
        ({"request_buckets": [1, 16]}, "not connected"),
        ({"target_graph_rows": {"64": [64, 512]}}, "request buckets [64] are not captured"),
        (
            {"target_graph_rows": {"4": [2, 32]}},
            "target_graph_rows [2] of request bucket 4 cannot be captured",
        ),
        ({"target_graph_rows": {"4": [4, 64]}}, "lack its full width: add 32"),
        (
            {"contexts": [{"prefill_tokens": 64, "min_kv_length": 1, "max_kv_length": 9000}]},
            "does not fit max_model_len=4096",
        ),
        (
            {"contexts": [{"prefill_tokens": 400, "min_kv_length": 1, "max_kv_length": 512}]},
            "does not fit: prefill_tokens=400",
        ),
        (
            {"contexts": [{"prefill_tokens": 64, "min_kv_length": 1000, "max_kv_length": 2000}]},
            "would measure shorter KV",
        ),
        ({"window_step": 4}, "window_step"),
        ({"enable_adaptive_spec_prune": True}, "use the flag enable_adaptive_target_verify"),
    ],
)
def test_calibration_file_faults(content: dict[str, Any], fault: str) -> None:
    options, changes = with_calibration(content)
    found = problems(options, **changes)
    assert any(fault in p and "adaptive_target_verify_calibration" in p for p in found), found


def test_calibration_file_overrides_keys() -> None:
    content = {
        "model": "sps",
        "request_buckets": [1, 16],
        "window_steps": 4,
        "target_graph_rows": {"16": [16, 128]},
    }
    options, changes = with_calibration(content)
    config = resolved(options, **changes)
    calibration = calibration_of(config)
    assert (calibration.source, calibration.model, calibration.window_steps) == ("file", "sps", 4)
    assert config.target_tiers(16) == (16, 128)
    assert config.target_tiers(8) == (8, 16, 32, 64)


def test_draft_step_config_is_read_before_a_launch() -> None:
    document = Document(source="s.json", content={"version": 1, "calibration": {"step_cost_models": {}}})
    found = problems({**MTP_STEP, "adaptive_draft_step_config": "s.json"}, draft_step_config=document)
    assert "step_cost_models" in found[0]
    assert "not available yet" in found[1]


def with_table(content: Any, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    document = Document(source="t.json", content=content)
    return {**VERIFY, "adaptive_target_verify_cost_table": "t.json", **options}, {"cost_table": document}


def test_bare_table_is_taken_with_its_width_only() -> None:
    table = {"draft_width": 7, "model": "sps", "steps_per_second": {"8": 120.0, "16": 95.0}}
    options, changes = with_table(table)
    calibration = calibration_of(resolved(options, **changes))
    assert (calibration.source, calibration.model, calibration.request_buckets) == (
        "bare table",
        "sps",
        (1, 2),
    )
    options, changes = with_table({**table, "draft_width": 5})
    (problem,) = problems(options, **changes)
    assert "draft_width differs: saved 5, current 7" in problem


def test_an_unreadable_table_is_the_only_problem() -> None:
    """Not also that a calibration, which such a launch would not make, has no room."""
    target = Checkpoint(path=Path("/m"), config={**BUILTIN_CONFIG, "max_position_embeddings": 512})
    document = Document(source="t.json", problem="not valid JSON")
    options = {**VERIFY, **MODEL, "adaptive_target_verify_cost_table": "t.json"}
    (problem,) = problems(options, target=target, cost_table=document)
    assert "t.json: not valid JSON" in problem


def test_legacy_bare_table_counts_as_width_7() -> None:
    options, changes = with_table({"model": "sps", "steps_per_second": {"6": 1.0}}, num_speculative_tokens=5)
    (problem,) = problems(options, **changes)
    assert "draft_width differs: saved 7, current 5" in problem


def saved_bundle(config: EngineConfig) -> dict[str, Any]:
    """What a calibration of `config` would have written, with invented costs."""
    spec = config.speculation
    assert spec is not None
    assert spec.calibration is not None
    buckets = config.schedule.request_buckets
    tiers = {bucket: config.target_tiers(bucket) for bucket in buckets}
    compatibility = Compatibility(
        target_sha256="t",
        draft_sha256="d",
        dtype=config.model.dtype,
        device="cpu:some",
        torch="2.13.0",
        graph_backend=config.device.graph_backend,
        unified_mtp_graph=False,
        tp_size=1,
        dp_size=1,
        cp_size=1,
        world_size=1,
        page_size=config.cache.page_size,
        max_model_len=config.model.max_model_len,
        captured_request_buckets=buckets,
        captured_target_rows=tiers,
        num_threads=config.device.num_threads,
        attention_backend="sdpa",
        enable_schedule_overlap=config.schedule.overlap,
    )
    rows = sorted({row for bucket in spec.calibration.request_buckets for row in tiers[bucket]})
    profile = CostProfile(
        context=spec.calibration.contexts[0],
        table=SpsCost({row: 100.0 / row for row in rows}),
        max_relative_error=0.0,
        mean_relative_error=0.0,
        samples=(CostSample(request_bucket=1, target_rows=1, seconds=(0.01,)),),
    )
    bundle = CostBundle(
        algorithm="DSpark",
        draft_width=config.draft_width,
        compatibility=compatibility,
        calibration=spec.calibration,
        profiles=(profile,),
    )
    content: dict[str, Any] = json.loads(json.dumps(bundle.to_json()))
    return content


def test_saved_bundle_restores_tiers() -> None:
    options, changes = with_calibration({"model": "sps", "target_graph_rows": {"16": [16, 128]}})
    content = saved_bundle(resolved(options, **changes))
    options, changes = with_table(content)
    config = resolved(options, **changes)
    assert calibration_of(config).source == "saved bundle"
    assert config.target_tiers(16) == (16, 128)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"page_size": 32}, "page_size differs: saved 16, current 32"),
        ({"dtype": "float32"}, 'dtype differs: saved "bfloat16", current "float32"'),
        ({"num_speculative_tokens": 5}, "draft_width differs: saved 7, current 5"),
        ({"max_seqs_per_batch": 16}, "captured_request_buckets differs"),
        ({"max_model_len": 2048}, "max_model_len differs: saved 4096, current 2048"),
        ({"num_threads": 1}, "num_threads differs: saved 4, current 1"),
    ],
)
def test_saved_bundle_of_another_launch_names_the_field(changed: dict[str, Any], fault: str) -> None:
    options, changes = with_table(saved_bundle(resolved(VERIFY)), **changed)
    found = problems(options, **changes)
    assert any(fault in p for p in found), found


def test_edited_bundle_is_refused() -> None:
    content = saved_bundle(resolved(VERIFY))
    content["profiles"][0]["fit"]["max_relative_error"] = 0.5
    options, changes = with_table(content)
    (problem,) = problems(options, **changes)
    assert "its sha256 does not match its content" in problem


def test_table_of_the_other_algorithm_is_refused() -> None:
    options, changes = with_table({"algorithm": "MTP", "kind": "xspec.cost_bundle"})
    (problem,) = problems(options, **changes)
    assert "algorithm differs: saved MTP, current DSpark" in problem
