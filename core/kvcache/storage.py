"""KV tensors by layer kind. Knows pages and slots, not sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedHeads:
    """KV of one grouped-query attention layer: keys and values per KV head."""

    num_kv_heads: int
    head_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One layer's pages: [num_pages, page_size, num_kv_heads, head_dim] each. Page 0 is the dummy page."""

    key: torch.Tensor
    value: torch.Tensor

    def write(self, slot_mapping: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store rows [T, num_kv_heads, head_dim] at slots [T] int64 (page * page_size + offset)."""
        self.key.flatten(0, 1).index_copy_(0, slot_mapping, key)
        self.value.flatten(0, 1).index_copy_(0, slot_mapping, value)


class KVStorage:
    """Pages of all layers of target and draft, allocated once."""

    def __init__(
        self,
        layers: list[GroupedHeads],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.layers = []
        for layer in layers:
            shape = (num_pages, page_size, layer.num_kv_heads, layer.head_dim)
            self.layers.append(
                LayerCache(key=_zeros(shape, dtype, device), value=_zeros(shape, dtype, device))
            )

    @staticmethod
    def bytes_per_page(layers: list[GroupedHeads], *, page_size: int, dtype: torch.dtype) -> int:
        return page_size * sum(layer.bytes_per_token(dtype) for layer in layers)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, since masked positions are multiplied by 0 and must be finite.

    In main memory they come from calloc: pages that no sequence ever uses take no memory and no start-up time.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
