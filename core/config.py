"""The effective configuration: one frozen tree, every "auto" made concrete by `core.resolve.resolve`.

Nothing below is ever half filled in: an `EngineConfig` that exists has passed the whole support matrix.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal

Algorithm = Literal["DSpark", "MTP"]
DeviceKind = Literal["cpu", "cuda", "npu"]
REDACTED = "<redacted>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`path` is a Hugging Face directory, or None for the built-in model (converted into a cache)."""

    path: Path | None
    served_name: str
    dtype: Literal["bfloat16", "float32", "float16"]
    max_model_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    page_size: int  # tokens per KV page
    kv_cache_bytes: int | None  # at most; no more than every sequence at full length needs. None: no limit


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    max_seqs_per_batch: int
    prefill_chunk_tokens: int  # largest number of prompt rows in one step
    request_buckets: tuple[int, ...]  # captured physical request capacities, ascending
    overlap: bool  # two slots in flight (lag 2) or one (lag 1)
    task_pipeline: bool

    @property
    def lag(self) -> int:
        return 2 if self.overlap else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextConfig:
    """One calibration context: prompts of `prefill_tokens`, valid for KV lengths in the interval."""

    prefill_tokens: int
    min_kv_length: int
    max_kv_length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """What startup calibration measures. `source` says where the settings came from."""

    source: Literal["defaults", "preset", "file", "saved bundle", "bare table"]
    model: Literal["additive", "sps"]
    request_buckets: tuple[int, ...]
    target_graph_rows: dict[int, tuple[int, ...]]  # tiers per request bucket, full width included
    contexts: tuple[ContextConfig, ...]
    warmup_steps: int
    window_steps: int
    windows_per_point: int
    token_seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """Present only when a speculative algorithm was asked for."""

    algorithm: Algorithm
    draft_model: Path | None  # None: the draft that ships with the built-in model
    num_speculative_tokens: int  # W (or K for MTP)
    adaptive_draft_step: bool
    adaptive_target_verify: bool
    unified_graph: bool
    calibration: CalibrationConfig | None  # None when nothing adaptive runs
    cost_table: Path | None
    cost_table_output: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    nnodes: int = 1
    node_rank: int = 0
    nproc_per_node: int = 1
    dp_size: int = 1
    cp_size: int = 1
    master_node_addr: str = "127.0.0.1:27000"

    @property
    def world_size(self) -> int:
        return self.nnodes * self.nproc_per_node

    @property
    def tp_size(self) -> int:
        return self.world_size // (self.dp_size * self.cp_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceConfig:
    kind: DeviceKind
    graph_backend: Literal["none", "cpugraph", "cudagraph", "aclgraph"]  # "none" when graphs are off
    graph_warmup: bool
    num_threads: int
    npu_kernel_backend: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    host: str
    port: int
    drain_timeout_seconds: float
    max_queue: int
    log_format: Literal["auto", "console", "json"]
    log_level: str
    decision_log: Path | None
    metrics_compat: Literal["none", "vllm"] = "none"
    # SHA-256 of the keys that clients must show; without any the server is open
    api_key_digests: tuple[str, ...] = field(default=(), repr=False, metadata={"secret": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything that the launcher hands to parent and ranks."""

    model: ModelConfig
    cache: CacheConfig
    schedule: ScheduleConfig
    speculation: SpeculationConfig | None
    parallel: ParallelConfig
    device: DeviceConfig
    server: ServerConfig
    # flag name -> command line, environment, file, default
    sources: dict[str, str] = field(default_factory=dict)

    @property
    def draft_width(self) -> int:
        """W: verified drafts per sequence at full width; 0 without speculation."""
        return self.speculation.num_speculative_tokens if self.speculation else 0

    def target_tiers(self, bucket: int) -> tuple[int, ...]:
        """Physical row counts captured for `bucket`, ascending; the last one is full width."""
        full = bucket * (self.draft_width + 1)
        spec = self.speculation
        if spec is None or not spec.adaptive_target_verify:
            return (full,)
        if spec.calibration is not None and bucket in spec.calibration.target_graph_rows:
            return spec.calibration.target_graph_rows[bucket]
        return default_tiers(bucket, self.draft_width)


def default_tiers(bucket: int, width: int) -> tuple[int, ...]:
    """B, 2B, 4B and full width B(W+1): sorted, distinct, none above full."""
    full = bucket * (width + 1)
    return tuple(sorted({min(rows, full) for rows in (bucket, 2 * bucket, 4 * bucket, full)}))


def without_secrets(config: EngineConfig) -> EngineConfig:
    """Return the configuration as everybody but the HTTP server may have it."""
    return replace(config, server=replace(config.server, api_key_digests=()))


def to_plain(config: Any) -> Any:
    """Turn a config tree into JSON-ready values (paths become strings). Secrets are not shown."""
    if is_dataclass(config) and not isinstance(config, type):
        return {f.name: _shown(f, getattr(config, f.name)) for f in fields(config)}
    if isinstance(config, dict):
        return {str(k): to_plain(v) for k, v in config.items()}
    if isinstance(config, list | tuple):
        return [to_plain(v) for v in config]
    return str(config) if isinstance(config, Path) else config


def _shown(entry: Field[Any], value: Any) -> Any:
    return REDACTED if value and entry.metadata.get("secret") else to_plain(value)
