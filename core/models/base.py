"""What the engine asks of a target model, and the registry of architectures."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from core.engine.batch import RaggedBatch
from core.errors import ModelLoadError
from core.kvcache.storage import GroupedHeads, LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOutput:
    """hidden [T, H]: after the final norm. features [T, m * H]: outputs of the requested layers, concatenated."""

    hidden: torch.Tensor
    features: torch.Tensor | None


class TargetModel(Protocol):
    """A decoder whose forward pass takes a ragged batch. It knows nothing of speculation."""

    config: dict[str, Any]  # config.json
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_positions: int
    kv_layers: list[GroupedHeads]

    def forward(
        self, batch: RaggedBatch, caches: list[LayerCache], *, feature_layers: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run T rows. feature_layers: ids L whose residual stream *after* layer L is wanted (-1: the embedding)."""
        ...

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] -> [N, H]."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, H] after the final norm -> [N, V] in the model's dtype."""
        ...


# architectures[0] of config.json -> "module:Class"; imported only when used.
ARCHITECTURES = {
    "LlamaForCausalLM": "core.models.llama:LlamaModel",
}


def model_class(config: dict[str, Any]) -> type:
    """The class that implements config["architectures"][0]."""
    names = config.get("architectures") or ["(none)"]
    try:
        module, name = ARCHITECTURES[names[0]].split(":")
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"architecture {names[0]!r} in config.json is not supported; supported: {known}"
        ) from None
    return getattr(import_module(module), name)
