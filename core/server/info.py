"""GET /server_info: what this server really runs with. Secrets are not in it."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from core.config import EngineConfig, to_plain
from core.config_codec import config_sha256
from core.server.frontend import Frontend
from metrics.prometheus import ServerMetrics


def server_info(frontend: Frontend, config: EngineConfig, metrics: ServerMetrics) -> dict[str, Any]:
    """Settings with their sources, and of a ready engine its geometry, its costs and what speculation brings.

    `geometry` is null before the engine is ready, `calibration` without adaptive speculation, `speculation`
    without a drafter.
    """
    engine = {name: value for name, value in frontend.effective.items() if name != "settings"}
    calibration = engine.pop("calibration", None)
    return {
        "version": version("xspec"),
        "state": str(frontend.state),
        "phase": frontend.phase,
        "config_sha256": config_sha256(config),
        "configuration": to_plain(config),
        "geometry": engine or None,
        "calibration": calibration,
        "speculation": metrics.speculation() if config.speculation is not None else None,
    }
