"""What the engine asks of a drafter.

A drafter owns KV layers of its own in the target's pages. It is told what was committed (`publish`) and asked for
drafts (`propose`); both run on the device stream right behind verification, with shapes fixed by the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from core.kvcache.storage import GroupedHeads, LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedRows:
    """Target rows of one step. Rejected and padding rows carry slots in the dummy page and are thereby ignored."""

    features: torch.Tensor | None  # [T, m * H], the target's outputs of `feature_layers`
    hidden: torch.Tensor  # [T, H], after the target's final norm
    next_token_ids: torch.Tensor  # [T] int64: the committed token at position + 1 (anything for ignored rows)
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """Sequences to draft for. Padding sequences have position 0 and dummy pages."""

    anchor_ids: torch.Tensor  # [B] int64, last committed token
    anchor_positions: torch.Tensor  # [B] int64: p; exactly the positions below p are published
    page_table: torch.Tensor  # [B, P] int64, wide enough for position p + W - 1
    draft_slots: torch.Tensor  # [B, W] int64: slots of positions p .. p + W - 1, free for temporary rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftOutput:
    token_ids: torch.Tensor  # [B, W] int64, greedy
    confidence: (
        torch.Tensor
    )  # [B, W] float32: P(draft j accepted | drafts before it accepted); NaN is possible


class Drafter(Protocol):
    width: int  # W, drafts per sequence
    lookahead: int  # committed rows to recompute after a prefix hit (DSpark 0, MTP 1)
    feature_layers: tuple[int, ...]  # target layers whose outputs `publish` needs
    kv_layers: list[GroupedHeads]

    def publish(self, rows: CommittedRows, caches: list[LayerCache]) -> None:
        """Make committed positions part of the draft's context."""
        ...

    def propose(self, request: DraftRequest, caches: list[LayerCache]) -> DraftOutput:
        """Draft W tokens per sequence. Temporary KV rows go to `draft_slots`."""
        ...
