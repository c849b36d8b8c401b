"""Token ids that end a sequence, from a checkpoint's own files. No torch."""

from __future__ import annotations

import json
from pathlib import Path


def eos_token_ids(model_path: Path) -> frozenset[int]:
    """eos_token_id of generation_config.json, else of config.json: an id or a list of ids."""
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        if file.exists():
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
    return frozenset()
