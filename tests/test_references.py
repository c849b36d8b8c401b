"""Generated documents are what their generators write now."""

from __future__ import annotations

from metrics import reference
from xspec_cli import reference as command_reference


def test_metrics_reference_is_up_to_date() -> None:
    assert reference.PATH.read_text(encoding="utf-8") == reference.render(), "run python -m metrics.reference"


def test_command_reference_is_up_to_date() -> None:
    text = command_reference.PATH.read_text(encoding="utf-8")
    assert text == command_reference.render(), "run python -m xspec_cli.reference"
