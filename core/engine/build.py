"""Assembles one rank's engine: device, model, drafter, KV, speculator, worker, scheduler, loop. No serving here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core.builtin import builtin_draft_path
from core.config import EngineConfig
from core.devices.base import Device, open_device
from core.engine.graphs import chunk_buckets, serving_shapes
from core.engine.loop import EngineLoop, StepOutcome
from core.engine.plan import StepExtent, StepShape
from core.engine.request_state import RequestState
from core.engine.scheduler import Scheduler
from core.engine.worker import Worker
from core.errors import ConfigError, RequestRejected
from core.grammar import GrammarVocabulary
from core.kvcache.pages import PagePool
from core.kvcache.storage import KVStorage
from core.models.base import TargetModel
from core.models.builtin import ensure_builtin_model
from core.models.weights import fingerprint, load_target
from core.parallel import RankGroup
from core.shaping import ShapingState
from core.spec.budgets import FullWidth
from core.spec.drafts.base import Drafter
from core.spec.speculator import Speculator
from core.types import Request, RequestOutput
from core.vocabulary import eos_token_ids

Report = Callable[[str, str, int, int], None]  # phase, detail, done, total


def no_report(phase: str, detail: str, done: int, total: int) -> None:
    """Report to nobody."""


@dataclass(slots=True)
class Engine:
    """One replica in this process. `effective` says what it really runs with."""

    config: EngineConfig
    loop: EngineLoop
    device: Device
    target_path: Path
    draft_path: Path | None
    vocab_size: int
    effective: dict[str, Any]
    grammars: GrammarVocabulary | None = None  # None: no request may have a grammar

    def add(self, request: Request) -> None:
        """Queue a request; RequestRejected when it can never run here."""
        if refusal := self.loop.scheduler.refusal(request):
            raise RequestRejected(f"this request can't be served: {refusal}", param="prompt")
        if request.params.is_shaped and self.loop.worker.state.shaping is None:
            raise RequestRejected(
                "penalties, logit_bias, min_tokens, log-probabilities and grammars are not served together with "
                "adaptive target verification"
            )
        matcher = None
        if request.params.grammar is not None:
            if self.grammars is None:
                raise RequestRejected("structured output needs the model's tokenizer.json, and there is none")
            matcher = self.grammars.matcher(request.params.grammar)
            if matcher.error is not None:
                raise RequestRejected(f"response_format: {matcher.error}", param="response_format")
        self.loop.scheduler.add(request, matcher)

    def abort(self, request_id: int) -> RequestOutput | None:
        """End a request; None when there is none of that id any more."""
        return self.loop.scheduler.abort(request_id)

    def advance(self) -> StepOutcome | None:
        """Launch and retire at most one step each."""
        return self.loop.step()

    def step(self) -> list[RequestOutput]:
        """Advance, and return what clients get."""
        outcome = self.loop.step()
        return outcome.outputs if outcome else []

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    def close(self) -> None:
        """Stop the device's stream. In-flight work is finished first, its results are dropped."""
        self.device.close()


def assemble(config: EngineConfig, report: Report = no_report, *, device: Device | None = None) -> Engine:
    """Load models, allocate KV and wire everything up; nothing is captured and nothing calibrated yet.

    device: None opens one; engines that take turns in one process share one, and with it its threads.
    """
    device = device or open_device(
        config.device.kind, num_threads=config.device.num_threads, graph_backend=config.device.graph_backend
    )
    dtype = getattr(torch, config.model.dtype)
    report("load", "target", 0, 2)
    target_path = config.model.path or ensure_builtin_model(lambda line: report("load", line, 0, 2))
    draft_path = _draft_path(config)
    with torch.inference_mode():
        model = load_target(
            target_path, dtype=dtype, device=device.torch_device, max_positions=config.model.max_model_len
        )
        report("load", "draft", 1, 2)
        drafter = _load_drafter(config, draft_path, model, device, dtype)
    report("load", "done", 2, 2)
    speculator = Speculator(
        drafter,
        FullWidth(config.target_tiers, draft_width=config.draft_width),
        page_size=config.cache.page_size,
    )
    report("kv", "", 0, 1)
    loop = wire(config, model, speculator, device, dtype, eos_token_ids(target_path))
    report("kv", f"{loop.scheduler.pages.capacity} pages of {config.cache.page_size} tokens", 1, 1)
    return Engine(
        config=config,
        loop=loop,
        device=device,
        target_path=target_path,
        draft_path=draft_path,
        vocab_size=model.vocab_size,
        effective={},
        grammars=_grammars(config, target_path, model),
    )


def allows_shaping(config: EngineConfig) -> bool:
    """Whether requests may change logits or see them; adaptive target verification excludes it."""
    return config.speculation is None or not config.speculation.adaptive_target_verify


def _grammars(config: EngineConfig, path: Path, model: TargetModel) -> GrammarVocabulary | None:
    if not allows_shaping(config) or not (path / "tokenizer.json").is_file():
        return None
    return GrammarVocabulary(path, vocab_size=model.vocab_size, eos_token_ids=eos_token_ids(path))


def warm_up(engine: Engine, report: Report = no_report) -> dict[StepShape, float]:
    """Capture every shape that serving can need; the seconds of those that were run to warm up."""
    config = engine.config
    if config.device.graph_backend == "none":
        return {}
    chunks = engine.loop.scheduler.chunk_buckets
    shapes = list(
        serving_shapes(
            config.schedule.request_buckets,
            chunks,
            config.target_tiers,
            config.draft_width,
            shaping=allows_shaping(config),
        )
    )
    finished = iter(range(1, len(shapes) + 1))
    extent = StepExtent(context_pages=1, rows_per_sequence=1)
    return engine.loop.worker.warm_up(
        shapes, extent, lambda shape: report("warmup", _shape_name(shape), next(finished), len(shapes))
    )


def _shape_name(shape: StepShape) -> str:
    return f"{shape.request_bucket} sequences, {shape.target_rows} rows, {shape.chunk_rows} prompt rows"


def _draft_path(config: EngineConfig) -> Path | None:
    if config.speculation is None:
        return None
    return config.speculation.draft_model or builtin_draft_path()


def _load_drafter(
    config: EngineConfig, path: Path | None, model: TargetModel, device: Device, dtype: torch.dtype
) -> Drafter | None:
    if config.speculation is None:
        return None
    assert path is not None
    if config.speculation.algorithm != "DSpark":
        raise ConfigError(f"speculative_algorithm {config.speculation.algorithm} is not available yet")
    from core.spec.drafts.dspark import load_dspark

    drafter = load_dspark(
        path,
        model,
        width=config.draft_width,
        dtype=dtype,
        device=device.torch_device,
        # Temporary rows may stand behind the last position that is ever committed.
        max_positions=config.model.max_model_len + config.draft_width,
    )
    if config.speculation.adaptive_target_verify and not drafter.has_confidence:
        raise ConfigError(
            f"enable_adaptive_target_verify needs a draft with a confidence head, and {path} has none; "
            "use another draft or turn it off"
        )
    return drafter


def wire(
    config: EngineConfig,
    model: TargetModel,
    speculator: Speculator,
    device: Device,
    dtype: torch.dtype,
    eos: frozenset[int],
) -> EngineLoop:
    schedule, page_size = config.schedule, config.cache.page_size
    layers = [*model.kv_layers, *speculator.kv_layers]
    page_bytes = KVStorage.bytes_per_page(layers, page_size=page_size, dtype=dtype)
    positions = config.model.max_model_len + config.draft_width
    table_width = -(-positions // page_size)
    num_pages = _num_pages(config, page_bytes, table_width)
    num_rows = 2 * schedule.max_seqs_per_batch
    shaping = None
    if allows_shaping(config):
        shaping = ShapingState(
            num_rows=num_rows + 1,
            num_positions=(table_width + 1) * page_size + speculator.width,
            vocab_size=model.vocab_size,
            device=device.torch_device,
        )
    worker = Worker(
        model=model,
        speculator=speculator,
        storage=KVStorage(
            layers, num_pages=num_pages, page_size=page_size, dtype=dtype, device=device.torch_device
        ),
        state=RequestState(
            num_rows=num_rows,
            table_width=table_width,
            draft_width=speculator.width,
            device=device.torch_device,
            shaping=shaping,
        ),
        device=device,
        group=RankGroup(),
        lag=schedule.lag,
        max_seqs=schedule.request_buckets[-1],
        capture_on_demand=config.device.graph_backend == "none",
    )
    scheduler = Scheduler(
        pages=PagePool(num_pages, page_size),
        max_seqs=schedule.max_seqs_per_batch,
        max_model_len=config.model.max_model_len,
        draft_width=speculator.width,
        prefill_chunk_tokens=schedule.prefill_chunk_tokens,
        request_buckets=schedule.request_buckets,
        chunk_buckets=chunk_buckets(schedule.prefill_chunk_tokens),
        eos_token_ids=eos,
    )
    return EngineLoop(
        scheduler=scheduler,
        speculator=speculator,
        worker=worker,
        lag=schedule.lag,
    )


def _num_pages(config: EngineConfig, page_bytes: int, table_width: int) -> int:
    """Pages for every sequence at full length, within the size that the configuration allows."""
    wanted = config.schedule.max_seqs_per_batch * table_width + 1
    budget = config.cache.kv_cache_bytes
    if budget is None:
        return wanted
    num_pages = min(wanted, budget // page_bytes)
    if num_pages < table_width + 1:
        raise ConfigError(
            f"the KV cache of {budget / 2**30:.2f} GiB holds {num_pages} pages; one sequence of max_model_len "
            f"{config.model.max_model_len} needs {table_width + 1}: raise --kv_cache_gb or lower --max_model_len"
        )
    return num_pages


def draft_fingerprint(engine: Engine) -> str:
    """sha256 over the draft's checkpoint, empty without one."""
    return fingerprint(engine.draft_path) if engine.draft_path else ""
