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

    def slots(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Checkpoint names -> views of the rows they fill, one name (without .weight or .bias) per part."""
        views: dict[str, torch.Tensor] = {}
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                rows = parameter.data.split(self.parts)
                views |= {f"{name}.{kind}": view for name, view in zip(names, rows, strict=True)}
        return views

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


def vocab_argmax(logits: torch.Tensor) -> torch.Tensor:
    """[N, V] -> [N] int64: the first largest entry of each row, as argmax but in two stages.

    torch argmax over bfloat16 rows is not vectorised on the CPU (about 3.5 ns an entry) while amax is: maxima
    of segments first, then the position inside the winning segment, takes a seventh of the time.
    """
    num_rows, vocab_size = logits.shape
    segment = min(vocab_size & -vocab_size, 512)  # largest power of two that divides V, within limits
    if segment < 32:
        return logits.max(-1).indices
    segments = logits.reshape(num_rows, -1, segment)
    winner = segments.amax(-1).argmax(-1, keepdim=True)  # [N, 1]
    inner = torch.take_along_dim(segments, winner[:, :, None], 1)[:, 0].argmax(-1)
    return winner[:, 0] * segment + inner
