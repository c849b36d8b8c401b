"""The effective configuration survives the way from the launcher to a rank."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from core.config import (
    CacheConfig,
    CalibrationConfig,
    ContextConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SpeculationConfig,
)
from core.config_codec import decode_config, encode_config


def make_config(
    *, speculation: SpeculationConfig | None = None, model_path: Path | None = None
) -> EngineConfig:
    """Build a small CPU configuration by hand, without the CLI."""
    return EngineConfig(
        model=ModelConfig(path=model_path, served_name="tiny", dtype="float32", max_model_len=256),
        cache=CacheConfig(page_size=16, kv_cache_bytes=None),
        schedule=ScheduleConfig(
            max_seqs_per_batch=4,
            prefill_chunk_tokens=64,
            request_buckets=(1, 2, 4),
            overlap=True,
            task_pipeline=True,
        ),
        speculation=speculation,
        parallel=ParallelConfig(),
        device=DeviceConfig(
            kind="cpu", graph_backend="cpugraph", graph_warmup=True, num_threads=1, npu_kernel_backend=None
        ),
        server=ServerConfig(
            host="127.0.0.1",
            port=0,
            drain_timeout_seconds=5.0,
            max_queue=8,
            log_format="json",
            log_level="info",
            decision_log=None,
        ),
        sources={"max_model_len": "command line"},
    )


def adaptive_speculation() -> SpeculationConfig:
    """Adaptive DSpark with every nested value present."""
    calibration = CalibrationConfig(
        source="preset",
        model="additive",
        request_buckets=(1, 2),
        target_graph_rows={1: (1, 2, 8), 2: (2, 4, 16)},
        contexts=(ContextConfig(prefill_tokens=128, min_kv_length=1, max_kv_length=256),),
        warmup_steps=2,
        window_steps=8,
        windows_per_point=2,
        token_seed=1,
    )
    return SpeculationConfig(
        algorithm="DSpark",
        draft_model=None,
        num_speculative_tokens=7,
        adaptive_draft_step=False,
        adaptive_target_verify=True,
        unified_graph=False,
        calibration=calibration,
        cost_table=None,
        cost_table_output=Path("/results/costs.json"),
    )


@pytest.mark.parametrize("speculation", [None, adaptive_speculation()], ids=["plain", "adaptive"])
def test_round_trip(speculation: SpeculationConfig | None) -> None:
    config = make_config(speculation=speculation, model_path=Path("/models/target"))
    assert decode_config(encode_config(config)) == config


def test_decoding_refuses_unknown_values() -> None:
    data = encode_config(make_config()).replace(b'"float32"', b'"float8"')
    with pytest.raises(msgspec.ValidationError, match="float8"):
        decode_config(data)
