"""Strict reading of calibration settings that a user's file overrides.

See docs/design.md, Startup calibration. Types, ranges and what the file alone can tell. Whether buckets and
tiers are captured, and whether contexts fit the launch, is decided where the launch is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from core.config import ContextConfig
from core.spec.cost_bundle import contexts_from_json, tiers_from_json
from core.spec.costs import MODELS, CostModelName
from core.spec.json_reader import JsonNode

MAX_STEPS = 1_000_000  # a typing error, not a wish
MAX_SEED = 2**63 - 1
# Settings of a measurement that both adaptive modes share.
PROBE_KEYS = (
    "model",
    "request_buckets",
    "contexts",
    "warmup_steps",
    "window_steps",
    "windows_per_point",
    "token_seed",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationOverrides:
    """What a file sets; None leaves the default."""

    model: CostModelName | None = None
    request_buckets: tuple[int, ...] | None = None
    target_graph_rows: dict[int, tuple[int, ...]] | None = None  # request bucket -> tiers, ascending
    contexts: tuple[ContextConfig, ...] | None = None
    warmup_steps: int | None = None
    window_steps: int | None = None
    windows_per_point: int | None = None
    token_seed: int | None = None
    draft_width: int | None = None


def parse_calibration_overrides(node: JsonNode) -> CalibrationOverrides:
    """Read an `adaptive_target_verify_calibration` file; ConfigError with the JSON path of the fault."""
    fields = node.fields(optional=(*PROBE_KEYS, "target_graph_rows", "draft_width"))
    overrides = probe_settings(fields)
    tiers = tiers_from_json(fields["target_graph_rows"]) if "target_graph_rows" in fields else None
    if tiers is not None and overrides.request_buckets is not None:
        for bucket in tiers:
            if bucket not in overrides.request_buckets:
                fields["target_graph_rows"].refuse(f"names bucket {bucket}, which is not in request_buckets")
    return CalibrationOverrides(
        model=overrides.model,
        request_buckets=overrides.request_buckets,
        target_graph_rows=tiers,
        contexts=overrides.contexts,
        warmup_steps=overrides.warmup_steps,
        window_steps=overrides.window_steps,
        windows_per_point=overrides.windows_per_point,
        token_seed=overrides.token_seed,
        draft_width=fields["draft_width"].integer(at_least=1) if "draft_width" in fields else None,
    )


def probe_settings(fields: dict[str, JsonNode]) -> CalibrationOverrides:
    """Read the keys of PROBE_KEYS that are there."""

    def integer(name: str, *, at_least: int, at_most: int = MAX_STEPS) -> int | None:
        return fields[name].integer(at_least=at_least, at_most=at_most) if name in fields else None

    model: CostModelName | None = None
    if "model" in fields:
        model = "sps" if fields["model"].string(MODELS) == "sps" else "additive"
    buckets = (
        fields["request_buckets"].ascending_integers(at_least=1) if "request_buckets" in fields else None
    )
    return CalibrationOverrides(
        model=model,
        request_buckets=buckets,
        contexts=contexts_from_json(fields["contexts"]) if "contexts" in fields else None,
        warmup_steps=integer("warmup_steps", at_least=0),
        window_steps=integer("window_steps", at_least=1),
        windows_per_point=integer("windows_per_point", at_least=1),
        token_seed=integer("token_seed", at_least=0, at_most=MAX_SEED),
    )
