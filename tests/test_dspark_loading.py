"""What a DSpark checkpoint must be to be used, and what a user reads when it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from core.errors import ModelLoadError
from tests.tiny_draft import TARGET, FakeTarget, load_tiny, write_tiny_dspark


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"temperatures": [1, 1]}', "2 temperatures for 5 slots"),
        ('{"temperatures": [1, 1, 0, 1, 1]}', "temperature 0.0 is not positive"),
        ('{"temperatures": [1, 1, NaN, 1, 1]}', "temperature nan is not positive"),
        ('{"temps": [1]}', "cannot be read"),
        ("[", "cannot be read"),
    ],
)
def test_faulty_temperatures_are_refused(tmp_path: Path, content: str, message: str) -> None:
    write_tiny_dspark(tmp_path, TARGET)
    (tmp_path / "confidence_temperatures.json").write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        load_tiny(tmp_path, FakeTarget())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_target_layers": 6}, "num_target_layers is 6 but the target has 5"),
        ({"hidden_size": 48}, "hidden_size is 48 but the target has 44"),
        ({"vocab_size": 90, "mask_token_id": 1}, "vocab_size is 90 but the target has 96"),
        ({"target_layer_ids": [0, 4]}, "must stay below 4"),
        ({"target_layer_ids": [2, 1]}, "must rise strictly"),
        ({"target_layer_ids": []}, "must rise strictly"),
        ({"block_size": 4}, "num_speculative_tokens is 5 but the draft's block_size is 4; choose 1 to 4"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm' is not supported; use one of vanilla"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "'sliding_attention' are not supported"),
        ({"use_sliding_window": True}, "'sliding_attention' are not supported"),
        ({"sample_from_anchor": False}, "sample_from_anchor is False"),
        ({"speculators_model_type": "dspark"}, "speculators format"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architecture 'Gemma4DSparkModel'"),
        ({"mask_token_id": 96}, "mask_token_id 96 is outside"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"block_size": None}, "config.json lacks block_size"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"num_hidden_layers": 3}, "missing tensors"),
        ({"intermediate_size": 50}, "has shape"),
    ],
)
def test_unfit_drafts_are_refused(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    write_tiny_dspark(tmp_path, TARGET, config_overrides=overrides)
    with pytest.raises(ModelLoadError, match=message):
        load_tiny(tmp_path, FakeTarget())


def test_all_problems_are_named_at_once(tmp_path: Path) -> None:
    write_tiny_dspark(tmp_path, TARGET, config_overrides={"num_target_layers": 6, "block_size": 2})
    with pytest.raises(ModelLoadError, match=r"(?s)num_target_layers.*num_speculative_tokens"):
        load_tiny(tmp_path, FakeTarget())


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_vocabulary_matrices_must_be_the_targets(tmp_path: Path, name: str) -> None:
    target = FakeTarget()
    copies = {"embed_tokens.weight": target.embedding, "lm_head.weight": target.head}
    load_tiny(write_tiny_dspark(tmp_path / "same", TARGET, extra_tensors=copies), target)
    copies[name] = copies[name] + torch.eye(*copies[name].shape) * 1e-3
    path = write_tiny_dspark(tmp_path / "other", TARGET, extra_tensors=copies)
    with pytest.raises(ModelLoadError, match=f"{name}.*differs from the target's"):
        load_tiny(path, target)
