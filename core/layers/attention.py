"""Grouped-query attention over paged KV for a ragged batch, in plain torch.

Queries of one KV group are folded into the query axis, so that K and V are never expanded: with g query heads
per KV head, the padded grid [B, q_cap] becomes [B, num_kv_heads, q_cap * g, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from core.engine.batch import ChunkRows, RaggedBatch
from core.kvcache.storage import LayerCache


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Masks of one forward pass, shared by its layers. Build it once with `plan_attention`."""

    batch: RaggedBatch
    group: int  # query heads per KV head
    decode_mask: torch.Tensor | None  # [B, 1, q_cap * g, P * page_size], additive, in the model's dtype
    chunk_masks: tuple[torch.Tensor, ...]  # each [1, 1, num_rows * g, P * page_size]


def plan_attention(batch: RaggedBatch, *, group: int, page_size: int, dtype: torch.dtype) -> AttentionPlan:
    """Turn visible lengths into additive masks. No host synchronisation."""
    decode_mask = None
    if batch.decode is not None:
        decode_mask = _mask(batch.decode.kv_limit, batch.decode.page_table.shape[1] * page_size, group, dtype)
    chunk_masks = []
    for chunk in batch.chunks:
        limit = torch.arange(chunk.start + 1, chunk.start + chunk.num_rows + 1, device=batch.positions.device)
        chunk_masks.append(_mask(limit[None], chunk.pages.shape[0] * page_size, group, dtype))
    return AttentionPlan(batch=batch, group=group, decode_mask=decode_mask, chunk_masks=tuple(chunk_masks))


def _mask(limit: torch.Tensor, length: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    row_limit = limit.repeat_interleave(group, dim=1)[:, None, :, None]
    hidden = torch.arange(length, device=limit.device) >= row_limit
    return torch.zeros(hidden.shape, dtype=dtype, device=limit.device).masked_fill_(hidden, float("-inf"))


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cache: LayerCache,
    plan: AttentionPlan,
    scale: float,
) -> torch.Tensor:
    """Write this step's K and V, then attend.

    query [T, num_heads, head_dim]; key, value [T, num_kv_heads, head_dim]; returns [T, num_heads * head_dim].
    """
    batch = plan.batch
    cache.write(batch.slot_mapping, key, value)
    # Zeros: a padding row that no part of the batch covers must stay finite, since its KV goes to the dummy
    # page, and a NaN there would reach every sequence whose page table is padded with that page.
    out = query.new_zeros(query.shape)
    if batch.decode is not None:
        out[: batch.decode.num_rows] = _attend_grid(query[: batch.decode.num_rows], cache, plan, scale)
    for chunk, mask in zip(batch.chunks, plan.chunk_masks, strict=True):
        rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
        out[rows] = _attend_chunk(query[rows], cache, chunk, mask, plan.group, scale)
    return out.flatten(1)


def _attend_grid(query: torch.Tensor, cache: LayerCache, plan: AttentionPlan, scale: float) -> torch.Tensor:
    decode = plan.batch.decode
    assert decode is not None
    assert plan.decode_mask is not None
    num_seqs, group = decode.kv_limit.shape[0], plan.group
    heads, head_dim = query.shape[1:]
    # One cell more than the grid takes the padding rows.
    grid = query.new_zeros(num_seqs * decode.q_cap + 1, heads, head_dim)
    grid.index_copy_(0, decode.grid_index, query)
    folded = _fold(grid[:-1].view(num_seqs, decode.q_cap, heads, head_dim), group)
    key, value = (_gather(pages, decode.page_table) for pages in (cache.key, cache.value))
    attended = F.scaled_dot_product_attention(folded, key, value, attn_mask=plan.decode_mask, scale=scale)
    cells = _unfold(attended, group).flatten(0, 1)
    return cells.index_select(0, decode.grid_index.clamp(max=cells.shape[0] - 1))


def _attend_chunk(
    query: torch.Tensor, cache: LayerCache, chunk: ChunkRows, mask: torch.Tensor, group: int, scale: float
) -> torch.Tensor:
    key, value = (_gather(pages, chunk.pages[None]) for pages in (cache.key, cache.value))
    folded = _fold(query[None], group)
    attended = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return _unfold(attended, group)[0]


def _gather(pages: torch.Tensor, page_table: torch.Tensor) -> torch.Tensor:
    """[num_pages, page_size, kv_heads, d] and [B, P] -> [B, kv_heads, P * page_size, d]."""
    taken = pages.flatten(1).index_select(0, page_table.flatten())
    return taken.view(page_table.shape[0], -1, *pages.shape[2:]).transpose(1, 2)


def _fold(query: torch.Tensor, group: int) -> torch.Tensor:
    """[B, q, heads, d] -> [B, kv_heads, q * group, d]."""
    num_seqs, length, heads, head_dim = query.shape
    split = query.view(num_seqs, length, heads // group, group, head_dim)
    return split.permute(0, 2, 1, 3, 4).reshape(num_seqs, heads // group, length * group, head_dim)


def _unfold(folded: torch.Tensor, group: int) -> torch.Tensor:
    """[B, kv_heads, q * group, d] -> [B, q, heads, d]."""
    num_seqs, kv_heads, rows, head_dim = folded.shape
    split = folded.view(num_seqs, kv_heads, rows // group, group, head_dim)
    return split.permute(0, 2, 1, 3, 4).reshape(num_seqs, rows // group, kv_heads * group, head_dim)
