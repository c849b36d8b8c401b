"""Generated documents are what their generators write now."""

from __future__ import annotations

import re
from pathlib import Path

from metrics import reference
from metrics.families import ROUTES
from xspec_cli import reference as command_reference


def test_metrics_reference_is_up_to_date() -> None:
    assert reference.PATH.read_text(encoding="utf-8") == reference.render(), "run python -m metrics.reference"


def test_command_reference_is_up_to_date() -> None:
    text = command_reference.PATH.read_text(encoding="utf-8")
    assert text == command_reference.render(), "run python -m xspec_cli.reference"


def test_the_page_of_the_http_api_has_every_route_and_no_other() -> None:
    text = (Path(__file__).resolve().parents[1] / "docs" / "http.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:GET|POST) /[^`]*)`", text))
    assert named - {"GET /openapi.json", "GET /docs"} == {f"{method} {path}" for path, method in ROUTES}
