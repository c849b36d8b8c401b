"""Tiny random DSpark checkpoints in DeepSpec's format, in which mistakes are visible.

Norm weights are far from 1, all dimensions differ, and theta is small so that positions matter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from core.kvcache.storage import GroupedHeads
from core.spec.drafts.dspark import DSparkDrafter, load_dspark
from tests.tiny import tiny_llama_config

TARGET = tiny_llama_config(num_hidden_layers=5, hidden_size=44, vocab_size=96)
MAX_POSITIONS = 64


def write_tiny_dspark(
    path: Path,
    target_config: dict[str, Any],
    *,
    block_size: int = 7,
    markov: str = "vanilla",
    seed: int = 0,
    num_layers: int = 2,
    target_layer_ids: tuple[int, ...] | None = None,
    confidence: bool = True,
    confidence_with_markov: bool = True,
    markov_rank: int = 10,
    dtype: torch.dtype = torch.float32,
    extra_tensors: dict[str, torch.Tensor] | None = None,
    config_overrides: dict[str, Any] | None = None,
) -> Path:
    """Write config.json and model.safetensors into `path` for the target with config.json `target_config`.

    extra_tensors: for example copies of the target's embedding. config_overrides: None removes a key.
    """
    config = _config(target_config, block_size, markov, num_layers, target_layer_ids, markov_rank)
    config["enable_confidence_head"] = confidence
    config["confidence_head_with_markov"] = confidence_with_markov
    config["dtype"] = str(dtype).removeprefix("torch.")
    tensors = _tensors(config, torch.Generator().manual_seed(seed))
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()} | (extra_tensors or {})
    config |= config_overrides or {}
    path.mkdir(parents=True, exist_ok=True)
    written = {key: value for key, value in config.items() if value is not None}
    (path / "config.json").write_text(json.dumps(written, indent=2))
    save_file(tensors, path / "model.safetensors")
    return path


def _config(
    target: dict[str, Any],
    block_size: int,
    markov: str,
    num_layers: int,
    layer_ids: tuple[int, ...] | None,
    markov_rank: int,
) -> dict[str, Any]:
    depth = target["num_hidden_layers"]
    if layer_ids is None:
        # The last layer is forbidden, so a target of one layer leaves only its embedding.
        layer_ids = tuple(sorted({0, (depth - 1) // 2, depth - 2})) if depth > 1 else (-1,)
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": 52,
        "num_hidden_layers": num_layers,
        "num_target_layers": depth,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 14,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"] * num_layers,
        "block_size": block_size,
        "mask_token_id": target["vocab_size"] - 1,
        "target_layer_ids": list(layer_ids),
        "markov_rank": markov_rank,
        "markov_head_type": markov,
    }


def _tensors(config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    head_dim, inner = config["head_dim"], config["intermediate_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    def norm(size: int) -> torch.Tensor:
        return 0.5 + torch.rand(size, generator=generator)

    tensors = {
        "fc.weight": linear(hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for index in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": norm(hidden),
            "post_attention_layernorm.weight": norm(hidden),
            "self_attn.q_proj.weight": linear(queries, hidden),
            "self_attn.k_proj.weight": linear(keys, hidden),
            "self_attn.v_proj.weight": linear(keys, hidden),
            "self_attn.o_proj.weight": linear(hidden, queries),
            "self_attn.q_norm.weight": norm(head_dim),
            "self_attn.k_norm.weight": norm(head_dim),
            "mlp.gate_proj.weight": linear(inner, hidden),
            "mlp.up_proj.weight": linear(inner, hidden),
            "mlp.down_proj.weight": linear(hidden, inner),
        }
        tensors |= {f"layers.{index}.{name}": tensor for name, tensor in layer.items()}
    if rank:
        tensors["markov_head.markov_w1.weight"] = torch.randn(vocab, rank, generator=generator)
        tensors["markov_head.markov_w2.weight"] = linear(vocab, rank)
    # The sizes of a kind that the loader refuses do not matter; its message is what a test looks at.
    if config["markov_head_type"] == "gated":
        tensors["markov_head.gate_proj.weight"] = linear(rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = torch.randn(rank, generator=generator)
    if config["markov_head_type"] == "rnn":
        tensors["markov_head.joint_proj.weight"] = linear(3 * rank, 2 * rank + hidden)
        tensors["markov_head.joint_proj.bias"] = torch.randn(3 * rank, generator=generator)
    if config["enable_confidence_head"]:
        width = hidden + (rank if config["confidence_head_with_markov"] else 0)
        tensors["confidence_head.proj.weight"] = linear(1, width)
        tensors["confidence_head.proj.bias"] = torch.randn(1, generator=generator) * 0.5
    return tensors


class FakeTarget:
    """Embedding and head only; features are made up by the tests."""

    config = TARGET
    vocab_size = TARGET["vocab_size"]
    hidden_size = TARGET["hidden_size"]
    num_layers = TARGET["num_hidden_layers"]
    max_positions = MAX_POSITIONS
    kv_layers: list[GroupedHeads] = []  # noqa: RUF012

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(5)
        self.embedding = torch.randn(self.vocab_size, self.hidden_size, generator=random)
        self.head = torch.randn(self.vocab_size, self.hidden_size, generator=random) / self.hidden_size**0.5

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a drafter must not run the target")

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.embedding[token_ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.head.T


def load_tiny(path: Path, target: Any, width: int = 5) -> DSparkDrafter:
    return load_dspark(
        path,
        target,
        width=width,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_positions=MAX_POSITIONS,
    )
