"""Step costs from and to files, and the table that serving looks them up in.

See docs/design.md, Startup calibration. A bundle is loaded instead of measuring only where every
compatibility field equals the launch's. A bare table carries no such fields: width and coverage are checked
and the rest is `unverified`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from core.config import Algorithm, CalibrationConfig, ContextConfig
from core.errors import ConfigError
from core.spec.cost_bundle import (
    Compatibility,
    CostBundle,
    CostProfile,
    bundle_from_json,
    canonical_sha256,
    context_from_json,
)
from core.spec.costs import AdditiveCost, CostModel, SpsCost, cost_model_from_json
from core.spec.exclusive_file import check_output_path, write_exclusive
from core.spec.json_reader import JsonNode, read_json

__all__ = [
    "Compatibility",
    "CostBundle",
    "CostProfile",
    "CostProfiles",
    "LoadedCosts",
    "bundle_from_json",
    "canonical_sha256",
    "check_output_path",
    "load_costs",
    "profiles_of",
    "write_bundle",
]

LEGACY_DRAFT_WIDTH = 7  # of bare tables from before `draft_width` was written


@dataclass(frozen=True, slots=True)
class CostProfiles:
    """The immutable table that serving looks costs up in. An entry: context interval, its buckets, costs."""

    entries: tuple[tuple[ContextConfig, frozenset[int], CostModel], ...]

    def lookup(self, max_kv_length: int, request_bucket: int) -> CostModel | None:
        """Costs for a step whose longest upper-bound KV length is `max_kv_length`; None if not calibrated."""
        for context, buckets, costs in self.entries:
            if context.min_kv_length <= max_kv_length <= context.max_kv_length:
                return costs if request_bucket in buckets else None
        return None

    def to_json(self) -> list[dict[str, object]]:
        """Plain values for the broadcast to other ranks."""
        return [
            {"context": dataclasses.asdict(c), "request_buckets": sorted(b), "table": costs.to_json()}
            for c, b, costs in self.entries
        ]


def profiles_from_json(entries: Sequence[Mapping[str, object]]) -> CostProfiles:
    """The inverse of `CostProfiles.to_json`."""
    built = []
    for node in JsonNode(list(entries), "cost profiles").items():
        fields = node.fields(required=("context", "request_buckets", "table"))
        buckets = frozenset(fields["request_buckets"].ascending_integers(at_least=1))
        built.append((context_from_json(fields["context"]), buckets, cost_model_from_json(fields["table"])))
    return CostProfiles(tuple(built))


def profiles_of(bundle: CostBundle) -> CostProfiles:
    """The lookup table of a bundle: what every rank installs, measured or loaded."""
    buckets = frozenset(bundle.calibration.request_buckets)
    return CostProfiles(tuple((p.context, buckets, p.table) for p in bundle.profiles))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCosts:
    """What a cost table file gave. `warnings` are for the log; a bare table is never verified."""

    profiles: CostProfiles
    source: Literal["saved bundle", "bare table"]
    calibration: CalibrationConfig | None  # of the bundle
    warnings: tuple[str, ...] = ()


def write_bundle(path: Path | str, bundle: CostBundle) -> None:
    """Create the file exclusively and atomically; a failure is a CalibrationError naming the path."""
    write_exclusive(path, json.dumps(bundle.to_json(), indent=1, allow_nan=False) + "\n")


def load_costs(
    path: Path | str, *, algorithm: Algorithm, draft_width: int, compatibility: Compatibility
) -> LoadedCosts:
    """Read a bundle or a bare table for this launch; ConfigError with every reason why it does not fit."""
    node = read_json(path)
    content = node.value
    if not isinstance(content, dict):
        node.refuse("must be a cost bundle or a cost table")
    if "mode" in content:
        raise ConfigError(
            f"{path}: $.mode is {content['mode']!r}: costs of adaptive draft steps are measured at every "
            "start and never loaded; give a cost bundle of adaptive_target_verify"
        )
    if "model" in content and "profiles" not in content:
        return _load_bare(node, draft_width=draft_width, compatibility=compatibility)
    bundle = bundle_from_json(node)
    problems = []
    if content["sha256"] != canonical_sha256(content):
        problems.append("its sha256 does not match its content: it was edited or damaged; calibrate again")
    if bundle.algorithm != algorithm:
        problems.append(f"algorithm differs: saved {bundle.algorithm}, current {algorithm}")
    if bundle.draft_width != draft_width:
        problems.append(f"draft_width differs: saved {bundle.draft_width}, current {draft_width}")
    problems += bundle.compatibility.differences(compatibility)
    if problems:
        raise ConfigError([f"cost table {path} cannot be used: {problem}" for problem in problems])
    calibration = dataclasses.replace(bundle.calibration, source="saved bundle")
    return LoadedCosts(profiles=profiles_of(bundle), source="saved bundle", calibration=calibration)


def bare_table_from_json(node: JsonNode) -> tuple[int | None, SpsCost | AdditiveCost]:
    """Read a bare table: its draft width, None in a legacy one, and its costs."""
    costs = cost_model_from_json(node, extra=("draft_width",))
    assert isinstance(node.value, dict)
    if "draft_width" not in node.value:
        return None, costs
    width = JsonNode(node.value["draft_width"], node.source, f"{node.path}.draft_width").integer(at_least=1)
    return width, costs


def _load_bare(node: JsonNode, *, draft_width: int, compatibility: Compatibility) -> LoadedCosts:
    saved_width, costs = bare_table_from_json(node)
    if (saved_width or LEGACY_DRAFT_WIDTH) != draft_width:
        legacy = " (a table without draft_width counts as that)" if saved_width is None else ""
        raise ConfigError(
            f"cost table {node.source} cannot be used: draft_width differs: saved "
            f"{saved_width or LEGACY_DRAFT_WIDTH}{legacy}, current {draft_width}"
        )
    covered, problems = [], []
    for bucket, tiers in compatibility.captured_target_rows.items():
        if costs.has(bucket, tiers[-1]):
            covered.append(bucket)
        elif any(costs.has(bucket, rows) for rows in tiers):
            problems.append(f"it has no cost of full width ({tiers[-1]} rows) for request bucket {bucket}")
    if not covered and not problems:
        buckets = list(compatibility.captured_request_buckets)
        problems.append(f"it covers none of the captured request buckets {buckets}")
    if problems:
        raise ConfigError([f"cost table {node.source} cannot be used: {problem}" for problem in problems])
    everywhere = ContextConfig(prefill_tokens=0, min_kv_length=1, max_kv_length=compatibility.max_model_len)
    return LoadedCosts(
        profiles=CostProfiles(((everywhere, frozenset(covered), costs),)),
        source="bare table",
        calibration=None,
        warnings=(
            f"cost table {node.source} is unverified: a bare table does not say which models, device and "
            "settings it was measured with; write a bundle with adaptive_target_verify_cost_table_output",
        ),
    )
