"""What combinations of flags are refused, whatever the machine (docs/design.md, Support matrix).

A rule is a generator of full sentences: the flag with its value, what is wrong, what to do. Rules are
independent, so that all violations are reported at once; a rule whose flags have unknown values stays silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from core.facts import Facts
from core.options import RETIRED_FLAGS, Flag, LaunchOptions, flag_table, suggest

Rule = Callable[[LaunchOptions, Facts], Iterator[str]]

ALGORITHMS = ("DSpark", "MTP")
ADAPTIVE_WIDTHS = (5, 7)
DEFAULT_WIDTH = {"DSpark": 7, "MTP": 5}
GRAPH_BACKEND_DEVICE = {"aclgraph": "npu", "cudagraph": "cuda", "cpugraph": "cpu"}
VERIFY_FILES = (
    "adaptive_target_verify_calibration",
    "adaptive_target_verify_cost_table",
    "adaptive_target_verify_cost_table_output",
)


def rule_violations(options: LaunchOptions, facts: Facts) -> list[str]:
    """Every violated rule, in the order of `RULES`."""
    return [problem for rule in RULES for problem in rule(options, facts)]


def shown(options: LaunchOptions, name: str) -> str:
    """A flag as it would be typed."""
    value = getattr(options, name)
    return f"{name}={str(value).lower() if isinstance(value, bool) else value}"


def draft_width(options: LaunchOptions) -> int:
    """W: given, or the algorithm's default; 0 without speculation."""
    if options.num_speculative_tokens is not None:
        return options.num_speculative_tokens
    return DEFAULT_WIDTH.get(options.speculative_algorithm, 0)


def adaptive_switches(options: LaunchOptions) -> list[str]:
    switches = ("enable_adaptive_draft_step", "enable_adaptive_target_verify")
    return [name for name in switches if getattr(options, name)]


def requested_device(options: LaunchOptions) -> tuple[str | None, list[str]]:
    """The device that flags ask for, explicitly or by a backend that only it has; and which flags."""
    asks: list[tuple[str, str]] = []
    if options.device in ("npu", "cuda", "cpu"):
        asks.append((options.device, shown(options, "device")))
    if (backend := options.python_graph_backend) in GRAPH_BACKEND_DEVICE:
        asks.append((GRAPH_BACKEND_DEVICE[backend], shown(options, "python_graph_backend")))
    if options.npu_kernel_backend is not None:
        asks.append(("npu", shown(options, "npu_kernel_backend")))
    if not asks:
        return None, []
    kind = asks[0][0]
    return kind, [text for asked, text in asks if asked == kind]


def retired_names(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    for name in options.retired:
        yield f"{name} is a retired name and has no effect: use {RETIRED_FLAGS[name]}"


def known_values(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    for flag in flag_table():
        value = getattr(options, flag.name)
        if value is None:
            continue
        if flag.choices and value not in flag.choices:
            near = suggest(str(value), flag.choices)
            yield f"{shown(options, flag.name)} is not supported{near}; use one of: {', '.join(flag.choices)}"
        elif isinstance(value, int | float) and not isinstance(value, bool) and not _in_range(flag, value):
            yield f"{shown(options, flag.name)} is out of range: use {_range(flag)}"
    if options.kv_cache_gb == 0:
        yield "kv_cache_gb=0.0 is out of range: use a positive size, or drop it for the default"


def one_switch(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if len(adaptive_switches(options)) == 2:
        yield (
            "enable_adaptive_draft_step=true and enable_adaptive_target_verify=true exclude each other: "
            "enable one of them"
        )


def switch_fits_algorithm(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    algorithm = options.speculative_algorithm
    if algorithm not in (*ALGORITHMS, "none"):
        return
    if options.enable_adaptive_draft_step and algorithm != "MTP":
        hint = "; for DSpark use enable_adaptive_target_verify" if algorithm == "DSpark" else ""
        yield (
            f"enable_adaptive_draft_step=true does not work with speculative_algorithm={algorithm}: "
            f"set speculative_algorithm=MTP{hint}"
        )
    if options.enable_adaptive_target_verify and algorithm == "none":
        yield (
            "enable_adaptive_target_verify=true does not work with speculative_algorithm=none: "
            "set speculative_algorithm=DSpark or MTP"
        )


def adaptive_needs(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    needed = {
        "enable_graph": True,
        "disable_graph_warmup": False,
        "enable_schedule_overlap": True,
        "enable_task_pipeline": True,
    }
    for switch in adaptive_switches(options):
        for name, value in needed.items():
            if getattr(options, name) is not value:
                remedy = f"set {name}={str(value).lower()}"
                yield f"{shown(options, name)} does not work with {switch}=true: {remedy}"


def adaptive_parallelism(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    for switch in adaptive_switches(options):
        sizes = ["cp_size"]
        if switch == "enable_adaptive_draft_step" or options.speculative_algorithm == "MTP":
            sizes.insert(0, "dp_size")
        for name in sizes:
            if getattr(options, name) > 1:
                yield f"{shown(options, name)} does not work with {_mode(options, switch)}: set {name}=1"


def unified_graphs(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if not options.enable_unified_mtp_graph:
        return
    remedy = "set enable_unified_mtp_graph=false"
    if options.speculative_algorithm == "none":
        yield f"enable_unified_mtp_graph=true does nothing with speculative_algorithm=none: {remedy}"
    for switch in adaptive_switches(options):
        if switch == "enable_adaptive_draft_step" or options.speculative_algorithm == "MTP":
            yield f"enable_unified_mtp_graph=true does not work with {_mode(options, switch)}: {remedy}"
    if options.dp_size > 1:
        size = shown(options, "dp_size")
        yield f"enable_unified_mtp_graph=true does not work with {size}: {remedy} or dp_size=1"


def pd_disaggregation(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if options.enable_pd_disaggregation and options.enable_adaptive_draft_step:
        yield (
            "enable_pd_disaggregation=true does not work with enable_adaptive_draft_step=true: "
            "set enable_pd_disaggregation=false"
        )


def greedy_draft(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if options.enable_probabilistic_draft and options.enable_adaptive_target_verify:
        yield (
            "enable_probabilistic_draft=true does not work with enable_adaptive_target_verify=true, "
            "which needs greedy drafts: set enable_probabilistic_draft=false"
        )


def width(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if options.speculative_algorithm not in ALGORITHMS:
        return
    tokens = draft_width(options)
    if options.enable_adaptive_target_verify and tokens not in ADAPTIVE_WIDTHS and tokens >= 1:
        yield (
            f"num_speculative_tokens={tokens} does not work with enable_adaptive_target_verify=true: "
            "use 5 or 7"
        )
    block = _draft_config(options, facts).get("block_size")
    if options.speculative_algorithm == "DSpark" and isinstance(block, int) and tokens > block:
        yield (
            f"num_speculative_tokens={tokens} is more than the draft's block of {block}: "
            f"use at most {block}, or a draft with a longer block"
        )


def draft_is_usable(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    algorithm = options.speculative_algorithm
    if algorithm not in ALGORITHMS:
        return
    if options.draft_model is None and options.model is not None and algorithm == "DSpark":
        yield "speculative_algorithm=DSpark needs a draft for this model: name its directory with draft_model"
    if options.draft_model is None and options.model is None and algorithm == "MTP":
        yield (
            "speculative_algorithm=MTP needs MTP layers, which the built-in model has not: "
            "name a model that has them, or set speculative_algorithm=DSpark"
        )
    config = _draft_config(options, facts)
    if algorithm != "DSpark" or not config:
        return
    name = _draft_name(options)
    if not isinstance(config.get("block_size"), int):
        yield f"{name} is no DSpark draft (its config.json has no block_size): name a DSpark checkpoint"
        return
    if options.enable_adaptive_target_verify and not config.get("enable_confidence_head"):
        yield (
            f"{name} has no confidence head (enable_confidence_head in its config.json), which "
            "enable_adaptive_target_verify=true needs: use a draft with one, or drop the switch"
        )
    for key in ("vocab_size", "hidden_size"):
        target = (facts.target.config or {}).get(key)
        if target is not None and config.get(key) not in (None, target):
            yield (
                f"{name} is for another target: {key} is {config[key]}, the target's is {target}; "
                "use a draft made for this target"
            )


def nothing_ignored(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    """Flags that would do nothing are refused, never ignored."""
    if options.speculative_algorithm == "none":
        for name in ("draft_model", "num_speculative_tokens"):
            if getattr(options, name) is not None:
                yield (
                    f"{shown(options, name)} does nothing with speculative_algorithm=none: drop it, or set "
                    "speculative_algorithm=DSpark or MTP"
                )
        if options.enable_probabilistic_draft:
            yield "enable_probabilistic_draft=true does nothing with speculative_algorithm=none: drop it"
    if options.adaptive_draft_step_config is not None and not options.enable_adaptive_draft_step:
        yield (
            f"{shown(options, 'adaptive_draft_step_config')} does nothing without its switch: "
            "set enable_adaptive_draft_step=true or drop it"
        )
    if options.python_graph_backend in GRAPH_BACKEND_DEVICE and not options.enable_graph:
        yield (
            f"{shown(options, 'python_graph_backend')} does nothing with enable_graph=false: "
            "drop it or set enable_graph=true"
        )
    for name in VERIFY_FILES:
        if getattr(options, name) is not None and not options.enable_adaptive_target_verify:
            yield (
                f"{shown(options, name)} does nothing without its switch: "
                "set enable_adaptive_target_verify=true or drop it"
            )


def cost_table_excludes(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    if options.adaptive_target_verify_cost_table is None:
        return
    for name in ("adaptive_target_verify_calibration", "adaptive_target_verify_cost_table_output"):
        if getattr(options, name) is not None:
            yield (
                f"{shown(options, name)} excludes {shown(options, 'adaptive_target_verify_cost_table')}: "
                "a loaded table is not measured again; drop one of them"
            )


def bucket_limit(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    limit = options.graph_decode_batch_size_limit
    if options.enable_graph and limit is not None and 1 <= limit < options.max_seqs_per_batch:
        yield (
            f"graph_decode_batch_size_limit={limit} is less than {shown(options, 'max_seqs_per_batch')}: "
            "raise it, lower max_seqs_per_batch, or set enable_graph=false"
        )


def backends_fit_device(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    kind, why = requested_device(options)
    backend = options.python_graph_backend
    if kind is None:
        return
    if GRAPH_BACKEND_DEVICE.get(backend, kind) != kind:
        fitting = next(name for name, device in GRAPH_BACKEND_DEVICE.items() if device == kind)
        yield f"python_graph_backend={backend} does not work with {why[0]}: use {fitting} or auto"
    if options.npu_kernel_backend is not None and kind != "npu":
        yield (
            f"{shown(options, 'npu_kernel_backend')} works only with an NPU, not with {why[0]}: "
            "drop it or set device=npu"
        )


def ranks(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    world = options.nnodes * options.nproc_per_node
    shards = options.dp_size * options.cp_size
    if options.nnodes >= 1 and options.node_rank >= options.nnodes:
        yield (
            f"{shown(options, 'node_rank')} does not exist with {shown(options, 'nnodes')}: "
            f"use 0..{options.nnodes - 1}"
        )
    if world >= 1 and shards >= 1 and world % shards:
        yield (
            f"{shown(options, 'dp_size')} times {shown(options, 'cp_size')} does not divide the "
            f"{world} rank(s) of {shown(options, 'nnodes')} and {shown(options, 'nproc_per_node')}: "
            "change one of them"
        )
    host, _, port = options.master_node_addr.rpartition(":")
    if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
        yield f"{shown(options, 'master_node_addr')} is no address: write host:port, such as 127.0.0.1:27000"


def context_length(options: LaunchOptions, facts: Facts) -> Iterator[str]:
    limit = (facts.target.config or {}).get("max_position_embeddings")
    if options.max_model_len is not None and isinstance(limit, int) and options.max_model_len > limit:
        yield f"{shown(options, 'max_model_len')} is beyond the model's positions: use at most {limit}"


RULES: tuple[Rule, ...] = (
    retired_names,
    known_values,
    one_switch,
    switch_fits_algorithm,
    adaptive_needs,
    adaptive_parallelism,
    unified_graphs,
    pd_disaggregation,
    greedy_draft,
    width,
    draft_is_usable,
    nothing_ignored,
    cost_table_excludes,
    bucket_limit,
    backends_fit_device,
    ranks,
    context_length,
)


def _in_range(flag: Flag, value: float) -> bool:
    low = -math.inf if flag.minimum is None else flag.minimum
    high = math.inf if flag.maximum is None else flag.maximum
    return math.isfinite(value) and low <= value <= high


def _range(flag: Flag) -> str:
    if flag.maximum is None:
        return f"at least {flag.minimum:g}" if flag.minimum is not None else "a finite number"
    return f"{flag.minimum:g}..{flag.maximum:g}"


def _mode(options: LaunchOptions, switch: str) -> str:
    if switch == "enable_adaptive_target_verify":
        return f"{switch}=true and speculative_algorithm={options.speculative_algorithm}"
    return f"{switch}=true"


def _draft_config(options: LaunchOptions, facts: Facts) -> dict[str, object]:
    return dict(facts.draft.config) if facts.draft is not None and facts.draft.config is not None else {}


def _draft_name(options: LaunchOptions) -> str:
    return shown(options, "draft_model") if options.draft_model is not None else "the built-in draft"
