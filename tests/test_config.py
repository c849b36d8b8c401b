"""The flag table, the config tree, and what is looked up on disk before a launch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from core.config import to_plain
from core.facts import find_target, gather_facts, read_checkpoint
from core.options import LaunchOptions, flag_table, flags_by_name, parse_bool
from tests.launch_facts import VERIFY, resolved

# Launch scripts depend on these names and defaults: a change here is a change for users.
FROZEN = {
    "model": None,
    "draft_model": None,
    "served_model_name": None,
    "backend": "llm",
    "model_impl": "python",
    "dtype": "auto",
    "max_model_len": None,
    "speculative_algorithm": "none",
    "num_speculative_tokens": None,
    "enable_adaptive_draft_step": False,
    "enable_adaptive_target_verify": False,
    "enable_probabilistic_draft": False,
    "enable_unified_mtp_graph": False,
    "adaptive_draft_step_config": None,
    "adaptive_target_verify_calibration": None,
    "adaptive_target_verify_cost_table": None,
    "adaptive_target_verify_cost_table_output": None,
    "max_seqs_per_batch": 32,
    "graph_decode_batch_size_limit": None,
    "prefill_chunk_tokens": 512,
    "enable_schedule_overlap": True,
    "enable_task_pipeline": True,
    "page_size": 16,
    "kv_cache_gb": None,
    "device": "auto",
    "npu_kernel_backend": None,
    "num_threads": None,
    "enable_graph": True,
    "disable_graph_warmup": False,
    "python_graph_backend": "auto",
    "nnodes": 1,
    "node_rank": 0,
    "nproc_per_node": 1,
    "master_node_addr": "127.0.0.1:27000",
    "dp_size": 1,
    "cp_size": 1,
    "enable_pd_disaggregation": False,
    "host": "127.0.0.1",
    "port": 8000,
    "api_key_file": None,
    "drain_timeout": 30.0,
    "max_queue": 256,
    "log_format": "auto",
    "log_level": "info",
    "log_dir": None,
    "metrics_compat": "none",
    "decision_log": None,
}


def test_flags_and_defaults_are_frozen() -> None:
    assert {flag.name: flag.default for flag in flag_table()} == FROZEN
    assert flags_by_name()["acl_graph_decode_batch_size_limit"].name == "graph_decode_batch_size_limit"


def test_every_option_is_a_flag() -> None:
    names = {entry.name for entry in dataclasses.fields(LaunchOptions)}
    assert names - {flag.name for flag in flag_table()} == {"retired"}


def test_every_default_is_valid_text_for_its_flag() -> None:
    for flag in flag_table():
        if flag.default is not None:
            assert flag.parse(str(flag.default)) == flag.default
            assert flag.accept(flag.default) == flag.default


@pytest.mark.parametrize(("text", "value"), [("true", True), ("False", False), ("1", True), ("off", False)])
def test_booleans(text: str, value: bool) -> None:
    assert parse_bool(text) is value


@pytest.mark.parametrize("value", [True, "8000", 8000.0, None, [8000]])
def test_typed_values_are_not_converted(value: Any) -> None:
    with pytest.raises(ValueError, match="expected a whole number"):
        flags_by_name()["port"].accept(value)


def test_config_tree_is_json() -> None:
    plain = to_plain(resolved(VERIFY))
    assert json.loads(json.dumps(plain)) == plain
    assert plain["speculation"]["calibration"]["target_graph_rows"]["4"] == [4, 8, 16, 32]


# What is looked up on disk.


def write_config(directory: Path, content: str = '{"max_position_embeddings": 128}') -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(content)
    return directory


def test_model_directory(tmp_path: Path) -> None:
    found = find_target(str(write_config(tmp_path / "model")))
    assert found.config == {"max_position_embeddings": 128}
    assert not found.problem


@pytest.mark.parametrize(
    ("content", "fault"),
    [("{", "is not valid JSON"), ("[]", "is not an object"), ("", "is not valid JSON")],
)
def test_damaged_config_json(tmp_path: Path, content: str, fault: str) -> None:
    assert fault in read_checkpoint(write_config(tmp_path / "model", content)).problem


def test_missing_model_directory(tmp_path: Path) -> None:
    assert "does not exist" in read_checkpoint(tmp_path / "none").problem
    assert "config.json cannot be read" in read_checkpoint(tmp_path).problem
    (tmp_path / "weights.gguf").touch()
    assert "is a file" in read_checkpoint(tmp_path / "weights.gguf").problem


def test_hub_id_is_refused_or_taken_from_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    refused = find_target("org/some-model")
    assert "looks like a Hugging Face hub id" in refused.problem
    assert "never downloads" in refused.problem

    repository = tmp_path / "models--org--some-model"
    snapshot = write_config(repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    assert find_target("org/some-model").path == snapshot


def test_a_path_with_a_slash_is_no_hub_id() -> None:
    assert "does not exist" in find_target("./models/none").problem
    assert "does not exist" in find_target("/models/none").problem


def test_files_are_read_and_outputs_checked(tmp_path: Path) -> None:
    damaged = tmp_path / "calibration.json"
    damaged.write_text('{"model": ')
    found = gather_facts(
        LaunchOptions(
            adaptive_target_verify_calibration=str(damaged),
            adaptive_target_verify_cost_table=str(tmp_path / "none.json"),
            adaptive_target_verify_cost_table_output=str(damaged),
        )
    )
    assert found.calibration is not None
    assert "not valid JSON" in found.calibration.problem
    assert found.cost_table is not None
    assert "cannot read" in found.cost_table.problem
    assert "exists already" in found.output_problem
    assert "cpu" in found.devices
