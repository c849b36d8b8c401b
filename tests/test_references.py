"""Generated documents are what their generators write now."""

from __future__ import annotations

from metrics import reference


def test_metrics_reference_is_up_to_date() -> None:
    assert reference.PATH.read_text(encoding="utf-8") == reference.render(), "run python -m metrics.reference"
