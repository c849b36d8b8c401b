"""Files that ship inside the package. Imports no torch."""

from __future__ import annotations

from pathlib import Path


def builtin_draft_path() -> Path:
    """The DSpark draft for SmolLM2-135M-Instruct: a checkpoint directory."""
    return Path(__file__).parent / "smollm2-135m-dspark"
