"""From raw options to the effective configuration, or to everything that is wrong with them.

`resolve` is pure: what it must know of machine and files is in `Facts`, which `gather_facts` collects.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from core.availability import RUNNABLE_DEVICES, device_not_available_yet, not_available_yet
from core.calibration_files import bundle_differences
from core.calibration_plan import (
    CacheRoom,
    calibration_violations,
    effective_calibration,
    kv_values_per_token,
    request_buckets,
)
from core.config import (
    CacheConfig,
    DeviceConfig,
    DeviceKind,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServerConfig,
    SpeculationConfig,
)
from core.errors import ConfigError, DeviceUnavailable
from core.facts import Facts, gather_facts
from core.models.builtin import BUILTIN_NAME
from core.options import LaunchOptions
from core.rules import draft_width, requested_device, rule_violations, shown

__all__ = ["Facts", "gather_facts", "resolve"]

DEFAULT_MAX_MODEL_LEN = 4096  # KV pages for more are asked for explicitly: they cost memory
DEFAULT_KV_SHARE = 0.25  # of the memory, at most, when no KV size is given
GIB = 2**30


def resolve(options: LaunchOptions, facts: Facts, sources: Mapping[str, str]) -> EngineConfig:
    """Make every "auto" concrete, or raise one error that lists all violations.

    Order: rules of the support matrix, what is not available yet, the device, paths. A machine that lacks the
    device asked for ends with one DeviceUnavailable if no rule is broken: nothing else can be tried there.
    """
    rules = rule_violations(options, facts)
    if not rules:  # geometry is only meaningful if the flags that it is made of are
        rules = _geometry_violations(options, facts)
    unavailable = not_available_yet(options)
    paths = _path_problems(options, facts)
    kind, why = requested_device(options)
    if kind is not None and kind not in facts.devices:
        absent = _absent_device(kind, why, facts)
        if not rules:
            raise DeviceUnavailable(absent + _also_not_yet(kind, unavailable))
        raise ConfigError([*rules, *unavailable, absent, *paths])
    problems = [
        *rules,
        *unavailable,
        *device_not_available_yet(options),
        *_memory_problems(options, facts),
        *paths,
    ]
    if problems:
        raise ConfigError(problems)
    config = _build(options, facts, sources)
    if facts.cost_table is not None and (differences := bundle_differences(facts.cost_table, config)):
        raise ConfigError(differences)
    return config


def _geometry_violations(options: LaunchOptions, facts: Facts) -> list[str]:
    """Rules about files and sizes: what calibration would do, and whether the cache can hold one sequence."""
    problems = []
    room = _cache_room(options, facts)
    needed = max_model_len(options, facts)
    if room.tokens is not None and room.tokens < needed:
        problems.append(
            f"{shown(options, 'kv_cache_gb')} holds {room.tokens} tokens, less than one sequence of "
            f"max_model_len={needed}: raise kv_cache_gb or lower max_model_len"
        )
    if options.enable_adaptive_draft_step or options.enable_adaptive_target_verify:
        problems += calibration_violations(options, facts, max_model_len=needed, room=room)
    return problems


def _path_problems(options: LaunchOptions, facts: Facts) -> list[str]:
    problems = []
    if facts.target.problem:
        subject = f"{shown(options, 'model')} " if options.model is not None else ""
        problems.append(subject + facts.target.problem)
    if facts.draft is not None and facts.draft.problem:
        subject = shown(options, "draft_model") if options.draft_model is not None else "the built-in draft"
        problems.append(f"{subject} {facts.draft.problem}")
    documents = {
        "adaptive_draft_step_config": facts.draft_step_config,
        "adaptive_target_verify_calibration": facts.calibration,
        "adaptive_target_verify_cost_table": facts.cost_table,
    }
    for name, document in documents.items():
        if document is not None and document.problem:
            problems.append(f"{shown(options, name)}: {document.problem}; name a readable JSON file")
    if facts.output_problem:
        problems.append(f"adaptive_target_verify_cost_table_output: {facts.output_problem}")
    if facts.api_keys.problem:
        problems.append(facts.api_keys.problem)
    return problems


def _memory_problems(options: LaunchOptions, facts: Facts) -> list[str]:
    if options.kv_cache_gb is None or not 0 < facts.memory_bytes < options.kv_cache_gb * GIB:
        return []
    return [
        f"{shown(options, 'kv_cache_gb')} is more than this machine's {facts.memory_bytes / GIB:.1f} GiB: "
        "lower it"
    ]


def _absent_device(kind: str, why: list[str], facts: Facts) -> str:
    reason = facts.absent.get(kind, "it was not found")
    return (
        f"device {kind} (asked for by {', '.join(why)}) is not on this machine: {reason}; start this launch "
        f"where one is, or use device=cpu without flags for {kind}"
    )


def _also_not_yet(kind: str, unavailable: list[str]) -> str:
    """The rest of the one message: what would stop the launch even where the device is."""
    waiting = [] if kind in RUNNABLE_DEVICES else [f"running on {kind}"]
    waiting += [problem.split(" is not available yet")[0].split(": ")[0] for problem in unavailable]
    return f" (not available yet in this build: {', '.join(waiting)})" if waiting else ""


def max_model_len(options: LaunchOptions, facts: Facts) -> int:
    limit = (facts.target.config or {}).get("max_position_embeddings")
    if options.max_model_len is not None:
        return options.max_model_len
    return min(limit, DEFAULT_MAX_MODEL_LEN) if isinstance(limit, int) else DEFAULT_MAX_MODEL_LEN


def _dtype(options: LaunchOptions, facts: Facts) -> Literal["bfloat16", "float32"]:
    if options.dtype == "auto":
        return "bfloat16" if facts.fast_bfloat16 else "float32"
    return "bfloat16" if options.dtype == "bfloat16" else "float32"


def _cache_room(options: LaunchOptions, facts: Facts) -> CacheRoom:
    """Tokens that an explicit kv_cache_gb holds; unknown without it or for an unknown architecture."""
    per_token = kv_values_per_token(facts.target.config, facts.draft.config if facts.draft else None)
    if options.kv_cache_gb is None or per_token is None:
        return CacheRoom(tokens=None)
    values = options.kv_cache_gb * GIB / (2 if _dtype(options, facts) == "bfloat16" else 4)
    pages = int(values / per_token / options.page_size) - 1  # one page is the dummy
    return CacheRoom(tokens=max(0, pages) * options.page_size)


def _kv_cache_bytes(options: LaunchOptions, facts: Facts) -> int | None:
    """The size asked for, else a share of the memory that this process may use, where that is known."""
    if options.kv_cache_gb is not None:
        return int(options.kv_cache_gb * GIB)
    return int(DEFAULT_KV_SHARE * facts.memory_bytes) or None


def _build(options: LaunchOptions, facts: Facts, sources: Mapping[str, str]) -> EngineConfig:
    model = _model(options, facts)
    return EngineConfig(
        model=model,
        cache=CacheConfig(
            page_size=options.page_size,
            kv_cache_bytes=_kv_cache_bytes(options, facts),
        ),
        schedule=ScheduleConfig(
            max_seqs_per_batch=options.max_seqs_per_batch,
            prefill_chunk_tokens=options.prefill_chunk_tokens,
            request_buckets=request_buckets(options),
            overlap=options.enable_schedule_overlap,
            task_pipeline=options.enable_task_pipeline,
        ),
        speculation=_speculation(options, facts, model.max_model_len),
        parallel=ParallelConfig(
            nnodes=options.nnodes,
            node_rank=options.node_rank,
            nproc_per_node=options.nproc_per_node,
            dp_size=options.dp_size,
            cp_size=options.cp_size,
            master_node_addr=options.master_node_addr,
        ),
        device=_device(options, facts),
        server=_server(options, facts),
        sources=dict(sources),
    )


def _model(options: LaunchOptions, facts: Facts) -> ModelConfig:
    if options.model is None:
        name = BUILTIN_NAME
    else:
        # A hub id keeps its name; a snapshot directory is named after a commit.
        found = facts.target.path
        is_directory = found is not None and found == Path(options.model).expanduser().absolute()
        name = Path(options.model).expanduser().resolve().name if is_directory else options.model
    return ModelConfig(
        path=facts.target.path,
        served_name=options.served_model_name or name,
        dtype=_dtype(options, facts),
        max_model_len=max_model_len(options, facts),
    )


def _speculation(options: LaunchOptions, facts: Facts, context: int) -> SpeculationConfig | None:
    if options.speculative_algorithm == "none":
        return None
    calibration = None
    if options.enable_adaptive_target_verify:
        room = _cache_room(options, facts)
        calibration = effective_calibration(options, facts, max_model_len=context, room=room)
    return SpeculationConfig(
        algorithm="DSpark" if options.speculative_algorithm == "DSpark" else "MTP",
        draft_model=facts.draft.path if facts.draft is not None else None,
        num_speculative_tokens=draft_width(options),
        adaptive_draft_step=options.enable_adaptive_draft_step,
        adaptive_target_verify=options.enable_adaptive_target_verify,
        unified_graph=options.enable_unified_mtp_graph,
        calibration=calibration,
        cost_table=_path(options.adaptive_target_verify_cost_table),
        cost_table_output=_path(options.adaptive_target_verify_cost_table_output),
    )


def _device(options: LaunchOptions, facts: Facts) -> DeviceConfig:
    asked, _ = requested_device(options)
    runnable: list[DeviceKind] = [kind for kind in facts.devices if kind in RUNNABLE_DEVICES]
    kind = next(device for device in runnable if asked in (None, device))
    backends: dict[DeviceKind, Literal["cpugraph", "cudagraph", "aclgraph"]] = {
        "cpu": "cpugraph",
        "cuda": "cudagraph",
        "npu": "aclgraph",
    }
    return DeviceConfig(
        kind=kind,
        graph_backend=backends[kind] if options.enable_graph else "none",
        graph_warmup=options.enable_graph and not options.disable_graph_warmup,
        num_threads=options.num_threads or facts.cpu_count,
        npu_kernel_backend=options.npu_kernel_backend,
    )


def _server(options: LaunchOptions, facts: Facts) -> ServerConfig:
    return ServerConfig(
        host=options.host,
        port=options.port,
        drain_timeout_seconds=options.drain_timeout,
        max_queue=options.max_queue,
        log_format="console"
        if options.log_format == "console"
        else "json"
        if options.log_format == "json"
        else "auto",
        log_level=options.log_level,
        decision_log=_path(options.decision_log),
        metrics_compat="vllm" if options.metrics_compat == "vllm" else "none",
        api_key_digests=facts.api_keys.digests,
    )


def _path(name: str | None) -> Path | None:
    return None if name is None else Path(name).expanduser().absolute()
