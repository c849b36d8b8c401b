"""DSpark drafts in DeepSpec's format: one bidirectional pass over a block, then a sequential Markov stage.

The draft's context is not its own tokens but projections of target features: `publish` turns the features of
committed positions into K and V of every draft layer, and `propose` lets a block [anchor, mask, ...] attend
to them.

    pages of a sequence    0 ............ p-1 | p ........ p+W-1
                           context K, V         block K, V: temporary, overwritten by the next publication

Letters: T rows, B sequences, W slots, H hidden, n heads, k KV heads, d head size, V vocabulary, m features.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from core.engine.batch import DecodeRows, RaggedBatch
from core.errors import ModelLoadError
from core.kvcache.storage import GroupedHeads, LayerCache
from core.layers.attention import AttentionPlan, paged_attention, plan_attention
from core.layers.linear import FusedLinear, pack_weight, packed_linear, vocab_argmax
from core.layers.norm_rope import RMSNorm, RotaryTable, apply_rope, swiglu
from core.models.base import TargetModel
from core.models.weights import load_config, load_tensors, open_shard, shard_files
from core.spec.drafts.base import CommittedRows, DraftOutput, DraftRequest
from core.spec.drafts.dspark_config import DSparkConfig, parse_dspark_config
from core.spec.drafts.dspark_heads import MARKOV_HEADS, ConfidenceHead

Rope = tuple[torch.Tensor, torch.Tensor]

TEMPERATURES_FILE = "confidence_temperatures.json"
_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"


class DSparkLayer(nn.Module):
    """A Qwen3-style decoder layer whose K and V can also be made from context rows."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = self.head_dim**-0.5
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.query_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.input_norm = RMSNorm(hidden, eps)
        self.qkv = FusedLinear(hidden, (self.query_size, kv_size, kv_size))
        self.q_norm = RMSNorm(self.head_dim, eps)
        self.k_norm = RMSNorm(self.head_dim, eps)
        self.out = FusedLinear(self.query_size, (hidden,))
        self.mlp_norm = RMSNorm(hidden, eps)
        self.gate_up = FusedLinear(hidden, (config.intermediate_size, config.intermediate_size))
        self.down = FusedLinear(config.intermediate_size, (hidden,))
        self._packed_kv: torch.Tensor | None = None

    def pack(self) -> None:
        """Lay final weights out for this device; K and V of context rows use their part of the fused matrix."""
        self._packed_kv = pack_weight(self.qkv.weight[self.query_size :])
        for linear in (self.qkv, self.out, self.gate_up, self.down):
            linear.pack(keep_weight=linear is self.qkv)

    def publish(self, context: torch.Tensor, rope: Rope, cache: LayerCache, slots: torch.Tensor) -> None:
        """Write K and V of context rows [T, H], which skip the input norm: `hidden_norm` was theirs."""
        weight = self.qkv.weight[self.query_size :]
        projected = (
            F.linear(context, weight) if self._packed_kv is None else packed_linear(context, self._packed_kv)
        )
        projected = projected.unflatten(1, (-1, self.head_dim))
        key, value = projected.split(self.kv_heads, dim=1)
        cache.write(slots, apply_rope(self.k_norm(key), *rope), value)

    def forward(self, x: torch.Tensor, rope: Rope, cache: LayerCache, plan: AttentionPlan) -> torch.Tensor:
        """[B * W, H] -> [B * W, H]."""
        qkv = self.qkv(self.input_norm(x)).unflatten(1, (-1, self.head_dim))
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        rotated = apply_rope(torch.cat((self.q_norm(query), self.k_norm(key)), dim=1), *rope)
        query, key = rotated.split((self.heads, self.kv_heads), dim=1)
        x = x + self.out(paged_attention(query, key, value, cache=cache, plan=plan, scale=self.scale))
        return x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))


class DSparkDrafter(nn.Module):
    """A `Drafter`. Parameters are uninitialised until `load_tensors` has filled `weight_slots()`.

    Embedding and output head are the target's, so a draft carries none of its own.
    """

    layers: list[DSparkLayer]  # a ModuleList
    lookahead = 0  # the context depends on the target's prefix alone, so a prefix hit recomputes nothing

    def __init__(
        self,
        config: dict[str, Any],
        target: TargetModel,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        max_positions: int,
    ) -> None:
        super().__init__()
        self.config = parsed = parse_dspark_config(config, target, width=width)
        self.width = width
        self.has_confidence = parsed.has_confidence
        self.feature_layers = parsed.feature_layers
        self.kv_layers = [GroupedHeads(num_kv_heads=parsed.num_kv_heads, head_dim=parsed.head_dim)]
        self.kv_layers *= parsed.num_layers
        hidden, rank = parsed.hidden_size, parsed.markov_rank
        with torch.device("meta"):  # no memory is touched twice
            self.fc = FusedLinear(len(parsed.feature_layers) * hidden, (hidden,))
            self.hidden_norm = RMSNorm(hidden, parsed.rms_norm_eps)
            layers = nn.ModuleList(DSparkLayer(parsed) for _ in range(parsed.num_layers))
            self.layers = layers  # type: ignore[assignment]
            self.norm = RMSNorm(hidden, parsed.rms_norm_eps)
            head = MARKOV_HEADS[parsed.markov_type] if rank else None
            self.markov = head(parsed.vocab_size, hidden, rank) if head else None
            confidence_rank = rank if parsed.confidence_with_markov else 0
            self.confidence = ConfidenceHead(hidden, confidence_rank) if parsed.has_confidence else None
        self.to(dtype)
        if self.confidence is not None:
            self.confidence.float()
        self.to_empty(device=device)
        # The last block may reach past the longest sequence.
        self.rotary = RotaryTable(parsed.head_dim, max_positions + width, parsed.rope_theta, dtype).to(device)
        self._offsets = torch.arange(width, device=device)
        # Bound methods, not the module: its parameters must not appear a second time among ours.
        self._embed, self._logits = target.embed, target.logits

    def publish(self, rows: CommittedRows, caches: list[LayerCache]) -> None:
        """Write context K and V of T rows; see `Drafter`."""
        assert rows.features is not None, "a DSpark draft was published to without target features"
        context = self.hidden_norm(self.fc(rows.features))
        rope = self.rotary(rows.positions)
        for layer, cache in zip(self.layers, caches, strict=True):
            layer.publish(context, rope, cache, rows.slot_mapping)

    def propose(self, request: DraftRequest, caches: list[LayerCache]) -> DraftOutput:
        """Draft W tokens per sequence, greedily; see `Drafter`."""
        hidden = self.block_hidden(request, caches)
        # Slot-major, so that the sequential stage reads each slot's rows as one piece.
        slots = hidden.transpose(0, 1).contiguous()
        base = self._logits(slots.flatten(0, 1)).unflatten(0, slots.shape[:2])
        if self.markov is None:
            tokens = vocab_argmax(base.flatten(0, 1)).view(base.shape[:2]).t()
        else:
            tokens = self.markov.draft(request.anchor_ids, slots, base)
        return DraftOutput(token_ids=tokens, confidence=self._confidence(request.anchor_ids, tokens, hidden))

    def block_hidden(self, request: DraftRequest, caches: list[LayerCache]) -> torch.Tensor:
        """Run the block [anchor, mask, ...] of each sequence: [B, W, H] after the final norm."""
        num_seqs = request.anchor_ids.shape[0]
        ids = F.pad(request.anchor_ids[:, None], (0, self.width - 1), value=self.config.mask_token_id)
        positions = (request.anchor_positions[:, None] + self._offsets).flatten()
        # Every slot sees the context below p and the whole block: it is not causal.
        limit = (request.anchor_positions + self.width)[:, None].expand(-1, self.width)
        cells = num_seqs * self.width
        batch = RaggedBatch(
            input_ids=ids.flatten(),
            positions=positions,
            slot_mapping=request.draft_slots.flatten(),
            decode=DecodeRows(
                num_rows=cells,
                q_cap=self.width,
                grid_index=torch.arange(cells, device=positions.device),
                kv_limit=limit,
                page_table=request.page_table,
            ),
        )
        x = self._embed(batch.input_ids)
        rope = self.rotary(positions)
        group = self.config.num_heads // self.config.num_kv_heads
        plan = plan_attention(batch, group=group, page_size=caches[0].key.shape[1], dtype=x.dtype)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, rope, cache, plan)
        return self.norm(x).unflatten(0, (num_seqs, self.width))

    def set_temperatures(self, temperatures: torch.Tensor) -> None:
        """Scale the confidence logit of slot k by 1 / temperatures[k]; [W], positive."""
        assert self.confidence is not None
        assert temperatures.shape == (self.width,)
        self.confidence.temperatures = temperatures.to(self._offsets.device, torch.float32)

    def pack(self) -> None:
        """Weights are final: lay them out for this device."""
        self.fc.pack()
        for layer in self.layers:
            layer.pack()

    def weight_slots(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the view of a parameter that it fills."""
        slots = {
            **self.fc.slots(["fc"]),
            "hidden_norm.weight": self.hidden_norm.weight.data,
            "norm.weight": self.norm.weight.data,
        }
        for index, layer in enumerate(self.layers):
            prefix = f"layers.{index}."
            attention, mlp = prefix + "self_attn.", prefix + "mlp."
            slots[prefix + "input_layernorm.weight"] = layer.input_norm.weight.data
            slots[prefix + "post_attention_layernorm.weight"] = layer.mlp_norm.weight.data
            slots[attention + "q_norm.weight"] = layer.q_norm.weight.data
            slots[attention + "k_norm.weight"] = layer.k_norm.weight.data
            slots |= layer.qkv.slots([attention + name for name in ("q_proj", "k_proj", "v_proj")])
            slots |= layer.out.slots([attention + "o_proj"])
            slots |= layer.gate_up.slots([mlp + "gate_proj", mlp + "up_proj"])
            slots |= layer.down.slots([mlp + "down_proj"])
        # The heads' modules are named as in the checkpoint.
        for module, prefix in ((self.markov, "markov_head."), (self.confidence, "confidence_head.")):
            if module is not None:
                slots |= {prefix + name: parameter.data for name, parameter in module.named_parameters()}
        return slots

    def _confidence(
        self, anchor_ids: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """[B, W] float32; ones where the checkpoint has no confidence head."""
        if self.confidence is None:
            return torch.ones(tokens.shape, dtype=torch.float32, device=tokens.device)
        if not self.config.confidence_with_markov:
            return self.confidence(hidden, None)
        assert self.markov is not None
        previous = torch.cat((anchor_ids[:, None], tokens[:, :-1]), dim=1)
        return self.confidence(hidden, self.markov.markov_w1(previous))


def load_dspark(
    path: Path,
    target: TargetModel,
    *,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> DSparkDrafter:
    """Build the draft of a checkpoint directory for `target`."""
    config = load_config(path)
    drafter = DSparkDrafter(
        config, target, width=width, dtype=dtype, device=device, max_positions=max_positions
    )
    load_tensors(path, drafter.weight_slots(), ignore=lambda name: name in (_EMBEDDING, _HEAD))
    _check_vocabulary_copies(path, target, device)
    drafter.pack()
    temperatures = path / TEMPERATURES_FILE
    if drafter.has_confidence and temperatures.exists():
        drafter.set_temperatures(torch.tensor(_read_temperatures(temperatures, width)))
    return drafter


def _read_temperatures(file: Path, width: int) -> list[float]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))["temperatures"]
        temperatures = [float(value) for value in values]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelLoadError(
            f'{file}: cannot be read ({error!r}); write {{"temperatures": [one per slot]}} or remove it'
        ) from None
    if len(temperatures) < width:
        raise ModelLoadError(f"{file}: {len(temperatures)} temperatures for {width} slots; give one per slot")
    wrong = [value for value in temperatures if not (value > 0 and math.isfinite(value))]
    if wrong:
        raise ModelLoadError(f"{file}: temperature {wrong[0]} is not positive and finite; fit them again")
    return temperatures[:width]


def _check_vocabulary_copies(path: Path, target: TargetModel, device: torch.device) -> None:
    """Refuse a draft that brings another embedding or head than the target's, which it will use instead."""
    for file in shard_files(path):
        with open_shard(file) as handle:
            for name in {_EMBEDDING, _HEAD}.intersection(handle.keys()):
                copy = handle.get_tensor(name).to(device)
                same = _same_embedding if name == _EMBEDDING else _same_head
                if copy.shape != (target.vocab_size, target.hidden_size) or not same(copy, target):
                    raise ModelLoadError(
                        f"{file}: {name} {list(copy.shape)} differs from the target's, which the draft would "
                        "use instead; give the target that this draft was trained for"
                    )


def _same_embedding(copy: torch.Tensor, target: TargetModel) -> bool:
    ids = torch.arange(target.vocab_size, device=copy.device)
    for part, rows in zip(ids.split(8192), copy.split(8192), strict=True):
        own = target.embed(part)
        if not torch.equal(own, rows.to(own.dtype)):
            return False
    return True


def _same_head(copy: torch.Tensor, target: TargetModel) -> bool:
    """A head is known by its columns, the logits of unit vectors; a sample of them is enough."""
    columns = torch.arange(0, target.hidden_size, max(1, target.hidden_size // 64), device=copy.device)
    probe = target.embed(columns.new_zeros(1)).new_zeros(len(columns), target.hidden_size)
    logits = target.logits(probe.scatter_(1, columns[:, None], 1.0))
    return torch.equal(logits, copy[:, columns].t().to(logits.dtype))
