"""Captured shapes: which ones exist, and the static buffers and graph of each.

Pure bucket arithmetic first, then what a plan fills in. Every shape that serving uses was captured at startup; with
graphs off, programs are built when first needed and run the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from core.devices.base import Device, Graph
from core.engine.batch import ChunkRows, StepInputs
from core.engine.feedback import StepTensors
from core.engine.plan import Draws, Shaping, StepExtent, StepPlan, StepShape


def chunk_buckets(limit: int) -> tuple[int, ...]:
    """Padded prompt rows per step: few, since each is captured with every request bucket."""
    return tuple(sorted({min(64, limit), min(256, limit), limit}))


def serving_shapes(
    buckets: tuple[int, ...],
    chunks: tuple[int, ...],
    tiers: Callable[[int], tuple[int, ...]],
    depth: int,
    *,
    shaping: bool,
) -> Iterator[StepShape]:
    """Every shape that a plan can name, largest first so that memory peaks early."""
    kinds = tuple(Shaping) if shaping else (Shaping.NONE,)
    for bucket in reversed(buckets):
        full = tiers(bucket)[-1]
        sizes = [(rows, chunk) for chunk in reversed(chunks) for rows in (full, 0)]
        sizes += [(rows, 0) for rows in reversed(tiers(bucket))]
        for rows, chunk in sizes:
            for kind, draws in product(kinds, Draws):
                if chunk or kind is not Shaping.PROMPT_SCORED:
                    yield StepShape(
                        request_bucket=bucket,
                        target_rows=rows,
                        chunk_rows=chunk,
                        propose_depth=depth,
                        draws=draws,
                        shaping=kind,
                    )
    for chunk, kind in product(reversed(chunks), kinds):
        if kind is not Shaping.SHAPED:
            yield StepShape(request_bucket=0, target_rows=0, chunk_rows=chunk, propose_depth=0, shaping=kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostInputs:
    """Numpy images of a plan, made on the host before the stream gets there. Names are those of StepInputs."""

    arrays: dict[str, np.ndarray]
    chunks: tuple[tuple[int, int, int, np.ndarray], ...]  # first_row, num_rows, start, pages


@dataclass(frozen=True, slots=True, kw_only=True)
class InputGeometry:
    """What the arrays depend on besides the shape."""

    pad_row: int
    page_size: int
    vocab_size: int

    def allowed_shape(self, shape: StepShape) -> tuple[int, int]:
        """Masks exist where something is shaped; elsewhere they have no rows."""
        return (shape.request_bucket if shape.shaping else 0, -(-self.vocab_size // 32))


def padding_inputs(shape: StepShape, geometry: InputGeometry) -> HostInputs:
    """Inputs of a step in which every row is padding: it touches the dummy page only."""
    bucket, chunk = shape.request_bucket, shape.chunk_rows
    return HostInputs(
        arrays={
            "rows": np.full(bucket, geometry.pad_row, np.int64),
            "host_limit": np.zeros(bucket, np.int64),
            "is_decode": np.zeros(bucket, bool),
            "is_final": np.zeros(bucket, bool),
            "final_rows": np.zeros(bucket, np.int64),
            "draft_budget": np.array([shape.target_rows], np.int64),
            "chunk_ids": np.zeros(chunk, np.int64),
            "chunk_next_ids": np.zeros(chunk, np.int64),
            "chunk_positions": np.zeros(chunk, np.int64),
            "chunk_slots": np.arange(chunk, dtype=np.int64) % geometry.page_size,
            "allowed": np.full(geometry.allowed_shape(shape), -1, np.int32),
        },
        chunks=(),
    )


def host_inputs(plan: StepPlan, geometry: InputGeometry) -> HostInputs:
    """Flatten a plan into the arrays of its shape's static buffers."""
    shape, num_decode, sampling = plan.shape, len(plan.decode), plan.sampling_rows
    page_size = geometry.page_size
    arrays = padding_inputs(shape, geometry).arrays
    arrays["rows"][: len(sampling)] = [req_idx for req_idx, _ in sampling]
    arrays["host_limit"][:num_decode] = [row.draft_limit for row in plan.decode]
    arrays["is_decode"][:num_decode] = True
    arrays["draft_budget"][0] = shape.target_rows - num_decode
    for index, words in plan.masks:
        arrays["allowed"][index] = words
    positions = arrays["chunk_positions"]
    chunks, first, final = [], 0, num_decode
    for chunk in plan.chunks:
        count = len(chunk.token_ids)
        here = slice(first, first + count)
        pages = np.array(chunk.pages, np.int64)
        positions[here] = np.arange(chunk.start, chunk.start + count)
        arrays["chunk_ids"][here] = chunk.token_ids
        arrays["chunk_next_ids"][here] = (*chunk.token_ids[1:], chunk.next_token_id or 0)
        arrays["chunk_slots"][here] = (
            pages[positions[here] // page_size] * page_size + positions[here] % page_size
        )
        chunks.append((shape.target_rows + first, count, chunk.start, pages))
        first += count
        if chunk.samples:
            arrays["is_final"][final] = True
            arrays["final_rows"][final] = shape.target_rows + first - 1
            final += 1
    return HostInputs(arrays=arrays, chunks=tuple(chunks))


class StepProgram:
    """One captured shape: static inputs, the graph over them, and the tensors that it leaves its results in."""

    def __init__(
        self,
        shape: StepShape,
        geometry: InputGeometry,
        run: Callable[[StepProgram, StepExtent], None],
        device: Device,
    ) -> None:
        def buffer(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device.torch_device)

        bucket, chunk = shape.request_bucket, shape.chunk_rows
        self.shape = shape
        self.results: StepTensors | None = None  # set by the function that is captured
        self.inputs = StepInputs(
            rows=buffer(bucket),
            host_limit=buffer(bucket),
            is_decode=buffer(bucket, dtype=torch.bool),
            is_final=buffer(bucket, dtype=torch.bool),
            final_rows=buffer(bucket),
            draft_budget=buffer(1),
            chunk_ids=buffer(chunk),
            chunk_next_ids=buffer(chunk),
            chunk_positions=buffer(chunk),
            chunk_slots=buffer(chunk),
            allowed=buffer(*geometry.allowed_shape(shape), dtype=torch.int32),
        )
        self.graph: Graph = device.capture(lambda extent: run(self, extent))

    def fill(self, host: HostInputs) -> None:
        """Copy a plan's arrays into the static buffers; runs on the stream."""
        for name, array in host.arrays.items():
            getattr(self.inputs, name).copy_(torch.from_numpy(array), non_blocking=True)
        device = self.inputs.rows.device
        self.inputs.chunks = tuple(
            ChunkRows(first_row=first, num_rows=count, start=start, pages=torch.from_numpy(pages).to(device))
            for first, count, start, pages in host.chunks
        )
