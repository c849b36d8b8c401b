"""Ranks of one engine: who decides, and the one point where they agree on sampled tokens.

Rank 0 plans; the plan reaches the other ranks through `share_plan`. Sampled target ids reach consensus in `agree`
between verification and commit. With one rank both are identities; `resolve()` refuses more ranks for now.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.engine.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.world_size != 1:
            raise NotImplementedError("several ranks have no execution layer yet; resolve() refuses them")

    def share_plan(self, plan: StepPlan) -> StepPlan:
        """Rank 0's plan on every rank."""
        return plan

    def agree(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The same draws [rows] int64 on every rank, before anything is accepted, committed or published."""
        return token_ids
