"""What the device knows of each sequence, by persistent row `req_idx`. Nothing is moved when sequences come and go.

The row behind the last one belongs to padding: its pages are the dummy page and its limit is 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.engine.plan import Admission, PageUpdate
from core.sampling import SamplingRows
from core.shaping import ShapingState


class RequestState:
    """Rows [R] of sequences; R = num_rows + 1. `shaping` is None where no request may ask for it."""

    def __init__(
        self,
        *,
        num_rows: int,
        table_width: int,
        draft_width: int,
        device: torch.device,
        shaping: ShapingState | None = None,
    ) -> None:
        rows = num_rows + 1
        self.shaping = shaping
        self.pad_row = num_rows
        self.draft_width = draft_width

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.anchor_ids = zeros(rows)  # last committed token
        self.positions = zeros(rows)  # its position; num_tokens - 1 while the prompt is being prefilled
        self.limits = zeros(rows)  # total length at which the sequence ends
        self.page_table = zeros(rows, table_width)
        self.drafts = zeros(rows, draft_width)
        self.num_drafts = zeros(rows)
        self.confidence = zeros(rows, draft_width, dtype=torch.float32)
        self.temperature = zeros(rows, dtype=torch.float32)
        self.top_k = zeros(rows)
        self.top_p = zeros(rows, dtype=torch.float32)
        self.min_p = zeros(rows, dtype=torch.float32)
        self.seed = zeros(rows)

    def clear(self) -> None:
        """All rows as at the start; runs on the stream."""
        for tensor in vars(self).values():
            if isinstance(tensor, torch.Tensor):
                tensor.zero_()
        if self.shaping is not None:
            self.shaping.clear()

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Initialise rows. Runs on the stream, behind every step that still reads the row's former tenant."""
        if not admissions:
            return
        rows = torch.from_numpy(np.array([a.req_idx for a in admissions]))
        params = [a.params for a in admissions]
        columns = {
            "positions": np.array([a.num_tokens - 1 for a in admissions]),
            "limits": np.array([a.limit for a in admissions]),
            "num_drafts": np.zeros(len(admissions), np.int64),
            "temperature": np.array([p.temperature for p in params], np.float32),
            "top_k": np.array([p.top_k for p in params]),
            "top_p": np.array([p.top_p for p in params], np.float32),
            "min_p": np.array([p.min_p for p in params], np.float32),
            "seed": np.array([a.seed for a in admissions]),
        }
        for name, values in columns.items():
            column = getattr(self, name)
            column.index_copy_(0, rows.to(column.device), torch.from_numpy(values).to(column.device))
        self.page_table.index_fill_(0, rows.to(self.page_table.device), 0)
        if self.shaping is not None:
            self.shaping.admit(admissions)

    def append_pages(self, updates: Sequence[PageUpdate]) -> None:
        """Write new entries of the page table. Runs on the stream."""
        if not updates:
            return
        rows = np.concatenate([np.full(len(u.pages), u.req_idx) for u in updates])
        columns = np.concatenate([np.arange(u.first_index, u.first_index + len(u.pages)) for u in updates])
        pages = np.concatenate([np.array(u.pages) for u in updates])
        index, device = (torch.from_numpy(rows), torch.from_numpy(columns)), self.page_table.device
        self.page_table.index_put_(tuple(i.to(device) for i in index), torch.from_numpy(pages).to(device))

    def sampling(self, rows: torch.Tensor) -> SamplingRows:
        """Sampling parameters gathered for rows [N]."""
        return SamplingRows(
            temperature=self.temperature[rows],
            top_k=self.top_k[rows],
            top_p=self.top_p[rows],
            min_p=self.min_p[rows],
            seed=self.seed[rows],
        )

    def slots(self, rows: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
        """KV slots of positions [...] of sequences rows [...] (same shape); the caller masks what is out of range."""
        pages = self.page_table[rows, (positions // page_size).clamp(max=self.page_table.shape[1] - 1)]
        return pages * page_size + positions % page_size
