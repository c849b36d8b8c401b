"""The cost bundle as data and as JSON: fitted step costs with all that says where they hold.

See docs/design.md, Startup calibration. Reading is strict: keys, types, ranges and the bundle's own
consistency. Whether it fits a launch is for `cost_table` to say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from core.config import Algorithm, CalibrationConfig, ContextConfig, EngineConfig
from core.errors import ConfigError
from core.spec.costs import (
    MODELS,
    AdditiveCost,
    CostSample,
    SpsCost,
    cost_model_from_json,
    sample_from_json,
)
from core.spec.json_reader import JsonNode

KIND = "xspec.cost_bundle"
VERSION = 1
CALIBRATION_SOURCES = ("defaults", "preset", "file", "saved bundle", "bare table")


@dataclass(frozen=True, slots=True, kw_only=True)
class Compatibility:
    """What must be equal for saved costs to mean anything here. Every field is compared."""

    target_sha256: str
    draft_sha256: str
    dtype: str
    device: str
    torch: str
    graph_backend: str
    unified_mtp_graph: bool
    tp_size: int
    dp_size: int
    cp_size: int
    world_size: int
    page_size: int
    max_model_len: int
    captured_request_buckets: tuple[int, ...]
    captured_target_rows: Mapping[int, tuple[int, ...]]  # request bucket -> tiers, full width last
    num_threads: int
    attention_backend: str
    enable_schedule_overlap: bool

    def to_json(self) -> dict[str, object]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["captured_request_buckets"] = list(self.captured_request_buckets)
        plain["captured_target_rows"] = _rows_to_json(self.captured_target_rows)
        return plain

    def differences(self, current: Compatibility) -> list[str]:
        """One sentence per field that differs between this saved state and the current launch."""
        saved, now = self.to_json(), current.to_json()
        return [
            f"{name} differs: saved {json.dumps(saved[name])}, current {json.dumps(now[name])}"
            for name in saved
            if saved[name] != now[name]
        ]


def settings_compared(config: EngineConfig) -> dict[str, Any]:
    """The fields of `Compatibility` that the configuration alone decides, before a model is loaded."""
    assert config.speculation is not None
    return {
        "dtype": config.model.dtype,
        "graph_backend": config.device.graph_backend,
        "unified_mtp_graph": config.speculation.unified_graph,
        "tp_size": config.parallel.tp_size,
        "dp_size": config.parallel.dp_size,
        "cp_size": config.parallel.cp_size,
        "world_size": config.parallel.world_size,
        "page_size": config.cache.page_size,
        "max_model_len": config.model.max_model_len,
        "captured_request_buckets": config.schedule.request_buckets,
        "captured_target_rows": {b: config.target_tiers(b) for b in config.schedule.request_buckets},
        "num_threads": config.device.num_threads,
        "enable_schedule_overlap": config.schedule.overlap,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Fitted costs of one context interval, and the samples they came from."""

    context: ContextConfig
    table: SpsCost | AdditiveCost
    max_relative_error: float
    mean_relative_error: float
    samples: tuple[CostSample, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "context": dataclasses.asdict(self.context),
            "table": self.table.to_json(),
            "fit": {
                "max_relative_error": self.max_relative_error,
                "mean_relative_error": self.mean_relative_error,
            },
            "samples": [sample.to_json() for sample in self.samples],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBundle:
    """Everything one calibration found out, with the settings that produced it."""

    algorithm: Algorithm
    draft_width: int
    compatibility: Compatibility
    calibration: CalibrationConfig
    profiles: tuple[CostProfile, ...]

    def to_json(self) -> dict[str, object]:
        """The file's object, sha256 included."""
        content: dict[str, object] = {
            "version": VERSION,
            "kind": KIND,
            "algorithm": self.algorithm,
            "draft_width": self.draft_width,
            "compatibility": self.compatibility.to_json(),
            "calibration": _calibration_to_json(self.calibration),
            "profiles": [profile.to_json() for profile in self.profiles],
        }
        return {**content, "sha256": canonical_sha256(content)}


def canonical_sha256(content: Mapping[str, object]) -> str:
    """SHA-256 over sorted, compact JSON of `content` without its "sha256" key."""
    plain = {key: value for key, value in content.items() if key != "sha256"}
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def bundle_from_json(node: JsonNode) -> CostBundle:
    """Read a bundle's object: keys, types, ranges and its own consistency, but not its sha256."""
    members = node.value if isinstance(node.value, dict) else {}
    for key, expected in (("kind", KIND), ("version", VERSION)):
        value = members.get(key)
        if value != expected or isinstance(value, bool):
            JsonNode(value, node.source, f"{node.path}.{key}").refuse(f"must be {json.dumps(expected)}")
    fields = node.fields(
        required=(
            "version",
            "kind",
            "algorithm",
            "draft_width",
            "compatibility",
            "sha256",
            "calibration",
            "profiles",
        )
    )
    fields["sha256"].string()
    algorithm: Algorithm = "MTP" if fields["algorithm"].string(get_args(Algorithm)) == "MTP" else "DSpark"
    draft_width = fields["draft_width"].integer(at_least=1)
    calibration = _calibration_from_json(fields["calibration"])
    profiles = tuple(_profile_from_json(n) for n in fields["profiles"].items(at_least=1))
    if tuple(p.context for p in profiles) != calibration.contexts:
        fields["profiles"].refuse("must hold one profile per entry of calibration.contexts, in that order")
    for profile, profile_node in zip(profiles, fields["profiles"].items(), strict=True):
        for bucket in calibration.request_buckets:
            if not profile.table.has(bucket, bucket * (draft_width + 1)):
                raise ConfigError(
                    f"{node.source}: {profile_node.path}.table has no cost of full width "
                    f"({bucket * (draft_width + 1)} rows) for request bucket {bucket}"
                )
    return CostBundle(
        algorithm=algorithm,
        draft_width=draft_width,
        compatibility=_compatibility_from_json(fields["compatibility"]),
        calibration=calibration,
        profiles=profiles,
    )


def context_from_json(node: JsonNode) -> ContextConfig:
    """Read one context; its KV interval must not be empty."""
    fields = node.fields(required=("prefill_tokens", "min_kv_length", "max_kv_length"))
    low = fields["min_kv_length"].integer(at_least=1)
    return ContextConfig(
        prefill_tokens=fields["prefill_tokens"].integer(at_least=1),
        min_kv_length=low,
        max_kv_length=fields["max_kv_length"].integer(at_least=low),
    )


def contexts_from_json(node: JsonNode) -> tuple[ContextConfig, ...]:
    """Read a list of contexts whose KV intervals must not overlap."""
    nodes = node.items(at_least=1)
    contexts = tuple(context_from_json(n) for n in nodes)
    for i, context in enumerate(contexts):
        for j, other in enumerate(contexts[:i]):
            if context.min_kv_length <= other.max_kv_length and other.min_kv_length <= context.max_kv_length:
                nodes[i].refuse(f"must not overlap contexts[{j}]")
    return contexts


def tiers_from_json(node: JsonNode) -> dict[int, tuple[int, ...]]:
    """Read {"request bucket": [target rows, ascending]}."""
    return {bucket: n.ascending_integers(at_least=1) for bucket, n in node.int_keys().items()}


def _rows_to_json(rows: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(bucket): list(rows[bucket]) for bucket in sorted(rows)}


def _calibration_to_json(calibration: CalibrationConfig) -> dict[str, object]:
    plain = {f.name: getattr(calibration, f.name) for f in dataclasses.fields(calibration)}
    plain["request_buckets"] = list(calibration.request_buckets)
    plain["target_graph_rows"] = _rows_to_json(calibration.target_graph_rows)
    plain["contexts"] = [dataclasses.asdict(context) for context in calibration.contexts]
    return plain


def _calibration_from_json(node: JsonNode) -> CalibrationConfig:
    fields = node.fields(required=[f.name for f in dataclasses.fields(CalibrationConfig)])
    fields["source"].string(CALIBRATION_SOURCES)
    return CalibrationConfig(
        source="saved bundle",  # where these settings come from now
        model="sps" if fields["model"].string(MODELS) == "sps" else "additive",
        request_buckets=fields["request_buckets"].ascending_integers(at_least=1),
        target_graph_rows=tiers_from_json(fields["target_graph_rows"]),
        contexts=contexts_from_json(fields["contexts"]),
        warmup_steps=fields["warmup_steps"].integer(at_least=0),
        window_steps=fields["window_steps"].integer(at_least=1),
        windows_per_point=fields["windows_per_point"].integer(at_least=1),
        token_seed=fields["token_seed"].integer(at_least=0),
    )


def _profile_from_json(node: JsonNode) -> CostProfile:
    fields = node.fields(required=("context", "table", "fit", "samples"))
    fit = fields["fit"].fields(required=("max_relative_error", "mean_relative_error"))
    return CostProfile(
        context=context_from_json(fields["context"]),
        table=cost_model_from_json(fields["table"]),
        max_relative_error=fit["max_relative_error"].number(at_least=0),
        mean_relative_error=fit["mean_relative_error"].number(at_least=0),
        samples=tuple(sample_from_json(n) for n in fields["samples"].items(at_least=1)),
    )


def _compatibility_from_json(node: JsonNode) -> Compatibility:
    fields = node.fields(required=[f.name for f in dataclasses.fields(Compatibility)])

    def text(name: str) -> str:
        return fields[name].string()

    def count(name: str) -> int:
        return fields[name].integer(at_least=1)

    return Compatibility(
        target_sha256=text("target_sha256"),
        draft_sha256=text("draft_sha256"),
        dtype=text("dtype"),
        device=text("device"),
        torch=text("torch"),
        graph_backend=text("graph_backend"),
        unified_mtp_graph=fields["unified_mtp_graph"].boolean(),
        tp_size=count("tp_size"),
        dp_size=count("dp_size"),
        cp_size=count("cp_size"),
        world_size=count("world_size"),
        page_size=count("page_size"),
        max_model_len=count("max_model_len"),
        captured_request_buckets=fields["captured_request_buckets"].ascending_integers(at_least=1),
        captured_target_rows=tiers_from_json(fields["captured_target_rows"]),
        num_threads=count("num_threads"),
        attention_backend=text("attention_backend"),
        enable_schedule_overlap=fields["enable_schedule_overlap"].boolean(),
    )
