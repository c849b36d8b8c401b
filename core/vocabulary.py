"""Token ids that end a sequence, from a checkpoint's own files. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError


def eos_token_ids(model_path: Path) -> frozenset[int]:
    """Every eos_token_id of config.json and generation_config.json: each an id or a list of ids."""
    ids: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        file = model_path / name
        if file.exists():
            try:
                ids |= eos_of(json.loads(file.read_text(encoding="utf-8")))
            except ValueError as error:
                raise ModelLoadError(f"{file}: {error}") from None
    return frozenset(ids)


def eos_of(config: Mapping[str, Any]) -> frozenset[int]:
    """eos_token_id of one configuration file."""
    value = config.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {value!r}")
    return frozenset(ids)
