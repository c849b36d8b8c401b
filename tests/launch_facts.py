"""A machine and its files as `resolve` sees them, written by hand: nothing depends on where tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from core.config import EngineConfig
from core.errors import ConfigError, ExitCode
from core.facts import BUILTIN_CONFIG, Checkpoint, Facts
from core.options import LaunchOptions
from core.resolve import resolve

DRAFT_CONFIG = {
    "block_size": 7,
    "enable_confidence_head": True,
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 1,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
MODEL = {"model": "/m", "draft_model": "/d"}
VERIFY = {"speculative_algorithm": "DSpark", "enable_adaptive_target_verify": True}
MTP_VERIFY = {
    "speculative_algorithm": "MTP",
    "num_speculative_tokens": 5,
    "enable_adaptive_target_verify": True,
    **MODEL,
}
MTP_STEP = {"speculative_algorithm": "MTP", "enable_adaptive_draft_step": True, **MODEL}


def facts(**changes: Any) -> Facts:
    """A CPU machine with the built-in model, a DSpark draft and every named file in order."""
    known: dict[str, Any] = {
        "cpu_count": 4,
        "memory_bytes": 64 * 2**30,
        "fast_bfloat16": True,
        "target": Checkpoint(path=None, config=BUILTIN_CONFIG),
        "draft": Checkpoint(path=None, config=DRAFT_CONFIG),
        "absent": {"npu": "torch_npu is not installed", "cuda": "torch is built without CUDA"},
    }
    return Facts(**{**known, **changes})


def resolved(options: dict[str, Any], **changes: Any) -> EngineConfig:
    return resolve(LaunchOptions(**options), facts(**changes), {})


def problems(options: dict[str, Any], **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        resolved(options, **changes)
    assert caught.value.exit_code == ExitCode.CONFIG
    return caught.value.problems


def draft(**changes: Any) -> Checkpoint:
    config = {key: value for key, value in {**DRAFT_CONFIG, **changes}.items() if value is not None}
    return Checkpoint(path=Path("/d"), config=config)
