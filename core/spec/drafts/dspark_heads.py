"""The sequential stage of DSpark: Markov heads, which correct a slot by the token before it, and confidence.

Letters: B sequences, W slots, H hidden, r Markov rank, V vocabulary. Knows neither pages nor attention.
"""

from __future__ import annotations

import torch
from torch import nn

from core.layers.linear import Embedding, FusedLinear, vocab_argmax


class MarkovHead(nn.Module):
    """vanilla: logits[k] = base[k] + W2 . W1[token before slot k's prediction]. Others replace `mix`."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = Embedding(vocab_size, rank)
        self.markov_w2 = FusedLinear(rank, (vocab_size,))

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """embedded [B, r], hidden [B, H] of a slot, state of those before -> input [B, r] of W2, state."""
        return embedded, state

    def draft(self, anchor_ids: torch.Tensor, hidden: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """anchor_ids [B], hidden [W, B, H], base logits [W, B, V] -> greedy tokens [B, W]."""
        token, state, drafted = anchor_ids, None, []
        for slot_hidden, slot_base in zip(hidden, base, strict=True):
            mixed, state = self.mix(self.markov_w1(token), slot_hidden, state)
            token = vocab_argmax(torch.addmm(slot_base, mixed, self.markov_w2.weight.t()))
            drafted.append(token)
        return torch.stack(drafted, dim=1)


class GatedMarkovHead(MarkovHead):
    """mix = sigmoid(G [h ; e] + c) * e."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, hidden_size, rank)
        self.gate_proj = FusedLinear(hidden_size + rank, (rank,), bias=True)

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        gate = self.gate_proj(torch.cat((hidden, embedded), dim=-1))
        return torch.sigmoid(gate) * embedded, state


class RnnMarkovHead(MarkovHead):
    """(g, c, o) = J [S ; e ; h] + b;  S <- sigmoid(g) S + (1 - sigmoid(g)) tanh(c);  mix = tanh(o)."""

    def __init__(self, vocab_size: int, hidden_size: int, rank: int) -> None:
        super().__init__(vocab_size, hidden_size, rank)
        self.joint_proj = FusedLinear(2 * rank + hidden_size, (rank, rank, rank), bias=True)

    def mix(
        self, embedded: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        state = torch.zeros_like(embedded) if state is None else state
        gate, candidate, output = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1)).chunk(
            3, dim=-1
        )
        state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
        return torch.tanh(output), state


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


class ConfidenceHead(nn.Module):
    """P(draft k accepted | drafts before it accepted) = sigmoid((w . [h ; e] + b) / T_k), in float32.

    e is the Markov embedding of the token *before* the predicted one (rank 0: no e), so that a cut at slot k
    never depends on the token it judges.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = FusedLinear(hidden_size + rank, (1,), bias=True)
        self.temperatures: torch.Tensor | None = None  # [W] float32; None: all 1

    def forward(self, hidden: torch.Tensor, embedded: torch.Tensor | None) -> torch.Tensor:
        """hidden [B, W, H], embedded [B, W, r] or None -> [B, W] float32."""
        inputs = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        logits = self.proj(inputs.float())[..., 0]
        return torch.sigmoid(logits if self.temperatures is None else logits / self.temperatures)
