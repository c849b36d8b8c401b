"""Linear layers of one rank: plain, fused from several checkpoint tensors, and the vocabulary matrices."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class FusedLinear(nn.Module):
    """Several projections of the same input as one matrix. `parts` are output sizes, in checkpoint order."""

    def __init__(self, in_features: int, parts: tuple[int, ...], *, bias: bool = False) -> None:
        super().__init__()
        self.parts = parts
        self.weight = nn.Parameter(torch.empty(sum(parts), in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(sum(parts)), requires_grad=False) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def load_part(self, index: int, tensor: torch.Tensor, *, bias: bool = False) -> None:
        """Copy one checkpoint tensor into its rows."""
        start = sum(self.parts[:index])
        target = self.bias if bias else self.weight
        assert target is not None, "a bias was loaded into a layer without one"
        target.data[start : start + self.parts[index]].copy_(tensor)


class Embedding(nn.Module):
    """Token embedding, also usable as a tied output head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)
