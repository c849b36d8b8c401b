"""Ragged batches written by hand: sequences on shuffled pages, laid out as decode grids, chunks or both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.engine.batch import ChunkRows, DecodeRows, RaggedBatch
from core.kvcache.storage import KVStorage, LayerCache
from core.models.base import TargetModel, TargetOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Tokens of one sequence at positions start .. start + len(ids)."""

    seq: int
    start: int
    ids: list[int]


class PagedRunner:
    """A target model with KV pages of its own. Page 0 is the dummy page, the others are shuffled."""

    def __init__(
        self,
        model: TargetModel,
        *,
        num_seqs: int,
        max_len: int,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model, self.page_size = model, page_size
        pages = -(-max_len // page_size)
        self.storage = KVStorage(
            model.kv_layers,
            num_pages=1 + num_seqs * pages,
            page_size=page_size,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        shuffled = 1 + torch.randperm(num_seqs * pages, generator=torch.Generator().manual_seed(3))
        self.page_table = shuffled.view(num_seqs, pages)

    @property
    def caches(self) -> list[LayerCache]:
        return self.storage.layers

    def run(
        self,
        *,
        decode: list[Rows] = [],  # noqa: B006 (never changed)
        chunks: list[Rows] = [],  # noqa: B006
        padding: int = 0,
        feature_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """One forward pass; rows come out as those of `decode`, `padding` rows, those of `chunks`."""
        with torch.inference_mode():
            return self.model.forward(
                self.batch(decode=decode, chunks=chunks, padding=padding),
                self.caches,
                feature_layers=feature_layers,
            )

    def logits(self, **kwargs: object) -> torch.Tensor:
        """[rows, V] of `run`."""
        with torch.inference_mode():
            return self.model.logits(self.run(**kwargs).hidden)  # type: ignore[arg-type]

    def batch(self, *, decode: list[Rows], chunks: list[Rows], padding: int) -> RaggedBatch:
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for rows in decode:
            self._place(rows, ids, positions, slots)
        ids += [0] * padding
        positions += [0] * padding
        slots += [index % self.page_size for index in range(padding)]
        grid = self._grid(decode, padding) if decode else None
        placed = []
        for rows in chunks:
            used = -(-(rows.start + len(rows.ids)) // self.page_size)
            pages = self.page_table[rows.seq, :used]
            placed.append(
                ChunkRows(first_row=len(ids), num_rows=len(rows.ids), start=rows.start, pages=pages)
            )
            self._place(rows, ids, positions, slots)
        return RaggedBatch(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            slot_mapping=torch.tensor(slots),
            decode=grid,
            chunks=tuple(placed),
        )

    def _place(self, rows: Rows, ids: list[int], positions: list[int], slots: list[int]) -> None:
        for offset, token in enumerate(rows.ids):
            position = rows.start + offset
            page = int(self.page_table[rows.seq, position // self.page_size])
            ids.append(token)
            positions.append(position)
            slots.append(page * self.page_size + position % self.page_size)

    def _grid(self, decode: list[Rows], padding: int) -> DecodeRows:
        q_cap = max(len(rows.ids) for rows in decode)
        longest = max(rows.start + len(rows.ids) for rows in decode)
        grid_index = [b * q_cap + i for b, rows in enumerate(decode) for i in range(len(rows.ids))]
        limit = torch.ones(len(decode), q_cap, dtype=torch.int64)
        table = torch.zeros(len(decode), -(-longest // self.page_size), dtype=torch.int64)
        for b, rows in enumerate(decode):
            limit[b, : len(rows.ids)] = torch.arange(rows.start + 1, rows.start + len(rows.ids) + 1)
            used = -(-(rows.start + len(rows.ids)) // self.page_size)
            table[b, :used] = self.page_table[rows.seq, :used]
        return DecodeRows(
            num_rows=len(grid_index) + padding,
            q_cap=q_cap,
            grid_index=torch.tensor(grid_index + [len(decode) * q_cap] * padding),
            kv_limit=limit,
            page_table=table,
        )
