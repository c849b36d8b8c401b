"""The `adaptive_draft_step_config` file: how the depth policy decides and what is measured.

See docs/design.md, Adaptive draft steps. The file enables nothing and brings no costs: those come from this
service's own startup calibration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from core.errors import ConfigError
from core.spec.calibration_config import PROBE_KEYS, CalibrationOverrides, probe_settings
from core.spec.json_reader import JsonNode, read_json

VERSION = 1
MAX_BATCHES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDepthSettings:
    """When the depth policy looks again and what makes it switch."""

    window_size: int = 20  # completed batches per position
    update_interval: int = 5  # completed batches between two scorings of a bucket
    switch_min_gain: float = 0.05  # relative; a switch needs strictly more


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStepConfig:
    """Settings of adaptive draft steps; the defaults are the documented ones."""

    policy: DraftDepthSettings = field(default_factory=DraftDepthSettings)
    calibration: CalibrationOverrides = field(default_factory=CalibrationOverrides)


def load_draft_step_config(source: Path | str | Mapping[str, object]) -> DraftStepConfig:
    """Read a file (or an object that was read already); ConfigError with the JSON path of the fault."""
    if isinstance(source, Mapping):
        return parse_draft_step_config(JsonNode(dict(source), "adaptive_draft_step_config"))
    return parse_draft_step_config(read_json(source))


def parse_draft_step_config(node: JsonNode) -> DraftStepConfig:
    """Read the file's object."""
    if isinstance(node.value, dict):
        _refuse_costs(node.value, node.source, node.path)
    fields = node.fields(required=("version",), optional=("policy", "calibration"))
    if isinstance(fields["version"].value, bool) or fields["version"].value != VERSION:
        fields["version"].refuse(f"must be {VERSION}")
    calibration = CalibrationOverrides()
    if "calibration" in fields:
        section = fields["calibration"]
        if isinstance(section.value, dict):
            _refuse_costs(section.value, section.source, section.path)
        calibration = probe_settings(section.fields(optional=PROBE_KEYS))
    policy = _policy(fields["policy"]) if "policy" in fields else DraftDepthSettings()
    return DraftStepConfig(policy=policy, calibration=calibration)


def _policy(node: JsonNode) -> DraftDepthSettings:
    fields = node.fields(optional=("window_size", "update_interval", "switch_min_gain"))
    default = DraftDepthSettings()
    return DraftDepthSettings(
        window_size=_batches(fields, "window_size", default.window_size),
        update_interval=_batches(fields, "update_interval", default.update_interval),
        switch_min_gain=(
            fields["switch_min_gain"].number(at_least=0)
            if "switch_min_gain" in fields
            else default.switch_min_gain
        ),
    )


def _batches(fields: dict[str, JsonNode], name: str, default: int) -> int:
    return fields[name].integer(at_least=1, at_most=MAX_BATCHES) if name in fields else default


def _refuse_costs(section: Mapping[str, object], source: str, path: str) -> None:
    if "step_cost_models" in section:
        raise ConfigError(
            f"{source}: {path}.step_cost_models: precomputed costs are not supported here; they are measured "
            "at every start, so remove the key"
        )
