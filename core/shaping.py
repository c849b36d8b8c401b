"""What changes logits before a draw: bias, minimum length, penalties, grammar masks. And log-probabilities.

A row's logits depend on the tokens in front of it, drafted ones included: each row counts its own prefix on the
device, so that penalties mean the same at any draft width. Rows without a need pass through with the same values.
Order and meaning are those of vLLM and transformers: bias, repetition, frequency, presence, mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from core.engine.plan import TOP_LOGPROBS, Admission

BIAS_SLOTS = 640  # per sequence: the 300 biased tokens and 256 stop tokens that a request may name, and the model's EOS
FOREVER = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapingRows:
    """N logit rows of B sequences."""

    sequence: torch.Tensor  # [N] int64 in 0 .. B - 1
    positions: torch.Tensor  # [N] int64 of the row's own token; the drawn one stands behind it
    rows: torch.Tensor  # [B] int64: req_idx of each sequence
    anchors: torch.Tensor  # [B] int64: position of each sequence's last committed token
    drafts: torch.Tensor  # [B, W] int64: what stands behind it in the rows


class ShapingState:
    """What the device knows of R sequences for this purpose. Neutral values change nothing."""

    def __init__(self, *, num_rows: int, num_positions: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.prompt_len = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.repetition = torch.ones(num_rows, dtype=torch.float32, device=device)
        self.frequency = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.presence = torch.zeros(num_rows, dtype=torch.float32, device=device)
        self.bias_ids = torch.zeros(num_rows, BIAS_SLOTS, dtype=torch.int64, device=device)
        self.bias = torch.zeros(num_rows, BIAS_SLOTS, dtype=torch.float32, device=device)
        self.bias_until = torch.zeros(num_rows, BIAS_SLOTS, dtype=torch.int64, device=device)
        # Tokens by position, kept for sequences with penalties only.
        self.history = torch.zeros(num_rows, num_positions, dtype=torch.int32, device=device)

    def clear(self) -> None:
        """All rows neutral; runs on the stream."""
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(1 if tensor is self.repetition else 0)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Initialise rows; runs on the stream."""
        device = self.prompt_len.device
        rows = torch.tensor([a.req_idx for a in admissions], device=device)
        entries = [_bias_entries(a) for a in admissions]
        columns = {
            "prompt_len": np.array([a.prompt_len for a in admissions]),
            "repetition": np.array([a.params.repetition_penalty for a in admissions], np.float32),
            "frequency": np.array([a.params.frequency_penalty for a in admissions], np.float32),
            "presence": np.array([a.params.presence_penalty for a in admissions], np.float32),
            "bias_ids": np.stack([ids for ids, _, _ in entries]),
            "bias": np.stack([values for _, values, _ in entries]),
            "bias_until": np.stack([until for _, _, until in entries]),
        }
        for name, values in columns.items():
            getattr(self, name).index_copy_(0, rows, torch.from_numpy(values).to(device))
        for admission in admissions:
            tokens = torch.tensor(admission.history, dtype=torch.int32, device=device)
            self.history[admission.req_idx, : len(admission.history)] = tokens

    def append(self, rows: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Note tokens [B, n] behind positions [B]; what stands behind the committed ones is overwritten later."""
        columns = positions[:, None] + torch.arange(1, token_ids.shape[1] + 1, device=rows.device)
        self.history[rows[:, None], columns] = token_ids.int()

    def shape(
        self,
        logits: torch.Tensor,
        rows: ShapingRows,
        allowed: torch.Tensor,
        *,
        penalties: bool,
        masks: bool,
        num_positions: int,
    ) -> torch.Tensor:
        """logits [N, V] -> [N, V] float32 to draw from.

        allowed [B, ceil(V / 32)] int32: bits of the tokens that each sequence may draw. penalties and masks are host
        facts about the batch, num_positions bounds its sequences: they skip work, they never change a row.
        """
        shaped = logits.float()
        if shaped is logits:
            shaped = logits.clone()
        self._add_bias(shaped, rows)
        if penalties:
            self._penalise(shaped, rows, num_positions)
        if masks:
            shaped = shaped.masked_fill(~self._unpacked(allowed)[rows.sequence], float("-inf"))
        return shaped

    def _add_bias(self, shaped: torch.Tensor, rows: ShapingRows) -> None:
        row = rows.rows[rows.sequence]
        generated = rows.positions + 1 - self.prompt_len[row]
        values = torch.where(generated[:, None] < self.bias_until[row], self.bias[row], 0.0)
        shaped.scatter_add_(1, self.bias_ids[row], values)

    def _penalise(self, shaped: torch.Tensor, rows: ShapingRows, num_positions: int) -> None:
        history = self.history[rows.rows, :num_positions].long()
        columns = rows.anchors[:, None] + torch.arange(1, rows.drafts.shape[1] + 1, device=shaped.device)
        history.scatter_(1, columns.clamp_(max=num_positions - 1), rows.drafts)
        row, index = rows.rows[rows.sequence], history[rows.sequence]
        column = torch.arange(num_positions, device=shaped.device)
        before = column <= rows.positions[:, None]
        generated = before & (column >= self.prompt_len[row][:, None])
        present = torch.zeros_like(shaped).scatter_add_(1, index, before.float()) > 0
        count = torch.zeros_like(shaped).scatter_add_(1, index, generated.float())
        factor = torch.where(present, self.repetition[row][:, None], 1.0)
        shaped.copy_(torch.where(shaped > 0, shaped / factor, shaped * factor))
        shaped.sub_(self.frequency[row][:, None] * count)
        shaped.sub_(self.presence[row][:, None] * (count > 0))

    def _unpacked(self, allowed: torch.Tensor) -> torch.Tensor:
        bits = torch.arange(32, dtype=torch.int32, device=allowed.device)
        return ((allowed[:, :, None] >> bits) & 1).bool().flatten(1)[:, : self.vocab_size]


def _bias_entries(admission: Admission) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids, what is added to their logits, and below how many generated tokens: BIAS_SLOTS of each."""
    params = admission.params
    ids, values = np.zeros(BIAS_SLOTS, np.int64), np.zeros(BIAS_SLOTS, np.float32)
    until = np.zeros(BIAS_SLOTS, np.int64)
    entries = [(token, value, FOREVER) for token, value in params.logit_bias]
    if params.min_tokens > 0:
        entries += [(token, float("-inf"), params.min_tokens) for token in admission.stop_ids]
    assert len(entries) <= BIAS_SLOTS, f"{len(entries)} biased tokens; the server admits fewer"
    for slot, entry in enumerate(entries):
        ids[slot], values[slot], until[slot] = entry
    return ids, values, until


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTensors:
    """Log-probabilities [...] of tokens and of the likeliest ones, [..., K]; see plan.Scores."""

    logprob: torch.Tensor
    top_ids: torch.Tensor
    top_logprobs: torch.Tensor

    def __getitem__(self, index: torch.Tensor) -> ScoreTensors:
        return ScoreTensors(
            logprob=self.logprob[index],
            top_ids=self.top_ids[index],
            top_logprobs=self.top_logprobs[index],
        )


SCORED_ROWS = 64  # at a time: a float32 copy of the logits of a whole prompt chunk would be large


def score(logits: torch.Tensor, token_ids: torch.Tensor) -> ScoreTensors:
    """Log-probabilities of token_ids [N] under logits [N, V] as the model gave them."""
    top = min(TOP_LOGPROBS, logits.shape[1])
    parts = [
        _score(rows.float(), ids, top)
        for rows, ids in zip(logits.split(SCORED_ROWS), token_ids.split(SCORED_ROWS), strict=True)
    ]
    logprob, top_ids, top_logprobs = (torch.cat(column) for column in zip(*parts, strict=True))
    return ScoreTensors(logprob=logprob, top_ids=top_ids, top_logprobs=top_logprobs)


def _score(
    logits: torch.Tensor, token_ids: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = logits.logsumexp(-1, keepdim=True)
    best = logits.topk(top, dim=-1)
    return (logits.gather(1, token_ids[:, None]) - total)[:, 0], best.indices, best.values - total
