"""Llama and SmolLM2: grouped-query attention with half-split rotary embedding and a gated MLP.

Letters: T rows, H hidden size, I intermediate size, n heads, k KV heads, d head size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from core.engine.batch import RaggedBatch
from core.errors import ModelLoadError
from core.kvcache.storage import GroupedHeads, LayerCache
from core.layers.attention import AttentionPlan, paged_attention, plan_attention
from core.layers.linear import Embedding, FusedLinear
from core.layers.norm_rope import RMSNorm, RotaryTable, apply_rope, rope_theta, swiglu
from core.models.base import TargetOutput


class LlamaAttention(nn.Module):
    """Fused QKV, rotary embedding on q and k at once, paged attention, output projection."""

    def __init__(self, hidden_size: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        parts = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.qkv = FusedLinear(hidden_size, parts, bias=bias)
        self.out = FusedLinear(heads * head_dim, (hidden_size,), bias=bias)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: LayerCache, plan: AttentionPlan
    ) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(1, (-1, self.head_dim))  # [T, n + 2k, d]
        rotated = apply_rope(qkv[:, : self.heads + self.kv_heads], *rope)
        query, key = rotated.split((self.heads, self.kv_heads), dim=1)
        value = qkv[:, self.heads + self.kv_heads :]
        return self.out(paged_attention(query, key, value, cache=cache, plan=plan, scale=self.scale))


class LlamaMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool) -> None:
        super().__init__()
        self.gate_up = FusedLinear(hidden_size, (intermediate_size, intermediate_size), bias=bias)
        self.down = FusedLinear(intermediate_size, (hidden_size,), bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(self.gate_up(x)))


class LlamaLayer(nn.Module):
    def __init__(self, attention: LlamaAttention, mlp: LlamaMLP, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(hidden_size, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(hidden_size, eps)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache: LayerCache, plan: AttentionPlan
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rope, cache, plan)
        return x + self.mlp(self.mlp_norm(x))

    def weight_slots(self, prefix: str) -> dict[str, torch.Tensor]:
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return {
            prefix + "input_layernorm.weight": self.attention_norm.weight.data,
            prefix + "post_attention_layernorm.weight": self.mlp_norm.weight.data,
            **self.attention.qkv.slots([attention + name for name in ("q_proj", "k_proj", "v_proj")]),
            **self.attention.out.slots([attention + "o_proj"]),
            **self.mlp.gate_up.slots([mlp + "gate_proj", mlp + "up_proj"]),
            **self.mlp.down.slots([mlp + "down_proj"]),
        }


class LlamaModel(nn.Module):
    """A `TargetModel`. Parameters are uninitialised until `load_tensors` has filled `weight_slots()`."""

    def __init__(
        self,
        config: dict[str, Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int | None = None,
    ) -> None:
        super().__init__()
        _check(config)
        heads, hidden_size = config["num_attention_heads"], config["hidden_size"]
        kv_heads = config.get("num_key_value_heads") or heads
        head_dim = config.get("head_dim") or hidden_size // heads
        eps = config["rms_norm_eps"]
        self.config = config
        self.vocab_size: int = config["vocab_size"]
        self.hidden_size: int = hidden_size
        self.num_layers: int = config["num_hidden_layers"]
        self.max_positions: int = max_positions or config["max_position_embeddings"]
        self.kv_layers = [GroupedHeads(num_kv_heads=kv_heads, head_dim=head_dim)] * self.num_layers
        self._group = heads // kv_heads
        attention_bias, mlp_bias = config.get("attention_bias", False), config.get("mlp_bias", False)
        with torch.device("meta"):  # no memory is touched twice
            self.embedding = Embedding(self.vocab_size, hidden_size)
            self.layers = nn.ModuleList(
                LlamaLayer(
                    LlamaAttention(hidden_size, heads, kv_heads, head_dim, bias=attention_bias),
                    LlamaMLP(hidden_size, config["intermediate_size"], bias=mlp_bias),
                    hidden_size,
                    eps,
                )
                for _ in range(self.num_layers)
            )
            self.norm = RMSNorm(hidden_size, eps)
            self.head = (
                None if config.get("tie_word_embeddings", False) else Embedding(self.vocab_size, hidden_size)
            )
        self.to(dtype).to_empty(device=device)
        self.rotary = RotaryTable(head_dim, self.max_positions, rope_theta(config), dtype).to(device)

    def forward(
        self, batch: RaggedBatch, caches: list[LayerCache], *, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run T rows; see `TargetModel`."""
        self.check_feature_layers(feature_layers)
        x = self.embedding(batch.input_ids)
        rope = self.rotary(batch.positions)
        plan = plan_attention(batch, group=self._group, page_size=caches[0].key.shape[1], dtype=x.dtype)
        captured = {-1: x}
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            x = layer(x, rope, cache, plan)
            if index in feature_layers:
                captured[index] = x
        features = (
            torch.cat([captured[index] for index in feature_layers], dim=-1) if feature_layers else None
        )
        return TargetOutput(hidden=self.norm(x), features=features)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, H]."""
        return self.embedding(token_ids)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] -> [N, V]."""
        return (self.head or self.embedding).logits(hidden)

    def check_feature_layers(self, feature_layers: tuple[int, ...]) -> None:
        """Refuse ids that are no inner layer. The last layer's output exists only after the final norm."""
        wrong = [index for index in feature_layers if not -1 <= index < self.num_layers - 1]
        if wrong:
            raise ModelLoadError(
                f"target layer ids {wrong} cannot be captured from a model of {self.num_layers} layers; "
                f"use -1 (embedding) to {self.num_layers - 2}, as the draft was trained"
            )

    def pack(self) -> None:
        """Weights are final: lay them out for this device."""
        for module in self.modules():
            if isinstance(module, FusedLinear):
                module.pack()
        (self.embedding if self.head is None else self.head).pack_head()

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view of a parameter that it fills."""
        slots = {
            "model.embed_tokens.weight": self.embedding.weight.data,
            "model.norm.weight": self.norm.weight.data,
        }
        if self.head is not None:
            slots["lm_head.weight"] = self.head.weight.data
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            slots |= layer.weight_slots(f"model.layers.{index}.")
        return slots

    def ignores_weight(self, name: str) -> bool:
        """Old checkpoints store rotary buffers, and some store a tied head twice."""
        return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.head is None)


def _check(config: dict[str, Any]) -> None:
    """Refuse what this file does not compute, before any memory is taken."""
    required = (
        "hidden_size",
        "intermediate_size",
        "max_position_embeddings",
        "num_attention_heads",
        "num_hidden_layers",
        "rms_norm_eps",
        "vocab_size",
    )
    missing = [key for key in required if key not in config]
    if missing:
        raise ModelLoadError(f"config.json lacks {', '.join(missing)}; give a complete Hugging Face config")
    sizes = {key: config[key] for key in required if key != "rms_norm_eps"}
    sizes |= {key: config[key] for key in ("num_key_value_heads", "head_dim") if config.get(key) is not None}
    for key, size in sizes.items():
        if type(size) is not int or size < 1:
            raise ModelLoadError(f"config.json: {key} must be a whole number from 1, not {size!r}")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    if heads % kv_heads:
        raise ModelLoadError(
            f"config.json: {heads} attention heads are not a multiple of {kv_heads} KV heads"
        )
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs")
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelLoadError(
            f"config.json: hidden_act {config['hidden_act']!r} is not supported (only 'silu')"
        )
    partial = (config.get("rope_parameters") or config).get("partial_rotary_factor", 1.0)
    if partial != 1.0:
        raise ModelLoadError(f"config.json: partial_rotary_factor {partial} is not supported (only 1.0)")
