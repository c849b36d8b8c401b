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
        self._packed: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(x, self._packed, self.bias)
        return F.linear(x, self.weight, self.bias)

    def pack(self, *, keep_weight: bool = False) -> None:
        """Bring the final weights into the layout that this device multiplies fastest with."""
        self._packed = pack_weight(self.weight)
        if self._packed is not None and not keep_weight:
            self.weight.data = self.weight.new_empty(0, self.weight.shape[1])

    def slots(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Checkpoint names -> views of the rows they fill, one name (without .weight or .bias) per part."""
        views: dict[str, torch.Tensor] = {}
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                rows = parameter.data.split(self.parts)
                views |= {f"{name}.{kind}": view for name, view in zip(names, rows, strict=True)}
        return views


class Embedding(nn.Module):
    """Token embedding, also usable as a tied output head."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)
        self._packed: torch.Tensor | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(token_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._packed is not None:
            return packed_linear(hidden, self._packed)
        return F.linear(hidden, self.weight)

    def pack_head(self) -> None:
        """Pack the matrix for `logits`; lookups keep the plain one."""
        self._packed = pack_weight(self.weight)


PACKED_ROWS = 16  # the row count that oneDNN chooses the packed layout for; any other count works too


def pack_weight(weight: torch.Tensor) -> torch.Tensor | None:
    """A copy of a matrix [out, in] in oneDNN's blocked layout, or None where plain is as good.

    oneDNN otherwise rearranges a bfloat16 matrix in every call: packed once, a step of few rows takes about half the
    time, and its results are the same bits.
    """
    packable = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if not (packable and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight.data, PACKED_ROWS)


def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., in] times a packed matrix -> [..., out]."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


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
