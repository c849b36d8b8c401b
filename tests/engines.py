"""Engines for tests: tiny real models on the CPU device, and a drafter whose accepted counts a test controls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from core.config import (
    CacheConfig,
    CalibrationConfig,
    ContextConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SpeculationConfig,
)
from core.devices.base import open_device
from core.engine.build import Engine, warm_up, wire
from core.kvcache.storage import GroupedHeads, LayerCache
from core.models.weights import load_target
from core.spec.budgets import BudgetPolicy, FullWidth, Tiers
from core.spec.drafts.base import CommittedRows, DraftOutput, DraftRequest
from core.spec.speculator import Speculator
from core.types import Request, SamplingParams
from core.vocabulary import eos_token_ids
from metrics.stats import StepStats


def engine_config(
    model: Path | None,
    *,
    width: int = 0,
    max_seqs: int = 4,
    buckets: tuple[int, ...] = (1, 2, 4),
    lag: int = 2,
    page_size: int = 4,
    max_model_len: int = 96,
    chunk: int = 16,
    graph: str = "cpugraph",
    dtype: str = "float32",
    kv_cache_bytes: int | None = None,
    adaptive: bool = False,
    draft: Path | None = None,
    calibration: CalibrationConfig | None = None,
    cost_table: Path | None = None,
    cost_table_output: Path | None = None,
) -> EngineConfig:
    """An effective configuration as resolve() would make it, with sizes that tests choose."""
    speculation = None
    if width:
        speculation = SpeculationConfig(
            algorithm="DSpark",
            draft_model=draft,
            num_speculative_tokens=width,
            adaptive_draft_step=False,
            adaptive_target_verify=adaptive,
            unified_graph=False,
            calibration=calibration,
            cost_table=cost_table,
            cost_table_output=cost_table_output,
        )
    return EngineConfig(
        model=ModelConfig(path=model, served_name="tiny", dtype=dtype, max_model_len=max_model_len),
        cache=CacheConfig(page_size=page_size, kv_cache_bytes=kv_cache_bytes),
        schedule=ScheduleConfig(
            max_seqs_per_batch=max_seqs,
            prefill_chunk_tokens=chunk,
            request_buckets=buckets,
            overlap=lag == 2,
            task_pipeline=True,
        ),
        speculation=speculation,
        parallel=ParallelConfig(),
        device=DeviceConfig(
            kind="cpu", graph_backend=graph, graph_warmup=True, num_threads=1, npu_kernel_backend=None
        ),
        server=ServerConfig(
            host="127.0.0.1",
            port=0,
            drain_timeout_seconds=5.0,
            max_queue=64,
            log_format="json",
            log_level="warning",
            decision_log=None,
        ),
    )


def tiny_calibration(
    buckets: tuple[int, ...] = (1, 2, 4), *, width: int = 7, model: str = "additive", prefill: int = 8
) -> CalibrationConfig:
    """As few steps as a calibration can have and survive one slow window on a busy machine."""
    rows = {b: tuple(sorted({b, 2 * b, 4 * b, b * (width + 1)})) for b in buckets}
    return CalibrationConfig(
        source="file",
        model=model,
        request_buckets=buckets,
        target_graph_rows=rows,
        contexts=(ContextConfig(prefill_tokens=prefill, min_kv_length=1, max_kv_length=96),),
        warmup_steps=1,
        window_steps=2,
        windows_per_point=3,
        token_seed=1,
    )


def random_tier(tiers: Tiers, *, seed: int) -> Callable[[int, int], int]:
    """A `pick` for ForcedRows: any captured tier that holds every anchor."""
    source = random.Random(seed)
    return lambda bucket, count: source.choice([g for g in tiers(bucket) if g >= count])


class ScriptedDrafter:
    """Drafts the recorded continuation of a sequence, wrong wherever `wrong(position)` says so.

    Sequences are told apart by (position, anchor): record sequences that differ. It keeps a small KV layer of its
    own and writes temporary rows where a drafter may, so that page rules matter.
    """

    lookahead = 0
    feature_layers: tuple[int, ...] = ()
    has_confidence = True

    def __init__(
        self,
        width: int,
        recorded: Sequence[Sequence[int]],
        *,
        vocab_size: int,
        wrong: Callable[[int], bool] = lambda position: False,
        confidence: Callable[[int, int], float] = lambda position, slot: 0.9,
    ) -> None:
        self.width = width
        self.kv_layers = [GroupedHeads(num_kv_heads=1, head_dim=2)]
        self.published: list[tuple[int, int]] = []  # (slot, position) of every row that was not ignored
        self._wrong, self._confidence, self._vocab = wrong, confidence, vocab_size
        self._next: dict[tuple[int, int], list[int]] = {}
        for tokens in recorded:
            for position, token in enumerate(tokens):
                follow = list(tokens[position + 1 : position + 1 + width])
                self._next[position, token] = follow + [0] * (width - len(follow))

    def publish(self, rows: CommittedRows, caches: list[LayerCache]) -> None:
        page_size = caches[0].key.shape[1]
        for slot, position in zip(rows.slot_mapping.tolist(), rows.positions.tolist(), strict=True):
            if slot >= page_size:  # not the dummy page
                self.published.append((slot, position))
        ones = torch.ones(rows.positions.shape[0], 1, 2)
        caches[0].write(rows.slot_mapping, ones, ones * rows.positions[:, None, None])

    def propose(self, request: DraftRequest, caches: list[LayerCache]) -> DraftOutput:
        noise = torch.full((request.draft_slots.numel(), 1, 2), -1.0)
        caches[0].write(request.draft_slots.flatten(), noise, noise)
        tokens, confidence = [], []
        for position, anchor in zip(
            request.anchor_positions.tolist(), request.anchor_ids.tolist(), strict=True
        ):
            drafts = self._next.get((position, anchor), [0] * self.width)
            tokens.append(
                [
                    (token + 1) % self._vocab if self._wrong(position + 1 + slot) else token
                    for slot, token in enumerate(drafts)
                ]
            )
            confidence.append([self._confidence(position, slot) for slot in range(self.width)])
        return DraftOutput(
            token_ids=torch.tensor(tokens), confidence=torch.tensor(confidence, dtype=torch.float32)
        )


def scripted_engine(
    config: EngineConfig, drafter: ScriptedDrafter | None, budget: BudgetPolicy | None = None
) -> Engine:
    """A warmed-up engine over config.model.path with the given drafter instead of a checkpoint's."""
    assert config.model.path is not None
    device = open_device("cpu", num_threads=1, graph_backend=config.device.graph_backend)
    model = load_target(
        config.model.path,
        dtype=getattr(torch, config.model.dtype),
        device=device.torch_device,
        max_positions=config.model.max_model_len,
    )
    speculator = Speculator(
        drafter,
        budget or FullWidth(config.target_tiers, draft_width=config.draft_width),
        page_size=config.cache.page_size,
    )
    dtype = getattr(torch, config.model.dtype)
    loop = wire(config, model, speculator, device, dtype, eos_token_ids(config.model.path))
    engine = Engine(
        config=config,
        loop=loop,
        device=device,
        target_path=config.model.path,
        draft_path=None,
        vocab_size=model.vocab_size,
        effective={},
    )
    warm_up(engine)
    return engine


def adaptive_tiers(width: int) -> Callable[[int], tuple[int, ...]]:
    """The default tiers of a bucket at a width."""
    return lambda b: tuple(
        sorted({b, min(2 * b, b * (width + 1)), min(4 * b, b * (width + 1)), b * (width + 1)})
    )


def greedy(max_tokens: int, **others: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **others})


def random_prompts(count: int, vocab_size: int, *, seed: int = 0, longest: int = 30) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(3, vocab_size) for _ in range(source.randrange(1, longest))] for _ in range(count)
    ]


class Finished:
    """What one request got in the end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.outputs = 0


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    concurrency: int | None = None,
    on_step: Callable[[StepStats], None] = lambda stats: None,
) -> list[Finished]:
    """Run all prompts, at most `concurrency` at once, and check that nothing is left behind."""
    every = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    results = [Finished() for _ in prompts]
    queue = list(enumerate(prompts))
    running = 0
    while queue or engine.has_work:
        while queue and (concurrency is None or running < concurrency):
            index, prompt = queue.pop(0)
            engine.add(Request(request_id=index + 1, prompt_token_ids=tuple(prompt), params=every[index]))
            running += 1
        outcome = engine.advance()
        if outcome is None:
            continue
        on_step(outcome.stats)
        for output in outcome.outputs:
            result = results[output.request_id - 1]
            assert result.reason is None, "output after the end"
            result.tokens += output.token_ids
            result.outputs += 1
            if output.finish_reason is not None:
                result.reason = str(output.finish_reason)
                running -= 1
    engine.loop.scheduler.check_idle()
    return results
