"""What `resolve()` must know about this machine and the files that flags name, looked up without torch.

Nothing here judges: an absent file is a fact with a reason. Nothing here uses the network.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from core.api_keys import ApiKeys, find_api_keys
from core.builtin import builtin_draft_path
from core.config import DeviceKind
from core.errors import ConfigError
from core.models.builtin import find_gguf
from core.options import LaunchOptions
from core.spec import json_reader
from core.spec.exclusive_file import check_output_path

# What of the built-in model's config.json matters before the model is converted.
BUILTIN_CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A model directory. `config` is its config.json; if that is None, `problem` says why."""

    path: Path | None
    config: Mapping[str, Any] | None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A JSON file that a flag names. `problem` says why it could not be read, if it could not."""

    source: str  # as the flag has it
    content: Any = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything outside the options that decides whether and how they resolve."""

    devices: tuple[DeviceKind, ...] = ("cpu",)  # present ones, best first
    absent: Mapping[str, str] = field(default_factory=dict)  # device kind -> why it is not there
    cpu_count: int = 1
    memory_bytes: int = 0  # 0: unknown
    fast_bfloat16: bool = False  # of the CPU
    target: Checkpoint
    draft: Checkpoint | None = None
    output_problem: str = ""  # why the cost table output cannot be created, if it cannot
    draft_step_config: Document | None = None
    calibration: Document | None = None
    cost_table: Document | None = None
    api_keys: ApiKeys = field(default_factory=ApiKeys)


def gather_facts(options: LaunchOptions) -> Facts:
    """Look at the machine and at the files that `options` name."""
    devices, absent = find_devices()
    target = find_target(options.model)
    return Facts(
        devices=devices,
        absent=absent,
        cpu_count=usable_cpus(),
        memory_bytes=memory_bytes(),
        fast_bfloat16=has_fast_bfloat16(),
        target=target,
        draft=_find_draft(options),
        output_problem=_output_problem(options.adaptive_target_verify_cost_table_output),
        draft_step_config=_read_document(options.adaptive_draft_step_config),
        calibration=_read_document(options.adaptive_target_verify_calibration),
        cost_table=_read_document(options.adaptive_target_verify_cost_table),
        api_keys=find_api_keys(options.api_key_file, os.environ),
    )


def find_target(model: str | None) -> Checkpoint:
    """The target's directory: a path, a snapshot in the local hub cache, or the built-in model."""
    if model is None:
        try:
            find_gguf()
        except ConfigError as error:
            return Checkpoint(path=None, config=None, problem=str(error))
        return Checkpoint(path=None, config=BUILTIN_CONFIG)
    path = Path(model).expanduser().absolute()
    if path.exists() or not _HUB_ID.fullmatch(model):
        return read_checkpoint(path)
    cache = _hub_cache()
    snapshot = _hub_snapshot(cache, model)
    if snapshot is not None:
        return read_checkpoint(snapshot)
    return Checkpoint(
        path=path,
        config=None,
        problem=f"is no directory; it looks like a Hugging Face hub id, but {cache} has no complete copy and "
        f"xspec never downloads: fetch it with `hf download {model}` or name a local directory",
    )


def read_checkpoint(path: Path) -> Checkpoint:
    """Read `path`/config.json."""
    if not path.exists():
        problem = "does not exist: name a Hugging Face directory (config.json, *.safetensors, tokenizer.json)"
    elif not path.is_dir():
        problem = "is a file: name the Hugging Face directory that holds config.json and *.safetensors"
    else:
        try:
            config = json.loads((path / "config.json").read_bytes())
        except OSError as error:
            problem = f"is no model directory: its config.json cannot be read ({error.strerror})"
        except (ValueError, RecursionError) as error:
            problem = f"is no model directory: its config.json is not valid JSON ({error})"
        else:
            if isinstance(config, dict):
                return Checkpoint(path=path, config=config)
            problem = "is no model directory: its config.json is not an object"
    return Checkpoint(path=path, config=None, problem=problem)


def find_devices() -> tuple[tuple[DeviceKind, ...], dict[str, str]]:
    """Kinds that are present, best first, and why the others are not."""
    present: list[DeviceKind] = []
    absent: dict[str, str] = {}
    if importlib.util.find_spec("torch_npu") is None:
        absent["npu"] = "the package torch_npu is not installed (pip install 'xspec[npu]', and CANN)"
    elif not list(Path("/dev").glob("davinci[0-9]*")):
        absent["npu"] = "there is no /dev/davinci* (no Ascend NPU, or its driver is not loaded)"
    else:
        present.append("npu")
    torch = package_version("torch") or ""
    if torch.endswith("+cpu"):
        absent["cuda"] = f"torch {torch} is built without CUDA"
    elif not list(Path("/dev").glob("nvidia[0-9]*")):
        absent["cuda"] = "there is no /dev/nvidia* (no NVIDIA GPU, or its driver is not loaded)"
    else:
        present.append("cuda")
    return (*present, "cpu"), absent


def package_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def usable_cpus() -> int:
    """CPUs that this process may run on: under taskset fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int:
    """Memory of the machine or of the container's limit, whichever is smaller; 0 if unknown."""
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return total
    return min(total, int(limit)) if limit.isdigit() else total


def has_fast_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 natively. Emulated bfloat16 is slower than float32."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    words = set(flags.group(1).split()) if flags else set()
    return bool(words & {"avx512_bf16", "amx_bf16", "bf16"})


def _find_draft(options: LaunchOptions) -> Checkpoint | None:
    if options.draft_model is not None:
        return read_checkpoint(Path(options.draft_model).expanduser().absolute())
    if options.model is None and options.speculative_algorithm == "DSpark":
        found = read_checkpoint(builtin_draft_path())
        return Checkpoint(path=None, config=found.config, problem=found.problem)
    return None


def _output_problem(name: str | None) -> str:
    return "" if name is None else check_output_path(Path(name).expanduser()) or ""


def _read_document(name: str | None) -> Document | None:
    if name is None:
        return None
    try:
        return Document(source=name, content=json_reader.read_json(Path(name).expanduser()).value)
    except ConfigError as error:
        return Document(source=name, problem=str(error))


def _hub_cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def _hub_snapshot(cache: Path, hub_id: str) -> Path | None:
    """The newest revision that the local cache knows as main, if its config.json is there."""
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    try:
        revision = (repository / "refs" / "main").read_text().strip()
    except OSError:
        return None
    snapshot = repository / "snapshots" / revision
    return snapshot if (snapshot / "config.json").is_file() else None
