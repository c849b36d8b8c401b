"""The four verbs of a step: `plan` (host, numbers), `arrange`, `verify`, `propose` (device, tensors).

Without a drafter the width is 0 and the same verbs lay out, check and commit one row per sequence. Nothing here
reads a tensor's contents on the host: the plan fixes totals, the device fills rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.engine.batch import DecodeRows, RaggedBatch, StepInputs
from core.engine.plan import BudgetChoice, BudgetQuestion, StepExtent, StepResult, StepShape
from core.engine.request_state import RequestState
from core.kvcache.storage import GroupedHeads, LayerCache
from core.spec.allocation import allocate, survival
from core.spec.budgets import BudgetPolicy
from core.spec.drafts.base import CommittedRows, Drafter, DraftRequest
from core.spec.verify import Verdict, accept


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Where every row of a step came from. B sequences, G decode rows, C chunk rows, T = G + C."""

    batch: RaggedBatch
    positions: torch.Tensor  # [B] anchor positions
    active: torch.Tensor  # [B] bool: will emit
    lengths: torch.Tensor  # [B] verified drafts
    drafts: torch.Tensor  # [B, W]
    first_row: torch.Tensor  # [B] row of the anchor among the G rows
    sequence: torch.Tensor  # [G] sequence of each decode row
    offset: torch.Tensor  # [G] 0 for the anchor, j for draft j
    is_row: torch.Tensor  # [G] bool: not padding


class Speculator:
    """Composes a drafter (or none) with a policy for the budget."""

    def __init__(self, drafter: Drafter | None, budget: BudgetPolicy, *, page_size: int) -> None:
        self.drafter = drafter
        self.budget = budget
        self.page_size = page_size
        self.width = drafter.width if drafter else 0
        self.feature_layers: tuple[int, ...] = drafter.feature_layers if drafter else ()
        self.kv_layers: list[GroupedHeads] = drafter.kv_layers if drafter else []

    def plan(self, question: BudgetQuestion) -> BudgetChoice:
        """Choose how many rows the step verifies; a step with prompt rows runs its full-width binding."""
        return self.budget.choose(question)

    def observe(self, result: StepResult) -> None:
        """Feed one retired step back to the policy."""
        self.budget.observe(result)

    def arrange(
        self, state: RequestState, inputs: StepInputs, shape: StepShape, extent: StepExtent
    ) -> Arrangement:
        """Choose which drafts are verified and lay all rows out."""
        rows = inputs.rows
        positions = state.positions[rows]
        remaining = state.limits[rows] - positions - 1
        alive = remaining > 0
        # Never more than fit behind the anchor below the sequence's limit, and so below max_model_len.
        limit = torch.minimum(state.num_drafts[rows], inputs.host_limit)
        limit = torch.minimum(limit, remaining - 1).clamp_(min=0)
        lengths = self._lengths(state, rows, limit, inputs, shape)
        counts = torch.where(inputs.is_decode, lengths + 1, 0)
        ends = counts.cumsum(0)
        row = torch.arange(shape.target_rows, device=rows.device)
        sequence = torch.searchsorted(ends, row, right=True).clamp_(max=max(rows.shape[0] - 1, 0))
        first_row = ends - counts
        offset = row - first_row[sequence]
        is_row = (row < ends[-1:]) & alive[sequence]
        drafts = state.drafts[rows]
        batch = self._batch(
            state, inputs, shape, extent, positions=positions, sequence=sequence, offset=offset,
            is_row=is_row, drafts=drafts,
        )  # fmt: skip
        return Arrangement(
            batch=batch,
            positions=positions,
            active=(inputs.is_decode & alive) | inputs.is_final,
            lengths=lengths,
            drafts=drafts,
            first_row=first_row,
            sequence=sequence,
            offset=offset,
            is_row=is_row,
        )

    def _lengths(
        self,
        state: RequestState,
        rows: torch.Tensor,
        limit: torch.Tensor,
        inputs: StepInputs,
        shape: StepShape,
    ) -> torch.Tensor:
        if shape.target_rows >= shape.request_bucket * (self.width + 1):
            return limit  # full width: every draft within its limit fits
        return allocate(survival(state.confidence[rows]), limit, inputs.draft_budget)

    def _batch(
        self,
        state: RequestState,
        inputs: StepInputs,
        shape: StepShape,
        extent: StepExtent,
        *,
        positions: torch.Tensor,
        sequence: torch.Tensor,
        offset: torch.Tensor,
        is_row: torch.Tensor,
        drafts: torch.Tensor,
    ) -> RaggedBatch:
        if shape.target_rows == 0:
            return RaggedBatch(
                input_ids=inputs.chunk_ids,
                positions=inputs.chunk_positions,
                slot_mapping=inputs.chunk_slots,
                decode=None,
                chunks=inputs.chunks,
            )
        rows, page_size = inputs.rows, self.page_size
        q_cap = extent.rows_per_sequence
        tokens = torch.cat((state.anchor_ids[rows][:, None], drafts), dim=1)
        # Padding rows have offsets beyond a block: they read token 0 at position 0, and nothing stale.
        safe_offset = offset.clamp(min=0, max=self.width)
        input_ids = torch.where(is_row, tokens[sequence, safe_offset], 0)
        row_positions = torch.where(is_row, positions[sequence] + safe_offset, 0)
        dummy = torch.arange(shape.target_rows, device=rows.device) % page_size
        slots = torch.where(is_row, state.slots(rows[sequence], row_positions, page_size), dummy)
        grid_index = torch.where(
            is_row, sequence * q_cap + safe_offset.clamp(max=q_cap - 1), rows.shape[0] * q_cap
        )
        kv_limit = positions[:, None] + torch.arange(1, q_cap + 1, device=rows.device)
        decode = DecodeRows(
            num_rows=shape.target_rows,
            q_cap=q_cap,
            grid_index=grid_index,
            kv_limit=kv_limit.clamp_(min=1, max=extent.context_pages * page_size),
            page_table=state.page_table[rows, : extent.context_pages],
        )
        return RaggedBatch(
            input_ids=torch.cat((input_ids, inputs.chunk_ids)),
            positions=torch.cat((row_positions, inputs.chunk_positions)),
            slot_mapping=torch.cat((slots, inputs.chunk_slots)),
            decode=decode,
            chunks=inputs.chunks,
        )

    def logit_rows(self, inputs: StepInputs, shape: StepShape) -> torch.Tensor | slice:
        """Rows whose logits are needed: the G decode rows, then one per sequence that ends its prompt."""
        if shape.chunk_rows == 0:
            return slice(None)
        decode = torch.arange(shape.target_rows, device=inputs.rows.device)
        return torch.cat((decode, inputs.final_rows))

    def emitted_rows(self, arranged: Arrangement, inputs: StepInputs, shape: StepShape) -> torch.Tensor:
        """[B, W + 1] int64: which of `logit_rows` each token of a sequence is drawn at; the first ones are valid."""
        columns = torch.arange(self.width + 1, device=inputs.rows.device)
        index = arranged.first_row[:, None] + columns
        num_rows = shape.target_rows
        if shape.chunk_rows:
            sequences = torch.arange(inputs.rows.shape[0], device=inputs.rows.device)
            index = torch.where(inputs.is_final[:, None], (shape.target_rows + sequences)[:, None], index)
            num_rows += inputs.rows.shape[0]
        return index.clamp_(max=num_rows - 1)

    def verify(
        self, drawn: torch.Tensor, arranged: Arrangement, inputs: StepInputs, shape: StepShape
    ) -> Verdict:
        """drawn: one target draw for each of `logit_rows`; returns what each sequence emits."""
        token_ids = drawn[self.emitted_rows(arranged, inputs, shape)]
        lengths = torch.where(inputs.is_final, 0, arranged.lengths)
        return accept(token_ids, arranged.drafts, lengths, arranged.active)

    def nothing_sampled(self, arranged: Arrangement) -> Verdict:
        """The verdict of a step whose rows are all prompt rows that do not end their prompt."""
        empty = arranged.lengths
        return Verdict(token_ids=empty.new_zeros(0, self.width + 1), num_accepted=empty, num_emitted=empty)

    def publish(
        self,
        arranged: Arrangement,
        verdict: Verdict,
        inputs: StepInputs,
        *,
        hidden: torch.Tensor,
        features: torch.Tensor | None,
        caches: list[LayerCache],
    ) -> None:
        """Hand committed rows to the drafter; rejected ones go to the dummy page."""
        if self.drafter is None:
            return
        num_decode = arranged.sequence.shape[0]
        accepted = arranged.offset <= verdict.num_accepted[arranged.sequence]
        dummy = torch.arange(num_decode, device=hidden.device) % self.page_size
        slots = arranged.batch.slot_mapping.clone()
        slots[:num_decode] = torch.where(arranged.is_row & accepted, slots[:num_decode], dummy)
        next_ids = torch.cat(
            (
                verdict.token_ids[arranged.sequence, arranged.offset.clamp(min=0, max=self.width)],
                inputs.chunk_next_ids,
                inputs.chunk_next_ids.new_zeros(1),  # takes what the padding sequences scatter
            )
        )
        behind = torch.where(inputs.is_final, inputs.final_rows, next_ids.shape[0] - 1)
        next_ids.scatter_(0, behind, verdict.token_ids[:, 0])
        self.drafter.publish(
            CommittedRows(
                features=features,
                hidden=hidden,
                next_token_ids=next_ids[:-1],
                positions=arranged.batch.positions,
                slot_mapping=slots,
            ),
            caches,
        )

    def propose(
        self,
        state: RequestState,
        arranged: Arrangement,
        inputs: StepInputs,
        extent: StepExtent,
        caches: list[LayerCache],
    ) -> None:
        """Draft for the next step from the state that `commit` left, and write drafts and confidence back."""
        assert self.drafter is not None
        rows, width = inputs.rows, self.width
        positions = torch.where(arranged.active, state.positions[rows], 0)
        block = positions[:, None] + torch.arange(width, device=rows.device)
        slots = state.slots(rows[:, None].expand_as(block), block, self.page_size)
        dummy = torch.arange(block.numel(), device=rows.device).view_as(block) % self.page_size
        drafted = self.drafter.propose(
            DraftRequest(
                anchor_ids=state.anchor_ids[rows],
                anchor_positions=positions,
                page_table=state.page_table[rows, : extent.context_pages],
                draft_slots=torch.where(arranged.active[:, None], slots, dummy),
            ),
            caches,
        )
        state.drafts.index_copy_(0, rows, drafted.token_ids)
        state.confidence.index_copy_(0, rows, drafted.confidence)
        state.num_drafts.index_copy_(0, rows, torch.where(arranged.active, width, 0))
