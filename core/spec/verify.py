"""Acceptance of drafts: pure functions over tensors, the same for every drafter, budget and sampling mode.

Drafts are greedy, so the draft distribution is a point mass and one draw per verified row is exact rejection
sampling (Leviathan et al. 2023, Theorem 1 with q = 1 at the draft): accepting x with probability p(x) and otherwise
sampling from p without x, renormalised, is the same as drawing t ~ p and accepting exactly when t = x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    token_ids: torch.Tensor  # [B, W + 1] int64: target draws; the first num_emitted of a row are the output
    num_accepted: torch.Tensor  # [B] int64: accepted drafts, without the terminal draw
    num_emitted: torch.Tensor  # [B] int64: accepted + 1, 0 for inactive rows


def accept(
    token_ids: torch.Tensor, drafts: torch.Tensor, lengths: torch.Tensor, active: torch.Tensor
) -> Verdict:
    """Accept the draft prefix that the target's draws agree with.

    token_ids [B, W + 1]: the draw at the anchor and behind each verified draft (anything beyond lengths);
    drafts [B, W]; lengths [B]: verified drafts; active [B] bool. The first mismatching draw is itself the residual
    token, and after an all-matching prefix the last draw is the bonus.
    """
    width = drafts.shape[1]
    verified = torch.arange(width, device=drafts.device) < lengths[:, None]
    agrees = (token_ids[:, :width] == drafts) & verified
    num_accepted = agrees.long().cumprod(dim=1).sum(dim=1) if width else torch.zeros_like(lengths)
    return Verdict(
        token_ids=token_ids,
        num_accepted=num_accepted,
        num_emitted=torch.where(active, num_accepted + 1, 0),
    )
