"""DSpark restated without cache, pages or batches: one sequence's whole context as a plain matrix, float32.

Written from the published maths alone, one head and one slot at a time, to be compared with the engine's
drafter. `mutation` names a mistake to make on purpose, so that tests can show that the comparison sees it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

MUTATIONS = (
    "causal_block",
    "no_context_k_norm",
    "context_rope_off_by_one",
    "block_rope_off_by_one",
    "input_norm_on_context",
    "last_context_row_hidden",
)


@dataclass
class Oracle:
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor  # [V, H], the target's
    head: torch.Tensor  # [V, H]
    mutation: str = ""

    @classmethod
    def read(cls, path: Path, embedding: torch.Tensor, head: torch.Tensor) -> Oracle:
        tensors = {name: tensor.float() for name, tensor in load_file(path / "model.safetensors").items()}
        return cls(json.loads((path / "config.json").read_text()), tensors, embedding.float(), head.float())

    def block_hidden(self, features: torch.Tensor, anchor: int, width: int) -> torch.Tensor:
        """features [p, m * H] of positions 0 .. p-1, the anchor stands at p. Returns [W, H]."""
        context = self._rms(features @ self.tensors["fc.weight"].T, "hidden_norm")
        x = self.embedding[torch.tensor([anchor] + [self.config["mask_token_id"]] * (width - 1))]
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(f"layers.{layer}.", x, context)
        return self._rms(x, "norm")

    def draft(self, hidden: torch.Tensor, anchor: int) -> tuple[list[int], torch.Tensor]:
        """hidden [W, H] -> greedy tokens and confidence logits [W]."""
        rank = self.config["markov_rank"]
        state = torch.zeros(rank)
        tokens, logits = [], []
        previous = anchor
        for slot in hidden:
            if self.config["enable_confidence_head"]:
                logits.append(self._confidence_logit(slot, previous))
            scores = self.head @ slot
            if rank:
                embedded = self.tensors["markov_head.markov_w1.weight"][previous]
                bias, state = self._bias(embedded, slot, state)
                scores = scores + bias
            previous = int(scores.argmax())
            tokens.append(previous)
        return tokens, torch.tensor(logits)

    def _layer(self, prefix: str, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        config, start = self.config, len(context)
        noise = self._rms(x, prefix + "input_layernorm")
        if self.mutation == "input_norm_on_context":
            context = self._rms(context, prefix + "input_layernorm")
        head_dim = config["head_dim"]
        context_positions = torch.arange(start) + (self.mutation == "context_rope_off_by_one")
        block_positions = torch.arange(start, start + len(x)) + (self.mutation == "block_rope_off_by_one")
        heads = []
        for head in range(config["num_attention_heads"]):
            kv_head = head // (config["num_attention_heads"] // config["num_key_value_heads"])
            query, block_key, block_value = (
                self._project(prefix, name, index, noise)
                for name, index in (("q", head), ("k", kv_head), ("v", kv_head))
            )
            context_key, context_value = (self._project(prefix, name, kv_head, context) for name in "kv")
            k_norm = prefix + "self_attn.k_norm"
            if self.mutation != "no_context_k_norm":
                context_key = self._rms(context_key, k_norm)
            keys = torch.cat(
                (
                    self._rope(context_key, context_positions),
                    self._rope(self._rms(block_key, k_norm), block_positions),
                )
            )
            query = self._rope(self._rms(query, prefix + "self_attn.q_norm"), block_positions)
            scores = query @ keys.T / math.sqrt(head_dim)
            if self.mutation == "causal_block":
                future = torch.ones(len(x), len(x)).triu(1).bool()
                scores[:, start:] = scores[:, start:].masked_fill(future, -math.inf)
            if self.mutation == "last_context_row_hidden":
                scores[:, start - 1] = -math.inf
            heads.append(scores.softmax(-1) @ torch.cat((context_value, block_value)))
        x = x + torch.cat(heads, -1) @ self.tensors[prefix + "self_attn.o_proj.weight"].T
        inner = self._rms(x, prefix + "post_attention_layernorm")
        gate, up, down = (self.tensors[f"{prefix}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        gated = inner @ gate.T
        return x + (gated * torch.sigmoid(gated) * (inner @ up.T)) @ down.T

    def _project(self, prefix: str, name: str, head: int, rows: torch.Tensor) -> torch.Tensor:
        head_dim = self.config["head_dim"]
        weight = self.tensors[f"{prefix}self_attn.{name}_proj.weight"]
        return rows @ weight[head * head_dim : (head + 1) * head_dim].T

    def _rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.tensors[f"{name}.weight"]

    def _rope(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pairs (j, j + d/2) as complex numbers, turned by position * theta^(-2j/d)."""
        half = x.shape[-1] // 2
        frequency = self.config["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        turn = torch.exp(1j * positions[:, None] * frequency)
        turned = torch.complex(x[:, :half], x[:, half:]).to(torch.complex128) * turn
        return torch.cat((turned.real, turned.imag), -1).float()

    def _bias(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        w2 = self.tensors["markov_head.markov_w2.weight"]
        kind = self.config["markov_head_type"]
        if kind == "gated":
            weight, bias = (self.tensors[f"markov_head.gate_proj.{part}"] for part in ("weight", "bias"))
            return w2 @ (torch.sigmoid(weight @ torch.cat((hidden, embedded)) + bias) * embedded), state
        if kind == "rnn":
            weight, bias = (self.tensors[f"markov_head.joint_proj.{part}"] for part in ("weight", "bias"))
            gate, candidate, output = (weight @ torch.cat((state, embedded, hidden)) + bias).chunk(3)
            gate = torch.sigmoid(gate)
            return w2 @ torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)
        assert kind == "vanilla"
        return w2 @ embedded, state

    def _confidence_logit(self, hidden: torch.Tensor, previous: int) -> float:
        inputs = hidden
        if self.config["confidence_head_with_markov"]:
            inputs = torch.cat((hidden, self.tensors["markov_head.markov_w1.weight"][previous]))
        weight, bias = (self.tensors[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
        return float(weight[0] @ inputs + bias[0])
