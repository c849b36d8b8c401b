"""Settings files are read strictly: every fault is refused with its JSON path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.config import ContextConfig
from core.errors import ConfigError
from core.spec.calibration_config import CalibrationOverrides, parse_calibration_overrides
from core.spec.draft_step_config import DraftDepthSettings, DraftStepConfig, load_draft_step_config
from core.spec.json_reader import JsonNode

CONTEXT = {"prefill_tokens": 128, "min_kv_length": 1, "max_kv_length": 512}


def overrides_of(content: object) -> CalibrationOverrides:
    return parse_calibration_overrides(JsonNode(content, "calibration.json"))


def test_every_override_is_read() -> None:
    assert overrides_of(
        {
            "model": "sps",
            "request_buckets": [1, 4],
            "target_graph_rows": {"4": [4, 32], "1": [1, 8]},
            "contexts": [CONTEXT],
            "warmup_steps": 0,
            "window_steps": 16,
            "windows_per_point": 5,
            "token_seed": 42,
            "draft_width": 7,
        }
    ) == CalibrationOverrides(
        model="sps",
        request_buckets=(1, 4),
        target_graph_rows={1: (1, 8), 4: (4, 32)},
        contexts=(ContextConfig(prefill_tokens=128, min_kv_length=1, max_kv_length=512),),
        warmup_steps=0,
        window_steps=16,
        windows_per_point=5,
        token_seed=42,
        draft_width=7,
    )


def test_an_empty_file_overrides_nothing() -> None:
    assert overrides_of({}) == CalibrationOverrides()


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([], "$ must be an object"),
        ({"windows": 3}, "$.windows is not a known key"),
        ({"model": "cubic"}, "$.model"),
        ({"model": None}, "$.model"),
        ({"request_buckets": []}, "$.request_buckets"),
        ({"request_buckets": [4, 1]}, "$.request_buckets must be strictly ascending"),
        ({"request_buckets": [1, "4"]}, "$.request_buckets[1]"),
        ({"request_buckets": [0]}, "$.request_buckets[0]"),
        ({"request_buckets": 4}, "$.request_buckets must be a list"),
        ({"target_graph_rows": [1, 2]}, "$.target_graph_rows must be an object"),
        ({"target_graph_rows": {"four": [4]}}, "'four'"),
        ({"target_graph_rows": {"4": [4, 4]}}, "$.target_graph_rows.4 must be strictly ascending"),
        ({"target_graph_rows": {"8": [8]}, "request_buckets": [4]}, "names bucket 8"),
        ({"contexts": []}, "$.contexts"),
        ({"contexts": [{**CONTEXT, "extra": 1}]}, "$.contexts[0].extra"),
        ({"contexts": [{"prefill_tokens": 1}]}, "$.contexts[0].min_kv_length is missing"),
        ({"contexts": [{**CONTEXT, "max_kv_length": 0}]}, "$.contexts[0].max_kv_length"),
        (
            {"contexts": [CONTEXT, {**CONTEXT, "min_kv_length": 512}]},
            "$.contexts[1] must not overlap contexts[0]",
        ),
        ({"warmup_steps": -1}, "$.warmup_steps"),
        ({"window_steps": 0}, "$.window_steps"),
        ({"window_steps": 3.0}, "$.window_steps must be an integer"),
        ({"window_steps": True}, "$.window_steps must be an integer"),
        ({"windows_per_point": "3"}, "$.windows_per_point"),
        ({"token_seed": -1}, "$.token_seed"),
        ({"token_seed": 2**64}, "$.token_seed"),
        ({"draft_width": 0}, "$.draft_width"),
    ],
)
def test_faults_of_a_calibration_file(content: object, path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overrides_of(content)
    assert path in str(caught.value)
    assert str(caught.value).startswith("calibration.json: ")


def test_documented_defaults_of_draft_steps() -> None:
    assert load_draft_step_config({"version": 1}) == DraftStepConfig(
        policy=DraftDepthSettings(window_size=20, update_interval=5, switch_min_gain=0.05),
        calibration=CalibrationOverrides(),
    )


def test_a_draft_step_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    path.write_text(
        json.dumps({"version": 1, "policy": {"switch_min_gain": 0}, "calibration": {"window_steps": 4}})
    )
    config = load_draft_step_config(path)
    assert config.policy == DraftDepthSettings(switch_min_gain=0.0)
    assert config.calibration == CalibrationOverrides(window_steps=4)


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ({}, "$.version is missing"),
        ({"version": 2}, "$.version must be 1"),
        ({"version": "1"}, "$.version must be 1"),
        ({"version": True}, "$.version must be 1"),
        ({"version": 1, "extra": {}}, "$.extra"),
        ({"version": 1, "policy": []}, "$.policy must be an object"),
        ({"version": 1, "policy": {"window": 1}}, "$.policy.window"),
        ({"version": 1, "policy": {"window_size": 0}}, "$.policy.window_size"),
        ({"version": 1, "policy": {"update_interval": 1.5}}, "$.policy.update_interval"),
        ({"version": 1, "policy": {"switch_min_gain": -0.1}}, "$.policy.switch_min_gain"),
        ({"version": 1, "policy": {"switch_min_gain": "5%"}}, "$.policy.switch_min_gain"),
        ({"version": 1, "calibration": {"model": "x"}}, "$.calibration.model"),
        ({"version": 1, "calibration": {"draft_width": 5}}, "$.calibration.draft_width"),
        ({"version": 1, "calibration": {"target_graph_rows": {}}}, "$.calibration.target_graph_rows"),
        ({"version": 1, "step_cost_models": {}}, "$.step_cost_models"),
        ({"version": 1, "calibration": {"step_cost_models": {}}}, "$.calibration.step_cost_models"),
    ],
)
def test_faults_of_a_draft_step_file(content: dict[str, object], path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_draft_step_config(content)
    assert path in str(caught.value)
    assert str(caught.value).startswith("adaptive_draft_step_config: ")


def test_precomputed_costs_are_refused_as_unsupported() -> None:
    with pytest.raises(ConfigError, match="not supported"):
        load_draft_step_config({"version": 1, "step_cost_models": {}})


@pytest.mark.parametrize(
    "text", ["", "{", '{"version": 1', '{"version": NaN}', '{"version": 1, "version": 1}', "\xff"]
)
def test_files_that_are_no_json(tmp_path: Path, text: str) -> None:
    path = tmp_path / "steps.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load_draft_step_config(path)
    assert str(path) in str(caught.value)


def test_deep_nesting_and_huge_numbers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    for text in ("[" * 100_000, '{"version": ' + "1" * 10_000 + "}", '{"version": 1e400}'):
        path.write_text(text)
        with pytest.raises(ConfigError):
            load_draft_step_config(path)
