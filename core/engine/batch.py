"""One step's ragged batch as the model sees it: rows with positions, KV slots, and how they attend.

The first `decode.num_rows` rows belong to sequences whose row counts only the device knows (anchors, verify rows,
draft slots); the rows after them are prefill chunks, whose lengths the host fixed. A row does not know whether it
is a decode, a verify or a prompt row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """Rows of B sequences, laid out for attention as a padded grid of B x q_cap cells."""

    num_rows: int  # G, physical rows including padding
    q_cap: int  # most rows one sequence can have in this step
    grid_index: torch.Tensor  # [G] int64: cell b * q_cap + i of each row; B * q_cap for padding rows
    kv_limit: torch.Tensor  # [B, q_cap] int64: visible KV positions of each cell, >= 1
    page_table: torch.Tensor  # [B, P] int64: pages of each sequence, dummy page where it has none


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """One prompt chunk: rows first_row .. first_row + num_rows, at positions start .. start + num_rows."""

    first_row: int
    num_rows: int
    start: int
    pages: torch.Tensor  # [P] int64: pages that hold positions 0 .. start + num_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedBatch:
    input_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    slot_mapping: torch.Tensor  # [T] int64: page * page_size + offset; padding rows point into the dummy page
    decode: DecodeRows | None
    chunks: tuple[ChunkRows, ...] = ()


@dataclass(slots=True, kw_only=True)
class StepInputs:
    """Static input buffers of one captured shape; the host fills them before each replay."""

    rows: torch.Tensor  # [B] int64: req_idx of each sampling sequence, the padding row behind them
    host_limit: torch.Tensor  # [B] int64: the plan's draft limits
    is_decode: torch.Tensor  # [B] bool: has an anchor on the device
    is_final: torch.Tensor  # [B] bool: its last prompt row is in this step
    final_rows: torch.Tensor  # [B] int64: that row, counted over all T rows
    draft_budget: torch.Tensor  # [1] int64: G - N, draft rows that fit behind the anchors
    chunk_ids: torch.Tensor  # [C] int64, padded
    chunk_next_ids: torch.Tensor  # [C] int64: the prompt token behind each row
    chunk_positions: torch.Tensor  # [C] int64
    chunk_slots: torch.Tensor  # [C] int64, padding in the dummy page
    allowed: (
        torch.Tensor
    )  # [B, ceil(V / 32)] int32: bits of the tokens a sequence may draw; no rows without shaping
    chunks: tuple[ChunkRows, ...] = ()
