"""Every launch flag as one raw, typed value with its default.

The dataclass *is* the flag table: command line, environment, TOML keys, help and the reference page are
generated from it. Nothing here looks at the machine or judges a combination; that is `core.resolve`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_type_hints

FlagValue = str | int | float | bool


class Group(StrEnum):
    """Headings of the help page, in this order."""

    MODEL = "Model"
    SPECULATION = "Speculation"
    CALIBRATION = "Calibration"
    SCHEDULING = "Scheduling"
    DEVICE = "Device and graphs"
    PARALLELISM = "Parallelism"
    SERVING = "Serving and logs"


# Names of the second switch in older launch scripts. Not aliases: `core.resolve` refuses them by name.
RETIRED_FLAGS = {
    "enable_adaptive_spec_prune": "enable_adaptive_target_verify",
    "enable_adaptive_speculative_decode": "enable_adaptive_target_verify",
}


def _flag(
    default: Any,
    help: str,
    *,
    group: Group,
    choices: tuple[str, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    aliases: tuple[str, ...] = (),
    is_path: bool = False,
) -> Any:
    about = {
        "help": help,
        "group": group,
        "choices": choices,
        "minimum": minimum,
        "maximum": maximum,
        "aliases": aliases,
        "is_path": is_path,
    }
    return field(default=default, metadata={"flag": about})


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Raw values of all flags. None means "not given; resolve() chooses"."""

    # Model
    model: str | None = _flag(
        None,
        "Hugging Face directory of the target. Default: the built-in SmolLM2-135M-Instruct.",
        group=Group.MODEL,
    )
    draft_model: str | None = _flag(
        None,
        "Directory of the draft checkpoint. Default with the built-in model: its own DSpark draft.",
        group=Group.MODEL,
        is_path=True,
    )
    served_model_name: str | None = _flag(
        None, "Name of the model in the HTTP API. Default: the directory's name.", group=Group.MODEL
    )
    backend: str = _flag("llm", "Kind of engine.", group=Group.MODEL, choices=("llm",))
    model_impl: str = _flag("python", "Implementation of the model.", group=Group.MODEL, choices=("python",))
    dtype: str = _flag(
        "auto",
        "Type of weights and activations. auto: bfloat16 where the device computes it fast, else float32.",
        group=Group.MODEL,
        choices=("auto", "bfloat16", "float32"),
    )
    max_model_len: int | None = _flag(
        None,
        "Longest prompt plus output, in tokens. Default: the model's own limit, at most 4096.",
        group=Group.MODEL,
        minimum=2,
    )
    # Speculation
    speculative_algorithm: str = _flag(
        "none", "How drafts are made.", group=Group.SPECULATION, choices=("none", "DSpark", "MTP")
    )
    num_speculative_tokens: int | None = _flag(
        None,
        "Draft tokens per sequence and step: width (DSpark) or maximum depth (MTP). 5 or 7 with "
        "enable_adaptive_target_verify. Default: 7 for DSpark, 5 for MTP.",
        group=Group.SPECULATION,
        minimum=1,
    )
    enable_adaptive_draft_step: bool = _flag(
        False, "Choose how many MTP draft steps run, per decode batch.", group=Group.SPECULATION
    )
    enable_adaptive_target_verify: bool = _flag(
        False, "Choose how many drafted tokens the target verifies, per step.", group=Group.SPECULATION
    )
    enable_probabilistic_draft: bool = _flag(
        False, "Sample drafts instead of taking the most likely token.", group=Group.SPECULATION
    )
    enable_unified_mtp_graph: bool = _flag(
        False, "Capture the complete speculative round as one graph.", group=Group.SPECULATION
    )
    # Calibration
    adaptive_draft_step_config: str | None = _flag(
        None,
        "JSON with policy and calibration of adaptive draft steps.",
        group=Group.CALIBRATION,
        is_path=True,
    )
    adaptive_target_verify_calibration: str | None = _flag(
        None, "JSON that overrides calibration settings.", group=Group.CALIBRATION, is_path=True
    )
    adaptive_target_verify_cost_table: str | None = _flag(
        None, "Saved costs to load instead of measuring at startup.", group=Group.CALIBRATION, is_path=True
    )
    adaptive_target_verify_cost_table_output: str | None = _flag(
        None,
        "Where to save the measured costs; the directory must exist and the file must not.",
        group=Group.CALIBRATION,
        is_path=True,
    )
    # Scheduling
    max_seqs_per_batch: int = _flag(32, "Concurrent sequences in a step.", group=Group.SCHEDULING, minimum=1)
    graph_decode_batch_size_limit: int | None = _flag(
        None,
        "Largest captured request bucket. Default: max_seqs_per_batch.",
        group=Group.SCHEDULING,
        minimum=1,
        aliases=("acl_graph_decode_batch_size_limit",),
    )
    prefill_chunk_tokens: int = _flag(
        512, "Largest number of prompt tokens in one step.", group=Group.SCHEDULING, minimum=1
    )
    enable_schedule_overlap: bool = _flag(
        True, "Plan the next step while one runs: two slots in flight instead of one.", group=Group.SCHEDULING
    )
    enable_task_pipeline: bool = _flag(
        True, "Commit, publish and draft on the device stream behind verification.", group=Group.SCHEDULING
    )
    page_size: int = _flag(16, "Tokens per KV page.", group=Group.SCHEDULING, minimum=1, maximum=1024)
    kv_cache_gb: float | None = _flag(
        None,
        "Memory for KV pages, in GiB. Default: full-length pages for max_seqs_per_batch, capped by memory.",
        group=Group.SCHEDULING,
        minimum=0,
    )
    # Device and graphs
    device: str = _flag(
        "auto",
        "Where the model runs. auto: the best device present that this build can run on.",
        group=Group.DEVICE,
        choices=("auto", "npu", "cuda", "cpu"),
    )
    npu_kernel_backend: str | None = _flag(
        None, "Kernels of NPU layers; only with an NPU.", group=Group.DEVICE, choices=("TORCH",)
    )
    num_threads: int | None = _flag(
        None,
        "CPU threads of a rank. Default: the CPUs this process may use.",
        group=Group.DEVICE,
        minimum=1,
        maximum=1024,  # far more than of use; OpenMP ends the process when it cannot have its threads
    )
    enable_graph: bool = _flag(True, "Capture graphs at startup.", group=Group.DEVICE)
    disable_graph_warmup: bool = _flag(
        False, "Do not run captured graphs before serving.", group=Group.DEVICE
    )
    python_graph_backend: str = _flag(
        "auto",
        "Graph implementation. auto: the one of the device.",
        group=Group.DEVICE,
        choices=("auto", "aclgraph", "cudagraph", "cpugraph"),
    )
    # Parallelism
    nnodes: int = _flag(1, "Machines in this launch.", group=Group.PARALLELISM, minimum=1)
    node_rank: int = _flag(0, "Index of this machine.", group=Group.PARALLELISM, minimum=0)
    nproc_per_node: int = _flag(1, "Ranks that this machine starts.", group=Group.PARALLELISM, minimum=1)
    master_node_addr: str = _flag(
        "127.0.0.1:27000", "host:port where ranks of several machines meet.", group=Group.PARALLELISM
    )
    dp_size: int = _flag(1, "Data-parallel shards.", group=Group.PARALLELISM, minimum=1)
    cp_size: int = _flag(1, "Context-parallel shards.", group=Group.PARALLELISM, minimum=1)
    enable_pd_disaggregation: bool = _flag(
        False, "Prefill and decode on different ranks.", group=Group.PARALLELISM
    )
    # Serving
    host: str = _flag("127.0.0.1", "Address to listen on.", group=Group.SERVING)
    port: int = _flag(
        8000, "Port to listen on; 0 takes a free one.", group=Group.SERVING, minimum=0, maximum=65535
    )
    api_key_file: str | None = _flag(
        None,
        "File with the keys that clients must show as bearer tokens, one a line; XSPEC_API_KEY may hold one "
        "key instead. Default: no key is asked for.",
        group=Group.SERVING,
        is_path=True,
    )
    drain_timeout: float = _flag(
        30.0, "Seconds that running requests get after Ctrl-C.", group=Group.SERVING, minimum=0
    )
    max_queue: int = _flag(
        256, "Requests that may wait; more are answered with 429.", group=Group.SERVING, minimum=1
    )
    log_format: str = _flag(
        "auto",
        "auto: readable on a terminal, else JSON.",
        group=Group.SERVING,
        choices=("auto", "console", "json"),
    )
    log_level: str = _flag(
        "info",
        "Least severe message shown.",
        group=Group.SERVING,
        choices=("debug", "info", "warning", "error"),
    )
    log_dir: str | None = _flag(
        None, "Directory for one log file per rank.", group=Group.SERVING, is_path=True
    )
    metrics_compat: str = _flag(
        "none",
        "vllm: /metrics also has the names that vLLM gives to some of the same facts.",
        group=Group.SERVING,
        choices=("none", "vllm"),
    )
    decision_log: str | None = _flag(
        None,
        "JSON lines with the inputs and outcome of every decision.",
        group=Group.SERVING,
        is_path=True,
    )
    # Not a flag: retired names that a command line, environment or file used. resolve() refuses them.
    retired: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One row of the flag table."""

    name: str
    type: type[FlagValue]
    default: FlagValue | None
    help: str
    group: Group
    choices: tuple[str, ...]
    minimum: float | None
    maximum: float | None
    aliases: tuple[str, ...]
    is_path: bool

    @property
    def envvars(self) -> tuple[str, ...]:
        return tuple(f"XSPEC_{name.upper()}" for name in (self.name, *self.aliases))

    def parse(self, text: str) -> FlagValue:
        """Turn command-line or environment text into a value. ValueError says what was expected."""
        if self.type is bool:
            return parse_bool(text)
        if self.type is str:
            return text
        try:
            return self.type(text)
        except ValueError:
            raise ValueError(f"expected {self.expects}") from None

    def accept(self, value: object) -> FlagValue:
        """Check a typed value (TOML). ValueError says what was expected."""
        if self.type is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, self.type) and (self.type is bool or not isinstance(value, bool)):
            return value
        raise ValueError(f"expected {self.expects}")

    @property
    def expects(self) -> str:
        return {bool: "true or false", int: "a whole number", float: "a number", str: "text"}[self.type]


def parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in ("true", "1", "yes", "on"):
        return True
    if lowered in ("false", "0", "no", "off"):
        return False
    raise ValueError("expected true or false")


@cache
def flag_table() -> tuple[Flag, ...]:
    """All flags in the order of their declaration."""
    hints = get_type_hints(LaunchOptions)
    rows = []
    for entry in fields(LaunchOptions):
        if "flag" not in entry.metadata:
            continue
        hint = hints[entry.name]
        kinds = [kind for kind in get_args(hint) if kind is not type(None)] or [hint]
        default: Any = entry.default
        rows.append(Flag(name=entry.name, type=kinds[0], default=default, **entry.metadata["flag"]))
    return tuple(rows)


@cache
def flags_by_name() -> Mapping[str, Flag]:
    """Every accepted spelling (aliases included, underscores) to its flag."""
    return {name: flag for flag in flag_table() for name in (flag.name, *flag.aliases)}


def suggest(name: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for a near miss, else nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
