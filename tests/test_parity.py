"""The built-in model, four prompts: adaptive verification and random budgets emit what plain decoding emits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.models.builtin import find_gguf
from tests.parity import compare

PROMPTS = Path(__file__).parent / "prompts" / "parity.jsonl"
TOKENS, GAP = 24, 1e-4


def test_greedy_output_is_that_of_no_speculation_in_fp32() -> None:
    try:
        find_gguf()
    except Exception as error:
        pytest.skip(f"the built-in model is not installed: {error}")
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    for arm, concurrency, found in compare(
        prompts, tokens=TOKENS, dtype="float32", concurrencies=(3,), threads=2
    ):
        assert all(difference.gap < GAP for difference in found), (arm, concurrency, found)
