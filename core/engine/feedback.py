"""Retirement: the one place where results come from the device to the host.

A step leaves four small tensors, and log-probabilities where somebody asked for them. They are copied into host
buffers on the stream, right behind the step, so that waiting for the step's event is all the host ever waits for.
One buffer set per slot in flight, and one to read from.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.devices.base import Device, Event
from core.engine.plan import Scores, StepPlan, StepResult
from core.shaping import ScoreTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """What a step computed, on the device, for B sequences."""

    token_ids: torch.Tensor  # [B, W + 1] int64
    num_emitted: torch.Tensor  # [B] int64
    num_verified: torch.Tensor  # [B] int64
    confidence: torch.Tensor  # [B, W] float32 of this step's drafts; stale where nothing was proposed
    executed_rows: int = 0  # decode rows of the batch that the target ran
    scores: ScoreTensors | None = None  # [B, W + 1] of token_ids
    prompt_scores: ScoreTensors | None = None  # [C] of the token behind each prompt row


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """A launched step: its plan, where its results will be, and the event behind them."""

    plan: StepPlan
    slot: int
    event: Event


class ResultRing:
    """Host buffers [max_seqs, ...] of the steps in flight."""

    def __init__(self, *, lag: int, max_seqs: int, draft_width: int, device: Device) -> None:
        pinned = device.torch_device.type != "cpu"
        self._slots = [
            StepTensors(
                token_ids=torch.zeros(max_seqs, draft_width + 1, dtype=torch.int64, pin_memory=pinned),
                num_emitted=torch.zeros(max_seqs, dtype=torch.int64, pin_memory=pinned),
                num_verified=torch.zeros(max_seqs, dtype=torch.int64, pin_memory=pinned),
                confidence=torch.zeros(max_seqs, draft_width, dtype=torch.float32, pin_memory=pinned),
            )
            for _ in range(lag + 1)
        ]
        self._executed_rows = [0] * (lag + 1)
        # Rare and of any size, so they bring their own host memory.
        self._scores: list[tuple[ScoreTensors | None, ScoreTensors | None]] = [(None, None)] * (lag + 1)

    def slot_of(self, step: int) -> int:
        return step % len(self._slots)

    def copy_in(self, slot: int, tensors: StepTensors) -> None:
        """Order the copies; runs on the stream."""
        host, count = self._slots[slot], tensors.num_emitted.shape[0]
        self._executed_rows[slot] = tensors.executed_rows
        self._scores[slot] = (_on_host(tensors.scores), _on_host(tensors.prompt_scores))
        host.token_ids[:count].copy_(tensors.token_ids, non_blocking=True)
        host.num_emitted[:count].copy_(tensors.num_emitted, non_blocking=True)
        host.num_verified[:count].copy_(tensors.num_verified, non_blocking=True)
        host.confidence[:count].copy_(tensors.confidence, non_blocking=True)

    def retire(self, launched: InFlight) -> StepResult:
        """Wait for the step and copy its results out of the ring. Raises what the stream raised."""
        launched.event.wait()
        host, plan = self._slots[launched.slot], launched.plan
        count = len(plan.sampling_rows)
        scores, prompt_scores = self._scores[launched.slot]
        return StepResult(
            plan=plan,
            token_ids=host.token_ids[:count].numpy().copy(),
            num_emitted=host.num_emitted[:count].numpy().copy(),
            num_verified=host.num_verified[:count].numpy().copy(),
            executed_rows=self._executed_rows[launched.slot],
            confidence=host.confidence[:count].numpy().copy() if plan.choice.propose_depth else None,
            scores=_as_arrays(scores),
            prompt_scores=_as_arrays(prompt_scores),
        )


def _on_host(scores: ScoreTensors | None) -> ScoreTensors | None:
    """Order copies into host memory of their own; runs on the stream."""
    if scores is None:
        return None

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
        return host.copy_(tensor, non_blocking=True)

    return ScoreTensors(
        logprob=copied(scores.logprob),
        top_ids=copied(scores.top_ids),
        top_logprobs=copied(scores.top_logprobs),
    )


def _as_arrays(scores: ScoreTensors | None) -> Scores | None:
    if scores is None:
        return None
    return Scores(
        logprob=scores.logprob.numpy(),
        top_ids=scores.top_ids.numpy(),
        top_logprobs=scores.top_logprobs.numpy(),
    )
