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

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]
